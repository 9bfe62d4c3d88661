"""`infinity.get` and `infinity.set`: every state of a parameter, before and after steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from support.configs import config_of
from support.models import text_batch, transformer

pytestmark = pytest.mark.usefixtures("one_thread")

Wrap = Callable[..., Any]


@pytest.fixture
def wrap(tmp_path: Path) -> Iterator[Wrap]:
    made: list[infinity.Engine] = []

    def make(**options: Any) -> nn.Module:
        (tmp_path / str(len(made))).mkdir()
        config = {
            "nvme": tmp_path / str(len(made)),
            "gpu_memory": 1 << 20,
            "cpu_memory": 1 << 26,
            "cache": 0,
            "precision": "fp32",
        }
        model = infinity.wrap(transformer(), config_of(**config | options))
        made.append(infinity.engine(model))
        return model

    yield make
    for engine in made:
        engine.close()


def test_states_are_those_of_torch(wrap: Wrap) -> None:
    """Read before the first step and after each, and replaced in the middle."""
    plain, model = transformer(), wrap()
    optimizers = [
        torch.optim.AdamW(plain.parameters(), lr=1e-2),
        infinity.AdamW(model.parameters(), lr=1e-2),
    ]
    pairs = list(zip(plain.named_parameters(), model.parameters(), strict=True))
    for (name, theirs), ours in pairs:
        assert torch.equal(infinity.get(ours), theirs)
        assert torch.equal(infinity.get(ours, "master"), theirs)
        assert infinity.get(ours, "grad") is None
        for moment in ("exp_avg", "exp_avg_sq"):
            found = infinity.get(ours, moment)
            assert found.shape == theirs.shape and not found.any(), name
    for number in range(3):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            each(**text_batch(number)).loss.backward()
        if number == 1:
            for (_, theirs), ours in pairs[::2]:
                state = optimizers[0].state[theirs]
                state["exp_avg"].mul_(0.5)
                infinity.set(ours, "exp_avg", infinity.get(ours, "exp_avg") * 0.5)
                theirs.data.mul_(2)
                infinity.set(ours, "value", infinity.get(ours) * 2)
                theirs.grad.fill_(0.25)
                infinity.set(ours, "grad", torch.full(theirs.shape, 0.25))
        for optimizer in optimizers:
            optimizer.step()
        for (name, theirs), ours in pairs:
            state = optimizers[0].state[theirs] | {"value": theirs, "grad": theirs.grad}
            for kind in ("value", "exp_avg", "exp_avg_sq", "grad"):
                atol = 1e-6 if kind == "grad" else 1e-7
                torch.testing.assert_close(
                    infinity.get(ours, kind), state[kind].detach(), rtol=1e-5, atol=atol, msg=name
                )


@pytest.mark.parametrize("split", [True, False])
def test_masters_of_bf16(split: bool, wrap: Wrap) -> None:
    model = wrap(precision="bf16", split_master=split)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    weight, bias = model.blocks[0].up.weight, model.blocks[0].up.bias
    torch.manual_seed(0)
    master = torch.randn(weight.shape)
    before = infinity.get(bias, "master")
    infinity.set(weight, "master", master)
    assert torch.equal(infinity.get(weight, "master"), master)
    assert infinity.get(weight).dtype == torch.bfloat16
    torch.testing.assert_close(infinity.get(weight).float(), master, rtol=2**-7, atol=0)
    assert torch.equal(infinity.get(bias, "master"), before)
    infinity.set(weight, "value", torch.ones(weight.shape))
    assert torch.equal(infinity.get(weight, "master"), torch.ones(weight.shape))
    model(**text_batch(0)).loss.backward()
    optimizer.step()
    assert not torch.equal(infinity.get(weight, "master"), torch.ones(weight.shape))
    infinity.set(bias, "master", before)
    assert torch.equal(infinity.get(bias, "master"), before)


def test_other_rules_and_places(wrap: Wrap) -> None:
    for algorithm, name in (
        ("lion", "exp_avg"),
        ("momentum", "momentum_buffer"),
        ("adagrad", "sum"),
    ):
        model = wrap(algorithm=algorithm)
        weight = model.tokens.weight
        infinity.set(weight, name, torch.full(weight.shape, 0.5))
        assert torch.equal(infinity.get(weight, name), torch.full(weight.shape, 0.5))
        assert not infinity.get(model.norm.weight, name).any()
    with infinity.gathered(weight):
        assert torch.equal(infinity.get(weight), weight)
        with pytest.raises(RuntimeError, match=r"tokens\.weight cannot be set inside of a forward"):
            infinity.set(weight, "value", torch.zeros(64, 32))
    part = infinity.get(weight, "value", local=True)
    assert torch.equal(part, infinity.get(weight).view(-1))


def test_what_is_refused(wrap: Wrap) -> None:
    model = wrap(algorithm="sgd")
    weight = model.tokens.weight
    for use, text in (
        (
            lambda: infinity.get(weight, "exp_avg"),
            r"no state 'exp_avg'; it has 'value', 'grad', 'm",
        ),
        (lambda: infinity.get(torch.ones(2)), "take a parameter of a wrapped model"),
        (lambda: infinity.set(weight, "value", torch.ones(3)), r"has shape \(64, 32\), not \(3,\)"),
        (lambda: infinity.set(weight, "value", 3.0), r"tokens.weight is given 3.0; give a tensor"),
        (lambda: infinity.set(weight, "grad", None), r"tokens.weight is given None; give a tensor"),
        *(
            (lambda value=value: infinity.set(weight, "value", value), f"is given a {kind}; give")
            for value, kind in (
                (torch.ones(64, 32, device="meta"), "tensor on the meta device"),
                (torch.ones(64, 32).to_sparse(), "sparse_coo tensor"),
                (torch.ones(64, 32, dtype=torch.complex64), "complex tensor"),
            )
        ),
    ):
        with pytest.raises(infinity.ConfigError, match=text):
            use()
    for rank in (1, -1, "0"):
        with (
            pytest.raises(infinity.ConfigError, match=r"must be a rank of .*, 0 to 0"),
            infinity.gathered(weight, write_rank=rank),
        ):
            pass
    with torch.no_grad(), infinity.gathered(weight, write_rank=0):
        weight.fill_(3.0)
    assert torch.equal(infinity.get(weight), torch.full(weight.shape, 3.0))
    infinity.engine(model).close()
    with pytest.raises(infinity.EngineClosedError, match=r"tokens\.weight has no data any more"):
        infinity.get(weight)
