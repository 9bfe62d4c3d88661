"""Pipeline parallelism, which is refused."""

from deepspeed.runtime.pipe import module

__all__ = ["module"]
