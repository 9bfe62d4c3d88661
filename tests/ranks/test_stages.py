"""ZeRO stages 0 to 3 and hybrid sharding at two, three and four ranks: the same numbers, the
collectives and memory of the stage.

This file is also what each rank runs: all the cases of one number of ranks, one after the other.
Two ranks do all cases. Three do those whose parts may be uneven, and four those of a mesh. With
`make long-test` four do all.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import infinity
from support.configs import config_of
from support.rank_group import run_ranks
from support.stages import CASES, GPU, HYBRID, Model, flat, same, train

COMPARED = ("ZeRO-1", "ZeRO-3", "ZeRO-3, one micro-batch")
"""Cases whose bits others must have."""
UNEVEN = (
    *("data parallel", "ZeRO-1", "ZeRO-1, gradients at home", "ZeRO-2", "ZeRO-3", "ZeRO-Inf-NVMe"),
    *("ZeRO-3, one micro-batch", "some kept, little memory", "ZeRO-3, no_sync"),
)
"""What three ranks do, among whom nothing is divided evenly."""
GROUPS: dict[str, tuple[int, tuple[str, ...]]] = {
    "two": (2, tuple(CASES)),
    "three": (3, UNEVEN),
    "four": (4, (*COMPARED, *HYBRID)),
    "four, all": (4, (*CASES, *HYBRID)),
}
"""How many ranks, and their cases."""


def serve(directory: Path, rank: int, ranks: int) -> None:
    """One rank, from start to end."""
    meeting = f"file://{directory}/rendezvous"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    _, names = GROUPS[directory.name.rstrip(string.digits)]
    mesh = dist.group.WORLD
    if ranks == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    results = {}
    for name in names:
        group = mesh if name in HYBRID else dist.group.WORLD
        results[name] = train((CASES | HYBRID)[name], directory / f"{name} {rank}", rank, group)
    torch.save(results, directory / f"results{rank}.pt")
    dist.destroy_process_group()


# This side


@pytest.fixture(
    scope="module",
    params=["two", "three", "four", pytest.param("four, all", marks=pytest.mark.long)],
)
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """By rank, then by case."""
    directory, (ranks, _) = tmp_path_factory.mktemp(request.param), GROUPS[request.param]
    run_ranks(__file__, directory, ranks)
    return [torch.load(directory / f"results{rank}.pt", weights_only=True) for rank in range(ranks)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train({}, tmp_path_factory.mktemp("alone") / "nvme", 0)
    finally:
        torch.set_num_threads(before)


def test_every_stage_computes_what_one_rank_does(
    results: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    for name in results[0]:
        sums = [
            sum(values) / len(results)
            for values in zip(*(result[name]["losses"] for result in results), strict=True)
        ]
        assert sums == pytest.approx(alone["losses"], rel=1e-5), name
        assert results[0][name]["norms"] == pytest.approx(alone["norms"], rel=1e-5), name
        assert any(norm > 0.5 for norm in alone["norms"]), "some step is clipped"
        for kind in ("weights", "states"):
            for key, value in alone[kind].items():
                difference = torch.linalg.vector_norm(
                    results[0][name][kind][key].double() - value.double()
                )
                assert difference <= 1e-5 * torch.linalg.vector_norm(value.double()), (
                    f"{name}: {key}"
                )


def test_ranks_agree_and_stages_and_placements_change_no_bit(results: list[dict[str, Any]]) -> None:
    """Of those that add gradients in the same order: replicas do not, and stage 1 adds up
    micro-batches first."""
    for rank, result in enumerate(results):
        for name, found in result.items():
            assert same(found, results[0][name], "weights", "states"), name
            case = CASES.get(name, {"stage": 0})
            if case["stage"] >= 1:
                reference = "ZeRO-1" if case["stage"] == 1 else "ZeRO-3"
                reference = "ZeRO-3, one micro-batch" if "parts" in case else reference
                assert same(found, results[0][reference], "weights", "states"), name
                assert found["losses"] == result[reference]["losses"], name
                assert found["norms"] == results[0][reference]["norms"], name
        assert rank == 0 or result["ZeRO-3"]["losses"] != results[0]["ZeRO-3"]["losses"], (
            "the ranks have different data"
        )


def test_collectives_are_those_of_the_stage(results: list[dict[str, Any]]) -> None:
    """In a step of two micro-batches."""
    for result in results:
        for name, found in result.items():
            case, calls, (units, trained) = (CASES | HYBRID)[name], found["calls"], found["units"]
            stage, parts, apart = case["stage"], case.get("parts", 2), case.get("apart", 0)
            reductions = trained if stage == 1 else parts * trained
            averages = trained if stage == 1 else (parts - apart + (apart == parts)) * trained
            assert calls.get("reduce_scatter_mean", 0) == (0 if stage == 0 else reductions), name
            assert calls.get("all_reduce_mean", 0) == (
                averages if stage == 0 or "hybrid" in name else 0
            ), name
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
        model = infinity.wrap(
            Model(), config_of(gpu_memory="8MiB", cpu_memory="8MiB", precision="fp32", **GPU)
        )
        with infinity.engine(model) as engine:
            optimizer = infinity.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
            engine.load_checkpoint(where / f"saved {name}", optimizer)
            assert same(
                {"weights": engine.state_dict(), "states": flat(optimizer)},
                found,
                "weights",
                "states",
            ), name


def test_memory_is_that_of_the_formula(results: list[dict[str, Any]]) -> None:
    for result in results:
        for name, found in result.items():
            if "some kept" in name:  # whole units only
                assert 0 < found["used"]["gpu"] <= found["formula"]["gpu"], name
                assert sum(found["used"].values()) == pytest.approx(
                    sum(found["formula"].values())
                ), name
            else:
                assert found["used"] == found["formula"], name


@pytest.mark.parametrize("stage", [0, 1])
def test_a_mesh_that_cannot_be(stage: int, tmp_path: Path) -> None:
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
        )
        mesh = init_device_mesh("cpu", (1, 1) if stage == 0 else (1, 1, 1))
        with pytest.raises(
            infinity.ConfigError,
            match=rf"a mesh of shape \(1, 1.*\) with stage={stage}: give one of one dimension",
        ):
            infinity.wrap(
                Model(),
                config_of(nvme=tmp_path, gpu_memory="8MiB", cpu_memory="8MiB", stage=stage, **GPU),
                group=mesh,
            )
    finally:
        dist.destroy_process_group()


def test_one_rank_needs_no_collectives(tmp_path: Path) -> None:
    found = train({"stage": 2} | GPU, tmp_path / "nvme", 0)
    assert not any(found["calls"].values())
    assert found["losses"] == train({}, tmp_path / "other", 0)["losses"]
