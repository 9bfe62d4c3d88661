"""Generates the command options that mirror fields of `Config` and `Tuning`.

An option has the name, the type, the limits and the default of its field. Its help is the first
paragraph of the field's documentation. There `field` becomes --field. The tables here hold the
differences of commands.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from infinity.cli.options import MOST, PANEL, parse_directory, parse_durability, parse_size
from infinity.config import (
    ActivationBytes,
    Bytes,
    BytesOrAuto,
    BytesOrPart,
    Config,
    Durability,
    Paths,
    Shares,
    Tuning,
)
from infinity.quantities import format_bytes
from infinity.tier import TIERS

Command = TypeVar("Command", bound=Callable[..., None])

OF_A_NODE = ("cpu_memory", "nvme_memory", "activation_memory")
"""Budgets that a command takes for all ranks of a node together. An engine takes them for its own
rank."""
DEFAULTS: dict[str, Any] = {"precision": "bf16"}
"""Defaults that differ from those of `Config`."""
_WITHOUT_OPTION = ("tuning", "accumulation")  # commands have --accumulation-order
_FIELDS = {
    name: field for name, field in Config.model_fields.items() if name not in _WITHOUT_OPTION
} | Tuning.model_fields
KNOBS = frozenset(_FIELDS)
"""The fields of `Config` and `Tuning` that are options of commands."""
_TYPES = get_type_hints(Config, include_extras=True) | get_type_hints(Tuning, include_extras=True)


def _parse_cache(value: Any) -> int | str:
    return "auto" if value == "auto" else parse_size(value)


def _parse_budget(value: Any) -> int | str:
    is_part = isinstance(value, str) and value.strip().endswith("%")
    return value if is_part or value == "auto" else parse_size(value)


def _parse_shares(value: Any) -> Any:
    if not isinstance(value, str) or value in ("measured", "equal"):
        return value
    try:
        return tuple(float(number) for number in value.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"{value!r} is not measured, equal, or a number for each --nvme with commas between"
        ) from None


_PARSED: dict[Any, tuple[Any, Callable[[Any], Any], str]] = {
    Bytes: (int, parse_size, "BYTES"),
    BytesOrPart: (Any, _parse_budget, "auto|BYTES|PERCENT"),
    BytesOrAuto: (Any, _parse_cache, "auto|BYTES"),
    ActivationBytes: (Any, _parse_cache, "auto|BYTES"),
    Durability: (Any, parse_durability, "off|step|N"),
    Shares: (Any, _parse_shares, "measured|equal|N,N,..."),
}
"""For field types that typer does not know: the type, the parser and the metavar of the option."""


def mirrors(
    before: str,
    leave_out: Collection[str] = (),
    options: Callable[..., object] | None = None,
    **defaults: Any,
) -> Callable[[Command], Command]:
    """A decorator: a command with `**knobs` gets an option for every field of `Config` and
    `Tuning`.

    In --help the options stand before the parameter `before`. `leave_out`: fields without an
    option. `options`: a dataclass, whose fields are options, too, before those of the command.
    `defaults`: the defaults of this command. Raises `ValueError` for an unknown field.
    """
    unknown = {*leave_out, *defaults} - _FIELDS.keys()
    if unknown:
        raise ValueError(f"no field of Config or Tuning: {', '.join(sorted(unknown))}")
    defaults = DEFAULTS | defaults

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        if options is not None:
            own = [*inspect.signature(options, eval_str=True).parameters.values(), *own]
        mirrored = [_option(name, defaults) for name in _FIELDS if name not in leave_out]
        place = [each.name for each in own].index(before)
        parameters = [*own[:place], *mirrored, *own[place:]]
        vars(command)["__signature__"] = signature.replace(
            parameters=[each.replace(kind=each.KEYWORD_ONLY) for each in parameters]
        )
        return command

    return decorate


def _option(name: str, defaults: Mapping[str, Any]) -> inspect.Parameter:
    kind, default = _TYPES[name], defaults.get(name, _FIELDS[name].default)
    details: dict[str, Any] = {"help": _help(name), "rich_help_panel": PANEL}
    optional = type(None) in get_args(kind)
    if optional:
        (kind,) = (each for each in get_args(kind) if each is not type(None))
    if kind == Paths:
        kind, optional, default = list[Path], True, None
        details |= {"parser": parse_directory, "metavar": "DIR"}
    elif kind in _PARSED:
        kind, details["parser"], details["metavar"] = _PARSED[kind]
        if isinstance(default, int):
            details["show_default"] = format_bytes(default).replace(" ", "")
    elif get_origin(kind) is Annotated:
        kind, (limits,) = get_args(kind)[0], get_args(kind)[1:]
        details |= _limits(limits.metadata)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind | None if optional else kind, typer.Option(**details)],
    )


def _limits(metadata: Collection[Any]) -> dict[str, int]:
    least = [each.ge for each in metadata if hasattr(each, "ge")]
    return {"min": least[0], "max": MOST} if least else {}


def _help(name: str) -> str:
    first = (_FIELDS[name].description or "").partition("\n\n")[0]
    text = re.sub(r"`(\w+)(?:=\"(\w+)\")?`", _as_option, " ".join(first.split()))
    return f"{text} For all ranks of a node together." if name in OF_A_NODE else text


def _as_option(match: re.Match[str]) -> str:
    name, value = match.groups()
    option = f"--{name.replace('_', '-')}" if name in _FIELDS else name
    return f"{option} {value}" if value else option


_WRAPPED = re.compile(r"(?:infinity\.)?(?:Config|Tuning)\(([^()]*)\)")
_TILING = re.compile(r" ?\(infinity\.tile\([^()]*\)[^()]*\)")
_ALONE = [name for name in _FIELDS if "_" in name]
_NAMED = re.compile(
    rf"(?<![\w./-])(?:(?P<field>{'|'.join(_FIELDS)})=(?P<value>'[^']*'|\"[^\"]*\"|[\w.%]*)"
    rf"|(?P<alone>{'|'.join(_ALONE)})(?![\w=./-]))"
)


def as_options(text: str) -> str:
    """A text of the engine for the command line: fields of `Config` and `Tuning` become options.

    Example: set gradients="nvme", or lower cpu_memory -> set --gradients nvme, or lower
    --cpu-memory.
    """
    plain = _TILING.sub("", text).replace("nvme=[...]", "--nvme DIR")
    for _ in range(2):  # Config(tuning=Tuning(...))
        plain = _WRAPPED.sub(r"\1", plain).removeprefix("tuning=").replace(" tuning=", " ")
    return _NAMED.sub(_named_option, plain)


def _named_option(match: re.Match[str]) -> str:
    name = match["field"] or match["alone"]
    option, value = f"--{name.replace('_', '-')}", (match["value"] or "").strip("'\"")
    if value in ("True", "False"):
        return option if value == "True" else f"--no-{option[2:]}"
    return f"{option} {value}" if value else option


def options_of(config: Config, count: Callable[[int], int] = lambda nbytes: nbytes) -> list[str]:
    """The words of a command line that give `config`, where it differs from the defaults of
    commands. `count` computes the budget of a node from that of a rank."""
    values = config.model_dump(exclude={"tuning", "accumulation"}) | config.tuning.model_dump()
    words: list[str] = []
    for name, value in values.items():
        if _TYPES[name] == Paths:
            words += [word for path in value for word in ("--nvme", str(path))]
            continue
        if value == DEFAULTS.get(name, _FIELDS[name].default):
            continue
        if name in OF_A_NODE and isinstance(value, int):
            value = count(value)
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(option if value else f"--no-{option[2:]}")
        else:
            text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            words += [option, text]
    return words


def configured(
    knobs: Mapping[str, Any], share: Callable[[int], int] = lambda nbytes: nbytes
) -> Config:
    """The `Config` of the options of a command.

    `share` computes this rank's part of a budget of the node. Raises `ConfigError`, and
    `ValueError` if a state is on nvme without a directory.
    """
    states = ("parameters", "optimizer", "gradients", "activations")
    homes = {state: TIERS[knobs[state]] for state in states if knobs.get(state)}
    on_nvme = [state for state, tier in homes.items() if tier.is_drive]
    if on_nvme and not knobs["nvme"] and not knobs.get("inference"):
        raise ValueError(
            f"{' and '.join(on_nvme)} on nvme, but no directory is given: add --nvme DIR, "
            f"or keep them in memory with {' '.join(f'--{state} cpu' for state in on_nvme)}"
        )
    shared = {n: share(knobs[n]) for n in OF_A_NODE if isinstance(knobs.get(n), int)}
    values = {**knobs, "nvme": tuple(knobs["nvme"] or ()), **shared}
    tuning = {name: value for name, value in values.items() if name in Tuning.model_fields}
    return Config(
        **{name: values[name] for name in values.keys() - tuning.keys()}, tuning=Tuning(**tuning)
    )
