"""Engines of `infinity.initialize` that are destroyed with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

import infinity

Start = Callable[..., tuple[Any, Any, Any, Any]]


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """`initialize` makes one for its process."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def start() -> Iterator[Start]:
    """`infinity.initialize`; engines are destroyed at the end."""
    engines: list[Any] = []

    def initialize(**arguments: Any) -> tuple[Any, Any, Any, Any]:
        found = infinity.initialize(**arguments)
        engines.append(found[0])
        return found

    yield initialize
    for engine in engines:
        engine.destroy()
