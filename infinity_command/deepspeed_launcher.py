"""DeepSpeed's command line `deepspeed [options] script.py ...`, as one of torchrun.

Imports neither `infinity` nor torch.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

LOCAL_RANK = "INFINITY_LOCAL_RANK_ARGUMENT"
"""Set for ranks whose script gets `--local_rank=N` as its first argument, as with DeepSpeed."""
HOSTS = "/job/hostfile"
"""Where DeepSpeed looks for the hosts of a job."""
_IGNORED = (
    "--bind_cores_to_rank",
    "--save_pid",
    "--no_ssh_check",
    "--force_multi",
    "-q",
    "--quiet",
)
_IGNORED_VALUES = ("--launcher", "--launcher_args", "--log_level", "--ssh_port", "--venv_script")


def translated(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The arguments of `torchrun` that start the same processes on this machine, and variables of
    the environment for them.

    Raises `ValueError` for several nodes, with the line to type, and for options without a
    counterpart in torchrun.
    """
    asked = _parsed(arguments)
    program = [asked.script, *asked.rest]
    if not asked.no_python:
        program = ["infinity", "run", *(["-m"] if asked.module else []), *program]
    _refuse(asked, program)
    options = [f"--nproc-per-node={_count(asked)}", f"--master-port={asked.master_port}"]
    if asked.master_addr:
        options.append(f"--master-addr={asked.master_addr}")
    if asked.enable_each_rank_log not in ("", "None"):
        options += [f"--log-dir={asked.enable_each_rank_log}", "--redirects=3"]
    if not asked.no_python:  # the interpreter of this process, whatever is on the path
        program[:1] = [sys.executable, "-m", "infinity_command"]
    environment = {} if asked.no_local_rank else {LOCAL_RANK: "1"}
    if _included(asked):
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(_included(asked))
    return [*options, "--no-python", *program], environment


def run(arguments: Sequence[str]) -> NoReturn:
    """Become torchrun. Raises `ValueError` as `translated` does."""
    line, environment = translated(arguments)
    os.environ.update(environment)
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *line])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"deepspeed: {message}")


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="deepspeed", allow_abbrev=False)
    add = parser.add_argument
    add("-H", "--hostfile", default=HOSTS)
    add("-i", "--include", default="")
    add("-e", "--exclude", default="")
    add("--num_nodes", type=int, default=-1)
    add("--num_gpus", "--num_accelerators", type=int, default=-1)
    add("--master_port", type=int, default=29500)
    add("--master_addr", default="")
    add("--node_rank", type=int, default=-1)
    add("--enable_each_rank_log", default="None")
    add("--bind_core_list", default="")
    add("--autotuning", default="")
    for flag in ("--module", "--no_python", "--no_local_rank", "--no_ssh", *_IGNORED):
        add(flag, action="store_true")
    for name in _IGNORED_VALUES:
        add(name)
    add("script")
    add("rest", nargs=argparse.REMAINDER)
    return parser.parse_args(list(arguments))


def _refuse(asked: argparse.Namespace, program: Sequence[str]) -> None:
    """Raise `ValueError` for what one torchrun on this machine cannot do."""
    reasons = {
        "--autotuning": "the engine plans by itself; leave it out",
        "--bind_core_list": "torchrun binds no cores; use numactl, or leave it out",
        "--exclude": "torchrun starts one process for each GPU that it sees; set "
        "CUDA_VISIBLE_DEVICES, and give --num_gpus",
    }
    for name, reason in reasons.items():
        if getattr(asked, name[2:]):
            raise ValueError(f"deepspeed {name} is not supported: {reason}")
    nodes = _several_nodes(asked)
    if nodes:
        raise ValueError(
            f"deepspeed {nodes}, and this command starts processes on one; type on each node: "
            "torchrun --nnodes N --node-rank R --nproc-per-node GPUS --master-addr HOST "
            f"--master-port {asked.master_port} --no-python {' '.join(program)}"
        )


def _several_nodes(asked: argparse.Namespace) -> str:
    """What asks for several nodes; empty where nothing does."""
    if asked.num_nodes > 1:
        return f"--num_nodes {asked.num_nodes} asks for several nodes"
    if asked.no_ssh or asked.node_rank > 0:
        return "--no_ssh asks for several nodes"
    if "@" in asked.include:
        return f"--include {asked.include} asks for several nodes"
    hosts = _hosts(Path(asked.hostfile))
    if len(hosts) > 1 and asked.num_nodes < 0 and not asked.include:
        return f"--hostfile {asked.hostfile} names {len(hosts)} nodes"
    return ""


def _hosts(file: Path) -> list[str]:
    """The first word of each line that says `slots=`."""
    if not file.is_file():
        return []
    return re.findall(r"^(?!#)(\S+)\s+slots=\d+", file.read_text(), re.MULTILINE)


def _included(asked: argparse.Namespace) -> list[str]:
    _, _, slots = asked.include.partition(":")
    return [slot for slot in slots.split(",") if slot]


def _count(asked: argparse.Namespace) -> int:
    """As many processes as asked for, else one for each GPU, or one."""
    if _included(asked):
        return len(_included(asked))
    if asked.num_gpus > 0:
        return int(asked.num_gpus)
    import torch

    return max(1, torch.accelerator.device_count())
