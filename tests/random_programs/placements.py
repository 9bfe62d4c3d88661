"""Where the states of a program's model are: what `infinity.Config` is given for each placement."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import infinity
from random_programs import modules
from support.configs import config_of
from support.discrete import DiscreteDevice

MUCH = 1 << 26


class Placement(NamedTuple):
    """`gpu` and `cpu` are how much memory there is: so many times the smallest that works, or all
    (0)."""

    gpu: int
    cpu: int
    options: dict[str, Any]
    discrete: bool = False


DURABLE = {
    "durable": Placement(1, 1, {"cache": 0, "durability": "step", "poison": True}),
    "durable, cached": Placement(0, 2, {"durability": 2, "update": "exact"}),
}
"""Those whose steps outlive the process."""
HOST = {"parameters": "cpu", "optimizer": "cpu", "nvme": []}
PLACEMENTS = {
    "nvme smallest": Placement(1, 1, {"gradients": "nvme", "cache": 0, "poison": True}),
    "nvme two units": Placement(2, 1, {"cache": 0, "update": "exact"}),
    "nvme cached": Placement(0, 2, {"gradients": "nvme"}),
    "cpu": Placement(1, 0, HOST),
    "gpu": Placement(
        0, 0, {"parameters": "gpu", "optimizer": "gpu", "gradients": "gpu", "nvme": []}
    ),
    "mixed": Placement(2, 1, {"parameters": "cpu", "gradients": "nvme", "cache": 0}),
    "speculative": Placement(1, 0, {"update": "speculative"}),
    "posix": Placement(
        1, 1, {"io_engine": "posix", "update": "speculative", "cache": 0, "split_master": False}
    ),
    "activations": Placement(1, 0, {"activations": "nvme", "activation_memory": 1 << 14}),
    "gpu cache": Placement(0, 0, {"gpu_cache": 1 << 14}),
    "discrete": Placement(
        1, 1, {"cache": 0, "gpu_cache": 0, "update": "speculative"}, discrete=True
    ),
    "plain update": Placement(1, 0, HOST | {"update": "plain", "instruction_set": "scalar"}),
} | DURABLE
ON_DEVICE = {"parameters": "gpu", "gradients": "gpu"}
RANKED = {
    "stage 0": Placement(1, 0, {"stage": 0, "cache": 0}),
    "stage 1": Placement(0, 0, {"stage": 1, "cache": 0} | ON_DEVICE),
    "stage 1, gradients at home": Placement(0, 0, {"stage": 1, "parameters": "gpu"}),
    "stage 2": Placement(0, 0, {"stage": 2, "optimizer": "cpu"} | ON_DEVICE),
    "stage 2, gradients at home": Placement(0, 0, {"stage": 2, "parameters": "gpu"}),
    "stage 3": Placement(1, 1, {"gradients": "nvme", "cache": 0, "poison": True}),
    "stage 3 in memory": Placement(2, 0, HOST | {"update": "speculative"}),
}
"""Those of two ranks."""


@contextmanager
def _device(placement: Placement) -> Iterator[None]:
    """Inside, engines are made for the compute device of the placement."""
    names = vars(sys.modules["infinity.build"])
    before = names["ComputeDevice"]
    if placement.discrete:
        names["ComputeDevice"] = DiscreteDevice
    try:
        yield
    finally:
        names["ComputeDevice"] = before


def wrap(
    model: modules.Net,
    name: str,
    directory: Path,
    algorithm: str,
    moments: str,
    least: int,
    resume: bool = False,
) -> infinity.Engine:
    """Wrap the model in the placement of that name, with its states in `directory`, and `least`
    bytes of gpu_memory or more; with `resume` it goes on from there."""
    placement = (PLACEMENTS | RANKED)[name]
    budgets = {
        "gpu_memory": 1 if placement.gpu else MUCH,
        "cpu_memory": 1 if placement.cpu else MUCH,
    }
    factors = {"gpu_memory": placement.gpu, "cpu_memory": placement.cpu}
    always = {
        "nvme": [directory],
        "device": "cpu",
        "threads": 1,
        "algorithm": algorithm,
        "moment_precision": moments,
        "collective_timeout": 60.0,
    }
    with _device(placement):
        while True:
            try:
                infinity.wrap(
                    model,
                    config_of(**(always | budgets | placement.options)),
                    units=modules.units_of(model),
                    resume=resume,
                )
                return infinity.engine(model)
            except infinity.BudgetError as error:
                found = re.search(r"smallest (\w+) that works is (\d+)", str(error))
                if found is None or int(found[2]) <= budgets[found[1]]:
                    raise
                budgets[found[1]] = max(
                    int(found[2]) * max(factors[found[1]], 1),
                    least if found[1] == "gpu_memory" else 0,
                )
