"""The processes that torchrun starts: which of them this is, what they tell each other, and which
of them speaks.

[Note: one voice]
When a rank fails, all others soon fail, too: their collectives lose a partner, and torchrun sends
them SIGTERM. What the person at the terminal has to know is the first failure. So a rank that fails
counts itself in the store of the job before it lets go of its connections: the first one says why,
in one line with its number, and the others wait until that is said and end without a word. A rank
that is killed counts nothing; the first one to miss it says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
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
from infinity.cli.interrupt import interrupted_by_signals
from infinity.errors import InfinityError, sentence
from infinity.sharding.ranks import join
from infinity_command import launched

T = TypeVar("T")

JOINING = timedelta(minutes=5)
"""How long a rank waits for the place where all meet."""
_SPEAKING = timedelta(seconds=5)  # a sentence takes less; who was to say it may have been killed
_ERRORS = 2  # INFO, WARNING, ERROR, FATAL
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OWN = re.compile(r"(rank|engine)\d+")
_PLACE = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """This process' place among the `size` ranks that train one model, of which `local_size` run on
    this node.

    Each method that waits for the other ranks is called by all of them, in the same order, by the
    thread that trains.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of all ranks; None for one."""
        return dist.group.WORLD if self.size > 1 else None

    # What each rank gets of what was asked for

    def check_batch(self, size: int) -> None:
        """Raise `ValueError` with the nearest sizes that work when a batch of `size` windows has no
        equal parts for all ranks."""
        if size % self.size:
            near = [
                count * self.size for count in (size // self.size, size // self.size + 1) if count
            ]
            raise ValueError(
                f"--batch-size {size} is that of all ranks together and cannot be divided among "
                f"{self.size}; take {' or '.join(map(str, near))}"
            )

    def part(self, batch: Any) -> Any:
        """This rank's rows of `batch`, an array of shape (rows, ...); the parts of all ranks, one
        after the other, are the batch.

        They differ by one row at most, and are empty where there are fewer rows than ranks.
        """
        return np.array_split(batch, self.size)[self.rank] if self.size > 1 else batch

    def share(self, budget: int) -> int:
        """This rank's part of `budget`, bytes that all ranks of a node have together."""
        return budget // self.local_size

    def seed(self, seed: int, step: int = 0) -> None:
        """Seed what draws during training (dropout) from `step` on; not on the first rank, which
        goes on as one alone would."""
        if self.rank:
            torch.manual_seed(
                int(np.random.SeedSequence((seed, self.rank, step)).generate_state(1, np.uint64)[0])
            )

    # What they tell each other

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order; anything that can be pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def mean(self, value: float) -> float:
        """The mean of `value` over all ranks, the same bits on each."""
        return value if self.size == 1 else math.fsum(self.gather(value)) / self.size

    def agree(self, signal: int | None) -> int | None:
        """The signal that any rank has noted, so that all act on it at once; None when there is
        none."""
        return max((noted for noted in self.gather(signal) if noted is not None), default=None)

    def from_first(self, work: Callable[[], T]) -> T:
        """What `work` gives on the first rank, where alone it runs; the others wait for it, and
        fail when it does."""
        results: list[Any] = [work() if self.is_first else None]
        if self.size > 1:
            dist.broadcast_object_list(results, src=0)
        result: T = results[0]
        return result

    def wait(self) -> None:
        """Return when all ranks are here."""
        self.gather(None)


ALONE = World()


def find_world(environment: Mapping[str, str]) -> World:
    """The place that torchrun's variables in `environment` give; `ALONE` without them, or when they
    speak of one rank.

    Raises `ValueError` for several ranks of which not all is said.
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
    """Be one of the ranks that torchrun, MPI or Slurm started, or alone, with `plain_failures`, in
    one voice for all ranks.

    Owns the process group; it ends with the block. A signal, such as SIGTERM, which torchrun sends
    when another rank has failed, raises `KeyboardInterrupt`, so that what was made is cleaned up.
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
                reason = sentence(lost).partition(". ")[0]  # the rest is general advice
                raise InfinityError(
                    f"another rank is gone, or cannot be reached: {reason}"
                ) from None
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _meet(world: World) -> Store:
    """The store of this try of the job."""
    try:
        store, *_ = next(rendezvous("env://", world.rank, world.size, timeout=JOINING))
    except dist.DistError as error:
        place = ":".join(os.environ[name] for name in _PLACE)
        raise InfinityError(
            f"rank {world.rank} did not reach the first rank's store at {place}: {error}"
        ) from error
    # torchrun may give all tries one store, and gloo then now and then meets the addresses of the
    # try before. Nodes count tries each for itself, so with several of them there is no common
    # number to tell them apart.
    alone = world.local_size == world.size
    return PrefixStore(
        f"infinity/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if alone else ''}", store
    )


def _without_frames() -> None:
    """Have torch's C++ code log errors only, as TORCH_CPP_LOG_LEVEL=ERROR does for those who set it
    before torch is imported.

    It logs each attempt to reach a process that is gone as a warning, with dozens of frames, beside
    the error that it raises. A torch without that variable goes on logging.
    """
    if "TORCH_CPP_LOG_LEVEL" not in os.environ:
        library = Path(torch.__file__).parent / "lib" / "libc10.so"
        with contextlib.suppress(OSError, ValueError):
            ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level").value = _ERRORS


def _backend(world: World) -> str:
    """gloo for what is on the host (units that are saved, what the ranks agree on), and NCCL
    between GPUs."""
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
    """Whether a collective failed for what happened to another rank: gloo says so in a
    `RuntimeError` that names its source."""
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and "gloo" in str(error).lower()
    )


class _Voice:
    """Says why the job failed, if this rank is the first that knows; see [Note: one voice]."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._speaks = False
        self._is_alone = False

    def claim(self) -> None:
        """This rank has failed; also the first where the store is gone, for then nobody could be
        asked."""
        try:
            self._speaks = self._store.add("failed", 1) == 1
        except RuntimeError:
            self._speaks, self._is_alone = True, True

    def tell(self, error: BaseException) -> None:
        """Say why the job fails if this rank is to speak; else wait until the one that does has,
        before torchrun ends it."""
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
    """The directories below `nvme` that ranks have for themselves, as `infinity.wrap` calls them,
    and further engines, as `infinity.initialize` does."""
    return sorted(
        path
        for path in nvme.iterdir()
        if _OWN.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    )
