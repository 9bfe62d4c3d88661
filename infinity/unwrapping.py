"""Gives a wrapped model its data back, for `Engine.unwrap`, and for another `wrap`.

[Note: adapters after wrap]
`wrap` decides the layout of all parameters at once. So parameters that come later, such as adapters
of PEFT, need another `wrap` of the model around them. It first closes the engine. The parameters
then are plain ones, mapped from files: frozen parameters from the files of the user that are their
home, others from unnamed files as in a state dict (`directories/mapped`). So the kernel can reclaim
their memory. Moments and gradients are gone, as with any new optimizer.

[Note: values beside parameters]
A master has more bits than its parameter, and a frozen parameter may have a place in a file. Both
are kept beside the parameter until the next `wrap`, which uses them if they still agree with the
bits of the parameter. A write to the parameter meanwhile takes precedence.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from infinity.directories.mapped import mapped, mapped_range
from infinity.errors import ConfigError, WeightsError
from infinity.modules.facade import move_buffers
from infinity.placement.spec import Kind
from infinity.sharding.codec import round_to
from infinity.sharding.recognize import is_dtensor
from infinity.sharding.tiles import TiledWeight
from infinity.sharding.unit import Unit
from infinity.tiers.originals import StoredBytes
from infinity.tiles.tiling import join_tiles


class KeptValue(NamedTuple):
    """A place in a file, or a master (fp32), which a parameter had in its engine."""

    data: torch.Tensor
    place: StoredBytes | None = None

    def agrees_with(self, parameter: torch.Tensor) -> bool:
        """Whether it still is the value of `parameter`, which may have been written."""
        held = parameter.detach()
        if held.shape != self.data.shape or held.is_meta:
            return False
        if self.place is None:
            expected = torch.empty_like(held, device="cpu")
            round_to(expected, self.data)
        else:
            descriptor = _opened(self.place)
            if descriptor is None or held.dtype != self.data.dtype:
                return False
            flat = mapped_range(descriptor, self.place.offset, self.place.nbytes, held.dtype)
            expected = flat.view(held.shape)
        return torch.equal(_bytes_of(held), _bytes_of(expected))


_KEPT = WeakIdKeyDictionary()
"""Kept values of parameters that were unwrapped; see [Note: values beside parameters]."""


class KeptValues:
    """The kept values of a model that is wrapped once more, by the names of its parameters."""

    where = "the engine before"

    def __init__(self, values: dict[str, KeptValue]) -> None:
        self._values = values

    @classmethod
    def of(cls, model: nn.Module, are_fresh: bool = False) -> KeptValues | None:
        """The kept values of `model`; None if there are none. If they `are_fresh`, they are not
        compared with the parameters."""
        found = {
            id(parameter): _KEPT[parameter]
            for parameter in model.parameters()
            if parameter in _KEPT and (are_fresh or _KEPT[parameter].agrees_with(parameter))
        }
        named = model.named_parameters(remove_duplicate=False)
        values = {name: found[id(p)] for name, p in named if id(p) in found}
        return cls(values) if values or are_fresh else None

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of `name`: fp32 for a master."""
        return self._values[name].data.dtype

    def stored(self, name: str) -> StoredBytes | None:
        """The place of `name` in a file of the user."""
        return self._values[name].place

    def read_into(self, name: str, target: torch.Tensor, bounds: tuple[slice, ...] = ()) -> None:
        """Copy `name`, or the part of it within `bounds`, into `target`. A master is rounded as an
        update rounds it, so that the parameter keeps its bits."""
        data = self._values[name].data
        round_to(target, data[bounds] if bounds else data)


def forget_kept(model: nn.Module, undo: ExitStack) -> None:
    """Drop the kept values of `model`, whose parameters have an engine again, unless that is
    undone."""
    for parameter in model.parameters():
        if parameter in _KEPT:
            undo.callback(_KEPT.__setitem__, parameter, _KEPT.pop(parameter))


def unwrap(model: nn.Module, units: tuple[Unit, ...], close: Callable[[], None], what: str) -> None:
    """End the engine of `model` by `close`. Its parameters, those of `units`, are plain ones then,
    in tiles if they were. `what` is the name of the caller for messages. The engine was drained.
    Every rank calls it.

    Raises `ConfigError` for DTensors, and inside of a forward, before anything is changed.
    """
    _check(units, what)
    kept: dict[int, KeptValue] = {}
    values = [_values_of(unit, kept) for unit in units]
    close()
    for unit, data in zip(units, values, strict=True):
        unit.data.restore(data)
        for parameter in unit.parameters:
            if id(parameter) in kept:
                _KEPT[parameter] = kept[id(parameter)]
    move_buffers(model, torch.device("cpu"), None)


def rejoin(model: nn.Module, names: list[str], files: Path | None) -> None:
    """Join the weights `names` of an unwrapped model, in unnamed files in `files`."""

    def whole(weight: TiledWeight) -> nn.Parameter:
        masters = [_KEPT[piece].data for piece in weight.pieces if piece in _KEPT]
        with torch.no_grad():
            made = nn.Parameter(mapped(weight.joined(), files), weight.requires_grad)
        if len(masters) == len(weight.pieces):
            _KEPT[made] = KeptValue(mapped(torch.cat(masters, weight.dimension), files))
        return made

    join_tiles(model, names, whole)


def _check(units: tuple[Unit, ...], what: str) -> None:
    for unit in units:
        for name, parameter in zip(unit.names, unit.parameters, strict=True):
            if is_dtensor(parameter):
                raise ConfigError(
                    f"{name} is a DTensor of a wrapped model, which {what} cannot make a plain "
                    "one: take state_dict(), and build the model again; what comes to it has to "
                    "be there before infinity.wrap"
                )
        if unit.blocks[Kind.PARAM].copy.pins:
            raise ConfigError(
                f"{unit.name} is in use; call {what} outside of a forward, a backward and "
                "infinity.gathered"
            )


def _values_of(unit: Unit, kept: dict[int, KeptValue]) -> list[torch.Tensor]:
    """The parameters of `unit`, mapped. Adds their masters and places to `kept`."""
    found = unit.states.in_files()
    if found is not None:
        for parameter, value, place in zip(unit.parameters, found, unit.facts.stored, strict=True):
            if (descriptor := _opened(place)) is not None:
                os.close(descriptor)
                kept[id(parameter)] = KeptValue(value, place)
        return found
    found = _split(unit, unit.states.gather(Kind.PARAM))
    if Kind.MASTER in unit.blocks and unit.blocks[Kind.MASTER].written:
        masters = _split(unit, unit.states.gather(Kind.MASTER))
        for parameter, master in zip(unit.parameters, masters, strict=True):
            kept[id(parameter)] = KeptValue(master)
    return found


def _opened(place: StoredBytes) -> int | None:
    """A descriptor of the file; None if it cannot be opened again, for example because it was
    deleted while the engine had it open."""
    try:
        return place.file.open()
    except (OSError, WeightsError):
        return None


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


def _split(unit: Unit, flat: torch.Tensor) -> list[torch.Tensor]:
    return [
        mapped(flat[place.offset : place.end].view(place.shape), unit.facts.files)
        for place in unit.layout.places
    ]
