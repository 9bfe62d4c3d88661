"""The values of `offload_param.device` and `offload_optimizer.device`, the names of states for
`engine.offload_states`, and that call.

[Note: states that are moved between phases]
A script frees memory of its GPU by `offload_states` before another phase. Here the configuration
decides where states lie, also between steps. So the call moves nothing, and no number depends on
it. If states that it names lie on the GPU, a warning names the key that brings them to the host.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from enum import Enum
from typing import Any

from infinity.config import Config
from infinity.deepspeed.errors import DeepSpeedUsageError
from infinity.errors import in_words
from infinity.tier import TIERS

log = logging.getLogger("infinity")


class OffloadDeviceEnum(str, Enum):
    """A home of states. Its members are equal to their texts, also in a configuration."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """The states that `engine.offload_states` may name."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


_HOMES = {
    "optim_states": ("optimizer", "offload_optimizer"),
    "hp_params": ("optimizer", "offload_optimizer"),
    "lp_params": ("parameters", "offload_param"),
    "lp_grads": ("gradients", "offload_optimizer"),
    "contiguous_grad_buffer": ("gradients", "offload_optimizer"),
}
"""By a name of `OffloadStateTypeEnum`: the field of `Config` and the key for its home."""


class StateMoves:
    """`offload_states` of an engine and of its optimizer. See [Note: states that are moved between
    phases]."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._told: set[str] = set()

    def offload_states(
        self,
        include: Iterable[Any] | None = None,
        device: Any = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Warn, once for each key, of states in `include` (default: all) that lie on the GPU. Moves
        nothing. `pin_memory` and `non_blocking` have no effect.

        Raises `RuntimeError` for a name in `include` that DeepSpeed does not have, and for another
        `device` than "cpu" and "none".
        """
        place = getattr(device, "value", device)
        if place not in ("cpu", "none"):
            raise DeepSpeedUsageError(
                f"offload_states(device={place!r}): it moves states to the host alone; for NVMe "
                'give offload_optimizer and offload_param {"device": "nvme"} in the configuration'
            )
        names = [getattr(each, "value", each) for each in (_HOMES if include is None else include)]
        for name in names:
            if name not in _HOMES:
                raise DeepSpeedUsageError(
                    f"offload_states(include=...) has {in_words(name)}; give some of "
                    f"{', '.join(_HOMES)}"
                )
        for key in dict.fromkeys(_HOMES[name][1] for name in names if place == "cpu"):
            mine = [name for name in names if _HOMES[name][1] == key and self._stays(name)]
            if mine and key not in self._told:
                self._told.add(key)
                log.warning(
                    "offload_states leaves %s on the GPU, where the configuration has them; give "
                    'zero_optimization.%s {"device": "cpu"} to keep them in host memory',
                    ", ".join(mine),
                    key,
                )

    def _stays(self, name: str) -> bool:
        return TIERS[getattr(self._config, _HOMES[name][0])].is_device
