"""GPUDirect Storage with the real libcufile, where a GPU and a drive have it: the right bytes,
after the model has left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import infinity
from infinity.device import ComputeDevice
from infinity.observe import Recorder
from infinity.placement.spec import BlockSpec, Format, Kind
from infinity.tier import NVME
from infinity.tiers.block import Block
from infinity.tiers.staging import ChunkRequest
from infinity.tiers.store import Store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NBYTES, UNITS = 24 << 20, 4


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tuple[Store, list[Block], list[torch.Tensor]]]:
    """Units on NVMe with random content, and room for one of them on the GPU."""
    config = infinity.Config(
        nvme=tmp_path,
        gpu_memory=NBYTES,
        cpu_memory="32MiB",
        tuning=infinity.Tuning(cache=0, device="cuda", gpu_direct="on"),
    )
    store = Store(config, ComputeDevice("cuda"), Recorder())
    blocks = [
        store.add(
            BlockSpec(n, Kind.PARAM, NBYTES, Format("byte", 1, 1), NVME, NBYTES, 0, f"unit {n}")
        )
        for n in range(UNITS)
    ]
    try:
        store.open(store.placement.layout(NBYTES))
    except infinity.ConfigError as error:
        pytest.skip(str(error))
    contents = [torch.randint(0, 256, (NBYTES,), dtype=torch.uint8) for _ in blocks]
    try:
        for block, content in zip(blocks, contents, strict=True):
            store.resident.begin_update(block)
            for begin in store.staging.chunks(block):
                (chunk,) = store.staging.check_out(ChunkRequest([block], begin))
                chunk.tensor.copy_(content[begin:][: chunk.tensor.numel()])
                chunk.commit()
                chunk.release()
            store.resident.end_update([block])
        yield store, blocks, contents
    finally:
        store.close()


def test_a_unit_arrives_as_it_was_written_and_after_the_model_has_left_its_place(
    store: tuple[Store, list[Block], list[torch.Tensor]],
) -> None:
    one, blocks, contents = store
    seen = []
    for turn in range(3 * UNITS):
        block = blocks[turn % UNITS]
        one.resident.start(block)
        place = one.resident.wait(block)
        torch.cuda._sleep(20_000_000)  # the model is slow, and reads the place late
        seen.append((turn % UNITS, place.clone()))
        one.resident.release(block)
    for number, found in seen:
        assert torch.equal(found.cpu(), contents[number])
