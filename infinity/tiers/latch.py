"""Whether the store can go on: open, failed, closed, or in a forked child. It only ever closes."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from infinity.device import ComputeDevice
from infinity.errors import EngineClosedError

log = logging.getLogger("infinity")


class Latch:
    """Keeps the first failure and tells everybody who asks. Any thread may call it.

    `changed` is the condition of the store: its lock guards the latch, and whoever waits for it
    wakes on a failure.
    """

    def __init__(self, changed: threading.Condition, device: ComputeDevice) -> None:
        self._changed = changed
        self._device = device
        self._process = os.getpid()
        self._failure: tuple[BaseException, str] | None = None  # and what failed
        self._closed = False
        self._listeners: list[Callable[[EngineClosedError], None]] = []

    def add_listener(self, listener: Callable[[EngineClosedError], None]) -> None:
        """Call `listener` once something failed, on the thread that failed; until
        `remove_listener`."""
        with self._changed:
            self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[EngineClosedError], None]) -> None:
        """Undo `add_listener`, if that was not undone before."""
        with self._changed:
            if listener in self._listeners:
                self._listeners.remove(listener)

    @property
    def failed(self) -> bool:
        """Whether something failed for good."""
        return self._failure is not None

    def fail(self, error: BaseException, what: str = "an update") -> EngineClosedError:
        """`what` failed: whoever waits, now or later, gets an error from `error`; returned is one
        like it.

        Only the first failure is kept.
        """
        with self._changed:
            is_first = self._failure is None
            if is_first:
                self._failure = error, what
            self._changed.notify_all()
            told = self._error()
            listeners = tuple(self._listeners) if is_first else ()
        for listener in listeners:
            try:
                listener(told)
            except Exception as later:  # this failure is the one to tell
                log.error(
                    "%s failed (%s), and so did telling of it: %s",
                    what,
                    error,
                    later,
                    exc_info=later,
                )
        return told

    def close(self) -> None:
        """Nothing may begin from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def check(self) -> None:
        """Raise `EngineClosedError` when something failed or the store was closed."""
        with self._changed:
            if self._failure is not None:
                raise self._error()
            self.check_open()

    def check_open(self) -> None:
        """Raise `EngineClosedError` when the store was closed."""
        with self._changed:
            if self._closed:
                raise EngineClosedError("the engine was closed")

    def check_usable(self) -> None:
        """Raise where nothing can be brought: `EngineClosedError` in a forked child, `RuntimeError`
        while a graph is captured."""
        if os.getpid() != self._process:
            raise EngineClosedError(
                "this process was forked from the one that wrapped the model, and has neither its "
                "threads nor its files; use the model there, or start processes with "
                "torch.multiprocessing's 'spawn' and wrap a model in each"
            )
        if self._device.is_capturing():
            raise RuntimeError(
                "a CUDA graph is being captured, and its replay would skip the work of the engine "
                "(bringing parameters, taking gradients); capture only code that uses no "
                "parameters of a wrapped model, or leave graphs out"
            )

    def _error(self) -> EngineClosedError:
        cause, what = self._failure or (None, "")
        error = EngineClosedError(f"{what} failed and the engine cannot go on: {cause}")
        error.__cause__ = cause
        return error
