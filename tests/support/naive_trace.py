"""The trace in the plainest code, which tests hold beside `infinity.schedule.trace`."""

from __future__ import annotations

import math


class NaiveTrace:
    """What `Trace` knows, in lists that are scanned from the start every time."""

    def __init__(self) -> None:
        self.past: dict[str, list[int]] = {}
        self.phase, self.recording, self.predicted = "", [], []
        self.position, self.misses = 0, 0
        self.round: list[int] = []
        self.place = 0  # in the round

    def begin(self, phase: str) -> None:
        if self.recording:
            self.past[self.phase] = self.recording
        self.phase, self.recording, self.round = phase, [], []
        self.predicted, self.position = self.past.get(phase, []), 0

    def use(self, unit: int) -> None:
        if self.recording[-1:] == [unit]:
            return
        self.recording.append(unit)
        rest = self.predicted[self.position :]
        if self.round and self.round[self.place] == unit:
            self.place = (self.place + 1) % len(self.round)
        elif unit in rest:
            skipped = rest.index(unit)
            self.misses += skipped > 0
            self.position += skipped + 1
            self.round = []
        else:
            self.misses += 1
            if unit in self.round:
                ahead = (self.round[self.place :] + self.round).index(unit)
                self.place = (self.place + ahead + 1) % len(self.round)
            self.find_round()

    def find_round(self) -> None:
        """The length of which the longest tail of the recording is the same as what came so much
        before it."""
        best = 0
        for length in range(1, len(self.recording) // 2 + 1):
            pairs = zip(reversed(self.recording), reversed(self.recording[:-length]), strict=False)
            same = next(
                (n for n, (a, b) in enumerate(pairs) if a != b), len(self.recording) - length
            )
            if same >= length and same > best:
                best, self.round, self.place = same, self.recording[-length:], 0

    def future(self) -> list[tuple[int, int]]:
        """What is expected up to the same place of the next round."""
        order, place = (self.round, self.place) if self.round else (self.predicted, self.position)
        return [(unit, ahead) for ahead, unit in enumerate(order[place:] + order[:place])]

    def upcoming(self) -> list[tuple[int, int]]:
        found: dict[int, int] = {}
        for unit, ahead in self.future():
            found.setdefault(unit, ahead)
        return list(found.items())

    def next_use(self, unit: int) -> float:
        return dict(self.upcoming()).get(unit, math.inf)
