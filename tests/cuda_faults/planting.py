"""Copies of the sources with a fault, and the tests that are to find it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from cuda_faults.faults import Fault

ROOT = Path(__file__).parents[2]


class Copy:
    """A copy of the native sources in `folder`. What a fault leaves alone is compiled once."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._sources = folder, folder / "sources"
        self._planted: list[str] = []  # files
        for name in ("native", "tests/native"):
            # Older than their objects, so only what a fault changes is compiled anew.
            shutil.copytree(
                ROOT / name,
                self._sources / name,
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
        shutil.copy2(ROOT / "CMakeLists.txt", self._sources)

    def plant(self, *faults: Fault) -> None:
        """Plant these faults, in place of those before."""
        self.heal()
        for fault in faults:
            file = self._sources / "native/cuda" / fault.file
            text = file.read_text()
            if text.count(fault.old) < 1:
                raise ValueError(f"{fault.breaks}: {fault.file} has no {fault.old!r}")
            file.write_text(text.replace(fault.old, fault.new, 1))
            self._planted.append(f"native/cuda/{fault.file}")

    def heal(self) -> None:
        for name in self._planted:
            (self._sources / name).write_text((ROOT / name).read_text())
        self._planted.clear()

    def compares(self, sanitizers: str = "", few: bool = True) -> bool:
        """Whether the kernels have the bits of the specification, and no sanitizer reports one."""
        build = self._folder / (sanitizers.replace(",", "-") or ("few" if few else "all"))
        extra = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "UBSAN_OPTIONS": "halt_on_error=1",
            "TSAN_OPTIONS": "halt_on_error=1",
        }
        if not (build / "build.ninja").exists():
            _must(
                *("cmake", "-G", "Ninja", "-S", self._sources, "-B", build),
                *("-DINFINITY_NATIVE_TESTS=ON", f"-DINFINITY_SANITIZE={sanitizers}"),
                f"-DCMAKE_BUILD_TYPE={'Debug' if few else 'Release'}",
                extra=extra | {"CUDACXX": "none"},
            )
        _must("cmake", "--build", build, "--target", "cuda_on_cpu", extra=extra)
        fixed = ["setarch", "-R"] if _run("setarch", "-R", "true").returncode == 0 else []
        program = build / "tests/native/cuda/on_cpu/cuda_on_cpu"
        return _run(*fixed, program, *(["few"] if few else []), extra=extra).returncode == 0

    def passes(self, *arguments: str) -> bool:
        """Whether tests of tests/gpu pass, on the module."""
        files = (f"{ROOT}/tests/gpu/test_cuda_{name}.py" for name in ("calls", "kernels"))
        modules = self._folder / "modules"
        modules.mkdir(exist_ok=True)
        done = _run(
            *(sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "-q", "-x"),
            *("-p", "no:cacheprovider", *files, *arguments),
            extra={"INFINITY_TEST_CUDA_SOURCES": str(self._sources), "TMPDIR": str(modules)},
        )
        if "does not compile" in done.stdout:
            raise RuntimeError(done.stdout)
        return done.returncode == 0

    def found_by(self) -> str:
        """The first that finds the fault, those that take less time before others; "" if none."""
        tests: dict[str, Callable[[], bool]] = {
            "comparison, few": self.compares,
            "calls": lambda: self.passes("-k", "not updates_equal"),
            "thread sanitizer": lambda: self.compares("thread"),
            "address sanitizer": lambda: self.compares("address,undefined"),
            "comparison, all": lambda: self.compares(few=False),
        }
        return next((name for name, passes in tests.items() if not passes()), "")


def _run(*command: object, extra: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **(extra or {})}
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=environment, check=False
    )


def _must(*command: object, extra: dict[str, str] | None = None) -> None:
    done = _run(*command, extra=extra)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}:\n{done.stdout}{done.stderr}")
