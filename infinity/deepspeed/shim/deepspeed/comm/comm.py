"""The same as `deepspeed.comm`."""

from typing import Any

from deepspeed import comm


def __getattr__(name: str) -> Any:
    return getattr(comm, name)
