"""The measured setting as a block of configuration that `infinity.Config` and DeepSpeed read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infinity.cli.bench.search import Setting


def config_block(paths: Sequence[Path], setting: Setting) -> dict[str, Any]:
    """`infinity`: keyword arguments of `infinity.Config`, to which budgets are added. `aio`: the section of a DeepSpeed file.

    DeepSpeed has `queue_depth` requests in flight for each of `intra_op_parallelism` threads, so POSIX threads with one
    request each become that many threads with a queue of one.
    """
    posix = setting.engine == "posix"
    return {
        "infinity": {"nvme": [str(path.resolve()) for path in paths], "io_engine": setting.engine},
        "aio": {
            "block_size": setting.request_bytes,
            "queue_depth": 1 if posix else setting.depth,
            "intra_op_parallelism": setting.threads if posix else 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }
