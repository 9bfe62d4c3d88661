"""Records of a data set: JSON lines, JSON arrays, CSV, parquet, and the format of `datasets`.

Memory holds one record at a time. Parquet takes a batch of records, and a JSON array all of them.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from infinity.errors import InfinityError
from infinity.models.reading import open_regular, parse_json, read_json
from infinity.quantities import format_bytes

LINES, ARRAYS = frozenset((".jsonl", ".ndjson")), frozenset((".json",))
TABLES = {".csv": ",", ".tsv": "\t"}
"""Endings, and the delimiter of fields."""
PARQUET = frozenset((".parquet",))
SUFFIXES = LINES | ARRAYS | TABLES.keys() | PARQUET
"""The endings of files with records."""
MOST_LINE_BYTES = 64 << 20
"""The longest line of JSONL and the longest field of CSV. Memory holds several copies of one."""
MOST_ARRAY_BYTES = 512 << 20
"""The longest JSON array. Memory holds all of it."""
_SAVED, _SPLITS = "dataset_info.json", "dataset_dict.json"


class DataRecord(NamedTuple):
    """One sample as it is stored. `where` is its file and line, for messages."""

    where: str
    values: dict[str, Any]


def read_records(path: Path) -> Iterator[DataRecord]:
    """The records of the file `path`, which has an ending of `SUFFIXES`.

    Raises `ValueError` with the file and the line of an invalid record, and `InfinityError` if a
    package is missing.
    """
    suffix = path.suffix.lower()
    if suffix in PARQUET:
        return _parquet(path)
    if suffix in TABLES:
        return _rows(path, TABLES[suffix])
    return _lines(path) if suffix in LINES else _array(path)


def is_saved(folder: Path) -> bool:
    """Whether `datasets` saved the directory `folder`."""
    return any((folder / name).is_file() for name in (_SAVED, _SPLITS)) and (
        (folder / "state.json").is_file() or (folder / _SPLITS).is_file()
    )


def read_saved(folder: Path) -> Iterator[DataRecord]:
    """The records of a directory that `Dataset.save_to_disk` wrote. Raises `ValueError` for several
    splits, and `InfinityError` if the package datasets is missing."""
    if (folder / _SPLITS).is_file():
        names = sorted(path.name for path in folder.iterdir() if is_saved(path))
        shown = ", ".join(str(folder / name) for name in names)
        raise ValueError(f"{folder} has several splits; give one of them: {shown}")
    load = _required("datasets", folder).load_from_disk
    for number, values in enumerate(load(str(folder)), start=1):
        yield DataRecord(f"{folder}, record {number}", dict(values))


def _required(module: str, path: Path) -> Any:
    try:
        return __import__(module, fromlist=["*"])
    except ImportError as error:
        raise InfinityError(
            f"reading {path} needs the package datasets ({error}); install it with: pip install "
            "'zero-infinity[finetune]'"
        ) from None


def _parquet(path: Path) -> Iterator[DataRecord]:
    parquet = _required("pyarrow.parquet", path)
    number = itertools.count(1)
    with open_regular(path) as handle:
        try:
            for batch in parquet.ParquetFile(handle).iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    yield DataRecord(f"{path}, record {next(number)}", values)
        except (OSError, ValueError) as error:  # every pyarrow error is one of the two
            raise ValueError(f"{path} cannot be read as parquet: {error}") from None


def _rows(path: Path, delimiter: str) -> Iterator[DataRecord]:
    csv.field_size_limit(MOST_LINE_BYTES)
    with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="") as handle:
        rows = csv.reader(handle, delimiter=delimiter, strict=True)
        try:
            names = next(rows, [])
            for row in rows:
                where = f"{path}, line {rows.line_num}"
                if not row:
                    continue
                if len(row) != len(names):
                    raise ValueError(
                        f"{where}: {len(row)} fields, and the first line has {len(names)} names"
                    )
                yield DataRecord(where, dict(zip(names, row, strict=True)))
        except csv.Error as error:
            raise ValueError(f"{path}, line {rows.line_num}: not CSV ({error})") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text ({error.reason})") from None


def _array(path: Path) -> Iterator[DataRecord]:
    """The records of a JSON array, or of JSON lines in a file with the ending of an array."""
    with open_regular(path) as handle:
        first = handle.read(4096).lstrip()[:1]
        if first == b"{":
            handle.seek(0)
            line = handle.readline(MOST_LINE_BYTES)
            if _is_json(line):
                handle.seek(0)
                yield from _lines_of(handle, path)
                return
    found = read_json(path, MOST_ARRAY_BYTES)
    if not isinstance(found, list):
        raise ValueError(
            f"{path} holds no JSON array of records; to train on its characters, give "
            "--data-format text"
        )
    for number, values in enumerate(found, start=1):
        yield _record(f"{path}, record {number}", values)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _lines(path: Path) -> Iterator[DataRecord]:
    with open_regular(path) as handle:
        yield from _lines_of(handle, path)


def _lines_of(handle: BinaryIO, path: Path) -> Iterator[DataRecord]:
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
        if line.strip():
            yield _record(where, parse_json(line.strip(), where))


def _record(where: str, values: Any) -> DataRecord:
    if not isinstance(values, dict):
        raise ValueError(f"{where}: not a JSON object, as every record is")
    return DataRecord(where, values)
