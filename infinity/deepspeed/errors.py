"""Errors of this package. DeepSpeed asserts, so they are also an `AssertionError` for scripts that
expect one."""

from __future__ import annotations

from infinity.errors import ConfigError


class DeepSpeedConfigError(ConfigError, AssertionError):
    """A configuration or an argument cannot work. Nothing was changed."""


class MissingNameError(DeepSpeedConfigError, AttributeError):
    """This package lacks a name of DeepSpeed. `hasattr` returns False for it."""


class DeepSpeedUsageError(RuntimeError, AssertionError):
    """A call is not allowed at this time."""
