"""The gradients of a unit in the step under way: how they change, and how they get home.

[Note: what torch's .grad would be]
As in torch, the gradients of a step stay until `zero_grad`: a second `step` applies them again, and
a backward adds to them. The engine differs in three things, for speed, and shows none of them. It
notes a clip factor (`GradientEntry.clip`) and multiplies it into the gradients only when something
is added to them. A forgotten gradient keeps its bytes until something is added to other gradients
of its unit (`Where.FORGOTTEN`). Gradients that were scaled with their loss stay scaled
(`GradientLedger.loss_scale`). An assigned gradient may be too large for that
(`GradientEntry.unscaled`).

Tensors and norms that users keep of a gradient are told before it changes (`Grads.changing`,
`Grads.forgetting`).

[Note: threads on the bytes]
The thread of the model touches the bytes, and during a reduction the thread of the exchange does.
An update reads them after `spend`. Code that then changes them waits for the update first.
`Gradients.wait` returns when the exchange has done its work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import torch

from infinity.errors import ShardedParameterError
from infinity.sharding.facts import UnitFacts
from infinity.sharding.gradient_block import GradientBlock
from infinity.sharding.gradient_buffer import GradientBuffer, Reduction
from infinity.sharding.gradient_ledger import GradientEntry, GradientLedger, GradientState, Where
from infinity.sharding.gradient_reduction import GradientReduction
from infinity.sharding.listeners import UnitListeners
from infinity.sharding.tensor_parallel import local_gradient


class Gradients:
    """The gradients of one unit in the step under way. `ledger` is the record of them.

    The thread that runs the model calls all methods. Parameters go by their index in the unit.
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
        self.ledger = GradientLedger(facts)

    @property
    def trains(self) -> bool:
        """Whether a parameter takes gradients now. A trainable unit may be frozen during some
        steps."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.facts.trainable and any(p.requires_grad for p in self.facts.parameters)

    # Changes

    def add(self, index: int, gradient: torch.Tensor, scale: float = 1.0) -> None:
        """Add a gradient of the parameter to the gradient of the step. Its loss was multiplied by
        `scale`. Raises `ShardedParameterError` if `gradient` has a graph."""
        ledger, name = self.ledger, self.facts.names[index]
        if gradient.requires_grad:
            raise ShardedParameterError(
                f"the gradient of {name} has a graph (backward(create_graph=True)), "
                "which .grad of a wrapped model cannot keep; take it by "
                "torch.autograd.grad(loss, parameters, create_graph=True)"
            )
        self._tell_before_adding(index, gradient, scale)
        if ledger.came_all:
            self._rollback()
        self._await_readers()
        self._open()
        gradient = local_gradient(gradient, self.facts.parameters[index])
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if scale != ledger.loss_scale:
            if ledger.has_scaled():
                # Some micro-batches are scaled, or another optimizer stepped in between.
                gradient = gradient * (ledger.loss_scale / scale)
            else:
                ledger.loss_scale = scale
        ledger.state = GradientState.COLLECTING
        if self._buffer is not None:
            if ledger.entries[index].where is Where.FORGOTTEN:
                self._drop_forgotten()
            self._buffer.add(self, index, gradient)
            # A reduction that `add` ended may have begun the update without this gradient.
            if ledger.came_all:
                self._rollback()
        elif ledger.has(index):
            self._scale_assigned([index])
            self._block.part(index).add_(gradient)
        else:
            self._block.part(index).copy_(gradient)
        if not ledger.has(index):
            # A reduction without it may have left gradients of other ranks: they are a part of it.
            home = self._buffer is None or ledger.entries[index].where is Where.ZEROED
            ledger.set([index], Where.HOME if home else Where.BUFFER)
        ledger.collected += 1
        if self._buffer is None:
            self._announce()

    def forget(self, indices: Iterable[int]) -> None:
        """Forget the gradients of these parameters, as if they had never come. With several ranks
        all do the same."""
        ledger, indices, others = self.ledger, set(indices), self.facts.ranks > 1
        self._listeners.grads.forgetting(self.facts, indices)
        ledger.age(indices)
        left = set(ledger.present()) - indices
        if len(indices) == len(ledger.entries) or (not others and not left):
            self.clear()
            return
        self._rollback()
        collecting = ledger.state is GradientState.COLLECTING
        if self._buffer is not None and collecting:
            self._buffer.forget(self, indices)
        # Another rank may have some.
        elsewhere = others and ledger.is_filled()
        loose = self._buffer is None and collecting
        for index in indices:
            keeps = not loose and (elsewhere or ledger.at_home(index))
            if keeps or ledger.has(index):
                ledger.entries[index] = GradientEntry(Where.FORGOTTEN if keeps else Where.NOWHERE)
        ledger.forget_squares()
        held = self._buffer is not None and self._buffer.holder is self
        if not held and all(
            entry.where in (Where.FORGOTTEN, Where.ZEROED) for entry in ledger.entries
        ):
            self.clear()

    def zero(self, indices: Iterable[int]) -> None:
        """The gradients of these parameters become zeros, if there are any and they are settled.
        Zeros are gradients, too."""
        ledger = self.ledger
        present = [index for index in indices if ledger.has(index)]
        if present:
            ledger.expect(GradientState.SETTLED, GradientState.SPENT)
            self._rewrite(present, torch.Tensor.zero_)
            self._block.rewrite(dict.fromkeys(present))
            ledger.forget_squares()
            for index in present:
                ledger.entries[index] = GradientEntry(Where.HOME)

    def assign(self, index: int, values: torch.Tensor) -> None:
        """`values`, this rank's part of the whole gradient of the parameter, become its gradient.
        Present gradients must be settled."""
        ledger = self.ledger
        if not ledger.present():
            self.clear()
        self._rewrite([index])
        fresh = ledger.state is GradientState.EMPTY
        if fresh:
            ledger.set(range(len(ledger.entries)), Where.ZEROED)
            ledger.state = GradientState.SETTLED
        ledger.expect(GradientState.SETTLED, GradientState.SPENT)
        scaled = ledger.scaled(values)
        kept = values if scaled is None else scaled
        # A fresh block has no bytes that could be read.
        self._block.rewrite({index: kept.reshape(-1)}, fresh)
        ledger.entries[index] = GradientEntry(Where.HOME, unscaled=scaled is None)
        ledger.forget_squares()

    def scale(self, indices: Iterable[int], factor: float) -> None:
        """Multiply the settled gradients of these parameters by a clip factor. Gradients that come
        later are not clipped by it."""
        ledger = self.ledger
        ledger.expect(GradientState.SETTLED, GradientState.SPENT)
        present = [index for index in indices if ledger.has(index)]
        if factor != 1.0:
            self._listeners.grads.changing(
                self.facts, present, lambda assigned: assigned.mul_(factor)
            )
        for index in present:
            entry = ledger.entries[index]
            ledger.entries[index] = entry._replace(clip=entry.clip * factor)

    def apply_clips(self, indices: Iterable[int]) -> None:
        """Multiply the clip factors so far into the settled gradients of these parameters, in their
        dtype, as torch does at once. So a second clip rounds a second time, too."""
        ledger = self.ledger
        ledger.expect(GradientState.SETTLED, GradientState.SPENT)
        clipped = {
            index: ledger.clip_of(index)
            for index in indices
            if ledger.has(index) and ledger.clip_of(index) != 1.0
        }
        if clipped:
            self._rollback()
            self._await_readers()
            self._block.rewrite(clipped)
            ledger.forget_squares()
            for index in clipped:
                ledger.entries[index] = ledger.entries[index]._replace(clip=1.0)

    def settle(self, agreed: Sequence[float] | None = None) -> None:
        """Make the gradients of all ranks final: at home, and averaged. `agreed` is the sum of the
        `GradientLedger.summary` of all ranks."""
        self.wait()
        ledger, reduction = self.ledger, self._reduction
        mine = [entry.where.present for entry in ledger.entries]
        if agreed is not None:
            self._join(agreed)
        if ledger.state is not GradientState.COLLECTING or not ledger.present():
            return
        if ledger.is_apart and reduction is not None:
            reduction.post(reduction.average, scatters=False).wait()
            ledger.is_apart = False
        if self.facts.reduces_late and reduction is not None:
            self._block.zero(index for index, present in enumerate(mine) if not present)
            late: Callable[[], object] = (
                functools.partial(reduction.reduced, self._block.flat())
                if self._buffer is None
                else functools.partial(reduction.reduce_home, self._buffer.lend())
            )
            reduction.post(late).wait()
        ledger.state = GradientState.SETTLED

    def spend(self, indices: Iterable[int], factor: float = 1.0) -> None:
        """An update gets the settled gradients of these parameters, clipped by `factor`."""
        self.scale(indices, factor)
        self.ledger.state, self.ledger.expected = GradientState.SPENT, self.ledger.collected
        self._outdate()

    def clear(self) -> None:
        """Forget all gradients."""
        ledger = self.ledger
        self._listeners.grads.forgetting(self.facts, range(len(ledger.entries)))
        self._rollback()
        ledger.clear()
        if self._buffer is not None:
            self._buffer.discard(self)
        ledger.forget_squares()  # after `discard`: a reduction that it ended may have noted some

    # On their way

    def reduce(self, full: torch.Tensor, collected: Iterable[int]) -> Reduction | None:
        """For the buffer: average `full` (numel,), gradients of the parameters `collected`, over
        the ranks, and add this rank's part to the block. Gradients that are reduced late are added
        there whole.

        With an exchange it returns at once. The caller calls `end_reduction` when the reduction has
        ended. Until then the block is not used.
        """
        block, reduction, ledger = self._block, self._reduction, self.ledger
        self._drop_forgotten()
        collected = list(collected)
        self._scale_assigned(collected if self.facts.ranks == 1 else ledger.present())
        first = not ledger.is_filled()
        ledger.set(collected, Where.HOME)
        if not ledger.is_filled():
            # This rank brings zeros, and gets its part of the gradients of other ranks.
            ledger.set(range(len(ledger.entries)), Where.ZEROED)
        if reduction is None:
            block.add_up(full, first)
            self._announce()
            return None
        came = functools.partial(self._measure, ledger.collected)
        leaving = block.begin_home(full) if first else None
        if leaving is not None:

            def end() -> None:
                block.came()
                came()

            return Reduction(reduction.bring(end, leaving.wait), reduction, leaving)
        if self.facts.reduces_late:
            add_up = functools.partial(block.add_up, full, first)
            return Reduction(reduction.bring(add_up), reduction)
        averages = reduction.averages
        if self.facts.replicas > 1 and (ledger.is_apart or not averages):
            ledger.is_apart = not averages
            add = functools.partial(reduction.add_scattered, full, first, averages)
        else:
            averages = True
            add = functools.partial(reduction.add_reduced, full, first, came)
        idle = None if collected else functools.partial(reduction.add_nothing, full, first)
        return Reduction(reduction.post(add, averages=averages, idle=idle), reduction)

    def join_reduction(self) -> None:
        """For the buffer: this rank has no gradients for the reduction that comes, and other ranks
        may have some."""
        if self.ledger.came_all:
            self._rollback()
        self._await_readers()
        self._open()

    def end_reduction(self, collected: int) -> None:
        """For the buffer: a reduction has ended. When it was posted the step had brought
        `collected` gradients."""
        if 0 < collected == self.ledger.collected:
            self._announce()

    def wait(self) -> None:
        """Block until the flushed gradients are in the gradient block."""
        if self._buffer is not None:
            self._buffer.await_added()

    def _measure(self, collected: int) -> None:
        """If these are the last gradients of the step, compute their sum of squares while the model
        continues. On the thread of the exchange."""
        if self.facts.reduces_late:
            return  # other ranks have gradients, too
        ledger = self.ledger
        all_came = 0 < collected == ledger.expected
        squares = self._listeners.updates.square_ahead(self.facts, all_came)
        if all_came:
            ledger.note_squares(squares, collected)

    def _announce(self) -> None:
        """Tell the updater if these may be all gradients of the step."""
        final = not (self.ledger.is_apart or self.facts.reduces_late)
        if final and self.ledger.came_all:
            self._listeners.updates.gradients_came(self.facts)

    # Before a change

    def _rollback(self) -> None:
        self._listeners.updates.rollback(self.facts)

    def _await_readers(self) -> None:
        self._listeners.updates.await_readers(self.facts)

    def _rewrite(
        self, indices: Sequence[int], change: Callable[[torch.Tensor], object] | None = None
    ) -> None:
        """The gradients of these parameters are about to be rewritten at home."""
        self._listeners.grads.changing(self.facts, indices, change)
        self._rollback()
        self._await_readers()

    def _open(self) -> None:
        """SETTLED or SPENT -> COLLECTING: a gradient that is added meets the gradients that torch
        would have, with their clip factors applied."""
        ledger = self.ledger
        if ledger.state not in (GradientState.SETTLED, GradientState.SPENT):
            return
        self.apply_clips(ledger.present())
        ledger.state = GradientState.COLLECTING
        if self._buffer is None:
            ledger.set(
                [i for i, entry in enumerate(ledger.entries) if not entry.where.present],
                Where.NOWHERE,
            )
        if self.facts.reduces_late:
            self._scale_assigned(ledger.present())
            self._block.spread()
        ledger.collected = 0
        ledger.forget_squares()

    def _scale_assigned(self, indices: Iterable[int]) -> None:
        """Multiply the unscaled gradients among these by the loss scale, because something may be
        added to them."""
        ledger = self.ledger
        unscaled = [i for i in indices if ledger.has(i) and ledger.entries[i].unscaled]
        if unscaled and ledger.loss_scale != 1.0:
            self.wait()
            self._block.rewrite(dict.fromkeys(unscaled, ledger.loss_scale))
        for index in unscaled:
            ledger.entries[index] = ledger.entries[index]._replace(unscaled=False)

    def _tell_before_adding(self, index: int, gradient: torch.Tensor, scale: float) -> None:
        """A gradient is about to be added. Have it added to an assigned tensor, too."""
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
        """Replace forgotten gradients by zeros, because something may be added to them."""
        forgotten = [
            index
            for index, entry in enumerate(self.ledger.entries)
            if entry.where is Where.FORGOTTEN
        ]
        if forgotten:
            self.wait()
            if self.facts.reduces_late:
                self._block.zero(forgotten)
            else:
                self._block.rewrite(dict.fromkeys(forgotten))
            self.ledger.set(forgotten, Where.ZEROED)

    def _join(self, agreed: Sequence[float]) -> None:
        """Note the gradients of other ranks: they are in this rank's shard, too."""
        ledger = self.ledger
        *flags, having, scales, apart, collecting = agreed
        if collecting and self.facts.reduces_late:
            self._open()  # other ranks add to settled gradients: they are reduced once more
        there = [index for index, flag in enumerate(flags) if flag > 0]
        if having and not ledger.has_scaled():
            ledger.loss_scale = scales / having
        if there and ledger.state is GradientState.EMPTY:
            ledger.state = GradientState.COLLECTING
        if elsewhere := [index for index in there if not ledger.has(index)]:
            ledger.set(elsewhere, Where.HOME)
            ledger.forget_squares()  # they leave out the gradients of other ranks
        ledger.is_apart = apart > 0
