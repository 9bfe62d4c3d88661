"""`deepspeed.monitor`: writes nothing, like a configuration without a monitor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from infinity.deepspeed.names import MISSING
from infinity.deepspeed.refused import Lacking


class Monitor(Lacking):
    """Drops events. `engine.report()` has the measurements of the engine."""

    enabled = False
    instead = MISSING["monitor"]

    def __init__(self, monitor_config: Any = None) -> None:
        self.monitor_config = monitor_config

    def write_events(self, event_list: Iterable[Any]) -> None:
        """Does nothing."""
