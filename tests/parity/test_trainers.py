"""Training loops of other libraries run a wrapped model as they run a plain one, but for the lines
that wrap it and make its optimizer. Skipped where a library is not installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from support.configs import config_of
from support.models import FAMILIES, text_batch

pytestmark = pytest.mark.usefixtures("one_thread")


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Twelve rows of tokens."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {name: value[0] for name, value in text_batch(number, rows=1).items()}


def model_and_optimizer(wrapped: bool, drive: Path) -> tuple[Any, torch.optim.Optimizer]:
    """The same weights each time."""
    model: Any = FAMILIES["llama"].build()
    if wrapped:
        drive.mkdir(exist_ok=True)
        config = config_of(
            nvme=drive, gpu_memory=1 << 20, cpu_memory=1 << 26, cache=0, precision="fp32"
        )
        infinity.wrap(model, config)
    kind: Any = infinity.AdamW if wrapped else torch.optim.AdamW
    return model, kind(model.parameters(), lr=1e-2)


def same_weights(found: nn.Module, expected: nn.Module) -> None:
    theirs = expected.state_dict()
    for name, value in found.state_dict().items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-6, msg=name)


def test_trainer_of_transformers(tmp_path: Path) -> None:
    """Accumulation, clipping, evaluation, checkpoints, the best model, and going on from one."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    trainers = []
    for wrapped in (False, True):
        model, optimizer = model_and_optimizer(wrapped, tmp_path / "drive")
        arguments = TrainingArguments(
            output_dir=str(tmp_path / f"out{wrapped}"),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            max_steps=4,
            logging_steps=1,
            save_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            load_best_model_at_end=True,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        data = Sentences()
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=data,
            eval_dataset=data,
            optimizers=(optimizer, None),
        )
        trainer.train()
        trainers.append(trainer)
    plain, ours = trainers
    for expected, found in zip(plain.state.log_history, ours.state.log_history, strict=True):
        assert found.keys() == expected.keys()
        for name in {"loss", "grad_norm", "eval_loss"} & expected.keys():
            assert found[name] == pytest.approx(expected[name], rel=1e-5), name
    same_weights(ours.model, plain.model)
    saved = tmp_path / "outTrue" / "checkpoint-4"
    steps = json.loads((saved / "trainer_state.json").read_text())["global_step"]
    assert steps == 4
    weights = {name: value.clone() for name, value in ours.model.state_dict().items()}
    again = type(ours.model).from_pretrained(saved)
    assert set(again.state_dict()) == set(weights)
    ours.args.max_steps = 4
    ours.train(resume_from_checkpoint=str(tmp_path / "outTrue" / "checkpoint-2"))
    for name, value in ours.model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    infinity.engine(ours.model).close()


def test_a_loop_with_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    models, norms = [], []
    for wrapped in (False, True):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, optimizer, loader = accelerator.prepare(
            *model_and_optimizer(wrapped, tmp_path / "drive"),
            torch.utils.data.DataLoader(Sentences(), batch_size=2),
        )
        norms.append([])
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    norms[-1].append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state(tmp_path / f"state{wrapped}")
        accelerator.load_state(tmp_path / f"state{wrapped}")
        models.append(accelerator.unwrap_model(model))
        accelerator.free_memory()
    assert norms[1] == pytest.approx(norms[0], rel=1e-5) and len(norms[0]) == 3
    same_weights(models[1], models[0])
    infinity.engine(models[1]).close()


@pytest.mark.filterwarnings("ignore")
def test_a_loop_with_fabric(tmp_path: Path) -> None:
    fabric_of = pytest.importorskip("lightning.fabric").Fabric
    models = []
    for wrapped in (False, True):
        fabric = fabric_of(accelerator="cpu", devices=1)
        model, optimizer = fabric.setup(*model_and_optimizer(wrapped, tmp_path / "drive"))
        for number in range(3):
            fabric.backward(model(**text_batch(number)).loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        state = {"model": model, "optimizer": optimizer}
        fabric.save(tmp_path / f"state{wrapped}", state)
        fabric.load(tmp_path / f"state{wrapped}", state)
        models.append(model.module)
    same_weights(models[1], models[0])
    infinity.engine(models[1]).close()
