"""The hypothesis strategy that draws programs that save and load: see `round_trips`."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from random_programs.modules import ODD
from random_programs.placements import DURABLE
from random_programs.recipes import (
    BATCHES,
    PLACEMENTS,
    Block,
    Model,
    Operation,
    Recipe,
    Training,
    models,
    phrases,
)

WAYS = ("save", "snapshot", "resume")
TILES = (0, 512, 1024)
"""Bytes of tiles, here and there."""
_BLOCKS = st.builds(
    Block, kind=st.sampled_from(tuple(ODD)), frozen=st.sampled_from((False,) * 5 + (True,))
)
_TRAININGS = st.builds(
    Training,
    rule=st.sampled_from(("adamw", "adam", "sgd", "momentum", "adagrad", "lion")),
    weight_decay=st.sampled_from((0.0, 0.1)),
    max_grad_norm=st.sampled_from((None, None, 0.1, 100.0)),
    groups=st.sampled_from((1, 1, 2)),
    loss_scale=st.sampled_from((None, None, 1024.0)),
)


@st.composite
def _round_trip(draw: DrawFn) -> list[Operation]:
    """A step, and then the round trip: what is committed is of the last step."""
    how, tiles = draw(st.sampled_from(WAYS)), draw(st.sampled_from(TILES))
    trip = ("round trip", how, draw(st.sampled_from(PLACEMENTS)), tiles, draw(st.booleans()))
    return [("train", draw(BATCHES)), ("step",), ("zero_grad", True), trip]


@st.composite
def _models(draw: DrawFn) -> Model:
    """A model of `recipes.models` with blocks of odd parameters among its own."""
    model = draw(models())
    odd = tuple(draw(st.lists(_BLOCKS, min_size=1, max_size=4)))
    count = len(model.blocks)
    path = (*model.path, *range(count, count + len(odd)))
    tiles = draw(st.sampled_from(TILES))
    if tiles:  # sums of tiles round, and int8 blocks make much of little
        blocks = tuple(
            dataclasses.replace(each, kind="linear") if each.kind == "int8" else each
            for each in model.blocks
        )
        model = dataclasses.replace(model, blocks=blocks)
    return dataclasses.replace(model, blocks=model.blocks + odd, path=path, tiles=tiles)


@st.composite
def programs_with_saves(draw: DrawFn) -> Recipe:
    """A model with parameters of odd shapes, a program with round trips, and a placement, mostly
    one whose steps are durable."""
    model, training = draw(_models()), draw(_TRAININGS)
    program: list[Operation] = []
    for _ in range(draw(st.integers(1, 3))):
        program += [*draw(phrases()), *draw(_round_trip())]
    placement = draw(st.sampled_from((*tuple(DURABLE) * len(PLACEMENTS), *PLACEMENTS)))
    return Recipe(model, (*program, ("look", "weights")), training, (placement,))
