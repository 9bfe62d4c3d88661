"""The knobs of one engine: the user sets `Config`, and the engine chooses each unset value of
`Tuning`.

`Config` has the budgets, paths, places and formats that a user sizes a run by. Everything about
speed, checks and the machine is in `Tuning`. A test freezes both lists.

The docstring below a field is its documentation. Its first paragraph is also the help of the option
in `infinity.cli`.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from infinity.errors import ConfigError, in_words
from infinity.quantities import parse_bytes
from infinity.tier import TIERS, TierName


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


def _as_budget(value: Any) -> Any:
    match = _PERCENT.fullmatch(value) if isinstance(value, str) else None
    if match and Fraction(match[1]) > 100:
        raise ValueError(f"{value} is more than all that is free; write at most 100%")
    if match or value == "auto":
        return f"{match[1]}%" if match else value
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise ValueError(f"{error}, a part of what is free such as 80%, or 'auto'") from None


def _as_paths(value: Any) -> Any:
    paths = [value] if isinstance(value, (str, Path)) else value
    if isinstance(paths, (list, tuple)) and "" in paths:
        raise ValueError("a directory is empty text; write '.' for the current one")
    several = isinstance(paths, Iterable) and not isinstance(paths, (bytes, Mapping))
    paths = tuple(paths) if several else (paths,)
    for path in paths:
        if not isinstance(path, (str, os.PathLike)):
            raise ValueError(f"{in_words(path)} is no directory; write a path, or a list of paths")
    return paths


def _as_shares(value: Any) -> Any:
    if isinstance(value, str) and value in ("measured", "equal"):
        return value
    numbers = value if isinstance(value, (list, tuple)) else [math.nan]
    if not all(type(share) in (int, float) and 0 < share < math.inf for share in numbers):
        raise ValueError(
            f"{value!r} is neither 'measured' nor 'equal' nor a positive number for each directory"
        )
    return value


def _as_durability(value: Any) -> Any:
    if type(value) is int and value > 0:
        return value if value > 1 else "step"
    if type(value) is str and value in ("off", "step"):
        return value
    raise ValueError(
        f"{in_words(value)} is neither 'off' nor 'step' nor a number of steps from 1 on"
    )


def _as_accumulation(value: Any) -> Any:
    return "vertical" if value == "layer_major" else value


def _as_tuning(value: Any) -> Any:
    odd = [key for key in value if not isinstance(key, str)] if isinstance(value, dict) else []
    if odd:
        raise ValueError(f"unknown tuning key {odd[0]!r}")
    return value


_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*", re.ASCII)

Bytes = Annotated[int, BeforeValidator(parse_bytes)]
BytesOrPart = Annotated[int | str, BeforeValidator(_as_budget)]
"""Bytes, "auto", or a percentage of the free memory such as "80%"."""
BytesOrAuto = Annotated[Literal["auto"] | int, BeforeValidator(_as_cache)]
ActivationBytes = Annotated[Literal["auto"] | int, BeforeValidator(_as_activation_memory)]
Paths = Annotated[tuple[Path, ...], BeforeValidator(_as_paths)]
Durability = Annotated[Literal["off", "step"] | int, BeforeValidator(_as_durability)]
"""The committed steps: none, every step, or every N-th step."""
Accumulation = Annotated[Literal["horizontal", "vertical"], BeforeValidator(_as_accumulation)]
Shares = Annotated[Literal["measured", "equal"] | tuple[float, ...], BeforeValidator(_as_shares)]


class _Knobs(BaseModel):
    """A frozen model that raises `ConfigError` for unknown keys and wrong values."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        arbitrary_types_allowed=True,
        use_attribute_docstrings=True,
    )

    def __init__(self, *given: Any, **values: Any) -> None:
        if given:
            name = type(self).__name__
            raise ConfigError(
                f"{name} takes keys, not {in_words(given[0])}; write "
                f"{name}({next(iter(type(self).model_fields))}=...), or {name}(**values) for a dict"
            )
        for key in values:
            if key not in type(self).model_fields:
                raise ConfigError(_unknown(key, in_tuning=isinstance(self, Tuning)))
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError("; ".join(map(_problem, error.errors()))) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self).model_fields:
            raise ConfigError(
                f"a {type(self).__name__} cannot be changed; make another one, with {name}=..."
            )
        super().__setattr__(name, value)


def _problem(error: Any) -> str:
    """The text of one pydantic error, in the words of this project."""
    inner = error.get("ctx", {}).get("error")
    if isinstance(inner, ConfigError):
        return str(inner)  # from a Tuning that was given as a dict, which names its key itself
    where = ".".join(map(str, error["loc"])) or "config"
    found = "" if error["type"] in ("value_error", "missing") else f", not {error['input']!r}"
    return f"{where}: {error['msg'].removeprefix('Value error, ')}{found}"


def _unknown(key: str, *, in_tuning: bool) -> str:
    """The error text for a `key` that is not in the list where the caller gave it."""
    if not in_tuning and key in Tuning.model_fields:
        return f"{key} is now in tuning: Config(tuning=Tuning({key}=...))"
    if in_tuning and key in Config.model_fields:
        return f"{key} is not in tuning: Config({key}=...)"
    near = difflib.get_close_matches(key, [*Config.model_fields, *Tuning.model_fields], n=1)
    place = " in tuning" if near and near[0] in Tuning.model_fields else ""
    hint = f"; did you mean {near[0]!r}{place}?" if near else "."
    return (
        f"unknown {'tuning' if in_tuning else 'config'} key {key!r}{hint} The keys are: "
        f"{', '.join(Config.model_fields)}; and in tuning: {', '.join(Tuning.model_fields)}"
    )


class Tuning(_Knobs):
    """Settings that the engine measures or plans by default, and settings for special machines and
    for debugging.

    `Config(tuning=...)` takes it, as an object or as a dict with the same keys.

    Raises `ConfigError` (a `ValueError`) that names the key, the problem and the allowed values.
    """

    nvme_memory: Bytes | None = None
    """Budget on NVMe, over all directories; by default their free space."""
    nvme_shares: Shares = "measured"
    """The share of the states on each `nvme` directory: "measured" follows its speed, "equal", or a
    number for each.

    The engine measures the speeds when it starts. Numbers may be the GB/s that `infinity bench io`
    prints. A directory never gets more than its free space.
    """
    cache: BytesOrAuto = "auto"
    """How much of `cpu_memory` may cache states on NVMe; "auto" is the memory beside homes and
    staging, 0 is none.

    Cached states are never read from NVMe. With `durability` each committed step still writes them
    to NVMe.
    """
    gpu_cache: BytesOrAuto = "auto"
    """How much of `gpu_memory` keeps all states of the first units; "auto" is what pays on a GPU, 0
    is none.

    These units keep parameters, gradients, masters and moments on the GPU, whatever the home of the
    other units is. They are the first of the model: their gradients come last, and the next forward
    needs their parameters first. Their states do not move. The GPU updates them with its own
    kernels while the CPU updates the other units.

    "auto" takes all units if they fit. Otherwise it takes the number of units that makes the
    busiest part of a step shortest. The parts are both directions of the link, the drives, and the
    updates on the CPU. `wrap` measures them in less than a second, with at most 64 MiB on each
    drive for each rank, in a file of its own. Parameters of the other units pass through the
    remaining memory, which is at least twice the memory in use at once.

    It is 0 on the CPU, where `cache` does the same. It is also 0 with `update="delayed"` and
    `algorithm="other"`, which the GPU's kernels cannot do.
    """
    activation_memory: ActivationBytes = "auto"
    """How much of `cpu_memory` is for offloaded activations; "auto" is half of what homes leave.

    "auto" also takes what staging and cache do not use. With `activations="nvme"` all activations
    pass through it. So it should hold a few of the largest: one arrives while another is written.
    A tensor that is larger than this budget stays on the device.
    """
    partition_activations: bool = False
    """With tensor parallel ranks: keep 1/N of each saved tensor that all N of them hold alike.

    The backward gathers the parts (ZeRO, section 6.1). Such tensors are replicated DTensors, and
    inputs of blocks that are recomputed, by `recompute="all"` or by the model. By setting this
    the user states that these inputs are equal on all tensor parallel ranks. The engine compares
    checksums, and the backward raises if they differ. The numbers are the same. Parts go where
    `activations` says. Tensors under 256 KiB stay whole.
    """
    gradient_precision: Literal["auto", "fp32"] = "auto"
    """dtype that gradients are accumulated and reduced in; "auto" is that of the parameters."""
    split_master: bool = True
    """Keep of an fp32 master only the 16 bits that its bf16 parameter lacks.

    It saves 2 bytes per parameter and changes no number.
    """
    copy_on_write: bool = True
    """Write an updated state beside its old value, which takes twice the space on NVMe.

    A failed step leaves valid states on NVMe, and an update may begin before its step. If all of a
    model is in memory and updates are speculative, host memory keeps both values of as many units
    as `cpu_memory` has room for.
    """
    update: Literal["auto", "speculative", "exact", "plain", "delayed"] = "auto"
    """When optimizer updates run: "exact" beside the next forward, "speculative" from backward on,
    "plain" before the step returns. The numbers are the same. With "delayed" each forward uses the
    parameters of before the last step.

    "exact" starts once the clip factor is known. "speculative" assumes that nothing is clipped, or
    takes the factor that an optimizer with `clip="previous"` or "unit" knows. If the factor was
    wrong, the update runs again. It needs `copy_on_write`, and parameters that are not on the
    gpu, where they are rewritten in place. "auto" chooses one of these two where there is I/O or a
    GPU to run beside. Else it chooses "plain", because update and forward on the same CPUs only
    disturb each other.

    "delayed" changes the numbers (ZeRO-Offload, section 5.2). An update has a whole forward and
    backward to run beside, clipped or not. Evaluation, `state_dict` and everything else that reads
    states see the last step, and training continues from it. It needs parameters on cpu or nvme,
    and twice the memory or space for them. Optimizers of `infinity.adapt` are never late.
    """
    delayed_after: Annotated[int, Field(ge=0)] = 40
    """With `update="delayed"`: the steps that come before the first late one.

    A delay costs most while training begins. Steps are counted from the beginning of the training,
    also after a checkpoint was loaded.
    """
    collective_timeout: Annotated[float, Field(gt=0, lt=1e6)] = 600.0
    """With several ranks: seconds that a rank waits for the others before it raises an error.

    The error says what each rank is at. Set more than a rank may compute between two units while
    others wait. Over NCCL torch ends the process ten minutes later, or more.
    """
    verify: Literal["resume", "always"] = "resume"
    """When checksums of bytes on NVMe are checked: "resume" when a run adopts committed states,
    "always" also on every read.

    A CRC32C of every piece is taken as it is written. A piece that differs raises
    `CorruptStateError`, and nothing is trained on it.
    """
    poison: bool = False
    """Debug: fill a slot with NaN when its lease ends, so that a use after release is seen at
    once."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; "auto" is a GPU if there is one."""
    io_engine: Literal["auto", "io_uring", "posix"] = "auto"
    """How NVMe is read and written."""
    gpu_direct: Literal["auto", "on", "off"] = "auto"
    """Whether drives write parameters straight to the GPU; "auto" where they can.

    That is GPUDirect Storage, through cuFile. "auto" asks that every directory can, and that a
    block that was read so has the right bytes. "on" refuses where one cannot. Else parameters pass
    through host memory.
    """
    read_in_place: bool = True
    """Read frozen parameters on NVMe from the safetensors files that they come from, instead of a
    copy.

    The files are only read, and no space is taken for these parameters. It holds for those that
    have the dtype and the layout of their file. Set it to False for files on a slow or a remote
    drive: then they are copied to the `nvme` directories.
    """
    instruction_set: Literal["auto", "scalar", "avx2", "avx512"] = "auto"
    """Instructions of the optimizer kernels on the CPU; "auto" is the best that it has."""
    threads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Threads of the optimizer on the CPU; by default every CPU that this process may use.

    The default is divided by the LOCAL_WORLD_SIZE that torchrun sets. OMP_NUM_THREADS does not
    count.
    """


class Config(_Knobs):
    """Budgets, places and formats of one engine.

    `gpu_memory` and `cpu_memory` are upper limits on the bytes of the engine on the compute device
    and in host memory: bytes ("20GiB" or an integer), or a part of the memory that is free at
    `wrap` ("80%"; "auto" leaves room for the computation). Without a GPU the compute device is the
    CPU, and `gpu_memory` is its budget in RAM.

    Without an `nvme` directory, parameters and optimizer states are at home in host memory.

    Raises `ConfigError` (a `ValueError`) that names the key, the problem and the allowed values.
    """

    nvme: Paths = ()
    """A directory on NVMe, or several to stripe over drives."""
    gpu_memory: BytesOrPart = "auto"
    """Budget on the compute device of each rank (RAM where there is no GPU).

    "auto" is half of the free memory, or more if states at home there need it. The rest is for
    activations. "80%" is a part of the free memory.
    """
    cpu_memory: BytesOrPart = "auto"
    """Budget in host memory.

    "auto" is the free memory, less a reserve of a tenth of all memory: at least 2 GiB, at most 16
    GiB, and at most half of the free memory. Limits of control groups count. "80%" is a part of the
    free memory. The ranks of a node get equal parts of both. Where the compute device is the CPU,
    or has no memory of its own, a quarter of that stays for activations, and the rest is for
    `gpu_memory` and `cpu_memory`.
    """

    parameters: TierName = "nvme"
    """Home of the parameters.

    Where `nvme` has no directory, the default is "cpu".
    """
    gradients: TierName = "cpu"
    """Home of the gradients."""
    optimizer: TierName = "nvme"
    """Home of the optimizer states.

    Where `nvme` has no directory, the default is "cpu".
    """
    activations: TierName = "gpu"
    """The tier of tensors that a forward saves for its backward.

    "gpu": on the compute device, as in plain PyTorch. "cpu": in host memory. What does not fit
    there stays on the device. Where the device is the CPU nothing moves. "nvme": in host memory,
    and on from there to the drives.
    """
    recompute: Literal["off", "all", "auto"] = "off"
    """Whether each repeated block keeps only its inputs for the backward, which then runs its
    forward again.

    With "all" memory for activations becomes one hidden state per block, for about a third more
    compute. With "auto" the first two steps measure the bytes and the seconds of each block. Then
    it keeps, offloads (where `activations` says) or recomputes what it saves, so that a step takes
    least time within the memory for activations: what `gpu_memory` leaves. The inputs go where
    `activations` says. The numbers are the same, dropout included. A block that the model
    checkpoints by itself is left alone.
    """

    stage: Literal[0, 1, 2, 3] = 3
    """What several ranks share among them (ZeRO, section 5); each rank holds 1/N of it.

    They share nothing with 0, optimizer states from 1 on, gradients from 2 on, parameters with 3.
    With 1 and 2 every rank has all parameters in the memory of its device. With 1 it has all
    gradients, too, there or in host memory (`gradients`), which are then reduced once per step and
    not once per backward.
    """
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """dtype of parameters and compute; "auto" is the model's own."""
    moment_precision: Literal["fp32", "bf16", "int8"] = "fp32"
    """How the optimizer's moments are kept: 8, 4 or 2.25 bytes per parameter.

    Below fp32 they are rounded stochastically.
    """
    algorithm: Literal["adam", "adagrad", "lion", "ademamix", "momentum", "sgd", "other"] = "adam"
    """What trains the parameters, which says what states there are.

    There are three moments for "ademamix", two for "adam" (`infinity.Adam`, `AdamW`), and one for
    "adagrad", "lion" and "momentum" (`infinity.SGD`). There are none for "sgd" and "other"
    (`infinity.adapt`).
    """

    accumulation: Accumulation = "horizontal"
    """The order of a Trainer's micro-batches: one after the other, or all through each unit.

    It is the order of `infinity.accumulate`, for `gradient_accumulation_steps`. With "vertical",
    also written "layer_major", parameters move once a step, not once a micro-batch, and the
    activations of all micro-batches are alive at once. Weights are bitwise the same, unless the
    model draws random numbers.
    """

    durability: Durability = "off"
    """What outlives the process: nothing, or with "step" every optimizer step, or every N-th step.

    With "step" the states in the `nvme` directories stay there, and `infinity.wrap(...,
    resume=True)` continues from the last committed step with the same bits, whatever ended the
    process. It needs parameters and optimizer states on nvme. Each committed step also writes the
    cached states. With a number N those are the steps N, 2 N, 3 N and so on, and the last one; a
    kill costs N steps at most. States that are not cached then take half as much space again.
    Several ranks commit the same step; with `stage` 0 or 3, because 1 and 2 keep parameters on the
    device.
    """
    deterministic: bool = False
    """Have torch compute the same bits at every run on a GPU, too, as it does on a CPU.

    Some of its operators differ from run to run there: the backward of attention, `index_add`,
    `scatter_add`, `cumsum`. This turns on `torch.use_deterministic_algorithms` for the process, and
    sets CUBLAS_WORKSPACE_CONFIG; refused where CUDA has begun without that. An operator that has no
    deterministic algorithm raises `RuntimeError`.
    """
    inference: bool = False
    """Only run the model: every parameter counts as frozen, whatever its `requires_grad` says.

    There are no gradients, masters or moments, so what is set for these has no effect. A backward
    and an optimizer are refused. Weights that lie in safetensors files as they are used are read
    from there. Then nothing is written to NVMe, and `parameters="nvme"` needs no directory.
    """

    tuning: Annotated[Tuning, BeforeValidator(_as_tuning)] = Tuning()
    """Settings that the engine chooses by default, as a `Tuning` or a dict."""

    @property
    def steps_per_commit(self) -> int:
        """The number of steps from one commit to the next; 0 without commits."""
        if isinstance(self.durability, int):
            return self.durability
        return 1 if self.durability == "step" else 0

    @model_validator(mode="before")
    @classmethod
    def _without_drives(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Without the key `nvme` the default home of parameters and optimizer states is "cpu"."""
        return values if "nvme" in values else {"parameters": "cpu", "optimizer": "cpu", **values}

    @model_validator(mode="after")
    def _check(self) -> Config:
        for problem in (
            self._wrong_places(),
            self._wrong_update(),
            self._wrong_durability(),
            self._wrong_shares(),
        ):
            if problem:
                raise ValueError(problem)
        return self

    def _wrong_places(self) -> str:
        states = ("parameters", "gradients", "optimizer", "activations")
        on_nvme = [state for state in states if TIERS[getattr(self, state)].is_drive]
        if on_nvme and not self.nvme and not self.inference:
            return f"{' and '.join(on_nvme)} on nvme, but no directory is given: set nvme=[...]"
        if self.tuning.gpu_direct == "on" and not TIERS[self.parameters].is_drive:
            return (
                f"gpu_direct='on' needs parameters='nvme', not {self.parameters!r}: "
                "only those are read to the GPU"
            )
        if self.tuning.activation_memory != "auto" and TIERS[self.activations].is_device:
            return (
                "activation_memory is for activations that are offloaded; set "
                "activations='cpu' or 'nvme', or leave it out"
            )
        if len(set(self.nvme)) < len(self.nvme):
            return f"nvme names a directory twice: {', '.join(map(str, self.nvme))}"
        return self._wrong_whole_states()

    def _wrong_whole_states(self) -> str:
        """The error text if whole replicas of states are on a tier that cannot hold them."""
        kept, homes, stage = [], [], 2
        if self.stage in (1, 2) and not TIERS[self.parameters].is_device:
            kept.append("all parameters on the device of every rank")
            homes.append("parameters='gpu'")
            stage = 3
        if self.stage == 1 and TIERS[self.gradients].is_drive and not self.inference:
            kept.append("all gradients in the memory of every rank, until a step reduces them")
            homes.append("gradients='cpu' or 'gpu'")
        return (
            f"stage={self.stage} keeps {', and '.join(kept)}; set {' and '.join(homes)}, or "
            f"stage={stage}, where each rank keeps its part of them on any tier"
            if kept
            else ""
        )

    def _wrong_update(self) -> str:
        if self.tuning.update != "delayed" or self.inference:
            return ""
        on_device = TIERS[self.parameters].is_device
        if on_device or not self.tuning.copy_on_write:
            wrong = "parameters on gpu" if on_device else "copy_on_write=False"
            return (
                "update='delayed' keeps the old parameters beside the new ones, "
                f"which cannot be with {wrong}; put the parameters on cpu or nvme "
                "and leave copy_on_write=True, or choose another update"
            )
        if self.tuning.gpu_cache not in ("auto", 0):
            return (
                "update='delayed' keeps old parameters beside the new ones, which "
                "gpu_cache does not; set it to 0"
            )
        return ""

    def _wrong_durability(self) -> str:
        if self.durability == "off":
            return ""
        if self.inference:
            return (
                "durability='step' commits optimizer steps, and inference=True makes none; leave "
                "one of them out"
            )
        if self.stage in (1, 2):
            return (
                f"durability={self.durability!r} commits parameters on nvme, and stage="
                f"{self.stage} keeps them on the device of every rank; set stage=3, or stage=0 for "
                "whole replicas, or durability='off'"
            )
        needed = {
            "parameters": ("nvme", self.parameters),
            "optimizer": ("nvme", self.optimizer),
            "copy_on_write": (True, self.tuning.copy_on_write),
            "gpu_cache": (0, 0 if self.tuning.gpu_cache == "auto" else self.tuning.gpu_cache),
        }
        wrong = [f"{name}={want!r}" for name, (want, has) in needed.items() if has != want]
        if self.tuning.update == "delayed":
            wrong.append("another update than 'delayed'")
        if self.algorithm == "other":
            wrong.append("another algorithm than 'other'")
        needs = f"durability={self.durability!r} needs {', '.join(wrong)}"
        return f"{needs}, or set durability='off'" if wrong else ""

    def _wrong_shares(self) -> str:
        shares = self.tuning.nvme_shares
        if isinstance(shares, str) or len(shares) == len(self.nvme):
            return ""
        numbers, directories = len(shares), len(self.nvme)
        return (
            f"nvme_shares has {numbers} number{'s' * (numbers != 1)}, "
            f"but nvme has {directories} director{'y' if directories == 1 else 'ies'}"
        )
