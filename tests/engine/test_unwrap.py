"""`Engine.unwrap`: the model is an ordinary one again, with its values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.modules import division
from support.configs import config_of
from support.models import text_batch, transformer

pytestmark = [pytest.mark.usefixtures("one_thread")]

BUDGETS = {"gpu_memory": 2 << 20, "cpu_memory": 8 << 20, "cache": 0}


def wrapped(model: nn.Module, directory: Path, **options: Any) -> nn.Module:
    return infinity.wrap(model, config_of(**{"nvme": [directory], **BUDGETS, **options}))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for number in steps:
        loss = model(**text_batch(number)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same(found: nn.Module, expected: nn.Module) -> None:
    assert list(map(repr, found.modules())) == list(map(repr, expected.modules()))
    names = [name for name, _ in expected.named_parameters(remove_duplicate=False)]
    assert [name for name, _ in found.named_parameters(remove_duplicate=False)] == names
    for name in names:
        mine, other = found.get_parameter(name), expected.get_parameter(name)
        assert (type(mine), mine.requires_grad) == (nn.Parameter, other.requires_grad)
        assert torch.equal(mine, other), name


def test_a_model_of_plain_pytorch_again(tmp_path: Path) -> None:
    """It trains as before, by an optimizer of torch, and can be pickled."""
    plain = transformer()
    rest = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = train(plain, rest, range(2))
    model = wrapped(transformer(), tmp_path, algorithm="other")
    kept = dict(model.named_parameters())
    engine = infinity.engine(model)
    optimizer = infinity.adapt(torch.optim.SGD, model.parameters(), lr=0.1)
    found = train(model, optimizer, range(2))
    assert engine.unwrap() is model
    assert not engine.is_open
    assert not [path for path in tmp_path.iterdir() if path.stat().st_size]
    assert all(parameter is kept[name] for name, parameter in model.named_parameters())
    same(model, plain)
    found += train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(2, 4))
    assert found == expected + train(plain, rest, range(2, 4))
    torch.save(model, tmp_path / "model")
    with pytest.raises(infinity.EngineClosedError):
        engine.unwrap()


@pytest.mark.parametrize("is_written", [False, True])
def test_masters_outlive_an_engine(tmp_path: Path, is_written: bool) -> None:
    """bf16 parameters go on from their masters, and from what was written to them."""
    options = {"precision": "bf16", "algorithm": "sgd"}
    model = wrapped(transformer(), tmp_path, **options)
    train(model, infinity.SGD(model.parameters(), lr=1e-3), range(2))
    (tmp_path / "other").mkdir()
    other = wrapped(transformer(), tmp_path / "other", **options)
    train(other, infinity.SGD(other.parameters(), lr=1e-3), range(2))
    infinity.engine(model).unwrap()
    assert model.norm.weight.dtype == torch.bfloat16
    if is_written:
        value = torch.full_like(model.tokens.weight, 0.125)
        model.tokens.weight.data.copy_(value)
        infinity.set(other.tokens.weight, "value", value)
    wrapped(model, tmp_path, **options)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(infinity.get(mine, "master"), infinity.get(its, "master"))
    found = train(model, infinity.SGD(model.parameters(), lr=1e-3), range(2, 4))
    assert found == train(other, infinity.SGD(other.parameters(), lr=1e-3), range(2, 4))
    for each in (model, other):
        infinity.engine(each).close()


def test_weights_in_tiles_are_whole_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that `wrap` has cut; also tied ones, and then with their masters."""
    monkeypatch.setattr(division, "LEAST_SPLIT", 2 << 10)
    options = {"gpu_memory": 24 << 10, "precision": "bf16", "algorithm": "sgd"}
    model = wrapped(transformer(), tmp_path, **options)
    engine = infinity.engine(model)
    assert "tokens.weight" in engine.report().tiled
    train(model, infinity.SGD(model.parameters(), lr=1e-3), range(1))
    masters = {name: infinity.get(p, "master") for name, p in engine.model.named_parameters()}
    expected = transformer().bfloat16()
    expected.load_state_dict(engine.state_dict())
    engine.unwrap()
    same(model, expected)
    assert model.head.weight is model.tokens.weight
    wrapped(model, tmp_path, **options)
    for name, parameter in model.named_parameters():
        assert torch.equal(infinity.get(parameter, "master"), masters[name]), name
    infinity.engine(model).close()


def test_inside_of_its_use(tmp_path: Path) -> None:
    """Nothing is changed."""
    model = wrapped(transformer(), tmp_path)
    engine = infinity.engine(model)
    handle = model.norm.register_forward_hook(lambda *_: engine.unwrap())
    with pytest.raises(RuntimeError, match=r"engine\.unwrap\(\) cannot be called inside"):
        model(**text_batch(0))
    handle.remove()
    with (
        infinity.gathered(model.tokens.weight),
        pytest.raises(infinity.ConfigError, match=r"in use; call engine\.unwrap\(\) outside of"),
    ):
        engine.unwrap()
    train(model, infinity.AdamW(model.parameters()), range(1))
    engine.close()


def test_a_parameter_that_came_after_wrap_is_not_lost(tmp_path: Path) -> None:
    """A checkpoint without it is refused. State dicts have it."""
    (drive := tmp_path / "drive").mkdir()
    model = wrapped(transformer(), drive)
    model.blocks[0].register_parameter("gain", nn.Parameter(torch.ones(3)))
    engine = infinity.engine(model)
    assert torch.equal(engine.state_dict()["blocks.0.gain"], torch.ones(3))
    refused = (
        r"blocks\.0\.gain came to the model after infinity\.wrap, and a checkpoint of the engine "
        r"would lack it: wrap the model once more, infinity\.wrap\(model, config\), before it is "
        r"trained; model\.state_dict\(\) has it"
    )
    with pytest.raises(infinity.ConfigError, match=refused):
        engine.save_checkpoint(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    engine = infinity.engine(wrapped(model, drive))
    engine.save_checkpoint(tmp_path / "saved")
    engine.close()
