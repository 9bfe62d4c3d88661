"""A parameter is one object, which is a handle without memory while its unit is away: whatever
reads it there gets plain PyTorch's numbers, and both of its tensors have one gradient."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.errors import ShardedParameterError
from infinity.sharding.lent import LentParameter
from infinity.sharding.states import States
from support.configs import config_of
from support.smallest import Wrap, wrapping

WIDTH = 16
SMALLEST = {"poison": True}
CLOSED = {"gpu_memory": 1 << 26, "cpu_memory": 1 << 26, "threads": 1}


class Net(nn.Module):
    """Layers that make each other leave, and a head that may be told what to compute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, run: Callable[..., Any] | None = None) -> Any:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x) if run is None else run(self, x)


def inputs() -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def wrap(tmp_path: Path) -> Iterator[Wrap]:
    with wrapping(tmp_path) as made:
        yield made


@pytest.fixture(params=["nvme", "tiles"])
def pair(request: pytest.FixtureRequest, wrap: Wrap) -> tuple[Any, Any]:
    """A plain model, and the same one wrapped."""
    model = Net()
    if request.param == "tiles":
        infinity.tile(model.head, WIDTH * WIDTH)
    return Net(), wrap(model, SMALLEST)


def norm(w: torch.Tensor) -> torch.Tensor:
    return (w * w).sum()


class Late(torch.autograd.Function):
    """Saves the weight, and reads it in its backward."""

    seen: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        names = "mark", "ds_id", "ds_status", "ds_shape", "ds_numel"
        Late.seen.append((type(w), [getattr(w, n, None) for n in names]))
        return g @ w, g.t() @ x


def in_checkpoint(w: torch.Tensor, reentrant: bool) -> torch.Tensor:
    x = inputs().requires_grad_()
    return checkpoint(lambda x, w: torch.tanh(x @ w), x, w, use_reentrant=reentrant).sum()


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "product of views": lambda w: (w[:8] @ w).square().mean(),
    "multi_dot": lambda w: torch.linalg.multi_dot([w, w.t(), w]).mean(),
    "custom function": lambda w: Late.apply(inputs(), w).square().mean(),
    "checkpoint": lambda w: in_checkpoint(w, False),
    "reentrant checkpoint": lambda w: in_checkpoint(w, True),
    "func.grad": lambda w: torch.func.grad(norm)(w),
    "func.vjp": lambda w: torch.func.vjp(norm, w)[1](torch.tensor(2.0))[0],
    "func.jvp": lambda w: torch.func.jvp(norm, (w,), (torch.ones(WIDTH, WIDTH),))[1],
    "jacrev": lambda w: torch.func.jacrev(lambda w: w.sum(0))(w),
    "vmap": lambda w: torch.func.vmap(norm)(w),
    "functionalize": lambda w: torch.func.functionalize(norm)(w),
    "jacobian": lambda w: torch.autograd.functional.jacobian(norm, w),
    "script": lambda w: torch.jit.script(norm)(w),
    "compiled": lambda w: torch.compile(norm, backend="eager")(w),
    "torch.tensor": lambda w: torch.tensor(w),
    "new_tensor": lambda w: torch.ones(()).new_tensor(w),
    "asarray": lambda w: torch.asarray(w, copy=True).sum(),
    "double backward": lambda w: torch.autograd.grad((w**3).sum(), w, create_graph=True)[0].sum(),
    "autocast": lambda w: torch.autocast("cpu", torch.bfloat16)(
        lambda: functional.linear(inputs(), w).float().sum()
    )(),
    "detached": lambda w: (w.detach() * w).sum(),
}


REFUSED_INSIDE = {"func.grad", "func.vjp", "jacrev"}


def outcome(model: Any, use: Callable[[torch.Tensor], Any]) -> list[torch.Tensor | None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = use(model.head.weight)
    loss = model(inputs()).square().mean()
    if found.requires_grad:
        loss = loss + found.sum()
    loss.backward()
    gradients = [layer.weight.grad for layer in (*model.layers, model.head)]
    return [found.detach(), loss.detach(), *[None if g is None else g + 0 for g in gradients]]


@pytest.mark.parametrize("name", USES)
def test_a_use_outside_of_a_forward_has_plain_numbers(pair: tuple[Any, Any], name: str) -> None:
    theirs, ours = (outcome(model, USES[name]) for model in pair)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", USES)
def test_a_use_inside_of_a_forward_has_plain_numbers(pair: tuple[Any, Any], name: str) -> None:
    """But for transforms that take no hooks on saved tensors."""

    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model.head(x).square().mean() + USES[name](model.head.weight).sum()

    found = []
    for model in pair:
        refused = model is pair[1] and name in REFUSED_INSIDE
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if refused:
                with pytest.raises(RuntimeError, match="a wrapped model"):
                    model(inputs(), run)
                return
            loss = model(inputs(), run)
        loss.backward()
        found.append([loss.detach(), *(layer.weight.grad + 0 for layer in model.layers)])
        found[-1].append(model.head.weight.grad + 0)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_autocast_casts_a_handle_once(wrap: Wrap) -> None:
    found = []
    for model in (Net(), wrap(Net(), SMALLEST)):
        weight: Any = model.head.weight
        with torch.autocast("cpu", torch.bfloat16):
            once = functional.linear(functional.linear(inputs(), weight), weight)
        once.float().sum().backward()
        found.append(weight.grad + 0)
    assert torch.equal(*found)


def test_a_parameter_is_one_object(wrap: Wrap) -> None:
    model: Any = Net()
    before = dict(model.named_parameters())
    wrap(model, SMALLEST)
    inside: list[bool] = []

    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        inside.append(net.head.weight is before["head.weight"])
        return net.head(x)

    model(inputs(), run)
    assert inside == [True]
    assert all(p is before[name] for name, p in model.named_parameters())


def test_a_handle_has_no_memory(wrap: Wrap) -> None:
    model: Any = wrap(Net(), SMALLEST)
    weight = model.head.weight
    assert torch._C._dispatch_keys(weight).has(torch._C.DispatchKey.Python)
    assert weight.stride() == (WIDTH, 1) and weight.is_contiguous() and weight.is_leaf
    for what in (torch.Tensor.data_ptr, torch.Tensor.untyped_storage):
        with pytest.raises(infinity.ShardedParameterError):
            what(weight)


@pytest.mark.parametrize("when", ["before wrap", "outside", "inside", "in its own forward"])
def test_hooks_see_the_whole_gradient_once(wrap: Wrap, when: str) -> None:
    """Of a parameter that is used in the forward and outside of it, whenever they were
    registered."""
    calls: list[Any] = []

    def register(weight: torch.Tensor) -> list[Any]:
        return [
            weight.register_hook(lambda g: calls.append(g.clone())),
            weight.register_post_accumulate_grad_hook(lambda p: calls.append(p)),
        ]

    def use(model: Any) -> list[Any]:
        handles: list[Any] = []

        def late(head: nn.Linear, args: Any) -> None:
            handles.extend(register(head.weight))

        def run(net: Any, x: torch.Tensor) -> torch.Tensor:
            if when == "inside":
                handles.extend(register(net.head.weight))
            if when == "in its own forward":
                handles.append(net.head.register_forward_pre_hook(late))
            return net.head(x)

        loss = model(inputs(), run).sum() + model.head.weight.square().sum()
        if when == "outside":
            handles.extend(register(model.head.weight))
        loss.backward()
        return handles

    plain: Any = Net()
    register(plain.head.weight) if when == "before wrap" else None
    use(plain)
    (expected, _), calls[:] = list(calls), []
    model: Any = Net()
    early = register(model.head.weight) if when == "before wrap" else []
    wrap(model, SMALLEST)
    handles = early + use(model)
    assert len(calls) == 2 and torch.equal(calls[0], expected)
    assert calls[1] is model.head.weight
    for handle in handles:
        handle.remove()
    calls.clear()
    when = ""
    use(model)
    assert calls == []


@pytest.mark.parametrize("where", ["whole", "view"])
def test_a_refused_write_reads_nothing(
    pair: tuple[Any, Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = pair[1].head.weight
    writes: dict[str, Callable[[], Any]] = {
        "whole": lambda: weight.detach().mul_(2),
        "view": lambda: weight.detach()[0].zero_(),
    }
    reads: list[Any] = []
    parameter = States.parameter
    monkeypatch.setattr(
        States, "parameter", lambda *given: (reads.append(given), parameter(*given))[1]
    )
    with pytest.raises(infinity.ShardedParameterError, match="changed in place"):
        writes[where]()
    assert not reads
    assert torch.isfinite(weight.detach()).all() and reads


def test_a_gradient_is_deleted(pair: tuple[Any, Any]) -> None:
    for model in pair:
        model(inputs()).sum().backward()
        del model.head.weight.grad
        assert model.head.weight.grad is None and model.layers[0].weight.grad is not None


def test_no_parameter_is_made_of_a_parameter(pair: tuple[Any, Any]) -> None:
    with pytest.raises(infinity.ShardedParameterError, match=r"detach\(\)\.clone\(\)"):
        nn.Parameter(pair[1].head.weight)


def test_a_closed_engine_leaves_no_class_behind(wrap: Wrap, tmp_path: Path) -> None:
    """Classes of parameters know their unit, and nodes of autograd know parameters."""
    model: Any = infinity.wrap(Net(), config_of(**CLOSED, nvme=[tmp_path]))
    model(inputs()).sum().backward()
    kind = weakref.ref(type(model.head.weight))
    infinity.engine(model).close()
    del model
    gc.collect()
    assert kind() is None


def test_autograd_finds_the_parameter(pair: tuple[Any, Any]) -> None:
    found = []
    for model in pair:
        loss = model(inputs()).square().mean() + model.layers[0].weight.square().sum()
        weights = [model.layers[0].weight, model.head.weight]
        found.append(torch.autograd.grad(loss, weights, retain_graph=True))
        loss.backward(inputs=[model.layers[0].weight])
        found[-1] += (model.layers[0].weight.grad + 0,)
        assert model.layers[1].weight.grad is None
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_a_backward_that_does_not_ask_a_weight_in_tiles_is_refused(wrap: Wrap) -> None:
    """As torch's does that knows no functions of classes there."""
    model: Any = Net()
    infinity.tile(model.head, WIDTH * WIDTH)
    wrap(model, SMALLEST)
    optimizer = infinity.AdamW(model.parameters())
    with pytest.raises(infinity.ConfigError, match=r"torch.autograd.grad\(loss, \[weight\]\)"):
        loss = model(inputs()).sum()
        with torch._C.DisableTorchFunctionSubclass():
            loss.backward(inputs=[model.head.weight])
        optimizer.step()
    model(inputs()).sum().backward()  # and the next one is as ever
    assert model.head.weight.grad is not None


def test_a_graph_of_old_values_does_not_go_backward(pair: tuple[Any, Any]) -> None:
    for model, optimizer in zip(pair, (torch.optim.AdamW, infinity.AdamW), strict=True):
        step = optimizer(model.parameters(), lr=0.1)
        model(inputs()).sum().backward()
        loss = model.head.weight.square().sum()
        step.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        model.head.weight.square().sum().backward()


def test_freezing_holds_inside_and_outside(wrap: Wrap) -> None:
    model: Any = wrap(Net(), SMALLEST)
    weight = model.head.weight
    weight.requires_grad_(False)
    model(inputs()).sum().backward()
    assert weight.grad is None and not (weight * 2).requires_grad
    weight.requires_grad_(True)
    (model(inputs()).sum() + weight.sum()).backward()
    assert weight.grad is not None


def test_the_node_of_a_parameter_gives_what_answers_as_it(wrap: Wrap) -> None:
    model: Any = wrap(Net(), SMALLEST)
    weight = model.head.weight
    variable = torch.autograd.graph.get_gradient_edge(weight).node.variable
    assert torch.equal(variable + 0, weight + 0)
    variable.grad = torch.ones_like(weight)
    assert torch.equal(weight.grad, torch.ones(WIDTH, WIDTH))


def test_what_a_custom_function_saved_is_a_parameter(wrap: Wrap) -> None:
    model: Any = Net()
    model.head.weight.mark = 3
    wrap(model, SMALLEST)
    Late.seen.clear()
    model(inputs(), lambda net, x: Late.apply(x, net.head.weight)).sum().backward()
    ((kind, attributes),) = Late.seen
    assert issubclass(kind, LentParameter) and issubclass(kind, nn.Parameter)
    available = infinity.zero.ZeroParamStatus.AVAILABLE
    shape = WIDTH, WIDTH
    assert attributes == [3, model.head.weight.ds_id, available, shape, WIDTH * WIDTH]
    model(inputs(), lambda net, x: Late.apply(x, net.head.weight.view(shape))).sum().backward()
    assert Late.seen[1] == (torch.Tensor, [None] * 5)  # as of a view in plain PyTorch


def test_a_view_of_a_handle_is_one_of_the_dense_parameter_too(wrap: Wrap) -> None:
    """A graph of handles may go backward while another node shows their unit."""
    found = []
    for model in (Net(), wrap(Net(), SMALLEST)):
        net: Any = model
        view = net.head.weight[2:]
        with infinity.gathered(net.head.weight) if found else contextlib.nullcontext():
            found.append([view.t() @ view])
        both = Late.apply(inputs(), net.head.weight).square().mean() + (view @ view.t()).mean()
        loss = both + net(inputs()).square().mean()
        loss.backward()
        found[-1].append(net.head.weight.grad + 0)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_numbers_are_read_of_a_saved_parameter(wrap: Wrap) -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(w)
            return w.sum()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            (w,) = ctx.saved_tensors
            array, rows = w.detach().numpy(), w.detach().tolist()
            return g * (torch.tensor(array) + torch.tensor(rows))

    found = []
    for model in (Net(), wrap(Net(), SMALLEST)):
        net: Any = model
        Reads.apply(net.head.weight).backward()  # type: ignore[no-untyped-call]
        found.append(net.head.weight.grad + 0)
    assert torch.equal(*found)


def test_no_gradient_of_a_custom_function_is_none(pair: tuple[Any, Any]) -> None:
    """Zeros would be decayed."""

    class Ignores(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return x @ w

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            return g, None

    for model in pair:
        x = inputs().requires_grad_()
        Ignores.apply(x, model.head.weight).sum().backward()  # type: ignore[no-untyped-call]
        assert model.head.weight.grad is None


def test_a_weight_that_is_frozen_later_gets_no_gradient(pair: tuple[Any, Any]) -> None:
    for model in pair:
        model(inputs(), lambda net, x: x @ net.head.weight).sum().backward()
        model.head.weight.grad = None
        model.head.weight.requires_grad_(False)
        model(inputs(), lambda net, x: x @ net.head.weight).sum().backward()
        assert model.head.weight.grad is None
        model.head.weight.requires_grad_(True)
        model(inputs(), lambda net, x: x @ net.head.weight).sum().backward()
        assert model.head.weight.grad is not None


@pytest.mark.parametrize("part", ["whole", "detached", "view", "gradient"])
def test_what_takes_memory_without_asking_the_class_refuses(wrap: Wrap, part: str) -> None:
    """As data of a plain tensor it would end the process when that is read."""
    net: Any = wrap(Net(), SMALLEST)
    net(inputs()).sum().backward()
    weight = net.head.weight
    parts = {
        "whole": weight,
        "detached": weight.detach(),
        "view": weight[:2],
        "gradient": weight.grad,
    }
    lazy, plain = parts[part], torch.zeros(parts[part].shape)
    with pytest.raises(ShardedParameterError, match=r"\.data of another tensor (was|could)"):
        plain.data = lazy
    for to_dlpack in (torch.utils.dlpack.to_dlpack, torch.to_dlpack):
        with pytest.raises(ShardedParameterError, match=r"to_dlpack (was|could)"):
            to_dlpack(lazy)
    plain.data = lazy.clone().detach()
    assert torch.equal(plain, lazy) and torch.equal(
        torch.from_dlpack(torch.to_dlpack(plain)), plain
    )


@pytest.mark.parametrize("way", ["grad", "edges and zeros", "inputs", "view", "of a view"])
def test_code_of_users_in_a_backward_of_handles_finds_functions_of_classes(
    pair: tuple[Any, Any], way: str
) -> None:
    """A hook reads a weight as an array, which no operator of torch shows."""
    found = []
    for model in pair:
        weight, other, unused = model.head.weight, model.layers[0].weight, model.layers[3].bias
        arrays: list[float] = []
        loss = (inputs() @ weight).square().sum() + other.sum() * weight[0, 0]
        loss.register_hook(lambda _, w=weight, a=arrays: a.append(w.detach().numpy().sum()))
        view = weight[1:]
        if way == "grad":
            seen = [*torch.autograd.grad(loss, [weight, other])]
        elif way == "edges and zeros":
            asked = {"w": weight, "o": other, "u": unused}
            named = torch.autograd.grad(loss, asked, materialize_grads=True)
            seen = [named[key] for key in asked]
        elif way == "inputs":
            loss.backward(inputs=[weight])
            seen = [weight.grad + 0, torch.tensor(other.grad is None)]
        elif way == "view":
            more = loss + view.square().sum()
            more.backward(inputs=[view, other])
            seen = [view.grad + 0, other.grad + 0, torch.tensor(weight.grad is None)]
        else:
            weight[0, 0].backward()
            loss.backward()
            seen = [weight.grad + 0, other.grad + 0]
        assert len(arrays) == 1
        found.append([*seen, torch.tensor(arrays)])
    for one, mine in zip(*found, strict=True):
        assert torch.equal(one, mine)


class Keeps(torch.autograd.Function):
    """A product that keeps the weight as an attribute, where no hook on saved tensors sees it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.w = x, w
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g @ ctx.w, g.t() @ ctx.x


def test_a_recorded_backward_saves_no_bytes_that_leave(pair: tuple[Any, Any]) -> None:
    found = []
    for model in pair:
        run = lambda net, x: Keeps.apply(x, net.head.weight)  # noqa: E731
        loss = model(inputs(), run).square().mean()
        first = model.layers[0].weight
        (gradient,) = torch.autograd.grad(loss, [first], create_graph=True)
        (loss + gradient.square().sum()).backward()
        found.append([p.grad + 0 for p in (*model.layers.parameters(), model.head.weight)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which torch.compile looks at
def test_an_operator_of_functions_gets_values(pair: tuple[Any, Any]) -> None:
    torch._dynamo.reset()
    found = []
    for model in pair:
        weight = model.head.weight
        chosen = torch.cond(torch.tensor(True), lambda w: w * 2, lambda w: w * 3, (weight,))
        (chosen.square().sum() + model(inputs()).sum()).backward()
        found.append([chosen.detach(), weight.grad + 0])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_weight_that_is_thawed_while_it_is_a_handle_gets_its_gradient(
    pair: tuple[Any, Any],
) -> None:
    """A forward while it was frozen must leave no trace in the tensor that autograd knows."""
    found = []
    for model in pair:
        loss = model(inputs()).square().mean()
        model.requires_grad_(False)
        with torch.no_grad():
            model(inputs())
        model.requires_grad_(True)
        (loss + model.layers[0].weight.square().sum() + model.head.weight.sum()).backward()
        found.append([p.grad + 0 for p in (*model.layers.parameters(), model.head.weight)])
        model.requires_grad_(False)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(torch.__version__ >= "2.13", reason="test_compiled_handles.py")
@pytest.mark.filterwarnings("ignore")
def test_an_older_compiler_takes_gathered_parameters_alone(wrap: Wrap) -> None:
    torch._dynamo.reset()
    model, plain = wrap(Net(), SMALLEST), Net()
    square = torch.compile(lambda weight: (weight * weight).sum(), backend="eager")
    with pytest.raises(
        Exception, match=r"touched \(untyped_storage\) .*use `with infinity.gathered"
    ):
        square(model.head.weight)
    with infinity.gathered(model.head.weight):
        found = square(model.head.weight)
        found.backward()
    expected = (plain.head.weight * plain.head.weight).sum()
    expected.backward()
    assert torch.equal(found, expected)
    assert torch.equal(model.head.weight.grad, plain.head.weight.grad)
