"""The number of floating-point operations of a training step: arithmetic alone. Imports no torch.

[Note: counted operations]
A parameter that takes part in a matrix multiplication costs a multiplication and an addition per
token in the forward, and twice that in the backward: 6 x parameters x tokens. An embedding is
looked up and costs nothing, unless the head shares its weights. Attention multiplies queries with
keys and weights with values: 4 x width x length operations per token and layer in the forward, 12
with the backward. A causal mask leaves half of them. These are the operations of the model.
Activation checkpointing computes the forward of the blocks again, which the hardware does and the
model does not need: 2 x parameters of the blocks x tokens, and a third of the attention's. Norms,
softmax, rotations and the loss do not count. In a mixture of experts every expert counts.
"""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """The inputs of the count: `multiplied` parameters, the part of them `in_blocks`, `layers`, and
    the `width` of the attention (heads times their size)."""

    multiplied: int
    in_blocks: int
    layers: int
    width: int


class Flops(NamedTuple):
    """Operations of one step: of the model, and of the hardware if activations are recomputed."""

    model: float
    hardware: float


def count(shape: Shape, tokens: int, length: int, recomputes: bool) -> Flops:
    """Operations of forward and backward over `tokens` tokens in windows of `length`.

    Example: 1000 parameters, 600 of them in 2 blocks of width 8, 32 tokens in windows of 16: 6 x
    1000 x 32 = 192,000 and 12 x 2 x 8 x 16 x 32 / 2 = 49,152; recomputed 2 x 600 x 32 = 38,400 and
    49,152 / 3 = 16,384.
    """
    attention = 12 * shape.layers * shape.width * length * tokens / 2
    model = 6 * shape.multiplied * tokens + attention
    again = 2 * shape.in_blocks * tokens + attention / 3 if recomputes else 0.0
    return Flops(model, model + again)
