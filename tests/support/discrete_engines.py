"""Engines on a compute device with memory of its own, and what they may not overwrite."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.device import Mark
from infinity.tiers.block import Block
from infinity.tiers.resident import Residency
from support.configs import config_of
from support.discrete import DiscreteDevice
from support.models import text_batch, transformer

STEPS = 4
LEAST: dict[str, Any] = {
    "gpu_memory": 0,
    "cpu_memory": "2MiB",
    "cache": 0,
    "poison": True,
    "gpu_direct": "off",
}


class Places:
    """Until when the model may use each byte of the compute device: a copy there comes after
    that."""

    def __init__(self, device: DiscreteDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device, self.lock, self.uploads = device, threading.Lock(), 0
        self.used: dict[tuple[int, int], int | None] = {}  # None: it is in use now
        real_wait, real_release = Residency.wait, Residency.release
        device.on_upload, device.on_update = self.check, self.check_update
        self.updates = 0

        def wait(store: Residency, block: Block) -> torch.Tensor:
            tensor = real_wait(store, block)
            with self.lock:
                self.used[tensor.data_ptr(), tensor.data_ptr() + tensor.numel()] = None
            return tensor

        def release(store: Residency, block: Block) -> None:
            last = block.copy.pins == 1 and block.copy.lease is not None
            real_release(store, block)
            if last and block.copy.lease is not None:
                begin = block.copy.lease.tensor.data_ptr()
                with self.lock:
                    self.used[begin, begin + block.copy.lease.tensor.numel()] = device.mark().number

        monkeypatch.setattr(Residency, "wait", wait)
        monkeypatch.setattr(Residency, "release", release)

    def check(self, target: torch.Tensor, after: Mark | None) -> None:
        begin, end = target.data_ptr(), target.data_ptr() + target.numel()
        self.uploads += 1
        with self.lock:
            for (first, last), number in self.used.items():
                if begin < last and first < end:
                    assert number is not None, "a copy into what the model uses"
                    # `release` marks before the test does, which no work comes between.
                    assert after is not None and after.number >= number - 1, (
                        "a copy that may overtake the model"
                    )

    def check_update(self, after: Mark | None) -> None:
        assert after is not None
        self.updates += 1


Wrap = Callable[..., infinity.Engine]


@contextmanager
def wrapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wrap]:
    """Gives `wrap(discrete, model, **config)`: an engine on a discrete device, or on one that
    shares the host.

    The model is a transformer by default.
    """
    engines: list[tuple[Any, infinity.Engine]] = []

    def make(
        discrete: bool = True, model: torch.nn.Module | None = None, **options: Any
    ) -> infinity.Engine:
        folder = tmp_path / str(len(engines))
        folder.mkdir(exist_ok=True)  # one that was refused may have left it
        config = LEAST | {"nvme": folder, "device": "cpu", "gpu_cache": 0} | options
        with monkeypatch.context() as patch:
            if discrete:
                patch.setattr(sys.modules["infinity.build"], "ComputeDevice", DiscreteDevice)
            while True:
                try:
                    model = infinity.wrap(
                        transformer() if model is None else model, config_of(**config)
                    )
                    break
                except (
                    infinity.BudgetError
                ) as error:  # where there is none, the least memory that works
                    ((key, least),) = re.findall(r"smallest (\w+) that works is (\d+)", str(error))
                    config[key] = int(least)
        engines.append((model, infinity.engine(model)))
        return infinity.engine(model)

    yield make
    for _, engine in engines:
        engine.close()


def train(engine: infinity.Engine, accumulation: int = 1) -> dict[str, Any]:
    optimizer = infinity.AdamW(engine.model.parameters(), lr=1e-2, max_grad_norm=1.0)
    losses, norms = [], []
    for step in range(STEPS):
        for micro_batch in range(accumulation):
            loss = engine.model(**text_batch(accumulation * step + micro_batch)).loss
            (loss / accumulation).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    states = optimizer.state_dict()["state"]
    tensors = {
        f"{number}.{name}": value
        for number, state in states.items()
        for name, value in state.items()
    }
    return {"losses": losses, "norms": norms, **engine.state_dict(), **tensors}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (
            torch.equal(found[name], value)
            if isinstance(value, torch.Tensor)
            else found[name] == value
        ), name
