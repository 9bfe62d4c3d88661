"""Training runs of every ZeRO stage, for ranks and for one process."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import infinity
from infinity.placement.memory import bytes_on_tiers
from infinity.sharding import collectives
from support.configs import config_of
from support.probe import Probe

WIDTH, WORDS, ROWS, STEPS = 48, 40, 24, 3
GPU, CPU = (
    dict.fromkeys(("parameters", "gradients", "optimizer"), tier) for tier in ("gpu", "cpu")
)
CASES: dict[str, dict[str, Any]] = {
    # The placements of the ZeRO-Infinity paper's table 2.
    "data parallel": {"stage": 0} | GPU,
    "ZeRO-1": {"stage": 1} | GPU,
    "ZeRO-2": {"stage": 2} | GPU,
    "ZeRO-Offload": {"stage": 2} | CPU | {"parameters": "gpu"},
    "ZeRO-3": {"stage": 3} | GPU,
    "ZeRO-Inf-CPU": {"stage": 3} | CPU,
    "ZeRO-Inf-NVMe": {"stage": 3, "gradients": "nvme"},
    # And others.
    "ZeRO-1 with NVMe": {"stage": 1} | GPU | {"optimizer": "nvme"},
    "data parallel with NVMe": {"stage": 0},
    "little memory": {"stage": 3, "gpu_memory": "248KiB"},
    "ZeRO-1, one micro-batch": {"stage": 1, "parts": 1} | GPU,
    "ZeRO-3, one micro-batch": {"stage": 3, "parts": 1} | CPU,
    "speculative updates": {"stage": 2} | GPU | {"optimizer": "nvme", "update": "speculative"},
    "all kept": {"stage": 3, "gradients": "nvme", "gpu_cache": "4MiB"},
    "some kept": {"stage": 3, "gpu_cache": "200KiB"},
    "some kept, little memory": {"stage": 3, "gpu_cache": "200KiB", "gpu_memory": "440KiB"} | CPU,
    "ZeRO-1, some kept": {"stage": 1} | GPU | {"optimizer": "nvme", "gpu_cache": "200KiB"},
    "ZeRO-2, some kept": {"stage": 2, "gpu_cache": "200KiB"} | CPU | {"parameters": "gpu"},
    # The first, or both, of the two micro-batches inside of no_sync.
    "data parallel, no_sync": {"stage": 0, "apart": 1} | GPU,
    "data parallel, no_sync to the end": {"stage": 0, "apart": 2, "gradients": "nvme"},
    "ZeRO-1, no_sync": {"stage": 1, "apart": 2} | GPU,
    "ZeRO-1, gradients at home": {"stage": 1} | GPU | {"gradients": "cpu"},
    "ZeRO-1, gradients at home, NVMe": {"stage": 1, "parameters": "gpu"},
    "ZeRO-1, gradients at home, some kept": {"stage": 1, "gpu_cache": "200KiB"}
    | CPU
    | {"parameters": "gpu"},
    "ZeRO-1, gradients at home, no_sync": {"stage": 1, "apart": 2} | CPU | {"parameters": "gpu"},
    "ZeRO-2, no_sync": {"stage": 2, "apart": 1}
    | GPU
    | {"optimizer": "nvme", "update": "speculative"},
    "ZeRO-3, no_sync": {"stage": 3, "apart": 2} | CPU,
}
HYBRID = {
    f"hybrid {name}": CASES[name]
    for name in (
        "ZeRO-1",
        "ZeRO-1, gradients at home",
        "ZeRO-2",
        "ZeRO-3",
        "ZeRO-Inf-NVMe",
        *list(CASES)[-2:],
    )
}
HYBRID["hybrid ZeRO-3, no_sync once"] = {"stage": 3, "apart": 1} | CPU


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[1].down.requires_grad_(False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(
            self.head(x).flatten(0, 1), ((ids * 3 + 1) % WORDS).flatten()
        )


def train(case: dict[str, Any], directory: Path, rank: int, ranks: Any = None) -> dict[str, Any]:
    """Train as `rank` of `ranks`, a group or a mesh, on its rows of every batch; what was computed,
    and what it took."""
    directory.mkdir()
    values = {
        "nvme": directory,
        "gpu_memory": "8MiB",
        "cpu_memory": "8MiB",
        "cache": 0,
        "precision": "fp32",
        "poison": True,
    }
    values |= {
        "gpu_cache": 0,
        "device": "cpu",
        "threads": 1,
        "copy_on_write": case.get("update") == "speculative",
    }
    parts, apart = case.get("parts", 2), case.get("apart", 0)
    config = config_of(
        **(values | {key: value for key, value in case.items() if key not in ("parts", "apart")})
    )
    model = infinity.wrap(Model(), config, group=ranks)
    calls: Counter[str] = Counter()
    with infinity.engine(model) as engine, pytest.MonkeyPatch.context() as monkeypatch:
        count_collectives(monkeypatch, calls)
        used, shards = engine.memory(), engine.units[0].facts.layout.ranks
        used["gpu"] -= (
            0 if Probe(engine).gradient_buffer is None else Probe(engine).gradient_buffer_bytes
        )
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2, eps=1e-6, max_grad_norm=0.5)
        losses, norms = [0.0] * STEPS, []
        for step in range(STEPS):
            Probe(engine).rest()  # what was gathered ahead belongs to the step before
            calls.clear()
            batch = torch.randint(
                0, WORDS, (ROWS, 4), generator=torch.Generator().manual_seed(step)
            )
            mine = batch if ranks is None else batch.chunk(dist.get_world_size())[rank]
            for number, part in enumerate(mine.chunk(parts)):
                loss = model(part) / parts
                with infinity.no_sync(model) if number < apart else nullcontext():
                    loss.backward()
                losses[step] += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            norms.append(optimizer.grad_norm)
        Probe(engine).rest()
        in_last_step = dict(calls)
        # The same for all ranks.
        saved = directory.parent / f"saved {directory.name.rpartition(' ')[0]}"
        engine.save_checkpoint(saved, optimizer)
        trainable, frozen = (
            sum(u.facts.layout.numel for u in engine.units if u.facts.trainable is trains)
            for trains in (True, False)
        )
        return {
            "losses": losses,
            "norms": norms,
            "weights": engine.state_dict(),
            "states": flat(optimizer),
            "saved": str(saved),
            "calls": in_last_step,
            "units": (len(engine.units), sum(unit.facts.trainable for unit in engine.units)),
            "used": used,
            "formula": bytes_on_tiers(trainable, config, shards, frozen),
        }


def flat(optimizer: infinity.AdamW) -> dict[str, torch.Tensor]:
    """The states of all parameters."""
    states = copy.deepcopy(optimizer.state_dict()["state"])
    return {
        f"{number} {name}": value
        for number, state in states.items()
        for name, value in state.items()
    }


def count_collectives(monkeypatch: pytest.MonkeyPatch, calls: Counter[str]) -> None:
    """Count the collectives that move parameters or gradients."""

    def count(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def counted(*values: Any) -> None:
            calls[name] += values[-1] is not None
            call(*values)

        return counted

    for name in ("all_gather", "reduce_scatter_mean", "all_reduce_mean"):
        monkeypatch.setattr(collectives, name, count(name, getattr(collectives, name)))


def same(one: dict[str, Any], other: dict[str, Any], *keys: str) -> bool:
    return all(
        one[key].keys() == other[key].keys()
        and all(torch.equal(value, other[key][name]) for name, value in one[key].items())
        for key in keys
    )
