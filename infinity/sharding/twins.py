"""The two tensors that a parameter of a wrapped model is in turn.

[Note: one parameter, two tensors]
A parameter is one Python object for as long as its model lives: modules, optimizers and users hold
it. While its unit is shown the object is a dense leaf, whose data points at the unit's bytes. At
all other times it is a handle: a leaf without memory (`LazyTensor`). Every operator on a handle,
from Python, from functorch, from a script or from C++, arrives in its `__torch_dispatch__`, below
autograd. So nothing can read memory that is not there.

`Twins` exchanges the two tensors below the object, with `torch._C._swap_tensor_impl`, which
`torch.utils.swap_tensors` uses, too. The object that holds the other tensor meanwhile belongs to
the engine.

Both leaves lead to one node of autograd, which accumulates the gradient of the dense one. Graphs of
forwards, and graphs that user code builds of handles, so bring one gradient, in the order of plain
PyTorch. `torch.autograd.grad(loss, [parameter])` and `backward(inputs=[parameter])` find the same
node. To make the handle, the dense leaf is saved for a backward under a hook that gives a blank
handle back. Autograd makes of it a leaf with the accumulator of the leaf that was saved.

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
    """The tensors of one parameter `tensor`, or of the local tensor of one. A handle is of class
    `handle`. What holds the dense tensor beside a handle is of class `hidden`.

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
        """The parameter becomes the dense tensor again: of class `kind`, if that is given and it is
        a plain `nn.Parameter`."""
        self._exchange()
        if kind is not None and self.plain is nn.Parameter:
            self.tensor.__class__ = kind

    def agree(self) -> None:
        """Both tensors require a gradient where the parameter does: the node of both accumulates
        none for a dense tensor that does not."""
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
        handle: torch.Tensor = saving.grad_fn.saved_tensors[0]
        return handle

    def close(self) -> None:
        """No gradient comes any more. The node refers to the dense tensor, so this ends a cycle
        that Python's collector does not see."""
        self._accumulator = None

    @contextmanager
    def dense(self) -> Iterator[None]:
        """Inside, the parameter is the dense tensor, of its plain class; its data is not there."""
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
        """One of the shape, dtype and device of `tensor`."""
        made: torch.Tensor = cls.without_data(tensor.shape, tensor.dtype, tensor.device)
        return made

    def detached(self) -> torch.Tensor:
        """Another one."""
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
    """Exchange the tensors of two objects to which something refers weakly, maybe garbage."""
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
    """`hook`, called with `parameter` where autograd calls it with the object that holds the dense
    tensor."""
    return functools.partial(_pass, weakref.ref(parameter), hook)


def _pass(parameter: weakref.ref[torch.Tensor], hook: Callable[[Any], None], _: Any) -> None:
    hook(parameter())


def _pass_parameter(parameter: torch.Tensor) -> None:
    """Have the hooks that are on `parameter` now, and run after its gradient is accumulated, called
    with it."""
    hooks: dict[int, Any] | None = getattr(parameter, "_post_accumulate_grad_hooks", None)
    for number, hook in (hooks or {}).items():
        hooks[number] = passing(parameter, hook)  # type: ignore[index]
