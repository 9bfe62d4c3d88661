"""Frozen parameters stay in the safetensors files that they come from: nothing of them is copied or
written, and the numbers are those of a copy."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import infinity
from infinity.placement.spec import Kind
from infinity.weights.load import open_weights
from support.adapted import (
    BASE,
    STEPS,
    WIDTH,
    batch,
    built,
    config,
    is_frozen,
    saved,
    train,
    written_by_the_kernel,
)
from support.discrete import DiscreteDevice
from support.models import FAMILIES
from support.probe import Probe
from support.rank_group import OnRanks

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(engine: infinity.Engine) -> dict[str, Any]:
    """What three steps make, with the bits of every parameter."""
    optimizer = infinity.AdamW([p for p in engine.model.parameters() if p.requires_grad], lr=1e-2)
    losses = train(engine.model, optimizer)
    return {"losses": losses, **engine.state_dict()}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == expected["losses"]
    for name, value in expected.items():
        assert name == "losses" or torch.equal(found[name], value), name


@pytest.fixture
def expected() -> dict[str, Any]:
    """What plain PyTorch makes of the same program."""
    model = built()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return {"losses": train(model, optimizer), **model.state_dict()}


@pytest.mark.parametrize("cache", [0, 32 << 10, 1 << 20])
def test_the_numbers_are_those_of_plain_pytorch(
    cache: int, expected: dict[str, Any], tmp_path: Path
) -> None:
    """A part of each block, or all of it, may be cached in host memory."""
    model = infinity.wrap(built(), config(tmp_path, cache=cache), weights=saved(tmp_path))
    with infinity.engine(model) as engine:
        found = trained(engine)
    for step, loss in enumerate(expected["losses"]):
        assert found["losses"][step] == pytest.approx(loss, rel=1e-6)
    for name, value in expected.items():
        if name != "losses" and is_frozen(name):
            assert torch.equal(found[name], value), name
    model = infinity.wrap(built(), config(tmp_path, read_in_place=False), weights=tmp_path)
    with infinity.engine(model) as engine:
        assert_same(trained(engine), found)


def test_nothing_but_adapters_is_written(tmp_path: Path) -> None:
    """By the count of the native engines and by that of the kernel, from before `wrap` on; and the
    base takes no space."""
    path, model = saved(tmp_path), built()
    before = written_by_the_kernel()
    infinity.wrap(model, config(tmp_path), weights=path)
    with infinity.engine(model) as engine:
        trainable = [u for u in engine.units if u.facts.trainable]
        rewritten = sum(b.nbytes for u in trainable for b in u.blocks.values())
        optimizer = infinity.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        train(model, optimizer)
        report = engine.report()
        written = sum(io.counters()["bytes_written"] for io in engine.ios)
        assert 0 < written <= rewritten * (STEPS + 1) < BASE
        assert written_by_the_kernel() - before <= rewritten * (STEPS + 1)
        assert report.in_files > BASE
        assert report.peaks["nvme"] < BASE
        frozen = [u for u in engine.units if not u.facts.trainable]
        assert {kind for u in frozen for kind in u.blocks} == {Kind.PARAM}


def test_the_copies_of_a_device_with_memory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes through staging has the same bits."""
    path = saved(tmp_path)
    model = infinity.wrap(built(), config(tmp_path), weights=path)
    with infinity.engine(model) as engine:
        found = trained(engine)
    monkeypatch.setattr(sys.modules["infinity.build"], "ComputeDevice", DiscreteDevice)
    least = {"device": "cpu", "gpu_cache": 0, "gpu_direct": "off", "poison": True}
    model = infinity.wrap(built(), config(tmp_path, **least), weights=path)
    with infinity.engine(model) as engine:
        assert_same(trained(engine), found)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_quantized_base(dtype: torch.dtype, tmp_path: Path) -> None:
    """Codes are read as bytes and keep their dtype, whatever `precision` says."""

    def quantized() -> nn.Module:
        torch.manual_seed(0)
        model = built()
        for block in model:
            codes = torch.randint(0, 9, (WIDTH + 1,)).to(dtype)
            block.codes = nn.Parameter(codes, requires_grad=False)
        return model

    path, values = saved(tmp_path), quantized().state_dict()
    codes = {name: value for name, value in values.items() if "codes" in name}
    save_file(codes, path / "codes.safetensors")
    settings = config(tmp_path, precision="bf16")
    model = infinity.wrap(quantized(), settings, weights=path / "codes.safetensors")
    with infinity.engine(model) as engine:
        assert 0 < engine.report().in_files < BASE
        optimizer = infinity.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for step in range(2):
            model(batch(step).bfloat16()).float().square().mean().backward()
            optimizer.step()
        found = engine.state_dict()
        assert all(found[name].dtype is dtype for name in codes)
        assert all(torch.equal(found[n].float(), value.float()) for n, value in codes.items())


def test_a_model_of_init_stays_in_its_files(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with infinity.init():
        model = built()
    model = infinity.wrap(model, config(tmp_path), weights=path)
    with infinity.engine(model) as engine:
        assert engine.report().in_files > BASE
        values = engine.state_dict()
    for name, value in built().state_dict().items():
        assert torch.equal(values[name], value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_pretrained_inside_init(dtype: torch.dtype, tmp_path: Path) -> None:
    """All of the base, once, where it has the dtype of its files; else nothing."""
    plain: Any = FAMILIES["llama"].build()
    plain.save_pretrained(tmp_path)
    with infinity.init():
        model: Any = type(plain).from_pretrained(tmp_path, dtype=dtype)
        model.lm_head = nn.Linear(plain.config.hidden_size, 3, bias=False, dtype=dtype)
    model.model.requires_grad_(False)
    infinity.wrap(model, config(tmp_path))
    with infinity.engine(model) as engine:
        base = sum(p.nbytes for p in plain.model.parameters())
        padding = 4096 * len(engine.units)
        expected = base if dtype is torch.float32 else 0
        assert expected <= engine.report().in_files <= expected + padding * (expected > 0)
        for name, value in model.model.state_dict().items():
            assert torch.equal(value, plain.model.state_dict()[name].to(dtype)), name


def test_a_file_that_changed_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    weights = open_weights(path, built())
    file = path / "2.safetensors"
    os.utime(file, ns=(1, 1))
    model = built()
    with pytest.raises(
        infinity.WeightsError, match=r"2\.safetensors has changed since its weights were opened"
    ):
        infinity.wrap(model, config(tmp_path), weights=weights)
    assert not list((tmp_path / "nvme").iterdir())


def test_a_file_that_is_deleted_stays_readable(tmp_path: Path) -> None:
    model = infinity.wrap(built(), config(tmp_path), weights=saved(tmp_path))
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with infinity.engine(model) as engine:
        values = engine.state_dict()
    for name, value in built().state_dict().items():
        assert torch.equal(values[name], value), name


def test_a_write_moves_the_unit_to_nvme(tmp_path: Path) -> None:
    """The file keeps its bytes, and the rest of the unit its values."""
    path = saved(tmp_path)
    bits = {file: file.read_bytes() for file in path.glob("*.safetensors")}
    model = infinity.wrap(built(), config(tmp_path), weights=path)
    with infinity.engine(model) as engine:
        whole = engine.report().in_files
        with torch.no_grad(), infinity.gathered(model[0].odd, write=True):
            model[0].odd.fill_(3)
        assert 0 < engine.report().in_files < whole
        infinity.set(model[0].odd, "value", torch.full((5,), 4.0))
        values = engine.state_dict()
        x = model(batch(0))
    plain = built()
    with torch.no_grad():
        plain[0].odd.fill_(4)
    for name, value in plain.state_dict().items():
        assert torch.equal(values[name], value), name
    torch.testing.assert_close(x, plain(batch(0)))
    assert {file: file.read_bytes() for file in bits} == bits


def test_a_write_without_room_changes_nothing(tmp_path: Path) -> None:
    """What is rewritten needs a place of its own."""
    options = {"nvme_memory": 4 << 20}
    model = infinity.wrap(built(), config(tmp_path, **options), weights=saved(tmp_path))
    with infinity.engine(model) as engine:
        while Probe(engine).nvme.extents.grow(4096 * 16):
            pass
        with (
            pytest.raises(
                infinity.BudgetError, match="are only read, and the nvme directories have"
            ),
            torch.no_grad(),
            infinity.gathered(model[0].odd, write=True),
        ):
            model[0].odd.fill_(3)
        assert torch.equal(engine.state_dict()["0.odd"], built()[0].odd)


def test_another_dtype_is_copied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "infinity")
    settings = config(tmp_path, precision="bf16")
    model = infinity.wrap(built(), settings, weights=saved(tmp_path))
    with infinity.engine(model) as engine:
        assert engine.report().in_files < BASE  # the codes stay in their files
    assert "of frozen parameters are copied: they have another dtype in the model" in caplog.text


# Two ranks


def work(task: Any, where: Path, rank: int) -> None:
    """One rank of two: see `support/rank_group`."""
    model = infinity.wrap(built(), config(where), weights=where)
    with infinity.engine(model) as engine:
        assert engine.report().in_files > 0
        found = trained(engine)
    if rank == 0:
        torch.save(found, where / "found.pt")


def test_each_rank_reads_its_shard(on_ranks: OnRanks, tmp_path: Path) -> None:
    saved(tmp_path)
    assert on_ranks("train") == ["done", "done"]
    found = torch.load(tmp_path / "found.pt")
    model = infinity.wrap(built(), config(tmp_path), weights=tmp_path, group=None)
    with infinity.engine(model) as engine:
        assert_same(trained(engine), found)
