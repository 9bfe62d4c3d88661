"""Pipeline stages of `torch.distributed.pipelining`, each wrapped, beside data, tensor and expert
parallel ranks: they compute what one rank does.

This file is also what each rank runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

import infinity
from support.configs import config_of
from support.rank_group import run_ranks

WIDTH, HEAD, EXPERTS, WORDS = 16, 4, 4, 29
ROWS, LENGTH, PARTS, STEPS = 16, 6, 4, 2
LIMIT = 0.1  # of the gradient norm
DIMENSIONS = ("pp", "dp", "tp")
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero bubble": ScheduleInterleavedZeroBubble,
}
CASES: dict[int, dict[str, dict[str, Any]]] = {
    4: {
        "stages alone": {"mesh": (4, 1, 1), "schedule": "1f1b"},
        "stages alone, in host memory": {"mesh": (4, 1, 1), "schedule": "gpipe", "tier": "cpu"},
        "two stages on a rank": {"mesh": (2, 2, 1), "schedule": "interleaved"},
        "data": {"mesh": (2, 2, 1), "schedule": "1f1b"},
        "replicas": {"mesh": (2, 2, 1), "schedule": "1f1b", "stage": 0},
        "tensor and experts": {"mesh": (2, 1, 2), "schedule": "1f1b"},
        "data, tensor and experts": {"mesh": (1, 2, 2), "schedule": "gpipe"},
        "backward in two parts": {"mesh": (4, 1, 1), "schedule": "zero bubble"},
        "unit norms": {"mesh": (4, 1, 1), "schedule": "1f1b", "clip": "unit"},
    },
    8: {"all": {"mesh": (2, 2, 2), "schedule": "interleaved"}},
}
"""By the number of ranks."""


def blocks_of(case: dict[str, Any]) -> int:
    """How many blocks the model has: one for each stage at least, and two where each has a norm."""
    return 8 if case["schedule"] == "zero bubble" or "clip" in case else 4


REFUSED: dict[str, dict[str, Any]] = {
    "shards": {"mesh": (1, 4, 1)},
    "replicas": {"mesh": (1, 4, 1), "stage": 0},
    "tensor parallel": {"mesh": (1, 1, 4)},
}


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
        found = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """A mixture whose every expert sees every token, as much as its gate says.

    Expert parallel ranks have the same tokens, and each some of the experts: a sum over the ranks
    is what all experts say.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, up, down, mesh, first = self.gate(x).softmax(-1), self.up, self.down, None, 0
        if isinstance(up, DTensor) and isinstance(down, DTensor):
            mesh, up, down = up.device_mesh, up.to_local(), down.to_local()
            first = mesh.get_local_rank() * len(up)
            x, weights = (
                DTensor.from_local(each, mesh, [Replicate()]).to_local(grad_placements=[Partial()])
                for each in (x, weights)
            )
        total = torch.zeros_like(x)
        for number in range(len(up)):
            said = functional.gelu(x @ up[number]) @ down[number]
            total = total + said * weights[..., first + number, None]
        if mesh is None:
            return total
        return (
            DTensor.from_local(total, mesh, [Partial()])
            .redistribute(placements=[Replicate()])
            .to_local()
        )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.experts = Attention(), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.experts(self.norm2(x))


class Part(nn.Module):
    """Blocks from `first` to before `end`; with the embedding or the head where the model begins or
    ends."""

    def __init__(self, blocks: list[Block], words: nn.Embedding | None, head: Any) -> None:
        super().__init__()
        self.words, self.blocks, self.head = words, nn.ModuleList(blocks), head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.words is None else self.words(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def parts(number: int, depth: int) -> list[Part]:
    """The model of `depth` blocks in `number` parts; each time with the same values."""
    torch.manual_seed(0)
    words, blocks = nn.Embedding(WORDS, WIDTH), [Block() for _ in range(depth)]
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))
    each = depth // number
    return [
        Part(
            blocks[at * each : (at + 1) * each],
            words if at == 0 else None,
            head if at == number - 1 else None,
        )
        for at in range(number)
    ]


def loss_of(outputs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), ((ids * 3 + 1) % WORDS).flatten())


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def config(directory: Path, tier: str = "nvme", stage: int = 3) -> infinity.Config:
    directory.mkdir(parents=True)
    return config_of(
        nvme=directory,
        gpu_memory="1MiB",
        cpu_memory="4MiB",
        cache=0,
        device="cpu",
        threads=1,
        parameters=tier,
        optimizer=tier,
        stage=stage,
    )


def settings(clip: str) -> dict[str, Any]:
    # Adam's step hardly depends on the size of a gradient unless eps is of that size.
    return {"lr": 1e-2, "eps": 1e-3, "max_grad_norm": LIMIT, "clip": clip}


def train_alone(directory: Path, clip: str, depth: int) -> dict[str, Any]:
    """A run on one rank, with the parts of each batch one after the other."""
    model = nn.Sequential(*parts(1, depth))
    infinity.wrap(model, config(directory), group=None)
    with infinity.engine(model) as engine:
        optimizer = infinity.AdamW(model.parameters(), **settings(clip))
        losses, norms = [], []
        for step in range(STEPS):
            losses.append(0.0)
            for part in batch(step).chunk(PARTS):
                loss = loss_of(model(part), part) / PARTS
                loss.backward()
                losses[-1] += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            norms.append(optimizer.grad_norm)
        weights = {name.removeprefix("0."): v for name, v in engine.state_dict().items()}
    return {"losses": losses, "norms": norms, "weights": weights}


# On the ranks


def parallelize(stage: Part, mesh: DeviceMesh) -> Part:
    """Heads and experts divided among tensor parallel ranks."""
    heads = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    for block in stage.blocks:
        parallelize_module(block, mesh, heads | {"attention.out": RowwiseParallel()})
        for name in ("up", "down"):
            whole = getattr(block.experts, name).detach()
            divided = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
            setattr(block.experts, name, divided)
    return stage


def train(directory: Path, case: dict[str, Any]) -> dict[str, Any]:
    """A run by the schedule; what this rank knows of it."""
    mesh = init_device_mesh("cpu", case["mesh"], mesh_dim_names=DIMENSIONS)
    rank, ranks = mesh["pp"].get_local_rank(), mesh["pp"].size()
    of_several = case["schedule"] in ("interleaved", "zero bubble")
    numbers = [rank, rank + ranks] if of_several else [rank]
    depth = blocks_of(case)
    every = parts(len(numbers) * ranks, depth)
    stages = nn.ModuleList(every[number] for number in numbers)
    if mesh["tp"].size() > 1:
        for stage in stages:
            parallelize(stage, mesh["tp"])  # type: ignore[arg-type]
    place = directory / f"nvme{dist.get_rank()}"
    values = config(place, case.get("tier", "nvme"), case.get("stage", 3))
    infinity.wrap(stages, values, group=mesh["dp"])
    with infinity.engine(stages) as engine:
        optimizer = infinity.AdamW(
            stages.parameters(), norm_group=mesh["pp"], **settings(case.get("clip", "global"))
        )
        pipeline = [
            PipelineStage(
                stage, number, len(every), torch.device("cpu"), group=mesh.get_group("pp")
            )
            for stage, number in zip(stages, numbers, strict=True)
        ]
        schedule = SCHEDULES[case["schedule"]](
            pipeline if of_several else pipeline[0], PARTS, loss_fn=loss_of
        )
        found: dict[str, Any] = {"losses": [], "norms": []}
        for step in range(STEPS):
            losses: list[torch.Tensor] = []
            rows = own_rows(step, mesh)
            schedule.step(*([rows] if rank == 0 else []), target=rows, losses=losses)
            optimizer.step()
            optimizer.zero_grad()
            found["losses"].append(sum(loss.item() for loss in losses) / PARTS)
            found["norms"].append(optimizer.grad_norm)
        weights = engine.state_dict()
    names = dict(zip(map(str, range(len(numbers))), numbers, strict=True))
    return found | {"weights": dict(renamed(weights, names, depth // len(every)))}


def own_rows(step: int, mesh: DeviceMesh) -> torch.Tensor:
    """Of each part of the batch what this data parallel rank has."""
    at, ranks = mesh["dp"].get_local_rank(), mesh["dp"].size()
    return torch.cat([part.chunk(ranks)[at] for part in batch(step).chunk(PARTS)])


def renamed(
    weights: dict[str, torch.Tensor], stage_of: dict[str, int], blocks: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """`weights` of stages by their names in the whole model."""
    for name, value in weights.items():
        at, kind, *rest = name.split(".")
        if kind == "blocks":
            rest[0] = str(int(rest[0]) + blocks * stage_of[at])
        yield ".".join([kind, *rest]), value


def broken(directory: Path) -> dict[str, Any]:
    """A gradient that is not finite on the last stage alone: what the others make of it."""
    mesh = init_device_mesh("cpu", (4, 1, 1), mesh_dim_names=DIMENSIONS)
    rank, found = mesh["pp"].get_local_rank(), {}
    for way in ("skip_nonfinite", "error_if_nonfinite"):
        model = infinity.wrap(nn.Linear(2, 2), config(directory / f"{way} {rank}"), group=None)
        with infinity.engine(model) as engine:
            optimizer = infinity.AdamW(model.parameters(), norm_group=mesh["pp"], **{way: True})
            before = engine.state_dict()
            model(torch.ones(1, 2)).mul(math.inf if rank == 3 else 1.0).sum().backward()
            try:
                optimizer.step()
                found[way] = ""
            except infinity.NonFiniteError as error:
                found[way] = str(error)
            after = engine.state_dict()
            assert all(torch.equal(value, after[name]) for name, value in before.items())
            assert optimizer.skipped_steps == (way == "skip_nonfinite")
    return found


def refused(directory: Path) -> dict[str, str]:
    """What is said of schedules that split the backward, with several ranks for each stage."""
    said = {}
    for name, case in REFUSED.items():
        try:
            train(directory / f"refused {name}", case | {"schedule": "zero bubble"})
        except RuntimeError as error:
            said[name] = f"{error} {error.__cause__}"
        dist.barrier()
    return said


def serve(directory: Path, rank: int, ranks: int) -> None:
    """One rank, from start to end."""
    meeting = f"file://{directory}/rendezvous"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    results = {name: train(directory / name, case) for name, case in CASES[ranks].items()}
    if ranks == 4:
        results["refused"] = refused(directory)
        results["broken"] = broken(directory)
    torch.save(results, directory / f"results{rank}.pt")
    dist.destroy_process_group()


# This side


@pytest.fixture(scope="module", params=CASES)
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each rank found."""
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks(__file__, directory, request.param)
    return [torch.load(directory / f"results{rank}.pt") for rank in range(request.param)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Any]:
    """What one rank computes, by what clips and the number of blocks."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("alone")
    try:
        return {
            (clip, depth): train_alone(directory / f"{clip}{depth}", clip, depth)
            for clip, depth in (("global", 4), ("global", 8), ("unit", 8))
        }
    finally:
        torch.set_num_threads(before)


def test_they_compute_what_one_rank_does(
    results: list[dict[str, Any]], alone: dict[tuple[str, int], Any]
) -> None:
    for name, case in CASES[len(results)].items():
        expected = alone[case.get("clip", "global"), blocks_of(case)]
        found = [result[name] for result in results]
        last = [result["losses"] for result in found if result["losses"][0]]
        groups = case["mesh"][1] * case["mesh"][2]
        assert len(last) == groups, name
        means = [sum(step) / groups for step in zip(*last, strict=True)]
        assert means == pytest.approx(expected["losses"], rel=1e-5), name
        for result in found:
            assert result["norms"] == found[0]["norms"], name
            assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5), name
        weights = {n: value for result in found for n, value in result["weights"].items()}
        assert weights.keys() == expected["weights"].keys()
        for key, value in weights.items():
            torch.testing.assert_close(value, expected["weights"][key], rtol=1e-4, atol=2e-5)


def test_every_step_is_clipped(alone: dict[tuple[str, int], Any]) -> None:
    """Else a norm of one stage alone would show nowhere."""
    assert all(norm > LIMIT for depth in (4, 8) for norm in alone["global", depth]["norms"])


def test_placement_changes_no_bit(results: list[dict[str, Any]]) -> None:
    for result in results if len(results) == 4 else ():
        nvme, memory = (result[f"stages alone{more}"] for more in ("", ", in host memory"))
        assert nvme["losses"] == memory["losses"]
        assert nvme["norms"] == memory["norms"]
        assert all(torch.equal(v, memory["weights"][n]) for n, v in nvme["weights"].items())


def test_a_gradient_that_is_not_finite_stops_all_stages(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results if len(results) == 4 else ()):
        said = result["broken"]["error_if_nonfinite"]
        culprit = "weight" if rank == 3 else "a parameter of another rank of norm_group"
        assert f"the gradient of {culprit} is not finite" in said


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="its schedule sends to its own rank, which gloo cannot do"
)
def test_a_backward_in_two_parts_is_refused_where_ranks_share_a_stage(
    results: list[dict[str, Any]],
) -> None:
    for result in results if len(results) == 4 else ():
        assert result["refused"].keys() == REFUSED.keys()
        for said in result["refused"].values():
            assert "use ScheduleGPipe, Schedule1F1B or ScheduleInterleaved1F1B" in said


def test_what_is_no_group_is_refused(tmp_path: Path) -> None:
    model = infinity.wrap(nn.Linear(2, 2), config(tmp_path / "nvme"))
    given: Any = "pp"
    with (
        infinity.engine(model),
        pytest.raises(infinity.ConfigError, match="norm_group='pp' is neither"),
    ):
        infinity.AdamW(model.parameters(), norm_group=given)
