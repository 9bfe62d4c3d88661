"""A drive that is full, or fails, on one rank of two: all ranks are told at once who, what and why,
nothing is left behind, and a new start goes on from the last checkpoint with the same bits.

Both ranks keep their states below one directory. They are started once and told which function of
this file to call (see `tests/support/rank_group.py` for the processes).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.sharding import watch
from infinity.sharding.states import States
from support.configs import config_of
from support.rank_group import PATIENCE, RANKS, OnRanks

WIDTH, DEPTH, STEPS = 256, 4, 5
# Of a file, where there is too little: less than a rank's states, and than its part of a checkpoint
ROOM = 1 << 20
SOON = 300.0
"""Seconds in which all ranks are told on the slowest machine; by `Tuning.collective_timeout` alone
they are after 600."""


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def wrap(
    directory: Path, plain: nn.Module | None = None, **config: Any
) -> tuple[nn.Module, infinity.AdamW]:
    nvme = directory / "nvme"
    nvme.mkdir(exist_ok=True)
    values: dict[str, Any] = {
        "nvme": nvme,
        "precision": "fp32",
        "device": "cpu",
        "threads": 1,
        "poison": True,
        "cache": 0,
    }
    values |= {"gpu_memory": "16MiB", "cpu_memory": "16MiB", "update": "exact"} | config
    model = infinity.wrap(plain or build(), config_of(**values), group=dist.group.WORLD)
    return model, infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)


def step(
    model: nn.Module,
    optimizer: infinity.AdamW,
    number: int,
    before_update: Callable[[], None] = lambda: None,
) -> None:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    model(torch.randn(4, WIDTH, generator=generator)).pow(2).mean().backward()
    before_update()
    optimizer.step()
    optimizer.zero_grad()


def contents(directory: Path) -> list[Path]:
    return sorted((directory / "nvme").rglob("*"))


@contextlib.contextmanager
def full_on_the_second(rank: int) -> Iterator[None]:
    """Its files cannot grow beyond `ROOM`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def told_soon() -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < SOON


def meet(directory: Path, name: str) -> None:
    """Return when all ranks are here; not by a collective."""
    rank = dist.get_rank()
    (directory / f"{name} {rank}").touch()
    until = time.monotonic() + PATIENCE / 2
    while not all((directory / f"{name} {other}").exists() for other in range(RANKS)):
        assert time.monotonic() < until, f"a rank did not come to {name}"
        threading.Event().wait(0.02)  # which nobody sets


# What the ranks do


def no_room_when_the_model_is_wrapped(directory: Path, rank: int) -> None:
    with full_on_the_second(rank), told_soon(), pytest.raises(infinity.InfinityError) as caught:
        wrap(directory)
    own = (
        rf"the states on nvme need .* in {directory}/nvme/rank1, but files of this process may "
        r"have .* \(RLIMIT_FSIZE\); raise that with ulimit -f"
    )
    if rank == 1:
        assert type(caught.value) is infinity.BudgetError
        assert re.fullmatch(own, str(caught.value))
    else:
        assert re.fullmatch(f"rank 1 failed: BudgetError: {own}", str(caught.value))
    meet(directory, "refused")
    assert contents(directory) == []
    meet(directory, "seen")
    model, optimizer = wrap(directory)
    with infinity.engine(model):
        step(model, optimizer, 0)
        assert directory / "nvme" / f"rank{rank}" in contents(directory)
    meet(directory, "trained")
    assert contents(directory) == []


def a_write_that_fails_when_the_model_is_wrapped(directory: Path, rank: int) -> None:
    write = States.write

    def fail(self: States, *values: Any) -> None:
        if rank == 1 and self.facts.index == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, *values)

    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        told_soon(),
        pytest.raises((OSError, infinity.InfinityError)) as caught,
    ):
        monkeypatch.setattr(States, "write", fail)
        wrap(directory)
    expected = "[Errno 28] No space left on device"
    assert str(caught.value) == (expected if rank == 1 else f"rank 1 failed: OSError: {expected}")
    meet(directory, "failed")
    assert contents(directory) == []


def a_late_failure_when_the_model_is_wrapped(directory: Path, rank: int) -> None:
    """When all has been moved: both ranks have their models back, bit for bit, and may wrap them
    again."""
    model, finalize = build(), weakref.finalize
    parameters = {
        name: (p, type(p), p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()
    }

    def fail(*values: Any) -> Any:
        if rank == 1:
            raise torch.OutOfMemoryError("no memory")
        return finalize(*values)

    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        told_soon(),
        pytest.raises((RuntimeError, infinity.InfinityError)) as caught,
    ):
        monkeypatch.setattr(weakref, "finalize", fail)
        wrap(directory, model)
    assert str(caught.value) == (
        "no memory" if rank == 1 else "rank 1 failed: OutOfMemoryError: no memory"
    )
    for name, p in model.named_parameters():
        same, kind, address, value = parameters[name]
        assert p is same and type(p) is kind and p.data_ptr() == address and torch.equal(p, value)
    assert not [
        module
        for module in model.modules()
        if module._forward_hooks or "_infinity_engine" in vars(module)
    ]
    assert not [
        thread.name for thread in threading.enumerate() if thread.name.startswith("infinity")
    ]
    meet(directory, "failed")
    assert contents(directory) == []
    meet(directory, "seen")
    model, optimizer = wrap(directory, model)
    with infinity.engine(model):
        step(model, optimizer, 0)
    meet(directory, "trained")


def no_room_for_a_checkpoint(directory: Path, rank: int) -> None:
    model, optimizer = wrap(directory)
    with infinity.engine(model) as engine:
        step(model, optimizer, 0)
        engine.save_checkpoint(directory / "saved", optimizer, {"step": 0})
        step(model, optimizer, 1)
        engine.drain()
        with full_on_the_second(rank), told_soon():
            with pytest.raises(
                infinity.CheckpointError, match=r"saved cannot be written: .*File too large"
            ):
                engine.save_checkpoint(directory / "saved", optimizer, {"step": 1})
            meet(directory, "refused")
        assert not (directory / ".saved.partial").exists()
        assert engine.load_checkpoint(directory / "saved", optimizer) == {"step": 0}
        step(model, optimizer, 1)
        engine.save_checkpoint(directory / "saved", optimizer, {"step": 1})
        assert engine.load_checkpoint(directory / "saved", optimizer) == {"step": 1}


def an_update_that_fails_is_told_though_nobody_waits_for_it(directory: Path, rank: int) -> None:
    """With stage 2 what fails is a write of moments, in the background; the rank makes no further
    call. The other one may wait for anything."""
    states = {"stage": 2, "parameters": "gpu", "gradients": "gpu", "optimizer": "nvme"}
    model, optimizer = wrap(directory, **states)
    engine = infinity.engine(model)
    for number in range(2):
        step(model, optimizer, number)
    engine.drain()
    if rank == 1:
        step(
            model, optimizer, 2, lambda: engine.io.set_faults(fail_write_at=1, fail_errno=errno.EIO)
        )
        meet(directory, "told")
    else:
        with told_soon(), pytest.raises(infinity.EngineClosedError) as caught:
            for number in range(2, 6):
                step(model, optimizer, number)
        meet(directory, "told")
        assert re.search(
            r"rank 0 waits in collective \d+ in vain; rank 1 failed: an update failed and the "
            r"engine cannot go on: .*write of \d+ bytes .*: Input/output error \(for "
            r"exp_avg(_sq)? of \d\): .*/nvme/rank1/",
            str(caught.value),
        )
    with pytest.raises(infinity.EngineClosedError):
        step(model, optimizer, 6)
    with told_soon():
        engine.close()
    meet(directory, "closed")
    assert contents(directory) == []


def a_drive_that_is_full_in_training(directory: Path, rank: int) -> None:
    """The same bits as without, from the last checkpoint on."""

    def finish(model: nn.Module, optimizer: infinity.AdamW, begin: int) -> dict[str, torch.Tensor]:
        for number in range(begin, STEPS):
            step(model, optimizer, number)
        states = optimizer.state_dict()["state"]
        found = {
            f"{number} {name}": value
            for number, state in states.items()
            for name, value in state.items()
        }
        return found | infinity.engine(model).state_dict()

    model, optimizer = wrap(directory)
    with infinity.engine(model):
        expected = finish(model, optimizer, 0)

    model, optimizer = wrap(directory)
    engine = infinity.engine(model)
    for number in range(2):
        step(model, optimizer, number)
    engine.save_checkpoint(directory / "saved", optimizer, {"step": 2})

    def fill() -> None:
        if rank == 1:
            engine.io.set_faults(fail_write_at=2, fail_errno=errno.ENOSPC)

    with (
        told_soon(),
        pytest.raises(
            infinity.EngineClosedError, match=r"No space left on device \(for \w+ of \d\)"
        ) as caught,
    ):
        for number in range(2, STEPS):
            step(model, optimizer, number, fill)
    assert ("rank 1 failed: " in str(caught.value)) is (rank == 0)
    meet(directory, "failed")
    with told_soon():
        engine.close()
    meet(directory, "closed")
    assert contents(directory) == []
    meet(directory, "seen")

    model, optimizer = wrap(directory)
    with infinity.engine(model) as engine:
        found = finish(
            model, optimizer, engine.load_checkpoint(directory / "saved", optimizer)["step"]
        )
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


# The other side


def work(name: str, where: Path, rank: int) -> None:
    watch._PAUSE = 0.5
    globals()[name](where, rank)


# This side


@pytest.mark.parametrize(
    "work",
    [
        no_room_when_the_model_is_wrapped,
        a_write_that_fails_when_the_model_is_wrapped,
        a_late_failure_when_the_model_is_wrapped,
        no_room_for_a_checkpoint,
        an_update_that_fails_is_told_though_nobody_waits_for_it,
        a_drive_that_is_full_in_training,
    ],
)
def test_one_rank_has_it_and_all_are_told(
    work: Callable[[Path, int], None], on_ranks: OnRanks
) -> None:
    assert on_ranks(work.__name__) == ["done"] * RANKS
