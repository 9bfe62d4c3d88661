"""Every step outlives the process: what a record says beside the states on NVMe, when it is fixed,
and who gets it back.

[Note: between two steps]
The record of a step is fixed when the next training forward begins. Schedulers have stepped by
then, and the random numbers of that forward are still to come: after a resume, the first training
forward draws them. `close` fixes the record of the last step; there is no forward then, so `wrap`
gives the random states back. Where a step updates once more what no forward has used since the
last one, that is fixed before. So is the record before the first step, if it is older than the
optimizer: a snapshot has the optimizer from the first step on.

[Note: one of N steps]
Where one of N > 1 steps is committed, the others fix no record. What a record of their moment would
say is noted as the forward begins all the same: the engine may be closed before the next commit.
The store makes blocks whole where a record is fixed at another moment than their updates knew of.

[Note: writes outside of steps]
What was written since the last record takes part in the next one. So a block is rewritten in its
place as long as no record speaks of its content, and beside it otherwise.

[Note: the same records on all ranks]
What fixes a record is in the program: a forward, a step, a write. It never depends on the time that
a commit or an update takes, which differs from rank to rank. So all ranks make the same records, in
the same order, and the number of one means the same on each. `close` fixes one, too, wherever this
rank is by then, and another rank may go on: a scheduler steps there, or parameters are written to.
So the key of a record (`RecordKey`) says more than its number. It has how many writes came, and
whether `close` fixed it: what `close` fixed is never taken for what a forward did. Two ranks may
both be closed, at different places. So what `close` fixes also says what has changed since the last
forward began: which of the objects that are tracked, and whether the parameter groups have.
What an object has become is not compared, as objects may differ between ranks.

[Note: a load that is cut off]
Frozen parameters have one place. A checkpoint may replace them, while the last record says that it
is not whole, and is not taken over.
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
    """Has the states of one engine committed between steps, from `wrap` to `close`, and gives back
    what was taken over. For the thread that runs the model.

    A session decides when a record is fixed. `StepNotes` say what is in it, and the `Committer`
    commits it.
    """

    def __init__(
        self,
        store: DurableStore,
        jobs: JobQueue,
        device: ComputeDevice,
        recorder: Recorder,
        agreement: Agreement | None = None,
    ) -> None:
        """`agreement`: of all ranks; None for one."""
        # First, as it may be refused: the committer is a thread.
        content, self._last = store.taken_over, store.states.taken
        found = None if content is None else store.states.decode(content, self._last.step)
        self._store, self._device = store, device
        self._committer = Committer(store, jobs, recorder, agreement)
        self._objects = CommittedObjects(found)
        self._notes = StepNotes(device, self._objects, found, agreement is not None)
        self.snapshots = Snapshots(store, self._objects, jobs, agreement)
        """Those of this engine."""
        self._noted: NotedStep | None = None  # what a record says of this cycle
        self._is_sealed = self._is_loading = self._is_discarded = False
        self._has_optimizer = found is not None and bool(found.optimizers)  # the last record does
        self._writes = 0  # outside of steps, since the last record

    # Building

    def check(self, model: nn.Module) -> None:
        """Raise `CheckpointError` for a record that is not whole, or does not fit, and
        `ConfigError` for other buffers."""
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
        """Give the blocks what they had; False where there is nothing to go on from."""
        found = self._notes.found
        if found is not None:
            self._store.restore(found.versions)
        return found is not None

    def give_up(self) -> None:
        """`wrap` fails: end the thread."""
        self._committer.close()

    def listeners(self, others: StepListeners) -> StepListeners:
        """What the updater tells, to `others` and to this."""
        return others._replace(
            before_step=self.before_step,
            made=self.restore,
            stepped_by=self._objects.stepped_by,
            before_write=self.before_write,
        )

    def connect(self, model: nn.Module, updater: Updater) -> None:
        """Whose states these are. What was taken over goes on at its step."""
        self._updater = updater
        self._notes.connect(model, updater)

    def begin(self) -> None:
        """`wrap` has succeeded: commit what it made, until the first forward does so."""
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
        """A step of `units` begins. What was sealed is committed, so a kill costs no more steps
        than lie between two commits.

        What the step would overwrite is committed, too. All ranks must find the same, so no commit
        is under way when that is asked.
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

        Raises `ConfigError` before anything is changed for those that have one place only, but
        while a checkpoint is loaded.
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
        """Inside, states are replaced one by one; what they are then is committed."""
        self._make_whole()  # what is replaced is not looked at then
        self._noted, self._is_loading = None, True
        try:
            yield
        finally:
            self._is_loading = False
        self._is_sealed = False
        self.seal()
        self.rest()

    def seal(self, closes: bool = False) -> None:
        """Have the states as they are after all posted steps committed; returns at once. `closes`:
        the program is anywhere between two steps."""
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
        return self._updater.posted_steps + self._updater.skipped_steps

    def _make_whole(self) -> None:
        """Have a commit be able to speak of what blocks are after all posted steps. Where every
        step is committed, it always is; else that may wait for updates."""
        if self._store.has_spares and not self._committer.will_be_whole():
            self._updater.rest()
            self._store.make_whole()

    def rest(self) -> None:
        """Block until what was sealed is committed, on all ranks. Raises `EngineClosedError` when
        that failed, or was given up by who closes."""
        is_committed = self._committer.rest()
        self._store.latch.check()
        if not is_committed:
            raise EngineClosedError("the engine was closed")

    def discard(self) -> None:
        """Nothing of what was committed is needed any more: `close` removes it."""
        self._store.states.discard()
        self._is_discarded = True

    def close(self) -> None:
        """Commit the last step, which other ranks may lack then, and end the thread. What failed
        stays at the step that was committed last, and so does a model that is gone with its
        buffers. A snapshot that is under way is finished. May be called twice."""
        try:
            with self.snapshots.finishing():
                self._seal_last()
                self._committer.close()
        finally:
            self._committer.close()

    def _seal_last(self) -> None:
        """Have the last step committed, where there is one to go on from."""
        wanted = not self._store.latch.failed and not self._is_discarded
        if not wanted or self._notes.are_lost:
            return
        try:
            # Between two steps buffers and rates may have changed; a forward that led to no step
            # has not.
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
        """`Snapshots.begin`, on all ranks of what was committed of one step."""
        is_new, has_begun = self._updater.next_number == 1, self._notes.in_cycle
        if is_new and not (has_begun and self._has_optimizer):
            self._is_sealed = False
            self.seal()  # with the optimizers that were made since `wrap`, or the first forward
            self._is_sealed = has_begun  # the first forward fixes its own
        if is_new or self._notes.compares or self._store.committed_step is None:
            self.rest()  # from then on it is the last that was sealed
        return self.snapshots.begin(write, on_all_ranks)


def _is_fixed(block: Block) -> bool:
    """Whether what is committed of a block, or lies in files of the user, would be rewritten in its
    only place."""
    home = home_of(block)
    return block.spec.in_files or (home.is_sealed and len(home.extents) < 2)


def _form(buffer: torch.Tensor) -> str:
    layout = "" if buffer.layout is torch.strided else f" {buffer.layout}"
    return f"{buffer.dtype} {list(local(buffer).shape)}{layout}"
