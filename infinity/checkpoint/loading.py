"""Reads a checkpoint into an engine.

[Note: before anything is changed]
Errors are found while the ranks agree on a plan: a manifest with a wrong digest; files that are
missing, truncated or of another save; missing items; other names, shapes, dtypes or optimizers. The
digest of a tensor is compared later, when its piece is read. If it is wrong, the engine ends. To
check all digests first would read everything twice.

[Note: nothing runs]
See `checkpoint/inert`. The item of a tensor must be one tensor of the dtype and shape in the
manifest. Its bytes are used as they are, without reading a pickle.

[Note: at the speed of the drive]
The plan gives the items in the order in which they fill the engine. They are read ahead
(`checkpoint/data_file`). Chunks are written while the next chunks are filled.
"""

from __future__ import annotations

import io
import logging
import math
import os
import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict
from torch.futures import Future

from infinity.checkpoint import manifest
from infinity.checkpoint.data_file import ReadAhead
from infinity.checkpoint.digest import as_text, crc32c
from infinity.checkpoint.files import MANIFEST, open_plain, sibling
from infinity.checkpoint.frame import frame
from infinity.checkpoint.inert import read_item
from infinity.checkpoint.manifest import VERSION, ItemPlace, Manifest, Stamp
from infinity.checkpoint.pieces import Box, ShardPiece, boxes, pieces_of
from infinity.checkpoint.progress import CheckpointProgress, Told
from infinity.checkpoint.series import Series
from infinity.checkpoint.state import (
    HEADER,
    EngineState,
    PieceCursor,
    in_words,
    one_error,
    with_tiles,
)
from infinity.device import copy_alone
from infinity.errors import CheckpointError
from infinity.placement.spec import Kind
from infinity.quantities import format_bytes
from infinity.sharding.states import StateStream
from infinity.tiers.store import Store

log = logging.getLogger("infinity")

_FRAME_BYTES = 1 << 20  # more than any frame, which takes some kilobytes
_OF_DEEPSPEED = ("_model_states.pt", "_optim_states.pt")
_ALIGNMENT = 64  # of elements in their file, and so in memory


def load(
    state: EngineState, directory: Path, strict: bool = True, told: Told | None = None
) -> dict[str, Any]:
    """Fill `state` from `directory`. All ranks call it.

    Returns the `extra` that this rank saved, or that of rank 0 if the number of ranks has changed.
    Without `strict`, tensors that only the model or only the checkpoint has are left as they are.
    `told` receives the progress.

    Raises `CheckpointError`. The engine is then unchanged if the load had not begun to change it.
    Otherwise it cannot continue.
    """
    reader = CheckpointReader(directory)
    says = state.rank == 0
    progress = CheckpointProgress(
        f"loading {directory}" if says else "", f"loaded {directory}" if says else "", told
    )
    planner = Loading(state, reader, progress, strict)
    try:
        with one_error(), warnings.catch_warnings(), torch.no_grad():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load_state_dict(
                {},
                storage_reader=reader,
                planner=planner,
                process_group=state.group,
                no_dist=state.group is None,
            )
    except BaseException as error:
        if planner.begun:
            state.units[0].store.latch.fail(error)
        raise
    progress.end()
    return planner.extra


class CheckpointReader(FileSystemReader):
    """Reads tensors and objects of a checkpoint one by one, and compares their digests."""

    most_index_bytes = 1 << 30
    """The longest allowed `infinity.json`. A trillion parameters take about 200 MB."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory = directory
        self._there = directory  # or its sibling `.old`
        self.manifest = Manifest(VERSION, Stamp(), {}, {}, {}, frozenset())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Empty: DCP would log an error raised here and continue."""
        return Metadata({})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """See `open_files`."""
        self.open_files()

    def open_files(self) -> None:
        """Read the manifest, and check the presence, the length and the first bytes of every file.
        Raises `CheckpointError`."""
        with in_words(f"{self.directory} cannot be loaded"):
            old = sibling(self.directory, "old")
            self._there = old if old.exists() and not self.directory.exists() else self.directory
            if not self._there.is_dir():
                raise CheckpointError(
                    f"{self.directory} is no checkpoint: there is no such directory"
                )
            self.manifest = self._read_manifest()
            self.storage_data = dict(self.manifest.places)
            for name, length in self.manifest.files.items():
                self._check_file(self._there / name, length)

    def _read_manifest(self) -> Manifest:
        path = self._there / MANIFEST
        if not os.path.lexists(path):
            if any(each.name.endswith(_OF_DEEPSPEED) for each in path.parent.iterdir()):
                raise CheckpointError(
                    f"{self.directory} is a checkpoint of DeepSpeed, which is not read here; the "
                    "zero_to_fp32.py beside it, which needs DeepSpeed, writes its weights for "
                    "model.load_state_dict"
                )
            raise CheckpointError(
                f"{self.directory} is no checkpoint, or not a whole one: it has no file {MANIFEST}"
            )
        with open_plain(path) as file:
            # `read(n)` allocates n bytes, even for a shorter file.
            size = os.fstat(file.fileno()).st_size
            data = file.read(min(size, self.most_index_bytes) + 1)
        if len(data) > self.most_index_bytes:
            raise CheckpointError(
                f"{path} is damaged: it has more than {format_bytes(self.most_index_bytes)}; "
                "take an earlier checkpoint"
            )
        try:
            return manifest.decode(data)
        except CheckpointError as error:
            raise CheckpointError(f"{self.directory} cannot be loaded: {error}") from None
        except Exception as error:
            raise CheckpointError(
                f"{path} is damaged: {error}; take an earlier checkpoint"
            ) from error

    def _check_file(self, path: Path, length: int) -> None:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < length:
                raise CheckpointError(
                    f"{path} is cut off: it has {size} of {length} bytes; take an earlier "
                    "checkpoint"
                )
            if size > length:
                raise CheckpointError(
                    f"{path} is too long: it has {size} bytes instead of {length}; take an "
                    "earlier checkpoint"
                )
            head = self.manifest.stamp.head(path.name)
            if file.read(len(head)) != head:
                raise CheckpointError(
                    f"{path} is damaged at its start, or belongs to another save than "
                    f"{MANIFEST}; take an earlier checkpoint"
                )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Call `Loading.load`, which reads items in its own order."""
        future: Future[None] = Future()
        future.set_result(planner.load(plan.items))  # type: ignore[attr-defined]
        return future

    def tensor(self, key: str) -> TensorStorageMetadata | None:
        """The metadata of the tensor under `key`; None if there is none."""
        return self.manifest.tensors.get(key)

    def check(self, index: MetadataIndex) -> None:
        """Raise `CheckpointError` unless there is an item under `index`."""
        if index not in self.manifest.places:
            raise CheckpointError(f"{self.directory} is not whole: there is no {index.fqn}")

    def read(self, index: MetadataIndex) -> Any:
        """The tensor or object under `index`. Raises `CheckpointError` if it is missing or
        damaged."""
        self.check(index)
        place = self.manifest.places[index]
        with self._in_item(index):
            self._check_length(index)
            with open_plain(self._there / place.file) as file:
                file.seek(place.offset)
                shift = place.offset % _ALIGNMENT
                content = torch.empty(shift + place.length, dtype=torch.uint8)[shift:]
                if file.readinto(content.numpy()) < place.length:  # type: ignore[attr-defined]
                    raise ValueError("the file ends before it")
            return self._decode(index, content)

    def read_in_turn(
        self, indexes: Sequence[MetadataIndex], io_engine: str
    ) -> Generator[Any, None, None]:
        """Yield the tensor under each index, and read the next ones ahead. A tensor is valid until
        the next one is requested. Raises `CheckpointError` like `read`."""
        for index in dict.fromkeys(indexes):
            self.check(index)
            with self._in_item(index):
                self._check_length(index)
        places = [self.manifest.places[index] for index in indexes]
        longest = max((place.length for place in places), default=0)
        with closing(
            ReadAhead(places, longest, self._open_data, self._there, io_engine)
        ) as arriving:
            contents = iter(arriving)
            for index in indexes:
                with self._in_item(index):
                    found = self._decode(index, next(contents))
                yield found

    def _open_data(self, name: str) -> int:
        with open_plain(self._there / name) as file:
            return os.dup(file.fileno())

    @contextmanager
    def _in_item(self, index: MetadataIndex) -> Iterator[None]:
        """Turn an error inside into a `CheckpointError` that names the damaged item."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            path = self._there / self.manifest.places[index].file
            raise CheckpointError(
                f"{path} is damaged in {index.fqn}: {error}; take an earlier checkpoint"
            ) from error

    def _check_length(self, index: MetadataIndex) -> None:
        """Raise `ValueError` if an item has more bytes than its tensor can take."""
        place, tensor = self.manifest.places[index], self.tensor(index.fqn)
        if tensor is None or place.sizes is None:
            return
        most = math.prod(place.sizes) * tensor.properties.dtype.itemsize + _FRAME_BYTES
        if place.length > most:
            raise ValueError(f"it has {place.length} bytes, and at most {most} are possible")

    def _decode(self, index: MetadataIndex, content: torch.Tensor) -> Any:
        """The tensor or object in the bytes of an item. Raises an `Exception` if they are
        damaged."""
        place = self.manifest.places[index]
        known = self.tensor(index.fqn) if place.sizes is not None else None
        if as_text(crc32c(content)) != place.digest:
            raise ValueError("its digest is wrong")
        if known is not None:
            return _framed(content, place, known.properties.dtype)
        return read_item(content.numpy().tobytes())


def _framed(content: torch.Tensor, place: ItemPlace, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in an item, as a view. Raises `ValueError` if the frame is wrong."""
    sizes = place.sizes or ()
    around = frame(place.offset, dtype, sizes)
    begin, end = len(around.head), len(around.head) + around.nbytes
    if (
        len(content) != around.length
        or content[:begin].numpy().tobytes() != around.head
        or content[end:].numpy().tobytes() != around.tail
    ):
        raise ValueError(f"it is no tensor of {dtype} and of shape {sizes}")
    return content[begin:end].view(dtype).view(sizes)


class Fit:
    """A checkpoint that fits `state`, and the reads that fill it.

    Raises `CheckpointError` if it does not fit. Without `strict`, tensors that only the model or
    only the checkpoint has are left as they are.
    """

    def __init__(self, state: EngineState, reader: CheckpointReader, strict: bool) -> None:
        self._state, self._reader, self._where = state, reader, reader.directory
        self._strict = strict
        if MetadataIndex(HEADER) not in reader.manifest.places:
            raise CheckpointError(f"{self._where} was not written by save_checkpoint of infinity")
        self.saved: dict[str, Any] = reader.read(MetadataIndex(HEADER))
        """The header."""
        self.series: list[Series] = []
        self.pieces: dict[Series, list[ShardPiece]] = {}
        self.boxes: dict[MetadataIndex, tuple[MetadataIndex, Box | None]] = {}
        """Boxes of tensors that are stored flat: by index, the stored tensor and the box of it."""
        here = state.header()
        there = self.saved["shapes"]
        self.kept = frozenset(here["shapes"].keys() - there.keys()).union(
            self.saved.get("frozen", ())
        )
        """Names without values in the checkpoint."""
        self._check_shapes(here["shapes"])
        self._check_optimizers(here["optimizers"])
        series = self._in_checkpoint(state.series())
        self.items = [item for each in series for item in self._items_of(each)]
        for _, _, path in state.foreign():
            reader.check(MetadataIndex(".".join(path)))

    def warn(self) -> None:
        """Log the names that only the model or only the checkpoint has."""
        here = self._state.header()["shapes"]
        if kept := [name for name in here if name in self.kept]:
            log.warning("%s has no %s; the model keeps its own", self._where, ", ".join(kept))
        if unknown := [name for name in self.saved["shapes"] if name not in here]:
            log.warning("%s has %s, which this model lacks", self._where, ", ".join(unknown))

    def _check_shapes(self, here: dict[str, list[int]]) -> None:
        there = self.saved["shapes"]
        for name, shape in here.items():
            if self._strict and name not in there:
                raise CheckpointError(f"{self._where} belongs to another model: it has no {name}")
            if there.get(name, shape) != shape:
                raise CheckpointError(
                    f"{self._where} belongs to another model: {name} has shape "
                    f"{there[name]}, here {shape}"
                )
        for name in there if self._strict else ():
            if name not in here:
                raise CheckpointError(
                    f"{self._where} belongs to another model: it has {name}, which this one lacks"
                )
        for name, buffer in self._state.buffers.items():
            if name in there:
                self._check_dtype(f"model.{name}", buffer.dtype)
                self._reader.check(_address(name, buffer))

    def _in_checkpoint(self, series: Sequence[Series]) -> list[Series]:
        """The members of `series` that the checkpoint has. Frozen parameters may be missing, and
        keep their values."""
        found = []
        for each in series:
            missing = [] if each.is_moment else [n for n in each.unit.facts.keys if n in self.kept]
            partly = each.unit.facts.trainable or len(missing) < len(each.unit.facts.keys)
            if self._strict and missing and partly:
                raise CheckpointError(
                    f"{self._where} has no values of {missing[0]}, because it was saved with "
                    "trainable_only=True while that was frozen; freeze the same parameters, or "
                    "take a checkpoint of all"
                )
            if len(missing) < len(each.unit.facts.keys):
                found.append(each)
        return found

    def _check_dtype(self, key: str, dtype: torch.dtype) -> None:
        found = self._reader.tensor(key)
        if found is not None and found.properties.dtype != dtype:
            raise CheckpointError(
                f"{self._where} does not fit: {key} is {found.properties.dtype} there, and {dtype} "
                "here (trained parameters are saved in fp32, frozen ones in their own dtype)"
            )

    def _check_optimizers(self, here: list[dict[str, Any]]) -> None:
        there = self.saved["optimizers"]
        if here and len(here) != len(there):
            raise CheckpointError(
                f"{self._where} has the states of {len(there)} optimizers, and {len(here)} "
                "are to be loaded"
            )
        for saved, mine in zip(there if here else [], here, strict=True):
            if saved["states"] != mine["states"]:
                raise CheckpointError(
                    f"{self._where} is of another optimizer: its states are "
                    f"{saved['states']}, and here {mine['states']}"
                )
            if [set(names) for names in saved["names"]] != [set(names) for names in mine["names"]]:
                counts = [[len(names) for names in header["names"]] for header in (saved, mine)]
                raise CheckpointError(
                    f"{self._where} has other parameter groups, of {counts[0]} parameters, and "
                    f"here of {counts[1]}; they must be of the same parameters"
                )
        for saved, optimizer in zip(there if here else [], self._state.optimizers, strict=False):
            keys, tiles = self._state.keys_in(optimizer), self._state.tiles_in(optimizer)
            with_tiles(saved, keys, tiles)  # raises before anything is changed

    def _items_of(self, series: Series) -> list[ReadItem]:
        """The reads that fill `series`. Moments that are zeros and parameters that keep their
        values have none."""
        items: list[ReadItem] = []
        keys = [".".join((*series.prefix, name)) for name in series.unit.facts.keys]
        # Also if no part of it is on this rank.
        if not series.is_moment or any(self._reader.tensor(key) for key in keys):
            self.series.append(series)
        for number, key in enumerate(keys):
            if series.unit.facts.keys[number] in self.kept and not series.is_moment:
                continue
            found = self._reader.tensor(key)
            count = math.prod(self.saved["shapes"][series.unit.facts.keys[number]])
            may_lack = series.is_moment and key in self._reader.manifest.absent
            if series.is_moment and found is None:
                if count and not may_lack:
                    raise CheckpointError(f"{self._where} is not whole: there is no {key}")
                continue  # zeros, or no element
            if not series.is_moment:
                self._check_dtype(key, series.dtype)
            if found is not None and math.prod(found.size) != count:
                raise CheckpointError(
                    f"{self._where} is not whole: {key} has {math.prod(found.size)} of "
                    f"{count} elements"
                )
            pieces, found = self._matched(series, number, found)
            reads = (
                create_read_items_for_chunk_list(key, found, [piece.chunk for piece in pieces])
                if found
                else []
            )
            if _size(reads) != sum(piece.length for piece in pieces) and not may_lack:
                raise CheckpointError(f"{self._where} is not whole: there is not all of {key}")
            found_of = {item.dest_index for item in reads}
            self.pieces.setdefault(series, []).extend(p for p in pieces if p.address in found_of)
            items += reads
        return items

    def _matched(
        self, series: Series, number: int, found: TensorStorageMetadata | None
    ) -> tuple[list[ShardPiece], TensorStorageMetadata | None]:
        """The pieces of parameter `number` that this rank needs, and the stored tensor, both under
        one shape. The stored tensor is None if it is missing."""
        size = series.size(number)
        if found is None or len(size) == 1 or found.size == size:
            return list(pieces_of(series, number, size if found is None else found.size)), found
        if len(found.size) > 1:
            raise CheckpointError(
                f"{self._where} has {series.unit.facts.keys[number]} cut along another dimension "
                "than it is here, by tensor parallel ranks; load it without tensor parallelism, "
                "or with that with which it was saved"
            )
        chunks = []
        for chunk in found.chunks:
            for box in boxes(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0], size[-1]):
                offsets = torch.Size((box.row, box.column))
                sizes = torch.Size((box.rows, box.columns))
                chunks.append(ChunkStorageMetadata(offsets, sizes))
                key = ".".join((*series.prefix, series.unit.facts.keys[number]))
                self.boxes[MetadataIndex(key, offsets)] = (MetadataIndex(key, chunk.offsets), box)
        return list(pieces_of(series, number, size)), TensorStorageMetadata(
            found.properties, size, chunks
        )


class _Filler:
    """Fills the series of a `fit` from its `items`, which are read ahead."""

    def __init__(
        self,
        fit: Fit,
        items: Sequence[ReadItem],
        reader: CheckpointReader,
        progress: CheckpointProgress,
    ) -> None:
        self._fit, self._reader, self._progress = fit, reader, progress
        self._items: dict[MetadataIndex, list[ReadItem]] = {}  # by the address of the piece
        for item in items:
            self._items.setdefault(item.dest_index, []).append(item)

    def fill(self, io_engine: str, store: Store) -> None:
        """Fill all series, which are in `store`."""
        stored = [
            self._stored(item.storage_index)[0]
            for series in self._fit.series
            for piece in self._sorted(series)
            for item in self._items.get(piece.address, ())
        ]
        places = self._reader.manifest.places
        self._progress.expect(sum(places[index].length for index in stored))
        with (
            closing(self._reader.read_in_turn(stored, io_engine)) as arriving,
            StateStream(store) as stream,
        ):
            counted = self._counted(zip(stored, arriving, strict=True))
            for series in self._fit.series:
                self._fill(series, counted, stream)

    def _counted(self, arriving: Iterable[tuple[MetadataIndex, Any]]) -> Iterator[torch.Tensor]:
        for index, found in arriving:
            self._progress.add(self._reader.manifest.places[index].length)
            yield found

    def _sorted(self, series: Series) -> list[ShardPiece]:
        """The pieces that fill `series`, in their order in the shard."""
        return sorted(self._fit.pieces.get(series, ()), key=lambda piece: piece.in_shard)

    def _fill(self, series: Series, arriving: Iterator[torch.Tensor], stream: StateStream) -> None:
        """Fill `series` in chunks of the store. Pieces and chunks have different boundaries."""
        unit = series.unit
        dtype = unit.facts.dtype_of(series.kind)
        memory = torch.empty(0, dtype=dtype)

        def bring(piece: ShardPiece) -> torch.Tensor:
            nonlocal memory
            items = self._items[piece.address]
            for number, item in enumerate(items):
                found = self._part(item, next(arriving))
                is_all = found.numel() == piece.length and found.dtype == dtype
                if is_all and found.is_contiguous():
                    return found.view(-1)  # without a copy
                if memory.numel() < piece.length:
                    memory = memory.new_empty(piece.length)
                if not number and _size(items) < piece.length:
                    memory[: piece.length] = 0  # elements that were not saved
                target = memory[: piece.length].view(piece.sizes)
                _copy(target[_slices(item.dest_offsets, item.lengths)], found)
            return memory[: piece.length]

        cursor = PieceCursor(self._sorted(series), dtype, bring)
        names = () if series.is_moment else unit.facts.keys
        kept = [number for number, name in enumerate(names) if name in self._fit.kept]

        def patched(begin: int, end: int) -> torch.Tensor:
            values = torch.empty(end - begin, dtype=dtype)
            copy_alone(values, cursor.read(begin, end))
            present = torch.empty_like(values)
            unit.states.read_chunk(series.kind, begin, present)
            unit.states.copy_parameters(kept, begin, present, values)
            return values

        if kept:
            stream.drain()
            unit.states.write_chunks(series.kind, patched)
        else:
            stream.write(unit.states, series.kind, cursor.read)

    def _part(self, item: ReadItem, found: torch.Tensor) -> torch.Tensor:
        """The elements that `item` reads of a stored tensor, or of a box of it."""
        _, box = self._stored(item.storage_index)
        if box is not None:
            found = found[box.number :][: box.rows * box.columns].view(box.rows, box.columns)
        return found[_slices(item.storage_offsets, item.lengths)]

    def _stored(self, index: MetadataIndex) -> tuple[MetadataIndex, Box | None]:
        """The index of the stored tensor, and the box of it that `index` names."""
        return self._fit.boxes.get(index, (index, None))


class Loading(LoadPlanner):
    """Fills `state` from a checkpoint that fits it. Lives for one load."""

    _fit: Fit

    def __init__(
        self,
        state: EngineState,
        reader: CheckpointReader,
        progress: CheckpointProgress,
        strict: bool = True,
    ) -> None:
        self._state, self._reader, self._where = state, reader, reader.directory
        self._progress, self._strict = progress, strict
        self.extra: dict[str, Any] = {}
        self.begun = False
        """Whether anything was changed."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Wait for updates. Raises `CheckpointError` if units are in use."""
        with in_words(f"{self._where} cannot be loaded"):
            self._state.await_updates()
            self._state.units[0].listeners.border.end_interrupted("a load")
            used = [
                unit.facts.name for unit in self._state.units if unit.blocks[Kind.PARAM].copy.pins
            ]
            if used:
                raise CheckpointError(
                    f"{', '.join(used)} cannot be loaded inside of a forward or of "
                    "infinity.gathered"
                )

    def create_local_plan(self) -> LoadPlan:
        """The items that this rank reads. Raises `CheckpointError` if the checkpoint does not
        fit."""
        with in_words(f"{self._where} cannot be loaded"):
            self._fit = Fit(self._state, self._reader, self._strict)
            ranks = self._state.header()["ranks"]
            rank = self._state.rank if self._fit.saved["ranks"] == ranks else 0
            self.extra = self._reader.read(MetadataIndex(f"extra.{rank}"))
            if self._state.rank == 0 and not self._strict:
                self._fit.warn()
        return LoadPlan(self._fit.items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return central_plan

    def load(self, items: Sequence[ReadItem]) -> None:
        """Fill the engine from `items`, the local plan."""
        self.begun = True
        state, reader, fit = self._state, self._reader, self._fit
        filler = _Filler(fit, items, reader, self._progress)
        with in_words(f"{self._where} cannot be loaded"):
            for unit in state.units:
                unit.gradients.clear()
            for header, optimizer in zip(
                fit.saved["optimizers"] if state.optimizers else [], state.optimizers, strict=True
            ):
                keys, tiles = state.keys_in(optimizer), state.tiles_in(optimizer)
                optimizer.load_header(with_tiles(header, keys, tiles))
            if state.optimizers:
                state.updater.posted_steps = fit.saved["posted_steps"]
                state.updater.skipped_steps = fit.saved["skipped_steps"]
            filler.fill(state.io_engine, state.units[0].store)
            for optimizer, unit, path in state.foreign():
                found = reader.read(MetadataIndex(".".join(path)))
                optimizer.load_unit_states(unit, [found[name] for name in unit.facts.names])
            for name, buffer in state.buffers.items():
                if name not in fit.kept:
                    buffer.copy_(reader.read(_address(name, buffer)))

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Not called, because `CheckpointReader.read_data` calls `load`."""
        raise NotImplementedError

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Not called, because `CheckpointReader.read_data` calls `load`."""
        raise NotImplementedError

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Not called, because `CheckpointReader.read_data` calls `load`."""
        raise NotImplementedError


def _size(items: Iterable[ReadItem]) -> int:
    """The number of elements that `items` read."""
    return sum(math.prod(item.lengths) for item in items)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype:
        copy_alone(target.view(-1), source.view(-1))
    else:
        target.copy_(source)


def _address(name: str, buffer: torch.Tensor) -> MetadataIndex:
    """The index of a buffer, which is saved in one piece."""
    return MetadataIndex(f"model.{name}", [0] * buffer.ndim)


def _slices(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + length) for at, length in zip(offsets, lengths, strict=True))
