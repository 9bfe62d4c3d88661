#!/usr/bin/env python3
"""A training step at several ranks side by side: data parallel, FSDP2, DeepSpeed ZeRO-3 and
infinity's stage 3.

Model, weights, optimizer, precision and most of the ways are those of `step.py` beside this file.
Every rank trains on rows of its own, the same in every step, so that the loss falls and depends on
what the other ranks have. Ways:
  alone            every rank for itself, nothing is sent: what a step takes without communication,
                   and the proof that the comparison of losses sees whether ranks train together
  ddp              DistributedDataParallel over bf16 parameters, fp32 masters beside them
  fsdp2            fully_shard, fp32 shards, gathered and reduced in bf16; embedding, every block
                   and head are units
  fsdp2-offload    the same with CPUOffloadPolicy, which on a machine without a GPU has nowhere else
                   to go
  deepspeed-cpu    ZeRO-3, parameters and optimizer offloaded to host memory; it keeps up to a
                   billion gathered parameters (its default), so that all of this model are gathered
                   once per step
  infinity-memory  every state in the compute device's memory, with room for all units: they are
                   gathered once per step
  infinity-cpu     states in host memory, parameters streaming through a small budget
  infinity-nvme    parameters and optimizer on NVMe, one directory per rank, small budgets
All ranks run on this machine over gloo and the loopback device, with what torchrun would set in
their environment. In each round every way has its turn in a group of new processes, in changing
order; steps that are discarded go first.

A step lasts from one barrier of all ranks to the next. Bytes sent are what the kernel counts for
each TCP socket of a rank (TCP_INFO, tcpi_bytes_sent): what gloo gives to send, its own few bytes
per message included, without TCP and IP headers. Beside it stands the loopback device's own count,
headers, acknowledgements and whoever else uses it included, per rank. Theory is that of rings, in
bytes of all parameters: 2(N-1)/N data parallel, 3(N-1)/N for ZeRO-3 (two gathers, one
reduce-scatter), 2(N-1)/N where units are gathered once per step. Gloo, however, makes a
reduce-scatter by an all-reduce, which sends twice as much; infinity sends the parts itself. `over
what gloo needs` counts it so. Memory is VmHWM of a rank during steps, the largest.

  python benchmarks/ranks.py --deepspeed-python /path/to/its/python --json
  benchmarks/results/ranks.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import step

if TYPE_CHECKING:
    from infinity.bench.summary import Row, Summary

QUESTION = (
    "What do several ranks send, and how long does their step take, beside FSDP2 and DeepSpeed?"
)
LIMIT = "DistributedDataParallel, in the same round"
MODEL = "34M"
TOLERANCE = 5e-4
"""Largest relative difference of a loss to the data-parallel one, where parameters and gradients
have 8 significant bits."""
MESSAGES = {
    "alone": (0, 0),
    "ddp": (0, 1),
    "fsdp2": (2, 1),
    "fsdp2-offload": (2, 1),
    "deepspeed-cpu": (1, 1),
    "infinity-memory": (1, 1),
    "infinity-cpu": (2, 1),
    "infinity-nvme": (2, 1),
}
"""How often each way gathers all parameters in a step, and how often it reduces all gradients (data
parallel to every rank)."""
# Offset of tcpi_bytes_sent in struct tcp_info of linux/tcp.h, from 4.19 on.
SENT_AT, TCP_INFO_BYTES = 200, 232

# ---- In a rank ----


class DataParallel(step.Plain):
    """The plain way, gradients averaged by DistributedDataParallel."""

    def __init__(self, options: argparse.Namespace) -> None:
        from torch.nn.parallel import DistributedDataParallel

        super().__init__(options)
        self._model = DistributedDataParallel(self._model)


class FullyShard:
    """FSDP2, and torch's fused AdamW over its fp32 shards."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )
        from transformers import LlamaForCausalLM

        model = LlamaForCausalLM(step.config_of(options.model))
        step.fill(model.named_parameters(), options.weights)
        self.count = sum(p.numel() for p in model.parameters())
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        offload = (
            CPUOffloadPolicy(pin_memory=False)
            if options.child.endswith("offload")
            else OffloadPolicy()
        )
        mesh = torch.distributed.init_device_mesh("cpu", (options.ranks,))
        for module in (model.model.embed_tokens, *model.model.layers, model.lm_head, model):
            fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), fused=True, **step.ADAM)

    def forward(self, values: dict[str, Any]) -> Any:
        return self._model(**values).loss

    def backward(self, loss: Any) -> None:
        loss.backward()

    def update(self) -> None:
        import torch

        torch.nn.utils.clip_grad_norm_(self._model.parameters(), step.CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def close(self) -> dict[str, Any]:
        return {}


def sent() -> int:
    """Bytes that this process gave to its TCP sockets to send and that went out, those sent again
    excluded."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # closed meanwhile, as the descriptor of this very listing is
            continue
        with copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
                total += (
                    struct.unpack_from("Q", info, SENT_AT)[0]
                    - struct.unpack_from("Q", info, SENT_AT + 8)[0]
                )
    return total


def loopback() -> int:
    """Bytes that the loopback device sent."""
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def train(options: argparse.Namespace) -> dict[str, Any]:
    """One rank of one run."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaForCausalLM  # noqa: F401

    if options.child.startswith("deepspeed"):
        import deepspeed  # noqa: F401
    elif options.child.startswith("infinity"):
        import infinity  # noqa: F401
    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    options.group, options.nvme = dist.group.WORLD, options.nvme / f"rank{rank}"
    options.nvme.mkdir()
    (base,) = step.status("VmRSS")
    torch.manual_seed(0)
    names = {
        "alone": step.Plain,
        "ddp": DataParallel,
        "fsdp2": FullyShard,
        "deepspeed": step.DeepSpeed,
        "infinity": step.Infinity,
    }
    run = names[options.child.partition("-")[0]](options)
    (whole,) = step.status("VmHWM")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what is resident
    losses, moments, counts, values = [], [], [], step.batch(rank, options)

    def meet() -> None:
        dist.barrier()
        moments.append(time.perf_counter())
        counts.append((sent(), loopback(), *step.moved()))

    meet()
    for _ in range(options.steps):
        loss = run.forward(values)
        run.backward(loss)
        run.update()
        losses.append(float(loss.detach()))
        del loss
        meet()
    step_s = [end - begin for begin, end in itertools.pairwise(moments[options.discard :])]
    changes = zip(counts[-1], counts[options.discard], strict=True)
    sent_bytes, looped, read, written = [
        (after - before) / len(step_s) for after, before in changes
    ]
    dist.barrier()
    (steady,) = step.status("VmHWM")
    facts = {
        "parameters": run.count,
        "step_s": step_s,
        "losses": losses,
        "sent": sent_bytes,
        "loopback": looped / options.ranks,
        "read_per_parameter": read / run.count,
        "written_per_parameter": written / run.count,
        "base_MiB": base,
        "peak_MiB": max(whole, steady),
        "peak_during_steps_MiB": steady,
    }
    facts |= run.close()
    dist.barrier()
    dist.destroy_process_group()
    return facts


# ---- In the parent ----


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def launch(
    options: argparse.Namespace, turn: step.Turn, way: str, weights: Path
) -> list[dict[str, Any]]:
    """Run all ranks of one way; returns what each says."""
    python = str(options.deepspeed_python) if way.startswith("deepspeed") else sys.executable
    common = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(options.ranks),
        "LOCAL_WORLD_SIZE": str(options.ranks),
        "LOCAL_SIZE": str(options.ranks),
        "GLOO_SOCKET_IFNAME": "lo",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": str(options.threads),
        "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
    }
    with tempfile.TemporaryDirectory(dir=options.nvme, prefix="infinity-ranks-") as folder:
        command = [
            python,
            __file__,
            "--child",
            way,
            "--model",
            options.model,
            "--weights",
            str(weights),
            "--nvme",
            folder,
            "--ranks",
            str(options.ranks),
            "--steps",
            str(options.steps),
            "--discard",
            str(options.discard),
            "--threads",
            str(options.threads),
            "--update",
            options.update,
        ]
        turn.take()
        outputs = [Path(folder) / f"said{rank}" for rank in range(options.ranks)]
        ranks = []
        for rank, output in enumerate(outputs):
            with output.open("w") as out, output.with_suffix(".errors").open("w") as errors:
                environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(subprocess.Popen(command, env=environment, stdout=out, stderr=errors))
        try:
            # All at once, so that one that fails is seen while the others wait for it.
            while any(rank.poll() is None for rank in ranks) and not any(
                rank.poll() for rank in ranks
            ):
                time.sleep(0.05)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        turn.end()
        for rank, output in zip(ranks, outputs, strict=True):
            if rank.returncode > 0:
                said = output.read_text()[-1000:]
                errors = output.with_suffix(".errors").read_text()[-4000:]
                raise SystemExit(f"{way} failed:\n{said}\n{errors}")
        return [json.loads(output.read_text().strip().splitlines()[-1]) for output in outputs]


def theory(way: str, ranks: int, nbytes: int) -> dict[str, float]:
    """Bytes that a rank sends in a step, by rings and as gloo has it, for `nbytes` of
    parameters."""
    gathers, reductions = MESSAGES[way]
    part = nbytes * (ranks - 1) / ranks
    once = part * (gathers + reductions)
    twice = once + part * reductions
    return {
        "ring": twice if gathers == 0 else once,
        "gloo": once if way.startswith("infinity") else twice,
    }


def rows_of(options: argparse.Namespace, runs: dict[str, list[list[dict[str, Any]]]]) -> list[Row]:
    """A row for each way: over rounds, what each round's steps had as their median."""
    # Not in a rank: it has packages of its own, and its memory counts.
    from infinity.bench.summary import Row, Spread

    times = {
        way: [statistics.median(ranks[0]["step_s"]) for ranks in mine] for way, mine in runs.items()
    }
    baseline = [rank["losses"] for rank in runs["ddp"][0]]
    sent_by_ddp = statistics.mean(rank["sent"] for ranks in runs["ddp"] for rank in ranks)
    rows = []
    for way, mine in runs.items():
        every = [rank for ranks in mine for rank in ranks]
        sent = Spread.of([rank["sent"] for rank in every])
        expected = theory(way, options.ranks, every[0]["parameters"] * 2)
        facts: dict[str, Any] = {"sent_over_ddp_ratio": sent.median / sent_by_ddp}
        facts |= {f"theory_{name}_bytes": value for name, value in expected.items()}
        for key, name in (
            ("peak_during_steps_MiB", "peak_during_steps_mib"),
            ("read_per_parameter", "read_bytes_per_parameter"),
            ("written_per_parameter", "written_bytes_per_parameter"),
        ):
            facts[name] = statistics.median(max(rank[key] for rank in ranks) for ranks in mine)
        over = [
            max(rank["peak_during_steps_MiB"] - rank["base_MiB"] for rank in ranks)
            for ranks in mine
        ]
        facts["over_imports_mib"] = statistics.median(over)
        facts["loss_differs_from_ddp_ratio"] = max(
            abs(a - b) / b
            for ranks in mine
            for rank, other in zip(ranks, baseline, strict=True)
            for a, b in zip(rank["losses"], other, strict=True)
        )
        rows.append(
            Row(
                name=way,
                unit="s",
                rounds=options.rounds,
                value=Spread.of(times[way]),
                ratio=Spread.of([a / b for a, b in zip(times[way], times["ddp"], strict=True)]),
                others={
                    "sent_bytes": sent,
                    "loopback_bytes": Spread.of([rank["loopback"] for rank in every]),
                },
                facts=facts,
            )
        )
    return rows


def check(rows: list[Row]) -> None:
    """Every way trains what data parallel does; ends the program where one does not, or where that
    could not be seen."""
    differences: dict[str, Any] = {
        row.name: row.facts["loss_differs_from_ddp_ratio"] for row in rows
    }
    alone = differences.pop("alone", None)
    wrong = [
        f"{way} by {value:.1e}" for way, value in differences.items() if not value <= TOLERANCE
    ]
    if wrong:
        raise SystemExit(
            f"losses differ from data parallel's by more than {TOLERANCE}: {', '.join(wrong)}"
        )
    if alone is not None and not alone > 10 * TOLERANCE:
        raise SystemExit(
            f"ranks that train alone differ by {alone:.1e} only: a way that does the same "
            "would not be seen"
        )


def measure(options: argparse.Namespace) -> Summary:
    """All rounds."""
    from infinity.bench.summary import Summary

    turn = step.Turn(options.lock)
    with tempfile.TemporaryDirectory(dir=options.nvme, prefix="infinity-weights-") as folder:
        weights = Path(folder) / "model.safetensors"
        if "deepspeed-cpu" in options.ways:
            step.child(options, turn, "build", options.model, weights)
        count = step.child(options, turn, "weights", options.model, weights)["parameters"]
        runs: dict[str, list[list[dict[str, Any]]]] = {way: [] for way in options.ways}
        for number in range(options.rounds):
            for way in random.Random(number).sample(options.ways, len(options.ways)):
                start = time.monotonic()
                runs[way].append(launch(options, turn, way, weights))
                last, took = runs[way][-1][0], time.monotonic() - start
                said = (
                    f"{statistics.median(last['step_s']):.2f} s a step, "
                    f"{last['sent'] / 1e6:.1f} MB sent, {took:.0f} s in all"
                )
                print(f"round {number + 1} {way}: {said}", file=sys.stderr)
    turn.end(at_once=True)
    settings = {key: value for key, value in vars(options).items() if key not in ("child", "lock")}
    return Summary.of(
        __file__,
        QUESTION,
        LIMIT,
        rows_of(options, runs),
        seeds=[0],
        settings=settings | step.surroundings(options, count),
    )


def main() -> None:
    """Measure and print; a child is one rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=step.MODELS, default=MODEL)
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=MESSAGES,
        default=list(MESSAGES),
        help="ddp is always one of them",
    )
    parser.add_argument(
        "--deepspeed-python",
        type=Path,
        help="a python that has DeepSpeed; without it that way is left out",
    )
    parser.add_argument(
        "--nvme", type=Path, help="directory on the drive (default: the one for temporary files)"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="of torch, in each rank")
    parser.add_argument(
        "--update",
        default="auto",
        choices=["auto", "speculative", "exact", "plain", "delayed"],
        help="of infinity",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--discard", type=int, default=2, help="steps at the start of each run that are not counted"
    )
    parser.add_argument("--lock", type=Path, help="a file to hold exclusively while ranks run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    # What `step` takes beside these.
    parser.set_defaults(device="cpu", batch=step.BATCH, sequence=step.SEQUENCE, keep_going=False)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(train(options)), flush=True)
        return
    options.ways = [way for way in MESSAGES if way == "ddp" or way in options.ways]
    if options.deepspeed_python is None:
        options.ways = [way for way in options.ways if not way.startswith("deepspeed")]
    summary = measure(options)
    for line in summary.table():
        print(line)
    check(summary.rows)
    summary.write(options.json)


if __name__ == "__main__":
    main()
