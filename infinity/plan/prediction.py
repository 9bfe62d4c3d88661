"""The plan of a measured step: the same model, placement and rates, simulated.

A step that takes much longer than its plan waits for something that the plan does not contain.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

from infinity.bench.step import flops
from infinity.bench.step.flops import Shape
from infinity.bench.step.train import Workload
from infinity.device import ComputeDevice
from infinity.errors import ConfigError
from infinity.free_memory import Memory, read_host
from infinity.plan.forecast import plan
from infinity.plan.hardware import DriveSpec, Hardware, checked
from infinity.plan.memory import Training
from infinity.plan.model import of_source

GB = 1e9


def prediction(work: Workload, found: Mapping[str, Any]) -> dict[str, Any] | None:
    """The plan of `work` on a machine with the rates of `found`, the summary of
    `infinity.bench.step.measure.measure`: seconds and tokens per second of a step, busy seconds by
    lane, and the measured step over the planned one.

    None without a plan: micro-batches that run together are not simulated, and the amount of memory
    must be known.
    """
    host, device = read_host(), ComputeDevice(work.config.tuning.device)
    try:
        gpu = device.memory()
    finally:
        device.close()
    if work.vertical or host is None:
        return None
    model = of_source(work.source, work.config)
    training = Training(work.length, work.batch_size, work.accumulate, work.recomputes)
    try:
        hardware = _hardware(work, found, model.shape, host, gpu)
    except ConfigError:  # a measured rate is 0
        return None
    forecast = plan(model, hardware, training, work.config)
    if forecast.pace is None:
        return None
    pace, step = forecast.pace, found["step_seconds"]
    return {
        "seconds": pace.seconds,
        "tokens_per_second": pace.tokens_per_second,
        "busy_seconds": pace.busy,
        "updates": pace.mode,
        "step_over_plan_ratio": {key: value / pace.seconds for key, value in step.items()},
    }


def _hardware(
    work: Workload, found: Mapping[str, Any], shape: Shape, host: Memory, gpu: Memory | None
) -> Hardware:
    """The machine as the run has measured it. Raises `ConfigError` for an impossible rate."""
    rates = {name: each["median"] * GB for name, each in found["link_gb_per_second"].items()}
    kernels = {
        where: found[where]["gb_per_second"]["median"] * GB
        for where in ("adam", "adam_on_gpu")
        if found[where] is not None
    }
    block = Shape(shape.in_blocks // shape.layers, shape.in_blocks // shape.layers, 1, shape.width)
    outside = Shape(shape.multiplied - shape.in_blocks, 0, 0, shape.width)
    one, two = (
        found["compute"][f"{name}_seconds"]["median"] for name in ("one_block", "two_blocks")
    )
    in_block, beside = (_operations(work, part) for part in (block, outside))
    fastest = found["matmul_tflop_per_second"]["median"] * 1e12
    each = max(two - one, in_block / fastest)
    return checked(
        Hardware(
            "this machine",
            host_memory=host.free,
            host_total=host.total,
            flops=in_block / each,
            head_flops=beside / max(one - each, beside / fastest) if beside else None,
            gpu_memory=None if gpu is None else gpu.free,
            gpu_total=None if gpu is None else gpu.total,
            link=min(rates["host_to_device"], rates["device_to_host"]),
            drives=_drives(work, rates),
            memory_bandwidth=kernels.get("adam", Hardware.memory_bandwidth),
            gpu_bandwidth=kernels.get("adam_on_gpu", Hardware.gpu_bandwidth),
        )
    )


def _operations(work: Workload, part: Shape) -> float:
    tokens = work.length * work.batch_size
    return flops.count(part, tokens, work.length, work.recomputes).hardware


def _drives(work: Workload, rates: Mapping[str, float]) -> tuple[DriveSpec, ...]:
    directories = work.config.nvme
    if "nvme_read" not in rates:
        return ()
    shares = {name: rates[f"nvme_{name}"] / len(directories) for name in ("read", "write", "both")}
    return tuple(
        DriveSpec(capacity=shutil.disk_usage(directory).free, **shares) for directory in directories
    )
