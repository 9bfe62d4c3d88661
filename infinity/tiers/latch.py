"""Whether the store can continue: open, asleep, failed, closed, or in a forked child. It never
reopens after a failure or `close`."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from infinity.device import ComputeDevice
from infinity.errors import EngineClosedError

log = logging.getLogger("infinity")


class Latch:
    """Keeps the first failure, and raises it in every later `check`. Any thread may call it.

    `changed` is the condition of the store. Its lock guards the latch. A failure wakes all threads
    that wait for it.
    """

    def __init__(self, changed: threading.Condition, device: ComputeDevice) -> None:
        self.changed = changed
        """The condition of the store."""
        self._device = device
        self._process = os.getpid()
        self._failure: tuple[BaseException, str] | None = None  # and what failed
        self._closed = False
        self.asleep = False
        """Whether the store has given its memory back (`infinity.tiers.sleep`)."""
        self._listeners: list[Callable[[EngineClosedError], None]] = []

    def add_listener(self, listener: Callable[[EngineClosedError], None]) -> None:
        """Call `listener` on the first failure, on the thread that failed, until
        `remove_listener`."""
        with self.changed:
            self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[EngineClosedError], None]) -> None:
        """Undo `add_listener`. A second call does nothing."""
        with self.changed:
            if listener in self._listeners:
                self._listeners.remove(listener)

    @property
    def failed(self) -> bool:
        """Whether something failed for good."""
        return self._failure is not None

    def fail(self, error: BaseException, what: str = "an update") -> EngineClosedError:
        """Note that `what` failed, wake all waiting threads, and call the listeners.

        Only the first failure is kept. Returns an error that names it and has it as its cause;
        each later `check` raises an equal error.
        """
        with self.changed:
            is_first = self._failure is None
            if is_first:
                self._failure = error, what
            self.changed.notify_all()
            told = self._error()
            listeners = tuple(self._listeners) if is_first else ()
        for listener in listeners:
            try:
                listener(told)
            except Exception as later:  # `error` is the failure to report
                log.error(
                    "%s failed (%s), and so did telling of it: %s",
                    what,
                    error,
                    later,
                    exc_info=later,
                )
        return told

    def close(self) -> None:
        """Close: from now on `check_open` raises, and all waiting threads wake."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()

    def check(self) -> None:
        """Raise `EngineClosedError` if something failed or the store was closed."""
        with self.changed:
            if self._failure is not None:
                raise self._error()
            self.check_open()

    def check_open(self) -> None:
        """Raise `EngineClosedError` if the store was closed."""
        with self.changed:
            if self._closed:
                raise EngineClosedError("the engine was closed")

    def check_awake(self) -> None:
        """Raise `EngineClosedError` while the store sleeps."""
        if self.asleep:
            raise EngineClosedError(
                "the engine sleeps, and has given its memory back; call engine.wake() first"
            )

    def check_process(self) -> None:
        """Raise `EngineClosedError` in a forked child."""
        if os.getpid() != self._process:
            raise EngineClosedError(
                "this process was forked from the one that wrapped the model, and has neither its "
                "threads nor its files; use the model there, or start processes with "
                "torch.multiprocessing's 'spawn' and wrap a model in each"
            )

    def check_usable(self) -> None:
        """Raise if no block can be fetched: `EngineClosedError` in a forked child and while the
        store sleeps, `RuntimeError` while a CUDA graph is captured."""
        self.check_process()
        self.check_awake()
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
