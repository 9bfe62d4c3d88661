"""Says what a training writes to NVMe, while there is time to change it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from infinity.engine import Engine, engine
from infinity.quantities import format_bytes


class WearNote(TrainerCallback):  # type: ignore[misc]
    """After the second step of its life, gives `say` a sentence with the bytes that a step, the
    remaining steps and a day write to NVMe. The first step plans and warms up, so its time says
    nothing.

    Only on the first rank, and only if steps remain and a step writes to NVMe.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._steps, self._begun = 0, 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._steps, self._begun = self._steps + 1, time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        seconds = time.perf_counter() - self._begun
        remaining = state.max_steps - state.global_step
        if self._steps == 2 and remaining > 0 and state.is_world_process_zero:
            text = _wear(engine(given["model"]), remaining, seconds, args.world_size > 1)
            if text is not None:
                self._say(text)


def _wear(engine: Engine, remaining: int, seconds: float, is_one_of_many: bool) -> str | None:
    """The sentence, for `remaining` steps of `seconds` each. None without writes."""
    written = engine.plan().mean_written(engine.config.steps_per_commit or 1)
    if not written:
        return None
    return (
        f"each step writes {format_bytes(int(written))} to NVMe{' on each rank' * is_one_of_many}: "
        f"{format_bytes(int(written * remaining))} in the {remaining:,} steps to come, "
        f"{format_bytes(int(written * 86_400 / seconds))} a day at this speed"
    )
