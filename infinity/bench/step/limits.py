"""What the compute device and the drives under a training step give, measured beside the step; see
`infinity.rates` for the rest.

All of it in the step's own terms: the engine's I/O on its directories. Every function gives one
figure per round, in units per second.

[Note: the compute of a step without the engine]
A model that is trained from NVMe need not fit anywhere. So models of one and of two blocks,
otherwise of the same configuration, run forward and backward in turns. They run as plain PyTorch,
resident on the device. The second block's time is that of each further one; what is left of the
first model's is embedding, head and loss. Exact for blocks that are alike, as decoders have them.

On a shared machine minutes differ. So this is measured before, amid and after the steps, while the
engine rests; only after them where these models do not fit beside it.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from infinity import native
from infinity.device import ComputeDevice
from infinity.directories.directory import Directory
from infinity.free_memory import read_host, reserve
from infinity.models.source import ModelSource
from infinity.rates import seconds_of
from infinity.tiers.speed import finish_all, noise

PIECE_BYTES = 4 << 20  # a stripe of the engine
_NAME = "probe.bin"
_MATRIX = 8192
_LONG_ENOUGH = 0.05  # seconds of a multiplication that is not made longer
Times = TypeVar("Times")


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


class Passes(NamedTuple):
    """Seconds of a forward, and of the backward after it."""

    forward: float
    backward: float


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

    def count(self) -> int:
        """Its parameters."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    def passes(self, batch: dict[str, Any]) -> Passes:
        """How long one forward takes, and how long its backward."""
        start = time.perf_counter()
        loss: Any = self._model(**batch).loss
        loss.item()  # waits for the device
        middle = time.perf_counter()
        loss.backward()
        loss.item()
        end = time.perf_counter()
        self._model.zero_grad(set_to_none=True)
        return Passes(middle - start, end - middle)

    def seconds(self, batch: dict[str, Any]) -> float:
        """How long one forward and backward takes."""
        return sum(self.passes(batch))


def extrapolated(one: Sequence[float], two: Sequence[float], layers: int) -> float:
    """Seconds for `layers` blocks, from those of models of one and of two that ran in turns."""
    each = statistics.median(second - first for first, second in zip(one, two, strict=True))
    return statistics.median(one) + (layers - 1) * max(each, 0.0)


def in_turns(
    models: Sequence[Resident],
    batch: dict[str, Any],
    rounds: int,
    times: Callable[[Resident, dict[str, Any]], Times],
) -> list[list[Times]]:
    """The `times` of each of `models`, a list of rounds each; the first, untimed ones go before."""
    turns = [[times(model, batch) for model in models] for _ in range(rounds + 1)]
    return [list(found) for found in zip(*turns[1:], strict=True)]


class BareCompute:
    """What a step computes, without the engine: rounds of models of one and of two blocks."""

    def __init__(
        self,
        source: ModelSource,
        batch: dict[str, Any],
        device: ComputeDevice,
        recomputes: bool,
    ) -> None:
        self._source, self._batch = source, batch
        self._device, self._recomputes = device, recomputes
        self._rounds: list[list[tuple[Passes, Passes]]] = []

    def _models(self, device: torch.device, dtype: torch.dtype) -> list[Resident]:
        return [
            Resident(self._source, layers, device, dtype, self._recomputes) for layers in (1, 2)
        ]

    def fits(self, dtype: torch.dtype) -> bool:
        """Whether its models, their gradients and as much for activations fit beside what is in use
        now."""
        memory = self._device.memory()
        if memory is None and (memory := read_host()) is not None:
            memory = memory._replace(free=memory.free - reserve(memory))
        count = sum(model.count() for model in self._models(torch.device("meta"), dtype))
        return memory is not None and 3 * count * dtype.itemsize <= memory.free

    def measure(self, dtype: torch.dtype, rounds: int) -> None:
        """One time more: an untimed round, and `rounds` timed ones. Random numbers go on as if
        nothing had been drawn."""
        state = self._device.random_state()
        models = self._models(self._device.torch, dtype)
        one, two = in_turns(models, self._batch, rounds, Resident.passes)
        self._rounds.append(list(zip(one, two, strict=True)))
        self._device.set_random_state(state)

    def of_blocks(self) -> tuple[list[float], list[float]]:
        """Seconds of the model of one block in all rounds, and of that of two."""
        turns = [turn for rounds in self._rounds for turn in rounds]
        return [sum(one) for one, _ in turns], [sum(two) for _, two in turns]

    def passes(self, layers: int) -> Passes:
        """Seconds of forward and backward of `layers` blocks, from all rounds."""
        return _at_depth([turn for rounds in self._rounds for turn in rounds], layers)

    def times(self, layers: int) -> list[float]:
        """Seconds of both for each time that it was measured."""
        return [sum(_at_depth(rounds, layers)) for rounds in self._rounds]


def _at_depth(turns: Sequence[tuple[Passes, Passes]], layers: int) -> Passes:
    ones, twos = zip(*turns, strict=True)
    one, two = zip(*ones, strict=True), zip(*twos, strict=True)
    return Passes(*(extrapolated(*pair, layers) for pair in zip(one, two, strict=True)))


# Links


class DriveProbe:
    """A file of `nbytes` in each of `directories`, which a `with` block makes and removes, written
    and read in order and in pieces of 4 MiB.

    Raises `OSError`, `NvmeError`.
    """

    def __init__(self, directories: Sequence[Path], engine: str, nbytes: int) -> None:
        self._count = max(2, nbytes // PIECE_BYTES)
        self._directories, self._engine = directories, engine
        self.nbytes = self._count * PIECE_BYTES * len(directories)
        """Bytes of `write` and of `read`."""
        self.both_bytes = self._count // 2 * 2 * PIECE_BYTES * len(directories)

    def __enter__(self) -> DriveProbe:
        with ExitStack() as stack:
            memory = noise(self._count * PIECE_BYTES)
            stack.callback(memory.close)
            self._address = memory.tensor.data_ptr()
            self._places = [stack.enter_context(self._place(each)) for each in self._directories]
            self.write()  # what was never written costs nothing to read
            self._parts = stack.pop_all()
        return self

    @contextmanager
    def _place(self, directory: Path) -> Iterator[tuple[Any, Any]]:
        """An engine, and its file in `directory`."""
        with (
            tempfile.TemporaryDirectory(dir=directory, prefix="infinity-bench-step-") as folder,
            Directory(Path(folder)) as place,
            closing(native.make_engine(self._engine)) as engine,
            closing(native.file_at(place.create_in_place(_NAME), f"{folder}/{_NAME}")) as file,
        ):
            file.allocate(self._count * PIECE_BYTES)
            yield engine, file

    def __exit__(self, *_: object) -> None:
        self._parts.close()

    def write(self) -> None:
        """Write all."""
        self._run(self._requests("write", range(self._count)))

    def read(self) -> None:
        """Read all."""
        self._run(self._requests("read", range(self._count)))

    def both(self) -> None:
        """Read a half and write the other one, in turns."""
        half = self._count // 2
        pairs = zip(
            self._requests("read", range(half)),
            self._requests("write", range(half, 2 * half)),
            strict=True,
        )
        self._run(request for pair in pairs for request in pair)

    def _requests(self, operation: str, numbers: range) -> Iterator[Any]:
        for number in numbers:
            at = number * PIECE_BYTES
            for engine, file in self._places:
                yield getattr(engine, operation)(file, at, self._address + at, PIECE_BYTES)

    def _run(self, requests: Iterator[Any]) -> None:
        in_flight = deque[Any]()
        try:
            in_flight.extend(requests)
        finally:
            finish_all(in_flight, lambda ticket: ticket.wait())


def drives(probe: DriveProbe, rounds: int) -> dict[str, list[float]]:
    """Bytes per second over all drives together of writing, of reading, and of both at once, half
    of each."""
    turns = [
        {
            "nvme_write": probe.nbytes / seconds_of(probe.write),
            "nvme_read": probe.nbytes / seconds_of(probe.read),
            "nvme_both": probe.both_bytes / seconds_of(probe.both),
        }
        for _ in range(rounds)
    ]
    return {name: [turn[name] for turn in turns] for name in turns[0]}


def beside_drives(compute: Callable[[], float], probe: DriveProbe, rounds: int) -> list[float]:
    """What `compute`, which gives its seconds, and the drives keep of their speed while both are at
    work, from 0 to 1: the mean of the two."""

    def move(end: threading.Event) -> int:
        turns = 0
        while not (turns and end.is_set()):
            probe.both()
            turns += 1
        return turns

    found = []
    for _ in range(rounds):
        alone, moved = compute(), seconds_of(probe.both)
        end = threading.Event()
        with ThreadPoolExecutor(1) as thread:
            start = time.perf_counter()
            moving = thread.submit(move, end)
            try:
                together = compute()
            finally:
                end.set()
            turns = moving.result()
            each = (time.perf_counter() - start) / turns
        found.append(min(1.0, (alone / together + moved / each) / 2))
    return found
