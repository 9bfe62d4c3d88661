"""Configurations."""

from infinity.errors import ConfigError as DeepSpeedConfigError

__all__ = ["DeepSpeedConfigError"]
