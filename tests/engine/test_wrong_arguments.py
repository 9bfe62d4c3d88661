"""An argument of a wrong kind is refused in one sentence that names it and the way out, and changes
nothing. What scripts pass to the optimizers of torch is accepted."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity

pytestmark = [pytest.mark.usefixtures("one_thread")]

X = torch.ones(2, 8)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))


def refuses(text: str) -> Any:
    return pytest.raises(infinity.ConfigError, match=f"^{re.escape(text)}$")


WRAP: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "no model": (
        lambda model: infinity.wrap(None),  # type: ignore[type-var]
        "infinity.wrap takes a torch.nn.Module, not None",
    ),
    "a class": (
        lambda model: infinity.wrap(nn.Linear),  # type: ignore[type-var]
        "infinity.wrap takes a torch.nn.Module, not the class Linear",
    ),
    "a state dict": (
        lambda model: infinity.wrap(model.state_dict()),  # type: ignore[type-var]
        "infinity.wrap takes a torch.nn.Module, not a value of type OrderedDict",
    ),
    "a dict of keys": (
        lambda model: infinity.wrap(model, {"nvme": "/mnt/nvme0"}),  # type: ignore[arg-type]
        "config is a value of type dict; for its keys write infinity.Config(**config)",
    ),
    "a directory": (
        lambda model: infinity.wrap(model, "/mnt/nvme0"),  # type: ignore[arg-type]
        "config is '/mnt/nvme0'; for a directory on NVMe write infinity.Config(nvme=...)",
    ),
    "tuning": (
        lambda model: infinity.wrap(model, infinity.Tuning()),  # type: ignore[arg-type]
        "config is a value of type Tuning; write infinity.Config(tuning=...)",
    ),
    "a class of config": (
        lambda model: infinity.wrap(model, infinity.Config),  # type: ignore[arg-type]
        "config is the class Config; give an infinity.Config, or leave it out",
    ),
    "one class of units": (
        lambda model: infinity.wrap(model, units=nn.Linear),  # type: ignore[arg-type]
        "units is the class Linear; give a list of classes or modules of the model, for example "
        "units=[torch.nn.TransformerEncoderLayer]",
    ),
    "names of units": (
        lambda model: infinity.wrap(model, units=["Linear"]),  # type: ignore[list-item]
        "units holds 'Linear'; give classes or modules of the model themselves",
    ),
    "a seed of text": (
        lambda model: infinity.wrap(model, seed="1"),  # type: ignore[arg-type]
        "seed is '1'; give an integer",
    ),
    "a seed that is too large": (
        lambda model: infinity.wrap(model, seed=2**64),
        "seed is 18446744073709551616; torch takes integers of 64 bits",
    ),
}


@pytest.mark.parametrize("kind", WRAP)
def test_arguments_of_wrap(kind: str) -> None:
    call, text = WRAP[kind]
    model = build()
    before = {name: (p, p.data_ptr()) for name, p in model.named_parameters()}
    with refuses(text):
        call(model)
    after = {name: (p, p.data_ptr()) for name, p in model.named_parameters()}
    assert all(after[name][0] is p and after[name][1] == at for name, (p, at) in before.items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_config_takes_keys() -> None:
    values = {"nvme": "/mnt/nvme0"}
    text = (
        "Config takes keys, not a value of type dict; write Config(nvme=...), or Config(**values)"
    )
    with refuses(f"{text} for a dict"):
        infinity.Config(values)
    assert infinity.Config(**values).nvme == (Path("/mnt/nvme0"),)
    with refuses(
        "Tuning takes keys, not '2GiB'; write Tuning(nvme_memory=...), or Tuning(**values) for a "
        "dict"
    ):
        infinity.Tuning("2GiB")
    config = infinity.Config(gpu_memory="1GiB")
    with refuses("a Config cannot be changed; make another one, with gpu_memory=..."):
        config.gpu_memory = "2GiB"
    assert config.gpu_memory == 1 << 30


@pytest.fixture(scope="module")
def wrapped() -> Iterator[nn.Module]:
    """One for all tests: whatever is refused leaves it of use."""
    model = infinity.wrap(build(), infinity.Config(tuning={"device": "cpu"}))
    yield model
    infinity.engine(model).close()


def trains(model: nn.Module, **settings: Any) -> list[torch.Tensor]:
    """Two steps, and the weights after them; they begin at the same values every time."""
    fresh = build().state_dict()
    with infinity.gathered(model, write=True), torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(fresh[name])
    optimizer = infinity.AdamW(model.parameters(), **settings)
    for _ in range(2):
        model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(infinity.engine(model).state_dict().values())


SCALER = "give infinity.LossScaler(), or leave it out"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lr": "1e-3"}, "lr is '1e-3', not a number; write lr=float('1e-3')"),
        ({"lr": "fast"}, "lr is 'fast', not a number"),
        ({"lr": None}, "lr is None, not a number"),
        ({"eps": [1e-8]}, "eps is a value of type list, not a number"),
        (
            {"weight_decay": "0.1"},
            "weight_decay is '0.1', not a number; write weight_decay=float('0.1')",
        ),
        ({"betas": 0.9}, "betas is 0.9, not two numbers"),
        ({"betas": (0.9, 0.99, 0.999)}, "betas is a value of type tuple, not two numbers"),
        ({"betas": ("0.9", "0.99")}, "betas is a value of type tuple, not two numbers"),
        (
            {"max_grad_norm": "1"},
            "max_grad_norm is '1', not a number; write max_grad_norm=float('1')",
        ),
        ({"lr": torch.ones(2)}, "lr is a value of type Tensor, not a number"),
        ({"loss_scaler": "dynamic"}, f"loss_scaler is 'dynamic'; {SCALER}"),
        ({"loss_scaler": infinity.LossScaler}, f"loss_scaler is the class LossScaler; {SCALER}"),
        (
            {"amsgrad": True},
            "amsgrad=True is not supported; infinity.adapt runs the optimizer of torch that has it",
        ),
        (
            {"differentiable": True},
            "differentiable=True is not supported, because updates run outside of autograd; leave "
            "it out",
        ),
    ],
)
def test_hyper_parameters(settings: dict[str, Any], text: str, wrapped: nn.Module) -> None:
    with refuses(f"AdamW: {text}"):
        infinity.AdamW(wrapped.parameters(), **settings)


@pytest.mark.parametrize(
    ("kind", "settings", "text"),
    [
        (infinity.SGD, {"dampening": "0"}, "SGD: dampening is '0', not a number; write dampening="),
        (infinity.Adagrad, {"lr_decay": "x"}, "Adagrad: lr_decay is 'x', not a number"),
        (infinity.Lion, {"betas": None}, "Lion: betas is None, not two numbers"),
    ],
)
def test_hyper_parameters_of_the_others(
    kind: Any, settings: dict[str, Any], text: str, wrapped: nn.Module
) -> None:
    with pytest.raises(infinity.ConfigError, match=f"^{re.escape(text)}"):
        kind(wrapped.parameters(), **settings)


def test_parameters_of_an_optimizer(wrapped: nn.Module) -> None:
    takes = "AdamW takes a list of parameters such as model.parameters(), not"
    with refuses(f"{takes} a value of type Sequential"):
        infinity.AdamW(wrapped)  # type: ignore[arg-type]
    with refuses(f"{takes} None"):
        infinity.AdamW(None)  # type: ignore[arg-type]
    with refuses(f"{takes} a value of type ShardedParameter; for a single one write [parameter]"):
        infinity.AdamW(next(wrapped.parameters()))
    with (
        pytest.warns(UserWarning, match="duplicate"),
        refuses(  # torch would update it twice
            "AdamW got 0.weight twice; give every parameter once"
        ),
    ):
        infinity.AdamW([*wrapped.parameters(), next(wrapped.parameters())])
    with refuses(
        "SparseAdam updates by sparse gradients alone, and gradients are dense here; use "
        "infinity.AdamW"
    ):
        infinity.adapt(torch.optim.SparseAdam, wrapped.parameters())
    with refuses(
        "infinity.adapt takes a class of torch.optim optimizers that is not infinity's own, not a "
        "value of type SGD"
    ):
        infinity.adapt(torch.optim.SGD([torch.ones(1)], lr=1), wrapped.parameters())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [infinity.AdamW, infinity.Adam])
def test_options_that_scripts_pass_change_nothing_and_are_noted_once(
    kind: Any, wrapped: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"fused": True, "foreach": True, "capturable": False, "amsgrad": False}
    with caplog.at_level(logging.WARNING, "infinity"):
        kind(wrapped.parameters(), lr=1e-3, **options, maximize=False, differentiable=False)
    assert [text for text in caplog.messages if "changes nothing" in text] == [
        f"{kind.__name__}: fused=True and foreach=True changes nothing: the engine has kernels of "
        "its own, for whole units"
    ]
    caplog.clear()
    kind(wrapped.parameters(), fused=None, foreach=False)
    assert not caplog.messages
    assert all(
        torch.equal(one, other)
        for one, other in zip(trains(wrapped), trains(wrapped, fused=True), strict=True)
    )


def test_an_option_that_nobody_knows(wrapped: nn.Module) -> None:
    for kind in (infinity.AdamW, infinity.Adagrad, infinity.Lion, infinity.SGD):
        with pytest.raises(TypeError, match=f"^{kind.__name__} has no option 'momentun'$"):
            kind(wrapped.parameters(), momentun=0.9)  # type: ignore[arg-type]


def no_loss(kind: str) -> str:
    return (
        f"the model returned no loss, but {kind}: put labels into each micro-batch, or give "
        "infinity.accumulate(..., loss=function)"
    )


ACCUMULATE: dict[str, tuple[tuple[Any, ...], str]] = {
    "one batch": (
        ({"input": X},),
        "infinity.accumulate takes a list of micro-batches, not a value of type dict; for a single "
        "one write [batch]",
    ),
    "one tensor": (
        (X,),
        "infinity.accumulate takes a list of micro-batches, not a value of type Tensor; for a "
        "single one write [batch]",
    ),
    "nothing": ((None,), "infinity.accumulate takes a list of micro-batches, not None"),
    "a number": ((3,), "infinity.accumulate takes a list of micro-batches, not 3"),
    "no labels": (([X],), no_loss("a value of type Tensor")),
    "a name": (
        ([X], "mse"),
        "infinity.accumulate: loss is 'mse'; give a function of what the model returned and of its "
        "micro-batch",
    ),
    "a vector": (
        ([X], lambda outputs, batch: outputs),
        "infinity.accumulate: the loss is a tensor of shape (2, 8); it must be a tensor of one "
        "element",
    ),
    "a float": (
        ([X], lambda outputs, batch: 0.5),
        "infinity.accumulate: the loss is 0.5; it must be a tensor of one element",
    ),
}


@pytest.mark.parametrize("order", ["horizontal", "vertical"])
@pytest.mark.parametrize("kind", ACCUMULATE)
def test_arguments_of_accumulate(kind: str, order: Any, wrapped: nn.Module) -> None:
    arguments, text = ACCUMULATE[kind]
    with refuses(text):
        infinity.accumulate(wrapped, *arguments, order=order)
    losses = infinity.accumulate(wrapped, [X, X], lambda y, _: y.square().mean(), order=order)
    assert len(losses) == 2
    infinity.AdamW(wrapped.parameters()).zero_grad()


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("0.weight", "'0.weight'"),
        (["0.weight"], "'0.weight'"),
        (None, "None"),
        (3, "3"),
        ({"0.weight": torch.ones(1)}, "'0.weight'"),
    ],
)
def test_what_cannot_be_gathered(target: Any, found: str, wrapped: nn.Module) -> None:
    with (
        refuses(
            "infinity.gathered takes a module, a parameter or a list of parameters, not "
            f"{found}; model.get_parameter(name) finds one by its name"
        ),
        infinity.gathered(target),
    ):
        pass
    with infinity.gathered(wrapped.get_parameter("0.weight")):
        assert wrapped.get_parameter("0.weight").sum().isfinite()


def test_what_has_no_engine(wrapped: nn.Module) -> None:
    for call in (infinity.engine, infinity.no_sync):
        with refuses("infinity.engine takes the module that infinity.wrap returned, not None"):
            call(None)  # type: ignore[operator]
    with refuses("max_norm is '1'; give a number"):
        infinity.engine(wrapped).clip_grad_norm_("1")  # type: ignore[arg-type]


def test_a_model_that_is_wrapped_already(wrapped: nn.Module) -> None:
    with refuses(
        "the model is wrapped already: use it as it is, or call infinity.engine(model).unwrap() "
        "before"
    ):
        infinity.wrap(wrapped)
    trains(wrapped)


def test_an_optimizer_that_the_engine_does_not_know(wrapped: nn.Module) -> None:
    optimizer = torch.optim.AdamW(wrapped.parameters())
    wrapped(X).sum().backward()
    with pytest.raises(
        infinity.ShardedParameterError,
        match=(
            r"update with infinity\.AdamW and its family, or .* by "
            r"infinity\.adapt\(torch\.optim\.RMSprop, model\.parameters\(\), \.\.\.\)$"
        ),
    ):
        optimizer.step()
    infinity.AdamW(wrapped.parameters()).zero_grad()
    with pytest.raises(
        infinity.ConfigError, match=r"^a checkpoint takes optimizers of infinity for the parameters"
    ):
        infinity.engine(wrapped).save_checkpoint("unused", optimizer)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
            "mpirun started this process as rank 1 of 2, but torch.distributed is not initialized, "
            "so each would train a model of its own; start the script with torchrun and call "
            "torch.distributed.init_process_group before, or give group=None for a model in each "
            "process",
        ),
        (
            {"WORLD_SIZE": "2"},
            "WORLD_SIZE is 2, but RANK is not set, so this process could only train alone; start "
            "all with torchrun --nproc-per-node N, which sets both, or give group=None to train "
            "alone",
        ),
    ],
)
def test_one_of_several_processes_does_not_train_alone_unasked(
    environment: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    model = build()
    with refuses(problem):
        infinity.wrap(model)
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    infinity.engine(infinity.wrap(model, group=None)).close()
