"""Checkpoints of a DeepSpeed engine: a directory for each tag, and a file `latest` with the name of
one.

The directory of a tag is a checkpoint of `Engine.save_checkpoint`. Its `extra` has the counters of
the DeepSpeed engine, the state of the scheduler, and the `client_state` of the script.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from infinity.deepspeed import zero_to_fp32
from infinity.deepspeed.agree import directory_of_first
from infinity.deepspeed.answers import Answers
from infinity.deepspeed.errors import DeepSpeedConfigError
from infinity.deepspeed.latest import LATEST, is_name, read_latest, write_latest
from infinity.deepspeed.optimizers import share_groups
from infinity.directories.drafts import replacing
from infinity.errors import CheckpointError, ConfigError

log = logging.getLogger("infinity")

_SCRIPT = "zero_to_fp32.py"
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class TaggedCheckpoints:
    """Saves and loads one engine. All ranks call its methods."""

    def __init__(self, engine: Answers) -> None:
        self._engine = engine

    def save(
        self,
        directory: Path,
        tag: str | int | None,
        client_state: Mapping[str, Any],
        is_latest: bool,
        without_frozen: bool,
    ) -> bool:
        """See `DeepSpeedEngine.save_checkpoint`."""
        engine = self._engine
        name = f"global_step{engine.global_steps}" if tag is None else str(tag)
        if not is_name(name):
            raise DeepSpeedConfigError(f"tag={tag!r} must be a name without directories")
        name, directory = self._agreed(name), directory_of_first(directory)
        extra: dict[str, Any] = {
            "client_state": dict(client_state),
            "counters": {counter: getattr(engine, counter) for counter in _COUNTERS},
            "zero_stage": engine.zero_optimization_stage(),
        }
        if hasattr(engine.lr_scheduler, "state_dict"):
            extra["lr_scheduler"] = engine.lr_scheduler.state_dict()
        optimizers = [] if engine.optimizer is None else [engine.optimizer]
        engine.engine.save_checkpoint(
            directory / name, optimizers, extra, trainable_only=without_frozen
        )
        self._add_script(directory, name)
        if is_latest:
            self._write_beside(directory / LATEST, name, lambda: write_latest(directory, name))
        return True

    def _write_beside(self, path: Path, name: str, write: Callable[[], None]) -> None:
        """The first rank writes a file beside the checkpoint `name`. Then every rank finds it. If
        the write fails, all ranks raise."""
        failure = self._on_first(write)
        if failure:
            raise CheckpointError(
                f"{path} was not written: {failure}; the checkpoint is whole: load it with "
                f"tag={name!r}"
            )

    def _add_script(self, directory: Path, name: str) -> None:
        """Write a copy of `zero_to_fp32.py`, executable for its owner, as DeepSpeed does."""

        def write() -> None:
            source = Path(zero_to_fp32.__file__).read_bytes()
            with replacing(directory / _SCRIPT, "directory of checkpoints") as path:
                path.write_bytes(source)
                path.chmod(path.stat().st_mode | stat.S_IEXEC)

        self._write_beside(directory / _SCRIPT, name, write)

    def _on_first(self, write: Callable[[], None]) -> str:
        """Call `write` on the first rank. Returns its error on every rank, or ""."""
        failure = [""]
        if self._engine.global_rank == 0:
            try:
                write()
            except (ConfigError, OSError) as error:
                failure = [str(error)]
        if self._engine.world_size > 1:
            dist.broadcast_object_list(failure, 0)
        return failure[0]

    def _agreed(self, tag: str) -> str:
        """The tag of the first rank. If other ranks have another tag, `checkpoint.tag_validation`
        decides whether that is an error."""
        if self._engine.world_size == 1:
            return tag
        tags: list[str] = [""] * self._engine.world_size
        dist.all_gather_object(tags, tag)
        mode = self._engine.settings.tag_validation
        if mode != "ignore" and len(set(tags)) > 1:
            text = f"the ranks save under different tags, the first one under {tags[0]!r}"
            if mode == "fail":
                raise DeepSpeedConfigError(f"{text}, and checkpoint.tag_validation is Fail")
            log.warning("%s, which is taken", text)
        return tags[0]

    def load(
        self,
        directory: Path,
        tag: str | int | None,
        with_optimizer: bool,
        with_scheduler: bool,
        only_weights: bool,
        strict: bool,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """See `DeepSpeedEngine.load_checkpoint`."""
        engine, directory = self._engine, directory_of_first(directory)
        if tag is None:
            tag = read_latest(directory)
            if tag is None:
                log.warning(
                    "%s has no file %s, so nothing was loaded; give a tag", directory, LATEST
                )
                return None, None
        path = directory / str(tag)
        optimizer = engine.optimizer if with_optimizer else None
        found = engine.engine.load_checkpoint(
            path, [] if optimizer is None else [optimizer], strict
        )
        if engine.client_optimizer is not None and engine.optimizer is not None:
            share_groups(engine.client_optimizer, engine.optimizer)  # which are new ones
        if not only_weights:
            for counter, value in found.get("counters", {}).items():
                setattr(engine, counter, value)
        if with_scheduler and "lr_scheduler" in found and engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(found["lr_scheduler"])
        return str(path), found.get("client_state", found)

    # Weights

    def frozen(self) -> list[str]:
        """The names of parameters that take no gradients."""
        named = self._engine.module.named_parameters(remove_duplicate=False)
        return [name for name, parameter in named if not parameter.requires_grad]

    def weights(self, without_frozen: bool) -> dict[str, torch.Tensor] | None:
        """All weights on the first rank, None on other ranks. All ranks call it. The trained part
        of a model (`without_frozen`) is returned even if the configuration does not gather weights
        on save. Otherwise transformers would write adapters without weights."""
        engine, frozen = self._engine, self.frozen() if without_frozen else []
        if (
            engine.zero_optimization_stage() == 3
            and not frozen
            and not engine.settings.gather_16bit_weights_on_save
        ):
            raise ValueError(
                "whole weights were asked for at stage 3; set "
                '"stage3_gather_16bit_weights_on_model_save": true in zero_optimization'
            )
        if engine.global_rank != 0:
            for _ in engine.engine.weights():
                pass
            return None
        state = engine.engine.state_dict()
        for name in frozen:
            state.pop(name, None)
        return state

    def save_weights(self, file: Path, without_frozen: bool) -> bool:
        """See `DeepSpeedEngine.save_16bit_model`."""
        try:
            state = self.weights(without_frozen)
        except ValueError as error:
            log.warning("%s was not saved: %s", file, error)
            return False

        def write() -> None:
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file.absolute(), "directory of weights") as path:
                torch.save(state, path)

        failure = self._on_first(write)
        if failure:
            raise CheckpointError(f"{file} was not written: {failure}")
        return True
