"""torch.compile, CUDA graphs, autocast and attention kernels on a GPU, beside the engine: as plain
PyTorch, or refused.

Their kernels add in no fixed order, so numbers are compared to a tolerance;
`parity/test_compile.py`, `test_autocast.py` and `test_other_tools.py` compare bits on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import infinity
from support.configs import config_of
from support.models import Transformer, text_batch, transformer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Of inductor, whose warnings change from one torch to the next.
    pytest.mark.filterwarnings("ignore"),
]
SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}
MOVING: dict[str, Any] = {"parameters": "nvme", "gpu_memory": 190_000}  # bytes: not all units fit
RESIDENT: dict[str, Any] = {"parameters": "gpu"}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def batch(step: int) -> dict[str, torch.Tensor]:
    return {name: value.cuda() for name, value in text_batch(step).items()}


def wrapped(model: nn.Module, directory: Path, **settings: Any) -> nn.Module:
    settings = {
        "gpu_memory": 1 << 22,
        "cpu_memory": 1 << 26,
        "cache": 0,
        "precision": "fp32",
        "device": "cuda",
    } | settings
    return infinity.wrap(model, config_of(nvme=directory, **settings))


def train(model: nn.Module, optimizer: Any, steps: int = 4, compiled: bool = False) -> list[float]:
    losses = []
    for step in range(steps):
        with torch._dynamo.config.patch(error_on_recompile=compiled and step >= 2):
            loss = model(**batch(step)).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain_losses(prepare: Callable[[Transformer], object] = lambda model: None) -> list[float]:
    model = transformer(depth=3).cuda()
    prepare(model)
    return train(model, torch.optim.AdamW(model.parameters(), **SETTINGS))


@pytest.mark.parametrize("placement", [MOVING, RESIDENT], ids=["moving", "resident"])
def test_compiled_blocks(placement: dict[str, Any], tmp_path: Path) -> None:
    model = wrapped(transformer(depth=3), tmp_path, **placement)
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    losses = train(model, infinity.AdamW(model.parameters(), **SETTINGS), compiled=True)
    assert losses == pytest.approx(plain_losses(), rel=1e-4)


def test_graphs_of_inductor_where_parameters_stay(tmp_path: Path) -> None:
    """mode="reduce-overhead" captures graphs inside of a block's forward, where no parameter is
    brought; addresses must stay."""
    model = wrapped(transformer(depth=3), tmp_path, **RESIDENT)
    for block in model.blocks:
        block.compile(mode="reduce-overhead")
    losses = train(model, infinity.AdamW(model.parameters(), **SETTINGS), steps=4)
    assert losses == pytest.approx(plain_losses(), rel=1e-4)


@pytest.mark.parametrize("placement", [MOVING, RESIDENT], ids=["moving", "resident"])
def test_a_captured_graph_is_refused(placement: dict[str, Any], tmp_path: Path) -> None:
    model = wrapped(transformer(depth=3), tmp_path, **placement)
    optimizer = infinity.AdamW(model.parameters(), **SETTINGS)
    inputs = batch(0)
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match="a CUDA graph is being captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        model(**inputs)
    assert train(model, optimizer) == pytest.approx(plain_losses(), rel=1e-4)


@pytest.mark.parametrize("placement", [MOVING, RESIDENT], ids=["moving", "resident"])
def test_a_graph_of_the_user_is_captured_beside_an_update(
    placement: dict[str, Any], tmp_path: Path
) -> None:
    """In CUDA's global mode, in which a call of any other thread may break it."""
    model = wrapped(transformer(depth=3), tmp_path, **placement)
    optimizer = infinity.AdamW(model.parameters(), **SETTINGS)
    losses, x = [], torch.zeros(1000, device="cuda")
    for step in range(4):
        loss = model(**batch(step)).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):  # the updater is at work
            for _ in range(2000):
                x += 1
        optimizer.zero_grad()
        graph.replay()
    assert bool((x == 4 * 2000).all())
    assert losses == pytest.approx(plain_losses(), rel=1e-4)


def test_graphed_callables_are_refused(tmp_path: Path) -> None:
    model = transformer(depth=3).cuda()
    torch.cuda.make_graphed_callables(
        model.blocks[1].up, (torch.randn(2, 8, 32, device="cuda", requires_grad=True),)
    )
    with pytest.raises(
        infinity.ConfigError,
        match=r"the forward of blocks\.1\.up was replaced by make_graphed_callables",
    ):
        wrapped(model, tmp_path)


@pytest.mark.parametrize("placement", [MOVING, RESIDENT], ids=["moving", "resident"])
def test_autocast(placement: dict[str, Any], tmp_path: Path) -> None:
    def mixed(model: nn.Module) -> None:
        model.forward = torch.autocast("cuda", dtype=torch.bfloat16)(model.forward)

    model = transformer(depth=3)
    mixed(model)
    wrapped(model, tmp_path, **placement)
    losses = train(model, infinity.AdamW(model.parameters(), **SETTINGS))
    assert losses == pytest.approx(plain_losses(mixed), rel=1e-2)


class Keys(nn.Module):
    """Attention whose keys and values are parameters, so that its kernel saves views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = (nn.Parameter(torch.randn(1, 4, 64, 64)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(x, self.keys, self.values, is_causal=True)


@pytest.mark.parametrize("backend", ["MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"])
def test_attention(backend: str, tmp_path: Path) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(Keys() for _ in range(4))).bfloat16()

    plain, model = make().cuda(), make()
    wrapped(model, tmp_path, precision="bf16", gpu_memory=256 << 10)
    x = torch.randn(1, 4, 64, 64, device="cuda", dtype=torch.bfloat16)
    with sdpa_kernel(getattr(SDPBackend, backend)):
        for each in (plain, model):
            each(x).float().square().sum().backward()
    engine = infinity.engine(model)
    for name, parameter in model.named_parameters():
        expected = plain.get_parameter(name).grad.cpu().float()
        assert (engine.gradient(parameter).float() - expected).norm() <= 0.02 * expected.norm(), (
            name
        )
