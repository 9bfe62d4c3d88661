"""Facts of a unit: what never changes once the model is divided into units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from infinity.config import Config
from infinity.placement.demand import UnitShape
from infinity.sharding import collectives
from infinity.sharding.layout import FlatLayout, LocalPart, Overlap, TilePlace
from infinity.sharding.ranks import Ranks
from infinity.sharding.tensor_parallel import cut_along, local, part_of
from infinity.tiers.originals import FileExtent, FileSlice, StoredBytes


@dataclass(frozen=True, eq=False)
class UnitFacts:
    """What never changes of a unit. Parts of the unit take it in place of the unit.

    It holds no process group: a gloo group that lives until the interpreter ends may abort the
    process there (torch 2.13).
    """

    shape: UnitShape
    """What placement knows of the unit."""
    dtype: torch.dtype
    """That of the parameters."""
    gradient_dtype: torch.dtype
    """What gradients are kept and accumulated in."""
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    tiles: tuple[TilePlace | None, ...]
    """Where each parameter lies that is a tile of another one."""
    stored: tuple[StoredBytes, ...]
    """Where each parameter lies in files of the user, if these are the home of the unit."""
    parts: tuple[LocalPart, ...]
    """Where the elements that this rank lays out of each parameter lie in it."""
    counted: tuple[bool, ...]
    """Which parameters this rank speaks for where tensor parallel ranks sum up, or save: a
    parameter that all of them hold counts once."""
    layout: FlatLayout
    replicas: int
    """How many ranks hold the same shard."""
    is_alone: bool
    """Whether there is no other rank of any kind."""
    reduces_late: bool
    """Whether gradients stay whole until they are settled, as with stage 1."""
    device: torch.device
    """Where the parameters are for people, shown or not."""
    checked: bool
    """Whether a digest tells of every write to the parameters (`Tuning.poison`)."""
    algorithm: str
    only_runs: bool
    """Whether the model was wrapped for inference: it is not trainable, whatever `requires_grad` of
    its parameters says."""
    files: Path | None
    """Where state dicts are mapped from; None leaves that to `tempfile`."""
    spill: tuple[Path, ...]
    """Directories for states that have no block."""

    @classmethod
    def of(
        cls,
        shape: UnitShape,
        named: Sequence[tuple[str, nn.Parameter]],
        stored: Sequence[StoredBytes],
        tiles: Mapping[int, TilePlace],
        ranks: Ranks,
        device: torch.device,
        config: Config,
    ) -> UnitFacts:
        """Those of the `named` parameters of one dtype, all trainable or all frozen.

        `tiles` says of parameters, by their ids, of which others they are a part.
        """
        parameters = tuple(p for _, p in named)
        places = tuple(tiles.get(id(p)) for p in parameters)
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
            names=tuple(name for name, _ in named),
            parameters=parameters,
            tiles=places,
            stored=tuple(stored),
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
            spill=tuple(config.nvme) if config.optimizer == "nvme" else (),
        )

    @property
    def index(self) -> int:
        """The number of the unit in its engine."""
        return self.shape.index

    @property
    def name(self) -> str:
        """The name of the unit, for people."""
        return self.shape.name

    @property
    def trainable(self) -> bool:
        """Whether its parameters took gradients when the model was wrapped."""
        return self.shape.trainable

    @property
    def rank(self) -> int:
        """This rank's number among the shards."""
        return self.shape.rank

    @property
    def ranks(self) -> int:
        """How many data parallel ranks there are, each with a batch of its own."""
        return self.layout.ranks * self.replicas

    @property
    def shared(self) -> bool:
        """Whether this rank has a part of the unit only, so that it has to be gathered."""
        return self.layout.ranks > 1

    @property
    def reduces_each_turn(self) -> bool:
        """Whether the ranks reduce its gradients whenever its turn in a backward ends, and not when
        they are settled."""
        return self.ranks > 1 and not self.reduces_late

    @property
    def keys(self) -> tuple[str, ...]:
        """The name of each parameter in state dicts and checkpoints: of a tile, that of the whole
        weight."""
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
        """Bytes that this rank sends when its `shard` is gathered by all."""
        return shard.nbytes * (self.layout.ranks - 1)

    @property
    def end_in_shard(self) -> int:
        """The element of this rank's shard from which on there is only padding."""
        return self.layout.places[-1].end - self.rank * self.layout.shard_numel

    def whole_shape(self, index: int) -> tuple[int, ...]:
        """The shape of parameter `index`, or of the weight that it is a tile of."""
        tile = self.tiles[index]
        return tuple(self.parameters[index].shape) if tile is None else tile.shape

    def overlap(self, index: int) -> Overlap:
        """The part of parameter `index` in this rank's shard; its length may be 0."""
        return self.layout.overlap(index, self.rank)

    def shard_of(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of a flat buffer (numel,)."""
        return full.narrow(0, self.rank * self.layout.shard_numel, self.layout.shard_numel)

    def extent_in_files(self, nbytes: int) -> FileExtent | None:
        """Where this rank's shard, of `nbytes`, lies in files of the user, if it does."""
        if not self.stored:
            return None
        size, slices = self.dtype.itemsize, []
        for index, (file, offset, _) in enumerate(self.stored):
            overlap = self.overlap(index)
            first, length = overlap.in_parameter * size, overlap.length * size
            if length:
                slices.append(FileSlice(overlap.in_shard * size, length, file, offset + first))
        return FileExtent(slices, nbytes)
