"""The gradients of the step under way: what the engine knows of them, and how they get to where they are at home.

[Note: what torch's .grad would be]
The engine keeps the gradients of a step until `zero_grad`, as torch does: a second `step` applies them again, and a backward
adds to them. It differs in three things, for speed; nobody sees them. A clip factor is not multiplied into the gradients but
noted (`Entry.clip`), until something is added to them. A gradient that is forgotten keeps its bytes until something is added
to others in its unit (`Where.FORGOTTEN`). What was scaled with its loss stays so (`Gradients.loss_scale`).

[Note: who touches the bytes]
The thread of the model, or while a reduction is on its way the thread of the exchange. An update reads the bytes after
`spend`; whoever changes them then waits for it. `Gradients.wait` returns when the exchange has ended what it was given.

[Note: the same on all ranks]
A rank knows of the gradients that its own backward brought. `settle` agrees on what all of them have. Until then a rank
must not conclude from its own entries that a unit has none: another one may have some.
"""

from __future__ import annotations

import enum
import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

import torch

from infinity.device import add_alone, copy_alone
from infinity.placement.spec import Kind
from infinity.sharding import collectives
from infinity.sharding.exchange import Collective, Exchange
from infinity.sharding.tensor_parallel import local_gradient
from infinity.tiers.staging import ChunkRequest

if TYPE_CHECKING:
    from infinity.sharding.unit import Unit


class GradientState(enum.Enum):
    """How far the gradients of a unit are in the step under way.

    EMPTY: there are none on this rank. COLLECTING: a backward brings them. SETTLED: final, averaged over the ranks and at home.
    SPENT: SETTLED, and an update was given them, which reads them until it ends.
    """

    EMPTY = enum.auto()
    COLLECTING = enum.auto()
    SETTLED = enum.auto()
    SPENT = enum.auto()


class Where(enum.Enum):
    """Where the gradient of one parameter is.

    NOWHERE: there is none; what its part of the gradient block holds counts for nothing where gradients need no buffer, else
    it is zeros if others are at home. BUFFER: in the `GradientBuffer` alone. HOME: in the gradient block, and maybe more of it
    in the buffer. FORGOTTEN: there is none, but its bytes are still in the block. ZEROED: there is none, and its bytes were
    replaced by zeros.
    """

    NOWHERE = enum.auto()
    BUFFER = enum.auto()
    HOME = enum.auto()
    FORGOTTEN = enum.auto()
    ZEROED = enum.auto()

    @property
    def present(self) -> bool:
        """Whether there is a gradient."""
        return self in (Where.BUFFER, Where.HOME)

    @property
    def filled(self) -> bool:
        """Whether the step has put anything into the gradient block for the parameter."""
        return self in (Where.HOME, Where.FORGOTTEN, Where.ZEROED)


class Entry(NamedTuple):
    """What is known of the gradient of one parameter: `clip` is what an update multiplies it by."""

    where: Where = Where.NOWHERE
    clip: float = 1.0


class GradientBuffer:
    """Compute buffers as large as the largest unit, in which a unit's gradients are collected before they are reduced.

    Needed with several ranks, and where the gradient's home cannot be addressed from the compute device. A unit that asks
    while another holds one makes the other reduce what it has, and so does a parameter that comes a second time (re-entrant
    checkpointing of a module used twice, micro-batches that pass the unit one after the other) where other ranks' gradients, or
    earlier ones at home, have to be added first: gradients are added in the same order as without a buffer (invariant I8).

    With two `parts` of `memory` (uint8) one is collected into while the other is reduced.
    """

    def __init__(self, memory: torch.Tensor, parts: int) -> None:
        self._memory = memory
        self._free = deque(memory.chunk(parts))  # the first one is collected into, and is not free while there is a holder
        self._posted: deque[tuple[Collective, torch.Tensor, Unit, int]] = deque()  # reductions; how much was collected
        self._holder: Unit | None = None
        self._collected: set[int] = set()

    @property
    def holder(self) -> Unit | None:
        """Whose gradients are collected in it."""
        return self._holder

    def add(self, unit: Unit, index: int, gradient: torch.Tensor) -> None:
        """Collect `gradient`, of the parameter `index` of `unit`."""
        again = self._holder is unit and index in self._collected
        if self._holder is not unit or (again and (unit.ranks.number > 1 or unit.gradients.at_home(index))):
            self.flush()
            while self._posted and (not self._free or self._posted[0][0].ended()):
                self._end_first()
            self._holder, self._collected, again = unit, set(), False
        self._collected.add(index)
        place = unit.layout.places[index]
        part = self._flat(unit)[place.offset : place.end].view(place.shape)
        if again:
            part.add_(gradient)
        else:
            part.copy_(gradient)

    def begin_turn(self, unit: Unit) -> None:
        """The backward is about to use `unit`: another one that holds the buffer has all its gradients, as a rule."""
        if self._holder is not None and self._holder is not unit:
            self.flush()

    def flush(self) -> None:
        """Reduce what the holder has collected, and free the buffer."""
        holder, self._holder = self._holder, None
        if holder is None or not (self._collected or holder.ranks.number > 1):
            return
        self._zero_rest(holder)
        posted = holder.gradients.reduce(self._flat(holder), self._collected)
        if posted is not None:
            self._posted.append((posted, self._free.popleft(), holder, holder.gradients.collected))

    def _zero_rest(self, holder: Unit) -> None:
        """What the holder has not collected: mostly padding at the end alone, so that the buffer is filled in one pass."""
        flat, end = self._flat(holder), 0
        for place in (holder.layout.places[index] for index in sorted(self._collected)):
            if end < place.offset:
                flat[end : place.offset].zero_()
            end = place.end
        flat[end:].zero_()

    def settle(self) -> None:
        """Block until everything that was flushed has been added to the gradients of its unit."""
        while self._posted:
            self._end_first()

    def _end_first(self) -> None:
        posted, part, unit, collected = self._posted.popleft()
        self._free.append(part)
        posted.wait()
        unit.gradients.end_reduction(collected)

    def _flat(self, unit: Unit) -> torch.Tensor:
        return self._free[0][: unit.gradient_nbytes].view(unit.gradient_dtype)

    def discard(self, unit: Unit) -> None:
        """Forget what `unit` has collected and not reduced."""
        if self._holder is unit:
            self._holder = None
        self.settle()

    def forget(self, unit: Unit, indices: set[int]) -> None:
        """Forget what `unit` has collected of these parameters and not reduced; return when nothing of it is on its way."""
        if self._holder is unit:
            self._collected -= indices
        self.settle()

    def close(self) -> None:
        """Give the memory back."""
        self._memory, self._holder = self._memory[:0].clone(), None
        self._free.clear()
        self._posted.clear()


class GradientBlock:
    """The gradient block of one unit, and how gradients get into it. Knows nothing of the step.

    Methods that say so run on the thread of the exchange, the others on that of the model.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def flat(self) -> torch.Tensor:
        """The home in memory: this rank's shard, or where gradients are reduced late the whole unit (numel,)."""
        home = self._unit.blocks[Kind.GRAD].home.buffer
        if home is None:
            raise RuntimeError(f"the gradients of {self._unit.name} have no home in memory")
        return home.tensor.view(self._unit.gradient_dtype)

    def part(self, index: int) -> torch.Tensor:
        """The home of the gradient of parameter `index`, in its shape."""
        place = self._unit.layout.places[index]
        return self.flat()[place.offset : place.end].view(place.shape)

    def rewrite(self, factors: Mapping[int, float | None]) -> None:
        """Multiply the gradients of these parameters, by their index; with None they become zeros, whatever they were.

        Reads and writes the chunks of this rank's shard that have any of them.
        """
        unit = self._unit
        block, overlaps = unit.blocks[Kind.GRAD], {i: unit.layout.overlap(i, unit.rank) for i in factors}
        starts = unit.chunks()
        for begin, end in zip(starts, [*starts[1:], unit.layout.shard_numel], strict=True):
            spans = {i: (max(o.in_shard, begin), min(o.in_shard + o.length, end)) for i, o in overlaps.items()}
            spans = {i: (low - begin, high - begin) for i, (low, high) in spans.items() if low < high}
            if not spans:
                continue
            (chunk,) = unit.store.staging.check_out(ChunkRequest([block], begin, [block]))
            try:
                chunk.wait()
                values = chunk.tensor.view(unit.gradient_dtype)
                for index, (low, high) in spans.items():
                    factor = factors[index]
                    if factor is None:
                        values[low:high].zero_()
                    else:
                        values[low:high].mul_(factor)
                chunk.commit()
            finally:
                chunk.release()
        unit.store.resident.end_update([block])

    def add_up(self, shard: torch.Tensor | None, first: bool, average: bool = False) -> None:
        """Add `shard` (shard_numel,) to the block, or replace that by it if it is the `first` of the step; then have the block
        averaged over the replicas if asked. With an exchange, on its thread."""
        unit = self._unit
        block = unit.blocks[Kind.GRAD]
        if shard is not None:
            with closing(unit.store.staging.bring_home(block, shard.view(torch.uint8), add=not first)) as parts:
                for home, part in parts:
                    (copy_alone if first else add_alone)(home.view(unit.gradient_dtype), part.view(unit.gradient_dtype))
            unit.store.resident.end_update([block])
        if average:
            for begin in unit.chunks():
                (chunk,) = unit.store.staging.check_out(ChunkRequest([block], begin, [block]))
                try:
                    chunk.wait()
                    self._average(chunk.tensor.view(unit.gradient_dtype))
                    chunk.commit()
                finally:
                    chunk.release()
            unit.store.resident.end_update([block])

    def post(self, join: Callable[[], object], scatters: bool = True, averages: bool = True) -> Collective:
        """Have the exchange reduce gradients by `join`, among the shards, the replicas, or both."""
        unit = self._unit
        nbytes = unit.layout.shard_numel * unit.gradient_dtype.itemsize
        replicas = collectives.size(unit.ranks.replicas)
        sent = nbytes * (scatters * (unit.layout.ranks - 1) + averages * 2 * (replicas - 1) / replicas)
        operation = "reduce" if scatters else "average"
        return self._partners().post(operation, unit.name, join, sent, everywhere=averages)

    def reduced(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of the mean of `full` (numel,) over all ranks, in the same memory. On the thread of the exchange."""
        shard = self.scattered(full)
        self._average(shard)
        return shard

    def scattered(self, full: torch.Tensor) -> torch.Tensor:
        """Like `reduced`, of the mean over those that the shards are divided among."""
        shard, exchange = self._unit.shard_of(full), self._partners()
        collectives.reduce_scatter_mean(shard, full, exchange.room, exchange.ranks.shards)
        return shard

    def spread(self) -> None:
        """Undo a late reduction: this rank's shard counts once for every rank, and the rest of its home for none."""
        flat = self.flat()
        mean = self._unit.shard_of(flat) * self._unit.layout.ranks
        flat.zero_()
        self._unit.shard_of(flat).copy_(mean)

    def _partners(self) -> Exchange:
        if self._unit.exchange is None:
            raise RuntimeError(f"there is nobody to reduce {self._unit.name} with")
        return self._unit.exchange

    def _average(self, values: torch.Tensor) -> None:
        """Put the mean over the replicas in the place of `values`. On the thread of the exchange."""
        exchange = self._partners()
        if exchange.ranks.replicas is not None:
            here = exchange.device.near(values)  # what its group can reach
            collectives.all_reduce_mean(here, exchange.room, exchange.ranks.replicas)
            values.copy_(here)


class Gradients:
    """The gradients of one unit in the step under way. `add`, `forget`, `scale`, `settle`, `spend` and `clear` change them.

    They are called by the thread that runs the model; parameters go by their index in the unit.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit, self._block = unit, GradientBlock(unit)
        self._buffer: GradientBuffer | None = None
        self._state = GradientState.EMPTY
        self._entries = [Entry()] * len(unit.parameters)
        self._loss_scale = 1.0
        self._collected = self._expected = 0
        self._measured: tuple[int, float | None] = (0, None)  # the sum of squares after so many gradients
        self._is_apart = False  # whether some of those at home are not averaged over the replicas yet (`Engine.no_sync`)

    def bind(self, buffer: GradientBuffer | None) -> None:
        """How gradients travel: through `buffer`, or straight into their home when it is None."""
        self._buffer = buffer

    # What is there

    @property
    def state(self) -> GradientState:
        """How far they are."""
        return self._state

    @property
    def loss_scale(self) -> float:
        """What they were multiplied by, with the loss, in the backward."""
        return self._loss_scale

    @property
    def collected(self) -> int:
        """How many gradients of single parameters the step under way has brought."""
        return self._collected

    def present(self) -> list[int]:
        """The parameters that have a gradient: after `settle` those that have one on any rank."""
        return [index for index, entry in enumerate(self._entries) if entry.where.present]

    def has(self, index: int) -> bool:
        """Whether there is a gradient of the parameter."""
        return self._entries[index].where.present

    def at_home(self, index: int) -> bool:
        """Whether the gradient of the parameter, or some of it, is in the gradient block."""
        return self._entries[index].where is Where.HOME

    def clip_of(self, index: int) -> float:
        """The product of the clip factors so far."""
        return self._entries[index].clip

    def factor(self, index: int, further: float = 1.0) -> float:
        """What an update multiplies the gradient by, `further` clipped by that."""
        return self._entries[index].clip * further / self._loss_scale

    def measured(self) -> float | None:
        """The sum of squares of all that there are, as they lie in the block, if that is known."""
        collected, squares = self._measured
        return squares if collected == self._collected else None

    def summary(self) -> list[float]:
        """What the ranks add up for `settle`."""
        flags = [float(entry.where.present) for entry in self._entries]
        return [*flags, any(flags), self._loss_scale * any(flags), self._is_apart]

    # What changes them

    def add(self, index: int, gradient: torch.Tensor, scale: float = 1.0) -> None:
        """Add a gradient of the parameter to what the step has so far; its loss was multiplied by `scale`."""
        unit = self._unit
        if self._collected == self._expected:
            unit.withdraw()
        self._await_readers()
        self._open()
        gradient = local_gradient(gradient, unit.parameters[index])
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if not any(entry.where.present for entry in self._entries):
            self._loss_scale = scale
        elif scale != self._loss_scale:  # micro-batches of which some are scaled, or a step of another unit's optimizer between
            gradient = gradient * (self._loss_scale / scale)
        self._state = GradientState.COLLECTING
        if self._buffer is not None:
            if self._entries[index].where is Where.FORGOTTEN:
                self._drop_forgotten()
            self._buffer.add(unit, index, gradient)
            if self._collected == self._expected:  # a reduction that `add` ended may have begun the update without this gradient
                unit.withdraw()
        elif self.has(index):
            self._block.part(index).add_(gradient)
        else:
            self._block.part(index).copy_(gradient)
        if not self.has(index):
            self._set([index], Where.HOME if self._buffer is None else Where.BUFFER)
        self._collected += 1
        if self._buffer is None and not unit.reduces_late:
            self._begin_early()

    def forget(self, indices: Iterable[int]) -> None:
        """There are no gradients of these parameters any more, as if there had never been any; several ranks do alike."""
        unit, indices = self._unit, set(indices)
        left = set(self.present()) - indices
        if len(indices) == len(self._entries) or (unit.ranks.number == 1 and not left):
            self.clear()
            return
        unit.withdraw()
        if self._buffer is not None and self._state is GradientState.COLLECTING:
            self._buffer.forget(unit, indices)
        elsewhere = unit.ranks.number > 1 and any(entry.where.filled for entry in self._entries)  # another rank may have some
        loose = self._buffer is None and self._state is GradientState.COLLECTING
        for index in indices:
            keeps = not loose and (elsewhere or self.at_home(index))
            if keeps or self.has(index):
                self._entries[index] = Entry(Where.FORGOTTEN if keeps else Where.NOWHERE)
        self._measured = 0, None
        if all(entry.where in (Where.FORGOTTEN, Where.ZEROED) for entry in self._entries) and not self._is_held():
            self.clear()

    def zero(self, indices: Iterable[int]) -> None:
        """The gradients of these parameters, settled if there are any, are zeros from now on; they are still gradients."""
        present = [index for index in indices if self.has(index)]
        if present:
            self._expect(GradientState.SETTLED, GradientState.SPENT)
            self._unit.withdraw()
            self._await_readers()
            self._block.rewrite(dict.fromkeys(present))
            self._measured = 0, None
            for index in present:
                self._entries[index] = Entry(Where.HOME)

    def scale(self, indices: Iterable[int], factor: float) -> None:
        """Multiply the settled gradients of these parameters by a clip factor."""
        self._expect(GradientState.SETTLED, GradientState.SPENT)
        for index in indices:
            entry = self._entries[index]
            self._entries[index] = entry._replace(clip=entry.clip * factor)

    def apply_clips(self, indices: Iterable[int]) -> None:
        """Multiply the clip factors so far into the settled gradients of these parameters, in their dtype, as torch does at once:
        whoever clips them again rounds twice, too."""
        self._expect(GradientState.SETTLED, GradientState.SPENT)
        clipped = {index: self.clip_of(index) for index in indices if self.has(index) and self.clip_of(index) != 1.0}
        if clipped:
            self._unit.withdraw()
            self._await_readers()
            self._block.rewrite(clipped)
            self._measured = 0, None
            for index in clipped:
                self._entries[index] = self._entries[index]._replace(clip=1.0)

    def settle(self, agreed: Sequence[float] | None = None) -> None:
        """Make them final: what all ranks have, at home, averaged. `agreed` is the sum of every rank's `summary`."""
        self.wait()
        mine = [entry.where.present for entry in self._entries]
        if agreed is not None:
            self._join(agreed)
        if self._state is not GradientState.COLLECTING or not self.present():
            return
        if self._is_apart:
            self._block.post(lambda: self._block.add_up(None, first=False, average=True), scatters=False).wait()
            self._is_apart = False
        if self._unit.reduces_late:
            flat = self._block.flat()
            for place, present in zip(self._unit.layout.places, mine, strict=True):
                if not present:
                    flat[place.offset : place.end].zero_()
            self._block.post(lambda: self._block.reduced(flat)).wait()
        self._state = GradientState.SETTLED

    def spend(self, indices: Iterable[int], factor: float = 1.0) -> None:
        """An update was given the settled gradients of these parameters, clipped by `factor`, as they are from now on."""
        self.scale(indices, factor)
        self._state, self._expected = GradientState.SPENT, self._collected
        self._unit.outdate()

    def clear(self) -> None:
        """There are no gradients any more."""
        self._unit.withdraw()
        self._state = GradientState.EMPTY
        self._entries = [Entry()] * len(self._entries)
        self._loss_scale, self._collected, self._is_apart = 1.0, 0, False
        if self._buffer is not None:
            self._buffer.discard(self._unit)
        self._measured = 0, None  # not before what was on its way has ended, and was measured

    # On their way

    def begin_turn(self) -> None:
        """The backward is about to use the unit: see `GradientBuffer.begin_turn`."""
        if self._buffer is not None:
            self._buffer.begin_turn(self._unit)

    def reduce(self, full: torch.Tensor, collected: Iterable[int]) -> Collective | None:
        """For the buffer: average `full` (numel,), gradients of the parameters `collected`, over the ranks; add this rank's part
        to the block.

        With several ranks returns at once what has to end before either is used again, and then `end_reduction` called.
        """
        unit, block = self._unit, self._block
        self._drop_forgotten()
        first = not any(entry.where.filled for entry in self._entries)
        self._set(collected, Where.HOME)
        if unit.exchange is None:
            block.add_up(full, first)
            self._begin_early()
            return None
        if unit.ranks.replicas is None or (unit.exchange.averages and not self._is_apart):
            return block.post(functools.partial(self._bring_home, full, first, self._collected))
        averages = unit.exchange.averages
        self._is_apart = not averages
        return block.post(lambda: block.add_up(block.scattered(full), first, averages), averages=averages)

    def end_reduction(self, collected: int) -> None:
        """For the buffer: the reduction that was posted when the step had brought as many gradients as `collected` has ended."""
        if self._collected == collected:
            self._begin_early()

    def wait(self) -> None:
        """Block until what was flushed is in the gradient block."""
        if self._buffer is not None:
            self._buffer.settle()

    def close(self) -> None:
        """The engine was closed."""
        if self._buffer is not None:
            self._buffer.close()

    def _bring_home(self, full: torch.Tensor, first: bool, collected: int) -> None:
        """Reduce and add up; if these were the last gradients of the step, say what their norm needs, while the model goes on."""
        self._block.add_up(self._block.reduced(full), first)
        if collected == self._expected and self._unit.updater is not None:
            self._measured = collected, self._unit.updater.measure(self._unit)

    def _begin_early(self) -> None:
        if self._collected == self._expected and self._unit.updater is not None and not self._is_apart:
            self._unit.updater.begin_early(self._unit)

    # Inside of the step

    def _expect(self, *states: GradientState) -> None:
        if self._state not in states:
            raise RuntimeError(f"the gradients of {self._unit.name} are {self._state.name} (invariant I7)")

    def _await_readers(self) -> None:
        """Return when no update reads the gradient block any more."""
        if self._unit.updater is not None:
            self._unit.updater.await_update(self._unit)
            self._unit.updater.await_delayed(self._unit)

    def _set(self, indices: Iterable[int], where: Where) -> None:
        for index in indices:
            self._entries[index] = self._entries[index]._replace(where=where)

    def _is_held(self) -> bool:
        return self._buffer is not None and self._buffer.holder is self._unit

    def _open(self) -> None:
        """SETTLED or SPENT -> COLLECTING: what is added comes on top of what torch would have, clipped as it is."""
        if self._state not in (GradientState.SETTLED, GradientState.SPENT):
            return
        self.apply_clips(self.present())
        self._state = GradientState.COLLECTING
        if self._buffer is None:
            self._set([i for i, entry in enumerate(self._entries) if not entry.where.present], Where.NOWHERE)
        if self._unit.reduces_late:
            self._block.spread()
        self._collected, self._measured = 0, (0, None)

    def _drop_forgotten(self) -> None:
        """Replace what was forgotten by zeros, where something may be added to it."""
        forgotten = [index for index, entry in enumerate(self._entries) if entry.where is Where.FORGOTTEN]
        if forgotten:
            self.wait()
            self._block.rewrite(dict.fromkeys(forgotten))
            self._set(forgotten, Where.ZEROED)

    def _join(self, agreed: Sequence[float]) -> None:
        """Take over what other ranks have: their gradients are in this rank's shard, too."""
        *flags, having, scales, apart = agreed
        there = [index for index, flag in enumerate(flags) if flag > 0]
        if there and not self.present():
            self._loss_scale = scales / having
        if there and self._state is GradientState.EMPTY:
            self._state = GradientState.COLLECTING
        self._set((index for index in there if not self.has(index)), Where.HOME)
        self._is_apart = apart > 0
