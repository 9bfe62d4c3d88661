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


class AsyncIOBuilder(OpBuilder):
    """Reads and writes of NVMe."""

    NAME = "async_io"


class CPUAdamBuilder(OpBuilder):
    """Adam on the CPU."""

    NAME = "cpu_adam"


class FusedAdamBuilder(OpBuilder):
    """Adam on the device."""

    NAME = "fused_adam"


class CPUAdagradBuilder(OpBuilder):
    """Adagrad on the CPU."""

    NAME = "cpu_adagrad"


class CPULionBuilder(OpBuilder):
    """Lion on the CPU."""

    NAME = "cpu_lion"


class FusedLionBuilder(OpBuilder):
    """Lion on the device."""

    NAME = "fused_lion"


class FusedLambBuilder(OpBuilder):
    """LAMB, which this engine does not have."""

    NAME = "fused_lamb"
    has = False


class InferenceBuilder(OpBuilder):
    """Kernels for inference, which this engine does not have."""

    NAME = "transformer_inference"
    has = False


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
