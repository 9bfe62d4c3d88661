"""Each call of each entry fails with each of its errors, in a directory that is as before."""

from __future__ import annotations

import argparse
import logging
import shutil
import tempfile
import time
import zlib
from pathlib import Path
from typing import NamedTuple

import torch

from failing_calls.calls import ERRORS, Call, code_of, failing
from failing_calls.entries import CommandError, Entry, entries
from support.alarm import Hang, ending

PATIENCE = 60
"""Seconds after which a case is one that hangs."""


_WAYS_OUT = ("; ", ", or ", " or remove it")
_MISSING = (
    "does not exist",
    "has neither",
    "holds neither",
    "has no ",
    "there is no such",
    "cannot be loaded",
    "does not describe",
)
"""What a sentence says of a file that another library, or `Path.is_file`, could not see."""


class Case(NamedTuple):
    """A call of an entry, and the error that it gives."""

    entry: str
    call: Call
    error: str

    def __str__(self) -> str:
        kind, site, name = self.call
        return f"{self.entry}: {self.error} from {kind} of {name or '.'} in {site}"


class Walk:
    """The cases of one entry, below `where`."""

    def __init__(self, name: str, entry: Entry, where: Path) -> None:
        self._name, self._entry, self._where = name, entry, where
        self._start = where / "start"
        self._start.mkdir()
        entry.prepare(self._start)

    def cases(self) -> list[Case]:
        """Of all calls that the entry makes, with every error."""
        with failing(at := self._copy()) as calls:
            self._entry.act(at)
        shutil.rmtree(at)
        return [
            Case(self._name, call, error)
            for call in sorted(calls.made)
            for error in ERRORS[call.kind]
        ]

    def wrong(self, case: Case) -> str | None:
        """What is not as it should be; None where all is well."""
        at = self._copy()
        try:
            with ending(PATIENCE):
                return self._tried(case, at)
        except Hang:
            return "hangs"
        finally:
            shutil.rmtree(at, ignore_errors=True)

    def _copy(self) -> Path:
        return Path(shutil.copytree(self._start, self._where / "work"))

    def _tried(self, case: Case, at: Path) -> str | None:
        found: str | None = None
        with failing(at, case.call, code_of(case.error)) as calls:
            try:
                self._entry.act(at)
            except self._entry.refused as error:
                if calls.failed is None:
                    return f"refused without a failing call: {error!r}"
                found = unclear(error, at)
            except Exception as error:
                found = f"ended in {type(error).__name__}: {error}"
        try:
            self._entry.check(at)
        except Exception as error:
            lost = f"then {type(error).__name__}: {error}"
            return f"{found}; {lost}" if found else lost
        return found


def unclear(error: Exception, at: Path) -> str | None:
    """Where the text of `error` does not name a path below `at`, or no way out."""
    text = str(error).strip()
    lines = [line for line in text.splitlines() if line.startswith("infinity: ")]
    if isinstance(error, CommandError):
        if "Traceback" in text or "unexpected" in text or not lines:
            return f"no sentence: {text}"
        text = lines[-1]
    if str(at) not in text:
        return f"names no path: {text}"
    if not any(mark in text for mark in (*_WAYS_OUT, *_MISSING)):
        return f"no way out: {text}"
    return None


def chosen(cases: list[Case], most: int | None) -> list[Case]:
    """At most `most` errors of each call, by its name; None for all of them."""
    if most is None:
        return cases
    kept: dict[Call, list[Case]] = {}
    for case in sorted(cases, key=lambda each: zlib.crc32(str(each).encode())):
        kept.setdefault(case.call, []).append(case)
    return [case for found in kept.values() for case in found[:most]]


def main() -> None:
    """Walk the entries that the command line names, and print what is wrong."""
    parser = argparse.ArgumentParser(prog="failing_calls", description=__doc__)
    parser.add_argument("--errors", type=int, help="errors of each call; all of them else")
    parser.add_argument("--entry", action="append", help="an entry; all of them else")
    options = parser.parse_args()
    logging.getLogger("infinity").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    found = 0
    for name, entry in entries().items():
        if options.entry and name not in options.entry:
            continue
        begin = time.process_time()
        with tempfile.TemporaryDirectory() as directory:
            walk = Walk(name, entry, Path(directory))
            cases = chosen(walk.cases(), options.errors)
            for case in cases:
                wrong = walk.wrong(case)
                if wrong is not None:
                    found += 1
                    print(f"{case}: {wrong}", flush=True)
        seconds = time.process_time() - begin
        print(f"{name}: {len(cases)} cases, {seconds:.0f} s", flush=True)
    if found:
        raise SystemExit(f"{found} cases are not as they should be")
