"""The fields of `Config` and `Tuning`, and the options that commands make of them: a new one is a
decision, made here, too.

A setting of speed should be measured, derived from a budget, or planned instead.
"""

from __future__ import annotations

import inspect
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import typer
from pydantic import BaseModel
from typer.testing import CliRunner

from infinity.cli.bench.step.command import step
from infinity.cli.finetune import finetune
from infinity.cli.generate import generate
from infinity.cli.knobs import OF_A_NODE, configured, mirrors
from infinity.config import Config, Tuning

TIERS = "'gpu' | 'cpu' | 'nvme'"
CONFIG = {
    "nvme": ("tuple[Path, ...]", ()),
    "gpu_memory": ("int | str", "auto"),
    "cpu_memory": ("int | str", "auto"),
    "parameters": (TIERS, "nvme"),
    "gradients": (TIERS, "cpu"),
    "optimizer": (TIERS, "nvme"),
    "activations": (TIERS, "gpu"),
    "recompute": ("'off' | 'all' | 'auto'", "off"),
    "stage": ("0 | 1 | 2 | 3", 3),
    "precision": ("'auto' | 'bf16' | 'fp16' | 'fp32'", "auto"),
    "moment_precision": ("'fp32' | 'bf16' | 'int8'", "fp32"),
    "algorithm": (
        "'adam' | 'adagrad' | 'lion' | 'ademamix' | 'momentum' | 'sgd' | 'other'",
        "adam",
    ),
    "accumulation": ("'horizontal' | 'vertical'", "horizontal"),
    "durability": ("'off' | 'step' | int", "off"),
    "deterministic": ("bool", False),
    "inference": ("bool", False),
    "tuning": ("Tuning", Tuning()),
}
TUNING = {
    "nvme_memory": ("int | None", None),
    "nvme_shares": ("'measured' | 'equal' | tuple[float, ...]", "measured"),
    "cache": ("'auto' | int", "auto"),
    "gpu_cache": ("'auto' | int", "auto"),
    "activation_memory": ("'auto' | int", "auto"),
    "partition_activations": ("bool", False),
    "gradient_precision": ("'auto' | 'fp32'", "auto"),
    "split_master": ("bool", True),
    "copy_on_write": ("bool", True),
    "update": ("'auto' | 'speculative' | 'exact' | 'plain' | 'delayed'", "auto"),
    "delayed_after": ("int", 40),
    "collective_timeout": ("float", 600.0),
    "verify": ("'resume' | 'always'", "resume"),
    "poison": ("bool", False),
    "device": ("'auto' | 'cpu' | 'cuda'", "auto"),
    "io_engine": ("'auto' | 'io_uring' | 'posix'", "auto"),
    "gpu_direct": ("'auto' | 'on' | 'off'", "auto"),
    "read_in_place": ("bool", True),
    "instruction_set": ("'auto' | 'scalar' | 'avx2' | 'avx512'", "auto"),
    "threads": ("int | None", None),
}
FINETUNE = {
    "model": "llama-tiny",
    "checkpoint_activations": True,
    "data": None,
    "data_format": "auto",
    "byte_tokenizer": False,
    "columns": None,
    "sequence_length": None,
    "packing": False,
    "seed": 0,
    "lora": None,
    "lora_alpha": None,
    "lora_target": None,
    "base": None,
    "merge": False,
    "nvme": None,
    "gpu_memory": "auto",
    "cpu_memory": "auto",
    "parameters": "nvme",
    "gradients": "cpu",
    "optimizer": "nvme",
    "activations": "gpu",
    "recompute": "off",
    "precision": "bf16",
    "moment_precision": "fp32",
    "deterministic": False,
    "nvme_memory": None,
    "nvme_shares": "measured",
    "cache": "auto",
    "gpu_cache": "auto",
    "activation_memory": "auto",
    "gradient_precision": "auto",
    "update": "auto",
    "delayed_after": 40,
    "verify": "resume",
    "io_engine": "auto",
    "gpu_direct": "auto",
    "read_in_place": True,
    "steps": None,
    "epochs": None,
    "batch_size": 4,
    "accumulate": 1,
    "accumulation_order": "horizontal",
    "chunked_loss": "off",
    "lr": None,
    "weight_decay": 0.1,
    "warmup": None,
    "max_grad_norm": 1.0,
    "clip": "global",
    "skip_nonfinite": False,
    "eval_every": 0,
    "eval_batches": 8,
    "sample": None,
    "durability": "auto",
    "checkpoint": None,
    "checkpoint_every": 100,
    "keep_checkpoints": 2,
    "resume": False,
    "output": None,
    "overwrite": False,
    "push_to_hub": None,
    "report": True,
    "report_to": None,
    "config": None,
    "show_config": False,
    "as_json": False,
    "debug": False,
}
GENERATE = {
    "model": inspect.Parameter.empty,
    "prompt": None,
    "prompts": None,
    "chat": False,
    "system": None,
    "max_new_tokens": 128,
    "batch": 8,
    "temperature": 0.0,
    "top_p": 1.0,
    "seed": 0,
    "nvme": None,
    "gpu_memory": "auto",
    "cpu_memory": "auto",
    "parameters": "nvme",
    "precision": "auto",
    "nvme_memory": None,
    "nvme_shares": "measured",
    "cache": "auto",
    "gpu_cache": "auto",
    "io_engine": "auto",
    "gpu_direct": "auto",
    "read_in_place": True,
    "kv_memory": None,
    "as_json": False,
    "debug": False,
}
STEP = {
    "model": "llama-tiny",
    "checkpoint_activations": True,
    "sequence_length": 256,
    "batch_size": 4,
    "accumulate": 1,
    "accumulation_order": "horizontal",
    "lr": 1e-4,
    "clip": "global",
    "seed": 0,
    "nvme": None,
    "gpu_memory": 1 << 30,
    "cpu_memory": 2 << 30,
    "parameters": "nvme",
    "gradients": "cpu",
    "optimizer": "nvme",
    "activations": "gpu",
    "recompute": "off",
    "precision": "bf16",
    "moment_precision": "fp32",
    "durability": "off",
    "nvme_memory": None,
    "nvme_shares": "measured",
    "cache": "auto",
    "gpu_cache": "auto",
    "activation_memory": "auto",
    "gradient_precision": "auto",
    "copy_on_write": True,
    "update": "auto",
    "delayed_after": 0,
    "device": "auto",
    "io_engine": "auto",
    "gpu_direct": "auto",
    "steps": 5,
    "discard": 2,
    "most_seconds": 1e9,
    "probe_bytes": 256 << 20,
    "as_json": None,
    "report": None,
    "timeline": None,
    "debug": False,
}


def spelled(kind: Any) -> str:
    """A type in one line, the same with every Python."""
    if kind is type(None):
        return "None"
    if get_origin(kind) is tuple:
        return f"tuple[{spelled(get_args(kind)[0])}, ...]"
    if get_origin(kind) is not None:
        return " | ".join(spelled(each) for each in get_args(kind))
    return kind.__name__ if isinstance(kind, type) else repr(kind)


@pytest.mark.parametrize(("model", "frozen"), [(Config, CONFIG), (Tuning, TUNING)])
def test_the_fields(model: type[BaseModel], frozen: dict[str, Any]) -> None:
    kinds = get_type_hints(model)
    found = {
        name: (spelled(kinds[name]), field.default) for name, field in model.model_fields.items()
    }
    assert found == frozen
    assert list(found) == list(frozen), "the order is that of --help and of the reference"


def test_config_has_at_most_17_fields() -> None:
    assert len(Config.model_fields) <= 17
    assert not Config.model_fields.keys() & Tuning.model_fields.keys()


@pytest.mark.parametrize(
    ("command", "frozen"), [(finetune, FINETUNE), (generate, GENERATE), (step, STEP)]
)
def test_the_options(command: Any, frozen: dict[str, Any]) -> None:
    found = {name: each.default for name, each in inspect.signature(command).parameters.items()}
    assert found == frozen
    assert list(found) == list(frozen), "the order is that of --help"


@pytest.mark.parametrize("model", [Config, Tuning])
def test_every_field_is_documented_in_a_first_paragraph_that_fits_help(
    model: type[BaseModel],
) -> None:
    for name, field in model.model_fields.items():
        first = (field.description or "").partition("\n\n")[0]
        assert first.endswith("."), name
        assert len(first.split()) < 45, name


@pytest.fixture
def made() -> typer.Typer:
    """A command that prints what it is given."""
    app = typer.Typer()

    @app.command()
    @mirrors(before="last", leave_out=("poison", "collective_timeout"), delayed_after=7)
    def command(first: int = 1, last: int = 2, **knobs: Any) -> None:
        typer.echo(repr({"first": first, "last": last, **knobs}))

    return app


def given(app: typer.Typer, *options: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    values: dict[str, Any] = eval(result.stdout, {"PosixPath": lambda text: text})
    return values


def test_an_option_has_the_default_and_the_type_of_its_field(made: typer.Typer) -> None:
    defaults = {name: default for name, (_, default) in (CONFIG | TUNING).items()}
    for name in ("tuning", "accumulation", "poison", "collective_timeout"):
        del defaults[name]
    defaults |= {"first": 1, "last": 2, "nvme": None, "precision": "bf16", "delayed_after": 7}
    assert given(made) == defaults
    chosen = given(
        made,
        "--nvme",
        "a",
        "--nvme",
        "b",
        "--cache",
        "2MiB",
        "--nvme-shares",
        "2,1.5",
        "--gpu-memory",
        "1KiB",
        "--threads",
        "3",
        "--no-copy-on-write",
        "--update",
        "exact",
        "--nvme-memory",
        "7",
    )
    assert chosen == defaults | {
        "nvme": ["a", "b"],
        "cache": 2 << 20,
        "nvme_shares": (2.0, 1.5),
        "gpu_memory": 1024,
        "threads": 3,
        "copy_on_write": False,
        "update": "exact",
        "nvme_memory": 7,
    }


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("--update=never", "Invalid value for '--update'"),
        ("--delayed-after=-1", "Invalid value for '--delayed-after'"),
        ("--threads=0", "Invalid value for '--threads'"),
        ("--cache=much", "'much' is not a number of bytes"),
        ("--nvme-shares=a,b", "'a,b' is not measured, equal, or a number for each --nvme"),
        ("--poison", "No such option"),
    ],
)
def test_an_option_refuses_what_its_field_refuses(
    made: typer.Typer, option: str, problem: str
) -> None:
    result = CliRunner().invoke(made, [option], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 2
    assert problem in result.output


def test_help_is_the_first_paragraph_and_names_options(made: typer.Typer) -> None:
    command: Any = typer.main.get_command(made)
    helps = {each.name: each.help for each in command.params}
    assert (
        helps["delayed_after"]
        == "With --update delayed: the steps that come before the first late one."
    )
    assert helps["cache"].startswith("How much of --cpu-memory may cache states on NVMe;")
    assert "moves" not in helps["cache"], "that is in the second paragraph"
    assert helps["cpu_memory"] == "Budget in host memory. For all ranks of a node together."
    assert not any("`" in text for text in helps.values() if text)


def test_an_option_for_no_field_is_refused() -> None:
    with pytest.raises(ValueError, match="no field of Config or Tuning: cahce, tuning"):
        mirrors(before="last", leave_out=("cahce", "tuning"))


def test_the_config_of_options_has_each_in_its_place() -> None:
    knobs = {name: each.default for name, each in inspect.signature(finetune).parameters.items()}
    own = knobs.keys() - Config.model_fields.keys() - Tuning.model_fields.keys() | {"durability"}
    knobs = {name: value for name, value in knobs.items() if name not in own}
    with pytest.raises(
        ValueError,
        match=(
            r"^parameters and optimizer on nvme, but no directory is given: add --nvme "
            r"DIR, or keep"
        ),
    ):
        configured(knobs)
    knobs |= {
        "nvme": ["x"],
        "cpu_memory": 2 << 30,
        "cache": 4096,
        "update": "exact",
        "activations": "nvme",
        "nvme_memory": 4 << 20,
    }
    knobs["activation_memory"] = 8 << 20
    whole, part = configured(knobs), configured(knobs, share=lambda nbytes: nbytes // 2)
    assert (whole.tuning.cache, whole.tuning.update, whole.precision) == (4096, "exact", "bf16")
    for name in {*Config.model_fields, *Tuning.model_fields} - {"tuning"}:
        one, other = (
            getattr(each if name in Config.model_fields else each.tuning, name)
            for each in (whole, part)
        )
        assert other == (one // 2 if name in OF_A_NODE else one), name
