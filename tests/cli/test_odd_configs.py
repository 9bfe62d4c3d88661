"""`infinity finetune --model DIR` with a config.json or a tokenizer.json that is wrong: one
sentence that names file and value, status 1, and nothing left on the drive. What no check foresees
is a sentence, too, and its traceback is in a file.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from infinity.cli.main import app
from infinity.cli.trainer import FinetuneTrainer
from infinity.models.description import read_description
from infinity.models.source import find_model
from infinity.models.tokenizer import ByteTokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 320,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a text, an empty nvme, and a model whose config.json can be read."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("odd")
    LlamaForCausalLM(
        LlamaConfig(**{name: value for name, value in LLAMA.items() if name != "model_type"})
    ).save_pretrained(path / "model")
    (path / "nvme").mkdir()
    (path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    return path


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What transformers warns of reaches stderr or not, depending on which tests came before in
    this process."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def run(where: Path, *options: object) -> Any:
    fixed = [
        "--model",
        where / "model",
        "--data",
        where / "text.txt",
        "--nvme",
        where / "nvme",
        "--sequence-length",
        16,
    ]
    small = [
        "--batch-size",
        1,
        "--steps",
        1,
        "--gpu-memory",
        "16MiB",
        "--cpu-memory",
        "16MiB",
        "--eval-batches",
        1,
    ]
    # Most of these models have no tokenizer.
    small.append("--byte-tokenizer")
    return CliRunner().invoke(app, ["finetune", *map(str, [*fixed, *small, *options])])


def refusal(where: Path, *options: object) -> str:
    """The one sentence of a run that fails and leaves nothing."""
    result = run(where, *options)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("infinity: ")
    assert "Traceback" not in line
    assert list((where / "nvme").iterdir()) == []
    return str(line.removeprefix("infinity: "))


def between(most: int, least: int = 1) -> str:
    return f"and has to be between {least} and {most}"


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in LLAMA.items() if key != name}


WIDTH, ROWS = between(1 << 24), between(1 << 31)
ODD: dict[str, tuple[Any, str]] = {
    # Sizes
    "no heads": (LLAMA | {"num_attention_heads": 0}, f": num_attention_heads is 0, {WIDTH}"),
    "negative heads": (
        LLAMA | {"num_attention_heads": -4},
        f": num_attention_heads is -4, {WIDTH}",
    ),
    "no key-value heads": (
        LLAMA | {"num_key_value_heads": 0},
        f": num_key_value_heads is 0, {WIDTH}",
    ),
    "no width": (LLAMA | {"hidden_size": 0}, f": hidden_size is 0, {WIDTH}"),
    "negative width": (LLAMA | {"hidden_size": -32}, f": hidden_size is -32, {WIDTH}"),
    "huge width": (LLAMA | {"hidden_size": 1 << 40}, f": hidden_size is 1099511627776, {WIDTH}"),
    "width beyond integers": (
        LLAMA | {"hidden_size": 10**60},
        f": hidden_size is 10000000000000000000... (61 digits), {WIDTH}",
    ),
    "width not divisible": (
        LLAMA | {"hidden_size": 33},
        "The hidden size (33) is not a multiple of the number of",
    ),
    "no head width": (LLAMA | {"head_dim": 0}, f": head_dim is 0, {WIDTH}"),
    "negative MLP": (LLAMA | {"intermediate_size": -1}, f": intermediate_size is -1, {ROWS}"),
    "no MLP": (LLAMA | {"intermediate_size": 0}, f": intermediate_size is 0, {ROWS}"),
    "no layers": (LLAMA | {"num_hidden_layers": 0}, f": num_hidden_layers is 0, {between(10_000)}"),
    "minus one layer": (
        LLAMA | {"num_hidden_layers": -1},
        f": num_hidden_layers is -1, {between(10_000)}",
    ),
    "a billion layers": (
        LLAMA | {"num_hidden_layers": 10**9},
        f": num_hidden_layers is 1000000000, {between(10_000)}",
    ),
    "no vocabulary": (LLAMA | {"vocab_size": 0}, f": vocab_size is 0, {ROWS}"),
    "negative vocabulary": (LLAMA | {"vocab_size": -5}, f": vocab_size is -5, {ROWS}"),
    "no positions": (
        LLAMA | {"max_position_embeddings": 0},
        f": max_position_embeddings is 0, {ROWS}",
    ),
    "GPT-2 without heads": (GPT2 | {"n_head": 0}, f": n_head is 0, {WIDTH}"),
    "GPT-2 not divisible": (
        GPT2 | {"n_embd": 33},
        "`embed_dim` must be divisible by num_heads (got `embed_dim`: 33",
    ),
    "inside of another": (
        {"model_type": "gemma3", "text_config": {"num_hidden_layers": -2}},
        f": text_config.num_hidden_layers is -2, {between(10_000)}",
    ),
    "negative experts": (
        {"model_type": "mixtral", "num_local_experts": -1},
        f": num_local_experts is -1, {between(1 << 16, 0)}",
    ),
    # Types
    "width of text": (
        LLAMA | {"hidden_size": "32"},
        "Field 'hidden_size' expected int, got str (value: '32')",
    ),
    "broken width": (
        LLAMA | {"hidden_size": 32.5},
        "Field 'hidden_size' expected int, got float (value: 32.5)",
    ),
    "null width": (
        LLAMA | {"hidden_size": None},
        "Field 'hidden_size' expected int, got NoneType (value: None)",
    ),
    "list of widths": (
        LLAMA | {"hidden_size": [32]},
        "Field 'hidden_size' expected int, got list (value: [32])",
    ),
    "layers in words": (
        LLAMA | {"num_hidden_layers": "two"},
        "Field 'num_hidden_layers' expected int, got str (value: 'two')",
    ),
    "layers that are true": (
        LLAMA | {"num_hidden_layers": True},
        "Field 'num_hidden_layers' expected int, got bool",
    ),
    "null vocabulary": (
        LLAMA | {"vocab_size": None},
        "Field 'vocab_size' expected int, got NoneType (value: None)",
    ),
    "null epsilon": (
        LLAMA | {"rms_norm_eps": None},
        "Field 'rms_norm_eps' expected float, got NoneType (value: None)",
    ),
    "padding of text": (
        LLAMA | {"pad_token_id": "x"},
        "Field 'pad_token_id' with value 'x' doesn't match any type",
    ),
    # Values
    "NaN": (LLAMA | {"rms_norm_eps": math.nan}, ": rms_norm_eps is NaN, which is not a number"),
    "NaN in a list": (LLAMA | {"a": {"b": [0, math.nan]}}, ": a.b.1 is NaN, which is not a number"),
    "padding beyond the vocabulary": (
        LLAMA | {"pad_token_id": 999},
        "AssertionError: Padding_idx must be within num_embeddings",
    ),
    "an activation of another world": (LLAMA | {"hidden_act": "nope"}, "KeyError: 'nope'"),
    "a dtype of another world": (
        LLAMA | {"dtype": "float13"},
        "module 'torch' has no attribute 'float13'",
    ),
    "rotary embeddings without a base": (
        LLAMA | {"rope_theta": None},
        "TypeError: unsupported operand",
    ),
    "rotary embeddings of text": (
        LLAMA | {"rope_scaling": "x"},
        "Field 'rope_parameters' with value 'x' doesn't match any type",
    ),
    "a method": (LLAMA | {"to_dict": 5}, "TypeError: 'int' object is not callable"),
    # Architectures
    "unknown architecture": (
        LLAMA | {"model_type": "nosuch"},
        "has model type `nosuch` but Transformers does not recognize",
    ),
    "null architecture": (
        LLAMA | {"model_type": None},
        "has model type `None` but Transformers does not recognize",
    ),
    "no architecture": (without("model_type"), "Should have a `model_type` key in its config.json"),
    "a path": (
        LLAMA | {"model_type": "../../etc"},
        "has model type `../../etc` but Transformers does not recognize",
    ),
    "code of its own": (
        {"model_type": "own", "auto_map": {"AutoConfig": "x.Y"}},
        "contains custom code which must be executed",
    ),
    # Files
    "nothing": (b"", ": not JSON (character 1: Expecting value)"),
    "not closed": (b'{"model_type": "llama"', ": not JSON (character 23: Expecting ',' delimiter)"),
    "a list": ([], " is not the description of a model: it holds no JSON object"),
    "null": (None, " is not the description of a model: it holds no JSON object"),
    "not UTF-8": (b'{"model_type": "\xff"}', ": not UTF-8 text (invalid start byte)"),
    "UTF-16": (json.dumps(LLAMA).encode("utf-16"), ": not UTF-8 text (invalid start byte)"),
    "deep": (
        b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        ": not JSON that can be read: it is nested too deeply",
    ),
    "many digits": (
        b'{"vocab_size": ' + b"9" * 5000 + b"}",
        ": not JSON that can be read: it has a number with too many digits",
    ),
    "too long": (
        b" " * (16 << 20) + b"{}",
        " has more than 16 MiB, so it is not what its name says",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_a_config_that_describes_no_model_is_refused_in_one_sentence(
    name: str, whole: Path, tmp_path: Path
) -> None:
    content, reason = ODD[name]
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model" / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    text = refusal(tmp_path)
    middle = (
        "" if reason.startswith((":", " ")) else " does not describe a model that can be built: "
    )
    assert text.startswith(f"{file}{middle}{reason}" if not middle else f"{file}{middle}")
    assert reason in text


def test_a_config_of_another_size_than_the_weights_names_the_parameter(
    whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    model = tmp_path / "model"
    for changes, text in (
        (
            {"num_key_value_heads": 4},
            f"k_proj.weight in {model} has shape (16, 32), the model needs (32, 32)",
        ),
        (
            {"vocab_size": 1 << 20},
            (
                f"model.embed_tokens.weight in {model} has shape (320, 32), the model needs "
                "(1048576, 32)"
            ),
        ),
        ({"num_hidden_layers": 3}, f"{model} has no tensor for model.layers.2."),
    ):
        (model / "config.json").write_text(json.dumps(LLAMA | changes))
        assert text in refusal(tmp_path)


def test_sizes_of_real_models_pass(tmp_path: Path) -> None:
    """Also a mixture without experts, values that are lists, and infinite limits."""
    values = LLAMA | {
        "num_local_experts": 0,
        "intermediate_size": [64, 64],
        "time_step_limit": [0.0, math.inf],
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_description(tmp_path / "config.json") == values


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from(
        [*LLAMA, "rope_scaling", "hidden_act", "head_dim", "pad_token_id", "attention_bias"]
    ),
    value=VALUES,
)
def test_any_value_of_any_key_is_built_or_refused(name: str, value: Any, whole: Path) -> None:
    """By `ValueError`, which the command turns into a sentence, naming the file."""
    directory = whole / "any"
    directory.mkdir(exist_ok=True)
    (directory / "model.safetensors").touch()
    (directory / "config.json").write_text(json.dumps(LLAMA | {name: value}))
    try:
        source = find_model(str(directory), "bf16")
        if source.config.vocab_size * source.config.hidden_size < 1 << 30:
            with torch.device("meta"):
                source.build()
    except ValueError as error:
        assert str(error).startswith(str(directory))


# Tokenizers

NO_WORDS = {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}
ODD_MERGE = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["b c"]}}
TOKENIZERS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "cannot be loaded: "),
    "a list": (b"[]", "cannot be loaded: "),
    "no model": (b"{}", "cannot be loaded: "),
    "not UTF-8": (b"\xff\xfe", "cannot be loaded: "),
    "deep": (b"[" * 100_000 + b"]" * 100_000, "cannot be loaded: "),
    "no vocabulary": (json.dumps(NO_WORDS).encode(), "has no end-of-text token"),
    "a merge of what is not there": (json.dumps(ODD_MERGE).encode(), "cannot be loaded: "),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_is_none_is_refused_in_one_sentence(
    name: str, whole: Path, tmp_path: Path
) -> None:
    content, reason = TOKENIZERS[name]
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model" / "tokenizer.json").write_bytes(content)
    assert refusal(tmp_path).startswith(f"the tokenizer in {tmp_path}/model {reason}")


def test_a_token_that_the_model_has_no_row_for_is_refused(whole: Path, tmp_path: Path) -> None:
    """The number of tokens alone does not say which there are."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    ByteTokenizer().save(tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["a"] = 5000
    file.write_text(json.dumps(content))
    assert refusal(tmp_path) == (
        f"the tokenizer in {tmp_path}/model has a token 5000 but the model's vocabulary has 320"
    )


def test_text_that_a_tokenizer_cannot_encode_is_refused(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    words = {
        "model": {"type": "WordLevel", "vocab": {"the": 0, "<end>": 1}, "unk_token": "<gone>"},
        "added_tokens": [],
    }
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(words))
    (tmp_path / "model" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"})
    )
    assert refusal(tmp_path).startswith(
        f"the tokenizer in {tmp_path}/model cannot encode the text: "
    )


# What no check foresees


def test_a_model_that_fails_in_its_first_step_is_a_sentence_and_leaves_nothing(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA | {"attention_dropout": 2.0}))
    text = refusal(tmp_path)
    (file,) = (tmp_path / "temporary").iterdir()
    assert text == (
        "unexpected RuntimeError: dropout probability has to be between 0 and 1, but got 2 "
        f"(its traceback is in {file}, and --debug shows it)"
    )
    written = file.read_text()
    assert written.startswith("Traceback (most recent call last):\n")
    assert "dropout probability" in written
    result = run(tmp_path, "--debug")
    assert isinstance(result.exception, RuntimeError), "the failure itself"
    assert len(list((tmp_path / "temporary").iterdir())) == 1
    assert list((tmp_path / "nvme").iterdir()) == []


def test_a_traceback_that_cannot_be_written_is_no_second_failure(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(self: Any, *_: Any) -> None:
        raise KeyError("k")

    monkeypatch.setattr(FinetuneTrainer, "training_step", defect)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    assert refusal(whole) == "unexpected KeyError: 'k' (--debug shows the traceback)"
