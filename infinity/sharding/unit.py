"""A unit: parameters that are gathered and released together, and all that the engine keeps for
them."""

from __future__ import annotations

from collections.abc import Mapping

from infinity.config import Config
from infinity.placement.spec import Kind
from infinity.sharding.facts import UnitFacts
from infinity.sharding.gradient_block import GradientBlock
from infinity.sharding.gradient_reduction import GradientReduction
from infinity.sharding.gradients import Gradients
from infinity.sharding.on_device import GatheredOnDevice, OnDevice
from infinity.sharding.parameter_data import ParameterData
from infinity.sharding.ranks import ALONE
from infinity.sharding.services import UnitServices
from infinity.sharding.states import States
from infinity.sharding.update_blocks import UpdateBlocks
from infinity.sharding.value import ParameterSource
from infinity.tiers.block import Block
from infinity.tiers.store import Store


def declare(facts: UnitFacts, store: Store, config: Config) -> dict[Kind, Block]:
    """Add the blocks of a unit to the store: parameters, and for a trainable unit gradients, master
    and moments."""
    return {
        spec.kind: store.add(spec, facts.extent_in_files(spec.nbytes))
        for spec in facts.shape.blocks(config)
    }


class Unit:
    """Parameters of one dtype, all trainable or all frozen, in one flat buffer. This rank keeps its
    shard of the buffer.

    Lives as long as the engine. Its parts are `on_device` (brings the parameters), `data` (the
    tensors of the parameters), `gradients`, `states` and `update_blocks`. No part uses the unit:
    each gets facts and listeners.
    """

    def __init__(
        self, facts: UnitFacts, blocks: Mapping[Kind, Block], services: UnitServices
    ) -> None:
        """`blocks` are those of `declare`. The store is open."""
        self.facts, self.blocks = facts, blocks
        self.store, self.ranks = services.store, services.ranks
        self.listeners, self.exchange = services.listeners, services.exchange
        store, exchange, listeners = services.store, services.exchange, services.listeners
        parameters = blocks[Kind.PARAM]
        self.on_device = (
            GatheredOnDevice(facts, parameters, store, exchange)
            if facts.shared and exchange is not None
            else OnDevice(facts, parameters, store)
        )
        """Brings the parameters."""
        block = GradientBlock(facts, blocks, store, listeners)
        reduction = None if exchange is None else GradientReduction(facts, block, exchange)
        at_home = facts.reduces_late and facts.trainable and blocks[Kind.GRAD].tier == "gpu"
        buffer = None if at_home else services.buffer
        self.gradients = Gradients(facts, block, buffer, reduction, listeners, self.outdate)
        """The gradients of the step under way."""
        self.update_blocks = UpdateBlocks(facts, blocks, store)
        """Its blocks, as an update finds them."""
        self.states = States(facts, blocks, services, self.gradients.wait, self.outdate)
        """The content of its blocks, on the host."""
        self.data = ParameterData(self, facts, parameters, services, self.states, self.on_device)
        """The tensors of the parameters."""

    def changed(self) -> list[str]:
        """The names of parameters with a forbidden write, each reported once. Such a copy is
        dropped."""
        names = [self.facts.names[index] for index in self.data.changed()]
        if names:
            self.outdate()
            self.on_device.discard()
        return names

    def outdate(self) -> None:
        """The content changes, on all ranks."""
        self.on_device.outdate()
        self.data.outdate()

    def close(self) -> None:
        """The engine was closed: the parameters keep shape and dtype, and have no data."""
        self.on_device.outdate()
        # A gloo group that lives until the interpreter ends may abort the process there (torch
        # 2.13).
        self.ranks = ALONE
        self.data.close()


def unit_of(source: ParameterSource) -> Unit:
    """The unit whose data `source` is."""
    unit = source.owner
    if not isinstance(unit, Unit):
        raise TypeError(f"{source.facts.name} has no unit")
    return unit
