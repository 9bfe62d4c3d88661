"""The classes of DeepSpeed's optimizers, for `isinstance`. The optimizer of `initialize` is an
instance of the class for its stage and precision. A script cannot make an instance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from infinity.deepspeed.optimizer_names import engine_of
from infinity.deepspeed.refused import Refused

_WHY = "deepspeed.initialize makes it, from an optimizer of torch or from the configuration"


class _OptimizerClass(Refused):
    """The class of these classes."""

    holds: Callable[[Any], bool]
    """Whether the optimizer of an engine is an instance."""

    def __instancecheck__(cls, instance: object) -> bool:
        engine = engine_of(instance)
        return engine is not None and vars(cls)["holds"](engine)


def _named(name: str, holds: Callable[[Any], bool]) -> type:
    return _OptimizerClass(name, (), {"sentence": f"{name} cannot be made: {_WHY}", "holds": holds})


def _plain(precision: str) -> Callable[[Any], bool]:
    return lambda engine: not engine.zero_optimization() and engine.settings.precision == precision


DeepSpeedOptimizer = _named("DeepSpeedOptimizer", lambda engine: True)
ZeROOptimizer = _named("ZeROOptimizer", lambda engine: engine.zero_optimization())
DeepSpeedZeroOptimizer = _named(
    "DeepSpeedZeroOptimizer", lambda engine: engine.zero_optimization_stage() in (1, 2)
)
DeepSpeedZeroOptimizer_Stage3 = _named(
    "DeepSpeedZeroOptimizer_Stage3", lambda engine: engine.zero_optimization_stage() == 3
)
BF16_Optimizer = _named("BF16_Optimizer", _plain("bf16"))
FP16_Optimizer = _named("FP16_Optimizer", _plain("fp16"))
FP16_UnfusedOptimizer = _named("FP16_UnfusedOptimizer", lambda engine: False)
