"""What each device under a training step gives, measured beside the step: arithmetic, both directions of the link, NVMe, Adam.

All of it in the step's own terms: memory as the engine allocates it, its I/O engine on its directories, its kernels in the
formats of its states. Every function gives one figure per round, in units per second.

[Note: the compute of a step without the engine]
A model that is trained from NVMe need not fit anywhere. So models of one and of two blocks, else with the same configuration, run
forward and backward as plain PyTorch, resident on the device, in turns. The second block's time is that of each further one; what
is left of the first model's is embedding, head and loss. Exact for blocks that are alike, as decoders have them.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch

from infinity import native, nvme
from infinity.cli.bench.adam.measure import Formats
from infinity.cli.models import ModelSource
from infinity.device import ComputeDevice, HostMemory, stream_of
from infinity.units import round_up

PIECE_BYTES = 4 << 20  # a stripe of the engine
_MATRIX = 8192
_LONG_ENOUGH = 0.05  # seconds of a multiplication that is not made longer
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_HYPER = {
    "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "bias_correction1": 0.9,
    "bias_correction2_sqrt": 0.9, "decoupled": True, "grad_scale": 1.0,
}  # fmt: skip


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return max(time.perf_counter() - start, 1e-9)


# Arithmetic


def multiplications(device: torch.device, dtype: torch.dtype, rounds: int) -> list[float]:
    """Operations per second of a square matrix multiplication, as large as takes 50 ms, of at most 8192 rows."""
    rows = 512
    while True:
        left, right = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))

        def multiply(times: int, left: torch.Tensor = left, right: torch.Tensor = right) -> None:
            for _ in range(times):
                product = left @ right
            product[0, 0].item()  # waits for the device

        multiply(1)
        once = _seconds(lambda: multiply(1))
        if rows == _MATRIX or once > _LONG_ENOUGH:
            break
        rows *= 2
    times = max(1, int(2 * _LONG_ENOUGH / once))
    return [2.0 * rows**3 * times / _seconds(lambda: multiply(times)) for _ in range(rounds)]


def shortened(source: ModelSource, layers: int) -> ModelSource:
    """The same model with `layers` blocks, without weights."""
    config = copy.deepcopy(source.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return dataclasses.replace(source, config=config, directory=None)


class Resident:
    """The model with a few blocks, all in the device's memory: plain PyTorch, without an engine."""

    def __init__(self, source: ModelSource, layers: int, device: torch.device, dtype: torch.dtype, recomputes: bool) -> None:
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
        return _seconds(work)


def extrapolated(one: Sequence[float], two: Sequence[float], layers: int) -> float:
    """Seconds for `layers` blocks, from those of models of one and of two that ran in turns."""
    each = statistics.median(second - first for first, second in zip(one, two, strict=True))
    return statistics.median(one) + (layers - 1) * max(each, 0.0)


def compute_seconds(
    source: ModelSource, batch: dict[str, Any], device: torch.device, dtype: torch.dtype, recomputes: bool, rounds: int
) -> list[list[float]]:
    """Seconds of forward and backward with one block and with two, a list of rounds each; the first, untimed ones go before."""
    models = [Resident(source, layers, device, dtype, recomputes) for layers in (1, 2)]
    for model in models:
        model.seconds(batch)
    turns = [[model.seconds(batch) for model in models] for _ in range(rounds)]
    return [list(times) for times in zip(*turns, strict=True)]


# Links


def copies(device: ComputeDevice, nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Bytes per second of plain large copies between memory as the engine has it, to the device and from it.

    Owns `device`'s memory: closes it.
    """
    try:
        here, there = device.host_memory(nbytes), device.compute_memory(nbytes)
        ways: dict[str, Callable[[], object]] = {
            "host_to_device": lambda: device.upload(there, here),
            "device_to_host": lambda: device.download(here, there),
        }
        for way in ways.values():
            way()
        turns = [{name: nbytes / _seconds(way) for name, way in ways.items()} for _ in range(rounds)]
        return {name: [turn[name] for turn in turns] for name in ways}
    finally:
        device.close()


def drives(directories: Sequence[Path], engine: str, nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Bytes per second over all `directories` together of writing, of reading, and of both at once, half of each.

    `nbytes` go to each directory, into a file that is removed, in order and in pieces of 4 MiB. Raises `OSError`, `NvmeError`.
    """
    count = max(2, nbytes // PIECE_BYTES)
    total, half = count * PIECE_BYTES * len(directories), count // 2
    with ExitStack() as stack:
        memory = nvme.empty(count * PIECE_BYTES, dtype=torch.uint8)
        memory.view(torch.int64).random_(generator=torch.Generator().manual_seed(0))  # drives may compress
        pieces = list(memory.split(PIECE_BYTES))
        places = []
        for directory in directories:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=directory, prefix="infinity-bench-step-"))
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
                    tickets.append(io.write_async(pieces[half + number], file, (half + number) * PIECE_BYTES))
            for ticket in tickets:
                ticket.wait()

        one("write")  # the file has its length from here on
        turns = [
            {
                "nvme_write": total / _seconds(lambda: one("write")),
                "nvme_read": total / _seconds(lambda: one("read")),
                "nvme_both": 2 * half * PIECE_BYTES * len(places) / _seconds(both),
            }
            for _ in range(rounds)
        ]
    return {name: [turn[name] for turn in turns] for name in turns[0]}


# The update


def adam(formats: Formats, parameters: int, threads: int, rounds: int, device: ComputeDevice | None = None) -> list[float]:
    """Parameters per second of the engine's kernels over `parameters` parameters in `formats`, more than caches hold: of the CPU
    with `threads` threads in host memory, or with `device`, which has kernels, of those and in its memory."""
    kernels = native.cpu_adam()
    sizes = {name: int(width * parameters) for name, width in formats.blocks.items()}
    sizes |= {moment: kernels.block_bytes(formats.moments, parameters) for moment in ("first", "second")}
    starts, end = {}, 0
    for name, size in sizes.items():
        starts[name] = end
        end += round_up(size, 1 << 21) + 4096 * 5  # not equal offsets in every cache
    with ExitStack() as stack:
        if device is None:
            host, pool = HostMemory(end), kernels.Pool(threads)
            stack.callback(host.close)
            memory = host.tensor
        else:
            memory, pool = device.compute_memory(end).zero_(), kernels.Pool(threads)
        pieces = {name: memory[start : start + sizes[name]] for name, start in starts.items()}
        for name in ("grad", "param"):
            pieces[name].view(_DTYPES[getattr(formats, name)]).fill_(0.01)
        at = {name: piece.data_ptr() if piece.numel() else 0 for name, piece in pieces.items()}
        module: Any = native.cuda() if memory.is_cuda else kernels

        def update() -> None:
            where = {"stream": stream_of(memory)} if memory.is_cuda else {"isa": kernels.best_isa(), "pool": pool}
            module.update(
                "adam", at["grad"], formats.grad, at["param"], formats.param, at["master"], formats.master, at["first"],
                at["second"], formats.moments, 0, parameters, position=0, key=1, **where, **_HYPER,
            )  # fmt: skip

        def step() -> None:
            with nullcontext() if device is None else device.updating(device.mark()) as running:
                update()
            if running is not None:
                running.wait()

        step()
        return [parameters / _seconds(step) for _ in range(rounds)]


def threads_of(configured: int | None) -> int:
    """How many threads the engine's kernels have."""
    return configured or len(os.sched_getaffinity(0))
