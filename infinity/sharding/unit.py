"""A unit: parameters gathered and released together, and everything the engine keeps for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from infinity.config import Config
from infinity.device import add_alone
from infinity.placement.spec import Kind
from infinity.sharding.exchange import Exchange
from infinity.sharding.facts import UnitFacts
from infinity.sharding.gradient_block import GradientBlock
from infinity.sharding.gradient_buffer import GradientBuffer
from infinity.sharding.gradient_reduction import GradientReduction
from infinity.sharding.gradients import Gradients
from infinity.sharding.on_device import GatheredOnDevice, OnDevice
from infinity.sharding.parameter_data import ParameterData
from infinity.sharding.ranks import ALONE, Ranks
from infinity.sharding.states import States
from infinity.sharding.value import ParameterSource
from infinity.tiers.block import Block
from infinity.tiers.store import Store

Result = TypeVar("Result")


class Border:
    """Whoever ties units to the model, as far as units need that. This base class does nothing."""

    def touched(self, unit: Unit) -> bool:
        """A parameter was touched while its unit is SHARDED: True once it is UNSHARDED."""
        return False

    def records_backward(self) -> bool:
        """Whether code of a backward runs now whose graph may outlive the backward."""
        return False

    def copied(self, unit: Unit, index: int) -> torch.Tensor | None:
        """A copy of parameter `index` inside of a forward or a backward of this thread; None
        outside of both."""
        return None

    def call(self, module: nn.Module, function: Callable[..., Result], *inputs: Any) -> Result:
        """`function(*inputs)`, with the parameters of `module` there as in a call of it."""
        return function(*inputs)

    def packing(self) -> AbstractContextManager[object]:
        """The context in which autograd saves views of units so that these may move."""
        return nullcontext()

    def check_thread(self, what: str) -> None:
        """Raise `RuntimeError` when another thread is inside of a forward or backward; `what` the
        caller wants to do."""

    def end_interrupted(self, what: str) -> None:
        """End what an exception cut off, whose uses would be in the way; raises like
        `check_thread`."""


class Updates:
    """Whoever updates units, as far as a unit tells or asks it something. This base class adds
    alone, and does nothing else."""

    def gradients_came(self, unit: Unit) -> None:
        """`unit` has as many gradients as it had in the last step: they may be final."""

    def square_ahead(self, unit: Unit, all_came: bool) -> float | None:
        """The sum of squares of the gradients of `unit`, if that is worth having before the step;
        `all_came` where there are as many as in the last step."""
        return None

    def add_gradients(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`target.add_(source)` for contiguous tensors (n,) of one dtype, with any number of
        threads."""
        add_alone(target, source)

    def rollback(self, unit: Unit) -> None:
        """Return when no speculative update of `unit` is in flight, because what it began with
        changes."""

    def await_readers(self, unit: Unit) -> None:
        """Return when no update reads the gradients of `unit`; the caller brings no place for
        it."""

    def before_write(self, blocks: Sequence[Block]) -> None:
        """`blocks` are about to be rewritten, outside of a step: return when they may be."""

    def drain(self) -> None:
        """Return when no update is under way, and what was begun before its step is rolled back;
        all others are seen."""

    def look(self) -> None:
        """Return when parameters may be read."""


class Grads:
    """Whoever answers for `.grad` of the parameters of a unit. This base class has none."""

    def get(self, unit: Unit, index: int) -> torch.Tensor | None:
        """`.grad` of parameter `index`."""
        return None

    def set(self, unit: Unit, index: int, value: torch.Tensor | None) -> None:
        """Set `.grad` of parameter `index`; None forgets it."""

    def fetch(self, unit: Unit, index: int) -> torch.Tensor | None:
        """A copy of `.grad` on the host, whole."""
        return None

    def changing(
        self,
        unit: Unit,
        indices: Iterable[int],
        change: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        """The gradients of these parameters are about to change. `change` does the same to a tensor
        in place; without it they are replaced."""

    def forgetting(self, unit: Unit, indices: Iterable[int]) -> None:
        """The gradients of these parameters are about to be forgotten."""

    def settled(self, unit: Unit) -> None:
        """The gradients of `unit` are final, as far as the engine knows of them."""


class UnitListeners:
    """Who is told of what happens to the units of an engine, and asked for what these cannot know.

    All units of an engine have one. The listeners come last (`connect`): they are made of units
    that are filled. Until then a unit tells nobody.
    """

    def __init__(self) -> None:
        self.updates, self.border, self.grads = Updates(), Border(), Grads()

    def connect(self, updates: Updates, border: Border, grads: Grads) -> None:
        """Tell these from now on."""
        self.updates, self.border, self.grads = updates, border, grads


class _Ties:
    """Ties the parts of a unit to its other parts, and to the listeners of the engine."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def await_gradients(self) -> None:
        self.unit.gradients.wait()

    def rollback(self) -> None:
        self.unit.rollback()

    def drain(self) -> None:
        self.unit.listeners.updates.drain()

    def before_write(self, blocks: Sequence[Block]) -> None:
        self.unit.listeners.updates.before_write(blocks)

    def await_readers(self) -> None:
        self.unit.listeners.updates.await_readers(self.unit)

    def add_gradients(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.unit.listeners.updates.add_gradients(target, source)

    def square_ahead(self, all_came: bool) -> float | None:
        return self.unit.listeners.updates.square_ahead(self.unit, all_came)

    def gradients_came(self) -> None:
        self.unit.listeners.updates.gradients_came(self.unit)

    def changing(
        self, indices: Iterable[int], change: Callable[[torch.Tensor], object] | None = None
    ) -> None:
        self.unit.listeners.grads.changing(self.unit, indices, change)

    def forgetting(self, indices: Iterable[int]) -> None:
        self.unit.listeners.grads.forgetting(self.unit, indices)

    def outdate(self) -> None:
        self.unit.outdate()

    def renew(self) -> None:
        self.unit.on_device.renew()

    def touched(self) -> bool:
        return self.unit.listeners.border.touched(self.unit)

    def records_backward(self) -> bool:
        return self.unit.listeners.border.records_backward()

    def copied(self, index: int) -> torch.Tensor | None:
        return self.unit.listeners.border.copied(self.unit, index)

    def check_thread(self, what: str) -> None:
        self.unit.listeners.border.check_thread(what)

    def look(self) -> None:
        self.unit.listeners.updates.look()

    def get_grad(self, index: int) -> torch.Tensor | None:
        return self.unit.listeners.grads.get(self.unit, index)

    def set_grad(self, index: int, value: torch.Tensor | None) -> None:
        self.unit.listeners.grads.set(self.unit, index, value)

    def end_interrupted(self, caller: str) -> None:
        self.unit.listeners.border.end_interrupted(caller)


class UnitServices(NamedTuple):
    """What the units of an engine share."""

    store: Store
    """It is open."""
    ranks: Ranks
    listeners: UnitListeners
    buffer: GradientBuffer | None
    """How gradients travel; None where they go straight into their home."""
    exchange: Exchange | None
    """It joins the collectives of all units, and brings gradients home. None where neither other
    ranks nor a discrete device make it worth a thread."""


def declare(facts: UnitFacts, store: Store, config: Config) -> dict[Kind, Block]:
    """Add the blocks of a unit to the store: parameters, and for a trainable unit gradients, master
    and moments."""
    return {
        spec.kind: store.add(spec, facts.extent_in_files(spec.nbytes))
        for spec in facts.shape.blocks(config)
    }


class Unit:
    """Parameters of one dtype, all trainable or all frozen, in one flat buffer of which this rank
    keeps its shard.

    Lives as long as the engine. Its parts are `on_device` (brings the parameters), `data` (what the
    parameters point at), `gradients` and `states`. No part knows the unit: each is given facts,
    and tells a listener.
    """

    def __init__(
        self, facts: UnitFacts, blocks: Mapping[Kind, Block], services: UnitServices
    ) -> None:
        """Of the `blocks` that `declare` gave, once the store is open."""
        self.facts, self.blocks = facts, blocks
        # The facts that callers ask most.
        self.index, self.name, self.rank = facts.index, facts.name, facts.rank
        self.names, self.keys, self.parameters = facts.names, facts.keys, facts.parameters
        self.dtype, self.gradient_dtype = facts.dtype, facts.gradient_dtype
        self.layout, self.trainable = facts.layout, facts.trainable
        self.algorithm = facts.algorithm

        self.store, self.ranks = services.store, services.ranks
        self.listeners, self.exchange = services.listeners, services.exchange
        store, exchange, ties = services.store, services.exchange, _Ties(self)
        parameters = blocks[Kind.PARAM]
        self.on_device = (
            GatheredOnDevice(facts, parameters, store, exchange)
            if facts.shared and exchange is not None
            else OnDevice(facts, parameters, store)
        )
        """Brings the parameters."""
        block = GradientBlock(facts, blocks, store, ties.add_gradients)
        reduction = None if exchange is None else GradientReduction(facts, block, exchange)
        at_home = facts.reduces_late and facts.trainable and blocks[Kind.GRAD].tier.is_device
        buffer = None if at_home else services.buffer
        self.gradients = Gradients(facts, block, buffer, reduction, ties)
        """Those of the step under way."""
        self.states = States(facts, blocks, store, exchange if facts.shared else None, ties)
        """What its blocks hold, on the host."""
        self.data = ParameterData(
            facts, parameters, store.addresses, self.states, self.on_device, ties
        )
        """What the parameters point at."""

    @property
    def tier(self) -> str:
        """Where its parameters are at home; "" once the engine is closed."""
        return self.data.tier

    def position(self, parameter: torch.Tensor) -> int:
        """The index of one of this unit's parameters."""
        return self.data.index_of(parameter)

    def name_of(self, parameter: torch.Tensor) -> str:
        """The qualified name of one of this unit's parameters."""
        return self.data.name_of(parameter)

    def changed(self) -> list[str]:
        """The names of parameters that were written to while nobody may, each told once. The copy
        is not used again."""
        names = [self.names[index] for index in self.data.changed()]
        if names:
            self.outdate()
            self.on_device.discard()
        return names

    def rollback(self) -> None:
        """What a speculative update of the unit was begun with changes; return when nothing of it
        is in flight."""
        self.listeners.updates.rollback(self)

    def outdate(self) -> None:
        """The content changes, and the other ranks' parts of it, too."""
        self.on_device.outdate()
        self.data.outdate()

    def close(self) -> None:
        """The engine was closed: the parameters keep shape and dtype, and have no data on any
        tier."""
        self.on_device.outdate()
        # A gloo group that lives until the interpreter ends may abort the process there (torch
        # 2.13).
        self.ranks = ALONE
        self.data.close()


def unit_of(source: ParameterSource) -> Unit:
    """The unit whose data `source` is."""
    ties = source.listener
    if not isinstance(ties, _Ties):
        raise TypeError(f"{source.facts.name} has no unit")
    return ties.unit
