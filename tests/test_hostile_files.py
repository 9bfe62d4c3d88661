"""Files and file systems that are not as they should be: one sentence that says what it is, in bounded time and memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity import native
from infinity.errors import InfinityError

# The compiled modules


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`loading(error)`: every compiled module fails so."""

    def fail(error: Exception) -> None:
        def refuse(name: str) -> None:
            raise error

        monkeypatch.setattr(native.importlib, "import_module", refuse)

    native._load.cache_clear()
    native.cuda.cache_clear()
    yield fail
    monkeypatch.undo()
    native._load.cache_clear()
    native.cuda.cache_clear()


def test_a_module_that_is_not_there_is_called_missing(loading: Any) -> None:
    loading(ModuleNotFoundError("No module named 'infinity._aio'", name="infinity._aio"))
    with pytest.raises(InfinityError, match=r"^the compiled module infinity\._aio is missing; install the package with"):
        native.aio()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ImportError("x.so: cannot open shared object file: Too many open files"), "; raise the limit with `ulimit -n`"),
        (OSError(24, "Too many open files", "x.so"), "; raise the limit with `ulimit -n`"),
        (ImportError("x.so: undefined symbol: y"), ""),
        (ModuleNotFoundError("No module named 'numpy'", name="numpy"), ""),
    ],
)
def test_a_module_that_cannot_be_loaded_says_why(loading: Any, error: Exception, text: str) -> None:
    loading(error)
    expected = f"the compiled module infinity._aio cannot be loaded: {error}{text}"
    with pytest.raises(InfinityError, match=f"^{re.escape(expected)}$"):
        native.aio()


def test_cuda_that_is_not_installed_is_no_error_but_descriptors_are(loading: Any) -> None:
    loading(ImportError("libcudart.so.12: cannot open shared object file: No such file or directory"))
    assert native.cuda() is None
    native.cuda.cache_clear()
    loading(ImportError("libcudart.so.12: cannot open shared object file: Too many open files"))
    with pytest.raises(InfinityError, match="_cuda cannot be loaded"):
        native.cuda()


EXHAUSTED = """
import os, resource
from infinity import native

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
kept = []
try:
    while True:
        kept.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
for attempt in (native.aio, lambda: native.make_engine("posix"), lambda: native.make_engine("auto")):
    try:
        attempt()
        print("made")
    except native.InfinityError as error:
        print(error)
    os.close(kept.pop())
for _ in range(8):
    os.close(kept.pop())
native.make_engine("auto").close()
print("fine")
"""


def test_exhausted_descriptors_are_called_so_and_nothing_is_remembered() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(infinity.__file__).parents[1])}
    output = subprocess.run([sys.executable, "-c", EXHAUSTED], env=environment, capture_output=True, text=True, check=True).stdout
    first, *others, last = output.splitlines()
    assert first.endswith("Too many open files; raise the limit with `ulimit -n`") and "_aio cannot be loaded" in first
    assert "missing" not in output and last == "fine" and len(others) == 2


def test_the_log_of_cufile_is_not_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.tempfile, "gettempdir", lambda: str(tmp_path))
    ours = tmp_path / f"cufile-{os.getuid()}.log"
    assert native._cufile_log() == native._cufile_log() == str(ours)
    ours.unlink()
    ours.symlink_to(tmp_path / "precious")
    assert native._cufile_log() == os.devnull
    assert not (tmp_path / "precious").exists()
