"""Packs the tensors that autograd saves in a wrapped model's forward, and unpacks them for the
backward.

[Note: slots and saved tensors]
A unit's parameters point into its run of the compute arena only during the forward of a module that
uses them. Autograd saves views of them for the backward. Keeping those views alive would pin the
run. So `Packer` replaces each view by a `PackedView` (unit, geometry). `bring` gives autograd the
same view again, wherever the unit lies then. For a DTensor it is a view of its local tensor.

[Note: hooks under ours]
Torch calls only the innermost hooks on saved tensors. A model may enter hooks itself: non-reentrant
checkpoints and `save_on_cpu` are such hooks. These must not get views of parameters, because they
would keep the views while the bytes change. So each call of a hooked module puts the packer on top
of them again. The packer handles views of parameters itself and hands all other tensors down.
Example: checkpoint(block, x) enters hooks that drop the tensors that they get and recompute them in
the backward. With the packer on top, views of the block's weights never reach these hooks, in the
forward or in the recomputation. So the counts that the checkpoint compares agree.

[Note: hooks on top of ours]
A module may enter hooks inside its own forward, around an operation on its own parameter. Torch
would give these hooks the parameter itself, and no count of references shows that. So while a
packer is on top on any thread, `_Push` replaces torch's function that enters hooks. On a thread
with a packer on top, it enters the new hooks with the packer in front of them, as one pair. So the
code that takes them off works unchanged. On other threads it does the same as torch's function.

The hooks of a checkpoint that is entered this way get parameters, too. They keep no tensor, but
they count the tensors that they get. They count again in the recomputation, where no packer is on
top. The packer stays in front of them for hooks that are entered inside the checkpoint.
"""

from __future__ import annotations

import bisect
import functools
import threading
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from infinity.activations.partitions import PartitionedDTensor
from infinity.activations.saved_tensors import OffloadedTensor, SavedInPlace, SavedTensorOffloader
from infinity.compilation import uncompiled
from infinity.placement.spec import Kind
from infinity.sharding.lazy_tensor import LazyTensor
from infinity.sharding.tensor_parallel import Form, form_of, local
from infinity.sharding.unit import Unit
from infinity.sharding.use import handled

_NEEDED = (
    "infinity needs them, because parameters leave after a forward and must come back for the "
    "backward; call the wrapped model outside of torch.autograd.graph.disable_saved_tensors_hooks"
)
_CHECKPOINTS = "torch.utils.checkpoint"
_Pair = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class PackedView(NamedTuple):
    """A saved view of a parameter: where it lies in its unit, not where the unit lies."""

    unit: Unit
    kind: type[torch.Tensor]
    # May differ from the unit's, and the bits below may be set: complex numbers are views of real
    # numbers.
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # bytes from the start of the unit
    conjugate: bool
    negative: bool
    updates: int  # of the unit, when it was saved
    form: Form | None  # of the DTensor, if it is a local tensor

    def place(self) -> tuple[int, int]:
        """The index of the parameter that this is a view of, and the byte offset in it."""
        size = self.unit.facts.dtype.itemsize
        places = self.unit.facts.layout.places
        index = bisect.bisect_right(places, self.offset, key=lambda place: place.offset * size) - 1
        # A parameter without elements has the offset of the next one.
        return index, self.offset - places[index].offset * size

    def is_whole(self) -> bool:
        """Whether this is a view of a whole parameter, in its shape and dtype."""
        index, offset = self.place()
        shape = self.unit.facts.layout.places[index].shape
        return (
            self.form is None
            and self.dtype == self.unit.facts.dtype
            and offset == 0
            and tuple(shape) == tuple(self.size)
        )

    def restore(self, view: torch.Tensor) -> torch.Tensor:
        """The tensor that autograd saved, from the plain `view` of the same bytes."""
        if self.conjugate:
            view = view.conj()
        if self.negative:
            view = torch._neg_view(view)
        view = view if self.kind in (torch.Tensor, nn.Parameter) else _as(self.kind, view)
        return view if self.form is None else self.form.wrap(view)


class HandedDown(NamedTuple):
    """The object that the hooks under ours made of a tensor, and their unpack hook."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]


class Packer:
    """Packs and unpacks for one engine. `locate` maps an address to (unit, byte offset). `bring`
    returns the tensor of a view. `checkpointed` is called when a checkpoint is entered,
    `recomputed` before the hooks under ours unpack a tensor. `saves` is called with each other
    tensor that a forward saves."""

    def __init__(
        self,
        locate: Callable[[int], tuple[Unit, int] | None],
        offloader: SavedTensorOffloader,
        bring: Callable[[PackedView], torch.Tensor],
        checkpointed: Callable[[], None],
        recomputed: Callable[[], None],
        saves: Callable[[torch.Tensor], None] = lambda tensor: None,
    ) -> None:
        self._locate, self._offloader, self._bring = locate, offloader, bring
        self._recomputed, self._saves = recomputed, saves
        self.checkpointed = checkpointed
        """Called when a checkpoint was entered below this packer."""
        self.pack_hook = uncompiled(self.pack)
        """`pack`, for torch to call, through a `_Pack`."""
        self.unpack_hook = uncompiled(self.unpack)
        """`unpack`, for torch to call."""
        self.push = uncompiled(_push)
        """`_push`, for torch to call through a `_Push` while this packer is on top."""

    def context(self, recomputing: bool = False, keeps: bool = False) -> saved_tensors_hooks | None:
        """Hooks to enter now, on top of the present ones; None if the packer is on top already.

        Tensors that are saved while `recomputing` stay where they are, because their backward comes
        next. With `keeps`, those of a forward stay, too, also in calls inside it. Raises
        `RuntimeError` if hooks on saved tensors are disabled.
        """
        why = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
        if why is not None:
            raise RuntimeError(f"hooks on saved tensors are disabled here ({why}); {_NEEDED}")
        top = _top()
        if (
            top is not None
            and isinstance(top[0], _Pack)
            and top[0].packer is self
            and not top[0].passes
        ):
            if not keeps or top[0].keeps:
                return None
            top = top[0].under
        return _OnTop(_Pack(self, top, recomputing, keeps=keeps))

    def feeds_a_checkpoint(self) -> bool:
        """Whether saved tensors go to the hooks of a checkpoint now."""
        hooks = _top()
        while hooks is not None and isinstance(hooks[0], _Pack):
            hooks = hooks[0].under
        return hooks is not None and getattr(hooks[0], "__module__", None) == _CHECKPOINTS

    def pack(
        self,
        tensor: torch.Tensor,
        under: _Pair | None,
        recomputing: bool,
        passes: bool,
        keeps: bool,
    ) -> Any:
        """The object that autograd keeps of `tensor`. `under` are the pack and unpack hooks below
        ours. If it `passes`, they get all tensors, parameters among them."""
        found = None if passes else self.locate(tensor)
        if found is None:
            if under is None and isinstance(tensor, LazyTensor):
                return SavedInPlace(tensor)  # it has no memory
            if not passes and not recomputing:
                self._saves(tensor)
            if under is not None:
                return HandedDown(under[0](tensor), under[1])
            stays = recomputing or keeps
            return self._offloader.pack_here(tensor) if stays else self._offloader.pack(tensor)
        unit, offset = found
        form, tensor = form_of(tensor), local(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            size = tensor.size()
            stride = tensor.stride()
            conjugate = tensor.is_conj()
            negative = tensor.is_neg()
            kind = _kind_of(tensor)
            updates = unit.blocks[Kind.PARAM].home.updates
            return PackedView(
                unit, kind, tensor.dtype, size, stride, offset, conjugate, negative, updates, form
            )

    def unpack(self, saved: Any) -> torch.Tensor:
        """The tensor that autograd gave to `pack`."""
        if isinstance(saved, PackedView):
            return self._bring(saved)
        if isinstance(saved, HandedDown):
            self._recomputed()
            return saved.unpack(saved.packed)
        if isinstance(saved, SavedInPlace | OffloadedTensor | PartitionedDTensor):
            return saved.unpack()
        return saved

    def locate(self, tensor: torch.Tensor) -> tuple[Unit, int] | None:
        """The unit that contains the first byte of `tensor`, of any class, and the byte offset
        there; None if there is no such unit."""
        handle = handled(tensor)
        if handle is not None:
            unit, index = handle
            return unit, unit.facts.layout.places[index].offset * unit.facts.dtype.itemsize
        tensor = local(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            if tensor.layout is not torch.strided:
                return None
            try:
                address = tensor.data_ptr()
            except RuntimeError:  # a fake or functional tensor has no bytes
                return None
        return self._locate(address)


class _Pack(functools.partial[Any]):
    """The pack hook, with a class of its own to recognize it. `under` are the hooks below. If it
    `passes`, they get all tensors.

    It is a partial because its call has no Python frame that torch.compile would look into.
    """

    packer: Packer
    under: _Pair | None
    recomputing: bool
    passes: bool
    keeps: bool

    def __new__(
        cls,
        packer: Packer,
        under: _Pair | None,
        recomputing: bool,
        passes: bool = False,
        keeps: bool = False,
    ) -> _Pack:
        self = super().__new__(
            cls, packer.pack_hook, under=under, recomputing=recomputing, passes=passes, keeps=keeps
        )
        self.packer, self.under, self.recomputing, self.passes = packer, under, recomputing, passes
        self.keeps = keeps
        return self


class _OnTop(saved_tensors_hooks):
    """Enters the hooks of a packer. Until its end, the packer stays in front of hooks that are
    entered meanwhile."""

    def __init__(self, hook: _Pack) -> None:
        super().__init__(hook, hook.packer.unpack_hook)
        self._hook, self._packer = hook, hook.packer

    def __enter__(self) -> None:
        self._push = _Push.begin(self._packer)
        try:
            super().__enter__()
        except BaseException:
            self._push.end()
            raise

    def __exit__(self, *args: object) -> None:
        top = _top()
        # If Ctrl-C has cut off a recomputation, autograd has taken its hooks off already.
        if not self._hook.recomputing or (top is not None and top[0] is self._hook):
            super().__exit__(*args)
        self._push.end()


class _Push(functools.partial[None]):
    """Replaces torch's function that enters hooks, from `begin` until as many calls of `end`. It is
    a partial for the reason that `_Pack` is one."""

    _changing: ClassVar = threading.Lock()
    _plain: Callable[..., None]
    _users: int

    def __new__(cls, packer: Packer, plain: Callable[..., None]) -> _Push:
        self = super().__new__(cls, packer.push, plain)
        self._plain = plain
        self._users = 0
        return self

    @classmethod
    def begin(cls, packer: Packer) -> _Push:
        """The present `_Push`, or a new one, with one more user."""
        with cls._changing:
            found = torch._C._autograd._push_saved_tensors_default_hooks
            push = found if isinstance(found, cls) else cls(packer, found)
            torch._C._autograd._push_saved_tensors_default_hooks = push
            push._users += 1
        return push

    def end(self) -> None:
        """Remove a user. The last one puts torch's function back, unless other code has replaced
        this one."""
        with self._changing:
            self._users -= 1
            if not self._users and torch._C._autograd._push_saved_tensors_default_hooks is self:
                torch._C._autograd._push_saved_tensors_default_hooks = self._plain


def _push(
    plain: Callable[..., None],
    pack_hook: Callable[[torch.Tensor], Any],
    unpack_hook: Callable[[Any], torch.Tensor],
) -> None:
    """Enter these hooks with torch's function `plain`, behind the packers that are in front now."""
    hooks: _Pair = pack_hook, unpack_hook
    if not isinstance(pack_hook, _Pack):
        passes = getattr(pack_hook, "__module__", None) == _CHECKPOINTS
        for front in _in_front():
            if passes:
                front.packer.checkpointed()
            hooks = (
                _Pack(front.packer, hooks, front.recomputing, passes, front.keeps),
                front.packer.unpack_hook,
            )
    plain(*hooks)


def _top() -> _Pair | None:
    """The hooks that torch calls now, if any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _in_front() -> list[_Pack]:
    """One hook of each packer in front of the hooks that torch calls now, the innermost first."""
    found: dict[Packer, _Pack] = {}
    hooks = _top()
    while hooks is not None and isinstance(hooks[0], _Pack):
        found.setdefault(hooks[0].packer, hooks[0])
        hooks = hooks[0].under
    return [*reversed(found.values())]


def _kind_of(tensor: torch.Tensor) -> type[torch.Tensor]:
    """The class of the saved tensor when it comes back with memory."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter
    return torch.Tensor if isinstance(tensor, LazyTensor) else type(tensor)


def _as(kind: type[torch.Tensor], view: torch.Tensor) -> torch.Tensor:
    try:
        return view.as_subclass(kind)
    except (RuntimeError, TypeError):  # the class needs more than bytes
        return view
