"""Compare what the players of a program saw, and find a smaller program that differs, too."""

from __future__ import annotations

import dataclasses
import itertools
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from random_programs.players import Plain, Seen, play, run
from random_programs.recipes import Recipe

PATIENCE = 120
"""Seconds after which a player that has not ended is taken for one that never will: a hundred times what it needs."""


class Hang(BaseException):
    """A player does not end."""


@contextmanager
def _ending() -> Iterator[None]:
    """Raise `Hang` inside, on the main thread, when that has lasted for too long."""

    def give_up(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Difference(NamedTuple):
    """What a placement has seen else than plain PyTorch."""

    placement: str
    what: str
    """What was looked at, in a word."""
    text: str


def difference(recipe: Recipe) -> Difference | None:
    """That of the first placement that differs; None when none does."""
    torch.set_num_threads(1)
    expected = run(lambda: Plain(recipe)) if recipe.training.moments == "fp32" else None
    for placement in recipe.placements:
        with tempfile.TemporaryDirectory(prefix="random-programs-") as directory:
            where = Path(directory)
            try:
                with _ending():
                    seen = play(recipe, placement, where)
            except Hang:
                return Difference(placement, "hang", "does not end")
        expected = seen if expected is None else expected
        for one, other in itertools.zip_longest(expected, seen):
            if one is None or other is None or one[:2] != other[:2] or not _equal(one.value, other.value):
                what = "error" if other is None or other.what in ("error", "raised") else other.what.partition(" ")[0]
                return Difference(placement, what, f"expected {_words(one)}, seen {_words(other)}")
    return None


def _equal(one: Any, other: Any) -> bool:
    """Bit for bit, but for what a NaN is made of."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and one == other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    same = one.eq(other) & (one.signbit() == other.signbit()) | (one.isnan() & other.isnan())
    return bool(same.all())


def _words(seen: Seen | None) -> str:
    if seen is None:
        return "nothing more"
    value = seen.value
    if isinstance(value, torch.Tensor):
        value = f"{tuple(value.shape)} {value.dtype} with the sum {value.double().sum().item()!r}"
    return f"in operation {seen.at} {seen.what}: {value}"


def shrunk(recipe: Recipe, first: Difference, attempts: int = 400) -> Recipe:
    """A recipe that still differs in what `first` did, from which nothing more can be left out, as far as `attempts` runs go."""
    if recipe.training.moments == "fp32":
        recipe = dataclasses.replace(recipe, placements=(first.placement,))
    candidates = _smaller(recipe)
    for _ in range(attempts):
        smaller = next(candidates, None)
        if smaller is None:
            break
        found = difference(smaller)
        if found is not None and found.what == first.what:
            recipe, candidates = smaller, _smaller(smaller)
    return recipe


def _smaller(recipe: Recipe) -> Iterator[Recipe]:
    program = recipe.program
    for length in (8, 4, 2, 1):
        for begin in range(0, len(program), length) if length < len(program) else ():
            yield dataclasses.replace(recipe, program=program[:begin] + program[begin + length :])
    model, training = recipe.model, recipe.training
    for field in dataclasses.fields(training):
        if getattr(training, field.name) != field.default:
            yield dataclasses.replace(recipe, training=dataclasses.replace(training, **{field.name: field.default}))
    for field in ("width", "tokens", "tied", "groups", "units", "dtype"):
        default = {f.name: f.default for f in dataclasses.fields(model)}[field]
        if getattr(model, field) != default:
            changes: dict[str, Any] = {field: default}
            if field == "groups":
                changes["path"] = _without(model.path, lambda step: isinstance(step, int) and step < 0)
            yield dataclasses.replace(recipe, model=dataclasses.replace(model, **changes))
    for path in _shorter(model.path):
        yield dataclasses.replace(recipe, model=dataclasses.replace(model, path=path))
    last = len(model.blocks) - 1
    tied_or_grouped = {number for pair in (*model.tied, *model.groups) for number in pair}
    if last > 0 and last not in tied_or_grouped and last not in _numbers(model.path):
        yield dataclasses.replace(recipe, model=dataclasses.replace(model, blocks=model.blocks[:-1]))
    for number, block in enumerate(model.blocks):
        for other in ("linear",) if block.kind != "linear" else ():
            blocks = (*model.blocks[:number], dataclasses.replace(block, kind=other), *model.blocks[number + 1 :])
            yield dataclasses.replace(recipe, model=dataclasses.replace(model, blocks=blocks))


def _without(path: Any, drops: Callable[[Any], bool]) -> Any:
    inner = [(*step[:2], _without(step[2], drops)) if not isinstance(step, int) else step for step in path if not drops(step)]
    return tuple(inner)


def _shorter(path: Any) -> Iterator[Any]:
    """The path without one of its steps, or with the steps of a checkpoint in its place, on any level."""
    for at, step in enumerate(path):
        before, after = path[:at], path[at + 1 :]
        yield before + after
        if not isinstance(step, int):
            yield before + step[2] + after
            for inner in _shorter(step[2]):
                yield (*before, (*step[:2], inner), *after)


def _numbers(path: Any) -> set[int]:
    return set().union(*({step} if isinstance(step, int) else _numbers(step[2]) for step in path), set())
