"""A step inside of a backward is refused with the way out; one after it may have an optimizer per
parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from support.configs import config_of
from support.pairs import WIDTH, built

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model(tmp_path: Path) -> Any:
    options = {"gpu_memory": "4MiB", "cpu_memory": "8MiB", "poison": True}
    model = infinity.wrap(built(), config_of(nvme=tmp_path, **options))
    yield model
    infinity.engine(model).close()


def test_a_step_in_a_hook_is_refused(model: Any) -> None:
    optimizers = {p: infinity.AdamW([p], lr=1e-2) for p in model.parameters()}
    before = {n: v.clone() for n, v in infinity.engine(model).state_dict().items()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    match = r"inside of a backward: gradients of a wrapped model .* Step once after backward\(\)"
    with pytest.raises(infinity.ShardedParameterError, match=match):
        model(torch.randn(3, WIDTH)).sum().backward()
    after = infinity.engine(model).state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_an_optimizer_for_each_parameter_steps_after_it(model: Any) -> None:
    plain = built()
    sides = [(model, infinity.AdamW), (plain, torch.optim.AdamW)]
    for each, kind in sides:
        optimizers = [kind([p], lr=1e-2, eps=1e-4) for p in each.parameters()]
        for step in range(3):
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))
            each(x).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    found = infinity.engine(model).state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=2e-5, atol=2e-6)
