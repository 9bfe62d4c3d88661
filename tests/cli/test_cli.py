"""The command `infinity`: what it refuses and in which words, and what a run leaves behind."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import infinity
from infinity.cli import doctor, failure, gc, job, output, progress
from infinity.cli.history import History
from infinity.cli.main import app
from infinity.cli.perfetto import write_trace
from infinity.cli.trainer import FinetuneTrainer
from infinity.errors import EngineClosedError, InfinityError, NvmeError, sentence
from infinity.interrupt import Interrupt
from infinity.models.source import find_model
from infinity.models.tokenizer import ByteTokenizer
from infinity.sharding.states import States
from support.finetune_steps import during_step

KIB = 1 << 10
pytestmark = pytest.mark.usefixtures("undrawn")

ON_CPU = ["--parameters", "cpu", "--optimizer", "cpu", "--gpu-memory", "64MiB"]
ON_CPU += ["--cpu-memory", "64MiB"]
SMALL = ["--sequence-length", "32", "--batch-size", "2", "--steps", "4", "--eval-batches", "2"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file with enough text for small windows."""
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    return path


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def finished(*arguments: object) -> dict[str, Any]:
    """The summary of a run that must succeed."""
    result = run("finetune", *arguments, "--json", "--debug")
    assert result.exit_code == 0, (result.stderr, result.exception)
    summary: dict[str, Any] = json.loads(result.stdout)
    return summary


def refusal(*arguments: object) -> str:
    """The one sentence on stderr of a command that fails."""
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    return str(result.stderr).removeprefix("infinity: ").rstrip("\n")


# finetune: what is refused, before anything is built


def test_a_share_is_one_of_a_directory(tmp_path: Path) -> None:
    assert refusal("finetune", "--nvme", tmp_path, "--nvme-shares", "3,.5") == (
        "config: --nvme-shares has 2 numbers, but nvme has 1 directory"
    )
    assert refusal("finetune", "--nvme", tmp_path, "--nvme-shares", "3,0") == (
        "--nvme-shares: (3.0, 0.0) is neither 'measured' nor 'equal' nor a positive number "
        "for each directory"
    )


def test_a_state_on_nvme_needs_a_directory() -> None:
    assert refusal("finetune") == (
        "parameters and optimizer on nvme, but no directory is given: add --nvme DIR, "
        "or keep them in memory with --parameters cpu --optimizer cpu"
    )


def test_an_unknown_model_names_the_presets_and_the_nearest(tmp_path: Path) -> None:
    assert refusal("finetune", "--nvme", tmp_path, "--model", "lama-tiny") == (
        "unknown model 'lama-tiny'; did you mean 'llama-tiny'? A model is a directory with "
        "config.json and model.safetensors, or one of the presets: llama-tiny, llama-100m, "
        "llama-1b, llama-7b, gpt2-tiny"
    )


def test_ids_of_the_hub_say_how_to_download(tmp_path: Path) -> None:
    assert refusal("finetune", "--nvme", tmp_path, "--model", "nobody-1/nothing-2").startswith(
        "unknown model 'nobody-1/nothing-2'; if it is the id of a model of the hub, download it "
        "first: hf download nobody-1/nothing-2 --local-dir nothing-2, and give --model nothing-2. "
    )
    assert refusal("finetune", "--nvme", tmp_path, "--data", "nobody-1/nothing-2") == (
        "--data nobody-1/nothing-2 does not exist; if it is the id of a data set of the hub, "
        "download it first: hf download --repo-type dataset nobody-1/nothing-2 --local-dir "
        "nothing-2, and give --data nothing-2"
    )


def test_paths_are_checked_before_anything_is_read(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "find_model", lambda *_: pytest.fail("a model was looked for"))
    gone = tmp_path / "gone"
    assert refusal("finetune", "--nvme", gone, "--data", text) == (
        f"nvme directory {gone} does not exist; create it on the drive to be used: mkdir -p {gone}"
    )


def test_an_incomplete_model_directory_is_refused(tmp_path: Path) -> None:
    where = tmp_path / "model"
    where.mkdir()
    assert refusal("finetune", "--nvme", tmp_path, "--model", where) == (
        f"{where} has no config.json, so it is not a Hugging Face model directory"
    )
    (where / "config.json").write_text("{}")
    assert refusal("finetune", "--nvme", tmp_path, "--model", where) == (
        f"{where} has neither model.safetensors nor model.safetensors.index.json (weights "
        "in pickle files are never loaded)"
    )


def test_a_model_that_is_no_causal_language_model_is_refused(tmp_path: Path, text: Path) -> None:
    where = tmp_path / "model"
    where.mkdir()
    config = {"model_type": "vit", "vocab_size": 320}
    (where / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.zeros(1)}, where / "model.safetensors")
    assert refusal(
        "finetune", "--nvme", tmp_path, "--model", where, "--data", text, "--sequence-length", 32
    ) == (f"{where} is of type 'vit', which is not a causal language model")


def test_a_sequence_longer_than_the_model_is_refused(tmp_path: Path) -> None:
    assert refusal("finetune", "--nvme", tmp_path, "--sequence-length", 4096) == (
        "a sequence length of 4096 is more than the 2048 positions of llama-tiny"
    )


def test_missing_data_is_refused(tmp_path: Path) -> None:
    assert (
        refusal("finetune", "--nvme", tmp_path, "--data", tmp_path / "no.txt")
        == f"--data {tmp_path}/no.txt does not exist"
    )


def test_output_and_checkpoints_in_one_directory_are_refused(tmp_path: Path) -> None:
    one, same = tmp_path / "out", tmp_path / "x" / ".." / "out"
    assert refusal("finetune", "--nvme", tmp_path, "--output", one, "--checkpoint", same) == (
        f"--output and --checkpoint are both {one}; checkpoints need a directory of their own"
    )
    assert not one.exists()


def test_an_output_that_is_not_empty_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    assert refusal("finetune", "--nvme", tmp_path, "--output", tmp_path / "out") == (
        f"--output {tmp_path}/out is not empty; choose another one, or give --overwrite"
    )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]


def test_an_output_that_is_a_file_or_the_model_is_refused(tmp_path: Path, text: Path) -> None:
    assert (
        refusal("finetune", "--nvme", tmp_path, "--output", text)
        == f"--output {text} is not a directory"
    )
    with pytest.raises(
        ValueError,
        match=f"^--output {tmp_path} is the directory of the model itself; choose another one$",
    ):
        output.prepare_output(tmp_path, tmp_path, overwrite=True)


def test_an_output_that_cannot_be_made_is_refused(tmp_path: Path, text: Path) -> None:
    assert (
        refusal("finetune", "--nvme", tmp_path, "--output", text / "below")
        == f"{text / 'below'}: Not a directory; choose another path"
    )


@pytest.mark.parametrize("option", ["--output", "--checkpoint"])
@pytest.mark.parametrize("name", ["n" * 256, "/".join(["d" * 200] * 19)])
def test_a_path_that_is_too_long_is_refused_before_anything_is_made(
    tmp_path: Path, option: str, name: str
) -> None:
    (tmp_path / "nvme").mkdir()
    said = refusal("finetune", "--nvme", tmp_path / "nvme", option, tmp_path / name)
    assert said.startswith(f"{option} {tmp_path / name} is too long: ")
    assert said.endswith("; choose a shorter path")
    assert [path.name for path in tmp_path.iterdir()] == ["nvme"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_an_output_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(
        infinity.ConfigError, match=r"^--output /proc/self/fdinfo cannot be written: "
    ):
        output.prepare_output(Path("/proc/self/fdinfo"), None, overwrite=True)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--steps", "0"], "--steps"),
        (
            ["--gpu-memory", "much"],
            "'much' is not a number of bytes; write for example 512MiB, 2GiB or",
        ),
        (["--optimizer", "tape"], "'gpu', 'cpu', 'nvme'"),
        (["--no-such-option"], "No such option"),
        (["--lr", "-1"], "--lr"),
        (["--nvme", ""], "it is empty; name a directory ('.' is the current one)"),
        *(
            ([option, value], "inf is not a finite number")
            for option in ("--lr", "--weight-decay", "--max-grad-norm")
            for value in ("inf", "1e400")
        ),
        (
            ["--nvme-shares", "3;1"],
            "'3;1' is not measured, equal, or a number for each --nvme with commas between",
        ),
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], reason: str) -> None:
    result = run("finetune", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert reason in " ".join(result.stderr.replace("│", " ").split())


def test_gc_of_an_empty_name_is_not_that_of_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("gc", "")
    assert result.exit_code == 2
    assert "it is empty; name a directory" in " ".join(result.stderr.replace("│", " ").split())


def test_debug_shows_the_failure_itself(tmp_path: Path) -> None:
    result = run("finetune", "--nvme", tmp_path, "--model", "nothing", "--debug")
    assert isinstance(result.exception, ValueError)


def test_missing_extras_name_the_pip_command() -> None:
    with pytest.raises(InfinityError) as caught:
        failure.require_extras("json", "no_such_module_anywhere")
    assert str(caught.value) == (
        "`infinity finetune` needs no_such_module_anywhere; install it with: pip install "
        "'zero-infinity[finetune]'"
    )


def test_a_failure_is_one_sentence_with_its_context() -> None:
    assert sentence(NvmeError("read", "/n/s.bin", 4096, 5, 8192, 4096)) == (
        "/n/s.bin: read of 8192 bytes at offset 4096 stopped after 4096: Input/output error"
    )
    closed = EngineClosedError("the engine failed earlier")
    closed.__cause__ = NvmeError("write", "/n/s.bin", 0, 28, 1, 0)
    assert sentence(closed) == (
        "the engine failed earlier (because: /n/s.bin: write of 1 bytes at offset 0 "
        "stopped after 0: No space left on device)"
    )
    assert sentence(ValueError("two\n  lines")) == "two lines"


# finetune: presets and schedule


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("llama-tiny", 0.8e6, 1.2e6),
        ("llama-100m", 85e6, 110e6),
        ("llama-1b", 0.9e9, 1.1e9),
        ("llama-7b", 6e9, 7e9),
        ("gpt2-tiny", 0.8e6, 1.2e6),
    ],
)
def test_presets_have_the_size_of_their_name(name: str, least: float, most: float) -> None:
    source = find_model(name, "bf16")
    with torch.device("meta"):
        model = source.build()
    assert least <= sum(parameter.numel() for parameter in model.parameters()) <= most
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


# finetune: whole runs


def test_a_run_learns_and_leaves_a_model(tmp_path: Path, text: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "out"
    options = ["--data", text, *SMALL, *ON_CPU, "--steps", 30, "--lr", "1e-3", "--output", out]
    summary = finished(*options)
    assert summary["loss"]["last"] < summary["loss"]["first"] - 0.5
    assert summary["loss"]["validation_step"] == 30
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "infinity-run.json",
        "metrics.jsonl",
        "model.safetensors",
        "report.html",
        "tokenizer.json",
        "tokenizer_config.json",
        "trace.json",
    ]
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.bfloat16
    assert loaded.config.use_cache
    ids = torch.tensor([AutoTokenizer.from_pretrained(out)("the quick")["input_ids"]])
    assert torch.isfinite(loaded(ids).logits).all()
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_each_step_is_a_line_of_the_metrics(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "out"
    (out).mkdir()
    (out / "metrics.jsonl").write_text("the line of a run that failed before it had a model\n")
    summary = finished("--data", text, *SMALL, *ON_CPU, "--eval-every", 3, "--output", out)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 4]
    assert (steps[0]["loss"], steps[-1]["loss"]) == (
        summary["loss"]["first"],
        summary["loss"]["last"],
    )
    assert lines[-2]["eval_loss"] == summary["loss"]["validation"]
    assert all(line["step_seconds"] > 0 and line["grad_norm"] > 0 for line in steps)
    for line in steps:
        assert line["tokens_per_second"] * line["step_seconds"] == pytest.approx(2 * 32)
    seconds = sum(line["step_seconds"] for line in steps[1:])
    assert summary["tokens_per_second"] == pytest.approx(3 * 2 * 32 / seconds)
    # 4 windows of 2 rows, of the 130 that are not held out
    assert steps[-1]["epoch"] == pytest.approx(8 / 131, rel=0.02)


@pytest.mark.parametrize("preset", ["gpt2-tiny", "llama-tiny"])
def test_an_output_can_be_the_next_model_and_tied_weights_survive(
    tmp_path: Path, text: Path, preset: str
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    common = ["--data", text, *SMALL, *ON_CPU, "--precision", "fp32"]
    finished(*common, "--model", preset, "--output", first)
    names = set(load_file(first / "model.safetensors"))
    assert ("lm_head.weight" in names) == (preset == "llama-tiny")
    source = find_model(str(first), "auto")
    assert (source.config.dtype, source.directory) == (torch.float32, first)
    if preset == "llama-tiny":
        finished(*common, "--model", first, "--output", second, "--no-report")
        assert not (second / "report.html").exists()
        assert (second / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()


def test_the_same_seed_gives_the_same_weights(tmp_path: Path, text: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        finished("--data", text, *SMALL, *ON_CPU, "--seed", seed, "--output", tmp_path / name)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_without_json_a_table_is_printed_and_progress_goes_to_stderr(
    tmp_path: Path, text: Path
) -> None:
    options = [*SMALL, "--eval-every", 2, "--gpu-memory", "64MiB", "--cpu-memory", "64MiB"]
    result = run("finetune", "--nvme", tmp_path, "--data", text, *options)
    assert result.exit_code == 0
    assert "12.12 B per parameter" in result.stdout
    assert "step 1/4  loss" in result.stderr
    memory = r"compute \S+ \S+/64 MiB  host memory \S+ \S+/64 MiB  NVMe \S+ \S+\n"
    assert re.search(memory, result.stderr)
    assert [line.split("  ")[0] for line in result.stderr.splitlines() if "validation" in line] == [
        "step 2/4",
        "step 4/4",
    ]
    (wear,) = [line for line in result.stderr.splitlines() if "each step writes" in line]
    assert re.fullmatch(
        r"each step writes 10\.2 MiB to NVMe: 20\.5 MiB in the 2 steps to come, \S+ \SiB a day at "
        r"this speed",
        wear,
    )


def test_a_loss_that_is_not_finite_ends_the_run_with_advice(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, compute = tmp_path / "out", FinetuneTrainer.compute_loss

    def diverged(self: FinetuneTrainer, *args: Any, **kwargs: Any) -> Any:
        return compute(self, *args, **kwargs) * math.nan

    monkeypatch.setattr(FinetuneTrainer, "compute_loss", diverged)
    result = run("finetune", "--data", text, *SMALL, *ON_CPU, "--output", out)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        "infinity: the loss became nan at step 1; try a lower --lr than 0.0003, a longer "
        "--warmup, or --precision bf16 or fp32"
    )
    assert [path.name for path in out.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_the_last_step_made_infinite_are_not_written(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    """The validation after that step is no number either, which ends nothing."""
    out, options = tmp_path / "out", ["--data", text, *SMALL, *ON_CPU]
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"of a run before")

    def diverge(trainer: FinetuneTrainer) -> None:
        weight = trainer.model.get_parameter("model.norm.weight")
        with infinity.gathered(weight, write=True), torch.no_grad():
            weight[3] = value

    during_step(monkeypatch, 4, after=diverge)
    result = run("finetune", *options, "--output", out, "--overwrite")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        f"infinity: model.norm.weight became {value} at step 4; try a lower --lr than 0.0003, "
        "a longer --warmup, or --precision bf16 or fp32"
    )
    assert (out / "model.safetensors").read_bytes() == b"of a run before"
    assert finished(*options)["loss"]["validation"] is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_interrupt_finishes_the_step_saves_and_exits(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    during_step(monkeypatch, 2, lambda trainer: os.kill(os.getpid(), number))
    out = tmp_path / "out"
    result = run("finetune", "--data", text, *SMALL, *ON_CPU, "--output", out, "--json")
    assert result.exit_code == 128 + number
    summary = json.loads(result.stdout)
    assert (summary["steps"], summary["signal"], summary["loss"]["validation"]) == (2, number, None)
    assert (out / "model.safetensors").is_file()
    assert "interrupted" in (out / "report.html").read_text()
    assert signal.getsignal(number) is before


def test_the_second_interrupt_ends_at_once(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(trainer: FinetuneTrainer) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    during_step(monkeypatch, 2, twice)
    result = run("finetune", "--data", text, *SMALL, *ON_CPU, "--output", tmp_path / "out")
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "infinity: interrupted"
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_interrupt_notes_the_first_signal_only() -> None:
    with Interrupt() as interrupt:
        assert interrupt.signal is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.signal == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


# Output


def tensors(count: int) -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.full((16, 16), float(i)) for i in range(count)}  # 1 KiB each


def test_weights_are_cut_into_shards_with_an_index(tmp_path: Path) -> None:
    expected = tensors(7)
    files = output.write_weights(tmp_path, iter(expected.items()), shard_bytes=3 * KIB)
    assert [path.name for path in files] == [
        f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 7 * KIB
    found = {name: load_file(tmp_path / file)[name] for name, file in index["weight_map"].items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not list(tmp_path.glob("*.partial"))


def test_at_most_one_tensor_is_held(tmp_path: Path) -> None:
    alive: list[weakref.ref[torch.UntypedStorage]] = []
    most: list[int] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(10):
            most.append(sum(one() is not None for one in alive))
            tensor = torch.full((256,), float(number))
            alive.append(weakref.ref(tensor.untyped_storage()))
            yield f"layer.{number}", tensor
            del tensor

    model, dtypes = torch.nn.Linear(1, 1), dict[str, int]()
    output.write_weights(
        tmp_path,
        output._count_dtypes(output._with_buffers(model, stream()), dtypes),
        shard_bytes=3 * KIB,
    )
    assert most == [0] * 10, "nothing of a tensor is left when the next one is made"
    assert dtypes == {"float32": 2560}
    assert [len(load_file(path)) for path in sorted(tmp_path.glob("*.safetensors"))] == [3, 3, 3, 1]


def test_the_engine_gives_one_unit_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
    config = infinity.Config(
        gpu_memory="1MiB", cpu_memory="1MiB", parameters="cpu", optimizer="cpu", gradients="cpu"
    )
    with infinity.engine(infinity.wrap(model, config)) as engine:
        gather, alive, most = States.gather, [], []

        def noted(states: States, kind: Any) -> torch.Tensor:
            most.append(sum(one() is not None for one in alive))
            flat = gather(states, kind)
            alive.append(weakref.ref(flat.untyped_storage()))
            return flat

        monkeypatch.setattr(States, "gather", noted)
        output.write_weights(tmp_path, engine.weights())
    assert len(most) == len(engine.units) and not any(most)


def test_what_does_not_fit_one_header_or_is_not_aligned_goes_to_another_file(
    tmp_path: Path,
) -> None:
    expected = {
        "odd": torch.ones(3, dtype=torch.int8),
        "wide": torch.ones(3, dtype=torch.float64),
        "n" * 70_000: torch.ones(2, dtype=torch.bfloat16),
        "half": torch.ones(1, dtype=torch.float16),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.ones(0, 4),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "bits": torch.tensor([True, False]),
    }
    output.write_weights(tmp_path, iter(expected.items()))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    found = {name: load_file(tmp_path / file)[name] for name, file in index["weight_map"].items()}
    assert found.keys() == expected.keys()
    assert all(
        torch.equal(found[name], expected[name]) and found[name].dtype == expected[name].dtype
        for name in expected
    )
    names = [f"{number}" * 300 for number in range(500)]
    output.write_weights(tmp_path, ((name, torch.ones(1)) for name in names))
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1, "150 kB of names"
    assert [name for path in files for name in sorted(load_file(path), key=names.index)] == names


def test_a_tensor_that_a_file_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"tensor 'a' is torch\.complex128, which a safetensors file cannot hold"
    ):
        output.write_weights(tmp_path, iter({"a": torch.ones(1, dtype=torch.complex128)}.items()))
    with pytest.raises(ValueError, match="tensor 'a' is given twice"):
        output.write_weights(tmp_path, iter([("a", torch.ones(1)), ("a", torch.ones(1))]))
    assert not list(tmp_path.iterdir())


def test_what_a_killed_export_leaves_is_removed(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:

            def stream() -> Iterator[tuple[str, torch.Tensor]]:
                yield from tensors(3).items()
                os.write(theirs, b".")
                signal.pause()

            output.write_weights(tmp_path, stream(), shard_bytes=KIB)
        finally:
            os._exit(1)
    os.read(ours, 1)
    (left,) = tmp_path.iterdir()
    assert len(list(left.iterdir())) == 4  # three shards and a lock
    assert gc.collect(tmp_path) == {} and left.exists(), "it is in use"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    removed = json.loads(run("gc", tmp_path, "--json").stdout)["removed"]
    assert removed.keys() == {str(left)} and removed[str(left)] > 3 * KIB
    assert not list(tmp_path.iterdir())


def test_an_output_directory_with_nothing_but_leftovers_counts_as_empty(tmp_path: Path) -> None:
    left = tmp_path / f".infinity-{'0' * 16}.tmp"
    left.mkdir()
    (left / "shard-0").write_bytes(b"x")
    output.prepare_output(tmp_path, None, overwrite=False)
    assert not list(tmp_path.iterdir())


def test_outputs_do_not_follow_links(tmp_path: Path) -> None:
    out, precious = tmp_path / "out", tmp_path / "precious"
    out.mkdir()
    precious.write_bytes(b"mine")
    names = [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "report.html",
        "trace.json",
    ]
    for name in [*names, "report.html.partial", "trace.json.partial", ".infinity-write-test"]:
        (out / name).symlink_to(precious)
    source = find_model("llama-tiny", "bf16")
    with infinity.init():
        model = source.build(False)
    output.prepare_output(out, None, overwrite=True)
    output.save_model(out, model, iter({"a": torch.ones(1)}.items()), ByteTokenizer())
    output.write_file(out / "report.html", "page")
    write_trace(out / "trace.json", [], History(tokens_per_step=1))
    assert precious.read_bytes() == b"mine"
    assert not any((out / name).is_symlink() for name in names)
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_the_source_of_a_tensor_may_be_reused_after_the_next_one(tmp_path: Path) -> None:
    slot = torch.zeros(4)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(3):
            yield f"w{number}", slot.fill_(number)

    output.write_weights(tmp_path, stream())
    assert [float(load_file(tmp_path / "model.safetensors")[f"w{n}"][0]) for n in range(3)] == [
        0,
        1,
        2,
    ]


def test_a_failed_write_leaves_the_old_files_and_nothing_else(tmp_path: Path) -> None:
    output.write_weights(tmp_path, iter(tensors(1).items()))
    old = (tmp_path / "model.safetensors").read_bytes()

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors(4).items()
        raise NvmeError("read", "x", 0, 5, 1, 0)

    with pytest.raises(NvmeError):
        output.write_weights(tmp_path, stream(), shard_bytes=2 * KIB)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == old


def test_overwriting_removes_the_shards_of_the_model_before(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    output.write_weights(tmp_path, iter(tensors(7).items()), shard_bytes=KIB)
    output.write_weights(tmp_path, iter(tensors(2).items()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "notes.txt"]
    output.write_weights(tmp_path, iter(tensors(2).items()), shard_bytes=KIB)
    assert len(list(tmp_path.iterdir())) == 4


# gc


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[int]:
    """A live process that holds the lock of `directory`; gives its pid."""
    script = (
        "import fcntl, os, sys\n"
        "handle = open(sys.argv[1], 'w')\n"
        "fcntl.flock(handle, fcntl.LOCK_EX)\n"
        "handle.write(str(os.getpid())); handle.flush()\n"
        "print('held', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(directory / gc.LOCK_NAME)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process.pid
        process.communicate()


def test_gc_removes_what_a_dead_run_left_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / gc.LOCK_NAME).write_text("12345\n")
    (tmp_path / gc.STATES_NAME).write_bytes(b"x" * 8192)
    (tmp_path / "other").write_text("mine")
    result = run("gc", tmp_path, "--json")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert set(answer["removed"]) == {str(tmp_path / gc.LOCK_NAME), str(tmp_path / gc.STATES_NAME)}
    assert answer["bytes"] == sum(answer["removed"].values()) >= 8192
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    assert run("gc", tmp_path).stdout == "nothing to remove\n"


def test_gc_works_without_a_lock_file(tmp_path: Path) -> None:
    (tmp_path / gc.STATES_NAME).write_bytes(b"")
    assert run("gc", tmp_path).stdout == f"removed {tmp_path / gc.STATES_NAME} (0 B)\n"
    assert not list(tmp_path.iterdir())


def test_gc_refuses_while_a_live_process_holds_the_lock(tmp_path: Path) -> None:
    (tmp_path / gc.STATES_NAME).write_bytes(b"x")
    with locked(tmp_path) as pid:
        assert refusal("gc", tmp_path) == (
            f"nvme directory {tmp_path} is in use by process {pid}; give each job its own directory"
        )
    assert (tmp_path / gc.STATES_NAME).exists()
    assert run("gc", tmp_path).exit_code == 0
    assert not list(tmp_path.iterdir())


def test_gc_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    where = tmp_path / "nvme"
    where.mkdir()
    for name in (gc.STATES_NAME, gc.LOCK_NAME):
        (where / name).symlink_to(tmp_path / "precious")
        advice = "which infinity never makes; remove it, or choose another directory"
        assert refusal("gc", where) == f"{where / name} is a link, {advice}"
        (where / name).unlink()
    assert (tmp_path / "precious").read_text() == "x"


def test_gc_of_no_directory_is_refused(tmp_path: Path) -> None:
    said = f"{tmp_path / 'no'}: not a directory; choose another one"
    assert refusal("gc", tmp_path / "no") == said


def test_gc_leaves_the_lock_free(tmp_path: Path) -> None:
    (tmp_path / gc.STATES_NAME).touch()
    gc.collect(tmp_path)
    with (tmp_path / gc.LOCK_NAME).open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


# doctor


def test_doctor_knows_versions_limits_and_paths(tmp_path: Path) -> None:
    result = run("doctor", "--nvme", tmp_path, "--nvme", tmp_path / "no", "--json")
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert set(facts["native"]) == {"_aio", "_cpu_adam", "_cuda"}
    assert facts["gpu_direct_problem"] == "there is no GPU" or facts["device"] != "cpu"
    assert facts["nvme"][0]["free"] > 0
    for budget in (facts["budgets"][key] for key in ("gpu_memory", "cpu_memory")):
        assert budget["nbytes"] > 0
        assert budget["source"].startswith("auto: ")
    assert facts["nvme"][1] == {
        "path": str(tmp_path / "no"),
        "problem": "not a directory",
        "free": None,
        "speed": None,
        "copy_on_write": None,
    }
    assert not list(tmp_path.iterdir())
    verdict = facts["verdict"]
    memory = facts["budgets"]["cpu_memory"]["nbytes"] - (384 << 20)
    assert verdict["in_memory"] == memory // 14  # parameter 2, gradient 2, low bits 2, moments 8
    assert verdict["on_nvme"] == min(facts["nvme"][0]["free"] // 24, memory // 2)
    assert verdict["largest"] == facts["nvme"][0]["free"] // 14
    assert verdict["step_seconds_on_nvme"] == pytest.approx(
        28 * verdict["on_nvme"] / facts["nvme"][0]["speed"]
    )


def test_doctor_says_the_same_in_a_table(tmp_path: Path) -> None:
    result = run("doctor", "--nvme", tmp_path)
    assert result.exit_code == 0, result.stderr
    for shown in (
        "torch",
        "io_uring",
        "GPUDirect Storage",
        "memlock",
        "huge pages",
        "gpu_memory",
        "cpu_memory",
        "infinity._cuda",
        "all in memory: up to",
        "With states on NVMe: up to",
        "GB/s together: a step of",
    ):
        assert shown in " ".join(result.stdout.split())
    assert "With --nvme DIR" in run("doctor").stdout


def test_doctor_knows_of_another_package_infinity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert json.loads(run("doctor", "--json").stdout)["others_of_this_name"] == []
    folder = tmp_path / "megatrain-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: megatrain\nVersion: 1.0\n")
    (folder / "top_level.txt").write_text("infinity\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "megatrain installs a package infinity, too" in " ".join(run("doctor").stdout.split())


@pytest.mark.parametrize(
    ("name", "value", "is_on"),
    [
        ("PYTORCH_ALLOC_CONF", "", False),
        ("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.8", False),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False", False),
        ("PYTORCH_ALLOC_CONF", "a:1, expandable_segments: True", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", True),
    ],
)
def test_doctor_says_what_runs_on_a_gpu_need(
    name: str, value: str, is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, value)
    facts = doctor.examine([]) | {"device": "cuda:0", "nondeterminism": "it has begun"}
    rows = {name: (fine, text) for fine, name, text in doctor.rows_of(facts)}
    refused = "Config(deterministic=True) is refused: it has begun"
    assert rows["same bits at every run"] == (False, refused)
    off = "off; PYTORCH_ALLOC_CONF=expandable_segments:True wastes less memory"
    assert rows["expandable segments"] == (is_on, "on" if is_on else off)


def test_doctor_reports_why_direct_io_does_not_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert (doctor.direct_io_problem(Path("/proc")) or "").startswith("cannot be written")
    real_open = os.open

    def refusing(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument", path)
        return real_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)
    assert doctor.direct_io_problem(tmp_path) == "O_DIRECT refused: Invalid argument"


def test_help_and_version() -> None:
    assert all(name in run("--help").stdout for name in ("finetune", "doctor", "gc"))
    assert run("--version").stdout.startswith("infinity ")
    assert run().exit_code == 2
    process = subprocess.run(
        [sys.executable, "-m", "infinity", "--help"], capture_output=True, text=True, check=True
    )
    assert "finetune" in process.stdout


# Placements

REAL = [
    *SMALL,
    "--gpu-memory",
    "64MiB",
    "--cpu-memory",
    "64MiB",
    "--cache",
    "0",
    "--precision",
    "fp32",
    "--lr",
    "1e-3",
]


@pytest.fixture
def nvme(tmp_path: Path) -> Path:
    path = tmp_path / "nvme"
    path.mkdir()
    return path


def logits(directory: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        result: torch.Tensor = AutoModelForCausalLM.from_pretrained(directory)(
            torch.arange(32)[None]
        ).logits
    return result


def test_real_runs_learn_and_agree_whatever_the_placement(
    tmp_path: Path, text: Path, nvme: Path
) -> None:
    common = ["--data", text, *REAL, "--steps", 12]
    first = finished(*common, "--nvme", nvme, "--update", "exact", "--output", tmp_path / "a")
    second = finished(
        *common,
        "--parameters",
        "cpu",
        "--optimizer",
        "cpu",
        "--no-checkpoint-activations",
        "--gpu-memory",
        "auto",
        "--cpu-memory",
        "10%",
        "--output",
        tmp_path / "b",
    )
    assert first["budget_sources"] == {"gpu": "given", "cpu": "given"}
    assert second["budget_sources"]["gpu"].startswith("auto: ")
    assert second["budget_sources"]["cpu"].startswith("10% of ")
    assert first["loss"] == second["loss"]
    assert first["loss"]["last"] < first["loss"]["first"] - 0.5
    weights = [load_file(tmp_path / name / "model.safetensors") for name in "ab"]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not list(nvme.iterdir())
    for way in ("read", "written"):
        traffic = first["nvme_bytes_per_parameter_per_step"][way]
        assert traffic["measured"] == pytest.approx(traffic["planned"], rel=0.01)
        assert traffic["measured"] > 0
        assert second["nvme_bytes_per_parameter_per_step"][way] == {"measured": 0, "planned": 0}
    for memory in first["memory"].values():
        assert memory["budget"] is None or 0 < memory["peak"] <= memory["budget"]


def test_a_real_run_with_a_chunked_loss_has_its_losses(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def spy(model: Any, max_bytes: Any) -> Any:
        given.append(max_bytes)
        return chunked_loss(model, max_bytes)

    chunked_loss = infinity.chunked_loss
    monkeypatch.setattr(infinity, "chunked_loss", spy)
    common = ["--nvme", tmp_path, "--data", text, *SMALL, "--precision", "fp32", "--json"]
    runs = [run("finetune", *common, *more) for more in ([], ["--chunked-loss", "16KiB"])]
    whole, chunked = (json.loads(each.stdout)["loss"] for each in runs)
    assert given == [16 << 10]
    assert chunked["first"] == pytest.approx(whole["first"], rel=1e-6)
    assert chunked["last"] == pytest.approx(whole["last"], rel=1e-4)
    assert chunked["validation"] == pytest.approx(whole["validation"], rel=1e-4)


def test_a_chunk_without_room_for_a_token_is_refused(tmp_path: Path, text: Path) -> None:
    common = ["finetune", "--nvme", tmp_path, "--data", text, *SMALL, "--chunked-loss"]
    assert refusal(*common, "100B") == (
        "infinity.chunked_loss: max_bytes is 100 B, and the logits of one token take 3.75 KiB, "
        "because the vocabulary has 320 entries; give at least that, better some hundred times as "
        "much"
    )


def test_a_real_run_in_fp16_scales_the_loss_and_counts_what_it_skips(
    text: Path, nvme: Path
) -> None:
    summary = finished("--data", text, *REAL, "--nvme", nvme, "--steps", 12, "--precision", "fp16")
    assert summary["loss"]["last"] < summary["loss"]["first"] - 0.3
    skipped = summary["steps_skipped"]
    assert summary["loss_scale"] == 2.0 ** (16 - max(skipped - 1, 0))
    text_of = dict(progress.summary_rows(summary))
    assert text_of["steps skipped"] == (
        f"{skipped}, because gradients were not finite; loss scale "
        f"{summary['loss_scale']:,.0f} at the end"
    )


def test_a_real_output_loads_in_transformers_and_is_the_next_model(
    tmp_path: Path, text: Path, nvme: Path
) -> None:
    common = ["--data", text, *REAL, "--nvme", nvme]
    finished(*common, "--model", "gpt2-tiny", "--output", tmp_path / "a")
    before = logits(tmp_path / "a")
    kept = finished(*common, "--model", tmp_path / "a", "--lr", 0, "--output", tmp_path / "b")
    # Nothing is learned at a learning rate of 0, so nothing changes.
    assert torch.equal(before, logits(tmp_path / "b"))
    assert kept["model"] == str(tmp_path / "a")
    lanes = {
        event["cat"]
        for event in json.loads((tmp_path / "b" / "trace.json").read_text())["traceEvents"]
        if "cat" in event
    }
    assert {"step", "compute", "nvme read", "adam"} <= lanes


def test_a_model_in_an_older_layout_is_converted_and_one_with_missing_weights_refused(
    tmp_path: Path, text: Path, nvme: Path
) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_local_experts": 2,
    }
    config = MixtralConfig(
        vocab_size=320, num_key_value_heads=2, max_position_embeddings=64, dtype="float32", **sizes
    )
    # One tensor per expert, as on the hub.
    MixtralForCausalLM(config).save_pretrained(tmp_path / "old")
    common = ["--data", text, *REAL, "--nvme", nvme, "--model", tmp_path / "old", "--lr", 0]
    common.append("--byte-tokenizer")
    finished(*common, "--output", tmp_path / "new")
    assert torch.equal(logits(tmp_path / "old"), logits(tmp_path / "new"))
    weights = load_file(tmp_path / "old" / "model.safetensors")
    save_file(
        {name: value for name, value in weights.items() if "lm_head" not in name},
        tmp_path / "old" / "model.safetensors",
    )
    result = run("finetune", *common)
    assert result.exit_code == 1
    # After what transformers reports.
    assert result.stderr.splitlines()[-1].endswith("belongs to another model")


def test_a_budget_that_cannot_work_is_refused_in_one_sentence(
    tmp_path: Path, text: Path, nvme: Path
) -> None:
    reason = refusal(
        "finetune",
        "--data",
        text,
        "--nvme",
        nvme,
        *SMALL,
        "--gpu-memory",
        "64KiB",
        "--output",
        tmp_path / "out",
    )
    assert "--gpu-memory 64 KiB is too small" in reason
    assert "infinity.tile" not in reason
    reason = refusal("finetune", "--data", text, "--nvme", nvme, *SMALL, "--cpu-memory", "64KiB")
    assert reason.startswith("--cpu-memory 64 KiB is too small: ")
    assert reason.endswith(", or set --gradients nvme")
    assert not list(nvme.iterdir())


def test_a_second_job_on_the_same_path_is_refused(text: Path, nvme: Path) -> None:
    with locked(nvme) as pid:
        assert f"in use by process {pid}" in refusal(
            "finetune", "--data", text, "--nvme", nvme, *SMALL, "--cache", 0
        )


@contextlib.contextmanager
def started(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """`infinity finetune` as a process of its own that has made its first steps."""
    command = [sys.executable, "-m", "infinity", "finetune", *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if line.startswith("step "):
                    break
            yield process
        finally:
            process.kill()


def test_ctrl_c_saves_and_leaves_the_last_step(tmp_path: Path, text: Path, nvme: Path) -> None:
    out = tmp_path / "out"
    common = ["--data", text, *REAL, "--nvme", nvme, "--output", out, "--steps", 100_000, "--json"]
    with started(*common) as process:
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate()
    assert process.returncode == 130, stderr
    summary = json.loads(stdout)
    assert summary["signal"] == signal.SIGINT
    assert 1 <= summary["steps"] < 100_000
    assert "Traceback" not in stderr
    assert torch.isfinite(logits(out)).all()
    assert (out / "report.html").is_file()
    assert f"the last step stays in {nvme}: --resume goes on from it" in stderr
    assert gc.DURABLE_NAMES[-1] in {path.name for path in nvme.iterdir()}


def test_gc_cleans_up_after_a_killed_run(text: Path, nvme: Path) -> None:
    with started("--data", text, *REAL, "--nvme", nvme, "--steps", 100_000) as process:
        assert f"in use by process {process.pid}" in refusal("gc", nvme)
        process.kill()
        process.communicate()
    left = {path.name for path in nvme.iterdir()}
    assert left <= {gc.LOCK_NAME, gc.STATES_NAME, *gc.DURABLE_NAMES}
    assert run("gc", nvme).exit_code == 0
    kept = {path.name for path in nvme.iterdir()}
    assert kept == (left - {gc.LOCK_NAME} if gc.DURABLE_NAMES[-1] in left else set()), (
        "if committed"
    )
    assert run("gc", "--committed", nvme).exit_code == 0
    assert not list(nvme.iterdir())
