"""`examples/deepspeed_loop.py` is a loop for DeepSpeed with one import changed."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from infinity.deepspeed.schedulers import WarmupDecayLR
from support.roads import API, road

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLES = Path(__file__).parents[2] / "examples"
LOOP = EXAMPLES / "deepspeed_loop.py"


def run(
    config: dict[str, Any],
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> list[float]:
    """The losses that the example prints."""
    path = directory / "ds_config.json"
    path.write_text(json.dumps(config))
    arguments = ["--deepspeed_config", str(path), "--checkpoint", str(directory / "out")]
    monkeypatch.setattr(sys, "argv", [str(LOOP), *arguments])
    runpy.run_path(str(LOOP), run_name="__main__")
    return [float(found) for found in re.findall(r"loss (\S+),", capsys.readouterr().out)]


def configuration(directory: Path, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((EXAMPLES / "deepspeed_loop.json").read_text())
    for block in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][block]["nvme_path"] = str(directory / "nvme")
    return {**config, "infinity": {"tuning": {"device": "cpu"}}, **changes}


def plain(config: dict[str, Any]) -> list[float]:
    """Losses of the same loop without an engine, in fp32."""
    torch.manual_seed(0)
    model: nn.Module = runpy.run_path(str(LOOP))["Model"](width=64, depth=4)
    x = torch.randn(160, 64)
    data = TensorDataset(x, x[:, :1] - x[:, 1:2])
    settings = config["optimizer"]["params"]
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    scheduler = WarmupDecayLR(optimizer, **config["scheduler"]["params"])
    losses = []
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    for number, (rows, wanted) in enumerate(DataLoader(data, batch_size=4, sampler=sampler)):
        loss = nn.functional.mse_loss(model(rows), wanted)
        (loss / 2).backward()
        if number % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config["gradient_clipping"])
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
    return losses


@road(API, "a loop", "`python`", 3)
def test_its_losses_are_those_of_plain_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configuration(tmp_path, bf16={"enabled": False})
    found = run(config, tmp_path, monkeypatch, capsys)
    # As printed, with four digits.
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(plain(config)), rtol=1e-6, atol=5.1e-5
    )
    assert (tmp_path / "out" / "latest").read_text() == "global_step20"
    assert "head.weight" in torch.load(tmp_path / "out" / "pytorch_model.bin")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_it_trains_in_16_bits(
    precision: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = configuration(tmp_path, **{"bf16": {"enabled": False}, precision: {"enabled": True}})
    found = run(config, tmp_path, monkeypatch, capsys)
    expected = plain(config)[: len(found)]
    assert len(found) >= 15
    assert sum(found) == pytest.approx(sum(expected), rel=0.3)
