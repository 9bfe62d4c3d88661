"""The plan of a benchmark: its checked options, and values that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from infinity import native
from infinity.bench.io.patterns import Operation
from infinity.bench.io.search import DEPTHS, REQUEST_BYTES, THREADS, Space
from infinity.bench.io.workspace import check_directories
from infinity.errors import ConfigError
from infinity.quantities import format_bytes

Mode = Literal["read", "write", "mixed", "many-tensor", "replay"]
MODES: tuple[Mode, ...] = ("read", "write", "mixed", "many-tensor", "replay")
MEMORY_BYTES = 192 << 20
"""Per path: the most staging of the engine."""
SIZE_MULTIPLE = 8 << 20  # the largest request of the search
_LEAST_SIZE = 16 << 20
_WRITTEN = {"read": 0.0, "write": 1.0, "mixed": 0.3, "many-tensor": 1.0, "replay": 24 / 26}
"""Seconds of writes in a second of each mode. A step is replayed for two: of 26 bytes, it writes
12."""
_USUAL_WRITE = 3e9
"""Bytes per second that a fast drive writes."""


@dataclass(frozen=True)
class Plan:
    """The options of `infinity bench io`. Sizes are in bytes, per path. None: the benchmark
    chooses."""

    paths: tuple[Path, ...]
    size: int
    reserve: int
    engine: Literal["auto", "io_uring", "posix"]
    depth: int | None
    request_bytes: int | None
    threads: int | None
    search_seconds: float
    modes: tuple[Mode, ...]
    rounds: int
    round_seconds: float
    tensor_bytes: int
    model_parameters: int
    load: bool
    compare_fio: bool
    sustained: float | None
    write_set: int | None
    endurance: int | None
    runs: int

    def check(self) -> None:
        """Raise `ConfigError` for errors that are visible before the disk is touched."""
        check_directories(self.paths)
        if self.size < _LEAST_SIZE:
            raise ConfigError(
                f"`size` {format_bytes(self.size)} is too small to measure; the least is "
                f"{format_bytes(_LEAST_SIZE)}"
            )
        if self.request_bytes is not None and not (
            0 < self.request_bytes <= 64 << 20 and self.request_bytes % 4096 == 0
        ):
            raise ConfigError(
                f"`request_bytes` {self.request_bytes} must be a multiple of 4096, at most 64 MiB"
            )
        if self.write_set is not None and self.sustained is None:
            raise ConfigError("`write_set` is what `sustained` seconds write; give that as well")
        if "many-tensor" in self.modes and not 0 < self.tensor_bytes <= self.memory_bytes // 2:
            raise ConfigError(
                "`tensor_bytes` has to be between 1 and "
                f"{format_bytes(self.memory_bytes // 2)} here"
            )
        if not self.modes:
            raise ConfigError("nothing is left to measure: `modes` is empty; give at least one")

    @property
    def file_bytes(self) -> int:
        """The size of the file of each path: a multiple of every request size."""
        return self.size // SIZE_MULTIPLE * SIZE_MULTIPLE

    @property
    def memory_bytes(self) -> int:
        """Memory for the transfers of one path."""
        return min(MEMORY_BYTES, max(2 * _LEAST_SIZE, self.file_bytes))

    @property
    def directions(self) -> tuple[Operation, ...]:
        """The operations that the search measures."""
        if set(self.modes) <= {"read"}:
            return ("read",)
        return ("write",) if set(self.modes) <= {"write"} else ("read", "write")

    @property
    def writing_seconds(self) -> float:
        """The most seconds that the files of a path are written, beside their first writing. Modes
        that also read count for their part of writes."""
        search = self.search_seconds / len(self.directions) if "write" in self.directions else 0.0
        cases = sum(_WRITTEN[mode] for mode in self.modes)
        if "write" in self.modes and len(self.paths) > 1:
            cases += _WRITTEN["write"]  # also each path alone
        compared = sum(_WRITTEN[mode] for mode in self.modes if mode in ("write", "mixed"))
        rounds = cases * (1 + self.load) + compared * self.compare_fio
        latencies = cases * (1 + self.load)
        seconds = rounds * self.rounds + latencies
        return search + seconds * self.round_seconds + (self.sustained or 0.0)

    def wear(self) -> str:
        """A line about the bytes that the benchmark writes."""
        seconds = self.writing_seconds
        first = f"this writes {format_bytes(self.file_bytes)} to each path"
        if not seconds:
            return first
        each = self.file_bytes + seconds * _USUAL_WRITE
        return (
            f"{first}, and then writes for up to {seconds:.0f} s as fast as the drive takes it: "
            f"at 3 GB/s {each / 1e9:.0f} GB together"
        )

    def spaces(self) -> list[Space]:
        """The settings for the search. Raises `ConfigError` if the requested engine is not
        available, or needs too much memory."""
        available, reason = native.aio().io_uring_available()
        if self.engine == "io_uring" and not available:
            raise ConfigError(f"`engine` io_uring: {reason}; use `engine` posix")
        engines = [
            name
            for name in ("io_uring", "posix")
            if self.engine in (name, "auto") and (available or name == "posix")
        ]
        fixed: dict[str, tuple[int | None, tuple[int, ...]]] = {
            "io_uring": (self.depth, DEPTHS),
            "posix": (self.threads, THREADS),
        }
        spaces = [
            Space(
                name,
                REQUEST_BYTES if self.request_bytes is None else (self.request_bytes,),
                (fixed[name][0] or 0,) if fixed[name][0] else fixed[name][1],
                self.memory_bytes // 2,
            )
            for name in engines
        ]
        for space in spaces:
            space.start()  # refuses a setting that does not fit
        return spaces
