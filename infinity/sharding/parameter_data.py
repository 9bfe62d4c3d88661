"""The tensors of the parameters of a unit: views of its bytes while it is shown, else handles
without memory."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from infinity.errors import ShardedParameterError
from infinity.placement.spec import Kind
from infinity.sharding.facts import UnitFacts
from infinity.sharding.memory_requests import refuse_memory_requests
from infinity.sharding.on_device import OnDevice
from infinity.sharding.parameter import guard_for, hidden_leaf_for
from infinity.sharding.recognize import is_dtensor
from infinity.sharding.services import UnitServices
from infinity.sharding.states import States
from infinity.sharding.tensor_parallel import attach, local
from infinity.sharding.twins import Twins
from infinity.sharding.value import closed
from infinity.sharding.views import GatheredParameter, Views, Window
from infinity.tiers.block import Block

_GRAD: Any = torch.Tensor.grad


class UnitState(enum.Enum):
    """The kind of tensors that the parameters of a unit are.

    SHARDED: handles without memory, whose operators arrive at the engine. UNSHARDED: views of the
    run of the unit in the compute arena. See [Note: one parameter, two tensors] in
    `sharding/twins`. For a DTensor this is its local tensor, always the same object.
    """

    SHARDED = enum.auto()
    UNSHARDED = enum.auto()


class ParameterData:
    """Shows and hides the parameters of one unit. For the thread that runs the model.

    Until the first `hide` they keep their data. One class, because a handle asks one source, and
    each answer depends on whether the parameters are shown.
    """

    def __init__(
        self,
        owner: object,
        facts: UnitFacts,
        block: Block,
        services: UnitServices,
        states: States,
        on_device: OnDevice,
    ) -> None:
        """`block` has the parameters. They are read from `states`, or from `on_device` if ranks
        have shards. `owner` is the unit, for `unit_of`."""
        refuse_memory_requests()
        self.facts, self.listeners, self.owner = facts, services.listeners, owner
        self._block, self._states, self._on_device = block, states, on_device
        self.tier: str = block.tier.name
        """Where the parameters are at home; "" once the engine is closed."""
        self.state = UnitState.UNSHARDED
        self.shown = 0
        """The number of uses that show the parameters."""
        dtype, places, parameters = facts.dtype, facts.layout.places, facts.parameters
        nothing = torch.nan if dtype.is_floating_point else 0
        one = torch.full((), nothing, dtype=dtype, device=facts.device)
        shaped = {shape: one.expand(shape) for shape in {place.shape for place in places}}
        self._placeholders = [shaped[place.shape] for place in places]
        self._tensors = [torch.empty(0, dtype=dtype) if is_dtensor(p) else p for p in parameters]
        guards = {
            kind: guard_for(self, kind)
            for kind in dict.fromkeys(map(type, (*parameters, *self._tensors)))
        }
        hidden = hidden_leaf_for(self)
        self._twins = [Twins(t, guards[type(t)], hidden) for t in self._tensors]
        # A DTensor has no memory of its own: its class alone changes.
        self._dtensors = [
            (p, t, type(p), guards[type(p)])
            for p, t in zip(parameters, self._tensors, strict=True)
            if is_dtensor(p)
        ]
        self._positions = {
            id(t): i for those in (parameters, self._tensors) for i, t in enumerate(those)
        }
        self._doubles: dict[
            int, torch.Tensor
        ] = {}  # by the id of the object that holds the other tensor
        self._joined: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._updates = 0  # of the unit, when graphs were last outdated
        self.views = Views(self, self._tensors, block, services.store.addresses)
        """The parameters as views of the bytes of the unit, while it is shown."""
        self._windows: dict[int, Window] = {}

    def position(self, tensor: torch.Tensor) -> int | None:
        """The index of `tensor`, a parameter or the local tensor of one; None for other tensors."""
        return self._positions.get(id(tensor))

    def index_of(self, parameter: torch.Tensor) -> int:
        """The index of one of these parameters. Raises `KeyError` for any other tensor."""
        found = self.position(parameter)
        if found is None:
            raise KeyError(f"no parameter of {self.facts.name}")
        return found

    def name_of(self, parameter: torch.Tensor) -> str:
        """The qualified name of one of these parameters."""
        return self.facts.names[self.index_of(parameter)]

    def parameter_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The parameter that users have, if `tensor` is its other object; else `tensor` itself."""
        return self._doubles.get(id(tensor), tensor)

    def show(self, flat: torch.Tensor, writable: bool = False) -> None:
        """SHARDED -> UNSHARDED: let the parameters point at their places in `flat` (numel,). Each
        `show` needs one `hide`. See `Showing`."""
        if self.shown == 0:
            self.make_dense(GatheredParameter)
            self.views.attach(flat)
        self.shown += 1
        self.views.writers += writable
        self.views.grants += writable

    def hide(self, writable: bool = False) -> None:
        """End one `show`. After the last one, UNSHARDED -> SHARDED: make handles of the
        parameters."""
        self.shown -= 1
        self.views.writers -= writable
        if self.shown == 0:
            self.guard()
            self.views.detach()

    def window(self, flat: torch.Tensor, index: int) -> Window:
        """A storage of its own over parameter `index` in `flat` (numel,), the bytes of the unit. It
        is the same one while they lie there."""
        place = self.facts.layout.places[index]
        window = self._windows.get(index)
        address = flat.data_ptr() + place.offset * flat.itemsize
        if window is None or window.storage.data_ptr() != address:
            window = self._windows[index] = Window(flat, place.offset, place.end)
        return window

    def forget_window(self, index: int) -> None:
        """Forget the storage of parameter `index`, and with it the references. The next call of
        `window` gives another one."""
        self._windows.pop(index, None)

    def changed(self) -> list[int]:
        """The parameters with a forbidden write, each reported once."""
        return self.views.changed() if self.shown else []

    def guard(self) -> None:
        """Make handles of the parameters. The last view of their data frees it."""
        with torch._C.DisableTorchFunctionSubclass():
            for twins, placeholder in zip(self._twins, self._placeholders, strict=True):
                if not twins.is_handle:
                    twins.hide(placeholder)
            if len(self._doubles) < len(self._twins):
                self._doubles = {id(t.other): t.tensor for t in self._twins}
                self._positions.update({id(t.other): i for i, t in enumerate(self._twins)})
            for parameter, tensor, _, _ in self._dtensors:
                if local(parameter) is not tensor:
                    attach(parameter, tensor)
        for parameter, _, _, guard in self._dtensors:
            parameter.__class__ = guard  # type: ignore[assignment]
        self.shown, self.state = 0, UnitState.SHARDED

    def close(self) -> None:
        """Make permanent handles of the parameters: they keep shape and dtype, and have no data on
        any tier."""
        self.tier = ""
        self.guard()
        for twins in self._twins:
            twins.close()
        self.views.close()
        self._windows.clear()

    def restore(self, values: Sequence[torch.Tensor]) -> None:
        """After `close`: make plain parameters again, with these `values`."""
        self.make_dense()
        for parameter, value in zip(self.facts.parameters, values, strict=True):
            parameter.data = value

    def make_dense(self, kind: type[torch.Tensor] | None = None) -> None:
        """Make dense tensors of the parameters, whose data the caller sets. Plain parameters get
        the class `kind`, if it is given."""
        with torch._C.DisableTorchFunctionSubclass():
            for twins in self._twins:
                if twins.is_handle:
                    twins.show(kind)
        for tensor, _, plain, _ in self._dtensors:
            tensor.__class__ = plain
        self.state = UnitState.UNSHARDED

    @contextmanager
    def leaf(self, index: int) -> Iterator[None]:
        """Inside the context, parameter `index` is its dense tensor. Autograd accumulates the
        gradient of this one, so hooks belong to it."""
        with torch._C.DisableTorchFunctionSubclass(), self._twins[index].dense():
            yield

    def is_uncollected(self, index: int) -> bool:
        """Whether autograd has accumulated a gradient of parameter `index` that the engine has not
        taken. Hooks that were registered before `wrap` run then."""
        dense = self._dense(index)
        with torch._C.DisableTorchFunctionSubclass():
            return dense is not None and _GRAD.__get__(dense) is not None

    def drop_uncollected(self, index: int) -> None:
        """Drop such a gradient, which stays when a hook raises. The next one would be added to
        it."""
        if self.is_uncollected(index):
            with torch._C.DisableTorchFunctionSubclass():
                _GRAD.__set__(self._dense(index), None)

    def _dense(self, index: int) -> torch.Tensor | None:
        twins = self._twins[index]
        return twins.other if twins.is_handle else twins.tensor

    def agree(self, index: int) -> None:
        """`requires_grad` of parameter `index` was set: set it on its other tensor, too."""
        with torch._C.DisableTorchFunctionSubclass():
            self._twins[index].agree()

    def note(self, tensor: torch.Tensor) -> None:
        """`tensor` is a handle with values of some of these parameters."""
        self._joined[id(tensor)] = tensor

    def outdate(self) -> None:
        """The content changes: a backward through graphs that have saved handles raises, as in
        torch."""
        updates = self._block.home.updates
        if updates != self._updates:
            self._updates = updates
            handles = [t.handle for t in self._twins if t.handle is not None]
            torch.autograd.graph.increment_version([*handles, *self._joined.values()])

    def grad(self, index: int) -> torch.Tensor | None:
        """`.grad` of parameter `index`; None once the engine is closed."""
        return self.listeners.grads.get(self.facts, index) if self.tier else None

    def set_grad(self, index: int, value: torch.Tensor | None) -> None:
        """Set `.grad` of parameter `index`."""
        if self.tier:
            self.listeners.grads.set(self.facts, index, value)

    def readable(self, index: int) -> bool:
        """Whether parameter `index` may be read outside of a forward."""
        return self._on_device.is_readable and not is_dtensor(self.facts.parameters[index])

    def read(self, index: int) -> torch.Tensor:
        """A copy of the value of parameter `index`, on its device; waits for pending updates.

        Raises `EngineClosedError` after the end of the engine, and `ShardedParameterError` outside
        of a forward where a rank must not read alone.
        """
        facts, name = self.facts, self.facts.names[index]
        if not self.tier:
            raise closed(name)
        if self.shown:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                return facts.parameters[index].detach().clone()
        copy = self.listeners.border.copied(facts, index)
        if copy is not None:
            return copy
        if not self.readable(index):
            raise ShardedParameterError(
                f"{name} of a wrapped model was read outside of its module's forward, where this "
                "rank has a part of it; read it inside of `with infinity.gathered(model):`"
            )
        self.listeners.border.check_thread(f"{name} was read")
        self.listeners.updates.look()
        if not facts.shared:
            return self._states.parameter(Kind.PARAM, index).to(facts.parameters[index].device)
        place = facts.layout.places[index]
        self._on_device.start()
        try:
            flat = self._on_device.wait()
            return flat[place.offset : place.end].view(place.shape).clone()
        finally:
            self._on_device.release()

    def part(self, index: int) -> torch.Tensor:
        """A copy of the elements that this rank keeps of parameter `index`, (n,)."""
        self.listeners.updates.look()
        return self._states.part(Kind.PARAM, index)
