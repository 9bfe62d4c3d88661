"""Random programs on two ranks, of each stage: both see the same bits, and nearly those of one rank
that computes alone.

Both ranks take the same batches. Their gradients are equal, so that the mean of them is what each
has. What differs is who keeps what, and who has to be told of a change. Ranks add to gradients that
a step has left in another order, so what they see is rounded in another way than on one rank.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from random_programs.comparing import Difference, equal, first_difference
from random_programs.jitter import jitter
from random_programs.mutations import OF_RANKS
from random_programs.placements import RANKED
from random_programs.players import Plain, Seen, play, run
from random_programs.recipes import Recipe
from support.rank_group import RANKS, Group


class Task(NamedTuple):
    """What both ranks do: see `TwoRanks`."""

    recipe: Recipe
    placement: str
    mutation: int | None
    jitters: bool


def work(task: Task, where: Path, rank: int) -> None:
    """One rank of two: see `support/rank_group`."""
    recipe, placement, mutation, jitters = task
    with (
        nullcontext() if mutation is None else OF_RANKS[mutation](),
        jitter(os.getpid()) if jitters else nullcontext(),
    ):
        torch.save(play(recipe, placement, where), where / f"seen{rank}.pt")


def _close(one: Any, other: Any) -> bool:
    """Equal but for rounding."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return equal(one, other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    rough = one.dtype is not torch.float32
    size = one.double().abs().nan_to_num(posinf=1.0).amax().item() if one.numel() else 0.0
    close = {"rtol": 5e-2, "atol": 5e-2 * size} if rough else {"rtol": 1e-3, "atol": 1e-4 * size}
    return torch.allclose(one.double(), other.double(), equal_nan=True, **close)


class TwoRanks:
    """Two ranks that play programs, on an engine with the `mutation` of that number, if any, and
    with sleeps where it `jitters`; a context manager."""

    def __init__(self, directory: Path, mutation: int | None = None, jitters: bool = False) -> None:
        self._directory = directory
        self._mutation = mutation
        self._jitters = jitters
        self._group: Group | None = None

    def __enter__(self) -> TwoRanks:
        return self

    def __exit__(self, *_: object) -> None:
        if self._group is not None:
            self._group.close()

    def difference(self, recipe: Recipe) -> Difference | None:
        """That of the first stage that differs, on one of the ranks; None when none does."""
        torch.set_num_threads(1)
        recipe = dataclasses.replace(recipe, placements=tuple(RANKED))
        expected = run(lambda: Plain(recipe)) if recipe.training.is_plain else None
        for placement in recipe.placements:
            first, second = self._play(recipe, placement)
            expected = first if expected is None else expected
            found = first_difference(first, second, f"{placement}, rank 1 beside 0", equal)
            found = found or first_difference(expected, first, placement, _close)
            if found is not None:
                return found
        return None

    def _play(self, recipe: Recipe, placement: str) -> list[list[Seen]]:
        """What each rank sees. Ranks that hang or die are replaced by the next call."""
        with tempfile.TemporaryDirectory(prefix="random-programs-") as name:
            where = Path(name)
            if self._group is None:
                self._group = Group(Path(tempfile.mkdtemp(dir=self._directory)))
            answers: list[str] = []
            try:
                task = Task(recipe, placement, self._mutation, self._jitters)
                answers = self._group.do(Path(__file__), task, where)
            finally:
                if answers != ["done"] * RANKS:
                    self._group.close()
                    self._group = None
            return [
                torch.load(where / f"seen{rank}.pt", weights_only=False)
                if answer == "done"
                else [Seen(-1, "error", answer)]
                for rank, answer in enumerate(answers)
            ]
