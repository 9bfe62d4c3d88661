"""Attributes of DeepSpeed's optimizers, on the optimizer of `infinity.initialize`: attributes with
a true value, attributes that change something, and for all others the reason why they are
missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from infinity.deepspeed import fragments
from infinity.deepspeed.engine import DeepSpeedEngine
from infinity.deepspeed.engine_names import (
    COMMUNICATION,
    CONFIGURATION,
    INTERNAL,
    Reasons,
    reason_for,
)
from infinity.deepspeed.errors import DeepSpeedConfigError, MissingNameError
from infinity.deepspeed.generation import ParameterOffload
from infinity.deepspeed.groups import all_ranks
from infinity.deepspeed.kinds import SCALE
from infinity.deepspeed.muon import ClippedMuon
from infinity.deepspeed.names import MISSING
from infinity.deepspeed.refused import Lacking
from infinity.deepspeed.scaling import DeepSpeedScaler
from infinity.errors import in_words
from infinity.optim.optimizer import Optimizer
from infinity.optim.rules.sgd import SGD
from infinity.optim.scaler import FACTOR


def answering(optimizer: Optimizer, engine: DeepSpeedEngine) -> None:
    """Give `optimizer` the names of DeepSpeed for its life. Its class keeps its name, and becomes a
    subclass of the former class."""
    kind = type(optimizer)
    if kind not in _KINDS:
        names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        _KINDS[kind] = type(kind.__name__, (_Names, kind), names)
    optimizer.__class__ = _KINDS[kind]
    vars(optimizer)["deepspeed_engine"] = engine
    if engine.zero_optimization_stage() == 3:
        vars(optimizer)["parameter_offload"] = ParameterOffload()


def engine_of(optimizer: object) -> DeepSpeedEngine | None:
    """The engine of `initialize` that trains with `optimizer`. None for anything else."""
    return optimizer.deepspeed_engine if isinstance(optimizer, _Names) else None


_KINDS: dict[type[Optimizer], type[Optimizer]] = {}
"""By the class of an optimizer: the class with the names of DeepSpeed."""


class _Names(Optimizer):
    """The base before the class of an optimizer. `VALUES` has the names that are only read."""

    deepspeed_engine: DeepSpeedEngine

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "deepspeed_engine" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in VALUES:
            return VALUES[name](self, self.deepspeed_engine)
        raise MissingNameError(
            f"{type(self).__name__} of infinity has no {name!r}: {reason_for(name, REASONS)}"
        )

    @property
    def loss_scaler(self) -> Any:
        """The scaler of the loss. Its scale is 1 without scaling."""
        return Scaler(self)

    @loss_scaler.setter
    def loss_scaler(self, scaler: object) -> None:
        raise DeepSpeedConfigError(
            f"optimizer.loss_scaler is set to {in_words(scaler)}; the block fp16 of the "
            "configuration says how the loss is scaled, and optimizer.loss_scale can be set"
        )

    @property
    def loss_scale(self) -> float:
        """The scale of the next loss. 1 without scaling. In fp16 it can be set, to a power of two
        unless it is static."""
        return super().loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        scaler = self.clipping.scaler
        if scaler is None:
            raise DeepSpeedConfigError(
                f"optimizer.loss_scale is set to {in_words(scale)}, but nothing scales the loss "
                "outside of fp16; leave it out"
            )
        try:
            good = SCALE.parse(scale) > 0
        except ValueError:
            good = False
        if not good or (not scaler.is_static and math.frexp(scale)[0] != 0.5):
            raise DeepSpeedConfigError(
                f"optimizer.loss_scale is set to {in_words(scale)}; it must be a power of two, or "
                "with a fixed fp16.loss_scale any positive number"
            )
        scaler.scale = float(scale)

    cur_scale = loss_scale

    @property
    def clip_grad(self) -> float:
        """The norm limit of gradients. 0 means no limit. It can be set between steps."""
        if isinstance(self, ClippedMuon):
            return self.deepspeed_engine.settings.gradient_clipping
        limit = self.max_grad_norm
        return 0.0 if limit is None or limit == math.inf else limit

    @clip_grad.setter
    def clip_grad(self, limit: float) -> None:
        good = isinstance(limit, (int, float)) and 0 <= limit <= math.inf
        if not good or isinstance(self, ClippedMuon):
            raise DeepSpeedConfigError(
                f"optimizer.clip_grad is set to {in_words(limit)}; it must be a norm, or 0 for "
                "none, and Muon has that of gradient_clipping in the configuration"
            )
        self.max_grad_norm = float(limit) or math.inf

    def _refuse_scale(self, scale: object) -> None:
        raise DeepSpeedConfigError(
            f"the loss scale is to be {in_words(scale)} beside that of fp16; give the "
            "configuration fp16.loss_scale, or set optimizer.loss_scale"
        )

    external_loss_scale = property(lambda self: None, _refuse_scale)
    custom_loss_scaler = property(lambda self: False, _refuse_scale)
    override_loss_scale = _refuse_scale

    # Methods

    def load_state_dict(self, state_dict: Any, **options: Any) -> None:
        """Like that of infinity. Raises `ConfigError` for options, which DeepSpeed has for its own
        checkpoints."""
        if options:
            raise DeepSpeedConfigError(
                f"optimizer.load_state_dict has no option {next(iter(options))!r}; "
                "engine.load_checkpoint has load_optimizer_states and load_module_only"
            )
        super().load_state_dict(state_dict)

    def get_lr(self) -> float:
        """The learning rate of the first group."""
        return self.param_groups[0]["lr"]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all groups."""
        for group in self.param_groups:
            group["lr"] = lr

    def scale_if_loss(self, value: Any) -> Any:
        """`value` times the loss scale if it is a tensor of one element with gradients, else
        `value`."""
        is_loss = isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad
        return self.deepspeed_engine.scale(value) if is_loss else value

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """`engine.backward`, without the division by the number of forwards of a step."""
        self.deepspeed_engine.backward(loss, retain_graph, scale_wrt_gas=False)

    def needs_scaler(self) -> bool:
        """Whether the loss scale changes."""
        return bool(self.deepspeed_engine.dynamic_loss_scale())

    def destroy(self) -> None:
        """Does nothing: `engine.destroy()` frees everything."""

    def empty_partition_cache(self) -> None:
        """Does nothing: the memory of the compute device is planned."""

    def refresh_fp32_params(self) -> None:
        """Does nothing: a change of a parameter changes its fp32 value, too."""

    update_lp_params = refresh_fp32_params


class Scaler:
    """The `loss_scaler`, or `loss_scale_config`, of a DeepSpeed optimizer: its scale, and the
    settings of fp16 under DeepSpeed's names. Other names are those of `infinity.LossScaler`. Copies
    and pickles of it are a `CopiedScaler`."""

    _optimizer: _Names

    def __init__(self, optimizer: _Names) -> None:
        vars(self)["_optimizer"] = optimizer

    @property
    def dynamic(self) -> bool:
        """Whether the scale changes."""
        return bool(self._optimizer.deepspeed_engine.dynamic_loss_scale())

    dynamic_loss_scale = dynamic

    @property
    def use_grad_scaling(self) -> bool:
        """Whether the loss is scaled."""
        return self._optimizer.clipping.scaler is not None

    @property
    def loss_scale(self) -> float:
        """The scale of the next loss. It can be set, like that of the optimizer."""
        return self._optimizer.loss_scale

    cur_scale = loss_scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The tensor on which to call `backward` instead of `loss`."""
        return self._optimizer.deepspeed_engine.scale(loss)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Like that of the optimizer."""
        self._optimizer.backward(loss, retain_graph)

    def __reduce__(self) -> tuple[Any, ...]:
        names = (*_NUMBERS, *(_SETTINGS if self.dynamic else ()))
        return CopiedScaler, ({name: getattr(self, name) for name in names},)

    def __setattr__(self, name: str, value: Any) -> None:
        scaler = self._optimizer.clipping.scaler
        if name in ("loss_scale", "cur_scale"):
            self._optimizer.loss_scale = value
        elif name == "raise_error_at_min_scale" and isinstance(scaler, DeepSpeedScaler):
            scaler.ends_at_minimum = bool(value)
        else:
            raise DeepSpeedConfigError(
                f"optimizer.loss_scaler.{name} is set to {in_words(value)}; of it loss_scale and, "
                "with a scale that changes, raise_error_at_min_scale can be set, and the block "
                "fp16 of the configuration has the others"
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        scaler = self._optimizer.clipping.scaler
        if self.dynamic and name in _SETTINGS:
            return _SETTINGS[name](scaler)
        if hasattr(scaler, name):
            return getattr(scaler, name)
        raise MissingNameError(
            f"optimizer.loss_scaler of infinity has no {name!r}: {_SCALE}, and its settings are "
            "those of fp16 in the configuration"
        )


_SETTINGS: dict[str, Callable[[Any], Any]] = {
    "scale_factor": lambda scaler: FACTOR,
    "scale_window": lambda scaler: scaler.window,
    "min_scale": lambda scaler: scaler.minimum,
    "min_loss_scale": lambda scaler: scaler.minimum,
    "delayed_shift": lambda scaler: scaler.hysteresis,
    "consecutive_hysteresis": lambda scaler: scaler.consecutive,
    "raise_error_at_min_scale": lambda scaler: scaler.ends_at_minimum,
}
"""Attributes of a dynamic scaler of DeepSpeed."""
_NUMBERS = ("dynamic", "dynamic_loss_scale", "use_grad_scaling", "loss_scale", "cur_scale")
"""Attributes of each scaler of DeepSpeed."""


class CopiedScaler(Lacking):
    """The numbers of a `Scaler` at the time of the copy or pickle. It scales no loss."""

    instead = "a copy of optimizer.loss_scaler has its numbers, and the original scales losses"

    def __init__(self, numbers: Mapping[str, Any]) -> None:
        vars(self).update(numbers)


class Inner:
    """The optimizer inside of one of DeepSpeed. Here it is the same optimizer, without DeepSpeed's
    names. So code that searches for the innermost one by `optimizer` finds it. For `isinstance` it
    is also an instance of the class of the script's optimizer, or of torch's SGD if the
    configuration names SGD."""

    def __init__(self, optimizer: Optimizer) -> None:
        vars(self)["_outer"] = optimizer

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        client = self._outer.deepspeed_engine.client_optimizer
        if client is None:
            theirs = torch.optim.SGD if isinstance(self._outer, SGD) else torch.optim.Optimizer
        else:
            theirs = type(client)
        return _of_both(type(self._outer), theirs)

    def __getattr__(self, name: str) -> Any:
        if name == "_outer":
            raise AttributeError(name)  # a copy that is not filled yet
        if name in VALUES:
            raise AttributeError(f"{type(self._outer).__name__!r} object has no attribute {name!r}")
        return getattr(self._outer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._outer, name, value)

    def __eq__(self, other: object) -> bool:
        return other is self._outer or vars(other).get("_outer") is self._outer

    def __hash__(self) -> int:
        return hash(self._outer)

    def __repr__(self) -> str:
        return repr(self._outer)


_BOTH: dict[Any, type] = {}
"""By two classes: a class derived from both, for `isinstance`."""


def _of_both(ours: type, theirs: type) -> type:
    if issubclass(ours, theirs):
        return ours
    if (ours, theirs) not in _BOTH:
        names = {"__module__": ours.__module__}
        _BOTH[ours, theirs] = type(ours.__name__, (ours, theirs), names)
    return _BOTH[ours, theirs]


def _members(optimizer: Optimizer, engine: DeepSpeedEngine) -> list[list[torch.Tensor]]:
    return [list(group["params"]) for group in optimizer.param_groups]


def _data_ranks(optimizer: Optimizer, engine: DeepSpeedEngine) -> Any:
    """The group of ranks. At stages below 3 DeepSpeed has one for each parameter group."""
    group = all_ranks()
    whole = engine.zero_optimization_stage() == 3
    return group if whole else [group for _ in optimizer.param_groups]


def _names(optimizer: Optimizer, engine: DeepSpeedEngine) -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in engine.module.named_parameters()}


def _value_first(function: Callable[..., None]) -> Callable[..., None]:
    """`function` of a parameter and a value, as a function of the value and the parameter."""

    def setter(value: torch.Tensor, param: torch.Tensor, *others: Any, **named: Any) -> None:
        function(param, value, *others, **named)

    return setter


VALUES: dict[str, Callable[[_Names, DeepSpeedEngine], Any]] = {
    "_get_loss_scale": lambda optimizer, engine: lambda: optimizer.loss_scale,
    "_global_grad_norm": lambda optimizer, engine: engine.get_global_grad_norm(),
    **dict.fromkeys(("bit16_groups", "fp16_groups", "bf16_groups"), _members),
    "dp_process_group": lambda optimizer, engine: all_ranks(),
    "dp_rank": lambda optimizer, engine: engine.global_rank,
    "dtype": lambda optimizer, engine: engine.get_data_types()[0],
    "low_precision_dtype": lambda optimizer, engine: engine.get_data_types()[0],
    "dynamic_loss_scale": lambda optimizer, engine: engine.dynamic_loss_scale(),
    "gradient_accumulation_dtype": lambda optimizer, engine: engine.get_data_types()[1],
    "gradient_accumulation_steps": lambda optimizer, engine: engine.gradient_accumulation_steps(),
    "has_moe_layers": lambda optimizer, engine: False,
    "is_gradient_accumulation_boundary": lambda optimizer, engine: (
        engine.is_gradient_accumulation_boundary()
    ),
    "get_fp32_grad_for_param": lambda optimizer, engine: fragments.safe_get_full_grad,
    "get_full_hp_param": lambda optimizer, engine: fragments.get_full_hp_param,
    "get_local_fp32_grad_for_param": lambda optimizer, engine: fragments.safe_get_local_grad,
    "get_local_fp32_param": lambda optimizer, engine: fragments.get_local_hp_param,
    "loss_scale_config": lambda optimizer, engine: Scaler(optimizer),
    "module": lambda optimizer, engine: engine.module,
    "mpu": lambda optimizer, engine: None,
    "norm_type": lambda optimizer, engine: 2,
    "offload_states": lambda optimizer, engine: engine.offload_states,
    "offloaded_states": lambda optimizer, engine: set(),
    "optimizer": lambda optimizer, engine: Inner(optimizer),
    "param_names": _names,
    "partition_gradients": lambda optimizer, engine: engine.zero_optimization_partition_gradients(),
    "real_dp_process_group": _data_ranks,
    "reload_states": lambda optimizer, engine: engine.reload_states,
    "set_fp32_grad_for_param": lambda optimizer, engine: _value_first(fragments.safe_set_full_grad),
    "set_full_hp_param": lambda optimizer, engine: _value_first(fragments.set_full_hp_param),
    "set_gradient_accumulation_boundary": lambda optimizer, engine: (
        engine.set_gradient_accumulation_boundary
    ),
    "set_local_grad_for_param": lambda optimizer, engine: _value_first(
        fragments.safe_set_local_grad
    ),
    "set_local_hp_param": lambda optimizer, engine: _value_first(fragments.set_local_hp_param),
    "timers": lambda optimizer, engine: engine.timers,
}
"""By name: a function from the optimizer and the engine to the value."""

_SCALE = (
    "optimizer.loss_scale has the scale, and the block fp16 of the configuration how it changes"
)
_STATES = (
    "fp32 values and states are kept unit by unit; deepspeed.utils.safe_get_full_fp32_param and "
    "safe_get_full_optimizer_state, and their kin for setting, reach those of a parameter"
)
_GRADIENTS = (
    "gradients are kept unit by unit; parameter.grad, or deepspeed.utils.safe_get_full_grad and "
    "safe_set_full_grad, reach that of a parameter"
)
_PLACES = (
    "the device of offload_param and offload_optimizer says where states live; engine.device is "
    "where the model runs"
)
_NORM = "engine.get_global_grad_norm() has the norm, and gradient_clipping clips to one"
_STEP = "engine.backward(loss) and engine.step() do it"
REASONS: Reasons = (
    (
        "^(contiguous|round_robin)_gradients$|^overlap_comm$|^ignore_unused|^elastic_check|_size$|"
        "predivide|alignment|^prefetch|sanity|communication_data|^immediate|^compute_grad_norm$|"
        "^check_grad_overflow$|^use_multi_rank|quantize|zero_hpz|^zero_stage|^postscale",
        CONFIGURATION,
    ),
    ("expert|moe|^ep_|_ep_|autoep", MISSING["moe"]),
    ("zenflow", MISSING["runtime.zenflow"]),
    ("muon", "momentum of Muon is a state in optimizer.state; its settings are in param_groups"),
    ("timer|^dump_|print|ipg_memory|verbose|num_|flushes", MISSING["monitor"]),
    (
        "ckpt|checkpoint|restore|state_dict|lean|elastic|rigid|padding|load_global",
        MISSING["checkpoint"],
    ),
    ("model_parallel|_tp_", MISSING["module_inject"]),
    ("sequence", MISSING["sequence"]),
    ("overflow|inf_or_nan", "optimizer.overflow says whether the last step was left out"),
    ("scaler|scale|scaling", _SCALE),
    ("norm|clip", _NORM),
    ("offload|swap|pin_|_pin|nvme|in_cpu|_cpu|_gpu|device$", _PLACES),
    ("(^|_)grads?(_|$)|gradients?|ipg", _GRADIENTS),
    ("hook|backward|epilogue|prologue|micro_step|_step$|^step_|_step_|boundary|graph", _STEP),
    (
        "fp32|hp_|master|flat|partition|slice|_state|state_|^_get_groups|^_create|sub_?group",
        _STATES,
    ),
    (
        "reduce|gather|bucket|_comm|comm_|process_group|stream|scatter|ranks?$|all2all",
        COMMUNICATION,
    ),
    ("fp16|bf16|bit16|lp_|leaf_|param", "optimizer.param_groups has the parameters"),
    ("", INTERNAL),
)
