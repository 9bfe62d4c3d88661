"""Which ranks do what together: all of them share one model."""

from infinity.deepspeed.communication import get_rank as _get_data_parallel_rank
from infinity.deepspeed.communication import get_world_size as _get_data_parallel_world_size

__all__ = ["_get_data_parallel_rank", "_get_data_parallel_world_size"]
