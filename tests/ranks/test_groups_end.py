"""Nothing keeps a process group that was destroyed: one of gloo that lives until the interpreter
ends may abort the process there."""

from __future__ import annotations

import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import torch.distributed as dist

import infinity
from support.configs import config_of
from support.models import text_batch, transformer
from support.rank_group import RANKS, OnRanks


def work(task: Any, where: Path, rank: int) -> None:
    """One rank of two: see `support/rank_group`."""
    group = dist.new_group(range(RANKS), backend="gloo")
    model = infinity.wrap(
        transformer(), config_of(gpu_memory=4 << 20, cpu_memory=8 << 20), group=group
    )
    engine = infinity.engine(model)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    model(**text_batch(rank)).loss.backward()
    optimizer.step()
    engine.save_checkpoint(where / "checkpoint", optimizer)
    engine.load_checkpoint(where / "checkpoint", optimizer)
    engine.close()
    kept = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    assert kept() is None


def test_a_closed_engine_keeps_no_group(on_ranks: OnRanks) -> None:
    assert on_ranks("end") == ["done"] * RANKS


def test_what_is_imported_later_keeps_no_default_group() -> None:
    code = """
import gc, weakref
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group
from infinity.deepspeed import communication

communication.init_distributed()
import torch.distributed.nn
kept = weakref.ref(_get_default_group())
dist.destroy_process_group()
gc.collect()
assert kept() is None, gc.get_referrers(kept())
"""
    subprocess.run([sys.executable, "-c", code], check=True)
