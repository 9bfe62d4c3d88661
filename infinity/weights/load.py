"""Writes the first values of the units: from stored tensors, from the model, or from its
constructors.

[Note: low bits]
`Config.precision` may store parameters in fewer bits than their source: an fp32 model, or fp32
safetensors, in bf16. A trainable unit has a master block with room for the other bits. So its
master is written from the fp32 values, and the rounded parameter with it. Training then starts from
the exact weights. In all other cases only the parameter is written, and the master is the
parameter, widened. The choice depends on dtypes, never on values, so all ranks choose alike. It
costs a write of the master, 2 or 4 bytes per parameter, and a flat buffer of one unit in fp32.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import NamedTuple, Protocol

import torch
from torch import nn

from infinity.errors import ConfigError, WeightsError
from infinity.placement.spec import Kind
from infinity.sharding.tensor_parallel import bounds_of, local
from infinity.sharding.tiles import named_wholes, tile_places
from infinity.sharding.unit import Unit
from infinity.tiers.originals import StoredBytes
from infinity.weights.init import (
    Origin,
    check_values,
    forget,
    meta_buffers,
    part_of_values,
    seed_values,
)
from infinity.weights.matching import Matches, is_adapter, match, plain_name, pretrained_in
from infinity.weights.tape import Cell
from infinity.weights.tensors import Source, open_tensors

log = logging.getLogger("infinity")

_SHOWN = 20  # names in a warning


class FirstValues(Protocol):
    """Values for parameters and buffers, by their names in a model."""

    where: str

    def __contains__(self, name: str) -> bool: ...

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which `name` is stored."""

    def stored(self, name: str) -> StoredBytes | None:
        """The place of the bytes of `name` in a safetensors file, if they lie there as the model
        uses them; else None. Raises `WeightsError` if that file has changed."""

    def read_into(self, name: str, target: torch.Tensor, bounds: tuple[slice, ...] = ()) -> None:
        """Copy `name`, or the part of it within `bounds`, into `target` of the same shape,
        converting the dtype."""


class Weights:
    """The tensors of `where` for a model, by the names of its parameters and buffers; see
    `FirstValues`."""

    def __init__(self, matches: Matches, names: Mapping[str, str], exact: set[str]) -> None:
        self.where = matches.tensors.where
        self._matches = matches
        self._names = names
        self._exact = exact

    def __contains__(self, name: str) -> bool:
        return name in self._exact or self._names.get(name, "") in self._matches

    def dtype(self, name: str) -> torch.dtype:
        if name in self._exact:
            return self._matches.tensors.dtype(name)
        return self._matches.dtype(self._names[name])

    def stored(self, name: str) -> StoredBytes | None:
        if name in self._exact:
            return self._matches.tensors.stored(name)
        return self._matches.stored(self._names[name])

    def read_into(self, name: str, target: torch.Tensor, bounds: tuple[slice, ...] = ()) -> None:
        if name in self._exact:
            target.copy_(self._matches.tensors.read(name, bounds))
        else:
            target.copy_(self._matches.read(self._names[name], bounds))


def open_weights(source: Source, model: nn.Module) -> Weights:
    """Open the tensors of `source` (see `open_tensors`) and match them with `model`, by the names
    and layouts that transformers and PEFT use.

    Logs missing, unused and renamed tensors. Raises `ConfigError` if nothing can be read or a shape
    differs, and `WeightsError` if no tensor fits.
    """
    tensors = open_tensors(source)
    prefix, pretrained = pretrained_in(model)
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in (
            *named_wholes(model),
            *persistent_buffers(model),
        )
    }
    names = {name: plain_name(name, prefix) for name in shapes}
    wanted = {names[name]: shape for name, shape in shapes.items()}
    matches = match(tensors, pretrained, prefix, wanted)
    exact = {name for name in shapes if name != names[name]} & tensors.names()
    weights = Weights(matches, names, exact)
    wrong = matches.wrong + [
        (name, tensors.shape(name), shapes[name])
        for name in sorted(exact)
        if tensors.shape(name) != shapes[name]
    ]
    if wrong:
        text = "; ".join(
            f"{name} in {tensors.where} has shape {stored}, the model needs {needed}"
            for name, stored, needed in wrong[:_SHOWN]
        )
        raise ConfigError(text + (f"; and {len(wrong) - _SHOWN} more" * (len(wrong) > _SHOWN)))
    _report(weights, matches, model)
    return weights


def values_of(weights: Weights, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and persistent buffers of `model` that `weights` have, by name, each in
    the dtype of the model and on the host. Tied parameters come once. `model` needs no memory."""
    sources = sources_of(model)
    for name, value in (*model.named_parameters(), *persistent_buffers(model)):
        names = [each.name for each in sources.get(id(value), ())] or [name]
        stored = next((each for each in names if each in weights), None)
        if stored is not None:
            found = torch.empty(value.shape, dtype=value.dtype)
            weights.read_into(stored, found)
            yield name, found
            del found  # free it before the next one is read


def missing_in(weights: Weights, model: nn.Module) -> list[str]:
    """The names of the parameters of `model` that `weights` lack, without adapters of PEFT. Tied
    parameters count once."""
    lacking = [
        names[0].name
        for names in sources_of(model).values()
        if not any(each.name in weights for each in names)
    ]
    return [name for name in dict.fromkeys(lacking) if not is_adapter(model, name)]


def check_complete(weights: Weights, model: nn.Module) -> None:
    """Raise `WeightsError` if `weights` lack a parameter of `model` that PEFT has not added."""
    absent = missing_in(weights, model)
    if absent:
        raise WeightsError(
            f"{weights.where} has no tensor for {_some(absent, 5)}; it belongs to another model"
        )


def _some(names: Sequence[str], most: int) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" * (len(names) > most))


def _report(weights: Weights, matches: Matches, model: nn.Module) -> None:
    """Log missing, unused and renamed tensors. Raises `WeightsError` if no parameter has a
    tensor."""
    absent = missing_in(weights, model)
    if not any(name in weights for name, _ in named_wholes(model)):
        check_complete(weights, model)
    unexpected = matches.unexpected
    adjust = getattr(matches.pretrained, "_adjust_missing_and_unexpected_keys", None)
    if adjust is not None:
        info = SimpleNamespace(missing_keys=set(absent), unexpected_keys=set(unexpected))
        adjust(info)
        absent = [name for name in absent if name in info.missing_keys]
        unexpected = info.unexpected_keys
    if matches.renamed:
        key, name = next(iter(matches.renamed.items()))
        log.info(
            "%s: %d tensors have another name in the model, as %s, which is (a part of) %s",
            weights.where,
            len(matches.renamed),
            key,
            name,
        )
    if absent:
        log.warning(
            "%s has no tensor for %d of the model's parameters, which keep the values that their "
            "constructors gave them: %s",
            weights.where,
            len(absent),
            _some(absent, _SHOWN),
        )
    if unexpected:
        log.warning(
            "%s has %d tensors that the model does not use: %s",
            weights.where,
            len(unexpected),
            _some(sorted(unexpected), _SHOWN),
        )


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that belong to the model's state dict, by name."""
    for path, module in model.named_modules():
        for name, buffer in _own_buffers(module):
            yield _joined(path, name), buffer


def _own_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def buffer_names(model: nn.Module) -> dict[str, str]:
    """For every name of a persistent buffer, its name in `persistent_buffers`. A buffer of a module
    in several places has several names."""
    first: dict[int, str] = {}
    names = {}
    for path, module in model.named_modules(remove_duplicate=False):
        known = first.setdefault(id(module), path)
        for name, _ in _own_buffers(module):
            names[_joined(path, name)] = _joined(known, name)
    return names


def fill_units(
    model: nn.Module,
    units: Sequence[Unit],
    empty: Mapping[int, Origin | None],
    weights: FirstValues | None,
    seed: int | None,
    kept: bool = False,
) -> None:
    """Move the units to their tiers, one after the other, so that only one at a time is whole in
    memory. If they are `kept`, they are on their tiers already, and only the data of the parameters
    is released.

    Values come from `weights`. For a parameter that `weights` lack, they come from the parameter
    itself, or from its constructor if its id is in `empty`. With a `seed`, constructors draw again.
    Raises `ConfigError` before any move if a parameter or buffer has no values. The old data of a
    parameter is freed unless other code refers to it. See [Note: low bits].
    """
    buffers = meta_buffers(model)
    sources = sources_of(model)
    drawn = _DrawnValues()
    lacking = {
        key: origin
        for key, origin in empty.items()
        if weights is None or not any(each.name in weights for each in sources[key])
    }
    check_values(model, lacking)
    if seed is not None:
        seed_values(lacking, seed)
    for name, origin in buffers.items():
        if origin is None and (weights is None or name not in weights):
            raise ConfigError(
                f"the buffer {name} is on the meta device and has no values; build the model "
                "inside infinity.init() instead of torch.device('meta')"
            )
    with torch.random.fork_rng(devices=[], enabled=seed is not None), torch.no_grad():
        if seed is not None:
            torch.manual_seed(seed)
        for unit in units:
            block = unit.blocks[Kind.PARAM]
            stays_in_files = bool(unit.facts.stored) and block.tier.is_drive
            if stays_in_files:
                unit.store.fill_from_files(block)
            if stays_in_files or kept:
                unit.data.guard()
                continue
            found = [
                next((each for each in sources[id(p)] if weights and each.name in weights), None)
                for p in unit.facts.parameters
            ]
            _fill(unit, found, empty, weights, drawn)
            unit.data.guard()
        for name, origin in buffers.items():
            path, _, key = name.rpartition(".")
            buffer = model.get_buffer(name)
            model.get_submodule(path)._buffers[key] = (
                torch.empty_like(buffer, device="cpu")
                if origin is None
                else origin.tape.values(origin.place).clone()
            )
    forget(model)
    for name, buffer in persistent_buffers(model):
        if weights is not None and name in weights:
            weights.read_into(name, local(buffer))


def _fill(
    unit: Unit,
    sources: Sequence[SourceName | None],
    empty: Mapping[int, Origin | None],
    weights: FirstValues | None,
    drawn: _DrawnValues,
) -> None:
    """Write the first values of `unit`. Each parameter has its name in `weights`, or None. Returns
    when the flat buffer is freed."""
    names = ["" if each is None else each.name for each in sources]
    kind, dtype = _kept_of(unit, names, empty, weights)
    flat = torch.zeros(unit.facts.layout.numel, dtype=dtype)
    for parameter, source, place in zip(
        unit.facts.parameters, sources, unit.facts.layout.places, strict=True
    ):
        view = flat[place.offset : place.end].view(place.shape)
        if weights is not None and source is not None:
            weights.read_into(source.name, view, source.bounds)
        elif (origin := empty.get(id(parameter))) is not None:
            view.copy_(drawn.of(origin, parameter))
        else:
            view.copy_(local(parameter.data))
        del view
    unit.states.write(kind, unit.facts.shard_of(flat))


def _kept_of(
    unit: Unit,
    names: Sequence[str],
    empty: Mapping[int, Origin | None],
    weights: FirstValues | None,
) -> tuple[Kind, torch.dtype]:
    """The block of `unit` that is written first, PARAM or MASTER, and the dtype of the flat buffer
    for its values.

    `names` has the names of its parameters in `weights`, or "". Constructors draw parameters in
    their own dtype, as without the engine. The values are rounded after that.
    """
    sources = [
        p.dtype if weights is None or not name else weights.dtype(name)
        for p, name in zip(unit.facts.parameters, names, strict=True)
    ]
    if unit.facts.dtype not in (torch.bfloat16, torch.float16) or not any(
        _has_more_bits(s, unit.facts.dtype) for s in sources
    ):
        return Kind.PARAM, unit.facts.dtype
    if Kind.MASTER in unit.blocks:
        return Kind.MASTER, torch.float32
    is_drawn = any(
        not name and id(p) in empty for p, name in zip(unit.facts.parameters, names, strict=True)
    )
    return Kind.PARAM, torch.float32 if is_drawn else unit.facts.dtype


def _has_more_bits(source: torch.dtype, stored: torch.dtype) -> bool:
    """Whether `source`, a floating-point dtype, has values that `stored` lacks. This is true for
    fp16 and bf16 both ways."""
    return (
        source.is_floating_point
        and source.itemsize > 1
        and torch.promote_types(source, stored) != stored
    )


class _DrawnValues:
    """The values that constructors gave parameters. The values of a weight in tiles are made once
    for consecutive tiles."""

    def __init__(self) -> None:
        self._cell: Cell | None = None
        self._memory: torch.UntypedStorage | None = None

    def of(self, origin: Origin, parameter: nn.Parameter) -> torch.Tensor:
        """The values of `parameter`. They must not be written."""
        cell = origin.place.cell
        if origin.read() is not None or origin.place.is_whole():
            self._cell = self._memory = None
            return origin.values(parameter)
        if self._memory is None or self._cell is not cell:
            self._memory = None  # freed before the next memory is made
            self._cell, self._memory = cell, origin.tape.memory(cell)
        return part_of_values(origin.place.over(self._memory), parameter)


class SourceName(NamedTuple):
    """A name that may have values, and the indices that take the values of a parameter out of
    them."""

    name: str
    bounds: tuple[slice, ...]


def sources_of(model: nn.Module) -> dict[int, list[SourceName]]:
    """The possible sources of each parameter, by its id: first the weight that it is a tile of."""
    found = {
        number: [SourceName(place.name, place.bounds) for place in places]
        for number, places in tile_places(model).items()
    }
    for name, parameter in model.named_parameters(remove_duplicate=False):
        source = SourceName(name, bounds_of(parameter))
        found.setdefault(id(parameter), []).append(source)
    return found
