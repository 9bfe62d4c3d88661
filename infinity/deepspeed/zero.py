"""`infinity.zero`: the contexts and functions of DeepSpeed's ZeRO-3, over those of this engine.

`fragments` has the functions for the states of one parameter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from infinity.deepspeed.agree import join_ranks, same_draws, several
from infinity.deepspeed.agree import values_of as values_of_rank
from infinity.deepspeed.errors import DeepSpeedConfigError, DeepSpeedUsageError
from infinity.deepspeed.fragments import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from infinity.deepspeed.refused import Lacking
from infinity.errors import in_words
from infinity.modules.gathered import gathered_to_keep
from infinity.modules.grouping import find_owners
from infinity.sharding.use import place_of
from infinity.sharding.zero_names import ZeroStatus as ZeroParamStatus
from infinity.weights.init import init_zero, is_building
from infinity.weights.taped import NamedTapedParameter, number_built, shown, writes_of
from infinity_command.launched import keep_deepspeed_on_cpu

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "get_z3_leaf_modules",
    "register_external_parameter",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unregister_external_parameter",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]


class Init(Lacking):
    """`with infinity.zero.Init(): model = ...` builds a model without memory, like `infinity.init`.

    The configuration, the dtype and the places of parameters are the arguments of
    `infinity.initialize`. The arguments here are accepted for the sake of scripts. Inside of
    another context it does nothing. `Init(module=model)` leaves a model unchanged until it is
    initialized. All ranks draw the numbers of the first one, so that they build the same model.
    """

    instead = "the configuration and infinity.initialize say all about parameters"

    def __init__(
        self,
        module: nn.Module | None = None,
        *ignored: Any,
        enabled: bool = True,
        **others: Any,
    ) -> None:
        self._enabled = enabled and module is None
        self._inside = ExitStack()

    def __enter__(self) -> Init:
        if self._enabled and not is_building():
            keep_deepspeed_on_cpu(os.environ)
            join_ranks()
            self._inside.enter_context(same_draws())
            self._inside.enter_context(init_zero())
        return self

    def __exit__(self, *error: Any) -> None:
        self._inside.__exit__(*error)


class GatheredParameters(Lacking):
    """`with infinity.zero.GatheredParameters(parameters, modifier_rank=0):`, like
    `infinity.gathered`.

    Without `modifier_rank` parameters can be read. A change is undone, and raises. With it, the
    values of that rank at the end become the values on all ranks. `.data` and `.detach()` may be
    kept: they are memory beside the budgets. Parameters that were built in `Init`, and are not
    initialized yet, can be read and changed, too. Other parameters are left unchanged.
    """

    instead = "hold the parameters that it was given"

    def __init__(
        self,
        params: nn.Module | torch.Tensor | Iterable[torch.Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._rank = modifier_rank
        self._parameters: list[torch.Tensor] = []
        self._inside = ExitStack()
        if enabled:
            self._parameters = _listed(params)

    def __enter__(self) -> None:
        managed = [each for each in self._parameters if place_of(each) is not None]
        taped = [each for each in self._parameters if isinstance(each, NamedTapedParameter)]
        taped.sort(key=number_built)  # transformers gives a set, in another order on each rank
        if managed:
            self._inside.enter_context(gathered_to_keep(managed, self._rank))
        if taped:
            self._inside.enter_context(_rebuilt(taped, self._rank))

    def __exit__(self, *error: Any) -> None:
        self._inside.__exit__(*error)


@contextmanager
def _rebuilt(parameters: Sequence[NamedTapedParameter], rank: int | None) -> Iterator[None]:
    """Inside the context, parameters without memory have values. At the end, all ranks have the
    values of `rank`."""
    before = [writes_of(parameter) for parameter in parameters]
    is_free = is_building()  # a constructor may write anything
    with shown(parameters):
        yield
    changed = [writes_of(parameter) for parameter in parameters] != before
    if rank is None and changed and not is_free:
        raise DeepSpeedUsageError(
            "in-place modification of a parameter inside of GatheredParameters without "
            "modifier_rank; say which rank changes it, and build the model again"
        )
    if rank is None or not several():
        return
    for parameter in parameters:
        kept = values_of_rank(rank, parameter.detach().clone())
        if dist.get_rank() != rank:
            with torch.no_grad():
                parameter.copy_(kept)


def _listed(params: Any) -> list[torch.Tensor]:
    if isinstance(params, nn.Module):
        return list(params.parameters())
    found = [params] if isinstance(params, torch.Tensor) else params
    listed: list[Any] = list(found) if isinstance(found, Iterable) else [found]
    listed = [each for each in listed if each is not None]  # a missing bias
    wrong = [each for each in listed if not isinstance(each, torch.Tensor)]
    if wrong:
        raise DeepSpeedConfigError(
            "GatheredParameters takes a module, a parameter or a list of parameters, not "
            f"{in_words(wrong[0])}"
        )
    return listed


def register_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """Does nothing: the first touch of a parameter outside of its module brings it. Raises
    `ConfigError` if these are no module and parameter."""
    _check_external(module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """Does nothing; see `register_external_parameter`."""
    _check_external(module, parameter)


def _check_external(module: object, parameter: object) -> None:
    if not isinstance(module, nn.Module):
        raise DeepSpeedConfigError(
            f"an external parameter is one of a module, not of {in_words(module)}"
        )
    if not isinstance(parameter, torch.nn.Parameter):
        raise DeepSpeedConfigError(
            f"an external parameter is a parameter, not {in_words(parameter)}"
        )


# Leaf modules

_LEAF = "_z3_leaf"
"""The attribute of a module that, also in DeepSpeed, marks it as brought as a whole."""


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, before `infinity.initialize`. Its parameters are brought together."""
    vars(model)[_LEAF] = flag


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether a module is marked."""
    return bool(vars(model).get(_LEAF, False))


def z3_leaf_parameter(model: torch.Tensor) -> bool:
    """Whether `model`, a parameter, is in a marked module: never, because units decide that."""
    return False


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules of `model`."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Sequence[type[nn.Module] | str],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """Mark and return the modules of these classes, or of classes with these names."""
    return _mark(model, True, _of_classes(model, leaf_module_classes), raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Sequence[type[nn.Module] | str],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """Unmark and return the modules of these classes."""
    return _mark(model, False, _of_classes(model, leaf_module_classes), raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules with these names in the model. Returns them, and the unknown names."""
    return _mark_named(model, flag, module_names, str.__eq__, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose names in the model have these ends. Returns them, and the ends that no
    name has."""
    return _mark_named(model, flag, module_name_suffixes, str.endswith, raise_if_not_found)


def _of_classes(model: nn.Module, classes: Sequence[type[nn.Module] | str]) -> list[nn.Module]:
    kinds = tuple(each for each in classes if isinstance(each, type))
    names = {each for each in classes if isinstance(each, str)}
    return [
        module
        for module in model.modules()
        if isinstance(module, kinds) or not names.isdisjoint(_names(module))
    ]


def _names(module: nn.Module) -> tuple[str, str]:
    kind = type(module)
    return kind.__name__, f"{kind.__module__}.{kind.__qualname__}"


def _mark(model: nn.Module, flag: bool, found: list[nn.Module], needed: bool) -> list[nn.Module]:
    if needed and not found:
        raise DeepSpeedConfigError(
            f"no module of {type(model).__name__} is meant by that; print(model) shows their "
            "classes and names"
        )
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _mark_named(
    model: nn.Module,
    flag: bool,
    wanted: Sequence[str],
    matches: Callable[[str, str], bool],
    needed: bool,
) -> tuple[list[nn.Module], list[str]]:
    named = list(model.named_modules())
    found = {each: [module for name, module in named if matches(name, each)] for each in wanted}
    missing = [name for name, modules in found.items() if not modules]
    if needed and missing:
        raise DeepSpeedConfigError(
            f"{type(model).__name__} has no module {missing[0]!r}; print(model) shows their names"
        )
    modules = list(dict.fromkeys(module for each in found.values() for module in each))
    return _mark(model, flag, modules, needed=False), missing


def units_for(model: nn.Module, named: Mapping[str, Sequence[str]]) -> list[nn.Module] | None:
    """The `units` argument of `infinity.wrap` such that every marked module is brought as a whole,
    as are modules that a configuration names by "classes", "names" or "name_suffixes". None if they
    are brought as parts of a repeated block anyway."""
    set_z3_leaf_modules(model, named["classes"], raise_if_not_found=False)
    set_z3_leaf_modules_by_name(model, named["names"], raise_if_not_found=False)
    set_z3_leaf_modules_by_suffix(model, named["name_suffixes"], raise_if_not_found=False)
    leaves = get_z3_leaf_modules(model)
    blocks = find_owners(model).values()
    inside = {part for block in blocks for part in block.modules()}
    whole = [module for module in leaves if module not in inside and _has_parameters(module)]
    if not whole:
        return None
    covered = {part for module in whole for part in module.modules()}
    return [*whole, *(block for block in blocks if block not in covered)]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
