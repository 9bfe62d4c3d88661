"""The trace: the order in which units are used, recorded as it happens and taken as a prediction of
the next round.

Imports no torch. A *cycle* is one forward of the model with what follows it (its backward, in
training) up to the next forward. The trace predicts, it does not bind: a use that was not predicted
costs a miss. The order that really happened is the prediction for the next cycle of the same phase.

[Note: a cycle that does not end]
A program that calls submodules and never the model, and makes no step, begins no cycle: inference
in parts is one cycle without end. So a use that the cycle before does not know is compared with
what came before it in this one. If the last uses repeat those before them, at least once as a
whole, that *round* is the prediction. It holds until a use comes that the cycle before knows. Of
several rounds that fit, the trace takes the one that has lasted longest. So a program that repeats
itself has no misses after its third time, however its rounds look inside. What was recorded stays
as it is, up to a bound.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice

from infinity.tiers.slots import Clock

LEAST_ROUND, ROUND_PER_UNIT = 64, 8
"""A round that is looked for has at most so many uses for each unit that was used, or
`LEAST_ROUND`."""
LEAST_USES, USES_PER_UNIT = 1 << 14, 64
"""A cycle that has more uses than so many for each unit, or than `LEAST_USES`, is cut: only its
second half stays recorded."""


class Cycle:
    """A recorded order of uses, with fast look-up of the next use of a unit.

    `held[i]` are the units that were in use already, and so could not be evicted, when `order[i]`
    came into use.
    """

    def __init__(self, order: Sequence[int], held: Sequence[frozenset[int]] = ()) -> None:
        self.order, self.held = tuple(order), tuple(held)
        self._at: defaultdict[int, list[int]] = defaultdict(list)
        for position, unit in enumerate(self.order):
            self._at[unit].append(position)

    def distance(self, unit: int, position: int) -> float:
        """Uses from `position` to the next use of `unit`, going round; infinite when it is never
        used.

        Example: order 0 1 2 1 0 and position 2: unit 2 is 0 away, unit 1 is 1 away, unit 0 is 2
        away.
        """
        positions = self._at.get(unit)
        if not positions:
            return math.inf
        index = bisect_left(positions, position)
        return (
            positions[index] - position
            if index < len(positions)
            else positions[0] + len(self.order) - position
        )

    @cached_property
    def first_uses(self) -> list[int]:
        """The units in the order of their first uses."""
        return list(self._at)

    def find(self, unit: int, position: int) -> int | None:
        """The first position from `position` on at which `unit` is used, not going round."""
        positions = self._at.get(unit, [])
        index = bisect_left(positions, position)
        return positions[index] if index < len(positions) else None


class Trace:
    """Records the current cycle and predicts from the last one of the same phase. Used by the
    thread that runs the model.

    Takes memory for as many uses as `USES_PER_UNIT` and `LEAST_USES` say, in each phase.
    """

    def __init__(self) -> None:
        self._cycles: dict[str, Cycle] = {}
        self._phase = ""
        self._recording: list[int] = []
        self._held: list[frozenset[int]] = []
        # Where each unit is in the recording.
        self._at: defaultdict[int, list[int]] = defaultdict(list)
        # The prediction of the phase, while a round is predicted.
        self._interrupted: tuple[Cycle, int] | None = None
        self.predicted = Cycle(())
        self.position = 0
        """Index in `predicted` of the use that is expected next."""
        self._clock = Clock(0, 0)
        # The units of the recording in the order of their first uses; None: to be listed.
        self._first_uses: list[int] | None = None

    def expect(self, phase: str, order: Sequence[int]) -> None:
        """Predict `order` for the first cycle of `phase`, before anything of it is recorded."""
        self._cycles.setdefault(phase, Cycle(order))

    def begin(self, phase: str) -> None:
        """A new cycle starts; what was recorded becomes the prediction of its phase."""
        recorded = (tuple(self._recording), tuple(self._held))
        known = self._cycles.get(self._phase, Cycle(()))
        if self._recording and (known.order, known.held) != recorded:
            self._cycles[self._phase] = Cycle(*recorded)
        self._phase, self._recording, self._held = phase, [], []
        self._at.clear()
        self._first_uses = None
        self._interrupted = None
        self._clock = Clock(self._clock.version + 1, 0)
        self.predicted = self._cycles.get(phase, Cycle(()))
        self.position = 0

    def expect_again(self) -> None:
        """Predict that the cycle that was recorded comes again, from its start. What is used before
        that comes is still recorded as its end."""
        recorded = (tuple(self._recording), tuple(self._held))
        self._interrupted = None
        if (self.predicted.order, self.predicted.held) != recorded:
            self.predicted = Cycle(*recorded)
        elif self.position in (0, len(self.predicted.order)):
            return
        self._clock, self.position = Clock(self._clock.version + 1, 0), 0

    @property
    def clock(self) -> Clock:
        """When it is in the prediction: of the same version as long as all uses come as
        predicted."""
        return self._clock

    @property
    def left(self) -> int:
        """How many uses this cycle will still have, as far as it is predicted."""
        return len(self.predicted.order) - self.position

    @property
    def current(self) -> int | None:
        """The unit of the last use in this cycle."""
        return self._recording[-1] if self._recording else None

    def use(self, unit: int, held: frozenset[int] = frozenset()) -> bool:
        """`unit` is used now, beside the units in `held`, whose uses have not ended yet.

        Returns whether that was predicted. Uses of the same unit one after the other count once.
        """
        if self._recording and self._recording[-1] == unit:
            return True
        self._record(unit, held)
        predicted, position = self.predicted, self.position
        known = self._follow(unit)
        version, time = self._clock
        if self.predicted is predicted and self.position == position:
            return known  # and so the prediction is what it was
        passed = (self.position - position) % max(len(predicted.order), 1)
        as_predicted = self.predicted is predicted and passed == 1
        self._clock = Clock(version, time + 1) if as_predicted else Clock(version + 1, 0)
        return known

    def _follow(self, unit: int) -> bool:
        """Move the prediction on to what comes after this use of `unit`; see `use`."""
        if self._interrupted is not None and not self._use_in_round(unit):
            self._find_round()
            return False
        if self._interrupted is not None:
            return True
        found = self.predicted.find(unit, self.position)
        if found is None:
            self._find_round()
            return False
        expected = self.position
        self.position = found + 1
        return found == expected

    def _use_in_round(self, unit: int) -> bool:
        """While a round is predicted: take `unit` out of it, or go back to the cycle that it
        interrupted. False where neither knows it next."""
        if self._interrupted is None:
            raise RuntimeError("no round is predicted")
        order = self.predicted.order
        if order[self.position] == unit:
            self.position = (self.position + 1) % len(order)
            return True
        cycle, position = self._interrupted
        if cycle.find(unit, position) is not None:
            self.predicted, self.position, self._interrupted = cycle, position, None
            return True
        ahead = self.predicted.distance(unit, self.position)
        if ahead < math.inf:
            self.position = (self.position + int(ahead) + 1) % len(order)
        return False

    def _record(self, unit: int, held: frozenset[int]) -> None:
        self._recording.append(unit)
        self._held.append(held)
        if unit not in self._at:
            self._first_uses = None
        self._at[unit].append(len(self._recording) - 1)
        if len(self._recording) > max(LEAST_USES, USES_PER_UNIT * len(self._at)):
            half = len(self._recording) // 2
            del self._recording[:half], self._held[:half]
            self._at.clear()
            self._first_uses = None
            for position, used in enumerate(self._recording):
                self._at[used].append(position)

    def _find_round(self) -> None:
        """Predict that the last uses come again, where they have come before. See [Note: a cycle
        that does not end]."""
        recording, last = self._recording, len(self._recording) - 1
        longest = max(LEAST_ROUND, ROUND_PER_UNIT * len(self._at))
        best, length = 0, 0
        for before in islice(reversed(self._at[recording[last]]), 1, None):
            distance = last - before
            if distance > longest:
                break
            same = self._alike(distance, 3 * longest)
            if same >= distance and same > best:
                best, length = same, distance
        if length:
            if self._interrupted is None:
                self._interrupted = self.predicted, self.position
            self.predicted, self.position = Cycle(recording[-length:], self._held[-length:]), 0

    def _alike(self, distance: int, most: int) -> int:
        """How many of the last uses are the same as `distance` uses before; at most `most`."""
        recording, count = self._recording, 0
        while (
            count < most
            and count + distance < len(recording)
            and recording[-1 - count] == recording[-1 - count - distance]
        ):
            count += 1
        return count

    def next_use(self, unit: int) -> float:
        """How many uses away the next use of `unit` is, as far as is known; infinite when it is not
        known."""
        return self.predicted.distance(unit, self.position)

    def upcoming(self, start: int = 0) -> Iterator[tuple[int, float]]:
        """Each unit that will be used, with its distance, soonest first, at most one cycle ahead;
        from `start` uses on those that are used there, be it again."""
        order, seen = self.predicted.order, set()
        for ahead in range(start, len(order)):
            unit = order[(self.position + ahead) % len(order)]
            if unit not in seen:
                seen.add(unit)
                yield unit, ahead

    def train_cycle(self) -> Cycle:
        """The last training cycle, as far as it was recorded."""
        return self.last_cycle("train")

    def last_cycle(self, phase: str) -> Cycle:
        """The last cycle of `phase`, as far as it was recorded."""
        return (
            Cycle(self._recording, self._held)
            if self._phase == phase
            else self._cycles.get(phase, Cycle(()))
        )

    def first_uses(self) -> Sequence[int]:
        """The units in the order in which a training forward first uses them, as far as is known;
        the same object until that changes."""
        if self._phase != "train":
            return self.last_cycle("train").first_uses
        if self._first_uses is None:
            self._first_uses = list(self._at)
        return self._first_uses
