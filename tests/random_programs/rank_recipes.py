"""The hypothesis strategy that draws programs of two or three ranks: see `ranks`."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from random_programs.placements import RANKED
from random_programs.recipes import Model, Recipe, Training, models, phrases, programs

SOMETIMES = ("sometimes gate", "expert")
"""Blocks whose batch says which of their parameters it leaves out."""
_TRAININGS = st.builds(
    Training,
    # Sums over ranks round: rules that make much of little are left out.
    rule=st.sampled_from(("adamw", "sgd", "momentum")),
    weight_decay=st.sampled_from((0.0, 0.1)),
    max_grad_norm=st.sampled_from((None, None, 0.1, 100.0)),
    groups=st.sampled_from((1, 1, 2)),
    loss_scale=st.sampled_from((None, None, None, 1024.0)),
)


@st.composite
def programs_on_ranks(draw: DrawFn) -> Recipe:
    """A program of `programs` that all ranks run with the same batches, or one whose ranks have
    batches of their own; on two stages."""
    ranks = draw(st.sampled_from((2, 3)))
    stages = st.lists(st.sampled_from(tuple(RANKED)), min_size=2, max_size=2, unique=True)
    placements = tuple(draw(stages))
    recipe = draw(
        st.sampled_from((programs(), _with_own_batches(), _with_own_batches())).flatmap(
            lambda strategy: strategy
        )
    )
    return dataclasses.replace(recipe, placements=placements, ranks=ranks)


@st.composite
def _with_own_batches(draw: DrawFn) -> Recipe:
    """Nothing fails on one rank alone, so no operation makes a forward or a backward fail."""
    model = draw(_models())
    some = draw(st.lists(phrases(), min_size=2, max_size=5))
    program = [each for phrase in some for each in phrase if each[0] != "fault"]
    training = draw(_TRAININGS)
    if training.rule == "adamw":
        training = dataclasses.replace(training, eps=1e-3)
    return Recipe(model, (*program, ("look", "weights")), training, own=True)


@st.composite
def _models(draw: DrawFn) -> Model:
    """A model of which a batch leaves something out."""
    model = draw(models())
    blocks = list(model.blocks)
    tied = {number for pair in model.tied for number in pair}
    for number, block in enumerate(blocks):
        kind = draw(st.sampled_from((block.kind, *SOMETIMES)))
        if kind == "buffer":  # The ranks would count differently.
            kind = "linear"
        if kind == "expert" and (model.units != "blocks" or model.tiles):
            # Each expert would be a unit of its own.
            kind = "sometimes gate"
        if number not in tied:
            blocks[number] = dataclasses.replace(block, kind=kind)
    if draw(st.sampled_from((False,) * 15 + (True,))) and 0 not in tied:
        blocks[0] = dataclasses.replace(blocks[0], kind="dropped")
    return dataclasses.replace(
        model, blocks=tuple(blocks), dtype="float32", scales=draw(st.booleans())
    )
