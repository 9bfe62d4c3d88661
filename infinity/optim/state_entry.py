"""`optimizer.state[parameter]`: a dict of the states of one parameter, or of a weight in tiles."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from infinity.optim.state_tensors import JoinedSlot, Slot, StateTensor
from infinity.sharding.tiles import TiledWeight

MISSING: Any = object()
"""Stands for a missing state."""


class Entries(Protocol):
    """All entries of an optimizer."""

    def __getitem__(self, parameter: torch.Tensor, /) -> dict[str, Any]:
        """The entry of `parameter`."""

    def replace(self, parameter: torch.Tensor, wanted: Any) -> None:
        """`wanted` becomes the entry of `parameter`."""


class Changed:
    """The methods of a dict that change it by its other methods, which check each change."""

    def __ior__(self: Any, other: Any) -> Any:
        self.update(other)
        return self

    def setdefault(self: Any, key: Any, value: Any = None) -> Any:
        """As of a dict."""
        if key not in self:
            self[key] = value
        return self[key]

    def popitem(self: Any) -> Any:
        """As of a dict."""
        key = next(reversed(self))
        return key, self.pop(key)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return dict, (dict(self),)


class StateEntry(Changed, dict[str, Any]):
    """`optimizer.state[parameter]`. One that was made of a mapping is a plain dict."""

    _of: Callable[[], Entries | None] = staticmethod(lambda: None)
    _parameter: torch.Tensor

    @classmethod
    def of(cls, view: Entries, parameter: torch.Tensor) -> StateEntry:
        """The empty entry of `parameter`."""
        made = cls()
        made._of, made._parameter = weakref.ref(view), parameter
        return made

    def fill(self, content: Mapping[str, Any]) -> None:
        """Set a tensor for each slot of `content`, and no others. Existing tensors stay."""
        for name in [name for name in self if name not in content]:
            self.drop(name)
        for name, value in content.items():
            if not isinstance(value, Slot):
                dict.__setitem__(self, name, value)
            elif not _is_of(dict.get(self, name), value):
                dict.__setitem__(self, name, StateTensor(value))

    def drop(self, name: str) -> None:
        """Remove a part, before its state is changed. A tensor that the user holds keeps its
        values."""
        value = dict.pop(self, name)
        if isinstance(value, StateTensor):
            value.slot.leave_copies()
            content, slot = weakref.ref(value.content), value.slot
            del value
            held = content()
            if held is not None and held.kept is None:
                held.kept = slot.fetch()

    def _change(self, wanted: Mapping[str, Any]) -> None:
        view = self._of()
        if view is None:
            dict.clear(self)
            dict.update(self, wanted)
        else:
            view.replace(self._parameter, wanted)

    def __setitem__(self, name: str, value: Any) -> None:
        if dict.get(self, name, MISSING) is not value:
            self._change({**self, name: value})

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        self._change({each: value for each, value in self.items() if each != name})

    def update(self, *given: Any, **named: Any) -> None:
        """As of a dict, all at once."""
        self._change({**self, **dict(*given, **named)})

    def pop(self, name: str, *default: Any) -> Any:
        """As of a dict. A tensor keeps the current values."""
        if name not in self:
            return dict.pop(self, name, *default)
        found = self[name]
        del self[name]
        return found

    def clear(self) -> None:
        """Restart the states of this parameter."""
        self._change({})

    def copy(self) -> dict[str, Any]:
        """A dict of the same tensors."""
        return dict(self)


class JoinedStateEntry(StateEntry):
    """The entry of a weight in tiles, with whole tensors."""

    def __init__(self, view: Entries, weight: TiledWeight) -> None:
        super().__init__()
        self._of, self._parameter = weakref.ref(view), weight
        entries = [view[piece] for piece in weight.pieces]
        for name, value in entries[0].items():
            parts: list[Any] = [entry.get(name) for entry in entries]
            tensors = [part for part in parts if isinstance(part, StateTensor)]
            if len(tensors) == len(parts) and all(
                not tensor.dim() or tensor.shape == piece.shape
                for tensor, piece in zip(tensors, weight.pieces, strict=True)
            ):
                dict.__setitem__(self, name, StateTensor(JoinedSlot(weight, tensors)))
            elif not tensors and all(part == value for part in parts):
                dict.__setitem__(self, name, value)

    def _change(self, wanted: Mapping[str, Any]) -> None:
        super()._change(wanted)
        view = self._of()
        if view is not None and isinstance(self._parameter, TiledWeight):
            dict.clear(self)
            dict.update(self, JoinedStateEntry(view, self._parameter))


def _is_of(tensor: Any, slot: Slot) -> bool:
    """Whether `tensor` of an entry can stay for `slot`."""
    return (
        isinstance(tensor, StateTensor)
        and tuple(tensor.shape) == slot.shape
        and tensor.dtype is slot.dtype
    )
