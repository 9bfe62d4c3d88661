"""This machine as `Hardware`, measured in the engine's own memory and formats, and with blocks of
the planned model."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from infinity.bench.step import bare_compute, flops
from infinity.config import Config
from infinity.device import ComputeDevice
from infinity.errors import ConfigError
from infinity.free_memory import read_host
from infinity.measure import rates, speed
from infinity.models.source import ModelSource
from infinity.plan.hardware import DriveSpec, Hardware, checked
from infinity.plan.memory import Training
from infinity.plan.model import Dimensions, PlannedModel
from infinity.tiers.places import check_directories

ROUNDS = 3
PROBE_BYTES = 64 << 20
PROBE_PARAMETERS = 16 << 20
BLOCK_SHARE = 8
"""Measured blocks take at most one part in so many of free memory."""
MOST_SECONDS = 1.5
"""The limit of a pass through the measured blocks, the head and the loss. Above it, fewer blocks
are measured, and then fewer tokens, but at least `LEAST_TOKENS`."""
LEAST_TOKENS = 64
MOST_BLOCKS = 5
"""The time of a block is the difference between passes through one and through so many."""
COMPUTE_ROUNDS = 5


def measured(
    model: PlannedModel,
    source: ModelSource | Dimensions,
    training: Training,
    config: Config,
    directories: Sequence[Path],
    say: Callable[[str], None],
) -> Hardware:
    """This machine for `model`, with states in `directories`.

    Takes less than a minute for blocks that compute in a second, and 64 MiB of each directory.
    Raises `ConfigError` if a directory is missing or the memory is not known, and `NvmeError`.
    """
    check_directories(directories)
    host = read_host()
    if host is None:
        raise ConfigError(
            "/proc/meminfo does not say how much memory there is; describe the machine"
        )
    dtype = rates.DTYPES.get(config.precision) or torch.float32
    device = ComputeDevice(config.tuning.device)
    try:
        gpu = device.memory()
        say("measuring copies and updates")
        links = rates.copies(ComputeDevice(config.tuning.device), PROBE_BYTES, ROUNDS)
        formats = rates.formats_of(config, dtype)
        update = rates.updates(
            formats, PROBE_PARAMETERS, rates.threads_of(config.tuning.threads), ROUNDS
        )
        say("measuring compute")
        compute = _Compute(model, source, training, device.torch, dtype, host.free)
        blocks, head = compute.rates()
        drives, together = _drives(directories, config, compute, say)
        return checked(
            Hardware(
                "this machine",
                host_memory=host.free,
                host_total=host.total,
                flops=blocks,
                head_flops=head,
                gpu_memory=None if gpu is None else gpu.free,
                gpu_total=None if gpu is None else gpu.total,
                link=min(map(statistics.median, links.values())),
                memory_bandwidth=statistics.median(update) * formats.bytes_per_parameter,
                drives=drives,
                together=together,
            )
        )
    finally:
        device.close()


class _Compute:
    """Blocks of the model, if two of them fit into a part of free memory, and a matrix
    multiplication."""

    def __init__(
        self,
        model: PlannedModel,
        source: ModelSource | Dimensions,
        training: Training,
        device: torch.device,
        dtype: torch.dtype,
        free: int,
    ) -> None:
        shape, self._training = model.shape, training
        self.on_cpu = device.type == "cpu"
        self._products = statistics.median(rates.multiplications(device, dtype, ROUNDS))
        block = shape.in_blocks // max(shape.layers, 1)
        rest = model.parameters - shape.in_blocks
        room = free // BLOCK_SHARE // (2 * dtype.itemsize)  # parameters and gradients
        # A model of one block and one of several, each with the rest.
        self._layers = min(MOST_BLOCKS, (room - 2 * rest) // block - 1) if block else 0
        if not self.has_blocks:
            return
        self._outside = shape._replace(
            multiplied=shape.multiplied - shape.in_blocks, in_blocks=0, layers=0
        )
        self._block = flops.Shape(block, block, 1, shape.width)
        tokens, length = training.windows, training.length
        outside, each = (
            self._operations(part, tokens, length) / self._products
            for part in (self._outside, self._block)
        )
        self._layers = max(2, min(self._layers, int((MOST_SECONDS - outside) / each)))
        seconds = outside + self._layers * each
        most = max(int(MOST_SECONDS / seconds * tokens), LEAST_TOKENS)
        self._length = min(length, most)
        self._windows = max(1, min(training.batch, most // self._length))
        if isinstance(source, Dimensions):
            source = gpt_of(source, self._length)
        words = source.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, words, (self._windows, self._length), generator=generator).to(device)
        self._batch = {"input_ids": ids, "labels": ids, "use_cache": False}
        self._models = [
            bare_compute.Resident(source, layers, device, dtype, training.recomputes)
            for layers in (1, self._layers)
        ]

    @property
    def has_blocks(self) -> bool:
        """Whether blocks are measured."""
        return self._layers >= 2

    def seconds(self) -> float:
        """The seconds of a pass through the blocks."""
        return self._models[-1].seconds(self._batch)

    def rates(self) -> tuple[float, float | None]:
        """Operations per second in a block, and in the rest of the model (None: not measured)."""
        if not self.has_blocks:
            return self._products, None
        one, several = bare_compute.in_turns(
            self._models, self._batch, COMPUTE_ROUNDS, bare_compute.Resident.seconds
        )
        each = statistics.median(
            (after - before) / (self._layers - 1)
            for before, after in zip(one, several, strict=True)
        )
        tokens = self._windows * self._length
        block, outside = (
            self._operations(part, tokens, self._length) for part in (self._block, self._outside)
        )
        # No block is faster than the multiplication.
        each = max(each, block / self._products)
        other = max(statistics.median(one) - each, outside / self._products, 1e-6)
        return block / each, outside / other

    def _operations(self, part: flops.Shape, tokens: int, length: int) -> float:
        return flops.count(part, tokens, length, self._training.recomputes).hardware


def _drives(
    directories: Sequence[Path], config: Config, compute: _Compute, say: Callable[[str], None]
) -> tuple[tuple[DriveSpec, ...], float]:
    """The drives, and the share of their speed that they and a computing CPU keep beside each
    other."""
    if not directories:
        return (), 1.0
    say("measuring the drives")
    with speed.DriveProbe(directories, config.tuning.io_engine, 4 * PROBE_BYTES) as probe:
        found = {
            name: statistics.median(each) / len(directories)
            for name, each in speed.drives(probe, ROUNDS).items()
        }
        together = [1.0]
        if compute.on_cpu and compute.has_blocks:
            together = speed.beside_drives(compute.seconds, probe, ROUNDS)
    drives = tuple(
        DriveSpec(
            read=found["nvme_read"],
            write=found["nvme_write"],
            capacity=shutil.disk_usage(directory).free,
            both=found["nvme_both"],
        )
        for directory in directories
    )
    return drives, statistics.median(together)


def gpt_of(dimensions: Dimensions, length: int) -> ModelSource:
    """A model of transformers with these dimensions and blocks that run."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "gpt2",
        n_embd=dimensions.hidden,
        n_layer=dimensions.layers,
        n_head=dimensions.heads,
        vocab_size=dimensions.vocabulary,
        n_positions=length,
    )
    return ModelSource("gpt2", config, None)
