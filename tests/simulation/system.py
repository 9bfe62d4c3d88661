"""The calls of `os` and `fcntl` that the package makes, of which those about a machine go to it.

`simulated` puts them into every module of the package. A path that is no folder of a machine and a
descriptor that it did not give go to the real system: checkpoints lie there.
"""

from __future__ import annotations

import errno
import fcntl
import io
import itertools
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d

from infinity import native
from infinity.device import ComputeDevice
from infinity.durable import agreement, record, store
from infinity.sharding import collectives, watch
from infinity.tiers import drives, extents
from simulation.checkpoint_files import checkpoints_on_machines
from simulation.disk import Change, Folder, Naming, Plain
from simulation.distributed import SimulatedDistributed, SimulatedStores, gather
from simulation.drive import DriveEngine, DriveFile, flush
from simulation.machine import Machine
from simulation.processes import (
    Rank,
    SimulatedNumpy,
    SimulatedRandom,
    SimulatedTime,
    generators,
    here,
    threads_of_ranks,
)

SAVED = "saved"
"""How operations call the folder of snapshots."""
STRIPE_BYTES = 16 << 10
"""So that tiny blocks lie on several drives."""
_BLOCK = 512


class Handle(NamedTuple):
    """What a descriptor stands for; `name` is how operations call it."""

    machine: Machine
    node: Plain | Folder
    name: str


class SimulatedSystem:
    """Is `os` and `fcntl` for the modules of the package."""

    def __init__(self) -> None:
        self._descriptors: dict[int, Handle] = {}
        self._free = itertools.count(1 << 24)
        self._roots: dict[tuple[Rank | None, str], Handle] = {}
        self._saved = ""  # where snapshots are
        self._locks: dict[int, int] = {}  # by the number of a file: the descriptor

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    # Machines

    def boot(
        self,
        machines: Mapping[Rank | None, Machine],
        paths: Sequence[Path],
        saved: tuple[Path, Folder],
    ) -> None:
        """The folders of each machine are at these paths from now on, for the threads of a rank;
        None: for those of none. That of snapshots, `saved`, is one for all."""
        self._roots = {
            (rank, str(path)): Handle(machine, folder, str(number))
            for rank, machine in machines.items()
            for number, (path, folder) in enumerate(zip(paths, machine.folders, strict=True))
        }
        where, shared = saved
        self._saved = str(where)
        for rank, machine in machines.items():
            self._roots[rank, self._saved] = Handle(machine, shared, SAVED)

    def open_names(self, machine: Machine) -> list[str]:
        """What the process has left open on `machine`; closes it."""
        left = {at: each for at, each in self._descriptors.items() if each.machine is machine}
        for descriptor in left:
            self.close(descriptor)
        return [each.name for each in left.values()]

    def _add(self, handle: Handle) -> int:
        descriptor = next(self._free)
        self._descriptors[descriptor] = handle
        return descriptor

    def _named(self, name: Any, dir_fd: int | None) -> tuple[Machine, Folder, str, str] | None:
        """The machine, the folder and the whole name of what `name` is in the folder `dir_fd`, or
        below the folder of snapshots."""
        if dir_fd is None:
            return self._below_saved(str(name))
        folder = self._descriptors.get(dir_fd)
        if folder is None:
            return None
        assert isinstance(folder.node, Folder)
        return folder.machine, folder.node, str(name), f"{folder.name}/{name}"

    def has(self, path: Any) -> bool:
        """Whether `path` is below the folder of snapshots, of a process on a machine."""
        text = str(path)
        return text.startswith(f"{self._saved}/") and (here(), self._saved) in self._roots

    def _below_saved(self, path: str) -> tuple[Machine, Folder, str, str] | None:
        if not self.has(path):
            return None
        machine, node, whole = self._roots[here(), self._saved]
        *folders, name = path[len(self._saved) + 1 :].split("/")
        for each in folders:
            assert isinstance(node, Folder)
            whole = f"{whole}/{each}"
            if each not in node.names:
                machine.check()
                raise _error(errno.ENOENT, whole)
            node = node.names[each]
        assert isinstance(node, Folder)
        return machine, node, name, f"{whole}/{name}"

    # Names

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        root = self._roots.get((here(), str(path))) if dir_fd is None else None
        if root is not None:
            root.machine.check()
            return self._add(root)
        found = self._named(path, dir_fd)
        if found is None:
            return os.open(path, flags, mode, dir_fd=dir_fd)
        machine, folder, name, whole = found
        with machine.lock:
            machine.check()
            node = folder.names.get(name)
            if node is None and not flags & os.O_CREAT:
                raise _error(errno.ENOENT, whole)
            if node is not None and flags & os.O_EXCL:
                raise _error(errno.EEXIST, whole)
            if node is None:
                operation = machine.begin("create", whole)
                node = Plain()
                folder.change(Naming(machine.key(operation), ((name, node),)))
                machine.strike(operation, "after")
            return self._add(Handle(machine, node, whole))

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        found = self._named(path, dir_fd)
        if found is None:
            os.mkdir(path, mode, dir_fd=dir_fd)
            return
        machine, folder, name, whole = found
        with machine.lock:
            machine.check()
            if name in folder.names:
                raise _error(errno.EEXIST, whole)
            operation = machine.begin("create", whole)
            folder.change(Naming(machine.key(operation), ((name, Folder()),)))
            machine.strike(operation, "after")

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        found = self._named(path, dir_fd)
        if found is None:
            os.unlink(path, dir_fd=dir_fd)
            return
        machine, folder, name, whole = found
        with machine.lock:
            machine.check()
            if name not in folder.names:
                raise _error(errno.ENOENT, whole)
            operation = machine.begin("unlink", whole)
            folder.change(Naming(machine.key(operation), ((name, None),)))
            machine.strike(operation, "after")

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        found = self._named(path, dir_fd)
        if found is None:
            os.rmdir(path, dir_fd=dir_fd)
            return
        machine, folder, name, whole = found
        with machine.lock:
            node = folder.names.get(name)
            if isinstance(node, Folder) and node.names:
                raise _error(errno.ENOTEMPTY, whole)
        self.unlink(path, dir_fd=dir_fd)

    def rename(
        self, path: Any, to: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        found = self._named(path, src_dir_fd)
        if found is None:
            os.rename(path, to, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            return
        machine, folder, name, _ = found
        target = self._named(to, dst_dir_fd)
        assert target is not None and target[1] is folder, "names move inside of a folder only"
        with machine.lock:
            machine.check()
            if name not in folder.names:
                raise _error(errno.ENOENT, name)
            operation = machine.begin("rename", target[3])
            folder.change(
                Naming(machine.key(operation), ((name, None), (target[2], folder.names[name])))
            )
            machine.strike(operation, "after")

    def listdir(self, path: Any) -> list[str]:
        found = self._named(path, None) if isinstance(path, Path) else None
        if found is not None:
            machine, folder, name, whole = found
            if name not in folder.names:
                raise _error(errno.ENOENT, whole)
            handle: Handle | None = Handle(machine, folder.names[name], name)
        else:
            handle = self._descriptors.get(path) if isinstance(path, int) else None
        if handle is None:
            return os.listdir(path)  # noqa: PTH208 (it may be a descriptor)
        handle.machine.check()
        assert isinstance(handle.node, Folder)
        return list(handle.node.names)

    def stat(self, path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> Any:
        found = self._named(path, dir_fd)
        if found is None:
            return os.stat(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
        machine, folder, name, whole = found
        machine.check()
        if name not in folder.names:
            raise _error(errno.ENOENT, whole)
        return _status(folder.names[name])

    # Descriptors

    def close(self, descriptor: int) -> None:
        handle = self._descriptors.pop(descriptor, None)
        if handle is None:
            os.close(descriptor)
        elif self._locks.get(handle.node.number) == descriptor:
            del self._locks[handle.node.number]

    def fstat(self, descriptor: int) -> Any:
        handle = self._descriptors.get(descriptor)
        if handle is None:
            return os.fstat(descriptor)
        handle.machine.check()
        return _status(handle.node)

    def fstatvfs(self, descriptor: int) -> Any:
        handle = self._descriptors.get(descriptor)
        if handle is None:
            return os.fstatvfs(descriptor)
        handle.machine.check()
        return os.statvfs("/")

    def fsync(self, descriptor: int) -> None:
        handle = self._descriptors.get(descriptor)
        if handle is None:
            os.fsync(descriptor)
            return
        machine, node, name = handle
        if isinstance(node, Plain):
            flush(machine, "sync", name, node)
            return
        with machine.lock:
            operation = machine.begin("sync", name)
        machine.take_time(operation)
        with machine.lock:
            machine.strike(operation, "during")
            node.flush()
            machine.strike(operation, "after")

    fdatasync = fsync

    def ftruncate(self, descriptor: int, nbytes: int) -> None:
        handle = self._descriptors.get(descriptor)
        if handle is None:
            os.ftruncate(descriptor, nbytes)
            return
        machine, node, name = handle
        assert isinstance(node, Plain)
        with machine.lock:
            operation = machine.begin("resize", name)
            node.change(Change(machine.key(operation), size=nbytes))
            machine.strike(operation, "after")

    def pread(self, descriptor: int, nbytes: int, offset: int) -> bytes:
        handle = self._descriptors.get(descriptor)
        if handle is None:
            return os.pread(descriptor, nbytes, offset)
        assert isinstance(handle.node, Plain)
        with handle.machine.lock:
            handle.machine.begin("load", handle.name, offset)
            return bytes(handle.node.now[offset : offset + nbytes])

    def pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        handle = self._descriptors.get(descriptor)
        if handle is None:
            return os.pwrite(descriptor, data, offset)
        machine, node, name = handle
        assert isinstance(node, Plain)
        with machine.lock:
            operation = machine.begin("store", name, offset)
            node.change(Change(machine.key(operation), offset, bytes(data)))
            machine.strike(operation, "after")
        return len(data)

    def fdopen(self, descriptor: int, mode: str = "r", *values: Any, **named: Any) -> Any:
        if descriptor not in self._descriptors:
            return os.fdopen(descriptor, mode, *values, **named)
        raw = _Raw(self, descriptor)
        if mode == "rb":
            return io.BufferedReader(raw)
        # That of a checkpoint keeps back as much as Python's files do.
        room = io.DEFAULT_BUFFER_SIZE if mode in ("wb", "xb") else 1 << 20
        return io.BufferedRandom(raw, room)

    # Locks

    def flock(self, descriptor: int, operation: int) -> None:
        handle = self._descriptors.get(descriptor)
        if handle is None:
            fcntl.flock(descriptor, operation)
            return
        handle.machine.check()
        if self._locks.setdefault(handle.node.number, descriptor) != descriptor:
            raise _error(errno.EWOULDBLOCK, handle.name)

    def ioctl(self, descriptor: int, request: int, argument: bytes) -> bytes:
        if descriptor not in self._descriptors:
            return fcntl.ioctl(descriptor, request, argument)
        raise _error(errno.ENOTTY, self._descriptors[descriptor].name)

    LOCK_EX, LOCK_SH, LOCK_NB = fcntl.LOCK_EX, fcntl.LOCK_SH, fcntl.LOCK_NB

    # What the native module does

    def file_at(self, descriptor: int, path: str) -> Any:
        handle = self._descriptors.get(descriptor)
        if handle is None:
            return _file_at(descriptor, path)
        assert isinstance(handle.node, Plain)
        return DriveFile(
            handle.machine, handle.node, handle.name, path, lambda: self.close(descriptor)
        )

    def file_again(self, descriptor: int, path: str) -> DriveFile | None:
        """The file of `descriptor`, opened once more; None where that is a real one."""
        handle = self._descriptors.get(descriptor)
        if handle is None:
            return None
        assert isinstance(handle.node, Plain)
        again = self._add(handle)
        return DriveFile(handle.machine, handle.node, handle.name, path, lambda: self.close(again))


_file_at = native.file_at


class _Raw(io.RawIOBase):
    """A small file, below the buffers of Python."""

    def __init__(self, system: SimulatedSystem, descriptor: int) -> None:
        self._system, self._descriptor, self._at = system, descriptor, 0

    def fileno(self) -> int:
        return self._descriptor

    def readable(self) -> bool:
        return True

    writable = seekable = readable

    def _size(self) -> int:
        return int(self._system.fstat(self._descriptor).st_size)

    def readinto(self, target: Any) -> int:
        data = self._system.pread(self._descriptor, len(target), self._at)
        target[: len(data)] = data
        self._at += len(data)
        return len(data)

    def write(self, data: Any) -> int:
        done = self._system.pwrite(self._descriptor, bytes(data), self._at)
        self._at += done
        return done

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size() if whence == 2 else 0)[whence]
        return self._at

    def truncate(self, size: int | None = None) -> int:
        size = self._at if size is None else size
        if size != self._size():
            self._system.ftruncate(self._descriptor, size)
        return size

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self._system.close(descriptor)
        super().close()


def _error(code: int, name: str) -> OSError:
    return OSError(code, os.strerror(code), name)


def _status(node: Plain | Folder) -> os.stat_result:
    plain = isinstance(node, Plain)
    size = len(node.now) if isinstance(node, Plain) else 0
    mode = stat.S_IFREG | 0o600 if plain else stat.S_IFDIR | 0o700
    values = (mode, node.number, 1 << 40, 1, os.getuid(), os.getgid(), size, 0, 0, 0)
    return os.stat_result(values, {"st_blocks": -(-size // _BLOCK)})


@contextmanager
def simulated() -> Iterator[SimulatedSystem]:
    """Inside, the package meets the machines that were booted last."""
    system = SimulatedSystem()
    distributed, stores = SimulatedDistributed(), SimulatedStores()
    replaced = (
        ("os", os, system),
        ("fcntl", fcntl, system),
        ("dist", dist, distributed),
        ("distributed_c10d", distributed_c10d, stores),
    )
    with ExitStack() as patches:

        def replace(owner: Any, attribute: str, value: Any) -> None:
            patches.enter_context(mock.patch.object(owner, attribute, value))

        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] != "infinity":
                continue
            for attribute, real, value in replaced:
                if vars(module).get(attribute) is real:
                    replace(module, attribute, value)
        replace(native, "file_at", system.file_at)
        for owner in (extents, store):
            replace(owner, "STRIPE_BYTES", STRIPE_BYTES)
        replace(drives, "make_engine", lambda kind, **o: DriveEngine(**o))
        for owner in (agreement, watch):
            replace(owner, "time", SimulatedTime())
        replace(collectives, "_gather", gather)
        replace(record, "random", SimulatedRandom())
        replace(record, "np", SimulatedNumpy())
        replace(ComputeDevice, "random_state", lambda device: [generators().torch.get_state()])
        replace(
            ComputeDevice,
            "set_random_state",
            lambda device, states: generators().torch.set_state(states[0]),
        )
        patches.enter_context(threads_of_ranks())
        patches.enter_context(checkpoints_on_machines(system, distributed))
        yield system
