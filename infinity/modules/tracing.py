"""Refuses code that makes a graph of a wrapped model. Its parameters have data only during their
forward, so the graph would contain garbage in their place. Also refuses transforms of `torch.func`
that do not work with its hooks or with its parameters."""

from __future__ import annotations

import sys

import torch

from infinity.backward import transforms
from infinity.compilation import frames, is_traced
from infinity.errors import BudgetError, ShardedParameterError

PLAIN_COPY = (
    "do that before infinity.wrap, or with a plain copy: build the model again, and let it "
    "load_state_dict(infinity.engine(model).state_dict())"
)
_FOLLOWING = (
    "torch.export.",
    "torch.onnx.",
    "torch.jit._trace",
    "torch.fx.experimental.proxy_tensor",
)


def refuse_tracing() -> None:
    """Raise `ShardedParameterError` if torch makes a graph of the code that runs now."""
    if is_traced():
        raise ShardedParameterError(_REFUSAL)


def refuse_tracers() -> None:
    """`refuse_tracing`, also while a tracer touches a parameter before it runs the model."""
    refuse_tracing()
    for frame in frames(sys._getframe(1)):
        if frame.f_globals.get("__name__", "").startswith(_FOLLOWING):
            raise ShardedParameterError(_REFUSAL)


def refuse_transforms() -> None:
    """Raise `RuntimeError` inside a transform of `torch.func` other than vmap."""
    kinds = torch._C._functorch.TransformType
    found = [kind for kind in transforms() if kind != kinds.Vmap]
    if kinds.Grad in found:
        raise RuntimeError(
            "torch.func.grad, vjp and their kind cannot pass a wrapped model: they take no "
            "hooks on saved tensors, which bring the parameters back for the backward; use "
            "loss.backward(), and infinity.engine(model).gradient(parameter)"
        )
    if found:
        raise RuntimeError(
            "torch.func.jvp, jacfwd, functionalize and their kind cannot pass a wrapped model: "
            "they compute with tensors that have no memory of their own; use "
            "torch.autograd.forward_ad or torch.autograd.functional, which can"
        )


def complete(error: BaseException | None, shortage: BudgetError | None) -> None:
    """Add to an error of a forward of a wrapped model how the engine causes it. `shortage` is the
    last one of that forward: TorchScript leaves out the texts of Python's errors."""
    if shortage is not None and "in the TorchScript interpreter" in str(error):
        error.args = (f"{str(error).rstrip()} {shortage}",)  # type: ignore[union-attr]
    if isinstance(error, RuntimeError) and "yet support saved tensor hooks" in str(error):
        error.args = (
            f"{error} Such hooks bring the parameters of a wrapped model back for the backward. "
            "Inside of its forward use torch.autograd.grad, torch.func.jvp or jacfwd, or call the "
            "transform outside of the forward",
        )


_REFUSAL = (
    "torch.jit.trace, torch.export, torch.onnx.export, make_fx and FakeTensorMode cannot follow a "
    f"wrapped model, whose parameters have data during their forward alone; {PLAIN_COPY}"
)
