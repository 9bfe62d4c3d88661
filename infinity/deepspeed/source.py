"""Reads a DeepSpeed configuration from a dict, a JSON or HJSON file, or base64 text.

The package `hjson` reads HJSON (JSON with comments, and without the quotes), if it is installed.
"""

from __future__ import annotations

import base64
import binascii
import copy
import importlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infinity.deepspeed.errors import DeepSpeedConfigError
from infinity.errors import in_words

Source = Mapping[str, Any] | str | os.PathLike[str]
"""A dict, the path of a file, or base64 text of one."""


def read(source: Source) -> dict[str, Any]:
    """The configuration in `source`, as a new dict.

    Raises `ConfigError` for other text, for a duplicate key, and for a file that is no object.
    Passes `OSError`.
    """
    if isinstance(source, Mapping):
        return _plain(source, "")
    if isinstance(source, os.PathLike) or (isinstance(source, str) and _is_file(source)):
        return _parse(_text_of(Path(source)), os.fspath(source))
    if not isinstance(source, str):
        raise DeepSpeedConfigError(
            f"the configuration is {in_words(source)}; give a dict, or the path of a JSON file"
        )
    try:
        text = base64.urlsafe_b64decode(source.encode()).decode()
    except (binascii.Error, ValueError):
        text = ""
    if not text.lstrip().startswith("{"):
        raise DeepSpeedConfigError(
            f"the configuration {in_words(source)} is neither a file nor base64 text of a JSON "
            "object"
        )
    return _parse(text, "the base64 text")


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # a byte order mark, of editors on Windows
    except UnicodeDecodeError:
        raise DeepSpeedConfigError(
            f"{path} is no text in UTF-8, so it is no JSON; save it as UTF-8, or give another file"
        ) from None


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a name, or with a NUL
        return False


def _plain(source: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A copy with dicts for all mappings."""
    found = {}
    for key, value in source.items():
        if not isinstance(key, str):
            raise DeepSpeedConfigError(f"the key {in_words(key)} {_inside(path)}is not text")
        below = f"{path}.{key}" if path else key
        found[key] = _plain(value, below) if isinstance(value, Mapping) else copy.deepcopy(value)
    return found


def _inside(path: str) -> str:
    return f"in {path} " if path else ""


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=lambda pairs: _once(pairs, name))
    except json.JSONDecodeError as error:
        found = _parse_hjson(text, name, error)
    except DeepSpeedConfigError:
        raise
    except (RecursionError, ValueError) as error:  # a number of more digits than Python reads
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise DeepSpeedConfigError(f"{name} is no configuration: {reason}") from None
    if not isinstance(found, dict):
        raise DeepSpeedConfigError(f"{name} holds {in_words(found)}, not an object with keys")
    return found


def _parse_hjson(text: str, name: str, problem: json.JSONDecodeError) -> Any:
    try:
        hjson = importlib.import_module("hjson")
    except ImportError:
        raise DeepSpeedConfigError(
            f"{name} is not JSON ({problem}); if it is HJSON, pip install hjson"
        ) from None
    try:
        return hjson.loads(text, object_pairs_hook=lambda pairs: _once(pairs, name))
    except hjson.HjsonDecodeError as error:
        raise DeepSpeedConfigError(
            f"{name} is neither JSON ({problem}) nor HJSON ({error})"
        ) from None


def _once(pairs: list[tuple[str, Any]], name: str) -> dict[str, Any]:
    """An object of these pairs. Raises for a duplicate key."""
    counts = Counter(key for key, _ in pairs)
    twice = [repr(key) for key, count in counts.items() if count > 1]
    if twice:
        raise DeepSpeedConfigError(
            f"{name} has a key twice: {', '.join(twice)}; leave out one of them"
        )
    return dict(pairs)
