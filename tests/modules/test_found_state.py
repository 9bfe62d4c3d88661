"""A block that is repeated in the backward finds what its forward found, whatever changes
meanwhile: gradients are those of plain PyTorch, and what it changes it changes once."""

from __future__ import annotations

import gc
import random
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import infinity
from infinity.activations.found_state import SMALL_BYTES
from support.recomputed import assert_same, wrapped

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(120)]

WIDTH = 8
Run = Callable[["Model"], tuple[torch.Tensor, Any]]
"""A forward: its loss, and what is done before the backward."""


class Block(nn.Module):
    """Depends on all that it has. `before` and `after` are steps of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.act: nn.Module = nn.Tanh()
        self.drop = nn.Dropout(0.0)
        self.register_buffer("shift", torch.zeros(2 * WIDTH))
        self.register_buffer("large", torch.ones(2048))
        self.scale: Any = 1.0
        self.log: list[Any] = []
        self.table: dict[str, Any] = {"factor": 1.0}
        self.helper = types.SimpleNamespace(count=1)
        self.own = Helper()
        self.hidden: Any = None
        self.generator = torch.Generator().manual_seed(3)
        self.numbers = numpy.random.default_rng(3)
        self.before: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = 1.0 if self.before is None else self.before(self, x)
        y = self.act(self.up(x) + self.shift) * factor * self.scale
        y = y * self.table["factor"] * self.helper.count * self.own.count + self.large[0]
        y = y * (1 + len(self.log)) * (1.0 if self.hidden is None else self.hidden)
        return x + self.down(self.drop(y.sin()))


class Helper:
    """Has state of its own."""

    def __init__(self) -> None:
        self.count, self.seen = 1, torch.ones(1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def each(model: Model, change: Callable[[Any], Any]) -> None:
    for block in model.blocks:
        change(block)


def state_of(model: Model) -> list[torch.Tensor]:
    """What blocks have beside their parameters."""
    found: list[torch.Tensor] = []
    for block in model.blocks:
        numbers = [block.scale, *block.table.values(), block.helper.count, block.own.count]
        found += [torch.as_tensor(number).detach().clone() for number in numbers]
        found += [torch.tensor(len(block.log)), *(each.clone() for each in block.buffers())]
        found += [block.own.seen.clone(), block.generator.get_state()]
        found.append(torch.tensor(block.numbers.random()))
    return [*found, torch.get_rng_state(), torch.tensor([random.random(), numpy.random.random()])]


def result(run: Run, steps: int = 3, more: Any = None, **config: Any) -> list[torch.Tensor]:
    """Losses, gradients and states; of plain PyTorch without `config`."""
    torch.manual_seed(0)
    model = Model()
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)

    def train(gradient: Callable[[torch.Tensor], torch.Tensor | None]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for _ in range(steps):
            loss, extra = run(model)
            loss.backward()
            found.append(loss.detach())
            for parameter in model.parameters():
                value = gradient(parameter)
                found.append(torch.zeros(1) if value is None else value.clone())
            found += [each.grad.clone() for each in extra or ()]
            model.zero_grad()
            model.train()
        return [*found, *state_of(model)]

    if not config:
        return train(lambda parameter: parameter.grad)
    with wrapped(model, **config) as engine:
        return train(engine.gradient)


def check(run: Run) -> None:
    assert_same(result(run, recompute="all"), result(run))


# What the caller gives and takes back


def test_parameters_of_a_functional_call_have_their_gradients() -> None:
    def run(model: Model) -> tuple[torch.Tensor, Any]:
        z = torch.full((1,), 0.3, requires_grad=True)
        names = [name for name, _ in model.named_parameters() if name.endswith("up.bias")]
        made = {name: torch.tanh(z * (i + 1)).expand(2 * WIDTH) for i, name in enumerate(names)}
        return torch.func.functional_call(model, made, (batch(),)), [z]

    check(run)


def test_inner_weights_of_a_meta_learner() -> None:
    def run(model: Model) -> tuple[torch.Tensor, Any]:
        shapes = [(name, parameter.shape) for name, parameter in model.named_parameters()]
        fast = {name: torch.full(shape, 0.1, requires_grad=True) for name, shape in shapes}
        for _ in range(2):
            loss = torch.func.functional_call(model, fast, (batch(),))
            grads = torch.autograd.grad(loss, list(fast.values()))
            fast = {
                name: (value - 0.01 * grad).detach().requires_grad_()
                for (name, value), grad in zip(fast.items(), grads, strict=True)
            }
        return torch.func.functional_call(model, fast, (batch(1),)), list(fast.values())

    check(run)


def test_buffers_of_a_functional_call() -> None:
    def run(model: Model) -> tuple[torch.Tensor, Any]:
        made = {name: torch.full(b.shape, 2.0) for name, b in model.named_buffers()}
        return torch.func.functional_call(model, made, (batch(),)), None

    check(run)


def test_an_attribute_that_takes_part_in_the_graph() -> None:
    """A parent conditions its blocks, and takes that back after the forward."""

    def run(model: Model) -> tuple[torch.Tensor, Any]:
        z = torch.full((1,), 0.3, requires_grad=True)
        each(model, lambda block: setattr(block, "scale", z.exp()))
        loss = model(batch())
        each(model, lambda block: setattr(block, "scale", 1.0))
        return loss, [z]

    check(run)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a number": lambda block: setattr(block, "scale", 3.0),
    "a tensor": lambda block: setattr(block, "scale", torch.tensor(3.0)),
    "a buffer": lambda block: setattr(block, "shift", block.shift + 1),
    "a buffer in place": lambda block: block.shift.add_(1),
    "a buffer by its data": lambda block: block.shift.data.add_(1),
    "a list": lambda block: block.log.append(1),
    "a dict": lambda block: block.table.update(factor=2.0),
    "a namespace": lambda block: vars(block.helper).update(count=2),
    "an object": lambda block: setattr(block.own, "count", 2),
    "evaluation": lambda block: block.eval(),
    "the rate of a dropout": lambda block: setattr(block.drop, "p", 0.9),
    "a module": lambda block: setattr(block, "act", nn.ReLU()),
    "a hook": lambda block: block.act.register_forward_hook(lambda module, args, y: 2 * y),
    "a forward": lambda block: setattr(block.act, "forward", torch.relu),
    "an attribute in place": lambda block: block.hidden.mul_(2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_forward_and_backward(change: str) -> None:
    def run(model: Model) -> tuple[torch.Tensor, Any]:
        each(model, lambda block: setattr(block.drop, "p", 0.5))
        each(model, lambda block: setattr(block, "hidden", torch.full((1,), 0.5)))
        if change == "an attribute in place":
            each(model, lambda block: setattr(block, "scale", block.hidden + 0))
        loss = model(batch())
        if change != "an attribute in place":
            each(model, CHANGES[change])
        return loss, None

    check(run)


def test_a_small_tensor_in_an_attribute_that_changes_in_place() -> None:
    """Plain PyTorch refuses it where autograd saved it; where it did not, gradients are right."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.shift = nn.Linear(WIDTH, WIDTH), torch.zeros(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + (self.linear(x) + self.shift).sin()

    def run(**config: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Shifted() for _ in range(3)))
        with wrapped(model, **config) as engine:
            found: list[torch.Tensor] = []
            for _ in range(2):
                loss = model(batch()).sum()
                for block in model:
                    block.shift.add_(1)
                loss.backward()
                found += [loss.detach(), *(engine.gradient(p).clone() for p in model.parameters())]  # type: ignore[union-attr]
            return found

    assert_same(run(recompute="all"), run())


def test_hooks_that_are_taken_off_before_the_backward() -> None:
    def run(model: Model) -> tuple[torch.Tensor, Any]:
        handles: list[Any] = []
        each(
            model,
            lambda block: handles.append(
                block.act.register_forward_hook(lambda module, args, y: 2 * y)
            ),
        )
        loss = model(batch())
        for handle in handles:
            handle.remove()
        return loss, None

    check(run)


def test_kernels_that_a_context_around_the_forward_chooses() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.linear(x).view(1, 1, 4, 3 * WIDTH).chunk(3, -1)
            return x + F.scaled_dot_product_attention(q, k, v).view(4, WIDTH)

    def run(**config: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Attention() for _ in range(3)))
        with wrapped(model, **config) as engine:
            with sdpa_kernel(SDPBackend.MATH):
                loss = model(batch()).square().sum()
            loss.backward()
            return [loss.detach(), *(engine.gradient(p).clone() for p in model.parameters())]  # type: ignore[union-attr]

    assert_same(run(recompute="all"), run())


# What the forward changes


def _count(block: Block, x: torch.Tensor) -> float:
    block.scale = block.scale + 1.0
    return 1.0


def _append(block: Block, x: torch.Tensor) -> float:
    block.log.append(x.detach())
    return 1.0


def _leave(block: Block, x: torch.Tensor) -> Any:
    last, block.hidden = block.hidden, None
    block.table["factor"] = x.mean().sin()
    return 1.0 if last is None else last


def _count_in_objects(block: Block, x: torch.Tensor) -> Any:
    block.helper.count += 1
    block.own.count += 1
    block.own.seen.add_(1)
    return block.own.seen.item()


calls = 0
"""Counted by a forward that names it."""


class Counted(Block):
    """Counts its calls in its class, in a global and in a closure."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global calls
        calls += 1
        type(self).calls += 1
        result: torch.Tensor = super().forward(x) * (1 + calls) * (1 + Counted.calls)
        return result


FORWARDS: dict[str, Callable[[Block, torch.Tensor], Any]] = {
    "a counter": _count,
    "a list": _append,
    "its last output": _leave,
    "objects": _count_in_objects,
    "a buffer by its data": lambda block, x: block.shift.data.add_(1).mean(),
    "a large buffer by its data": lambda block, x: block.large.data.mul_(1.1).mean(),
    "python's random": lambda block, x: random.random(),
    "numpy's random": lambda block, x: numpy.random.random(),
    "a generator of torch": lambda block, x: torch.rand(1, generator=block.generator),
    "a generator of numpy": lambda block, x: block.numbers.random(),
}


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("forward", FORWARDS)
def test_a_forward_that_changes_what_it_has(forward: str, calls: int) -> None:
    """With a second forward before the backward, too."""

    def run(model: Model) -> tuple[torch.Tensor, Any]:
        each(model, lambda block: setattr(block, "before", FORWARDS[forward]))
        losses = [model(batch(seed)) for seed in range(calls)]
        return torch.stack(losses).sum(), None

    check(run)


def test_a_backward_that_comes_twice_repeats_the_same_forward() -> None:
    def run(model: Model) -> tuple[torch.Tensor, Any]:
        each(model, lambda block: setattr(block, "before", _count))
        loss = model(batch())
        loss.backward(retain_graph=True)
        return loss, None

    check(run)


@pytest.mark.parametrize("forward", ["a counter", "a list", "objects", "a buffer by its data"])
def test_micro_batches_that_pass_units_together(forward: str) -> None:
    def run(order: str, **config: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        random.seed(1)
        numpy.random.seed(1)
        model = Model()
        each(model, lambda block: setattr(block, "before", FORWARDS[forward]))
        with wrapped(model, gpu_cache=0, **config) as engine:
            batches = [{"x": batch(seed)} for seed in range(3)]
            loss = lambda outputs, batch: outputs  # noqa: E731
            losses = infinity.accumulate(model, batches, order=order, loss=loss)  # type: ignore[arg-type]
            gradients = [engine.gradient(p) for p in model.parameters()]
            return [*losses, *(each for each in gradients if each is not None), *state_of(model)]

    assert_same(run("vertical", recompute="all"), run("horizontal"))


def test_counters_of_a_class_of_a_module_and_of_closures() -> None:
    def run(**config: Any) -> list[torch.Tensor]:
        global calls
        calls, Counted.calls, count = 0, 0, 0

        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            return output * count

        torch.manual_seed(0)
        model = Model()
        for block in model.blocks:
            block.__class__ = Counted
            block.act.register_forward_hook(hook)  # type: ignore[union-attr]
        found: list[torch.Tensor] = []
        with wrapped(model, **config) as engine:
            for step in range(2):
                loss = model(batch(step)).sin()
                loss.backward()
                gradients = [engine.gradient(parameter) for parameter in model.parameters()]
                found += [loss.detach(), *(each.clone() for each in gradients if each is not None)]
                model.zero_grad()
        assert (calls, Counted.calls, count) == (6, 6, 6)
        return found

    assert_same(run(recompute="all"), run())


# What cannot be the same is refused


def test_a_large_tensor_that_changes_late_is_refused_once() -> None:
    def run(model: Model) -> torch.Tensor:
        loss = model(batch())
        each(model, lambda block: block.large.add_(1))
        return loss

    with wrapped(Model(), recompute="all") as engine:
        model: Any = engine.model
        with pytest.raises(infinity.ShardedParameterError, match=r"'large' in place, .* wrapped"):
            run(model).backward()
        run(model).backward()


def test_another_parameter_in_the_place_of_one_of_the_model_is_refused() -> None:
    with wrapped(Model(), recompute="all") as engine:
        model: Any = engine.model
        loss = model(batch())
        for block in model.blocks:
            block.up._parameters["bias"] = nn.Parameter(torch.zeros(2 * WIDTH))
        with pytest.raises(infinity.ShardedParameterError, match=r"'bias' of blocks\.2 is another"):
            loss.backward()


# Nothing is kept for long


def test_outputs_in_attributes_do_not_keep_the_graphs_of_earlier_steps() -> None:
    gone: list[weakref.ref[torch.Tensor]] = []

    def leave(block: Block, x: torch.Tensor) -> float:
        block.hidden = (x * 2).mean().sigmoid()
        return 1.0

    with wrapped(Model(), recompute="all") as engine:
        model: Any = engine.model
        each(model, lambda block: setattr(block, "before", leave))
        for step in range(4):
            x = batch(step).requires_grad_() * 1
            gone.append(weakref.ref(x))
            model(x)  # without a backward
            del x
        gc.collect()
        assert [each() is None for each in gone[:2]] == [True, True]


class Clones(TorchDispatchMode):
    """Notes the bytes of what is cloned."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            self.seen.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def test_small_tensors_are_copied_and_large_ones_are_not() -> None:
    with wrapped(Model(), recompute="all") as engine:
        engine.model(batch()).backward()
        with Clones() as clones:
            engine.model(batch())
        assert clones.seen and max(clones.seen) <= SMALL_BYTES < 2048 * 4
