"""Micro-batches that pass each unit together give the bits of micro-batches one after the other,
and move parameters once.

Everything lives on NVMe with the smallest budgets, and freed slots are poisoned, so a stale view
shows.
"""

from __future__ import annotations

import contextvars
import functools
import json
import os
import re
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import infinity
from infinity.modules.interleave import Interleaver
from infinity.placement.spec import Kind
from support.configs import config_of
from support.models import FAMILIES, text_batch, transformer
from support.probe import Probe, assert_unused
from support.rank_group import RANKS, run_ranks

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(120)]

WIDTH = 32
MEMORY = {
    "parameters": "gpu",
    "optimizer": "cpu",
    "gradients": "cpu",
    "gpu_memory": 1 << 30,
    "cpu_memory": 1 << 30,
}
Build = Callable[[], nn.Module]
Batch = Callable[[int], Any]


def wrap(model: nn.Module, folder: Path, room: int = 1, **config: Any) -> nn.Module:
    """Wrap with the smallest budgets, the compute device's times `room`."""
    budgets = {"gpu_memory": 1, "cpu_memory": 1}
    while True:
        try:
            return infinity.wrap(
                model, config_of(**{"nvme": [folder], "poison": True} | budgets | config)
            )
        except infinity.BudgetError as error:
            name, smallest = re.search(r"smallest (\w+) that works is (\d+)", str(error)).groups()  # type: ignore[union-attr]
            budgets[name] = int(smallest) * (room if name == "gpu_memory" else 1)


class Way(NamedTuple):
    """How a run accumulates, and where its states live; order "" is a loop of its own."""

    order: str
    config: Mapping[str, Any] = {}


VERTICAL, HORIZONTAL, OWN_LOOP = Way("vertical"), Way("horizontal"), Way("")
IN_MEMORY = Way("horizontal", MEMORY)


def train(
    build: Build, batch: Batch, way: Way, count: int = 3, steps: int = 2, **config: Any
) -> list[torch.Tensor]:
    """Losses, gradients before each step, and weights in the end; nothing may be in use after any
    step."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = wrap(build(), Path(folder), **{"precision": "fp32"} | config | way.config)
        torch.manual_seed(1)
        optimizer, found = infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0), []
        with infinity.engine(model) as engine:
            for step in range(steps):
                batches = [batch(step * count + number) for number in range(count)]
                if way.order:
                    found += infinity.accumulate(
                        model, batches, scale=optimizer.scale, order=way.order
                    )  # type: ignore[arg-type]
                else:
                    for each in batches:
                        loss = model(**each).loss
                        optimizer.scale(loss / count).backward()
                        found.append(loss.detach())
                assert_unused(model)
                gradients = [engine.gradient(p) for p in model.parameters()]
                found += [
                    torch.zeros(0) if gradient is None else gradient for gradient in gradients
                ]
                optimizer.step()
                optimizer.zero_grad()
            found += engine.state_dict().values()
            found.append(torch.get_rng_state())
    return found


def assert_same(*runs: list[torch.Tensor]) -> None:
    assert all(len(run) == len(runs[0]) for run in runs)
    for run in runs[1:]:
        different = [
            index
            for index, (a, b) in enumerate(zip(runs[0], run, strict=True))
            if not torch.equal(a, b)
        ]
        assert not different, f"{len(different)} of {len(run)}, the first {different[0]}"
    assert all(value.isfinite().all() for value in runs[0])


# The same bits


def checkpointed(reentrant: bool, **options: Any) -> Build:
    def build() -> nn.Module:
        model = transformer(**options)
        vars(model)["run_block"] = lambda number, block, x: checkpoint(
            block, x, use_reentrant=reentrant
        )
        return model

    return build


def transformers_checkpointed(family: str) -> Build:
    def build() -> nn.Module:
        model: Any = FAMILIES[family].build()
        model.gradient_checkpointing_enable()
        return model

    return build


MODELS: dict[str, tuple[Build, Batch]] = {
    "transformer": (transformer, text_batch),
    "not tied": (lambda: transformer(tied=False), text_batch),
    "checkpointed": (checkpointed(False), text_batch),
    "reentrant": (checkpointed(True), text_batch),
    "llama checkpointed": (transformers_checkpointed("llama"), text_batch),
    "gpt2 checkpointed": (transformers_checkpointed("gpt2"), text_batch),
} | {
    name: (FAMILIES[name].build, FAMILIES[name].batch)
    for name in ("llama", "gpt2", "t5", "vit", "mixtral")
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", MODELS)
def test_losses_gradients_and_weights_are_those_of_any_other_order_and_placement(name: str) -> None:
    ways = (VERTICAL, HORIZONTAL, OWN_LOOP, IN_MEMORY, Way("vertical", MEMORY))
    assert_same(*(train(*MODELS[name], way) for way in ways))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("gradients", ["cpu", "nvme"])
def test_low_precision(precision: str, gradients: str) -> None:
    config = {"precision": precision, "gradients": gradients}
    plain = {**MEMORY, "precision": precision}
    assert_same(
        *(
            train(transformer, text_batch, way, **config)
            for way in (VERTICAL, OWN_LOOP, Way("", plain))
        )
    )


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_each_micro_batch_draws_random_numbers_of_its_own(reentrant: bool | None) -> None:
    build = (
        (lambda: transformer(dropout=0.5))
        if reentrant is None
        else checkpointed(reentrant, dropout=0.5)
    )
    runs = [train(build, text_batch, way) for way in (VERTICAL, HORIZONTAL, IN_MEMORY)]
    assert_same(*runs)
    same = train(build, lambda number: text_batch(0), VERTICAL)
    # 2 steps of 3 times the same batch, and buffers
    assert len({float(loss) for loss in same if loss.ndim == 0}) > 4
    assert_same(*(train(build, text_batch, way, count=1) for way in (VERTICAL, OWN_LOOP)))


def test_what_draws_no_random_numbers_leaves_them_alone() -> None:
    untouched = torch.Generator().manual_seed(1).get_state()  # `train` seeds so, too
    assert torch.equal(train(transformer, text_batch, VERTICAL)[-1], untouched)
    assert not torch.equal(
        train(lambda: transformer(dropout=0.5), text_batch, VERTICAL)[-1], untouched
    )


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_autocast(reentrant: bool | None) -> None:
    build = transformer if reentrant is None else checkpointed(reentrant)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        runs = [train(build, text_batch, way) for way in (VERTICAL, HORIZONTAL, IN_MEMORY)]
    assert_same(*runs)
    assert not torch.equal(runs[0][0], train(build, text_batch, VERTICAL)[0])


class Flow(nn.Module):
    """Blocks that a batch names, in its order, some as often as it likes; the first one around all
    others."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)
        )
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor, blocks: Sequence[int]) -> Any:
        x = (x * self.scale).requires_grad_()
        for number in blocks:
            block = self.blocks[number]
            x = x + (
                block(x)
                if self.reentrant is None
                else checkpoint(block, x, use_reentrant=self.reentrant)
            )
        return Outputs((x * self.scale).square().mean())


class Outputs(NamedTuple):
    loss: torch.Tensor


def flows(*each: Sequence[int]) -> Batch:
    def batch(number: int) -> dict[str, Any]:
        return {
            "x": torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)),
            "blocks": each[number % len(each)],
        }

    return batch


FLOWS = {
    "one skips": ((0, 1, 2, 3), (0, 1, 3), (0, 1, 2, 3)),
    "the first skips": ((0, 1, 3), (0, 1, 2, 3), (0, 1, 2, 3)),
    "nothing in common": ((0, 1), (2, 3), (4,)),
    "another order": ((3, 2, 1), (1, 2, 3), (2, 1, 3)),
    "used again": ((0, 1, 0, 1), (0, 1, 0, 1), (1, 0, 1)),
    "used often": ((0, 0, 1, 0), (1, 0, 0), (2, 0, 1, 2)),
    "no block": ((), (0, 1), ()),
}


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("name", FLOWS)
def test_micro_batches_that_take_different_ways(name: str, reentrant: bool | None) -> None:
    ways = (VERTICAL, HORIZONTAL, Way("", MEMORY))
    assert_same(*(train(lambda: Flow(reentrant), flows(*FLOWS[name]), way) for way in ways))


@settings(max_examples=10, deadline=None)
@given(
    ways=st.lists(st.lists(st.integers(0, 4), max_size=5), min_size=2, max_size=5),
    reentrant=st.sampled_from([None, False, True]),
    config=st.fixed_dictionaries(
        {"room": st.integers(1, 3), "gradients": st.sampled_from(["cpu", "nvme"]),
         "update": st.sampled_from(["exact", "speculative", "plain"])}
    ),
)  # fmt: skip
def test_any_ways_and_budgets(
    ways: list[list[int]], reentrant: bool | None, config: dict[str, Any]
) -> None:
    def build() -> nn.Module:
        return Flow(reentrant)

    batch, count = flows(*ways), len(ways)
    vertical = train(build, batch, VERTICAL, count, **config)
    assert_same(
        vertical,
        train(build, batch, HORIZONTAL, count, **config),
        train(build, batch, Way("", MEMORY), count),
    )


class Borrows(nn.Module):
    """Uses the weight of a module that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.sigmoid(nn.functional.linear(x, self.inner.weight, self.inner.bias))
        out: torch.Tensor = self.after(x)
        return out


class Recomputed(nn.Module):
    """Layers around one that borrows, in a checkpoint. It may keep the borrowed weight."""

    def __init__(self, keeps: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.borrows = nn.Linear(WIDTH, WIDTH), Borrows()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.keeps, self.kept = keeps, list[torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if self.keeps:
            self.kept.append(self.borrows.inner.weight.view(-1))
        out: torch.Tensor = checkpoint(self.borrows, x, use_reentrant=False)
        out = self.last(out)
        return out.square().mean()


def test_a_weight_that_another_micro_batch_shows(tmp_path: Path) -> None:
    """The recomputation of one micro-batch reads it while the forward of another has it."""
    found = []
    for order in ("horizontal", "vertical"):
        (tmp_path / order).mkdir()
        model = wrap(Recomputed(), tmp_path / order)
        inputs = [torch.full((2, WIDTH), 0.1 * (each + 1)) for each in range(3)]
        infinity.accumulate(model, inputs, lambda loss, _: loss, order=order)
        found.append([parameter.grad + 0 for parameter in model.parameters()])
        infinity.engine(model).close()
    assert_same(*found)


def test_a_weight_that_a_micro_batch_keeps_is_refused(tmp_path: Path) -> None:
    model = wrap(Recomputed(keeps=True), tmp_path)
    with pytest.raises(infinity.ShardedParameterError, match=r"leaves a view of borrows\.inner"):
        infinity.accumulate(
            model, [torch.ones(2, WIDTH)] * 2, lambda loss, _: loss, order="vertical"
        )
    infinity.engine(model).close()


def test_callables_are_micro_batches(tmp_path: Path) -> None:
    """They have the bits of batches, move as few bytes, and say themselves when a backward is
    next."""
    found, read = [], []
    batches = [text_batch(number) for number in range(3)]
    for kind in ("batches", "callables"):
        (tmp_path / kind).mkdir()
        model = wrap(transformer(), tmp_path / kind, precision="fp32")

        def work(begin: Any, batch: Any, model: nn.Module = model) -> torch.Tensor:
            loss = model(**batch).loss / 3
            begin(loss)
            loss.backward()
            return loss * 3  # type: ignore[no-any-return]

        works = [functools.partial(work, batch=each) for each in batches]
        with infinity.engine(model) as engine:
            losses = infinity.accumulate(model, batches if kind == "batches" else works)
            gradients = [engine.gradient(parameter) for parameter in model.parameters()]
            found.append([*losses, *(each for each in gradients if each is not None)])
            read.append(engine.io.counters()["bytes_read"])
    assert_same(*found)
    assert read[0] == read[1]


def test_callables_and_batches_are_not_mixed(tmp_path: Path) -> None:
    model = wrap(transformer(), tmp_path)
    with infinity.engine(model):
        with pytest.raises(infinity.ConfigError, match="callables only, or batches only"):
            infinity.accumulate(model, [text_batch(0), lambda begin: torch.zeros(())])
        with pytest.raises(infinity.ConfigError, match="leave out loss and scale"):
            infinity.accumulate(model, [lambda begin: torch.zeros(())], scale=lambda loss: loss)


def test_speculative_updates_wait_for_the_gradients_of_all_micro_batches(tmp_path: Path) -> None:
    runs = [
        train(transformer, text_batch, way, update="speculative", cache=0)
        for way in (VERTICAL, OWN_LOOP)
    ]
    assert_same(*runs)
    model = wrap(transformer(), tmp_path, update="speculative", precision="fp32", cache=0)
    optimizer, steps = infinity.AdamW(model.parameters(), lr=1e-2), 4
    with infinity.engine(model) as engine:
        for step in range(steps):
            infinity.accumulate(model, [text_batch(3 * step + number) for number in range(3)])
            optimizer.step()
            optimizer.zero_grad()
        report = engine.report()
    # In the first step nobody knows how many gradients there are.
    assert report.updates_kept == (steps - 1) * len(engine.units)
    assert report.updates_rolled_back == 0


def test_torch_grad_scaler(tmp_path: Path) -> None:
    weights = []
    for order in ("vertical", "horizontal"):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        (tmp_path / order).mkdir()
        model = wrap(transformer(), tmp_path / order, precision="fp32")
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        with infinity.engine(model) as engine:
            infinity.accumulate(
                model, [text_batch(n) for n in range(3)], scale=scaler.scale, order=order
            )  # type: ignore[arg-type]
            scaler.step(optimizer)
            scaler.update()
            weights.append([*engine.state_dict().values()])
    assert_same(*weights)


def test_loss_reduction_and_kinds_of_batch(tmp_path: Path) -> None:
    model = wrap(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), tmp_path, precision="fp32")
    x = torch.ones(2, 4)
    with infinity.engine(model) as engine:
        gradients = []
        for batches in ([x, x], [(x,), [x]], [{"input": x}] * 2):
            for reduction in ("mean", "sum"):
                losses = infinity.accumulate(
                    model, batches, lambda y, _: y.sum(), reduction=reduction
                )  # type: ignore[arg-type]
                assert [loss.item() for loss in losses] == [model(x).sum().item()] * 2
                assert not any(loss.requires_grad for loss in losses)
                gradients.append(engine.gradient(model[0].weight))
                model.zero_grad()
        assert_same(gradients[0::2], [gradients[0]] * 3)
        assert_same(gradients[1::2], [2 * gradients[0]] * 3)


# What moves


def state_bytes(engine: infinity.Engine) -> int:
    """What one step reads of states that are no parameters and no gradients."""
    kinds = (Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ)
    return sum(
        unit.blocks[kind].moved_bytes
        for unit in engine.units
        for kind in kinds
        if kind in unit.blocks
    )


def traffic(folder: Path, order: str, count: int, **config: Any) -> dict[str, int]:
    """NVMe bytes of a step in the steady state, which are those that the planner states."""
    model = wrap(transformer(width=48, depth=5), folder, cache=0, update="exact", **config)
    optimizer = infinity.AdamW(model.parameters())
    with infinity.engine(model) as engine:
        for step in range(5):
            batches = [text_batch(step * count + number) for number in range(count)]
            infinity.accumulate(model, batches, order=order)  # type: ignore[arg-type]
            optimizer.step()
            optimizer.zero_grad()
        report, plan = engine.report(), engine.plan()
        read, written = (
            round(each * report.parameters)
            for each in (report.read_per_parameter, report.written_per_parameter)
        )
        assert (read, written) == (plan.read, plan.update_written)
        assert round(report.planned_read_per_parameter * report.parameters) == read
        assert round(report.planned_written_per_parameter * report.parameters) == written
        gradients = sum(unit.blocks[Kind.GRAD].moved_bytes for unit in engine.units)
        return {
            "read": read,
            "written": written,
            "parameters": read - state_bytes(engine),
            "gradients": gradients,
        }


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("count", [2, 8])
def test_parameters_are_read_once_for_all_micro_batches(
    count: int, precision: str, tmp_path: Path
) -> None:
    vertical, horizontal = (
        traffic(tmp_path, order, count, precision=precision) for order in ("vertical", "horizontal")
    )
    assert vertical["parameters"] * count == horizontal["parameters"] > 0
    assert vertical["written"] == horizontal["written"]
    assert vertical == traffic(tmp_path, "horizontal", 1, precision=precision)


@pytest.mark.parametrize("room", [1, 2])
def test_gradients_on_nvme_are_written_once_for_all_micro_batches(
    room: int, tmp_path: Path
) -> None:
    runs = [
        traffic(tmp_path, order, 4, gradients="nvme", room=room)
        for order in ("vertical", "horizontal")
    ]
    once = traffic(tmp_path, "horizontal", 1, gradients="nvme", room=room)
    assert runs[0] == once
    assert runs[1]["written"] == once["written"] + 3 * once["gradients"]


@settings(max_examples=8, deadline=None)
@given(count=st.integers(1, 6), room=st.integers(1, 4), precision=st.sampled_from(["bf16", "fp32"]))
def test_traffic_does_not_depend_on_the_number_of_micro_batches(
    count: int, room: int, precision: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            traffic(Path(folder), "vertical", each, room=room, precision=precision)
            for each in (1, count)
        ]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("build", [transformer, checkpointed(True), checkpointed(False)])
def test_every_unit_is_visited_by_all_micro_batches_before_the_next_one(
    build: Build, tmp_path: Path
) -> None:
    model, visits, count = wrap(build(), tmp_path, precision="fp32"), [], 4

    def note(kind: str, number: int) -> Callable[..., None]:
        return lambda *_: visits.append((kind, number))

    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(note("forward", number))
        block.register_full_backward_pre_hook(note("backward", number))
    with infinity.engine(model) as engine:
        infinity.accumulate(model, [text_batch(number) for number in range(count)])
        forward = [visit for number in range(4) for visit in [("forward", number)] * count]
        assert visits[: len(forward)] == forward
        backward = [number for kind, number in visits if kind == "backward"]
        assert backward == [number for number in (3, 2, 1, 0) for _ in range(count)]
        assert Probe(engine).accumulation == 0
        assert (
            len(Probe(engine).trace.last_cycle("train").order)
            == len(set(Probe(engine).trace.last_cycle("train").order)) * 2 - 1
        )


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", MODELS)
def test_no_gradient_is_kept_where_all_micro_batches_take_the_same_way(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, batch = MODELS[name]
    model, deliver, kept = wrap(build(), tmp_path, precision="fp32"), Interleaver._deliver, []

    def delivering(interleaver: Interleaver, parameter: int) -> None:
        deliver(interleaver, parameter)
        kept.append(len(interleaver._held))

    monkeypatch.setattr(Interleaver, "_deliver", delivering)
    with infinity.engine(model):
        infinity.accumulate(model, [batch(number) for number in range(3)])
    assert kept and not any(kept)


# Faults


class Trouble(Exception):
    """Raised on purpose."""


def fail_in(model: nn.Module, where: str, at: int, raising: Callable[[], None]) -> Any:
    """Have micro-batch `at` (from 0) call `raising` in the forward or backward of block 2; returns
    the hook's handle."""
    count = iter(range(1000))

    def act(*_: Any) -> None:
        if next(count) == at:
            raising()

    block = model.blocks[2]
    return (
        block.register_forward_hook if where == "forward" else block.register_full_backward_hook
    )(act)


def raise_trouble() -> None:
    raise Trouble("on purpose")


# Torch 2.11 says so of checkpoints that a thread did not end.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <generator object _checkpoint_without")
@pytest.mark.parametrize("build", [transformer, checkpointed(True), checkpointed(False)])
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_ends_all_micro_batches_and_the_engine_goes_on(
    where: str, at: int, build: Build, tmp_path: Path, footprint: Callable[[], Any]
) -> None:
    batches = [text_batch(number) for number in range(3)]
    model = wrap(build(), tmp_path, precision="fp32")
    with infinity.engine(model) as engine:
        infinity.accumulate(model, batches)
        expected = [engine.gradient(p) for p in model.parameters()]
        model.zero_grad()
        before, handle = footprint().python_threads, fail_in(model, where, at, raise_trouble)
        with pytest.raises(Trouble, match=r"^on purpose$") as caught:
            infinity.accumulate(model, batches)
        handle.remove()
        assert "raise_trouble" in "".join(traceback.format_tb(caught.value.__traceback__))
        assert footprint().python_threads == before
        assert_unused(model)
        for order in ("horizontal", "vertical"):
            model.zero_grad()
            infinity.accumulate(model, batches, order=order)  # type: ignore[arg-type]
            assert_same(expected, [engine.gradient(p) for p in model.parameters()])


@pytest.fixture
def interruptible() -> Iterator[None]:
    """What a shell starts in the background ignores Ctrl-C, and Python leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_ctrl_c_ends_all_micro_batches(
    where: str, tmp_path: Path, footprint: Callable[[], Any]
) -> None:
    model = wrap(transformer(), tmp_path, precision="fp32")
    with infinity.engine(model) as engine:
        before = footprint().python_threads
        interleaver = engine.interleaver()
        noticed = threading.Event()
        stop = interleaver._stop

        def noticing(error: BaseException) -> None:
            stop(error)
            noticed.set()

        def interrupt() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            assert noticed.wait()  # by the caller's thread

        interleaver._stop = noticing  # type: ignore[method-assign]
        engine.interleaver = lambda: interleaver  # type: ignore[method-assign]
        handle = fail_in(model, where, 1, interrupt)
        with pytest.raises(KeyboardInterrupt):
            infinity.accumulate(model, [text_batch(number) for number in range(3)])
        handle.remove()
        del engine.interleaver
        assert footprint().python_threads == before
        assert_unused(model)
        model.zero_grad()
        infinity.accumulate(model, [text_batch(0), text_batch(1)])


def test_a_drive_that_fails_is_what_the_caller_hears(tmp_path: Path) -> None:
    model = wrap(transformer(), tmp_path, precision="fp32")
    batches = [text_batch(number) for number in range(3)]
    with infinity.engine(model) as engine:
        infinity.accumulate(model, batches)
        engine.io.set_faults(error_fraction=1.0, errnos=[5])
        with pytest.raises(infinity.NvmeError, match="Input/output error"):
            infinity.accumulate(model, batches)
        engine.io.set_faults()
        assert_unused(model)
        model.zero_grad()
        infinity.accumulate(model, batches)


def test_a_thread_that_cannot_start_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, footprint: Callable[[], Any]
) -> None:
    model = wrap(transformer(), tmp_path, precision="fp32")
    start = threading.Thread.start
    left = iter((True, True, False))

    def limited(thread: threading.Thread) -> None:
        if not next(left):
            raise RuntimeError("can't start new thread")
        start(thread)

    with infinity.engine(model):
        before = footprint().python_threads
        monkeypatch.setattr(threading.Thread, "start", limited)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            infinity.accumulate(model, [text_batch(number) for number in range(4)])
        monkeypatch.undo()
        assert footprint().python_threads == before
        infinity.accumulate(model, [text_batch(number) for number in range(4)])


@pytest.mark.parametrize("order", ["vertical", "horizontal"])
def test_wrong_input_is_refused(order: Any, tmp_path: Path) -> None:
    model, batches = wrap(transformer(), tmp_path, precision="fp32"), [text_batch(0), text_batch(1)]
    with infinity.engine(model) as engine:
        with (
            torch.no_grad(),
            pytest.raises(infinity.ConfigError, match=r"call it outside of torch\.no_grad"),
        ):
            infinity.accumulate(model, batches, order=order)
        with pytest.raises(infinity.ConfigError, match="there are no micro-batches"):
            infinity.accumulate(model, [], order=order)
        with pytest.raises(
            infinity.ConfigError, match=r"order='diagonal' must be one of 'vertical', 'horizontal'"
        ):
            infinity.accumulate(model, batches, order="diagonal")  # type: ignore[arg-type]
        with pytest.raises(
            infinity.ConfigError, match=r"reduction='max' must be one of 'mean', 'sum'"
        ):
            infinity.accumulate(model, batches, order=order, reduction="max")  # type: ignore[arg-type]
        with pytest.raises(infinity.ConfigError, match="the model is not wrapped"):
            infinity.accumulate(transformer(), batches, order=order)
        nested = (
            r"infinity\.accumulate cannot be called inside of itself, nor of a forward or backward"
        )
        with pytest.raises(RuntimeError, match=nested):
            infinity.accumulate(
                model, batches, lambda *_: infinity.accumulate(model, batches, order=order)
            )  # type: ignore[arg-type,return-value]
        handle = model.blocks[1].register_forward_hook(
            lambda *_: infinity.accumulate(model, batches, order=order) and None
        )
        with pytest.raises(RuntimeError, match=nested):
            model(**text_batch(0))
        handle.remove()
        handle = model.blocks[1].register_full_backward_hook(
            lambda *_: infinity.accumulate(model, batches, order=order) and None
        )
        loss = model(**text_batch(0)).loss
        with pytest.raises(RuntimeError, match=nested):
            loss.backward()
        handle.remove()
        Probe(engine).end_interrupted()
        assert_unused(model)
        model.eval()
        model.zero_grad()
        assert all(loss.isfinite() for loss in infinity.accumulate(model, batches, order=order))
        assert all(engine.gradient(p) is not None for p in model.parameters())


# What a thread has of its own


class Calls(TorchFunctionMode):
    """Counts the functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.nn.functional.layer_norm
        return func(*args, **(kwargs or {}))


def test_modes_devices_saved_tensors_and_context_reach_the_threads(tmp_path: Path) -> None:
    model = wrap(transformer(), tmp_path, precision="fp32")
    batches = [text_batch(number) for number in range(3)]
    context: contextvars.ContextVar[str] = contextvars.ContextVar("context")
    context.set("the caller's")
    seen: list[Any] = []
    packed: list[torch.Tensor] = []

    def loss(outputs: Any, batch: Any) -> torch.Tensor:
        seen.append(
            (context.get(), torch.get_default_device().type, threading.current_thread().name)
        )
        value: torch.Tensor = outputs.loss.exp().log()
        return value

    found = []
    with infinity.engine(model):
        for order in ("horizontal", "vertical"):
            packed.clear()
            keep = torch.autograd.graph.saved_tensors_hooks(
                lambda t: packed.append(t) or t, lambda t: t
            )  # type: ignore[func-returns-value]
            with (
                Calls() as calls,
                FlopCounterMode(display=False) as flops,
                torch.device("meta"),
                keep,
            ):
                infinity.accumulate(model, batches, loss, order=order)  # type: ignore[arg-type]
            found.append((calls.count, flops.get_total_flops(), len(packed)))
    assert found[0] == found[1]
    assert all(each > 0 for each in found[0])
    assert {each[:2] for each in seen} == {("the caller's", "meta")}
    assert {each[2] for each in seen[3:]} == {
        f"infinity-micro-batch-{number}" for number in range(3)
    }


# Ranks and the command line


def serve(folder: Path, rank: int, ranks: int) -> None:
    """Train in both orders as one of the ranks; write down what came out."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=ranks
    )
    place, found = folder / str(rank), {}
    place.mkdir()
    for order in ("vertical", "horizontal"):
        budgets = {"gpu_memory": 4 << 20, "cpu_memory": 8 << 20, "cache": 0}
        config = config_of(nvme=[place], precision="fp32", gradients="nvme", **budgets)
        model = infinity.wrap(transformer(), config, group=dist.group.WORLD)
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
        with infinity.engine(model) as engine:
            losses = []
            for step in range(3):
                batches = [text_batch(100 * step + 10 * number + rank) for number in range(4)]
                losses += infinity.accumulate(model, batches, order=order)  # type: ignore[arg-type]
                optimizer.step()
                optimizer.zero_grad()
            weights = torch.cat([value.flatten() for value in engine.state_dict().values()])
            found[order] = (
                [loss.item().hex() for loss in losses],
                [weights.double().sum().item().hex(), weights.norm().item().hex()],
            )
    (folder / f"results{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def test_ranks_take_the_same_order(tmp_path: Path) -> None:
    run_ranks(__file__, tmp_path, RANKS)
    found = [json.loads((tmp_path / f"results{rank}.json").read_text()) for rank in range(RANKS)]
    assert found[0]["vertical"] == found[0]["horizontal"]
    assert found[1]["vertical"] == found[1]["horizontal"]
    assert found[0]["vertical"][1] == found[1]["vertical"][1]


def test_the_command_line_moves_less_and_learns_the_same(tmp_path: Path) -> None:
    from infinity.cli.main import app

    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)

    def finetune(order: str, gpu_memory: str) -> Any:
        options = {
            "--nvme": tmp_path,
            "--data": tmp_path / "text.txt",
            "--sequence-length": 16,
            "--batch-size": 1,
            "--steps": 4,
            "--accumulate": 3,
            "--accumulation-order": order,
            "--eval-batches": 1,
            "--cache": 0,
            "--update": "exact",
            "--gpu-memory": gpu_memory,
        }
        return CliRunner().invoke(
            app,
            ["finetune", "--json", *(str(word) for option in options.items() for word in option)],
        )

    smallest = re.search(
        r"smallest --gpu-memory that works is (\d+)", finetune("vertical", "1").stderr
    )
    assert smallest is not None
    vertical, horizontal = (
        json.loads(finetune(order, smallest[1]).stdout) for order in ("vertical", "horizontal")
    )
    assert vertical["loss"] == horizontal["loss"]
    read = [
        run["nvme_bytes_per_parameter_per_step"]["read"]["measured"]
        for run in (vertical, horizontal)
    ]
    assert read[0] < read[1] - 3
