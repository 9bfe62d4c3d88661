"""A plugin of pytest: it lets tests run without the GPUs that they ask for, and writes what became
of each test to the file that `OUTCOMES` names."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

_OUTCOMES: dict[str, tuple[str, str]] = {}


def _unmarked(test: Any) -> Any:
    return test


def pytest_configure(config: pytest.Config) -> None:
    """What the suites ask for is taken when they are imported."""
    ask = importlib.import_module("accelerate.test_utils.testing")
    for name in ("require_non_cpu", "require_multi_device", "require_fp16"):
        setattr(ask, name, _unmarked)
    importlib.import_module("transformers.testing_utils").backend_device_count = lambda device: 2
    libraries = importlib.import_module("trl.import_utils")
    if not hasattr(libraries, "is_joblib_available"):  # the suite is of an earlier version
        libraries.is_joblib_available = lambda: False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """TRL's scripts ask for a GPU unless they are told otherwise."""
    for module in {item.module for item in items if hasattr(item.module, "run_command")}:
        module.run_command = _on_cpu(module.run_command)


def _on_cpu(run: Any) -> Any:
    return lambda command, environment: run([*command, "--use_cpu"], environment)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The worst of the three phases counts."""
    if report.outcome == "passed" and (report.when != "call" or report.nodeid in _OUTCOMES):
        return
    text = str(report.longrepr or "").strip()
    _OUTCOMES[report.nodeid] = (report.outcome, text.splitlines()[-1] if text else "")


def pytest_sessionfinish(session: pytest.Session) -> None:
    Path(os.environ["OUTCOMES"]).write_text(json.dumps(_OUTCOMES, indent=1))
