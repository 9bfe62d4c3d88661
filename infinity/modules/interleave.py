"""Runs micro-batches unit by unit: all of them use a unit before one of them uses the next unit.

[Note: one micro-batch at a time]
A model is unmodified code, so only stopping its thread can interrupt it at the border of a unit.
Each micro-batch runs its forward and backward on a thread of its own. One of these threads runs at
a time. Before a micro-batch uses another unit than the current one, it passes the turn. A
micro-batch that is about to use the current unit gets it, if there is one. So a unit is brought
once for all micro-batches, in the forward and in the backward (autograd runs on the thread of each
micro-batch). The trace sees one cycle with each use once, so the planner needs no special case.

The choice of the next micro-batch depends on the units that they want and on the trace, never on
time. So it is the same in every run and on every rank. Usually micro-batches want the same units in
the same order. A micro-batch that skips a block waits for the others if the trace predicts that
block first. Otherwise it runs ahead, which only costs a fetch.

[Note: the order of gradients]
Sums of floating-point numbers depend on their order. A parameter takes the gradients of the first
micro-batch first, then those of the second, as if they ran one after the other. A gradient that
comes before its turn is held until no earlier micro-batch owes a gradient to the same parameter.
The autograd graph of a micro-batch shows the gradients that it owes; it is read when the backward
begins. A use without autograd may also bring a gradient, when it is recomputed (re-entrant
checkpointing). It counts as owed until the micro-batch ends.

[Note: state of a thread]
Torch keeps some state per thread (`_carry`). Each micro-batch also has its own state of the random
number generators, so its draws do not depend on the others. On the CPU it also has a team of OpenMP
threads of its own: see `infinity.device`.
"""

from __future__ import annotations

import contextvars
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

from infinity.backward import in_backward
from infinity.device import ComputeDevice
from infinity.errors import InfinityError
from infinity.modules.execution import Execution, Executions
from infinity.modules.hooks import Hooks
from infinity.optim.scaler import Noted, Scales
from infinity.schedule.trace import Trace
from infinity.sharding.parameter import parameter_of
from infinity.sharding.unit import Unit

RandomState = list[torch.Tensor]


class _Stopped(BaseException):
    """Ends a micro-batch from inside, as Ctrl-C would, because another one failed or the caller was
    interrupted."""


class MicroBatch:
    """One micro-batch and its state. Used by the thread that has the turn."""

    def __init__(
        self,
        index: int,
        work: Callable[[MicroBatch], None],
        random: RandomState,
        execution: Execution,
        alone: bool,
    ) -> None:
        self.index = index
        self.work = work
        self.random = random
        self.execution = execution
        self._alone = alone
        self.wakeup = _closed()
        self.wanted: int | None = None
        """The index of the unit that it is about to use; None before the first."""
        self.scaled: Noted = []
        self.ended = False
        # Ids of the parameters that its backward reaches; None before the backward.
        self._reached: frozenset[int] | None = None
        self._hidden: Counter[int] = Counter()  # uses of each unit that autograd did not see
        self._brought: Counter[int] = Counter()  # gradients of each parameter, by id

    def begin_backward(self, loss: torch.Tensor) -> None:
        """The backward of `loss` is next."""
        if not self._alone:
            self._reached = _leaves(loss)

    def use_hidden(self, unit: Unit) -> None:
        """A forward without autograd uses `unit`: its recomputation may bring gradients that the
        graph does not show."""
        self._hidden[unit.facts.index] += 1

    def bring(self, parameter: int) -> None:
        """Count a gradient of the parameter with this id."""
        self._brought[parameter] += 1

    def owes(self, unit: Unit, parameter: int) -> bool:
        """Whether a gradient of the parameter of `unit` with this id may still come."""
        if self.ended or self._reached is None:
            return not self.ended
        return (
            self._brought[parameter] < (parameter in self._reached) + self._hidden[unit.facts.index]
        )


class _HeldGradient(NamedTuple):
    """A gradient that came before its turn."""

    micro_batch: MicroBatch
    unit: Unit
    position: int
    gradient: torch.Tensor
    loss_scale: float


class Interleaver:
    """Runs micro-batches, each until it is about to use another unit than the current one. Lives
    for one `run`.

    The thread that has the turn does all work. The caller's thread only waits, and may be
    interrupted. `device` is the engine's device. One class, because the fields are the one state
    that the thread with the turn may touch.
    """

    def __init__(
        self,
        hooks: Hooks,
        executions: Executions,
        trace: Trace,
        device: ComputeDevice,
        scales: Scales,
    ) -> None:
        self._hooks = hooks
        self._executions = executions
        self._trace = trace
        self.device = device
        self._scales = scales
        self._micro_batches: list[MicroBatch] = []
        self._running: MicroBatch
        self._at: int | None = None  # the index of the current unit
        self._idle = executions.new()  # the caller's execution, with nothing under way
        # By id of the parameter, in the order of the micro-batches.
        self._held: dict[int, list[_HeldGradient]] = {}
        self._last: dict[int, int] = {}  # the micro-batch that last gave each parameter a gradient
        self._errors: list[BaseException] = []
        self._stopping = False
        self._over = _closed()

    def run(self, works: Sequence[Callable[[MicroBatch], None]], vertical: bool) -> None:
        """Run each of `works` as a micro-batch, together if `vertical`, else one after the other on
        the calling thread.

        Each micro-batch draws random numbers from a state of its own. The first one has the
        caller's state. The caller continues from the last state that was drawn from. With
        `vertical`, raises the first error of a micro-batch, or the caller's interrupt, when all
        micro-batches have ended.
        """
        together = vertical and len(works) > 1
        randoms = self.device.fork_random_state(len(works))
        micro_batches = [
            MicroBatch(index, work, random, self._executions.new(), not together)
            for index, (work, random) in enumerate(zip(works, randoms, strict=True))
        ]
        if together:
            self._run_together(micro_batches)
        else:
            for micro_batch in micro_batches:
                self.device.set_random_state(micro_batch.random)
                micro_batch.work(micro_batch)
                micro_batch.random = self.device.random_state()
        drawn = [
            each.random
            for each, begun in zip(micro_batches, randoms, strict=True)
            if not all(map(torch.equal, each.random, begun))
        ]
        self.device.set_random_state([*randoms[:1], *drawn][-1])

    def _run_together(self, micro_batches: Sequence[MicroBatch]) -> None:
        with self._hooks.interleaved(self):
            carry, threads = _carry(self.device), []
            for micro_batch in micro_batches:
                context = contextvars.copy_context()
                name = f"infinity-micro-batch-{micro_batch.index}"
                thread = threading.Thread(
                    target=context.run, args=(self._live, micro_batch, carry), name=name
                )
                try:
                    thread.start()
                    threads.append(thread)
                    self._micro_batches.append(micro_batch)
                except BaseException as error:  # start no more threads: the others end at once
                    self._stop(error)
                    if micro_batch not in self._micro_batches:
                        # The interrupt may have come after its thread began.
                        micro_batch.wakeup.release()
                    break
            if self._micro_batches:
                self._micro_batches[0].wakeup.release()
                self._await_end()
            for thread in threads:
                thread.join()
        if self._errors:
            raise self._errors[0]

    def _await_end(self) -> None:
        while True:
            try:
                self._over.acquire()
            except BaseException as interrupt:
                self._stop(interrupt)
            else:
                return

    def _stop(self, error: BaseException) -> None:
        self._errors.append(error)
        self._stopping = True

    # The life of a micro-batch

    def _live(self, micro_batch: MicroBatch, carry: Callable[[], None]) -> None:
        micro_batch.wakeup.acquire()
        if micro_batch not in self._micro_batches:  # its start was interrupted
            return
        try:
            self.device.begin_thread()
            self._resume(micro_batch)
            if not self._stopping:
                carry()
                micro_batch.work(micro_batch)
        except _Stopped:
            pass
        except BaseException as error:
            self._stop(error)
        try:
            micro_batch.ended = True
            self._executions.end_interrupted()  # its calls and passes, if it was cut off
            for parameter in () if self._stopping else list(self._held):
                self._deliver(parameter)
        except BaseException as error:
            self._stop(error)
        following = None
        try:
            following = self._choose()
            self._leave(micro_batch)
        except BaseException as error:
            self._stop(error)
        finally:  # after any failure another one must continue, because all others wait
            following = following or next(
                (other for other in self._micro_batches if not other.ended), None
            )
            (self._over if following is None else following.wakeup).release()

    def _leave(self, micro_batch: MicroBatch) -> None:
        micro_batch.execution = self._executions.exchange(self._idle)
        micro_batch.random = self.device.random_state()
        micro_batch.scaled = self._scales.exchange([])

    def _resume(self, micro_batch: MicroBatch) -> None:
        self._idle = self._executions.exchange(micro_batch.execution)
        self.device.set_random_state(micro_batch.random)
        self._scales.exchange(micro_batch.scaled)
        self._running = micro_batch

    # Turns

    def switch_at(self, unit: Unit) -> None:
        """The running micro-batch is about to use `unit`, or to have a gradient of it. Let others
        use the current unit first."""
        micro_batch = self._running
        if not torch.is_grad_enabled() and not in_backward():
            micro_batch.use_hidden(unit)
        micro_batch.wanted = unit.facts.index
        following = self._choose()
        if following is not None and following is not micro_batch:
            self._leave(micro_batch)
            following.wakeup.release()
            micro_batch.wakeup.acquire()
            self._resume(micro_batch)
        if self._stopping:
            raise _Stopped

    def _choose(self) -> MicroBatch | None:
        """The micro-batch that runs next: the first one that wants the current unit or has not
        begun. Otherwise the first one that wants the unit that the trace predicts first.

        Among units with the same prediction, the unit that most micro-batches want comes first.
        None when all have ended.
        """
        micro_batches = [
            micro_batch for micro_batch in self._micro_batches if not micro_batch.ended
        ]
        for micro_batch in micro_batches:
            if micro_batch.wanted in (None, self._at):
                return micro_batch
        wanted = Counter(micro_batch.wanted for micro_batch in micro_batches)
        if not wanted:
            return None
        self._at = min(wanted, key=lambda unit: (self._trace.next_use(unit or 0), -wanted[unit]))
        return next(micro_batch for micro_batch in micro_batches if micro_batch.wanted == self._at)

    # Gradients

    def collect(self, unit: Unit, index: int, gradient: torch.Tensor) -> None:
        """The running micro-batch has the gradient of parameter `index` of `unit`: add it when its
        turn has come. Raises `InfinityError` if the parameter already took a gradient of a later
        micro-batch."""
        micro_batch, parameter = self._running, id(unit.facts.parameters[index])
        if self._last.get(parameter, 0) > micro_batch.index:
            raise InfinityError(
                f"{unit.facts.names[index]} got a gradient of micro-batch {micro_batch.index} "
                "after one of a later micro-batch, so the sum would have another order than in "
                'horizontal order; use infinity.accumulate(..., order="horizontal")'
            )
        micro_batch.bring(parameter)
        held = self._held.setdefault(parameter, [])
        held.append(_HeldGradient(micro_batch, unit, index, gradient, self._scales.current))
        held.sort(key=lambda each: each.micro_batch.index)
        self._deliver(parameter)

    def _deliver(self, parameter: int) -> None:
        """Add the held gradients of the parameter with this id, in order, until an earlier
        micro-batch owes it a gradient."""
        held = self._held[parameter]
        while held and not any(
            each.owes(held[0].unit, parameter)
            for each in self._micro_batches[: held[0].micro_batch.index]
        ):
            first = held.pop(0)
            self._last[parameter] = first.micro_batch.index
            first.unit.gradients.add(first.position, first.gradient, first.loss_scale)
        if not held:
            del self._held[parameter]


def _closed() -> threading.Lock:
    """A lock that is held: `acquire` waits until another thread releases it."""
    lock = threading.Lock()
    lock.acquire()
    return lock


def _leaves(loss: torch.Tensor) -> frozenset[int]:
    """The ids of the leaves that the backward of `loss` reaches."""
    pending, seen, found = [loss.grad_fn], set(), set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.add(id(parameter_of(leaf)))
        pending += [following for following, _ in node.next_functions]
    return frozenset(found)


def _carry(device: ComputeDevice) -> Callable[[], None]:
    """Read the state that torch keeps per thread. The result gives the thread that calls it this
    state, permanently.

    Autocast is not part of it: it begins and ends with a forward (see `infinity.accumulate`).
    """
    function_modes = _get_current_function_mode_stack()
    dispatch_modes = _get_current_dispatch_mode_stack()
    saving: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    follow = device.follow()
    # OpenMP and MKL count threads per calling thread. Another count divides a product into other
    # partial sums, with other bits.
    count = torch.get_num_threads()

    def carry() -> None:
        torch.set_num_threads(count)
        torch._C._set_multithreading_enabled(False)  # backward runs here, also on a GPU
        follow()
        for mode in function_modes:
            _push_function_mode(mode)
        if saving is not None:
            torch._C._autograd._push_saved_tensors_default_hooks(*saving)
        for mode in dispatch_modes:
            _push_dispatch_mode(mode)

    return carry
