"""`infinity run`: a script that was written for DeepSpeed, with a package `deepspeed` that this
project backs. Imports neither `infinity` nor torch, which the script does when it needs them.

The package lies in a directory of the wheel that is on no path. Here it comes first: on the path of
this process, and in PYTHONPATH for those that the script starts.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import socket
import sys
from collections.abc import Sequence
from pathlib import Path


def shim() -> Path:
    """The directory that holds the package `deepspeed`."""
    spec = importlib.util.find_spec("infinity")  # which imports nothing
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("infinity is not on the path of this Python")
    return Path(spec.submodule_search_locations[0]) / "deepspeed" / "shim"


def prepare() -> None:
    """Put the package first on the path, and let this process be the only rank where no launcher
    has started it."""
    directory = str(shim())
    sys.path.insert(0, directory)
    paths = [directory, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(_free_port()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(target: str, arguments: Sequence[str], is_module: bool = False) -> None:
    """Run a script, or a module as `python -m` does, in this process."""
    prepare()
    sys.argv = [target, *arguments]
    if is_module:
        sys.path.insert(1, str(Path.cwd()))
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(1, str(Path(target).resolve().parent))
        runpy.run_path(target, run_name="__main__")


def main(arguments: Sequence[str]) -> int:
    """The command, without the library for command lines, which would take long to import; returns
    the exit status where nothing was run."""
    is_module = arguments[0] == "-m"
    rest = arguments[is_module:]
    if not rest or rest[0].startswith("-"):
        sys.stderr.write("infinity: run takes a script, or -m and a module; see infinity run -h\n")
        return 2
    problem = _missing_module(rest[0]) if is_module else _no_script(rest[0])
    if problem:
        sys.stderr.write(f"infinity: {rest[0]}: {problem}\n")
        return 2
    run(rest[0], rest[1:], is_module)
    return 0


def _no_script(path: str) -> str:
    """Why `path` cannot be run; empty where it can."""
    if not path or not Path(path).exists():
        return "no such script"
    if Path(path).is_dir() and not Path(path, "__main__.py").exists():
        return "a directory without __main__.py; name a script in it"
    return ""


def _missing_module(name: str) -> str:
    """Why there is no module `name`, or a part of it; empty where its packages can be imported."""
    top = name.partition(".")[0]  # what is below imports the package, which is for `run`
    before, sys.path = sys.path, [str(shim()), str(Path.cwd()), *sys.path]
    try:
        found = bool(top) and importlib.util.find_spec(top) is not None
    finally:
        sys.path = before
    return "" if found else f"no module of the name {top!r}; it is searched in {Path.cwd()} first"
