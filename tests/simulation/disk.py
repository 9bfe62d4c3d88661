"""Files and folders in memory, and what a kill or a power cut leaves of them.

[Note: what a power cut leaves]
What was flushed stays. Every change since the last flush has a fate of its own: it is lost, kept,
or, where it is a write, torn at sectors of 512 or 4096 bytes. Those that are kept arrive in any
order, and the length of a file is a change like any other. A name is lost, or points to the file
before, until its folder is flushed. A kill alone loses nothing but what was under way. Yet what was
not flushed still is not: the next process reads it, and a power cut may take it from that.

[Note: a flush that fails]
The system takes what it could not write for written, as Linux does: all read it as before, no later
flush brings it to the drive, and a power cut takes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from simulation.chance import Chance

_numbers = itertools.count(1)


class Change(NamedTuple):
    """A change of a file: bytes from `offset` on, or with `size` its length. `key` names it."""

    key: Hashable
    offset: int = 0
    data: bytes = b""
    size: int | None = None


class Plain:
    """A plain file: what it has now, what of it is flushed, and the changes in between."""

    def __init__(self, content: bytes = b"") -> None:
        self.number = next(_numbers)
        self.now = bytearray(content)
        self._flushed = bytearray(content)
        self._changes: list[Change] = []

    def change(self, change: Change) -> None:
        """Seen by all readers from now on. Its length grows apart from its bytes: what is lost of
        these is zeros."""
        end = change.offset + len(change.data)
        if change.size is None and end > len(self.now):
            self._changes.append(Change(("length", change.key), size=end))
        self._changes.append(change)
        _apply(self.now, change)

    def changes(self) -> Sequence[Change]:
        """Those since the last flush."""
        return tuple(self._changes)

    def flush(self, changes: Sequence[Change]) -> None:
        """These, the first ones, survive a power cut."""
        for change in changes:
            _apply(self._flushed, change)
        del self._changes[: len(changes)]

    def drop(self) -> None:
        """A flush failed: no later one brings these changes."""
        self._changes = []

    def arrive(self, under_way: Sequence[Change], chance: Chance) -> None:
        """The process was killed: some of what it was writing arrives later."""
        for change in under_way:
            for part in _kept(change, 512, False, chance):
                self.change(part)

    def left(self, chance: Chance) -> Plain:
        """The file after a power cut."""
        content, changes = bytearray(self._flushed), self._changes
        fate = chance.one(("lose", "keep", "mix", "mix", "mix", "mix"), "fate", *_keys(changes))
        sector = chance.one((512, 4096), "sector")
        if fate != "lose":
            # Lengths last: what is torn off must not come back with a longer one.
            for change in sorted(changes, key=lambda each: _order(each, chance)):
                for part in _kept(change, sector, fate == "keep", chance):
                    _apply(content, part)
        return Plain(bytes(content))

    def rot(self, chance: Chance) -> None:
        """One bit that was flushed is another one from now on."""
        at, bit = chance.below(len(self.now), "byte"), chance.below(8, "bit")
        self.now[at] ^= 1 << bit
        if at < len(self._flushed):
            self._flushed[at] ^= 1 << bit


def _keys(changes: Sequence[Change]) -> list[str]:
    return sorted(repr(change.key) for change in changes)


def _order(change: Change, chance: Chance) -> tuple[bool, float]:
    return change.size is not None, chance.of("order", change.key)


def _kept(change: Change, sector: int, whole: bool, chance: Chance) -> Iterator[Change]:
    """What of a change arrives."""
    fate = 0.0 if whole else chance.of("fate", change.key)
    if fate < 0.3 or (change.size is not None and fate < 0.7):
        yield change
    elif fate < 0.8 and change.size is None:
        yield from _torn(change, sector, chance)


def _torn(change: Change, sector: int, chance: Chance) -> Iterator[Change]:
    """Every sector for itself, or the first ones."""
    end = change.offset + len(change.data)
    begins = [change.offset, *range((change.offset // sector + 1) * sector, end, sector)]
    first = chance.below(2 * len(begins), "first", change.key)
    for number, begin in enumerate(begins):
        until = begins[number + 1] if number + 1 < len(begins) else end
        scattered = first >= len(begins)
        if chance.of("sector", change.key, number) < 0.5 if scattered else number < first:
            data = change.data[begin - change.offset : until - change.offset]
            yield change._replace(offset=begin, data=data)


def _apply(content: bytearray, change: Change) -> None:
    if change.size is not None:
        del content[change.size :]
        content.extend(bytes(change.size - len(content)))
        return
    end = change.offset + len(change.data)
    content.extend(bytes(max(end - len(content), 0)))
    content[change.offset : end] = change.data


class Naming(NamedTuple):
    """Names that change together; None is for one that is gone."""

    key: Hashable
    names: tuple[tuple[str, Plain | Folder | None], ...]


@dataclass(eq=False)
class Folder:
    """Names: those that are there now, those that are flushed, and the changes in between."""

    names: dict[str, Plain | Folder] = field(default_factory=dict)
    number: int = field(default_factory=lambda: next(_numbers))

    def __post_init__(self) -> None:
        self._flushed = dict(self.names)
        self._changes: list[Naming] = []

    def change(self, naming: Naming) -> None:
        """Seen by all from now on."""
        self._changes.append(naming)
        _name(self.names, naming)

    def flush(self) -> None:
        """All names survive a power cut."""
        self._flushed, self._changes = dict(self.names), []

    def left(self, chance: Chance) -> Folder:
        """The folder with its files after a power cut."""
        names = dict(self._flushed)
        # Most file systems have a journal, which ends somewhere; others promise nothing.
        count = len(self._changes)
        journal = chance.below(2 * count + 1, "journal")
        for number, naming in enumerate(self._changes):
            kept = number < journal if journal <= count else chance.of("name", naming.key) < 0.5
            if kept:
                _name(names, naming)
        return Folder({name: node.left(chance.child(name)) for name, node in names.items()})


def _name(names: dict[str, Plain | Folder], naming: Naming) -> None:
    for name, node in naming.names:
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node
