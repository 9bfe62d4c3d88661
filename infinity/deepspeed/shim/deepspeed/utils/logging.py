"""The log."""

from infinity.deepspeed.tools import log_dist, logger

__all__ = ["log_dist", "logger"]
