"""Loads the compiled extensions; the one place that knows which of them exist."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import logging
import os
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from infinity.directories.directory import Directory
from infinity.errors import ConfigError, InfinityError, naming

log = logging.getLogger("infinity")


@cache
def _load(name: str) -> ModuleType | None:
    """The module; None if the package was built without it. Raises `ImportError` if it exists and
    cannot be loaded."""
    try:
        return importlib.import_module(f"infinity.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"infinity.{name}":
            raise
        return None


def _required(name: str) -> Any:
    try:
        module = _load(name)
    except (ImportError, OSError) as error:
        raise InfinityError(
            f"the compiled module infinity.{name} cannot be loaded: {error}{_way_out(error)}"
        ) from error
    if module is None:
        raise InfinityError(
            f"the compiled module infinity.{name} is missing; install the package with "
            "`pip install .`; where it is installed, start Python outside of "
            f"{Path(__file__).parents[1]}, whose sources hide it"
        )
    return cast(Any, module)


def _way_out(error: Exception) -> str:
    # The loader of libraries gives the text alone.
    too_many = (os.strerror(code) for code in (errno.EMFILE, errno.ENFILE))
    return (
        "; raise the limit with `ulimit -n`" if any(text in str(error) for text in too_many) else ""
    )


def aio() -> Any:
    """The async-IO extension (`native/aio`)."""
    return _required("_aio")


def file_at(descriptor: int, path: str) -> Any:
    """A native file (`_aio.File`) of the open file `descriptor`, which it owns from now on. Errors
    show `path`.

    So a file is opened once, safely (see `infinity.directories`), and no link can come between. It
    uses O_DIRECT if possible.
    """
    try:
        return _named_file()(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise


@cache
def _named_file() -> type[Any]:
    class NamedFile(aio().File):  # type: ignore[misc]
        """A native file. If the file system cannot reserve space, it only checks the free space."""

        def __init__(self, descriptor: int, path: str) -> None:
            self._warned = False
            with naming(path):
                super().__init__(f"/proc/self/fd/{descriptor}", name=os.fsencode(path))
            self._descriptor = descriptor

        def allocate(self, nbytes: int) -> None:
            with naming(self.path):
                try:
                    super().allocate(nbytes)
                except OSError as error:
                    if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                        raise
                    self._allocate_unreserved(nbytes)

        def truncate(self, nbytes: int) -> None:
            with naming(self.path):
                super().truncate(nbytes)

        def sync(self) -> None:
            with naming(self.path):
                super().sync()

        def _allocate_unreserved(self, nbytes: int) -> None:
            """Make the file longer if there is room now. Another program may take the room before
            it is written."""
            status, space = os.fstat(self._descriptor), os.fstatvfs(self._descriptor)
            if nbytes - status.st_blocks * 512 > space.f_bavail * space.f_frsize:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
            if nbytes > status.st_size:
                super().truncate(nbytes)
            if not self._warned:
                log.warning(
                    "the file system of %s cannot reserve space: keep enough of it free", self.path
                )
            self._warned = True

        def duplicate(self) -> int:
            """Another descriptor of the file, for the caller to close."""
            return os.dup(self._descriptor)

        def close(self) -> None:
            super().close()
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)

    return NamedFile


def make_engine(kind: str, **options: Any) -> Any:
    """A native I/O engine: "io_uring", "posix", or "auto" for the first that this machine allows.

    `options` are those of `_aio.Engine`. Raises `ValueError` for impossible options, and
    `RuntimeError` when io_uring is asked for and not available. Raises `InfinityError` when this
    process may not open another file.
    """
    try:
        return aio().Engine(_best_kind() if kind == "auto" else kind, **options)
    except RuntimeError as error:
        if not _way_out(error):
            raise
        raise InfinityError(f"no I/O engine can be made: {error}{_way_out(error)}") from error


@cache
def _best_kind() -> str:
    """Cached, so that missing support is logged once and not for every engine."""
    available, reason = aio().io_uring_available()
    if not available:
        log.warning("io_uring is not available (%s); using POSIX threads for I/O", reason)
    return "io_uring" if available else "posix"


def cufile() -> Any:
    """libcufile with its driver open (`_aio.CuFile`). Raises `RuntimeError` with the reason why no
    drive can write to a GPU here."""
    # Otherwise it would leave a cufile.log in the working directory.
    if "CUFILE_LOGFILE_PATH" not in os.environ:
        os.environ["CUFILE_LOGFILE_PATH"] = _cufile_log()
    return aio().CuFile(cufile_libraries())


def _cufile_log() -> str:
    """A log file of ours in the common directory, or none if another user made it first."""
    folder, name = Path(tempfile.gettempdir()), f"cufile-{os.getuid()}.log"
    try:
        with Directory(folder) as directory:
            try:
                descriptor = directory.create(name)
            except FileExistsError:
                descriptor = directory.open(name)
            ours = os.fstat(descriptor).st_uid == os.getuid()
            os.close(descriptor)
    except (OSError, ConfigError) as error:
        log.debug("cuFile writes no log: %s", error)
        ours = False
    return str(folder / name) if ours else os.devnull


def cufile_libraries() -> list[str]:
    """The places of libcufile: loaded already or known to the system, in NVIDIA's wheels, in the
    toolkit."""
    name = "libcufile.so.0"
    wheels = importlib.util.find_spec("nvidia")
    folders = (
        [Path(at) for at in wheels.submodule_search_locations or ()] if wheels is not None else []
    )
    found = [str(path) for folder in folders for path in sorted(folder.glob(f"*/lib/{name}"))]
    return [name, *found, f"/usr/local/cuda/lib64/{name}"]


def cpu_adam() -> Any:
    """The CPU optimizer kernels (`native/cpu_adam`)."""
    return _required("_cpu_adam")


@cache
def cuda() -> Any | None:
    """The CUDA kernels (`native/cuda`), or None if the package was built without nvcc, or there is
    no CUDA."""
    try:
        return _load("_cuda")
    except ImportError as error:
        if _way_out(error):
            raise InfinityError(
                f"the compiled module infinity._cuda cannot be loaded: {error}{_way_out(error)}"
            ) from error
        log.debug("native module _cuda is not available: %s", error)
        return None
