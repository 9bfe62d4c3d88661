"""The model of a plan: a real `nn.Module` without memory, reduced to sizes and orders.

A plan divides the parameters of the module with the function of `wrap`. So its units are those of a
run, even if `wrap` makes them smaller.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from infinity.bench.step import train
from infinity.bench.step.flops import Shape
from infinity.bench.step.train import looked_up, shape_of
from infinity.config import Config
from infinity.errors import ConfigError
from infinity.measure.rates import DTYPES
from infinity.models.description import NAME
from infinity.models.source import DTYPES as MODEL_DTYPES
from infinity.models.source import PRESETS, ModelSource
from infinity.modules.check import check_model
from infinity.modules.division import Division, divisions
from infinity.placement.demand import UnitShape
from infinity.placement.spec import Format
from infinity.plan.adapters import CODES, LinearAdapters
from infinity.plan.catalog import MODELS, known
from infinity.sharding.layout import FlatLayout
from infinity.sharding.tiles import Tile, pieces_of
from infinity.weights.init import init
from infinity.weights.snapshot import Snapshot
from infinity.weights.taped import as_built
from infinity.weights.tensors import cached

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
PAPER_FEED_FORWARD = 4
"""Width of the feed-forward part over the hidden size, as in the papers."""


@dataclass(frozen=True)
class Dimensions:
    """A decoder by numbers alone: the blocks of the ZeRO-Infinity paper, 12 x hidden^2 parameters
    each (2104.07857, equation 1), between an embedding and a head that share their weights."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int = 50_304

    @property
    def name(self) -> str:
        """The name of the model in a plan."""
        return f"{self.layers} layers of {self.hidden}"

    def check(self) -> None:
        """Raise `ConfigError` if no model has these dimensions."""
        for name, value in vars(self).items():
            if not 0 < value < 1 << 31:
                raise ConfigError(f"{name} is {value}, and has to be positive")
        if self.hidden % self.heads:
            raise ConfigError(
                f"a hidden size of {self.hidden} cannot be divided among {self.heads} heads"
            )


class PaperBlock(nn.Module):
    """The linear layers of a block, and its norms."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        wide = PAPER_FEED_FORWARD * hidden
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, wide, bias=False)
        self.down = nn.Linear(wide, hidden, bias=False)


class PaperDecoder(nn.Module):
    """A decoder of `Dimensions`. It is counted and never runs."""

    def __init__(self, dimensions: Dimensions) -> None:
        super().__init__()
        hidden = dimensions.hidden
        self.embedding = nn.Embedding(dimensions.vocabulary, hidden)
        self.blocks = nn.ModuleList(PaperBlock(hidden) for _ in range(dimensions.layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, dimensions.vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def get_output_embeddings(self) -> nn.Linear:
        """The head, under the name that transformers uses."""
        return self.head


@dataclass(frozen=True)
class PlannedUnit:
    """A unit before it is sharded: the shapes of its parameters."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    format: Format
    trainable: bool
    multiplied: int
    """The number of its elements that take part in matrix multiplications."""
    in_blocks: bool
    """Whether it belongs to one of the repeated blocks."""
    in_files: bool = False
    """Whether it is read from the weight files of the model and takes no NVMe space."""

    @property
    def weights(self) -> int:
        """Parameters of the model in it. An element of codes has two."""
        return self.numel * (2 if self.format.name == CODES else 1)

    @property
    def numel(self) -> int:
        """Elements without padding."""
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    def sharded(self, index: int, shards: int) -> UnitShape:
        """Unit number `index` in so many shards, as its first shard. All shards are alike."""
        itemsize = self.format.nbytes
        numel = FlatLayout(self.shapes, shards, (), itemsize).numel
        return UnitShape(
            index, self.name, numel, shards, 0, self.format, self.trainable, self.in_files
        )


class UnitUse(NamedTuple):
    """A use of unit number `unit` while the units `held` are also in use."""

    unit: int
    held: frozenset[int]


class PlannedDivisions:
    """One model in ever smaller units, in the order in which `wrap` tries them. Each is made at the
    first request, and kept."""

    def __init__(self, make: Callable[[PlannedDivisions], Iterator[PlannedModel]]) -> None:
        self._made: list[PlannedModel] = []
        self._coming = make(self)

    def __iter__(self) -> Iterator[PlannedModel]:
        for number in itertools.count():
            if number == len(self._made):
                following = next(self._coming, None)
                if following is None:
                    return
                self._made.append(following)
            yield self._made[number]


@dataclass(frozen=True, eq=False)
class PlannedModel:
    """The facts of a model that a plan needs. It is equal to itself alone."""

    name: str
    units: tuple[PlannedUnit, ...]
    nestings: frozenset[frozenset[int]]
    forward: tuple[UnitUse, ...]
    """The uses of units in a forward, in their order."""
    backward: tuple[UnitUse, ...]
    """The uses of units in a backward, in their order."""
    shape: Shape
    hidden: int
    heads: int
    vocabulary: int
    tiled: tuple[str, ...]
    """Weights that `wrap` cuts into tiles for these units."""
    divisions: PlannedDivisions = field(repr=False)
    """This model in all units that `wrap` may make."""
    has_experts: bool = False
    """Whether it is a mixture of experts, all of which count as computed for each token."""
    statistics: int = 0
    """Bytes of the statistics of quantized weights, which stay on the compute device."""

    @property
    def parameters(self) -> int:
        """Parameters of the model, quantized ones included."""
        return sum(unit.weights for unit in self.units)

    @property
    def trainable(self) -> int:
        """Elements of trained parameters."""
        return sum(unit.numel for unit in self.units if unit.trainable)


def find_source(name: str, precision: str) -> ModelSource:
    """The model called `name`: a directory, a config.json, a preset, the id of a model in the cache
    of the hub, or one of `catalog.MODELS`. Weights are not needed.

    Raises `ValueError` and `ConfigError` with the known names, and for an id with the command that
    downloads its config.json.
    """
    own, published = cached(name), known(name)
    if own is not None and (own / NAME).is_file():
        return replace(train.find_source(str(own / NAME), precision), name=name)
    if Path(name).name == NAME and Path(name).is_file():
        name = str(Path(name).parent)
    if Path(name, NAME).is_file():
        return replace(train.find_source(str(Path(name, NAME)), precision), name=name)
    if Path(name).exists() or name in PRESETS:
        return train.find_source(name, precision)
    if published is not None:
        return _of_catalog(published, precision)
    near = get_close_matches(name, [*MODELS, *PRESETS], n=1)
    hint = f"did you mean {near[0]!r}? A model is" if near else "it is"
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        hint = (
            "if it is the id of a model of the hub, download the one file that a plan needs: "
            f"hf download {name} {NAME}; else it is"
        )
    raise ValueError(
        f"unknown model {name!r}; {hint} a directory with {NAME}, or one of: "
        f"{', '.join([*MODELS, *PRESETS])}"
    )


def _of_catalog(name: str, precision: str) -> ModelSource:
    from transformers import AutoConfig

    config = AutoConfig.for_model(**MODELS[name])
    config.dtype = MODEL_DTYPES.get(precision, "bfloat16")
    return ModelSource(name, config, None)


def of_dimensions(dimensions: Dimensions, config: Config) -> PlannedModel:
    """The model of `dimensions`. Raises `ConfigError`."""
    dimensions.check()
    with torch.device("meta"):
        model = PaperDecoder(dimensions)
    values = {
        "num_hidden_layers": dimensions.layers,
        "hidden_size": dimensions.hidden,
        "num_attention_heads": dimensions.heads,
        "vocab_size": dimensions.vocabulary,
    }
    return of_module(model, config, dimensions.name, values)


def of_source(
    source: ModelSource, config: Config, adapters: LinearAdapters | None = None
) -> PlannedModel:
    """The model of a transformers configuration, with adapters if `adapters`. Raises `ConfigError`
    and `ValueError`."""
    with init(exact=False):
        model = source.build()
        shape = shape_of(model, _sizes(source))
        if adapters is not None:
            model = adapters.applied(model)
    statistics = 0 if adapters is None else adapters.quantize(model)
    with as_built():
        check_model(model, DTYPES.get(config.precision))
    # Banks of experts are made from several tensors, and copied.
    text = source.config.get_text_config(decoder=True)
    has_banks = any(getattr(text, each, None) for each in _EXPERTS)
    in_files = adapters is not None and not has_banks
    facts = _facts(source.name, vars(_sizes(source)), shape)
    facts |= {"statistics": statistics, "has_experts": has_banks}
    return _first(model, config, facts, in_files and config.tuning.read_in_place)


def _sizes(source: ModelSource) -> SimpleNamespace:
    """The sizes of the decoder of text, under the names of transformers."""
    text = source.config.get_text_config(decoder=True)
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "head_dim")
    found = {key: getattr(text, key, None) for key in keys}
    return SimpleNamespace(**{key: each for key, each in found.items() if each is not None})


def of_module(
    model: nn.Module, config: Config, name: str, values: Mapping[str, Any]
) -> PlannedModel:
    """The planned model of a module with or without memory. `values` has the dimensions under the
    names of transformers: num_hidden_layers, hidden_size, num_attention_heads and vocab_size.

    If smaller units are requested, the module is cut into tiles, and restored after that.
    """
    with as_built():
        check_model(model, DTYPES.get(config.precision))
    return _first(model, config, _facts(name, values, shape_of(model, SimpleNamespace(**values))))


def _facts(name: str, values: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """The fields of `PlannedModel` that its units do not change."""
    return {
        "name": name,
        "shape": shape,
        "hidden": int(values["hidden_size"]),
        "heads": int(values.get("num_attention_heads", 1)),
        "vocabulary": int(values.get("vocab_size", 0)),
    }


def _first(
    model: nn.Module, config: Config, facts: Mapping[str, Any], in_files: bool = False
) -> PlannedModel:
    made = PlannedDivisions(partial(_of_divisions, model, config, facts, in_files))
    return next(iter(made))


def _of_divisions(
    model: nn.Module,
    config: Config,
    facts: Mapping[str, Any],
    in_files: bool,
    made: PlannedDivisions,
) -> Iterator[PlannedModel]:
    snapshot = Snapshot(model)

    @contextmanager
    def afresh() -> Iterator[None]:
        snapshot.restore()
        yield

    for division in divisions(model, config, afresh=afresh):
        forward, backward = _orders(model, division.users, set(division.owners.values()))
        units, nestings = _units(model, division, in_files), frozenset(division.nestings)
        if division.tiled is not None:
            snapshot.restore()
        yield PlannedModel(
            units=units,
            nestings=nestings,
            forward=forward,
            backward=backward,
            tiled=() if division.tiled is None else tuple(division.tiled.names),
            divisions=made,
            **facts,
        )


def _units(model: nn.Module, division: Division, in_files: bool) -> tuple[PlannedUnit, ...]:
    free = set(map(id, pieces_of(looked_up(model))))
    blocks = {id(p) for block in division.blocks for p in block.parameters()}
    return tuple(
        PlannedUnit(
            group.name,
            tuple(tuple(p.shape) for _, p in group.parameters),
            Format(str(group.dtype).removeprefix("torch."), 1, group.dtype.itemsize),
            group.trainable,
            sum(_weights(p) for _, p in group.parameters if id(p) not in free),
            all(id(p) in blocks for _, p in group.parameters),
            in_files and not group.trainable,
        )
        for group in division.groups
    )


def _weights(parameter: torch.Tensor) -> int:
    return parameter.numel() * (2 if parameter.dtype == torch.uint8 else 1)


def _orders(
    model: nn.Module, users: Mapping[nn.Module, Sequence[int]], owners: set[nn.Module]
) -> tuple[tuple[UnitUse, ...], tuple[UnitUse, ...]]:
    """The uses of units in a forward, and in a backward.

    Modules run in the order of their definition, as in decoders. A backward runs in the opposite
    order. It needs no embedding, because the gradient of an embedding depends on the indices alone.
    It also does not need additions, such as positions, of modules besides the `owners` of units.
    """
    forward: list[UnitUse] = []
    needed: list[UnitUse] = []
    seen: set[nn.Module] = set()
    pending: list[tuple[nn.Module, frozenset[int], bool]] = [(model, frozenset(), False)]
    while pending:
        module, inside, looks_up = pending.pop()
        if module in seen and not isinstance(module, Tile):  # tied weights share tiles
            continue
        seen.add(module)
        children = list(module.children())
        looks_up = looks_up or isinstance(module, nn.Embedding)
        only_forward = looks_up or (module not in owners and bool(children))
        for unit in users.get(module, ()):
            use = UnitUse(unit, inside - {unit})
            for order in (forward,) if only_forward else (forward, needed):
                if not order or order[-1].unit != unit:
                    order.append(use)
            inside |= {unit}
        pending += [(child, inside, looks_up) for child in reversed(children)]
    return tuple(forward), tuple(reversed(needed))
