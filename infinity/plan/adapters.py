"""Adapters of PEFT beside a frozen base, which may be quantized to 4 bits: as modules without
memory.

The adapters are those of PEFT itself, on each linear layer but the head. A linear layer of the base
in 4 bits is that of bitsandbytes: a code of 4 bits for each weight, two in a byte, and nested
statistics. Other parameters keep their dtype, such as embeddings and banks of experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from infinity.models.adapters import with_lora

CODES = "uint8"
"""The dtype of the codes of two weights each."""
_BLOCK, _NESTED = 64, 256
"""Weights with one statistic, and statistics with one statistic of their own."""
_TABLES = 4 * (16 + 256 + 1)
"""Bytes of the tables of each weight: the values of the codes, those of the nested statistics,
and their mean, in fp32."""


@dataclass(frozen=True)
class LinearAdapters:
    """LoRA of this `rank` on each linear layer but the head, beside a base in 4 bits if
    `four_bits`."""

    rank: int
    four_bits: bool = False

    def applied(self, model: nn.Module) -> nn.Module:
        """`model` with the adapters, and with all else frozen."""
        return with_lora(model, self.rank)

    def quantize(self, model: nn.Module) -> int:
        """Replace the weights of the base that bitsandbytes quantizes by their codes. Returns the
        bytes of their statistics."""
        if not self.four_bits:
            return 0
        total = 0
        for name, module in model.named_modules():
            if name.endswith(".base_layer") and isinstance(module, nn.Linear):
                count = module.weight.numel()
                codes = torch.empty(-(-count // 2), 1, dtype=torch.uint8, device="meta")
                module.weight = nn.Parameter(codes, requires_grad=False)
                total += statistics_of(count)
        return total


def statistics_of(count: int) -> int:
    """Bytes of the nested statistics of a weight of `count` elements.

    Example: 4096 x 4096 elements have 262,144 statistics of one byte, 1024 of four bytes, and
    tables of 1092 bytes: 267,332 bytes.
    """
    blocks = -(-count // _BLOCK)
    return blocks + 4 * -(-blocks // _NESTED) + _TABLES
