"""What is under way of a model: its forward calls and backward passes, and the uses of units that
they hold.

[Note: calls that never end]
Torch runs no forward hook when a forward ends by what is not an `Exception`, as Ctrl-C does. So a
call remembers the frame that runs it. What is left of calls whose frame is gone is ended before it
can do harm: by the next forward, touch or `end_interrupted`.

[Note: passes]
Backward passes nest, and an exception may cut one off. Each is a `Pass` with uses of its own, and
ends with autograd's.

[Note: one thread]
The bookkeeping below is that of one thread at a time. Another one that begins a forward or backward
meanwhile is refused.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

from infinity.backward import BackwardPass, current_pass, in_backward
from infinity.errors import ShardedParameterError
from infinity.modules.spans import Spans
from infinity.observe import Recorder
from infinity.schedule.runtime import Runtime
from infinity.sharding.gradient_buffer import GradientBuffer
from infinity.sharding.unit import Unit
from infinity.sharding.use import Showing, Unpacking, Use, collected, described


@dataclass
class Call:
    """One forward of a hooked module that is under way."""

    module: nn.Module
    recomputing: bool
    start: float
    shown: Any  # to a profiler
    frame: FrameType | None  # what runs it
    thread: int
    saving: AbstractContextManager[object] | None  # entered for this call
    first_node: int  # the number that autograd gives to the first node that it makes
    checkpoints: bool = False
    """Whether it has entered a checkpoint of its own."""
    uses: list[Showing] = field(default_factory=list)
    """Of the module's units, and what came on top until the call ends."""


@dataclass
class Pass:
    """One backward pass that is under way, or was cut off."""

    watch: BackwardPass
    thread: int
    uses: list[Use] = field(default_factory=list)
    """They end when nobody refers to them."""
    touched: list[Showing] = field(default_factory=list)
    """They do not end before the input of a module has its gradient."""
    is_recorded: bool = False
    """Whether it makes a graph, as far as that is known (`create_graph=True`)."""


class Execution:
    """The calls and passes that are under way, the innermost last; one program has one of these.

    Interleaved micro-batches have one each, of which one runs. The thread that runs the model calls
    all methods, but `check_thread` is for any. `backward_ended` is called after the last pass.
    `end` ends a use at the end of a pass. `check` is called at the end of each, before a forward
    and before a step, to raise where a backward was asked for too much.
    """

    def __init__(
        self,
        runtime: Runtime,
        recorder: Recorder,
        backward_ended: Callable[[], None],
        check: Callable[[], None],
        end: Callable[[Use], None] = Use.end,
    ) -> None:
        self._runtime = runtime
        self._recorder = recorder
        self._backward_ended, self._check, self._end = backward_ended, check, end
        self.calls: list[Call] = []
        self.passes: dict[int, Pass] = {}
        """By autograd's number."""
        # The thread whose forward is under way, see [Note: one thread]
        self._owner: int | None = None
        self._shown: Any = None  # to a profiler: the forward or backward that is under way
        self._backward_since = self._forward_since = self._forward_waited = 0.0

    # One thread at a time

    def check_thread(self, what: str) -> None:
        """Raise `RuntimeError` when another thread is inside of a forward or backward; `what` the
        caller wants to do."""
        me = threading.get_ident()
        going = next(
            (found for found in self.passes.values() if found.watch.alive and found.thread != me),
            None,
        )
        in_forward = None if self._owner == me else self._owner
        others = [in_forward, None if going is None or in_backward() else going.thread]
        busy = next(
            (thread for thread in others if thread is not None and self._is_under_way(thread)), None
        )
        if busy is not None:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            raise RuntimeError(
                f"{what} on thread {threading.current_thread().name}, while {names.get(busy)} runs "
                "a forward or backward of the same wrapped model, which serves one thread at a "
                "time; hold a lock around both, or wrap a model for each"
            )

    def _is_under_way(self, thread: int) -> bool:
        """Whether the forward or backward of another `thread` goes on; an interrupt, or the
        thread's end, may have cut it off."""
        frame = sys._current_frames().get(thread)
        if frame is None:
            return False
        return (
            not self.calls or self.calls[-1].thread != thread or _is_in(self.calls[-1].frame, frame)
        )

    def claim(self, what: str) -> None:
        """This thread runs the model until its outermost forward ends; raises like
        `check_thread`."""
        self.check_thread(what)
        self.unwind()
        self._owner = threading.get_ident()

    def disown(self) -> None:
        """The outermost forward has ended, if it has."""
        if not self.calls:
            self._owner = None
            if not self.passes:
                self._show("")

    # Forwards

    def begin_forward(self) -> None:
        """The outermost forward begins."""
        self.bury()
        self._check()
        self._forward_since, self._forward_waited = time.perf_counter(), self._runtime.waited
        self._show("forward")

    def end_forward(self, now: float) -> None:
        """The outermost forward has ended."""
        self._show("")
        self._recorder.add("model", "forward", self._forward_since, now)
        waited = self._runtime.waited - self._forward_waited
        self._runtime.forward_seconds += now - self._forward_since - waited

    def unwind(self) -> None:
        """End the calls that are not under way any more; outside of a backward, which may run in
        other threads."""
        me = threading.get_ident()
        while self.calls:
            last = self.calls[-1]
            if last.thread == me and _is_in(last.frame, sys._getframe()):
                break
            self._abandon(self.calls.pop())

    def _abandon(self, call: Call) -> None:
        self._recorder.hide(call.shown)
        # The hooks of another thread are out of reach.
        if call.saving is not None and call.thread == threading.get_ident():
            call.saving.__exit__(None, None, None)
        for use in call.uses:
            use.end()
        self.disown()

    # Backwards

    def backward_pass(self) -> Pass:
        """The innermost backward pass of this thread."""
        number = current_pass()
        if number in self.passes:
            return self.passes[number]
        if not self.passes:
            self._backward_since = time.perf_counter()
            self._show("backward")
        watch = BackwardPass(lambda: self._end_pass(found), lambda: self._end_uses(found))
        found = self.passes[watch.number] = Pass(watch, threading.get_ident())
        return found

    def release_touched(self, units: Sequence[Unit]) -> None:
        """The input of a module that uses `units` has its gradient: what was touched may end."""
        found = next(
            (each for number, each in self.passes.items() if number == current_pass()), None
        )
        if found is not None:
            found.uses += [use for use in found.touched if use.unit in units]
            found.touched = [use for use in found.touched if use.unit not in units]
            self.sweep()

    def sweep(self) -> None:
        """End the uses of backward passes that nobody refers to any more."""
        for found in self.passes.values():
            uses, found.uses = found.uses, []
            found.uses += _swept(uses)

    def _end_pass(self, found: Pass) -> None:
        """The pass is complete. Who still has a saved view would see other bytes there soon."""
        kept = [name for use in found.uses if isinstance(use, Unpacking) for name in collected(use)]
        self._drop(found)
        self._check()
        if kept:
            raise ShardedParameterError(
                f"a view of {described(kept)}, saved by autograd, outlives the "
                "backward: as a gradient that a custom autograd function returned, or in an "
                "attribute; return or keep a copy (.clone())"
            )

    def bury(self) -> None:
        """End the passes that an exception cut off."""
        for found in [found for found in self.passes.values() if not found.watch.alive]:
            self._drop(found)

    def _drop(self, found: Pass) -> None:
        self.passes.pop(found.watch.number, None)
        self._end_uses(found)
        if not self.passes:
            self._show("forward" if self.calls else "")
            self._recorder.add("model", "backward", self._backward_since, time.perf_counter())
            self._backward_ended()

    def _end_uses(self, found: Pass) -> None:
        """The pass has ended, or was cut off: its parameters are handles again."""
        uses, found.uses, found.touched = [*found.uses, *found.touched], [], []
        for use in uses:
            self._end(use)

    # All of it

    def pause(self) -> None:
        """Another micro-batch goes on."""
        now = time.perf_counter()
        if self.passes:
            self._recorder.add("model", "backward", self._backward_since, now)
        elif self.calls:
            self.end_forward(now)
        self._show("")

    def resume(self) -> None:
        """This one goes on."""
        self._show("backward" if self.passes else "forward" if self.calls else "")
        self._forward_since = self._backward_since = time.perf_counter()
        self._forward_waited = self._runtime.waited

    def close(self) -> None:
        """End all calls and passes."""
        while self.calls:
            self._abandon(self.calls.pop())
        for found in list(self.passes.values()):
            self._drop(found)

    def _show(self, name: str) -> None:
        """To a profiler: what went on so far has ended, and `name`, if that has letters, begins."""
        self._recorder.hide(self._shown)
        self._shown = self._recorder.show("model", name) if name else None


class Interleaving(Protocol):
    """Who interleaves several executions, one at a time (`infinity.modules.interleave`)."""

    def switch_at(self, unit: Unit) -> None:
        """The execution that runs is about to use `unit`, or to have a gradient of it; others may
        run before this returns."""

    def collect(self, unit: Unit, index: int, gradient: torch.Tensor) -> None:
        """The execution that runs has the gradient of parameter `index`, for
        `unit.gradients.add`."""


class Executions:
    """The executions of one model. One runs; there are several while an `Interleaving` interleaves
    them.

    The thread that runs the model calls all methods, but `check_thread` is for any. `buffer` is
    where gradients are collected; what it holds goes home when the last backward has ended. `spans`
    are the turns of units on several ranks.

    [Note: parameters that another micro-batch shows]
    A micro-batch that reads a parameter which another one shows begins no use of its own. So a use
    that ends while somebody refers to its parameters lingers until nobody does.
    """

    def __init__(
        self,
        runtime: Runtime,
        recorder: Recorder,
        buffer: GradientBuffer | None,
        check: Callable[[], None],
        spans: Spans | None = None,
    ) -> None:
        self._runtime, self._check, self._spans = runtime, check, spans
        self._recorder = recorder
        self._buffer = buffer
        self.backwards = 0
        """How many backwards have ended, one inside of another one not counted."""
        self._interleaver: Interleaving | None = None
        self._lingering: list[Use] = []
        self.now = self.new()
        """What is under way."""

    @property
    def interleaver(self) -> Interleaving | None:
        """What interleaves several executions; None while there is one."""
        return self._interleaver

    @interleaver.setter
    def interleaver(self, interleaver: Interleaving | None) -> None:
        if self._spans is not None:
            self._spans.rest(interleaver is not None)
        self._interleaver = interleaver

    def new(self) -> Execution:
        """An execution of which nothing is under way."""
        return Execution(self._runtime, self._recorder, self._backward_ended, self._check, self.end)

    def exchange(self, execution: Execution) -> Execution:
        """Leave the execution that is under way for another one; returns the one that was left."""
        left, self.now = self.now, execution
        left.pause()
        self._lingering = _swept(self._lingering)
        execution.resume()
        return left

    def end(self, use: Use) -> None:
        """End `use`. See [Note: parameters that another micro-batch shows]."""
        if self._interleaver is not None and isinstance(use, Showing):
            self._lingering = _swept([*self._lingering, use])
        else:
            use.end()

    def end_lingering(self) -> list[str]:
        """No micro-batch goes on: end all uses; returns the names of the parameters that somebody
        still refers to."""
        uses, self._lingering = self._lingering, []
        kept = [name for use in uses for name in collected(use)]
        for use in uses:
            use.end()
        return kept

    def end_interrupted(self) -> None:
        """End what an exception or an interrupt cut off: forwards, and a backward. Does nothing
        inside of either."""
        if in_backward():
            return
        self.check_thread("a step was asked for")
        self.now.unwind()
        if not self.now.calls:
            self.now.bury()
            self._check()

    def check_thread(self, what: str) -> None:
        """Raise `RuntimeError` when another thread is inside of a forward or backward; `what` the
        caller wants to do."""
        self.now.check_thread(what)

    def refuse_inside(self, what: str) -> None:
        """Raise `RuntimeError` inside of a forward, a backward, or interleaved micro-batches."""
        self.check_thread(what)
        self.now.unwind()
        if self.interleaver is not None or self.now.calls or in_backward():
            raise RuntimeError(
                f"{what} cannot be called inside of itself, nor of a forward or backward "
                "of its model"
            )

    def running(self) -> nn.Module | None:
        """The innermost hooked module that is called."""
        return self.now.calls[-1].module if self.now.calls else None

    def begin_forward(self) -> None:
        """The outermost forward begins."""
        self.now.begin_forward()
        if self._spans is not None:
            self._spans.begin_forward(torch.is_grad_enabled())

    def use(self, unit: Unit) -> None:
        """The forward is about to use `unit`."""
        if self._spans is not None:
            self._spans.use(unit)

    def begin_turn(self, unit: Unit) -> None:
        """The backward is about to use `unit`."""
        if self._spans is not None:
            self._spans.turn(unit)
        elif self._buffer is not None:
            self._buffer.begin_turn(unit.gradients)

    def collect(self, unit: Unit) -> None:
        """The backward has a gradient of `unit`."""
        self.now.backward_pass()
        if self._spans is not None:
            self.now.sweep()
            self._spans.collect(unit)

    def flush(self) -> None:
        """Send what gradients were collected home: no backward brings more of them."""
        if self._spans is not None:
            self._spans.end()
        if self._buffer is not None:
            self._buffer.flush()

    def _backward_ended(self) -> None:
        self.backwards += 1
        if self.interleaver is None:
            self.flush()


def _swept(uses: Sequence[Use]) -> list[Use]:
    """Those of `uses` that somebody refers to; the others are ended."""
    left = []
    for use in uses:
        if use.referenced():
            left.append(use)
        else:
            use.end()
    return left


def caller() -> FrameType | None:
    """The frame that called the hook that calls this."""
    frame: FrameType | None = sys._getframe(2)
    # Of `uncompiled`.
    while frame is not None and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame":
        frame = frame.f_back
    return frame


def is_compiling() -> bool:
    """Whether torch.compile compiles the frames that call the hook that calls this."""
    frame = sys._getframe(2)
    # Of `uncompiled`: it notes what compiles, and stops it until the hook ends.
    return (
        frame.f_globals.get("__name__") == "torch._dynamo.eval_frame"
        and frame.f_locals.get("prior") is not None
    )


def _is_in(frame: FrameType | None, caller: FrameType | None) -> bool:
    """Whether `frame` is `caller`, or one of those that led there."""
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None
