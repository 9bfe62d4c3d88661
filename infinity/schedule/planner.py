"""What to bring next, and what that costs: pure functions of the trace, the sizes and the budgets.
Imports no torch.

The runtime walks `look_ahead` against the real arena. `Walk` walks the same function against a map
of slots, so the bytes that `predict` states are the bytes that move. `infinity plan` gives the
events of a walk their times.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from infinity.placement.spec import Kind, Placed
from infinity.placement.traffic import is_rounded
from infinity.quantities import round_up
from infinity.schedule.trace import Trace
from infinity.tiers.slots import Clock, SlotMap, SlotRun

STATES = tuple(kind for kind in Kind if kind not in (Kind.PARAM, Kind.GRAD))
SLOT_BYTES = 4096
MOST_STEPS = 16
"""How many steps `predict` walks at most: where sizes differ, placements may take some to settle,
or go round for ever."""


class Reach:
    """How far a `look_ahead` came, so that the next one goes on there: up to that use every unit
    has a copy. `lost` counts how often a copy was lost otherwise than to a `bring`, which takes
    nothing that is needed sooner than what it brings."""

    def __init__(self, lost: Callable[[], int]) -> None:
        self._lost = lost
        self._known = Clock(-1, 0), 0  # where a walk ended, and what was lost then

    def start(self, trace: Trace) -> int:
        """The first use ahead of now that is not known to have a copy."""
        clock, lost = self._known
        same = clock.version == trace.clock.version and lost == self._lost()
        return max(clock.time - trace.clock.time, 0) if same else 0

    def end(self, trace: Trace, ahead: int, lost: int) -> None:
        """A walk came to the use that is so far `ahead`; `lost` was counted when it began."""
        version, time = trace.clock
        self._known = Clock(version, time + ahead), lost

    @property
    def lost(self) -> int:
        """What is counted now."""
        return self._lost()


def look_ahead(
    trace: Trace,
    has_copy: Callable[[int], bool],
    bring: Callable[[int, float], bool],
    reach: Reach | None = None,
) -> None:
    """Bring the units that will be used next, soonest first, until there is no room.

    `bring(unit, beyond)` may evict only what is used later than `beyond`: with the trace as the
    future that is Belady's rule among the units that are not in use. So look-ahead costs an extra
    read only if the unit in use is the one needed last. In a forward and its backward it never is.

    With `reach` it walks what the last one by the same has not walked.
    """
    reach = Reach(lambda: 0) if reach is None else reach
    lost, ahead = reach.lost, len(trace.predicted.order)
    for unit, distance in trace.upcoming(reach.start(trace)):
        if not has_copy(unit) and not bring(unit, distance):
            ahead = int(distance)
            break
    reach.end(trace, ahead, lost)


@dataclass(frozen=True)
class UnitCost:
    """What moving one unit of this rank costs, in bytes of NVMe traffic; none for what is in
    memory.

    `slots` is the run it takes on the compute device (0: it never leaves). `fetch` brings it there;
    `old` is what its update reads of the parameter when that is not there. `update_read` and
    `update_written` are all else of one optimizer step, and `commit_written` what a step writes
    besides that is committed, where not every one is.
    """

    slots: int
    fetch: int
    old: int
    update_read: int
    update_written: int
    trainable: bool
    commit_written: int = 0


def cost_of(unit: Mapping[Kind, Placed], cycles: int, norms: int, trains: bool) -> UnitCost:
    """What the blocks of one unit cost in a step of `cycles` cycles that asks `norms` times for the
    gradient norm."""

    def on_nvme(*kinds: Kind) -> int:
        return sum(unit[kind].moved_bytes for kind in kinds if kind in unit)

    states, param, gradient = on_nvme(*STATES), on_nvme(Kind.PARAM), on_nvme(Kind.GRAD)
    updated = [unit[kind] for kind in (*STATES, Kind.PARAM) if kind in unit]
    written = sum(block.written_bytes for block in updated)
    for_commit = sum(block.commit_bytes for block in updated)
    spec = unit[Kind.PARAM].spec
    slots = 0 if spec.permanent else round_up(spec.span, SLOT_BYTES) // SLOT_BYTES
    old = 0 if is_rounded({kind: block.spec for kind, block in unit.items()}) else param
    # A gradient is written by every backward, and read by all but the first, by each norm and by
    # the update.
    read = states + gradient * (cycles + norms)
    return UnitCost(slots, param, old, read, written + gradient * cycles, trains, for_commit)


@dataclass(frozen=True)
class Traffic:
    """NVMe bytes of one optimizer step in the steady state: parameters fetched, and states
    updated; and what the update of a step writes besides that is committed, where not every one
    is."""

    fetched: int
    update_read: int
    update_written: int
    commit_written: int = 0

    @property
    def read(self) -> int:
        return self.fetched + self.update_read

    def mean_written(self, steps_per_commit: int) -> float:
        """Bytes that a step writes on average, where one of so many is committed."""
        return self.update_written + self.commit_written / steps_per_commit


class Event(enum.Enum):
    """What `Walk` tells of a unit."""

    USE = enum.auto()
    """The model uses it."""
    FETCH = enum.auto()
    """It is brought to a place on the compute device."""
    LAND = enum.auto()
    """It gets a place, and its pending update fills that. The update reads the old parameter."""
    READ = enum.auto()
    """Its update reads the old parameter and needs no place."""


Listener = Callable[[Event, int, tuple[int, ...]], None]
"""Told of an event, its unit, and the units that are evicted for it."""


class Walk:
    """Walks training steps over a map of slots: what the runtime does, without time and content.

    A step has `accumulation` cycles of `order`, with `slots` slots for copies. `held[i]` are units
    that cannot be evicted when `order[i]` comes into use (see `Cycle`); none when it is empty. An
    update puts its result into the place of the unit. It runs when the unit has a place, or with
    `waits` before the step returns. With `delayed` it runs when it likes: its reads are stated as
    if no place still held the parameter, the most they can be, and every place is filled anew
    afterwards.
    """

    def __init__(
        self,
        order: Sequence[int],
        units: Sequence[UnitCost],
        slots: int,
        accumulation: int = 1,
        held: Sequence[frozenset[int]] = (),
        waits: bool = False,
        delayed: bool = False,
    ) -> None:
        self.trainable = frozenset(i for i, unit in enumerate(units) if unit.trainable) & set(order)
        """The units that a step updates."""
        self._order = order
        self._units = units
        self._accumulation = accumulation
        self._held = held or [frozenset()] * len(order)
        self._waits = waits
        self._delayed = delayed
        self._copies: SlotMap[int] = SlotMap(slots)
        self._trace = Trace()
        self._pending: set[int] = set()  # to be updated, without a place
        self._lost = 0
        self._reach = Reach(lambda: self._lost)
        self._tell: Listener = lambda *_: None

    @property
    def state(self) -> tuple[dict[int, SlotRun], set[int]]:
        """What one step leaves to the next: equal states are followed by equal steps."""
        return dict(self._copies.runs), set(self._pending)

    def cycles(self, tell: Listener) -> None:
        """Walk the forwards and backwards of a step, and `tell` what happens, in order."""
        self._tell = tell
        for _ in range(self._accumulation):
            self._trace.begin("train")
            look_ahead(self._trace, self.has_copy, self._bring, self._reach)
            for unit, others in zip(self._order, self._held, strict=True):
                self._trace.use(unit)
                if not self.has_copy(unit):
                    self._bring(unit, -1, others)
                tell(Event.USE, unit, ())
                bring = partial(self._bring, pinned=others | {unit})
                look_ahead(self._trace, self.has_copy, bring, self._reach)

    def update(self, tell: Listener) -> None:
        """The same for the end of a step, where updates are posted and the next forward begins."""
        self._tell = tell
        if self._delayed:
            for unit in sorted(self.trainable):
                tell(Event.READ, unit, ())
                if unit in self._copies.runs:
                    tell(Event.FETCH, unit, ())
        else:
            self._pending = {unit for unit in self.trainable if not self.has_copy(unit)}
        look_ahead(self._trace, self.has_copy, self._bring, self._reach)
        if self._waits:
            for unit in sorted(self._pending):
                tell(Event.READ, unit, ())
            self._pending.clear()

    def has_copy(self, unit: int) -> bool:
        """Whether `unit` has a place on the compute device, or lives there."""
        return self._units[unit].slots == 0 or unit in self._copies.runs

    def _bring(self, unit: int, beyond: float, pinned: frozenset[int] = frozenset()) -> bool:
        place = self._copies.place(
            self._units[unit].slots,
            lambda other: None if other in pinned else self._trace.next_use(other),
            beyond,
            self._trace.clock,
        )
        if place is None:
            return False
        self._lost += len(place.evicted) if beyond < 0 else 0
        for victim in place.evicted:
            self._copies.give_back(victim)
        self._copies.take(unit, place.start, self._units[unit].slots)
        pending = unit in self._pending
        self._pending.discard(unit)
        self._tell(Event.LAND if pending else Event.FETCH, unit, place.evicted)
        return True


def predict(
    order: Sequence[int],
    units: Sequence[UnitCost],
    slots: int,
    accumulation: int = 1,
    held: Sequence[frozenset[int]] = (),
    waits: bool = False,
    delayed: bool = False,
) -> Traffic:
    """NVMe traffic of one optimizer step of a `Walk` by the same arguments, in the steady state.

    Walks steps from an empty arena until one leaves it as it found it, mostly the third, and states
    that one; where sizes differ there may be none, and it is the last of `MOST_STEPS`.
    """
    walk = Walk(order, units, slots, accumulation, held, waits, delayed)
    fetched = reread = 0

    def count(event: Event, unit: int, evicted: tuple[int, ...]) -> None:
        nonlocal fetched, reread
        if event is Event.FETCH:
            fetched += units[unit].fetch
        elif event is not Event.USE:
            reread += units[unit].old

    before = None
    for _ in range(MOST_STEPS):
        fetched = reread = 0
        walk.cycles(count)
        walk.update(count)
        after = walk.state
        if after == before:
            break
        before = after
    updated = [units[unit] for unit in sorted(walk.trainable)]
    return Traffic(
        fetched,
        reread + sum(u.update_read for u in updated),
        sum(u.update_written for u in updated),
        sum(u.commit_written for u in updated),
    )
