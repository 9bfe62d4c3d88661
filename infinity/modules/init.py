"""Models built without memory, and the values of parameters that were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.sharding.tensor_parallel import form_of, local, part_in


@contextmanager
def init() -> Iterator[None]:
    """Build modules whose parameters take no memory: they are created on the meta device; buffers are real.

    `infinity.wrap` gives them values unit by unit, from `weights=` or by the modules' own initialisation.
    Parameters exist one at a time while a constructor runs. Only for the thread that enters it; do not nest.
    """
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and parameter.device.type != "meta":
            kind, values = type(parameter), dict(vars(parameter))
            replaced = kind(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            vars(replaced).update(values)
            module._parameters[name] = replaced

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def replace_meta(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Give every meta parameter a placeholder of its shape and dtype that takes no memory, tied ones the same one.

    Returns (module, name, meta parameter) of each, with which `put_back` undoes it.
    """
    made: dict[int, nn.Parameter] = {}
    replaced = []
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.device.type != "meta":
                continue
            if id(parameter) not in made:
                form = form_of(parameter)
                device = "cpu" if form is None else form.mesh.device_type
                place = torch.zeros(1, dtype=parameter.dtype, device=device).expand(local(parameter).shape)
                place = place if form is None else form.wrap(place)
                made[id(parameter)] = nn.Parameter(place, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
            replaced.append((module, name, parameter))
    return replaced


def put_back(replaced: Sequence[tuple[nn.Module, str, nn.Parameter]]) -> None:
    """Undo `replace_meta`."""
    for module, name, parameter in replaced:
        module._parameters[name] = parameter


def initialise(model: nn.Module, parameters: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> None:
    """Run the initialisation of the modules that hold `parameters`, each with the memory for its values, and change no others.

    A transformers model initialises by `_init_weights(module)`, first the modules that hold parameters and then, inside out,
    the modules around them, which may scale what theirs hold; others by each module's `reset_parameters()`. A tied parameter
    gets its values from the first module that holds it. Of a DTensor the whole is initialised and this rank keeps its part, so
    that with one seed all ranks have parts of the same.
    """
    stands: dict[int, nn.Parameter] = {}
    for parameter, values in parameters:
        if local(parameter) is parameter:
            parameter.data = values
        else:
            empty = torch.empty(parameter.shape, dtype=values.dtype)
            stands[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    replaced = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None and id(p) in stands]
    for module, name, parameter in replaced:
        module._parameters[name] = stands[id(parameter)]
    try:
        _initialise(model, [stands.get(id(parameter), parameter) for parameter, _ in parameters])
    finally:
        put_back(replaced)
    for parameter, values in parameters:
        if id(parameter) in stands:
            values.copy_(part_in(stands[id(parameter)], parameter))


def check_initialisable(model: nn.Module, parameters: set[int]) -> None:
    """Raise `ConfigError` naming the first module that holds one of `parameters` (their ids) and cannot initialise it."""
    by_model, wanted = callable(getattr(model, "_init_weights", None)), set(parameters)
    for name, module in model.named_modules():
        mine = {id(p) for p in module.parameters(recurse=False)} & wanted
        wanted -= mine
        if mine and not by_model and not callable(getattr(module, "reset_parameters", None)):
            raise ConfigError(
                f"{name or 'the model'} ({type(module).__name__}) was built inside infinity.init() and has no "
                "reset_parameters(); give wrap(..., weights=DIRECTORY), or build that module outside of init()"
            )


def _initialise(model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    given = {id(p) for p in parameters}
    wanted = set(given)
    by_model: Any = getattr(model, "_init_weights", None)
    for module in model.modules():
        mine = {id(p) for p in module.parameters(recurse=False)} & wanted
        if not mine:
            continue
        wanted -= mine
        others = {key: p for key, p in module._parameters.items() if p is not None and id(p) not in mine}
        for key, p in others.items():  # of another unit: without data now, or initialised already
            module._parameters[key] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype), requires_grad=p.requires_grad)
        try:
            if callable(by_model):
                by_model(module)
            else:
                module.reset_parameters()  # type: ignore[operator]
        finally:
            module._parameters.update(others)
    if callable(by_model):
        for module in reversed(list(model.modules())):
            below = {id(p) for p in module.parameters()}
            if below and below <= given and not module._parameters:
                by_model(module)
