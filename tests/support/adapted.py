"""A model with a frozen base and adapters, and the files of its base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import infinity
from support.configs import config_of

WIDTH, BLOCKS, STEPS, RANK = 96, 3, 3, 2
BASE = 2 * BLOCKS * 4 * WIDTH * WIDTH
"""Bytes of the matrices of the base."""


class Block(nn.Module):
    """Frozen layers, of which no bias fills a cache line, and a trainable adapter beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.odd = nn.Parameter(torch.randn(5))
        self.codes = nn.Parameter(
            torch.randint(-9, 9, (WIDTH + 1,), dtype=torch.int8), requires_grad=False
        )
        self.requires_grad_(False)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x) + self.up(self.down(x)))
        scale = self.codes[1:].to(x.dtype) / 9
        return x + self.second(y) * scale + self.odd.sum()


def built() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def is_frozen(name: str) -> bool:
    return "down" not in name and "up" not in name


def saved(path: Path) -> Path:
    """The base in two files, of which the first begins with a tensor of one byte, so that nothing
    behind it is aligned to anything."""
    values = {name: value for name, value in built().state_dict().items() if is_frozen(name)}
    names = sorted(values)
    first = {name: values[name] for name in names[: len(names) // 2]}
    save_file(first | {"0.a": torch.zeros(1, dtype=torch.int8)}, path / "1.safetensors")
    save_file({name: values[name] for name in names if name not in first}, path / "2.safetensors")
    files = {n: "1.safetensors" if n in first else "2.safetensors" for n in names}
    index = path / "model.safetensors.index.json"
    index.write_text('{"weight_map": ' + repr(files).replace("'", '"') + "}")
    return path


def config(nvme: Path, **options: Any) -> infinity.Config:
    (nvme / "nvme").mkdir(exist_ok=True)
    least = {"gpu_memory": "1MiB", "cpu_memory": "2MiB", "cache": 0}
    return config_of(nvme=nvme / "nvme", **least | options)


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def written_by_the_kernel() -> int:
    """Bytes that this process wrote to files so far."""
    text = Path("/proc/self/io").read_text()
    return int(dict(line.split(": ") for line in text.splitlines())["write_bytes"])
