"""Ties units to an unmodified `nn.Module`: the only file on module hooks and autograd.

[Note: slots and saved tensors]
A unit's parameters point into its run of the compute arena only while a module that uses them is in its forward. Autograd
saves views of them for the backward; keeping those views alive would pin the run. `pack` replaces each such view by
(unit, geometry), and `unpack` brings the unit back, wherever it then lies, and gives the same view of it. What `unpack`
returned is in use until the autograd node that asked for it has run: the next node's first `unpack` ends it. A backward that
is recorded itself (`create_graph=True`) keeps what it unpacks for longer, and so gets copies.

[Note: recomputation]
Activation checkpointing runs a module's forward again inside the backward, and keeps the recomputed tensors itself, views of
parameters and parameters included. So a unit entered during a backward stays entered until the gradient of that module's
input is there, which is after the last node of the module has run, or else until the backward ends. Where the checkpoint is
inside of the module's call (transformers wraps `forward`), no hook runs again: then the first touch of a parameter enters.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from infinity.observe import Recorder
from infinity.plan.runtime import Runtime
from infinity.sharding.unit import Unit
from infinity.tiers.block import Kind


class PackedView(NamedTuple):
    """A saved view of a parameter: where it lies in its unit, not where the unit lies."""

    unit: Unit
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # elements from the start of the unit
    updates: int  # of the unit, when it was saved


class _Call(NamedTuple):
    """One forward of a hooked module that is under way."""

    module: nn.Module
    recomputing: bool
    start: float


def in_backward() -> bool:
    """Whether this thread is inside an autograd backward."""
    return bool(torch._C._current_graph_task_id() != -1)


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
    ) -> None:
        self._model = weakref.ref(model)
        self._units_of = weakref.WeakKeyDictionary(units_of)  # the model may die before the engine
        self._runtime, self._locate = runtime, locate
        self._after_backward, self._recorder = after_backward, recorder
        self._calls: list[_Call] = []
        self._saving: saved_tensors_hooks | None = None
        self._held: dict[Unit, int] = {}  # uses by recomputing forwards, ended by the input's gradient or the backward's end
        self._node: Any = None  # the autograd node that runs
        self._node_units: list[Unit] = []  # the units it unpacked views of
        self._backward = False
        self._backward_since = self._forward_since = 0.0
        self._handles: list[Any] = []
        for module in units_of:
            self._handles.append(module.register_forward_pre_hook(self._before_forward, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after_forward, always_call=True))
        self._units = tuple(units)
        for unit in units:
            unit.touched = self._touched
            if unit.trainable:
                for index, parameter in enumerate(unit.parameters):
                    self._handles.append(parameter.register_post_accumulate_grad_hook(self._collector(unit, index)))

    def close(self) -> None:
        """Take every hook off the model. May be called twice."""
        self._stop_saving()
        self._end_backward()
        for unit in self._units:
            unit.touched = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # Forward

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        recomputing = in_backward()
        if not recomputing and not self._calls:
            self._end_backward()  # one that was cut off by an exception
            self._forward_since = time.perf_counter()
            if module is self._model():
                self._runtime.begin(torch.is_grad_enabled())
            self._saving = saved_tensors_hooks(self._pack, self._unpack)
            self._saving.__enter__()
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
        self._calls.append(_Call(module, recomputing, time.perf_counter()))
        if recomputing:
            self._watch_backward()
        else:
            for tensor in _tensors((args, kwargs)):
                if tensor.grad_fn is not None:  # the gradient of a leaf may come before the module's last node has run
                    tensor.register_hook(lambda _, units=self._units_of[module]: self._passed(units))

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._calls or self._calls[-1].module is not module:
            return  # its `_before_forward` failed and has cleaned up
        call = self._calls.pop()
        for unit in self._units_of[module]:
            if call.recomputing:
                self._held[unit] = self._held.get(unit, 0) + 1
            else:
                self._leave(unit)
        now = time.perf_counter()
        if self._units_of[module]:
            self._recorder.add("compute", f"forward {self._units_of[module][0].name}", call.start, now)
        if not self._calls:
            self._stop_saving()
            if not call.recomputing:
                self._recorder.add("model", "forward", self._forward_since, now)

    def _enter(self, unit: Unit) -> None:
        unit.unshard(self._runtime.enter(unit))

    def _leave(self, unit: Unit) -> None:
        unit.reshard()
        self._runtime.leave(unit)

    def _stop_saving(self) -> None:
        if self._saving is not None:
            self._saving.__exit__(None, None, None)
            self._saving = None

    # Saved views

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | PackedView:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return tensor
        found = self._locate(tensor.data_ptr())
        if found is None:
            return tensor
        unit, offset = found
        return PackedView(unit, tensor.size(), tensor.stride(), offset // unit.dtype.itemsize, unit.blocks[Kind.PARAM].updates)

    def _unpack(self, saved: torch.Tensor | PackedView) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        if saved.updates != saved.unit.blocks[Kind.PARAM].updates:
            raise RuntimeError(
                f"the parameters of {saved.unit.name} were updated after the forward whose backward needs them; "
                "call backward() before optimizer.step(), or run the forward again"
            )
        self._watch_backward()
        self._end_other_node()
        flat = self._runtime.enter(saved.unit)
        self._node_units.append(saved.unit)
        view = flat.as_strided(saved.size, saved.stride, flat.storage_offset() + saved.offset)
        return view.clone() if torch.is_grad_enabled() else view

    # Backward

    def _collector(self, unit: Unit, index: int) -> Callable[[torch.Tensor], None]:
        def collect(parameter: torch.Tensor) -> None:
            with torch._C.DisableTorchFunctionSubclass():  # the guard hides .grad while the engine holds a gradient
                gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                unit.collect(index, gradient)
                self._watch_backward()

        return collect

    def _passed(self, units: Sequence[Unit]) -> None:
        for unit in units:
            for _ in range(self._held.pop(unit, 0)):
                self._leave(unit)

    def _touched(self, unit: Unit) -> bool:
        """A parameter of a unit that is not entered was touched: a recomputation that no hook saw needs it. Else False."""
        if not in_backward():
            return False
        self._end_other_node()
        self._enter(unit)
        self._held[unit] = self._held.get(unit, 0) + 1
        self._watch_backward()
        return True

    def _watch_backward(self) -> None:
        if not self._backward and in_backward():
            self._backward, self._backward_since = True, time.perf_counter()
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
            self._recorder.add("model", "backward", self._backward_since, time.perf_counter())
            self._after_backward()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
