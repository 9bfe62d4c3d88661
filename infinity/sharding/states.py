"""The blocks of a unit on the host: where an update finds them, and what they hold, for whoever
reads or replaces it.

Whoever saves, loads or shows content comes here. An update does not: the pipeline checks chunks
out itself.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Protocol

import torch

from infinity.device import copy_alone
from infinity.errors import ShardedParameterError
from infinity.placement.spec import SPLIT, Kind
from infinity.placement.traffic import is_rounded
from infinity.sharding import codec, collectives
from infinity.sharding.exchange import Exchange
from infinity.sharding.facts import UnitFacts
from infinity.tiers.access import Checkout
from infinity.tiers.block import Block
from infinity.tiers.staging import ChunkRequest
from infinity.tiers.store import Store


class StateListener(Protocol):
    """The object that states tell before and after they are replaced."""

    def await_gradients(self) -> None:
        """Return when all gradients that were reduced so far are at home."""

    def rollback(self) -> None:
        """Return when no speculative update of the unit is in flight, because its content
        changes."""

    def drain(self) -> None:
        """Return when no update is under way."""

    def before_write(self, blocks: Sequence[Block]) -> None:
        """Return when `blocks` may be rewritten."""

    def outdate(self) -> None:
        """The parameters change: copies and graphs have old ones."""

    def renew(self) -> None:
        """The parameters were replaced, on every rank."""

    def end_interrupted(self, caller: str) -> None:
        """End calls of the model that an exception cut off, for the function `caller`."""


class States:
    """The parameters, gradients, masters and moments of one unit, as the host sees them.

    For the thread that runs the model. It reads and writes while no update of the unit is under way
    (`Updates.drain`). `exchange` gathers shards of several ranks; it is None where this rank has
    the whole unit.
    """

    def __init__(
        self,
        facts: UnitFacts,
        blocks: Mapping[Kind, Block],
        store: Store,
        exchange: Exchange | None,
        listener: StateListener,
    ) -> None:
        self.facts, self._blocks, self._store = facts, blocks, store
        self._exchange, self._listener = exchange, listener
        self._rewrites = 0
        self._replaced: dict[tuple[Kind, int], int] = {}

    # What an update asks

    @property
    def is_rounded(self) -> bool:
        """Whether the parameters are nothing but their masters, rounded: then an update writes them
        and does not read them."""
        return is_rounded({kind: block.spec for kind, block in self._blocks.items()})

    @property
    def has_shadow(self) -> bool:
        """Whether all that an update rewrites has a shadow copy, but what is cached, so that it may
        be rolled back."""
        return all(
            block.home.has_shadow for kind, block in self._blocks.items() if kind is not Kind.GRAD
        )

    def is_free(self, left: int) -> bool:
        """Whether an update may write: what it overwrites is in no commit that is still needed.
        `left`: see `Home`."""
        return all(block.home.is_free(left) for block in self._blocks.values())

    def is_pinned(self, left: int) -> bool:
        """Whether an update would overwrite what a snapshot has yet to read. `left`: see `Home`."""
        return any(block.home.is_pinned(left) for block in self._blocks.values())

    @property
    def staged_from(self) -> int:
        """The first element of this rank's shard of which something has to be copied for an update:
        what is before is not."""
        return min(
            self._store.staging.staged_from(block, self.gpu_resident)
            for block in self._blocks.values()
        )

    @property
    def gpu_resident(self) -> bool:
        """Whether all of it is at home where the kernels of the compute device update it."""
        return all(self._store.staging.is_gpu_resident(block) for block in self._blocks.values())

    @property
    def rewritten_in_place_until(self) -> int:
        """The first element from which on all that an update rewrites has a shadow copy;
        `shard_numel` when there is none."""
        if not self.has_shadow:
            return self.facts.layout.shard_numel
        return max(
            block.cached_elements for kind, block in self._blocks.items() if kind is not Kind.GRAD
        )

    def update_chunks(self) -> Sequence[int]:
        """The first element of every chunk that an update takes at once."""
        return self._store.staging.chunks(self._blocks[Kind.PARAM], self.gpu_resident)

    # Whole content

    def chunks(self) -> Sequence[int]:
        """The first element of every chunk of this rank's shard."""
        return self._store.staging.chunks(self._blocks[Kind.PARAM])

    def _pieces(self, shard: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """The first element of every chunk, and its part of `shard` (shard_numel,)."""
        starts = self.chunks()
        return zip(starts, shard.tensor_split(starts[1:]), strict=True)

    def read(self, kind: Kind) -> torch.Tensor:
        """This rank's shard of `kind` on the host: (shard_numel,), fp32 for states, else in the
        dtype it is kept in. A copy.

        A master that was never written is the parameter, widened.
        """
        shard = torch.empty(self.facts.layout.shard_numel, dtype=self.dtype_of(kind))
        for begin, values in self._pieces(shard):
            self.read_chunk(kind, begin, values)
        return shard

    def read_chunk(self, kind: Kind, begin: int, values: torch.Tensor) -> None:
        """Fill `values`, of the dtype that `read` gives, with the chunk of `kind` from element
        `begin` on."""
        if kind is Kind.GRAD:
            self._listener.await_gradients()
        source = self.source_of(kind)
        with self._checked_out(self.blocks_of(source), begin, load=True) as tensors:
            self.decode(source, tensors, 0, values)

    def source_of(self, kind: Kind) -> Kind:
        """The kind that has the content of `kind`: a master that was never written is the
        parameter."""
        unwritten = kind is Kind.MASTER and not self._blocks[kind].written
        return Kind.PARAM if unwritten else kind

    def blocks_of(self, source: Kind) -> list[Block]:
        """The blocks that `decode` takes chunks of."""
        block = self._blocks[source]
        return [self._blocks[Kind.PARAM], block] if block.format is SPLIT else [block]

    def decode(
        self, source: Kind, tensors: Sequence[torch.Tensor], first: int, values: torch.Tensor
    ) -> None:
        """Fill `values` with elements of a chunk of the blocks of `source` (see `source_of`), from
        its element `first` on. Any thread may call it.

        `values` has the dtype that `read` gives of what is wanted, or bf16 for a moment that is
        kept in bf16.
        """
        form = self._blocks[source].format
        if source in (Kind.PARAM, Kind.GRAD):
            elements = tensors[0].view(self.dtype_of(source))
            copy_alone(values, elements[first:][: values.numel()])
        elif source is Kind.MASTER:
            codec.decode_master(form, tensors, values, first)
        else:
            codec.decode_moment(form, source, tensors[0], values, first)

    def write(self, kind: Kind, shard: torch.Tensor) -> None:
        """Replace this rank's shard of `kind` by `shard` (shard_numel,) on the host, of the dtype
        that `read` gives.

        A master takes its parameter along, which is the master rounded. When that fails the content
        is in part new: whoever uses the engine from then on gets `EngineClosedError`.
        """
        self.write_chunks(kind, lambda begin, end: shard[begin:end])

    def write_chunks(self, kind: Kind, content: Callable[[int, int], torch.Tensor]) -> None:
        """Like `write`, but of one chunk after the other: `content(begin, end)` gives these
        elements of the shard."""
        blocks = self.begin_rewrite(kind)
        self.note_rewrite()
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
        """Replace what this rank has of one parameter, as `part` gives it, by `part` (n,) on the
        host. A new parameter takes its master along. Waits for pending updates.

        Raises `ShardedParameterError`, which names the `caller`, inside of a forward, a backward or
        `infinity.gathered`.
        """
        self.check_unused(index, caller)
        if kind is Kind.PARAM and Kind.MASTER in self._blocks:
            kind = Kind.MASTER  # which takes the value along
        self._listener.drain()
        after = self.read(kind)
        overlap = self.facts.overlap(index)
        after[overlap.in_shard : overlap.in_shard + overlap.length] = part
        rewrites = self._rewrites
        self.write(kind, after)
        self._rewrites = rewrites  # the other parameters have what they had
        self._replaced[kind, index] = self._replaced.get((kind, index), 0) + 1
        self._listener.renew()

    def note_rewrite(self) -> None:
        """All of a kind is replaced, outside of a step."""
        self._rewrites += 1

    def mark(self, kind: Kind, index: int) -> tuple[int, int]:
        """Changes when `kind` of a parameter is replaced outside of a step."""
        return self._rewrites, self._replaced.get((kind, index), 0)

    def check_unused(self, index: int, caller: str) -> None:
        """Raise `ShardedParameterError`, which names the `caller` and parameter `index`, inside of
        a forward, a backward or `infinity.gathered`."""
        self._listener.end_interrupted(caller)
        if self._blocks[Kind.PARAM].copy.pins:
            raise ShardedParameterError(
                f"{caller}: {self.facts.names[index]} cannot be set inside of a forward, a "
                "backward or infinity.gathered of a wrapped model"
            )

    def share_of(self, index: int, values: torch.Tensor) -> torch.Tensor:
        """What this rank has, (n,), of `values`, which are all that tensor parallel ranks leave
        it of a parameter."""
        overlap = self.facts.overlap(index)
        return values.reshape(-1)[overlap.in_parameter : overlap.in_parameter + overlap.length]

    def bounds(self) -> list[tuple[int, int]]:
        """The first element of every chunk of this rank's shard, and the one behind its last."""
        starts = self.chunks()
        return list(zip(starts, [*starts[1:], self.facts.layout.shard_numel], strict=True))

    def begin_rewrite(self, kind: Kind) -> list[Block]:
        """The blocks that `kind` consists of; all of them is rewritten from now on, until
        `Residency.end_update`."""
        kinds = (Kind.PARAM, Kind.MASTER) if kind is Kind.MASTER else (kind,)
        blocks = [self._blocks[k] for k in kinds]
        self._listener.rollback()
        self._listener.before_write(blocks)
        if Kind.PARAM in kinds:
            self._store.make_writable(self._blocks[Kind.PARAM])
            self._store.resident.begin_update(self._blocks[Kind.PARAM])
            self._listener.outdate()  # other ranks write their parts, too
        return blocks

    def encode(self, kind: Kind, values: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Put `values` into a chunk that is checked out."""
        form = self._blocks[kind].format
        if kind is Kind.MASTER:
            codec.encode_master(form, values, tensors[0].view(self.facts.dtype), tensors[1])
        elif kind in (Kind.PARAM, Kind.GRAD):
            copy_alone(tensors[0].view(self.dtype_of(kind)), values)
        else:
            codec.encode_moment(form, kind, values, tensors[0])

    def restart(self, kind: Kind, positions: Sequence[int]) -> None:
        """Let the states of `kind` of these parameters begin anew: a moment is zeros, a master the
        parameter. The others stay."""

        def content(begin: int, end: int) -> torch.Tensor:
            values = torch.empty(end - begin, dtype=self.dtype_of(kind))
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
        """Copy what these parameters have of a chunk: `source` and `target` are it, from element
        `begin` of the shard on."""
        for position in positions:
            overlap = self.facts.overlap(position)
            low = max(overlap.in_shard, begin) - begin
            high = min(overlap.in_shard + overlap.length - begin, target.numel())
            if low < high:
                target[low:high].copy_(source[low:high])

    def dtype_of(self, kind: Kind) -> torch.dtype:
        """What `read` gives and `write` takes."""
        return {Kind.PARAM: self.facts.dtype, Kind.GRAD: self.facts.gradient_dtype}.get(
            kind, torch.float32
        )

    @contextmanager
    def _checked_out(
        self, blocks: Sequence[Block], begin: int, load: bool
    ) -> Iterator[list[torch.Tensor]]:
        """The chunks from element `begin` on of these blocks, uint8; what the context leaves in
        them is written unless `load`."""
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
        """Like `read`, of one parameter: what this rank has of it, (n,). Reads no more than the
        chunks that have some of it."""
        overlap = self.facts.overlap(index)
        first, last = overlap.in_shard, overlap.in_shard + overlap.length
        found = torch.empty(overlap.length, dtype=self.dtype_of(kind))
        for begin, end in self.bounds():
            low, high = max(begin, first), min(end, last)
            if low < high:
                chunk = torch.empty(end - begin, dtype=found.dtype)
                self.read_chunk(kind, begin, chunk)
                found[low - first : high - first] = chunk[low - begin : high - begin]
        return found

    def parameter(self, kind: Kind, index: int) -> torch.Tensor:
        """Like `gather`, of one parameter, in its shape."""
        place = self.facts.layout.places[index]
        if self._exchange is None:
            return self.part(kind, index).view(place.shape)
        return self.gather(kind)[place.offset : place.end].view(place.shape)

    @property
    def are_in_files(self) -> bool:
        """Whether files of the user are still the home of the parameters."""
        return bool(self.facts.stored) and not self._blocks[Kind.PARAM].home.updates

    def in_files(self) -> list[torch.Tensor] | None:
        """The parameters, mapped from files of the user that are their home; else None. Takes no
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
        if exchange is None:
            return shard
        full = torch.empty(self.facts.layout.numel, dtype=shard.dtype)
        join = functools.partial(
            collectives.all_gather_home, full, shard, exchange.ranks.shards, exchange.device
        )
        exchange.post(
            f"gather {kind.value} of",
            self.facts.name,
            join,
            self.facts.sent_bytes(shard),
            everywhere=False,
        ).wait()
        return full


class StateStream:
    """Replaces states of units, chunk after chunk, while chunks before are still written.

    A context manager: all is written when its block ends. When that fails the content is in part
    new: whoever uses the engine from then on gets `EngineClosedError`. For one thread, which checks
    nothing else out between `write` and `drain`.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        # Chunks, and after the last one of `write` the blocks that they are.
        self._leaving: deque[tuple[list[Checkout], list[Block]]] = deque()

    def write(
        self, states: States, kind: Kind, content: Callable[[int, int], torch.Tensor]
    ) -> None:
        """Like `States.write_chunks`; `content` checks nothing out."""
        blocks = states.begin_rewrite(kind)
        states.note_rewrite()
        for begin, end in states.bounds():
            values = content(begin, end)
            chunks = self._check_out(ChunkRequest(blocks, begin))
            self._leaving.append((chunks, []))
            states.encode(kind, values, [chunk.tensor for chunk in chunks])
            for chunk in chunks:
                chunk.commit()
        self._leaving.append(([], blocks))

    def drain(self) -> None:
        """Return when all is written."""
        while self._leaving:
            self._end_first()

    def _check_out(self, request: ChunkRequest) -> list[Checkout]:
        """Chunks for new content; as many others are written meanwhile as there are slots."""
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
