"""Hooks on parameters that run inside of a backward, before and after `wrap`: they get the
gradients of a plain model, or a sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from support.configs import config_of
from support.pairs import TIERS, WIDTH, built

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, HOOKED = 3, 5
"""Backwards, and parameters with a hook."""
NOT_FINAL = r"is kept by the engine and not final .* give parameter\.register_hook a function"


def made() -> Any:
    """A model with a tied and a frozen weight."""
    model = built()
    model.late.weight = model.head.weight
    model.uses_late = True
    model.down.bias.requires_grad_(False)
    return model


def register(model: nn.Module, kind: str, hook: Any) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            getattr(parameter, kind)(lambda given, name=name: hook(name, given))


def micro_steps(model: Any) -> None:
    """Backwards that accumulate."""
    for step in range(STEPS):
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()


@pytest.fixture(params=[(tier, when) for tier in TIERS for when in ("before", "after")], ids=str)
def place(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A tier, and when hooks are registered: before or after `wrap`."""
    found: tuple[str, str] = request.param
    return found


@pytest.fixture
def hooked(place: tuple[str, str], tmp_path: Path) -> Any:
    """Makes a wrapped model with hooks of a kind."""
    tier, when = place
    models: list[Any] = []

    def wrapped(kind: str, hook: Any) -> Any:
        model = made()
        if when == "before":
            register(model, kind, hook)
        config = config_of(
            nvme=tmp_path, gpu_memory="4MiB", cpu_memory="8MiB", poison=True, **TIERS[tier]
        )
        models.append(infinity.wrap(model, config))
        if when == "after":
            register(models[0], kind, hook)
        return models[0]

    yield wrapped
    infinity.engine(models[0]).close()


def test_a_hook_before_accumulation_gets_each_gradient(hooked: Any) -> None:
    seen: list[list[tuple[str, torch.Tensor]]] = [[], []]
    plain = made()
    register(plain, "register_hook", lambda name, g: seen[0].append((name, g.clone())))
    model = hooked("register_hook", lambda name, g: seen[1].append((name, g.clone())))
    micro_steps(plain)
    micro_steps(model)
    assert len(seen[0]) == STEPS * HOOKED
    assert [name for name, _ in seen[1]] == [name for name, _ in seen[0]]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(*seen, strict=True))


def test_a_hook_after_accumulation_is_called_with_the_parameter(hooked: Any) -> None:
    calls: list[list[tuple[str, Any]]] = [[], []]
    plain = made()
    register(plain, "register_post_accumulate_grad_hook", lambda *call: calls[0].append(call))
    model = hooked("register_post_accumulate_grad_hook", lambda *call: calls[1].append(call))
    micro_steps(plain)
    micro_steps(model)
    assert [name for name, _ in calls[1]] == [name for name, _ in calls[0]]
    assert all(parameter is model.get_parameter(name) for name, parameter in calls[1])


@pytest.mark.parametrize("way", ["read", "forget", "step"])
def test_a_hook_after_accumulation_has_no_gradient(
    hooked: Any, place: tuple[str, str], way: str
) -> None:
    said: list[str] = []
    optimizers: list[Any] = []

    def use(name: str, parameter: Any) -> None:
        try:
            if way == "read":
                parameter.grad.norm()
            elif way == "forget":
                parameter.grad = None
            else:
                optimizers[0].step()
        except infinity.ShardedParameterError as error:
            said.append(str(error))

    plain = made()
    forgets = way == "forget" and place[1] == "after"  # a hook of the engine ran before it
    if forgets:
        register(plain, "register_post_accumulate_grad_hook", use)
    model = hooked("register_post_accumulate_grad_hook", use)
    optimizers.append(infinity.AdamW(model.parameters(), lr=1e-2))
    micro_steps(plain)
    micro_steps(model)
    assert len(said) == (0 if forgets else STEPS * HOOKED)
    for name, parameter in plain.named_parameters():
        found = model.get_parameter(name).grad
        if parameter.grad is None:
            assert found is None
        else:
            assert torch.equal(found.clone(), parameter.grad), "a refusal changes nothing"
    sentence = "inside of a backward: .* Step once after" if way == "step" else NOT_FINAL
    assert all(re.search(sentence, each) for each in said)


def test_the_gradient_that_a_hook_has_left_behind_is_forgotten(hooked: Any) -> None:
    """A backward that a hook of the user ended left it, and the next one was added to it."""
    raising = [True]

    def hook(name: str, parameter: torch.Tensor) -> None:
        if raising[0]:
            raise LookupError(name)

    model = hooked("register_post_accumulate_grad_hook", hook)
    with pytest.raises(LookupError):
        micro_steps(model)
    raising[0] = False
    model.zero_grad()
    micro_steps(model)
    plain = made()
    micro_steps(plain)
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        expected = other.grad
        assert (parameter.grad is None) is (expected is None), name
        if expected is not None:
            torch.testing.assert_close(parameter.grad.clone(), expected, rtol=1e-6, atol=1e-7)
