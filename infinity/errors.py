"""Errors a user can meet. Wrong input is a `ValueError`; a failing world is a typed error that
carries its context."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

_FIRST_CUFILE_ERROR = 5000  # above every errno
_FRAMES = re.compile(r"\n(?:Exception raised from |C\+\+ CapturedTraceback|frame #0: )")
_SOURCE = re.compile(r"^\[[^][\s]*:\d+\] ")  # "[.../pair.cc:537] Read error"


class InfinityError(Exception):
    """Base of every error that `infinity` raises on purpose."""


class ConfigError(InfinityError, ValueError):
    """A configuration key or value is unknown, contradictory or cannot work; nothing was
    changed."""


class WeightsError(ConfigError):
    """A checkpoint is damaged, or lacks needed tensors under their names."""


class CheckpointError(InfinityError, RuntimeError):
    """A checkpoint cannot be written, is not there, incomplete or damaged, or is of another model,
    optimizer or version."""


class BudgetError(ConfigError):
    """A memory budget is too small (invariant I10); names the smallest budget that suffices."""


class ShardedParameterError(InfinityError, RuntimeError):
    """A parameter's data was touched while it lives on another tier."""


class PathInUseError(InfinityError, RuntimeError):
    """Another process, or another engine of this one, uses the same NVMe path; names its pid."""


class EngineClosedError(InfinityError, RuntimeError):
    """The engine was closed, sleeps, or failed earlier; the first failure is the `__cause__`."""


class NonFiniteError(InfinityError, ArithmeticError):
    """Gradients stayed infinite or NaN at the smallest loss scale; nothing was updated.

    `parameter` is the name of the first such parameter, in the order of the model.
    """

    def __init__(self, message: str, parameter: str) -> None:
        super().__init__(message)
        self.parameter = parameter


class NvmeError(InfinityError, OSError):
    """An I/O moved fewer bytes than asked (invariant I4), of `what`, if it has a name.

    Attributes: `operation` ("read" or "write"), `path`, `offset`, `asked` and `done` (bytes), and
    `errno` of `OSError` (0 when the file ended before the asked bytes; from 5000 on one of cuFile's
    own codes, when a GPU was read to directly).
    """

    def __init__(
        self,
        operation: str,
        path: str,
        offset: int,
        code: int,
        asked: int,
        done: int,
        what: str = "",
    ) -> None:
        reason = os.strerror(code) if code else "the file ends before the asked bytes"
        if code >= _FIRST_CUFILE_ERROR:
            reason = f"cuFile error {code}"
        of_what = f" (for {what})" if what else ""
        text = (
            f"{operation} of {asked} bytes at offset {offset} stopped after {done}: "
            f"{reason}{of_what}"
        )
        super().__init__(code, text, path)
        self.operation = operation
        self.path = path
        self.offset = offset
        self.asked = asked
        self.done = done


_NO_ACCESS = "give this user access, or choose another path"
_NO_ROOM = "free some of its space, or choose another path"
_FILES = "raise the limit with `ulimit -n`, or let programs close files"
_WAYS_OUT = {
    errno.EACCES: _NO_ACCESS,
    errno.EPERM: _NO_ACCESS,
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.EFBIG: "raise the limit with `ulimit -f`, or choose another file system",
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.ENOMEM: "free some host memory",
    errno.EIO: "see what `dmesg` says of the drive, or choose another one",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ENOENT: "create it, or choose another path",
    errno.EEXIST: "remove it, or choose another path",
    errno.EBUSY: "end what uses it, or choose another path",
    errno.ETXTBSY: "end what uses it, or choose another path",
}


class FileError(InfinityError, OSError):
    """The system refuses a call on a file or a directory; names its path and the way out.

    It also is the subclass of `OSError` that Python has for its errno, such as `FileNotFoundError`.
    """

    def __new__(cls, code: int, path: str, text: str = "") -> FileError:
        kind = _FILE_ERRORS.get(type(OSError(code, "")), FileError)
        return OSError.__new__(kind, code, text or with_way_out(code), path)

    def __init__(self, code: int, path: str, text: str = "") -> None:
        """`text` is the reason and the way out, if there is a better one than for any file."""
        super().__init__(code, text or with_way_out(code), path)

    def __reduce__(self) -> tuple[type[FileError], tuple[int, str, str]]:
        return FileError, (self.errno or 0, self.filename, self.strerror or "")

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


_FILE_ERRORS = {
    plain: type(FileError.__name__, (FileError, plain), {"__module__": __name__})
    for plain in {type(OSError(code, "")) for code in errno.errorcode} - {OSError}
}


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """An `OSError` inside becomes a `FileError` of `path`."""
    try:
        yield
    except InfinityError:
        raise
    except OSError as error:
        if error.errno is None:
            raise
        raise FileError(error.errno, os.fsdecode(path)) from None


def with_way_out(code: int) -> str:
    """The meaning of an errno, and the way out."""
    return f"{os.strerror(code)}; {_WAYS_OUT.get(code, 'choose another path')}"


class CorruptStateError(InfinityError, RuntimeError):
    """Bytes on NVMe differ from the bytes that were written.

    Attributes: the `unit` and the `kind` of its state, and the `path` and `offset` (bytes) of the
    first damaged piece.
    """

    def __init__(self, unit: str, kind: str, path: str, offset: int, pieces: int = 1) -> None:
        more = f", the first of {pieces} damaged pieces" if pieces > 1 else ""
        super().__init__(
            f"{path} is damaged at offset {offset}{more}: the checksum of {unit} ({kind}) is not "
            "that of what was written; the drive or the memory lost bits; go on from a "
            "checkpoint, in another directory"
        )
        self.unit = unit
        self.kind = kind
        self.path = path
        self.offset = offset


def first_problem(error: ValidationError) -> str:
    """The first thing that a model of pydantic refuses, in one line."""
    found = error.errors(include_url=False)[0]
    where = "".join(f"{each}: " for each in [".".join(map(str, found["loc"]))] if each)
    text = found["msg"].removeprefix("Value error, ")
    if found["type"] in ("value_error", "missing", "json_invalid"):
        return where + text
    return f"{where}{text}, not {in_words(found['input'])}"


def in_words(value: object) -> str:
    """A value of a wrong kind, in a few words: "None", "'x'", "the class Linear", "a value of type
    dict"."""
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to write some
        return f"a number of {value.bit_length()} bits"
    if value is None or isinstance(value, (str, int, float, os.PathLike)):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:60]}..."
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"a value of type {type(value).__name__}"


def sentence(error: BaseException) -> str:
    """`error` in one line: "PATH: reason" for an `OSError`, and the cause that an `InfinityError`
    names."""
    if isinstance(error, OSError) and error.strerror:
        text = reason(error)
        if error.filename is not None:
            text = f"{os.fsdecode(error.filename)}: {text}"
    else:
        text = _without_frames(str(error)) or type(error).__name__
    if (
        isinstance(error, InfinityError)
        and error.__cause__ is not None
        and reason(error.__cause__) not in text
    ):
        text = f"{text} (because: {sentence(error.__cause__)})"
    return " ".join(text.split())


def reason(error: BaseException) -> str:
    """The text of `error`, without the path of an `OSError`, and with a way out for errors of the
    system."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    is_plain = error.errno and error.strerror == os.strerror(error.errno)
    return with_way_out(error.errno or 0) if is_plain else error.strerror


def _without_frames(text: str) -> str:
    """A C++ error of torch without its source position and its stack."""
    return _SOURCE.sub("", _FRAMES.split(text, maxsplit=1)[0]).strip()
