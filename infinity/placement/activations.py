"""What the activations of a decoder take: an estimate, from shapes alone. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple

BLOCK_BYTES = 17
"""Elements that a block saves per token and hidden unit: 34 bytes of two-byte elements (2205.05198,
section 4, without attention scores, which fused attention does not keep)."""
LOGIT_COPIES = 8
"""Bytes of the fp32 copies of a logit: its own, and its gradient's."""


class DecoderShape(NamedTuple):
    """The dimensions that the estimate depends on. An element of an activation takes `width`
    bytes."""

    layers: int
    hidden: int
    vocabulary: int
    width: int


class ActivationBytes(NamedTuple):
    """What one micro-batch takes, in bytes: the inputs of blocks (or all that blocks save), the
    inside of the block that is recomputed, and the logits."""

    saved: int
    working: int
    logits: int


def activation_bytes(decoder: DecoderShape, tokens: int, recomputes: bool) -> ActivationBytes:
    """An estimate for one micro-batch of so many tokens, with fused attention.

    Example: 32 layers of 4096 in bf16 with 128,256 words, 8192 tokens, recomputed: 2 GiB of inputs,
    1.06 GiB inside of a block, 9.8 GiB of logits.
    """
    inputs = tokens * decoder.hidden * decoder.width
    inside = inputs * BLOCK_BYTES
    logits = tokens * decoder.vocabulary * (decoder.width + LOGIT_COPIES)
    if recomputes:
        return ActivationBytes(decoder.layers * inputs, inside, logits)
    return ActivationBytes(decoder.layers * inside, 0, logits)
