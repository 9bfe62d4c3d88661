"""A plugin of pytest: it writes what became of each test, and of each file that cannot be imported,
to the file that `OUTCOMES` names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

_OUTCOMES: dict[str, tuple[str, str]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The worst of the three phases counts."""
    if report.outcome == "passed" and (report.when != "call" or report.nodeid in _OUTCOMES):
        return
    text = str(report.longrepr or "").strip()
    _OUTCOMES[report.nodeid] = (report.outcome, text.splitlines()[-1] if text else "")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """The last line is that of the error that a file raises when it is imported."""
    if report.failed:
        _OUTCOMES[report.nodeid] = (report.outcome, str(report.longrepr).strip().splitlines()[-1])


def pytest_sessionfinish(session: pytest.Session) -> None:
    Path(os.environ["OUTCOMES"]).write_text(json.dumps(_OUTCOMES, indent=1))
