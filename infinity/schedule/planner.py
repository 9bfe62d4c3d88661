"""What to bring next, and what that costs: pure functions of the trace, the sizes and the budgets.
Imports no torch.

The runtime walks `look_ahead` against the real arena; `predict` walks the same function against a
map of slots, so the bytes it states are the bytes that move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from infinity.schedule.trace import Trace
from infinity.tiers.slots import SlotMap

MOST_STEPS = 16
"""How many steps `predict` walks at most: where sizes differ, placements may take some to settle,
or go round for ever."""


def look_ahead(
    trace: Trace, has_copy: Callable[[int], bool], bring: Callable[[int, float], bool]
) -> None:
    """Bring the units that will be used next, soonest first, until there is no room.

    `bring(unit, beyond)` may evict only what is used later than `beyond`: with the trace as the
    future that is Belady's rule among the units that are not in use. So look-ahead costs an extra
    read only if the unit in use is the one needed last. In a forward and its backward it never is.
    """
    for unit, distance in trace.upcoming():
        if not has_copy(unit) and not bring(unit, distance):
            return


@dataclass(frozen=True)
class UnitCost:
    """What moving one unit of this rank costs, in bytes of NVMe traffic; none for what is in
    memory.

    `slots` is the run it takes on the compute device (0: it never leaves). `fetch` brings it there;
    `old` is what its update reads of the parameter when that is not there. `update_read` and
    `update_written` are all else of one optimizer step.
    """

    slots: int
    fetch: int
    old: int
    update_read: int
    update_written: int
    trainable: bool


@dataclass(frozen=True)
class Traffic:
    """NVMe bytes of one optimizer step in the steady state: parameters fetched, and states
    updated."""

    fetched: int
    update_read: int
    update_written: int

    @property
    def read(self) -> int:
        return self.fetched + self.update_read


def predict(
    order: Sequence[int],
    units: Sequence[UnitCost],
    slots: int,
    accumulation: int = 1,
    held: Sequence[frozenset[int]] = (),
    waits: bool = False,
    delayed: bool = False,
) -> Traffic:
    """NVMe traffic of one optimizer step of `accumulation` cycles of `order`, with `slots` slots
    for copies.

    Walks steps from an empty arena until one leaves it as it found it, mostly the third, and states
    that one; where sizes differ there may be none, and it is the last of `MOST_STEPS`. `held[i]`
    are units that cannot be evicted when `order[i]` comes into use (see `Cycle`); none when it is
    empty. An update puts its result into the place of the unit. It runs when the unit has a place,
    or with `waits` before the step returns. With `delayed` it runs when it likes: its reads are
    stated as if no place still held the parameter, the most they can be, and every place is filled
    anew afterwards.
    """
    copies: SlotMap[int] = SlotMap(slots)
    trace = Trace()
    fetched = reread = 0
    trainable = frozenset(index for index, unit in enumerate(units) if unit.trainable) & set(order)
    pending: set[int] = set()  # to be updated, without a place

    def bring(unit: int, beyond: float, pinned: frozenset[int] = frozenset()) -> bool:
        nonlocal fetched, reread
        place = copies.place(
            units[unit].slots,
            lambda other: None if other in pinned else trace.next_use(other),
            beyond,
        )
        if place is None:
            return False
        for victim in place.evicted:
            copies.give_back(victim)
        copies.take(unit, place.start, units[unit].slots)
        if unit in pending:
            pending.remove(unit)
            reread += units[unit].old
        else:
            fetched += units[unit].fetch
        return True

    def has_copy(unit: int) -> bool:
        return units[unit].slots == 0 or unit in copies.runs

    before = None
    for _ in range(MOST_STEPS):
        fetched = reread = 0
        for _ in range(accumulation):
            trace.begin("train")
            look_ahead(trace, has_copy, bring)
            for unit, others in zip(order, held or [frozenset()] * len(order), strict=True):
                trace.use(unit)
                if not has_copy(unit):
                    bring(unit, -1, others)
                look_ahead(trace, has_copy, partial(bring, pinned=others | {unit}))
        if delayed:
            reread += sum(units[unit].old for unit in trainable)
            fetched += sum(units[unit].fetch for unit in trainable if unit in copies.runs)
        else:
            pending = {unit for unit in trainable if not has_copy(unit)}
        look_ahead(trace, has_copy, bring)
        if waits:
            reread += sum(units[unit].old for unit in pending)
            pending.clear()
        after = dict(copies.runs), set(pending)
        if after == before:
            break
        before = after
    updated = [units[unit] for unit in sorted(trainable)]
    return Traffic(
        fetched,
        reread + sum(u.update_read for u in updated),
        sum(u.update_written for u in updated),
    )
