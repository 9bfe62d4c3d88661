"""Custom autograd functions that keep views of parameters as attributes of their nodes train as in
plain PyTorch, in the smallest budgets: the views go with the block and come back for the
backward."""

from __future__ import annotations

import functools
import gc
import types
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import ShardedParameterError
from infinity.modules.node_attributes import replaced
from support.smallest import PLACEMENTS, Wrap, wrapping

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 16
Pair = namedtuple("Pair", ["first", "second"])


class Slots:
    __slots__ = ("__weakref__", "missing", "view")

    def __init__(self, view: torch.Tensor) -> None:
        self.view = view

    def product(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient @ self.view


def closure(view: torch.Tensor) -> Callable[..., torch.Tensor]:
    def product(gradient: torch.Tensor, *, more: float = 1.0) -> torch.Tensor:
        return gradient @ view * more

    return product


def product(view: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return gradient @ view


Ways = tuple[Callable[[torch.Tensor], Any], Callable[[Any, torch.Tensor], torch.Tensor]]
WAYS: dict[str, Ways] = {
    "alone": (lambda view: view, lambda kept, g: g @ kept),
    "data": (lambda view: view.data, lambda kept, g: g @ kept),
    "turned": (lambda view: view.t(), lambda kept, g: g @ kept.t()),
    "tuple": (lambda view: (None, view, ("text", view[2:4])), lambda kept, g: g @ kept[1]),
    "named tuple": (lambda view: Pair(1, view), lambda kept, g: g @ kept.second),
    "list": (lambda view: [1, [view]], lambda kept, g: g @ kept[1][0]),
    "deque": (lambda view: deque([view], 3), lambda kept, g: g @ kept[0]),
    "dict": (lambda view: {"more": {1: view}}, lambda kept, g: g @ kept["more"][1]),
    "ordered dict": (lambda view: OrderedDict(view=view), lambda kept, g: g @ kept["view"]),
    "object": (lambda view: types.SimpleNamespace(view=view), lambda kept, g: g @ kept.view),
    "slots": (Slots, lambda kept, g: g @ kept.view),
    "function": (closure, lambda kept, g: kept(g)),
    "method": (lambda view: Slots(view).product, lambda kept, g: kept(g)),
    "partial": (lambda view: functools.partial(product, view), lambda kept, g: kept(g)),
}


class Keeps(torch.autograd.Function):
    """x @ weight.T. What the backward needs of the weight is an attribute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, way: str) -> torch.Tensor:
        ctx.kept, ctx.way, ctx.given = WAYS[way][0](weight.view(weight.shape)), way, x.detach()
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        trains = ctx.needs_input_grad[1]
        own = gradient.t() @ ctx.given if trains else None
        return WAYS[ctx.way][1](ctx.kept, gradient), own, None


class Layer(nn.Module):
    """The node is far from the output."""

    def __init__(self, way: str, trains: bool) -> None:
        super().__init__()
        self.way = way
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4, requires_grad=trains)
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.after(Keeps.apply(x, self.weight, self.way)))
        for _ in range(20):
            y = y * 1.01
        return y


def stack(way: str = "tuple", trains: bool = False) -> Any:
    torch.manual_seed(3)
    layers = [Layer(way, trains) for _ in range(3)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers)


def given() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(4, WIDTH, generator=generator).requires_grad_()


def found_by(model: Any, x: torch.Tensor) -> list[torch.Tensor | None]:
    gradients = [p.grad for p in model.parameters()]
    return [x.grad, *(None if each is None else each + 0 for each in gradients)]


def once(model: Any) -> list[torch.Tensor | None]:
    x = given()
    model(x).square().mean().backward()
    return found_by(model, x)


def twice(model: Any) -> list[torch.Tensor | None]:
    x = given()
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return found_by(model, x)


def double(model: Any) -> list[torch.Tensor | None]:
    x = given()
    (first,) = torch.autograd.grad(model(x).square().mean(), [x], create_graph=True)
    first.square().sum().backward()
    return found_by(model, x)


def same(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.fixture
def wrap(tmp_path: Path) -> Iterator[Wrap]:
    with wrapping(tmp_path) as made:
        yield made


@pytest.mark.parametrize("way", WAYS)
def test_views_in_attributes(wrap: Wrap, way: str) -> None:
    """In every container, of frozen and of trained weights."""
    for trains in (False, True):
        expected = once(stack(way, trains))
        model = wrap(stack(way, trains), {"poison": True})
        same(once(model), expected)
        assert not infinity.engine(model).units[1].data.views.referenced()


@pytest.mark.parametrize("placement", ["nvme, room for all", "host", "device"])
@pytest.mark.parametrize("run", [once, twice, double])
def test_placements_and_backwards(wrap: Wrap, placement: str, run: Any) -> None:
    same(run(wrap(stack(), PLACEMENTS[placement])), run(stack()))


@pytest.mark.parametrize("run", [once, twice])
def test_recomputed_blocks(wrap: Wrap, run: Any) -> None:
    same(run(wrap(stack(), {"poison": True}, recompute="all")), run(stack()))


@pytest.mark.parametrize("order", ["vertical", "horizontal"])
def test_interleaved_micro_batches(wrap: Wrap, order: Any) -> None:
    def loss(found: torch.Tensor, batch: Any) -> torch.Tensor:
        return found.square().mean()

    batches = [given().detach() * number for number in (1, 2, 3)]
    plain, model = stack(), wrap(stack(), {"poison": True})
    for x in batches:
        (loss(plain(x), x) / 3).backward()
    infinity.accumulate(model, batches, loss=loss, order=order)
    same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_what_leads_to_no_output(wrap: Wrap) -> None:
    """A module keeps a loss of its own, which the script adds."""

    class Beside(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.loss = Keeps.apply(x, self.weight, "dict").square().mean()
            return self.after(x)

    def run(model: Any) -> Any:
        x = given()
        (model(x).mean() + model[0].loss + model[1].loss).backward()
        return found_by(model, x)

    def build() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(Beside("dict", True), Beside("dict", True))

    same(run(wrap(build(), {"poison": True})), run(build()))


def test_a_backward_that_failed_runs_again(wrap: Wrap) -> None:
    """The graph still has what it had."""
    model, x = wrap(stack(), {"poison": True}), given()
    loss = model(x).square().mean()

    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError

    handle = x.register_hook(fail)
    with pytest.raises(ArithmeticError):
        loss.backward(retain_graph=True)
    handle.remove()
    for each in (x, *model.parameters()):
        each.grad = None
    loss.backward()
    same(found_by(model, x), once(stack()))


def test_a_stale_graph_is_refused(wrap: Wrap) -> None:
    model = wrap(stack(trains=True), {"poison": True})
    stale = model(given()).square().mean()
    once(model)
    optimizer = infinity.AdamW(model.parameters(), lr=0.1)
    optimizer.step()
    with pytest.raises(RuntimeError, match="were updated after the forward"):
        stale.backward()


def test_gradients_of_gradients_through_a_kept_input_are_refused(wrap: Wrap) -> None:
    class Sloppy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, turned: torch.Tensor) -> torch.Tensor:
            ctx.turned, ctx.x = turned, x
            return x @ turned

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            assert ctx.turned.requires_grad
            return gradient @ ctx.turned.t(), ctx.x.t() @ gradient

    class Turns(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.after(Sloppy.apply(x, self.weight.t()))

    def build() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(Turns("", True), Turns("", True))

    model = wrap(build(), {"poison": True})
    same(once(model), once(build()))
    text = (
        r"keeps a view of 1\.weight as an attribute, through which gradients of gradients do not "
        r"go; keep it by ctx\.save_for_backward"
    )
    with pytest.raises(ShardedParameterError, match=text):
        double(model)


def test_nothing_is_left_of_graphs(wrap: Wrap) -> None:
    """Without the garbage collector, also of a graph whose backward never ran."""
    model = wrap(stack("function"), {})

    def count() -> int:
        names = ("_NodeViews", "PackedView", "KeepsBackward")
        return sum(type(each).__name__ in names for each in gc.get_objects())

    once(model)
    gc.collect()
    before = count()
    gc.disable()
    try:
        once(model)
        model(given())
        assert count() == before
    finally:
        gc.enable()


def test_views_that_outlive_their_node_are_refused(wrap: Wrap) -> None:
    kept: list[torch.Tensor] = []

    class Leaks(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(self.weight.detach())
            return super().forward(x)

    with pytest.raises(ShardedParameterError, match=r"leaves a view of 0\.weight behind"):
        wrap(nn.Sequential(Leaks("tuple", True), nn.Linear(WIDTH, WIDTH)), {})(given())
    kept.clear()


def test_containers_without_views_stay_the_same_objects() -> None:
    cycle: list[Any] = [1, {"a": Slots(torch.ones(1))}, functools.partial(product, 1), closure]
    cycle.append(cycle)
    assert replaced(cycle, str, str.upper) is cycle
    shared = ["text"]
    first, second = replaced((shared, shared), str, str.upper)
    assert first is second and first == ["TEXT"] and shared == ["text"]
