"""How an engine ends: by `close`, with its model, or with the interpreter."""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from infinity.errors import FileError
from infinity.modules.hooks import Hooks
from infinity.optim.updater import Updater
from infinity.sharding.gradient_buffer import GradientBuffer
from infinity.sharding.unit import Unit
from infinity.tiers.store import Store

if TYPE_CHECKING:
    from infinity.durable.session import Session

log = logging.getLogger("infinity")

_CLOSING = "infinity-closing"  # the name of a thread
_MOST_SECONDS = 60.0
_OURS = f"{__name__.partition('.')[0]}."


def end_with(
    model: nn.Module,
    durability: Session | None,
    hooks: Hooks,
    updater: Updater,
    buffer: GradientBuffer | None,
    store: Store,
    units: Sequence[Unit],
) -> weakref.finalize[Any, Any]:
    """Have these parts shut down when `model` is collected or the interpreter ends.

    They must not keep the model alive. Whoever ends them sooner detaches the result, and calls
    `shut_down` with the arguments that it had.
    """
    parts = durability, hooks, updater, buffer, store, units
    return weakref.finalize(model, _collected, os.getpid(), *parts)


def _collected(*parts: Any) -> None:
    """The finalizer of the model: shut down here, or on a thread of its own when this one is in the
    middle of our code, or of operators that somebody intercepts, as torch.compile does while it
    traces.

    A collection may start at any allocation: on a thread that the shutdown joins, or under a lock
    that it needs.
    """
    if os.getpid() != parts[0]:
        return
    frame: FrameType | None = sys._getframe(1)
    detached = bool(_get_current_dispatch_mode_stack())
    while frame is not None and not detached:
        detached, frame = frame.f_globals.get("__name__", "").startswith(_OURS), frame.f_back
    if detached:
        threading.Thread(target=_shut_down_apart, args=parts, name=_CLOSING, daemon=False).start()
    else:
        _shut_down_told(*parts)


def await_closings() -> None:
    """Wait for the engines that end on threads of their own, for at most a minute each."""
    for thread in threading.enumerate():
        if thread.name == _CLOSING:
            thread.join(_MOST_SECONDS)


def _shut_down_apart(
    process: int,
    durability: Session | None,
    hooks: Hooks,
    updater: Updater,
    buffer: GradientBuffer | None,
    store: Store,
    units: Sequence[Unit],
) -> None:
    """`shut_down`, on a thread of its own."""
    store.device.begin_thread()
    _shut_down_told(process, durability, hooks, updater, buffer, store, units)


def _shut_down_told(*parts: Any) -> None:
    """`shut_down` where no caller could be told what the system refuses."""
    try:
        shut_down(*parts)
    except FileError as error:
        log.warning("an engine ended, and left something behind: %s", error)


def shut_down(
    process: int,
    durability: Session | None,
    hooks: Hooks,
    updater: Updater,
    buffer: GradientBuffer | None,
    store: Store,
    units: Sequence[Unit],
) -> None:
    """End every thread, the last that was begun first; the parameters have no data from then on.

    Nothing in a forked child: the threads are not there, and files and locks are the parent's.
    """
    if os.getpid() != process:
        return
    with ExitStack() as stack:  # each of these happens, whatever the others meet
        stack.callback(store.close)
        for unit in units:
            stack.callback(unit.close)
        if buffer is not None:
            stack.callback(buffer.close)
        # May be in the middle of a gather, into memory of the store.
        if units[0].exchange is not None:
            stack.callback(units[0].exchange.close)
        stack.callback(hooks.close)
        stack.callback(updater.close)
        if durability is not None:
            stack.callback(durability.close)
