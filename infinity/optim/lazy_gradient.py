"""What `.grad` of a wrapped parameter is: a tensor without data that knows the gradient's place in
the engine.

[Note: what a lazy gradient answers]
`torch.nn.utils.clip_grad_norm_`, `GradScaler.unscale_` and their kin ask gradients for few things.
These are answered without bringing data:

| operator | answer |
|---|---|
| L2 norm, of one or of all | read in chunks, in double precision, as for `Engine.clip_grad_norm_` |
| norm of another order | each gradient is fetched alone |
| `mul_` by a number | a factor that the update applies, as of `Engine.clip_grad_norm_` |
| whether all are finite | from the norm of all |
| `zero_` | the gradient block is zeroed in chunks |
| shape, dtype, device, `detach`, `zeros_like` | known |

Any other operator gets a copy, and what it writes in place becomes the gradient (see [Note:
operators on lazy tensors] in `sharding/lazy_tensor`).

[Note: a norm that is not computed yet]
`clip_grad_norm_` takes the norm of every gradient, and then the norm of these norms. Computed so,
each gradient would be read for its own, and rounded once more. So the norm of one is lazy, too
(`LazyNorm`). The L2 norm of several of them is one pass over the gradients, and has the bits of the
engine's own: a 0-dimensional tensor in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from infinity.backward import in_backward
from infinity.errors import ShardedParameterError, in_words
from infinity.optim.norm import clip
from infinity.optim.step import UnitShare
from infinity.optim.updater import Updater
from infinity.placement.spec import Kind
from infinity.sharding.gradients import GradientState
from infinity.sharding.lazy_tensor import LazyTensor, brought
from infinity.sharding.tensor_parallel import part_in, whole
from infinity.sharding.unit import Grads, Unit

_ATEN: Any = torch.ops.aten
_L2 = 2.0
_PART = (
    "a part of a copy of a gradient was changed in place, which would be lost; change the "
    "gradient itself, or set it: parameter.grad = tensor"
)


class LazyGradients(Grads):
    """Answers for the gradients of one engine. For the thread that runs the model; with several
    ranks all call alike."""

    def __init__(self, units: Sequence[Unit], updater: Updater, device: torch.device) -> None:
        self._units = [unit for unit in units if unit.trainable]
        self._updater = updater
        self.device = device
        """Where the plain model would have them."""

    def get(self, unit: Unit, index: int) -> torch.Tensor | None:
        """`.grad` of parameter `index`. Ranks agree first which gradients there are."""
        if unit.ranks.number > 1 and not in_backward():
            self.settle()
        return LazyGradient(self, unit, index) if unit.gradients.has(index) else None

    def set(self, unit: Unit, index: int, value: torch.Tensor | None) -> None:
        """Set `.grad` of parameter `index`: None forgets it, a tensor of its shape becomes the
        gradient. On several ranks it has to be the same tensor."""
        if value is None:
            unit.gradients.forget([index])
            return
        if isinstance(value, LazyGradient) and value.is_of(unit, index):
            return
        parameter, name = unit.parameters[index], unit.names[index]
        if not unit.trainable:
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
        self.settle(name)
        unit.gradients.assign(index, part_in(value.detach(), parameter))

    def settle(self, name: str = "a parameter") -> None:
        """Make all gradients final; returns when no update reads them. `name` is for the error."""
        if in_backward():
            raise ShardedParameterError(
                f"the gradient of {name} is kept by the engine and not final inside of a backward; "
                "read it after backward()"
            )
        collecting = any(unit.gradients.state is GradientState.COLLECTING for unit in self._units)
        self._updater.settle(self._units if collecting else ())

    def fetch(self, unit: Unit, index: int) -> torch.Tensor | None:
        """A copy on the host of what `.grad` of the plain model would be, whole; in fp32 where the
        loss was scaled, which is divided out. None when there is none."""
        self.settle(unit.names[index])
        if not unit.gradients.has(index):
            return None
        scale, factor = unit.gradients.loss_scale, unit.gradients.clip_of(index)
        found = whole(unit.states.parameter(Kind.GRAD, index), unit.parameters[index]).clone()
        found = found if scale == 1.0 else found.float() / scale
        return found if factor == 1.0 else found.mul_(factor)

    def norm(self, shares: Sequence[UnitShare]) -> float:
        """The common L2 norm of these gradients."""
        self.settle()
        return self._updater.norm.of(shares)

    def scale(self, shares: Sequence[UnitShare], factor: float) -> None:
        """Multiply these gradients by `factor`, as a clip does."""
        self.settle()
        clip(shares, factor)

    def zero(self, shares: Sequence[UnitShare]) -> None:
        """These gradients are zeros."""
        self.settle()
        for unit, positions in shares:
            unit.gradients.zero(positions)


class _Part(NamedTuple):
    """The gradient of one parameter."""

    answers: LazyGradients
    unit: Unit
    place: int

    @property
    def share(self) -> UnitShare:
        return UnitShare(self.unit, (self.place,))

    def norm(self, order: float) -> torch.Tensor:
        """Of any order, 0-dimensional, of the dtype that torch gives it."""
        if order == _L2:
            found = self.answers.norm([self.share])
            return torch.tensor(found, dtype=dtype_of(self.unit), device=self.answers.device)
        norm: torch.Tensor = torch.linalg.vector_norm(self.fetch(), order)
        return norm

    def fetch(self) -> torch.Tensor:
        """A copy where the plain model would have it."""
        found = self.answers.fetch(self.unit, self.place)
        if found is None:
            raise ShardedParameterError(forgotten(self.unit.names[self.place]))
        return found.to(self.answers.device)


def dtype_of(unit: Unit) -> torch.dtype:
    """The dtype of the gradients of `unit`, as users see them."""
    return unit.gradient_dtype if unit.gradients.loss_scale == 1.0 else torch.float32


def forgotten(name: str) -> str:
    """What is wrong with a lazy gradient that its parameter has no more."""
    return (
        f"the gradient of {name} was forgotten since .grad was read; keep a copy (.clone()) from "
        "before zero_grad()"
    )


def shares_of(parts: Sequence[_Part]) -> list[UnitShare]:
    """The gradients of `parts`, unit by unit."""
    positions: dict[Unit, list[int]] = {}
    for part in parts:
        positions.setdefault(part.unit, []).append(part.place)
    return [UnitShare(unit, tuple(sorted(found))) for unit, found in positions.items()]


def _number(value: Any) -> float | None:
    """`value` as a factor; None when it is a tensor of several elements."""
    if isinstance(value, torch.Tensor):
        return float(brought(value)) if value.dim() == 0 and not value.is_complex() else None
    return float(value) if isinstance(value, (int, float)) else None


# What is answered without data. Each returns NotImplemented where data is needed.


def _norm(func: Any, tensor: Any, order: Any = _L2, *rest: Any, **named: Any) -> Any:
    if rest or named or not isinstance(tensor, LazyTensor):
        return NotImplemented
    order = _L2 if order is None else float(order)
    if isinstance(tensor, LazyGradient):
        return LazyNorm([tensor.part], order, several=False)
    if not isinstance(tensor, LazyNorm) or tensor.order != order or order != _L2:
        return NotImplemented
    answers = tensor.parts[0].answers
    if len({(part.unit, part.place) for part in tensor.parts}) < len(tensor.parts) or any(
        part.answers is not answers for part in tensor.parts
    ):
        return NotImplemented
    found = answers.norm(shares_of(tensor.parts))
    return torch.tensor(found, dtype=torch.float64, device=answers.device)


def _norms(func: Any, tensors: Sequence[Any], order: Any = _L2, *rest: Any, **named: Any) -> Any:
    if rest or named:
        return NotImplemented
    return [torch.linalg.vector_norm(tensor, order) for tensor in tensors]


def _stack(func: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    orders = {tensor.order for tensor in tensors if isinstance(tensor, LazyNorm)}
    if len(orders) != 1 or any(
        not isinstance(tensor, LazyNorm) or tensor.dim() for tensor in tensors
    ):
        return NotImplemented
    return LazyNorm([tensor.parts[0] for tensor in tensors], orders.pop(), several=True)


def _scale(func: Any, tensor: Any, factor: Any) -> Any:
    number = _number(factor)
    if not isinstance(tensor, LazyGradient) or number is None:
        return NotImplemented
    part = tensor.part
    part.answers.scale([part.share], number)
    return tensor


def _scale_all(func: Any, tensors: Sequence[Any], factor: Any) -> Any:
    factors = factor if isinstance(factor, (list, tuple)) else [factor] * len(tensors)
    for tensor, each in zip(tensors, factors, strict=True):
        tensor.mul_(each)


def _unscale_all(
    func: Any, tensors: Sequence[Any], found_inf: torch.Tensor, inverse: torch.Tensor
) -> None:
    lazy = [tensor.part for tensor in tensors if isinstance(tensor, LazyGradient)]
    for answers in dict.fromkeys(part.answers for part in lazy):
        shares = shares_of([part for part in lazy if part.answers is answers])
        if not math.isfinite(answers.norm(shares)):
            found_inf.fill_(1.0)
        answers.scale(shares, float(inverse))
    others = [tensor for tensor in tensors if not isinstance(tensor, LazyGradient)]
    if others:
        func(others, found_inf, inverse)


def _zero(func: Any, tensor: Any) -> Any:
    if not isinstance(tensor, LazyGradient):
        return NotImplemented
    tensor.part.answers.zero([tensor.part.share])
    return tensor


def _detach(func: Any, tensor: Any) -> Any:
    if isinstance(tensor, LazyGradient):
        return LazyGradient(*tensor.part)
    return LazyNorm(tensor.parts, tensor.order, several=bool(tensor.dim()))


_ANSWERS: dict[Any, Callable[..., Any]] = {
    _ATEN.linalg_vector_norm.default: _norm,
    _ATEN.norm.Scalar: _norm,
    _ATEN._foreach_norm.Scalar: _norms,
    _ATEN.stack.default: _stack,
    _ATEN.mul_.Tensor: _scale,
    _ATEN.mul_.Scalar: _scale,
    _ATEN._foreach_mul_.Tensor: _scale_all,
    _ATEN._foreach_mul_.Scalar: _scale_all,
    _ATEN._foreach_mul_.ScalarList: _scale_all,
    _ATEN._amp_foreach_non_finite_check_and_unscale_.default: _unscale_all,
    _ATEN.zero_.default: _zero,
    _ATEN.detach.default: _detach,
    _ATEN.alias.default: _detach,
}


class LazyGradient(LazyTensor):
    """`.grad` of a wrapped parameter. See [Note: what a lazy gradient answers]."""

    answers = _ANSWERS
    way = _PART

    @staticmethod
    def __new__(cls, answers: LazyGradients, unit: Unit, index: int) -> Any:
        return cls.without_data(unit.parameters[index].shape, dtype_of(unit), answers.device)

    def __init__(self, answers: LazyGradients, unit: Unit, index: int) -> None:
        self._part = _Part(answers, unit, index)
        self._generation = unit.gradients.generation(index)

    @property
    def part(self) -> _Part:
        """Whose it is. Raises `ShardedParameterError` when the parameter has another one now, or
        none."""
        _, unit, index = self._part
        if unit.gradients.generation(index) != self._generation or not unit.gradients.has(index):
            raise ShardedParameterError(forgotten(unit.names[index]))
        return self._part

    def is_of(self, unit: Unit, index: int) -> bool:
        """Whether it is the gradient of this parameter."""
        return self.part.unit is unit and self.part.place == index

    def fetch(self) -> torch.Tensor:
        """A copy of the gradient on its device."""
        return self.part.fetch()

    def replace(self, values: torch.Tensor) -> None:
        """`values` become the gradient of the parameter."""
        answers, unit, index = self.part
        answers.set(unit, index, values)


class LazyNorm(LazyTensor):
    """The norm of one gradient (0-dimensional), or those of several (n,), of one order. See
    [Note: a norm that is not computed yet]."""

    answers = _ANSWERS
    way = "a norm of a gradient was changed in place, which changes nothing"

    @staticmethod
    def __new__(cls, parts: Sequence[_Part], order: float, several: bool) -> Any:
        unit, device = parts[0].unit, parts[0].answers.device
        return cls.without_data((len(parts),) if several else (), dtype_of(unit), device)

    def __init__(self, parts: Sequence[_Part], order: float, several: bool) -> None:
        self.parts = tuple(parts)
        """The gradients."""
        self.order = order
        """2 for the L2 norm."""
        self._computed: torch.Tensor | None = None

    def fetch(self) -> torch.Tensor:
        """The norms; computed once."""
        if self._computed is None:
            norms = [part.norm(self.order) for part in self.parts]
            self._computed = torch.stack(norms) if self.dim() else norms[0]
        return self._computed

    def replace(self, values: torch.Tensor) -> None:
        """The norms are what was computed of them in place."""
        self._computed = values
