"""Logits without values: code that reads them computes them, and a loss computes them in chunks.

[Note: lazy logits]
A `LazyLogits` replaces the output of the projection. It has the shape and dtype of that output, and
keeps the hidden states. These operations stay lazy:

| operation | effect |
|---|---|
| `*`, `/`, `+`, `-` with numbers, `-x`, `tanh` | a step that is applied to each chunk of logits |
| `float()`, `to(dtype)` and similar conversions | the same |
| `view`, `reshape`, `flatten`, `contiguous`, an index of tokens | applied to the hidden states |
| `cross_entropy` with classes as targets | computed in chunks (`infinity.losses.cross_entropy`) |

Every other operation gets the values of the plain model, computed in the same way, with the same
graph. They are kept, because user code may change them in place. Lazy views of such logits share
them. `retain_grad` and hooks raise an error, because the gradient of the loss bypasses the values.

The class works above autograd (`__torch_function__`), so autograd records operations on the values.
C++ code that bypasses `__torch_function__` gets the values, too, but a gradient from such code
raises an error.

[Note: logits that come late]
Values are computed with the weight at the time of their first use. If an optimizer step came
between, these logits would differ from the logits of the loss. So this raises an error.
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
"""The operations that make autograd save their result."""
_CONVERSIONS = {"float", "double", "half", "bfloat16"}
_SHAPES = {"view", "reshape", "flatten", "contiguous"}
_REFUSED = {"retain_grad", "register_hook", "register_post_accumulate_grad_hook"}


class Projection:
    """The output projection `module` in one call of a model. Computes logits from hidden states,
    also after that call.

    `whole` is called with the name of each operator that needs values.
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
        """Whether a parameter of the projection requires a gradient."""
        return any(each.requires_grad for each in self.module.parameters())

    def apply(self, function: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """Return `function(hidden, weight, bias)`, computed while the parameters have their data.

        Raises `RuntimeError` if a parameter was updated since the call of the model, see
        [Note: logits that come late].
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
        if place is None or not place[0].data.tier:
            return run(hidden)
        return place[0].listeners.border.call(module, run, hidden)

    def _versions(self) -> list[int]:
        places = [(place_of(each), each) for each in self.module.parameters()]
        return [
            _changes(each) if place is None else place[0].blocks[Kind.PARAM].home.updates
            for place, each in places
        ]


def _changes(tensor: torch.Tensor) -> int:
    """How often a plain tensor was changed in place, by torch's count; 0 for an inference
    tensor."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class LogitsOrigin:
    """The inputs from which logits are computed."""

    projection: Projection
    hidden: torch.Tensor
    """(..., width): one row for each row of the logits."""
    form: torch.Tensor
    """Shape, strides and dtype of the logits, on the meta device."""
    steps: tuple[LogitsStep, ...] = ()
    parent: LazyLogits | None = None
    """The logits that these come from; None for the output of the projection."""
    made: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Computes these values from the parent's values."""
    shares: bool = False
    """Whether `made` returns a view."""


class LazyLogits(torch.Tensor):
    """Logits (..., vocabulary) without values. See [Note: lazy logits]."""

    origin: LogitsOrigin
    _value: torch.Tensor | None
    _value_changes: int  # of `_value`, when it was computed
    _hidden_changes: int

    @classmethod
    def project(cls, projection: Projection, hidden: torch.Tensor) -> LazyLogits:
        """The lazy output of `projection` for `hidden` (..., width)."""
        shape = (*hidden.shape[:-1], projection.module.out_features)
        dtype = projection.cast or hidden.dtype
        return cls.of(
            LogitsOrigin(projection, hidden, torch.empty(shape, dtype=dtype, device="meta"))
        )

    @classmethod
    def of(cls, origin: LogitsOrigin) -> LazyLogits:
        """Lazy logits of `origin`. They require a gradient if the hidden states or the projection
        do."""
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
        """Whether the values exist, so that code may have changed them."""
        if self._value is not None:
            return True
        parent = self.origin.parent
        return self.origin.shares and parent is not None and parent.is_there

    def value(self) -> torch.Tensor:
        """The values of the plain model, computed at the first call. Raises `RuntimeError` if a
        parameter of the projection, or the hidden states, changed before."""
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
        """The values without later changes in place: the kept values if they are unchanged, else
        computed again."""
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
        """`functional.cross_entropy` of these logits (tokens, vocabulary), in chunks. `target`
        holds classes (tokens,). Raises `RuntimeError` as `value` does."""
        self._check_hidden()
        projection = self.origin.projection
        autocast = AutocastState.now(self.device.type)
        plan = EntropyPlan(
            projection.cast, self.origin.steps, autocast, reduction, projection.max_bytes
        )

        def loss(hidden: Any, weight: Any, bias: Any) -> torch.Tensor:
            return ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
                hidden, weight, bias, target, class_weight, plan
            )

        return projection.apply(loss, self.origin.hidden)

    def through(self, function: Callable[[torch.Tensor], torch.Tensor]) -> LazyLogits:
        """These logits after `function`, which must not change values. It may observe
        gradients."""
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
        """The lazy result of the operator `func` for these logits and the arguments `others`;
        `NotImplemented` if it needs values."""
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
        """Like `_lazily`, for an operator that keeps the dimension of the vocabulary: it selects
        rows, or reshapes all of them."""
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
    """Puts lazy logits into autograd's graph, as an output that refuses gradients."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, kind: type[LazyLogits], origin: LogitsOrigin
    ) -> Any:
        """Return lazy logits of class `kind`. They require a gradient if `anchor` does."""
        make: Any = torch.Tensor._make_wrapper_subclass
        form = origin.form
        return make(kind, form.shape, form.stride(), dtype=form.dtype, device=origin.hidden.device)

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> Any:
        """Always raises `RuntimeError`."""
        raise RuntimeError(
            "a gradient came for logits that infinity.chunked_loss makes later, past Python; give "
            "that code outputs.logits.clone(), which has values"
        )


def _after(func: Any, others: Sequence[Any], kwargs: Any, logits: torch.Tensor) -> torch.Tensor:
    return func(logits, *others, **kwargs)


def _brought(by: str, value: Any) -> Any:
    """Return the values of lazy logits, for the operator `by`. Returns any other object
    unchanged."""
    if not isinstance(value, LazyLogits):
        return value
    if not value.is_there:
        value.origin.projection.whole(by)
    return value.value()


def _indices(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_basic(index: Any) -> bool:
    """Whether this part of an index gives a view, not a copy."""
    if isinstance(index, (int, slice)):
        return not isinstance(index, bool)
    return index is None or index is Ellipsis


def _is_of_rows(index: Any, dims: int) -> bool:
    """Whether an index into `dims` dimensions keeps the last dimension whole."""
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
    """`functional.cross_entropy` in chunks; `NotImplemented` if these arguments need values."""
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
