"""The objects that all units of an engine share."""

from __future__ import annotations

from typing import NamedTuple

from infinity.sharding.exchange import Exchange
from infinity.sharding.gradient_buffer import GradientBuffer
from infinity.sharding.listeners import UnitListeners
from infinity.sharding.ranks import Ranks
from infinity.tiers.store import Store


class UnitServices(NamedTuple):
    """The objects that the units of an engine share."""

    store: Store
    """It is open."""
    ranks: Ranks
    listeners: UnitListeners
    buffer: GradientBuffer | None
    """Collects gradients; None if they go straight to their home."""
    exchange: Exchange | None
    """Joins the collectives of all units and brings gradients home. None if neither other ranks nor
    a discrete device make a thread useful."""
