"""`infinity.initialize`: makes an engine for a script written for DeepSpeed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from infinity.build import wrapping
from infinity.config import Config
from infinity.deepspeed.agree import check_counts, join_ranks, take_model
from infinity.deepspeed.communication import PORT, get_rank, get_world_size
from infinity.deepspeed.data import Collate, loader
from infinity.deepspeed.engine import DeepSpeedEngine, Made, unwrap
from infinity.deepspeed.errors import DeepSpeedConfigError
from infinity.deepspeed.names import VERSION
from infinity.deepspeed.optimizer_names import answering
from infinity.deepspeed.optimizers import Client, Recipe, options, recipe, share_groups
from infinity.deepspeed.schedulers import scheduler
from infinity.deepspeed.settings import Settings
from infinity.deepspeed.source import Source
from infinity.deepspeed.zero import units_for
from infinity.directories.lock import lock_directory
from infinity.engine import is_wrapped
from infinity.errors import PathInUseError, in_words
from infinity.modules.check import refuse_lazy
from infinity.optim.conversion import redirect, unwrapped
from infinity.sharding.ranks import find_ranks
from infinity.version import __version__
from infinity.weights.init import outside

log = logging.getLogger("infinity")
_INFO = "DeepSpeed info: version=%s, git-hash=unknown, git-branch=unknown, with infinity %s"
"""The start of DeepSpeed's log, with this engine's addition."""

_MOST_ENGINES = 64  # in one NVMe directory


@outside()
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Client | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Collate | None = None,
    config: Source | None = None,
    mesh_param: Any = None,
    config_params: Source | None = None,
) -> tuple[DeepSpeedEngine, Any, DataLoader[Any] | None, Any]:
    """Wrap `model` by a configuration of DeepSpeed. Returns `(engine, optimizer, dataloader,
    scheduler)`. Missing members are None.

    `config` (or `config_params`, or `args.deepspeed_config`) is a dict, a path to JSON or HJSON, or
    base64 text. docs/deepspeed.md has the meaning of each key. `optimizer` is an optimizer of torch
    that exists already, or a function of parameters that makes one. The engine adopts its groups,
    numbers and states. From then on its groups are those of the returned optimizer. It takes
    precedence over the optimizer in the configuration, which trains `model_parameters` (default:
    all with gradients). `lr_scheduler` is a scheduler of that optimizer, or a function of an
    optimizer that makes one. A scheduler in the configuration takes precedence. Without an
    optimizer the model is for inference, and takes no memory for gradients and states.

    A model that has an engine, of an earlier call or of `infinity.wrap`, is unwrapped first: it
    keeps its weights, and that engine ends. Moments are lost, unless a checkpoint has them.

    All ranks call it. If torchrun has started several ranks and torch.distributed is not
    initialized, it is initialized. Raises `ConfigError` for impossible arguments before anything is
    changed, and the errors of `infinity.wrap`.
    """
    source = _source(args, config, config_params)
    if mpu is not None or mesh_param is not None:
        raise DeepSpeedConfigError(
            "mpu and mesh_param are not supported: the engine shares a model among all data "
            "parallel ranks; leave them out, or give infinity.wrap a DeviceMesh as group="
        )
    plain = _checked(model)
    join_ranks(distributed_port, dist_init_required)
    check_counts()
    if get_rank() == 0:
        log.info(_INFO, VERSION, __version__)
    settings = Settings.read(source, get_world_size(), _hidden_size(plain))
    for notice in settings.notices:
        log.info("%s", notice)
    found = recipe(settings, plain, optimizer, model_parameters)
    _check_scheduler(settings, lr_scheduler, found)
    if is_wrapped(plain):
        unwrap(plain)
    take_model(plain)
    batches = loader(settings, training_data, collate_fn)
    with _wrapped(plain, settings, found) as directories:
        built = None if found is None else found.build(plain, options(settings))
        follower = _scheduler(settings, lr_scheduler, built)
    if settings.buffer_dtype is not None:
        _cast_buffers(plain, settings.buffer_dtype)
    engine = DeepSpeedEngine(Made(plain, settings, built, follower, batches, directories))
    if built is not None:
        answering(built, engine)
    if built is not None and found is not None and found.client is not None:
        engine.client_optimizer = found.client
        share_groups(found.client, built)
        redirect(follower, found.client, built)
    return engine, built, batches, follower


def _source(args: Any, config: Source | None, config_params: Source | None) -> Source:
    by_args = [getattr(args, name, None) for name in ("deepspeed_config", "deepscale_config")]
    given = [each for each in (config, config_params, *by_args) if each is not None]
    if not given:
        raise DeepSpeedConfigError(
            "infinity.initialize needs a configuration: give config=, a dict or a path"
        )
    if any(each is not given[0] and each != given[0] for each in given):
        raise DeepSpeedConfigError(
            "config, config_params and args.deepspeed_config give several configurations; give one"
        )
    return given[0]


def _checked(model: object) -> nn.Module:
    if isinstance(model, DeepSpeedEngine):
        raise DeepSpeedConfigError(
            "the model is an engine of infinity.initialize already; use that, or give its "
            "engine.module, which gets another engine"
        )
    if not isinstance(model, nn.Module):
        raise DeepSpeedConfigError(
            f"infinity.initialize takes a torch.nn.Module, not {in_words(model)}"
        )
    refuse_lazy(model)
    return model


def _hidden_size(model: nn.Module) -> int | None:
    """The hidden size of a model of transformers, on which some "auto" values depend."""
    described = getattr(model, "config", None)
    described = getattr(described, "text_config", described)
    size = getattr(described, "hidden_size", None)
    return size if isinstance(size, int) else None


# The model


@contextmanager
def _wrapped(model: nn.Module, settings: Settings, found: Recipe | None) -> Iterator[list[Path]]:
    """Wrap the model, and keep it wrapped if the block succeeds. Yields the directories that were
    made for it. Without an optimizer it is for inference, without gradients and states."""
    update: dict[str, Any] = {"inference": True}
    if found is not None:
        update = {"algorithm": found.algorithm}
        is_said = "moment_precision" in settings.config.model_fields_set
        if found.narrow and not is_said and _is_bf16(settings, model):
            update["moment_precision"] = "bf16"
    config = settings.config.model_copy(update=update)
    made: list[Path] = []
    try:
        config, directories = _with_own_directories(config, made)
        with wrapping(model, config, units_for(model, settings.leaf_modules)):
            yield directories
    except BaseException:
        _remove(made)
        raise


def _is_bf16(settings: Settings, model: nn.Module) -> bool:
    """Whether all parameters are trained in bf16."""
    if settings.precision != "fp32":
        return settings.precision == "bf16"
    return {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def _cast_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    for name, buffer in list(model.named_buffers()):
        if buffer.is_floating_point():
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, buffer.to(dtype))


def _with_own_directories(config: Config, made: list[Path]) -> tuple[Config, list[Path]]:
    """`config` with the directories on NVMe. If another engine works in them, with `engine<N>`
    below them. Returns these, too. New directories are added to `made`."""
    if not config.nvme:
        return config, []
    own = find_ranks("auto", config.stage).own
    for number in range(1, _MOST_ENGINES + 1):
        below = "" if number == 1 else f"engine{number}"
        places = [path / below for path in config.nvme]
        for path in places:
            _make(path, made)
        if not any(_is_taken(path / own) for path in places):
            chosen = places if below else []
            return config.model_copy(update={"nvme": tuple(places)}), chosen
    raise PathInUseError(
        f"{_MOST_ENGINES} engines work in {config.nvme[0]} already; destroy some, or give others "
        "another nvme_path"
    )


def _make(path: Path, made: list[Path]) -> None:
    try:
        made += [each for each in (path, *path.parents) if not each.exists()]
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise DeepSpeedConfigError(
            f"nvme_path {path} cannot be made: {reason}; name a directory on the drive to be used"
        ) from None


def _is_taken(path: Path) -> bool:
    """Whether an engine works in `path`."""
    if not path.is_dir():
        return False
    try:
        lock_directory(path, "nvme_path").release()
    except PathInUseError:
        return True
    return False


def _remove(directories: Iterable[Path]) -> None:
    """Remove empty directories, the innermost first."""
    for path in sorted(set(directories), key=lambda each: -len(each.parts)):
        with suppress(OSError, ValueError):
            path.rmdir()


# Parts beside the model


def _check_scheduler(settings: Settings, given: Any, found: Recipe | None) -> None:
    if given is not None and found is None:
        raise DeepSpeedConfigError(
            "lr_scheduler needs an optimizer: give one, or an optimizer block"
        )
    if given is not None and not callable(given) and not hasattr(given, "step"):
        raise DeepSpeedConfigError(
            f"lr_scheduler is {in_words(given)}; give a scheduler, or a function of an optimizer "
            "that makes one"
        )
    client = None if found is None else found.client
    if hasattr(given, "optimizer") and unwrapped(given.optimizer) is not client:
        raise DeepSpeedConfigError(
            "lr_scheduler was built for another optimizer than the one that trains the model; give "
            "optimizer= that one, or lr_scheduler= a function of an optimizer that makes one"
        )


def _scheduler(settings: Settings, given: Any, optimizer: Any) -> Any:
    """The scheduler of the configuration, or else of the script."""
    if settings.scheduler is not None and optimizer is not None:
        return scheduler(settings.scheduler, optimizer)
    if given is None or (hasattr(given, "step") and not isinstance(given, type)):
        return given
    made = given(optimizer)
    if not hasattr(made, "step"):
        raise DeepSpeedConfigError(
            f"lr_scheduler gave {in_words(made)}; it must be a scheduler, or a function of an "
            "optimizer that returns one"
        )
    return made
