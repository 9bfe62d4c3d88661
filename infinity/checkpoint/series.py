"""Names the states that each unit saves."""

from __future__ import annotations

from typing import NamedTuple

import torch

from infinity.placement.spec import BF16, Kind
from infinity.sharding.unit import Unit


class Series(NamedTuple):
    """The states of one kind of one unit. A key is `prefix` and the name of a parameter."""

    unit: Unit
    kind: Kind
    prefix: tuple[str, ...]

    @property
    def is_moment(self) -> bool:
        """Whether these are states of an optimizer. Otherwise they are weights."""
        return self.kind not in (Kind.PARAM, Kind.MASTER)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in the checkpoint."""
        return (
            torch.bfloat16
            if self.unit.blocks[self.kind].format is BF16
            else self.unit.facts.dtype_of(self.kind)
        )

    def size(self, number: int) -> torch.Size:
        """The shape under the key of parameter `number`: (numel,), or a matrix if tensor parallel
        ranks cut another dimension than the first."""
        part = self.unit.facts.parts[number]
        return torch.Size((part.rows, part.columns)[part.rows == 1 :])
