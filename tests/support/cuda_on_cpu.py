"""The CUDA kernels, compiled by the C++ compiler and run on the CPU: `infinity._cuda` for tests
without a GPU. The memory of its devices is the host's. tests/native/cuda/on_cpu says how."""

from __future__ import annotations

import ctypes
import os
import shutil
from functools import cache
from pathlib import Path

import pytest

from support import compiled

_ROOT = Path(os.environ.get("INFINITY_TEST_CUDA_SOURCES", Path(__file__).parents[2]))
"""Sources of others are those with a fault, see `cuda_faults`."""
_NATIVE = _ROOT / "native"
_HERE = _ROOT / "tests/native/cuda/on_cpu"


class CudaOnCpu:
    """The module, and what a test sets and asks of the machine that plays the GPU (`on_cpu.h`)."""

    def __init__(self) -> None:
        self.cuda, path = compiled.module("_cuda", _sources(), _command)
        self._machine = ctypes.CDLL(str(path))
        for name in ("stream", "waiting", "synchronize", "launches", "calls", "set"):
            function = getattr(self._machine, f"on_cpu_{name}")
            function.restype = ctypes.c_void_p if name == "stream" else ctypes.c_long
            if name in ("waiting", "synchronize"):
                function.argtypes = [ctypes.c_void_p]

    def set(self, name: str, value: int) -> None:
        self._machine.on_cpu_set(name.encode(), ctypes.c_long(value))

    def fail(self, function: str, error: int, after: int = 0) -> None:
        """One call of the function fails, after so many that do not."""
        self._machine.on_cpu_fail(function.encode(), ctypes.c_long(after), error)

    def heal(self) -> None:
        self._machine.on_cpu_heal()

    def calls(self, function: str) -> int:
        return int(self._machine.on_cpu_calls(function.encode()))

    def launches(self) -> int:
        return int(self._machine.on_cpu_launches())

    def stream(self, device: int = 0) -> int:
        return int(self._machine.on_cpu_stream(device))

    def waiting(self, stream: int) -> int:
        """Launches that are queued on a stream."""
        return int(self._machine.on_cpu_waiting(stream))

    def synchronize(self, stream: int) -> None:
        self._machine.on_cpu_synchronize(stream)

    def push_to(self, address: int) -> None:
        """Let the streams of another device run what is launched, by a C function; 0: no longer."""
        self._machine.on_cpu_push_to(ctypes.c_void_p(address))

    def capture_mode(self) -> int:
        return int(self._machine.on_cpu_capture_mode())

    @property
    def last_error(self) -> int:
        """Of the calling thread."""
        return int(self._machine.cudaPeekAtLastError())

    @property
    def device(self) -> int:
        """Of the calling thread."""
        number = ctypes.c_int(-1)
        self._machine.cudaGetDevice(ctypes.byref(number))
        return number.value

    @device.setter
    def device(self, number: int) -> None:
        self._machine.cudaSetDevice(number)


@cache
def load() -> CudaOnCpu:
    """Built where it is not yet; skips the test where there is no compiler."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler, to compile the CUDA kernels for the CPU")
    return CudaOnCpu()


def _sources() -> list[Path]:
    folders = (_NATIVE / "cuda", _NATIVE / "cpu_adam", _HERE, _HERE / "include")
    return [path for folder in folders for path in folder.iterdir() if path.is_file()]


def _command(target: Path) -> list[str]:
    return [
        *("c++", "-std=c++17", "-O0", "-fPIC", "-shared"),
        *("-fno-fast-math", "-ffp-contract=off", "-fno-math-errno"),
        *(f"-I{_HERE}", f"-I{_HERE / 'include'}", *compiled.INCLUDES),
        *(str(_HERE / f"{name}.cpp") for name in ("kernels", "runtime", "threads")),
        str(_NATIVE / "cuda/module.cpp"),
        *("-Wl,-Bsymbolic", "-lpthread", "-o", str(target)),
    ]
