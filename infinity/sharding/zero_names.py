"""The attributes that frameworks written for DeepSpeed's ZeRO-3 read from a parameter."""

from __future__ import annotations

import enum
from typing import Any, ClassVar

import torch


class ZeroStatus(enum.Enum):
    """Whether the data of a parameter is present. No parameter ever reports INFLIGHT: it exists for
    code that compares with it."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroNames:
    """DeepSpeed's attributes of a managed parameter. They may be read anywhere."""

    __slots__ = ()
    ds_status: ZeroStatus
    """Whether its data is present."""
    ds_persist: ClassVar[bool] = False
    """Whether its data is always present. False: the engine decides unit by unit."""

    @property
    def ds_id(self) -> int:
        """A number that no other parameter has."""
        return id(self)

    @property
    def ds_shape(self: Any) -> torch.Size:
        """The shape of the whole parameter, as `shape`."""
        return self.shape

    @property
    def ds_numel(self: Any) -> int:
        """The number of elements of the whole parameter, as `numel()`."""
        return int(self.numel())

    def partition_numel(self: Any) -> int:
        """The number of elements that this rank keeps: here all of them."""
        return int(self.numel())
