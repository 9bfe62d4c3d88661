"""Compare what the players of a program saw."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from random_programs.players import Plain, Raised, Seen, play, run
from random_programs.recipes import Recipe
from random_programs.refusals import is_allowed
from support.alarm import Hang, ending

PATIENCE = 120
"""Seconds after which a player that has not ended is taken for one that never will: a hundred times
what it needs."""

REFUSED = (
    "the sum would have another order than in horizontal order; use "
    'infinity.accumulate(..., order="horizontal")'
)
"""Says an engine of a model whose gradients come in another order than its layers: the program ends
there."""
STALE = "modified by an inplace operation"
"""Says torch where a graph has outlived the values that it needs: no other error will do."""
OUTDATED = "were updated after the forward whose backward needs them"
"""Says the engine of a forward of the model."""
LEAST = 2.0**-100
"""What is smaller may come from subnormal numbers, which begin at 2**-126."""


class Difference(NamedTuple):
    """What a placement has seen else than plain PyTorch."""

    placement: str
    what: str
    """What was looked at, in a word."""
    text: str


def difference(recipe: Recipe) -> Difference | None:
    """That of the first placement that differs; None when none does."""
    torch.set_num_threads(1)
    scaled = recipe.training.loss_scale is not None
    expected = run(lambda: Plain(recipe)) if recipe.training.is_plain else None
    for placement in recipe.placements:
        with tempfile.TemporaryDirectory(prefix="random-programs-") as directory:
            where = Path(directory)
            try:
                with ending(PATIENCE):
                    seen = play(recipe, placement, where)
            except Hang:
                return Difference(placement, "hang", "does not end")
        expected = seen if expected is None else expected
        same = functools.partial(equal, scaled=scaled, rounds=recipe.rounds)
        expected, seen = until_a_refusal(recipe, expected, seen)
        found = first_difference(expected, seen, placement, same)
        if found is not None:
            return found
    return None


def first_difference(
    expected: list[Seen],
    seen: list[Seen],
    placement: str,
    same: Callable[[Any, Any], bool],
) -> Difference | None:
    """Where what was `seen` on a placement is not the `same` as expected first; None when it is."""
    if seen and seen[-1].what == "error" and REFUSED in seen[-1].value:
        seen = seen[:-1]
        expected = expected[: len(seen)]
    for one, other in itertools.zip_longest(expected, seen):
        if one is None or other is None or one[:2] != other[:2] or not same(one.value, other.value):
            what = (
                "error"
                if other is None or other.what in ("error", "raised")
                else other.what.partition(" ")[0]
            )
            return Difference(placement, what, f"expected {_words(one)}, seen {_words(other)}")
    return None


def until_a_refusal(
    recipe: Recipe, expected: list[Seen], seen: list[Seen]
) -> tuple[list[Seen], list[Seen]]:
    """What both saw before the first operation that the engine refuses and may refuse, or whose
    fault it need not meet. Other errors are compared."""
    ends = [refused_at(recipe, seen), _stopped_before(recipe, expected, seen)]
    end = min((each for each in ends if each is not None), default=None)
    if end is None:
        return expected, seen
    return [s for s in expected if s.at < end], [s for s in seen if s.at < end]


def _stopped_before(recipe: Recipe, expected: list[Seen], seen: list[Seen]) -> int | None:
    """The first operation whose fault plain PyTorch alone met, in a recomputation: it recomputes
    also what saved nothing but frozen weights, which the engine brings itself."""
    frozen = any(block.frozen for block in recipe.model.blocks)
    if not frozen or "('checkpoint', False" not in repr(recipe.model.path):
        return None
    met = {each.at for each in seen if each.what == "raised"}
    faults = [s.at for s in expected if s.what == "raised" and s.value.kind == "Fault"]
    return next((at for at in faults if at not in met), None)


def refused_at(recipe: Recipe, seen: list[Seen]) -> int | None:
    """The first operation that the engine refuses and may refuse; None when there is none."""
    for each in seen:
        text = each.value if each.what == "error" else getattr(each.value, "text", None)
        if text is not None and is_allowed(recipe, each.at, text):
            return each.at
    return None


def equal(one: Any, other: Any, scaled: bool = False, rounds: bool = False) -> bool:
    """Bit for bit, but for what a NaN is made of, and where the loss is `scaled` for subnormal
    numbers: those are rounded to another place than in a backward without a scale. With `rounds`
    sums may be taken in another order."""
    if isinstance(one, Raised) and isinstance(other, Raised):
        return one == other and (
            STALE not in one.text or any(text in other.text for text in (STALE, OUTDATED))
        )
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and one == other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if rounds and one.is_floating_point():
        lost = ~one.isfinite() & ~other.isfinite()  # which of them follows from rounding, too
        one, other = one.masked_fill(lost, 0.0), other.masked_fill(lost, 0.0)
        most = 1e-3 if one.dtype in (torch.bfloat16, torch.float16) else 1e-4
        size = one.nan_to_num().abs().max().item() if one.numel() else 0.0
        return torch.allclose(one, other, rtol=most, atol=most * size + 1e-6, equal_nan=True)
    same = one.eq(other) & (one.signbit() == other.signbit()) | (one.isnan() & other.isnan())
    if scaled and one.is_floating_point():
        same |= (one.abs() < LEAST) & (other.abs() < LEAST)
    return bool(same.all())


def _words(seen: Seen | None) -> str:
    if seen is None:
        return "nothing more"
    value = seen.value
    if isinstance(value, torch.Tensor):
        value = f"{tuple(value.shape)} {value.dtype} with the sum {value.double().sum().item()!r}"
    return f"in operation {seen.at} {seen.what}: {value}"
