"""`infinity.chunked_loss` on plain models: the loss and the gradients of all logits at once, in the
memory of a few."""

from __future__ import annotations

import copy
import gc
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import infinity
from infinity.losses.cross_entropy import (
    AutocastState,
    ChunkedCrossEntropy,
    EntropyPlan,
    LogitsStep,
    LossReduction,
)
from infinity.losses.lazy_logits import LazyLogits
from support.allocations import peak
from support.causal import ARCHITECTURES, VOCABULARY, batch, causal
from support.models import FAMILIES

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

TOKEN = 12 * VOCABULARY
"""Bytes that the logits of a token take at once, in fp32: three tables with 4 of each."""
CLOSE = 2e-6
"""By how much of their norm gradients in fp32 differ that are summed up in another order."""


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def trained(model: Any, inputs: dict[str, Any], scale: float = 1.0) -> Any:
    """What a call of the model gives, after the backward of its loss."""
    torch.manual_seed(7)  # for dropout
    outputs = model(**inputs)
    (outputs.loss * scale).backward()
    return outputs


def same(chunked: nn.Module, plain: nn.Module) -> bool:
    """Whether both have the same gradients, bit for bit."""
    ours, theirs = gradients(chunked), gradients(plain)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in theirs)


def distance(chunked: nn.Module, plain: nn.Module) -> float:
    """How much the gradients of two models differ, as a part of their norm."""
    ours, theirs = (
        torch.cat([each.double().flatten() for each in gradients(model).values()])
        for model in (chunked, plain)
    )
    return float((ours - theirs).norm() / theirs.norm())


# The numbers of a plain model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_with_one_chunk_loss_gradients_and_logits_are_the_bits_of_the_plain_model(
    name: str,
) -> None:
    plain, chunked = causal(name), causal(name)
    infinity.chunked_loss(chunked)
    expected, found = (trained(model, batch(), 1.7) for model in (plain, chunked))
    assert isinstance(found.logits, LazyLogits)
    assert torch.equal(found.loss, expected.loss)
    assert same(chunked, plain)
    assert torch.equal(found.logits, expected.logits)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_with_many_chunks_loss_and_gradients_differ_by_rounding(name: str) -> None:
    plain, chunked = causal(name), causal(name)
    infinity.chunked_loss(chunked, 5 * TOKEN)
    expected, found = (trained(model, batch(), 1.7) for model in (plain, chunked))
    torch.testing.assert_close(found.loss, expected.loss, rtol=CLOSE, atol=0)
    assert 0 < distance(chunked, plain) < CLOSE


@pytest.mark.parametrize("name", ["bert", "t5", "mixtral"])
def test_other_models_with_a_vocabulary(name: str) -> None:
    plain, chunked = (FAMILIES[name].build() for _ in range(2))
    infinity.chunked_loss(chunked)
    expected, found = (trained(model, FAMILIES[name].batch(0)) for model in (plain, chunked))
    assert isinstance(found.logits, LazyLogits)
    assert torch.equal(found.loss, expected.loss)
    assert same(chunked, plain)


@pytest.mark.parametrize("limit", ["1MiB", 3 * TOKEN], ids=["one chunk", "many chunks"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_items_in_batch": 40},
        {"num_items_in_batch": torch.tensor(40)},
        {"shift_labels": batch(3)["labels"]},
        {"logits_to_keep": torch.arange(16)},
        {"return_dict": False},
    ],
    ids=lambda options: ", ".join(options),
)
def test_the_options_of_the_loss(options: dict[str, Any], limit: Any) -> None:
    plain, chunked = causal(), causal()
    infinity.chunked_loss(chunked, limit)
    losses = [model(**batch(), **options)[0] for model in (plain, chunked)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=CLOSE, atol=0)
    assert distance(chunked, plain) < CLOSE


@pytest.mark.parametrize("limit", ["1MiB", 3 * TOKEN], ids=["one chunk", "many chunks"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_function_of_ones_own(
    weighted: bool, smoothing: float, reduction: str, limit: Any
) -> None:
    weight = torch.rand(VOCABULARY) if weighted else None

    def loss(logits: Any, labels: Any, vocab_size: int, **_: Any) -> torch.Tensor:
        rows = logits.double().view(-1, vocab_size) / 3 - 1
        each = functional.cross_entropy(
            rows,
            labels.view(-1),
            None if weight is None else weight[:vocab_size].double(),
            ignore_index=5,
            reduction=reduction,
            label_smoothing=smoothing,
        )
        return (each * torch.linspace(1, 2, each.numel())).sum()

    plain, chunked = causal(), causal()
    plain.loss_function = chunked.loss_function = loss
    infinity.chunked_loss(chunked, limit)
    inputs = batch() | {"labels": torch.where(batch()["labels"] < 0, 5, batch()["labels"])}
    expected, found = (trained(model, inputs) for model in (plain, chunked))
    assert isinstance(found.logits, LazyLogits)
    torch.testing.assert_close(found.loss, expected.loss, rtol=CLOSE, atol=0)
    assert distance(chunked, plain) < CLOSE


def test_no_token_counts() -> None:
    plain, chunked = causal(), causal()
    infinity.chunked_loss(chunked, 3 * TOKEN)
    inputs = batch() | {"labels": torch.full((4, 16), -100)}
    expected, found = (trained(model, inputs) for model in (plain, chunked))
    assert torch.isnan(found.loss) and torch.isnan(expected.loss)
    assert all(not grad.any() for grad in gradients(chunked).values())


@pytest.mark.parametrize("name", ["llama", "phi", "gemma2"])
def test_under_autocast(name: str) -> None:
    plain, chunked, many = (causal(name) for _ in range(3))
    infinity.chunked_loss(chunked)
    infinity.chunked_loss(many, 9 * TOKEN)
    outputs = []
    for model in (plain, chunked, many):
        with torch.autocast("cpu", torch.bfloat16):
            found = model(**batch())
        found.loss.backward()
        outputs.append(found)
    assert outputs[1].logits.dtype == outputs[0].logits.dtype
    assert torch.equal(outputs[1].loss, outputs[0].loss)
    assert same(chunked, plain)
    assert torch.equal(outputs[1].logits, outputs[0].logits)
    torch.testing.assert_close(outputs[2].loss, outputs[0].loss, rtol=1e-3, atol=0)
    assert distance(many, plain) < 1e-2


def test_autocast_leaves_fp64_alone() -> None:
    plain, chunked = causal().double(), causal().double()
    infinity.chunked_loss(chunked)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = plain(**batch()), chunked(**batch())
    assert torch.equal(found.loss, expected.loss)
    assert found.logits.dtype == expected.logits.dtype == torch.float64


def test_a_forward_without_autograd_leaves_nothing_in_the_cache_of_autocast() -> None:
    plain, chunked = causal(tie_word_embeddings=False), causal(tie_word_embeddings=False)
    infinity.chunked_loss(chunked)
    for model in (plain, chunked):
        with torch.autocast("cpu", torch.bfloat16):
            labelled = model(**batch()).loss
            logits = model(input_ids=batch()["input_ids"]).logits
            (labelled + logits.float().square().mean()).backward()
    assert distance(chunked, plain) < 1e-2


@pytest.mark.parametrize("bias", [False, True])
def test_in_bf16_with_64_chunks_gradients_are_as_near_to_fp64_as_those_of_the_plain_model(
    bias: bool,
) -> None:
    torch.manual_seed(0)
    tokens, width, vocabulary = 512, 32, 256
    head = nn.Linear(width, vocabulary, bias)
    # All tokens agree on the direction, and their targets are few: sums, not differences.
    hidden = torch.randn(tokens, width) * 0.1 + torch.rand(width)
    target = torch.randint(0, 4, (tokens,))

    def errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
        return [
            float((f.double() - e).norm() / e.norm()) for f, e in zip(found, exact, strict=True)
        ]

    def of(dtype: torch.dtype, loss: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        given = [hidden, *head.parameters()]
        leaves = [each.detach().bfloat16().to(dtype).requires_grad_() for each in given]
        return list(torch.autograd.grad(loss(*leaves), leaves))

    def plain(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        logits = functional.linear(h, w, b)
        return functional.cross_entropy(
            logits.to(torch.promote_types(h.dtype, torch.float32)), target
        )

    def chunked(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        widen = LogitsStep(torch.Tensor.float, torch.float32, False)
        plan = EntropyPlan(
            None,
            (widen,),
            AutocastState("cpu", False, torch.bfloat16),
            LossReduction("mean", -100, 0.0),
            8 * 12 * vocabulary,
        )
        assert len(plan.parts(tokens, vocabulary, torch.bfloat16)) == 64
        return ChunkedCrossEntropy.apply(h, w, b, target, None, plan)  # type: ignore[no-any-return]

    exact = of(torch.float64, plain)
    ours = errors(of(torch.bfloat16, chunked), exact)
    theirs = errors(of(torch.bfloat16, plain), exact)
    assert all(one <= 1.01 * other for one, other in zip(ours, theirs, strict=True)), (ours, theirs)


def test_a_second_derivative_is_refused() -> None:
    model = infinity.chunked_loss(causal())
    loss = model(**batch()).loss
    with pytest.raises(RuntimeError, match=r"no second derivative .* max_bytes=None"):
        torch.autograd.grad(loss, [model.lm_head.weight], create_graph=True)


# Memory


def step_of(name: str) -> tuple[LogitsStep, ...]:
    steps = {
        "fp32": (),
        "bf16": (LogitsStep(torch.Tensor.float, torch.float32, False),),
        "bf16, capped": (
            LogitsStep(lambda x: x / 3, torch.bfloat16, False),
            LogitsStep(torch.tanh, torch.bfloat16, True),
            LogitsStep(lambda x: x * 3, torch.bfloat16, False),
            LogitsStep(torch.Tensor.float, torch.float32, False),
        ),
    }
    return steps[name]


@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16, capped"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_chunk_takes_max_bytes_to_the_byte(name: str, smoothing: float) -> None:
    vocabulary, width, rows, number = 4096, 24, 16, 4
    dtype = torch.float32 if name == "fp32" else torch.bfloat16
    hidden, weight = (
        torch.randn(each, width, dtype=dtype, requires_grad=True)
        for each in (rows * number, vocabulary)
    )
    target = torch.randint(0, vocabulary, (rows * number,))
    autocast = AutocastState("cpu", False, torch.bfloat16)
    plan = EntropyPlan(None, step_of(name), autocast, LossReduction("mean", -100, smoothing), 1)
    limit = rows * plan.bytes_per_token(vocabulary, dtype)
    plan = EntropyPlan(None, step_of(name), autocast, plan.reduction, limit)
    chunks = {rows * vocabulary * 2, rows * vocabulary * 4}

    def step() -> None:
        ChunkedCrossEntropy.apply(hidden, weight, None, target, None, plan).backward()

    assert peak(step, lambda nbytes: nbytes in chunks) == limit
    # Whatever its size: beside a chunk no more than the gradients in fp32, and as they are.
    wide = weight.numel() * (4 + (dtype.itemsize if dtype != torch.float32 else 0))
    assert peak(step) < limit + wide + 3 * hidden.numel() * 4 + (64 << 10)


def test_with_a_vocabulary_of_256000_a_step_takes_a_quarter_of_the_memory() -> None:
    vocabulary, tokens, width = 256_000, 256, 64
    options = {"vocab_size": vocabulary, "hidden_size": width, "max_position_embeddings": tokens}
    model = causal(**options, tie_word_embeddings=True)
    ids = torch.randint(0, vocabulary, (1, tokens))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    plain = peak(step)
    infinity.chunked_loss(model, "16MiB")
    chunked = peak(step)
    assert plain >= 12 * vocabulary * tokens
    # The gradients of a weight with two uses: that of the chunks, and that of the embedding.
    assert chunked <= (16 << 20) + 2 * 4 * vocabulary * width + (2 << 20)
    assert chunked < plain / 4


# Lazy logits

STEPS: dict[str, Callable[[Any], Any]] = {
    "times": lambda x: x * 2.5,
    "number first": lambda x: 3 * x,
    "over": lambda x: x / 3,
    "plus": lambda x: x + 1,
    "minus": lambda x: 2 - x,
    "negative": lambda x: -x,
    "tanh": torch.tanh,
    "torch.mul": lambda x: torch.mul(x, 0.5),
    "double": lambda x: x.double(),
    "float": lambda x: x.float(),
    "bf16": lambda x: x.to(torch.bfloat16),
    "contiguous": lambda x: x.contiguous(),
    "rows": lambda x: x[..., :-1, :] if x.shape[-2] > 1 else x,
    "every other": lambda x: x[::2],
    "picked": lambda x: x[torch.tensor([0, 0, -1])],
    "flat": lambda x: x.reshape(-1, x.shape[-1]),
    "new dimension": lambda x: x[None] if x.dim() < 5 else x,
}
VALUES: dict[str, Callable[[Any], Any]] = {
    "argmax": lambda x: x.argmax(-1),
    "log_softmax": lambda x: functional.log_softmax(x, -1),
    "column": lambda x: x[..., 3],
    "transposed": lambda x: x.transpose(0, 1),
    "with a tensor": lambda x: x + torch.ones(VOCABULARY),
    "detached": lambda x: x.detach(),
    "cat": lambda x: torch.cat([x, x]),
    "numpy": lambda x: torch.from_numpy(x.detach().float().numpy()),
    "item": lambda x: torch.tensor(x.sum().item()),
    "split": lambda x: x.view(*x.shape[:-1], 2, -1),
    "softmax": lambda x: x.softmax(-1),
}


@given(
    st.lists(st.sampled_from(list(STEPS)), max_size=5),
    st.sampled_from(list(VALUES)),
    st.sampled_from([1, 3, 100]),
)
def test_any_chain_of_operators_has_the_values_and_the_loss_of_the_plain_logits(
    chain: list[str], use: str, rows: int
) -> None:
    plain, chunked = chained(chain, rows, False), chained(chain, rows, True)
    logits, lazy = plain.logits, chunked.logits
    assert isinstance(lazy, LazyLogits)
    assert (lazy.shape, lazy.dtype, lazy.device) == (logits.shape, logits.dtype, logits.device)
    assert lazy.is_contiguous() == logits.is_contiguous() and lazy.stride() == logits.stride()
    close = (
        {"rtol": 2e-6, "atol": 1e-7}
        if logits.dtype != torch.bfloat16
        else {"rtol": 0.02, "atol": 0.02}
    )
    torch.testing.assert_close(chunked.loss, plain.loss, **close)
    for ours, theirs in zip(chunked.grads, plain.grads, strict=True):
        bound = 0.02 if "bf16" in chain else 1e-5
        assert float((ours - theirs).norm()) <= bound * float(theirs.norm())
    assert torch.equal(VALUES[use](lazy), VALUES[use](logits))


class Chained:
    def __init__(self, logits: Any, loss: torch.Tensor, grads: Any) -> None:
        self.logits, self.loss, self.grads = logits, loss, grads


def chained(chain: list[str], rows: int, lazy: bool) -> Chained:
    """Logits of a small projection, some operators on them, and the gradients of their loss."""
    model = SMALL[lazy]
    model.max_bytes(rows * 40 * VOCABULARY)
    logits = model.logits()
    for name in chain:
        logits = STEPS[name](logits)
    flat = logits.view(-1, VOCABULARY) if logits.is_contiguous() else logits.reshape(-1, VOCABULARY)
    target = torch.arange(flat.shape[0]) % VOCABULARY
    loss = functional.cross_entropy(flat, target)
    return Chained(logits, loss.detach(), torch.autograd.grad(loss, model.leaves))


class SmallHead:
    """The hidden states and the projection of a model of one's own."""

    def __init__(self, lazy: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self._model = causal()
        self._lazy = lazy
        self._hidden = torch.randn(2, 3, 32, generator=generator).requires_grad_()
        self.leaves = [self._hidden, self._model.lm_head.weight]

    def max_bytes(self, limit: int) -> None:
        if self._lazy:
            infinity.chunked_loss(self._model, limit)

    def logits(self) -> Any:
        labels = torch.zeros(2, 3, dtype=torch.int64)
        self._model.model.forward = lambda **_: Hidden(self._hidden)
        return self._model(inputs_embeds=self._hidden, labels=labels).logits


class Hidden:
    past_key_values = hidden_states = attentions = None

    def __init__(self, last: torch.Tensor) -> None:
        self.last_hidden_state = last


with torch.random.fork_rng():
    SMALL = {lazy: SmallHead(lazy) for lazy in (False, True)}


def test_values_have_the_graph_of_the_plain_logits() -> None:
    plain, chunked = causal("gemma2"), causal("gemma2")
    infinity.chunked_loss(chunked)
    for model in (plain, chunked):
        outputs = model(**batch())
        with torch.no_grad():
            outputs.logits.argmax(-1)
        (outputs.loss + outputs.logits.square().mean()).backward()
    assert distance(chunked, plain) < CLOSE


def test_a_change_in_place_is_one_of_what_the_plain_model_has() -> None:
    plain, chunked = causal("granite"), causal("granite")
    infinity.chunked_loss(chunked)
    found = []
    for model in (plain, chunked):
        logits = model(**batch()).logits
        doubled, rows = logits * 2, logits.view(-1, VOCABULARY)
        kept = rows * 3
        rows.mul_(0.5)
        logits[:, :, 4] = 0
        labels = batch()["labels"].view(-1)
        found.append((doubled, kept, rows, logits, functional.cross_entropy(rows, labels)))
    for theirs, ours in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_a_loss_of_lazy_logits_outside_of_the_model_is_computed_in_chunks() -> None:
    plain, chunked = causal(), causal()
    infinity.chunked_loss(chunked, 4 * TOKEN)
    inputs = batch()

    def loss(model: Any) -> torch.Tensor:
        logits = model(**inputs).logits[:, :-1]
        return functional.cross_entropy(
            logits.reshape(-1, VOCABULARY), inputs["labels"][:, 1:].reshape(-1)
        )

    whole = 4 * 15 * VOCABULARY * 4
    assert peak(lambda: loss(chunked).backward(), lambda nbytes: nbytes >= whole) == 0
    loss(plain).backward()
    assert distance(chunked, plain) < CLOSE


def test_logits_of_weights_that_were_updated_since_are_refused() -> None:
    model = infinity.chunked_loss(causal())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    read, late = model(**batch()), model(**batch())
    before = read.logits.argmax(-1)
    read.loss.backward()
    optimizer.step()
    assert torch.equal(read.logits.argmax(-1), before)
    with pytest.raises(RuntimeError, match=r"read outputs.logits before optimizer.step\(\)"):
        late.logits.argmax(-1)


@pytest.mark.parametrize("name", ["retain_grad", "register_hook"])
def test_a_gradient_of_lazy_logits_is_refused(name: str) -> None:
    logits = infinity.chunked_loss(causal())(**batch()).logits
    with pytest.raises(RuntimeError, match=r"chunked_loss\(model, max_bytes=None\)"):
        getattr(logits, name)(*[print] * (name == "register_hook"))


class _Twice(torch.autograd.Function):
    """Takes a tensor past Python's operators."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.mul.Scalar(x, 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def test_a_gradient_that_comes_past_python_raises() -> None:
    logits = infinity.chunked_loss(causal())(**batch()).logits
    twice = _Twice.apply(logits)
    assert torch.equal(twice, logits * 2)
    with pytest.raises(RuntimeError, match=r"outputs\.logits\.clone\(\)"):
        twice.sum().backward()


# The model


def test_without_labels_nothing_changes() -> None:
    plain, chunked = causal().eval(), causal().eval()
    infinity.chunked_loss(chunked)
    inputs = {"input_ids": batch()["input_ids"]}
    logits = chunked(**inputs).logits
    assert type(logits) is torch.Tensor
    assert torch.equal(logits, plain(**inputs).logits)
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}
    assert torch.equal(chunked.generate(**inputs, **options), plain.generate(**inputs, **options))
    assert type(chunked(inputs["input_ids"], None).logits) is torch.Tensor


def test_a_second_call_changes_the_limit_and_none_takes_it_off() -> None:
    model = causal()
    forwards = (model.forward, model.lm_head.forward)
    assert infinity.chunked_loss(model) is model
    infinity.chunked_loss(model, 2 * TOKEN)
    rows = {each * VOCABULARY * 4 for each in (1, 2)}
    step = lambda: model(**batch()).loss.backward()  # noqa: E731
    assert peak(step, lambda nbytes: nbytes in rows) == 2 * TOKEN
    assert infinity.chunked_loss(model, max_bytes=None) is model
    assert (model.forward, model.lm_head.forward) == forwards
    assert type(model(**batch()).logits) is torch.Tensor
    infinity.chunked_loss(model, max_bytes=None)


def test_it_is_taken_off_below_what_others_put_on_top() -> None:
    from accelerate import Accelerator

    model = infinity.chunked_loss(causal())
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare(model)
    outputs = prepared(**batch())
    assert isinstance(outputs.logits, LazyLogits) and outputs.logits.dtype == torch.float32
    infinity.chunked_loss(prepared, max_bytes=None)
    assert type(prepared(**batch()).logits) is torch.Tensor


def test_a_copy_computes_with_its_own_weights() -> None:
    model = infinity.chunked_loss(causal(), 4 * TOKEN)
    copied, plain = copy.deepcopy(model), causal()
    with torch.no_grad():
        for each in (copied, plain):
            each.lm_head.weight.mul_(1.5)
    found, expected = (trained(each, batch()) for each in (copied, plain))
    assert isinstance(found.logits, LazyLogits)
    torch.testing.assert_close(found.loss, expected.loss, rtol=CLOSE, atol=0)
    assert distance(copied, plain) < CLOSE
    assert not gradients(model)


def test_after_resized_embeddings_a_second_call_follows_the_new_projection() -> None:
    model = infinity.chunked_loss(causal())
    model.resize_token_embeddings(VOCABULARY + 8)
    assert type(model(**batch()).logits) is torch.Tensor
    infinity.chunked_loss(model)
    outputs = model(**batch())
    assert isinstance(outputs.logits, LazyLogits)
    assert outputs.logits.shape[-1] == VOCABULARY + 8


def test_the_model_dies_with_its_last_reference() -> None:
    import weakref

    model = infinity.chunked_loss(causal())
    model(**batch()).loss.backward()
    reference = weakref.ref(model.lm_head)
    del model
    gc.collect()
    assert reference() is None


def test_a_forward_that_needs_all_logits_says_so_once(caplog: Any) -> None:
    class Masking(type(causal())):  # type: ignore[misc]
        """Forbids a token, as Chameleon does."""

        def loss_of(self, logits: Any, labels: Any, **options: Any) -> torch.Tensor:
            return functional.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))

        def forward(self, input_ids: Any = None, labels: Any = None, **options: Any) -> Any:
            hidden = self.model(input_ids).last_hidden_state
            logits = self.lm_head(hidden)
            logits[..., 3] = torch.finfo(logits.dtype).min
            return Outputs(logits, self.loss_of(logits, labels))

    plain, chunked = Masking(causal().config), Masking(causal().config)
    chunked.load_state_dict(plain.state_dict())
    infinity.chunked_loss(chunked)
    inputs = batch() | {"labels": batch()["input_ids"] % 3}
    with caplog.at_level(logging.WARNING, "infinity"):
        expected, found = trained(plain, inputs), trained(chunked, inputs)
        chunked(**inputs)
    assert torch.equal(found.loss, expected.loss) and same(chunked, plain)
    assert [each.message for each in caplog.records] == [
        "infinity.chunked_loss saves nothing here: the forward of the model needs all logits at "
        "once, for __setitem__"
    ]


class Outputs:
    def __init__(self, logits: Any, loss: torch.Tensor) -> None:
        self.logits, self.loss = logits, loss


def test_adapters_of_peft() -> None:
    peft = pytest.importorskip("peft")
    models = []
    for limit in (None, 3 * TOKEN):
        torch.manual_seed(0)
        adapted = peft.get_peft_model(causal(), peft.LoraConfig(target_modules=["q_proj"], r=4))
        models.append(infinity.chunked_loss(adapted, limit) if limit else adapted)
    expected, found = (trained(model, batch()) for model in models)
    assert isinstance(found.logits, LazyLogits)
    torch.testing.assert_close(found.loss, expected.loss, rtol=CLOSE, atol=0)
    assert distance(models[1], models[0]) < CLOSE
    frozen = VOCABULARY * 32 * 4  # no gradient of the projection is made
    assert peak(lambda: trained(models[1], batch()), lambda nbytes: nbytes == frozen) == 0


# What is refused


def of_labels(logits: Any, labels: Any, **_: Any) -> torch.Tensor:
    """A loss that needs all logits."""
    return functional.log_softmax(logits, -1).sum() + labels.sum()


def with_loss() -> Any:
    model = causal()
    model.loss_function = of_labels
    return model


def with_adapted_projection() -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(causal(), peft.LoraConfig(target_modules=["lm_head"], r=4))


def with_replaced_forward() -> Any:
    model = causal()
    vars(model.lm_head)["forward"] = model.lm_head.forward
    return model


@pytest.mark.parametrize(
    ("model", "limit", "message"),
    [
        (lambda: nn.Linear(2, 2), "1MiB", "takes a causal language model of transformers, not a"),
        (lambda: None, "1MiB", "takes a causal language model of transformers, not None"),
        (FAMILIES["vit"].build, "1MiB", "ViTForImageClassification computes no loss from logits"),
        (lambda: causal().model, "1MiB", "LlamaModel computes no loss from logits"),
        (with_adapted_projection, "1MiB", "the output projection of LlamaForCausalLM is a Linear"),
        (with_replaced_forward, "1MiB", "forward of the output projection .* was replaced by"),
        (with_loss, "1MiB", "of_labels, the loss function of .* for log_softmax"),
        (causal, "a lot", "max_bytes: 'a lot' is not a number of bytes"),
        (causal, 1.5, "max_bytes: 1.5 is not a number of bytes"),
        (causal, 100, "max_bytes is 100 B, and the logits of one token take 1.12 KiB"),
    ],
)
def test_what_is_refused_changes_nothing(
    model: Callable[[], Any], limit: Any, message: str
) -> None:
    given = model()
    before = [dict(vars(each)) for each in given.modules()] if given is not None else []
    with pytest.raises(infinity.ConfigError, match=re.compile(message)):
        infinity.chunked_loss(given, limit)
    if given is not None:
        assert [vars(each) for each in given.modules()] == before
