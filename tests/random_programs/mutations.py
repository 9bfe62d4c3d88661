"""The engine, broken on purpose: random programs must find each of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch

from infinity.activations.saved_tensors import OffloadedTensor
from infinity.modules import execution, gathered, packing
from infinity.optim import job, kernels, norm, optimizer, updater
from infinity.placement.spec import Kind
from infinity.sharding import codec, gradients
from infinity.sharding.unit import Unit
from infinity.tiers.block import Block
from infinity.tiers.resident import Residency


class Mutation(NamedTuple):
    """`owner`'s attribute `name` becomes what `change` makes of it. Of the programs of
    `test_random_programs`, number `found_by` sees that: always, or most times where it depends on
    threads."""

    breaks: str
    owner: Any
    name: str
    change: Callable[[Any], Any]
    found_by: int

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, the engine is broken."""
        real = vars(self.owner)[self.name]
        with mock.patch.object(self.owner, self.name, self.change(real)):
            yield


def nothing(real: Any) -> Any:
    """A function that does nothing."""
    return lambda *arguments, **options: None


def _unclipped(real: Any) -> Any:
    def update(self: Any, states: Any, begin: int, end: int, hyper: Any, grad_scale: float) -> None:
        real(self, states, begin, end, hyper, 1.0)

    return update


def _norm_without_the_first_unit(real: Any) -> Any:
    return lambda unit, *others: 0.0 if unit.facts.index == 0 else real(unit, *others)


def _one_moment_does_not_flip(real: Any) -> Any:
    def end_update(self: Any, blocks: Any, *left: int) -> None:
        flips = [block for block in blocks if block.kind is not Kind.EXP_AVG or not block.written]
        real(self, flips, *left)

    return end_update


def _always(real: Any) -> Any:
    return lambda self, other: other is not None


def _gradient_replaces(real: Any) -> Any:
    def add(self: Any, index: int, *arguments: Any) -> None:
        if self.ledger.has(index):
            self.forget([index])
        real(self, index, *arguments)

    return add


def _everything_is_updated(real: Any) -> Any:
    def segments_of(unit: Any, hypers: Any, further: float = 1.0) -> Any:
        some = next((hyper for hyper in hypers if hyper is not None), None)
        return real(unit, [some if hyper is None else hyper for hyper in hypers], further)

    return segments_of


def _steps_are_forgotten(real: Any) -> Any:
    return lambda self, header: real(self, header | {"steps": [0 for _ in header["steps"]]})


def _views_begin_at_the_unit(real: Any) -> Any:
    def locate(self: Any, tensor: torch.Tensor) -> Any:
        found = real(self, tensor)
        return None if found is None else (found[0], 0)

    return locate


def _low_bits_are_lost(real: Any) -> Any:
    def decode(form: Any, tensors: Any, values: torch.Tensor, first: int = 0) -> None:
        real(form, tensors, values, first)
        values.view(torch.int32).bitwise_and_(-0x10000)

    return decode


def _old_copies_stay(real: Any) -> Any:
    def begin_update(self: Any, block: Any, keep: bool = False) -> None:
        real(self, block, keep)
        if keep and block.copy.lease is not None and block.copy.holds_old:
            block.copy.renewed.update(self._loader._staging.chunks(block))

    return begin_update


def _another_activation(real: Any) -> Any:
    def unpack(self: Any) -> torch.Tensor:
        return real(self).roll(1)

    return unpack


def _all_uses_end(real: Any) -> Any:
    def sweep(self: Any) -> None:
        for found in self.passes.values():
            uses, found.uses = found.uses, []
            for use in uses:
                use.end()

    return sweep


def _pins_are_ignored(real: Any) -> Any:
    def next_use_of(self: Any, owner: Any) -> Any:
        return (
            self._listeners.next_use(owner.unit)
            if isinstance(owner, Block) and not owner.copy.copying
            else None
        )

    return next_use_of


MUTATIONS = (
    Mutation("zero_grad forgets nothing", gradients.Gradients, "clear", nothing, 0),
    Mutation(
        "the kernels do not see the clip factor, nor the loss scale",
        kernels.Kernels,
        "update",
        _unclipped,
        3,
    ),
    Mutation(
        "the first unit is not in the norm",
        norm,
        "squared_gradient_norm",
        _norm_without_the_first_unit,
        2,
    ),
    Mutation(
        "the first moment reads its old extent after an update",
        Residency,
        "end_update",
        _one_moment_does_not_flip,
        0,
    ),
    Mutation(
        "a speculative update is kept whatever the step asks for",
        job.UnitUpdate,
        "__eq__",
        _always,
        19,
    ),
    Mutation(
        "another gradient does not roll a speculative update back",
        updater.Updater,
        "rollback",
        nothing,
        2,
    ),
    Mutation(
        "what a speculative update put in place is not rolled back",
        Residency,
        "rollback",
        nothing,
        3,
    ),
    Mutation(
        "a second gradient replaces the first one",
        gradients.Gradients,
        "add",
        _gradient_replaces,
        2,
    ),
    Mutation(
        "parameters without a gradient are updated, too",
        optimizer,
        "segments_of",
        _everything_is_updated,
        7,
    ),
    Mutation(
        "a load forgets the number of updates",
        optimizer.Optimizer,
        "load_header",
        _steps_are_forgotten,
        34,
    ),
    Mutation(
        "a saved view begins at the first parameter",
        packing.Packer,
        "locate",
        _views_begin_at_the_unit,
        3,
    ),
    Mutation(
        "the low bits of a master are lost when it is read",
        codec,
        "decode_master",
        _low_bits_are_lost,
        6,
    ),
    Mutation(
        "copies stay as they were before an update", Residency, "begin_update", _old_copies_stay, 0
    ),
    Mutation(
        "an activation comes back from a neighbour's place",
        OffloadedTensor,
        "unpack",
        _another_activation,
        5,
    ),
    Mutation(
        "what a checkpoint recomputes may leave at once",
        execution.Execution,
        "sweep",
        _all_uses_end,
        7,
    ),
    Mutation("a copy that is in use is evicted", Residency, "_next_use_of", _pins_are_ignored, 1),
    Mutation(
        "what gathered(write=True) leaves is not written", gathered, "_write_back", nothing, 2
    ),
)

OF_RANKS = (Mutation("what other ranks wrote is not gathered", Unit, "outdate", nothing, 6),)
"""What two ranks must find."""
