"""The optimizer's threads are its own: what launchers set for OpenMP does not starve it."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import torch
from infinity.optim.kernels import Kernels
print(torch.get_num_threads(), Kernels("auto", None).threads, Kernels("auto", 3).threads)
"""


def test_omp_num_threads_does_not_set_the_threads_of_the_optimizer() -> None:
    """torchrun sets OMP_NUM_THREADS=1."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert result.stdout.split() == ["1", str(len(os.sched_getaffinity(0))), "3"]
