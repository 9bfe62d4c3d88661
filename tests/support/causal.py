"""Tiny causal language models of many architectures of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

VOCABULARY = 96
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "use_cache": False,
}
_CAPPED = {"head_dim": 8, "final_logit_softcapping": 2.0}
ARCHITECTURES: Mapping[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma2": _CAPPED,
    "gemma3_text": _CAPPED,
    "mistral": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt_neox": {},
    "phi": {},
    "granite": {"logits_scaling": 8.0},
    "cohere": {"logit_scale": 0.0625},
    "olmo2": {},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 64},
}
"""What the configuration of each has beside `_COMMON`: gemma caps its logits, granite and cohere
scale them, the projection of phi has a bias, and some are tied to the embeddings."""


def causal(name: str = "llama", **options: Any) -> Any:
    """A model of this architecture in training mode, whose weights depend on nothing but that."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **_COMMON | ARCHITECTURES[name] | options)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model.train()


def batch(number: int = 0, rows: int = 4, length: int = 16) -> dict[str, torch.Tensor]:
    """Random tokens and labels, of which some do not count."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(2, VOCABULARY, (rows, length), generator=generator)
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.2, -100, ids)
    return {"input_ids": ids, "labels": labels}
