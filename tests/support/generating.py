"""Tiny models that generate, saved as `from_pretrained` finds them, and what plain transformers
makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import infinity

VOCABULARY, WIDTH, LAYERS, TOKENS = 608, 64, 6, 7
"""Such that the embeddings, and the head, are about as large as a block."""
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
    "beams": {"do_sample": False, "num_beams": 3},
}


def llama(**options: Any) -> Any:
    """A decoder of six equal blocks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    values: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,  # so that tokens differ in how likely they are
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**values | options)).eval()


def mixtral() -> Any:
    """A mixture of four experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        max_position_embeddings=64,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    return MixtralForCausalLM(config).eval()


def t5() -> Any:
    """An encoder and a decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=3,
        num_decoder_layers=3,
        num_heads=2,
        pad_token_id=0,
        eos_token_id=None,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config).eval()


def prompts(rows: int) -> dict[str, torch.Tensor]:
    """Prompts of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(2, VOCABULARY, (rows, 5), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : row % 4] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


class Generated(NamedTuple):
    """The tokens of a run, and the logits that each step had."""

    sequences: torch.Tensor
    logits: tuple[torch.Tensor, ...]

    def assert_equals(self, other: Generated) -> None:
        """The same tokens, from the same bits."""
        assert torch.equal(self.sequences, other.sequences)
        for step, (mine, theirs) in enumerate(zip(self.logits, other.logits, strict=True)):
            assert torch.equal(mine, theirs), step


def generated(model: Any, rows: int = 1, **options: Any) -> Generated:
    """What `model` continues `prompts` with; the seed is always the same."""
    torch.manual_seed(7)
    found = model.generate(
        **prompts(rows),
        max_new_tokens=TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return Generated(found.sequences, found.logits)


def loaded(kind: type[nn.Module], directory: Path) -> Any:
    """The model of `directory`, without memory."""
    with infinity.init():
        model: Any = kind.from_pretrained(directory)  # type: ignore[attr-defined]
    return model.eval()
