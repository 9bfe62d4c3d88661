"""Tensor parallelism of `torch.distributed.tensor` beside sharding: 2 x 2 ranks compute what one
does, and agree bit for bit.

This file is also what each rank runs: all that is asked of it, one after the other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.checkpoint import pieces
from infinity.optim.kernels import squared_gradient_norm
from infinity.sharding.ranks import ALONE, Ranks, whole_group
from infinity.sharding.tensor_parallel import bounds_of, local, with_tensor_parallel
from support.configs import config_of
from support.models import FAMILIES, text_batch
from support.probe import Probe
from support.rank_group import run_ranks
from support.stages import flat

RANKS, WIDTH, HEAD, WORDS, ROWS, LENGTH, STEPS = 4, 32, 8, 41, 8, 8, 6
SHORT = 2  # steps of those that `LONG` does not name
GPU, CPU = (
    dict.fromkeys(("parameters", "gradients", "optimizer"), tier) for tier in ("gpu", "cpu")
)
NVME = {"gradients": "nvme"}
CASES: dict[str, dict[str, Any]] = {
    "stage 3": {"stage": 3} | GPU,
    "cpu": {"stage": 3} | CPU,
    "nvme": {"stage": 3} | NVME,
    "little memory": {"stage": 3, "gpu_memory": "260KiB", "update": "speculative"},
    "stage 2": {"stage": 2} | GPU,
    "stage 1": {"stage": 1} | GPU,
    "stage 1, optimizer on nvme": {"stage": 1} | GPU | {"optimizer": "nvme"},
    "replicas": {"mesh": (2, 1, 2)} | CPU,
    "four tensor parallel ranks": {"mesh": (1, 1, 4)} | CPU,
    "no data parallel ranks": {"mesh": (2, 1, 2), "grouped": False} | NVME,
    "checkpointed": {"checkpoints": True} | CPU,
    "accumulated": {"parts": 2} | CPU,
    "accumulated vertically": {"parts": 2, "vertical": True} | NVME,
    "sequence parallel": {"plan": "sequence"} | CPU,
    "sequence parallel, nvme": {"plan": "sequence"} | NVME,
}
SAME = (
    ("stage 3", "cpu", "nvme", "little memory", "stage 2", "checkpointed"),
    ("stage 1", "stage 1, optimizer on nvme"),
    ("accumulated", "accumulated vertically"),
    ("sequence parallel", "sequence parallel, nvme"),
)  # bit for bit
LONG = ("stage 3", "nvme")
FEW = [
    name
    for name in CASES
    if name not in ("cpu", "stage 1", "stage 2", "accumulated", "sequence parallel")
]
"""Cases of `make test`. `make long-test` trains all of them."""
WAYS = {
    "2 x 2": ("4 x 1", "replicas", "1 x 2"),
    "4 x 1": ("2 x 2",),
    "1 x 4": ("2 x 2",),
    "replicas": ("4 x 1",),
}
"""How a checkpoint is loaded, as data x tensor parallel ranks, by how it was saved."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [
            part(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        ]
        return self.out(
            functional.scaled_dot_product_attention(*heads, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.feed = Attention(), Feed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Model(nn.Module):
    """41 words are divided among two ranks as 21 and 20, among four as 11, 11, 11 and 8."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.linspace(-1, 1, LENGTH * WIDTH).view(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("scale", torch.tensor(0.5))
        self.recompute, self.part = recompute, (0, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places, (part, parts) = self.places, self.part
        if isinstance(places, DTensor):  # each rank uses a part, so its gradient is part of a sum
            places = places.to_local(grad_placements=[Partial()]).chunk(parts)[part]
        x = self.words(ids) * self.scale + places
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return functional.cross_entropy(
            self.head(self.norm(x)).flatten(0, 1), ((ids * 3 + 1) % WORDS).flatten()
        )


def build(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def parallelize(model: Model, mesh: DeviceMesh, plan: str = "plain") -> Model:
    """Attention and MLP in the usual way, embedding and head by words; norms plain, or in parallel
    over the sequence."""
    sequence = plan == "sequence"
    whole = Shard(1) if sequence else Replicate()
    block = {
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "attention.out": RowwiseParallel(output_layouts=whole),
        "feed.up": ColwiseParallel(),
        "feed.down": RowwiseParallel(output_layouts=whole),
    }
    if sequence:
        gathered = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
        block |= {
            "norm1": SequenceParallel(),
            "norm2": SequenceParallel(),
            "attention": gathered,
            "feed": gathered,
        }
    for each in model.blocks:
        parallelize_module(each, mesh, block)
    top = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=whole),
        "head": ColwiseParallel(input_layouts=whole, output_layouts=Replicate()),
    }
    if sequence:
        top |= {"norm": SequenceParallel()}
        whole_places = nn.Parameter(distribute_tensor(model.places.detach(), mesh, [Replicate()]))
        model.places, model.part = whole_places, (mesh.get_local_rank(), mesh.size())
    parallelize_module(model, mesh, top)
    model.head.weight = model.words.weight
    return model


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def configure(directory: Path, case: dict[str, Any]) -> infinity.Config:
    values = {
        "nvme": directory,
        "gpu_memory": "8MiB",
        "cpu_memory": "8MiB",
        "cache": 0,
        "precision": "fp32",
        "poison": True,
    }
    values |= {"device": "cpu", "threads": 1} | case
    known = infinity.Config.model_fields.keys() | infinity.Tuning.model_fields.keys()
    return config_of(**{key: value for key, value in values.items() if key in known})


def settings(**more: Any) -> dict[str, Any]:
    return {"lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1, "max_grad_norm": 0.7} | more


Meshes = dict[tuple[int, ...], DeviceMesh]


class Rank:
    """One of the ranks, and where it may write."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory, self.rank, self.count = directory, rank, 0
        self.meshes: Meshes = {
            shape: init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tp"))
            for shape in ((1, 2, 2), (2, 1, 2), (1, 1, 4))
        }
        self.mesh = self.meshes[1, 2, 2]

    def fresh(self) -> Path:
        self.count += 1
        directory = self.directory / f"nvme{self.rank}-{self.count}"
        directory.mkdir()
        return directory

    def wrap(self, model: nn.Module | None = None, group: Any = "dp", **case: Any) -> Model:
        """By default the model of `build` on 2 x 2 ranks."""
        model = parallelize(build(), self.mesh["tp"]) if model is None else model
        group = self.mesh["shard"] if group == "dp" else group
        return infinity.wrap(model, configure(self.fresh(), CPU | case), group=group)

    # What is asked of it

    def train(self, case: dict[str, Any], steps: int) -> dict[str, Any]:
        mesh = self.meshes[case.get("mesh", (1, 2, 2))]
        model = parallelize(
            build(recompute=case.get("checkpoints", False)), mesh["tp"], case.get("plan", "plain")
        )
        before = {
            name: (id(p), type(p), p.placements if isinstance(p, DTensor) else None)
            for name, p in model.named_parameters()
        }
        group = mesh["replicate", "shard"] if case.get("grouped", True) else None
        data = (
            mesh["replicate"].get_local_rank() * mesh["shard"].size()
            + mesh["shard"].get_local_rank()
        )
        number = 2
        if group is None or mesh["tp"].size() == RANKS:
            data, number = 0, 1
        parts = case.get("parts", 1)
        infinity.wrap(model, configure(self.fresh(), case), group=group)
        with infinity.engine(model) as engine:
            optimizer = infinity.AdamW(model.parameters(), **settings())
            losses, norms, gradients, short = [], [], {}, {}
            for step in range(steps):
                mine = batch(step).chunk(number)[data].chunk(parts)
                if case.get("vertical"):
                    found = infinity.accumulate(model, mine, loss=lambda outputs, _: outputs)
                    loss = sum(value.item() / parts for value in found)
                else:
                    loss = 0.0
                    for part in mine:
                        value = model(part) / parts
                        value.backward()
                        loss += value.item()
                if step == 0:
                    gradients = {name: engine.gradient(p) for name, p in model.named_parameters()}
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss)
                norms.append(optimizer.grad_norm)
                if step == SHORT - 1:
                    short = {
                        name: value.clone()
                        for name, value in (engine.state_dict() | flat(optimizer)).items()
                    }
            weights, states = engine.state_dict(), flat(optimizer)
            assert {
                n: (id(p), p.placements if isinstance(p, DTensor) else None)
                for n, p in model.named_parameters()
            } == {name: (key, placements) for name, (key, _, placements) in before.items()}
            with infinity.gathered(model):
                for name, p in model.named_parameters():
                    assert isinstance(p, before[name][1])
                    assert torch.equal(
                        p.full_tensor() if isinstance(p, DTensor) else p, weights[name]
                    )
        found = {"losses": losses, "norms": norms, "gradients": gradients, "data": data}
        return found | {"short": short, "weights": weights, "states": states}

    def replicated_bits(self) -> dict[str, Any]:
        """Parameters that all tensor parallel ranks hold, with stochastic rounding and states in
        groups."""
        model = self.wrap(precision="bf16", moment_precision="int8")
        with infinity.engine(model) as engine:
            optimizer = infinity.AdamW(model.parameters(), **settings())
            dtypes = {(p.dtype, p.requires_grad) for p in model.parameters()}
            for step in range(4):
                model(batch(step).chunk(2)[self.mesh["shard"].get_local_rank()]).backward()
                optimizer.step()
                optimizer.zero_grad()
            with infinity.gathered(model):
                inside = {(p.dtype, local(p).dtype) for p in model.parameters()}
            return {
                "weights": engine.state_dict(),
                "states": flat(optimizer),
                "dtypes": dtypes,
                "inside": inside,
            }

    def clips_by_unit(self) -> dict[str, Any]:
        """Every unit by its own norm, in updates that wait and in others that begin in backward."""
        found: dict[str, Any] = {}
        for update in ("plain", "speculative"):
            model = self.wrap(update=update)
            with infinity.engine(model) as engine:
                optimizer = infinity.AdamW(
                    model.parameters(), **settings(clip="unit", max_grad_norm=0.02)
                )
                found["norms"] = []
                for step in range(SHORT):
                    model(batch(step).chunk(2)[self.mesh["shard"].get_local_rank()]).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    found["norms"].append(optimizer.grad_norm)
                report, units = engine.report(), engine.units
                found["units"] = [unit.facts.names for unit in units]
                found["not kept"] = (SHORT - 1) * len(units) - report.updates_kept
                found["rolled back"] = report.updates_rolled_back
                found[update] = engine.state_dict()
        return found

    def llama(self) -> dict[str, Any]:
        """An unmodified model of transformers."""
        model, mesh = FAMILIES["llama"].build(), self.mesh["tp"]
        columns = (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
        )
        rows = "mlp.down_proj"
        block = dict.fromkeys(columns, ColwiseParallel()) | dict.fromkeys(
            ("self_attn.o_proj", rows), RowwiseParallel()
        )
        parallelize_module(
            model, mesh, {f"model.layers.*.{name}": style for name, style in block.items()}
        )
        words = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
        parallelize_module(
            model, mesh, words | {"lm_head": ColwiseParallel(output_layouts=Replicate())}
        )
        model.lm_head.weight = model.model.embed_tokens.weight
        with infinity.engine(self.wrap(model)) as engine:
            optimizer = infinity.AdamW(model.parameters(), **settings())
            for step in range(SHORT):
                part = {
                    name: value.chunk(2)[self.mesh["shard"].get_local_rank()]
                    for name, value in text_batch(step, 4).items()
                }
                model(**part).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return {"norm": optimizer.grad_norm, "weights": engine.state_dict()}

    def sizes(self) -> list[tuple[Any, ...]]:
        """Where parameters lie whose ranks have 3 and 2 rows, and 1 and none, and how large the
        unit is."""
        model, mesh = nn.Module(), self.mesh["tp"]
        for name, shape in (("uneven", (5, 100)), ("scarce", (1, 300)), ("whole", (7,))):
            values, placement = torch.ones(shape), Replicate() if name == "whole" else Shard(0)
            model.register_parameter(
                name, nn.Parameter(distribute_tensor(values, mesh, [placement]))
            )
        with infinity.engine(self.wrap(model)) as engine:
            (unit,) = engine.units
            assert all(
                torch.equal(value, torch.ones_like(value)) for value in engine.state_dict().values()
            )
            return [(place.offset, place.numel) for place in unit.facts.layout.places] + [
                (unit.facts.layout.numel,)
            ]

    def solid(self) -> dict[str, str]:
        """A parameter of three dimensions that is saved as it is divided along the second, in 3 and
        2, and then loaded."""

        def cube(dimension: int | None, factor: float) -> Model:
            model, values = nn.Module(), factor * torch.arange(120.0).view(4, 5, 6)
            placed = (
                values
                if dimension is None
                else distribute_tensor(values, self.mesh["tp"], [Shard(dimension)])
            )
            model.register_parameter("cube", nn.Parameter(placed))
            return self.wrap(model, dist.group.WORLD if dimension is None else "dp")

        said, where = {}, self.directory / "cube"
        model = cube(1, 1.0)
        with infinity.engine(model) as engine:
            engine.save_checkpoint(where)
        for dimension in (0, 1, 2, None):
            model = cube(dimension, 7.0)
            with infinity.engine(model) as engine:
                try:
                    engine.load_checkpoint(where)
                    factor = 1.0
                except infinity.CheckpointError as error:
                    said[str(dimension)], factor = str(error), 7.0
                assert torch.equal(
                    engine.state_dict()["cube"], factor * torch.arange(120.0).view(4, 5, 6)
                )
        return said

    def savers(self) -> list[int]:
        """Who save together where others, of which there are none here, are no part of it."""
        size = dist.get_world_size
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(
                dist,
                "get_world_size",
                lambda group=None: RANKS + 1 if group is None else size(group),
            )
            group = whole_group(
                Ranks(self.mesh["shard"].get_group(), None, self.mesh["tp"].get_group())
            )
        total = torch.tensor(self.rank)
        dist.all_reduce(total, group=group)
        return [*dist.get_process_group_ranks(group), total.item()]

    def nonfinite(self, name: str) -> dict[str, Any]:
        """One rank of four has an infinite gradient of parameter `name`, in the second step."""
        model = self.wrap()
        with infinity.engine(model) as engine:
            optimizer = infinity.AdamW(model.parameters(), **settings(skip_nonfinite=True))
            spoilt = {"by": 1.0}
            dict(model.named_parameters())[name].register_hook(
                lambda gradient: gradient * spoilt["by"]
            )
            after = []
            for step in range(3):
                spoilt["by"] = math.inf if step == 1 and self.rank == 3 else 1.0
                model(batch(step).chunk(2)[self.mesh["shard"].get_local_rank()]).backward()
                optimizer.step()
                optimizer.zero_grad()
                after.append(engine.state_dict())
            return {"skipped": optimizer.skipped_steps, "norm": optimizer.grad_norm, "after": after}

    def checkpoints(self) -> dict[str, Any]:
        """Save on 2 x 2 ranks, and load in every way; the other way round from one without tensor
        parallelism."""
        pieces.PIECE = 1500
        found: dict[str, Any] = {}

        def states(engine: infinity.Engine, optimizer: infinity.AdamW) -> dict[str, Any]:
            return {"weights": engine.state_dict(), "states": flat(optimizer)}

        def begin(model: Model, steps: int) -> tuple[infinity.Engine, infinity.AdamW]:
            engine = infinity.engine(model)
            optimizer = infinity.AdamW(model.parameters(), **settings())
            for step in range(steps):
                model(batch(step + 50)).backward()
                optimizer.step()
                optimizer.zero_grad()
            return engine, optimizer

        def plain() -> Model:
            return infinity.wrap(build(), configure(self.fresh(), CPU), group=dist.group.WORLD)

        def divided(shape: tuple[int, ...], group: bool = True) -> Model:
            mesh = self.meshes[shape]
            model = parallelize(build(), mesh["tp"], "sequence")
            return self.wrap(model, mesh["replicate", "shard"] if group else None)

        ways: dict[str, Callable[[], Model]] = {
            "2 x 2": lambda: divided((1, 2, 2)),
            "4 x 1": plain,
            "1 x 4": lambda: divided((1, 1, 4)),
            "replicas": lambda: divided((2, 1, 2)),
            "1 x 2": lambda: divided((2, 1, 2), group=False),
        }
        for saver, loaders in WAYS.items():
            where = self.directory / f"checkpoint {saver}"
            model = ways[saver]()
            engine, optimizer = begin(model, 1)
            with engine:
                found[f"{saver} saved"] = states(engine, optimizer)
                engine.save_checkpoint(where, optimizer, {"rank": self.rank})
            for loader in loaders:
                model = ways[loader]()
                engine, optimizer = begin(model, 1)
                with engine:
                    extra = engine.load_checkpoint(where, optimizer)
                    found[f"{saver} {loader}"] = states(engine, optimizer) | {
                        "extra": extra["rank"]
                    }
        # What an optimizer of another way gave, as DTensors and as whole tensors.
        model = ways["2 x 2"]()
        engine, optimizer = begin(model, 0)
        with engine:
            mesh = self.mesh["tp"]
            given = torch.load(self.directory / "given.pt", weights_only=True)
            number = [name for name, _ in model.named_parameters()].index(
                "blocks.0.feed.down.weight"
            )
            entry = given["state"][number]
            entry["exp_avg"] = distribute_tensor(entry["exp_avg"], mesh, [Replicate()])
            optimizer.load_state_dict(given)
            found["given"] = flat(optimizer)
        return found

    def meta(self) -> dict[str, Any]:
        """Built without memory: with values from a file, and those that constructors write."""
        found = {}
        for how in ("file", "seed"):
            with infinity.init():
                model = Model()
            parallelize(model, self.mesh["tp"])
            config = configure(self.fresh(), CPU)
            values = (
                {"weights": self.directory / "weights.safetensors"}
                if how == "file"
                else {"seed": 5}
            )
            infinity.wrap(model, config, group=self.mesh["shard"], **values)
            with infinity.engine(model) as engine:
                found[how] = engine.state_dict()
        return found

    def touches(self) -> list[str]:
        """What is said to who uses a parameter outside of its forward."""
        model, said = self.wrap(), []
        weight = model.blocks[0].feed.down.weight

        @torch.no_grad()
        def edit() -> None:
            def add(module: nn.Module, _: Any) -> None:
                module.weight.add_(1)

            handle = model.blocks[0].feed.down.register_forward_pre_hook(add)
            try:
                model(batch(0))
            finally:
                handle.remove()

        ways: list[Callable[[], object]] = [
            lambda: weight + 1,
            lambda: weight.to_local().sum(),
            weight.full_tensor,
            lambda: weight._local_tensor.sum(),
            lambda: weight.redistribute(placements=[Replicate()]),
        ]
        with infinity.engine(model) as engine:
            for way in ways:
                with torch.no_grad():
                    try:
                        way()
                        said.append("nothing")
                    except infinity.ShardedParameterError as error:
                        said.append(str(error))
            said += [
                repr(weight),
                repr((weight.shape, weight.dtype, weight.placements, weight.grad)),
            ]
            before = engine.state_dict()
            with infinity.gathered(weight, write=True), torch.no_grad():
                weight.mul_(2)
            after = model.state_dict()
            model.load_state_dict(after)
            assert all(torch.equal(value, after[n]) for n, value in engine.state_dict().items())
            assert torch.equal(
                after["blocks.0.feed.down.weight"], 2 * before["blocks.0.feed.down.weight"]
            )
            try:
                edit()
            except infinity.ShardedParameterError as error:
                said.append(str(error))
        try:
            weight.to_local()
        except infinity.EngineClosedError as error:
            said.append(str(error))
        return said

    def wrong(self) -> dict[str, str]:
        """What is said about models and groups that do not go together; nothing is changed."""
        tp, square = self.mesh["tp"], init_device_mesh("cpu", (2, 2))
        diagonal = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])][self.rank in (1, 2)]

        def on(mesh: DeviceMesh, *placements: Any) -> Model:
            model = build()
            model.places = nn.Parameter(distribute_tensor(model.places.detach(), mesh, placements))
            return model

        def two_meshes() -> Model:
            model = parallelize(build(), tp)
            model.places = nn.Parameter(
                DTensor.from_local(model.places.detach(), self.mesh["shard"], [Replicate()])
            )
            return model

        def partial() -> Model:
            model = build()
            model.places = nn.Parameter(DTensor.from_local(model.places.detach(), tp, [Partial()]))
            return model

        def odd() -> Model:
            model = build()
            shape = torch.Size((2 * LENGTH + 2, WIDTH))
            model.places = nn.Parameter(
                DTensor.from_local(
                    model.places.detach(), tp, [Shard(0)], shape=shape, stride=(WIDTH, 1)
                )
            )
            return model

        def buffer() -> Model:
            model = parallelize(build(), tp)
            model.register_buffer("table", distribute_tensor(torch.zeros(4, 4), tp, [Shard(0)]))
            return model

        attempts: dict[str, tuple[Callable[[], Model], Any]] = {
            "overlap": (lambda: parallelize(build(), tp), dist.group.WORLD),
            "the same mesh": (lambda: parallelize(build(), tp), tp),
            "diagonal": (lambda: parallelize(build(), tp), diagonal),
            "two meshes": (two_meshes, None),
            "two dimensions": (lambda: on(square, Replicate(), Shard(0)), None),
            "partial": (partial, self.mesh["shard"]),
            "odd": (odd, self.mesh["shard"]),
            "buffer": (buffer, self.mesh["shard"]),
            "fully_shard": (lambda: fully_shard(build(), mesh=self.mesh["shard"]), None),
        }
        said = {}
        for name, (make, group) in attempts.items():
            model = make()
            before = [(p, local(p).detach().clone()) for p in model.parameters()]
            try:
                self.wrap(model, group)
                said[name] = "nothing"
                infinity.engine(model).close()
            except infinity.ConfigError as error:
                said[name] = str(error)
                assert all(torch.equal(local(p).detach(), values) for p, values in before)
        model = parallelize(build(), tp)
        try:
            with_tensor_parallel(ALONE, model, torch.device("cuda"))
        except infinity.ConfigError as error:
            said["device"] = str(error)
        model.unknown = nn.Module()
        model.unknown.weight = nn.Parameter(torch.empty(3, device="meta"))
        before = [(p, local(p).detach().clone()) for p in model.parameters() if not p.is_meta]
        try:
            self.wrap(model)
        except infinity.ConfigError as error:  # when all others have moved
            said["unknown"] = str(error)
            assert all(torch.equal(local(p).detach(), values) for p, values in before)
            model.blocks[0](torch.ones(1, 2, WIDTH)).sum().backward()
        model = self.wrap(algorithm="other")
        with infinity.engine(model):
            try:
                infinity.adapt(torch.optim.RMSprop, model.parameters(), lr=1e-3)
            except infinity.ConfigError as error:
                said["adapt"] = str(error)
        return said

    def stuck(self) -> str:
        """Rank 3 does not come to the step. Nothing can be joined after that."""
        model = self.wrap(collective_timeout=1.0)
        store = dist.distributed_c10d._get_default_store()
        try:
            optimizer = infinity.AdamW(model.parameters(), **settings())
            model(batch(0).chunk(2)[self.mesh["shard"].get_local_rank()]).backward()
            if self.rank == 3:
                store.wait([f"given up {rank}" for rank in range(3)], timedelta(minutes=30))
                return ""
            optimizer.step()
            return "nothing"
        except infinity.EngineClosedError as error:
            return str(error)
        finally:
            store.set(f"given up {self.rank}", "")
            infinity.engine(model).close()


def serve(directory: Path, rank: int, ranks: int) -> None:
    """One rank, from start to end."""
    meeting = f"file://{directory}/rendezvous"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    this = Rank(directory, rank)
    results: dict[str, Any] = {
        name: this.train(CASES[name], STEPS if name in LONG else SHORT)
        for name in (CASES if directory.name.startswith("all") else FEW)
    }
    results["bits"] = this.replicated_bits()
    results["clips by unit"] = this.clips_by_unit()
    results["sizes"] = this.sizes()
    results["savers"] = this.savers()
    results["solid"] = this.solid()
    results["llama"] = this.llama()
    results["nonfinite"] = {
        name: this.nonfinite(name)
        for name in ("blocks.0.feed.down.weight", "blocks.1.norm1.weight")
    }
    results["checkpoints"] = this.checkpoints()
    results["meta"] = this.meta()
    results["touches"] = this.touches()
    results["wrong"] = this.wrong()
    results["stuck"] = this.stuck()
    torch.save(results, directory / f"results{rank}.pt")
    dist.destroy_process_group()


# This side


def reference() -> dict[str, Any]:
    """What plain torch computes on the whole batch."""
    model = build()
    options = settings()
    limit = options.pop("max_grad_norm")
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    losses, norms, gradients, short = [], [], {}, {}
    for step in range(STEPS):
        loss = model(batch(step))
        loss.backward()
        if step == 0:
            gradients = {
                name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
            }
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == SHORT - 1:
            short = {name: value.clone() for name, value in model.state_dict().items()}
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "short": short,
        "weights": dict(model.state_dict()),
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return reference()
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["few", pytest.param("all", marks=pytest.mark.long)])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the state dict of an optimizer of torch, and weights."""
    directory = tmp_path_factory.mktemp(request.param)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(batch(7)).backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), directory / "given.pt")
    weights = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    save_file(weights, directory / "weights.safetensors")
    return directory


@pytest.fixture(scope="module")
def results(place: Path) -> list[dict[str, Any]]:
    """What each rank found."""
    run_ranks(__file__, place, RANKS)
    return [torch.load(place / f"results{rank}.pt", weights_only=False) for rank in range(RANKS)]


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names whose tensors are not equal in every bit."""
    return sorted(a.keys() ^ b.keys()) + [
        name for name in a.keys() & b.keys() if not torch.equal(a[name], b[name])
    ]


def test_they_compute_what_one_rank_does(
    results: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    assert (
        any(norm > 0.7 for norm in alone["norms"])
        and alone["losses"][-1] < 0.7 * alone["losses"][0]
    )
    for name in CASES.keys() & results[0].keys():
        by_data = {result[name]["data"]: result[name]["losses"] for result in results}
        losses = [sum(values) / len(by_data) for values in zip(*by_data.values(), strict=True)]
        assert losses == pytest.approx(alone["losses"][: len(losses)], rel=1e-5), name
        for kind in ("gradients", "short", "weights")[: 3 if name in LONG else 2]:
            found = results[0][name][kind]
            assert alone[kind].keys() <= found.keys()
            for key, value in alone[kind].items():
                assert found[key].shape == value.shape and type(found[key]) is torch.Tensor
                difference = torch.linalg.vector_norm(found[key].double() - value.double())
                assert difference <= 1e-5 * torch.linalg.vector_norm(value.double()), (
                    f"{name}: {key}"
                )


def test_the_norm_counts_everything_once_and_all_ranks_get_its_bits(
    results: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    for name in CASES.keys() & results[0].keys():
        assert results[0][name]["norms"][0] == pytest.approx(alone["norms"][0], rel=1e-6), name
        assert results[0][name]["norms"] == pytest.approx(
            alone["norms"][: len(results[0][name]["norms"])], rel=1e-5
        ), name
        assert all(result[name]["norms"] == results[0][name]["norms"] for result in results), name


def test_ranks_agree_and_placements_change_no_bit(results: list[dict[str, Any]]) -> None:
    for name in CASES.keys() & results[0].keys():
        for kind in ("short", "weights", "states"):
            assert all(
                differing(result[name][kind], results[0][name][kind]) == [] for result in results
            ), name
    for names in ([name for name in group if name in results[0]] for group in SAME):
        for result, name in ((result, name) for result in results for name in names):
            first, found = result[names[0]], result[name]
            assert differing(found["short"], first["short"]) == [], name
            for kind in ("losses", "norms"):
                assert found[kind] == first[kind][: len(found[kind])], name
            if name in LONG:
                assert (
                    differing(found["weights"], first["weights"])
                    == differing(found["states"], first["states"])
                    == []
                ), name


def test_what_all_hold_stays_the_same_when_it_is_rounded_with_noise(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        for kind in ("weights", "states"):
            assert differing(result["bits"][kind], results[0]["bits"][kind]) == []
        assert result["bits"]["dtypes"] == {(torch.bfloat16, True)}
        assert result["bits"]["inside"] == {(torch.bfloat16, torch.bfloat16)}


def test_the_norm_of_a_unit_is_that_of_all_its_parts(results: list[dict[str, Any]]) -> None:
    first, model = results[0]["clips by unit"], build()
    options, limit = settings(), 0.02
    del options["max_grad_norm"]
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    parameters, norms = dict(model.named_parameters()), []
    for step in range(SHORT):
        model(batch(step)).backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in parameters.values()]).item())
        for names in first["units"]:
            clipped = [parameters[name] for name in names]
            assert nn.utils.clip_grad_norm_(clipped, limit) > limit
        optimizer.step()
        optimizer.zero_grad()
    assert first["norms"] == pytest.approx(norms, rel=1e-4)
    for result in results:
        found = result["clips by unit"]
        assert found["norms"] == first["norms"]
        assert found["not kept"] == found["rolled back"] == 0
        for update in ("plain", "speculative"):
            assert differing(found[update], first["plain"]) == []


def test_a_model_of_transformers_is_trained_as_it_is(results: list[dict[str, Any]]) -> None:
    model, options = FAMILIES["llama"].build(), settings()
    limit = options.pop("max_grad_norm")
    optimizer, norm = torch.optim.AdamW(model.parameters(), **options), torch.zeros(())
    for step in range(SHORT):
        model(**text_batch(step, 4)).loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
    for result in results:
        found = result["llama"]["weights"]
        assert result["llama"]["norm"] == pytest.approx(norm.item(), rel=1e-5)
        assert found.keys() == model.state_dict().keys()
        for name, value in model.state_dict().items():
            assert torch.linalg.vector_norm(found[name] - value) <= 1e-5 * torch.linalg.vector_norm(
                value
            ), name


def test_units_are_alike_where_parts_are_not(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        (first, uneven), (second, scarce), (third, _), (size,) = result["sizes"]
        assert (first, second, third) == (0, 320, 640) and size == 4096, (
            "room for 300, 300 and 7 elements, in multiples of 64"
        )
        assert (uneven, scarce) == ((300, 300), (200, 0))[rank % 2]


def test_a_gradient_that_is_not_finite_on_one_rank_is_known_to_all(
    results: list[dict[str, Any]],
) -> None:
    """Of a parameter that is divided, and of one that all hold, on a rank that does not count
    it."""
    for name in results[0]["nonfinite"]:
        for result in results:
            found = result["nonfinite"][name]
            assert found["skipped"] == 1 and math.isfinite(found["norm"])
            first, second, third = found["after"]
            assert differing(first, second) == [] and "words.weight" in differing(second, third)
            assert found["norm"] == results[0]["nonfinite"][name]["norm"]


def test_a_checkpoint_is_read_with_any_number_of_data_and_tensor_parallel_ranks(
    results: list[dict[str, Any]],
) -> None:
    for saver, loaders in WAYS.items():
        saved = results[0]["checkpoints"][f"{saver} saved"]
        for rank, result in enumerate(results):
            for loader in loaders:
                found = result["checkpoints"][f"{saver} {loader}"]
                for kind in ("weights", "states"):
                    assert differing(found[kind], saved[kind]) == [], f"{saver} {loader}"
                assert found["extra"] == (
                    0 if saver == "replicas" or loader in ("replicas", "1 x 2") else rank
                )


def test_a_checkpoint_that_is_cut_along_another_dimension_is_read_where_that_can_be(
    results: list[dict[str, Any]],
) -> None:
    """Along the first one and by ranks without tensor parallelism; else it is refused before
    anything is changed."""
    for result in results:
        assert result["solid"].keys() == {"2"}
        assert (
            "cube has cube cut along another dimension than it is here, by tensor parallel "
            "ranks; load it"
        ) in result["solid"]["2"]


def test_who_holds_one_whole_of_the_model_has_a_group(results: list[dict[str, Any]]) -> None:
    assert all(result["savers"] == [0, 1, 2, 3, 6] for result in results)


def test_one_process_reads_a_checkpoint_of_tensor_parallel_ranks(
    results: list[dict[str, Any]], place: Path, tmp_path: Path
) -> None:
    saved = results[0]["checkpoints"]["2 x 2 saved"]
    model = infinity.wrap(build(), configure(tmp_path, CPU))
    with infinity.engine(model) as engine:
        optimizer = infinity.AdamW(model.parameters())
        engine.load_checkpoint(place / "checkpoint 2 x 2", optimizer)
        assert differing(engine.state_dict(), saved["weights"]) == []
        assert differing(flat(optimizer), saved["states"]) == []


def test_tools_of_torch_read_a_checkpoint_of_tensor_parallel_ranks(
    results: list[dict[str, Any]], place: Path, tmp_path: Path
) -> None:
    dcp_to_torch_save(place / "checkpoint 2 x 2", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=False)["model"]
    weights = {
        name: value
        for name, value in results[0]["checkpoints"]["2 x 2 saved"]["weights"].items()
        if name != "head.weight"
    }
    assert (
        found["blocks.0.feed.down.weight"].shape == (WIDTH, 3 * WIDTH)
        and found["blocks.0.feed.up.weight"].ndim == 1
    )
    assert (
        differing(
            {n: v.flatten() for n, v in found.items()}, {n: v.flatten() for n, v in weights.items()}
        )
        == []
    )


def test_states_of_a_torch_optimizer_are_taken_over(
    results: list[dict[str, Any]], place: Path
) -> None:
    states = torch.load(place / "given.pt", weights_only=True)["state"]
    wanted = {
        f"{number} {name}": value
        for number, state in states.items()
        for name, value in state.items()
    }
    for result in results:
        assert differing(result["checkpoints"]["given"], wanted) == []


def test_models_without_memory_get_the_values_of_whole_ones(
    results: list[dict[str, Any]], place: Path, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    whole = Model().state_dict()
    weights = load_file(place / "weights.safetensors")
    weights["head.weight"] = weights["words.weight"]
    for result in results:
        assert differing(result["meta"]["file"], weights) == []
        assert differing(result["meta"]["seed"], whole) == []


def test_a_touch_outside_of_the_forward_is_told(results: list[dict[str, Any]]) -> None:
    text = (
        r"blocks\.0\.feed\.down\.weight \(unit blocks\.0\) lives on cpu and its data was touched "
        r"\(\w+\) outside of its module's forward; use `with infinity\.gathered\(model\):`"
    )
    for result in results:
        *touches, told, facts, edited, closed = result["touches"]
        assert len(touches) == 5
        for said in touches:
            assert re.match(text, said), said
        assert edited.startswith(
            "blocks.0.feed.down.weight was changed in place inside of a forward"
        )
        assert told.endswith("ShardedParameter(blocks.0.feed.down.weight, on cpu, unit blocks.0)")
        assert facts == "(torch.Size([32, 96]), torch.float32, (Shard(dim=1),), None)"
        assert closed.startswith("blocks.0.feed.down.weight has no data any more")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "overlap",
            (
                r"words\.weight is a DTensor on ranks \[.*\], of which `group` also has "
                r"\[\d\]: .*group=mesh\['dp'\]"
            ),
        ),
        (
            "the same mesh",
            r"words\.weight is a DTensor on ranks \[.*\], of which `group` also has \[\d\]",
        ),
        (
            "diagonal",
            (
                r"ranks \[\d, \d\] of `group` hold different parts of the DTensors of the "
                r"model; give the data dimension"
            ),
        ),
        (
            "two meshes",
            (
                r"places is a DTensor on .*, and words\.weight on .*; all parameters must be "
                r"on one mesh"
            ),
        ),
        (
            "two dimensions",
            r"places is a DTensor on a mesh of shape \(2, 2\); one dimension is supported",
        ),
        (
            "partial",
            (
                r"places is a DTensor placed as \(Partial\(.*\); parameters may be "
                r"Shard\(\.\.\.\) or Replicate\(\)"
            ),
        ),
        (
            "odd",
            (
                r"places is a DTensor of shape \(18, 32\) placed as .*, of which this rank "
                r"has \(8, 32\); it should have \(9, 32\)"
            ),
        ),
        ("buffer", r"the buffer table is a DTensor placed as .*; buffers must be Replicate\(\)"),
        (
            "fully_shard",
            (
                r"the model was given to fully_shard; infinity shards over the data parallel "
                r"ranks itself"
            ),
        ),
        (
            "device",
            r"words\.weight is a DTensor on a mesh of cpu, and the model will run on cuda; "
            r"set Config\(tuning=Tuning\(device='cpu'\)\)",
        ),
        (
            "unknown",
            (
                r"unknown\.weight is on the meta device and has no values, because it was not "
                r"built inside infinity\.init\(\)"
            ),
        ),
        (
            "adapt",
            (
                r"RMSprop would see of a DTensor what this rank has of it, and not the whole; "
                r".* infinity\.AdamW"
            ),
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_changed(
    name: str, text: str, results: list[dict[str, Any]]
) -> None:
    for result in results:
        assert re.match(text, result["wrong"][name]), result["wrong"][name]


def test_who_does_not_come_is_named(results: list[dict[str, Any]]) -> None:
    for result in results[:3]:
        assert result["stuck"].startswith(
            "sum of gradients that there are failed and the engine cannot go on: rank"
        ), result["stuck"]
    for result in results[1:3]:  # they have a group with it
        assert "rank 3 waits for no collective" in result["stuck"]


@given(rows=st.integers(1, 7), width=st.integers(1, 9), left=st.integers(0, 5), data=st.data())
def test_boxes_are_the_elements_in_their_order(
    rows: int, width: int, left: int, data: st.DataObject
) -> None:
    begin = data.draw(st.integers(0, rows * width))
    end = data.draw(st.integers(begin, rows * width))
    matrix = torch.arange(rows * (left + width + 2)).view(rows, -1)
    wanted = matrix[:, left : left + width].flatten()[begin:end]
    found = list(pieces.boxes(begin, end, width, left))
    assert len(found) <= 3
    assert [box.number for box in found] == [
        sum(b.rows * b.columns for b in found[:i]) for i in range(len(found))
    ]
    parts = [
        matrix[b.row : b.row + b.rows, b.column : b.column + b.columns].flatten() for b in found
    ]
    assert torch.equal(torch.cat([*parts, wanted[:0]]), wanted)


class Many(nn.Module):
    """Parameters of which none ends where a chunk does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ParameterList(
            nn.Parameter(torch.randn(size)) for size in (9000, 50_000, 300, 70_001, 40_000)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return sum(part.pow(3).sum() for part in self.parts)  # type: ignore[return-value]


def test_the_norm_of_what_counts_does_not_depend_on_chunks(tmp_path: Path) -> None:
    found = set()
    for memory in ("1MiB", "16MiB"):
        model = infinity.wrap(Many(), configure(tmp_path, NVME | {"cpu_memory": memory}))
        with infinity.engine(model) as engine:
            (unit,) = engine.units
            model(batch(0)).backward()
            Probe(engine).updater.settle([unit])
            unit.facts = replace(unit.facts, counted=(False, True, True, False, True))
            store, kernels = Probe(engine).store, Probe(engine).norm_kernels
            chunks = len(unit.states.chunks())
            norm = squared_gradient_norm(unit, store, kernels, range(5))
            counted = [
                (3 * p.detach().double() ** 2).float()
                for p, counts in zip(Many().parts, unit.facts.counted, strict=True)
                if counts
            ]
            assert norm == pytest.approx(
                sum(g.double().square().sum().item() for g in counted), rel=1e-6
            )
            found.add((chunks, norm))
            engine.zero_grad()
            (model(batch(0)) * math.inf).backward()
            Probe(engine).updater.settle([unit])
            unit.facts = replace(unit.facts, counted=(False,) * 5)
            assert math.isnan(squared_gradient_norm(unit, store, kernels, range(5)))
    (few, one), (many, other) = sorted(found)
    assert few < many and one == other


def test_a_plain_tensor_is_all_there(tmp_path: Path) -> None:
    assert bounds_of(torch.zeros(3)) == ()
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = parallelize(build(), mesh)
        infinity.wrap(model, configure(tmp_path, CPU), group=mesh)
        with infinity.engine(model) as engine:
            model(batch(0)).backward()
            assert Probe(engine).exchange is None, "one rank needs nobody"
    finally:
        dist.destroy_process_group()
