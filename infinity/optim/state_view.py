"""`optimizer.state`: a dict of dicts, as in torch, whose tensors are the states of the engine.

[Note: changes of optimizer.state]
An emptied or deleted entry restarts at the next step, as in torch: moments are zeros, and the count
is 0. A replaced entry is written. Values with which the optimizer of torch of the same name could
not step are refused, before anything is changed.

[Note: a tensor that was put into an entry]
torch keeps the tensor itself, so a later change of it is a change of the state. Here its values are
copied, and a weak reference is kept. The next step uses the current values of the tensor. A change
after that step raises at the following step, because torch would have updated the tensor meanwhile.
"""

from __future__ import annotations

import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

import torch

from infinity.errors import ConfigError, ShardedParameterError, in_words
from infinity.optim.state_entry import MISSING, Changed, JoinedStateEntry, StateEntry
from infinity.optim.state_tensors import JoinedSlot, StateTensor
from infinity.sharding.lazy_tensor import LazyTensor
from infinity.sharding.tiles import TiledWeight


class Keeper(Protocol):
    """Keeps the states of one optimizer. Used by the thread that runs the model."""

    changes_values: bool
    """Whether a step may change values of an entry that are no tensors."""

    def content(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The entry of `parameter` as in torch, with a `Slot` for each tensor."""

    def check(self, parameter: torch.Tensor, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """`wanted` as an entry, without empty values. Raises `ConfigError` if the optimizer of
        torch could not step with it."""

    def write(
        self, parameter: torch.Tensor, entry: Mapping[str, Any], changed: Collection[str]
    ) -> None:
        """Replace the `changed` parts of an entry, and remove the parts in `gone`."""

    def restart(self, parameters: Iterable[torch.Tensor]) -> None:
        """Restart all states of these parameters."""


class OptimizerStates(Changed, defaultdict[torch.Tensor, dict[str, Any]]):
    """`optimizer.state`. See [Note: changes of optimizer.state].

    Used by the thread that runs the model. All ranks read and change tensors alike.
    """

    def __init__(self, owner: str, keeper: Keeper) -> None:
        super().__init__(dict)
        self._owner, self._keeper = owner, keeper
        self._known: dict[int, torch.Tensor] = {}
        self._given: list[_Given] = []

    # For the optimizer

    def know(self, parameters: Iterable[torch.Tensor]) -> None:
        """These `parameters` may have entries."""
        self._known.update((id(parameter), parameter) for parameter in parameters)

    def renew(self, keys: Iterable[int]) -> None:
        """The parameters with these ids have states."""
        for key in keys:
            parameter = self._known[key]
            entry = self._entry(parameter)
            if not entry or self._keeper.changes_values:
                entry.fill(self._keeper.content(parameter))
                if not entry:
                    dict.pop(self, parameter)

    def forget(self) -> None:
        """Remove all entries, before all states restart."""
        self._given.clear()
        for entry in map(self._entry, list(self)):
            for name in list(entry):
                entry.drop(name)
        dict.clear(self)

    def settle(self) -> None:
        """A step begins. Adopt the current values of tensors that were put into entries. Raises
        `ShardedParameterError` if torch would have other values."""
        given, self._given = self._given, []
        for each in given:
            each.settle(self[each.parameter])
        self._given = [each for each in given if each.tensor() is not None]

    # The methods of a dict

    def replace(self, parameter: torch.Tensor, wanted: Any) -> None:
        """`wanted` becomes the entry of `parameter`."""
        changes = self._check(parameter, wanted)
        entry = self[parameter]
        new = {n: v for n, v in wanted.items() if not _is_same(dict.get(entry, n, MISSING), v)}
        for name, value in new.items():
            if isinstance(value, LazyTensor) and not isinstance(value, StateTensor):
                value.check_follows(f"optimizer.state[parameter][{name!r}]")
        for piece, mine in changes:
            self._replace_one(piece, mine)
        for name, value in new.items():
            if isinstance(value, torch.Tensor):
                self._given.append(_Given(parameter, name, value))

    def _check(
        self, parameter: torch.Tensor, wanted: Any
    ) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        """The entry of each piece of `parameter` that `replace` would write."""
        pieces = self._pieces(parameter)
        if not isinstance(wanted, Mapping):
            raise ConfigError(
                f"{self._owner}: an entry of optimizer.state of a wrapped model is set to "
                f"{in_words(wanted)}; give a dict of states"
            )
        parts = [dict(wanted)]
        if isinstance(parameter, TiledWeight):
            parts = _divided(parameter, wanted)
        return [
            (piece, self._keeper.check(piece, mine))
            for piece, mine in zip(pieces, parts, strict=True)
        ]

    def _replace_one(self, parameter: torch.Tensor, wanted: dict[str, Any]) -> None:
        entry = self._entry(parameter)
        changed = {n: v for n, v in wanted.items() if dict.get(entry, n, MISSING) is not v}
        for name, value in changed.items():
            if isinstance(value, StateTensor):
                changed[name] = value.fetch()
        gone = [name for name in entry if name not in wanted]
        for name in [*gone, *(name for name in changed if name in entry)]:
            entry.drop(name)
        self._given = [g for g in self._given if not g.is_of(parameter) or g.name in entry]
        if not wanted:
            self._keeper.restart([parameter])
            return
        self._keeper.write(parameter, wanted | changed, changed)
        entry.fill(self._keeper.content(parameter))

    def _remove(self, parameters: Iterable[torch.Tensor]) -> None:
        going = [parameter for parameter in parameters if dict.__contains__(self, parameter)]
        held = [parameter for parameter in going if dict.__getitem__(self, parameter)]
        for parameter in held:
            self._keeper.check(parameter, {})
        for parameter in held:
            entry = self._entry(parameter)
            for name in list(entry):
                entry.drop(name)
        if held:
            self._keeper.restart(held)
        self._given = [g for g in self._given if not any(map(g.is_of, going))]
        for parameter in going:
            dict.__delitem__(self, parameter)

    def replace_all(self, wanted: Any) -> None:
        """`optimizer.state = wanted`."""
        if wanted is self:
            return
        if not isinstance(wanted, Mapping):
            raise ConfigError(
                f"{self._owner}: optimizer.state of a wrapped model is set to {in_words(wanted)}; "
                "give a dict of entries, or an empty one to begin anew"
            )
        kept = {id(piece) for parameter in wanted for piece in self._pieces(parameter)}
        gone = [parameter for parameter in self if id(parameter) not in kept]
        for parameter, entry in wanted.items():
            self._check(parameter, entry)
        self._remove(gone)
        for parameter, entry in wanted.items():
            self.replace(parameter, entry)

    def __missing__(self, parameter: Any) -> Any:
        if isinstance(parameter, TiledWeight):
            self._pieces(parameter)
            return JoinedStateEntry(self, parameter)
        self._pieces(parameter)
        made = StateEntry.of(self, parameter)
        dict.__setitem__(self, parameter, made)
        return made

    def __setitem__(self, parameter: Any, wanted: Any) -> None:
        if dict.get(self, parameter, MISSING) is not wanted:
            self.replace(parameter, wanted)

    def __delitem__(self, parameter: Any) -> None:
        if parameter not in self:
            raise KeyError(parameter)
        self._remove(self._pieces(parameter))

    def __contains__(self, parameter: object) -> bool:
        if isinstance(parameter, TiledWeight):
            return all(dict.__contains__(self, piece) for piece in parameter.pieces)
        return dict.__contains__(self, parameter)

    def get(self, parameter: Any, default: Any = None) -> Any:
        """As of a dict."""
        return self[parameter] if parameter in self else default  # noqa: SIM401 (calls this)

    def pop(self, parameter: Any, *default: Any) -> Any:
        """As of a dict. Its tensors keep the current values."""
        if parameter not in self:
            return dict.pop(self, parameter, *default)
        found = dict(self[parameter])
        del self[parameter]
        return found

    def clear(self) -> None:
        """Restart all states."""
        self._remove(list(self))

    def update(self, *given: Any, **named: Any) -> None:
        """As of a dict."""
        for parameter, entry in dict(*given, **named).items():
            self[parameter] = entry

    def copy(self) -> Any:
        """A plain dict with the same entries."""
        return defaultdict(dict, self)

    def _entry(self, parameter: torch.Tensor) -> StateEntry:
        found = self[parameter]
        if not isinstance(found, StateEntry):
            raise TypeError("an entry of optimizer.state is none")
        return found

    def _pieces(self, parameter: Any) -> list[torch.Tensor]:
        """`parameter`, or the tiles of a weight in tiles; raises `ConfigError` for any other
        key."""
        pieces = parameter.pieces if isinstance(parameter, TiledWeight) else [parameter]
        for piece in pieces:
            if id(piece) not in self._known:
                raise ConfigError(
                    f"{self._owner}: optimizer.state of a wrapped model has entries of the "
                    f"parameters of this optimizer alone, not of {in_words(parameter)}; keep "
                    "other values in a dict of your own"
                )
        return pieces


class _Given:
    """See [Note: a tensor that was put into an entry]."""

    def __init__(self, parameter: torch.Tensor, name: str, tensor: torch.Tensor) -> None:
        self.parameter, self.name = parameter, name
        self.tensor: Callable[[], torch.Tensor | None] = weakref.ref(tensor)
        # The memory of a state may outlive the tensor.
        self._kept = tensor if isinstance(tensor, StateTensor) else None
        self._version = _version(tensor)
        self._stepped = False

    def is_of(self, parameter: torch.Tensor) -> bool:
        """Whether it was put into the entry of `parameter`, or of its weight in tiles."""
        whole = self.parameter
        pieces = whole.pieces if isinstance(whole, TiledWeight) else [whole]
        return any(piece is parameter for piece in pieces)

    def settle(self, entry: Mapping[str, Any]) -> None:
        """Set the state to the values of the tensor; raises `ShardedParameterError` if torch would
        have other values."""
        tensor, state = self.tensor(), entry.get(self.name)
        self._kept = None
        if tensor is None or not isinstance(state, StateTensor):
            return
        shared = isinstance(tensor, StateTensor) and tensor.is_current
        changed = _version(tensor) != self._version
        if shared or (changed and self._stepped):
            what = (
                "is the state of two parameters"
                if shared
                else "was changed in place after a step, which has updated the state"
            )
            raise ShardedParameterError(
                f"a tensor that was put into {state.slot.name} of a wrapped model {what}; put a "
                "copy there (.clone()), and change the tensor in optimizer.state"
            )
        if changed:
            state.replace(tensor)
            self._version = _version(tensor)
        self._stepped = True


def _is_same(one: Any, other: Any) -> bool:
    """Whether both are the same state. Tensors of a weight in tiles are made at each read."""
    slots = [value.slot for value in (one, other) if isinstance(value, StateTensor)]
    joined = [slot.tensors for slot in slots if isinstance(slot, JoinedSlot)]
    return one is other or (len(joined) > 1 and all(map(operator.is_, *joined)))


def _version(tensor: torch.Tensor) -> int:
    if isinstance(tensor, StateTensor):
        return tensor.content.changes
    return 0 if tensor.is_inference() else tensor._version


def _divided(weight: TiledWeight, wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The entry of each tile for an entry of the whole. Tensors of the tiles are kept."""
    parts: list[dict[str, Any]] = [{} for _ in weight.pieces]
    for name, value in wanted.items():
        mine: list[Any] = [value] * len(parts)
        slot = value.slot if isinstance(value, StateTensor) and value.is_current else None
        if isinstance(slot, JoinedSlot) and slot.weight.pieces[0] is weight.pieces[0]:
            mine = slot.tensors
        elif isinstance(value, torch.Tensor) and value.dim():
            if tuple(value.shape) != tuple(weight.shape):
                raise ConfigError(
                    f"an entry of optimizer.state of a weight in tiles of a wrapped model gets "
                    f"{name!r} of shape {tuple(value.shape)}; the weight has {tuple(weight.shape)}"
                )
            mine = weight.divided(value.detach())
        for part, each in zip(parts, mine, strict=True):
            part[name] = each
    return parts
