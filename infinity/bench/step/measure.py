"""One benchmark from its workload to its summary: measure the devices, train, with compute alone
before, amid and after that, measure the devices again, conclude.

[Note: the roofline]
A step cannot be faster than its busiest device: the compute device with its matrix multiplications,
the drives, either direction of the link, or the kernels of the update. Each of these times is bytes
(or operations) over a rate. The engine counted the bytes in this very step. The rate is that of the
device in this run, before and after the steps. The longest time is the bound. Step over bound is
the possible gain by more overlap. The drives have three bounds: reads at the speed of reading,
writes at the speed of writing, and both together at the speed of both at once. The update has two
times, side by side, if some units have all their states on a GPU. If the compute device is the CPU,
compute and update share cores, and their sum is stated, too.

[Note: the bound of a clipped step]
If every update must wait for the norm of all gradients, no update runs beside the backward. It can
only hide behind the next forward. So the step takes at least its backward, and then the longer of
the forward and the update. The update takes its NVMe traffic or its kernels. Example: a backward of
2.2 s, a forward of 1.1 s and an update of 3.7 s make 5.9 s. This is a bound of steps in which no
update began in backward, by the engine's count.
"""

from __future__ import annotations

import gc
import resource
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from infinity.bench.machine import load_problem
from infinity.bench.step import bare_compute, flops
from infinity.bench.step.train import Trained, Workload, train
from infinity.bench.summary import spread
from infinity.device import ComputeDevice
from infinity.measure import speed
from infinity.measure.rates import (
    Formats,
    copies,
    formats_of,
    multiplications,
    threads_of,
    updates,
)
from infinity.observe import Span
from infinity.report import Report
from infinity.tier import TIERS
from infinity.tiers.places import check_directories

_KERNELS = ("adam", "adam_on_gpu")  # of the CPU, and of the compute device
_DRIFT = 1.2  # the ratio of compute times from which on there is a warning
ROUNDS = 3
FORMULA = (
    "6 x parameters that multiply x tokens + 12 x layers x width x length x tokens / 2 (causal); "
    "recomputed: 2 x parameters in blocks x tokens + a third of the attention"
)
COMPUTE = (
    "forward and backward of models of 1 and 2 blocks in the device's memory, without an engine, "
    "before, amid and after the steps where they fit, extrapolated linearly in depth"
)


def bounds(
    compute: float,
    nbytes: Mapping[str, int],
    updated: Mapping[str, float],
    rates: Mapping[str, float],
) -> dict[str, float]:
    """Seconds that each device needs for a step. `nbytes` and `rates` have the names of links, with
    rates in bytes per second. Updates have the names of `parts_updated`, in parameters. A device
    without a rate took no part."""
    seconds = {"compute": compute}
    if "nvme_read" in rates:
        seconds["nvme"] = on_drives(nbytes["nvme_read"], nbytes["nvme_write"], rates)
    for way in ("host_to_device", "device_to_host"):
        seconds[way] = nbytes[way] / rates[way]
    return seconds | {
        where: parameters / rates[where] for where, parameters in updated.items() if where in rates
    }


def on_drives(read: int, written: int, rates: Mapping[str, float]) -> float:
    """Seconds that the drives need for so many bytes."""
    alone = max(read / rates["nvme_read"], written / rates["nvme_write"])
    return max(alone, (read + written) / rates["nvme_both"])


def clipped(
    compute: float,
    hiding: float,
    report: Report,
    takes: Mapping[str, float],
    rates: Mapping[str, float],
) -> float:
    """Seconds of a step whose updates wait for all gradients; see [Note: the bound of a clipped
    step]. `hiding` are the seconds of `compute` in forwards that can hide updates. `takes` is the
    result of `bounds`."""
    update = max(takes.get(kernels, 0.0) for kernels in _KERNELS)
    if "nvme_read" in rates:
        moved = on_drives(report.read_by_updates, report.written_by_updates, rates)
        update = max(update, moved)
    return compute - hiding + max(hiding, update)


def parts_updated(report: Report) -> dict[str, float]:
    """The numbers of parameters that the kernels of the CPU ("adam") and of the compute device
    ("adam_on_gpu") update in a step, if any. Counted by their states, which have one format."""
    on_gpu = report.updated_on_gpu / max(report.updated, 1)
    parts = {"adam": report.parameters * (1 - on_gpu), "adam_on_gpu": report.parameters * on_gpu}
    return {where: parameters for where, parameters in parts.items() if parameters > 0}


def measure(
    work: Workload,
    probe_bytes: int,
    say: Callable[[str], None],
    timeline: Callable[[Sequence[Span]], None] = lambda spans: None,
) -> dict[str, Any]:
    """The summary, ready for JSON. Every number has its unit in its key. Medians have the lowest
    and the highest.

    `probe_bytes` is the size of a copy that measures a link. `timeline` gets the spans of the
    engine, right after the steps. Raises like `infinity.wrap`, before anything long.
    """
    config = work.config
    check_directories(config.nvme)
    warnings = [busy] if (busy := load_problem()) is not None else []
    device = ComputeDevice(config.tuning.device)
    homes = (config.parameters, config.optimizer, config.gradients)
    on_nvme = any(TIERS[name].is_drive for name in homes)

    def links() -> dict[str, list[float]]:
        say("measuring the links")
        rates = copies(ComputeDevice(config.tuning.device), probe_bytes, ROUNDS)
        if not on_nvme:
            return rates
        with speed.DriveProbe(config.nvme, config.tuning.io_engine, probe_bytes) as probe:
            return rates | speed.drives(probe, ROUNDS)

    try:
        before = links()
        peaks = Peaks(device)
        batch = work.batch(0, device.torch)
        alone = bare_compute.BareCompute(work.source, batch, device, work.recomputes)

        def measure_compute(dtype: torch.dtype) -> None:
            say("measuring compute without the engine")
            with peaks.left_out():
                alone.measure(dtype, ROUNDS)
                gc.collect()

        trained = train(
            work, say, lambda dtype: measure_compute(dtype) if alone.fits(dtype) else None
        )
        timeline(trained.spans)
        gc.collect()
        measure_compute(trained.dtype)
        rates = {
            name: [*values, *then]
            for (name, values), then in zip(before.items(), links().values(), strict=True)
        }
        say("measuring matrix multiplication and the update")
        rates["matmul"] = multiplications(device.torch, trained.dtype, ROUNDS)
        formats = formats_of(config, trained.dtype)
        few = max(1 << 16, probe_bytes // 8)
        for where in parts_updated(trained.report):
            on_gpu = device if where == "adam_on_gpu" else None
            rates[where] = updates(
                formats, few, threads_of(config.tuning.threads), 2 * ROUNDS, on_gpu
            )
        found = summary(work, trained, rates, alone, formats, on_cpu=device.unified_memory)
        return {
            "device": device.name,
            **found,
            "warnings": [*warnings, *drift_problems(found)],
            "peak_process_bytes": peaks.process,
            "peak_device_bytes": peaks.device,
        }
    finally:
        device.close()


class Peaks:
    """The most bytes that this process and torch have held: `process` in host memory, and `device`
    on a compute device with memory of its own."""

    def __init__(self, device: ComputeDevice) -> None:
        self._device = device
        self.process = 0
        self.device: int | None = None
        self._reset()

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Bytes inside the context do not count."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        self.process = max(self.process, used.ru_maxrss * 1024)
        now = self._device.peak_bytes()
        if now is not None:
            self.device = max(self.device or 0, now)
        yield
        self._reset()

    def _reset(self) -> None:
        self._device.peak_bytes(reset=True)
        with suppress(OSError):  # then the peak of the process counts everything
            Path("/proc/self/clear_refs").write_text("5")


def drift_problems(found: Mapping[str, Any]) -> list[str]:
    """Signs in the summary that the machine changed during the run, a sentence each."""
    problems = []
    low, high = (found["compute"]["each_time_seconds"][key] for key in ("lowest", "highest"))
    if high > _DRIFT * low:
        problems.append(
            f"Compute without the engine took from {low:.3g} to {high:.3g} s during this run: the "
            "speed of the machine changed."
        )
    ratio = found["roofline"]["step_over_bound_ratio"]["median"]
    if ratio < 1:
        problems.append(
            f"A step took {ratio:.2f} of its bound: the devices were slower when they were "
            "measured than in the steps."
        )
    return problems


def _kernels(formats: Formats, rates: Sequence[float]) -> dict[str, Any]:
    return {
        "bytes_per_parameter": formats.bytes_per_parameter,
        "parameters_per_second": spread(rates),
        "gb_per_second": spread([rate * formats.bytes_per_parameter / 1e9 for rate in rates]),
    }


def summary(
    work: Workload,
    trained: Trained,
    rates: Mapping[str, Sequence[float]],
    alone: bare_compute.BareCompute,
    formats: Formats,
    on_cpu: bool,
) -> dict[str, Any]:
    """The summary of the measurements: `rates` by name, and compute `alone`."""
    report = trained.report
    middle = {name: statistics.median(values) for name, values in rates.items()}
    return {
        **_workload(work, trained, formats),
        **_speeds(work, trained, rates["matmul"]),
        "stall_seconds": {lane: spread(values) for lane, values in trained.waits.items()},
        "adam_busy_seconds": spread(trained.adam_seconds),
        "bytes_per_step": _moved(report)
        | {
            "optimizer_states_updated": report.updated,
            "optimizer_states_updated_on_gpu": report.updated_on_gpu,
        },
        "planned_bytes_per_step": {
            "nvme_read": round(report.planned_read_per_parameter * report.parameters),
            "nvme_write": round(report.planned_written_per_parameter * report.parameters),
        },
        "link_gb_per_second": {
            name: spread([rate / 1e9 for rate in values])
            for name, values in rates.items()
            if name not in ("matmul", *_KERNELS)
        },
        **{
            where: _kernels(formats, rates[where]) if where in rates else None for where in _KERNELS
        },
        "compute": _compute(work, trained, alone),
        "roofline": _roofline(work, trained, middle, alone, on_cpu),
        "tiers": {
            tier: {"peak_bytes": peak, "budget_bytes": report.limits.get(tier)}
            for tier, peak in report.peaks.items()
        },
        "cached_bytes": report.cached,
        "gpu_resident_bytes": report.gpu_resident,
        "losses": trained.losses,
        "loss_falls": trained.losses[-1] < trained.losses[0],
    }


def _workload(work: Workload, trained: Trained, formats: Formats) -> dict[str, Any]:
    """The model, its placement, and the steps."""
    config = work.config
    return {
        "model": work.source.name,
        "parameters_count": trained.report.parameters,
        "layers_count": trained.shape.layers,
        "dtype": formats.param,
        "placement": {
            "parameters": config.parameters,
            "gradients": config.gradients,
            "optimizer": config.optimizer,
            "moment_precision": config.moment_precision,
            "copy_on_write": config.tuning.copy_on_write,
            "update": config.tuning.update,
        },
        "gpu_direct": trained.report.gpu_direct,
        "sequence_length_tokens": work.length,
        "batch_windows": work.batch_size,
        "accumulate_count": work.accumulate,
        "tokens_per_step_count": work.tokens,
        "recomputes_activations": work.recomputes,
        "steps_count": len(trained.seconds),
        "discarded_steps_count": len(trained.losses) - len(trained.seconds),
    }


def _speeds(work: Workload, trained: Trained, matmul: Sequence[float]) -> dict[str, Any]:
    """Seconds of a step, and its tokens and operations per second, beside those of `matmul`."""
    shape = trained.shape
    operations = flops.count(shape, work.tokens, work.length, work.recomputes)
    counts = {"model": operations.model, "hardware": operations.hardware}
    per_step = [1 / each for each in trained.seconds]
    fastest = statistics.median(matmul)
    return {
        "step_seconds": spread(trained.seconds),
        "tokens_per_second": spread([work.tokens * rate for rate in per_step]),
        **{
            f"{name}_tflop_per_second": spread([count * rate / 1e12 for rate in per_step])
            for name, count in counts.items()
        },
        **{
            f"{name}_flop_utilisation_ratio": spread([count * rate / fastest for rate in per_step])
            for name, count in counts.items()
        },
        "flops": {
            "formula": FORMULA,
            "model_per_step_count": operations.model,
            "hardware_per_step_count": operations.hardware,
            "parameters_that_multiply_count": shape.multiplied,
            "parameters_in_blocks_count": shape.in_blocks,
        },
        "matmul_tflop_per_second": spread([rate / 1e12 for rate in matmul]),
    }


def _moved(report: Report) -> dict[str, int]:
    """Bytes that a step moves over each link."""
    return {
        "nvme_read": round(report.read_per_parameter * report.parameters) + report.activations_read,
        "nvme_write": round(report.written_per_parameter * report.parameters)
        + report.activations_written,
        "host_to_device": report.copied_to_device,
        "device_to_host": report.copied_from_device,
    }


def _compute(work: Workload, trained: Trained, alone: bare_compute.BareCompute) -> dict[str, Any]:
    layers = trained.shape.layers
    passes, (one, two) = alone.passes(layers), alone.of_blocks()
    return {
        "method": COMPUTE,
        "seconds": sum(passes) * work.accumulate,
        "forward_seconds": passes.forward,
        "backward_seconds": passes.backward,
        "one_block_seconds": spread(one),
        "two_blocks_seconds": spread(two),
        "each_time_seconds": spread([each * work.accumulate for each in alone.times(layers)]),
    }


def _roofline(
    work: Workload,
    trained: Trained,
    rates: Mapping[str, float],
    alone: bare_compute.BareCompute,
    on_cpu: bool,
) -> dict[str, Any]:
    """See [Note: the roofline]."""
    report, passes = trained.report, alone.passes(trained.shape.layers)
    compute = sum(passes) * work.accumulate
    takes = bounds(compute, _moved(report), parts_updated(report), rates)
    if trained.updates_kept == 0 and work.config.tuning.update in ("auto", "exact", "speculative"):
        # In vertical order all micro-batches use a unit before the next unit.
        hiding = passes.forward * (work.accumulate if work.vertical else 1)
        takes["clipped"] = clipped(compute, hiding, report, takes, rates)
    longest = max(takes, key=lambda name: takes[name])
    return {
        "seconds": takes,
        "bound": longest,
        "bound_seconds": takes[longest],
        "step_over_bound_ratio": spread([each / takes[longest] for each in trained.seconds]),
        "compute_and_adam_on_the_same_cpus_seconds": compute + takes["adam"]
        if on_cpu and "adam" in takes
        else None,
    }
