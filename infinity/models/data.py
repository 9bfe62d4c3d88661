"""Training data: reads text, packs it into windows of equal length, and orders the windows."""

from __future__ import annotations

import io
import os
import sysconfig
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import numpy.typing as npt

from infinity.errors import naming
from infinity.models import records, samples
from infinity.models.description import MOST_TOKENS, USUAL_LENGTH
from infinity.models.packing import best_fit
from infinity.models.reading import open_regular
from infinity.models.records import DataRecord
from infinity.models.samples import Batch, Rows, unpacked
from infinity.models.tokenizer import Tokenizer

TEXT_SUFFIXES = frozenset(
    (
        ".txt",
        ".text",
        ".md",
        ".markdown",
        ".rst",
        ".tex",
        ".org",
        ".html",
        ".htm",
        ".xml",
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
"""Bytes of the standard library that are read without other data."""
_NOT_IN_STDLIB = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")
)
_PIECE = 1 << 20
"""Characters that are read and tokenized at a time."""
_ARCHIVES = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".7z")
_PACKED = dict.fromkeys(_ARCHIVES, "unpack it first") | {
    ".arrow": "give the directory that save_to_disk made",
    ".pdf": "convert it to text first",
    ".docx": "convert it to text first",
    ".xlsx": "save it as CSV first",
}
"""Endings of files that are no text, with advice for the error."""
_BESIDE_RECORDS = frozenset(("readme.md", "dataset_infos.json", "dataset_info.json"))
"""Files that describe a data set of the hub and hold no data."""
VALIDATION_SHARE = 20
"""One window in this many is held out, but at least one and at most `MOST_VALIDATION`."""
MOST_VALIDATION = 512


class TextPiece(NamedTuple):
    """A part of a document. `last` marks the end of the document."""

    text: str
    last: bool


def _files(
    folder: Path, suffixes: frozenset[str], skip: frozenset[str] = frozenset()
) -> Iterator[Path]:
    """Files with one of `suffixes` under `folder`, in sorted order. Hidden folders and links to
    folders are skipped."""
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if name not in skip and not name.startswith(".")
        )
        for name in sorted(names):
            path = Path(here, name)
            if path.suffix.lower() in suffixes and path.is_file():
                yield path


def _chunk(handle: TextIO) -> str:
    """About `_PIECE` characters. It ends with a line if the line ends within the next `_PIECE`
    characters."""
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


def _items(
    path: Path, as_text: bool, columns: Mapping[str, str] | None
) -> Iterator[TextPiece | DataRecord]:
    """The documents or samples of one file."""
    suffix = path.suffix.lower()
    if suffix in _PACKED:
        raise ValueError(f"{path} is no text: {_PACKED[suffix]}")
    with naming(path):
        if as_text or suffix not in records.SUFFIXES:
            yield from _text(path)
        else:
            yield from _sorted_out(records.read_records(path), columns)


def _sorted_out(
    found: Iterable[DataRecord], columns: Mapping[str, str] | None
) -> Iterator[TextPiece | DataRecord]:
    for record in found if columns is None else (_renamed(each, columns) for each in found):
        if not samples.is_document(record):
            yield record
        elif text := samples.document(record):
            yield TextPiece(text, True)


def _renamed(record: DataRecord, columns: Mapping[str, str]) -> DataRecord:
    """`record` with the keys of `columns` alone, from the columns that it names."""
    missing = [name for name in columns.values() if name not in record.values]
    if missing:
        shown = ", ".join(map(repr, list(record.values)[:8])) or "nothing"
        raise ValueError(f"{record.where}: no column {missing[0]!r}; it has {shown:.200}")
    return record._replace(values={key: record.values[name] for key, name in columns.items()})


def standard_library() -> Iterator[TextPiece]:
    """The first `STDLIB_BYTES` of the Python sources in the interpreter's standard library, in
    sorted order."""
    total = 0
    for path in _files(Path(sysconfig.get_paths()["stdlib"]), frozenset((".py",)), _NOT_IN_STDLIB):
        total += path.stat().st_size
        if total > STDLIB_BYTES:
            return
        yield from _text(path)


def read_items(
    source: Path | None, as_text: bool = False, columns: Mapping[str, str] | None = None
) -> Iterator[TextPiece | DataRecord]:
    """Read the documents of `source` piece by piece, or its samples. `source` is a text file, a
    file of records (`records.SUFFIXES`), a folder of such files, or a folder that `datasets` saved.

    None reads the Python standard library. With `as_text`, files of records are read as text.
    `columns` has the names of records for the keys that are read: {"completion": "answer"}.
    Raises `FileNotFoundError`, and `ValueError` that names the file (and line) or the folder
    without data.
    """
    if source is None:
        yield from standard_library()
    elif source.is_dir() and records.is_saved(source):
        yield from _sorted_out(records.read_saved(source), columns)
    elif source.is_dir():
        endings = TEXT_SUFFIXES | records.SUFFIXES
        paths = _files(source, endings)
        first = next(paths, None)
        if first is None:
            raise ValueError(
                f"{source} has no text files (known endings: {' '.join(sorted(endings))})"
            )
        has_records = not as_text and any(
            path.name.lower() not in _BESIDE_RECORDS for path in _files(source, records.SUFFIXES)
        )
        for path in chain([first], paths):
            if not (has_records and path.name.lower() in _BESIDE_RECORDS):
                yield from _items(path, as_text, columns)
    else:
        yield from _items(source, as_text, columns)


def encode(pieces: Iterable[TextPiece], tokenizer: Tokenizer) -> npt.NDArray[Any]:
    """All tokens of `pieces` in one flat array, with a separator after each document. Its dtype is
    uint16 if the vocabulary fits, else uint32."""
    code = "H" if max(tokenizer.vocabulary, tokenizer.separator + 1) <= 1 << 16 else "I"
    dtype = np.uint16 if code == "H" else np.uint32
    tokens = array(code)  # grows in place; joining a list of parts would take twice the memory

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

    `tokens` has the shape (windows, length). `training` and `validation` hold row numbers. Every
    row is in exactly one of them. Samples with completions are `Rows`, with one row per sample.
    """

    tokens: npt.NDArray[Any] | Rows
    training: npt.NDArray[np.int64]
    validation: npt.NDArray[np.int64]
    seed: int
    notes: tuple[str, ...] = ()
    """Notes on the data for the user."""
    packs: Sequence[Sequence[int]] | None = None
    """Rows that are trained on together, one pack a window. `training` then has numbers of packs.
    None: each row is a window."""

    @property
    def mean_length(self) -> float:
        """Tokens of data per training window. Padding does not count."""
        if not isinstance(self.tokens, Rows):
            return float(self.tokens.shape[1])
        rows = self.training if self.packs is None else list(chain(*self.packs))
        return float(self.tokens.lengths[rows].sum() / len(self.training))

    def packed(self) -> Windows:
        """The same samples, with as many as fit in each window. Texts stay as they are, because
        they fill their windows."""
        if not isinstance(self.tokens, Rows):
            return self
        groups = best_fit(self.tokens.lengths[self.training], self.tokens.shape[1])
        packs = [self.training[group].tolist() for group in groups]
        note = f"{len(self.training)} samples are packed into {len(packs)} windows"
        return replace(self, training=np.arange(len(packs)), packs=packs, notes=(*self.notes, note))

    def training_batch(self, numbers: Sequence[int]) -> Batch:
        """Training windows `numbers` as inputs and labels."""
        if self.packs is None or not isinstance(self.tokens, Rows):
            return self.batch(numbers)
        return self.tokens.joined([self.packs[number] for number in numbers])

    def order(self) -> Iterator[int]:
        """Training rows, without end. Each epoch has a new permutation, which depends only on the
        seed and the epoch."""
        epoch = 0
        while True:
            yield from (
                np.random.default_rng((self.seed, 1, epoch)).permutation(self.training).tolist()
            )
            epoch += 1

    def batch(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> Batch:
        """Rows as inputs and labels."""
        return unpacked(self.tokens[rows].astype(np.int64))

    def validation_rows(self, size: int, most: int) -> Iterator[npt.NDArray[np.int64]]:
        """The same held-out rows in each call, `size` at a time: at most `most` times. The last may
        be fewer."""
        for start in range(0, min(len(self.validation), size * most), size):
            yield self.validation[start : start + size]


def pack(tokens: npt.NDArray[Any], length: int, seed: int, name: str) -> Windows:
    """Cut `tokens` into windows of `length` without overlap. Tokens after the last full window are
    dropped.

    Raises `ValueError` that names the source if there are fewer than two windows.
    """
    count = len(tokens) // length
    if count < 2:
        raise ValueError(
            f"{name} has {len(tokens)} tokens, but a sequence length of {length} needs at least "
            f"{2 * length}: one window to train on and one held out"
        )
    rows = tokens[: count * length].reshape(count, length)
    return _split(rows, seed)


def _split(rows: npt.NDArray[Any] | Rows, seed: int, notes: tuple[str, ...] = ()) -> Windows:
    """Hold out some of the rows. There are at least two."""
    order = np.random.default_rng((seed, 0)).permutation(len(rows))
    held_out = max(1, min(len(rows) // VALIDATION_SHARE, MOST_VALIDATION))
    return Windows(rows, np.sort(order[held_out:]), np.sort(order[:held_out]), seed, notes)


@dataclass(frozen=True)
class WindowRequest:
    """Windows to make from `source`; None is the Python standard library.

    Without `length`, windows are as long as the longest sample. For texts they have `USUAL_LENGTH`,
    or a twentieth of the tokens if that is less. They have at most the `positions` of the model.
    """

    source: Path | None
    length: int | None
    """Tokens of a window, and the most of a sample with a completion."""
    seed: int
    as_text: bool = False
    """Whether files of records are read as text."""
    columns: Mapping[str, str] | None = None
    """The columns of records for the keys that are read: {"completion": "answer"}."""
    positions: int | None = None

    def name(self) -> str:
        """The source in errors."""
        return "the Python standard library" if self.source is None else str(self.source)


def load_windows(request: WindowRequest, tokenizer: Tokenizer) -> Windows:
    """Read, encode and pack the source of `request` in windows. A sample with a completion becomes
    a window of its own.

    Raises `ValueError` for fewer than two windows, or for texts and completions together; and the
    errors of `read_items`.
    """
    length, positions, seed = request.length, request.positions, request.seed
    items = read_items(request.source, request.as_text, request.columns)
    first = next(items, None)
    if not isinstance(first, DataRecord):
        tokens = encode(_documents(first, items), tokenizer)
        few = max(len(tokens) // VALIDATION_SHARE, 2)
        usual = min(USUAL_LENGTH, positions or USUAL_LENGTH, few)
        return pack(tokens, length or usual, seed, request.name())
    most = length or positions or MOST_TOKENS
    rows, notes = samples.encode_records(_samples(first, items), tokenizer, most)
    if len(rows) < 2:
        said = f" ({'; '.join(notes)})" if notes else ""
        raise ValueError(
            f"{request.name()} has {len(rows)} samples to learn from{said}, and at least 2 are "
            "needed: one to train on and one held out"
        )
    if length is None:
        rows.shrink()
    return _split(rows, seed, notes)


def _documents(
    first: TextPiece | None, items: Iterable[TextPiece | DataRecord]
) -> Iterator[TextPiece]:
    for item in chain([first] if first is not None else [], items):
        if isinstance(item, DataRecord):
            raise ValueError(
                f"{item.where}: a completion, and what comes before is text; train on one kind at "
                "a time"
            )
        yield item


def _samples(first: DataRecord, items: Iterable[TextPiece | DataRecord]) -> Iterator[DataRecord]:
    for item in chain([first], items):
        if isinstance(item, TextPiece):
            raise ValueError(
                f"text comes after {first.where}, which has a completion; train on one kind at a "
                f"time: {item.text[:40]!r}"
            )
        yield item
