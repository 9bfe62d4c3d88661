"""Turns text into token ids, with the tokenizer of a model directory or with one token per byte."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from infinity.errors import sentence
from infinity.models.patience import within

Ids = npt.NDArray[np.uint32] | npt.NDArray[np.uint16]

BOS, EOS, PAD = 256, 257, 258
SPECIAL = {BOS: "<|bos|>", EOS: "<|eos|>", PAD: "<|pad|>"}
BYTE_VOCABULARY = 320
"""259 ids are in use. The rest pads the embedding to a multiple of 64 rows."""

TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    TEMPLATE,
)
_DEFINING_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)


class TextPart(NamedTuple):
    """A part of a text. `is_learned` if the loss counts its tokens."""

    text: str
    is_learned: bool


class Text(NamedTuple):
    """A sample as text. `is_rendered` if a template has added special tokens."""

    parts: list[TextPart]
    is_rendered: bool


class Tokens(NamedTuple):
    """The ids of a `Text`, and which of them the loss counts. Both have shape (tokens,)."""

    ids: Ids
    learned: npt.NDArray[np.bool_]


class Tokenizer(Protocol):
    """Turns texts into ids below `vocabulary`. `separator` ends a document."""

    vocabulary: int
    separator: int
    has_template: bool
    """Whether `render` can be called."""

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """One array of ids per text, without special tokens."""

    def encode_texts(self, texts: Sequence[Text]) -> list[Tokens]:
        """The tokens of each text. A text that no template has rendered begins with the start
        tokens of the tokenizer and ends with `separator`."""

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any, asks: bool) -> str:
        """A conversation, rendered with the chat template. With `asks`, it ends where the answer of
        the assistant begins. Raises `ValueError`."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens. Incomplete characters become U+FFFD."""

    def save(self, directory: Path) -> None:
        """Write files from which `transformers.AutoTokenizer` loads the same tokenizer."""


class ByteTokenizer:
    """One token per UTF-8 byte. Ids 0 to 255 are the bytes, then come bos, eos and pad."""

    vocabulary = BYTE_VOCABULARY
    separator = EOS
    has_template = False

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """One uint16 array of byte values per text."""
        return [
            np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.uint16)
            for text in texts
        ]

    def encode_texts(self, texts: Sequence[Text]) -> list[Tokens]:
        """See `Tokenizer`."""
        found = []
        for text in texts:
            ids = self.encode([part.text for part in text.parts])
            learned = [np.full(len(i), p.is_learned) for i, p in zip(ids, text.parts, strict=True)]
            found.append(
                Tokens(
                    np.concatenate([*ids, np.array([EOS], np.uint16)]),
                    np.concatenate([*learned, np.array([True])]),
                )
            )
        return found

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any, asks: bool) -> str:
        """Raises `ValueError`: see `has_template`."""
        raise ValueError("the byte tokenizer has no chat template")

    def decode(self, ids: npt.ArrayLike) -> str:
        """See `Tokenizer`. Ids above 255 are skipped."""
        array = np.asarray(ids)
        return array[array < 256].astype(np.uint8).tobytes().decode("utf-8", "replace")

    def save(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json of an equivalent byte-level tokenizer."""
        from transformers import PreTrainedTokenizerFast

        PreTrainedTokenizerFast(
            tokenizer_object=_byte_level(),
            bos_token=SPECIAL[BOS],
            eos_token=SPECIAL[EOS],
            pad_token=SPECIAL[PAD],
            clean_up_tokenization_spaces=False,
        ).save_pretrained(directory)


def _byte_level() -> Any:
    """A `tokenizers.Tokenizer` without merges, with bytes as ids.

    Byte-level tokenizers write each byte as one printable character. A byte that is printable in
    Latin-1 is itself. Each other byte is the next free code point from 256 on, in the order of the
    bytes. This is the table of GPT-2's `bytes_to_unicode`.
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    others = iter(sorted(letter for letter in alphabet if ord(letter) > 255))
    vocabulary = {chr(i) if chr(i) in alphabet else next(others): i for i in range(256)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(SPECIAL[i], special=True, normalized=False) for i in sorted(SPECIAL)]
    )
    return backend


class DirectoryTokenizer:
    """The tokenizer of a Hugging Face model directory. The constructor raises `ValueError` if it
    cannot be loaded or has no end-of-text token."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        self._directory = directory
        with self._blamed("cannot be loaded"):
            self._backend: Any = AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
            self.vocabulary = len(self._backend)
            self.largest = max(self._backend.get_vocab().values(), default=0)
            start = list(self._backend("")["input_ids"])
        ends = (self._backend.eos_token_id, self._backend.sep_token_id)
        separator = next((token for token in ends if token is not None), None)
        if separator is None:
            raise ValueError(
                f"the tokenizer in {directory} has no end-of-text token to put between documents"
            )
        self.separator = int(separator)
        self.has_template = bool(self._backend.chat_template)
        self._start = start if start == [self._backend.bos_token_id] else []

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """One uint32 array of ids per text. Raises `ValueError`."""
        if not texts:
            return []
        with self._blamed("cannot encode the text"):
            encoded = self._backend(
                list(texts),
                add_special_tokens=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
            return [np.asarray(ids, dtype=np.uint32) for ids in encoded["input_ids"]]

    def encode_texts(self, texts: Sequence[Text]) -> list[Tokens]:
        """See `Tokenizer`. A backend without offsets encodes the parts one by one. Raises
        `ValueError`."""
        with self._blamed("cannot encode the text"):
            return [self._tokens(text) for text in texts]

    def _tokens(self, text: Text) -> Tokens:
        found = self._whole(text) if self._backend.is_fast else self._by_parts(text)
        if text.is_rendered:
            return found
        start = np.asarray(self._start, np.uint32)
        end = np.asarray([self.separator], np.uint32)
        return Tokens(
            np.concatenate([start, found.ids, end]),
            np.concatenate([np.zeros(len(start), bool), found.learned, np.ones(1, bool)]),
        )

    def _whole(self, text: Text) -> Tokens:
        """Encode all parts as one text. A token counts if its first character does."""
        encoded = self._backend(
            "".join(part.text for part in text.parts),
            add_special_tokens=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        learned = np.concatenate(
            [np.full(len(part.text), part.is_learned) for part in text.parts] + [np.array([False])]
        )
        begins = [begin for begin, _ in encoded["offset_mapping"]]
        return Tokens(
            np.asarray(encoded["input_ids"], np.uint32), learned[np.asarray(begins, np.int64)]
        )

    def _by_parts(self, text: Text) -> Tokens:
        ids = self.encode([part.text for part in text.parts])
        learned = [np.full(len(i), p.is_learned) for i, p in zip(ids, text.parts, strict=True)]
        return Tokens(np.concatenate(ids).astype(np.uint32), np.concatenate(learned))

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any, asks: bool) -> str:
        """See `Tokenizer`."""
        render = partial(
            self._backend.apply_chat_template,
            list(messages),
            tools=tools,
            add_generation_prompt=asks,
            tokenize=False,
        )
        with self._blamed("cannot render the messages"):
            return str(within(render, f"the chat template in {self._template}"))

    @property
    def _template(self) -> Path:
        """The file with the template."""
        found = self._directory / TEMPLATE
        return found if found.is_file() else self._directory / "tokenizer_config.json"

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))

    @contextmanager
    def _blamed(self, what: str) -> Iterator[None]:
        """Turn an error inside into a `ValueError` that names the tokenizer. A panic of its Rust
        code is no `Exception`."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            kind = "" if type(error) in (ValueError, Exception) else f"{type(error).__name__}: "
            raise ValueError(
                f"the tokenizer in {self._directory} {what}: {kind}{sentence(error)}"
            ) from error

    def save(self, directory: Path) -> None:
        """Copy the tokenizer files of the source directory."""
        for name in TOKENIZER_FILES:
            if (self._directory / name).is_file():
                shutil.copyfile(self._directory / name, directory / name)


def load_tokenizer(
    directory: Path | None,
    vocabulary: int,
    as_bytes: bool = False,
    way_out: str = ", or give --byte-tokenizer to train on bytes, one token each",
) -> Tokenizer:
    """The tokenizer in `directory`. None gives the byte tokenizer, and so does `as_bytes` if the
    directory has no tokenizer. `vocabulary` is the number of rows of the model's embedding.
    `way_out` is added to the error.

    Raises `ValueError` if there is no tokenizer, or if it has more tokens than `vocabulary`.
    """
    has_own = directory is not None and any(
        (directory / name).is_file() for name in _DEFINING_FILES
    )
    if directory is not None and not has_own and not as_bytes:
        raise ValueError(f"{directory} has no tokenizer; put its files there{way_out}")
    if directory is not None and has_own:
        tokenizer: Tokenizer
        tokenizer, name = DirectoryTokenizer(directory), f"the tokenizer in {directory}"
        needed = tokenizer.vocabulary
        if needed <= vocabulary <= tokenizer.largest:
            raise ValueError(
                f"{name} has a token {tokenizer.largest} but the model's vocabulary has "
                f"{vocabulary}"
            )
    else:
        tokenizer, needed, name = ByteTokenizer(), PAD + 1, "the byte tokenizer"
    if needed > vocabulary:
        raise ValueError(f"{name} has {needed} tokens but the model's vocabulary has {vocabulary}")
    return tokenizer
