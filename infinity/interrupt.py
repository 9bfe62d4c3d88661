"""Handles Ctrl-C and similar signals: as a request to end after the current step, and as an
exception that does not interrupt cleanup."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that end a run: from Ctrl-C, from a scheduler or torchrun, and from a closed
terminal."""

_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class Interrupt:
    """A context manager that notes the first of `SIGNALS` in `signal`. The second raises
    `KeyboardInterrupt` with its number.

    Main thread only. The exit restores the previous handlers. If a `KeyboardInterrupt` passes,
    signals stay ignored instead, so that they cannot interrupt the cleanup outside. With
    `only_defaults`, for a process that may continue, handlers of the program stay in place, and the
    exit always restores.
    """

    def __init__(self, only_defaults: bool = False) -> None:
        self.signal: int | None = None
        self._only_defaults = only_defaults
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        self._previous = _catch(self._note, self._only_defaults)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._only_defaults or not isinstance(error, KeyboardInterrupt):
            _restore(self._previous)

    def _note(self, number: int) -> None:
        if self.signal is not None and self._only_defaults:
            raise KeyboardInterrupt(number)
        if self.signal is not None:
            _raise_once(number)
        self.signal = number


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Inside, the first of `SIGNALS` raises `KeyboardInterrupt` with its number. Later signals are
    ignored, so a second Ctrl-C cannot interrupt the cleanup after the first. Main thread only."""
    previous = _catch(_raise_once)
    try:
        yield
    finally:
        _restore(previous)


def _catch(act: Callable[[int], None], only_defaults: bool = False) -> dict[int, Any]:
    """Pass the signals to `act`, with `only_defaults` those without a handler of the program.
    Returns the previous handlers.

    Under nohup SIGHUP stays ignored. If all signals are ignored, a cleanup is in progress, and they
    stay ignored.
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
        if not only_defaults or signal.getsignal(each) in _DEFAULTS
    }


def _restore(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _raise_once(number: int) -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


def _let_go(terminals: list[int]) -> None:
    """Redirect output for a closed terminal to /dev/null. Otherwise each write would fail, and end
    a run that could still save."""
    for descriptor in terminals:
        if not os.isatty(descriptor):
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
