"""Many random programs, in some processes, with a summary, and for what differs a recipe that shows
it again."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Flaky
from hypothesis.internal.conjecture import providers

from random_programs.comparing import Difference, difference
from random_programs.jitter import jitter
from random_programs.rank_recipes import programs_on_ranks
from random_programs.ranks import Ranks
from random_programs.recipes import Recipe, programs
from random_programs.save_recipes import programs_with_saves
from random_programs.use_recipes import programs_with_uses

KINDS = {
    "training": programs,
    "uses": programs_with_uses,
    "saves": programs_with_saves,
    "ranks": programs_on_ranks,
}
"""The strategies."""
ALONE = ("training", "uses", "saves")
"""The kinds whose programs run in one process."""
EACH = 20
"""Programs of one seed: ten that hypothesis draws anew, then changed ones. It stops at the first
that differs, and shrinks it."""


def main() -> int:
    """Run the programs that the command line says; returns how many seeds found a difference."""
    parser = argparse.ArgumentParser(prog="random_programs", description=__doc__)
    parser.add_argument("--programs", type=int, default=5000, help="how many of each kind")
    parser.add_argument(
        "--first", type=int, default=1000, help="the first seed; each draws 20 programs"
    )
    parser.add_argument("--kind", choices=ALONE, help="of one kind alone")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--ranks", action="store_true", help="programs of two or three ranks, in turn"
    )
    parser.add_argument(
        "--jitter", action="store_true", help="with random sleeps in the engine's methods"
    )
    options = parser.parse_args()
    if options.ranks:
        return _on_ranks(options.programs, options.first, options.jitter)
    begin = time.monotonic()
    ran = differing = 0
    kinds = [options.kind] if options.kind else ALONE
    jobs = [
        (options.first + number, min(EACH, options.programs - EACH * number), kind, options.jitter)
        for number in range(-(-options.programs // EACH))
        for kind in kinds
    ]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for done, (seed, kind, count, found) in enumerate(pool.imap_unordered(_job, jobs), 1):
            ran += count
            if found is not None:
                differing += 1
                print(f"seed {seed} of {kind}: {found}", flush=True)
            if done % 20 == 0:
                print(
                    f"{ran} programs, {differing} seeds differ, {time.monotonic() - begin:.0f} s",
                    flush=True,
                )
    print(
        f"{ran} programs of seeds from {options.first} on: {differing} seeds differ, "
        f"{time.monotonic() - begin:.0f} s"
    )
    return differing


def _on_ranks(programs: int, first: int, jitters: bool) -> int:
    """Run so many programs on ranks; returns how many seeds found a difference."""
    logging.getLogger("infinity").setLevel(logging.ERROR)
    ran = differing = 0
    with (
        tempfile.TemporaryDirectory() as directory,
        Ranks(Path(directory), jitters=jitters) as ranks,
    ):
        for number in range(-(-programs // EACH)):
            count = min(EACH, programs - EACH * number)
            tried, found = run(first + number, count, "ranks", ranks.difference)
            ran += tried
            if found is not None:
                differing += 1
                print(f"seed {first + number} of ranks: {found}", flush=True)
            if (number + 1) % 5 == 0:
                print(f"{ran} programs, {ranks.refused} refused", flush=True)
        print(
            f"{ran} programs of seeds from {first} on: {differing} seeds differ on ranks, "
            f"{ranks.refused} programs refused"
        )
    return differing


def _job(job: tuple[int, int, str, bool]) -> tuple[int, str, int, str | None]:
    logging.getLogger("infinity").setLevel(logging.ERROR)
    seed, count, kind, jitters = job
    with jitter(seed) if jitters else nullcontext():
        return seed, kind, *run(seed, count, kind)


class Differs(Exception):
    """A program sees something else on a placement than in plain PyTorch. The text has the program,
    to be pasted."""

    def __init__(self, recipe: Recipe, found: Difference) -> None:
        super().__init__(
            f"in {recipe.placements}: {found.text}\nit shows in\n\n    difference({recipe!r})\n"
        )


def run(
    seed: int,
    count: int,
    kind: str = "training",
    difference: Callable[[Recipe], Difference | None] = difference,
) -> tuple[int, str | None]:
    """Run `count` programs of one of `KINDS`, compared by `difference`. Returns how many were run
    before one differed, and the smallest one that differs in the same."""
    ran = 0
    first: Difference | None = None
    last: Differs | None = None

    def same(recipe: Recipe) -> None:
        nonlocal ran, first, last
        if first is None:
            ran += 1
        elif recipe.training.moments == "fp32":
            # What is compared with plain PyTorch needs no other placement.
            recipe = dataclasses.replace(recipe, placements=(first.placement,))
        found = difference(recipe)
        if found is None or (first is not None and found.what != first.what):
            return
        first = first or found
        last = Differs(recipe, found)
        raise last

    try:
        _each(seed, count, kind, (Phase.generate, Phase.shrink), same)
    except Differs as error:
        return ran, str(error)
    except Flaky:
        return ran, f"not each time, {last}"
    return ran, None


@functools.cache
def drawn(seed: int, count: int, kind: str = "training") -> tuple[Recipe, ...]:
    """The programs that `run` runs."""
    recipes: list[Recipe] = []
    _each(seed, count, kind, (Phase.generate,), recipes.append)
    return tuple(recipes)


def _each(
    seed: int, count: int, kind: str, phases: tuple[Phase, ...], call: Callable[[Recipe], None]
) -> None:
    """Let hypothesis call it with `count` programs; the same ones each time."""

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        phases=phases,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(KINDS[kind]())
    def test(recipe: Recipe) -> None:
        call(recipe)

    with _the_same_wherever_it_runs():
        test()


@contextmanager
def _the_same_wherever_it_runs() -> Iterator[None]:
    """Hypothesis also draws numbers that it finds in the sources of the modules that are imported,
    unless they are installed. The programs of a seed would change with them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(providers, "_get_local_constants", providers.Constants)
        providers.CONSTANTS_CACHE.cache.clear()
        yield
    providers.CONSTANTS_CACHE.cache.clear()
