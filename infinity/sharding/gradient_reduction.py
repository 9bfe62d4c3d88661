"""Reduces gradients of a unit among ranks, and brings them home while the model runs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from infinity.device import Copy, Mark
from infinity.sharding import collectives
from infinity.sharding.exchange import Exchange
from infinity.sharding.facts import UnitFacts
from infinity.sharding.gradient_block import GradientBlock
from infinity.sharding.layout import PARAMETER_ALIGNMENT
from infinity.sharding.posted import Collective, Contribution
from infinity.sharding.ranks import Among

PIECE_BYTES = 32 << 20
"""The most bytes of gradients that pass the compute device in one reduction. They take 1 to 2 ms on
the link of a GPU, and are enough for the full bandwidth of NCCL."""


class GradientReduction:
    """Brings gradients of one unit into their `block` by the `exchange`, in any step.

    Methods that say so run on the thread of the exchange, all other methods on the thread of the
    model.
    """

    def __init__(self, facts: UnitFacts, block: GradientBlock, exchange: Exchange) -> None:
        self._facts, self._block, self._exchange = facts, block, exchange

    @property
    def averages(self) -> bool:
        """Whether gradients are averaged over the replicas as they come (`Exchange.averages`)."""
        return self._exchange.averages

    def follow(self, copy: Copy) -> None:
        """Let later work of the device wait for `copy`."""
        self._exchange.device.follow_copy(copy)

    def post(
        self,
        join: Callable[[], object],
        scatters: bool = True,
        averages: bool = True,
        idle: Callable[[], object] | None = None,
    ) -> Collective:
        """Post a reduction by `join`: it `scatters` among the shards, `averages` among the
        replicas, or both. A rank without gradients gives `idle`, which runs if no rank has
        gradients."""
        facts, operation = self._facts, "reduce" if scatters else "average"
        nbytes = facts.layout.shard_numel * facts.gradient_dtype.itemsize
        to_shards, to_replicas = facts.layout.ranks - 1, 2 * (facts.replicas - 1) / facts.replicas
        sent = nbytes * (scatters * to_shards + averages * to_replicas)
        contribution = Contribution(join, sent, idle=idle)
        among = Among.DATA if averages else Among.SHARDS
        return self._exchange.post(operation, facts.name, contribution, among)

    def bring(
        self, join: Callable[[], object], arrive: Callable[[], object] = lambda: None
    ) -> Collective:
        """Post `join`, which brings gradients of this rank home. It runs after `arrive`."""
        contribution = Contribution(join, arrive=arrive)
        return self._exchange.post("bring", self._facts.name, contribution, Among.ALONE)

    def reduce_home(self, room: torch.Tensor) -> None:
        """Put this rank's part of the mean of the home of the whole unit into the block. On the
        thread of the exchange.

        Pieces pass `room` (uint8), memory of the compute device, because a group may take no other
        memory. The next piece is copied there while one is reduced. The bits are those of
        `reduced`.

        Example: 4 ranks, shards of 100,000 fp32 elements, `room` of 2 MiB. A half of it fits 65,536
        elements of each shard. So the first piece has 65,536 elements, the second one 34,464.
        """
        device, facts = self._exchange.device, self._facts
        shards = self._block.flat().chunk(facts.layout.ranks)
        halves = room.view(facts.gradient_dtype).chunk(2)
        most = min(halves[1].numel(), PIECE_BYTES // halves[1].itemsize) // len(shards)
        length = most // PARAMETER_ALIGNMENT * PARAMETER_ALIGNMENT
        begins = range(0, facts.layout.shard_numel, length)
        # The work that must end before each half is written again.
        free: list[Mark | Copy | None] = [device.mark()] * 2
        leaving = Copy()

        def send(number: int) -> tuple[torch.Tensor, Copy]:
            parts = [shard[begins[number] :][:length] for shard in shards]
            piece = halves[number % 2][: len(parts) * parts[0].numel()]
            copies = [
                device.begin_upload(target, part, free[number % 2])
                for target, part in zip(piece.chunk(len(parts)), parts, strict=True)
            ]
            return piece, copies[-1]  # they end in their order

        coming = send(0)
        for number, begin in enumerate(begins):
            piece, sent = coming
            if number + 1 < len(begins):
                coming = send(number + 1)
            device.follow_copy(sent)
            mean, home = self.reduced(piece), shards[facts.rank][begin:][:length]
            free[number % 2] = leaving = device.begin_download(home, mean, device.mark())
        leaving.wait()

    def add_reduced(self, full: torch.Tensor, first: bool, came: Callable[[], object]) -> None:
        """Add this rank's part of the mean of `full` over all ranks to the block, then call `came`.
        `full`, `first`: see `GradientBlock.add_up`. On the thread of the exchange."""
        self._block.add_up(self.reduced(full), first)
        came()

    def add_scattered(self, full: torch.Tensor, first: bool, averages: bool) -> None:
        """Like `add_reduced`, without the replicas. If it `averages`, the content of the block is
        averaged over the replicas afterwards."""
        self._block.add_up(self.scattered(full), first)
        if averages:
            self.average()

    def add_nothing(self, zeros: torch.Tensor, first: bool) -> None:
        """Like `add_reduced`, if no rank brings gradients: all have the same `zeros`."""
        if first:
            self._block.add_up(self._facts.shard_of(zeros), first)

    def reduced(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of the mean of `full` (n * ranks,) over all ranks, in the same memory.
        On the thread of the exchange."""
        shard = self.scattered(full)
        self._average(shard)
        return shard

    def scattered(self, full: torch.Tensor) -> torch.Tensor:
        """Like `reduced`, with the mean over the ranks of the shards only."""
        exchange = self._exchange
        shard = full.chunk(self._facts.layout.ranks)[self._facts.rank]
        collectives.reduce_scatter_mean(shard, full, exchange.room, exchange.ranks.shards)
        return shard

    def average(self) -> None:
        """Replace the content of the block by its mean over the replicas. On the thread of the
        exchange."""
        self._block.change(self._average)

    def _average(self, values: torch.Tensor) -> None:
        """Replace `values` by their mean over the replicas. On the thread of the exchange."""
        exchange = self._exchange
        if exchange.ranks.replicas is not None:
            here = exchange.device.on_device(values)  # memory that its group takes
            collectives.all_reduce_mean(here, exchange.room, exchange.ranks.replicas)
            values.copy_(here)
