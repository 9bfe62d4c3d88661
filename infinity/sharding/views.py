"""Parameters as views of their unit's bytes on the compute device.

[Note: views that outlive a use]
The bytes of a unit belong to a run of the compute arena that another unit may get next. So a use
must not end while code can still reach these bytes through it. No code may have written to them:
the copy is clean (invariant I1). Both are checked. Each parameter points at a storage of its own: a
slice of the arena's storage, an object with a count of references. Further references are views
that outlive the use: an output, an attribute of a module, a tensor saved by hooks of the model. A
write shows in the version counter of the parameter, or in its data pointer if `.data` was assigned.
The alias that `.data` returns shares memory without the counter. So a read of `.data` makes the
unit note a digest of the content, and the end compares it (`GatheredParameter`). With
`Tuning.poison` all content has a digest.

[Note: aliases that scripts keep]
Scripts of DeepSpeed keep `.data` and `.detach()` of gathered parameters. Inside `gathered_to_keep`
the first of these calls on a parameter moves the parameter to memory of its own. The alias gets the
same memory, which lives as long as its last view. No budget counts it. The bytes of the unit have
the old content until the end of a block that may write (`Views.settle`). Autograd finds the unit by
the address of both (`Addresses.block_at`).
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
from infinity.tiers.addresses import Addresses
from infinity.tiers.block import Block

_DATA: Any = torch.Tensor.data
_GRAD: Any = torch.Tensor.grad
_OURS = 2  # references to the bytes of a parameter: the parameter, and the view behind it
_use_count: Callable[[int], int] = torch._C._storage_Use_Count
_DIGESTED = 1 << 17  # int64 numbers at a time: 1 MiB, and as much again for their products
_FACTOR = 0x9E3779B97F4A7C1  # multiplies the digest before the digest of the next part is added


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
        """The number of tensors that refer to this memory through this storage."""
        return _use_count(self.storage._cdata) - 1

    def digest(self) -> int:
        """A number that changes with the content: the 64-bit sum of each 8 bytes times an odd
        number for their place."""
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
    """The class of a plain parameter while it points at bytes of its unit. It is the same for all
    units, because guards of compiled code check it."""

    ds_status = ZeroStatus.AVAILABLE

    def __new__(cls, *given: Any, **named: Any) -> Any:
        """`type(parameter)(data)` is a plain parameter, which no engine manages."""
        return nn.Parameter(*given, **named)

    views: ClassVar[weakref.WeakSet[Views]] = weakref.WeakSet()
    """The views of all shown units. They are found here, because no attribute may be set on a
    parameter."""

    @property
    def data(self) -> torch.Tensor:
        """As of any tensor. The unit notes a digest, because no counter shows writes to this
        alias."""
        if torch.compiler.is_compiling():
            return self.detach()  # which shares the version counter
        for views in list(GatheredParameter.views):
            views.alias(self)
            views.watch(self)
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _DATA.__set__(self, brought(value))

    def detach(self) -> torch.Tensor:
        """As of any tensor; see [Note: aliases that scripts keep]. Raises `ShardedParameterError`
        inside of `nn.Parameter(parameter)`, which would share the memory."""
        if not torch.compiler.is_compiling():
            if sys._getframe(1).f_globals.get("__name__") == nn.Parameter.__module__:
                refuse_sharing()
            for views in list(GatheredParameter.views):
                views.alias(self)
        return super().detach()

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient that the engine has, as of a parameter that is not gathered."""
        for views in list(GatheredParameter.views):
            index = views.index(self)
            if index is not None:
                kept = views.source.grad(index)
                if kept is not None and makes_graph():
                    # Here torch needs a plain tensor, and only its metadata. The graph reads
                    # the gradient again when it runs.
                    return torch.empty(kept.shape, dtype=kept.dtype, device=kept.device)
                return kept
        return _GRAD.__get__(self)

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
        """As of any tensor. `hook` is called with the parameter, also if that is a handle by
        then."""
        return super().register_post_accumulate_grad_hook(passing(self, hook))  # type: ignore[no-untyped-call]

    def set_(self, *source: Any) -> torch.Tensor:
        """As of any tensor. If `source` is the same view of its memory, nothing changes, and no
        version counter: `torch.nn.utils.parametrize` registers an original in this way."""
        if len(source) == 1 and isinstance(source[0], torch.Tensor) and _is_same(self, source[0]):
            return self
        return super().set_(*source)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy is no view of a unit, so it is a plain parameter."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return memo[id(self)]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are the same view of the same memory."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


class Views:
    """The parameters of a unit as views of its bytes, the copy of `block`. From `attach` until
    `detach` the parameters point there.

    `tensors` hold the data; the tensor of a DTensor is its local tensor. The parameters have the
    version counters. If `UnitFacts.checked`, a digest of the whole content checks each stay. One
    class, because storages, versions and digests together say whether a stay has ended cleanly.
    """

    def __init__(
        self,
        source: ParameterSource,
        tensors: Sequence[torch.Tensor],
        block: Block,
        addresses: Addresses,
    ) -> None:
        self.source = source
        """The data of the unit. It has the gradients."""
        self._facts, self._block, self._addresses = source.facts, block, addresses
        self._parameters, self._places = source.facts.parameters, source.facts.layout.places
        self._tensors = tensors
        self._address = -1
        self._windows: list[Window] = []  # of the run at this address, for the next stay
        self._storages: list[int] = []  # the C++ storages of the windows
        self._made: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._digests: dict[int, int] = {}
        self.writers = 0
        """The number of uses that allow writing. While there is one, changes are not noted."""
        self.grants = 0
        """The number of uses that have allowed writing so far."""
        self.keepers = 0
        """The number of uses that let aliases outlive them."""
        # For each parameter with memory of its own, its bytes in the unit.
        self._left: dict[int, torch.Tensor] = {}

    def attach(self, flat: torch.Tensor) -> None:
        """The unit is in `flat` (numel,) now: let its parameters point there."""
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
        """Copy content that was assigned to `.data` of parameters. Returns the names of parameters
        that got another shape or dtype, whose content is dropped."""
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
        """An alias of `parameter`, if it is of this unit, is about to be made. If aliases may be
        kept, the parameter moves to memory of its own first."""
        if not self.keepers:
            return
        index = next((i for i, tensor in enumerate(self._tensors) if tensor is parameter), None)
        # Another view would stay behind, and not see writes.
        if index is None or index in self._left or self._windows[index].references() != _OURS:
            return
        place, view = self._places[index], self._made[index]
        if not view.numel():
            return
        with torch.inference_mode(False), torch.no_grad():
            window = Window(view.flatten().clone(), 0, view.numel())
            own = window.tensor(place.shape)
        start = window.storage.data_ptr()
        self._addresses.stand_in(
            self._block,
            place.offset * view.itemsize,
            range(start, start + window.storage.nbytes()),
        )
        self._left[index] = view
        self._windows[index], self._storages[index] = window, window.storage._cdata
        self._made[index] = own
        _DATA.__set__(self._tensors[index], own)

    def own(self, index: int) -> Window | None:
        """The own memory of parameter `index`; None if it is shown in the bytes of the unit."""
        return self._windows[index] if index in self._left else None

    def settle(self) -> None:
        """Copy the content of own memory of parameters into the bytes of the unit."""
        for index, view in self._left.items():
            view.copy_(self._made[index])

    def follow(self) -> None:
        """Copy the bytes of the unit into own memory of parameters."""
        for index, view in self._left.items():
            self._made[index].copy_(view)

    def detach(self) -> None:
        """The parameters no longer point at the bytes."""
        self._versions, self._digests = [], {}
        GatheredParameter.views.discard(self)
        # A view outlives the use. It is reported once.
        if self._left or max(self._references(), default=0) > 1:
            self.close()

    def close(self) -> None:
        """Release the memory."""
        self._address, self._windows, self._storages, self._made = -1, [], [], []
        if self._left:
            self._left = {}
            self._addresses.end_stand_ins(self._block)
        self._versions, self._digests = [], {}
        GatheredParameter.views.discard(self)

    def _references(self) -> list[int]:
        """The number of tensors that refer to the bytes of each parameter."""
        return [_use_count(storage) - 1 for storage in self._storages]

    def _versions_now(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return [parameter._version for parameter in self._parameters]

    def watch(self, parameter: torch.Tensor) -> None:
        """An alias of `parameter`, if it is of this unit, is about to be made without its version
        counter."""
        if self.writers or not self._versions:
            return
        for index, tensor in enumerate(self._tensors):
            if tensor is parameter and index not in self._digests:
                self._digests[index] = self._windows[index].digest()

    def index(self, parameter: torch.Tensor) -> int | None:
        """The index of `parameter`; None if it is not of this unit, or not shown."""
        return self.source.position(parameter) if self._versions else None

    def referenced(self) -> list[int]:
        """The parameters with further references to their bytes."""
        return [index for index, count in enumerate(self._references()) if count > _OURS]

    def changed(self) -> list[int]:
        """The parameters that were written to, or got other memory, since the last call."""
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
