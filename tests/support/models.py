"""Tiny models that the tests share: a hand-written transformer, and one of every transformers
family that is tested.

Every builder seeds itself, so that two calls give equal models. A batch is a dict of keyword
arguments whose forward gives an object with `.loss`; the batch of a step is a function of its
number alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 64


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 masters as parameters of `dtype`, as the kernels round them: bf16 with ties away from
    zero, and NaN canonical."""
    if dtype != torch.bfloat16:
        return values.to(dtype)
    patterns = torch.where(values.isnan(), torch.nan, values).view(torch.int32).long()
    return ((patterns + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


class Output(NamedTuple):
    """What the hand-written models return, in the manner of transformers."""

    loss: torch.Tensor
    logits: torch.Tensor


class Attention(nn.Module):
    """Causal self-attention with two heads and no biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            self.qkv(x).view(batch, length, 6, width // 2).transpose(1, 2).chunk(3, dim=1)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """A causal language model: embeddings, `depth` blocks, a norm and a head, tied to the
    embeddings if asked.

    `run_block(number, block, x)` may be replaced on an instance to change how a block is called.
    """

    def __init__(
        self, width: int = 32, depth: int = 4, tied: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(torch.randn(1, 64, width) * 0.1)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.tensor(0.5))
        nn.init.normal_(self.tokens.weight, std=0.1)
        if tied:
            self.head.weight = self.tokens.weight

    def run_block(self, number: int, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
        x = self.tokens(input_ids) * self.scale + self.places[:, : input_ids.shape[1]]
        for number, block in enumerate(self.blocks):
            x = self.run_block(number, block, x)
        logits = self.head(self.norm(x)).float()
        loss = (
            logits.sum() * 0
            if labels is None
            else functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        )
        return Output(loss, logits)


def transformer(seed: int = 0, **options: Any) -> Transformer:
    """A `Transformer` with weights that depend on `seed` alone."""
    torch.manual_seed(seed)
    return Transformer(**options)


def text_batch(step: int, rows: int = 2, length: int = 8) -> dict[str, torch.Tensor]:
    """Random tokens, to be predicted from the ones before them by a rule that can be learnt."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(2, VOCABULARY, (rows, length), generator=generator)
    return {"input_ids": ids, "labels": (ids * 3 + 1) % VOCABULARY}


class Family(NamedTuple):
    """A transformers architecture: how to build the tiny model, and its batch for a step."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, torch.Tensor]]


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return make().train()

    return build


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=16,
            n_embd=64,
            n_layer=3,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=1,
            use_cache=False,
        )
    )


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=1,
            use_cache=False,
        )
    )


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=16,
            output_router_logits=True,
            router_aux_loss_coef=0.02,
            bos_token_id=0,
            eos_token_id=1,
            use_cache=False,
        )
    )


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            pad_token_id=0,
        )
    )


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=16,
            d_ff=64,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            tie_word_embeddings=True,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=64,
            image_size=16,
            patch_size=8,
            num_channels=3,
            num_labels=5,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def _masked_batch(step: int) -> dict[str, torch.Tensor]:
    batch = text_batch(step)
    hidden = (
        torch.rand(batch["input_ids"].shape, generator=torch.Generator().manual_seed(step)) < 0.4
    )
    hidden[:, 0] = True
    labels = torch.where(hidden, batch["input_ids"], -100)
    return {"input_ids": torch.where(hidden, 1, batch["input_ids"]), "labels": labels}


def _image_batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return {
        "pixel_values": torch.randn(4, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 5, (4,), generator=generator),
    }


FAMILIES: dict[str, Family] = {
    "gpt2": Family(_seeded(_gpt2), text_batch),
    "llama": Family(_seeded(_llama), text_batch),
    "bert": Family(_seeded(_bert), _masked_batch),
    "t5": Family(_seeded(_t5), text_batch),
    "vit": Family(_seeded(_vit), _image_batch),
    "mixtral": Family(_seeded(_mixtral), text_batch),
}
