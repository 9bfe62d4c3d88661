"""Frozen parameters of any width, above all of one byte: their bits survive every home, and
quantized fine-tuning is exact.

Two processes over gloo call `work` of this file, too (see `support/rank_group.py`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import infinity
from infinity.placement.spec import Kind
from infinity.sharding.layout import FlatLayout
from support.configs import config_of
from support.machine import PAGE
from support.models import rounded
from support.rank_group import RANKS, OnRanks

pytestmark = pytest.mark.usefixtures("one_thread")

ONE_BYTE = (torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)
WIDER = (torch.int16, torch.int64, torch.float64, torch.complex64, torch.complex128)
HOMES: dict[str, dict[str, Any]] = {
    "nvme": {"cache": 0},
    "nvme, cached": {},
    "cpu": {"parameters": "cpu"},
    "gpu": {"parameters": "gpu"},
}
ROOMY: dict[str, Any] = {
    "gpu_memory": 8 << 20,
    "cpu_memory": 32 << 20,
    "device": "cpu",
    "threads": 1,
    "poison": True,
}


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit pattern of `dtype`, NaN with payloads included; of bool only the two that there
    are."""
    generator = torch.Generator().manual_seed(seed)
    most = 2 if dtype is torch.bool else 256
    codes = torch.randint(0, most, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    return codes.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().reshape(-1).view(torch.uint8)


class Frozen(nn.Module):
    """Frozen parameters of one dtype beside a trainable one; the forward hands out their bits."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        values = [random_bits(shape, dtype, seed + number) for number, shape in enumerate(shapes)]
        self.codes = nn.ParameterList(nn.Parameter(value, requires_grad=False) for value in values)
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self) -> list[torch.Tensor]:
        return [bits(code) for code in self.codes]


# Layout


@given(
    st.lists(st.integers(0, 9000), min_size=1, max_size=5),
    st.integers(1, 5),
    st.sampled_from([*ONE_BYTE, *WIDER, torch.bfloat16]),
)
@settings(deadline=None)
def test_every_shard_is_whole_pages_and_every_parameter_begins_aligned(
    sizes: list[int], ranks: int, dtype: torch.dtype
) -> None:
    layout = FlatLayout([(size,) for size in sizes], ranks, itemsize=dtype.itemsize)
    assert layout.shard_numel * dtype.itemsize % PAGE == 0
    assert layout.shard_numel * 2 % PAGE == 0 or dtype.itemsize == 1, "also of states of two bytes"
    for place in layout.places:
        assert place.offset * dtype.itemsize % 64 == 0, "a cache line, and a view of any dtype"
    padding = layout.numel - layout.places[-1].end
    assert (
        padding * dtype.itemsize < ranks * PAGE * max(dtype.itemsize // 2, 1) + 64 * dtype.itemsize
    )


# One rank


@given(
    st.lists(st.integers(0, 9000), min_size=1, max_size=3).filter(any),
    st.sampled_from(ONE_BYTE),
    st.sampled_from(list(HOMES)),
    st.integers(0, 99),
)
@settings(deadline=None, max_examples=40)
def test_bits_in_are_bits_out(sizes: list[int], dtype: torch.dtype, home: str, seed: int) -> None:
    with tempfile.TemporaryDirectory() as nvme:
        check_bits([(size,) for size in sizes], dtype, {"nvme": [nvme]} | HOMES[home], seed)


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("dtype", [*ONE_BYTE, *WIDER], ids=str)
def test_bits_of_many_chunks_survive(dtype: torch.dtype, home: str, tmp_path: Path) -> None:
    """A chunk on its way to the host has one size in elements, so wide ones must take more
    chunks."""
    check_bits(
        [(3, 30_001), (5,)],
        dtype,
        {"nvme": [tmp_path], "cpu_memory": 2 << 20} | HOMES[home],
        seed=1,
    )


def check_bits(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, config: dict[str, Any], seed: int
) -> None:
    expected = [bits(code) for code in Frozen(shapes, dtype, seed).codes]
    model = infinity.wrap(Frozen(shapes, dtype, seed), config_of(**ROOMY | config))
    with infinity.engine(model) as engine:
        for unit in engine.units:
            for block in unit.blocks.values():
                assert (
                    block.nbytes % PAGE == 0
                    and block.placed.cached_bytes % PAGE == 0
                    and block.spec.span % PAGE == 0
                )
        for _ in range(2):
            assert all(map(torch.equal, model(), expected))
        with infinity.gathered(model):
            assert all(
                torch.equal(bits(code), value)
                for code, value in zip(model.codes, expected, strict=True)
            )
        states = engine.state_dict()
        weights = dict(engine.weights())
        for number, value in enumerate(expected):
            for found in (states[f"codes.{number}"], weights[f"codes.{number}"]):
                assert found.dtype is dtype and found.shape == shapes[number]
                assert torch.equal(bits(found), value)


@pytest.mark.parametrize("dtype", ONE_BYTE, ids=str)
def test_a_write_inside_of_gathered_stays(dtype: torch.dtype, tmp_path: Path) -> None:
    model = infinity.wrap(
        Frozen([(100,), (70, 70)], dtype), config_of(nvme=[tmp_path], **ROOMY | HOMES["nvme"])
    )
    value = random_bits((70, 70), dtype, seed=7)
    with infinity.engine(model) as engine:
        with infinity.gathered(model, write=True):
            model.codes[1].copy_(value)
        assert torch.equal(model()[1], bits(value))
        assert torch.equal(bits(engine.state_dict()["codes.1"]), bits(value))
        assert torch.equal(
            bits(engine.state_dict()["codes.0"]), bits(Frozen([(100,)], dtype).codes[0])
        )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("dtype", ONE_BYTE[3:], ids=str)
def test_precision_does_not_widen_a_frozen_float8(
    dtype: torch.dtype, precision: str, tmp_path: Path
) -> None:
    """It is the code of something quantized; a frozen fp32 parameter does take the precision."""
    model = Frozen([(100,)], dtype)
    model.gain.requires_grad_(False)
    model = infinity.wrap(model, config_of(nvme=[tmp_path], precision=precision, **ROOMY))
    with infinity.engine(model) as engine:
        assert engine.state_dict()["codes.0"].dtype is dtype
        assert (
            engine.state_dict()["gain"].dtype
            is {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        )


@pytest.mark.parametrize("dtype", ONE_BYTE, ids=str)
def test_a_checkpoint_has_them_in_their_own_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    shapes: list[tuple[int, ...]] = [(300, 333), (7,)]
    elements = 300 * 333 + 7
    saved = Frozen(shapes, dtype, seed=1)
    expected = [bits(code) for code in saved.codes]
    config = config_of(nvme=[tmp_path / "nvme"], **ROOMY)
    (tmp_path / "nvme").mkdir()
    model = infinity.wrap(saved, config)
    with infinity.engine(model) as engine:
        engine.save_checkpoint(tmp_path / "checkpoint")
    size = sum(file.stat().st_size for file in (tmp_path / "checkpoint").iterdir())
    assert elements < size < 1.5 * elements, "one byte for each of them"
    model = infinity.wrap(Frozen(shapes, dtype, seed=2), config)
    with infinity.engine(model) as engine:
        engine.load_checkpoint(tmp_path / "checkpoint")
        assert all(map(torch.equal, model(), expected))


# A quantized base under adapters


class Quantized(nn.Module):
    """A linear layer of one-byte codes with a scale, a mask that autograd saves, and a low-rank
    adapter."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        codes = torch.randint(-100, 100, (width, width)).to(dtype)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.mask = nn.Parameter(torch.rand(width) < 0.9, requires_grad=False)
        self.signs = nn.Parameter(
            torch.randint(-1, 2, (width,), dtype=torch.int8), requires_grad=False
        )
        self.register_buffer("scale", torch.rand(width) / 500)
        self.down = nn.Linear(width, 4, bias=False)
        self.up = nn.Linear(4, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.codes.to(x.dtype) * self.scale.to(x.dtype)
        y = x @ weight.t() + self.up(self.down(x))
        return x + torch.where(self.mask, torch.tanh(y), y * self.signs)


def quantized(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Quantized(72, dtype) for _ in range(4)))


def batch(step: int, dtype: torch.dtype, part: slice = slice(None)) -> torch.Tensor:
    return torch.randn(4, 72, generator=torch.Generator().manual_seed(step))[part].to(dtype)


# A rate whose product with a gradient is exact, so that SGD has one way to round.
STEPS, RATE = 3, 0.125
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
Trained = tuple[list[float], dict[str, torch.Tensor]]


def plain(dtype: torch.dtype, precision: str) -> Trained:
    """PyTorch alone, with fp32 masters of what is trained."""
    model, floats = quantized(dtype), FLOATS[precision]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {name: p.detach().clone() for name, p in trained.items()}
    losses = []
    for step in range(STEPS):
        for name, parameter in trained.items():
            parameter.data = rounded(masters[name], floats)
            parameter.grad = None
        loss = model(batch(step, floats)).square().mean()
        loss.backward()
        losses.append(loss.item())
        for name, parameter in trained.items():
            assert parameter.grad is not None
            masters[name] -= RATE * parameter.grad.float()
    return losses, {
        name: rounded(masters[name], floats) if name in masters else p
        for name, p in model.named_parameters()
    }


def managed(dtype: torch.dtype, precision: str, config: dict[str, Any]) -> Trained:
    model = infinity.wrap(
        quantized(dtype), config_of(precision=precision, algorithm="sgd", **ROOMY | config)
    )
    with infinity.engine(model) as engine:
        optimizer = infinity.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
        losses = []
        for step in range(STEPS):
            loss = model(batch(step, FLOATS[precision])).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, {
            name: value for name, value in engine.state_dict().items() if not name.endswith("scale")
        }


def check_same(mine: Trained, theirs: Trained) -> None:
    assert mine[0] == theirs[0]
    assert mine[1].keys() == theirs[1].keys()
    for name, value in theirs[1].items():
        assert mine[1][name].dtype is value.dtype and torch.equal(
            bits(mine[1][name]), bits(value)
        ), name


@pytest.mark.parametrize("precision", FLOATS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_fine_tuning_a_quantized_base_is_plain_pytorch(
    dtype: torch.dtype, precision: str, tmp_path: Path, smallest: Callable[..., dict[str, int]]
) -> None:
    expected = plain(dtype, precision)
    placements = [
        *HOMES.values(),
        {"optimizer": "cpu", "gradients": "nvme"},
        {"parameters": "cpu", "optimizer": "cpu"},
    ]
    for config in placements:
        check_same(managed(dtype, precision, {"nvme": [tmp_path]} | config), expected)
    config = {
        "nvme": [tmp_path],
        "precision": precision,
        "algorithm": "sgd",
        "device": "cpu",
        "threads": 1,
    }
    least = smallest(quantized(dtype), **config)
    check_same(managed(dtype, precision, {"nvme": [tmp_path], "cache": 0} | least), expected)


# Two ranks


def work(task: dict[str, Any], where: Path, rank: int) -> None:
    """On a rank: bits of every dtype, read and loaded from a checkpoint, then steps of the
    quantized model."""
    nvme = where / f"nvme{rank}"
    nvme.mkdir()
    config = ROOMY | {"nvme": [nvme], "stage": task["stage"]} | HOMES[task["home"]]
    if task["stage"] in (1, 2):  # which keep them gathered on every rank
        config |= {"parameters": "gpu", "gradients": "gpu"}
    for dtype in ONE_BYTE:
        shapes: list[tuple[int, ...]] = [(3001,), (50, 99)]
        expected = [bits(code) for code in Frozen(shapes, dtype, seed=1).codes]
        model = infinity.wrap(
            Frozen(shapes, dtype, seed=1), config_of(**config), group=dist.group.WORLD
        )
        checkpoint = where / f"checkpoint {dtype}"
        with infinity.engine(model) as engine:
            assert all(map(torch.equal, model(), expected)), dtype
            assert all(
                torch.equal(bits(engine.state_dict()[f"codes.{n}"]), value)
                for n, value in enumerate(expected)
            ), dtype
            for unit in engine.units:
                assert unit.blocks[Kind.PARAM].nbytes % PAGE == 0
            engine.save_checkpoint(checkpoint)
        model = infinity.wrap(
            Frozen(shapes, dtype, seed=2), config_of(**config), group=dist.group.WORLD
        )
        with infinity.engine(model) as engine:
            engine.load_checkpoint(checkpoint)
            assert all(map(torch.equal, model(), expected)), dtype
    model = infinity.wrap(
        quantized(torch.int8), config_of(algorithm="sgd", **config), group=dist.group.WORLD
    )
    with infinity.engine(model) as engine:
        optimizer = infinity.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
        for step in range(STEPS):
            model(
                batch(step, torch.float32, slice(2 * rank, 2 * rank + 2))
            ).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.save(engine.state_dict(), where / f"result{rank}.pt")


@pytest.mark.parametrize(
    ("stage", "home"), [(3, "nvme"), (3, "cpu"), (2, "gpu"), (1, "gpu"), (0, "nvme, cached")]
)
def test_two_ranks_share_them(stage: int, home: str, on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks({"stage": stage, "home": home}) == ["done"] * RANKS
    results = [
        torch.load(tmp_path / f"result{rank}.pt", weights_only=True) for rank in range(RANKS)
    ]
    model = quantized(torch.int8)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    for step in range(STEPS):
        for part in (slice(0, 2), slice(2, 4)):
            (model(batch(step, torch.float32, part)).square().mean() / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        for result in results:
            assert result[name].dtype is value.dtype
            assert torch.equal(bits(result[name]), bits(value)), name
