"""How an engine ends: by `close`, with its model, or with the interpreter."""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Shutdown:
    """The parts of an engine that are shut down at its end, in this order. They must not keep the
    model alive."""

    durability: Session | None
    updater: Updater
    hooks: Hooks
    buffer: GradientBuffer | None
    units: Sequence[Unit]
    store: Store
    process: int = field(default_factory=os.getpid)
    """The process that the engine was made in."""


def end_with(model: nn.Module, parts: Shutdown) -> weakref.finalize[Any, Any]:
    """Shut the parts of `parts` down when `model` is collected or the interpreter ends. A caller
    that ends them sooner detaches the result, and calls `shut_down`."""
    return weakref.finalize(model, _collected, parts)


def _collected(parts: Shutdown) -> None:
    """The finalizer of the model: shut down here, or on a thread of its own if this thread runs our
    code or intercepted operators, as torch.compile does while it traces.

    A collection may start at any allocation: on a thread that the shutdown joins, or under a lock
    that it needs.
    """
    if os.getpid() != parts.process:
        return
    frame: FrameType | None = sys._getframe(1)
    detached = bool(_get_current_dispatch_mode_stack())
    while frame is not None and not detached:
        detached, frame = frame.f_globals.get("__name__", "").startswith(_OURS), frame.f_back
    if detached:
        ends = threading.Thread(target=_shut_down_apart, args=(parts,), name=_CLOSING, daemon=False)
        ends.start()
    else:
        _shut_down_told(parts)


def await_closings() -> None:
    """Wait for the engines that end on threads of their own, for at most a minute each."""
    for thread in threading.enumerate():
        if thread.name == _CLOSING:
            thread.join(_MOST_SECONDS)


def _shut_down_apart(parts: Shutdown) -> None:
    """`shut_down`, on a thread of its own."""
    parts.store.begin_thread()
    _shut_down_told(parts)


def _shut_down_told(parts: Shutdown) -> None:
    """`shut_down` without a caller: an error of the system becomes a warning."""
    try:
        shut_down(parts)
    except FileError as error:
        log.warning("an engine ended, and left something behind: %s", error)


def shut_down(parts: Shutdown) -> None:
    """End every thread, the last that was begun first; the parameters have no data from then on.

    Does nothing in a forked child: the threads are not there, and files and locks belong to the
    parent.
    """
    if os.getpid() != parts.process:
        return
    units = parts.units
    with ExitStack() as stack:  # each of these happens, even if another one fails
        stack.callback(parts.store.close)
        for unit in units:
            stack.callback(unit.close)
        if parts.buffer is not None:
            stack.callback(parts.buffer.close)
        # May be in the middle of a gather, into memory of the store.
        if units[0].exchange is not None:
            stack.callback(units[0].exchange.close)
        stack.callback(parts.hooks.close)
        stack.callback(parts.updater.close)
        if parts.durability is not None:
            stack.callback(parts.durability.close)
