"""Checksums of what lies on NVMe: what changed there is said, with its place, and never used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import infinity
from infinity import native
from infinity.nvme.ticket import Ticket
from infinity.placement.spec import BF16, FP32, INT8, BlockSpec, Format, Kind, Placed
from infinity.tier import NVME
from infinity.tiers.block_io import pack_sums, piece_bytes, unpack_sums
from infinity.tiers.chunks import Chunks
from infinity.tiers.drives import NvmeTier
from infinity.tiers.manifest import STATES_NAME
from support.configs import config_of

pytestmark = pytest.mark.usefixtures("one_thread")

GRANULE = INT8.elements
WIDE = Format("fp64", 1, 8)
OPTIONS: dict[str, Any] = {
    "gpu_memory": "4MiB",
    "cpu_memory": "8MiB",
    "cache": 0,
    "precision": "bf16",
    "device": "cpu",
    "threads": 1,
}


@given(
    st.integers(1, 40),
    st.integers(-3, 3),
    st.integers(1, 8),
    st.sets(st.integers(1, 39)),
    st.sampled_from([BF16, FP32, INT8, WIDE]),
)
def test_chunks_are_whole_pieces(
    granules: int, more: int, most: int, cuts: set[int], form: Format
) -> None:
    """Whatever budgets and caches are: so every run has the same pieces."""
    elements = max(granules * GRANULE + more, 1)
    spec = BlockSpec(0, Kind.PARAM, elements, form, NVME, form.bytes_of(elements), 0, "a block")
    block = Placed(spec)
    chunks = Chunks(most * GRANULE, {0: [cut * GRANULE for cut in cuts]})
    piece = piece_bytes(block)
    for begin in chunks.starts(block):
        at, nbytes = chunks.bytes_of(block, begin)
        assert at % piece == 0
        assert (at + nbytes) % piece == 0 or at + nbytes == spec.nbytes


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=5), max_size=4), st.binary())
def test_checksums_come_back_from_bytes(sums: list[list[int]], rest: bytes) -> None:
    found, after = unpack_sums(pack_sums([np.array(each, np.uint32) for each in sums]) + rest)
    assert [each.tolist() for each in found] == sums and after == rest


def test_checksums_are_those_of_the_standard() -> None:
    """RFC 3720, appendix B.4: 32 bytes that count up."""
    data = torch.arange(32, dtype=torch.uint8)
    assert native.aio().crc32c(data.data_ptr(), 32) == 0x46DD794E
    first = native.aio().crc32c(data.data_ptr(), 7)
    assert native.aio().crc32c(data.data_ptr() + 7, 25, first) == 0x46DD794E


class Net(nn.Module):
    """Three units."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(160, 160) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.layers[0].bias.dtype)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def wrapped(folder: Path, resume: bool = False, **options: Any) -> nn.Module:
    model = Net()
    config = config_of(nvme=[folder], **OPTIONS | options)
    return infinity.wrap(model, config, units=list(model.layers), resume=resume)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 160)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file, past the page cache or not."""
    descriptor = os.open(path, os.O_RDWR)
    (byte,) = os.pread(descriptor, 1, offset)
    os.pwrite(descriptor, bytes([byte ^ 4]), offset)
    os.fsync(descriptor)
    os.close(descriptor)


def places_of(model: nn.Module, kind: Kind) -> list[tuple[str, int]]:
    """The name of each unit's block of `kind`, and where its content lies."""
    infinity.engine(model).drain()
    blocks = [unit.blocks[kind] for unit in infinity.engine(model).units]
    return [(block.name, block.home.extent.start) for block in blocks]


@pytest.mark.parametrize("kind", [Kind.PARAM, Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ])
@pytest.mark.parametrize("cache", [0, "auto"])
def test_states_that_changed_are_not_taken_over(kind: Kind, cache: Any, tmp_path: Path) -> None:
    model = wrapped(tmp_path, durability="step", cache=cache)
    optimizer = infinity.AdamW(model.parameters())
    for _ in range(2):
        step(model, optimizer)
    name, start = places_of(model, kind)[1]
    infinity.engine(model).close()
    flip(tmp_path / STATES_NAME, start + 40001)
    with pytest.raises(infinity.CorruptStateError, match="is damaged at offset") as caught:
        wrapped(tmp_path, resume=True, durability="step", cache=cache)
    error = caught.value
    assert error.unit == name and error.kind == kind.value and name in str(error)
    assert error.path == str(tmp_path / STATES_NAME)
    assert error.offset <= start + 40001 < error.offset + (128 << 10)
    flip(tmp_path / STATES_NAME, start + 40001)
    infinity.engine(wrapped(tmp_path, resume=True, durability="step", cache=cache)).close()


@pytest.mark.parametrize("kind", [Kind.PARAM, Kind.EXP_AVG])
def test_every_read_is_checked_where_that_is_wanted(kind: Kind, tmp_path: Path) -> None:
    for verify in ("always", "resume"):
        model = wrapped(tmp_path, verify=verify, gpu_memory="104KiB", update="plain")
        optimizer = infinity.AdamW(model.parameters())
        step(model, optimizer)
        for _, start in places_of(model, kind):
            flip(tmp_path / STATES_NAME, start + 1)  # the low bits of a value
        if verify == "always":
            with pytest.raises(infinity.InfinityError, match="is damaged at offset"):
                for _ in range(2):
                    step(model, optimizer)
        else:
            for _ in range(2):
                step(model, optimizer)
        infinity.engine(model).close()


def test_saved_tensors_are_checked_where_that_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrapped(
        tmp_path, verify="always", activations="nvme", activation_memory="512KiB", update="plain"
    )
    real, flips = NvmeTier.read, 0

    def read(tier: NvmeTier, transfer: Any, direct: bool = False) -> Ticket:
        nonlocal flips
        if transfer.name == "activations":
            path, offset = tier.where(transfer.extent, 5)
            flip(Path(path), offset)
            flips += 1
        return real(tier, transfer, direct)

    monkeypatch.setattr(NvmeTier, "read", read)
    with pytest.raises(infinity.InfinityError, match=r"is damaged.*autograd saved"):
        model(torch.ones(700, 160)).sum().backward()
    assert flips == 1
    infinity.engine(model).close()
