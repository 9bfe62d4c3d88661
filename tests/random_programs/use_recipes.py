"""The hypothesis strategy that draws programs with uses of weights: see `uses` and `using`."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from random_programs.recipes import (
    BATCHES,
    KINDS,
    PLACEMENTS,
    Block,
    Model,
    Operation,
    Recipe,
    Training,
    phrases,
)
from random_programs.uses import EXPRESSIONS, IN_A_BLOCK, WAYS
from random_programs.using import GRADIENTS, KEPT, STATES

WAITING: frozenset[tuple[str, Any]] = frozenset()
"""Operations that the engine does not have right yet: no program draws them."""
ENDS = (
    *("backward",) * 8,
    *("twice", "hooks", "grad", "inputs", "penalty", "later", "value", "thawed") * 2,
    "graph of gradients",
)
TILES = 1024


def _are_ready(name: str, kinds: Any) -> tuple[Any, ...]:
    return tuple(kind for kind in kinds if (name, kind) not in WAITING)


_OFTEN = (*[way for way in WAYS if way != "compiled"] * 4, "compiled")
NUMBERS = st.tuples(st.integers(0, 15), st.integers(0, 15))
_USE = st.tuples(
    st.just("use"),
    st.sampled_from(tuple(EXPRESSIONS)),
    st.lists(st.sampled_from(_OFTEN), max_size=2, unique=True).map(tuple),
    NUMBERS,
    BATCHES,
    st.sampled_from(("alone", "before", "after", "inside", "inside")),
    st.sampled_from(_are_ready("end", ENDS)),
)
_STEP: list[Operation] = [("step",), ("zero_grad", True)]


@st.composite
def _used(draw: DrawFn) -> list[Operation]:
    """Some uses, and perhaps a step."""
    uses = draw(st.lists(_USE, min_size=1, max_size=3))
    return [*uses, *draw(st.sampled_from(([], [("look", "gradients")], _STEP)))]


@st.composite
def _later(draw: DrawFn) -> list[Operation]:
    """A graph whose backward comes later, perhaps too late."""
    use = (*draw(_USE)[:-1], "later")
    updated = [("train", 1), *_STEP]
    between = draw(st.sampled_from(([], [("train", 1)], updated, updated, [("step",)])))
    return [use, *between, ("later",), *draw(st.sampled_from(([], _STEP)))]


_OUTDATED = st.tuples(
    st.sampled_from(("views", "columns", "einsum", "norms", "saves", "bmm", "index")),
    NUMBERS,
    BATCHES,
).map(
    lambda drawn: [
        ("use", drawn[0], (), *drawn[1:], "alone", "later"),
        *(("train", 1), ("step",), ("later",), ("zero_grad", True)),
    ]
)
"""A graph of weights alone that a step outdates."""


@st.composite
def _kept(draw: DrawFn) -> list[Operation]:
    keep = ("keep", draw(st.sampled_from(tuple(KEPT))), draw(NUMBERS))
    between = draw(st.sampled_from(([], [("train", 1), *_STEP], [("train", 2), ("step",)])))
    return [keep, *between, ("read kept",)]


@st.composite
def _gradient(draw: DrawFn) -> list[Operation]:
    kinds = _are_ready("gradient", GRADIENTS)
    changes: list[Operation] = [
        ("gradient", kind, draw(NUMBERS))
        for kind in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3))
    ]
    again = draw(st.sampled_from(([], [("train", 3)])))
    end = draw(st.sampled_from(([], [("look", "gradients")], [("read kept",)])))
    return [("train", draw(BATCHES)), *changes, *again, *end, *_STEP, ("read kept",)]


@st.composite
def _kept_gradient(draw: DrawFn) -> list[Operation]:
    """Something of a gradient that is kept, and a change of that gradient."""
    numbers = draw(NUMBERS)
    kinds = _are_ready("gradient", GRADIENTS)
    keep = draw(st.sampled_from([kind for kind in kinds if kind.startswith("kept")]))
    change = draw(st.sampled_from([kind for kind in kinds if not kind.startswith("kept")]))
    changes: list[Operation] = [("gradient", kind, numbers) for kind in (keep, change)]
    return [("train", draw(BATCHES)), *changes, ("read kept",), *_STEP]


@st.composite
def _assigned(draw: DrawFn) -> list[Operation]:
    changed = draw(st.sampled_from(_are_ready("assigned", (False, True))))
    again = draw(st.sampled_from(([], [("train", 3)])))
    return [("assigned", draw(st.integers(0, 15)), changed), *again, *_STEP]


@st.composite
def _state(draw: DrawFn) -> list[Operation]:
    kinds = _are_ready("state", STATES)
    change = ("state", draw(st.sampled_from(kinds)), draw(st.integers(0, 15)))
    return [("train", 1), *_STEP, change, ("train", 2), *_STEP]


_WEIGHTS: list[tuple[int, Any]] = [
    (10, _used()),
    (3, _later()),
    (1, _OUTDATED),
    (3, _kept()),
    (4 if _are_ready("gradient", GRADIENTS) else 0, _gradient()),
    (2 if _are_ready("gradient", GRADIENTS) else 0, _kept_gradient()),
    (2 if _are_ready("assigned", (False, True)) else 0, _assigned()),
    (4 if _are_ready("state", STATES) else 0, _state()),
    (6, phrases()),
]
_PHRASES = st.sampled_from([phrase for weight, phrase in _WEIGHTS for _ in range(weight)]).flatmap(
    lambda phrase: phrase
)
_BLOCK = st.one_of(
    st.builds(Block, kind=st.sampled_from(KINDS)),
    st.builds(
        lambda how, name, frozen: Block(f"{how} {name}", frozen),
        st.sampled_from(("uses", "borrows")),
        st.sampled_from(IN_A_BLOCK),
        st.sampled_from((False,) * 6 + (True,)),
    ),
)


@st.composite
def _models(draw: DrawFn) -> Model:
    """A model of one to four blocks, some of them in a checkpoint."""
    blocks = tuple(draw(st.lists(_BLOCK, min_size=1, max_size=4)))
    path: tuple[Any, ...] = tuple(range(len(blocks)))
    how = draw(st.sampled_from(("", "", "checkpoint", "reentrant", "again")))
    if how == "again":
        path = (*path, 0)
    elif how:
        begin = draw(st.integers(0, len(blocks) - 1))
        path = (*path[:begin], ("checkpoint", how == "reentrant", path[begin:]))
    return Model(
        blocks,
        path,
        tokens=draw(st.sampled_from((False, False, False, True))),
        units=draw(st.sampled_from(("auto", "blocks", "leaves"))),
        dtype=draw(st.sampled_from(("float32",) * 4 + ("bfloat16",))),
    )


@st.composite
def programs_with_uses(draw: DrawFn) -> Recipe:
    """A small model, a program with uses of weights, and the placement that runs it."""
    model = draw(_models())
    some = draw(st.lists(_PHRASES, min_size=2, max_size=4))
    program = tuple(operation for phrase in some for operation in phrase)
    training = draw(
        st.builds(
            Training,
            rule=st.sampled_from(("adamw", "sgd", "momentum", "lion")),
            weight_decay=st.sampled_from((0.0, 0.1)),
            max_grad_norm=st.sampled_from((None, None, 1.0)),
        )
    )
    if draw(st.sampled_from((False, False, True))):
        # Sums of tiles round: rules and blocks that make much of little are left out.
        blocks = tuple(
            dataclasses.replace(each, kind="linear") if each.kind == "int8" else each
            for each in model.blocks
        )
        rule = "sgd" if training.rule in ("adamw", "lion") else training.rule
        training = dataclasses.replace(training, rule=rule)
        model = dataclasses.replace(model, blocks=blocks, width=24, dtype="float32", tiles=TILES)
    placement = draw(st.sampled_from(PLACEMENTS))
    return Recipe(model, program, training, (placement,), whole=True)
