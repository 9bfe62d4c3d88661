"""Chooses the units to fetch next, and predicts the bytes that move: pure functions of the trace,
the sizes and the budgets. Imports no torch.

The runtime runs `look_ahead` on the real arena. `Walk` runs the same function on a map of slots, so
the bytes that `predict` returns are the bytes that move. `infinity plan` adds times to the events
of a walk.
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
"""The most steps that `predict` walks. If unit sizes differ, placements may need many steps to
settle, or never settle."""


class Reach:
    """The use at which a `look_ahead` stopped, where the next resumes: every unit used before it
    has a copy.

    `lost` counts the copies that lost their places. It omits evictions by `bring`, which evicts
    only units that are needed later than the unit it brings.
    """

    def __init__(self, lost: Callable[[], int]) -> None:
        self._lost = lost
        self._known = Clock(-1, 0), 0  # at the end of a look-ahead

    def start(self, trace: Trace) -> int:
        """The distance, in uses from now, at which to resume; 0 if a copy was lost or the
        prediction changed."""
        clock, lost = self._known
        same = clock.version == trace.clock.version and lost == self._lost()
        return max(clock.time - trace.clock.time, 0) if same else 0

    def end(self, trace: Trace, ahead: int, lost: int) -> None:
        """Note that a look-ahead stopped `ahead` uses from now. `lost` is the count at its
        start."""
        version, time = trace.clock
        self._known = Clock(version, time + ahead), lost

    @property
    def lost(self) -> int:
        """The count of lost copies now."""
        return self._lost()


def look_ahead(
    trace: Trace,
    has_copy: Callable[[int], bool],
    bring: Callable[[int, float], bool],
    reach: Reach | None = None,
) -> None:
    """Fetch the units that will be used next, soonest first, until there is no room.

    `has_copy(unit)`: whether a unit needs no fetch. `bring(unit, beyond)` starts a fetch, or
    returns False if there is no room. It may evict only units that are used more than `beyond` uses
    from now. With the trace as the future, this is Belady's rule among the units not in use. So
    look-ahead costs an extra read only if the unit in use is needed last. In a forward and its
    backward it never is.

    With `reach`, resumes at the end of the last look-ahead with the same `reach`.
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
    """The NVMe bytes that a unit of this rank moves. States in memory move none.

    `slots` is the length of its run on the compute device; 0 if it never leaves. `fetch` bytes
    bring it there. `old` bytes are the parameter bytes that its update reads if it has no place
    there. `update_read` and `update_written` are the other bytes of one optimizer step. If only
    some steps are committed, each of them writes `commit_written` bytes more.
    """

    slots: int
    fetch: int
    old: int
    update_read: int
    update_written: int
    trainable: bool
    commit_written: int = 0


def cost_of(unit: Mapping[Kind, Placed], cycles: int, norms: int, trains: bool) -> UnitCost:
    """The cost of the blocks of one unit, for a step of `cycles` forwards and backwards that
    measures the gradient norm `norms` times. `trains`: whether the step updates the unit."""

    def on_nvme(*kinds: Kind) -> int:
        return sum(unit[kind].moved_bytes for kind in kinds if kind in unit)

    states, param, gradient = on_nvme(*STATES), on_nvme(Kind.PARAM), on_nvme(Kind.GRAD)
    updated = [unit[kind] for kind in (*STATES, Kind.PARAM) if kind in unit]
    written = sum(block.written_bytes for block in updated)
    for_commit = sum(block.commit_bytes for block in updated)
    spec = unit[Kind.PARAM].spec
    slots = 0 if spec.permanent else round_up(spec.span, SLOT_BYTES) // SLOT_BYTES
    old = 0 if is_rounded({kind: block.spec for kind, block in unit.items()}) else param
    # Every backward writes a gradient. Every backward but the first, each norm, and the update read
    # it.
    read = states + gradient * (cycles + norms)
    return UnitCost(slots, param, old, read, written + gradient * cycles, trains, for_commit)


@dataclass(frozen=True)
class Traffic:
    """NVMe bytes of one optimizer step in the steady state: for parameters fetched, and for updates
    read and written. If only some steps are committed, each of them writes `commit_written` bytes
    more."""

    fetched: int
    update_read: int
    update_written: int
    commit_written: int = 0

    @property
    def read(self) -> int:
        return self.fetched + self.update_read

    def mean_written(self, steps_per_commit: int) -> float:
        """Bytes that a step writes on average, if one of `steps_per_commit` steps is committed."""
        return self.update_written + self.commit_written / steps_per_commit


class Event(enum.Enum):
    """Something that happens to a unit in a `Walk`."""

    USE = enum.auto()
    """The model uses it."""
    FETCH = enum.auto()
    """It is fetched to a place on the compute device."""
    LAND = enum.auto()
    """It gets a place, which its pending update fills. The update reads the old parameter."""
    READ = enum.auto()
    """Its update reads the old parameter and fills no place."""


Listener = Callable[[Event, int, tuple[int, ...]], None]
"""Called with an event, its unit, and the units evicted for it."""


class Walk:
    """Simulates the runtime in training steps, over a map of slots without time and content.

    A step has `accumulation` cycles of `order`, with `slots` slots for copies. `held[i]` are the
    units that cannot be evicted when `order[i]` comes into use (see `Cycle`); an empty `held` is
    none at all. An update puts its result into the place of the unit. It runs when the unit has a
    place. With `waits` it runs at the latest before the step returns. With `delayed` it runs at any
    time: the walk then counts the most reads possible, as if no place held the parameter, and
    fetches every copy again afterwards. One class, because each use changes all of its counts.
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
        """The state between two steps. Equal states lead to equal steps."""
        return dict(self._copies.runs), set(self._pending)

    def cycles(self, tell: Listener) -> None:
        """Walk the forwards and backwards of a step. `tell` gets every event, in order."""
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
        """Walk the end of a step, where updates are posted and the next forward is prepared. `tell`
        gets every event, in order."""
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
    """The NVMe traffic of one optimizer step in the steady state. The arguments are those of
    `Walk`.

    Walks steps from an empty arena until one does not change the arena, mostly the third, and
    returns the traffic of that step. If unit sizes differ, there may be no such step. Then it
    returns the traffic of step number `MOST_STEPS`.
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
