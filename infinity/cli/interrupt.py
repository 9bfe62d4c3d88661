"""Ctrl-C and its like: as a request, where a run ends after the current step, and as an exception
that clean-up survives."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends a run: Ctrl-C, a scheduler or torchrun, and a terminal that is closed."""


class Interrupt:
    """Between enter and exit, notes the first of `SIGNALS` in `signal`; the second raises
    `KeyboardInterrupt` with its number.

    Main thread only. The previous handlers come back on exit, unless a `KeyboardInterrupt` passes:
    then further signals stay ignored, so that they cannot cut off what encloses this and cleans up.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        self._previous = _catch(self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, KeyboardInterrupt):
            _restore(self._previous)

    def _note(self, number: int) -> None:
        if self.signal is not None:
            _raise_once(number)
        self.signal = number


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Inside, the first of `SIGNALS` raises `KeyboardInterrupt` with its number; later ones are
    ignored.

    So a second Ctrl-C cannot cut off what the first one made the program clean up. Main thread
    only.
    """
    previous = _catch(_raise_once)
    try:
        yield
    finally:
        _restore(previous)


def _catch(act: Callable[[int], None]) -> dict[int, Any]:
    """Let `act` have the signals; returns their handlers before.

    Under nohup SIGHUP stays ignored. Where all are ignored, an interruption is being cleaned up,
    and all stay so.
    """
    ignored = [each for each in SIGNALS if signal.getsignal(each) == signal.SIG_IGN]
    if len(ignored) == len(SIGNALS):
        return {}
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _let_go(terminals)
        act(number)

    return {
        each: signal.signal(each, handle)
        for each in SIGNALS
        if each != signal.SIGHUP or each not in ignored
    }


def _restore(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _raise_once(number: int) -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


def _let_go(terminals: list[int]) -> None:
    """Send what is written to a terminal that is gone to nowhere: each write would fail, and end a
    run that could save."""
    for descriptor in terminals:
        if not os.isatty(descriptor):
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
