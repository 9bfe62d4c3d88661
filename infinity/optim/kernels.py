"""The optimizer kernels, and what they are told: hyper-parameters, and the parts of a shard that these are for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from infinity import native
from infinity.errors import ConfigError
from infinity.sharding.unit import Unit
from infinity.tiers.block import Kind
from infinity.tiers.store import Store

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


class States(NamedTuple):
    """The states of some elements of `unit`, from number `position` of its flat buffer on: uint8, in the blocks' formats."""

    unit: Unit
    position: int
    tensors: dict[Kind, torch.Tensor]

    @property
    def param(self) -> torch.Tensor:
        """The parameters, of the unit's dtype."""
        return self.tensors[Kind.PARAM].view(self.unit.dtype)


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
        """Update elements [begin, end) of a chunk in place; formula in `native/cpu_adam/rules.h`."""
        param, grad, master = chunk[Kind.PARAM], chunk[Kind.GRAD], chunk.get(Kind.MASTER)
        self._module.update(
            "adam", grad.data_ptr(), _NAMES[grad.dtype], param.data_ptr(), _NAMES[param.dtype],
            0 if master is None else master.data_ptr(), "none" if master is None else "fp32",
            chunk[Kind.EXP_AVG].data_ptr(), chunk[Kind.EXP_AVG_SQ].data_ptr(), "fp32", begin, end, position=0, key=0,
            lr=hyper.lr, beta1=hyper.beta1, beta2=hyper.beta2, eps=hyper.eps, weight_decay=hyper.weight_decay,
            bias_correction1=1.0 - hyper.beta1**hyper.step, bias_correction2_sqrt=(1.0 - hyper.beta2**hyper.step) ** 0.5,
            decoupled=True, grad_scale=grad_scale, isa=self.isa, pool=self._pool,
        )  # fmt: skip

    def update(self, states: States, begin: int, end: int, hyper: Hyper, grad_scale: float) -> None:
        unit = states.unit
        chunk = {k: t.view(unit.dtype if k in (Kind.PARAM, Kind.GRAD) else torch.float32) for k, t in states.tensors.items()}
        self.adam(chunk, begin, end, hyper, grad_scale)

    def close(self) -> None:
        """End the threads; the kernels cannot be used any more."""
        self._pool = None

    def squared_norm(self, values: torch.Tensor, carry: float) -> float:
        """`carry` plus the sum of squares of `values`, in double precision and in a fixed order."""
        return float(
            self._module.squared_norm(values.data_ptr(), _NAMES[values.dtype], values.numel(), carry, self.isa, self._pool)
        )


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
