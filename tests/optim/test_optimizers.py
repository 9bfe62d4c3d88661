"""The optimizer family: the formulas, state dicts and refusals of torch, with states that the
engine keeps."""

from __future__ import annotations

import copy
import gc
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity import native
from infinity.placement.spec import MOMENTS, Kind
from support.configs import config_of
from support.models import text_batch, transformer
from support.optimizers import FAMILY

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def wrap(tmp_path: Path) -> Iterator[Callable[..., infinity.Engine]]:
    models: list[nn.Module] = []

    def make(model: nn.Module, **options: Any) -> infinity.Engine:
        folder = tmp_path / str(len(models))
        folder.mkdir()
        settings = {"gpu_memory": "4MiB", "cpu_memory": "8MiB", "poison": True} | options
        models.append(infinity.wrap(model, config_of(nvme=folder, **settings)))
        return infinity.engine(model)

    yield make
    for model in models:
        infinity.engine(model).close()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        model(**text_batch(number)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def close_to(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=2e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


NAMES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            member.algorithm != "adam" and not hasattr(native.cpu_adam(), "update"),
            reason="this build has kernels for Adam only",
        ),
    )
    for name, member in FAMILY.items()
]


@pytest.mark.parametrize("name", NAMES)
def test_each_follows_torch(name: str, wrap: Callable[..., infinity.Engine]) -> None:
    mine, theirs, settings, algorithm = FAMILY[name]
    model, plain = transformer(), transformer()
    engine = wrap(model, algorithm=algorithm)
    groups = [
        [
            {"params": list(m.blocks.parameters())},
            {"params": [m.tokens.weight], "lr": 3e-3, "weight_decay": 0.02},
        ]
        for m in (model, plain)
    ]
    optimizer, expected = mine(groups[0], **settings), theirs(groups[1], **settings)
    train(model, optimizer, range(6))
    train(plain, expected, range(6))
    close_to(engine.state_dict(), plain.state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_states_go_to_torch_and_come_from_torch(
    name: str, wrap: Callable[..., infinity.Engine]
) -> None:
    mine, theirs, settings, algorithm = FAMILY[name]
    model, plain = transformer(), transformer()
    engine = wrap(model, algorithm=algorithm)
    optimizer = mine(model.parameters(), **settings)
    expected = theirs(plain.parameters(), **settings)
    train(model, optimizer, range(3))
    train(plain, expected, range(3))
    kinds = {kind for unit in engine.units for kind in unit.blocks}
    assert kinds - {Kind.PARAM, Kind.GRAD, Kind.MASTER} == set(MOMENTS[algorithm])
    ours, torchs = optimizer.state_dict()["state"], expected.state_dict()["state"]
    assert ours.keys() == torchs.keys()
    for number, state in torchs.items():
        assert {key for key, value in state.items() if value is not None} <= ours[number].keys()
    reached = engine.state_dict()
    other, copied = transformer(), transformer()
    for target in (other, copied):
        target.load_state_dict(reached)
    second = wrap(other, algorithm=algorithm)
    back, forth = mine(other.parameters()), theirs(copied.parameters())
    back.load_state_dict(expected.state_dict())
    forth.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((model, optimizer), (other, back), (copied, forth)):
        train(m, o, range(3, 6))
    close_to(second.state_dict(), copied.state_dict())
    close_to(engine.state_dict(), copied.state_dict())


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay", "betas"])
def test_a_value_out_of_range_in_a_group_is_refused(
    name: str, wrap: Callable[..., infinity.Engine]
) -> None:
    model = transformer()
    wrap(model)
    value: Any = (0.9, 1.0) if name == "betas" else -1.0
    with pytest.raises(infinity.ConfigError, match=rf"^AdamW: {name}=.* is out of range$"):
        infinity.AdamW([{"params": model.parameters(), name: value}])


@pytest.mark.parametrize(
    ("make", "settings", "text"),
    [
        (infinity.Lion, {"betas": (1.0, 0.9)}, "Lion: betas=(1.0, 0.9) is out of range"),
        (infinity.Adagrad, {"lr_decay": -1.0}, "Adagrad: lr_decay=-1.0 is out of range"),
        (infinity.AdamW, {"lr": math.inf}, "AdamW: lr=inf is out of range"),
        (infinity.AdamW, {"weight_decay": math.nan}, "AdamW: weight_decay=nan is out of range"),
        (infinity.Lion, {"lr": math.nan}, "Lion: lr=nan is out of range"),
        (infinity.SGD, {"momentum": math.inf}, "SGD: momentum=inf is out of range"),
        (infinity.Adagrad, {"eps": math.inf}, "Adagrad: eps=inf is out of range"),
        (infinity.SGD, {"momentum": -0.1}, "SGD: momentum=-0.1 is out of range"),
        (
            infinity.SGD,
            {"nesterov": True},
            "SGD: nesterov=True without momentum, or with dampening, is out of range",
        ),
        (
            infinity.SGD,
            {"momentum": 0.9},
            "SGD needs other states than the model was wrapped with (algorithm='adam'); "
            "use infinity.Config(algorithm='momentum')",
        ),
        (
            infinity.Lion,
            {},
            (
                "Lion needs other states than the model was wrapped with (algorithm='adam'); "
                "use infinity.Config(algorithm='lion')"
            ),
        ),
    ],
)
def test_what_cannot_work_is_refused(
    make: type[torch.optim.Optimizer],
    settings: dict[str, Any],
    text: str,
    wrap: Callable[..., infinity.Engine],
) -> None:
    model = transformer()
    wrap(model)
    with pytest.raises(infinity.ConfigError, match=f"^{re.escape(text)}$"):
        make(model.parameters(), **settings)
    train(model, infinity.Adam(model.parameters()), range(1))


def test_a_loaded_state_that_cannot_work_changes_nothing(
    wrap: Callable[..., infinity.Engine],
) -> None:
    model = transformer()
    engine = wrap(model)
    optimizer = infinity.Adam(model.parameters(), lr=1e-3)
    train(model, optimizer, range(2))
    theirs = torch.optim.Adam(transformer().parameters(), lr=0.5, amsgrad=True)
    text = (
        "^Adam: amsgrad=True is not supported; infinity.adapt runs the optimizer of "
        "torch that has it$"
    )
    with pytest.raises(infinity.ConfigError, match=text):
        optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert all(state["step"] == 2 for state in optimizer.state_dict()["state"].values())
    assert engine.report().steps == 2


# Norms and frozen parameters


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("max_norm", [0.1, 1e3])
def test_norms_before_and_after_clipping_are_those_of_torch(
    max_norm: float, micro_batches: int, wrap: Callable[..., infinity.Engine]
) -> None:
    model, plain = transformer(), transformer()
    wrap(model)
    settings: dict[str, Any] = {"lr": 1e-3, "eps": 1e-6}
    optimizer = infinity.AdamW(model.parameters(), **settings, max_grad_norm=max_norm)
    expected = torch.optim.AdamW(plain.parameters(), **settings)
    for step in range(4):
        for m in (model, plain):
            for number in range(micro_batches):
                m(**text_batch(10 * step + number)).loss.backward()
        gradients = [p.grad for p in plain.parameters()]
        before = float(nn.utils.clip_grad_norm_(plain.parameters(), max_norm))
        after = float(
            torch.linalg.vector_norm(
                torch.cat([g.flatten().double() for g in gradients if g is not None])
            )
        )
        optimizer.step()
        expected.step()
        assert optimizer.grad_norm == pytest.approx(before, rel=1e-6)
        assert optimizer.clipped_grad_norm == pytest.approx(after, rel=1e-6)
        assert (optimizer.clipped_grad_norm < optimizer.grad_norm) == (max_norm == 0.1)
        for each in (optimizer, expected):
            each.zero_grad()


@pytest.mark.parametrize("update", ["exact", "speculative"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parameters_that_are_frozen_for_a_while(
    precision: str, update: str, wrap: Callable[..., infinity.Engine]
) -> None:
    """Block after block is thawed, a part of one first, and the first one is frozen again."""
    outcomes = []
    for mode, gpu_memory in ((update, "512KiB"), ("plain", "4MiB")):
        model = transformer(tied=False)
        engine = wrap(model, precision=precision, update=mode, gpu_memory=gpu_memory)
        optimizer = infinity.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
        for block in model.blocks[:3]:
            block.requires_grad_(False)
        start = engine.state_dict()
        train(model, optimizer, range(3))
        now = engine.state_dict()
        assert {name for name in now if torch.equal(now[name], start[name])} == {
            "scale", *(name for name in now if re.match(r"blocks\.[012]\.", name))
        }  # fmt: skip
        model.blocks[2].up.requires_grad_(True)
        train(model, optimizer, range(3, 6))
        for block in model.blocks[:3]:
            block.requires_grad_(True)
        model.blocks[3].requires_grad_(False)
        train(model, optimizer, range(6, 10))
        assert {int(state["step"]) for state in optimizer.state_dict()["state"].values()} == {
            4,
            6,
            7,
            10,
        }
        report = engine.report()
        assert (
            report.read_per_parameter == report.planned_read_per_parameter or mode == "speculative"
        )
        outcomes.append(engine.state_dict())
    assert all(torch.equal(outcomes[0][name], value) for name, value in outcomes[1].items())


def test_frozen_for_a_while_follows_torch(wrap: Callable[..., infinity.Engine]) -> None:
    model, plain = transformer(), transformer()
    engine = wrap(model)
    settings: dict[str, Any] = {"lr": 1e-3, "eps": 1e-6}
    optimizers = [
        infinity.AdamW(model.parameters(), **settings),
        torch.optim.AdamW(plain.parameters(), **settings),
    ]
    for m, optimizer in zip((model, plain), optimizers, strict=True):
        m.blocks[:2].requires_grad_(False)
        train(m, optimizer, range(3))
        m.blocks[1].requires_grad_(True)
        train(m, optimizer, range(3, 6))
    close_to(engine.state_dict(), plain.state_dict())


def test_what_was_frozen_at_wrap_may_be_given_to_an_optimizer(
    wrap: Callable[..., infinity.Engine],
) -> None:
    """As in torch: it is left alone, costs nothing, and counts in the numbers of the state dict."""
    model, plain = transformer(), transformer()
    for m in (model, plain):
        m.tokens.requires_grad_(False)
        m.blocks[:2].requires_grad_(False)
    engine = wrap(model)
    settings: dict[str, Any] = {"lr": 1e-3, "eps": 1e-6}
    optimizers = [
        infinity.AdamW(model.parameters(), **settings),
        torch.optim.AdamW(plain.parameters(), **settings),
    ]
    for m, optimizer in zip((model, plain), optimizers, strict=True):
        train(m, optimizer, range(4))
    close_to(engine.state_dict(), plain.state_dict())
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    assert states[0].keys() == states[1].keys()
    optimizers[0].load_state_dict(optimizers[1].state_dict())
    frozen = [unit for unit in engine.units if not unit.facts.trainable]
    assert frozen
    assert all(len(unit.blocks) == 1 for unit in frozen)


@pytest.mark.parametrize("optimizer", ["cpu", "nvme"])
def test_two_optimizers_share_units(
    optimizer: str, tmp_path: Path, wrap: Callable[..., infinity.Engine]
) -> None:
    """Each clips, forgets, saves, loads and begins anew what is its own; the other's states stay as
    they are."""
    model, plain = transformer(), transformer()
    engine = wrap(model, optimizer=optimizer)
    names = [
        [n for n, _ in plain.named_parameters() if n.endswith("weight") == heavy]
        for heavy in (True, False)
    ]

    def groups(owner: Any) -> list[list[torch.Tensor]]:
        found = dict(owner.named_parameters())
        return [[found[name] for name in part] for part in names]

    settings: dict[str, Any] = {"lr": 1e-3, "eps": 1e-6}
    first, second = groups(model)
    mine = [
        infinity.AdamW(first, max_grad_norm=0.1, **settings),
        infinity.AdamW(second, **settings),
    ]
    theirs = [torch.optim.AdamW(part, **settings) for part in groups(plain)]
    for number in range(4):
        model(**text_batch(number)).loss.backward()
        plain(**text_batch(number)).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(groups(plain)[0], 0.1)
        for each in (*mine, *theirs):
            each.step()
            each.zero_grad()
        assert mine[0].grad_norm == pytest.approx(float(norm), rel=1e-5)
    close_to(engine.state_dict(), plain.state_dict())
    saved = copy.deepcopy([each.state_dict()["state"] for each in mine])
    engine.save_checkpoint(tmp_path / "checkpoint", mine)
    train(model, mine[0], range(4, 5))
    engine.load_checkpoint(tmp_path / "checkpoint", mine)
    for each, states in zip(mine, saved, strict=True):
        for number, state in each.state_dict()["state"].items():
            assert all(torch.equal(states[number][name], value) for name, value in state.items())
    kept = copy.deepcopy(mine[1].state_dict()["state"])
    groups_before = mine[0].state_dict()["param_groups"]
    mine[0].load_state_dict({"state": {}, "param_groups": groups_before})
    assert mine[0].state_dict()["param_groups"] == groups_before
    assert mine[0].state_dict()["state"] == {}
    mine[0].load_state_dict(theirs[0].state_dict())
    del mine[0]
    gc.collect()  # a checkpoint leaves cycles that hold its optimizers
    again = infinity.AdamW(groups(model)[0], **settings)
    assert again.state_dict()["state"] == {}
    left = mine[0].state_dict()["state"]
    assert all(
        torch.equal(kept[number][name], value)
        for number in kept
        for name, value in left[number].items()
    )
    text = r"already has an optimizer, AdamW; a parameter has states for one"
    with pytest.raises(infinity.ConfigError, match=text):
        infinity.AdamW([groups(model)[0][0]])


def test_a_checkpoint_of_one_of_two_optimizers_that_share_units(
    tmp_path: Path, wrap: Callable[..., infinity.Engine]
) -> None:
    """It is loaded only where the other one has nothing that it would replace, and brings nothing
    of it."""

    def build() -> tuple[infinity.Engine, nn.Module, list[list[torch.Tensor]]]:
        model = transformer()
        engine = wrap(model)
        parts = [
            [p for n, p in model.named_parameters() if n.endswith("weight") == heavy]
            for heavy in (True, False)
        ]
        return engine, model, parts

    engine, model, parts = build()
    both = [infinity.AdamW(part, lr=1e-3) for part in parts]
    for number in range(2):
        model(**text_batch(number)).loss.backward()
        for each in both:
            each.step()
            each.zero_grad()
    engine.save_checkpoint(tmp_path / "one", both[0])
    train(model, both[0], range(2, 3))
    before = [each.state_dict()["state"] for each in both]
    text = (
        r"^another optimizer than those given updates .*bias \(and \d+ "
        r"more\).*load_checkpoint\(directory, \[first, second\]\)"
    )
    with pytest.raises(infinity.ConfigError, match=text):
        engine.load_checkpoint(tmp_path / "one", both[0])
    for each, states in zip(both, before, strict=True):
        for number, state in each.state_dict()["state"].items():
            assert all(torch.equal(states[number][name], value) for name, value in state.items())

    again, model, parts = build()
    first = infinity.AdamW(parts[0], lr=1e-3)
    again.load_checkpoint(tmp_path / "one", first)
    second = infinity.AdamW(parts[1], lr=0.0)
    model(**text_batch(3)).loss.backward()
    gradients = [again.gradient(p) for p in parts[1]]
    second.step()
    for state, gradient in zip(second.state_dict()["state"].values(), gradients, strict=True):
        torch.testing.assert_close(state["exp_avg"], gradient.float() * 0.1)


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "shape": lambda s: s["state"][5].update(exp_avg=torch.zeros(3, 3)),
    "type": lambda s: s["state"][5].update(exp_avg=[1.0]),
    "integers": lambda s: s["state"][5].update(
        exp_avg_sq=torch.zeros_like(s["state"][5]["exp_avg_sq"], dtype=torch.int64)
    ),
    "step": lambda s: s["state"][5].update(step=torch.tensor(-1.0)),
    "no step": lambda s: s["state"][5].update(step="3"),
    "a state of nobody": lambda s: s["state"].update({99: {}}),
    "another optimizer": lambda s: s["state"].update({5: {"momentum_buffer": torch.zeros(32)}}),
    "no mapping": lambda s: s["state"].update({5: None}),
    "group size": lambda s: s["param_groups"][0]["params"].pop(),
    "groups": lambda s: s["param_groups"].append({"params": []}),
    "lr": lambda s: s["param_groups"][0].update(lr="fast"),
    "range": lambda s: s["param_groups"][0].update(eps=-1.0),
    "no groups": lambda s: s.pop("param_groups"),
    "scaler": lambda s: s.update(loss_scaler={"scale": 3.0}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_state_dict_that_does_not_fit_changes_nothing(
    damage: str, wrap: Callable[..., infinity.Engine]
) -> None:
    model = transformer()
    wrap(model)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-3, loss_scaler=infinity.LossScaler(1.0))
    train(model, optimizer, range(2))
    before = optimizer.state_dict()
    bad = {
        "state": {k: dict(v) for k, v in before["state"].items()},
        "loss_scaler": before["loss_scaler"],
    }
    bad["param_groups"] = [
        group | {"params": list(group["params"]), "lr": 5.0} for group in before["param_groups"]
    ]
    DAMAGE[damage](bad)
    with pytest.raises(infinity.ConfigError):
        optimizer.load_state_dict(bad)
    after = optimizer.state_dict()
    assert (
        after["param_groups"] == before["param_groups"]
        and after["loss_scaler"] == before["loss_scaler"]
    )
    assert after["state"].keys() == before["state"].keys()
    for number, state in before["state"].items():
        assert all(
            torch.equal(after["state"][number][name], value) for name, value in state.items()
        )
