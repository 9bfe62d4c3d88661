"""Linear layers of bitsandbytes in 4 bits, inside `infinity.init()`: their codes stay in files.

A file has two codes in each byte of a weight. Beside them lie the scales: one for each block of 64
weights, in a byte where they are nested. Codes become parameters that are read later, as any other
tensor. Scales are read now, because bitsandbytes keeps them in an object that is no parameter. They
take a thirtieth of the memory of the codes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.weights.matching import Matches


def has_codes(quantizer: Any) -> bool:
    """Whether the files that `quantizer` of transformers loads have codes of 4 bits."""
    config = getattr(quantizer, "quantization_config", None)
    return bool(getattr(quantizer, "pre_quantized", False)) and is_four_bit(config)


def is_four_bit(config: Any) -> bool:
    """Whether `config`, a quantization config of transformers or its dict, is that of 4 bits of
    bitsandbytes."""
    values = config if isinstance(config, dict) else vars(config) if config is not None else {}
    return bool(values.get("load_in_4bit", values.get("_load_in_4bit", False)))


def without_assembly(rules: Sequence[Any], quantizer: Any) -> list[Any]:
    """`rules` without those that assemble a weight of its codes and scales."""
    kinds = tuple(quantizer.get_load_operations().values())
    return [
        rule
        for rule in rules
        if not any(isinstance(each, kinds) for each in getattr(rule, "operations", ()))
    ]


class Codes:
    """The weights in 4 bits of a model without memory, after `match`."""

    def __init__(self, model: nn.Module, matches: Matches) -> None:
        """Read the scales, and give each weight the shape and dtype of its codes. `matches` then
        knows the scales and no wrong shape of codes.

        Raises `ConfigError` if a file has its codes in another dtype than uint8.
        """
        from bitsandbytes.functional import QuantState
        from bitsandbytes.nn import Linear4bit

        tensors = matches.tensors
        scales = defaultdict(list)
        for key in tensors.names():
            head, found, _ = key.rpartition(".weight.")
            if found:
                scales[f"{head}.weight"].append(key)
        self._layers: dict[str, Any] = {}
        for path, layer in model.named_modules():
            name = f"{path}.weight"
            key = matches.direct.get(name, "")
            if not isinstance(layer, Linear4bit) or key not in scales:
                continue
            if tensors.dtype(key) is not torch.uint8:
                raise ConfigError(
                    f"{key} in {tensors.where} has its codes as {tensors.dtype(key)}, which "
                    "training would round; quantize it with bnb_4bit_quant_storage=torch.uint8"
                )
            parts = {each.removeprefix(f"{key}."): each for each in scales[key]}
            # Copies, because files are mapped for reading.
            read = {part: tensors.read(each).clone() for part, each in parts.items()}
            layer.quant_state = QuantState.from_dict(read, torch.device("cpu"))
            # A layer in evaluation would otherwise rewrite its codes on some CPUs.
            layer.support_avx512bf16_for_cpu = False
            codes = torch.empty(tensors.shape(key), dtype=torch.uint8, device="meta")
            layer.weight = nn.Parameter(codes, requires_grad=False)
            self._layers[name] = layer
            matches.unexpected -= {*parts.values(), *(f"{name}.{part}" for part in parts)}
        matches.wrong = [each for each in matches.wrong if each[0] not in self._layers]

    def describe(self, name: str) -> None:
        """Give the parameter `name`, if it has codes, the attributes that bitsandbytes and PEFT
        look for."""
        layer = self._layers.get(name)
        if layer is not None:
            state = layer.quant_state
            vars(layer.weight).update(
                quant_state=state,
                blocksize=state.blocksize,
                compress_statistics=state.nested,
                quant_type=state.quant_type,
                quant_storage=torch.uint8,
                bnb_quantized=True,
            )
