"""Random programs on two or three ranks: all see what plain PyTorch does with the mean of their
gradients, but for rounding.

Ranks that take the same batches have equal gradients and see the same bits. What differs is who
keeps what, and who has to be told of a change. Ranks with batches of their own may leave out
parameters that others use.

Ranks sum in another order than `players.PlainRanks`, and add to gradients that a step has left in
another order, so what they see is rounded in another way.
"""

from __future__ import annotations

import functools
import os
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from random_programs.comparing import Difference, equal, first_difference, refused_at
from random_programs.jitter import jitter
from random_programs.mutations import OF_RANKS
from random_programs.players import PlainRanks, Seen, play
from random_programs.recipes import Recipe, of_rank
from support.rank_group import Group

ALIKE = ("gradients", "weights", "states", "norm", "read", "write")
"""What all ranks see alike, whatever their batches are."""


class Task(NamedTuple):
    """What all ranks do: see `Ranks`."""

    recipe: Recipe
    placement: str
    mutation: int | None
    jitters: bool


def work(task: Task, where: Path, rank: int) -> None:
    """One rank of some: see `support/rank_group`."""
    recipe, placement, mutation, jitters = task
    with (
        nullcontext() if mutation is None else OF_RANKS[mutation](),
        jitter(os.getpid()) if jitters else nullcontext(),
    ):
        torch.save(play(of_rank(recipe, rank), placement, where), where / f"seen{rank}.pt")


def _close(rough: bool, one: Any, other: Any) -> bool:
    """Equal but for rounding, which is `rough` where gradients have 16 bits."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return equal(one, other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    size = one.double().abs().nan_to_num(posinf=1.0).amax().item() if one.numel() else 0.0
    close = {"rtol": 5e-2, "atol": 5e-2 * size} if rough else {"rtol": 1e-3, "atol": 1e-4 * size}
    return torch.allclose(one.double(), other.double(), equal_nan=True, **close)


def _until(end: int | None, seen: list[list[Seen]]) -> list[list[Seen]]:
    """What was seen before operation number `end`."""
    return [[each for each in some if end is None or each.at < end] for some in seen]


def _difference(
    recipe: Recipe, placement: str, expected: list[list[Seen]], seen: list[list[Seen]]
) -> Difference | None:
    """Where a rank has seen else than expected, or else than the first rank."""
    ranks = range(recipe.ranks)
    close = functools.partial(_close, recipe.model.dtype != "float32")
    pairs = [(expected[rank], seen[rank], close, f"rank {rank}") for rank in ranks]
    alike = [[each for each in some if _is_alike(recipe, each)] for some in seen]
    pairs += [(alike[0], alike[rank], equal, f"rank {rank} beside 0") for rank in ranks[1:]]
    for wanted, mine, same, where in pairs:
        found = first_difference(wanted, mine, placement, same)
        if found is not None:
            return found._replace(text=f"on {where} of {recipe.ranks}: {found.text}")
    return None


def _is_alike(recipe: Recipe, seen: Seen) -> bool:
    return not recipe.own or seen.what.partition(" ")[0] in ALIKE


class Ranks:
    """Ranks that play programs, on an engine with the `mutation` of that number, if any, and with
    sleeps where it `jitters`; a context manager."""

    def __init__(self, directory: Path, mutation: int | None = None, jitters: bool = False) -> None:
        self._directory = directory
        self._mutation = mutation
        self._jitters = jitters
        self._groups: dict[int, Group] = {}
        self.refused = 0
        """Programs that the engine has refused on a placement."""

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for group in self._groups.values():
            group.close()

    def difference(self, recipe: Recipe) -> Difference | None:
        """That of the first placement that differs, on one of the ranks; None when none does."""
        torch.set_num_threads(1)
        expected = PlainRanks(recipe).play() if recipe.training.is_plain else None
        refused = False
        for placement in recipe.placements:
            seen = self._play(recipe, placement)
            wanted = seen if expected is None else expected
            ends = [refused_at(recipe, each) for each in seen]
            end = min((at for at in ends if at is not None), default=None)
            refused = refused or end is not None
            found = _difference(recipe, placement, _until(end, wanted), _until(end, seen))
            expected = wanted
            if found is not None:
                return found
        self.refused += refused
        return None

    def _play(self, recipe: Recipe, placement: str) -> list[list[Seen]]:
        """What each rank sees. Ranks that hang or die are replaced by the next call."""
        ranks = recipe.ranks
        with tempfile.TemporaryDirectory(prefix="random-programs-") as name:
            where = Path(name)
            group = self._groups.pop(ranks, None) or Group(
                Path(tempfile.mkdtemp(dir=self._directory)), ranks
            )
            answers: list[str] = []
            try:
                task = Task(recipe, placement, self._mutation, self._jitters)
                answers = group.do(Path(__file__), task, where)
            finally:
                if answers == ["done"] * ranks:
                    self._groups[ranks] = group
                else:
                    group.close()
            return [
                torch.load(where / f"seen{rank}.pt", weights_only=False)
                if answer == "done"
                else [Seen(-1, "error", answer)]
                for rank, answer in enumerate(answers)
            ]
