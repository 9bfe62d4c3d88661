"""What a random program is, as plain data that can be pasted into a test, and how number N of them is drawn.

An operation is a tuple: its name and its arguments, see the methods `op_*` of `players.Player`. Every operation can follow
every other one, and does nothing where it has no object; so any part of a program is a program.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

Operation = tuple[Any, ...]

KNOWN: dict[str, str] = {}
"""What no program does for now, by the name of the feature, and why: each is a defect that a test or an issue describes."""

KINDS = (
    "linear", "linear", "norm", "mlp", "mlp", "bias", "gate", "dropout", "weight_norm", "function", "dict", "dataclass", "tuple",
    "view", "borrow", "buffer", "scalar", "int8",
)  # fmt: skip
PLACEMENTS = (
    "nvme smallest", "nvme two units", "nvme cached", "cpu", "gpu", "mixed", "speculative", "posix", "activations", "gpu cache",
    "far", "plain update",
)  # fmt: skip
EACH = 7
"""How many placements run a program."""


@dataclasses.dataclass(frozen=True)
class Block:
    """A module of the model, of a class of `modules.KINDS`; the parameters of a frozen one are never trained."""

    kind: str
    frozen: bool = False


@dataclasses.dataclass(frozen=True)
class Model:
    """A model that takes (2, 3, width) numbers, or (2, 3) tokens, through the blocks in the order of `path`.

    A step of the path is the number of a block; -1 - G for all blocks of group G; ("checkpoint", reentrant, steps); or
    ("skip", phase, steps), whose steps are left out in every second batch. `groups` are blocks that one module holds, `tied`
    pairs of linear blocks with one weight. `units` is given to `wrap`: "auto", "blocks", "leaves" or "groups".
    """

    blocks: tuple[Block, ...]
    path: tuple[Any, ...]
    width: int = 16
    tokens: bool = False
    tied: tuple[tuple[int, int], ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    units: str = "auto"
    dtype: str = "float32"


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


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A program, and the placements that run it."""

    model: Model
    program: tuple[Operation, ...]
    training: Training = Training()
    placements: tuple[str, ...] = PLACEMENTS


def draw(number: int) -> Recipe:
    """Random program `number`; the same for ever, as long as this file is."""
    chance = random.Random(number)
    model = _model(chance)
    training = Training(
        rule=chance.choice(("adamw", "adamw", "adam", "sgd", "momentum", "adagrad", "lion")),
        lr=chance.choice((1e-3, 1e-2)),
        weight_decay=chance.choice((0.0, 0.1)),
        max_grad_norm=chance.choice((None, None, 0.1, 100.0)),
        groups=chance.choice((1, 1, 2)),
        loss_scale=chance.choice((None, None, None, 1024.0)),
        moments=chance.choice(("fp32",) * 8 + ("bf16", "int8")),
    )
    program: list[Operation] = []
    for _ in range(chance.randint(2, 6)):
        program += _phrase(chance)
    program.append(("look", chance.choice(("weights", "states"))))
    places = PLACEMENTS
    if "write near" in KNOWN and any(operation[0] == "write" for operation in program):
        places = tuple(place for place in places if place not in ("gpu", "gpu cache"))
    return Recipe(model, tuple(program), training, tuple(sorted(chance.sample(places, EACH))))


def _model(chance: random.Random) -> Model:
    blocks = tuple(Block(chance.choice(KINDS), frozen=chance.random() < 0.15) for _ in range(chance.randint(2, 8)))
    count = len(blocks)
    groups = []
    if chance.random() < 0.4:
        first = chance.randrange(count)
        groups.append(tuple(range(first, min(first + chance.randint(1, 3), count))))
    grouped = {number for group in groups for number in group}
    path: list[Any] = [number for number in range(count) if number not in grouped]
    for number in range(len(groups)):
        path.insert(chance.randrange(len(path) + 1), -1 - number)
    for _ in range(chance.choice((0, 0, 1, 1, 2, 3))):
        path = _varied(chance, path)
    linear = [number for number, block in enumerate(blocks) if block.kind == "linear"]
    tied = (tuple(sorted(chance.sample(linear, 2))),) if len(linear) > 1 and chance.random() < 0.4 else ()
    tokens = chance.random() < 0.3
    return Model(
        blocks, tuple(path), chance.choice((16, 16, 24, 33)), tokens, tied, tuple(groups),
        chance.choice(("auto", "blocks", "blocks", "leaves", "groups")), chance.choice(("float32",) * 4 + ("bfloat16",)),
    )  # fmt: skip


def _varied(chance: random.Random, path: list[Any]) -> list[Any]:
    """The path with a step more, or with some of its steps in a checkpoint, or left out at times."""
    if chance.random() < 0.4:  # a module that is used twice
        step, at = chance.choice(path), chance.randrange(len(path) + 1)
        return [*path[:at], step, *path[at:]]
    begin = chance.randrange(len(path))
    end = min(begin + chance.randint(1, 3), len(path))
    inner = tuple(path[begin:end])
    checkpoint, skip = ("checkpoint", chance.random() < 0.4, inner), ("skip", chance.randrange(2), inner)
    return [*path[:begin], checkpoint if chance.random() < 0.7 else skip, *path[end:]]


def _phrase(chance: random.Random) -> list[Operation]:
    """Some operations that make sense together."""
    makers = [(weight, make) for feature, weight, make in _PHRASES if feature not in KNOWN]
    make = chance.choices([make for _, make in makers], [weight for weight, _ in makers])[0]
    return make(chance)


def _batch(chance: random.Random) -> int:
    return chance.randrange(8)


def _look(chance: random.Random) -> list[Operation]:
    return [("look", chance.choice(("gradients", "gradients", "weights", "states")))]


def _train(chance: random.Random) -> list[Operation]:
    program: list[Operation] = []
    for _ in range(chance.choice((1, 1, 2, 3))):
        program.append(("train", _batch(chance)))
        if chance.random() < 0.3:
            program.append(("look", "gradients"))
        program += [("step",), ("zero_grad", chance.random() < 0.7)]
    return program


def _unfinished(chance: random.Random) -> list[Operation]:
    return [("train", _batch(chance))] + ([("look", "gradients")] if chance.random() < 0.5 else [])


def _summed(chance: random.Random) -> list[Operation]:
    micro = [("train", _batch(chance)) for _ in range(chance.randint(2, 3))]
    return [*micro, ("step",), ("zero_grad", True)]


def _two_graphs(chance: random.Random) -> list[Operation]:
    program: list[Operation] = [("forward", 0, _batch(chance)), ("forward", 1, _batch(chance))]
    order = [0, 1] if chance.random() < 0.5 else [1, 0]
    retain = chance.random() < 0.3
    program += [("backward", slot, retain) for slot in order]
    if retain:
        program += [("backward", slot, False) for slot in order]
    return program + chance.choice(([], [("step",), ("zero_grad", True)]))


def _accumulate(chance: random.Random) -> list[Operation]:
    batches = tuple(_batch(chance) for _ in range(chance.randint(1, 3)))
    order, reduction = chance.choice(("vertical", "vertical", "horizontal")), chance.choice(("mean", "sum"))
    return [("accumulate", batches, order, reduction), *chance.choice(([], [("step",), ("zero_grad", True)]))]


def _no_gradients(chance: random.Random) -> list[Operation]:
    return [("zero_grad", True), ("step",)]


def _clip(chance: random.Random) -> list[Operation]:
    return [("train", _batch(chance)), ("clip", chance.choice((0.01, 0.5, 1e3))), ("step",), ("zero_grad", True)]


def _freeze(chance: random.Random) -> list[Operation]:
    number = chance.randrange(64)
    return [("zero_grad", True), ("freeze", number, True), *_train(chance), ("freeze", number, False)]


def _forget(chance: random.Random) -> list[Operation]:
    program: list[Operation] = [("train", _batch(chance)), ("forget", chance.randrange(64))]
    return program + chance.choice(([], [("train", _batch(chance))])) + [("look", "gradients"), ("step",), ("zero_grad", True)]


def _evaluate(chance: random.Random) -> list[Operation]:
    batch = _batch(chance)
    return [
        chance.choice(
            (
                ("evaluate", batch, "no_grad"), ("evaluate", batch, "inference_mode"), ("generate", batch, 3),
                ("submodule", chance.randrange(8), batch, False), ("submodule", chance.randrange(8), batch, True),
            )
        )
    ]  # fmt: skip


def _input_gradient(chance: random.Random) -> list[Operation]:
    return [("input gradient", _batch(chance), "recorded" not in KNOWN and chance.random() < 0.5)]


def _read(chance: random.Random) -> list[Operation]:
    return [("read", chance.randrange(64), chance.random() < 0.5)]


def _write(chance: random.Random) -> list[Operation]:
    return [("write", chance.randrange(64), chance.choice((0.5, 1.0, 1.25)))]


def _failed_write(chance: random.Random) -> list[Operation]:
    return [("write", chance.randrange(64), 0.5, True)]


def _dirty(chance: random.Random) -> list[Operation]:
    return [("dirty", chance.randrange(64))]


def _exception(chance: random.Random) -> list[Operation]:
    where, kind = chance.choice(("forward", "backward")), chance.choice(("error", "interrupt"))
    return [("fault", where, chance.randrange(12), kind), ("train", _batch(chance)), *chance.choice(([], [("zero_grad", True)]))]


def _save(chance: random.Random) -> list[Operation]:
    return [("save",), *_train(chance), ("load",)]


def _move(chance: random.Random) -> list[Operation]:
    return [("move", chance.randrange(1, 12))]


def _wrap_again(chance: random.Random) -> list[Operation]:
    return [("wrap again",)]


def _learning_rate(chance: random.Random) -> list[Operation]:
    return [("lr", chance.randrange(2), chance.choice((0.5, 2.0)))]


def _rest(chance: random.Random) -> list[Operation]:
    return [("rest",)]


def _step_twice(chance: random.Random) -> list[Operation]:
    return [("train", _batch(chance)), ("step",), ("step",), ("zero_grad", True)]


def _not_zeroed(chance: random.Random) -> list[Operation]:
    return [("train", _batch(chance)), ("step",), ("train", _batch(chance)), ("step",), ("zero_grad", True)]


def _over_a_step(chance: random.Random) -> list[Operation]:
    return [("forward", 2, _batch(chance)), *_train(chance), ("backward", 2, False), *chance.choice(([], [("step",)]))]


_PHRASES: tuple[tuple[str, float, Callable[[random.Random], list[Operation]]], ...] = (
    ("train", 12, _train), ("unfinished", 3, _unfinished), ("summed", 4, _summed), ("two graphs", 4, _two_graphs),
    ("accumulate", 3, _accumulate), ("no gradients", 1, _no_gradients), ("clip", 3, _clip), ("freeze", 2, _freeze),
    ("forget", 2, _forget), ("evaluate", 5, _evaluate), ("input gradient", 2, _input_gradient), ("read", 2, _read),
    ("write", 3, _write), ("failed write", 2, _failed_write), ("dirty", 2, _dirty), ("exception", 3, _exception),
    ("save", 0.5, _save), ("move", 0.5, _move), ("wrap again", 0.5, _wrap_again), ("learning rate", 1, _learning_rate),
    ("rest", 1, _rest), ("look", 2, _look), ("step twice", 2, _step_twice), ("not zeroed", 2, _not_zeroed),
    ("over a step", 2, _over_a_step),
)  # fmt: skip
