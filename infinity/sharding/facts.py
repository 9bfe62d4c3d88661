"""Facts of a unit. They never change after the model is divided into units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from infinity.config import Config
from infinity.placement.demand import UnitShape
from infinity.placement.spec import Kind
from infinity.sharding import collectives
from infinity.sharding.layout import FlatLayout, LocalPart, Overlap, TilePlace
from infinity.sharding.ranks import Ranks
from infinity.sharding.tensor_parallel import cut_along, local, part_of
from infinity.tier import TIERS
from infinity.tiers.originals import FileExtent, FileSlice, StoredBytes


class UnitParameters(NamedTuple):
    """The parameters that form a unit: one dtype, all trainable or all frozen."""

    named: Sequence[tuple[str, nn.Parameter]]
    stored: Sequence[StoredBytes]
    """The place of each in the user's files; empty unless they are the unit's home."""
    tiles: Mapping[int, TilePlace]
    """The places of parameters that are tiles, by `id(parameter)`."""


@dataclass(frozen=True, eq=False)
class UnitFacts:
    """The constant facts of a unit. Parts of the unit take them instead of the unit.

    They hold no process group: a gloo group that lives until the interpreter exits may abort the
    process (torch 2.13).
    """

    shape: UnitShape
    """The unit as placement sees it."""
    dtype: torch.dtype
    """The dtype of the parameters."""
    gradient_dtype: torch.dtype
    """The dtype in which gradients are stored and accumulated."""
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    tiles: tuple[TilePlace | None, ...]
    """For each parameter that is a tile, its place in the whole weight."""
    stored: tuple[StoredBytes, ...]
    """The place of each parameter in the user's files; empty unless they are the unit's home."""
    parts: tuple[LocalPart, ...]
    """For each parameter, the part of the whole tensor that this rank lays out."""
    counted: tuple[bool, ...]
    """Whether this rank counts each parameter when tensor parallel ranks sum or save. A parameter
    that all of them hold counts on the first one only."""
    layout: FlatLayout
    replicas: int
    """The number of ranks that hold the same shard."""
    is_alone: bool
    """Whether this is the only rank."""
    reduces_late: bool
    """Whether gradients stay whole until they are settled, for example with stage 1."""
    device: torch.device
    """The device that the parameters report, shown or not."""
    checked: bool
    """Whether a digest detects every write to the parameters (`Tuning.poison`)."""
    algorithm: str
    only_runs: bool
    """Whether the model was wrapped for inference. Then it is not trainable, even if its parameters
    have `requires_grad`."""
    files: Path | None
    """The directory of mapped state dicts; None leaves the choice to `tempfile`."""
    spill: tuple[Path, ...]
    """Directories for states that have no block."""

    @classmethod
    def of(
        cls,
        shape: UnitShape,
        given: UnitParameters,
        ranks: Ranks,
        device: torch.device,
        config: Config,
    ) -> UnitFacts:
        """The facts of a unit of the `given` parameters."""
        parameters = tuple(p for _, p in given.named)
        places = tuple(given.tiles.get(id(p)) for p in parameters)
        parts = tuple(
            part_of(p) if tile is None else tile.part
            for p, tile in zip(parameters, places, strict=True)
        )
        dtype, late = getattr(torch, shape.format.name), shape.reduces_late(config)
        gradient_format = shape.gradient_format(config) if shape.trainable else shape.format
        first = collectives.rank(ranks.tensor) == 0
        return cls(
            shape=shape,
            dtype=dtype,
            gradient_dtype=getattr(torch, gradient_format.name),
            names=tuple(name for name, _ in given.named),
            parameters=parameters,
            tiles=places,
            stored=tuple(given.stored),
            parts=parts,
            counted=tuple(first or cut_along(p) is not None for p in parameters),
            layout=FlatLayout(
                [local(p).shape for p in parameters],
                shape.shards,
                [part.room for part in parts],
                dtype.itemsize,
            ),
            replicas=collectives.size(ranks.replicas),
            is_alone=not ranks.groups(),
            reduces_late=late,
            device=device,
            checked=config.tuning.poison,
            algorithm=config.algorithm,
            only_runs=config.inference,
            files=config.nvme[0] if config.nvme else None,
            spill=tuple(config.nvme) if TIERS[config.optimizer].is_drive else (),
        )

    @property
    def index(self) -> int:
        """The number of the unit in its engine."""
        return self.shape.index

    @property
    def name(self) -> str:
        """The name of the unit in messages."""
        return self.shape.name

    @property
    def trainable(self) -> bool:
        """Whether its parameters required gradients when the model was wrapped."""
        return self.shape.trainable

    @property
    def rank(self) -> int:
        """This rank's number among the shards."""
        return self.shape.rank

    @property
    def ranks(self) -> int:
        """The number of data parallel ranks. Each has its own batch."""
        return self.layout.ranks * self.replicas

    @property
    def shared(self) -> bool:
        """Whether this rank has only a part of the unit. Then a use gathers the unit."""
        return self.layout.ranks > 1

    @property
    def reduces_each_turn(self) -> bool:
        """Whether the ranks reduce its gradients at the end of each of its turns in a backward.
        Otherwise they reduce when the gradients are settled."""
        return self.ranks > 1 and not self.reduces_late

    @property
    def keys(self) -> tuple[str, ...]:
        """The name of each parameter in state dicts and checkpoints. A tile has the name of the
        whole weight."""
        return tuple(
            n if tile is None else tile.name for n, tile in zip(self.names, self.tiles, strict=True)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered unit."""
        return self.shape.nbytes

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of the gradients of the whole unit."""
        return self.layout.numel * self.gradient_dtype.itemsize

    def sent_bytes(self, shard: torch.Tensor) -> int:
        """Bytes that this rank sends when all ranks gather its `shard`."""
        return shard.nbytes * (self.layout.ranks - 1)

    @property
    def end_in_shard(self) -> int:
        """The end of the parameters, as an element of this rank's shard. Only padding follows."""
        return self.layout.places[-1].end - self.rank * self.layout.shard_numel

    def whole_shape(self, index: int) -> tuple[int, ...]:
        """The shape of parameter `index`; for a tile, the shape of the whole weight."""
        tile = self.tiles[index]
        return tuple(self.parameters[index].shape) if tile is None else tile.shape

    def overlap(self, index: int) -> Overlap:
        """The part of parameter `index` in this rank's shard; its length may be 0."""
        return self.layout.overlap(index, self.rank)

    def dtype_of(self, kind: Kind) -> torch.dtype:
        """The dtype in which the host reads and writes content of `kind`."""
        return {Kind.PARAM: self.dtype, Kind.GRAD: self.gradient_dtype}.get(kind, torch.float32)

    def share_of(self, index: int, values: torch.Tensor) -> torch.Tensor:
        """This rank's elements (n,) of `values`, the part of parameter `index` that tensor parallel
        ranks leave to it."""
        overlap = self.overlap(index)
        return values.reshape(-1)[overlap.in_parameter : overlap.in_parameter + overlap.length]

    def shard_of(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of a flat buffer (numel,)."""
        return full.narrow(0, self.rank * self.layout.shard_numel, self.layout.shard_numel)

    def extent_in_files(self, nbytes: int) -> FileExtent | None:
        """The place of this rank's shard, of `nbytes`, in the user's files; None if the files are
        not its home."""
        if not self.stored:
            return None
        size, slices = self.dtype.itemsize, []
        for index, (file, offset, _) in enumerate(self.stored):
            overlap = self.overlap(index)
            first, length = overlap.in_parameter * size, overlap.length * size
            if length:
                slices.append(FileSlice(overlap.in_shard * size, length, file, offset + first))
        return FileExtent(slices, nbytes)
