"""Trainings by a Trainer that signals end at any event of their callbacks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import infinity
from support.rank_group import SERVER, become_rank, run_all

FIGURES = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch", "step", "train_loss")


class SetUp(NamedTuple):
    """A training. `args` are TrainingArguments beside the usual ones."""

    args: dict[str, Any] = {}  # noqa: RUF012 - never changed
    config: dict[str, Any] = {}  # noqa: RUF012
    dropout: float = 0.2
    dtype: torch.dtype = torch.float32
    lora: bool = False
    draws: str = ""
    """Who draws random numbers: the "collator" or the "dataset"."""
    patience: int = 0
    """Of early stopping; 0 without it."""
    trainer: str = "Trainer"
    signal: signal.Signals = signal.SIGKILL
    ranks: int = 1
    layers: int = 2


VERTICAL = {"accumulation": "vertical"}
SET_UPS = {
    "dropout": SetUp({"weight_decay": 0.1}),
    "accumulation, odd last step": SetUp({"gradient_accumulation_steps": 3, "num_train_epochs": 3}),
    "evaluation, checkpoints, cosine": SetUp(
        {"eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 3}
        | {"lr_scheduler_type": "cosine", "save_total_limit": 2}
    ),
    "LoRA": SetUp(lora=True),
    "early stopping, best model": SetUp(
        {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        | {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
        | {"learning_rate": 0.05, "num_train_epochs": 5, "save_total_limit": 2},
        patience=2,
    ),
    "vertical, SIGTERM": SetUp(
        {"gradient_accumulation_steps": 3, "num_train_epochs": 3},
        VERTICAL,
        signal=signal.SIGTERM,
    ),
    "vertical, bf16": SetUp({"gradient_accumulation_steps": 2}, VERTICAL, dtype=torch.bfloat16),
    "collator that draws, groups by length": SetUp(
        {"train_sampling_strategy": "group_by_length", "lr_scheduler_type": "polynomial"},
        draws="collator",
    ),
    "dataset that draws, accumulation": SetUp({"gradient_accumulation_steps": 2}, draws="dataset"),
    "worker, reduce on plateau, SIGINT": SetUp(
        {"dataloader_num_workers": 1, "lr_scheduler_type": "reduce_lr_on_plateau"}
        | {"lr_scheduler_kwargs": {"patience": 0}, "eval_strategy": "steps", "eval_steps": 3},
        signal=signal.SIGINT,
    ),
    "two ranks, vertical, evaluation": SetUp(
        {"gradient_accumulation_steps": 2, "eval_strategy": "epoch"}
        | {"per_device_train_batch_size": 1},
        VERTICAL,
        ranks=2,
    ),
    "SFTTrainer, LoRA, packing": SetUp(
        {"gradient_accumulation_steps": 2, "packing": True, "max_length": 24},
        lora=True,
        trainer="SFTTrainer",
    ),
    "DPOTrainer, LoRA, vertical": SetUp(
        {"gradient_accumulation_steps": 2, "max_length": 24},
        VERTICAL,
        lora=True,
        trainer="DPOTrainer",
    ),
}


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of tokens, of different lengths."""

    def __init__(self, count: int, seed: int, draws: bool) -> None:
        dice = random.Random(seed)
        self._rows = [
            [dice.randrange(4, 50) for _ in range(dice.randrange(6, 14))] for _ in range(count)
        ]
        self._draws = draws

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = list(self._rows[number])
        if self._draws:
            row[random.randrange(len(row))] = int(torch.randint(4, 50, ()))
        return {"input_ids": row}


def padded(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for number, row in enumerate(rows):
        values = torch.tensor(row["input_ids"])
        ids[number, : len(values)] = labels[number, : len(values)] = values
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels >= 0).long()}


def noisy(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = padded(rows)
    replaced = torch.rand(batch["input_ids"].shape) < 0.2
    other = torch.randint(4, 50, batch["input_ids"].shape)
    batch["input_ids"] = torch.where(replaced, other, batch["input_ids"])
    return batch


def model_of(set_up: SetUp, plain: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=set_up.layers,
        num_attention_heads=2,
        max_position_embeddings=64,
        attention_dropout=set_up.dropout,
    )
    torch.manual_seed(7)
    with contextlib.nullcontext() if plain else infinity.init():
        model: Any = LlamaForCausalLM(config).to(set_up.dtype)
        if set_up.lora:
            import peft

            names = ["q_proj", "v_proj", "down_proj"]
            options = {"r": 4, "lora_dropout": set_up.dropout}
            model = peft.get_peft_model(model, peft.LoraConfig(target_modules=names, **options))
    return model


def tokenizer() -> Any:
    """Words that are numbers below 63."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<end>", *map(str, range(63))])}
    plain = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", pad_token="<end>")


def build(set_up: SetUp, folder: Path, resume: bool, plain: bool = False) -> Any:
    """The trainer, whose model is wrapped unless `plain`."""
    import transformers
    from transformers import EarlyStoppingCallback, Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    from infinity.integrations.transformers import InfinityTrainerMixin

    transformers.set_seed(3)
    (folder / "drive").mkdir(parents=True, exist_ok=True)
    usual: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 3,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "warmup_steps": 2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 11,
        "ddp_backend": "gloo" if set_up.ranks > 1 else None,
    }
    given: dict[str, Any] = {"callbacks": []}
    plain_model = plain
    kinds: tuple[type, type] = (Trainer, TrainingArguments)
    if set_up.trainer == "Trainer":
        given |= {
            "train_dataset": Rows(14, 1, set_up.draws == "dataset"),
            "eval_dataset": Rows(6, 2, False),
            "data_collator": noisy if set_up.draws == "collator" else padded,
        }
    else:
        import trl
        from datasets import Dataset

        os.environ["CI"] = "1"  # TRL sends nothing
        texts = [" ".join(str((7 * n + m) % 60) for m in range(4 + n % 5)) for n in range(14)]
        rows = [{"prompt": t, "chosen": " 5 6", "rejected": " 7 9 8"} for t in texts]
        if set_up.trainer == "SFTTrainer":
            rows = [{"text": text} for text in texts]
            kinds = (trl.SFTTrainer, trl.SFTConfig)
        else:
            kinds = (trl.DPOTrainer, trl.DPOConfig)
        given |= {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer()}
        if set_up.trainer == "DPOTrainer":  # which makes the reference of a plain model
            import peft

            given["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
            set_up, plain_model = set_up._replace(lora=False), True
        usual |= {"bf16": False, "gradient_checkpointing": False}
    if set_up.patience:
        given["callbacks"] = [EarlyStoppingCallback(set_up.patience)]
    kind: Any = kinds[0]
    if not plain:
        given["resume"] = resume
        given["infinity_config"] = infinity.Config(
            nvme=folder / "drive",
            **{"durability": "step", "tuning": infinity.Tuning(poison=True)} | set_up.config,
        )
        kind = type("Durable", (InfinityTrainerMixin, kind), {})
    trainer = kind(
        model=model_of(set_up, plain_model), args=kinds[1](**usual | set_up.args), **given
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


class Cut(Exception):
    """Ends a training in a callback."""


def train(
    set_up: SetUp, folder: Path, resume: bool = True, event: int | None = None, cuts: bool = False
) -> dict[str, Any]:
    """Train to the end; returns what came of it. At number `event` of all calls of callbacks this
    process gets the signal of the set-up, or `Cut` is raised if it `cuts`."""
    from transformers.trainer_callback import CallbackHandler

    trainer = build(set_up, folder, resume)
    engine = infinity.engine(trainer.model)
    count, call = 0, CallbackHandler.call_event

    def counted(self: CallbackHandler, name: str, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        if count == event and cuts:
            raise Cut
        if count == event:
            os.kill(os.getpid(), set_up.signal)
        count += 1
        return call(self, name, *args, **kwargs)

    CallbackHandler.call_event = counted
    began = engine.committed_step or 0
    try:
        with engine:
            trainer.train()
            digest = digest_of(trainer.model)
    finally:
        CallbackHandler.call_event = call
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    return {
        "weights": digest,
        "log": figures(trainer.state.log_history),
        "lines": len(lines),
        "best": [trainer.state.best_metric, trainer.state.best_global_step],
        "steps": trainer.state.global_step,
        "events": count,
        "began": began,
    }


def digest_of(model: torch.nn.Module) -> str:
    """Of the names and bits of all weights."""
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def figures(log: list[dict[str, Any]]) -> list[dict[str, float]]:
    """The figures of a log that do not depend on time."""
    return [{name: entry[name] for name in FIGURES if name in entry} for entry in log]


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that a training that was cut off, and one that was not, have the same result."""
    assert found["log"] == expected["log"]
    for name in ("weights", "lines", "best", "steps"):
        assert found[name] == expected[name], name


def _work(
    errors: Path, name: str, folder: Path, resume: bool, event: int | None, rank: int, port: int
) -> None:
    become_rank(errors)
    set_up = SET_UPS[name]
    if set_up.ranks > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(set_up.ranks), "LOCAL_WORLD_SIZE": str(set_up.ranks)}
        os.environ["LOCAL_RANK"] = str(rank)
    import warnings

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    try:
        result = train(set_up, folder, resume, event)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result))


def in_processes(
    name: str, folder: Path, resume: bool = True, event: int | None = None, port: int = 0
) -> int:
    """`train` on all ranks of set-up `name`; returns the exit status of the first one."""
    folder.mkdir(exist_ok=True, parents=True)
    processes = [
        SERVER.Process(
            target=_work, args=(folder / f"errors{rank}", name, folder, resume, event, rank, port)
        )
        for rank in range(SET_UPS[name].ranks)
    ]
    run_all(processes)
    for rank, process in enumerate(processes):
        if process.exitcode not in (0, -signal.SIGKILL, *(128 + n for n in (2, 15))):
            sys.stderr.write((folder / f"errors{rank}").read_text())
    return processes[0].exitcode or 0
