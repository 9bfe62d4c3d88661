"""What of a model fits on a machine, in bytes, and where: arithmetic over a Llama's shape, the
engine's formulas and the budgets.

The state bytes per parameter are those of `infinity.placement.memory`; what passes through is
added: two gradient buffers of the largest unit on the device, a GiB of staging in host memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from infinity.config import Config, Tuning
from infinity.free_memory import read_host
from infinity.placement.cache import fill
from infinity.placement.memory import bytes_per_parameter

GIB = 1 << 30
MOMENTS = ("fp32", "bf16", "int8")


class Machine(NamedTuple):
    """Bytes that states may take on each tier."""

    gpu: int
    host: int
    nvme: int


REHEARSED = Machine(8 << 20, 96 << 20, 48 << 20)
"""For the model `tiny`, on a CPU."""


class Plan(NamedTuple):
    """A placement: options of `infinity bench step`, the count of parameters, and bytes of state on
    each tier."""

    model: dict[str, Any]
    options: dict[str, Any]
    parameters: int
    states: dict[str, int]
    budgets: dict[str, int]

    def config(self, nvme: Path | str, **tuning: Any) -> Config:
        """The `Config` that its options are."""
        fields: dict[str, Any] = {}
        for key, value in self.options.items():
            name = key.removeprefix("no-").replace("-", "_")
            given = fields if name in Config.model_fields else tuning
            given[name] = not key.startswith("no-") if value is None else value
        return Config(precision="bf16", nvme=nvme, tuning=Tuning(**tuning), **fields)

    @property
    def facts(self) -> dict[str, Any]:
        """JSON-ready, with the share of the budgets that is state."""
        used, given = sum(self.states.values()), sum(self.budgets.values())
        return {
            "parameters_count": self.parameters,
            "state_bytes": self.states,
            "budget_bytes": self.budgets,
            "state_of_budgets_ratio": used / given,
            "options": self.options,
            "state_of_budget_ratio": {
                tier: self.states[tier] / self.budgets[tier]
                for tier in self.states
                if self.budgets[tier]
            },
        }


def working(model: dict[str, Any], tokens: int) -> int:
    """Bytes of the device beside states for `tokens` tokens at once: the logits in bf16 and, for
    the loss, in fp32, each with its gradient, and their softmax; one hidden state per block, and
    four times what one block computes, for it is computed again."""
    width = model["hidden_size"]
    hidden = 2 * width * model["num_hidden_layers"]
    block = 2 * (8 * width + 3 * model["intermediate_size"])
    return tokens * (16 * model["vocab_size"] + hidden + 4 * block)


def left(gpu: int, host: int, drive: int, working: int) -> Machine:
    """What so many bytes leave to states: of a GPU all but the `working` bytes and 3 GiB for CUDA
    and what lies between; of host memory all but 15 GiB, for Python, CUDA, staging, and one unit
    while it is filled; of the drive all but 3 GiB."""
    return Machine(
        max(gpu - working - 3 * GIB, 0), max(host - 15 * GIB, 0), max(drive - 3 * GIB, 0)
    )


def machine(
    model: dict[str, Any], tokens: int, nvme: Path, device: str, host_bytes: int | None
) -> Machine:
    """What this machine may give to states, beside `tokens` tokens at once. `host_bytes` is what
    the user says that is free, where the machine shows less than it has. On the CPU what a
    rehearsal needs."""
    if device == "cpu":
        return REHEARSED
    import torch

    if host_bytes is None:
        host = read_host()
        host_bytes = 0 if host is None else host.free
    total = torch.cuda.get_device_properties(0).total_memory
    return left(total, host_bytes, shutil.disk_usage(nvme).free, working(model, tokens))


def block_of(model: dict[str, Any]) -> int:
    """Parameters of one block of a Llama."""
    width, heads = model["hidden_size"], model["num_attention_heads"]
    shared = width // heads * model["num_key_value_heads"]
    return (
        2 * width * width + 2 * width * shared + 3 * width * model["intermediate_size"] + 2 * width
    )


def count(model: dict[str, Any]) -> int:
    """Parameters of a Llama with a head of its own."""
    return sum(units_of(model))


def units_of(model: dict[str, Any]) -> list[int]:
    """Parameters of each unit, as the engine cuts a Llama: the embedding, the blocks, the head with
    the norm before it."""
    words = model["vocab_size"] * model["hidden_size"]
    return [words, *[block_of(model)] * model["num_hidden_layers"], words + model["hidden_size"]]


def through(model: dict[str, Any]) -> int:
    """Bytes of two gradient buffers for the largest unit, in bf16, with what aligns them."""
    return 2 * (2 * max(units_of(model)) + (1 << 20))


def per_parameter(moments: str) -> tuple[int, int, float]:
    """Bytes of parameter, gradient and optimizer states in bf16 with split masters."""
    config = Config(
        nvme="/", gpu_memory=0, cpu_memory=0, precision="bf16", moment_precision=moments
    )
    states = bytes_per_parameter(config)
    return int(states.parameters), int(states.gradients), states.optimizer


def staging(given: Machine) -> int:
    """Host memory for what passes through: beside what `given` leaves to states."""
    return min(GIB, max(64 << 20, given.host // 64))


def in_host_memory(model: dict[str, Any], given: Machine) -> Plan:
    """States in host memory, with fp32 or bf16 moments: all but those of the first units that the
    device has room for, at most half of the model. What host memory is left is for shadow copies,
    so that updates may begin in backward. Where host memory is short, `over_three_tiers`."""
    units, stage = units_of(model), staging(given)
    for moments in MOMENTS[:2]:
        weight, gradient, optimizer = per_parameter(moments)
        each, passes = weight + gradient + optimizer, passing(model, weight)
        gpu_cache, gpu_resident = fitting(
            units, each, min(given.gpu - passes, int(each * sum(units)) // 2)
        )
        off_device = sum(units) - gpu_resident
        least, most = (
            int(off_device * width * 1.002) for width in (each, each + weight + optimizer)
        )
        if least <= given.host and gpu_cache + passes <= given.gpu:
            break
    else:
        return over_three_tiers(model, given, "fp32")
    gpu, cpu = gpu_cache + passes, min(most, given.host) + stage
    options = {
        "parameters": "cpu",
        "gradients": "cpu",
        "optimizer": "cpu",
        "moment-precision": moments,
        "gpu-memory": gpu,
        "gpu-cache": gpu_cache,
        "cpu-memory": cpu,
    }
    states = {"gpu": int(gpu_resident * each), "cpu": int(off_device * each), "nvme": 0}
    return Plan(model, options, sum(units), states, {"gpu": gpu, "cpu": cpu, "nvme": 0})


def passing(model: dict[str, Any], weight: int) -> int:
    """Bytes of the device for two gradient buffers, and for four units of `weight` bytes per
    parameter that come and go."""
    return through(model) + 4 * weight * max(units_of(model))


def over_three_tiers(model: dict[str, Any], given: Machine, moments: str) -> Plan:
    """All states of the first units on the device, as many as it has room for while four others
    pass. Of the others what host memory has room for is there, parameters and gradients first; the
    rest is on the drive.

    Moments are as wide as `moments` if they fit, else narrower. Optimizer states on the drive keep
    their old content beside the new where there is room for both. Raises `ValueError` where nothing
    fits.
    """
    units = units_of(model)
    for narrower in MOMENTS[MOMENTS.index(moments) :]:
        widths = per_parameter(narrower)
        passes = passing(model, widths[0])
        gpu_cache, gpu_resident = fitting(units, sum(widths), given.gpu - passes)
        device = OnDevice(passes, gpu_cache, gpu_resident, int(sum(widths) * gpu_resident))
        for homes in (("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "nvme")):
            for copies in (2, 1):
                with suppress(ValueError):
                    return _with_others(model, given, narrower, device, *homes, copies=copies)
    raise _too_large(model, given)


def states_on_drive(model: dict[str, Any], given: Machine) -> Plan:
    """Optimizer states on the drive, rewritten in place, with the widest moments that fit;
    parameters and gradients in host memory, and none stays on the device. Raises `ValueError` where
    a tier is too small."""
    for moments in MOMENTS:
        with suppress(ValueError):
            passes = passing(model, per_parameter(moments)[0])
            device = OnDevice(passes, gpu_cache=0, gpu_resident=0, states=0)
            return _with_others(model, given, moments, device, "cpu", "cpu", copies=1)
    raise _too_large(model, given)


def parameters_on_device(model: dict[str, Any], given: Machine, moments: str) -> Plan:
    """All parameters on the device, so that none has to pass, and what else of the first units it
    has room for. Of the others gradients in host memory; optimizer states, which are rewritten in
    place, on the drive as far as it has room, the rest in host memory. Raises `ValueError` where a
    tier is too small."""
    units, (weight, gradient, optimizer) = units_of(model), per_parameter(moments)
    whole = int(sum(units) * weight * 1.002) + through(model)
    gpu_cache, gpu_resident = fitting(units, gradient + optimizer, given.gpu - whole)
    on_device = OnDevice(
        whole,
        gpu_cache,
        gpu_resident,
        int(weight * sum(units) + (gradient + optimizer) * gpu_resident),
    )
    return _with_others(model, given, moments, on_device, "gpu", "cpu", copies=1)


def fitting(units: Sequence[int], each: float, room: int) -> tuple[int, int]:
    """Bytes for the first of `units` that fit into `room` at `each` bytes per parameter, and how
    many parameters these have."""
    gpu_cache = max(int(min(room, 1.002 * each * sum(units))), 0)
    return gpu_cache, sum(
        units[number] for number in fill(gpu_cache, [int(each * unit * 1.002) for unit in units])
    )


class OnDevice(NamedTuple):
    """Bytes of the device beside `gpu_cache`, parameters that stay in that with all their states,
    and bytes of state there."""

    others: int
    gpu_cache: int
    gpu_resident: int
    states: int


def _with_others(
    model: dict[str, Any],
    given: Machine,
    moments: str,
    device: OnDevice,
    parameters: str,
    gradients: str,
    copies: int,
) -> Plan:
    """Beside what is on the `device`: parameters and gradients at home where they are said to be;
    `copies` of optimizer states on the drive, at most half of them where there are two, the rest in
    host memory. Raises `ValueError` where a tier is too small."""
    total, (weight, gradient, optimizer) = count(model), per_parameter(moments)
    off_device = total - device.gpu_resident
    bytes_at = dict.fromkeys(("gpu", "cpu", "nvme"), 0)
    bytes_at[parameters] += off_device * weight
    bytes_at[gradients] += off_device * gradient
    states, home = int(off_device * optimizer), int(bytes_at["cpu"] * 1.002)
    room = int((given.nvme - (32 << 20)) / 1.002) - bytes_at["nvme"]
    on_drive = min(room // copies, states // copies)
    cache = states - on_drive
    gpu, cpu = device.others + device.gpu_cache, home + cache
    if gpu > given.gpu or cpu > given.host or on_drive < 0:
        raise _too_large(model, given)
    options = {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer": "nvme",
        "moment-precision": moments,
        "gpu-memory": gpu,
        "gpu-cache": device.gpu_cache,
        "cpu-memory": cpu + staging(given),
        "cache": cache,
    }
    options["copy-on-write" if copies == 2 else "no-copy-on-write"] = None
    on_nvme = copies * on_drive + bytes_at["nvme"]
    taken = {"gpu": device.states, "cpu": int(bytes_at["cpu"]) + cache, "nvme": on_nvme}
    budgets = {
        "gpu": gpu,
        "cpu": cpu + staging(given),
        "nvme": int(on_nvme * 1.002) + (16 << 20),
    }
    return Plan(model, options, total, taken, budgets)


def _too_large(model: dict[str, Any], given: Machine) -> ValueError:
    tiers = ", ".join(
        f"{nbytes / GIB:.0f} GiB of {tier}" for tier, nbytes in given._asdict().items()
    )
    return ValueError(f"{count(model):,} parameters do not fit into {tiers} with int8 moments")


def largest(model: dict[str, Any], given: Machine) -> Plan:
    """The model with as many blocks as fit with 8-bit moments, which are rewritten in place; raises
    `ValueError` if none do."""
    best: Plan | None = None
    for layers in range(2, 1000):
        try:
            best = parameters_on_device(model | {"num_hidden_layers": layers}, given, "int8")
        except ValueError:
            break
    if best is None:
        raise ValueError(f"not even two blocks fit over {given}")
    return best
