"""This machine as `Hardware`, measured in the engine's own memory and formats, and with blocks of
the model that the plan is about."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from infinity.bench.step import flops, limits
from infinity.config import Config
from infinity.device import ComputeDevice
from infinity.errors import ConfigError
from infinity.free_memory import read_host
from infinity.models.source import ModelSource
from infinity.plan.hardware import DriveSpec, Hardware, checked
from infinity.plan.memory import Training
from infinity.plan.model import Dimensions, PlannedModel
from infinity.rates import DTYPES, copies, formats_of, threads_of, updates

ROUNDS = 3
PROBE_BYTES = 64 << 20
PROBE_PARAMETERS = 16 << 20
BLOCK_SHARE = 8
"""One part in so many of free memory is the most that two measured blocks may take."""
MOST_SECONDS = 1.5
"""Of a pass through one measured block, the head and the loss: longer ones are measured with fewer
tokens, but with `LEAST_TOKENS` at least."""
LEAST_TOKENS = 64


def measured(
    model: PlannedModel,
    source: ModelSource | Dimensions,
    training: Training,
    config: Config,
    directories: Sequence[Path],
    say: Callable[[str], None],
) -> Hardware:
    """What this machine gives to `model`, with states in `directories`.

    Takes less than a minute for blocks that compute in a second, and 64 MiB of each directory.
    Raises `ConfigError` where a directory is missing or the memory is not known, and `NvmeError`.
    """
    host = read_host()
    if host is None:
        raise ConfigError(
            "/proc/meminfo does not say how much memory there is; describe the machine"
        )
    dtype = DTYPES.get(config.precision) or torch.float32
    device = ComputeDevice(config.tuning.device)
    try:
        gpu = device.memory()
        say("measuring copies and updates")
        links = copies(ComputeDevice(config.tuning.device), PROBE_BYTES, ROUNDS)
        formats = formats_of(config, dtype)
        update = updates(formats, PROBE_PARAMETERS, threads_of(config.tuning.threads), ROUNDS)
        say("measuring compute")
        blocks, head = _compute(model, source, training, device.torch, dtype, host.free)
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
                drives=_drives(directories, config, say),
            )
        )
    finally:
        device.close()


def _drives(
    directories: Sequence[Path], config: Config, say: Callable[[str], None]
) -> tuple[DriveSpec, ...]:
    if not directories:
        return ()
    missing = [directory for directory in directories if not directory.is_dir()]
    if missing:
        raise ConfigError(f"nvme directory {missing[0]} does not exist; create it on the drive")
    say("measuring the drives")
    found = limits.drives(directories, config.tuning.io_engine, 4 * PROBE_BYTES, ROUNDS)
    rates = {name: statistics.median(values) for name, values in found.items()}
    count = len(directories)
    return tuple(
        DriveSpec(
            read=rates["nvme_read"] / count,
            write=rates["nvme_write"] / count,
            capacity=shutil.disk_usage(directory).free,
            both=rates["nvme_both"] / count,
        )
        for directory in directories
    )


def _compute(
    model: PlannedModel,
    source: ModelSource | Dimensions,
    training: Training,
    device: torch.device,
    dtype: torch.dtype,
    free: int,
) -> tuple[float, float | None]:
    """Operations per second in a block, and in the rest of the model: those of models of one and of
    two blocks, where they fit, else those of a matrix multiplication."""
    shape = model.shape
    block = shape.in_blocks // max(shape.layers, 1)
    rest = model.parameters - shape.in_blocks
    products = statistics.median(limits.multiplications(device, dtype, ROUNDS))
    nbytes = (2 * block + rest) * dtype.itemsize * 2  # parameters and gradients
    if nbytes > free // BLOCK_SHARE or not shape.layers:
        return products, None
    outside = shape._replace(multiplied=shape.multiplied - shape.in_blocks, in_blocks=0, layers=0)
    first = outside._replace(multiplied=outside.multiplied + block, in_blocks=block, layers=1)

    def operations(part: flops.Shape, tokens: int, length: int) -> float:
        return flops.count(part, tokens, length, training.recomputes).hardware

    per_token = operations(first, training.windows, training.length) / training.windows
    most = max(int(MOST_SECONDS * products / per_token), LEAST_TOKENS)
    length = min(training.length, most)
    windows = max(1, min(training.batch, most // length))
    if isinstance(source, Dimensions):
        source = gpt_of(source, length)
    words = source.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, words, (windows, length), generator=generator).to(device)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    one, two = limits.compute_seconds(source, batch, device, dtype, training.recomputes, ROUNDS)
    each = statistics.median(after - before for before, after in zip(one, two, strict=True))
    each = max(each, statistics.median(one) / 100)
    other = max(statistics.median(one) - each, 1e-6)
    whole, outer = (operations(part, windows * length, length) for part in (first, outside))
    return (whole - outer) / each, outer / other


def gpt_of(dimensions: Dimensions, length: int) -> ModelSource:
    """A model of transformers with these dimensions, whose blocks can be run."""
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
