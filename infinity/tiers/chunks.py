"""Where an element of a block lies: pure arithmetic of chunks, in elements and bytes. Imports no
torch.

An update takes a chunk of every block of a unit at once, so all blocks of a unit have the same
chunks. Only a frozen block of wider elements, which is alone in its unit, has shorter chunks: a
staging slot fits `most` elements of `WIDEST_ELEMENT` bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from infinity.placement.budget import WIDEST_ELEMENT
from infinity.placement.spec import Placed


class Chunks:
    """Cuts blocks into chunks of at most `most` elements. No chunk extends across a cut of its
    unit.

    `cuts` maps the number of a unit to elements. Any thread may call it. Results are cached until
    `forget`.
    """

    def __init__(self, most: int, cuts: Mapping[int, Collection[int]]) -> None:
        self._most = most
        self._cuts = cuts
        self._starts: dict[Placed, list[int]] = {}

    def starts(self, block: Placed) -> Sequence[int]:
        """The first element of every chunk of `block`."""
        if block not in self._starts:
            starts = [0]
            while (end := self.end(block, starts[-1])) < block.spec.elements:
                starts.append(end)
            self._starts[block] = starts
        return self._starts[block]

    def end(self, block: Placed, begin: int) -> int:
        """The end (exclusive) of the chunk of `block` that contains element `begin`.

        Example: 1000 elements, `most` = 400, a cut at 600. Chunks begin at 0, 400, 600 and 800.
        """
        most = self._most * WIDEST_ELEMENT // max(WIDEST_ELEMENT, block.spec.format.width)
        full = (begin // most + 1) * most
        cuts = self._cuts.get(block.spec.unit, ())
        return min(full, block.spec.elements, *(cut for cut in cuts if cut > begin))

    def bytes_of(self, block: Placed, begin: int) -> tuple[int, int]:
        """The first byte and the size in bytes of the chunk of `block` that begins at element
        `begin`."""
        at = block.spec.format.bytes_of(begin)
        return at, block.spec.format.bytes_of(self.end(block, begin) - begin)

    def runs(self, block: Placed, without: Collection[int]) -> list[tuple[int, int]]:
        """Runs of elements [begin, end) of `block`, except the chunks that begin at `without`.

        A run lies on one side of the border between host memory and NVMe
        (`Placed.cached_elements`).
        """
        runs: list[tuple[int, int]] = []
        for begin in self.starts(block):
            if begin not in without:
                joins = runs and runs[-1][1] == begin != block.cached_elements
                first = runs.pop()[0] if joins else begin
                runs.append((first, self.end(block, begin)))
        return runs

    def forget(self) -> None:
        """Clear the cache."""
        self._starts.clear()
