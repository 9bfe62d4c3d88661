"""Saves named tensors as one safetensors file, whole or not at all, and loads them without a
copy."""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from infinity.device import HUGE_PAGE, huge_pages
from infinity.directories.directory import Directory
from infinity.directories.drafts import drafting
from infinity.errors import ConfigError, FileError, WeightsError, naming
from infinity.nvme import safetensors
from infinity.nvme.open_files import Files, allocate
from infinity.nvme.requests import IoRequest, memory_of
from infinity.nvme.safetensors import BLOCK, Entry
from infinity.nvme.submit import Piece, Submitter, bytes_of
from infinity.quantities import round_up

HEADER_BYTES = 64 << 10  # of the first read of a file: most headers are shorter
FETCH_BYTES = 32 << 20
LOAD_GAP = 64 << 10  # a gap of at most so many bytes between two tensors is read, not skipped
DIRECT_BYTES = 256 << 10  # `save` writes so many bytes of whole blocks without staging


def save(
    io: Submitter,
    tensors: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """See `Io.save`."""
    io.check_open()
    addresses = {
        name: memory_of("write", tensor, f"save of tensor {name!r}")[0]
        for name, tensor in tensors.items()
    }
    head, entries = safetensors.pack(
        {name: (t.dtype, t.shape) for name, t in tensors.items()}, metadata
    )
    target = Path(os.path.realpath(os.fsdecode(path)))
    with _replacing(target) as name:
        size = entries[-1].end if entries else len(head)
        with Files(name=os.fsencode(target)) as files:
            file = files.get(name)
            allocate(file, size)
            edges: list[Piece] = [(0, torch.frombuffer(bytearray(head), dtype=torch.uint8))]
            with io.ticket() as ticket:
                for entry in entries:
                    tensor, address = tensors[entry.name], addresses[entry.name]
                    first = min(round_up(entry.begin, BLOCK), entry.end)
                    last = max(entry.end // BLOCK * BLOCK, first)
                    data = bytes_of(tensor)
                    if not tensor.is_cpu or last - first < DIRECT_BYTES:
                        edges.append((entry.begin, data))
                        continue
                    request = IoRequest(
                        tensor, address + first - entry.begin, last - first, name, first
                    )
                    io.move(ticket, "write", files, request)
                    edges.append((entry.begin, data[: first - entry.begin]))
                    edges.append((last, data[last - entry.begin :]))
                io.stage("write", files, name, edges)
            ticket.wait()
            with naming(target):
                file.sync()


def load(
    io: Submitter,
    path: str | os.PathLike[str],
    names: Iterable[str] | None = None,
    device: str | torch.device = "cpu",
) -> dict[str, torch.Tensor]:
    """See `Io.load`."""
    io.check_open()
    name, shown, where = os.fsencode(path), os.fsdecode(path), torch.device(device)
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"load of {shown}: device must be cpu or cuda, not {where}")
    with Files() as files:
        entries = _entries(io, files, name, shown)
        # Not 0 if the writer of the file did not align the data to 8 bytes.
        shift = entries[0].begin % 8 if entries else 0
        if names is not None:
            wanted, there = dict.fromkeys(names), {entry.name for entry in entries}
            missing = ", ".join(repr(name) for name in wanted if name not in there)
            if missing:
                raise WeightsError(f"{shown} has no tensor {missing}; it has {_some(there)}")
            entries = [entry for entry in entries if entry.name in wanted]
        if where.type == "cpu":
            return _load_host(io, files, name, entries, shift)
        found = {
            entry.name: torch.empty(entry.shape, dtype=entry.dtype, device=where)
            for entry in entries
        }
        io.stage(
            "read",
            files,
            name,
            [(entry.begin, bytes_of(found[entry.name])) for entry in entries],
            gap=LOAD_GAP,
        )
        return found


def _entries(io: Submitter, files: Files, name: bytes, shown: str) -> list[Entry]:
    """Read and check the header of the file."""
    size = files.get(name).size()
    first = huge_pages(min(size, HEADER_BYTES))
    _fetch(io, files, name, [(first, 0)])
    start = safetensors.data_start(first[:8].numpy().tobytes(), size, shown)
    rest = torch.empty(max(start - first.numel(), 0), dtype=torch.uint8)
    _fetch(io, files, name, [(rest, first.numel())])
    return safetensors.parse(first[8:start].numpy().tobytes() + rest.numpy().tobytes(), size, shown)


def _fetch(
    io: Submitter, files: Files, name: bytes, targets: Sequence[tuple[torch.Tensor, int]]
) -> None:
    """Fill each new host tensor (uint8) from its offset in the file; blocks.

    Touches each piece while the drive reads the pieces before it. On some drives the native engine
    would copy reads into untouched pages through its own buffers.
    """
    with io.ticket() as ticket:
        for target, offset in targets:
            at = 0
            while at < target.numel():
                piece = target[at:][: FETCH_BYTES - (offset + at) % BLOCK]
                piece[::HUGE_PAGE] = 0
                io.move(
                    ticket,
                    "read",
                    files,
                    IoRequest(piece, piece.data_ptr(), piece.numel(), name, offset + at),
                )
                at += piece.numel()
    ticket.wait()


def _load_host(
    io: Submitter, files: Files, name: bytes, entries: Sequence[Entry], shift: int
) -> dict[str, torch.Tensor]:
    """Load each range of entries without gaps into an allocation of its own.

    It has the same offset from a block's start as the range has in the file, less `shift`. So the
    drive reads into it directly, and tensors are aligned.
    """
    ranges: list[list[Entry]] = []
    for entry in entries:
        if not ranges or ranges[-1][-1].end != entry.begin:
            ranges.append([])
        ranges[-1].append(entry)
    places = [
        (huge_pages(run[-1].end - run[0].begin, (run[0].begin - shift) % BLOCK), run[0].begin)
        for run in ranges
    ]
    _fetch(io, files, name, places)
    found = {}
    for run, (memory, begin) in zip(ranges, places, strict=True):
        for entry in run:
            found[entry.name] = _tensor_at(memory, entry.begin - begin, entry)
    return found


@contextmanager
def _replacing(target: Path) -> Iterator[bytes]:
    """A path to a new file, which replaces `target` when the block returns and is removed when the
    block raises."""
    with naming(target):
        if target.is_dir():
            raise FileError(errno.EISDIR, str(target))
    try:
        with Directory(target.parent) as directory, drafting(directory) as drafts:
            descriptor = drafts.folder.create(target.name, 0o666)
            try:
                status = directory.status(target.name)
                if status is not None:
                    os.fchmod(descriptor, stat.S_IMODE(status.st_mode))
                yield f"/proc/self/fd/{descriptor}".encode()  # no link can redirect this path
            finally:
                os.close(descriptor)
            drafts.publish(target.name)
    except ConfigError as error:  # its cause is the error of the system
        raise error.__cause__ or error from None


def _tensor_at(memory: torch.Tensor, at: int, entry: Entry) -> torch.Tensor:
    """The tensor of `entry`, from byte `at` of `memory`. Its storage has exactly its bytes. Copies
    them if they are not aligned for the dtype."""
    if entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=entry.dtype)
    data = memory.numpy()
    if (memory.data_ptr() + at) % entry.dtype.itemsize != 0:
        data, at = data[at : at + entry.nbytes].copy(), 0
    return torch.frombuffer(
        data, dtype=entry.dtype, count=math.prod(entry.shape), offset=at
    ).reshape(entry.shape)


def _some(names: Iterable[str]) -> str:
    """The first five names, and the number of the rest."""
    ordered = sorted(names)
    return ", ".join(map(repr, ordered[:5])) + (
        f" and {len(ordered) - 5} more" if len(ordered) > 5 else ""
    )
