"""The ranks of a job: the number of this process, the messages between ranks, and the rank that
reports a failure.

[Note: one voice]
When a rank fails, all other ranks soon fail too: their collectives lose a partner, and torchrun
sends them SIGTERM. The user needs only the first failure. So a failing rank counts itself in the
store of the job before it closes its connections. The first rank to count prints one line with its
number and the reason. The other ranks wait for that and end silently. A killed rank counts nothing.
The first rank to miss it prints the line.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import typer
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from infinity.cli.failure import explained, plain_failures, say
from infinity.errors import InfinityError, sentence
from infinity.interrupt import interrupted_by_signals
from infinity.sharding.ranks import join
from infinity_command import launched

T = TypeVar("T")

JOINING = timedelta(minutes=5)
"""The time that a rank waits for the common store."""
_SPEAKING = timedelta(seconds=5)  # longer than a sentence takes; the other rank may be dead
_ERRORS = 2  # INFO, WARNING, ERROR, FATAL
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OWN = re.compile(r"(rank|engine)\d+")
_PLACE = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """The place of this process among the `size` ranks that train one model. `local_size` of them
    run on this node.

    All ranks must call a method that waits for other ranks, in the same order, on the thread that
    trains.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this rank writes shared files."""
        return self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of all ranks; None for one rank."""
        return dist.group.WORLD if self.size > 1 else None

    # The part of each rank

    def check_batch(self, size: int) -> None:
        """Raise `ValueError`, with the nearest valid sizes, if a batch of `size` windows cannot be
        divided equally among the ranks."""
        if size % self.size:
            near = [
                count * self.size for count in (size // self.size, size // self.size + 1) if count
            ]
            raise ValueError(
                f"--batch-size {size} is that of all ranks together and cannot be divided among "
                f"{self.size}; take {' or '.join(map(str, near))}"
            )

    def part(self, batch: Any) -> Any:
        """This rank's rows of `batch`, an array of shape (rows, ...). The parts of all ranks in
        order form the batch.

        They differ by at most one row. Some are empty if there are fewer rows than ranks.
        """
        return np.array_split(batch, self.size)[self.rank] if self.size > 1 else batch

    def share(self, budget: int) -> int:
        """This rank's part of `budget`, in bytes of all ranks of a node."""
        return budget // self.local_size

    def seed(self, seed: int, step: int = 0) -> None:
        """Seed torch for random operations of training (dropout) from `step` on. The first rank
        keeps its state, as if it trained alone."""
        if self.rank:
            torch.manual_seed(
                int(np.random.SeedSequence((seed, self.rank, step)).generate_state(1, np.uint64)[0])
            )

    # Messages between ranks

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order. Values can be pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def agree(self, signal: int | None) -> int | None:
        """A signal that any rank has noted, so that all ranks act on it together. None if there is
        none."""
        return max((noted for noted in self.gather(signal) if noted is not None), default=None)

    def from_first(self, work: Callable[[], T]) -> T:
        """The result of `work` on the first rank, which alone runs it. Other ranks wait for it, and
        fail if it fails."""
        results: list[Any] = [work() if self.is_first else None]
        if self.size > 1:
            dist.broadcast_object_list(results, src=0)
        return results[0]

    def wait(self) -> None:
        """Return when all ranks have called it."""
        self.gather(None)


ALONE = World()


def find_world(environment: Mapping[str, str]) -> World:
    """The place that torchrun's variables in `environment` give. `ALONE` without them or for one
    rank.

    Raises `ValueError` if there are several ranks and a variable is missing.
    """
    if environment.get("WORLD_SIZE", "1") == "1":
        return ALONE
    missing = [name for name in (*_NUMBERS, *_PLACE) if not environment.get(name)]
    if missing:
        raise ValueError(
            f"WORLD_SIZE is {environment['WORLD_SIZE']}, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set; several ranks are started by: "
            "torchrun --nproc-per-node N -m infinity finetune ..."
        )
    rank, size, local_rank, local_size = (int(environment[name]) for name in _NUMBERS)
    return World(rank, size, local_rank, local_size)


@contextmanager
def joined(debug: bool) -> Iterator[World]:
    """Join the ranks that torchrun, MPI or Slurm started, or run alone. Failures are reported as in
    `plain_failures`, once for all ranks.

    Owns the process group, which ends with the block. A signal raises `KeyboardInterrupt`, so that
    the block cleans up. torchrun sends SIGTERM after the failure of another rank.
    """
    with plain_failures(debug):
        launched.adopt(os.environ)
        world = find_world(os.environ)
        store = _meet(world) if world.size > 1 else None
    if store is None:
        with plain_failures(debug), interrupted_by_signals():
            yield world
        return
    _without_frames()
    # accelerate changes the number of threads, with a warning, where it is not set.
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    voice = _Voice(store, world.rank)
    with plain_failures(debug, voice.tell), interrupted_by_signals():
        try:
            join(_backend(world), store=store, rank=world.rank, world_size=world.size)
            yield world
        except typer.Exit:
            raise
        except BaseException as error:
            voice.claim()
            lost: BaseException | None = error
            while lost is not None and not _is_lost_partner(lost):
                lost = lost.__cause__
            if lost is not None:
                reason = sentence(lost).partition(". ")[0]  # without its general advice
                raise InfinityError(
                    f"another rank is gone, or cannot be reached: {reason}"
                ) from None
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _meet(world: World) -> Store:
    """The store of this attempt of the job."""
    try:
        store, *_ = next(rendezvous("env://", world.rank, world.size, timeout=JOINING))
    except dist.DistError as error:
        place = ":".join(os.environ[name] for name in _PLACE)
        raise InfinityError(
            f"rank {world.rank} did not reach the first rank's store at {place}: {error}"
        ) from error
    # torchrun may use one store for all attempts. gloo then sometimes finds the addresses of the
    # last attempt. Each node counts attempts by itself, so several nodes have no common number to
    # distinguish them.
    alone = world.local_size == world.size
    return PrefixStore(
        f"infinity/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if alone else ''}", store
    )


def _without_frames() -> None:
    """Make torch's C++ code log errors only, like TORCH_CPP_LOG_LEVEL=ERROR before the import of
    torch.

    It logs each attempt to reach a dead process as a warning with dozens of frames, in addition to
    its error. A torch without that symbol keeps its log level.
    """
    if "TORCH_CPP_LOG_LEVEL" not in os.environ:
        library = Path(torch.__file__).parent / "lib" / "libc10.so"
        with contextlib.suppress(OSError, ValueError):
            ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level").value = _ERRORS


def _backend(world: World) -> str:
    """gloo for host tensors (saved units, and agreement of ranks), and NCCL between GPUs."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type != "cuda":
        return "gloo"
    count = torch.accelerator.device_count()
    if world.local_rank >= count:
        raise ValueError(
            f"{world.local_size} ranks on a node with {count} GPU{'s' * (count != 1)}: "
            "start as many as there are GPUs"
        )
    torch.accelerator.set_device_index(world.local_rank)
    return "cpu:gloo,cuda:nccl"


def _is_lost_partner(error: BaseException) -> bool:
    """Whether a collective failed because of another rank. gloo raises a `RuntimeError` that names
    its source."""
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and "gloo" in str(error).lower()
    )


class _Voice:
    """Reports the failure of the job if this rank is the first to know. See [Note: one voice]."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._speaks = False
        self._is_alone = False

    def claim(self) -> None:
        """Count this rank as failed. It also reports if the store is gone."""
        try:
            self._speaks = self._store.add("failed", 1) == 1
        except RuntimeError:
            self._speaks, self._is_alone = True, True

    def tell(self, error: BaseException) -> None:
        """Print the reason if this rank reports. Otherwise wait until another rank has done so,
        because torchrun may end it then."""
        if self._speaks:
            say(f"rank {self._rank}: {explained(error)}")
        if self._is_alone:
            return
        with contextlib.suppress(RuntimeError):
            if self._speaks:
                self._store.set("said", "")
            else:
                self._store.wait(["said"], _SPEAKING)


def own_directories(nvme: Path) -> list[Path]:
    """The directories below `nvme` of single ranks, as `infinity.wrap` names them, and of further
    engines, as `infinity.initialize` names them."""
    return sorted(
        path
        for path in nvme.iterdir()
        if _OWN.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    )
