"""What several tests of commands need."""

from __future__ import annotations

import pytest

from infinity.cli import figures


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the pictures of a report away, which take a second of each run. `test_report.py` draws
    them, and so do the ranks of `test_torchrun.py`."""
    monkeypatch.setattr(figures, "svg", lambda figure, label: f"<svg>{label}</svg>")
