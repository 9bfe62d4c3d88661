"""`deepspeed.monitor`: nothing is written, as with a configuration that asks for no monitor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from infinity.deepspeed.names import MISSING
from infinity.deepspeed.refused import Lacking


class Monitor(Lacking):
    """Takes events and drops them. `engine.report()` has what the engine measures."""

    enabled = False
    instead = MISSING["monitor"]

    def __init__(self, monitor_config: Any = None) -> None:
        self.monitor_config = monitor_config

    def write_events(self, event_list: Iterable[Any]) -> None:
        """Nothing."""
