"""Tiny programs that train: a model, an optimizer, and what happens between its steps."""

from __future__ import annotations

import copy
import functools
import gc
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from simulation.chance import Chance
from simulation.processes import generators
from support.configs import config_of
from support.probe import Probe

SHAPES = 40
"""How many programs of one rank there are, from 0 on."""
SHAPES_OF_RANKS = 12
"""How many of several ranks come after them."""
SHARE_OF_RANKS = 0.2
"""How many seeds run one of those."""
MOST_RANKS = 3
SNAPSHOTS = "snapshots"
"""The name of the folder of snapshots, beside those of drives."""
MOMENTS = ("begin", "prepared", "in forward", "forward", "backward", "stepped", "scheduled")
"""Of a step; "end" is after the last one."""
ROWS = 4
TIMEOUT = 4.0
"""`Tuning.collective_timeout` of several ranks, in seconds that pass when one is in trouble."""


class Noise(nn.Module):
    """Draws from all three generators of its process while it trains."""

    comes: Callable[[], object] | None = None
    """Is called before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        if self.comes is not None:
            self.comes()
        python, numpy, generator = generators()
        factor = 1 + 0.1 * (python.random() + float(numpy.rand()))
        return x * factor + 0.01 * torch.randn(x.shape, dtype=x.dtype, generator=generator)


class Drop(nn.Module):
    """`nn.Dropout`, which has no generator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        kept = torch.empty_like(x).bernoulli_(0.8, generator=generators().torch)
        return x * kept / 0.8


class Net(nn.Module):
    """Linear units with dropout, a batch norm with its buffers, and noise."""

    def __init__(self, units: int, width: int, frozen: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(units)])
        self.norm = nn.BatchNorm1d(width, affine=False)
        self.drop, self.noise = Drop(), Noise()
        if frozen:
            self.layers[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(x)))
        return self.noise(self.norm(x.float())).square().mean()


class Progress:
    """Where a program is: tracked, so that it goes back with the states."""

    def __init__(self) -> None:
        self.step = 0
        self.written = self.loaded = -1  # the step before which that was done last

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, values: dict[str, int]) -> None:
        vars(self).update(values)


@dataclass(frozen=True)
class Program:
    """`write_at`, `load_at`, `skip_at`, `evaluate_at`: the steps before, or in, which a weight is
    rewritten, a checkpoint is loaded, the loss is no number, the model is evaluated."""

    number: int
    ranks: int
    stage: int
    units: int
    width: int
    steps: int
    drives: int
    precision: str
    moment_precision: str
    algorithm: str
    update: str
    clip: str
    accumulates: bool
    scheduled: bool
    frozen: bool
    roomy: bool
    cached: bool
    write_at: int
    load_at: int
    skip_at: int
    evaluate_at: int

    @property
    def half(self) -> int:
        """Half of the steps."""
        return self.steps // 2

    def model(self, rank: int) -> Net:
        """The model as it is built in every process of `rank`, whose generators begin there."""
        python, numpy, generator = generators()
        seed = self.number + 1000 * rank
        python.seed(seed)
        numpy.seed(seed)
        generator.manual_seed(seed)
        with _building:
            torch.manual_seed(self.number)
            return Net(self.units, self.width, self.frozen)

    def optimizer(self, model: nn.Module) -> Any:
        """Its optimizer."""
        norm = 0.05 if self.clip == "optimizer" else None
        options = {"max_grad_norm": norm, "skip_nonfinite": True}
        if self.algorithm == "adam":
            return infinity.AdamW(model.parameters(), lr=1e-2, **options)
        momentum = 0.9 if self.algorithm == "momentum" else 0.0
        return infinity.SGD(model.parameters(), lr=1e-2, momentum=momentum, **options)

    def batch(self, step: int, micro: int, rank: int) -> torch.Tensor:
        """What `rank` trains step `step` with."""
        generator = torch.Generator().manual_seed(1000 * step + 100 * rank + micro)
        batch = torch.randn(ROWS, self.width, generator=generator)
        return batch.to(torch.bfloat16 if self.precision == "bf16" else torch.float32)


_building = threading.Lock()
"""Parameters are drawn from torch's default generator."""


def number_of(seed: int) -> int:
    """The program that a seed runs."""
    if Chance("ranks", seed).of("several") < SHARE_OF_RANKS:
        return SHAPES + seed % SHAPES_OF_RANKS
    return seed % SHAPES


@functools.cache
def program(number: int) -> Program:
    """Program `number`. Those of several ranks load no checkpoint."""
    chance = Chance("program", number)

    def one(key: str, *choices: Any) -> Any:
        return chance.one(choices, key)

    steps = one("steps", 3, 4, 4, 5)
    algorithm = one("algorithm", "adam", "adam", "momentum", "sgd")
    several = number >= SHAPES
    return Program(
        number=number,
        ranks=one("ranks", 2, 2, 2, 3) if several else 1,
        stage=one("stage", 3, 3, 0) if several else 3,
        units=one("units", 2, 3, 3, 4),
        width=one("width", 32, 48, 64),
        steps=steps,
        drives=one("drives", 1, 2),
        precision=one("precision", "fp32", "bf16"),
        moment_precision=one("moments", "fp32", "fp32", "bf16", "int8"),
        algorithm=algorithm,
        update=one("update", "exact", "speculative", "speculative", "plain"),
        clip=one("clip", "", "optimizer", "engine"),
        accumulates=one("accumulates", False, False, False, True),
        scheduled=one("scheduled", False, True),
        frozen=one("frozen", False, False, False, True),
        roomy=one("roomy", False, False, True),
        cached=one("cached", False, False, True),
        write_at=one("write", -1, -1, *range(steps)),
        load_at=-1 if several else one("load", *[-1] * 6, *range(1, steps)),
        skip_at=one("skip", -1, -1, -1, *range(steps)),
        evaluate_at=one("evaluate", *[-1] * 6, *range(steps)),
    )


def budgets(
    wanted: Program, wraps: Callable[[dict[str, int]], infinity.BudgetError | None]
) -> dict[str, int]:
    """The smallest budgets that the program has room in, as the refusals name them, or more;
    `wraps` tries some, and returns the refusal."""
    values = {"gpu_memory": 1, "cpu_memory": 1}
    while (error := wraps(values)) is not None:
        found = re.search(r"smallest (\w+) that works is (\d+)", str(error))
        assert found is not None, error
        values[found[1]] = int(found[2])
    more = 4 if wanted.roomy or wanted.cached else 1
    return {name: value * more for name, value in values.items()}


def _config(
    wanted: Program, drives: Sequence[Path], durability: int | str, given: dict[str, Any]
) -> infinity.Config:
    """`given` has the budgets, and may have another cache."""
    return config_of(
        nvme=list(drives),
        durability=durability,
        precision=wanted.precision,
        moment_precision=wanted.moment_precision,
        algorithm=wanted.algorithm,
        update=wanted.update,
        device="cpu",
        threads=1,
        poison=True,
        stage=wanted.stage,
        **({"collective_timeout": TIMEOUT} if wanted.ranks > 1 else {}),
        **{"cache": "auto" if wanted.cached else 0} | given,
    )


_leaving = threading.Lock()
"""What is collected is of one rank."""


class Run:
    """A program in a process of its own, from `wrap` on, on one of its ranks; who has it closes its
    engine."""

    def __init__(
        self,
        wanted: Program,
        drives: Sequence[Path],
        checkpoint: Path,
        given: dict[str, Any],
        durability: int | str = "step",
        rank: int = 0,
    ) -> None:
        self.between: Callable[[str], object] = lambda moment: None
        """Is told of each of `MOMENTS` as it comes."""
        self.saved = drives[0].with_name(SNAPSHOTS)
        """The folder of snapshots."""
        self.program, self._checkpoint, self._rank = wanted, checkpoint, rank
        self.model = wanted.model(rank)
        self.model.noise.comes = lambda: self.between("in forward")
        self.engine: infinity.Engine | None = None
        self._config = _config(wanted, drives, durability, given)
        self.steps_per_commit = self._config.steps_per_commit
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.progress = Progress()
        self.is_loading = False
        """Whether it is in the middle of a load, or was cut off there."""

    def wrap(self, resume: bool) -> None:
        """Wrap the model."""
        infinity.wrap(self.model, self._config, units=list(self.model.layers), resume=resume)
        self.engine = infinity.engine(self.model)

    def begin(self, resume: bool) -> int:
        """Wrap, and make all that is committed; returns the step to go on with."""
        wanted = self.program
        self.wrap(resume)
        assert self.engine is not None
        self.optimizer = wanted.optimizer(self.model)
        tracked: dict[str, Any] = {"progress": self.progress}
        if wanted.scheduled:
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer, lambda step: 1 / (1 + step)
            )
            tracked["scheduler"] = self.scheduler
        self.engine.track(**tracked)
        return self.progress.step

    def go_on(self, see: Callable[[int, str], None], until: int | None = None) -> None:
        """Train to the end, or step `until`; `see` is told the number of each step that has ended,
        and what it shows: its loss and its rate."""
        progress, end = self.progress, self.program.steps if until is None else until
        while progress.step < end:
            self.between("begin")
            self._before(progress.step)
            self.between("prepared")
            loss = self._train(progress.step)
            rate = self.optimizer.param_groups[0]["lr"]
            if self.scheduler is not None:
                self.scheduler.step()
            progress.step += 1
            self.between("scheduled")
            self.optimizer.zero_grad()
            see(progress.step - 1, f"loss {loss!r}, rate {rate!r}")
        self.between("end")

    def _before(self, step: int) -> None:
        wanted, progress = self.program, self.progress
        if step == wanted.write_at and progress.written != step:
            weights = [self.model.layers[0].weight]
            if self.model.layers[-1].bias.requires_grad:
                weights.append(self.model.layers[-1].bias)
            with infinity.gathered(weights, write=True), torch.no_grad():
                for weight in weights:
                    weight.mul_(0.75).add_(0.01)
            progress.written = step
        if step == wanted.load_at and progress.loaded != step:
            assert self.engine is not None
            progress.loaded, self.is_loading = step, True
            self.engine.load_checkpoint(self._checkpoint, self.optimizer)
            self.is_loading = False
        if step == wanted.evaluate_at:
            self.evaluate(step)

    def evaluate(self, step: int) -> None:
        """A forward that changes nothing."""
        with torch.no_grad():
            self.model.eval()(self.program.batch(step, 0, self._rank))
        self.model.train()

    def _train(self, step: int) -> float:
        total = self.accumulate(step)
        if self.program.clip == "engine" and step != self.program.skip_at:
            assert self.engine is not None
            self.engine.clip_grad_norm_(0.05)
        self.optimizer.step()
        self.between("stepped")
        return total

    @property
    def least_committed(self) -> int:
        """The step that a resume goes on with, or a later one, now that a step has ended: it began
        when what was to be committed before it was. A load is committed, and goes back to the
        number of the step that it was saved after."""
        assert self.engine is not None
        updater = Probe(self.engine).updater
        before = updater.posted_steps + updater.skipped_steps - 1
        return max(self.progress.step - 1 - before % self.steps_per_commit, self.progress.loaded)

    def step_alone(self, step: int) -> None:
        """A step, and nothing of what comes after it."""
        self._before(step)
        self._train(step)

    def accumulate(self, step: int) -> float:
        """The forwards and backwards of a step; returns the sum of the losses."""
        wanted, total = self.program, 0.0
        for micro in range(2 if wanted.accumulates else 1):
            loss = self.model(wanted.batch(step, micro, self._rank))
            if step == wanted.skip_at:
                loss = loss * float("nan")
            self.between("forward")
            loss.backward()
            self.between("backward")
            total += loss.item()
        return total

    def leave(self) -> None:
        """Let go of the model, which ends the engine."""
        with _leaving:
            self.engine = self.optimizer = self.scheduler = None
            self.model.noise.comes = None
            del self.model
            gc.collect()

    def save(self) -> None:
        """Save the checkpoint."""
        assert self.engine is not None
        self.engine.save_checkpoint(self._checkpoint, self.optimizer)

    def states(self) -> dict[str, Any]:
        """Weights, buffers, and all of the optimizer."""
        found: dict[str, Any] = {
            name: tensor.clone() for name, tensor in self.model.state_dict().items()
        }
        saved = copy.deepcopy(self.optimizer.state_dict())
        for at, state in saved["state"].items():
            found |= {f"{name} of {at}": value for name, value in state.items()}
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in saved["param_groups"]
        ]
        return found | {"groups": repr(groups), "progress": self.progress.state_dict()}

    def wrongs(self) -> list[str]:
        """What is not as the invariants say, at rest between two steps."""
        assert self.engine is not None
        probe, found = Probe(self.engine), []
        self.engine.drain()
        probe.committer.rest()
        report = self.engine.report()
        found += [
            f"I5: {tier} had {report.peaks[tier]} of {limit} bytes"
            for tier, limit in report.limits.items()
            if report.peaks[tier] > limit
        ]
        if probe.used("staging"):
            found.append(f"I3: {probe.used('staging')} bytes of staging are in use")
        found += [
            f"I3: {unit.facts.name} is pinned"
            for unit in self.engine.units
            if any(block.copy.pins and not block.permanent for block in unit.blocks.values())
        ]
        committed = self.engine.committed_step or 0
        posted = report.steps + report.skipped_steps
        if not posted - self.steps_per_commit <= committed <= posted:
            found.append(f"I9: {posted} steps were made, and {committed} are committed")
        return found

    def give_up(self) -> None:
        """It hangs: let all who wait go."""
        if self.engine is not None:
            probe = Probe(self.engine)
            probe.store.latch.fail(RuntimeError("it hangs"))
            probe.jobs.refuse()
            probe.jobs.end_jobs()

    def traffic(self) -> list[str]:
        """Where the last step moved other bytes than the plan states."""
        assert self.engine is not None
        report, plan = self.engine.report(), self.engine.plan()
        pairs = {
            "read": (report.read_per_parameter, plan.read),
            "written": (report.written_per_parameter, plan.update_written),
        }
        return [
            f"I8: {round(moved * report.parameters)} bytes were {what}, and {planned} planned"
            for what, (moved, planned) in pairs.items()
            if round(moved * report.parameters) != planned
        ]


def same(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The names of the states that differ in any bit."""
    names = found.keys() | expected.keys()
    return sorted(
        name
        for name in names
        if name not in found or name not in expected or not _equal(found[name], expected[name])
    )


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return bool(one == other)
    return one.dtype == other.dtype and bool(
        torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        if one.dim()
        else torch.equal(one, other)
    )
