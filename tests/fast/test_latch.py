"""The latch: the first failure is kept, and told once to everybody who listens."""

from __future__ import annotations

import threading

from infinity.device import ComputeDevice
from infinity.errors import EngineClosedError
from infinity.tiers.latch import Latch


def test_all_who_listen_are_told_of_the_first_failure_once():
    latch = Latch(threading.Condition(), ComputeDevice("cpu"))
    told: list[tuple[str, str]] = []

    def fails(error: EngineClosedError) -> None:
        told.append(("fails", str(error)))
        raise RuntimeError("nobody there")

    def listens(error: EngineClosedError) -> None:
        told.append(("listens", str(error)))

    def left(error: EngineClosedError) -> None:
        told.append(("left", str(error)))

    for listener in (fails, listens, left):
        latch.add_listener(listener)
    latch.remove_listener(left)
    latch.remove_listener(left)
    for number in range(2):
        latch.fail(OSError(f"failure {number}"), "a fetch")
    text = "a fetch failed and the engine cannot go on: failure 0"
    assert told == [("fails", text), ("listens", text)]
