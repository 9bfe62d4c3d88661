#!/usr/bin/env python3
"""What a machine with a GPU and without a package index needs, beside torch and compilers.

Here, where there is an index: collect wheels for its Python, and the libraries of the drive's I/O
(liburing, and libaio for DeepSpeed; Debian's liburing-dev and libaio-dev):
  benchmarks/gpu/wheels.py DIR [--python 3.12]
There: build the package into a folder that is kept, and measure:
  benchmarks/gpu/run_all --wheels DIR ...

Needs no virtual environment there: `pip --target` fills a folder, which goes on PYTHONPATH. torch,
numpy, scikit-build-core, pybind11, cmake and ninja are those of the machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HAVE = ("torch", "numpy", "triton", "nvidia_*", "cuda_*", "setuptools")
"""What that machine has, or does not need, so that no wheel of it is carried: torch alone has
gigabytes."""
NEEDED = (
    *("pydantic", "safetensors", "psutil", "typer", "rich"),
    *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "transformers"),
)
"""What the package needs, and its tests and benchmarks on a GPU."""
PEERS = ("hjson", "py-cpuinfo", "einops", "msgpack", "torchao")
"""What DeepSpeed needs beside, and torchao."""
DEEPSPEED = "deepspeed==0.19.8"
MOST_BYTES = 60 << 20
PLATFORMS = (
    *("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64"),
    *("manylinux2014_x86_64", "any"),
)
LIBRARIES = {"liburing": "liburing.a", "libaio": "libaio.so"}
"""A header and what is linked with it, by the folder in which they are carried."""

Run = Callable[..., None]


def collect(folder: Path, python: str) -> None:
    """Fill `folder` with the wheels, in the tested versions, and with the libraries."""
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip"]
    download = [*pip, "download", "--quiet", "--dest", folder, "--only-binary", ":all:"]
    download += ["--python-version", python]
    download += [part for platform in PLATFORMS for part in ("--platform", platform)]
    subprocess.run([*download, "-c", ROOT / "constraints.txt", *NEEDED], check=True)
    subprocess.run([*download, "--no-deps", *PEERS], check=True)
    # There is no wheel of it. Without operators: those that a run needs are compiled there.
    environment = os.environ | {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryDirectory() as scratch:
        make = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", scratch]
        subprocess.run([*make, DEEPSPEED], check=True, env=environment)
        for wheel in Path(scratch).glob("*.whl"):
            shutil.copy(wheel, folder)
    for package in HAVE:
        for wheel in folder.glob(f"{package}-*.whl"):
            wheel.unlink()
    for name, library in LIBRARIES.items():
        _collect_library(folder, name, library)


def missing() -> list[str]:
    """The libraries that this machine lacks."""
    return [
        name
        for name, library in LIBRARIES.items()
        if not Path(f"/usr/include/{name}.h").exists()
        or not any(Path("/usr/lib").glob(f"**/{library}"))
    ]


def _collect_library(folder: Path, name: str, library: str) -> None:
    headers, found = Path("/usr/include"), [*Path("/usr/lib").glob(f"**/{library}")]
    target = folder / name
    target.mkdir(exist_ok=True)
    if (headers / name).is_dir():
        shutil.copytree(headers / name, target / name, dirs_exist_ok=True)
    shutil.copy(headers / f"{name}.h", target)
    shutil.copy(found[0], target / library)
    if library.endswith(".so"):  # a program asks for the name that the library says
        shutil.copy(found[0], target / found[0].resolve().name.rsplit(".", 2)[0])


def install(wheels: Path, kept: Path, run: Run, architecture: str | None = None) -> dict[str, str]:
    """Fill `kept`/site with `wheels` and the package, built from the sources for one CUDA
    `architecture` (as "90"), unless it is there; `run(*command)` raises where a command fails.

    Returns the environment in which Python finds them.
    """
    site = kept / "site"
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    }
    aio = (wheels / "libaio").absolute()
    if aio.is_dir():
        environment |= {"CFLAGS": f"-I{aio}", "LDFLAGS": f"-L{aio}", "LD_LIBRARY_PATH": str(aio)}
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps")
    pip += ("--upgrade", "--target", str(site))
    if architecture is not None:
        environment["CUDAARCHS"] = architecture
    os.environ |= environment
    if not site.is_dir():
        run(*pip, *sorted(wheels.glob("*.whl")))
    defines = []
    uring = (wheels / "liburing").absolute()
    if uring.is_dir():
        defines += [f"-Ccmake.define.INFINITY_LIBURING_INCLUDE={uring}"]
        defines += [f"-Ccmake.define.INFINITY_LIBURING_LIBRARY={uring / 'liburing.a'}"]
    run(*pip, "--no-build-isolation", f"-Cbuild-dir={kept / 'build'}", *defines, ROOT)
    return environment


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--python", default="3.12", help="version of Python on that machine")
    options = parser.parse_args()
    if lacking := missing():
        packages = " ".join(f"{name}-dev" for name in lacking)
        sys.exit(f"{' and '.join(lacking)} must be here, to be carried: apt-get install {packages}")
    collect(options.folder, options.python)
    files = [path for path in options.folder.rglob("*") if path.is_file()]
    for path in sorted(files):
        print(f"{path.stat().st_size:>12,}  {path.relative_to(options.folder)}")
    nbytes = sum(path.stat().st_size for path in files)
    print(f"{options.folder}: {nbytes / (1 << 20):.1f} MiB in {len(files)} files")
    if nbytes > MOST_BYTES:
        sys.exit(f"that is more than the {MOST_BYTES >> 20} MiB that a machine may take at once")


if __name__ == "__main__":
    main()
