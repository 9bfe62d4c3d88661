"""What scripts do to a plain model works alike on all ranks of a wrapped one."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from support.configs import config_of
from support.models import text_batch, transformer
from support.rank_group import RANKS, OnRanks

STAGES = (0, 1, 2, 3)


def work(task: Any, where: Path, rank: int) -> None:
    """One rank of two: see `support/rank_group`."""
    for stage in STAGES:
        found = globals()[task](stage, where, rank)
        torch.save(found, where / f"{stage}_{rank}.pt")


def wrapped(stage: int, where: Path, rank: int) -> nn.Module:
    (where / str(stage)).mkdir(exist_ok=True)
    on_gpu = {"parameters": "gpu", "gradients": "gpu"} if stage in (1, 2) else {}
    config = config_of(
        **on_gpu,
        nvme=where / str(stage),
        gpu_memory=4 << 20,
        cpu_memory=8 << 20,
        cache=0,
        precision="fp32",
        stage=stage,
    )
    return infinity.wrap(transformer(), config)


def gradients(stage: int, where: Path, rank: int) -> dict[str, Any]:
    """Norms, gradients and weights after clips and changes."""
    model = wrapped(stage, where, rank)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    with contextlib.closing(infinity.engine(model)) as engine:
        model(**text_batch(rank)).loss.backward()
        norms = [float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))]
        norms.append(float(model.tokens.weight.grad.norm()))
        norms.append(float(nn.utils.get_total_norm([model.norm.weight.grad], float("inf"))))
        model.tokens.weight.grad[0] = 0.0
        model.norm.weight.grad = torch.full(model.norm.weight.shape, 0.5)
        kept = {name: engine.gradient(p) for name, p in model.named_parameters()}
        optimizer.step()
        return {"norms": norms, "gradients": kept, "weights": engine.state_dict()}


def weights(stage: int, where: Path, rank: int) -> dict[str, Any]:
    """A state dict, one that was loaded, and that of a part."""
    model = wrapped(stage, where, rank)
    with contextlib.closing(infinity.engine(model)):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict({name: value + 1 for name, value in before.items()})
        loaded = dict(model.state_dict())
        model.blocks[1].load_state_dict(model.blocks[0].state_dict())
        part = dict(model.blocks[1].state_dict())
        return {"before": before, "loaded": loaded, "part": part}


def states(stage: int, where: Path, rank: int) -> dict[str, Any]:
    """What each rank gets and sets, as a whole and in parts."""
    model = wrapped(stage, where, rank)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    with contextlib.closing(infinity.engine(model)):
        model(**text_batch(rank)).loss.backward()
        optimizer.step()
        weight, found = model.tokens.weight, {}
        for name in ("value", "grad", "exp_avg", "exp_avg_sq"):
            part = infinity.get(weight, name, local=True)
            found[name] = infinity.get(weight, name), part
            infinity.set(weight, name, part + 1, local=True)
            found[f"{name} in parts"] = infinity.get(weight, name)
            infinity.set(weight, name, found[name][0])
            found[f"{name} again"] = infinity.get(weight, name)
        with torch.no_grad(), infinity.gathered(model.norm, write_rank=1):
            model.norm.weight.fill_(rank + 5)
        found["written"] = infinity.get(model.norm.weight)
        optimizer.zero_grad()
        found["loss"] = model(**text_batch(0)).loss.detach()
        return found


def reads(stage: int, where: Path, rank: int) -> dict[str, Any]:
    """What the last rank alone reads after each change of weights, and what all compute then."""
    model = wrapped(stage, where, rank)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-1)
    found: dict[str, Any] = {}

    def note(after: str) -> None:
        alone = rank == RANKS - 1 and stage < 3
        values = [(p + 0).detach() for p in model.parameters()] if alone else []
        state = engine.state_dict()
        with torch.no_grad():
            loss = model.eval()(**text_batch(0)).loss
        model.train()
        names = [name for name, _ in model.named_parameters()]
        found[after] = loss, [state[name].clone() for name in names], values

    def step() -> None:
        model(**text_batch(rank)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with contextlib.closing(infinity.engine(model)) as engine:
        note("wrap")
        step()
        note("step")
        engine.save_checkpoint(where / f"checkpoint{stage}", optimizer)
        states = copy.deepcopy(optimizer.state_dict())
        step()
        with torch.no_grad(), infinity.gathered(model.norm, write=True):
            model.norm.weight.fill_(2.0)
        note("gathered")
        infinity.set(model.tokens.weight, "value", torch.ones(model.tokens.weight.shape))
        note("set")
        model.load_state_dict({name: p + 1 for name, p in engine.state_dict().items()})
        note("load_state_dict")
        engine.load_checkpoint(where / f"checkpoint{stage}", optimizer)
        note("load_checkpoint")
        optimizer.load_state_dict(states)
        step()
        note("another step")
        return found


def results(on_ranks: OnRanks, task: str, where: Path) -> list[list[Any]]:
    assert on_ranks(task) == ["done"] * RANKS
    return [[torch.load(where / f"{stage}_{rank}.pt") for rank in range(RANKS)] for stage in STAGES]


def plain_gradients() -> dict[str, Any]:
    model = transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sum(model(**text_batch(rank)).loss / RANKS for rank in range(RANKS)).backward()
    norms = [float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))]
    norms.append(float(model.tokens.weight.grad.norm()))
    norms.append(float(nn.utils.get_total_norm([model.norm.weight.grad], float("inf"))))
    model.tokens.weight.grad[0] = 0.0
    model.norm.weight.grad = torch.full(model.norm.weight.shape, 0.5)
    kept = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    return {"norms": norms, "gradients": kept, "weights": model.state_dict()}


@pytest.mark.timeout(240)
def test_gradients_are_read_clipped_and_changed(on_ranks: OnRanks, tmp_path: Path) -> None:
    expected = plain_gradients()
    for stage in results(on_ranks, "gradients", tmp_path):
        for found in stage:
            assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
            for name, value in expected["gradients"].items():
                torch.testing.assert_close(found["gradients"][name], value, rtol=1e-4, atol=1e-7)
            for name, value in expected["weights"].items():
                torch.testing.assert_close(found["weights"][name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.timeout(240)
def test_state_dicts_are_whole_on_every_rank(on_ranks: OnRanks, tmp_path: Path) -> None:
    expected = transformer().state_dict()
    for stage in results(on_ranks, "weights", tmp_path):
        for found in stage:
            assert list(found["before"]) == list(expected)
            for name, value in expected.items():
                assert torch.equal(found["before"][name], value)
                assert torch.equal(found["loaded"][name], value + 1)
                if name.startswith("blocks.0."):
                    assert torch.equal(found["part"][name.removeprefix("blocks.0.")], value + 1)


@pytest.mark.timeout(240)
def test_states_are_read_and_set_in_parts(on_ranks: OnRanks, tmp_path: Path) -> None:
    for number, stage in zip(STAGES, results(on_ranks, "states", tmp_path), strict=True):
        for name in ("value", "grad", "exp_avg", "exp_avg_sq"):
            whole = stage[0][name][0]
            parts = [found[name][1] for found in stage]
            joined = parts[0] if number == 0 else torch.cat(parts)
            assert torch.equal(joined, whole.view(-1)), name
            for found in stage:
                assert torch.equal(found[name][0], whole), name
                assert torch.equal(found[f"{name} in parts"], whole + 1), name
                assert torch.equal(found[f"{name} again"], whole), name
        for found in stage:
            assert torch.equal(found["written"], torch.full((32,), 6.0))
            assert torch.equal(found["loss"], stage[0]["loss"])


@pytest.mark.timeout(240)
def test_weights_are_current_whatever_changed_them(on_ranks: OnRanks, tmp_path: Path) -> None:
    """The forward computes with them on all ranks; in stages 0 to 2 one rank alone reads them."""
    for number, stage in zip(STAGES, results(on_ranks, "reads", tmp_path), strict=True):
        first, last = stage
        for after, (loss, weights, alone) in last.items():
            assert torch.equal(loss, first[after][0]), after
            assert len(alone) == (len(weights) if number < 3 else 0)
            for value, weight in zip(alone, weights, strict=False):
                assert torch.equal(value, weight), after
        assert torch.equal(last["load_checkpoint"][0], last["step"][0])
        assert any(bool((weight == 1).all()) for weight in last["set"][1])
        assert not torch.equal(last["another step"][0], last["step"][0])
