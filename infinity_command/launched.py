"""Which of how many processes this one is, by the variables of torchrun, MPI and Slurm.

Imports neither `infinity` nor torch, because `infinity run` needs it before the script imports
them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

PORT = "29500"
"""Where ranks meet without `MASTER_PORT`: the port of torchrun, accelerate and DeepSpeed."""

ALONE = "INFINITY_ALONE"
"""The variable with the number of a process that `infinity run` made the only rank."""


class Place(NamedTuple):
    """The number of a process among `size`, of which `local_size` run on its node."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int


class _Names(NamedTuple):
    """The variables of one launcher; the local ones may be missing."""

    launcher: str
    rank: str
    size: tuple[str, ...]
    local_rank: str
    local_size: str


_LAUNCHERS = (
    _Names("torchrun", "RANK", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Names(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Names(
        "mpirun",
        "MV2_COMM_WORLD_RANK",
        ("MV2_COMM_WORLD_SIZE",),
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    _Names("mpiexec", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Names("srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_LOCALID", ""),
    _Names("flux run", "FLUX_TASK_RANK", ("FLUX_JOB_SIZE",), "FLUX_TASK_LOCAL_ID", ""),
)
"""In the order in which they count: torchrun, or mpirun, may run in a step of Slurm."""


def place(environment: Mapping[str, str]) -> Place | None:
    """The place of this process; None where no launcher started it, or where it is the only one.

    Raises `ValueError` where `WORLD_SIZE` or the like is above 1 and nothing says which of them
    this one is, where `RANK` is above 0 and nothing says of how many, and for a number that is
    none.
    """
    for names in _heard(environment):
        found = _numbers(names, environment)
        if found.size > 1:
            return found
        if names.launcher == "torchrun":
            return None
    for names in _LAUNCHERS:
        size = names.size[0]  # SLURM_NTASKS is set in the shell of an allocation, too
        if _number(environment, size, 1) > 1 and not environment.get(names.rank):
            raise ValueError(_lacks(size, names.rank, environment))
    if _number(environment, "RANK", 0) and not environment.get("WORLD_SIZE"):
        raise ValueError(_lacks("RANK", "WORLD_SIZE", environment))
    return None


def _lacks(known: str, missing: str, environment: Mapping[str, str]) -> str:
    return (
        f"{known} is {environment[known]}, but {missing} is not set, so this process could only "
        "train alone; start all with torchrun --nproc-per-node N, which sets both"
    )


def adopt(environment: MutableMapping[str, str]) -> None:
    """Set the variables of torchrun where MPI or Slurm started several processes.

    Raises `ValueError` as `place` does, and where the processes are on several nodes and
    `MASTER_ADDR` is not set.
    """
    found = place(environment)
    if found is None or found.launcher == "torchrun":
        return
    if found.local_size < found.size and not environment.get("MASTER_ADDR"):
        raise ValueError(
            f"{found.launcher} started {found.size} processes on several nodes, but MASTER_ADDR is "
            "not set; set it to the host of the first one, or start them with torchrun"
        )
    environment.update(
        RANK=str(found.rank),
        WORLD_SIZE=str(found.size),
        LOCAL_RANK=str(found.local_rank),
        LOCAL_WORLD_SIZE=str(found.local_size),
    )
    environment.setdefault("MASTER_ADDR", "127.0.0.1")
    environment.setdefault("MASTER_PORT", PORT)


def keep_deepspeed_on_cpu(environment: MutableMapping[str, str]) -> None:
    """Say without `ACCELERATE_USE_CPU` that no GPU is to be used: with it accelerate trains with
    DDP, whatever it is told about DeepSpeed."""
    if environment.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "y", "t", "on"):
        del environment["ACCELERATE_USE_CPU"]
        environment["CUDA_VISIBLE_DEVICES"] = ""


def _heard(environment: Mapping[str, str]) -> list[_Names]:
    """The launchers whose variables are set, in the order in which they count. Slurm sets those of
    PMI without the local ones, so it comes before them then."""
    found = [
        names
        for names in _LAUNCHERS
        if environment.get(names.rank)
        and any(environment.get(size) for size in names.size)
        and not _is_batch_step(names, environment)
    ]
    found.sort(
        key=lambda names: names.launcher != "torchrun" and names.local_rank not in environment
    )
    return found


def _numbers(names: _Names, environment: Mapping[str, str]) -> Place:
    """Without local numbers all processes are on one node."""
    rank = _number(environment, names.rank, 0)
    size = next(_number(environment, name, 1) for name in names.size if environment.get(name))
    if names.launcher == "srun":
        local_size = _tasks_of_node(environment)
    else:
        local_size = _number(environment, names.local_size, 0)
    local_rank = _number(environment, names.local_rank, rank)
    return Place(names.launcher, rank, size, local_rank, local_size or size)


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name) or str(default)
    if not value.isdecimal():
        raise ValueError(f"{name} is {value!r}, which is no number; start all with torchrun")
    return int(value)


def _is_batch_step(names: _Names, environment: Mapping[str, str]) -> bool:
    """Whether the process is the script of `sbatch`, which is one however many tasks a job has."""
    is_batch = environment.get("ENVIRONMENT") == "BATCH" and not environment.get("SLURM_STEP_ID")
    return names.launcher == "srun" and is_batch


def _tasks_of_node(environment: Mapping[str, str]) -> int:
    """Processes of this node in a step of Slurm: "2(x3),1" has two on each of three nodes and one
    on the fourth; 0 where nothing says it."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts = [
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
        for _ in range(int(times or 1))
    ]
    node = _number(environment, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else 0
