"""Where the values of parameters come from that are built without memory, so that none is replaced
without a word.

[Note: what a constructor does]
Inside `infinity.init()` a parameter has no memory, and what a constructor writes to it is gone.
`wrap` makes the values again, by `_init_weights` or `reset_parameters`. That is right where one of
these wrote last, and wrong where other code did. So `WriterWatch` sees every operator that writes
while models are built, finds out from the stack who called it, and notes it with the module:

    the last to write a parameter            what `wrap` does
    nobody: its memory came from torch.empty like RESET
    RESET: its own module's reset_parameters runs reset_parameters again
    MODEL: an `_init_weights`                runs it again
    CONSTANT: other code, one value for all  fills in this value
    OTHER: other code                        refuses, with file and line

A writer is its own module's only if that module holds the parameter: `wrap` would not call a
parent's `reset_parameters`. After `init()` the version counter of a parameter still tells that
somebody wrote, but not who: OTHER. A write through `.data`, or by an initialisation that torch
skips for meta tensors (`trunc_normal_`, `orthogonal_`), cannot be seen there.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_ATTRIBUTE = "_infinity_origins"  # of a module: by the names of its parameters
_UNINITIALISED = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
}
_FILLS = {"aten::fill_", "aten::zero_"}
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_SAMPLE = 16


class ParameterWriter(enum.Enum):
    """Who wrote a parameter last; see [Note: what a constructor does]."""

    NOBODY = enum.auto()
    RESET = enum.auto()
    MODEL = enum.auto()
    CONSTANT = enum.auto()
    OTHER = enum.auto()


class Origin(NamedTuple):
    """Where the values of a parameter come from: `where` is file and line of OTHER, `constant` has
    no dimensions."""

    writer: ParameterWriter
    where: str = ""
    constant: torch.Tensor | None = None


class _Built:
    """A parameter without memory, while models are built; or several of one storage."""

    def __init__(self, parameter: nn.Parameter, origin: Origin) -> None:
        self.origin = origin
        # Their numbers are nobody else's as long as these live.
        self.storages = [StorageWeakRef(parameter.untyped_storage())]
        self.numel = parameter.numel()
        # The modules that hold it, with its names there.
        self.holders: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


class WriterWatch(TorchDispatchMode):
    """Inside, notes who writes the parameters that were `registered`; of the thread that entered
    it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._empty: dict[int, StorageWeakRef] = {}  # storages that nobody has written yet
        self._built: dict[int, _Built] = {}
        self._skipped = _Skipped(self)

    def __enter__(self) -> WriterWatch:
        self._skipped.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._skipped.__exit__(*error)  # type: ignore[no-untyped-call]
        for built in self._built.values():
            for module, name in [
                (module, name) for module, names in built.holders.items() for name in names
            ]:
                parameter = module._parameters.get(name)
                # Else its data was replaced, and nothing is known.
                if parameter is not None and self._built.get(_number(parameter) or 0) is built:
                    vars(module).setdefault(_ATTRIBUTE, {})[name] = (
                        built.origin,
                        parameter._version,
                        id(parameter),
                    )

    def registered(self, module: nn.Module, name: str, given: nn.Parameter) -> None:
        """`module` was given the parameter `given`, of which it has one without memory as
        `name`."""
        parameter = cast("nn.Parameter", module._parameters[name])
        number = _number(parameter)
        if number is None:
            return
        if number not in self._built:
            origin = (
                Origin(ParameterWriter.NOBODY)
                if _number(given) in self._empty or not given.numel()
                else _given(given)
            )
            self._built[number] = _Built(parameter, origin)
        self._built[number].holders.setdefault(module, set()).add(name)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func`, and note what it writes."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            for tensor in _written(func, args, kwargs):
                self.wrote(tensor, func._schema.name, args)
        elif func._schema.name in _UNINITIALISED and (number := _number(result)) is not None:
            self._empty[number] = StorageWeakRef(result.untyped_storage())
        elif func._schema.name == "aten::_to_copy":
            # What `model.half()` puts in the place of a parameter's data.
            built = self._built.get(_number(args[0]) or 0)
            number = _number(result)
            if built is not None and number is not None and result.is_meta:
                built.storages.append(StorageWeakRef(result.untyped_storage()))
                self._built[number] = built
        return result

    def wrote(self, tensor: torch.Tensor, operator: str = "", args: Sequence[Any] = ()) -> None:
        """`operator` has written `tensor`, with `args`."""
        number = _number(tensor)
        if number is None:
            return
        self._empty.pop(number, None)
        built = self._built.get(number)
        if built is None:
            return
        built.origin = _origin(built.holders)
        if (
            built.origin.writer is ParameterWriter.OTHER
            and operator in _FILLS
            and tensor.numel() == built.numel
        ):
            value = args[1] if operator == "aten::fill_" else 0
            if not (isinstance(value, torch.Tensor) and value.is_meta):
                constant = torch.empty((), dtype=tensor.dtype).fill_(value)
                built.origin = Origin(ParameterWriter.CONSTANT, constant=constant)


class _Skipped(TorchFunctionMode):
    """Tells `watch` of the functions of `torch.nn.init` that look whether a tensor is on the meta
    device, and return then."""

    def __init__(self, watch: WriterWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`."""
        result = func(*args, **(kwargs or {}))
        if (
            result is True
            and func == _IS_META
            and sys._getframe(1).f_globals.get("__name__") == "torch.nn.init"
        ):
            self._watch.wrote(args[0])
        return result


def fix(module: nn.Module, name: str) -> None:
    """The parameter `name` of `module`, which has no memory yet, is written no more: note whether
    it was since it was built, or is another one. A DTensor that was made of it is not."""
    known, parameter = vars(module).get(_ATTRIBUTE, {}), module._parameters[name]
    if parameter is None or name not in known or isinstance(parameter, DTensor):
        return
    _, version, number = known[name]
    if number != id(parameter):
        del known[name]
    elif version != parameter._version:
        known[name] = (Origin(ParameterWriter.OTHER, "after init()"), parameter._version, number)


def origins_of(model: nn.Module) -> dict[int, Origin]:
    """What is known of the parameters of `model` that were built inside of `init()`, by their
    ids."""
    return {
        id(module._parameters[name]): origin
        for module in model.modules()
        for name, (origin, _, _) in vars(module).get(_ATTRIBUTE, {}).items()
        if name in module._parameters
    }


def forget(model: nn.Module) -> None:
    """All parameters of `model` have values now."""
    for module in model.modules():
        vars(module).pop(_ATTRIBUTE, None)


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """`frame`, and those that led to it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _given(parameter: nn.Parameter) -> Origin:
    """Of the values with which a parameter was registered."""
    constant = _constant(parameter) if parameter.device.type != "meta" else None
    return (
        Origin(ParameterWriter.OTHER, _place())
        if constant is None
        else Origin(ParameterWriter.CONSTANT, constant=constant)
    )


def _constant(parameter: nn.Parameter) -> torch.Tensor | None:
    """The one value that all elements have, to the bit, without dimensions; None where they
    differ."""
    flat = parameter.detach().reshape(-1)
    for part in (flat[:_SAMPLE], flat):  # what differs does so early
        codes = part.contiguous().view(torch.uint8).view(-1, flat.itemsize)
        if not torch.equal(codes, codes[:1].expand_as(codes)):
            return None
    return flat[:1].clone().view(())


def _origin(holders: Mapping[nn.Module, set[str]]) -> Origin:
    """Of what is written now to a parameter of `holders`."""
    writer = ParameterWriter.OTHER
    for frame in frames(sys._getframe(1)):
        if frame.f_code.co_name == "_init_weights":
            return Origin(ParameterWriter.MODEL)
        if frame.f_code.co_name == "reset_parameters":
            caller = frame.f_locals.get("self")
            if isinstance(caller, nn.Module) and caller in holders:
                writer = ParameterWriter.RESET
    return Origin(writer, _place() if writer is ParameterWriter.OTHER else "")


def _place() -> str:
    """The file and line that led here, outside of torch and of this package."""
    for frame in frames(sys._getframe(1)):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in (
            "torch",
            "infinity",
            "contextlib",
        ):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return "an unknown place"


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that `func`, called so, has written."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (
                each
                for each in (value if isinstance(value, (list, tuple)) else [value])
                if torch.is_tensor(each)
            )


def _number(tensor: Any) -> int | None:
    """The number of the storage of a tensor; None where it has none, as some subclasses."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        return None
