"""Parameters that the data of one rank leaves out, in units that span others, and at stages 0 to 2
whole units, are trained as DDP with `find_unused_parameters` trains them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from support.configs import config_of
from support.rank_group import RANKS, OnRanks

WIDTH, STEPS = 32, 4


class Block(nn.Module):
    """With a gate of its own around a layer that may be a unit, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.randn(WIDTH) * 0.1)

    def forward(self, x: torch.Tensor, gated: bool) -> torch.Tensor:
        y = torch.tanh(self.inner(x))
        return x + (y * self.gate if gated else y)


class Experts(nn.Module):
    """Each rank takes other experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.router = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        weight = self.experts[number].weight
        return x + torch.tanh(self.router(x)) @ weight


class Net(nn.Module):
    """Parameters of its own between, before and after its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = (nn.Parameter(torch.ones(WIDTH)) for _ in range(2))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.experts = nn.ModuleList(Experts() for _ in range(2))
        self.start, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.after = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor, flags: list[bool], number: int) -> torch.Tensor:
        x = self.start(x)
        if flags[0]:
            x = x * self.first
        for position, block in enumerate(self.blocks):
            x = block(x, flags[position % 2])
            if flags[position]:
                x = x * self.scale
        for experts in self.experts:
            x = experts(x, number)
        x = self.last(x)
        return x + self.after if flags[2] else x


class Adapted(nn.Module):
    """A frozen model with adapters, which one rank leaves out at times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        for parameter in self.blocks.parameters():
            parameter.requires_grad_(False)
        self.adapters = nn.ParameterList(
            nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1) for _ in self.blocks
        )
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, flags: list[bool], number: int) -> torch.Tensor:
        x = self.first(x)
        for position, (block, adapter) in enumerate(zip(self.blocks, self.adapters, strict=True)):
            y = block(x, True)
            x = y + x @ adapter if flags[position % 3] else y
        return self.out(x)


class Gated(nn.Module):
    """Its first layer gets an input that requires no gradient, so a backward needs the parameters
    of that block only where it has the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, flags: list[bool], number: int) -> torch.Tensor:
        for position, at in enumerate((0, 1, 0, 2)):
            x = self.blocks[at](x, flags[position % 3])
        return self.out(x)


class Sided(nn.Module):
    """A block and a layer are used twice; the second time a rank may leave out the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.side, self.last = Block(), *(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, flags: list[bool], number: int) -> torch.Tensor:
        for gated in (True, flags[0]):
            x = self.block(x, gated)
            if gated:
                x = self.side(x)
        return self.last(x)


class Dropping(nn.Module):
    """A rank leaves out whole layers (LayerDrop), or what comes of one. The last one is never
    used. The layer that is used first is made last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head, self.side, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.start = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, flags: list[bool], number: int) -> torch.Tensor:
        x = torch.tanh(self.start(x))
        for layer, kept in zip(self.layers, flags, strict=True):
            x = layer(x, True) if kept else x
        side = self.side(x)
        x = self.head(x)
        return x + side if number == 0 else x


MODELS = {"dropping": Dropping, "net": Net, "adapted": Adapted, "gated": Gated, "sided": Sided}


@dataclasses.dataclass
class Task:
    model: str
    units: str = ""
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    micro_batches: int = 1
    tiles: int = 0


def batch(step: int, rank: int) -> tuple[torch.Tensor, list[bool], int]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(4, WIDTH, generator=generator)
    drawn = torch.randint(0, 2, (3,), generator=generator).bool().tolist()
    return x, drawn, (step + rank) % 3


def build(task: Task) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[task.model]()


def train_plain(task: Task) -> dict[str, torch.Tensor]:
    """All ranks' batches in one process: the mean of their gradients, zeros where one has none."""
    model = build(task)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3
    )
    for step in range(STEPS):
        for rank in range(RANKS):
            for micro in range(task.micro_batches):
                given = batch(step * task.micro_batches + micro, rank)
                (model(*given).square().mean() / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def work(task: dict[str, Any], where: Path, rank: int) -> None:
    """One rank of two: see `support/rank_group`."""
    wanted = Task(**task)
    nvme = where / str(rank)
    nvme.mkdir()
    values: dict[str, Any] = {"nvme": nvme, "gpu_memory": 0, "cpu_memory": "16MiB"}
    values |= {"device": "cpu", "threads": 1, "cache": 0, "poison": True}
    values |= {"collective_timeout": 60.0} | wanted.config
    kinds = {"": None, "blocks": [Block, Experts], "gates": [Block, Experts, Net]}
    if not values["gpu_memory"]:
        smallest = {"net": 114688, "adapted": 114688, "gated": 114688, "sided": 114688}
        values["gpu_memory"] = smallest[wanted.model]
    model = build(wanted)
    if wanted.tiles:
        infinity.tile(model, wanted.tiles)
    model = infinity.wrap(
        model, config_of(**values), group=dist.group.WORLD, units=kinds[wanted.units]
    )
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    with infinity.engine(model) as engine:
        for step in range(STEPS):
            for micro in range(wanted.micro_batches):
                given = batch(step * wanted.micro_batches + micro, rank)
                model(*given).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.save(engine.state_dict(), where / f"{rank}.pt")


ON_GPU = {"parameters": "gpu", "gpu_memory": "16MiB"}


@pytest.mark.parametrize(
    "task",
    [
        Task("net"),
        Task("net", "blocks"),
        Task("net", "gates"),
        Task("net", "blocks", {"update": "speculative"}),
        Task("net", "blocks", {"update": "delayed", "delayed_after": 99}),
        Task("net", "blocks", micro_batches=3),
        Task("net", "blocks", {"gpu_memory": "1MiB", "gradients": "nvme"}),
        Task("net", "blocks", {"stage": 0, "gpu_memory": "1MiB"}),
        Task("net", "blocks", {"stage": 2} | ON_GPU),
        Task("net", "blocks", {"stage": 1} | ON_GPU),
        Task("net", "blocks", {"recompute": "all"}),
        Task("adapted", tiles=2048),
        Task("adapted"),
        Task("adapted", "blocks"),
        Task("adapted", micro_batches=2),
        Task("sided"),
        Task("sided", config={"gpu_memory": "1MiB"}, micro_batches=2),
        Task("gated"),
        Task("gated", "blocks"),
        Task("gated", "blocks", {"gpu_memory": "1MiB"}, micro_batches=2),
        Task("gated", "blocks", {"stage": 2} | ON_GPU),
        Task("dropping", "blocks", {"stage": 2} | ON_GPU),
        Task("dropping", config={"stage": 2} | ON_GPU, micro_batches=3),
        Task("dropping", config={"stage": 2, "gradients": "nvme"} | ON_GPU, micro_batches=2),
        Task("dropping", config={"stage": 1} | ON_GPU, micro_batches=2),
        Task("dropping", "blocks", {"stage": 0, "gpu_memory": "1MiB"}, micro_batches=2),
        Task("dropping", config={"stage": 0, "gpu_memory": "1MiB", "recompute": "all"}),
    ],
    ids=lambda task: f"{task.model} {task.units} {task.config} {task.micro_batches} {task.tiles}",
)
@pytest.mark.usefixtures("one_thread")
def test_what_one_rank_leaves_out_is_trained_as_by_ddp(
    task: Task, on_ranks: OnRanks, tmp_path: Path
) -> None:
    assert on_ranks(task) == ["done"] * RANKS
    expected = train_plain(task)
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-6, msg=name)
