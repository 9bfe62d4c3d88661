"""Notes the operations of constructors on tensors, so that the values of one parameter can be made
again later, alone and bit for bit.

[Note: replay]
A `Tape` is a list of operations in the order in which they ran. A tensor in it is a `Place` in a
`Cell`, the memory of one storage. To make the values of a cell, `Tape.slice` walks the list
backward. It takes each operation that wrote a needed cell. The cells that this operation read are
needed, too. An operation that overwrites a whole cell ends the need for it. The operations taken
then run forward on real memory. Each cell is dropped after its last use. So a replay takes the
memory of one parameter and of the temporary tensors it is made of.

Example: the slice of w has operations 3, 2 and 0. Number 2 overwrites w, so number 1 is not needed.

    0  t.normal_()    writes t
    1  w.zero_()      writes w
    2  w.copy_(t)     reads t, overwrites w
    3  w.mul_(2)      reads and writes w
    4  u.fill_(1)     writes u

[Note: random numbers]
The CPU generator of torch cannot skip numbers. So an operation that draws keeps the state of the
generator before it (5 KB), and the replay sets this state. With `infinity.init(exact=False)` there
is no state: the first replay draws from the present state, and keeps it for later replays. `seeded`
runs all draws of the tape once more, in order, to find the states of a plain constructor after
`torch.manual_seed(seed)`.
"""

from __future__ import annotations

import itertools
import mmap
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_iter, tree_map

from infinity.errors import ConfigError

UNINITIALISED = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
}
"""Operators with results that have no values."""
_CPU = torch.device("cpu")


class Cell:
    """The memory of one storage, or of a parameter's handle and the tensor it was made from.

    `given` is a tensor over memory that no operation of the tape made, and `version` is its version
    when it was first used. A later cell of the tape has a higher `number`.
    """

    def __init__(self, nbytes: int, device: torch.device, number: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.device = device
        self.given: torch.Tensor | None = None
        self.version = 0
        self.handle: torch.UntypedStorage | None = None
        """The storage without memory that stands for this cell in parameters."""
        self.is_ahead = False
        """Whether the handle was written, but not the memory it was made from."""
        self.is_shown = False
        """Whether other code may write the memory without an operation on the tape."""
        self.is_taken = False
        """Whether a wrapped model has its values, and changes them."""
        self._is_kept = False
        self._reserved: np.ndarray | None = None

    def address(self) -> int:
        """An address that no other memory has while the cell lives. It cannot be read."""
        if self._reserved is None:
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            memory = mmap.mmap(-1, max(self.nbytes, 1), flags=private, prot=0)
            self._reserved = np.frombuffer(memory, np.uint8)
        return self._reserved.ctypes.data

    def keep(self) -> None:
        """The memory will be written: keep its content, if no operation made it."""
        if self.given is not None and not self._is_kept:
            self.given = torch.empty(0, dtype=torch.uint8, device=self.device).set_(
                self.given.untyped_storage().clone()
            )
            self.version = self.given._version
            self._is_kept = True


@dataclass(frozen=True, eq=False)
class Place:
    """A tensor over the memory of a cell."""

    cell: Cell
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """This tensor in `storage`."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)

    def scratch(self) -> torch.Tensor:
        """A tensor of the same geometry, in memory of its own."""
        return torch.empty_strided(
            self.size, self.stride, dtype=self.dtype, device=self.cell.device
        )

    def is_whole(self) -> bool:
        """Whether it has every byte of the cell, once."""
        elements = torch.Size(self.size).numel()
        return elements * self.dtype.itemsize == self.cell.nbytes and elements == 1 + sum(
            (size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True)
        )

    def rows_of(self, whole: Place) -> tuple[slice, ...] | None:
        """The indices that take it out of `whole`. () if it is all of `whole`. None if it is
        anything else than a range of rows, or if `whole` is not a contiguous tensor over the whole
        cell."""
        if not whole._is_plain() or self.dtype is not whole.dtype or self.stride != whole.stride:
            return None
        if self.size == whole.size:
            return () if self.offset == 0 else None
        if not self.size or self.size[1:] != whole.size[1:]:
            return None
        begin, left = divmod(self.offset, max(self.stride[0], 1))
        return None if left else (slice(begin, begin + self.size[0]),)

    def _is_plain(self) -> bool:
        """Whether it is a contiguous tensor over the whole cell."""
        shape = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")
        return self.is_whole() and self.offset == 0 and shape.is_contiguous()


@dataclass
class Operation:
    """One call on tensors. `args` and `kwargs` have places instead of tensors. `results` has the
    places of the tensors that it made, and None for other results. `written` has the places that it
    wrote."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    results: list[Place | None]
    written: list[Place]
    overwrites: bool = False
    """Whether it replaces the content of `written` and does not read it."""
    draws: bool = False
    generator: torch.Generator | None = None
    """The generator that a constructor gave; None for the default generator of the device."""
    state: torch.Tensor | None = None
    """The state of the generator before it ran."""
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    @property
    def device(self) -> torch.device:
        """The device that it runs on."""
        return next((p.cell.device for p in (*self.written, *_there(self.results))), _CPU)

    @property
    def is_uninitialised(self) -> bool:
        """Whether it makes a tensor without values."""
        return getattr(getattr(self.function, "_schema", None), "name", "") in UNINITIALISED

    def read(self) -> Iterator[Cell]:
        """The cells that it reads."""
        used = [] if self.is_uninitialised else list(places((self.args, self.kwargs)))
        for place in self.written if self.overwrites else ():
            used.remove(place)  # once: it may also be read
        yield from (place.cell for place in used)

    def changed(self) -> Iterator[Cell]:
        """The cells that it changes."""
        yield from {place.cell for place in (*self.written, *_there(self.results))}

    def made(self) -> Iterator[Cell]:
        """The cells that it fills, so that their content before does not matter."""
        yield from (place.cell for place in self.results if place is not None)
        if self.overwrites:
            yield from (place.cell for place in self.written if place.is_whole())


class _ReplayMemory:
    """The real memory of cells during a replay. `written` has the ids of the cells that the replay
    writes."""

    def __init__(self, written: set[int]) -> None:
        self._written = written
        self._storages: dict[int, torch.UntypedStorage] = {}

    def of(self, cell: Cell) -> torch.UntypedStorage:
        """The memory of `cell`; zeros if it was never written."""
        if id(cell) not in self._storages:
            self._storages[id(cell)] = self._first(cell)
        return self._storages[id(cell)]

    def put(self, cell: Cell, storage: torch.UntypedStorage, is_fresh: bool) -> None:
        """An operation returned `storage` as the memory of `cell`. If it `is_fresh`, no other
        tensor has it."""
        may_keep = is_fresh or id(cell) not in self._written
        self._storages[id(cell)] = storage if may_keep else storage.clone()

    def drop(self, numbers: Iterable[int]) -> None:
        """Free the memory of the cells with these ids."""
        for number in numbers:
            self._storages.pop(number, None)

    def _first(self, cell: Cell) -> torch.UntypedStorage:
        if cell.given is None:
            return torch.zeros(cell.nbytes, dtype=torch.uint8, device=cell.device).untyped_storage()
        if cell.given._version != cell.version:
            raise ConfigError(
                f"a tensor of shape {tuple(cell.given.shape)} that a constructor inside "
                "infinity.init() copied from was changed after that; change it before, or give "
                "wrap(..., weights=...)"
            )
        storage = cell.given.untyped_storage()
        return storage.clone() if id(cell) in self._written else storage


_NUMBERS = itertools.count()
"""Of the cells of all tapes, which ranks that build the same models count alike."""


class Tape:
    """The operations of one `infinity.init()`; see [Note: replay]. Used by one thread."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.was_read = False
        """Whether a constructor read a number that was drawn, so that other draws cannot replace
        it."""
        self.versions: dict[int, int] = {}
        """The version counters of parameters, by their ids, when their origins were stored."""
        self._cells: dict[int, tuple[StorageWeakRef, Cell]] = {}  # by the numbers of storages
        self._writers: dict[int, list[int]] = {}  # by the ids of cells: numbers of operations
        self._seed: int | None = None
        self._states: dict[int, torch.Tensor] = {}

    def __deepcopy__(self, memo: object) -> Tape:
        return self

    def cell(self, tensor: torch.Tensor) -> Cell | None:
        """The cell of the memory of `tensor`; None when no operation used it."""
        number = number_of(tensor)
        found = None if number is None else self._cells.get(number)
        return None if found is None or found[0].expired() else found[1]

    def tie(self, storage: torch.UntypedStorage, cell: Cell) -> None:
        """Note that `storage` is the memory of `cell`."""
        self._cells[int(storage._cdata)] = (StorageWeakRef(storage), cell)

    def place(self, tensor: torch.Tensor, device: torch.device | None = None) -> Place:
        """The place of `tensor`. A tensor without a cell gets one, with memory on `device` or else
        on its own device."""
        cell = self.cell(tensor)
        if cell is None:
            storage = tensor.untyped_storage()
            cell = Cell(storage.nbytes(), device or tensor.device, next(_NUMBERS))
            self.tie(storage, cell)
        return Place(
            cell,
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
        )

    def handle(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor without memory that stands for `tensor`: the same cell and geometry."""
        place = self.place(tensor)
        if place.cell.handle is None:
            place.cell.handle = torch.UntypedStorage(place.cell.nbytes, device="meta")
            self.tie(place.cell.handle, place.cell)
        return place.over(place.cell.handle)

    def end(self) -> None:
        """Constructors are done: drop the operations that affect neither the values of handles nor
        the states of the generator."""
        for _, cell in self._cells.values():
            cell.handle = None
        self._cells = {
            key: found
            for key, found in self._cells.items()
            if not found[0].expired() and _storage(found[0]).device.type == "meta"
        }
        live = {id(cell) for _, cell in self._cells.values()}
        kept = []
        for each in reversed(self.operations):
            is_live = any(id(cell) in live for cell in each.changed())
            if is_live or each.draws:
                kept.append(each)
                live -= {id(cell) for cell in each.made()}
                live.update(id(cell) for cell in each.read() if is_live or not each.written)
            if each.draws and not is_live and each.generator is None:
                each.state = None  # it only advances the generator, for `seeded`
        self.operations = []
        self._writers.clear()
        for each in reversed(kept):
            self.note(each)

    def note(self, operation: Operation) -> None:
        """Add `operation`, which ran."""
        for cell in operation.changed():
            self._writers.setdefault(id(cell), []).append(len(self.operations))
        self.operations.append(operation)

    def writes(self, cell: Cell) -> int:
        """How many operations have written the cell."""
        return len(self._writers.get(id(cell), ()))

    def is_written(self, cell: Cell) -> bool:
        """Whether the cell ever got values."""
        return cell.given is not None or any(
            not self.operations[number].is_uninitialised
            for number in self._writers.get(id(cell), ())
        )

    def catch_up(self, tensor: torch.Tensor) -> None:
        """Write to the memory of `tensor` the values that were written to its handle. If other code
        may have written the memory, note its content."""
        cell = self.cell(tensor)
        if cell is None or tensor.is_meta or not (cell.is_ahead or cell.is_shown):
            return
        whole = Place(cell, torch.uint8, (cell.nbytes,), (1,), 0)
        memory = whole.over(tensor.untyped_storage())
        if cell.is_ahead:
            cell.keep()
            memory.copy_(self.values(whole))
            cell.is_ahead = False
        else:
            kept = memory.clone()
            self.note(Operation(lambda: kept, [], {}, [whole], []))

    def slice(self, cell: Cell) -> list[Operation]:
        """The operations that make the content of `cell`, in the order of the tape."""
        taken: set[int] = set()
        seen: set[tuple[int, int]] = set()
        pending = [(cell, len(self.operations))]
        while pending:
            wanted, before = pending.pop()
            writers = self._writers.get(id(wanted), [])
            for index in range(bisect_left(writers, before) - 1, -1, -1):
                number = writers[index]
                if (id(wanted), number) in seen:
                    break
                seen.add((id(wanted), number))
                each = self.operations[number]
                if number not in taken:
                    taken.add(number)
                    pending += [(read, number) for read in each.read()]
                if any(made is wanted for made in each.made()):
                    break
        return [self.operations[number] for number in sorted(taken)]

    def values(self, place: Place) -> torch.Tensor:
        """The content of `place`. It must not be written. Raises `ConfigError` as `memory`."""
        return place.over(self.memory(place.cell))

    def memory(self, wanted: Cell) -> torch.UntypedStorage:
        """The content of a cell. It must not be written.

        Raises `ConfigError` if a tensor that it was copied from has changed since.
        """
        operations = self.slice(wanted)
        last = {}
        for number, each in enumerate(operations):
            for used in (*each.read(), *each.changed()):
                last[id(used)] = number
        last.pop(id(wanted), None)
        memory = _ReplayMemory({id(place.cell) for each in operations for place in each.written})
        with _default_dtype():
            for number, each in enumerate(operations):
                torch.set_default_dtype(each.default_dtype)
                self._run(each, memory)
                memory.drop(key for key, used in last.items() if used == number)
        return memory.of(wanted)

    def _run(self, each: Operation, memory: _ReplayMemory) -> None:
        if each.is_uninitialised:
            return  # the memory is zeros until it is written
        args, kwargs = real(
            (each.args, each.kwargs), lambda place: place.over(memory.of(place.cell))
        )
        if not each.draws:
            results = each.function(*args, **kwargs)
        else:
            state = self._states.get(id(each), each.state)
            if state is None:
                self._states[id(each)] = state_of(each.device, each.generator)
                results = each.function(*args, **kwargs)
            elif each.generator is None:
                with _drawing_from(each.device, state):
                    results = each.function(*args, **kwargs)
            else:
                kwargs["generator"] = torch.Generator(each.generator.device)
                kwargs["generator"].set_state(state)
                results = each.function(*args, **kwargs)
        for place, result in zip(each.results, tensors_of(results), strict=True):
            if place is None:
                continue
            if (place.stride, place.offset) != (result.stride(), result.storage_offset()):
                result = place.over(memory.of(place.cell)).copy_(result)
            else:
                is_fresh = isinstance(each.function, torch._ops.OpOverload)
                memory.put(place.cell, result.untyped_storage(), is_fresh)

    def seeded(self, seed: int) -> None:
        """From now on, values are those of a constructor after `torch.manual_seed(seed)`.

        Raises `ConfigError` if the constructor read numbers that it drew.
        """
        if all(each.state is None for each in self._drawing()):
            self._states.clear()  # of an earlier replay: no draw was made yet, so draw again
        if self._seed == seed or not any(each.state is not None for each in self._drawing()):
            return
        if self.was_read:
            raise ConfigError(
                "the constructor looked at numbers that it drew, so wrap(seed=...) cannot replace "
                "them; call torch.manual_seed(seed) before infinity.init() instead"
            )
        self._seed = seed
        devices = {_CPU: None} | dict.fromkeys(each.device for each in self._drawing())
        with ExitStack() as before:
            before.enter_context(_default_dtype())
            for device in devices:
                before.enter_context(_drawing_from(device, state_of(device)))
            torch.manual_seed(seed)
            for each in self._drawing():
                torch.set_default_dtype(each.default_dtype)
                if each.state is not None:
                    self._states[id(each)] = state_of(each.device)
                self.draw(each)

    def _drawing(self) -> list[Operation]:
        return [each for each in self.operations if each.draws and each.generator is None]

    def draw(self, each: Operation) -> None:
        """Advance the generator as `each` does."""
        written = {id(place) for place in each.written}
        args, kwargs = real(
            (each.args, each.kwargs),
            lambda place: place.scratch() if id(place) in written else self.values(place),
        )
        each.function(*args, **kwargs)


def number_of(tensor: torch.Tensor) -> int | None:
    """The number of the storage of a tensor; None if it has no storage, as some subclasses."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        return None


def _storage(reference: StorageWeakRef) -> torch.UntypedStorage:
    """The storage of a `reference` that has not expired."""
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


def state_of(device: torch.device, generator: torch.Generator | None = None) -> torch.Tensor:
    """The state of `generator`, or of the default generator of `device`."""
    if generator is not None:
        return generator.get_state()
    if device.type == "cpu":
        return torch.get_rng_state()
    return cast("torch.Tensor", torch.get_device_module(device).get_rng_state(device))


@contextmanager
def _drawing_from(device: torch.device, state: torch.Tensor) -> Iterator[None]:
    """Inside the context, the default generator of `device` continues from `state`. Then it has its
    old state again."""
    before = state_of(device)
    _set_state(device, state)
    try:
        yield
    finally:
        _set_state(device, before)


def _set_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def places(tree: Any) -> Iterator[Place]:
    """The places in `tree`, the arguments of an operation."""
    yield from (x for x in tree_iter(tree) if isinstance(x, Place))


def real(tree: Any, tensor_at: Callable[[Place], torch.Tensor]) -> Any:
    """The arguments `tree` with tensors instead of places."""
    return tree_map(lambda x: tensor_at(x) if isinstance(x, Place) else x, tree)


def tensors_of(results: Any) -> list[Any]:
    """The results of a function, as a list."""
    return list(results) if isinstance(results, (list, tuple)) else [results]


def _there(results: Iterable[Place | None]) -> list[Place]:
    return [place for place in results if place is not None]


@contextmanager
def _default_dtype() -> Iterator[None]:
    """Put the default dtype back at the end."""
    before = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(before)
