"""The speeds of copies to and from the compute device, of updates in the engine's own memory and
formats, and of matrix multiplications.

Measured if placement depends on them (`Tuning.gpu_cache`), and by `infinity bench`. Every function
returns one figure per round, in units per second.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from infinity import native
from infinity.config import Config
from infinity.device import ComputeDevice, HostMemory, stream_of
from infinity.quantities import round_up

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_WIDTHS = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "none": 0.0, "split": 2.0, "int8": 36864 / 32768}
_ALIGNMENT = 1 << 21
_MATRIX = 8192
_LONG_ENOUGH = 0.05  # seconds of a multiplication that is long enough
_ADAM_STEP = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "bias_correction1": 0.9,
    "bias_correction2_sqrt": 0.9,
    "decoupled": True,
    "grad_scale": 1.0,
}
"""Arguments of the Adam kernels besides the states. The time does not depend on the step."""


class TimedUpdate(NamedTuple):
    """An update to be timed: the rule of the kernels, its arguments besides the states, and the
    kernels' names of its moments."""

    rule: str = "adam"
    values: Mapping[str, float] = MappingProxyType(_ADAM_STEP)
    moments: Collection[str] = ("first", "second")


ADAM = TimedUpdate()
_NAMED = ("grad", "param", "master", "first", "second")
"""Blocks that an update takes by position."""


@dataclass(frozen=True)
class Formats:
    """The formats of one case: the bytes that an update reads and writes for each parameter. With
    `shadow` it writes to a shadow copy."""

    name: str
    grad: str
    param: str
    master: str
    moments: str
    shadow: bool = False

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes read plus bytes written by Adam. A parameter beside an fp32 master is only
        written."""
        param = _WIDTHS[self.param] * (1 if self.master == "fp32" else 2)
        return _WIDTHS[self.grad] + param + 2 * _WIDTHS[self.master] + 4 * _WIDTHS[self.moments]

    @property
    def blocks(self) -> dict[str, float]:
        """Bytes of each block per parameter. The names of blocks in a shadow copy begin with
        "to_"."""
        moments = _WIDTHS[self.moments]
        states = {
            "param": _WIDTHS[self.param],
            "master": _WIDTHS[self.master],
            "first": moments,
            "second": moments,
        }
        targets = {f"to_{name}": width for name, width in states.items()} if self.shadow else {}
        return {"grad": _WIDTHS[self.grad], **states, **targets}

    def sizes(self, parameters: int) -> dict[str, int]:
        """Bytes of each block of so many parameters."""
        moments = native.cpu_adam().block_bytes(self.moments, parameters)
        return {
            name: moments if name.endswith(("first", "second")) else int(width * parameters)
            for name, width in self.blocks.items()
        }


def formats_of(config: Config, dtype: torch.dtype) -> Formats:
    """The formats that the kernels read and write for parameters of `dtype`."""
    param = next(name for name, each in DTYPES.items() if each is dtype)
    master = (
        "none"
        if param == "fp32"
        else "split"
        if param == "bf16" and config.tuning.split_master
        else "fp32"
    )
    grad = "fp32" if config.tuning.gradient_precision == "fp32" else param
    return Formats("", grad, param, master, config.moment_precision)


def threads_of(configured: int | None) -> int:
    """The number of threads of the engine's kernels: `configured` threads, or for None one per CPU
    of this process. If torchrun started several ranks on this node, a rank takes its part of the
    CPUs.

    OMP_NUM_THREADS does not count. Launchers set it to 1, which would starve the update.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return configured or max(1, len(os.sched_getaffinity(0)) // ranks)


def apart(nbytes: int) -> int:
    """The distance from a block of `nbytes` to the next one. It is no whole number of huge pages,
    because blocks at equal offsets would share the sets of every cache."""
    return round_up(nbytes, _ALIGNMENT) + 4096 * 5


def pieces_of(memory: torch.Tensor, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Tensors of `sizes` bytes from the start of `memory` (uint8) on, `apart` from each other."""
    pieces, at = {}, 0
    for name, size in sizes.items():
        pieces[name] = memory[at : at + size]
        at += apart(size)
    return pieces


def update_of(
    formats: Formats,
    pieces: Mapping[str, torch.Tensor],
    parameters: int,
    kernels: Any,
    update: TimedUpdate = ADAM,
) -> Callable[..., None]:
    """A function that updates all parameters in `pieces`. Its arguments are those of `kernels`:
    `isa` and `pool`, or `stream`."""
    at = {name: piece.data_ptr() if piece.numel() else 0 for name, piece in pieces.items()}
    return functools.partial(
        kernels.update,
        update.rule,
        at["grad"],
        formats.grad,
        at["param"],
        formats.param,
        at["master"],
        formats.master,
        at["first"],
        at["second"],
        formats.moments,
        0,
        parameters,
        position=0,
        key=1,
        **{name: place for name, place in at.items() if name not in _NAMED},
        **{"grad_scale": 1.0, **update.values},
    )


def seconds_of(work: Callable[[], object]) -> float:
    """The seconds of `work`, never 0."""
    start = time.perf_counter()
    work()
    return max(time.perf_counter() - start, 1e-9)


def copies(device: ComputeDevice, nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Bytes per second of large copies to the device and from it, in host memory of the engine's
    kind.

    Closes `device`.
    """
    try:
        here, there = device.host_memory(nbytes), device.compute_memory(nbytes)
        # The caller's stream may still use the earlier content of this memory.
        device.await_stream()
        ways: dict[str, Callable[[], object]] = {
            "host_to_device": lambda: device.upload(there, here),
            "device_to_host": lambda: device.download(here, there),
        }
        for way in ways.values():
            way()
        turns = [
            {name: nbytes / seconds_of(way) for name, way in ways.items()} for _ in range(rounds)
        ]
        return {name: [turn[name] for turn in turns] for name in ways}
    finally:
        device.close()


def updates(
    formats: Formats,
    parameters: int,
    threads: int,
    rounds: int,
    device: ComputeDevice | None = None,
    update: TimedUpdate = ADAM,
    isa: str | None = None,
) -> list[float]:
    """Parameters per second of `update` over `parameters` parameters in `formats`. Without
    `device`, the kernels of the CPU run with `threads` threads and the instruction set `isa` (None:
    the best). With `device`, its kernels run in its memory."""
    kernels = native.cpu_adam()
    sizes = formats.sizes(parameters)
    beside = [name for name in update.moments if name not in sizes]
    sizes |= dict.fromkeys(beside, sizes["first"])
    end = sum(map(apart, sizes.values()))
    with ExitStack() as stack:
        if device is None:
            host, pool = HostMemory(end), kernels.Pool(threads)
            stack.callback(host.close)
            memory = host.tensor
        else:
            memory, pool = device.compute_memory(end).zero_(), kernels.Pool(threads)
        pieces = pieces_of(memory, sizes)
        for name in ("grad", "param"):
            pieces[name].view(DTYPES[getattr(formats, name)]).fill_(0.01)
        module: Any = native.cuda() if memory.is_cuda else kernels

        run = update_of(formats, pieces, parameters, module, update)

        def step() -> None:
            with nullcontext() if device is None else device.updating(device.mark()) as running:
                if memory.is_cuda:
                    run(stream=stream_of(memory))
                else:
                    run(isa=isa or kernels.best_isa(), pool=pool)
            if running is not None:
                running.wait()

        step()
        return [parameters / seconds_of(step) for _ in range(rounds)]


def multiplications(device: torch.device, dtype: torch.dtype, rounds: int) -> list[float]:
    """Operations per second of a square matrix multiplication that takes about 50 ms, of at most
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
