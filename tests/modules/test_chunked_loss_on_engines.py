"""`infinity.chunked_loss` on wrapped models: the bits of a wrapped model without it, and no byte
more from the drive."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.losses.lazy_logits import LazyLogits
from support.causal import VOCABULARY, batch, causal
from support.configs import config_of
from support.rank_group import RANKS, OnRanks
from support.smallest import Wrap, wrapping
from support.traffic import STEADY

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

TOKEN = 12 * VOCABULARY
MANY = 5 * TOKEN  # of 64 tokens
PLACEMENTS: dict[str, dict[str, Any]] = {
    "nvme": {"cache": 0},
    "nvme, poisoned": {"cache": 0, "poison": True},
    "host": {"parameters": "cpu", "optimizer": "cpu", "cpu_memory": 1 << 26},
}


@pytest.fixture
def wrap(tmp_path: Path) -> Any:
    with wrapping(tmp_path) as make:
        yield make


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def train(model: Any, steps: int, order: str = "") -> list[float]:
    """The losses of some steps; three micro-batches in each, in this `order` if there is one."""
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    losses: list[float] = []
    for step in range(steps):
        if order:
            batches = [batch(3 * step + each) for each in range(3)]
            losses += [float(loss) for loss in infinity.accumulate(model, batches, order=order)]
        else:
            loss = model(**batch(step)).loss
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("tied", [False, True], ids=["own weight", "tied"])
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("order", ["", "horizontal", "vertical"])
def test_before_or_after_wrap_training_has_the_same_bits(
    wrap: Wrap, placement: dict[str, Any], order: str, tied: bool
) -> None:
    found = []
    for when in ("never", "before", "after"):
        model = causal("gemma2", tie_word_embeddings=tied)
        if when == "before":
            infinity.chunked_loss(model)
        wrap(model, placement)
        if when == "after":
            infinity.chunked_loss(model)
        found.append((train(model, 3, order), weights(model)))
    (losses, expected), *others = found
    for others_losses, other in others:
        assert others_losses == losses
        assert all(torch.equal(other[name], expected[name]) for name in expected)


@pytest.mark.parametrize("order", ["", "horizontal", "vertical"])
def test_with_many_chunks_losses_are_near_to_those_of_a_plain_model(wrap: Wrap, order: str) -> None:
    plain, chunked = wrap(causal("phi"), {}), wrap(causal("phi"), {})
    infinity.chunked_loss(chunked, MANY)
    expected, found = (train(model, 3, order) for model in (plain, chunked))
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("order", ["", "horizontal", "vertical"])
@pytest.mark.parametrize("tied", [False, True], ids=["own weight", "tied"])
def test_chunks_read_nothing_more_from_the_drive(wrap: Wrap, tied: bool, order: str) -> None:
    read = []
    for limit in (None, "1MiB", MANY):
        model = causal(tie_word_embeddings=tied, num_hidden_layers=6, intermediate_size=256)
        # Parameters are all that is read, and no update begins early.
        wrap(model, {"cache": 0, "optimizer": "cpu", "cpu_memory": 1 << 26, "update": "plain"})
        if limit is not None:
            infinity.chunked_loss(model, limit)
        train(model, STEADY + 2, order)
        engine = infinity.engine(model)
        report = engine.report()
        read.append(round(report.read_per_parameter * report.parameters))
        assert read[-1] == engine.plan().read > 0
    assert read[0] == read[1] == read[2]


def test_logits_are_there_after_the_forward_and_not_after_the_step(wrap: Wrap) -> None:
    plain, model = causal(), wrap(causal(), {"cache": 0})
    infinity.chunked_loss(model, MANY)
    optimizer = infinity.AdamW(model.parameters(), lr=0.1)
    outputs, other = model(**batch()), model(**batch())
    (outputs.loss + other.loss).backward()
    assert torch.equal(outputs.logits, plain(**batch()).logits)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"read outputs.logits before optimizer.step\(\)"):
        other.logits.argmax(-1)


def test_a_loss_and_logits_outside_of_the_model(wrap: Wrap) -> None:
    plain, model = wrap(causal(), {"cache": 0}), wrap(causal(), {"cache": 0})
    infinity.chunked_loss(model)
    for each in (plain, model):
        optimizer = infinity.AdamW(each.parameters(), lr=1e-3)
        logits = each(**batch()).logits
        rows = logits[:, :-1].reshape(-1, VOCABULARY)
        loss = nn.functional.cross_entropy(rows, batch()["input_ids"][:, 1:].reshape(-1))
        (loss + logits.square().mean()).backward()
        optimizer.step()
    expected, found = weights(plain), weights(model)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)


def test_a_whole_model_in_one_unit(wrap: Wrap) -> None:
    plain, model = causal(), causal()
    wrap(model, {}, units=[model])
    infinity.chunked_loss(model)
    expected, found = plain(**batch()), model(**batch())
    assert torch.equal(found.loss, expected.loss)
    found.loss.backward()
    expected.loss.backward()
    for name, each in plain.named_parameters():
        assert torch.equal(infinity.engine(model).gradient(model.get_parameter(name)), each.grad)


def test_a_frozen_base_with_adapters(wrap: Wrap) -> None:
    peft = pytest.importorskip("peft")
    found = []
    for limit in (None, "1MiB"):
        torch.manual_seed(0)
        model = peft.get_peft_model(causal(), peft.LoraConfig(target_modules=["q_proj"], r=4))
        wrap(model, {"cache": 0})
        if limit is not None:
            infinity.chunked_loss(model, limit)
            assert isinstance(model(**batch()).logits, LazyLogits)
        found.append((train(model, 3), weights(model)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[1][1][name], value) for name, value in found[0][1].items())


def test_a_closed_engine_says_so(tmp_path: Path) -> None:
    model = infinity.wrap(causal(), config_of(nvme=tmp_path))
    infinity.chunked_loss(model)
    logits = model(**batch()).logits
    infinity.engine(model).close()
    with pytest.raises(infinity.EngineClosedError):
        logits.argmax(-1)


def work(task: Any, directory: Path, rank: int) -> None:
    """Train on one rank of two, with and without chunks."""
    stage, order = task
    found = []
    for limit in (None, "1MiB", MANY):
        path = directory / f"{limit}-{rank}"
        path.mkdir()
        model = infinity.wrap(causal("gemma2"), config_of(nvme=path, stage=stage, cache=0))
        if limit is not None:
            infinity.chunked_loss(model, limit)
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            batches = [batch(RANKS * (2 * step + each) + rank) for each in range(2)]
            infinity.accumulate(model, batches, order=order)
            optimizer.step()
            optimizer.zero_grad()
        outputs = model(**batch(rank))
        assert isinstance(outputs.logits, LazyLogits) == (limit is not None)
        logits = outputs.logits.detach().clone()  # gathers the projection again
        dist.barrier()
        found.append((weights(model), logits))
        infinity.engine(model).close()
    (plain, logits), (one, one_logits), (many, _) = found
    assert all(torch.equal(one[name], plain[name]) for name in plain)
    assert torch.equal(one_logits, logits)
    for name in plain:
        torch.testing.assert_close(many[name], plain[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("order", ["horizontal", "vertical"])
@pytest.mark.parametrize("stage", [0, 3])
def test_two_ranks(on_ranks: OnRanks, stage: int, order: str) -> None:
    assert on_ranks((stage, order)) == ["done"] * RANKS


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Twelve rows of tokens."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {name: value[0] for name, value in batch(number, rows=1).items()}


def accuracy(prediction: Any) -> dict[str, float]:
    found = torch.from_numpy(prediction.predictions).argmax(-1)
    return {"accuracy": float((found == torch.from_numpy(prediction.label_ids)).double().mean())}


def test_a_trainer_has_the_same_losses_and_metrics(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import TrainingArguments

    from infinity.integrations.transformers import InfinityTrainer

    logs = []
    for limit in (None, "1MiB"):
        path = tmp_path / str(limit)
        path.mkdir()
        model = causal()
        if limit is not None:
            infinity.chunked_loss(model, limit)
        arguments = TrainingArguments(
            output_dir=str(path / "output"),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=3,
            logging_steps=1,
            learning_rate=1e-2,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="no",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = InfinityTrainer(
            model,
            arguments,
            train_dataset=Rows(),
            eval_dataset=Rows(),
            compute_metrics=accuracy,
            infinity_config=config_of(nvme=path, cache=0),
        )
        trainer.train()
        names = {"loss", "grad_norm", "eval_loss", "eval_accuracy"}
        logs.append(
            [{n: entry[n] for n in names & entry.keys()} for entry in trainer.state.log_history]
        )
        infinity.engine(model).close()
    assert logs[0] == logs[1]
    assert any("eval_accuracy" in entry for entry in logs[0])


def test_nothing_is_said_while_all_goes_well(wrap: Wrap, caplog: pytest.LogCaptureFixture) -> None:
    model = infinity.chunked_loss(wrap(causal("gemma2"), {}), MANY)
    with caplog.at_level(logging.WARNING, "infinity"):
        train(model, 2)
        model(**batch()).logits.argmax(-1)
    assert not caplog.records
