"""Parameters as views of their unit's bytes on the compute device.

[Note: what a use may leave behind]
The bytes of a unit belong to a run of the compute arena that another unit may get next. So a use
must not end while anybody can still reach these bytes through it, and nobody may have written to
them: the copy is clean (invariant I1). Both are checked, not assumed. Each parameter points at a
storage of its own: a slice of the arena's storage, an object with a count of references. More
references than the parameter's are views that somebody keeps: an output, an attribute of a module,
a tensor saved by hooks of the model's own. A write shows in the parameter's version counter, or in
its data pointer when `.data` was assigned. The alias that `.data` returns shares memory without the
counter. So a read of `.data` makes the unit note a digest of the content, which is compared at the
end (`GatheredParameter`). With `Tuning.poison` there is a digest of everything.

[Note: what may be kept]
Scripts of DeepSpeed keep `.data` and `.detach()` of gathered parameters. Inside of
`gathered_to_keep` the first of these on a parameter moves that parameter, and with it the alias, to
memory of its own, which lives as long as its last view. It is no part of any budget. The unit's
bytes have the old content until the end of a block that may write (`Views.settle`). Autograd finds
the unit by the address of both (`Residency.block_at`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import Any, ClassVar

import torch
from torch import nn

from infinity.sharding.compiled import makes_graph
from infinity.sharding.lazy_tensor import brought
from infinity.sharding.parameter import refuse_sharing
from infinity.sharding.twins import passing
from infinity.sharding.value import ParameterSource
from infinity.sharding.zero_names import ZeroNames, ZeroStatus
from infinity.tiers.block import Block
from infinity.tiers.resident import Residency

_DATA: Any = torch.Tensor.data
_GRAD: Any = torch.Tensor.grad
_OURS = 2  # tensors that refer to the bytes of a parameter: it, and the view that it was made from
_use_count: Callable[[int], int] = torch._C._storage_Use_Count
_DIGESTED = 1 << 17  # int64 numbers at a time: 1 MiB, and as much again for their products
_FACTOR = 0x9E3779B97F4A7C1  # of a digest so far, when that of the next part is added


class Window:
    """A storage of its own over elements [begin, end) of `flat`, so that references to these bytes
    can be counted."""

    __slots__ = ("_dtype", "storage")

    def __init__(self, flat: torch.Tensor, begin: int, end: int) -> None:
        start = flat.storage_offset()
        self._dtype = flat.dtype
        self.storage = flat.untyped_storage()[
            (start + begin) * flat.itemsize : (start + end) * flat.itemsize
        ]

    def tensor(
        self,
        size: Sequence[int],
        stride: Sequence[int] = (),
        offset: int = 0,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """A tensor of this memory; contiguous without `stride`. `offset` counts elements of `dtype`
        (default: that of `flat`)."""
        empty = torch.empty(0, dtype=dtype or self._dtype, device=self.storage.device)
        return empty.set_(self.storage, offset, tuple(size), tuple(stride))

    def references(self) -> int:
        """How many tensors refer to this memory through this storage."""
        return _use_count(self.storage._cdata) - 1

    def digest(self) -> int:
        """A number that changes with the content: the 64-bit sum of every 8 bytes times their
        odd-numbered place."""
        places = _odd_numbers(self.storage.device)
        numbers, rest = divmod(self.storage.nbytes(), 8)
        sums = []
        for begin in range(0, numbers, _DIGESTED):
            count = min(_DIGESTED, numbers - begin)
            part = self.tensor((count,), offset=begin, dtype=torch.int64)
            sums.append((part * places[:count]).sum())
        if rest:
            sums.append(self.tensor((rest,), offset=8 * numbers, dtype=torch.uint8).sum())
        return int(reduce(lambda total, each: total * _FACTOR + each, sums)) if sums else 0


@cache
def _odd_numbers(device: torch.device) -> torch.Tensor:
    """1, 3, 5 and so on, (_DIGESTED,) int64."""
    return torch.arange(1, 2 * _DIGESTED, 2, device=device)


class GatheredParameter(nn.Parameter, ZeroNames):
    """What a plain parameter is while it points at its unit's bytes. One class for all units:
    compiled code is guarded by it."""

    ds_status = ZeroStatus.AVAILABLE

    def __new__(cls, *given: Any, **named: Any) -> Any:
        """`type(parameter)(data)` is a plain parameter, which no engine manages."""
        return nn.Parameter(*given, **named)

    views: ClassVar[weakref.WeakSet[Views]] = weakref.WeakSet()
    """Those of units that are shown; nothing of ours may be attached to the parameter itself."""

    @property
    def data(self) -> torch.Tensor:
        """As of any tensor; the unit notes what it holds now, since nothing tells when this alias
        is written to."""
        if torch.compiler.is_compiling():
            return self.detach()  # which shares the version counter
        for views in list(GatheredParameter.views):
            views.alias(self)
            views.watch(self)
        found: torch.Tensor = _DATA.__get__(self)
        return found

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _DATA.__set__(self, brought(value))

    def detach(self) -> torch.Tensor:
        """As of any tensor; see [Note: what may be kept]. Raises `ShardedParameterError` inside of
        `nn.Parameter(parameter)`, which would share the memory."""
        if not torch.compiler.is_compiling():
            if sys._getframe(1).f_globals["__name__"] == nn.Parameter.__module__:
                refuse_sharing()
            for views in list(GatheredParameter.views):
                views.alias(self)
        return super().detach()

    @property
    def grad(self) -> torch.Tensor | None:
        """What the engine has of the gradient, as of a parameter that is not gathered."""
        for views in list(GatheredParameter.views):
            index = views.index(self)
            if index is not None:
                kept = views.source.grad(index)
                if kept is not None and makes_graph():
                    # torch takes the gradient of what is no lazy tensor for none, too. It asks
                    # what it is like; what runs asks again.
                    return torch.empty(kept.shape, dtype=kept.dtype, device=kept.device)
                return kept
        found: torch.Tensor | None = _GRAD.__get__(self)
        return found

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        for views in list(GatheredParameter.views):
            index = views.index(self)
            if index is not None:
                views.source.set_grad(index, value)
                return
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """As of any tensor: `hook` is called with the parameter, also when that is a handle
        again."""
        return super().register_post_accumulate_grad_hook(passing(self, hook))  # type: ignore[no-untyped-call]

    def set_(self, *source: Any) -> torch.Tensor:
        """As of any tensor. Where `source` is what it has, nothing changes, and no version counts
        up: `torch.nn.utils.parametrize` registers an original so."""
        if len(source) == 1 and isinstance(source[0], torch.Tensor) and _is_same(self, source[0]):
            return self
        return super().set_(*source)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy is nobody's view, so it is a plain parameter."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are the same view of the same memory."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


class Views:
    """The parameters of a unit as views of its bytes; `attach` makes the parameters point there,
    until `detach`.

    `tensors` hold the data, and the parameters have the version counters: of a DTensor the former
    is its local tensor. Where that is asked for, each stay is checked by a digest of the whole
    content (`UnitFacts.checked`). The bytes are the copy of `block`.
    """

    def __init__(
        self,
        source: ParameterSource,
        tensors: Sequence[torch.Tensor],
        block: Block,
        resident: Residency,
    ) -> None:
        self.source = source
        """The data of the unit, which is asked for gradients."""
        self._facts, self._block, self._resident = source.facts, block, resident
        self._parameters, self._places = source.facts.parameters, source.facts.layout.places
        self._tensors = tensors
        self._address = -1
        self._windows: list[Window] = []  # of the run at this address, kept for the next stay there
        self._storages: list[int] = []  # theirs, of C++
        self._made: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._digests: dict[int, int] = {}
        self.writers = 0
        """How many uses allow writing; while there is one, nothing is noted of what changes."""
        self.grants = 0
        """How many uses have allowed writing so far."""
        self.keepers = 0
        """How many uses let aliases outlive them."""
        self._left: dict[int, torch.Tensor] = {}
        # The bytes of the unit that each parameter has left for memory of its own.

    def attach(self, flat: torch.Tensor) -> None:
        """The unit lies in `flat` (numel,) now, and its parameters point there."""
        address = flat.data_ptr()
        if address != self._address:
            self._windows = [Window(flat, place.offset, place.end) for place in self._places]
            self._storages = [window.storage._cdata for window in self._windows]
            with torch.inference_mode(False):
                self._made = [
                    w.tensor(place.shape)
                    for w, place in zip(self._windows, self._places, strict=True)
                ]
            self._address = address
        for tensor, view in zip(self._tensors, self._made, strict=True):
            _DATA.__set__(tensor, view)
        self._versions = self._versions_now()
        GatheredParameter.views.add(self)
        self._digests = (
            {index: window.digest() for index, window in enumerate(self._windows)}
            if self._facts.checked
            else {}
        )

    def take_assigned(self) -> list[str]:
        """Where `.data` of a parameter was assigned, take the content over. Returns the names of
        those that were given another shape or dtype, which is left out."""
        wrong = []
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for index, (tensor, view) in enumerate(zip(self._tensors, self._made, strict=True)):
                data = tensor.data
                if data.data_ptr() == view.data_ptr() or data.numel() == 0:
                    continue
                if data.shape == view.shape and data.dtype == view.dtype:
                    view.copy_(data)
                else:
                    wrong.append(self._facts.names[index])
                tensor.data = view
        return wrong

    def alias(self, parameter: torch.Tensor) -> None:
        """An alias of `parameter`, if that is one of these, is about to be made: where it may be
        kept, the parameter moves to memory of its own first."""
        if not self.keepers:
            return
        index = next((i for i, tensor in enumerate(self._tensors) if tensor is parameter), None)
        # Another view would stay behind, and not see what is written.
        if index is None or index in self._left or self._windows[index].references() != _OURS:
            return
        place, view = self._places[index], self._made[index]
        if not view.numel():
            return
        with torch.inference_mode(False), torch.no_grad():
            window = Window(view.flatten().clone(), 0, view.numel())
            own = window.tensor(place.shape)
        start = window.storage.data_ptr()
        self._resident.stand_in(
            self._block,
            place.offset * view.itemsize,
            range(start, start + window.storage.nbytes()),
        )
        self._left[index] = view
        self._windows[index], self._storages[index] = window, window.storage._cdata
        self._made[index] = own
        _DATA.__set__(self._tensors[index], own)

    def own(self, index: int) -> Window | None:
        """The memory of its own of parameter `index`, if it is shown there."""
        return self._windows[index] if index in self._left else None

    def settle(self) -> None:
        """The bytes of the unit get what parameters have in memory of their own."""
        for index, view in self._left.items():
            view.copy_(self._made[index])

    def follow(self) -> None:
        """Memory of their own gets what the bytes of the unit have."""
        for index, view in self._left.items():
            self._made[index].copy_(view)

    def detach(self) -> None:
        """The parameters point elsewhere again."""
        self._versions, self._digests = [], {}
        GatheredParameter.views.discard(self)
        # Somebody keeps a view: that is told once.
        if self._left or max(self._references(), default=0) > 1:
            self.close()

    def close(self) -> None:
        """Let the memory go."""
        self._address, self._windows, self._storages, self._made = -1, [], [], []
        if self._left:
            self._left = {}
            self._resident.end_stand_ins(self._block)
        self._versions, self._digests = [], {}
        GatheredParameter.views.discard(self)

    def _references(self) -> list[int]:
        """How many tensors refer to the bytes of each parameter."""
        return [_use_count(storage) - 1 for storage in self._storages]

    def _versions_now(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return [parameter._version for parameter in self._parameters]

    def watch(self, parameter: torch.Tensor) -> None:
        """Somebody gets an alias of `parameter`, if that is one of these, without its version
        counter."""
        if self.writers or not self._versions:
            return
        for index, tensor in enumerate(self._tensors):
            if tensor is parameter and index not in self._digests:
                self._digests[index] = self._windows[index].digest()

    def index(self, parameter: torch.Tensor) -> int | None:
        """The index of `parameter`, if that is one of these and shown."""
        return self.source.position(parameter) if self._versions else None

    def referenced(self) -> list[int]:
        """The parameters whose bytes somebody else refers to."""
        return [index for index, count in enumerate(self._references()) if count > _OURS]

    def changed(self) -> list[int]:
        """The parameters that were written to, or given other memory, since the last time that this
        was asked."""
        if self.writers:
            return []
        before = self._versions
        self._versions = self._versions_now()
        found = {
            index
            for index, (old, new) in enumerate(zip(before, self._versions, strict=True))
            if old != new
        }
        found.update(index for index, count in enumerate(self._references()) if count < _OURS)
        for index, old in list(self._digests.items()):
            self._digests[index] = self._windows[index].digest()
            if self._digests[index] != old:
                found.add(index)
        return sorted(found)
