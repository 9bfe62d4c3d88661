"""Ranks that find each other. As with DeepSpeed, they start from the model of the first rank,
whatever their seeds. They save into the directory of the first rank."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from infinity.deepspeed.communication import PORT, get_world_size, init_distributed
from infinity.deepspeed.errors import DeepSpeedConfigError
from infinity.sharding.collectives import reaches
from infinity.weights.taped import as_built


def join_ranks(port: int = PORT, required: bool | None = None) -> None:
    """Initialize torch.distributed if the script has not, also for one rank, because scripts ask it
    for theirs after `initialize`."""
    init_distributed(distributed_port=port, dist_init_required=required)


def check_counts() -> None:
    """Raise `ConfigError` if accelerate, and with it a Trainer, takes each rank for the only one,
    as it does without a GPU. Ranks would train the same data, and wait for each other."""
    state = sys.modules.get("accelerate.state")
    known = {} if state is None else state.PartialState._shared_state
    drives = getattr(known.get("distributed_type"), "value", None) == "DEEPSPEED"
    if several() and drives and known["num_processes"] == 1:
        raise DeepSpeedConfigError(
            f"accelerate counts 1 rank where there are {get_world_size()}, because it finds no "
            "GPU; make the Accelerator, or the TrainingArguments, before torch.distributed is "
            "initialized, start one rank, or use InfinityTrainer"
        )


def several() -> bool:
    """Whether there are other ranks."""
    return get_world_size() > 1


def directory_of_first(directory: Path) -> Path:
    """The directory of the first rank, for ranks on its machine, because a script may have made a
    temporary one on each rank. Ranks on other machines keep theirs. All ranks call it."""
    if not several():
        return directory
    mine = (socket.gethostname(), str(directory.absolute()))
    places = [mine] * get_world_size()
    dist.all_gather_object(places, mine)
    host, first = places[0]
    return Path(first) if mine != places[0] and mine[0] == host else directory


def values_of(rank: int, values: torch.Tensor) -> torch.Tensor:
    """The `values` of `rank`, on the host. They have one shape on all ranks. All ranks call it."""
    flat = values.detach().contiguous().view(-1).view(torch.uint8)
    group = dist.group.WORLD
    device = torch.accelerator.current_accelerator()
    if group is not None and not reaches(group, "cpu") and device is not None:
        flat = flat.to(device)
    if flat.numel():
        dist.broadcast(flat, rank)
    return flat.to(values.device).view(values.dtype).view(values.shape)


def take_model(model: nn.Module) -> None:
    """Replace parameters and buffers that have memory by those of the first rank. Others are built
    alike (`same_draws`)."""
    if not several():
        return
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
    with torch.no_grad(), as_built():
        for each in tensors.values():
            if each.layout is torch.strided and not each.is_meta:
                each.copy_(values_of(0, each))


@contextmanager
def same_draws() -> Iterator[None]:
    """Inside the context, all ranks draw the numbers of the first one. Then each continues with its
    own."""
    if not several():
        yield
        return
    before = torch.get_rng_state()
    torch.set_rng_state(values_of(0, before))
    try:
        yield
    finally:
        if dist.get_rank() != 0:
            torch.set_rng_state(before)
