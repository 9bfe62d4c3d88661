"""A program that calls submodules and never the model: what it will use next is learned, as from a
loop that calls the model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import infinity
from support.counting_trace import CountingTrace
from support.probe import Probe

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(60, method="thread")]

WIDTH, DEPTH, ROUNDS = 64, 6, 12


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def inputs(number: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number))


def whole(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def in_parts(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    for part in model:
        x = part(x)
    return x


Forward = Callable[[nn.Sequential, torch.Tensor], torch.Tensor]


def wrap(directory: Path) -> tuple[nn.Sequential, infinity.Engine]:
    """With room for three of the units."""
    directory.mkdir()
    config = infinity.Config(
        nvme=[directory],
        gpu_memory=3 * 20480,
        cpu_memory="16MiB",
        algorithm="sgd",
        tuning=infinity.Tuning(cache=0, device="cpu", threads=1, update="exact"),
    )
    with mock.patch("infinity.build.Trace", CountingTrace):
        model = infinity.wrap(build(), config, units=[nn.Linear])
    return model, infinity.engine(model)


def evaluate(forward: Forward, directory: Path) -> tuple[list[float], list[int], list[int]]:
    """The results, the misses and the bytes read of each round."""
    model, engine = wrap(directory)
    results, misses, read = [], [0], [0]
    with engine, torch.no_grad():
        for number in range(ROUNDS):
            results.append(forward(model, inputs(number)).sum().item())
            Probe(engine).come_to_rest()
            misses.append(Probe(engine).trace.misses)
            read.append(engine.io.counters()["bytes_read"])
    return results, *(
        [now - before for before, now in itertools.pairwise(of)] for of in (misses, read)
    )  # type: ignore[return-value]


def test_inference_in_parts_is_predicted(tmp_path: Path) -> None:
    expected, _, read_whole = evaluate(whole, tmp_path / "whole")
    results, misses, read = evaluate(in_parts, tmp_path / "parts")
    assert results == expected
    assert misses == [DEPTH, DEPTH] + [0] * (ROUNDS - 2)
    assert len(set(read_whole[3:])) == 1 and read[3:] == read_whole[3:], (
        "what is there is used, and what comes next is brought"
    )


def train(forward: Forward, directory: Path, micro_batches: int) -> tuple[list[float], list[int]]:
    model, engine = wrap(directory)
    optimizer = infinity.SGD(model.parameters(), lr=0.1)
    losses, misses = [], [0]
    with engine:
        for number in range(ROUNDS):
            for micro_batch in range(micro_batches):
                loss = forward(model, inputs(10 * number + micro_batch)).pow(2).mean()
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            misses.append(Probe(engine).trace.misses)
    return losses, [now - before for before, now in itertools.pairwise(misses)]


@pytest.mark.parametrize("micro_batches", [1, 5])
def test_training_in_parts_is_predicted(micro_batches: int, tmp_path: Path) -> None:
    expected, _ = train(whole, tmp_path / "whole", micro_batches)
    losses, misses = train(in_parts, tmp_path / "parts", micro_batches)
    assert losses == expected
    assert misses[1:] == [0] * (ROUNDS - 1)
