"""The speed of the compute device under a training step, measured beside the step.
`infinity.measure` has the other speeds.

[Note: the compute of a step without the engine]
A model that is trained from NVMe need not fit anywhere. So models of one and of two blocks,
otherwise of the same configuration, run forward and backward in turns, as plain PyTorch, resident
on the device. The time of the second block is that of each further one. The rest of the first
model's time is that of embedding, head and loss. This is exact for equal blocks, as in decoders.

On a shared machine the speed varies by the minute. So this is measured before, amid and after the
steps, while the engine rests. If these models do not fit beside the engine, it is measured only
after the steps.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from infinity.device import ComputeDevice
from infinity.free_memory import read_host, reserve
from infinity.models.source import ModelSource

Times = TypeVar("Times")


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
    """The model with a few blocks, all in the memory of the device: plain PyTorch, without an
    engine."""

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
        for parameter in self._model.parameters():  # not buffers, like the engine
            parameter.data = parameter.data.to(dtype)

    def count(self) -> int:
        """The number of its parameters."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    def passes(self, batch: dict[str, Any]) -> Passes:
        """Seconds of one forward, and of its backward."""
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
        """Seconds of one forward and backward."""
        return sum(self.passes(batch))


def extrapolated(one: Sequence[float], two: Sequence[float], layers: int) -> float:
    """Seconds for `layers` blocks, from the seconds of models of one and of two blocks that ran in
    turns."""
    each = statistics.median(second - first for first, second in zip(one, two, strict=True))
    return statistics.median(one) + (layers - 1) * max(each, 0.0)


def in_turns(
    models: Sequence[Resident],
    batch: dict[str, Any],
    rounds: int,
    times: Callable[[Resident, dict[str, Any]], Times],
) -> list[list[Times]]:
    """The `times` of each of `models`, a list of rounds each. An untimed round comes first."""
    turns = [[times(model, batch) for model in models] for _ in range(rounds + 1)]
    return [list(found) for found in zip(*turns[1:], strict=True)]


class BareCompute:
    """The compute of a step without the engine: rounds of models of one and of two blocks."""

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
        """Whether its models, their gradients and as much for activations fit into the memory that
        is free now."""
        memory = self._device.memory()
        if memory is None and (memory := read_host()) is not None:
            memory = memory._replace(free=memory.free - reserve(memory))
        count = sum(model.count() for model in self._models(torch.device("meta"), dtype))
        return memory is not None and 3 * count * dtype.itemsize <= memory.free

    def measure(self, dtype: torch.dtype, rounds: int) -> None:
        """Run an untimed round and `rounds` timed ones. Leaves the random generators unchanged."""
        state = self._device.random_state()
        models = self._models(self._device.torch, dtype)
        one, two = in_turns(models, self._batch, rounds, Resident.passes)
        self._rounds.append(list(zip(one, two, strict=True)))
        self._device.set_random_state(state)

    def of_blocks(self) -> tuple[list[float], list[float]]:
        """Seconds of the model of one block, and of that of two blocks, in all rounds."""
        turns = [turn for rounds in self._rounds for turn in rounds]
        return [sum(one) for one, _ in turns], [sum(two) for _, two in turns]

    def passes(self, layers: int) -> Passes:
        """Seconds of forward and backward of `layers` blocks, from all rounds."""
        return _at_depth([turn for rounds in self._rounds for turn in rounds], layers)

    def times(self, layers: int) -> list[float]:
        """Seconds of forward and backward, one for each call of `measure`."""
        return [sum(_at_depth(rounds, layers)) for rounds in self._rounds]


def _at_depth(turns: Sequence[tuple[Passes, Passes]], layers: int) -> Passes:
    ones, twos = zip(*turns, strict=True)
    one, two = zip(*ones, strict=True), zip(*twos, strict=True)
    return Passes(*(extrapolated(*pair, layers) for pair in zip(one, two, strict=True)))
