"""A plugin of pytest: it lets tests run without the GPUs that they ask for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest


def _unmarked(test: Any) -> Any:
    return test


def pytest_configure(config: pytest.Config) -> None:
    """What the suites ask for is taken when they are imported."""
    ask = importlib.import_module("accelerate.test_utils.testing")
    for name in ("require_non_cpu", "require_multi_device", "require_fp16"):
        setattr(ask, name, _unmarked)
    ask = importlib.import_module("transformers.testing_utils")
    ask.backend_device_count = lambda device: 2
    for name in ("accelerator", "multi_accelerator", "fp16"):
        setattr(ask, f"require_torch_{name}", _unmarked)
    arguments = importlib.import_module("transformers.training_args")
    arguments.is_torch_bf16_gpu_available = lambda: True
    models = importlib.import_module("transformers")
    for name in ("GlueDataset", "GlueDataTrainingArguments"):
        if not hasattr(models, name):  # the suite is older, and imports what it does not use
            setattr(models, name, None)
    libraries = importlib.import_module("trl.import_utils")
    if not hasattr(libraries, "is_joblib_available"):  # the suite is of another version
        libraries.is_joblib_available = lambda: False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """TRL launches scripts of its sources, where names of models are searched, too."""
    for module in {item.module for item in items if hasattr(item.module, "run_command")}:
        module.ROOT = Path.cwd()
        module.run_command = _of_wheel(module.run_command)
    for module in {item.module for item in items if hasattr(item.module, "get_launcher")}:
        module.execute_subprocess_async = _on_cpu(module.execute_subprocess_async)


def _on_cpu(run: Callable[..., Any]) -> Callable[..., Any]:
    """Run an example of transformers, which asks for a GPU unless it is told otherwise."""
    return lambda command, **options: run([*command, "--use_cpu"], **options)


def _of_wheel(run: Callable[..., None]) -> Callable[[Sequence[object], Mapping[str, str]], None]:
    """Run the installed script, which asks for a GPU unless it is told otherwise."""
    installed = Path(str(importlib.import_module("trl").__file__)).parents[1]

    def launch(command: Sequence[object], environment: Mapping[str, str]) -> None:
        words = [*map(str, command), "--use_cpu"]
        of_wheel = [str(installed / word) if word.startswith("trl/") else word for word in words]
        run(of_wheel, environment)

    return launch
