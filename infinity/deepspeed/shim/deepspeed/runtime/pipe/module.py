"""Pipeline parallelism, which is refused."""

from infinity.deepspeed.refused import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
