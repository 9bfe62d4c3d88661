"""Functions of `deepspeed.comm`: those of torch.distributed, which also take the arguments that
DeepSpeed adds for its log (`prof`, `log_name`, `debug`, without effect) and its names for tensors.
`deepspeed.comm` has every other name of torch.distributed unchanged."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

_LOGGED = ("prof", "log_name", "debug")
_THEIRS: Mapping[str, Mapping[str, str]] = {
    "all_gather_into_tensor": {"tensor": "input_tensor"},
    "all_to_all_single": {"tensor": "input"},
    "reduce_scatter_tensor": {"output_tensor": "output", "tensor": "input"},
}
"""By function: DeepSpeed's names of arguments, with those of torch."""
_TODAY = {
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
}
"""Names that torch has removed, with their replacements."""
_SAME = (
    *("all_gather", "all_gather_object", "all_reduce", "all_reduce_coalesced", "all_to_all"),
    *("barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "irecv"),
    *("isend", "monitored_barrier", "recv", "reduce", "reduce_scatter", "scatter", "send"),
)


def __getattr__(name: str) -> Any:
    if name in _SAME or name in _THEIRS:
        return _taking(name)
    return getattr(dist, name)


@functools.cache
def _taking(name: str) -> Callable[..., Any]:
    """The function of torch.distributed, with the arguments of DeepSpeed."""
    today = getattr(dist, _TODAY.get(name, name), None)
    function, renamed = today or getattr(dist, name), _THEIRS.get(name, {})

    def call(*values: Any, **named: Any) -> Any:
        taken = {renamed.get(key, key): named[key] for key in named if key not in _LOGGED}
        return function(*values, **taken)

    call.__name__ = call.__qualname__ = name  # the name for pickles
    call.__doc__ = function.__doc__
    return call


def all_gather_coalesced(
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Gather each of `input_tensors` from all ranks into the tensor at its place in
    `output_tensors`, which has the elements of all ranks. With `async_op`, return the work of the
    last one."""
    work = None
    for whole, part in zip(output_tensors, input_tensors, strict=True):
        work = _taking("all_gather_into_tensor")(whole, part, group=group, async_op=async_op)
    return work


def _world() -> Any:
    return dist.group.WORLD


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The global ranks of `group` (default: all)."""
    return list(dist.get_process_group_ranks(group or _world()))


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The global rank of rank `group_rank` in `group` (default: all ranks)."""
    return dist.get_global_rank(group or _world(), group_rank)


def has_it() -> bool:
    """Whether torch has a collective. True for every supported version."""
    return True


def configure(*settings: Any, **named: Any) -> None:
    """Does nothing: it sets DeepSpeed's log of communication. `engine.report()` has bytes and
    times."""


def reset_log() -> None:
    """Does nothing; see `configure`."""


def has_comm_data() -> bool:
    """Whether there is a log of communication: never."""
    return False
