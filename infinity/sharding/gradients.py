"""The gradients of the step under way: what the engine knows of them, and how they get to where they are at home."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import TYPE_CHECKING

import torch

from infinity.device import add_alone, copy_alone
from infinity.sharding import collectives
from infinity.sharding.exchange import Collective, Exchange
from infinity.sharding.tensor_parallel import local_gradient
from infinity.tiers.block import Kind

if TYPE_CHECKING:
    from infinity.sharding.unit import Unit


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

    def add(self, unit: Unit, index: int, gradient: torch.Tensor) -> None:
        """Collect `gradient`, of the parameter `index` of `unit`."""
        again = self._holder is unit and index in self._collected
        if self._holder is not unit or (again and (unit.ranks.number > 1 or index in unit.gradients.reduced)):
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
        if holder is None:
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

    def close(self) -> None:
        """Give the memory back."""
        self._memory, self._holder = self._memory[:0].clone(), None
        self._free.clear()
        self._posted.clear()


class Gradients:
    """The gradients of one trainable unit in the step under way."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.accumulated = [False] * len(unit.parameters)
        """Which parameters have a gradient of the step under way."""
        self.collected = self.expected = 0
        """How many gradients of single parameters the step under way has brought, and the last one did."""
        self.spent = False
        """Whether the gradients were handed to an update and not zeroed since."""
        self.grad_scale = self.loss_scale = 1.0
        """What the gradients of the step under way are multiplied by in the update: the clip factor; and what they were
        multiplied by, with the loss, in the backward."""
        self.measured: tuple[int, float | None] = (0, None)
        """What `Updates.measure` gave when the step under way had brought so many gradients."""
        self._is_mean = False  # where gradients are reduced late: whether those of the step under way have been
        self._is_apart = False  # whether some of the gradients at home are not averaged over the replicas yet (`Engine.no_sync`)
        self.reduced: set[int] = set()
        """The parameters whose gradients of the step under way have passed a `GradientBuffer`."""
        self._buffer: GradientBuffer | None = None

    def bind(self, buffer: GradientBuffer | None) -> None:
        """How gradients travel: through `buffer`, or straight into their home when it is None."""
        self._buffer = buffer

    def close(self) -> None:
        """The engine was closed."""
        if self._buffer is not None:
            self._buffer.close()

    def begin_turn(self) -> None:
        """The backward is about to use the unit: see `GradientBuffer.begin_turn`."""
        if self._buffer is not None:
            self._buffer.begin_turn(self.unit)

    def wait(self) -> None:
        """Block until what was flushed is in the gradient block."""
        if self._buffer is not None:
            self._buffer.settle()

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether the engine holds a gradient of `parameter`."""
        unit = self.unit
        return self.accumulated[unit.position(parameter)] and not self.spent

    def collect(self, index: int, gradient: torch.Tensor) -> None:
        """Add the gradient of parameter `index` of this backward to what the step has so far."""
        unit = self.unit
        if self.spent:
            raise RuntimeError(
                f"{unit.names[index]} gets a gradient after optimizer.step() and before zero_grad(); "
                "call optimizer.zero_grad() in between"
            )
        if self.collected == self.expected:
            unit.withdraw()
        if unit.updater is not None:
            unit.updater.await_update(unit)  # it still reads the gradients of the step before
            unit.updater.await_delayed(unit)
        gradient = local_gradient(gradient, unit.parameters[index])
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        scale = 1.0 if unit.updater is None else unit.updater.loss_scale
        if not any(self.accumulated):
            self.loss_scale = scale
        elif scale != self.loss_scale:  # micro-batches of which some are scaled, or a step of another unit's optimizer between
            gradient = gradient * (self.loss_scale / scale)
        place = unit.layout.places[index]
        if self._buffer is not None:
            self._buffer.add(unit, index, gradient)
            if self.collected == self.expected:  # a reduction that `add` ended may have begun the update without this gradient
                unit.withdraw()
            self.accumulated[index] = True
            self.collected += 1
            return
        home = unit.blocks[Kind.GRAD].home
        if home is None:
            raise RuntimeError(f"the gradients of {unit.name} have no home in memory")
        flat = home.tensor.view(unit.gradient_dtype)
        if self._is_mean:  # one more backward after all: what is the mean already counts once for every rank
            mean = unit.shard_of(flat) * unit.layout.ranks
            flat.zero_()
            unit.shard_of(flat).copy_(mean)
            self.accumulated, self._is_mean = [True] * len(self.accumulated), False
        target = flat[place.offset : place.end].view(place.shape)
        if self.accumulated[index]:
            target.add_(gradient)
        else:
            target.copy_(gradient)
            self.accumulated[index] = True
        self.collected += 1
        if not unit.reduces_late:
            self._begin_early()

    def reduce(self, full: torch.Tensor, collected: Iterable[int]) -> Collective | None:
        """Average `full` (numel,), gradients of the parameters `collected`, over the ranks; add this rank's part to its block.

        With several ranks returns at once what has to end before either is used again, and then `end_reduction` called.
        """
        unit = self.unit
        first = not self.reduced
        self.reduced.update(collected)
        if unit.exchange is None:
            self._add_up(full, first)
            self._begin_early()
            return None
        if unit.ranks.replicas is None or (unit.exchange.averages and not self._is_apart):
            return self._post_reduction(functools.partial(self._bring_home, full, first, self.collected))
        averages, self._is_apart = unit.exchange.averages, not unit.exchange.averages
        return self._post_reduction(lambda: self._add_up(self._scattered(full), first, averages), averages=averages)

    def _bring_home(self, full: torch.Tensor, first: bool, collected: int) -> None:
        """Reduce and add up; if these were the last gradients of the step, say what their norm needs, while the model goes on."""
        unit = self.unit
        self._add_up(self._reduced(full), first)
        if collected == self.expected and unit.updater is not None:
            self.measured = collected, unit.updater.measure(unit)

    def end_reduction(self, collected: int) -> None:
        """The reduction that was posted when the step had brought as many gradients as `collected` has ended."""
        if self.collected == collected:
            self._begin_early()

    def _add_up(self, shard: torch.Tensor | None, first: bool, average: bool = False) -> None:
        """Add `shard` (shard_numel,) to the gradient block, or replace that by it if it is the `first` of the step; then have the
        block averaged over the replicas if asked."""
        unit = self.unit
        block = unit.blocks[Kind.GRAD]
        if shard is not None:
            with closing(unit.store.bring_home(block, shard.view(torch.uint8), add=not first)) as parts:
                for home, part in parts:
                    (copy_alone if first else add_alone)(home.view(unit.gradient_dtype), part.view(unit.gradient_dtype))
            unit.store.end_update([block])
        if average:
            for begin in unit.chunks():
                (chunk,) = unit.store.check_out([(block, True)], begin)
                try:
                    chunk.wait()
                    self._average(chunk.tensor.view(unit.gradient_dtype))
                    chunk.commit()
                finally:
                    chunk.release()
            unit.store.end_update([block])

    def _post_reduction(self, join: Callable[[], object], scatters: bool = True, averages: bool = True) -> Collective:
        unit = self.unit
        nbytes = unit.layout.shard_numel * unit.gradient_dtype.itemsize
        replicas = collectives.size(unit.ranks.replicas)
        sent = nbytes * (scatters * (unit.layout.ranks - 1) + averages * 2 * (replicas - 1) / replicas)
        operation = "reduce" if scatters else "average"
        return self._partners().post(operation, unit.name, join, sent, everywhere=averages)

    def _partners(self) -> Exchange:
        unit = self.unit
        if unit.exchange is None:
            raise RuntimeError(f"there is nobody to reduce {unit.name} with")
        return unit.exchange

    def _reduced(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of the mean of `full` (numel,) over all ranks, in the same memory. On the thread of the exchange."""
        shard = self._scattered(full)
        self._average(shard)
        return shard

    def _scattered(self, full: torch.Tensor) -> torch.Tensor:
        """Like `_reduced`, of the mean over those that the shards are divided among."""
        unit = self.unit
        shard, exchange = unit.shard_of(full), self._partners()
        collectives.reduce_scatter_mean(shard, full, exchange.room, exchange.ranks.shards)
        return shard

    def _average(self, values: torch.Tensor) -> None:
        """Put the mean over the replicas in the place of `values`. On the thread of the exchange."""
        exchange = self._partners()
        if exchange.ranks.replicas is not None:
            here = exchange.device.near(values)  # what its group can reach
            collectives.all_reduce_mean(here, exchange.room, exchange.ranks.replicas)
            values.copy_(here)

    def _begin_early(self) -> None:
        unit = self.unit
        if self.collected == self.expected and unit.updater is not None and not self._is_apart:
            unit.updater.begin_early(unit)

    @property
    def factor(self) -> float:
        """What an update multiplies the gradients by."""
        return self.grad_scale / self.loss_scale

    def spend(self) -> None:
        """The gradients of this step are handed to an update."""
        unit = self.unit
        self.spent, self.expected = True, self.collected
        unit.outdate()

    def settle(self) -> bool:
        """Make the gradient block final: zeros where this step brought nothing. Returns whether it brought anything."""
        unit = self.unit
        if self._buffer is not None:
            self._buffer.settle()
        if not any(self.accumulated):
            return False
        if self._is_apart:
            self._post_reduction(lambda: self._add_up(None, first=False, average=True), scatters=False).wait()
            self._is_apart = False
        home = unit.blocks[Kind.GRAD].home
        if self._buffer is None and home is not None and not self._is_mean:
            flat = home.tensor.view(unit.gradient_dtype)
            for place, present in zip(unit.layout.places, self.accumulated, strict=True):
                if not present:
                    flat[place.offset : place.end].zero_()
            if unit.reduces_late:
                self._post_reduction(lambda: self._reduced(flat)).wait()
                self._is_mean = True
        return True

    def clear(self) -> None:
        """Forget the gradients of this step."""
        unit = self.unit
        unit.withdraw()
        self.collected = 0
        self.accumulated = [False] * len(unit.parameters)
        self.spent = self._is_mean = self._is_apart = False
        self.reduced.clear()
        self.grad_scale = self.loss_scale = 1.0
        if self._buffer is not None:
            self._buffer.discard(unit)
        self.measured = 0, None  # not before what was on its way has ended, and was measured
