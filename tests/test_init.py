"""Models built without memory get the values that their own initialisation would give them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import FAMILIES
from torch import nn

import infinity


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_scales_that_a_parent_module_sets_are_kept(family: str, tmp_path: Path) -> None:
    """GPT-2's attention scales its child's weight by depth, T5's layers theirs by width: the parent initialises the child."""
    model = FAMILIES[family].build()
    plain = {name: parameter.detach().std() for name, parameter in model.named_parameters() if parameter.numel() >= 1024}
    with infinity.init():
        empty = type(model)(model.config)
    assert all(parameter.is_meta for parameter in empty.parameters())
    wrapped = infinity.wrap(empty, infinity.Config(nvme=tmp_path, gpu_memory="64MiB", cpu_memory="64MiB"), seed=1)
    with infinity.engine(wrapped) as engine:
        values = engine.state_dict()
    assert len(plain) > 5
    for name, std in plain.items():
        torch.testing.assert_close(values[name].std(), std, rtol=0.2, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_a_parameter_without_dimensions_is_trained_like_any_other(tmp_path: Path) -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for _ in range(3):
            loss = model(torch.ones(1, 4)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.gain

    plain = Scaled()
    expected = steps(plain, torch.optim.SGD(plain.parameters(), lr=0.125))
    config = infinity.Config(nvme=[tmp_path], gpu_memory="1MiB", cpu_memory="4MiB", algorithm="sgd")
    model = infinity.wrap(Scaled(), config)
    with infinity.engine(model):
        assert model.gain.shape == ()
        assert steps(model, infinity.SGD(model.parameters(), lr=0.125)) == expected
