"""Ties units to an unmodified `nn.Module`: the only file on module hooks and autograd.

[Note: uses]
Whatever points at a unit's bytes holds a `Use` of it (`infinity.sharding.use`), which somebody ends:

| begun by | shows the parameters | ends |
|---|---|---|
| a call of a hooked module | yes | with the call; handed to the call around it while views of it are left |
| a touch of a parameter in a forward whose hooks did not bring it | yes | with the call that runs |
| a saved view that a backward unpacks | no | when nobody refers to the view any more: see `_sweep` |
| a touch of a parameter in a backward | yes | see [Note: recomputation] |

A view that outlives the outermost forward, or a backward, is refused: its bytes would change.

[Note: calls that never end]
Torch runs no forward hook when a forward ends by what is not an `Exception`, as Ctrl-C does. So a call remembers the frame that
runs it, and what is left of calls whose frame is gone is ended before it can do harm: by the next forward, touch or `settle`.

[Note: recomputation]
Activation checkpointing runs a module's forward again inside the backward. What that saves of parameters is packed like anything
else, so the unit may go with the call, however much a checkpoint spans. Where the checkpoint is inside of the module's call
(transformers wraps `forward`), no hook runs again. Then the first touch of a parameter begins a use. The recomputed graph may
refer to the parameter itself, which no count of references to its bytes shows. So this use stays until the gradient of that
module's input is there, which is after the last node of the module has run, or else until the pass ends.

[Note: passes]
Backward passes nest, and an exception may cut one off. Each is a `_Pass` with uses of its own, and ends with autograd's.

[Note: one thread]
The bookkeeping below is that of one thread at a time. Another one that begins a forward or backward meanwhile is refused.

[Note: casts]
Autocast keeps what it makes of each parameter until its context ends: a copy of the whole model on the compute device that no
budget knows, and a stale one after an update. So casts are dropped when a unit leaves. A weight that a forward uses twice, its
unit being away in between, is cast twice, and its gradients are added in its own dtype, as with `cache_enabled=False`. What
autograd saves of casts stays until the backward, unless the activations are checkpointed.

[Note: graphs]
torch.compile does not look into these hooks. They run before the guards of a compiled forward are looked at, which so see
parameters of the same class, shape and dtype each time: nothing is compiled again. What the graph saves passes `Packer` as ever.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType, FunctionType, ModuleType
from typing import Any, Protocol

import torch
from torch import nn

from infinity.backward import BackwardPass, current_pass, in_backward
from infinity.errors import ShardedParameterError
from infinity.modules.activations import Keeper
from infinity.modules.packing import PackedView, Packer, uncompiled
from infinity.observe import Recorder
from infinity.placement.spec import Kind
from infinity.plan.runtime import Runtime
from infinity.sharding.unit import Unit, UnitState
from infinity.sharding.use import Showing, Unpacking, Use, collected, described


@dataclass
class _Call:
    """One forward of a hooked module that is under way."""

    module: nn.Module
    recomputing: bool
    start: float
    shown: Any  # to a profiler
    frame: FrameType | None  # what runs it
    thread: int
    saving: AbstractContextManager[object] | None  # entered for this call
    uses: list[Showing] = field(default_factory=list)  # of the module's units, and what came on top until the call ends


@dataclass
class _Pass:
    """One backward pass that is under way, or was cut off."""

    watch: BackwardPass
    thread: int
    uses: list[Use] = field(default_factory=list)  # that end when nobody refers to them
    touched: list[Showing] = field(default_factory=list)  # that do not end before the input of a module has its gradient


_GRAD: Any = torch.Tensor.grad
_AUTOCAST = ("cpu", "cuda")
_OPAQUE = (nn.Module, type, FunctionType, ModuleType)
_MOST_OBJECTS = 256
"""In which `_tensors` looks: a configuration that a module is given may refer to anything."""

Flow = dict[str, Any]
"""A forward or backward under way: what `Hooks` keeps of it, by attribute."""


def fresh_flow() -> Flow:
    """A flow of which nothing is under way."""
    nothing: Flow = {"_calls": [], "_passes": {}, "_owner": None, "_shown": None}
    return nothing | {"_backward_since": 0.0, "_forward_since": 0.0, "_forward_waited": 0.0}


class Weaver(Protocol):
    """Who runs several flows, one at a time (`infinity.modules.vertical`)."""

    def cross(self, unit: Unit) -> None:
        """The flow that runs is about to use `unit`, or to have a gradient of it; others may run before this returns."""

    def collect(self, unit: Unit, index: int, gradient: torch.Tensor) -> None:
        """The flow that runs has the gradient of parameter `index`, for `unit.collect`."""


class Hooks:
    """The hooks of one engine on one model, from construction to `close`.

    A forward of `model` is a cycle of the trace; `units_of` maps each hooked module to the units its forward uses; `locate`
    maps an address to (unit, byte offset). `after_backward` is called when the last backward pass under way has ended.
    """

    def __init__(
        self,
        model: nn.Module,
        units_of: Mapping[nn.Module, Sequence[Unit]],
        units: Sequence[Unit],
        runtime: Runtime,
        locate: Callable[[int], tuple[Unit, int] | None],
        after_backward: Callable[[], None],
        recorder: Recorder,
        keeper: Keeper,
    ) -> None:
        self._model = weakref.ref(model)
        self._units_of = weakref.WeakKeyDictionary(units_of)  # the model may die before the engine
        self._runtime, self._after_backward, self._recorder = runtime, after_backward, recorder
        self._packer = Packer(locate, keeper, self._bring)
        self._calls: list[_Call] = []
        self._passes: dict[int, _Pass] = {}
        self._owner: int | None = None  # the thread whose forward is under way, see [Note: one thread]
        self._claiming = threading.Lock()
        self._backward_since = self._forward_since = self._forward_waited = 0.0
        self._shown: Any = None  # to a profiler: the forward or backward that is under way
        self._weaver: Weaver | None = None
        self._handles: list[Any] = []
        self._units = tuple(units)
        try:
            self._register()
        except BaseException:
            self.close()
            raise

    def _register(self) -> None:
        before, after = uncompiled(self._before_forward), uncompiled(self._after_forward)
        for module in self._units_of:
            # First, for other pre-hooks may use the parameters: torch.nn.utils.weight_norm computes the weight in one.
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(after, always_call=True))
        for unit in self._units:
            unit.border = self
            if unit.trainable:
                for index, parameter in enumerate(unit.parameters):
                    self._handles.append(parameter.register_post_accumulate_grad_hook(self._collector(unit, index)))

    def close(self) -> None:
        """Take every hook off the model. May be called twice."""
        while self._calls:
            self._abandon(self._calls.pop())
        for found in list(self._passes.values()):
            self._drop(found)
        for unit in self._units:
            unit.border = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def settle(self) -> None:
        """End what an exception or an interrupt cut off: forwards, and a backward. Does nothing inside of either."""
        if in_backward():
            return
        self.check_thread("a step was asked for")
        self._unwind()
        if not self._calls:
            self._bury()

    # Several flows

    @contextmanager
    def woven(self, weaver: Weaver) -> Iterator[None]:
        """Inside, `weaver` decides which of several flows goes on, and all of them are one cycle of the trace. Not nested."""
        self.settle()
        self._runtime.begin(True)
        self._weaver = weaver
        # Before a gradient is accumulated, not after: autograd locks the parameter's node for that, and others could not use it.
        borders = [
            parameter.register_hook(lambda _, unit=unit: self._before_gradient(unit))
            for unit in self._units
            if unit.trains
            for parameter in unit.parameters
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            self._weaver = None
            for border in borders:
                border.remove()
            self._after_backward()

    def refuse_inside(self, what: str) -> None:
        """Raise `RuntimeError` inside of a forward, a backward or `woven`."""
        self.check_thread(what)
        self._unwind()
        if self._weaver is not None or self._calls or in_backward():
            raise RuntimeError(f"{what} cannot be called inside of itself, nor of a forward or backward of its model")

    def exchange(self, flow: Flow) -> Flow:
        """Leave the flow that runs for another one; returns the one that was left."""
        now = time.perf_counter()
        if self._passes:
            self._recorder.add("model", "backward", self._backward_since, now)
        elif self._calls:
            self._count_forward(now)
        self._show("")
        left = {name: vars(self)[name] for name in flow}
        vars(self).update(flow)
        self._show("backward" if self._passes else "forward" if self._calls else "")
        self._forward_since = self._backward_since = now
        self._forward_waited = self._runtime.waited
        return left

    # One thread at a time

    def check_thread(self, what: str) -> None:
        """Raise `RuntimeError` when another thread is inside of a forward or backward; `what` the caller wants to do."""
        me = threading.get_ident()
        going = next((found for found in self._passes.values() if found.watch.alive and found.thread != me), None)
        others = [None if self._owner in (None, me) else self._owner, None if going is None or in_backward() else going.thread]
        busy = next((thread for thread in others if thread is not None and self._is_under_way(thread)), None)
        if busy is not None:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            raise RuntimeError(
                f"{what} on thread {threading.current_thread().name}, while {names.get(busy)} is inside of a forward or backward "
                "of the same wrapped model, which serves one thread at a time; hold a lock around both, or wrap a model for each"
            )

    def _is_under_way(self, thread: int) -> bool:
        """Whether the forward or backward of another `thread` goes on; an interrupt, or the thread's end, may have cut it off."""
        frame = sys._current_frames().get(thread)
        if frame is None:
            return False
        return not self._calls or self._calls[-1].thread != thread or _is_in(self._calls[-1].frame, frame)

    def _claim(self, what: str) -> None:
        """This thread runs the model until its outermost forward ends; raises like `check_thread`."""
        with self._claiming:
            self.check_thread(what)
            self._unwind()
            self._owner = threading.get_ident()

    # Forward

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._check(module)
        recomputing = in_backward()
        if not recomputing:
            self._claim(f"{type(module).__name__} was called")
        call = _Call(module, recomputing, time.perf_counter(), None, _caller(), threading.get_ident(), None)
        try:
            if recomputing:
                self._watch_backward()
                self._sweep()
            elif not self._calls:
                self._begin_forward(module)
            for unit in self._units_of[module]:
                call.uses.append(self._enter(unit))
            saving = self._packer.context(recomputing)
            if saving is not None:
                saving.__enter__()
                call.saving = saving
        except BaseException:
            for use in call.uses:
                use.end()
            self._disown()
            raise
        call.start = time.perf_counter()
        call.shown = self._recorder.show("compute", f"forward {call.uses[0].unit.name}") if call.uses else None
        self._calls.append(call)
        if not recomputing and torch.is_grad_enabled():
            units = self._units_of[module]
            for tensor in _tensors((args, kwargs)):
                if tensor.grad_fn is not None:  # the gradient of a leaf may come before the module's last node has run
                    tensor.register_hook(lambda _, units=units: self._passed(units))

    def _begin_forward(self, module: nn.Module) -> None:
        """The outermost forward begins, of `module`."""
        self._bury()  # backwards that an exception cut off
        self._forward_since, self._forward_waited = time.perf_counter(), self._runtime.waited
        self._show("forward")
        if self._weaver is None and (module is self._model() or self._runtime.stale):
            self._runtime.begin(torch.is_grad_enabled())

    def _check(self, module: nn.Module) -> None:
        if module not in self._units_of:
            raise ShardedParameterError(
                f"this {type(module).__name__} is a copy of a module of a wrapped model, as torch.nn.DataParallel makes them: it "
                "has no parameters; run the wrapped model itself, or a process for each device, and give infinity.wrap a group="
            )
        transform = torch._C._functorch.peek_interpreter_stack()
        if transform is not None and transform.key() == torch._C._functorch.TransformType.Grad:
            raise RuntimeError(
                "torch.func.grad, vjp and their kind cannot pass a wrapped model, for they take no hooks on saved tensors, by "
                "which parameters come back for the backward; use loss.backward(), and infinity.engine(model).gradient(parameter)"
            )

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        last = self._calls[-1] if self._calls else None
        if last is None or last.module is not module or last.thread != threading.get_ident():
            return  # its `_before_forward` failed and has cleaned up
        call = self._calls.pop()
        self._recorder.hide(call.shown)
        if call.saving is not None:
            call.saving.__exit__(None, None, None)
        failed = output is None and sys.exc_info()[0] is not None  # its frames refer to what they had
        changed = [name for use in call.uses for name in use.unit.changed()]
        kept = self._end_uses(call, output, failed)
        units = self._units_of[module]
        if not call.recomputing and torch.is_grad_enabled():
            for unit in units:
                unit.pass_forward()
        now = time.perf_counter()
        if units:
            self._recorder.add("compute", f"forward {units[0].name}", call.start, now)
        if not self._calls and not call.recomputing:
            self._count_forward(now)
        self._disown()
        if changed:
            raise ShardedParameterError(
                f"{described(changed)} was changed in place inside of a forward, which would be lost; change it outside of the "
                "forward, in `with infinity.gathered(model, write=True):` (or gathered(parameter, write=True))"
            )
        if kept:
            raise ShardedParameterError(
                f"{type(module).__name__} leaves a view of {described(kept)} behind, in what it returned, in an attribute or in "
                "hooks on saved tensors, and the data leaves with the end of the forward; keep a copy (.clone()), or call it "
                "inside `with infinity.gathered(model):`"
            )

    def _end_uses(self, call: _Call, output: Any, failed: bool) -> list[str]:
        """End the uses of a call that has ended, or hand them to the one around it where views are left; returns the names of
        those views that outlive the outermost forward."""
        returned = {found[0] for tensor in _tensors(output) if (found := self._packer.locate(tensor)) is not None}
        kept: list[str] = []
        for use in call.uses:
            left = not failed and (use.unit in returned or bool(use.referenced()))
            if left and self._calls:
                self._calls[-1].uses.append(use)
            elif left and call.recomputing:
                self._watch_backward().uses.append(use)
            else:
                kept += collected(use) if left else []
                use.end()
        return kept

    def _show(self, name: str) -> None:
        """To a profiler: what went on so far has ended, and `name`, if that has letters, begins."""
        self._recorder.hide(self._shown)
        self._shown = self._recorder.show("model", name) if name else None

    def _count_forward(self, now: float) -> None:
        self._show("")
        self._recorder.add("model", "forward", self._forward_since, now)
        self._runtime.forward_seconds += now - self._forward_since - (self._runtime.waited - self._forward_waited)

    def _enter(self, unit: Unit) -> Showing:
        if self._weaver is not None:
            self._weaver.cross(unit)
        if in_backward():
            unit.begin_turn()
        return Showing(unit, self._runtime.enter(unit), self._left)

    def _left(self, unit: Unit) -> None:
        if unit.state is UnitState.SHARDED and any(map(torch.is_autocast_enabled, _AUTOCAST)):  # see [Note: casts]
            torch.clear_autocast_cache()
        self._runtime.leave(unit)

    def _unwind(self) -> None:
        """End the calls that are not under way any more; outside of a backward, which may run in other threads."""
        me = threading.get_ident()
        while self._calls and not (self._calls[-1].thread == me and _is_in(self._calls[-1].frame, sys._getframe())):
            self._abandon(self._calls.pop())

    def _abandon(self, call: _Call) -> None:
        self._recorder.hide(call.shown)
        if call.saving is not None and call.thread == threading.get_ident():  # the hooks of another thread are out of reach
            call.saving.__exit__(None, None, None)
        for use in call.uses:
            use.end()
        self._disown()

    def _disown(self) -> None:
        """The outermost forward has ended, if it has."""
        if not self._calls:
            self._owner = None
            if not self._passes:
                self._show("")

    def packing(self) -> AbstractContextManager[object]:
        """The context in which autograd saves views of units so that these may move."""
        return self._packer.context() or nullcontext()

    def _bring(self, saved: PackedView) -> torch.Tensor:
        """The tensor of a saved view, for the node that runs, or for whoever asks for what autograd saved."""
        unit = saved.unit
        if saved.updates != unit.blocks[Kind.PARAM].home.updates:
            raise RuntimeError(
                f"the parameters of {unit.name} were updated after the forward whose backward needs them; "
                "call backward() before optimizer.step(), or run the forward again"
            )
        found = self._watch_backward() if in_backward() else None
        self._sweep()
        if self._weaver is not None:
            self._weaver.cross(unit)
        unit.begin_turn()
        use = Unpacking(unit, self._runtime.enter(unit), self._runtime.leave)
        view = use.window.tensor(saved.size, saved.stride, saved.offset // saved.dtype.itemsize, saved.dtype)
        if found is None or torch.is_grad_enabled():  # a backward that is recorded keeps what it unpacks
            view = view.clone()
            use.end()
        else:
            found.uses.append(use)
        return saved.restore(view)

    # Backward

    def _before_gradient(self, unit: Unit) -> None:
        if self._weaver is not None:
            self._sweep()
            self._weaver.cross(unit)

    def _collector(self, unit: Unit, index: int) -> Callable[[torch.Tensor], None]:
        def collect(parameter: torch.Tensor) -> None:
            with torch._C.DisableTorchFunctionSubclass():  # classes of parameters hide .grad while the engine holds a gradient
                gradient = _GRAD.__get__(parameter)
                _GRAD.__set__(parameter, None)
            if gradient is not None:
                if self._weaver is None:
                    unit.gradients.add(index, gradient, 1.0 if unit.updater is None else unit.updater.loss_scale)
                else:
                    self._weaver.collect(unit, index, gradient)
                self._watch_backward()

        return collect

    def _passed(self, units: Sequence[Unit]) -> None:
        """The input of a module that uses `units` has its gradient."""
        found = next((each for number, each in self._passes.items() if number == current_pass()), None)
        if found is not None:
            found.uses += [use for use in found.touched if use.unit in units]
            found.touched = [use for use in found.touched if use.unit not in units]
            self._sweep()

    def touched(self, unit: Unit) -> bool:
        """A parameter of a unit that is not there was touched: by a recomputation that no hook saw, or by a forward that uses
        another module's parameter (`nn.MultiheadAttention` never calls its `out_proj`). False outside of both."""
        recomputing = in_backward()
        if not recomputing:
            self.check_thread(f"a parameter of {unit.name} was touched")
            self._unwind()
            if not self._calls:
                return False
        if self._calls and self._calls[-1].recomputing == recomputing:
            self._calls[-1].uses.append(self._enter(unit))
            return True
        found = self._watch_backward()
        self._sweep()
        found.touched.append(self._enter(unit))
        return True

    def _watch_backward(self) -> _Pass:
        """The innermost backward pass of this thread."""
        number = current_pass()
        if number in self._passes:
            return self._passes[number]
        if not self._passes:
            self._backward_since = time.perf_counter()
            self._show("backward")
        watch = BackwardPass(lambda: self._end_pass(found))
        found = self._passes[watch.number] = _Pass(watch, threading.get_ident())
        return found

    def _sweep(self) -> None:
        """End the uses of backward passes that nobody refers to any more."""
        for found in self._passes.values():
            uses, found.uses = found.uses, []
            for use in uses:
                if use.referenced():
                    found.uses.append(use)
                else:
                    use.end()

    def _end_pass(self, found: _Pass) -> None:
        """The pass is complete. Who still has a saved view would see other bytes there soon."""
        kept = [name for use in found.uses if isinstance(use, Unpacking) for name in collected(use)]
        self._drop(found)
        if kept:
            raise ShardedParameterError(
                f"a view of a parameter of {described(kept)}, saved by autograd, outlives the backward: as a gradient that a "
                "custom autograd function returned, or in an attribute; return or keep a copy (.clone())"
            )

    def _bury(self) -> None:
        """End the passes that an exception cut off."""
        for found in [found for found in self._passes.values() if not found.watch.alive]:
            self._drop(found)

    def _drop(self, found: _Pass) -> None:
        self._passes.pop(found.watch.number, None)
        uses, found.uses, found.touched = [*found.uses, *found.touched], [], []
        for use in uses:
            use.end()
        if not self._passes:
            self._show("forward" if self._calls else "")
            self._recorder.add("model", "backward", self._backward_since, time.perf_counter())
            if self._weaver is None:
                self._after_backward()


def _caller() -> FrameType | None:
    """The frame that called the hook that calls this."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame":  # of `uncompiled`
        frame = frame.f_back
    return frame


def _is_in(frame: FrameType | None, caller: FrameType | None) -> bool:
    """Whether `frame` is `caller`, or one of those that led there."""
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in `value`: in mappings, lists, tuples and dataclasses, and in the attributes of other objects there."""
    pending = [value]
    seen: set[int] = set()
    while pending and len(seen) < _MOST_OBJECTS:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            yield value
            continue
        items = _items(value)
        if items and id(value) not in seen:
            seen.add(id(value))
            pending += items


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, Mapping):
        return value.values()
    return () if isinstance(value, _OPAQUE) else getattr(value, "__dict__", {}).values()
