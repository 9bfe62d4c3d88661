"""What DeepSpeed has and this engine has not: one sentence each."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from infinity.deepspeed.errors import DeepSpeedConfigError


def init_inference(*args: Any, **options: Any) -> NoReturn:
    """Refused."""
    raise DeepSpeedConfigError(
        "deepspeed.init_inference is not supported: this engine trains; call generate() on a model "
        "that infinity.wrap returned"
    )


def tp_model_init(*args: Any, **options: Any) -> NoReturn:
    """Refused."""
    raise DeepSpeedConfigError(
        "deepspeed.tp_model_init is not supported: call parallelize_module of torch, and give "
        "infinity.wrap the other dimension of the mesh"
    )


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> NoReturn:
    """Refused."""
    raise DeepSpeedConfigError(
        f"{base_folder} has no file of a rank: checkpoints of this engine are read by "
        "engine.load_checkpoint, and by get_fp32_state_dict_from_zero_checkpoint"
    )


class PipelineModule(torch.nn.Module):
    """Refused."""

    def __init__(self, *args: Any, **options: Any) -> None:
        raise DeepSpeedConfigError(
            "PipelineModule is not supported: there is no pipeline parallelism; build the model as "
            "one module"
        )


class LayerSpec:
    """A layer of a `PipelineModule`, which is refused where it is built."""

    def __init__(self, typename: Any, *args: Any, **options: Any) -> None:
        self.typename = typename


class TiedLayerSpec(LayerSpec):
    """The same."""


class MoE(torch.nn.Module):
    """Refused."""

    def __init__(self, *args: Any, **options: Any) -> None:
        raise DeepSpeedConfigError(
            "deepspeed.moe is not supported: experts are not spread over ranks; use the mixture of "
            "experts of the model, whose weights are sharded as all others"
        )
