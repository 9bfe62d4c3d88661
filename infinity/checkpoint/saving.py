"""Writing a checkpoint.

[Note: all or nothing]
All ranks write into `.<name>.partial` beside the directory. When everything is on the drive, the
first rank moves the old checkpoint to `.<name>.old` and the new one to its name. Then it removes
the old one. So an interrupted save harms nothing. A whole checkpoint always exists, under its name
or, between the two moves, as `.old`. A load finds it there, too.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
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
from infinity.checkpoint.files import MANIFEST, hold, is_held, is_whole, sibling
from infinity.checkpoint.inert import read_item
from infinity.checkpoint.manifest import ItemPlace, Manifest, Stamp, encode
from infinity.checkpoint.state import (
    HEADER,
    EngineState,
    Reblocked,
    Series,
    ShardPiece,
    in_words,
    one_error,
)
from infinity.directories.directory import make_durable
from infinity.errors import CheckpointError
from infinity.optim.foreign import Adapted
from infinity.sharding import collectives
from infinity.sharding.unit import Unit


def save(state: EngineState, directory: Path, extra: Mapping[str, Any]) -> None:
    """Write `state` and this rank's `extra` to `directory`; all ranks call it. Of replicas the
    first one writes.

    Raises `CheckpointError`; what was in `directory` is then as it was.
    """
    replicas, failure = state.units[0].ranks.replicas, None
    try:
        if collectives.rank(replicas) == 0:
            _save(state, directory, extra)
        else:
            with in_words("the engine cannot be saved"):
                # What is delayed is seen from now on, by all replicas or by none.
                state.await_updates()
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


def _save(state: EngineState, directory: Path, extra: Mapping[str, Any]) -> None:
    checksums = torch.serialization.get_crc32_options()
    writer = CheckpointWriter(directory, state)
    torch.serialization.set_crc32_options(True)
    try:
        with one_error(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            planner = Saving(state, extra)
            save_state_dict(
                {},
                storage_writer=writer,
                planner=planner,
                process_group=state.group,
                no_dist=state.group is None,
            )
    except BaseException:
        writer.give_up()
        raise
    finally:
        writer.close()
        torch.serialization.set_crc32_options(checksums)


class Saving(SavePlanner):
    """Tells DCP what this rank writes, and brings it piece by piece. Lives for one save."""

    def __init__(self, state: EngineState, extra: Mapping[str, Any]) -> None:
        self._state, self._extra = state, dict(extra)
        self._items: list[WriteItem] = []
        # By key: where a nested dict of everything has it.
        self._paths: dict[str, tuple[str, ...]] = {}
        self._sources: dict[MetadataIndex, Callable[[], Any]] = {}
        self._open: tuple[Series, Reblocked] | None = None
        self._memory = np.empty(0, np.uint8)  # of the piece that is written

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Wait for updates."""
        with in_words("the engine cannot be saved"):
            self._state.await_updates()

    def create_local_plan(self) -> SavePlan:
        """What this rank writes."""
        with in_words("the engine cannot be saved"):
            self._plan(self._state)
        return SavePlan(self._items, planner_data=self._paths)

    def _plan(self, state: EngineState) -> None:
        # Before anything is written, so that it is refused in time.
        extra = _packed("extra", self._extra)
        self._add_object(("extra", str(state.rank)), lambda: extra)
        if state.rank == 0:
            header = _packed("the optimizer", state.header())
            self._add_object((HEADER,), lambda: header)
            for name, buffer in state.buffers.items():
                chunk = ChunkStorageMetadata(torch.Size([0] * buffer.ndim), buffer.shape)
                self._add(("model", name), chunk, buffer.dtype, buffer.shape, buffer.detach)
        for series in state.series():
            if series.is_moment and not series.is_written:
                continue  # zeros, and in `EngineState.absent`
            for number, name in enumerate(series.unit.names):
                size = series.size(number)
                for piece in series.pieces(number, size) if series.unit.counted[number] else ():
                    if self._memory.nbytes < piece.length * series.dtype.itemsize:
                        self._memory = np.empty(piece.length * series.dtype.itemsize, np.uint8)
                    source = functools.partial(self._read, series, piece)
                    self._add((*series.prefix, name), piece.chunk, series.dtype, size, source)
        for optimizer, unit, path in state.foreign():
            # Every rank has all of them.
            if unit.index % collectives.size(state.group) == state.rank:
                self._add_object(path, functools.partial(_pack_foreign, optimizer, unit))

    def _add(
        self,
        path: tuple[str, ...],
        chunk: ChunkStorageMetadata,
        dtype: torch.dtype,
        size: torch.Size,
        source: Callable[[], Any],
    ) -> None:
        index = MetadataIndex(".".join(path), chunk.offsets)
        data = TensorWriteData(chunk, TensorProperties(dtype), size)
        self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self._paths[index.fqn], self._sources[index] = path, source

    def _add_object(self, path: tuple[str, ...], source: Callable[[], io.BytesIO]) -> None:
        index = MetadataIndex(".".join(path))
        self._items.append(WriteItem(index, WriteItemType.BYTE_IO))
        self._paths[index.fqn], self._sources[index] = path, source

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On the first rank: what all ranks write."""
        plans, metadata = create_default_global_save_plan(all_plans)
        metadata.planner_data = {
            key: path for plan in all_plans for key, path in plan.planner_data.items()
        }
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Nothing to add."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The content of an item, valid until the next one is asked for."""
        content: torch.Tensor | io.BytesIO = self._sources[write_item.index]()
        return content

    def _read(self, series: Series, piece: ShardPiece) -> torch.Tensor:
        # All pieces are the same memory: were it not, malloc would find no room for large pieces
        # between smaller ones.
        values = torch.frombuffer(self._memory, dtype=series.dtype, count=piece.length)
        if self._open is None or self._open[0] is not series:
            unit, kind = series.unit, series.kind
            chunks = Reblocked(
                unit.states.chunks(),
                unit.layout.shard_numel,
                unit.states.dtype_of(kind),
                functools.partial(unit.states.read_chunk, kind),
            )
            self._open = series, chunks
        return self._open[1].read(piece.in_shard, values).view(piece.sizes)


def _pack_foreign(optimizer: Adapted, unit: Unit) -> io.BytesIO:
    return _packed(
        f"the state of {unit.name}", dict(zip(unit.names, optimizer.unit_states(unit), strict=True))
    )


def _packed(what: str, content: Any) -> io.BytesIO:
    """`content` as torch.save writes it; raises `CheckpointError` for what could not be read again
    without running its code."""
    stream = io.BytesIO()
    try:
        torch.save(content, stream)
        read_item(stream.getvalue())
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{what} may have numbers, texts and tensors in dicts, lists and tuples only: {reason}"
        ) from error
    return stream


class WriteInstructions(NamedTuple):
    """What the first rank tells each rank to write, besides its items."""

    name: str
    stamp: Stamp


class Written(NamedTuple):
    """An item that lies in its file."""

    address: MetadataIndex
    place: ItemPlace


class CheckpointWriter(FileSystemWriter):
    """Writes beside the directory, and gives what is whole its name."""

    def __init__(self, directory: Path, state: EngineState) -> None:
        self._directory = directory
        self._partial = sibling(directory, "partial")
        self._old = sibling(directory, "old")
        self._state = state
        self._stamp = Stamp()  # on the first rank, as soon as all have planned
        self._absent = frozenset[str]()
        self._held: int | None = None  # the descriptor that tells others of this save
        super().__init__(self._partial)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing: the first rank makes the directory."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the first rank, before any writes: make the directory, after saves that were cut off
        are cleaned up."""
        with in_words(f"{self._directory} cannot be written"):
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
            for left in (self._old, self._partial):
                if left.exists():
                    shutil.rmtree(left)
            self._partial.mkdir(parents=True)
            self._held = hold(self._partial)
            self._stamp = Stamp(self._state.run, uuid.uuid4().hex, self._state.updater.posted_steps)
            self._absent = self._state.absent()
        shares = [
            WriteInstructions(f"__{rank}_0.distcp", self._stamp) for rank in range(len(plans))
        ]
        return [
            replace(plan, storage_data=share) for plan, share in zip(plans, shares, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write this rank's file, and make sure that it is on the drive: a head, and the items
        without a gap."""
        share: WriteInstructions = plan.storage_data
        written: list[Written] = []
        path = self._partial / share.name
        with (
            in_words(f"{self._directory} cannot be written"),
            self.fs.create_stream(path, "xb") as stream,
        ):
            stream.write(share.stamp.head(share.name))
            for item in sorted(plan.items, key=lambda item: item.type != WriteItemType.BYTE_IO):
                begin, digested = stream.tell(), Digested(stream)
                _write(planner.resolve_data(item), digested)
                chunk = None if item.tensor_data is None else item.tensor_data.chunk
                sizes = None if chunk is None else tuple(chunk.sizes)
                place = ItemPlace(
                    share.name, begin, stream.tell() - begin, sizes, digested.sha256.hexdigest()
                )
                written.append(Written(item.index, place))
            stream.flush()
            os.fsync(stream.fileno())
        future: Future[Any] = Future()
        future.set_result(written)
        return future

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """On the first rank, when all have written: complete the checkpoint and put it in its
        place."""
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
            self._write_manifest(metadata, places)
            make_durable(self._partial)
            if self._directory.exists():
                self._directory.rename(self._old)
            self._partial.rename(self._directory)
            make_durable(self._directory.parent)
            shutil.rmtree(self._old, ignore_errors=True)  # else the next save does it

    def give_up(self) -> None:
        """Remove what was written; on other ranks than the first nothing."""
        if self._held is not None:
            shutil.rmtree(self._partial, ignore_errors=True)

    def close(self) -> None:
        """The save has ended, well or not."""
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


class Digested:
    """Writes to `stream`, and digests what it writes."""

    def __init__(self, stream: io.IOBase) -> None:
        self._stream, self.sha256 = stream, hashlib.sha256()

    def write(self, data: Any) -> int:
        """All of `data`, bytes of any kind."""
        self.sha256.update(data)
        return int(self._stream.write(data))

    def flush(self) -> None:
        """As torch.save asks for."""
        self._stream.flush()


def _write(content: torch.Tensor | io.BytesIO, stream: Digested) -> None:
    """`content` as DCP's readers expect it."""
    if isinstance(content, io.BytesIO):
        stream.write(content.getbuffer())
        return
    tensor = content.detach().cpu()
    # torch.save would write all of what it is a part of
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()
    torch.save(tensor, stream)  # type: ignore[arg-type]  # it needs nothing else of a file


def _is_empty(directory: Path) -> bool:
    return directory.is_dir() and not any(directory.iterdir())
