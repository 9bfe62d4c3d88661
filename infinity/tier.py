"""The tiers that a block may be at home on. Code asks a tier and compares no names.

A new tier is one record of this file and its test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TierName = Literal["gpu", "cpu", "nvme"]
"""A tier in the configuration and in files."""


@dataclass(frozen=True)
class Tier:
    """A place where blocks are at home, as answers to the questions of its users."""

    name: TierName
    label: str
    """The name for people on a machine with a GPU: see `label_on`."""
    is_device: bool = False
    """Whether the compute device uses a block where it lies. Each rank has its own device."""
    is_host: bool = False
    """Whether the CPU uses a block where it lies, and the compute device uses a copy."""
    is_drive: bool = False
    """Whether a block is in files, which may outlive the process. It has no address: I/O copies
    chunks of it to a buffer to be used."""

    def __str__(self) -> str:
        return self.name

    def label_on(self, unified_memory: bool) -> str:
        """The name for people. With `unified_memory` the CPU computes, and there is no GPU."""
        return "compute" if self.is_device and unified_memory else self.label

    def is_addressed(self, unified_memory: bool) -> bool:
        """Whether the CPU works on a block in place. With `unified_memory` it also does so in the
        memory of the compute device."""
        return self.is_host or (self.is_device and unified_memory)


GPU = Tier("gpu", "GPU", is_device=True)
CPU = Tier("cpu", "host memory", is_host=True)
NVME = Tier("nvme", "NVMe", is_drive=True)

TIERS: dict[str, Tier] = {tier.name: tier for tier in (GPU, CPU, NVME)}
"""The tiers by name, the fastest first."""
