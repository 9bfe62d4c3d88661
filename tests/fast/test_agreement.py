"""What ranks tell each other of their records: here all of them are in one process."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from infinity.device import ComputeDevice
from infinity.durable import agreement
from infinity.durable.agreement import Agreement
from infinity.durable.states import NO_RECORD, RecordKey
from infinity.errors import EngineClosedError, InfinityError
from infinity.tiers.latch import Latch

Make = Callable[..., Agreement]


class Notes(dist.HashStore):  # type: ignore[misc]
    """The store; with `gone` the process that held it has ended."""

    gone = False

    def add(self, key: str, amount: int) -> int:
        if self.gone:
            raise dist.DistNetworkError("Connection reset by peer")
        return int(super().add(key, amount))


@pytest.fixture(name="store")
def _store(monkeypatch: pytest.MonkeyPatch) -> Notes:
    store = Notes()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(distributed_c10d, "PrefixStore", lambda name, inner: inner)
    return store


@pytest.fixture(name="latches")
def _latches() -> Iterator[list[Latch]]:
    device = ComputeDevice("cpu")
    yield [Latch(threading.Condition(), device) for _ in range(3)]
    device.close()


@pytest.fixture(name="make")
def _make(store: Notes, latches: list[Latch]) -> Make:
    def make(
        rank: int, ranks: int = 2, last: RecordKey = NO_RECORD, timeout: float = 0.0
    ) -> Agreement:
        return Agreement(rank, range(ranks), "a run", last, timeout, latches[rank])

    return make


def of(sequence: int, step: int, writes: int = 0, closed: str = "") -> RecordKey:
    return RecordKey(sequence, step, writes, closed)


def at_once(waited: float) -> bool:
    return True


def never(waited: float) -> bool:
    return False


def test_all_have_a_record_when_the_last_one_has_made_it(make: Make) -> None:
    first, second, third = (make(rank, 3) for rank in range(3))
    assert not second.is_awaited(of(1, 0))
    assert not first.reach(of(1, 0), at_once)
    assert second.is_awaited(of(1, 0)) and not second.is_awaited(of(1, 1))
    assert not second.reach(of(1, 0), at_once)
    assert third.reach(of(1, 0), never)


def test_a_resumed_run_counts_on(make: Make) -> None:
    first, second = (make(rank, last=of(7, 4)) for rank in range(2))
    assert not first.reach(of(8, 5), at_once)
    assert second.is_awaited(of(8, 5))
    assert second.reach(of(8, 5), never)


def test_what_is_behind_all_is_forgotten(make: Make, store: Notes) -> None:
    ranks = [make(rank, timeout=math.inf) for rank in range(2)]
    counts = []
    for number in range(1, 9):
        work = [
            threading.Thread(target=each.reach, args=(of(number, number), never)) for each in ranks
        ]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
        counts.append(store.num_keys())
    assert counts[-1] == counts[2]


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (
            lambda rank: rank.reach(of(1, 4), at_once),
            "record 1 of rank 1 is of step 4, and record 1 of",
        ),
        (
            lambda rank: rank.reach(of(1, 0, writes=2), at_once),
            "record 1 of rank 1 is of step 0 and 2 writes after it, and record 1 of rank 0 of step",
        ),
        (
            lambda rank: rank.reach(of(1, 0, closed="by then"), at_once),
            "rank 1 does not commit step 0: its engine was closed at an earlier or later place",
        ),
        (lambda rank: rank.end(), "rank 1 does not commit step 0: its engine was closed"),
        (lambda rank: None, r"waited \d+ s for the others to commit step 0; rank 1 has step 0"),
    ],
)
def test_a_wait_in_vain_ends_with_the_reason(
    other: Callable[[Agreement], Any], match: str, make: Make
) -> None:
    first, second = make(0), make(1)
    other(second)
    with pytest.raises(InfinityError, match=match):
        first.reach(of(1, 0), never)


def test_a_failure_on_either_side_ends_it(make: Make, latches: list[Latch]) -> None:
    first, second = make(0, timeout=math.inf), make(1, timeout=math.inf)
    first.pause = 0.0
    latches[1].fail(OSError("no space is left"), "a commit")
    with pytest.raises(InfinityError, match=r"rank 1 does not commit step 0: .* no space"):
        first.reach(of(1, 0), never)
    with pytest.raises(EngineClosedError, match="no space is left"):
        second.reach(of(1, 1), never)


def test_what_was_said_last_of_an_end_stays(make: Make) -> None:
    """A rank that has a record is in no wait for it, whatever became of it since."""
    first, second = make(0), make(1)
    assert not second.reach(of(1, 0), at_once)
    second.end()
    assert first.reach(of(1, 0), never)
    with pytest.raises(InfinityError, match="rank 1 does not commit step 1"):
        first.reach(of(2, 1), never)


def test_a_store_that_is_gone(make: Make, store: Notes) -> None:
    first, second = make(0), make(1)
    second.end()
    store.gone = True
    with pytest.raises(InfinityError, match=r"rank 0 cannot ask the others .*Connection reset"):
        first.reach(of(1, 0), never)


def test_who_waits_looks_less_and_less_often(
    make: Make, store: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(agreement.time, "sleep", pauses.append)
    first = make(0, timeout=math.inf)
    assert not first.reach(of(1, 0), lambda waited: len(pauses) == 20)
    assert pauses == sorted(pauses) and pauses[-1] == 0.05


def test_who_refuses_is_named_on_all_ranks(make: Make) -> None:
    ranks = [make(rank, 3) for rank in range(3)]
    meeting = threading.Barrier(3)

    def ask(reasons: list[str]) -> list[str]:
        said = [""] * 3

        def work(rank: int) -> None:
            def meet(refuses: bool) -> bool:
                meeting.wait()
                return any(reasons)

            said[rank] = ranks[rank].refusals(reasons[rank], meet)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return said

    assert ask(["", "", ""]) == [""] * 3
    assert ask(["", "it is gone", ""]) == ["rank 1 refuses it: it is gone"] * 3
    two = "rank 0 refuses it: no room; rank 2 refuses it: it is late"
    assert ask(["no room", "", "it is late"]) == [two] * 3
    assert ask(["", "", ""]) == [""] * 3


def test_a_refusal_without_a_store_names_nobody(make: Make, store: Notes) -> None:
    store.gone = True
    store.set = lambda *values: 1 / 0  # type: ignore[method-assign]
    said = [make(0).refusals("it is gone", lambda refuses: True)]
    said.append(make(1).refusals("", lambda refuses: True))
    assert said == ["another rank refuses it"] * 2
