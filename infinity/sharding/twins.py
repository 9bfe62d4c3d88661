"""The two tensors between which a parameter of a wrapped model alternates.

[Note: one parameter, two tensors]
A parameter is one Python object while its model lives: modules, optimizers and users hold it. While
its unit is shown the object is a dense leaf, whose data points at the unit's bytes. At all other
times it is a handle: a leaf without memory (`LazyTensor`). Every operator on a handle, from Python,
from functorch, from a script or from C++, arrives in its `__torch_dispatch__`, below autograd. So
no code can read memory that is not there.

`Twins` exchanges the two tensors below the object, with `torch._C._swap_tensor_impl`, which
`torch.utils.swap_tensors` uses, too. Meanwhile an object of the engine holds the other tensor.

Both leaves lead to one node of autograd, which accumulates the gradient of the dense leaf. So
graphs of forwards, and graphs that user code builds of handles, bring one gradient, in the order of
plain PyTorch. `torch.autograd.grad(loss, [parameter])` and `backward(inputs=[parameter])` find the
same node. To make the handle, the dense leaf is saved for a backward, under a hook that returns a
blank handle. Autograd turns this into a leaf with the accumulator of the saved leaf.

Hooks on gradients lie with the dense tensor, because its node runs them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from infinity.errors import ShardedParameterError
from infinity.sharding.lazy_tensor import LazyTensor


class Twins:
    """The tensors of one parameter `tensor`, or of the local tensor of a DTensor. The handle is of
    class `handle`. The object that holds the dense tensor beside a handle is of class `hidden`.

    For the thread that runs the model, inside of `DisableTorchFunctionSubclass`.
    """

    def __init__(
        self, tensor: torch.Tensor, handle: type[torch.Tensor], hidden: type[torch.Tensor]
    ) -> None:
        self.tensor, self.plain = tensor, type(tensor)
        self._kinds = handle, hidden
        self.is_handle = False
        """Whether the parameter is a handle now."""
        self.other: torch.Tensor | None = None
        """The object that holds the other tensor; None before the first `hide`."""
        self._accumulator: Any = None  # the handle refers to it weakly

    @property
    def handle(self) -> torch.Tensor | None:
        """The object that holds the handle; None before the first `hide`."""
        return self.tensor if self.is_handle else self.other

    def hide(self, placeholder: torch.Tensor) -> None:
        """The parameter becomes a handle of the shape, dtype and device of `placeholder`, which the
        dense tensor holds meanwhile."""
        self.tensor.__class__ = self.plain
        self.tensor.data = placeholder
        if self.other is None:
            _pass_parameter(self.tensor)
            self.other = self._make_handle()
        self._exchange()

    def show(self, kind: type[torch.Tensor] | None = None) -> None:
        """The parameter becomes the dense tensor again. A plain `nn.Parameter` gets the class
        `kind`, if that is given."""
        self._exchange()
        if kind is not None and self.plain is nn.Parameter:
            self.tensor.__class__ = kind

    def agree(self) -> None:
        """Give both tensors the `requires_grad` of the parameter. Their node accumulates no
        gradient for a dense tensor without it."""
        mine, other = self.tensor, self.other
        if other is not None and mine.requires_grad != other.requires_grad:
            other.requires_grad_(mine.requires_grad)

    def _exchange(self) -> None:
        mine, other = self.tensor, self.other
        if other is None:
            raise RuntimeError("a parameter has no handle yet")
        self.agree()
        try:
            torch._C._swap_tensor_impl(mine, other)
        except RuntimeError:
            # Autocast refers to leaves whose casts it keeps. See [Note: casts] in `modules/hooks`.
            torch.clear_autocast_cache()
            _swap_at_last(mine, other)
        self.is_handle = not self.is_handle
        handle, hidden = self._kinds
        mine.__class__ = handle if self.is_handle else self.plain
        other.__class__ = hidden if self.is_handle else handle

    def _make_handle(self) -> torch.Tensor:
        """A handle that shares the gradient accumulator of the dense tensor."""
        dense = self.tensor
        blank = Blank.of(dense)
        if not dense.requires_grad:
            return blank
        self._accumulator = torch.autograd.graph.get_gradient_edge(dense).node
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            saved_tensors_hooks(lambda _: None, lambda _: blank),
        ):
            saving: Any = _Save.apply(dense)  # type: ignore[no-untyped-call]
        return saving.grad_fn.saved_tensors[0]

    def close(self) -> None:
        """No further gradient comes. The node refers to the dense tensor, so this ends a cycle that
        Python's collector does not see."""
        self._accumulator = None

    @contextmanager
    def dense(self) -> Iterator[None]:
        """Inside the context the parameter is the dense tensor, of its plain class, without
        data."""
        if not self.is_handle:
            yield
            return
        self._exchange()
        try:
            yield
        finally:
            self._exchange()


class Blank(LazyTensor):
    """A handle before it belongs to a parameter."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> torch.Tensor:
        """A blank handle of the shape, dtype and device of `tensor`."""
        return cls.without_data(tensor.shape, tensor.dtype, tensor.device)

    def detached(self) -> torch.Tensor:
        return Blank.of(self)


class _Save(torch.autograd.Function):
    """A node that has saved a tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None


def _swap_at_last(mine: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange the tensors of two objects that have weak references, maybe from garbage."""
    for collect in (None, gc.collect):
        if collect is not None:
            collect()
        with contextlib.suppress(RuntimeError):
            torch._C._swap_tensor_impl(mine, other)
            return
    raise ShardedParameterError(
        "a parameter of a wrapped model is kept by what made a graph of the model, such as a "
        "torch.jit.trace that failed and whose traceback is still there; delete that (the "
        "exception, and sys.last_traceback)"
    )


def passing(parameter: torch.Tensor, hook: Callable[[Any], None]) -> Callable[[Any], None]:
    """`hook`, called with `parameter`. Autograd passes the object that holds the dense tensor."""
    return functools.partial(_pass, weakref.ref(parameter), hook)


def _pass(parameter: weakref.ref[torch.Tensor], hook: Callable[[Any], None], _: Any) -> None:
    hook(parameter())


def _pass_parameter(parameter: torch.Tensor) -> None:
    """Have the present post-accumulate hooks of `parameter` called with it."""
    hooks: dict[int, Any] | None = getattr(parameter, "_post_accumulate_grad_hooks", None)
    for number, hook in (hooks or {}).items():
        hooks[number] = passing(parameter, hook)  # type: ignore[index]
