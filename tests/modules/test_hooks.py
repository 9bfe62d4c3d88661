"""Models that use their parameters in unusual ways train as they do when they are not wrapped, or
are refused in clear words.

Everything lives on NVMe with the smallest budgets, and freed slots are poisoned, so a stale view
shows.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from support.configs import config_of
from support.models import text_batch, transformer
from support.probe import Probe, assert_unused
from support.smallest import WIDTH, Block

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(60)]

Wrap = Callable[..., nn.Module]


@pytest.fixture
def wrap(tmp_path: Path) -> Iterator[Wrap]:
    """Wraps with the smallest budgets, the compute device's times `room`; at the end nothing may be
    in use any more."""
    made: list[nn.Module] = []

    def make(model: nn.Module, room: int = 1, **config: Any) -> nn.Module:
        directory = tmp_path / str(len(made))
        directory.mkdir()
        budgets = {"gpu_memory": 1, "cpu_memory": 1}
        while True:
            try:
                infinity.wrap(
                    model, config_of(**{"nvme": [directory], "poison": True} | budgets | config)
                )
                break
            except infinity.BudgetError as error:
                name, smallest = re.search(
                    r"smallest (\w+) that works is (\d+)", str(error)
                ).groups()  # type: ignore[union-attr]
                budgets[name] = int(smallest) * (room if name == "gpu_memory" else 1)
        made.append(model)
        return model

    yield make
    for model in made:
        engine = infinity.engine(model)
        engine.drain()
        assert_unused(model)
        engine.close()


class Model(nn.Module):
    """A linear layer, something special, eight blocks and a linear layer."""

    def __init__(self, special: nn.Module) -> None:
        super().__init__()
        self.first, self.special = nn.Linear(WIDTH, WIDTH), special
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.last = nn.Linear(WIDTH, WIDTH)

    def use(self, x: torch.Tensor) -> torch.Tensor:
        return self.special(x)

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run_blocks(self.use(self.first(x)))


class Weighted(nn.Module):
    """Multiplies by what `use` makes of a weight."""

    def __init__(
        self, weight: nn.Parameter, use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.weight, self.use = weight, use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(x, self.weight)


class OwnParameter(nn.Parameter):
    """A parameter of another class."""


def random(*shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(*shape, **options) * 0.1


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(torch.view_as_complex(x.view(3, WIDTH // 2, 2)) * weight).reshape(
        3, WIDTH
    )


class Places(nn.Module):
    """Returns a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(random(WIDTH, WIDTH))

    def forward(self, count: int) -> dict[str, torch.Tensor]:
        return {"places": self.places[:count]}


class PlacesOfPlaces(nn.Module):
    """Returns the view that a part of it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Places()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, count: int) -> dict[str, torch.Tensor]:
        return self.inner(count)


class LatePlaces(Model):
    """Uses a view that a module returned after other modules have run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.special(3)["places"]
        return self.run_blocks(self.first(x)) * places


class Attending(Model):
    """Attention outside of a repeated block: torch uses the parameters of `out_proj` and never
    calls it."""

    def use(self, x: torch.Tensor) -> torch.Tensor:
        return self.special(x[None], x[None], x[None])[0][0]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: Model(
            Weighted(
                nn.Parameter(random(WIDTH // 2, 2)),
                lambda x, w: product(x, torch.view_as_complex(w)),
            )
        ),
        lambda: Model(
            Weighted(
                nn.Parameter(random(WIDTH // 2, dtype=torch.cfloat), False),
                lambda x, w: product(x, w.conj()),
            )
        ),
        lambda: Model(
            Weighted(nn.Parameter(random(WIDTH, WIDTH)), lambda x, w: x @ torch._neg_view(w))
        ),
        lambda: Model(Weighted(OwnParameter(random(WIDTH, WIDTH)), lambda x, w: x @ w)),
        lambda: LatePlaces(Places()),
        lambda: LatePlaces(PlacesOfPlaces()),
        lambda: Model(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))),
        lambda: Attending(nn.MultiheadAttention(WIDTH, 2, batch_first=True)),
    ],
    ids=[
        "complex view",
        "conjugate",
        "negative",
        "subclass",
        "view",
        "view of a view",
        "weight_norm",
        "attention",
    ],
)
def test_gradients_are_those_of_the_plain_model(make: Callable[[], nn.Module], wrap: Wrap) -> None:
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    model = wrap(make())
    for number in range(3):
        losses = []
        for each in (plain, model):
            each.zero_grad()
            torch.manual_seed(number)
            loss = each(torch.randn(3, WIDTH)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        assert torch.equal(*losses)
        for (name, expected), parameter in zip(
            plain.named_parameters(), model.parameters(), strict=True
        ):
            actual = infinity.engine(model).gradient(parameter)
            assert (actual is None) == (expected.grad is None), name
            if expected.grad is not None:
                torch.testing.assert_close(actual, expected.grad, msg=name)
        assert_unused(model)


def test_a_view_that_leaves_the_forward_is_refused(wrap: Wrap) -> None:
    model = wrap(LatePlaces(Places()))
    with pytest.raises(
        infinity.ShardedParameterError,
        match=r"^Places leaves a view of special\.places behind.*clone",
    ):
        model.special(3)
    with infinity.gathered(model.special):
        assert model.special(3)["places"].shape == (3, WIDTH)


class Interrupted(BaseException):
    """What is no Exception, as KeyboardInterrupt is none."""


@pytest.mark.parametrize("ended", [False, True])
def test_a_forward_that_was_interrupted(ended: bool, wrap: Wrap) -> None:
    model = wrap(transformer())
    optimizer = infinity.AdamW(model.parameters())

    def interrupt(number: int, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if number == 2:
            block.register_forward_pre_hook(lambda *_: handle.remove() or stop())  # type: ignore[func-returns-value]
        return block(x)

    def stop() -> None:
        raise Interrupted

    executions = Probe(infinity.engine(model)).executions
    vars(model)["run_block"] = interrupt
    handle = model.norm.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(Interrupted):
        model(**text_batch(0))
    del vars(model)["run_block"]
    model.blocks[2]._forward_pre_hooks.popitem()
    with pytest.raises(infinity.ShardedParameterError, match="outside of its module's forward"):
        model.norm.weight.add_(1)
    if ended:
        executions.end_interrupted()
        assert_unused(model)
    torch.ones(1, requires_grad=True).exp().sum().backward()
    model(**text_batch(0)).loss.backward()
    assert_unused(model)
    optimizer.step()


class Recursive(Model):
    """A model that calls itself."""

    def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
        x = self.first(x)
        inner = self(x, depth - 1) if depth else x
        return self.run_blocks(self.use(inner))


def test_a_model_that_calls_itself(wrap: Wrap) -> None:
    model = wrap(Recursive(nn.Linear(WIDTH, WIDTH)), room=2)
    for _ in range(2):
        loss = model(torch.ones(3, WIDTH)).sum()
        Probe(infinity.engine(model)).end_interrupted()
        loss.backward()
        assert_unused(model)


def test_settle_inside_of_a_forward_does_nothing(wrap: Wrap) -> None:
    model = wrap(Model(nn.Linear(WIDTH, WIDTH)))
    model.blocks[1].register_forward_hook(
        lambda *_: Probe(infinity.engine(model)).end_interrupted()
    )
    model(torch.ones(3, WIDTH)).sum().backward()
    assert all(infinity.engine(model).gradient(p) is not None for p in model.parameters())


def clamped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        weight.clamp_(-0.1, 0.1)
    return x @ weight


def test_a_change_in_place_is_refused_until_it_is_made(wrap: Wrap) -> None:
    """A module that rescales its weight once, as RWKV does, computes with the weight rescaled."""

    class Rescaled(nn.Linear):
        is_rescaled = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.is_rescaled:
                with torch.no_grad():
                    self.weight.div_(2)
                self.is_rescaled = True
            return super().forward(x)

    torch.manual_seed(0)
    plain = Model(Rescaled(WIDTH, WIDTH))
    model: Any = wrap(copy.deepcopy(plain))
    x = torch.ones(3, WIDTH)
    with pytest.raises(infinity.ShardedParameterError, match="inside of a forward"):
        model(x)
    for _ in range(2):
        with pytest.raises(
            infinity.ShardedParameterError,
            match=r"^special\.weight was changed in place inside of an earlier forward, which was "
            r"refused.*gathered\(model, write=True\)",
        ):
            model(x)
    with infinity.gathered(model.special, write=True):
        model.special.weight.data.div_(2)
    assert torch.equal(model(x), plain(x))


def test_a_change_in_place_inside_of_a_forward(wrap: Wrap) -> None:
    changed = (
        r"^special\.weight was changed in place inside of a forward.*gathered\(model, write=True\)"
    )
    model = wrap(Model(Weighted(nn.Parameter(random(WIDTH, WIDTH)), clamped)))
    with pytest.raises(infinity.ShardedParameterError, match=changed):
        model(torch.ones(3, WIDTH))
    assert_unused(model)
    with infinity.gathered(model.special, write=True):
        model.special(torch.ones(3, WIDTH))
    assert infinity.engine(model).state_dict()["special.weight"].abs().max() <= 0.1

    embedding = wrap(nn.Sequential(nn.Embedding(8, WIDTH, max_norm=1.0), nn.Linear(WIDTH, WIDTH)))
    with pytest.raises(infinity.ShardedParameterError, match=r"^0\.weight was changed in place"):
        embedding(torch.tensor([1, 2]))


@pytest.mark.parametrize("gradients", ["cpu", "nvme"])
def test_grad_in_gathered_is_as_outside(gradients: str, wrap: Wrap) -> None:
    """None forgets the gradient of that parameter alone, a tensor replaces it, and a read finds
    it."""
    model = wrap(transformer(), gradients=gradients)
    engine, block = infinity.engine(model), model.blocks[0]
    weight = block.up.weight
    for zero in (
        lambda: setattr(weight, "grad", None),
        block.up.zero_grad,
    ):
        model(**text_batch(0)).loss.backward()
        before = {name: engine.gradient(p) for name, p in model.named_parameters()}
        with infinity.gathered(block):
            assert torch.equal(weight.grad.clone(), before["blocks.0.up.weight"])
            weight.grad = torch.zeros_like(weight)
            assert not engine.gradient(weight).any()
            weight.grad = before["blocks.0.up.weight"]
            weight.grad.zero_()
            assert not engine.gradient(weight).any()
            zero()
            assert engine.gradient(weight) is None
        assert engine.gradient(weight) is None
        forgotten = [name for name, p in model.named_parameters() if engine.gradient(p) is None]
        assert set(forgotten) <= {"blocks.0.up.weight", "blocks.0.up.bias"}
        for name, parameter in model.named_parameters():
            assert name in forgotten or torch.equal(engine.gradient(parameter), before[name])
        engine.zero_grad()


@pytest.mark.parametrize("gradients", ["cpu", "nvme"])
def test_grad_is_none_forgets_the_gradient(gradients: str, wrap: Wrap) -> None:
    model = wrap(transformer(), gradients=gradients)
    optimizer, engine = infinity.AdamW(model.parameters()), infinity.engine(model)

    def backward() -> list[torch.Tensor | None]:
        model(**text_batch(0)).loss.backward()
        return [engine.gradient(p) for p in model.parameters()]

    first = backward()
    for parameter in model.parameters():
        parameter.grad = None
    assert all(engine.gradient(p) is None and p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(first, backward(), strict=True))
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad = None  # what zero_grad() does
    backward()
