"""A checkpoint becomes files that transformers and PEFT load, with the bits of the engine's own
weights, one piece at a time; and `inspect` says what it holds."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import infinity
from infinity.checkpoint import contents, export, manifest, pieces
from infinity.checkpoint.contents import Contents
from infinity.cli.main import app
from support.causal import causal
from support.configs import config_of

pytestmark = pytest.mark.usefixtures("one_thread")

DATA, MANIFEST = "__0_0.distcp", "infinity.json"
SHAPE = {
    "vocab_size": 320,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
}
PLACE: dict[str, Any] = {"gpu_memory": "16MiB", "cpu_memory": "32MiB", "optimizer": "cpu"}


class Run(NamedTuple):
    """A checkpoint of a run, and the weights that its engine had."""

    checkpoint: Path
    weights: dict[str, torch.Tensor]
    description: Path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A tiny Llama with one frozen parameter after one step, saved in many pieces."""
    from transformers import LlamaConfig, LlamaForCausalLM

    where = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, dtype="bfloat16")).to(torch.bfloat16)
    model.model.layers[0].input_layernorm.weight.requires_grad_(False)
    wrapped: Any = infinity.wrap(
        model,
        config_of(nvme=[where], **PLACE, precision="bf16"),
    )
    engine = infinity.engine(wrapped)
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    optimizer = infinity.AdamW(trained, lr=1e-2)
    ids = torch.arange(32)[None]
    wrapped(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE", 100)
        engine.save_checkpoint(where / "step-7", optimizer, {"seed": 1, "scheduler": {}})
    engine.save_checkpoint(where / "trained", optimizer, {}, trainable_only=True)
    weights = {name: tensor.clone() for name, tensor in engine.weights()}
    config = where / "description"
    model.config.save_pretrained(config)
    (config / "tokenizer.json").write_text("{}")
    engine.close()
    yield Run(where / "step-7", weights, config)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def done(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refusal(*arguments: object) -> str:
    result = run(*arguments)
    assert (result.exit_code, result.exception.__class__) == (1, SystemExit), result.output
    (line,) = result.stderr.splitlines()
    return str(line).removeprefix("infinity: ")


def places(directory: Path) -> list[manifest.ItemPlace]:
    return list(manifest.decode((directory / MANIFEST).read_bytes()).places.values())


def flip(path: Path, item: manifest.ItemPlace) -> None:
    data = bytearray(path.read_bytes())
    data[item.offset + item.length // 2] ^= 4
    path.write_bytes(data)


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        value.dtype == expected[name].dtype and torch.equal(value, expected[name])
        for name, value in found.items()
    )


def test_transformers_loads_an_export_with_the_bits_of_the_engine(
    saved: Run, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    found = done("export", saved.checkpoint, out, "--model", saved.description)
    assert found["files"] == ["config.json", "model.safetensors", "tokenizer.json"]
    assert equal(load_file(out / "model.safetensors"), saved.weights)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.bfloat16
    names = dict(loaded.named_parameters())
    assert all(torch.equal(names[name], value) for name, value in saved.weights.items())
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "no draft is left"


def test_the_masters_are_exported_in_fp32_and_in_shards(saved: Run, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    shutil.copytree(saved.checkpoint, tmp_path / "step-7")
    shutil.copy(saved.description / "config.json", tmp_path)
    out = tmp_path / "out"
    # The directory of a run stands for its last checkpoint.
    done("export", tmp_path, out, "--dtype", "fp32", "--shard-size", "8KiB")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    loaded = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    source = Contents(saved.checkpoint)
    for weight in source.weights():
        values = torch.cat([each.values for each in source.read(weight)]).view(weight.shape)
        assert loaded[weight.name].dtype == torch.float32
        assert torch.equal(loaded[weight.name], values.float())
    assert not torch.equal(loaded["model.norm.weight"], loaded["model.norm.weight"].bfloat16())


def test_one_piece_is_in_memory_at_a_time(
    saved: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[Any] = []
    counts = []
    read = contents.CheckpointReader.read

    def counted(self: Any, index: Any) -> Any:
        assert not [each for each in alive if each() is not None], "an earlier piece is kept"
        found = read(self, index)
        if isinstance(found, torch.Tensor):
            alive.append(weakref.ref(found))
            counts.append(found.numel())
        return found

    source = Contents(saved.checkpoint)
    monkeypatch.setattr(contents.CheckpointReader, "read", counted)
    export.export(source, tmp_path / "out", export.everything(source))
    assert max(counts) <= 100
    assert sum(counts) == sum(value.numel() for value in saved.weights.values())


def test_trainable_only_leaves_frozen_parameters_out(saved: Run, tmp_path: Path) -> None:
    done("export", saved.checkpoint, tmp_path / "out", "--trainable-only", "--dtype", "bf16")
    frozen = "model.layers.0.input_layernorm.weight"
    expected = {name: value for name, value in saved.weights.items() if name != frozen}
    assert equal(load_file(tmp_path / "out/model.safetensors"), expected)
    # A checkpoint of these alone says so.
    small = saved.checkpoint.with_name("trained")
    assert done("inspect", small)["left_out"] == 1
    assert refusal("export", small, tmp_path / "small").endswith(
        " was saved without its 1 frozen parameters, so it is no whole model; give "
        "--trainable-only or --adapters-only"
    )
    done("export", small, tmp_path / "small", "--trainable-only", "--dtype", "bf16")
    assert equal(load_file(tmp_path / "small/model.safetensors"), expected)


def test_adapters_get_the_names_of_peft() -> None:
    base = "base_model.model.model.layers.0.q_proj"
    names = {
        f"{base}.lora_A.default.weight": f"{base}.lora_A.weight",
        f"{base}.lora_embedding_A.default": f"{base}.lora_embedding_A",
        "base_model.model.score.modules_to_save.default.weight": "base_model.model.score.weight",
        f"{base}.base_layer.weight": None,
    }
    assert {name: export.adapter_name(name, "default") for name in names} == names


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_peft_loads_the_adapters_of_an_export(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    def base() -> Any:
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**SHAPE | {"tie_word_embeddings": False}))

    lora = peft.LoraConfig(target_modules=["q_proj"], r=2, modules_to_save=["lm_head"])
    model = peft.get_peft_model(base(), lora)
    model.peft_config["default"].save_pretrained(tmp_path)
    wrapped: Any = infinity.wrap(model, config_of(nvme=[tmp_path], **PLACE, precision="fp32"))
    optimizer = infinity.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-2)
    with infinity.engine(wrapped) as engine:
        ids = torch.arange(32)[None]
        wrapped(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        engine.save_checkpoint(tmp_path / "step", optimizer, {})
        expected = wrapped.eval()(input_ids=ids).logits.detach().clone()
    found = done("export", tmp_path / "step", tmp_path / "out", "--adapters-only")
    assert found["files"] == ["adapter_config.json", "adapter_model.safetensors"]
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(loaded.eval()(input_ids=ids).logits, expected)


def test_an_export_replaces_nothing_unless_it_may(saved: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert (
        refusal("export", saved.checkpoint, tmp_path / "no" / "out")
        == f"{tmp_path}/no/out cannot be made: {tmp_path}/no does not exist"
    )
    done("export", saved.checkpoint, out)
    before = (out / "model.safetensors").read_bytes()
    (out / "old").touch()
    assert (
        refusal("export", saved.checkpoint, out)
        == f"{out} is not empty; choose another name, or give --overwrite"
    )
    damaged = tmp_path / "damaged"
    shutil.copytree(saved.checkpoint, damaged)
    (item, *_) = [item for item in places(damaged) if item.sizes == (16,)]
    flip(damaged / DATA, item)
    assert "is damaged in model." in refusal("export", damaged, out, "--overwrite")
    assert (out / "model.safetensors").read_bytes() == before, "it was touched by a failed export"
    done("export", saved.checkpoint, out, "--overwrite")
    assert not (out / "old").exists()
    (out / "mine").mkdir()
    assert "has directories in it" in refusal("export", saved.checkpoint, out, "--overwrite")
    assert "holds the checkpoint itself" in refusal("export", damaged, tmp_path, "--overwrite")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "out"]


def test_adapters_need_a_configuration_of_peft(saved: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert refusal("export", saved.checkpoint, out, "--adapters-only").startswith(
        "there is no adapter_config.json in "
    )
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "has no adapter 'default'" in refusal(
        "export", saved.checkpoint, out, "--adapters-only", "--model", tmp_path
    )
    assert not out.exists()


# Inspect


def test_inspect_says_what_a_checkpoint_holds(saved: Run) -> None:
    found = done("inspect", saved.checkpoint, "--tensors", "--verify")
    count = sum(value.numel() for value in saved.weights.values())
    assert (found["version"], found["step"], found["ranks"]) == (3, 1, 1)
    assert found["model"]["elements"] == count
    assert found["model"]["dtypes"] == {"float32": len(saved.weights) - 1, "bfloat16": 1}
    assert found["states"]["exp_avg"]["bytes"] == 4 * (count - 16)
    assert found["optimizers"] == [
        {"states": "exp_avg, exp_avg_sq", "groups": 1, "parameters": len(saved.weights) - 1}
    ]
    assert found["extra"] == {"0": ["seed", "scheduler"]}
    assert {each["name"] for each in found["tensors"]} == set(saved.weights)
    assert found["verified"]["damaged"] == []
    assert found["bytes"] == (saved.checkpoint / DATA).stat().st_size
    shown = run("inspect", saved.checkpoint).stdout
    assert "exp_avg_sq" in shown
    assert "seed, scheduler" in shown


def test_verify_finds_every_damaged_item(saved: Run, tmp_path: Path) -> None:
    shutil.copytree(saved.checkpoint, tmp_path / "copy")
    path = tmp_path / "copy" / DATA
    items = [item for item in places(tmp_path / "copy") if item.sizes is not None]
    for item in (items[3], items[-1]):
        flip(path, item)
    assert run("inspect", tmp_path / "copy").exit_code == 0, "without --verify nothing is read"
    result = run("inspect", tmp_path / "copy", "--verify")
    assert result.exit_code == 1
    total = len(places(tmp_path / "copy"))
    assert f"2 of {total} items: {path} is damaged in " in result.stderr


def planted(directory: Path, name: str) -> str:
    """Make a copy of a checkpoint hostile; gives what is to be said of it."""
    data, index = directory / DATA, directory / MANIFEST
    if name == "truncated":
        data.write_bytes(data.read_bytes()[:-1])
        return f"{data} is cut off"
    if name == "mixed":
        content = bytearray(data.read_bytes())
        at = content.index(b"save ") + 5
        content[at : at + 4] = b"0123"
        data.write_bytes(content)
        return f"{data} is damaged at its start, or belongs to another save"
    if name == "link":
        data.rename(directory / "elsewhere")
        data.symlink_to("elsewhere")
        return f"{data} is a link, which no save makes"
    if name == "huge index":
        with index.open("r+b") as file:
            file.truncate(8 << 30)
        return f"{index} is damaged: it has more than 64 MiB"
    frame = json.loads(index.read_text())
    item = next(i for i in frame["content"]["items"] if i["key"].startswith("model."))
    item["length"] = 64 << 30
    frame["content"]["files"][DATA] = item["offset"] + (64 << 30)
    with data.open("r+b") as file:
        file.truncate(item["offset"] + (64 << 30))
    text = json.dumps(frame["content"], separators=(",", ":")).encode()
    digest = manifest.hashlib.sha256(text).hexdigest()
    index.write_bytes(b'{"content":%b,"sha256":"%b"}\n' % (text, digest.encode()))
    return f"{data} is damaged in {item['key']}: it has {64 << 30} bytes, and at most "


@pytest.mark.parametrize("name", ["truncated", "mixed", "link", "huge index", "huge item"])
def test_a_hostile_checkpoint_is_one_sentence(
    name: str, saved: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents.CheckpointReader, "most_index_bytes", 64 << 20)
    where = tmp_path / "copy"
    shutil.copytree(saved.checkpoint, where)
    said = planted(where, name)
    assert said in run("inspect", where, "--verify").stderr
    assert said in refusal("export", where, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_links_beside_the_weights_are_not_followed(saved: Run, tmp_path: Path) -> None:
    where = tmp_path / "copy"
    shutil.copytree(saved.checkpoint, where)
    (where / "config.json").symlink_to(saved.description / "config.json")
    assert f"{where}/config.json is a link" in refusal("export", where, tmp_path / "out")


def test_the_directory_of_a_run_stands_for_one_checkpoint(saved: Run, tmp_path: Path) -> None:
    """The one that `latest` names, as DeepSpeed's runs have it, else the one of the last step."""
    for name in ("step-9", "step-10", "tag"):
        (tmp_path / name).symlink_to(saved.checkpoint)
    (tmp_path / "step-11").mkdir()
    assert contents.latest(tmp_path) == tmp_path / "step-10"
    (tmp_path / "latest").write_text("tag\n")
    assert contents.latest(tmp_path) == tmp_path / "tag"
    (tmp_path / "latest").write_text("../elsewhere")
    assert contents.latest(tmp_path) == tmp_path / "step-10"


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    for command in (["inspect", tmp_path], ["export", tmp_path, tmp_path / "out"]):
        assert "is no checkpoint, or not a whole one" in refusal(*command)
    assert "there is no such directory" in refusal("inspect", tmp_path / "gone")


@pytest.mark.parametrize("name", ["output", "checkpoint-3"])
def test_a_model_needs_no_export(tmp_path: Path, name: str) -> None:
    """It is an output of `infinity finetune`, or a checkpoint of a Trainer without its states."""
    from transformers import AutoModelForCausalLM

    model = tmp_path / name
    causal().save_pretrained(model)
    said = refusal("export", model, tmp_path / "out")
    start = f"{model} is a whole model already, so there is nothing to export: "
    assert said == f"{start}AutoModelForCausalLM.from_pretrained({str(model)!r}) loads it"
    assert AutoModelForCausalLM.from_pretrained(str(model))
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_need_no_export(tmp_path: Path) -> None:
    """The call in the sentence merges them."""
    peft: Any = pytest.importorskip("peft")
    causal().save_pretrained(tmp_path / "base")
    base = type(causal()).from_pretrained(tmp_path / "base")
    adapters = tmp_path / "adapters"
    lora = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(base, lora).save_pretrained(adapters)
    for more in ((), ("--adapters-only",)):
        said = refusal("export", adapters, tmp_path / "out", *more)
        assert said.startswith(f"{adapters} has adapters for PEFT already, so there is nothing to ")
        call = said.partition(", and ")[2].removesuffix(" merges them into their model")
        assert call.endswith(".merge_and_unload()")
        assert eval(call, {"AutoPeftModelForCausalLM": peft.AutoPeftModelForCausalLM})
