"""Byte quantities: parsing what people write ("2GiB") and printing what they read."""

from __future__ import annotations

import re
from fractions import Fraction

_FACTORS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
for _exponent, _prefix in enumerate("KMGTP", start=1):
    _FACTORS[f"{_prefix}IB"] = 1 << (10 * _exponent)
    _FACTORS[f"{_prefix}B"] = 1000**_exponent
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bytes(value: str | int) -> int:
    """Bytes in `value`, rounded down: an integer, or a number with B, KB, KiB, K (= KiB), MB, MiB,
    ... PiB.

    Raises `ValueError` when it is neither, or negative.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"{value} is negative; write for example 512MiB, 2GiB or 2000000000")
        return value
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    factor = _FACTORS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ValueError(
            f"{value!r} is not a number of bytes; write for example 512MiB, 2GiB or 2000000000"
        )
    return int(Fraction(match[1]) * factor)


def format_bytes(count: int | float) -> str:
    """`count` bytes with a binary prefix and three significant digits, four from 1000 to 1023: 1536
    -> "1.5 KiB"."""
    value, suffixes = float(count), ["TiB", "GiB", "MiB", "KiB", "B"]
    suffix = suffixes.pop()
    while suffixes and abs(value) >= 1023.5:  # from there on it would print as 1024
        value /= 1024
        suffix = suffixes.pop()
    return f"{value:.0f} {suffix}" if abs(value) >= 999.5 else f"{value:.3g} {suffix}"


def round_up(count: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple
