"""The builders of DeepSpeed's native parts, by which scripts ask what works on this machine. All of
ours are built with the package."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from infinity.deepspeed.errors import DeepSpeedConfigError


class OpBuilder:
    """A native part, by its name."""

    NAME: ClassVar[str] = ""
    has: ClassVar[bool] = True
    """Whether this engine does what the part is for."""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether it works here."""
        return self.has

    def load(self, verbose: bool = True) -> NoReturn:
        """Refused: native parts of this engine have other functions."""
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
    """LAMB, which is not there."""

    NAME = "fused_lamb"
    has = False


class InferenceBuilder(OpBuilder):
    """Kernels for inference, which are not there."""

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
"""By name, whether it works here."""
