"""One seed: a program, several machines that it runs on one after the other, and what becomes of
each.

What is looked at, beside that the engine goes on at all:

- I8, I9: losses, rates and, in the end, weights, buffers, moments and step counts have the bits of
  a run that nobody disturbed, in other budgets and without durability; so have the random numbers,
  which are in the losses. A blow costs one step at most, or two or three where as many are
  committed together: each process draws.
- I3: at rest no staging slot is in use and no block is pinned. Slots that end are poisoned.
- I5: no tier was ever over its budget.
- I7: no request on the drives overlaps a write that nobody has waited for, and no memory changes
  while it is written.
- I8: runs that nobody disturbed move the bytes that the planner states; what is placed where is the
  same after each resume, or it would be refused.
- I4: a transfer that stops too soon, an error and a full drive each end in an error of the package.
- No thread, no descriptor and no lock is left, whatever ended the engine.

I1 and I2 show in the bits alone, I6 needs several ranks, I10 is asked once for each program, whose
budgets are the smallest ones that the refusals name.
"""

from __future__ import annotations

import errno
import faulthandler
import functools
import os
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import infinity
from infinity.directories.commits import COMMIT_NAMES
from infinity.tiers.durable import STATES_NAME
from simulation.chance import Chance
from simulation.disk import Folder, Plain
from simulation.machine import Blow, Machine, Operation, Place
from simulation.programs import SHAPES, Program, Run, budgets, program, same
from simulation.system import SimulatedSystem

MOST_BLOWS = 3
STEADY = 3  # steps until what is moved repeats itself
ERRORS = (infinity.InfinityError, OSError)
"""What a run may end with on a machine that fails."""
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
}
"""How often a blow comes at an operation of each kind."""
ROT = 0.1
"""Of how many machines a bit rots (`Plain.rot`): the next process says so, or needs none of it."""
LEAVES = (*[""] * 8, "between steps", "in a step", "looks", "lets go")
"""How a process leaves that nothing strikes before: it is closed, after a backward or not, was
there to evaluate only, or lets go of its model."""
LASTING = ("write", "read", "flush", "sync")
LONGEST = 60.0
"""Seconds after which a seed hangs."""


class Wrong(Exception):
    """The engine did what it must not."""


class Hangs(Exception):
    """A wait does not end."""


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
    """What is known of a program: what an undisturbed run shows, and all operations of a run that
    is new, and of one that goes on."""

    shown: dict[int, str]
    states: dict[str, object]
    new: Counter[Place]
    resumed: Counter[Place]


class Simulation:
    """Runs seeds. In the real folder `where` are checkpoints, and empty folders that stand for
    those of the drives."""

    def __init__(self, system: SimulatedSystem, where: Path) -> None:
        self._system = system
        self._where = where
        self._shapes: dict[int, Shape] = {}
        for number in range(2):
            self._path(number).mkdir(exist_ok=True)

    def _path(self, number: int) -> Path:
        return self._where / f"nvme{number}"

    def _drives(self, wanted: Program) -> tuple[Path, ...]:
        return tuple(self._path(number) for number in range(wanted.drives))

    def run(self, seed: int) -> Found:
        """Run a seed, on the main thread."""
        found = Found(seed)
        try:
            with _failures_elsewhere() as failures, _in_time(found):
                _Trial(self, seed, found).run()
            if failures:
                raise Wrong(failures[0])
        except Wrong as error:
            found.text = str(error)
        except Exception:
            found.text = traceback.format_exc()
        return found

    # What is known of a program

    def shape(self, number: int) -> Shape:
        """What is known of the program of seed `number`; found out once."""
        number %= SHAPES
        if number not in self._shapes:
            self._shapes[number] = self._look(program(number))
        return self._shapes[number]

    def _look(self, wanted: Program) -> Shape:
        shown: dict[int, str] = {}
        roomy = {"gpu_memory": 1 << 24, "cpu_memory": 1 << 24}
        if wanted.load_at >= 0:
            with self.process(wanted, self.machine(wanted), roomy, "off") as run:
                run.begin(resume=False)
                run.go_on(lambda step, text: None, until=1)
                run.save()
        with self.process(wanted, self.machine(wanted), roomy, "off") as run:
            run.begin(resume=False)
            run.go_on(shown.__setitem__)
            states = run.states()
        new, resumed = self.machine(wanted), None
        with self.process(wanted, new) as run:
            _follows(wanted, run, shown, states)
        halfway = self.machine(wanted)
        with self.process(wanted, halfway) as run:
            run.begin(resume=True)
            run.go_on(lambda step, text: None, until=wanted.half)
        resumed = self.machine(wanted, halfway.left(True, Chance("halfway")))
        with self.process(wanted, resumed) as run:
            _follows(wanted, run, shown, states)
        return Shape(shown, states, new.counts, resumed.counts)

    # Machines and processes

    def machine(
        self,
        wanted: Program,
        folders: Sequence[Folder] = (),
        chance: Chance | None = None,
        blow: Blow | None = None,
        boot: int = 0,
    ) -> Machine:
        """The machine that the package meets from now on."""
        folders = folders or [Folder() for _ in range(wanted.drives)]
        machine = Machine(folders, chance or Chance("quiet"), blow, boot)
        self._system.boot(machine, self._drives(wanted))
        return machine

    @contextmanager
    def process(
        self,
        wanted: Program,
        machine: Machine,
        given: dict[str, int] | None = None,
        durability: int | str = "step",
        room: int = 1,
    ) -> Iterator[Run]:
        """A run, whose engine is closed after the block. Without `given` budgets it has the
        smallest ones, `room` times."""
        if given is None:
            smallest = self._budgets(wanted, machine)
            given = {name: room * value for name, value in smallest.items()}
        checkpoint = self._where / f"checkpoint{wanted.number}"
        run = Run(wanted, self._drives(wanted), checkpoint, given, durability)
        try:
            yield run
        except Hangs:
            run.give_up()
            raise
        finally:
            if run.engine is not None:
                if machine.was_struck:
                    with suppress(*ERRORS):
                        run.engine.close()
                else:
                    run.engine.close()

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

    def _budgets(self, wanted: Program, machine: Machine) -> dict[str, int]:
        found = _smallest(wanted.number, self._drives(wanted), self._system)
        self._system.boot(machine, self._drives(wanted))
        return found


@functools.cache
def _smallest(number: int, drives: tuple[Path, ...], system: SimulatedSystem) -> dict[str, int]:
    system.boot(Machine([Folder() for _ in drives], Chance("budgets")), drives)
    return budgets(number, drives)


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


class _Trial:
    """One seed on its way."""

    def __init__(self, simulation: Simulation, seed: int, found: Found) -> None:
        self._simulation, self._found = simulation, found
        self._chance = Chance("seed", seed)
        self._program = program(seed % SHAPES)
        self._shape = simulation.shape(seed)
        self._folders: list[Folder] = []
        self._ended = -1  # the last step of which the end was seen
        self._committed = 0  # the last step that must be committed by now
        self._reached = 0  # the step that any process was at
        self._at = 0  # that the last one was at
        self._least = 0  # that the next one must be at, or beyond
        self._is_over = False  # nothing is left to go on from, as is said
        self._is_rotten = self._was_loading = False
        self._is_complete = False

    def run(self) -> None:
        """All machines."""
        blows = 1 + self._chance.below(MOST_BLOWS, "blows")
        for life in range(blows):
            leaves = self._chance.one(LEAVES, "leaves", life)
            self._live(life, self._blow(life), leaves)
            if self._is_over:
                return
            if self._is_complete:
                break
        self._live(blows, None, "")
        if not self._is_over and self._chance.of("look again") < 0.1:
            self._live(blows + 1, None, "")

    def _blow(self, life: int) -> Blow:
        chance = self._chance.child("blow", life)
        places = self._shape.new if life == 0 or not self._folders else self._shape.resumed
        kinds = [kind for kind in KINDS if any(place.kind == kind for place in places)]
        kind = chance.one([kind for kind in kinds for _ in range(KINDS[kind])], "kind")
        there = sorted(place for place in places if place.kind == kind)
        records = [place for place in there if place.name.endswith(COMMIT_NAMES)]
        place = chance.one(records if records and chance.of("record") < 0.5 else there, "place")
        count = places[place]
        if places is self._shape.resumed:  # that of the second half
            half = self._program.steps - self._program.half
            count = -(-count * (self._program.steps - self._ended) // half)
        when = chance.of("when")
        number = chance.below(count, "number") if when < 0.5 else 0 if when < 0.8 else count - 1
        moment = chance.one(
            ("before", "during" if kind in LASTING else "before", "after", "after", "fails"),
            "moment",
        )
        if kind in ("read", "write"):
            code = chance.one((errno.EIO, 0), "code")
        else:
            code = errno.ENOSPC if kind in ("allocate", "store", "create") else errno.EIO
        return Blow(Operation(place, number), moment, code)

    def _live(self, life: int, blow: Blow | None, leaves: str) -> None:
        """One machine, until it ends. `leaves`: how the process does before the end of the program,
        "" where it does not."""
        chance = self._chance.child("life", life)
        simulation = self._simulation
        machine = simulation.machine(
            self._program, self._folders, chance.child("machine"), blow, life
        )
        try:
            room, apart = chance.one((1, 1, 3), "room"), chance.one(("step", "step", 2, 3), "apart")
            error = self._end_of_process(machine, leaves, room, apart)
            if self._is_refusal(error):
                self._is_over = True
                return
            if error is not None and not machine.was_struck:
                raise Wrong("".join(traceback.format_exception(error)))
            simulation.look_behind(machine)
            if not machine.was_struck and leaves not in ("looks", "lets go"):
                self._least = self._at
        except Wrong as wrong:
            raise Wrong(f"machine {life}, to be struck by {blow}: {wrong}") from None
        struck = "last" if blow is None else f"{blow.operation.place.kind} {blow.moment}"
        left = f"leaves {leaves}" if leaves else "none"
        self._found.blows[struck if machine.was_struck or blow is None else left] += 1
        self._is_complete = not machine.was_struck and not leaves
        self._folders = machine.left(chance.of("power") < 0.65, chance.child("left"))
        if chance.of("rot") < ROT:
            self._rot(chance)

    def _end_of_process(
        self, machine: Machine, leaves: str, room: int, durability: int | str
    ) -> BaseException | None:
        """A process on `machine`, with `room` times the budgets; returns the error that ended
        it."""
        options: dict[str, Any] = {"room": room, "durability": durability}
        try:
            with self._simulation.process(self._program, machine, **options) as run:
                try:
                    if leaves == "looks":
                        run.wrap(resume=True)
                        run.evaluate(0)
                    else:
                        self._train(run, machine, leaves)
                finally:
                    self._at = run.progress.step
                    self._was_loading |= run.is_loading
                    self._reached = max(self._reached, self._at)
        except ERRORS as error:
            return error
        return None

    def _train(self, run: Run, machine: Machine, leaves: str) -> None:
        first = run.begin(resume=True)
        if first < max(self._committed, self._least):
            raise Wrong(
                f"it goes on with step {first}: {self._committed} was committed, and {self._least} "
                "was next"
            )
        self._committed = first
        if first > self._reached:
            raise Wrong(f"it goes on with step {first}, and had not passed {self._reached}")

        self._was_loading = False

        def see(step: int, text: str) -> None:
            if text != self._shape.shown[step]:
                raise Wrong(f"step {step} shows {text}, and {self._shape.shown[step]} undisturbed")
            if not machine.is_off:
                self._ended = max(self._ended, step)
                before = step - step % run.steps_per_commit  # this step waited for that one
                self._committed = max(self._committed, before)

        steps = self._program.steps
        until = first + self._chance.below(steps - first + 1, "until", first) if leaves else steps
        run.go_on(see, until)
        if leaves == "in a step" and until < steps:
            run.accumulate(until)
            return
        if leaves == "lets go":
            run.leave()
            return
        wrongs = run.wrongs()
        if wrongs:
            raise Wrong(wrongs[0])
        if until < steps:
            return
        differs = same(run.states(), self._shape.states)
        if differs:
            raise Wrong(f"in the end {', '.join(differs[:4])} are other bits than undisturbed")

    def _rot(self, chance: Chance) -> None:
        states = chance.one(self._folders, "folder").names.get(STATES_NAME)
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


@contextmanager
def _in_time(found: Found) -> Iterator[None]:
    """A block that hangs is interrupted, as by Ctrl-C; where that does not help, the process ends,
    with the stacks of its threads."""
    is_late = False

    def interrupt(*_: object) -> None:
        nonlocal is_late
        if is_late:
            print(f"seed {found.seed} hangs", file=sys.stderr, flush=True)
            faulthandler.dump_traceback()
            os._exit(1)
        is_late = True
        signal.setitimer(signal.ITIMER_REAL, LONGEST)
        raise Hangs(f"it hangs for {LONGEST:.0f} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, LONGEST)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _failures_elsewhere() -> Iterator[list[str]]:
    """What ends threads inside, and what nobody can be told of; there the errors of a machine that
    has stopped are due."""
    failures: list[str] = []

    def thread(args: Any) -> None:
        failures.append(f"a thread ended with {args.exc_type.__name__}: {args.exc_value}")

    def unraisable(args: Any) -> None:
        if not issubclass(args.exc_type, ERRORS):
            failures.append(f"{args.object!r} ended with {args.exc_type}: {args.exc_value}")

    with (
        mock.patch.object(threading, "excepthook", thread),
        mock.patch.object(sys, "unraisablehook", unraisable),
    ):
        yield failures
