"""What tests ask of an engine beyond its public interface."""

from __future__ import annotations

import infinity
from infinity.placement.spec import Kind


def come_to_rest(engine: infinity.Engine) -> None:
    """Wait for all I/O that the engine does without the next forward; `drain` would make it do more."""
    pipeline = engine._updater._pipeline
    queue = pipeline.jobs
    with queue.changed:
        assert queue.changed.wait_for(
            lambda: not queue.has_work(pipeline._may_hold()) and not any(job.in_flight for job in queue.jobs)
        )
    for unit in engine.units:
        fetch = unit.blocks[Kind.PARAM].copy.fetch
        if fetch is not None:
            fetch.await_end()
    for io in engine.ios:
        io.drain()
