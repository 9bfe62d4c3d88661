"""`deepspeed.comm`: torch.distributed, which is initialized if the launcher has not done it."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from infinity.deepspeed.errors import DeepSpeedConfigError
from infinity.sharding.ranks import join
from infinity_command import launched

PORT = 29500


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialize torch.distributed for the ranks that torchrun, MPI or Slurm has started, or for
    one rank.

    Does nothing if it is initialized, or for one rank if `dist_init_required` is False. Raises
    `ConfigError` for several ranks with `dist_init_required` False, if a process does not know its
    rank, and if `infinity run` has started it alone. `verbose`, `auto_mpi_discovery` and `config`
    change nothing.
    """
    if dist.is_initialized():
        return
    if rank < 0 and world_size < 0:
        _adopt()
    rank = int(os.environ.get("RANK", "0")) if rank < 0 else rank
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if world_size < 0 else world_size
    if ranks > 1 and os.environ.get(launched.ALONE) == str(os.getpid()):
        raise DeepSpeedConfigError(
            f"`infinity run` started this process as the only rank, and WORLD_SIZE is {ranks} now; "
            f"start them by `infinity run torchrun --nproc-per-node {ranks} script.py`, or give "
            "this process its RANK and WORLD_SIZE"
        )
    if dist_init_required is False:
        if ranks > 1:
            raise DeepSpeedConfigError(
                f"dist_init_required is False, and nobody has initialized torch.distributed for "
                f"the {ranks} ranks of WORLD_SIZE; initialize it before, or leave the option out"
            )
        return
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if ranks == 1 and init_method is None:
        options["store"] = dist.HashStore()  # type: ignore[attr-defined]  # needs no port
    else:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
        options["init_method"] = init_method or "env://"
    join(_backend(dist_backend), rank=rank, world_size=ranks, **options)
    _let_accelerate_count()


def _adopt() -> None:
    try:
        launched.adopt(os.environ)
    except ValueError as error:
        raise DeepSpeedConfigError(str(error)) from None


def _let_accelerate_count() -> None:
    """Tell accelerate the backend if it initializes torch.distributed through this package. Without
    a GPU it knows none, and would take each of several ranks for the only one."""
    state = sys.modules.get("accelerate.state")
    known = {} if state is None else state.PartialState._shared_state
    if get_world_size() > 1 and "num_processes" not in known and known.get("backend", "") is None:
        known["backend"] = dist.get_backend()


def _backend(asked: str | None) -> str:
    """The backend for this machine. With a GPU, a second backend for host memory reads states."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type != "cuda":
        return "gloo"
    torch.accelerator.set_device_index(get_local_rank() % torch.accelerator.device_count())
    return "cpu:gloo,cuda:nccl" if asked in (None, "nccl") else asked


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> None:
    """Does nothing: `engine.report()` has the bytes and times of communication."""


def is_initialized() -> bool:
    """Whether ranks can communicate."""
    return dist.is_initialized()


def get_rank(group: Any = None) -> int:
    """The number of this rank. 0 for a single rank."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """The number of ranks."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_local_rank() -> int:
    """The number of this rank on its node."""
    return int(os.environ.get("LOCAL_RANK", "0"))
