"""The allowed values of configuration keys. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple


class ValueKind(NamedTuple):
    """A kind of value. `parse` returns the intended value, or raises `ValueError`."""

    words: str
    """The allowed values, for messages."""
    parse: Callable[[Any], Any]


def _flag(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"  # printed by the tuner of DeepSpeed
    if value in (0, 1) and isinstance(value, int):
        return bool(value)
    raise ValueError


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError
    try:
        is_number = not math.isnan(value)
    except OverflowError:  # a whole number above all floats
        is_number = False
    if not is_number:
        raise ValueError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


FLAG = ValueKind("true or false", _flag)
TEXT = ValueKind("text", _text)
ANYTHING = ValueKind("anything", lambda value: value)


_DTYPES = {
    "fp32": "fp32",
    "float32": "fp32",
    "fp16": "fp16",
    "float16": "fp16",
    "bf16": "bf16",
    "bfp16": "bf16",
    "bfloat16": "bf16",
}


def _dtype(value: Any) -> str:
    name = value.lower().removeprefix("torch.") if isinstance(value, str) else ""
    if name not in _DTYPES:
        raise ValueError
    return _DTYPES[name]


DTYPE = ValueKind('"fp32", "fp16" or "bf16"', _dtype)


def number(least: float = 0.0, most: float = math.inf) -> ValueKind:
    """A number from `least` to `most`."""

    def parse(value: Any) -> float:
        if not least <= _number(value) <= most:
            raise ValueError
        return value

    return ValueKind(f"a number{_limits(least, most)}", parse)


def whole(least: float = 0, most: float = math.inf) -> ValueKind:
    """A whole number from `least` to `most`. JSON writes large ones as 5e8."""

    def parse(value: Any) -> int:
        if not least <= _number(value) <= most or not float(value).is_integer():
            raise ValueError
        return int(value)

    return ValueKind(f"a whole number{_limits(least, most)}", parse)


def _limits(least: float, most: float) -> str:
    if most < math.inf:
        return f" from {least:g} to {most:g}"
    return f" of at least {least:g}" if least > -math.inf else ""


def one_of(*names: str) -> ValueKind:
    """One of `names`, in any case of letters."""

    def parse(value: Any) -> str:
        if not isinstance(value, str) or value.lower() not in names:
            raise ValueError
        return value.lower()

    return ValueKind(" or ".join(f'"{name}"' for name in names), parse)


def several(each: ValueKind, count: int | None = None) -> ValueKind:
    """A list of values of one kind, of fixed length if `count` is given."""

    def parse(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)) or count not in (None, len(value)):
            raise ValueError
        return tuple(each.parse(item) for item in value)

    return ValueKind(f"a list of {f'{count}, each ' if count else ''}{each.words}", parse)


def one_or_several(each: ValueKind) -> ValueKind:
    """A list of values of one kind, or a single value."""
    listed = several(each)

    def parse(value: Any) -> tuple[Any, ...]:
        return listed.parse([value] if isinstance(value, str) else value)

    return ValueKind(listed.words, parse)


def either(first: ValueKind, second: ValueKind) -> ValueKind:
    """A value of one of two kinds."""

    def parse(value: Any) -> Any:
        try:
            return first.parse(value)
        except ValueError:
            return second.parse(value)

    return ValueKind(f"{first.words}, or {second.words}", parse)


SCALE = either(
    ValueKind("0, which is a dynamic scale", number(0, 0).parse), number(2.0**-126, 2.0**127)
)
"""A loss scale that is finite in fp32, as is its inverse."""
