"""Every step outlives the process: the moment at which a record of it is fixed, and the restoring
of the record.

[Note: between two steps]
The record of a step is fixed when the next training forward begins. Schedulers have stepped by
then, and the random numbers of that forward are still to come: after a resume, the first training
forward draws them. `close` fixes the record of the last step. No forward follows, so `wrap`
restores the random states. If a step updates units that no forward has used since the last step, a
record is fixed before the step. A record is also fixed before the first step, if the last record is
older than the optimizer. So a snapshot contains the optimizer from the first step on.

[Note: one of N steps]
If one of N > 1 steps is committed, the other steps fix no record. The content of such a record is
noted nevertheless when the forward begins, because the engine may be closed before the next commit.
If a record is fixed at a moment that the updates did not expect, the store makes the blocks whole.

[Note: writes outside of steps]
The next record contains the writes since the last record. So a block is rewritten in place as
long as no record refers to its content, and beside it otherwise.

[Note: the same records on all ranks]
The program fixes a record by a forward, a step or a write. It never depends on the time of a commit
or an update, which differs from rank to rank. So all ranks make the same records, in the same
order, and a number means the same record on each. `close` fixes a record, too, at any place. There
another rank may continue: a scheduler steps, or parameters are written. So the key of a record
(`RecordKey`) has more than its number. It has the count of writes, and whether `close` fixed the
record. A record of `close` is never taken for a record of a forward. Two ranks may both be closed,
at different places. So a record of `close` also identifies the changes since the last forward
began: which tracked objects changed, and whether the parameter groups did. The content of the
objects is not compared, because objects may differ between ranks.

[Note: a load that is cut off]
Frozen parameters have one place. A checkpoint may replace them while the last record is marked as
not whole. Such a record is not adopted.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.snapshots import SnapshotTask
from infinity.device import ComputeDevice
from infinity.durable.agreement import Agreement
from infinity.durable.committed_objects import CommittedObjects
from infinity.durable.committed_states import CommittedStates
from infinity.durable.committer import Committer
from infinity.durable.home import home_of
from infinity.durable.record import pack
from infinity.durable.snapshots import Snapshots
from infinity.durable.states import RecordKey
from infinity.durable.step_notes import NotedStep, StepNotes
from infinity.durable.store import DurableStore
from infinity.errors import CheckpointError, ConfigError, EngineClosedError, InfinityError
from infinity.observe import Recorder
from infinity.optim.job_queue import JobQueue
from infinity.optim.optimizer import Optimizer
from infinity.optim.updater import StepListeners, Updater
from infinity.sharding.tensor_parallel import local
from infinity.sharding.unit import Unit
from infinity.tiers.block import Block
from infinity.weights.load import persistent_buffers

log = logging.getLogger("infinity")


class Session:
    """Commits the states of one engine between steps, from `wrap` to `close`, and restores adopted
    records. Used by the thread that runs the model.

    A session decides when a record is fixed. `StepNotes` make its content, and the `Committer`
    commits it. One class, because each of its methods may fix the next record.
    """

    def __init__(
        self,
        store: DurableStore,
        jobs: JobQueue,
        device: ComputeDevice,
        recorder: Recorder,
        agreement: Agreement | None = None,
    ) -> None:
        """`agreement`: of all ranks; None if there is one rank."""
        # First, because it may be refused: the committer is a thread.
        content, self._last = store.taken_over, store.states.taken
        found = None if content is None else store.states.decode(content, self._last.step)
        self._store, self._device = store, device
        self._committer = Committer(store, jobs, recorder, agreement)
        self._objects = CommittedObjects(found)
        self._notes = StepNotes(device, self._objects, found, agreement is not None)
        self.snapshots = Snapshots(store, self._objects, jobs, agreement)
        """The snapshots of this engine."""
        self._noted: NotedStep | None = None  # the content of a record of this cycle
        self._is_sealed = self._is_loading = self._is_discarded = False
        self._has_optimizer = found is not None and bool(found.optimizers)  # in the last record
        self._writes = 0  # outside of steps, since the last record

    # Building

    def check(self, model: nn.Module) -> None:
        """Raise `CheckpointError` if the record is not whole, or does not fit. Raise `ConfigError`
        if the model has other buffers."""
        found = self._notes.found
        if found is None:
            return
        if not found.is_whole:
            raise CheckpointError(
                f"{self._store.states.path}: the earlier run was killed while it loaded a "
                "checkpoint, so its states are in part of that: load the checkpoint into an engine "
                "with another directory"
            )
        self._store.check_versions(found.versions)
        try:
            found.check_names()
            self._device.check_random_state(found.random.torch)
        except ValueError as error:
            raise self._store.states.unreadable(error) from error
        here = {name: _form(buffer) for name, buffer in persistent_buffers(model)}
        there = {name: _form(buffer) for name, buffer in found.buffers.items()}
        if here != there:
            name = next(n for n in {**here, **there} if here.get(n) != there.get(n))
            raise ConfigError(
                f"{self._store.states.path} holds the states of another model: the buffer {name} "
                f"was {there.get(name, 'not there')}, and is {here.get(name, 'not there')} here"
            )

    def restore_blocks(self) -> bool:
        """Restore the blocks; False if there is nothing to restore."""
        found = self._notes.found
        if found is not None:
            self._store.restore(found.versions)
        return found is not None

    def give_up(self) -> None:
        """`wrap` fails: end the thread."""
        self._committer.close()

    def listeners(self, others: StepListeners) -> StepListeners:
        """Listeners of the updater: `others`, and this session."""
        return others._replace(
            before_step=self.before_step,
            made=self.restore,
            stepped_by=self._objects.stepped_by,
            before_write=self.before_write,
        )

    def connect(self, model: nn.Module, updater: Updater) -> None:
        """Note `model` and `updater`. An adopted run continues at its step."""
        self._updater = updater
        self._notes.connect(model, updater)

    def begin(self) -> None:
        """`wrap` has succeeded: commit the new states."""
        is_new = self._notes.found is None
        if is_new:
            self.seal()
        self._is_sealed = not is_new

    @property
    def committed_step(self) -> int | None:
        """The last step that would survive a power cut; None while there is none."""
        return self._store.committed_step

    def restore(self, optimizer: Optimizer) -> None:
        """An optimizer was made: see `CommittedObjects.restore`."""
        if self._objects.restore(optimizer):
            self._is_sealed = False
        self._notes.mark_made()

    def track(self, objects: Mapping[str, Any]) -> None:
        """See `Engine.track`."""
        is_committed = self._store.states.taken.step > 0
        self._objects.track(objects, is_committed, not self._notes.in_cycle)
        self._notes.mark_made()

    # Fixing records

    def before_forward(self) -> None:
        """A training forward begins."""
        if self._notes.in_cycle:
            return
        self._noted = self._notes.begin_cycle(not self._is_loading)
        if self._store.steps_left(self._step) == 0:
            self.seal()
            self._noted = None  # it may be large

    def before_step(self, units: Sequence[Unit]) -> None:
        """A step of `units` begins. Sealed states are committed first, so a kill costs no more
        steps than lie between two commits.

        States that the step would overwrite are committed, too. All ranks must decide alike, so no
        commit is under way at that decision.
        """
        if self._objects.has_optimizers and not self._has_optimizer:
            self._is_sealed, self._noted = False, None
            self.seal()
        self.rest()
        left = self._store.steps_left(self._step + 1)
        if not all(unit.update_blocks.is_free(left) for unit in units):
            self.seal()
            self.rest()
        self._is_sealed, self._noted = False, None
        self._notes.end_cycle()

    def before_write(self, blocks: Sequence[Block]) -> None:
        """`blocks` are about to be rewritten outside of a step; returns when they may be.

        Raises `ConfigError` before anything is changed for blocks that have one place only, unless
        a checkpoint is being loaded.
        """
        fixed = next((block for block in blocks if _is_fixed(block)), None)
        if fixed is not None and (not self._is_loading or fixed.spec.in_files):
            raise ConfigError(
                f"{fixed.name} cannot be changed with durability: what is frozen has one place on "
                "nvme, and a kill meanwhile would leave a part of it; change it before wrap, or "
                "set durability='off'"
            )
        if fixed is not None:
            self._is_sealed = False
            self.seal()
        are_free = [home_of(b).may_rewrite or b.home.is_free() for b in blocks]
        if fixed is not None or not all(are_free):
            self.rest()
        if fixed is not None:
            self._store.release([block for block in blocks if _is_fixed(block)])
        self._store.begin_rewrite(blocks)
        self._is_sealed = False
        self._writes += 1

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Inside, states are replaced one by one. The result is committed at the end."""
        self._make_whole()  # inside, replaced states are not checked
        self._noted, self._is_loading = None, True
        try:
            yield
        finally:
            self._is_loading = False
        self._is_sealed = False
        self.seal()
        self.rest()

    def seal(self, closes: bool = False) -> None:
        """Commit the states after all posted steps; returns at once. `closes`: the program is at
        any place between two steps."""
        if not self._is_sealed:
            self._make_whole()
            closed = closes and self._noted is None and self._notes.compares
            noted = self._noted or self._notes.note(not self._is_loading)
            key = RecordKey(
                self._last.sequence + 1,
                self._step,
                self._writes,
                self._notes.changes(noted) if closed else "",
            )
            self._committer.seal(key, functools.partial(pack, noted.content))
            self._last, self._is_sealed, self._writes = key, True, 0
            self._has_optimizer = noted.has_optimizer

    @property
    def _step(self) -> int:
        """The number of the last step that was posted or left out."""
        return self._updater.next_number - 1

    def _make_whole(self) -> None:
        """Make the blocks after all posted steps whole, so that a commit may refer to them. If
        every step is committed, they are whole; otherwise this may wait for updates."""
        if self._store.has_spares and not self._committer.will_be_whole():
            self._updater.rest()
            self._store.make_whole()

    def rest(self) -> None:
        """Block until sealed states are committed, on all ranks. Raises `EngineClosedError` if that
        failed, or if the engine is closed meanwhile."""
        is_committed = self._committer.rest()
        self._store.latch.check()
        if not is_committed:
            raise EngineClosedError("the engine was closed")

    def discard(self) -> None:
        """Committed states are not needed any more: `close` removes them."""
        self._store.states.discard()
        self._is_discarded = True

    def close(self) -> None:
        """Commit the last step, which other ranks may lack then, and end the thread. If the engine
        failed, or the model is gone with its buffers, the step before stays the last. Finishes a
        snapshot that is under way. May be called twice."""
        try:
            with self.snapshots.finishing():
                self._seal_last()
                self._committer.close()
        finally:
            self._committer.close()

    def _seal_last(self) -> None:
        """Commit the last step, unless the engine failed or its states are discarded."""
        wanted = not self._store.latch.failed and not self._is_discarded
        if not wanted or self._notes.are_lost:
            return
        try:
            # Buffers and rates may have changed between two steps, but not by a forward without a
            # step.
            self._is_sealed &= self._notes.in_cycle
            self.seal(closes=True)
        except InfinityError as error:
            log.warning("the last step is not committed: %s", error)

    # Snapshots

    def snapshot(
        self,
        write: Callable[[CommittedStates], SnapshotTask],
        on_all_ranks: Callable[[], AbstractContextManager[None]],
    ) -> SnapshotTask:
        """`Snapshots.begin`, of the same committed step on all ranks."""
        is_new, has_begun = self._updater.next_number == 1, self._notes.in_cycle
        if is_new and not (has_begun and self._has_optimizer):
            self._is_sealed = False
            self.seal()  # with the optimizers that were made since `wrap`, or the first forward
            self._is_sealed = has_begun  # the first forward fixes its own
        if is_new or self._notes.compares or self._store.committed_step is None:
            self.rest()  # then the last commit is the last sealed record
        return self.snapshots.begin(write, on_all_ranks)


def _is_fixed(block: Block) -> bool:
    """Whether a write would replace committed bytes of the block, or bytes in files of the user, in
    their only place."""
    home = home_of(block)
    return block.spec.in_files or (home.is_sealed and len(home.extents) < 2)


def _form(buffer: torch.Tensor) -> str:
    layout = "" if buffer.layout is torch.strided else f" {buffer.layout}"
    return f"{buffer.dtype} {list(local(buffer).shape)}{layout}"
