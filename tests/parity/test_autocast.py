"""fp32 parameters under torch.autocast: the numbers of plain PyTorch, and casts that leave with
their unit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import infinity
from support.configs import config_of
from support.models import Transformer, text_batch, transformer
from support.specified_adamw import SETTINGS, SpecifiedAdamW

pytestmark = pytest.mark.usefixtures("one_thread")
PLACEMENTS = [
    {"parameters": "nvme", "gpu_memory": 190_000},
    {"parameters": "cpu"},
    {"parameters": "gpu"},
]


def wrapped(model: nn.Module, directory: Path, **settings: Any) -> nn.Module:
    settings = {
        "gpu_memory": 1 << 20,
        "cpu_memory": 1 << 26,
        "cache": 0,
        "precision": "fp32",
        "poison": True,
    } | settings
    return infinity.wrap(model, config_of(nvme=directory, **settings))


def mixed(cache: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache)


def around_forwards(model: nn.Module, optimizer: Any, cache: bool = True) -> list[float]:
    losses = []
    for step in range(3):
        for half in range(2):
            with mixed(cache):
                loss = model(**text_batch(2 * step + half)).loss
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def around_steps(model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for step in range(3):
        with mixed():
            loss = model(**text_batch(step)).loss
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: placement["parameters"])
@pytest.mark.parametrize("loop", [around_forwards, around_steps])
def test_the_numbers_of_plain_pytorch(
    loop: Callable[..., list[float]], placement: dict[str, Any], tmp_path: Path
) -> None:
    plain = transformer(depth=3)
    expected = loop(plain, SpecifiedAdamW(plain.parameters()))
    model = wrapped(transformer(depth=3), tmp_path, **placement)
    assert loop(model, infinity.AdamW(model.parameters(), **SETTINGS)) == expected
    for name, value in infinity.engine(model).state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant: bool, tmp_path: Path) -> None:
    def make() -> Transformer:
        model = transformer(depth=3)
        model.run_block = lambda number, block, x: checkpoint(block, x, use_reentrant=reentrant)
        return model

    plain, model = make(), wrapped(make(), tmp_path)
    expected = around_forwards(plain, SpecifiedAdamW(plain.parameters()))
    assert around_forwards(model, infinity.AdamW(model.parameters(), **SETTINGS)) == expected


def test_a_block_used_twice_is_cast_twice(tmp_path: Path) -> None:
    """Its gradients are added in fp32, as plain PyTorch does without the cache."""

    def make() -> Transformer:
        model = transformer(depth=3)
        model.run_block = lambda number, block, x: model.blocks[0](model.blocks[1](block(x)))
        return model

    plain, model = make(), wrapped(make(), tmp_path)
    expected = around_forwards(plain, SpecifiedAdamW(plain.parameters()), cache=False)
    assert around_forwards(model, infinity.AdamW(model.parameters(), **SETTINGS)) == expected


def test_no_cast_is_stale_after_an_update(tmp_path: Path) -> None:
    """Under one autocast around all of training, where plain PyTorch goes on with the casts of the
    first forward."""

    def train(model: nn.Module, optimizer: Any, cache: bool) -> list[float]:
        losses = []
        with mixed(cache):
            for step in range(3):
                loss = model(**text_batch(step)).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        return losses

    plain, model = transformer(depth=3), wrapped(transformer(depth=3), tmp_path)
    expected = train(plain, SpecifiedAdamW(plain.parameters()), cache=False)
    assert train(model, infinity.AdamW(model.parameters(), **SETTINGS), cache=True) == expected


class Casts(TorchDispatchMode):
    """Remembers the storages of what was cast to bf16, without keeping them."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[tuple[StorageWeakRef, int]] = []
        self.most = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if (
            function is torch.ops.aten._to_copy.default
            and result.dtype == torch.bfloat16
            and args[0].ndim == 2
        ):
            self._found.append((StorageWeakRef(result.untyped_storage()), result.nbytes))
            self.most = max(self.most, self.alive)
        return result

    @property
    def alive(self) -> int:
        """Bytes of the matrices that were cast, and are still there."""
        return sum(nbytes for storage, nbytes in self._found if not storage.expired())


@pytest.mark.parametrize("training", [False, True])
def test_casts_leave_with_their_unit(training: bool, tmp_path: Path) -> None:
    """At most those of one block are alive, also while other forwards follow in the same
    context."""
    model = wrapped(transformer(depth=4), tmp_path)
    model.run_block = lambda number, block, x: checkpoint(block, x, use_reentrant=False)
    block = sum(p.numel() * 2 for p in model.blocks[0].parameters() if p.ndim == 2)
    with mixed(), torch.set_grad_enabled(training):
        for step in range(2):
            with Casts() as casts:
                loss = model(**text_batch(step)).loss
                if training:
                    loss.backward()
            assert 0 < casts.most <= block + model.head.weight.numel() * 2
            assert casts.alive <= model.head.weight.numel() * 2 * training, (
                "of the head, which nobody recomputes"
            )
            del loss
        assert not casts.alive
