"""The states files of one rank as one address space: the only code that writes to them, or changes
how long they are.

[Note: what may be written]
A committed byte must stay as it is until a later commit no longer needs it, whatever code asks for
a write. So the files are private to `StatesFiles`, and every write passes `Claims`. A write raises
before any byte moves unless its bytes were given to a block (or to something that autograd saved),
and no commit needs them. Three rules:

1. Of files that are taken over, all bytes of the earlier run are kept from the moment at which they
   are opened. Nothing of the new run lies there yet.
2. From the restore on, and from commit to commit, the kept bytes are the extents that commits speak
   of (`Store` says which). Between a record and its commit these are the extents of both.
3. No file gets shorter than its kept bytes need.

Everything else that writes to a drive, such as measuring it, has files of its own
(`Directory.unnamed`).
"""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from infinity.observe import Meter
from infinity.tiers.originals import FileExtent
from infinity.tiers.stripes import Stripes


class Extent(NamedTuple):
    """`nbytes` bytes at `start` of the striped address space; both multiples of 4096."""

    start: int
    nbytes: int


class ExtentTransfer(NamedTuple):
    """Bytes [begin, begin + nbytes) of `extent`, to or from memory at `address`. The caller keeps
    the memory until the transfer ends."""

    extent: Extent | FileExtent
    begin: int
    nbytes: int
    address: int
    name: str
    """The label in spans and errors."""
    meter: Meter | None = None
    """Counts the bytes."""
    background: bool = False
    """Whether no thread waits for it. Other transfers then go first."""


class Claims:
    """Which bytes of the address space may be written now. Any thread may ask."""

    def __init__(self) -> None:
        self.given = 0
        """Bytes that were given out, from 0 on."""
        self._kept: tuple[Sequence[int], Sequence[int]] = (), ()  # starts and ends, in order

    def give(self, nbytes: int) -> Extent:
        """The next `nbytes`. The caller may write them while no commit includes them."""
        extent = Extent(self.given, nbytes)
        self.given += nbytes
        return extent

    def keep(self, extents: Iterable[Extent]) -> None:
        """From now on no byte of `extents` is written. Bytes that were kept before may be."""
        ordered = sorted(extent for extent in extents if extent.nbytes)
        self._kept = (
            [extent.start for extent in ordered],
            [extent.start + extent.nbytes for extent in ordered],
        )

    @property
    def kept_end(self) -> int:
        """The end of the last kept byte."""
        _, ends = self._kept
        return ends[-1] if ends else 0

    def check(self, start: int, nbytes: int, name: str) -> None:
        """Raise `RuntimeError`, which names `name`, unless bytes [start, start + nbytes) may be
        written."""
        starts, ends = self._kept
        at = bisect_right(starts, start + nbytes - 1) - 1
        if start < 0 or start + nbytes > self.given or (at >= 0 and ends[at] > start):
            is_given = 0 <= start <= start + nbytes <= self.given
            reason = "committed states" if is_given else f"more than the {self.given} given out"
            raise RuntimeError(
                f"{name} may not be written to bytes {start}..{start + nbytes} of the states, "
                f"which are {reason}; nothing was written"
            )


class StatesFiles:
    """The states files of all directories, each behind its native I/O engine.

    First `add` every file. Then `lay` stripes the address space over them. `read` and `write` may
    be called by any thread.
    """

    def __init__(self, stripes: Stripes) -> None:
        self._files: list[Any] = []
        self._stripes = stripes
        self.engines: list[Any] = []
        """The native I/O engines, one per file."""
        self.claims = Claims()
        """The bytes that may be written."""

    def __len__(self) -> int:
        return len(self._files)

    def add(self, file: Any, engine: Any) -> None:
        """Add a native file, which no other code uses from now on, and its engine."""
        self._files.append(file)
        self.engines.append(engine)

    def lay(self, stripes: Stripes) -> None:
        """Stripe the address space. Raises `RuntimeError` if kept bytes would lie elsewhere."""
        kept = self.claims.kept_end
        if stripes.lengths_of(kept) != self._stripes.lengths_of(kept):
            raise RuntimeError("committed states would lie elsewhere in the files")
        self._stripes = stripes

    def take_over(self, stripes: Stripes, nbytes: int) -> None:
        """Keep all `nbytes` bytes of an earlier run, which are striped as `stripes`."""
        self._stripes = stripes
        self.claims.keep([Extent(0, nbytes)])

    # Lengths

    def sizes(self) -> list[int]:
        """Bytes of each file."""
        return [int(file.size()) for file in self._files]

    def path(self, number: int) -> str:
        """The path of file `number`."""
        return str(self._files[number].path)

    def extend(self, number: int, nbytes: int) -> bool:
        """Take the space for `nbytes` of a file. False without room; the file is then as
        before."""
        return extend(self._files[number], nbytes)

    def fill(self, number: int, nbytes: int, unit: int) -> int:
        """Take as many units as there is room for; see `fill`."""
        return fill(self._files[number], nbytes, unit)

    def shorten(self, lengths: Sequence[int]) -> None:
        """Cut longer files to these lengths. Raises `RuntimeError`, and cuts none, if kept bytes
        would be lost."""
        least = self._stripes.lengths_of(self.claims.kept_end)
        for number, (length, needed) in enumerate(zip(lengths, least, strict=True)):
            if length < needed:
                raise RuntimeError(
                    f"{self.path(number)} may not be cut to {length} bytes: committed states take "
                    f"{needed}; nothing was cut"
                )
        for file, length in zip(self._files, lengths, strict=True):
            if file.size() > length:
                file.truncate(length)

    # Bytes

    def read(self, start: int, transfer: ExtentTransfer, engines: Sequence[Any]) -> list[Any]:
        """Requests that read the bytes of `transfer`, which begin at `start`."""
        return self._submit("read", start, transfer, engines)

    def write(self, start: int, transfer: ExtentTransfer) -> list[Any]:
        """Requests that write the bytes of `transfer`, which begin at `start`. Raises
        `RuntimeError`, and writes nothing, if the bytes may not be written."""
        self.claims.check(start, transfer.nbytes, transfer.name)
        return self._submit("write", start, transfer, self.engines)

    def _submit(
        self, operation: str, start: int, transfer: ExtentTransfer, engines: Sequence[Any]
    ) -> list[Any]:
        requests, address = [], transfer.address
        background, name = transfer.background, transfer.name
        for number, offset, length in self._stripes.pieces(start, transfer.nbytes):
            submit = getattr(engines[number], operation)
            requests.append(
                submit(self._files[number], offset, address, length, background, what=name)
            )
            address += length
        return requests

    def where(self, position: int) -> tuple[str, int]:
        """The path, and the offset in that file, of byte `position`."""
        number, offset, _ = next(iter(self._stripes.pieces(position, 1)))
        return self.path(number), offset

    def direct_engine(self, number: int, cufile: Any, **options: Any) -> Any:
        """An engine of `cufile` that reads file `number` and never writes."""
        return cufile.engine(self._files[number], **options)

    def sync(self, number: int) -> None:
        """Return when the bytes written to file `number` would survive a power cut."""
        self._files[number].sync()


def extend(file: Any, nbytes: int) -> bool:
    """Take the space for `nbytes` of a native file. False without room; the file is then as
    before."""
    had = file.size()
    try:
        file.allocate(nbytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        file.truncate(had)  # a part may have been taken
        return False
    return True


def fill(file: Any, nbytes: int, unit: int) -> int:
    """Take as many units of `unit` bytes as there is room for, if there is no room for `nbytes`.
    Returns how many units the file holds then."""
    fits, too_many = file.size() // unit, nbytes // unit
    # The free bytes of statvfs are too many: quotas and the file system's own data need room.
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if extend(file, middle * unit):
            fits = middle
        else:
            too_many = middle
    return int(fits)
