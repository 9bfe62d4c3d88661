"""Backward passes under way on this thread. Autograd calls one a graph task; they nest, and may be
cut off by an exception.

[Note: outputs that may be changed in place]
A custom function that watches gradients returns its input tensor. It may not return a view, because
autograd refuses to change a view of a custom function in place. A result of `detach` is no view,
although it has the same memory and the same version counter. So the nodes that saved the memory
notice a change in place, as in plain PyTorch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch


def in_backward() -> bool:
    """Whether this thread is inside an autograd backward pass."""
    return current_pass() is not None


def current_pass() -> int | None:
    """The number of the innermost backward pass that this thread runs; None outside of any. No two
    passes share a number."""
    number = int(torch._C._current_graph_task_id())
    return None if number == -1 else number


def handed_on(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor of the same memory and version counter, for the forward of a custom function
    to return. See [Note: outputs that may be changed in place]."""
    if type(tensor) is not torch.Tensor:
        return tensor.detach()
    # The same, whose shape may be changed in place, too.
    return torch.Tensor._make_subclass(torch.Tensor, tensor)


class _Ending:
    """What autograd calls when a pass completes. The pass alone owns it, so it dies with the pass,
    completed or not."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self) -> None:
        self._call()


class BackwardPass:
    """The innermost backward pass of the thread that makes this object. Raises `RuntimeError`
    outside of a pass.

    Autograd calls `completed` when the pass completes; `backward()` then raises what `completed`
    raises. Autograd does not call it when an exception cuts the pass off. `alive` turns False in
    both cases, before `backward()` returns or raises; `ended`, which must not raise, is called
    then.
    """

    def __init__(
        self,
        completed: Callable[[], None] = lambda: None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        number = current_pass()
        if number is None:
            raise RuntimeError("there is no backward pass under way on this thread")
        self.number = number
        ending = _Ending(completed)
        self._ending = weakref.ref(ending, lambda _: ended())
        torch.autograd.Variable._execution_engine.queue_callback(ending)

    @property
    def alive(self) -> bool:
        """Whether the pass is still under way."""
        return self._ending() is not None


def transforms() -> list[Any]:
    """The kinds of the transforms of `torch.func` around what runs now."""
    stack = torch._C._functorch.get_interpreter_stack()
    return [] if stack is None else [each.key() for each in stack]
