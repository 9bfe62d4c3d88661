"""Collects the gradients of a unit on the compute device, before they are reduced and go home."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch

from infinity.device import Copy
from infinity.sharding.facts import UnitFacts
from infinity.sharding.gradient_ledger import GradientLedger
from infinity.sharding.gradient_reduction import GradientReduction
from infinity.sharding.posted import Collective


class Reduction(NamedTuple):
    """The reduction of the gradients that a unit collected, posted as `collective`. `leaving` is
    the copy that alone reads them, if one does."""

    collective: Collective
    reducer: GradientReduction
    leaving: Copy | None = None


class Collecting(Protocol):
    """The methods of `Gradients` that a buffer calls."""

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
    """Memory of the compute device as large as the largest unit. It collects the gradients of one
    unit, the holder, before they are reduced.

    It is needed with several ranks, and if the compute device cannot address the home of gradients.
    Gradients that are reduced late pass it twice: whole on their way home, and in pieces that are
    reduced (`lend`). If a unit asks while another unit holds the buffer, the gradients of the
    holder are reduced. A parameter may also come a second time: in re-entrant checkpointing of a
    module used twice, and with micro-batches one after the other. If gradients of other ranks or
    earlier ones at home come first, the unit is then reduced, too. So gradients are added in the
    same order as without a buffer (invariant I8).

    With two `parts` of `memory` (uint8), one part collects while the other one is reduced.
    """

    def __init__(self, memory: torch.Tensor, parts: int) -> None:
        self._memory = memory
        # The first part collects, and is not free while there is a holder.
        self._free = deque(memory.chunk(parts))
        # The parts that reductions use, in their order.
        self._taken: deque[tuple[Reduction, torch.Tensor]] = deque()
        # Reductions under way, with `GradientLedger.collected` of each at its beginning.
        self._posted: deque[tuple[Collective, Collecting, int]] = deque()
        self._holder: Collecting | None = None
        self._collected: set[int] = set()
        # Units that span others, and their gradients, which lie outside of the buffer.
        self._parks: frozenset[Collecting] = frozenset()
        self._parked: dict[Collecting, dict[int, torch.Tensor]] = {}
        # If units are reduced in a line, the unit that the buffer collects.
        self._in_line = False
        self._next: Collecting | None = None

    @property
    def holder(self) -> Collecting | None:
        """The gradients that it collects."""
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
        """`owner` becomes the holder, with no gradients yet."""
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
        """Among units that are reduced each turn, the buffer collects only `owner` from now on.
        Gradients of the other units lie beside it until `reduce_turn`."""
        self._in_line, self._next = True, owner

    def admit_all(self) -> None:
        """End `admit`."""
        self._in_line, self._next = False, None

    def _park(self, owner: Collecting, index: int, gradient: torch.Tensor) -> None:
        """Keep the tensor that autograd made. It is not changed in place, because a hook of the
        user may have it, too."""
        parked = self._parked.setdefault(owner, {})
        gradient = gradient.to(owner.facts.gradient_dtype)
        parked[index] = parked[index] + gradient if index in parked else gradient

    def reduce_turn(self, owner: Collecting) -> None:
        """The turn of `owner`, which spans others or is in the line, has ended on all ranks: reduce
        its gradients, or zeros if it has none."""
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
        """Reduce the gradients of units that had no turn."""
        for owner in sorted(self._parked, key=lambda each: each.facts.index):
            self.reduce_turn(owner)

    def begin_turn(self, owner: Collecting) -> None:
        """The backward is about to use `owner`. Another holder of the buffer usually has all its
        gradients by then.

        The holder is reduced first, before the gathers that are posted with this use. So the buffer
        is free again when the next unit needs it. The use of a frozen unit changes nothing.
        """
        if owner.facts.trainable and self._holder is not None and self._holder is not owner:
            self.flush()

    def flush(self) -> None:
        """Reduce the gradients of the holder, and free the buffer."""
        holder, self._holder = self._holder, None
        if holder is None or not (self._collected or holder.facts.reduces_each_turn):
            return
        self._zero_rest(holder)
        posted = holder.reduce(self._flat(holder), self._collected)
        if posted is not None:
            self._taken.append((posted, self._free.popleft()))
            self._posted.append((posted.collective, holder, holder.ledger.collected))

    def _take_back(self) -> None:
        """Free the part that was taken first. If only a copy reads it, the device waits for the
        copy before it writes there, and the host does not wait."""
        reduction, part = self._taken[0]
        if reduction.leaving is not None:
            reduction.reducer.follow(reduction.leaving)
        else:
            while not reduction.collective.ended():
                self._end_first()
        self._taken.popleft()  # not after an error: `close` waits again
        self._free.append(part)

    def _zero_rest(self, holder: Collecting) -> None:
        """Zero the elements that the holder has not collected. Mostly this is only the padding at
        the end."""
        flat, end = self._flat(holder), 0
        for place in (holder.facts.layout.places[index] for index in sorted(self._collected)):
            if end < place.offset:
                flat[end : place.offset].zero_()
            end = place.end
        flat[end:].zero_()

    def await_added(self) -> None:
        """Block until all flushed gradients are at home."""
        while self._posted:
            self._end_first()

    def lend(self) -> torch.Tensor:
        """All of the memory (uint8), as scratch until the next gradient arrives. Collected
        gradients go home first."""
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
        """Forget the gradients of `owner` that are not reduced."""
        self._parked.pop(owner, None)
        if self._holder is owner:
            self._holder = None
        self.await_added()

    def forget(self, owner: Collecting, indices: set[int]) -> None:
        """Forget the gradients of these parameters of `owner` that are not reduced. Returns when no
        reduction is under way."""
        if self._holder is owner:
            self._collected -= indices
        for index in indices:
            self._parked.get(owner, {}).pop(index, None)
        self.await_added()

    def close(self) -> None:
        """Release the memory."""
        self._memory, self._holder = self._memory[:0].clone(), None
        self._parks = frozenset()
        self.admit_all()
        self._parked.clear()
        self._free.clear()
        self._taken.clear()
        self._posted.clear()
