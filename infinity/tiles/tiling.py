"""Cuts large weights into tiles. The engine fetches, updates and sends home each tile alone.

[Note: modules in tiles]
A module in tiles keeps its place, its attributes and its bias. Its class becomes a subclass of the
old one, with a forward that runs tile by tile. Its weight leaves `_parameters`. Beside it a
`ModuleList`, `weight_tiles`, has the `Tile`s, and `module.weight` is a `TiledWeight`. Modules with
one tied weight share its tiles. State dicts have only the whole weight, under its name.

[Note: which modules]
`nn.Linear`, `nn.Embedding` and the `Conv1D` of transformers. A subclass of these is cut if its
forward is theirs, or calls theirs and touches no weight itself, as the scaled embeddings of Gemma
do. Other subclasses compute with the weight in their own way, and stay whole. In a module with
`num_experts`, the banks of experts are cut: parameters (experts, n, m). They stay whole if the
forward has an einsum. See `tiles/banks`.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from infinity.compilation import uncompiled
from infinity.errors import ConfigError, in_words
from infinity.placement.spec import GROUP
from infinity.quantities import format_bytes, parse_bytes
from infinity.sharding.parameter import ShardedParameter
from infinity.sharding.recognize import is_dtensor
from infinity.sharding.tiles import (
    IN_TILES,
    Tile,
    TiledWeight,
    own_wholes,
    pieces_of,
)
from infinity.sharding.views import GatheredParameter
from infinity.tiles.adapters import adapted_bank, teach_peft, wrapper_class
from infinity.tiles.banks import TiledBank, used_everywhere
from infinity.tiles.tile_math import embedding, linear
from infinity.weights.init import divide_origin, outside
from infinity.weights.load_target import load_into_targets
from infinity.weights.taped import TapedParameter, as_built

log = logging.getLogger("infinity")

Model = TypeVar("Model", bound=nn.Module)

MAX_BYTES = "256MiB"
_EVEN = 64
"""A tile with at least this many rows has a multiple of them, so that kernels compute a row in the
same way as in the whole weight."""
_SHOWN = 5  # names in a log
_BEFORE = "_before_tiles"
"""The attribute of a module in tiles with its old class and the old names of its parameters."""


class InTiles(nn.Module):
    """A module with some weights in tiles."""

    @property
    def tiled(self) -> dict[str, TiledWeight]:
        """The weights in tiles, by their names."""
        return vars(self)[IN_TILES]

    def __getattr__(self, name: str) -> Any:
        weight = vars(self).get(IN_TILES, {}).get(name)
        return super().__getattr__(name) if weight is None else weight.relink()

    def __setattr__(self, name: str, value: Any) -> None:
        held = vars(self).get("_parameters", {})
        if name not in vars(self).get(IN_TILES, {}) or name in held:  # a load puts it there
            super().__setattr__(name, value)
        elif isinstance(value, TiledWeight):  # ties it to another weight
            self.take(name, value)
        else:
            raise ConfigError(
                f"{type(self).__name__}.{name} is in tiles and cannot be replaced; write its "
                f"values ({name}.data.copy_(...)), or replace it before infinity.tile"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_compute"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        vars(self)["_compute"] = uncompiled(type(self).compute)

    def compute(self, given: torch.Tensor) -> torch.Tensor:
        """The result of its forward. torch.compile does not look into it."""
        raise NotImplementedError

    def take(self, name: str, weight: TiledWeight) -> None:
        """Store `weight` under `name`, and its tiles as a list of modules."""
        vars(self)["_compute"] = uncompiled(type(self).compute)
        self.tiled[name] = weight
        self._modules[f"{name}_tiles"] = nn.ModuleList(weight.tiles)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        for name, weight in self.tiled.items():
            with torch.no_grad():
                destination[prefix + name] = weight if keep_vars else weight.joined()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Load as a module with whole weights. In a wrapped model, the facade has put load targets
        for them among the parameters."""
        load = partial(super()._load_from_state_dict, state_dict, prefix, *rest)
        if any(name in self._parameters for name in self.tiled):
            load()
            return
        for weight, value, assigned in load_into_targets(self, self.tiled, load):
            if assigned and isinstance(weight, TiledWeight):
                _assign(weight, value)
                continue
            with torch.no_grad():
                weight.copy_(value)


class LinearInTiles(InTiles, nn.Linear):
    """`nn.Linear` with its weight in tiles of its rows."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self._compute(self, input)

    def compute(self, given: torch.Tensor) -> torch.Tensor:
        return linear(given, self.tiled["weight"].tiles, self.bias, across=False)


class EmbeddingInTiles(InTiles, nn.Embedding):
    """`nn.Embedding` with its weight in tiles of its rows."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self._compute(self, input)

    def compute(self, given: torch.Tensor) -> torch.Tensor:
        tiles = self.tiled["weight"].tiles
        return embedding(given, tiles, self.padding_idx, self.scale_grad_by_freq)


class ColumnsInTiles(InTiles):
    """The `Conv1D` of transformers with its weight (inputs, outputs) in tiles of its columns."""

    bias: nn.Parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._compute(self, x)

    def compute(self, given: torch.Tensor) -> torch.Tensor:
        return linear(given, self.tiled["weight"].tiles, self.bias, across=True)


class BanksInTiles(InTiles):
    """A module with banks of experts in tiles."""

    def __getattr__(self, name: str) -> Any:
        found = adapted_bank(self, name)
        return super().__getattr__(name) if found is None else found

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        teach_peft()

    def take(self, name: str, weight: TiledWeight) -> None:
        super().take(name, weight)
        teach_peft()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module. Without `recurse`, also its banks, each at its old place: so PEFT
        finds them."""
        found = super().named_parameters(prefix, recurse, remove_duplicate)
        if recurse:
            yield from found
            return
        teach_peft()
        dot = f"{prefix}." if prefix else ""
        own: dict[str, Any] = dict(found)
        own |= {f"{dot}{name}": bank for name, bank in self.tiled.items()}
        before = [f"{dot}{name}" for name in vars(self)[_BEFORE][1]]
        for name in dict.fromkeys((*before, *own)):
            if name in own:
                yield name, own[name]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own class. Also uses each tile that it has not used."""
        banks = [weight for weight in self.tiled.values() if isinstance(weight, TiledBank)]
        for bank in banks:
            bank.used.clear()
        return used_everywhere(super().forward(*args, **kwargs), banks)


class _Tileable(NamedTuple):
    """A class with a weight that can be cut along `dimension`, and the class that computes with the
    tiles."""

    kind: type[nn.Module]
    in_tiles: type[InTiles]
    dimension: int
    weight: type[TiledWeight] = TiledWeight


class _WeightHolder(NamedTuple):
    """A module that has a weight under `name`. In the model the weight has the name `path`."""

    path: str
    module: nn.Module
    name: str


def tile(model: Model, max_bytes: str | int = MAX_BYTES) -> Model:
    """Cut every large weight of `model` into tiles of at most `max_bytes`, before `infinity.wrap`.
    Returns the same module.

    `max_bytes` is a number of bytes, or a string such as "256MiB". A weight is cut if it has more
    bytes than that in its present dtype. It is cut along its outputs in `nn.Linear` and in the
    `Conv1D` of transformers, along the vocabulary in `nn.Embedding`, and between the experts of a
    bank (experts, n, m). Each tile becomes a unit. The engine fetches, reduces and updates tiles
    one after the other, so the compute device needs room for tiles instead of weights.

    Modules keep their names and classes (`isinstance` holds), and `module.weight` its shape. State
    dicts and checkpoints have the whole weight, under its name. `named_parameters` has the tiles:
    `fc.weight_tiles.0.weight` and so on are rows of `fc.weight`.

    Works inside and outside of `infinity.init()`, takes no memory, and may be called again for
    smaller tiles. Modules that compute with their weight in another way than these classes stay
    whole, and the log names them. Raises `ConfigError` if the model is wrapped, if `max_bytes` is
    no number of bytes, or if one row of a weight has more bytes.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"infinity.tile takes a module, not {in_words(model)}")
    try:
        most = parse_bytes(max_bytes)
    except ValueError as error:
        raise ConfigError(f"max_bytes: {error}") from None
    if any(isinstance(p, (ShardedParameter, GatheredParameter)) for p in model.parameters()):
        raise ConfigError(
            "the model is wrapped already, and its units are fixed: call infinity.tile before "
            "infinity.wrap"
        )
    found = tile_largest(model, most)
    for name, reason in found.whole.items():
        log.info("%s stays whole: %s", name, reason)
    if found.names:
        log.info("%s", found.describe())
    return model


class Tiled(NamedTuple):
    """The result of `tile_largest`."""

    names: list[str]
    """Weights that were cut."""

    whole: dict[str, str]
    """Weights that stay whole, and why."""

    most: int
    """The most bytes of a tile."""

    apart: list[str]
    """Weights that are cut inside a group of int8 moments: see `_group_rows`."""

    def describe(self) -> str:
        """One line for a log."""
        line = (
            f"{len(self.names)} weights lie in tiles of at most {format_bytes(self.most)} each: "
            f"{_some(self.names)}"
        )
        if self.apart:
            line += (
                f"; {_some(self.apart)} cannot be cut between groups of {GROUP} elements, so int8 "
                "moments in a checkpoint round once more in other tiles"
            )
        return line


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def tile_largest(
    model: nn.Module, most: int, itemsize_of: Callable[[torch.Tensor], int] | None = None
) -> Tiled:
    """Cut the weights of `model` with more than `most` bytes.

    `itemsize_of` returns the bytes that an element of each will take. With it, a weight with a row
    of more bytes stays whole. Without it, the present bytes of an element count, and such a row
    raises `ConfigError` before anything is changed.
    """
    cuts: list[tuple[torch.Tensor, list[_WeightHolder], _Tileable, list[int]]] = []
    whole: dict[str, str] = {}
    apart: list[str] = []
    adapted = _adapted(model)
    for weight, holders in _weights_of(model):
        size = weight.element_size() if itemsize_of is None else itemsize_of(weight)
        largest = max(map(torch.Tensor.numel, pieces_of([weight]))) * size
        if largest <= most:
            continue
        name, known = holders[0].path, _tileable(*holders[0][1:])
        reason = _obstacle(weight, holders)
        if id(weight) in adapted:
            reason = "an adapter of PEFT (target_parameters) replaces it in each forward"
        if reason or known is None:
            whole[name] = reason
            continue
        row = math.prod(weight.shape) // weight.shape[known.dimension] * size
        if row <= most:
            even = _group_rows(weight.shape, known.dimension)
            lengths = _lengths(weight.shape[known.dimension], row, most, even)
            cuts.append((weight, holders, known, lengths))
            if not _keeps_groups(weight.shape, known.dimension, lengths):
                apart.append(name)
        elif itemsize_of is None:
            raise ConfigError(
                f"one row of {name} has {format_bytes(row)}, more than max_bytes "
                f"({format_bytes(most)}); give at least that"
            )
        else:
            whole[name] = f"one row of it has {format_bytes(row)}"
    with outside(), as_built():
        for weight, holders, known, lengths in cuts:
            _cut(weight, holders, known, lengths)
    return Tiled([holders[0].path for _, holders, _, _ in cuts], whole, most, apart)


def relink(modules: Iterable[InTiles]) -> None:
    """Connect the weights of `modules` to their tiles in autograd again, after `wrap` has changed
    the tiles."""
    with torch.enable_grad():
        for module in modules:
            for weight in module.tiled.values():
                weight.relink()


def refuse_retained(modules: Iterable[InTiles]) -> None:
    """Raise `ConfigError` if `backward(inputs=...)` got a weight in tiles of `modules`, because it
    has not computed this gradient."""
    fresh: dict[int, TiledWeight] = {}
    for module in modules:
        for name, weight in module.tiled.items():
            if weight.retains():
                made = fresh.setdefault(id(weight), type(weight)(weight.tiles, weight.dimension))
                module.tiled[name] = made  # the old one retains gradients for good
    if fresh:
        raise ConfigError(
            "backward(inputs=...) was given a weight in tiles of a wrapped model, which has no "
            "gradient of its own: give its tiles (module.weight_tiles.parameters()), or take "
            "torch.autograd.grad(loss, [weight])"
        )


@cache
def _kinds(columns: type[nn.Module] | None) -> tuple[_Tileable, ...]:
    """The classes that can be cut. `columns` is the `Conv1D` of transformers, if it is imported."""
    found = [
        _Tileable(nn.Linear, LinearInTiles, 0),
        _Tileable(nn.Embedding, EmbeddingInTiles, 0),
    ]
    if columns is not None:
        both = type("Conv1DInTiles", (ColumnsInTiles, columns), {"__module__": __name__})
        found.append(_Tileable(columns, both, 1))
    return tuple(found)


_BANK = _Tileable(nn.Module, BanksInTiles, 0, TiledBank)


def _tileable(module: nn.Module, name: str) -> _Tileable | None:
    """How the weight `name` of `module` can be cut; None for classes that use it in another way."""
    weight = getattr(module, name)
    if weight.ndim == 3 and getattr(module, "num_experts", None) == weight.shape[0]:
        forward = inspect.unwrap(type(module).forward)
        names = getattr(getattr(forward, "__code__", None), "co_names", ())
        return None if "einsum" in names or "forward" in vars(module) else _BANK
    if name != "weight":
        return None
    utilities = sys.modules.get("transformers.pytorch_utils")
    for each in _kinds(getattr(utilities, "Conv1D", None)):
        if isinstance(module, each.kind):
            return each if _computes_as(module, each) else None
    return None


def _computes_as(module: nn.Module, known: _Tileable) -> bool:
    """Whether the forward of `module` is that of the `known` class, or calls it and touches no
    weight itself. See [Note: which modules]."""
    if "forward" in vars(module) or isinstance(module, NonDynamicallyQuantizableLinear):
        return False
    forward: Any = type(module).forward
    if forward in (known.kind.forward, known.in_tiles.forward):
        return True
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return "super" in names and "forward" in names and "weight" not in names


def _weights_of(model: nn.Module) -> Iterator[tuple[torch.Tensor, list[_WeightHolder]]]:
    """Every parameter, with all modules that have it. A weight in tiles counts as one."""
    holders: dict[int, tuple[torch.Tensor, list[_WeightHolder]]] = {}
    for path, module in model.named_modules():
        if isinstance(module, Tile):
            continue
        for name, weight in own_wholes(module):
            holder = _WeightHolder(f"{path}.{name}" if path else name, module, name)
            holders.setdefault(id(weight), (weight, []))[1].append(holder)
    yield from holders.values()


def _adapted(model: nn.Module) -> set[int]:
    """The ids of the parameters that adapters of PEFT replace during a forward, except banks in
    whose tiles they are added."""
    kind = wrapper_class()
    wrappers = [m for m in model.modules() if kind is not None and isinstance(m, kind)]
    return {
        id(each.get_param())
        for each in wrappers
        if each.get_param().dtype.itemsize == 1
        or _tileable(each.get_base_layer(), each.parameter_name) is not _BANK
    }


def _obstacle(weight: torch.Tensor, holders: Sequence[_WeightHolder]) -> str:
    """Why `weight` cannot be cut; "" if it can."""
    if is_dtensor(weight):
        return "tensor parallel ranks divide it"
    kinds = [_tileable(holder.module, holder.name) for holder in holders]
    if None in kinds:
        return "its module computes with it in another way than nn.Linear and nn.Embedding"
    way = getattr(getattr(holders[0].module, "config", None), "_experts_implementation", None)
    if kinds[0] is _BANK and way not in (None, "eager", "grouped_mm"):
        return (
            f"its module takes many experts at once ({way}); call "
            'model.set_experts_implementation("grouped_mm")'
        )
    if len({kind.dimension for kind in kinds if kind is not None}) > 1:
        return "it is tied to a weight that is its transpose"
    for holder in holders:
        if getattr(holder.module, "sparse", False) or getattr(holder.module, "max_norm", None):
            return "an embedding with sparse gradients or max_norm needs all of its rows"
    if isinstance(weight, TiledWeight):
        return "" if weight.is_one_memory() else "it lies in tiles that were converted"
    if not isinstance(weight, nn.Parameter) or weight.layout is not torch.strided:
        return f"it is a {type(weight).__name__}"
    hooks = weight._backward_hooks, getattr(weight, "_post_accumulate_grad_hooks", None)
    return "its gradient has hooks" if any(hooks) else ""


def _lengths(rows: int, row: int, most: int, even: int) -> list[int]:
    """How many of `rows`, of `row` bytes each, each tile has. There are as few tiles as possible,
    of about the same length. Each tile except the last has a multiple of 64 rows if 64 rows fit,
    else a multiple of `even` rows if these fit (see `_group_rows`).

    Example: 1000 rows of 4 KiB and most 1 MiB, which are 256 rows: four tiles of 250 rows, rounded
    up to 64, so 256, 256, 256 and 232 rows.
    """
    longest = most // row
    each = -(-rows // -(-rows // longest))
    for step in (_EVEN, even):
        if longest >= step:
            each = min(-(-each // step) * step, longest // step * step)
            break
    return [min(each, rows - begin) for begin in range(0, rows, each)]


def _group_rows(shape: Sequence[int], dimension: int) -> int:
    """The rows along `dimension` that each tile has a multiple of, so that no group of int8 moments
    lies in two tiles. A group is `GROUP` consecutive elements of the whole weight.

    For columns this is impossible if a row of the weight is no multiple of `GROUP`: then the groups
    in tiles differ. 64 is a multiple of every result.
    """
    if dimension:
        return GROUP
    return GROUP // math.gcd(GROUP, math.prod(shape[1:]))


def _keeps_groups(shape: Sequence[int], dimension: int, lengths: Sequence[int]) -> bool:
    """Whether each group of int8 moments of the whole weight lies in one tile of these lengths."""
    if dimension and shape[-1] % GROUP:
        return False
    return all(length % _group_rows(shape, dimension) == 0 for length in lengths[:-1])


def _cut(
    weight: torch.Tensor, holders: Sequence[_WeightHolder], known: _Tileable, lengths: Sequence[int]
) -> None:
    """Put tiles of `lengths` in the place of `weight`, in all modules that have it."""
    dimension = known.dimension
    with torch.no_grad():
        memory: torch.Tensor = weight.joined() if isinstance(weight, TiledWeight) else weight.data
        gradient = weight.grad
        parts = memory.split(list(lengths), dimension)
    piece = pieces_of([weight])[0]
    trained, marks = weight.requires_grad, dict(vars(piece))
    kind = type(piece) if isinstance(piece, TapedParameter) else nn.Parameter
    tiles = []
    for part in parts:
        parameter = kind(part, requires_grad=trained)
        vars(parameter).update(marks)
        tiles.append(Tile(parameter))
    if gradient is not None:
        for tile, part in zip(tiles, gradient.split(list(lengths), dimension), strict=True):
            tile.weight.grad = part
    if isinstance(weight, TiledWeight):
        divide_origin(weight.tiles[0], "weight", weight.pieces[0], tiles)
    else:
        divide_origin(holders[0].module, holders[0].name, weight, tiles)
    made = known.weight(tiles, dimension)
    for holder in holders:
        _take_over(holder.module, holder.name, made)


def join_tiles(
    model: nn.Module, names: Iterable[str], whole: Callable[[TiledWeight], nn.Parameter]
) -> None:
    """Replace each weight in tiles of `names` by the parameter that `whole` makes of it, in all
    modules that have it."""
    wanted = set(names)
    for weight, holders in list(_weights_of(model)):
        if isinstance(weight, TiledWeight) and holders[0].path in wanted:
            made = whole(weight)
            for _, module, name in holders:
                _give_back(module, name, made)


def _give_back(module: nn.Module, name: str, weight: nn.Parameter) -> None:
    """Give `module` `weight` instead of tiles. Without other tiles, it gets its old class again."""
    kind, order = vars(module)[_BEFORE]
    tiled = vars(module)[IN_TILES]
    del tiled[name], module._modules[f"{name}_tiles"]
    held = module._parameters
    held[name] = weight
    for key in order:
        if key in held:  # to its old place in the order
            held[key] = held.pop(key)
    if not tiled:
        module.__class__ = kind
        for key in (_BEFORE, IN_TILES, "_compute"):
            vars(module).pop(key)


def _take_over(module: nn.Module, name: str, weight: TiledWeight) -> None:
    """Put `weight` in the place of parameter `name` of `module`, which becomes a module in
    tiles."""
    if not isinstance(module, InTiles):
        known: Any = _tileable(module, name)
        kind: Any = type(module)
        module.__class__ = _class_in_tiles(kind, known)
        vars(module)[_BEFORE] = kind, list(module._parameters)
        vars(module)[IN_TILES] = {}
    module._parameters.pop(name, None)
    module.take(name, weight)  # type: ignore[operator]


@cache
def _class_in_tiles(kind: type[nn.Module], known: _Tileable) -> type[nn.Module]:
    """The class of modules of class `kind` in tiles; its own methods come first, as before."""
    if kind is known.kind:
        return known.in_tiles
    if known is _BANK:  # its forward calls that of the module
        return type(
            f"{kind.__name__}InTiles", (BanksInTiles, kind), {"__module__": kind.__module__}
        )
    return type(f"{kind.__name__}InTiles", (kind, known.in_tiles), {"__module__": kind.__module__})


def _assign(weight: TiledWeight, value: torch.Tensor) -> None:
    """Make the tiles of `weight` views of `value`."""
    with torch.no_grad():
        for tile, part in zip(weight.tiles, weight.divided(value.detach()), strict=True):
            tile.weight = nn.Parameter(part, requires_grad=tile.weight.requires_grad)
