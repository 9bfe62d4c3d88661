"""What ranks send each other and read from their drives in a step, to the byte, at two, three and
four ranks.

Units have sizes that every number of ranks divides without padding, so that the formulas hold
exactly, and each its own, by which a collective is known. This file is also what each rank runs.
The losses of the same runs, after 10 steps, are those of one rank on the whole batch. Reductions,
which over gloo are made of single messages, are measured alone as well: what the kernel says that
the sockets sent, the memory they take, and the bits of their sums.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import infinity
from infinity.sharding import collectives
from support.configs import config_of
from support.probe import Probe
from support.rank_group import run_ranks

WIDTH, WORDS, ROWS, STEPS, MAX_GRAD_NORM = 64, 384, 12, 10, 2.7
SIZES = [4 * WIDTH * WORDS * count for count in (1, 2, 4, 6, 8, 3)]
"""Bytes of the units in their order; WIDTH * WORDS is 12 * 2048 elements, and shards are padded to
2048."""
CPU = dict.fromkeys(("parameters", "gradients", "optimizer"), "cpu")
CASES: dict[str, dict[str, Any]] = {
    "data parallel": {"stage": 0} | dict.fromkeys(CPU, "gpu"),
    "room for all": CPU,
    "cpu": CPU | {"gpu_memory": 0},  # 0: the smallest that works
    "nvme": {"gpu_memory": 0},
}
STREAMED = ("cpu", "nvme")
SAME_BYTES = 48
FEW_BYTES = 1000  # less than any unit has
COLLECTIVES = [
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
]
MESSAGES = ("isend", "irecv")
REDUCTIONS = ("reduce_scatter_mean", "all_reduce_mean")
TENSORS = {"bf16": 1_500_000, "fp32": 700_001, "few": 7}
"""Elements of each rank's part in the reductions that are measured alone: several times what is
received at once, or less."""
# Offset of tcpi_bytes_sent in struct tcp_info of linux/tcp.h, from 4.19 on.
SENT_AT, TCP_INFO_BYTES = 200, 232


class Call(NamedTuple):
    """A collective: its name, and the bytes of the whole tensor."""

    name: str
    nbytes: int


class Block(nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, factor * WORDS, bias=False)
        self.down = nn.Linear(factor * WORDS, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class Model(nn.Module):
    """Units are the embedding, each block and the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(factor) for factor in (1, 2, 3, 4))
        self.head = nn.Linear(WIDTH, 3 * WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(
            self.head(x).flatten(0, 1), ((ids * 3 + 1) % WORDS).flatten()
        )


def log_collectives(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Every collective of torch.distributed from now on, called by `infinity.sharding.collectives`
    or by anything else."""
    calls: list[Call] = []

    def logged(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*values: Any, **options: Any) -> Any:
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            if name in REDUCTIONS:  # uint8 is where they receive; a gather is one of bytes
                tensors = [tensor for tensor in tensors if tensor.dtype != torch.uint8]
            if name not in REDUCTIONS or values[-1] is not None:  # None is no group
                calls.append(Call(name, max((tensor.nbytes for tensor in tensors), default=0)))
            return call(*values, **options)

        return run

    for name in COLLECTIVES:
        if hasattr(dist, name):
            monkeypatch.setattr(dist, name, logged(name, getattr(dist, name)))
    for name in ("_gather", "_reduce_scatter", *REDUCTIONS):
        monkeypatch.setattr(collectives, name, logged(name, getattr(collectives, name)))
    return calls


def last_step(log: Sequence[Call]) -> list[Call]:
    """The collectives of the last step in `log`: up to the sums of a few numbers that end a step,
    after which the gathers for the next one begin."""
    steps: list[list[Call]] = [[]]
    for before, call in zip((None, *log), log, strict=False):
        if before is not None and before.nbytes < FEW_BYTES <= call.nbytes:
            steps.append([])
        steps[-1].append(call)
    return [step for step in steps if step[-1].nbytes < FEW_BYTES][-1]


def named(calls: list[Call], name: str) -> list[int]:
    """The bytes of the collectives of this name, in their order."""
    return [call.nbytes for call in calls if call.name == name]


def without_messages(calls: Sequence[Call]) -> list[Call]:
    """The collectives, without what they are made of."""
    return [call for call in calls if call.name not in MESSAGES]


def gathered_once(calls: list[Call]) -> list[int]:
    """The bytes of the units that are gathered in the forward and are still there when the backward
    needs them."""
    gathers = named(calls, "_gather")
    return [size for size in SIZES if gathers.count(size) == 1]


def sent(calls: list[Call], ranks: int) -> float:
    """Bytes that each of `ranks` ranks sends in `calls`: in gathers, which are rings, and in
    messages."""
    return sum(named(calls, "_gather")) * (ranks - 1) / ranks + sum(named(calls, "isend"))


def sent_by_sockets() -> int:
    """Bytes that this process gave to its TCP sockets to send, those sent again excluded."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # closed meanwhile, as the descriptor of this very listing is
            continue
        with copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
                total += (
                    struct.unpack_from("Q", info, SENT_AT)[0]
                    - struct.unpack_from("Q", info, SENT_AT + 8)[0]
                )
    return total


def high_water() -> int:
    """The most bytes of memory of this process since /proc/self/clear_refs was written to."""
    return 1024 * int(
        re.findall(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[0]
    )


def reduce_alone(rank: int, ranks: int) -> dict[str, dict[str, Any]]:
    """Reductions of whole tensors: bytes sent, memory taken, and whether the sums are those in the
    order of the ranks."""
    group, found = dist.group.WORLD, {}
    room = collectives.receiving([group])
    room.zero_()  # takes the memory
    for name, length in TENSORS.items():
        dtype = torch.bfloat16 if name == "bf16" else torch.float32
        for operation in REDUCTIONS:
            count = length * ranks if operation == "reduce_scatter_mean" else length + 1
            all_values = [
                torch.randn(count, generator=torch.Generator().manual_seed(r)).to(dtype)
                for r in range(ranks)
            ]
            expected = all_values[0] / ranks
            for values in all_values[1:]:
                expected += values / ranks
            mine = all_values[rank].clone()
            part = (
                slice(length * rank, length * (rank + 1))
                if operation == "reduce_scatter_mean"
                else slice(None)
            )
            del all_values, values
            dist.barrier()
            # VmHWM starts again from what is resident
            Path("/proc/self/clear_refs").write_text("5")
            memory, before = high_water(), sent_by_sockets()
            arguments = (mine[part], mine) if operation == "reduce_scatter_mean" else (mine,)
            getattr(collectives, operation)(*arguments, room, group)
            dist.barrier()
            found[f"{operation} of {name}"] = {
                "nbytes": mine.nbytes,
                "sent": sent_by_sockets() - before,
                "memory": high_water() - memory,
                "exact": torch.equal(mine[part], expected[part]),
            }
    return found


def smallest_gpu_memory(config: dict[str, Any], group: dist.ProcessGroup | None) -> int:
    with pytest.raises(infinity.BudgetError) as refusal:
        infinity.wrap(Model(), config_of(**config), group=group)
    return int(re.findall(r"that works is (\d+)", str(refusal.value))[0])


def train(
    case: dict[str, Any], directory: Path, rank: int, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Train as `rank` of `group` on its rows of every batch: losses of all steps, and what the last
    step moved."""
    directory.mkdir()
    config = {
        "nvme": directory,
        "gpu_memory": "16MiB",
        "cpu_memory": "16MiB",
        "cache": 0,
        "precision": "fp32",
        "device": "cpu",
    }
    config |= {"threads": 1, "copy_on_write": False, "update": "exact"} | case
    if config["gpu_memory"] == 0:
        config["gpu_memory"] = smallest_gpu_memory(config, group)
    model = infinity.wrap(Model(), config_of(**config), group=group)
    with infinity.engine(model) as engine, pytest.MonkeyPatch.context() as monkeypatch:
        optimizer = infinity.AdamW(
            model.parameters(), lr=3e-3, eps=1e-6, max_grad_norm=MAX_GRAD_NORM
        )
        assert [unit.facts.nbytes for unit in engine.units] == SIZES
        log, losses, norms = log_collectives(monkeypatch), [], []
        for step in range(STEPS):
            ids = torch.randint(
                0, WORDS, (ROWS, 8), generator=torch.Generator().manual_seed(step % 4)
            )
            loss = model(ids if group is None else ids.chunk(dist.get_world_size())[rank])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            norms.append(optimizer.grad_norm)
        if Probe(engine).exchange is not None:
            Probe(engine).exchange.rest()
        every = without_messages(log)
        assert {call.nbytes for call in every[::2]} <= {SAME_BYTES}, (
            "before each the ranks compare what they are about to do"
        )
        calls = (
            [tuple(call) for call in last_step([call for call in log if call.nbytes != SAME_BYTES])]
            if log
            else []
        )
        report, count = engine.report(), sum(parameter.numel() for parameter in model.parameters())
        planned = (
            round(report.planned_read_per_parameter * count),
            round(report.planned_written_per_parameter * count),
        )
        return {
            "losses": losses,
            "norms": norms,
            "calls": calls,
            "gpu_memory": config["gpu_memory"],
            "moved": (
                round(report.read_per_parameter * count),
                round(report.written_per_parameter * count),
            ),
            "planned": planned,
        }


def serve(directory: Path, rank: int, ranks: int) -> None:
    """One rank, from start to end."""
    meeting = f"file://{directory}/rendezvous"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    results = {
        name: train(case, directory / f"{name} {rank}", rank, dist.group.WORLD)
        for name, case in CASES.items()
    }
    torch.save(
        {"cases": results, "reductions": reduce_alone(rank, ranks)}, directory / f"results{rank}.pt"
    )
    dist.destroy_process_group()


# This side


@pytest.fixture(scope="module", params=[2, 3])
def measured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """By rank, what `serve` saves."""
    directory, ranks = tmp_path_factory.mktemp(f"ranks{request.param}"), request.param
    run_ranks(__file__, directory, ranks)
    return [torch.load(directory / f"results{rank}.pt", weights_only=True) for rank in range(ranks)]


@pytest.fixture(scope="module")
def results(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By rank, then by case."""
    found = [each["cases"] for each in measured]
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


def test_ranks_lose_what_one_rank_does(
    results: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    expected = alone["data parallel"]
    assert expected["losses"][-1] < 0.9 * expected["losses"][0]
    assert min(expected["norms"]) < MAX_GRAD_NORM < max(expected["norms"]), "some steps are clipped"
    for name in CASES:
        assert alone[name]["losses"] == expected["losses"], name
        means = [
            sum(values) / len(results)
            for values in zip(*(result[name]["losses"] for result in results), strict=True)
        ]
        assert means == pytest.approx(expected["losses"], rel=1e-5), name
        assert results[0][name]["norms"] == pytest.approx(expected["norms"], rel=1e-5), name
        assert len({tuple(result[name]["losses"]) for result in results}) == len(results), (
            "the ranks had different data"
        )


def test_units_are_gathered_once_per_pass_and_reduced_once(results: list[dict[str, Any]]) -> None:
    for result in results:
        for name in STREAMED:
            calls, stayed = result[name]["calls"], gathered_once(result[name]["calls"])
            assert len(stayed) <= 3 and sum(stayed) <= result[name]["gpu_memory"], (
                "the smallest budget holds no more"
            )
            assert named(calls, "_gather") == SIZES + [
                size for size in reversed(SIZES) if size not in stayed
            ], name
            assert named(calls, "reduce_scatter_mean") == SIZES[::-1], name


def test_units_that_stay_are_gathered_once(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert named(result["room for all"]["calls"], "_gather") == SIZES
        assert named(result["room for all"]["calls"], "reduce_scatter_mean") == SIZES[::-1]


def test_a_step_sends_nothing_else_of_any_size(results: list[dict[str, Any]]) -> None:
    """Only which gradients there are, and the norm, as fp64; no broadcast, no barrier."""
    # Of each unit also its loss scale, and three flags; and whether a backward added anything since
    # the last step.
    flags = 8 * (len(list(Model().parameters())) + 4 * len(SIZES) + 1)
    for result in results:
        for name, found in result.items():
            if name == "data parallel":  # every rank has all gradients, and so their norm
                assert {call.name for call in found["calls"]} == {
                    "all_reduce_mean",
                    "all_reduce",
                    *MESSAGES,
                }
                assert named(found["calls"], "all_reduce_mean") == SIZES[::-1]
                assert named(found["calls"], "all_reduce") == [flags]
            else:
                assert {call.name for call in found["calls"]} == {
                    "_gather",
                    "reduce_scatter_mean",
                    "all_reduce",
                    *MESSAGES,
                }, name
                assert named(found["calls"], "all_reduce") == [flags, 8], name


def test_bytes_sent_are_one_and_a_half_times_those_of_data_parallel(
    results: list[dict[str, Any]],
) -> None:
    """ZeRO, 1910.02054, section 7: 3 (N-1)/N for the 2 (N-1)/N of data parallel; less what stays, 2
    (N-1)/N where all does."""
    ranks = len(results)
    share = (ranks - 1) / ranks
    for result in results:
        moved = {name: sent(found["calls"], ranks) for name, found in result.items()}
        assert moved["data parallel"] == pytest.approx(2 * share * sum(SIZES), rel=1e-12)
        assert moved["room for all"] == pytest.approx(moved["data parallel"], rel=1e-12)
        for name in STREAMED:
            stayed = sum(gathered_once(result[name]["calls"])) * share
            assert moved[name] == pytest.approx(1.5 * moved["data parallel"] - stayed, rel=1e-12), (
                name
            )


def test_a_reduction_sends_what_it_has_to_and_needs_no_memory(
    measured: list[dict[str, Any]],
) -> None:
    ranks = len(measured)
    for rank in measured:
        for name, found in rank["reductions"].items():
            assert found["exact"], f"{name}: added in the order of the ranks"
            passes = 1 if name.startswith("reduce_scatter") else 2
            least = passes * found["nbytes"] * (ranks - 1) / ranks
            assert least - 8 * ranks <= found["sent"] <= 1.001 * least + 4096, name
            assert found["memory"] < collectives.RECEIVING_BYTES / 2, name


def test_every_rank_reads_and_writes_its_share_of_nvme(
    results: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    read, written = alone["nvme"]["moved"]
    assert read > 2 * sum(SIZES) and written == 3 * sum(SIZES), "parameters, and two moments"
    for result in results:
        assert (
            result["nvme"]["moved"]
            == result["nvme"]["planned"]
            == (read // len(results), written // len(results))
        )
        for name in ("cpu", "room for all", "data parallel"):
            assert result[name]["moved"] == (0, 0), name
