"""What the methods of a wrapped module do that would touch all of its data.

[Note: facade]
The parameters of a wrapped model have no data outside of their use, so some methods of `nn.Module`
cannot do what torch wrote. Each module of the model has a `Facade`, whose methods stand in for them
as attributes of the module. So they hold for the model, for its parts, and inside a module that
somebody puts around it. The class of a module stays what it is.

| call | what it does |
|---|---|
| `to`, `cuda`, `half` and their kin | nothing where parameters stay as they are, else it raises |
| `state_dict` | gives ordinary tensors, mapped from files (`directories/mapped`) |
| `load_state_dict` | writes to the parameters through `gathered`, unit by unit |
| `pickle`, `torch.save(model)`, `copy.deepcopy` | raises a sentence that names the way out |
| `torch.jit.script` | the same |
| `resize_token_embeddings` | the same, where the number of tokens would change |

With several ranks all of them call `state_dict` and `load_state_dict`: each gets the whole, and
gives the same.
"""

from __future__ import annotations

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


class Loads:
    """What the `load_state_dict` under way of one model has for its parameters. The outermost one
    writes it, unit by unit, also when it raises: torch loads what fits and then tells of the rest.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._values: dict[Unit, dict[int, torch.Tensor]] = {}

    def add(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """`parameter` gets `value` when the outermost load ends."""
        if isinstance(parameter, TiledWeight):
            for piece, part in zip(parameter.pieces, parameter.divided(value), strict=True):
                self.add(piece, part)
        elif isinstance(parameter, ShardedParameter):
            unit = unit_of(type(parameter).source)
            self._values.setdefault(unit, {})[unit.position(parameter)] = value
        else:  # which is gathered now
            with torch.no_grad():
                parameter.copy_(value)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """A load, or a part of one."""
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
            for unit in sorted(values, key=lambda unit: unit.index):
                self._write(unit, values.pop(unit))
        if failed is not None:
            raise failed

    def _write(self, unit: Unit, values: Mapping[int, torch.Tensor]) -> None:
        parameters = {index: unit.parameters[index] for index in values}
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
    def attach(cls, model: nn.Module, given: GivenTensors, directory: Path | None) -> None:
        """Give every module of `model` a facade. `state_dict` maps files in `directory`, or in that
        of `tempfile`, and notes in `given` what it gives."""
        loads = Loads()
        for module in model.modules():
            facade = cls(module, loads, given, directory)
            vars(module).update((name, getattr(facade, name)) for name in _METHODS)
            if hasattr(type(module), _RESIZE):
                vars(module)[_RESIZE] = facade.resize_token_embeddings

    @staticmethod
    def detach(model: nn.Module) -> None:
        """The modules of `model` have their own methods again."""
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
        """What `to`, `cuda`, `half` and their kin call. Refused before anything is changed where a
        parameter would change; buffers change as torch does it. A module may take other arguments
        than `recurse`, as those of torchmetrics do."""
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
        """As of a plain module, on the host. Tied parameters share memory. `keep_vars=True` gives
        the parameters themselves."""
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
        """`weight` in one file, of its tiles in `values`; tied ones are one tensor."""
        if id(weight) not in values:
            parts = [values.pop(id(piece), piece) for piece in weight.pieces]
            whole = torch.cat([part.detach() for part in parts], weight.dimension)
            values[id(weight)] = mapped(whole, self._directory)
        return values[id(weight)]

    def _mapped(self, wanted: Mapping[int, nn.Parameter]) -> dict[int, torch.Tensor]:
        """Those of `wanted` parameters that the engine keeps or shows, by their id, one unit at a
        time."""
        found = {
            key: mapped(parameter, self._directory)
            for key, parameter in wanted.items()
            if isinstance(parameter, GatheredParameter)
        }
        kept = [p for p in wanted.values() if isinstance(p, ShardedParameter)]
        units = sorted({unit_of(type(p).source) for p in kept}, key=lambda unit: unit.index)
        if units:
            units[0].listeners.updates.look()
        for unit in units:
            stored = unit.states.in_files()
            if stored is not None:
                found.update(zip(map(id, unit.parameters), stored, strict=True))
                continue
            flat = unit.states.gather(Kind.PARAM)
            for parameter, place in zip(unit.parameters, unit.layout.places, strict=True):
                if id(parameter) in wanted:
                    value = flat[place.offset : place.end].view(place.shape)
                    found[id(parameter)] = mapped(whole(value, parameter), self._directory)
            del flat  # before the next one is made
        return found

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of a plain module. `assign=True` copies, too: parameters stay what they are."""
        self._given.forget()
        with self._loads.under_way():
            return type(self._module).load_state_dict(self._module, *args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """What `load_state_dict` calls for every module, also that of a module around this one."""
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
        """What `pickle` and `torch.save` ask a module for."""
        raise ShardedParameterError(self._refused("pickled", SAVED))

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """What `copy.deepcopy` asks a module for."""
        raise ShardedParameterError(self._refused("copied", COPIED))

    def __prepare_scriptable__(self) -> NoReturn:
        """What `torch.jit.script` asks a module for."""
        raise ShardedParameterError(self._refused("scripted", PLAIN_COPY))

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As of a model of transformers where the number of tokens stays."""
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
