"""An integration without its library."""

from __future__ import annotations

import importlib

import pytest

from infinity.integrations.required import required


def test_a_missing_library_names_its_extra() -> None:
    wanted = r"absent is not installed.*pip install 'zero-infinity\[trainer\]'"
    with pytest.raises(ModuleNotFoundError, match=wanted), required("absent", "trainer"):
        importlib.import_module("absent.part")


def test_what_the_library_lacks_is_told_as_it_is() -> None:
    as_it_is = pytest.raises(ModuleNotFoundError, match="No module named 'other'")
    with as_it_is, required("absent", "trainer"):
        importlib.import_module("other")
