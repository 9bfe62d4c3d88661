"""The ranks that train one model together: they hold shards of it, or copies of shards."""

from __future__ import annotations

import enum
import logging
import os
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from infinity.errors import ConfigError
from infinity.sharding.collectives import Group, rank, reaches, size
from infinity.tiers.manifest import ONE_RANK, Member
from infinity_command import launched

log = logging.getLogger("infinity")

GivenGroup = Group | DeviceMesh | Literal["auto"]
"""The types of `group` in `infinity.wrap`."""


def join(backend: str, **options: Any) -> None:
    """`torch.distributed.init_process_group`, for a group that `destroy_process_group` ends.

    Functions of `torch.distributed.nn` have the default group of their import as default arguments.
    Dynamo and transformers import it. If it is imported after the group was made, it keeps that
    group until the interpreter ends. Then the threads of a gloo group may abort the process. So it
    is imported first.
    """
    import torch.distributed.nn.functional  # noqa: F401

    dist.init_process_group(backend, **options)


class Among(enum.Enum):
    """The ranks that join a collective: whether these are the shards, the replicas, and the tensor
    parallel ranks of `Ranks`."""

    ALL = True, True, True
    DATA = True, True, False
    SHARDS = True, False, False
    COPY = True, False, True
    """The ranks that hold one copy of the model."""
    PARTS = False, False, True
    ALONE = False, False, False


class Ranks(NamedTuple):
    """`shards` is the group that shards a unit. `replicas` is the group of ranks that hold the same
    part of it. `tensor` is the group of ranks that hold other parts of the same DTensors
    (`infinity.sharding.tensor_parallel`).

    Each is None for a single rank. Example: a mesh of 2 x 4 ranks, two nodes of four: 4 shards,
    each on two replicas. This is hybrid sharding: gathers stay inside a node, and gradients are
    averaged inside nodes, then between them.
    """

    shards: Group = None
    replicas: Group = None
    tensor: Group = None

    @property
    def rank(self) -> int:
        """This rank's number among the shards."""
        return rank(self.shards)

    @property
    def number(self) -> int:
        """The number of data parallel ranks. Each has a batch of its own."""
        return size(self.shards) * size(self.replicas)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of all ranks."""
        return all(rank(group) == 0 for group in self)

    @property
    def own(self) -> str:
        """The suffix of names that ranks of a node must not share: `rank<N>`, N among all
        processes; "" for one rank."""
        return f"rank{dist.get_rank()}" if self.groups() else ""

    @property
    def member(self) -> Member:
        """This rank's number among all processes, and its place."""
        if not self.groups():
            return ONE_RANK
        names = zip(("part", "replica", "tensor parallel part"), self, strict=True)
        places = [f"{name} {rank(g) + 1} of {size(g)}" for name, g in names if g is not None]
        return Member(dist.get_rank(), self.number * size(self.tensor), ", ".join(places))

    def groups(self, among: Among = Among.ALL) -> list[dist.ProcessGroup]:
        """The groups of the ranks `among`. A sum over each of them in turn is a sum over all of
        these."""
        chosen = zip(self, among.value, strict=True)
        return [group for group, joins in chosen if joins and group is not None]

    def copy(self, timeout: float, backend: str | None = None) -> Ranks:
        """The same ranks in new process groups, in which a collective fails after `timeout`
        seconds. The groups have the same backends, or `backend`. All ranks must call it. `end` ends
        the copies."""
        limit = timedelta(seconds=timeout)
        return Ranks(*(None if group is None else _copy(group, limit, backend) for group in self))

    def end(self) -> None:
        """End groups that `copy` made. A group of some of all processes stays until
        torch.distributed ends: torch names it after its members, and the next group of the same
        name would find the addresses of this one."""
        for group in self.groups():
            # The user may have ended all of torch.distributed before.
            with suppress(ValueError, RuntimeError, AssertionError):
                if dist.get_world_size(group) == dist.get_world_size():
                    dist.destroy_process_group(group)


ALONE = Ranks()


def _copy(group: dist.ProcessGroup, timeout: timedelta, backend: str | None) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(
        ranks,
        timeout=timeout,
        backend=backend or dist.get_backend(group),
        use_local_synchronization=len(ranks) < dist.get_world_size(),  # then only its members call
    )


def find_ranks(given: GivenGroup, stage: int) -> Ranks:
    """The ranks of a process group, or of a mesh of one dimension (shard) or two (replicate,
    shard); all replicas with stage 0.

    "auto" is the default group of torch.distributed if it is initialized, as for DDP and FSDP2,
    else one rank. Raises `ConfigError` for a mesh with more dimensions, for a mesh that contradicts
    the stage, for "auto" in one of several processes without a group, and for other objects.
    """
    group = _default_group() if given == "auto" else given
    if group is not None and not isinstance(group, (dist.ProcessGroup, DeviceMesh)):
        raise ConfigError(
            f"group={group!r} is neither a process group that this process belongs to nor a "
            "DeviceMesh; leave it out for all ranks of torch.distributed, or give group=None for "
            "one rank"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim > 2 or (stage == 0 and group.ndim == 2):
            raise ConfigError(
                f"a mesh of shape {tuple(group.shape)} with stage={stage}: give one of one "
                "dimension (shard), or with stage 1 to 3 of two (replicate, shard), for example "
                "mesh['replicate', 'shard']"
            )
        groups: list[Group] = [
            group.get_group(dimension) for dimension in reversed(range(group.ndim))
        ]
    else:
        groups = [group]
    shards, replicas = [each if size(each) > 1 else None for each in (*groups, None)][:2]
    return Ranks(None, shards) if stage == 0 else Ranks(shards, replicas)


def _default_group() -> Group:
    """The group of all ranks if torch.distributed is initialized, else None. Logs the choice."""
    if not (dist.is_available() and dist.is_initialized()):
        _refuse_several()
        log.info("the model is trained by one rank: torch.distributed is not initialized")
        return None
    world = dist.group.WORLD
    log.info(
        (
            "the model is trained by all %d ranks of torch.distributed's default group; with "
            "group=None each rank trains its own"
        ),
        size(world),
    )
    return world


def _refuse_several() -> None:
    """Raise `ConfigError` if a launcher started several processes."""
    try:
        place = launched.place(os.environ)
    except ValueError as error:
        raise ConfigError(f"{error}, or give group=None to train alone") from None
    if place is not None:
        raise ConfigError(
            f"{place.launcher} started this process as rank {place.rank} of {place.size}, but "
            "torch.distributed is not initialized, so each would train a model of its own; start "
            "the script with torchrun and call torch.distributed.init_process_group before, or "
            "give group=None for a model in each process"
        )


def check_reach(ranks: Ranks, device: str) -> None:
    """Raise `ConfigError` if the collectives of a group take no tensors of the compute `device`,
    "cpu" or "cuda"."""
    for group in ranks.groups():
        if not reaches(group, device):
            offered = dist.get_backend_config(group)
            wanted = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
            raise ConfigError(
                f"the model runs on {device}, but its process group has no backend for that "
                f"({offered}); give torch.distributed.init_process_group({wanted!r}, ...), set "
                "Config(tuning=Tuning(device=...)), or give group=None for one rank"
            )


def whole_group(ranks: Ranks) -> Group:
    """The group of ranks that hold one copy of the model: all `shards` of all `tensor` parallel
    ranks. All of them must call it.

    If there are replicas or other ranks, this makes a new group, which stays until
    torch.distributed ends.
    """
    if ranks.shards is None or ranks.tensor is None:
        return ranks.shards or ranks.tensor
    found: list[list[int]] = [[]] * size(ranks.tensor)
    dist.all_gather_object(found, dist.get_process_group_ranks(ranks.shards), group=ranks.tensor)
    members = sorted(member for each in found for member in each)
    if len(members) == dist.get_world_size():
        return dist.group.WORLD
    return dist.new_group(
        members, backend=dist.get_backend(ranks.shards), use_local_synchronization=True
    )
