"""What the report shows as spans, a profiler can see as ranges: the same lanes and names, and each
that begins ends."""

from __future__ import annotations

import itertools
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity import device
from infinity.observe import Ranges, Recorder
from support.budgets import ROOMY
from support.configs import config_of
from support.models import text_batch, transformer
from support.probe import Probe

pytestmark = pytest.mark.usefixtures("one_thread")


class Profiler:
    """Every range, by what `begin` gave for it."""

    def __init__(self) -> None:
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self.open: dict[int, str] = {}
        self.closed: Counter[str] = Counter()

    def begin(self, text: str) -> int:
        with self._lock:
            number = next(self._numbers)
            self.open[number] = text
            return number

    def end(self, number: int) -> None:
        with self._lock:
            self.closed[self.open.pop(number)] += 1  # once


@pytest.fixture
def profiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Profiler]:
    profiler = Profiler()
    monkeypatch.setattr(
        sys.modules["infinity.build"],
        "profiler_ranges",
        lambda: Ranges(profiler.begin, profiler.end),
    )
    yield profiler
    assert not profiler.open, "begun and never ended"


def spans(engine: infinity.Engine) -> Counter[str]:
    return Counter(f"{span.lane}: {span.name}" for span in engine.recorder.spans())


def step(model: Any, optimizer: Any, number: int, micro_batches: int) -> None:
    if micro_batches == 1:
        model(**text_batch(number)).loss.backward()
    else:
        infinity.accumulate(model, [text_batch(number + n) for n in range(micro_batches)])
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("update", ["speculative", "exact", "delayed"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_every_span_is_a_range(
    tmp_path: Path, profiler: Profiler, update: str, micro_batches: int
) -> None:
    config = config_of(nvme=tmp_path, device="cpu", update=update, delayed_after=0, **ROOMY)
    model = infinity.wrap(transformer(), config)
    with infinity.engine(model) as engine:
        optimizer = infinity.AdamW(model.parameters(), max_grad_norm=1e9)
        for number in range(4):
            step(model, optimizer, number, micro_batches)
        engine.drain()
        Probe(engine).come_to_rest()
        assert not profiler.open
        assert profiler.closed == spans(engine)
        lanes = {text.partition(":")[0] for text in profiler.closed}
        assert {"model", "compute", "adam", "nvme read", "nvme write"} <= lanes
        assert any(lane.startswith("wait ") for lane in lanes)


def test_a_range_ends_where_a_forward_or_a_backward_fails(
    tmp_path: Path, profiler: Profiler, smallest: Any
) -> None:
    budgets = smallest(transformer(), nvme=tmp_path, device="cpu") | {"cache": 0}
    model = infinity.wrap(transformer(), config_of(nvme=tmp_path, device="cpu", **budgets))
    with infinity.engine(model) as engine:
        block = model.get_submodule("blocks.1.up")

        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                raise ArithmeticError("in backward")

        # torch's hooks run after the first only
        for count, failure in enumerate((ArithmeticError, KeyboardInterrupt), start=1):

            def fail(module: Any, args: Any, failure: Any = failure) -> None:
                raise failure("in forward")

            handle = block.register_forward_pre_hook(fail)
            with pytest.raises(failure, match="in forward"):
                model(**text_batch(0))
            handle.remove()
            Probe(engine).end_interrupted()
            assert not [text for text in profiler.open.values() if not text.startswith("nvme")]
            assert (
                profiler.closed["model: forward"]
                == profiler.closed["compute: forward blocks.1"]
                == count
            )
        handle = block.register_forward_hook(lambda module, args, output: Fails.apply(output))
        loss = model(**text_batch(0)).loss
        with pytest.raises(ArithmeticError, match="in backward"):
            loss.backward()
        handle.remove()
        model(**text_batch(0)).loss.backward()
        Probe(engine).come_to_rest()
        assert not profiler.open
        assert not spans(engine) - profiler.closed
        profiler.closed.clear()
        engine.zero_grad()
        engine.io.set_faults(error_fraction=1.0)
        with pytest.raises(infinity.NvmeError):
            model(**text_batch(0))
        engine.io.set_faults()
    assert "model: forward" in profiler.closed


def test_without_a_profiler_nothing_is_made() -> None:
    recorder = Recorder()
    assert recorder.show("adam", "x") is None
    with recorder.range("adam", "x"), recorder.span("adam", "y"):
        recorder.hide(None)
    assert [span.name for span in recorder.spans()] == ["y"]


def test_a_span_is_a_range_also_when_its_body_fails() -> None:
    profiler = Profiler()
    recorder = Recorder(Ranges(profiler.begin, profiler.end))
    for make in (recorder.span, recorder.range):
        with pytest.raises(OSError, match="gone"), make("nvme read", "block.0"):
            assert list(profiler.open.values()) == ["nvme read: block.0"]
            raise OSError("gone")
    assert profiler.closed == {"nvme read: block.0": 2} and not profiler.open


def test_they_are_asked_for_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for off in ("", "0"):
        monkeypatch.setenv("INFINITY_NVTX", off)
        assert device.profiler_ranges() is None
    monkeypatch.setenv("INFINITY_NVTX", "1")
    texts: list[str] = []
    monkeypatch.setattr(
        torch.cuda.nvtx, "range_start", lambda text: texts.append(text) or len(texts)
    )
    monkeypatch.setattr(torch.cuda.nvtx, "range_end", lambda number: texts.append(f"end {number}"))
    ranges = device.profiler_ranges()
    assert ranges is not None
    texts.clear()
    recorder = Recorder(ranges)
    recorder.hide(recorder.show("adam", "block.0"))
    assert texts == ["adam: block.0", "end 1"]

    def none(text: str) -> int:
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setattr(torch.cuda.nvtx, "range_start", none)
    with pytest.raises(
        infinity.ConfigError, match="INFINITY_NVTX is set, but this torch has no NVTX"
    ):
        device.profiler_ranges()
