"""The smallest change that makes a refused plan fit, and what makes a fitting one faster.

Changes are tried in the order of their cost. Placement costs time and changes no number. A smaller
batch with more micro-batches keeps the numbers, too. Narrower moments change numbers. More hardware
costs money. One change comes before two, and two before more hardware.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from infinity.config import Config, Tuning
from infinity.errors import ConfigError
from infinity.plan.forecast import Forecast, place, plan
from infinity.plan.hardware import Hardware
from infinity.plan.memory import Training, drive_bytes
from infinity.plan.model import PlannedModel
from infinity.quantities import format_bytes
from infinity.tier import TIERS

GRAIN = 1 << 30
"""More memory is advised in multiples of this many bytes."""
MOST_GRAINS = 1 << 24
MOST_NODES = 1 << 10
_BUDGETS = ("gpu_memory", "cpu_memory")
_STATES = ("optimizer", "parameters", "gradients")


class Situation(NamedTuple):
    """The parts of a case that advice may change."""

    config: Config
    training: Training
    hardware: Hardware


@dataclass(frozen=True)
class Change:
    """One change, in `words`. `apply` makes it. It returns None if there is nothing to change, and
    raises `ConfigError` if the result is impossible."""

    words: str
    apply: Callable[[Situation], Situation | None]


class Advice(NamedTuple):
    """Advice in words, and the case that follows from it."""

    words: str
    case: Situation


def advise(forecast: Forecast) -> Advice | None:
    """The smallest change after which a refused `forecast` fits. None if it fits, or if nothing
    helps."""
    if forecast.fits:
        return None
    case = Situation(forecast.config, forecast.training, forecast.hardware)
    for change in _attempts(forecast.model, case):
        changed = _applied(change, case)
        if changed is not None and _fits(forecast.model, changed):
            return Advice(change.words, changed)
    return None


MOST_ACCUMULATED = 1 << 12
LEAST_GAIN = 1.02
"""A change that makes training faster by less is not worth a line."""


class Gain(NamedTuple):
    """A change in words, and the tokens per second after it."""

    words: str
    tokens_per_second: float


def gains(forecast: Forecast) -> list[Gain]:
    """Changes that make a fitting `forecast` faster: so many micro-batches that the drives are
    hidden, one more drive, and more host memory."""
    pace, hardware, training = forecast.pace, forecast.hardware, forecast.training
    if pace is None:
        return []
    tried: list[tuple[str, Training, Hardware]] = []
    wanted = -(-int(pace.hiding_tokens or 0) // training.windows)
    if training.accumulate < wanted <= MOST_ACCUMULATED:
        more = dataclasses.replace(training, accumulate=wanted)
        tried.append((f"accumulate {wanted} micro-batches, which hides the drives", more, hardware))
    if hardware.drives and pace.traffic.read + pace.written:
        drives = (*hardware.drives, hardware.drives[0])
        larger = dataclasses.replace(hardware, drives=drives)
        tried.append(("add a drive to each node", training, larger))
        larger = More(0, 32 * GRAIN, 0).added_to(hardware)
        tried.append(("add 32 GiB of host memory to each node", training, larger))
    found = []
    for words, changed, machine in tried:
        other = plan(forecast.model, machine, changed, forecast.config).pace
        if other is not None and other.tokens_per_second > LEAST_GAIN * pace.tokens_per_second:
            found.append(Gain(words, other.tokens_per_second))
    return found


def _attempts(model: PlannedModel, case: Situation) -> Iterator[Change]:
    """All changes that may help, the cheapest first."""
    singles = [*_placements(case), *_batches(case), *_formats()]
    yield from singles
    for first, second in itertools.combinations(singles, 2):
        yield _both(first, second)
    yield from _hardware(model, case)


def _fits(model: PlannedModel, case: Situation) -> bool:
    _, memory, problems = place(model, case.hardware, case.training, case.config)
    return memory is not None and not problems


def _applied(change: Change, case: Situation) -> Situation | None:
    try:
        return change.apply(case)
    except ConfigError:
        return None


def _both(first: Change, second: Change) -> Change:
    def apply(case: Situation) -> Situation | None:
        between = first.apply(case)
        return None if between is None else second.apply(between)

    return Change(f"{first.words}, and {second.words}", apply)


def _all_of(changes: list[Change], case: Situation) -> Change:
    """The members of `changes` that are possible one after the other. Of several for one field, the
    last."""
    made: dict[str, str] = {}
    for change in changes:
        changed = _applied(change, case)
        if changed is not None:
            case = changed
            made[change.words.partition("=")[0]] = change.words
    words = ", ".join(made.values())
    return Change(words or "leave the rest as it is", lambda _: case)


# Changes that keep the numbers


def _configured(words: str, fields: dict[str, Any], tuning: dict[str, Any]) -> Change:
    def apply(case: Situation) -> Situation | None:
        old = case.config
        values = {name: getattr(old, name) for name in Config.model_fields if name != "tuning"}
        own = {name: getattr(old.tuning, name) for name in Tuning.model_fields}
        if {**values, **fields} == values and {**own, **tuning} == own:
            return None
        new = Config(**{**values, **fields}, tuning=Tuning(**{**own, **tuning}))
        return case._replace(config=new)

    return Change(words, apply)


def _placements(case: Situation) -> list[Change]:
    config = case.config
    changes = [
        _configured(f"leave {key} out", {key: "auto"}, {})
        for key in _BUDGETS
        if getattr(config, key) != "auto"
    ]
    for state in _STATES:
        if TIERS[getattr(config, state)].is_device:
            changes.append(_configured(f'set {state}="cpu"', {state: "cpu"}, {}))
    if case.hardware.drives:
        nvme = config.nvme or ("/mnt/nvme0",)
        for state in _STATES:
            if not TIERS[getattr(config, state)].is_drive:
                words = f'set {state}="nvme"'
                changes.append(_configured(words, {"nvme": nvme, state: "nvme"}, {}))
    changes.append(Change("recompute activations (activation checkpointing)", _recomputed))
    if TIERS[config.activations].is_device:
        changes.append(_configured('set activations="cpu"', {"activations": "cpu"}, {}))
    if not TIERS[config.activations].is_drive and case.hardware.drives:
        nvme = config.nvme or ("/mnt/nvme0",)
        fields = {"nvme": nvme, "activations": "nvme"}
        changes.append(_configured('set activations="nvme"', fields, {}))
    return changes


def _recomputed(case: Situation) -> Situation | None:
    if case.training.recomputes:
        return None
    return case._replace(training=dataclasses.replace(case.training, recomputes=True))


def _batches(case: Situation) -> list[Change]:
    """Smaller micro-batches, with as many tokens in a step."""
    changes = []
    batch, accumulate = case.training.batch, case.training.accumulate
    while batch % 2 == 0:
        batch, accumulate = batch // 2, accumulate * 2
        training = dataclasses.replace(case.training, batch=batch, accumulate=accumulate)
        words = f"use {accumulate} micro-batches of {batch} windows"
        changes.append(Change(words, lambda each, new=training: each._replace(training=new)))  # type: ignore[misc]
    return changes


# Changes of numbers or risks


def _formats() -> list[Change]:
    without = "set Tuning(copy_on_write=False), after which a failed step loses the states"
    return [
        _configured('set Tuning(gradient_precision="auto")', {}, {"gradient_precision": "auto"}),
        _configured(without, {}, {"copy_on_write": False}),
        _configured('set moment_precision="bf16"', {"moment_precision": "bf16"}, {}),
        _configured('set moment_precision="int8"', {"moment_precision": "int8"}, {}),
    ]


# More hardware


class More(NamedTuple):
    """Additional bytes of each memory."""

    gpu: int
    host: int
    drives: int

    @property
    def price(self) -> float:
        """The rough cost, in the price of a byte of host memory."""
        return 20 * self.gpu + self.host + self.drives / 20

    def added_to(self, hardware: Hardware) -> Hardware:
        """The machine with the additional memory."""
        drives, gpu = hardware.drives, hardware.gpu_memory
        if drives:
            first = dataclasses.replace(drives[0], capacity=drives[0].capacity + self.drives)
            drives = (first, *drives[1:])
        more = self.host if hardware.one_pool else self.gpu
        return dataclasses.replace(
            hardware,
            gpu_memory=None if gpu is None else gpu + more,
            host_memory=hardware.host_memory + self.host,
            host_total=None if hardware.host_total is None else hardware.host_total + self.host,
            drives=drives,
        )

    def words(self) -> str:
        """The additional memory in words."""
        parts = {"memory to each GPU": self.gpu, "host memory": self.host, "drives": self.drives}
        said = [f"{format_bytes(nbytes)} of {what}" for what, nbytes in parts.items() if nbytes]
        return f"add {' and '.join(said)}" + " to each node" * bool(self.host or self.drives)


def _hardware(model: PlannedModel, case: Situation) -> Iterator[Change]:
    """More memory, with the change of placement that needs the cheapest memory."""
    found: list[tuple[More, Change | None, Change]] = []
    placements = _placements(case)
    for before in [None, *placements, _all_of(placements, case)]:
        changed = case if before is None else _applied(before, case)
        more = None if changed is None else _least(model, changed)
        if changed is not None and more is not None:
            larger = more.added_to(changed.hardware)
            found.append((more, before, _with_hardware(more.words(), larger)))
    for _, before, change in sorted(found, key=lambda each: each[0].price):
        yield change if before is None else _both(before, change)
    yield from _more_nodes(model, case)


def _least(model: PlannedModel, case: Situation) -> More | None:
    """The least additional memory that fits, in whole `GRAIN`s. The dearest memory is minimized
    first. None if nothing helps."""
    plenty = MOST_GRAINS * GRAIN
    more = More(plenty, plenty, plenty)

    def fits(tried: More) -> bool:
        return _fits(model, case._replace(hardware=tried.added_to(case.hardware)))

    if not fits(more):
        return None
    for memory in More._fields:
        none = more._replace(**{memory: 0})
        if fits(none):
            more = none
            continue
        high = 1 if memory != "drives" else _missing_drives(model, case, more)
        while not fits(more._replace(**{memory: high * GRAIN})):
            high *= 2
        low = high // 2 if memory != "drives" else high - 1
        while high - low > max(1, high // 32):
            middle = (low + high) // 2
            enough = fits(more._replace(**{memory: middle * GRAIN}))
            low, high = (low, middle) if enough else (middle, high)
        more = more._replace(**{memory: high * GRAIN})
    return more


def _missing_drives(model: PlannedModel, case: Situation, more: More) -> int:
    """The missing bytes of drives, in whole `GRAIN`s. No size of a drive changes a placement."""
    larger = more.added_to(case.hardware)
    _, memory, _ = place(model, larger, case.training, case.config)
    missing = 0 if memory is None else drive_bytes(memory, larger) - case.hardware.capacity
    return max(1, -(-missing // GRAIN))


def _more_nodes(model: PlannedModel, case: Situation) -> Iterator[Change]:
    nodes = case.hardware.nodes
    while nodes < MOST_NODES:
        nodes *= 2
        larger = dataclasses.replace(case.hardware, nodes=nodes)
        if _fits(model, case._replace(hardware=larger)):
            yield _with_hardware(f"use {nodes} nodes", larger)
            return


def _with_hardware(words: str, hardware: Hardware) -> Change:
    return Change(words, lambda case: case._replace(hardware=hardware))
