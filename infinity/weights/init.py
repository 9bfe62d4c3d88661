"""Builds models without memory, and notes where the values of their parameters come from."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.weak import WeakTensorKeyDictionary

from infinity.errors import ConfigError
from infinity.sharding.tensor_parallel import form_of, local, part_in
from infinity.sharding.tiles import direct_parameters
from infinity.weights.matching import StoredRead
from infinity.weights.pretrained import streamed
from infinity.weights.tape import Place, Tape, number_of
from infinity.weights.taped import TapedParameter, as_built, kinds_for, stored_read
from infinity.weights.taping import Taping

log = logging.getLogger("infinity")

_ATTRIBUTE = "_infinity_origins"  # of a module: the origin of each parameter, by name


class Origin(NamedTuple):
    """Where the values of a parameter without memory come from: `place` of `tape`.

    `number` is the id of the parameter when `init` ended.
    """

    tape: Tape
    place: Place
    number: int = 0
    problem: str = ""
    """Why these are not its values any more; empty if they are."""

    def read(self) -> StoredRead | None:
        """The operation that reads the values from a file, if they are a whole stored tensor or
        some of its rows; else None."""
        return None if self.problem else stored_read(self.tape, self.place)

    def __deepcopy__(self, memo: object) -> Origin:
        return self

    def values(self, parameter: nn.Parameter) -> torch.Tensor:
        """The values of `parameter`, or of this rank's part of it. They must not be written."""
        read = self.read()
        values = self.tape.values(self.place) if read is None else read()
        return part_of_values(values, parameter)


class _Origins(dict[str, Origin]):
    """The origins of a module's parameters. One that is pickled has none: its parameters are plain
    ones with their values."""

    def __deepcopy__(self, memo: object) -> _Origins:
        return _Origins(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ()


def part_of_values(values: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """This rank's part of `values`, which belong to all of `parameter` or to that part."""
    return values if values.shape == local(parameter).shape else part_in(values, parameter)


@contextmanager
def init(*, exact: bool = True) -> Iterator[None]:
    """Build modules with parameters that take no memory: they are created on the meta device.
    Buffers are real.

    `infinity.wrap` gives the parameters values, unit by unit: from `weights=`, or those that the
    constructors wrote (`reset_parameters`, `self.apply(fn)`, `nn.init`, writes to `.data` or under
    `no_grad`). The latter have the bits of plain constructors after the same `torch.manual_seed`.
    The operations of constructors are noted, and run again for one parameter at a time. That takes
    the memory of one parameter, of the temporary tensors it is made of, and about 10 KB for each
    parameter that is drawn. Tensors from elsewhere (NumPy, a file) stay in memory until `wrap` is
    done.

    Random numbers are drawn while models are built, to advance the generator as plain constructors
    do. `wrap` draws them again. With `exact=False` only `wrap` draws, and only the numbers that are
    needed. This is faster before `weights=`, but the values differ from those of plain
    constructors.

    After `init` and before `wrap` a model can be read, copied, changed and run. Its parameters act
    as if they were on the host, and their values are made for each use. Written values are kept in
    unnamed files in the directory of `tempfile`. Ranks that train one model must draw the same
    numbers: seed them alike, or give `wrap` a seed.

    `from_pretrained` of transformers reads no weights: `wrap` streams them from their files. Import
    transformers before `init`; otherwise the weights stay in memory until `wrap` is done.

    Applies only to the thread that enters it. Inside another `init` it does nothing.
    """
    with nullcontext() if is_building() else _building(exact, named=False):
        yield


@contextmanager
def init_zero() -> Iterator[None]:
    """`init` for code that uses DeepSpeed: parameters have DeepSpeed's names."""
    with _building(exact=True, named=True):
        yield


@contextmanager
def _building(exact: bool, named: bool) -> Iterator[None]:
    register, apply = nn.Module.register_parameter, nn.Module._apply
    thread = threading.get_ident()
    taping = Taping(Tape(), exact)
    taping.tensor_kind, taping.parameter_kind = kinds_for(taping, named)
    replaced: Any = WeakTensorKeyDictionary()
    """The parameters that stand for those of constructors: one that two modules register stays
    one."""

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is None or taping.is_paused or threading.get_ident() != thread:
            return
        taping.holders.setdefault(module, set()).add(name)
        if parameter not in replaced:
            handle = _handle_of(parameter, taping)
            if handle is None:
                return
            replaced[parameter] = handle
        module._parameters[name] = replaced[parameter]

    def on_tape(module: nn.Module, function: Callable[..., Any], recurse: bool = True) -> Any:
        """`Module._apply`, as in `model.to(dtype)`: parameters stay the same objects, and tied."""

        def converted(tensor: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = function(tensor)
            is_ours = isinstance(tensor, taping.parameter_kind) and type(found) is torch.Tensor
            has_none = found.device.type == "meta"  # memory
            return found.as_subclass(taping.tensor_kind) if is_ours and has_none else found

        is_here = not taping.is_paused and threading.get_ident() == thread
        return apply(module, converted if is_here else function, recurse)  # type: ignore[no-untyped-call]

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    nn.Module._apply = on_tape  # type: ignore[method-assign]
    try:
        with taping, streamed(taping):
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        nn.Module._apply = apply  # type: ignore[method-assign]
        taping.tape.end()
        with as_built():
            _note_all(taping)


def _handle_of(parameter: nn.Parameter, taping: Taping) -> nn.Parameter | None:
    """A parameter without memory that stands for `parameter`, which a constructor registers. None
    if `parameter` stays, because it is sparse, lazy or without values, or such a parameter
    already."""
    kind = type(parameter)
    if number_of(parameter) is None or is_lazy(parameter):
        return None
    if parameter.device.type != "meta":  # inside `taping`, `is_meta` is False for handles
        handle = taping.handle(parameter)
    elif kind is nn.Parameter and taping.tape.cell(parameter) is not None:
        handle = parameter.detach()
    else:
        return None
    own = taping.parameter_kind if kind is nn.Parameter else kind
    found = own(handle, requires_grad=parameter.requires_grad)
    vars(found).update(vars(parameter))
    return found


@contextmanager
def outside() -> Iterator[None]:
    """Inside the context, this thread builds as outside of `init`. Models that it has built so far
    can be wrapped. Does nothing outside of `init`."""
    with ExitStack() as stack:
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, Taping):
                stack.enter_context(mode.paused())
                with as_built():
                    _note_all(mode)
        yield


def is_building() -> bool:
    """Whether this thread is inside `init`."""
    modes = _get_current_dispatch_mode_stack()
    return any(isinstance(mode, Taping) and not mode.is_paused for mode in modes)


def _note_all(taping: Taping) -> None:
    """Store in all modules that were built the origins of their parameters."""
    for module, names in taping.holders.items():
        for name in names:
            _note(module, name, taping)


def _note(module: nn.Module, name: str, taping: Taping) -> None:
    """Store in `module` the origin of its parameter `name`."""
    parameter = module._parameters.get(name)
    if parameter is None or not taping.is_handle(local(parameter)):
        return
    origins = vars(module).setdefault(_ATTRIBUTE, _Origins())
    place = taping.tape.place(local(parameter))
    origins[name] = Origin(taping.tape, place, id(parameter))
    taping.tape.versions[id(parameter)] = parameter._version


def replace_meta(model: nn.Module) -> dict[int, Origin | None]:
    """Give every meta parameter a placeholder of its shape and dtype that takes no memory. Tied
    parameters share one.

    Returns the origins of their values, by the ids of the placeholders; None if the origin is not
    known.
    """
    made: dict[int, nn.Parameter] = {}
    origins: dict[int, Origin | None] = {}
    tapes = _tapes(model)
    for module in model.modules():
        for name, parameter in list(direct_parameters(module)):
            if not parameter.is_meta:
                continue
            if id(parameter) not in made:
                form = form_of(parameter)
                device = "cpu" if form is None else form.mesh.device_type
                place = torch.zeros((), dtype=parameter.dtype, device=device).expand(
                    local(parameter).shape
                )
                place = place if form is None else form.wrap(place)
                made[id(parameter)] = nn.Parameter(place, requires_grad=parameter.requires_grad)
                vars(made[id(parameter)]).update(vars(parameter))
                for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                    if getattr(parameter, hooks):
                        setattr(made[id(parameter)], hooks, getattr(parameter, hooks))
            origin = _origin_of(module, name, parameter, tapes)
            number = id(made[id(parameter)])
            origins[number] = origins.get(number) or origin
            module._parameters[name] = made[id(parameter)]
    return origins


def _tapes(model: nn.Module) -> list[Tape]:
    """The tapes of the constructors of `model`."""
    found = {
        id(origin.tape): origin.tape
        for module in model.modules()
        for origin in vars(module).get(_ATTRIBUTE, {}).values()
    }
    return list(found.values())


def _origin_of(
    module: nn.Module, name: str, parameter: nn.Parameter, tapes: Sequence[Tape]
) -> Origin | None:
    """The origin of the meta parameter `name` of `module`."""
    known: Origin | None = vars(module).get(_ATTRIBUTE, {}).get(name)
    for tape in tapes:
        if tape.cell(local(parameter)) is None:
            continue
        place = tape.place(local(parameter))
        if known is not None and known.number == id(parameter):
            notes_all = isinstance(parameter, TapedParameter)
            seen = notes_all or tape.versions[id(parameter)] == parameter._version
            return Origin(tape, place, problem="" if seen else "was given values")
        return Origin(tape, place)
    if known is not None and form_of(parameter) is not None:
        return known  # a DTensor that was made of it
    if known is not None and known.number == id(parameter):
        return known._replace(problem="was converted or replaced")
    return None


def divide_origin(module: nn.Module, name: str, weight: Any, tiles: Sequence[nn.Module]) -> None:
    """Give the `weight`s of `tiles` their origins. They are parts of `weight`, parameter `name` of
    `module`, and so are their values."""
    origin = _origin_of(module, name, weight, _tapes(module)) if weight.is_meta else None
    if origin is None:
        return
    for tile in tiles:
        part: Any = tile.weight
        tape, known = origin.tape, origin
        if tape.cell(part) is not None:
            known = Origin(tape, tape.place(part))
            tape.versions[id(part)] = -1 if origin.problem else part._version
        vars(tile)[_ATTRIBUTE] = _Origins(weight=known._replace(number=id(part)))


def meta_buffers(model: nn.Module) -> dict[str, Origin | None]:
    """The origins of the buffers of `model` on the meta device, by name; None if the origin is not
    known."""
    tapes = _tapes(model)
    return {
        name: next((Origin(tape, tape.place(buffer)) for tape in tapes if tape.cell(buffer)), None)
        for name, buffer in model.named_buffers()
        if buffer.is_meta
    }


def check_values(model: nn.Module, origins: Mapping[int, Origin | None]) -> None:
    """Raise `ConfigError` for the first parameter of `origins` (by ids) that has no values. Log a
    warning for each parameter that no constructor wrote."""
    for name, parameter in model.named_parameters():
        if id(parameter) not in origins:
            continue
        origin = origins[id(parameter)]
        if origin is None:
            raise ConfigError(
                f"{name} is on the meta device and has no values, because it was not built inside "
                "infinity.init(); build the model, and what is added to it, inside "
                "infinity.init(), or give wrap(..., weights=...)"
            )
        if origin.problem:
            raise ConfigError(
                f"{name} {origin.problem} after infinity.init(), when it had no memory for them; "
                "do that inside infinity.init(), give wrap(..., weights=...), or write the values "
                "after wrap, inside `with infinity.gathered(parameter, write=True):`"
            )
        if not origin.tape.is_written(origin.place.cell):
            log.warning("%s: no constructor wrote its values; it starts as zeros", name)


def seed_values(origins: Mapping[int, Origin | None], seed: int) -> None:
    """From now on, values are those of constructors after `torch.manual_seed(seed)`. Raises
    `ConfigError` if a constructor read numbers that it drew."""
    for origin in origins.values():
        if origin is not None:
            origin.tape.seeded(seed)


def forget(model: nn.Module) -> None:
    """Remove the origins from the modules of `model`: all parameters have values now."""
    for module in model.modules():
        vars(module).pop(_ATTRIBUTE, None)
