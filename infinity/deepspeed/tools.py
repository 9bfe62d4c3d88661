"""Small tools of DeepSpeed's `utils` that scripts use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map

from infinity.deepspeed.communication import get_rank
from infinity.deepspeed.errors import DeepSpeedConfigError

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger("infinity")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on `ranks`; on all where they are left out, or hold -1."""
    if not ranks or -1 in ranks or get_rank() in ranks:
        logger.log(level, "[rank %d] %s", get_rank(), message)


def set_log_level_from_string(log_level_str: str, custom_logger: Any = None) -> None:
    """Log from this level on: "debug", "info", "warning", "error" or "critical". Raises
    `ConfigError` for another one."""
    levels = ("debug", "info", "warning", "error", "critical")
    if not isinstance(log_level_str, str) or log_level_str.lower() not in levels:
        raise DeepSpeedConfigError(f"log level {log_level_str!r}; take one of {', '.join(levels)}")
    (custom_logger or logger).setLevel(log_level_str.upper())


def see_memory_usage(message: str, force: bool = False) -> None:
    """Nothing: `engine.report()` has the bytes of each tier."""


def instrument_w_nvtx(function: F) -> F:
    """`function` as it is: `INFINITY_NVTX=1` marks ranges."""
    return function


@contextmanager
def OnDevice(
    dtype: torch.dtype | None = None, device: str | torch.device = "meta", enabled: bool = True
) -> Iterator[None]:
    """A context that builds tensors on `device`, those of floating point in `dtype`."""
    before = torch.get_default_dtype()
    with torch.device(device) if enabled else nullcontext():
        if enabled and dtype is not None:
            torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """`item` with a copy of each tensor, which has no larger storage behind it. Tensors with the
    same elements of the same storage, as tied weights, have one copy."""
    copies: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        place: tuple[Any, ...] = (id(value),)
        if value.numel() and not value.is_meta:
            place = value.data_ptr(), value.dtype, value.shape, value.stride(), value.device
        if place not in copies:  # which keeps `value`, so that its place is not another's
            copies[place] = value, value.detach().clone().to(device)
        return copies[place][1]

    return tree_map(copied, item)


def move_to_device(
    item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """`item` on `device`, in the lists, tuples and dicts that it was in. A tensor for which
    `criterion_func` is true is moved in place."""
    if criterion_func is not None and criterion_func(item):
        item.data = item.to(device).data
        return item
    if isinstance(item, (list, tuple)):
        moved = [move_to_device(each, device, criterion_func) for each in item]
        return moved if isinstance(item, list) else tuple(moved)
    if isinstance(item, dict):
        return {key: move_to_device(item[key], device, criterion_func) for key in item}
    return item.to(device)


def recursive_getattr(model: Any, module_name: str) -> Any:
    """The attribute under a name with dots. Raises `AttributeError` where a part is missing."""
    return attrgetter(module_name)(model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set the attribute under a name with dots, whose owner is there. Raises `AttributeError` where
    it is not."""
    owner, _, name = module_name.rpartition(".")
    setattr(attrgetter(owner)(model) if owner else model, name, module)


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """The bounds of parts of `num_items`, the larger ones first: [0, 2, 3] for 3 in 2 parts."""
    size, rest = divmod(num_items, num_parts)
    return [part * size + min(part, rest) for part in range(num_parts + 1)]


def get_scalar_param(
    param_dict: Mapping[str, Any], param_name: str, param_default_value: Any
) -> Any:
    """The value of a key, or its default."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


class RepeatingLoader:
    """A loader that begins again where it ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._items = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._items)
        except StopIteration:
            self._items = iter(self.loader)
            return next(self._items)


def required_torch_version(
    min_version: float | None = None, max_version: float | None = None
) -> bool:
    """Whether the version of torch is in these bounds, as 2.1 for 2.1.0."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])

    def parts(version: float) -> tuple[int, int]:
        first, _, second = str(version).partition(".")
        return int(first), int(second or 0)

    here = (major, minor)
    above = min_version is None or here >= parts(min_version)
    return above and (max_version is None or here <= parts(max_version))
