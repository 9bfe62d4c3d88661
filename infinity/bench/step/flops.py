"""How many floating-point operations a training step takes: arithmetic alone. Imports no torch.

[Note: what is counted]
A parameter that takes part in a matrix multiplication costs a multiplication and an addition per
token forward, and twice that backward: 6 x parameters x tokens. An embedding is looked up and costs
nothing, unless the head shares its weights. Attention multiplies queries with keys and weights with
values: 4 x width x length operations per token and layer forward, 12 with the backward, of which a
causal mask leaves half. These are the model's operations. Activation checkpointing computes the
blocks' forward once more, which the hardware does and the model does not need: 2 x parameters of
the blocks x tokens, and a third of the attention's. Norms, softmax, rotations and the loss are not
counted, and in a mixture of experts every expert is.
"""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """What the count depends on: `multiplied` parameters, those of them `in_blocks`, `layers`, and
    the attention's `width` (heads times their size)."""

    multiplied: int
    in_blocks: int
    layers: int
    width: int


class Flops(NamedTuple):
    """Operations of one step: what the model needs, and what is computed where activations are
    recomputed."""

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
