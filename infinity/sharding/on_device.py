"""The parameters of a unit on the compute device: how they come, and when they may go."""

from __future__ import annotations

import functools

import torch

from infinity.sharding import collectives
from infinity.sharding.exchange import Collective, Exchange
from infinity.sharding.facts import UnitFacts
from infinity.tiers.arena import Lease
from infinity.tiers.block import Block
from infinity.tiers.store import Store


class OnDevice:
    """Brings the parameters of one unit, the content of `block`, to the compute device. This rank
    has all of them.

    For the thread that runs the model.
    """

    def __init__(self, facts: UnitFacts, block: Block, store: Store) -> None:
        self._facts, self._block, self._store = facts, block, store
        self.posted: Collective | None = None
        """The last gather, or the one that is on its way; None where none is needed."""

    def start(self) -> None:
        """Pin the unit and start bringing it to the compute device; paired with a `release`."""
        self._store.resident.start(self._block)
        self.gather_ahead()

    def wait(self) -> torch.Tensor:
        """The whole unit on the compute device, after `start`: (numel,) in the unit's dtype."""
        return self._store.resident.wait(self._block).view(self._facts.dtype)

    def release(self) -> None:
        """End one `start`: the unit may be evicted."""
        self._store.resident.release(self._block)

    def discard(self) -> None:
        """The copy on the device is not used again."""
        self._store.resident.discard(self._block)

    def gather_ahead(self) -> None:
        """Have the unit gathered when its shard is there, if it has a place, and that has not been
        done."""

    def renew(self) -> None:
        """Have new content gathered where it stays whole, so that this rank may read it alone.
        Every rank calls it, after a write."""
        if self.stays_whole:
            self.gather_ahead()

    def outdate(self) -> None:
        """Other ranks' parts of the content change, too."""

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
        """Whether `wait`, after `start`, would not wait for other ranks: the device does."""
        return True


class GatheredOnDevice(OnDevice):
    """Like `OnDevice`, of which this rank has a shard: the `exchange` gathers all of them."""

    def __init__(self, facts: UnitFacts, block: Block, store: Store, exchange: Exchange) -> None:
        super().__init__(facts, block, store)
        self._exchange = exchange
        # The lease that the last gather went to; None when the content has changed since.
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
        """As of the base class."""
        lease = self._block.copy.lease
        if lease is not None:
            self._gather(lease)

    def _gather(self, lease: Lease) -> Collective:
        """The gather into `lease`, the place of the unit; posted now unless it was."""
        if self.posted is not None and self._lease is lease:
            return self.posted
        block, resident, exchange = self._block, self._store.resident, self._exchange
        flat = lease.tensor.view(self._facts.dtype)
        shard = self._facts.shard_of(flat)

        def join() -> None:
            collectives.all_gather(flat, shard, exchange.ranks.shards)

        sent = self._facts.sent_bytes(shard)
        arrive = functools.partial(resident.wait, block)
        # Pinned: an update that may be rolled back puts nothing there any more. What one has put
        # there before is fetched anew.
        resident.start(block)
        try:
            self.posted = exchange.post(
                "gather", self._facts.name, join, sent, arrive, everywhere=False
            )
            self._lease = block.copy.lease
            resident.gather(block, self.posted)
        finally:
            resident.release(block)
        return self.posted

    def outdate(self) -> None:
        """As of the base class."""
        self._lease = None

    @property
    def stays_whole(self) -> bool:
        """As of the base class."""
        return self._block.spec.whole

    @property
    def _is_posted(self) -> bool:
        return self._lease is not None and self._lease is self._block.copy.lease

    @property
    def is_readable(self) -> bool:
        """As of the base class."""
        return self.stays_whole and self._is_posted

    @property
    def is_gathered(self) -> bool:
        """As of the base class."""
        return self._is_posted and self.posted is not None and self.posted.queued()
