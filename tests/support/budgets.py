"""Budgets of memory."""

from __future__ import annotations

BUDGETS = ("gpu_memory", "cpu_memory")
ROOMY = dict.fromkeys(BUDGETS, 1 << 30) | {"cache": 0}
"""Room for everything; yet what is on NVMe moves, for nothing of it is kept in memory."""
