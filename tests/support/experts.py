"""Small mixtures of experts of transformers, whose experts lie in banks."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
}


def mixture(kind: str = "mixtral", implementation: str | None = None) -> Any:
    """A model of `kind` whose experts compute by this `implementation`."""
    torch.manual_seed(0)
    options: dict[str, Any]
    if kind == "mixtral":
        options = {**SIZES, "num_experts_per_tok": 2}
        model: Any = transformers.MixtralForCausalLM(transformers.MixtralConfig(**options))
    elif kind == "gpt_oss":
        options = {**SIZES, "num_experts_per_tok": 2, "head_dim": 8}
        model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**options))
    elif kind == "qwen3_moe":
        options = {**SIZES, "num_experts_per_tok": 2, "head_dim": 8, "moe_intermediate_size": 48}
        options["num_experts"] = options.pop("num_local_experts")
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**options))
    else:
        options = {**SIZES, "num_experts_per_tok": 1, "head_dim": 8, "intermediate_size_mlp": 48}
        model = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**options))
    for name, parameter in model.named_parameters():
        if "experts" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    if implementation is not None:
        model.set_experts_implementation(implementation)
    return model


def tokens_of(step: int) -> torch.Tensor:
    """Few tokens, (1, 3): some experts get none."""
    return (torch.arange(3) + 5 * step)[None]
