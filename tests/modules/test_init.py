"""Models built without memory get the values that their constructors give them, to the bit."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import infinity
from infinity.weights.init import replace_meta
from support.models import FAMILIES


def wrapped_values(model: nn.Module, tmp_path: Path, **options: Any) -> dict[str, torch.Tensor]:
    """The state dict of `model`, wrapped."""
    (tmp_path / "nvme").mkdir(exist_ok=True)
    config = infinity.Config(nvme=[tmp_path / "nvme"], gpu_memory="8MiB", cpu_memory="16MiB")
    with infinity.engine(infinity.wrap(model, config, **options)) as engine:
        return engine.state_dict()


@pytest.mark.parametrize(
    "convert",
    [
        lambda model: model.to(torch.bfloat16),
        lambda model: model.half(),
        lambda model: model.to("cpu"),
        lambda model: model.to(torch.float64).float(),
        lambda model: model[0].to(torch.bfloat16) and model,
    ],
    ids=["bfloat16", "half", "cpu", "there and back", "a part"],
)
def test_a_conversion_inside_keeps_parameters_and_their_ties(
    convert: Callable[[nn.Sequential], nn.Sequential], tmp_path: Path
) -> None:
    """It made other parameters, one for each name."""

    def make() -> nn.Sequential:
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False), nn.LayerNorm(4))
        model[1].weight = model[0].weight
        before = list(model.parameters())
        found = convert(model)
        assert all(new is old for new, old in zip(found.parameters(), before, strict=True))
        assert found[1].weight is found[0].weight and found[0].weight.norm() > 0
        return found

    check_bits(make, tmp_path)


def check_bits(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    """What `make` builds inside of `init()` takes no memory, and has the bits of the plain model
    after `wrap`; the generator of random numbers is where the plain constructor leaves it."""
    torch.manual_seed(3)
    plain = make()
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with infinity.init():
        model = make()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.is_meta for parameter in model.parameters())
    values = wrapped_values(model, tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    expected = plain.state_dict()
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        assert values[name].dtype is value.dtype
        assert torch.equal(values[name], value), name


# Architectures

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "cohere": SMALL,
    "deepseek_v3": SMALL
    | {
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "falcon": {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "gemma2": SMALL | {"head_dim": 8},
    "gpt2": {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2},
    "gpt_neox": SMALL,
    "jamba": SMALL | {"num_experts": 2, "mamba_d_state": 4, "num_experts_per_tok": 1},
    "llama": SMALL,
    "mamba": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "mixtral": SMALL | {"num_local_experts": 4},
    "opt": {
        "vocab_size": 64,
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "word_embed_proj_dim": 32,
    },
    "phi3": SMALL,
    "qwen2_moe": SMALL
    | {
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "num_experts_per_tok": 2,
    },
    "qwen3": SMALL | {"head_dim": 8},
    "stablelm": SMALL,
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_causal_models_of_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    def make() -> nn.Module:
        description = AutoConfig.for_model(kind, **ARCHITECTURES[kind])
        return AutoModelForCausalLM.from_config(description)

    check_bits(make, tmp_path)


@pytest.mark.parametrize("family", ["bert", "t5", "vit"])
def test_other_models_of_transformers(family: str, tmp_path: Path) -> None:
    """The position embeddings of ViT come of `trunc_normal_`, which rejects numbers in a loop."""
    check_bits(FAMILIES[family].build, tmp_path)


def test_a_model_in_bf16(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    description = AutoConfig.for_model("llama", **SMALL)
    check_bits(
        lambda: AutoModelForCausalLM.from_config(description, dtype=torch.bfloat16), tmp_path
    )


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
def test_modules_of_torch(name: str, tmp_path: Path) -> None:
    check_bits(MODULES[name], tmp_path)


# Ways to write values


class Written(nn.Module):
    """A linear module, and what `write` does to it in the constructor."""

    def __init__(self, write: Callable[[Any], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.other = nn.Linear(6, 6, bias=False)
        write(self)


def _in_place(module: Any) -> None:
    with torch.no_grad():
        module.linear.weight[0] = 0
        module.linear.weight[1:3, ::2].uniform_(-3, -2)
        module.linear.bias += torch.arange(6)


def _mask(module: Any) -> None:
    weight = module.linear.weight.data
    weight[weight > 0] = 2.0


def _rejected(module: Any) -> None:
    while module.linear.weight.std() > 0.2:
        module.linear.reset_parameters()
    module.linear.weight.data /= module.linear.weight.data.norm().item()


def _kept_object(module: Any) -> None:
    parameter = nn.Parameter(torch.empty(3, 3))
    module.mine = parameter
    nn.init.normal_(parameter)  # the object that was registered, and not module.mine
    module.mine.data.mul_(2)
    module.copied = nn.Parameter(parameter.detach() + 1)


def _tied(module: Any) -> None:
    """Two modules register one object, drawn or computed of a parameter."""
    drawn, computed = nn.Parameter(torch.randn(6, 6)), nn.Parameter(module.other.weight.data * 2)
    module.other.first, module.other.second = drawn, computed
    module.first, module.second = drawn, computed


def _own_memory(module: Any) -> None:
    weight = module.linear.weight.data
    weight.copy_(weight.T.clone())
    module.linear.bias.data.copy_(module.linear.bias.data)
    module.other.weight.data[:3].copy_(module.other.weight.data[3:])


def _alias(module: Any) -> None:
    """The handle is written, and then the memory that it was made from is read and written."""
    given = torch.arange(36.0).view(6, 6)
    module.mine = nn.Parameter(given)
    module.mine.data.add_(1)
    given[0].mul_(2)
    module.seen = nn.Parameter(given[1:].clone())


def _through_numpy(module: Any) -> None:
    """NumPy writes memory that torch made, before and after it is a parameter."""
    memory = torch.zeros(6, 6)
    memory.numpy()[:] = np.eye(6)
    module.mine = nn.Parameter(memory)
    module.linear.weight.data.copy_(torch.from_numpy(module.other.weight.detach().numpy() * 2))
    module.linear.bias.data.fill_(module.other.weight.tolist()[0][0])


def _indexed(module: Any) -> None:
    """By lists of numbers, of which torch makes tensors on the device of what is indexed."""
    weight = module.linear.weight
    module.rows = nn.Parameter(weight[[1, -1]].clone())
    module.some = nn.Parameter(weight[[0, 2], [3, 1]].clone())
    module.columns = nn.Parameter(weight[:, (2, 0)].clone())
    module.masked = nn.Parameter(weight[[True, False, True, False, False, True]].clone())
    module.table = nn.Parameter(weight[:, [[0, 1], [2, 3]]].clone())
    module.counted = nn.Parameter(weight[range(2, 4), np.array([1, 2])].clone())
    module.nothing = nn.Parameter(weight[[]].clone())
    with torch.no_grad():
        weight[[3, 4]] = 7.0
        weight[[0], [1]] = module.some[:1]


def _views(module: Any) -> None:
    module.first, module.second = (nn.Parameter(each) for each in torch.randn(2, 4).unbind())


def _generator(module: Any) -> None:
    generator = torch.Generator().manual_seed(11)
    nn.init.normal_(module.linear.weight, generator=generator)
    module.linear.bias.data.uniform_(generator=generator)


def _buffer(module: Any) -> None:
    module.register_buffer("average", torch.zeros_like(module.linear.weight))
    module.register_buffer("scale", module.linear.weight.detach().abs().mean())
    module.register_buffer("noise", torch.randn(3, device=module.linear.weight.device))


def _moved(module: Any) -> None:
    module.to("cpu").to(torch.float64).half()


WAYS: dict[str, Callable[[Any], object]] = {
    "normal_": lambda m: nn.init.normal_(m.linear.weight, std=0.02),
    "trunc_normal_": lambda m: nn.init.trunc_normal_(m.linear.weight, std=0.5),
    "narrow trunc_normal_": lambda m: nn.init.trunc_normal_(m.linear.weight, a=2.0, b=3.0),
    "orthogonal_": lambda m: nn.init.orthogonal_(m.linear.weight),
    "sparse_": lambda m: nn.init.sparse_(m.linear.weight, 0.5),
    "dirac_": lambda m: nn.init.dirac_(m.linear.weight.data.view(6, 6, 1)),
    "constant_": lambda m: nn.init.constant_(m.linear.weight, 0.25),
    ".data": lambda m: m.linear.weight.data.normal_(std=0.02),
    ".data.mul_": lambda m: m.linear.weight.data.mul_(0.1),
    "set .data": lambda m: setattr(m.linear.weight, "data", torch.randn(6, 6)),
    "no_grad": _in_place,
    "mask": _mask,
    "apply": lambda m: m.apply(
        lambda each: isinstance(each, nn.Linear) and nn.init.xavier_normal_(each.weight)
    ),
    "again": lambda m: m.linear.reset_parameters(),
    "copy_": lambda m: m.linear.weight.data.copy_(torch.eye(6)),
    "of another": lambda m: m.linear.weight.data.copy_(m.other.weight.data.T * 2),
    "NumPy": lambda m: m.linear.weight.data.copy_(torch.from_numpy(np.eye(6) * 3)),
    "list": lambda m: m.linear.bias.data.copy_(m.linear.bias.new_tensor([1, 2, 3, 4, 5, 6])),
    "registered": lambda m: setattr(m, "mine", nn.Parameter(torch.randn(6, 6) * 0.02)),
    "registered trunc_normal_": lambda m: setattr(
        m, "mine", nn.Parameter(nn.init.trunc_normal_(torch.zeros(1, 5, 6), std=0.02))
    ),
    "registered numbers": lambda m: setattr(m, "mine", nn.Parameter(torch.tensor([1.0, 2.0]))),
    "registered integers": lambda m: setattr(
        m, "mine", nn.Parameter(torch.arange(5, dtype=torch.int8), requires_grad=False)
    ),
    "kept object": _kept_object,
    "own memory": _own_memory,
    "indexed by lists": _indexed,
    "registered scalar": lambda m: setattr(m, "mine", nn.Parameter(torch.tensor(2.5))),
    "alias": _alias,
    "through NumPy": _through_numpy,
    "views": _views,
    "deepcopy": lambda m: setattr(m, "copy", copy.deepcopy(m.linear)),
    "tied": lambda m: setattr(m.other, "weight", m.linear.weight),
    "tied by a variable": _tied,
    "read": _rejected,
    "generator": _generator,
    "buffers": _buffer,
    "moved": _moved,
    "weight_norm": lambda m: nn.utils.parametrizations.weight_norm(m.linear),
    "spectral_norm": lambda m: nn.utils.parametrizations.spectral_norm(m.other),
}


@pytest.mark.parametrize("way", WAYS)
def test_values_that_a_constructor_writes(way: str, tmp_path: Path) -> None:
    check_bits(lambda: Written(WAYS[way]), tmp_path)


def test_values_on_the_meta_device_inside_of_init(tmp_path: Path) -> None:
    """A constructor that asks for the device of its parameters gets tensors with values."""

    def make() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))

    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).state_dict()
    torch.manual_seed(3)
    with infinity.init():
        model = make()
    values = wrapped_values(model, tmp_path)
    assert all(torch.equal(values[name], plain[name]) for name in plain)


def test_a_parameter_that_a_constructor_leaves_uninitialised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def leave(module: Any) -> None:
        module.left = nn.Parameter(torch.empty(4))

    with infinity.init():
        model = Written(leave)
    values = wrapped_values(model, tmp_path)
    assert torch.equal(values["left"], torch.zeros(4))
    assert "left: no constructor wrote its values; it starts as zeros" in caplog.text


# Memory


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors with memory that operators made, and that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._storages: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result.is_meta:
            storage = result.untyped_storage()
            self._storages.append((StorageWeakRef(storage), storage.nbytes()))
        self._storages = [each for each in self._storages if not each[0].expired()]
        live = {reference.cdata: nbytes for reference, nbytes in self._storages}
        self.most = max(self.most, sum(live.values()))
        return result


def test_no_more_than_one_parameter_and_what_it_is_drawn_on_is_in_memory() -> None:
    size = 256 * 256 * 4
    some = 64 << 10  # states of the generator, scalars
    with LiveBytes() as building, infinity.init():
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(12)))
        for module in model:
            nn.init.trunc_normal_(module.weight)
    assert size <= building.most <= 5 * size + some  # `trunc_normal_` takes some itself
    origins = replace_meta(model)
    with LiveBytes() as making:
        for parameter in model.parameters():
            origin = origins[id(parameter)]
            assert origin is not None
            assert origin.values(parameter).shape == (256, 256)
    assert size <= making.most <= 5 * size + some


# Seeds


def test_a_seed_gives_the_values_after_manual_seed(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(Written(WAYS["trunc_normal_"]), nn.Linear(6, 6), nn.LayerNorm(6))

    torch.manual_seed(5)
    plain = make().state_dict()
    torch.manual_seed(6)
    with infinity.init():
        model = make()
    state = torch.get_rng_state()
    values = wrapped_values(model, tmp_path, seed=5)
    assert all(torch.equal(values[name], plain[name]) for name in plain)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_seed_after_a_constructor_that_looked_is_refused(tmp_path: Path) -> None:
    with infinity.init():
        model = Written(WAYS["read"])
    with pytest.raises(
        infinity.ConfigError,
        match=r"^the constructor looked at numbers that it drew, so wrap\(seed=\.\.\.\) cannot "
        r"replace them; call torch\.manual_seed\(seed\) before infinity\.init\(\) instead$",
    ):
        wrapped_values(model, tmp_path, seed=5)


def test_draws_can_be_put_off(tmp_path: Path) -> None:
    """With `exact=False` nothing is drawn before `wrap`, and one seed gives one model."""
    found = []
    for _ in range(2):
        state = torch.get_rng_state()
        with infinity.init(exact=False):
            model = Written(WAYS["normal_"])
        assert torch.equal(torch.get_rng_state(), state)
        found.append(wrapped_values(model, tmp_path, seed=7))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert 0.01 < found[0]["linear.weight"].std() < 0.03
    assert found[0]["other.weight"].std() > 0.1


def test_another_seed_after_a_wrap_that_failed(tmp_path: Path) -> None:
    def build(exact: bool) -> nn.Module:
        with infinity.init(exact=exact):
            return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    for exact in (True, False):
        model = build(exact)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("infinity.assembly.Assembly.move_buffers", fail)
            wrapped_values(model, tmp_path, seed=1)
        values = wrapped_values(model, tmp_path, seed=2)
        expected = wrapped_values(build(exact), tmp_path, seed=2)
        assert all(torch.equal(values[name], expected[name]) for name in values)


def test_parameters_that_take_no_handle_are_left_alone(tmp_path: Path) -> None:
    with infinity.init():
        lazy = nn.Sequential(nn.LazyLinear(3))
        sparse = nn.Linear(3, 3)
        sparse.weight = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(infinity.ConfigError, match="its module is lazy"):
        wrapped_values(lazy, tmp_path)
    with pytest.raises(infinity.ConfigError, match=r"weight is a sparse_coo tensor"):
        wrapped_values(sparse, tmp_path)


def test_two_models_differ_as_plain_ones_do(tmp_path: Path) -> None:
    torch.manual_seed(1)
    plain = [nn.Linear(6, 6).weight.detach() for _ in range(2)]
    torch.manual_seed(1)
    models = []
    for _ in range(2):
        with infinity.init():
            models.append(nn.Linear(6, 6))
    for model, weight in zip(models, plain, strict=True):
        assert torch.equal(wrapped_values(model, tmp_path)["weight"], weight)


def test_one_inside_of_another_does_nothing(tmp_path: Path) -> None:
    """As where a function that builds a part of a model uses it, too."""

    def part() -> nn.Module:
        with infinity.init(exact=False):
            return nn.Linear(6, 6)

    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).state_dict()
    torch.manual_seed(1)
    with infinity.init():
        model = nn.Sequential(part(), nn.Linear(6, 6))
    values = wrapped_values(model, tmp_path)
    assert all(torch.equal(values[name], plain[name]) for name in plain)


# What is refused


def test_a_source_that_is_changed_before_wrap_is_refused(tmp_path: Path) -> None:
    source = torch.randn(6, 6)
    with infinity.init():
        model = Written(lambda m: m.linear.weight.data.copy_(source))
    source.zero_()
    with pytest.raises(
        infinity.ConfigError,
        match=r"^a tensor of shape \(6, 6\) that a constructor inside infinity\.init\(\) copied "
        r"from was changed after that",
    ):
        wrapped_values(model, tmp_path)


def test_a_model_of_the_meta_device_needs_weights(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    with pytest.raises(
        infinity.ConfigError,
        match=r"^0\.weight is on the meta device and has no values, because it was not built "
        r"inside infinity\.init\(\); build the model, and what is added to it, "
        r"inside infinity\.init\(\), or give wrap\(\.\.\., weights=\.\.\.\)$",
    ):
        wrapped_values(model, tmp_path, seed=0)
    plain = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).state_dict()
    save_file(plain, tmp_path / "model.safetensors")
    values = wrapped_values(model, tmp_path, weights=tmp_path)
    assert all(torch.equal(values[name], value) for name, value in plain.items())


def test_a_source_without_values_is_refused() -> None:
    strange = torch.empty(6, 6, device="meta")
    with (
        pytest.raises(
            infinity.ConfigError,
            match=r"^a constructor inside infinity\.init\(\) copies from a tensor on the meta",
        ),
        infinity.init(),
    ):
        Written(lambda m: m.linear.weight.data.copy_(strange))


# Models of several parts


def test_a_parameter_that_is_replaced_after_init_is_another_one(tmp_path: Path) -> None:
    with infinity.init():
        model = nn.Sequential(
            nn.Embedding(7, 6, padding_idx=0),
            nn.Linear(6, 7, bias=False),
            nn.Linear(7, 7, bias=False),
        )
    model[1].weight = model[0].weight
    model[2].weight = nn.Parameter(torch.ones(7, 7))
    values = wrapped_values(model, tmp_path)
    assert torch.equal(values["0.weight"], values["1.weight"])
    assert values["0.weight"][1:].count_nonzero() == 36
    assert torch.equal(values["2.weight"], torch.ones(7, 7))


def test_what_is_built_outside_of_init_keeps_everything(tmp_path: Path) -> None:
    with infinity.init():
        model = nn.Sequential(nn.Linear(6, 6))
    model.append(Written(WAYS["no_grad"]))
    expected = {name: value.clone() for name, value in model[1].state_dict().items()}
    values = wrapped_values(model, tmp_path)
    assert all(torch.equal(values[f"1.{name}"], value) for name, value in expected.items())


@pytest.mark.parametrize("inside", [False, True])
def test_a_parameter_without_dimensions_is_trained_like_any_other(
    inside: bool, tmp_path: Path
) -> None:
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
    with infinity.init() if inside else contextlib.nullcontext():
        model = Scaled()
    infinity.wrap(model, config)
    with infinity.engine(model):
        assert model.gain.shape == ()
        assert steps(model, infinity.SGD(model.parameters(), lr=0.125)) == expected


def test_attributes_of_a_parameter_stay(tmp_path: Path) -> None:
    with infinity.init():
        model = nn.Linear(6, 6)
        model.weight.no_decay = True
    model = infinity.wrap(
        model, infinity.Config(nvme=[tmp_path], gpu_memory="1MiB", cpu_memory="4MiB"), seed=0
    )
    with infinity.engine(model):
        assert vars(model.weight) == {"no_decay": True} and vars(model.bias) == {}


@pytest.mark.parametrize("inside", [False, True])
def test_hooks_on_gradients_stay(inside: bool, tmp_path: Path) -> None:
    """OSF of PEFT projects gradients so. A hook that is removed is removed from the parameter."""
    with infinity.init() if inside else contextlib.nullcontext():
        model = nn.Linear(6, 6)
        model.weight.register_hook(lambda gradient: gradient * 2)
        removed = model.bias.register_hook(lambda gradient: gradient * 3)
    config = infinity.Config(nvme=[tmp_path], gpu_memory="1MiB", cpu_memory="4MiB")
    infinity.wrap(model, config)
    with infinity.engine(model):
        removed.remove()
        model(torch.ones(4, 6)).sum().backward()
        assert torch.equal(model.weight.grad + 0, torch.full((6, 6), 8.0))
        assert torch.equal(model.bias.grad + 0, torch.full((6,), 4.0))
