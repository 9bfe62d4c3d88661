"""Runs the tests' engines on another compute device: with INFINITY_TEST_DEVICE=cuda, =discrete for
the one that `discrete` plays, or =queued for the one of `queued`.

Without the variable nothing changes. With it, every `Config` that says "cpu" or nothing means that
device, and a wrapped model takes its inputs there, so tests need not know. Only files that compare
runs of the engine with each other, or bytes, can run so (`FILES`): the others compare with numbers
that plain PyTorch gave on the CPU, or never run a model.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

import infinity
from infinity.config import Config, Tuning
from infinity.device import CUBLAS_WORKSPACE, DETERMINISTIC_WORKSPACES

KIND = os.environ.get("INFINITY_TEST_DEVICE", "")
FILES = (
    "placement/test_cache.py",
    "checkpoint/test_checkpoint.py",
    "optim/test_delayed_updates.py",
    "parity/test_formats.py",
    "parity/test_placement.py",
    "optim/test_steps.py",
    "tiers/test_traffic.py",
    "modules/test_vertical.py",
)
UNIFIED_MEMORY_ONLY = (
    "test_the_cache_takes_what_is_left_and_no_more",
    "test_staging_grows_with_what_is_left_for_it",
)
"""Tests that state how host memory is divided where the compute device shares it: elsewhere
gradients pass through staging."""
QUEUED_FILES = (
    "engine/test_queued_device.py",
    "optim/test_steps.py",
    "parity/test_placement.py",
    "tiers/test_traffic.py",
)
"""What runs on `queued`, as far as there is time."""
NOT_ON_QUEUED = (
    "test_sparse_gradients_are_taken",
    "test_a_model_that_is_only_called_in_parts_is_traced_step_by_step",
    "test_pieces_of_any_length",
    "test_io_engine_copy_on_write_and_stripes",
    "test_instruction_sets_and_threads",
)
"""Tests with sparse tensors, which `queued` lacks. Tests that bring no inputs to the device. Tests
whose parameters change what the host does with its drives and kernels, and no copy that queues."""
PACE: dict[str, Any] = {"random": True, "compute_us": 20, "copy_us": 100}
REASON = (
    f"INFINITY_TEST_DEVICE={KIND}: compares with numbers of the CPU, or runs no model "
    "(see tests/support/elsewhere.py)"
)


def runs(file: str, test: str) -> bool:
    """Whether `test` of `file`, relative to tests/, can run where the tests run now."""
    files, without = FILES, UNIFIED_MEMORY_ONLY
    if KIND == "queued":
        files, without = QUEUED_FILES, UNIFIED_MEMORY_ONLY + NOT_ON_QUEUED
    return not KIND or (file in files and not test.startswith(without))


def move() -> None:
    """Do what the variable says; called once, before any test is imported."""
    if KIND not in ("", "cuda", "discrete", "queued"):
        raise ValueError(
            f"INFINITY_TEST_DEVICE={KIND!r} is neither 'cuda', 'discrete' nor 'queued'"
        )
    if KIND == "discrete":
        from support.discrete import DiscreteDevice

        vars(sys.modules["infinity.build"])["ComputeDevice"] = DiscreteDevice
        _configure()
    elif KIND == "queued":
        from support import queued

        queued.load().set_pace(**PACE)
        vars(sys.modules["infinity.build"])["ComputeDevice"] = queued.QueuedDevice
        _configure()
        _bring_inputs()
        wrap = infinity.wrap
        vars(infinity)["wrap"] = lambda model, *rest, **named: wrap(
            queued.move(model), *rest, **named
        )
    elif KIND == "cuda":
        os.environ.setdefault(CUBLAS_WORKSPACE, DETERMINISTIC_WORKSPACES[0])
        _configure(device="cuda")
        _bring_inputs()


def _configure(**always: Any) -> None:
    """States are where tests say, for they count what moves: nothing else is kept on a device that
    has room. Runs that are compared have the same numbers."""
    make = Config.__init__

    def config(self: Config, **values: Any) -> None:
        given = values.pop("tuning", {})
        tuning = given.model_dump(exclude_unset=True) if isinstance(given, Tuning) else given
        fields = {"deterministic": KIND == "cuda", **values}
        make(self, **fields, tuning={"gpu_cache": 0, **tuning, **always})

    Config.__init__ = config  # type: ignore[method-assign]


def _bring_inputs() -> None:
    """Let wrapped models take their inputs to their device."""
    make_engine = infinity.Engine.__init__

    def engine(
        self: infinity.Engine, model: torch.nn.Module, *arguments: Any, **options: Any
    ) -> None:
        make_engine(self, model, *arguments, **options)
        device = self.device

        def there(value: Any) -> Any:
            return value.to(device) if isinstance(value, torch.Tensor) else value

        def bring(module: Any, inputs: Any, named: Any) -> Any:
            return tuple(map(there, inputs)), {name: there(value) for name, value in named.items()}

        model.register_forward_pre_hook(bring, with_kwargs=True)

    infinity.Engine.__init__ = engine  # type: ignore[method-assign]
