"""What autograd saves inside of a wrapped model's forward, and what comes back for the backward.

[Note: slots and saved tensors]
A unit's parameters point into its run of the compute arena only while a module that uses them is in its forward. Autograd saves
views of them for the backward, and keeping those views alive would pin the run. So `Packer` replaces each view by a `PackedView`
(unit, geometry). Autograd gets the same view again from `bring`, wherever the unit then lies. Of a DTensor that is its local
tensor.

[Note: hooks under ours]
Torch asks only the innermost hooks on saved tensors, and a model may enter some itself: non-reentrant checkpoints are such hooks,
and `save_on_cpu`. They must not get views of parameters: they would keep them, and the bytes would change below them. So the
packer goes on top of them again at each call of a hooked module, keeps the parameters for itself, and hands all else down.
Example: checkpoint(block, x) enters hooks that drop what they are given and recompute it in backward. With the packer on top, the
views of the block's weights never get there, in the forward and in the recomputation alike, so the counts that the checkpoint
compares agree. Where a model enters hooks inside of a call, and calls no hooked module below, views reach them: see
`infinity.sharding.use`, which finds those that are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from infinity.modules.activations import Keeper, Kept, Packed
from infinity.sharding.tensor_parallel import Form, form_of, local
from infinity.sharding.unit import Unit
from infinity.tiers.block import Kind

NO_GRAPH = (
    "infinity brings the parameters of each unit, such as a block, in a hook, which cannot be a part of a graph: "
    "compile block after block, or leave out fullgraph=True"
)


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

    def restore(self, view: torch.Tensor) -> torch.Tensor:
        """What autograd saved, given the plain view of the same bytes."""
        if self.conjugate:
            view = view.conj()
        if self.negative:
            view = torch._neg_view(view)
        view = view if self.kind in (torch.Tensor, nn.Parameter) else _as(self.kind, view)
        return view if self.form is None else self.form.wrap(view)


class HandedDown(NamedTuple):
    """What the hooks under ours made of a tensor."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]


def uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """`hook`, with a frame of torch's around it: torch.compile does not look into it."""
    disabled: Callable[..., Any] = torch.compiler.disable(hook, reason=NO_GRAPH)
    return disabled


class Packer:
    """Packs and unpacks for one engine. `locate` maps an address to (unit, byte offset); `bring` gives the tensor of a view."""

    def __init__(
        self, locate: Callable[[int], tuple[Unit, int] | None], keeper: Keeper, bring: Callable[[PackedView], torch.Tensor]
    ) -> None:
        self._locate, self._keeper, self._bring = locate, keeper, bring
        self._unpack = uncompiled(self.unpack)

    def context(self, recomputing: bool = False) -> saved_tensors_hooks | None:
        """Hooks to enter now, on top of those that are there; None where the packer is on top already.

        What is saved while `recomputing` stays where it is, for its backward comes next.
        """
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if top is not None and isinstance(top[0], _Pack) and top[0].packer is self:
            return None
        return saved_tensors_hooks(_Pack(self, top, recomputing), self._unpack)

    def pack(self, tensor: torch.Tensor, under: Any, recomputing: bool) -> Any:
        """What autograd keeps of `tensor`; `under` are the pack and unpack hooks below ours, or None."""
        found = self.locate(tensor)
        if found is None:
            if under is not None:
                return HandedDown(under[0](tensor), under[1])
            return self._keeper.pack_here(tensor) if recomputing else self._keeper.pack(tensor)
        unit, offset = found
        form, tensor = form_of(tensor), local(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            size, stride, conjugate, negative = tensor.size(), tensor.stride(), tensor.is_conj(), tensor.is_neg()
            kind = nn.Parameter if isinstance(tensor, nn.Parameter) else type(tensor)
            updates = unit.blocks[Kind.PARAM].updates
            return PackedView(unit, kind, tensor.dtype, size, stride, offset, conjugate, negative, updates, form)

    def unpack(self, saved: Any) -> torch.Tensor:
        """What autograd gave to `pack`."""
        if isinstance(saved, PackedView):
            return self._bring(saved)
        if isinstance(saved, HandedDown):
            return saved.unpack(saved.packed)
        return saved.unpack() if isinstance(saved, Kept | Packed) else saved

    def locate(self, tensor: torch.Tensor) -> tuple[Unit, int] | None:
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


class _Pack:
    """The pack hook, which can be told from those of others."""

    def __init__(self, packer: Packer, under: Any, recomputing: bool) -> None:
        self.packer, self._under, self._recomputing = packer, under, recomputing

    def __call__(self, tensor: torch.Tensor) -> Any:
        return self.packer.pack(tensor, self._under, self._recomputing)

    __call__ = uncompiled(__call__)


def _as(kind: type[torch.Tensor], view: torch.Tensor) -> torch.Tensor:
    try:
        return view.as_subclass(kind)
    except (RuntimeError, TypeError):  # a class that wants more than bytes
        return view
