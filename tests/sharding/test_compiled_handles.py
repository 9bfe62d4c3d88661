"""Compiled functions that are handed lazy tensors: one graph has the values, and gives the bits of
plain PyTorch; what would be lost is refused."""

from __future__ import annotations

import random
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import infinity
from support.handles import FixedHandle, Handle
from support.smallest import WIDTH, Wrap, wrapping

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        torch.__version__ < "2.13", reason="this torch asks what it compiles for its storage"
    ),
]

ROWS = 128
INPUTS = torch.linspace(-1, 1, 5 * WIDTH).view(5, WIDTH)
TARGETS = torch.arange(5)
AOT: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True}


@pytest.fixture
def wrap(tmp_path: Path) -> Iterator[Wrap]:
    torch._dynamo.reset()
    with wrapping(tmp_path) as make:
        yield make


def built(tiled: bool = False) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, ROWS, bias=False))
    return infinity.tile(model, 64 * WIDTH * 4) if tiled else model


def cross_entropy(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """As cut cross entropy computes it without kernels of its own."""
    return functional.cross_entropy((x @ w.T).float(), target)


def steps(model: Any, optimizer: torch.optim.Optimizer, loss: Any) -> list[torch.Tensor]:
    """Losses, gradients and weights; the gradient of the head stays for the second backward."""
    found = []
    for step in range(4):
        hidden = model[0](INPUTS * (step + 1))
        value = loss(hidden, model[1].weight, TARGETS)
        value.backward()
        found += [value.detach(), model[0].weight.grad.clone(), model[1].weight.grad.clone()]
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
            found.append(model[1].weight.detach().clone())
    return found


def trained(wrap: Wrap, tiled: bool, **options: Any) -> Iterator[tuple[Any, Any]]:
    """What a compiled loss gives with a plain head, and with one of a wrapped model."""
    plain, model = built(), wrap(built(tiled), {"poison": True})
    compiled = torch.compile(cross_entropy, **options)
    expected = steps(plain, torch.optim.RMSprop(plain.parameters(), lr=0.01), compiled)
    adapted = infinity.adapt(torch.optim.RMSprop, model.parameters(), lr=0.01)
    yield from zip(steps(model, adapted, compiled), expected, strict=True)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("tiled", [False, True], ids=["whole", "in tiles"])
def test_a_loss_in_one_graph_has_the_bits_of_plain_pytorch(
    wrap: Wrap, tiled: bool, dynamic: bool
) -> None:
    for ours, theirs in trained(wrap, tiled, **AOT, dynamic=dynamic):
        assert torch.equal(ours, theirs)


@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a compiler")
@pytest.mark.parametrize("tiled", [False, True], ids=["whole", "in tiles"])
def test_a_loss_of_inductor_is_that_of_plain_pytorch(wrap: Wrap, tiled: bool) -> None:
    for ours, theirs in trained(wrap, tiled, fullgraph=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


USES: dict[str, Callable[[Any], Any]] = {
    "detached": lambda weight: weight.detach(),
    "data": lambda weight: weight.data,
    "view": lambda weight: weight[3:9].t(),
    "gradient": lambda weight: weight.grad,
    "view of the gradient": lambda weight: weight.grad.view(-1)[7:],
}


@pytest.mark.parametrize("tiled", [False, True], ids=["whole", "in tiles"])
@pytest.mark.parametrize("use", USES)
def test_what_a_parameter_gives_is_handed_to_a_graph(wrap: Wrap, use: str, tiled: bool) -> None:
    plain, model = built(), wrap(built(tiled), {})
    norm = torch.compile(lambda tensor: (tensor * tensor).sum(), **AOT)
    found = []
    for each in (plain, model):
        each(INPUTS).square().sum().backward()
        value = norm(USES[use](each[1].weight))
        if value.requires_grad:
            value.backward()
        found.append((value.detach(), each[1].weight.grad.clone()))
    assert all(map(torch.equal, *found))


def gradients(loss: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda weight: torch.func.grad_and_value(loss)(weight)[0]


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": gradients(lambda weight: cross_entropy(INPUTS, weight, TARGETS)),
    "vmap": torch.vmap(lambda row: (row * row).sum()),
    "jvp": lambda weight: torch.func.jvp(torch.sin, (weight,), (torch.ones(ROWS, WIDTH),))[1],
}


@pytest.mark.parametrize("tiled", [False, True], ids=["whole", "in tiles"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_in_one_graph(wrap: Wrap, name: str, tiled: bool) -> None:
    plain, model = built(), wrap(built(tiled), {})
    compiled = torch.compile(TRANSFORMS[name], **AOT)
    found = [compiled(each[1].weight) for each in (plain, model)]
    assert torch.equal(*found)


WRITES: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda tensor: tensor.mul_(2),
    "an item": lambda tensor: tensor.__setitem__(0, 1.0),
    "out=": lambda tensor: torch.add(tensor, 1, out=tensor),
    "of a list": lambda tensor: torch._foreach_add_([tensor], 1),
}


def with_gradient(w: torch.Tensor) -> torch.Tensor:
    return (w * 2).sum() + (1000.0 if w.grad is None else w.grad.sum())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("where", ["whole", "in tiles", "gathered"])
def test_compiled_code_reads_a_gradient(
    wrap: Wrap, where: str, fullgraph: bool, backend: str
) -> None:
    fullgraph &= where != "gathered"  # where torch says that it cannot
    compiled: Any = torch.compile(with_gradient, backend=backend, fullgraph=fullgraph)
    found: list[list[torch.Tensor]] = []
    for model in (built(), wrap(built(where == "in tiles"), {})):
        gathers = where == "gathered" and bool(found)
        found.append([])
        for _ in range(3):
            with infinity.gathered(model) if gathers else nullcontext():
                value = compiled(model[1].weight)
                value.backward()
            found[-1] += [value.detach(), model[1].weight.grad + 0]
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_copies_for_guards_have_addresses_of_their_own() -> None:
    """Whatever else is freed and made between them: guards tell tensors by that."""
    handle, generator, others = Handle(torch.ones(4)), random.Random(0), deque[torch.Tensor]()
    for _ in range(2000):
        others.append(torch.empty(0))
        if generator.random() < 0.5:
            del others[generator.randrange(len(others))]
        addresses = [id(handle.values_in_graph) for _ in range(4)]
        assert len(set(addresses)) == 4


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_gets_a_gathered_parameter_that_has_a_gradient(
    wrap: Wrap, backend: str
) -> None:
    model = wrap(built(), {})
    weight = model[1].weight
    compiled: Any = torch.compile(lambda w: (w * w).sum(), backend=backend, fullgraph=True)
    (weight * weight).sum().backward()
    with infinity.gathered(model):
        value = compiled(weight)
        value.backward()
    assert torch.equal(weight.grad + 0, 4 * weight.detach())


@pytest.mark.parametrize("write", WRITES)
def test_a_write_runs_outside_of_graphs(write: str) -> None:
    expected = torch.full((4, 4), 3.0)
    handle = Handle(expected.clone())
    WRITES[write](expected)
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="changed in place in compiled code"):
        torch.compile(WRITES[write], **AOT)(handle)
    assert torch.equal(handle.home, torch.full((4, 4), 3.0))
    torch.compile(WRITES[write], backend="aot_eager")(handle)
    assert torch.equal(handle.home, expected)


def test_a_write_that_is_refused_is_refused_in_compiled_code() -> None:
    torch._dynamo.reset()
    with pytest.raises(ValueError, match="fixed"):
        torch.compile(WRITES["mul_"], backend="aot_eager")(FixedHandle(torch.ones(4, 4)))


@pytest.mark.parametrize("view", [lambda tensor: tensor[1:], lambda tensor: tensor.detach()])
def test_a_view_that_a_graph_gives_cannot_be_written(view: Callable[[Any], Any]) -> None:
    handle = Handle(torch.ones(4, 4))
    torch._dynamo.reset()
    found = torch.compile(view, **AOT)(handle)
    assert torch.equal(found, view(torch.ones(4, 4)))
    with pytest.raises(infinity.ShardedParameterError, match="changed in place"):
        found.mul_(2)


def test_a_graph_is_made_once_and_reads_the_values_anew() -> None:
    handle = Handle(torch.ones(4, 4))
    torch._dynamo.reset()
    made = []

    def backend(graph: Any, _: Any) -> Any:
        made.append(graph)
        return graph.forward

    total = torch.compile(torch.sum, backend=backend, fullgraph=True)
    for value in range(3):
        handle.home.fill_(value)
        assert total(handle) == 16 * value
    assert len(made) == 1


@pytest.mark.parametrize("tiled", [False, True], ids=["whole", "in tiles"])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_graph_that_gives_a_view_with_a_gradient_is_refused(
    wrap: Wrap, tiled: bool, fullgraph: bool
) -> None:
    """A write to the copy that it would be is lost. What is between is computed as ever."""
    weight = wrap(built(tiled), {})[1].weight
    view = torch.compile(lambda w: w.t(), backend="aot_eager", fullgraph=fullgraph)
    with pytest.raises(Exception, match=r"a view of a tensor of a wrapped model .* its .clone\(\)"):
        view(weight)
    copy = torch.compile(lambda w: w.t().clone(), backend="aot_eager", fullgraph=fullgraph)
    assert torch.equal(copy(weight), weight.t())
