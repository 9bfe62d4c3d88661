"""Other files, of a valid one: some of its bytes are changed, or a value of its JSON."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

DEEP = "[" * 3000 + "]" * 3000
"""Deeper than Python's own parser goes."""
NUMBERS = (0, 1, -1, 3, 1 << 31, (1 << 63) - 1, 1 << 63, -(1 << 63), 10**400, 0.5, -0.0, 1e308)
VALUES = (
    *NUMBERS,
    *(float("nan"), float("inf"), None, True, False),
    *("", "0", "x" * 5000, "\ud800", "../x", "/dev/zero"),
    *([], {}, [[]], [0], {"": 0}, ["a", "a"]),
)  # fmt: skip


def of_bytes(chance: Random, content: bytes) -> bytes:
    """One to four changes of some bytes: other values, large numbers, less or more of them."""
    changed = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed) + 1)
        kind = chance.randrange(5)
        if kind == 0:
            changed[at : at + 1] = bytes([chance.choice((0, 1, 0x7F, 0xFF, chance.randrange(256)))])
        elif kind == 1:
            changed[at : at + 4] = chance.choice((b"\xff\xff\xff\x7f", b"\0\0\0\x10"))
        elif kind == 2:
            del changed[at : at + chance.randint(1, 8)]
        elif kind == 3:
            begin = chance.randrange(len(changed) + 1)
            changed[at:at] = changed[begin : begin + 20]
        elif chance.random() < 0.1:
            del changed[at:]
    return bytes(changed)


def of_json(chance: Random, content: bytes) -> bytes:
    """One to three other values in it, or keys less or more; sometimes a very deep one."""
    tree = json.loads(content)
    for _ in range(chance.randint(1, 3)):
        tree = _changed(chance, tree)
    text = json.dumps(tree)
    if chance.random() < 0.02:
        text = text.replace("0", DEEP, 1)
    return text.encode("utf-8", "surrogatepass")


def _changed(chance: Random, tree: Any) -> Any:
    places: list[tuple[Any, Any]] = []
    if isinstance(tree, (dict, list)):
        places = list(tree.items() if isinstance(tree, dict) else enumerate(tree))
    if not places or chance.random() < 0.15:
        return _value(chance)
    key, value = chance.choice(places)
    how = chance.random()
    if how < 0.6:
        tree[key] = _changed(chance, value)
    elif how < 0.75:
        del tree[key]
    elif isinstance(tree, dict):
        tree[chance.choice((f"{key}x", "", str(chance.choice(NUMBERS))))] = value
    else:
        tree.insert(key, chance.choice((value, _value(chance))))
    return tree


def _value(chance: Random) -> Any:
    return copy.deepcopy(chance.choice(VALUES))
