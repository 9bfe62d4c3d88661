"""Models built without memory get the values that their own initialisation would give them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import infinity
from support.models import FAMILIES


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_scales_that_a_parent_module_sets_are_kept(family: str, tmp_path: Path) -> None:
    """GPT-2's attention scales its child's weight by depth, T5's layers theirs by width: the parent
    initialises the child."""
    model = FAMILIES[family].build()
    plain = {
        name: parameter.detach().std()
        for name, parameter in model.named_parameters()
        if parameter.numel() >= 1024
    }
    with infinity.init():
        empty = type(model)(model.config)
    assert all(parameter.is_meta for parameter in empty.parameters())
    wrapped = infinity.wrap(
        empty, infinity.Config(nvme=tmp_path, gpu_memory="64MiB", cpu_memory="64MiB"), seed=1
    )
    with infinity.engine(wrapped) as engine:
        values = engine.state_dict()
    assert len(plain) > 5
    for name, std in plain.items():
        torch.testing.assert_close(
            values[name].std(),
            std,
            rtol=0.2,
            atol=1e-6,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def test_a_parameter_without_dimensions_is_trained_like_any_other(tmp_path: Path) -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for _ in range(3):
            loss = model(torch.ones(1, 4)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.gain

    plain = Scaled()
    expected = steps(plain, torch.optim.SGD(plain.parameters(), lr=0.125))
    config = infinity.Config(nvme=[tmp_path], gpu_memory="1MiB", cpu_memory="4MiB", algorithm="sgd")
    model = infinity.wrap(Scaled(), config)
    with infinity.engine(model):
        assert model.gain.shape == ()
        assert steps(model, infinity.SGD(model.parameters(), lr=0.125)) == expected


# Values that constructors write


class Gained(nn.Module):
    """A norm as many models have it: one value, without an initialisation of its own."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((6,), value))
        self.codes = nn.Parameter(torch.zeros(6, dtype=torch.int8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain + self.codes


class Constant(nn.Linear):
    """Writes one value after the initialisation of its base class."""

    def __init__(self, how: str) -> None:
        super().__init__(6, 6)
        if how == "nn.init":
            nn.init.constant_(self.weight, 0.25)
            nn.init.zeros_(self.bias)
        else:
            self.weight.data.fill_(0.25)
            self.bias.data.zero_()


class Own(nn.Linear):
    """Has an initialisation of its own, and calls it again."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=0.5)
        self.bias.data.fill_(3.0)


class Gpt(nn.Module):
    """Initialises some modules by `_init_weights`, and leaves the others to themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.gained = Gained(0.5)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.02)
            nn.init.ones_(module.bias)


class Holder(nn.Module):
    """Has no initialisation itself; what is inside of it has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Gpt()
        self.outer = nn.Linear(6, 6)


def wrap_empty(
    make: Callable[[], nn.Module], tmp_path: Path, **options: Any
) -> dict[str, torch.Tensor]:
    """The weights of what `make` builds inside of `init()`, and `wrap` initialises."""
    with infinity.init():
        model = make()
    assert all(parameter.is_meta for parameter in model.parameters())
    config = infinity.Config(nvme=[tmp_path], gpu_memory="1MiB", cpu_memory="4MiB")
    with infinity.engine(infinity.wrap(model, config, **{"seed": 0} | options)) as engine:
        return engine.state_dict()


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(Gained(2.0), nn.Linear(6, 6)),
        lambda: Constant("nn.init"),
        lambda: Constant(".data"),
        Gpt,
        Holder,
        Own,
    ],
    ids=["registered", "nn.init", ".data", "_init_weights", "inside", "own"],
)
def test_one_value_for_all_elements_is_kept(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    """And what draws numbers draws them from the distribution that its constructor took last."""
    plain, values = make(), wrap_empty(make, tmp_path)
    for name, parameter in plain.state_dict().items():
        assert values[name].dtype is parameter.dtype
        if (parameter == parameter.flatten()[0]).all():
            assert torch.equal(values[name], parameter), name
        else:
            assert 0.3 * parameter.std() < values[name].std() < 3 * parameter.std(), name


class Scaled(nn.Linear):
    """Changes what the initialisation of its base class has drawn."""

    def __init__(self, how: str) -> None:
        super().__init__(6, 6)
        if how == "nn.init":
            nn.init.normal_(self.weight)
        elif how == "trunc_normal_":
            nn.init.trunc_normal_(self.weight)
        elif how == ".data":
            self.weight.data.mul_(0.1)
        elif how == "row":
            with torch.no_grad():
                self.weight[0] = 0
        elif how == "registered":
            self.weight = nn.Parameter(torch.randn(6, 6))
        elif how == "copied":
            with torch.no_grad():
                self.weight.copy_(torch.eye(6))


@pytest.mark.parametrize(
    "how", ["nn.init", "trunc_normal_", ".data", "row", "registered", "copied"]
)
def test_other_values_of_a_constructor_are_refused(how: str, tmp_path: Path) -> None:
    text = (
        r"^1\.weight was given values inside infinity\.init\(\) \(test_init\.py:\d+\), when it had "
        r"no memory for them, and Scaled\.reset_parameters\(\) would give it others; build that "
        r"module outside of init\(\), give wrap\(\.\.\., weights=DIRECTORY\), or write these "
        r"values after wrap instead, inside `with infinity\.gathered\(parameter, write=True\):`$"
    )

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), Scaled(how))

    with pytest.raises(infinity.ConfigError, match=text):
        wrap_empty(make, tmp_path)
    (tmp_path / "weights").mkdir()
    plain = make()
    save_file(plain.state_dict(), tmp_path / "weights" / "model.safetensors")
    values = wrap_empty(make, tmp_path, weights=tmp_path / "weights")
    assert all(torch.equal(values[name], value) for name, value in plain.state_dict().items())


def test_a_parent_that_initialises_its_child_is_refused(tmp_path: Path) -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Linear(6, 6)
            self.reset_parameters()

        def reset_parameters(self) -> None:
            nn.init.xavier_normal_(self.child.weight)

    with pytest.raises(
        infinity.ConfigError, match=r"^child\.weight was given values inside infinity\.init\(\)"
    ):
        wrap_empty(Parent, tmp_path)


def test_values_written_between_init_and_wrap_are_refused(tmp_path: Path) -> None:
    with infinity.init():
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).half().requires_grad_(True)
    config = infinity.Config(nvme=[tmp_path], gpu_memory="1MiB", cpu_memory="4MiB")
    infinity.engine(infinity.wrap(model, config, seed=0)).close()
    with infinity.init():
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).bfloat16()
    nn.init.normal_(model[1].weight)
    with pytest.raises(
        infinity.ConfigError,
        match=r"^1\.weight was given values after init\(\), when it had no memory",
    ):
        infinity.wrap(model, config, seed=0)


def test_a_parameter_that_is_replaced_after_init_is_another_one(tmp_path: Path) -> None:
    with infinity.init():
        model = nn.Sequential(
            nn.Embedding(7, 6, padding_idx=0),
            nn.Linear(6, 7, bias=False),
            nn.Linear(7, 7, bias=False),
        )
    model[1].weight = model[0].weight  # which was written more often
    model[2].weight = nn.Parameter(torch.ones(7, 7))
    config = infinity.Config(nvme=[tmp_path], gpu_memory="1MiB", cpu_memory="4MiB")
    with infinity.engine(infinity.wrap(model, config, seed=0)) as engine:
        values = engine.state_dict()
    assert (
        torch.equal(values["0.weight"], values["1.weight"])
        and values["0.weight"][1:].count_nonzero() == 36
    )
    assert torch.equal(values["2.weight"], torch.ones(7, 7))


def test_what_is_built_outside_of_init_keeps_everything(tmp_path: Path) -> None:
    with infinity.init():
        model = nn.Sequential(nn.Linear(6, 6))
    model.append(Scaled("row"))
    values = {name: value.clone() for name, value in model[1].state_dict().items()}
    config = infinity.Config(nvme=[tmp_path], gpu_memory="1MiB", cpu_memory="4MiB")
    with infinity.engine(infinity.wrap(model, config, seed=0)) as engine:
        assert all(
            torch.equal(engine.state_dict()[f"1.{name}"], value) for name, value in values.items()
        )


def test_attributes_of_a_parameter_stay(tmp_path: Path) -> None:
    with infinity.init():
        model = nn.Linear(6, 6)
        model.weight.no_decay = True
    model = infinity.wrap(
        model, infinity.Config(nvme=[tmp_path], gpu_memory="1MiB", cpu_memory="4MiB"), seed=0
    )
    with infinity.engine(model):
        assert vars(model.weight) == {"no_decay": True} and vars(model.bias) == {}


MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(4, 4),
    "Bilinear": lambda: nn.Bilinear(2, 3, 4),
    "Conv2d": lambda: nn.Conv2d(4, 4, 3),
    "ConvTranspose1d": lambda: nn.ConvTranspose1d(4, 4, 3),
    "Embedding": lambda: nn.Embedding(7, 4, padding_idx=0),
    "EmbeddingBag": lambda: nn.EmbeddingBag(7, 4),
    "LSTM": lambda: nn.LSTM(4, 4, 2, bidirectional=True, proj_size=2),
    "GRUCell": lambda: nn.GRUCell(4, 4),
    "BatchNorm2d": lambda: nn.BatchNorm2d(4),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "LayerNorm": lambda: nn.LayerNorm(4),
    "RMSNorm": lambda: nn.RMSNorm(4),
    "PReLU": lambda: nn.PReLU(4),
    "AdaptiveLogSoftmaxWithLoss": lambda: nn.AdaptiveLogSoftmaxWithLoss(
        8, 20, [4, 10], div_value=1.5
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_of_torch_are_not_refused(name: str, tmp_path: Path) -> None:
    values, plain = wrap_empty(MODULES[name], tmp_path), MODULES[name]()
    for key, parameter in plain.named_parameters():
        assert values[key].shape == parameter.shape
        assert (values[key] == 0).all() == (parameter == 0).all(), key


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers_are_not_refused(family: str, tmp_path: Path) -> None:
    plain = FAMILIES[family].build()
    with infinity.init():
        model = type(plain)(plain.config)
    config = infinity.Config(nvme=[tmp_path], gpu_memory="64MiB", cpu_memory="64MiB")
    with infinity.engine(infinity.wrap(model, config, seed=0)) as engine:
        values = engine.state_dict()
    for name, parameter in plain.named_parameters():
        if (parameter == parameter.flatten()[0]).all():
            assert torch.equal(values[name], parameter), name


# from_pretrained


@pytest.mark.parametrize("auto", [False, True])
def test_from_pretrained_inside_of_init_is_refused(auto: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    built = FAMILIES["llama"].build()
    built.save_pretrained(tmp_path / "saved")
    kind: Any = AutoModelForCausalLM if auto else type(built)
    text = (
        r"^LlamaForCausalLM\.from_pretrained inside infinity\.init\(\) loads weights into "
        r"parameters without memory, so they would be lost; build the model inside init\(\) by "
        r"from_config, and give infinity\.wrap\(\.\.\., weights=DIRECTORY\); or call "
        r"from_pretrained outside of init\(\)$"
    )
    register = nn.Module.register_parameter
    with pytest.raises(infinity.ConfigError, match=text), infinity.init():
        kind.from_pretrained(tmp_path / "saved")
    assert nn.Module.register_parameter is register
    with infinity.init():
        model = AutoModelForCausalLM.from_config(built.config)
    (tmp_path / "nvme").mkdir()
    config = infinity.Config(nvme=[tmp_path / "nvme"], gpu_memory="64MiB", cpu_memory="64MiB")
    with infinity.engine(infinity.wrap(model, config, weights=tmp_path / "saved")) as engine:
        values = engine.state_dict()
    assert all(
        torch.equal(values[name], parameter) for name, parameter in built.state_dict().items()
    )
    assert not next(kind.from_pretrained(tmp_path / "saved").parameters()).is_meta


def test_a_from_pretrained_may_call_init_itself(tmp_path: Path) -> None:
    class Mine(nn.Linear):
        @classmethod
        def from_pretrained(cls, path: Path) -> nn.Module:
            with infinity.init():
                model = cls(6, 6)
            return infinity.wrap(
                model, infinity.Config(nvme=[path], gpu_memory="1MiB", cpu_memory="4MiB"), seed=0
            )

    model = Mine.from_pretrained(tmp_path)
    with infinity.engine(model) as engine:
        assert engine.state_dict()["weight"].std() > 0
