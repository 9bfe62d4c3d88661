"""Saved tensors in parts on tensor parallel ranks (`Tuning.partition_activations`): the bits are
those of whole ones, and each rank keeps 1/N.

This file is also what each rank runs.
"""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.activations import partitions
from infinity.activations.partitions import GRANULE, _covers, _mixed
from infinity.tiers.saved_storage import SavedStorage
from support.configs import config_of
from support.discrete import DiscreteDevice
from support.probe import Probe
from support.rank_group import run_ranks

WIDTH, BLOCKS, STEPS, WORDS = 20, 3, 2, 31
LENGTH = 7  # so that the bytes of a hidden state are no multiple of parts
ROWS = 3
HIDDEN = ROWS * LENGTH * WIDTH * 4
LEAST = 1000
RUNS: dict[str, dict[str, Any]] = {
    "saved": {},
    "recomputed": {"recompute": "all"},
    "checkpointed": {"checkpoints": True},
    "reentrant": {"checkpoints": True, "use_reentrant": True},
    "backward twice": {"twice": True},
    "two losses": {"recompute": "all", "parts": 2},
    "interleaved": {"recompute": "all", "parts": 2, "vertical": True},
}
PLACES: dict[str, dict[str, Any]] = {
    "kept": {},
    "cpu": {"discrete": True, "activations": "cpu", "activation_memory": "1MiB"},
    "nvme": {"activations": "nvme", "activation_memory": "8KiB"},
}
CASES: dict[int, dict[tuple[int, int], list[tuple[str, str]]]] = {
    2: {
        (1, 2): [
            *((run, "kept") for run in RUNS),
            *(("saved", "nvme"), ("saved", "cpu"), ("recomputed", "nvme"), ("recomputed", "cpu")),
        ]
    },
    4: {
        (1, 4): [("saved", "kept"), ("recomputed", "nvme")],
        (2, 2): [("saved", "kept"), ("recomputed", "cpu"), ("interleaved", "nvme")],
    },
}
"""By the number of ranks and the mesh, data x tensor parallel."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.one, self.other = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down, self.dropout = nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        y = self.down(functional.silu(self.one(y)) * self.other(y))
        return x + self.dropout(y) * (ids > 2).unsqueeze(-1)


class Model(nn.Module):
    def __init__(self, checkpoints: bool = False, use_reentrant: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WORDS)
        self.checkpoints, self.use_reentrant = checkpoints, use_reentrant
        self.inputs: list[StorageWeakRef] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        self.inputs = []
        for block in self.blocks:
            self.inputs.append(StorageWeakRef(x.untyped_storage()))
            x = (
                checkpoint(block, x, ids, use_reentrant=self.use_reentrant)
                if self.checkpoints
                else block(x, ids)
            )
        return functional.cross_entropy(self.head(x).flatten(0, 1), (ids * 3 % WORDS).flatten())


def parallelize(model: Model, mesh: DeviceMesh) -> Model:
    columns = {name: ColwiseParallel() for name in ("one", "other")}
    for block in model.blocks:
        parallelize_module(block, mesh, columns | {"down": RowwiseParallel()})
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
    return model


def batch(step: int, data: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + data)
    return torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)


@contextmanager
def played(discrete: bool) -> Iterator[None]:
    """Saved tensors of this test are large enough; the device may be one of its own."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(partitions, "LEAST_BYTES", LEAST)
        monkeypatch.setattr(sys.modules["infinity.activations.saved_tensors"], "LEAST_BYTES", 64)
        if discrete:
            monkeypatch.setitem(
                vars(sys.modules["infinity.build"]), "ComputeDevice", DiscreteDevice
            )
        yield


class Rank:
    """One of the ranks, and where it may write."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.count = directory, 0
        self.meshes = {
            shape: init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
            for shape in CASES[dist.get_world_size()]
        }

    def wrap(self, model: nn.Module, mesh: DeviceMesh, **values: Any) -> nn.Module:
        self.count += 1
        directory = self.directory / f"nvme{dist.get_rank()}-{self.count}"
        directory.mkdir()
        values = {"collective_timeout": 60.0, "partition_activations": True} | values
        config = config_of(
            nvme=directory,
            gpu_memory="4MiB",
            cpu_memory="8MiB",
            cache=0,
            gpu_cache=0,
            precision="fp32",
            parameters="cpu",
            optimizer="cpu",
            device="cpu",
            threads=1,
            **values,
        )
        return infinity.wrap(model, config, group=mesh["dp"])

    def train(self, shape: tuple[int, int], run: dict[str, Any], place: str | None) -> Any:
        """Steps with parts in a place, or with whole tensors: what was computed and kept."""
        values = dict(PLACES.get(place or "", {}))
        with played(values.pop("discrete", False)):
            values |= {
                "recompute": run.get("recompute", "off"),
                "partition_activations": place is not None,
            }
            return self._steps(shape, run, values)

    def _steps(
        self, shape: tuple[int, int], run: dict[str, Any], values: dict[str, Any]
    ) -> dict[str, Any]:
        mesh = self.meshes[shape]
        torch.manual_seed(0)
        options = {k: v for k, v in run.items() if k in ("checkpoints", "use_reentrant")}
        model = parallelize(Model(**options), mesh["tp"])
        model = self.wrap(model, mesh, **values)  # type: ignore[assignment]
        torch.manual_seed(1)  # of dropout, the same on tensor parallel ranks
        gradients, losses, alive = {}, [], 0
        with infinity.engine(model) as engine:
            optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
            for step in range(STEPS):
                rows = batch(step, mesh["dp"].get_local_rank())
                parts = run.get("parts", 1)
                if run.get("vertical"):
                    given = [rows] * parts
                    losses += infinity.accumulate(model, given, loss=lambda outputs, _: outputs)
                else:
                    each = [model(rows) / parts for _ in range(parts)]
                    alive = sum(not each.expired() for each in model.inputs)
                    for loss in each:  # in the order of the forwards
                        if run.get("twice"):
                            loss.backward(retain_graph=True)
                        loss.backward()
                    losses += each
                gradients |= {
                    f"{step} {name}": engine.gradient(p) for name, p in model.named_parameters()
                }
                optimizer.step()
                optimizer.zero_grad()
            report, weights = engine.report(), engine.state_dict()
        return {
            "alive": alive,
            "losses": [loss.item() for loss in losses],
            "tensors": gradients | weights,
            "whole": report.activations_partitioned,
            "parts": report.activations_parts,
            "offloaded": report.activations_offloaded,
        }

    def shapes(self) -> dict[str, Any]:
        """Inputs of all kinds of a block: what comes back, and what is divided of it."""
        mesh = self.meshes[next(iter(self.meshes))]
        generator = torch.Generator().manual_seed(3)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        base = numbers(40, 41)
        given = {
            "odd": numbers(1001),
            "transposed": numbers(33, 35).t(),
            "expanded": numbers(1, 401).expand(5, 401),
            "integers": torch.arange(1003),
            "bytes": torch.arange(1501).to(torch.int8),
            "flags": torch.arange(2003) % 3 == 0,
            "complex": torch.view_as_complex(numbers(300, 2)).conj(),
            "narrow": base[:, 1:40],
            "small": numbers(200),
            "scalar": torch.tensor(3.0),
            "empty": numbers(0, 4),
        }

        class Inner(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.line = nn.Linear(4, 4)
                # A list would be put back to what the first forward had found.
                self.seen = queue.SimpleQueue[dict[str, torch.Tensor]]()

            def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
                self.seen.put(more)
                return self.line(x) * more["odd"].sum()

        model = nn.Sequential(Inner(), Inner())
        for part in model:
            parallelize_module(
                part, mesh["tp"], {"line": ColwiseParallel(output_layouts=Replicate())}
            )

        class Whole(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(model)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for block in self.blocks:
                    x = block(x, dict(given))
                return x.sum()

        with played(False):
            whole = self.wrap(Whole(), mesh, recompute="all")
            with infinity.engine(whole) as engine:
                optimizer = infinity.AdamW(whole.parameters())
                whole(torch.ones(2, 4)).backward()
                optimizer.step()
                report = engine.report()
        _, recomputed = model[0].seen.get(), model[0].seen.get()
        return {
            "equal": {
                name: value.stride() == recomputed[name].stride()
                and value.is_conj() == recomputed[name].is_conj()
                and torch.equal(value, recomputed[name])
                for name, value in given.items()
            },
            "whole": report.activations_partitioned,
            "parts": report.activations_parts,
            "nbytes": {name: value.untyped_storage().nbytes() for name, value in given.items()},
        }

    def uneven(self) -> list[int]:
        """Tokens of which one data parallel rank has too few to be divided: what each step
        divided."""
        mesh, found = self.meshes[2, 2], []
        model = parallelize(Model(), mesh["tp"])
        with played(False):
            self.wrap(model, mesh, recompute="all")
            with infinity.engine(model) as engine:
                optimizer = infinity.AdamW(model.parameters())
                for step in range(STEPS):
                    rows = batch(step, 0)
                    few = mesh["dp"].get_local_rank() == step % 2
                    model(rows[:1, :2] if few else rows).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    found.append(engine.report().activations_partitioned)
        return found

    def lies(self) -> dict[str, str]:
        """What is said where inputs of blocks are no replicas: of a sequence of its own on each
        rank, and of one that differs in the last rank's part alone."""
        mesh, said = self.meshes[next(iter(self.meshes))], {}
        for name in ("sequence", "one element"):
            x, first = torch.ones(ROWS, LENGTH, WIDTH), mesh["tp"].get_local_rank() == 0
            if name == "sequence":
                x = x * (1 + mesh["tp"].get_local_rank())
            elif first:
                x[-1, -1, -1] = 2
            model = parallelize(Model(), mesh["tp"])
            with played(False):
                self.wrap(model, mesh, recompute="all")
                with infinity.engine(model):
                    x.requires_grad_()
                    output = model.blocks[1](x, torch.full(x.shape[:2], 5))
                    try:
                        output.sum().backward()
                        said[name] = ""
                    except infinity.ConfigError as error:
                        said[name] = str(error)
                    assert x.grad is None
                    assert all(engine_gradient is None for engine_gradient in _gradients(model))
        return said

    def refused(self) -> str:
        """What is said of a model without DTensors, which stays as it was."""
        model = Model()
        before = {name: (type(p), p.data_ptr()) for name, p in model.named_parameters()}
        values = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(infinity.ConfigError) as error:
            self.wrap(model, next(iter(self.meshes.values())))
        after = {name: (type(p), p.data_ptr()) for name, p in model.named_parameters()}
        assert after == before
        assert all(map(torch.equal, model.parameters(), values))
        return str(error.value)


def _gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [infinity.engine(model).gradient(p) for p in model.parameters()]


def fail(directory: Path, rank: int, ranks: int) -> None:
    """One rank ends before it brings its part: what the other one says of it."""
    meeting = f"file://{directory}/rendezvous"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    me, said, notes = Rank(directory), {}, dist.FileStore(str(directory / "notes"), ranks)
    for name in ("an error of the program", "a part that is lost"):
        lost = name == "a part that is lost"
        values = {"collective_timeout": 600.0 if lost else 1.0} | PLACES["nvme"]
        model = parallelize(Model(), me.meshes[1, 2]["tp"])
        with played(False), pytest.MonkeyPatch.context() as monkeypatch:
            me.wrap(model, me.meshes[1, 2], recompute="all", **values)
            with infinity.engine(model) as engine:
                loss = model(batch(0, 0))
                if rank == 0 and lost:
                    tier = Probe(engine).activations
                    monkeypatch.setattr(tier, "fetch", _losing(tier.fetch))
                elif rank == 0:
                    loss.register_hook(_stop)
                try:
                    loss.backward()
                    said[name] = ""
                except Exception as error:
                    said[name] = infinity.errors.sentence(error)
                notes.set(f"{name} {rank}", "ended")
                notes.wait([f"{name} {1 - rank}"])
    torch.save(said, directory / f"said{rank}.pt")


def _losing(fetch: Callable[[SavedStorage], Any]) -> Callable[[SavedStorage], Any]:
    """`fetch`, which cannot read parts."""

    def lose(saved: SavedStorage) -> Any:
        if saved.nbytes == part(HIDDEN, 2):
            raise infinity.NvmeError("read", "/drive", 0, 5, 4096, 0)
        return fetch(saved)

    return lose


def _stop(gradient: torch.Tensor) -> None:
    raise ValueError("planted")


def serve(directory: Path, rank: int, ranks: int) -> None:
    """One rank, from start to end."""
    meeting = f"file://{directory}/rendezvous"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    me, results = Rank(directory), {}
    for shape, wanted in CASES[ranks].items():
        for run, place in wanted:
            if (shape, run, None) not in results:
                results[shape, run, None] = me.train(shape, RUNS[run], None)
            results[shape, run, place] = me.train(shape, RUNS[run], place)
    if ranks == 4:
        results["uneven"] = me.uneven()
    results["shapes"], results["lies"], results["refused"] = me.shapes(), me.lies(), me.refused()
    torch.save(results, directory / f"results{rank}.pt")
    dist.destroy_process_group()


# This side


@pytest.fixture(scope="module", params=CASES)
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[Any, Any]]:
    """What each rank found."""
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks(__file__, directory, request.param)
    return [
        torch.load(directory / f"results{rank}.pt", weights_only=False)
        for rank in range(request.param)
    ]


def runs(results: list[dict[Any, Any]]) -> Iterator[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Each run with parts: what it is, what whole tensors gave, and what it gave."""
    for result in results:
        for key, value in result.items():
            if isinstance(key, tuple) and key[2] is not None:
                yield key, result[key[0], key[1], None], value


def part(nbytes: int, ranks: int) -> int:
    """What a rank keeps of so many bytes: a multiple of 16."""
    return -(-nbytes // (ranks * GRANULE)) * GRANULE


def test_no_bit_changes(results: list[dict[Any, Any]]) -> None:
    count = 0
    for key, whole, divided in runs(results):
        count += 1
        assert divided["losses"] == whole["losses"], key
        assert divided["tensors"].keys() == whole["tensors"].keys()
        for name, value in whole["tensors"].items():
            assert torch.equal(divided["tensors"][name], value), (key, name)
    assert count == len(results) * sum(map(len, CASES[len(results)].values()))


def test_a_rank_keeps_its_part_of_what_all_hold(results: list[dict[Any, Any]]) -> None:
    """A replicated DTensor for each block, the input of its MLP, or its input where it is
    recomputed; and the input of the head."""
    for ((_, ranks), run, place), whole, divided in runs(results):
        assert (whole["whole"], whole["parts"]) == (0, 0)
        storages = (BLOCKS + 1) * RUNS[run].get("parts", 1)
        assert divided["whole"] == storages * HIDDEN
        assert divided["parts"] == storages * part(HIDDEN, ranks)
        assert HIDDEN % (ranks * GRANULE), "nothing is padded"
        if place == "kept":
            assert divided["offloaded"] == 0
        elif run != "saved":  # of the whole tensors, the loss saves some that are no replicas
            assert divided["parts"] <= divided["offloaded"] < divided["whole"]


def test_the_memory_of_what_is_divided_is_free(results: list[dict[Any, Any]]) -> None:
    for key, whole, divided in runs(results):
        if key[1] == "recomputed":
            assert (whole["alive"], divided["alive"]) == (BLOCKS, 0), key


def test_data_parallel_ranks_may_divide_more_or_less(results: list[dict[Any, Any]]) -> None:
    """They are not taken for ranks that run different modules."""
    whole = (BLOCKS + 1) * HIDDEN
    for rank, result in enumerate(results) if len(results) == 4 else ():
        assert result["uneven"] == ([0, whole] if rank < 2 else [whole, 0])


def test_inputs_of_every_kind_come_back(results: list[dict[Any, Any]]) -> None:
    for result in results:
        found, ranks = result["shapes"], len(results)
        assert [name for name, equal in found["equal"].items() if not equal] == []
        divided = set(found["nbytes"]) - {"narrow", "small", "scalar", "empty"}
        nbytes = [found["nbytes"][name] for name in divided]
        assert found["whole"] == sum(nbytes)
        assert found["parts"] == sum(part(each, ranks) for each in nbytes)


def test_what_is_no_replica_is_told_on_all_ranks(results: list[dict[Any, Any]]) -> None:
    for result in results:
        for name, said in result["lies"].items():
            assert said.startswith("what blocks.1 saved for the backward is not the same"), name
            assert "sequence parallelism" in said


def test_a_model_without_dtensors_is_refused(results: list[dict[Any, Any]]) -> None:
    for result in results:
        assert "no parameter of the model is a DTensor" in result["refused"]


def test_others_end_where_a_rank_brings_nothing(tmp_path: Path) -> None:
    run_ranks(__file__, tmp_path, 2, "fail")
    own, others = (torch.load(tmp_path / f"said{rank}.pt") for rank in range(2))
    assert own["an error of the program"] == "planted"
    assert "gather activation of head" in others["an error of the program"]
    assert "rank 0" in others["an error of the program"]
    assert "what head saved failed" in own["a part that is lost"]
    assert "rank 0 failed" in others["a part that is lost"]
    assert "/drive" in others["a part that is lost"]


@pytest.mark.parametrize("place", [0, 1, 7, 8, 4001, 4006])
def test_a_checksum_on_a_gpu_sees_every_byte(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "_PIECE", 100)
    memory = torch.randint(0, 255, (4007,), dtype=torch.uint8)
    before = int(_mixed(memory))
    assert 0 <= before < 1 << 62
    memory[place] ^= 1
    assert int(_mixed(memory)) != before
    moved = torch.cat([memory[8:], memory[:8]])
    assert int(_mixed(moved)) != int(_mixed(memory))


def test_what_covers_its_storage() -> None:
    base = torch.arange(24)
    whole = (base, base.view(4, 6).t(), base[:1].expand(1), base.view(2, 3, 4).permute(2, 0, 1))
    assert all(_covers(each, 24 * 8) for each in (whole[0], whole[1], whole[3]))
    assert not any(_covers(each, 24 * 8) for each in (base[1:], base.view(4, 6)[:, ::2], base[::2]))
    assert _covers(torch.ones(3, 1).expand(3, 5), 12)
