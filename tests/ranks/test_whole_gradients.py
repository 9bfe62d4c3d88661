"""Stage 1 with gradients in host memory: the bits of gradients on the device, one reduction of each
piece per step, and the host memory that the plan says.

This file is also what each rank runs: programs of training in all placements, one after the other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import infinity
from infinity.engine import is_wrapped
from infinity.placement.memory import bytes_on_tiers
from infinity.placement.spec import Kind
from infinity.quantities import round_up
from infinity.sharding import gradient_reduction
from support.configs import config_of
from support.probe import Probe
from support.rank_group import run_ranks
from support.stages import count_collectives, flat

WIDTH, WORDS, ROWS, DEPTH = 48, 40, 4, 3
ON_DEVICE: dict[str, Any] = {"stage": 1, "parameters": "gpu", "gradients": "gpu"}
AT_HOME = ON_DEVICE | {"gradients": "cpu"}
PLACEMENTS = {
    "on the device": ON_DEVICE,
    "at home": AT_HOME,
    "at home, least memory": AT_HOME | {"gpu_memory": 1, "cpu_memory": 1},
    "at home, beside NVMe": AT_HOME | {"optimizer": "nvme"},
    "at home, some kept": AT_HOME | {"gpu_cache": "150KiB"},
}
PRECISIONS = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "bf16, added up in fp32": {"precision": "bf16", "gradient_precision": "fp32"},
}
SMALL_PIECE = 3 << 12
"""Bytes: no divisor of any unit."""


class Block(nn.Module):
    """Two experts and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor, used: Sequence[int]) -> torch.Tensor:
        for number in used:
            x = x + functional.gelu(self.experts[number](x))
        return x if used else x + self.experts[0](x).detach()


class Net(nn.Module):
    """Embedding and head are tied, so their gradient comes twice in a backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, used: Sequence[int] = (0, 1)) -> torch.Tensor:
        """With these experts of the middle block, which may be none."""
        x = self.words(ids)
        for number, block in enumerate(self.blocks):
            x = block(x, used if number == 1 else (0, 1))
        logits = self.head(x).float().flatten(0, 1)
        return functional.cross_entropy(logits, ((ids * 3 + 1) % WORDS).flatten())


@contextmanager
def wrapped(directory: Path, group: Any, **options: Any) -> Iterator[infinity.Engine]:
    """In the smallest memory that works, where there is none."""
    directory.mkdir(parents=True)
    values: dict[str, Any] = {
        "nvme": directory,
        "gpu_memory": "8MiB",
        "cpu_memory": "8MiB",
        "optimizer": "cpu",
        "cache": 0,
        "gpu_cache": 0,
        "poison": True,
        "device": "cpu",
        "threads": 1,
    }
    values |= options
    model = Net()
    while not is_wrapped(model):
        try:
            infinity.wrap(model, config_of(**values), units=[Block], group=group)
        except infinity.BudgetError as error:
            ((key, least),) = re.findall(r"smallest (\w+) that works is (\d+)", str(error))
            values[key] = int(least)
    with infinity.engine(model) as engine:
        yield engine


class Program:
    """What one rank trains, and all that can be seen of it."""

    def __init__(self, engine: infinity.Engine, rank: int, ranks: int) -> None:
        self.engine, self.model, self.rank, self.ranks = engine, engine.model, rank, ranks
        self.optimizer = infinity.AdamW(
            self.model.parameters(),
            lr=1e-2,
            eps=1e-6,
            max_grad_norm=0.05,
            loss_scaler=infinity.LossScaler(2.0**8, window=2),
        )
        self.seen: list[Any] = []
        self.seed = 0

    def backward(self, *experts: Sequence[int]) -> None:
        """One micro-batch, with these experts on the first rank, the second one, and so on; the
        other ranks use both."""
        mine = experts[self.rank] if self.rank < len(experts) else (0, 1)
        loss = self.model(self.batch(), mine)
        self.optimizer.scale(loss).backward()
        self.seen.append(loss.detach())

    def batch(self) -> torch.Tensor:
        self.seed += 1
        generator = torch.Generator().manual_seed(self.ranks * self.seed + self.rank)
        return torch.randint(0, WORDS, (ROWS, 4), generator=generator)

    def look(self) -> None:
        for parameter in self.model.parameters():
            gradient = self.engine.gradient(parameter)
            self.seen.append("none" if gradient is None else gradient.clone())

    def step(self, zero: bool = True) -> None:
        self.optimizer.step()
        self.seen.append(self.optimizer.grad_norm)
        if zero:
            self.optimizer.zero_grad()

    def run(self) -> list[Any]:
        """Several micro-batches; parameters that one rank has no gradient of, or all but one;
        no_sync; gradients that are read, kept over steps, forgotten, zeroed and set."""
        self.backward()
        self.backward([0], [1])
        self.look()
        self.step()
        for _ in range(2):
            self.backward([])
        self.step()
        self.backward(*[[]] * self.ranks)
        self.step()
        for number in range(3):
            with self.engine.no_sync() if number < 2 else nullcontext():
                self.backward([], *[[1]] * (self.ranks - 1))
        self.step(zero=False)
        self.backward()  # on top of what was spent
        self.engine.clip_grad_norm_(0.02)
        self.step(zero=False)
        self.backward([])  # on top of that, on other ranks
        self.step(zero=False)
        self.backward([1])
        first, second = (expert.weight for expert in self.model.blocks[1].experts)
        first.grad = None
        self.model.blocks[0].experts[1].weight.grad = None
        self.backward()
        self.look()
        self.backward()  # after all were settled
        self.step()
        self.backward()
        second.grad = torch.full_like(second, 0.25)
        self.backward()
        self.optimizer.zero_grad(set_to_none=False)
        self.backward()
        self.step()
        self.backward()
        infinity.accumulate(  # a unit's gradients come several times in a row
            self.model, [self.batch() for _ in range(3)], lambda loss, batch: loss,
            scale=self.optimizer.scale,
        )  # fmt: skip
        self.step()
        self.seen += [*self.engine.state_dict().values(), *flat(self.optimizer).values()]
        return self.seen


def same(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(
        torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs
        for mine, theirs in zip(found, expected, strict=True)
    )


def programs(
    directory: Path, rank: int, ranks: int, group: Any, *precisions: str
) -> dict[str, bool]:
    """Whether each placement, in each precision, has the bits of the one on the device."""
    found = {}
    for precision in precisions:
        formats = PRECISIONS[precision]
        expected: list[Any] = []
        for name, placement in PLACEMENTS.items():
            where = directory / f"{precision} {name} {rank}"
            with wrapped(where, group, **(placement | formats)) as engine:
                seen = Program(engine, rank, ranks).run()
            expected = expected or seen
            found[f"{precision}, {name}"] = same(seen, expected)
        norms = [value for value in expected if isinstance(value, float)]
        assert any(norm > 0.05 for norm in norms), "some step is clipped"
    return found


def count(directory: Path, rank: int, ranks: int) -> dict[str, Any]:
    """Reductions in each of some micro-batches, and in the step after them."""
    found = {}
    for name, size in (("large pieces", gradient_reduction.PIECE_BYTES), ("small", SMALL_PIECE)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gradient_reduction, "PIECE_BYTES", size)
            calls: Counter[str] = Counter()
            count_collectives(patch, calls)
            where = directory / f"count {name} {rank}"
            with wrapped(where, dist.group.WORLD, **(AT_HOME | PRECISIONS["fp32"])) as engine:
                program, numbers = Program(engine, rank, ranks), []
                for act in (program.backward, program.backward, program.backward, program.step):
                    calls.clear()
                    act()
                    Probe(engine).rest()
                    numbers.append(calls["reduce_scatter_mean"])
                half = min(Probe(engine).gradient_buffer_bytes // 2, size) // 4
                length = half // ranks // 64 * 64
                found[name] = {
                    "numbers": numbers,
                    "pieces": sum(
                        -(-unit.facts.layout.shard_numel // length) for unit in engine.units
                    ),
                    "units": len(engine.units),
                }
    return found


def memory(directory: Path, rank: int, ranks: int) -> list[str]:
    """What differs between host memory in use, its peak, the plan, and the formula; and that a
    byte less is refused."""
    wrong = []
    options = AT_HOME | PRECISIONS["bf16"] | {"gpu_memory": 1, "cpu_memory": 1}
    with wrapped(directory / f"memory {rank}", dist.group.WORLD, **options) as engine:
        Program(engine, rank, ranks).run()
        config, numel = engine.config, sum(unit.facts.layout.numel for unit in engine.units)
        homes = [
            unit.blocks[kind].spec.home_bytes for unit in engine.units for kind in unit.blocks
            if kind is not Kind.PARAM
        ]  # fmt: skip
        grads = 2 * numel
        if sum(unit.blocks[Kind.GRAD].spec.home_bytes for unit in engine.units) != grads:
            wrong.append("gradients are not whole")
        formula = bytes_on_tiers(numel, config, ranks)
        if not engine.memory()["cpu"] == sum(homes) == formula["cpu"] == grads + 10 * numel / ranks:
            wrong.append(f"{engine.memory()}, {sum(homes)}, {formula}")
        room = sum(round_up(nbytes, 4096) for nbytes in homes)
        if not engine.report().peaks["cpu"] <= config.cpu_memory:
            wrong.append("peak")
        if Probe(engine).used("cpu") != room:
            wrong.append(f"homes take {room}")
        least = config.cpu_memory
    text = rf"cpu_memory=.* is too small: states at home in host memory take .* is {least} "
    with pytest.raises(infinity.BudgetError, match=text):
        values = options | {"cpu_memory": least - 1, "gpu_memory": "8MiB", "optimizer": "cpu"}
        infinity.wrap(Net(), config_of(**values), units=[Block], group=dist.group.WORLD)
    return wrong


def serve(directory: Path, rank: int, ranks: int) -> None:
    """One rank, from start to end."""
    meeting = f"file://{directory}/rendezvous"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    precisions = ["bf16"] if ranks == 4 else PRECISIONS  # four processes on two CPUs take long
    results = {"flat": programs(directory / "flat", rank, ranks, dist.group.WORLD, *precisions)}
    if ranks == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        results["mesh"] = programs(directory / "mesh", rank, ranks, mesh, "bf16, added up in fp32")
    extra = {"count": count(directory, rank, ranks), "memory": memory(directory, rank, ranks)}
    torch.save(results | extra, directory / f"results{rank}.pt")
    dist.destroy_process_group()


# This side


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.long), 4])
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """By rank."""
    directory, ranks = tmp_path_factory.mktemp(f"ranks{request.param}"), request.param
    run_ranks(__file__, directory, ranks)
    return [torch.load(directory / f"results{rank}.pt", weights_only=True) for rank in range(ranks)]


def test_bits_are_those_of_gradients_on_the_device(results: list[dict[str, Any]]) -> None:
    for result in results:
        for ranks in ("flat", "mesh") if len(results) == 4 else ("flat",):
            assert [name for name, equal in result[ranks].items() if not equal] == []


def test_each_piece_is_reduced_once_in_a_step(results: list[dict[str, Any]]) -> None:
    for result in results:
        for name, found in result["count"].items():
            assert found["numbers"] == [0, 0, 0, found["pieces"]], name
        assert result["count"]["small"]["pieces"] > 2 * result["count"]["small"]["units"]


def test_host_memory_is_that_of_the_plan(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["memory"] == []
