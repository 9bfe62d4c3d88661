"""What scripts read of a model at stage 3 before and after `initialize`, on two ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from support.deepspeed import batch, configuration, net
from support.local_models import save_causal
from support.rank_group import RANKS, OnRanks

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

WEIGHT = "model.layers.0.self_attn.q_proj.weight"
STAGE_3 = configuration(zero_optimization={"stage": 3})
RATE = 1e-2


def work(task: Any, where: Path, rank: int) -> None:
    """One rank of two: see `support/rank_group`."""
    torch.save(globals()[task](where, rank), where / f"{task}{rank}.pt")


def on_both(on_ranks: OnRanks, task: str, where: Path) -> list[Any]:
    """What the task returned on each rank."""
    assert on_ranks(task) == ["done"] * RANKS
    return [torch.load(where / f"{task}{rank}.pt") for rank in range(RANKS)]


def keeps(where: Path, rank: int) -> Any:
    """Aliases that outlive the blocks that gathered them; one rank writes to one of them."""
    engine, *_ = infinity.initialize(model=net(), config=STAGE_3)
    model = engine.module
    with infinity.zero.GatheredParameters(model.first.weight, modifier_rank=1):
        data = model.first.weight.data
        if rank == 1:
            data.mul_(2)
    kept = {}
    for name, parameter in model.named_parameters():
        with infinity.zero.GatheredParameters([parameter]):
            kept[name] = parameter.data.cpu()
    engine.backward(engine(*batch(rank)))
    engine.step()
    found = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.destroy()
    return data, kept, found


def test_aliases_may_be_kept_on_all_ranks(on_ranks: OnRanks, tmp_path: Path) -> None:
    plain = net()
    with torch.no_grad():
        plain.first.weight.mul_(2)
    before = copy.deepcopy(plain.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=RATE, weight_decay=0.1)
    for rank in range(RANKS):
        (plain(*batch(rank)) / RANKS).backward()
    optimizer.step()
    for data, kept, found in on_both(on_ranks, "keeps", tmp_path):
        assert torch.equal(data, before["first.weight"])
        assert set(kept) == set(before) - {"scale"}
        for name, value in kept.items():
            assert torch.equal(value, before[name])
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(found[name], value)


def turned(where: Path, rank: int) -> Any:
    """Blocks that gather parameters in another order on each rank, as sets of parameters do."""
    turn = -1 if rank else 1
    found = []
    with infinity.zero.Init():  # the parameters of two such blocks are told apart
        model = nn.Sequential(nn.Linear(4, 4, bias=False))
    with infinity.zero.Init():
        model.append(nn.Linear(4, 4, bias=False))
    engine = None
    for _ in range(2):
        with infinity.zero.GatheredParameters(list(model.parameters())[::turn], modifier_rank=0):
            for number, parameter in enumerate(model.parameters()):
                parameter.data.fill_(number if rank == 0 else -1)
        with infinity.zero.GatheredParameters(list(model.parameters())[::turn]):
            found.append([parameter.data.clone() for parameter in model.parameters()])
        if engine is None:
            engine, *_ = infinity.initialize(model=model, config=STAGE_3)
            model = engine.module
    engine.destroy()
    return found


def test_each_rank_may_gather_in_its_own_order(on_ranks: OnRanks, tmp_path: Path) -> None:
    expected = [torch.full((4, 4), float(number)) for number in range(2)]
    for found in on_both(on_ranks, "turned", tmp_path):
        for values in found:
            assert all(map(torch.equal, values, expected))


def tokens(number: int) -> torch.Tensor:
    """The batch of that number, of two rows."""
    return (torch.arange(16).view(2, 8) * 5 + number) % 60 + 4


def adapted(model: nn.Module, kind: Any) -> nn.Module:
    """`model` with LoRA, whose adapters are initialized by `kind`."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=kind)
    return get_peft_model(model, config)


def read(model: nn.Module, rank: int | None = None) -> dict[str, torch.Tensor]:
    """What scripts read of a model before they train it. The rank 1 doubles a weight, and where
    there are no ranks, plain code does."""
    found = {}
    weight = model.get_parameter(WEIGHT)
    with infinity.zero.GatheredParameters([weight]):
        found["gathered"] = weight.data.clone()
    found["state"] = model.state_dict()[WEIGHT].clone()
    found["copy"] = copy.deepcopy(model).state_dict()[WEIGHT].clone()
    with torch.no_grad():
        found["norm"] = weight.norm()
        found["logits"] = model(tokens(0)).logits
    with infinity.zero.GatheredParameters([weight], modifier_rank=1 if rank is not None else None):
        if rank in (None, 1):
            weight.data.mul_(2)
    found["written"] = model.state_dict()[WEIGHT].clone()
    return found


def reads(where: Path, rank: int) -> Any:
    """A model of files, read, given adapters, and trained."""
    from transformers import LlamaForCausalLM

    found = []
    for kind in (True, "pissa"):
        with infinity.zero.Init():
            model = LlamaForCausalLM.from_pretrained(where / "model")
        was_read = read(model, rank)
        engine, *_ = infinity.initialize(model=adapted(model, kind), config=STAGE_3)
        losses = []
        for number in range(2):
            batch = tokens(RANKS * number + rank)
            loss = engine(input_ids=batch, labels=batch).loss
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        engine.destroy()
        found.append((was_read, losses))
    return found


def test_models_are_read_before_initialize(on_ranks: OnRanks, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from transformers import LlamaForCausalLM

    save_causal(tmp_path / "model")
    theirs = on_both(on_ranks, "reads", tmp_path)
    for number, kind in enumerate((True, "pissa")):
        plain = LlamaForCausalLM.from_pretrained(tmp_path / "model")
        expected = read(plain)
        model = adapted(plain, kind)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.1)
        losses = []
        for step in range(2):
            optimizer.zero_grad()
            for rank in range(RANKS):
                batch = tokens(RANKS * step + rank)
                loss = model(input_ids=batch, labels=batch).loss
                losses.append(loss.item())
                (loss / RANKS).backward()
            optimizer.step()
        for rank, found in enumerate(theirs):
            was_read, ours = found[number]
            for name, value in expected.items():
                assert torch.equal(was_read[name], value), name
            assert ours == pytest.approx(losses[rank::RANKS], rel=1e-5)
