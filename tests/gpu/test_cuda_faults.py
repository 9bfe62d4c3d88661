"""Some faults of the CUDA kernels are found by the tests that run them on the CPU; `make
planted-cuda-faults` plants all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cuda_faults.faults import FAULTS
from cuda_faults.planting import Copy

KNOWN = {fault.breaks: fault for fault in FAULTS}
FOUND = {
    "norm: the next tile is the second next": "squared_norm_equals and fp16",
    "update: in the default stream": "waits_in_its_stream",
}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A copy with all of `FOUND`, which is compiled once. Each test below is blind to the fault of
    the other one: a norm of four values has one tile, and no update is in a norm."""
    copy = Copy(tmp_path_factory.mktemp("faulty"))
    copy.plant(*(KNOWN[breaks] for breaks in FOUND))
    return copy


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("breaks", FOUND)
def test_a_fault_is_found(breaks: str, faulty: Copy) -> None:
    assert not faulty.passes("-k", FOUND[breaks])


def test_all_faults_can_be_planted(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    for fault in FAULTS:
        copy.plant(fault)
    assert len(KNOWN) == len(FAULTS)
