"""Replacements for the methods of a wrapped module that would touch all of its data.

[Note: facade]
The parameters of a wrapped model have data only while they are in use. So some methods of
`nn.Module` cannot work as torch wrote them. Each module of the model has a `Facade`. Its methods
replace those of torch as attributes of the module. So they apply to the model, to its parts, and
inside a module that contains the model. The class of a module does not change.

| call | effect |
|---|---|
| `to`, `cuda`, `half` and their kin | none if no parameter would change, else it raises |
| `state_dict` | returns ordinary tensors, mapped from files (`directories/mapped`) |
| `load_state_dict` | writes to the parameters through `gathered`, unit by unit |
| `pickle`, `torch.save`, `copy` | raises an error that says what to do instead |
| `torch.jit.script` | the same |
| `resize_token_embeddings` | the same, if the number of tokens would change |

With several ranks, every rank calls `state_dict` and `load_state_dict`. Each rank gets the full
state dict, and passes the same one.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from infinity.directories.mapped import mapped
from infinity.errors import ShardedParameterError
from infinity.modules.gathered import gathered
from infinity.modules.given import GivenTensors
from infinity.modules.tracing import PLAIN_COPY
from infinity.placement.spec import Kind
from infinity.sharding.parameter import COPIED, MOVED, SAVED, ShardedParameter
from infinity.sharding.tensor_parallel import local, part_in, whole
from infinity.sharding.tiles import TiledWeight, pieces_of
from infinity.sharding.unit import Unit, unit_of
from infinity.sharding.views import GatheredParameter
from infinity.tiles.tiling import InTiles
from infinity.weights.load_target import load_into_targets

_METHODS = (
    *("_apply", "state_dict", "load_state_dict", "_load_from_state_dict"),
    *("__reduce_ex__", "__deepcopy__", "__prepare_scriptable__"),
)
_RESIZE = "resize_token_embeddings"
"""A method of models of transformers."""


def move_buffers(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Bring all buffers of `model` to `device`, where its parameters are, which have `dtype` unless
    that is None, and the scales of weights of bitsandbytes. Modules of Lightning say the device and
    the dtype of their last `to`, so they are told."""
    for module in model.modules():
        scales: Any = vars(module).get("quant_state")
        if type(scales).__name__ == "QuantState":
            scales.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
        if any(kind.__name__ == "_DeviceDtypeModuleMixin" for kind in type(module).__mro__):
            vars(module)["_device"] = device
            vars(module)["_dtype"] = dtype or vars(module)["_dtype"]


class Loads:
    """The values that a `load_state_dict` under way has for the parameters of one model. The
    outermost load writes them, unit by unit. It writes them also when it raises an `Exception`,
    because torch loads the tensors that fit and then reports the others."""

    def __init__(self, check: Callable[[], None]) -> None:
        """`check` raises while nothing can be written."""
        self._check = check
        self._depth = 0
        self._values: dict[Unit, dict[int, torch.Tensor]] = {}

    def add(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Write `value` to `parameter`: when the outermost load ends, or now if `parameter` is
        gathered."""
        if isinstance(parameter, TiledWeight):
            for piece, part in zip(parameter.pieces, parameter.divided(value), strict=True):
                self.add(piece, part)
        elif isinstance(parameter, ShardedParameter):
            unit = unit_of(type(parameter).source)
            self._values.setdefault(unit, {})[unit.data.index_of(parameter)] = value
        else:  # gathered now
            with torch.no_grad():
                parameter.copy_(value)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Enter a load, or a part of one. The outermost load writes the values when it ends. An
        interrupt drops them."""
        self._check()
        self._depth += 1
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            failed = error
        except BaseException:
            self._values.clear()
            raise
        finally:
            self._depth -= 1
        if self._depth == 0:
            values, self._values = self._values, {}
            for unit in sorted(values, key=lambda unit: unit.facts.index):
                self._write(unit, values.pop(unit))
        if failed is not None:
            raise failed

    def _write(self, unit: Unit, values: Mapping[int, torch.Tensor]) -> None:
        parameters = {index: unit.facts.parameters[index] for index in values}
        with torch.no_grad(), gathered(list(parameters.values()), write=True):
            for index, parameter in parameters.items():
                local(parameter).copy_(part_in(values[index], parameter))


class Facade:
    """Stands in for methods of one module of a wrapped model, from `attach` to `detach`. See
    [Note: facade]."""

    def __init__(
        self, module: nn.Module, loads: Loads, given: GivenTensors, directory: Path | None
    ) -> None:
        self._reference = weakref.ref(module)
        self._loads, self._given = loads, given
        self._directory = directory

    @classmethod
    def attach(
        cls,
        model: nn.Module,
        given: GivenTensors,
        directory: Path | None,
        check: Callable[[], None],
    ) -> None:
        """Give every module of `model` a facade. `state_dict` maps files in `directory`, or in that
        of `tempfile`. It notes the tensors that it returns in `given`. A load begins with
        `check`."""
        loads = Loads(check)
        for module in model.modules():
            facade = cls(module, loads, given, directory)
            vars(module).update((name, getattr(facade, name)) for name in _METHODS)
            if hasattr(type(module), _RESIZE):
                vars(module)[_RESIZE] = facade.resize_token_embeddings

    @staticmethod
    def detach(model: nn.Module) -> None:
        """Give the modules of `model` their own methods again."""
        for module in model.modules():
            for name in (*_METHODS, _RESIZE):
                vars(module).pop(name, None)

    @property
    def _module(self) -> nn.Module:
        module = self._reference()
        if module is None:
            raise ShardedParameterError("the module of this method is gone")
        return module

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **options: Any
    ) -> nn.Module:
        """The method that `to`, `cuda`, `half` and their kin call. Raises `ShardedParameterError`
        before any change if a parameter would change. Buffers change as in torch. A module may take
        other arguments than `recurse`, as the modules of torchmetrics do."""
        module = self._module
        recurse = options.get("recurse", args[0] if args else True)
        for parameter in module.parameters(recurse is not False):
            if isinstance(parameter, ShardedParameter) and fn(parameter) is not parameter:
                name = type(parameter).source.name_of(parameter)
                raise ShardedParameterError(f"{name} would be replaced; {MOVED}")
        held = module._parameters
        others = {
            name: parameter
            for name, parameter in held.items()
            if not isinstance(parameter, ShardedParameter)
        }
        vars(module)["_parameters"] = others
        try:
            type(module)._apply(module, fn, *args, **options)
        finally:
            held.update(others)
            vars(module)["_parameters"] = held
        return module

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The state dict of a plain module, on the host. Tied parameters share memory.
        `keep_vars=True` returns the parameters themselves."""
        named = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)) | kwargs
        module = self._module
        state: dict[str, Any] = type(module).state_dict(module, **named | {"keep_vars": True})
        if named.get("keep_vars", False):
            return state
        parameters = {name for name, value in state.items() if isinstance(value, nn.Parameter)}
        values = self._mapped(
            {
                id(piece): piece
                for value in state.values()
                if isinstance(value, nn.Parameter)
                for piece in pieces_of([value])
                if isinstance(piece, nn.Parameter)
            }
        )
        for name, value in state.items():
            if isinstance(value, TiledWeight):
                state[name] = self._joined(value, values)
            elif isinstance(value, torch.Tensor):
                state[name] = values.get(id(value), value).detach()
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name in parameters:
                self._given.note(name, value)
        return state

    def _joined(self, weight: TiledWeight, values: dict[int, torch.Tensor]) -> torch.Tensor:
        """`weight` in one file, joined from its tiles in `values`. Tied weights give one tensor."""
        if id(weight) not in values:
            parts = [values.pop(id(piece), piece) for piece in weight.pieces]
            whole = torch.cat([part.detach() for part in parts], weight.dimension)
            values[id(weight)] = mapped(whole, self._directory)
        return values[id(weight)]

    def _mapped(self, wanted: Mapping[int, nn.Parameter]) -> dict[int, torch.Tensor]:
        """The values of `wanted` parameters that the engine manages, by their id. Reads one unit at
        a time."""
        found = {
            key: mapped(parameter, self._directory)
            for key, parameter in wanted.items()
            if isinstance(parameter, GatheredParameter)
        }
        kept = [p for p in wanted.values() if isinstance(p, ShardedParameter)]
        units = sorted({unit_of(type(p).source) for p in kept}, key=lambda unit: unit.facts.index)
        if units:
            units[0].listeners.updates.look()
        for unit in units:
            stored = unit.states.in_files()
            if stored is not None:
                found.update(zip(map(id, unit.facts.parameters), stored, strict=True))
                continue
            flat = unit.states.gather(Kind.PARAM)
            for parameter, place in zip(
                unit.facts.parameters, unit.facts.layout.places, strict=True
            ):
                if id(parameter) in wanted:
                    value = flat[place.offset : place.end].view(place.shape)
                    found[id(parameter)] = mapped(whole(value, parameter), self._directory)
            del flat  # before the next unit is gathered
        return found

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load as a plain module does. `assign=True` copies, too: the parameters stay the same
        objects."""
        self._given.forget()
        with self._loads.under_way():
            return type(self._module).load_state_dict(self._module, *args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """The method that `load_state_dict` of this module, or of one around it, calls for every
        module."""
        module = self._module
        held = module._parameters.items()
        kept: dict[str, torch.Tensor] = {}
        if isinstance(module, InTiles):
            kept |= module.tiled
        kept |= {name: p for name, p in held if isinstance(p, ShardedParameter)}
        load = partial(type(module)._load_from_state_dict, module, *args, **kwargs)
        with self._loads.under_way():
            for loaded in load_into_targets(module, kept, load):
                self._loads.add(loaded.parameter, loaded.value)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """The method that `pickle`, `torch.save` and `copy.copy` call."""
        if sys._getframe(1).f_globals.get("__name__") == "copy":
            raise ShardedParameterError(self._refused("copied", COPIED))
        raise ShardedParameterError(self._refused("pickled", SAVED))

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """The method that `copy.deepcopy` calls."""
        raise ShardedParameterError(self._refused("copied", COPIED))

    def __prepare_scriptable__(self) -> NoReturn:
        """The method that `torch.jit.script` calls."""
        raise ShardedParameterError(self._refused("scripted", PLAIN_COPY))

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """The method of transformers, if the number of tokens does not change. Otherwise raises
        `ShardedParameterError`."""
        module: Any = self._reference()
        stays = module is not None and not args and not kwargs.get("pad_to_multiple_of")
        if not (stays and new_num_tokens in (None, len(module.get_input_embeddings().weight))):
            raise ShardedParameterError(
                "resize_token_embeddings would replace parameters of a wrapped model: "
                "call it before infinity.wrap, or call infinity.engine(model).unwrap(), then it, "
                "and wrap the model once more"
            )
        return type(module).resize_token_embeddings(module, new_num_tokens, *args, **kwargs)

    def _refused(self, what: str, way: str) -> str:
        return (
            f"this {type(self._module).__name__} is part of a wrapped model, whose data the engine "
            f"keeps, so it cannot be {what}; {way}"
        )
