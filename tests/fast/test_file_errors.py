"""What the system refuses is one error, which names the path and the way out."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import pytest

from infinity.errors import ConfigError, FileError, InfinityError, naming, sentence


@pytest.mark.parametrize("code", sorted(errno.errorcode))
def test_it_is_what_python_has_for_its_errno(code: int) -> None:
    with pytest.raises(FileError) as caught, naming("/a/b"):
        raise OSError(code, os.strerror(code))
    error = caught.value
    assert isinstance(error, type(OSError(code, "")))
    assert isinstance(error, InfinityError)
    assert (error.errno, error.filename) == (code, "/a/b")
    assert sentence(error) == str(error)
    assert str(error).startswith(f"/a/b: {os.strerror(code)}; ")


def test_another_process_gets_the_same_error() -> None:
    error = FileError(errno.ENOENT, "/a")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), copy.errno) == (str(error), error.errno)


def test_an_error_of_ours_stays_as_it_is() -> None:
    for error in (ConfigError("x"), FileError(errno.EIO, "/inner"), ValueError("y")):
        with pytest.raises(type(error)) as caught, naming(Path("/outer")):
            raise error
        assert caught.value is error


def test_a_plain_error_of_the_system_gets_the_way_out() -> None:
    assert sentence(OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/a")) == (
        "/a: Too many open files; raise the limit with `ulimit -n`, or let programs close files"
    )
