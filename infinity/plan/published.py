"""The published formulas of ZeRO (1910.02054) and ZeRO-Infinity (2104.07857), and their tables.
Imports no torch.

The model of ZeRO-Infinity has 20 bytes of states per parameter: two-byte parameters and gradients,
and fp32 parameters, gradients and two moments. The tables of ZeRO have 16, without fp32 gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from infinity.placement.memory import StateBytes

ZERO_PARAMETERS = (7.5e9, 128e9, 1e12)
ZERO_RANKS = (1, 4, 16, 64, 256, 1024)
STAGES = (1, 2, 3)
STATE_BYTES = 20
SEQUENCE = 1024
"""The sequence length of figure 2a, in tokens."""
NODE_WINDOWS, CHECKPOINT_WINDOWS, GPU_WINDOWS = 64, 32, 4
"""Windows of figure 2a: activations of a node, checkpoints of a node, and the working memory of a
GPU."""


def zero_states(parameters: float, ranks: int, stage: int) -> float:
    """Bytes of states on one of `ranks` ranks (1910.02054, figure 1): mixed-precision Adam."""
    return sum(StateBytes(2 * parameters, 2 * parameters, 12 * parameters).on_rank(ranks, stage))


class Decoder(NamedTuple):
    """A row of figure 2a: the published number of parameters, and the dimensions."""

    trillions: float
    layers: int
    hidden: int
    heads: int


FIGURE_2A = (
    Decoder(0.10, 80, 10 << 10, 128),
    Decoder(0.50, 100, 20 << 10, 160),
    Decoder(1.01, 128, 25 << 10, 256),
    Decoder(10.05, 195, 64 << 10, 512),
    Decoder(101.47, 315, 160 << 10, 1024),
)


def parameters(model: Decoder) -> int:
    """Elements of the linear layers of all blocks (equation 1)."""
    return 12 * model.layers * model.hidden**2


def model_states(model: Decoder) -> int:
    """Bytes (equation 2)."""
    return STATE_BYTES * parameters(model)


def checkpoints(model: Decoder, windows: int, every: int = 1) -> int:
    """Bytes of the inputs of every `every`-th block (equation 3)."""
    return 2 * windows * SEQUENCE * model.hidden * model.layers // every


def model_working_memory(model: Decoder) -> int:
    """Bytes of the parameters and gradients of the largest operator (equation 4)."""
    return 4 * model.hidden * 4 * model.hidden


def activation_working_memory(model: Decoder, windows: int, every: int = 1) -> int:
    """Bytes of all activations between two checkpoints (equation 5)."""
    return windows * SEQUENCE * every * (16 * model.hidden + 2 * model.heads * SEQUENCE)


class Bandwidths(NamedTuple):
    """A row of figure 2b: bytes of each memory on `nodes` nodes, and bytes per second of a GPU to
    host memory and to the drives."""

    nodes: int
    gpus: int
    gpu: float
    host: float
    nvme: float
    host_rate: float
    nvme_rate: float


GPU_BYTES, HOST_BYTES, NVME_BYTES = 32e9, 1.5e12, 28e12
"""Bytes of one V100, and of a DGX-2 node."""
ALONE_RATE = 12e9
"""One GPU over its PCIe link, to host memory and to the drives."""
HOST_RATE, NVME_NODE_RATE = 3e9, 25.6e9
"""Each of 16 GPUs to host memory. The next rate is that of the drives of a node."""


def figure_2b(nodes: int, gpus: int) -> Bandwidths:
    """A cluster of DGX-2 nodes while `gpus` GPUs work."""
    alone = gpus == nodes
    nvme = ALONE_RATE if alone else NVME_NODE_RATE * nodes / gpus
    host = ALONE_RATE if alone else HOST_RATE
    memory = gpus * GPU_BYTES
    return Bandwidths(nodes, gpus, memory, nodes * HOST_BYTES, nodes * NVME_BYTES, host, nvme)


FIGURE_2B = ((1, 1), (1, 16), (4, 64), (16, 256), (64, 1024), (96, 1536))


class Table(NamedTuple):
    """A table to print: its title, the names of its columns, and its rows."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables() -> list[Table]:
    """All tables, in the units of the papers: GB of 1e9 bytes for ZeRO, TB and GB of 2^40 and 2^30
    bytes for figure 2a."""
    names = [f"{each / 1e9:g}B, stage {stage}" for each in ZERO_PARAMETERS for stage in STAGES]
    zero = [
        [
            str(ranks),
            *(
                f"{zero_states(each, ranks, stage) / 1e9:.4g}"
                for each in ZERO_PARAMETERS
                for stage in STAGES
            ),
        ]
        for ranks in ZERO_RANKS
    ]
    memory = [
        [
            f"{parameters(each) / 1e12:.2f}",
            str(each.layers),
            f"{each.hidden // 1024}K",
            str(each.heads),
            f"{model_states(each) / 2**40:.2f}",
            f"{each.layers * activation_working_memory(each, NODE_WINDOWS) / 2**40:.2f}",
            f"{checkpoints(each, CHECKPOINT_WINDOWS) / 2**40:.2f}",
            f"{model_working_memory(each) / 2**30:.2f}",
            f"{activation_working_memory(each, GPU_WINDOWS) / 2**30:.2f}",
        ]
        for each in FIGURE_2A
    ]
    cluster = [
        [
            str(row.nodes),
            str(row.gpus),
            f"{row.gpu / 1e12:.4g}",
            f"{row.host / 1e12:.4g}",
            f"{row.nvme / 1e12:.4g}",
            f"{row.host_rate / 1e9:.1f}",
            f"{row.nvme_rate / 1e9:.1f}",
        ]
        for row in (figure_2b(*each) for each in FIGURE_2B)
    ]
    return [
        Table("Model states per rank, GB (1910.02054, table 1)", ["ranks", *names], zero),
        Table(
            "Memory of large models (2104.07857, figure 2a)",
            [
                "trillion parameters", "layers", "hidden", "heads", "states TB",
                "activations TB/node", "checkpoints TB/node", "MSWM GB", "AWM GB",
            ],
            memory,
        ),
        Table(
            "A cluster of DGX-2 nodes (2104.07857, figure 2b)",
            ["nodes", "GPUs", "GPU TB", "host TB", "NVMe TB", "host GB/s", "NVMe GB/s"],
            cluster,
        ),
    ]  # fmt: skip
