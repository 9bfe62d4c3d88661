"""A `Config` from options in one flat dict.

Tests vary options of `Config` and `Tuning` together and join them with `|`, which cannot join a
dict inside of a dict.
"""

from __future__ import annotations

from typing import Any

from infinity.config import Config, Tuning


def config_of(**options: Any) -> Config:
    """A `Config` of `options`, with those of `Tuning` in its `tuning`."""
    tuning = {name: options.pop(name) for name in Tuning.model_fields if name in options}
    return Config(**options, tuning=Tuning(**tuning))
