"""The transfers of each mode, as plain sequences. Nothing here touches a device."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Literal, NamedTuple

from infinity.placement.budget import CHUNK_ELEMENTS, FULL_CHUNK_ELEMENTS, STAGED_SETS
from infinity.quantities import round_up
from infinity.tiers.drives import ALIGNMENT

Operation = Literal["read", "write"]
READ_SHARE = 0.7
"""The share of reads in the mixed mode, in pieces."""
BYTES_READ, BYTES_WRITTEN = 14, 12
"""Per parameter and step with bf16 parameters and everything but gradients on NVMe (see README).
The backward reads parameters (2). The update reads parameters, the other half of their masters, and
two moments (12). It writes them all (12)."""
STATE_BYTES = 24
"""Per parameter on NVMe: 2 + 2 + 4 + 4, everything twice (copy-on-write)."""
_KINDS = (2, 2, 4, 4)  # bytes per element of param, master, exp_avg, exp_avg_sq
_UNITS = 32  # a transformer of billions of parameters has about as many blocks


class Transfer(NamedTuple):
    """One transfer: bytes [offset, offset + nbytes) of the file of one path."""

    operation: Operation
    offset: int
    nbytes: int


def sequential(operation: Operation, size: int, piece: int) -> Iterator[Transfer]:
    """From the start of the file to its end, again and again."""
    while True:
        for offset in range(0, size, piece):
            yield Transfer(operation, offset, min(piece, size - offset))


def mixed(size: int, piece: int) -> Iterator[Transfer]:
    """Seven sequential reads to three sequential writes, evenly spread. Reads and writes have
    separate positions, as in fio's `rw`."""
    reads, writes = sequential("read", size, piece), sequential("write", size, piece)
    for number in itertools.count():
        reading = int((number + 1) * READ_SHARE + 1e-9) > int(number * READ_SHARE + 1e-9)
        yield next(reads if reading else writes)


def many_tensors(
    operation: Operation, size: int, tensor_bytes: int, seed: int = 0
) -> Iterator[Transfer]:
    """Tensors that lie packed in the file (each from a multiple of 4096), in another order than in
    the file."""
    room = round_up(tensor_bytes, ALIGNMENT)
    places = [number * room for number in range(size // room)]
    if not places:
        raise ValueError(f"a tensor of {tensor_bytes} bytes does not fit into `size` {size}")
    order = random.Random(seed)
    while True:
        order.shuffle(places)
        for offset in places:
            yield Transfer(operation, offset, tensor_bytes)


class ReplayStage(NamedTuple):
    """Transfers of the optimizer or of a fetch. Its writes begin when its reads are done. Positions
    count over all paths."""

    reads: tuple[tuple[int, int], ...]  # (position, bytes)
    writes: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Memory that the stage takes. Read bytes are updated in place, and written with the
        parameters."""
        return max(
            sum(nbytes for _, nbytes in self.reads), sum(nbytes for _, nbytes in self.writes)
        )


def chunk_elements(memory_bytes: int) -> int:
    """Elements per chunk of the optimizer in `memory_bytes` of staging, by the rule of the engine
    (`tiers/store.py`)."""
    widest = STAGED_SETS * len(_KINDS) * max(_KINDS)
    return max(
        CHUNK_ELEMENTS,
        min(memory_bytes // widest, FULL_CHUNK_ELEMENTS) // CHUNK_ELEMENTS * CHUNK_ELEMENTS,
    )


def training_step(elements: int, model_parameters: int, chunk: int) -> Iterator[ReplayStage]:
    """The NVMe traffic of one training step over `elements` parameters of a model of
    `model_parameters`, in the engine's order.

    First the chunks of the update, unit by unit: old copies are read, new copies are written beside
    them. Then the parameters of the units for the backward, the last unit first. Exactly 14 bytes
    are read and 12 written per element. `elements` and `chunk` are multiples of 16384. The
    positions are below 24 bytes times `elements`.
    """
    unit = min(round_up(max(model_parameters // _UNITS, 1), CHUNK_ELEMENTS), elements)
    units = [(begin, min(begin + unit, elements)) for begin in range(0, elements, unit)]

    def block(begin: int, end: int, kind: int, copy: int) -> int:
        """The position of the block of this unit. A unit has both copies of each kind, one after
        the other."""
        return begin * STATE_BYTES + (end - begin) * (2 * sum(_KINDS[:kind]) + copy * _KINDS[kind])

    for begin, end in units:
        for at in range(0, end - begin, chunk):
            length = min(chunk, end - begin - at)
            extents = [
                [
                    (block(begin, end, kind, copy) + at * width, length * width)
                    for kind, width in enumerate(_KINDS)
                ]
                for copy in (0, 1)
            ]
            yield ReplayStage(tuple(extents[0]), tuple(extents[1]))
    for begin, end in reversed(units):
        parameters, piece = block(begin, end, 0, 1), chunk * sum(_KINDS)
        for offset in range(0, (end - begin) * _KINDS[0], piece):
            yield ReplayStage(
                ((parameters + offset, min(piece, (end - begin) * _KINDS[0] - offset)),), ()
            )
