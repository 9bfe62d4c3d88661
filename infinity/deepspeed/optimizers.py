"""The optimizer of a script written for DeepSpeed, as an optimizer of this engine.

[Note: before and after]
Such a script builds its optimizer, or names its parameters, before the model is wrapped. `wrap` may
replace parameters that were built without memory. So a `Recipe` knows parameters by name, and
builds the optimizer when the model is wrapped. Before that it states the needed optimizer states.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from infinity.deepspeed.errors import DeepSpeedConfigError
from infinity.deepspeed.muon import ClippedMuon, Muon, halves
from infinity.deepspeed.scaling import DeepSpeedScaler
from infinity.deepspeed.settings import LossScale, Named, Settings
from infinity.errors import ConfigError, in_words
from infinity.optim.conversion import (
    algorithm_for,
    algorithm_of,
    groups_of,
    kernels_for,
    unwrapped,
)
from infinity.optim.family import FAMILY
from infinity.optim.foreign import adapt
from infinity.optim.groups import UNSUPPORTED, WITHOUT_EFFECT
from infinity.optim.optimizer import Optimizer
from infinity.optim.scaler import LossScaler

Client = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]
"""The optimizer of a script: an optimizer, or a function of its parameters that makes one."""

_HERE = {kind.rule.deepspeed: kind for kind in FAMILY if kind.rule.deepspeed is not None}
"""The optimizers of the engine, by the type in a configuration."""
_DECAY_OF_ZERO = ("adam", "adamw")
"""Types whose default `weight_decay` is 0 in DeepSpeed."""
_ONLY_DEEPSPEED = (
    *("adam_w_mode", "torch_adam", "bias_correction", "fp32_optimizer_states", "set_grad_none"),
    *("maximize", *UNSUPPORTED, *WITHOUT_EFFECT),
)
"""Parameters of a configuration that `Settings` has read, and that no optimizer here takes."""


def share_groups(client: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
    """Give `client`, the optimizer of the script, the groups of `optimizer`, in its former dicts.

    So objects that hold one of the dicts work as before: for example a scheduler of another
    optimizer, from which accelerate has made the given one.
    """
    pairs = zip(client.param_groups, optimizer.param_groups, strict=True)
    for index, (old, new) in enumerate(pairs):
        if old is not new:
            old.clear()
            old.update(new)
            optimizer.param_groups[index] = old
    client.param_groups = optimizer.param_groups


class NamedParameters:
    """The parameters of a model by their names, which are valid before and after it is wrapped."""

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[int, str] = {}
        # A reference, so that no other object gets the id.
        self._held = list(model.named_parameters(remove_duplicate=False))
        for name, parameter in self._held:
            self._names.setdefault(id(parameter), name)

    def __call__(self, parameter: object) -> str:
        """The name of a parameter. Raises `ConfigError` if the model does not have it."""
        name = self._names.get(id(parameter))
        if name is None:
            raise DeepSpeedConfigError(
                "the optimizer was given a parameter that the model of infinity.initialize does "
                "not have; give parameters of that model, built before it was wrapped"
                if isinstance(parameter, torch.Tensor)
                else f"model_parameters holds {in_words(parameter)}; give parameters, or groups of "
                "them as for an optimizer of torch"
            )
        return name

    def trainable(self) -> list[nn.Parameter]:
        """All parameters with gradients, each once."""
        found = {id(p): p for _, p in self._held if p.requires_grad}
        return list(found.values())


@dataclass(frozen=True)
class Recipe:
    """The construction of the optimizer after the model is wrapped."""

    make: Callable[..., Optimizer]
    """Called with groups and the settings."""
    algorithm: str
    """The value of `Config.algorithm` that has its states."""
    groups: Sequence[Mapping[str, Any]]
    """Groups like those of torch, with names for parameters."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    client: torch.optim.Optimizer | None = None
    """The optimizer of the script, whose numbers and states are adopted."""
    narrow: bool = False
    """Whether moments have the dtype of their parameters (`fp32_optimizer_states`)."""

    def build(self, model: nn.Module, options: Mapping[str, Any]) -> Optimizer:
        """The optimizer over parameters of the wrapped `model`. `options` are the common options of
        all optimizers of the engine."""
        groups = [
            {**group, "params": [model.get_parameter(name) for name in group["params"]]}
            for group in self.groups
        ]
        optimizer = self.make(groups, **self.settings, **options)
        if self.client is not None and self.client.state:
            optimizer.load_state_dict(self.client.state_dict())
        return optimizer


def recipe(
    settings: Settings, model: nn.Module, client: Client | None, parameters: Iterable[Any] | None
) -> Recipe | None:
    """The construction of the optimizer of the script, or else of `settings`. None without either.
    `parameters` are the trained parameters, or groups. By default all are trained.

    Raises `ConfigError` for an optimizer that the engine cannot run, and for parameters that the
    model does not have.
    """
    names = NamedParameters(model)
    given = names.trainable() if parameters is None else _listed(parameters)
    if client is not None and not isinstance(client, torch.optim.Optimizer):
        client = _called(client, given)
    if client is not None:
        return _of_client(unwrapped(client), names)
    if settings.optimizer is None:
        return None
    groups = list(_groups(given, names))
    if not any(group["params"] for group in groups):
        raise DeepSpeedConfigError(
            "the optimizer has no parameters: model_parameters is empty, or all of the model are "
            "frozen; thaw some, or leave out the block optimizer for evaluation"
        )
    if settings.optimizer.type.lower() == "muon":
        return _of_muon(settings, settings.optimizer, model, groups)
    return _of_configuration(settings.optimizer, groups)


def options(settings: Settings) -> dict[str, Any]:
    """The common options of all optimizers of the engine, by `settings`. The norm is always
    measured, for `get_global_grad_norm`."""
    scale = settings.loss_scale
    return {
        "max_grad_norm": settings.gradient_clipping or math.inf,
        "skip_nonfinite": settings.skip_nonfinite,
        "loss_scaler": None if scale is None else _scaler(scale),
    }


def _scaler(scale: LossScale) -> LossScaler:
    if scale.static is not None:
        return LossScaler(scale.static, window=None, minimum=None)
    return DeepSpeedScaler(
        scale.initial, scale.window, scale.hysteresis, scale.minimum, scale.consecutive
    )


def _listed(parameters: object) -> list[Any]:
    if isinstance(parameters, (str, torch.Tensor, nn.Module, Mapping)) or not isinstance(
        parameters, Iterable
    ):
        raise DeepSpeedConfigError(
            f"model_parameters is {in_words(parameters)}; give model.parameters(), a list of "
            "parameters, or groups of them as for an optimizer of torch"
        )
    return list(parameters)


def _called(make: object, parameters: list[Any]) -> torch.optim.Optimizer:
    made = make(parameters) if callable(make) and not isinstance(make, type) else None
    if not isinstance(made, torch.optim.Optimizer):
        raise DeepSpeedConfigError(
            f"optimizer is {in_words(make)}; give an optimizer of torch, a function of the "
            "parameters that makes one, or an optimizer block in the configuration"
        )
    return made


def _groups(given: list[Any], names: NamedParameters) -> Iterator[dict[str, Any]]:
    """Groups of a script, with names for parameters. Parameters may come as (name, parameter)."""
    groups = given if given and isinstance(given[0], Mapping) else [{"params": given}]
    for group in groups:
        if not isinstance(group, Mapping) or "params" not in group:
            raise DeepSpeedConfigError(
                f"model_parameters holds {in_words(group)} among groups; a group is a dict with "
                '"params"'
            )
        members = group["params"]
        listed = [members] if isinstance(members, torch.Tensor) else list(members)
        plain = [each[1] if isinstance(each, tuple) else each for each in listed]
        yield {**group, "params": [names(parameter) for parameter in plain]}


# By a configuration


def _of_configuration(named: Named, groups: list[dict[str, Any]]) -> Recipe:
    kind, params = named.type.lower(), dict(named.params)
    params.pop("max_grad_norm", None)  # without effect, or else refused
    if kind == "adam" and params.get("adam_w_mode", True):
        kind = "adamw"
    if kind in _DECAY_OF_ZERO and not params.get("torch_adam"):
        params.setdefault("weight_decay", 0.0)
    if kind in _HERE:
        taken = {name: value for name, value in params.items() if name not in _ONLY_DEEPSPEED}
        if not params.get("bias_correction", True):
            groups = [{**group, "bias_correction": False} for group in groups]
        algorithm = algorithm_of(_HERE[kind], *(taken | group for group in groups))
        narrow = not params.get("fp32_optimizer_states", True)
        return Recipe(_HERE[kind], algorithm, groups, taken, narrow=narrow)
    of_torch = getattr(torch.optim, named.type, None)
    if not isinstance(of_torch, type) or not issubclass(of_torch, torch.optim.Optimizer):
        raise DeepSpeedConfigError(
            f"optimizer.type={named.type!r} is no optimizer that the engine knows; take Adam, "
            "AdamW, Adagrad, Lion or SGD, or any name in torch.optim"
        )
    return Recipe(_adapting(of_torch), "other", groups, params)


def _of_muon(
    settings: Settings, named: Named, model: nn.Module, groups: list[dict[str, Any]]
) -> Recipe:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    divided = list(halves(groups, parameters, named.params))
    if settings.gradient_clipping and settings.config.stage > 0:
        return Recipe(ClippedMuon, "other", divided, {"limit": settings.gradient_clipping})
    return Recipe(_adapting(Muon), "other", divided)


def _adapting(kind: type[torch.optim.Optimizer]) -> Callable[..., Optimizer]:
    def make(groups: Any, **settings: Any) -> Optimizer:
        try:
            return adapt(kind, groups, **settings)
        except ConfigError:
            raise
        except ValueError as error:
            raise DeepSpeedConfigError(f"optimizer {kind.__name__}: {error}") from None
        except TypeError as error:
            raise DeepSpeedConfigError(
                f"optimizer {kind.__name__}: {error}. Each unit of the model gets one of its own, "
                f"made by {kind.__name__}(parameters, {', '.join(settings)}): a subclass may take "
                "that"
            ) from None

    return make


# By an optimizer of the script


def _of_client(client: torch.optim.Optimizer, names: NamedParameters) -> Recipe:
    if isinstance(client, Optimizer):
        raise DeepSpeedConfigError(
            f"infinity.initialize wraps the model itself, but infinity.{type(client).__name__} is "
            "for a model that is wrapped already; give the optimizer of torch, or the block "
            '"optimizer" in the configuration'
        )
    groups = list(_groups(client.param_groups, names))
    kind = kernels_for(type(client), groups_of(client))
    if kind is None:
        return Recipe(_adapting(type(client)), "other", groups, _settings_of(client), client=client)
    plain = [
        {name: value for name, value in group.items() if name not in _DROPPED} for group in groups
    ]
    narrow = not getattr(client, "fp32_optimizer_states", True)
    return Recipe(kind, algorithm_for(client), plain, client=client, narrow=narrow)


_DROPPED = (*UNSUPPORTED, *WITHOUT_EFFECT, "decoupled_weight_decay")
"""Settings of torch's groups that are off, or change no number."""


def _settings_of(client: torch.optim.Optimizer) -> dict[str, Any]:
    """The defaults of `client` as its constructor takes them."""
    taken = inspect.signature(type(client).__init__).parameters
    return {name: value for name, value in client.defaults.items() if name in taken}
