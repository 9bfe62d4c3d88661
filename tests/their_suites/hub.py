"""Small models and data in folders named as on a hub, which `from_pretrained` and `load_dataset`
find from the folder above them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from support.local_models import VOCABULARY, save_metric, save_tokenizer, sentence
from their_suites.zoo import CAUSAL, CLASSES, PIECES, SENTINELS, WIDTH, ZOO

_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
_LLAMA = _HEADS | {"hidden_size": WIDTH, "intermediate_size": 32, "max_position_embeddings": 512}
_BERT = {
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
}
_DISTILBERT = {"dim": WIDTH, "hidden_dim": 32, "n_heads": 2, "n_layers": 2}
_GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "vocab_size": 1024}
_EXPERTS = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
MODELS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "sshleifer/tiny-gpt2": (CAUSAL, "gpt2", _GPT2),
    "gpt2": (CAUSAL, "gpt2", _GPT2),
    "hf-internal-testing/tiny-random-gpt2": (CAUSAL, "gpt2", _GPT2),
    "hf-internal-testing/tiny-random-LlamaForCausalLM": (CAUSAL, "llama", _LLAMA),
    "bert-base-cased": (CLASSES, "bert", _BERT),
    "distilbert-base-uncased": (CLASSES, "distilbert", _DISTILBERT),
    "peft-internal-testing/tiny-random-qwen-1.5-MoE": (CAUSAL, "qwen2_moe", _LLAMA | _EXPERTS),
    "Qwen/Qwen3-0.6B": (CAUSAL, "qwen3", _LLAMA | {"head_dim": 8}),
    "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5": (CAUSAL, "llama", _LLAMA),
    "trl-internal-testing/tiny-Qwen2ForSequenceClassification-2.5": (
        CLASSES,
        "llama",
        _LLAMA | {"num_labels": 1},
    ),
    **ZOO,
}
"""The class, the kind and the sizes of each. Those of TRL are no Qwen2: tokenizers of that class
have no words."""
CHAT = "{% for turn in messages %}{{ turn['role'] + ' ' + turn['content'] + ' ' }}{% endfor %}"
MARKS = {"cls_token": "<s>", "sep_token": "</s>", "mask_token": "<s>"}


def make(directory: Path) -> None:
    """Write all of it into `directory`. Classifiers answer 1, which most labels are, and a T5
    answers the letter e, again and again."""
    import transformers

    for name, (kind, model_type, sizes) in MODELS.items():
        torch.manual_seed(0)
        given = {"vocab_size": VOCABULARY, "pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2}
        config = transformers.AutoConfig.for_model(model_type, **given | dict(sizes))
        model = getattr(transformers, kind).from_config(config)
        if isinstance(getattr(model, "classifier", None), nn.Linear) and model.num_labels == 2:
            nn.init.zeros_(model.classifier.weight)
            model.classifier.bias.data = torch.tensor([0.0, 1e-2])
        if model_type == "t5":
            model.shared.weight.data[:, 0] = 4.0
            model.shared.weight.data[PIECES.index("e"), 0] = 40.0
        model.save_pretrained(directory / name)
        if model_type == "t5":
            save_pieces(directory / name)
        else:
            save_tokenizer(directory / name, chat_template=CHAT, **(MARKS if name in ZOO else {}))
    transformers.MobileViTConfig().save_pretrained(directory / "apple/mobilevit-xx-small")
    for name, configurations in data().items():
        _write_data(directory / name, configurations)
    _write_images(directory / "hf-internal-testing/cats_vs_dogs_sample")
    save_metric(directory / "metric")


def _write_images(directory: Path) -> None:
    """Write sixteen pictures of one color each, of two classes."""
    import datasets
    from PIL import Image

    kinds = datasets.ClassLabel(names=["cat", "dog"])
    features = datasets.Features({"image": datasets.Image(), "labels": kinds})
    pictures = [Image.new("RGB", (40, 36), (number * 16, 99, 0)) for number in range(16)]
    rows = {"image": pictures, "labels": [number % 2 for number in range(16)]}
    directory.mkdir(parents=True)
    datasets.Dataset.from_dict(rows, features).to_parquet(directory / "train.parquet")


def save_pieces(directory: Path) -> None:
    """Write a tokenizer of T5, whose tokens are letters."""
    from transformers import T5Tokenizer

    scored = [(piece, -float(number > 2)) for number, piece in enumerate(PIECES)]
    sentinels = [(f"<extra_id_{number}>", 0.0) for number in reversed(range(SENTINELS))]
    T5Tokenizer(vocab=scored + sentinels, extra_ids=SENTINELS).save_pretrained(directory)


def data() -> dict[str, dict[str, dict[str, list[dict[str, Any]]]]]:
    """Rows by the name of a data set, of a configuration and of a split."""
    pairs = [
        {
            "idx": i,
            "sentence1": sentence(i, 5),
            "sentence2": sentence(i + 1, 5),
            "label": int(i % 8 > 0),
        }
        for i in range(64)
    ]
    quotes = [{"quote": sentence(number, 8)} for number in range(64)]
    return {
        "nyu-mll/glue": {"mrpc": {"train": pairs[:48], "validation": pairs[48:]}},
        "ybelkada/english_quotes_copy": {"default": {"train": quotes}},
        "trl-internal-testing/zen": {
            kind: {"train": _zen(kind)[:17], "test": _zen(kind)[17:]}
            for kind in (
                "standard_language_modeling",
                "standard_preference",
                "standard_unpaired_preference",
                "conversational_implicit_prompt_preference",
                "conversational_prompt_only",
            )
        },
    }


def _turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _zen(kind: str) -> list[dict[str, Any]]:
    rows = []
    for number in range(19):
        prompt, answer, other = (sentence(number + shift, 5) for shift in range(3))
        rows.append(
            {
                "standard_language_modeling": {"text": prompt},
                "standard_preference": {
                    "prompt": prompt,
                    "chosen": " " + answer,
                    "rejected": " " + other,
                },
                "standard_unpaired_preference": {
                    "prompt": prompt,
                    "completion": " " + answer,
                    "label": number % 2 == 0,
                },
                "conversational_implicit_prompt_preference": {
                    "chosen": [_turn("user", prompt), _turn("assistant", answer)],
                    "rejected": [_turn("user", prompt), _turn("assistant", other)],
                },
                "conversational_prompt_only": {"prompt": [_turn("user", prompt)]},
            }[kind]
        )
    return rows


def _write_data(
    directory: Path, configurations: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]
) -> None:
    lines = ["---", "configs:"]
    for name, splits in configurations.items():
        lines += [f"- config_name: {name}", "  data_files:"]
        (directory / name).mkdir(parents=True)
        for split, rows in splits.items():
            (directory / name / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
            lines.append(f"  - {{split: {split}, path: {name}/{split}.jsonl}}")
    (directory / "README.md").write_text("\n".join([*lines, "---", ""]))
