"""The content of a checkpoint, and its keys.

[Note: keys and files]
A checkpoint is a directory in the format of torch.distributed.checkpoint (DCP), so DCP's tools can
read it. Every tensor has a key:

| key | content |
|---|---|
| `model.<parameter>` | fp32 values of a trained parameter; a frozen one in its dtype |
| `model.<buffer>` | a buffer, in its dtype |
| `optimizer.<state>.<parameter>` | a state, by torch's name: bf16 if kept in bf16, else fp32 |

A load rounds the fp32 values to the dtype of the parameter. int8 moments are decoded, and encode to
the same bytes. Moments that no update has written are zeros. They have no tensor, and
`infinity.json` lists their keys.

Parameters and states are flat, (numel,), without padding, and cut at the ends of shards. So any
number of ranks can read a checkpoint of any other number. Tensor parallel ranks may cut another
dimension than the first. Then the tensor is a matrix: (product of the dimensions before the cut
one, product of the others). Each rank has some columns of it, cut into `boxes`. A load reads both
forms as either form.

Objects are `optimizer.<number>.<unit>` (states of a torch optimizer of one unit), `extra.<rank>`
(from the caller), and `infinity` (`header`, which describes the rest). They are read without
running code (`checkpoint/inert`).

There are three kinds of files. `infinity.json` lists the items with a digest of each
(`checkpoint/manifest`). `__<rank>_0.distcp` holds the items. `.metadata` is DCP's own index, which
DCP's tools need and this package does not read.

[Note: how much memory]
The size of the model and its units does not matter. A save holds the buffers of its file
(`checkpoint/data_file`). A load holds the items that it reads ahead, a piece if several items form
it, and a chunk of the store. With `infinity.adapt` both also hold the states of one unit.
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
    """The parts of an engine that form its state between two steps."""

    units: Sequence[Unit]
    buffers: Mapping[str, torch.Tensor]
    optimizers: Sequence[Optimizer]
    await_updates: Callable[[], None]
    """Returns when no update is in flight."""

    group: collectives.Group
    """The ranks that save or load together. They hold the model once."""

    updater: Updater
    """Counts the steps. With `update="delayed"` that count decides which update is applied late."""

    run: str
    """The id of the engine's run: 32 hexadecimal digits."""

    tied: Mapping[str, str] = {}
    """Maps each other name of a tied parameter to its name in the checkpoint."""

    trainable_only: bool = False
    """Whether frozen parameters are left out."""

    io_engine: str = "auto"
    """The native I/O engine, as in `Tuning.io_engine`."""

    replicas: collectives.Group = None
    """The ranks that hold the same states as this one. The first of them saves for all."""

    reader: StatesReader = LIVE
    """The source of a save."""

    @property
    def rank(self) -> int:
        """The number of this rank in `group`."""
        return collectives.rank(self.group)

    def series(self) -> list[Series]:
        """The states of all units."""
        kept = [
            Series(u, Kind.MASTER if Kind.MASTER in u.blocks else Kind.PARAM, ("model",))
            for u in self.units
            if u.facts.trainable or not self.trainable_only
        ]
        moments = [
            Series(unit, kind, ("optimizer", name))
            for optimizer in self.optimizers
            for unit in optimizer.units
            for name, kind in optimizer.rule.states.items()
            if kind in unit.blocks
        ]
        return kept + list(dict.fromkeys(moments))  # two optimizers may share a unit

    def is_zero(self, series: Series) -> bool:
        """Whether `series` is a moment that no update has written."""
        return series.is_moment and not self.reader.is_written(series.unit.blocks[series.kind])

    def foreign(self) -> Iterator[tuple[Adapted, Unit, tuple[str, ...]]]:
        """The units of torch optimizers, with the path of their states in the checkpoint."""
        for number, optimizer in enumerate(self.optimizers):
            if isinstance(optimizer, Adapted):
                for unit in optimizer.units:
                    yield optimizer, unit, ("optimizer", str(number), unit.facts.name)

    def header(self) -> dict[str, Any]:
        """The description of the checkpoint: `version`, the number of `ranks` of the save, the
        `shapes` under `model`, `tied` names, the names of `frozen` parameters that are left out,
        and the numbers of posted and skipped steps. For each optimizer: groups and counts
        (`Optimizer.header`), the `names` in its groups, and its `states`."""
        shapes = {
            name: list(unit.facts.whole_shape(number))
            for unit in self.units
            for number, name in enumerate(unit.facts.keys)
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
                    if self.trainable_only and not unit.facts.trainable
                    for name in unit.facts.keys
                )
            ),
            "posted_steps": posted,
            "skipped_steps": skipped,
            "optimizers": optimizers,
        }

    def keys_in(self, optimizer: Optimizer) -> list[list[str]]:
        """The key of each parameter, by group of `optimizer`. A weight in tiles appears once per
        tile."""
        known = {
            id(p): key
            for unit in self.units
            for p, key in zip(unit.facts.parameters, unit.facts.keys, strict=True)
        }
        return [[known[id(p)] for p in group["params"]] for group in optimizer.param_groups]

    def tiles_in(self, optimizer: Optimizer) -> list[TilePlace | None]:
        """The place of each parameter of `optimizer` in its weight, in the order of the groups.
        None for a parameter that is no tile."""
        known = {
            id(p): tile
            for unit in self.units
            for p, tile in zip(unit.facts.parameters, unit.facts.tiles, strict=True)
        }
        return [known[id(p)] for group in optimizer.param_groups for p in group["params"]]

    def absent(self) -> frozenset[str]:
        """The keys of moments that are zeros and so are not saved, for every parameter and every
        state of any optimizer. Of a weight in tiles, some tiles may be zeros."""
        kinds = {name for optimizer in self.optimizers for name in optimizer.rule.states}
        saved = {(s.prefix, s.unit) for s in self.series() if s.is_moment and not self.is_zero(s)}
        return frozenset(
            f"optimizer.{kind}.{name}"
            for unit in self.units
            for kind in kinds
            if (("optimizer", kind), unit) not in saved
            for name in unit.facts.keys
        )


def with_wholes(
    header: Mapping[str, Any],
    keys: Sequence[Sequence[str]],
    tiles: Sequence[TilePlace | None],
) -> dict[str, Any]:
    """Convert an `Optimizer.header` of parameters in tiles to a header of whole weights, and add
    their `names`. `keys` and `tiles` describe its parameters.

    If the tiles of a weight had different numbers of updates, `tile_steps` lists them as (begin,
    end, number) along the cut dimension. Its number in `steps` is then that of the first tile.
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
    """Convert the result of `with_wholes` to an `Optimizer.header` of parameters with these `keys`
    and `tiles`. The groups must be the same.

    Raises `CheckpointError` if rows of one parameter had different numbers of updates.
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
    """The number of updates of `tile` in the weight `key`. `tile` is None for the whole weight.
    Raises `CheckpointError` if there are several numbers."""
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
    """`header` with one group per entry of `keys`, with parameters numbered as in torch."""
    groups, begin = [], 0
    for group, members in zip(header["param_groups"], keys, strict=True):
        groups.append(group | {"params": list(range(begin, begin + len(members)))})
        begin += len(members)
    return {**header, "param_groups": groups}


def _states_of(optimizer: Optimizer) -> str:
    """The states of `optimizer`, as text. An optimizer with the same text can load them."""
    if isinstance(optimizer, Adapted):
        return f"those of torch's {optimizer.kind.__name__}"
    return (
        ", ".join(
            n
            for n, kind in optimizer.rule.states.items()
            if any(kind in u.blocks for u in optimizer.units)
        )
        or "none"
    )


class PieceCursor:
    """Reads the elements of a shard in rising order from pieces. Elements between pieces are zeros.

    `bring(piece)` returns the elements of a piece, flat. They are valid until the next call.
    """

    def __init__(
        self,
        pieces: Iterable[ShardPiece],
        dtype: torch.dtype,
        bring: Callable[[ShardPiece], torch.Tensor],
    ) -> None:
        self._pieces, self._bring = iter(pieces), bring
        self._joined = torch.empty(0, dtype=dtype)  # elements from several pieces
        self._begin = self._end = 0  # of the piece in `_values`
        self._values = self._joined

    def read(self, begin: int, end: int) -> torch.Tensor:
        """The elements [begin, end), valid until the next call. A range within one piece is not
        copied."""
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
        """Move to the next piece. Returns False if there is none."""
        piece = next(self._pieces, None)
        if piece is not None:
            self._begin, self._end = piece.in_shard, piece.in_shard + piece.length
            self._values = self._bring(piece)
        return piece is not None


@contextmanager
def in_words(what: str) -> Iterator[None]:
    """Turn an exception inside into a `CheckpointError` that begins with `what`, unless the engine
    was closed.

    This happens before DCP sends the error to other ranks. They cannot rebuild every exception, and
    would wait forever.
    """
    try:
        yield
    except (CheckpointError, EngineClosedError):
        raise
    except Exception as error:
        reason: BaseException | None = error
        # skip the exceptions that torch adds
        while reason is not None and not isinstance(reason, (OSError, InfinityError)):
            reason = reason.__cause__ or reason.__context__
        raise CheckpointError(f"{what}: {sentence(reason or error)}") from reason or error


@contextmanager
def one_error() -> Iterator[None]:
    """Raise the error of the first failed rank on every rank. DCP's own exception is no
    `Exception`."""
    try:
        yield
    except CheckpointException as failed:
        error = failed.failures[min(failed.failures)][0]
        if isinstance(error, InfinityError) or not isinstance(error, Exception):
            raise error from error.__cause__
        raise CheckpointError(str(error)) from error
