"""`recompute="auto"`: what the engine measures of each block, what it decides, and that no decision
changes a number."""

from __future__ import annotations

import functools
import gc
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.activations import saved_tensors, treatments
from infinity.activations.saved_tensors import SavedInPlace
from infinity.placement.treatment import Treatment
from support.models import Block, Transformer, text_batch, transformer
from support.rank_group import RANKS, run_ranks
from support.recomputed import (
    CountingModel,
    assert_same,
    counted,
    names,
    train,
    wrapped,
)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.timeout(120),
]

AUTO: dict[str, Any] = {"recompute": "auto"}
WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "gpu": (False, {}),
    "cpu": (True, {"activations": "cpu", "gpu_cache": 0}),
    "nvme": (False, {"activations": "nvme", "activation_memory": "48KiB"}),
}
EACH = st.sampled_from(["keep", "offload", "recompute"])
NAMES = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_tensors, "LEAST_BYTES", 512)


def force(patch: pytest.MonkeyPatch, decisions: list[tuple[Treatment, ...]]) -> None:
    """Decide so after the first steps, one after the other, and then again from the first."""
    turns = itertools.cycle(decisions)
    patch.setattr(treatments, "DECISIONS", 99)
    patch.setattr(treatments, "choose", lambda blocks, others, room: next(turns))


# The same numbers


@functools.cache
def without(order: str = "") -> list[torch.Tensor]:
    with wrapped(transformer(dropout=0.1)) as engine:
        return train(engine, steps=4, order=order)


@pytest.mark.parametrize("way", WAYS)
@given(st.lists(st.tuples(EACH, EACH, EACH, EACH), min_size=1, max_size=3))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_decision_changes_a_number(way: str, decisions: list[Any]) -> None:
    """Dropout, tied embeddings, two micro-batches per step, and another decision in each."""
    discrete, config = WAYS[way]
    model = transformer(dropout=0.1)
    with pytest.MonkeyPatch.context() as patch:
        force(patch, decisions)
        with wrapped(model, discrete, **config | AUTO) as engine:
            calls = counted(model)
            assert_same(train(engine, steps=4), without())
            turns = [decisions[i % len(decisions)] for i in range(3)]
            for number, name in enumerate(names(model)):
                again = sum(turn[number] == "recompute" for turn in turns)
                assert calls[name] == 2 * (4 + 1 + again), "the first step recomputes all"
            last = [name for name, each in zip(NAMES, turns[2], strict=True) if each == "recompute"]
            assert engine.report().recomputed == tuple(last)


@pytest.mark.parametrize("order", ["horizontal", "vertical"])
@given(st.tuples(EACH, EACH, EACH, EACH))
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
def test_nor_where_micro_batches_run_together(order: str, decision: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        force(patch, [decision])
        discrete, config = WAYS["cpu"]
        with wrapped(transformer(dropout=0.1), discrete, **config | AUTO) as engine:
            assert_same(train(engine, steps=4, order=order), without(order))


@given(st.lists(st.tuples(EACH, EACH, EACH), min_size=1, max_size=3))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_nor_with_buffers_that_change_and_an_evaluation_between(decisions: list[Any]) -> None:
    """Batch norm counts each forward once, recomputed or not, trained or evaluated."""
    with pytest.MonkeyPatch.context() as patch:
        force(patch, decisions)
        assert_same(count(**AUTO), counted_without())


def count(**config: Any) -> list[torch.Tensor]:
    """Losses, outputs and states of four steps, with forwards between that train nothing."""
    torch.manual_seed(0)
    model, found = CountingModel(), []
    with wrapped(model, **config) as engine:
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            for _ in range(2):
                loss = model(x)
                loss.backward()
                with torch.no_grad():
                    found.append(model(x))
            model.eval()
            found += [model(x).detach(), loss.detach()]
            model.train()
            optimizer.step()
            optimizer.zero_grad()
        return [*found, *engine.state_dict().values()]


counted_without = functools.cache(count)


# What is measured


def plainly_saved(x: torch.Tensor) -> tuple[int, int]:
    """Bytes of the input, and of what else autograd keeps of a forward of one block in plain
    PyTorch, parameters left out; each storage once."""
    block = transformer(dropout=0.1).blocks[1]
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x)
    inside = sum(s.nbytes() for at, s in kept.items() if at != x.untyped_storage().data_ptr())
    return x.nbytes, inside


@pytest.mark.parametrize("decision", ["keep", "offload", "recompute"])
def test_bytes_are_those_that_plain_torch_keeps(
    decision: Treatment, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plainly_saved(torch.ones(2, 8, 32, requires_grad=True))
    assert expected[0] == 2 * 8 * 32 * 4 and expected[1] > 10 * expected[0]
    force(monkeypatch, [(decision,) * 4])
    discrete, config = WAYS["cpu"]
    with wrapped(transformer(dropout=0.1), discrete, **config | AUTO) as engine:
        assert engine.report().blocks == {}
        train(engine)
        blocks = engine.report().blocks
        assert tuple(blocks) == NAMES
        for each in blocks.values():
            assert (each.input_bytes, each.inside_bytes) == expected
            assert each.treatment == decision
            assert each.forward_seconds > 0


def test_forwards_before_one_backward_add_up() -> None:
    inputs, inside = plainly_saved(torch.ones(2, 8, 32, requires_grad=True))
    with wrapped(transformer(dropout=0.1), **AUTO) as engine:
        optimizer = infinity.AdamW(engine.model.parameters())
        for together in (1, 3, 2):
            losses = [engine.model(**text_batch(i)).loss for i in range(together)]
            torch.stack(losses).sum().backward()
        optimizer.step()
        found = engine.report().blocks["blocks.1"]
        assert (found.input_bytes, found.inside_bytes) == (3 * inputs, 3 * inside)


def test_nothing_is_measured_without_it() -> None:
    for recompute in ("off", "all"):
        with wrapped(transformer(), recompute=recompute) as engine:
            train(engine, steps=1)
            report = engine.report()
            assert (report.blocks, report.activation_room) == ({}, 0)


# What is decided


def kept_in_place() -> int:
    """Bytes that autograd keeps for a backward on the compute device, in forwards of wrapped
    models; each storage once. Buffers of fewer than 64 bytes are not counted."""
    gc.collect()
    storages = {
        each.tensor.untyped_storage().data_ptr(): each.tensor.untyped_storage().nbytes()
        for each in gc.get_objects()
        if isinstance(each, SavedInPlace)
    }
    return sum(nbytes for nbytes in storages.values() if nbytes >= 64)


def held(engine: infinity.Engine, rows: int = 2) -> int:
    """Like `kept_in_place`, after a forward; trains a step."""
    optimizer = infinity.AdamW(engine.model.parameters())
    loss = engine.model(**text_batch(0, rows)).loss
    found = kept_in_place()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return found


def room_for(kept: int) -> int:
    """A `gpu_memory` that leaves room for so many blocks that keep what they save, beside what is
    saved outside and the inputs of the others."""
    with wrapped(transformer(dropout=0.1), **AUTO) as engine:
        found = [held(engine) for _ in range(4)]
        report = engine.report()
        block = report.blocks["blocks.1"]
        device = report.budgets["gpu"] - report.activation_room
        others = found[-1] - 4 * (block.input_bytes + block.inside_bytes)
    most = kept * (block.input_bytes + block.inside_bytes)
    return device + others + most + (4 - kept) * block.input_bytes + 4096


@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_as_many_blocks_keep_as_there_is_room_for(kept: int) -> None:
    """The last one is never recomputed, which would free nothing. What is held is never more than
    the room, from the first step on."""
    memory = room_for(kept)
    model = transformer(dropout=0.1)
    with wrapped(model, gpu_memory=memory, **AUTO) as engine:
        calls = counted(model)
        first = held(engine)
        room = engine.report().activation_room
        assert calls == dict.fromkeys(names(model), 2)
        found = [held(engine) for _ in range(3)]
        assert first <= min(found) <= max(found) <= room
        report = engine.report()
        assert len(report.recomputed) == 4 - kept
        assert NAMES[3] not in report.recomputed
        for name in names(model):
            treatment = report.blocks[name].treatment
            assert treatment == ("recompute" if name in report.recomputed else "keep")
        assert sum(calls.values()) >= 4 * 4 + 4 + (4 - kept)


def test_where_nothing_fits_all_is_recomputed() -> None:
    with wrapped(transformer(), gpu_memory=room_for(1) - 40960, **AUTO) as engine:
        train(engine, steps=3)
        assert engine.report().recomputed == NAMES


def test_what_is_kept_is_not_offloaded() -> None:
    """With room on the device and a tier for activations."""
    discrete, config = WAYS["cpu"]
    with wrapped(transformer(), discrete, **config | AUTO) as engine:
        train(engine, steps=1)
        assert engine.report().activations_offloaded > 0, "the inputs of all blocks"
        train(engine, steps=2)
        report = engine.report()
        assert {each.treatment for each in report.blocks.values()} == {"keep"}
        # The norm and the head are no blocks.
        assert report.activations_offloaded == 2 * (2 * 2048 + 4096)


def test_a_longer_batch_does_not_break_the_budget() -> None:
    """It recomputes all blocks, and the step after it has another choice."""
    memory = room_for(2)
    with wrapped(transformer(dropout=0.1), gpu_memory=memory, **AUTO) as engine:
        for _ in range(3):
            held(engine)
        room = engine.report().activation_room
        assert len(engine.report().recomputed) == 2
        assert held(engine, rows=3) <= room
        assert engine.report().recomputed == NAMES
        assert held(engine, rows=3) <= room
        after = engine.report().recomputed
        assert len(after) > 2
        assert held(engine, rows=2) <= room
        assert engine.report().recomputed == after, "figures never shrink"


def test_what_cannot_be_recomputed_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """A block that is given an object that it may change, and blocks that the model checkpoints by
    itself, around them or inside of them."""

    class Odd(Block):
        def forward(self, x: torch.Tensor, cache: Any = None, within: bool = False) -> Any:
            if within:
                return checkpoint(super().forward, x, use_reentrant=False)
            return super().forward(x)

    def build() -> Transformer:
        model = transformer(dropout=0.1)
        for block in model.blocks:
            block.__class__ = Odd

        def run(number: int, block: nn.Module, x: torch.Tensor) -> Any:
            if number == 0:
                return block(x, cache=_Cache())
            if number == 2:
                return checkpoint(block, x, use_reentrant=False)
            return block(x, within=number == 1)

        vars(model)["run_block"] = run
        return model

    memory = room_for(1)
    for budget in (memory, "16MiB"):
        with wrapped(build(), **AUTO | {"gpu_memory": budget}) as engine:
            assert_same(train(engine, steps=4), without())
            report = engine.report()
            assert tuple(report.blocks) == ("blocks.0", "blocks.3")
            assert report.blocks["blocks.0"].treatment == "keep"
    said = [each for each in caplog.messages if "leaves each Odd as it is" in each]
    assert said and said[0].startswith("recompute='auto' ")


class _Cache:
    """What a block may change."""


def test_a_second_optimizer_does_not_count_as_a_step() -> None:
    model = transformer()
    with wrapped(model, **AUTO) as engine:
        parts = [list(model.blocks.parameters()), [model.tokens.weight, model.places]]
        optimizers = [infinity.AdamW(part) for part in parts]
        calls = counted(model)
        for number in range(2):
            model(**text_batch(number)).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert calls == dict.fromkeys(names(model), 3), "recomputed in the first step alone"
        assert engine.report().recomputed == ()


# Several ranks


def serve(directory: Path, rank: int, ranks: int) -> None:
    """Ranks measure other seconds, and one has longer batches at times."""
    vars(saved_tensors)["LEAST_BYTES"] = 512
    device: Any = sys.modules["infinity.device"]
    turns = itertools.count()
    between = lambda self, begin, end: 1.0 + (next(turns) * (3 + 2 * rank)) % 7  # noqa: E731
    device.ComputeDevice.between = between
    dist.init_process_group("gloo", f"file://{directory}/rendezvous", rank=rank, world_size=ranks)
    memory, found, said = room_for(2), [], []
    for recompute in ("off", "auto"):
        model = transformer(dropout=0.1)
        with wrapped(model, recompute=recompute, gpu_memory=memory) as engine:
            torch.manual_seed(5)
            optimizer, losses = infinity.AdamW(model.parameters(), lr=1e-2), []
            for step in range(6):
                rows = 3 if step > 2 and rank == 1 else 2
                loss = model(**text_batch(step, rows)).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
                said.append(engine.report().recomputed)
            found.append([*losses, *engine.state_dict().values()])
    assert_same(*found)
    (directory / f"said{rank}").write_text(repr(said[6:]))
    dist.destroy_process_group()


def test_ranks_decide_alike(tmp_path: Path) -> None:
    run_ranks(__file__, tmp_path, RANKS)
    first, second = ((tmp_path / f"said{rank}").read_text() for rank in range(RANKS))
    assert first == second
    said = eval(first)
    assert said[0] == NAMES
    assert said[0] != said[2] == said[3], "a batch grew on one rank, in a step that was decided"
    assert len(said[4]) > len(said[3]), "and so the next one has another choice, on both"


# Families of transformers


@pytest.mark.parametrize("memory", ["16MiB", "700KiB"])
def test_a_model_of_transformers(memory: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )

    def run(**options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        with wrapped(model, **options) as engine:
            return train(engine, steps=3)

    assert_same(run(**AUTO, gpu_memory=memory), run())
