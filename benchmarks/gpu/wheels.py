#!/usr/bin/env python3
"""What a machine with a GPU and without a package index needs, beside torch and compilers.

Here, where there is an index: collect wheels for its Python, and liburing if this machine has it:
  benchmarks/gpu/wheels.py DIR [--python 3.12]
There: build the package in an environment of its own, and measure:
  benchmarks/gpu/run_all --wheels DIR ...

The environment sees the packages that the machine has: torch, numpy, scikit-build-core, pybind11,
cmake and ninja.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HAVE = ("torch", "numpy")
"""What that machine has, so that no wheel of it is carried: torch alone has gigabytes."""
NEEDED = (
    *("pydantic", "safetensors", "psutil", "typer", "rich"),
    *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "transformers"),
)
"""What the package needs, and its tests and benchmarks on a GPU."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any")
LIBURING = "liburing"

Run = Callable[..., None]


def collect(folder: Path, python: str) -> None:
    """Fill `folder` with the wheels, in the tested versions, and with liburing."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", folder]
    command += ["--only-binary", ":all:", "--python-version", python]
    command += [part for platform in PLATFORMS for part in ("--platform", platform)]
    subprocess.run([*command, "-c", ROOT / "constraints.txt", *NEEDED], check=True)
    for package in HAVE:
        for wheel in folder.glob(f"{package}-*.whl"):
            wheel.unlink()
    headers = Path("/usr/include")
    libraries = [*Path("/usr/lib").glob("*/liburing.a"), *Path("/usr/lib").glob("liburing.a")]
    if (headers / "liburing.h").exists() and libraries:
        target = folder / LIBURING
        shutil.copytree(headers / "liburing", target / "liburing", dirs_exist_ok=True)
        shutil.copy(headers / "liburing.h", target)
        shutil.copy(libraries[0], target)
    else:
        print("liburing is not on this machine, so the build there has no io_uring engine")


def install(wheels: Path, environment: Path, run: Run) -> Path:
    """Make a virtual environment with all of `wheels` and the package, built from the sources;
    `run(*command)` raises where a command fails. Returns its Python."""
    run(sys.executable, "-m", "venv", environment)
    python = environment / "bin" / "python"
    # What this Python has, also where it is that of a virtual environment; found after the wheels.
    (site,) = environment.glob("lib/python3*/site-packages")
    (site / "parent.pth").write_text(
        "".join(f"{each}\n" for each in sys.path if each.endswith("-packages"))
    )
    pip = (python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps")
    run(*pip, *sorted(wheels.glob("*.whl")))
    defines = []
    if (wheels / LIBURING).is_dir():
        where = (wheels / LIBURING).absolute()
        defines += [f"-Ccmake.define.INFINITY_LIBURING_INCLUDE={where}"]
        defines += [f"-Ccmake.define.INFINITY_LIBURING_LIBRARY={where / 'liburing.a'}"]
    build = f"-Cbuild-dir={environment / 'build'}"
    run(*pip, "--no-build-isolation", build, *defines, ROOT)
    return python


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--python", default="3.12", help="version of Python on that machine")
    options = parser.parse_args()
    collect(options.folder, options.python)
    nbytes = sum(path.stat().st_size for path in options.folder.rglob("*") if path.is_file())
    print(f"{options.folder}: {nbytes / (1 << 20):.1f} MiB")


if __name__ == "__main__":
    main()
