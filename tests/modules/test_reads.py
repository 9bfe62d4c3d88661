"""A parameter is read outside of a forward as a plain one is: its metadata without data, its value
as a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from support.configs import config_of
from support.models import Transformer, text_batch, transformer
from support.probe import Probe

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def wrapped(tmp_path: Path) -> Iterator[Any]:
    config = config_of(
        nvme=tmp_path, gpu_memory=1 << 20, cpu_memory=1 << 26, cache=0, precision="fp32"
    )
    model = infinity.wrap(transformer(), config)
    with infinity.engine(model):
        yield model


METADATA: dict[str, Callable[[Any], object]] = {
    "zeros_like": torch.zeros_like,
    "zeros of data": lambda p: torch.zeros_like(p.data),
    "full_like": lambda p: torch.full_like(p, 3.0),
    "other dtype": lambda p: torch.ones_like(p, dtype=torch.float64),
    "empty_like": lambda p: torch.empty_like(p).shape,
    "contiguous": lambda p: torch.empty_like(p).is_contiguous(),
    "new_zeros": lambda p: p.new_zeros(3),
    "new_tensor": lambda p: p.new_full((2,), 1.0),
    "data.shape": lambda p: (p.data.shape, p.data.dtype, p.data.device, p.data.numel()),
    "detached": lambda p: (p.detach().shape, p.detach().requires_grad),
    "is_cpu": lambda p: (p.is_cpu, p.is_cuda, p.is_mps, p.is_xpu),
    "get_device": lambda p: p.get_device(),
    "_version": lambda p: type(attrgetter("_version")(p)),
    "is_signed": lambda p: (p.is_signed(), p.is_conj(), p.is_inference(), p.is_same_size(p)),
    "to": lambda p: p.to("cpu", torch.float32) is p,
}
VALUES: dict[str, Callable[[Any], object]] = {
    "add": lambda p: p + 1,
    "data": lambda p: p.data.clone(),
    "norm of data": lambda p: p.data.norm(),
    "row": lambda p: p[3],
    "view": lambda p: p.view(-1)[:5],
    "numpy": lambda p: torch.from_numpy(p.detach().cpu().numpy().copy()),
    "tolist": lambda p: torch.tensor(p.tolist()),
    "item": lambda p: p.mean().item(),
    "double": lambda p: p.double(),
    "cat": lambda p: torch.cat([p, torch.zeros(1, 32), p]),
    "equal": lambda p: torch.equal(p, p),
    "vector": lambda p: nn.utils.parameters_to_vector([p, p]),
    "ema": lambda p: torch.zeros_like(p).lerp_(p.detach(), 0.1),
    "into": lambda p: torch.zeros(64, 32).copy_(p),
    "foreach": lambda p: torch.stack(torch._foreach_norm([p, p])),
    "finite": lambda p: torch.isfinite(p).all(),
    "embedding": lambda p: nn.functional.embedding(torch.tensor([1]), p),
}


def same(found: Any, expected: Any) -> bool:
    if not isinstance(expected, torch.Tensor):
        return bool(found == expected)
    return torch.equal(found, expected) and found.dtype == expected.dtype


@pytest.mark.parametrize("name", METADATA)
def test_metadata_reads_nothing(name: str, wrapped: Transformer) -> None:
    (io,) = infinity.engine(wrapped).ios
    before = io.counters()["bytes_read"]
    assert same(METADATA[name](wrapped.tokens.weight), METADATA[name](transformer().tokens.weight))
    assert io.counters()["bytes_read"] == before


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", VALUES)
def test_a_value(name: str, grad: bool, wrapped: Transformer) -> None:
    with torch.set_grad_enabled(grad):
        found = VALUES[name](wrapped.tokens.weight)
        expected = VALUES[name](transformer().tokens.weight)
    assert same(found, expected)
    if grad:
        assert getattr(found, "requires_grad", False) == getattr(expected, "requires_grad", False)
    assert all(unit.data.state.name == "SHARDED" for unit in infinity.engine(wrapped).units)


def test_a_value_is_that_of_after_the_last_step(wrapped: Transformer) -> None:
    optimizer = infinity.AdamW(wrapped.parameters(), lr=1e-2)
    for number in range(3):
        wrapped(**text_batch(number)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found = [p.detach().clone() for p in wrapped.parameters()]
        state = infinity.engine(wrapped).state_dict()
        for (name, _), value in zip(wrapped.named_parameters(), found, strict=True):
            assert torch.equal(value, state[name])


def test_a_loss_of_parameters_has_gradients(wrapped: Transformer) -> None:
    """Weight decay that a user writes, outside of a forward."""
    plain = transformer()
    for model in (plain, wrapped):
        loss = model(**text_batch(0)).loss
        loss = loss + 0.1 * sum(p.pow(2).sum() for p in model.parameters())
        loss.backward()
    for (name, theirs), ours in zip(plain.named_parameters(), wrapped.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.clone(), theirs.grad, rtol=1e-5, atol=1e-7, msg=name)


def test_a_read_takes_the_chunks_of_its_parameter(tmp_path: Path) -> None:
    """And not all of its unit."""
    inner = nn.Sequential(nn.Linear(512, 1024, bias=False), nn.Linear(1024, 4, bias=False))
    config = config_of(
        nvme=tmp_path, gpu_memory=1 << 24, cpu_memory=1 << 22, cache=0, precision="fp32"
    )
    model = infinity.wrap(nn.Sequential(inner), config, units=[inner])
    with infinity.engine(model) as engine:
        (unit,) = engine.units
        before = engine.io.counters()["bytes_read"]
        inner[1].weight.sum()
        read = engine.io.counters()["bytes_read"] - before
        assert 0 < read <= 4 * Probe(engine).chunk_elements < unit.facts.nbytes
