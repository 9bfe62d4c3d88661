"""What each unit saves of its states."""

from __future__ import annotations

from typing import NamedTuple

import torch

from infinity.placement.spec import BF16, Kind
from infinity.sharding.unit import Unit


class Series(NamedTuple):
    """The states of one kind of one unit; a key is `prefix` and the name of a parameter."""

    unit: Unit
    kind: Kind
    prefix: tuple[str, ...]

    @property
    def is_moment(self) -> bool:
        """Whether it belongs to an optimizer; else it is the weights."""
        return self.kind not in (Kind.PARAM, Kind.MASTER)

    @property
    def dtype(self) -> torch.dtype:
        """In the checkpoint."""
        return (
            torch.bfloat16
            if self.unit.blocks[self.kind].format is BF16
            else self.unit.states.dtype_of(self.kind)
        )

    def size(self, number: int) -> torch.Size:
        """The shape of what this rank saves under the key of parameter `number`."""
        part = self.unit.facts.parts[number]
        return torch.Size((part.rows, part.columns)[part.rows == 1 :])
