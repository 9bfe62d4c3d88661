"""One optimizer step as a value: the update of every unit, and the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from infinity.observe import Meter
from infinity.optim.job import Job, UnitUpdate
from infinity.optim.kernels import Segment
from infinity.sharding.unit import Unit


class UnitShare(NamedTuple):
    """The parameters of a unit that an optimizer updates, by their index, in rising order."""

    unit: Unit
    positions: tuple[int, ...]

    def present(self) -> list[int]:
        """The parameters that have a gradient."""
        return [index for index in self.positions if self.unit.gradients.ledger.has(index)]


@dataclass(frozen=True, eq=False)
class Step:
    """One step of one optimizer. It never changes.

    The optimizer builds it when the gradients are final, and the updater runs it. An update that
    began before the step is kept if it equals `segments`, term for term. Otherwise it is rolled
    back, and done again.
    """

    number: int
    """The number among all steps of the engine, skipped steps included; from 1."""
    factors: Mapping[UnitShare, float]
    """The clip factor of the gradients of every unit. The segments include it."""
    loss_scale: float
    """The factor of this optimizer on the loss; 1 if it has none. The segments include it."""
    segments: Mapping[UnitShare, tuple[Segment, ...]]
    """The update of this rank's shard of every unit with a gradient."""
    counts: Mapping[int, int]
    """The number of updates of each parameter with a gradient after this step, by its id."""
    foreseen: bool
    """Whether `factors` were known before the step."""

    @property
    def shares(self) -> tuple[UnitShare, ...]:
        """The parameters of every unit that it updates."""
        return tuple(self.segments)

    @property
    def updates(self) -> list[UnitUpdate]:
        """The updates of units, for the pipeline."""
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
        """Mark the gradients as spent, clipped by `factors`."""
        for share in self.shares:
            share.unit.gradients.spend(share.positions, self.factors[share])


@dataclass(frozen=True, eq=False)
class StepRun:
    """The updater's report of a step: its `jobs`, and the jobs that were `rolled_back` before
    it."""

    jobs: tuple[Job, ...] = ()
    rolled_back: tuple[Job, ...] = ()
    kept: int = 0
    """The number of updates that began before the step and were kept."""

    @property
    def rollbacks(self) -> int:
        """The number of updates that were rolled back."""
        return sum(job.update is not None for job in self.rolled_back)

    @property
    def meters(self) -> list[Meter]:
        """The bytes that its updates moved."""
        return [job.meter for job in (*self.jobs, *self.rolled_back)]
