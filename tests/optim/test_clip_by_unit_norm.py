"""`clip="unit"`: each unit is clipped by its own norm, so its update is final when it begins in
backward."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.device import ComputeDevice
from infinity.schedule.runtime import Runtime
from infinity.sharding.unit import Unit
from support.configs import config_of
from support.discrete import DiscreteDevice
from support.models import text_batch, transformer
from support.probe import Probe
from support.rank_group import RANKS, OnRanks

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT, STEPS = 0.02, 5
PLACES: dict[str, dict[str, Any]] = {
    "gpu": {"parameters": "gpu", "optimizer": "gpu", "gradients": "gpu"},
    "host": {"parameters": "cpu", "optimizer": "cpu"},
    "nvme": {"cache": 0, "gradients": "nvme", "gpu_memory": "4MiB", "cpu_memory": "8MiB"},
}
Start = Callable[..., Any]
Optimizers = Sequence[torch.optim.Optimizer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    models: list[nn.Module] = []

    def make(**options: Any) -> Any:
        folder = tmp_path / str(len(models))
        folder.mkdir()
        settings = {"gpu_memory": "16MiB", "cpu_memory": "32MiB", "poison": True} | options
        models.append(infinity.wrap(transformer(), config_of(nvme=folder, **settings)))
        return models[-1]

    yield make
    for model in models:
        infinity.engine(model).close()


def adamw(model: nn.Module, clip: str = "unit", **options: Any) -> infinity.AdamW:
    return infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=LIMIT, clip=clip, **options)


def train(model: Any, optimizer: Any, numbers: range = range(STEPS)) -> list[tuple[float, float]]:
    """Loss and norm of every step."""
    found = []
    for number in numbers:
        loss = model(**text_batch(number)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), optimizer.grad_norm))
    return found


def plain(
    units: Sequence[Unit], optimizers: Callable[[Any], Optimizers]
) -> list[tuple[float, float]]:
    """The same in plain PyTorch: of each unit, `clip_grad_norm_` of what each optimizer has."""
    model = transformer()
    found, owners = [], optimizers(model)
    parameters = dict(model.named_parameters())
    for number in range(STEPS):
        loss = model(**text_batch(number)).loss
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
        for unit, optimizer in itertools.product(units, owners):
            owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
            mine = [parameters[name] for name in unit.facts.names if id(parameters[name]) in owned]
            if mine:
                assert nn.utils.clip_grad_norm_(mine, LIMIT) > LIMIT
        for optimizer in owners:
            optimizer.step()
            optimizer.zero_grad()
        found.append((loss.item(), norm))
    return found


def close(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def counts(model: nn.Module) -> tuple[int, int]:
    """Updates that were kept, and that were rolled back."""
    report = infinity.engine(model).report()
    return report.updates_kept, report.updates_rolled_back


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("update", ["plain", "speculative"])
def test_it_is_what_plain_pytorch_computes_unit_by_unit(
    places: str, update: str, start: Start
) -> None:
    model = start(update=update, precision="fp32", **PLACES[places])
    found = train(model, adamw(model))
    units = infinity.engine(model).units
    close(found, plain(units, lambda m: [torch.optim.AdamW(m.parameters(), lr=1e-2)]))
    assert len(units) > 2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_placement_and_time_of_the_update_change_no_bit(precision: str, start: Start) -> None:
    runs = []
    for places, update in itertools.product(PLACES, ("plain", "exact", "speculative")):
        model = start(update=update, precision=precision, **PLACES[places])
        runs.append(train(model, adamw(model)))
    assert all(run == runs[0] for run in runs[1:])


@pytest.mark.parametrize("where", ["nvme", "host", "discrete"])
def test_every_update_that_began_in_backward_is_kept_although_every_step_clips(
    where: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but those of the first step, whose number of gradients nobody knows before it."""
    if where == "discrete":
        monkeypatch.setattr("infinity.build.ComputeDevice", DiscreteDevice)
    places = PLACES.get(where, PLACES["nvme"]) | {"gpu_cache": 0, "gpu_direct": "off"}
    model = start(update="speculative", **places)
    train(model, adamw(model))
    units = infinity.engine(model).units
    assert counts(model) == ((STEPS - 1) * len(units), 0)


@pytest.mark.parametrize("clip", ["unit", "previous"])
def test_auto_begins_updates_in_backward_as_soon_as_it_knows_what_clips_them(
    clip: Any, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a forward takes: it need not guess."""
    monkeypatch.setattr(Runtime, "forward_since", lambda runtime: 1e9)
    model = start(update="auto", **PLACES["nvme"])
    optimizer = adamw(model, clip)
    kept, units = [], len(infinity.engine(model).units)
    for number in range(STEPS):
        model(**text_batch(number)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(Probe(infinity.engine(model)).updater.last.kept)
    first = 1 if clip == "unit" else 2  # before that no norm is known, or no factor
    assert kept == [0] * first + [units] * (STEPS - first)


def test_the_norms_that_are_reported_are_those_of_all_gradients(start: Start) -> None:
    model = start(precision="fp32")
    optimizer = adamw(model)
    model(**text_batch(0)).loss.backward()
    engine, clipped = infinity.engine(model), 0.0
    gradients = {name: engine.gradient(p) for name, p in model.named_parameters()}
    for unit in engine.units:
        norm = nn.utils.get_total_norm([gradients[name] for name in unit.facts.names]).item()
        clipped += min(norm, LIMIT) ** 2
    optimizer.step()
    total = nn.utils.get_total_norm(list(gradients.values())).item()
    assert optimizer.grad_norm == pytest.approx(total, rel=1e-5)
    assert optimizer.clipped_grad_norm == pytest.approx(math.sqrt(clipped), rel=1e-3)


@pytest.mark.parametrize("limit", [1e3, math.inf])
def test_what_clips_nothing_is_training_without_clipping(limit: float, start: Start) -> None:
    runs = []
    for options in ({"max_grad_norm": limit, "clip": "unit"}, {"max_grad_norm": 1e3}):
        model = start(update="speculative", **PLACES["nvme"])
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2, **options)
        runs.append([loss for loss, _ in train(model, optimizer)])
        assert optimizer.clipped_grad_norm == optimizer.grad_norm
        assert counts(model)[0] > 0
    assert runs[0] == runs[1]


def test_several_optimizers_of_a_unit_clip_what_each_of_them_has(start: Start) -> None:
    """Their norms are those of their parameters; groups of one optimizer have one norm."""

    def parts(owner: Any) -> list[list[dict[str, Any]]]:
        heavy = [p for n, p in owner.named_parameters() if n.endswith("weight")]
        light = [p for n, p in owner.named_parameters() if not n.endswith("weight")]
        return [[{"params": heavy[::2]}, {"params": heavy[1::2], "lr": 2e-3}], [{"params": light}]]

    class Both:
        """Two optimizers in one."""

        def __init__(self, optimizers: list[infinity.AdamW]) -> None:
            self.optimizers = optimizers

        def step(self) -> None:
            for optimizer in self.optimizers:
                optimizer.step()

        def zero_grad(self) -> None:
            for optimizer in self.optimizers:
                optimizer.zero_grad()

        @property
        def grad_norm(self) -> float:
            return math.hypot(*(optimizer.grad_norm or 0.0 for optimizer in self.optimizers))

    model = start(update="speculative", precision="fp32", **PLACES["nvme"])
    settings: dict[str, Any] = {"lr": 1e-2, "max_grad_norm": LIMIT, "clip": "unit"}
    found = train(model, Both([infinity.AdamW(part, **settings) for part in parts(model)]))
    units = infinity.engine(model).units
    close(found, plain(units, lambda m: [torch.optim.AdamW(p, lr=1e-2) for p in parts(m)]))


def test_an_optimizer_of_torch_gets_gradients_that_are_clipped_by_unit(start: Start) -> None:
    model = start(precision="fp32", algorithm="other")
    optimizer = infinity.adapt(
        torch.optim.RMSprop, model.parameters(), lr=1e-3, max_grad_norm=LIMIT, clip="unit"
    )
    found = train(model, optimizer)
    units = infinity.engine(model).units
    close(found, plain(units, lambda m: [torch.optim.RMSprop(m.parameters(), lr=1e-3)]))


def test_gradients_of_a_scaled_loss_are_clipped_as_if_it_were_not(start: Start) -> None:
    """The scale is a power of two: the same bits."""
    runs = []
    for scale in (1.0, 1024.0):
        model = start(update="speculative", precision="fp32", **PLACES["nvme"])
        optimizer = adamw(model, loss_scaler=infinity.LossScaler(scale, window=None))
        found = []
        for number in range(STEPS):
            loss = model(**text_batch(number)).loss
            optimizer.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append((loss.item(), optimizer.grad_norm))
        runs.append(found)
        assert counts(model) == ((STEPS - 1) * len(infinity.engine(model).units), 0)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_leaves_out_the_step_of_all_units(
    value: float, start: Start
) -> None:
    model = start(update="speculative", precision="fp32", **PLACES["nvme"])
    optimizer = adamw(model, skip_nonfinite=True)
    train(model, optimizer, range(2))
    engine = infinity.engine(model)
    before = {name: kept.clone() for name, kept in engine.state_dict().items()}
    loss = model(**text_batch(2)).loss
    (loss + model.tokens.weight[0, 0] * value).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.overflow and optimizer.skipped_steps == 1
    assert all(torch.equal(before[name], now) for name, now in engine.state_dict().items())
    assert math.isfinite(train(model, optimizer, range(3, 5))[-1][0])


def test_accumulated_and_repeated_gradients_are_those_of_a_step_that_waits(start: Start) -> None:
    """What began in backward is rolled back where more gradients come, or the gradients were
    clipped by hand; the numbers stay."""
    runs = []
    for update in ("plain", "speculative"):
        model = start(update=update, precision="bf16", **PLACES["nvme"])
        optimizer, engine = adamw(model), infinity.engine(model)
        train(model, optimizer, range(2))
        for order in ("horizontal", "vertical"):
            infinity.accumulate(model, [text_batch(2), text_batch(3)], order=order)
            optimizer.step()  # and again, with gradients that are clipped
            optimizer.step()
            optimizer.zero_grad()
        with model.no_sync():
            model(**text_batch(4)).loss.backward()
        model(**text_batch(5)).loss.backward()
        engine.clip_grad_norm_(0.05)
        optimizer.step()
        runs.append({name: kept.clone() for name, kept in engine.state_dict().items()})
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_it_goes_on_from_a_checkpoint_and_a_state_dict(start: Start, tmp_path: Path) -> None:
    model = start(precision="fp32")
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    infinity.engine(model).save_checkpoint(tmp_path / "saved", optimizer)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    packed = copy.deepcopy(optimizer.state_dict())
    expected = train(model, optimizer, range(2, STEPS))
    model = start(precision="fp32")
    optimizer = adamw(model)
    infinity.engine(model).load_checkpoint(tmp_path / "saved", optimizer)
    assert train(model, optimizer, range(2, STEPS)) == expected
    model = start(precision="fp32")
    optimizer = adamw(model)
    model.load_state_dict(weights)
    optimizer.load_state_dict(packed)
    assert train(model, optimizer, range(2, STEPS)) == expected


# Two ranks


def work(task: Any, where: Path, rank: int) -> None:
    """One rank of two: see `support/rank_group`. Each mode of updates, with this rank's half of the
    batches."""
    clip, stage, uneven, discrete = task
    if discrete:
        vars(sys.modules["infinity.build"])["ComputeDevice"] = DiscreteDevice
    try:
        _train_both_ways(clip, stage, uneven, where, rank)
    finally:
        vars(sys.modules["infinity.build"])["ComputeDevice"] = ComputeDevice


def _train_both_ways(clip: str, stage: int, uneven: bool, where: Path, rank: int) -> None:
    for update in ("plain", "speculative"):
        folder = where / update
        folder.mkdir(exist_ok=True)
        config = config_of(
            nvme=folder, update=update, stage=stage, precision="fp32", cache=0, gpu_cache=0,
            gpu_memory="4MiB", cpu_memory="8MiB", gpu_direct="off", device="cpu",
        )  # fmt: skip
        model = infinity.wrap(transformer(), config)
        with contextlib.closing(infinity.engine(model)) as engine:
            optimizer = adamw(model, clip=clip)
            found = []
            model.blocks[1].up.weight.requires_grad_(not (uneven and rank == 1))
            for number in range(STEPS):
                model(**text_batch(2 * number + rank)).loss.backward()
                if uneven:
                    there = [engine.gradient(p) for p in model.parameters()]
                    assert all(gradient is not None for gradient in there)
                    expected = nn.utils.get_total_norm(there).item()
                optimizer.step()
                assert not uneven or optimizer.grad_norm == pytest.approx(expected, rel=1e-5)
                optimizer.zero_grad()
                found.append(optimizer.grad_norm)
            report = engine.report()
            kept = report.updates_kept, report.updates_rolled_back, len(engine.units)
            torch.save((found, kept, engine.state_dict()), folder / f"{rank}.pt")


def alone(clip: str, start: Start) -> tuple[list[float], dict[str, torch.Tensor]]:
    """One rank with the batches of both."""
    model = start(precision="fp32")
    optimizer, norms = adamw(model, clip=clip), []
    for number in range(STEPS):
        batches = [text_batch(2 * number + rank) for rank in range(RANKS)]
        infinity.accumulate(model, batches, order="horizontal")
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    return norms, infinity.engine(model).state_dict()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("clip", ["unit", "previous"])
def test_two_ranks_compute_what_one_does_and_keep_what_began_in_backward(
    clip: str, stage: int, start: Start, on_ranks: OnRanks, tmp_path: Path
) -> None:
    assert on_ranks((clip, stage, False, False)) == ["done"] * RANKS
    norms, weights = alone(clip, start)
    for update in ("plain", "speculative"):
        first, second = (torch.load(tmp_path / update / f"{rank}.pt") for rank in range(RANKS))
        assert first[0] == second[0] == torch.load(tmp_path / "plain" / "0.pt")[0]
        assert first[0] == pytest.approx(norms, rel=1e-4)
        for name, expected in weights.items():
            torch.testing.assert_close(first[2][name], expected, rtol=1e-4, atol=1e-5)
        for kept, rolled_back, units in (first[1], second[1]):
            if update == "speculative":
                assert kept == (STEPS - 1) * units
                assert rolled_back == 0
            else:
                assert kept == 0


@pytest.mark.parametrize(("clip", "discrete"), [("unit", False), ("unit", True), ("global", True)])
def test_a_gradient_that_one_rank_alone_has_is_in_the_norm(
    clip: str, discrete: bool, on_ranks: OnRanks, tmp_path: Path
) -> None:
    """Also where the thread that brings gradients has squared those of this rank. Updates that
    began with their norm are done again."""
    assert on_ranks((clip, 3, True, discrete)) == ["done"] * RANKS
    (plainly, _, weights), *others = (
        torch.load(tmp_path / update / f"{rank}.pt")
        for update in ("plain", "speculative")
        for rank in range(RANKS)
    )
    for norms, _, same in others:
        assert norms == plainly
        assert all(torch.equal(weights[name], same[name]) for name in weights)
