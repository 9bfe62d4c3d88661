"""Masters begin with all bits that the weights came with, wherever these came from and wherever
they go.

Two processes over gloo call `work` of this file, too (see `support/rank_group.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import infinity
from infinity.placement.spec import Kind
from infinity.sharding.states import States
from support.configs import config_of
from support.models import Transformer, rounded, text_batch, transformer
from support.rank_group import RANKS, OnRanks

pytestmark = pytest.mark.usefixtures("one_thread")

FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
FORMS: dict[str, dict[str, Any]] = {
    "bf16, split": {"precision": "bf16"},
    "bf16": {"precision": "bf16", "split_master": False},
    "fp16": {"precision": "fp16"},
}
HOMES: dict[str, dict[str, Any]] = {
    "nvme": {"cache": 0},
    "nvme, cached": {},
    "cpu": {"parameters": "cpu", "gradients": "cpu", "optimizer": "cpu"},
    "gpu": {"parameters": "gpu", "gradients": "gpu", "optimizer": "gpu"},
    "delayed": {"update": "delayed", "optimizer": "cpu", "parameters": "cpu"},
}
ROOMY: dict[str, Any] = {
    "gpu_memory": 8 << 20,
    "cpu_memory": 32 << 20,
    "device": "cpu",
    "threads": 1,
    "poison": True,
}
each_form = pytest.mark.parametrize("form", FORMS)


def build() -> Transformer:
    """In fp32; two norms are frozen, and one value lies in the middle of two bf16."""
    model = transformer(width=88, depth=2)
    model.norm.requires_grad_(False)
    with torch.no_grad():
        model.norm.weight += torch.rand(88) / 1000
        model.places[0, 0, 0] = 1 + 2.0**-8
    return model


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def masters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """After a step that changes nothing, for states are there from the first step on."""
    optimizer = infinity.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model(**text_batch(0)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    states = optimizer.state_dict()["state"]
    names = [name for name, _ in model.named_parameters()]
    return {names[number]: state["master"] for number, state in states.items()}


def check(model: nn.Module, precision: str, expected: dict[str, torch.Tensor]) -> None:
    """`expected`, in fp32, are the masters of `model`, and rounded its parameters, before a step
    and after."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    engine = infinity.engine(model)
    for _ in range(2):
        for name, value in engine.state_dict().items():
            if name in trained:
                assert value.dtype is FLOATS[precision]
                assert torch.equal(value, rounded(expected[name], FLOATS[precision])), name
            elif name in expected:
                assert torch.equal(value, expected[name].to(FLOATS[precision])), name
        masters = masters_of(model)
        assert masters.keys() == trained
        for name, master in masters.items():
            assert torch.equal(master, expected[name]), name


# One rank


@each_form
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("source", ["model", "weights"])
def test_a_master_is_the_value_that_was_wrapped(
    form: str, home: str, source: str, tmp_path: Path
) -> None:
    model = build()
    expected = values_of(model)
    weights = None
    if source == "weights":
        weights = tmp_path / "model.safetensors"
        save_file(
            {name: value for name, value in model.state_dict().items() if name != "head.weight"},
            weights,
        )
        with infinity.init():
            model = Transformer(width=88, depth=2)
        model.norm.requires_grad_(False)
    (tmp_path / "nvme").mkdir()
    model = infinity.wrap(
        model,
        config_of(nvme=[tmp_path / "nvme"], **ROOMY, **FORMS[form], **HOMES[home]),
        weights=weights,
    )
    with infinity.engine(model):
        check(model, FORMS[form]["precision"], expected)


def narrow(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(60, 60) for _ in range(3))).to(dtype)


@pytest.mark.parametrize(
    ("source", "precision"),
    [
        (torch.float64, "bf16"),
        (torch.float16, "bf16"),
        (torch.bfloat16, "fp16"),
        (torch.float64, "fp16"),
    ],
    ids=str,
)
def test_any_type_that_the_stored_one_cannot_hold(
    source: torch.dtype, precision: str, tmp_path: Path
) -> None:
    model = narrow(source)
    with torch.no_grad():
        model[1].weight *= 2.0**-20  # where fp16 has fewer bits than bf16
    expected = {name: value.float() for name, value in values_of(model).items()}
    with infinity.engine(
        infinity.wrap(model, config_of(nvme=[tmp_path], precision=precision, **ROOMY))
    ) as engine:
        for unit in engine.units:
            flat = unit.states.gather(Kind.MASTER)
            for name, place in zip(unit.facts.names, unit.facts.layout.places, strict=True):
                assert torch.equal(
                    flat[place.offset : place.end].view(place.shape), expected[name]
                ), name
    assert any(
        not torch.equal(value.to(FLOATS[precision]).float(), value) for value in expected.values()
    )


@each_form
def test_parameters_are_initialised_in_their_own_dtype_and_then_rounded(
    form: str, tmp_path: Path
) -> None:
    """One seed draws the same numbers whatever they are stored in."""
    precision = FORMS[form]["precision"]
    found = {}
    for stored in ("fp32", precision):
        with infinity.init():
            model = nn.Sequential(nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 9))
        model[2].requires_grad_(False)
        config = ROOMY | FORMS[form] | {"precision": stored, "nvme": [tmp_path]}
        with infinity.engine(infinity.wrap(model, config_of(**config), seed=3)) as engine:
            found[stored] = engine.state_dict()
            if stored != "fp32":
                optimizer = infinity.AdamW(
                    [p for p in model.parameters() if p.requires_grad], lr=0.0, weight_decay=0.0
                )
                model(torch.ones(2, 60, dtype=FLOATS[precision])).sum().backward()
                optimizer.step()
                masters = [state["master"] for state in optimizer.state_dict()["state"].values()]
                assert torch.equal(masters[0], found["fp32"]["0.weight"])
                assert torch.equal(masters[1], found["fp32"]["0.bias"])
    for name, value in found["fp32"].items():
        is_trained = name.startswith("0")
        expected = rounded(value, FLOATS[precision]) if is_trained else value.to(FLOATS[precision])
        assert torch.equal(found[precision][name], expected), name


@pytest.mark.parametrize(
    ("source", "config", "frozen", "extra"),
    [
        (torch.float32, {"precision": "bf16"}, False, 2),
        (torch.float32, {"precision": "bf16", "split_master": False}, False, 4),
        (torch.float32, {"precision": "fp16"}, False, 4),
        (torch.float32, {"precision": "bf16"}, True, 0),
        (torch.float32, {"precision": "fp32"}, False, 0),
        (torch.bfloat16, {"precision": "bf16"}, False, 0),
        (torch.bfloat16, {"precision": "auto"}, False, 0),
        (torch.float16, {"precision": "fp16"}, False, 0),
    ],
    ids=repr,
)
def test_wrap_writes_the_parameters_and_the_low_bits_and_nothing_else(
    source: torch.dtype, config: dict[str, Any], frozen: bool, extra: int, tmp_path: Path
) -> None:
    model = narrow(source).requires_grad_(not frozen)
    with infinity.engine(
        infinity.wrap(model, config_of(nvme=[tmp_path], **ROOMY, **HOMES["nvme"], **config))
    ) as engine:
        elements = sum(unit.facts.layout.numel for unit in engine.units)
        itemsize = engine.units[0].facts.dtype.itemsize
        assert engine.io.counters()["bytes_written"] == (itemsize + extra) * elements


@each_form
def test_a_checkpoint_of_what_was_never_updated_has_all_bits(form: str, tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    config = config_of(nvme=[tmp_path / "nvme"], **ROOMY, **FORMS[form])
    model = build()
    expected = values_of(model)
    with infinity.engine(infinity.wrap(model, config)) as engine:
        engine.save_checkpoint(tmp_path / "checkpoint")
    other = transformer(seed=5, width=88, depth=2)
    other.norm.requires_grad_(False)
    with infinity.engine(infinity.wrap(other, config)) as engine:
        engine.load_checkpoint(tmp_path / "checkpoint")
        frozen = {
            name for name, parameter in other.named_parameters() if not parameter.requires_grad
        }
        expected |= {
            name: expected[name].to(FLOATS[FORMS[form]["precision"]]).float() for name in frozen
        }
        check(other, FORMS[form]["precision"], expected)


def test_states_of_torch_leave_masters_as_they_are(tmp_path: Path) -> None:
    """They have no masters: there the parameter has all bits."""
    model, plain = build(), build()
    expected = values_of(model)
    theirs = torch.optim.AdamW(
        [p for p in plain.parameters() if p.requires_grad], lr=0.0, weight_decay=0.0
    )
    plain(**text_batch(0)).loss.backward()
    theirs.step()
    with infinity.engine(
        infinity.wrap(model, config_of(nvme=[tmp_path], **ROOMY, precision="bf16"))
    ):
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        optimizer = infinity.AdamW([p for _, p in trained], lr=0.0, weight_decay=0.0)
        optimizer.load_state_dict(theirs.state_dict())
        states = optimizer.state_dict()["state"]
        for number, (name, _) in enumerate(trained):
            assert torch.equal(states[number]["master"], expected[name]), name
            assert torch.equal(
                states[number]["exp_avg"], theirs.state_dict()["state"][number]["exp_avg"]
            ), name


def test_a_state_dict_of_what_was_never_updated_has_all_bits(tmp_path: Path) -> None:
    """And none of them among the states, where an optimizer of torch would look for moments beside
    them."""
    config = config_of(nvme=[tmp_path], **ROOMY, precision="bf16")
    model = build()
    expected = values_of(model)
    with infinity.engine(infinity.wrap(model, config)) as engine:
        weights, saved = engine.state_dict(), infinity.AdamW(model.parameters()).state_dict()
    assert saved["state"] == {}
    torch.optim.AdamW(build().parameters()).load_state_dict(saved)
    other = build()
    other.load_state_dict(weights)
    with infinity.engine(infinity.wrap(other, config)):
        optimizer = infinity.AdamW(other.parameters())
        optimizer.load_state_dict(saved)
        del optimizer
        norm = {
            name: value.bfloat16().float()
            for name, value in expected.items()
            if name.startswith("norm")
        }
        check(other, "bf16", expected | norm)


def test_a_wrap_that_fails_gives_all_bits_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    expected = values_of(model)
    before, calls = States.write, []

    def write(states: States, kind: Kind, shard: torch.Tensor) -> None:
        calls.append(kind)
        if len(calls) == 3:
            raise OSError("the drive is gone")
        before(states, kind, shard)

    monkeypatch.setattr(States, "write", write)
    with pytest.raises(OSError, match="the drive is gone"):
        infinity.wrap(model, config_of(nvme=[tmp_path], **ROOMY, precision="bf16"))
    assert calls[:2] == [Kind.MASTER, Kind.MASTER]
    for name, parameter in model.named_parameters():
        assert parameter.dtype is torch.float32 and torch.equal(parameter, expected[name]), name


# Two ranks


def work(task: dict[str, Any], where: Path, rank: int) -> None:
    """On a rank: wrap and check, once for every format."""
    nvme = where / f"nvme{rank}"
    nvme.mkdir()
    for form in FORMS.values():
        model = build()
        expected = values_of(model)
        config = config_of(
            **ROOMY | {"nvme": [nvme], "stage": task["stage"]} | form | HOMES[task["home"]]
        )
        model = infinity.wrap(model, config, group=dist.group.WORLD)
        with infinity.engine(model):
            check(model, form["precision"], expected)


@pytest.mark.parametrize(
    ("stage", "home"), [(3, "nvme"), (3, "cpu"), (2, "gpu"), (1, "gpu"), (0, "nvme, cached")]
)
def test_ranks_share_them(stage: int, home: str, on_ranks: OnRanks) -> None:
    assert on_ranks({"stage": stage, "home": home}) == ["done"] * RANKS
