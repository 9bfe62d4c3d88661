"""The first values of the units: from safetensors, from the model, or from the modules' own
initialisation.

[Note: low bits]
`Config.precision` may store parameters in fewer bits than their values come with: an fp32 model, or
fp32 safetensors, in bf16. A trainable unit has a master block, with room for these bits. So its
master is written from the value in fp32, and takes the rounded parameter along: training goes on
from the weights that were given. Everywhere else nothing but the parameter is written, and the
master is the parameter, widened. The choice follows from dtypes alone, never from values, so that
all ranks choose alike. It costs the bytes of the master once more, 2 or 4 per parameter, and the
flat buffer of one unit in fp32.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from infinity.errors import ConfigError, WeightsError
from infinity.modules.init import Origin, check_values, forget, meta_buffers, seed_values
from infinity.nvme.safetensors import DTYPES
from infinity.placement.spec import Kind
from infinity.sharding.tensor_parallel import bounds_of, local
from infinity.sharding.unit import Unit

log = logging.getLogger("infinity")

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Weights:
    """The tensors of a directory of safetensors files, by name."""

    def __init__(self, directory: Path, files: dict[str, Any]) -> None:
        self.directory, self._files = directory, files

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> set[str]:
        """All names."""
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of tensor `name`."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of tensor `name` in its file."""
        code = str(self._files[name].get_slice(name).get_dtype())
        return DTYPES[code] if code in DTYPES else self._files[name].get_tensor(name).dtype

    def read_into(self, name: str, target: torch.Tensor, bounds: tuple[slice, ...] = ()) -> None:
        """Copy tensor `name`, or the part of it within `bounds`, into `target` of the same shape,
        converting the dtype."""
        file = self._files[name]
        target.copy_(file.get_slice(name)[bounds] if bounds else file.get_tensor(name))


@contextmanager
def open_weights(source: str | Path, model: nn.Module) -> Iterator[Weights]:
    """Open the safetensors of a Hugging Face directory, or one file, and check that they have what
    `model` needs.

    Raises `ConfigError` when there are none, one is broken, or a name is missing or has another
    shape.
    """
    path = Path(source)
    if path.is_file():
        files = [path]
    elif (path / INDEX).is_file():
        try:
            index = json.loads((path / INDEX).read_text())
            files = [path / name for name in sorted(set(index["weight_map"].values()))]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"{path / INDEX} is not an index of safetensors files: {reason}"
            ) from error
    elif (path / SINGLE).is_file():
        files = [path / SINGLE]
    else:
        raise ConfigError(f"{path} holds neither {SINGLE} nor {INDEX}")
    with ExitStack() as stack:
        names: dict[str, Any] = {}
        for file in files:
            try:
                opened = stack.enter_context(safe_open(str(file), framework="pt"))
            except (OSError, ValueError, SafetensorError) as error:
                raise ConfigError(f"{file} cannot be read as safetensors: {error}") from error
            names.update(dict.fromkeys(opened.keys(), opened))
        weights = Weights(path, names)
        _check(weights, model)
        yield weights


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that belong to the model's state dict, by name."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def fill_units(
    model: nn.Module,
    units: Sequence[Unit],
    empty: Mapping[int, Origin | None],
    weights: Weights | None,
    seed: int | None,
) -> None:
    """Move every unit to its tier, one after the other, so that no more than one is whole at a
    time.

    Values come from `weights`; without them from the parameters, and for those whose ids are in
    `empty` from what their constructors wrote, drawn anew where a `seed` is given. Raises
    `ConfigError` before anything is moved where there are none. What the parameters held is freed
    if nobody else holds it. See [Note: low bits].
    """
    buffers = meta_buffers(model)
    if weights is None:
        check_values(model, empty)
        if seed is not None:
            seed_values(empty, seed)
    for name, origin in buffers.items():
        if origin is None and (weights is None or name not in weights):
            raise ConfigError(
                f"the buffer {name} is on the meta device and has no values; build the model "
                "inside infinity.init() instead of torch.device('meta')"
            )
    aliases = _aliases(model)
    with torch.random.fork_rng(devices=[], enabled=seed is not None), torch.no_grad():
        if seed is not None:
            torch.manual_seed(seed)
        for unit in units:
            names = [
                next((n for n in aliases[id(p)] if weights and n in weights), "")
                for p in unit.parameters
            ]
            kind, dtype = _kept_of(unit, names, empty, weights)
            flat = torch.zeros(unit.layout.numel, dtype=dtype)
            for parameter, name, place in zip(
                unit.parameters, names, unit.layout.places, strict=True
            ):
                view = flat[place.offset : place.end].view(place.shape)
                if weights is not None:
                    weights.read_into(name, view, bounds_of(parameter))
                elif (origin := empty.get(id(parameter))) is not None:
                    view.copy_(origin.values(parameter))
                else:
                    view.copy_(local(parameter.data))
            unit.states.write(kind, unit.shard_of(flat))
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


def _kept_of(
    unit: Unit, names: Sequence[str], empty: Mapping[int, Origin | None], weights: Weights | None
) -> tuple[Kind, torch.dtype]:
    """What of `unit` is written first, its parameters or its masters, and the dtype in which its
    values are put together.

    `names` are those of its parameters in `weights`. Parameters of the modules' own initialisation
    are drawn in their own dtype, as without the engine, and rounded after that.
    """
    sources = (
        [p.dtype for p in unit.parameters]
        if weights is None
        else [weights.dtype(name) for name in names]
    )
    if unit.dtype not in (torch.bfloat16, torch.float16) or not any(
        _has_more_bits(s, unit.dtype) for s in sources
    ):
        return Kind.PARAM, unit.dtype
    if Kind.MASTER in unit.blocks:
        return Kind.MASTER, torch.float32
    is_drawn = weights is None and any(id(parameter) in empty for parameter in unit.parameters)
    return Kind.PARAM, torch.float32 if is_drawn else unit.dtype


def _has_more_bits(source: torch.dtype, stored: torch.dtype) -> bool:
    """Whether `stored` cannot hold every value of `source`, a type of floating-point numbers. fp16
    and bf16 hold neither all values of the other."""
    return (
        source.is_floating_point
        and source.itemsize > 1
        and torch.promote_types(source, stored) != stored
    )


def _aliases(model: nn.Module) -> dict[int, list[str]]:
    """Every name of each parameter, by its id; tied parameters have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _check(weights: Weights, model: nn.Module) -> None:
    shapes = {id(parameter): tuple(parameter.shape) for parameter in model.parameters()}
    buffers = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(model)}
    needed = {name: buffers[name] for name in buffers if name in weights}
    known = set(buffers)
    absent = []
    for key, names in _aliases(model).items():
        known.update(names)
        name = next((name for name in names if name in weights), None)
        if name is None:
            absent.append(names[0])
        else:
            needed[name] = shapes[key]
    for name, shape in needed.items():
        if weights.shape(name) != shape:
            raise ConfigError(
                f"{name} in {weights.directory} has shape {weights.shape(name)}, the model "
                f"needs {shape}"
            )
    if absent:
        some = ", ".join(absent[:5]) + (f" and {len(absent) - 5} more" if len(absent) > 5 else "")
        raise WeightsError(
            f"{weights.directory} has no tensor for {some}; it belongs to another model"
        )
    extra = sorted(weights.names() - known)
    if extra:
        log.warning(
            "%s has %d tensors that the model does not use, %s first",
            weights.directory,
            len(extra),
            extra[0],
        )
