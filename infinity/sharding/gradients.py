"""The gradients of the step under way: what the engine knows of them, and how they get to where
they are at home.

[Note: what torch's .grad would be]
The engine keeps the gradients of a step until `zero_grad`, as torch does: a second `step` applies
them again, and a backward adds to them. It differs in three things, for speed; nobody sees them. A
clip factor is not multiplied into the gradients but noted (`GradientEntry.clip`), until something
is added to them. A gradient that is forgotten keeps its bytes until something is added to others in
its unit (`Where.FORGOTTEN`). What was scaled with its loss stays so (`Gradients.loss_scale`);
what was assigned may be too large for that (`GradientEntry.unscaled`).

Tensors and norms that users keep of a gradient are told before it changes (`Grads.changing`,
`Grads.forgetting`).

[Note: who touches the bytes]
The thread of the model, or while a reduction is on its way the thread of the exchange. An update
reads the bytes after `spend`; whoever changes them then waits for it. `Gradients.wait` returns when
the exchange has ended what it was given.

[Note: the same on all ranks]
A rank knows of the gradients that its own backward brought. `settle` agrees on what all of them
have. Until then a rank must not conclude from its own entries that a unit has none: another one may
have some.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from infinity.device import Copy
from infinity.errors import ShardedParameterError
from infinity.sharding.facts import UnitFacts
from infinity.sharding.gradient_block import GradientBlock
from infinity.sharding.gradient_buffer import GradientBuffer, Reduction
from infinity.sharding.gradient_reduction import GradientReduction
from infinity.sharding.listeners import UnitListeners
from infinity.sharding.tensor_parallel import local_gradient


class GradientState(enum.Enum):
    """How far the gradients of a unit are in the step under way.

    EMPTY: there are none on this rank. COLLECTING: a backward brings them. SETTLED: final, averaged
    over the ranks and at home. SPENT: SETTLED, and an update was given them, which reads them until
    it ends.
    """

    EMPTY = enum.auto()
    COLLECTING = enum.auto()
    SETTLED = enum.auto()
    SPENT = enum.auto()


class Where(enum.Enum):
    """Where the gradient of one parameter is.

    NOWHERE: there is none; what its part of the gradient block holds counts for nothing where
    gradients need no buffer, else it is zeros if others are at home. BUFFER: in the
    `GradientBuffer` alone. HOME: in the gradient block, and maybe more of it in the buffer.
    FORGOTTEN: there is none, but its bytes are still in the block. ZEROED: there is none, and its
    bytes were replaced by zeros.
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


class GradientEntry(NamedTuple):
    """What is known of the gradient of one parameter: `clip` is what an update multiplies it by,
    and `unscaled` says that it was assigned, and not multiplied by the loss scale."""

    where: Where = Where.NOWHERE
    clip: float = 1.0
    unscaled: bool = False


class Gradients:
    """The gradients of one unit in the step under way. `add`, `forget`, `scale`, `settle`, `spend`
    and `clear` change them.

    They are called by the thread that runs the model; parameters go by their index in the unit.
    """

    def __init__(
        self,
        facts: UnitFacts,
        block: GradientBlock,
        buffer: GradientBuffer | None,
        reduction: GradientReduction | None,
        listeners: UnitListeners,
        outdate: Callable[[], object],
    ) -> None:
        """They travel through `buffer`, or straight into their home, the `block`, if it is None.
        With a `reduction` they go home beside the model. `outdate` is called when an update gets
        them."""
        self.facts, self._block, self._buffer = facts, block, buffer
        self._reduction, self._listeners, self._outdate = reduction, listeners, outdate
        self._state = GradientState.EMPTY
        self._entries = [GradientEntry()] * len(facts.parameters)
        self._number = 0  # of those that are present
        # How often each was forgotten.
        self._generations = [0] * len(facts.parameters)
        self._loss_scale = 1.0
        self._collected = self._expected = 0
        # The sum of squares after so many gradients.
        self._measured: tuple[int, float | None] = (0, None)
        # Whether some of those at home are not averaged over the replicas yet (`Engine.no_sync`).
        self._is_apart = False

    # What is there

    @property
    def state(self) -> GradientState:
        """How far they are."""
        return self._state

    @property
    def loss_scale(self) -> float:
        """What they were multiplied by, with the loss, in the backward."""
        return self._loss_scale

    def scale_of(self, index: int) -> float:
        """What the gradient of the parameter was multiplied by."""
        return 1.0 if self._entries[index].unscaled else self._loss_scale

    @property
    def collected(self) -> int:
        """How many gradients of single parameters the step under way has brought."""
        return self._collected

    @property
    def trains(self) -> bool:
        """Whether a parameter takes gradients now: a trainable unit may be frozen for some
        steps."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.facts.trainable and any(p.requires_grad for p in self.facts.parameters)

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

    def generation(self, index: int) -> int:
        """A number that is another one when the gradient of the parameter was forgotten since."""
        return self._generations[index]

    def factor(self, index: int, further: float = 1.0) -> float:
        """What an update multiplies the gradient by, `further` clipped by that."""
        return self._entries[index].clip * further / self.scale_of(index)

    def measured(self) -> float | None:
        """The sum of squares of all that there are, as they lie in the block, if that is known."""
        collected, squares = self._measured
        return squares if collected == self._collected else None

    def note_squares(self, squares: float) -> None:
        """The sum of squares of all that there are, as they lie in the block."""
        self._measured = self._collected, squares

    def summary(self) -> list[float]:
        """What the ranks add up for `settle`."""
        flags = [float(entry.where.present) for entry in self._entries]
        collects = self._state is GradientState.COLLECTING
        scaled = self._has_scaled()
        return [*flags, scaled, self._loss_scale * scaled, self._is_apart, collects]

    # What changes them

    def add(self, index: int, gradient: torch.Tensor, scale: float = 1.0) -> None:
        """Add a gradient of the parameter to what the step has so far; its loss was multiplied by
        `scale`. Raises `ShardedParameterError` for one that has a graph."""
        name = self.facts.names[index]
        if gradient.requires_grad:
            raise ShardedParameterError(
                f"the gradient of {name} has a graph (backward(create_graph=True)), "
                "which .grad of a wrapped model cannot keep; take it by "
                "torch.autograd.grad(loss, parameters, create_graph=True)"
            )
        self._tell_before_adding(index, gradient, scale)
        if self._collected == self._expected:
            self._listeners.updates.rollback(self.facts)
        self._listeners.updates.await_readers(self.facts)
        self._open()
        gradient = local_gradient(gradient, self.facts.parameters[index])
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if scale != self._loss_scale:
            if self._has_scaled():
                # Some micro-batches are scaled, or another optimizer stepped in between.
                gradient = gradient * (self._loss_scale / scale)
            else:
                self._loss_scale = scale
        self._state = GradientState.COLLECTING
        if self._buffer is not None:
            if self._entries[index].where is Where.FORGOTTEN:
                self._drop_forgotten()
            self._buffer.add(self, index, gradient)
            # A reduction that `add` ended may have begun the update without this gradient.
            if self._collected == self._expected:
                self._listeners.updates.rollback(self.facts)
        elif self.has(index):
            self._scale_assigned([index])
            self._block.part(index).add_(gradient)
        else:
            self._block.part(index).copy_(gradient)
        if not self.has(index):
            # What a reduction without it has left in the block is a part of it.
            home = self._buffer is None or self._entries[index].where is Where.ZEROED
            self._set([index], Where.HOME if home else Where.BUFFER)
        self._collected += 1
        if self._buffer is None:
            self._announce()

    def forget(self, indices: Iterable[int]) -> None:
        """There are no gradients of these parameters any more, as if there had never been any;
        several ranks do alike."""
        indices, others = set(indices), self.facts.ranks > 1
        self._listeners.grads.forgetting(self.facts, indices)
        for index in indices:
            self._generations[index] += 1
        left = set(self.present()) - indices
        if len(indices) == len(self._entries) or (not others and not left):
            self.clear()
            return
        self._listeners.updates.rollback(self.facts)
        if self._buffer is not None and self._state is GradientState.COLLECTING:
            self._buffer.forget(self, indices)
        # Another rank may have some.
        elsewhere = others and any(entry.where.filled for entry in self._entries)
        loose = self._buffer is None and self._state is GradientState.COLLECTING
        for index in indices:
            keeps = not loose and (elsewhere or self.at_home(index))
            if keeps or self.has(index):
                self._put(index, GradientEntry(Where.FORGOTTEN if keeps else Where.NOWHERE))
        self._measured = 0, None
        held = self._buffer is not None and self._buffer.holder is self
        if not held and all(
            entry.where in (Where.FORGOTTEN, Where.ZEROED) for entry in self._entries
        ):
            self.clear()

    def zero(self, indices: Iterable[int]) -> None:
        """The gradients of these parameters, settled if there are any, are zeros from now on; they
        are still gradients."""
        present = [index for index in indices if self.has(index)]
        if present:
            self._expect(GradientState.SETTLED, GradientState.SPENT)
            self._listeners.grads.changing(self.facts, present, torch.Tensor.zero_)
            self._listeners.updates.rollback(self.facts)
            self._listeners.updates.await_readers(self.facts)
            self._block.rewrite(dict.fromkeys(present))
            self._measured = 0, None
            for index in present:
                self._put(index, GradientEntry(Where.HOME))

    def assign(self, index: int, values: torch.Tensor) -> None:
        """`values`, what this rank has of the whole gradient of the parameter, replace its gradient
        or become it. What there is must be settled."""
        if not self.present():
            self.clear()
        self._listeners.grads.changing(self.facts, [index])
        self._listeners.updates.rollback(self.facts)
        self._listeners.updates.await_readers(self.facts)
        fresh = self._state is GradientState.EMPTY
        if fresh:
            self._set(range(len(self._entries)), Where.ZEROED)
            self._state = GradientState.SETTLED
        self._expect(GradientState.SETTLED, GradientState.SPENT)
        scaled = self._scaled(values)
        kept = values if scaled is None else scaled
        # Of a fresh block nothing was written yet that could be read.
        self._block.rewrite({index: kept.reshape(-1)}, fresh)
        self._put(index, GradientEntry(Where.HOME, unscaled=scaled is None))
        self._measured = 0, None

    def scale(self, indices: Iterable[int], factor: float) -> None:
        """Multiply the settled gradients of these parameters by a clip factor."""
        self._expect(GradientState.SETTLED, GradientState.SPENT)
        # A gradient that comes later is not clipped by this.
        present = [index for index in indices if self.has(index)]
        if factor != 1.0:
            self._listeners.grads.changing(
                self.facts, present, lambda assigned: assigned.mul_(factor)
            )
        for index in present:
            entry = self._entries[index]
            self._entries[index] = entry._replace(clip=entry.clip * factor)

    def apply_clips(self, indices: Iterable[int]) -> None:
        """Multiply the clip factors so far into the settled gradients of these parameters, in their
        dtype, as torch does at once: clipping them again rounds twice, too."""
        self._expect(GradientState.SETTLED, GradientState.SPENT)
        clipped = {
            index: self.clip_of(index)
            for index in indices
            if self.has(index) and self.clip_of(index) != 1.0
        }
        if clipped:
            self._listeners.updates.rollback(self.facts)
            self._listeners.updates.await_readers(self.facts)
            self._block.rewrite(clipped)
            self._measured = 0, None
            for index in clipped:
                self._entries[index] = self._entries[index]._replace(clip=1.0)

    def settle(self, agreed: Sequence[float] | None = None) -> None:
        """Make them final: what all ranks have, at home, averaged. `agreed` is the sum of every
        rank's `summary`."""
        self.wait()
        mine = [entry.where.present for entry in self._entries]
        if agreed is not None:
            self._join(agreed)
        if self._state is not GradientState.COLLECTING or not self.present():
            return
        reduction = self._reduction
        if self._is_apart and reduction is not None:
            reduction.post(reduction.average, scatters=False).wait()
            self._is_apart = False
        if self.facts.reduces_late and reduction is not None:
            self._block.zero(index for index, present in enumerate(mine) if not present)
            reduction.post(self._reduce_late(reduction)).wait()
        self._state = GradientState.SETTLED

    def spend(self, indices: Iterable[int], factor: float = 1.0) -> None:
        """An update was given the settled gradients of these parameters, clipped by `factor`, as
        they are from now on."""
        self.scale(indices, factor)
        self._state, self._expected = GradientState.SPENT, self._collected
        self._outdate()

    def clear(self) -> None:
        """There are no gradients any more."""
        self._listeners.grads.forgetting(self.facts, range(len(self._entries)))
        self._listeners.updates.rollback(self.facts)
        self._state = GradientState.EMPTY
        self._entries, self._number = [GradientEntry()] * len(self._entries), 0
        self._generations = [number + 1 for number in self._generations]
        self._loss_scale, self._collected, self._is_apart = 1.0, 0, False
        if self._buffer is not None:
            self._buffer.discard(self)
        self._measured = 0, None  # not before what was on its way has ended, and was measured

    # On their way

    def reduce(self, full: torch.Tensor, collected: Iterable[int]) -> Reduction | None:
        """For the buffer: average `full` (numel,), gradients of the parameters `collected`, over
        the ranks; add this rank's part to the block. What is reduced late is added there whole.

        With an exchange returns at once. When the reduction has ended `end_reduction` is to be
        called; until then the block is not used.
        """
        block, reduction = self._block, self._reduction
        self._drop_forgotten()
        collected = list(collected)
        self._scale_assigned(collected if self.facts.ranks == 1 else self.present())
        first = not any(entry.where.filled for entry in self._entries)
        self._set(collected, Where.HOME)
        if not any(entry.where.filled for entry in self._entries):
            # This rank brings zeros, and gets its part of what others bring.
            self._set(range(len(self._entries)), Where.ZEROED)
        if reduction is None:
            block.add_up(full, first)
            self._announce()
            return None
        leaving = block.begin_home(full) if first else None
        if leaving is not None:
            came = functools.partial(self._came, self._collected)
            return Reduction(reduction.bring(came, leaving.wait), leaving)
        if self.facts.reduces_late:
            return Reduction(reduction.bring(functools.partial(block.add_up, full, first)))
        idle = None if collected else functools.partial(self._bring_nothing, full, first)
        averages = reduction.averages
        if self.facts.replicas == 1 or (averages and not self._is_apart):
            bring = functools.partial(self._bring_home, reduction, full, first, self._collected)
            return Reduction(reduction.post(bring, idle=idle))
        self._is_apart = not averages
        add = functools.partial(self._scatter, reduction, full, first, averages)
        return Reduction(reduction.post(add, averages=averages, idle=idle))

    def follow(self, copy: Copy) -> None:
        """For the buffer: have what the device does next wait until `copy`, the `leaving` of a
        reduction, has ended."""
        if self._reduction is not None:
            self._reduction.follow(copy)

    def join_reduction(self) -> None:
        """For the buffer: other ranks may have gradients for the reduction that comes, and this one
        has none."""
        if self._collected == self._expected:
            self._listeners.updates.rollback(self.facts)
        self._listeners.updates.await_readers(self.facts)
        self._open()

    def end_reduction(self, collected: int) -> None:
        """For the buffer: the reduction that was posted when the step had brought as many gradients
        as `collected` has ended."""
        if 0 < collected == self._collected:
            self._announce()

    def wait(self) -> None:
        """Block until what was flushed is in the gradient block."""
        if self._buffer is not None:
            self._buffer.await_added()

    def _reduce_late(self, reduction: GradientReduction) -> Callable[[], object]:
        """What reduces the home of the whole unit, on the thread of the exchange."""
        if self._buffer is None:
            return functools.partial(reduction.reduced, self._block.flat())
        return functools.partial(reduction.reduce_home, self._buffer.lend())

    def _bring_home(
        self, reduction: GradientReduction, full: torch.Tensor, first: bool, collected: int
    ) -> None:
        self._block.add_up(reduction.reduced(full), first)
        self._measure(collected)

    def _bring_nothing(self, zeros: torch.Tensor, first: bool) -> None:
        if first:
            self._block.add_up(self.facts.shard_of(zeros), first)

    def _scatter(
        self, reduction: GradientReduction, full: torch.Tensor, first: bool, averages: bool
    ) -> None:
        self._block.add_up(reduction.scattered(full), first)
        if averages:
            reduction.average()

    def _came(self, collected: int) -> None:
        self._block.came()
        self._measure(collected)

    def _measure(self, collected: int) -> None:
        """If these were the last gradients of the step, say what their norm needs, while the model
        goes on."""
        if self.facts.reduces_late:
            return  # there are those of other ranks
        all_came = 0 < collected == self._expected
        squares = self._listeners.updates.square_ahead(self.facts, all_came)
        if all_came:
            self._measured = collected, squares

    def _announce(self) -> None:
        """Tell the updater where these may be all that the step brings."""
        final = not (self._is_apart or self.facts.reduces_late)
        if final and self._collected == self._expected:
            self._listeners.updates.gradients_came(self.facts)

    # Inside of the step

    def _expect(self, *states: GradientState) -> None:
        if self._state not in states:
            raise RuntimeError(f"the gradients of {self.facts.name} are {self._state.name}")

    def _set(self, indices: Iterable[int], where: Where) -> None:
        for index in indices:
            self._put(index, self._entries[index]._replace(where=where))

    def _put(self, index: int, entry: GradientEntry) -> None:
        self._number += entry.where.present - self._entries[index].where.present
        self._entries[index] = entry

    def _open(self) -> None:
        """SETTLED or SPENT -> COLLECTING: what is added comes on top of what torch would have,
        clipped as it is."""
        if self._state not in (GradientState.SETTLED, GradientState.SPENT):
            return
        self.apply_clips(self.present())
        self._state = GradientState.COLLECTING
        if self._buffer is None:
            self._set(
                [i for i, entry in enumerate(self._entries) if not entry.where.present],
                Where.NOWHERE,
            )
        if self.facts.reduces_late:
            self._scale_assigned(self.present())
            self._block.spread()
        self._collected, self._measured = 0, (0, None)

    def _has_scaled(self) -> bool:
        """Whether there is a gradient that was multiplied by the loss scale."""
        return any(entry.where.present and not entry.unscaled for entry in self._entries)

    def _scaled(self, values: torch.Tensor) -> torch.Tensor | None:
        """`values`, multiplied by the loss scale; None where there is none yet, or the product has
        no finite value in the dtype of the gradients."""
        if self._loss_scale == 1.0:
            return None
        scaled = values.float() * self._loss_scale
        most = torch.finfo(self.facts.gradient_dtype).max
        return scaled if bool((scaled.abs() <= most).all()) else None

    def _scale_assigned(self, indices: Iterable[int]) -> None:
        """Multiply those of these gradients by the loss scale that are not, where something may be
        added to them."""
        unscaled = [i for i in indices if self.has(i) and self._entries[i].unscaled]
        if unscaled and self._loss_scale != 1.0:
            self.wait()
            self._block.rewrite(dict.fromkeys(unscaled, self._loss_scale))
        for index in unscaled:
            self._entries[index] = self._entries[index]._replace(unscaled=False)

    def _tell_before_adding(self, index: int, gradient: torch.Tensor, scale: float) -> None:
        """A gradient is about to be added: the same is done to a tensor that was assigned."""
        name = self.facts.names[index]

        def add(assigned: torch.Tensor) -> None:
            if self.facts.ranks > 1:
                raise ShardedParameterError(
                    f"a backward adds to the tensor that was assigned to the gradient of "
                    f"{name} of a wrapped model, which other code still has; with "
                    "several ranks assign a copy: parameter.grad = tensor.clone()"
                )
            value = gradient.to_dense() if gradient.is_sparse else gradient
            assigned.add_(value if scale == 1.0 else (value.float() / scale).to(assigned.dtype))

        self._listeners.grads.changing(self.facts, [index], add)

    def _drop_forgotten(self) -> None:
        """Replace what was forgotten by zeros, where something may be added to it."""
        forgotten = [
            index for index, entry in enumerate(self._entries) if entry.where is Where.FORGOTTEN
        ]
        if forgotten:
            self.wait()
            if self.facts.reduces_late:
                self._block.zero(forgotten)
            else:
                self._block.rewrite(dict.fromkeys(forgotten))
            self._set(forgotten, Where.ZEROED)

    def _join(self, agreed: Sequence[float]) -> None:
        """Take over what other ranks have: their gradients are in this rank's shard, too."""
        *flags, having, scales, apart, collecting = agreed
        if collecting and self.facts.reduces_late:
            self._open()  # others add to what was settled: it is reduced once more
        there = [index for index, flag in enumerate(flags) if flag > 0]
        if having and not self._has_scaled():
            self._loss_scale = scales / having
        if there and self._state is GradientState.EMPTY:
            self._state = GradientState.COLLECTING
        if elsewhere := [index for index in there if not self.has(index)]:
            self._set(elsewhere, Where.HOME)
            self._measured = 0, None  # without them
        self._is_apart = apart > 0
