"""Losses of other libraries that are handed the weight of a head, whole and in tiles, give the bits
of plain PyTorch, or are refused by a sentence of ours.

The real ones run where their libraries are installed. What these do is written again below, small,
for their other versions and for machines that cannot install them.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import infinity
from support.causal import batch, causal
from support.smallest import WIDTH, Block, Wrap, wrapping

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]

ROWS, CHUNK = 128, 5
TILE = 64 * WIDTH * 4
PLACEMENT = {"poison": True, "cache": 0, "gpu_memory": 1 << 26, "cpu_memory": 1 << 26}
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture
def wrap(tmp_path: Path) -> Iterator[Wrap]:
    with wrapping(tmp_path) as make:
        yield make


# What libraries do


def sequence_after_sequence(h: Any, w: Any, labels: Any) -> Any:
    """As in TRL 0.24: logits and log-probabilities of one sequence at a time."""
    found = []
    for row, target in zip(h, labels, strict=True):
        logits = row @ w.t()
        chosen = logits.gather(-1, target[:, None])[:, 0]
        found.append(chosen - torch.logsumexp(logits, -1))
    return -torch.stack(found).mean()


def checkpointed_chunks(h: Any, w: Any, labels: Any) -> Any:
    """As in TRL 1.4: each chunk of tokens in a checkpoint that is handed the weight."""

    def nll(x: Any, weight: Any, target: Any) -> Any:
        return functional.cross_entropy((x @ weight.t()).float(), target, reduction="sum")

    total = h.new_zeros(())
    for x, target in zip(h.flatten(0, 1).split(CHUNK), labels.flatten().split(CHUNK), strict=True):
        total = total + checkpoint(nll, x, w, target, use_reentrant=False)
    return total / labels.numel()


class GradientsInForward(torch.autograd.Function):
    """As Liger's fused linear cross entropy: the forward computes the gradients, and the backward
    multiplies them."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, target: Any) -> Any:
        x_grad, w_grad = torch.zeros_like(x), torch.zeros_like(w)
        loss = torch.zeros(())
        for begin in range(0, len(x), CHUNK):
            rows = slice(begin, begin + CHUNK)
            logits = x[rows] @ w.t()
            loss += functional.cross_entropy(logits, target[rows], reduction="sum")
            logits.sub_(torch.logsumexp(logits, -1, keepdim=True)).exp_()
            logits[torch.arange(len(logits)), target[rows]] -= 1
            logits /= len(x)
            x_grad[rows] = logits @ w
            torch.addmm(w_grad, logits.t(), x[rows], out=w_grad)
        ctx.save_for_backward(x_grad, w_grad)
        return loss / len(x)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        x_grad, w_grad = ctx.saved_tensors
        return x_grad.mul_(given[0]), w_grad.mul_(given[0]), None


class BlocksAgain(torch.autograd.Function):
    """As cut cross entropy: the backward computes blocks of the logits again, of the weight that
    was saved."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, target: Any) -> Any:
        blocks = [torch.logsumexp(x @ block.t(), -1) for block in w.split(48)]
        lse = torch.logsumexp(torch.stack(blocks), 0)
        ctx.save_for_backward(x, w, target, lse)
        return lse - (x * w[target]).sum(-1)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        x, w, target, lse = ctx.saved_tensors
        x_grad, w_grad = torch.zeros_like(x), torch.zeros_like(w)
        for begin in range(0, w.shape[0], 48):
            block = w[begin : begin + 48]
            columns = torch.arange(begin, begin + block.shape[0])
            part = (x @ block.t() - lse[:, None]).exp() - (target[:, None] == columns).float()
            part = part * given[0][:, None]
            x_grad += part @ block
            w_grad[begin : begin + 48] = part.t() @ x
        return x_grad, w_grad, None


class FunctionalGradients(torch.autograd.Function):
    """As Liger's chunked preference losses: `torch.func.grad_and_value` over chunks in the
    forward."""

    @staticmethod
    def forward(ctx: Any, h: Any, w: Any, target: Any) -> Any:
        def preferred(x: Any, weight: Any, labels: Any) -> Any:
            logps = functional.log_softmax((x @ weight.t()).float(), -1)
            chosen, rejected = logps.gather(-1, labels[..., None])[..., 0].mean(-1).chunk(2)
            return -functional.logsigmoid(chosen - rejected).sum(), (chosen, rejected)

        found = torch.func.grad_and_value(preferred, argnums=(0, 1), has_aux=True)
        w_grad, half = torch.zeros_like(w), len(h) // 2
        chosen_grads, rejected_grads, total = [], [], torch.zeros(())
        for place in range(half):
            pair = [place, half + place]
            gradients, (loss, _) = found(h[pair], w, target[pair])
            w_grad.add_(gradients[1])
            chosen_grads.append(gradients[0][:1])
            rejected_grads.append(gradients[0][1:])
            total.add_(loss)
        ctx.save_for_backward(torch.cat(chosen_grads + rejected_grads), w_grad)
        return total

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        h_grad, w_grad = ctx.saved_tensors
        return h_grad * given[0], w_grad * given[0], None


def of_tokens(function: Any) -> Loss:
    """The loss of a function that takes all tokens in a row."""
    return lambda h, w, labels: function(h.flatten(0, 1), w, labels.flatten()).mean()


# The libraries themselves


def chunked_by_torch(reduction: str) -> Loss:
    if not hasattr(functional, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK, chunking_method=None)

    def function(x: Any, w: Any, target: Any) -> Any:
        return functional.linear_cross_entropy(x, w, target, reduction=reduction, options=options)

    return of_tokens(function)


def log_probabilities_of_trl() -> Loss:
    function = pytest.importorskip("trl.kernels.chunked_logprob").ChunkedLogProbFunction

    def loss(x: Any, w: Any, target: Any) -> Any:
        logps, entropy, *_ = function.apply(x, w, None, target, 0.7, 48, 20.0, 1.0, ("entropy",))
        return 0.1 * entropy - logps

    return of_tokens(loss)


def divergence_of_trl() -> Loss:
    """The head is that of the teacher, too, as where adapters are turned off."""
    function = pytest.importorskip("trl.kernels.chunked_divergence").ChunkedDivergenceFunction

    def loss(x: Any, w: Any, _: Any) -> Any:
        return function.apply(x, w, None, x.detach().cos(), w, None, 0.5)[0]

    return of_tokens(loss)


def selected_by_trl() -> Loss:
    utils = pytest.importorskip("trl.trainer.utils")

    def loss(h: Any, w: Any, labels: Any) -> Any:
        logits = functional.linear(h, w)
        entropy = utils.entropy_from_logits(logits, chunk_size=CHUNK)
        return (entropy * 0.1 - utils.selective_log_softmax(logits, labels)).mean()

    return loss


def preferences_of_liger(compiled: bool = False) -> Loss:
    liger = pytest.importorskip("liger_kernel.chunked_loss")
    made = liger.LigerFusedLinearORPOLoss(compiled=compiled)
    return lambda h, w, labels: made(w, h, labels)[0]


def cut_cross_entropy() -> Loss:
    library = pytest.importorskip("cut_cross_entropy")
    return lambda h, w, labels: library.linear_cross_entropy(h, w, labels, impl="torch_compile")


LOSSES: dict[str, Callable[[], Loss]] = {
    "sequence after sequence": lambda: sequence_after_sequence,
    "checkpointed chunks": lambda: checkpointed_chunks,
    "gradients in the forward": lambda: of_tokens(GradientsInForward.apply),
    "blocks again": lambda: of_tokens(BlocksAgain.apply),
    "torch, mean": lambda: chunked_by_torch("mean"),
    "torch, each": lambda: chunked_by_torch("none"),
    "trl, log-probabilities": log_probabilities_of_trl,
    "trl, divergence": divergence_of_trl,
    "trl, selected": selected_by_trl,
}
TRANSFORMED: dict[str, Callable[[], Loss]] = {
    "torch.func": lambda: FunctionalGradients.apply,
    "liger": preferences_of_liger,
}
COMPILED: dict[str, Callable[[], Loss]] = {
    "liger": lambda: preferences_of_liger(compiled=True),
    "cut cross entropy": cut_cross_entropy,
}


# Where a head is used


class Model(nn.Module):
    """Tokens become hidden states, of which the model computes a loss at `place`; or gives them
    where there is none."""

    def __init__(self, loss: Loss, place: str, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.loss, self.place = loss, place

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.block(self.embed(ids))
        found.retain_grad()
        return found

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.hidden(ids)
        return hidden, PLACES[self.place](self, hidden, labels)


def checkpointed(reentrant: bool) -> Callable[[Any, Any, Any], Any]:
    def run(model: Any, h: Any, labels: Any) -> Any:
        return checkpoint(model.loss, h, model.head.weight, labels, use_reentrant=reentrant)

    return run


def read_in_a_checkpoint(model: Any, h: Any, labels: Any) -> Any:
    def loss(hidden: Any) -> Any:
        return model.loss(hidden, model.head.weight, labels)

    return checkpoint(loss, h, use_reentrant=False)


AFTER, IN_THE_HEAD = "after the forward", "in the head's forward"
REDIRECTED = "in a redirected forward"
PLACES: dict[str, Callable[[Any, Any, Any], Any]] = {
    AFTER: lambda model, h, labels: None,
    "in the forward": lambda model, h, labels: model.loss(h, model.head.weight, labels),
    "in a checkpoint": checkpointed(reentrant=False),
    "in a re-entrant checkpoint": checkpointed(reentrant=True),
    "read in a checkpoint": read_in_a_checkpoint,
    IN_THE_HEAD: lambda model, h, labels: model.head(h, labels),
    REDIRECTED: lambda model, h, labels: None,
}
WEIGHTS: dict[str, dict[str, bool]] = {
    "whole": {},
    "tied": {"tied": True},
    "in tiles": {"tiled": True},
}


def built(loss: Loss, place: str, tied: bool = False, tiled: bool = False) -> Any:
    torch.manual_seed(0)
    model: Any = Model(loss, place, tied)
    if tiled:
        infinity.tile(model, TILE)
    if place == IN_THE_HEAD:

        def forward(head: Any, h: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return loss(h, head.weight, labels)

        model.head.forward = types.MethodType(forward, model.head)
    return model


def names(model: Any) -> dict[str, torch.Tensor]:
    return {
        "embed": model.embed.weight,
        "block": model.block.linear.weight,
        "bias": model.block.linear.bias,
        "head": model.head.weight,
    }


def redirected(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> Any:
    """As trainers of TRL have a model call them: its forward is another one for one call."""
    forward = model.forward

    def instead(ids: torch.Tensor, labels: torch.Tensor) -> Any:
        model.forward = forward
        hidden = model.hidden(ids)
        return hidden, model.loss(hidden, model.head.weight, labels)

    model.forward = instead
    return model(ids, labels)


def loss_of(model: Any, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states, and the loss."""
    generator = torch.Generator().manual_seed(step)
    ids, labels = torch.randint(0, ROWS, (2, 4, 3), generator=generator)
    hidden, loss = (redirected if model.place == REDIRECTED else type(model).__call__)(
        model, ids, labels
    )
    return hidden, model.loss(hidden, model.head.weight, labels) if loss is None else loss


def trained(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Losses, gradients and weights of two steps."""
    found = []
    for step in range(2):
        hidden, loss = loss_of(model, step)
        (loss * 3).backward()
        found += [loss.detach(), hidden.grad]
        found += [parameter.grad.clone() for parameter in names(model).values()]
        optimizer.step()
        optimizer.zero_grad()
        found += [parameter.detach().clone() for parameter in names(model).values()]
    return found


def stepping(model: Any, wrapped: bool) -> torch.optim.Optimizer:
    """An optimizer of torch, as it is or on the slow path of a wrapped model."""
    if wrapped:
        return infinity.adapt(torch.optim.RMSprop, model.parameters(), lr=0.01)
    return torch.optim.RMSprop(model.parameters(), lr=0.01)


def both(loss: Loss, place: str, weight: str, wrap: Wrap) -> Iterator[tuple[Any, Any]]:
    """What the wrapped model has and what the plain one has, one after the other."""
    plain = built(loss, place, tied=WEIGHTS[weight].get("tied", False))
    expected = trained(plain, stepping(plain, wrapped=False))
    model = wrap(built(loss, place, **WEIGHTS[weight]), PLACEMENT)
    found = trained(model, stepping(model, wrapped=True))
    yield from zip(found, expected, strict=True)


weights = pytest.mark.parametrize("weight", WEIGHTS)


@pytest.mark.pairs
@weights
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_takes_the_weight_has_the_bits_of_plain_pytorch(
    name: str, place: str, weight: str, wrap: Wrap
) -> None:
    for ours, theirs in both(LOSSES[name](), place, weight, wrap):
        assert torch.equal(ours, theirs)


@weights
@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_transformed_loss_after_the_forward_has_the_bits_of_plain_pytorch(
    name: str, weight: str, wrap: Wrap
) -> None:
    for ours, theirs in both(TRANSFORMED[name](), AFTER, weight, wrap):
        assert torch.equal(ours, theirs)


@pytest.mark.pairs
@weights
@pytest.mark.parametrize("place", [place for place in PLACES if place != AFTER])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_transformed_loss_in_a_forward_is_refused(
    name: str, place: str, weight: str, wrap: Wrap
) -> None:
    model = wrap(built(TRANSFORMED[name](), place, **WEIGHTS[weight]), PLACEMENT)
    with pytest.raises(RuntimeError, match=r"saved tensor hooks.*call the transform outside"):
        loss_of(model, 0)


@weights
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_loss_after_the_forward_is_that_of_plain_pytorch_to_rounding(
    name: str, weight: str, wrap: Wrap
) -> None:
    for ours, theirs in both(COMPILED[name](), AFTER, weight, wrap):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@weights
def test_the_fused_head_of_trl(weight: str, wrap: Wrap) -> None:
    """It takes the place of the forward of a model, before that is wrapped."""
    utils = pytest.importorskip("trl.trainer.utils")
    found = []
    for wrapped in (False, True):
        model = causal(tie_word_embeddings=weight == "tied")
        utils.add_fused_lm_head(model, temperature=0.7, outputs=("entropy",))
        if wrapped:
            if weight == "in tiles":
                infinity.tile(model, TILE)
            wrap(model, PLACEMENT)
        optimizer = stepping(model, wrapped)
        for step in range(2):
            outputs = model(**batch(step), fused_lm_head=True)
            (outputs.loss + 0.1 * outputs.entropy.mean()).backward()
            found.append(outputs.log_probs.detach())
            optimizer.step()
            optimizer.zero_grad()
        found += [value.clone() for value in model.state_dict().values()]
    half = len(found) // 2
    for theirs, ours in zip(found[:half], found[half:], strict=True):
        assert torch.equal(ours, theirs)
