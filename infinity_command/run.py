"""`infinity run`: a script that was written for DeepSpeed, with a package `deepspeed` that this
project backs. Imports neither `infinity` nor torch, which the script does when it needs them.

The package lies in a directory of the wheel that is on no path. Here it comes first: on the path of
this process, and in PYTHONPATH for those that the script starts. The command `deepspeed` of scripts
of the shell is found in PATH, likewise.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from infinity_command import deepspeed_launcher, launched


def shim() -> Path:
    """The directory that holds the package `deepspeed`."""
    spec = importlib.util.find_spec("infinity")  # which imports nothing
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("infinity is not on the path of this Python")
    return Path(spec.submodule_search_locations[0]) / "deepspeed" / "shim"


def prepare() -> None:
    """Put the package and the command first on their paths, and give this process the number that
    a launcher gave it, or let it be the only rank.

    Raises `ValueError` where one of several processes does not know which of them it is.
    """
    directory = str(shim())
    real = _real_deepspeed()
    sys.path.insert(0, directory)
    paths = [directory, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    programs = [str(shim() / "bin"), *os.environ.get("PATH", os.defpath).split(os.pathsep)]
    os.environ["PATH"] = os.pathsep.join(dict.fromkeys(programs))
    os.environ["INFINITY_PYTHON"] = sys.executable
    launched.adopt(os.environ)
    # The configuration of one rank may come later, from the script; several ranks may want DDP.
    told = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    if told or os.environ.get("WORLD_SIZE", "1") == "1":
        launched.keep_deepspeed_on_cpu(os.environ)
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(_free_port()))
        os.environ[launched.ALONE] = str(os.getpid())
    if real and os.environ["RANK"] == "0":
        sys.stderr.write(
            f"infinity: `import deepspeed` gives this engine here, not the DeepSpeed in {real}\n"
        )


def _real_deepspeed() -> str:
    """Where DeepSpeed is installed that a script would import without this command; empty where it
    is not, and in the processes of a command that has said so."""
    if str(shim()) in (os.environ.get("PYTHONPATH") or "").split(os.pathsep):
        return ""
    spec = importlib.util.find_spec("deepspeed")
    return str(Path(spec.origin).parent) if spec is not None and spec.origin else ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(target: str, arguments: Sequence[str], is_module: bool = False) -> None:
    """Run a script, or a module as `python -m` does, in this process."""
    if os.environ.pop(deepspeed_launcher.LOCAL_RANK, ""):
        arguments = [f"--local_rank={os.environ['LOCAL_RANK']}", *arguments]
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
    words = arguments[is_module:]
    if not words or words[0].startswith("-"):
        sys.stderr.write("infinity: run takes a script, or -m and a module; see infinity run -h\n")
        return 2
    target, *rest = words
    problem = _missing_module(target) if is_module else _no_script(target)
    command = _command(target) if problem and not is_module else ""
    if problem and not command:
        sys.stderr.write(f"infinity: {target}: {problem}\n")
        return 2
    try:
        prepare()
        if command == DEEPSPEED:
            deepspeed_launcher.run(rest)
    except ValueError as error:
        sys.stderr.write(f"infinity: {error}\n")
        return 2
    if command:
        os.execv(command, [command, *rest])
    run(target, rest, is_module)
    return 0


DEEPSPEED = "deepspeed"
"""The command line of DeepSpeed, which is torchrun's here, also where DeepSpeed is installed."""


def _command(name: str) -> str:
    """The program of that name, as accelerate's: beside this Python, else on the path; empty where
    there is none."""
    if name == DEEPSPEED:
        return name
    if not name or os.sep in name:
        return ""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return shutil.which(name, path=path) or ""


def _no_script(path: str) -> str:
    """Why `path` cannot be run; empty where it can."""
    if not path or not Path(path).exists():
        return "no such script" + ("" if os.sep in path else ", and no command of that name")
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
