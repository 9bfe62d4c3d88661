"""Models of the hub that a plan knows by name: the sizes in their published config.json.

A plan needs the sizes of the parameters, the number of positions, and the tied weights. The records
have these values alone. The tests compare the parameters of each with the count
that the hub publishes.
"""

from __future__ import annotations

from typing import Any

_LLAMA = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
_QWEN3 = {
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
_QWEN3_MOE = _QWEN3 | {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 201_088,
    "max_position_embeddings": 131_072,
    "hidden_size": 2_880,
    "intermediate_size": 2_880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "tie_word_embeddings": False,
}
_GEMMA3 = {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "sliding_window": 1_024,
}


def _gemma3(**text: Any) -> dict[str, Any]:
    vision = {
        "hidden_size": 1_152,
        "image_size": 896,
        "intermediate_size": 4_304,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    }
    return {
        "model_type": "gemma3",
        "mm_tokens_per_image": 256,
        "text_config": _GEMMA3 | text,
        "vision_config": vision,
    }


MODELS: dict[str, dict[str, Any]] = {
    # huggingface.co/meta-llama/Llama-3.1-8B, -70B and -405B: config.json
    "meta-llama/Llama-3.1-8B": _LLAMA
    | {
        "hidden_size": 4_096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "meta-llama/Llama-3.1-70B": _LLAMA
    | {
        "hidden_size": 8_192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "meta-llama/Llama-3.1-405B": _LLAMA
    | {
        "hidden_size": 16_384,
        "intermediate_size": 53_248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
    },
    # huggingface.co/Qwen/Qwen3-8B, -32B, -30B-A3B and -235B-A22B: config.json
    "Qwen/Qwen3-8B": _QWEN3
    | {
        "model_type": "qwen3",
        "hidden_size": 4_096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Qwen/Qwen3-32B": _QWEN3
    | {
        "model_type": "qwen3",
        "hidden_size": 5_120,
        "intermediate_size": 25_600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "Qwen/Qwen3-30B-A3B": _QWEN3_MOE
    | {
        "hidden_size": 2_048,
        "intermediate_size": 6_144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
    },
    "Qwen/Qwen3-235B-A22B": _QWEN3_MOE
    | {
        "hidden_size": 4_096,
        "intermediate_size": 12_288,
        "moe_intermediate_size": 1_536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
    },
    # huggingface.co/openai/gpt-oss-20b and -120b: config.json
    "openai/gpt-oss-20b": _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "openai/gpt-oss-120b": _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
    # huggingface.co/google/gemma-3-4b-it and -27b-it: config.json, with the defaults of its classes
    "google/gemma-3-4b-it": _gemma3(
        hidden_size=2_560,
        intermediate_size=10_240,
        num_hidden_layers=34,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
    ),
    "google/gemma-3-27b-it": _gemma3(
        hidden_size=5_376,
        intermediate_size=21_504,
        num_hidden_layers=62,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
    ),
    # huggingface.co/deepseek-ai/DeepSeek-V3: config.json; transformers builds no layers of
    # multi-token prediction
    "deepseek-ai/DeepSeek-V3": {
        "model_type": "deepseek_v3",
        "vocab_size": 129_280,
        "max_position_embeddings": 163_840,
        "hidden_size": 7_168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2_048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "q_lora_rank": 1_536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "tie_word_embeddings": False,
    },
    # huggingface.co/HuggingFaceTB/SmolLM2-135M: config.json
    "HuggingFaceTB/SmolLM2-135M": {
        "model_type": "llama",
        "vocab_size": 49_152,
        "max_position_embeddings": 8_192,
        "hidden_size": 576,
        "intermediate_size": 1_536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
}
"""The values of config.json, by the id of the model."""


def known(name: str) -> str | None:
    """The id of the model that `name` means: its id, or the part after the slash, in any case. None
    if there is no record."""
    wanted = name.casefold()
    for each in MODELS:
        if wanted in (each.casefold(), each.casefold().partition("/")[2]):
            return each
    return None
