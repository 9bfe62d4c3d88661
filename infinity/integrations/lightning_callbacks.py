"""Makes callbacks of Lightning's Trainer that change parameters work on a wrapped module.

[Note: callbacks that thaw]
A parameter that is frozen during `wrap` gets no place for gradients and states. `BaseFinetuning`
freezes parameters before `wrap`, and thaws them in a later epoch. So these parameters are trainable
during `wrap`, and frozen again afterwards.

[Note: callbacks that prune]
`torch.nn.utils.prune` reads a parameter, renames it, and finally assigns its data. All of that
works inside of `infinity.gathered`. `ModelPruning` calls it in hooks without a strategy. So
`adjust` replaces these methods on the callback, until the strategy ends.

[Note: callbacks that average]
`WeightAveraging` swaps the parameters of the module and their averages for each validation, and
copies the averages to the parameters at the end. `_AverageSwap` does this unit by unit. Masters
with more bits than parameters are kept during the swap, and restored with the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from infinity.access import get_state, set_state
from infinity.directories.mapped import mapped
from infinity.engine import engine
from infinity.errors import ConfigError
from infinity.integrations.required import required
from infinity.modules.gathered import gathered
from infinity.tiles.tiling import InTiles

with required("lightning", "lightning"):
    from lightning.pytorch import callbacks as callbacks_of_lightning
    from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning

_AVERAGING: Any = getattr(callbacks_of_lightning, "WeightAveraging", ())  # since 2.6

_RESET = "apply_lottery_ticket_hypothesis"
_PRUNING = ("apply_pruning", _RESET, "make_pruning_permanent")
"""The methods of `ModelPruning` that touch parameters."""


def thaws(callbacks: Iterable[Any]) -> bool:
    """Whether a callback may thaw parameters that it has frozen."""
    return any(isinstance(callback, BaseFinetuning) for callback in callbacks)


@contextmanager
def trainable(frozen: Iterable[torch.Tensor], model: nn.Module) -> Iterator[None]:
    """Inside, the `frozen` parameters of `model` require gradients. Afterwards the parameters with
    the same names are frozen again, because `wrap` may have replaced them."""
    ids = {id(parameter) for parameter in frozen}
    named = {n: p for n, p in model.named_parameters(remove_duplicate=False) if id(p) in ids}
    for parameter in named.values():
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        now = dict(model.named_parameters(remove_duplicate=False))
        for name in named:
            now[name].requires_grad_(False)


def adjust(callbacks: Iterable[Any]) -> ExitStack:
    """Make `ModelPruning` gather the parameters that it prunes, and `WeightAveraging` swap unit by
    unit. Closing the result undoes both."""
    stack = ExitStack()
    for callback in callbacks:
        replaced: dict[str, Callable[..., Any]] = {}
        if isinstance(callback, ModelPruning):
            replaced = {name: _gathering(callback, getattr(callback, name)) for name in _PRUNING}
        elif isinstance(callback, _AVERAGING):
            exchange = _AverageSwap(callback)
            replaced = {"_swap_models": exchange.swap, "_copy_average_to_current": exchange.copy}
        for name, method in replaced.items():
            vars(callback)[name] = method
            stack.callback(vars(callback).pop, name, None)
    return stack


def check_averaging(callbacks: Iterable[Any], module: nn.Module) -> None:
    """Raise `ConfigError` if a callback averages the parameters of a wrapped `module` with weights
    in tiles."""
    tiled = next((name for name, each in module.named_modules() if isinstance(each, InTiles)), None)
    if tiled is not None and any(isinstance(callback, _AVERAGING) for callback in callbacks):
        raise ConfigError(
            f"WeightAveraging cannot average {tiled}, whose weight lies in tiles, which a wrapped "
            "model never has whole; raise gpu_memory, or leave the callback out"
        )


class _AverageSwap:
    """Replaces the swap of `WeightAveraging` on a wrapped module. See [Note: callbacks that
    average]."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._masters: dict[torch.Tensor, torch.Tensor] = {}

    def swap(self, module: nn.Module) -> None:
        """Exchange the parameters of `module` with those of the average model."""
        masters = {} if self._masters else self._read_masters(module)
        self._write(module, give_back=True)
        for parameter, master in self._masters.items():
            set_state(parameter, "master", master)
        self._masters = masters

    def copy(self, module: nn.Module) -> None:
        """Copy the averages to `module`."""
        self._write(module, give_back=False)

    def _read_masters(self, module: nn.Module) -> dict[torch.Tensor, torch.Tensor]:
        directories = engine(module).config.nvme
        return {
            parameter: mapped(master, directories[0] if directories else None)
            for unit in engine(module).units
            if unit.facts.trainable and unit.facts.dtype != torch.float32
            for parameter in unit.facts.parameters
            if (master := get_state(parameter, "master")) is not None
        }

    def _write(self, module: nn.Module, give_back: bool) -> None:
        averages = self._callback._average_model.module
        average_of = dict(zip(module.parameters(), averages.parameters(), strict=True))
        for unit in engine(module).units:
            with torch.no_grad(), gathered(list(unit.facts.parameters), write=True):
                for parameter in unit.facts.parameters:
                    _give(average_of[parameter], parameter, give_back)
        for average, buffer in zip(averages.buffers(), module.buffers(), strict=True):
            _give(average, buffer, give_back)


def _give(average: torch.Tensor, current: torch.Tensor, give_back: bool) -> None:
    before = average.data.clone()
    if give_back:
        average.data.copy_(current.data)
    current.data.copy_(before)


def _gathering(callback: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    """`method` of `callback`, with its pruned parameters gathered."""
    reset: set[tuple[int, str]] = set()

    def run(*args: Any, **kwargs: Any) -> Any:
        with gathered(_pruned(callback._parameters_to_prune), write=True):
            if method.__name__ == _RESET:
                _share(callback, reset)
            return method(*args, **kwargs)

    return run


def _share(callback: Any, reset: set[tuple[int, str]]) -> None:
    """Copy the current values of parameters that were `reset` before over the initial values that
    `callback` keeps. In a plain module both share memory after a reset, so later resets have no
    effect."""
    for layer in (callback._original_layers or {}).values():
        if callback._resample_parameters and hasattr(layer["data"], "reset_parameters"):
            continue  # it resets them to new values
        for place in layer["names"]:
            number, name = place
            held = callback._parameters_to_prune[number][0]._parameters
            now, first = held.get(f"{name}_orig", held.get(name)), getattr(layer["data"], name)
            if place in reset and now is not None and first is not None:
                first.data = now.data.clone()
            reset.add(place)


def _pruned(places: Iterable[tuple[nn.Module, str]]) -> list[torch.Tensor]:
    """The parameters at `places`, under their own names or the names that pruning gives them.
    Raises `ConfigError` for a weight in tiles."""
    found: list[torch.Tensor] = []
    for module, name in places:
        if isinstance(module, InTiles) and name in module.tiled:
            raise ConfigError(
                f"ModelPruning cannot prune the {name} of a {type(module).__name__} in tiles, "
                "which a wrapped model never has whole; leave it out of parameters_to_prune, or "
                "raise gpu_memory"
            )
        held = module._parameters
        parameter = held.get(f"{name}_orig", held.get(name))
        if parameter is not None:
            found.append(parameter)
    return found
