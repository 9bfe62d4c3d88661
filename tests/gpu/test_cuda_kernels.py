"""The CUDA kernels agree bit for bit with the CPU kernels and with torch (invariant I8)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from infinity import native

cuda = native.cuda()
pytestmark = pytest.mark.skipif(cuda is None, reason="the package was built without nvcc")
needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
INF, NAN = float("inf"), float("nan")
SPECIAL = [0.0, -0.0, INF, -INF, NAN, 65504.0, 65519.99, 65520.0, 3.4e38, 1e-45, 6e-8, -3e-39]
BLOCK = 16384


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.gpu(needs_device(test))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().view(BITS[tensor.element_size()])


def values(n: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`n` finite numbers over many orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    most = 4 if dtype == torch.float16 else 10
    exponent = torch.randint(-most, most, (n,), generator=generator)
    return (torch.randn(n, generator=generator) * 10.0**exponent).to(dtype)


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def test_the_module_imports_and_says_whether_it_can_run() -> None:
    assert cuda.unavailable_reason() == "" or not torch.cuda.is_available()


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown dtype 'fp8'; expected fp32, bf16 or fp16"):
        cuda.accumulate(0, 0, "fp8", 0, first=True, stream=0)


@on_gpu
@pytest.mark.parametrize("n", [0, 1, 257, 3_000_001])
@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulate_rounds_as_torch_does(dtype: str, n: int) -> None:
    total = torch.empty(n, dtype=DTYPES[dtype], device="cuda")
    expected = None
    for seed in range(3):
        part = values(n, seed, DTYPES[dtype])
        moved = part.to("cuda")
        cuda.accumulate(total.data_ptr(), moved.data_ptr(), dtype, n, first=seed == 0, stream=stream())
        expected = part if expected is None else expected + part
        assert torch.equal(bits(total), bits(expected))


def norm_on_gpu(tensor: torch.Tensor, dtype: str, carry: float) -> float:
    n = tensor.numel()
    moved = tensor.to("cuda")
    total = torch.tensor([carry], dtype=torch.float64, device="cuda")
    sums = torch.empty(cuda.norm_blocks(n), dtype=torch.float64, device="cuda")
    cuda.squared_norm(moved.data_ptr(), dtype, n, block_sums=sums.data_ptr(), total=total.data_ptr(), stream=stream())
    return total.item()


@on_gpu
@pytest.mark.parametrize("n", [0, 1, 7, 8, BLOCK - 1, BLOCK, BLOCK + 1, 9 * BLOCK + 5, 300 * BLOCK])
@pytest.mark.parametrize("dtype", DTYPES)
def test_squared_norm_equals_the_cpu_kernel(dtype: str, n: int) -> None:
    cpu = native.cpu_adam()
    tensor = values(n, n, DTYPES[dtype])
    expected = cpu.squared_norm(tensor.data_ptr(), dtype, n, 0.1, "scalar", cpu.Pool(1))
    assert norm_on_gpu(tensor, dtype, 0.1).hex() == expected.hex()


@on_gpu
def test_squared_norm_does_not_depend_on_how_a_buffer_is_cut() -> None:
    tensor = values(5 * BLOCK + 3, 1)
    in_parts = norm_on_gpu(tensor[2 * BLOCK :], "fp32", norm_on_gpu(tensor[: 2 * BLOCK], "fp32", 0.0))
    assert in_parts == norm_on_gpu(tensor, "fp32", 0.0)


@on_gpu
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_squared_norm_shows_what_is_not_finite(bad: float) -> None:
    tensor = values(3 * BLOCK, 1)
    tensor[BLOCK + 3] = bad
    assert str(norm_on_gpu(tensor, "fp32", 0.0)) == str(abs(bad))


def adam_on_cpu(
    state: list[torch.Tensor], grad: torch.Tensor | None, grad_dtype: str, out_dtype: str, hyper: dict[str, Any], pool: Any
) -> None:
    """One update of master, first and second moment, and of the parameter, which with fp32 is the master."""
    master, first, second, out = state
    own = out_dtype == "fp32"
    native.cpu_adam().update(
        "adam", 0 if grad is None else grad.data_ptr(), grad_dtype, (master if own else out).data_ptr(), out_dtype,
        0 if own else master.data_ptr(), "none" if own else "fp32", first.data_ptr(), second.data_ptr(), "fp32", 0,
        len(master), position=0, key=0, **hyper, isa="scalar", pool=pool,
    )  # fmt: skip
    if own:
        out.copy_(master)


ADAM_CASES = list(itertools.product(DTYPES, DTYPES, [(True, 0.1), (False, 0.1), (True, 0.0)]))


@on_gpu
@pytest.mark.parametrize("with_grad", [True, False])
@pytest.mark.parametrize(("grad_dtype", "out_dtype", "decay"), ADAM_CASES)
def test_adam_equals_the_cpu_kernel(grad_dtype: str, out_dtype: str, decay: tuple[bool, float], with_grad: bool) -> None:
    cpu = native.cpu_adam()
    n = 100_003
    pool = cpu.Pool(2)
    master = values(n, 1)
    master[: len(SPECIAL)] = torch.tensor(SPECIAL)
    state = [master, torch.zeros(n), torch.zeros(n), torch.empty(n, dtype=DTYPES[out_dtype])]
    moved = [tensor.to("cuda") for tensor in state]
    decoupled, weight_decay = decay
    for t in range(1, 4):
        grad = values(n, 10 + t, DTYPES[grad_dtype])
        grad[-len(SPECIAL) :] = torch.tensor(SPECIAL).to(DTYPES[grad_dtype])
        moved_grad = grad.to("cuda")
        hyper = {
            "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": weight_decay,
            "bias_correction1": 1 - 0.9**t, "bias_correction2_sqrt": (1 - 0.999**t) ** 0.5,
            "grad_scale": 0.37, "decoupled": decoupled,
        }  # fmt: skip
        adam_on_cpu(state, grad if with_grad else None, grad_dtype, out_dtype, hyper, pool)
        pointers = [tensor.data_ptr() for tensor in moved]
        cuda.adam_step(moved_grad.data_ptr() if with_grad else 0, grad_dtype, *pointers, out_dtype, n, **hyper, stream=stream())
        for name, here, there in zip(("master", "exp_avg", "exp_avg_sq", "out"), state, moved, strict=True):
            assert torch.equal(bits(here), bits(there)), (name, t)


@on_gpu
def test_work_waits_its_turn_on_the_stream_it_is_given() -> None:
    n = 1 << 24
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        source = torch.full((n,), 2.0, device="cuda")
        total = torch.full((n,), 1.0, device="cuda")
        for _ in range(20):  # enough queued work that a kernel on another stream would run too early
            source = source * 1.0
        cuda.accumulate(total.data_ptr(), source.data_ptr(), "fp32", n, first=False, stream=side.cuda_stream)
        assert torch.equal(total, torch.full_like(total, 3.0))
