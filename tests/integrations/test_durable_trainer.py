"""Trainings of a Trainer that are killed or cut off, and resumed: the same weights and the same log
as of one that nothing disturbed."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.engine import Engine
from infinity.errors import ConfigError
from support.durable_trainers import (
    SET_UPS,
    Cut,
    SetUp,
    build,
    compare,
    digest_of,
    figures,
    in_processes,
    model_of,
    train,
)

pytest.importorskip("accelerate")

from transformers import TrainerCallback

from infinity.integrations.trainer_notes import grow

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

KILLED = ["dataset that draws, accumulation", "two ranks, vertical, evaluation"]
"""The set-ups whose processes are killed each time."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name not in KILLED)) for name in SET_UPS],
)
def test_a_killed_training_ends_with_the_same_bits(tmp_path: Path, name: str) -> None:
    """At random events, twice in a row."""
    set_up, dice = SET_UPS[name], random.Random(name)
    assert in_processes(name, tmp_path / "whole", port=free_port()) == 0
    expected = json.loads((tmp_path / "whole" / "result.json").read_text())
    for _ in range(2):
        event = dice.randrange(expected["events"] // 2)
        ended = in_processes(name, tmp_path / "killed", event=event, port=free_port())
        assert ended in (-set_up.signal, 128 + set_up.signal)
    assert in_processes(name, tmp_path / "killed", port=free_port()) == 0
    compare(json.loads((tmp_path / "killed" / "result.json").read_text()), expected)


ALONE = [name for name, each in SET_UPS.items() if each.ranks == 1 and each.trainer == "Trainer"]


@pytest.mark.parametrize("name", ALONE)
def test_an_exception_in_any_callback_costs_no_bit(tmp_path: Path, name: str) -> None:
    """The engine is closed then, and commits a step of which the trainer has done a part."""
    set_up, dice = SET_UPS[name], random.Random(name)
    expected = train(set_up, tmp_path / "whole")
    for event in sorted(dice.sample(range(expected["events"] // 2), 2)):
        with pytest.raises(Cut):
            train(set_up, tmp_path / "cut", event=event, cuts=True)
    compare(train(set_up, tmp_path / "cut"), expected)


@pytest.mark.parametrize("first", [5, 8], ids=["in an epoch", "after an epoch"])
def test_a_training_that_has_ended_continues_with_more_steps(tmp_path: Path, first: int) -> None:
    def trained(steps: int, folder: str) -> dict[str, Any]:
        args = {"max_steps": steps, "lr_scheduler_type": "constant"}
        return train(SET_UPS["dropout"]._replace(args=args), tmp_path / folder)

    def losses(result: dict[str, Any]) -> list[float]:
        return [entry["loss"] for entry in result["log"] if "loss" in entry]

    expected = trained(11, "whole")
    assert trained(first, "cut")["steps"] == first
    found = trained(11, "cut")
    assert losses(found) == losses(expected) and len(losses(found)) == 11
    assert found["weights"] == expected["weights"]


@pytest.mark.parametrize(
    ("set_up", "model"),
    [
        pytest.param(SetUp({"gradient_accumulation_steps": 4}), "full", id="full"),
        pytest.param(SetUp({"gradient_accumulation_steps": 4}, lora=True), "LoRA", id="LoRA"),
    ],
)
def test_both_orders_of_accumulation_train_like_a_plain_trainer(
    tmp_path: Path, set_up: SetUp, model: str
) -> None:
    """Without dropout both orders have the same bits. The last step of an epoch is smaller."""
    set_up = set_up._replace(dropout=0.0)
    logs, digests = {}, {}
    for kind in ("plain", "horizontal", "vertical"):
        order = {"accumulation": kind} if kind != "plain" else {}
        trainer = build(
            set_up._replace(config=order), tmp_path / kind, False, plain=kind == "plain"
        )
        trainer.train()
        logs[kind] = [entry["loss"] for entry in figures(trainer.state.log_history)[:-1]]
        digests[kind] = digest_of(trainer.model)
        if kind != "plain":
            infinity.engine(trainer.model).close()
    assert logs["horizontal"] == pytest.approx(logs["plain"], rel=1e-6)
    assert logs["vertical"] == logs["horizontal"]
    assert digests["vertical"] == digests["horizontal"]


def test_vertical_order_moves_fewer_bytes(tmp_path: Path) -> None:
    """On budgets below the model a step reads its parameters once, not once a micro-batch."""
    read = {}
    for order in ("horizontal", "vertical"):
        set_up = SetUp(
            {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1} | {"max_steps": 3},
            {"accumulation": order, "gpu_memory": "160KiB", "cpu_memory": "4MiB"}
            | {"gradients": "nvme", "tuning": infinity.Tuning(cache=0)},
            layers=8,
            dropout=0.0,
        )
        trainer = build(set_up, tmp_path / order, False)
        trainer.train()
        with infinity.engine(trainer.model) as engine:
            read[order] = engine.io.counters()["bytes_read"]
    assert read["vertical"] < 0.6 * read["horizontal"]


def test_what_a_resume_refuses(tmp_path: Path) -> None:
    set_up = SET_UPS["dropout"]
    with pytest.raises(Cut):
        train(set_up, tmp_path, event=20, cuts=True)

    def refused(changed: SetUp, text: str, **more: Any) -> None:
        trainer = build(changed, tmp_path, True)
        with infinity.engine(trainer.model), pytest.raises(ConfigError, match=text):
            trainer.train(**more)

    more = set_up.args | {"per_device_train_batch_size": 2}
    changed = set_up._replace(args=more)
    refused(changed, "has per_device_train_batch_size 3, and here it is 2")
    refused(set_up._replace(patience=1), r"\['TrainerControl'\], and here they are \['EarlyStop")
    trainer = build(changed, tmp_path, True)
    with infinity.engine(trainer.model):
        for _ in range(2):  # a refused call is no training
            with pytest.raises(ConfigError, match="has per_device_train_batch_size"):
                trainer.train()
    trainer = build(set_up, tmp_path, True)
    trainer._buffered_inputs = None  # as GRPOTrainer and RLOOTrainer have it
    with infinity.engine(trainer.model), pytest.raises(ConfigError, match="generated batches"):
        trainer.train()
    trainer = build(set_up, tmp_path, True)
    with infinity.engine(trainer.model):
        trainer.train()
        trainer.train()  # a second training, of the trained model
    trainer = build(set_up, tmp_path, True)
    with (
        infinity.engine(trainer.model),
        pytest.raises(ConfigError, match=r"is of train\(\) call 2"),
    ):
        trainer.train()


def test_a_resume_that_nothing_can_be_resumed_for_is_refused(tmp_path: Path) -> None:
    from transformers import Trainer

    from infinity.integrations.transformers import InfinityTrainer

    set_up = SET_UPS["dropout"]
    config = infinity.Config(nvme=tmp_path, durability="step")
    plain = build(set_up, tmp_path / "plain", False, plain=True)
    assert type(plain) is Trainer
    given = {"args": plain.args, "infinity_config": config, "resume": True}
    with pytest.raises(ConfigError, match="give model=model_init"):
        InfinityTrainer(model_init=lambda: plain.model, **given)
    with pytest.raises(ConfigError, match="durability"):
        InfinityTrainer(plain.model, **given | {"infinity_config": infinity.Config(nvme=tmp_path)})
    infinity.wrap(plain.model, config)
    with pytest.raises(ConfigError, match=re.escape("give it to infinity.wrap")):
        InfinityTrainer(plain.model, **given | {"infinity_config": None})


def test_a_complete_training_is_resumed_as_complete(tmp_path: Path) -> None:
    """It trains no step more, whatever the script asks for."""
    expected = train(SET_UPS["dropout"], tmp_path)
    trainer = build(SET_UPS["dropout"], tmp_path, True)
    with infinity.engine(trainer.model):
        trainer.train(resume_from_checkpoint=True)
        assert digest_of(trainer.model) == expected["weights"]
        assert trainer.state.global_step == expected["steps"]


def test_a_log_that_lost_its_end_is_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a power cut, which may take bytes that no flush has made durable."""
    set_up = SET_UPS["dropout"]
    expected = train(set_up, tmp_path / "whole")
    with pytest.raises(Cut):
        train(set_up, tmp_path / "cut", event=30, cuts=True)
    path = tmp_path / "cut" / "out" / "metrics.jsonl"
    os.truncate(path, path.stat().st_size - 10)
    found = train(set_up, tmp_path / "cut")
    assert found["weights"] == expected["weights"]
    assert "lost its last" in caplog.text
    assert found["log"][-3:] == expected["log"][-3:]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_save_that_is_cut_off_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no directory that looks like a checkpoint."""
    from transformers.trainer_utils import get_last_checkpoint

    set_up = SET_UPS["evaluation, checkpoints, cosine"]
    whole = build(set_up, tmp_path / "whole", False)
    with infinity.engine(whole.model):
        whole.train()
        expected = digest_of(whole.model)
    assert sorted(path.name for path in (tmp_path / "whole" / "out").glob("*")) == [
        "checkpoint-10",
        "checkpoint-9",
        "metrics.jsonl",
    ]
    trainer = build(set_up, tmp_path / "cut", False)
    real, saves = Engine.save_checkpoint, []

    def cut(self: Any, output: Path, *args: Any, **kwargs: Any) -> None:
        saves.append(output)
        if len(saves) == 2:
            raise Cut
        real(self, output, *args, **kwargs)

    monkeypatch.setattr(Engine, "save_checkpoint", cut)
    with infinity.engine(trainer.model), pytest.raises(Cut):
        trainer.train()
    last = get_last_checkpoint(str(tmp_path / "cut" / "out"))
    assert Path(last).name == "checkpoint-3"
    assert (tmp_path / "cut" / "out" / "checkpoint-3" / "trainer_state.json").exists()
    left = {path.name for path in (tmp_path / "cut" / "out").iterdir()}
    assert left == {"checkpoint-3", "metrics.jsonl"}
    again = build(set_up._replace(config={"durability": "off"}), tmp_path / "cut", False)
    with infinity.engine(again.model):
        again.train(resume_from_checkpoint=True)
        assert digest_of(again.model) == expected


def test_the_log_follows_the_lines_of_others(tmp_path: Path) -> None:
    """A training and its resume leave what stands in the file already."""
    path = tmp_path / "out" / "metrics.jsonl"
    path.parent.mkdir()
    path.write_text("lines of another program\n")
    expected = train(SET_UPS["dropout"], tmp_path / "whole")
    (tmp_path / "drive").mkdir()
    with pytest.raises(Cut):
        train(SET_UPS["dropout"], tmp_path, event=30, cuts=True)
    found = train(SET_UPS["dropout"], tmp_path)
    first, *lines = path.read_text().splitlines()
    assert first == "lines of another program"
    assert len(lines) == expected["lines"] and found["log"] == expected["log"]


def test_steps_that_no_trainer_made_are_not_resumed(tmp_path: Path) -> None:
    from infinity.integrations.transformers import InfinityTrainer

    set_up = SET_UPS["dropout"]
    model, config = model_of(set_up, False), infinity.Config(nvme=tmp_path, durability="step")
    with infinity.engine(infinity.wrap(model, config)):
        optimizer = infinity.AdamW(model.parameters(), lr=1e-3)
        ids = torch.zeros(1, 4, dtype=torch.long)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    plain = build(set_up, tmp_path / "plain", False, plain=True)
    trainer = InfinityTrainer(
        model_of(set_up, False), plain.args, infinity_config=config, resume=True
    )
    with infinity.engine(trainer.model), pytest.raises(ConfigError, match="without a Trainer"):
        trainer.train()


def test_a_resumed_training_may_have_more_epochs(tmp_path: Path) -> None:
    set_up = SET_UPS["dropout"]
    with pytest.raises(Cut):
        train(set_up, tmp_path, event=30, cuts=True)
    found = train(set_up._replace(args=set_up.args | {"num_train_epochs": 3}), tmp_path)
    assert found["steps"] == 15 and [entry["step"] for entry in found["log"][:-1]] == [
        *range(1, 16)
    ]


def test_a_signal_after_the_last_step_ends_the_process(tmp_path: Path) -> None:
    trainer = build(SET_UPS["dropout"], tmp_path, False)

    class Late(TrainerCallback):  # type: ignore[misc]
        def on_train_end(self, *_: Any, **__: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer.add_callback(Late())
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as ended:
            trainer.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM


def test_micro_batches_of_a_step_that_was_cut_off_are_not_trained(tmp_path: Path) -> None:
    """Neither are those of the next step counted with them."""
    losses = {}
    for order in ("horizontal", "vertical"):
        args = {"gradient_accumulation_steps": 3, "num_train_epochs": 1}
        set_up = SetUp(args, {"accumulation": order}, dropout=0.0)
        trainer = build(set_up, tmp_path / order, False)

        class Once(TrainerCallback):  # type: ignore[misc]
            calls = 0

            def on_substep_end(self, *_: Any, **__: Any) -> None:
                self.calls += 1
                if self.calls == 2:
                    raise Cut

        trainer.add_callback(Once())
        with infinity.engine(trainer.model):
            with pytest.raises(Cut):
                trainer.train()
            trainer.model.zero_grad()
            trainer.train()
            losses[order] = [entry.get("loss") for entry in trainer.state.log_history]
    assert losses["vertical"] == losses["horizontal"]


def test_a_loss_that_is_no_number_is_logged_alike_in_both_orders(tmp_path: Path) -> None:
    """Trainer replaces it by the mean of the losses before."""
    losses = {}
    for order in ("horizontal", "vertical"):
        set_up = SetUp(
            {"gradient_accumulation_steps": 2, "num_train_epochs": 1, "max_grad_norm": 0.0},
            {"accumulation": order, "durability": "off"},
            dropout=0.0,
        )
        trainer = build(set_up, tmp_path / order, False)
        real, calls = trainer.compute_loss, []

        def compute(*args: Any, real: Any = real, calls: Any = calls, **kwargs: Any) -> Any:
            calls.append(0)
            factor = float("nan") if len(calls) == 3 else 1.0
            return real(*args, **kwargs) * factor

        trainer.compute_loss = compute
        with infinity.engine(trainer.model):
            trainer.train()
            losses[order] = [entry.get("loss") for entry in trainer.state.log_history][:2]
    assert losses["vertical"] == losses["horizontal"] and all(
        map(math.isfinite, losses["vertical"])
    )


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_scaler_grows_as_after_its_update(steps: int) -> None:
    real, ours = (torch.amp.GradScaler("cpu", growth_interval=2) for _ in range(2))
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for _ in range(steps):
        real.scale(weight.sum()).backward()
        real.step(optimizer)
        real.update()
        grow(ours)
    assert ours.state_dict() == real.state_dict()
