"""Pipeline parallelism, which is refused."""

from infinity.deepspeed.refused import PipelineModule

__all__ = ["PipelineModule"]
