"""Notes the operations of constructors on a `Tape`, while modules are built without memory.

[Note: handles]
A parameter that a constructor registers becomes a *handle*: a tensor of the same geometry on the
meta device. Operations of constructors on handles are not run. They are noted, and run when values
are needed:

    an operation that                          runs on
    views a handle                             the handle
    writes a handle, or makes a tensor of it   the meta device; its results are handles
    draws into a handle                        the same, and on scratch memory, for the generator
    shows values (item, a loop that rejects)   the values, which are made for it
    touches no handle                          its arguments; noted, because a handle may come of it

Constructors see handles on the meta device. A tensor that they ask for on that device is made on
the CPU. Code of PEFT sees the device of the values.

`trunc_normal_`, `orthogonal_`, `sparse_` and `dirac_` of `torch.nn.init` return at once on the meta
device. On other devices they draw in loops that depend on values. Each call is noted as one
operation when it reads `tensor.is_meta`.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from infinity.errors import ConfigError
from infinity.weights.tape import Operation, Place, Tape, number_of, places, state_of, tensors_of

_OVERWRITES = {
    "aten::cauchy_",
    "aten::copy_",
    "aten::exponential_",
    "aten::fill_",
    "aten::geometric_",
    "aten::log_normal_",
    "aten::normal_",
    "aten::random_",
    "aten::uniform_",
    "aten::zero_",
}
"""Operators that do not read the tensor that they write."""
_META = torch.device("meta")
_CPU = torch.device("cpu")
_PASSED = {"aten::lift_fresh", "aten::set_"}
"""Operators that no values depend on."""
_OF_DATA = {torch.as_tensor, torch.asarray, torch.tensor, torch.Tensor.new_tensor}
"""Functions that make a tensor of Python's numbers. On the meta device `Taping` does not see them.
"""
_INDEXING = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
"""Methods that do the same with the numbers in an index."""
_OUT_OF_SIGHT = {torch.Tensor.__array__, torch.Tensor.numpy, torch.Tensor.tolist}
"""Methods that return values, or memory that other code may write."""
_SHOWS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_DEVICE = torch.Tensor.device.__get__
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class Taping(TorchDispatchMode):
    """Notes in `tape` the operators of the thread that entered it. With `exact`, draws advance the
    generator."""

    def __init__(self, tape: Tape, exact: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape
        self.exact = exact
        self.is_paused = False
        self.holders: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
        """The modules that registered parameters, and the names of these."""
        self.tensor_kind: type[torch.Tensor] = torch.Tensor
        self.parameter_kind: type[nn.Parameter] = nn.Parameter
        """The classes of its handles; see `weights/taped`."""
        self.gathered: Counter[int] = Counter()
        """How many blocks show each parameter now, by its id."""
        self._functions = _Functions(self)

    def __enter__(self) -> Taping:
        self._functions.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._functions.__exit__(*error)  # type: ignore[no-untyped-call]

    @contextmanager
    def paused(self, pause: bool = True) -> Iterator[None]:
        """Inside the context, nothing is noted. With `pause=False`, operators are noted again."""
        before = self.is_paused
        self.is_paused = pause
        try:
            yield
        finally:
            self.is_paused = before

    def is_handle(self, value: object) -> bool:
        """Whether `value` stands for memory on the tape."""
        return (
            isinstance(value, torch.Tensor) and value.is_meta and self.tape.cell(value) is not None
        )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func`, or only its shapes on the meta device, and note it."""
        kwargs = kwargs or {}
        if self.is_paused or func._schema.name in _PASSED:
            return func(*args, **kwargs)
        with self.paused():
            tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
            is_strange = any(
                number_of(t) is None or (t.is_meta and not self.is_handle(t)) for t in tensors
            )
            if is_strange:
                self._check_strange(func, args, kwargs)
            if is_strange or _is_view(func):
                return func(*args, **kwargs)
            if kwargs.get("device") == _META:
                kwargs = {**kwargs, "device": _CPU}
            if not any(self.is_handle(t) for t in tensors):
                return self._run(func, args, kwargs, self._operation(func, args, kwargs))
            if self._can_wait(func, args, kwargs, tensors):
                return self._pretend(func, args, kwargs)
            return self._show(func, args, kwargs)

    def _check_strange(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if a handle would get values of a tensor that has none."""
        if any(self.is_handle(tensor) for tensor in _written(func, args, kwargs)):
            raise ConfigError(
                "a constructor inside infinity.init() copies from a tensor on the meta device that "
                "was built outside of it, and has no values; build both inside"
            )

    def _can_wait(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> bool:
        """Whether `func` makes and writes only handles, and its results do not depend on values."""
        (handle, *_) = (t for t in tensors if self.is_handle(t))
        device = kwargs.get("device")
        return (
            all(self.is_handle(t) for t in _written(func, args, kwargs))
            and _SHOWS.isdisjoint(func.tags)
            and (device is None or device == self.tape.place(handle).cell.device)
            and (func._schema.is_mutable or _makes_tensors(func))
        )

    def _run(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        operation: Operation | None,
    ) -> Any:
        """Run an operator on memory, and note it."""
        if operation is None:
            return func(*args, **kwargs)
        for place in operation.written:
            place.cell.keep()
        if operation.draws:
            device = kwargs.get("device") or operation.device
            operation.state = state_of(torch.device(device), operation.generator)
        result = func(*args, **kwargs)
        self._note(operation, result, None)
        return result

    def _pretend(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Note an operator on handles. Returns results on the meta device."""
        given, named = tree_map(_without_memory, (args, kwargs))
        named.pop("device", None)
        try:
            result = func(*given, **named)
        except (NotImplementedError, RuntimeError):  # not supported on the meta device, or an error
            return self._show(func, args, kwargs)
        operation = cast("Operation", self._operation(func, args, kwargs))
        home = next(_places_of(operation)).cell.device
        if operation.draws and self.exact:
            operation.state = state_of(home, operation.generator)
            self.tape.draw(operation)
        self._note(operation, result, home)
        return result

    def _show(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator that needs values, on the values of handles."""
        made: dict[int, torch.Tensor] = {}
        handles: dict[int, torch.Tensor] = {}

        def filled(value: Any) -> Any:
            if not self.is_handle(value):
                return value
            if id(value) not in made:
                made[id(value)] = real = self.tape.values(self.tape.place(value)).clone()
                handles[id(real)] = value
            return made[id(value)]

        operation = self._operation(func, args, kwargs)
        given, named = tree_map(filled, (args, kwargs))
        result = self._run(func, given, named, operation)
        for tensor in _written(func, args, kwargs):
            cell = self.tape.place(tensor).cell
            cell.is_ahead = tensor.is_meta and cell.handle is not None
        return tree_map(lambda value: handles.get(id(value), value), result)

    def _operation(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Operation | None:
        """The operation of this call of `func`; None if it neither makes nor writes tensors."""
        spec = self._spec((args, kwargs))
        makes_none = not func._schema.is_mutable and not _makes_tensors(func)
        if makes_none or not _SHOWS.isdisjoint(func.tags):
            self.tape.was_read |= any(
                each.draws for place in places(spec) for each in self.tape.slice(place.cell)
            )
        if makes_none:
            return None
        places_of, named = spec
        return Operation(
            func,
            places_of,
            named,
            [],
            list(_written(func, places_of, named)),
            overwrites=func._schema.name in _OVERWRITES,
            draws=torch.Tag.nondeterministic_seeded in func.tags,
            generator=next(
                (x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Generator)), None
            ),
        )

    def handle(self, tensor: torch.Tensor) -> torch.Tensor:
        """A handle for `tensor`, which has memory."""
        with self.paused():
            self._spec(tensor)
            return self.tape.handle(tensor)

    def shown(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, or the values of a handle, for code that may read and write them without an
        operation on the tape."""
        with self.paused():
            cell = self._spec(tensor).cell
            self.tape.was_read |= any(each.draws for each in self.tape.slice(cell))
            if self.is_handle(tensor):
                return self.tape.values(self.tape.place(tensor)).clone()
            cell.is_shown = True
            return tensor

    def _spec(self, tree: Any) -> Any:
        """Arguments with places instead of tensors; each tensor has one place."""
        made: dict[int, Place] = {}

        def spec(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in made:
                is_known = self.tape.cell(value) is not None
                self.tape.catch_up(value)
                made[id(value)] = place = self.tape.place(value)
                if not is_known:
                    place.cell.given = value  # not detached: that would have its own version
                    place.cell.version = value._version
            return made[id(value)]

        return tree_map(spec, tree)

    def _note(self, operation: Operation, result: Any, home: torch.device | None) -> None:
        """Note `operation` with its `result`. If `home` is given, the result consists of handles of
        memory on that device."""
        used = {id(place.cell) for place in _places_of(operation)}
        for each in tensors_of(result):
            place = None
            if isinstance(each, torch.Tensor) and number_of(each) is not None:
                place = self.tape.place(each, home)
                place = None if id(place.cell) in used else place
            operation.results.append(place)
        for written in operation.written:
            written.cell.is_ahead = home is not None and written.cell.handle is not None
        self.tape.note(operation)

    def call(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """Note `function` of `torch.nn.init`, which writes its argument `tensor`, and run it if
        that has memory."""
        tensor = arguments["tensor"]
        with self.paused():
            if tensor.is_meta and not self.is_handle(tensor):
                return
            spec = self._spec(arguments)
            operation = Operation(
                function,
                [],
                spec,
                [None],
                [spec["tensor"]],
                overwrites=True,
                draws=True,
                generator=arguments.get("generator"),
            )
            if not tensor.is_meta or self.exact:
                operation.state = state_of(operation.device, operation.generator)
            if not tensor.is_meta:
                spec["tensor"].cell.keep()
                function(**arguments)
            elif self.exact:
                self.tape.draw(operation)
            spec["tensor"].cell.is_ahead = tensor.is_meta and spec["tensor"].cell.handle is not None
            self.tape.note(operation)


class _Functions(TorchFunctionMode):
    """Handles calls for `taping` that are no operators. These are functions of `torch.nn.init` that
    ask whether a tensor is on the meta device, tensors of Python's numbers (also in an index),
    methods that return values out of sight, and assignments to `.data`."""

    def __init__(self, taping: Taping) -> None:
        super().__init__()
        self._taping = taping

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        taping = self._taping
        kwargs = kwargs or {}
        if func in _OF_DATA and not taping.is_paused:
            at = kwargs.get("device", args[0].device if func is torch.Tensor.new_tensor else None)
            if at is not None and torch.device(at) == _META:
                kwargs = {**kwargs, "device": _CPU}
        elif func == _IS_META and not taping.is_paused:
            caller = sys._getframe(1)
            if caller.f_globals.get("__name__") == "torch.nn.init":
                taping.call(*call_of(caller))
                return True
            if taping.is_handle(args[0]):
                return False  # `load_state_dict` would warn that it does nothing
        elif func == _DEVICE and not taping.is_paused and _is_peft(sys._getframe(1)):
            if taping.is_handle(args[0]):
                return taping.tape.place(args[0]).cell.device
        elif func in _INDEXING and not taping.is_paused and taping.is_handle(args[0]):
            args = (args[0], _with_values(args[1]), *args[2:])
        elif func in _OUT_OF_SIGHT and not taping.is_paused:
            args = (taping.shown(args[0]), *args[1:])
        elif func == _SET_DATA and taping.is_handle(args[0]) and not args[1].is_meta:
            args = (args[0], taping.handle(args[1]))
        return func(*args, **kwargs)


def _is_peft(caller: FrameType) -> bool:
    """Whether `caller` is code of PEFT. It computes nothing of a base on the meta device."""
    return str(caller.f_globals.get("__name__", "")).startswith("peft.")


def _with_values(index: Any, is_outermost: bool = True) -> Any:
    """`index`, with tensors in host memory instead of its lists of numbers."""
    if isinstance(index, (torch.Tensor, str)) or not hasattr(index, "__len__"):
        return index
    if is_outermost and not all(isinstance(each, (int, np.integer)) for each in index):
        kind = tuple if isinstance(index, tuple) else list  # torch takes such a list for a tuple
        return kind(_with_values(each, is_outermost=False) for each in index)
    if is_outermost and isinstance(index, tuple):
        return index
    found = torch.tensor(np.asarray(index), device=_CPU)
    return found if found.numel() else found.long()


def call_of(frame: FrameType) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function that runs in `frame`, and the arguments it was given."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    function = cast("Callable[..., Any]", frame.f_globals[code.co_name])
    return function, {name: frame.f_locals[name] for name in names}


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments that this call of `func` writes: tensors, or places."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (
                each
                for each in (value if isinstance(value, (list, tuple)) else [value])
                if isinstance(each, (torch.Tensor, Place))
            )


def _is_view(func: Any) -> bool:
    """Whether `func` returns another tensor of the same memory."""
    schema = func._schema
    return not schema.is_mutable and any(each.alias_info is not None for each in schema.returns)


def _makes_tensors(func: Any) -> bool:
    """Whether `func` returns tensors, or lists of them."""
    return any("Tensor" in str(each.type) for each in func._schema.returns)


def _without_memory(value: Any) -> Any:
    """A tensor of the same geometry on the meta device; any other value itself."""
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _places_of(operation: Operation) -> Iterator[Place]:
    yield from places((operation.args, operation.kwargs))
