"""Facts of a unit that no engine has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from infinity.config import Config
from infinity.placement.demand import UnitShape
from infinity.placement.spec import Format
from infinity.sharding.facts import UnitFacts, UnitParameters
from infinity.sharding.layout import FlatLayout
from infinity.sharding.ranks import ALONE


def facts_of(parameters: Sequence[nn.Parameter], config: Config | None = None) -> UnitFacts:
    """Those of a unit of fp32 `parameters`, of one rank."""
    named = [(f"weight{index}", parameter) for index, parameter in enumerate(parameters)]
    numel = FlatLayout([parameter.shape for parameter in parameters]).numel
    shape = UnitShape(0, "unit", numel, 1, 0, Format("float32", 1, 4), trainable=True)
    return UnitFacts.of(
        shape, UnitParameters(named, [], {}), ALONE, torch.device("cpu"), config or Config()
    )
