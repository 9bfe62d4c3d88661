#!/usr/bin/env python3
"""What the engine's own Python costs with a thousand units or twenty thousand tensors, and how that
grows.

Three models of tiny layers, so that little else takes time: `--units` units of two tensors each, as
many units of `--tensors` in all, and four units of `--tensors` in all. Each is trained with all
states on NVMe, and with all in host memory, in rounds beside plain PyTorch. The compute device has
room for a quarter of the units.

The engine's share of a step is what its functions take on the thread of the model. It is measured
where they begin and end, without what they wait for, and is stated by component. Each includes the
torch calls that it makes. Threads of the engine run beside that; their CPU time is stated apart.

For growth a model has 1, 2, 4 and 8 eighths of twice the units. The exponent is the slope of the
logarithm over that of the number of units: 1 where a unit costs as much however many there are. It
is stated of lines of the package that run, which no load of the machine changes, and of seconds.

    benchmarks/many_units.py [--nvme DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn

import infinity
from infinity.bench.summary import Row, Spread, Summary
from infinity.modules.hooks import Hooks
from infinity.modules.packing import Packer
from infinity.optim.job_table import JobTable
from infinity.optim.optimizer import Optimizer
from infinity.optim.updater import Updater
from infinity.quantities import round_up
from infinity.schedule.runtime import Runtime
from infinity.sharding.gradients import Gradients
from infinity.sharding.parameter_data import ParameterData
from infinity.tiers.resident import Residency

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.line_counter import LineCounter

QUESTION = "What does the engine's own Python cost with many units and many tensors?"
LIMIT = "a step of plain PyTorch, in the same round"
SEED = 0
TIERS = ("nvme", "cpu")
SETTLING = 4
"""Steps until what is resident repeats itself."""
WAITS = "waits"
COMPONENTS: dict[str, dict[type, tuple[str, ...]]] = {
    "hooks": {Hooks: ("_before_forward", "_after_forward", "_bring")},
    "schedule": {Runtime: ("enter", "begin", "stepped", "look_ahead")},
    "residency": {Residency: ("_acquire", "start", "release", "begin_update", "block_at")},
    "parameters": {ParameterData: ("show", "hide", "window", "changed")},
    "saved_tensors": {Packer: ("pack", "unpack")},
    "gradients": {Gradients: ("add", "settle", "spend", "forget")},
    "optimizer": {
        Optimizer: ("step", "zero_grad"),
        Updater: ("post", "gradients_came", "pass_forward"),
    },
    WAITS: {Residency: ("wait", "await_idle"), JobTable: ("block_until",)},
}
"""What is timed of the thread of the model, by component."""


class Block(nn.Module):
    """Layers of `width`, two tensors each."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + 0.01 * layer(x)
        return x


class Shape(NamedTuple):
    """`units` blocks of `layers` layers each."""

    name: str
    units: int
    layers: int


class Timers:
    """Seconds of each component on one thread: what lies inside of another one counts for the inner
    one alone."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._thread = threading.get_ident()
        self._open: list[str] = []
        self._since = 0.0

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def timed(self, component: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, as a part of `component`."""

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            self._switch()
            self._open.append(component)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch()
                self._open.pop()

        return inside

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, all that `COMPONENTS` names is timed, in engines that are made inside."""
        with ExitStack() as stack:
            for component, classes in COMPONENTS.items():
                for owner, names in classes.items():
                    for name in names:
                        timed = self.timed(component, getattr(owner, name))
                        stack.enter_context(patch.object(owner, name, timed))
            yield


def build(shape: Shape, width: int) -> nn.Sequential:
    """The model of `shape`."""
    torch.manual_seed(SEED)
    return nn.Sequential(*(Block(shape.layers, width) for _ in range(shape.units)))


def step(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    """One step."""
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def seconds_of(work: Callable[[], Any]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def config_of(model: nn.Module, shape: Shape, tier: Any, folder: Path) -> infinity.Config:
    """All states on `tier`; room for a quarter of the units, eight at least."""
    numel = sum(p.numel() for p in model[0].parameters())  # type: ignore[index]
    unit = 4 * round_up(numel, 4096)
    return infinity.Config(
        nvme=folder,
        parameters=tier,
        optimizer=tier,
        gradients="cpu",
        precision="fp32",
        gpu_memory=max(8, shape.units // 4) * 2 * unit,
        cpu_memory=12 * unit * shape.units + (256 << 20),
    )


def engine_threads() -> float:
    """CPU seconds of the threads of the engine so far."""
    clocks = [
        time.pthread_getcpuclockid(thread.ident)
        for thread in threading.enumerate()
        if thread.name.startswith("infinity") and thread.ident is not None
    ]
    return sum(map(time.clock_gettime, clocks))


def measured(shape: Shape, tier: str, options: argparse.Namespace) -> Row:
    """The row of one model on one tier."""
    batch, facts = torch.randn(options.batch, options.width), dict[str, Any]()
    timers = Timers()
    with (
        tempfile.TemporaryDirectory(dir=options.nvme) as place,
        timers.installed(),
    ):
        plain = build(shape, options.width)
        theirs = torch.optim.AdamW(plain.parameters(), lr=1e-4)
        model = build(shape, options.width)
        states, saved = Path(place, "states"), Path(place, "checkpoint")
        states.mkdir()
        config = config_of(model, shape, tier, states)
        phases = {"wrap": seconds_of(lambda: infinity.wrap(model, config, units=[Block]))}
        engine = infinity.engine(model)
        ours = infinity.AdamW(model.parameters(), lr=1e-4)
        alone = {"first_step": seconds_of(lambda: step(plain, theirs, batch))}
        phases["first_step"] = seconds_of(lambda: step(model, ours, batch))
        for _ in range(SETTLING):
            step(plain, theirs, batch)
            step(model, ours, batch)
        times, beside, shares, threads = [], [], [], []
        parts: dict[str, list[float]] = {name: [] for name in COMPONENTS}
        for _ in range(options.rounds):
            beside.append(seconds_of(lambda: step(plain, theirs, batch)))
            engine.drain()
            step(model, ours, batch)  # beside the next one there is an update to end
            timers.seconds.clear()
            before = engine_threads()
            took = seconds_of(lambda: step(model, ours, batch))
            threads.append((engine_threads() - before) / took)
            times.append(took)
            for name, found in parts.items():
                found.append(timers.seconds[name] / took)
            shares.append(sum(timers.seconds[name] for name in parts if name != WAITS) / took)
        phases["plan"] = seconds_of(engine.plan)
        phases["state_dict"] = seconds_of(model.state_dict)
        alone["state_dict"] = seconds_of(
            lambda: {name: value.clone() for name, value in plain.state_dict().items()}
        )
        phases["save_checkpoint"] = seconds_of(lambda: engine.save_checkpoint(saved, ours))
        alone["save_checkpoint"] = seconds_of(
            lambda: torch.save([plain.state_dict(), theirs.state_dict()], Path(place, "plain.pt"))
        )
        phases["close"] = seconds_of(engine.close)
    for name, took in phases.items():
        facts[f"{name}_seconds"] = took
        facts[f"{name}_seconds_per_unit"] = took / shape.units
        if name in alone:
            facts[f"{name}_over_plain_ratio"] = took / alone[name]
    facts |= {f"{name}_share_ratio": statistics.median(found) for name, found in parts.items()}
    return Row(
        name=f"{shape.name}, {tier}",
        unit="s",
        rounds=options.rounds,
        value=Spread.of(times),
        ratio=Spread.of([mine / other for mine, other in zip(times, beside, strict=True)]),
        others={
            "engine_share_ratio": Spread.of(shares),
            "engine_threads_cpu_ratio": Spread.of(threads),
            "plain_step_seconds": Spread.of(beside),
        },
        facts=facts,
    )


def costs(units: int, tier: str, options: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Lines and seconds of each phase, of a model of so many units of two tensors."""
    found: dict[str, tuple[float, float]] = {}
    for counts in (True, False):
        shape = Shape("", units, 1)
        batch = torch.randn(options.batch, options.width)
        model = build(shape, options.width)
        with tempfile.TemporaryDirectory(dir=options.nvme) as place:
            states = Path(place, "states")
            states.mkdir()
            config = config_of(model, shape, tier, states)
            made: list[Any] = []

            def make(model: nn.Module = model, made: list[Any] = made) -> None:
                made.append(infinity.AdamW(model.parameters(), lr=1e-4))

            def note(name: str, work: Callable[[], Any], counts: bool = counts) -> None:
                lines = LineCounter()
                if counts:
                    with lines.counting():
                        work()
                    found[name] = sum(lines.lines.values()), 0.0
                else:
                    found[name] = found[name][0], seconds_of(work)

            note("wrap", functools.partial(infinity.wrap, model, config, units=[Block]))
            engine = infinity.engine(model)
            note("optimizer", make)
            train = functools.partial(step, model, made[0], batch)
            note("first_step", train)
            for _ in range(SETTLING):
                train()
            engine.drain()
            note("step", train)
            engine.drain()
            note("plan", engine.plan)
            note("state_dict", model.state_dict)
            save = functools.partial(engine.save_checkpoint, Path(place, "saved"), made[0])
            note("save_checkpoint", save)
            load = functools.partial(engine.load_checkpoint, Path(place, "saved"), made[0])
            note("load_checkpoint", load)
            note("close", engine.close)
    return found


def slope(sizes: list[int], values: list[float]) -> float:
    """The exponent of `values` over `sizes`, by least squares."""
    logs = [math.log(size) for size in sizes], [math.log(max(value, 1e-9)) for value in values]
    return statistics.linear_regression(*logs).slope


def growth(tier: str, options: argparse.Namespace) -> Row:
    """The exponents of all phases."""
    sizes = [max(2, options.units // 4 * factor) for factor in (1, 2, 4, 8)]
    by_size = [costs(size, tier, options) for size in sizes]
    facts: dict[str, Any] = {}
    for name in by_size[0]:
        lines, seconds = zip(*(found[name] for found in by_size), strict=True)
        facts[f"{name}_lines_exponent"] = slope(sizes, list(lines))
        facts[f"{name}_seconds_exponent"] = slope(sizes, list(seconds))
        facts[f"{name}_lines_per_unit_count"] = round(lines[-1] / sizes[-1])
    return Row(name=f"growth from {sizes[0]} to {sizes[-1]} units, {tier}", facts=facts)


def main() -> None:
    """Measure and print; the JSON is written after each row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--nvme", type=Path, help="directory for the states (default: a temporary one)"
    )
    parser.add_argument("--units", type=int, default=1000)
    parser.add_argument("--tensors", type=int, default=20_000)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4, help="rows")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=list(TIERS))
    parser.add_argument("--no-growth", action="store_true", help="leave the exponents out")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    units, tensors = options.units, options.tensors
    shapes = [
        Shape(f"{units} units", units, 1),
        Shape(f"{tensors} tensors in {units} units", units, max(1, tensors // units // 2)),
        Shape(f"{tensors} tensors in 4 units", 4, max(1, tensors // 8)),
    ]
    rows: list[Row] = []
    works = [functools.partial(measured, s, t, options) for s in shapes for t in options.tiers]
    if not options.no_growth:
        works += [functools.partial(growth, tier, options) for tier in options.tiers]
    for work in works:
        rows.append(work())
        summary = Summary.of(__file__, QUESTION, LIMIT, rows, seeds=[SEED], settings=vars(options))
        summary.write(options.json)
    for line in summary.table():
        print(line)


if __name__ == "__main__":
    main()
