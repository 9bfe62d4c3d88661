"""Reading and changing parameters outside of their module's forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from infinity.optim.step import Updater
from infinity.sharding.parameter import ShardedParameter
from infinity.tiers.block import Kind


@contextmanager
def gathered(target: nn.Module | torch.Tensor | Sequence[torch.Tensor], *, write: bool = False) -> Iterator[None]:
    """Make the data of a wrapped module's parameters, of one parameter or of several, readable inside the block.

    With `write`, what the block leaves in them becomes their value, and the fp32 master follows it. They are held on the
    compute device at once, with what shares their units: `BudgetError` when that does not fit. Waits for pending updates.
    Plain parameters are left as they are. With several ranks every rank must enter, and write the same values.
    """
    parameters: list[torch.Tensor]
    if isinstance(target, nn.Module):
        parameters = list(target.parameters())
    else:
        parameters = [target] if isinstance(target, torch.Tensor) else list(target)
    units = list(dict.fromkeys(type(p).unit for p in parameters if isinstance(p, ShardedParameter)))
    with ExitStack() as stack:
        for unit in units:
            if isinstance(unit.updater, Updater):
                unit.updater.drain()
            unit.start()
            stack.callback(unit.release)
            unit.unshard(unit.wait())
            stack.callback(unit.reshard)
        yield
        changed = [(unit, unit.wait().detach().cpu().clone()) for unit in units] if write else []
    for unit, flat in changed:
        unit.write(Kind.PARAM, unit.shard_of(flat))
        if Kind.MASTER in unit.blocks:  # a master that was never written is the parameter, widened
            unit.store.forget(unit.blocks[Kind.MASTER])
