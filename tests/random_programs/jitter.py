"""Random sleeps in the engine's own methods: its threads meet in orders that a quiet machine never
shows."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import pytest

from infinity.nvme.ticket import Ticket
from infinity.optim.job_queue import ChunkQueue, JobQueue
from infinity.optim.job_table import JobTable
from infinity.optim.pipeline import Pipeline
from infinity.optim.speculation import Speculation
from infinity.optim.updater import Updater
from infinity.sharding.exchange import Exchange
from infinity.sharding.gradient_block import GradientBlock
from infinity.sharding.gradient_reduction import GradientReduction
from infinity.sharding.gradients import Gradients
from infinity.sharding.states import States
from infinity.tiers.access import Fetch, Mover
from infinity.tiers.chunks import Chunks
from infinity.tiers.resident import Loader, Residency
from infinity.tiers.staging import Staging

CLASSES = (
    *(ChunkQueue, JobQueue, JobTable, Pipeline, Speculation, Updater),
    *(Exchange, GradientBlock, GradientReduction, Gradients, States),
    *(Chunks, Fetch, Loader, Mover, Residency, Staging, Ticket),
)
OFTEN = 0.02  # of the calls
LONGEST = 0.01  # seconds


@contextmanager
def jitter(seed: int) -> Iterator[None]:
    """Inside, some calls of the engine's methods begin late, under locks or not. Not nested."""
    numbers = random.Random(seed)

    def late(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if numbers.random() < OFTEN:
                time.sleep(numbers.random() * LONGEST)
            return method(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner in CLASSES:
            for name, value in list(vars(owner).items()):
                if isinstance(value, FunctionType) and not name.startswith("__"):
                    patch.setattr(owner, name, late(value))
        yield
