"""The trace records the order in which units are used, and predicts that it repeats. Imports no
torch.

A *cycle* is one forward of the model, with everything up to the next forward (the backward, in
training). The recorded order is the prediction for the next cycle of the same phase. A use that was
not predicted costs only a miss.

[Note: a cycle that does not end]
A program that calls submodules, never the model, and makes no step begins no new cycle: inference
in parts is one endless cycle. So if the rest of the predicted cycle does not contain a use, the
trace searches the uses recorded so far. If the last uses repeat the uses before them, at least once
in full, this *round* becomes the prediction. It ends with a use that the round does not expect and
the rest of the cycle contains. Of several such rounds, the trace takes the round that has repeated
longest. So a program that repeats itself has no misses after its third round. The recording stays
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
"""A round has at most `ROUND_PER_UNIT` uses per unit, or `LEAST_ROUND` if that is more."""
LEAST_USES, USES_PER_UNIT = 1 << 14, 64
"""A cycle has at most `USES_PER_UNIT` uses per unit, or `LEAST_USES` if that is more. The recording
of a longer cycle loses its first half."""


class Cycle:
    """A recorded order of uses, with fast look-up of the next use of a unit.

    `held[i]` are the units that were already in use when `order[i]` came into use, and so could not
    be evicted.
    """

    def __init__(self, order: Sequence[int], held: Sequence[frozenset[int]] = ()) -> None:
        self.order, self.held = tuple(order), tuple(held)
        self._at: defaultdict[int, list[int]] = defaultdict(list)
        for position, unit in enumerate(self.order):
            self._at[unit].append(position)

    def distance(self, unit: int, position: int) -> float:
        """Uses from `position` to the next use of `unit`, around the end; infinite if the order
        does not contain it.

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
        """The first position, `position` or later, at which `unit` is used. Not around the end."""
        positions = self._at.get(unit, [])
        index = bisect_left(positions, position)
        return positions[index] if index < len(positions) else None


class Trace:
    """Records the current cycle, and predicts it from the last cycle of the same phase. The thread
    that runs the model uses it.

    `USES_PER_UNIT` and `LEAST_USES` bound its memory for each phase.
    """

    def __init__(self) -> None:
        self._cycles: dict[str, Cycle] = {}
        self._phase = ""
        self._recording: list[int] = []
        self._held: list[frozenset[int]] = []
        # The positions of each unit in the recording.
        self._at: defaultdict[int, list[int]] = defaultdict(list)
        # While a round is predicted: the cycle that the phase predicts, and the position in it.
        self._interrupted: tuple[Cycle, int] | None = None
        self.predicted = Cycle(())
        self.position = 0
        """Index in `predicted` of the use expected next."""
        self._clock = Clock(0, 0)
        # The units of the recording in the order of their first uses; None: not listed yet.
        self._first_uses: list[int] | None = None

    def expect(self, phase: str, order: Sequence[int]) -> None:
        """Predict `order` for the first cycle of `phase`. Does nothing if the phase has a
        prediction."""
        self._cycles.setdefault(phase, Cycle(order))

    def begin(self, phase: str) -> None:
        """Start a cycle of `phase`, "train" or "eval". The recording becomes the prediction of its
        own phase."""
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
        """Predict that the recorded cycle repeats from its start. Uses before the next `begin` are
        still recorded as its end."""
        recorded = (tuple(self._recording), tuple(self._held))
        self._interrupted = None
        if (self.predicted.order, self.predicted.held) != recorded:
            self.predicted = Cycle(*recorded)
        elif self.position in (0, len(self.predicted.order)):
            return
        self._clock, self.position = Clock(self._clock.version + 1, 0), 0

    @property
    def clock(self) -> Clock:
        """The time in the prediction. The version stays the same while all uses come as
        predicted."""
        return self._clock

    @property
    def left(self) -> int:
        """The number of predicted uses that remain in this cycle."""
        return len(self.predicted.order) - self.position

    @property
    def current(self) -> int | None:
        """The unit of the last use in this cycle; None before the first."""
        return self._recording[-1] if self._recording else None

    def use(self, unit: int, held: frozenset[int] = frozenset()) -> bool:
        """Record a use of `unit`, while the uses of the units in `held` have not ended.

        Returns whether it was predicted. Consecutive uses of one unit count once.
        """
        if self._recording and self._recording[-1] == unit:
            return True
        self._record(unit, held)
        predicted, position = self.predicted, self.position
        known = self._follow(unit)
        version, time = self._clock
        if self.predicted is predicted and self.position == position:
            return known  # the prediction has not changed
        passed = (self.position - position) % max(len(predicted.order), 1)
        as_predicted = self.predicted is predicted and passed == 1
        self._clock = Clock(version, time + 1) if as_predicted else Clock(version + 1, 0)
        return known

    def _follow(self, unit: int) -> bool:
        """Advance the prediction past this use of `unit`. Returns whether it was expected next."""
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
        """While a round is predicted: advance it past `unit`, or return to the interrupted cycle if
        that contains `unit`. False if `unit` is neither next in the round nor in that cycle."""
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
        """Predict that the last uses repeat, if they have repeated before. See [Note: a cycle that
        does not end]."""
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
        """The number of last uses, at most `most`, that equal the uses `distance` before them."""
        recording, count = self._recording, 0
        while (
            count < most
            and count + distance < len(recording)
            and recording[-1 - count] == recording[-1 - count - distance]
        ):
            count += 1
        return count

    def next_use(self, unit: int) -> float:
        """The predicted number of uses until the next use of `unit`; infinite without a
        prediction."""
        return self.predicted.distance(unit, self.position)

    def upcoming(self, start: int = 0) -> Iterator[tuple[int, float]]:
        """Each unit used from `start` uses ahead to the end of one cycle, with the distance of its
        first use there, soonest first."""
        order, seen = self.predicted.order, set()
        for ahead in range(start, len(order)):
            unit = order[(self.position + ahead) % len(order)]
            if unit not in seen:
                seen.add(unit)
                yield unit, ahead

    def last_cycle(self, phase: str) -> Cycle:
        """The last cycle of `phase`, as recorded so far; empty before the first."""
        return (
            Cycle(self._recording, self._held)
            if self._phase == phase
            else self._cycles.get(phase, Cycle(()))
        )

    def first_uses(self) -> Sequence[int]:
        """The units in the order of their first uses in the last training cycle. The same object
        until that order changes."""
        if self._phase != "train":
            return self.last_cycle("train").first_uses
        if self._first_uses is None:
            self._first_uses = list(self._at)
        return self._first_uses
