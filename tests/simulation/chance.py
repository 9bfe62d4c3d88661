"""Decisions of a simulation: each follows from the seed and a key, never from what came before."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

Choice = TypeVar("Choice")


class Chance:
    """The decisions of one seed. The same key always gives the same one, whoever asks first."""

    def __init__(self, *seed: object) -> None:
        self._seed = repr(seed)

    def of(self, *key: object) -> float:
        """A number in [0, 1)."""
        text = f"{self._seed}{key!r}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "big") / (1 << 48)

    def below(self, count: int, *key: object) -> int:
        """One of `count` numbers from 0 on."""
        return int(self.of(*key) * count)

    def one(self, choices: Sequence[Choice], *key: object) -> Choice:
        """One of `choices`."""
        return choices[self.below(len(choices), *key)]

    def child(self, *key: object) -> Chance:
        """Decisions of their own."""
        return Chance(self._seed, *key)
