"""Reads and writes of NVMe."""

from infinity.deepspeed.builders import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]
