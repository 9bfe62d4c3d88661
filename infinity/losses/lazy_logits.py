"""Logits that are made when somebody asks for them, and that a loss takes chunk by chunk.

[Note: lazy logits]
A `LazyLogits` stands for what the output projection gives. It has the shape and dtype of that, and
the hidden states. What a loss does before it needs values stays lazy:

| what | how |
|---|---|
| `*`, `/`, `+`, `-` with numbers, `-x`, `tanh` | a step that each chunk of logits goes through |
| `float()`, `to(dtype)` and their kin | the same |
| `view`, `reshape`, `flatten`, `contiguous`, an index of tokens | done to the hidden states |
| `cross_entropy` with classes as targets | computed in chunks (`infinity.losses.cross_entropy`) |

Everything else gets the values: what a plain model has, made in the same way, with the same graph.
They are kept, because somebody may change them in place. Lazy views of such logits share them.
`retain_grad` and hooks are refused: the loss does not go through the values.

It answers above autograd (`__torch_function__`), so that autograd records what is done to the
values. Code in C++ that gets past this finds the values, too, but a gradient that it sends back
raises an error.

[Note: logits that come late]
Values are made of the weight as it is when they are asked for. An optimizer step in between would
give other logits than those of the loss, so it is noticed and refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from infinity.losses.cross_entropy import (
    AutocastState,
    ChunkedCrossEntropy,
    EntropyPlan,
    LogitsStep,
    LossReduction,
    project,
)
from infinity.placement.spec import Kind
from infinity.sharding.use import place_of

_ATTRIBUTES = {
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "names", "output_nr"),
    *("requires_grad", "is_leaf", "grad_fn", "is_cuda", "is_cpu", "is_meta", "is_sparse"),
    *("is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn", "is_mps", "is_xpu"),
}
_METHODS = {
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "get_device", "__len__"),
    *("is_floating_point", "is_complex", "is_signed", "is_inference", "__hash__"),
}
_ARITHMETIC = {
    *("mul", "multiply", "div", "divide", "true_divide", "add", "sub", "subtract", "neg", "tanh"),
    *("negative", "__mul__", "__rmul__", "__truediv__", "__add__", "__radd__", "__sub__"),
    *("__rsub__", "__neg__"),
}
_SAVED = {"tanh"}
"""Those of which autograd saves the result."""
_CONVERSIONS = {"float", "double", "half", "bfloat16"}
_SHAPES = {"view", "reshape", "flatten", "contiguous"}
_REFUSED = {"retain_grad", "register_hook", "register_post_accumulate_grad_hook"}


class Projection:
    """The output projection `module` in one call of a model: makes logits of hidden states, also
    after that call.

    `whole` is told what asks for values.
    """

    def __init__(
        self,
        module: nn.Linear,
        autocast: AutocastState,
        max_bytes: int,
        whole: Callable[[str], None],
    ) -> None:
        self.module, self.max_bytes, self.whole = module, max_bytes, whole
        casts = autocast.enabled and module.weight.dtype != torch.float64
        self.cast = autocast.dtype if casts else None
        self._content = self._versions()

    @property
    def trains(self) -> bool:
        """Whether a parameter of the projection wants a gradient."""
        return any(each.requires_grad for each in self.module.parameters())

    def apply(self, function: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """`function(hidden, weight, bias)`, where the parameters have their data.

        Raises `RuntimeError` after they were updated, see [Note: logits that come late].
        """
        if self._versions() != self._content:
            raise RuntimeError(
                "the output projection was updated after the forward whose logits are asked for; "
                "infinity.chunked_loss makes logits when they are used: read outputs.logits "
                "before optimizer.step()"
            )
        module = self.module

        def run(hidden: torch.Tensor) -> torch.Tensor:
            return function(hidden, module.weight, module.bias)

        place = place_of(module.weight)
        if place is None or not place[0].tier:
            return run(hidden)
        return place[0].listeners.border.call(module, run, hidden)

    def _versions(self) -> list[int]:
        places = [(place_of(each), each) for each in self.module.parameters()]
        return [
            _changes(each) if place is None else place[0].blocks[Kind.PARAM].home.updates
            for place, each in places
        ]


def _changes(tensor: torch.Tensor) -> int:
    """How often a plain tensor was changed in place, as far as torch counts that."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class LogitsOrigin:
    """What values are made of."""

    projection: Projection
    hidden: torch.Tensor
    """(..., width), of the rows that the logits have."""
    form: torch.Tensor
    """Without memory (on the meta device): shape, strides and dtype of the logits."""
    steps: tuple[LogitsStep, ...] = ()
    parent: LazyLogits | None = None
    """The logits that these were made of; None for what the projection gives."""
    made: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Makes these values of the parent's."""
    shares: bool = False
    """Whether that is a view of them."""


class LazyLogits(torch.Tensor):
    """Logits (..., vocabulary) without values. See [Note: lazy logits]."""

    origin: LogitsOrigin
    _value: torch.Tensor | None
    _value_changes: int  # when it was made
    _hidden_changes: int

    @classmethod
    def project(cls, projection: Projection, hidden: torch.Tensor) -> LazyLogits:
        """What `projection` gives of `hidden` (..., width)."""
        shape = (*hidden.shape[:-1], projection.module.out_features)
        dtype = projection.cast or hidden.dtype
        return cls.of(
            LogitsOrigin(projection, hidden, torch.empty(shape, dtype=dtype, device="meta"))
        )

    @classmethod
    def of(cls, origin: LogitsOrigin) -> LazyLogits:
        """Those of `origin`."""
        with torch._C.DisableTorchFunctionSubclass():
            wanted = origin.hidden.requires_grad or origin.projection.trains
            found: LazyLogits = _Anchored.apply(  # type: ignore[no-untyped-call]
                torch.empty(0, requires_grad=wanted), cls, origin
            )
        found.origin = origin
        found._value = None
        found._value_changes = 0
        found._hidden_changes = _changes(origin.hidden)
        return found

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def is_there(self) -> bool:
        """Whether the values exist, so that they may have been changed."""
        if self._value is not None:
            return True
        parent = self.origin.parent
        return self.origin.shares and parent is not None and parent.is_there

    def value(self) -> torch.Tensor:
        """The values, as a plain model has them."""
        if self._value is None:
            parent, made = self.origin.parent, self.origin.made
            if self.origin.shares and parent is not None and made is not None:
                with torch.set_grad_enabled(self.requires_grad):
                    self._value = made(parent.value())
            else:
                self._value = self._unchanged()
            self._value_changes = _changes(self._value)
        return self._value

    def _unchanged(self) -> torch.Tensor:
        """The values as they were made, whoever has changed them since."""
        if self._value is not None and _changes(self._value) == self._value_changes:
            return self._value
        parent, made = self.origin.parent, self.origin.made
        with torch.set_grad_enabled(self.requires_grad):
            if parent is not None and made is not None:
                return made(parent._unchanged())
            self._check_hidden()
            projection = self.origin.projection
            make = functools.partial(project, cast=projection.cast)
            return projection.apply(make, self.origin.hidden)

    def _check_hidden(self) -> None:
        if _changes(self.origin.hidden) != self._hidden_changes:
            raise RuntimeError(
                "the hidden states were changed in place after the output projection, and "
                "infinity.chunked_loss makes logits when they are used: change a copy (.clone())"
            )

    def entropy(
        self, target: torch.Tensor, class_weight: torch.Tensor | None, reduction: LossReduction
    ) -> torch.Tensor:
        """`functional.cross_entropy` of these logits (tokens, vocabulary), chunk by chunk."""
        self._check_hidden()
        projection = self.origin.projection
        autocast = AutocastState.now(self.device.type)
        plan = EntropyPlan(
            projection.cast, self.origin.steps, autocast, reduction, projection.max_bytes
        )

        def loss(hidden: Any, weight: Any, bias: Any) -> torch.Tensor:
            found: torch.Tensor = ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
                hidden, weight, bias, target, class_weight, plan
            )
            return found

        return projection.apply(loss, self.origin.hidden)

    def through(self, function: Callable[[torch.Tensor], torch.Tensor]) -> LazyLogits:
        """These logits after `function`, which changes no value and may watch gradients."""
        origin, step = self.origin, LogitsStep(function, self.dtype, False)
        steps = (*origin.steps, step)
        return LazyLogits.of(
            LogitsOrigin(origin.projection, origin.hidden, origin.form, steps, self, function)
        )

    # Operators

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _METHODS or (name == "__get__" and attribute in _ATTRIBUTES):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in _REFUSED:
            raise RuntimeError(
                f"{name} of logits that infinity.chunked_loss makes later: the gradient of the "
                "loss does not go through them; take chunked_loss off with "
                "infinity.chunked_loss(model, max_bytes=None)"
            )
        found: Any = NotImplemented
        if func is functional.cross_entropy:
            found = _entropy(*args, **kwargs)
        elif args and isinstance(args[0], LazyLogits) and not args[0].is_there:
            found = args[0]._lazily(func, name, args[1:], kwargs)
        if found is not NotImplemented:
            return found
        brought = functools.partial(_brought, attribute or name)
        args, kwargs = tree_map(brought, (tuple(args), kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        def values(value: Any) -> Any:
            return _brought(str(func), value).detach() if isinstance(value, LazyLogits) else value

        given, named = tree_map(values, (tuple(args), kwargs or {}))
        return func(*given, **named)

    def _lazily(self, func: Any, name: str, others: Sequence[Any], kwargs: Any) -> Any:
        """What the operator `func` makes of these logits and of `others`, if that can be lazy."""
        if name in _ARITHMETIC:
            steps = not kwargs and all(isinstance(each, (int, float)) for each in others)
        elif name in _CONVERSIONS:
            steps = not others and not kwargs
        elif name in ("to", "type"):
            given = (*others, *kwargs.values())
            steps = len(given) == 1 and isinstance(given[0], torch.dtype)
        else:
            return self._rows(func, name, others, kwargs)
        if not steps:
            return NotImplemented
        origin = self.origin
        form = func(origin.form, *others, **kwargs)
        if form is origin.form:
            return self
        made = functools.partial(_after, func, others, kwargs)
        step = LogitsStep(made, form.dtype, name in _SAVED)
        return LazyLogits.of(
            LogitsOrigin(origin.projection, origin.hidden, form, (*origin.steps, step), self, made)
        )

    def _rows(self, func: Any, name: str, others: Sequence[Any], kwargs: Any) -> Any:
        """The same for an operator that leaves the vocabulary as it is: what it makes of these
        logits are some of their rows, or all in another shape."""
        origin = self.origin
        hidden, width = origin.hidden, origin.hidden.shape[-1]
        if name in _SHAPES:
            form = func(origin.form, *others, **kwargs)
            if form is origin.form:
                return self
            if form.dtype != self.dtype or form.shape[-1:] != self.shape[-1:]:
                return NotImplemented
            hidden = hidden.reshape(*form.shape[:-1], width)
            shares = form.untyped_storage()._cdata == origin.form.untyped_storage()._cdata
        elif name == "__getitem__" and _is_of_rows(others[0], self.dim()):
            hidden = hidden[others[0]]
            shape = (*hidden.shape[:-1], self.shape[-1])
            shares = all(map(_is_basic, _indices(others[0])))
            form = origin.form[others[0]] if shares else origin.form.new_empty(shape)
        else:
            return NotImplemented
        made = functools.partial(_after, func, others, kwargs)
        return LazyLogits.of(
            LogitsOrigin(origin.projection, hidden, form, origin.steps, self, made, shares)
        )


class _Anchored(torch.autograd.Function):
    """Gives lazy logits a place in autograd's graph: that of an output, through which no gradient
    can go."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, kind: type[LazyLogits], origin: LogitsOrigin
    ) -> Any:
        """Lazy logits of class `kind`; they require a gradient like `anchor`."""
        make: Any = torch.Tensor._make_wrapper_subclass
        form = origin.form
        return make(kind, form.shape, form.stride(), dtype=form.dtype, device=origin.hidden.device)

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> Any:
        """Raises `RuntimeError`."""
        raise RuntimeError(
            "a gradient came for logits that infinity.chunked_loss makes later, past Python; give "
            "that code outputs.logits.clone(), which has values"
        )


def _after(func: Any, others: Sequence[Any], kwargs: Any, logits: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = func(logits, *others, **kwargs)
    return found


def _brought(by: str, value: Any) -> Any:
    """The values of lazy logits, for the operator `by`; anything else itself."""
    if not isinstance(value, LazyLogits):
        return value
    if not value.is_there:
        value.origin.projection.whole(by)
    return value.value()


def _indices(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_basic(index: Any) -> bool:
    """Whether an index of one dimension gives a view, and no copy."""
    if isinstance(index, (int, slice)):
        return not isinstance(index, bool)
    return index is None or index is Ellipsis


def _is_of_rows(index: Any, dims: int) -> bool:
    """Whether an index of a tensor of `dims` dimensions leaves the last of them as it is."""
    taken, after = 0, None
    for each in _indices(index):
        if isinstance(each, LazyLogits):
            return False
        if each is Ellipsis:
            after = 0
            continue
        is_mask = isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8)
        width = each.dim() if is_mask else int(each is not None)
        taken += width
        after = None if after is None else after + width
    ends_whole = _indices(index)[-1:] == (slice(None),)
    return taken < dims if not after else ends_whole


def _entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`functional.cross_entropy` in chunks, if that can be."""
    classes = isinstance(target, torch.Tensor) and not target.is_floating_point()
    if (
        not isinstance(input, LazyLogits)
        or input.is_there
        or (input.dim(), target.dim()) != (2, 1)
        or len(input) != len(target)
        or len(target) == 0
        or not classes
        or target.device != input.device
        or (weight is not None and (weight.requires_grad or isinstance(weight, LazyLogits)))
        or (size_average, reduce) != (None, None)
        or reduction not in ("none", "sum", "mean")
    ):
        return NotImplemented
    return input.entropy(target, weight, LossReduction(reduction, ignore_index, label_smoothing))
