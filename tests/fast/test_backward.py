"""`BackwardPass` follows one backward pass: nested, completed, or cut off."""

from __future__ import annotations

import pytest
import torch

from infinity.backward import BackwardPass, current_pass, in_backward


class Probe(torch.autograd.Function):
    """Calls `act` in its backward."""

    @staticmethod
    def forward(ctx, x, act):
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.act()
        return gradient, None


def run(act):
    with torch.enable_grad():
        Probe.apply(torch.ones(1, requires_grad=True), act).sum().backward()


def test_a_pass_is_alive_until_it_completes():
    passes, events = [], []

    def act():
        passes.append(BackwardPass(lambda: events.append(("completed", passes[0].alive))))
        events.append(
            ("inside", in_backward(), passes[0].alive, current_pass() == passes[0].number)
        )

    run(act)
    assert events == [("inside", True, True, True), ("completed", True)]
    assert not passes[0].alive
    assert not in_backward()
    assert current_pass() is None


def test_a_pass_that_an_exception_cuts_off_is_not_alive_and_completes_nothing():
    passes = []

    def act():
        passes.append(BackwardPass(lambda: pytest.fail("it did not complete")))
        raise ValueError("cut off")

    with pytest.raises(ValueError, match="cut off"):
        run(act)
    assert not passes[0].alive


def test_a_nested_pass_ends_alone():
    outer, inner = [], []

    def act():
        outer.append(BackwardPass())
        run(lambda: inner.append(BackwardPass()))
        assert outer[0].alive
        assert not inner[0].alive
        assert outer[0].number != inner[0].number

    run(act)
    assert not outer[0].alive


def test_what_completion_raises_reaches_the_caller_of_backward():
    def fail():
        raise ValueError("at the end")

    with pytest.raises(ValueError, match="at the end"):
        run(lambda: BackwardPass(fail))


def test_there_is_no_pass_outside_of_backward():
    with pytest.raises(RuntimeError, match="no backward pass"):
        BackwardPass()
