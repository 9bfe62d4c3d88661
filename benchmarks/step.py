#!/usr/bin/env python3
"""A training step side by side: plain PyTorch in memory, DeepSpeed ZeRO-3 with CPU and NVMe
offload, and infinity.

One Llama-style model (random weights, the same file for all; random tokens, the same seed), bf16
parameters, fp32 masters, AdamW, clipping at 1.0, the same number of torch threads. Ways:
  plain            everything in memory: torch's fused AdamW over fp32 masters, bf16 copies
  deepspeed-cpu    ZeRO-3, parameters and optimizer offloaded to host memory
  deepspeed-nvme   the same to NVMe at the best setting found: both pipelines, 16 buffers
                   (parameters stay in memory: with max_in_cpu=0 it stops in an assertion)
  infinity-memory  every state in the compute device's memory
  infinity-cpu     states in host memory, parameters streaming through a small budget
  infinity-nvme    parameters and optimizer on NVMe, small budgets
  infinity-nvme-unit  the same with clip="unit": each unit is clipped by its own norm
  torchao-cpu      torchao's CPUOffloadOptimizer over bf16 parameters on the GPU, gradients
                   offloaded: bf16 states, no masters, no clipping (its gradients are gone when they
                   could be); needs a GPU
  fsdp2-cpu        fully_shard on one rank with CPUOffloadPolicy: fp32 parameters, gradients and
                   moments in host memory, bf16 compute; needs a GPU
The last two run where their packages are; a way that cannot run here is left out with a sentence,
and with --keep-going one that fails, too. With --device cuda models run on the GPU, and a step ends
when the GPU has. Every run is a process of its own; in each round every way has its turn, in
changing order. Steps that are discarded go first. Time is that of whole steps, so updates that run
beside the next step are paid there. Bytes are the kernel's count for the process (/proc/self/io),
memory is VmHWM of the whole run, loading included; `during steps` is its peak after loading. The
drive alone is measured in every round too: large writes and reads in memory on huge pages, with the
same I/O engine.

`--models` also takes a config.json. Such a model is drawn on the device by each way itself, and its
blocks are checkpointed. benchmarks/gpu/sizes.py says where infinity keeps states. DeepSpeed's
parameters stay on the device.

  python benchmarks/step.py --deepspeed-python /path/to/its/python --json
  benchmarks/results/step.json
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinity.bench.summary import Row, Spread

QUESTION = "How long does a training step take beside DeepSpeed, FSDP2 and torchao?"
LIMIT = "plain PyTorch with everything in memory, in the same round"
MODELS = {"2M": (2, 128), "34M": (8, 512), "98M": (12, 768), "316M": (24, 1024), "1.2B": (24, 2048)}
"""Layers and width."""
BUDGETS = {
    "2M": ("16MiB", "32MiB"),
    "34M": ("32MiB", "96MiB"),
    "98M": ("64MiB", "420MiB"),
    "316M": ("96MiB", "1280MiB"),
    "1.2B": ("768MiB", "5GiB"),
}
"""gpu_memory and cpu_memory of infinity-nvme: the process then takes 0.3 of the memory that
DeepSpeed does."""
WHOLE = {"1.2B": "28GiB"}
"""The budget that holds all states, where it is not 8 GiB."""
WAYS = (
    "plain",
    "deepspeed-cpu",
    "deepspeed-nvme",
    "infinity-memory",
    "infinity-cpu",
    "infinity-nvme",
    "infinity-nvme-unit",
    "torchao-cpu",
    "fsdp2-cpu",
)
BUILDS = {"build-cpu": ("CPUAdamBuilder",), "build-nvme": ("AsyncIOBuilder", "CPUAdamBuilder")}
"""What a way of DeepSpeed has compiled before it, so that one that cannot be compiled leaves the
others."""
VOCABULARY, BATCH, SEQUENCE, CLIP = 8192, 2, 256, 1.0
ADAM = {"lr": 1e-4, "weight_decay": 0.01}
BANDWIDTH_BYTES = 512 << 20
HOLD_S = 60

# ---- In the child ----


def status(*names: str) -> list[float]:
    """Values of /proc/self/status in MiB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return [int(lines[name].split()[0]) / 1024 if name in lines else 0.0 for name in names]


def moved() -> tuple[int, int]:
    """Bytes that this process read from and wrote to block devices."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])


def is_described(model: str) -> bool:
    """Whether a config.json says what it is; else it is one of `MODELS`."""
    return model.endswith(".json")


def called(model: str) -> str:
    """Its name in a table."""
    return Path(model).stem if is_described(model) else model


def config_of(model: str) -> Any:
    from transformers import LlamaConfig

    if is_described(model):
        return LlamaConfig.from_json_file(model)
    layers, width = MODELS[model]
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def batches(step: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The micro-batches of a step."""
    import torch

    words = config_of(options.model).vocab_size
    shape = (options.accumulate, options.batch, options.sequence)
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, words, shape, generator=generator).to(options.device)
    return [{"input_ids": each, "labels": each, "use_cache": False} for each in ids]


def config_for(options: argparse.Namespace, way: str, **tuning: Any) -> Any:
    """The `Config` with which a model of a config.json fits on this machine."""
    sys.path.insert(0, str(Path(__file__).parent / "gpu"))
    import sizes

    shape, tokens = json.loads(Path(options.model).read_text()), options.batch * options.sequence
    given = sizes.machine(shape, tokens, options.nvme, options.device, options.host)
    over = {"infinity-cpu": sizes.in_host_memory, "infinity-nvme": sizes.states_on_drive}[way]
    return over(shape, given).config(options.nvme, **tuning)


def fill(named: Any, weights: Path, whole: Callable[[Any], Any] = nullcontext) -> None:
    """Copy the weights into the parameters of a model, one after the other."""
    import torch
    from safetensors import safe_open

    with safe_open(str(weights), framework="pt") as file, torch.no_grad():
        for name, parameter in named:
            with whole(parameter):
                parameter.data.copy_(file.get_tensor(name))


def in_bf16(options: argparse.Namespace) -> Any:
    """The model with bf16 parameters, on the device."""
    import torch
    from transformers import LlamaForCausalLM

    drawn_there = is_described(options.model)
    with torch.device(options.device if drawn_there else "cpu"):
        model = LlamaForCausalLM(config_of(options.model))
    # Not the buffers, as .to() would: rotary frequencies stay in fp32.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    if drawn_there:
        model.gradient_checkpointing_enable()
    else:
        fill(model.named_parameters(), options.weights)
    return model.to(options.device)


class Plain:
    """Masters, moments and bf16 parameters in memory."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        self._model = in_bf16(options)
        self._parameters = list(self._model.parameters())
        self._masters = [p.detach().float().requires_grad_(True) for p in self._parameters]
        self._optimizer = torch.optim.AdamW(self._masters, fused=True, **ADAM)
        self.count = sum(p.numel() for p in self._parameters)

    def forward(self, values: dict[str, Any]) -> Any:
        return self._model(**values).loss

    def backward(self, loss: Any) -> None:
        loss.backward()

    def update(self) -> None:
        import torch

        for master, parameter in zip(self._masters, self._parameters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self._masters, CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for master, parameter in zip(self._masters, self._parameters, strict=True):
                parameter.copy_(master)

    def close(self) -> dict[str, Any]:
        return {}


class DeepSpeed:
    """ZeRO-3 on one rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        import deepspeed
        from transformers import LlamaForCausalLM

        device = options.child.removeprefix("deepspeed-")
        place: dict[str, Any] = {"device": device, "pin_memory": True}
        pipeline: dict[str, Any] = {}
        if device == "nvme":
            place["nvme_path"] = str(options.nvme)
            pipeline = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 16}
        settings = {
            "train_micro_batch_size_per_gpu": options.batch,
            "gradient_accumulation_steps": options.accumulate,
            "gradient_clipping": CLIP,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": ADAM},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": place | pipeline,
                **(
                    {"sub_group_size": 200_000_000}
                    if is_described(options.model)
                    else {
                        "sub_group_size": 20_000_000,
                        "stage3_param_persistence_threshold": 10_000,
                        "offload_param": place
                        | {
                            "buffer_count": 8,
                            "buffer_size": 20_000_000,
                            "max_in_cpu": 1_000_000_000,
                        },
                    }
                ),
            },
            "aio": {
                "block_size": 1 << 20,
                "queue_depth": 32,
                "intra_op_parallelism": 2,
                "single_submit": False,
                "overlap_events": True,
            },
        }
        deepspeed.init_distributed("gloo" if options.device == "cpu" else "nccl")
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = LlamaForCausalLM(config_of(options.model))
        if is_described(options.model):
            model.gradient_checkpointing_enable()
        else:
            fill(
                model.named_parameters(),
                options.weights,
                lambda p: deepspeed.zero.GatheredParameters(p, modifier_rank=0),
            )
        self.count = sum(p.ds_numel for p in model.parameters())
        self._engine, *_ = deepspeed.initialize(model=model, config=settings)

    def forward(self, values: dict[str, Any]) -> Any:
        return self._engine(**values).loss

    def backward(self, loss: Any) -> None:
        self._engine.backward(loss)

    def update(self) -> None:
        self._engine.step()

    def close(self) -> dict[str, Any]:
        return {}


def placement_of_preset(options: argparse.Namespace, way: str) -> dict[str, Any]:
    """The fields of `Config` for one of `MODELS`."""
    states, whole = ("parameters", "gradients", "optimizer"), WHOLE.get(options.model, "8GiB")
    gpu, cpu = BUDGETS[options.model]
    return {
        "infinity-memory": dict.fromkeys(states, "gpu")
        | {"gpu_memory": whole, "cpu_memory": whole},
        "infinity-cpu": dict.fromkeys(states, "cpu") | {"gpu_memory": gpu, "cpu_memory": whole},
        "infinity-nvme": {"nvme": options.nvme, "gpu_memory": gpu, "cpu_memory": cpu},
    }[way]


class Infinity:
    """The engine under test."""

    def __init__(self, options: argparse.Namespace) -> None:
        from transformers import LlamaForCausalLM

        import infinity
        from infinity.bench.step.train import fill_randomly

        way, by_unit = options.child.removesuffix("-unit"), options.child.endswith("-unit")
        weights = options.weights
        tuning = {"device": options.device, "threads": options.threads, "update": options.update}
        with infinity.init(exact=False):
            model = LlamaForCausalLM(config_of(options.model))
            if is_described(options.model):
                model.gradient_checkpointing_enable()
                fill_randomly(model, seed=0, scale=0.02)
                weights = None
                config = config_for(options, way, **tuning)
            else:
                config = infinity.Config(
                    precision="bf16", tuning=tuning, **placement_of_preset(options, way)
                )
        self._model = infinity.wrap(
            model, config, weights=weights, group=getattr(options, "group", None)
        )
        self._engine = infinity.engine(self._model)
        clip = "unit" if by_unit else "global"
        self._optimizer = infinity.AdamW(
            self._model.parameters(), max_grad_norm=CLIP, clip=clip, **ADAM
        )
        self.count = sum(p.numel() for p in self._model.parameters())

    def forward(self, values: dict[str, Any]) -> Any:
        return self._model(**values).loss

    def backward(self, loss: Any) -> None:
        loss.backward()

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def close(self) -> dict[str, Any]:
        report = self._engine.report()
        planned = report.planned_read_per_parameter, report.planned_written_per_parameter
        self._engine.close()
        return {
            "planned_per_parameter": planned,
            "seconds": report.seconds,
            "tiers_MiB": mebibytes(report.peaks),
        }


class TorchAo(Plain):
    """Parameters on the GPU, the optimizer's states in host memory."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from torchao.optim import CPUOffloadOptimizer

        self._model = in_bf16(options)
        self._optimizer = CPUOffloadOptimizer(
            self._model.parameters(), torch.optim.AdamW, offload_gradients=True, fused=True, **ADAM
        )
        self.count = sum(p.numel() for p in self._model.parameters())

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


class Fsdp2(Plain):
    """Every block, and what is around them, sharded over one rank, at home in host memory."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from torch import distributed
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
        from transformers import LlamaForCausalLM

        distributed.init_process_group("gloo" if options.device == "cpu" else "cuda:nccl,cpu:gloo")
        mesh = distributed.init_device_mesh(options.device, (1,))
        self._model = LlamaForCausalLM(config_of(options.model)).float()
        fill(self._model.named_parameters(), options.weights)
        offload = CPUOffloadPolicy(pin_memory=options.device != "cpu")
        policy = {
            "mesh": mesh,
            "offload_policy": offload,
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        }
        for block in self._model.model.layers:
            fully_shard(block, **policy)
        fully_shard(self._model, **policy)
        for module in self._model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(options.device)
        self.count = sum(p.numel() for p in self._model.parameters())
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True, **ADAM)

    def update(self) -> None:
        import torch

        torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def close(self) -> dict[str, Any]:
        from torch import distributed

        distributed.destroy_process_group()
        return {}


def missing(options: argparse.Namespace) -> str:
    """Why this way cannot run here; "" where it can."""
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        return "torch sees no CUDA device"
    kind = options.child.partition("-")[0]
    if kind in ("torchao", "fsdp2") and options.device == "cpu":
        return f"{kind} offloads from a GPU; there is none in this run"
    package = {"deepspeed": "deepspeed", "torchao": "torchao"}.get(kind)
    if package is not None and importlib.util.find_spec(package) is None:
        return f"{package} is not installed for {sys.executable}"
    return ""


def mebibytes(values: dict[str, int]) -> dict[str, float]:
    return {name: round(value / (1 << 20), 1) for name, value in values.items()}


def train(options: argparse.Namespace) -> dict[str, Any]:
    """One run of one way."""
    import torch
    from transformers import LlamaForCausalLM  # noqa: F401

    why = missing(options)
    if why:
        return {"skipped": why}
    ways = {
        "plain": Plain,
        "deepspeed": DeepSpeed,
        "infinity": Infinity,
        "torchao": TorchAo,
        "fsdp2": Fsdp2,
    }
    way = ways[options.child.partition("-")[0]]
    cuda = options.device == "cuda"
    if way is DeepSpeed:
        import deepspeed  # noqa: F401
    elif way is Infinity:
        import infinity  # noqa: F401
    torch.set_num_threads(options.threads)
    (base,) = status("VmRSS")
    torch.manual_seed(0)
    run = way(options)
    (whole,) = status("VmHWM")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what is resident
    losses, rows, used = [], [], resource.getrusage(resource.RUSAGE_SELF)
    for step in range(options.steps):
        values, before, start = batches(step, options), moved(), time.perf_counter()
        parts, of_step = [0.0, 0.0, 0.0], []
        for micro, each in enumerate(values, 1):
            is_last, times = micro == len(values), [time.perf_counter()]
            loss = run.forward(each)
            times.append(time.perf_counter())
            run.backward(loss if way is DeepSpeed else loss / len(values))
            times.append(time.perf_counter())
            if is_last or way is DeepSpeed:  # which counts micro-batches itself
                run.update()
            if is_last and cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter())
            for part, (begin, end) in enumerate(itertools.pairwise(times)):
                parts[part] += end - begin
            of_step.append(loss.detach())
            del loss
        end = time.perf_counter()
        losses.append(float(torch.stack(of_step).mean()))
        rows.append(
            (
                end - start,
                *parts,
                *(now - then for now, then in zip(moved(), before, strict=True)),
            )
        )
    after = resource.getrusage(resource.RUSAGE_SELF)
    steady, locked, pinned = status("VmHWM", "VmLck", "VmPin")
    # Whole pieces on the drive, whatever the files' lengths say.
    disk = sum(
        (Path(d) / f).stat().st_blocks * 512 for d, _, files in os.walk(options.nvme) for f in files
    )
    columns = [list(column) for column in zip(*rows[options.discard :], strict=True)]
    step_s, forward_s, backward_s, update_s, read, written = columns
    facts = {
        "parameters": run.count,
        "step_s": step_s,
        "forward_s": forward_s,
        "backward_s": backward_s,
        "update_s": update_s,
        "read_per_parameter": statistics.mean(read) / run.count,
        "written_per_parameter": statistics.mean(written) / run.count,
        "disk_per_parameter": disk / run.count,
        "base_MiB": base,
        "peak_MiB": max(whole, steady),
        "peak_during_steps_MiB": steady,
        "locked_MiB": locked + pinned,
        "system_s_per_step": (after.ru_stime - used.ru_stime) / options.steps,
        "cpu_s_per_step": (after.ru_utime - used.ru_utime + after.ru_stime - used.ru_stime)
        / options.steps,
        "losses": losses,
        "tokens_per_s": [options.accumulate * options.batch * options.sequence / s for s in step_s],
        "peak_gpu_MiB": torch.cuda.max_memory_allocated() / (1 << 20) if cuda else 0.0,
    }
    return facts | run.close()


def bandwidth(options: argparse.Namespace) -> dict[str, Any]:
    """GB/s of the drive alone: large writes, then reads, in touched memory."""
    import torch

    from infinity import nvme

    tensors = list(nvme.empty(BANDWIDTH_BYTES, dtype=torch.uint8).split(16 << 20))
    items = [(tensor, options.nvme / f"piece-{i:03}") for i, tensor in enumerate(tensors)]
    result: dict[str, list[float]] = {"write_GBps": [], "read_GBps": []}
    for _ in range(3):
        for name, work in (("write_GBps", nvme.write_many), ("read_GBps", nvme.read_many)):
            start = time.perf_counter()
            work(items)
            result[name].append(BANDWIDTH_BYTES / 1e9 / (time.perf_counter() - start))
    speeds = {name: statistics.median(values) for name, values in result.items()}
    if options.device == "cuda":
        from infinity.measure.rates import multiplications

        device = torch.device(options.device)
        speeds["flops"] = statistics.median(multiplications(device, torch.bfloat16, rounds=3))
    return speeds


def write_weights(options: argparse.Namespace) -> dict[str, Any]:
    """The first values of the model's parameters, in a file."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(config_of(options.model)).to(torch.bfloat16)
    save_file({name: p.detach() for name, p in model.named_parameters()}, str(options.weights))
    return {"parameters": sum(p.numel() for p in model.parameters()), "torch": torch.__version__}


def build(options: argparse.Namespace) -> dict[str, Any]:
    """Have DeepSpeed compile what a way of `BUILDS` needs, which takes minutes the first time."""
    from deepspeed.ops import op_builder

    for name in BUILDS[options.child]:
        getattr(op_builder, name)().load(verbose=False)
    return {}


# ---- In the parent ----


class Turn:
    """Holds `path` exclusively while children run, for `HOLD_S` seconds and the child under way,
    where others measure, too."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("a")
        self._since: float | None = None

    def take(self) -> None:
        if self._file is not None and self._since is None:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._since = time.monotonic()

    def end(self, at_once: bool = False) -> None:
        if (
            self._file is not None
            and self._since is not None
            and (at_once or time.monotonic() - self._since > HOLD_S)
        ):
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._since = None


def child(
    options: argparse.Namespace, turn: Turn, way: str, model: str, weights: Path
) -> dict[str, Any]:
    """Run one child and return what it says."""
    python = (
        str(options.deepspeed_python) if way.startswith(("build", "deepspeed")) else sys.executable
    )
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_SIZE": "1",
        "DS_ACCELERATOR": options.device,
        "OMP_NUM_THREADS": str(options.threads),
        "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
    }
    with tempfile.TemporaryDirectory(dir=options.nvme, prefix="infinity-step-") as folder:
        command = [
            python,
            __file__,
            "--child",
            way,
            "--model",
            model,
            "--weights",
            str(weights),
            "--nvme",
            folder,
            "--steps",
            str(options.steps),
            "--discard",
            str(options.discard),
            "--threads",
            str(options.threads),
            "--update",
            options.update,
            "--device",
            options.device,
            "--batch",
            str(options.batch),
            "--accumulate",
            str(options.accumulate),
            "--sequence",
            str(options.sequence),
            *(["--host", str(options.host)] if options.host else []),
        ]
        if way not in BUILDS:
            turn.take()
        left = None if options.end is None else max(options.end - time.monotonic(), 0.1)
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=left,
            )
        except subprocess.TimeoutExpired:
            return {"skipped": f"it was ended after the {left:.0f} s that were left"}
        finally:
            turn.end()
    if done.returncode != 0 and options.keep_going and (way in WAYS or way in BUILDS):
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        return {"skipped": f"it failed: {last[-300:]}"}
    if done.returncode != 0:
        raise SystemExit(
            f"{way} with {model} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return json.loads(done.stdout.strip().splitlines()[-1])


def drive_alone(run: dict[str, Any], speeds: dict[str, float]) -> float:
    """Seconds that the drive would need for a step's bytes, first reading and then writing."""
    ns = (
        run["read_per_parameter"] / speeds["read_GBps"]
        + run["written_per_parameter"] / speeds["write_GBps"]
    )
    return run["parameters"] * ns / 1e9


FACTS = {
    "peak_gpu_MiB": "peak_gpu_mib",
    "peak_MiB": "peak_mib",
    "peak_during_steps_MiB": "peak_during_steps_mib",
    "locked_MiB": "locked_mib",
    "disk_per_parameter": "disk_bytes_per_parameter",
    "read_per_parameter": "read_bytes_per_parameter",
    "written_per_parameter": "written_bytes_per_parameter",
    "cpu_s_per_step": "cpu_seconds_per_step",
}
"""What a child says, of which the median over rounds is a fact, and the name of that."""


def rows_of(
    model: str, runs: dict[str, list[dict[str, Any]]], drive: list[dict[str, float]]
) -> list[Row]:
    """A row for each way, and the drive alone: over rounds, what each round's steps had as their
    median."""
    # Not in a child: it has packages of its own, and its memory counts.
    from infinity.bench.summary import Row, Spread

    times = {way: [statistics.median(run["step_s"]) for run in mine] for way, mine in runs.items()}

    def over(way: str, other: str) -> Spread:
        return Spread.of(
            [ours / theirs for ours, theirs in zip(times[way], times[other], strict=True)]
        )

    rows: list[Row] = []
    for way, mine in runs.items():
        others = {
            f"{part}_seconds": Spread.of([statistics.median(run[f"{part}_s"]) for run in mine])
            for part in ("forward", "backward", "update")
        }
        others["tokens_per_second"] = Spread.of(
            [statistics.median(run["tokens_per_s"]) for run in mine]
        )
        for other in ("deepspeed-cpu", "deepspeed-nvme"):
            if runs.get(other):
                others[f"step_over_{other}_ratio"] = over(way, other)
        if mine[0]["read_per_parameter"] + mine[0]["written_per_parameter"] > 1:
            alone = [drive_alone(run, speeds) for run, speeds in zip(mine, drive, strict=True)]
            others["drive_alone_seconds"] = Spread.of(alone)
        facts: dict[str, Any] = {
            name: statistics.median(run[key] for run in mine) for key, name in FACTS.items()
        }
        facts["over_imports_mib"] = statistics.median(
            run["peak_MiB"] - run["base_MiB"] for run in mine
        )
        if "planned_per_parameter" in mine[-1]:
            read, written = mine[-1]["planned_per_parameter"]
            facts |= {
                "planned_read_bytes_per_parameter": read,
                "planned_written_bytes_per_parameter": written,
            }
        if is_described(model):  # 6 operations of the model per parameter and token
            flops = 6.0 * mine[0]["parameters"] * statistics.median(mine[0]["tokens_per_s"])
            facts["model_flops_per_second"] = flops
            if "flops" in drive[0]:
                facts["of_matrix_multiplication_ratio"] = flops / drive[0]["flops"]
        elif "plain" in runs:
            pairs = zip(mine[0]["losses"], runs["plain"][0]["losses"], strict=True)
            facts["loss_differs_from_plain_ratio"] = max(abs(a - b) / b for a, b in pairs)
        ratio = over(way, "plain") if "plain" in runs else None
        value, name = Spread.of(times[way]), f"{called(model)}, {way}"
        rows.append(
            Row(
                name=name,
                unit="s",
                rounds=len(mine),
                value=value,
                ratio=ratio,
                others=others,
                facts=facts,
            )
        )
    for way, name in (("read_GBps", "reading"), ("write_GBps", "writing")):
        value = Spread.of([speeds[way] for speeds in drive])
        rows.append(
            Row(
                name=f"{called(model)}, the drive alone, {name}",
                unit="GB/s",
                rounds=len(drive),
                value=value,
            )
        )
    return rows


def surroundings(options: argparse.Namespace, parameters: int) -> dict[str, Any]:
    """The size of the model, the file system, and what DeepSpeed's python has."""
    folder = str(options.nvme or tempfile.gettempdir())
    stat = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True)
    facts = {"parameters": parameters, "file_system": stat.stdout.strip()}
    if options.deepspeed_python:
        code = "import importlib.metadata as m; print(m.version('deepspeed'), m.version('torch'))"
        found = subprocess.run(
            [str(options.deepspeed_python), "-c", code], capture_output=True, text=True, check=True
        )
        facts["deepspeed"], facts["deepspeed's torch"] = found.stdout.split()
    return facts


def measure(options: argparse.Namespace, model: str) -> tuple[list[Row], dict[str, Any]]:
    """All rounds of one model: its rows, and settings that say what was left out."""
    turn = Turn(options.lock)
    with tempfile.TemporaryDirectory(dir=options.nvme, prefix="infinity-weights-") as folder:
        weights = Path(folder) / "model.safetensors"
        count = 0
        if not is_described(model):
            count = child(options, turn, "weights", model, weights)["parameters"]
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in options.ways}
        drive, skipped = [], dict(options.skipped)
        for number in range(options.rounds):
            drive.append(child(options, turn, "bandwidth", model, weights))
            # The order of --ways is that of their worth, where time may run out.
            ways = options.ways
            if options.end is None:
                ways = random.Random(number).sample(ways, len(ways))
            for way in ways:
                if way in skipped:
                    continue
                last: dict[str, Any] = {}
                if number == 0 and (build := way.replace("deepspeed", "build")) in BUILDS:
                    last = child(options, turn, build, model, weights)
                if "skipped" not in last:
                    last = child(options, turn, way, model, weights)
                if "skipped" in last:
                    skipped[way] = last["skipped"]
                    print(f"{model} {way} is left out: {skipped[way]}", file=sys.stderr)
                    continue
                runs[way].append(last)
                count = last["parameters"]
                print(
                    (
                        f"{model} round {number + 1} {way}: "
                        f"{statistics.median(last['step_s']):.2f} s, {last['peak_MiB']:.0f} MiB"
                    ),
                    file=sys.stderr,
                )
    turn.end(at_once=True)
    runs = {way: mine for way, mine in runs.items() if way not in skipped}
    left_out = {f"{called(model)}, {way} is left out": why for way, why in skipped.items()}
    return rows_of(model, runs, drive), left_out | surroundings(options, count) | {
        f"{called(model)}_parameters": count
    }


def main() -> None:
    """Measure and print; a child measures one run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=["98M", "316M"],
        help=f"{', '.join(MODELS)}, or a config.json",
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument(
        "--deepspeed-python",
        type=Path,
        help="a python that has DeepSpeed; without it those ways are left out",
    )
    parser.add_argument(
        "--nvme", type=Path, help="directory on the drive (default: the one for temporary files)"
    )
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of torch"
    )
    parser.add_argument(
        "--update",
        default="auto",
        choices=["auto", "speculative", "exact", "plain", "delayed"],
        help="of infinity",
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where models run")
    parser.add_argument("--batch", type=int, default=BATCH, help="windows per step")
    parser.add_argument("--accumulate", type=int, default=1, help="forward passes per step")
    parser.add_argument(
        "--host", type=int, help="bytes of host memory that are free, where it shows less"
    )
    parser.add_argument(
        "--most-seconds",
        type=float,
        help="end the way that is under way then; those after it are left out",
    )
    parser.add_argument("--sequence", type=int, default=SEQUENCE, help="tokens per window")
    parser.add_argument(
        "--keep-going",
        action="store_true",
        help="leave out ways that fail, with the last line of the error",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--discard", type=int, default=2, help="steps at the start of each run that are not counted"
    )
    parser.add_argument("--lock", type=Path, help="a file to hold exclusively while a child runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.end = options.most_seconds and time.monotonic() + options.most_seconds
    if options.child:
        others = {"weights": write_weights, "bandwidth": bandwidth} | dict.fromkeys(BUILDS, build)
        result = others.get(options.child, train)(options)
        print(json.dumps(result), flush=True)
        return
    options.skipped = {}
    if options.deepspeed_python is None:
        options.skipped = {
            way: "no --deepspeed-python is given"
            for way in options.ways
            if way.startswith("deepspeed")
        }
        options.ways = [way for way in options.ways if not way.startswith("deepspeed")]
    import torch

    from infinity.bench.summary import Summary

    rows: list[Row] = []
    settings = {
        key: value
        for key, value in vars(options).items()
        if key not in ("child", "model", "skipped", "lock", "end")
    }
    for model in options.models:
        found, more = measure(options, model)
        rows += found
        settings |= more
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    summary = Summary.of(
        __file__, QUESTION, LIMIT, rows, seeds=[0], settings=settings, device=device
    )
    for line in summary.table():
        print(line)
    for name, why in settings.items():
        if name.endswith("is left out"):
            print(f"{name}: {why}")
    summary.write(options.json)


if __name__ == "__main__":
    main()
