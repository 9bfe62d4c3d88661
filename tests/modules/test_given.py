"""Tensors of a state dict of a wrapped model are copies: a write to one is refused before the model
is used again, unless it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.directories.mapped import LEAST_BYTES
from support.smallest import Wrap, wrapping

WIDTH = 160
INPUTS = torch.ones(2, WIDTH)
SMALL, LARGE = "0.bias", "0.weight"


@pytest.fixture
def wrap(tmp_path: Path) -> Iterator[Wrap]:
    with wrapping(tmp_path) as made:
        yield made


@pytest.fixture
def model(wrap: Wrap) -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))
    assert model[0].bias.nbytes < LEAST_BYTES <= model[0].weight.nbytes
    return wrap(model, {})


WRITES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "small": lambda state: state[SMALL].copy_(torch.ones(WIDTH)),
    "large": lambda state: state[LARGE].mul_(2),
    "a view": lambda state: state[LARGE][0].zero_(),
    "data of a small one": lambda state: state[SMALL].data.fill_(3),
    "an array of a small one": lambda state: state[SMALL].numpy().fill(3),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_refused_once(model: nn.Module, write: str) -> None:
    state = model.state_dict()
    model(INPUTS)  # nothing was written
    WRITES[write](state)
    with pytest.raises(infinity.ShardedParameterError, match=r"0\.(bias|weight).*load_state_dict"):
        model(INPUTS)
    model(INPUTS)


def test_a_write_is_refused_by_a_step(model: nn.Module) -> None:
    optimizer = infinity.AdamW(model.parameters())
    model(INPUTS).sum().backward()
    state = model.state_dict()
    state[LARGE].zero_()
    with pytest.raises(infinity.ShardedParameterError, match="copies"):
        optimizer.step()


def test_what_is_loaded_may_be_written_before(model: nn.Module) -> None:
    state = model.state_dict()
    state[LARGE].fill_(0.5)
    model.load_state_dict(state)
    model(INPUTS)
    assert torch.equal(model.state_dict()[LARGE], torch.full((WIDTH, WIDTH), 0.5))


def test_a_state_dict_that_is_gone_is_not_looked_at(model: nn.Module) -> None:
    model.state_dict()[LARGE].zero_()
    model(INPUTS)
