"""`.grad` of a wrapped parameter: a tensor without data that knows the gradient's place in the
engine.

[Note: operators of a lazy gradient]
`torch.nn.utils.clip_grad_norm_`, `GradScaler.unscale_` and their kin use few operators on
gradients. These are answered without bringing data:

| operator | answer |
|---|---|
| L2 norm, of one or of all | read in chunks, in double precision, as for `Engine.clip_grad_norm_` |
| norm of another order | each gradient is fetched alone |
| `mul_` by a number | a factor that the update applies, as of `Engine.clip_grad_norm_` |
| whether all are finite | from the norm of all |
| `zero_` | the gradient block is zeroed in chunks |
| shape, dtype, device, `detach`, `zeros_like` | known |

Any other operator gets a copy. If it writes to the copy in place, the result becomes the gradient
(see [Note: operators on lazy tensors] in `sharding/lazy_tensor`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeGuard

import torch

from infinity.backward import in_backward
from infinity.errors import ShardedParameterError, in_words
from infinity.optim.assigned import AssignedTensor
from infinity.optim.gradient_object import GradientObject, GradientPlace, dtype_of
from infinity.optim.lazy_norm import L2, LazyNorm, NormTaken, is_l2
from infinity.optim.norm import clip
from infinity.optim.step import UnitShare
from infinity.optim.updater import Updater
from infinity.placement.spec import Kind
from infinity.sharding.facts import UnitFacts
from infinity.sharding.gradient_ledger import GradientState
from infinity.sharding.lazy_tensor import LazyTensor, brought
from infinity.sharding.listeners import Grads
from infinity.sharding.tensor_parallel import part_in, whole
from infinity.sharding.unit import Unit

_ATEN: Any = torch.ops.aten
_At = tuple[Unit, int]  # the gradient of one parameter


class LazyGradients(Grads):
    """Answers for the gradients of one engine. Used by the thread that runs the model. All ranks
    make the same calls."""

    def __init__(self, units: Sequence[Unit], updater: Updater, device: torch.device) -> None:
        self._all, self._units = tuple(units), [unit for unit in units if unit.facts.trainable]
        self._updater = updater
        self.device = device
        """The device of the gradients in the plain model."""
        self._assigned: dict[_At, AssignedTensor] = {}
        # The object of each gradient that users hold.
        self._objects: weakref.WeakValueDictionary[_At, GradientObject] = (
            weakref.WeakValueDictionary()
        )
        self._handles: weakref.WeakValueDictionary[_At, LazyGradient] = (
            weakref.WeakValueDictionary()
        )
        # Objects that are the gradient of several parameters.
        self._shared: dict[_At, GradientObject] = {}
        self._norms: dict[Unit, weakref.WeakSet[NormTaken]] = {}

    # .grad

    def get(self, facts: UnitFacts, index: int) -> torch.Tensor | None:
        """`.grad` of parameter `index`. Ranks first agree which gradients exist."""
        unit = self._all[facts.index]
        if unit.ranks.number > 1 and not in_backward():
            self.settle()
        if unit.data.is_uncollected(index):  # in a hook of the user
            self.settle(unit.facts.names[index])
        if not unit.gradients.ledger.has(index):
            return None
        assigned = self._assigned.get((unit, index))
        tensor = None if assigned is None else assigned.tensor()
        if (
            tensor is not None
            and tensor.dtype is unit.facts.gradient_dtype
            and self._is_here(tensor)
        ):
            return tensor
        found = self._handles.get((unit, index))
        if found is None or not found.gradient.is_at(unit, index):
            found = self._handles[unit, index] = LazyGradient(self._object(unit, index))
        return found

    def set(self, facts: UnitFacts, index: int, value: torch.Tensor | None) -> None:
        """Set `.grad` of parameter `index`. None forgets it; a tensor of its shape becomes the
        gradient. All ranks must give equal tensors."""
        unit = self._all[facts.index]
        if value is None:
            if unit.data.is_uncollected(index):  # in a hook of the user
                self.settle(unit.facts.names[index])
            unit.gradients.forget([index])
            return
        whole = whole_gradient(value)
        if whole is not None and whole.is_at(unit, index):
            return
        self._check(unit, index, value)
        self.settle(unit.facts.names[index])
        given = value.gradient if _can_be_shared(value, unit, index) else None
        values = brought(value.detach())
        self._leave(unit, index)
        self._write(unit, index, values)
        if given is not None:
            self._join(given, unit, index)
        else:
            self._keep(unit, index, value)

    def _check(self, unit: Unit, index: int, value: Any) -> None:
        """Raise if `value` cannot become the gradient."""
        parameter, name = unit.facts.parameters[index], unit.facts.names[index]
        if not unit.facts.trainable:
            raise ShardedParameterError(
                f"{name} was frozen (requires_grad=False) when the model was wrapped, so it has no "
                "place for a gradient"
            )
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"the gradient assigned to {name} is {in_words(value)}; give a tensor, or None to "
                "forget the gradient"
            )
        if value.shape != parameter.shape:
            raise ShardedParameterError(
                f"the gradient assigned to {name} has shape {tuple(value.shape)}, the parameter "
                f"has {tuple(parameter.shape)}"
            )
        memory = value.detach()
        if isinstance(memory, LazyTensor) and not _can_be_shared(value, unit, index):
            memory.check_follows(f"the gradient of {name}")

    def write(self, unit: Unit, index: int, values: torch.Tensor) -> None:
        """Replace the gradient by `values`, in place."""
        self.settle(unit.facts.names[index])
        self._write(unit, index, values)
        assigned = self._assigned.get((unit, index))
        tensor = None if assigned is None else assigned.tensor()
        if assigned is not None and tensor is not None:
            with torch.no_grad():
                tensor.copy_(values)
            assigned.note()

    def alias(self, unit: Unit, index: int, value: torch.Tensor) -> None:
        """The gradient shares the memory of `value` from now on."""
        self.settle(unit.facts.names[index])
        self._write(unit, index, value.detach())
        self._keep(unit, index, value)

    def _write(self, unit: Unit, index: int, values: torch.Tensor) -> None:
        dense = values if values.layout is torch.strided else values.to_dense()
        unit.gradients.assign(index, part_in(dense.detach(), unit.facts.parameters[index]))

    def _keep(self, unit: Unit, index: int, tensor: torch.Tensor) -> None:
        """`tensor` was assigned, and code of the user may still change it."""
        with torch._C.DisableTorchFunctionSubclass():
            if (
                type(tensor) in (torch.Tensor, torch.nn.Parameter)
                and tensor.layout is torch.strided
            ):
                self._assigned[unit, index] = AssignedTensor(tensor)

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return (tensor.device.type, tensor.device.index or 0) == (
            self.device.type,
            self.device.index or 0,
        )

    # Objects

    def _object(self, unit: Unit, index: int) -> GradientObject:
        """The gradient of a parameter as an object."""
        found = self._objects.get((unit, index))
        if found is None or not found.is_at(unit, index):
            found = self._objects[unit, index] = GradientObject()
            found.enter(self, unit, index)
        return found

    def _leave(self, unit: Unit, index: int) -> None:
        """Another gradient replaces the gradient of a parameter. Code that still holds the old one
        keeps its values."""
        self._assigned.pop((unit, index), None)
        old = self._objects.pop((unit, index), None)
        self._handles.pop((unit, index), None)
        self._shared.pop((unit, index), None)
        if old is not None and old.is_at(unit, index):
            old.leave(unit, index)

    def _join(self, gradient: GradientObject, unit: Unit, index: int) -> None:
        """`gradient` is the gradient of this parameter from now on, perhaps also of others."""
        gradient.enter(self, unit, index)
        self._objects[unit, index] = gradient
        places = gradient.places()
        for place in places:
            shared = gradient if len(places) > 1 else None
            place.answers.share(place.unit, place.position, shared)

    def share(self, unit: Unit, index: int, gradient: GradientObject | None) -> None:
        """`gradient` belongs to several parameters, of which this is one. None: no longer."""
        self._shared.pop((unit, index), None)
        if gradient is not None:
            self._shared[unit, index] = gradient

    # Before a gradient changes

    def changing(
        self,
        facts: UnitFacts,
        indices: Iterable[int],
        change: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        """See `Grads`. Raises `ShardedParameterError` if another parameter has the same gradient
        tensor, which would change, too."""
        unit = self._all[facts.index]
        self._freeze(unit)
        if change is None or not (self._assigned or self._shared):
            return
        for at in [(unit, index) for index in indices]:
            shared = self._shared.get(at)
            if shared is not None and shared.is_at(*at) and len(shared.places()) > 1:
                raise ShardedParameterError(
                    f"the gradient of {unit.facts.names[at[1]]} of a wrapped model was assigned to "
                    "that of another parameter, too, and would change there; assign a copy: "
                    "a.grad = b.grad.clone()"
                )
            assigned = self._assigned.get(at)
            tensor = None if assigned is None else assigned.tensor()
            if tensor is not None:
                with torch.no_grad():
                    change(tensor)

    def forgetting(self, facts: UnitFacts, indices: Iterable[int]) -> None:
        """See `Grads`."""
        unit = self._all[facts.index]
        self._freeze(unit)
        for index in indices if self._assigned or self._shared else ():
            self._assigned.pop((unit, index), None)
            self._shared.pop((unit, index), None)

    def settled(self, facts: UnitFacts) -> None:
        """Adopt writes to tensors that were assigned."""
        unit = self._all[facts.index]
        for (other, index), assigned in list(self._assigned.items()):
            if other is unit and unit.gradients.ledger.state is not GradientState.COLLECTING:
                tensor = assigned.take()
                if tensor is not None:
                    self._write(unit, index, tensor)
                elif assigned.tensor() is None:
                    del self._assigned[unit, index]

    def _freeze(self, unit: Unit) -> None:
        for norm in self._norms.pop(unit, ()):
            norm.freeze()

    # Reads and operators

    def settle(self, name: str = "a parameter") -> None:
        """Make all gradients final; returns when no update reads them. `name` is for the error."""
        if in_backward():
            raise ShardedParameterError(
                f"the gradient of {name} is kept by the engine and not final inside of a backward; "
                "use it after backward(), or give parameter.register_hook a function, which gets "
                "the gradient of this backward"
            )
        collecting = any(
            unit.gradients.ledger.state is GradientState.COLLECTING for unit in self._units
        )
        self._updater.settle(self._units if collecting else ())
        for unit in self._units if self._assigned else ():
            self.settled(unit.facts)

    def fetch(self, facts: UnitFacts, index: int) -> torch.Tensor | None:
        """A copy of the whole `.grad` of the plain model, on the host. If the loss was scaled, it
        is in fp32 and unscaled. None if there is no gradient."""
        unit = self._all[facts.index]
        self.settle(unit.facts.names[index])
        if not unit.gradients.ledger.has(index):
            return None
        scale, factor = unit.gradients.ledger.scale_of(index), unit.gradients.ledger.clip_of(index)
        found = whole(unit.states.parameter(Kind.GRAD, index), unit.facts.parameters[index]).clone()
        found = found if scale == 1.0 else found.float() / scale
        return found if factor == 1.0 else found.mul_(factor)

    def norm(self, shares: Sequence[UnitShare]) -> float:
        """The common L2 norm of these gradients."""
        self.settle()
        return self._updater.norm.of(shares)

    def take_norm(self, unit: Unit, index: int) -> NormTaken:
        """The L2 norm of the current gradient."""
        self.settle(unit.facts.names[index])
        taken = NormTaken(self, unit, index)
        self._norms.setdefault(unit, weakref.WeakSet()).add(taken)
        return taken

    def squares_here(self, share: UnitShare) -> float:
        """The squared norm of this rank's part of the gradients."""
        share.unit.listeners.updates.await_readers(share.unit.facts)
        return self._updater.norm.here(share)

    def over_ranks(self, squares: float) -> float:
        """The sum of `squares_here` over the ranks."""
        self.settle()
        return self._updater.norm.over_ranks(squares)

    def scale(self, shares: Sequence[UnitShare], factor: float) -> None:
        """Multiply these gradients by `factor`, as a clip does."""
        self.settle()
        clip(shares, factor)

    def zero(self, shares: Sequence[UnitShare]) -> None:
        """Set these gradients to zeros."""
        self.settle()
        for unit, positions in shares:
            unit.gradients.zero(positions)


def _can_be_shared(value: Any, unit: Unit, index: int) -> TypeGuard[LazyGradient]:
    """Whether this parameter can share the gradient `value`."""
    return isinstance(value, LazyGradient) and value.dtype is dtype_of(unit, index)


def shares_of(places: Sequence[GradientPlace]) -> list[UnitShare]:
    """These gradients, unit by unit."""
    positions: dict[Unit, list[int]] = {}
    for place in places:
        positions.setdefault(place.unit, []).append(place.position)
    return [UnitShare(unit, tuple(sorted(found))) for unit, found in positions.items()]


def _number(value: Any) -> float | None:
    """`value` as a factor; None when it is a tensor of several elements."""
    if isinstance(value, torch.Tensor):
        return float(brought(value)) if value.dim() == 0 and not value.is_complex() else None
    return float(value) if isinstance(value, (int, float)) else None


# Operators without data. Each returns NotImplemented if data is needed.


def _place(tensor: Any) -> GradientPlace | None:
    """The only parameter with the gradient `tensor`; None for any other value."""
    return tensor.gradient.place if isinstance(tensor, LazyGradient) else None


def _norm(func: Any, tensor: Any, order: Any = L2, *rest: Any, **named: Any) -> Any:
    place = _place(tensor)
    if rest or named or place is None or not is_l2(order):
        return NotImplemented
    return LazyNorm(
        [place.answers.take_norm(place.unit, place.position)], tensor.dtype, several=False
    )


def _norms(func: Any, tensors: Sequence[Any], order: Any = L2, *rest: Any, **named: Any) -> Any:
    if rest or named:
        return NotImplemented
    return [torch.linalg.vector_norm(tensor, order) for tensor in tensors]


def _scale(func: Any, tensor: Any, factor: Any) -> Any:
    number, place = _number(factor), _place(tensor)
    if place is None or number is None:
        return NotImplemented
    place.answers.scale([place.share], number)
    return tensor


def _scale_all(func: Any, tensors: Sequence[Any], factor: Any) -> Any:
    factors = factor if isinstance(factor, (list, tuple)) else [factor] * len(tensors)
    for tensor, each in zip(tensors, factors, strict=True):
        tensor.mul_(each)


def _unscale_all(
    func: Any, tensors: Sequence[Any], found_inf: torch.Tensor, inverse: torch.Tensor
) -> None:
    found = [(tensor, _place(tensor)) for tensor in tensors]
    places = [place for _, place in found if place is not None]
    for answers in dict.fromkeys(place.answers for place in places):
        shares = shares_of([place for place in places if place.answers is answers])
        if not math.isfinite(answers.norm(shares)):
            found_inf.fill_(1.0)
        answers.scale(shares, float(inverse))
    for tensor in [tensor for tensor, place in found if place is None]:
        values = brought(tensor)
        func([values], found_inf, inverse)
        if values is not tensor:
            tensor.copy_(values)


def _zero(func: Any, tensor: Any) -> Any:
    place = _place(tensor)
    if place is None:
        return NotImplemented
    place.answers.zero([place.share])
    return tensor


_ANSWERS: dict[Any, Callable[..., Any]] = {
    _ATEN.linalg_vector_norm.default: _norm,
    _ATEN.norm.Scalar: _norm,
    _ATEN._foreach_norm.Scalar: _norms,
    _ATEN.mul_.Tensor: _scale,
    _ATEN.mul_.Scalar: _scale,
    _ATEN._foreach_mul_.Tensor: _scale_all,
    _ATEN._foreach_mul_.Scalar: _scale_all,
    _ATEN._foreach_mul_.ScalarList: _scale_all,
    _ATEN._amp_foreach_non_finite_check_and_unscale_.default: _unscale_all,
    _ATEN.zero_.default: _zero,
}


class LazyGradient(LazyTensor):
    """`.grad` of a wrapped parameter. See [Note: operators of a lazy gradient]."""

    answers = _ANSWERS

    @staticmethod
    def __new__(cls, gradient: GradientObject) -> Any:
        _ = gradient.place  # raises if it was forgotten
        like = gradient.like()
        return cls.without_data(like.shape, like.dtype, like.device)

    def __init__(self, gradient: GradientObject) -> None:
        self.gradient = gradient
        """The gradient of this handle."""

    @property
    def called(self) -> str:
        """The name in errors."""
        return f"the gradient of {self.gradient.name} of a wrapped model"

    @property
    def memory(self) -> Hashable:
        """A value that is equal for all handles of one gradient."""
        return id(self.gradient)

    def fetch(self) -> torch.Tensor:
        """A copy of the gradient on its device."""
        _ = self.gradient.place
        return self.gradient.fetch().to(self.dtype)

    def detached(self) -> LazyGradient:
        """Another handle of the gradient."""
        return LazyGradient(self.gradient)

    def check_replace(self) -> None:
        """Raises `ShardedParameterError` if it was forgotten."""
        _ = self.gradient.place

    def replace(self, values: torch.Tensor) -> None:
        """`values` become the gradient of the parameter."""
        self.gradient.replace(values)

    def assign(self, values: Any) -> None:
        """`.data = values`: as in torch, the gradient has this memory from now on."""
        place = self.gradient.place
        if isinstance(values, LazyTensor):
            if whole_gradient(values) is self.gradient:
                return
            values.check_follows(self.called)
        if place is None or values.shape != self.shape or values.dtype != self.dtype:
            super().assign(values)
        else:
            place.answers.alias(place.unit, place.position, brought(values))


def whole_gradient(tensor: Any) -> GradientObject | None:
    """The gradient of the handle `tensor`, or of a view of all of it in the same layout; None for
    any other value."""
    if not isinstance(tensor, LazyTensor) or not isinstance(tensor.root, LazyGradient):
        return None
    mine, whole = (
        (each.shape, each.stride(), each.dtype, each.is_neg())
        for each in (tensor.stand_in(), tensor.root.stand_in())
    )
    return tensor.root.gradient if mine == whole else None
