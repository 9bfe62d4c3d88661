"""Ranks that were given other models, settings or optimizers all raise one `ConfigError` that says
in what they differ, and none of them hangs or trains on a mixture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import infinity
from support.configs import config_of
from support.rank_group import RANKS, OnRanks, run_ranks

WIDTH = 16


def build(case: str, other: bool) -> nn.Module:
    torch.manual_seed(0)
    hidden = WIDTH + 8 if case == "width" and other else WIDTH
    layers = {"a": nn.Linear(WIDTH, hidden), "b": nn.Linear(hidden, WIDTH)}
    if case == "order" and other:
        layers = dict(reversed(layers.items()))
    if case == "names" and other:
        layers = {"a": layers["a"], "c": layers["b"]}
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    if case == "frozen" and other:
        layers["a"].weight.requires_grad_(False)
    if case == "dtype" and other:
        layers["a"].to(torch.bfloat16)
    if case == "tied" and other:
        layers["b"].weight = layers["a"].weight
    return model


SETTINGS: dict[str, dict[str, Any]] = {
    "moments": {"moment_precision": "int8"},
    "update": {"update": "delayed", "delayed_after": 1},
    "precision": {"precision": "bf16"},
    "stage": {"stage": 0},
    "homes": {"gradients": "gpu"},
    "split": {"split_master": False},
    "inference": {"inference": True},
}


def wrapped(case: str, where: Path, other: bool, group: Any) -> nn.Module:
    where.mkdir(exist_ok=True)
    own: dict[str, Any] = {"nvme": where, "gpu_memory": "4MiB", "cpu_memory": "16MiB"}
    if other:
        own |= SETTINGS.get(case, {})
    if case == "may differ" and other:
        own |= {"gpu_memory": "5MiB", "cpu_memory": "17MiB", "cache": 0, "poison": True}
        own |= {"verify": "always", "instruction_set": "scalar", "collective_timeout": 90.0}
    settings = {"device": "cpu", "threads": 1, "collective_timeout": 60.0} | own
    model = build(case, other)
    units = [model] if case == "units" and other else None
    seed = 1 if case == "seed" and other else None
    return infinity.wrap(model, config_of(**settings), group=group, units=units, seed=seed)


def refusal(of: Callable[[], object]) -> str:
    try:
        of()
    except infinity.ConfigError as error:
        return str(error)
    return ""


def work(task: str, where: Path, rank: int) -> None:
    """One rank of two: see `support/rank_group`."""
    kind, _, case = task.partition(": ")
    said = globals()[kind](case, where, rank)
    (where / f"{rank}.txt").write_text(said)


def wrap(case: str, where: Path, rank: int) -> str:
    try:
        model = wrapped(case, where / str(rank), rank == 1, dist.group.WORLD)
    except infinity.ConfigError as error:
        return str(error)
    infinity.engine(model).close()
    return "wrapped"


def said_by(on_ranks: OnRanks, task: str, where: Path) -> str:
    assert on_ranks(task) == ["done"] * RANKS
    first, second = ((where / f"{rank}.txt").read_text() for rank in range(RANKS))
    assert first == second
    return first


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("width", "parameter a.weight is float32 [16, 16], trained on rank 0 and float32 [24, 16]"),
        ("order", "the next in order is parameter a.weight on rank 0 and parameter b.weight on"),
        (
            "names",
            "parameter b.weight is float32 [16, 16], trained on rank 0 and missing on rank 1",
        ),
        ("frozen", "parameter a.weight is float32 [16, 16], trained on rank 0 and"),
        ("dtype", "parameter a.weight is float32 [16, 16], trained on rank 0 and bfloat16"),
        ("tied", "parameter b.weight is float32 [16, 16], trained on rank 0 and"),
        ("moments", "moment_precision is 'fp32' on rank 0 and 'int8' on rank 1"),
        ("update", "update is 'auto' on rank 0 and 'delayed' on rank 1"),
        ("precision", "precision is 'auto' on rank 0 and 'bf16' on rank 1"),
        ("stage", "stage is 3 on rank 0 and 0 on rank 1"),
        ("homes", "gradients is 'cpu' on rank 0 and 'gpu' on rank 1"),
        ("split", "split_master is True on rank 0 and False on rank 1"),
        ("inference", "inference is False on rank 0 and True on rank 1"),
        ("seed", "seed is None on rank 0 and 1 on rank 1"),
        ("units", "unit a is 4096 elements of float32 on rank 0 and missing on rank 1"),
        ("same", "wrapped"),
        ("may differ", "wrapped"),
    ],
)
def test_wrap_compares_what_ranks_were_given(
    case: str, expected: str, on_ranks: OnRanks, tmp_path: Path
) -> None:
    assert expected in said_by(on_ranks, f"wrap: {case}", tmp_path)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "learning rate": {"lr": 1e-3},
    "clip": {"max_grad_norm": 1.0},
    "betas": {"betas": (0.8, 0.999)},
    "class": {},
    "parameters": {},
    "groups": {},
}


def step(case: str, where: Path, rank: int) -> str:
    """What the first step says; after that the ranks are the same, and train."""
    other = rank == 1
    model = wrapped("", where / str(rank), False, dist.group.WORLD)
    settings = {"lr": 1e-2} | (OPTIMIZERS[case] if other else {})
    kind = infinity.Adam if case == "class" and other else infinity.AdamW
    given: Any = list(model.parameters())
    if case == "parameters" and other:
        given = given[1:]
    if case == "groups" and other:
        given = [{"params": given[:1]}, {"params": given[1:], "weight_decay": 0.5}]
    optimizer = kind(given, **settings)
    with infinity.engine(model) as engine:
        before = engine.state_dict()
        model(torch.ones(2, WIDTH)).square().mean().backward()
        said = refusal(optimizer.step)
        after = engine.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        if case == "learning rate":  # what was refused can be mended
            for group in optimizer.param_groups:
                group["lr"] = 1e-2
            optimizer.step()
            after = engine.state_dict()
            assert not torch.equal(before["a.weight"], after["a.weight"])
            optimizer.param_groups[0]["lr"] = 0.5 + rank  # as by a scheduler
            said += " then " + refusal(optimizer.step)
    return said


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("learning rate", "lr of group 0 is 0.01 on rank 0 and 0.001 on rank 1"),
        ("clip", "max_grad_norm is None on rank 0 and 1.0 on rank 1"),
        ("betas", "betas of group 0 is (0.9, 0.999) on rank 0 and (0.8, 0.999) on rank 1"),
        ("class", "the optimizer is AdamW on rank 0 and Adam on rank 1"),
        ("parameters", "the group of a.weight is 0 on rank 0 and missing on rank 1"),
        ("groups", "the number of groups is 1 on rank 0 and 2 on rank 1"),
    ],
)
def test_a_step_compares_optimizers(
    case: str, expected: str, on_ranks: OnRanks, tmp_path: Path
) -> None:
    said = said_by(on_ranks, f"step: {case}", tmp_path)
    assert expected in said
    if case == "learning rate":
        assert "then the ranks differ: lr of group 0 is 0.5 on rank 0 and 1.5 on rank 1" in said


def serve(where: Path, rank: int, ranks: int) -> None:
    """One rank of four, in a mesh of two replicas with two shards each; rank 2 has another model,
    and later another optimizer."""
    dist.init_process_group(
        "gloo", init_method=f"file://{where}/store", rank=rank, world_size=ranks
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    said = refusal(lambda: wrapped("width", where / f"a{rank}", rank == 2, mesh))
    assert "trained on ranks 0, 1 and 3 and float32 [24, 16], trained on rank 2" in said
    model = wrapped("", where / f"b{rank}", False, mesh)
    optimizer = infinity.AdamW(model.parameters(), lr=0.5 if rank == 2 else 0.25)
    model(torch.ones(2, WIDTH)).square().mean().backward()
    assert "lr of group 0 is 0.25 on ranks 0, 1 and 3 and 0.5 on rank 2" in refusal(optimizer.step)
    infinity.engine(model).close()
    # Half of the ranks are a group of their own, and the others another one.
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    said = refusal(lambda: wrapped("width", where / f"c{rank}", rank >= 2, halves[rank // 2]))
    assert not said
    dist.barrier()
    dist.destroy_process_group()


def test_all_ranks_of_a_mesh_are_compared(tmp_path: Path) -> None:
    run_ranks(__file__, tmp_path, ranks=4)


def stage(case: str, where: Path, rank: int) -> str:
    """Stages of a pipeline, whose clip must be one."""
    model = wrapped("width", where / str(rank), rank == 1, None)
    limit = 2.0 if rank == 1 else 1.0
    optimizer = infinity.AdamW(
        model.parameters(), max_grad_norm=limit, lr=0.5 + rank, norm_group=dist.group.WORLD
    )
    model(torch.ones(2, WIDTH)).square().mean().backward()
    with infinity.engine(model):
        return refusal(optimizer.step)


def test_stages_compare_what_they_clip_by(on_ranks: OnRanks, tmp_path: Path) -> None:
    said = said_by(on_ranks, "stage: ", tmp_path)
    assert "max_grad_norm is 1.0 on rank 0 and 2.0 on rank 1" in said
