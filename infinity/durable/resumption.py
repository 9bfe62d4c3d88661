"""How `wrap` continues from committed states, or begins a run."""

from __future__ import annotations

import uuid

from infinity.device import ComputeDevice
from infinity.durable.agreement import Agreement
from infinity.durable.session import Session
from infinity.durable.store import DurableStore
from infinity.observe import Recorder
from infinity.optim.job_queue import JobQueue
from infinity.sharding.ranks import Ranks
from infinity.sharding.watch import told


class Resumption:
    """The committed states of `ranks` that `store` finds in the directories, which it locks.
    `timeout` is in seconds."""

    def __init__(self, store: DurableStore, ranks: Ranks, timeout: float) -> None:
        self._store, self._ranks, self._timeout = store, ranks, timeout
        self._left = store.find()
        self._members: list[int] = []
        self._life = ""

    def agree(self) -> None:
        """Have all ranks continue from one committed step, or begin one run. Does not modify
        committed states."""
        says = self._left, self._ranks.member, uuid.uuid4().hex
        said = told(self._ranks, self._timeout, says)
        self._members, self._life = sorted(said), said[min(said)][2]
        self._store.agree(said, self._life)

    def session(self, jobs: JobQueue, device: ComputeDevice, recorder: Recorder) -> Session:
        """Begin to commit steps, after `agree`."""
        store, agreement = self._store, None
        if self._ranks.groups():
            rank, last = self._ranks.member.rank, store.states.taken
            agreement = Agreement(rank, self._members, self._life, last, self._timeout, store.latch)
        return Session(store, jobs, device, recorder, agreement)
