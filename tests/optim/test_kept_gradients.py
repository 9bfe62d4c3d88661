"""What user code keeps of gradients between backwards and steps is what it is in plain PyTorch, or
raises: handles, norms, assigned tensors, exchanged gradients."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import infinity
from support.configs import config_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(120)]


class Net(nn.Module):
    """Three layers, of which two have weights of one shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.c = nn.Linear(8, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return out


def inputs(number: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


class Pair:
    """A plain model and a wrapped one with the same weights, which both do the same."""

    def __init__(self, directory: Path, tiled: str = "", **config: Any) -> None:
        """`tiled` has the names of the layers in tiles."""
        self.plain, model = Net(), Net()
        for name in set(tiled) & {"a", "b"}:
            infinity.tile(getattr(model, name), 8 * 4 * 3)
        self.model: Any = infinity.wrap(
            model,
            config_of(
                **{
                    "nvme": directory,
                    "gpu_memory": 1 << 16,
                    "cpu_memory": 1 << 24,
                    "cache": 0,
                    "gradients": "nvme",
                    "precision": "fp32",
                    "algorithm": "sgd",
                }
                | config
            ),
        )
        self.engine = infinity.engine(self.model)
        self.optimizers: tuple[Any, Any] = (
            torch.optim.SGD(self.plain.parameters(), lr=0.1),
            infinity.SGD(self.model.parameters(), lr=0.1),
        )

    @property
    def models(self) -> tuple[Any, Any]:
        return self.plain, self.model

    def backward(self, number: int = 0) -> None:
        for model in self.models:
            model(inputs(number)).square().mean().backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def both(self, call: Callable[[Any], Any]) -> tuple[Any, Any]:
        """What it gives for the plain model, and for the wrapped one."""
        return call(self.plain), call(self.model)

    def same(self) -> None:
        """Gradients and weights are those of the plain model."""
        state = self.engine.state_dict()
        for name, theirs in self.plain.named_parameters():
            gradient = self.model.get_parameter(name).grad
            assert (gradient is None) == (theirs.grad is None), name
            if gradient is not None:
                close(gradient, theirs.grad)
            close(state[name], theirs)


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours.detach() * 1, theirs.detach(), rtol=1e-5, atol=1e-7)


@pytest.fixture(params=["nvme", "cpu"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, gradients=request.param)
    yield made
    made.engine.close()


# Norms


CHANGES: dict[str, Callable[[Pair], object]] = {
    "step": lambda pair: pair.step(),
    "clip": lambda pair: pair.both(lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e-3)),
    "zero_grad": lambda pair: [o.zero_grad() for o in pair.optimizers],
    "zeros": lambda pair: [o.zero_grad(set_to_none=False) for o in pair.optimizers],
    "forget one": lambda pair: pair.both(lambda m: setattr(m.a.weight, "grad", None)),
    "backward": lambda pair: pair.backward(1),
    "set": lambda pair: pair.both(lambda m: setattr(m.a.weight, "grad", torch.ones(8, 8))),
    "write": lambda pair: pair.both(lambda m: m.a.weight.grad[0].fill_(5)),
    "scale": lambda pair: pair.both(lambda m: m.a.weight.grad.mul_(3)),
}


@pytest.mark.parametrize("order", [2.0, 1.0])
@pytest.mark.parametrize("name", CHANGES)
def test_a_norm_is_that_of_the_time_when_it_was_taken(name: str, order: float, pair: Pair) -> None:
    pair.backward()
    taken = pair.both(lambda m: [p.grad.norm(order) for p in m.parameters()])
    lists = pair.both(lambda m: torch._foreach_norm([p.grad for p in m.parameters()], order))
    CHANGES[name](pair)
    for theirs, ours in (taken, lists):
        for one, other in zip(ours, theirs, strict=True):
            close(one, other)
        total = torch.linalg.vector_norm(torch.stack(ours))
        close(total.float(), torch.linalg.vector_norm(torch.stack(theirs)))
        assert torch.tensor(ours[:1]).item() == pytest.approx(float(theirs[0]), rel=1e-5)
    pair.same()


def test_norms_that_are_not_kept_cost_nothing(pair: Pair) -> None:
    """Every gradient is read once for the norm of all, and not when it changes."""
    pair.backward()
    pair.engine.gradient(pair.model.a.weight)  # settles
    before = sum(io.counters()["bytes_read"] for io in pair.engine.ios)
    nn.utils.clip_grad_norm_(pair.model.parameters(), 1e-3)
    read = sum(io.counters()["bytes_read"] for io in pair.engine.ios) - before
    units = [unit for unit in pair.engine.units if unit.facts.trainable]
    assert read <= sum(unit.facts.gradient_nbytes + 4096 for unit in units)


# Assigned tensors


def test_an_assigned_tensor_is_the_gradient(pair: Pair) -> None:
    pair.backward()
    kept = [torch.full((8, 8), 0.25) for _ in pair.models]
    for model, tensor in zip(pair.models, kept, strict=True):
        model.b.weight.grad = tensor
        assert model.b.weight.grad is tensor
        tensor.add_(1)
    pair.same()
    for tensor in kept:
        tensor.data.mul_(2)
        tensor.numpy()[0] = 3
    pair.step()
    pair.same()
    pair.backward(1)  # adds to it
    close(kept[1], kept[0])
    pair.both(lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e-2))
    close(kept[1], kept[0])
    pair.step()
    pair.same()
    for optimizer in pair.optimizers:
        optimizer.zero_grad(set_to_none=False)
    assert not kept[0].any() and not kept[1].any()
    for optimizer in pair.optimizers:
        optimizer.zero_grad()
    kept[1].fill_(7)
    assert pair.model.b.weight.grad is None
    pair.backward(2)
    pair.same()


def test_a_tensor_that_changed_before_it_died_is_the_gradient(pair: Pair) -> None:
    for change in (
        lambda g: g.add_(1),
        lambda g: g.data.add_(1),
        lambda g: g[3].fill_(2),
        lambda g: g.numpy().__setitem__(0, 5.0),
    ):
        for model in pair.models:
            gradient = torch.full((8, 8), 0.25)
            model.b.weight.grad = gradient
            change(gradient)
            del gradient
        pair.step()
        pair.same()


def test_a_view_of_an_assigned_tensor_is_one_of_the_gradient(pair: Pair) -> None:
    def assign(model: Any) -> Any:
        flat = torch.zeros(80)
        model.b.weight.grad = flat[8:72].view(8, 8)
        return flat

    pair.backward()
    flats = pair.both(assign)
    for flat in flats:
        flat.fill_(0.5)
    pair.step()
    pair.same()
    pair.backward(1)
    close(flats[1], flats[0])


def test_an_assigned_tensor_is_freed_with_its_last_reference(pair: Pair) -> None:
    pair.backward()
    gradient = torch.ones(8, 8)
    memory = weakref.ref(gradient)
    pair.model.b.weight.grad = gradient
    del gradient
    assert memory() is None
    assert torch.equal(pair.model.b.weight.grad + 0, torch.ones(8, 8))
    infinity.set(pair.model.b.weight, "grad", value := torch.zeros(8, 8))
    value.fill_(9)  # `infinity.set` copies
    assert not (pair.model.b.weight.grad + 0).any()


def test_data_of_a_gradient_is_assigned(pair: Pair) -> None:
    pair.backward()
    kept = [torch.ones(8, 8) for _ in pair.models]
    handles = pair.both(lambda m: m.a.weight.grad)
    for handle, tensor in zip(handles, kept, strict=True):
        handle.data = tensor
        tensor.mul_(3)
    close(handles[1], handles[0])
    pair.step()
    pair.same()


# Objects


def test_a_gradient_is_one_object(pair: Pair) -> None:
    pair.backward()
    weight = pair.model.a.weight
    kept = weight.grad
    assert weight.grad is kept
    pair.backward(1)
    assert weight.grad is kept
    close(kept, pair.plain.a.weight.grad)
    kept.mul_(2)
    pair.plain.a.weight.grad.mul_(2)
    pair.same()


def test_gradients_are_exchanged(pair: Pair) -> None:
    def exchange(m: Any) -> None:
        m.a.weight.grad, m.b.weight.grad = m.b.weight.grad, m.a.weight.grad
        m.a.bias.grad, m.b.bias.grad = m.b.bias.grad, m.a.bias.grad

    for number in range(3):
        pair.backward(number)
        pair.both(exchange)
        pair.same()
        pair.both(lambda m: m.a.weight.grad[0].mul_(2))
        pair.step()
        pair.same()


def test_a_gradient_that_was_replaced_keeps_its_values(pair: Pair) -> None:
    pair.backward()
    kept = pair.both(lambda m: m.a.weight.grad)
    pair.both(lambda m: setattr(m.a.weight, "grad", torch.ones(8, 8)))
    close(kept[1], kept[0])
    for gradient in kept:
        gradient.mul_(2)
    close(kept[1], kept[0])
    pair.same()
    pair.both(lambda m: setattr(m.b.weight, "grad", m.a.weight.grad * 1))
    for model, gradient in zip(pair.models, kept, strict=True):
        model.a.weight.grad = gradient
    pair.same()
    pair.both(lambda m: m.a.weight.grad.add_(1))
    close(kept[1], kept[0])


def test_a_gradient_of_two_parameters(pair: Pair) -> None:
    pair.backward()
    pair.both(lambda m: setattr(m.a.weight, "grad", m.b.weight.grad))
    pair.same()
    pair.both(lambda m: m.a.weight.grad[1].fill_(3))
    pair.same()
    pair.both(lambda m: m.b.weight.grad.mul_(0.5))
    pair.same()
    pair.step()
    pair.same()
    with pytest.raises(infinity.ShardedParameterError, match=r"a\.grad = b\.grad\.clone\(\)"):
        pair.model(inputs(1)).square().mean().backward()


def view(m: Any) -> None:
    m.a.weight.grad = m.b.weight.grad.t()


def data(m: Any) -> None:
    m.a.weight.grad.data = m.b.weight.grad.data


def another_weight(m: Any) -> None:
    m.a.weight.grad = m.b.weight.detach()


@pytest.mark.parametrize("tiled", ["", "a", "b", "a and b"])
@pytest.mark.parametrize("assign", [view, data, another_weight])
def test_memory_that_a_copy_would_not_follow_is_refused(
    assign: Callable[[Any], None], tiled: str, tmp_path: Path
) -> None:
    pair = Pair(tmp_path, tiled=tiled)
    pair.backward()
    with pytest.raises(infinity.ShardedParameterError, match=r"assign a copy: \.clone\(\)"):
        assign(pair.model)
    pair.same()
    pair.engine.close()


@pytest.mark.parametrize("tiled", ["a", "b"])
def test_one_gradient_of_a_whole_weight_and_one_in_tiles_is_refused(
    tiled: str, tmp_path: Path
) -> None:
    pair = Pair(tmp_path, tiled=tiled)
    pair.backward()
    with pytest.raises(infinity.ShardedParameterError, match="would be the same memory as"):
        pair.model.a.weight.grad = pair.model.b.weight.grad
    pair.same()
    pair.engine.close()


OWN: dict[str, Callable[[Any], Any]] = {
    "itself": lambda g: g,
    "detached": lambda g: g.detach(),
    "contiguous": lambda g: g.contiguous(),
    "moved": lambda g: g.to("cpu"),
    "data": lambda g: g.data,
}


@pytest.mark.parametrize("tiled", ["", "a"])
@pytest.mark.parametrize("name", OWN)
def test_a_gradient_may_be_assigned_where_it_is(name: str, tiled: str, tmp_path: Path) -> None:
    def assign(m: Any) -> None:
        m.a.weight.grad = OWN[name](m.a.weight.grad)
        m.a.weight.grad.data = OWN[name](m.a.weight.grad)
        m.a.weight.grad.mul_(3)

    pair = Pair(tmp_path, tiled=tiled)
    pair.backward()
    pair.both(assign)
    pair.same()
    pair.step()
    pair.same()
    pair.engine.close()


def test_what_was_forgotten_says_so(pair: Pair) -> None:
    pair.backward()
    kept = pair.model.a.weight.grad
    pair.model.zero_grad()
    pair.backward(1)
    for use in (lambda: kept + 1, lambda: kept.mul_(2), lambda: kept.norm(), lambda: kept[0] + 1):
        with pytest.raises(infinity.ShardedParameterError, match="was forgotten since"):
            use()
    with pytest.raises(infinity.ShardedParameterError, match="was forgotten since"):
        pair.model.a.weight.grad = kept


def test_a_gradient_times_a_weight(pair: Pair) -> None:
    pair.backward()
    with torch.no_grad():
        found = pair.both(lambda m: [(p.grad * p).abs().sum() for p in m.parameters()])
        for ours, theirs in zip(found[1], found[0], strict=True):
            close(ours, theirs)
        pair.both(lambda m: [p.grad.add_(p, alpha=0.1) for p in m.parameters()])
    pair.same()


def test_a_backward_with_a_graph_is_refused(pair: Pair) -> None:
    loss = pair.model(inputs(0)).square().mean()
    with pytest.raises(infinity.ShardedParameterError, match=r"torch\.autograd\.grad\(loss"):
        loss.backward(create_graph=True)


# Tiles


TILED: dict[str, Callable[[Any], object]] = {
    "mul": lambda p: p.grad.mul_(0.5),
    "tensor": lambda p: p.grad.mul_(torch.full_like(p.grad, 2)),
    "mask": lambda p: p.grad.__setitem__(p.grad.abs() < 1e-2, 0),
    "masked_fill": lambda p: p.grad.masked_fill_(p.grad > 0, 1),
    "row": lambda p: p.grad[4].mul_(3),
    "column": lambda p: p.grad.t()[2].zero_(),
    "value": lambda p: nn.utils.clip_grad_value_([p], 1e-3),
    "norm": lambda p: nn.utils.clip_grad_norm_([p], 1e-3),
    "weight": lambda p: p.grad.add_(p, alpha=0.1),
    "zero": lambda p: p.grad.zero_(),
    "itself": lambda p: setattr(p, "grad", p.grad),
    "set": lambda p: setattr(p, "grad", p.grad * 2),
    "forget": lambda p: setattr(p, "grad", None),
    "delete": lambda p: p.__delattr__("grad"),
}


@pytest.mark.parametrize("name", TILED)
def test_a_change_of_the_gradient_of_a_weight_in_tiles(name: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path, tiled="a")
    pair.backward()
    with torch.no_grad():
        pair.both(lambda m: TILED[name](m.a.weight))
    ours, theirs = pair.model.a.weight.grad, pair.plain.a.weight.grad
    assert (ours is None) == (theirs is None)
    if theirs is not None:
        close(ours, theirs)
    pair.step()
    close(pair.engine.state_dict()["a.weight"], pair.plain.a.weight)
    pair.engine.close()


def test_the_gradient_of_a_weight_in_tiles_is_an_alias(tmp_path: Path) -> None:
    pair = Pair(tmp_path, tiled="a")
    pair.backward()
    kept = pair.both(lambda m: m.a.weight.grad)
    pair.backward(1)
    close(kept[1], kept[0])
    tensors = pair.both(lambda m: torch.ones(8, 8))
    for model, tensor in zip(pair.models, tensors, strict=True):
        model.a.weight.grad = tensor
        tensor[2:].mul_(3)
    close(kept[1], kept[0])  # the old one
    pair.both(lambda m: setattr(m.b.weight, "grad", m.a.weight.grad + 0))
    pair.step()
    close(pair.engine.state_dict()["a.weight"], pair.plain.a.weight)
    pair.engine.close()


def test_the_gradient_of_a_weight_in_tiles_before_wrap() -> None:
    plain, model = Net(), Net()
    infinity.tile(model.a, 8 * 4 * 3)
    for each in (plain, model):
        each(inputs(0)).square().mean().backward()
        gradient: Any = each.a.weight.grad
        gradient[2:5].mul_(2)
    close(model.a.weight.grad, plain.a.weight.grad)


# fp16


@pytest.mark.parametrize("how", ["grad", "set", "data"])
def test_an_assigned_gradient_is_not_scaled_with_the_loss(how: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = infinity.wrap(
        Net(), config_of(nvme=tmp_path, gpu_memory=1 << 16, cpu_memory=1 << 24, precision="fp16")
    )
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    optimizer.scale(model(inputs(0).half()).float().square().mean()).backward()
    weight = model.b.weight
    others = infinity.get(model.a.weight, "grad")
    value = torch.full((8, 8), 2.0).half()
    value[0, 0] = 2.0**-20
    if how == "grad":
        weight.grad = value
    elif how == "set":
        infinity.set(weight, "grad", value)
    else:
        weight.grad[:] = value.float()
    expected = value.float()
    assert torch.equal((weight.grad + 0).float(), expected)
    assert torch.equal(infinity.get(weight, "grad").float(), expected)
    assert torch.equal(infinity.get(model.a.weight, "grad"), others)
    norm = torch.sqrt(sum((p.grad.float() ** 2).sum() for p in model.parameters()))
    before = infinity.get(weight)
    assert float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)) == pytest.approx(
        float(norm), rel=1e-3
    )
    optimizer.step()
    assert optimizer.skipped_steps == 0 and not torch.equal(infinity.get(weight), before)
    infinity.engine(model).close()


# All of it


USES = (
    *("backward", "keep", "norm", "assign", "swap", "write", "written", "clip", "step", "zero"),
    "replace",
)


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_order_of_uses(data: st.DataObject, tmp_path: Path) -> None:
    pair = Pair(tmp_path, gradients=data.draw(st.sampled_from(("nvme", "cpu"))))
    names = ("a", "b")
    kept: list[tuple[Any, Any]] = []
    norms: list[tuple[Any, Any]] = []

    def weight(model: Any) -> Any:
        return getattr(model, name).weight

    try:
        pair.backward()
        for number in range(data.draw(st.integers(3, 10))):
            name = data.draw(st.sampled_from(names))
            use = data.draw(st.sampled_from(USES))
            if use == "backward":
                pair.backward(number)
            elif use == "keep":
                kept.append(pair.both(lambda m: weight(m).grad))
            elif use == "norm":
                norms.append(pair.both(lambda m: weight(m).grad.norm()))
            elif use == "assign":
                kept.append((torch.ones(8, 8), torch.ones(8, 8)))
                for model, tensor in zip(pair.models, kept[-1], strict=True):
                    weight(model).grad = tensor
            elif use == "swap":
                for m in pair.models:
                    m.a.weight.grad, m.b.weight.grad = m.b.weight.grad, m.a.weight.grad
            elif use == "write":
                pair.both(lambda m: weight(m).grad[1:3].mul_(2))
            elif use == "written" and kept:
                for tensor in data.draw(st.sampled_from(kept)):
                    tensor.mul_(0.5)
            elif use == "clip":
                norms.append(
                    pair.both(lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.01).float())
                )
            elif use == "step":
                pair.step()
            elif use == "zero":
                for optimizer in pair.optimizers:
                    optimizer.zero_grad(set_to_none=False)
            elif use == "replace":
                pair.both(lambda m: setattr(weight(m), "grad", weight(m).grad * 2))
            if data.draw(st.booleans()):
                pair.same()
            for theirs, ours in (*kept, *norms):
                close(ours, theirs)
        pair.step()
        pair.same()
    finally:
        pair.engine.close()
        kept.clear()
        gc.collect()


class Either(nn.Module):
    """Two layers in one unit, of which a forward uses one, or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.later = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        out: torch.Tensor = self.always(x)
        return out + self.later(x) if both else out


def test_a_gradient_that_comes_after_a_clipped_step_is_not_clipped_by_that(tmp_path: Path) -> None:
    plain, model = Either(), Either()
    config = config_of(nvme=tmp_path, gpu_memory=1 << 16, cpu_memory=1 << 24, algorithm="sgd")
    with infinity.engine(infinity.wrap(model, config, units=[Either])) as engine:
        of_torch = torch.optim.SGD(plain.parameters(), lr=0.1)
        ours = infinity.SGD(model.parameters(), lr=0.1, max_grad_norm=0.1)
        for both in (False, True):  # without zero_grad between
            for each in (plain, model):
                each(inputs(0), both).square().sum().backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            of_torch.step()
            ours.step()
        found = engine.state_dict()
        for name, expected in plain.named_parameters():
            torch.testing.assert_close(found[name], expected.detach(), rtol=1e-5, atol=1e-7)
