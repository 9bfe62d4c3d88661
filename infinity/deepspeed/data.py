"""The data loader of a DeepSpeed engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from infinity.deepspeed.communication import get_rank, get_world_size
from infinity.deepspeed.errors import DeepSpeedConfigError
from infinity.deepspeed.settings import Settings
from infinity.errors import in_words

Collate = Callable[[list[Any]], Any]


def loader(
    settings: Settings, data: Any, collate: Collate | None = None, **options: Any
) -> DataLoader[Any] | None:
    """Micro-batches of this rank, shuffled alike on all ranks, or in the order of a `sampler`. None
    without `data`. `options` are those of `DataLoader`."""
    if data is None:
        return None
    is_map = isinstance(data, Mapping) and 0 not in data  # of columns, or of splits
    is_indexed = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if not is_indexed or is_map or isinstance(data, (type, str, bytes)):
        raise DeepSpeedConfigError(
            f"training_data is {in_words(data)}; give a dataset with a length and an index, or "
            "build a DataLoader yourself"
        )
    if options.get("sampler") is None:
        options["sampler"] = DistributedSampler(
            data,
            num_replicas=get_world_size(),
            rank=get_rank(),
        )
    options = {"batch_size": settings.batches.micro, "drop_last": settings.drop_last} | options
    return DataLoader(data, collate_fn=collate, **options)
