"""Reading and changing parameters outside of their module's forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from infinity.sharding.parameter import ShardedParameter
from infinity.sharding.unit import Unit
from infinity.tiers.block import Kind


@contextmanager
def gathered(target: nn.Module | torch.Tensor | Sequence[torch.Tensor], *, write: bool = False) -> Iterator[None]:
    """Make the data of a wrapped module's parameters, of one parameter or of several, readable inside the block.

    With `write`, what the block leaves in them becomes their value, and the fp32 master of what changed follows. They are held
    on the compute device at once, with what shares their units: `BudgetError` when that does not fit. Waits for pending
    updates. Parameters that are plain, or gathered already, are left as they are: write in the outermost block. With several
    ranks every rank must enter, and write the same values.
    """
    parameters: list[torch.Tensor]
    if isinstance(target, nn.Module):
        parameters = list(target.parameters())
    else:
        parameters = [target] if isinstance(target, torch.Tensor) else list(target)
    units = list(dict.fromkeys(type(p).unit for p in parameters if isinstance(p, ShardedParameter)))
    with ExitStack() as stack:
        for unit in units:
            stack.enter_context(_gathered_unit(unit, write))
        if units and units[0].packing is not None:  # for a loss that is built here and goes backward when the units have moved
            stack.enter_context(units[0].packing())
        yield


@contextmanager
def _gathered_unit(unit: Unit, write: bool) -> Iterator[None]:
    if unit.updater is not None:
        (unit.updater.drain if write else unit.updater.look)()
    unit.start()
    try:
        unit.unshard(unit.wait())
        try:
            yield
            changed = unit.shard_of(unit.wait()).detach().cpu().clone() if write else None
        finally:
            unit.reshard()
    finally:
        unit.release()
    if changed is not None and not torch.equal(changed.view(torch.uint8), unit.read(Kind.PARAM).view(torch.uint8)):
        _write_back(unit, changed)


def _write_back(unit: Unit, shard: torch.Tensor) -> None:
    master = unit.blocks.get(Kind.MASTER)
    if master is not None and master.written:  # one that was never written is the parameter, widened
        same = unit.read(Kind.PARAM).view(torch.uint8) == shard.view(torch.uint8)
        same = same.view(-1, shard.element_size()).all(dim=1)
        unit.write(Kind.MASTER, torch.where(same, unit.read(Kind.MASTER), shard.float()))
    else:
        unit.write(Kind.PARAM, shard)
