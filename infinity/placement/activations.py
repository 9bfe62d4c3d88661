"""Estimates the activation memory of a decoder from its shape. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple

BLOCK_BYTES = 17
"""Elements that a block saves per token and hidden unit: 34 bytes in two-byte elements (2205.05198,
section 4, without attention scores, which fused attention does not keep)."""
LOGIT_COPIES = 8
"""Bytes of two fp32 copies: of a logit, and of its gradient."""


class DecoderShape(NamedTuple):
    """The dimensions of a decoder. An element of an activation takes `width` bytes."""

    layers: int
    hidden: int
    vocabulary: int
    width: int


class ActivationBytes(NamedTuple):
    """Bytes of one micro-batch. `saved`: the inputs of recomputed blocks, or all tensors that the
    blocks save. `working`: the inside of the block that is being recomputed, or 0. `logits`: the
    logits with their copies."""

    saved: int
    working: int
    logits: int


def activation_bytes(decoder: DecoderShape, tokens: int, recomputes: bool) -> ActivationBytes:
    """Estimate one micro-batch of `tokens` tokens with fused attention. `recomputes`: whether every
    block is recomputed in the backward.

    Example: 32 layers of 4096 in bf16 with 128,256 words, 8192 tokens, recomputed: 2 GiB of inputs,
    1.06 GiB inside a block, 9.8 GiB of logits.
    """
    inputs = tokens * decoder.hidden * decoder.width
    inside = inputs * BLOCK_BYTES
    logits = tokens * decoder.vocabulary * (decoder.width + LOGIT_COPIES)
    if recomputes:
        return ActivationBytes(decoder.layers * inputs, inside, logits)
    return ActivationBytes(decoder.layers * inside, 0, logits)
