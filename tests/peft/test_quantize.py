"""`infinity.quantize` writes the tensors that transformers and bitsandbytes write."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import infinity
from infinity.errors import ConfigError, WeightsError
from infinity.models import quantization, shards

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes"),
]
SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
KEPT = {"num_key_value_heads": 2, "intermediate_size": 96}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 32, "head_dim": 16}
MODELS: dict[str, Any] = {
    "llama": ("Llama", SIZES | KEPT),
    "tied": ("Llama", SIZES | KEPT | {"tie_word_embeddings": True}),
    "biased": ("Qwen2", SIZES | KEPT),
    "convolutions": ("GPT2", {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4}),
    "experts": ("Qwen3Moe", SIZES | KEPT | EXPERTS),
    "experts of files": ("Mixtral", SIZES | KEPT | EXPERTS),
}


def saved(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The directory of a small model."""
    name, values = MODELS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**values)
    model = getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM"))
    model(config).to(dtype).save_pretrained(folder)
    return folder


def of_transformers(source: Path, target: Path, dtype: torch.dtype | None = None) -> Path:
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype or torch.float32,
    )
    options = {} if dtype is None else {"dtype": dtype}
    load = transformers.AutoModelForCausalLM.from_pretrained
    load(source, quantization_config=settings, **options).save_pretrained(target)
    return target


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in folder.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["own", "bf16"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_tensors_and_the_config_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype | None
) -> None:
    source = saved(kind, tmp_path / "model")
    monkeypatch.setattr(quantization, "_PART", 640)
    made = infinity.quantize(source, tmp_path / "made", dtype=dtype)
    theirs = of_transformers(source, tmp_path / "theirs", dtype)
    found, expected = tensors(made), tensors(theirs)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    configs = [json.loads((each / "config.json").read_text()) for each in (made, theirs)]
    assert configs[0] == configs[1]
    transformers.AutoModelForCausalLM.from_pretrained(made)


def test_shards_and_the_files_of_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved("llama", tmp_path / "model")
    (source / "tokenizer.json").write_text("{}")
    (source / "infinity-run.json").write_text("{}")
    whole = infinity.quantize(source, tmp_path / "whole")
    limited = shards.draft_weights
    monkeypatch.setattr(
        quantization, "draft_weights", lambda drafts, each, _: limited(drafts, each, 20_000)
    )
    parts = infinity.quantize(source, tmp_path / "parts")
    files = {"config.json", "generation_config.json", "tokenizer.json", "infinity-4bit.json"}
    assert names(whole) == {*files, "model.safetensors"}
    assert len(names(parts)) > 4 and "model.safetensors.index.json" in names(parts)
    one, other = tensors(whole), tensors(parts)
    assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_a_whole_directory_is_used_again_and_an_old_one_replaced(tmp_path: Path) -> None:
    source, target = saved("llama", tmp_path / "model"), tmp_path / "made"

    def made(**options: Any) -> int:
        infinity.quantize(source, target, **options)
        return target.stat().st_ino

    first = made()
    assert made() == first
    changed = transformers.AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        changed.model.layers[0].self_attn.q_proj.weight.mul_(2)
    changed.save_pretrained(source)
    second = made()
    assert second != first
    expected = tensors(of_transformers(source, tmp_path / "theirs"))
    found = tensors(target)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    third = made(dtype=torch.bfloat16)
    assert third != second
    (target / "model.safetensors").unlink()
    assert made(dtype=torch.bfloat16) != third and (target / "model.safetensors").exists()
    assert names(tmp_path) == {"model", "made", "theirs"}


def test_a_kill_leaves_no_directory_and_the_next_call_makes_it(tmp_path: Path) -> None:
    source, target = saved("llama", tmp_path / "model"), tmp_path / "made"
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            copy = quantization.copy_others

            def stopped(*given: Any) -> None:
                copy(*given)
                os.write(theirs, b".")
                signal.pause()

            quantization.copy_others = stopped
            infinity.quantize(source, target)
        finally:
            os._exit(1)
    os.read(ours, 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not target.exists() and len(names(tmp_path)) == 2
    infinity.quantize(source, target)
    assert names(tmp_path) == {"model", "made"}


def test_a_source_is_told_from_another_one_of_its_shape_and_time(tmp_path: Path) -> None:
    source, target = saved("llama", tmp_path / "model"), tmp_path / "made"
    weights = source / "model.safetensors"
    os.utime(weights, (1, 1))
    before = digests(infinity.quantize(source, target))
    halves = {name: value / 2 for name, value in load_file(weights).items()}
    save_file(halves, weights, {"format": "pt"})
    os.utime(weights, (1, 1))
    assert digests(infinity.quantize(source, target)) != before


def digests(directory: Path) -> list[str]:
    return [sha256(path.read_bytes()).hexdigest() for path in directory.glob("*.safetensors")]


def test_a_source_that_changes_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved("llama", tmp_path / "model")
    copy = quantization.copy_others

    def changing(*given: Any) -> None:
        copy(*given)
        os.utime(source / "model.safetensors")

    monkeypatch.setattr(quantization, "copy_others", changing)
    with pytest.raises(WeightsError, match="has changed while it was read; quantize it again"):
        infinity.quantize(source, tmp_path / "made")
    assert names(tmp_path) == {"model"}


@pytest.fixture
def refusals(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert names(tmp_path) <= {"model", "made", "full"}


def test_refusals(refusals: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, full = saved("llama", refusals / "model"), refusals / "full"
    full.mkdir()
    (full / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"is not empty, and it is no base in 4 bits"):
        infinity.quantize(source, full)
    assert names(full) == {"mine.txt"}
    made = infinity.quantize(source, refusals / "made")
    with pytest.raises(ConfigError, match=r"is quantized already \(bitsandbytes\)"):
        infinity.quantize(made, refusals / "again")
    with pytest.raises(ConfigError, match="llama-tiny is a preset, which has no weights"):
        infinity.quantize("llama-tiny", refusals / "again")
    monkeypatch.setattr("infinity.models.source.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"infinity\.quantize needs bitsandbytes; install it"):
        infinity.quantize(source, refusals / "again")


PEAK = """
import sys
import torch, transformers, infinity
from infinity.models import quantization

def anonymous():
    with open("/proc/self/status") as lines:
        return next(int(each.split()[1]) << 10 for each in lines if each.startswith("RssAnon"))

small, large, target = sys.argv[1:]
infinity.quantize(small, target + "-small")
before, most, quantize = anonymous(), 0, quantization.quantize_tensor

def noting(*given):
    global most
    found = quantize(*given)
    most = max(most, anonymous())
    return found

quantization.quantize_tensor = noting
infinity.quantize(large, target)
print(most - before)
"""


def test_the_memory_is_that_of_one_tensor(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 6}
    config = transformers.LlamaConfig(**SIZES | sizes, num_key_value_heads=4)
    large = tmp_path / "large"
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(large)
    small = saved("llama", tmp_path / "small", torch.bfloat16)
    command = [sys.executable, "-W", "ignore", "-c", PEAK, small, large, tmp_path / "made"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    stored = (large / "model.safetensors").stat().st_size
    tensor, working = 512 * 4096 * 2, 24 << 20
    assert stored > 80 << 20
    assert int(done.stdout.split()[-1]) < 2 * tensor + working
