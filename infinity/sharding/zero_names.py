"""The names by which frameworks written for DeepSpeed's ZeRO-3 ask a parameter."""

from __future__ import annotations

import enum
from typing import Any, ClassVar

import torch


class ZeroStatus(enum.Enum):
    """Whether the data of a parameter is there. INFLIGHT is for those who compare with it: nobody
    sees a parameter on its way."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroNames:
    """Attributes of a managed parameter whose shape may be asked anywhere, under their names in
    DeepSpeed."""

    __slots__ = ()
    ds_status: ZeroStatus
    """Whether its data is there."""
    ds_persist: ClassVar[bool] = False
    """Whether its data is always there, which the engine decides unit by unit."""

    @property
    def ds_id(self) -> int:
        """A number that no other parameter has."""
        return id(self)

    @property
    def ds_shape(self: Any) -> torch.Size:
        """The shape of the whole parameter, as `shape`."""
        found: torch.Size = self.shape
        return found

    @property
    def ds_numel(self: Any) -> int:
        """The number of elements of the whole parameter, as `numel()`."""
        return int(self.numel())

    def partition_numel(self: Any) -> int:
        """How many of its elements this rank keeps: all, unless ranks share it."""
        return int(self.numel())
