"""Blocks that the engine recomputes: the same numbers as without, one more forward of each, and
only their inputs kept."""

from __future__ import annotations

import functools
import gc
import sys
import tempfile
import warnings
import weakref
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.activations import saved_tensors
from support.configs import config_of
from support.models import Block, Transformer, text_batch, transformer
from support.probe import Probe
from support.rank_group import RANKS, run_ranks
from support.recomputed import (
    LEAST,
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
    # torch.compile looks at what a checkpoint gives back.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

PLACES: dict[str, tuple[bool, dict[str, Any]]] = {
    "host memory": (False, {}),
    "a device": (True, {"gpu_cache": 0}),
    "gpu": (True, {"parameters": "gpu", "gradients": "gpu", "optimizer": "gpu"}),
    "nvme": (False, {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme", "cache": 0}),
}
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "gpu": {},
    "cpu": {"activations": "cpu"},
    "nvme": {"activations": "nvme", "activation_memory": "24KiB"},
}
HIDDEN = 2 * 8 * 32 * 4
"""Bytes of what goes into a block: 2 rows of 8 tokens, 32 wide, in fp32."""


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_tensors, "LEAST_BYTES", 512)


@functools.cache
def without(order: str = "") -> list[torch.Tensor]:
    with wrapped(transformer(dropout=0.1)) as engine:
        found = train(engine, order=order)
        assert engine.report().recomputed == ()
        return found


# The same numbers


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("place", PLACES)
def test_numbers_are_those_without(place: str, activations: str) -> None:
    discrete, config = PLACES[place]
    expected, model = without(), transformer(dropout=0.1)
    config = config | ACTIVATIONS[activations] | {"recompute": "all"}
    with wrapped(model, discrete, **config) as engine:
        calls = counted(model)
        assert_same(train(engine), expected)
        assert calls == dict.fromkeys(names(model), 2 * 4)
        assert engine.report().recomputed == names(model)


@pytest.mark.parametrize("order", ["horizontal", "vertical"])
@pytest.mark.parametrize("activations", ["gpu", "cpu"])
def test_numbers_are_those_without_where_micro_batches_run_together(
    order: str, activations: str
) -> None:
    config = ACTIVATIONS[activations] | {"gpu_cache": 0, "recompute": "all"}
    with wrapped(transformer(dropout=0.1), True, **config) as engine:
        assert_same(train(engine, order=order), without(order))


def test_a_forward_under_autocast_is_repeated_under_it() -> None:
    def run(**config: Any) -> list[torch.Tensor]:
        with wrapped(transformer(dropout=0.1), **config) as engine:
            torch.manual_seed(5)
            with torch.autocast("cpu", torch.bfloat16):
                loss = engine.model(**text_batch(0)).loss
            loss.backward()  # outside of it
            return [loss.detach(), *(engine.gradient(p) for p in engine.model.parameters())]

    expected = run()
    assert expected[0] != without()[0]
    assert_same(run(recompute="all"), expected)


def test_a_backward_may_come_again_and_be_recorded_itself() -> None:
    def run(**config: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
        with wrapped(model, **config) as engine:
            x = torch.linspace(-1, 1, 16).view(2, 8).requires_grad_()
            y = model(x).square().sum()
            (first,) = torch.autograd.grad(y, x, create_graph=True)
            first.square().sum().backward(retain_graph=True)
            y.backward()
            assert x.grad is not None
            return [first.detach(), x.grad, *(engine.gradient(p) for p in model.parameters())]

    assert_same(run(recompute="all"), run())


# What is kept


def test_only_the_inputs_of_blocks_are_kept() -> None:
    """Those of the 4 blocks, what the norm and the head save, and the 64 logits per token."""
    kept = {}
    for recompute in ("off", "all"):
        model = transformer()
        config = {"activations": "cpu", "recompute": recompute}
        with wrapped(model, True, gpu_cache=0, **config) as engine:
            train(engine)
            kept[recompute] = engine.report().activations_peak
    assert kept["all"] == 4 * HIDDEN + 2 * HIDDEN + 2 * HIDDEN
    assert kept["off"] > 40 * HIDDEN


def test_tensors_inside_of_other_inputs_are_offloaded_too() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor, *, more: dict[str, Any]) -> torch.Tensor:
            return x + self.linear(x).sin() * more["parts"][0].cos() * more["scale"]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Nested() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            for block in self.blocks:
                x = block(x, more={"parts": [y], "scale": 2})
            return x.sum()

    x = torch.ones(16, 32)
    with wrapped(Model(), True, gpu_cache=0, activations="cpu", recompute="all") as engine:
        engine.model(x).backward()
        assert engine.report().activations_peak == 4 * x.nbytes, "3 of x, and y once"


def test_the_graph_keeps_nothing_of_a_block_but_its_input() -> None:
    model = transformer()
    inside: list[weakref.ref[torch.Tensor]] = []
    model.blocks[1].up.register_forward_hook(lambda *values: inside.append(weakref.ref(values[2])))  # type: ignore[union-attr]
    with wrapped(model, recompute="all") as engine:
        loss = engine.model(**text_batch(0)).loss
        gc.collect()
        assert [each() for each in inside] == [None]
        loss.backward()


def test_a_loss_that_is_dropped_frees_what_its_forward_kept() -> None:
    with wrapped(transformer(), True, gpu_cache=0, activations="cpu", recompute="all") as engine:
        loss = engine.model(**text_batch(0)).loss
        tier = Probe(engine).activations
        assert tier is not None and tier.memory.used > 0
        del loss
        for _ in range(3):
            engine.model(**text_batch(1))
        gc.collect()
        with torch.no_grad():
            engine.model(**text_batch(0))
        engine.close()
        assert tier.memory.used == 0


# Which forwards


def test_without_gradients_nothing_is_recomputed() -> None:
    model = transformer(dropout=0.1)
    with wrapped(model, recompute="all") as engine:
        calls = counted(model)
        with torch.no_grad():
            engine.model(**text_batch(0))
        assert calls == dict.fromkeys(names(model), 1)
        assert engine.report().recomputed == ()
        model.eval()
        engine.model(**text_batch(0)).loss.backward()
        assert calls == dict.fromkeys(names(model), 3), "gradients of an evaluation are some, too"


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("outside", [True, False])
def test_what_the_model_checkpoints_by_itself(outside: bool, reentrant: bool) -> None:
    """Nothing is added to a checkpoint around the call of a block. One inside of it is seen in the
    first forward, and what is left to it calls the block no more."""

    class Within(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = checkpoint(super().forward, x, use_reentrant=reentrant)
            return result

    def build() -> Transformer:
        model = transformer(dropout=0.1)
        if outside:
            vars(model)["run_block"] = lambda number, block, x: checkpoint(
                block, x, use_reentrant=reentrant
            )
        else:
            for block in model.blocks:
                block.__class__ = Within
        return model

    model = build()
    with wrapped(model, recompute="all") as engine:
        calls = counted(model)
        assert_same(train(engine), without())
        both = not outside and reentrant
        assert calls == dict.fromkeys(names(model), 2 * 4 if outside or both else 1 + 4)
        assert engine.report().recomputed == (names(model) if both else ())
        for block in model.blocks:
            block.__class__ = Block
        vars(model).pop("run_block", None)
        for _ in range(2):
            engine.model(**text_batch(0)).loss.backward()
        assert engine.report().recomputed == names(model), "the model does it no more"


def test_a_block_that_is_called_twice_is_recomputed_twice() -> None:
    def build() -> Transformer:
        model = transformer(dropout=0.1)
        vars(model)["run_block"] = lambda number, block, x: block(model.blocks[0](x))
        return model

    with wrapped(build()) as engine:
        expected = train(engine)
    model = build()
    with wrapped(model, recompute="all") as engine:
        calls = counted(model)
        assert_same(train(engine), expected)
        assert calls == {name: 2 * 4 * (5 if name == "blocks.0" else 1) for name in names(model)}


def test_hooks_of_the_user_run_again() -> None:
    """They change what goes into a block, what comes out of it, and what a module below it gets."""

    def run(**config: Any) -> list[torch.Tensor]:
        model = transformer(dropout=0.1)

        def hook(block: Block) -> None:
            block.register_forward_pre_hook(lambda module, args: (args[0].tanh(),))
            block.register_forward_hook(lambda module, args, output: output * args[0].cos())
            block.up.register_forward_hook(lambda module, args, output: output.sin())

        for block in model.blocks[:2]:
            hook(block)
        with wrapped(model, **config) as engine:
            for block in model.blocks[2:]:
                hook(block)
            return train(engine)

    assert_same(run(recompute="all"), run())


def test_an_input_that_is_changed_after_its_block_is_refused() -> None:
    class Plus(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.bias

    blocks = nn.Sequential(*(Plus() for _ in range(3)))
    with wrapped(blocks, recompute="all") as engine:
        x = torch.ones(2, 8) * 2
        y = blocks[0](x)
        x.add_(1)
        y.sum().backward()  # the block has saved nothing: there is nothing to recompute
        assert torch.equal(engine.gradient(blocks[0].bias), torch.full((8,), 2.0))  # type: ignore[arg-type]
    model = transformer()
    with wrapped(model, recompute="all"):
        x = torch.ones(2, 8, 32) * 2
        y = model.blocks[0](x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("whole", [True, False])
def test_compiled_blocks(whole: bool, caplog: pytest.LogCaptureFixture) -> None:
    """They are recomputed where each is compiled on its own, and else left as they are."""

    def run(**config: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        model = transformer()
        with wrapped(model, **config) as engine:
            if not whole:
                for block in model.blocks:
                    block.compile(backend="aot_eager")
                found = train(engine)
            else:
                loss = torch.compile(model, backend="aot_eager")(**text_batch(0)).loss
                loss.backward()
                found = [loss.detach(), *(engine.gradient(p) for p in model.parameters())]
            if config:
                assert engine.report().recomputed == (() if whole else names(model))
            return found

    expected = run()
    with caplog.at_level("WARNING", "infinity"):
        assert_same(run(recompute="all"), expected)
    said = [each for each in caplog.messages if each.startswith("recompute=")]
    assert len(said) == whole
    assert not said or "compile block after block (block.compile())" in said[0]


# Odd blocks


@dataclass
class Result:
    x: torch.Tensor
    extra: Any = None


class Odd(nn.Module):
    """Takes and gives what `way` says."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(8, 8)
        self.kept: torch.Tensor | None = None

    def forward(self, x: Any) -> Any:
        x = x["x"] if isinstance(x, dict) else x.x if isinstance(x, Result) else x
        y = x + self.linear(x).tanh()
        match self.way:
            case "dict":
                return {"x": y, "extra": None}
            case "dataclass":
                return Result(y, [y * 2])
            case "tuple":
                return y, None, 3
            case "none":
                self.kept = y
                return None
        return y


class OddModel(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.blocks = way, nn.ModuleList(Odd(way) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value: Any = x
        for block in self.blocks:
            value = block(value)
            if isinstance(value, tuple):
                value = value[0]
            if value is None:
                value, block.kept = block.kept, None
        value = value["x"] if isinstance(value, dict) else value
        total: torch.Tensor = (value.x if isinstance(value, Result) else value).square().sum()
        return total


@pytest.mark.parametrize("way", ["dict", "dataclass", "tuple", "none"])
def test_odd_outputs(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """A dataclass that goes into a block might be changed there: it is not recomputed."""

    def run(**config: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with wrapped(OddModel(way), **config) as engine:
            loss = engine.model(torch.linspace(-1, 1, 16).view(2, 8))
            loss.backward()
            if config:
                of = 1 if way == "dataclass" else 3
                assert len(engine.report().recomputed) == of
            return [loss.detach(), *(engine.gradient(p) for p in engine.model.parameters())]

    expected = run()
    assert_same(run(recompute="all"), expected)
    says = "recompute='all' leaves each Odd as it is: it is given a Result, which its forward"
    assert len([each for each in caplog.messages if each.startswith(says)]) == (way == "dataclass")


def test_blocks_that_change_their_buffers_and_inputs() -> None:
    """Each forward, recomputed or not, finds what it found, and changes it once."""

    def run(**config: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with wrapped(CountingModel(), **config) as engine:
            optimizer = infinity.AdamW(engine.model.parameters(), lr=1e-2)
            losses = []
            for step in range(3):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
                loss = engine.model(x)
                loss.backward(retain_graph=True)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            return [*losses, *engine.state_dict().values()]

    assert_same(run(recompute="all"), run())


def test_a_buffer_that_is_changed_from_the_second_forward_on_is_refused() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.changes = nn.Linear(8, 8), False
            self.register_buffer("scale", torch.ones(512, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.changes:
                self.scale.mul_(2)
            return self.linear(x).tanh() * self.scale[:2]

    model = nn.Sequential(*(Late() for _ in range(3)))
    with wrapped(model, recompute="all"):
        model(torch.ones(2, 8)).sum().backward()
        model[1].changes = True
        loss = model(torch.ones(2, 8)).sum()
        refusal = r"the forward of 1 changed its tensor 'scale' in .* set Config\(recompute='off'\)"
        with pytest.raises(RuntimeError, match=refusal):
            loss.backward()
        model(torch.ones(2, 8)).sum().backward()  # it is known now


# Endings


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("recomputing", [False, True])
def test_an_error_inside_of_a_block_leaves_nothing_behind(
    recomputing: bool, error: type[BaseException]
) -> None:
    model = transformer(dropout=0.1)
    left = [0]

    def fail(*_: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise error("on purpose")

    with wrapped(model, recompute="all") as engine:
        model.blocks[2].up.register_forward_pre_hook(fail)  # type: ignore[union-attr]
        left[0] = 2 if recomputing else 1
        with pytest.raises(error, match="on purpose"):
            engine.model(**text_batch(0)).loss.backward()
        assert left == [0]
        Probe(engine).end_interrupted()
        engine.model.zero_grad()
        assert_same(train(engine), without())
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_a_closed_engine_says_what_became_of_a_forward() -> None:
    with wrapped(transformer(), recompute="all") as engine:
        loss = engine.model(**text_batch(0)).loss
        engine.close()
        with pytest.raises(infinity.InfinityError, match="closed"):
            loss.backward()


def test_a_model_is_collected_though_its_blocks_were_recomputed() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(**LEAST | {"nvme": folder, "device": "cpu", "recompute": "all"})
        model = infinity.wrap(transformer(), config)
        model(**text_batch(0)).loss.backward()
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None


# Several ranks


def serve(directory: Path, rank: int, ranks: int) -> None:
    vars(sys.modules["infinity.activations.saved_tensors"])["LEAST_BYTES"] = 512
    dist.init_process_group("gloo", f"file://{directory}/rendezvous", rank=rank, world_size=ranks)
    found = []
    for recompute in ("off", "all"):
        model = transformer(dropout=0.1)
        folder = tempfile.mkdtemp(dir=directory)
        options = LEAST | {"nvme": folder, "device": "cpu", "recompute": recompute}
        infinity.wrap(model, config_of(**options), group=dist.group.WORLD)
        with infinity.engine(model) as engine:
            calls = counted(model)
            found.append(train(engine))
            assert calls == dict.fromkeys(names(model), 4 * (1 + (recompute == "all")))
    assert_same(*found)
    dist.destroy_process_group()


def test_ranks_recompute_together(tmp_path: Path) -> None:
    run_ranks(__file__, tmp_path, RANKS)


# Families of transformers


def test_a_model_of_transformers(caplog: pytest.LogCaptureFixture) -> None:
    """With its cache of keys and values nothing is recomputed, and a warning says what to do."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
    )

    def run(use_cache: bool, **options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        with wrapped(model, **options) as engine:
            loss = model(**text_batch(0), use_cache=use_cache).loss
            loss.backward()
            if options:
                recomputed = ("model.layers.0", "model.layers.1", "model.layers.2")
                assert engine.report().recomputed == (() if use_cache else recomputed)
            return [loss.detach(), *(engine.gradient(p) for p in model.parameters())]

    expected = run(True)
    assert_same(run(False, recompute="all"), expected)
    assert not caplog.messages
    assert_same(run(True, recompute="all"), expected)
    (said,) = caplog.messages
    assert "it is given a DynamicCache" in said and "use_cache=False" in said
    with wrapped(transformers.LlamaForCausalLM(config), recompute="all") as engine:
        with warnings.catch_warnings():  # some versions have another name for it
            warnings.simplefilter("ignore")
            engine.model.gradient_checkpointing_enable({"use_reentrant": False})
        calls: Counter[str] = Counter()
        engine.model.model.layers[1].register_forward_pre_hook(lambda *_: calls.update(["1"]))
        for _ in range(3):
            engine.model(**text_batch(0), use_cache=False).loss.backward()
        # A checkpoint around the call of a layer calls it again, one inside of it does not.
        assert calls["1"] in (2 * 3, 1 + 3)
        assert engine.report().recomputed == ()
