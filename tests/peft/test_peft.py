"""Adapters of PEFT on a wrapped model: the losses of plain PyTorch, added at any time, and saved
alone."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.modules import merging
from support.adapted import written_by_the_kernel
from support.configs import config_of
from support.models import FAMILIES
from support.roads import OWN, road

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]

STEPS = 3
# The product of the second with a gradient is exact.
RATE = {infinity.AdamW: 1e-2, infinity.SGD: 0.125, torch.optim.SGD: 0.125}
TARGETS = ["q_proj", "v_proj", "up_proj"]


def lora(**options: Any) -> Any:
    return peft.LoraConfig(target_modules=TARGETS, r=4, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a small Llama."""
    path = tmp_path_factory.mktemp("saved")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        FAMILIES["llama"].build().save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def closed() -> Iterator[list[nn.Module]]:
    """What is in the list is closed in the end."""
    models: list[nn.Module] = []
    yield models
    for model in models:
        if "_infinity_engine" in vars(model):
            infinity.engine(model).close()


def config(tmp_path: Path, **options: Any) -> infinity.Config:
    (tmp_path / "nvme").mkdir(exist_ok=True)
    least = {"gpu_memory": "8MiB", "cpu_memory": "8MiB", "cache": 0}
    return config_of(nvme=tmp_path / "nvme", **least | options)


def base(path: Path, **options: Any) -> Any:
    return type(FAMILIES["llama"].build()).from_pretrained(path, **options)


def adapted(path: Path, adapter: Any) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(base(path), adapter)


def managed(
    path: Path, adapter: Any, tmp_path: Path, closed: list[nn.Module], **options: Any
) -> Any:
    with infinity.init():
        model = adapted(path, adapter)
    closed.append(model)
    return infinity.wrap(model, config(tmp_path, **options))


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.arange(16).view(2, 8) * 3 % 60
    return {"input_ids": tokens, "labels": tokens}


def train(model: Any, kind: Any = infinity.AdamW) -> list[float]:
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=RATE[kind])
    losses = []
    for _ in range(STEPS):
        loss = model(**batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


ADAPTERS = {
    "lora": lambda: lora(lora_dropout=0.1),
    "a head": lambda: lora(modules_to_save=["lm_head"], bias="lora_only"),
    "dora": lambda: lora(use_dora=True),
    "ia3": lambda: peft.IA3Config(target_modules=TARGETS, feedforward_modules=["up_proj"]),
    "adalora": lambda: peft.AdaLoraConfig(
        target_modules=TARGETS, init_r=4, target_r=2, total_step=10
    ),
}


NAMES = {
    "lora": "LoRA",
    "a head": "LoRA and a head",
    "dora": "DoRA",
    "ia3": "IA3",
    "adalora": "AdaLoRA",
}
"""What `ADAPTERS` are called."""


@pytest.mark.parametrize("init", [True, "gaussian", "olora", "pissa", "a head"])
def test_adapters_that_come_between_init_and_wrap(
    saved: Path, tmp_path: Path, closed: list[nn.Module], init: Any
) -> None:
    """Also those whose first values are made of the base, which they change, or copied from it."""
    adapter = ADAPTERS[init]() if init == "a head" else lora(init_lora_weights=init)
    expected = adapted(saved, adapter).state_dict()
    torch.manual_seed(1)
    with infinity.init():
        model: Any = base(saved)
    model = peft.get_peft_model(model, adapter)
    closed.append(infinity.wrap(model, config(tmp_path)))
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


OF_BASE = {
    "deft": lambda: peft.DeftConfig(target_modules=TARGETS, r=4),
    "delora": lambda: peft.DeloraConfig(target_modules=TARGETS, r=4),
    "dora": ADAPTERS["dora"],
    "hira": lambda: peft.HiraConfig(target_modules=TARGETS, r=4),
    "miss": lambda: peft.MissConfig(target_modules=TARGETS, r=4),
    "pissa": lambda: lora(init_lora_weights="pissa"),
    "psoft": lambda: peft.PsoftConfig(target_modules=TARGETS, r=4),
}
"""Adapters with values, or shapes, that PEFT takes from the base."""


@pytest.mark.parametrize("kind", OF_BASE)
def test_adapters_that_read_the_base_inside_of_init(
    saved: Path, tmp_path: Path, closed: list[nn.Module], kind: str
) -> None:
    if not hasattr(peft, "PsoftConfig"):
        pytest.skip("needs a PEFT with all of them")
    expected = adapted(saved, OF_BASE[kind]()).state_dict()
    with infinity.init():
        model: Any = adapted(saved, OF_BASE[kind]())
    closed.append(infinity.wrap(model, config(tmp_path)))
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=road("PEFT", "a loop", "`python`", OWN, name))
        for kind, name in NAMES.items()
    ],
)
def test_losses_and_adapters_of_plain_pytorch(
    kind: str, saved: Path, tmp_path: Path, closed: list[nn.Module]
) -> None:
    """To the bit, with an optimizer that has one way to round. The base stays in its files."""
    plain = adapted(saved, ADAPTERS[kind]())
    model = managed(saved, ADAPTERS[kind](), tmp_path, closed, algorithm="sgd")
    torch.manual_seed(2)
    expected = train(plain, torch.optim.SGD)
    torch.manual_seed(2)
    assert train(model, infinity.SGD) == expected
    assert infinity.engine(model).report().in_files > 0
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name


def test_adapters_that_come_after_wrap(
    saved: Path, tmp_path: Path, closed: list[nn.Module]
) -> None:
    """The model is wrapped once more, with the bits of adapters that were there before. A frozen
    base stays in its files."""
    expected = train(managed(saved, lora(), tmp_path, closed))
    infinity.engine(closed.pop()).close()
    torch.manual_seed(1)
    with infinity.init():
        inner = base(saved)
    inner.requires_grad_(False)
    inner = infinity.wrap(inner, config(tmp_path))
    whole = infinity.engine(inner).report().in_files
    plain = inner(**batch()).loss.item()
    model = peft.get_peft_model(inner, lora())
    with pytest.raises(infinity.ConfigError, match="once more where parameters came later"):
        infinity.AdamW([p for p in model.parameters() if p.requires_grad])
    closed.append(model)
    assert infinity.wrap(model) is model
    engine = infinity.engine(model)
    assert engine.report().in_files == whole
    assert engine.config == config(tmp_path)
    assert model(**batch()).loss.item() == plain
    assert train(model) == expected


def test_what_was_trained_before_adapters_came_is_kept(
    saved: Path, tmp_path: Path, closed: list[nn.Module]
) -> None:
    """With the low bits of its masters where it is trained on, and rounded as before where not: a
    master between two parameters too."""
    inner = infinity.wrap(base(saved), config(tmp_path, precision="bf16"))
    train(inner)
    embedding = inner.get_input_embeddings().weight
    infinity.set(embedding, "master", torch.full(embedding.shape, 1 + 2**-8))
    values = {name: value.clone() for name, value in inner.state_dict().items()}
    masters = {
        name: infinity.get(p, "master") for name, p in inner.named_parameters() if "norm" in name
    }
    torch.manual_seed(1)
    model = peft.get_peft_model(inner, lora())
    for name, parameter in inner.named_parameters():
        if "norm" in name:
            parameter.requires_grad_(True)
    closed.append(model)
    infinity.wrap(model)
    for name, value in model.state_dict().items():
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        assert "lora" in name or torch.equal(value, values[plain]), name
    for name, parameter in inner.named_parameters():
        if "norm" in name:
            master = infinity.get(parameter, "master")
            assert master is not None and torch.equal(master, masters[name])
    assert all(loss > 0 for loss in train(model))


def test_adapters_are_saved_alone(saved: Path, tmp_path: Path, closed: list[nn.Module]) -> None:
    model = managed(saved, lora(), tmp_path, closed)
    train(model)
    infinity.engine(model).drain()
    before = written_by_the_kernel()
    model.save_pretrained(tmp_path / "adapter")
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    assert written_by_the_kernel() - before < frozen, "nothing of the base"
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert trained < file.stat().st_size < 2 * trained
    again = peft.PeftModel.from_pretrained(base(saved), tmp_path / "adapter")
    torch.testing.assert_close(again(**batch()).loss, model(**batch()).loss)


def test_the_base_alone_and_several_adapters(
    saved: Path, tmp_path: Path, closed: list[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    """An adapter that is not active when the model is wrapped can be trained later."""
    caplog.set_level(logging.ERROR)
    torch.manual_seed(1)
    with infinity.init():
        model: Any = peft.get_peft_model(base(saved), lora())
        model.add_adapter("second", lora())
    closed.append(model)
    model = infinity.wrap(model, config(tmp_path))
    assert not any(p.requires_grad for name, p in model.named_parameters() if "second" in name)
    first = train(model)
    with model.disable_adapter():
        assert model(**batch()).loss.item() == pytest.approx(first[0])
    model.set_adapter("second")
    second = train(model)
    assert second[0] == pytest.approx(first[0]) and second[-1] < second[0]
    model.set_adapter("default")
    assert model(**batch()).loss.item() < first[-1]


def test_checkpointed_activations(saved: Path, tmp_path: Path, closed: list[nn.Module]) -> None:
    expected = train(managed(saved, lora(), tmp_path, closed))
    infinity.engine(closed.pop()).close()
    model = managed(saved, lora(), tmp_path, closed)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    assert train(model) == expected


# Merging


@pytest.mark.parametrize(("kind", "safe"), [("lora", False), ("dora", True), ("ia3", False)])
def test_merging_gives_the_bits_of_plain_peft(
    kind: str, safe: bool, saved: Path, tmp_path: Path, closed: list[nn.Module]
) -> None:
    """Unit by unit: each unit of the base that has adapters is written once. The file keeps its
    bytes, and what is left outlives the model of PEFT."""
    bits = (saved / "model.safetensors").read_bytes()
    plain = adapted(saved, ADAPTERS[kind]())
    model = managed(saved, ADAPTERS[kind](), tmp_path, closed, algorithm="sgd")
    for each, optimizer in ((plain, torch.optim.SGD), (model, infinity.SGD)):
        torch.manual_seed(2)
        train(each, optimizer)
    engine = infinity.engine(model)
    blocks = [
        u for u in engine.units if u.facts.name.endswith("its files)") and "layers" in u.facts.name
    ]
    assert len(blocks) == 3
    engine.drain()
    before = engine.io.counters()["bytes_written"]
    merged = model.merge_and_unload(safe_merge=safe)
    written = engine.io.counters()["bytes_written"] - before
    assert written == sum(block.nbytes for u in blocks for block in u.blocks.values())
    closed.clear()
    del model, engine
    gc.collect()
    expected = plain.merge_and_unload(safe_merge=safe)
    merged.eval(), expected.eval()
    assert torch.equal(merged(**batch()).loss, expected(**batch()).loss)
    for name, value in expected.state_dict().items():
        assert torch.equal(merged.state_dict()[name], value), name
    merged.save_pretrained(tmp_path / "merged")
    infinity.engine(merged).close()
    again = base(tmp_path / "merged")
    assert torch.equal(again(**batch()).loss, expected(**batch()).loss)
    assert (saved / "model.safetensors").read_bytes() == bits


def test_merged_adapters_can_be_taken_out(
    saved: Path, tmp_path: Path, closed: list[nn.Module]
) -> None:
    model = managed(saved, lora(), tmp_path, closed)
    train(model)
    loss = model(**batch()).loss.item()
    model.merge_adapter()
    assert model(**batch()).loss.item() == pytest.approx(loss, rel=1e-5)
    model.unmerge_adapter()
    assert model(**batch()).loss.item() == pytest.approx(loss, rel=1e-5)
    layer: Any = model.base_model.model.model.layers[0].mlp.up_proj
    layer.merge()
    assert layer.merged and model(**batch()).loss.item() == pytest.approx(loss, rel=1e-5)


def test_adapters_keep_their_dtype(saved: Path, tmp_path: Path, closed: list[nn.Module]) -> None:
    """PEFT makes fp32 ones for a base in bf16, which stays in its files."""
    base(saved, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    plain, model = (adapted(tmp_path / "half", lora()) for _ in range(2))
    closed.append(model)
    settings = config(tmp_path, algorithm="sgd")
    infinity.wrap(model, settings, weights=tmp_path / "half")
    dtypes = {name: p.dtype for name, p in plain.named_parameters()}
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
    assert {name: p.dtype for name, p in model.named_parameters()} == dtypes
    assert train(model, infinity.SGD) == train(plain, torch.optim.SGD)
    report = infinity.engine(model).report()
    assert report.in_files >= sum(p.nbytes for p in plain.parameters() if not p.requires_grad)
    assert report.peaks["gpu"] <= report.budgets["gpu"]
    assert report.peaks["cpu"] <= report.budgets["cpu"]


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "embed_tokens"]])
def test_merging_brings_tied_embeddings_only_where_they_have_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: list[str]
) -> None:
    """PEFT compares the addresses of the embeddings in the end, which are one parameter."""
    import transformers

    def build() -> Any:
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
        config = transformers.LlamaConfig(
            vocab_size=1024, num_attention_heads=2, tie_word_embeddings=True, **sizes
        )
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        options = {"target_modules": targets, "init_lora_weights": False}
        return peft.get_peft_model(model, peft.LoraConfig(r=2, **options))

    plain = build().merge_and_unload()
    budgets = {"gpu_memory": 1 << 22, "cpu_memory": 1 << 22}
    model = infinity.wrap(build(), config_of(nvme=[tmp_path], poison=True, **budgets))
    brought: list[nn.Parameter] = []

    def gathered(parameters: list[nn.Parameter], write: bool) -> Any:
        brought.extend(parameters)
        return infinity.gathered(parameters, write=write)

    monkeypatch.setattr(merging, "gathered", gathered)
    embedding = model.get_input_embeddings().weight
    with infinity.engine(model):
        merged = model.merge_and_unload()
        found = any(each is embedding for each in brought)
        assert found is ("embed_tokens" in targets) and brought
        assert merged.config.tie_word_embeddings == plain.config.tie_word_embeddings
        for name, value in plain.state_dict().items():
            assert torch.equal(merged.state_dict()[name], value), name


@pytest.mark.parametrize("tokens", [[5, 6, -1], {"embed_tokens": [5, 6], "lm_head": [7]}])
@pytest.mark.parametrize("from_files", [True, False])
def test_new_tokens_inside_of_init(
    saved: Path, tmp_path: Path, closed: list[nn.Module], tokens: Any, from_files: bool
) -> None:
    """Their rows are those of the embedding."""
    import transformers

    def build() -> Any:
        torch.manual_seed(0)
        automatic = transformers.AutoModelForCausalLM
        base = automatic.from_pretrained(saved) if from_files else FAMILIES["llama"].build()
        torch.manual_seed(1)
        return peft.get_peft_model(base, lora(trainable_token_indices=tokens))

    plain = build()
    with infinity.init():
        model = build()
    closed.append(infinity.wrap(model, config(tmp_path)))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one + 0, other)
