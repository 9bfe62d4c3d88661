"""The options of a command in a YAML file, with their names as keys."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from infinity.models.reading import open_regular


def _names(context: typer.Context) -> dict[str, str]:
    """The parameter of each key, which is an option without dashes in front."""
    return {
        option.lstrip("-").replace("-", "_"): parameter.name or ""
        for parameter in context.command.params
        for option in parameter.opts
        if parameter.name not in ("config", "show_config", "help")
    }


def _take(context: typer.Context, path: Path | None) -> Path | None:
    """Make the options in `path` the defaults of the command. Raises `typer.BadParameter`."""
    if path is None or context.resilient_parsing:
        return path
    yaml = _yaml()
    try:
        with open_regular(path) as file:
            found = yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{path} holds no options; write lines such as steps: 100")
    names = _names(context)
    for key in found:
        if str(key).replace("-", "_") not in names:
            near = difflib.get_close_matches(str(key).replace("-", "_"), names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise typer.BadParameter(f"{path} has the key {key!r}, which is no option{hint}")
    given = {names[str(key).replace("-", "_")]: value for key, value in found.items()}
    parameters = {each.name: each for each in context.command.params}
    context.default_map = {
        name: _typed(parameters[name], value) for name, value in given.items() if value is not None
    }
    return path


def _typed(parameter: Any, value: Any) -> Any:
    """`value` as it is typed on the command line. YAML reads on and off as truth values."""
    if parameter.is_flag:
        return value
    if parameter.multiple:
        return [str(each) for each in (value if isinstance(value, list) else [value])]
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return _pairs(value)
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _pairs(value: Mapping[str, Any]) -> str:
    return ",".join(f"{key}={name}" for key, name in value.items())


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        callback=_take,
        is_eager=True,
        metavar="FILE",
        help="Options in YAML, with their names as keys. The command line goes before them.",
        show_default="none",
    ),
]
ShowConfig = Annotated[
    bool,
    typer.Option("--show-config", help="Print all options as --config reads them, and end."),
]


def as_yaml(values: Mapping[str, Any]) -> str:
    """`values` of options as the text of a file for --config."""
    found = {name: _plain(value) for name, value in values.items()}
    return str(_yaml().safe_dump(found, sort_keys=False))


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise typer.BadParameter(
            "it needs PyYAML; install it with: pip install 'zero-infinity[finetune]'"
        ) from None
    return yaml


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return _pairs(value)
    return str(value) if isinstance(value, Path) else value
