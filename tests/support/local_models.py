"""Small models and a tokenizer of words, saved as `from_pretrained` reads them: what scripts of
others would otherwise get from a hub."""

from __future__ import annotations

from pathlib import Path

import torch

WORDS = 60
_METRIC = """
class Accuracy:
    def __init__(self):
        self.right = []
    def add_batch(self, predictions, references):
        self.right += (predictions == references).tolist()
    def compute(self, predictions=(), references=()):
        for one, other in zip(predictions, references):
            texts = isinstance(one, str)
            other = [other] if texts and isinstance(other, str) else other
            self.right += [100 * (a == b) for a, b in zip(one, *other)] if texts else [one == other]
        right, self.right = self.right, []
        share = float(sum(right) / max(len(right), 1))
        is_error_rate = any(isinstance(each, str) for each in references)
        return share if is_error_rate else {"accuracy": share, "score": share}

def load(*names, **options):
    return Accuracy()
"""
_SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
VOCABULARY = len(_SPECIAL) + WORDS


def sentence(number: int, words: int) -> str:
    """A text of `words` words, which follow from `number`."""
    return " ".join(f"w{(number * 7 + position * 3) % WORDS}" for position in range(words))


def save_causal(directory: Path) -> None:
    """Write a Llama of two layers, with random weights, and its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **_sizes(), num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=3
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    save_tokenizer(directory)


def save_for_bytes(directory: Path, hidden: int) -> None:
    """Write a Llama of two layers for the tokens of `--byte-tokenizer`, in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def save_classifier(directory: Path) -> None:
    """Write a BERT of two layers for two classes, with random weights, and its tokenizer.

    It answers 0, and so narrowly that twenty-four steps of AdamW at a rate of 2e-5, on labels that
    are mostly 1, make it answer 1. Eight steps do not.
    """
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**_sizes(), pad_token_id=3))
    with torch.no_grad():
        model.classifier.weight.mul_(1e-3)
        model.classifier.bias.copy_(torch.tensor([7.9e-4, 0.0]))
    model.save_pretrained(directory)
    save_tokenizer(directory)


def _sizes() -> dict[str, int]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }


def save_metric(directory: Path) -> None:
    """Write a stand-in for the package `evaluate`, which would fetch the accuracy from a hub, into
    a directory for the path of Python."""
    directory.mkdir()
    (directory / "evaluate.py").write_text(_METRIC)


def save_tokenizer(directory: Path, **options: str) -> None:
    """Write the tokenizer, whose tokens are the words of `sentence`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*_SPECIAL, *(f"w{number}" for number in range(WORDS))]
    numbers = {name: number for number, name in enumerate(names)}
    made = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_input_names=["input_ids", "attention_mask"],
        **options,
    ).save_pretrained(directory)
