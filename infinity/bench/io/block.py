"""The measured setting as a block of configuration for `infinity.Config` and DeepSpeed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infinity.bench.io.search import Setting
from infinity.placement.calibrate import levelled


def config_block(
    paths: Sequence[Path], setting: Setting, speeds: Sequence[float] = ()
) -> dict[str, Any]:
    """`infinity`: keyword arguments of `infinity.Config`, without budgets. `aio`: the section of a
    DeepSpeed file.

    `speeds`: GB/s of each path, or empty. They become shares for the engine, which then does not
    measure them again.

    DeepSpeed has `queue_depth` requests in flight for each of `intra_op_parallelism` threads. So
    POSIX threads with one request each become as many threads with a queue of one.
    """
    posix = setting.engine == "posix"
    tuning: dict[str, Any] = {"io_engine": setting.engine}
    if speeds:
        tuning["nvme_shares"] = [float(f"{speed:.3g}") for speed in levelled(speeds)]
    return {
        "infinity": {"nvme": [str(path.resolve()) for path in paths], "tuning": tuning},
        "aio": {
            "block_size": setting.request_bytes,
            "queue_depth": 1 if posix else setting.depth,
            "intra_op_parallelism": setting.threads if posix else 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }
