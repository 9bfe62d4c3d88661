"""Gradients accumulated in fp32 of parameters in bf16 or fp16: bitwise what plain torch gives that
does so by hand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.placement.spec import Kind
from support.configs import config_of
from support.models import rounded, text_batch, transformer
from support.specified_adamw import SpecifiedAdamW, convert

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PARTS = 4  # micro-batches per step


class Reference:
    """Plain torch: low-precision parameters, fp32 masters, and gradients added up in fp32 outside
    of `.grad`."""

    def __init__(self, dtype: torch.dtype, max_grad_norm: float | None) -> None:
        self.model = convert(transformer(), dtype)
        self.named = dict(self.model.named_parameters())
        self.masters = {name: nn.Parameter(p.master) for name, p in self.named.items()}
        self.optimizer = SpecifiedAdamW(list(self.masters.values()), max_grad_norm=max_grad_norm)

    def accumulate(self, number: int) -> None:
        self.model(**text_batch(number)).loss.backward()
        for name, p in self.named.items():
            master = self.masters[name]
            master.grad = p.grad.float() if master.grad is None else master.grad + p.grad.float()
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        for name, master in self.masters.items():
            self.named[name].copy_(rounded(master, self.named[name].dtype))
            master.grad = None


@pytest.mark.parametrize(
    "config",
    [
        {}, {"gradients": "nvme"}, {"update": "speculative"}, {"gradients": "gpu"},
        {"optimizer": "cpu", "parameters": "cpu", "instruction_set": "scalar"},
    ],
    ids=lambda config: "-".join(config.values()) or "default",
)  # fmt: skip
@pytest.mark.parametrize("precision", DTYPES)
def test_training_is_bitwise_that_of_a_reference(
    precision: str, config: dict[str, Any], tmp_path: Path
) -> None:
    settings = {
        "gpu_memory": "4MiB",
        "cpu_memory": "8MiB",
        "poison": True,
        "gradient_precision": "fp32",
    } | config
    model = infinity.wrap(transformer(), config_of(nvme=tmp_path, precision=precision, **settings))
    reference = Reference(DTYPES[precision], max_grad_norm=1.0)
    with infinity.engine(model) as engine:
        unscaled = infinity.LossScaler(1.0, window=None)
        optimizer = infinity.AdamW(
            model.parameters(),
            lr=1e-3,
            betas=(0.9, 0.98),
            weight_decay=0.1,
            max_grad_norm=1.0,
            loss_scaler=unscaled,
        )
        for step in range(4):
            for part in range(PARTS):
                model(**text_batch(PARTS * step + part)).loss.backward()
                reference.accumulate(PARTS * step + part)
            for name, parameter in model.named_parameters():
                gradient = engine.gradient(parameter)
                assert gradient.dtype is torch.float32
                assert torch.equal(gradient, reference.masters[name].grad), name
            optimizer.step()
            reference.step()
            assert optimizer.grad_norm == pytest.approx(reference.optimizer.grad_norm, rel=1e-12)
            optimizer.zero_grad()
            saved = optimizer.state_dict()["state"]
            for number, (name, master) in enumerate(reference.masters.items()):
                assert torch.equal(saved[number]["master"], master), name
            weights = engine.state_dict()
            assert all(torch.equal(weights[name], p) for name, p in reference.named.items())


@pytest.mark.parametrize("gradients", ["cpu", "nvme"])
def test_the_planner_states_what_they_move(gradients: str, tmp_path: Path) -> None:
    config = infinity.Config(
        nvme=tmp_path,
        gpu_memory="4MiB",
        cpu_memory="8MiB",
        precision="bf16",
        gradients=gradients,
        tuning=infinity.Tuning(cache=0, gradient_precision="fp32", update="exact"),
    )
    model = infinity.wrap(transformer(), config)
    with infinity.engine(model) as engine:
        optimizer = infinity.AdamW(model.parameters(), max_grad_norm=1.0)
        for step in range(5):
            for part in range(PARTS):
                model(**text_batch(PARTS * step + part)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        report = engine.report()
        assert report.read_per_parameter == report.planned_read_per_parameter
        assert report.written_per_parameter == report.planned_written_per_parameter


def test_the_sum_of_many_small_gradients_is_kept(tmp_path: Path) -> None:
    """In bf16 1 + 1/512 is 1, so what comes after the first micro-batch is lost."""
    results = {}
    for precision in ("auto", "fp32"):
        folder = tmp_path / precision
        folder.mkdir()
        config = infinity.Config(
            nvme=folder,
            gpu_memory="1MiB",
            cpu_memory="4MiB",
            precision="bf16",
            tuning=infinity.Tuning(gradient_precision=precision),
        )
        model = infinity.wrap(nn.Linear(8, 1, bias=False), config)
        with infinity.engine(model) as engine:
            for weight in (1.0, *[1 / 512] * 64):
                (model(torch.ones(1, 8, dtype=torch.bfloat16)) * weight).sum().backward()
            results[precision] = engine.gradient(model.weight)
    assert results["auto"].dtype is torch.bfloat16
    assert (results["auto"] == 1).all()
    assert (results["fp32"] == 1 + 64 / 512).all()


def test_budgets_count_them(tmp_path: Path) -> None:
    smallest, sizes = [], []
    for precision in ("auto", "fp32"):
        config: dict[str, Any] = {
            "nvme": tmp_path,
            "gpu_memory": "4MiB",
            "precision": "bf16",
            "gradient_precision": precision,
        }
        with pytest.raises(infinity.BudgetError) as refusal:
            infinity.wrap(transformer(), config_of(**config, cpu_memory=0))
        smallest.append(int(re.findall(r"that works is (\d+)", str(refusal.value))[0]))
        model = infinity.wrap(transformer(), config_of(**config, cpu_memory=smallest[-1]))
        with infinity.engine(model) as engine:
            sizes.append(sum(unit.blocks[Kind.GRAD].nbytes for unit in engine.units))
    assert sizes[1] == 2 * sizes[0]
    assert smallest[1] - smallest[0] == sizes[0]
