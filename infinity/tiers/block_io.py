"""Reads and writes of blocks on NVMe, and the checksums of the written bytes.

[Note: pieces]
A block has a CRC32C for every `CHUNK_ELEMENTS` elements (more where the format cannot cut there).
Chunks begin at these borders whatever the budgets are, so a later run with other budgets checks the
same pieces. With bf16 that is 4 bytes for every 32 KiB.

[Note: when they are checked]
With `Tuning(verify="always")`, every read is checked. All states that outlive the process are
checked when a later run adopts them: the record of a commit has their checksums. Every read of a
snapshot is checked, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from infinity import native
from infinity.errors import CorruptStateError
from infinity.nvme.ticket import Ticket
from infinity.observe import Meter
from infinity.placement.budget import CHUNK_ELEMENTS, WIDEST_ELEMENT
from infinity.placement.spec import Placed
from infinity.tiers.block import Block
from infinity.tiers.drives import NvmeTier
from infinity.tiers.originals import FileExtent
from infinity.tiers.states_files import Extent, ExtentTransfer

Sums = npt.NDArray[np.uint32]


def begin_of(block: Block, extent: Extent | FileExtent) -> int:
    """The first byte of `block` in `extent`. The extent ends where the block does."""
    return block.nbytes - extent.nbytes


def piece_bytes(placed: Placed) -> int:
    """Bytes of a piece, which has one checksum. The last piece of a block may be shorter."""
    form = placed.spec.format
    elements = CHUNK_ELEMENTS * WIDEST_ELEMENT // max(WIDEST_ELEMENT, form.width)
    return form.bytes_of(max(elements, form.elements))


def _number_of_pieces(placed: Placed) -> int:
    return -(-placed.spec.nbytes // piece_bytes(placed))


class BlockIo:
    """Moves bytes of blocks between memory and their extents. Any thread may call it. The caller
    keeps the memory until the transfer ends."""

    def __init__(self, drives: NvmeTier, meter: Meter, keeps: bool, verifies: bool) -> None:
        """`meter` counts transfers without a meter of their own. With `keeps`, checksums are kept.
        With `verifies`, they are kept and checked on every read."""
        self._drives = drives
        self._meter = meter
        self._keeps = keeps or verifies
        self._verifies = verifies
        self._sums: dict[Extent, Sums] = {}

    @property
    def direct(self) -> bool:
        """Whether drives write parameters straight into the memory of the compute device. Such
        reads cannot be checked, so it is False if every read is checked."""
        return bool(self._drives.direct) and not self._verifies

    def read(
        self,
        block: Block,
        at: int,
        nbytes: int,
        address: int,
        meter: Meter | None = None,
        direct: bool = False,
    ) -> Ticket:
        """Start reading bytes [at, at + nbytes) of the content of `block` to `address`. `wait`
        raises `CorruptStateError` if the bytes are checked and differ from the written bytes."""
        extent = block.home.extent
        begin = at - begin_of(block, extent)
        meter = meter or self._meter
        ticket = self._drives.read(
            ExtentTransfer(extent, begin, nbytes, address, block.name, meter), direct
        )
        if self._verifies:
            self._check(ticket, block, extent, at, nbytes, address)
        return ticket

    def read_version(
        self, block: Block, extent: Extent | FileExtent, at: int, nbytes: int, address: int
    ) -> Ticket:
        """Like `read`, from `extent`, which has all of `block`, in the background. An `Extent` is
        always checked; a `FileExtent` never is."""
        ticket = self._drives.read(
            ExtentTransfer(extent, at, nbytes, address, block.name, background=True)
        )
        self._check(ticket, block, extent, at, nbytes, address)
        return ticket

    def _check(
        self,
        ticket: Ticket,
        block: Block,
        extent: Extent | FileExtent,
        at: int,
        nbytes: int,
        address: int,
    ) -> None:
        """Let `ticket` compare the bytes it reads. The user's files have no checksums."""
        if isinstance(extent, Extent):
            sums = self.sums(block, extent)
            ticket.check = lambda: self.compare(block, extent, sums, at, nbytes, address)

    def write(
        self,
        block: Block,
        extent: Extent | FileExtent,
        at: int,
        content: torch.Tensor,
        meter: Meter | None = None,
        background: bool = False,
    ) -> Ticket:
        """Start writing `content` (uint8, contiguous) to `extent`, an extent of `block`, from byte
        `at` of the block on. Raises `RuntimeError` for a `FileExtent`."""
        nbytes, address = content.numel(), content.data_ptr()
        if self._keeps and isinstance(extent, Extent):
            self._of(self.sums(block, extent), block.placed, at, nbytes)[:] = _computed(
                block.placed, nbytes, address
            )
        begin = at - begin_of(block, extent)
        meter = meter or self._meter
        return self._drives.write(
            ExtentTransfer(extent, begin, nbytes, address, block.name, meter, background)
        )

    def sums(self, block: Block, extent: Extent | FileExtent) -> Sums:
        """The checksums (uint32) of `extent` of `block`, one for each piece. The caller fills them
        for an extent of an earlier run. Raises `RuntimeError` for a `FileExtent`."""
        if not isinstance(extent, Extent):
            raise RuntimeError(f"{block.name} is at home in files of the user")
        found = self._sums.get(extent)
        if found is None:  # two threads may do this at once
            none = np.zeros(_number_of_pieces(block.placed), np.uint32)
            found = self._sums.setdefault(extent, none)
        return found

    @contextmanager
    def verifying(self) -> Iterator[None]:
        """Inside, every read is checked. No other thread may read meanwhile."""
        before, self._verifies = self._verifies, True
        try:
            yield
        finally:
            self._verifies = before

    def _of(self, sums: Sums, placed: Placed, at: int, nbytes: int) -> Sums:
        """The checksums of bytes [at, at + nbytes) of a block, which are whole pieces."""
        piece = piece_bytes(placed)
        end = at + nbytes
        if at % piece or (end % piece and end != placed.spec.nbytes):
            raise RuntimeError(f"bytes {at}..{end} of {placed.spec.name} are no whole pieces")
        return sums[at // piece : -(-end // piece)]

    def compare(
        self, block: Block, extent: Extent, sums: Sums, at: int, nbytes: int, address: int
    ) -> None:
        """Raise `CorruptStateError` if memory at `address` does not match `sums`.

        The memory is bytes [at, at + nbytes) of `block`. `sums` are of the whole block.
        """
        wanted = self._of(sums, block.placed, at, nbytes)
        (wrong,) = np.nonzero(_computed(block.placed, nbytes, address) != wanted)
        if wrong.size:
            first = at + int(wrong[0]) * piece_bytes(block.placed)
            path, offset = self._drives.where(extent, first - begin_of(block, extent))
            raise CorruptStateError(block.name, block.kind.value, path, offset, int(wrong.size))


def _computed(placed: Placed, nbytes: int, address: int) -> Sums:
    piece = piece_bytes(placed)
    found = np.empty(-(-nbytes // piece), np.uint32)
    native.aio().crc32c_pieces(address, nbytes, piece, found)
    return found


def pack_sums(sums: Sequence[Sums]) -> bytes:
    """The checksums of blocks as little-endian uint32: how many blocks, how many checksums of
    each block, and the checksums."""
    lengths = np.array([len(sums), *map(len, sums)], "<u4")
    return b"".join([lengths.tobytes(), *(each.astype("<u4").tobytes() for each in sums)])


def unpack_sums(content: bytes) -> tuple[list[Sums], bytes]:
    """The checksums that `pack_sums` packed, and the bytes after them."""
    (count,) = np.frombuffer(content, "<u4", 1)
    lengths = np.frombuffer(content, "<u4", count, offset=4)
    values = np.frombuffer(content, "<u4", int(lengths.sum()), offset=4 + lengths.nbytes)
    end = 4 + lengths.nbytes + values.nbytes
    return np.split(values, np.cumsum(lengths)[:-1]) if count else [], content[end:]
