"""Models built without memory get the values that their own initialisation would give them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import FAMILIES

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
