"""Versions of torch."""

from infinity.deepspeed.tools import required_torch_version

__all__ = ["required_torch_version"]
