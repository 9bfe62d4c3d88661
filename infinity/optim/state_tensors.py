"""The tensors of optimizer states, as users see them: `StateTensor` is one of `optimizer.state`,
and `StateCopy` is one of `optimizer.state_dict()`.

[Note: a tensor of a state dict]
`optimizer.state_dict()` of torch gives the tensors that the optimizer updates. Here it gives
copies, mapped from files, that behave alike while the engine is open. A function that reads a copy
gets the current values: if the state has changed, it is fetched again. A function that changes a
copy changes the state: torch counts the changes of each tensor (`_version`), so the change is seen
when the function returns. numpy gets a read-only array, because torch does not see writes of numpy.
With several ranks a fetch needs all of them, so a copy that is out of date raises.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from infinity.errors import EngineClosedError, ShardedParameterError
from infinity.placement.spec import Kind
from infinity.sharding.lazy_tensor import LazyTensor
from infinity.sharding.parameter import METADATA
from infinity.sharding.tensor_parallel import part_in, whole
from infinity.sharding.tiles import TiledWeight
from infinity.sharding.unit import Unit


class Slot:
    """One state of one parameter. Used by the thread that runs the model."""

    name: str
    """The name in errors."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    """The device of the state in the plain model."""
    needs_ranks = False
    """Whether a fetch needs other ranks."""

    @functools.cached_property
    def copies(self) -> weakref.WeakSet[_Source]:
        """The sources of its `StateCopy` tensors."""
        return weakref.WeakSet()

    def leave_copies(self) -> None:
        """The entry gets another tensor: copies keep the current values."""
        for source in list(self.__dict__.get("copies", ())):
            source.leave()

    @property
    def is_open(self) -> bool:
        """Whether the engine is open."""
        raise NotImplementedError

    def fetch(self) -> torch.Tensor:
        """A copy of the whole, on the host. All ranks must call it."""
        raise NotImplementedError

    def replace(self, values: torch.Tensor) -> None:
        """Replace the state by `values`, of the whole shape. All ranks must call it."""
        raise NotImplementedError

    def mark(self) -> object:
        """A value that changes with the state."""
        raise NotImplementedError


class MomentSlot(Slot):
    """A state in the blocks of the engine: a moment, or a master. `count` gives the updates of the
    parameter so far."""

    dtype = torch.float32

    def __init__(
        self, unit: Unit, index: int, kind: Kind, name: str, count: Callable[[], int]
    ) -> None:
        self.name = f"optimizer.state[parameter][{name!r}] of {unit.facts.names[index]}"
        self.shape = tuple(unit.facts.parameters[index].shape)
        self.device = unit.facts.parameters[index].device
        self.needs_ranks = unit.ranks.number > 1
        self._unit, self._index, self._kind, self._count = unit, index, kind, count

    @property
    def is_open(self) -> bool:
        return bool(self._unit.data.tier)

    def fetch(self) -> torch.Tensor:
        """A copy of the whole, on the host."""
        self._check()
        unit = self._unit
        unit.listeners.updates.drain()
        found = unit.states.parameter(self._kind, self._index).float()
        return whole(found, unit.facts.parameters[self._index])

    def replace(self, values: torch.Tensor) -> None:
        """Replace the state by `values`, rounded to its format."""
        self._check()
        unit, index = self._unit, self._index
        given = part_in(values.detach().cpu(), unit.facts.parameters[index])
        part = unit.facts.share_of(index, given)
        unit.states.put(self._kind, index, part, self.name)
        unit.on_device.renew()

    def mark(self) -> object:
        return self._count(), self._unit.states.mark(self._kind, self._index)

    def _check(self) -> None:
        if not self.is_open:
            raise EngineClosedError(
                f"{self.name} has no data any more, because the engine of its wrapped model was "
                "closed"
            )


class CountSlot(Slot):
    """The number of updates of a parameter, as in torch: a tensor of one fp32 element on the
    host."""

    shape: tuple[int, ...] = ()
    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, unit: Unit, name: str, counts: dict[int, int], key: int) -> None:
        self.name = f"optimizer.state[parameter]['step'] of {name}"
        self._unit, self._counts, self._key = unit, counts, key

    @property
    def is_open(self) -> bool:
        return bool(self._unit.data.tier)

    def fetch(self) -> torch.Tensor:
        """The number."""
        return torch.tensor(float(self._counts.get(self._key, 0)))

    def replace(self, values: torch.Tensor) -> None:
        """Count from `values` on. Raises `ShardedParameterError` if it is no count."""
        count = float(values)
        if not (count >= 0 and count.is_integer()):
            raise ShardedParameterError(
                f"{self.name} was set to {count}, and the engine of a wrapped model counts whole "
                "updates; give a number such as 0.0 or 10.0"
            )
        self._unit.listeners.updates.drain()  # early updates have the old count
        self._counts[self._key] = int(count)

    def mark(self) -> object:
        """A value that changes with the number."""
        return self._counts.get(self._key, 0)


class _Content:
    """The content of a `StateTensor` and its aliases: the state, or its values when the entry got
    another tensor."""

    def __init__(self) -> None:
        self.kept: torch.Tensor | None = None
        self.changes = 0
        """The number of replacements."""


class StateTensor(LazyTensor):
    """A tensor in `optimizer.state`. A read fetches the state, and a write in place replaces it.
    When the entry gets another tensor, this one keeps the values of that time."""

    way = (
        "a part of a copy of an optimizer state of a wrapped model was changed in place, which "
        "would be lost; change the state itself, as optimizer.state[parameter]['exp_avg'][rows] = "
        "values"
    )

    @staticmethod
    def __new__(cls, slot: Slot, content: _Content | None = None) -> Any:
        return cls.without_data(slot.shape, slot.dtype, slot.device)

    def __init__(self, slot: Slot, content: _Content | None = None) -> None:
        self.slot = slot
        self.content = _Content() if content is None else content
        """Shared with aliases."""

    def detached(self) -> StateTensor:
        """Another tensor of the same state."""
        return StateTensor(self.slot, self.content)

    @property
    def is_current(self) -> bool:
        """Whether it is the state."""
        return self.content.kept is None

    def fetch(self) -> torch.Tensor:
        """A copy of the state on its device."""
        kept = self.content.kept
        return (self.slot.fetch() if kept is None else kept.clone()).to(self.device)

    def replace(self, values: torch.Tensor) -> None:
        """Replace the state by `values`."""
        if self.content.kept is None:
            self.slot.replace(values)
        else:
            self.content.kept = values.detach().to(self.device, self.dtype, copy=True)
            self.content.changes += 1


class JoinedSlot(Slot):
    """A state of a weight in tiles; `tensors` are the states of the tiles."""

    def __init__(self, weight: TiledWeight, tensors: Sequence[StateTensor]) -> None:
        self.weight, self.tensors = weight, list(tensors)
        first = tensors[0].slot
        self.name, self.dtype, self.device = first.name, first.dtype, first.device
        self.shape = tuple(weight.shape) if first.shape else ()

    @property
    def is_open(self) -> bool:
        return self.tensors[0].slot.is_open

    def fetch(self) -> torch.Tensor:
        """The joined tiles. Raises `ShardedParameterError` if their numbers of updates differ."""
        found = [tensor.fetch().cpu() for tensor in self.tensors]
        if self.shape:
            return torch.cat(found, self.weight.dimension)
        if any(not torch.equal(each, found[0]) for each in found):
            raise ShardedParameterError(
                f"{self.name} is not one number, because the tiles of this weight of a wrapped "
                "model were updated apart; read the states of the tiles"
            )
        return found[0]

    def replace(self, values: torch.Tensor) -> None:
        """Replace the states of the tiles by their parts of `values`."""
        parts = self.weight.divided(values) if self.shape else [values] * len(self.tensors)
        for tensor, part in zip(self.tensors, parts, strict=True):
            tensor.replace(part)

    def mark(self) -> object:
        """A value that changes with the state of a tile."""
        return tuple(tensor.slot.mark() for tensor in self.tensors)


class _Source:
    """The source of a `StateCopy` and its views. A copy without a slot is the user's own."""

    def __init__(self, values: torch.Tensor, slot: Slot) -> None:
        self.values = values
        self._slot: Callable[[], Slot | None] = weakref.ref(slot)
        self._mark = slot.mark()
        self._expired = ""
        slot.copies.add(self)

    def shares(self, found: torch.Tensor) -> bool:
        """Whether `found` shares memory with the copy."""
        mine = self.values.untyped_storage()._cdata
        return bool(found.untyped_storage()._cdata == mine)

    def refresh(self) -> None:
        """Fetch the current values. Raises `ShardedParameterError` if other ranks have parts of
        them."""
        slot = self._slot()
        if self._expired or (slot is not None and slot.needs_ranks and self._is_late(slot)):
            name = self._expired or getattr(slot, "name", "")
            raise ShardedParameterError(
                f"a tensor of optimizer.state_dict() is out of date, because {name} of the "
                "wrapped model has changed since, and several ranks have parts of it; take a new "
                "state_dict() on all ranks, or keep a copy (.clone()) from before the change"
            )
        if slot is not None and self._is_late(slot):
            self.values.copy_(slot.fetch())
            self._mark = slot.mark()

    def _is_late(self, slot: Slot) -> bool:
        return slot.is_open and self._mark != slot.mark()

    def changed(self) -> None:
        """The copy was changed in place: change the state, too."""
        slot = self._slot()
        if slot is not None and slot.is_open:
            slot.replace(self.values)
            self._mark = slot.mark()

    def leave(self) -> None:
        """Keep the current values from now on."""
        slot = self._slot()
        if slot is None:
            return
        if slot.needs_ranks and self._is_late(slot):
            self._expired = slot.name
        else:
            self.refresh()
        self._slot = lambda: None


class StateCopy(torch.Tensor):
    """A tensor of `optimizer.state_dict()`. See [Note: a tensor of a state dict]."""

    _source: _Source

    @staticmethod
    def of(values: torch.Tensor, slot: Slot) -> torch.Tensor:
        """`values`, a plain tensor on the host, as a copy of the state in `slot`."""
        with torch.inference_mode(False):  # so that changes are counted
            values = values.clone() if values.is_inference() else values
            return _as_copy(values, _Source(values, slot))

    def plain(self) -> torch.Tensor:
        """The same memory as an ordinary tensor, with the current values."""
        self._source.refresh()
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        made = memo[id(self)] = self.plain().clone()
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        copies = [each for each in tree_leaves((args, kwargs)) if isinstance(each, StateCopy)]
        if name in ("__dlpack__", "set_") or (attribute == "data" and name == "__set__"):
            raise ShardedParameterError(
                f"{name} of a tensor of optimizer.state_dict() would change an optimizer state of "
                "a wrapped model unseen; give a copy (.clone()), or use copy_"
            )
        sources = [each.__dict__["_source"] for each in copies]
        with torch._C.DisableTorchFunctionSubclass():
            if name not in METADATA and attribute not in METADATA:
                for source in dict.fromkeys(sources):
                    source.refresh()
            before = [each._version for each in copies]
            found = func(*args, **kwargs)
            after = [each._version for each in copies]
        for source in dict.fromkeys(
            source for source, old, new in zip(sources, before, after, strict=True) if old != new
        ):
            source.changed()
        if name in ("numpy", "__array__"):
            found = found.view()
            found.flags.writeable = False
            return found
        return tree_map(lambda value: _with_source(value, sources), found)


def _with_source(value: Any, sources: Sequence[_Source]) -> Any:
    """`value`, with views of copies as copies."""
    if type(value) is torch.Tensor:
        for source in sources:
            if source.shares(value):
                return _as_copy(value, source)
    return value


def _as_copy(values: torch.Tensor, source: _Source) -> torch.Tensor:
    made = values.as_subclass(StateCopy)
    made._source = source
    return made
