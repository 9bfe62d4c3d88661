"""The optimizer kernels, and their arguments: hyper-parameters, and the parts of a shard that they
apply to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from infinity import native
from infinity.device import add_alone, device_of, read_values, stream_of
from infinity.errors import ConfigError, EngineClosedError
from infinity.measure.rates import DTYPES, threads_of
from infinity.placement.budget import CHUNK_ELEMENTS
from infinity.placement.spec import Format, Kind
from infinity.quantities import round_up
from infinity.sharding.unit import Unit
from infinity.tiers.staging import ChunkRequest
from infinity.tiers.store import Store

KERNEL_NAMES = {
    Kind.PARAM: "param",
    Kind.MASTER: "master",
    Kind.EXP_AVG: "first",
    Kind.EXP_AVG_SLOW: "slow",
    Kind.EXP_AVG_SQ: "second",
}
"""The names in `native/` of the blocks that an update replaces."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Hyper(NamedTuple):
    """The hyper-parameters of one parameter in its update number `step`: those of the kernel
    `rule`, by keyword."""

    rule: str
    step: int
    values: dict[str, float]
    sign: float = 1.0
    """The sign of the gradients: -1 with `maximize`."""


class Segment(NamedTuple):
    """Elements [begin, end) of this rank's shard that are updated with `hyper`, and with their
    gradients times `factor`."""

    begin: int
    end: int
    hyper: Hyper
    factor: float = 1.0


class StateTensors(NamedTuple):
    """The states of some elements of unit number `unit`, from number `position` of its flat buffer
    on.

    PARAM and GRAD are tensors of their dtypes, the others uint8 in `formats`. The result of a state
    with one of `targets` goes to the target, and the state does not change.
    """

    tensors: dict[Kind, torch.Tensor]
    formats: dict[Kind, Format]
    unit: int = 0
    position: int = 0
    targets: Mapping[Kind, torch.Tensor] = MappingProxyType({})


class Kernels:
    """The kernels of `native/cpu_adam` with one instruction set and one pool of `threads` threads.
    For states on a GPU, the kernels of `native/cuda`, with the same bits. None: as many as
    `threads_of` says."""

    def __init__(self, instruction_set: str, threads: int | None) -> None:
        self._module = native.cpu_adam()
        best = self._module.best_isa()
        if instruction_set != "auto" and not self._module.has_isa(instruction_set):
            raise ConfigError(
                f"instruction_set={instruction_set!r} is not one that this CPU has; 'auto' "
                f"is {best!r} here"
            )
        self.isa = best if instruction_set == "auto" else instruction_set
        self.threads = threads_of(threads)
        self._pool = self._module.Pool(self.threads)

    def update(
        self, states: StateTensors, begin: int, end: int, hyper: Hyper, grad_scale: float
    ) -> None:
        """Update elements [begin, end) with gradients times `grad_scale`; formulas in
        `native/cpu_adam/rules.h`.

        The noise of stochastic rounding is a function of the unit, the element's place in it, and
        the step (`noise.h`).
        """
        tensors, formats = states.tensors, states.formats

        def at(kind: Kind, where: Mapping[Kind, torch.Tensor] = tensors) -> int:
            return where[kind].data_ptr() if kind in where else 0

        moments = {formats[kind].name for kind in tensors if kind.is_moment}
        on_gpu = tensors[Kind.PARAM].device.type != "cpu"
        module: Any = native.cuda() if on_gpu else self._module
        where = (
            {"stream": stream_of(tensors[Kind.PARAM])}
            if on_gpu
            else {"isa": self.isa, "pool": self._pool}
        )
        if Kind.EXP_AVG_SLOW in tensors:
            where["slow"] = at(Kind.EXP_AVG_SLOW)
        where |= {
            f"to_{name}": at(kind, states.targets)
            for kind, name in KERNEL_NAMES.items()
            if kind in states.targets
        }
        module.update(
            hyper.rule,
            at(Kind.GRAD),
            _NAMES[tensors[Kind.GRAD].dtype],
            at(Kind.PARAM),
            _NAMES[tensors[Kind.PARAM].dtype],
            at(Kind.MASTER),
            formats[Kind.MASTER].name if Kind.MASTER in tensors else "none",
            at(Kind.EXP_AVG),
            at(Kind.EXP_AVG_SQ),
            moments.pop() if moments else "fp32",
            begin,
            end,
            position=states.position,
            key=states.unit << 32 | hyper.step,
            grad_scale=grad_scale,
            **where,
            **hyper.values,
        )

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`target.copy_(source)` for uint8 tensors (n,) on the host, by all threads."""
        self._module.copy(target.data_ptr(), source.data_ptr(), target.numel(), self._pool)

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`target.add_(source)` for contiguous tensors (n,) of one dtype: fp32, bf16 and fp16 on
        the host by all threads, with the same bits, except that all NaNs become equal. Other
        dtypes, and all tensors after `close` (gradients may still come then), by `add_alone`.

        Any thread may call it; one call is served at a time.
        """
        name, pool = _NAMES.get(target.dtype), self._pool
        if name is None or pool is None or target.device.type != "cpu":
            add_alone(target, source)
            return
        self._module.add(target.data_ptr(), source.data_ptr(), name, target.numel(), self.isa, pool)

    def close(self) -> None:
        """End the threads. Only `add` can be used afterwards."""
        self._pool = None

    def squared_norm(self, values: torch.Tensor, carry: float) -> float:
        """`carry` plus the sum of squares of `values`, in double precision and in a fixed order, on
        their device."""
        if values.device.type != "cpu":
            cuda: Any = native.cuda()
            total = torch.full((1,), carry, dtype=torch.float64, device=values.device)
            sums = total.new_empty(cuda.norm_blocks(values.numel()))
            with device_of(values):
                cuda.squared_norm(
                    values.data_ptr(),
                    _NAMES[values.dtype],
                    values.numel(),
                    block_sums=sums.data_ptr(),
                    total=total.data_ptr(),
                    stream=stream_of(values),
                )
            return float(read_values(total)[0])
        if (pool := self._pool) is None:
            raise EngineClosedError("the engine was closed")
        return float(
            self._module.squared_norm(
                values.data_ptr(), _NAMES[values.dtype], values.numel(), carry, self.isa, pool
            )
        )


def segments_of(
    unit: Unit, hypers: Sequence[Hyper | None], further: float = 1.0
) -> tuple[Segment, ...]:
    """The parts of this rank's shard to update, given the hyper-parameters of each parameter (None:
    no update).

    Gradients are multiplied by their earlier clip factors, and by `further`. Neighbors with equal
    updates are one segment, with the padding between them (zeros stay zeros).
    """
    segments: list[Segment] = []
    before: Segment | None = None  # of the parameter before, if it is updated
    for index, hyper in enumerate(hypers):
        part = unit.facts.overlap(index)
        if hyper is None:
            before = None
        elif part.length > 0:
            end, factor = part.in_shard + part.length, unit.gradients.factor(index, further)
            factor *= hyper.sign
            joins = before is not None and before.hyper == hyper and before.factor == factor
            begin = segments.pop().begin if joins else part.in_shard
            before = Segment(begin, end, hyper, factor)
            segments.append(before)
    return tuple(segments)


def squared_gradient_norm(
    unit: Unit, store: Store, kernels: Kernels, positions: Sequence[int]
) -> float:
    """The sum of squares of the gradients of these parameters in this rank's shard, in double
    precision.

    The result depends on these parameters only, neither on placement nor on other parameters.
    Parameters that another tensor parallel rank counts (`UnitFacts.counted`) add nothing if they
    are finite, else NaN.
    """
    counted = others = 0.0
    runs = _runs(unit, positions)
    gradient = unit.blocks[Kind.GRAD]
    starts = store.staging.chunks(gradient, on_device=True)
    for begin, end in zip(starts, [*starts[1:], gradient.elements], strict=True):
        if not any(run.begin < end and run.end > begin for run in runs):
            continue
        (chunk,) = store.staging.check_out(
            ChunkRequest([gradient], begin, [gradient], on_device=True)
        )
        try:
            chunk.wait()
            values = chunk.tensor.view(unit.gradient_dtype)
            for run in runs:
                part = values[max(run.begin - begin, 0) : max(run.end - begin, 0)]
                if part.numel() > 0 and run.counts:
                    counted = kernels.squared_norm(part, counted)
                elif part.numel() > 0:
                    others = kernels.squared_norm(part, others)
        finally:
            chunk.release()
    return counted + 0.0 * others


class _ElementRun(NamedTuple):
    """Elements [begin, end) of a shard, and whether this rank counts their gradients."""

    begin: int
    end: int
    counts: bool


def _runs(unit: Unit, positions: Sequence[int]) -> list[_ElementRun]:
    """The shard, or its parts for these parameters. They are cut where counted and other elements
    meet, and at the borders of the blocks in which the kernel sums. So sums do not depend on the
    ends of chunks."""
    if all(unit.facts.counted) and len(positions) == len(unit.parameters):
        return [_ElementRun(0, unit.layout.shard_numel, True)]
    runs = []
    for index in positions:
        part, counts = unit.facts.overlap(index), unit.facts.counted[index]
        begin, end = part.in_shard, part.in_shard + part.length
        border = min(round_up(begin, CHUNK_ELEMENTS), end)
        runs += [
            _ElementRun(low, high, counts)
            for low, high in ((begin, border), (border, end))
            if low < high
        ]
    return runs


def nonfinite_gradients(unit: Unit, positions: Sequence[int]) -> list[bool]:
    """Which of these parameters have a settled gradient with an infinity or a NaN in this rank's
    shard."""
    there = [unit.gradients.has(index) for index in positions]
    if not any(there):
        return there
    shard = unit.states.read(Kind.GRAD)
    parts = [unit.facts.overlap(index) for index in positions]
    finite = [
        bool(shard[part.in_shard : part.in_shard + part.length].isfinite().all()) for part in parts
    ]
    return [has and not good for has, good in zip(there, finite, strict=True)]
