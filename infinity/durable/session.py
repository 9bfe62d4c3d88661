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
import hashlib
import io
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from infinity.checkpoint.inert import pack_item
from infinity.checkpoint.snapshots import SnapshotTask
from infinity.device import ComputeDevice
from infinity.durable.agreement import Agreement
from infinity.durable.committed_states import CommittedStates
from infinity.durable.committer import Committer
from infinity.durable.home import home_of
from infinity.durable.record import VERSION, CommittedStep, RandomStates, pack
from infinity.durable.states import RecordKey
from infinity.durable.store import DurableStore
from infinity.errors import (
    CheckpointError,
    ConfigError,
    EngineClosedError,
    InfinityError,
    in_words,
)
from infinity.observe import Recorder
from infinity.optim.job import JobQueue
from infinity.optim.optimizer import Optimizer
from infinity.optim.updater import StepListeners, Updater
from infinity.sharding.tensor_parallel import local
from infinity.sharding.unit import Unit
from infinity.tiers.block import Block
from infinity.weights.load import persistent_buffers

log = logging.getLogger("infinity")


class _Said(NamedTuple):
    """What a record says, but of blocks; and marks, which differ where one of the objects that are
    tracked differs, by its name, or the parameter groups do ("")."""

    content: bytes
    marks: Mapping[str, str]
    has_optimizer: bool


@dataclass
class _Known:
    """An optimizer, and what a record says of it, as of its last step."""

    optimizer: weakref.ref[Optimizer]
    header: dict[str, Any]
    parameters: frozenset[int]
    saved: dict[str, Any] | None = None
    """What it took over."""


class Durability:
    """Seals the states of one engine between steps, and gives back what a record has. For the
    thread that runs the model."""

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
        content = store.taken_over
        self._store = store
        self._found = None if content is None else self._read(content, store.taken_record.step)
        self._device = device
        self._committer = Committer(store, jobs, recorder, agreement)
        self._jobs = jobs
        self._agreement = agreement
        self._last = store.taken_record
        self._is_resumed = self._found is not None
        self._snapshot: SnapshotTask | None = None
        self._waiting = self._found.headers if self._found is not None else []
        self._states = dict(self._found.tracked) if self._found is not None else {}
        self._tracked: dict[str, Any] = {}
        self._optimizers: list[_Known] = []
        self._random: RandomStates | None = None  # as this cycle began
        self._buffers: dict[str, torch.Tensor] = {}  # as it, or the engine, began
        self._noted: _Said | None = None  # what a record says of it
        self._made: dict[str, str] = {}  # the marks of what was made before the first one
        self._began: Mapping[str, str] | None = None  # those of the last one that began
        self._is_sealed = self._is_loading = self._is_discarded = False
        self._has_optimizer = bool(self._waiting)  # the last record does
        self._writes = 0  # outside of steps, since the last record
        self._has_begun = self._found is None or not self._found.in_forward

    # Building

    def _read(self, content: bytes, step: int) -> CommittedStep:
        """What a record of `step` says. Raises `CheckpointError` for what is damaged."""
        try:
            return CommittedStep.of(content, step)
        except ValueError as error:
            raise self._store.states.unreadable(error) from error

    def check(self, model: nn.Module) -> None:
        """Raise `CheckpointError` for a record that is not whole, or does not fit, and
        `ConfigError` for other buffers."""
        if self._found is None:
            return
        if not self._found.is_whole:
            raise CheckpointError(
                f"{self._store.states.path}: the earlier run was killed while it loaded a "
                "checkpoint, so its states are in part of that: load the checkpoint into an engine "
                "with another directory"
            )
        self._store.check_versions(self._found.versions)
        try:
            self._found.check_names()
            self._device.check_random_state(self._found.random.torch)
        except ValueError as error:
            raise self._store.states.unreadable(error) from error
        here = {name: _form(buffer) for name, buffer in persistent_buffers(model)}
        there = {name: _form(buffer) for name, buffer in self._found.buffers.items()}
        if here != there:
            name = next(n for n in {**here, **there} if here.get(n) != there.get(n))
            raise ConfigError(
                f"{self._store.states.path} holds the states of another model: the buffer {name} "
                f"was {there.get(name, 'not there')}, and is {here.get(name, 'not there')} here"
            )

    def restore_blocks(self) -> bool:
        """Give the blocks what they had; False where there is nothing to go on from."""
        if self._found is not None:
            self._store.restore(self._found.versions)
        return self._found is not None

    def give_up(self) -> None:
        """`wrap` fails: end the thread."""
        self._committer.close()

    def listeners(self, others: StepListeners) -> StepListeners:
        """What the updater tells, to `others` and to this."""
        return others._replace(
            before_step=self.before_step,
            made=self.restore,
            stepped_by=self.stepped_by,
            before_write=self.before_write,
        )

    def connect(self, model: nn.Module, updater: Updater) -> None:
        """Whose states these are. What was taken over goes on at its step."""
        self._model = weakref.ref(model)
        self._updater = updater
        self._buffers = self._buffers_now()
        if self._found is None:
            return
        updater.posted_steps, updater.skipped_steps = self._found.posted, self._found.skipped
        with torch.no_grad():
            for name, buffer in persistent_buffers(model):
                local(buffer).copy_(self._found.buffers[name])
        if not self._found.in_forward:
            self._found.random.restore(self._device)

    def begin(self) -> None:
        """`wrap` has succeeded: commit what it made, until the first forward does so."""
        if self._found is None:
            self.seal()
        self._is_sealed = self._found is not None

    @property
    def committed_step(self) -> int | None:
        """The last step that would survive a power cut; None while there is none."""
        return self._store.committed_step

    # Fixing records

    def before_forward(self) -> None:
        """A training forward begins."""
        if self._random is not None:
            return  # of a cycle that has begun
        if not self._has_begun and self._found is not None:
            self._found.random.restore(self._device)
        self._has_begun, self._found = True, None  # all of it is given back
        self._random, self._buffers = RandomStates.of(self._device), self._buffers_now()
        self._noted = self._note()
        self._began = self._noted.marks
        if self._store.steps_left(self._step) == 0:
            self.seal()
            self._noted = None  # it may be large

    def before_step(self, units: Sequence[Unit]) -> None:
        """A step of `units` begins. What was sealed is committed, so a kill costs no more steps
        than lie between two commits.

        What the step would overwrite is committed, too. All ranks must find the same, so no commit
        is under way when that is asked.
        """
        if self._optimizers and not self._has_optimizer:
            self._is_sealed, self._noted = False, None
            self.seal()
        self.rest()
        left = self._store.steps_left(self._step + 1)
        if not all(unit.states.is_free(left) for unit in units):
            self.seal()
            self.rest()
        self._is_sealed, self._random, self._noted = False, None, None

    def stepped_by(self, optimizer: Optimizer) -> None:
        """A step of `optimizer` has been fixed: this is what a record says of it, if it is gone by
        then."""
        known = self._known(optimizer)
        if known is not None:
            known.header |= optimizer.header()

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
            closed = closes and self._noted is None and self._agreement is not None
            noted = self._note() if self._noted is None else self._noted
            key = RecordKey(
                self._last.sequence + 1,
                self._step,
                self._writes,
                _changes(self._made if self._began is None else self._began, noted.marks)
                if closed
                else "",
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
        self._store.discard_committed()
        self._is_discarded = True

    def close(self) -> None:
        """Commit the last step, which other ranks may lack then, and end the thread. What failed
        stays at the step that was committed last, and so does a model that is gone with its
        buffers. A snapshot that is under way is finished. May be called twice."""
        try:
            with self._finishing():
                self._seal_last()
                self._committer.close()
        finally:
            self._committer.close()

    def _seal_last(self) -> None:
        """Have the last step committed, where there is one to go on from."""
        wanted = not self._store.latch.failed and not self._is_discarded
        if not wanted or (self._model() is None and self._buffers):
            return
        try:
            # Between two steps buffers and rates may have changed; a forward that led to no step
            # has not.
            self._is_sealed &= self._random is not None
            self.seal(closes=True)
        except InfinityError as error:
            log.warning("the last step is not committed: %s", error)

    # Snapshots

    def check_snapshot(self) -> None:
        """Raise `ConfigError` while one is under way."""
        task = self._snapshot
        if task is not None and not task.done():
            raise ConfigError(
                f"a snapshot of step {task.step} is being written to {task.directory}, and there "
                "is one at a time: wait for it (wait()), or end it (cancel())"
            )

    def refusals(self, reason: str, meet: Callable[[bool], bool]) -> str:
        """See `Agreement.refusals`; of one rank alone that is its `reason`."""
        return reason if self._agreement is None else self._agreement.refusals(reason, meet)

    def snapshot(
        self,
        begin: Callable[[CommittedStates], SnapshotTask],
        on_all_ranks: Callable[[], AbstractContextManager[None]],
    ) -> SnapshotTask:
        """Have `begin` write what was committed last, on all ranks that of one step. What is
        refused in `on_all_ranks()` on one is refused on all."""
        is_new = self._updater.next_number == 1
        has_begun = self._random is not None
        if is_new and not (has_begun and self._has_optimizer):
            self._is_sealed = False
            self.seal()  # with the optimizers that were made since `wrap`, or the first forward
            self._is_sealed = has_begun  # the first forward fixes its own
        if is_new or self._agreement is not None or self._store.committed_step is None:
            self.rest()  # from then on it is the last that was sealed
        with ExitStack() as undo:
            with on_all_ranks():
                committed = self._pin()
                undo.callback(committed.end)
            self._snapshot = begin(committed)
            undo.pop_all()
        return self._snapshot

    def _pin(self) -> CommittedStates:
        """What was committed last, kept as it is. Raises `ConfigError` where its optimizer is
        gone."""
        pinned = self._store.pin()
        try:
            record = self._read(pinned.content, pinned.step)
            if not record.is_whole:
                raise ConfigError(
                    "a checkpoint is being loaded: begin the snapshot when that has ended"
                )
            headers = {
                self._maker_of(each, pinned.step): {k: v for k, v in each.items() if k != "kind"}
                for each in record.headers
            }
        except BaseException:
            pinned.release()
            raise
        counts = record.posted, record.skipped
        return CommittedStates(
            pinned, counts, record.buffers, headers, self._jobs.first, self._jobs.poke
        )

    def _maker_of(self, header: Mapping[str, Any], step: int) -> Optimizer:
        """The optimizer that a record has this of."""
        for known in self._optimizers:
            optimizer = known.optimizer()
            if optimizer is not None and all(
                known.header[key] == header[key] for key in ("kind", "names")
            ):
                return optimizer
        raise ConfigError(
            f"the optimizer ({header['kind']}) of the committed step {step} is gone: make it, with "
            "the same groups, before the snapshot"
        )

    @contextmanager
    def _finishing(self) -> Iterator[None]:
        """Finish the snapshot that is under way, if any, after the block; what is raised meanwhile,
        as by Ctrl-C, ends it."""
        task = self._snapshot
        try:
            yield
            if task is not None and not task.done():
                log.info("waiting for the snapshot of step %d in %s", task.step, task.directory)
                task.finish()
        except BaseException:
            if task is not None:
                task.cancel()
            raise

    def _note(self) -> _Said:
        """What a record says now, but of blocks."""
        updater = self._updater
        tracked = self._states | {name: each.state_dict() for name, each in self._tracked.items()}
        random = self._random
        if not self._has_begun and self._found is not None:
            random = self._found.random
        headers, saved = self._headers(), _saved(tracked)
        values = {
            "version": VERSION,
            "posted": updater.posted_steps,
            "skipped": updater.skipped_steps,
            "whole": not self._is_loading,
            "in_forward": random is not None,
            "optimizers": [_plain(each) for each in headers],
            "random": (random or RandomStates.of(self._device)).values(),
            "buffers": self._buffers if self._random is not None else self._buffers_now(),
            "tracked": saved,
        }
        stream = io.BytesIO()
        torch.save(values, stream)
        return _Said(stream.getvalue(), self._marks(headers, saved), bool(headers))

    def _marks(
        self, headers: Sequence[Mapping[str, Any]], saved: Mapping[str, torch.Tensor]
    ) -> dict[str, str]:
        if self._agreement is None:
            return {}
        groups = repr([each["param_groups"] for each in headers]).encode()
        return {"": _digest(groups)} | {n: _digest(each.numpy().data) for n, each in saved.items()}

    def _mark_made(self) -> None:
        """An optimizer was made, or objects are tracked: before the first forward, what they are
        now is no change."""
        if self._began is None:
            tracked = {name: each.state_dict() for name, each in self._tracked.items()}
            self._made = self._marks(self._headers(), _saved(self._states | tracked))

    def _headers(self) -> list[dict[str, Any]]:
        """What the record says of each optimizer, in the order in which they were made; of those
        that were not made again what the last one said."""
        for known in self._optimizers:
            optimizer = known.optimizer()
            if optimizer is not None:
                known.header |= optimizer.header()
        return [known.header for known in self._optimizers] + self._waiting

    def _buffers_now(self) -> dict[str, torch.Tensor]:
        model = self._model()
        if model is None:
            return self._buffers
        return {name: local(b).detach().clone() for name, b in persistent_buffers(model)}

    def _known(self, optimizer: Optimizer) -> _Known | None:
        return next((k for k in self._optimizers if k.optimizer() is optimizer), None)

    # Giving back

    def restore(self, optimizer: Optimizer) -> None:
        """An optimizer was made: it goes on as the one in its place did, if there was one. Raises
        `ConfigError` where it is another one."""
        known = _describe(optimizer)
        for other in self._optimizers:
            if other.optimizer() is not None and not other.parameters & known.parameters:
                raise ConfigError(
                    "durability commits the steps of one optimizer, and there is another "
                    "one: give one all parameters, in groups, or set durability='off'"
                )
        if self._waiting:
            saved, here = self._waiting[0], known.header
            is_same = all(saved[key] == here[key] for key in ("kind", "names")) and all(
                optimizer.defaults.keys() <= group.keys() for group in saved["param_groups"]
            )
            if not is_same:
                raise ConfigError(
                    "the states that were taken over belong to another optimizer "
                    f"({saved['kind']}), or to other parameters in its groups; make the same "
                    "optimizers in the same order, with all groups, or begin anew in another "
                    "directory"
                )
            optimizer.take_header(saved)
            known.saved = self._waiting.pop(0)
        elif self._is_resumed:
            optimizer.forget_states()
            self._is_sealed = False  # what was taken over lacks it
        self._optimizers = [
            other for other in self._optimizers if not other.parameters & known.parameters
        ] + [known]
        self._mark_made()

    def track(self, objects: Mapping[str, Any]) -> None:
        """See `Engine.track`."""
        for name, value in objects.items():
            if not all(hasattr(value, method) for method in ("state_dict", "load_state_dict")):
                raise ConfigError(
                    f"{name} is {in_words(value)}; what is tracked has state_dict and "
                    "load_state_dict"
                )
            if name in self._tracked:
                raise ConfigError(f"{name} is tracked already; choose another name")
        _saved({name: value.state_dict() for name, value in objects.items()})
        given = [name for name in objects if name in self._states]
        for name in objects if self._store.taken_record.step else ():
            if name not in given:
                log.warning("nothing is committed of %s, which goes on as it is", name)
        for name, value in objects.items():
            if name in given:
                value.load_state_dict(self._states.pop(name))
            self._tracked[name] = value
        for known in self._optimizers if given else ():
            optimizer = known.optimizer()
            if optimizer is not None and known.saved is not None and self._random is None:
                optimizer.take_groups(known.saved)  # a scheduler has set its first rate
        self._mark_made()


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """32 hex digits that say of which names the marks differ."""
    names = sorted(n for n in {**before, **now} if before.get(n) != now.get(n))
    return _digest(repr(names).encode())


def _digest(content: bytes | memoryview) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _is_fixed(block: Block) -> bool:
    """Whether what is committed of a block, or lies in files of the user, would be rewritten in its
    only place."""
    home = home_of(block)
    return block.spec.in_files or (home.is_sealed and len(home.extents) < 2)


def _describe(optimizer: Optimizer) -> _Known:
    """An optimizer, and whose it is: the names of the parameters in its groups."""
    names = {
        id(parameter): name
        for unit in optimizer.units
        for parameter, name in zip(unit.parameters, unit.names, strict=True)
    }
    groups = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
    header = optimizer.header() | {"kind": type(optimizer).__name__, "names": groups}
    return _Known(weakref.ref(optimizer), header, frozenset(names))


def _form(buffer: torch.Tensor) -> str:
    layout = "" if buffer.layout is torch.strided else f" {buffer.layout}"
    return f"{buffer.dtype} {list(local(buffer).shape)}{layout}"


def _plain(header: dict[str, Any]) -> dict[str, Any]:
    """A header whose numbers are Python's: a rate may be one of numpy's."""
    groups = [
        {key: v.item() if isinstance(v, np.generic) else v for key, v in group.items()}
        for group in header["param_groups"]
    ]
    return header | {"param_groups": groups}


def _saved(states: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The bytes (uint8) of each of them. Raises `CheckpointError` for what could not be read again
    without running its code."""
    found = {}
    for name, state in states.items():
        stream = pack_item(f"the state of {name}", state)
        found[name] = torch.frombuffer(bytearray(stream.getbuffer()), dtype=torch.uint8)
    return found
