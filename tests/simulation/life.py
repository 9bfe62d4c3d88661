"""The processes of one life, on a machine each, from their boot to their ends; and what must not
end them."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import torch.distributed as dist

import infinity
from simulation.machine import Machine
from simulation.processes import Gone, Rank, Together
from simulation.programs import Program, Run

ERRORS = (infinity.InfinityError, OSError, dist.DistError, Gone)
"""What a run may end with on a machine that fails, or where another rank does."""
LONGEST = 60.0
"""Seconds after which a seed hangs."""


class Wrong(Exception):
    """The engine did what it must not."""


class Hangs(Exception):
    """A wait does not end."""


Work = Callable[[int, Run], None]
"""What a process of rank so and so does with its run."""


class Life:
    """The processes on `machines`, from their boot to their ends: each does its `work` with a run
    that is made with `options`."""

    def __init__(
        self, wanted: Program, machines: Sequence[Machine], work: Work, options: tuple[Any, ...]
    ) -> None:
        self._wanted, self._machines, self._work, self._options = wanted, machines, work, options
        self._runs: list[Run] = []
        self.errors: list[BaseException | None] = [None] * wanted.ranks
        """What ended each."""

    def alone(self) -> None:
        """The one process, on this thread."""
        try:
            self._process(0, lambda: None)
        except ERRORS as error:
            self.errors[0] = error

    def together(self, together: Together) -> None:
        """All processes, a thread each. Raises what must not end one."""

        def process(rank: Rank) -> None:
            try:
                self._process(rank.number, lambda: together.leave(rank))
            except BaseException as error:
                self.errors[rank.number] = error

        together.begin(process)
        try:
            together.join()
        except Hangs:
            for machine in self._machines:
                machine.stop()
            self._give_up()
            together.join()
            raise
        wrongs = [each for each in self.errors if each is not None and not isinstance(each, ERRORS)]
        if wrongs:
            # What a rank did wrong ends the others, too.
            raise next((each for each in wrongs if isinstance(each, Wrong)), wrongs[0])

    def _process(self, number: int, leaves: Callable[[], None]) -> None:
        run = Run(self._wanted, *self._options, number)
        self._runs.append(run)
        try:
            self._work(number, run)
        except Hangs:
            self._give_up()
            raise
        except BaseException:
            leaves()
            raise
        finally:
            if run.engine is not None:
                is_struck = any(machine.was_struck for machine in self._machines)
                with suppress(*(ERRORS if is_struck else ())):
                    run.engine.close()

    def _give_up(self) -> None:
        for run in self._runs:
            run.give_up()


@contextmanager
def in_time(seed: int) -> Iterator[None]:
    """A block that hangs is interrupted, as by Ctrl-C; where that does not help, the process ends,
    with the stacks of its threads."""
    is_late = False

    def interrupt(*_: object) -> None:
        nonlocal is_late
        if is_late:
            print(f"seed {seed} hangs", file=sys.stderr, flush=True)
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
def failures_elsewhere() -> Iterator[list[str]]:
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
