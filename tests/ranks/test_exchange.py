"""Collectives run beside the model, in one order on all ranks, and whoever needs one waits for that
one only.

Every test runs in two processes over gloo, which are started once and told which function of this
file to call (see `tests/support/rank_group.py` for the processes).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import re
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.modules.hooks import in_backward
from infinity.placement.spec import Kind
from infinity.sharding import collectives, exchange
from support.configs import config_of
from support.probe import Probe
from support.rank_group import PATIENCE, RANKS, OnRanks

WIDTH, DEPTH = 64, 5


class Block(nn.Module):
    """A residual layer; `during` is called in its forward."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.inner = number, nn.Linear(WIDTH, WIDTH)
        self.during: Callable[[int], None] = lambda number: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + torch.relu(self.inner(x))
        self.during(self.number)
        return y


def wrap(directory: Path, rank: int, **config: Any) -> tuple[nn.Module, infinity.AdamW]:
    nvme = directory / f"nvme{rank}"
    nvme.mkdir(exist_ok=True)
    values: dict[str, Any] = {
        "nvme": [nvme],
        "precision": "fp32",
        "device": "cpu",
        "threads": 1,
        "poison": True,
        "cache": 0,
    }
    values |= {"gpu_memory": 4 << 20, "cpu_memory": 8 << 20} | config
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(number) for number in range(DEPTH)))
    infinity.wrap(model, config_of(**values), units=list(model), group=dist.group.WORLD)
    return model, infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)


def train(model: nn.Module, optimizer: infinity.AdamW, steps: int = 1) -> list[float]:
    losses = []
    for step in range(steps):
        loss = (
            model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)))
            .pow(2)
            .mean()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@contextlib.contextmanager
def watched(before: Callable[[str], None] = lambda name: None) -> Iterator[list[str]]:
    """Collectives as they are joined, with `before` called on their thread before each."""
    joined: list[str] = []

    def watch(name: str, call: Callable[..., Any], *values: Any) -> Any:
        before(name)
        joined.append(name)
        return call(*values)

    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("all_gather", "reduce_scatter_mean", "all_reduce_sum"):
            monkeypatch.setattr(
                collectives, name, functools.partial(watch, name, getattr(collectives, name))
            )
        yield joined


# What the ranks do


def gathers_run_under_the_forward_before(directory: Path, rank: int) -> None:
    """A block's forward does not end before the next block has been gathered: with the model's
    thread that could not be."""
    model, optimizer = wrap(directory, rank)
    with infinity.engine(model) as engine:
        train(model, optimizer, 2)

        def await_next(number: int) -> None:
            if number + 1 < DEPTH:
                following = engine.units[number + 1]
                assert following.on_device.posted is not None
                following.on_device.posted.await_end()
                assert following.on_device.is_gathered

        for block in model:
            block.during = await_next
        Probe(engine).rest()
        with watched() as joined:
            train(model, optimizer, 2)
            Probe(engine).rest()
        assert joined.count("all_gather") == 2 * DEPTH


def a_blocked_gather_holds_up_only_its_unit(directory: Path, rank: int) -> None:
    """The forwards before it run while it is blocked: the second block lets the gather of the
    fourth one go."""
    model, optimizer = wrap(directory, rank)
    with infinity.engine(model) as engine:
        train(model, optimizer, 2)
        Probe(engine).exchange.rest()
        released, passed = threading.Event(), []
        gathers = iter(range(1 << 30))

        def block_the_fourth(name: str) -> None:
            if name == "all_gather" and next(gathers) == 3:
                assert released.wait(PATIENCE / 3), (
                    "the model's thread waits for what it does not need"
                )
                passed.append("gathered")

        def release_in_the_second(number: int) -> None:
            passed.append(f"forward {number}")
            if number == 1:
                released.set()

        for block in model:
            block.during = release_in_the_second
        for unit in engine.units:  # so that this pass gathers all of them
            unit.outdate()
        with watched(block_the_fourth):
            train(model, optimizer)
        assert passed.index("forward 1") < passed.index("gathered") < passed.index("forward 3")


def a_reduction_runs_under_the_backward_of_the_block_before(directory: Path, rank: int) -> None:
    """The first reduction is blocked until the backward of the block after next has collected: two
    buffers, no waiting."""
    model, optimizer = wrap(directory, rank)
    with infinity.engine(model) as engine:
        train(model, optimizer, 2)
        released, order = threading.Event(), []

        def block_the_first(name: str) -> None:
            if name == "reduce_scatter_mean" and "reduced" not in order:
                assert released.wait(PATIENCE / 3), (
                    "the backward waits for a reduction that it does not need"
                )
                order.append("reduced")

        second = engine.units[DEPTH - 2]
        add = second.gradients.add

        def collected(index: int, gradient: torch.Tensor, scale: float) -> None:
            add(index, gradient, scale)
            order.append("collected")
            if len(order) == 2:
                released.set()

        second.gradients.add = collected  # type: ignore[method-assign]
        with watched(block_the_first):
            train(model, optimizer)
        assert order[:3] == ["collected", "collected", "reduced"]


def each_pass_has_one_gather_and_one_reduction(directory: Path, rank: int) -> None:
    """Also where not all fits, and with several micro-batches."""
    order: list[str] = []
    for stage, memory, gathers in [(3, "4MiB", 1), (2, "4MiB", 1), (3, "112KiB", 2)]:
        place = {"parameters": "gpu", "optimizer": "cpu", "gradients": "cpu"} if stage == 2 else {}
        model, optimizer = wrap(directory, rank, stage=stage, gpu_memory=memory, **place)
        with infinity.engine(model) as engine:
            train(model, optimizer, 2)
            Probe(engine).rest()
            with watched() as joined:
                train(model, optimizer, 2)
                Probe(engine).rest()
            found = Counter(joined)
            assert found["reduce_scatter_mean"] == 2 * DEPTH
            least, most = (2 * DEPTH, 2 * DEPTH) if gathers == 1 else (2 * DEPTH + 1, 4 * DEPTH)
            assert least <= found["all_gather"] <= most, (stage, memory, found)
            spans = [span.name for span in engine.recorder.spans() if span.lane == "collective"]
            assert {f"gather {unit.facts.name}" for unit in engine.units} <= set(spans)
            assert {f"reduce {unit.facts.name}" for unit in engine.units} <= set(spans)
            assert engine.report().seconds["collective"] > 0
            order += spans
    (directory / f"order{rank}.json").write_text(json.dumps(order))


def a_reduction_is_posted_before_the_next_use(directory: Path, rank: int) -> None:
    """So it is not behind the gathers that this use posts, and its buffer is free in time."""
    model, optimizer = wrap(directory, rank, gpu_memory="112KiB")
    with infinity.engine(model) as engine:
        train(model, optimizer, 2)
        Probe(engine).rest()
        events: list[str] = []
        enter, post = Probe(engine).runtime.enter, Probe(engine).exchange.post

        def entered(unit: Any) -> torch.Tensor:
            if in_backward():
                events.append(f"use {unit.facts.name}")
            return enter(unit)

        def posted(operation: str, unit: str, *values: Any, **options: Any) -> Any:
            events.append(f"{operation} {unit}")
            return post(operation, unit, *values, **options)

        Probe(engine).runtime.enter, Probe(engine).exchange.post = entered, posted  # type: ignore[method-assign]
        train(model, optimizer)
        backward = events[events.index(f"use {DEPTH - 1}") :]
        for number in range(1, DEPTH - 1):
            assert backward.index(f"reduce {number + 1}") < backward.index(f"use {number}"), (
                backward
            )
        assert Counter(backward)["reduce 1"] == 1


def a_place_is_not_taken_while_its_gather_is_queued(directory: Path, rank: int) -> None:
    """In a memory for two units: who evicts one whose gather is blocked waits for it, and nothing
    is mixed up."""
    results = []
    for blocked in (False, True):
        model, optimizer = wrap(directory, rank, gpu_memory="112KiB")
        with infinity.engine(model) as engine:
            train(model, optimizer, 2)
            Probe(engine).rest()
            if blocked:
                with infinity.gathered(list(model[2].parameters())):
                    evict_one_that_is_being_gathered(engine.units[0], engine.units[-1])
            results.append((train(model, optimizer, 3), engine.state_dict()))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(value, results[1][1][name]) for name, value in results[0][1].items())


def evict_one_that_is_being_gathered(victim: Any, taker: Any) -> None:
    block, waiting = victim.blocks[Kind.PARAM], threading.Event()

    def until_somebody_waits(name: str) -> None:
        if not waiting.is_set():
            assert waiting.wait(PATIENCE / 3), "the place was taken at once"
            assert block.copy.lease is not None

    with watched(until_somebody_waits):
        victim.outdate()
        victim.on_device.start()
        victim.on_device.release()
        posted = victim.on_device.posted
        assert block.copy.pending is posted
        await_end = posted.await_end
        posted.await_end = lambda: (waiting.set(), await_end())
        taker.on_device.start()
        assert posted.ended()
        assert block.copy.lease is None
        taker.on_device.wait()
        taker.on_device.release()


def an_error_reaches_the_next_call(directory: Path, rank: int) -> None:
    """A collective that fails on all ranks: the forward that needs it says so, and so does what
    comes later."""
    model, optimizer = wrap(directory, rank)
    with infinity.engine(model) as engine:
        train(model, optimizer, 2)
        Probe(engine).exchange.rest()

        def fail(name: str) -> None:
            raise OSError("the cable was pulled")

        engine.units[1].outdate()
        with watched(fail):
            for _ in range(2):
                with pytest.raises(
                    infinity.EngineClosedError,
                    match=r"^gather 1 failed and the engine cannot go on: the cable",
                ):
                    model(torch.randn(4, WIDTH))
        with pytest.raises(infinity.EngineClosedError, match="the cable was pulled") as caught:
            engine.drain()
        assert caught.value.__cause__ is not None
        assert isinstance(caught.value.__cause__.__cause__, OSError)
        thread = Probe(engine).exchange_thread
    assert not thread.is_alive()


def a_dropped_model_ends_the_thread(directory: Path, rank: int) -> None:
    model, optimizer = wrap(directory, rank)
    train(model, optimizer, 2)
    assert [thread.name for thread in threading.enumerate()].count("infinity-exchange") == 1
    del model, optimizer
    gc.collect()
    assert "infinity-exchange" not in [thread.name for thread in threading.enumerate()]


def a_closed_engine_keeps_no_group(directory: Path, rank: int) -> None:
    model, optimizer = wrap(directory, rank)
    engine = infinity.engine(model)
    train(model, optimizer, 2)
    Probe(engine).rest()
    before = sys.getrefcount(dist.group.WORLD)
    assert Probe(engine).exchange is not None
    copy = weakref.ref(Probe(engine).exchange.ranks.shards)
    engine.close()
    gc.collect()
    assert copy() is None
    assert sys.getrefcount(dist.group.WORLD) < before


def the_users_own_collectives_do_not_mix_with_ours(directory: Path, rank: int) -> None:
    """On the very group that was given, from the thread of the model, while others are under
    way."""
    model, optimizer = wrap(directory, rank)
    with infinity.engine(model) as engine:
        sums = []

        def add_up(number: int) -> None:
            value = torch.tensor(float(number + rank))
            dist.all_reduce(value)
            sums.append(value.item() == 2 * number + 1)

        for block in model:
            block.during = add_up
        # So that the ranks differ in what is under way.
        Probe(engine).exchange.bytes_per_second = 1e6 * (1 + rank)
        train(model, optimizer, 4)
        assert sums == [True] * 4 * DEPTH


def the_first_rank_dies(directory: Path, rank: int) -> None:
    """The other one gets an error that names the collective, and its engine closes."""
    model, optimizer = wrap(directory, rank)
    engine = infinity.engine(model)
    train(model, optimizer, 2)
    if rank == 0:
        os._exit(9)
    with pytest.raises(
        infinity.EngineClosedError,
        match=r"^(gather|reduce|sum) .* failed and the engine cannot go on: ",
    ):
        train(model, optimizer, 3)
    engine.close()
    assert list((directory / f"nvme{rank}").iterdir()) == []


STUCK = {"collective_timeout": 3.0}


def sleep_and_give_up(directory: Path, rank: int) -> tuple[str, float]:
    """The second rank sleeps in the forward of the third block until the first has given up on it;
    the error, and after how many seconds torch's own call fails."""
    model, optimizer = wrap(directory, rank, gpu_memory="112KiB", **STUCK)
    train(model, optimizer, 2)
    given_up = directory / "given up"

    def sleep(number: int) -> None:
        until = time.monotonic() + PATIENCE
        while number == 2 and rank == 1 and not given_up.exists() and time.monotonic() < until:
            threading.Event().wait(0.05)  # which nobody sets

    model[2].during = sleep
    with pytest.raises(infinity.EngineClosedError) as caught:
        train(model, optimizer, 3)
    given_up.touch()
    timeout = Probe(infinity.engine(model)).seconds_of_groups
    infinity.engine(model).close()
    return str(caught.value), timeout


def a_rank_sleeps(directory: Path, rank: int) -> None:
    text, timeout = sleep_and_give_up(directory, rank)
    assert timeout == 1.25 * 3 + 1
    assert "watchdog" not in text
    if rank == 0:
        found = re.match(
            (
                r"(gather|reduce|sum) .* failed and the engine cannot go on: rank 0 waited "
                r"(\d+) s .*collective \d+; "
            ),
            text,
        )
        assert found is not None and int(found[2]) >= 3, text
        assert "; rank 1 waits for no collective: it computes" in text
        assert "Config(tuning=Tuning(collective_timeout=3))" in text
    else:
        assert "rank 0 gave up in collective" in text


def a_rank_sleeps_under_a_watchdog(directory: Path, rank: int) -> None:
    """That of NCCL, which is played here: it ends the process later than the error comes, and the
    error says when."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "is_watched", lambda group: True)
        patch.setattr(exchange, "WATCHDOG_SECONDS", 5.0)
        text, timeout = sleep_and_give_up(directory, rank)
    assert timeout == 3 + 5
    if rank == 0:
        assert text.endswith(
            "Config(tuning=Tuning(collective_timeout=3)). torch ends this process in about 5 s, "
            "when NCCL's watchdog gives up, too: save what you need before, or set "
            "TORCH_NCCL_ASYNC_ERROR_HANDLING=0 to keep it"
        )


def a_rank_skips_a_unit(directory: Path, rank: int) -> None:
    model, optimizer = wrap(directory, rank, gpu_memory="112KiB", **STUCK)
    train(model, optimizer, 2)
    with pytest.raises(infinity.InfinityError) as caught:
        blocks = [block for number, block in enumerate(model) if rank == 0 or number != 2]
        x = torch.randn(4, WIDTH)
        for _ in range(2):
            y = x
            for block in blocks:
                y = block(y)
            y.pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    text = str(caught.value)
    found = re.search(
        (
            r"collective \d+ is (\w+ \d) on rank (\d) \(after (.*)\), and (\w+ \d) on rank "
            r"(\d) \(after (.*)\); "
        ),
        text,
    )
    assert found is not None, text
    assert found[1] != found[4]
    assert {found[2], found[5]} == {"0", "1"}
    assert found[3] == found[6], "up to there they are the same"
    assert "all ranks must run the same modules in one order; where the data of a rank" in text
    infinity.engine(model).close()


def a_rank_goes_not_backward(directory: Path, rank: int) -> None:
    """DDP cannot go on, either; with an output times 0 it does."""
    model, optimizer = wrap(directory, rank, gpu_memory="112KiB", **STUCK)
    train(model, optimizer)
    (model(torch.randn(4, WIDTH)).sum() * rank).backward()
    optimizer.step()
    with pytest.raises(infinity.EngineClosedError) as caught:
        if rank == 0:
            model(torch.randn(4, WIDTH)).sum().backward()
        optimizer.step()
    assert "all ranks must go backward through the model before a step; let the" in str(
        caught.value
    )
    infinity.engine(model).close()


def a_rank_saves_alone(directory: Path, rank: int) -> None:
    """Every rank is told of the call that the others have not made; so it is with a load."""
    for call in ("save_checkpoint", "load_checkpoint"):
        model, optimizer = wrap(directory, rank)
        train(model, optimizer)
        engine = infinity.engine(model)
        name = rf"sum for {call} \(all ranks call it\) on rank 0"
        with pytest.raises(infinity.EngineClosedError, match=name) as caught:
            if rank == 0:
                getattr(engine, call)(directory / "checkpoint", optimizer)
            else:
                train(model, optimizer, 2)
        assert "GLHF" not in str(caught.value), "an error of gloo"
        engine.close()


# The other side


def work(name: str, where: Path, rank: int) -> None:
    globals()[name](where, rank)


# This side


@pytest.mark.parametrize(
    "work",
    [
        gathers_run_under_the_forward_before,
        a_blocked_gather_holds_up_only_its_unit,
        a_reduction_runs_under_the_backward_of_the_block_before,
        a_reduction_is_posted_before_the_next_use,
        a_place_is_not_taken_while_its_gather_is_queued,
        an_error_reaches_the_next_call,
        a_dropped_model_ends_the_thread,
        a_closed_engine_keeps_no_group,
        the_users_own_collectives_do_not_mix_with_ours,
    ],
)
def test_ranks(work: Callable[[Path, int], None], on_ranks: OnRanks) -> None:
    assert on_ranks(work.__name__) == ["done"] * RANKS


def test_ranks_join_the_same_collectives_in_the_same_order(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    assert on_ranks(each_pass_has_one_gather_and_one_reduction.__name__) == ["done"] * RANKS
    orders = [json.loads((tmp_path / f"order{rank}.json").read_text()) for rank in range(RANKS)]
    assert orders[0] == orders[1]


def test_a_rank_that_dies(on_ranks: OnRanks) -> None:
    assert on_ranks(the_first_rank_dies.__name__) == ["gone", "done"]


@pytest.mark.parametrize(
    "work",
    [
        a_rank_sleeps,
        a_rank_sleeps_under_a_watchdog,
        a_rank_skips_a_unit,
        a_rank_goes_not_backward,
        a_rank_saves_alone,
    ],
)
def test_ranks_that_are_stuck_are_told_why(
    work: Callable[[Path, int], None], on_ranks: OnRanks
) -> None:
    assert on_ranks(work.__name__) == ["done"] * RANKS


@pytest.mark.parametrize(
    ("backends", "handling", "watched"),
    [
        ("cpu:gloo,cuda:nccl", None, True),
        ("cuda:nccl", "3", True),
        ("cuda:nccl", "0", False),
        ("cpu:gloo,cuda:gloo", None, False),
    ],
)
def test_where_the_watchdog_of_nccl_is(
    backends: str, handling: str | None, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False)
    if handling is not None:
        monkeypatch.setenv(name, handling)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    group: Any = object()
    assert collectives.is_watched(group) is watched


def test_one_rank_has_no_thread_for_collectives(tmp_path: Path) -> None:
    model = nn.Sequential(*(Block(number) for number in range(2)))
    infinity.wrap(
        model,
        infinity.Config(
            nvme=tmp_path,
            gpu_memory="4MiB",
            cpu_memory="8MiB",
            tuning=infinity.Tuning(cache=0, device="cpu"),
        ),
    )
    with infinity.engine(model) as engine:
        assert Probe(engine).exchange is None
        assert "infinity-exchange" not in [thread.name for thread in threading.enumerate()]
        assert "collective" not in engine.report().seconds
