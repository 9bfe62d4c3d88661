"""Which optimizer updates which parameters of which unit."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

from infinity.errors import ConfigError
from infinity.optim.kernels import Segment
from infinity.optim.step import UnitShare
from infinity.placement.spec import MOMENTS, Kind
from infinity.sharding.unit import Unit
from infinity.tiers.store import Store


class Owner(Protocol):
    """An optimizer that chooses hyper-parameters."""

    by_kernels: ClassVar[bool]
    """Whether `segments` describes the whole update. Such an update may begin at any time."""

    @property
    def clips_by_unit(self) -> bool:
        """Whether the clip factor of a unit depends on the norm of this unit only."""

    def ahead(self, unit: Unit) -> tuple[Segment, ...] | None:
        """The next step's update of this rank's shard of `unit` with its current gradients, from
        the facts that are known before the step. None if the optimizer makes no guess."""


class Owners:
    """Refers weakly to the optimizer of every parameter, and restarts states. Used by the thread
    that runs the model."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._of: dict[Unit, dict[int, weakref.ref[Owner]]] = {}  # by the index of the parameter

    def check_free(self, share: UnitShare, optimizer: Owner) -> None:
        """Raise `ConfigError` when another optimizer updates one of these parameters."""
        self._store.latch.check()
        for index, owner in self._of.get(share.unit, {}).items():
            if index in share.positions and owner() not in (None, optimizer):
                raise ConfigError(
                    f"{share.unit.facts.names[index]} already has an optimizer, "
                    f"{type(owner()).__name__}; a parameter has states for one: use one optimizer "
                    "with several parameter groups, or let go of the other one first"
                )

    def have_left(self, share: UnitShare) -> bool:
        """Whether one of these parameters has states of an optimizer that no longer exists."""
        owners = self._of.get(share.unit, {})
        return any(index in owners and owners[index]() is None for index in share.positions)

    def assign(self, share: UnitShare, optimizer: Owner) -> None:
        """Make `optimizer` the owner of these parameters. Call `check_free` first."""
        self._of.setdefault(share.unit, {}).update(
            (index, weakref.ref(optimizer)) for index in share.positions
        )

    def release(self, optimizer: Owner) -> None:
        """Remove `optimizer`, which was refused, from the owners of its parameters."""
        for owners in self._of.values():
            for index in [index for index, ref in owners.items() if ref() is optimizer]:
                del owners[index]

    def only(self, unit: Unit) -> Owner | None:
        """The optimizer of `unit`, if exactly one optimizer updates its parameters."""
        found = {
            id(owner): owner
            for ref in self._of.get(unit, {}).values()
            if (owner := ref()) is not None
        }
        return next(iter(found.values())) if len(found) == 1 else None

    def beside(
        self, units: Iterable[Unit], optimizers: Sequence[Owner]
    ) -> list[tuple[UnitShare, list[str]]]:
        """The parameters, in units with moments, that none of `optimizers` updates. Each share
        comes with the names of its parameters that another optimizer updates."""
        found = []
        for unit in units:
            if not any(kind in unit.blocks for kind in MOMENTS[unit.facts.algorithm]):
                continue
            owners = {index: owner() for index, owner in self._of[unit].items()}
            rest = [
                index
                for index in range(len(unit.facts.parameters))
                if owners.get(index) not in optimizers
            ]
            if rest:
                found.append(
                    (
                        UnitShare(unit, tuple(rest)),
                        [unit.facts.names[i] for i in rest if owners.get(i) is not None],
                    )
                )
        return found

    def forget_states(self, share: UnitShare, kinds: Iterable[Kind]) -> None:
        """Restart these states of these parameters. The unit keeps the states of parameters that
        belong to other optimizers."""
        owners = self._of.get(share.unit, {})
        alone = not any(
            owner() is not None and index not in share.positions for index, owner in owners.items()
        )
        # Masters may be more precise than parameters that no optimizer updates.
        has_all = len(share.positions) == len(share.unit.facts.parameters)
        for kind in kinds:
            if has_all or (alone and kind is not Kind.MASTER):
                self._store.forget(share.unit.blocks[kind])
            else:
                share.unit.states.restart(kind, share.positions)
