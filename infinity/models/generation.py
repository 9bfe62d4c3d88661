"""Continues prompts with a causal language model, batch by batch.

This module knows nothing of engines. A wrapped model generates like any other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from infinity.errors import in_words
from infinity.models.description import described_by, positions
from infinity.models.reading import open_regular, read_json
from infinity.models.source import ModelSource
from infinity.models.tokenizer import Text, TextPart, Tokenizer
from infinity.quantities import format_bytes

GENERATION = "generation_config.json"
_MOST_BYTES = 1 << 20  # of that file
_COUNTS = (
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_beams", "top_k"),
    *("num_beam_groups", "num_return_sequences", "no_repeat_ngram_size"),
)
_NUMBERS = (
    *("max_time", "temperature", "top_p", "min_p", "typical_p", "repetition_penalty"),
    *("length_penalty", "diversity_penalty", "guidance_scale", "epsilon_cutoff", "eta_cutoff"),
)
_SWITCHES = ("do_sample", "use_cache", "renormalize_logits", "remove_invalid_values")
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_ASKED = "a question"

Message = dict[str, str]
"""One turn of a conversation: its role, which is system, user or assistant, and its content."""


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen. With `temperature` 0 the likeliest token is chosen, else one is
    sampled."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def options(self) -> dict[str, Any]:
        """Keyword arguments for `generate` of transformers."""
        drawn = self.temperature > 0
        return {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": drawn,
            "temperature": self.temperature if drawn else None,
            "top_p": self.top_p if drawn else None,
            "top_k": 0 if drawn else None,
        }


class Continuation(NamedTuple):
    """A prompt, the text that continues it, and the number of new tokens. They include an end
    token."""

    prompt: str
    text: str
    tokens: int


class PromptBatch(NamedTuple):
    """Prompts that are continued together, padded on the left to the longest. `ids` and `mask` are
    int64, of shape (rows, length)."""

    prompts: Sequence[str]
    ids: torch.Tensor
    mask: torch.Tensor

    @property
    def length(self) -> int:
        """Tokens of the longest prompt."""
        return self.ids.shape[1]


def read_prompts(path: Path) -> list[str]:
    """The prompts in the text file `path`, one a line. Empty lines are skipped.

    Raises `OSError`, and `ValueError` for a file that has no prompts or is not UTF-8.
    """
    with open_regular(path) as handle:
        content = handle.read()
    try:
        lines = content.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason}") from None
    found = [line for line in lines if line.strip()]
    if not found:
        raise ValueError(f"{path} has no prompts; write one a line")
    return found


def conversation(prompt: str, system: str | None = None) -> list[Message]:
    """The messages before the first answer: the instruction of the system, and the prompt."""
    start = [] if system is None else [{"role": "system", "content": system}]
    return [*start, {"role": "user", "content": prompt}]


def asks_without_template(prompt: str, tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer has a chat template, and `prompt` has none of the marks that the
    template puts before an answer. An instruct model may continue such a text with nothing."""
    if not tokenizer.has_template:
        return False
    try:
        before, _, after = tokenizer.render(conversation(_ASKED), None, True).partition(_ASKED)
    except ValueError:  # the template has a rule about messages
        return False
    mark = after.strip() or before.strip()
    return bool(mark) and mark not in prompt


def make_batches(
    prompts: Sequence[str],
    tokenizer: Tokenizer,
    rows: int,
    chats: Sequence[Sequence[Message]] | None = None,
) -> list[PromptBatch]:
    """Batches of `rows` prompts, in order. With `chats`, the conversation of each prompt is
    rendered with the chat template of the tokenizer, up to where the answer begins.

    Raises `ValueError` for a prompt without tokens, and for messages that the template refuses.
    """
    if chats is None:
        texts = [Text([TextPart(prompt, False)], is_rendered=False) for prompt in prompts]
    else:
        rendered = [tokenizer.render(messages, None, True) for messages in chats]
        texts = [Text([TextPart(text, False)], is_rendered=True) for text in rendered]
    # `encode_texts` ends a text that no template has rendered with a separator.
    end = -1 if chats is None else None
    tokens = [found.ids[:end].astype(np.int64) for found in tokenizer.encode_texts(texts)]
    for prompt, ids in zip(prompts, tokens, strict=True):
        if not len(ids):
            raise ValueError(f"the prompt {prompt!r} has no tokens; write at least a word")
    batches = []
    for first in range(0, len(prompts), rows):
        group = tokens[first : first + rows]
        ids = np.full((len(group), max(map(len, group))), tokenizer.separator)
        for row, own in enumerate(group):
            ids[row, ids.shape[1] - len(own) :] = own
        lengths = torch.tensor([[len(own)] for own in group])
        mask = torch.arange(ids.shape[1]) >= ids.shape[1] - lengths
        batches.append(
            PromptBatch(prompts[first : first + rows], torch.from_numpy(ids), mask.long())
        )
    return batches


def check_length(source: ModelSource, batches: Sequence[PromptBatch], new_tokens: int) -> None:
    """Raise `ValueError` if the longest prompt and `new_tokens` exceed the positions of the
    model."""
    longest = max(batch.length for batch in batches)
    most = positions(source.config)
    if most is not None and most < longest + new_tokens:
        raise ValueError(
            f"a prompt of {longest} tokens and {new_tokens} new ones are more than the {most} "
            f"positions of {source.name}; shorten the prompt, or lower --max-new-tokens"
        )


def key_value_bytes(config: Any, rows: int, length: int, itemsize: int) -> int:
    """Bytes of the keys and values of `rows` sequences of `length` tokens, in elements of
    `itemsize` bytes. `config` is the transformers configuration of a model with attention layers.

    A layer with a sliding window keeps at most the window. Example: 32 layers with 8 heads of 128
    elements in bf16 take 128 KiB for each token.
    """
    from transformers import DynamicCache

    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layers = DynamicCache(config=text).layers or [None] * text.num_hidden_layers
    windows = (getattr(layer, "sliding_window", None) for layer in layers)
    tokens = sum(length if window is None else min(length, window) for window in windows)
    return int(2 * rows * tokens * heads * width * itemsize)


def check_key_values(nbytes: int, most: int | None, rows: int, length: int) -> None:
    """Raise `ValueError` if keys and values of `nbytes` exceed `most` bytes."""
    if most is not None and nbytes > most:
        raise ValueError(
            f"the KV cache of {rows} sequences of {length} tokens takes {nbytes} bytes "
            f"({format_bytes(nbytes)}), and --kv-memory is {format_bytes(most)}; lower --batch "
            "or --max-new-tokens, or raise --kv-memory"
        )


class TextStream:
    """A streamer for `generate` of transformers, for one sequence. It passes new text to `told`, in
    whole characters."""

    def __init__(self, tokenizer: Tokenizer, told: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._told = told
        self._ids: list[int] = []
        self._length = 0
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Add tokens. The first call has the prompt, which is skipped."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        self._ids += value.flatten().tolist()
        text = self._tokenizer.decode(self._ids)
        if not text.endswith(_UNFINISHED):
            self._tell(text)

    def end(self) -> None:
        """Pass on the remaining text."""
        self._tell(self._tokenizer.decode(self._ids))

    def _tell(self, text: str) -> None:
        more, self._length = text[self._length :], max(len(text), self._length)
        if more:
            self._told(more)


def check_values(path: Path) -> None:
    """Raise `ValueError` if the generation_config.json `path` holds no object, or a value of a
    wrong type."""
    values = read_json(path, _MOST_BYTES)
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no JSON object; remove it, or take it from the model again")
    for name, value in values.items():
        if value is not None and not _is_of_its_type(name, value):
            raise ValueError(
                f"{path}: {name} cannot be {in_words(value)}; correct it, or remove it"
            )


def _is_of_its_type(name: str, value: Any) -> bool:
    """Whether a value of generation_config.json has an allowed type. An unknown name allows any
    type."""
    if name.endswith("_token_id"):
        return all(type(each) is int for each in (value if isinstance(value, list) else [value]))
    if name in _SWITCHES:
        return isinstance(value, bool)
    if name in _COUNTS:
        return type(value) is int
    return name not in _NUMBERS or type(value) in (int, float)


def set_generation_config(model: Any, source: ModelSource) -> None:
    """Give `model` what `source` says of generation, such as its end tokens. Raises `ValueError`
    for an invalid file."""
    from transformers import GenerationConfig

    directory = source.directory
    if directory is not None and (directory / GENERATION).is_file():
        check_values(directory / GENERATION)
        with described_by(directory / GENERATION):
            model.generation_config = GenerationConfig.from_pretrained(
                directory, local_files_only=True
            )


class Generator:
    """Continues batches with one model. `seconds` and `tokens` count all batches so far. Used by
    the thread that runs the model."""

    def __init__(self, model: Any, tokenizer: Tokenizer, device: torch.device) -> None:
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._device = device
        ends = model.generation_config.eos_token_id
        self._ends = tokenizer.separator if ends is None else ends
        self.seconds = 0.0
        self.tokens = 0

    def run(
        self, batches: Sequence[PromptBatch], decoding: Decoding, told: Callable[[str], None] | None
    ) -> Iterator[list[Continuation]]:
        """Yield the continuations of each batch. If there is only one prompt, `told` gets its text
        as it grows."""
        torch.manual_seed(decoding.seed)
        alone = len(batches) == 1 and len(batches[0].prompts) == 1
        for batch in batches:
            streamer = TextStream(self._tokenizer, told) if told and alone else None
            start = time.perf_counter()
            found = self._model.generate(
                batch.ids.to(self._device),
                attention_mask=batch.mask.to(self._device),
                eos_token_id=self._ends,
                pad_token_id=self._tokenizer.separator,
                streamer=streamer,
                **decoding.options(),
            )
            self.seconds += time.perf_counter() - start
            made = [self._ended(row) for row in found[:, batch.length :].tolist()]
            self.tokens += sum(map(len, made))
            yield [
                Continuation(prompt, self._tokenizer.decode(row), len(row))
                for prompt, row in zip(batch.prompts, made, strict=True)
            ]

    def _ended(self, row: list[int]) -> list[int]:
        """`row` up to its first end token. Longer rows of the batch may follow it with padding."""
        ends = self._ends if isinstance(self._ends, list) else [self._ends]
        last = next((at for at, token in enumerate(row) if token in ends), len(row))
        return row[: last + 1]
