"""How the parameters of a model are divided into units: in blocks, and ever finer.

[Note: units that are too large]
The compute device has to hold the units that are in use at once, and the next one. Where it does
not, the largest blocks become a unit for each of their modules. That changes no bits. Where this
is not enough, large weights become tiles (`tiles/tiling`), of half the largest unit, of a quarter
and so on. That changes the rounding of input gradients. Neither goes below `LEAST_SPLIT`. What is
left is refused by `place`. All follows from the configuration, from shapes, and from what is free
on the rank that has least, so all ranks do alike. `infinity plan` takes the same divisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeVar

from torch import nn

from infinity.config import Config
from infinity.errors import ConfigError
from infinity.measure.rates import DTYPES
from infinity.modules.grouping import (
    Group,
    Units,
    find_nestings,
    find_owners,
    find_users,
    group_parameters,
    join_small,
)
from infinity.placement.demand import UnitShape
from infinity.placement.spec import Format
from infinity.quantities import format_bytes
from infinity.sharding.codec import stored_as
from infinity.sharding.layout import FlatLayout
from infinity.sharding.tensor_parallel import local, part_of
from infinity.sharding.tiles import Tile
from infinity.tiers.originals import StoredBytes
from infinity.tiles.tiling import Tiled, tile_largest
from infinity.weights.frozen import all_frozen

LEAST_SPLIT = 16 << 20
"""Bytes of a unit below which it is not made smaller: collectives and I/O get slow."""

Each = TypeVar("Each")


class Division(NamedTuple):
    """The units that the parameters of a model form, and the modules that use them."""

    groups: list[Group]
    """The unit of each number."""

    owners: dict[str, nn.Module]
    """The modules whose parameters form units, by name."""

    blocks: dict[nn.Module, str]
    """The blocks that are units where there is room for them, with their names."""

    users: dict[nn.Module, list[int]]
    """The units that each module to be hooked uses."""

    nestings: set[frozenset[int]]
    """The units in use at once, for each module."""

    split: int
    """How many blocks are a unit for each of their modules."""

    tiled: Tiled | None
    """The weights that are in tiles for this division."""

    def shapes(self, shards: int, rank: int) -> list[UnitShape]:
        """What placement has to know of each unit, of which rank number `rank` has one of so many
        shards."""
        return [_shape(index, group, shards, rank) for index, group in enumerate(self.groups)]

    def describe(self, room: float) -> list[str]:
        """Lines for a log: what was made finer for `room` bytes of the compute device."""
        lines = []
        if self.split:
            lines.append(
                f"{self.split} blocks of more than {format_bytes(LEAST_SPLIT)} are a unit for each "
                f"of their modules, because {format_bytes(room)} of the compute device hold no more"
            )
        if self.tiled is not None and self.tiled.names:
            lines.append(f"{self.tiled.describe()}; gradients of their inputs round otherwise")
        return lines


def divisions(
    model: nn.Module,
    config: Config,
    given: Units = None,
    find_stored: Callable[[], Mapping[int, StoredBytes]] = dict,
    afresh: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Iterator[Division]:
    """Divisions of the parameters of `model`, each finer than the one before; only one where its
    units are `given`. See [Note: units that are too large].

    `find_stored` says which parameters lie in files of the user, by their ids. For each division
    with tiles the model is cut when it is asked for, inside of `afresh`, where it has to be as it
    was found, without the tiles of the division before. Raises `ConfigError` for a model without
    parameters.
    """
    dtype = DTYPES.get(config.precision)

    whole = find_owners(model, given)
    blocks = {o: n for n, o in whole.items() if o is not model and not isinstance(o, Tile)}

    def divided(owners: dict[str, nn.Module], tiled: Tiled | None = None) -> Division:
        with all_frozen(model) if config.inference else nullcontext():
            groups = group_parameters(model, owners, dtype, find_stored())
        if not groups:
            raise ConfigError("the model has no parameters to manage")
        if given is None:
            groups = join_small(groups, owners)
        numbers = {id(p): index for index, group in enumerate(groups) for _, p in group.parameters}
        users = find_users(model, owners, numbers)
        nestings = find_nestings(model, users)
        return Division(groups, owners, blocks, users, nestings, len(split), tiled)

    split: set[str] = set()
    division = divided(whole)
    yield division
    if given is not None:
        return
    sizes = {
        name: sum(p.numel() * stored_as(p, dtype).itemsize for p in owner.parameters())
        for name, owner in whole.items()
    }
    for size in sorted({n for n in sizes.values() if n > LEAST_SPLIT}, reverse=True):
        split = {name for name, n in sizes.items() if n >= size}
        division = divided({n: o for n, o in whole.items() if n not in split})
        yield division
    most = max(shape.nbytes for shape in division.shapes(1, 0))
    while most > LEAST_SPLIT:
        most = max(most // 2, LEAST_SPLIT)
        with afresh():
            tiled = tile_largest(model, most, lambda weight: stored_as(weight, dtype).itemsize)
        yield divided({n: o for n, o in find_owners(model).items() if n not in split}, tiled)


def first_fitting(candidates: Iterable[Each], least: Callable[[Each], int], room: float) -> Each:
    """The first of `candidates` that needs at `least` no more than `room` bytes of the compute
    device, else the last one. There is one at least."""
    for each in candidates:
        found = each
        if least(each) <= room:
            break
    return found


def _shape(index: int, group: Group, shards: int, rank: int) -> UnitShape:
    """As `Unit.shape` of the unit that `group` becomes."""
    parameters = [p for _, p in group.parameters]
    shapes, rooms = [local(p).shape for p in parameters], [part_of(p).room for p in parameters]
    form = Format(str(group.dtype).removeprefix("torch."), 1, group.dtype.itemsize)
    numel = FlatLayout(shapes, shards, rooms, group.dtype.itemsize).numel
    return UnitShape(
        index, group.name, numel, shards, rank, form, group.trainable, bool(group.stored)
    )
