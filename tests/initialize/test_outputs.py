"""What an engine gives to a script is used as the output of a plain model: changed in place, cut
off from its graph, kept, watched, saved. Values, gradients and errors are those of plain
PyTorch."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutput

import infinity
from infinity.deepspeed.fragments import safe_get_full_grad
from infinity.losses.lazy_logits import LazyLogits
from support.causal import batch, causal
from support.configs import config_of
from support.deepspeed import configuration

pytestmark = pytest.mark.usefixtures("one_thread")

Start = Callable[..., tuple[Any, Any, Any, Any]]
Backward = Callable[..., Any]
SCALE = 4.0


class Body(nn.Module):
    """Two layers. `last` gives the outputs of what the second one computes."""

    def __init__(self, last: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 6)
        self.last = last

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.second(functional.gelu(self.first(x))))


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return (out.float() * torch.arange(out.numel()).view(out.shape)).sin().sum()


def after(change: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor, Backward], Any]:
    """The loss of the output after `change`, or of what that returns."""

    def use(out: torch.Tensor, backward: Backward) -> Any:
        found = change(out)
        value = found if isinstance(found, torch.Tensor) else out
        backward(loss_of(value))
        return [value, out]

    return use


def put(out: torch.Tensor, index: Any, value: Any) -> None:
    out[index] = value


def in_no_grad(out: torch.Tensor) -> None:
    with torch.no_grad():
        out.mul_(2)


def twice(out: torch.Tensor, backward: Backward) -> Any:
    backward(loss_of(out), retain_graph=True)
    backward(loss_of(out))
    return [out]


def detached(out: torch.Tensor, backward: Backward) -> Any:
    backward(loss_of(out))
    out.detach_()
    return [out, out.requires_grad, out.grad_fn, out.is_leaf]


def hooked(out: torch.Tensor, backward: Backward) -> Any:
    seen: list[torch.Tensor] = []
    out.register_hook(seen.append)
    out.register_hook(lambda gradient: gradient * 0.5)
    out.mul_(3)
    out.register_hook(seen.append)
    backward(loss_of(out))
    return seen


def hooked_and_removed(out: torch.Tensor, backward: Backward) -> Any:
    seen: list[torch.Tensor] = []
    out.register_hook(seen.append).remove()
    backward(loss_of(out))
    return seen


def retained(out: torch.Tensor, backward: Backward) -> Any:
    out.retain_grad()
    backward(loss_of(out))
    return [out.grad, out.retains_grad]


def watched_node(out: torch.Tensor, backward: Backward) -> Any:
    seen: list[Any] = []
    assert out.grad_fn is not None
    out.grad_fn.register_prehook(lambda gradients: seen.extend(gradients))
    backward(loss_of(out))
    return seen


def asked(out: torch.Tensor, backward: Backward) -> Any:
    """Gradients of the output itself, by autograd."""
    found = torch.autograd.grad(loss_of(out), out)
    backward(loss_of(out))
    return list(found)


def double(out: torch.Tensor, backward: Backward) -> Any:
    (found,) = torch.autograd.grad(loss_of(out), out, create_graph=True)
    backward(found.square().sum())
    return [found]


def saved(out: torch.Tensor, backward: Backward) -> Any:
    file = io.BytesIO()
    torch.save({"out": out.detach(), "graph": out}, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    backward(loss_of(out))
    return [found["out"], found["graph"], found["graph"].requires_grad, len(pickle.dumps(out.data))]


def told(out: torch.Tensor, backward: Backward) -> Any:
    backward(loss_of(out))
    flags = [out.is_leaf, out.requires_grad, out.dtype, out.shape, out.stride(), out.is_inference()]
    return [*flags, type(out), out.storage_offset(), out.is_contiguous(), len(out)]


OPERATIONS: dict[str, Callable[[torch.Tensor, Backward], Any]] = {
    "nothing": after(lambda out: None),
    "mul_": after(lambda out: out.mul_(2)),
    "+=": after(lambda out: out.__iadd__(1.5)),
    "add_ of itself": after(lambda out: out.add_(out, alpha=2)),
    "tanh_": after(lambda out: out.tanh_()),
    "relu in place": after(lambda out: functional.relu(out, inplace=True)),
    "dropout in place": after(lambda out: functional.dropout(out, 0.0, inplace=True)),
    "out[0] = 0": after(lambda out: put(out, 0, 0.0)),
    "out[mask] = 1": after(lambda out: put(out, out.detach() > 0, 1.0)),
    "index_fill_": after(lambda out: out.index_fill_(0, torch.tensor([0]), 0.0)),
    "masked_fill_": after(lambda out: out.masked_fill_(out.detach() > 0, 2.0)),
    "copy_": after(lambda out: out.copy_(out.detach() + 1)),
    "zero_": after(lambda out: out.zero_()),
    "clamp_": after(lambda out: out.clamp_(-0.1, 0.1)),
    "a part in place": after(lambda out: out[:1].mul_(3) * 1),
    "a column in place": after(lambda out: out[..., 1:2].add_(3).square()),
    "in place, then a view": after(lambda out: out.mul_(2).view(-1)[1:]),
    "a view, then in place": after(lambda out: (out.view(-1), out.mul_(2))[0]),
    "chunk": after(lambda out: torch.cat(out.chunk(2, -1)[::-1])),
    "unbind": after(lambda out: torch.stack(out.unbind())),
    "expand": after(lambda out: out.expand(2, *out.shape)),
    "unsqueeze_": after(lambda out: out.unsqueeze_(0)),
    "t_": after(lambda out: out.transpose_(0, -1)),
    "resize_": after(lambda out: out.resize_(1)),
    "data": after(lambda out: (out.data.mul_(2), out)[1]),
    "data set": after(lambda out: setattr(out, "data", torch.ones_like(out))),
    "in place without grad": after(in_no_grad),
    "requires_grad_": after(lambda out: out.requires_grad_(False)),
    "clone": after(lambda out: out.clone().mul_(2)),
    "half": after(lambda out: out.half()),
    "deepcopy": after(copy.deepcopy),
    "numpy": after(lambda out: torch.from_numpy(out.detach().numpy()) * out),
    "checkpoint": after(lambda out: checkpoint(torch.sin, out, use_reentrant=False)),
    "saved, then in place": after(lambda out: (out.square(), out.mul_(2))[0]),
    "twice": twice,
    "detach_": detached,
    "hooks": hooked,
    "hooks that were removed": hooked_and_removed,
    "retain_grad": retained,
    "a hook of the node": watched_node,
    "autograd.grad": asked,
    "create_graph": double,
    "torch.save": saved,
    "what it says": told,
}
OUTPUTS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any]]] = {
    "a tensor": (lambda h: h, lambda found: found),
    "tanh, which saves it": (torch.tanh, lambda found: found),
    "a tuple": (lambda h: (h * 2, 1), lambda found: found[0]),
    "a dict": (lambda h: {"loss": h.sum(), "out": h * 2}, lambda found: found["out"]),
    "an output of transformers": (
        lambda h: CausalLMOutput(loss=h.sum(), logits=h * 2),
        lambda found: found.logits,
    ),
    "one tensor twice": (lambda h: [h, h], lambda found: found[found[0] is not found[1]]),
}
ENGINES: dict[str, tuple[dict[str, Any], float, float]] = {
    "accumulation": ({"gradient_accumulation_steps": 3}, 3.0, 1.0),
    "fp16": ({"fp16": {"enabled": True, "initial_scale_power": 2}}, 1.0, SCALE),
    "alone": ({}, 1.0, 1.0),
}
"""Keys of the configuration, what a loss is divided by, and its scale."""


def given() -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(1))


def told_of(use: Callable[[], Any]) -> Any:
    """What `use` returns, or the error that it raises."""
    try:
        found = use()
    except (RuntimeError, ValueError) as error:
        return [type(error), str(error).partition(":")[0]]
    return [each.detach().clone() if isinstance(each, torch.Tensor) else each for each in found]


def same(found: Any, expected: Any, what: str) -> None:
    assert len(found) == len(expected), (what, found, expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, torch.Tensor):
            assert isinstance(one, torch.Tensor), what
            torch.testing.assert_close(one, other, rtol=0, atol=0, msg=f"{what}: {one} {other}")
        else:
            assert one == other, (what, one, other)


def plain(kind: str, divisor: float, scale: float, use: Any) -> tuple[Any, list[Any]]:
    last, pick = OUTPUTS[kind]
    model = Body(last).half() if scale != 1 else Body(last)

    def backward(loss: torch.Tensor, **options: Any) -> None:
        ((loss / divisor if divisor != 1 else loss) * scale).backward(**options)

    x = given().half() if scale != 1 else given()
    found = told_of(lambda: use(pick(model(x)), backward))
    gradients = [None if p.grad is None else p.grad.float() / scale for p in model.parameters()]
    return found, gradients


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("name", ENGINES)
def test_outputs_are_used_as_those_of_a_plain_model(start: Start, name: str, kind: str) -> None:
    keys, divisor, scale = ENGINES[name]
    last, pick = OUTPUTS[kind]
    engine, *_ = start(model=Body(last), config=configuration(**keys))
    x = given().half() if scale != 1 else given()
    for what, use in OPERATIONS.items():
        expected, wanted = plain(kind, divisor, scale, use)
        engine.zero_grad()
        found = told_of(lambda use=use: use(pick(engine(x)), engine.backward))
        same(found, expected, what)
        same([safe_get_full_grad(p) for p in engine.parameters()], wanted, what)


@pytest.mark.parametrize("recompute", ["off", "all"])
def test_those_of_a_wrapped_model_too(tmp_path: Any, recompute: str) -> None:
    last, pick = OUTPUTS["a tuple"]
    budgets = {"gpu_memory": 1 << 24, "cpu_memory": 1 << 24}
    config = config_of(nvme=tmp_path, recompute=recompute, device="cpu", **budgets)
    model = infinity.wrap(Body(last), config)
    with infinity.engine(model):
        for what, use in OPERATIONS.items():
            expected, wanted = plain("a tuple", 1.0, 1.0, use)
            for parameter in model.parameters():
                parameter.grad = None
            found = told_of(lambda use=use: use(pick(model(given())), torch.Tensor.backward))
            same(found, expected, what)
            kept = [None if p.grad is None else p.grad + 0 for p in model.parameters()]
            same(kept, wanted, what)


def test_outputs_that_share_memory_go_on_sharing_it(start: Start) -> None:
    """A change in place of one of them is one of the others, for gradients, too."""

    def views(h: torch.Tensor) -> Any:
        h = h * 2
        return {"all": h, "rows": h[1:], "turned": h.t(), "double": h.view(torch.int32)}

    def loss(found: Any) -> torch.Tensor:
        found["rows"].mul_(3)
        found["turned"][0].add_(found["all"][0, 0])
        total: torch.Tensor = loss_of(found["all"]) + loss_of(found["turned"])
        return total + loss_of(found["rows"])

    config = configuration(gradient_accumulation_steps=3)
    engine, *_ = start(model=Body(views), config=config)
    model = Body(views)
    found = model(given())
    (loss(found) / 3).backward()
    ours = engine(given())
    assert torch.equal(ours["double"], model(given())["double"])
    engine.backward(loss(ours))
    assert torch.equal(ours["all"], found["all"]) and torch.equal(ours["double"], found["double"])
    same(
        [safe_get_full_grad(p) for p in engine.parameters()],
        [p.grad for p in model.parameters()],
        "",
    )


def test_logits_of_a_chunked_loss_stay_lazy(start: Start) -> None:
    """Where gradients are divided on their way in, too: by the engine, and by the script."""

    for by_engine in (True, False):
        model = infinity.chunked_loss(causal(), "1MiB")
        engine, *_ = start(model=model, config=configuration(gradient_accumulation_steps=3))
        whole = causal()
        losses, lazy = [], []
        for each in (engine, whole):
            found = each(**batch())
            lazy.append(found.logits)
            rows, target = found.logits.flatten(0, 1), batch()["input_ids"].flatten()
            losses.append(found.loss + functional.cross_entropy(rows, target))
        assert isinstance(lazy[0], LazyLogits) and not lazy[0].is_there
        engine.backward(losses[0]) if by_engine else losses[0].backward()
        (losses[1] / 3).backward()
        for one, other in zip(engine.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(safe_get_full_grad(one), other.grad)
