"""A model that was built without memory, before it is wrapped: it answers as a plain one."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.weights.taped import TapedParameter
from support.configs import config_of
from support.models import Transformer, text_batch

pytestmark = [pytest.mark.usefixtures("one_thread")]


def built(inside: bool) -> Any:
    """A model with tied weights; the same, whether it was built in `init` or not."""
    torch.manual_seed(0)
    if not inside:
        return Transformer(depth=2)
    with infinity.init():
        return Transformer(depth=2)


def wrapped_values(model: nn.Module, directory: Path) -> dict[str, torch.Tensor]:
    config = config_of(nvme=[directory], gpu_memory=2 << 20, cpu_memory=8 << 20)
    with infinity.engine(infinity.wrap(model, config)):
        return {name: value.clone() for name, value in model.state_dict().items()}


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.device.type) == (expected.dtype, "cpu")
        assert torch.equal(found, expected)
    elif isinstance(expected, (list, tuple)):
        for mine, other in zip(found, expected, strict=True):
            same(mine, other)
    else:
        assert found == expected


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


READS: dict[str, Callable[[Any], Any]] = {
    "add": lambda w: w + 1,
    "matmul": lambda w: torch.ones(3, 64) @ w,
    "out": lambda w: torch.add(w, 1, out=torch.empty(64, 32)),
    "data": lambda w: w.data.clone(),
    "detach": lambda w: w.detach().sum(),
    "rows": lambda w: w[2:5] * 2,
    "fancy": lambda w: w[torch.tensor([1, 5])].detach() + 0,
    "view": lambda w: w.view(-1)[7:9].tolist(),
    "iterate": lambda w: [row.sum() for row in w][:3],
    "item": lambda w: w[0, 0].item(),
    "float": lambda w: float(w[0, 0]),
    "numpy": lambda w: w.detach().numpy().sum().item(),
    "array": lambda w: w.detach().cpu().double().numpy().tolist(),
    "norm": lambda w: w.norm(),
    "svd": lambda w: torch.linalg.svdvals(w.data.to(torch.float32)),
    "cat": lambda w: torch.cat([w, w]),
    "stack": lambda w: torch.stack([w.data, w.detach()]),
    "equal": lambda w: torch.equal(w, w.clone()),
    "compare": lambda w: (w == w.data).all(),
    "allclose": lambda w: torch.allclose(w, w.data),
    "copy into": lambda w: torch.zeros(64, 32).copy_(w),
    "slice into": lambda w: torch.zeros(64, 32).__setitem__(slice(0, 3), w.data[:3]),
    "transpose": lambda w: w.T.contiguous().sum(0),
    "new": lambda w: w.new_zeros(3),
    "like": lambda w: torch.zeros_like(w),
    "half": lambda w: w.half() + 0,
    "to": lambda w: w.to("cpu", torch.float64) * 1,
    "deepcopy of data": lambda w: copy.deepcopy(w.data),
    "where": lambda w: torch.where(w > 0, w, 0.0),
    "norms": lambda w: torch._foreach_norm([w, w]),
    "total norm": lambda w: torch.nn.utils.get_total_norm([w]),
    "vector": lambda w: nn.utils.parameters_to_vector([w]),
    "text": lambda w: repr(w),
    "shape": lambda w: [w.shape, w.dtype, w.requires_grad, w.is_leaf, w.device.type, len(w)],
    "saved": lambda w: saved(w.data),
    "saved parameter": lambda w: saved(w),
    "pickled": lambda w: pickle.loads(pickle.dumps(w.detach())),
    "another parameter": lambda w: nn.Parameter(w.data * 2),
    "embedding": lambda w: nn.functional.embedding(torch.tensor([3, 1]), w),
}


@pytest.mark.parametrize("name", READS)
def test_reading_gives_the_values(name: str) -> None:
    with torch.no_grad():
        same(READS[name](built(True).tokens.weight), READS[name](built(False).tokens.weight))


@pytest.mark.parametrize("dim", [None, 0, 2])
def test_a_parameter_that_was_computed_of_another_is_read(dim: int | None) -> None:
    def build() -> Any:
        torch.manual_seed(0)
        return nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 6, 3), dim=dim)

    with infinity.init():
        model = build()
    plain = build()
    same(list(model.parameters()), list(plain.parameters()))
    same(model.weight.detach(), plain.weight.detach())
    model.weight, plain.weight = (torch.full_like(plain.weight, 3.0) for _ in range(2))
    same(list(model.state_dict().values()), list(plain.state_dict().values()))


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda m: m.tokens.weight.mul_(2),
    "data in place": lambda m: m.tokens.weight.data.mul_(2),
    "data": lambda m: setattr(m.tokens.weight, "data", m.tokens.weight.data * 2),
    "data of a copy": lambda m: setattr(m.tokens.weight, "data", torch.full((64, 32), 2.0)),
    "item": lambda m: m.tokens.weight.__setitem__(3, 1.5),
    "rows": lambda m: m.tokens.weight.data[2:4].copy_(torch.ones(2, 32)),
    "from another": lambda m: m.blocks[0].norm1.weight.copy_(m.tokens.weight[0]),
    "drawn": lambda m: nn.init.normal_(m.blocks[1].up.weight),
    "truncated": lambda m: nn.init.trunc_normal_(m.blocks[1].up.weight),
    "orthogonal": lambda m: nn.init.orthogonal_(m.blocks[1].attention.out.weight),
    "subtract": lambda m: m.tokens.weight.data.__isub__(m.tokens.weight.data * 0.5),
    "list": lambda m: torch._foreach_mul_(list(m.blocks.parameters()), 2.0),
    "out": lambda m: torch.mul(m.norm.weight, 3.0, out=m.norm.weight),
    "half": lambda m: m.half(),
    "to": lambda m: m.to("cpu", torch.bfloat16),
    "moved": lambda m: m.cpu(),
    "load": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
    "vector": lambda m: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(m.parameters()) * 3, m.parameters()
    ),
    "clip": lambda m: m.tokens.weight.clamp_(-0.1, 0.1),
    "replaced": lambda m: setattr(m.norm, "weight", nn.Parameter(m.norm.weight.data + 1)),
    "same memory": lambda m: setattr(m.norm, "weight", nn.Parameter(m.norm.weight)),
    "frozen": lambda m: m.requires_grad_(False),
    "doubled": lambda m: setattr(m.blocks, "1", copy.deepcopy(m.blocks[0])),
}


@pytest.mark.parametrize("name", WRITES)
def test_writing_is_kept(name: str, tmp_path: Path) -> None:
    plain, model = built(False), built(True)
    for each in (plain, model):
        torch.manual_seed(7)
        with torch.no_grad():
            WRITES[name](each)
    expected = plain.state_dict()
    seen = model.state_dict()
    assert not any(isinstance(value, infinity.weights.taped.TapedTensor) for value in seen.values())
    values = wrapped_values(model, tmp_path)
    assert list(seen) == list(values) == list(expected)
    for key, value in expected.items():
        same(seen[key], value)
        same(values[key], value)


def test_a_source_may_change_after_it_was_copied(tmp_path: Path) -> None:
    model, source = built(True), torch.ones(32)
    model.norm.weight.data.copy_(source)
    model.norm.bias.data = source
    source.zero_()
    values = wrapped_values(model, tmp_path)
    assert values["norm.weight"].all() and values["norm.bias"].all()


def test_a_forward(tmp_path: Path) -> None:
    """Also one with a graph; a backward that comes to the parameters is refused."""
    plain, model = built(False), built(True)
    with torch.no_grad():
        same(model(**text_batch(0)).logits, plain(**text_batch(0)).logits)
    loss = model(**text_batch(0)).loss
    same(loss, plain(**text_batch(0)).loss)
    with pytest.raises(infinity.ConfigError, match="has no memory for a gradient yet; call infin"):
        loss.backward()
    values = wrapped_values(model, tmp_path)
    for name, expected in plain.state_dict().items():
        same(values[name], expected)


def test_a_copy_is_another_model_without_memory(tmp_path: Path) -> None:
    plain, model = built(False), built(True)
    copied = copy.deepcopy(model)
    assert copied.head.weight is copied.tokens.weight is not model.tokens.weight
    assert all(isinstance(p, TapedParameter) and p.is_meta for p in copied.parameters())
    copied.norm.weight.data.fill_(5)
    same(model.norm.weight, plain.norm.weight)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    values, others = wrapped_values(model, tmp_path / "a"), wrapped_values(copied, tmp_path / "b")
    for name, expected in plain.state_dict().items():
        same(values[name], expected)
        same(others[name], torch.full((32,), 5.0) if name == "norm.weight" else expected)


def test_what_wrap_has_replaced_is_not_read(tmp_path: Path) -> None:
    model = built(True)
    weight, view = model.norm.weight, model.norm.weight.data
    wrapped_values(model, tmp_path)
    for use in (weight.sum, view.sum, lambda: view.zero_(), lambda: copy.deepcopy(weight)):
        with pytest.raises(infinity.ConfigError, match=r"used after infinity\.wrap.*from the mod"):
            use()


def test_there_are_no_addresses() -> None:
    weight = built(True).norm.weight
    for use in (weight.data_ptr, weight.data.untyped_storage):
        with pytest.raises(infinity.ConfigError, match=r"no memory before infinity\.wrap.*clone"):
            use()


def test_a_seed_does_not_replace_numbers_that_were_seen(tmp_path: Path) -> None:
    model = built(True)
    model.norm.weight.data.copy_(model.tokens.weight[0] + 1)
    with pytest.raises(infinity.ConfigError, match="looked at numbers that it drew"):
        infinity.wrap(model, config_of(nvme=[tmp_path]), seed=1)


class ReadsLate(torch.autograd.Function):
    """Reads the weight in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


def _late(x: torch.Tensor, layer: nn.Linear) -> object:
    return ReadsLate.apply(x, layer.weight).sum().backward()  # type: ignore[no-untyped-call]


def _late_view(x: torch.Tensor, layer: nn.Linear) -> object:
    loss = ReadsLate.apply(x, layer.weight.t()).sum()  # type: ignore[no-untyped-call]
    return loss.backward()


def _recomputed(x: torch.Tensor, layer: nn.Linear, **way: bool) -> object:
    return checkpoint(layer, x.requires_grad_(), **way).sum().backward()


@pytest.mark.parametrize(
    "backward",
    [
        _late,
        _late_view,
        lambda x, layer: layer(x).sum().backward(inputs=[layer.weight]),
        lambda x, layer: torch.autograd.grad(layer(x).sum(), [layer.weight]),
        lambda x, layer: (
            checkpoint(layer, x.requires_grad_(), use_reentrant=False).sum().backward()
        ),
        lambda x, layer: checkpoint(layer, x.requires_grad_(), use_reentrant=True).sum().backward(),
    ],
)
def test_a_backward_before_wrap_says_to_wrap(backward: Any) -> None:
    with infinity.init():
        layer = nn.Linear(4, 4)
    with pytest.raises(infinity.ConfigError, match=r"backward came to .*; call infinity\.wrap"):
        backward(torch.randn(2, 4), layer)


def _alike() -> tuple[nn.Module, nn.Module]:
    """A model that was built in `init`, and a plain one."""
    torch.manual_seed(0)
    with infinity.init():
        taped = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    torch.manual_seed(0)
    return taped, nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def _clones(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _loss(model: nn.Module, x: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    return lambda values: torch.func.functional_call(model, values, (x,)).square().sum()


@pytest.mark.filterwarnings("ignore")  # of torch.jit and torch.compile
@pytest.mark.parametrize(
    "transform",
    [
        lambda model, x: torch.func.vmap(model)(x),
        lambda model, x: torch.func.vmap(lambda row: row @ model[0].weight.t()[:, :2])(x),
        lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
        lambda model, x: torch.func.jacrev(model)(x),
        lambda model, x: torch.func.jacfwd(model)(x),
        lambda model, x: torch.func.hessian(lambda x: model(x).sum())(x),
        lambda model, x: torch.func.jvp(model, (x,), (x,))[1],
        lambda model, x: torch.func.grad(_loss(model, x))(_clones(model))["0.weight"],
        lambda model, x: torch.func.grad(_loss(model, x))(model.state_dict())["0.weight"],
        lambda model, x: torch.compile(model, backend="eager")(x),
    ],
)
def test_transforms_before_wrap(transform: Any) -> None:
    x = torch.randn(5, 4)
    found, expected = (transform(model, x) for model in _alike())
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "transform",
    [
        lambda model, x: torch.func.grad(_loss(model, x))(dict(model.named_parameters())),
        lambda model, x: torch.func.vjp(lambda weight: x @ weight.t(), model[0].weight),
        lambda model, x: torch.func.vmap(lambda row: x @ row)(model[0].weight),
    ],
)
def test_a_transform_of_a_parameter_before_wrap_says_to_clone_it(transform: Any) -> None:
    with pytest.raises(infinity.ConfigError, match=r"a transform of torch\.func was given a para"):
        transform(_alike()[0], torch.randn(5, 4))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("follow", [torch.jit.trace, lambda model, x: make_fx(model)(x)])
def test_a_graph_before_wrap_says_to_build_a_plain_model(follow: Any) -> None:
    with pytest.raises(infinity.ConfigError, match=r"cannot follow a model that was built in"):
        follow(_alike()[0], torch.randn(5, 4))


def test_a_model_is_saved_whole_before_wrap() -> None:
    found, expected = _alike()
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert all(map(torch.equal, loaded.parameters(), expected.parameters()))
    assert {type(parameter) for parameter in loaded.parameters()} == {nn.Parameter}
