"""The warning that a batch may not fit, before it would be an out-of-memory error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import infinity
from infinity.activations import first_batch
from infinity.free_memory import Memory
from support.discrete import DiscreteDevice

LAYERS, HIDDEN, WORDS, TOKENS = 3, 16, 64, 2 * 8
INPUT = TOKENS * HIDDEN * 4
LOGITS = TOKENS * WORDS * (4 + 8)
KEPT, RECOMPUTED = LAYERS * 17 * INPUT + LOGITS, (LAYERS + 17) * INPUT + LOGITS
IDS = torch.arange(TOKENS).view(2, 8)

Train = Callable[..., list[str]]


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Train:
    """Runs two forwards and backwards where so many bytes are free, and returns the warnings."""

    def run(
        free: int,
        change: Callable[[Any], Any] = lambda model: model,
        gpu: bool = False,
        **fields: Any,
    ) -> list[str]:
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=HIDDEN,
                intermediate_size=32,
                num_hidden_layers=LAYERS,
                num_attention_heads=2,
                num_key_value_heads=2,
                vocab_size=WORDS,
                use_cache=False,
            )
        )
        change(model)
        memory = Memory(1 << 30, free, "this machine")
        monkeypatch.setattr(first_batch, "read_host", lambda: memory)
        if gpu:
            monkeypatch.setattr("infinity.build.ComputeDevice", DiscreteDevice)
        config = infinity.Config(gpu_memory="8MiB", cpu_memory="32MiB", **fields)
        caplog.clear()
        infinity.wrap(model, config)
        with (
            closing(infinity.engine(model)),
            caplog.at_level(logging.WARNING, "infinity"),
            monkeypatch.context() as patch,
        ):
            patch.setattr(DiscreteDevice, "memory", lambda self: memory)
            with torch.no_grad():
                model(input_ids=IDS)
            run_forward(model, config)
            run_forward(model, config)
        return [each.getMessage() for each in caplog.records if "may not fit" in each.getMessage()]

    return run


def run_forward(model: Any, config: infinity.Config) -> None:
    loss = model(input_ids=IDS, labels=IDS).loss
    if not config.inference:
        loss.backward()


def checkpointed(model: Any) -> None:
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


@pytest.mark.parametrize(
    ("need", "fields", "change"),
    [
        (KEPT, {}, None),
        (RECOMPUTED, {"recompute": "all"}, None),
        (RECOMPUTED, {"recompute": "auto"}, None),
        (RECOMPUTED, {}, checkpointed),
        (KEPT - LOGITS + 4096, {}, lambda model: infinity.chunked_loss(model, 4096)),
    ],
)
def test_it_comes_once_where_one_byte_is_missing(
    need: int, fields: dict[str, Any], change: Any, warned: Train
) -> None:
    given = {} if change is None else {"change": change}
    assert warned(need, **fields, **given) == []
    assert len(warned(need - 1, **fields, **given)) == 1


def test_it_says_how_much_and_the_ways_out(warned: Train) -> None:
    (said,) = warned(10_000)
    assert said == (
        "a micro-batch of 16 tokens may not fit: by an estimate, activations take 51 KiB and "
        "logits 12 KiB, and 9.77 KiB of this machine are free; give it fewer tokens, or set "
        'recompute="all", or lower gpu_memory'
    )
    (said,) = warned(10_000, recompute="all")
    assert said.endswith("are free; give it fewer tokens, or lower gpu_memory")


def test_what_leaves_the_device_needs_no_room_there(warned: Train) -> None:
    device = {"tuning": {"gpu_cache": 0}}
    (said,) = warned(RECOMPUTED - LAYERS * INPUT - 1, recompute="all", gpu=True, **device)
    assert 'or set activations="cpu", or lower gpu_memory' in said
    away = {"recompute": "all", "activations": "cpu", "gpu": True, **device}
    assert warned(RECOMPUTED - LAYERS * INPUT, **away) == []
    (said,) = warned(RECOMPUTED - LAYERS * INPUT - 1, **away)
    assert said.endswith("are free; give it fewer tokens, or lower gpu_memory")


def test_where_logits_are_the_most_it_names_their_way_out(
    warned: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinity.placement.activations.LOGIT_COPIES", 1 << 20)
    (said,) = warned(10_000)
    assert "or call infinity.chunked_loss(model), or lower gpu_memory" in said


def test_a_model_that_only_runs_saves_nothing(warned: Train) -> None:
    assert warned(0, inference=True) == []
