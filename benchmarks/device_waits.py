#!/usr/bin/env python3
"""How near forward and backward come to the longer of compute and link, where the device waits for
copies, and where threads of the host do.

On the simulated device of `tests/support/queued`, every operator and every copy takes a known time:
a copy `--latency` microseconds and its bytes at `--rate`. States are in host memory. Per round the
same step runs with the engine as it is, and with one in which the host sleeps where the device
would wait. The limit is exact: operators and copies of each phase, counted, times what each takes.
It leaves out that a phase has a beginning and an end: the last operators of a forward follow its
last copy, and the first gradient leaves behind the first operators of a backward. What a step takes
beyond the limit therefore grows much less than its number of layers: see `seconds_beyond`.

Host memory plays the device, so the link is slowed until copying takes no notable part of it. With
the default sizes all times but the host's are longer than on a GPU, so its share is smaller.
`--width 256 --rate 1500 --operators 100 200 400` has times of a GPU, and the Python code of the
host is then the slowest part.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import infinity
from infinity.bench.summary import Row, Spread, Summary
from infinity.device import ComputeDevice, Copy

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import queued

QUESTION = "What does it cost when the host waits for copies to and from the compute device?"
LIMIT = "forward plus backward, each the longer of its operators and its copies of one direction"
WARM_UP = 2


def host_waits() -> AbstractContextManager[object]:
    """Let the host sleep where the device would wait."""
    return mock.patch.object(ComputeDevice, "follow_copy", lambda device, copy: Copy.wait(copy))


def engine_of(options: argparse.Namespace, layers: int) -> nn.Module:
    """A wrapped chain of linear layers, with room for `--places` of them on the device."""
    torch.manual_seed(0)
    linears = (nn.Linear(options.width, options.width, bias=False) for _ in range(layers))
    model = queued.move(nn.Sequential(*linears))
    config = infinity.Config(
        gpu_memory=(options.places + 2) * 4 * options.width**2,
        cpu_memory=f"{24 * layers + 64}MiB",
        parameters="cpu",
        optimizer="cpu",
        tuning={"gpu_cache": 0},
    )
    return infinity.wrap(model, config)


def step(model: nn.Module, inputs: torch.Tensor, machine: Any) -> float:
    """Seconds of a forward, a backward and all that they queue."""
    begin = time.perf_counter()
    model(inputs).sum().backward()
    machine.synchronize()
    return time.perf_counter() - begin


def limit(
    options: argparse.Namespace, model: nn.Module, inputs: torch.Tensor, machine: Any
) -> dict[str, float]:
    """Seconds that each phase of a step takes if nothing of it waits: its operators one after the
    other, or its copies of one direction, whichever is longer."""
    found = {}
    machine.native.reset_counts()
    loss = model(inputs).sum()
    machine.synchronize()
    found["forward"] = longest(options, machine.native.counts())
    machine.native.reset_counts()
    loss.backward()
    machine.synchronize()
    found["backward"] = longest(options, machine.native.counts())
    return found


def longest(options: argparse.Namespace, counts: dict[str, Any]) -> float:
    times = [counts["operators"] * options.operator]
    for way in ("upload", "download"):
        copies, nbytes = len(counts[f"{way}_depths"]), counts[f"{way}_bytes"]
        times.append(copies * options.latency + nbytes / options.rate)
    return max(times) * 1e-6


def measure(options: argparse.Namespace, layers: int, machine: Any) -> list[Row]:
    """One row for each time that an operator takes."""
    machine.set_pace()
    model = engine_of(options, layers)
    inputs = torch.ones(4, options.width, device=queued.NAME)
    rows = []
    for operator in options.operators:
        options.operator = operator
        machine.set_pace(
            compute_us=operator, copy_us=options.latency, copy_bytes_per_us=options.rate
        )
        ratios: dict[str, list[float]] = {"device waits": [], "host waits": []}
        for _ in range(options.rounds):
            for name, found in ratios.items():
                with nullcontext() if name == "device waits" else host_waits():
                    for _ in range(WARM_UP):
                        step(model, inputs, machine)
                        model.zero_grad()
                    seconds = step(model, inputs, machine)
                    model.zero_grad()
                bound = limit(options, model, inputs, machine)
                found.append(seconds / sum(bound.values()))
                model.zero_grad()
        beyond = [(ratio - 1) * sum(bound.values()) for ratio in ratios["device waits"]]
        rows.append(
            Row(
                name=f"{layers} layers, operators of {operator / 1000:g} ms",
                ratio=Spread.of(ratios["device waits"]),
                others={
                    "host_waits_ratio": Spread.of(ratios["host waits"]),
                    "seconds_beyond": Spread.of(beyond),
                },
                facts={f"{name}_seconds": value for name, value in bound.items()},
            )
        )
    infinity.engine(model).close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=1024, help="of a layer: 1024 has 4 MiB")
    parser.add_argument("--layers", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--places", type=int, default=4, help="layers that the device has room for")
    parser.add_argument("--latency", type=float, default=80, help="microseconds of each copy")
    parser.add_argument("--rate", type=float, default=500, help="MB/s of each direction")
    parser.add_argument(
        "--operators",
        type=float,
        nargs="+",
        default=[2000, 4000, 8000],
        help="microseconds of each",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = queued.load()
    build = sys.modules["infinity.build"]
    rows = []
    with mock.patch.object(build, "ComputeDevice", queued.QueuedDevice):
        for layers in options.layers:
            rows += measure(options, layers, machine)
    machine.set_pace()
    settings = {key: value for key, value in vars(options).items() if key != "operator"}
    summary = Summary.of(__file__, QUESTION, LIMIT, rows, settings=settings)
    for line in summary.table():
        print(line)
    summary.write(options.json)


if __name__ == "__main__":
    main()
