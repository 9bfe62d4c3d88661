"""Finds the units of a model for `wrap`, within the room of the compute device."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn

from infinity.config import Config
from infinity.device import ComputeDevice
from infinity.measure.rates import DTYPES
from infinity.modules.division import Division, divisions, first_fitting
from infinity.modules.grouping import Units
from infinity.placement.decide import Machine
from infinity.placement.demand import Demand, UnitShape, demand_of
from infinity.sharding import collectives
from infinity.sharding.facts import UnitFacts, UnitParameters
from infinity.sharding.ranks import Ranks
from infinity.sharding.tiles import tile_places
from infinity.tier import TIERS
from infinity.tiers.originals import StoredBytes
from infinity.weights.frozen import StoredParameters, find_stored
from infinity.weights.init import Origin, replace_meta
from infinity.weights.load import FirstValues
from infinity.weights.snapshot import Snapshot

log = logging.getLogger("infinity")


class FoundUnits(NamedTuple):
    """The units of a model, before they have memory."""

    facts: list[UnitFacts]
    """The facts of each unit, by its number."""
    users: dict[nn.Module, list[int]]
    """The numbers of the units that each hooked module uses."""
    blocks: dict[nn.Module, str]
    """The repeated blocks of the model, with their names."""
    tiled: list[str]
    """The names of the weights that were put into tiles."""
    empty: Mapping[int, Origin | None]
    """The parameters that were on the meta device, by their ids."""
    demand: Demand
    """The memory that the units ask for, without budgets."""


class UnitSearch:
    """One search for the units of `model`. `snapshot` restores the model. `ranks` include those of
    tensor parallelism. `empty` are the parameters that were on the meta device."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        device: ComputeDevice,
        ranks: Ranks,
        snapshot: Snapshot,
        empty: Mapping[int, Origin | None],
    ) -> None:
        self._model, self._config, self._device = model, config, device
        self._ranks, self._snapshot, self._empty = ranks, snapshot, empty
        self._stored = StoredParameters({}, Counter())

    def find(self, given: Units, values: FirstValues | None, room: float) -> FoundUnits:
        """The first units that fit into `room` bytes of the compute device, else the smallest ones;
        the `given` ones in any case. See `infinity.modules.division`. `values` are the first values
        of parameters, if any are given."""
        model, config = self._model, self._config
        found = divisions(model, config, given, lambda: self._find_stored(values), self._afresh)
        division = first_fitting(found, lambda each: self._asked(each).least().gpu, room)
        self._stored.tell()
        for line in division.describe(room):
            log.info("%s", line)
        tiles = {number: places[0] for number, places in tile_places(model).items()}
        device = self._device.torch
        facts = [
            UnitFacts.of(
                shape,
                UnitParameters(group.parameters, group.stored, tiles),
                self._ranks,
                device,
                config,
            )
            for shape, group in zip(self._shapes(division), division.groups, strict=True)
        ]
        tiled = [] if division.tiled is None else division.tiled.names
        users, demand = dict(division.users), self._asked(division)
        return FoundUnits(facts, users, division.blocks, tiled, self._empty, demand)

    def _find_stored(self, values: FirstValues | None) -> Mapping[int, StoredBytes]:
        config = self._config
        if TIERS[config.parameters].is_drive and config.tuning.read_in_place:
            dtype = DTYPES.get(config.precision)
            self._stored = find_stored(self._model, self._empty, values, dtype)
        return self._stored.places

    @contextmanager
    def _afresh(self) -> Iterator[None]:
        self._snapshot.restore()
        yield
        self._empty = replace_meta(self._model)

    def _asked(self, division: Division) -> Demand:
        """The memory that units of `division` ask of this rank, with no budgets yet."""
        machine = Machine(self._device.unified_memory, self._device.has_kernels)
        exchanges = self._ranks.number > 1 or not machine.unified_memory
        shapes = self._shapes(division)
        return demand_of(shapes, division.nestings, self._config, machine, exchanges)

    def _shapes(self, division: Division) -> list[UnitShape]:
        return division.shapes(collectives.size(self._ranks.shards), self._ranks.rank)
