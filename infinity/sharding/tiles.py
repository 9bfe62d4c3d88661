"""Weights in tiles: one tensor for people, some parameters for the engine.

[Note: the weight that people see]
A `TiledWeight` answers shape, dtype and device, and has no memory. What reads it gets its tiles
joined; what writes it in place writes them. Where the tiles lie side by side in one memory, as
before `wrap`, they are joined without a copy. Elsewhere a view of what was joined would be a view
of a copy. So it is a `ReadOnlyCopy`, which raises when it is written.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_iter, tree_map

from infinity.errors import ConfigError
from infinity.sharding.copied import read_only, writes
from infinity.sharding.parameter import METADATA
from infinity.sharding.tensor_parallel import LocalPart, part_within

_WAY = (
    "a copy of a weight in tiles was changed in place, which would be lost; change the weight "
    "itself (weight.copy_(...), weight[rows] = ...)"
)


class TilePlace(NamedTuple):
    """Where a tile lies in the parameter `name` of `shape`: from `begin` to `end` along
    `dimension`."""

    name: str
    shape: tuple[int, ...]
    dimension: int
    begin: int
    end: int

    @property
    def bounds(self) -> tuple[slice, ...]:
        """The indices that take the tile out of the whole."""
        return (*[slice(None)] * self.dimension, slice(self.begin, self.end))

    @property
    def part(self) -> LocalPart:
        """The same as a part of a matrix. It has no room for more."""
        return part_within(self.shape, self.dimension, self.begin, self.end, self.end - self.begin)


class TiledWeight(torch.Tensor):
    """A parameter that lies in the `weight` of some `tiles`, one after the other along `dimension`.
    See [Note: the weight that people see]."""

    _is_param = True  # for `isinstance(weight, nn.Parameter)`
    tiles: tuple[Any, ...]
    dimension: int

    @staticmethod
    def __new__(cls, tiles: Sequence[Any], dimension: int) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            some = torch.empty((), dtype=tiles[0].weight.dtype, device=tiles[0].weight.device)
            made = some.expand(_shape(tiles, dimension)).as_subclass(cls)
        made.tiles = tuple(tiles)
        made.dimension = dimension
        return made

    def __init__(self, tiles: Sequence[Any], dimension: int) -> None:
        pass

    @property
    def pieces(self) -> list[torch.Tensor]:
        """The parameters of the tiles."""
        return [tile.weight for tile in self.tiles]

    def divided(self, value: torch.Tensor) -> list[torch.Tensor]:
        """`value`, a tensor of the whole shape, as views for each tile. Raises `RuntimeError` for
        another shape."""
        if tuple(value.shape) != tuple(self.shape):
            raise RuntimeError(
                f"a weight in tiles has shape {tuple(self.shape)}, and was given "
                f"{tuple(value.shape)}"
            )
        sizes = [piece.shape[self.dimension] for piece in self.pieces]
        return list(value.split(sizes, self.dimension))

    def cat(
        self, values: Sequence[torch.Tensor | None], dimension: int | None = None
    ) -> torch.Tensor | None:
        """What there is of each tile as one tensor, along `dimension` where that is another one;
        None where there is not all of it."""
        there = [value for value in values if value is not None]
        along = self.dimension if dimension is None else dimension
        return torch.cat(there, along) if len(there) == len(self.tiles) else None

    def joined(self) -> torch.Tensor:
        """Its values; without a copy if the tiles lie side by side and autograd does not watch."""
        shared = self._shared()
        return torch.cat(self.pieces, self.dimension) if shared is None else shared

    def is_one_memory(self) -> bool:
        """Whether the tiles lie side by side."""
        return _side_by_side(self.pieces, self.dimension) is not None

    def _shared(self) -> torch.Tensor | None:
        """Its values in the memory of the tiles; None where that is impossible."""
        pieces = self.pieces
        tracked = torch.is_grad_enabled() and any(p.requires_grad for p in pieces)
        return None if tracked else _side_by_side(pieces, self.dimension)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Parameter containing:\nTiledWeight({tuple(self.shape)}, {len(self.tiles)} tiles)"

    def __deepcopy__(self, memo: dict[int, Any]) -> TiledWeight:
        made = type(self)(copy.deepcopy(self.tiles, memo), self.dimension)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), (self.tiles, self.dimension)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        accessor = name in ("__get__", "__set__")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if accessor else ""
        if args and isinstance(args[0], TiledWeight):
            answer = _ANSWERS.get(attribute or name)
            if answer is not None:
                return answer(args[0], *args[1:], **kwargs)
            if (attribute or name) in METADATA and name != "__set__":
                return func(args[0]._stand_in(), *args[1:], **kwargs)
        return _on_joined(func, args, kwargs, writes(name))

    def _stand_in(self) -> torch.Tensor:
        """A tensor of its shape, dtype and device, of one element of memory."""
        first = self.tiles[0].weight
        some = torch.empty((), dtype=first.dtype, device=first.device)
        return some.expand(_shape(self.tiles, self.dimension))


class JoinedTiles:
    """Puts tiles together, which come in any order."""

    def __init__(self) -> None:
        self._under_way: dict[str, tuple[torch.Tensor, int]] = {}

    def add(self, tile: TilePlace, value: torch.Tensor) -> torch.Tensor | None:
        """The whole that `tile` is of, once its last tile has come."""
        whole, left = self._under_way.pop(tile.name, (None, tile.shape[tile.dimension]))
        if whole is None:
            whole = torch.empty(tile.shape, dtype=value.dtype)
        whole[tile.bounds].copy_(value)
        left -= tile.end - tile.begin
        if left == 0:
            return whole
        self._under_way[tile.name] = whole, left
        return None


def pieces_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """`parameters`, with the tiles of each that is in tiles."""
    found: list[torch.Tensor] = []
    for parameter in parameters:
        found += parameter.pieces if isinstance(parameter, TiledWeight) else [parameter]
    return found


def _shape(tiles: Sequence[Any], dimension: int) -> tuple[int, ...]:
    shapes = [tuple(tile.weight.shape) for tile in tiles]
    length = sum(shape[dimension] for shape in shapes)
    return (*shapes[0][:dimension], length, *shapes[0][dimension + 1 :])


def _side_by_side(pieces: Sequence[torch.Tensor], dimension: int) -> torch.Tensor | None:
    """All `pieces` as one detached tensor without a copy; None where that is impossible."""
    if not all(type(piece) in (torch.Tensor, nn.Parameter) for piece in pieces):
        return None
    first = pieces[0]
    storage, stride = first.untyped_storage(), first.stride()
    end = first.storage_offset()
    for piece in pieces:
        here = piece.untyped_storage()._cdata == storage._cdata and piece.stride() == stride
        if not here or piece.storage_offset() != end or piece.dtype is not first.dtype:
            return None
        end += piece.shape[dimension] * stride[dimension]
    length = sum(piece.shape[dimension] for piece in pieces)
    shape = (*first.shape[:dimension], length, *first.shape[dimension + 1 :])
    empty = torch.empty(0, dtype=first.dtype, device=first.device)
    return empty.set_(storage, first.storage_offset(), shape, stride)


def _on_joined(func: Callable[..., Any], args: Any, kwargs: Any, in_place: bool) -> Any:
    """`func` on values; what it writes in place is written to the tiles."""
    if any(isinstance(value, TiledWeight) for value in tree_iter(kwargs.get("out"))):
        raise ConfigError("a weight in tiles cannot be out=; give weight.copy_(...) the result")
    # Functions of torch.nn.init give it by name.
    first = next(iter((*args, *kwargs.values())), None) if in_place else None
    written = first if isinstance(first, TiledWeight) else None
    values = dict[int, torch.Tensor]()
    copies: list[torch.Tensor] = []

    def value_of(given: Any) -> Any:
        if not isinstance(given, TiledWeight):
            return given
        if id(given) not in values:
            shared = None if given is written else given._shared()
            if shared is None:
                shared = torch.cat(given.pieces, given.dimension)
                copies.append(shared)
            values[id(given)] = shared
        return values[id(given)]

    with torch.set_grad_enabled(torch.is_grad_enabled() and written is None):
        given, named = tree_map(value_of, (tuple(args), kwargs))
        found = func(*given, **named)
        if written is None:
            return read_only(found, copies, _WAY)
        parts = written.divided(values[id(written)])
        for piece, part in zip(written.pieces, parts, strict=True):
            piece.copy_(part)
    return written


# What a weight in tiles answers itself


def _requires_grad(weight: TiledWeight, *value: bool) -> bool | None:
    if not value:
        return any(piece.requires_grad for piece in weight.pieces)
    for piece in weight.pieces:
        piece.requires_grad = value[0]
    return None


def _requires_grad_(weight: TiledWeight, requires_grad: bool = True) -> TiledWeight:
    _requires_grad(weight, requires_grad)
    return weight


def _grad(weight: TiledWeight, *value: torch.Tensor | None) -> torch.Tensor | None:
    if value:
        pieces = weight.pieces
        given = [None] * len(pieces) if value[0] is None else weight.divided(value[0])
        for piece, part in zip(pieces, given, strict=True):
            piece.grad = part
        return None
    return weight.cat([piece.grad for piece in weight.pieces])


def _detach(weight: TiledWeight) -> TiledWeight:
    with torch.no_grad():
        tiles = [SimpleNamespace(weight=piece.data) for piece in weight.pieces]
    return TiledWeight(tiles, weight.dimension)


def _data(weight: TiledWeight, *value: torch.Tensor) -> TiledWeight | None:
    if not value:
        return _detach(weight)
    given = value[0]
    parts = given.pieces if isinstance(given, TiledWeight) else weight.divided(given)
    for piece, part in zip(weight.pieces, parts, strict=True):
        piece.data = part
    return None


def _refuse_hook(weight: TiledWeight, *_: Any, **__: Any) -> None:
    raise ConfigError("a weight in tiles has no gradient of its own; register hooks on its tiles")


_ANSWERS: dict[str, Callable[..., Any]] = {
    "requires_grad": _requires_grad,
    "requires_grad_": _requires_grad_,
    "grad": _grad,
    "data": _data,
    "detach": _detach,
    "register_hook": _refuse_hook,
    "register_post_accumulate_grad_hook": _refuse_hook,
    "__hash__": lambda weight: id(weight),
}
