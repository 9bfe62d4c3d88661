"""A lazy tensor handed to anything of PyTorch gives what a plain tensor gives there, value and
gradient, or is refused by a sentence of ours. Nothing ends the process."""

from __future__ import annotations

import copy
import io
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import infinity
from support.handles import Handle

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]


def square(w: torch.Tensor) -> torch.Tensor:
    return (w * w).sum()


class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, w = ctx.saved_tensors
        return gradients[0] @ w, gradients[0].t() @ x


def checkpointed(t: Any, reentrant: bool) -> Any:
    x = torch.ones(4, 4, requires_grad=True)
    return checkpoint(lambda x, w: torch.tanh(x @ w), x, t, use_reentrant=reentrant).sum()


def in_bf16(t: Any, cached: bool) -> Any:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
        return (torch.ones(2, 4) @ t @ t).float()


def twice(t: Any) -> Any:
    first = torch.autograd.grad((t**3).sum(), t, create_graph=True)[0]
    return torch.autograd.grad(first.sum(), t)[0]


def saved(t: Any) -> Any:
    file = io.BytesIO()
    torch.save({"a": t.detach()}, file)
    file.seek(0)
    return torch.load(file)["a"]


def in_a_module(t: Any) -> Any:
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(t.detach())
    return layer(torch.ones(2, 4))


def hooked(t: Any) -> Any:
    found: list[Any] = []
    t.register_hook(lambda gradient: found.append(gradient.clone()))
    square(t).backward()
    return found[0]


def retained(t: Any) -> Any:
    view = t[1:]
    view.retain_grad()
    square(view).backward()
    return view.grad


def kept_view(t: Any) -> Any:
    view = t[1:]
    with torch.no_grad():
        t.mul_(2)
    return square(view)


def in_place(write: Callable[[Any], object]) -> Callable[[Any], Any]:
    def run(t: Any) -> Any:
        with torch.no_grad():
            write(t)
        return t.detach().clone()

    return run


EQUAL: dict[str, Callable[[Any], Any]] = {
    "sum": lambda t: t.sum(),
    "a view times a view": lambda t: t[1:].t() @ t[:3],
    "views": lambda t: t.view(-1)[::2].sum() + t.unbind()[0].sum() + t.expand(2, 4, 4).sum(),
    "item": lambda t: t[0, 0].item(),
    "float": lambda t: float(t[0, 0]) + int(t[0, 1]) + bool(t[0, 0] > 0) + complex(t[1, 1]).real,
    "index": lambda t: float([5, 6, 7][(t[0, 0] * 0).long() + 1]),
    "tolist": lambda t: sum(map(sum, t.tolist())),
    "format": lambda t: float(f"{t[0, 0]:.9f}"),
    "iterate": lambda t: sum(row.sum() for row in t) + len(t) + (5.0 in t),
    "numpy": lambda t: float(t.detach().numpy().sum()),
    "array": lambda t: float(np.array(t.detach()).sum() + np.asarray(t.detach()[0]).sum()),
    "arithmetic of arrays": lambda t: float((t.detach().numpy() + 1).cumsum().copy()[3]),
    "torch.tensor": lambda t: torch.tensor(t),
    "torch.tensor of a list": lambda t: torch.tensor([t.detach()[0, 0], t.detach().norm(), 2]),
    "as_tensor": lambda t: torch.as_tensor(t).sum() + torch.asarray(t).sum(),
    "new_tensor": lambda t: torch.ones(1).new_tensor(t),
    "scripted": lambda t: torch.jit.script(square)(t),
    "traced": lambda t: torch.jit.trace(square, (torch.ones(4, 4),))(t),
    "func.grad": lambda t: torch.func.grad(square)(t),
    "func.grad of a write": lambda t: torch.func.grad(lambda w: square(w.clone().mul_(2)[0]))(t),
    "func.vjp": lambda t: torch.func.vjp(square, t)[1](torch.tensor(1.0))[0],
    "func.jvp": lambda t: torch.func.jvp(square, (t,), (torch.ones(4, 4),))[1],
    "jacrev": lambda t: torch.func.jacrev(lambda w: w.sum(0))(t),
    "jacfwd": lambda t: torch.func.jacfwd(lambda w: w.sum(0))(t.detach()),
    "hessian": lambda t: torch.func.hessian(lambda w: (w**3).sum())(t.detach()),
    "vmap": lambda t: torch.func.vmap(lambda row: (row * row).sum())(t),
    "vmap of norm": lambda t: torch.vmap(torch.norm)(t.detach()),
    "vmap of grad": lambda t: torch.func.vmap(torch.func.grad(square))(t),
    "vmap in place": in_place(lambda t: torch.vmap(lambda row: row.mul_(2))(t.detach())),
    "functionalize": lambda t: torch.func.functionalize(square)(t),
    "functionalize a view": lambda t: torch.func.functionalize(lambda w: w.t()[0].clone().add_(1))(
        t
    ),
    "functional_call": lambda t: torch.func.functional_call(
        nn.Linear(4, 4, bias=False), {"weight": t}, torch.ones(2, 4)
    ),
    "linear": lambda t: functional.linear(torch.ones(2, 4), t),
    "embedding": lambda t: functional.embedding(torch.tensor([1, 2]), t),
    "cat": lambda t: torch.cat([t, t[1:]]),
    "einsum": lambda t: torch.einsum("ij,kj->ik", t, t),
    "multi_dot": lambda t: torch.linalg.multi_dot([t, t.t(), t]),
    "svd": lambda t: torch.linalg.svdvals(t.detach()),
    "sparse": lambda t: t.detach().to_sparse().to_dense(),
    "fft": lambda t: torch.fft.fft(t).real,
    "conjugate": lambda t: torch.view_as_complex(t.reshape(4, 2, 2)).conj().imag * 2,
    "custom function": lambda t: Late.apply(torch.ones(2, 4), t),
    "checkpoint": lambda t: checkpointed(t, reentrant=False),
    "re-entrant checkpoint": lambda t: checkpointed(t, reentrant=True),
    "compiled": lambda t: torch.compile(square, backend="eager")(t),
    "compiled view": lambda t: torch.compile(lambda w: w.t()[1:].sum(), backend="eager")(t),
    "compiled write": in_place(lambda t: torch.compile(lambda w: w.mul_(2), backend="eager")(t)),
    "autograd.grad": lambda t: torch.autograd.grad(square(t), t)[0],
    "double backward": twice,
    "autocast": lambda t: in_bf16(t, cached=True),
    "autocast without cache": lambda t: in_bf16(t, cached=False),
    "deepcopy": lambda t: copy.deepcopy({"a": t.detach(), "b": [t.detach()]})["b"][0],
    "pickle": lambda t: pickle.loads(pickle.dumps(t.detach())),
    "to another process": lambda t: pickle.loads(ForkingPickler.dumps(t.detach())),
    "torch.save": saved,
    "in a module": in_a_module,
    "hook": hooked,
    "retain_grad of a view": retained,
    "a view of before": kept_view,
    "copy by dlpack": lambda t: torch.from_dlpack(t.detach().clone()),
    "dlpack that copies": lambda t: torch.from_dlpack(t.detach(), copy=True),
    "where": in_place(lambda t: torch.where(t > 0, t, t * 2, out=t.detach())),
    "random": in_place(lambda t: nn.init.uniform_(t[1:], generator=torch.Generator())),
    "rand_like": lambda t: torch.rand_like(t) + torch.full_like(t, 2) + t.new_ones(4, 4),
}

REFUSED: dict[str, Callable[[Any], Any]] = {
    "data_ptr": lambda t: t.data_ptr(),
    "data_ptr of a view": lambda t: t[1].data_ptr(),
    "untyped_storage": lambda t: t.untyped_storage(),
    "storage": lambda t: t.storage(),
    "share_memory_": lambda t: t.detach().share_memory_(),
    "set_": lambda t: t.detach().set_(torch.ones(4)),
    "set_ of another": lambda t: torch.ones(4).set_(t.detach()),
    "resize_": lambda t: t.detach().resize_(2),
    "swap_tensors": lambda t: torch.utils.swap_tensors(t, nn.Parameter(torch.ones(4, 4))),
    "swap_tensors with it": lambda t: torch.utils.swap_tensors(nn.Parameter(torch.ones(4, 4)), t),
    "dlpack": lambda t: torch.from_dlpack(t.detach()),
    "dlpack of numpy": lambda t: np.from_dlpack(t.detach()),
    "apply_": lambda t: t.detach().apply_(lambda x: x + 1),
    "map_": lambda t: torch.ones(4, 4).map_(t.detach(), lambda a, b: b),
    "an array is written": lambda t: t.detach().numpy().__setitem__(0, 1.0),
    "a view of an array is written": lambda t: t.detach()[1:].numpy()[:2].__setitem__(0, 1.0),
    "an array is added to": lambda t: t.detach().numpy().__iadd__(1),
    "an array takes a result": lambda t: np.exp(np.ones((4, 4)), out=t.detach().numpy()),
    "an array is added to at places": lambda t: np.add.at(t.detach().numpy(), (0, 0), 1),
}


def of(use: Callable[[Any], Any], tensor: Any) -> tuple[Any, ...]:
    """What it gives, its gradient, and what there is afterwards."""
    torch.manual_seed(0)
    found = use(tensor)
    if isinstance(found, torch.Tensor) and found.requires_grad:
        tensor.grad = None
        found.float().sum().backward()
    value = found.detach().clone() if isinstance(found, torch.Tensor) else torch.tensor(found)
    return value, tensor.grad, tensor.detach().clone()


def in_a_child(call: Callable[[], str]) -> str:
    """What it says; a use may end its process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = "ended by an exception"
        try:
            said = call()
        except BaseException:
            said = traceback.format_exc()
        finally:
            os.write(writer, said.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    status = os.waitpid(child, 0)[1]
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else said


def values() -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", EQUAL)
def test_a_use_gives_what_plain_pytorch_gives(name: str) -> None:
    def both() -> str:
        wanted = of(EQUAL[name], values().requires_grad_())
        found = of(EQUAL[name], Handle(values(), requires_grad=True))
        for mine, theirs in zip(found, wanted, strict=True):
            if (mine is None) != (theirs is None):
                return f"{mine} instead of {theirs}"
            if mine is not None:
                # torch computes singular values of any subclass by another routine.
                close = {"rtol": 1e-5, "atol": 1e-6} if name == "svd" else {"rtol": 0, "atol": 0}
                torch.testing.assert_close(mine, theirs, **close)
        return "equal"

    assert in_a_child(both) == "equal"


@pytest.mark.parametrize("name", REFUSED)
def test_a_use_of_memory_is_refused(name: str) -> None:
    def refused() -> str:
        handle = Handle(values(), requires_grad=True)
        try:
            REFUSED[name](handle)
        except infinity.ShardedParameterError as error:
            said = str(error)
        assert torch.equal(handle.home, values())
        return said

    assert "a wrapped model" in in_a_child(refused)


def test_what_takes_the_address_raises() -> None:
    """C++ that goes past everything meets no memory, and no null pointer either."""

    def raises() -> str:
        try:
            torch.utils.dlpack.to_dlpack(Handle(values()))
        except RuntimeError:
            return "raises"
        return "a capsule of nothing"

    assert in_a_child(raises) == "raises"


def test_an_array_tells_that_a_gradient_would_be_lost() -> None:
    with pytest.raises(RuntimeError, match="requires grad"):
        Handle(values(), requires_grad=True).numpy()


def test_a_copy_knows_its_original() -> None:
    ours = Handle(values(), requires_grad=True)
    found = copy.deepcopy([ours, ours])
    assert found[0] is found[1] and found[0].requires_grad and type(found[0]) is torch.Tensor
