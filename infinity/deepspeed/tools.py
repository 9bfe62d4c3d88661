"""Small tools of DeepSpeed's `utils` that scripts use."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils._pytree import tree_map

from infinity.deepspeed.communication import get_rank
from infinity.deepspeed.errors import DeepSpeedConfigError
from infinity.deepspeed.refused import Lacking

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger("infinity")
_LEVELS = ("debug", "info", "warning", "error", "critical")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on `ranks`, or on all ranks if they are left out or contain -1."""
    if not ranks or -1 in ranks or get_rank() in ranks:
        logger.log(level, "[rank %d] %s", get_rank(), message)


@functools.cache
def _logged_once(text: str, ranks: tuple[int, ...], level: int) -> None:
    log_dist(text, ranks, level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = 20) -> None:
    """`log_dist`, once for each message, ranks and level (of `logging`; 20 is INFO)."""
    _logged_once(message, tuple(ranks or ()), level)


@functools.cache
def warning_once(message: str, *values: Any) -> None:
    """Warn, once for each message and its values."""
    logger.warning(message, *values)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """See `log_dist`. The engine prints nothing."""
    log_dist(message, ranks)


LOG_LEVELS: dict[str, int] = {name: getattr(logging, name.upper()) for name in _LEVELS}
"""The numbers of levels, by their names."""


def get_log_level_from_string(log_level_str: str) -> int:
    """The number of a level: "debug", "info", "warning", "error" or "critical". Raises
    `ConfigError` for another level."""
    if not isinstance(log_level_str, str) or log_level_str.lower() not in LOG_LEVELS:
        raise DeepSpeedConfigError(f"log level {log_level_str!r}; take one of {', '.join(_LEVELS)}")
    return LOG_LEVELS[log_level_str.lower()]


def set_log_level_from_string(log_level_str: str, custom_logger: Any = None) -> None:
    """Log from this level on; see `get_log_level_from_string`."""
    (custom_logger or logger).setLevel(get_log_level_from_string(log_level_str))


def get_current_level() -> int:
    """The number of the lowest logged level."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether that level is at least the lowest logged level."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Does nothing: `engine.report()` has the bytes of each tier."""


def as_it_is(func: F) -> F:
    """Return `func` unchanged. `INFINITY_NVTX=1` marks ranges."""
    return func


instrument_w_nvtx = as_it_is


@contextmanager
def OnDevice(
    dtype: torch.dtype | None = None, device: str | torch.device = "meta", enabled: bool = True
) -> Iterator[None]:
    """Inside the context, tensors are built on `device`, those of floating point in `dtype`."""
    before = torch.get_default_dtype()
    with torch.device(device) if enabled else nullcontext():
        if enabled and dtype is not None:
            torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """`item` with a copy of each tensor, without a larger storage behind it. Tensors with the same
    elements of the same storage, such as tied weights, have one copy."""
    copies: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        place: tuple[Any, ...] = (id(value),)
        if value.numel() and not value.is_meta:
            place = value.data_ptr(), value.dtype, value.shape, value.stride(), value.device
        if place not in copies:  # keeps `value`, so that no other tensor gets its place
            copies[place] = value, value.detach().clone().to(device)
        return copies[place][1]

    return tree_map(copied, item)


def move_to_device(
    item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """`item` on `device`, in the same lists, tuples and dicts. A tensor for which `criterion_func`
    is true is moved in place."""
    if criterion_func is not None and criterion_func(item):
        item.data = item.to(device).data
        return item
    if isinstance(item, (list, tuple)):
        moved = [move_to_device(each, device, criterion_func) for each in item]
        return moved if isinstance(item, list) else tuple(moved)
    if isinstance(item, dict):
        return {key: move_to_device(item[key], device, criterion_func) for key in item}
    return item.to(device)


def copy_to_device(
    item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool]
) -> Any:
    """`item` with a copy on `device` of each tensor for which `criterion_func` is true, in the same
    lists, tuples and dicts."""
    return tree_map(lambda each: each.to(device) if criterion_func(each) else each, item)


def has_inf_or_nan(x: torch.Tensor) -> bool:
    """Whether an element of `x` is not finite."""
    return not bool(x.isfinite().all())


def is_not_spread(p: torch.Tensor) -> bool:
    """Whether a parameter is divided for model parallelism: never."""
    return False


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None
) -> torch.Tensor:
    """Like that of torch. Raises `ConfigError` for a model parallel unit `mpu`."""
    if mpu is not None:
        raise DeepSpeedConfigError(
            "clip_grad_norm_: mpu is not supported; leave it out, or write gradient_clipping in "
            "the configuration"
        )
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def ensure_directory_exists(filename: str) -> None:
    """Create the directory of a file."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def empty_cache() -> None:
    """Free memory that torch caches."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def recursive_getattr(model: Any, module_name: str) -> Any:
    """The attribute under a name with dots. Raises `AttributeError` if a part is missing."""
    return attrgetter(module_name)(model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set the attribute under a name with dots. Raises `AttributeError` if its owner is missing."""
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


class RepeatingLoader(Lacking):
    """A loader that restarts at its end."""

    instead = "its loader is `loader`, and the iterator in use `data_iter`"

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def required_torch_version(
    min_version: float | None = None, max_version: float | None = None
) -> bool:
    """Whether the version of torch is in these bounds, such as 2.1 for 2.1.0."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])

    def parts(version: float) -> tuple[int, int]:
        first, _, second = str(version).partition(".")
        return int(first), int(second or 0)

    here = (major, minor)
    above = min_version is None or here >= parts(min_version)
    return above and (max_version is None or here <= parts(max_version))
