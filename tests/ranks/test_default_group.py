"""Without `group=` all ranks of `torch.distributed` train one model, as with DDP and FSDP2;
`group=None` is one rank.

Two ranks run over gloo, as in `test_ranks.py`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.sharding.ranks import find_ranks
from support.rank_group import RANKS, OnRanks

STEPS, WIDTH = 3, 24


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def train(
    directory: Path, batches: list[list[torch.Tensor]], **group: Any
) -> dict[str, torch.Tensor]:
    """One step for each of `batches`, on the mean of its parts; the weights after that."""
    config = infinity.Config(
        nvme=directory,
        gpu_memory="4MiB",
        cpu_memory="8MiB",
        algorithm="sgd",
        tuning=infinity.Tuning(device="cpu", threads=1),
    )
    model = infinity.wrap(build(), config, **group)
    with infinity.engine(model) as engine:
        optimizer = infinity.SGD(model.parameters(), lr=0.1)
        for parts in batches:
            for part in parts:
                (model(part).square().mean() / len(parts)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return engine.state_dict()


def mine(rank: int) -> list[list[torch.Tensor]]:
    return [[batch(step, rank)] for step in range(STEPS)]


# The other side


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def work(group: dict[str, None], where: Path, rank: int) -> None:
    handler = Log()
    infinity_log = logging.getLogger("infinity")
    infinity_log.addHandler(handler)
    infinity_log.setLevel(logging.INFO)
    try:
        (where / f"nvme{rank}").mkdir()
        weights = train(where / f"nvme{rank}", mine(rank), **group)
    finally:
        infinity_log.removeHandler(handler)
    torch.save({"weights": weights, "said": handler.said}, where / f"result{rank}.pt")


# This side


def trained(group: dict[str, None], on_ranks: OnRanks, where: Path) -> list[dict[str, Any]]:
    assert on_ranks(group) == ["done"] * RANKS
    return [torch.load(where / f"result{rank}.pt", weights_only=True) for rank in range(RANKS)]


def test_without_a_group_all_ranks_train_one_model(on_ranks: OnRanks, tmp_path: Path) -> None:
    first, second = trained({}, on_ranks, tmp_path)
    (tmp_path / "alone").mkdir()
    whole = train(
        tmp_path / "alone", [[batch(step, rank) for rank in range(RANKS)] for step in range(STEPS)]
    )
    for name, value in whole.items():
        assert torch.equal(first["weights"][name], second["weights"][name]), name
        assert torch.allclose(first["weights"][name], value, rtol=1e-5, atol=1e-7), name
    for result in (first, second):
        assert [line for line in result["said"] if "trained by" in line] == [
            (
                "the model is trained by all 2 ranks of torch.distributed's default group; "
                "with group=None each rank trains its own"
            )
        ]


def test_a_group_that_is_none_is_one_rank(on_ranks: OnRanks, tmp_path: Path) -> None:
    results = trained({"group": None}, on_ranks, tmp_path)
    for rank, result in enumerate(results):
        (tmp_path / f"alone{rank}").mkdir()
        expected = train(tmp_path / f"alone{rank}", mine(rank))
        assert all(torch.equal(result["weights"][name], value) for name, value in expected.items())
        assert not any("trained by" in line for line in result["said"])
    assert not torch.equal(results[0]["weights"]["0.weight"], results[1]["weights"]["0.weight"])


@pytest.mark.parametrize("given", ["tp", 2, object()])
def test_what_is_no_group_is_refused(given: Any, tmp_path: Path) -> None:
    with pytest.raises(
        infinity.ConfigError,
        match=r"^group=.* is neither a process group that this process belongs to nor",
    ):
        find_ranks(given, 3)


def test_without_torch_distributed_it_is_one_rank(caplog: pytest.LogCaptureFixture) -> None:
    assert not dist.is_initialized()
    with caplog.at_level("INFO", "infinity"):
        assert find_ranks("auto", 3).number == 1
    assert caplog.messages == [
        "the model is trained by one rank: torch.distributed is not initialized"
    ]
