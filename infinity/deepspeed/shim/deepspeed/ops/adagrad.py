"""Adagrad."""

from infinity.deepspeed.clients import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
