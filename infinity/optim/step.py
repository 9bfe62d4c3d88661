"""The optimizer step as a pipeline over the chunks of the units: fetch i+1 | update i | flush i-1.

[Note: exact although late]
`Updater.post` takes final gradients, the clip factor and the hyper-parameters of this step, and returns. One thread then
updates unit after unit, in the order in which the next forward needs them; that forward waits for its unit alone. Nothing is
stale: a unit's content is replaced between its last use in one step and its first in the next.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from infinity import native
from infinity.errors import ConfigError, InfinityError
from infinity.observe import Recorder
from infinity.sharding import collectives
from infinity.sharding.unit import Unit
from infinity.tiers.access import Checkout
from infinity.tiers.block import Block, Kind
from infinity.tiers.store import Store

log = logging.getLogger("infinity")

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Hyper(NamedTuple):
    """The hyper-parameters of one parameter in one step; `step` counts its updates, from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


class Segment(NamedTuple):
    """Elements [begin, end) of this rank's shard that are updated with `hyper`."""

    begin: int
    end: int
    hyper: Hyper


@dataclass(frozen=True)
class UnitUpdate:
    """The update of one unit in one step; elements outside all segments keep their values."""

    unit: Unit
    segments: tuple[Segment, ...]
    grad_scale: float


class Kernels:
    """The CPU kernels with one instruction set and one pool of `threads` threads.

    None takes every CPU this process may run on: launchers set OMP_NUM_THREADS=1, which would starve the update.
    """

    def __init__(self, instruction_set: str, threads: int | None) -> None:
        self._module = native.cpu_adam()
        best = self._module.best_isa()
        if instruction_set != "auto" and not self._module.has_isa(instruction_set):
            raise ConfigError(f"instruction_set={instruction_set!r} is not one that this CPU has; 'auto' is {best!r} here")
        self.isa = best if instruction_set == "auto" else instruction_set
        self.threads = threads or len(os.sched_getaffinity(0))
        self._pool = self._module.Pool(self.threads)

    def adam(self, chunk: dict[Kind, torch.Tensor], begin: int, end: int, hyper: Hyper, grad_scale: float) -> None:
        """Update elements [begin, end) of a chunk in place; formula in `native/cpu_adam/cpu_adam.h`."""
        param, grad = chunk[Kind.PARAM], chunk[Kind.GRAD]
        master = chunk.get(Kind.MASTER, param)

        def at(tensor: torch.Tensor) -> int:
            return tensor.data_ptr() + begin * tensor.element_size()

        correction2 = 1.0 - hyper.beta2**hyper.step
        self._module.adam_step(
            at(grad), _NAMES[grad.dtype], at(master), at(chunk[Kind.EXP_AVG]), at(chunk[Kind.EXP_AVG_SQ]), at(param),
            _NAMES[param.dtype], end - begin, lr=hyper.lr, beta1=hyper.beta1, beta2=hyper.beta2, eps=hyper.eps,
            weight_decay=hyper.weight_decay, bias_correction1=1.0 - hyper.beta1**hyper.step,
            bias_correction2_sqrt=correction2**0.5, grad_scale=grad_scale, decoupled=True, isa=self.isa, pool=self._pool,
        )  # fmt: skip

    def close(self) -> None:
        """End the threads; the kernels cannot be used any more."""
        self._pool = None

    def squared_norm(self, values: torch.Tensor, carry: float) -> float:
        """`carry` plus the sum of squares of `values`, in double precision and in a fixed order."""
        return float(
            self._module.squared_norm(values.data_ptr(), _NAMES[values.dtype], values.numel(), carry, self.isa, self._pool)
        )


@dataclass
class _Chunk:
    """One chunk of one unit in the pipeline."""

    update: UnitUpdate
    begin: int
    last: bool
    kinds: tuple[Kind, ...]
    outs: list[Checkout]

    def tensors(self) -> dict[Kind, torch.Tensor]:
        param_types = (Kind.PARAM, Kind.GRAD)
        dtype = self.update.unit.dtype
        return {
            kind: out.tensor.view(dtype if kind in param_types else torch.float32)
            for kind, out in zip(self.kinds, self.outs, strict=True)
        }


class Updater:
    """Fixes what a step is, and runs it on a thread of its own. All methods are for the thread that runs the model.

    `order` gives the units in the order in which the next forward uses them, as far as is known; `settled` is called before a
    step is fixed, to end a backward that an exception cut off; `stepped` when it has been, before its updates start.
    """

    def __init__(
        self,
        store: Store,
        units: Sequence[Unit],
        kernels: Kernels,
        order: Callable[[], Sequence[int]],
        settled: Callable[[], None],
        stepped: Callable[[], None],
        recorder: Recorder,
    ) -> None:
        self._store, self._units, self._kernels, self._recorder = store, list(units), kernels, recorder
        self._order, self._settled, self._stepped = order, settled, stepped
        self._owners: dict[Unit, weakref.ref[Any]] = {}
        self.posted_steps = 0
        """Steps started since the beginning."""
        self.norms = 0
        """How often the gradients were read for their norm in the last step."""
        self._norms_now = 0
        self._posted: list[UnitUpdate] | None = None
        self._changed = threading.Condition()
        self._closed = False
        for unit in units:
            unit.updater = self
        self._thread = threading.Thread(target=self._run, name="infinity-updater", daemon=True)
        self._thread.start()

    def adopt(self, unit: Unit, optimizer: object) -> None:
        """`optimizer` updates `unit` from now on, beginning with fresh states; raises `ConfigError` when another one does."""
        self._store.check()
        owner = self._owners.get(unit)
        if owner is not None and owner() not in (None, optimizer):
            raise ConfigError(f"unit {unit.name} already has an optimizer; use one AdamW with several parameter groups")
        if owner is not None and owner() is None:
            self.drain()
            for kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ):
                self._store.forget(unit.blocks[kind])
        self._owners[unit] = weakref.ref(optimizer)

    def settle(self, units: Sequence[Unit]) -> None:
        """Make the gradients of this step final: agreed on by all ranks, zeros where there are none."""
        self.drain()
        self._settled()
        group = units[0].group if units else None
        if group is not None:
            mine = [float(flag) for unit in units for flag in unit.accumulated]
            *flags, total, squares = collectives.all_reduce_sum([*mine, *units[0].calls.terms()], group)
            if not collectives.agree(total, squares, group):
                error = InfinityError(
                    "the ranks used the units of the model in different orders, so that what they gathered and reduced since the "
                    "last step is mixed up; every rank must run the same modules in the same order (invariant I6)"
                )
                self._store.fail(error)
                raise error
            for unit in units:
                unit.accumulated = [flag > 0 for flag in flags[: len(unit.accumulated)]]
                del flags[: len(unit.accumulated)]
        for unit in units:
            if not unit.spent:
                unit.settle_gradients()

    def clip(self, max_norm: float, units: Sequence[Unit]) -> float:
        """Scale the settled gradients of `units` so that their common L2 norm is at most `max_norm`; returns the norm before.

        As `torch.nn.utils.clip_grad_norm_`: the factor is min(1, max_norm / (norm + 1e-6)). The norm is summed in double
        precision over the units and the ranks.
        """
        total = 0.0
        self._norms_now += 1
        having = [unit for unit in units if any(unit.accumulated) and not unit.spent]
        for unit in having:
            total += unit.grad_scale**2 * squared_gradient_norm(unit, self._store, self._kernels)
        group = self._units[0].group if self._units else None
        norm = math.sqrt(collectives.all_reduce_sum([total], group)[0])
        if not math.isfinite(norm):
            log.warning("the gradient norm of step %d is %s", self.posted_steps + 1, norm)
        for unit in having:
            unit.grad_scale *= min(1.0, max_norm / (norm + 1e-6))
        return norm

    def post(self, updates: Sequence[tuple[Unit, tuple[Segment, ...]]]) -> None:
        """Start updating the units; returns at once. Their gradients are spent.

        Raises `RuntimeError` before anything is changed when the parameters of one of them are in use.
        """
        used = [unit.name for unit, _ in updates if unit.blocks[Kind.PARAM].pins]
        if used:
            raise RuntimeError(f"{', '.join(used)} cannot be updated inside of a forward or of infinity.gathered (invariant I7)")
        place = {unit: position for position, unit in enumerate(self._order())}
        ordered = sorted(updates, key=lambda update: place.get(update[0].index, len(place) + update[0].index))
        for unit, _ in ordered:
            self._store.begin_update(unit.blocks[Kind.PARAM])
            unit.spent = True
        self._stepped()
        with self._changed:
            self._posted = [UnitUpdate(unit, segments, unit.grad_scale) for unit, segments in ordered]
            self._changed.notify_all()
        self.norms, self._norms_now = self._norms_now, 0
        self.posted_steps += 1

    def drain(self) -> None:
        """Block until no update is under way; raises `EngineClosedError` when one failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._posted is None)
        self._store.check()

    def close(self) -> None:
        """Finish what was posted and end the thread. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._kernels.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._posted is not None or self._closed)
                updates = self._posted
            if updates is None:
                return
            try:
                self._pipeline(updates)
            except BaseException as error:  # reaches the user's next call through the store
                self._store.fail(error)
            with self._changed:
                self._posted = None
                self._changed.notify_all()

    def _pipeline(self, updates: Sequence[UnitUpdate]) -> None:
        reading: deque[_Chunk] = deque()
        writing: deque[_Chunk] = deque()
        waiting = deque(self._chunks(updates))
        try:
            while waiting or reading or writing:
                while writing and all(out.committed() for out in writing[0].outs):
                    self._retire(writing[0])
                    writing.popleft()
                if waiting and len(reading) < 2 and self._check_out(waiting[0]):
                    reading.append(waiting.popleft())
                elif reading:
                    self._update(reading[0])
                    writing.append(reading.popleft())
                elif writing:
                    self._retire(writing[0])
                    writing.popleft()
                elif waiting:  # another thread holds the slots that the first chunk needs
                    self._check_out(waiting[0], wait=True)
                    reading.append(waiting.popleft())
        finally:
            for chunk in (*reading, *writing):  # after an error: every slot goes back, whatever else fails
                for out in chunk.outs:
                    try:
                        out.release()
                    except OSError as error:
                        self._store.fail(error)

    def _chunks(self, updates: Sequence[UnitUpdate]) -> Iterator[_Chunk]:
        for update in updates:
            begins = list(update.unit.chunks())
            kinds = tuple(update.unit.blocks)
            for begin in begins:
                yield _Chunk(update, begin, begin == begins[-1], kinds, [])

    def _check_out(self, chunk: _Chunk, wait: bool = False) -> bool:
        blocks = chunk.update.unit.blocks
        wants = [(blocks[kind], self._needed(blocks, kind)) for kind in chunk.kinds]
        outs = self._store.check_out(wants, chunk.begin) if wait else self._store.try_check_out(wants, chunk.begin)
        chunk.outs = outs or []
        return outs is not None

    @staticmethod
    def _needed(blocks: dict[Kind, Block], kind: Kind) -> bool:
        """Whether the old content of `kind` goes into the update.

        The parameter is the rounded master, so it is only written, except the first time: a master that was never written
        is the parameter, widened.
        """
        if kind is Kind.PARAM:
            return Kind.MASTER not in blocks or not blocks[Kind.MASTER].written
        return kind is not Kind.MASTER or blocks[Kind.MASTER].written

    def _update(self, chunk: _Chunk) -> None:
        for out in chunk.outs:
            out.wait()
        start = time.perf_counter()
        update, tensors = chunk.update, chunk.tensors()
        param, master = tensors[Kind.PARAM], tensors.get(Kind.MASTER)
        if master is not None and not update.unit.blocks[Kind.MASTER].written:
            master.copy_(param)
        elif master is not None and not _covers(update.segments, chunk.begin, chunk.begin + param.numel()):
            param.copy_(master)
        for segment in update.segments:
            begin, end = max(segment.begin - chunk.begin, 0), min(segment.end - chunk.begin, param.numel())
            if begin < end:
                self._kernels.adam(tensors, begin, end, segment.hyper, update.grad_scale)
        self._recorder.add("adam", update.unit.name, start, time.perf_counter())
        for kind, out in zip(chunk.kinds, chunk.outs, strict=True):
            if kind is not Kind.GRAD:
                out.commit()

    def _retire(self, chunk: _Chunk) -> None:
        for out in chunk.outs:
            out.release()
        if chunk.last:
            blocks = chunk.update.unit.blocks
            self._store.end_update([block for kind, block in blocks.items() if kind is not Kind.GRAD])


def _covers(segments: Sequence[Segment], begin: int, end: int) -> bool:
    for segment in segments:
        if segment.begin <= begin < segment.end:
            begin = segment.end
    return begin >= end


def segments_of(unit: Unit, hypers: Sequence[Hyper | None]) -> tuple[Segment, ...]:
    """The parts of this rank's shard to update, given the hyper-parameters of each parameter (None: leave it alone).

    Neighbours with equal hyper-parameters are one segment, the padding between them included (zeros stay zeros).
    """
    segments: list[Segment] = []
    for index, hyper in enumerate(hypers):
        part = unit.layout.overlap(index, unit.rank)
        if hyper is None or part.length == 0:
            continue
        begin, end = part.in_shard, part.in_shard + part.length
        previous_kept = index > 0 and hypers[index - 1] == hyper
        if segments and previous_kept and segments[-1].hyper == hyper:
            segments[-1] = Segment(segments[-1].begin, end, hyper)
        else:
            segments.append(Segment(begin, end, hyper))
    return tuple(segments)


def squared_gradient_norm(unit: Unit, store: Store, kernels: Kernels) -> float:
    """The sum of squares of this rank's shard of the unit's gradients, in double precision and independent of placement."""
    total = 0.0
    for begin in unit.chunks():
        (chunk,) = store.check_out([(unit.blocks[Kind.GRAD], True)], begin)
        try:
            chunk.wait()
            total = kernels.squared_norm(chunk.tensor.view(unit.dtype), total)
        finally:
            chunk.release()
    return total
