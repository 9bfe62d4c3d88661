"""How a parameter that was built in `infinity.init` acts until its model is wrapped.

[Note: before wrap]
A parameter without memory is a handle on a tape. For constructors inside `init` it is a tensor on
the meta device, and their operators are noted (`taping`). Outside of `init` it acts as if it were
on the host, with its values:

    a function that                            gets
    asks for shape, dtype, hooks and so on     the handle
    views the parameter, or takes its `.data`  the handle; the result is a `TapedTensor`
    distributes it (tensor parallelism)        the handle: a tensor on the meta device
    writes the parameter, or such a view       the handle: the operator is noted
    converts the parameter (`half`, `to`)      the same; nothing is moved to another device
    does anything else                         the values, which are made again each time

So a model can be read, copied, changed and run before it is wrapped, with the memory of one
parameter. Values that lie in a safetensors file are mapped from there. Written values are kept in
unnamed files (`directories/mapped`). Memory addresses are refused, except `data_ptr()` of a
parameter of `init_zero`: scripts for DeepSpeed tell parameters apart by it.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch._functorch import pyfunctorch
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_iter, tree_map

from infinity.backward import in_backward
from infinity.compilation import call_uncompiled, is_traced
from infinity.directories.mapped import mapped
from infinity.errors import ConfigError
from infinity.sharding.zero_names import ZeroNames, ZeroStatus
from infinity.weights.matching import StoredRead
from infinity.weights.tape import Operation, Place, Tape
from infinity.weights.taping import Taping, call_of

_SHAPED = {
    *("dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point"),
    *("is_inference", "is_same_size", "is_signed", "nelement", "ndimension", "numel", "size"),
    *("storage_offset", "stride", "__hash__", "__len__", "_is_view"),
    *("register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad"),
}
"""Functions that need no values."""
_VIEWS = {
    *("as_strided", "chunk", "detach", "diagonal", "expand", "expand_as", "flatten", "movedim"),
    *("narrow", "permute", "reshape", "select", "split", "squeeze", "swapaxes", "t"),
    *("tensor_split", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view"),
    *("view_as", "__getitem__"),
}
"""Functions with results that share memory with their first argument."""
_VIEWING = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""Attributes that share memory with their tensor."""
_CONVERSIONS = {
    *("bfloat16", "contiguous", "cpu", "cuda", "double", "float", "half", "to", "type", "type_as"),
}
_WRITES = {
    *("__iadd__", "__iand__", "__ifloordiv__", "__ilshift__", "__imod__", "__imul__", "__ior__"),
    *("__ipow__", "__irshift__", "__isub__", "__itruediv__", "__ixor__", "__setitem__"),
}
_NO_GRADIENT = (
    "backward came to a parameter that was built in infinity.init() and has no memory for a "
    "gradient yet; call infinity.wrap before"
)
_IN_TRANSFORM = (
    "a transform of torch.func was given a parameter that was built in infinity.init() and has no "
    "memory yet; give it clones ({name: p.detach().clone() for name, p in "
    "model.named_parameters()})"
)
_TRACED = (
    "torch.jit.trace, torch.export, make_fx and FakeTensorMode cannot follow a model that was "
    "built in infinity.init() and has no memory yet; follow one that was built outside of it, "
    "which may load_state_dict(model.state_dict())"
)
_SET_DATA = cast("Any", torch.Tensor.data).__set__
_ADDRESSES = {"data_ptr", "storage", "untyped_storage", "_typed_storage", "share_memory_"}


class _Sight(threading.local):
    """How this thread sees parameters without memory."""

    as_built = 0


_SIGHT = _Sight()


@contextmanager
def as_built() -> Iterator[None]:
    """Inside the context, this thread sees parameters without memory as tensors on the meta
    device."""
    _SIGHT.as_built += 1
    try:
        yield
    finally:
        _SIGHT.as_built -= 1


class _Taped:
    """A handle on the tape of its class; see [Note: before wrap]."""

    taping: ClassVar[Taping]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`; torch.compile breaks its graph there."""
        return call_uncompiled(_run, cls, func, args, kwargs or {})


_CODE = _Taped.__torch_function__.__func__.__code__  # type: ignore[attr-defined]


def _run(kind: Any, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Run `func`, of which an argument is a handle of class `kind`."""
    caller = _caller()
    if func is torch.Tensor.detach and _makes_parameter(caller):
        return cast("Any", type(args[0]))(_plainly(func, args, {}))  # of the same class
    if _is_raw(kind.taping) or _makes_shards(caller):
        if func == _SET_DATA and not isinstance(args[1], _Taped):
            # torch takes data that are dispatched as the handle is
            args = [args[0], args[1].as_subclass(kind.taping.tensor_kind)]
        return _plainly(func, args, kwargs)
    return _answer(func, args, kwargs, caller)


def _caller() -> FrameType:
    """What called the function that `_run` runs."""
    first: FrameType = sys._getframe(1)
    frame: FrameType | None = first
    while frame is not None and frame.f_code is not _CODE:
        frame = frame.f_back
    return first if frame is None or frame.f_back is None else frame.f_back


def _past_functions(
    kind: Any, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
) -> Any:
    """The `__torch_dispatch__` of handles: run `func`, which came past `__torch_function__`, on
    what they are. A transform that was given a handle takes it apart, so its operators come here:
    they are refused."""
    if not _is_raw(kind.taping) and _is_transformed(sys._getframe(1)):
        raise ConfigError(_IN_TRANSFORM)
    if func is torch.ops.aten.set_.source_Tensor and not _is_raw(kind.taping):
        _noted(_SET_DATA, args, {}, is_write=True)  # as a parametrization writes its parameters
        return args[0]
    with torch._C._DisableTorchDispatch():
        return func(*args, **(kwargs or {}))


def _is_transformed(frame: FrameType | None) -> bool:
    """Whether a transform of `torch.func` runs `frame`."""
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("torch._functorch."):
            return True
        frame = frame.f_back
    return False


def _makes_shards(frame: FrameType) -> bool:
    """Whether `frame` is code of tensor parallelism. Shards that it makes have no memory,
    either."""
    return str(frame.f_globals.get("__name__", "")).startswith("torch.distributed.tensor")


def _makes_parameter(frame: FrameType | None) -> bool:
    """Whether `nn.Parameter(...)` runs in `frame`, or in its caller below a mode for functions."""
    for _ in range(2):
        if frame is not None and frame.f_code is nn.Parameter.__new__.__code__:
            return True
        frame = None if frame is None else frame.f_back
    return False


class TapedTensor(_Taped, torch.Tensor):
    """A view, or a conversion, of a parameter without memory."""


class TapedParameter(_Taped, nn.Parameter):
    """A parameter without memory that was built in `init`. Each `init` has its own subclass, so
    that the type knows the tape."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if _is_raw(type(self).taping):
            return super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        if id(self) not in memo:
            memo[id(self)] = _copied(self)
        return memo[id(self)]

    def __repr__(self) -> str:  # type: ignore[override]
        if _is_raw(type(self).taping):
            return str(super().__repr__())  # type: ignore[no-untyped-call]
        return repr(nn.Parameter(values_of(self), self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain parameter with its values."""
        values = values_of(self).clone()
        return nn.Parameter(values, self.requires_grad).__reduce_ex__(protocol)


class NamedTapedParameter(TapedParameter, ZeroNames):
    """A parameter that was built in `init_zero` and has the names of DeepSpeed."""

    @property
    def ds_status(self) -> ZeroStatus:  # type: ignore[override]
        """AVAILABLE inside `init_zero` and inside a block that gathers it."""
        taping = type(self).taping
        inside = taping in _get_current_dispatch_mode_stack() or taping.gathered[id(self)]
        return ZeroStatus.AVAILABLE if inside else ZeroStatus.NOT_AVAILABLE


def kinds_for(taping: Taping, named: bool) -> tuple[type[TapedTensor], type[TapedParameter]]:
    """The classes of tensors and of parameters on the tape of `taping`. If `named`, parameters have
    the names of DeepSpeed."""
    parameter = NamedTapedParameter if named else TapedParameter
    own = {"taping": taping, "__torch_dispatch__": classmethod(_past_functions)}
    return type("TapedTensor", (TapedTensor,), own), type("TapedParameter", (parameter,), own)


@contextmanager
def shown(parameters: Sequence[NamedTapedParameter]) -> Iterator[None]:
    """Inside the context, the status of `parameters` is AVAILABLE."""
    marks: list[tuple[Counter[int], int]] = [(type(p).taping.gathered, id(p)) for p in parameters]
    for counts, number in marks:
        counts[number] += 1
    try:
        yield
    finally:
        for counts, number in marks:
            counts[number] -= 1


def writes_of(parameter: TapedParameter) -> int:
    """How many operations have written the values of `parameter` so far."""
    with as_built():
        tape = type(parameter).taping.tape
        return tape.writes(tape.place(parameter).cell)


def number_built(parameter: TapedParameter) -> tuple[int, int]:
    """A key that sorts parameters alike on all ranks that built the same model."""
    with as_built():
        place = type(parameter).taping.tape.place(parameter)
    return place.cell.number, place.offset


def give_up(parameters: Sequence[torch.Tensor], undo: ExitStack) -> None:
    """`wrap` replaces `parameters`: from now on reads of those without memory raise, because their
    values are out of date. `undo` ends that."""
    with as_built():
        for parameter in parameters:
            if isinstance(parameter, TapedParameter):
                cell = type(parameter).taping.tape.place(parameter).cell
                undo.callback(setattr, cell, "is_taken", cell.is_taken)
                cell.is_taken = True


def address_of(parameter: TapedParameter) -> int:
    """An address that only parameters at the same place in memory share. It cannot be read."""
    with as_built():
        place = type(parameter).taping.tape.place(parameter)
    return place.cell.address() + place.offset * place.dtype.itemsize


def stored_read(tape: Tape, place: Place) -> StoredRead | None:
    """The operation that reads the values at `place` from a file, if they are a whole stored tensor
    or some of its rows; else None."""
    operations = tape.slice(place.cell)
    if len(operations) != 1:
        return None
    read, (made, *_) = operations[0].function, operations[0].results or [None]
    if not isinstance(read, StoredRead) or read.dtype is not place.dtype or made is None:
        return None
    rows = place.rows_of(made)
    return None if rows is None else replace(read, bounds=rows)


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a handle, in memory of their own.

    Raises `ConfigError` for a parameter that `wrap` has replaced.
    """
    tape = cast("Any", type(tensor)).taping.tape
    with as_built(), torch.no_grad(), _all_paused():
        place = tape.place(tensor)
        if place.cell.is_taken:
            raise ConfigError(
                "a parameter that was built in infinity.init() is used after infinity.wrap, which "
                "has made a new one of it; take it from the model again"
            )
        read = stored_read(tape, place)
        if read is not None:
            return read()
        tape.was_read |= any(each.draws for each in tape.slice(place.cell))
        return tape.values(place).clone()


@contextmanager
def _all_paused() -> Iterator[None]:
    """Inside the context, no `init` under way notes anything."""
    with ExitStack() as stack:
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, Taping):
                stack.enter_context(mode.paused())
        yield


def _is_raw(taping: Taping) -> bool:
    """Whether this thread sees handles of `taping` as tensors on the meta device now."""
    return bool(_SIGHT.as_built or taping.is_paused or taping in _get_current_dispatch_mode_stack())


def _answer(func: Any, args: Sequence[Any], kwargs: Any, caller: FrameType) -> Any:
    """The result of `func`, which `caller` called outside of `init`; see [Note: before wrap]."""
    name = getattr(func, "__name__", "")
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    first = next(iter((*args, *kwargs.values())), None)
    if isinstance(first, (list, tuple)) and first:
        first = first[0]
    if func in (torch.autograd.backward, torch.autograd.grad):  # with handles, or the loss of one
        raise ConfigError(_NO_GRADIENT)
    if isinstance(kwargs.get("out"), _Taped):
        return _noted(func, args, kwargs, is_write=True)
    if not isinstance(first, _Taped):
        return func(*tree_map(_read, args), **tree_map(_read, kwargs))
    if name == "__get__" and attribute not in _VIEWING:
        return _attribute(func, attribute, cast("Any", first), caller)
    if name in _SHAPED or (name == "__set__" and attribute != "data"):
        return _plainly(func, args, kwargs)
    if name == "data_ptr" and isinstance(first, NamedTapedParameter):
        return address_of(first)
    if name in _ADDRESSES:
        raise ConfigError(
            "a parameter that was built in infinity.init() has no memory before infinity.wrap, and "
            "so no address; take a copy of it (.clone())"
        )
    if name == "__iter__":
        return iter(_answer(torch.Tensor.unbind, args, kwargs, caller))
    if name == "__set__" or name in _WRITES or (name.endswith("_") and name[:2] != "__"):
        return _noted(func, args, kwargs, is_write=True)
    if name in _CONVERSIONS and isinstance(first, TapedParameter):
        return _converted(func, args, kwargs)
    if name == "detach" and caller.f_code.co_name == "_save_to_state_dict":
        return mapped(values_of(cast("Any", first)), None)
    is_view = name == "__get__" or name in _VIEWS
    if is_view and not torch._C._are_functorch_transforms_active():
        return _noted(func, args, kwargs, is_write=False)
    return func(*tree_map(_read, args), **tree_map(_read, kwargs))


def _attribute(func: Any, name: str, tensor: torch.Tensor, caller: FrameType) -> Any:
    """An attribute that `caller` takes, and that needs no values."""
    if name == "device":
        with as_built():
            return cast("Any", type(tensor)).taping.tape.place(tensor).cell.device
    if name == "is_meta" and caller.f_code.co_name == "_load_from_state_dict":
        return False  # else torch warns that the load does nothing
    if name == "is_meta" and caller.f_globals.get("__name__") == "torch.nn.init":
        with as_built():  # else the function does nothing
            cast("Any", type(tensor)).taping.call(*call_of(caller))
    return _plainly(func, (tensor,), {})


def _plainly(func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _read(value: Any) -> Any:
    """The values of a handle; any other value itself. A backward that comes to the values
    raises."""
    if not isinstance(value, _Taped) or _is_raw(type(value).taping):
        return value
    if is_traced():
        raise ConfigError(_TRACED)
    tensor = cast("torch.Tensor", value)
    if torch._C._are_functorch_transforms_active():
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise ConfigError(_IN_TRANSFORM)
        with pyfunctorch.temporarily_clear_interpreter_stack():  # a constant to all of them
            return _read(tensor)
    if tensor.requires_grad and in_backward() and _owes_a_gradient():
        raise ConfigError(_NO_GRADIENT)
    values = values_of(tensor)
    if torch.is_grad_enabled() and tensor.requires_grad:
        start = torch.empty(0, requires_grad=True)
        return _WithoutGradient.apply(start, values)  # type: ignore[no-untyped-call]
    return values


def _owes_a_gradient() -> bool:
    """Whether the backward of a custom function runs that would give a gradient to a handle. Torch
    would only say that the device of the gradient is wrong."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not BackwardCFunction.apply.__code__:
        frame = frame.f_back
    if frame is None:
        return False
    nodes = [node for node, _ in frame.f_locals["self"].next_functions if node is not None]
    return any(each.device.type == "meta" for node in nodes for each in node._input_metadata)


class _WithoutGradient(torch.autograd.Function):
    """Puts values into a graph. A backward that comes to them raises."""

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ConfigError(_NO_GRADIENT)


def _noted(func: Any, args: Sequence[Any], kwargs: Any, is_write: bool) -> Any:
    """Run `func`, which views or writes its first argument, on handles."""
    first = next(each for each in tree_iter((kwargs, args)) if isinstance(each, _Taped))
    taping = type(first).taping
    with as_built():
        is_taken = taping.tape.place(cast("Any", first)).cell.is_taken
    if is_taken:
        values_of(cast("Any", first))  # raises

    def kept(value: Any) -> Any:
        """A copy of a tensor that other code may change after this call; any other value itself."""
        if not isinstance(value, torch.Tensor):
            return value
        if isinstance(value, _Taped):
            return value if type(value).taping is taping else mapped(values_of(value), None)
        return mapped(value, None) if is_write and value.device.type == "cpu" else value

    args, kwargs = tree_map(kept, (args, kwargs))
    with taping:
        result = func(*args, **kwargs)
    given = {id(each) for each in tree_iter((args, kwargs))}
    with as_built():
        return tree_map(
            lambda each: (
                each.as_subclass(taping.tensor_kind)
                if id(each) not in given and taping.is_handle(each)
                else each
            ),
            result,
        )


def _converted(func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Convert a parameter to another dtype, without memory. It moves to no device."""
    parameter: TapedParameter = args[0]
    with as_built():
        wanted = _plainly(func, (torch.empty(0, dtype=parameter.dtype), *args[1:]), kwargs)
        dtype = wanted.dtype if isinstance(wanted, torch.Tensor) else None
    if dtype is None:  # `type()`, which gives a name
        return wanted
    if dtype is parameter.dtype:
        return parameter
    return _noted(torch.Tensor.to, (parameter, dtype), {}, is_write=False)


def _copied(parameter: TapedParameter) -> TapedParameter:
    """Another parameter with the same values, without memory."""
    taping = type(parameter).taping
    with as_built():
        place = taping.tape.place(parameter)
        read = None if place.cell.is_taken else stored_read(taping.tape, place)
        if read is None:
            handle = _noted(torch.Tensor.clone, (parameter,), {}, is_write=False).detach()
        else:
            handle = torch.empty_like(parameter, device="meta", requires_grad=False)
            made = taping.tape.place(handle, place.cell.device)
            taping.tape.note(Operation(cast("Callable[..., Any]", read), [], {}, [made], []))
        copy = type(parameter)(handle, parameter.requires_grad)
        vars(copy).update(vars(parameter))
        return copy
