"""The optimizer's threads are its own: what launchers set for OpenMP does not starve it."""

from __future__ import annotations

import os
import subprocess
import sys

from support.children import CHILD

PROGRAM = """
import os
import torch
from infinity.optim.kernels import Kernels
print(torch.get_num_threads())
for ranks in ("", "2", "1000"):
    os.environ["LOCAL_WORLD_SIZE"] = ranks
    print(Kernels("auto", None).threads, Kernels("auto", 3).threads)
"""


def test_omp_num_threads_does_not_set_the_threads_of_the_optimizer() -> None:
    """torchrun sets OMP_NUM_THREADS=1, and says how many ranks the CPUs are for."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [list(map(int, line.split())) for line in result.stdout.splitlines()]
    cpus = len(os.sched_getaffinity(0))
    assert lines == [[1], *([max(1, cpus // ranks), 3] for ranks in (1, 2, 1000))]


TEAMS = """
import os
import threading
import torch
from torch import nn
import infinity

def tasks():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
torch.zeros(1 << 20).fill_(1.0)  # the team of this thread
before, ours = tasks(), threading.active_count()
model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
states = dict.fromkeys(("parameters", "optimizer", "gradients"), "cpu")
budgets = {"gpu_memory": 1 << 20, "cpu_memory": 1 << 26}
tuning = infinity.Tuning(device="cpu", threads=1)
config = infinity.Config(precision="bf16", tuning=tuning, **states, **budgets)
model = infinity.wrap(model, config)
optimizer = infinity.AdamW(model.parameters())
for _ in range(2):
    model(torch.ones(512, 256, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
infinity.engine(model).drain()
print(tasks() - before, threading.active_count() - ours)
"""


def test_threads_of_the_engine_have_no_team_of_torch_threads() -> None:
    """With more OpenMP threads than CPUs those of the model would sleep between any two
    operators."""
    result = subprocess.run(
        [sys.executable, "-c", TEAMS],
        **CHILD | {"env": CHILD["env"] | {"OMP_WAIT_POLICY": "passive"}},
        capture_output=True,
        check=True,
    )
    more, of_python = map(int, result.stdout.split())
    assert of_python == 2 and more == 2, "a thread of the engine started threads"
