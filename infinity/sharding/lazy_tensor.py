"""Tensors without data. Users see shape, dtype and device. The values come when an operator needs
them.

[Note: operators on lazy tensors]
A lazy tensor is a wrapper without storage. So every operator arrives in `__torch_dispatch__`, from
Python, functorch, scripts and C++. It arrives below autograd, so its gradient is that of any
tensor. A few operators are known. Every other operator gets whole copies:

| operator | gets |
|---|---|
| in `LazyTensor.answers` of the class | nothing |
| makes a tensor of the same shape | shape, dtype and device |
| gives a view | nothing; the view is a `LazyView` |
| over lists | copies of one element after the other, so one copy lives at a time |
| any other | copies of all arguments |

If an operator writes to a copy, the copy replaces the values (`LazyTensor.replace`). A class that
refuses that raises in `check_replace`, which is called before the operator runs.

[Note: views of lazy tensors]
A `LazyView` knows its root and the operators that make it. A read copies the root and repeats the
operators on the copy. A write changes the copy of the root through the view, and the copy replaces
the root. So the view is an alias, as any view. Its shape and strides are those of a tensor on the
meta device to which the same operators were applied.

[Note: memory that is not there]
Code that reads memory without an operator gets a copy that cannot be written (`numpy`), or is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from infinity.compilation import call_uncompiled
from infinity.errors import ShardedParameterError
from infinity.sharding import backwards
from infinity.sharding.compiled import (
    DETACHING,
    InGraphs,
    makes_graph,
    on_given,
    stands_for_another,
    written,
)
from infinity.sharding.copied import lent, read_only

_ATEN: Any = torch.ops.aten
_LIKE = {
    getattr(_ATEN, name).default
    for name in (
        *(f"{kind}_like" for kind in ("empty", "zeros", "ones", "full", "rand", "randn")),
        *(f"new_{kind}" for kind in ("empty", "zeros", "ones", "full", "empty_strided")),
    )
}
"""Operators that need only shape, dtype and device."""
_VALUES = {
    *("tolist", "item", "__bool__", "__complex__", "__float__", "__index__", "__int__"),
    *("__format__", "__reduce_ex__"),
}
"""Methods that read the memory of a tensor without an operator: torch.tensor calls them while it
keeps operators from `__torch_dispatch__`."""
_ARRAYS = {"numpy", "__array__"}
_MEMORY = {
    *("data_ptr", "const_data_ptr", "untyped_storage", "storage", "_typed_storage"),
    *("__cuda_array_interface__", "share_memory_", "set_", "resize_", "resize_as_"),
    *("apply_", "map_", "map2_", "module_load"),
}
"""Functions that return the memory of a tensor, or replace it."""
_NO_MEMORY = "has no memory of its own that {what} could use; {way}"
_COPY = "use a copy: .clone()"
_WRITE = "write what it is to be: .copy_(values)"


class NoSlots(list[str]):
    """`torch.utils.swap_tensors` reads this of a class first. `way_out` returns the way out for the
    functions under way, or ""."""

    def __init__(self, way_out: Callable[[], str] = str) -> None:
        self._way_out = way_out

    def __iter__(self) -> NoReturn:
        way = self._way_out() or _WRITE
        raise ShardedParameterError(
            f"a tensor of a wrapped model {_NO_MEMORY.format(what='swap_tensors', way=way)}"
        )


class LazyTensor(InGraphs):
    """A tensor without data. It has the shape, dtype, strides and device of the tensor that `fetch`
    gives. See [Note: operators on lazy tensors].

    One class, because torch finds each of these methods by the class of a tensor.
    """

    answers: ClassVar[Mapping[Any, Callable[..., Any]]] = {}
    """Functions for operators that need no data. Each gets the operator and its arguments. It
    returns `NotImplemented` if these need data."""
    shares: ClassVar[bool] = True
    """Whether other tensors may share its memory."""
    answers_backwards: ClassVar[bool] = False
    """Whether the class takes part in backwards with other tensors in its place."""
    __slotnames__ = NoSlots()

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        cls.__slotnames__ = cls.__slotnames__  # torch looks in the class only

    @classmethod
    def without_data(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        stride: Sequence[int] | None = None,
        offset: int = 0,
        keys: Sequence[str] = (),
    ) -> Any:
        """A new tensor, before its `__init__`. It is contiguous without `stride`. `keys` are
        further dispatch keys."""
        make: Any = torch.Tensor._make_wrapper_subclass
        more = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
        for key in keys:
            more = more.add(getattr(torch._C.DispatchKey, key))
        with torch.inference_mode(False):  # views of it are no inference tensors either
            made = make(
                cls,
                tuple(shape),
                strides=None if stride is None else tuple(stride),
                storage_offset=offset or None,
                dtype=dtype,
                device=device,
                _extra_dispatch_keys=more,
            )
        # C++ code that takes the address then raises, and does not read address 0.
        torch._C._set_throw_on_mutable_data_ptr(made)
        return made

    # Defined by classes of lazy tensors

    def fetch(self) -> torch.Tensor:
        """A copy of the values. No other object uses it."""
        raise NotImplementedError

    def replace(self, values: torch.Tensor) -> None:
        """`values`, of the same shape, dtype and device, become the values. A class that refuses
        that raises in `check_replace`."""
        self.check_replace()
        raise NotImplementedError

    def check_replace(self) -> None:
        """Raise the error of `replace` before anything is changed."""

    def detached(self) -> Any:
        """An alias that requires no gradient, for `detach`. `NotImplemented` means a `LazyView`."""
        return NotImplemented

    @property
    def memory(self) -> Hashable:
        """The identity of the memory: lazy tensors of one class with equal `memory` are aliases."""
        return id(self)

    @property
    def called(self) -> str:
        """Its name in errors."""
        return "a tensor of a wrapped model"

    def copied_values(self) -> torch.Tensor:
        """A copy of the values, for a graph of torch.compile."""
        with (
            _disable_current_modes(),
            torch._C._DisableFuncTorch(),
            torch._C.DisableTorchFunctionSubclass(),
            torch.no_grad(),
        ):
            return self.values().detach()

    # Different for views

    @property
    def root(self) -> LazyTensor:
        """The tensor that is no view, of which this is a view."""
        return self

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """The same view of `whole`, a copy of the root."""
        return whole

    def stand_in(self) -> torch.Tensor:
        """A tensor on the meta device with the same shape, strides, offset and dtype."""
        return torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")

    def values(self) -> torch.Tensor:
        """A copy of the values, with its strides."""
        return self.part_of(_copy_of(self.root))

    def __repr__(self) -> str:  # type: ignore[override]
        return super().__repr__() if stands_for_another(self) else self.described()

    def described(self) -> str:
        """Its text in `repr`."""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = brought(self)
        return memo[id(self)]

    def __copy__(self) -> torch.Tensor:
        return self.detach().requires_grad_(self.requires_grad)

    def __dlpack__(self, *, copy: bool | None = None, **named: Any) -> Any:
        if copy is not True:
            raise self._has_no_memory("__dlpack__")
        return brought(self).__dlpack__(**named)

    def refuse_memory(self, what: str) -> None:
        """Raise `ShardedParameterError` for code that wants the address."""
        raise self._has_no_memory(what)

    def _has_no_memory(self, what: str) -> ShardedParameterError:
        way = _WRITE if what.endswith("_") and not what.endswith("__") else _COPY
        return ShardedParameterError(f"{self.called} {_NO_MEMORY.format(what=what, way=way)}")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if makes_graph():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        lazy = args[0] if args and isinstance(args[0], LazyTensor) else None
        if func in backwards.ANSWERS:
            return cls.answer_backward(func, types, args, kwargs)
        if isinstance(func, torch._ops.HigherOrderOperator):  # torch asks classes for rules of it
            args, kwargs = tree_map(_cloned, (tuple(args), kwargs))
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if lazy is not None and attribute == "data":
                return lazy.assign(args[1]) if name == "__set__" else lazy.detach()
            if name in _MEMORY or attribute in _MEMORY:
                found = next(filter(_is_lazy, tree_leaves((args, kwargs))))
                raise found._has_no_memory(attribute or name)
            if name in _ARRAYS:
                return lent(func(*tree_map(brought, (*args,)), **kwargs), cls._lent(args))
            if name in _VALUES:
                args, kwargs = tree_map(brought, (tuple(args), kwargs))
            return func(*args, **kwargs)

    @classmethod
    def answer_backward(cls, func: Any, types: Any, args: Sequence[Any], kwargs: Any) -> Any:
        """The result of a function of `backwards`, one of whose arguments is of this class."""
        if any(issubclass(kind, LazyTensor) and kind.answers_backwards for kind in types):
            return NotImplemented  # that class answers
        return backwards.ANSWERS[func](*args, **kwargs)

    @staticmethod
    def _lent(args: Sequence[Any]) -> str:
        return (
            f"an array of {args[0].called} is a copy, and a change of it would be lost; copy the "
            "array, or change the tensor itself"
        )

    def assign(self, values: Any) -> None:
        """`.data = values`: the memory of `values` becomes the memory of this tensor, and not of
        its aliases. Raises `ShardedParameterError` unless a class defines it."""
        raise ShardedParameterError(f".data of {self.called} cannot be assigned to; {_WRITE}")

    def check_follows(self, of: str) -> None:
        """Raise `ShardedParameterError` if this tensor has aliases. It is about to become the
        memory of the tensor named `of`, which would get a copy that does not follow it."""
        if self.shares:
            raise ShardedParameterError(
                f"{of} would be the same memory as {self.called}, and a later change of one would "
                "not be seen in the other; assign a copy: .clone()"
            )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return call_uncompiled(_dispatched, func, types, args, kwargs or {})


class _Viewing(NamedTuple):
    """The step from a tensor to a view: the operator, its further arguments, and the index of the
    view among its results (None for a single result)."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: int | None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        found = self.func(tensor, *self.args, **self.kwargs)
        return found if self.place is None else found[self.place]


class LazyView(LazyTensor):
    """A view of a lazy tensor. See [Note: views of lazy tensors]."""

    @staticmethod
    def __new__(cls, root: LazyTensor, steps: Sequence[_Viewing], stand_in: torch.Tensor) -> Any:
        return cls.without_data(
            stand_in.shape,
            stand_in.dtype,
            root.device,
            stand_in.stride(),
            int(stand_in.storage_offset()),
            keys=[
                key
                for key, has in (("Conjugate", stand_in.is_conj()), ("Negative", stand_in.is_neg()))
                if has
            ],
        )

    def __init__(self, root: LazyTensor, steps: Sequence[_Viewing], stand_in: torch.Tensor) -> None:
        self._root = root
        self._steps = tuple(steps)
        self._stand_in = stand_in

    @property
    def root(self) -> LazyTensor:
        return self._root

    @property
    def called(self) -> str:
        return f"a view of {self._root.called}"

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        for step in self._steps:
            whole = step.of(whole)
        return whole

    def stand_in(self) -> torch.Tensor:
        return self._stand_in

    def fetch(self) -> torch.Tensor:
        """A copy of the values, inside a copy of the root."""
        return self.values()

    def replace(self, values: torch.Tensor) -> None:
        """`values` become the values, also in the root."""
        whole = _copy_of(self._root)
        self.part_of(whole).copy_(values)
        call_uncompiled(self._root.replace, whole)

    def check_replace(self) -> None:
        self._root.check_replace()


def _dispatched(func: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of an operator on lazy tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        found = on_given(func, args, kwargs, LazyView)
        if found is not NotImplemented:
            return found
        for kind in types:
            answer = kind.answers.get(func) if issubclass(kind, LazyTensor) else None
            found = NotImplemented if answer is None else answer(func, *args, **kwargs)
            if found is not NotImplemented:
                return found
        if func in DETACHING:
            found = args[0].detached()
            if found is not NotImplemented:
                return found
        if not isinstance(func, torch._ops.OpOverload):  # an operator of higher order
            return _on_copies_read(func, args, kwargs)
        if func is _ATEN.is_same_size.default:
            return args[0].shape == args[1].shape
        if func in _LIKE:
            named = {"device": args[0].device} | kwargs
            return func(args[0].stand_in(), *args[1:], **named)
        if "_foreach_" in func._schema.name:
            return _one_by_one(func, args, kwargs)
        if func.namespace == "c10d":
            return _on_copies_sent(func, args, kwargs)
        found = _view(func, args, kwargs)
        return _on_copies(func, args, kwargs) if found is NotImplemented else found


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, LazyTensor) else value


def brought(value: Any) -> Any:
    """The values of a lazy tensor, with its `requires_grad`. Any other object itself."""
    if not isinstance(value, LazyTensor):
        return value
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        return value.values().requires_grad_(value.requires_grad)


def _is_lazy(value: Any) -> bool:
    return isinstance(value, LazyTensor)


def _copy_of(root: LazyTensor) -> torch.Tensor:
    """A copy of the values with the strides of `root`, because views of it are repeated there."""
    values: torch.Tensor = call_uncompiled(root.fetch)
    if values.stride() == root.stride() and values.storage_offset() == 0:
        return values
    copy = torch.empty_strided(root.shape, root.stride(), dtype=root.dtype, device=root.device)
    return copy.copy_(values)


def _view(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The results of an operator that gives views of a lazy tensor; `NotImplemented` for other
    operators."""
    aliases = [found.alias_info for found in func._schema.returns]
    if not aliases or any(alias is None or alias.is_write for alias in aliases):
        return NotImplemented
    base, *others = args
    if not isinstance(base, LazyTensor) or any(map(_is_lazy, tree_leaves((others, kwargs)))):
        return NotImplemented
    # Some of these operators give a view for some arguments only. Their decomposition decides.
    found = func.decompose(*args, **kwargs)
    if found is not NotImplemented:
        return found
    stand_in = base.stand_in()
    try:
        found = func(stand_in, *others, **kwargs)
    except NotImplementedError:
        return NotImplemented
    several = isinstance(found, (list, tuple))
    made = [
        _alias(base, stand_in, view, _Viewing(func, tuple(others), kwargs, i if several else None))
        for i, view in enumerate(found if several else [found])
    ]
    if any(view is NotImplemented for view in made):
        return NotImplemented
    return type(found)(made) if several else made[0]


def _alias(base: LazyTensor, stand_in: torch.Tensor, view: Any, step: _Viewing) -> Any:
    """The lazy tensor for `view`, a result of an operator on `stand_in`. `NotImplemented` if the
    two share no memory."""
    if view is stand_in:
        return base
    if not isinstance(view, torch.Tensor) or not _same_memory(view, stand_in):
        return NotImplemented
    steps = base._steps if isinstance(base, LazyView) else ()
    return LazyView(base.root, (*steps, step), view)


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _one_by_one(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator over lists for one element after the other."""
    number = len(args[0])
    names = [argument.name for argument in func._schema.arguments]

    def at(name: str, value: Any, place: int) -> Any:
        if name == "scalars" and isinstance(value, torch.Tensor):
            return value[place : place + 1]
        among = isinstance(value, (list, tuple)) and len(value) == number
        return [value[place]] if among else value

    found: list[Any] = []
    for place in range(number):
        given = [at(*each, place) for each in zip(names, args, strict=False)]
        named = {name: at(name, value, place) for name, value in kwargs.items()}
        found += _on_copies(func, given, named) or []
    return found or None


class Copies:
    """Copies of lazy tensors for one operator. Aliases share one copy."""

    def __init__(self) -> None:
        self._whole: dict[Any, tuple[LazyTensor, torch.Tensor]] = {}
        self._given: dict[int, tuple[LazyTensor, torch.Tensor]] = {}
        self._versions: dict[int, int] = {}

    def of(self, value: Any) -> Any:
        """The copy of a lazy tensor; any other object itself."""
        if not isinstance(value, LazyTensor):
            return value
        if id(value) not in self._given:
            root = value.root
            key = type(root), root.memory
            if key not in self._whole:
                copy = _copy_of(root)
                self._whole[key] = root, copy
                self._versions[id(copy)] = 0 if copy.is_inference() else copy._version
            self._given[id(value)] = value, value.part_of(self._whole[key][1])
        return self._given[id(value)][1]

    def write(self, written: Iterable[LazyTensor]) -> None:
        """The operator has written to the copies of `written`: replace their values. Raises
        `ShardedParameterError` before any replacement if a copy has another shape now."""
        changed = {}
        for lazy in written:
            copy = self.of(lazy)
            if copy.shape != lazy.shape or copy.stride() != lazy.stride():
                raise ShardedParameterError(
                    f"the shape and the strides of {lazy.called} cannot be changed in place; "
                    "assign another tensor, or use a view"
                )
            changed[type(lazy.root), lazy.root.memory] = True
        for key in changed:
            root, whole = self._whole[key]
            call_uncompiled(root.replace, whole)

    def cloned(self) -> dict[Any, torch.Tensor]:
        """Copies of the copies."""
        return {key: whole.clone() for key, (_, whole) in self._whole.items()}

    def replace_changed(self, before: Mapping[Any, torch.Tensor]) -> None:
        """Replace the values of tensors whose copies differ from `before`."""
        for key, (root, whole) in self._whole.items():
            if not torch.equal(whole, before[key]):
                root.check_replace()
                root.replace(whole)

    def check_unwritten(self) -> None:
        """Raise `ShardedParameterError` if a copy was written to."""
        for root, whole in self._whole.values():
            if not whole.is_inference() and whole._version != self._versions[id(whole)]:
                raise ShardedParameterError(
                    f"{root.called} was changed in place by an operator that does not say so; "
                    "compute the new values, and write them: .copy_(values)"
                )

    def lazy(self, value: Any) -> Any:
        """The lazy tensor whose copy is the result `value`; else `value` itself."""
        for lazy, copy in self._given.values():
            if value is copy:
                return lazy
        return value

    def guarded(self, value: Any) -> Any:
        """`value`, in which tensors that share memory with a copy become read-only."""
        for root, whole in self._whole.values():
            value = read_only(value, [whole], type(root).way)
        return value


def _on_copies(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator on copies. Written copies replace the values."""
    if func._schema.name in ("aten::set_", "aten::resize_", "aten::resize_as_"):
        found = next(filter(_is_lazy, tree_leaves((args, kwargs))))
        raise found._has_no_memory(func._schema.name.removeprefix("aten::"))
    changed = list(filter(_is_lazy, tree_leaves(list(written(func, args, kwargs)))))
    for lazy in changed:
        lazy.check_replace()
    copies = Copies()
    given, named = tree_map(copies.of, (tuple(args), kwargs))
    found = func(*given, **named)
    copies.write(changed)
    return copies.guarded(tree_map(copies.lazy, found))


def _on_copies_read(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator without a schema. It must write to no argument."""
    copies = Copies()
    given, named = tree_map(copies.of, (tuple(args), kwargs))
    found = func(*given, **named)
    copies.check_unwritten()
    return copies.guarded(tree_map(copies.lazy, found))


def _on_copies_sent(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a collective on copies, and wait for it. Its schema does not name the arguments that it
    writes, so all changed copies replace values."""
    copies = Copies()
    given, named = tree_map(copies.of, (tuple(args), kwargs))
    before = copies.cloned()
    found = func(*given, **named)
    for work in tree_leaves(found):
        if isinstance(work, torch.ScriptObject):
            work.wait()  # type: ignore[attr-defined]
    copies.replace_changed(before)
    return tree_map(copies.lazy, found)
