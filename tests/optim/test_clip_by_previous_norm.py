"""`clip="previous"`: the norm of the step before clips a step, so its updates begin in backward."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from support.configs import config_of
from support.models import text_batch, transformer

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT, STEPS = 0.5, 5
PLACES: dict[str, dict[str, Any]] = {
    "gpu": {"parameters": "gpu", "optimizer": "gpu", "gradients": "gpu"},
    "host": {"parameters": "cpu", "optimizer": "cpu"},
    "nvme": {"cache": 0, "gpu_memory": "4MiB", "cpu_memory": "8MiB"},
}
Start = Callable[..., tuple[Any, infinity.AdamW]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    models: list[nn.Module] = []

    def make(clip: str = "previous", **options: Any) -> tuple[Any, infinity.AdamW]:
        folder = tmp_path / str(len(models))
        folder.mkdir()
        settings = {"gpu_memory": "16MiB", "cpu_memory": "32MiB", "poison": True} | options
        models.append(infinity.wrap(transformer(), config_of(nvme=folder, **settings)))
        return models[-1], infinity.AdamW(
            models[-1].parameters(), lr=1e-2, max_grad_norm=LIMIT, skip_nonfinite=True, clip=clip
        )

    yield make
    for model in models:
        infinity.engine(model).close()


def train(model: Any, optimizer: Any, numbers: range) -> list[tuple[float, float]]:
    """Loss and norm of every step."""
    found = []
    for number in numbers:
        loss = model(**text_batch(number)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), optimizer.grad_norm))
    return found


def plain(numbers: range) -> list[tuple[float, float]]:
    """The same in plain PyTorch."""
    model = transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found, before = [], None
    for number in numbers:
        loss = model(**text_batch(number)).loss
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
        factor = min(1.0, LIMIT / ((norm if before is None else before) + 1e-6))
        for parameter in model.parameters():
            parameter.grad.mul_(factor)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm))
        before = norm
    return found


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("update", ["plain", "speculative"])
def test_it_is_what_plain_pytorch_computes_with_the_norm_before(
    places: str, update: str, start: Start
) -> None:
    """Every step is clipped, by another factor than its own norm gives."""
    found = train(*start(update=update, precision="fp32", **PLACES[places]), range(STEPS))
    expected = plain(range(STEPS))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    norms = [norm for _, norm in found]
    assert all(norm > LIMIT for norm in norms) and len(set(norms)) == STEPS


def test_placement_and_time_of_the_update_change_no_bit(start: Start) -> None:
    runs = [
        train(*start(update=update, precision="bf16", **PLACES[places]), range(STEPS))
        for places in PLACES
        for update in ("plain", "speculative")
    ]
    assert all(run == runs[0] for run in runs[1:])


@pytest.mark.parametrize("where", ["nvme", "host"])
def test_updates_of_clipped_steps_that_began_in_backward_are_kept(where: str, start: Start) -> None:
    """All but those of the first step, whose factor nobody knows before it."""
    kept = {}
    for clip in ("global", "previous"):
        model, optimizer = start(clip, update="speculative", **PLACES[where])
        train(model, optimizer, range(STEPS))
        counters = infinity.engine(model).recorder.counters()
        kept[clip] = counters.get("updates kept", 0), counters.get("updates rolled back", 0)
    units = len(infinity.engine(model).units)
    assert kept["global"][0] == 0 and kept["global"][1] > 0
    assert kept["previous"][0] == (STEPS - 1) * units
    assert kept["previous"][1] <= units


def test_it_goes_on_from_a_checkpoint_and_a_state_dict(start: Start, tmp_path: Path) -> None:
    model, optimizer = start()
    train(model, optimizer, range(2))
    infinity.engine(model).save_checkpoint(tmp_path / "saved", optimizer)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    packed = copy.deepcopy(optimizer.state_dict())
    expected = train(model, optimizer, range(2, STEPS))
    loaded, its = start()
    infinity.engine(loaded).load_checkpoint(tmp_path / "saved", its)
    assert train(loaded, its, range(2, STEPS)) == expected
    loaded, its = start(precision="fp32")
    loaded.load_state_dict(weights)
    its.load_state_dict(packed)
    found = train(loaded, its, range(2, 3))
    assert found[0][1] == pytest.approx(expected[0][1], rel=1e-2)
    assert its.clipped_grad_norm == pytest.approx(
        found[0][1] * LIMIT / (packed["last_norm"] + 1e-6), rel=1e-6
    )
    for norm in (math.nan, math.inf, -1.0, "1"):
        with pytest.raises(infinity.ConfigError, match="its last norm is "):
            its.load_state_dict(packed | {"last_norm": norm})


def test_a_norm_that_is_not_finite_clips_nothing_later(start: Start) -> None:
    model, optimizer = start(precision="fp32")
    ((_, before),) = train(model, optimizer, range(1))
    (model(**text_batch(1)).loss * math.inf).backward()
    optimizer.step()
    assert optimizer.overflow and not math.isfinite(optimizer.grad_norm or 0.0)
    optimizer.zero_grad()
    ((_, norm),) = train(model, optimizer, range(2, 3))
    assert optimizer.clipped_grad_norm == pytest.approx(norm * LIMIT / (before + 1e-6), rel=1e-12)


def test_another_word_is_refused(start: Start) -> None:
    with pytest.raises(
        infinity.ConfigError, match=r"clip='layer'; give one of global, previous, unit$"
    ):
        start("layer")
