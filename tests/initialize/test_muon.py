"""`"type": "Muon"` in a DeepSpeed configuration trains as DeepSpeed 0.19.8 does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import infinity
from infinity.deepspeed.muon import Muon
from support.deepspeed import batch, configuration

pytestmark = pytest.mark.usefixtures("one_thread")

Start = Callable[..., tuple[Any, Any, Any, Any]]
STEPS = 4
LR, DECAY, MOMENTUM, BETAS, EPS = 0.02, 0.1, 0.9, (0.9, 0.95), 1e-10


class Net(nn.Module):
    """Wide, tall and square matrices, a convolution, biases, an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(8, 8)
        self.wide, self.tall, self.square = nn.Linear(8, 4), nn.Linear(4, 8), nn.Linear(8, 8)
        self.conv = nn.Conv1d(1, 2, 3, padding=1)
        self.lm_head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.embedding(x))
        x = x + self.tall(functional.gelu(self.wide(x)))
        x = self.conv(self.square(x)[:, None]).flatten(1)
        return functional.cross_entropy(self.lm_head(x), labels)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Five Newton-Schulz iterations on the matrix, in double precision."""
    x = matrix.double().mT if matrix.size(-2) > matrix.size(-1) else matrix.double()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    x = x.mT if matrix.size(-2) > matrix.size(-1) else x
    return x * math.sqrt(max(1, matrix.size(-2) / matrix.size(-1)))


def by_muon(name: str, parameter: torch.Tensor) -> bool:
    return parameter.ndim >= 2 and "embed" not in name and "lm_head" not in name


def train_plain(stage: int, clip: float) -> dict[str, torch.Tensor]:
    """The formula, written once more: at stage 0 gradients are clipped, else what Muon makes."""
    model = Net()
    states: dict[str, Any] = {}
    for number in range(STEPS):
        model.zero_grad()
        model(*batch(number)).backward()
        if clip and stage == 0:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        changes = {}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            gradient = parameter.grad.double()
            if by_muon(name, parameter):
                momentum = states.setdefault(name, torch.zeros_like(gradient))
                momentum.lerp_(gradient, 1 - MOMENTUM)
                gradient = orthogonal(gradient.lerp(momentum, MOMENTUM))
            changes[name] = gradient
        norm = math.sqrt(sum(float(change.norm()) ** 2 for change in changes.values()))
        factor = min(1.0, clip / (norm + 1e-6)) if clip and stage > 0 else 1.0
        for name, parameter in model.named_parameters():
            change = changes[name] * factor
            if not by_muon(name, parameter):
                first, second = states.setdefault(name, [0.0, 0.0])
                first = BETAS[0] * first + (1 - BETAS[0]) * change
                second = BETAS[1] * second + (1 - BETAS[1]) * change**2
                states[name] = [first, second]
                mean, square = (
                    state / (1 - beta ** (number + 1))
                    for state, beta in zip((first, second), BETAS, strict=True)
                )
                change = mean / (square.sqrt() + EPS)
            parameter.data.mul_(1 - LR * DECAY).sub_(LR * change)
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("stage", "clip"), [(0, 0.05), (2, 0.0), (2, 1.0), (3, 1.0)])
def test_it_trains_by_the_formula(start: Start, stage: int, clip: float) -> None:
    params = {"lr": LR, "weight_decay": DECAY, "momentum": MOMENTUM}
    config = configuration(optimizer={"type": "Muon", "params": params}, gradient_clipping=clip)
    config["zero_optimization"] = {"stage": stage}
    model = Net()
    engine, optimizer, *_ = start(model=model, config=config)
    for number in range(STEPS):
        engine.backward(engine(*batch(number)))
        engine.step()
    found = engine.module_state_dict()
    for name, value in train_plain(stage, clip).items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-6, msg=name)
    if clip and stage:  # the norm of what Muon makes, which is no small number
        assert engine.get_global_grad_norm() > 2
        assert {group["clip"] for group in optimizer.param_groups} != {1.0}


def test_rates_of_each_half_and_of_groups(start: Start) -> None:
    model = Net()
    params = {"lr": 1.0, "muon_lr": 2e-2, "adam_lr": 3e-3, "ns_method": "standard"}
    config = configuration(optimizer={"type": "Muon", "params": params})
    named = dict(model.named_parameters())
    biases = [named.pop(name) for name in list(named) if name.endswith("bias")]
    groups = [{"params": [*named.values()]}, {"params": biases, "lr": 0.5, "weight_decay": 0.0}]
    _, optimizer, *_ = start(model=model, model_parameters=groups, config=config)
    assert [
        (group["use_muon"], group["lr"], group["ns_method"], len(group["params"]))
        for group in optimizer.param_groups
    ] == [(True, 2e-2, "standard", 4), (False, 3e-3, "gram", 2), (False, 0.5, "gram", 6)]


def test_what_it_does_not_do_is_refused(start: Start) -> None:
    config = configuration(optimizer={"type": "Muon", "params": {"per_head_muon": True}})
    with pytest.raises(infinity.ConfigError, match="whole matrices are orthogonalized"):
        start(model=Net(), config=config)


def played(make: Callable[[list[dict[str, Any]]], Any], method: str) -> list[Any]:
    """Weights after some steps with given gradients."""
    generator = torch.Generator().manual_seed(1)
    shapes: Iterable[tuple[int, ...]] = ((6, 9), (9, 6), (5, 5), (2, 4, 6), (7,))
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    settings = {"lr": 0.1, "weight_decay": 0.1}
    muon = {"params": parameters[:-1], "use_muon": True, "momentum": 0.9, "ns_method": method}
    adam = {"params": parameters[-1:], "use_muon": False, "betas": (0.8, 0.9), "eps": 1e-8}
    optimizer = make([muon | settings, adam | settings])
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("mode", [True, False])
def test_it_is_the_class_of_deepspeed(method: str, mode: bool) -> None:
    theirs = pytest.importorskip("deepspeed.runtime.zero.muon.muon_optimizer").MuonWithAuxAdam
    with torch.compiler.set_stance("force_eager"):
        expected = played(lambda groups: theirs(groups, adam_w_mode=mode), method)
    found = played(lambda groups: Muon(groups, adam_w_mode=mode), method)
    for ours, other in zip(found, expected, strict=True):
        assert torch.equal(ours, other)
