"""A process group that takes tensors of the compute device alone, as NCCL's: played by gloo over a
device that `discrete` plays.

What a collective is given of parameters, gradients and states has to lie in memory that the device
has handed out; not the few numbers by which ranks agree on something. This file is also what each
rank runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity
from infinity.placement.spec import Kind
from infinity.sharding import collectives
from infinity.sharding.ranks import Ranks, check_reach
from support.configs import config_of
from support.discrete import DiscreteDevice
from support.rank_group import run_ranks
from support.stages import CASES, flat, same, train

RANKS = 2
NAMES = (
    "data parallel, no_sync",
    "ZeRO-1",
    "ZeRO-1, gradients at home",
    "ZeRO-1, gradients at home, some kept",
    "ZeRO-2, no_sync",
    "ZeRO-Offload",
    "ZeRO-Inf-CPU",
    "ZeRO-Inf-NVMe",
    "little memory",
    "some kept",
)


class StrictDevice(DiscreteDevice):
    """Knows which memory is its own."""

    spans: list[tuple[int, int]] = []  # noqa: RUF012 - of all devices of this process
    passed = 0

    def compute_memory(self, nbytes: int) -> torch.Tensor:
        memory = super().compute_memory(nbytes)
        self.spans.append((memory.data_ptr(), memory.data_ptr() + nbytes))
        return memory

    def scratch(self, nbytes: int) -> torch.Tensor:
        StrictDevice.passed += nbytes
        return self.compute_memory(nbytes)

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return (
            tensor
            if self.has(tensor)
            else self.scratch(tensor.nbytes).view(tensor.dtype).copy_(tensor)
        )

    @classmethod
    def has(cls, tensor: torch.Tensor) -> bool:
        return any(
            begin <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= end
            for begin, end in cls.spans
        )


def strict(call: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*values: Any, **options: Any) -> Any:
        for tensor in (value for value in values if isinstance(value, torch.Tensor)):
            if tensor.dtype == torch.float32 and not StrictDevice.has(tensor):
                raise RuntimeError(f"{call.__name__} was given {tensor.nbytes} bytes of the host")
        return call(*values, **options)

    return checked


@contextmanager
def played() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(vars(sys.modules["infinity.build"]), "ComputeDevice", StrictDevice)
        monkeypatch.setattr(
            collectives, "_backends", lambda group: {"cpu of the discrete device": "nccl"}
        )
        monkeypatch.setattr(collectives, "_kind_for", lambda group: "cpu")
        monkeypatch.setattr(
            sys.modules["infinity.build"], "check_reach", lambda ranks, device: None
        )
        # Several pieces, the last one shorter.
        monkeypatch.setattr(collectives, "PASSING_BYTES", 4096)
        for name in ("_gather", "_reduce_scatter"):
            monkeypatch.setattr(collectives, name, strict(getattr(collectives, name)))
        calls = {name: strict(getattr(dist, name)) for name in ("all_reduce", "isend", "irecv")}
        monkeypatch.setattr(collectives, "dist", SimpleNamespace(**(vars(dist) | calls)))
        yield


def look(directory: Path, rank: int) -> bool:
    """Whether what the engine gives of gradients and states is that of the host's group."""
    found = []
    for how in (None, played()):
        with how or pytest.MonkeyPatch.context():
            nvme = directory / f"look {len(found)} {rank}"
            nvme.mkdir()
            config = infinity.Config(
                nvme=nvme,
                gpu_memory="8MiB",
                cpu_memory="8MiB",
                precision="fp32",
                tuning=infinity.Tuning(device="cpu", threads=1),
            )
            torch.manual_seed(0)
            model = infinity.wrap(torch.nn.Linear(70, 50), config, group=dist.group.WORLD)
            with infinity.engine(model) as engine:
                optimizer = infinity.AdamW(model.parameters(), max_grad_norm=0.1)
                model(torch.full((2, 70), float(rank))).square().sum().backward()
                gradient = engine.gradient(model.weight)
                optimizer.step()
                engine.drain()
                master = [unit.states.gather(Kind.EXP_AVG) for unit in engine.units]
                found.append(
                    [gradient, *master, *engine.state_dict().values(), *flat(optimizer).values()]
                )
    return all(torch.equal(*pair) for pair in zip(*found, strict=True))


def agree(directory: Path, rank: int) -> bool:
    """Whether ranks of which one is slow choose what that one would alone, and fast ones something
    else."""
    chosen = []
    for slowest in (1e15, 1.0 if rank == 1 else 1e15):
        with played(), pytest.MonkeyPatch.context() as monkeypatch:
            build = sys.modules["infinity.build"]
            monkeypatch.setattr(
                build, "copies", lambda *_: {"host_to_device": [1e3], "device_to_host": [1e15]}
            )
            monkeypatch.setattr(build, "updates", lambda *_, rate=slowest, **__: [rate])
            nvme = directory / f"agree {len(chosen)} {rank}"
            nvme.mkdir()
            states = dict.fromkeys(("parameters", "optimizer"), "cpu")
            memory = {"gpu_memory": "640KiB", "cpu_memory": "16MiB"}
            config = config_of(
                nvme=nvme, **memory, **states, precision="bf16", device="cpu", threads=1
            )
            layers = [torch.nn.Linear(64, 64) for _ in range(40)]
            model = infinity.wrap(
                torch.nn.Sequential(*layers),
                config,
                units=[torch.nn.Linear],
                group=dist.group.WORLD,
            )
            with infinity.engine(model) as wrapped:
                mine = [unit.update_blocks.gpu_resident for unit in wrapped.units]
            everywhere: list[Any] = [None] * RANKS
            dist.all_gather_object(everywhere, mine)
            assert all(each == mine for each in everywhere), everywhere
            chosen.append(sum(mine))
    return chosen[0] < chosen[1]


def serve(directory: Path, rank: int, ranks: int) -> None:
    meeting = f"file://{directory}/rendezvous"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    results = {}
    for name in NAMES:
        expected = train(CASES[name], directory / f"{name} {rank}", rank, dist.group.WORLD)
        before = StrictDevice.passed
        with played():
            found = train(
                CASES[name], directory / f"{name} discrete {rank}", rank, dist.group.WORLD
            )
        passed = StrictDevice.passed - before
        results[name] = (
            same(found, expected, "weights", "states") and found["losses"] == expected["losses"],
            passed,
        )
    results["look"] = look(directory, rank), 1
    results["agree"] = agree(directory, rank), 1
    torch.save(results, directory / f"results{rank}.pt")
    dist.destroy_process_group()


# This side


def test_a_group_of_the_device_alone(tmp_path: Path) -> None:
    """The same bits as over a group of the host, for what trains, what is read and what is
    saved."""
    run_ranks(__file__, tmp_path, RANKS)
    for rank in range(RANKS):
        results = torch.load(tmp_path / f"results{rank}.pt", weights_only=True)
        assert [name for name, (equal, _) in results.items() if not equal] == []
        assert all(passed for name, (_, passed) in results.items() if "ZeRO-Inf" in name), (
            "states were read from the host"
        )


def test_a_group_without_the_device_is_refused(tmp_path: Path) -> None:
    dist.init_process_group(
        "cpu:gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        check_reach(Ranks(dist.group.WORLD), "cpu")
        with pytest.raises(
            infinity.ConfigError,
            match=r"runs on cuda, but .* no backend for that \(cpu:gloo\); give .*cuda:nccl",
        ):
            check_reach(Ranks(dist.group.WORLD), "cuda")
    finally:
        dist.destroy_process_group()
