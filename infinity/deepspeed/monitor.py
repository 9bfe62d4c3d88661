"""`deepspeed.monitor`: nothing is written, as with a configuration that asks for no monitor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Monitor:
    """Takes events and drops them. `engine.report()` has what the engine measures."""

    enabled = False

    def __init__(self, monitor_config: Any = None) -> None:
        self.monitor_config = monitor_config

    def write_events(self, event_list: Iterable[Any]) -> None:
        """Nothing."""
