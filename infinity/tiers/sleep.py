"""A store gives its memory back between steps, and takes it again.

[Note: memory of a store that sleeps]
Another engine on the same device needs the memory, such as vLLM for rollouts. So the store writes
the content of its memory to a file without a name, and gives the memory back. The memory contains
homes and the cache of blocks on NVMe. Copies on the compute device are evicted: their content is at
home. Blocks on NVMe stay where they are.

Every tensor of the store stays. On the host the pages go and the addresses stay (`madvise`). The
I/O engines forget the memory first, because the kernel would otherwise continue to use the pages
that were there. CUDA unpins it first, for the same reason. On a GPU the storage of the compute
arena becomes empty, and gets other memory from `end`. Its address may change. All leases are views
of this storage, so they follow. Windows of parameters compare addresses before each use
(`sharding/views`).

[Note: what may fail]
`save` writes the whole file, and changes nothing. `begin` cannot fail then. If `end` fails, the
memory is given back again, the file stays, and `end` may be called again. Several ranks agree
between `save` and `begin`, because they must evict alike.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import torch

from infinity import nvme
from infinity.device import ComputeDevice, huge_pages
from infinity.directories.directory import file_limit, limit_text
from infinity.errors import FileError
from infinity.quantities import format_bytes
from infinity.tiers.arena import Arenas
from infinity.tiers.block import Block
from infinity.tiers.drives import NvmeTier
from infinity.tiers.latch import Latch
from infinity.tiers.resident import Residency

BOUNCE_BYTES = 64 << 20
"""The most bytes that pass host memory at once on their way between a GPU and the file."""


class Sleep:
    """Gives back the memory of one store, and takes it again. For the thread that runs the model,
    and for the thread that closes the store."""

    def __init__(
        self,
        arenas: Arenas,
        blocks: Sequence[Block],
        device: ComputeDevice,
        drives: NvmeTier,
        resident: Residency,
        latch: Latch,
    ) -> None:
        """`arenas` have the homes of `blocks`."""
        self._arenas, self._blocks = arenas, blocks
        self._device, self._drives = device, drives
        self._resident, self._latch = resident, latch
        self._file: IO[bytes] | None = None
        self._where = ""  # the directory of the file
        self.nbytes = 0
        """Bytes of the file, while the store sleeps."""

    def save(self, directory: Path | None) -> int:
        """Before `begin`: write the memory to an unnamed file in `directory` (None: that of
        `tempfile`). Returns its bytes. `close` undoes it.

        No block is in use, and no update is under way. Raises `FileError`, which names the
        directory, if it cannot have the file.
        """
        for block in self._blocks:  # a gather may fill a home that ranks have whole
            self._resident.await_idle(block)
        self._device.await_stream()
        self._device.await_copies()
        homes = self._homes()
        nbytes = sum(home.numel() for home in homes)
        with ExitStack() as undo:
            where = str(directory or tempfile.gettempdir())
            try:
                file = undo.enter_context(tempfile.TemporaryFile(dir=where))
                if nbytes:
                    os.posix_fallocate(file.fileno(), 0, nbytes)
                self._write(file, homes)
            except OSError as error:
                raise _refused(error, where, nbytes, elsewhere=directory is None) from error
            undo.pop_all()
        self._file, self._where, self.nbytes = file, where, nbytes
        return nbytes

    def begin(self) -> None:
        """After `save`: give the memory back."""
        self._resident.empty()
        self._latch.asleep = True
        self._release()

    def end(self) -> None:
        """Take the memory again, with its content. Does nothing while the store is awake.

        Raises `BudgetError` if the device or the host has no room, and `FileError` if the file
        cannot be read. Then the store sleeps still, and `end` may be called again.
        """
        file = self._file
        if file is None or not self._latch.asleep:
            return
        try:
            self._device.restore(self._arenas.gpu.memory)
            self._arenas.poison()
            self._drives.register_again()
            self._read(file, self._homes())
        except BaseException as error:
            self._release()
            if not isinstance(error, OSError):
                raise
            text = (
                f"the memory of the engine is not read back ({error.strerror}); the engine sleeps "
                "still: call engine.wake() again, or close it"
            )
            raise FileError(error.errno or 0, self._where, text) from error
        self._latch.asleep = False
        self.close()

    def close(self) -> None:
        """Free the space of the file."""
        if self._file is not None:
            self._file.close()
        self._file, self.nbytes = None, 0

    def _release(self) -> None:
        self._drives.forget_memory()
        self._device.release(self._arenas.gpu.memory)

    # The content

    def _homes(self) -> list[torch.Tensor]:
        """The memory with content: homes and cache on the host, and homes on the compute device.
        The number of bytes of each is a multiple of 4096."""
        on_device = [
            buffer.tensor
            for block in self._blocks
            if block.tier.is_device
            for buffer in block.home.buffers
        ]
        return [home for home in (self._arenas.cpu.memory, *on_device) if home.numel()]

    def _write(self, file: IO[bytes], homes: Sequence[torch.Tensor]) -> None:
        here, there = self._placed(file, homes)
        nvme.write_many(here)
        for home, path, at in there:
            for part, bounce, begin in self._bounced(home):
                self._device.download(bounce, part)
                nvme.write(bounce, path, at + begin)

    def _read(self, file: IO[bytes], homes: Sequence[torch.Tensor]) -> None:
        here, there = self._placed(file, homes)
        nvme.read_many(here)
        for home, path, at in there:
            for part, bounce, begin in self._bounced(home):
                nvme.read(bounce, path, at + begin)
                self._device.upload(part, bounce)

    def _placed(
        self, file: IO[bytes], homes: Sequence[torch.Tensor]
    ) -> tuple[list[tuple[torch.Tensor, str, int]], list[tuple[torch.Tensor, str, int]]]:
        """The homes with the path and their places in it: those that the drive can reach, and
        those on a GPU."""
        path, end = f"/proc/self/fd/{file.fileno()}", 0
        here: list[tuple[torch.Tensor, str, int]] = []
        there: list[tuple[torch.Tensor, str, int]] = []
        gpu = None if self._device.unified_memory else self._arenas.gpu.memory
        for home in homes:
            is_there = gpu is not None and _is_in(home, gpu)
            (there if is_there else here).append((home, path, end))
            end += home.numel()
        return here, there

    def _bounced(self, home: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """The parts of `home`, each with host memory of its size, and its first byte."""
        room = self._arenas.staging.memory[:BOUNCE_BYTES]
        if not room.numel():
            room = huge_pages(min(home.numel(), BOUNCE_BYTES))
        begin = 0
        for part in home.split(room.numel()):
            yield part, room[: part.numel()], begin
            begin += part.numel()


def _is_in(part: torch.Tensor, whole: torch.Tensor) -> bool:
    return bool(part.untyped_storage()._cdata == whole.untyped_storage()._cdata)


def _refused(error: OSError, where: str, nbytes: int, elsewhere: bool) -> FileError:
    """The error of `save`."""
    most = file_limit() if error.errno == errno.EFBIG else None
    way_out = "free some of its space" if most is None else limit_text(most)
    if elsewhere and most is None:
        way_out += ", or set TMPDIR to another directory"
    text = (
        f"takes no file of {format_bytes(nbytes)} for the memory of an engine that sleeps "
        f"({error.strerror}); {way_out}"
    )
    return FileError(error.errno or 0, where, text)
