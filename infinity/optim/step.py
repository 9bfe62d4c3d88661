"""One optimizer step as a value: what is done to every unit, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from infinity.observe import Meter
from infinity.optim.job import Job, JobState, UnitUpdate
from infinity.optim.kernels import Segment
from infinity.sharding.unit import Unit


class UnitShare(NamedTuple):
    """What one optimizer has of a unit: parameters, by their index, in rising order."""

    unit: Unit
    positions: tuple[int, ...]

    def present(self) -> list[int]:
        """Those that have a gradient."""
        return [index for index in self.positions if self.unit.gradients.ledger.has(index)]


@dataclass(frozen=True, eq=False)
class Step:
    """One step of one optimizer, fixed: nothing that happens later changes what it does.

    The optimizer builds it when the gradients are final, and the updater makes it. What was begun
    before the step is kept where it is, term for term, what `segments` says; else it is rolled
    back, and done again.
    """

    number: int
    """Of all steps of the engine, those included that were left out; from 1."""
    factors: Mapping[UnitShare, float]
    """What clips the gradients of every unit. The segments have it already."""
    loss_scale: float
    """What this optimizer multiplied the loss by; 1 where nothing does. The segments have it
    already."""
    segments: Mapping[UnitShare, tuple[Segment, ...]]
    """What is done to this rank's shard of every unit with a gradient."""
    counts: Mapping[int, int]
    """How many updates each parameter with a gradient has had after this step, by its id."""
    foreseen: bool
    """Whether `factors` were known before the step."""

    @property
    def shares(self) -> tuple[UnitShare, ...]:
        """The parameters of every unit that it updates."""
        return tuple(self.segments)

    @property
    def updates(self) -> list[UnitUpdate]:
        """The same, as the pipeline takes it."""
        return [UnitUpdate(share.unit, segments) for share, segments in self.segments.items()]

    @property
    def unclipped(self) -> bool:
        """Whether no gradient has been clipped, in this step or before it."""
        return all(
            share.unit.gradients.ledger.clip_of(index) == 1.0
            for share in self.shares
            for index in share.positions
        )

    def spend(self) -> None:
        """The gradients were given to this step's updates, clipped by `factors`."""
        for share in self.shares:
            share.unit.gradients.spend(share.positions, self.factors[share])


@dataclass(frozen=True, eq=False)
class StepRun:
    """What the updater reports of a step: `jobs` make it, and those in `rolled_back` were begun for
    it in vain."""

    jobs: tuple[Job, ...] = ()
    rolled_back: tuple[Job, ...] = ()
    kept: int = 0
    """Updates that were begun before the step and are what it asked for."""

    @property
    def finished(self) -> bool:
        """Whether every update has ended, well or not: what it made is written, and seen."""
        return all(job.state is JobState.ENDED for job in self.jobs)

    @property
    def rollbacks(self) -> int:
        """Updates that were rolled back."""
        return sum(job.update is not None for job in self.rolled_back)

    @property
    def meters(self) -> list[Meter]:
        """What all of its updates moved, in bytes."""
        return [job.meter for job in (*self.jobs, *self.rolled_back)]
