"""The public entry points, each with what it needs and what must stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from typer.testing import CliRunner

import infinity
from infinity.cli.main import app
from support.configs import config_of

STEPS = 2
"""Steps that are committed, or in a checkpoint, before an entry is walked."""


class CommandError(Exception):
    """A command has ended with a status other than 0; the text is what it wrote to stderr."""


class Entry(NamedTuple):
    """`prepare` fills a directory, `act` works in it, and `check` raises where what was there
    before is lost. `refused` is what `act` may end in."""

    prepare: Callable[[Path], None]
    act: Callable[[Path], object]
    check: Callable[[Path], object]
    refused: tuple[type[Exception], ...] = (infinity.InfinityError,)


def entries() -> dict[str, Entry]:
    """All of them, by name."""
    command = (CommandError,)
    return {
        "wrap": Entry(_folders, _only_wrap, _trains),
        "durable steps": Entry(_committed, _more_steps, _resumes),
        "wrap, resume": Entry(_committed, _only_resume, _resumes),
        "save_checkpoint": Entry(_checkpoint, _save_again, _loads),
        "load_checkpoint": Entry(_checkpoint, _loads, _loads),
        "snapshot": Entry(_checkpoint, _snapshot, _loads_elsewhere),
        "state_dict": Entry(_folders, _state_dict, _trains),
        "nvme": Entry(_folders, _files, _trains),
        "finetune": Entry(_text, _finetune, _retrains, command),
        "finetune, resume": Entry(_interrupted, _finetune_on, _finetune_on, command),
        "generate": Entry(_model, _generate, _generate, command),
        "export": Entry(_checkpoint, _export, _loads, command),
        "inspect": Entry(_checkpoint, lambda at: _run("inspect", at / "saved"), _loads, command),
        "gc": Entry(_committed, lambda at: _run("gc", at / "nvme"), _resumes, command),
        "gc, committed": Entry(
            _committed, lambda at: _run("gc", "--committed", at / "nvme"), _gone, command
        ),
        "doctor": Entry(
            _folders, lambda at: _run("doctor", "--nvme", at / "nvme"), _trains, command
        ),
        "plan": Entry(_model, _plan, _generate, command),
        "bench io": Entry(_folders, _bench, _trains, command),
    }


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def _config(at: Path, **options: Any) -> infinity.Config:
    """All states on the drive."""
    everywhere = {"parameters": "nvme", "optimizer": "nvme", "cache": 0, "nvme": [at / "nvme"]}
    least = {"gpu_memory": "1MiB", "cpu_memory": "16MiB", "device": "cpu", "threads": 1}
    return config_of(**everywhere | least | options)


def _open(at: Path, durability: str, resume: bool = False) -> tuple[Any, Any, Any]:
    model = _net()
    infinity.wrap(model, _config(at, durability=durability), resume=resume)
    engine = infinity.engine(model)
    try:
        return engine, model, infinity.AdamW(model.parameters(), lr=1e-2)
    except BaseException:
        engine.close()
        raise


def _train(model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _folders(at: Path) -> None:
    (at / "nvme").mkdir()


def _only_wrap(at: Path) -> None:
    engine, _, _ = _open(at, "off")
    engine.close()


def _trains(at: Path) -> None:
    engine, model, optimizer = _open(at, "off")
    with engine:
        _train(model, optimizer, 1)


def _committed(at: Path) -> None:
    _folders(at)
    engine, model, optimizer = _open(at, "step")
    with engine:
        _train(model, optimizer, STEPS)


def _more_steps(at: Path) -> None:
    engine, model, optimizer = _open(at, "step", resume=True)
    with engine:
        _train(model, optimizer, 2)


def _only_resume(at: Path) -> None:
    engine, _, _ = _open(at, "step", resume=True)
    engine.close()


def _resumes(at: Path) -> None:
    engine, model, optimizer = _open(at, "step", resume=True)
    with engine:
        assert engine.committed_step is not None, "nothing is committed"
        assert engine.committed_step >= STEPS, engine.committed_step
        _train(model, optimizer, 1)


def _gone(at: Path) -> None:
    """The command was to remove what was committed: it is whole, or gone after the next one."""
    _run("gc", "--committed", at / "nvme")
    _trains(at)


def _checkpoint(at: Path) -> None:
    _folders(at)
    engine, model, optimizer = _open(at, "off")
    with engine:
        _train(model, optimizer, STEPS)
        engine.save_checkpoint(at / "saved", optimizer, {"step": STEPS})


def _save_again(at: Path) -> None:
    engine, model, optimizer = _open(at, "off")
    with engine:
        _train(model, optimizer, 1)
        engine.save_checkpoint(at / "saved", optimizer, {"step": STEPS})


def _snapshot(at: Path) -> None:
    engine, model, optimizer = _open(at, "step")
    with engine:
        _train(model, optimizer, 1)
        engine.snapshot(at / "saved", {"step": STEPS}).wait()
        _train(model, optimizer, 1)


def _loads_elsewhere(at: Path) -> None:
    (at / "other").mkdir()
    (at / "saved").rename(at / "other" / "saved")
    (at / "other" / "nvme").mkdir()
    _loads(at / "other")


def _loads(at: Path) -> None:
    engine, _, optimizer = _open(at, "off")
    with engine:
        found = engine.load_checkpoint(at / "saved", optimizer)
        assert found == {"step": STEPS}, found


def _state_dict(at: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(256, 256)
    with infinity.engine(infinity.wrap(model, _config(at, gpu_memory="4MiB"))):
        assert model.state_dict()["weight"].shape == (256, 256)


def _files(at: Path) -> None:
    tensors = {"a": torch.ones(1000), "b": torch.zeros(3)}
    infinity.nvme.write(tensors["a"], at / "a.bin")
    infinity.nvme.read(torch.empty(1000), at / "a.bin")
    infinity.nvme.save(tensors, at / "a.safetensors")
    infinity.nvme.load(at / "a.safetensors")


def _run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError(f"a traceback: {result.exception!r}") from result.exception
    if result.exit_code:
        raise CommandError(result.stderr)
    return result.stdout


def _text(at: Path) -> None:
    _folders(at)
    (at / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    _small_model(at)


def _small_model(at: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from infinity.models.tokenizer import ByteTokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(at / "model")
    ByteTokenizer().save(at / "model")


_BUDGETS = ("--gpu-memory", "4MiB", "--cpu-memory", "32MiB")


def _finetuning(at: Path, *more: object) -> None:
    _run(
        *("finetune", "--model", at / "model", "--data", at / "text.txt", "--nvme", at / "nvme"),
        *("--sequence-length", 16, "--batch-size", 2, "--eval-batches", 1, "--no-report"),
        *("--checkpoint", at / "checkpoints", "--checkpoint-every", 2),
        *("--output", at / "output", *_BUDGETS, *more),
    )


def _finetune(at: Path) -> None:
    _finetuning(at, "--steps", 2)


def _retrains(at: Path) -> None:
    _finetuning(at, "--steps", 2, "--overwrite", "--resume")


def _interrupted(at: Path) -> None:
    _text(at)
    _finetuning(at, "--steps", 2, "--durability", "step")


def _finetune_on(at: Path) -> None:
    _finetuning(at, "--steps", 4, "--durability", "step", "--overwrite", "--resume")


def _model(at: Path) -> None:
    _folders(at)
    _small_model(at)


def _generate(at: Path) -> None:
    _run(
        *("generate", "--model", at / "model", "--prompt", "a", "--max-new-tokens", 1),
        *("--nvme", at / "nvme", *_BUDGETS),
    )


def _plan(at: Path) -> None:
    _run(
        "plan",
        "--model",
        at / "model",
        "--sequence-length",
        16,
        "--gpu-memory",
        "1GiB",
        "--cpu-memory",
        "1GiB",
    )


def _export(at: Path) -> None:
    _run("export", at / "saved", at / "exported", "--overwrite")


def _bench(at: Path) -> None:
    _run(
        *("bench", "io", "--nvme", at / "nvme", "--size", "16MiB", "--reserve", "0B"),
        *("--mode", "read", "--engine", "posix", "--depth", 2, "--request-bytes", "256KiB"),
        *("--rounds", 1, "--round-seconds", 0.1),
    )
