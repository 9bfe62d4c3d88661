"""Reads states for a save: from an engine between two steps, or from a commit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from infinity.checkpoint.series import Series
from infinity.optim.optimizer import Optimizer
from infinity.optim.updater import Updater
from infinity.sharding.unit import Unit
from infinity.tiers.access import Checkout
from infinity.tiers.block import Block
from infinity.tiers.staging import ChunkRequest


class StatesReader(Protocol):
    """The source of a save. Used by one thread. `begin` is the first call and `end` the last."""

    def begin(self, series: Sequence[Series]) -> None:
        """Prepare to read `series`, and nothing else."""

    def end(self) -> None:
        """End reading."""

    def counts(self, updater: Updater) -> tuple[int, int]:
        """The number of steps, and of skipped steps."""

    def header(self, optimizer: Optimizer) -> Mapping[str, Any]:
        """See `Optimizer.header`."""

    def is_written(self, block: Block) -> bool:
        """Whether an update has written `block`."""

    def starts(self, series: Series) -> Sequence[int]:
        """The first element of every chunk."""

    def check_out(self, series: Series, begin: int, waits: bool) -> list[Checkout] | None:
        """The chunk from element `begin` on. None if there is no room and `waits` is false."""

    def decode(
        self, series: Series, tensors: Sequence[torch.Tensor], first: int, values: torch.Tensor
    ) -> None:
        """See `States.decode`."""

    def in_order(self, units: Sequence[Unit | None]) -> Iterator[int]:
        """The numbers of all `units`, in the best order for reading. `units[number]` is the unit of
        an item, or None."""

    def leave(self, unit: Unit) -> None:
        """The consecutive items of `unit` have been read."""


class CommitReader(StatesReader, Protocol):
    """The states of a commit, which a snapshot reads. `infinity.durable` implements it."""

    buffers: Mapping[str, torch.Tensor]
    """The persistent buffers of the model, by name."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the commit."""

    @property
    def step(self) -> int:
        """The number of the committed step, skipped steps included."""


class LiveStates:
    """The states of an engine between two steps, read through the staging of its store."""

    def begin(self, series: Sequence[Series]) -> None:
        """Does nothing, because no update is in flight."""

    def end(self) -> None:
        """Does nothing."""

    def counts(self, updater: Updater) -> tuple[int, int]:
        """The current counts."""
        return updater.posted_steps, updater.skipped_steps

    def header(self, optimizer: Optimizer) -> Mapping[str, Any]:
        """The current header."""
        return optimizer.header()

    def is_written(self, block: Block) -> bool:
        return block.written

    def starts(self, series: Series) -> Sequence[int]:
        return series.unit.states.chunks()

    def check_out(self, series: Series, begin: int, waits: bool) -> list[Checkout] | None:
        """See `Staging`."""
        states, staging = series.unit.states, series.unit.store.staging
        blocks = states.blocks_of(states.source_of(series.kind))
        request = ChunkRequest(blocks, begin, blocks)
        return staging.check_out(request) if waits else staging.try_check_out(request)

    def decode(
        self, series: Series, tensors: Sequence[torch.Tensor], first: int, values: torch.Tensor
    ) -> None:
        states = series.unit.states
        states.decode(states.source_of(series.kind), tensors, first, values)

    def in_order(self, units: Sequence[Unit | None]) -> Iterator[int]:
        """In the order of `units`."""
        return iter(range(len(units)))

    def leave(self, unit: Unit) -> None:
        """Does nothing, because the caller releases its chunks."""
