"""Methods of `nn.Module` that would touch all data of a wrapped model do what they do to a plain
one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from support.configs import config_of
from support.models import Transformer, text_batch, transformer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def wrapped(tmp_path: Path) -> Iterator[Any]:
    config = config_of(
        nvme=tmp_path, gpu_memory=1 << 20, cpu_memory=1 << 26, precision="fp32", poison=True
    )
    model = infinity.wrap(transformer(), config)
    yield model
    infinity.engine(model).close()


def goes_on(model: nn.Module) -> bool:
    """Whether `model`, which nobody has trained, computes what a plain one computes."""
    plain = transformer()
    return torch.equal(model(**text_batch(0)).loss, plain(**text_batch(0)).loss)


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to("cpu"),
        lambda model: model.to(torch.float32),
        lambda model: model.to(torch.device("cpu"), torch.float32, non_blocking=True),
        lambda model: model.to(torch.zeros(1)),
        lambda model: model.cpu(),
        lambda model: model.float(),
        lambda model: model.blocks[0].to("cpu"),
        lambda model: nn.Sequential(model).cpu()[0],
    ],
)
def test_a_move_that_changes_nothing(
    move: Callable[[nn.Module], nn.Module], wrapped: Transformer
) -> None:
    before = dict(wrapped.named_parameters())
    assert move(wrapped) in list(wrapped.modules())
    after = dict(wrapped.named_parameters())
    assert list(before) == list(after)
    assert all(after[name] is parameter for name, parameter in before.items())
    assert goes_on(wrapped)


def test_a_move_that_is_refused_changes_no_buffer(wrapped: Transformer) -> None:
    """Torch converts the buffers of a module before the parameters of the next."""
    wrapped.blocks.register_buffer("first", torch.ones(2))
    nn.Module.register_buffer(wrapped.blocks[0].attention, "other", torch.ones(2))
    with pytest.raises(infinity.ShardedParameterError, match="the engine moves the model"):
        wrapped.to(torch.bfloat16)
    assert all(buffer.dtype == torch.float32 for buffer in wrapped.buffers())


def test_a_move_converts_what_is_not_the_engines(wrapped: Transformer) -> None:
    """As torch does: a buffer of another dtype, and a module that was added later."""
    wrapped.scale = wrapped.scale.double()
    wrapped.added = nn.Linear(2, 2).double()
    wrapped.float()
    assert wrapped.scale.dtype == wrapped.added.weight.dtype == torch.float32
    del wrapped.added
    assert goes_on(wrapped)


def test_a_closed_engine_leaves_nothing_on_the_modules(tmp_path: Path) -> None:
    plain = transformer()
    before = {name: set(vars(module)) for name, module in plain.named_modules()}
    model = infinity.wrap(plain, config_of(nvme=tmp_path, gpu_memory=1 << 20, cpu_memory=1 << 26))
    infinity.engine(model).close()
    assert before == {name: set(vars(module)) for name, module in model.named_modules()}
