"""`infinity finetune` has the losses of a plain Trainer with the same samples in its batches."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.utils.data import SequentialSampler
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)
from typer.testing import CliRunner

from infinity.cli.main import app
from infinity.models.data import WindowRequest, Windows, load_windows
from infinity.models.packing import best_fit
from infinity.models.tokenizer import load_tokenizer
from support.local_models import save_for_bytes

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out"),
]

STEPS, SEED, RATE = 5, 3, 2e-3
LIMITS = ["--gpu-memory", "64MiB", "--cpu-memory", "64MiB"]
ON_CPU = ["--parameters", "cpu", "--optimizer", "cpu", *LIMITS]
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "then",
    "some",
    "more",
    "of",
    "it",
]


class Start(NamedTuple):
    """A model, chats of different lengths, and texts."""

    model: Path
    chats: Path
    text: Path


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    place = tmp_path_factory.mktemp("start")
    save_for_bytes(place / "model", 32)
    draw = random.Random(0)
    records = [
        {
            "asked": " ".join(draw.choices(WORDS, k=draw.randint(1, 9))),
            "answer": " ".join(draw.choices(WORDS, k=draw.randint(1, 5))),
        }
        for _ in range(60)
    ]
    lines = "".join(f"{json.dumps(record)}\n" for record in records)
    (place / "chats.jsonl").write_text(lines)
    (place / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    return Start(place / "model", place / "chats.jsonl", place / "text.txt")


def finetune(start: Start, output: Path, *options: Any) -> list[dict[str, Any]]:
    """The log of a run."""
    common = ["--model", start.model, "--byte-tokenizer", "--precision", "fp32", "--seed", SEED]
    common += ["--batch-size", 2, "--warmup", 2, "--steps", STEPS, "--output", output]
    command = ["finetune", *common, *(options if "--nvme" in options else [*ON_CPU, *options])]
    result = CliRunner().invoke(app, [*map(str, command), "--no-report", "--debug"])
    assert result.exit_code == 0, (result.output, result.exception)
    (output / "said").write_text(result.stderr)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def said(output: Path) -> list[str]:
    """What a run has written to stderr."""
    return (output / "said").read_text().splitlines()


class Plain(Trainer):  # type: ignore[misc]
    """Trains on batches in their order."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset)


def padded(batches: list[list[Any]]) -> dict[str, torch.Tensor]:
    """The samples of one batch, as `Rows` stores them, with a mask."""
    (rows,) = batches
    width = max(map(len, rows))
    shape = (len(rows), width)
    ids, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, -100)
    mask = torch.zeros(shape, dtype=torch.long)
    for at, row in enumerate(rows):
        values = torch.from_numpy(np.asarray(row, np.int64))
        ids[at, : len(row)] = torch.where(values < 0, ~values, values)
        labels[at, : len(row)] = torch.where(values < 0, -100, values)
        mask[at, : len(row)] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def trained(
    model: torch.nn.Module, batches: list[Any], accumulate: int, place: Path
) -> list[dict[str, Any]]:
    """The log of a plain Trainer."""
    args = TrainingArguments(
        output_dir=str(place),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=accumulate,
        learning_rate=RATE,
        weight_decay=0.1,
        adam_beta2=0.95,
        lr_scheduler_type="cosine_warmup_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=2,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        report_to="none",
        use_cpu=True,
        remove_unused_columns=False,
    )
    trainer = Plain(model, args, data_collator=padded, train_dataset=batches)
    trainer.train()
    found: list[dict[str, Any]] = trainer.state.log_history
    return found


def batches_of(windows: Windows, accumulate: int) -> Iterator[list[Any]]:
    """The samples of each batch in the order of `windows`."""
    order = windows.order()
    for _ in range(STEPS * accumulate):
        numbers = list(islice(order, 2))
        packs = [[n] for n in numbers] if windows.packs is None else None
        groups = packs or [windows.packs[n] for n in numbers]  # type: ignore[index]
        yield [windows.tokens[[row]][0] for group in groups for row in group]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("order", ["horizontal", "vertical"])
def test_losses_are_those_of_a_plain_trainer(
    start: Start, tmp_path: Path, lora: bool, packing: bool, order: str
) -> None:
    columns = ["--columns", "prompt=asked,completion=answer", "--lr", RATE]
    options = ["--data", start.chats, *columns, "--accumulate", 4, "--accumulation-order", order]
    model = AutoModelForCausalLM.from_pretrained(start.model)
    if lora:
        options += ["--lora", 4]
        finetune(start, tmp_path / "first", *options, "--lr", 0)
        model = PeftModel.from_pretrained(model, tmp_path / "first", is_trainable=True)
    found = finetune(start, tmp_path / "found", *options, *["--packing"] * packing)
    tokenizer = load_tokenizer(start.model, 320, True)
    keys = {"prompt": "asked", "completion": "answer"}
    windows = load_windows(WindowRequest(start.chats, None, SEED, columns=keys), tokenizer)
    windows = windows.packed() if packing else windows
    plain = trained(model, list(batches_of(windows, 4)), 4, tmp_path)
    for name in ("loss", "learning_rate", "grad_norm"):
        here, there = ([entry[name] for entry in log if "loss" in entry] for log in (found, plain))
        assert len(here) == STEPS
        assert here == pytest.approx(there, rel=1e-6 if name == "loss" else 1e-5), name


def test_a_placement_on_nvme_has_the_same_bits(start: Start, tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    options = ["--data", start.text, "--lr", RATE, "--sequence-length", 32]
    there = finetune(start, tmp_path / "there", *options)
    more = ["--nvme", tmp_path / "nvme", *LIMITS, "--cache", 0]
    here = finetune(start, tmp_path / "here", *options, *more)
    assert [entry.get("loss") for entry in here] == [entry.get("loss") for entry in there]


def test_samples_are_shown_with_validations_and_change_no_bit(start: Start, tmp_path: Path) -> None:
    options = ["--data", start.text, "--lr", RATE, "--sequence-length", 32, "--eval-every", 2]
    plain = finetune(start, tmp_path / "plain", *options)
    found = finetune(start, tmp_path / "found", *options, "--sample", "the quick")
    for name in ("loss", "eval_loss"):
        assert [entry.get(name) for entry in found] == [entry.get(name) for entry in plain]
    shown = [line for line in said(tmp_path / "found") if "is answered with" in line]
    assert [line.split("  ")[0] for line in shown] == ["step 2", "step 4", "step 5"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "found")
    tokenizer = load_tokenizer(tmp_path / "found", 320)
    ids = torch.from_numpy(tokenizer.encode(["the quick"])[0].astype(np.int64))[None]
    out = model.generate(ids, max_new_tokens=48, do_sample=False, eos_token_id=tokenizer.separator)
    answer = tokenizer.decode(out[0, ids.shape[1] :].tolist())
    assert shown[-1] == f"step 5  'the quick' is answered with {answer!r}"


# LoRA


def test_adapters_are_written_alone_or_merged(start: Start, tmp_path: Path) -> None:
    columns = ["--columns", "prompt=asked,completion=answer", "--lr", RATE]
    options = ["--data", start.chats, *columns, "--lora", 4, "--lora-target", "q_proj,up_proj"]
    finetune(start, tmp_path / "alone", *options)
    finetune(start, tmp_path / "merged", *options, "--merge")
    assert not (tmp_path / "alone" / "model.safetensors").exists()
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(start.model), tmp_path / "alone"
    )
    targets = {name.rpartition(".")[2] for name in model.targeted_module_names}
    assert targets == {"q_proj", "up_proj"}
    ids = torch.arange(32)[None]
    with torch.no_grad():
        adapted = model(ids).logits
        plain = AutoModelForCausalLM.from_pretrained(start.model)(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
    assert not torch.equal(adapted, plain)
    torch.testing.assert_close(merged, adapted, rtol=1e-5, atol=1e-6)


def test_adapters_name_the_id_of_their_base(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They named its directory in the cache, which another machine does not have."""
    monkeypatch.setattr("infinity.models.source.cached", {"me/mine": start.model}.get)
    finetune(start, tmp_path / "out", "--data", start.text, "--lora", 2, "--model", "me/mine")
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "me/mine"


def test_a_checkpoint_of_adapters_is_exported_as_them(start: Start, tmp_path: Path) -> None:
    options = ["--data", start.text, "--sequence-length", 16, "--lr", RATE, "--lora", 2]
    steps = tmp_path / "steps"
    finetune(start, tmp_path / "alone", *options, "--checkpoint", steps)
    command = ["export", str(steps), str(tmp_path / "out"), "--adapters-only"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.stderr
    there, here = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("alone", "out")
    )
    assert there.keys() == here.keys()
    assert all(torch.equal(value, here[name].to(value.dtype)) for name, value in there.items())


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (
            "lm_head",
            "--merge cannot add the adapters of lm_head, because its weight is an embedding or "
            "tied to one; leave out --merge, or give --lora-target other layers",
        ),
        (
            "wte",
            "--merge cannot add the adapters of transformer.wte, because its weight is an "
            "embedding or tied to one; leave out --merge, or give --lora-target other layers",
        ),
        ("c_attn, c_porj", "--lora-target names 'c_porj', and the model has no such layer"),
    ],
)
def test_adapters_without_a_weight_of_their_own_are_not_merged(
    start: Start, target: str, reason: str, tmp_path: Path
) -> None:
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 320}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path)
    options = ["--model", tmp_path, "--byte-tokenizer", "--data", start.text, "--lora", 2]
    command = ["finetune", *map(str, [*options, "--merge", *ON_CPU]), "--lora-target", target]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == f"infinity: {reason}"


@pytest.mark.parametrize("first", [(), ("--lora", 2), ("--lora", 2, "--merge")])
@pytest.mark.parametrize("then", [(), ("--lora", 2), ("--lora", 2, "--merge")])
def test_an_output_has_no_files_of_the_run_before(
    start: Start, tmp_path: Path, first: tuple[Any, ...], then: tuple[Any, ...]
) -> None:
    """transformers loads a model together with the adapters beside it."""
    common = ("--data", start.text, "--overwrite")
    finetune(start, tmp_path / "out", *common, *first)
    finetune(start, tmp_path / "out", *common, *then)
    finetune(start, tmp_path / "alone", *common, *then)
    assert {path.name for path in (tmp_path / "out").iterdir()} - {"README.md"} == {
        path.name for path in (tmp_path / "alone").iterdir()
    } - {"README.md"}


def test_adapters_that_are_not_finite_are_not_written(start: Start, tmp_path: Path) -> None:
    options = ["--data", start.text, "--lora", 2, "--lr", 1e39, "--output", tmp_path / "out"]
    common = ["--model", start.model, "--byte-tokenizer", "--steps", 1, "--warmup", 0, *ON_CPU]
    result = CliRunner().invoke(app, ["finetune", *map(str, [*common, *options])])
    assert result.exit_code == 1
    assert re.search(r"lora_\S* became \S+ at step 1; try a lower --lr", result.stderr)
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_an_overwrite_that_fails_leaves_the_output(start: Start, tmp_path: Path) -> None:
    """Files of the run before go when those of the new one are there, and not before."""
    out, common = tmp_path / "out", ("--data", start.text, "--lora", 2)
    finetune(start, out, *common)
    before = (out / "adapter_model.safetensors").read_bytes()
    options = ["--model", start.model, "--byte-tokenizer", "--data", start.text, "--lr", 1e39]
    options += ["--steps", 1, "--warmup", 0, "--overwrite", "--output", out, *ON_CPU]
    result = CliRunner().invoke(app, ["finetune", *map(str, options)])
    assert result.exit_code == 1 and "became" in result.stderr
    assert (out / "adapter_model.safetensors").read_bytes() == before


def test_adapters_are_not_resumed_beside_other_weights(start: Start, tmp_path: Path) -> None:
    """Their directory may have got the files of another model of the same shape."""
    shutil.copytree(start.model, tmp_path / "model")
    common = ["--model", tmp_path / "model", "--byte-tokenizer", "--data", start.text, "--steps", 1]
    common += ["--lora", 2, "--checkpoint", tmp_path / "steps", "--checkpoint-every", 1, *ON_CPU]
    command = ["finetune", *map(str, common)]
    assert CliRunner().invoke(app, command).exit_code == 0
    weights = load_file(tmp_path / "model" / "model.safetensors")
    halves = {name: value / 2 for name, value in weights.items()}
    save_file(halves, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    result = CliRunner().invoke(app, [*command, "--resume", "--steps", "2"])
    assert result.exit_code == 1 and "a frozen --model with the digest" in result.stderr


def test_adapters_of_random_weights_are_refused(start: Start) -> None:
    command = ["finetune", "--data", str(start.text), "--lora", "2", *map(str, ON_CPU)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        "infinity: --lora trains adapters of a model that has weights, and those of the preset "
        "llama-tiny are random; give --model a directory or a downloaded id, or leave out --lora"
    )


def test_a_convolution_of_gpt2_is_merged(start: Start, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    common = ["--data", start.text, "--sequence-length", 16, "--lr", RATE]
    finetune(start, tmp_path / "first", *common, "--model", "gpt2-tiny", "--steps", 1)
    options = [*common, "--model", tmp_path / "first", "--lora", 4, "--lora-target", "c_attn"]
    finetune(start, tmp_path / "alone", *options)
    finetune(start, tmp_path / "merged", *options, "--merge")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    ids = torch.arange(16)[None]
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(model, tmp_path / "alone")(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-5)


def test_a_model_whose_packed_samples_see_each_other_is_refused(
    start: Start, tmp_path: Path
) -> None:
    """gpt-oss takes positions, and its masks do not look at them."""
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    torch.manual_seed(0)
    config = GptOssConfig(vocab_size=320, dtype="float32", **sizes, **heads, **experts)
    GptOssForCausalLM(config).save_pretrained(tmp_path / "model")
    options = [
        "--model",
        tmp_path / "model",
        "--data",
        start.chats,
        "--byte-tokenizer",
        "--packing",
    ]
    options += ["--columns", "prompt=asked,completion=answer", "--steps", 1, *ON_CPU]
    result = CliRunner().invoke(app, ["finetune", *map(str, options)])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        "infinity: samples in one window see each other in GptOssForCausalLM; leave out --packing"
    )


def test_the_end_tokens_of_the_model_stay(start: Start, tmp_path: Path) -> None:
    shutil.copytree(start.model, tmp_path / "model")
    values = {"eos_token_id": [257, 258], "do_sample": True, "temperature": 0.6}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(values))
    options = ["--data", start.text, "--sequence-length", 16, "--model", tmp_path / "model"]
    for name, more in (("plain", []), ("shown", ["--sample", "the"])):
        finetune(start, tmp_path / name, *options, *more)
        found = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert {key: found.get(key) for key in values} == values


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            ["--merge"],
            "--merge is of adapters, and there are none without --lora RANK",
        ),
        (
            ["--steps", 2, "--epochs", 1],
            "--steps and --epochs both say how long to train; give one of them",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: list[Any], reason: str) -> None:
    result = CliRunner().invoke(app, ["finetune", *ON_CPU, *map(str, options)])
    assert result.exit_code == 1
    assert result.stderr == f"infinity: {reason}\n"


def test_a_column_that_is_missing_is_named_with_its_line(start: Start) -> None:
    options = ["--data", str(start.chats), "--columns", "prompt=asked,completion=reply"]
    result = CliRunner().invoke(app, ["finetune", *ON_CPU, *options])
    assert result.stderr.splitlines()[-1] == (
        f"infinity: {start.chats}, line 1: no column 'reply'; it has 'asked', 'answer'"
    )


# Lengths


def test_a_run_without_options_fits_its_windows_and_epochs_to_the_data(
    start: Start, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(start.model, 320, True)
    keys = {"prompt": "asked", "completion": "answer"}
    windows = load_windows(WindowRequest(start.chats, None, SEED, columns=keys), tokenizer)
    assert windows.tokens.shape[1] == windows.tokens.lengths.max() < 256  # type: ignore[union-attr]
    texts = load_windows(WindowRequest(start.text, None, SEED), tokenizer)
    assert texts.tokens.shape[1] == 44 * 100 // 20
    short = WindowRequest(start.text, None, SEED, positions=64)
    assert load_windows(short, tokenizer).tokens.shape[1] == 64
    columns = ["--columns", "prompt=asked,completion=answer"]
    options = [*ON_CPU, "--data", start.chats, *columns, "--epochs", 0.5, "--batch-size", 4]
    options += ["--model", start.model, "--byte-tokenizer", "--json"]
    result = CliRunner().invoke(app, ["finetune", *map(str, options)])
    assert json.loads(result.stdout)["steps"] == -(-len(windows.training) // 8)


def test_best_fit_fills_windows_and_keeps_all() -> None:
    draw = random.Random(0)
    lengths = [draw.randint(1, 100) for _ in range(2000)]
    groups = best_fit(lengths, 128)
    assert sorted(number for group in groups for number in group) == list(range(2000))
    assert max(sum(lengths[number] for number in group) for group in groups) <= 128
    assert len(groups) <= 11 / 9 * -(-sum(lengths) // 128) + 1
    assert best_fit([200, 5], 128) == [[0], [1]]
