"""The builders of DeepSpeed's native parts, which scripts ask whether a part works on this machine.
The native parts of this engine are built with the package."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from infinity.deepspeed.errors import DeepSpeedConfigError


class OpBuilder:
    """A native part, by its name."""

    NAME: ClassVar[str] = ""
    has: ClassVar[bool] = True
    """Whether this engine has the feature of the part."""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether it works on this machine."""
        return self.has

    def load(self, verbose: bool = True) -> NoReturn:
        """Raises, because native parts of this engine have other functions."""
        raise DeepSpeedConfigError(
            f"{type(self).__name__}.load() is not supported: the native part {self.NAME!r} of this "
            "engine has no functions for scripts; use deepspeed.ops, and infinity.nvme for NVMe"
        )


def _builder(name: str, part: str, has: bool = True) -> type[OpBuilder]:
    """The builder called `name` of the native part `part`."""
    return type(name, (OpBuilder,), {"NAME": part, "has": has, "__module__": __name__})


AsyncIOBuilder = _builder("AsyncIOBuilder", "async_io")
CPUAdamBuilder = _builder("CPUAdamBuilder", "cpu_adam")
FusedAdamBuilder = _builder("FusedAdamBuilder", "fused_adam")
CPUAdagradBuilder = _builder("CPUAdagradBuilder", "cpu_adagrad")
CPULionBuilder = _builder("CPULionBuilder", "cpu_lion")
FusedLionBuilder = _builder("FusedLionBuilder", "fused_lion")
FusedLambBuilder = _builder("FusedLambBuilder", "fused_lamb", has=False)
InferenceBuilder = _builder("InferenceBuilder", "transformer_inference", has=False)

BUILDERS = (
    AsyncIOBuilder,
    CPUAdamBuilder,
    FusedAdamBuilder,
    CPUAdagradBuilder,
    CPULionBuilder,
    FusedLionBuilder,
    FusedLambBuilder,
    InferenceBuilder,
)
COMPATIBLE = {builder.NAME: builder.has for builder in BUILDERS}
"""By name, whether a part works on this machine."""
