"""What the user decides: budgets, paths and a tier per state. Everything about speed is measured or planned instead."""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from infinity.errors import ConfigError
from infinity.units import parse_bytes

Tier = Literal["gpu", "cpu", "nvme"]
Bytes = Annotated[int, BeforeValidator(parse_bytes)]


def _as_cache(value: Any) -> Any:
    try:
        return value if value == "auto" else parse_bytes(value)
    except ValueError as error:
        raise ValueError(f"{error}, or 'auto'") from None


def _as_activation_memory(value: Any) -> Any:
    try:
        return value if value == "auto" else parse_bytes(value) // 4096 * 4096
    except ValueError as error:
        raise ValueError(f"{error}, or 'auto' for half of what homes leave of cpu_memory") from None


def _as_paths(value: Any) -> Any:
    paths = [value] if isinstance(value, (str, Path)) else value
    if isinstance(paths, (list, tuple)) and "" in paths:
        raise ValueError("a directory is empty text; write '.' for the current one")
    return paths


def _as_shares(value: Any) -> Any:
    if isinstance(value, str) and value in ("measured", "equal"):
        return value
    if not isinstance(value, (list, tuple)) or not all(type(share) in (int, float) and 0 < share < math.inf for share in value):
        raise ValueError(f"{value!r} is neither 'measured' nor 'equal' nor a positive number for each directory")
    return value


class Config(BaseModel):
    """Placement and budgets of one engine.

    `gpu_memory` and `cpu_memory` are upper limits, in bytes, on what the engine holds on the compute device and in host
    memory ("20GiB" or an integer). With no GPU the compute device is the CPU and `gpu_memory` is its budget in RAM.
    `nvme_memory` limits the bytes preallocated over all `nvme` directories (default: what they have free).

    Raises `ConfigError` (a `ValueError`) that names the key, what is wrong with it and what is allowed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    nvme: Annotated[tuple[Path, ...], BeforeValidator(_as_paths)] = ()
    gpu_memory: Bytes
    cpu_memory: Bytes
    nvme_memory: Bytes | None = None
    nvme_shares: Annotated[Literal["measured", "equal"] | tuple[float, ...], BeforeValidator(_as_shares)] = "measured"
    """What part of the states each of several `nvme` directories holds, as far as it has room: "measured" for its speed beside
    the others, found when the engine starts; "equal"; or a number each, such as the GB/s that `infinity bench io` prints."""
    cache: Annotated[Literal["auto"] | int, BeforeValidator(_as_cache)] = "auto"
    """Bytes of `cpu_memory` that may keep a part of what is on nvme, which then never moves: "auto" for what homes and staging
    leave, 0 for none."""

    gpu_cache: Annotated[Literal["auto"] | int, BeforeValidator(_as_cache)] = "auto"
    """Bytes of `gpu_memory` in which units keep all their states, parameters, gradients, masters and moments, wherever the others
    have theirs: the first units of the model, whose gradients come last and whose parameters the next forward needs first. They
    move nothing and are updated where they are, on a GPU by its own kernels beside those of the CPU. "auto": on a GPU all units
    if they fit; else so many that what has most to do in a step has least, of both ways of the link, the drives and the CPU's
    updates, which are measured when the model is wrapped (less than a second; at most 64 MiB on each drive, for each rank); the
    others' parameters pass through what is left, at least twice what is in use at once. It is 0 on the CPU, where `cache` does
    the same, and with update="delayed" and algorithm="other", which the GPU's kernels cannot do."""

    parameters: Tier = "nvme"
    optimizer: Tier = "nvme"
    gradients: Tier = "cpu"
    activations: Tier = "gpu"
    """Where what autograd saves in a forward waits for its backward. "gpu": on the compute device, as in plain PyTorch. "cpu": in
    host memory; what does not fit there stays on the device, and where the device is the CPU it is there already, so nothing
    moves. "nvme": in host memory, and on from there to the drives."""
    activation_memory: Annotated[Literal["auto"] | int, BeforeValidator(_as_activation_memory)] = "auto"
    """Bytes of `cpu_memory` for activations on cpu or nvme: "auto" for half of what homes leave, and for what staging and
    cache do not use. With "nvme" they all pass through it, so that it should hold a few of the largest, of which one comes
    while another is written; a tensor that is larger than all of it stays on the device."""

    stage: Literal[0, 1, 2, 3] = 3
    """What several ranks share among them, each holding 1/N of it (ZeRO, section 5): nothing with 0, optimizer states from 1 on,
    gradients from 2 on, parameters with 3. With 1 and 2 all parameters are in the memory of every rank's device, with 1 all
    gradients, too, which then are reduced once per step and not once per backward."""

    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """dtype that floating-point parameters are stored and computed in; "auto" keeps the dtypes of the model."""
    algorithm: Literal["adam", "adagrad", "lion", "momentum", "sgd", "other"] = "adam"
    """What the parameters are trained by, which says what states there are: two moments for "adam" (`infinity.Adam`, `AdamW`),
    one for "adagrad", "lion" and "momentum" (`infinity.SGD`), none for "sgd" and "other" (`infinity.adapt`)."""
    gradient_precision: Literal["auto", "fp32"] = "auto"
    """dtype that gradients are kept, accumulated over micro-batches and reduced over ranks in; "auto" is the parameter's."""
    split_master: bool = True
    """Keep of an fp32 master only the 16 bits that its bf16 parameter lacks: 2 bytes less at rest, and the same numbers."""
    moment_precision: Literal["fp32", "bf16", "int8"] = "fp32"
    """How the optimizer's moments are stored: 8, 4 or 2.25 bytes per parameter. Below fp32 they are rounded stochastically."""
    copy_on_write: bool = True
    """Write an updated state beside its old value and flip, so that what a failed step leaves there is whole, and an update may
    begin before its step: on nvme, where it takes twice the space, and in host memory for as many units as `cpu_memory` has room
    for twice, where all of a model is in memory and `update` says early."""
    update: Literal["auto", "speculative", "exact", "plain", "delayed"] = "auto"
    """When optimizer updates run; the numbers are the same. "exact": beside the next forward, once the clip factor is known.
    "speculative": from backward on, on the guess that nothing is clipped, and again where the guess was wrong (needs
    copy_on_write, and no parameters on the gpu, where they are rewritten in place). "plain": step() waits for them. "auto"
    chooses: between the first two where there is I/O or a GPU to run beside, else "plain", for update and forward on the same
    CPUs only disturb each other.
    "delayed" changes the numbers: the forward after a step still uses the parameters of before that step, and so the update has
    a whole forward and backward to run beside, clipped or not (ZeRO-Offload, section 5.2). Evaluation, `state_dict` and whatever
    else reads states see that step, and training goes on from there. Needs parameters on cpu or nvme, and twice the memory or
    space for them; what `infinity.adapt` made is never late."""
    delayed_after: Annotated[int, Field(ge=0)] = 40
    """With update="delayed": how many steps come first that are not delayed, for while training begins a delay costs most.
    Steps are counted from the beginning of the training, also where a checkpoint was loaded."""
    collective_timeout: Annotated[float, Field(gt=0, lt=1e6)] = 600.0
    """With several ranks: seconds that a rank waits for the others in a gather or a reduction before it raises an error that says
    what each of them is at. More than a rank may compute between two units while others wait."""
    poison: bool = False
    """Debug: fill a slot with NaN when its lease ends, so that a use after release is seen at once."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    io_engine: Literal["auto", "io_uring", "posix"] = "auto"
    gpu_direct: Literal["auto", "on", "off"] = "auto"
    """Whether a drive writes parameters on nvme straight into the memory of the GPU (GPUDirect Storage, through cuFile): "auto"
    where every directory can, and a block that was read so has the right bytes; "on" refuses where one cannot. Else they pass
    host memory."""
    instruction_set: Literal["auto", "scalar", "avx2", "avx512"] = "auto"
    threads: int | None = None
    """Threads of the CPU optimizer; None takes every CPU this process may run on, divided by the LOCAL_WORLD_SIZE that torchrun
    sets, whatever OMP_NUM_THREADS says."""

    def __init__(self, **values: Any) -> None:
        for key in values:
            if key not in type(self).model_fields:
                near = difflib.get_close_matches(key, type(self).model_fields, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else "."
                allowed = ", ".join(type(self).model_fields)
                raise ConfigError(f"unknown config key {key!r}{hint} The keys are: {allowed}")
        try:
            super().__init__(**values)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(str(part) for part in e['loc']) or 'config'}: {e['msg'].removeprefix('Value error, ')}"
                + (f", not {e['input']!r}" if e["type"] not in ("value_error", "missing") else "")
                for e in error.errors()
            )
            raise ConfigError(problems) from None

    @model_validator(mode="after")
    def _check(self) -> Config:
        states = [s for s in ("parameters", "gradients", "optimizer", "activations") if getattr(self, s) == "nvme"]
        if states and not self.nvme:
            raise ValueError(f"{' and '.join(states)} on nvme, but no directory is given: set nvme=[...]")
        if self.gpu_direct == "on" and self.parameters != "nvme":
            raise ValueError(f"gpu_direct='on' needs parameters='nvme', not {self.parameters!r}: only those are read to the GPU")
        if self.activation_memory != "auto" and self.activations == "gpu":
            raise ValueError(
                "activation_memory is for activations that are offloaded; set activations='cpu' or 'nvme', or leave it out"
            )
        if len(set(self.nvme)) < len(self.nvme):
            raise ValueError(f"nvme names a directory twice: {', '.join(map(str, self.nvme))}")
        if self.update == "delayed" and (self.parameters == "gpu" or not self.copy_on_write):
            wrong = "parameters on gpu" if self.parameters == "gpu" else "copy_on_write=False"
            raise ValueError(
                f"update='delayed' keeps the old parameters beside the new ones, which cannot be with {wrong}; put the "
                "parameters on cpu or nvme and leave copy_on_write=True, or choose another update"
            )
        if self.update == "delayed" and self.gpu_cache not in ("auto", 0):
            raise ValueError("update='delayed' keeps old parameters beside the new ones, which gpu_cache does not; set it to 0")
        whole = [s for s, least in (("parameters", 3), ("gradients", 2)) if self.stage < least and getattr(self, s) != "gpu"]
        if whole and self.stage > 0:
            wanted = ", ".join(f"{state}='gpu'" for state in whole)
            raise ValueError(
                f"stage={self.stage} keeps all {' and '.join(whole)} on the device of every rank; set {wanted}, or stage=3"
            )
        if not isinstance(self.nvme_shares, str) and len(self.nvme_shares) != len(self.nvme):
            numbers, directories = len(self.nvme_shares), len(self.nvme)
            raise ValueError(
                f"nvme_shares has {numbers} number{'s' * (numbers != 1)}, "
                f"but nvme has {directories} director{'y' if directories == 1 else 'ies'}"
            )
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be at least 1, not {self.threads}")
        return self
