"""Hooks on saved tensors that a model enters inside of its own forwards never keep a parameter, on
any placement.

The parameters lose their bytes with the end of the call, so hooks that keep one as it is would give
a backward other bytes. The gradients here have the bits that plain PyTorch gives them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    disable_saved_tensors_hooks,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.utils.checkpoint import checkpoint

import infinity
from support.smallest import PLACEMENTS, WIDTH, Block, Wrap, wrapping

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(120)]

Act = Callable[["Weighted", torch.Tensor], torch.Tensor]
every_placement = pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)


@pytest.fixture
def wrap(tmp_path: Path) -> Iterator[Wrap]:
    """Nothing may be in use at the end, and torch is as it was."""
    push = torch._C._autograd._push_saved_tensors_default_hooks
    with wrapping(tmp_path) as make:
        yield make
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        assert torch._C._autograd._push_saved_tensors_default_hooks is push


class Weighted(nn.Module):
    """Does something with a parameter of its own."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH) + 1)
        self.inner = Block()
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self, x)


class Model(nn.Module):
    """Eight blocks between two of something special."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.special = Weighted(act)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.last = Weighted(act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.special(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed))


def made(act: Act) -> nn.Module:
    torch.manual_seed(0)
    return Model(act)


def gradients_differ(model: nn.Module, plain: nn.Module) -> list[str]:
    """The parameters of which the gradients of the wrapped `model` and of the plain one differ by a
    bit."""
    found = dict(model.named_parameters())
    pairs = {
        name: (infinity.engine(model).gradient(found[name]), p.grad)
        for name, p in plain.named_parameters()
    }
    return [name for name, (a, b) in pairs.items() if not (a is b is None or torch.equal(a, b))]


def as_plain(act: Act, placement: dict[str, Any], wrap: Wrap) -> None:
    """Losses and gradients of two backwards have the bits of plain PyTorch."""
    plain, model = made(act), wrap(made(act), placement)
    for seed in range(2):
        losses = [each(batch(seed).requires_grad_()).square().mean() for each in (model, plain)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        assert not gradients_differ(model, plain)
        plain.zero_grad()
        infinity.engine(model).zero_grad()


def identity(value: Any) -> Any:
    return value


@contextmanager
def pushed() -> Iterator[None]:
    """Hooks without a context manager of torch's."""
    torch._C._autograd._push_saved_tensors_default_hooks(identity, identity)
    try:
        yield
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()


@contextmanager
def twice() -> Iterator[None]:
    """Hooks on hooks."""
    with (
        saved_tensors_hooks(lambda t: [t], lambda kept: kept[0]),
        saved_tensors_hooks(lambda t: (t,), lambda kept: kept[0]),
    ):
        yield


KINDS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "identity": lambda: saved_tensors_hooks(identity, identity),
    "save_on_cpu": save_on_cpu,
    "pushed": pushed,
    "twice": twice,
}
every_kind = pytest.mark.parametrize("hooks", KINDS.values(), ids=KINDS)


@every_kind
@every_placement
def test_hooks_around_an_operation_of_a_module(
    hooks: Callable[[], AbstractContextManager[Any]], placement: dict[str, Any], wrap: Wrap
) -> None:
    def act(self: Weighted, x: torch.Tensor) -> torch.Tensor:
        with hooks():
            return x * self.weight

    as_plain(act, placement, wrap)


@every_kind
def test_hooks_around_an_operation_and_a_module(
    hooks: Callable[[], AbstractContextManager[Any]], wrap: Wrap
) -> None:
    def act(self: Weighted, x: torch.Tensor) -> torch.Tensor:
        with hooks():
            return self.inner(x * self.weight) * self.weight

    as_plain(act, {}, wrap)


@pytest.mark.parametrize("reentrant", [False, True])
@every_kind
def test_hooks_inside_of_a_checkpoint(
    reentrant: bool, hooks: Callable[[], AbstractContextManager[Any]], wrap: Wrap
) -> None:
    def act(self: Weighted, x: torch.Tensor) -> torch.Tensor:
        def span(y: torch.Tensor) -> torch.Tensor:
            with hooks():
                y = y * self.weight
            return self.inner(y) * self.weight

        return checkpoint(span, x, use_reentrant=reentrant)

    as_plain(act, {}, wrap)


@pytest.mark.parametrize("reentrant", [False, True])
@every_kind
def test_hooks_that_are_all_of_a_checkpoint(
    reentrant: bool, hooks: Callable[[], AbstractContextManager[Any]], wrap: Wrap
) -> None:
    def act(self: Weighted, x: torch.Tensor) -> torch.Tensor:
        def span(y: torch.Tensor) -> torch.Tensor:
            with hooks():
                return y * self.weight

        return checkpoint(span, x, use_reentrant=reentrant)

    as_plain(act, {}, wrap)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("hooks", [nullcontext, *KINDS.values()], ids=["none", *KINDS])
@every_placement
def test_a_checkpoint_of_an_operation_of_a_module(
    reentrant: bool,
    hooks: Callable[[], AbstractContextManager[Any]],
    placement: dict[str, Any],
    wrap: Wrap,
) -> None:
    def act(self: Weighted, x: torch.Tensor) -> torch.Tensor:
        with hooks():
            return checkpoint(
                lambda y: torch.tanh(y * self.weight) * self.weight, x, use_reentrant=reentrant
            )

    as_plain(act, placement, wrap)


def test_hooks_get_what_is_no_parameter(wrap: Wrap) -> None:
    """As in plain PyTorch, but for the parameters."""
    seen: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor * 2

    def act(self: Weighted, x: torch.Tensor) -> torch.Tensor:
        with saved_tensors_hooks(pack, lambda kept: kept * 0.5):
            return torch.sigmoid(x * self.weight)

    as_plain(act, {}, wrap)
    # Of the plain model, and of both.
    assert {tuple(tensor.shape) for tensor in seen} == {(5, WIDTH), (WIDTH,)}
    assert sum(tensor.shape == (WIDTH,) for tensor in seen) == 4


def test_hooks_that_allow_mutation(wrap: Wrap) -> None:
    class Changing(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            z = super().forward(y * y)
            y.zero_()
            return z

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Changing(lambda self, x: x * self.weight)

    plain, model = build(), wrap(build(), {})
    leaves = [batch().requires_grad_() for _ in range(2)]
    for leaf, each in zip(leaves, (plain, model), strict=True):
        with allow_mutation_on_saved_tensors():
            each(leaf).square().mean().backward()
    assert torch.equal(leaves[0].grad, leaves[1].grad)
    assert not gradients_differ(model, plain)


def test_hooks_of_a_model_inside_of_another_one(wrap: Wrap) -> None:
    """Two engines, each with parameters of its own under the hooks."""

    def scale(self: Weighted, x: torch.Tensor) -> torch.Tensor:
        with saved_tensors_hooks(identity, identity):
            return x * self.weight

    def build(inner: nn.Module) -> nn.Module:
        def act(self: Weighted, x: torch.Tensor) -> torch.Tensor:
            with saved_tensors_hooks(identity, identity):
                return inner(x * self.weight) * self.weight

        torch.manual_seed(1)
        return Model(act)

    inners = made(scale), wrap(made(scale), {})
    plain, model = build(inners[0]), wrap(build(inners[1]), {})
    for each in (plain, model):
        each(batch()).square().mean().backward()
    assert not gradients_differ(model, plain)
    assert not gradients_differ(inners[1], inners[0])


def test_hooks_that_stay_after_an_exception(wrap: Wrap) -> None:
    """What an exception leaves entered is as in plain PyTorch: whoever entered it takes it off."""
    held = saved_tensors_hooks(identity, identity)

    def act(self: Weighted, x: torch.Tensor) -> torch.Tensor:
        with saved_tensors_hooks(identity, identity):
            raise ZeroDivisionError

    def multiply(self: Weighted, x: torch.Tensor) -> torch.Tensor:
        with saved_tensors_hooks(identity, identity):
            return x * self.weight

    model = wrap(made(act), {})
    with pytest.raises(ZeroDivisionError), held:
        model(batch())
    model.special.act = model.last.act = multiply
    plain = made(multiply)
    for each in (model, plain):
        each(batch()).square().mean().backward()
    assert not gradients_differ(model, plain)


def test_hooks_in_gathered(wrap: Wrap) -> None:
    def loss(model: nn.Module) -> torch.Tensor:
        with saved_tensors_hooks(identity, identity):
            return (model.special.weight * model.special.weight).sum()

    def act(self: Weighted, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    plain, model = made(act), wrap(made(act), {})
    with infinity.gathered(model.special):
        found = loss(model)
    model(batch())
    found.backward()
    loss(plain).backward()
    assert not gradients_differ(model, plain)


def test_hooks_outside_of_forwards_are_left_alone(wrap: Wrap) -> None:
    """Another thread enters hooks while a forward is under way, and they are its own."""
    seen: list[Any] = []

    def beside() -> None:
        with saved_tensors_hooks(identity, identity):
            seen.append(torch._C._autograd._top_saved_tensors_default_hooks(False))

    def act(self: Weighted, x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        return x * self.weight

    model = wrap(made(act), {})
    model(batch())
    assert seen == [(identity, identity)] * 2


def test_a_model_without_hooks_on_saved_tensors_is_refused(wrap: Wrap) -> None:
    model = wrap(made(lambda self, x: x * self.weight), {})
    refused = (
        r"hooks on saved tensors are disabled here \(none of them\).*come back for the backward"
    )
    with disable_saved_tensors_hooks("none of them"):
        for module in (model, model.special):
            with pytest.raises(RuntimeError, match=refused):
                module(batch())
    model(batch()).sum().backward()

    def act(self: Weighted, x: torch.Tensor) -> torch.Tensor:
        with disable_saved_tensors_hooks("none of them"):
            return x * self.weight

    model.special.act = act
    # torch disables no hooks that are entered
    with pytest.raises(RuntimeError, match="none of them"):
        model(batch())
