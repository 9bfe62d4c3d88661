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


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("breaks", FOUND)
def test_a_fault_is_found(breaks: str, tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    copy.plant(KNOWN[breaks])
    assert not copy.passes("-k", FOUND[breaks])


def test_all_faults_can_be_planted(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    for fault in FAULTS:
        copy.plant(fault)
    assert len(KNOWN) == len(FAULTS)
