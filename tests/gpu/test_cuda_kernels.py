"""The CUDA kernels agree bit for bit with the CPU kernels (invariant I8): on a device, where there
is one, and run on the CPU (`support.cuda_on_cpu`).

Without a device, what is left of the built module is what a caller meets there: it loads, says why
it cannot run, and refuses what is wrong. tests/native/cuda/on_cpu compares more on the CPU.
"""

from __future__ import annotations

import itertools
import os
import struct
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity import native
from support import cuda_on_cpu
from support.adam_chunks import (
    HYPERS,
    MASTERS,
    POOLS,
    RULES,
    SUPERBLOCK,
    WRONG,
    Case,
    Chunk,
    Hyper,
    random_chunk,
)

cuda = native.cuda()
cpu = native.cpu_adam()
built = pytest.mark.skipif(cuda is None, reason="the package was built without nvcc")
cannot_run = "the package was built without nvcc" if cuda is None else cuda.unavailable_reason()
needs_device = pytest.mark.skipif(
    bool(cannot_run) or not torch.cuda.is_available(), reason="needs a CUDA device"
)

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INF, NAN = float("inf"), float("nan")
BLOCK = cpu.NORM_BLOCK


@dataclass(frozen=True)
class Gpu:
    """The kernels, and where the memory is that they work on."""

    cuda: Any
    device: str

    def stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream if self.device == "cuda" else 0

    def update(self, chunk: Chunk, begin: int = 0, end: int | None = None) -> None:
        chunk.update_by(self.cuda, self.stream(), begin, end)

    def norm(self, tensor: torch.Tensor, dtype: str, carry: float) -> float:
        n = tensor.numel()
        there = tensor.to(self.device)
        total = torch.tensor([carry], dtype=torch.float64, device=self.device)
        sums = torch.empty(self.cuda.norm_blocks(n), dtype=torch.float64, device=self.device)
        self.cuda.squared_norm(
            there.data_ptr(),
            dtype,
            n,
            block_sums=sums.data_ptr(),
            total=total.data_ptr(),
            stream=self.stream(),
        )
        return total.item()


DEVICE = pytest.param("cuda", marks=[pytest.mark.gpu, needs_device], id="device")


@pytest.fixture(params=[DEVICE, pytest.param("cpu", id="emulated")])
def gpu(request: pytest.FixtureRequest) -> Gpu:
    return Gpu(cuda if request.param == "cuda" else cuda_on_cpu.load().cuda, request.param)


@pytest.fixture(params=[pytest.param("built", marks=built), "emulated"])
def module(request: pytest.FixtureRequest) -> Any:
    """The module, to which no device is needed."""
    return cuda if request.param == "built" else cuda_on_cpu.load().cuda


def values(n: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`n` finite numbers over many orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    most = 4 if dtype == torch.float16 else 10
    exponent = torch.randint(-most, most, (n,), generator=generator)
    return (torch.randn(n, generator=generator) * 10.0**exponent).to(dtype)


# Without a device


def parts_of(binary: bytes) -> set[tuple[str, int]]:
    """("ptx" or "sass", architecture) of everything in the fat binaries of a module."""
    magic, found = struct.pack("<I", 0xBA55ED50), set()
    begin = binary.find(magic)
    while begin >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", binary, begin)
        at, end = begin + header, begin + header + size
        while at < end:
            kind, _, part_header, part_size = struct.unpack_from("<HHIQ", binary, at)
            (architecture,) = struct.unpack_from("<I", binary, at + 28)
            found.add(({1: "ptx", 2: "sass"}[kind], architecture))
            at += part_header + part_size
        begin = binary.find(magic, end)
    return found


@built
@pytest.mark.skipif("CUDAARCHS" in os.environ, reason="CUDAARCHS chose other architectures")
def test_the_module_has_code_for_every_supported_architecture() -> None:
    assert {("sass", 80), ("sass", 90), ("ptx", 90)} <= parts_of(Path(cuda.__file__).read_bytes())


@built
def test_the_module_says_whether_it_can_run() -> None:
    assert cannot_run == "" or not torch.cuda.is_available()
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/dxg").exists():
        assert "driver" in cannot_run or "device" in cannot_run


@built
@pytest.mark.skipif(not cannot_run, reason="there is a device")
def test_without_a_device_an_update_says_why_and_changes_nothing() -> None:
    chunk = random_chunk(Case(), 64)
    before = chunk.bits()
    with pytest.raises(RuntimeError, match=f"update could not be launched: {cannot_run}"):
        chunk.update_by(cuda, 0)
    assert chunk.bits() == before


def test_an_unknown_dtype_is_refused(module: Any) -> None:
    with pytest.raises(ValueError, match="unknown dtype 'fp8'; expected fp32, bf16 or fp16"):
        module.squared_norm(0, "fp8", 0, block_sums=0, total=0, stream=0)


@pytest.mark.parametrize(("wrong", "message"), [case for case in WRONG if "isa" not in case[0]])
def test_wrong_arguments_are_refused_as_on_the_cpu(
    wrong: dict[str, Any], message: str, module: Any
) -> None:
    chunk = random_chunk(Case(param="bf16", master="fp32"), 32)
    good = {name: chunk.address(name) for name in ("grad", "param", "master", "first", "second")}
    good |= {
        "rule": "adam",
        "grad_dtype": "fp32",
        "param_dtype": "bf16",
        "master_format": "fp32",
        "moment_format": "fp32",
    }
    good |= {"begin": 0, "end": 32, "position": 0, "key": 0, **asdict(Hyper())}
    errors = []
    for kernels, where in ((cpu, {"isa": "scalar", "pool": POOLS[1]}), (module, {"stream": 0})):
        with pytest.raises(ValueError, match=message) as refusal:
            kernels.update(**(good | wrong | where))
        errors.append(str(refusal.value))
    assert errors[0] == errors[1]


def test_nothing_to_do_needs_no_device(module: Any) -> None:
    module.update(
        "adam",
        0,
        "fp32",
        0,
        "fp32",
        0,
        "none",
        0,
        0,
        "fp32",
        7,
        7,
        position=0,
        key=0,
        lr=0.1,
        stream=0,
    )
    module.squared_norm(0, "bf16", 0, block_sums=0, total=0, stream=0)


# Updates


def moved(chunk: Chunk, device: str) -> Chunk:
    blocks = {name: block.to(device, copy=True) for name, block in chunk.blocks.items()}
    return replace(chunk, blocks=blocks)


def check_parity(
    gpu: Gpu,
    chunk: Chunk,
    begin: int = 0,
    end: int | None = None,
    isa: str = "scalar",
    steps: int = 1,
) -> None:
    """Every byte of every block, the guards around them included, is what the CPU makes of it."""
    there = moved(chunk, gpu.device)
    for step in range(steps):
        chunk.key = there.key = chunk.key + step
        chunk.update(isa, 4, begin, end)
        gpu.update(there, begin, end)
    for name, block in moved(there, "cpu").blocks.items():
        assert torch.equal(block, chunk.blocks[name]), (
            name,
            begin,
            end,
            chunk.n,
            chunk.shift,
            chunk.position,
            chunk.case,
        )


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize(("param", "master"), MASTERS)
@pytest.mark.parametrize("rule", RULES)
def test_updates_equal_the_cpu_kernels(
    rule: str, param: str, master: str, grad: str, moments: str, gpu: Gpu
) -> None:
    """Values of every class, NaN, infinities and subnormals included; parts of groups; odd
    addresses; numbers that pass 2^32."""
    for seed, hyper in enumerate(HYPERS):
        case = Case(rule, grad, param, master, moments, hyper)
        begin = 37 if moments == "fp32" else 32
        chunk = random_chunk(case, 3001, seed)
        check_parity(gpu, chunk.clone())
        check_parity(gpu, chunk.clone(), begin, 2990)
        check_parity(gpu, replace(chunk.clone(), position=2**32 - 1024))
        check_parity(gpu, chunk, begin, begin + 3)
        check_parity(gpu, random_chunk(case, 999, seed).moved(1), begin, 998)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("rule", RULES)
def test_a_missing_gradient_is_zeros(rule: str, moments: str, gpu: Gpu) -> None:
    chunk = random_chunk(Case(rule, param="bf16", master="split", moments=moments), 1000)
    del chunk.blocks["grad"]
    check_parity(gpu, chunk)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_many_steps_of_ordinary_training(moments: str, gpu: Gpu) -> None:
    """Codes and scales of int8 that grew from zeros, rounded with the noise of each step."""
    n = 2 * SUPERBLOCK + 77
    chunk = random_chunk(Case(grad="bf16", param="bf16", master="split", moments=moments), n)
    for name, block in chunk.blocks.items():
        if name != "grad":
            block[chunk.offset(name) : len(block) - 64].zero_()
    chunk.view("grad", torch.bfloat16).copy_(
        torch.randn(n, generator=torch.Generator().manual_seed(0))
    )
    check_parity(gpu, chunk, steps=20)
    assert chunk.masters().abs().max() > 0


def test_more_than_one_grid(gpu: Gpu) -> None:
    """More groups than there are octets in a grid, over many superblocks."""
    n = 9_000_000 if gpu.device == "cuda" else 150_000
    generator = torch.Generator().manual_seed(0)
    case = Case(grad="bf16", param="bf16", master="split", moments="int8")
    chunk = random_chunk(case, n)
    chunk.view("grad", torch.bfloat16).copy_(torch.randn(n, generator=generator))
    check_parity(gpu, chunk, isa=cpu.best_isa())
    chunk = random_chunk(Case(), n)
    check_parity(gpu, chunk, 5, n - 3, isa=cpu.best_isa())


def test_cuts_do_not_change_bits(gpu: Gpu) -> None:
    for moments in ("fp32", "bf16", "int8"):
        chunk = random_chunk(Case(moments=moments), 5000)
        whole, parts = moved(chunk, gpu.device), moved(chunk, gpu.device)
        gpu.update(whole)
        for begin, end in itertools.pairwise((0, 64, 96, 3200, 5000)):
            gpu.update(parts, begin, end)
        assert moved(whole, "cpu").bits() == moved(parts, "cpu").bits()


# Norms


@pytest.mark.parametrize(
    "n", [0, 1, 7, 8, BLOCK - 1, BLOCK, BLOCK + 1, 9 * BLOCK + 5, 9 * BLOCK + 253, 300 * BLOCK]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_squared_norm_equals_the_cpu_kernel(dtype: str, n: int, gpu: Gpu) -> None:
    tensor = values(n, n, DTYPES[dtype])
    expected = cpu.squared_norm(tensor.data_ptr(), dtype, n, 0.1, "scalar", POOLS[1])
    assert gpu.norm(tensor, dtype, 0.1).hex() == expected.hex()


def test_squared_norm_does_not_depend_on_how_a_buffer_is_cut(gpu: Gpu) -> None:
    tensor = values(5 * BLOCK + 3, 1)
    in_parts = gpu.norm(tensor[2 * BLOCK :], "fp32", gpu.norm(tensor[: 2 * BLOCK], "fp32", 0.0))
    assert in_parts == gpu.norm(tensor, "fp32", 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_squared_norm_shows_what_is_not_finite(bad: float, dtype: str, gpu: Gpu) -> None:
    for at in (0, BLOCK + 3, 3 * BLOCK + 1):
        tensor = values(3 * BLOCK + 2, 1, DTYPES[dtype])
        tensor[at] = bad
        assert str(gpu.norm(tensor, dtype, 0.0)) == str(abs(bad))


@pytest.mark.gpu
@needs_device
def test_work_waits_its_turn_on_the_stream_it_is_given() -> None:
    n = 1 << 24
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        source = torch.full((n,), 2.0, device="cuda")
        total = torch.full((n,), 1.0, device="cuda")
        # Enough queued work that a kernel on another stream would run too early.
        for _ in range(20):
            source = source * 1.0
        norm = torch.zeros(1, dtype=torch.float64, device="cuda")
        sums = norm.new_empty(cuda.norm_blocks(n))
        cuda.squared_norm(
            source.data_ptr(),
            "fp32",
            n,
            block_sums=sums.data_ptr(),
            total=norm.data_ptr(),
            stream=side.cuda_stream,
        )
        cuda.update(
            "sgd",
            source.data_ptr(),
            "fp32",
            total.data_ptr(),
            "fp32",
            0,
            "none",
            0,
            0,
            "fp32",
            0,
            n,
            position=0,
            key=0,
            lr=0.5,
            stream=side.cuda_stream,
        )
        assert norm.item() == 4.0 * n
        assert torch.equal(total, torch.zeros_like(total))
