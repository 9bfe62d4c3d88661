"""The recorder keeps what happened, from any thread, in bounded memory."""

from __future__ import annotations

import threading
import time

import pytest

from infinity import observe
from infinity.observe import Recorder, Span


def test_spans_are_kept_in_order_and_summed_by_lane_and_name() -> None:
    recorder = Recorder()
    recorder.add("adam", "block.0", 1.0, 1.5)
    recorder.add("adam", "block.1", 1.5, 1.75)
    recorder.add("adam", "block.0", 2.0, 2.25)
    recorder.add("compute", "block.0", 0.0, 9.0)
    assert recorder.spans()[0] == Span("adam", "block.0", 1.0, 1.5)
    assert [span.name for span in recorder.spans()] == ["block.0", "block.1", "block.0", "block.0"]
    assert recorder.seconds("adam") == {"block.0": 0.75, "block.1": 0.25}
    assert recorder.seconds("nvme read") == {}


def test_a_span_is_recorded_when_its_body_fails() -> None:
    recorder = Recorder()
    before = time.perf_counter()
    with pytest.raises(OSError, match="gone"), recorder.span("nvme read", "block.0"):
        raise OSError("gone")
    (span,) = recorder.spans()
    assert (span.lane, span.name) == ("nvme read", "block.0")
    assert before <= span.start <= span.end <= time.perf_counter()


def test_what_is_returned_is_a_copy() -> None:
    recorder = Recorder()
    recorder.count("bytes", 3)
    recorder.add("adam", "block.0", 0.0, 1.0)
    recorder.counters()["bytes"] = 0
    recorder.spans().clear()
    recorder.seconds("adam").clear()
    assert recorder.counters() == {"bytes": 3}
    assert len(recorder.spans()) == 1
    assert recorder.seconds("adam") == {"block.0": 1.0}


def test_counters_from_many_threads_lose_nothing() -> None:
    recorder = Recorder()

    def work(index: int) -> None:
        for _ in range(2000):
            recorder.count("events")
            recorder.count(f"thread {index}", 2)
            recorder.add("adam", "block", 0.0, 0.5)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.counters() == {
        "events": 8000,
        **{f"thread {index}": 4000 for index in range(4)},
    }
    assert recorder.seconds("adam") == {"block": 4000.0}


def test_the_oldest_spans_are_dropped_but_their_time_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(observe, "MOST_SPANS", 10)
    recorder = Recorder()
    for index in range(25):
        recorder.add("adam", f"block.{index % 2}", float(index), index + 1.0)
    assert [span.start for span in recorder.spans()] == [float(index) for index in range(15, 25)]
    assert recorder.seconds("adam") == {"block.0": 13.0, "block.1": 12.0}
