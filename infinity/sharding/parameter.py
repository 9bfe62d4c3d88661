"""What a parameter is while its data lives on another tier: name, identity, shape and dtype, but no
data."""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from infinity.errors import ConfigError, EngineClosedError, ShardedParameterError

if TYPE_CHECKING:
    from infinity.sharding.unit import Unit

_METADATA = {
    "shape",
    "dtype",
    "device",
    "requires_grad",
    "is_leaf",
    "ndim",
    "layout",
    "is_cuda",
    "is_meta",
    "is_sparse",
    "is_quantized",
    "is_nested",
    "grad_fn",
    "retains_grad",
    "itemsize",
    "nbytes",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
    "output_nr",
    "size",
    "numel",
    "nelement",
    "dim",
    "stride",
    "element_size",
    "is_floating_point",
    "is_complex",
    "is_contiguous",
    "__len__",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "storage_offset",
    "__hash__",
    "_is_view",
    "names",
}

_DTYPES = {
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "double": torch.float64,
}
"""Methods that convert to a dtype."""

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
_AVERAGED = (
    "leave that out: infinity.wrap(model, config) averages gradients over all "
    "ranks of torch.distributed"
)
_UPDATED = (
    "update with infinity.AdamW and its family, or any other by "
    "infinity.adapt(torch.optim.RMSprop, model.parameters(), ...)"
)
_WAYS = {
    ("infinity.modules.facade", "_apply"): MOVED,
    ("torch.nn.modules.module", "_apply"): MOVED,
    ("torch.nn.parallel.distributed", "__init__"): _AVERAGED,
    ("torch.nn.utils.parametrize", "register_parametrization"): _BEFORE,
    ("torch.nn.utils.weight_norm", "apply"): _BEFORE,
    ("torch.nn.utils.spectral_norm", "apply"): _BEFORE,
    ("torch.nn.utils.prune", "apply"): _BEFORE,
    ("torch.optim.optimizer", "wrapper"): _UPDATED,
    ("torch.serialization", "save"): SAVED,
    ("torch.nn.parameter", "__reduce_ex__"): SAVED,
    ("copy", "deepcopy"): COPIED,
}
"""What to do instead of functions that touch parameters, by module and name."""


class ShardedParameter(nn.Parameter):
    """A parameter that is not gathered, or the local tensor of one. Each unit has its own
    subclasses, so that the type knows the unit."""

    unit: ClassVar[Unit]

    def __repr__(self) -> str:  # type: ignore[override]
        unit = type(self).unit
        place = f"on {unit.tier or 'no tier'}, unit {unit.name}"
        return f"Parameter containing:\nShardedParameter({unit.name_of(self)}, {place})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        accessor = getattr(func, "__name__", "")
        attribute = (
            getattr(getattr(func, "__self__", None), "__name__", "")
            if accessor in ("__get__", "__set__")
            else ""
        )
        name = attribute or accessor
        plain = name in _METADATA and accessor != "__set__"
        plain = plain or (attribute == "requires_grad" and accessor == "__set__")
        if attribute == "grad":
            return _grad(args[0], *args[1:])
        if name == "requires_grad_" or (attribute == "requires_grad" and accessor == "__set__"):
            cls._check_thaw(*args, **(kwargs or {}))
        if plain:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if args and isinstance(args[0], ShardedParameter) and _keeps(args[0], name, args, kwargs):
            return args[0]
        owner, parameter = next(
            ((type(a), a) for a in _flatten((args, kwargs)) if isinstance(a, ShardedParameter)),
            (cls, None),
        )
        unit = owner.unit
        who = unit.name_of(parameter) if parameter is not None else unit.name
        if not unit.tier:
            raise EngineClosedError(
                f"{who} has no data any more, because its engine was closed; save the data "
                "first, then close"
            )
        if unit.listeners.border.touched(unit):
            return func(*args, **(kwargs or {}))
        raise ShardedParameterError(
            f"{who} (unit {unit.name}) lives on {unit.tier} and its data was touched ({name}) "
            f"outside of its module's forward; {_way_out()}"
        )

    @staticmethod
    def _check_thaw(parameter: torch.Tensor, requires_grad: bool = True) -> None:
        """A parameter that was frozen when the model was wrapped has no place for gradients and
        states, and cannot get one."""
        if (
            isinstance(parameter, ShardedParameter)
            and requires_grad
            and not type(parameter).unit.trainable
        ):
            raise ConfigError(
                f"{type(parameter).unit.name_of(parameter)} was frozen (requires_grad=False) when "
                "the model was wrapped, so it has no place for gradients and states; to train it "
                "later, wrap it with requires_grad=True and freeze it afterwards: "
                "parameter.requires_grad_(False) keeps the place"
            )


def _grad(parameter: ShardedParameter, *value: torch.Tensor | None) -> torch.Tensor | None:
    """Read `.grad`, or set it to `value`."""
    unit = type(parameter).unit
    index = unit.position(parameter)
    if not value:
        return unit.data.grad(index)
    unit.data.set_grad(index, *value)
    return None


def _keeps(parameter: torch.Tensor, name: str, args: Any, kwargs: Any) -> bool:
    """Whether the method `name` is a conversion that gives the parameter itself, as in torch: it
    has the dtype and the device that are asked for."""
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


def _way_out() -> str:
    """What people should do instead, which depends on who is touching a parameter."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        way = _WAYS.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
        if way is not None:
            return way
        frame = frame.f_back
    return (
        "use `with infinity.gathered(model):` (or the parameter itself) to read it, "
        "gathered(..., write=True) to change it"
    )


def guard_for(unit: Unit, kind: type[torch.Tensor]) -> type[ShardedParameter]:
    """The class of those parameters of `unit`, or their local tensors, that are of class `kind`
    while they are gathered."""
    bases = (ShardedParameter, kind) if issubclass(kind, DTensor) else (ShardedParameter,)
    return type("ShardedParameter", bases, {"unit": unit})


def _flatten(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _flatten(item)]
    return [value]
