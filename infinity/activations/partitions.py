"""Divides saved tensors that are equal on all tensor parallel ranks: each rank keeps a part of the
bytes, and the backward gathers them (`Tuning.partition_activations`; ZeRO, section 6.1).

[Note: replicas]
The placement of a DTensor says whether it is a replica. For a plain tensor that a checkpoint saves,
the input of a block, the user says so by turning this on. Another plain tensor is a replica if it
has the memory of such a tensor, such as the input of three projections. A tensor that is saved
inside a recomputation stays whole, because it is used at once.

[Note: the word of the user is checked]
Each save takes a checksum of the whole tensor: CRC32C on the host. Before a gather the ranks
compare their checksums. After it each rank compares the checksum with the bytes that came. Both
comparisons have the same result on all ranks. So either all ranks raise or none does, before a
gradient is computed from the bytes. No rank is left waiting.

[Note: when ranks gather]
Ranks gather in the thread that runs the backward, when autograd asks for the tensor. Ranks that run
one program ask in one order. Only the rank's own part is read ahead from the drives. No decision
depends on whether the tensor is still alive on this rank, because that depends on the garbage
collector of the rank. The gathered bytes are freed when they were requested as often as the tensor
was saved.

[Note: a storage is one thing]
A storage is divided if the saved tensor covers it. So any strides come back. A view of a part of a
storage is not divided, because the other bytes may differ from rank to rank. An in-place operation
on a DTensor does not change the version of its memory. So saves of one memory share their bytes
only if the checksum is the same, too. On a GPU the checksum is not known when a tensor is saved.
There the backward refuses saves that differ.
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
from infinity.sharding.posted import Contribution
from infinity.sharding.ranks import Among
from infinity.sharding.recognize import is_dtensor
from infinity.sharding.tensor_parallel import Form, form_of, local
from infinity.tiers.activations import Activations
from infinity.tiers.latch import Latch
from infinity.tiers.saved_storage import SavedStorage

LEAST_BYTES = 256 << 10
"""Smaller storages stay whole, because the messages of a gather take at least about 0.1 ms. A
hidden state of 64 tokens of width 2048 in bf16 has this many bytes."""
GRANULE = 16
"""The bytes of a part are a multiple of this."""
_PIECE = 4 << 20
"""The 8-byte words that a checksum on a GPU copies at a time."""
_MIXES = 0x2545F4914F6CDD1D, 0x1CE4E5B9BF58476D  # odd, so that no bit is lost
_CHECKPOINTS = "torch.utils.checkpoint"
_BETWEEN = (
    *("torch._dynamo.eval_frame", "torch.autograd.function"),
    *("infinity.modules.packing", "infinity.activations.saved_tensors", __name__),
)
"""Modules with frames between a checkpoint that saves a tensor and the hook that packs it."""


class PartitionTraffic(NamedTuple):
    """Bytes of the divided storages, and of this rank's parts of them."""

    whole: int = 0
    parts: int = 0


class Partition:
    """One divided storage of `nbytes`. It lives as long as the tensors that were packed from it."""

    __slots__ = (
        *("__weakref__", "asked", "checksums", "memory", "module", "nbytes", "part", "saved"),
        *("origin", "partitions"),
    )

    def __init__(
        self, partitions: Partitions, module: str, storage: torch.UntypedStorage, part: torch.Tensor
    ) -> None:
        """`part` is this rank's part of `storage`, in memory of its own; `module` saved it."""
        self.partitions, self.module, self.nbytes = partitions, module, storage.nbytes()
        self.origin = StorageWeakRef(storage)  # so that no other storage gets its number
        self.part: torch.Tensor | None = part  # None: it is offloaded
        self.saved: SavedStorage | None = None
        self.checksums: list[torch.Tensor] = []  # one for each save
        self.asked = 0  # how many of the saves got `memory`
        self.memory: torch.Tensor | None = None

    def fetch(self) -> torch.UntypedStorage:
        """The whole storage on the compute device. All tensor parallel ranks must call it. Raises
        like `Partitions.gather`."""
        if self.memory is None:
            self.memory = self.partitions.gather(self)
        storage = self.memory.untyped_storage()
        self.asked += 1
        if self.asked >= len(self.checksums):  # with retain_graph all ranks may ask again
            self.asked, self.memory = 0, None
        return storage

    def __del__(self) -> None:
        if self.saved is not None:
            self.partitions.drop(self.saved)


class PartitionedDTensor(NamedTuple):
    """A saved DTensor with a divided local tensor."""

    tensor: OffloadedTensor
    form: Form

    def unpack(self) -> torch.Tensor:
        """The same DTensor. Raises like `Partition.fetch`."""
        return self.form.wrap(self.tensor.unpack())


class Partitions:
    """Divides saved tensors among the tensor parallel ranks of `exchange`. Each of these ranks
    makes one.

    A part goes to `tier`, or stays on the device if `tier` is None or has no room. If a part is
    lost, `latch` fails, and with it all ranks. `names` has the names of the modules. `running`
    returns the innermost module that is called, `backwards` the number of backwards that have
    ended.
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
        # By the number and the version of a storage, and on the host by its checksum, too. Both
        # hold the saves since the last end of a backward, which are the same on all ranks.
        self._known = weakref.WeakValueDictionary[tuple[int, ...], Partition]()
        self._places: dict[tuple[int, int], StorageWeakRef] = {}
        self._backwards, self._ended = backwards, 0
        self._traffic = self._before = self.last_step = PartitionTraffic()

    @contextmanager
    def entering(self, module: nn.Module) -> Iterator[None]:
        """Inside the context, saved tensors are the inputs of `module`."""
        self._entered = module
        try:
            yield
        finally:
            self._entered = None

    def pack(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage
    ) -> OffloadedTensor | PartitionedDTensor | None:
        """The object that autograd keeps of `tensor`, which has `storage`; None if it is not
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
        """The key of saves that share their bytes. The checksum is part of it on the host only."""
        return (*place, int(checksum)) if checksum.device.type == "cpu" else place

    def _has_copies(self, form: Form) -> bool:
        """Whether each tensor parallel rank has the whole DTensor."""
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

        Raises `ConfigError` on all tensor parallel ranks if they did not save the same bytes, and
        `EngineClosedError` if a rank fails or has lost its part.
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
        collective = self._exchange.post(*what, Contribution(join, sent), Among.PARTS)
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
        except (NvmeError, CorruptStateError) as error:  # other ranks wait for it
            raise self._latch.fail(error, f"what {partition.module} saved") from error
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def drop(self, saved: SavedStorage) -> None:
        """Drop a part that is not needed any more."""
        if self._tier is not None:
            self._tier.drop(saved)

    def stepped(self) -> None:
        """A step has ended: set `last_step` to the traffic since the step before."""
        now, before = self._traffic, self._before
        self.last_step = PartitionTraffic(now.whole - before.whole, now.parts - before.parts)
        self._before = now


def check_partitions(model: nn.Module) -> None:
    """Raise `ConfigError` if no parameter of `model` is a DTensor, so that there are no tensor
    parallel ranks."""
    if not any(map(is_dtensor, model.parameters())):
        raise ConfigError(
            "partition_activations=True divides what tensor parallel ranks save, and no parameter "
            "of the model is a DTensor: apply parallelize_module(model, mesh['tp'], ...) first, or "
            "leave it out"
        )


def _covers(tensor: torch.Tensor, nbytes: int) -> bool:
    """Whether `tensor` has every element of a storage of `nbytes`."""
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
    """A checksum of `memory` (n,) uint8: int64, less than 63 bits, on the device of the memory. On
    the host it is the CRC32C."""
    if memory.device.type == "cpu":
        return torch.tensor(native.aio().crc32c(memory.data_ptr(), memory.numel()))
    return _mixed(memory)


def _mixed(memory: torch.Tensor) -> torch.Tensor:
    """`_checksum` by operations of torch that do not wait for the device."""
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
