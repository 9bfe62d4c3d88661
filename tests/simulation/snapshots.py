"""Snapshots of a seed: when its processes begin them, which of them may be in the folder then, and
whether what is there has the bits of the undisturbed run.

A snapshot begins at a moment of a step that the seed draws, on all ranks. All have one directory,
so each replaces the one before. Its files lie in a folder of the simulated disks, which all ranks
share: a power cut takes from it what was not flushed.

- A snapshot whose `wait` returns is there, and whole: after a kill, and after a power cut.
- What loads is one of those that may be there, with the bits that the undisturbed run had at the
  step that it names, and with what was noted with it.
- A snapshot that nothing strikes ends well, and leaves nothing beside it. What fails in its files
  ends no run.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from infinity.checkpoint.files import METADATA, sibling
from infinity.errors import CheckpointError
from simulation.chance import Chance
from simulation.disk import Folder, Plain
from simulation.life import Wrong
from simulation.machine import Blow
from simulation.programs import MOMENTS, Program, Run, same
from simulation.system import SAVED

if TYPE_CHECKING:
    from infinity.checkpoint.snapshots import SnapshotTask
    from simulation.seeds import Simulation

SHARE = 0.25
"""Of how many seeds the processes make snapshots."""
NAME = "snapshot"
_COUNTS = (0, 1, 1, 2)


class Content(NamedTuple):
    """What an undisturbed run has on one rank, when so many `steps` of the program are made: the
    engine's number of the last step, and its states."""

    steps: int
    number: int
    states: dict[str, Any]


def watched(run: Run, contents: list[Content]) -> None:
    """Have `run` add what it has between its steps to `contents`."""

    def note(moment: str) -> None:
        if moment in ("begin", "prepared", "end"):
            assert run.engine is not None
            report, states = run.engine.report(), run.states()
            states.pop("progress")
            contents.append(Content(run.progress.step, report.steps + report.skipped_steps, states))

    run.between = note


@dataclass(eq=False)
class Snapshot:
    """One that a process began, on each of its ranks: number `number` of machine `life`. What is
    committed has `least` steps of the program, and at most `most`."""

    life: int
    number: int
    least: int = 0
    most: int = 0
    tasks: list[SnapshotTask] = field(default_factory=list)
    is_cancelled: bool = False

    @property
    def extra(self) -> dict[str, int]:
        """What is noted with it."""
        return {"life": self.life, "number": self.number}

    @property
    def is_done(self) -> bool:
        """Whether a rank was told that it is there."""
        return any(_error_of(task) is None for task in self.tasks)


def _error_of(task: SnapshotTask) -> CheckpointError | None:
    """What it ended with."""
    if not task.done():
        raise Wrong(f"the snapshot of step {task.step} goes on after its engine was closed")
    try:
        task.wait()
    except CheckpointError as error:
        return error
    return None


def are_wanted(seed: int) -> bool:
    """Whether the processes of a seed make snapshots."""
    return Chance("snapshots", seed).of("wanted") < SHARE


class Snapshots:
    """Those of one seed."""

    def __init__(self, simulation: Simulation, wanted: Program, seed: int) -> None:
        self._simulation, self._program = simulation, wanted
        self._chance = Chance("snapshots", seed)
        self.are_wanted = are_wanted(seed)
        self.folder = Folder()
        """Where they are."""
        self._possible: list[Snapshot | None] = [None]  # what the folder may have
        self._life: dict[int, Snapshot] = {}
        self._lock = threading.Lock()

    def begin_with(self, life: int, run: Run, first: int) -> None:
        """A process begins with step `first` of its program, on machine `life`: have it make those
        that are drawn."""
        if not self.are_wanted:
            return
        chance, steps = self._chance.child(life), self._program.steps
        wanted: dict[tuple[int, str], int] = {}
        for number in range(chance.one(_COUNTS, "count")):
            at = first + chance.below(steps - first + 1, "at", number, first)
            moment = chance.one(MOMENTS, "moment", number) if at < steps else "end"
            wanted.setdefault((at, moment), number)
        cancelled = {number for number in range(2) if chance.of("cancelled", number) < 0.1}
        begun: list[SnapshotTask] = []

        def between(moment: str) -> None:
            number = wanted.pop((run.progress.step, moment), None)
            if number is None:
                return
            for task in begun:
                task.finish()
            begun.append(self._begin(life, number, run, first))
            if number in cancelled:
                self._life[number].is_cancelled = True
                begun[-1].cancel()

        run.between = between

    def _begin(self, life: int, number: int, run: Run, first: int) -> SnapshotTask:
        assert run.engine is not None
        now = run.progress.step
        with self._lock:
            mine = self._life.setdefault(number, Snapshot(life, number))
            mine.least, mine.most = max(first, now - run.steps_per_commit), now
        task = run.engine.snapshot(run.saved / NAME, mine.extra)
        mine.tasks.append(task)
        return task

    def end(self, struck: Sequence[Blow], may_fail: bool) -> None:
        """The processes of a life have ended; these blows came. They `may_fail` without any."""
        for mine in self._life.values():
            for error in filter(None, map(_error_of, mine.tasks)):
                if not struck and not may_fail and not mine.is_cancelled:
                    raise Wrong(f"a snapshot that nothing strikes ends with: {error}")
            self._possible = [mine] if mine.is_done else [*self._possible, mine]
        left = (
            set(self.folder.names) - {NAME} if any(s.is_done for s in self._life.values()) else ()
        )
        self._life = {}
        if not struck and not may_fail and left:
            raise Wrong(f"snapshots leave {', '.join(sorted(left))}")

    def left(self, power: bool, chance: Chance) -> None:
        """All processes have ended, or the power was cut: see what is there now."""
        if not self.are_wanted:
            return
        if power:
            self.folder = self.folder.left(chance)
        found = self._simulation.loaded(self._program, self.folder)
        if isinstance(found, CheckpointError):
            if None not in self._possible:
                raise Wrong(f"a snapshot that was done does not load: {found}")
            there = None
        else:
            there = self._check(found)
        if power:  # else a power cut may yet take it
            self._possible = [there]

    def _check(self, found: Sequence[Loaded]) -> Snapshot:
        extra = found[0].extra
        there = next((s for s in self._possible if s is not None and s.extra == extra), None)
        if there is None:
            may = [None if s is None else s.extra for s in self._possible]
            raise Wrong(f"a snapshot of {extra} is there, where those may be: {may}")
        if any(each.extra != extra for each in found):
            raise Wrong(f"ranks have parts of several snapshots: {[e.extra for e in found]}")
        steps = {task.step for task in there.tasks}
        if len(steps) > 1:
            raise Wrong(f"the ranks make snapshots of several steps: {sorted(steps)}")
        contents = self._simulation.contents(self._program)
        for rank, each in enumerate(found):
            possible = [
                content
                for content in contents[rank]
                if there.least <= content.steps <= there.most and {content.number} == steps
            ]
            differences = [same(each.states, content.states) for content in possible]
            if rank:  # it has the buffers of the first one
                buffers = [name for name in found[0].states if name.startswith("norm.")]
                differences = [[n for n in names if n not in buffers] for names in differences]
            if all(differences):
                least = min(differences, key=len, default=["all, for there is no such step"])
                raise Wrong(
                    f"the snapshot of step {steps} (rank {rank}) has other bits than the "
                    f"undisturbed run: {', '.join(least[:4])}"
                )
        return there


class Loaded(NamedTuple):
    """What a checkpoint gives one rank."""

    states: dict[str, Any]
    extra: dict[str, Any]


def load(where: Path) -> Callable[[Run], Loaded]:
    """What loads the snapshot in the real folder `where`. Raises `CheckpointError`."""

    def loads(run: Run) -> Loaded:
        run.begin(resume=False)
        assert run.engine is not None
        extra = run.engine.load_checkpoint(where / NAME, run.optimizer)
        states = run.states()
        states.pop("progress")
        return Loaded(states, extra)

    return loads


def put(folder: Folder, where: Path) -> None:
    """Write what `folder` has to the real folder `where`, which is new."""
    where.mkdir()
    for name, node in folder.names.items():
        if isinstance(node, Plain):
            (where / name).write_bytes(node.now)
        else:
            put(node, where / name)


def check_metadata(where: Path) -> None:
    """DCP's own readers need its file. Raises `Wrong` where that is not whole."""
    there = where / NAME if (where / NAME).exists() else sibling(where / NAME, "old")
    try:
        pickle.loads((there / METADATA).read_bytes())
    except Exception as error:
        raise Wrong(f"{METADATA} of a snapshot is not whole: {error!r}") from None


def is_of_files(blow: Blow) -> bool:
    """Whether it only fails an operation on the files of a snapshot: that must end no run."""
    return blow.moment == "fails" and blow.operation.place.name.startswith(f"{SAVED}/")
