"""The parameters of a unit on the compute device: how they arrive, and when they may leave."""

from __future__ import annotations

import functools

import torch

from infinity.sharding import collectives
from infinity.sharding.exchange import Exchange
from infinity.sharding.facts import UnitFacts
from infinity.sharding.posted import Collective, Contribution
from infinity.sharding.ranks import Among
from infinity.tiers.arena import Lease
from infinity.tiers.block import Block
from infinity.tiers.store import Store


class OnDevice:
    """Brings the parameters of one unit, the content of `block`, to the compute device. This rank
    keeps all of them.

    For the thread that runs the model.
    """

    def __init__(self, facts: UnitFacts, block: Block, store: Store) -> None:
        self._facts, self._block, self._store = facts, block, store
        self.posted: Collective | None = None
        """The last gather, ended or not; None if no gather was posted."""

    def start(self) -> None:
        """Pin the unit and start its transfer to the compute device. Each `start` needs one
        `release`."""
        self._store.resident.start(self._block)
        self.gather_ahead()

    def wait(self) -> torch.Tensor:
        """The whole unit on the compute device, after `start`: (numel,) in the unit's dtype."""
        return self._store.resident.wait(self._block).view(self._facts.dtype)

    def release(self) -> None:
        """End one `start`: the unit may be evicted."""
        self._store.resident.release(self._block)

    def discard(self) -> None:
        """Drop the copy on the device."""
        self._store.resident.discard(self._block)

    def gather_ahead(self) -> None:
        """Post the gather of the unit, if it has a place and no gather was posted. It begins when
        the shard has arrived."""

    def renew(self) -> None:
        """After a write, post the gather of a unit that stays whole, so that each rank may read it
        alone. Every rank calls it."""
        if self.stays_whole:
            self.gather_ahead()

    def outdate(self) -> None:
        """The content changes, on all ranks."""

    @property
    def stays_whole(self) -> bool:
        """Whether this rank keeps the parameters of all ranks, on its device: stages 0 to 2."""
        return True

    @property
    def is_readable(self) -> bool:
        """Whether `wait`, after `start`, needs no collective that is not posted yet."""
        return True

    @property
    def is_gathered(self) -> bool:
        """Whether `wait`, after `start`, would not wait for other ranks on the host."""
        return True


class GatheredOnDevice(OnDevice):
    """Like `OnDevice`. This rank keeps a shard, and the `exchange` gathers all shards."""

    def __init__(self, facts: UnitFacts, block: Block, store: Store, exchange: Exchange) -> None:
        super().__init__(facts, block, store)
        self._exchange = exchange
        # The lease of the last gather; None if the content has changed since.
        self._lease: Lease | None = None

    def wait(self) -> torch.Tensor:
        """As of the base class, with the parts of all ranks."""
        resident = self._store.resident
        resident.place(self._block)
        lease = self._block.copy.lease
        if lease is None:
            raise RuntimeError(f"{self._facts.name} has no place to be gathered into")
        self._exchange.device.follow_copy(self._gather(lease).await_queued())
        # This rank's part may have been fetched again since (`Residency.rollback`).
        return super().wait()

    def gather_ahead(self) -> None:
        lease = self._block.copy.lease
        if lease is not None:
            self._gather(lease)

    def _gather(self, lease: Lease) -> Collective:
        """The gather into `lease`, the place of the unit. Posts it unless it is posted."""
        if self.posted is not None and self._lease is lease:
            return self.posted
        block, resident, exchange = self._block, self._store.resident, self._exchange
        flat = lease.tensor.view(self._facts.dtype)
        shard = self._facts.shard_of(flat)

        def join() -> None:
            collectives.all_gather(flat, shard, exchange.ranks.shards)

        sent = self._facts.sent_bytes(shard)
        arrive = functools.partial(resident.wait, block)
        # It is pinned: so an update that may be rolled back writes nothing there any more. Content
        # that such an update has written before is fetched again.
        resident.start(block)
        try:
            self.posted = exchange.post(
                "gather", self._facts.name, Contribution(join, sent, arrive), Among.SHARDS
            )
            self._lease = block.copy.lease
            resident.gather(block, self.posted)
        finally:
            resident.release(block)
        return self.posted

    def outdate(self) -> None:
        self._lease = None

    @property
    def stays_whole(self) -> bool:
        return self._block.spec.whole

    @property
    def _is_posted(self) -> bool:
        return self._lease is not None and self._lease is self._block.copy.lease

    @property
    def is_readable(self) -> bool:
        return self.stays_whole and self._is_posted

    @property
    def is_gathered(self) -> bool:
        return self._is_posted and self.posted is not None and self.posted.queued()
