"""The approximate inverse and inverse root of this GPU are what [Note: quick] of
native/cuda/octet.h needs: for every mantissa. Every other test of the kernels rests on it, so it
comes first.

PTX promises less than each GPU has had so far: with inverses that are all one unit too large, 12 of
70 million quotients and roots of tests/native/cuda/quick.cpp are wrong.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ONE = 0x3F800000
"""The bits of 1; those of 2 and 4 are 2^23 and 2^24 more."""
THREADS = 256

PTX = """
.version 7.0
.target sm_70
.address_size 64
.visible .entry inverses(.param .u64 place) {
  .reg .b32 %r<5>;
  .reg .f32 %f<6>;
  .reg .b64 %a<4>;
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %tid.x;
  mad.lo.s32 %r3, %r1, 256, %r2;
  add.u32 %r4, %r3, 0x3f800000;
  mov.b32 %f1, %r4;
  rcp.approx.ftz.f32 %f2, %f1;
  neg.f32 %f3, %f1;
  fma.rn.f32 %f4, %f3, %f2, 0f3F800000;
  fma.rn.f32 %f5, %f2, %f4, %f2;
  ld.param.u64 %a1, [place];
  mul.wide.u32 %a2, %r3, 4;
  add.s64 %a3, %a1, %a2;
  st.global.f32 [%a3], %f5;
  ret;
}
.visible .entry roots(.param .u64 place) {
  .reg .b32 %r<5>;
  .reg .f32 %f<8>;
  .reg .b64 %a<4>;
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %tid.x;
  mad.lo.s32 %r3, %r1, 256, %r2;
  add.u32 %r4, %r3, 0x3f800000;
  mov.b32 %f1, %r4;
  rsqrt.approx.ftz.f32 %f2, %f1;
  mul.rn.f32 %f3, %f1, %f2;
  neg.f32 %f4, %f3;
  fma.rn.f32 %f5, %f4, %f3, %f1;
  mul.rn.f32 %f6, %f2, 0f3F000000;
  fma.rn.f32 %f7, %f5, %f6, %f3;
  ld.param.u64 %a1, [place];
  mul.wide.u32 %a2, %r3, 4;
  add.s64 %a3, %a1, %a2;
  st.global.f32 [%a3], %f7;
  ret;
}
"""
"""The steps of `Quick<Octet>`, one after the other as octet.h has them."""


def numbers(count: int) -> torch.Tensor:
    """The first `count` floats from 1 on."""
    return torch.arange(ONE, ONE + count, dtype=torch.int32).view(torch.float32)


def computed(kernel: str, count: int) -> torch.Tensor:
    """What the GPU makes of `numbers(count)`."""
    driver = ctypes.CDLL("libcuda.so.1")
    results = torch.empty(count, device="cuda")  # torch makes the context

    def call(name: str, *values: object) -> None:
        error = driver[name](*values)
        assert error == 0, f"{name} returned {error}"

    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), PTX.encode())
    call("cuModuleGetFunction", ctypes.byref(function), module, kernel.encode())
    place = ctypes.c_uint64(results.data_ptr())
    places = (ctypes.c_void_p * 1)(ctypes.addressof(place))
    sizes = (count // THREADS, 1, 1, THREADS, 1, 1, 0)
    torch.cuda.synchronize()
    call("cuLaunchKernel", function, *sizes, None, places, None)
    torch.cuda.synchronize()
    call("cuModuleUnload", module)
    return results.cpu()


def wrong_inverses(found: torch.Tensor) -> int:
    """How many are not good enough for a quotient that is correctly rounded: with d, what one is
    off by, |y^2 d| must be less than 2^-23 (1 - 2^-24)."""
    y = numbers(len(found)).double()
    product = y * found.double()  # exact: 48 bits
    return int(((product - 1).abs() * y >= 2.0**-23 * (1 - 2.0**-24)).sum())


def wrong_roots(found: torch.Tensor) -> int:
    return int((found != numbers(len(found)).sqrt()).sum())


@pytest.mark.gpu
@needs_device
def test_every_inverse_is_good_enough_for_quotients() -> None:
    assert wrong_inverses(computed("inverses", 1 << 23)) == 0


@pytest.mark.gpu
@needs_device
def test_every_root_is_correctly_rounded() -> None:
    """Of both parities of the exponent."""
    assert wrong_roots(computed("roots", 1 << 24)) == 0


def test_what_is_not_good_enough_is_counted() -> None:
    """Without a device: inverses to the nearest are good enough, and their neighbors are not."""
    y = numbers(1 << 23)
    nearest, roots = (1 / y.double()).float(), numbers(1 << 24).sqrt()
    assert (wrong_inverses(nearest), wrong_roots(roots)) == (0, 0)
    up = torch.tensor(torch.inf)
    assert wrong_inverses(nearest.nextafter(up)) > 1 << 20
    assert wrong_roots(roots.nextafter(up)) == 1 << 24


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas of CUDA")
def test_the_ptx_is_valid(tmp_path: Path) -> None:
    source, target = tmp_path / "steps.ptx", tmp_path / "steps.cubin"
    source.write_text(PTX)
    subprocess.run(["ptxas", "-arch=sm_90", source, "-o", target], check=True)
    assert sorted(re.findall(r"entry (\w+)", PTX)) == ["inverses", "roots"]
