"""A trace that counts the uses that it had not predicted."""

from __future__ import annotations

from infinity.schedule.trace import Trace


class CountingTrace(Trace):
    """`misses` are all uses of a first cycle, or those until it repeats itself."""

    def __init__(self) -> None:
        super().__init__()
        self.misses = 0

    def use(self, unit: int, held: frozenset[int] = frozenset()) -> bool:
        predicted = super().use(unit, held)
        self.misses += not predicted
        return predicted
