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
    """An optimizer: it decides on hyper-parameters."""

    by_kernels: ClassVar[bool]
    """Whether `segments` says all that is done, so that it may begin at any time."""

    @property
    def clips_by_unit(self) -> bool:
        """Whether the norm of a unit alone clips it."""

    def ahead(self, unit: Unit) -> tuple[Segment, ...] | None:
        """What the next step does to this rank's shard of `unit`, with the gradients that it has
        now, as far as is known before the step; None where it is not worth a guess."""


class Owners:
    """Remembers the optimizer of every parameter, weakly, and lets states begin anew. For the
    thread that runs the model."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._of: dict[Unit, dict[int, weakref.ref[Owner]]] = {}  # by the index of the parameter

    def check_free(self, share: UnitShare, optimizer: Owner) -> None:
        """Raise `ConfigError` when another optimizer updates one of these parameters."""
        self._store.latch.check()
        for index, owner in self._of.get(share.unit, {}).items():
            if index in share.positions and owner() not in (None, optimizer):
                raise ConfigError(
                    f"{share.unit.names[index]} already has an optimizer, "
                    f"{type(owner()).__name__}; a parameter has states for one: use one optimizer "
                    "with several parameter groups, or let go of the other one first"
                )

    def have_left(self, share: UnitShare) -> bool:
        """Whether one of these parameters had an optimizer that is gone, so that it has states of
        that."""
        owners = self._of.get(share.unit, {})
        return any(index in owners and owners[index]() is None for index in share.positions)

    def assign(self, share: UnitShare, optimizer: Owner) -> None:
        """`optimizer` updates these parameters from now on; see `check_free`."""
        self._of.setdefault(share.unit, {}).update(
            (index, weakref.ref(optimizer)) for index in share.positions
        )

    def release(self, optimizer: Owner) -> None:
        """`optimizer` was refused: its parameters are as if it had never been made."""
        for owners in self._of.values():
            for index in [index for index, ref in owners.items() if ref() is optimizer]:
                del owners[index]

    def only(self, unit: Unit) -> Owner | None:
        """The optimizer of `unit`, where there is one for all that any updates."""
        found = {
            id(owner): owner
            for ref in self._of.get(unit, {}).values()
            if (owner := ref()) is not None
        }
        return next(iter(found.values())) if len(found) == 1 else None

    def beside(
        self, units: Iterable[Unit], optimizers: Sequence[Owner]
    ) -> list[tuple[UnitShare, list[str]]]:
        """What `units`, if they have moments, have beside the parameters of `optimizers`; and those
        names of it that another optimizer updates."""
        found = []
        for unit in units:
            if not any(kind in unit.blocks for kind in MOMENTS[unit.algorithm]):
                continue
            owners = {index: owner() for index, owner in self._of[unit].items()}
            rest = [
                index
                for index in range(len(unit.parameters))
                if owners.get(index) not in optimizers
            ]
            if rest:
                found.append(
                    (
                        UnitShare(unit, tuple(rest)),
                        [unit.names[i] for i in rest if owners.get(i) is not None],
                    )
                )
        return found

    def forget_states(self, share: UnitShare, kinds: Iterable[Kind]) -> None:
        """These states of these parameters begin anew. Those that the unit has of other optimizers'
        parameters stay."""
        owners = self._of.get(share.unit, {})
        alone = not any(
            owner() is not None and index not in share.positions for index, owner in owners.items()
        )
        # Masters may say more than parameters that nobody updates.
        has_all = len(share.positions) == len(share.unit.parameters)
        for kind in kinds:
            if has_all or (alone and kind is not Kind.MASTER):
                self._store.forget(share.unit.blocks[kind])
            else:
                share.unit.states.restart(kind, share.positions)
