"""Ties units to an unmodified `nn.Module`. Only this file registers hooks on modules and gradients.

`infinity.modules.execution` keeps the calls and passes under way, which begin and end uses of
units.

[Note: uses]
All code that points at a unit's bytes holds a `Use` of it (`infinity.sharding.use`). This table
says when it ends:

| begun by | shows the parameters | ends |
|---|---|---|
| a call of a hooked module | yes | with the call; while views remain, the outer call adopts it |
| `Hooks.call`, for code that computes in its place | yes | the same |
| a touch of a parameter in a forward, if no hook brought it | yes | with the call that runs |
| a saved view that a backward unpacks | no | with the last reference to it: see `Execution.sweep` |
| a touch of a parameter in a backward | yes | see [Note: recomputation] |

A view that outlives the outermost forward, or a backward, is refused: its bytes would change.

[Note: recomputation]
Activation checkpointing runs a module's forward again inside the backward. Views of parameters that
this forward saves are packed as in any forward. So the unit may leave with the call, even if a
checkpoint spans many modules. If the checkpoint is inside the module's call (transformers wraps
`forward`), no hook runs again. Then the first touch of a parameter begins a use. The recomputed
graph may refer to the parameter itself, and no count of references to its bytes shows that. So this
use stays until the input of the module has its gradient: then the last node of the module has run.
Without such a gradient it stays until the pass ends.

[Note: casts]
Autocast keeps its cast of each parameter until its context ends. That is a copy of the whole model
on the compute device. No budget counts it, and it is stale after an update. So casts are dropped
when a unit leaves. A forward may use a weight twice, with its unit away in between. The weight is
then cast twice, and its gradients are added in its own dtype, as with `cache_enabled=False`. Casts
that autograd saves stay until the backward, unless the activations are checkpointed.

[Note: graphs]
torch.compile does not look into these hooks. They run before the guards of a compiled forward are
checked. So the guards see parameters of the same class, shape and dtype each time, and torch
compiles nothing again. Tensors that the graph saves pass through `Packer` as usual.
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from infinity.activations.first_batch import FirstBatch
from infinity.activations.recompute import Recomputation
from infinity.activations.saved_tensors import SavedTensorOffloader
from infinity.backward import in_backward
from infinity.compilation import frames, uncompiled
from infinity.errors import BudgetError, ConfigError, ShardedParameterError
from infinity.modules.execution import (
    Call,
    Execution,
    Executions,
    Interleaving,
    caller,
    is_compiling,
)
from infinity.modules.node_attributes import pack_attributes, sequence_number
from infinity.modules.packing import PackedView, Packer
from infinity.modules.tracing import complete, refuse_tracers, refuse_tracing, refuse_transforms
from infinity.observe import Recorder
from infinity.optim.updater import Updater
from infinity.placement.spec import Kind
from infinity.schedule.runtime import Runtime
from infinity.sharding.facts import UnitFacts
from infinity.sharding.lent import LentParameter
from infinity.sharding.listeners import Border, Result
from infinity.sharding.parameter import TRAINED
from infinity.sharding.parameter_data import UnitState
from infinity.sharding.unit import Unit
from infinity.sharding.use import Showing, Unpacking, collected, described

_GRAD: Any = torch.Tensor.grad
_AUTOCAST = ("cpu", "cuda")
_OPAQUE = (nn.Module, type, FunctionType, ModuleType)
_MOST_OBJECTS = 256
"""How many objects `_tensors` searches: a configuration that a module gets may refer to anything.
"""


@dataclass(frozen=True)
class HookedModel:
    """The model that hooks are registered on."""

    model: nn.Module
    """A forward of it is a cycle of the trace."""
    units_of: Mapping[nn.Module, Sequence[Unit]]
    """For each hooked module, the units that its forward uses."""
    units: Sequence[Unit]
    """All units, by index."""
    only_runs: bool
    """Whether no forward trains, and a backward raises `ConfigError`."""


@dataclass(frozen=True)
class RunningParts:
    """The parts of an engine that hooks drive."""

    runtime: Runtime
    executions: Executions
    updater: Updater
    recorder: Recorder


@dataclass(frozen=True)
class ActivationParts:
    """The parts of an engine that keep or recompute what a forward saves."""

    offloader: SavedTensorOffloader
    recomputation: Recomputation
    first_batch: FirstBatch


class Hooks(Border):
    """The hooks of one engine on one model, from construction to `close`.

    One class, because each method is a callback of torch or of a unit into the same calls and
    passes: any two of them may meet in one forward.
    """

    def __init__(self, hooked: HookedModel, running: RunningParts, saving: ActivationParts) -> None:
        # The model may die before the engine.
        self._model = weakref.ref(hooked.model)
        self._units_of = weakref.WeakKeyDictionary(hooked.units_of)
        self._units, self._only_runs = tuple(hooked.units), hooked.only_runs
        self._runtime, self._executions = running.runtime, running.executions
        self._updater, self._recorder = running.updater, running.recorder
        self._recomputation, self._first_batch = saving.recomputation, saving.first_batch
        self._partitions = saving.offloader.partitions
        treatments = saving.recomputation.treatments
        told = () if treatments is None else (treatments.gauge.saves,)
        self._shortage: BudgetError | None = None
        self._lost: dict[
            Unit, tuple[tuple[int, int], list[str]]
        ] = {}  # parameters that forwards have written, and `_writes` at that time
        self._packer = Packer(
            running.runtime.locate,
            saving.offloader,
            self._bring,
            self._checkpointed,
            self._recomputed,
            *told,
        )
        self._claiming = threading.Lock()
        self._handles: list[Any] = []
        try:
            self._register()
        except BaseException:
            self.close()
            raise

    def _register(self) -> None:
        before, after = uncompiled(self._before_forward), uncompiled(self._after_forward)
        for module in self._units_of:
            # First, because other pre-hooks may use the parameters: torch.nn.utils.weight_norm
            # computes the weight in one.
            self._handles.append(
                module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
            )
            self._handles.append(module.register_forward_hook(after, always_call=True))
        for unit in self._units:
            for index, parameter in enumerate(unit.facts.parameters):
                if unit.facts.trainable:
                    collect = self._collector(unit, index)
                elif self._only_runs and parameter.requires_grad:
                    collect = _refuse
                else:
                    continue
                with unit.data.leaf(index):
                    handle = parameter.register_post_accumulate_grad_hook(collect)
                self._handles.append(handle)

    def close(self) -> None:
        """Take every hook off the model. May be called twice."""
        self._executions.now.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def interleaved(self, interleaver: Interleaving) -> Iterator[None]:
        """Inside the context, `interleaver` decides which of several executions runs. Together they
        are one cycle of the trace. Not nested."""
        self._executions.end_interrupted()
        self._runtime.begin(True)
        self._executions.interleaver = interleaver
        # Before a gradient is accumulated, not after: autograd locks the parameter's node for that,
        # and other micro-batches could not use it.
        borders = [
            parameter.register_hook(lambda _, unit=unit: self._before_gradient(unit))
            for unit in self._units
            if unit.gradients.trains
            for parameter in unit.facts.parameters
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            self._executions.interleaver = None
            for border in borders:
                border.remove()
            kept = self._executions.end_lingering()
            self._executions.flush()
        self._refuse_kept("the model", kept)

    def check_thread(self, what: str) -> None:
        self._executions.check_thread(what)

    def end_interrupted(self, what: str) -> None:
        self._executions.check_thread(what)
        self._executions.end_interrupted()

    @property
    def _now(self) -> Execution:
        return self._executions.now

    # Forward

    def _before_forward(
        self, module: nn.Module, args: Any, kwargs: Any, is_forward: bool = True
    ) -> None:
        """A call begins: of `module` itself if it `is_forward`, else of another function that uses
        its parameters. The engine does not recompute the latter."""
        self._check(module)
        recomputing, compiling = in_backward(), is_compiling()
        if not recomputing:
            with self._claiming:
                self._now.claim(f"{type(module).__name__} was called")
        now, thread = time.perf_counter(), threading.get_ident()
        call = Call(module, recomputing, now, None, caller(), thread, None, sequence_number())
        try:
            if recomputing:
                self._now.backward_pass()
                self._now.sweep()
            elif not self._now.calls:
                self._begin_forward(module)
            for unit in self._units_of[module]:
                call.uses.append(self._enter(unit))
            with ExitStack() as entered:
                entered.enter_context(self._packer.context(recomputing) or nullcontext())
                if is_forward and not recomputing and torch.is_grad_enabled():
                    self._enter_checkpoint(entered, module, args, kwargs, compiling)
                call.saving = entered.pop_all()
        except BaseException:
            for use in call.uses:
                use.end()
            self._now.disown()
            raise
        call.start = time.perf_counter()
        call.shown = (
            self._recorder.show("compute", f"forward {call.uses[0].unit.facts.name}")
            if call.uses
            else None
        )
        self._now.calls.append(call)
        if not recomputing and torch.is_grad_enabled():
            units = self._units_of[module]
            for tensor in _tensors((args, kwargs)):
                # The gradient of a leaf may come before the module's last node has run.
                if tensor.grad_fn is not None:
                    tensor.register_hook(lambda _, units=units: self._now.release_touched(units))

    def _enter_checkpoint(
        self, entered: ExitStack, module: nn.Module, args: Any, kwargs: Any, compiling: bool
    ) -> None:
        """If the call of `module` will be recomputed, enter the hooks of a checkpoint on top of
        ours, and ours once more. The lower ones of ours get the inputs of the checkpoint. If the
        call keeps its saved tensors, or is counted, enter the hooks for that."""
        checkpointed = self._packer.feeds_a_checkpoint()
        if self._first_batch.is_due:
            self._first_batch.look(module, (args, kwargs), checkpointed)
        if checkpointed:
            entered.enter_context(self._recomputation.leave(module) or nullcontext())
            return
        found = self._packer.locate, self._begin_turn
        around = self._recomputation.around(module, args, kwargs, compiling, *found)
        if around.checkpoint is not None:
            partitions = self._partitions
            with nullcontext() if partitions is None else partitions.entering(module):
                entered.enter_context(around.checkpoint)
            entered.enter_context(self._packer.context() or nullcontext())
        elif around.keeps:
            entered.enter_context(self._packer.context(keeps=True) or nullcontext())
        entered.enter_context(around.counting or nullcontext())

    def _checkpointed(self) -> None:
        """A checkpoint is entered: by the innermost call, or by the engine for a call that is about
        to begin."""
        if self._now.calls:
            self._now.calls[-1].checkpoints = True

    def _begin_forward(self, module: nn.Module) -> None:
        """The outermost forward begins, of `module`."""
        self._shortage = None
        self._refuse_lost()
        self._executions.begin_forward()
        if self._executions.interleaver is None and (
            module is self._model() or self._runtime.stale
        ):
            training = torch.is_grad_enabled() and not self._only_runs
            if not training:
                self._updater.before_evaluation()
            self._runtime.begin(training)

    def _check(self, module: nn.Module) -> None:
        if module not in self._units_of:
            raise ShardedParameterError(
                f"this {type(module).__name__} is a copy of a module of a wrapped model, as "
                "torch.nn.DataParallel makes them: it has no parameters; run the wrapped model "
                "itself, or a process for each device, and give infinity.wrap a group="
            )
        refuse_tracing()
        refuse_transforms()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        calls = self._now.calls
        last = calls[-1] if calls else None
        if last is None or last.module is not module or last.thread != threading.get_ident():
            return  # its `_before_forward` failed and has cleaned up
        call = calls.pop()
        self._recorder.hide(call.shown)
        if call.saving is not None:
            call.saving.__exit__(None, None, None)
        if not call.recomputing:
            self._recomputation.ended(module, call.checkpoints)
        # Frames of an exception refer to views.
        failed = output is None and sys.exc_info()[0] is not None
        if failed:
            complete(sys.exc_info()[1], self._shortage)
        changed = [name for use in call.uses for name in self._changed(use.unit)]
        kept = self._end_uses(call, output, failed)
        units = self._units_of[module]
        if not call.recomputing and torch.is_grad_enabled():
            for unit in units:
                self._updater.pass_forward(unit)
        now = time.perf_counter()
        if units:
            self._recorder.add("compute", f"forward {units[0].facts.name}", call.start, now)
        if not calls and not call.recomputing:
            self._now.end_forward(now)
        self._now.disown()
        if changed:
            raise ShardedParameterError(
                f"{described(changed)} was changed in place inside of a forward, which would be "
                "lost; change it outside of the forward, in `with infinity.gathered(model, "
                "write=True):` (or gathered(parameter, write=True))"
            )
        self._refuse_kept(type(module).__name__, kept)

    def _changed(self, unit: Unit) -> list[str]:
        """The parameters of `unit` that a forward has written to."""
        names = unit.changed()
        if names:
            self._lost[unit] = _writes(unit), names
        return names

    def _refuse_lost(self) -> None:
        """Raise `ShardedParameterError` if a forward has written to parameters, until they are
        opened for writing or replaced. The write was dropped. The module may believe that it was
        kept, and compute with the old values: RWKV notes that it has rescaled its weights."""
        for unit, (writes, names) in list(self._lost.items()):
            if _writes(unit) != writes:
                del self._lost[unit]
            else:
                raise ShardedParameterError(
                    f"{described(names)} was changed in place inside of an earlier forward, which "
                    "was refused, and its module may believe it has the new values; give it those "
                    "in `with infinity.gathered(model, write=True):`, or leave it there as it is"
                )

    @staticmethod
    def _refuse_kept(who: str, kept: Sequence[str]) -> None:
        if kept:
            raise ShardedParameterError(
                f"{who} leaves a view of {described(kept)} behind: in its "
                "output, in an attribute or in hooks on saved tensors. The data leaves when the "
                "forward ends; keep a copy (.clone()), or call the module inside `with "
                "infinity.gathered(model):`"
            )

    def _end_uses(self, call: Call, output: Any, failed: bool) -> list[str]:
        """End the uses of a call that has ended. If views of a unit remain, the call around it
        adopts the use instead. Returns the names of the parameters with views that outlive the
        outermost forward."""
        returned = {
            found[0]
            for tensor in _tensors(output)
            if (found := self._packer.locate(tensor)) is not None
        }
        if not failed and torch.is_grad_enabled():
            self._pack_attributes(call, output)
        kept: list[str] = []
        for use in call.uses:
            left = not failed and (use.unit in returned or bool(use.referenced()))
            if left and self._now.calls:
                self._now.calls[-1].uses.append(use)
            elif left and call.recomputing:
                self._now.backward_pass().uses.append(use)
            elif left and self._executions.interleaver is not None:
                self._executions.end(use)
            else:
                kept += collected(use) if left else []
                use.end()
        return kept

    def _pack_attributes(self, call: Call, output: Any) -> None:
        """Take out the views that nodes of the `call` keep as attributes: nodes behind its
        `output`, and behind tensors that its module has kept (a loss of a router)."""

        def referenced() -> bool:
            return any(use.unit.data.views.referenced() for use in call.uses)

        if referenced():
            kept = (_tensors(vars(module)) for module in call.module.modules())
            outputs = itertools.chain(_tensors(output), *kept)
            pack_attributes(outputs, call.first_node, self._packer, referenced)

    def _enter(self, unit: Unit) -> Showing:
        if self._executions.interleaver is not None:
            self._executions.interleaver.switch_at(unit)
        if in_backward():
            self._executions.begin_turn(unit)
        else:
            self._executions.use(unit)
        return Showing(unit, self._runtime.enter(unit), self._left)

    def _begin_turn(self, module: nn.Module) -> None:
        """A forward of `module` is about to be repeated: no other micro-batch runs until that
        forward uses other units."""
        if self._executions.interleaver is not None:
            for unit in self._units_of[module]:
                self._executions.interleaver.switch_at(unit)

    def _left(self, unit: Unit) -> None:
        # See [Note: casts]
        if unit.data.state is UnitState.SHARDED and any(map(torch.is_autocast_enabled, _AUTOCAST)):
            torch.clear_autocast_cache()
        unit.on_device.release()

    def call(self, module: nn.Module, function: Callable[..., Result], *inputs: Any) -> Result:
        """`function(*inputs)`, with the parameters of `module` present as in a call of it. If
        `module` is not hooked, only the parameters of the calls under way are present."""
        if module not in self._units_of:
            return function(*inputs)
        self._before_forward(module, inputs, {}, is_forward=False)
        output = None
        try:
            output = function(*inputs)
        finally:
            self._after_forward(module, inputs, output)
        return output

    def packing(self) -> AbstractContextManager[object]:
        return self._packer.context() or nullcontext()

    def _flat(self, unit: Unit) -> torch.Tensor:
        """`Runtime.enter`. On a `BudgetError` it collects garbage and tries again: a reference
        cycle, such as an exception and its frames, may keep views of the pass."""
        try:
            return self._runtime.enter(unit)
        except BudgetError:
            gc.collect()
            self._now.sweep()
            try:
                return self._runtime.enter(unit)
            except BudgetError as error:
                self._shortage = error.with_traceback(None)
                raise

    def _bring(self, saved: PackedView) -> torch.Tensor:
        """The tensor of a saved view, for the node that runs or for code that reads a saved
        tensor."""
        unit = saved.unit
        if self._only_runs:
            raise ConfigError(f"a backward needs parameters of {unit.facts.name}, but {TRAINED}")
        if saved.updates != unit.blocks[Kind.PARAM].home.updates:
            raise RuntimeError(
                f"the parameters of {unit.facts.name} were updated after the forward whose "
                "backward needs them; call backward() before optimizer.step(), or run the "
                "forward again"
            )
        found = self._now.backward_pass() if in_backward() else None
        self._now.sweep()
        if self._executions.interleaver is not None:
            self._executions.interleaver.switch_at(unit)
        self._executions.begin_turn(unit)
        index, offset = saved.place()
        geometry = saved.size, saved.stride, offset // saved.dtype.itemsize, saved.dtype
        own = unit.data.views.own(index)
        if own is not None:
            view = own.tensor(*geometry)
        else:
            use = Unpacking(unit, index, self._flat(unit), lambda unit: unit.on_device.release())
            view = use.window.tensor(*geometry)
            # A recorded backward keeps the tensors that it unpacks.
            if found is None or torch.is_grad_enabled():
                view = view.clone()
                use.end()
            else:
                found.uses.append(use)
        restored = saved.restore(view)
        if saved.is_whole() and saved.kind is nn.Parameter and _asked_by_hand():
            return LentParameter.of(unit.facts.parameters[index], restored)
        return restored

    # Backward

    def _before_gradient(self, unit: Unit) -> None:
        if self._executions.interleaver is not None:
            self._now.sweep()
            self._executions.interleaver.switch_at(unit)

    def _collector(self, unit: Unit, index: int) -> Callable[[torch.Tensor], None]:
        def collect(parameter: torch.Tensor) -> None:
            # Classes of parameters hide .grad while the engine holds a gradient.
            with torch._C.DisableTorchFunctionSubclass():
                gradient = _GRAD.__get__(parameter)
                _GRAD.__set__(parameter, None)
            if gradient is not None:
                interleaver = self._executions.interleaver
                if interleaver is None:
                    self._executions.collect(unit)
                    unit.gradients.add(index, gradient, self._updater.scales.current)
                else:
                    interleaver.collect(unit, index, gradient)
                    self._now.backward_pass()

        return collect

    def touched(self, facts: UnitFacts) -> bool:
        """A parameter was touched while its unit is away: by a recomputation that no hook saw, or
        by a forward that uses another module's parameter (`nn.MultiheadAttention` never calls its
        `out_proj`). Brings the unit and returns True. Outside of a forward and a backward it
        returns False."""
        if not self._is_inside(facts):
            refuse_tracers()
            return False
        unit = self._units[facts.index]
        recomputing, calls = in_backward(), self._now.calls
        if calls and calls[-1].recomputing == recomputing:
            calls[-1].uses.append(self._enter(unit))
            return True
        found = self._now.backward_pass()
        self._now.sweep()
        found.touched.append(self._enter(unit))
        return True

    def records_backward(self) -> bool:
        """Whether code of a backward runs now and makes a graph that may outlive the backward: with
        `create_graph=True`, or in code of a user. The graph of a recomputation ends with the
        backward, unless the backward is recorded."""
        if not in_backward():
            return False
        calls = self._now.calls
        if (calls and calls[-1].recomputing) or _in_a_checkpoint():
            return self._now.backward_pass().is_recorded
        return torch.is_grad_enabled()

    def _recomputed(self) -> None:
        """A node asks for a tensor that a checkpoint may recompute. The recomputation turns
        gradients on, so the pass notes now whether it is recorded."""
        if in_backward():
            self._now.backward_pass().is_recorded = torch.is_grad_enabled()

    def copied(self, facts: UnitFacts, index: int) -> torch.Tensor | None:
        """A copy of parameter `index`, for code that bypasses Python's API. None outside of a
        forward and a backward."""
        if not self._is_inside(facts):
            return None
        unit = self._units[facts.index]
        self._now.sweep()
        if self._executions.interleaver is not None:
            self._executions.interleaver.switch_at(unit)
        if in_backward():
            self._executions.begin_turn(unit)
        place = facts.layout.places[index]
        flat = self._flat(unit)
        try:
            return flat[place.offset : place.end].view(place.shape).clone()
        finally:
            unit.on_device.release()

    def _is_inside(self, facts: UnitFacts) -> bool:
        """Whether this thread is inside a forward or a backward of the model."""
        if in_backward():
            return True
        self.check_thread(f"a parameter of {facts.name} was touched")
        self._now.unwind()
        return bool(self._now.calls)


def _asked_by_hand() -> bool:
    """Whether code of a user, and not torch, asks for a saved tensor."""
    for frame in frames(sys._getframe(2)):
        name: str = frame.f_globals.get("__name__", "")
        # `uncompiled` adds a frame of torch in between.
        if not name.startswith("infinity.") and name != "torch._dynamo.eval_frame":
            return name.partition(".")[0] != "torch"
    return False


def _in_a_checkpoint() -> bool:
    """Whether the code that runs now is a recomputation of torch's checkpoint."""
    names = (frame.f_globals.get("__name__") for frame in frames(sys._getframe(2)))
    return "torch.utils.checkpoint" in names


def _writes(unit: Unit) -> tuple[int, int]:
    """How often the parameters of `unit` were replaced, and how often they were opened for
    writing."""
    return unit.blocks[Kind.PARAM].home.updates, unit.data.views.grants


def _refuse(parameter: torch.Tensor) -> None:
    """A parameter of a model that only runs got a gradient."""
    with torch._C.DisableTorchFunctionSubclass():
        _GRAD.__set__(parameter, None)
    raise ConfigError(f"a backward computed a gradient, but {TRAINED}")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in `value`: in mappings, lists, tuples and dataclasses, and in the attributes of
    other objects there."""
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
