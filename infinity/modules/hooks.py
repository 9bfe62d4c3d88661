"""Ties units to an unmodified `nn.Module`: the only file on module hooks and autograd.

[Note: slots and saved tensors]
A unit's parameters point into its run of the compute arena only while a module that uses them is in its forward. Autograd
saves views of them for the backward; keeping those views alive would pin the run. `pack` replaces each such view by
(unit, geometry), and `unpack` brings the unit back, wherever it then lies, and gives the same view of it; of a DTensor that is
its local tensor. What `unpack` returned is in use until the autograd node that asked for it has run: the next node's first
`unpack` ends it. A backward that is recorded itself (`create_graph=True`) keeps what it unpacks for longer, and so gets copies.
Torch asks only the innermost `saved_tensors_hooks`: under hooks that a model enters inside of its forward (`save_on_cpu` around
some blocks) the views are theirs, not ours, and their backward may read another unit's bytes. Hooks around the whole forward and
backward are safe.

[Note: calls that never end]
Torch runs no forward hook when a forward ends by what is not an `Exception`, as Ctrl-C does. So a call remembers the frame that
runs it, and what is left of calls whose frame is gone is ended before it can do harm: by the next forward, touch or `settle`.

[Note: recomputation]
Activation checkpointing runs a module's forward again inside the backward, and keeps the recomputed tensors itself, views of
parameters and parameters included. So a unit entered during a backward stays entered until the gradient of that module's
input is there, which is after the last node of the module has run, or else until the backward ends. Where the checkpoint is
inside of the module's call (transformers wraps `forward`), no hook runs again: then the first touch of a parameter enters.

[Note: casts]
Autocast keeps what it makes of each parameter until its context ends: a copy of the whole model on the compute device that no
budget knows, and a stale one after an update. So casts are dropped when a unit leaves. A weight that a forward uses twice, its
unit being away in between, is cast twice, and its gradients are added in its own dtype, as with `cache_enabled=False`. What
autograd saves of casts stays until the backward, unless the activations are checkpointed.

[Note: graphs]
torch.compile does not look into these hooks. They run before the guards of a compiled forward are looked at, which so see
parameters of the same class, shape and dtype each time: nothing is compiled again. What the graph saves passes `pack` as ever.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from infinity.backward import in_backward
from infinity.errors import ShardedParameterError
from infinity.modules.activations import Keeper, Kept, Packed
from infinity.observe import Recorder
from infinity.plan.runtime import Runtime
from infinity.sharding.tensor_parallel import Form, form_of, local
from infinity.sharding.unit import Unit, UnitState
from infinity.tiers.block import Kind


class PackedView(NamedTuple):
    """A saved view of a parameter: where it lies in its unit, not where the unit lies."""

    unit: Unit
    kind: type[torch.Tensor]
    dtype: torch.dtype  # need not be the unit's, nor need the bits below be clear: complex numbers are views of real ones
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # bytes from the start of the unit
    conjugate: bool
    negative: bool
    updates: int  # of the unit, when it was saved
    form: Form | None  # of the DTensor whose local tensor it is


class _Call(NamedTuple):
    """One forward of a hooked module that is under way."""

    module: nn.Module
    recomputing: bool
    start: float
    shown: Any  # to a profiler
    frame: FrameType | None  # what runs it
    lent: list[Unit]  # entered on top of the module's own, until it ends


_AUTOCAST = ("cpu", "cuda")
_NO_GRAPH = (
    "infinity brings the parameters of each unit, such as a block, in a hook, which cannot be a part of a graph: "
    "compile block after block, or leave out fullgraph=True"
)

Flow = dict[str, Any]
"""A forward or backward under way: what `Hooks` keeps of it, by attribute."""


def fresh_flow() -> Flow:
    """A flow of which nothing is under way."""
    nothing: Flow = {"_calls": [], "_saving": None, "_held": {}, "_node": None, "_node_units": [], "_backward": False}
    return nothing | {"_backward_since": 0.0, "_forward_since": 0.0, "_forward_waited": 0.0, "_shown": None}


class Weaver(Protocol):
    """Who runs several flows, one at a time (`infinity.modules.vertical`)."""

    def cross(self, unit: Unit) -> None:
        """The flow that runs is about to use `unit`, or to have a gradient of it; others may run before this returns."""

    def collect(self, unit: Unit, index: int, gradient: torch.Tensor) -> None:
        """The flow that runs has the gradient of parameter `index`, for `unit.collect`."""


class Hooks:
    """The hooks of one engine on one model, from construction to `close`.

    A forward of `model` is a cycle of the trace; `units_of` maps each hooked module to the units its forward uses; `locate`
    maps an address to (unit, byte offset).
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
        self._runtime, self._locate = runtime, locate
        self._after_backward, self._recorder, self._keeper = after_backward, recorder, keeper
        self._calls: list[_Call] = []
        self._saving: tuple[saved_tensors_hooks, int] | None = None  # and the thread that saves
        self._versions: dict[Unit, list[int]] = {}  # of the parameters of each unit that is entered, before a forward had them
        self._held: dict[Unit, int] = {}  # uses by recomputing forwards, ended by the input's gradient or the backward's end
        self._node: Any = None  # the autograd node that runs
        self._node_units: list[Unit] = []  # the units it unpacked views of
        self._backward = False
        self._backward_since = self._forward_since = self._forward_waited = 0.0
        self._shown: Any = None  # to a profiler: the forward or backward that is under way
        self.forward_seconds = 0.0
        """Seconds of all forwards since the start, without the waits for units."""
        self._weaver: Weaver | None = None
        self._handles: list[Any] = []
        before, after = _uncompiled(self._before_forward), _uncompiled(self._after_forward)
        self._packers = _uncompiled(self._pack), _uncompiled(self._unpack)
        for module in units_of:
            # First, for other pre-hooks may use the parameters: torch.nn.utils.weight_norm computes the weight in one.
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(after, always_call=True))
        self._units = tuple(units)
        for unit in units:
            unit.touched, unit.packing = self._touched, self._packing
            if unit.trainable:
                for index, parameter in enumerate(unit.parameters):
                    self._handles.append(parameter.register_post_accumulate_grad_hook(self._collector(unit, index)))

    def close(self) -> None:
        """Take every hook off the model. May be called twice."""
        while self._calls:
            self._abandon(self._calls.pop())
        self._stop_saving()
        self._end_backward()
        for unit in self._units:
            unit.touched = unit.packing = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def settle(self) -> None:
        """End what an exception or an interrupt cut off: forwards, and a backward. Does nothing inside of either."""
        if in_backward():
            return
        self._unwind()
        if not self._calls:
            self._end_backward()

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
        self._unwind()
        if self._weaver is not None or self._calls or in_backward():
            raise RuntimeError(f"{what} cannot be called inside of itself, nor of a forward or backward of its model")

    def exchange(self, flow: Flow) -> Flow:
        """Leave the flow that runs for another one; returns the one that was left."""
        now = time.perf_counter()
        if self._backward:
            self._recorder.add("model", "backward", self._backward_since, now)
        elif self._calls:
            self._count_forward(now)
        self._show("")
        left = {name: vars(self)[name] for name in flow}
        vars(self).update(flow)
        self._show("backward" if self._backward else "forward" if self._calls else "")
        self._forward_since = self._backward_since = now
        self._forward_waited = self._runtime.waited
        return left

    # Forward

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._check(module)
        recomputing = in_backward()
        if not recomputing:
            self._unwind()
        if not recomputing and not self._calls:
            self._end_backward()  # one that was cut off by an exception
            self._forward_since, self._forward_waited = time.perf_counter(), self._runtime.waited
            self._show("forward")
            if self._weaver is None and (module is self._model() or self._runtime.stale):
                self._runtime.begin(torch.is_grad_enabled())
            self._saving = self._packing(), threading.get_ident()
            self._saving[0].__enter__()
        elif recomputing:
            self._end_other_node()
        entered: list[Unit] = []
        try:
            for unit in self._units_of[module]:
                self._enter(unit)
                entered.append(unit)
        except BaseException:
            for unit in entered:
                self._leave(unit)
            if not self._calls:
                self._stop_saving()
            raise
        shown = self._recorder.show("compute", f"forward {entered[0].name}") if entered else None
        self._calls.append(_Call(module, recomputing, time.perf_counter(), shown, _caller(), []))
        if recomputing:
            self._watch_backward()
        else:
            for tensor in _tensors((args, kwargs)):
                if tensor.grad_fn is not None:  # the gradient of a leaf may come before the module's last node has run
                    tensor.register_hook(lambda _, units=self._units_of[module]: self._passed(units))

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
        if not self._calls or self._calls[-1].module is not module:
            return  # its `_before_forward` failed and has cleaned up
        call = self._calls.pop()
        self._recorder.hide(call.shown)
        units = [*self._units_of[module], *call.lent]
        edited = self._edited(units)
        shown = {found[0] for tensor in _tensors(output) if (found := self._locate_tensor(tensor)) is not None}
        for unit in units:
            if call.recomputing:
                self._hold(unit)
            elif unit in shown and self._calls:
                self._calls[-1].lent.append(unit)  # the module returned a view of its parameter
            else:
                self._leave(unit)
        if not call.recomputing and torch.is_grad_enabled():
            for unit in self._units_of[module]:
                unit.pass_forward()
        now = time.perf_counter()
        if self._units_of[module]:
            self._recorder.add("compute", f"forward {self._units_of[module][0].name}", call.start, now)
        if not self._calls:
            self._stop_saving()
            if not call.recomputing:
                self._count_forward(now)
                for unit in shown:
                    if unit.state is UnitState.SHARDED and not unit.blocks[Kind.PARAM].permanent:
                        raise ShardedParameterError(
                            f"{type(module).__name__} returned a view of a parameter of unit {unit.name}, whose data leaves with "
                            "the end of the forward; return a copy (.clone()), or call it inside `with infinity.gathered(model):`"
                        )
        if edited:
            raise ShardedParameterError(
                f"{edited} was changed in place inside of a forward, which would be lost; change it outside of the forward, in "
                "`with infinity.gathered(model, write=True):` (or gathered(parameter, write=True))"
            )

    def _show(self, name: str) -> None:
        """To a profiler: what went on so far has ended, and `name`, if that has letters, begins."""
        self._recorder.hide(self._shown)
        self._shown = self._recorder.show("model", name) if name else None

    def _count_forward(self, now: float) -> None:
        self._show("")
        self._recorder.add("model", "forward", self._forward_since, now)
        self.forward_seconds += now - self._forward_since - (self._runtime.waited - self._forward_waited)

    def _enter(self, unit: Unit) -> None:
        if self._weaver is not None:
            self._weaver.cross(unit)
        if in_backward():
            unit.begin_turn()
        fresh = unit.state is UnitState.SHARDED  # else gathered(write=True) may hold it, where changes are welcome
        unit.unshard(self._runtime.enter(unit))
        if fresh:
            self._versions[unit] = _versions(unit)

    def _leave(self, unit: Unit) -> None:
        unit.reshard()
        if unit.state is UnitState.SHARDED:
            self._versions.pop(unit, None)
            if any(map(torch.is_autocast_enabled, _AUTOCAST)):  # see [Note: casts]
                torch.clear_autocast_cache()
        self._runtime.leave(unit)

    def _hold(self, unit: Unit) -> None:
        self._held[unit] = self._held.get(unit, 0) + 1

    def _edited(self, units: Iterable[Unit]) -> str:
        """The name of a parameter that was changed since its unit was entered; named once only. Else ""."""
        for unit in units:
            before = self._versions.get(unit)
            if before is not None and (now := _versions(unit)) != before:
                del self._versions[unit]
                return next(name for name, old, new in zip(unit.names, before, now, strict=True) if old != new)
        return ""

    def _unwind(self) -> None:
        """End the calls that are not under way any more; outside of a backward, which may run in other threads."""
        while self._calls and not _runs(self._calls[-1].frame):
            self._abandon(self._calls.pop())
            if not self._calls:
                self._stop_saving()

    def _abandon(self, call: _Call) -> None:
        self._recorder.hide(call.shown)
        for unit in (*self._units_of[call.module], *call.lent):
            self._leave(unit)

    def _stop_saving(self) -> None:
        if not self._backward:
            self._show("")
        if self._saving is not None:
            (saving, thread), self._saving = self._saving, None
            if thread == threading.get_ident():  # the hooks of another thread are out of reach
                saving.__exit__(None, None, None)

    # Saved views

    def _packing(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(*self._packers)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | Kept | Packed | PackedView:
        found = self._locate_tensor(tensor)
        if found is None:
            return self._keeper.pack(tensor)
        (unit, offset), form, tensor = found, form_of(tensor), local(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            size, stride, conjugate, negative = tensor.size(), tensor.stride(), tensor.is_conj(), tensor.is_neg()
            updates = unit.blocks[Kind.PARAM].updates
            return PackedView(unit, type(tensor), tensor.dtype, size, stride, offset, conjugate, negative, updates, form)

    def _locate_tensor(self, tensor: torch.Tensor) -> tuple[Unit, int] | None:
        """The unit in whose bytes `tensor` begins, whatever its class, and the byte offset there."""
        tensor = local(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            if tensor.layout is not torch.strided:
                return None
            try:
                address = tensor.data_ptr()
            except RuntimeError:  # a tensor of no bytes: a fake or a functional one
                return None
        return self._locate(address)

    def _unpack(self, saved: torch.Tensor | Kept | Packed | PackedView) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        if not isinstance(saved, PackedView):
            return saved.unpack()
        if saved.updates != saved.unit.blocks[Kind.PARAM].updates:
            raise RuntimeError(
                f"the parameters of {saved.unit.name} were updated after the forward whose backward needs them; "
                "call backward() before optimizer.step(), or run the forward again"
            )
        self._watch_backward()
        self._end_other_node()
        if self._weaver is not None:
            self._weaver.cross(saved.unit)
        saved.unit.begin_turn()
        flat = self._runtime.enter(saved.unit)
        self._node_units.append(saved.unit)
        offset = (flat.storage_offset() * flat.itemsize + saved.offset) // saved.dtype.itemsize
        view = torch.empty(0, dtype=saved.dtype, device=flat.device)
        view.set_(flat.untyped_storage(), offset, saved.size, saved.stride)
        if torch.is_grad_enabled():
            view = view.clone()
        if saved.conjugate:
            view = view.conj()
        if saved.negative:
            view = torch._neg_view(view)
        view = view if saved.kind in (torch.Tensor, nn.Parameter) else _as(saved.kind, view)
        return view if saved.form is None else saved.form.wrap(view)

    # Backward

    def _before_gradient(self, unit: Unit) -> None:
        if self._weaver is not None:
            self._end_other_node()
            self._weaver.cross(unit)

    def _collector(self, unit: Unit, index: int) -> Callable[[torch.Tensor], None]:
        def collect(parameter: torch.Tensor) -> None:
            with torch._C.DisableTorchFunctionSubclass():  # the guard hides .grad while the engine holds a gradient
                gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                if self._weaver is None:
                    unit.gradients.collect(index, gradient)
                else:
                    self._weaver.collect(unit, index, gradient)
                self._watch_backward()

        return collect

    def _passed(self, units: Sequence[Unit]) -> None:
        for unit in units:
            for _ in range(self._held.pop(unit, 0)):
                self._leave(unit)

    def _touched(self, unit: Unit) -> bool:
        """A parameter of a unit that is not entered was touched: by a recomputation that no hook saw, or by a forward that uses
        another module's parameter (`nn.MultiheadAttention` never calls its `out_proj`). False outside of both."""
        if in_backward():
            self._end_other_node()
            self._enter(unit)
            self._hold(unit)
            self._watch_backward()
            return True
        self._unwind()
        if not self._calls:
            return False
        self._enter(unit)
        self._calls[-1].lent.append(unit)
        return True

    def _watch_backward(self) -> None:
        if not self._backward and in_backward():
            self._backward, self._backward_since = True, time.perf_counter()
            self._show("backward")
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_other_node(self) -> None:
        """What an earlier autograd node unpacked is not in use any more."""
        node = torch._C._current_autograd_node()
        if node is not self._node:
            self._end_node(node)

    def _end_node(self, following: Any) -> None:
        units, self._node, self._node_units = self._node_units, following, []
        for unit in units:
            self._runtime.leave(unit)

    def _end_backward(self) -> None:
        self._end_node(None)
        self._passed(list(self._held))
        if self._backward:
            self._backward = False
            self._show("")
            self._recorder.add("model", "backward", self._backward_since, time.perf_counter())
            if self._weaver is None:
                self._after_backward()


def _uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """`hook`, with a frame of torch's around it: see [Note: graphs]."""
    disabled: Callable[..., Any] = torch.compiler.disable(hook, reason=_NO_GRAPH)
    return disabled


def _caller() -> FrameType | None:
    """The frame that called the hook that calls this."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame":  # of `_uncompiled`
        frame = frame.f_back
    return frame


def _runs(frame: FrameType | None) -> bool:
    """Whether `frame` is one of those that led here."""
    caller: FrameType | None = sys._getframe()
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None


def _versions(unit: Unit) -> list[int]:
    """How often each parameter was changed in place; the engine itself never does."""
    with torch._C.DisableTorchFunctionSubclass():
        return [parameter._version for parameter in unit.parameters]


def _as(kind: type[torch.Tensor], view: torch.Tensor) -> torch.Tensor:
    try:
        return view.as_subclass(kind)
    except (RuntimeError, TypeError):  # a class that wants more than bytes
        return view


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
