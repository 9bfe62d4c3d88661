"""A wrapped model trains exactly as the plain one: losses, gradient norms and weights, for many
models and ways to train.

Nearly everything here lives on NVMe, with the smallest budgets that the engine accepts and with
every freed slot poisoned, so a unit that is not where it should be gives NaN. Two references:
`torch.optim.AdamW`, to relative 1e-6, and `SpecifiedAdamW`, which is the update of
`native/cpu_adam/cpu_adam.h` in plain torch operations, bit for bit.
"""

from __future__ import annotations

import copy
import functools
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import infinity
from support import models
from support.configs import config_of
from support.models import FAMILIES, Block, Output, Transformer, rounded, text_batch, transformer
from support.specified_adamw import SETTINGS, SpecifiedAdamW, convert


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


Wrap = Callable[..., nn.Module]


@pytest.fixture
def wrap(tmp_path: Path) -> Iterator[Wrap]:
    """Wraps a model on NVMe with the smallest budgets, the compute device's times `room`.

    At the end of the test nothing may be in use any more.
    """
    made: list[nn.Module] = []  # kept alive, for an engine is closed with its model

    def make(model: nn.Module, precision: str = "fp32", room: int = 1, **options: Any) -> nn.Module:
        directory = tmp_path / f"nvme{len(made)}"
        directory.mkdir()
        budgets = {"gpu_memory": 1, "cpu_memory": 1}
        while True:
            wanted: dict[str, Any] = {
                "nvme": [directory],
                "precision": precision,
                "poison": True,
                "device": "cpu",
                "threads": 2,
            }
            try:
                infinity.wrap(model, config_of(**wanted | budgets), **options)
                break
            except infinity.BudgetError as error:
                name, smallest = re.search(
                    r"smallest (\w+) that works is (\d+)", str(error)
                ).groups()  # type: ignore[union-attr]
                assert int(smallest) > budgets[name]
                budgets[name] = int(smallest) * (room if name == "gpu_memory" else 1)
        made.append(model)
        return model

    yield make
    for model in made:
        engine = infinity.engine(model)
        engine.drain()
        for unit in engine.units:
            assert unit.data.state.name == "SHARDED", unit.facts.name
            assert all(block.copy.pins == 0 or block.permanent for block in unit.blocks.values()), (
                unit.facts.name
            )
        engine.close()


def is_wrapped(model: nn.Module) -> bool:
    return any(
        isinstance(p, infinity.sharding.parameter.ShardedParameter) for p in model.parameters()
    )


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of a plain or of a wrapped model, copied."""
    values = infinity.engine(model).state_dict() if is_wrapped(model) else model.state_dict()
    return {name: value.detach().clone() for name, value in values.items()}


def assert_same_weights(plain: nn.Module, model: nn.Module) -> None:
    expected, actual = weights_of(plain), weights_of(model)
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


Batches = Callable[[int], dict[str, torch.Tensor]]


def run_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    batches: Batches = text_batch,
    parts: int = 1,
) -> list[torch.Tensor]:
    """One optimizer step of `parts` micro-batches, with the same random numbers for every model;
    returns the losses."""
    losses = []
    for part in range(parts):
        torch.manual_seed(10 * step + part)
        loss = model(**batches(parts * step + part)).loss / parts
        loss.backward()
        losses.append(loss.detach().clone())
    optimizer.step()
    optimizer.zero_grad()
    return losses


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


class Pair:
    """A plain model with `SpecifiedAdamW` and an equal wrapped one with `infinity.AdamW`."""

    def __init__(
        self,
        wrap: Wrap,
        plain: nn.Module,
        precision: str = "fp32",
        batches: Batches = text_batch,
        groups: Callable[[nn.Module], Any] = trainable,
        room: int = 1,
        **settings: Any,
    ) -> None:
        self.batches, settings = batches, SETTINGS | settings
        self.model = wrap(copy.deepcopy(plain), precision, room)
        self.plain = plain if precision != "bf16" else convert(plain, torch.bfloat16)
        self.engine = infinity.engine(self.model)
        self.expected = SpecifiedAdamW(groups(self.plain), **settings)
        self.optimizer = infinity.AdamW(groups(self.model), **settings)

    def train(self, steps: int | range, parts: int = 1) -> None:
        """Train both and compare every loss, and every gradient norm when the gradients are
        clipped."""
        for step in range(steps) if isinstance(steps, int) else steps:
            expected = run_step(self.plain, self.expected, step, self.batches, parts)
            actual = run_step(self.model, self.optimizer, step, self.batches, parts)
            assert all(map(torch.equal, actual, expected)), (
                f"step {step}: {actual} is not {expected}"
            )
            assert all(loss.isfinite() for loss in expected)
            if self.optimizer.max_grad_norm is not None:
                assert self.optimizer.grad_norm == pytest.approx(self.expected.grad_norm, rel=1e-12)

    def check(self) -> None:
        """Compare all weights, and make sure that training changed them."""
        assert_same_weights(self.plain, self.model)


def travelled(engine: infinity.Engine) -> float:
    """How often, on average, each byte of the parameters was read from NVMe in the last step."""
    engine.drain()
    return engine.plan().fetched / sum(unit.facts.nbytes for unit in engine.units)


# Whole families


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_follows_torch_adamw(family: str, wrap: Wrap) -> None:
    plain = FAMILIES[family].build()
    model = wrap(copy.deepcopy(plain))
    expected = torch.optim.AdamW(plain.parameters(), **SETTINGS)
    optimizer = infinity.AdamW(model.parameters(), **SETTINGS, max_grad_norm=1.0)
    start = weights_of(plain)
    for step in range(8):
        for part in range(2):
            batch = FAMILIES[family].batch(2 * step + part)
            want, got = plain(**batch).loss / 2, model(**batch).loss / 2
            assert got.item() == pytest.approx(want.item(), rel=1e-6), f"step {step}"
            want.backward()
            got.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item()
        for each in (expected, optimizer):
            each.step()
            each.zero_grad()
        assert optimizer.grad_norm == pytest.approx(norm, rel=1e-6), f"step {step}"
    actual = weights_of(model)
    for name, value in plain.state_dict().items():
        if re.search(r"key\.bias|k_proj\.bias|c_attn\.bias", name):
            # Attention does not depend on a bias of the keys: its gradient is rounding, and Adam
            # makes steps of it.
            continue
        moved = (value - start[name]).norm()
        assert (actual[name] - value).norm() <= 1e-3 * moved + 1e-7 * value.norm(), name
    assert travelled(infinity.engine(model)) > 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_bitwise_with_clipping_and_accumulation(family: str, precision: str, wrap: Wrap) -> None:
    pair = Pair(
        wrap, FAMILIES[family].build(), precision, FAMILIES[family].batch, max_grad_norm=1.0
    )
    start = weights_of(pair.plain)
    pair.train(4, parts=2)
    pair.check()
    assert any(
        not torch.equal(value, start[name]) for name, value in pair.plain.state_dict().items()
    )
    assert travelled(pair.engine) > 1


def test_without_clipping_and_weight_decay(wrap: Wrap) -> None:
    pair = Pair(wrap, transformer(tied=False), "bf16", weight_decay=0.0)
    pair.train(3)
    pair.check()


# Structures


class Twice(Transformer):
    """Runs its blocks twice, and its last one once more."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
        x = self.tokens(input_ids)
        for number, block in enumerate((*self.blocks, *self.blocks, self.blocks[-1])):
            x = self.run_block(number, block, x)
        logits = self.head(self.norm(x))
        loss = (
            logits.sum() * 0
            if labels is None
            else functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        )
        return Output(loss, logits)


class Stage(nn.Module):
    """Holds parameters of its own around blocks, and uses them before, between and after these."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.randn(width) * 0.1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.mixer = nn.Parameter(torch.randn(width, width) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.before
        for block in self.blocks:
            x = block(x) + x @ self.mixer
        return x * self.before.exp()


class Nested(Transformer):
    """Stages of blocks in a `Sequential`, with a parameter list of the model's own."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(width, depth=0)
        self.gains = nn.ParameterList(
            nn.Parameter(torch.ones(width) * (i + 1) / 2) for i in range(3)
        )
        self.stages = nn.ModuleDict({"down": Stage(width, 2), "up": Stage(width, 3)})

    def run_stages(self, x: torch.Tensor) -> torch.Tensor:
        for gain, stage in zip(self.gains, self.stages.values(), strict=False):
            x = stage(x * gain)
        return x * self.gains[2]

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
        logits = self.head(
            self.norm(
                self.run_stages(self.tokens(input_ids) + self.places[:, : input_ids.shape[1]])
            )
        )
        loss = (
            logits.sum() * 0
            if labels is None
            else functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        )
        return Output(loss, logits)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def test_module_used_twice(wrap: Wrap) -> None:
    pair = Pair(wrap, seeded(lambda: Twice(depth=2)), max_grad_norm=1.0)
    pair.train(3, parts=2)
    pair.check()


def test_nested_modules_with_parameters_of_their_own(wrap: Wrap) -> None:
    pair = Pair(wrap, seeded(Nested), max_grad_norm=1.0)
    pair.train(3, parts=2)
    pair.check()


def test_frozen_blocks_and_frozen_parameters(wrap: Wrap) -> None:
    plain = transformer()
    plain.blocks[0].requires_grad_(False)
    plain.blocks[2].requires_grad_(False)
    plain.blocks[1].up.weight.requires_grad_(False)
    plain.tokens.weight.requires_grad_(False)
    frozen = {
        name: p.detach().clone() for name, p in plain.named_parameters() if not p.requires_grad
    }
    assert len(frozen) > 10
    pair = Pair(wrap, plain, max_grad_norm=1.0)
    pair.train(3, parts=2)
    pair.check()
    actual = weights_of(pair.model)
    assert all(torch.equal(actual[name], value) for name, value in frozen.items())
    assert not any(p.requires_grad for n, p in pair.model.named_parameters() if n in frozen)


class Unused(Transformer):
    """Has a block, and a parameter in a block that is used, which never get a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = Block(32)
        self.blocks[1].spare = nn.Parameter(torch.randn(32, 32))
        self.blocks[2].early = nn.Parameter(torch.randn(7))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parameters_without_a_gradient_stay(precision: str, wrap: Wrap) -> None:
    plain = seeded(Unused)
    pair = Pair(wrap, plain, precision, max_grad_norm=1.0)
    before = weights_of(plain)
    pair.train(3)
    pair.check()
    actual = weights_of(pair.model)
    unused = [name for name in before if "spare" in name or "early" in name]
    assert len(unused) > 5
    assert all(torch.equal(actual[name], before[name]) for name in unused)
    assert not torch.equal(actual["blocks.1.up.weight"], before["blocks.1.up.weight"])


class Switching(Block):
    """Uses one of its parameters in some forwards only."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.gain if torch.rand(()) < 0.5 else x)


class Skipping(Transformer):
    """Leaves out one block in every forward, another one each time."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth=depth)
        self.blocks = nn.ModuleList(Switching(32) for _ in range(depth))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
        skipped = int(torch.randint(0, len(self.blocks), ()))
        self.run_block = lambda number, block, x: x if number == skipped else block(x)
        return super().forward(input_ids, labels)


def test_control_flow_that_changes(wrap: Wrap, caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(wrap, seeded(lambda: Skipping(depth=6)), max_grad_norm=1.0)
    with caplog.at_level(logging.WARNING):
        pair.train(12)
        pair.train(range(12, 16), parts=2)
    pair.check()
    assert not caplog.records


@pytest.mark.parametrize("without_grad", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps(without_grad: Callable[[], Any], wrap: Wrap) -> None:
    pair = Pair(wrap, transformer(dropout=0.3), max_grad_norm=1.0)

    def evaluate(step: int) -> None:
        logits = []
        for model in (pair.plain, pair.model):
            model.eval()
            with without_grad():
                logits.append(model(**text_batch(500 + step)).logits)
            model.train()
        assert torch.equal(*logits)

    evaluate(0)
    for step in range(5):
        pair.train(range(step, step + 1))
        evaluate(step)
    pair.check()


def test_evaluation_between_forward_and_backward(wrap: Wrap) -> None:
    pair = Pair(wrap, transformer(), max_grad_norm=1.0)
    for step in range(4):
        losses = []
        for model, optimizer in ((pair.plain, pair.expected), (pair.model, pair.optimizer)):
            loss = model(**text_batch(step)).loss
            with torch.no_grad():
                losses.append(model(**text_batch(100 + step)).loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert torch.equal(losses[0], losses[2])
        assert torch.equal(losses[1], losses[3])
    pair.check()


def test_two_forwards_before_one_backward_and_two_backwards_of_one(wrap: Wrap) -> None:
    pair = Pair(wrap, transformer(), max_grad_norm=1.0)
    for step in range(4):
        for model, optimizer in ((pair.plain, pair.expected), (pair.model, pair.optimizer)):
            first, second = model(**text_batch(step)).loss, model(**text_batch(50 + step)).loss
            (first + second).backward()
            third = model(**text_batch(90 + step)).loss
            third.backward(retain_graph=True)
            third.backward()
            optimizer.step()
            optimizer.zero_grad()
    pair.check()


def test_backward_that_is_recorded_itself(wrap: Wrap) -> None:
    """A penalty on the gradient of the input, which needs the weights once more after the first
    backward."""
    pair = Pair(wrap, transformer(depth=8))
    for step in range(3):
        for model, optimizer in ((pair.plain, pair.expected), (pair.model, pair.optimizer)):
            x = torch.randn(
                2, 8, 32, generator=torch.Generator().manual_seed(step)
            ).requires_grad_()
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                y = functools.reduce(lambda y, block: block(y), model.blocks, x)
                (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
                (gradient.norm() - 1).square().backward()
            optimizer.step()
            optimizer.zero_grad()
    pair.check()


def test_submodules_called_on_their_own(wrap: Wrap) -> None:
    pair = Pair(wrap, transformer())
    for step in range(3):
        for model, optimizer in ((pair.plain, pair.expected), (pair.model, pair.optimizer)):
            x = functools.reduce(
                lambda x, block: block(x), model.blocks, model.tokens(text_batch(step)["input_ids"])
            )
            model.head(model.norm(x)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    pair.check()


def test_backward_with_weights_that_were_updated_raises(wrap: Wrap) -> None:
    pair = Pair(wrap, transformer())
    for model, optimizer in ((pair.plain, pair.expected), (pair.model, pair.optimizer)):
        first, second = model(**text_batch(0)).loss, model(**text_batch(1)).loss
        first.backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(
            RuntimeError, match=r"modified by an inplace operation|updated after the forward"
        ):
            second.backward()
        optimizer.zero_grad()
    pair.train(range(2, 4))
    pair.check()


# Exceptions


class Interrupted(RuntimeError):
    pass


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise Interrupted


def interrupt_forward(number: int, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if number == 2:
        raise Interrupted
    return block(x)


def interrupt_inside(number: int, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if number != 2:
        return block(x)

    def fail(module: nn.Module, args: Any) -> None:
        raise Interrupted

    handle = block.down.register_forward_pre_hook(fail)
    try:
        return block(x)
    finally:
        handle.remove()


def interrupt_backward(number: int, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(RaisesInBackward.apply(x) if number == 1 else x)


@pytest.mark.parametrize("zeroed", [True, False])
@pytest.mark.parametrize("interrupt", [interrupt_forward, interrupt_inside, interrupt_backward])
def test_exception_and_then_a_good_step(
    interrupt: Callable[..., torch.Tensor], zeroed: bool, wrap: Wrap
) -> None:
    pair = Pair(wrap, transformer(), max_grad_norm=1.0)
    for step in range(3):
        pair.train(range(2 * step, 2 * step + 1))
        for model, optimizer in ((pair.plain, pair.expected), (pair.model, pair.optimizer)):
            model.run_block = interrupt
            with pytest.raises(Interrupted):
                model(**text_batch(100)).loss.backward()
            del model.run_block
            if zeroed:
                optimizer.zero_grad()
        pair.train(range(2 * step + 1, 2 * step + 2))
    pair.check()


# Recomputation and random numbers


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "t5", "mixtral"])
def test_gradient_checkpointing_of_transformers(
    family: str, use_reentrant: bool, wrap: Wrap
) -> None:
    plain = FAMILIES[family].build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers 5.23 prefers another name
        plain.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": use_reentrant}
        )
    pair = Pair(wrap, plain, "bf16", FAMILIES[family].batch, max_grad_norm=1.0)
    pair.train(4, parts=2)
    pair.check()


def pairwise(blocks: nn.ModuleList, **options: Any) -> Callable[..., torch.Tensor]:
    """One checkpoint around every two blocks."""

    def run(number: int, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if number % 2:
            return x
        return checkpoint(lambda y: blocks[number + 1](blocks[number](y)), x, **options)

    return run


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("span", [1, 2])
def test_activation_checkpointing(span: int, use_reentrant: bool, wrap: Wrap) -> None:
    # A checkpoint needs all its blocks at once.
    pair = Pair(wrap, transformer(dropout=0.2), room=span, max_grad_norm=1.0)
    for model in (pair.plain, pair.model):
        if span == 1:
            model.run_block = lambda number, block, x: checkpoint(
                block, x, use_reentrant=use_reentrant
            )
        else:
            model.run_block = pairwise(model.blocks, use_reentrant=use_reentrant)
    pair.train(3, parts=2)
    pair.check()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_of_a_module_used_twice(use_reentrant: bool, wrap: Wrap) -> None:
    pair = Pair(wrap, seeded(lambda: Twice(depth=2)), max_grad_norm=1.0)
    for model in (pair.plain, pair.model):
        model.run_block = lambda number, block, x: checkpoint(block, x, use_reentrant=use_reentrant)
    pair.train(4, parts=2)
    pair.check()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_inside_of_the_call(use_reentrant: bool, wrap: Wrap) -> None:
    """The recomputation runs `forward` of stages that use parameters of their own, and no hook of
    theirs."""
    pair = Pair(wrap, seeded(Nested), room=2, max_grad_norm=1.0)
    for model in (pair.plain, pair.model):
        for stage in model.stages.values():
            stage.forward = functools.partial(
                checkpoint, stage.forward, use_reentrant=use_reentrant
            )
        # The reentrant kind does not nest without a warning.
        for block in () if use_reentrant else model.stages["up"].blocks:
            block.forward = functools.partial(
                checkpoint, block.forward, use_reentrant=use_reentrant
            )
    pair.train(4, parts=2)
    pair.check()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_over_all_blocks_needs_room_for_one(use_reentrant: bool, wrap: Wrap) -> None:
    """What a recomputation saves of parameters does not keep their units."""
    pair = Pair(wrap, seeded(lambda: transformer(depth=5)), max_grad_norm=1.0)
    for model in (pair.plain, pair.model):
        together = nn.Sequential(*model.blocks).forward
        model.run_block = lambda number, block, x, together=together: (
            x if number else checkpoint(together, x, use_reentrant=use_reentrant)
        )
    pair.train(4, parts=2)
    pair.check()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_exception_in_a_recomputation_and_then_a_good_step(use_reentrant: bool, wrap: Wrap) -> None:
    class Once(nn.Module):
        """Raises when it runs for the second time, which is in the recomputation."""

        runs = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.runs += 1
            if self.runs == 2:
                raise Interrupted
            return x

    pair = Pair(wrap, transformer(), max_grad_norm=1.0)
    for model, optimizer in ((pair.plain, pair.expected), (pair.model, pair.optimizer)):
        once = Once()

        def run(
            number: int, block: nn.Module, x: torch.Tensor, once: nn.Module = once
        ) -> torch.Tensor:
            inside = (lambda y: block(once(block(y)))) if number == 2 else block
            return checkpoint(inside, x, use_reentrant=use_reentrant)

        model.run_block = run
        with pytest.raises(Interrupted):
            model(**text_batch(100)).loss.backward()
        optimizer.zero_grad()
    pair.train(3, parts=2)
    pair.check()


def test_dropout_with_the_same_seed(wrap: Wrap) -> None:
    pair = Pair(wrap, transformer(dropout=0.4))
    pair.train(3)
    pair.check()
    torch.manual_seed(1)
    first = pair.model(**text_batch(0)).loss
    torch.manual_seed(2)
    assert not torch.equal(first, pair.model(**text_batch(0)).loss)


# The optimizer as one of torch


def split(model: nn.Module) -> list[dict[str, Any]]:
    """The usual two groups: no decay for norms and biases."""
    names = {True: [], False: []}
    for name, p in model.named_parameters():
        names["norm" in name or name.endswith("bias")].append(p)
    return [{"params": names[False]}, {"params": names[True], "weight_decay": 0.0, "lr": 1e-3}]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parameter_groups_and_scheduler(precision: str, wrap: Wrap) -> None:
    pair = Pair(wrap, transformer(), precision, groups=split, max_grad_norm=1.0)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / 4) * 0.9**step
        )
        for optimizer in (pair.expected, pair.optimizer)
    ]
    for step in range(8):
        pair.train(range(step, step + 1))
        for scheduler in schedulers:
            scheduler.step()
    pair.check()
    assert pair.optimizer.param_groups[1]["lr"] == pytest.approx(1e-3 * 0.9**8)


def test_add_param_group(wrap: Wrap) -> None:
    plain = transformer()
    later = [name for name, _ in plain.named_parameters() if "blocks.1" in name or "norm1" in name]

    def first(model: nn.Module) -> list[nn.Parameter]:
        return [p for name, p in model.named_parameters() if name not in later]

    def second(model: nn.Module) -> dict[str, Any]:
        return {
            "params": [p for name, p in model.named_parameters() if name in later],
            "lr": 1e-4,
            "betas": (0.8, 0.9),
        }

    pair = Pair(wrap, plain, groups=first)
    before = weights_of(pair.plain)
    for step in range(3):
        pair.train(range(step, step + 1))
        for model in (pair.plain, pair.model):
            model.zero_grad()  # of those, too, that have no optimizer yet
    assert torch.equal(weights_of(pair.model)[later[0]], before[later[0]])
    pair.expected.add_param_group(second(pair.plain))
    pair.optimizer.add_param_group(second(pair.model))
    pair.train(range(3, 6))
    pair.check()
    assert not torch.equal(weights_of(pair.model)[later[0]], before[later[0]])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_dict_round_trip_continues_bitwise(
    precision: str, wrap: Wrap, tmp_path: Path
) -> None:
    pair = Pair(wrap, transformer(), precision, max_grad_norm=1.0)
    pair.train(4)
    torch.save(
        {"model": pair.engine.state_dict(), "optimizer": pair.optimizer.state_dict()},
        tmp_path / "saved.pt",
    )
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    fresh = transformer(seed=1)
    fresh.load_state_dict(saved["model"])
    pair.model = wrap(fresh, precision)
    pair.optimizer = infinity.AdamW(pair.model.parameters(), lr=1.0, max_grad_norm=1.0)
    pair.optimizer.load_state_dict(saved["optimizer"])
    assert pair.optimizer.param_groups[0]["lr"] == SETTINGS["lr"]
    pair.train(range(4, 8))
    pair.check()


def test_state_dict_has_the_form_of_torch(wrap: Wrap) -> None:
    plain = transformer()
    model = wrap(copy.deepcopy(plain))
    expected = torch.optim.AdamW(plain.parameters(), **SETTINGS)
    optimizer = infinity.AdamW(model.parameters(), **SETTINGS)
    for step in range(3):
        run_step(plain, expected, step)
        run_step(model, optimizer, step)
    want, got = expected.state_dict(), optimizer.state_dict()
    assert got["state"].keys() == want["state"].keys()
    for key, state in want["state"].items():
        assert got["state"][key].keys() == state.keys()
        assert got["state"][key]["step"] == state["step"] == 3
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(got["state"][key][name], state[name], rtol=1e-4, atol=1e-7)
    assert got["param_groups"][0]["params"] == want["param_groups"][0]["params"]


def test_load_state_dict_of_torch_adamw(wrap: Wrap) -> None:
    plain = transformer()
    expected = torch.optim.AdamW(plain.parameters(), **SETTINGS)
    for step in range(4):
        run_step(plain, expected, step)
    model = wrap(copy.deepcopy(plain))
    optimizer = infinity.AdamW(model.parameters(), lr=1.0)
    optimizer.load_state_dict(expected.state_dict())
    for step in range(4, 14):
        (want,), (got,) = run_step(plain, expected, step), run_step(model, optimizer, step)
        assert got.item() == pytest.approx(want.item(), rel=1e-6)
    for name, value in weights_of(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-6)


def test_closure_and_engine_clipping(wrap: Wrap) -> None:
    pair = Pair(wrap, transformer())
    pair.expected.max_grad_norm = 0.5
    for step in range(3):
        (want,) = run_step(pair.plain, pair.expected, step)

        def closure(step: int = step) -> torch.Tensor:
            pair.optimizer.zero_grad()
            loss = pair.model(**text_batch(step)).loss
            loss.backward()
            norm = pair.engine.clip_grad_norm_(0.5)
            assert norm == pytest.approx(pair.expected.grad_norm, rel=1e-12)
            return loss

        assert torch.equal(pair.optimizer.step(closure).detach(), want)
        pair.optimizer.zero_grad()
    pair.check()


def test_both_zero_grads(wrap: Wrap) -> None:
    pair = Pair(wrap, transformer())
    for zero in ("model", "optimizer"):
        pair.model(**text_batch(77)).loss.backward()
        assert pair.engine.gradient(pair.model.blocks[0].up.weight) is not None
        (pair.model if zero == "model" else pair.optimizer).zero_grad()
        assert pair.engine.gradient(pair.model.blocks[0].up.weight) is None
        pair.train(2)
    pair.check()


def test_gradients_can_be_read(wrap: Wrap) -> None:
    pair = Pair(wrap, transformer())
    for model in (pair.plain, pair.model):
        for part in range(2):
            model(**text_batch(part)).loss.backward()
    for (name, plain), parameter in zip(
        pair.plain.named_parameters(), pair.model.parameters(), strict=True
    ):
        gradient = pair.engine.gradient(parameter)
        assert gradient is not None
        assert torch.equal(gradient, plain.grad), name


def test_backward_after_step_without_zero_grad_adds_to_the_gradients(wrap: Wrap) -> None:
    pair = Pair(wrap, transformer())
    for model, optimizer in ((pair.model, pair.optimizer), (pair.plain, pair.expected)):
        for number in range(2):
            model(**text_batch(number)).loss.backward()
            optimizer.step()
        optimizer.zero_grad()
    pair.train(range(2, 5))
    pair.check()


def test_clipping_values_by_torch(wrap: Wrap) -> None:
    pair = Pair(wrap, transformer())
    for number in range(2):
        for model, optimizer in ((pair.model, pair.optimizer), (pair.plain, pair.expected)):
            model(**text_batch(number)).loss.backward()
            torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    pair.train(range(2, 5))
    pair.check()


# Weights


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gathered_writes_are_seen(precision: str, wrap: Wrap) -> None:
    pair = Pair(wrap, transformer(), precision)
    pair.train(2)

    def change(model: nn.Module) -> None:
        with torch.no_grad():
            model.blocks[1].up.weight.mul_(0.5)
            model.blocks[1].down.bias.fill_(0.25)

    with infinity.gathered(pair.model.blocks[1]):
        assert torch.equal(pair.model.blocks[1].up.weight, pair.plain.blocks[1].up.weight)
    before = weights_of(pair.model)
    with infinity.gathered(pair.model.blocks[1], write=True):
        change(pair.model)
    change(pair.plain)
    for p in pair.plain.blocks[1].parameters():  # the master follows the values that changed
        kept = pair.expected.state[p].get("master", p.detach().float())
        pair.expected.state[p]["master"] = torch.where(
            rounded(kept, p.dtype) == p.detach(), kept, p.detach().float()
        )
    pair.check()
    assert not torch.equal(
        before["blocks.1.up.weight"], weights_of(pair.model)["blocks.1.up.weight"]
    )
    pair.train(range(2, 5))
    pair.check()


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_state_dict_is_that_of_the_plain_model(family: str, wrap: Wrap) -> None:
    plain = FAMILIES[family].build()
    model = wrap(copy.deepcopy(plain))
    expected, actual = plain.state_dict(), infinity.engine(model).state_dict()
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
        assert torch.equal(actual[name], value), name
    assert len({p.data_ptr() for p in actual.values()}) == len(
        {p.data_ptr() for p in expected.values()}
    )
    plain.load_state_dict(actual)


def test_state_dict_with_tied_names_and_buffers(wrap: Wrap) -> None:
    class Counting(Transformer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scratch", torch.ones(3), persistent=False)
            self.norms = nn.BatchNorm1d(32)

        def run_block(self, number: int, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return block(self.norms(x.transpose(1, 2)).transpose(1, 2))

    pair = Pair(wrap, seeded(Counting), max_grad_norm=1.0)
    pair.train(3)
    pair.check()
    actual = pair.engine.state_dict()
    assert "scratch" not in actual
    assert actual["norms.num_batches_tracked"] == 12
    assert torch.equal(actual["head.weight"], actual["tokens.weight"])
    assert actual["scale"] == 0.5


class MixedBlock(nn.Module):
    """A bf16 block whose norm is fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.gelu(self.up(self.norm(x.float()).bfloat16()))


class Mixed(Transformer):
    def __init__(self) -> None:
        super().__init__(depth=0)
        self.bfloat16()
        self.norm = nn.LayerNorm(32, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(MixedBlock(32) for _ in range(4))


def test_mixed_dtypes(wrap: Wrap) -> None:
    plain = seeded(Mixed)
    pair = Pair(wrap, plain, "auto", max_grad_norm=1.0)
    assert {unit.facts.dtype for unit in pair.engine.units} == {torch.float32, torch.bfloat16}
    assert [p.dtype for p in pair.model.parameters()] == [p.dtype for p in plain.parameters()]
    pair.train(8, parts=2)
    pair.check()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_save_pretrained(
    family: str, dtype: torch.dtype, wrap: Wrap, tmp_path: Path
) -> None:
    built = FAMILIES[family].build()
    # Some families have other names in the files of the hub than in the model; wrap reads the names
    # of the model.
    built.to(dtype).save_pretrained(
        tmp_path / "saved", max_shard_size="50KB", save_original_format=False
    )
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    plain = type(built).from_pretrained(tmp_path / "saved", dtype=dtype).train()
    with infinity.init():
        model = type(built)(built.config)
    assert all(p.is_meta for p in model.parameters())
    wrap(model, "fp32" if dtype == torch.float32 else "bf16", weights=tmp_path / "saved")
    model.train()
    assert_same_weights(plain, model)
    batch = FAMILIES[family].batch(0)
    assert torch.equal(model(**batch).loss, plain(**batch).loss)


def test_seed_gives_the_same_weights(wrap: Wrap) -> None:
    def made(seed: int) -> dict[str, torch.Tensor]:
        with infinity.init():
            model = models.Transformer(tied=False)
            model.tokens = nn.Embedding(64, 32)  # with the values that it gives itself
            del model.places
            model.places = 0
        state = torch.get_rng_state()
        wrap(model, seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        return weights_of(model)

    first, second, other = made(3), made(3), made(4)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(value.isfinite().all() for value in first.values())
    assert not torch.equal(first["blocks.0.up.weight"], other["blocks.0.up.weight"])
    assert not torch.equal(first["blocks.0.up.weight"], first["blocks.1.up.weight"])
    assert first["blocks.0.up.weight"].std() > 0.01
    assert torch.equal(first["blocks.0.norm1.weight"], torch.ones(32))
