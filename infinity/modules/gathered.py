"""Reads and changes parameters outside of their module's forward."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from infinity.errors import ConfigError, ShardedParameterError, in_words
from infinity.placement.spec import Kind
from infinity.sharding import collectives
from infinity.sharding.parameter import ShardedParameter
from infinity.sharding.posted import Contribution
from infinity.sharding.recognize import is_dtensor
from infinity.sharding.tiles import TiledWeight, pieces_of
from infinity.sharding.unit import Unit, unit_of
from infinity.sharding.use import Showing, collected, described


@contextmanager
def gathered(
    target: nn.Module | torch.Tensor | Sequence[torch.Tensor],
    *,
    write: bool = False,
    write_rank: int | None = None,
) -> Iterator[None]:
    """Make the data of parameters readable inside the block. `target` is a module, a parameter, or
    a sequence of parameters.

    With `write`, the values at the end of the block become the values of the parameters, also if
    the block raises. The fp32 masters of changed elements follow. The units of all these parameters
    are on the compute device at once. Units with their home on the compute device are also copied
    to host memory. Waits for pending updates. Parameters that are plain, or gathered already, stay
    as they are: write in the outermost block.

    With several ranks, every rank must enter, and write the same values. With `write_rank=r`, the
    values of rank r of torch.distributed become the values on all ranks. Other ranks need not
    write.

    Raises `BudgetError` if the units do not fit at once. Raises `RuntimeError` while another thread
    is inside a forward or backward. Raises `ConfigError` if `target` is anything else, or if
    `write_rank` is no rank. Raises `ShardedParameterError` at the end if a parameter was changed
    without `write`; the change is undone. It also raises this if a parameter was given data of
    another shape or dtype, which is left out, or if a view of a parameter outlives the block: keep
    a copy (`.clone()`).
    """
    with _gathered(_parameters(target), write or write_rank is not None, write_rank, keeps=False):
        yield


@contextmanager
def gathered_to_keep(
    parameters: Sequence[torch.Tensor], write_rank: int | None = None
) -> Iterator[None]:
    """`gathered`, but `.data` and `.detach()` of parameters may outlive the block.

    If the block takes one of these, the parameter moves to memory of its own. No budget counts this
    memory, and it lives as long as the alias. The alias keeps the values at the end of the block.
    """
    with _gathered(_parameters(parameters), write_rank is not None, write_rank, keeps=True):
        yield


@contextmanager
def _gathered(
    parameters: Sequence[torch.Tensor], write: bool, write_rank: int | None, keeps: bool
) -> Iterator[None]:
    """`gathered`, or `gathered_to_keep` if `keeps`."""
    if write_rank is not None:
        _check_rank(write_rank, parameters)
    sources = (type(p).source for p in parameters if isinstance(p, ShardedParameter))
    units = sorted(dict.fromkeys(map(unit_of, sources)), key=lambda unit: unit.facts.index)
    del parameters
    reads = [_Reading(unit, write, write_rank, keeps) for unit in units]
    with ExitStack() as stack:
        for read in reads:
            read.begin()
            stack.callback(read.end)
        # For a loss that is computed here and runs its backward when the units have moved.
        for border in dict.fromkeys(unit.listeners.border for unit in units):
            stack.enter_context(border.packing())
        yield
    changed = [name for read in reads for name in read.changed]
    if changed and keeps:
        raise ShardedParameterError(
            f"{described(changed)} was changed inside of GatheredParameters without modifier_rank; "
            "the change was undone. Use GatheredParameters(..., modifier_rank=0)"
        )
    if changed:
        raise ShardedParameterError(
            f"{described(changed)} was changed inside of infinity.gathered without write=True; the "
            "change was undone. Use infinity.gathered(..., write=True)"
        )
    misfits = [name for read in reads for name in read.misfits]
    if misfits:
        raise ShardedParameterError(
            f"{described(misfits)} was given data of another shape or dtype inside of "
            "infinity.gathered, which was left out: a wrapped model keeps both"
        )
    left = [name for read in reads for name in read.left]
    if left and keeps:
        raise ShardedParameterError(
            f"a view of {described(left)} outlives GatheredParameters, which ends the right to its "
            "memory; keep .data, .detach() or a copy (.clone())"
        )
    if left:
        raise ShardedParameterError(
            f"a view of {described(left)} outlives infinity.gathered, which ends the right "
            "to its memory; keep a copy (.clone())"
        )


def _parameters(target: object) -> list[torch.Tensor]:
    """The parameters that `target` is or contains. Raises `ConfigError` for any other object."""
    if isinstance(target, nn.Module):
        return list(target.parameters())
    if isinstance(target, TiledWeight):
        return target.pieces
    found = [target] if isinstance(target, (str, torch.Tensor)) else target
    parameters: list[Any] = list(found) if isinstance(found, Iterable) else [found]
    wrong = [each for each in parameters if not isinstance(each, torch.Tensor)]
    if wrong:
        raise ConfigError(
            "infinity.gathered takes a module, a parameter or a list of parameters, not "
            f"{in_words(wrong[0])}; model.get_parameter(name) finds one by its name"
        )
    return pieces_of(parameters)


def _check_rank(rank: object, parameters: Sequence[torch.Tensor]) -> None:
    """Raise `ConfigError` if `rank` is no rank, or if it has only a part of a parameter."""
    number = dist.get_world_size() if dist.is_initialized() else 1
    if not isinstance(rank, int) or not 0 <= rank < number:
        raise ConfigError(
            f"infinity.gathered: write_rank={rank!r} must be a rank of torch.distributed, 0 to "
            f"{number - 1}"
        )
    if any(map(is_dtensor, parameters)):
        raise ConfigError(
            "infinity.gathered: write_rank is for plain parameters, because a rank has a part of a "
            "DTensor; write on all ranks, with write=True"
        )


class _Reading:
    """One unit inside one `gathered`. All ranks take the values of rank `write_rank`. With `keeps`
    aliases may outlive it."""

    def __init__(self, unit: Unit, write: bool, write_rank: int | None, keeps: bool) -> None:
        self._unit, self._write, self._write_rank = unit, write, write_rank
        self._keeps = keeps
        self._use: Showing | None = None
        self._before: torch.Tensor | None = None
        self.changed: list[str] = []
        """After `end`: the parameters that were changed without `write`."""
        self.misfits: list[str] = []
        """After `end`: the parameters that were given data of another shape or dtype."""
        self.left: list[str] = []
        """After `end`: the parameters with a view that outlives the block."""

    def begin(self) -> None:
        """Gather the unit and show its parameters."""
        unit = self._unit
        updates = unit.listeners.updates
        unit.listeners.border.end_interrupted("infinity.gathered")
        if self._write:
            updates.drain()
        else:
            updates.look()
        # A write changes the home itself: only a copy keeps the old content.
        if unit.blocks[Kind.PARAM].permanent:
            self._before = unit.states.read(Kind.PARAM)
        unit.on_device.start()
        try:
            flat = unit.on_device.wait()
            self._use = Showing(unit, flat, lambda unit: unit.on_device.release(), self._write)
        except BaseException:
            unit.on_device.release()
            raise
        unit.data.views.keepers += self._keeps

    def end(self) -> None:
        """Release the unit, and write back or undo the changes."""
        unit, use = self._unit, self._use
        if use is None:
            return
        after, views = None, unit.data.views
        views.keepers -= self._keeps
        try:
            if self._write:
                self.misfits = views.take_assigned()
                views.settle()
                self._take(unit.on_device.wait())
                views.follow()
                after = unit.facts.shard_of(unit.on_device.wait()).detach().cpu().clone()
            else:
                self.changed = unit.changed()
            if sys.exc_info()[0] is None:  # else frames of the exception refer to views
                self.left = collected(use)
        finally:
            use.end()
        if after is not None:
            before = unit.states.read(Kind.PARAM) if self._before is None else self._before
            _write_back(unit, before, after)
            unit.on_device.renew()
        elif self.changed and self._before is not None:
            unit.states.write(Kind.PARAM, self._before)

    def _take(self, flat: torch.Tensor) -> None:
        """Replace the content of `flat`, the whole unit, by that of rank `write_rank`."""
        exchange, rank = self._unit.exchange, self._write_rank
        if exchange is None or rank is None:
            return
        groups = [group for group in exchange.ranks[:2] if group is not None]

        def join() -> None:
            collectives.take_from(flat.view(torch.uint8), rank, groups)

        exchange.post("take", self._unit.facts.name, Contribution(join, flat.nbytes)).wait()


def _write_back(unit: Unit, before: torch.Tensor, after: torch.Tensor) -> None:
    """Make `after` (shard_numel,) the unit's content. Where it differs from `before`, it also
    becomes the master."""
    size = after.element_size()
    same = (before.view(torch.uint8) == after.view(torch.uint8)).view(-1, size).all(dim=1)
    # With shards every rank writes: a write gathers the unit again, which needs all ranks.
    if bool(same.all()) and not unit.facts.shared:
        return
    master = unit.blocks.get(Kind.MASTER)
    # A master that was never written is the parameter, widened.
    if master is not None and master.written:
        # A split master has only the bits that its parameter lacks: put the old parameter back
        # first.
        if unit.blocks[Kind.PARAM].permanent:
            unit.states.write(Kind.PARAM, before)
        unit.states.write(
            Kind.MASTER, torch.where(same, unit.states.read(Kind.MASTER), after.float())
        )
    else:
        unit.states.write(Kind.PARAM, after)
