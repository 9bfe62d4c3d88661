"""A `Config` from options in one flat dict.

Tests vary options of `Config` and `Tuning` together and join them with `|`, which cannot join a
dict inside of a dict.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infinity.config import Config, Tuning
from infinity.plan.hardware import Hardware


def config_of(**options: Any) -> Config:
    """A `Config` of `options`, with those of `Tuning` in its `tuning`."""
    tuning = {name: options.pop(name) for name in Tuning.model_fields if name in options}
    return Config(**options, tuning=Tuning(**tuning))


def default_config(hardware: Hardware, **options: Any) -> Config:
    """A `Config` of `options`. Without a directory in them, each drive gets one."""
    count = len(hardware.drives)
    options.setdefault("nvme", tuple(Path(f"/mnt/nvme{number}") for number in range(count)))
    if not options["nvme"]:
        del options["nvme"]
    return Config(**options)
