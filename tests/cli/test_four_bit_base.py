"""`infinity finetune --base 4bit`: the losses of a plain Trainer on the same base in 4 bits."""

from __future__ import annotations

import json
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.utils.data import SequentialSampler
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Trainer,
    TrainingArguments,
)
from typer.testing import CliRunner

from infinity.cli.main import app
from infinity.cli.trainer import FinetuneTrainer
from infinity.models.data import WindowRequest, load_windows
from infinity.models.tokenizer import load_tokenizer
from support.local_models import save_for_bytes

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes"),
]
STEPS, SEED, RATE, LENGTH = 4, 3, 2e-3, 32
LIMITS = ["--gpu-memory", "64MiB", "--cpu-memory", "64MiB"]


class Start(NamedTuple):
    """A model, and a text."""

    model: Path
    text: Path


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    place = tmp_path_factory.mktemp("start")
    save_for_bytes(place / "model", 64)
    (place / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    return Start(place / "model", place / "text.txt")


def run(start: Start, place: Path, *options: Any) -> Any:
    """A run below `place`, whose output is in its folder `out`."""
    (place / "nvme").mkdir(parents=True, exist_ok=True)
    common: list[Any] = ["--data", start.text, "--byte-tokenizer", "--precision", "fp32"]
    common += ["--seed", SEED, "--batch-size", 2, "--sequence-length", LENGTH, "--warmup", 2]
    common += ["--steps", STEPS, "--lr", RATE, "--nvme", place / "nvme", *LIMITS, "--cache", 0]
    if "--model" not in options:
        common += ["--model", start.model]
    command = ["finetune", *common, "--no-report", *options, "--output", place / "out"]
    return CliRunner().invoke(app, [*map(str, command)])


def finetune(start: Start, place: Path, *options: Any) -> list[float]:
    """The losses of a run."""
    result = run(start, place, *options)
    assert result.exit_code == 0, (result.output, result.stderr, result.exception)
    return losses(place)


def losses(place: Path) -> list[float]:
    lines = map(json.loads, (place / "out" / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def refusal(start: Start, place: Path, *options: Any) -> str:
    result = run(start, place, *options)
    assert result.exit_code == 1 and not (place / "out").exists()
    assert not any((place / "nvme").iterdir())
    return str(result.stderr.splitlines()[-1]).removeprefix("infinity: ")


class Plain(Trainer):  # type: ignore[misc]
    """Trains on batches in their order."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset)


def plain_losses(start: Start, model: Any, place: Path) -> list[float]:
    """Those of a plain Trainer."""
    request = WindowRequest(start.text, LENGTH, SEED)
    windows = load_windows(request, load_tokenizer(start.model, 320, True))
    order = windows.order()
    rows = [
        torch.stack(
            [torch.from_numpy(windows.tokens[[n]][0].astype("int64")) for n in islice(order, 2)]
        )
        for _ in range(STEPS)
    ]
    args = TrainingArguments(
        output_dir=str(place),
        max_steps=STEPS,
        per_device_train_batch_size=1,
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
    collate = lambda batch: {"input_ids": batch[0], "labels": batch[0]}  # noqa: E731
    trainer = Plain(model, args, data_collator=collate, train_dataset=rows)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def quantized_by_transformers(start: Start, target: Path) -> Path:
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    load = AutoModelForCausalLM.from_pretrained
    load(start.model, quantization_config=settings).save_pretrained(target)
    return target


def seen(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_ino) for path in folder.iterdir()}


def test_losses_are_those_of_plain_adapters_on_the_same_base(start: Start, tmp_path: Path) -> None:
    """The base is made once, and a base that transformers has made trains alike."""
    finetune(start, tmp_path, "--lora", 4, "--base", "4bit", "--lr", 0)
    base = tmp_path / "nvme" / "base-4bit"
    before = seen(base)
    theirs = quantized_by_transformers(start, tmp_path / "theirs")
    model = AutoModelForCausalLM.from_pretrained(theirs)
    model = PeftModel.from_pretrained(model, tmp_path / "out", is_trainable=True)
    found = finetune(start, tmp_path, "--lora", 4, "--base", "4bit", "--overwrite")
    assert seen(base) == before
    assert found == pytest.approx(plain_losses(start, model, tmp_path), rel=1e-6)
    assert found == finetune(start, tmp_path / "given", "--lora", 4, "--model", theirs)
    one, other = (
        load_file(place / "out" / "adapter_model.safetensors")
        for place in (tmp_path, tmp_path / "given")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
    names = [
        json.loads((place / "out" / "adapter_config.json").read_text())["base_model_name_or_path"]
        for place in (tmp_path, tmp_path / "given")
    ]
    assert names == [str(start.model), str(theirs)]
    taken = sum(path.stat().st_size for path in base.iterdir())
    assert sum(p.stat().st_size for p in (tmp_path / "nvme").rglob("*") if p.is_file()) == taken


def test_a_run_that_failed_is_resumed_with_the_same_bits(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--lora", 4, "--base", "4bit"]
    expected = finetune(start, tmp_path / "whole", *options)
    log = FinetuneTrainer.log

    def failing(self: Any, logs: dict[str, float], *given: Any, **more: Any) -> None:
        log(self, logs, *given, **more)
        if self.state.global_step == 2 and "loss" in logs:
            raise RuntimeError("stopped")

    with monkeypatch.context() as changed:
        changed.setattr(FinetuneTrainer, "log", failing)
        assert run(start, tmp_path, *options).exit_code == 1
    before = seen(tmp_path / "nvme" / "base-4bit")
    assert finetune(start, tmp_path, *options, "--resume") == expected
    assert seen(tmp_path / "nvme" / "base-4bit") == before
    whole, resumed = (
        load_file(place / "out" / "adapter_model.safetensors")
        for place in (tmp_path / "whole", tmp_path)
    )
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_adapters_are_merged_into_the_model_itself(start: Start, tmp_path: Path) -> None:
    options = ["--lora", 4, "--lora-target", "q_proj,up_proj", "--base", "4bit"]
    finetune(start, tmp_path / "alone", *options)
    result = run(start, tmp_path, *options, "--merge")
    assert result.exit_code == 0, result.stderr
    assert (
        f"the adapters are merged into the weights of {start.model} itself, which are not in 4 bits"
        in " ".join(result.stderr.split())
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "float32"
    ids = torch.arange(32)[None]
    load = AutoModelForCausalLM.from_pretrained
    adapted = PeftModel.from_pretrained(load(start.model), tmp_path / "alone" / "out")
    with torch.no_grad():
        expected, found = adapted(ids).logits, load(tmp_path / "out")(ids).logits
        plain = load(start.model)(ids).logits
    assert not torch.equal(expected, plain)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--base", "4bit"], "--base is of adapters, and there are none without --lora RANK"),
        (
            ["--base", "4bit", "--lora", 2, "--model", "llama-tiny"],
            "--lora trains adapters of a model that has weights, and those of the preset "
            "llama-tiny are random; give --model a directory or a downloaded id, or leave out "
            "--lora",
        ),
    ],
)
def test_refusals(start: Start, tmp_path: Path, options: list[Any], reason: str) -> None:
    assert refusal(start, tmp_path, *options) == reason


def test_refusals_of_a_model_in_four_bits(start: Start, tmp_path: Path) -> None:
    theirs = quantized_by_transformers(start, tmp_path / "theirs")
    given = ["--model", theirs]
    assert refusal(start, tmp_path / "a", *given, "--lora", 2, "--base", "4bit") == (
        f"{theirs} is quantized already (bitsandbytes); give the model that it was made from, or "
        "use it as it is"
    )
    start_of = f"{theirs} is in 4 bits, so its weights stay as they are; "
    assert refusal(start, tmp_path / "b", *given) == f"{start_of}add --lora RANK to train adapters"
    assert refusal(start, tmp_path / "c", *given, "--lora", 2, "--merge") == (
        f"{start_of}leave out --merge"
    )


def test_it_says_what_is_missing(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    found = refusal(start, tmp_path, "--lora", 2, "--base", "4bit")
    assert found == "--base 4bit needs bitsandbytes; install it with: pip install bitsandbytes"


def test_generate_reads_a_model_in_four_bits(start: Start, tmp_path: Path) -> None:
    theirs = quantized_by_transformers(start, tmp_path / "theirs")
    load_tokenizer(start.model, 320, True).save(theirs)
    limits = ["--gpu-memory", "64MiB", "--cpu-memory", "64MiB", "--cache", "0"]
    command = ["generate", "--model", theirs, "--prompt", "the quick", *limits, "--json"]
    result = CliRunner().invoke(app, [*map(str, command), "--max-new-tokens", "8"])
    assert result.exit_code == 0, (result.output, result.stderr, result.exception)
    (found,) = json.loads(result.stdout)["continuations"]
    model = AutoModelForCausalLM.from_pretrained(theirs).train()  # in evaluation it packs codes
    tokenizer = load_tokenizer(theirs, 320)
    ids = torch.tensor(tokenizer.encode(["the quick"])[0].astype("int64"))[None]
    for _ in range(8):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    assert found["text"] == tokenizer.decode(ids[0, -8:].tolist())
