"""Spreads one address space over files whose drives differ in speed and room: arithmetic only.
Imports no torch.

[Note: a share is a place in a short pattern]
Stripes go round the files in a repeating pattern of at most 32. A file occurs in it as often as its
share says, spread evenly. So a block of a few stripes already keeps every drive busy for about as
long. A full file drops out, and the others continue in the pattern of their shares. That is as fast
as using the small drive less from the start: either way the others work all the time and hold the
same bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

LONGEST_PATTERN = 32
NEAR_ENOUGH = 1.05
"""A pattern is accepted if its slowest drive takes at most this multiple of its time with exact
shares."""
# Of the largest. Each file occurs at least once, so a smaller share makes no difference.
_LEAST_SHARE = 1e-3
_NO_LIMIT = 1 << 62


class FileRange(NamedTuple):
    """`nbytes` bytes of one file, from `offset` on."""

    file: int
    offset: int
    nbytes: int


class Stripes:
    """The place of every byte of an address space in several files: a bijection onto [0, length) of
    each of them.

    `shares`: the part of each file, as positive numbers of any scale. `rooms`: how many stripes
    each file can hold (default: any number). If a room is 0, its share is ignored.
    """

    def __init__(
        self, stripe_bytes: int, shares: Sequence[float], rooms: Sequence[int] | None = None
    ) -> None:
        self._bytes, self._files = stripe_bytes, len(shares)
        self._runs: list[_StripeRun] = []
        self._firsts: list[int] = []
        rooms = [_NO_LIMIT] * len(shares) if rooms is None else rooms
        first, held = 0, [0] * len(shares)
        while going := [file for file, room in enumerate(rooms) if held[file] < room]:
            pattern = tuple(going[at] for at in pattern_of([shares[file] for file in going]))
            run = _StripeRun(pattern, held)
            self._runs.append(run)
            self._firsts.append(first)
            length = min(run.stripes_until(file, rooms[file]) for file in going)
            first, held = first + length, run.held(length)

    def lengths_of(self, nbytes: int) -> list[int]:
        """Bytes of each file when the first `nbytes` bytes are in use: whole stripes."""
        return self.lengths(-(-nbytes // self._bytes))

    def lengths(self, stripes: int) -> list[int]:
        """Bytes of each file when the first `stripes` stripes are in use."""
        run, at = self._find(stripes)
        return [count * self._bytes for count in run.held(at)]

    def pieces(self, position: int, nbytes: int) -> Iterator[FileRange]:
        """The pieces of bytes [position, position + nbytes), in order. Adjacent bytes of one file
        are in one piece."""
        if self._files == 1 and nbytes > 0:
            yield FileRange(0, position, nbytes)
            return
        pending = FileRange(-1, 0, 0)
        while nbytes > 0:
            stripe, within = divmod(position, self._bytes)
            run, at = self._find(stripe)
            file, number = run.place(at)
            piece = FileRange(
                file, number * self._bytes + within, min(nbytes, self._bytes - within)
            )
            position, nbytes = position + piece.nbytes, nbytes - piece.nbytes
            if (piece.file, piece.offset) == (pending.file, pending.offset + pending.nbytes):
                piece = FileRange(file, pending.offset, pending.nbytes + piece.nbytes)
            elif pending.nbytes:
                yield pending
            pending = piece
        if pending.nbytes:
            yield pending

    def _find(self, stripe: int) -> tuple[_StripeRun, int]:
        """The run that `stripe` is in, and how many stripes of the run are before it."""
        number = bisect_right(self._firsts, stripe) - 1
        return self._runs[number], stripe - self._firsts[number]


class _StripeRun:
    """Stripes that follow one pattern; `before`: how many each file holds already."""

    def __init__(self, pattern: tuple[int, ...], before: Sequence[int]) -> None:
        self._pattern, self._before = pattern, before
        self._counts = [pattern.count(file) for file in range(len(before))]

    def held(self, stripes: int) -> list[int]:
        """How many stripes each file holds when `stripes` of this run are in use."""
        cycles, rest = divmod(stripes, len(self._pattern))
        per_cycle = zip(self._before, self._counts, strict=True)
        return [
            b + cycles * c + self._pattern[:rest].count(file)
            for file, (b, c) in enumerate(per_cycle)
        ]

    def place(self, at: int) -> tuple[int, int]:
        """The file of stripe `at` of this run, and which of that file's stripes it is."""
        cycle, rest = divmod(at, len(self._pattern))
        file = self._pattern[rest]
        return file, self._before[file] + cycle * self._counts[file] + self._pattern[:rest].count(
            file
        )

    def stripes_until(self, file: int, room: int) -> int:
        """How many stripes of this run come before the first one that `file`, with room for `room`
        in all, cannot hold."""
        cycles, rest = divmod(room - self._before[file], self._counts[file])
        return (
            cycles * len(self._pattern)
            + [at for at, one in enumerate(self._pattern) if one == file][rest]
        )


def pattern_of(shares: Sequence[float]) -> list[int]:
    """The order in which files take a stripe each. Every file occurs at least once, and in
    proportion to its share."""
    counts = _counts(shares)
    credits = [0] * len(shares)
    order = []
    # Smooth weighted round robin: each file earns its count, and the richest pays for all.
    for _ in range(sum(counts)):
        credits = [credit + count for credit, count in zip(credits, counts, strict=True)]
        chosen = credits.index(max(credits))
        credits[chosen] -= sum(counts)
        order.append(chosen)
    return order


def _counts(shares: Sequence[float]) -> list[int]:
    """How often each file occurs in the shortest pattern that is near enough, else in the nearest
    one."""
    largest = max(shares)
    shares = [max(share / largest, _LEAST_SHARE) for share in shares]

    def slowness(counts: Sequence[int]) -> float:
        """Time of the slowest drive, as a multiple of the time with exact shares."""
        return (
            max(count / share for count, share in zip(counts, shares, strict=True))
            * sum(shares)
            / sum(counts)
        )

    counts = best = [1] * len(shares)
    while slowness(best) > NEAR_ENOUGH and sum(counts) < LONGEST_PATTERN:
        soonest = min(range(len(shares)), key=lambda file: (counts[file] + 1) / shares[file])
        counts = [count + (file == soonest) for file, count in enumerate(counts)]
        best = min(best, counts, key=slowness)
    return best
