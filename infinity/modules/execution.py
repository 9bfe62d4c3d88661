"""The forward calls and backward passes of a model that are under way, and the uses of units that
they hold.

[Note: calls that never end]
Torch runs no forward hook when a forward ends with Ctrl-C, or with any other `BaseException` that
is no `Exception`. So a call remembers the frame that runs it. If this frame is gone, the next
forward, touch or `end_interrupted` ends the call.

[Note: passes]
Backward passes nest, and an exception may cut one off. Each is a `Pass` with uses of its own. It
ends when autograd's pass ends.

[Note: one thread]
The state below belongs to one thread at a time. Another thread that begins a forward or backward
meanwhile gets an error.
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
from infinity.compilation import frames
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
    frame: FrameType | None  # the frame that runs it
    thread: int
    saving: AbstractContextManager[object] | None  # hooks entered for it
    first_node: int  # the number that autograd gives to its first node
    checkpoints: bool = False
    """Whether it has entered a checkpoint of its own."""
    uses: list[Showing] = field(default_factory=list)
    """The uses of the module's units, and the uses that are added before the call ends."""


@dataclass
class Pass:
    """One backward pass that is under way, or was cut off."""

    watch: BackwardPass
    thread: int
    uses: list[Use] = field(default_factory=list)
    """They end when nothing refers to their views."""
    touched: list[Showing] = field(default_factory=list)
    """They stay until the input of their module has its gradient."""
    is_recorded: bool = False
    """Whether it is known to make a graph (`create_graph=True`)."""


class Execution:
    """The calls and passes under way, the innermost last.

    A model has one execution. Interleaved micro-batches have one each, and one of these runs. Any
    thread may call `check_thread`; the thread that runs the model calls the other methods.
    `backward_ended` is called after the last pass. `end` ends a use at the end of a pass. `check`
    is called at the end of each pass, before a forward and before a step. It raises if the model
    was used in a way that the engine cannot serve.
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
        # The thread of the forward under way, see [Note: one thread]
        self._owner: int | None = None
        self._shown: Any = None  # to a profiler: the forward or backward that is under way
        self._backward_since = self._forward_since = self._forward_waited = 0.0

    # One thread at a time

    def check_thread(self, what: str) -> None:
        """Raise `RuntimeError` if another thread is inside a forward or backward. `what` names the
        action of the caller."""
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
        """Whether the forward or backward of another `thread` still runs. An interrupt, or the end
        of the thread, may have cut it off."""
        frame = sys._current_frames().get(thread)
        if frame is None:
            return False
        return (
            not self.calls or self.calls[-1].thread != thread or _is_in(self.calls[-1].frame, frame)
        )

    def claim(self, what: str) -> None:
        """Let this thread run the model until its outermost forward ends. Raises like
        `check_thread`."""
        self.check_thread(what)
        self.unwind()
        self._owner = threading.get_ident()

    def disown(self) -> None:
        """If the outermost forward has ended, let other threads run the model."""
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
        """End the calls that have lost their frame. Not called in a backward, which may run in
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
        """The input of a module that uses `units` has its gradient: their touched uses may end."""
        found = next(
            (each for number, each in self.passes.items() if number == current_pass()), None
        )
        if found is not None:
            found.uses += [use for use in found.touched if use.unit in units]
            found.touched = [use for use in found.touched if use.unit not in units]
            self.sweep()

    def sweep(self) -> None:
        """End the uses of backward passes with views that nothing refers to any more."""
        for found in self.passes.values():
            uses, found.uses = found.uses, []
            found.uses += _swept(uses)

    def _end_pass(self, found: Pass) -> None:
        """The pass is complete. Raises `ShardedParameterError` if a saved view outlives it, because
        its bytes will change."""
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
        """Another micro-batch continues."""
        now = time.perf_counter()
        if self.passes:
            self._recorder.add("model", "backward", self._backward_since, now)
        elif self.calls:
            self.end_forward(now)
        self._show("")

    def resume(self) -> None:
        """This micro-batch continues."""
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
        """Tell a profiler that the forward or backward has ended, and that `name` begins unless it
        is empty."""
        self._recorder.hide(self._shown)
        self._shown = self._recorder.show("model", name) if name else None


class Interleaving(Protocol):
    """Interleaves several executions, one at a time (`infinity.modules.interleave`)."""

    def switch_at(self, unit: Unit) -> None:
        """The running execution is about to use `unit`, or to have a gradient of it. Other
        executions may run before this returns."""

    def collect(self, unit: Unit, index: int, gradient: torch.Tensor) -> None:
        """The running execution has the gradient of parameter `index`: pass it to
        `unit.gradients.add` in its turn."""


class Executions:
    """The executions of one model. One of them runs. There are several only while an `Interleaving`
    interleaves them.

    Any thread may call `check_thread`; the thread that runs the model calls the other methods.
    `buffer` collects gradients. Its content goes home when the last backward has ended. `spans` has
    the turns of units on several ranks.

    [Note: parameters that another micro-batch shows]
    A micro-batch that reads a parameter while another one shows it begins no use of its own. So a
    use that ends while something refers to its parameters lingers until nothing does.
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
        """How many backwards have ended. A backward inside another one does not count."""
        self._interleaver: Interleaving | None = None
        self._lingering: list[Use] = []
        self.now = self.new()
        """The execution that runs."""

    @property
    def interleaver(self) -> Interleaving | None:
        """The interleaver of several executions; None while there is one execution."""
        return self._interleaver

    @interleaver.setter
    def interleaver(self, interleaver: Interleaving | None) -> None:
        if self._spans is not None:
            self._spans.rest(interleaver is not None)
        self._interleaver = interleaver

    def new(self) -> Execution:
        """An execution with nothing under way."""
        return Execution(self._runtime, self._recorder, self._backward_ended, self._check, self.end)

    def exchange(self, execution: Execution) -> Execution:
        """Pause the running execution and resume `execution`. Returns the paused one."""
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
        """All micro-batches have ended: end the lingering uses. Returns the names of the parameters
        that something still refers to."""
        uses, self._lingering = self._lingering, []
        kept = [name for use in uses for name in collected(use)]
        for use in uses:
            use.end()
        return kept

    def end_interrupted(self) -> None:
        """End the forwards and the backward that an exception or an interrupt cut off. Does nothing
        inside a backward. Raises like `check_thread`."""
        if in_backward():
            return
        self.check_thread("a step was asked for")
        self.now.unwind()
        if not self.now.calls:
            self.now.bury()
            self._check()

    def check_thread(self, what: str) -> None:
        """`Execution.check_thread` of the running execution."""
        self.now.check_thread(what)

    def refuse_inside(self, what: str) -> None:
        """Raise `RuntimeError` inside a forward, a backward, or interleaved micro-batches."""
        self.check_thread(what)
        self.now.unwind()
        if self.interleaver is not None or self.now.calls or in_backward():
            raise RuntimeError(
                f"{what} cannot be called inside of itself, nor of a forward or backward "
                "of its model"
            )

    def running(self) -> nn.Module | None:
        """The module of the innermost call; None outside of calls."""
        return self.now.calls[-1].module if self.now.calls else None

    def begin_forward(self) -> None:
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
        """Send the collected gradients home: no backward brings more of them."""
        if self._spans is not None:
            self._spans.end()
        if self._buffer is not None:
            self._buffer.flush()

    def _backward_ended(self) -> None:
        self.backwards += 1
        if self.interleaver is None:
            self.flush()


def _swept(uses: Sequence[Use]) -> list[Use]:
    """The `uses` with views that something refers to. Ends the other uses."""
    left = []
    for use in uses:
        if use.referenced():
            left.append(use)
        else:
            use.end()
    return left


def caller() -> FrameType | None:
    """The frame that called the hook that calls this."""
    for frame in frames(sys._getframe(2)):
        if frame.f_globals.get("__name__") != "torch._dynamo.eval_frame":  # that of `uncompiled`
            return frame
    return None


def is_compiling() -> bool:
    """Whether torch.compile compiles the frames that call the hook that calls this."""
    frame = sys._getframe(2)
    # The frame of `uncompiled`: it notes the compiling callback in `prior`, and stops it until the
    # hook ends.
    return (
        frame.f_globals.get("__name__") == "torch._dynamo.eval_frame"
        and frame.f_locals.get("prior") is not None
    )


def _is_in(frame: FrameType | None, caller: FrameType | None) -> bool:
    """Whether `frame` is `caller`, or one of its callers."""
    return any(each is frame for each in frames(caller))
