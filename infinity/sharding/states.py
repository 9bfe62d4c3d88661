"""The content of the blocks of a unit, on the host.

Code that saves, loads or shows content comes here. An update does not: the pipeline checks chunks
out itself.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType

import torch

from infinity.device import copy_alone
from infinity.errors import ShardedParameterError
from infinity.placement.spec import SPLIT, Kind
from infinity.sharding import codec, collectives
from infinity.sharding.facts import UnitFacts
from infinity.sharding.posted import Contribution
from infinity.sharding.ranks import Among
from infinity.sharding.services import UnitServices
from infinity.tiers.access import Checkout
from infinity.tiers.block import Block
from infinity.tiers.staging import ChunkRequest
from infinity.tiers.store import Store


class States:
    """Reads and replaces the parameters, gradients, masters and moments of one unit.

    For the thread that runs the model. It reads and writes while no update of the unit is under way
    (`Updates.drain`). `await_gradients` returns when all gradients that were reduced so far are at
    home. `outdate` is called when parameters are replaced.
    """

    def __init__(
        self,
        facts: UnitFacts,
        blocks: Mapping[Kind, Block],
        services: UnitServices,
        await_gradients: Callable[[], object],
        outdate: Callable[[], object],
    ) -> None:
        self.facts, self._blocks, self._store = facts, blocks, services.store
        self._listeners, self._exchange = services.listeners, services.exchange
        self._await_gradients, self._outdate = await_gradients, outdate
        self._rewrites = 0
        self._replaced: dict[tuple[Kind, int], int] = {}

    def chunks(self) -> Sequence[int]:
        """The first element of every chunk of this rank's shard."""
        return self._store.staging.chunks(self._blocks[Kind.PARAM])

    def read(self, kind: Kind) -> torch.Tensor:
        """A copy of this rank's shard of `kind` on the host: (shard_numel,), of
        `UnitFacts.dtype_of(kind)`.

        A master that was never written is the parameter, widened.
        """
        shard = torch.empty(self.facts.layout.shard_numel, dtype=self.facts.dtype_of(kind))
        for begin, end in self.bounds():
            self.read_chunk(kind, begin, shard[begin:end])
        return shard

    def read_chunk(self, kind: Kind, begin: int, values: torch.Tensor) -> None:
        """Fill `values`, of `UnitFacts.dtype_of(kind)`, with the chunk of `kind` from element
        `begin` on."""
        if kind is Kind.GRAD:
            self._await_gradients()
        source = self.source_of(kind)
        with self._checked_out(self.blocks_of(source), begin, load=True) as tensors:
            self.decode(source, tensors, 0, values)

    def source_of(self, kind: Kind) -> Kind:
        """The kind with the content of `kind`: a master that was never written is the parameter."""
        unwritten = kind is Kind.MASTER and not self._blocks[kind].written
        return Kind.PARAM if unwritten else kind

    def blocks_of(self, source: Kind) -> list[Block]:
        """The blocks whose chunks `decode` takes."""
        block = self._blocks[source]
        return [self._blocks[Kind.PARAM], block] if block.format is SPLIT else [block]

    def decode(
        self, source: Kind, tensors: Sequence[torch.Tensor], first: int, values: torch.Tensor
    ) -> None:
        """Fill `values` with elements of a chunk of the blocks of `source` (see `source_of`), from
        its element `first` on. Any thread may call it.

        `values` has the `UnitFacts.dtype_of` the wanted kind, or bf16 for a moment that is kept in
        bf16.
        """
        form = self._blocks[source].format
        if source in (Kind.PARAM, Kind.GRAD):
            elements = tensors[0].view(self.facts.dtype_of(source))
            copy_alone(values, elements[first:][: values.numel()])
        elif source is Kind.MASTER:
            codec.decode_master(form, tensors, values, first)
        else:
            codec.decode_moment(form, source, tensors[0], values, first)

    def write(self, kind: Kind, shard: torch.Tensor) -> None:
        """Replace this rank's shard of `kind` by `shard` (shard_numel,) on the host, of
        `UnitFacts.dtype_of(kind)`.

        A master takes its parameter along, which is the master rounded. After a failure a part of
        the content is new, so all later calls of the engine raise `EngineClosedError`.
        """
        self.write_chunks(kind, lambda begin, end: shard[begin:end])

    def write_chunks(self, kind: Kind, content: Callable[[int, int], torch.Tensor]) -> None:
        """Like `write`, chunk by chunk: `content(begin, end)` gives these elements of the shard."""
        blocks = self.begin_rewrite(kind)
        try:
            for begin, end in self.bounds():
                values = content(begin, end)
                with self._checked_out(blocks, begin, load=False) as tensors:
                    self.encode(kind, values, tensors)
        except BaseException as error:
            self._store.latch.fail(error)
            raise
        self._store.resident.end_update(blocks)

    def put(self, kind: Kind, index: int, part: torch.Tensor, caller: str) -> None:
        """Replace this rank's elements of one parameter by `part` (n,) on the host, as the method
        `part` gives them. A new parameter takes its master along. Waits for pending updates. The
        caller then calls `OnDevice.renew`, on every rank.

        Raises `ShardedParameterError`, which names the `caller`, inside of a forward, a backward or
        `infinity.gathered`.
        """
        self.check_unused(index, caller)
        if kind is Kind.PARAM and Kind.MASTER in self._blocks:
            kind = Kind.MASTER  # it takes the value along
        self._listeners.updates.drain()
        after = self.read(kind)
        overlap = self.facts.overlap(index)
        after[overlap.in_shard : overlap.in_shard + overlap.length] = part
        rewrites = self._rewrites
        self.write(kind, after)
        self._rewrites = rewrites  # the other parameters are as before
        self._replaced[kind, index] = self._replaced.get((kind, index), 0) + 1

    def mark(self, kind: Kind, index: int) -> tuple[int, int]:
        """A value that changes when `kind` of a parameter is replaced outside of a step."""
        return self._rewrites, self._replaced.get((kind, index), 0)

    def check_unused(self, index: int, caller: str) -> None:
        """Raise `ShardedParameterError`, which names the `caller` and parameter `index`, inside a
        forward, a backward or `infinity.gathered`."""
        self._listeners.border.end_interrupted(caller)
        if self._blocks[Kind.PARAM].copy.pins:
            raise ShardedParameterError(
                f"{caller}: {self.facts.names[index]} cannot be set inside of a forward, a "
                "backward or infinity.gathered of a wrapped model"
            )

    def bounds(self) -> list[tuple[int, int]]:
        """The first element of every chunk of this rank's shard, and the element after its last."""
        starts = self.chunks()
        return list(zip(starts, [*starts[1:], self.facts.layout.shard_numel], strict=True))

    def begin_rewrite(self, kind: Kind) -> list[Block]:
        """The blocks of `kind`. The caller rewrites all of them until `Residency.end_update`."""
        self._store.latch.check_awake()
        kinds = (Kind.PARAM, Kind.MASTER) if kind is Kind.MASTER else (kind,)
        blocks = [self._blocks[k] for k in kinds]
        self._listeners.updates.rollback(self.facts)
        self._listeners.updates.before_write(blocks)
        if Kind.PARAM in kinds:
            self._store.make_writable(self._blocks[Kind.PARAM])
            self._store.resident.begin_update(self._blocks[Kind.PARAM])
            self._outdate()  # other ranks write their parts, too
        self._rewrites += 1
        return blocks

    def encode(self, kind: Kind, values: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Write `values` to `tensors`, a chunk of the blocks of `kind` that is checked out."""
        form = self._blocks[kind].format
        if kind is Kind.MASTER:
            codec.encode_master(form, values, tensors[0].view(self.facts.dtype), tensors[1])
        elif kind in (Kind.PARAM, Kind.GRAD):
            copy_alone(tensors[0].view(self.facts.dtype_of(kind)), values)
        else:
            codec.encode_moment(form, kind, values, tensors[0])

    def restart(self, kind: Kind, positions: Sequence[int]) -> None:
        """Restart the states of `kind` of these parameters: a moment becomes zeros, a master the
        parameter. The states of other parameters stay."""

        def content(begin: int, end: int) -> torch.Tensor:
            values = torch.empty(end - begin, dtype=self.facts.dtype_of(kind))
            fresh = torch.zeros(end - begin, dtype=self.facts.dtype)
            self.read_chunk(kind, begin, values)
            if kind is Kind.MASTER:
                self.read_chunk(Kind.PARAM, begin, fresh)
            self.copy_parameters(positions, begin, fresh, values)
            return values

        if self._blocks[kind].written:
            self.write_chunks(kind, content)

    def copy_parameters(
        self, positions: Sequence[int], begin: int, source: torch.Tensor, target: torch.Tensor
    ) -> None:
        """Copy the elements of these parameters from `source` to `target`, two versions of the
        chunk from element `begin` of the shard on."""
        for position in positions:
            overlap = self.facts.overlap(position)
            low = max(overlap.in_shard, begin) - begin
            high = min(overlap.in_shard + overlap.length - begin, target.numel())
            if low < high:
                target[low:high].copy_(source[low:high])

    @contextmanager
    def _checked_out(
        self, blocks: Sequence[Block], begin: int, load: bool
    ) -> Iterator[list[torch.Tensor]]:
        """The chunks of these blocks from element `begin` on, uint8. Without `load` they are not
        read, and written at the end of the context."""
        chunks = self._store.staging.check_out(ChunkRequest(blocks, begin, blocks if load else ()))
        try:
            for chunk in chunks:
                chunk.wait()
            yield [chunk.tensor for chunk in chunks]
            if not load:
                for chunk in chunks:
                    chunk.commit()
        finally:
            with ExitStack() as stack:
                for chunk in chunks:
                    stack.callback(chunk.release)

    def part(self, kind: Kind, index: int) -> torch.Tensor:
        """Like `read`, for one parameter: this rank's elements, (n,). Reads only the chunks that
        have some of them."""
        overlap = self.facts.overlap(index)
        first, last = overlap.in_shard, overlap.in_shard + overlap.length
        found = torch.empty(overlap.length, dtype=self.facts.dtype_of(kind))
        for begin, end in self.bounds():
            low, high = max(begin, first), min(end, last)
            if low < high:
                chunk = torch.empty(end - begin, dtype=found.dtype)
                self.read_chunk(kind, begin, chunk)
                found[low - first : high - first] = chunk[low - begin : high - begin]
        return found

    def parameter(self, kind: Kind, index: int) -> torch.Tensor:
        """Like `gather`, for one parameter, in its shape."""
        place = self.facts.layout.places[index]
        if not self.facts.shared:
            return self.part(kind, index).view(place.shape)
        return self.gather(kind)[place.offset : place.end].view(place.shape)

    @property
    def are_in_files(self) -> bool:
        """Whether files of the user are still the home of the parameters."""
        return bool(self.facts.stored) and not self._blocks[Kind.PARAM].home.updates

    def in_files(self) -> list[torch.Tensor] | None:
        """The parameters, mapped from files of the user; None if these are not their home. Uses no
        memory, and no other rank."""
        facts = self.facts
        if not self.are_in_files:
            return None
        return [
            self._store.nvme.originals.mapped(stored, facts.dtype).view(place.shape)
            for stored, place in zip(facts.stored, facts.layout.places, strict=True)
        ]

    def gather(self, kind: Kind) -> torch.Tensor:
        """Like `read`, but the whole unit (numel,) from all ranks; every rank must call it."""
        shard = self.read(kind)
        exchange = self._exchange
        if exchange is None or not self.facts.shared:
            return shard
        full = torch.empty(self.facts.layout.numel, dtype=shard.dtype)
        join = functools.partial(
            collectives.all_gather_home, full, shard, exchange.ranks.shards, exchange.device
        )
        exchange.post(
            f"gather {kind.value} of",
            self.facts.name,
            Contribution(join, self.facts.sent_bytes(shard)),
            Among.SHARDS,
        ).wait()
        return full


class StateStream:
    """Replaces states of units, chunk by chunk, while earlier chunks are still being written.

    It is a context manager: at its end all chunks are written. After a failure a part of the
    content is new, so all later calls of the engine raise `EngineClosedError`. One thread uses it,
    and checks out no other chunk between `write` and `drain`.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        # Chunks on their way, and after the last chunk of a `write` its blocks.
        self._leaving: deque[tuple[list[Checkout], list[Block]]] = deque()

    def write(
        self, states: States, kind: Kind, content: Callable[[int, int], torch.Tensor]
    ) -> None:
        """Like `States.write_chunks`. `content` checks out no chunk."""
        blocks = states.begin_rewrite(kind)
        for begin, end in states.bounds():
            values = content(begin, end)
            chunks = self._check_out(ChunkRequest(blocks, begin))
            self._leaving.append((chunks, []))
            states.encode(kind, values, [chunk.tensor for chunk in chunks])
            for chunk in chunks:
                chunk.commit()
        self._leaving.append(([], blocks))

    def drain(self) -> None:
        """Return when all chunks are written."""
        while self._leaving:
            self._end_first()

    def _check_out(self, request: ChunkRequest) -> list[Checkout]:
        """Chunks for new content. Meanwhile earlier chunks are written, as many as there are
        slots."""
        while self._leaving:
            if all(chunk.committed() for chunk in self._leaving[0][0]):
                self._end_first()
                continue
            chunks = self._store.staging.try_check_out(request)
            if chunks is not None:
                return chunks
            self._end_first()
        return self._store.staging.check_out(request)

    def _end_first(self) -> None:
        chunks, blocks = self._leaving.popleft()
        with ExitStack() as stack:
            for chunk in chunks:
                stack.callback(chunk.release)
        self._store.resident.end_update(blocks)

    def __enter__(self) -> StateStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None:
                self._store.latch.fail(error)
            self.drain()
        except BaseException as failed:
            self._store.latch.fail(failed)
            with ExitStack() as stack:
                for _ in range(len(self._leaving)):
                    stack.callback(self._end_first)
            raise
