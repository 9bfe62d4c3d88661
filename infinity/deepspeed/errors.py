"""What this package refuses. DeepSpeed asserts it, so scripts that expect an `AssertionError` find
one."""

from __future__ import annotations

from infinity.errors import ConfigError


class DeepSpeedConfigError(ConfigError, AssertionError):
    """A configuration or an argument cannot work; nothing was changed."""


class MissingNameError(DeepSpeedConfigError, AttributeError):
    """A name of DeepSpeed that this package does not have; `hasattr` says so, too."""


class DeepSpeedUsageError(RuntimeError, AssertionError):
    """A call comes at a time when it cannot be made."""
