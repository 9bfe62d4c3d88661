"""Saved tensors that all tensor parallel ranks hold alike: each rank keeps a part of the bytes, and
the backward gathers them (`Tuning.partition_activations`; ZeRO, section 6.1).

[Note: what is a replica]
A DTensor says so by its placement. Of a plain tensor that a checkpoint saves, the input of a block,
the user says so, who turned this on. Other plain tensors are replicas where they are the memory of
one of these, as the input of three projections is. What a rank saves inside of a recomputation is
used at once, and stays.

[Note: the word of the user is checked]
Each save takes a checksum of the whole tensor: CRC32C on the host. Before a gather the ranks
compare it, and after that each compares it with the bytes that came. Both have the same outcome on
all ranks. So all of them raise, before a gradient is computed from the bytes, and none is left
waiting.

[Note: when ranks gather]
In the thread that runs the backward, when autograd asks: ranks that run one program ask in one
order. What is read from the drives ahead of that is this rank's part alone. Whether the tensor is
still alive on this rank is never looked at, for it depends on the garbage collector, which others
do not share. How often a tensor was saved says when its gathered bytes are let go.

[Note: a storage is one thing]
What is divided is the storage of a tensor that covers it, so that any strides come back. A view of
a part of a storage is kept as without this: what lies beside it may differ from rank to rank. An
operation in place on a DTensor does not change the version of its memory. So saves of one memory
share their bytes where also the checksum is the same. On a GPU the checksum is not known yet when
a tensor is saved, and what differs is refused in the backward.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from infinity import native
from infinity.activations.saved_tensors import OffloadedTensor
from infinity.device import read_values
from infinity.errors import ConfigError, CorruptStateError, NvmeError
from infinity.observe import Recorder
from infinity.quantities import round_up
from infinity.sharding import collectives
from infinity.sharding.exchange import Exchange
from infinity.sharding.recognize import is_dtensor
from infinity.sharding.tensor_parallel import Form, form_of, local
from infinity.tiers.activations import Activations
from infinity.tiers.latch import Latch
from infinity.tiers.saved_storage import SavedStorage

LEAST_BYTES = 256 << 10
"""Smaller storages stay whole: the messages of a gather take about 0.1 ms, however little they
bring. A hidden state of 64 tokens of width 2048 in bf16 has as much."""
GRANULE = 16
"""A part is a multiple of that many bytes."""
_PIECE = 4 << 20
"""Words of 8 bytes of which a checksum on a GPU makes a copy at a time."""
_MIXES = 0x2545F4914F6CDD1D, 0x1CE4E5B9BF58476D  # odd, so that no bit is lost
_CHECKPOINTS = "torch.utils.checkpoint"
_BETWEEN = (
    *("torch._dynamo.eval_frame", "torch.autograd.function"),
    *("infinity.modules.packing", "infinity.activations.saved_tensors", __name__),
)
"""Whose frames lie between a checkpoint that saves something and the hook that packs it."""


class PartitionTraffic(NamedTuple):
    """Bytes of storages of which each tensor parallel rank keeps a part, and of the parts of this
    rank."""

    whole: int = 0
    parts: int = 0


class Partition:
    """One storage of `nbytes` in parts; lives as long as anything that was packed from it."""

    __slots__ = (
        *("__weakref__", "asked", "checksums", "memory", "module", "nbytes", "part", "saved"),
        *("origin", "partitions"),
    )

    def __init__(
        self, partitions: Partitions, module: str, storage: torch.UntypedStorage, part: torch.Tensor
    ) -> None:
        """`part` is this rank's part of `storage`, in memory of its own; `module` saved it."""
        self.partitions, self.module, self.nbytes = partitions, module, storage.nbytes()
        self.origin = StorageWeakRef(storage)  # keeps its number from another one
        self.part: torch.Tensor | None = part  # None: it is offloaded
        self.saved: SavedStorage | None = None
        self.checksums: list[torch.Tensor] = []  # one for each save
        self.asked = 0  # how many of the saves have had `memory`
        self.memory: torch.Tensor | None = None

    def fetch(self) -> torch.UntypedStorage:
        """The whole storage on the compute device; all tensor parallel ranks ask for it. Raises
        what `Partitions.gather` does."""
        if self.memory is None:
            self.memory = self.partitions.gather(self)
        storage = self.memory.untyped_storage()
        self.asked += 1
        if self.asked >= len(
            self.checksums
        ):  # with retain_graph they may ask again, and all ranks do
            self.asked, self.memory = 0, None
        return storage

    def __del__(self) -> None:
        if self.saved is not None:
            self.partitions.drop(self.saved)


class PartitionedDTensor(NamedTuple):
    """A saved DTensor whose local tensor is in parts."""

    tensor: OffloadedTensor
    form: Form

    def unpack(self) -> torch.Tensor:
        """The same DTensor; raises like `Partition.fetch`."""
        return self.form.wrap(self.tensor.unpack())


class Partitions:
    """Divides what is saved among the tensor parallel ranks of `exchange`, all of which make one.

    A part goes to `tier`, or stays on the device where that is None or has no room. `latch` is told
    where one is lost, so that other ranks hear of it. `names` are those of the modules; `running`
    gives the innermost that is called, `backwards` how many backwards have ended.
    """

    def __init__(
        self,
        exchange: Exchange,
        tier: Activations | None,
        latch: Latch,
        recorder: Recorder,
        names: Mapping[nn.Module, str],
        running: Callable[[], nn.Module | None],
        backwards: Callable[[], int],
    ) -> None:
        self._exchange, self._tier = exchange, tier
        self._latch, self._recorder = latch, recorder
        self._names, self._running = weakref.WeakKeyDictionary(names), running
        self._entered: nn.Module | None = None
        group = exchange.ranks.tensor
        self._rank, self._number = collectives.rank(group), collectives.size(group)
        self._members = None if group is None else dist.get_process_group_ranks(group)
        # By the number and the version of a storage, and on the host by its checksum, too.
        # Both are of saves since a backward ended last: all ranks have the same then.
        self._known = weakref.WeakValueDictionary[tuple[int, ...], Partition]()
        self._places: dict[tuple[int, int], StorageWeakRef] = {}
        self._backwards, self._ended = backwards, 0
        self._traffic = self._before = self.last_step = PartitionTraffic()

    @contextmanager
    def entering(self, module: nn.Module) -> Iterator[None]:
        """Inside, what is saved are the inputs of `module`."""
        self._entered = module
        try:
            yield
        finally:
            self._entered = None

    def pack(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage
    ) -> OffloadedTensor | PartitionedDTensor | None:
        """What autograd keeps of `tensor`, whose memory is `storage`; None where it is not to be
        divided."""
        if self._backwards() != self._ended:
            self._ended = self._backwards()
            self._known.clear()
            self._places.clear()
        form, mine, nbytes = form_of(tensor), local(tensor), storage.nbytes()
        if nbytes < LEAST_BYTES or not _covers(mine, nbytes):
            return None
        if form is None:
            is_replica = self._entered is not None or _saves_for_checkpoint()
        else:
            is_replica = self._has_copies(form)
        place = storage._cdata, mine._version
        if not is_replica and not (form is None and place in self._places):
            return None
        memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        checksum = _checksum(memory)
        key = self._key(place, checksum)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._divided(memory)
            self._places[place] = found.origin
        found.checksums.append(checksum)
        packed = OffloadedTensor(mine, found)
        return packed if form is None else PartitionedDTensor(packed, form)

    @staticmethod
    def _key(place: tuple[int, int], checksum: torch.Tensor) -> tuple[int, ...]:
        """What saves that share their bytes have in common, as far as it is known when they are
        made."""
        return (*place, int(checksum)) if checksum.device.type == "cpu" else place

    def _has_copies(self, form: Form) -> bool:
        """Whether all tensor parallel ranks have all of a DTensor."""
        mesh = form.mesh
        return (
            mesh.ndim == 1
            and form.placements[0].is_replicate()
            and dist.get_process_group_ranks(mesh.get_group()) == self._members
        )

    def _divided(self, memory: torch.Tensor) -> Partition:
        length = round_up(-(-memory.numel() // self._number), GRANULE)
        own = memory[self._rank * length :][:length]
        part = torch.zeros(length, dtype=torch.uint8, device=memory.device)
        part[: own.numel()].copy_(own)
        running = self._entered or self._running()
        name = "" if running is None else self._names.get(running, "")
        found = Partition(self, name or "the model", memory.untyped_storage(), part)
        whole, parts = self._traffic
        self._traffic = PartitionTraffic(whole + memory.numel(), parts + length)
        if (
            self._tier is not None
            and (saved := self._tier.save(part.untyped_storage())) is not None
        ):
            found.saved, found.part = saved, None
        return found

    def gather(self, partition: Partition) -> torch.Tensor:
        """The bytes of a storage, and padding after them, on the compute device.

        Raises `ConfigError` on all tensor parallel ranks where these did not save the same bytes,
        `EngineClosedError` where a rank fails, or has lost its part.
        """
        ours = self._own(partition)
        full = torch.empty(self._number * ours.numel(), dtype=torch.uint8, device=ours.device)

        def join() -> bool:
            group = self._exchange.ranks.tensor
            own, *others = read_values(torch.stack(partition.checksums))
            is_one = all(each == own for each in others)
            saved = own ^ partition.nbytes if is_one else -1
            if group is None or not collectives.same(saved, group) or not is_one:
                return False
            collectives.all_gather(full, ours, group)
            came = read_values(_checksum(full[: partition.nbytes]).view(1))
            return bool(came == [own])

        sent = ours.nbytes * (self._number - 1)
        what = "gather activation of", partition.module
        collective = self._exchange.post_among_parts(*what, join, sent)
        with self._recorder.span("wait collective", partition.module):
            is_whole = collective.wait()
        if not is_whole:
            raise ConfigError(
                f"what {partition.module} saved for the backward is not the same on all tensor "
                "parallel ranks, so a part on each is not all of it. "
                "Tuning(partition_activations=True) is for inputs of blocks that all of these "
                "ranks hold alike: leave it out where each has rows of its own, as with sequence "
                "parallelism or other tokens, and where a DTensor is changed in place after it "
                "was saved"
            )
        return full

    def _own(self, partition: Partition) -> torch.Tensor:
        """This rank's part, on the compute device."""
        if partition.part is not None:
            return partition.part
        if self._tier is None or partition.saved is None:
            raise RuntimeError("a part of a saved storage is nowhere")
        try:
            storage = self._tier.fetch(partition.saved)
        except (NvmeError, CorruptStateError) as error:  # others wait for it
            raise self._latch.fail(error, f"what {partition.module} saved") from error
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def drop(self, saved: SavedStorage) -> None:
        """Nobody will ask for a part any more."""
        if self._tier is not None:
            self._tier.drop(saved)

    def stepped(self) -> None:
        """A step has ended: `last_step` is what was divided since the one before."""
        now, before = self._traffic, self._before
        self.last_step = PartitionTraffic(now.whole - before.whole, now.parts - before.parts)
        self._before = now


def check_partitions(model: nn.Module) -> None:
    """Raise `ConfigError` where there are no tensor parallel ranks to divide anything among."""
    if not any(map(is_dtensor, model.parameters())):
        raise ConfigError(
            "partition_activations=True divides what tensor parallel ranks save, and no parameter "
            "of the model is a DTensor: apply parallelize_module(model, mesh['tp'], ...) first, or "
            "leave it out"
        )


def _covers(tensor: torch.Tensor, nbytes: int) -> bool:
    """Whether every element of a storage of `nbytes` is one of `tensor`."""
    expected = tensor.itemsize
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride > 0:
            if stride * tensor.itemsize != expected:
                return False
            expected *= size
    return expected == nbytes


def _saves_for_checkpoint() -> bool:
    """Whether a checkpoint of torch saves its inputs, for the hook that calls this."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_globals.get("__name__") == _CHECKPOINTS


def _checksum(memory: torch.Tensor) -> torch.Tensor:
    """What almost surely differs where a byte of `memory` (n,) does: int64, of less than 63 bits,
    where the memory is. On the host it is the CRC32C."""
    if memory.device.type == "cpu":
        return torch.tensor(native.aio().crc32c(memory.data_ptr(), memory.numel()))
    return _mixed(memory)


def _mixed(memory: torch.Tensor) -> torch.Tensor:
    """`_checksum` by operations of torch, of which none waits for the device."""
    end = memory.numel() // 8 * 8
    words, rest = memory[:end].view(torch.int64), memory[end:]
    tail = torch.zeros(8, dtype=torch.uint8, device=memory.device)
    tail[: rest.numel()].copy_(rest)
    first, second = _MIXES
    total = torch.full((), memory.numel(), dtype=torch.int64, device=memory.device)
    for begin in range(0, words.numel() + 1, _PIECE):
        piece = words[begin : begin + _PIECE]
        if begin + _PIECE > words.numel():
            piece = torch.cat([piece, tail.view(torch.int64)])
        place = torch.arange(begin, begin + piece.numel(), device=memory.device)
        mixed = (piece ^ (place * first)) * second
        total = total + ((mixed ^ (mixed >> 32)) * first).sum()
    return total & ((1 << 62) - 1)
