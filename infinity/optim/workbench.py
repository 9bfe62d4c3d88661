"""The optimizers of torch that `infinity.adapt` runs, one for each unit, and the files of their
states between steps."""

from __future__ import annotations

import copy
import tempfile
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from infinity import nvme
from infinity.errors import ConfigError
from infinity.optim.kernel_states import KernelStates
from infinity.optim.state_tensors import Slot
from infinity.quantities import round_up
from infinity.sharding.unit import Unit

PAGE = 4096  # states begin at a multiple, so that they move with O_DIRECT

_MISSING: Any = object()


class _ShelfPlace(NamedTuple):
    """A tensor in a file: its state, its name there, and its place."""

    state: dict[str, Any]
    name: str
    shape: torch.Size
    dtype: torch.dtype
    begin: int


class Shelf:
    """Keeps the states of one unit between steps, in an unnamed file in `directory`, or in memory
    if it is None."""

    def __init__(self, directory: Path | None) -> None:
        self._file = None if directory is None else tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 (it lives as we do)
        if self._file is not None:
            weakref.finalize(self, self._file.close)
        self._places: list[_ShelfPlace] = []

    def put(self, states: Iterable[dict[str, Any]]) -> None:
        """Move every tensor with more than one element from `states` to the file. None stays in its
        place."""
        if self._file is None:
            return
        items, end = [], 0
        self._places.clear()
        for state in states:
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    items.append((value.contiguous(), self._path, end))
                    self._places.append(_ShelfPlace(state, name, value.shape, value.dtype, end))
                    end = round_up(end + value.nbytes, PAGE)
        nvme.write_many(items)
        for place in self._places:
            place.state[place.name] = None

    def take(self) -> None:
        """Put the tensors back into the states."""
        for place in self._places:
            place.state[place.name] = self.read(place)
        self._places.clear()

    def read(self, place: _ShelfPlace) -> torch.Tensor:
        """The tensor at `place`."""
        tensor = torch.empty(place.shape, dtype=place.dtype)
        nvme.read_many([(tensor, self._path, place.begin)])
        return tensor

    def place(self, state: dict[str, Any], name: str) -> _ShelfPlace | None:
        """The place of a tensor of `state` in the file; None for a tensor in memory."""
        for place in self._places:
            if place.state is state and place.name == name:
                return place
        return None

    @property
    def _path(self) -> str:
        return "" if self._file is None else f"/proc/self/fd/{self._file.fileno()}"


class ForeignRule(Protocol):
    """The parts of an adapted optimizer that its benches use."""

    kind: type[torch.optim.Optimizer]
    settings: dict[str, Any]
    param_groups: list[dict[str, Any]]

    @property
    def counts(self) -> dict[int, int]:
        """The number of updates of each parameter, by its id."""

    def bench(self, unit: Unit) -> Workbench:
        """The torch optimizer of `unit`."""


class Workbench:
    """The torch optimizer of one unit. It updates stand-ins for the parameters, which have data
    only during use."""

    def __init__(self, unit: Unit, directory: Path | None) -> None:
        self.unit = unit
        self.stands = [nn.Parameter(torch.empty(0)) for _ in unit.facts.parameters]
        self.optimizer: torch.optim.Optimizer | None = None
        self.edits = 0
        """The number of replacements of states outside of a step."""
        self._shelf = Shelf(directory)
        self._rest()

    def _rest(self) -> None:
        """Take the data of the stand-ins away."""
        for stand, place in zip(self.stands, self.unit.facts.layout.places, strict=True):
            stand.data, stand.grad = torch.zeros(()).expand(place.shape), None

    def lay_out(self, adapted: ForeignRule, values: torch.Tensor | None) -> torch.optim.Optimizer:
        """Give the stand-ins their parts of `values` (numel,), fp32, and the optimizer its states
        and the current groups."""
        if values is not None:
            for stand, place in zip(self.stands, self.unit.facts.layout.places, strict=True):
                stand.data = values[place.offset : place.end].view(place.shape)
        own = {
            id(p): stand for p, stand in zip(self.unit.facts.parameters, self.stands, strict=True)
        }
        groups: list[dict[str, Any]] = [
            options_of(group) | {"params": [own[id(p)] for p in group["params"] if id(p) in own]}
            for group in adapted.param_groups
        ]
        if self.optimizer is None:
            self.optimizer = adapted.kind(groups, **adapted.settings)
        for group in groups[len(self.optimizer.param_groups) :]:
            self.optimizer.add_param_group(group)
        for mine, group in zip(self.optimizer.param_groups, groups, strict=True):
            mine.update(group)
        self._shelf.take()
        return self.optimizer

    def clear(self) -> None:
        """Put the states into the shelf, and release all data."""
        if self.optimizer is not None:
            self._shelf.put(
                self.optimizer.state[stand]
                for stand in self.stands
                if stand in self.optimizer.state
            )
        self._rest()

    # One state

    def state(self, index: int) -> dict[str, Any]:
        """The states of parameter `index`; None for a tensor in the shelf."""
        if self.optimizer is None:
            return {}
        return self.optimizer.state.get(self.stands[index], {})

    def form(self, index: int, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Shape and dtype of a tensor of `state`; None for other values."""
        state = self.state(index)
        value, place = state.get(name), self._shelf.place(state, name)
        found: Any = value if isinstance(value, torch.Tensor) else place
        return None if found is None else (tuple(found.shape), found.dtype)

    def read(self, index: int, name: str) -> torch.Tensor:
        """A copy of one tensor."""
        state = self.state(index)
        place = self._shelf.place(state, name)
        if place is not None:
            return self._shelf.read(place)
        value: torch.Tensor = state[name]
        return value.detach().clone()

    @contextmanager
    def edited(self, adapted: ForeignRule) -> Iterator[dict[torch.Tensor, Any]]:
        """All states of the optimizer, to be changed inside."""
        optimizer = self.lay_out(adapted, None)
        self.edits += 1
        try:
            yield optimizer.state
        finally:
            self.clear()


class BenchSlot(Slot):
    """A tensor among the states of parameter `index` of a bench."""

    def __init__(self, adapted: ForeignRule, bench: Workbench, index: int, name: str) -> None:
        shape, self.dtype = bench.form(index, name) or ((), torch.float32)
        self.shape = shape
        self.name = f"optimizer.state[parameter][{name!r}] of {bench.unit.facts.names[index]}"
        self.device = torch.device("cpu")
        self._adapted = weakref.ref(adapted)
        self._bench, self._index, self._key = bench, index, name

    @property
    def is_open(self) -> bool:
        return bool(self._bench.unit.data.tier) and self._adapted() is not None

    def fetch(self) -> torch.Tensor:
        """A copy, on the host."""
        return self._bench.read(self._index, self._key)

    def replace(self, values: torch.Tensor) -> None:
        """Replace the state by `values`."""
        adapted, bench = self._adapted(), self._bench
        if adapted is not None:
            with bench.edited(adapted) as states:
                kept = states[bench.stands[self._index]][self._key]
                kept.copy_(values.detach())

    def mark(self) -> object:
        adapted = self._adapted()
        counts = {} if adapted is None else adapted.counts
        return counts.get(id(self._bench.unit.facts.parameters[self._index])), self._bench.edits


class BenchStates:
    """The keeper of the states of an adapted optimizer; see `state_view.Keeper`. The torch
    optimizer defines the content of entries."""

    changes_values = True

    def __init__(self, adapted: ForeignRule, places: KernelStates) -> None:
        self._adapted = weakref.ref(adapted)
        self._places = places

    def _bench(self, parameter: torch.Tensor) -> tuple[ForeignRule, Workbench, int]:
        adapted = self._adapted()
        if adapted is None:
            raise ConfigError("the optimizer of these states of a wrapped model is gone")
        unit, index = self._places.places[id(parameter)]
        return adapted, adapted.bench(unit), index

    def content(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The states of `parameter` in the torch optimizer, with slots for its tensors."""
        adapted, bench, index = self._bench(parameter)
        return {
            name: value
            if bench.form(index, name) is None
            else BenchSlot(adapted, bench, index, name)
            for name, value in bench.state(index).items()
        }

    def check(self, parameter: torch.Tensor, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """`wanted`, without a check."""
        return dict(wanted)

    def write(
        self, parameter: torch.Tensor, entry: Mapping[str, Any], changed: Collection[str]
    ) -> None:
        """Replace the `changed` parts of an entry, and remove parts that `entry` lacks."""
        adapted, bench, index = self._bench(parameter)
        with bench.edited(adapted) as states:
            state = states.setdefault(bench.stands[index], {})
            for name in [name for name in state if name not in entry]:
                del state[name]
            state.update((name, host_copy(entry[name])) for name in changed)

    def restart(self, parameters: Iterable[torch.Tensor]) -> None:
        """Remove the states of these parameters."""
        taken: dict[Workbench, list[int]] = {}
        for parameter in parameters:
            adapted, bench, index = self._bench(parameter)
            taken.setdefault(bench, []).append(index)
            adapted.counts[id(parameter)] = 0
        for bench, positions in taken.items():
            with bench.edited(adapted) as states:
                for index in positions:
                    states.pop(bench.stands[index], None)


class Carried:
    """The changes of one step in the options of groups, such as a number of steps. Each bench
    changes its own groups, and all must get equal options."""

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self._before = [options_of(group) for group in groups]
        self._after: list[dict[str, Any]] = [{} for _ in groups]
        self._rank = [0] * len(groups)  # 0: not seen; 1: without a gradient; 2: with one

    def note(self, kind: type, groups: Sequence[Mapping[str, Any]]) -> None:
        """A bench has stepped. Raises `ConfigError` if its options differ from another bench's.

        For a group, benches with gradients override benches without.
        """
        for number, (group, before) in enumerate(zip(groups, self._before, strict=True)):
            rank = 1 + any(stand.grad is not None for stand in group["params"])
            changed = {
                name: value
                for name, value in options_of(group).items()
                if not same(value, before.get(name, _MISSING))
            }
            if rank == self._rank[number] and not same(changed, self._after[number]):
                raise ConfigError(
                    f"{kind.__name__} changed its group by what it saw of some parameters of a "
                    f"wrapped model ({', '.join(sorted(changed))}), and infinity.adapt runs it for "
                    "one unit after the other; use infinity.AdamW or one of its family"
                )
            if rank > self._rank[number]:
                self._rank[number], self._after[number] = rank, changed

    def apply(self, groups: Sequence[dict[str, Any]]) -> None:
        """Change the groups of the user."""
        for group, changed in zip(groups, self._after, strict=True):
            group.update(changed)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `group`, without parameters; mutable values are copied."""
    return {
        name: copy.deepcopy(value) if isinstance(value, (torch.Tensor, list, dict)) else value
        for name, value in group.items()
        if name != "params"
    }


def same(value: Any, other: Any) -> bool:
    """Whether two values in groups or states are equal; tensors bit by bit, except the signs of
    zeros."""
    if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
        if not (isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)):
            return False
        if value.shape != other.shape or value.dtype != other.dtype:
            return False
        return torch.allclose(value, other, rtol=0, atol=0, equal_nan=True)
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(same(value[n], other[n]) for n in value)
    if isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(value) == len(other) and all(map(same, value, other))
    return value is other or bool(value == other) or (value != value and other != other)


def host_copy(value: Any) -> Any:
    """A copy of a tensor on the host; any other value itself."""
    return value.detach().clone().cpu() if isinstance(value, torch.Tensor) else value
