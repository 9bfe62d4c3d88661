"""`wrap(weights=...)` takes tensors from wherever they are, under the names that transformers and
PEFT know, and says what does not fit."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import infinity
from infinity.weights.tensors import open_files
from support.allocations import peak
from support.models import FAMILIES


def plain_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def stored() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return plain_model().state_dict()


def wrapped_values(model: nn.Module, tmp_path: Path, **options: Any) -> dict[str, torch.Tensor]:
    """The state dict of `model`, wrapped."""
    (tmp_path / "nvme").mkdir(exist_ok=True)
    config = infinity.Config(nvme=[tmp_path / "nvme"], gpu_memory="8MiB", cpu_memory="16MiB")
    with infinity.engine(infinity.wrap(model, config, **options)) as engine:
        return engine.state_dict()


def same(values: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(values[name], value) for name, value in expected.items())


# Places


def _index(path: Path, name: str, save: Callable[[dict[str, torch.Tensor], Path], object]) -> Path:
    """Two files and an index."""
    state = stored()
    first = {key: value for key, value in state.items() if key.startswith("0.")}
    parts = {"a": first, "b": {key: state[key] for key in state if key not in first}}
    for part, tensors in parts.items():
        save(tensors, path / f"{part}{Path(name).suffix}")
    names = {key: f"{part}{Path(name).suffix}" for part in parts for key in parts[part]}
    (path / f"{name}.index.json").write_text(json.dumps({"weight_map": names}))
    return path / f"{name}.index.json"


def _saved(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


def _file(path: Path) -> Path:
    save_file(stored(), path)
    return path


PLACES: dict[str, Callable[[Path], Any]] = {
    "file": lambda path: _file(path / "any.safetensors"),
    "string": lambda path: str(_file(path / "any.safetensors")),
    "folder": lambda path: _file(path / "model.safetensors").parent,
    "folder of one other file": lambda path: _file(path / "other.safetensors").parent,
    "index": lambda path: _index(path, "model.safetensors", save_file),
    "folder with an index": lambda path: _index(path, "model.safetensors", save_file).parent,
    "torch.save": lambda path: _saved(path / "any.pt", stored()),
    "Lightning": lambda path: _saved(path / "a.ckpt", {"epoch": 1, "state_dict": stored()}),
    "folder of torch.save": lambda path: _saved(path / "pytorch_model.bin", stored()).parent,
    "folder with an index of torch.save": lambda path: (
        _index(path, "pytorch_model.bin", torch.save).parent
    ),
    "state dict": lambda path: stored(),
}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("how", ["init", "meta", "real"])
def test_places(where: str, how: str, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    source = PLACES[where](tmp_path / "saved")
    if how == "init":
        with infinity.init(exact=False):
            model = plain_model()
    elif how == "meta":
        with torch.device("meta"):
            model = plain_model()
    else:
        model = plain_model()
    assert same(wrapped_values(model, tmp_path, weights=source), stored())


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub with one model, someone/tiny."""
    folder = tmp_path / "hub" / "models--someone--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0123abc")
    (folder / "snapshots" / "0123abc").mkdir(parents=True)
    save_file(stored(), folder / "snapshots" / "0123abc" / "model.safetensors")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_model_in_the_cache_of_the_hub(hub: Path, tmp_path: Path) -> None:
    values = wrapped_values(plain_model(), tmp_path, weights="someone/tiny")
    assert same(values, stored())


def test_a_model_that_is_not_in_the_cache_of_the_hub(hub: Path, tmp_path: Path) -> None:
    text = (
        "someone/large is neither a path nor a model in the cache of the hub; if it is the id of a "
        "model there, download it first: hf download someone/large"
    )
    with pytest.raises(infinity.ConfigError, match=f"^{re.escape(text)}$"):
        wrapped_values(plain_model(), tmp_path, weights="someone/large")


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "code": (
        lambda path: _saved(path / "a.pt", {"a": Path("/")}),
        r"a\.pt cannot be mapped as a file of torch\.save with tensors alone: ",
    ),
    "no file of torch.save": (
        lambda path: (path / "a.bin").write_bytes(b"x" * 99) and path / "a.bin",
        r"a\.bin cannot be mapped as a file of torch\.save with tensors alone: ",
    ),
    "one tensor": (
        lambda path: _saved(path / "a.pt", torch.zeros(3)),
        r"a\.pt is not a state dict: it holds a Tensor$",
    ),
    "numbers": (
        lambda path: {"0.weight": 3},
        r"^the mapping given as weights is not a state dict: '0\.weight' is a int, and tensors by ",
    ),
    "a number": (lambda path: 3, r"^weights is a int; give a file, a directory, the id of a model"),
    "nothing": (lambda path: path, r" holds neither model\.safetensors nor model\.safetensors\."),
    "several files": (
        lambda path: _file(path / "a.safetensors") and _file(path / "b.safetensors").parent,
        r"has 2 safetensors files \(a\.safetensors, b\.safetensors\) and no model\.safetensors\.",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_places_that_cannot_be(what: str, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    make, text = WRONG[what]
    source = make(tmp_path / "saved")
    with pytest.raises(infinity.ConfigError, match=text):
        wrapped_values(plain_model(), tmp_path, weights=source)


# Names and layouts of transformers


@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_of_the_hub(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    built: Any = FAMILIES[family].build()
    built.save_pretrained(tmp_path / "saved", max_shard_size="50KB")
    with infinity.init(exact=False):
        model = type(built)(built.config)
    caplog.set_level(logging.INFO, "infinity")
    values = wrapped_values(model, tmp_path, weights=tmp_path / "saved")
    assert same(values, built.state_dict())
    assert "has no tensor for" not in caplog.text
    assert "does not use" not in caplog.text
    if family == "mixtral":
        assert (
            "26 tensors have another name in the model, as "
            "model.layers.0.block_sparse_moe.experts.0.w1.weight, which is (a part of) "
            "model.layers.0.mlp.experts.gate_up_proj"
        ) in caplog.text


def test_a_head_that_the_files_lack(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It keeps the values of its constructor, as `from_pretrained` leaves it; the head that the
    files have is not used."""
    built: Any = FAMILIES["llama"].build()
    built.config.tie_word_embeddings = False
    built.lm_head.weight = nn.Parameter(torch.randn(64, 32))
    built.save_pretrained(tmp_path / "saved")
    torch.manual_seed(3)
    plain = AutoModelForSequenceClassification.from_config(built.config)
    torch.manual_seed(3)
    with infinity.init():
        model = AutoModelForSequenceClassification.from_config(built.config)
    values = wrapped_values(model, tmp_path, weights=tmp_path / "saved")
    assert torch.equal(values["score.weight"], plain.score.weight)
    assert same(values, built.model.state_dict(prefix="model."))
    assert (
        f"{tmp_path / 'saved'} has no tensor for 1 of the model's parameters, which keep the "
        "values that their constructors gave them: score.weight"
    ) in caplog.text
    assert "1 tensors that the model does not use: lm_head.weight" in caplog.text


def test_a_base_model_fills_a_model_with_a_head_and_the_other_way(tmp_path: Path) -> None:
    built: Any = FAMILIES["gpt2"].build()
    built.save_pretrained(tmp_path / "whole")
    built.transformer.save_pretrained(tmp_path / "base")
    with infinity.init(exact=False):
        whole = AutoModelForCausalLM.from_config(built.config)
        base = type(built.transformer)(built.config)
    values = wrapped_values(whole, tmp_path, weights=tmp_path / "base")
    assert same(values, built.state_dict())
    values = wrapped_values(base, tmp_path, weights=tmp_path / "whole")
    assert same(values, built.transformer.state_dict())


def test_a_part_of_a_model(tmp_path: Path) -> None:
    """A model of transformers inside of another one takes files under the names of either."""

    class Tagger(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.encoder = AutoModelForCausalLM.from_config(config)
            self.tags = nn.Linear(32, 5)

    built: Any = FAMILIES["mixtral"].build()
    built.save_pretrained(tmp_path / "saved")
    for state in (load_file(tmp_path / "saved" / "model.safetensors"), None):
        with infinity.init():
            model = Tagger(built.config)
        whole = {f"encoder.{name}": value for name, value in built.state_dict().items()}
        values = wrapped_values(model, tmp_path, weights=whole if state is None else state)
        assert same(values, whole)


# Names of PEFT


class _Adapted(nn.Module):
    """A linear layer as LoRA makes it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(32, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 32, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)


class _Copied(nn.Module):
    """A head of which PEFT trains a copy."""

    def __init__(self, layer: nn.Module, copy: nn.Module) -> None:
        super().__init__()
        self.original_module = layer
        self.modules_to_save = nn.ModuleDict({"default": copy})


class _Tuner(nn.Module):
    prefix = "lora_"

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        for layer in model.model.layers:
            layer.self_attn.q_proj = _Adapted(layer.self_attn.q_proj)
        model.lm_head = _Copied(model.lm_head, nn.Linear(32, 64, bias=False))


class _Peft(nn.Module):
    """The tree of modules and the names of a `PeftModel`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model = _Tuner(model)


def test_names_of_peft(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    built: Any = FAMILIES["mixtral"].build()
    built.save_pretrained(tmp_path / "saved")
    torch.manual_seed(3)
    plain = _Peft(AutoModelForCausalLM.from_config(built.config)).state_dict()
    torch.manual_seed(3)
    with infinity.init():
        model = _Peft(AutoModelForCausalLM.from_config(built.config))
    values = wrapped_values(model, tmp_path, weights=tmp_path / "saved")
    inside = "base_model.model."
    for name, value in built.state_dict().items():
        name = name.replace("q_proj.", "q_proj.base_layer.")
        if name == "lm_head.weight":
            for copy in ("original_module", "modules_to_save.default"):
                assert torch.equal(values[f"{inside}lm_head.{copy}.weight"], value)
        else:
            assert torch.equal(values[inside + name], value), name
    adapters = {name: value for name, value in plain.items() if "lora_" in name}
    assert len(adapters) == 4
    assert same(values, adapters)
    assert "has no tensor for" not in caplog.text


def test_a_state_dict_of_peft_with_all_its_names(tmp_path: Path) -> None:
    built: Any = FAMILIES["llama"].build()
    built.config.tie_word_embeddings = False
    state = _Peft(AutoModelForCausalLM.from_config(built.config)).state_dict()
    with infinity.init():
        model = _Peft(AutoModelForCausalLM.from_config(built.config))
    values = wrapped_values(model, tmp_path, weights=state)
    assert same(values, state)


# What does not fit


def test_a_plain_model_keeps_what_the_files_lack(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {name: value for name, value in stored().items() if not name.startswith("2.")}
    state["other"] = torch.zeros(2)
    model = plain_model()
    before = {name: value.clone() for name, value in model[2].state_dict(prefix="2.").items()}
    values = wrapped_values(model, tmp_path, weights=state)
    assert same(values, before)
    assert same(values, {name: value for name, value in state.items() if name != "other"})
    assert (
        "the state dict has no tensor for 2 of the model's parameters, which keep the values that "
        "their constructors gave them: 2.weight, 2.bias"
    ) in caplog.text
    assert "the state dict has 1 tensors that the model does not use: other" in caplog.text


def test_a_model_without_values_is_refused_where_the_files_lack_them(tmp_path: Path) -> None:
    state = {name: value for name, value in stored().items() if name != "2.bias"}
    with torch.device("meta"):
        model = plain_model()
    with pytest.raises(infinity.ConfigError, match=r"^2\.bias is on the meta device and has no"):
        wrapped_values(model, tmp_path, weights=state)
    with torch.device("meta"):
        model = plain_model()
    state = {name: value for name, value in stored().items() if "running" not in name}
    with pytest.raises(
        infinity.ConfigError, match=r"^the buffer 1\.running_mean is on the meta device and has no"
    ):
        wrapped_values(model, tmp_path, weights=state)


def test_every_shape_that_differs_is_named(tmp_path: Path) -> None:
    state = stored() | {"0.weight": torch.zeros(5, 6), "2.bias": torch.zeros(4)}
    with pytest.raises(
        infinity.ConfigError,
        match=r"^0\.weight in the state dict has shape \(5, 6\), the model needs \(6, 6\); "
        r"2\.bias in the state dict has shape \(4,\), the model needs \(3,\)$",
    ):
        wrapped_values(plain_model(), tmp_path, weights=state)


def test_a_layout_that_cannot_be_converted_is_named(tmp_path: Path) -> None:
    built: Any = FAMILIES["mixtral"].build()
    built.save_pretrained(tmp_path / "saved")
    state = load_file(tmp_path / "saved" / "model.safetensors")
    del state["model.layers.0.block_sparse_moe.experts.1.w1.weight"]
    text = (
        "model.layers.0.block_sparse_moe.experts.0.w1.weight in the state dict cannot be converted "
        "to model.layers.0.mlp.experts.gate_up_proj as transformers does: "
    )
    with pytest.raises(infinity.ConfigError, match=f"^{re.escape(text)}"):
        wrapped_values(AutoModelForCausalLM.from_config(built.config), tmp_path, weights=state)


# Memory


def _private_writable() -> int:
    """Bytes that RLIMIT_DATA counts."""
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in status if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024


def test_shards_that_are_open_are_no_private_memory(tmp_path: Path) -> None:
    """So a model loads whose shards are larger than RLIMIT_DATA."""
    value = torch.arange(4 << 20, dtype=torch.float32)
    shards = [tmp_path / f"{number}.safetensors" for number in range(4)]
    for number, shard in enumerate(shards):
        save_file({f"weight {number}": value + number}, shard)
    before = _private_writable()
    tensors = open_files(shards)
    for number in range(len(shards)):
        read = tensors.read(f"weight {number}")
        assert read[-1] == value[-1] + number
    assert _private_writable() - before < value.nbytes // 2, "64 MiB are mapped"


def test_a_tensor_at_an_odd_offset_is_read(tmp_path: Path) -> None:
    state = {"a": torch.tensor([1], dtype=torch.uint8), "b": torch.arange(5.0), "c": torch.empty(0)}
    rest = b"\x01" + state["b"].numpy().tobytes()
    header = json.dumps(
        {
            "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "b": {"dtype": "F32", "shape": [5], "data_offsets": [1, 21]},
            "c": {"dtype": "F32", "shape": [0], "data_offsets": [21, 21]},
        }
    ).encode()
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + rest)
    tensors = open_files([path])
    assert all(torch.equal(tensors.read(name), value) for name, value in state.items())
    assert torch.equal(tensors.read("b", (slice(1, 3),)), state["b"][1:3])


def test_one_unit_at_a_time_is_put_together(tmp_path: Path) -> None:
    width = 512
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with infinity.init():
        empty = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    config = infinity.Config(nvme=[tmp_path], gpu_memory="8MiB", cpu_memory="16MiB")
    unit = 4 * width * (width + 1)
    with ExitStack() as stack:

        def load() -> None:
            wrapped = infinity.wrap(empty, config, weights=tmp_path / "model.safetensors")
            stack.enter_context(infinity.engine(wrapped))

        most = peak(load, lambda nbytes: unit <= nbytes < 2 * unit)
        assert same(empty.state_dict(), model.state_dict())
    assert unit <= most < 2 * unit
