"""Data loaders."""

from infinity.deepspeed.tools import RepeatingLoader

__all__ = ["RepeatingLoader"]
