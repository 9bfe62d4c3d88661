"""Expert parallel plans of transformers beside data parallel ranks: with the same tokens on all
expert parallel ranks, and with tokens of their own, which an all-to-all sends.

This file is also what each rank runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

import infinity
from support.configs import config_of
from support.rank_group import run_ranks

RANKS, WORDS, ROWS, LENGTH, STEPS = 4, 31, 8, 6, 3
CASES: dict[str, dict[str, Any]] = {
    "all-to-all, the same tokens": {"way": "all_to_all"},
    "all-reduce, the same tokens": {"way": "all_reduce"},
    "the same tokens, recomputed in parts": {
        "way": "all_to_all",
        "recompute": "all",
        "partition_activations": True,
    },
    "tokens of its own": {"way": "all_to_all", "own": True},
}


def build() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        use_cache=False,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return Qwen3MoeForCausalLM(config)


def spread(model: Qwen3MoeForCausalLM, experts: DeviceMesh, same: DeviceMesh, way: str) -> None:
    """Experts on the ranks of a mesh, of which those of `same` have the same tokens."""
    plan: dict[str, str] = {}
    for number in range(len(model.model.layers)):
        name = f"model.layers.{number}.mlp.experts"
        plan |= {f"{name}.{part}": "grouped_gemm" for part in ("gate_up_proj", "down_proj")}
        plan[name] = "ep_dispatch_experts"
    whole = {name: p.detach().clone() for name, p in model.named_parameters() if name in plan}
    apply_expert_parallelism(model, experts, same, plan, way)
    with torch.no_grad():
        for name, values in whole.items():
            parameter = model.get_parameter(name)
            parameter.copy_(distribute_tensor(values, experts, [Shard(0)]))


def join_experts(model: nn.Module, experts: DeviceMesh) -> None:
    """Have gradients be means over expert parallel ranks that have tokens of their own."""
    number, group = experts.size(), experts.get_group()

    def mean(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient / number
        dist.all_reduce(total, group=group)
        return total

    for parameter in model.parameters():
        divided = isinstance(parameter, DTensor)  # has the gradients of all tokens already
        parameter.register_hook((lambda gradient: gradient / number) if divided else mean)


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def config(directory: Path, **values: Any) -> infinity.Config:
    directory.mkdir(parents=True)
    return config_of(
        nvme=directory,
        gpu_memory="2MiB",
        cpu_memory="4MiB",
        cache=0,
        precision="fp32",
        device="cpu",
        threads=1,
        **values,
    )


def steps(model: nn.Module, rows: Any) -> dict[str, Any]:
    """Losses and norms of steps on the rows of each batch, and the weights after them."""
    with infinity.engine(model) as engine:
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2, eps=1e-3, max_grad_norm=0.1)
        losses, norms = [], []
        for step in range(STEPS):
            ids = rows(batch(step))
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            norms.append(optimizer.grad_norm)
        return {"losses": losses, "norms": norms, "weights": engine.state_dict()}


def train(directory: Path, case: dict[str, Any]) -> dict[str, Any]:
    """A run on 2 data x 2 expert parallel ranks."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "ep", "alone"))
    model, own = build(), case.get("own", False)
    spread(model, mesh["ep"], mesh["alone" if own else "ep"], case["way"])
    if own:
        join_experts(model, mesh["ep"])
    more = {key: value for key, value in case.items() if key not in ("way", "own")}
    place = directory / f"nvme{dist.get_rank()}"
    infinity.wrap(model, config(place, **more), group=mesh["dp"])
    number = dist.get_rank() if own else mesh["dp"].get_local_rank()
    return steps(model, lambda ids: ids.chunk(RANKS if own else 2)[number])


def refused(directory: Path) -> str:
    """What is said where experts lie among the data parallel ranks."""
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("ep", "alone"))
    model = build()
    spread(model, mesh["ep"], mesh["alone"], "all_to_all")
    with pytest.raises(infinity.ConfigError) as error:
        infinity.wrap(model, config(directory / f"refused{dist.get_rank()}"))
    return str(error.value)


def serve(directory: Path, rank: int, ranks: int) -> None:
    """One rank, from start to end."""
    meeting = f"file://{directory}/rendezvous"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    results: dict[str, Any] = {name: train(directory / name, case) for name, case in CASES.items()}
    results["refused"] = refused(directory)
    torch.save(results, directory / f"results{rank}.pt")
    dist.destroy_process_group()


# This side


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks(__file__, directory, RANKS)
    return [torch.load(directory / f"results{rank}.pt") for rank in range(RANKS)]


def test_they_compute_what_one_rank_does(results: list[dict[str, Any]], tmp_path: Path) -> None:
    model = build()
    infinity.wrap(model, config(tmp_path / "nvme"), group=None)
    expected = steps(model, lambda ids: ids)
    assert all(norm > 0.1 for norm in expected["norms"]), "nothing is clipped"
    for name in CASES:
        found = [result[name] for result in results]
        losses = [sum(each) / RANKS for each in zip(*(r["losses"] for r in found), strict=True)]
        assert losses == pytest.approx(expected["losses"], rel=1e-5), name
        for result in found:
            assert result["norms"] == found[0]["norms"], name
            assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5), name
            for key, value in expected["weights"].items():
                torch.testing.assert_close(result["weights"][key], value, rtol=1e-4, atol=2e-5)


def test_experts_among_data_parallel_ranks_are_refused(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert "experts" in result["refused"] and "docs/ranks.md" in result["refused"]
