"""DeepSpeed's functions for the states of one parameter, over `infinity.get` and `infinity.set`.

Functions with "full" in their names take and return a tensor of the shape of the parameter, and
every rank calls them. Functions with "local" are about this rank's part of the flat parameter,
(n,). Frozen parameters have no such states: getters return None, and setters do nothing. The same
holds for a gradient before a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from infinity.access import get_state, set_state


def _get(parameter: torch.Tensor, name: str, local: bool = False) -> torch.Tensor | None:
    if not parameter.requires_grad:
        return None
    return get_state(parameter, name, local=local)


def _set(parameter: torch.Tensor, name: str, value: torch.Tensor, local: bool = False) -> None:
    if parameter.requires_grad:
        set_state(parameter, name, value, local=local)


def get_full_hp_param(
    param: torch.Tensor, optim_state_key: str | None = None
) -> torch.Tensor | None:
    """The fp32 value of a parameter, or a state of the optimizer by torch's name."""
    return _get(param, optim_state_key or "master")


def get_local_hp_param(
    param: torch.Tensor, optim_state_key: str | None = None
) -> torch.Tensor | None:
    """This rank's part of `get_full_hp_param`."""
    return _get(param, optim_state_key or "master", local=True)


def set_full_hp_param(
    param: torch.Tensor, value: torch.Tensor, optim_state_key: str | None = None
) -> None:
    """Replace the fp32 value of a parameter, and with it the parameter, or a state of the
    optimizer."""
    _set(param, optim_state_key or "master", value)


def set_local_hp_param(
    param: torch.Tensor, value: torch.Tensor, optim_state_key: str | None = None
) -> None:
    """Replace this rank's part of `get_full_hp_param`."""
    _set(param, optim_state_key or "master", value, local=True)


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """The fp32 value of a parameter."""
    return _get(param, "master")


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace the fp32 value of a parameter, and with it the parameter."""
    _set(param, "master", value)


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a parameter, unscaled."""
    return _get(param, "grad")


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace the gradient of a parameter."""
    _set(param, "grad", value)


def safe_update_full_grad_vectorized(
    param_list: Sequence[torch.Tensor],
    update_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Replace the gradient of each parameter by `update_func(gradient, parameter)`."""
    for param in param_list:
        gradient = _get(param, "grad")
        if gradient is not None:
            _set(param, "grad", update_func(gradient, param))


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """A state of the optimizer, by torch's name, for example "exp_avg"."""
    return _get(param, optim_state_key)


def safe_set_full_optimizer_state(
    param: torch.Tensor, value: torch.Tensor, optim_state_key: str
) -> None:
    """Replace a state of the optimizer, by torch's name."""
    _set(param, optim_state_key, value)


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of the fp32 value."""
    return _get(param, "master", local=True)


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace this rank's part of the fp32 value."""
    _set(param, "master", value, local=True)


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of the gradient. Every rank calls it."""
    return _get(param, "grad", local=True)


def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace this rank's part of the gradient. Every rank calls it."""
    _set(param, "grad", value, local=True)


def safe_get_local_optimizer_state(
    param: torch.Tensor, optim_state_key: str
) -> torch.Tensor | None:
    """This rank's part of a state of the optimizer."""
    return _get(param, optim_state_key, local=True)


def safe_set_local_optimizer_state(
    param: torch.Tensor, value: torch.Tensor, optim_state_key: str
) -> None:
    """Replace this rank's part of a state of the optimizer."""
    _set(param, optim_state_key, value, local=True)
