"""The state of a Trainer in a record of the engine: notes, random states, and the log.

[Note: batches ahead]
accelerate fetches batch N + 1 before it hands out batch N. So what datasets and collators draw for
batch N + 1 comes before the dropout of batch N. After a resume both are fetched at once. So a note
has the random state from before each batch that is fetched and not trained on, and the fetch starts
from it again. The state of the note itself follows. Batches of worker processes draw from states of
their own, which no note has.
"""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infinity.device import ComputeDevice
from infinity.durable.record import RandomStates
from infinity.engine import Engine

log = logging.getLogger("infinity")

UPDATED, STEPPED, EPOCH_ENDED = "updated", "stepped", "epoch ended"
"""The moments of notes. A note has all of the step up to there: the update of the weights;
scheduler, callbacks, log, evaluation and checkpoint; the end of the epoch."""


class TrainerNotes:
    """Holds the last note of the trainers of one engine. The engine may ask for it at any time, and
    commits it with its states.

    A note of an update is made before the update, and holds from the moment on at which the engine
    has the step.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._last: dict[str, Any] = {}
        self._update: dict[str, Any] = {}
        self._step = 0  # of the engine, from which on `_update` holds
        self.committed: dict[str, Any] = {}
        """The note that the engine was resumed with; empty without."""
        self.trainings = 0
        """The number of `train()` calls on this engine, of this process."""

    def make(self, moment: str, note: dict[str, Any]) -> None:
        """The next note, of `moment`."""
        note = note | {"training": self.trainings, "moment": moment}
        if moment == UPDATED:
            self._update, self._step = note, self._posted_step + 1
        else:
            self._last, self._update = note, {}

    @property
    def is_updated(self) -> bool:
        """Whether the last note is that of an update, or of one that was left out."""
        return bool(self._update)

    @property
    def _posted_step(self) -> int:
        engine = self._engine()
        return 0 if engine is None else engine.posted_step

    def state_dict(self) -> dict[str, Any]:
        if not self._update or self._posted_step < self._step:
            return self._last
        norm = self._update["norm"]  # known by now, without a wait
        return self._update | {"norm": None if norm is None else float(norm)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last = self.committed = state


_NOTES: weakref.WeakKeyDictionary[Engine, TrainerNotes] = weakref.WeakKeyDictionary()


def notes_of(engine: Engine) -> TrainerNotes:
    """The notes of the trainers of `engine`, which it commits from the first call on."""
    if engine not in _NOTES:
        notes = TrainerNotes(engine)
        engine.track(trainer=notes)
        _NOTES[engine] = notes
    return _NOTES[engine]


def grow(scaler: Any) -> None:
    """Do the `update` of a `GradScaler` after a step with finite gradients."""
    state = scaler.state_dict()
    state["_growth_tracker"] += 1
    if state["_growth_tracker"] == state["growth_interval"]:
        state["scale"] *= state["growth_factor"]
        state["_growth_tracker"] = 0
    scaler.load_state_dict(state)


class Fetches:
    """The random states before batches that are fetched and not trained on.

    See [Note: batches ahead]. Batches are counted from the begin of their epoch, on this rank.
    """

    def __init__(self, device: ComputeDevice) -> None:
        self._device = device
        self.begin()

    def begin(self, first: int = 0, ahead: RandomStates | None = None) -> None:
        """An epoch begins with batch `first`, which is fetched from the state `ahead`, if given."""
        self._first, self._ahead = first, ahead
        self._then: RandomStates | None = None
        self._before: dict[int, RandomStates] = {}

    def continue_from(self, states: RandomStates) -> None:
        """Have the batches after the first one fetched from `states`."""
        self._then = states

    def settle(self) -> None:
        """Continue from the states of `continue_from`, once."""
        if self._then is not None:
            self._then.restore(self._device)
            self._then = None

    def before(self, batch: int) -> None:
        """Batch number `batch` is fetched next."""
        if batch < self._first:
            return  # it is skipped
        if batch == self._first and self._ahead is not None:
            self._ahead.restore(self._device)
        elif batch > self._first:
            self.settle()
        self._before[batch] = RandomStates.of(self._device)

    def ahead(self, trained: int) -> RandomStates | None:
        """The state before batch number `trained`, or None if it is not fetched or comes from a
        worker process. Forgets earlier batches."""
        self._before = {batch: each for batch, each in self._before.items() if batch >= trained}
        return self._before.get(trained)

    def watch(self, loader: Any) -> None:
        """Have `before` called for each batch that `loader` fetches in this process. DataLoader
        asks its batch sampler right before it fetches a batch."""
        sampler = loader.batch_sampler
        kind = type(sampler)

        def batches(sampler: Any) -> Iterator[Any]:
            for number, batch in enumerate(kind.__iter__(sampler)):
                self.before(number)
                yield batch

        if sampler is not None and not loader.num_workers:
            sampler.__class__ = type(kind.__name__, (kind,), {"__iter__": batches})


class TrainingLog:
    """The log of one training as JSON lines, which follow those of other trainings in the file. A
    note has the bytes at which it begins and ends. Without a path it has no lines."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.begin = self.end = 0

    def open(self, begin: int | None = None, end: int = 0) -> list[dict[str, Any]]:
        """Cut the file at `end`, and return the entries from `begin` on. Without `begin`, the log
        begins at the end of the file."""
        if self._path is None:
            return []
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+b") as file:
            size = file.seek(0, os.SEEK_END)
            self.begin = size if begin is None else min(begin, size)
            self.end = min(size, self.begin if begin is None else end)
            file.seek(self.begin)
            whole, _, part = file.read(self.end - self.begin).rpartition(b"\n")
            self.end -= len(part)
            file.truncate(self.end)
        if part or size < end:
            log.warning("%s lost its last entries; the weights lost nothing", self._path)
        return [json.loads(line) for line in whole.splitlines()]

    def write(self, entry: dict[str, Any]) -> None:
        """Append `entry`."""
        if self._path is not None:
            line = json.dumps(entry, default=float).encode() + b"\n"
            with self._path.open("ab") as file:
                file.write(line)
            self.end += len(line)
