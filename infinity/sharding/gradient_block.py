"""The gradients of a unit at home: how they are added up there, averaged over the ranks, and
rewritten."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING

import torch

from infinity.device import Copy, Mark, copy_alone
from infinity.placement.spec import Kind
from infinity.sharding import collectives
from infinity.sharding.exchange import Collective, Exchange
from infinity.sharding.layout import PARAMETER_ALIGNMENT
from infinity.tiers.staging import ChunkRequest

if TYPE_CHECKING:
    from infinity.sharding.unit import Unit

PIECE_BYTES = 32 << 20
"""The most that is reduced at a time of gradients that pass the compute device: a ms or two of a
GPU's link, and long enough for the bandwidth of NCCL."""


class GradientBlock:
    """The gradient block of one unit, and how gradients get into it. Knows nothing of the step.

    Methods that say so run on the thread of the exchange, the others on that of the model.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def flat(self) -> torch.Tensor:
        """The home in memory: this rank's shard, or where gradients are reduced late the whole unit
        (numel,)."""
        home = self._unit.blocks[Kind.GRAD].home.buffer
        if home is None:
            raise RuntimeError(f"the gradients of {self._unit.name} have no home in memory")
        return home.tensor.view(self._unit.gradient_dtype)

    def part(self, index: int) -> torch.Tensor:
        """The home of the gradient of parameter `index`, in its shape."""
        place = self._unit.layout.places[index]
        return self.flat()[place.offset : place.end].view(place.shape)

    def rewrite(
        self, factors: Mapping[int, float | torch.Tensor | None], fresh: bool = False
    ) -> None:
        """Multiply the gradients of these parameters, by their index; with None they become zeros,
        whatever they were, and with a tensor (numel,) what that is.

        Reads and writes the chunks of this rank's shard that have any of them. With `fresh` it
        reads nothing and writes all chunks: all else becomes zeros, padding too.
        """
        unit = self._unit
        block = unit.blocks[Kind.GRAD]
        overlaps = {i: unit.facts.overlap(i) for i in factors}
        starts = unit.states.chunks()
        for begin, end in zip(starts, [*starts[1:], unit.layout.shard_numel], strict=True):
            spans = {
                i: (max(o.in_shard, begin), min(o.in_shard + o.length, end))
                for i, o in overlaps.items()
            }
            spans = {
                i: (low - begin, high - begin) for i, (low, high) in spans.items() if low < high
            }
            if not spans and not fresh:
                continue
            loaded = () if fresh else [block]
            (chunk,) = unit.store.staging.check_out(ChunkRequest([block], begin, loaded))
            try:
                chunk.wait()
                values = chunk.tensor.view(unit.gradient_dtype)
                if fresh:
                    values.zero_()
                for index, (low, high) in spans.items():
                    factor = factors[index]
                    if factor is None:
                        values[low:high].zero_()
                    elif isinstance(factor, torch.Tensor):
                        skipped = overlaps[index].in_parameter - overlaps[index].in_shard + begin
                        values[low:high].copy_(factor[low + skipped : high + skipped])
                    else:
                        values[low:high].mul_(factor)
                chunk.commit()
            finally:
                chunk.release()
        unit.store.resident.end_update([block])

    def add_up(self, shard: torch.Tensor | None, first: bool, average: bool = False) -> None:
        """Add `shard` (shard_numel,), or the whole unit where it is reduced late (numel,), to its
        home, or replace that by it if it is the `first` of the step; then have the block averaged
        over the replicas if asked. With an exchange, on its thread."""
        unit = self._unit
        block = unit.blocks[Kind.GRAD]
        if shard is not None:
            with closing(
                unit.store.staging.bring_home(block, shard.view(torch.uint8), add=not first)
            ) as parts:
                for home, part in parts:
                    (copy_alone if first else unit.listeners.updates.add_gradients)(
                        home.view(unit.gradient_dtype), part.view(unit.gradient_dtype)
                    )
            unit.store.resident.end_update([block])
        if average:
            for begin in unit.states.chunks():
                (chunk,) = unit.store.staging.check_out(ChunkRequest([block], begin, [block]))
                try:
                    chunk.wait()
                    self._average(chunk.tensor.view(unit.gradient_dtype))
                    chunk.commit()
                finally:
                    chunk.release()
            unit.store.resident.end_update([block])

    def begin_home(self, full: torch.Tensor) -> Copy | None:
        """Start copying `full` (numel,), the first gradients of a unit that no other rank has a
        part in yet, to its home, if nothing on the host has a part in it; `came` ends it."""
        if self._unit.facts.reduces_each_turn:
            return None
        staging = self._unit.store.staging
        return staging.begin_home(self._unit.blocks[Kind.GRAD], full.view(torch.uint8))

    def came(self) -> None:
        """The copy of `begin_home` has ended."""
        self._unit.store.resident.end_update([self._unit.blocks[Kind.GRAD]])

    def post(
        self,
        join: Callable[[], object],
        arrive: Callable[[], object] = lambda: None,
        scatters: bool = True,
        averages: bool = True,
        idle: Callable[[], object] | None = None,
    ) -> Collective:
        """Have the exchange reduce gradients by `join`, among the shards, the replicas, or both,
        when `arrive` has returned; by `idle`, which a rank without gradients may give, where none
        of the ranks has any."""
        unit = self._unit
        nbytes = unit.layout.shard_numel * unit.gradient_dtype.itemsize
        replicas = unit.facts.replicas
        sent = nbytes * (
            scatters * (unit.layout.ranks - 1) + averages * 2 * (replicas - 1) / replicas
        )
        operation = "reduce" if scatters else "average"
        return self._partners().post(
            operation, unit.name, join, sent, arrive, everywhere=averages, idle=idle
        )

    def bring(
        self, join: Callable[[], object], arrive: Callable[[], object] = lambda: None
    ) -> Collective:
        """Have the exchange bring gradients of this rank alone home by `join`, when `arrive` has
        returned."""
        return self._partners().post("bring", self._unit.name, join, arrive=arrive, alone=True)

    def zero(self, indices: Iterable[int]) -> None:
        """What this rank has collected of these parameters in the home of a unit that is reduced
        late becomes zeros."""
        flat = self.flat()
        for place in (self._unit.layout.places[index] for index in indices):
            flat[place.offset : place.end].zero_()

    def reduce_home(self, room: torch.Tensor) -> None:
        """Put this rank's part of the mean of the home of the whole unit into the block. On the
        thread of the exchange.

        Pieces pass `room` (uint8), memory of the compute device, because a group may reach no
        other. The next one is copied there while one is reduced. The bits are those of `reduced`.

        Example: 4 ranks, shards of 100,000 fp32 elements, `room` of 2 MiB. A half of it fits 65,536
        elements of each shard. The first piece has so many, the second one the other 34,464.
        """
        device, unit = self._partners().device, self._unit
        shards = self.flat().chunk(unit.layout.ranks)
        halves = room.view(unit.gradient_dtype).chunk(2)
        most = min(halves[1].numel(), PIECE_BYTES // halves[1].itemsize) // len(shards)
        length = most // PARAMETER_ALIGNMENT * PARAMETER_ALIGNMENT
        begins = range(0, unit.layout.shard_numel, length)
        # What has to end before each half is written again.
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
            mean, home = self.reduced(piece), shards[unit.rank][begin:][:length]
            free[number % 2] = leaving = device.begin_download(home, mean, device.mark())
        leaving.wait()

    def reduced(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of the mean of `full` (n * ranks,) over all ranks, in the same memory.
        On the thread of the exchange."""
        shard = self.scattered(full)
        self._average(shard)
        return shard

    def scattered(self, full: torch.Tensor) -> torch.Tensor:
        """Like `reduced`, of the mean over those that the shards are divided among."""
        shard = full.chunk(self._unit.layout.ranks)[self._unit.rank]
        exchange = self._partners()
        collectives.reduce_scatter_mean(shard, full, exchange.room, exchange.ranks.shards)
        return shard

    def spread(self) -> None:
        """Undo a late reduction: this rank's shard counts once for every rank, and the rest of its
        home for none."""
        shards = self.flat().chunk(self._unit.layout.ranks)
        for rank, shard in enumerate(shards):
            if rank == self._unit.rank:
                shard.mul_(len(shards))
            else:
                shard.zero_()

    def _partners(self) -> Exchange:
        if self._unit.exchange is None:
            raise RuntimeError(f"there is no other rank to reduce {self._unit.name} with")
        return self._unit.exchange

    def _average(self, values: torch.Tensor) -> None:
        """Put the mean over the replicas in the place of `values`. On the thread of the
        exchange."""
        exchange = self._partners()
        if exchange.ranks.replicas is not None:
            here = exchange.device.on_device(values)  # what its group can reach
            collectives.all_reduce_mean(here, exchange.room, exchange.ranks.replicas)
            values.copy_(here)
