"""Training data: where text comes from, how it is packed into windows of equal length, and in which
order they come."""

from __future__ import annotations

import io
import itertools
import os
import sysconfig
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import numpy.typing as npt

from infinity.models.reading import open_regular, parse_json
from infinity.models.tokenizer import Tokenizer
from infinity.quantities import format_bytes

TEXT_SUFFIXES = frozenset(
    (
        ".txt",
        ".text",
        ".md",
        ".markdown",
        ".rst",
        ".tex",
        ".org",
        ".csv",
        ".tsv",
        ".html",
        ".htm",
        ".xml",
        ".json",
        ".jsonl",
        ".yaml",
        ".yml",
        ".toml",
        ".ini",
        ".cfg",
        ".log",
        ".py",
        ".pyi",
        ".c",
        ".h",
        ".cc",
        ".cpp",
        ".cxx",
        ".hpp",
        ".cu",
        ".cuh",
        ".rs",
        ".go",
        ".java",
        ".kt",
        ".scala",
        ".swift",
        ".js",
        ".ts",
        ".jsx",
        ".tsx",
        ".css",
        ".sh",
        ".sql",
        ".rb",
        ".pl",
        ".lua",
        ".r",
        ".jl",
        ".hs",
        ".ml",
        ".cmake",
    )
)
STDLIB_BYTES = 8 << 20
"""How much of the standard library is read when no data is given."""
_NOT_IN_STDLIB = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")
)
_PIECE = 1 << 20
"""Characters read, and handed to the tokenizer, at a time."""
MOST_LINE_BYTES = 64 << 20
"""The longest line of JSONL: one is in memory as a whole, several times over."""
VALIDATION_SHARE = 20
"""One window in this many is held out, but at least one and at most `MOST_VALIDATION`."""
MOST_VALIDATION = 512


class TextPiece(NamedTuple):
    """A part of a document; `last` when the document ends with it."""

    text: str
    last: bool


def _files(
    folder: Path, suffixes: frozenset[str], skip: frozenset[str] = frozenset()
) -> Iterator[Path]:
    """Files with one of `suffixes` under `folder` in sorted order; hidden folders and links to
    folders are not entered."""
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if name not in skip and not name.startswith(".")
        )
        for name in sorted(names):
            path = Path(here, name)
            if path.suffix.lower() in suffixes and path.is_file():
                yield path


def _chunk(handle: TextIO) -> str:
    """About `_PIECE` characters, up to the end of a line where there is one nearby."""
    text = handle.read(_PIECE)
    return text + handle.readline(_PIECE) if text and not text.endswith("\n") else text


def _text(path: Path) -> Iterator[TextPiece]:
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8", newline="") as handle:
            text = _chunk(handle)
            while text:
                following = _chunk(handle)
                yield TextPiece(text, not following)
                text = following
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text: {error.reason} (0x{error.object[error.start]:02x})"
        ) from None


def _json_lines(path: Path) -> Iterator[TextPiece]:
    with open_regular(path) as handle:
        for number in itertools.count(1):
            line = handle.readline(MOST_LINE_BYTES + 1)
            if not line:
                return
            where = f"{path}, line {number}"
            if len(line) > MOST_LINE_BYTES:
                raise ValueError(
                    f"{where}: more than {format_bytes(MOST_LINE_BYTES)}, which are read at once; "
                    "cut the document, or put its text into a file of its own"
                )
            if not line.strip():
                continue
            record = parse_json(line.strip(), where)
            text = record.get("text") if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise ValueError(f'{where}: no string under the key "text"')
            if text:
                yield TextPiece(text, True)


def _document(path: Path) -> Iterator[TextPiece]:
    return _json_lines(path) if path.suffix.lower() == ".jsonl" else _text(path)


def standard_library() -> Iterator[TextPiece]:
    """The first `STDLIB_BYTES` of the Python sources of the running interpreter's standard library,
    in sorted order."""
    total = 0
    for path in _files(Path(sysconfig.get_paths()["stdlib"]), frozenset((".py",)), _NOT_IN_STDLIB):
        total += path.stat().st_size
        if total > STDLIB_BYTES:
            return
        yield from _text(path)


def read_pieces(source: Path | None) -> Iterator[TextPiece]:
    """The documents in `source`, piece by piece: a text file, a JSONL file (key "text") or a folder
    of such files.

    None reads the Python standard library. Raises `FileNotFoundError`, or `ValueError` naming the
    file (and line) that is not text or no regular file, or the folder that has none.
    """
    if source is None:
        yield from standard_library()
    elif source.is_dir():
        paths = _files(source, TEXT_SUFFIXES)
        first = next(paths, None)
        if first is None:
            raise ValueError(
                f"{source} has no text files (known endings: {' '.join(sorted(TEXT_SUFFIXES))})"
            )
        yield from _document(first)
        for path in paths:
            yield from _document(path)
    else:
        yield from _document(source)


def encode(pieces: Iterable[TextPiece], tokenizer: Tokenizer) -> npt.NDArray[Any]:
    """All tokens of `pieces` in one flat array (uint16 where the vocabulary allows), a separator
    after each document."""
    code = "H" if max(tokenizer.vocabulary, tokenizer.separator + 1) <= 1 << 16 else "I"
    dtype = np.uint16 if code == "H" else np.uint32
    tokens = array(code)  # grows in place: a list of parts would need twice the memory when joined

    def flush(waiting: list[TextPiece]) -> None:
        for piece, ids in zip(
            waiting, tokenizer.encode([piece.text for piece in waiting]), strict=True
        ):
            tokens.frombytes(ids.astype(dtype, copy=False).tobytes())
            if piece.last:
                tokens.append(tokenizer.separator)

    waiting: list[TextPiece] = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece.text)
        if size >= _PIECE:
            flush(waiting)
            waiting, size = [], 0
    flush(waiting)
    return np.frombuffer(tokens, dtype=dtype) if tokens else np.empty(0, dtype)


@dataclass(frozen=True)
class Windows:
    """Tokens cut into windows of equal length, some of them held out for validation.

    `tokens` has the shape (windows, length); `training` and `validation` hold row numbers, every
    row in exactly one.
    """

    tokens: npt.NDArray[Any]
    training: npt.NDArray[np.int64]
    validation: npt.NDArray[np.int64]
    seed: int

    def order(self) -> Iterator[int]:
        """Training rows without end: every epoch is a fresh permutation that depends on seed and
        epoch alone."""
        epoch = 0
        while True:
            yield from (
                np.random.default_rng((self.seed, 1, epoch)).permutation(self.training).tolist()
            )
            epoch += 1

    def batches(self, size: int) -> Iterator[npt.NDArray[np.int64]]:
        """Training batches without end, of shape (size, length); the next epoch fills up an
        incomplete batch."""
        order = self.order()
        while True:
            yield self.tokens[[next(order) for _ in range(size)]].astype(np.int64)

    def validation_batches(self, size: int, most: int) -> Iterator[npt.NDArray[np.int64]]:
        """At most `most` batches of held-out windows, always the same ones; the last may be
        smaller."""
        for start in range(0, min(len(self.validation), size * most), size):
            yield self.tokens[self.validation[start : start + size]].astype(np.int64)


def pack(tokens: npt.NDArray[Any], length: int, seed: int, name: str) -> Windows:
    """Cut `tokens` into windows of `length`, without overlap; less than one window at the end is
    left out.

    Raises `ValueError` that names the source when there is too little for one window to train on
    and one held out.
    """
    count = len(tokens) // length
    if count < 2:
        raise ValueError(
            f"{name} has {len(tokens)} tokens, but a sequence length of {length} needs at least "
            f"{2 * length}: one window to train on and one held out"
        )
    order = np.random.default_rng((seed, 0)).permutation(count)
    held_out = max(1, min(count // VALIDATION_SHARE, MOST_VALIDATION))
    rows = tokens[: count * length].reshape(count, length)
    return Windows(
        rows, training=np.sort(order[held_out:]), validation=np.sort(order[:held_out]), seed=seed
    )


def load_windows(source: Path | None, tokenizer: Tokenizer, length: int, seed: int) -> Windows:
    """Read, encode and pack `source` (None: the Python standard library)."""
    name = str(source) if source is not None else "the Python standard library"
    return pack(encode(read_pieces(source), tokenizer), length, seed, name)
