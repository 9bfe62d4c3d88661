"""What tests ask of an engine beyond its public interface; the one file of the tests that reads its
private names."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import infinity
from infinity.nvme import functions
from infinity.placement.spec import Kind


def shared_io() -> Any:
    """The native I/O engine of the functions of `infinity.nvme`."""
    return functions._shared.get().engine


class Probe:
    """Questions about an engine, and the parts that a test drives by hand. It keeps
    nothing; its last section ends what is under way."""

    def __init__(self, engine: infinity.Engine) -> None:
        self.engine = engine

    # Parts

    @property
    def device(self) -> Any:
        """The compute device: its meter `copied`, and the hooks of `DiscreteDevice`."""
        return self.engine._device

    @property
    def store(self) -> Any:
        return self.engine._store

    @property
    def activations(self) -> Any:
        """The tier of activations."""
        return self.engine._store.activations

    @property
    def nvme(self) -> Any:
        """The tier on NVMe."""
        return self.engine._store.nvme

    @property
    def runtime(self) -> Any:
        return self.engine._runtime

    @property
    def trace(self) -> Any:
        return self.engine._runtime.trace

    @property
    def committer(self) -> Any:
        """What commits steps."""
        return self.engine._durability._committer

    @property
    def exchange(self) -> Any:
        """What runs collectives; None for one rank."""
        return self.engine._exchange

    @property
    def seconds_of_groups(self) -> float:
        """After how long torch's own call of a collective fails."""
        (group,) = self.exchange.ranks.groups()
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        return float(timeout.total_seconds())

    @property
    def exchange_thread(self) -> threading.Thread:
        return self.engine._exchange._thread

    @property
    def executions(self) -> Any:
        return self.engine._executions

    @property
    def updater(self) -> Any:
        return self.engine._updater

    @property
    def pipeline(self) -> Any:
        """The thread that updates."""
        return self.engine._updater._pipeline

    @property
    def norm_kernels(self) -> Any:
        return self.engine._updater.norm._kernels

    # Memory

    @property
    def staged_sets(self) -> int:
        """How many sets of staging slots there are."""
        return self.engine._store.layout.rooms.host.staged_sets

    @property
    def staging_bytes(self) -> int:
        return self.engine._store._arenas.staging.memory.numel()

    @property
    def chunk_elements(self) -> int:
        return self.engine._store.layout.rooms.host.chunk_elements

    def used(self, tier: str) -> int:
        """Bytes of the arena of `tier` that are leased."""
        return getattr(self.engine._store._arenas, tier).used

    def memory(self, tier: str) -> torch.Tensor:
        """All bytes of the arena of `tier`."""
        return getattr(self.engine._store._arenas, tier).memory

    @property
    def gradient_buffer(self) -> Any:
        """The buffer of gradients that wait for a sum; None where none is needed."""
        return self.engine._executions._buffer

    @property
    def gradient_buffer_bytes(self) -> int:
        return self.engine._executions._buffer._memory.numel()

    @property
    def gradient_buffer_free(self) -> Any:
        """The places of the buffer that are free."""
        return self.engine._executions._buffer._free

    # What has happened

    @property
    def gpu_direct(self) -> bool:
        """Whether a drive writes into the memory of the device."""
        return bool(self.engine._store.nvme.direct)

    @property
    def failed(self) -> bool:
        """Whether the latch has closed the engine."""
        return self.engine._store.latch.failed

    @property
    def accumulation(self) -> int:
        """How many micro-batches the runtime has seen since the last step."""
        return self.engine._runtime.accumulation

    @property
    def jobs(self) -> Any:
        """The queue of the updater's jobs."""
        return self.engine._updater._pipeline.jobs

    @property
    def speculative_jobs(self) -> dict[Any, Any]:
        """The jobs that began in backward, by unit."""
        return self.engine._updater.speculation.jobs

    @property
    def speculative_order(self) -> Any:
        """The units, in the order in which speculation takes them."""
        return self.engine._updater.speculation._order

    @property
    def last_step(self) -> Any:
        """What became of the last step (`optim.step.StepRun`)."""
        return self.engine._updater.last

    @property
    def last_traffic(self) -> tuple[int, int]:
        """NVMe bytes that the last whole step read and wrote."""
        return self.engine._reporter.meter.traffic

    # What ends what is under way

    def await_jobs(self, condition: Callable[[], bool], timeout: float | None = None) -> None:
        """Wait until `condition`, which the updater's jobs make true."""
        changed = self.jobs.changed
        with changed:
            assert changed.wait_for(condition, timeout)

    def await_failure(self) -> None:
        """Wait until the latch has closed the engine."""
        changed = self.engine._store._changed
        with changed:
            assert changed.wait_for(lambda: self.failed)

    def staging_left(self) -> int:
        """Bytes of staging slots that the updater did not give back after a failure, which it tells
        before its thread ends."""
        self.await_failure()
        self.pipeline._thread.join()
        return self.engine._store._arenas.staging.used

    def rest(self) -> None:
        """Wait for the collectives that were begun ahead."""
        self.engine._checkpoints._rest()

    def end_interrupted(self) -> None:
        """Forget executions that were cut off, as the next forward does."""
        self.engine._executions.end_interrupted()

    def finalize(self) -> None:
        """End as when the model is collected."""
        self.engine._finalizer()

    def come_to_rest(self) -> None:
        """Wait for all I/O that the engine does without the next forward; `drain` would make it do
        more."""
        pipeline, queue = self.pipeline, self.jobs
        self.await_jobs(
            lambda: (
                not queue.chunks._table.has_next(pipeline._may_hold())
                and not any(job.in_flight for job in queue.jobs)
            )
        )
        for unit in self.engine.units:
            fetch = unit.blocks[Kind.PARAM].copy.fetch
            if fetch is not None:
                fetch.await_end()
        for io in self.engine.ios:
            io.drain()


def assert_unused(model: nn.Module) -> None:
    """No unit of `model` is in use: the model holds none of its data."""
    for unit in infinity.engine(model).units:
        assert unit.data.state.name == "SHARDED", unit.facts.name
        assert all(block.copy.pins == 0 or block.permanent for block in unit.blocks.values()), (
            unit.facts.name
        )
