"""What a checkpoint has of an engine, and under which names.

[Note: what lies where]
A checkpoint is a directory in the format of torch.distributed.checkpoint (DCP), whose tools read
it. Every tensor has a key: `model.<parameter>`, the fp32 values of what is trained (its parameter
follows by rounding), what is frozen in its dtype; `model.<buffer>`;
`optimizer.<state>.<parameter>`, by torch's names of states. Parameters and states are flat,
(numel,), without padding, and cut where shards end, so any number of ranks reads what any other has
written. What tensor parallel ranks cut along another dimension than the first one is a matrix:
(product of the dimensions before that one, product of the others), of which each rank has some
columns, cut into `boxes`. Either is read where the other is wanted. Moments are in bf16 where they
are kept so, else in fp32: int8 is decoded, and encodes to the same bytes. Moments that no update
has written are zeros and have no tensor: `infinity.json` lists their keys. Objects are
`optimizer.<number>.<unit>`, what an optimizer of torch has of a unit, `extra.<rank>`, what the
caller gave, and `infinity`, which describes the rest (`header`). They are read without running code
(`checkpoint/inert`).

Three kinds of files: `infinity.json` lists the items with a digest of each (`checkpoint/manifest`).
`__<rank>_0.distcp` holds the items. `.metadata` is DCP's own index, which DCP's tools need and this
package does not read.

[Note: how much memory]
However large model and units are, a save holds the buffers of its file (`checkpoint/data_file`). A
load holds the items that it reads ahead, a piece where it is made of parts of items, and a chunk of
the store. With `infinity.adapt` they also hold the states of one unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.api import CheckpointException

from infinity.checkpoint import manifest
from infinity.checkpoint.pieces import ShardPiece
from infinity.checkpoint.readers import LiveStates, StatesReader
from infinity.checkpoint.series import Series
from infinity.device import copy_alone, zero_alone
from infinity.errors import CheckpointError, EngineClosedError, InfinityError, sentence
from infinity.optim.foreign import Adapted
from infinity.optim.optimizer import Optimizer
from infinity.optim.updater import Updater
from infinity.placement.spec import Kind
from infinity.sharding import collectives
from infinity.sharding.layout import TilePlace
from infinity.sharding.unit import Unit

LIVE = LiveStates()
HEADER = "infinity"


class EngineState(NamedTuple):
    """The parts of an engine that make its state, between two steps."""

    units: Sequence[Unit]
    buffers: Mapping[str, torch.Tensor]
    optimizers: Sequence[Optimizer]
    await_updates: Callable[[], None]
    """Returns when no update is under way."""

    group: collectives.Group
    """The ranks that save or load together: those that hold one whole of the model."""

    updater: Updater
    """Counts the steps: with `update="delayed"` their number decides which one is seen late."""

    run: str
    """What tells checkpoints of this engine from those of others: 32 hexadecimal digits."""

    tied: Mapping[str, str] = {}
    """Other names of tied parameters, and for each the name that the checkpoint has it under."""

    trainable_only: bool = False
    """Whether frozen parameters are left out."""

    io_engine: str = "auto"
    """Which native engine moves the files, as `Tuning.io_engine` says."""

    replicas: collectives.Group = None
    """The ranks that hold the same as this one; the first of them saves for all."""

    reader: StatesReader = LIVE
    """What a save reads."""

    @property
    def rank(self) -> int:
        """The number of this one among them."""
        return collectives.rank(self.group)

    def series(self) -> list[Series]:
        """The states of all units."""
        kept = [
            Series(u, Kind.MASTER if Kind.MASTER in u.blocks else Kind.PARAM, ("model",))
            for u in self.units
            if u.trainable or not self.trainable_only
        ]
        moments = [
            Series(unit, kind, ("optimizer", name))
            for optimizer in self.optimizers
            for unit in optimizer.units
            for name, kind in optimizer.states.items()
            if kind in unit.blocks
        ]
        return kept + list(dict.fromkeys(moments))  # optimizers may share a unit

    def is_zero(self, series: Series) -> bool:
        """Whether it is a moment that no update has written."""
        return series.is_moment and not self.reader.is_written(series.unit.blocks[series.kind])

    def foreign(self) -> Iterator[tuple[Adapted, Unit, tuple[str, ...]]]:
        """The units of optimizers of torch, and the path of what these have of each."""
        for number, optimizer in enumerate(self.optimizers):
            if isinstance(optimizer, Adapted):
                for unit in optimizer.units:
                    yield optimizer, unit, ("optimizer", str(number), unit.name)

    def header(self) -> dict[str, Any]:
        """A description of the rest: `version`, the number of `ranks` that wrote it, the `shapes`
        under `model`, other names of `tied` parameters, the names of `frozen` ones that are left
        out, and how many steps were made and skipped. For each optimizer: groups and counts
        (`Optimizer.header`), the `names` in its groups, and whose `states` it has.
        """
        shapes = {
            name: list(unit.facts.whole_shape(number))
            for unit in self.units
            for number, name in enumerate(unit.keys)
        }
        shapes |= {name: list(buffer.shape) for name, buffer in self.buffers.items()}
        optimizers = [
            with_wholes(
                self.reader.header(optimizer), self.keys_in(optimizer), self.tiles_in(optimizer)
            )
            | {"states": _states_of(optimizer)}
            for optimizer in self.optimizers
        ]
        posted, skipped = self.reader.counts(self.updater)
        return {
            "version": manifest.VERSION,
            "ranks": collectives.size(self.group),
            "shapes": shapes,
            "tied": dict(self.tied),
            "frozen": list(
                dict.fromkeys(
                    name
                    for unit in self.units
                    if self.trainable_only and not unit.trainable
                    for name in unit.keys
                )
            ),
            "posted_steps": posted,
            "skipped_steps": skipped,
            "optimizers": optimizers,
        }

    def keys_in(self, optimizer: Optimizer) -> list[list[str]]:
        """What each parameter in the groups of `optimizer` is called here; a weight in tiles once
        for each of them."""
        known = {
            id(p): key
            for unit in self.units
            for p, key in zip(unit.parameters, unit.keys, strict=True)
        }
        return [[known[id(p)] for p in group["params"]] for group in optimizer.param_groups]

    def tiles_in(self, optimizer: Optimizer) -> list[TilePlace | None]:
        """Where each parameter in the groups of `optimizer` lies that is a tile, one after the
        other."""
        known = {
            id(p): tile
            for unit in self.units
            for p, tile in zip(unit.parameters, unit.facts.tiles, strict=True)
        }
        return [known[id(p)] for group in optimizer.param_groups for p in group["params"]]

    def absent(self) -> frozenset[str]:
        """The keys of moments that are zeros, and so are not saved: of every parameter, for every
        state of any optimizer. Of a weight in tiles, they may be so in a part."""
        kinds = {name for optimizer in self.optimizers for name in optimizer.states}
        saved = {(s.prefix, s.unit) for s in self.series() if s.is_moment and not self.is_zero(s)}
        return frozenset(
            f"optimizer.{kind}.{name}"
            for unit in self.units
            for kind in kinds
            if (("optimizer", kind), unit) not in saved
            for name in unit.keys
        )


def with_wholes(
    header: Mapping[str, Any],
    keys: Sequence[Sequence[str]],
    tiles: Sequence[TilePlace | None],
) -> dict[str, Any]:
    """The `Optimizer.header` of parameters with these `keys`, which lie in `tiles`, as that of
    weights that are not in tiles, and their `names`.

    A weight whose tiles had different numbers of updates has these in `tile_steps`: a list of
    begin, end and number, along the dimension that is cut. Its number in `steps` is that of the
    first tile.
    """
    flat = [key for group in keys for key in group]
    steps = dict(zip(reversed(flat), reversed(header["steps"]), strict=True))
    ranges: dict[str, list[list[int]]] = {}
    for key, tile, count in zip(flat, tiles, header["steps"], strict=True):
        if tile is not None:
            ranges.setdefault(key, []).append([tile.begin, tile.end, count])
    names = [list(dict.fromkeys(group)) for group in keys]
    found = _regrouped(header, names) | {
        "steps": [steps[name] for group in names for name in group],
        "names": names,
    }
    uneven = {
        key: sorted(each) for key, each in ranges.items() if len({count for *_, count in each}) > 1
    }
    return found | {"tile_steps": uneven} if uneven else found


def with_tiles(
    header: Mapping[str, Any],
    keys: Sequence[Sequence[str]],
    tiles: Sequence[TilePlace | None],
) -> dict[str, Any]:
    """What `with_wholes` gave, as the `Optimizer.header` of parameters with these `keys`, which are
    in the same groups and lie in `tiles`.

    Raises `CheckpointError` where a tile, or a weight that is not in tiles here, has rows of
    different numbers of updates.
    """
    names = [name for group in header["names"] for name in group]
    steps = dict(zip(names, header["steps"], strict=True))
    uneven = header.get("tile_steps", {})
    flat = [key for group in keys for key in group]
    found = [
        _steps_within(key, uneven[key], tile) if key in uneven else steps[key]
        for key, tile in zip(flat, tiles, strict=True)
    ]
    return _regrouped(header, keys) | {"steps": found}


def _steps_within(key: str, ranges: Sequence[Sequence[int]], tile: TilePlace | None) -> int:
    """The one number of updates that a tile of the weight `key` had, or all of it for None."""
    found = sorted(
        {
            count
            for begin, end, count in ranges
            if tile is None or (begin < tile.end and tile.begin < end)
        }
    )
    if len(found) != 1:
        cuts = ", ".join(str(end) for _, end, _ in ranges[:-1])
        raise CheckpointError(
            f"parts of {key} had {' and '.join(map(str, found))} updates, and one step count per "
            f"parameter cannot say so; load it in the tiles that it was saved in, cut at {cuts}"
        )
    return found[0]


def _regrouped(header: Mapping[str, Any], keys: Sequence[Sequence[str]]) -> dict[str, Any]:
    """`header` with groups of so many parameters, numbered as torch does it."""
    groups, begin = [], 0
    for group, members in zip(header["param_groups"], keys, strict=True):
        groups.append(group | {"params": list(range(begin, begin + len(members)))})
        begin += len(members)
    return {**header, "param_groups": groups}


def _states_of(optimizer: Optimizer) -> str:
    """What must be the same for one optimizer to take over from another."""
    if isinstance(optimizer, Adapted):
        return f"those of torch's {optimizer.kind.__name__}"
    return (
        ", ".join(
            n
            for n, kind in optimizer.states.items()
            if any(kind in u.blocks for u in optimizer.units)
        )
        or "none"
    )


class PieceCursor:
    """Elements of a shard, asked for in rising order, that come in pieces; zeros between them.

    `bring(piece)` gives the elements of a piece, flat, valid until it is called again.
    """

    def __init__(
        self,
        pieces: Iterable[ShardPiece],
        dtype: torch.dtype,
        bring: Callable[[ShardPiece], torch.Tensor],
    ) -> None:
        self._pieces, self._bring = iter(pieces), bring
        self._joined = torch.empty(0, dtype=dtype)  # what lies in several pieces
        self._begin = self._end = 0  # of the piece in `_values`
        self._values = self._joined

    def read(self, begin: int, end: int) -> torch.Tensor:
        """The elements [begin, end), valid until the next call; of one piece without a copy."""
        if begin == self._end:
            self._advance()
        if self._begin <= begin and end <= self._end:
            return self._values[begin - self._begin : end - self._begin]
        if self._joined.numel() < end - begin:
            self._joined = self._joined.new_empty(end - begin)
        at = begin
        while at < end:
            if at >= self._end and not self._advance():
                zero_alone(self._joined[at - begin : end - begin])
                break
            first, stop = max(at, self._begin), min(end, self._end)
            zero_alone(self._joined[at - begin : min(first, end) - begin])
            if first < stop:
                source = self._values[first - self._begin : stop - self._begin]
                copy_alone(self._joined[first - begin : stop - begin], source)
            at = max(stop, min(first, end))
        return self._joined[: end - begin]

    def _advance(self) -> bool:
        """Go on to the next piece, if there is one."""
        piece = next(self._pieces, None)
        if piece is not None:
            self._begin, self._end = piece.in_shard, piece.in_shard + piece.length
            self._values = self._bring(piece)
        return piece is not None


@contextmanager
def in_words(what: str) -> Iterator[None]:
    """What goes wrong inside becomes a `CheckpointError` that begins with `what`, unless the engine
    was closed.

    Before DCP sends it to the other ranks: they could not make every error anew, and would wait for
    ever.
    """
    try:
        yield
    except (CheckpointError, EngineClosedError):
        raise
    except Exception as error:
        reason: BaseException | None = error
        # torch raises its own on top
        while reason is not None and not isinstance(reason, (OSError, InfinityError)):
            reason = reason.__cause__ or reason.__context__
        raise CheckpointError(f"{what}: {sentence(reason or error)}") from reason or error


@contextmanager
def one_error() -> Iterator[None]:
    """On every rank the error of the first one that has any, instead of DCP's exception, which is
    no `Exception`."""
    try:
        yield
    except CheckpointException as failed:
        error = failed.failures[min(failed.failures)][0]
        if isinstance(error, InfinityError) or not isinstance(error, Exception):
            raise error from error.__cause__
        raise CheckpointError(str(error)) from error
