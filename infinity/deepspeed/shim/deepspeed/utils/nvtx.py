"""Ranges for a profiler."""

from infinity.deepspeed.tools import instrument_w_nvtx

__all__ = ["instrument_w_nvtx"]
