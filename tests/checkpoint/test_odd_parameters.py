"""Whatever is saved loads, with all bits: parameters and buffers without elements, of one element
or none of the dimensions, transposed or strided; whole and in tiles; in other places, in other
tiles, and in another order of the optimizer's groups."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import infinity
from infinity.checkpoint.contents import Contents
from infinity.checkpoint.export import everything, export
from support.configs import config_of
from support.deepspeed import configuration
from support.probe import Probe

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 16
STEPS = 3
OF_TORCH = "of torch"
RULES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "adamw": ("adam", lambda groups: infinity.AdamW(groups, lr=1e-2)),
    "momentum": ("momentum", lambda groups: infinity.SGD(groups, lr=0.1, momentum=0.9)),
    OF_TORCH: ("other", lambda groups: infinity.adapt(torch.optim.Adamax, groups, lr=1e-2)),
}
PLACES: dict[str, dict[str, Any]] = {
    "nvme": {"cache": 0},
    "cpu": {"parameters": "cpu", "optimizer": "cpu", "gradients": "cpu"},
}
NVME: dict[str, Any] = PLACES["nvme"] | {"durability": "step"}
"""Where snapshots and commits are made."""


class Odd(nn.Module):
    """A linear layer, if it has a `body`, beside parameters and buffers of odd shapes."""

    def __init__(self, body: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH) if body else nn.Identity()
        self.wide, self.tall = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.zeros(3, 0))
        self.flat = nn.Parameter(torch.zeros(0))
        self.frozen = nn.Parameter(torch.zeros(0, 2), requires_grad=False)
        self.register_buffer("none", torch.zeros(0, 2, dtype=torch.int64))
        self.register_buffer("number", torch.randn(()))
        self.register_buffer("turned_buffer", torch.randn(4, 6).t())
        if body:
            self.scalar = nn.Parameter(torch.randn(()))
            self.one, self.ones = nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(1, 1, 1))
            self.turned = nn.Parameter(torch.randn(4, 6).t())
            self.strided = nn.Parameter(torch.randn(4, 12)[:, ::2])
            image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
            self.channels_last = nn.Parameter(image)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parameter in self.parameters(recurse=False):
            x = x + parameter.sum() * self.number
        return x + torch.tanh(self.linear(x))


def build(seed: int, tiles: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(Odd(True), Odd(False), Odd(True))
    return infinity.tile(model, tiles) if tiles else model


class Training:
    """A wrapped model and its optimizer."""

    def __init__(
        self,
        directory: Path,
        rule: str,
        tiles: int = 0,
        seed: int = 0,
        turned: bool = False,
        resume: bool = False,
        **place: Any,
    ) -> None:
        """`turned`: parameters come in the other order in the groups of the optimizer."""
        directory.mkdir(exist_ok=True)
        algorithm, make = RULES[rule]
        budgets = {"gpu_memory": "8MiB", "cpu_memory": "32MiB", "device": "cpu", "threads": 1}
        config = config_of(nvme=directory, algorithm=algorithm, poison=True, **budgets | place)
        self.model: Any = infinity.wrap(build(seed, tiles), config, resume=resume)
        self.engine = infinity.engine(self.model)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [[p for p in trained if (p.ndim == 2) is matrices] for matrices in (True, False)]
        if turned:
            groups = [group[::-1] for group in groups]
        self.optimizer = make([{"params": group} for group in groups])

    def train(self, steps: range) -> None:
        for step in steps:
            batch = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def bits(self) -> dict[str, torch.Tensor]:
        """Copies of all weights and buffers, and of the states of weights, tiles joined."""
        found = {name: value.clone() for name, value in self.engine.state_dict().items()}
        blocks = ((number, self.model[number]) for number in (0, 2))
        kinds = self.optimizer.rule.states
        for (number, block), kind in itertools.product(blocks, ("master", *kinds)):
            for name in ("scalar", "one", "ones", "turned", "strided", "channels_last"):
                found[f"{number}.{name} {kind}"] = infinity.get(getattr(block, name), kind).clone()
            found[f"{number}.linear {kind}"] = infinity.get(block.linear.weight, kind).clone()
        return found


def save(training: Training, directory: Path) -> None:
    training.engine.save_checkpoint(directory, training.optimizer)


def snapshot(training: Training, directory: Path) -> None:
    training.model(torch.zeros(3, WIDTH))  # fixes the record of the last step
    Probe(training.engine).committer.rest()
    task = infinity.snapshot(training.model, directory)
    assert task.wait(60) and task.step == STEPS


WRITERS: dict[str, tuple[Callable[[Training, Path], None], dict[str, Any]]] = {
    "save": (save, PLACES["nvme"]),
    "save from host memory": (save, PLACES["cpu"]),
    "snapshot": (snapshot, NVME),
}
TILES = [(0, 0), (0, 512), (512, 0), (512, 256)]
CASES = [
    (rule, writer, tiles)
    for rule, writer, tiles in itertools.product(RULES, WRITERS, TILES)
    # Such optimizers make no durable steps, and see one parameter in each tile.
    if rule != OF_TORCH or (writer != "snapshot" and tiles == (0, 0))
]


@pytest.mark.parametrize(("rule", "writer", "tiles"), CASES)
def test_what_is_saved_loads_elsewhere(
    rule: str, writer: str, tiles: tuple[int, int], tmp_path: Path
) -> None:
    write, place = WRITERS[writer]
    first = Training(tmp_path / "first", rule, tiles[0], **place)
    first.train(range(STEPS))
    expected = first.bits()
    write(first, tmp_path / "checkpoint")
    first.engine.close()
    for number, other in enumerate(PLACES.values()):
        training = Training(tmp_path / f"{number}", rule, tiles[1], 7, turned=True, **other)
        training.engine.load_checkpoint(tmp_path / "checkpoint", training.optimizer)
        assert different(expected, training.bits()) == []
        training.train(range(STEPS, STEPS + 1))
        training.engine.close()


@pytest.mark.parametrize("tiles", [0, 512])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != OF_TORCH])
def test_what_is_committed_is_resumed(rule: str, tiles: int, tmp_path: Path) -> None:
    first = Training(tmp_path / "nvme", rule, tiles, **NVME)
    first.train(range(STEPS))
    expected = first.bits()
    first.engine.close()
    training = Training(tmp_path / "nvme", rule, tiles, 7, resume=True, **NVME)
    assert training.engine.committed_step == STEPS
    assert different(expected, training.bits()) == []
    training.engine.close()


def different(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """The names under which they differ in any bit."""
    return [
        name
        for name in {**a, **b}
        if name not in a
        or name not in b
        or a[name].dtype != b[name].dtype
        or not torch.equal(a[name], b[name])
    ]


def test_an_export_has_them(tmp_path: Path) -> None:
    training = Training(tmp_path / "nvme", "adamw")
    training.train(range(STEPS))
    save(training, tmp_path / "checkpoint")
    contents = Contents(tmp_path / "checkpoint")
    exported = export(contents, tmp_path / "out", everything(contents))
    files = (load_file(tmp_path / "out" / name) for name in exported.files)
    found = {name: value for file in files for name, value in file.items()}
    expected = dict(training.engine.state_dict())
    assert different(found, expected) == []
    training.engine.close()


def test_a_tagged_checkpoint_loads(tmp_path: Path) -> None:
    """Of an engine of `infinity.initialize`."""
    engines = [
        infinity.initialize(model=build(seed, 0), config=configuration(tmp_path / f"{seed}"))[0]
        for seed in (0, 7)
    ]
    try:
        for number in range(STEPS):
            batch = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(number))
            engines[0].backward(engines[0](batch).square().mean())
            engines[0].step()
        engines[0].save_checkpoint(tmp_path / "saved")
        path, _ = engines[1].load_checkpoint(tmp_path / "saved")
        assert path is not None
        weights = [engine.module_state_dict() for engine in engines]
        assert different(*weights) == []
        states = [engine.optimizer.state_dict()["state"] for engine in engines]
        assert states[0].keys() == states[1].keys()
        for number, state in states[0].items():
            assert (
                different(
                    *(
                        {n: torch.as_tensor(v) for n, v in each.items()}
                        for each in (state, states[1][number])
                    )
                )
                == []
            )
    finally:
        for engine in engines:
            engine.destroy()
        dist.destroy_process_group()
