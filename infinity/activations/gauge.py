"""Measures the bytes that the forwards of each block save for the backward, and their seconds. A
tensor counts when autograd saves it, even if it is then offloaded or dropped.

[Note: counted bytes]
The bytes of storages count, each storage once. The *inputs* of a block are the tensors that it is
called with. Its *inside* are the other tensors that autograd saves in its forward. An input that an
earlier block also had, such as a mask, counts there. Tensors that are saved outside of blocks count
together. A forward counts until a backward has ended. So the forwards of several micro-batches
before one backward add up, and the maximum over time must fit.

If its block is recomputed, a storage may be freed during a forward. A weak reference keeps other
storages from getting its number.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.activations.saved_tensors import SavedTensorOffloader
from infinity.device import ComputeDevice
from infinity.placement.treatment import BlockCost
from infinity.sharding.tensor_parallel import local


class _Seen:
    """A set of storages."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}

    def add(self, storage: torch.UntypedStorage) -> bool:
        """Add `storage`. Returns whether it is new."""
        if storage._cdata in self._storages:
            return False
        self._storages[storage._cdata] = StorageWeakRef(storage)
        return True

    def has(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._storages


class BlockGauge:
    """The figures of one block: of the open forwards, which wait for their backward, and the maxima
    so far."""

    def __init__(self) -> None:
        self.open_inputs = self.open_inside = self.open_calls = 0
        self.inputs = self.inside = self.largest = self.calls = 0
        self.seconds = 0.0
        """The seconds of one forward: the average of a step, the lowest of all steps."""
        self.recomputable = True
        """Whether every forward so far could run again."""
        self.timings: list[tuple[Any, Any, float]] = []
        """For each forward of this step: its begin and end, and the seconds between that do not
        count."""

    def close(self) -> None:
        """All backwards have ended: no forward is open."""
        self.open_inputs = self.open_inside = self.open_calls = 0

    def count(self, inside: int) -> None:
        """A forward has ended. It saved `inside` bytes besides its inputs."""
        self.open_calls += 1
        self.open_inside += inside
        self.inputs = max(self.inputs, self.open_inputs)
        self.inside = max(self.inside, self.open_inside)
        self.largest = max(self.largest, inside)
        self.calls = max(self.calls, self.open_calls)

    @property
    def cost(self) -> BlockCost:
        """The figures that a decision needs."""
        return BlockCost(
            self.inputs, self.inside, self.largest, self.calls * self.seconds, self.recomputable
        )


class _CountedForward:
    """A forward under way. If `block` is None, nothing inside it counts."""

    def __init__(self, block: BlockGauge | None) -> None:
        self.block = block
        self.seen = _Seen()
        self.inside = 0


class ForwardClock:
    """Times forwards on `device`. `waited` returns the seconds that the model has waited for
    parameters, which do not count where the CPU computes."""

    def __init__(self, device: ComputeDevice, waited: Callable[[], float]) -> None:
        self._device, self._waited = device, waited
        self.runs = True
        """Whether forwards are timed."""

    @contextmanager
    def timing(self, block: BlockGauge) -> Iterator[None]:
        """Inside the context, time a forward of `block`, unless it raises."""
        if not self.runs:
            yield
            return
        begin, waited = self._device.instant(), self._waited()
        yield
        waits = self._waited() - waited if self._device.torch.type == "cpu" else 0.0
        block.timings.append((begin, self._device.instant(), waits))

    def end_step(self, block: BlockGauge) -> None:
        """Set the seconds of `block` from the forwards of the step."""
        timings, block.timings = block.timings, []
        if timings:
            total = sum(self._device.between(b, e) - waits for b, e, waits in timings)
            mean = max(total / len(timings), 1e-9)
            block.seconds = min(block.seconds or mean, mean)


class Gauge:
    """Measures for one engine, with the seconds of `clock`. `backwards` returns how many backwards
    have ended. Any thread that runs the model may call it."""

    def __init__(
        self, clock: ForwardClock, offloader: SavedTensorOffloader, backwards: Callable[[], int]
    ) -> None:
        self.clock, self._offloader = clock, offloader
        self._backwards, self._ended = backwards, 0
        self._given = _Seen()
        self._outside = _Seen()
        self._calls: dict[int, _CountedForward] = {}  # by thread
        self._open_others = 0
        self.blocks: dict[str, BlockGauge] = {}
        """The figures of blocks by name, in the order of their first forwards."""
        self.others = 0
        """The most bytes that were saved outside of blocks."""
        self._has_counted = False  # since the last step

    @property
    def is_inside(self) -> bool:
        """Whether this thread is inside `counting` or `ignoring`."""
        return threading.get_ident() in self._calls

    def begin(self, name: str, inputs: Iterable[Any], recomputable: bool) -> BlockGauge:
        """A forward of the block `name` is about to begin: count its `inputs`. Returns the figures
        of the block."""
        self._close_what_ended()
        block = self.blocks.setdefault(name, BlockGauge())
        block.recomputable &= recomputable
        self._has_counted = True
        for storage in self._storages(inputs):
            if self._given.add(storage):
                block.open_inputs += storage.nbytes()
        return block

    def forget(self, name: str) -> None:
        """Drop the figures of the block `name`: the model itself recomputes it."""
        self.blocks.pop(name, None)

    @contextmanager
    def counting(self, block: BlockGauge) -> Iterator[None]:
        """Inside the context, count the forward of `block`, after `begin`."""
        call = _CountedForward(block)
        with self.clock.timing(block), self._within(call):
            yield
        block.count(call.inside)

    @contextmanager
    def ignoring(self, inputs: Iterable[Any]) -> Iterator[None]:
        """Inside the context, only `inputs` count: a checkpoint of the model drops all other
        tensors."""
        if self.is_inside:
            yield
            return
        for each in inputs:
            if isinstance(each, torch.Tensor):
                self.saves(each)
        with self._within(_CountedForward(None)):
            yield

    @contextmanager
    def _within(self, call: _CountedForward) -> Iterator[None]:
        thread = threading.get_ident()
        self._calls[thread] = call
        try:
            yield
        finally:
            if self._calls.get(thread) is call:
                del self._calls[thread]

    def saves(self, tensor: torch.Tensor) -> None:
        """Autograd saves `tensor`, which is no view of a parameter."""
        storage = self._offloader.held_by(local(tensor))
        if storage is None or self._given.has(storage):
            return
        call = self._calls.get(threading.get_ident())
        if call is None:
            self._close_what_ended()
            if self._outside.add(storage):
                self._open_others += storage.nbytes()
                self.others = max(self.others, self._open_others)
        elif call.block is not None and call.seen.add(storage):
            call.inside += storage.nbytes()

    def _storages(self, inputs: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
        for each in inputs:
            if isinstance(each, torch.Tensor):
                storage = self._offloader.held_by(local(each))
                if storage is not None:
                    yield storage

    def _close_what_ended(self) -> None:
        if self._backwards() != self._ended:
            self._ended = self._backwards()
            self._close()

    def _close(self) -> None:
        self._given, self._outside, self._open_others = _Seen(), _Seen(), 0
        for block in self.blocks.values():
            block.close()

    def end_step(self) -> bool:
        """A step has ended, and with it all backwards. Returns whether a forward of a block began
        in it."""
        self._close()
        found, self._has_counted = self._has_counted, False
        for block in self.blocks.values():
            self.clock.end_step(block)
        return found
