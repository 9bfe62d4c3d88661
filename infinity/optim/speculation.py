"""Updates that begin before their step, on the guess that the step clips nothing, and reads ahead
for them.

[Note: exact although speculative]
As soon as a unit has as many gradients as in the last step, its update may begin. It guesses that
these are all gradients, that nothing will be clipped, and that the hyper-parameters stay. (With
`clip="previous"` and `clip="unit"` the optimizer knows the factor by then.) The step keeps the
update if it asks for the same update, term for term. If not, the update is rolled back and redone.
So updates hide behind the backward, too, with the numbers of an update that waited.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from infinity.optim.job import Job, UnitUpdate
from infinity.optim.job_queue import JobQueue
from infinity.optim.owners import Owner
from infinity.placement.spec import Kind
from infinity.schedule.trace import Trace
from infinity.sharding.gradients import GradientState
from infinity.sharding.unit import Unit
from infinity.tiers.store import Store

UNITS_AHEAD = 2
"""The number of units whose states are read before their gradients come."""

Places = Mapping[Unit, int]
"""The position of each unit in the next forward, or in the next backward."""


class UnitOrder:
    """Where each of `units` comes in the next forward or backward, as `trace` expects it."""

    def __init__(self, trace: Trace, units: Sequence[Unit]) -> None:
        self._trace, self._units = trace, units
        # The last answer, of which order, and whether backwards.
        self._last: tuple[Sequence[int], bool, Places] | None = None

    def places(self, backwards: bool = False) -> Places:
        """The place of each unit in the next forward, or in the next backward. Units of which that
        is not known come last."""
        order = self._trace.first_uses()
        if self._last is not None and self._last[0] is order and self._last[1] is backwards:
            return self._last[2]
        found = {
            index: position
            for position, index in enumerate(reversed(order) if backwards else order)
        }
        places = {unit: found.get(unit.index, len(found) + unit.index) for unit in self._units}
        self._last = order, backwards, places
        return places


class Policy:
    """Decides when updates begin and when the model sees them, by `Tuning.update`: "plain",
    "speculative", "delayed" or "auto". With "auto", the updates of the next step may begin in its
    backward, before it is known whether the step is clipped. That may change with every step.

    The numbers are the same either way. A speculative update hides behind forward and backward
    instead of the forward alone. So "auto" speculates while an update takes longer than a forward,
    and if the factor of every step is known in its backward. An update that is rolled back moves
    its bytes twice. After a step with such an update, the next 1, 2, 4, ... 64 steps without
    clipping do not speculate: twice as many each time, half as many after each right guess.
    """

    def __init__(self, mode: str, delayed_after: float = math.inf) -> None:
        self._delayed_after = delayed_after if mode == "delayed" else math.inf
        self.waits = mode == "plain"
        """Whether a step returns only when its updates have ended."""
        self.speculates = mode == "speculative"
        """Whether the updates of the next step begin in its backward."""
        self._auto = mode == "auto"
        self._pause, self._penalty = 0, 1

    @property
    def ever_delays(self) -> bool:
        """Whether the model sees any step one step late."""
        return self._delayed_after < math.inf

    def delays(self, number: int) -> bool:
        """Whether the model sees step `number`, counted from 0, one step late."""
        return number >= self._delayed_after

    def learn(
        self, update_seconds: float, forward_seconds: float, held: bool, foreseen: bool = False
    ) -> None:
        """A step was fixed. `update_seconds`: seconds that updates kept the pipeline busy since the
        last step. `forward_seconds`: seconds of one forward. `held`: no update was rolled back, and
        no clipping came unforeseen. `foreseen`: the clip factor was known before the step."""
        if not self._auto:
            return
        if held:
            self._pause = max(self._pause - 1, 0)
            self._penalty = max(self._penalty // 2, 1) if self.speculates else self._penalty
        elif self.speculates:
            self._pause, self._penalty = self._penalty, min(self._penalty * 2, 64)
        else:
            self._pause = max(self._pause, 1)
        self.speculates = self._pause == 0 and (foreseen or update_seconds > forward_seconds)


class Speculation:
    """The jobs that were begun before their step. Used by the thread that runs the model; the
    thread that closes the engine may call `rollback`, too."""

    def __init__(self, store: Store, queue: JobQueue, policy: Policy) -> None:
        self._store = store
        self._queue = queue
        self.policy = policy
        self.jobs: dict[Unit, Job] = {}
        """Jobs that began or whose states are read ahead, and that no step has claimed yet."""
        self._rolled_back: list[Job] = []
        self._order: list[Unit] = []  # the order in which gradients became final, in the last step
        self._turns: dict[Unit, int] = {}  # of each of them
        self._final: dict[Unit, None] = {}  # units with final gradients in this step, in order

    def begin(self, unit: Unit, owner: Owner, places: Places, number: int) -> None:
        """The gradients of `unit` may be final. Begin the update that `owner` expects of step
        `number`, if the policy speculates and the update can be rolled back. Read ahead for the
        next units."""
        begun = self.jobs.get(unit)
        if begun is not None and (begun.is_rolled_back or self._is_late(begun, number)):
            self.rollback(unit)
        may_begin = self.policy.speculates and unit.states.has_shadow
        segments = owner.ahead(unit) if may_begin else None
        if segments is not None:
            job = self.jobs.setdefault(unit, Job(unit, places[unit], number))
            self._queue.speculate(job, UnitUpdate(unit, segments))
        self._final[unit] = None
        turn = self._turns.get(unit, len(self._order) - 1) + 1
        for following in self._order[turn : turn + UNITS_AHEAD]:
            # A step without speculation reads ahead only for the first unit of the next forward.
            if self.policy.speculates or places[following] == 0:
                self.read_ahead(following, places, number)

    def comes_first(self, unit: Unit) -> bool:
        """Whether the gradients of `unit` will be among the first to come, so that a forward may
        read ahead for it."""
        return self.policy.speculates and unit in self._order[:UNITS_AHEAD]

    def read_ahead(self, unit: Unit, places: Places, number: int) -> None:
        """Read the states of `unit`, whose gradients for step `number` are still to come, if
        staging has room."""
        if (
            self._store.staging.is_needed(unit.blocks[Kind.GRAD])
            or unit.gradients.state is GradientState.SPENT
        ):
            return
        if unit not in self.jobs and unit not in self._final:
            job = self.jobs[unit] = Job(unit, places[unit], number)
            self._queue.expect(job)

    def rollback(self, unit: Unit) -> None:
        """Roll back the job of `unit`, if there is one. Returns when none of its chunks is in
        flight."""
        job = self.jobs.get(unit)
        if job is not None:
            self._queue.rollback(job)  # an interrupt leaves it where it is, to be waited for again
            self._store.resident.rollback(unit.blocks[Kind.PARAM])
            if self.jobs.pop(unit, None) is not None:  # else `close` did, on another thread
                self._rolled_back.append(job)

    def _is_late(self, job: Job, number: int) -> bool:
        """Whether a job is of a step before `number` and would write to another extent."""
        return self._store.has_spares and job.number != number

    def claim(self, update: UnitUpdate, place: int, number: int) -> Job:
        """The job that makes `update`, of step `number`, which is being fixed.

        It is the job that was begun for the unit, if that makes the same update, term for term.
        Otherwise that job is rolled back, and this one is new.
        """
        begun = self.jobs.get(update.unit)
        if begun is not None and (
            begun.is_rolled_back
            or begun.update not in (None, update)
            or self._is_late(begun, number)
        ):
            self.rollback(update.unit)
        return self.jobs.pop(update.unit, None) or Job(update.unit, place, number)

    def end_step(self) -> tuple[Job, ...]:
        """A step was fixed. Returns the jobs that were rolled back before it."""
        rolled_back = tuple(self._rolled_back)
        self._rolled_back.clear()
        self._order = list(self._final)
        self._turns = {unit: turn for turn, unit in enumerate(self._order)}
        self._final = {}
        return rolled_back
