"""Writes a checkpoint.

[Note: all or nothing]
All ranks write into `.<name>.partial` beside the directory. When everything is on the drive, the
first rank renames the old checkpoint to `.<name>.old` and the new one to its name. Then it removes
the old one. So a whole checkpoint always exists: under its name or, between the two renames, as
`.old`. A load finds it in both places.

[Note: at the speed of the drive]
`ChunkStream` reads chunks of the store ahead. Each is decoded straight into the buffer that will be
written, and digested there. Meanwhile earlier buffers are written to the drive
(`checkpoint/data_file`). Objects are written first, because the chunks that are read ahead hold
slots of the store.
"""

from __future__ import annotations

import functools
import io
import itertools
import math
import os
import shutil
import uuid
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from infinity.checkpoint import manifest
from infinity.checkpoint.data_file import DataWriter
from infinity.checkpoint.digest import as_text
from infinity.checkpoint.files import MANIFEST, METADATA, hold, is_held, is_whole, sibling
from infinity.checkpoint.frame import frame
from infinity.checkpoint.inert import pack_item
from infinity.checkpoint.manifest import ItemPlace, Manifest, Stamp, encode
from infinity.checkpoint.pieces import pieces_of
from infinity.checkpoint.progress import CheckpointProgress, Told
from infinity.checkpoint.readers import StatesReader
from infinity.checkpoint.series import Series
from infinity.checkpoint.state import (
    HEADER,
    EngineState,
    in_words,
    one_error,
)
from infinity.device import copy_alone
from infinity.directories.directory import make_durable
from infinity.errors import CheckpointError
from infinity.optim.foreign import Adapted
from infinity.sharding import collectives
from infinity.sharding.unit import Unit
from infinity.tiers.access import Checkout

_AHEAD = 8  # most chunks of the store in flight or in use


def save(
    state: EngineState, directory: Path, extra: Mapping[str, Any], told: Told | None = None
) -> None:
    """Write `state` and this rank's `extra` to `directory`. All ranks call it. Only the first
    replica writes, so `told` is called only there.

    Raises `CheckpointError`. The earlier content of `directory` is then unchanged.
    """
    replicas, failure = state.replicas, None
    try:
        if collectives.rank(replicas) == 0:
            _save(state, directory, extra, told)
        else:
            with in_words("the engine cannot be saved"):
                # A delayed update becomes visible now. All replicas must do the same.
                state.await_updates()
                state.reader.end()
    except CheckpointError as error:
        failure = error
    failures = collectives.all_reduce_sum(
        [float(failure is not None)], [] if replicas is None else [replicas]
    )
    if failure is not None:
        raise failure
    if failures[0]:
        raise CheckpointError(
            f"{directory}: the first replica, which saves for all, could not; its error says why"
        )


def _save(state: EngineState, directory: Path, extra: Mapping[str, Any], told: Told | None) -> None:
    says = state.rank == 0
    progress = CheckpointProgress(
        f"saving {directory}" if says else "", f"saved {directory}" if says else "", told
    )
    writer = CheckpointWriter(directory, state, progress)
    planner = Saving(state, extra)
    try:
        with one_error():
            if state.group is None:
                _save_alone(planner, writer)
            else:
                save_state_dict(
                    {}, storage_writer=writer, planner=planner, process_group=state.group
                )
    except BaseException:
        writer.give_up()
        raise
    finally:
        writer.close()
    progress.end()


def _save_alone(planner: Saving, writer: CheckpointWriter) -> None:
    """Make the calls of DCP on one rank. DCP itself would warn there, and a warning filter would
    affect all threads."""
    planner.set_up_planner({})
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan(
        [writer.prepare_local_plan(planner.create_local_plan())]
    )
    (plan,) = writer.prepare_global_plan(plans)
    written = writer.write_data(planner.finish_plan(plan), planner).value()
    writer.finish(metadata, [written])


class _Need(NamedTuple):
    """Elements [begin, end) of a series: one chunk of the store."""

    series: Series
    begin: int
    end: int


class ChunkStream:
    """Reads elements of series, and reads the next chunks ahead.

    `needs` are chunks of `reader`, in the order in which `read` uses them. Until `close`, the
    caller checks out nothing else.
    """

    def __init__(self, reader: StatesReader, needs: Iterator[_Need]) -> None:
        self._reader = reader
        self._needs = needs
        self._next = next(needs, None)  # the first need that was not checked out
        self._held: deque[tuple[_Need, list[Checkout]]] = deque()  # the first chunk is in use

    def read(self, series: Series, begin: int, values: torch.Tensor) -> None:
        """Fill `values` with the elements from `begin` on."""
        at = 0
        while at < values.numel():
            self._ask()
            need, chunks = self._held[0]
            if need.series is not series or not need.begin <= begin + at < need.end:
                self._release_first()
                continue
            for chunk in chunks:
                chunk.wait()
            part = values[at : at + need.end - begin - at]
            tensors = [chunk.tensor for chunk in chunks]
            self._reader.decode(series, tensors, begin + at - need.begin, part)
            at += part.numel()

    def close(self) -> None:
        """Release all slots."""
        with ExitStack() as stack:
            for _ in range(len(self._held)):
                stack.callback(self._release_first)

    def _ask(self) -> None:
        """Start to read the next chunks while slots are free."""
        while self._next is not None and len(self._held) < _AHEAD:
            series, begin, _ = self._next
            chunks = self._reader.check_out(series, begin, waits=not self._held)
            if chunks is None:
                return
            self._held.append((self._next, chunks))
            self._next = next(self._needs, None)

    def _release_first(self) -> None:
        _, chunks = self._held.popleft()
        with ExitStack() as stack:
            for chunk in chunks:
                stack.callback(chunk.release)


class TensorSource(NamedTuple):
    """The source of the elements of an item: a series, or a tensor on the host."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    series: Series | None = None
    begin: int = 0
    """The first element in the shard of the series."""
    tensor: torch.Tensor | None = None

    @property
    def unit(self) -> Unit | None:
        """The unit of the series."""
        return None if self.series is None else self.series.unit

    def put(self, stream: ChunkStream, at: int, part: torch.Tensor) -> None:
        """Fill `part` (uint8) with the bytes from byte `at` on."""
        values, first = part.view(self.dtype), at // self.dtype.itemsize
        if self.series is not None:
            stream.read(self.series, self.begin + first, values)
        elif self.tensor is not None:
            copy_alone(values, self.tensor[first:][: values.numel()])

    def needs(self, reader: StatesReader) -> Iterator[_Need]:
        """The chunks that contain its elements."""
        if self.series is not None:
            bounds = [*reader.starts(self.series), self.series.unit.facts.layout.shard_numel]
            at, end = self.begin, self.begin + math.prod(self.sizes)
            while at < end:
                number = bisect_right(bounds, at) - 1
                yield _Need(self.series, bounds[number], bounds[number + 1])
                at = bounds[number + 1]


class Saving(SavePlanner):
    """Tells DCP the items of this rank, and gives their content. Lives for one save."""

    def __init__(self, state: EngineState, extra: Mapping[str, Any]) -> None:
        self._state, self._extra = state, dict(extra)
        self._items: list[WriteItem] = []
        # By key: its path in DCP's nested dict.
        self._paths: dict[str, tuple[str, ...]] = {}
        self._objects: dict[MetadataIndex, Callable[[], io.BytesIO]] = {}
        self._tensors: dict[MetadataIndex, TensorSource] = {}

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Wait for updates."""
        with in_words("the engine cannot be saved"):
            self._state.await_updates()
            self._state.reader.begin(self._state.series())

    def create_local_plan(self) -> SavePlan:
        """The items that this rank writes."""
        with in_words("the engine cannot be saved"):
            self._plan(self._state)
        return SavePlan(self._items, planner_data=self._paths)

    def _plan(self, state: EngineState) -> None:
        # Raises before anything is written.
        extra = pack_item("extra", self._extra)
        self._add_object(("extra", str(state.rank)), lambda: extra)
        if state.rank == 0:
            header = pack_item("the optimizer", state.header())
            self._add_object((HEADER,), lambda: header)
            for name, buffer in state.buffers.items():
                chunk = ChunkStorageMetadata(torch.Size([0] * buffer.ndim), buffer.shape)
                flat = buffer.detach().cpu().contiguous().view(-1)
                source = TensorSource(buffer.dtype, tuple(buffer.shape), tensor=flat)
                self._add(("model", name), chunk, buffer.shape, source)
        for series in state.series():
            if state.is_zero(series):
                continue  # `EngineState.absent` lists it
            for number, name in enumerate(series.unit.facts.keys):
                size = series.size(number)
                if not series.unit.facts.counted[number]:
                    continue
                for piece in pieces_of(series, number, size):
                    source = TensorSource(series.dtype, piece.sizes, series, piece.in_shard)
                    self._add((*series.prefix, name), piece.chunk, size, source)
        for optimizer, unit, path in state.foreign():
            # Every rank has all of them.
            if unit.facts.index % collectives.size(state.group) == state.rank:
                self._add_object(path, functools.partial(_pack_foreign, optimizer, unit))

    def _add(
        self,
        path: tuple[str, ...],
        chunk: ChunkStorageMetadata,
        size: torch.Size,
        source: TensorSource,
    ) -> None:
        index = MetadataIndex(".".join(path), chunk.offsets)
        data = TensorWriteData(chunk, TensorProperties(source.dtype), size)
        self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self._paths[index.fqn], self._tensors[index] = path, source

    def _add_object(self, path: tuple[str, ...], source: Callable[[], io.BytesIO]) -> None:
        index = MetadataIndex(".".join(path))
        self._items.append(WriteItem(index, WriteItemType.BYTE_IO))
        self._paths[index.fqn], self._objects[index] = path, source

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On the first rank: the plans of all ranks, and DCP's metadata."""
        plans, metadata = create_default_global_save_plan(all_plans)
        metadata.planner_data = {
            key: path for plan in all_plans for key, path in plan.planner_data.items()
        }
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Not called, because `CheckpointWriter.write_data` calls `content` and `source`."""
        raise NotImplementedError

    def content(self, item: WriteItem) -> memoryview:
        """The bytes of an object."""
        return self._objects[item.index]().getbuffer()

    def source(self, item: WriteItem) -> TensorSource:
        """The source of a tensor."""
        return self._tensors[item.index]


def _pack_foreign(optimizer: Adapted, unit: Unit) -> io.BytesIO:
    return pack_item(
        f"the state of {unit.facts.name}",
        dict(zip(unit.facts.names, optimizer.unit_states(unit), strict=True)),
    )


class WriteInstructions(NamedTuple):
    """The data file and the stamp that the first rank assigns to a rank."""

    name: str
    stamp: Stamp


class Written(NamedTuple):
    """The address and the place of an item in its file."""

    address: MetadataIndex
    place: ItemPlace


class CheckpointWriter(FileSystemWriter):
    """Writes beside the directory, and renames the complete checkpoint."""

    def __init__(self, directory: Path, state: EngineState, progress: CheckpointProgress) -> None:
        if not directory.name:  # the same on all ranks
            raise _refusal(directory)
        self._directory, self._progress = directory, progress
        self._partial = sibling(directory, "partial")
        self._old = sibling(directory, "old")
        self._state = state
        self._stamp = Stamp()  # set on the first rank once all have planned
        self._absent = frozenset[str]()
        self._held: int | None = None  # the descriptor that locks the directory
        super().__init__(self._partial)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged, because the first rank creates the directory."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the first rank, before any rank writes: clean up after interrupted saves, and create
        the directory. Raises `CheckpointError` if the save must not replace `directory`."""
        with in_words(f"{self._directory} cannot be written"):
            if os.path.ismount(self._directory):
                raise _refusal(self._directory)
            there = self._directory.exists()
            if there and not is_whole(self._directory) and not _is_empty(self._directory):
                raise CheckpointError(
                    f"{self._directory} is there and no checkpoint, so it is not replaced; "
                    "choose another name"
                )
            if self._old.exists() and not there:
                self._old.rename(self._directory)
            if self._partial.is_dir() and is_held(self._partial):
                raise CheckpointError(
                    f"{self._directory} is being saved by another process; give each its "
                    "own directory"
                )
            if self._old.exists():
                make_durable(self._directory.parent)  # before `.old` is removed
            for left in (self._old, self._partial):
                if left.exists():
                    shutil.rmtree(left)
            self._partial.mkdir(parents=True)
            self._held = hold(self._partial)
            posted, _ = self._state.reader.counts(self._state.updater)
            self._stamp = Stamp(self._state.run, uuid.uuid4().hex, posted)
            self._absent = self._state.absent()
        shares = [
            WriteInstructions(f"__{rank}_0.distcp", self._stamp) for rank in range(len(plans))
        ]
        return [
            replace(plan, storage_data=share) for plan, share in zip(plans, shares, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write this rank's file: a head, then the items without gaps. Returns when it is on the
        drive."""
        share: WriteInstructions = plan.storage_data
        path = self._partial / share.name
        with (
            in_words(f"{self._directory} cannot be written"),
            closing(DataWriter(path, self._state.io_engine)) as file,
        ):
            file.write(share.stamp.head(share.name))
            written = list(self._write_items(share.name, file, plan.items, planner))  # type: ignore[arg-type]
            file.finish()
        future: Future[Any] = Future()
        future.set_result(written)
        return future

    def _write_items(
        self, name: str, file: DataWriter, items: Sequence[WriteItem], planner: Saving
    ) -> Iterator[Written]:
        for item in items:
            if item.type is WriteItemType.BYTE_IO:
                begin, file.crc = file.tell(), 0
                file.write(planner.content(item))
                place = ItemPlace(name, begin, file.tell() - begin, None, as_text(file.crc))
                yield Written(item.index, place)
        tensors = [item for item in items if item.type is not WriteItemType.BYTE_IO]
        sources = [planner.source(item) for item in tensors]
        end = file.tell()
        for source in sources:
            end += frame(end, source.dtype, source.sizes).length
        file.reserve(end - file.tell())
        self._progress.expect(end)
        self._progress.add(file.tell())
        reader, unit = self._state.reader, None
        # `in_order` chooses the next item as late as possible: when its first chunk is read ahead.
        order, ahead = itertools.tee(reader.in_order([source.unit for source in sources]))
        needs = (need for number in ahead for need in sources[number].needs(reader))
        with closing(ChunkStream(reader, _without_repeats(needs))) as stream:
            for number in order:
                source = sources[number]
                if unit is not None and unit is not source.unit:
                    reader.leave(unit)
                begin, unit, file.crc = file.tell(), source.unit, 0
                around = frame(begin, source.dtype, source.sizes)
                file.write(around.head)
                file.fill(around.nbytes, functools.partial(source.put, stream))
                file.write(around.tail)
                place = ItemPlace(name, begin, around.length, source.sizes, as_text(file.crc))
                self._progress.add(around.length)
                yield Written(tensors[number].index, place)
        reader.end()
        if file.tell() != end:  # the padding of frames depends on the order of items
            self._progress.expect(file.tell())

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """On the first rank, after all ranks have written: write the index and rename the
        checkpoint."""
        places = {item.address: item.place for written in results for item in written}
        with in_words(f"{self._directory} cannot be written"):
            infos = {
                index: (place.length, _StorageInfo(place.file, place.offset, place.length))
                for index, place in places.items()
            }
            super().finish(
                metadata,
                [[WriteResult(index, length, info) for index, (length, info) in infos.items()]],
            )
            # Torch calls fsync before Python has flushed its buffer.
            make_durable(self._partial / METADATA)
            self._write_manifest(metadata, places)
            make_durable(self._partial)
            if self._directory.exists():
                self._directory.rename(self._old)
            try:
                self._partial.rename(self._directory)
            except BaseException:
                if self._old.exists():
                    self._old.rename(self._directory)
                raise
            make_durable(self._directory.parent)
            shutil.rmtree(self._old, ignore_errors=True)  # if this fails, the next save removes it

    def give_up(self) -> None:
        """On the first rank, remove the incomplete checkpoint."""
        if self._held is not None:
            shutil.rmtree(self._partial, ignore_errors=True)

    def close(self) -> None:
        """Release the lock on the directory."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _write_manifest(
        self, metadata: Metadata, places: Mapping[MetadataIndex, ItemPlace]
    ) -> None:
        files: dict[str, int] = {}
        for place in places.values():
            files[place.file] = max(files.get(place.file, 0), place.offset + place.length)
        found = metadata.state_dict_metadata
        tensors = {
            key: tensor
            for key, tensor in found.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        content = encode(
            Manifest(manifest.VERSION, self._stamp, files, tensors, places, self._absent)
        )
        with self.fs.create_stream(self._partial / MANIFEST, "xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())


def _without_repeats(needs: Iterator[_Need]) -> Iterator[_Need]:
    """Drop consecutive needs of the same chunk."""
    last: _Need | None = None
    for need in needs:
        if last is None or need.series is not last.series or need.begin != last.begin:
            yield need
        last = need


def _refusal(directory: Path) -> CheckpointError:
    return CheckpointError(
        f"{directory} is the top of a file system, and no save can take its place; choose a "
        "directory in it"
    )


def _is_empty(directory: Path) -> bool:
    return directory.is_dir() and not any(directory.iterdir())
