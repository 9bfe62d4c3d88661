"""Where a unit's gradients are collected on the compute device, before they are reduced and go
home."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch

from infinity.device import Copy
from infinity.sharding.exchange import Collective
from infinity.sharding.facts import UnitFacts
from infinity.sharding.gradient_ledger import GradientLedger
from infinity.sharding.gradient_reduction import GradientReduction


class Reduction(NamedTuple):
    """The reduction of the gradients that a unit collected, posted as `collective`. `leaving` is
    the copy that alone reads them, if one does."""

    collective: Collective
    reducer: GradientReduction
    leaving: Copy | None = None


class Collecting(Protocol):
    """What a buffer asks of the gradients of a unit that it collects: see `Gradients`."""

    @property
    def facts(self) -> UnitFacts: ...
    @property
    def trains(self) -> bool: ...
    @property
    def ledger(self) -> GradientLedger: ...
    def join_reduction(self) -> None: ...
    def reduce(self, full: torch.Tensor, collected: Iterable[int]) -> Reduction | None: ...
    def end_reduction(self, collected: int) -> None: ...


class GradientBuffer:
    """Compute buffers as large as the largest unit, in which a unit's gradients are collected
    before they are reduced.

    Needed with several ranks, and where the gradient's home cannot be addressed from the compute
    device. What is reduced late passes it twice: whole on its way home, and in pieces that are
    reduced (`lend`). If a unit asks while another unit holds the buffer, the other one reduces what
    it has. A parameter may also come a second time: in re-entrant checkpointing of a module used
    twice, and with micro-batches one after the other. If gradients of other ranks or earlier ones
    at home come first, the unit then reduces, too. So gradients are added in the same order as
    without a buffer (invariant I8).

    With two `parts` of `memory` (uint8) one is collected into while the other is reduced.
    """

    def __init__(self, memory: torch.Tensor, parts: int) -> None:
        self._memory = memory
        # The first one is collected into, and is not free while there is a holder.
        self._free = deque(memory.chunk(parts))
        # Those that reductions took, in their order.
        self._taken: deque[tuple[Reduction, torch.Tensor]] = deque()
        # Reductions under way, with what each had collected.
        self._posted: deque[tuple[Collective, Collecting, int]] = deque()
        self._holder: Collecting | None = None
        self._collected: set[int] = set()
        # Of units that span others, what they have collected in their turn, which lies elsewhere.
        self._parks: frozenset[Collecting] = frozenset()
        self._parked: dict[Collecting, dict[int, torch.Tensor]] = {}
        # Where units are reduced in a line, the one that is collected in the buffer.
        self._in_line = False
        self._next: Collecting | None = None

    @property
    def holder(self) -> Collecting | None:
        """Whose gradients are collected in it."""
        return self._holder

    def add(self, owner: Collecting, index: int, gradient: torch.Tensor) -> None:
        """Collect `gradient`, of the parameter `index` of `owner`."""
        waits = self._in_line and owner is not self._next and owner.facts.reduces_each_turn
        if waits or owner in self._parks or owner in self._parked:
            self._park(owner, index, gradient)
            return
        again = self._holder is owner and index in self._collected
        if self._holder is not owner or (
            again and (owner.facts.reduces_each_turn or owner.ledger.at_home(index))
        ):
            self._hold(owner)
            again = False
        self._put(owner, index, gradient, again)

    def _hold(self, owner: Collecting) -> None:
        """`owner` becomes the holder, of nothing."""
        self.flush()
        while self._posted and self._posted[0][0].ended():
            self._end_first()
        if not self._free:
            self._take_back()
        self._holder, self._collected = owner, set()

    def _put(
        self, owner: Collecting, index: int, gradient: torch.Tensor, again: bool = False
    ) -> None:
        self._collected.add(index)
        place = owner.facts.layout.places[index]
        part = self._flat(owner)[place.offset : place.end].view(place.shape)
        if again:
            part.add_(gradient)
        else:
            part.copy_(gradient)

    def park(self, owners: Iterable[Collecting]) -> None:
        """From now on gradients of `owners` lie beside the buffer until `reduce_turn`."""
        self._parks = frozenset(owners)

    def admit(self, owner: Collecting | None) -> None:
        """From now on of units that are reduced each turn `owner` alone is collected in the buffer;
        gradients of others lie beside it until `reduce_turn`."""
        self._in_line, self._next = True, owner

    def admit_all(self) -> None:
        """End `admit`."""
        self._in_line, self._next = False, None

    def _park(self, owner: Collecting, index: int, gradient: torch.Tensor) -> None:
        """Keep the tensor that autograd made, which nothing changes in place: a hook of the user
        may have it, too."""
        parked = self._parked.setdefault(owner, {})
        gradient = gradient.to(owner.facts.gradient_dtype)
        parked[index] = parked[index] + gradient if index in parked else gradient

    def reduce_turn(self, owner: Collecting) -> None:
        """The turn of `owner`, one that spans others or is in the line, has ended on all ranks:
        reduce what it has collected, zeros if that is nothing."""
        parked = self._parked.pop(owner, {})
        if self._holder is owner and not parked:
            self.flush()
            return
        if not (parked or owner.trains):
            return
        if not parked:
            owner.join_reduction()
        self._hold(owner)
        for index, gradient in parked.items():
            self._put(owner, index, gradient)
        self.flush()

    def reduce_parked(self) -> None:
        """Reduce what is left: of units that had a gradient, and no turn."""
        for owner in sorted(self._parked, key=lambda each: each.facts.index):
            self.reduce_turn(owner)

    def begin_turn(self, owner: Collecting) -> None:
        """The backward is about to use `owner`: another one that holds the buffer has all its
        gradients, as a rule.

        It is reduced first, before the gathers that are posted with this use. So the buffer is free
        again when the unit after this one needs it. Frozen units come and go between gradients.
        """
        if owner.facts.trainable and self._holder is not None and self._holder is not owner:
            self.flush()

    def flush(self) -> None:
        """Reduce what the holder has collected, and free the buffer."""
        holder, self._holder = self._holder, None
        if holder is None or not (self._collected or holder.facts.reduces_each_turn):
            return
        self._zero_rest(holder)
        posted = holder.reduce(self._flat(holder), self._collected)
        if posted is not None:
            self._taken.append((posted, self._free.popleft()))
            self._posted.append((posted.collective, holder, holder.ledger.collected))

    def _take_back(self) -> None:
        """Free the part that was taken first: what only a copy reads is written when
        that has ended, which the device waits for, and not the host."""
        reduction, part = self._taken[0]
        if reduction.leaving is not None:
            reduction.reducer.follow(reduction.leaving)
        else:
            while not reduction.collective.ended():
                self._end_first()
        self._taken.popleft()  # not where the wait raised: what ends the engine asks again
        self._free.append(part)

    def _zero_rest(self, holder: Collecting) -> None:
        """What the holder has not collected: mostly padding at the end alone, so that the buffer is
        filled in one pass."""
        flat, end = self._flat(holder), 0
        for place in (holder.facts.layout.places[index] for index in sorted(self._collected)):
            if end < place.offset:
                flat[end : place.offset].zero_()
            end = place.end
        flat[end:].zero_()

    def await_added(self) -> None:
        """Block until everything that was flushed has been added to the gradients of its unit."""
        while self._posted:
            self._end_first()

    def lend(self) -> torch.Tensor:
        """All of the memory (uint8), for who is done with it before the next gradient comes; what
        was collected has gone home."""
        self.flush()
        self.await_added()
        return self._memory

    def _end_first(self) -> None:
        posted, owner, collected = self._posted.popleft()
        posted.wait()
        owner.end_reduction(collected)

    def _flat(self, owner: Collecting) -> torch.Tensor:
        return self._free[0][: owner.facts.gradient_nbytes].view(owner.facts.gradient_dtype)

    def discard(self, owner: Collecting) -> None:
        """Forget what `owner` has collected and not reduced."""
        self._parked.pop(owner, None)
        if self._holder is owner:
            self._holder = None
        self.await_added()

    def forget(self, owner: Collecting, indices: set[int]) -> None:
        """Forget what `owner` has collected of these parameters and not reduced; return when
        nothing of it is on its way."""
        if self._holder is owner:
            self._collected -= indices
        for index in indices:
            self._parked.get(owner, {}).pop(index, None)
        self.await_added()

    def close(self) -> None:
        """Give the memory back."""
        self._memory, self._holder = self._memory[:0].clone(), None
        self._parks = frozenset()
        self.admit_all()
        self._parked.clear()
        self._free.clear()
        self._taken.clear()
        self._posted.clear()
