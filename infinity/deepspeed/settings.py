"""`Settings`: a DeepSpeed configuration in the terms of this engine.

`infinity.deepspeed.keys` has the treatment of every key. Here the keys that are honored or mapped
become fields.

1. `source.read` returns a dict, and `renamed.modernize` moves old names.
2. `rows.account` returns a row for each key. If rows are refused, one message names them all.
3. Each function below reads values that belong together, and makes one field of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

import torch

from infinity.config import Config
from infinity.deepspeed.errors import DeepSpeedConfigError
from infinity.deepspeed.keys import KEYS, OPTIMIZERS, Treatment
from infinity.deepspeed.renamed import modernize
from infinity.deepspeed.rows import AUTO, AUTO_LEFT, BATCH, KeyRow, account
from infinity.deepspeed.source import Source, read
from infinity.errors import ConfigError
from infinity.optim.conversion import algorithm_of
from infinity.tier import TIERS

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LEAVES = ("classes", "names", "name_suffixes")
Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class Batches:
    """Numbers of samples: `train` == `micro` * `accumulation` * ranks."""

    train: int
    """Samples of one optimizer step."""
    micro: int
    """Samples of one forward of one rank."""
    accumulation: int
    """Forwards of a rank for each step."""


@dataclass(frozen=True)
class Named:
    """A block with a type and its parameters: the optimizer or the scheduler."""

    type: str
    params: Mapping[str, Any]


@dataclass(frozen=True)
class LossScale:
    """The scale of the loss with fp16."""

    static: float | None
    """A fixed scale, of any value. None is a dynamic one, with the numbers below."""
    initial: float
    window: int
    hysteresis: int
    minimum: float
    consecutive: bool = False
    """Whether every finite step restores the hysteresis."""


@dataclass(frozen=True)
class Settings:
    """The behavior of `infinity.initialize` for a configuration of DeepSpeed."""

    config: Config
    """The configuration for `infinity.wrap`."""
    batches: Batches
    managed_accumulation: bool
    """Whether the engine counts micro-batches. Otherwise the caller decides where a step ends."""
    gradient_clipping: float
    """The largest global norm of gradients. 0 means no limit."""
    precision: Precision
    loss_scale: LossScale | None
    """Only with fp16."""
    buffer_dtype: torch.dtype | None
    """The dtype of floating-point buffers. None if they keep theirs."""
    cast_inputs: bool
    """Whether floating-point inputs of the model are cast to fp16."""
    autocast: torch.dtype | None
    """The dtype of `torch.autocast` around the forward."""
    skip_nonfinite: bool
    """Whether a step with an infinite or NaN gradient changes nothing."""
    average: Literal["mean", "sum"]
    """The reduction of gradients among ranks."""
    optimizer: Named | None
    scheduler: Named | None
    gather_16bit_weights_on_save: bool
    refuse_unused: bool
    """Whether a step fails if a trainable parameter got no gradient."""
    leaf_modules: Mapping[str, tuple[str, ...]]
    """Names of classes or modules that are one unit each."""
    tag_validation: Literal["ignore", "warn", "fail"]
    drop_last: bool
    """Whether the data loader leaves out a last, smaller batch."""
    raw: Mapping[str, Any]
    """The original configuration."""
    notices: tuple[str, ...]
    """Lines for a log."""
    rows: tuple[KeyRow, ...] = field(repr=False)
    """Every key, with its treatment."""

    @property
    def has_batches(self) -> bool:
        """Whether the configuration has a batch size. Otherwise `batches` are placeholders."""
        given = {row.path for row in self.rows if row.value not in (None, AUTO)}
        return not given.isdisjoint(("train_batch_size", "train_micro_batch_size_per_gpu"))

    @classmethod
    def read(
        cls, source: Source, ranks: int = 1, hidden_size: int | None = None, partial: bool = False
    ) -> Settings:
        """The settings of `source` for that many ranks.

        For some keys, the meaning of "auto" depends on the `hidden_size` of the model. With
        `partial` the configuration is not final: other "auto" and a missing batch size count as
        left out. Raises `ConfigError` with all refused keys and the reasons.
        """
        explained = explain(source, ranks, hidden_size, partial)
        if explained.settings is None:
            raise DeepSpeedConfigError("; ".join(explained.problems))
        return explained.settings


class Explained(NamedTuple):
    """A configuration, key by key."""

    rows: tuple[KeyRow, ...]
    problems: tuple[str, ...]
    """The reasons why it is refused. Empty if it is not."""
    settings: Settings | None
    """The whole configuration, without "auto" values. None if it is refused."""


def explain(
    source: Source, ranks: int = 1, hidden_size: int | None = None, partial: bool = True
) -> Explained:
    """Account for every key of `source`. The arguments are those of `Settings.read`.

    Raises `ConfigError` if it cannot be read at all.
    """
    raw = read(source)
    config = read(raw)
    notices = modernize(config)
    rows = tuple(account(config, hidden_size))
    problems = [row.problem for row in rows if row.problem]
    autos = [row.path for row in rows if row.is_auto]
    if autos and not partial:
        problems.append(f"{', '.join(autos)}: {AUTO_LEFT}")
    if problems:
        return Explained(rows, tuple(problems), None)
    try:
        settings = _settings(_Values(rows), ranks, partial, (raw, notices, rows))
    except ConfigError as error:
        return Explained(rows, (str(error),), None)
    return Explained(rows, (), settings)


class _Values:
    """The effective values of a configuration, by path."""

    def __init__(self, rows: Sequence[KeyRow]) -> None:
        self.given = {row.path: row.value for row in rows if row.value != AUTO and not row.is_off}

    def __getitem__(self, path: str) -> Any:
        value = self.given.get(path)
        return KEYS[path].default if value is None else value

    def below(self, block: str) -> dict[str, Any]:
        """The content of a block, by names inside of it."""
        start = f"{block}."
        return {
            path.removeprefix(start): value
            for path, value in self.given.items()
            if path.startswith(start) and value is not None
        }


def _settings(
    values: _Values,
    ranks: int,
    partial: bool,
    found: tuple[Mapping[str, Any], list[str], tuple[KeyRow, ...]],
) -> Settings:
    raw, notices, rows = found
    optimizer = _named(values, "optimizer")
    precision = _precision(values)
    buffer_dtype = values["data_types.buffer_dtype"]
    leaf = {name: values[f"zero_optimization.leaf_module.{name}"] for name in LEAVES}
    return Settings(
        config=_config(values, precision, optimizer, notices),
        batches=_batches(values, ranks, partial),
        managed_accumulation=values["managed_gradient_accumulation"],
        gradient_clipping=float(values["gradient_clipping"]),
        precision=precision,
        loss_scale=_loss_scale(values) if precision == "fp16" else None,
        buffer_dtype=None if buffer_dtype is None else DTYPES[buffer_dtype],
        cast_inputs=precision == "fp16" and values["fp16.auto_cast"],
        autocast=_autocast(values, precision),
        skip_nonfinite=precision == "bf16" and values["bf16.check_grad_overflow"],
        average="sum" if values["gradient_allreduce_op"] == "sum" else "mean",
        optimizer=optimizer,
        scheduler=_named(values, "scheduler"),
        gather_16bit_weights_on_save=values[
            "zero_optimization.stage3_gather_16bit_weights_on_model_save"
        ],
        refuse_unused=not values["zero_optimization.ignore_unused_parameters"],
        leaf_modules=leaf,
        tag_validation=values["checkpoint.tag_validation"],
        drop_last=values["dataloader_drop_last"],
        raw=raw,
        notices=(*notices, *_ignored(rows)),
        rows=rows,
    )


def _ignored(rows: Sequence[KeyRow]) -> list[str]:
    """One line for each reason."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row.treatment is Treatment.IGNORED:
            by_reason[row.reason].append(row.path)
    return [f"{', '.join(paths)}: ignored, {reason}" for reason, paths in by_reason.items()]


def _named(values: _Values, block: str) -> Named | None:
    kind = values[f"{block}.type"]
    if kind is None:
        if values.below(block):
            raise DeepSpeedConfigError(f"{block} has no type; name one, or leave the block out")
        return None
    return Named(kind, values.below(f"{block}.params"))


# Batch sizes


def _batches(values: _Values, ranks: int, partial: bool) -> Batches:
    """Two of the three numbers determine the third. One of the first two is enough."""
    train, micro, accumulation = (values[path] for path in BATCH)
    if train is None and micro is None:
        if partial:
            return Batches(ranks * (accumulation or 1), 1, accumulation or 1)
        raise DeepSpeedConfigError(
            "give train_batch_size, train_micro_batch_size_per_gpu, or both: train_batch_size = "
            f"train_micro_batch_size_per_gpu * gradient_accumulation_steps * {ranks} ranks"
        )
    if train is None:
        accumulation = accumulation or 1
        return Batches(micro * accumulation * ranks, micro, accumulation)
    if micro is None:
        accumulation = accumulation or 1
        micro = train // (accumulation * ranks)
    elif accumulation is None:
        accumulation = train // (micro * ranks)
    if train != micro * accumulation * ranks or not micro or not accumulation:
        raise DeepSpeedConfigError(_equation(train, micro, accumulation, ranks))
    return Batches(train, micro, accumulation)


def _equation(train: int, micro: int, accumulation: int, ranks: int) -> str:
    product = micro * accumulation * ranks
    return (
        f"train_batch_size={train} is not train_micro_batch_size_per_gpu={micro} * "
        f"gradient_accumulation_steps={accumulation} * {ranks} ranks = {product}; change one of "
        "them, or leave one out"
    )


# Precision


def _precision(values: _Values) -> Precision:
    chosen = [name for name in ("fp16", "bf16") if values[f"{name}.enabled"]]
    if len(chosen) > 1:
        raise DeepSpeedConfigError(
            "fp16.enabled and bf16.enabled are both true; choose one of them"
        )
    precision = cast(Precision, chosen[0] if chosen else "fp32")
    asked = values["data_types.param_dtype"]
    if asked is not None and DTYPES[asked] is not DTYPES[precision]:
        raise DeepSpeedConfigError(
            f"data_types.param_dtype={asked!r} is not the precision {precision}; set bf16.enabled "
            "or fp16.enabled, which say the same"
        )
    return precision


def _autocast(values: _Values, precision: Precision) -> torch.dtype | None:
    if not values["torch_autocast.enabled"]:
        return None
    dtype = values["torch_autocast.dtype"]
    if precision not in ("fp32", dtype):
        raise DeepSpeedConfigError(
            f"torch_autocast.dtype={dtype!r} is not that of {precision}.enabled; set it to "
            f"{precision!r}, or leave one of them out"
        )
    return DTYPES[dtype]


def _loss_scale(values: _Values) -> LossScale:
    static = values["fp16.loss_scale"]
    initial = 2.0 ** values["fp16.initial_scale_power"]
    minimum = float(values["fp16.min_loss_scale"])
    if not static and (math.frexp(minimum)[0] != 0.5 or minimum > initial):
        raise DeepSpeedConfigError(
            f"fp16.min_loss_scale={minimum:g} must be a power of two, and at most "
            f"2**fp16.initial_scale_power, {initial:g}"
        )
    return LossScale(
        static=float(static) if static else None,
        initial=initial,
        window=values["fp16.loss_scale_window"],
        hysteresis=values["fp16.hysteresis"],
        minimum=minimum,
        consecutive=values["fp16.consecutive_hysteresis"],
    )


# Places


def _config(
    values: _Values, precision: Precision, optimizer: Named | None, notices: list[str]
) -> Config:
    for kind in ("bf16", "fp16"):
        path = f"{kind}.{kind}_master_weights_and_grads"
        if values[path]:
            notices.append(f"{path}=True: masters stay in fp32, where small updates are not lost")
    chosen: dict[str, Any] = {
        "stage": values["zero_optimization.stage"],
        "precision": "auto" if precision == "fp32" else precision,
        "algorithm": _algorithm(optimizer),
        **_homes(values, notices),
    }
    moments = _moment_precision(values, optimizer)
    if moments != "fp32":
        chosen["moment_precision"] = moments
    if values["activation_checkpointing.cpu_checkpointing"]:
        chosen["activations"] = "cpu"
    own = values.below("infinity")
    own.pop("strict_config", None)
    tuning = {**_tuning(values, precision), **_as_dict(own.pop("tuning", {}))}
    if tuning:
        chosen["tuning"] = tuning
    try:
        return Config(**{**chosen, **own})
    except ConfigError as error:
        raise DeepSpeedConfigError(
            f"the configuration becomes one that cannot work: {error}"
        ) from None


def _as_dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DeepSpeedConfigError(f"infinity.tuning must be an object with keys, not {value!r}")
    return value


def _homes(values: _Values, notices: list[str]) -> dict[str, Any]:
    """The homes of states, and the directories of states on NVMe."""
    stage, homes, paths = values["zero_optimization.stage"], {}, []
    for state, block in (("parameters", "offload_param"), ("optimizer", "offload_optimizer")):
        path = f"zero_optimization.{block}"
        device = values[f"{path}.device"]
        if state == "parameters" and device != "none" and stage in (1, 2):
            notices.append(
                f"{path}.device={device!r}: ignored at stage {stage}, where every rank has all "
                "parameters on its device; stage 3 offloads them"
            )
            device = "none"
        homes[state] = "gpu" if device == "none" else device
        if not TIERS[homes[state]].is_drive:
            continue
        found = values[f"{path}.nvme_path"]
        if found is None and "nvme" not in values.below("infinity"):
            raise DeepSpeedConfigError(
                f'{path}.device is "nvme", but {path}.nvme_path names no directory'
            )
        paths += [found] if isinstance(found, str) else list(found or ())
    # Reduced gradients go where updates run: host memory for states on NVMe. Whole gradients stay
    # on the device, unless the block "infinity" says otherwise.
    homes["gradients"] = "gpu" if stage == 1 or TIERS[homes["optimizer"]].is_device else "cpu"
    return {**homes, "nvme": tuple(dict.fromkeys(paths))} if paths else homes


def _algorithm(optimizer: Named | None) -> str:
    if optimizer is None:
        return "adam"  # until the optimizer of the caller is known
    known = OPTIMIZERS.get(optimizer.type.lower())
    if known is None or known.kind is None:
        return "other"
    return algorithm_of(known.kind, optimizer.params)


def _moment_precision(values: _Values, optimizer: Named | None) -> str:
    """The precision of moments. That of an optimizer of the script is only known with its model."""
    named = {} if optimizer is None else optimizer.params
    narrow = values["bf16.bf16_optimizer_states"] or not named.get("fp32_optimizer_states", True)
    return "bf16" if narrow and values["bf16.enabled"] else "fp32"


def _tuning(values: _Values, precision: Precision) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    if values["zero_optimization.enable_sanity_checks"]:
        chosen["poison"] = True
    direct = values["aio.use_gds"]
    if direct is not None:
        chosen["gpu_direct"] = "auto" if direct else "off"
    kept = values["zero_optimization.offload_param.max_in_cpu"]
    if kept is not None and values["zero_optimization.offload_param.device"] == "nvme":
        width = 4 if precision == "fp32" else 2
        chosen["cache"] = int(min(kept * width, 2**62))
    if _accumulates_in_fp32(values, precision):
        chosen["gradient_precision"] = "fp32"
    return chosen


def _accumulates_in_fp32(values: _Values, precision: Precision) -> bool:
    """Whether gradients are accumulated and reduced in fp32 if parameters are narrower."""
    asked = {}
    for path in ("communication_data_type", "data_types.grad_accum_dtype"):
        if values[path] is not None:
            asked[path] = DTYPES[values[path]]
            if asked[path] not in (torch.float32, DTYPES[precision]):
                raise DeepSpeedConfigError(
                    f"{path}={values[path]!r}: gradients are accumulated and reduced in the dtype "
                    f"of the parameters ({precision}) or in fp32; choose one of these"
                )
    return precision != "fp32" and torch.float32 in asked.values()
