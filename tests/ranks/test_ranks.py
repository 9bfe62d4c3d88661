"""Several ranks train one model: each keeps its shard on its own drive, and together they compute
what one rank would.

Every test runs in two processes over gloo. They are started once and told what to do, line by line
(see `support/rank_group.py`).
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import infinity
from support.configs import config_of
from support.probe import Probe
from support.rank_group import PATIENCE, RANKS, OnRanks

STEPS, ROWS, WIDTH, WORDS = 6, 4, 32, 40
ROOMY = {"gpu_memory": 4 << 20, "cpu_memory": 8 << 20, "cache": 0}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, gated: bool) -> torch.Tensor:
        y = self.down(functional.gelu(self.up(self.norm(x))))
        return x + (y * self.gate if gated else y)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.3)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(
        self, ids: torch.Tensor, gated: bool, skip: int | None, twice: bool | None
    ) -> torch.Tensor:
        x = self.words(ids)
        for number, block in enumerate(self.blocks):
            x = x if number == skip else block(x, gated)
        if twice is not None:
            for block in self.blocks[0], self.blocks[0], self.blocks[1]:
                x = checkpoint(block, x, gated, use_reentrant=twice)
        return functional.cross_entropy(
            self.head(x * self.scale).flatten(0, 1), ((ids * 3 + 1) % WORDS).flatten()
        )


@dataclasses.dataclass(frozen=True)
class Task:
    """One training run; `config` adds to `infinity.Config`, and `least` takes the smallest memory
    that works."""

    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    steps: int = STEPS
    accumulation: int = 1
    max_grad_norm: float | None = None
    ungated: int | None = None
    """The rank on which the blocks do not use their gates."""
    reentrant: bool | None = None
    """Whether further uses of the first blocks are checkpointed re-entrantly; None: there are
    none."""
    skips: tuple[int | None, ...] = (None,) * RANKS
    """The block that each rank leaves out in the last micro-batch of the first step."""
    dies: int | None = None
    """The rank that ends without a word in the second step."""
    slow: int | None = None
    """The rank whose drive is slow."""
    adapted: bool = False
    """Whether torch's Adafactor, which looks at parameters as a whole, updates unit by unit on the
    host."""
    scaled: bool = False
    """Whether the loss is scaled."""
    spoils: int | None = None
    """The part of the batch whose gradients are not finite in the second step."""
    alike: bool = False
    """Whether all ranks get the first part of the batch."""
    least: bool = False
    peeks: bool = False
    """Whether the model is evaluated between backward and step, when all that was begun in backward
    has been written."""
    reload: bool = False
    """Whether the second half is trained by a new optimizer that takes over the states of the
    first."""


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def shares(step: int, micro_batch: int) -> list[torch.Tensor]:
    """The batch, as the equal parts that the ranks get."""
    generator = torch.Generator().manual_seed(100 * step + micro_batch)
    return list(torch.randint(0, WORDS, (ROWS, 8), generator=generator).chunk(RANKS))


def least_memory(config: dict[str, Any], group: dist.ProcessGroup | None) -> dict[str, int]:
    """The smallest budgets, as the refusals name them."""
    found = {}
    for key in ("gpu_memory", "cpu_memory"):
        try:
            infinity.wrap(build(), config_of(**(config | {key: 0})), group=group)
        except infinity.BudgetError as error:
            found[key] = int(re.findall(r"that works is (\d+)", str(error))[0])
    return found


def train(
    task: Task, directory: Path, rank: int | None, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Run `task` as `rank` of `group`, or alone on all parts of every batch; returns everything it
    computed."""
    nvme = directory / f"nvme{rank}"
    nvme.mkdir()
    config: dict[str, Any] = {
        "nvme": [nvme],
        "precision": "fp32",
        "device": "cpu",
        "threads": 1,
        "poison": True,
    }
    config |= ROOMY | task.config
    if task.least:
        config |= least_memory(config, group)
    model = infinity.wrap(build(), config_of(**config), group=group)
    losses: list[float] = []
    norms: list[float] = []
    settings: dict[str, Any] = {
        "lr": 1e-2,
        "eps": 1e-6,
        "weight_decay": 0.1,
        "max_grad_norm": task.max_grad_norm,
    }
    settings["loss_scaler"] = (
        infinity.LossScaler(2.0**10, window=3, hysteresis=1) if task.scaled else None
    )
    with infinity.engine(model) as engine:
        optimizer: Any
        if task.adapted:
            optimizer = infinity.adapt(
                torch.optim.Adafactor, model.parameters(), lr=1e-2, max_grad_norm=task.max_grad_norm
            )
        else:
            optimizer = infinity.AdamW(model.parameters(), **settings)
        if rank is not None and rank == task.slow:
            engine.io.set_faults(bytes_per_second=float(4 << 20))
        for step in range(task.steps):
            if task.reload and step == task.steps // 2:
                states = copy.deepcopy(optimizer.state_dict())
                del optimizer
                optimizer = infinity.AdamW(model.parameters(), **settings)
                optimizer.load_state_dict(states)
            loss = 0.0
            for micro_batch in range(task.accumulation):
                batch = shares(step, micro_batch)
                parts = list(enumerate(batch[:1] * RANKS if task.alike else batch))
                for part, ids in parts if rank is None else [parts[rank]]:
                    if rank is not None and rank == task.dies and step == 1:
                        os._exit(9)
                    skip = (
                        task.skips[part]
                        if step == 0 and micro_batch == task.accumulation - 1
                        else None
                    )
                    value = (
                        model(ids, part != task.ungated, skip, task.reentrant) / task.accumulation
                    )
                    spoilt = math.inf if part == task.spoils and step == 1 else 1.0
                    optimizer.scale(value * spoilt / (len(parts) if rank is None else 1)).backward()
                    loss += value.item() / (len(parts) if rank is None else 1)
            if task.peeks:
                begun = Probe(engine).speculative_jobs.values()
                Probe(engine).await_jobs(
                    lambda begun=begun: all(job.written for job in begun if job.update),
                    PATIENCE / 3,
                )
                with torch.no_grad():
                    losses.append(model(shares(step, 0)[rank or 0], True, None, None).item())
            optimizer.step()
            losses.append(loss)
            norm = optimizer.grad_norm or 0.0
            norms.append(norm if math.isfinite(norm) else -1.0)
            if step < task.steps - 1:
                optimizer.zero_grad()
        scale = optimizer.loss_scaler.scale if optimizer.loss_scaler else 1.0
        result = {
            "scale": (scale, optimizer.skipped_steps),
            "losses": losses,
            "norms": norms,
            "weights": engine.state_dict(),
            "peaks": engine.report().peaks,
        }
        states = optimizer.state_dict()["state"]
        result["states"] = {
            f"{number} {name}": value
            for number, state in states.items()
            for name, value in state.items()
        }
        for name, parameter in model.named_parameters():
            with infinity.gathered(parameter):
                assert torch.equal(parameter, result["weights"][name])
        result["budgets"] = {"gpu": config["gpu_memory"], "cpu": config["cpu_memory"]}
        result["traffic"] = (
            engine.report().read_per_parameter,
            engine.report().planned_read_per_parameter,
        )
    assert list(nvme.iterdir()) == []
    return result


def work(task: dict[str, Any], where: Path, rank: int) -> None:
    torch.save(train(Task(**task), where, rank, dist.group.WORLD), where / f"result{rank}.pt")


Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(on_ranks: OnRanks, tmp_path: Path) -> Run:
    """`run(**task)`: what each rank computed."""

    def both(**values: Any) -> list[dict[str, Any]]:
        assert on_ranks(Task(**values)) == ["done"] * RANKS
        results = [
            torch.load(tmp_path / f"result{rank}.pt", weights_only=True) for rank in range(RANKS)
        ]
        for rank in range(RANKS):
            (tmp_path / f"nvme{rank}").rmdir()
        return results

    return both


def assert_same_everywhere(results: list[dict[str, Any]]) -> None:
    """All ranks end with the same weights, states and norms, bit for bit."""
    first, *others = results
    for other in others:
        assert other["norms"] == first["norms"]
        for kind in ("weights", "states"):
            assert other[kind].keys() == first[kind].keys()
            for name, value in first[kind].items():
                assert torch.equal(other[kind][name], value), f"{kind}: {name}"


def assert_equal_bitwise(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> None:
    for one, other in zip(a, b, strict=True):
        assert one["losses"] == other["losses"]
        assert_same_everywhere([one, other])


def assert_like_one_rank(results: list[dict[str, Any]], tmp_path: Path, task: Task) -> None:
    """Together the ranks computed what one rank computes on the whole batch."""
    (tmp_path / "alone").mkdir()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = train(task, tmp_path / "alone", None, None)
    finally:
        torch.set_num_threads(before)
    losses = [
        sum(values) / RANKS
        for values in zip(*(result["losses"] for result in results), strict=True)
    ]
    assert losses == pytest.approx(alone["losses"], rel=1e-5)
    assert losses[-1] < losses[0]
    assert results[0]["norms"] == pytest.approx(alone["norms"], rel=1e-5)
    for kind in ("weights", "states"):
        assert results[0][kind].keys() == alone[kind].keys()
        for name, value in alone[kind].items():
            difference = torch.linalg.vector_norm(results[0][kind][name].double() - value.double())
            assert difference <= 1e-5 * torch.linalg.vector_norm(value.double()), f"{kind}: {name}"
    assert results[0]["losses"] != results[1]["losses"], "the ranks had different data"


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({}, id="plain"),
        pytest.param({"max_grad_norm": 0.3}, id="clipping"),
        pytest.param({"accumulation": 3, "max_grad_norm": 0.5}, id="accumulation"),
        pytest.param({"ungated": 1}, id="parameters-unused-on-one-rank"),
        pytest.param({"ungated": 0, "accumulation": 2}, id="parameters-unused-on-the-first-rank"),
        pytest.param({"config": {"gradients": "nvme"}}, id="gradients-on-nvme"),
        pytest.param({"least": True, "max_grad_norm": 0.5}, id="smallest-budgets"),
        pytest.param(
            {"reentrant": True, "accumulation": 2}, id="blocks-used-again-in-reentrant-checkpoints"
        ),
        pytest.param({"reentrant": False}, id="blocks-used-again-in-checkpoints"),
        pytest.param({"reload": True}, id="state-dict"),
        pytest.param(
            {"config": {"update": "delayed", "delayed_after": 2}, "max_grad_norm": 0.3},
            id="one-step-late",
        ),
        pytest.param(
            {"adapted": True, "ungated": 1, "max_grad_norm": 0.3}, id="an-optimizer-of-torch"
        ),
        pytest.param({"scaled": True, "accumulation": 2, "ungated": 1}, id="scaled-loss"),
        pytest.param(
            {"scaled": True, "spoils": 1, "max_grad_norm": 0.5}, id="a-step-skipped-by-all-for-one"
        ),
    ],
)
def test_ranks_compute_what_one_rank_does(values: dict[str, Any], run: Run, tmp_path: Path) -> None:
    results = run(**values)
    assert_same_everywhere(results)
    assert_like_one_rank(results, tmp_path, Task(**values))
    if results[0]["scale"] != (1.0, 0):
        # Doubled after every three good steps of six; the second step may halve it.
        assert {result["scale"] for result in results} == {
            (2.0**10, 1) if "spoils" in values else (2.0**12, 0)
        }
    for result in results:
        for tier, budget in result["budgets"].items():
            assert result["peaks"][tier] <= budget


@pytest.mark.parametrize(
    "states",
    [
        {"precision": "fp32"},
        {"precision": "bf16"},
        {"precision": "bf16", "gradient_precision": "fp32"},
        {"precision": "bf16", "moment_precision": "bf16"},
        {"precision": "bf16", "moment_precision": "int8"},
    ],
    ids=["fp32", "bf16", "bf16-with-fp32-gradients", "bf16-moments", "int8-moments"],
)
def test_placement_changes_no_bit(states: dict[str, str], run: Run) -> None:
    here = {"parameters": "gpu", "optimizer": "gpu", "gradients": "gpu"}
    common = {"steps": 5, "accumulation": 2, "max_grad_norm": 0.5}
    reference = run(config=here | states, **common)
    assert_same_everywhere(reference)
    for config, least in [
        ({"parameters": "nvme", "optimizer": "nvme", "gradients": "cpu"}, True),
        (
            {"parameters": "cpu", "optimizer": "nvme", "gradients": "nvme", "copy_on_write": False},
            True,
        ),
        (
            {
                "parameters": "gpu",
                "optimizer": "cpu",
                "gradients": "cpu",
                "instruction_set": "scalar",
            },
            False,
        ),
        (
            {"parameters": "nvme", "optimizer": "cpu", "gradients": "gpu", "io_engine": "posix"},
            False,
        ),
        ({"cache": 150_000, "update": "speculative"}, False),
        ({"cache": 100_000, "update": "exact", "gradients": "nvme"}, False),
    ]:
        assert_equal_bitwise(run(config=config | states, least=least, **common), reference)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_ranks_with_equal_gradients_are_one_rank_bit_for_bit(
    moments: str, run: Run, tmp_path: Path
) -> None:
    """So the noise of stochastic rounding does not depend on who holds an element, and no int8
    group lies in two shards."""
    task: dict[str, Any] = {
        "config": {"precision": "bf16", "moment_precision": moments},
        "steps": 5,
        "alike": True,
    }
    results = run(**task)
    (tmp_path / "alone").mkdir()
    alone = train(Task(**task), tmp_path / "alone", None, None)
    for result in results:
        assert_equal_bitwise([result | {"norms": []}], [alone | {"norms": []}])


@pytest.mark.usefixtures("one_thread")
def test_a_buffer_for_gradients_changes_no_bit(tmp_path: Path) -> None:
    results = []
    for gradients in ("cpu", "nvme"):
        (tmp_path / gradients).mkdir()
        task = Task(config={"gradients": gradients}, steps=3, accumulation=3, reentrant=True)
        results.append(train(task, tmp_path / gradients, None, None))
    assert_equal_bitwise(results[:1], results[1:])


def test_a_slow_drive_of_one_rank_changes_nothing_but_time(run: Run) -> None:
    common: dict[str, Any] = {"steps": 4, "least": True, "accumulation": 2}
    assert_equal_bitwise(run(slow=1, **common), run(**common))


def test_every_rank_reads_its_share_only(run: Run, tmp_path: Path) -> None:
    results = run(steps=3)
    alone = train(Task(steps=3), tmp_path, None, None)
    assert results[0]["traffic"] == results[1]["traffic"]
    for mine, whole in zip(results[0]["traffic"], alone["traffic"], strict=True):
        assert mine == pytest.approx(whole / RANKS, rel=0.15), (
            "shards are padded to 2048 elements each"
        )
    assert results[0]["traffic"][0] == pytest.approx(results[0]["traffic"][1])


def test_ranks_that_use_different_blocks_are_told_and_not_mixed_up(on_ranks: OnRanks) -> None:
    # Blocks are of one size, so without a check each rank would take the other's block for its own.
    said = on_ranks(Task(steps=2, skips=(1, 2)))
    assert all(re.search(r"failed EngineClosedError: .*in one order", answer) for answer in said), (
        said
    )


def test_when_a_rank_dies_the_others_fail_and_clean_up(on_ranks: OnRanks, tmp_path: Path) -> None:
    said = on_ranks(Task(dies=1))
    assert said[1] == "gone"
    assert said[0].startswith("failed") and "AssertionError" not in said[0]
    assert list((tmp_path / "nvme0").iterdir()) == [], (
        "the engine of the rank that lives was closed"
    )


def test_ranks_see_nothing_of_an_update_before_its_step(run: Run) -> None:
    outcomes = [run(peeks=True, config={"update": update}) for update in ("plain", "speculative")]
    assert_equal_bitwise(*outcomes)
