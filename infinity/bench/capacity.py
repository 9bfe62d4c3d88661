"""The sizes of models that fit this machine, for `infinity doctor`: budgets and free space divided
by the bytes of a parameter, which `infinity.placement.memory` states."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from infinity.config import Config, Tuning
from infinity.directories.directory import temporary_name
from infinity.errors import InfinityError
from infinity.observe import Recorder
from infinity.placement.memory import bytes_on_tiers, bytes_per_parameter
from infinity.tiers.drives import NvmeTier
from infinity.tiers.places import Places

STAGING_BYTES = 384 << 20
"""The most host memory that staging takes."""


class Capacity(NamedTuple):
    """The most parameters with bf16 and Adam, for three placements.

    `in_memory`: all states in host memory. `on_nvme`: the default placement with an NVMe directory.
    `largest`: gradients on NVMe, too, and no second copy there.
    """

    in_memory: int
    on_nvme: int
    largest: int


def drive_speed(directory: Path) -> float | str:
    """Bytes per second of `directory`, half written and half read, or a sentence if it cannot be
    measured. Writes 64 MiB, and removes them."""
    tier = NvmeTier(Places([directory], temporary_name()), "auto", None, Recorder())
    try:
        return tier.measure()
    except (InfinityError, OSError) as error:
        return str(error)
    finally:
        tier.close()


def capacity(cpu_memory: int, nvme_free: int) -> Capacity:
    """For a budget of host memory and the free bytes of all NVMe directories together."""
    memory = {"precision": "bf16", "parameters": "cpu", "optimizer": "cpu"}
    nvme: dict[str, object] = {"precision": "bf16", "nvme": "/"}
    slim = Tuning(copy_on_write=False)
    room = {"cpu": max(cpu_memory - STAGING_BYTES, 0), "nvme": nvme_free}
    return Capacity(
        _most(Config.model_validate(memory), room),
        _most(Config.model_validate(nvme), room),
        _most(Config.model_validate({**nvme, "gradients": "nvme", "tuning": slim}), room),
    )


def _most(config: Config, room: dict[str, int]) -> int:
    needed = bytes_on_tiers(1, config)
    return int(min(room[tier] / nbytes for tier, nbytes in needed.items() if nbytes))


def step_seconds(parameters: int, speed: float) -> float:
    """Seconds of the I/O of a step if its parameters and optimizer states pass drives of `speed`
    bytes per second. Parameters are read for the forward and for the backward. The update reads and
    writes everything once."""
    states = bytes_per_parameter(Config(precision="bf16"))
    moved = 2 * states.parameters + 2 * (states.optimizer + states.parameters)
    return moved * parameters / speed
