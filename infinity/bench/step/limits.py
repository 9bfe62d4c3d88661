"""What the compute device and the drives under a training step give, measured beside the step; see
`infinity.rates` for the rest.

All of it in the step's own terms: the engine's I/O on its directories. Every function gives one
figure per round, in units per second.

[Note: the compute of a step without the engine]
A model that is trained from NVMe need not fit anywhere. So models of one and of two blocks,
otherwise of the same configuration, run forward and backward in turns. They run as plain PyTorch,
resident on the device. The second block's time is that of each further one; what is left of the
first model's is embedding, head and loss. Exact for blocks that are alike, as decoders have them.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from infinity import nvme
from infinity.models.source import ModelSource
from infinity.rates import seconds_of

PIECE_BYTES = 4 << 20  # a stripe of the engine
_MATRIX = 8192
_LONG_ENOUGH = 0.05  # seconds of a multiplication that is not made longer


# Arithmetic


def multiplications(device: torch.device, dtype: torch.dtype, rounds: int) -> list[float]:
    """Operations per second of a square matrix multiplication, as large as takes 50 ms, of at most
    8192 rows."""
    rows = 512
    while True:
        left, right = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))

        def multiply(times: int, left: torch.Tensor = left, right: torch.Tensor = right) -> None:
            for _ in range(times):
                product = left @ right
            product[0, 0].item()  # waits for the device

        multiply(1)
        once = seconds_of(lambda: multiply(1))
        if rows == _MATRIX or once > _LONG_ENOUGH:
            break
        rows *= 2
    times = max(1, int(2 * _LONG_ENOUGH / once))
    return [2.0 * rows**3 * times / seconds_of(lambda: multiply(times)) for _ in range(rounds)]


def shortened(source: ModelSource, layers: int) -> ModelSource:
    """The same model with `layers` blocks, without weights."""
    config = copy.deepcopy(source.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return dataclasses.replace(source, config=config, directory=None)


class Resident:
    """The model with a few blocks, all in the device's memory: plain PyTorch, without an engine."""

    def __init__(
        self,
        source: ModelSource,
        layers: int,
        device: torch.device,
        dtype: torch.dtype,
        recomputes: bool,
    ) -> None:
        with device:
            self._model = shortened(source, layers).build(recomputes).train()
        for parameter in self._model.parameters():  # not the buffers: the engine leaves them, too
            parameter.data = parameter.data.to(dtype)

    def seconds(self, batch: dict[str, Any]) -> float:
        """How long one forward and backward takes."""

        def work() -> None:
            loss: Any = self._model(**batch).loss
            loss.backward()
            loss.item()

        self._model.zero_grad(set_to_none=True)
        return seconds_of(work)


def extrapolated(one: Sequence[float], two: Sequence[float], layers: int) -> float:
    """Seconds for `layers` blocks, from those of models of one and of two that ran in turns."""
    each = statistics.median(second - first for first, second in zip(one, two, strict=True))
    return statistics.median(one) + (layers - 1) * max(each, 0.0)


def compute_seconds(
    source: ModelSource,
    batch: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    recomputes: bool,
    rounds: int,
) -> list[list[float]]:
    """Seconds of forward and backward with one block and with two, a list of rounds each; the
    first, untimed ones go before."""
    models = [Resident(source, layers, device, dtype, recomputes) for layers in (1, 2)]
    for model in models:
        model.seconds(batch)
    turns = [[model.seconds(batch) for model in models] for _ in range(rounds)]
    return [list(times) for times in zip(*turns, strict=True)]


# Links


def drives(
    directories: Sequence[Path], engine: str, nbytes: int, rounds: int
) -> dict[str, list[float]]:
    """Bytes per second over all `directories` together of writing, of reading, and of both at once,
    half of each.

    `nbytes` go to each directory, into a file that is removed, in order and in pieces of 4 MiB.
    Raises `OSError`, `NvmeError`.
    """
    count = max(2, nbytes // PIECE_BYTES)
    total, half = count * PIECE_BYTES * len(directories), count // 2
    with ExitStack() as stack:
        memory = nvme.empty(count * PIECE_BYTES, dtype=torch.uint8)
        # Drives may compress.
        memory.view(torch.int64).random_(generator=torch.Generator().manual_seed(0))
        pieces = list(memory.split(PIECE_BYTES))
        places = []
        for directory in directories:
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(dir=directory, prefix="infinity-bench-step-")
            )
            places.append((stack.enter_context(nvme.Io(engine)), Path(folder) / "probe.bin"))

        def one(operation: str) -> None:
            tickets = [
                getattr(io, f"{operation}_async")(piece, file, number * PIECE_BYTES)
                for number, piece in enumerate(pieces)
                for io, file in places
            ]
            for ticket in tickets:
                ticket.wait()

        def both() -> None:
            tickets = []
            for number in range(half):
                for io, file in places:
                    tickets.append(io.read_async(pieces[number], file, number * PIECE_BYTES))
                    tickets.append(
                        io.write_async(pieces[half + number], file, (half + number) * PIECE_BYTES)
                    )
            for ticket in tickets:
                ticket.wait()

        one("write")  # the file has its length from here on
        turns = [
            {
                "nvme_write": total / seconds_of(lambda: one("write")),
                "nvme_read": total / seconds_of(lambda: one("read")),
                "nvme_both": 2 * half * PIECE_BYTES * len(places) / seconds_of(both),
            }
            for _ in range(rounds)
        ]
    return {name: [turn[name] for turn in turns] for name in turns[0]}
