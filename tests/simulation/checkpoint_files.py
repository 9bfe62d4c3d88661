"""The calls by which the package writes checkpoints and reads them: those about paths below the
folder of snapshots go to a machine, all others to the real system.

Checkpoints are named by paths, unlike states, so `Path` itself is replaced where it asks the system
anything. `.metadata` is written by torch, whose calls go the same way.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver, utils

from infinity import native
from infinity.checkpoint import data_file, saving
from infinity.checkpoint.checkpoints import Checkpoints
from simulation.distributed import SimulatedDistributed
from simulation.drive import DriveEngine, DriveFile

if TYPE_CHECKING:
    from simulation.system import SimulatedSystem

BUFFER_BYTES = 16 << 10
"""A buffer of a data file, so that tiny ones have several."""
_DESCRIPTOR = re.compile(r"/proc/self/fd/(\d+)")


class _Paths:
    """Methods of `Path`, for paths of a machine."""

    def __init__(self, system: SimulatedSystem) -> None:
        self._system = system

    def exists(self, path: Path, *, follow_symlinks: bool = True) -> bool:
        return self._mode(path) is not None

    def is_dir(self, path: Path, *, follow_symlinks: bool = True) -> bool:
        return stat.S_ISDIR(self._mode(path) or 0)

    def is_file(self, path: Path, *, follow_symlinks: bool = True) -> bool:
        return stat.S_ISREG(self._mode(path) or 0)

    def is_symlink(self, path: Path) -> bool:
        return False

    def _mode(self, path: Path) -> int | None:
        try:
            return int(self._system.stat(path).st_mode)
        except FileNotFoundError:
            return None

    def mkdir(
        self, path: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False
    ) -> None:
        """The folder of snapshots is there."""
        self._system.mkdir(path, mode)

    def rename(self, path: Path, target: Path) -> Path:
        self._system.rename(path, target)
        return target

    def unlink(self, path: Path, missing_ok: bool = False) -> None:
        self._system.unlink(path)

    def iterdir(self, path: Path) -> Iterator[Path]:
        return iter([path / name for name in self._system.listdir(path)])

    def open(self, path: Path, mode: str = "r", *values: Any, **named: Any) -> Any:
        """As Python does: what is written stays in a buffer until that is full or flushed."""
        kinds = {
            "rb": os.O_RDONLY,
            "wb": os.O_RDWR | os.O_CREAT,
            "xb": os.O_RDWR | os.O_CREAT | os.O_EXCL,
        }
        return self._system.fdopen(self._system.open(path, kinds[mode]), mode)


class _Trees:
    """Is `shutil` for what removes a checkpoint."""

    def __init__(self, system: SimulatedSystem) -> None:
        self._system = system

    def __getattr__(self, name: str) -> Any:
        return getattr(shutil, name)

    def rmtree(self, path: Path, ignore_errors: bool = False) -> None:
        if not self._system.has(path):
            shutil.rmtree(path, ignore_errors)
            return
        try:
            for name in self._system.listdir(path):
                self._system.unlink(path / name)
            self._system.rmdir(path)
        except OSError:
            if not ignore_errors:
                raise


class _Engine:
    """What `native.make_engine` gives, for files of a machine and real ones."""

    def __init__(self, kind: str) -> None:
        self._make_real, self._drive = functools.partial(native.make_engine, kind), DriveEngine()
        self._real: Any = None

    def _of(self, file: Any) -> Any:
        if isinstance(file, DriveFile):
            return self._drive
        if self._real is None:
            self._real = self._make_real()
        return self._real

    def write(self, file: Any, *values: Any, owner: Any) -> Any:
        engine = self._of(file)
        if engine is self._drive:
            return engine.write(file, *values, what="a checkpoint")
        return engine.write(file, *values, owner=owner)

    def read(self, file: Any, *values: Any, owner: Any) -> Any:
        engine = self._of(file)
        if engine is self._drive:
            return engine.read(file, *values, what="a checkpoint")
        return engine.read(file, *values, owner=owner)

    def close(self) -> None:
        self._drive.close()
        if self._real is not None:
            self._real.close()


class _Native:
    """Is `infinity.native` for data files."""

    def __init__(self, system: SimulatedSystem) -> None:
        self._system = system

    def __getattr__(self, name: str) -> Any:
        return getattr(native, name)

    def aio(self) -> Any:
        return self

    def File(self, path: str, name: bytes) -> Any:
        found = _DESCRIPTOR.fullmatch(path)
        file = self._system.file_again(int(found[1]), os.fsdecode(name)) if found else None
        return native.aio().File(path, name=name) if file is None else file

    def make_engine(self, kind: str) -> _Engine:
        return _Engine(kind)


class _Once:
    """Is `functools.cached_property`, which holds a lock of all threads meanwhile in Python before
    3.12: ranks that are threads would wait for each other."""

    def __init__(self, owner: type, name: str) -> None:
        self._name, self._make = name, vars(owner)[name].func

    def __get__(self, instance: Any, owner: type) -> Any:
        found = vars(instance)
        if self._name not in found:
            found[self._name] = self._make(instance)
        return found[self._name]


@contextmanager
def checkpoints_on_machines(
    system: SimulatedSystem, distributed: SimulatedDistributed
) -> Iterator[None]:
    """Inside, checkpoints of the folder of snapshots lie on machines."""
    paths = _Paths(system)
    with ExitStack() as patches:

        def replace(owner: Any, name: str, value: Any) -> None:
            patches.enter_context(mock.patch.object(owner, name, value))

        def route(name: str) -> None:
            real: Callable[..., Any] = getattr(Path, name)
            ours = getattr(paths, name)

            @functools.wraps(real)
            def routed(path: Path, *values: Any, **named: Any) -> Any:
                return (ours if system.has(path) else real)(path, *values, **named)

            replace(Path, name, routed)

        for name in ("exists", "is_dir", "is_file", "is_symlink", "mkdir", "rename", "unlink"):
            route(name)
        for name in ("iterdir", "open"):
            route(name)
        replace(saving, "shutil", _Trees(system))
        replace(data_file, "native", _Native(system))
        replace(data_file, "BUFFER_BYTES", BUFFER_BYTES)
        replace(data_file, "SEGMENT_BYTES", BUFFER_BYTES // 2)
        replace(filesystem, "os", system)
        for name in ("_apart", "_savers"):
            replace(Checkpoints, name, _Once(Checkpoints, name))
        for module in (state_dict_loader, state_dict_saver, utils):
            replace(module, "dist", distributed)
        yield
