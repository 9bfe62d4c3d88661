"""Errors of ZeRO."""

from infinity.errors import InfinityError as ZeRORuntimeException

__all__ = ["ZeRORuntimeException"]
