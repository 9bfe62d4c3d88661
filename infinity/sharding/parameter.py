"""A parameter whose data is on another tier: a handle with name, identity, shape and dtype, without
memory.

[Note: reading outside of a forward]
If this rank keeps all of a parameter (one rank, and stages 0 to 2), code outside of a forward may
read it. Every operator that autograd, functorch or a script calls on a handle arrives in
`__torch_dispatch__`, below autograd, and gets a copy of the value. So a loss that is built outside
of a forward (weight decay, for example) has the gradients of plain torch. A write raises: use
`gathered(write=True)`. `parameter.data`, `parameter.detach()` and views are handles, too.

With stages 1 and 2 the ranks post a gather of each write (`OnDevice.renew`), so one rank may read
alone. If ranks have shards (stage 3), and for DTensors, a read raises: all ranks would have to read
alike, and a script that prints on the first rank would hang.

Inside a forward or a backward a touch by Python's API shows the unit (`Border.touched`). Code that
bypasses Python's API gets a copy there, too.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._pytree import tree_map

from infinity.compilation import call_uncompiled, frames
from infinity.errors import ConfigError, ShardedParameterError
from infinity.sharding import backwards
from infinity.sharding.compiled import makes_graph
from infinity.sharding.copied import flattened, writes
from infinity.sharding.lazy_tensor import LazyTensor
from infinity.sharding.recognize import is_dtensor, is_dtensor_class
from infinity.sharding.twins import passing
from infinity.sharding.value import WRITE, LazyValue, ParameterSource, closed
from infinity.sharding.zero_names import ZeroNames, ZeroStatus

METADATA = {
    *("shape", "dtype", "device", "requires_grad", "is_leaf", "ndim", "layout", "grad_fn"),
    *("retains_grad", "output_nr", "itemsize", "nbytes", "size", "numel", "nelement", "dim"),
    *("stride", "element_size", "storage_offset", "names", "_backward_hooks"),
    *("_post_accumulate_grad_hooks", "requires_grad_", "grad_dtype", "has_names", "get_device"),
    *("is_cuda", "is_cpu", "is_mps", "is_xpu", "is_meta", "is_sparse", "is_sparse_csr"),
    *("is_quantized", "is_nested", "is_floating_point", "is_complex", "is_contiguous", "is_conj"),
    *("is_neg", "is_inference", "is_signed", "is_same_size", "__len__", "__hash__"),
    *("_is_view", "_version"),
}
"""Functions and attributes that need no data."""

_DTYPES = {
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "double": torch.float64,
}
"""Methods that convert to a dtype."""

_LIKE = {
    *(f"{kind}_like" for kind in ("empty", "zeros", "ones", "full", "rand", "randn")),
    *(f"new_{kind}" for kind in ("empty", "zeros", "ones", "full")),
}
"""Functions that make another tensor by shape, dtype and device."""

_SAME = {"view_as", "expand_as"}
"""Methods that return the parameter itself if it is also their argument."""

_HOOKED = {"_backward_hooks", "_post_accumulate_grad_hooks"}
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook"}
"""Attributes and methods that belong to the tensor whose gradient autograd accumulates."""

_MEMORY = {
    *("data_ptr", "untyped_storage", "storage", "_typed_storage", "share_memory_", "pin_memory"),
    *("set_", "resize_", "swap_tensors", "as_subclass", "module_load"),
}
"""Functions that return the memory of a parameter, or replace it."""

_BEFORE = "do that before infinity.wrap, which then manages what it makes of the parameters"
MOVED = (
    "the engine moves the model: Config(precision=..., tuning=Tuning(device=...)) say "
    "its dtype and where it runs"
)
SAVED = (
    "engine = infinity.engine(model) saves it: engine.save_checkpoint(directory, "
    "optimizer), or torch.save(engine.state_dict())"
)
COPIED = (
    "for a copy build the model again, and let it "
    "load_state_dict(infinity.engine(model).state_dict())"
)
MADE = (
    "a parameter of a wrapped model shares no memory with a new one: make that of a copy, "
    "torch.nn.Parameter(parameter.detach().clone())"
)
_AVERAGED = (
    "leave that out: infinity.wrap(model, config) averages gradients over all "
    "ranks of torch.distributed"
)
_UPDATED = (
    "update with infinity.AdamW and its family, or any other by "
    "infinity.adapt(torch.optim.RMSprop, model.parameters(), ...)"
)
_SPLIT_BACKWARD = (
    "a schedule that computes weight gradients apart from the backward (zero-bubble, DualPipeV) "
    "sets them past the engine, which is supported where one rank has a stage: use ScheduleGPipe, "
    "Schedule1F1B or ScheduleInterleaved1F1B, or no data and tensor parallel ranks"
)
TRAINED = (
    "the model was wrapped with Config(inference=True), which only runs it; wrap it without that "
    "to train it"
)
"""The error for training a model that was wrapped for inference."""
_GATHER = (
    "use `with infinity.gathered(model):` (or the parameter itself) to read it, "
    "gathered(..., write=True) to change it"
)
_WAYS = {
    ("infinity.modules.facade", "_apply"): MOVED,
    ("torch.nn.modules.module", "_apply"): MOVED,
    ("torch.nn.parallel.distributed", "__init__"): _AVERAGED,
    ("torch.nn.utils.parametrize", "register_parametrization"): _BEFORE,
    ("torch.nn.utils.weight_norm", "apply"): _BEFORE,
    ("torch.nn.utils.spectral_norm", "apply"): _BEFORE,
    ("torch.nn.utils.prune", "apply"): _BEFORE,
    ("torch.distributed.pipelining._backward", "stage_backward_input"): _SPLIT_BACKWARD,
    ("torch.distributed.pipelining._backward", "stage_backward_weight"): _SPLIT_BACKWARD,
    ("torch.optim.optimizer", "wrapper"): _UPDATED,
    ("torch.nn.parameter", "__new__"): MADE,
    ("torch.serialization", "save"): SAVED,
    ("torch.nn.parameter", "__reduce_ex__"): SAVED,
    ("copy", "deepcopy"): COPIED,
}
"""The ways out for functions that touch parameters, by module and name."""


class ShardedParameter(LazyTensor, nn.Parameter, ZeroNames):
    """A parameter that is not gathered, or its local tensor. Each unit has its own subclasses, so
    the type knows the unit."""

    source: ClassVar[ParameterSource]
    ds_status = ZeroStatus.NOT_AVAILABLE
    way = WRITE

    def described(self) -> str:
        """Its text: as of a parameter, with its place."""
        source = type(self).source
        place = f"on {source.tier or 'no tier'}, unit {source.facts.name}"
        return f"Parameter containing:\nShardedParameter({source.name_of(self)}, {place})"

    @property
    def ds_tensor(self) -> torch.Tensor:
        """A copy of this rank's part of the flat parameter, (n,)."""
        source = type(self).source
        return source.part(source.index_of(self))

    def kept_gradient(self) -> torch.Tensor | None:
        return _grad(self)

    def partition_numel(self) -> int:
        source = type(self).source
        return source.facts.overlap(source.index_of(self)).length

    def is_double(self) -> bool:
        """Whether this is the engine's object for a parameter that is shown now."""
        return type(self).source.parameter_of(self) is not self

    @property
    def root(self) -> LazyTensor:
        """The root of its views. It is no parameter, because a view may be used while the parameter
        is dense."""
        source = type(self).source
        parameter = source.facts.parameters[source.index_of(self)]
        return self if is_dtensor(parameter) else self.detached()

    def fetch(self) -> torch.Tensor:
        """A copy of the value. Raises `ShardedParameterError` if this rank may not read it."""
        source = type(self).source
        return source.read(source.index_of(self))

    def refuse_memory(self, what: str) -> None:
        """Raise `ShardedParameterError` for code that wants the address."""
        source = type(self).source
        raise ShardedParameterError(
            f"{source.name_of(self)} (unit {source.facts.name}) lives on {source.tier} and {what} "
            f"was asked for outside of its module's forward; {_GATHER}"
        )

    def detached(self) -> LazyValue:
        source = type(self).source
        return LazyValue(source, source.index_of(self))

    def check_replace(self) -> None:
        raise ShardedParameterError(f"{WRITE} ({type(self).source.name_of(self)})")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if makes_graph():
            return super().__torch_function__(func, types, args, kwargs)
        accessor = getattr(func, "__name__", "")
        attribute = (
            getattr(getattr(func, "__self__", None), "__name__", "")
            if accessor in ("__get__", "__set__", "__delete__")
            else ""
        )
        name = attribute or accessor
        flat = flattened((args, kwargs))
        if any(isinstance(each, ShardedParameter) and each.is_double() for each in flat):
            args, kwargs = tree_map(parameter_of, (tuple(args), kwargs or {}))
            return func(*args, **kwargs)
        plain = name in METADATA and accessor != "__set__"
        if attribute == "grad":
            return _grad(args[0], *((None,) if accessor == "__delete__" else args[1:]))
        if name in _HOOKS or (name in _HOOKED and accessor == "__set__"):
            return _hook(func, name, *args, **(kwargs or {}))
        if name == "requires_grad_" or (attribute == "requires_grad" and accessor == "__set__"):
            cls._check_thaw(*args, **(kwargs or {}))
            with torch._C.DisableTorchFunctionSubclass():
                found = func(*args, **(kwargs or {}))
            source = type(args[0]).source
            source.agree(source.index_of(args[0]))
            return found
        if func in backwards.ANSWERS:
            return cls.answer_backward(func, types, args, kwargs or {})
        if plain:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if args and isinstance(args[0], ShardedParameter) and _keeps(args[0], name, args, kwargs):
            return args[0]
        if name in _LIKE and isinstance(args[0], ShardedParameter) and not _way_out():
            return func(_without_data(args[0]), *args[1:], **(kwargs or {}))
        owner, parameter = next(
            ((type(a), a) for a in flat if isinstance(a, ShardedParameter)),
            (cls, None),
        )
        source = owner.source
        unit = source.facts.name
        who = source.name_of(parameter) if parameter is not None else unit
        if not source.tier:
            raise closed(who)
        if torch._C._are_functorch_transforms_active():  # they would wrap the bytes of the unit
            return super().__torch_function__(func, types, args, kwargs)
        if name not in _MEMORY and call_uncompiled(source.listeners.border.records_backward):
            return super().__torch_function__(func, types, args, kwargs)  # this saves the handle
        if call_uncompiled(source.listeners.border.touched, source.facts):
            return func(*args, **(kwargs or {}))
        if name in _SAME and len(args) == 2 and args[0] is args[1] and source.facts.is_alone:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)  # callers need its place in the graph
        way = _way_out()
        if not way and _reads(name, accessor, args, kwargs):
            return super().__torch_function__(func, types, args, kwargs)
        raise ShardedParameterError(
            f"{who} (unit {unit}) lives on {source.tier} and its data was touched ({name}) "
            f"outside of its module's forward; {way or _GATHER}"
        )

    @staticmethod
    def _check_thaw(parameter: torch.Tensor, requires_grad: bool = True) -> None:
        """Raise `ConfigError` if the parameter was frozen when the model was wrapped: it has no
        place for gradients and states, and cannot get one."""
        if not isinstance(parameter, ShardedParameter):
            return
        source = type(parameter).source
        if requires_grad and not source.facts.trainable and not source.facts.only_runs:
            raise ConfigError(
                f"{source.name_of(parameter)} was frozen (requires_grad=False) when "
                "the model was wrapped, so it has no place for gradients and states; to train it "
                "later, wrap it with requires_grad=True and freeze it afterwards: "
                "parameter.requires_grad_(False) keeps the place"
            )


class HiddenLeaf(nn.Parameter):
    """The object that holds the dense tensor of a parameter while the parameter is a handle. The
    node that accumulates its gradient returns it (`node.variable`). It answers as the parameter."""

    source: ClassVar[ParameterSource]

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(parameter_of(self))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(parameter_of, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


def parameter_of(value: Any) -> Any:
    """The parameter that users have, if `value` is the engine's object for it; else `value`."""
    if not isinstance(value, (HiddenLeaf, ShardedParameter)):
        return value
    return type(value).source.parameter_of(value)


def _grad(parameter: ShardedParameter, *value: torch.Tensor | None) -> torch.Tensor | None:
    """Read `.grad`, or set it to `value`."""
    source = type(parameter).source
    index = source.index_of(parameter)
    if not value:
        return source.grad(index)
    source.set_grad(index, *value)
    return None


def _hook(func: Any, name: str, parameter: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Register a hook on the gradient of `parameter`, or set all of them."""
    source: ParameterSource = type(parameter).source  # type: ignore[attr-defined]
    if name == "register_post_accumulate_grad_hook":
        (hook,) = (*args, *kwargs.values())
        args, kwargs = (passing(parameter, hook),), {}
    with source.leaf(source.index_of(parameter)):
        return func(parameter, *args, **kwargs)


def _keeps(parameter: torch.Tensor, name: str, args: Any, kwargs: Any) -> bool:
    """Whether the method `name` is a conversion that returns the parameter itself, as in torch,
    because it has the given dtype and device."""
    device: torch.device | None = None
    dtype = _DTYPES.get(name)
    others, named = args[1:], kwargs or {}
    copies = "copy" in named or sum(isinstance(other, bool) for other in others) > 1
    if name == "to" and not copies:
        device, dtype, _, form = torch._C._nn._parse_to(*others, **named)
        if form is not None:
            return False
    elif name in ("cpu", "cuda"):
        found = (others[0] if others else named.get("device")) or name
        device = torch.device(name, found) if isinstance(found, int) else torch.device(found)
    elif dtype is None:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return dtype in (None, parameter.dtype) and (
            device is None
            or (device.type, device.index or 0)
            == (parameter.device.type, parameter.device.index or 0)
        )


def _without_data(parameter: torch.Tensor) -> torch.Tensor:
    """A plain tensor of the shape, the dtype and the device of `parameter`."""
    with torch._C.DisableTorchFunctionSubclass():
        some = torch.empty((), dtype=parameter.dtype, device=parameter.device)
        return some.expand(parameter.shape)


def _is_readable(value: Any) -> bool:
    """Whether `value` is no parameter, or may be read outside of a forward."""
    if not isinstance(value, ShardedParameter):
        return True
    source = type(value).source
    return source.readable(source.index_of(value))


def _reads(name: str, accessor: str, args: Any, kwargs: Any) -> bool:
    """Whether a function only reads values, of parameters that this rank may read."""
    changed = [*flattened(args[:1] if writes(name) else ()), *flattened((kwargs or {}).get("out"))]
    return (
        accessor != "__set__"
        and name not in _MEMORY
        and not any(isinstance(value, ShardedParameter) for value in changed)
        and all(map(_is_readable, flattened((args, kwargs))))
    )


def _way_out() -> str:
    """The way out for the function that touches a parameter, if it is known; else ""."""
    for frame in frames(sys._getframe()):
        way = _WAYS.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
        if way is not None:
            return way
    return ""


def guard_for(source: ParameterSource, kind: type[torch.Tensor]) -> type[ShardedParameter]:
    """The class of handles for parameters of `source`, or their local tensors, that are of class
    `kind` while they are gathered."""
    if not is_dtensor_class(kind):
        return type("ShardedParameter", (ShardedParameter,), {"source": source})
    parts = {name: vars(kind)[name] for name in ("__tensor_flatten__", "__tensor_unflatten__")}
    return type("ShardedParameter", (ShardedParameter, kind), {"source": source} | parts)


def hidden_leaf_for(source: ParameterSource) -> type[HiddenLeaf]:
    """The class of objects that hold the dense tensors of parameters of `source` while these are
    handles."""
    return type("HiddenLeaf", (HiddenLeaf,), {"source": source})
