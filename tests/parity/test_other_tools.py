"""What people use beside the engine: it works as with a plain model, or is refused in a sentence
that says the way out."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize, prune

import infinity
from support.configs import config_of
from support.models import FAMILIES, Transformer, text_batch, transformer
from support.probe import Probe

pytestmark = pytest.mark.usefixtures("one_thread")


def wrap(model: nn.Module, directory: Path, **settings: Any) -> nn.Module:
    settings = {
        "gpu_memory": 1 << 20,
        "cpu_memory": 1 << 26,
        "cache": 0,
        "precision": "fp32",
        "poison": True,
    } | settings
    return infinity.wrap(model, config_of(nvme=directory, **settings))


def goes_on(model: nn.Module) -> bool:
    """Whether `model`, which nobody has trained, trains as if nothing had been tried before."""
    plain = transformer()
    expected, found = plain(**text_batch(0)).loss, model(**text_batch(0)).loss
    expected.backward()
    found.backward()
    engine = infinity.engine(model)
    return all(
        torch.equal(engine.gradient(p), plain.get_parameter(name).grad)
        for name, p in model.named_parameters()
    )


@pytest.fixture
def wrapped(tmp_path: Path) -> Iterator[Any]:
    model = wrap(transformer(), tmp_path)
    yield model
    infinity.engine(model).close()


# Attention, and functions that save parameters


class Attention(nn.Module):
    """Attention whose keys are parameters, so that a kernel saves views of them."""

    def __init__(self, backend: SDPBackend, dropout: float, masked: bool) -> None:
        super().__init__()
        self.backend, self.dropout = backend, dropout
        self.keys, self.values = (nn.Parameter(torch.randn(1, 2, 8, 16)) for _ in range(2))
        self.mask = nn.Parameter(torch.randn(8, 8)) if masked else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(self.backend):
            return functional.scaled_dot_product_attention(
                x,
                self.keys,
                self.values,
                attn_mask=self.mask,
                dropout_p=self.dropout,
                is_causal=self.mask is None,
            )


@pytest.mark.parametrize(
    ("backend", "dropout", "masked"),
    [
        (SDPBackend.MATH, 0.0, False),
        (SDPBackend.MATH, 0.5, True),
        (SDPBackend.MATH, 0.0, True),
        (SDPBackend.FLASH_ATTENTION, 0.0, False),
    ],
)
def test_attention(backend: SDPBackend, dropout: float, masked: bool, tmp_path: Path) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(Attention(backend, dropout, masked) for _ in range(4)))

    same_gradients(make, torch.randn(1, 2, 8, 16), tmp_path)


class Scale(torch.autograd.Function):
    """Saves its parameter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight.view(-1))
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2048))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scale.apply(x, self.weight)


def test_a_function_that_saves_its_parameter(tmp_path: Path) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(Scaled() for _ in range(5)))

    same_gradients(make, torch.randn(3, 2048), tmp_path)


def same_gradients(make: Callable[[], nn.Module], x: torch.Tensor, directory: Path) -> None:
    """With room for some of the units."""
    plain, model = make(), make()
    wrap(model, directory, gpu_memory=24 << 10)
    engine = infinity.engine(model)
    for each in (plain, model):
        torch.manual_seed(1)
        each(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(engine.gradient(parameter), plain.get_parameter(name).grad), name
    engine.close()


# Functions of parameters


def test_functional_call_with_other_parameters(wrapped: Transformer) -> None:
    plain = transformer()
    torch.manual_seed(1)
    theirs = {name: torch.randn_like(p, requires_grad=True) for name, p in plain.named_parameters()}
    ours = {name: value.detach().clone().requires_grad_() for name, value in theirs.items()}
    functional_call(plain, theirs, (), text_batch(0)).loss.backward()
    functional_call(wrapped, ours, (), text_batch(0)).loss.backward()
    assert all(torch.equal(ours[name].grad, value.grad) for name, value in theirs.items())
    assert goes_on(wrapped)


def test_functional_call_with_its_own_parameters(wrapped: Transformer) -> None:
    found = functional_call(wrapped, dict(wrapped.named_parameters()), (), text_batch(0)).loss
    assert torch.equal(found, transformer()(**text_batch(0)).loss)
    assert goes_on(wrapped)


def test_gradients_by_torch_func_are_refused(wrapped: Transformer) -> None:
    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional_call(wrapped, parameters, (), text_batch(0)).loss

    with pytest.raises(
        RuntimeError,
        match=(
            r"torch\.func\.grad, vjp and their kind cannot pass a wrapped model.*use "
            r"loss\.backward\(\)"
        ),
    ):
        torch.func.grad(loss)(dict(wrapped.named_parameters()))
    assert goes_on(wrapped)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_of_a_forward(wrapped: Transformer) -> None:
    ids, plain = text_batch(0)["input_ids"], transformer()
    with torch.no_grad():
        found, expected = (
            torch.func.vmap(lambda row, m=m: m(row[None]).logits)(ids) for m in (wrapped, plain)
        )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["weight_norm", "orthogonal", "spectral_norm"])
def test_parametrized_before_wrap(kind: str, tmp_path: Path) -> None:
    def make() -> Transformer:
        model = transformer()
        for block in model.blocks:
            getattr(nn.utils.parametrizations, kind)(block.up)
        return model

    plain, model = make(), wrap(make(), tmp_path)
    losses = [each(**text_batch(0)).loss for each in (plain, model)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    engine = infinity.engine(model)
    assert all(
        torch.equal(engine.gradient(p), plain.get_parameter(name).grad)
        for name, p in model.named_parameters()
    )


class Halved(nn.Module):
    """A parametrization without a right inverse."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


REGISTERED: dict[str, Callable[[nn.Module], object]] = {
    "custom": lambda linear: parametrize.register_parametrization(linear, "weight", Halved()),
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "weight_norm in hooks": nn.utils.weight_norm,
    "spectral_norm in hooks": nn.utils.spectral_norm,
}


@pytest.mark.parametrize("kind", REGISTERED)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_parametrized_after_wrap(kind: str, wrapped: Transformer) -> None:
    """Refused before anything is changed, unless the model is gathered."""
    names = [name for name, _ in wrapped.named_parameters()]
    way = r"infinity\.wrap, .*, or call infinity\.engine\(model\)\.unwrap\(\), then that, and wrap"
    with pytest.raises(infinity.ShardedParameterError, match=way):
        REGISTERED[kind](wrapped.blocks[0].up)
    assert sorted(name for name, _ in wrapped.named_parameters()) == sorted(names)
    assert goes_on(wrapped)
    if "hooks" in kind:
        return
    plain = transformer()
    refused = pytest.raises(infinity.ShardedParameterError, match=rf"shares no memory.*{way}")
    with (
        infinity.gathered(wrapped, write=True),
        refused if kind == "weight_norm" else nullcontext(),
    ):
        for model in (plain, wrapped):
            torch.manual_seed(0)
            REGISTERED[kind](model.blocks[0].up)
    if kind != "weight_norm":
        assert torch.equal(wrapped(**text_batch(0)).loss, plain(**text_batch(0)).loss)


@pytest.mark.parametrize("kind", ["custom", "spectral_norm", "weight_norm"])
def test_a_parametrization_is_removed(kind: str, tmp_path: Path) -> None:
    """Refused in a wrapped model, before a buffer is changed, and done after `unwrap`."""

    def make() -> Transformer:
        torch.manual_seed(0)
        model = transformer()
        REGISTERED[kind](model.blocks[0].up)
        return model

    plain, model = make(), wrap(make(), tmp_path)
    with pytest.raises(infinity.ShardedParameterError, match=r"unwrap\(\), then that"):
        parametrize.remove_parametrizations(model.blocks[0].up, "weight")
    assert all(torch.equal(b, plain.get_buffer(name)) for name, b in model.named_buffers())
    model = infinity.engine(model).unwrap()
    for each in (plain, model):
        parametrize.remove_parametrizations(each.blocks[0].up, "weight")
    wrap(model, tmp_path)
    assert torch.equal(model(**text_batch(0)).loss, plain(**text_batch(0)).loss)
    infinity.engine(model).close()


def test_pruned_after_wrap(wrapped: Transformer) -> None:
    """Twice, between steps."""
    plain = transformer()
    optimizers = [
        kind(model.parameters(), lr=0.01)
        for kind, model in ((torch.optim.AdamW, plain), (infinity.AdamW, wrapped))
    ]
    losses: list[list[torch.Tensor]] = [[], []]
    for number in range(3):
        for model, optimizer, found in zip((plain, wrapped), optimizers, losses, strict=True):
            found.append(model(**text_batch(number)).loss)
            found[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
            if number < 2:
                prune.l1_unstructured(model.blocks[0].up, "weight", amount=0.3)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)
    assert set(infinity.engine(wrapped).state_dict()) == set(plain.state_dict())
    for name, mask in plain.named_buffers():
        assert torch.equal(wrapped.get_buffer(name), mask)


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
@pytest.mark.filterwarnings("ignore")
def test_generation_with_a_cache_of_keys(family: str, tmp_path: Path) -> None:
    plain, model = FAMILIES[family].build().eval(), wrap(FAMILIES[family].build().eval(), tmp_path)
    ids, found = text_batch(0)["input_ids"][:, :4], []
    for each in (plain, model):
        torch.manual_seed(0)
        found.append(
            each.generate(ids, max_new_tokens=6, do_sample=True, use_cache=True, pad_token_id=0)
        )
    assert torch.equal(*found)


# Copies of the model: for other devices, other processes, graphs


def test_replicas_are_refused(wrapped: Transformer) -> None:
    """`nn.DataParallel` calls one for each device."""
    with pytest.raises(
        infinity.ShardedParameterError,
        match=r"Transformer is a copy of .* as torch\.nn\.DataParallel .* group=",
    ):
        wrapped._replicate_for_data_parallel()(**text_batch(0))
    assert goes_on(wrapped)


def test_distributed_data_parallel_is_refused(wrapped: Transformer, tmp_path: Path) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        with pytest.raises(
            infinity.ShardedParameterError,
            match=r"leave that out: infinity\.wrap\(model, config\) averages gradients",
        ):
            nn.parallel.DistributedDataParallel(wrapped)
    finally:
        dist.destroy_process_group()
    assert goes_on(wrapped)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("use", ["forward", "step", "state_dict"])
def test_a_forked_child_is_refused(use: str, wrapped: Transformer) -> None:
    """Which would wait for threads that it does not have."""
    optimizer = infinity.AdamW(wrapped.parameters())
    uses: dict[str, Callable[[], object]] = {
        "forward": lambda: wrapped(**text_batch(0)),
        "step": optimizer.step,
        "state_dict": infinity.engine(wrapped).state_dict,
    }
    said, told = multiprocessing.Pipe(duplex=False)

    def child() -> None:
        signal.alarm(20)  # seconds
        try:
            uses[use]()
        except infinity.EngineClosedError as error:
            told.send(str(error))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert (
        said.poll() and "this process was forked from the one that wrapped the model" in said.recv()
    )
    assert goes_on(wrapped)


def test_a_captured_graph_is_refused(wrapped: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that captures is played."""
    device = Probe(infinity.engine(wrapped)).device
    refused = "a CUDA graph is being captured, and its replay would skip"
    optimizer = infinity.AdamW(wrapped.parameters())
    loss = wrapped(**text_batch(0)).loss
    monkeypatch.setattr(device, "is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=refused):
        wrapped(**text_batch(0))
    with pytest.raises(RuntimeError, match=refused):
        wrapped.blocks[0](torch.zeros(1, 1, 32))
    with pytest.raises(RuntimeError, match=refused):
        loss.backward()
    with pytest.raises(RuntimeError, match=refused):
        optimizer.step()
    with pytest.raises(RuntimeError, match=refused), infinity.gathered(wrapped):
        pass
    monkeypatch.undo()
    optimizer.zero_grad()
    assert goes_on(wrapped)


def test_graphed_callables_are_refused(tmp_path: Path) -> None:
    """Their graphs read parameters where they were: what `make_graphed_callables` leaves on a
    module is put there by hand."""
    model = transformer()

    def forward(*inputs: Any) -> Any:
        raise AssertionError(inputs)

    forward.__module__ = "torch.cuda.graphs"
    model.blocks[1].forward = forward
    with pytest.raises(
        infinity.ConfigError,
        match=r"the forward of blocks\.1 was replaced by make_graphed_callables",
    ):
        wrap(model, tmp_path)
    del model.blocks[1].forward
    assert goes_on(wrap(model, tmp_path))


# What tools ask of a leaf


def test_gradients_of_some_parameters(wrapped: Any) -> None:
    """`autograd.grad` gives them, and `backward(inputs=...)` adds them up, for these alone."""
    plain, engine = transformer(), infinity.engine(wrapped)
    names = ["tokens.weight", "norm.weight"]

    def of(model: Any) -> list[torch.Tensor]:
        return [model.get_parameter(name) for name in names]

    expected = torch.autograd.grad(plain(**text_batch(0)).loss, of(plain))
    for graph in (False, True):
        loss = wrapped(**text_batch(0)).loss
        found = torch.autograd.grad(loss, of(wrapped), create_graph=graph)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert all(engine.gradient(p) is None for p in wrapped.parameters())
        del loss, found
    for ask in (
        lambda loss, inputs: torch.autograd.backward(loss, inputs=inputs),
        lambda loss, inputs: loss.backward(inputs=inputs),
    ):
        ask(wrapped(**text_batch(0)).loss, of(wrapped))
        for name, p in wrapped.named_parameters():
            gradient = engine.gradient(p)
            if name in names:
                assert torch.equal(gradient, expected[names.index(name)])
            else:
                assert gradient is None
        engine.zero_grad()
    assert goes_on(wrapped)


@pytest.mark.parametrize("method", ["view_as", "expand_as"])
def test_the_node_that_accumulates_a_gradient(wrapped: Any, method: str) -> None:
    """Torch has no other way to it than a view of the parameter as itself. Nothing is read for
    that."""
    plain = transformer()
    engine = infinity.engine(wrapped)
    before = engine.io.counters()["bytes_read"]
    for name, parameter in wrapped.named_parameters():
        view = getattr(parameter, method)(parameter)
        assert view.shape == parameter.shape
        assert engine.io.counters()["bytes_read"] == before
        node = view.grad_fn.next_functions[0][0]
        assert node is torch.autograd.graph.get_gradient_edge(parameter).node
        assert node.variable.grad is None and node.variable.shape == parameter.shape
        node.variable.grad = torch.full_like(parameter, 2.0)
        assert torch.equal(parameter.grad, torch.full_like(parameter, 2.0))
        parameter.grad = None
        (gradient,) = torch.autograd.grad((view * 3).sum(), parameter)
        assert torch.equal(gradient, torch.full_like(gradient, 3.0))
        assert torch.equal(view + 0, plain.get_parameter(name))
        before = engine.io.counters()["bytes_read"]
    assert goes_on(wrapped)
