"""Models built without memory, and the values of parameters that were."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.modules.origins import Origin, ParameterWriter, WriterWatch, fix, frames, origins_of
from infinity.sharding.tensor_parallel import form_of, local, part_in


@contextmanager
def init() -> Iterator[None]:
    """Build modules whose parameters take no memory: they are created on the meta device; buffers
    are real.

    `infinity.wrap` gives them values unit by unit, from `weights=` or by the modules' own
    initialisation. Values that a constructor gives a parameter otherwise are kept where they are
    one constant; else `wrap` refuses without `weights=`. Parameters exist one at a time while a
    constructor runs. Only for the thread that enters it; do not nest.

    Raises `ConfigError` where a parameter is registered inside of a `from_pretrained`, whose
    weights would be lost.
    """
    register = nn.Module.register_parameter
    outside = list(frames(sys._getframe()))  # kept, so that no other frame is taken for one of them
    watch = WriterWatch()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is None:
            return
        _refuse_loading(outside)
        if parameter.device.type != "meta":
            kind, values = type(parameter), dict(vars(parameter))
            replaced = kind(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            vars(replaced).update(values)
            module._parameters[name] = replaced
        watch.registered(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        with watch:
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        outside.clear()


def _refuse_loading(outside: Sequence[FrameType]) -> None:
    """Raise `ConfigError` inside of a `from_pretrained` that did not call `init` itself. That of
    `nn.Embedding` takes a tensor, and is like any other constructor."""
    for frame in frames(sys._getframe(2)):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if (
            frame.f_code.co_name != "from_pretrained"
            or package == "torch"
            or any(frame is each for each in outside)
        ):
            continue
        kind = getattr(frame.f_locals.get("cls"), "__name__", None)
        raise ConfigError(
            f"{kind + '.' if kind else ''}from_pretrained inside infinity.init() loads weights "
            "into parameters without memory, so they would be lost; build the model inside init() "
            "by from_config, and give infinity.wrap(..., weights=DIRECTORY); or call "
            "from_pretrained outside of init()"
        )


def replace_meta(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Give every meta parameter a placeholder of its shape and dtype that takes no memory, tied
    ones the same one.

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
                place = torch.zeros(1, dtype=parameter.dtype, device=device).expand(
                    local(parameter).shape
                )
                place = place if form is None else form.wrap(place)
                made[id(parameter)] = nn.Parameter(place, requires_grad=parameter.requires_grad)
                vars(made[id(parameter)]).update(vars(parameter))
            fix(module, name)
            module._parameters[name] = made[id(parameter)]
            replaced.append((module, name, parameter))
    return replaced


def put_back(replaced: Sequence[tuple[nn.Module, str, nn.Parameter]]) -> None:
    """Undo `replace_meta`."""
    for module, name, parameter in replaced:
        module._parameters[name] = parameter


def initialise(model: nn.Module, parameters: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> None:
    """Run the initialisation of the modules that hold `parameters`, each with the memory for its
    values, and change no others.

    A transformers model initialises by `_init_weights(module)`, first the modules that hold
    parameters and then, inside out, the modules around them, which may scale what theirs hold;
    others by each module's `reset_parameters()`, and so does a module that `_init_weights` left
    alone when it was built. A tied parameter gets its values from the first module that holds it.
    What was built with one value for all elements gets that value. Of a DTensor the whole is
    initialised and this rank keeps its part, so that with one seed all ranks have parts of the
    same.
    """
    stands: dict[int, nn.Parameter] = {}
    constants = _constants(origins_of(model))
    for parameter, values in parameters:
        if id(parameter) in constants:
            values.copy_(constants[id(parameter)])
        if local(parameter) is parameter:
            parameter.data = values
        else:
            empty = torch.empty(parameter.shape, dtype=values.dtype)
            stands[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    replaced = [
        (m, name, p)
        for m in model.modules()
        for name, p in m._parameters.items()
        if p is not None and id(p) in stands
    ]
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
    """Raise `ConfigError` if values of one of `parameters` (their ids) would be lost, or if its
    module cannot initialise it. The error names the first such parameter or module."""
    initialisers, wanted, origins = _initialisers(model), set(parameters), origins_of(model)
    constants = _constants(origins)
    for name, module in model.named_modules():
        mine = {
            key: p for key, p in module._parameters.items() if p is not None and id(p) in wanted
        }
        wanted -= {id(p) for p in mine.values()}
        by_model = module in initialisers
        for key, parameter in mine.items():
            _check_origin(
                f"{name}.{key}" if name else key, module, origins.get(id(parameter)), by_model
            )
        drawn = any(id(parameter) not in constants for parameter in mine.values())
        if drawn and not by_model and not callable(getattr(module, "reset_parameters", None)):
            raise ConfigError(
                f"{name or 'the model'} ({type(module).__name__}) was built inside infinity.init() "
                "and has no reset_parameters(); give wrap(..., weights=DIRECTORY), or build that "
                "module outside of init()"
            )


def _check_origin(name: str, module: nn.Module, origin: Origin | None, by_model: bool) -> None:
    """Raise `ConfigError` where the initialisation of `module` would give the parameter `name`
    other values."""
    can_reset = callable(getattr(module, "reset_parameters", None))
    if (
        origin is None
        or not (by_model or can_reset)
        or origin.writer not in (ParameterWriter.OTHER, ParameterWriter.MODEL)
    ):
        return
    way = (
        "build that module outside of init(), give wrap(..., weights=DIRECTORY), or write these "
        "values after wrap instead, inside `with infinity.gathered(parameter, write=True):`"
    )
    if origin.writer is ParameterWriter.OTHER:
        where = (
            origin.where
            if origin.where.startswith("after")
            else f"inside infinity.init() ({origin.where})"
        )
        again = "_init_weights" if by_model else f"{type(module).__name__}.reset_parameters()"
        raise ConfigError(
            f"{name} was given values {where}, when it had no memory for them, and {again} "
            f"would give it others; {way}"
        )
    if not by_model:
        raise ConfigError(
            f"{name} was initialised by the _init_weights of a module that is no part of this "
            f"model, and {type(module).__name__}.reset_parameters() would give it other values; "
            f"{way}"
        )


def _constants(origins: Mapping[int, Origin]) -> dict[int, torch.Tensor]:
    """The values of parameters all of whose elements have one, by their ids."""
    return {key: origin.constant for key, origin in origins.items() if origin.constant is not None}


def _initialisers(model: nn.Module) -> dict[nn.Module, Callable[[nn.Module], object]]:
    """The `_init_weights` that initialises each module, where there is one: that of the outermost
    module around it."""
    found: dict[nn.Module, Callable[[nn.Module], object]] = {}
    pending: list[tuple[nn.Module, Any]] = [(model, None)]
    while pending:
        module, around = pending.pop()
        own = getattr(module, "_init_weights", None)
        by_model = around if around is not None else own if callable(own) else None
        if by_model is not None:
            found.setdefault(module, by_model)
        pending += [(child, by_model) for child in module.children()]
    return found


def _initialise(model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Like `initialise`, of parameters that have memory; those of one value have it already."""
    given, origins = {id(p) for p in parameters}, origins_of(model)
    wanted = given - _constants(origins).keys()
    initialisers = _initialisers(model)
    for module in model.modules():
        mine = {id(p): p for p in module.parameters(recurse=False) if id(p) in wanted}
        if not mine:
            continue
        wanted -= mine.keys()
        others = {
            key: p for key, p in module._parameters.items() if p is not None and id(p) not in mine
        }
        for key, p in others.items():  # of another unit: without data now, or initialised already
            module._parameters[key] = nn.Parameter(
                torch.empty(p.shape, dtype=p.dtype), requires_grad=p.requires_grad
            )
        by_model = initialisers.get(module)
        reset = [key in origins and origins[key].writer is ParameterWriter.RESET for key in mine]
        try:
            if by_model is None or any(reset):
                module.reset_parameters()  # type: ignore[operator]
            if by_model is not None and not all(reset):
                by_model(module)
        finally:
            module._parameters.update(others)
    for module in reversed(list(model.modules())):
        below = {id(p) for p in module.parameters()}
        if module in initialisers and below and below <= given and not module._parameters:
            initialisers[module](module)
