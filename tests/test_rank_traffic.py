"""What ranks send each other and read from their drives in a step, to the byte, at two, three and four ranks.

Units have sizes that every number of ranks divides without padding, so that the formulas hold exactly. This file is also what
each rank runs. The losses of the same runs, after many steps, are those of one rank on the whole batch.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from conftest import CHILD
from torch import nn
from torch.nn import functional

import infinity
from infinity.sharding import collectives
from infinity.tiers.block import Kind

WIDTH, WORDS, ROWS, STEPS, MAX_GRAD_NORM = 64, 384, 12, 20, 1.2
SMALLEST_UNIT = WIDTH * WORDS  # 12 * 2048 elements
CPU = dict.fromkeys(("parameters", "gradients", "optimizer"), "cpu")
CASES: dict[str, dict[str, Any]] = {
    "data parallel": {"stage": 0} | dict.fromkeys(CPU, "gpu"),
    "room for all": CPU,
    "cpu": CPU | {"gpu_memory": 0},  # 0: the smallest that works
    "nvme": {"gpu_memory": 0},
}
STREAMED = ("cpu", "nvme")
COLLECTIVES = [
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier", "recv", "reduce",
    "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
]  # fmt: skip


class Call(NamedTuple):
    """A collective: its name, the bytes of the whole tensor, the pass that it belongs to, and the unit that it moves or -1."""

    name: str
    nbytes: int
    when: str
    unit: int


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WORDS, bias=False), nn.Linear(WORDS, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class Model(nn.Module):
    """Units are the embedding, each block, which is twice as large, and the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), ((ids * 3 + 1) % WORDS).flatten())


class Log:
    """Every collective of torch.distributed that this rank calls, from `infinity.sharding.collectives` or from anywhere else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Call] = []
        self.when, self._unit = "", -1
        for name in COLLECTIVES:
            if hasattr(dist, name):
                monkeypatch.setattr(dist, name, self._counted(name, getattr(dist, name)))
        monkeypatch.setattr(collectives, "_gather", self._counted("gather of shards", collectives._gather))
        monkeypatch.setattr(collectives, "_reduce_scatter", self._counted("reduce-scatter", collectives._reduce_scatter))
        note = collectives.Calls.note

        def noted(calls: collectives.Calls, operation: str, unit: int) -> None:
            self._unit = unit
            note(calls, operation, unit)

        monkeypatch.setattr(collectives.Calls, "note", noted)

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*values: Any, **options: Any) -> Any:
            nbytes = max((value.nbytes for value in values if isinstance(value, torch.Tensor)), default=0)
            self.calls.append(Call(name, nbytes, self.when, self._unit))
            self._unit = -1
            return call(*values, **options)

        return counted


def sent(calls: list[Call], ranks: int) -> float:
    """Bytes that each of `ranks` ranks sends in `calls`, in rings: an all-reduce is a reduce-scatter and a gather."""
    return sum(call.nbytes * (2 if call.name == "all_reduce" else 1) for call in calls) * (ranks - 1) / ranks


def smallest_gpu_memory(config: dict[str, Any], group: dist.ProcessGroup | None) -> int:
    with pytest.raises(infinity.BudgetError) as refusal:
        infinity.wrap(Model(), infinity.Config(**config), group=group)
    return int(re.findall(r"that works is (\d+)", str(refusal.value))[0])


def train(case: dict[str, Any], directory: Path, rank: int, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Train as `rank` of `group` on its rows of every batch: losses of all steps, and what the last step moved."""
    directory.mkdir()
    config = {"nvme": directory, "gpu_memory": "16MiB", "cpu_memory": "16MiB", "cache": 0, "precision": "fp32", "device": "cpu"}
    config |= {"threads": 1, "copy_on_write": False, "update": "exact"} | case
    if config["gpu_memory"] == 0:
        config["gpu_memory"] = smallest_gpu_memory(config, group)
    model = infinity.wrap(Model(), infinity.Config(**config), group=group)
    with infinity.engine(model) as engine, pytest.MonkeyPatch.context() as monkeypatch:
        optimizer = infinity.AdamW(model.parameters(), lr=3e-3, eps=1e-6, max_grad_norm=MAX_GRAD_NORM)
        log, losses, norms = Log(monkeypatch), [], []
        for step in range(STEPS):
            log.calls.clear()
            ids = torch.randint(0, WORDS, (ROWS, 8), generator=torch.Generator().manual_seed(step % 4))
            log.when = "forward"
            loss = model(ids if group is None else ids.chunk(dist.get_world_size())[rank])
            shards = [(unit.blocks[Kind.PARAM].lease, unit) for unit in engine.units]
            stayed = [unit.index for lease, unit in shards if lease is not None and unit._gathered_lease is lease]
            log.when = "backward"
            loss.backward()
            log.when = "step"
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            norms.append(optimizer.grad_norm)
        calls = [tuple(call) for call in log.calls]
        report, count = engine.report(), sum(parameter.numel() for parameter in model.parameters())
        planned = round(report.planned_read_per_parameter * count), round(report.planned_written_per_parameter * count)
        return {
            "losses": losses, "norms": norms, "calls": calls, "stayed": stayed,
            "units": [unit.nbytes for unit in engine.units], "parameters": count,
            "moved": (round(report.read_per_parameter * count), round(report.written_per_parameter * count)), "planned": planned,
        }  # fmt: skip


def serve(directory: Path, rank: int, ranks: int) -> None:
    """One rank, from start to end."""
    torch.set_num_threads(1)
    meeting = f"file://{directory}/rendezvous"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    results = {name: train(case, directory / f"{name} {rank}", rank, dist.group.WORLD) for name, case in CASES.items()}
    torch.save(results, directory / f"results{rank}.pt")
    dist.destroy_process_group()


# This side


@pytest.fixture(scope="module", params=[2, 3, 4])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank, then by case."""
    directory, ranks = tmp_path_factory.mktemp(f"ranks{request.param}"), request.param
    options = CHILD | {"env": CHILD["env"] | {"GLOO_SOCKET_IFNAME": "lo"}}
    command = [sys.executable, __file__, str(directory)]
    processes = [subprocess.Popen([*command, str(rank), str(ranks)], stderr=subprocess.PIPE, **options) for rank in range(ranks)]
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(said)
    found = [torch.load(directory / f"results{rank}.pt", weights_only=True) for rank in range(ranks)]
    for result in found:
        for case in result.values():
            case["calls"] = [Call(*call) for call in case["calls"]]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One rank, by case."""
    directory, before = tmp_path_factory.mktemp("alone"), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {name: train(case, directory / name, 0) for name, case in CASES.items()}
    finally:
        torch.set_num_threads(before)


def test_ranks_lose_what_one_rank_does(results: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    expected = alone["data parallel"]
    assert expected["losses"][-1] < 0.9 * expected["losses"][0]
    assert min(expected["norms"]) < MAX_GRAD_NORM < max(expected["norms"]), "some steps are clipped"
    for name in CASES:
        assert alone[name]["losses"] == expected["losses"], name
        means = [sum(values) / len(results) for values in zip(*(result[name]["losses"] for result in results), strict=True)]
        assert means == pytest.approx(expected["losses"], rel=1e-5), name
        assert results[0][name]["norms"] == pytest.approx(expected["norms"], rel=1e-5), name
        assert len({tuple(result[name]["losses"]) for result in results}) == len(results), "the ranks had different data"


def test_units_are_gathered_once_per_pass_and_reduced_once(results: list[dict[str, Any]]) -> None:
    for result in results:
        for name in STREAMED:
            found = result[name]
            sizes, units = found["units"], range(len(found["units"]))
            assert len(sizes) == 6 and set(sizes) == {4 * SMALLEST_UNIT, 8 * SMALLEST_UNIT}, "nothing is padded"
            # What is still there when the forward ends is used where it is; of six units the smallest budget holds three at most.
            stayed = found["stayed"]
            assert {1, 2, 3}.isdisjoint(stayed), name
            expected = [Call("gather of shards", sizes[unit], "forward", unit) for unit in units]
            assert [call for call in found["calls"] if call.when == "forward"] == expected, name
            backward = [call for call in found["calls"] if call.when == "backward"]
            gathers = [call for call in backward if call.name == "gather of shards"]
            expected = [Call("gather of shards", sizes[unit], "backward", unit) for unit in reversed(units) if unit not in stayed]
            assert gathers == expected, name
            expected = [Call("reduce-scatter", sizes[unit], "backward", unit) for unit in reversed(units)]
            assert [call for call in backward if call not in gathers] == expected, name


def test_units_that_stay_are_gathered_once(results: list[dict[str, Any]]) -> None:
    for result in results:
        found = result["room for all"]
        units = range(len(found["units"]))
        assert [(call.when, call.unit) for call in found["calls"] if call.name == "gather of shards"] == [
            ("forward", unit) for unit in units
        ]


def test_a_step_sends_nothing_else_of_any_size(results: list[dict[str, Any]]) -> None:
    """Which gradients there are, the order of calls (two numbers), and the norm, as fp64."""
    tensors = len(list(Model().parameters()))
    for result in results:
        for name, found in result.items():
            small = [Call("all_reduce", 8 * (tensors + 2), "step", -1), Call("all_reduce", 8, "step", -1)]
            if name == "data parallel":
                del small[1]  # every rank has all gradients, and their norm
                sizes = found["units"]
                reductions = [Call("all_reduce", sizes[unit], "backward", unit) for unit in reversed(range(len(sizes)))]
                assert found["calls"] == reductions + small
            else:
                assert [call for call in found["calls"] if call.unit < 0] == small, name
                names = {call.name for call in found["calls"] if call.unit >= 0}
                assert names == {"gather of shards", "reduce-scatter"}, name


def test_bytes_sent_are_one_and_a_half_times_those_of_data_parallel(results: list[dict[str, Any]]) -> None:
    """ZeRO, 1910.02054, section 7: 3 (N-1)/N for the 2 (N-1)/N of data parallel; less what stayed, or 2 where all stays."""
    ranks = len(results)
    for result in results:
        moved = {name: sent([call for call in found["calls"] if call.unit >= 0], ranks) for name, found in result.items()}
        nbytes = 4 * result["data parallel"]["parameters"]
        assert moved["data parallel"] == 2 * (ranks - 1) / ranks * nbytes
        assert moved["room for all"] == moved["data parallel"]
        for name in STREAMED:
            stayed = sum(result[name]["units"][unit] for unit in result[name]["stayed"]) * (ranks - 1) / ranks
            assert moved[name] == 1.5 * moved["data parallel"] - stayed, name


def test_every_rank_reads_and_writes_its_share_of_nvme(results: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    read, written = alone["nvme"]["moved"]
    assert read > 0 and written == 12 * alone["nvme"]["parameters"]
    for result in results:
        assert result["nvme"]["moved"] == result["nvme"]["planned"] == (read // len(results), written // len(results))
        for name in ("cpu", "room for all", "data parallel"):
            assert result[name]["moved"] == (0, 0), name


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
