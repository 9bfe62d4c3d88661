"""Builds the model of a recipe: the same weights each time."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import infinity
from random_programs.recipes import Model
from random_programs.uses import Uses

VOCABULARY = 32
ROWS, LENGTH = 2, 3


class Fault(Exception):
    """An exception that a program asked for."""


class Interrupt(BaseException):
    """One that no `except Exception` sees, as Ctrl-C."""


@dataclasses.dataclass
class Pass:
    """One forward and its recomputations: which batch it is of, and where it is to fail."""

    batch: int
    where: str = ""
    at: int = -1
    fault: type[BaseException] = Fault
    calls: int = 0
    use: Callable[[Any], None] | None = None
    """What the model does at the end of its forward."""


class _Batch(threading.local):
    """The batch that this thread computes with."""

    number = 0


BATCH = _Batch()


class Trip(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fault: type[BaseException]) -> torch.Tensor:
        ctx.fault = fault
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise ctx.fault


class Residual(nn.Module):
    """x + tanh(linear(x))"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        return x + torch.tanh(self.inner(x))


class Mlp(nn.Module):
    """A norm and two linear layers, nested."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width, bias=False)
        )

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.layers(self.norm(x))


class Bias(nn.Module):
    """Saves no parameter for the backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(width) * 0.1)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.bias


class Gate(nn.Module):
    """A parameter of its own beside a module with parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(width))
        self.inner = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.gate * self.inner(x) * self.gate


class Dropout(Residual):
    """Random numbers, also when it is computed again."""

    def forward(self, x: torch.Tensor) -> Any:
        return x + functional.dropout(self.inner(x), 0.3, self.training)


class WeightNorm(nn.Module):
    """A parametrized weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = parametrizations.weight_norm(nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> Any:
        return x + torch.tanh(self.inner(x))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight.t())
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, transposed = ctx.saved_tensors
        return gradient @ transposed.t(), gradient.flatten(0, 1).t() @ x.flatten(0, 1)


class Function(nn.Module):
    """A custom autograd function that saves a view of its weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) * 0.1)

    def forward(self, x: torch.Tensor) -> Any:
        return x + _Product.apply(x, self.weight)


class Dict(Residual):
    """Returns a dict."""

    def forward(self, x: torch.Tensor) -> Any:
        return {"extra": x, "hidden": super().forward(x)}


@dataclasses.dataclass
class Output:
    """What a module may return."""

    hidden: torch.Tensor
    extra: Any = None


class Dataclass(Residual):
    """Returns a dataclass."""

    def forward(self, x: torch.Tensor) -> Any:
        return Output(super().forward(x), [x])


class Tuple(Residual):
    """Returns a tuple."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


class Table(nn.Module):
    """Returns a view of its parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(width + 3, width) * 0.1)

    def forward(self) -> torch.Tensor:
        return self.table[3:]


class View(nn.Module):
    """Uses what a module inside returned a view of."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = Table(width)

    def forward(self, x: torch.Tensor) -> Any:
        return x + x @ self.inner()


class Borrow(Residual):
    """Uses a module's parameters without calling it."""

    def forward(self, x: torch.Tensor) -> Any:
        return x + torch.sigmoid(functional.linear(x, self.inner.weight, self.inner.bias))


class Buffer(Residual):
    """A buffer that counts its training forwards."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            self.count.add_(1)
        return super().forward(x)


class Scalar(nn.Module):
    """Parameters of odd sizes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.three = nn.Parameter(torch.randn(3) * 0.1)
        self.unused = nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> Any:
        return x * self.scale + self.three.sum()


class Int8(nn.Module):
    """A frozen weight of one byte per element."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) * 0.01)
        self.weight = nn.Parameter(
            torch.randint(-99, 99, (width, width), dtype=torch.int8), requires_grad=False
        )

    def forward(self, x: torch.Tensor) -> Any:
        return x + (x @ self.weight.to(x.dtype)) * self.scale


class SometimesGate(Residual):
    """A parameter of its own that odd batches leave out, beside a module with parameters."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.gate = nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.tanh(self.inner(x))
        return x + (y if BATCH.number % 2 else y * self.gate)


class Expert(nn.Module):
    """Three modules, of which a batch uses the weight of one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.router = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        return x + torch.tanh(self.router(x)) @ self.experts[BATCH.number % 3].weight


class Dropped(Residual):
    """A module whose output odd batches do not use."""

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return x if BATCH.number % 2 else y


class Odd(nn.Module):
    """A parameter of an odd shape or layout, which its backward does not save."""

    def __init__(self, parameter: torch.Tensor) -> None:
        super().__init__()
        self.odd = nn.Parameter(parameter)

    def forward(self, x: torch.Tensor) -> Any:
        # Sums go through the memory, which is contiguous in the engine.
        return x + torch.tanh(self.odd.contiguous()).sum() * 0.1


ODD: dict[str, Callable[[int], torch.Tensor]] = {
    "empty": lambda width: torch.zeros(0, width),
    "empty, wide": lambda width: torch.zeros(width, 0, 2),
    "number": lambda width: torch.randn(()),
    "one": lambda width: torch.randn(1, 1, 1),
    "transposed": lambda width: torch.randn(width, 5).t(),
    "strided": lambda width: torch.randn(5, 2 * width)[:, ::2],
    "channels last": lambda width: torch.randn(2, 3, width, 2).to(
        memory_format=torch.channels_last
    ),
}
KINDS: dict[str, Callable[[int], nn.Module]] = {
    "linear": Residual,
    "norm": nn.LayerNorm,
    "mlp": Mlp,
    "bias": Bias,
    "gate": Gate,
    "dropout": Dropout,
    "view": View,
    "weight_norm": WeightNorm,
    "function": Function,
    "dict": Dict,
    "dataclass": Dataclass,
    "tuple": Tuple,
    "borrow": Borrow,
    "buffer": Buffer,
    "scalar": Scalar,
    "int8": Int8,
    "sometimes gate": SometimesGate,
    "expert": Expert,
    "dropped": Dropped,
}


def _block(kind: str, width: int) -> nn.Module:
    """A block of one of `KINDS`, of `ODD`, or of `uses.EXPRESSIONS`."""
    if kind in KINDS:
        return KINDS[kind](width)
    if kind in ODD:
        return Odd(ODD[kind](width))
    how, _, name = kind.partition(" ")
    return Uses(width, name, borrows=how == "borrows")


def _scale(recipe: Model) -> nn.Parameter | None:
    """A parameter of the model itself, or of a group."""
    return nn.Parameter(torch.ones(recipe.width)) if recipe.scales else None


def hidden(output: Any) -> torch.Tensor:
    """What goes on to the next block, of whatever a block returned."""
    if isinstance(output, dict):
        return output["hidden"]
    if isinstance(output, Output):
        return output.hidden
    return output[0] if isinstance(output, tuple) else output


class Group(nn.Module):
    """Several blocks in one module, with a scale after each for the batches that have one."""

    def __init__(self, blocks: list[nn.Module], scale: nn.Parameter | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = hidden(block(x))
            if self.scale is not None and (BATCH.number + number) % 3 == 0:
                x = x * self.scale
        return x


class Net(nn.Module):
    """The model of a recipe; takes a batch, and the pass that this forward is."""

    def __init__(self, recipe: Model) -> None:
        super().__init__()
        self.recipe = recipe
        width = recipe.width
        blocks = [_block(block.kind, width) for block in recipe.blocks]
        for first, second in recipe.tied:
            blocks[second].inner.weight = blocks[first].inner.weight
        for block, module in zip(recipe.blocks, blocks, strict=True):
            if block.frozen:
                module.requires_grad_(False)
        inside = {number for group in recipe.groups for number in group}
        self.embedding = nn.Embedding(VOCABULARY, width) if recipe.tokens else None
        self.groups = nn.ModuleList(
            Group([blocks[number] for number in group], _scale(recipe)) for group in recipe.groups
        )
        self.scale = _scale(recipe)
        self.blocks = nn.ModuleDict(
            {f"block{n}": block for n, block in enumerate(blocks) if n not in inside}
        )
        self.head = nn.Linear(width, VOCABULARY if recipe.tokens else width, bias=False)
        if self.embedding is not None:
            self.head.weight = self.embedding.weight
        places = {
            number: (g, at)
            for g, group in enumerate(recipe.groups)
            for at, number in enumerate(group)
        }
        self._places = [places.get(number) for number in range(len(blocks))]

    def block(self, number: int) -> nn.Module:
        """Block `number`, wherever it is, or group -1 - `number`."""
        if number < 0:
            return self.groups[-1 - number]
        place = self._places[number]
        return (
            self.blocks[f"block{number}"]
            if place is None
            else self.groups[place[0]].blocks[place[1]]
        )

    def forward(self, batch: torch.Tensor, run: Pass) -> torch.Tensor:
        x = batch if self.embedding is None else self.embedding(batch)
        x = self._walk(self.recipe.path, run, x)
        if self.scale is not None and run.batch % 2:
            x = x * self.scale
        outputs = self.head(x)
        if run.use is not None:
            run.use(self)
        return outputs

    def _walk(self, steps: Any, run: Pass, x: torch.Tensor) -> torch.Tensor:
        for step in steps:
            BATCH.number = run.batch
            if isinstance(step, int):
                x = hidden(self.block(step)(x))
                if self.scale is not None and (run.batch + step) % 3 == 0:
                    x = x * self.scale
                run.calls += 1
                if run.calls == run.at and run.where == "forward":
                    raise run.fault
                if run.calls == run.at and run.where == "backward" and x.requires_grad:
                    x = Trip.apply(x, run.fault)
            elif step[0] == "checkpoint":
                x = checkpoint(
                    functools.partial(self._walk, step[2], run), x, use_reentrant=step[1]
                )
            elif (run.batch + step[1]) % 2:
                x = self._walk(step[2], run, x)
        return x


def build(recipe: Model, whole: bool = False) -> Net:
    """The model, in training mode; with `whole` without tiles."""
    torch.manual_seed(0)
    model = Net(recipe).to(getattr(torch, recipe.dtype)).train()
    return infinity.tile(model, recipe.tiles) if recipe.tiles and not whole else model


def units_of(model: Net) -> list[Any] | None:
    """What `wrap` is given as `units`."""
    return {
        "auto": None,
        "blocks": [model.block(number) for number in range(len(model.recipe.blocks))],
        "leaves": [nn.Linear, nn.LayerNorm, nn.Embedding],
        "groups": [*model.groups, model.head],
    }[model.recipe.units]


def batch_of(recipe: Model, number: int) -> torch.Tensor:
    """The input of batch `number`."""
    generator = torch.Generator().manual_seed(100 + number)
    if recipe.tokens:
        return torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    return torch.randn(ROWS, LENGTH, recipe.width, generator=generator).to(
        getattr(torch, recipe.dtype)
    )


def loss_of(recipe: Model, outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """The loss in fp32."""
    outputs = outputs.float()
    if recipe.tokens:
        return functional.cross_entropy(
            outputs.flatten(0, 1), (batch.flatten() * 3 + 1) % VOCABULARY
        )
    return (outputs - 0.5).square().mean()
