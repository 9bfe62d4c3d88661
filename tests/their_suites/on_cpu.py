"""A plugin of pytest for Lightning's suite: its GPU is the CPU. Tests of two GPUs are left to the
suite, which skips them."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

_ASKED = ("min_cuda_gpus", "standalone", "bf16_cuda")
"""What a test asks for that it need not have here, unless it asks for two GPUs."""
_REASONS = "_runif_reasons"
"""The function that gives the reasons to skip a test."""
_OF_RUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of `infinity run` by which Lightning would take the other ranks to be started."""


def pytest_configure(config: pytest.Config) -> None:
    """What the suite asks for is taken when it is imported."""
    for name in _OF_RUN:
        os.environ.pop(name, None)
    for library in ("fabric", "pytorch"):
        asks = importlib.import_module(f"lightning.{library}.utilities.testing")
        setattr(asks, _REASONS, _granted(getattr(asks, _REASONS)))
        module = importlib.import_module(f"lightning.{library}.accelerators.cuda")
        module.num_cuda_devices = lambda: 2
        gpu = module.CUDAAccelerator
        gpu.setup_device = gpu.teardown = gpu.setup = lambda *_: None
        gpu.parse_devices = staticmethod(_indices)
        gpu.get_parallel_devices = staticmethod(_cpus)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """End the engine that a test has dropped before the suite looks for threads that are left."""
    gc.collect()


def _indices(devices: int | str | list[int]) -> list[int]:
    return devices if isinstance(devices, list) else [*range(int(devices))]


def _cpus(devices: list[int]) -> list[torch.device]:
    return [torch.device("cpu", index) for index in devices]


def _granted(reasons: Callable[..., Any]) -> Callable[..., Any]:
    def asked(**needs: Any) -> Any:
        if needs.get("min_cuda_gpus", 0) < 2:
            needs = {name: value for name, value in needs.items() if name not in _ASKED}
        return reasons(**needs)

    return asked
