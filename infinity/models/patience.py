"""Limits the time of foreign Python code that may never end, such as the loops of a chat
template."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

log = logging.getLogger("infinity")

Result = TypeVar("Result")

NOTICE_SECONDS = 10.0
"""The log warns of a call after this many seconds."""
MOST_SECONDS = 60.0
_LOOK_SECONDS = 1.0


class _TooLong(BaseException):
    """Raised inside the call. It is no `Exception`, so that the code does not catch it."""


@dataclass(eq=False)
class _ForeignCall:
    """A call in progress."""

    what: str
    notice: float
    most: float
    thread: int = field(default_factory=threading.get_ident)
    begin: float = field(default_factory=time.monotonic)
    is_told: bool = False


class _CallWatcher:
    """Checks the calls in progress every second, on one thread that ends when there are none. A
    thread per call would take longer than rendering a template."""

    def __init__(self) -> None:
        self._guard = threading.Lock()  # no exception is raised after the end of a call
        self._calls: set[_ForeignCall] = set()
        self._thread: threading.Thread | None = None

    def begin(self, call: _ForeignCall) -> None:
        """Watch `call` until `end`."""
        with self._guard:
            self._calls.add(call)
            if self._thread is None or not self._thread.is_alive():  # a fork also ends it
                self._thread = threading.Thread(
                    target=self._watch, name="infinity-patience", daemon=True
                )
                self._thread.start()

    def end(self, call: _ForeignCall) -> None:
        """Stop watching `call`."""
        with self._guard:
            self._calls.discard(call)

    def _watch(self) -> None:
        while True:
            with self._guard:
                for call in list(self._calls):
                    self._look(call)
                if not self._calls:
                    self._thread = None
                    return
            time.sleep(_LOOK_SECONDS)

    def _look(self, call: _ForeignCall) -> None:
        lasted = time.monotonic() - call.begin
        if lasted >= call.notice and not call.is_told:
            call.is_told = True
            log.warning("%s takes long: it is given %g seconds", call.what, call.most)
        if lasted >= call.most:
            self._calls.discard(call)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(call.thread), ctypes.py_object(_TooLong)
            )


_WATCHER = _CallWatcher()


def within(
    call: Callable[[], Result],
    what: str,
    notice: float = NOTICE_SECONDS,
    most: float = MOST_SECONDS,
) -> Result:
    """The result of `call`. Raises `ValueError` that begins with `what` after `most` seconds.

    Another thread raises the exception in this one. It takes effect between two bytecodes, so a
    single long operation completes first.
    """
    watched = _ForeignCall(what, notice, most)
    try:
        try:
            _WATCHER.begin(watched)
            return call()
        finally:
            _WATCHER.end(watched)
    except _TooLong:
        raise ValueError(f"{what} took more than {most:g} seconds; see its loops") from None
