"""What a random program is, as plain data that can be pasted into a test, and the hypothesis
strategy that draws one.

An operation is a tuple: its name and its arguments, see the methods `op_*` of `players.Player`.
Every operation can follow every other one, and does nothing where it has no object; so any part of
a program is a program.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

Operation = tuple[Any, ...]

KINDS = (
    "linear",
    "linear",
    "norm",
    "mlp",
    "mlp",
    "bias",
    "gate",
    "dropout",
    "weight_norm",
    "function",
    "dict",
    "dataclass",
    "tuple",
    "view",
    "borrow",
    "buffer",
    "scalar",
    "int8",
)
PLACEMENTS = (
    "nvme smallest",
    "nvme two units",
    "nvme cached",
    "cpu",
    "gpu",
    "mixed",
    "speculative",
    "posix",
    "activations",
    "gpu cache",
    "discrete",
    "plain update",
)
EACH = 7
"""How many placements run a program."""


@dataclasses.dataclass(frozen=True)
class Block:
    """A module of the model, of a class of `modules.KINDS`; the parameters of a frozen one are
    never trained."""

    kind: str
    frozen: bool = False


@dataclasses.dataclass(frozen=True)
class Model:
    """A model that takes (2, 3, width) numbers, or (2, 3) tokens, through the blocks in the order
    of `path`.

    A step of the path is the number of a block; -1 - G for all blocks of group G; ("checkpoint",
    reentrant, steps); or ("skip", phase, steps), whose steps are left out in every second batch.
    `groups` are blocks that one module holds, `tied` pairs of linear blocks with one weight.
    `units` is given to `wrap`: "auto", "blocks", "leaves" or "groups". Of `tiles` bytes are the
    tiles that weights lie in, in plain PyTorch, too; 0 leaves them whole. With `scales` the model
    and its groups have parameters of their own, which some batches leave out.
    """

    blocks: tuple[Block, ...]
    path: tuple[Any, ...]
    width: int = 16
    tokens: bool = False
    tied: tuple[tuple[int, int], ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    units: str = "auto"
    dtype: str = "float32"
    tiles: int = 0
    scales: bool = False


@dataclasses.dataclass(frozen=True)
class Training:
    """The optimizer. With `groups` 2 the parameters of one dimension have a group of their own."""

    rule: str = "adamw"
    lr: float = 1e-2
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
    groups: int = 1
    loss_scale: float | None = None
    moments: str = "fp32"
    """Moments in another format are compared over placements alone."""
    clip: str = "global"
    """Plain PyTorch has no units: "unit" is compared over placements alone, too."""
    eps: float | None = None
    """That of Adam; the usual one if None."""

    @property
    def is_plain(self) -> bool:
        """Whether plain PyTorch computes the same."""
        return self.moments == "fp32" and self.clip != "unit"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A program, and the placements that run it."""

    model: Model
    program: tuple[Operation, ...]
    training: Training = Training()
    placements: tuple[str, ...] = PLACEMENTS
    whole: bool = False
    """Weights in tiles are whole in plain PyTorch. Then sums may round in other ways."""
    ranks: int = 1
    own: bool = False
    """Each rank has batches of its own."""

    @property
    def rounds(self) -> bool:
        """Whether the engine may round otherwise than plain PyTorch."""
        return self.whole and self.model.tiles > 0


STRIDE = 11
"""Batches of one rank and the next are so far apart, which is neither even nor divided by 3."""
_BATCH_AT = {
    "forward": 1,
    "train": 0,
    "accumulate": 0,
    "evaluate": 0,
    "generate": 0,
    "submodule": 1,
    "input gradient": 0,
}
"""Which argument of an operation is a batch, or are batches."""


def of_rank(recipe: Recipe, rank: int) -> Recipe:
    """What this rank does: where ranks have their own batches, not what the others do."""

    def shifted(operation: Operation) -> Operation:
        name, *arguments = operation
        if name in _BATCH_AT:
            at = _BATCH_AT[name]
            batch = arguments[at]
            arguments[at] = (
                batch + STRIDE * rank
                if isinstance(batch, int)
                else tuple(each + STRIDE * rank for each in batch)
            )
        return name, *arguments

    if not recipe.own or not rank:
        return recipe
    return dataclasses.replace(recipe, program=tuple(map(shifted, recipe.program)))


BATCHES = st.integers(0, 7)
PARAMETERS = st.integers(0, 63)
"""Players take these modulo the number of parameters."""


def _sometimes(times: int, of: int) -> SearchStrategy[bool]:
    """True in `times` of `of` draws; shrinks to False."""
    return st.sampled_from([False] * (of - times) + [True] * times)


@st.composite
def programs(draw: DrawFn) -> Recipe:
    """A recipe: a model, a training and a program, and the placements that run it."""
    model = draw(models())
    training = draw(_TRAININGS)
    phrases = draw(st.lists(_PHRASES, min_size=2, max_size=6))
    program = [operation for phrase in phrases for operation in phrase]
    program.append(("look", draw(st.sampled_from(("weights", "states")))))
    placements = draw(
        st.lists(st.sampled_from(PLACEMENTS), min_size=EACH, max_size=EACH, unique=True)
    )
    # Last: what is drawn before stays what it was.
    clip = draw(st.sampled_from(("global", "global", "previous", "unit")))
    training = dataclasses.replace(training, clip=clip)
    return Recipe(model, tuple(program), training, tuple(sorted(placements)))


_TRAININGS = st.builds(
    Training,
    rule=st.sampled_from(("adamw", "adamw", "adam", "sgd", "momentum", "adagrad", "lion")),
    lr=st.sampled_from((1e-2, 1e-3)),
    weight_decay=st.sampled_from((0.0, 0.1)),
    max_grad_norm=st.sampled_from((None, None, 0.1, 100.0)),
    groups=st.sampled_from((1, 1, 2)),
    loss_scale=st.sampled_from((None, None, None, 1024.0)),
    moments=st.sampled_from(("fp32",) * 8 + ("bf16", "int8")),
)
_BLOCKS = st.builds(Block, kind=st.sampled_from(KINDS), frozen=_sometimes(3, of=20))


@st.composite
def models(draw: DrawFn) -> Model:
    """A model of two to eight blocks."""
    blocks = tuple(draw(st.lists(_BLOCKS, min_size=2, max_size=8)))
    count = len(blocks)
    groups = []
    if draw(_sometimes(2, of=5)):
        first = draw(st.integers(0, count - 1))
        groups.append(tuple(range(first, min(first + draw(st.integers(1, 3)), count))))
    grouped = {number for group in groups for number in group}
    path: list[Any] = [number for number in range(count) if number not in grouped]
    for number in range(len(groups)):
        path.insert(draw(st.integers(0, len(path))), -1 - number)
    for _ in range(draw(st.sampled_from((0, 1, 1, 2, 2, 3)))):
        path = draw(_varied(path))
    linear = [number for number, block in enumerate(blocks) if block.kind == "linear"]
    tied: tuple[Any, ...] = ()
    if len(linear) > 1 and draw(_sometimes(2, of=5)):
        pair = draw(st.lists(st.sampled_from(linear), min_size=2, max_size=2, unique=True))
        tied = (tuple(sorted(pair)),)
    model = Model(
        blocks,
        tuple(path),
        width=draw(st.sampled_from((16, 16, 24, 33))),
        tokens=draw(_sometimes(3, of=10)),
        tied=tied,
        groups=tuple(groups),
        units=draw(st.sampled_from(("auto", "blocks", "blocks", "leaves", "groups"))),
        dtype=draw(st.sampled_from(("float32",) * 4 + ("bfloat16",))),
    )
    # No draw of its own, so that seeds draw what they drew before there were tiles.
    in_tiles = model.width == 24 and model.units in ("auto", "blocks")
    return dataclasses.replace(model, tiles=1024 if in_tiles else 0)


@st.composite
def _varied(draw: DrawFn, path: list[Any]) -> list[Any]:
    """The path with a step more, or with some of its steps in a checkpoint, or left out at
    times."""
    change = draw(st.sampled_from(("again",) * 3 + ("checkpoint",) * 5 + ("skip",)))
    if change == "again":  # a module that is used twice
        step = draw(st.sampled_from(path))
        at = draw(st.integers(0, len(path)))
        return [*path[:at], step, *path[at:]]
    begin = draw(st.integers(0, len(path) - 1))
    end = min(begin + draw(st.integers(1, 3)), len(path))
    how = draw(_sometimes(2, of=5)) if change == "checkpoint" else draw(st.integers(0, 1))
    return [*path[:begin], (change, how, tuple(path[begin:end])), *path[end:]]


# Phrases: some operations that make sense together.

_STEP: list[Operation] = [("step",), ("zero_grad", True)]
_END = st.sampled_from(([], _STEP))


@st.composite
def _train(draw: DrawFn) -> list[Operation]:
    program: list[Operation] = []
    for _ in range(draw(st.sampled_from((1, 1, 2, 3)))):
        program.append(("train", draw(BATCHES)))
        if draw(_sometimes(3, of=10)):
            program.append(("look", "gradients"))
        program += [("step",), ("zero_grad", draw(_sometimes(7, of=10)))]
    return program


@st.composite
def _unfinished(draw: DrawFn) -> list[Operation]:
    return [("train", draw(BATCHES)), *draw(st.sampled_from(([], [("look", "gradients")])))]


@st.composite
def _summed(draw: DrawFn) -> list[Operation]:
    batches = draw(st.lists(BATCHES, min_size=2, max_size=3))
    return [*(("train", batch) for batch in batches), *_STEP]


@st.composite
def _two_graphs(draw: DrawFn) -> list[Operation]:
    program: list[Operation] = [("forward", 0, draw(BATCHES)), ("forward", 1, draw(BATCHES))]
    order = draw(st.permutations((0, 1)))
    retain = draw(_sometimes(3, of=10))
    program += [("backward", slot, retain) for slot in order]
    if retain:
        program += [("backward", slot, False) for slot in order]
    return program + draw(_END)


@st.composite
def _accumulate(draw: DrawFn) -> list[Operation]:
    batches = tuple(draw(st.lists(BATCHES, min_size=1, max_size=3)))
    order = draw(st.sampled_from(("vertical", "vertical", "horizontal")))
    return [("accumulate", batches, order, draw(st.sampled_from(("mean", "sum")))), *draw(_END)]


@st.composite
def _clip(draw: DrawFn) -> list[Operation]:
    return [("train", draw(BATCHES)), ("clip", draw(st.sampled_from((0.01, 0.5, 1e3)))), *_STEP]


@st.composite
def _freeze(draw: DrawFn) -> list[Operation]:
    number = draw(PARAMETERS)
    return [
        ("zero_grad", True),
        ("freeze", number, True),
        *draw(_train()),
        ("freeze", number, False),
    ]


@st.composite
def _forget(draw: DrawFn) -> list[Operation]:
    again = draw(st.sampled_from(([], [("train", draw(BATCHES))])))
    return [
        ("train", draw(BATCHES)),
        ("forget", draw(PARAMETERS)),
        *again,
        ("look", "gradients"),
        *_STEP,
    ]


@st.composite
def _exception(draw: DrawFn) -> list[Operation]:
    where = draw(st.sampled_from(("forward", "backward")))
    kind = draw(st.sampled_from(("error", "interrupt")))
    end = draw(st.sampled_from(([], [("zero_grad", True)])))
    return [("fault", where, draw(st.integers(0, 11)), kind), ("train", draw(BATCHES)), *end]


@st.composite
def _over_a_step(draw: DrawFn) -> list[Operation]:
    end = draw(st.sampled_from(([], [("step",)])))
    return [("forward", 2, draw(BATCHES)), *draw(_train()), ("backward", 2, False), *end]


def _one(name: str, *arguments: SearchStrategy[Any]) -> SearchStrategy[list[Operation]]:
    """A phrase of one operation."""
    return st.tuples(st.just(name), *arguments).map(lambda operation: [operation])


_EVALUATE = st.one_of(
    _one("evaluate", BATCHES, st.just("no_grad")),
    _one("evaluate", BATCHES, st.just("inference_mode")),
    _one("generate", BATCHES, st.just(3)),
    _one("submodule", BATCHES, BATCHES, st.booleans()),
)
_TWICE = BATCHES.map(lambda batch: [("train", batch), ("step",), *_STEP])
_NOT_ZEROED = st.tuples(BATCHES, BATCHES).map(
    lambda two: [("train", two[0]), ("step",), ("train", two[1]), *_STEP]
)
_SAVE = _train().map(lambda program: [("save",), *program, ("load",)])
_LOOK = _one("look", st.sampled_from(("gradients", "gradients", "weights", "states")))
_WEIGHTS: tuple[tuple[int, SearchStrategy[list[Operation]]], ...] = (
    (24, _train()),
    (6, _unfinished()),
    (8, _summed()),
    (8, _two_graphs()),
    (6, _accumulate()),
    (2, st.just([("zero_grad", True), ("step",)])),
    (6, _clip()),
    (4, _freeze()),
    (4, _forget()),
    (10, _EVALUATE),
    (4, _one("input gradient", BATCHES, st.booleans())),
    (4, _one("read", PARAMETERS, st.booleans())),
    (6, _one("write", PARAMETERS, st.sampled_from((0.5, 1.0, 1.25)))),
    (4, _one("write", PARAMETERS, st.just(0.5), st.just(True))),
    (4, _one("dirty", PARAMETERS)),
    (6, _exception()),
    (5, _SAVE),
    (2, _one("move", st.integers(1, EACH - 1))),
    (2, _one("wrap again")),
    (2, _one("lr", st.integers(0, 1), st.sampled_from((0.5, 2.0)))),
    (2, _one("rest")),
    (4, _LOOK),
    (4, _TWICE),
    (4, _NOT_ZEROED),
    (4, _over_a_step()),
)
_PHRASES = st.sampled_from([phrase for weight, phrase in _WEIGHTS for _ in range(weight)]).flatmap(
    lambda phrase: phrase
)


def phrases() -> SearchStrategy[list[Operation]]:
    """Some operations that make sense together."""
    return _PHRASES
