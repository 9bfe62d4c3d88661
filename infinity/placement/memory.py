"""Computes the bytes of a model's states on each rank, before anything is allocated. Imports no
torch."""

from __future__ import annotations

from typing import NamedTuple

from infinity.config import Config
from infinity.placement.spec import MOMENTS
from infinity.tier import GPU, TIERS


class StateBytes(NamedTuple):
    """Bytes of parameters, gradients and optimizer states (masters and moments)."""

    parameters: float
    gradients: float
    optimizer: float

    def on_rank(self, ranks: int, stage: int) -> StateBytes:
        """The part of one of `ranks` ranks: 1/N of the states that the ZeRO stage (0 to 3) shards
        (1910.02054, figure 1).

        Example: 7.5e9 parameters of 2 + 2 + 12 bytes on 64 ranks take 120 GB with stage 0, 31.4
        with 1, 16.6 with 2, and 1.88 with 3.
        """
        shared = (ranks if stage >= least else 1 for least in (3, 2, 1))
        return StateBytes(*(nbytes / n for nbytes, n in zip(self, shared, strict=True)))


_DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_MOMENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 36864 / 32768}


def bytes_per_parameter(config: Config) -> StateBytes:
    """Bytes of the states of one trainable parameter, before sharding. Precision "auto" counts as
    fp32.

    Example: bf16 takes 2 + 2 + 10 with a split master and two fp32 moments.
    """
    parameter = _DTYPE_BYTES.get(config.precision, 4)
    gradient = 4 if config.tuning.gradient_precision == "fp32" else parameter
    master = (
        0
        if parameter == 4
        else 2
        if config.tuning.split_master and config.precision == "bf16"
        else 4
    )
    return StateBytes(
        parameter,
        gradient,
        master + len(MOMENTS[config.algorithm]) * _MOMENT_BYTES[config.moment_precision],
    )


def bytes_on_tiers(
    trainable: int, config: Config, ranks: int = 1, frozen: int = 0
) -> dict[str, float]:
    """Bytes of the states of `trainable` and `frozen` parameters on each tier ("gpu", "cpu",
    "nvme") of one of `ranks` ranks.

    States that copy-on-write keeps twice on NVMe count twice there, and so do the parameters of
    delayed updates in host memory. Shadow copies in host memory do not count, because they take
    only free budget. The bytes of a numeric `gpu_cache` count as "gpu"; "auto" counts as 0, because
    it depends on the units.

    Omits padding: a unit takes whole pages on every rank (multiples of 2048 elements, or of 4096
    elements of one byte). Omits buffers: gathered units and a gradient buffer on the compute
    device, and staging in host memory.
    """
    parameter, gradient, optimizer = bytes_per_parameter(config)
    whole = StateBytes(trainable * parameter, trainable * gradient, trainable * optimizer)
    states = whole.on_rank(ranks, config.stage)
    frozen_states = StateBytes(frozen * parameter, 0, 0).on_rank(ranks, config.stage)
    tiers = dict.fromkeys(TIERS, 0.0)
    places = {
        "parameters": TIERS[config.parameters],
        "gradients": TIERS[config.gradients],
        "optimizer": TIERS[config.optimizer],
    }
    may_stay = sum(getattr(states, name) for name, tier in places.items() if not tier.is_device)
    stays = (
        0.0
        if config.tuning.gpu_cache == "auto" or not may_stay
        else min(1.0, config.tuning.gpu_cache / may_stay)
    )
    tiers[GPU.name] += stays * may_stay
    for name, tier in places.items():
        shadowed = tier.is_drive and config.tuning.copy_on_write and name != "gradients"
        late = tier.is_host and config.tuning.update == "delayed" and name == "parameters"
        leaves = 1.0 if tier.is_device else 1.0 - stays
        homes = leaves * getattr(states, name) * (2 if shadowed or late else 1)
        tiers[tier.name] += homes + getattr(frozen_states, name)
    return tiers
