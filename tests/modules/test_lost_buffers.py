"""Buffers that only a constructor computes, in models of code of others, inside `infinity.init()`:
their values are those of the constructor, or a warning says what they are."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

import infinity


class ScaleConfig(PretrainedConfig):
    model_type = "scaled"


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.arange(1.0, 5.0) / 3 * factor, persistent=False)
        self.register_buffer("mask", torch.tensor(True), persistent=False)
        self.register_buffer("draws", torch.randn(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale * self.mask


class ScaledModel(PreTrainedModel):
    """A model of remote code: its `_init_weights` knows one of its buffers alone."""

    config_class = ScaleConfig
    runs = 0

    def __init__(self, config: ScaleConfig, factor: float = 2.0) -> None:
        super().__init__(config)
        type(self).runs += 1
        self.linear = nn.Linear(4, 4)
        self.inner = Scaled(factor)
        self.offset = nn.Parameter(torch.zeros(4))
        self.register_buffer("known", torch.ones(3), persistent=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, ScaledModel):
            module.known.data.fill_(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.linear(x)) + self.offset


class OnceModel(ScaledModel):
    """Its constructor runs once."""

    runs = 0

    def __init__(self, config: ScaleConfig) -> None:
        if self.runs:
            raise RuntimeError("once")
        super().__init__(config)


def saved(kind: type[ScaledModel], path: Path) -> Any:
    model = kind(ScaleConfig())
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("build", [infinity.init, infinity.zero.Init])
def test_they_are_what_the_constructor_computes(build: Any, tmp_path: Path) -> None:
    plain = saved(ScaledModel, tmp_path / "saved")
    state = torch.get_rng_state()
    with build():
        model = ScaledModel.from_pretrained(tmp_path / "saved")
    assert torch.equal(torch.get_rng_state(), state)
    for name in ("inner.scale", "inner.mask", "known"):
        assert torch.equal(model.get_buffer(name), plain.get_buffer(name)), name
    assert model.inner.draws.isfinite().all()
    infinity.wrap(model, infinity.Config())
    x = torch.randn(3, 4)
    with infinity.engine(model), torch.no_grad():
        assert torch.equal(model(x), plain(x))


def test_with_the_arguments_and_the_dtype_of_the_call(tmp_path: Path) -> None:
    saved(ScaledModel, tmp_path)
    with infinity.init():
        model = ScaledModel.from_pretrained(tmp_path, factor=3.0, dtype=torch.bfloat16)
    expected = torch.arange(1.0, 5.0, dtype=torch.bfloat16) / 3 * 3.0
    assert model.inner.scale.dtype is torch.bfloat16
    assert torch.equal(model.inner.scale, expected)


def test_parameters_that_are_computed_of_them(tmp_path: Path) -> None:
    plain = saved(ScaledModel, tmp_path / "saved")
    with infinity.init():
        model = ScaledModel.from_pretrained(tmp_path / "saved")
        with torch.no_grad():
            model.offset.copy_(model.inner.scale)
    infinity.wrap(model, infinity.Config())
    with infinity.engine(model) as engine:
        assert torch.equal(engine.state_dict()["offset"], plain.inner.scale)


def test_models_whose_code_gives_all_values_are_built_once(tmp_path: Path) -> None:
    class Whole(ScaledModel):
        def _init_weights(self, module: nn.Module) -> None:
            for buffer in module.buffers(recurse=False):
                buffer.fill_(1)

    saved(Whole, tmp_path)
    before = Whole.runs
    with infinity.init():
        model = Whole.from_pretrained(tmp_path)
    assert Whole.runs == before + 1
    assert model.inner.scale.tolist() == [1] * 4


def test_a_constructor_that_fails_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(OnceModel, tmp_path)
    monkeypatch.setattr(OnceModel, "runs", 0)
    with caplog.at_level(logging.WARNING, "infinity"), infinity.init():
        model = OnceModel.from_pretrained(tmp_path)
    assert not model.inner.scale.any() and model.known.tolist() == [7] * 3
    assert [each.getMessage() for each in caplog.records] == [
        f"OnceModel.from_pretrained inside infinity.init(): the buffer inner.{name} is in none of "
        "its files, and its constructor gives it no value when it runs once more (RuntimeError: "
        "once); it is zeros: write it after from_pretrained, or in _init_weights"
        for name in ("scale", "mask", "draws")
    ]
