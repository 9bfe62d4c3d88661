"""Run a program: plainly, or on a placement. What a player saw is a list that can be compared with
another's."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

import infinity
from infinity.activations import saved_tensors
from infinity.sharding.tiles import TiledWeight, pieces_of
from random_programs import modules, placements
from random_programs.modules import Fault, Interrupt, Pass
from random_programs.plain import Rule
from random_programs.recipes import Recipe, of_rank
from random_programs.round_trips import (
    Bits,
    bits_of,
    different,
    filled,
    fresh,
    trip,
    weights_in_files,
)
from random_programs.using import Using, is_refusal, weights_of

ALGORITHMS = {"adamw": "adam"}
"""The values of `Config.algorithm` that are not called like the rule."""
RULES: dict[str, Callable[..., infinity.Optimizer]] = {
    "adamw": infinity.AdamW,
    "adam": infinity.Adam,
    "adagrad": infinity.Adagrad,
    "lion": infinity.Lion,
    "sgd": infinity.SGD,
    "momentum": infinity.SGD,
}


SHORTAGE = re.compile(r"gpu_memory=(\d+) \(.* is enough")
SPARED = (("later", 0), ("kept", 0))
"""What outlives a step, among the graphs."""


class Seen(NamedTuple):
    """What was seen in operation number `at`: a tensor, a text or nothing."""

    at: int
    what: str
    value: Any


@dataclasses.dataclass(frozen=True)
class Raised:
    """An error of this kind; its text may be another one."""

    kind: str
    text: str = dataclasses.field(compare=False)
    refusal: bool = dataclasses.field(default=False, compare=False)
    """Whether the engine has raised it on purpose."""


class Player(Using):
    """Runs the operations of a program. What differs between plain PyTorch and the engine is left
    to subclasses."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.seen: list[Seen] = []
        self.graphs: dict[Any, Any] = {}
        self.fault: tuple[Any, ...] | None = None
        self.saved = False
        self.at = 0
        self.model = self.build_model()
        self.parameters = self.trainable()
        self.optimizer: Any = None
        self.open(self._place())
        self._make_optimizer()

    def _place(self) -> str:
        return ""

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        named = weights_of(self.model) if self.recipe.whole else self.model.named_parameters()
        return [(name, p) for name, p in named if p.requires_grad]

    def build_model(self) -> modules.Net:
        return modules.build(self.recipe.model)

    def _make_optimizer(self) -> None:
        training = self.recipe.training
        groups = [[p for _, p in self.parameters]]
        if training.groups == 2:
            flat = [p for p in groups[0] if p.dim() < 2]
            rest = [p for p in groups[0] if p.dim() >= 2]
            groups = [group for group in (rest, flat) if group]
        rates = (training.lr, training.lr / 2)
        decays = (training.weight_decay, 0.0)
        self.optimizer = self.make_optimizer(
            [
                {"params": pieces_of(g), "lr": lr, "weight_decay": decay}
                for g, lr, decay in zip(groups, rates, decays, strict=False)
            ]
        )

    def play(self) -> list[Seen]:
        """Run the program; returns what was seen."""
        for at in range(len(self.recipe.program)):
            self.operate(at)
        return self.end()

    def operate(self, at: int) -> None:
        """Run operation number `at`."""
        self.at = at
        torch.manual_seed(self.at)
        name, *arguments = self.recipe.program[at]
        try:
            getattr(self, "op_" + name.replace(" ", "_"))(*arguments)
        except (RuntimeError, Fault, Interrupt) as error:
            self._failed(error)
        except infinity.BudgetError:
            raise
        except Exception as error:
            if not self.recipe.whole:
                raise
            self._failed(error)

    def end(self) -> list[Seen]:
        """After the last operation; returns what was seen."""
        self.at += 1
        for what in ("gradients", "weights", "states"):
            self.op_look(what)
        return self.seen

    def _failed(self, error: Exception | Interrupt) -> None:
        if "the engine cannot go on" in str(error):
            raise error
        if SHORTAGE.search(str(error)):  # of a script, which raises errors of its own
            raise infinity.BudgetError(str(error))
        self.see(
            "raised",
            Raised(
                self._kind_of(error),
                str(error),
                is_refusal(error),
            ),
        )
        self.graphs.clear()
        self.fault = None
        # Torch does not say how far a backward came; tiles have more nodes, in another order.
        if self._kind_of(error) in ("RuntimeError", "error") or self.recipe.rounds:
            self.zero_grad()

    def _kind_of(self, error: BaseException) -> str:
        """Where users may do anything, errors of any other kinds are as good."""
        if self.recipe.whole and not isinstance(error, (Fault, Interrupt)):
            return "error"
        return "RuntimeError" if isinstance(error, RuntimeError) else type(error).__name__

    def see(self, what: str, value: Any) -> None:
        """Note what was seen."""
        self.seen.append(
            Seen(
                self.at, what, value.detach().clone() if isinstance(value, torch.Tensor) else value
            )
        )

    def close(self) -> None:
        """End everything."""

    # What players do in their own ways

    def open(self, place: str) -> None:
        """Make the model ready for use."""

    def make_optimizer(self, groups: list[dict[str, Any]]) -> Any:
        """An optimizer for these groups."""
        raise NotImplementedError

    def forget(self, parameter: nn.Parameter) -> None:
        """Forget one gradient."""
        parameter.grad = None

    def settle(self, parameter: torch.Tensor) -> None:
        """Before the gradient of a parameter is changed by hand."""

    def zero_grad(self) -> None:
        """Forget all gradients of the model."""
        self.model.zero_grad()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """What backward is called on."""
        return loss

    # Forward and backward

    def _forward(self, batch: int) -> torch.Tensor:
        model = self.recipe.model
        run = Pass(batch, *(self.fault or ()))
        self.fault = None
        data = modules.batch_of(model, batch)
        loss = modules.loss_of(model, self.model(data, run), data)
        self.see("loss", loss)
        return loss

    def op_forward(self, slot: int, batch: int) -> None:
        """A forward whose backward comes later."""
        self.graphs.pop(slot, None)
        self.graphs[slot] = self._forward(batch)

    def op_backward(self, slot: int, retain: bool) -> None:
        """The backward of an earlier forward; not its last one if `retain`."""
        loss = self.graphs.get(slot) if retain else self.graphs.pop(slot, None)
        if loss is not None:
            self.scaled(loss).backward(retain_graph=retain)

    def op_train(self, batch: int) -> None:
        """Forward and backward."""
        self.scaled(self._forward(batch)).backward()

    def op_accumulate(self, batches: Sequence[int], order: str, reduction: str) -> None:
        """Several micro-batches; without dropout, for each would draw its own numbers."""
        self.model.eval()
        try:
            for loss in self.accumulate(batches, order, reduction):
                self.see("loss", loss)
        finally:
            self.model.train()

    def op_fault(self, where: str, at: int, kind: str) -> None:
        """Let the next forward, or its backward, fail at its block call number `at`, if it has so
        many."""
        self.fault = where, at, Interrupt if kind == "interrupt" else Fault

    def op_evaluate(self, batch: int, mode: str) -> None:
        """A forward without gradients."""
        self.model.eval()
        data = modules.batch_of(self.recipe.model, batch)
        with torch.inference_mode() if mode == "inference_mode" else torch.no_grad():
            outputs = self.model(data, Pass(batch))
        self.see("outputs", outputs)
        self.model.train()

    @torch.no_grad()
    def op_generate(self, batch: int, count: int) -> None:
        """Feed the outputs back."""
        self.model.eval()
        data = modules.batch_of(self.recipe.model, batch)
        for _ in range(count):
            data = self.model(data, Pass(batch))
            self.see("outputs", data)
            data = data.argmax(-1) if self.recipe.model.tokens else data.clamp(-2, 2)
        self.model.train()

    def op_submodule(self, number: int, batch: int, train: bool) -> None:
        """Call one block alone; not one that uses the parameters of a unit of which it knows
        nothing."""
        model = self.recipe.model
        number %= len(model.blocks)
        if model.blocks[number].kind in ("borrow", "view") or any(
            number in group for group in model.groups
        ):
            return
        generator = torch.Generator().manual_seed(batch)
        data = torch.randn(2, 3, model.width, generator=generator).to(getattr(torch, model.dtype))
        modules.BATCH.number = batch
        with nullcontext() if train else torch.no_grad():
            outputs = modules.hidden(self.model.block(number)(data))
        self.see("outputs", outputs)
        if train and outputs.requires_grad:
            self.scaled(outputs.float().square().mean()).backward()

    def op_input_gradient(self, batch: int, twice: bool) -> None:
        """The gradient of the loss by the input, and if `twice` the gradient of its square."""
        model = self.recipe.model
        if model.tokens or any(_checkpoints(model.path, reentrant=True)):
            return
        data = modules.batch_of(model, batch).requires_grad_()
        loss = modules.loss_of(model, self.model(data, Pass(batch)), data.detach())
        (gradient,) = torch.autograd.grad(loss, [data], create_graph=twice)
        self.see("gradient", gradient)
        if twice:
            self.scaled(loss + gradient.float().square().sum()).backward()

    # Steps

    def op_step(self) -> None:
        """An optimizer step."""
        self.graphs = {
            slot: loss for slot, loss in self.graphs.items() if slot == 2 or slot in SPARED
        }
        self.optimizer.step()
        norm = self.optimizer.grad_norm
        self.see("norm", None if norm is None else torch.tensor(norm, dtype=torch.float32))

    def op_zero_grad(self, set_to_none: bool) -> None:
        """The engine makes no difference."""
        self.optimizer.zero_grad()

    def op_clip(self, most: float) -> None:
        """Clip the gradients by hand."""
        self.see("norm", torch.tensor(self.clip(most), dtype=torch.float32))

    def op_lr(self, group: int, factor: float) -> None:
        """Change a learning rate."""
        self.optimizer.param_groups[group % len(self.optimizer.param_groups)]["lr"] *= factor

    def op_freeze(self, number: int, frozen: bool) -> None:
        """Freeze a parameter, or thaw it."""
        self.graphs.clear()
        self.parameters[number % len(self.parameters)][1].requires_grad_(not frozen)

    def op_forget(self, number: int) -> None:
        """Forget the gradient of one parameter."""
        self.forget(self.parameters[number % len(self.parameters)][1])

    # Parameters

    def op_read(self, number: int, whole: bool) -> None:
        """Read a parameter, or all of its block."""
        name, parameter = self.parameters[number % len(self.parameters)]
        target = self.model.head if whole else parameter
        with self.gathered(target):
            for tensor in [each for _, each in weights_of(target)] if whole else [target]:
                self.see(f"read {name}", tensor)

    def op_write(self, number: int, factor: float, fails: bool = False) -> None:
        """Multiply a part of a parameter by a factor; what was written stays also when the block
        `fails`."""
        self.graphs.clear()
        parameter = self.parameters[number % len(self.parameters)][1]
        with self.gathered(parameter, write=True), torch.no_grad():
            _every(2, parameter).mul_(factor)
            if fails:
                raise Fault

    def op_dirty(self, number: int) -> None:
        """Write where only reading is allowed: an error, and nothing is changed."""
        self.graphs.clear()
        try:
            self.write_in_reading(self.parameters[number % len(self.parameters)][1])
        except infinity.ShardedParameterError:
            self.see("write", "refused")
        else:
            self.see("write", "accepted")

    # Everything

    def op_look(self, what: str) -> None:
        """See all gradients, weights or states."""
        if what == "states" and self.recipe.rounds:
            return  # of tiles
        for name, value in sorted(getattr(self, what)(), key=lambda pair: pair[0]):
            self.see(f"{what} {name}", value)

    def op_rest(self) -> None:
        """Ask for what changes nothing."""

    def op_save(self) -> None:
        """Save weights and optimizer."""
        self.saved = True
        self.save()

    def op_load(self) -> None:
        """Load what was saved last; gradients are forgotten."""
        self.graphs.clear()
        if self.saved:
            self.load()
            self.zero_grad()

    def op_move(self, offset: int) -> None:
        """Save, close, wrap the model in another placement, load."""
        self.graphs.clear()
        self.op_save()
        self.again(offset, True)

    def op_wrap_again(self) -> None:
        """Close, wrap the model again with the states that there were."""
        self.graphs.clear()
        self.again(0, False)

    def op_round_trip(self, how: str, place: str, tiles: int, turned: bool) -> None:
        """Save in one of `save_recipes.WAYS`, and load into a fresh engine in another placement;
        see `round_trips`. A snapshot is of the last step, which the next forward fixes."""
        self.graphs.clear()
        before = self.known()
        if how == "snapshot":
            self._forward(0)
        self.see("round trip", self.round_trip(before, how, place, tiles, turned))

    # Filled in by subclasses

    known: Callable[[], Any]
    round_trip: Callable[[Any, str, str, int, bool], list[str]]
    gradients: Callable[[], Iterator[tuple[str, Any]]]
    weights: Callable[[], Iterator[tuple[str, Any]]]
    states: Callable[[], Iterator[tuple[str, Any]]]
    clip: Callable[[float], float]
    accumulate: Callable[[Sequence[int], str, str], list[torch.Tensor]]
    gathered: Callable[..., Any]
    write_in_reading: Callable[[nn.Parameter], None]
    save: Callable[[], None]
    load: Callable[[], None]
    again: Callable[[int, bool], None]


def _every(number: int, tensor: torch.Tensor) -> torch.Tensor:
    """The elements whose last index is a multiple of it, whatever order they lie in."""
    return tensor[..., ::number] if tensor.dim() else tensor


def _checkpoints(path: Any, reentrant: bool) -> Iterator[bool]:
    for step in path:
        if not isinstance(step, int):
            yield step[0] == "checkpoint" and step[1] == reentrant
            yield from _checkpoints(step[2], reentrant)


class Plain(Player):
    """Plain PyTorch, with the update rules of `plain`."""

    def build_model(self) -> modules.Net:
        return modules.build(self.recipe.model, self.recipe.whole)

    def settle(self, parameter: torch.Tensor) -> None:
        self.optimizer.settle(parameter)

    def make_optimizer(self, groups: list[dict[str, Any]]) -> Rule:
        training = self.recipe.training
        watches, previous = training.loss_scale is not None, training.clip == "previous"
        return Rule(groups, training.rule, training.max_grad_norm, watches, previous, training.eps)

    def gradients(self) -> Iterator[tuple[str, Any]]:
        for name, parameter in self.parameters:
            yield name, self.optimizer.gradient(parameter)

    def forget(self, parameter: nn.Parameter) -> None:
        self.optimizer.forget(parameter)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        self.optimizer.apply()
        return loss

    def weights(self) -> Iterator[tuple[str, Any]]:
        yield from self.model.state_dict().items()

    def states(self) -> Iterator[tuple[str, Any]]:
        yield from self.optimizer.named_states()

    def clip(self, most: float) -> float:
        return self.optimizer.clip(most)

    def accumulate(self, batches: Sequence[int], order: str, reduction: str) -> list[torch.Tensor]:
        losses, model = [], self.recipe.model
        for batch in batches:
            data = modules.batch_of(model, batch)
            loss = modules.loss_of(model, self.model(data, Pass(batch)), data)
            losses.append(loss.detach())
            self.optimizer.apply()
            (loss / len(batches) if reduction == "mean" else loss).backward()
        return losses

    @contextmanager
    def gathered(self, target: Any, write: bool = False) -> Iterator[None]:
        before = target.detach().clone() if write else None
        try:
            yield
        finally:
            if before is not None:
                self.optimizer.follow(target, before)

    def write_in_reading(self, parameter: nn.Parameter) -> None:
        raise infinity.ShardedParameterError("nothing is changed")

    def save(self) -> None:
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        self._checkpoint = weights, self.optimizer.saved()

    def load(self) -> None:
        weights, states = self._checkpoint
        self.model.load_state_dict(weights)
        self.optimizer.take(states)

    def known(self) -> None:
        """All that there is, for the round trip."""

    def round_trip(self, before: Any, how: str, *_: Any) -> list[str]:
        """What differs after it."""
        if how == "resume":
            self.again(0, True)
        return []

    def again(self, offset: int, moves: bool) -> None:
        self.zero_grad()
        self.optimizer.take(self.optimizer.saved())
        for _, parameter in self.parameters:
            parameter.requires_grad_(True)


class Wrapped(Player):
    """The engine, on one placement after the other, with its files in `directory`."""

    def __init__(self, recipe: Recipe, placement: str, directory: Path, least: int = 0) -> None:
        """`least` is the gpu_memory in bytes that the program needs."""
        self._placement, self._directory, self.least = placement, directory, least
        self._numbers = itertools.count()
        self._resumes = False
        self.engine: Any = None
        super().__init__(recipe)

    def _place(self) -> str:
        return self._placement

    def open(self, place: str) -> None:
        self._placement = place
        if not self._resumes:
            self._states = self._directory / f"states{next(self._numbers)}"
            self._states.mkdir(parents=True, exist_ok=True)  # ranks share it
        rule = self.recipe.training.rule
        self.engine = placements.wrap(
            self.model,
            place,
            self._states,
            ALGORITHMS.get(rule, rule),
            self.recipe.training.moments,
            self.least,
            self._resumes,
        )

    def close(self) -> None:
        self.graphs.clear()
        if self.engine is not None:
            self.engine.close()

    def make_optimizer(self, groups: list[dict[str, Any]]) -> infinity.Optimizer:
        training = self.recipe.training
        options: dict[str, Any] = {}
        if training.rule == "momentum":
            options = {"momentum": 0.9, "nesterov": True}
        if training.eps is not None:
            options = {"eps": training.eps}
        scaler = (
            None
            if training.loss_scale is None
            else infinity.LossScaler(training.loss_scale, window=2)
        )
        return RULES[training.rule](
            groups,
            max_grad_norm=training.max_grad_norm,
            loss_scaler=scaler,
            clip=training.clip,
            **options,
        )

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return self.optimizer.scale(loss)

    def gradients(self) -> Iterator[tuple[str, Any]]:
        for name, parameter in self.parameters:
            tiled = isinstance(parameter, TiledWeight)
            gradient = parameter.grad if tiled else self.engine.gradient(parameter)
            yield name, gradient if gradient is None else gradient.to(parameter.dtype)

    def weights(self) -> Iterator[tuple[str, Any]]:
        yield from self.engine.state_dict().items()

    def states(self) -> Iterator[tuple[str, Any]]:
        for number, state in copy.deepcopy(self.optimizer.state_dict()["state"]).items():
            for name, value in state.items():
                if name != "master" or state["step"]:  # before the first update it is the weight
                    yield f"{number} {name}", value

    def clip(self, most: float) -> float:
        return self.engine.clip_grad_norm_(most)

    def accumulate(self, batches: Sequence[int], order: str, reduction: str) -> list[torch.Tensor]:
        model = self.recipe.model
        micro = [(modules.batch_of(model, batch), Pass(batch)) for batch in batches]
        return infinity.accumulate(
            self.model, micro, lambda outputs, batch: modules.loss_of(model, outputs, batch[0]),
            order=order, reduction=reduction, scale=self.optimizer.scale,
        )  # fmt: skip

    def gathered(self, target: Any, write: bool = False) -> Any:
        return infinity.gathered(target, write=write)

    def write_in_reading(self, parameter: nn.Parameter) -> None:
        with infinity.gathered(parameter), torch.no_grad():
            _every(3, parameter).mul_(0.75)

    def op_rest(self) -> None:
        self.engine.drain()
        self.engine.report()
        self.engine.memory()
        try:
            self.engine.sleep()
        except (RuntimeError, infinity.InfinityError) as error:
            if "call engine.sleep() after" not in str(error):
                raise
        self.engine.wake()

    def save(self) -> None:
        self.engine.save_checkpoint(self._directory / "checkpoint", self.optimizer, {"saved": 1})

    def load(self) -> None:
        self.engine.load_checkpoint(self._directory / "checkpoint", self.optimizer)

    def known(self) -> tuple[Bits, Bits]:
        return bits_of(self), weights_in_files(self)

    def round_trip(self, before: Any, how: str, place: str, tiles: int, turned: bool) -> list[str]:
        durability = placements.PLACEMENTS[self._placement].options.get("durability", "off")
        if how == "resume":
            return self._moved() if durability == "off" else self._resumed(before[0])
        directory = self._directory / f"trip{next(self._numbers)}"
        directory.mkdir()
        if how == "snapshot" and durability != "step":
            how, before = "save", self.known()  # what is committed may be older
        with fresh(self, place, tiles, turned, directory / "fresh") as other:
            return trip(self, how, directory, *before, other)

    def _moved(self) -> list[str]:
        self.save()
        self.again(0, True)
        return []

    def _resumed(self, before: Bits) -> list[str]:
        self.engine.close()
        self.model = filled(self.build_model())
        self.parameters = self.trainable()
        self._resumes = True
        try:
            self.open(self._placement)
        finally:
            self._resumes = False
        self._make_optimizer()
        return different(before, bits_of(self))

    def again(self, offset: int, moves: bool) -> None:
        weights, states = (
            (None, None)
            if moves
            else (self.engine.state_dict(), copy.deepcopy(self.optimizer.state_dict()))
        )
        options = [
            {k: v for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]
        self.engine.close()
        names = self.recipe.placements
        self.model = self.build_model()
        if weights is not None:
            self.model.load_state_dict(weights)
        self.parameters = self.trainable()
        scaler = self.optimizer.loss_scaler
        self.open(names[(names.index(self._placement) + offset) % len(names)])
        self._make_optimizer()
        for group, old in zip(self.optimizer.param_groups, options, strict=True):
            group.update(old)
        if moves:
            self.load()
        else:
            self.optimizer.load_state_dict(states)
        if scaler is not None and self.optimizer.loss_scaler.scale != scaler.scale:
            self.see("loss scale", f"{self.optimizer.loss_scaler.scale} is not {scaler.scale}")


class PlainRank(Plain):
    """One rank of several: what it computes with its own batches."""

    def __init__(self, recipe: Recipe) -> None:
        self._before: dict[nn.Parameter, torch.Tensor | None] = {}
        super().__init__(recipe)

    def begin(self) -> None:
        """An operation that may go backward begins."""
        self.optimizer.apply()
        self._before = {p: p.grad for _, p in self.parameters}
        for p in self._before:
            p.grad = None

    def zero_grad(self) -> None:
        """Also what there was before the operation."""
        super().zero_grad()
        self._before = dict.fromkeys(self._before)

    def add(self, means: Sequence[torch.Tensor | None]) -> None:
        """These are the gradients of the operation, of all ranks."""
        for (p, before), mean in zip(self._before.items(), means, strict=True):
            p.grad = before
            if mean is not None:
                p.grad = mean.clone() if before is None else before + mean


class PlainRanks:
    """All ranks in one process, one operation after the other. The gradient of an operation is the
    mean of theirs, with zeros for a rank that has none, as with `find_unused_parameters` of DDP."""

    BACKWARD = ("train", "backward", "accumulate", "submodule", "input gradient")
    """Operations that may go backward."""

    def __init__(self, recipe: Recipe) -> None:
        self._program = recipe.program
        self._players = [PlainRank(of_rank(recipe, rank)) for rank in range(recipe.ranks)]

    def play(self) -> list[list[Seen]]:
        """Run the program; returns what each rank saw."""
        for at, operation in enumerate(self._program):
            backward = operation[0] in self.BACKWARD
            for player in self._players:
                if backward:
                    player.begin()
                player.operate(at)
            if backward:
                self._average()
        return [player.end() for player in self._players]

    def _average(self) -> None:
        rows = zip(*([p.grad for _, p in each.parameters] for each in self._players), strict=True)
        means = [self._mean([g for g in row if g is not None]) for row in rows]
        for player in self._players:
            player.add(means)

    def _mean(self, some: list[torch.Tensor]) -> torch.Tensor | None:
        if not some:
            return None
        total = functools.reduce(torch.add, (each.float() for each in some))
        return (total / len(self._players)).to(some[0].dtype)


def run(make: Callable[[], Player]) -> list[Seen]:
    """What a player sees, from its making to its end. An error that no program may see is the last
    thing.

    Raises `BudgetError` when a checkpoint spans more units than the budget has room for, which no
    `wrap` can know.
    """
    torch.set_num_threads(1)
    # Also what is small is moved.
    with warnings.catch_warnings(), mock.patch.object(saved_tensors, "LEAST_BYTES", 1):
        warnings.simplefilter("ignore")
        player = None
        seen: list[Seen] = []
        try:
            player = make()
            seen = player.seen
            player.play()
        except infinity.BudgetError:
            raise
        except Exception as error:
            seen.append(
                Seen(player.at if player else -1, "error", f"{type(error).__name__}: {error}")
            )
        finally:
            if player is not None:
                player.close()
    return seen


def play(recipe: Recipe, placement: str, directory: Path) -> list[Seen]:
    """What is seen on this placement, with as much memory for parameters as it needs."""
    least = 0
    while True:
        try:
            return run(functools.partial(Wrapped, recipe, placement, directory / str(least), least))
        except infinity.BudgetError as error:
            found = SHORTAGE.search(str(error))
            if found is None:
                return [Seen(-1, "error", str(error))]
            # Enough for what was in use then; more may be later.
            least = max(int(found[1]), 2 * least)
