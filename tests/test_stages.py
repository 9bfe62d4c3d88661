"""ZeRO stages 0 to 3 and hybrid sharding at two, three and four ranks: the same numbers, the collectives and memory of the stage.

This file is also what each rank runs: all the cases of one number of ranks, one after the other.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from configs import config_of
from conftest import CHILD
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import infinity
from infinity.placement.memory import bytes_on_tiers
from infinity.sharding import collectives

WIDTH, WORDS, ROWS, STEPS = 48, 40, 24, 4
GPU, CPU = (dict.fromkeys(("parameters", "gradients", "optimizer"), tier) for tier in ("gpu", "cpu"))
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
    "early updates": {"stage": 2} | GPU | {"optimizer": "nvme", "update": "speculative"},
    "all kept": {"stage": 3, "gradients": "nvme", "gpu_cache": "4MiB"},
    "some kept": {"stage": 3, "gpu_cache": "200KiB"},
    "some kept, little memory": {"stage": 3, "gpu_cache": "200KiB", "gpu_memory": "440KiB"} | CPU,
    "ZeRO-1, some kept": {"stage": 1} | GPU | {"optimizer": "nvme", "gpu_cache": "200KiB"},
    "ZeRO-2, some kept": {"stage": 2, "gpu_cache": "200KiB"} | CPU | {"parameters": "gpu"},
    # The first, or both, of the two micro-batches inside of no_sync.
    "data parallel, no_sync": {"stage": 0, "apart": 1} | GPU,
    "data parallel, no_sync to the end": {"stage": 0, "apart": 2, "gradients": "nvme"},
    "ZeRO-1, no_sync": {"stage": 1, "apart": 2} | GPU,
    "ZeRO-2, no_sync": {"stage": 2, "apart": 1} | GPU | {"optimizer": "nvme", "update": "speculative"},
    "ZeRO-3, no_sync": {"stage": 3, "apart": 2} | CPU,
}
HYBRID = {f"hybrid {name}": CASES[name] for name in ("ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-Inf-NVMe", *list(CASES)[-2:])}
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
        return functional.cross_entropy(self.head(x).flatten(0, 1), ((ids * 3 + 1) % WORDS).flatten())


def train(case: dict[str, Any], directory: Path, rank: int, ranks: Any = None) -> dict[str, Any]:
    """Train as `rank` of `ranks`, a group or a mesh, on its rows of every batch; what was computed, and what it took."""
    directory.mkdir()
    values = {"nvme": directory, "gpu_memory": "8MiB", "cpu_memory": "8MiB", "cache": 0, "precision": "fp32", "poison": True}
    values |= {"gpu_cache": 0, "device": "cpu", "threads": 1, "copy_on_write": case.get("update") == "speculative"}
    parts, apart = case.get("parts", 2), case.get("apart", 0)
    config = config_of(**(values | {key: value for key, value in case.items() if key not in ("parts", "apart")}))
    model = infinity.wrap(Model(), config, group=ranks)
    calls: Counter[str] = Counter()
    with infinity.engine(model) as engine, pytest.MonkeyPatch.context() as monkeypatch:
        count_collectives(monkeypatch, calls)
        used, shards = engine.memory(), engine.units[0].layout.ranks
        used["gpu"] -= 0 if engine._buffer is None else engine._buffer._memory.numel()
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2, eps=1e-6, max_grad_norm=0.5)
        losses, norms = [0.0] * STEPS, []
        for step in range(STEPS):
            engine._rest()  # what was gathered ahead belongs to the step before
            calls.clear()
            batch = torch.randint(0, WORDS, (ROWS, 4), generator=torch.Generator().manual_seed(step))
            mine = batch if ranks is None else batch.chunk(dist.get_world_size())[rank]
            for number, part in enumerate(mine.chunk(parts)):
                loss = model(part) / parts
                with infinity.no_sync(model) if number < apart else nullcontext():
                    loss.backward()
                losses[step] += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            norms.append(optimizer.grad_norm)
        engine._rest()
        in_last_step = dict(calls)
        saved = directory.parent / f"saved {directory.name.rpartition(' ')[0]}"  # the same for all ranks
        engine.save_checkpoint(saved, optimizer)
        trainable, frozen = (sum(u.layout.numel for u in engine.units if u.trainable is trains) for trains in (True, False))
        return {
            "losses": losses, "norms": norms, "weights": engine.state_dict(),
            "states": flat(optimizer), "saved": str(saved),
            "calls": in_last_step, "units": (len(engine.units), sum(unit.trainable for unit in engine.units)),
            "used": used, "formula": bytes_on_tiers(trainable, config, shards, frozen),
        }  # fmt: skip


def flat(optimizer: infinity.AdamW) -> dict[str, torch.Tensor]:
    """The states of all parameters."""
    states = optimizer.state_dict()["state"]
    return {f"{number} {name}": value for number, state in states.items() for name, value in state.items()}


def count_collectives(monkeypatch: pytest.MonkeyPatch, calls: Counter[str]) -> None:
    """Count the collectives that move parameters or gradients."""

    def count(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def counted(*values: Any) -> None:
            calls[name] += values[-1] is not None
            call(*values)

        return counted

    for name in ("all_gather", "reduce_scatter_mean", "all_reduce_mean"):
        monkeypatch.setattr(collectives, name, count(name, getattr(collectives, name)))


def serve(directory: Path, rank: int, ranks: int) -> None:
    """One rank, from start to end."""
    torch.set_num_threads(1)
    meeting = f"file://{directory}/rendezvous"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    results = {name: train(case, directory / f"{name} {rank}", rank, dist.group.WORLD) for name, case in CASES.items()}
    if ranks == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        results |= {name: train(case, directory / f"{name} {rank}", rank, mesh) for name, case in HYBRID.items()}
    torch.save(results, directory / f"results{rank}.pt")
    dist.destroy_process_group()


# This side


@pytest.fixture(scope="module", params=[3, 4])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank, then by case."""
    directory, ranks = tmp_path_factory.mktemp(f"ranks{request.param}"), request.param
    command = [sys.executable, __file__, str(directory)]
    options = CHILD | {"env": CHILD["env"] | {"GLOO_SOCKET_IFNAME": "lo"}}
    processes = [subprocess.Popen([*command, str(rank), str(ranks)], stderr=subprocess.PIPE, **options) for rank in range(ranks)]
    said = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(said)
    return [torch.load(directory / f"results{rank}.pt", weights_only=True) for rank in range(ranks)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train({}, tmp_path_factory.mktemp("alone") / "nvme", 0)
    finally:
        torch.set_num_threads(before)


def same(one: dict[str, Any], other: dict[str, Any], *keys: str) -> bool:
    return all(
        one[key].keys() == other[key].keys() and all(torch.equal(value, other[key][name]) for name, value in one[key].items())
        for key in keys
    )


def test_every_stage_computes_what_one_rank_does(results: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for name in results[0]:
        sums = [sum(values) / len(results) for values in zip(*(result[name]["losses"] for result in results), strict=True)]
        assert sums == pytest.approx(alone["losses"], rel=1e-5), name
        assert results[0][name]["norms"] == pytest.approx(alone["norms"], rel=1e-5), name
        assert any(norm > 0.5 for norm in alone["norms"]), "some step is clipped"
        for kind in ("weights", "states"):
            for key, value in alone[kind].items():
                difference = torch.linalg.vector_norm(results[0][name][kind][key].double() - value.double())
                assert difference <= 1e-5 * torch.linalg.vector_norm(value.double()), f"{name}: {key}"


def test_ranks_agree_and_stages_and_placements_change_no_bit(results: list[dict[str, Any]]) -> None:
    """Of those that add gradients in the same order: replicas do not, and stage 1 adds up micro-batches first."""
    for rank, result in enumerate(results):
        for name, found in result.items():
            assert same(found, results[0][name], "weights", "states"), name
            case = CASES.get(name, {"stage": 0})
            if case["stage"] >= (1 if "parts" in case else 2):
                reference = "ZeRO-3, one micro-batch" if "parts" in case else "ZeRO-3"
                assert same(found, results[0][reference], "weights", "states"), name
                assert found["losses"] == result[reference]["losses"], name
                assert found["norms"] == results[0][reference]["norms"], name
        assert rank == 0 or result["ZeRO-3"]["losses"] != results[0]["ZeRO-3"]["losses"], "the ranks have different data"


def test_collectives_are_those_of_the_stage(results: list[dict[str, Any]]) -> None:
    """In a step of two micro-batches."""
    for result in results:
        for name, found in result.items():
            case, calls, (units, trained) = (CASES | HYBRID)[name], found["calls"], found["units"]
            stage, parts, apart = case["stage"], case.get("parts", 2), case.get("apart", 0)
            reductions = trained if stage == 1 else parts * trained
            averages = trained if stage == 1 else (parts - apart + (apart == parts)) * trained
            assert calls.get("reduce_scatter_mean", 0) == (0 if stage == 0 else reductions), name
            assert calls.get("all_reduce_mean", 0) == (averages if stage == 0 or "hybrid" in name else 0), name
            gathers = calls.get("all_gather", 0)
            if "little memory" in name:
                assert units < gathers <= 4 * units, "at most for forward and for backward, twice"
            else:
                assert gathers == (0 if stage == 0 else trained), (
                    "once per step where all fits; what is frozen was gathered before"
                )


def test_checkpoints_of_every_stage_are_read_by_one_rank(results: list[dict[str, Any]]) -> None:
    """Replicas save once; every rank waits until all is there."""
    where = Path(results[0]["ZeRO-3"]["saved"]).parent
    for name, found in results[0].items():
        model = infinity.wrap(Model(), config_of(gpu_memory="8MiB", cpu_memory="8MiB", precision="fp32", **GPU))
        with infinity.engine(model) as engine:
            optimizer = infinity.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
            engine.load_checkpoint(where / f"saved {name}", optimizer)
            assert same({"weights": engine.state_dict(), "states": flat(optimizer)}, found, "weights", "states"), name


def test_memory_is_that_of_the_formula(results: list[dict[str, Any]]) -> None:
    for result in results:
        for name, found in result.items():
            if "some kept" in name:  # whole units only
                assert 0 < found["used"]["gpu"] <= found["formula"]["gpu"], name
                assert sum(found["used"].values()) == pytest.approx(sum(found["formula"].values())), name
            else:
                assert found["used"] == found["formula"], name


@pytest.mark.parametrize("stage", [0, 1])
def test_a_mesh_that_cannot_be(stage: int, tmp_path: Path) -> None:
    try:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1, 1) if stage == 0 else (1, 1, 1))
        with pytest.raises(
            infinity.ConfigError, match=rf"a mesh of shape \(1, 1.*\) with stage={stage}: give one of one dimension"
        ):
            infinity.wrap(Model(), config_of(nvme=tmp_path, gpu_memory="8MiB", cpu_memory="8MiB", stage=stage, **GPU), group=mesh)
    finally:
        dist.destroy_process_group()


def test_one_rank_needs_no_collectives(tmp_path: Path) -> None:
    found = train({"stage": 2} | GPU, tmp_path / "nvme", 0)
    assert not any(found["calls"].values())
    assert found["losses"] == train({}, tmp_path / "other", 0)["losses"]


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
