"""Reading a checkpoint.

[Note: before anything is changed]
What is wrong is found while the ranks agree on a plan: files that are missing or cut off, and other names, shapes, dtypes or
optimizers. Damage inside of a file shows when its piece is read, by a checksum, and then the engine ends.
"""

from __future__ import annotations

import enum
import functools
import io
import math
import pickle
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict
from torch.futures import Future

from infinity.checkpoint import state as layout
from infinity.checkpoint.state import HEADER, METADATA, VERSION, Piece, Reblocked, Series, State, in_words, one_error, sibling
from infinity.errors import CheckpointError
from infinity.tiers.block import Kind


def load(state: State, directory: Path) -> dict[str, Any]:
    """Fill `state` from `directory`; all ranks call it. Returns the `extra` of this rank's `save`, or if the number of ranks has
    changed that of the first rank.

    Raises `CheckpointError`; the engine is then as it was, or, if something was changed, cannot go on.
    """
    reader = Reader(directory)
    planner = Loading(state, reader)
    try:
        with one_error(), warnings.catch_warnings(), torch.no_grad():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load_state_dict({}, storage_reader=reader, planner=planner, process_group=state.group, no_dist=state.group is None)
    except BaseException as error:
        if planner.begun:
            state.units[0].store.fail(error)
        raise
    return planner.extra


class Unpickler(pickle.Unpickler):
    """Makes what DCP's metadata consist of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """The type `name`; raises `UnpicklingError` for all others."""
        if (module, name) == ("builtins", "getattr"):
            return _member
        found = None
        if module in ("torch", "torch.serialization", metadata.__name__, filesystem.__name__, "pathlib", "pathlib._local"):
            found = super().find_class(module, name)
        if isinstance(found, torch.dtype) or found in (torch.Size, torch.serialization._get_layout):
            return found
        if isinstance(found, type) and module not in ("torch", "torch.serialization"):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} does not belong there")


def _member(kind: Any, name: str) -> Any:
    """What stands for `getattr`, by which Python before 3.11.4 pickles members of an enumeration."""
    if isinstance(kind, enum.EnumMeta):
        return kind[name]
    raise pickle.UnpicklingError(f"{kind!r} is no enumeration")


class Reader(FileSystemReader):
    """Reads tensors and objects of a checkpoint one by one, and checks their checksums."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory = directory
        self.metadata = Metadata({})

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Nothing: what goes wrong here DCP would log, and go on."""
        return Metadata({})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Read the metadata, and see that every file is as long as they say."""
        with in_words(f"{self.directory} cannot be loaded"):
            old = sibling(self.directory, "old")
            self.path = old if old.exists() and not self.directory.exists() else self.directory
            if not self.path.is_dir():
                raise CheckpointError(f"{self.directory} is no checkpoint: there is no such directory")
            if not (self.path / METADATA).is_file():
                raise CheckpointError(f"{self.directory} is no checkpoint, or not a whole one: it has no file {METADATA}")
            lengths: dict[str, int] = {}
            try:
                self.metadata = Unpickler(io.BytesIO((self.path / METADATA).read_bytes())).load()
                self.storage_data = self.metadata.storage_data
                for info in self.storage_data.values():
                    lengths[info.relative_path] = max(lengths.get(info.relative_path, 0), info.offset + info.length)
            except Exception as error:
                raise CheckpointError(f"{self.path / METADATA} is damaged: {error}") from error
            for name, length in lengths.items():
                size = (self.path / name).stat().st_size if (self.path / name).is_file() else None
                if size is None or size < length:
                    there = "is missing" if size is None else f"is cut off: it has {size} of {length} bytes"
                    raise CheckpointError(f"{self.path / name} {there}; take an earlier checkpoint")

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Let the planner, a `Loading`, read in its order."""
        future: Future[None] = Future()
        future.set_result(planner.load(plan.items))  # type: ignore[attr-defined]
        return future

    def tensor(self, key: str) -> TensorStorageMetadata | None:
        """What is known of the tensor under `key`; None when there is none."""
        found = self.metadata.state_dict_metadata.get(key)
        return found if isinstance(found, TensorStorageMetadata) else None

    def read(self, index: MetadataIndex) -> Any:
        """The tensor or object under `index`."""
        info = self.storage_data[index]
        with (self.path / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            content = io.BytesIO(file.read(info.length))
        try:
            with zipfile.ZipFile(content) as archive:
                if archive.testzip() is not None:
                    raise ValueError("a checksum is wrong")
            content.seek(0)
            return torch.load(content, map_location="cpu", weights_only=True)
        except Exception as error:
            where = f"{self.path / info.relative_path} is damaged in {index.fqn}"
            raise CheckpointError(f"{where}: {error}; take an earlier checkpoint") from error


class Loading(LoadPlanner):
    """Checks that a checkpoint fits `state`, and fills it. Lives for one load."""

    def __init__(self, state: State, reader: Reader) -> None:
        self._state, self._reader, self._where = state, reader, reader.directory
        self._saved: dict[str, Any] = {}  # the header
        self._series: list[Series] = []
        self._items: dict[MetadataIndex, list[ReadItem]] = {}  # by the piece that they fill
        self._pieces: dict[Series, list[Piece]] = {}
        self._boxes: dict[MetadataIndex, tuple[MetadataIndex, layout.Box | None]] = {}  # what is seen so of what is stored flat
        self.extra: dict[str, Any] = {}
        self.begun = False
        """Whether anything was changed."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Wait for updates."""
        with in_words(f"{self._where} cannot be loaded"):
            self._state.settle()
            used = [unit.name for unit in self._state.units if unit.blocks[Kind.PARAM].pins]
            if used:
                raise CheckpointError(f"{', '.join(used)} cannot be loaded inside of a forward or of infinity.gathered")

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads; raises `CheckpointError` when the checkpoint does not fit."""
        with in_words(f"{self._where} cannot be loaded"):
            if HEADER not in self._reader.metadata.state_dict_metadata:
                raise CheckpointError(f"{self._where} was not written by save_checkpoint of infinity")
            self._saved = self._reader.read(MetadataIndex(HEADER))
            if self._saved["version"] > VERSION:
                raise CheckpointError(f"{self._where} has version {self._saved['version']}; this infinity reads up to {VERSION}")
            here = self._state.header()
            self._check_shapes(here["shapes"])
            self._check_optimizers(here["optimizers"])
            items = [item for series in self._state.series() for item in self._items_of(series)]
            rank = self._state.rank if self._saved["ranks"] == here["ranks"] else 0
            self.extra = self._reader.read(MetadataIndex(f"extra.{rank}"))
        return LoadPlan(items)

    def _check_shapes(self, here: dict[str, list[int]]) -> None:
        there = self._saved["shapes"]
        for name, shape in here.items():
            if name not in there:
                raise CheckpointError(f"{self._where} belongs to another model: it has no {name}")
            if there[name] != shape:
                raise CheckpointError(f"{self._where} belongs to another model: {name} has shape {there[name]}, here {shape}")
        for name in there:
            if name not in here:
                raise CheckpointError(f"{self._where} belongs to another model: it has {name}, which this one lacks")
        for name, buffer in self._state.buffers.items():
            self._check_dtype(f"model.{name}", buffer.dtype)

    def _check_dtype(self, key: str, dtype: torch.dtype) -> None:
        found = self._reader.tensor(key)
        if found is not None and found.properties.dtype != dtype:
            raise CheckpointError(
                f"{self._where} does not fit: {key} is {found.properties.dtype} there, and {dtype} here (what is trained is "
                "saved in fp32, what is frozen in its own dtype)"
            )

    def _check_optimizers(self, here: list[dict[str, Any]]) -> None:
        there = self._saved["optimizers"]
        if here and len(here) != len(there):
            raise CheckpointError(f"{self._where} has the states of {len(there)} optimizers, and {len(here)} are to be loaded")
        for saved, mine in zip(there if here else [], here, strict=True):
            if saved["states"] != mine["states"]:
                raise CheckpointError(
                    f"{self._where} is of another optimizer: its states are {saved['states']}, and here {mine['states']}"
                )
            if saved["names"] != mine["names"]:
                counts = [[len(names) for names in header["names"]] for header in (saved, mine)]
                raise CheckpointError(
                    f"{self._where} has other parameter groups, of {counts[0]} parameters, and here of {counts[1]}; "
                    "they must be of the same parameters in the same order"
                )

    def _items_of(self, series: Series) -> list[ReadItem]:
        """The reads that fill `series`; none for moments that are zeros."""
        items: list[ReadItem] = []
        keys = [".".join((*series.prefix, name)) for name in series.unit.names]
        if not series.is_moment or any(self._reader.tensor(key) for key in keys):  # also where no part of it is on this rank
            self._series.append(series)
        for number, key in enumerate(keys):
            found = self._reader.tensor(key)
            if series.is_moment and found is None:
                continue
            if not series.is_moment:
                self._check_dtype(key, series.dtype)
            pieces, found = self._matched(series, number, found)
            reads = create_read_items_for_chunk_list(key, found, [piece.chunk for piece in pieces]) if found else []
            if sum(math.prod(item.lengths) for item in reads) != sum(piece.length for piece in pieces):
                raise CheckpointError(f"{self._where} is not whole: there is not all of {key}")
            self._pieces.setdefault(series, []).extend(pieces)
            items += reads
        return items

    def _matched(
        self, series: Series, number: int, found: TensorStorageMetadata | None
    ) -> tuple[list[Piece], TensorStorageMetadata | None]:
        """What this rank needs of parameter `number`, and what the checkpoint has of it, as parts of tensors of one shape."""
        size = series.size(number)
        if found is None or len(size) == 1 or found.size == size:
            return list(series.pieces(number, size if found is None else found.size)), found
        if len(found.size) > 1:
            raise CheckpointError(
                f"{self._where} has {series.unit.names[number]} cut along another dimension than it is here, by tensor parallel "
                "ranks; load it without tensor parallelism, or with that with which it was saved"
            )
        chunks = []
        for chunk in found.chunks:
            for box in layout.boxes(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0], size[-1]):
                offsets, sizes = torch.Size((box.row, box.column)), torch.Size((box.rows, box.columns))
                chunks.append(ChunkStorageMetadata(offsets, sizes))
                key = ".".join((*series.prefix, series.unit.names[number]))
                self._boxes[MetadataIndex(key, offsets)] = (MetadataIndex(key, chunk.offsets), box)
        return list(series.pieces(number, size)), TensorStorageMetadata(found.properties, size, chunks)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to agree on."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return central_plan

    def load(self, items: Sequence[ReadItem]) -> None:
        """Fill the engine by `items`, the local plan."""
        self.begun = True
        state, reader = self._state, self._reader
        for item in items:
            self._items.setdefault(item.dest_index, []).append(item)
        with in_words(f"{self._where} cannot be loaded"):
            for unit in state.units:
                unit.gradients.clear()
            for header, optimizer in zip(self._saved["optimizers"] if state.optimizers else [], state.optimizers, strict=True):
                optimizer.load_header(header)
            for series in self._series:
                self._fill(series)
            for optimizer, unit, path in state.foreign():
                found = reader.read(MetadataIndex(".".join(path)))
                optimizer.load_unit_states(unit, [found[name] for name in unit.names])
            for name, buffer in state.buffers.items():
                buffer.copy_(reader.read(MetadataIndex(f"model.{name}", [0] * buffer.ndim)))

    def _fill(self, series: Series) -> None:
        """In chunks of the store, out of pieces that are cut at other places."""
        unit, end, dtype = series.unit, series.unit.layout.shard_numel, series.unit.dtype_of(series.kind)
        fill = functools.partial(self._fill_window, self._pieces.get(series, []))
        windows = Reblocked(range(0, end, layout.PIECE), end, dtype, fill)
        chunk = torch.empty(unit.store.chunk_elements, dtype=dtype)
        unit.write_chunks(series.kind, lambda begin, end: windows.read(begin, chunk[: end - begin]))

    def _fill_window(self, pieces: Sequence[Piece], begin: int, values: torch.Tensor) -> None:
        """`values` is the shard from `begin` on, with zeros between the parameters; no piece lies across an end of it."""
        values.zero_()
        for piece in pieces:
            inside = begin <= piece.in_shard < begin + values.numel()
            for item in self._items.get(piece.address, ()) if inside else ():
                target = values[piece.in_shard - begin :][: piece.length].view(piece.sizes)
                found = self._read(item.storage_index)
                target[_slices(item.dest_offsets, item.lengths)] = found[_slices(item.storage_offsets, item.lengths)]

    def _read(self, index: MetadataIndex) -> torch.Tensor:
        """A tensor of the checkpoint, or a box of one."""
        stored, box = self._boxes.get(index, (index, None))
        found: torch.Tensor = self._reader.read(stored)
        return found if box is None else found[box.number :][: box.rows * box.columns].view(box.rows, box.columns)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never called, for `Reader.read_data` calls `load`."""
        raise NotImplementedError

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Never called, for `Reader.read_data` calls `load`."""
        raise NotImplementedError

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Never called, for `Reader.read_data` calls `load`."""
        raise NotImplementedError


def _slices(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + length) for at, length in zip(offsets, lengths, strict=True))
