"""Weights in tiles: one tensor for users, several parameters for the engine.

[Note: the weight that users see]
A `TiledWeight` is a handle without memory (`LazyTensor`). A read joins its tiles. A write in place
writes the tiles. If the tiles lie side by side in one memory, as before `wrap`, a read makes no
copy.

[Note: a weight in tiles and autograd]
Autograd sees the handle as the output of a node, `_Join`, that leads to the tiles. So a custom
function or a checkpoint that gets the weight brings gradients of the tiles. Each time a module
returns its weight, a new node is made (`TiledWeight.relink`). It leads to the current accumulators
of the tiles, and is late enough in the order of the graph.

`torch.autograd.grad(loss, [weight])` and `loss.backward(inputs=[weight])` get the tiles in its
place. Some versions of torch do not ask the weight in `backward`, and have it retain its gradient.
`TiledWeight.retains` detects that, and the backward raises at its end.
"""

from __future__ import annotations

import copy
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter, tree_map

from infinity.compilation import frames
from infinity.errors import ConfigError, ShardedParameterError
from infinity.sharding import backwards
from infinity.sharding.compiled import makes_graph
from infinity.sharding.copied import writes
from infinity.sharding.joined import JoinedTensor
from infinity.sharding.layout import TilePlace
from infinity.sharding.lazy_tensor import LazyTensor, brought
from infinity.sharding.parameter import MADE, METADATA, ShardedParameter

_WAY = (
    "a copy of a weight in tiles was changed in place, which would be lost; change the weight "
    "itself (weight.copy_(...), weight[rows] = ...)"
)


IN_TILES = "_in_tiles"
"""The attribute of a module with its weights in tiles, by name."""


class Tile(nn.Module):
    """Some rows or columns of a weight. Its forward computes a given function with them."""

    weight: nn.Parameter

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, run: Any, *given: Any) -> Any:
        """`run(weight, *given)`."""
        return run(self.weight, *given)

    def _save_to_state_dict(self, *_: Any) -> None:
        """Saves nothing: the module of the weight saves it whole."""

    def _load_from_state_dict(self, *_: Any) -> None:
        """Loads nothing: the module of the weight loads it whole."""


class TiledWeight(LazyTensor):
    """A parameter that lies in the `weight` of some `tiles`, one after the other along `dimension`.
    See [Note: the weight that users see]."""

    _is_param = True  # for `isinstance(weight, nn.Parameter)`
    way = _WAY
    answers_backwards = True
    tiles: tuple[Any, ...]
    dimension: int
    _joined_gradient: Callable[[], JoinedTensor | None] = staticmethod(lambda: None)

    @staticmethod
    def __new__(cls, tiles: Sequence[Any], dimension: int) -> Any:
        first = tiles[0].weight
        made = cls.without_data(_shape(tiles, dimension), first.dtype, first.device)
        made.tiles = tuple(tiles)
        made.dimension = dimension
        return made

    def __init__(self, tiles: Sequence[Any], dimension: int) -> None:
        pass

    def kept_gradient(self) -> torch.Tensor | None:
        """The gradients of its tiles, joined; None if a tile has none."""
        return _grad(self)

    def fetch(self) -> torch.Tensor:
        pieces = self.pieces
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            values = [p.values() if isinstance(p, LazyTensor) else p.detach() for p in pieces]
            return torch.cat(values, self.dimension)

    def detached(self) -> DetachedTiles:
        made = DetachedTiles(self)
        self.note(made)
        return made

    def note(self, handle: torch.Tensor) -> None:
        """`handle` has the values of the tiles. A step outdates graphs that have saved it."""
        for piece in self.pieces:
            if isinstance(piece, ShardedParameter):
                type(piece).source.note(handle)

    def check_replace(self) -> None:
        """Raise `ShardedParameterError` while the tiles have no data."""
        for piece in self.pieces:
            if isinstance(piece, LazyTensor):
                piece.check_replace()

    def replace(self, values: torch.Tensor) -> None:
        self.check_replace()
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for piece, part in zip(self.pieces, self.divided(values), strict=True):
                piece.detach().copy_(part)
                torch.autograd.graph.increment_version(piece)

    def retains(self) -> bool:
        """Whether a backward was asked for the gradient of this weight alone."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.retains_grad

    def _is_linked(self) -> bool:
        """Whether autograd sees this weight as the output of a node."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.grad_fn is not None

    def relink(self) -> TiledWeight:
        """This weight, as the output of a new node that leads to its tiles. See [Note: a weight in
        tiles and autograd]."""
        if (
            torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and not torch._C._are_functorch_transforms_active()
        ):
            pieces = self.pieces
            if any(piece.requires_grad for piece in pieces) and not self.retains():
                linked = _Join.apply(self, *pieces)  # type: ignore[no-untyped-call]
                torch._C._swap_tensor_impl(self, linked)
                self.note(self)
                self.note(linked)
            elif not any(piece.requires_grad for piece in pieces) and self._is_linked():
                # It was frozen: its last node would still lead to the tiles.
                made = type(self)(self.tiles, self.dimension)
                torch._C._swap_tensor_impl(self, made)
        return self

    def relink_if_stale(self) -> None:
        """`relink` if the tiles were frozen, or unfrozen, since the last node was made."""
        if self._is_linked() != any(piece.requires_grad for piece in self.pieces):
            self.relink()

    @property
    def pieces(self) -> list[torch.Tensor]:
        """The parameters of the tiles."""
        return [tile.weight for tile in self.tiles]

    def divided(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Views of `value`, a tensor of the whole shape, one for each tile. Raises `RuntimeError`
        for another shape."""
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
        """The `values` of all tiles as one tensor, joined along `dimension` (default: that of the
        weight); None if a value is missing."""
        there = [value for value in values if value is not None]
        along = self.dimension if dimension is None else dimension
        return torch.cat(there, along) if len(there) == len(self.tiles) else None

    def joined(self) -> torch.Tensor:
        """Its values. Makes no copy if the tiles lie side by side and autograd does not record."""
        shared = self._shared()
        return torch.cat(self.pieces, self.dimension) if shared is None else shared

    def is_one_memory(self) -> bool:
        """Whether the tiles lie side by side."""
        return _side_by_side(self.pieces, self.dimension) is not None

    def _shared(self) -> torch.Tensor | None:
        """Its values in the memory of the tiles; None if that is impossible."""
        pieces = self.pieces
        tracked = torch.is_grad_enabled() and any(p.requires_grad for p in pieces)
        return None if tracked else _side_by_side(pieces, self.dimension)

    def described(self) -> str:
        return f"Parameter containing:\nTiledWeight({tuple(self.shape)}, {len(self.tiles)} tiles)"

    def __deepcopy__(self, memo: dict[int, Any]) -> TiledWeight:
        made = type(self)(copy.deepcopy(self.tiles, memo), self.dimension)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), (self.tiles, self.dimension)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if makes_graph():
            return super().__torch_function__(func, types, args, kwargs)
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        accessor = name in ("__get__", "__set__", "__delete__")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if accessor else ""
        if args and isinstance(args[0], TiledWeight):
            if name == "__delete__" and attribute == "grad":
                return _grad(args[0], None)
            answer = _ANSWERS.get(attribute or name)
            if name == "detach" and _makes_a_parameter():
                raise ShardedParameterError(MADE)
            if answer is not None:
                return answer(args[0], *args[1:], **kwargs)
            if (attribute or name) in METADATA and name != "__set__":
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
        if func in _BACKWARDS:
            return _BACKWARDS[func](*args, **kwargs)
        in_place = writes(name)
        # Functions of torch.nn.init pass the tensor by name.
        first = next(iter((*args, *kwargs.values())), None) if in_place else None
        if any(isinstance(value, TiledWeight) for value in tree_iter(kwargs.get("out"))):
            raise ConfigError("a weight in tiles cannot be out=; give weight.copy_(...) the result")
        for value in tree_iter((args, kwargs)):
            if isinstance(value, TiledWeight):
                value.relink_if_stale()
        with torch.set_grad_enabled(torch.is_grad_enabled() and not isinstance(first, TiledWeight)):
            return super().__torch_function__(func, types, *_side_by_side_in(args, kwargs))


class _Join(torch.autograd.Function):
    """The node behind a weight in tiles. It divides the gradient among the tiles."""

    @staticmethod
    def forward(ctx: Any, weight: TiledWeight, *pieces: torch.Tensor) -> TiledWeight:
        ctx.dimension = weight.dimension
        ctx.set_materialize_grads(False)
        ctx.sizes = [piece.shape[weight.dimension] for piece in pieces]
        made = type(weight)(weight.tiles, weight.dimension)
        vars(made).update(vars(weight))
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        if gradient is None:  # tiles without a gradient are not updated, as a whole weight
            return None, *(None for _ in ctx.sizes)
        return None, *gradient.split(ctx.sizes, ctx.dimension)


class JoinedTiles:
    """Joins tiles that come in any order."""

    def __init__(self) -> None:
        self._under_way: dict[str, tuple[torch.Tensor, int]] = {}

    def add(self, tile: TilePlace, value: torch.Tensor) -> torch.Tensor | None:
        """Add the `value` of a tile. Returns the whole weight after its last tile, else None."""
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
    """`parameters`, with the tiles in place of weights in tiles."""
    found: list[torch.Tensor] = []
    for parameter in parameters:
        found += parameter.pieces if isinstance(parameter, TiledWeight) else [parameter]
    return found


def _shape(tiles: Sequence[Any], dimension: int) -> tuple[int, ...]:
    shapes = [tuple(tile.weight.shape) for tile in tiles]
    length = sum(shape[dimension] for shape in shapes)
    return (*shapes[0][:dimension], length, *shapes[0][dimension + 1 :])


def _side_by_side(pieces: Sequence[torch.Tensor], dimension: int) -> torch.Tensor | None:
    """All `pieces` as one detached tensor without a copy; None if that is impossible."""
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


def _makes_a_parameter() -> bool:
    """Whether the caller of `__torch_function__` is `nn.Parameter(weight)`."""
    codes = (frame.f_code for frame in frames(sys._getframe(2)))
    callers = (code for code in codes if code.co_name != "__torch_function__")
    return next(callers, None) is nn.Parameter.__new__.__code__


def _side_by_side_in(args: Any, kwargs: Any) -> Any:
    """The arguments, with weights whose tiles lie side by side replaced by tensors in the memory of
    the tiles, unless autograd records."""

    def value_of(given: Any) -> Any:
        shared = given._shared() if isinstance(given, TiledWeight) else None
        return given if shared is None else shared

    return tree_map(value_of, (tuple(args), kwargs))


def _grad_of_tiles(outputs: Any, inputs: Any, **named: Any) -> tuple[Any, ...]:
    """`torch.autograd.grad`. For a weight in tiles it gives the joined gradients of the tiles."""
    found = iter(backwards.grad(outputs, pieces_of(inputs), **named))
    return tuple(
        each.cat([next(found) for _ in each.tiles])
        if isinstance(each, TiledWeight)
        else next(found)
        for each in inputs
    )


def _backward_of_tiles(tensors: Any, inputs: Any = None, **named: Any) -> None:
    """`torch.autograd.backward`, with the tiles in place of weights in tiles."""
    among = None if inputs is None else pieces_of(inputs)
    backwards.backward(tensors, inputs=among, **named)


_BACKWARDS: dict[Any, Callable[..., Any]] = {
    **backwards.ANSWERS,
    torch.autograd.grad: _grad_of_tiles,
    torch.autograd.backward: _backward_of_tiles,
}


# Answers of a weight in tiles


def _requires_grad(weight: TiledWeight, *value: bool) -> bool | None:
    if not value:
        return any(piece.requires_grad for piece in weight.pieces)
    for piece in weight.pieces:
        piece.requires_grad = value[0]
    with torch.enable_grad():
        weight.relink_if_stale()
    return None


def _requires_grad_(weight: TiledWeight, requires_grad: bool = True) -> TiledWeight:
    _requires_grad(weight, requires_grad)
    return weight


def _grad(weight: TiledWeight, *value: torch.Tensor | None) -> torch.Tensor | None:
    """Read `.grad`, or set it to `value`."""
    pieces = weight.pieces
    if not value:
        found = [piece.grad for piece in pieces]
        there = [gradient for gradient in found if gradient is not None]
        if len(there) < len(found):
            return None
        joined = weight._joined_gradient()
        if joined is None or any(map(operator.is_not, joined.parts, there)):
            joined = JoinedTensor(there, weight.dimension)
            weight._joined_gradient = weakref.ref(joined)
        return joined
    (given,) = value
    parts: Sequence[torch.Tensor | None] = [None] * len(pieces)
    if isinstance(given, JoinedTensor) and given.is_split_as(pieces, weight.dimension):
        parts = given.parts
    elif given is not None:
        parts = weight.divided(given)
    for piece, part in zip(pieces, parts, strict=True):
        piece.grad = part
    return None


def _data(weight: TiledWeight, *value: torch.Tensor) -> torch.Tensor | None:
    if not value:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            shared = weight._shared()
            return weight.detach() if shared is None else shared
    given = value[0]
    parts = given.pieces if isinstance(given, TiledWeight) else weight.divided(given)
    for piece, part in zip(weight.pieces, parts, strict=True):
        piece.data = brought(part)
    return None


class DetachedTiles(LazyTensor):
    """The values of a weight in tiles, detached. It is an alias of the weight."""

    way = _WAY

    @staticmethod
    def __new__(cls, weight: TiledWeight) -> Any:
        return cls.without_data(weight.shape, weight.dtype, weight.device)

    def __init__(self, weight: TiledWeight) -> None:
        self._weight = weight

    def fetch(self) -> torch.Tensor:
        return self._weight.fetch()

    def check_replace(self) -> None:
        self._weight.check_replace()

    def replace(self, values: torch.Tensor) -> None:
        self._weight.replace(values)

    def detached(self) -> DetachedTiles:
        return self._weight.detached()


def _refuse_hook(weight: TiledWeight, *_: Any, **__: Any) -> None:
    raise ConfigError("a weight in tiles has no gradient of its own; register hooks on its tiles")


_ANSWERS: dict[str, Callable[..., Any]] = {
    "requires_grad": _requires_grad,
    "requires_grad_": _requires_grad_,
    "grad": _grad,
    "data": _data,
    "detach": lambda weight: _data(weight),
    "is_leaf": lambda weight: True,
    "grad_fn": lambda weight: None,
    "retains_grad": lambda weight: False,
    "_is_view": lambda weight: False,
    "output_nr": lambda weight: 0,
    "register_hook": _refuse_hook,
    "register_post_accumulate_grad_hook": _refuse_hook,
    "__hash__": lambda weight: id(weight),
}


def named_wholes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of `model` under every name, as `named_parameters(remove_duplicate=False)`.
    Weights in tiles replace their tiles."""
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Tile):
            continue
        for name, parameter in own_wholes(module):
            yield f"{path}.{name}" if path else name, parameter


def own_wholes(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of `module` itself. A weight in tiles is one parameter."""
    yield from vars(module).get(IN_TILES, {}).items()
    yield from direct_parameters(module)


def direct_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of `module` itself, with duplicates. Weights in tiles are none."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter


def tile_places(model: nn.Module) -> dict[int, list[TilePlace]]:
    """The places of each tile of `model`, by the id of its parameter: one for each name of its
    weight."""
    found: dict[int, list[TilePlace]] = {}
    for name, weight in named_wholes(model):
        if not isinstance(weight, TiledWeight):
            continue
        begin = 0
        for piece in weight.pieces:
            end = begin + piece.shape[weight.dimension]
            place = TilePlace(name, tuple(weight.shape), weight.dimension, begin, end)
            found.setdefault(id(piece), []).append(place)
            begin = end
    return found
