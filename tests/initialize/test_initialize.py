"""`infinity.initialize` takes what scripts for DeepSpeed give it, and trains as plain PyTorch."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.cli.gc import collect
from infinity.tiers.manifest import STATES_NAME
from support.deepspeed import Net, batch, configuration, net

pytestmark = pytest.mark.usefixtures("one_thread")

Start = Callable[..., tuple[Any, Any, Any, Any]]
Make = Callable[[Any], torch.optim.Optimizer]


def plain_losses(
    model: nn.Module,
    make: Make,
    steps: int,
    forwards: int = 1,
    clip: float = 0.0,
    schedule: Callable[[Any], Any] | None = None,
) -> list[float]:
    """Losses of a plain loop."""
    optimizer = make(model.parameters())
    scheduler = None if schedule is None else schedule(optimizer)
    losses = []
    for step in range(steps):
        for forward in range(forwards):
            loss = model(*batch(step * forwards + forward))
            losses.append(loss.item())
            (loss / forwards).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return losses


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def engine_losses(engine: Any, steps: int, first: int = 0) -> list[float]:
    """Losses of DeepSpeed's loop."""
    losses = []
    for number in range(first, first + steps):
        loss = engine(*batch(number))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def close(found: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_loop_has_the_losses_of_plain_pytorch(
    start: Start, tmp_path: Path, forwards: int, clip: float
) -> None:
    config = configuration(tmp_path, gradient_accumulation_steps=forwards, gradient_clipping=clip)
    engine, optimizer, loader, scheduler = start(model=net(), config=config)
    close(engine_losses(engine, 4 * forwards), plain_losses(net(), adamw, 4, forwards, clip))
    assert loader is None and scheduler is None
    assert engine.global_steps == 4 and engine.global_samples == 8 * forwards
    assert engine.optimizer is optimizer and isinstance(optimizer, torch.optim.Optimizer)


@pytest.mark.parametrize("required", [None, False])
def test_one_rank_can_ask_torch_for_its_number(start: Start, required: bool | None) -> None:
    start(model=net(), config=configuration(), dist_init_required=required)
    assert dist.is_initialized() is (required is None)
    if required is None:
        dist.barrier()
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)


def test_several_ranks_cannot_do_without_a_process_group(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(infinity.ConfigError, match=r"^dist_init_required is False.* the 2 ranks"):
        start(model=net(), config=configuration(), dist_init_required=False)
    assert not dist.is_initialized()


def test_backward_returns_the_loss_in_its_dtype(start: Start) -> None:
    engine, *_ = start(model=net(), config=configuration(bf16={"enabled": True}))
    loss = engine(batch(0)[0].bfloat16()).mean()
    assert engine.backward(loss).dtype == loss.dtype == torch.bfloat16


def test_buffers_are_cast_where_the_configuration_says_so(start: Start) -> None:
    half = {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}}
    engine, *_ = start(model=net(), config=configuration(**half))
    assert engine.module.scale.dtype == torch.bfloat16
    assert [*dict(engine.module.named_buffers())] == ["scale"]


def test_bf16_is_that_of_parameters_and_buffers_keep_their_dtype(start: Start) -> None:
    """As of `model.bfloat16()` with fp32 masters."""
    model, plain = net(), net()
    engine, *_ = start(model=model, config=configuration(bf16={"enabled": True}))
    assert {p.dtype for p in engine.parameters()} == {torch.bfloat16}
    assert engine.module.scale.dtype == torch.float32
    found = []
    masters = [p.detach().clone().requires_grad_() for p in plain.parameters()]
    optimizer = adamw(masters)
    plain.bfloat16()
    expected = []
    for number in range(4):
        x, labels = batch(number)
        loss = engine(x.bfloat16(), labels)
        found.append(loss.item())
        engine.backward(loss)
        engine.step()
        reference = plain(x.bfloat16(), labels)
        expected.append(reference.item())
        reference.backward()
        for master, parameter in zip(masters, plain.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, plain.parameters(), strict=True):
                parameter.copy_(master)
                parameter.grad = None
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-2, atol=1e-2)


def test_autocast_is_that_of_torch(start: Start) -> None:
    config = configuration(torch_autocast={"enabled": True, "dtype": "bfloat16"})
    engine, *_ = start(model=net(), config=config)
    plain = net()
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(*batch(0))
    assert engine(*batch(0)).item() == expected.item()
    assert {p.dtype for p in engine.parameters()} == {torch.float32}


@pytest.mark.parametrize("how", ["path", "args", "old args", "config_params"])
def test_a_configuration_comes_in_several_ways(start: Start, tmp_path: Path, how: str) -> None:
    config = configuration(tmp_path)
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    given = {
        "path": {"config": str(path)},
        "args": {"args": argparse.Namespace(deepspeed_config=str(path), local_rank=0)},
        "old args": {"args": argparse.Namespace(deepscale_config=str(path))},
        "config_params": {"config_params": config},
    }[how]
    engine, *_ = start(model=net(), **given)
    assert engine.config == config
    assert engine.train_batch_size() == engine.train_micro_batch_size_per_gpu() == 2


# Optimizers


@pytest.mark.parametrize(
    ("block", "make"),
    [
        (
            {"type": "Adam", "params": {"lr": 1e-2, "betas": [0.8, 0.99], "weight_decay": 0.1}},
            lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.99), weight_decay=0.1),
        ),
        (
            {"type": "adam", "params": {"weight_decay": 0.1, "adam_w_mode": False}},
            lambda p: torch.optim.Adam(p, weight_decay=0.1),
        ),
        ({"type": "AdamW"}, lambda p: torch.optim.AdamW(p, weight_decay=0.0)),
        (
            {"type": "AdamW", "params": {"torch_adam": True}},
            lambda p: torch.optim.AdamW(p, weight_decay=0.01),
        ),
        (
            {"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False}},
            torch.optim.Adam,
        ),
        ({"type": "Adagrad", "params": {"lr": 1e-2}}, torch.optim.Adagrad),
        (
            {"type": "SGD", "params": {"lr": 1e-1, "momentum": 0.9}},
            lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9),
        ),
        ({"type": "sgd", "params": {"lr": 1e-1}}, lambda p: torch.optim.SGD(p, lr=1e-1)),
        (
            {"type": "RMSprop", "params": {"lr": 1e-3, "max_grad_norm": 0.0}},
            lambda p: torch.optim.RMSprop(p, lr=1e-3),
        ),
    ],
)
def test_an_optimizer_of_the_configuration(start: Start, block: Any, make: Make) -> None:
    engine, *_ = start(model=net(), config=configuration(optimizer=block))
    close(engine_losses(engine, 3), plain_losses(net(), make, 3))


def test_model_parameters_may_be_groups(start: Start) -> None:
    def groups(model: Net) -> list[dict[str, Any]]:
        return [
            {"params": model.first.parameters(), "lr": 1e-1},
            {"params": [model.second.weight, model.last.weight]},
        ]

    model, plain = net(), net()
    engine, *_ = start(model=model, model_parameters=groups(model), config=configuration())
    found = engine_losses(engine, 3)
    close(found, plain_losses(plain, lambda _: adamw(groups(plain)), 3))
    assert torch.equal(engine.module.last.bias.detach(), net().last.bias)
    assert [group["lr"] for group in engine.optimizer.param_groups] == [1e-1, 1e-2]


@pytest.mark.parametrize(
    "make",
    [
        adamw,
        lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True),
    ],
)
@pytest.mark.parametrize("as_function", [True, False])
def test_an_optimizer_of_torch_goes_on_where_it_is(
    start: Start, make: Make, as_function: bool
) -> None:
    """With its states, if it has made steps before the model was wrapped."""
    config = configuration()
    del config["optimizer"]
    model = net()
    if as_function:
        engine, *_ = start(model=model, optimizer=make, config=config)
        close(engine_losses(engine, 3), plain_losses(net(), make, 3))
        return
    client = make(model.parameters())
    for number in range(2):
        model(*batch(number)).backward()
        client.step()
        client.zero_grad()
    engine, optimizer, *_ = start(model=model, optimizer=client, config=config)
    close(engine_losses(engine, 3, first=2), plain_losses(net(), make, 5)[2:])
    client.param_groups[0]["lr"] = 0.5
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_an_optimizer_built_over_parameters_without_memory(start: Start) -> None:
    torch.manual_seed(0)
    with infinity.zero.Init():
        model = Net()
    assert next(model.parameters()).is_meta
    client = torch.optim.AdamW(
        [{"params": [model.last.weight], "lr": 1e-1}, {"params": [model.first.weight]}],
        lr=1e-2,
    )
    config = configuration()
    engine, *_ = start(model=model, optimizer=client, config=config)
    plain = net()

    def same(_: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [{"params": [plain.last.weight], "lr": 1e-1}, {"params": [plain.first.weight]}],
            lr=1e-2,
        )

    close(engine_losses(engine, 3), plain_losses(plain, same, 3))


# Schedulers


def test_a_scheduler_of_the_configuration(start: Start) -> None:
    block = {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 1e-1, "warmup_num_steps": 4, "warmup_type": "linear"},
    }
    engine, _, _, scheduler = start(
        model=net(),
        config=configuration(scheduler=block, gradient_accumulation_steps=2),
    )
    assert engine.lr_scheduler is scheduler
    rates = []
    for _ in range(4):
        rates += engine.get_lr()
        engine_losses(engine, 2)
    assert rates == sorted(rates) and rates[0] == 0.0 and rates[-1] > 0.0


@pytest.mark.parametrize("as_function", [True, False])
def test_a_scheduler_of_the_script(start: Start, as_function: bool) -> None:
    def schedule(optimizer: Any) -> Any:
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        rest = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, rest], [2])

    config = configuration()
    del config["optimizer"]
    model = net()
    client = adamw(model.parameters())
    given = schedule if as_function else schedule(client)
    engine, _, _, scheduler = start(
        model=model, optimizer=client, lr_scheduler=given, config=config
    )
    close(engine_losses(engine, 5), plain_losses(net(), adamw, 5, schedule=schedule))
    assert scheduler.get_last_lr() == engine.get_lr()


# Data, ranks, units


def test_a_scheduler_that_needs_more_than_a_step(start: Start) -> None:
    """It is refused before the optimizer has stepped, and gets what it needs by `lr_kwargs`."""
    block = {"type": "ReduceLROnPlateau", "params": {"patience": 0, "factor": 0.5}}
    engine, *_ = start(model=net(), config=configuration(scheduler=block))
    engine.backward(engine(*batch(0)))
    with pytest.raises(infinity.ConfigError, match=r"^ReduceLROnPlateau.step: missing .*'metrics'"):
        engine.step()
    assert engine.global_steps == 0
    assert torch.equal(engine.module_state_dict()["first.weight"], net().first.weight)
    for metrics in (1.0, 2.0):
        engine.backward(engine(*batch(0)))
        engine.step(lr_kwargs={"metrics": metrics})
    assert engine.get_lr() == [5e-3]


def test_training_data_becomes_micro_batches(start: Start) -> None:
    data = [batch(number, rows=1) for number in range(5)]
    data = [(x[0], y[0]) for x, y in data]
    config = configuration(dataloader_drop_last=True)
    engine, _, loader, _ = start(model=net(), training_data=data, config=config)
    seen = [engine(*each).item() for each in loader]
    assert len(seen) == len(loader) == 2
    assert engine.training_dataloader is loader
    whole = engine.deepspeed_io(data, batch_size=5, data_sampler=range(5))
    (inputs, _), *_ = whole
    assert torch.equal(inputs, torch.stack([x for x, _ in data]))


def test_several_engines_work_in_one_directory(start: Start, tmp_path: Path) -> None:
    config = configuration(tmp_path / "made")
    engines = [start(model=net(number), config=config)[0] for number in range(3)]
    found = [engine_losses(engine, 2) for engine in engines]
    for number, losses in enumerate(found):
        close(losses, plain_losses(net(number), adamw, 2))
    for engine in engines:
        engine.destroy()
        engine.destroy()
    assert not list((tmp_path / "made").iterdir())


def test_gc_removes_what_several_engines_of_a_dead_run_left(tmp_path: Path) -> None:
    left = [tmp_path / where / STATES_NAME for where in ("", "engine2", "engine2/rank1")]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(4096))
    assert set(collect(tmp_path)) == set(map(str, left))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("marked", [True, False])
def test_a_leaf_module_is_one_unit(start: Start, marked: bool) -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), nn.Linear(8, 4)
    )
    config = configuration()
    if marked:
        leaves = infinity.zero.set_z3_leaf_modules(model[0], [nn.Sequential])
        assert leaves == [model[0]] and infinity.zero.z3_leaf_module(model[0])
    else:
        config["zero_optimization"]["leaf_module"] = {"classes": [], "names": "0"}
    engine, *_ = start(model=model, config=config)
    assert infinity.zero.get_z3_leaf_modules(model) == [model[0]]
    (unit,) = [unit for unit in engine.engine.units if "0.0.weight" in unit.facts.names]
    assert {"0.0.weight", "0.2.weight"} <= set(unit.facts.names)
    assert "1.weight" not in unit.facts.names


# What cannot be


def without(*keys: str, nvme: Path | None = None, **others: Any) -> dict[str, Any]:
    config = configuration(nvme, **others)
    for key in keys:
        del config[key]
    return config


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "infinity.initialize needs a configuration"),
        ({"config": without("train_micro_batch_size_per_gpu")}, "give train_batch_size"),
        (
            {"config": configuration(), "config_params": {"x": 1}},
            "several configurations; give one",
        ),
        ({"config": configuration(optimizer={"type": "Nope"})}, "Nope"),
        (
            {"config": configuration(), "model_parameters": "weights"},
            "model_parameters is 'weights'",
        ),
        ({"config": configuration(), "model_parameters": [1]}, "model_parameters holds 1"),
        (
            {"config": configuration(), "model_parameters": [nn.Parameter(torch.ones(1))]},
            "a parameter that the model of infinity.initialize does not have",
        ),
        (
            {"config": configuration(), "optimizer": torch.optim.AdamW},
            "optimizer is the class AdamW",
        ),
        ({"config": configuration(), "optimizer": 3}, "optimizer is 3"),
        (
            {"config": configuration(), "model_parameters": []},
            "the optimizer has no parameters: model_parameters is empty",
        ),
        (
            {"config": configuration(optimizer={"type": "RMSprop", "params": {"lr": -1.0}})},
            "optimizer RMSprop: Invalid learning rate: -1.0",
        ),
        ({"config": configuration(), "lr_scheduler": 3}, "lr_scheduler is 3"),
        (
            {"config": without("optimizer"), "lr_scheduler": print},
            "lr_scheduler needs an optimizer",
        ),
        (
            {"config": configuration(), "lr_scheduler": lambda optimizer: None},
            "lr_scheduler gave None; it must be a scheduler",
        ),
        ({"config": configuration(), "training_data": 3}, "training_data is 3"),
        (
            {"config": configuration(), "training_data": {"train": [1, 2]}},
            "training_data is a value of type dict",
        ),
        ({"config": configuration(), "training_data": list}, "training_data is the class list"),
        ({"config": configuration(), "mpu": object()}, "mpu and mesh_param are not supported"),
        ({"config": configuration(zero_optimization={"stag": 3})}, "stag"),
        (
            {"config": configuration(Path(__file__))},
            "test_initialize.py cannot be made: File exists",
        ),
        (
            {"config": configuration(optimizer={"type": "AdamW", "params": {"lr": -1.0}})},
            "lr",
        ),
        (
            {"config": configuration(scheduler={"type": "WarmupDecayLR", "params": {}})},
            "total_num_steps",
        ),
    ],
)
def test_what_cannot_be_is_told_in_one_sentence(arguments: dict[str, Any], text: str) -> None:
    model = net()
    before = dict(vars(model))
    with pytest.raises(infinity.ConfigError, match=re.escape(text)) as error:
        infinity.initialize(model=model, **arguments)
    assert "\n" not in str(error.value)
    assert vars(model) == before
    model(*batch(0)).backward()
    assert type(model.first.weight) is nn.Parameter
    assert torch.equal(model.first.weight, net().first.weight)


@pytest.mark.parametrize("there", [True, False], ids=["inside", "outside"])
def test_a_failure_leaves_no_directory_that_was_not_there(tmp_path: Path, there: bool) -> None:
    """`nvme_path` is made where it is missing, with what is above it."""
    if there:
        (tmp_path / "a").mkdir()
    before = sorted(tmp_path.rglob("*"))
    config = configuration(tmp_path / "a" / "b" / "c", infinity={"gpu_memory": "1KiB"})
    with pytest.raises(infinity.BudgetError):
        infinity.initialize(model=net(), config=config)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_path_with_a_nul(tmp_path: Path) -> None:
    with pytest.raises(infinity.ConfigError, match="cannot be made: embedded null byte; name"):
        infinity.initialize(model=net(), config=configuration(Path(f"{tmp_path}/a\0b")))


def test_a_lazy_model(start: Start) -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(infinity.ConfigError, match=r"^0.weight has no shape yet, because its"):
        start(model=model, config=configuration())


def test_wrappers_of_an_optimizer_are_seen_through(start: Start) -> None:
    """As those of accelerate."""

    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    model = net()
    client = adamw(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(client, 0.5)
    schedule.optimizer = Wrapper(client)
    config = configuration()
    del config["optimizer"]
    engine, *_ = start(model=model, optimizer=client, lr_scheduler=schedule, config=config)
    engine_losses(engine, 2)
    assert engine.get_lr() == [2.5e-3]


def test_a_scheduler_of_another_optimizer(start: Start) -> None:
    """Its rates would reach nobody."""
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(other, 0.5)
    with pytest.raises(infinity.ConfigError, match="built for another optimizer than the one"):
        start(model=net(), lr_scheduler=schedule, config=configuration())


@pytest.mark.parametrize("given", [None, 3, {"a": 1}])
def test_a_model_that_is_none(given: Any) -> None:
    with pytest.raises(infinity.ConfigError, match=r"takes a torch\.nn\.Module, not"):
        infinity.initialize(model=given, config=configuration())


def test_without_an_optimizer_it_evaluates(start: Start) -> None:
    engine, optimizer, *_ = start(model=net(), config=without("optimizer"))
    assert optimizer is None
    loss = engine(*batch(0))
    assert loss.item() == net()(*batch(0)).item()
    assert not any(unit.facts.trainable for unit in engine.engine.units)
    for call in (lambda: engine.backward(loss), engine.step):
        with pytest.raises(infinity.ConfigError, match="needs an optimizer"):
            call()


@pytest.mark.parametrize("is_destroyed", [False, True])
def test_a_model_is_trained_after_it_was_evaluated(
    start: Start, tmp_path: Path, is_destroyed: bool
) -> None:
    """As by a Trainer, which destroys the engine in between."""
    config = without("optimizer", nvme=tmp_path)
    model = net()
    engine, *_ = start(model=model, config=config)
    loss = engine(*batch(0)).item()
    if is_destroyed:
        engine.destroy()
        assert model(*batch(0)).item() == loss
    else:  # as TRL's trainers, which ask before for what is trained
        assert all(parameter.requires_grad for parameter in model.parameters())
    engine, *_ = start(model=model, config=configuration(tmp_path))
    close(engine_losses(engine, 3), plain_losses(net(), adamw, 3))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("is_destroyed", [False, True])
def test_a_model_is_initialized_once_more(
    start: Start, tmp_path: Path, stage: int, is_destroyed: bool
) -> None:
    """The second engine goes on from the weights of the first one, with moments of its own."""
    config = configuration(tmp_path, zero_optimization={"stage": stage})
    model, plain = net(), net()
    expected = plain_losses(plain, adamw, 2) + plain_losses(plain, adamw, 2)
    first, *_ = start(model=model, config=config)
    losses = engine_losses(first, 2)
    if is_destroyed:
        first.destroy()
    second, *_ = start(model=model, config=config)
    close(losses + engine_losses(second, 2), expected)
    with pytest.raises(infinity.EngineClosedError, match="the engine was destroyed"):
        first.zero_grad()
    first.destroy()
    assert second.engine.is_open


def test_a_refused_optimizer_leaves_the_engine_before(start: Start) -> None:
    model = net()
    first, *_ = start(model=model, config=without("optimizer"))
    other = adamw(net().parameters())
    with pytest.raises(infinity.ConfigError, match="does not have"):
        infinity.initialize(model=model, optimizer=other, config=without("optimizer"))
    assert first(*batch(0)).isfinite()


def test_an_engine_is_no_model() -> None:
    engine, *_ = infinity.initialize(model=net(), config=configuration())
    with pytest.raises(infinity.ConfigError, match=r"give its engine\.module, which gets another"):
        infinity.initialize(model=engine, config=configuration())
    engine.destroy()


def test_without_an_optimizer_a_failure_freezes_nothing(tmp_path: Path) -> None:
    config = without("optimizer")
    config["infinity"]["gpu_memory"] = 1
    model = net()
    with pytest.raises(infinity.BudgetError):
        infinity.initialize(model=model, config=config)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_attributes_are_those_of_the_model(start: Start) -> None:
    engine, *_ = start(model=net(), config=configuration())
    assert isinstance(engine.module, Net)
    assert engine.first is engine.module.first
    assert next(iter(engine.state_dict())).startswith("module.")
    engine.eval()
    assert not engine.module.training and not engine.training
    with pytest.raises(AttributeError, match="nothing_like_that"):
        engine.nothing_like_that  # noqa: B018
