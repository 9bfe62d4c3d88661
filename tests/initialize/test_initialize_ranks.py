"""`infinity.initialize` on two ranks: every stage, with the numbers of one process."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.deepspeed import checkpoints as tagged
from infinity.deepspeed import fragments
from infinity_command.run import shim
from support.deepspeed import Net, batch, configuration, net
from support.rank_group import RANKS, OnRanks
from support.roads import API, road

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 3
CONSOLIDATED = "_zero3_consolidated_16bit_state_dict"
"""As transformers and accelerate call it."""


def work(task: Any, where: Path, rank: int) -> None:
    """One rank of two: see `support/rank_group`."""
    torch.save(globals()[task](where, rank), where / f"{task}{rank}.pt")


def on_both(on_ranks: OnRanks, task: str, where: Path) -> list[Any]:
    """What the task returned on each rank."""
    assert on_ranks(task) == ["done"] * RANKS
    return [torch.load(where / f"{task}{rank}.pt") for rank in range(RANKS)]


def of_stage(stage: int, where: Path, **keys: Any) -> dict[str, Any]:
    """States on NVMe at stage 3, and of the optimizer in host memory at others."""
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        offload = {"device": "nvme", "nvme_path": str(where / "nvme")}
        zero |= {"offload_param": offload, "offload_optimizer": offload}
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    elif stage:
        zero["offload_optimizer"] = {"device": "cpu"}
    return configuration(zero_optimization=zero, gradient_clipping=0.5, **keys)


def train(engine: Any, rank: int, by_script: bool) -> list[float]:
    """Losses of two forwards a step; the ranks have other batches."""
    losses = []
    for number in range(2 * STEPS):
        with engine.no_sync() if number % 2 == 0 else contextlib.nullcontext():
            loss = engine(*batch(2 * number + rank))
            losses.append(loss.item())
            if by_script:
                loss.backward()
            else:
                engine.backward(loss)
        engine.step()
    return losses


def stages(where: Path, rank: int) -> list[Any]:
    """Losses, norms and weights of every stage, with the mean and the sum of gradients."""
    found = []
    for stage in range(4):
        for reduction in ("mean", "sum"):
            config = of_stage(
                stage, where, gradient_accumulation_steps=2, gradient_allreduce_op=reduction
            )
            engine, *_ = infinity.initialize(model=net(), config=config)
            losses = train(engine, rank, by_script=stage % 2 == 0)
            weights = {k: v.clone() for k, v in engine.module_state_dict().items()}
            found.append((reduction, losses, engine.get_global_grad_norm(), weights))
            assert engine.train_batch_size() == 8 and engine.global_samples == 8 * STEPS
            engine.destroy()
    return found


def plain(reduction: str) -> tuple[list[list[float]], float, dict[str, torch.Tensor]]:
    """The same in one process: losses of each rank, the last norm, and the weights."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses: list[list[float]] = [[], []]
    norm = torch.zeros(())
    for number in range(2 * STEPS):
        for rank in range(RANKS):
            loss = model(*batch(2 * number + rank))
            losses[rank].append(loss.item())
            (loss / 2 / (RANKS if reduction == "mean" else 1)).backward()
        if number % 2:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return losses, norm.item(), model.state_dict()


@road(API, "a loop", "`torchrun`", "0, 1, 2, 3", ranks=2)
def test_every_stage_has_the_numbers_of_one_process(on_ranks: OnRanks, tmp_path: Path) -> None:
    found = on_both(on_ranks, "stages", tmp_path)
    for each in zip(*found, strict=True):
        losses, norm, weights = plain(each[0][0])
        for rank, (_, mine, my_norm, kept) in enumerate(each):
            torch.testing.assert_close(
                torch.tensor(mine), torch.tensor(losses[rank]), rtol=1e-6, atol=1e-6
            )
            assert my_norm == pytest.approx(norm, rel=1e-5)
            for name, value in weights.items():
                torch.testing.assert_close(kept[name], value, rtol=1e-5, atol=1e-6)


def checkpoints(where: Path, rank: int) -> Any:
    """Tags, states of a run that goes on, parts of parameters, and weights."""
    config = of_stage(3, where, checkpoint={"tag_validation": "Fail"})
    engine, *_ = infinity.initialize(model=net(), config=config)
    for number in range(2):
        engine.backward(engine(*batch(2 * number + rank)))
        engine.step()
    with pytest.raises(AssertionError, match="under different tags"):
        engine.save_checkpoint(where, tag=f"rank{rank}")
    engine.settings = dataclasses.replace(engine.settings, tag_validation="warn")
    engine.save_checkpoint(where, tag=f"rank{rank}")
    with (
        mock.patch.object(tagged, "write_latest", side_effect=OSError("no space")),
        pytest.raises(infinity.CheckpointError, match=r"no space; .* load it with tag='mine'"),
    ):
        engine.save_checkpoint(where, tag="mine")
    engine.save_checkpoint(where, client_state={"rank": rank})
    consolidated = getattr(engine, CONSOLIDATED)()
    engine.save_16bit_model(where / "whole")
    engine.backward(engine(*batch(10 + rank)))
    engine.step()
    expected = {k: v.clone() for k, v in engine.module_state_dict().items()}
    other, *_ = infinity.initialize(model=net(1), config=config)
    path, client_state = other.load_checkpoint(where)
    other.backward(other(*batch(10 + rank)))
    weight = other.module.second.weight
    part = fragments.safe_get_local_grad(weight)
    whole = fragments.safe_get_full_grad(weight)
    other.step()
    same = all(torch.equal(v, expected[k]) for k, v in other.module_state_dict().items())
    engine.destroy()
    other.destroy()
    return {
        "path": path,
        "client": client_state,
        "same": same,
        "weights": consolidated is not None,
        "part": part,
        "whole": whole,
        "left": sorted(each.name for each in (where / "nvme").iterdir()),
    }


def test_checkpoints_of_two_ranks(on_ranks: OnRanks, tmp_path: Path) -> None:
    found = on_both(on_ranks, "checkpoints", tmp_path)
    for rank, each in enumerate(found):
        assert each["path"] == str(tmp_path / "global_step2")
        assert each["client"] == {"rank": rank} and each["same"]
        assert each["weights"] == (rank == 0)
    parts = torch.cat([each["part"] for each in found])
    assert torch.equal(parts, found[0]["whole"].reshape(-1))
    assert set(torch.load(tmp_path / "whole" / "pytorch_model.bin")) == set(net().state_dict())
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert (tmp_path / "rank0").is_dir() and not (tmp_path / "rank1").exists()
    assert not [name for each in found for name in each["left"] if name.startswith("engine")]


def apart(where: Path, rank: int) -> Any:
    """A directory that the script has made on each rank, as with `TemporaryDirectory`."""
    mine = where / f"made by rank {rank}"
    mine.mkdir()
    engine, *_ = infinity.initialize(model=net(), config=of_stage(3, where))
    engine.backward(engine(*batch(rank)))
    engine.step()
    engine.save_checkpoint(mine)
    other, *_ = infinity.initialize(model=net(1), config=of_stage(3, where))
    path, _ = other.load_checkpoint(mine)
    expected = engine.module_state_dict()
    same = all(torch.equal(v, expected[k]) for k, v in other.module_state_dict().items())
    engine.destroy()
    other.destroy()
    return path, same


def test_ranks_of_a_machine_save_where_the_first_one_does(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    path = tmp_path / "made by rank 0" / "global_step1"
    assert on_both(on_ranks, "apart", tmp_path) == [(str(path), True)] * RANKS
    assert list((tmp_path / "made by rank 1").iterdir()) == []


class Router(nn.Module):
    """Each rank uses a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.experts[which](x).square().mean()


def routes(where: Path, rank: int) -> Any:
    """A leaf module whose parts are used by one rank each, and parameters that one rank writes."""
    torch.manual_seed(0)
    with infinity.zero.Init(config_dict_or_path=of_stage(3, where)):
        model = Router()
    infinity.zero.set_z3_leaf_modules(model, [Router])
    engine, *_ = infinity.initialize(model=model, config=of_stage(3, where))
    for number in range(2):
        engine.backward(engine(batch(number)[0], rank))
        engine.step()
    with infinity.zero.GatheredParameters(model.experts[2].bias, modifier_rank=1):
        if rank == 1:
            with torch.no_grad():
                model.experts[2].bias.fill_(5.0)
    weights = {k: v.clone() for k, v in engine.module_state_dict().items()}
    engine.destroy()
    return weights


def test_ranks_may_use_other_parts_of_a_leaf_module(on_ranks: OnRanks, tmp_path: Path) -> None:
    found = on_both(on_ranks, "routes", tmp_path)
    torch.manual_seed(0)
    model = Router()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for number in range(2):
        for rank in range(RANKS):
            (model(batch(number)[0], rank) / RANKS).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model.experts[2].bias.fill_(5.0)
    for each in found:
        for name, value in model.state_dict().items():
            torch.testing.assert_close(each[name], value, rtol=1e-5, atol=1e-6)


def failures(where: Path, rank: int) -> str:
    """A scheduler that fails on one rank leaves no rank with an engine."""

    def schedule(optimizer: Any) -> Any:
        if rank == 1:
            raise ValueError("no schedule")
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    model = net()
    try:
        infinity.initialize(model=model, config=of_stage(3, where), lr_scheduler=schedule)
    except (infinity.InfinityError, ValueError) as error:
        assert type(model.first.weight) is nn.Parameter
        dist.barrier()
        return str(error)
    return ""


def test_a_failure_on_one_rank_is_one_of_all(on_ranks: OnRanks, tmp_path: Path) -> None:
    first, second = on_both(on_ranks, "failures", tmp_path)
    assert "rank 1 failed: ValueError: no schedule" in first
    assert second == "no schedule"


def sums(where: Path, rank: int) -> float:
    """Through the package for scripts of DeepSpeed, and with a key that only changes traffic."""
    engine, *_ = infinity.initialize(model=net(), config=configuration(sparse_gradients=True))
    assert engine.sparse_tensor_module_names == set()
    engine.destroy()
    with mock.patch.object(sys, "path", [str(shim()), *sys.path]):
        from deepspeed import comm
    values = torch.tensor(rank + 1.0)
    comm.inference_all_reduce(values)
    return values.item()


def test_ranks_add_up(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_both(on_ranks, "sums", tmp_path) == [3.0, 3.0]


def counts(where: Path, rank: int) -> None:
    """What accelerate keeps on ranks without a GPU where DeepSpeed is asked for."""
    accelerate = pytest.importorskip("accelerate.state")
    state, deepspeed = accelerate.PartialState(), accelerate.DistributedType.DEEPSPEED
    model = net()
    with (
        mock.patch.multiple(state, distributed_type=deepspeed, num_processes=1),
        pytest.raises(infinity.ConfigError, match="counts 1 rank where there are 2, because"),
    ):
        infinity.initialize(model=model, config=configuration())
    infinity.initialize(model=model, config=configuration())[0].destroy()


def test_accelerate_counts_wrong(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_both(on_ranks, "counts", tmp_path)


def beginnings(where: Path, rank: int) -> Any:
    """Models that each rank seeds differently, and one whose values the second rank has."""
    found = {}
    for kind in ("plain", "zero", "changed"):
        torch.manual_seed(rank)
        if kind == "plain":
            model = Net()
        else:
            with infinity.zero.Init():
                model = Net()
        found[f"{kind} drawn"] = torch.rand(2)
        if kind == "changed":
            with infinity.zero.GatheredParameters(model.first.weight, modifier_rank=1):
                if rank == 1:
                    model.first.weight.data.normal_()
            with infinity.zero.GatheredParameters([model.first.weight]):
                found["gathered"] = torch.zeros(16, 8).copy_(model.first.weight.data)
        engine, *_ = infinity.initialize(model=model, config=of_stage(3, where))
        found[kind] = {k: v.clone() for k, v in engine.module_state_dict().items()}
        engine.destroy()
    return found


def test_ranks_begin_with_one_model(on_ranks: OnRanks, tmp_path: Path) -> None:
    first, second = on_both(on_ranks, "beginnings", tmp_path)
    torch.manual_seed(0)
    expected = Net().state_dict()
    for kind in ("plain", "zero", "changed"):
        for name, value in expected.items():
            assert torch.equal(first[kind][name], second[kind][name])
            if kind != "changed" or name != "first.weight":
                assert torch.equal(first[kind][name], value), f"{kind} {name}"
        assert not torch.equal(first[f"{kind} drawn"], second[f"{kind} drawn"])
    assert torch.equal(first["gathered"], second["gathered"])
    assert torch.equal(first["gathered"], first["changed"]["first.weight"])
    assert not torch.equal(first["gathered"], expected["first.weight"])


def evaluations(where: Path, rank: int) -> Any:
    """A model that was evaluated, and is trained then."""
    found, model = [], net()
    for stage in (3, 1):
        config = of_stage(stage, where)
        del config["optimizer"]
        engine, *_ = infinity.initialize(model=model, config=config)
        found.append(engine(*batch(0)).item())
        engine.destroy()
    engine, *_ = infinity.initialize(model=model, config=of_stage(3, where))
    engine.backward(engine(*batch(rank)))
    engine.step()
    found.append(engine(*batch(0)).item())
    engine.destroy()
    return found


def test_ranks_evaluate_and_then_train(on_ranks: OnRanks, tmp_path: Path) -> None:
    first, second = on_both(on_ranks, "evaluations", tmp_path)
    expected = net()(*batch(0)).item()
    assert first == second and first[:2] == [expected] * 2
    assert first[2] != expected
