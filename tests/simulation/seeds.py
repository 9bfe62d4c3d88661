"""One seed: a program, several machines that it runs on one after the other, and what becomes of
each; with several ranks, one machine for each at a time.

What is looked at, beside that the engine goes on at all:

- I8, I9: losses, rates and, in the end, weights, buffers, moments and step counts have the bits of
  a run that nobody disturbed, in other budgets and without durability; so have the random numbers,
  which are in the losses. A blow costs one step at most, or two or three where as many are
  committed together: each process draws.
- I3: at rest no staging slot is in use and no block is pinned. Slots that end are poisoned.
- I5: no tier was ever over its budget.
- I7: no request on the drives overlaps a write that nobody has waited for, and no memory changes
  while it is written.
- I6: all ranks join the same collectives, as they say themselves; and go on with one step.
- I8: runs that nobody disturbed move the bytes that the planner states; what is placed where is the
  same after each resume, or it would be refused.
- I4: a transfer that stops too soon, an error and a full drive each end in an error of the package.
- No thread, no descriptor and no lock is left, whatever ended the engine.

I1 and I2 show in the bits alone, I10 is asked once for each program, whose
budgets are the smallest ones that the refusals name.
"""

from __future__ import annotations

import errno
import itertools
import shutil
import threading
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import infinity
from infinity.directories.commits import COMMIT_NAMES
from infinity.errors import CheckpointError
from infinity.tiers.manifest import STATES_NAME
from simulation.chance import Chance
from simulation.disk import Folder, Plain
from simulation.life import Life, Work, Wrong, failures_elsewhere, in_time
from simulation.machine import Blow, Machine, Operation, Place
from simulation.processes import Together
from simulation.programs import (
    MOST_RANKS,
    SNAPSHOTS,
    Program,
    Run,
    budgets,
    number_of,
    program,
    same,
)
from simulation.snapshots import (
    NAME,
    Content,
    Loaded,
    Snapshots,
    are_wanted,
    check_metadata,
    is_of_files,
    load,
    put,
    watched,
)
from simulation.system import SAVED, SimulatedSystem

MOST_BLOWS = 3
ROOMY = {"gpu_memory": 1 << 24, "cpu_memory": 1 << 24}
STEADY = 3  # steps until what is moved repeats itself
KINDS = {
    "write": 6,
    "flush": 4,
    "sync": 6,
    "store": 5,
    "read": 2,
    "rename": 2,
    "create": 1,
    "unlink": 1,
    "resize": 1,
    "allocate": 1,
    "load": 1,
    "tell": 4,
    "join": 3,
}
"""How often a blow comes at an operation of each kind."""
ROT = 0.1
"""Of how many machines a bit rots (`Plain.rot`): the next process says so, or needs none of it."""
LEAVES = (*[""] * 8, "between steps", "in a step", "looks", "lets go")
"""How a process leaves that nothing strikes before: it is closed, after a backward or not, was
there to evaluate only, or lets go of its model."""
LEAVES_OF_RANKS = (*LEAVES, "alone", "alone within")
"""One of several ranks may also do so alone, between steps or after one whose scheduler did not
step yet, and the others find it gone."""
ALONE = {"alone": "between steps", "alone within": "before its scheduler"}
IN_SNAPSHOTS = 0.6
"""Of how many blows of a seed with snapshots are at their files."""
LASTING = ("write", "read", "flush", "sync")


@dataclass
class Found:
    """What a seed has found: `text` says what is wrong, if anything."""

    seed: int
    text: str = ""
    blows: Counter[str] = field(default_factory=Counter)
    """Those that came, and how many machines ended without one: the "last" ones, those of a process
    that "leaves", and those on which the one that was to come did not ("none")."""


@dataclass(frozen=True)
class Shape:
    """What is known of a program: for each rank, what an undisturbed run shows, and all operations
    of a run that is new, and of one that goes on."""

    shown: Sequence[dict[int, str]]
    states: Sequence[dict[str, object]]
    new: Sequence[Counter[Place]]
    resumed: Sequence[Counter[Place]]
    contents: Sequence[Sequence[Content]]
    """Between its steps."""


class Simulation:
    """Runs seeds. In the real folder `where` are checkpoints, and empty folders that stand for
    those of the drives."""

    def __init__(self, system: SimulatedSystem, where: Path) -> None:
        self._system = system
        self._where = where
        self._shapes: dict[int, Shape] = {}
        self._smallest: dict[int, dict[str, int]] = {}
        self._saved: dict[int, Sequence[Counter[Place]]] = {}
        self._loads = itertools.count()
        for number in range(2):
            for rank in range(MOST_RANKS):
                (self._path(number) / f"rank{rank}").mkdir(parents=True, exist_ok=True)

    def _path(self, number: int) -> Path:
        return self._where / f"nvme{number}"

    def _drives(self, wanted: Program) -> tuple[Path, ...]:
        return tuple(self._path(number) for number in range(wanted.drives))

    def run(self, seed: int) -> Found:
        """Run a seed, on the main thread."""
        found = Found(seed)
        try:
            with failures_elsewhere() as failures, in_time(seed):
                _Trial(self, seed, found).run()
            if failures:
                raise Wrong(failures[0])
        except Wrong as error:
            found.text = str(error)
        except Exception:
            found.text = traceback.format_exc()
        return found

    # What is known of a program

    def shape(self, seed: int) -> Shape:
        """What is known of the program of `seed`; found out once."""
        number = number_of(seed)
        if number not in self._shapes:
            self._shapes[number] = self._look(program(number))
        if are_wanted(seed):
            self.places_saved(program(number))
        return self._shapes[number]

    def _look(self, wanted: Program) -> Shape:
        shown: list[dict[int, str]] = [{} for _ in range(wanted.ranks)]
        states: list[dict[str, object]] = [{} for _ in range(wanted.ranks)]
        contents: list[list[Content]] = [[] for _ in range(wanted.ranks)]

        def save(rank: int, run: Run) -> None:
            run.begin(resume=False)
            run.go_on(lambda step, text: None, until=1)
            run.save()

        def train(rank: int, run: Run) -> None:
            run.begin(resume=False)
            watched(run, contents[rank])
            run.go_on(shown[rank].__setitem__)
            states[rank] |= run.states()

        def follow(rank: int, run: Run) -> None:
            _follows(wanted, run, shown[rank], states[rank])

        def stop(rank: int, run: Run) -> None:
            run.begin(resume=True)
            run.go_on(lambda step, text: None, until=wanted.half)

        for work in (save, train) if wanted.load_at >= 0 else (train,):
            self._undisturbed(wanted, self.machines(wanted), work, "off", ROOMY)
        new, halfway = self.machines(wanted), self.machines(wanted)
        self._undisturbed(wanted, new, follow)
        self._undisturbed(wanted, halfway, stop)
        left = [machine.left(True, Chance("halfway")) for machine in halfway]
        resumed = self.machines(wanted, left)
        self._undisturbed(wanted, resumed, follow)
        counts = ([each.counts for each in machines] for machines in (new, resumed))
        return Shape(shown, states, *counts, contents)

    def _undisturbed(
        self,
        wanted: Program,
        machines: Sequence[Machine],
        work: Work,
        durability: str = "step",
        given: dict[str, int] | None = None,
    ) -> None:
        given = self.budgets(wanted) if given is None else given
        for error in self.life(wanted, machines, work, given, durability):
            if error is not None:
                raise error

    def budgets(self, wanted: Program) -> dict[str, int]:
        """The smallest budgets of a program, on each rank."""
        if wanted.number not in self._smallest:

            def wrap(given: dict[str, int]) -> infinity.BudgetError | None:
                errors = self.life(
                    wanted, self.machines(wanted), lambda rank, run: run.wrap(False), given
                )
                refused = next((e for e in errors if isinstance(e, infinity.BudgetError)), None)
                if refused is None and any(errors):
                    raise next(filter(None, errors))
                return refused

            self._smallest[wanted.number] = budgets(wanted, wrap)
        return self._smallest[wanted.number]

    # Machines and processes

    def machines(
        self,
        wanted: Program,
        disks: Sequence[Sequence[Folder]] = (),
        chance: Chance | None = None,
        blows: Mapping[int, Blow] | None = None,
        boot: int = 0,
    ) -> list[Machine]:
        """One for each rank, with the folders that the one before has left, if any."""
        disks = disks or [[Folder() for _ in range(wanted.drives)] for _ in range(wanted.ranks)]
        return [
            Machine(
                disk,
                Chance("quiet") if chance is None else _of_rank(chance, wanted, rank),
                (blows or {}).get(rank),
                boot,
            )
            for rank, disk in enumerate(disks)
        ]

    def life(
        self,
        wanted: Program,
        machines: Sequence[Machine],
        work: Work,
        given: dict[str, Any],
        durability: int | str = "step",
        keeps_store: bool = False,
        saved: Folder | None = None,
    ) -> list[BaseException | None]:
        """`work` in a process on each machine, whose engine is closed after it; returns what ended
        each, and raises what must not end one. `keeps_store`: see `Together`. Snapshots are in
        `saved`."""
        there = self._where / SNAPSHOTS, Folder() if saved is None else saved
        drives = self._drives(wanted)
        checkpoint = self._where / f"checkpoint{wanted.number}"
        life = Life(wanted, machines, work, (drives, checkpoint, given, durability))
        if wanted.ranks == 1:
            self._system.boot({None: machines[0]}, drives, there)
            life.alone()
        else:
            together = Together(machines, keeps_store)
            self._system.boot(dict(zip(together.ranks, machines, strict=True)), drives, there)
            life.together(together)
        return life.errors

    # Snapshots

    def contents(self, wanted: Program) -> Sequence[Sequence[Content]]:
        """What an undisturbed run has between its steps, by rank."""
        return self._shapes[wanted.number].contents

    def places_saved(self, wanted: Program) -> Sequence[Counter[Place]]:
        """All operations on the files of a snapshot that replaces another one, by rank."""
        if wanted.number not in self._saved:
            machines = self.machines(wanted)

            def save(rank: int, run: Run) -> None:
                run.begin(resume=False)
                assert run.engine is not None
                run.go_on(lambda step, text: None, until=1)
                for _ in range(2):
                    run.engine.snapshot(run.saved / NAME).wait()

            self._undisturbed(wanted, machines, save)
            self._saved[wanted.number] = [
                Counter({p: n for p, n in each.counts.items() if p.name.startswith(f"{SAVED}/")})
                for each in machines
            ]
        return self._saved[wanted.number]

    def loaded(self, wanted: Program, saved: Folder) -> Sequence[Loaded] | CheckpointError:
        """What the snapshot in `saved` gives each rank of another run."""
        where = self._where / f"loads{next(self._loads)}"
        put(saved, where)
        found: dict[int, Loaded] = {}
        loads = load(where)
        try:
            errors = self.life(
                wanted,
                self.machines(wanted),
                lambda rank, run: found.__setitem__(rank, loads(run)),
                ROOMY,
                "off",
            )
            refused = next((e for e in errors if isinstance(e, CheckpointError)), None)
            if refused is not None:
                return refused
            for error in filter(None, errors):
                raise error
            check_metadata(where)
            return [found[rank] for rank in range(wanted.ranks)]
        finally:
            shutil.rmtree(where)

    def look_behind(self, machine: Machine) -> None:
        """A process on `machine` has ended. Raises `Wrong` for what it has left, or did."""
        left = self._system.open_names(machine)
        threads = [t.name for t in threading.enumerate() if t.name.startswith("infinity-")]
        wrongs = [
            *machine.wrongs,
            *(f"{name} was left open" for name in left),
            *(f"the thread {name} was left" for name in threads),
        ]
        if wrongs:
            raise Wrong(wrongs[0])


def _of_rank(chance: Chance, wanted: Program, rank: int) -> Chance:
    """The decisions about one rank; those of one that is alone are the seed's."""
    return chance if wanted.ranks == 1 else chance.child("rank", rank)


def _follows(wanted: Program, run: Run, shown: dict[int, str], states: dict[str, object]) -> None:
    """An undisturbed run shows what a run without durability shows, and moves what is planned."""

    def see(step: int, text: str) -> None:
        if text != shown[step]:
            raise Wrong(f"step {step} shows {text}, and {shown[step]} undisturbed")

    first = run.begin(resume=True)
    run.go_on(see)
    odd = max(wanted.write_at, wanted.load_at, wanted.skip_at, wanted.evaluate_at)
    wrongs = run.wrongs()
    # What a guess saves depends on the order of threads.
    if wanted.update != "speculative" and wanted.steps - max(first, odd + 1) >= STEADY:
        wrongs += run.traffic()
    if wrongs:
        raise Wrong(wrongs[0])
    differs = same(run.states(), states)
    if differs:
        raise Wrong(f"undisturbed, {', '.join(differs[:4])} are other bits than without durability")


@dataclass
class _Seen:
    """What was seen of one process: the step that it began with and the one that it was at, the
    last one of which the end was seen on a machine that ran, and whether a load was cut off."""

    first: int | None = None
    at: int = 0
    ended: int = -1
    was_loading: bool = False


class _Trial:
    """One seed on its way."""

    def __init__(self, simulation: Simulation, seed: int, found: Found) -> None:
        self._simulation, self._found = simulation, found
        self._chance = Chance("seed", seed)
        self._program = program(number_of(seed))
        self._shape = simulation.shape(seed)
        self._disks: list[list[Folder]] = []
        self._ended = -1  # the last step that must be committed by now, as any rank has seen
        self._reached = 0  # the step that any process was at
        self._least = 0  # that the next ones must be at, or beyond
        self._is_over = False  # nothing is left to go on from, as is said
        self._is_rotten = self._was_loading = False
        self._is_complete = False
        self._snapshots = Snapshots(simulation, self._program, seed)

    def run(self) -> None:
        """All machines."""
        blows = 1 + self._chance.below(MOST_BLOWS, "blows")
        for life in range(blows):
            ways = LEAVES if self._program.ranks == 1 else LEAVES_OF_RANKS
            self._live(life, self._blows(life), self._chance.one(ways, "leaves", life))
            if self._is_over:
                return
            if self._is_complete:
                break
        self._live(blows, {}, "")
        if not self._is_over and self._chance.of("look again") < 0.1:
            self._live(blows + 1, {}, "")

    # What is to happen

    def _blows(self, life: int) -> dict[int, Blow]:
        """By rank. Where one is struck, others are as well now and then: at the same operation, so
        that they have just come to it, or have passed it; or anywhere."""
        chance, ranks = self._chance.child("blow", life), self._program.ranks
        if ranks == 1:
            return {0: self._blow(chance, 0, life)}
        victim = chance.below(ranks, "victim")
        blow = self._blow(chance, victim, life)
        blows = {victim: blow}
        for rank in set(range(ranks)) - {victim}:
            too = chance.of("too", rank)
            if too < 0.3:
                place = blow.operation.place
                name = place.name.replace(f"rank{victim}", f"rank{rank}")
                operation = blow.operation._replace(place=place._replace(name=name))
                blows[rank] = blow._replace(
                    operation=operation, moment=self._moment(chance.child(rank), place.kind)
                )
            elif too < 0.4:
                blows[rank] = self._blow(chance.child(rank), rank, life)
        return blows

    def _blow(self, chance: Chance, rank: int, life: int) -> Blow:
        is_new = life == 0 or not self._disks
        places = (self._shape.new if is_new else self._shape.resumed)[rank]
        is_saved = self._snapshots.are_wanted and chance.of("saved") < IN_SNAPSHOTS
        if is_saved and (saved := self._simulation.places_saved(self._program)[rank]):
            places = saved
        kinds = [kind for kind in KINDS if any(place.kind == kind for place in places)]
        kind = chance.one([kind for kind in kinds for _ in range(KINDS[kind])], "kind")
        there = sorted(place for place in places if place.kind == kind)
        records = [place for place in there if place.name.endswith(COMMIT_NAMES)]
        place = chance.one(records if records and chance.of("record") < 0.5 else there, "place")
        count = places[place]
        if not is_new and not place.name.startswith(SAVED):  # that of the second half
            half = self._program.steps - self._program.half
            count = -(-count * (self._program.steps - self._ended) // half)
        when = chance.of("when")
        number = chance.below(count, "number") if when < 0.5 else 0 if when < 0.8 else count - 1
        moment = self._moment(chance, kind)
        if kind in ("read", "write"):
            full = errno.ENOSPC if place.name.startswith(SAVED) else 0
            code = chance.one((errno.EIO, full), "code")
        else:
            code = errno.ENOSPC if kind in ("allocate", "store", "create") else errno.EIO
        return Blow(Operation(place, number), moment, code)

    @staticmethod
    def _moment(chance: Chance, kind: str) -> str:
        return chance.one(
            ("before", "during" if kind in LASTING else "before", "after", "after", "fails"),
            "moment",
        )

    def _live(self, life: int, blows: Mapping[int, Blow], leaves: str) -> None:
        """One machine for each rank, until all end. `leaves`: how the processes do before the end
        of the program, "" where they do not."""
        chance = self._chance.child("life", life)
        simulation, ranks = self._simulation, self._program.ranks
        machines = simulation.machines(
            self._program, self._disks, chance.child("machine"), blows, life
        )
        loner = chance.below(ranks, "loner") if leaves.startswith("alone") else -1
        try:
            errors = self._end_of_processes(life, machines, leaves, loner, chance)
            came = [blow for rank, blow in blows.items() if machines[rank].was_struck]
            self._snapshots.end(came, loner >= 0 or self._is_rotten)
            if any(map(self._is_refusal, errors)):
                self._is_over = True
                self._snapshots.left(False, chance)
                return
            struck = bool(came)
            for error in errors:
                if error is not None and all(map(is_of_files, came)) and loner < 0:
                    raise Wrong("".join(traceback.format_exception(error)))
            for machine in machines:
                simulation.look_behind(machine)
            if not struck and loner < 0 and leaves not in ("looks", "lets go"):
                self._least = self._at
        except Wrong as wrong:
            told = ", ".join(f"rank {rank} by {blow}" for rank, blow in blows.items())
            told = told if ranks > 1 else str(blows.get(0))
            raise Wrong(f"machine {life}, to be struck by {told}: {wrong}") from None
        self._count(machines, blows, leaves)
        self._is_complete = not struck and not leaves
        power = chance.of("power") < 0.65
        self._snapshots.left(power, chance.child("left", "saved"))
        lone = ranks > 1 and chance.of("lone") < 0.3
        self._disks = [
            machine.left(
                power and (machine.was_struck or not lone),
                _of_rank(chance.child("left"), self._program, rank),
            )
            for rank, machine in enumerate(machines)
        ]
        if chance.of("rot") < ROT:
            self._rot(chance)

    def _count(self, machines: Sequence[Machine], blows: Mapping[int, Blow], leaves: str) -> None:
        """Note what has come of the blows."""
        came = [
            f"{blow.operation.place.kind} {blow.moment}"
            for rank, blow in blows.items()
            if machines[rank].was_struck
        ]
        if not came:
            came = [f"leaves {leaves}" if leaves else "none"] if blows else ["last"]
        ranks = self._program.ranks
        self._found.blows.update(what if ranks == 1 else f"of {ranks}: {what}" for what in came)

    def _end_of_processes(
        self, life: int, machines: Sequence[Machine], leaves: str, loner: int, chance: Chance
    ) -> list[BaseException | None]:
        """Processes on all machines; returns the error that ended each."""
        seen = [_Seen() for _ in machines]

        def work(rank: int, run: Run) -> None:
            way = leaves
            if loner >= 0:
                way = "" if rank != loner else ALONE[leaves]
            try:
                if way == "looks":
                    run.wrap(resume=True)
                    run.evaluate(0)
                else:
                    self._train(run, rank, machines[rank], way, seen[rank], life)
            finally:
                seen[rank].at = run.progress.step
                seen[rank].was_loading = run.is_loading

        room = chance.one((1, 1, 3), "room")
        given: dict[str, Any] = {
            name: room * value for name, value in self._simulation.budgets(self._program).items()
        }
        if chance.of("other cache") < 0.4:
            given["cache"] = chance.one(("auto", 0), "cache")
        keeps_store = chance.of("store") < 0.5
        apart = chance.one(("step", "step", 2, 3), "apart")
        try:
            errors = self._simulation.life(
                self._program, machines, work, given, apart, keeps_store, self._snapshots.folder
            )
        finally:
            began = {each.first for each in seen if each.first is not None}
            if began:
                self._was_loading = False
            self._was_loading |= any(each.was_loading for each in seen)
            self._at = max(each.at for each in seen)
            self._reached = max(self._reached, self._at)
            self._ended = max(self._ended, *(each.ended for each in seen))
        if len(began) > 1:
            raise Wrong(f"the ranks go on with different steps: {sorted(began)}")
        return errors

    def _train(
        self, run: Run, rank: int, machine: Machine, leaves: str, seen: _Seen, life: int
    ) -> None:
        first = run.begin(resume=True)
        if first < max(self._ended, self._least):
            raise Wrong(
                f"it goes on with step {first}: {self._ended} was committed, and {self._least} was "
                "next"
            )
        if first > self._reached:
            raise Wrong(f"it goes on with step {first}, and had not passed {self._reached}")
        seen.first = first
        self._snapshots.begin_with(life, run, first)
        shown = self._shape.shown[rank]

        def see(step: int, text: str) -> None:
            if text != shown[step]:
                raise Wrong(f"step {step} shows {text}, and {shown[step]} undisturbed")
            if not machine.is_off:
                seen.ended = run.least_committed

        steps = self._program.steps
        until = first + self._chance.below(steps - first + 1, "until", first) if leaves else steps
        run.go_on(see, until)
        if leaves == "in a step" and until < steps:
            run.accumulate(until)
            return
        if leaves == "before its scheduler" and until < steps:
            run.step_alone(until)
            return
        if leaves == "lets go":
            run.leave()
            return
        wrongs = run.wrongs()
        if wrongs:
            raise Wrong(wrongs[0])
        if until < steps:
            return
        differs = same(run.states(), self._shape.states[rank])
        if differs:
            raise Wrong(f"in the end {', '.join(differs[:4])} are other bits than undisturbed")

    def _rot(self, chance: Chance) -> None:
        ranks = self._program.ranks
        rank = chance.below(ranks, "rank")
        folder = chance.one(self._disks[rank], "folder")
        if ranks > 1:
            below = folder.names.get(f"rank{rank}")
            folder = below if isinstance(below, Folder) else Folder()
        states = folder.names.get(STATES_NAME)
        if isinstance(states, Plain) and states.now:
            states.rot(chance)
            self._is_rotten = True

    def _is_refusal(self, error: BaseException | None) -> bool:
        """Whether nothing is left to go on from, and that is said: where a bit has rotten; or a
        load was cut off, for what is frozen has one place."""
        if self._is_rotten and isinstance(error, infinity.InfinityError):
            return True
        return (
            self._program.frozen
            and self._was_loading
            and "was killed while it loaded a checkpoint" in str(error)
        )
