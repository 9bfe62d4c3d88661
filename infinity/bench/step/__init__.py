"""A training step, compared with the speeds of the devices under it.

`measure` returns the summary: `train` makes the steps, `bare_compute` measures compute without the
engine, `flops` counts operations.
"""
