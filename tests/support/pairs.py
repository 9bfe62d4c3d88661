"""A small model twice, plain and wrapped, each with an optimizer of the family, for what users do
to optimizers by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import infinity
from support.configs import config_of
from support.optimizers import FAMILY

WIDTH, HIDDEN = 8, 24
TIERS = {
    "nvme": {"parameters": "nvme", "optimizer": "nvme"},
    "cpu": {"parameters": "cpu", "optimizer": "cpu"},
    "gpu": {"parameters": "gpu", "optimizer": "gpu"},
}


class Net(nn.Module):
    """Three layers, and one that has no gradient until `late` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.late = nn.Linear(WIDTH, WIDTH)
        self.uses_late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(torch.tanh(self.down(torch.tanh(self.up(x)))))
        return self.late(x) if self.uses_late else x


class Side(NamedTuple):
    """A model and its optimizer; `engine` where it is wrapped."""

    model: Net
    optimizer: torch.optim.Optimizer
    engine: infinity.Engine | None

    def train(self, steps: range) -> None:
        """Take steps whose batches follow from their numbers."""
        for step in steps:
            made = torch.Generator().manual_seed(step)
            x = torch.randn(5, WIDTH, generator=made)
            self.model(x.to(self.model.down.bias.device)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of all weights, on the host."""
        found = self.model.state_dict() if self.engine is None else self.engine.state_dict()
        return {name: value.detach().cpu().clone() for name, value in found.items()}


@contextmanager
def pair(
    folder: Path,
    name: str = "adamw",
    tier: str = "nvme",
    tiles: bool = False,
    parameters: Callable[[Any], Any] = lambda model: model.parameters(),
    **options: Any,
) -> Iterator[tuple[Side, Side]]:
    """The wrapped side and the plain one, whose optimizers have these parameters."""
    ours, theirs, settings, algorithm = FAMILY[name]
    model, plain = built(), built()
    if tiles:
        infinity.tile(model.up, WIDTH * 4 * 8)
    tuning = {"poison": True, "threads": 1}
    chosen = {"gpu_memory": "4MiB", "cpu_memory": "8MiB", "algorithm": algorithm}
    folder.mkdir(exist_ok=True)
    wrapped = infinity.wrap(
        model, config_of(nvme=folder, **chosen, **TIERS[tier], **tuning, **options)
    )
    engine = infinity.engine(wrapped)
    try:
        yield (
            Side(wrapped, ours(parameters(wrapped), **settings), engine),
            Side(plain, theirs(parameters(plain), **settings), None),
        )
    finally:
        engine.close()


def built() -> Net:
    """The same model each time."""
    torch.manual_seed(0)
    return Net()


def close(ours: Side, theirs: Side) -> None:
    """Fail where weights differ by more than rounding."""
    expected = theirs.weights()
    for name, value in ours.weights().items():
        torch.testing.assert_close(
            value, expected[name], rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def entries(side: Side, names: tuple[str, ...]) -> dict[str, Any]:
    """What `optimizer.state` has of the parameters of these names."""
    state = side.optimizer.state
    found: dict[str, Any] = {"any": bool(state)}
    for name in names:
        parameter = side.model.get_submodule(name.rpartition(".")[0]).__getattr__(
            name.rpartition(".")[2]
        )
        found[name] = {
            key: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
            for key, value in state.get(parameter, {}).items()
            if value is not None
        }
    return found
