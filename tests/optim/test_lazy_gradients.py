"""`.grad` of a wrapped parameter: what torch, GradScaler and users do with gradients gives what it
gives for a plain model, and moves no more than it must."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from support.configs import config_of
from support.models import Transformer, text_batch, transformer
from support.probe import Probe

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(60)]


class Pair:
    """A plain model and a wrapped one with the same weights, which both do the same."""

    def __init__(self, directory: Path, **config: Any) -> None:
        self.plain: Transformer = transformer()
        self.model: Any = infinity.wrap(
            transformer(),
            config_of(
                **{
                    "nvme": directory,
                    "gpu_memory": 1 << 20,
                    "cpu_memory": 1 << 26,
                    "cache": 0,
                    "gradients": "nvme",
                    "precision": "fp32",
                }
                | config
            ),
        )
        self.engine = infinity.engine(self.model)

    def backward(self, number: int = 0) -> None:
        for model in (self.plain, self.model):
            model(**text_batch(number)).loss.backward()

    def same(self) -> None:
        for (name, theirs), ours in zip(
            self.plain.named_parameters(), self.model.parameters(), strict=True
        ):
            found = self.engine.gradient(ours)
            assert (found is None) == (theirs.grad is None), name
            if found is not None:
                torch.testing.assert_close(found, theirs.grad, rtol=1e-6, atol=1e-9, msg=name)

    def read(self) -> int:
        """Bytes read from the drive so far."""
        return sum(io.counters()["bytes_read"] for io in self.engine.ios)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.engine.close()


@pytest.mark.parametrize("order", [2.0, math.inf, 1.0])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_clip_grad_norm_of_torch(foreach: bool | None, order: float, pair: Pair) -> None:
    for number in range(2):
        pair.backward(number)
        theirs, ours = (
            nn.utils.clip_grad_norm_(model.parameters(), 0.1, order, foreach=foreach)
            for model in (pair.plain, pair.model)
        )
        assert float(ours) == pytest.approx(float(theirs), rel=1e-6)
        pair.same()
    # Several at once, of generators, and the norm alone.
    grads = [p.grad for p in pair.model.parameters()]
    assert float(nn.utils.get_total_norm(grads, order)) == pytest.approx(
        float(nn.utils.get_total_norm([p.grad for p in pair.plain.parameters()], order)), rel=1e-6
    )


def test_the_norm_has_the_bits_of_the_engine(pair: Pair) -> None:
    """So have the weights after the step."""
    optimizer = infinity.AdamW(pair.model.parameters(), lr=1e-2)
    weights = []
    start = {name: value.clone() for name, value in pair.engine.state_dict().items()}
    fresh = copy.deepcopy(optimizer.state_dict())
    for clip in (
        lambda: nn.utils.clip_grad_norm_(pair.model.parameters(), 0.1).item(),
        lambda: nn.utils.clip_grad_norm_(list(pair.model.parameters()), 0.1, foreach=True).item(),
        lambda: pair.engine.clip_grad_norm_(0.1),
    ):
        with infinity.gathered(pair.model, write=True):
            pair.model.load_state_dict(start)
        optimizer.load_state_dict(fresh)
        pair.model.zero_grad()
        pair.model(**text_batch(0)).loss.backward()
        norm = clip()
        optimizer.step()
        weights.append((norm, pair.engine.state_dict()))
    assert weights[0][0] == weights[1][0] == weights[2][0]
    for _, state in weights[1:]:
        assert all(torch.equal(value, weights[0][1][name]) for name, value in state.items())


def test_clipping_streams(pair: Pair) -> None:
    """The gradients, which lie on NVMe, are read once for their norm, and nothing fetches one."""
    pair.backward()
    Probe(pair.engine).updater.settle(pair.engine.units)
    before = pair.read()
    assert torch.isfinite(nn.utils.clip_grad_norm_(pair.model.parameters(), 1e9))
    assert pair.read() - before <= sum(
        unit.facts.gradient_nbytes for unit in pair.engine.units
    ) + 4096 * len(pair.engine.units)
    before = pair.read()
    nn.utils.clip_grad_norm_(pair.model.parameters(), 0.1)
    assert all(p.grad is not None and not p.grad.is_sparse for p in pair.model.parameters())
    assert {p.grad.shape for p in pair.model.parameters()} == {
        p.grad.shape for p in pair.plain.parameters()
    }
    assert pair.read() == before


CHANGES: dict[str, Callable[[Any], object]] = {
    "row": lambda p: p.grad.__setitem__(0, 0.0),
    "mask": lambda p: p.grad.__setitem__(p.grad > 0, 1.0),
    "value": lambda p: nn.utils.clip_grad_value_([p], 1e-3),
    "values": lambda p: nn.utils.clip_grad_value_([p], 1e-3, foreach=True),
    "mul": lambda p: p.grad.mul_(3.0),
    "data": lambda p: p.grad.data.mul_(3.0),
    "tensor": lambda p: p.grad.mul_(torch.full_like(p.grad, 2.0)),
    "div": lambda p: p.grad.div_(3),
    "nan": lambda p: torch.nan_to_num_(p.grad.add_(1.0)),
    "foreach": lambda p: torch._foreach_add_([p.grad], 1.0),
    "copy": lambda p: p.grad.copy_(p.grad * 2),
    "set data": lambda p: setattr(p.grad, "data", p.grad + 1),
    "set": lambda p: setattr(p, "grad", torch.ones(p.shape)),
    "none": lambda p: setattr(p, "grad", None),
    "zero": lambda p: p.grad.zero_(),
    "itself": lambda p: setattr(p, "grad", p.grad),
}


@pytest.mark.parametrize("gradients", ["cpu", "nvme"])
def test_a_change_of_one_gradient(gradients: str, tmp_path: Path) -> None:
    """Is that of the plain model, leaves the others, and another backward adds to it."""
    pair = Pair(tmp_path, gradients=gradients)
    for name, change in CHANGES.items():
        pair.backward()
        with torch.no_grad():
            for model in (pair.plain, pair.model):
                change(model.blocks[1].up.weight)
        pair.same()
        pair.backward(1)
        pair.same()
        pair.plain.zero_grad()
        pair.model.zero_grad()
        assert all(p.grad is None for p in pair.model.parameters()), name
    pair.engine.close()


@pytest.mark.parametrize("gradients", ["cpu", "nvme"])
def test_a_gradient_may_be_set_where_there_is_none(gradients: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path, gradients=gradients)
    optimizers = [
        infinity.AdamW(pair.model.parameters(), lr=1e-2),
        torch.optim.AdamW(pair.plain.parameters(), lr=1e-2),
    ]
    for number in range(3):
        for model in (pair.plain, pair.model):
            for index, parameter in enumerate(model.parameters()):
                if index % 3 == number:
                    parameter.grad = torch.full(parameter.shape, 0.5)
        pair.same()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in pair.plain.state_dict().items():
        torch.testing.assert_close(pair.engine.state_dict()[name], value, rtol=1e-6, atol=1e-7)
    weight = pair.model.tokens.weight
    with pytest.raises(infinity.ShardedParameterError, match=r"has shape \(2,\), the parameter"):
        weight.grad = torch.ones(2)
    with pytest.raises(TypeError, match=r"assigned to tokens.weight is 5; give a tensor, or None"):
        weight.grad = 5
    pair.engine.close()


def test_what_reads_a_gradient(pair: Pair) -> None:
    pair.backward()
    ours, theirs = pair.model.tokens.weight.grad, pair.plain.tokens.weight.grad
    assert isinstance(ours, torch.Tensor) and not hasattr(ours, "device_mesh")
    assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
    for read in (
        lambda g: g.clone(),
        lambda g: g + 1,
        lambda g: g[3],
        lambda g: g.view(-1)[:5] * 2,
        lambda g: torch.isfinite(g).all(),
        lambda g: torch.from_numpy(g.numpy().copy()),
        lambda g: torch.tensor(g.tolist()),
        lambda g: g.to(torch.float64),
        lambda g: g.abs().max(),
        copy.deepcopy,
        lambda g: pickle.loads(pickle.dumps(g)),
        torch.zeros_like,
        lambda g: g.new_ones(2),
    ):
        assert torch.equal(read(ours), read(theirs))
    assert float(ours.data.norm(2)) == pytest.approx(float(theirs.norm(2)), rel=1e-6)
    assert "LazyGradient" in repr(ours)
    for change in (lambda g: g[0].zero_(), lambda g: g.view(-1).add_(1)):
        change(ours)
        change(theirs)
        pair.same()
    pair.model.zero_grad()
    with pytest.raises(infinity.ShardedParameterError, match="was forgotten since"):
        ours.sum()


def test_a_gradient_inside_of_a_backward_is_not_final(pair: Pair) -> None:
    said: list[str] = []

    def read(parameter: torch.Tensor) -> None:
        try:
            parameter.grad.sum()  # type: ignore[union-attr]
        except infinity.ShardedParameterError as error:
            said.append(str(error))

    handle = pair.model.tokens.weight.register_post_accumulate_grad_hook(read)
    pair.backward()
    handle.remove()
    assert said and "is kept by the engine and not final inside of a backward" in said[0]
    pair.same()


def test_grad_scaler_divides_and_clips(pair: Pair) -> None:
    """In the order of torch's recipe; an infinity leaves the step out."""
    models = (pair.plain, pair.model)
    optimizers: list[Any] = [
        torch.optim.AdamW(pair.plain.parameters(), lr=1e-2, eps=1e-6),
        infinity.AdamW(pair.model.parameters(), lr=1e-2, eps=1e-6),
    ]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in models]
    for number in range(4):
        norms = []
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            scaler.scale(model(**text_batch(number)).loss).backward()
            if number == 2:
                model.norm.weight.grad = torch.full(model.norm.weight.shape, math.inf)
            scaler.unscale_(optimizer)
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert pair.engine.report().steps == 3
    for name, value in pair.plain.state_dict().items():
        torch.testing.assert_close(pair.engine.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_an_optimizer_of_torch_says_what_to_use(pair: Pair) -> None:
    before = pair.engine.state_dict()
    pair.backward()
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        with pytest.raises(infinity.ShardedParameterError, match=r"update with infinity\.AdamW"):
            kind(pair.model.parameters(), 0.1).step()
    assert all(torch.equal(value, before[name]) for name, value in pair.engine.state_dict().items())
