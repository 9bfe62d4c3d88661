"""What an update and a norm ask of CUDA, on a runtime that the test plays.

Work waits in its stream. A call that fails leaves nothing behind: the update is refused with all
memory as it was, or it says that a part of it was made.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from infinity import native
from support import cuda_on_cpu
from support.adam_chunks import Case, Chunk, random_chunk
from support.cuda_on_cpu import CudaOnCpu

cpu = native.cpu_adam()
INVALID, NO_CODE, OUT_OF_MEMORY = 1, 209, 2
FIRST = 40
"""A device about which the kernels remember nothing: each launch asks what fits on it."""
CASE = Case(param="bf16", master="fp32", moments="int8")


@pytest.fixture
def gpu() -> Iterator[CudaOnCpu]:
    found = cuda_on_cpu.load()
    found.set("devices", 64)
    found.device = FIRST
    yield found
    found.heal()
    found.set("queued", 0)
    found.device = 0
    found.set("devices", 1)


def by_cpu(chunk: Chunk) -> dict[str, bytes]:
    return chunk.clone().update().bits()


def update(gpu: CudaOnCpu, chunk: Chunk, stream: int = 0) -> str:
    """Why it is refused; "" where it is made."""
    try:
        chunk.update_by(gpu.cuda, stream)
    except RuntimeError as error:
        return str(error)
    return ""


# Arguments


def test_norm_blocks(gpu: CudaOnCpu) -> None:
    n = cpu.NORM_BLOCK
    assert [gpu.cuda.norm_blocks(x) for x in (0, 1, n, n + 1)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("values", "sums", "total"),
    [(0, 8, 16), (8, 0, 16), (8, 16, 0), (9, 16, 32), (8, 20, 32), (8, 16, 36)],
)
def test_addresses_that_are_null_or_not_aligned_are_refused(
    values: int, sums: int, total: int, gpu: CudaOnCpu
) -> None:
    at = torch.zeros(16, dtype=torch.float64).data_ptr()
    values, sums, total = (at + offset if offset else 0 for offset in (values, sums, total))
    launches = gpu.launches()
    with pytest.raises(ValueError, match=r"must not be null|is not aligned"):
        gpu.cuda.squared_norm(values, "fp32", 1, block_sums=sums, total=total, stream=0)
    assert gpu.launches() == launches


# Streams


def test_work_waits_in_its_stream(gpu: CudaOnCpu) -> None:
    gpu.set("queued", 1)
    stream, other = gpu.stream(FIRST), gpu.stream(FIRST)
    chunk = random_chunk(CASE, 640)
    before, after = chunk.bits(), by_cpu(chunk)
    values, sums, total = torch.arange(1.0, 5.0), torch.empty(1).double(), torch.zeros(1).double()
    chunk.update_by(gpu.cuda, stream)
    gpu.cuda.squared_norm(
        values.data_ptr(),
        "fp32",
        4,
        block_sums=sums.data_ptr(),
        total=total.data_ptr(),
        stream=stream,
    )
    gpu.synchronize(other)
    gpu.synchronize(0)
    assert (chunk.bits(), total.item(), gpu.waiting(stream)) == (before, 0, 3)
    gpu.synchronize(stream)
    assert (chunk.bits(), total.item()) == (after, 30)


def test_a_stream_of_another_device_is_refused(gpu: CudaOnCpu) -> None:
    chunk = random_chunk(CASE, 640)
    before = chunk.bits()
    assert update(gpu, chunk, gpu.stream(FIRST + 1)) == (
        "update could not be launched: invalid resource handle"
    )
    assert (chunk.bits(), gpu.last_error) == (before, 0)


# Calls that fail

CALLS = {
    "cudaGetDevice": INVALID,
    "cudaOccupancyMaxActiveBlocksPerMultiprocessor": NO_CODE,
    "cudaDeviceGetAttribute": INVALID,
    "cudaLaunchKernel": OUT_OF_MEMORY,
}


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("function", CALLS)
def test_an_update_that_is_refused_can_be_made_again(
    function: str, after: int, gpu: CudaOnCpu
) -> None:
    """A part of a group at the end takes a launch of its own, before that of the whole groups."""
    chunk = random_chunk(CASE, 333)
    before, once = chunk.bits(), by_cpu(chunk)
    gpu.fail(function, CALLS[function], after)
    refusal = update(gpu, chunk)
    assert gpu.last_error == 0
    if (function, after) == ("cudaLaunchKernel", 1):
        assert refusal.startswith("a part of update was launched, and the rest could not be: ")
        assert chunk.bits() not in (before, once)
        return
    assert refusal.startswith("update could not be launched: ")
    assert chunk.bits() == before
    assert update(gpu, chunk) == ""
    assert chunk.bits() == once


@pytest.mark.parametrize("after", [0, 1])
def test_a_norm_that_is_refused_leaves_its_total(after: int, gpu: CudaOnCpu) -> None:
    values, sums, total = torch.ones(9), torch.empty(1).double(), torch.ones(1).double()
    at: dict[str, Any] = {"block_sums": sums.data_ptr(), "total": total.data_ptr(), "stream": 0}
    gpu.fail("cudaLaunchKernel", OUT_OF_MEMORY, after)
    with pytest.raises(RuntimeError, match="squared_norm could not be launched: "):
        gpu.cuda.squared_norm(values.data_ptr(), "fp32", 9, **at)
    assert (total.item(), gpu.last_error) == (1, 0)
    gpu.cuda.squared_norm(values.data_ptr(), "fp32", 9, **at)
    assert total.item() == 10


def test_an_error_that_another_library_left_is_none_of_ours(gpu: CudaOnCpu) -> None:
    gpu.device = 1000
    assert gpu.last_error != 0
    chunk = random_chunk(CASE, 333)
    once = by_cpu(chunk)
    assert update(gpu, chunk) == ""
    assert chunk.bits() == once
    assert gpu.last_error != 0


def test_without_a_driver_an_update_says_why(gpu: CudaOnCpu) -> None:
    gpu.set("devices", 0)
    chunk = random_chunk(CASE, 64)
    before = chunk.bits()
    assert update(gpu, chunk) == f"update could not be launched: {gpu.cuda.unavailable_reason()}"
    assert chunk.bits() == before


# Whether kernels can run


@pytest.mark.parametrize(
    ("function", "after", "reason"),
    [
        ("cudaGetDevice", 0, "no kernel image .*; build the package"),
        ("cudaSetDevice", 0, "no kernel image .*; build the package"),
        ("cudaFuncGetAttributes", 0, "no kernel image .*; build the package"),
        ("cudaGetDevice", 1, "the thread could not go back to device 40: no kernel image"),
        ("cudaSetDevice", 1, "the thread could not go back to device 40: no kernel image"),
    ],
)
def test_the_reason_why_kernels_cannot_run(
    function: str, after: int, reason: str, gpu: CudaOnCpu
) -> None:
    gpu.fail(function, NO_CODE, after)
    found = gpu.cuda.unavailable_reason(FIRST + 1)
    assert gpu.last_error == 0
    assert found.startswith(reason.split(" .*")[0]) and found.endswith(
        "CUDAARCHS=native" if ".*" in reason else "device"
    )
    assert gpu.device == (FIRST if after == 0 else FIRST + 1)


def test_a_device_that_there_is_not(gpu: CudaOnCpu) -> None:
    assert gpu.cuda.unavailable_reason(1000) == "invalid device ordinal"
    assert (gpu.device, gpu.last_error) == (FIRST, 0)
    assert gpu.cuda.unavailable_reason(3) == ""
    assert gpu.device == FIRST


def test_the_device_of_the_thread_is_not_set_again(gpu: CudaOnCpu) -> None:
    """To set a device makes a context on it."""
    before = gpu.calls("cudaSetDevice")
    assert gpu.cuda.unavailable_reason(FIRST) == ""
    assert gpu.calls("cudaSetDevice") == before


def test_captures_of_others_are_ignored_by_the_thread_that_says_so(gpu: CudaOnCpu) -> None:
    seen = []

    def other() -> None:
        for _ in range(2):
            gpu.cuda.ignore_captures()
            seen.append(gpu.capture_mode())
        gpu.fail("cudaThreadExchangeStreamCaptureMode", INVALID)
        gpu.cuda.ignore_captures()
        seen.append(gpu.last_error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    thread_local, none = 1, 0
    assert seen == [thread_local, thread_local, none]
    assert gpu.capture_mode() == 0
