"""Acts in the steps of `infinity finetune`, and reads what its checkpoints say of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.trainer import TRAINER_STATE_NAME

from infinity.cli.trainer import FinetuneTrainer

Step = tuple[float, ...]
FINISH = "_maybe_log_save_evaluate"  # of transformers


def during_step(
    patch: pytest.MonkeyPatch,
    number: int,
    action: Callable[[FinetuneTrainer], Any] = lambda trainer: None,
    after: Callable[[FinetuneTrainer], Any] = lambda trainer: None,
) -> None:
    """Run `action` in step `number` before its first forward, and `after` when its update is
    made."""
    step = FinetuneTrainer.training_step
    finish = vars(FinetuneTrainer)[FINISH]
    acted = []

    def training_step(self: FinetuneTrainer, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step + 1 == number and not acted:
            acted.append(number)
            action(self)
        return step(self, *args, **kwargs)

    def finishing(self: FinetuneTrainer, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step == number and self.history.done < number:
            after(self)
        finish(self, *args, **kwargs)

    patch.setattr(FinetuneTrainer, "training_step", training_step)
    patch.setattr(FinetuneTrainer, FINISH, finishing)


def steps_in(checkpoint: Path) -> list[Step]:
    """Number, loss, learning rate and norm of every step up to `checkpoint`."""
    state = json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
    names = ("step", "loss", "learning_rate", "grad_norm")
    return [
        tuple(entry[name] for name in names) for entry in state["log_history"] if "loss" in entry
    ]
