"""Where a save reads states: from an engine that rests, or from what its last commit speaks of
while it trains."""

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
    """What a save reads. For one thread; `begin` comes first, and `end` last."""

    def begin(self, series: Sequence[Series]) -> None:
        """These are all that will be read."""

    def end(self) -> None:
        """Nothing more will be read."""

    def counts(self, updater: Updater) -> tuple[int, int]:
        """How many steps were made, and how many skipped."""

    def header(self, optimizer: Optimizer) -> Mapping[str, Any]:
        """See `Optimizer.header`."""

    def is_written(self, block: Block) -> bool:
        """Whether an update has written it."""

    def starts(self, series: Series) -> Sequence[int]:
        """The first element of every chunk."""

    def check_out(self, series: Series, begin: int, waits: bool) -> list[Checkout] | None:
        """The chunk from element `begin` on; None where there is no room for it, unless it
        `waits`."""

    def decode(
        self, series: Series, tensors: Sequence[torch.Tensor], first: int, values: torch.Tensor
    ) -> None:
        """See `States.decode`."""

    def in_order(self, units: Sequence[Unit | None]) -> Iterator[int]:
        """The numbers of what is to be read, each a part of one of `units` or of none, in the order
        in which that is best."""

    def leave(self, unit: Unit) -> None:
        """All of it has been read that comes together."""


class CommitReader(StatesReader, Protocol):
    """What a snapshot reads: the states of a commit. `infinity.durable` has one."""

    buffers: Mapping[str, torch.Tensor]
    """The persistent buffers of the model, by name."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those whose states were committed."""

    @property
    def step(self) -> int:
        """The step that was committed, those included that were left out."""


class LiveStates:
    """The states of an engine that rests, through the staging of its store."""

    def begin(self, series: Sequence[Series]) -> None:
        """Nothing: no update is under way."""

    def end(self) -> None:
        """Nothing."""

    def counts(self, updater: Updater) -> tuple[int, int]:
        """As of now."""
        return updater.posted_steps, updater.skipped_steps

    def header(self, optimizer: Optimizer) -> Mapping[str, Any]:
        """As of now."""
        return optimizer.header()

    def is_written(self, block: Block) -> bool:
        """Whether an update has written it."""
        return block.written

    def starts(self, series: Series) -> Sequence[int]:
        """The first element of every chunk."""
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
        """See `States.decode`."""
        states = series.unit.states
        states.decode(states.source_of(series.kind), tensors, first, values)

    def in_order(self, units: Sequence[Unit | None]) -> Iterator[int]:
        """As they are."""
        return iter(range(len(units)))

    def leave(self, unit: Unit) -> None:
        """Nothing: whoever checks out also releases."""
