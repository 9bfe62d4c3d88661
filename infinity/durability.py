"""Every step outlives the process: what a record says beside the states on NVMe, when it is fixed,
and who gets it back.

[Note: between two steps]
The record of a step is fixed when the next training forward begins. Schedulers have stepped by
then, and the random numbers of that forward are still to come. It is fixed sooner where states are
about to change otherwise: a second step without a forward, a write outside of steps, the end. When
an earlier run is taken over, the first training forward draws what the next one there would have
drawn.

[Note: a load that is cut off]
A checkpoint replaces states one by one, and may have to have one committed before it can replace it
once more. Such a record says that it is not whole, and is not taken over.
"""

from __future__ import annotations

import io
import logging
import random
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from infinity.checkpoint.inert import read_item
from infinity.device import ComputeDevice
from infinity.errors import CheckpointError, ConfigError, InfinityError, in_words
from infinity.modules.load import persistent_buffers
from infinity.observe import Recorder
from infinity.optim.committer import Committer
from infinity.optim.job import JobQueue
from infinity.optim.optimizer import Optimizer
from infinity.optim.updater import StepListeners, Updater
from infinity.sharding.tensor_parallel import local
from infinity.tiers.block import Block
from infinity.tiers.store import Store, Version

log = logging.getLogger("infinity")

VERSION = 1


class CommittedStep:
    """What a record says. Raises `CheckpointError` for what is damaged or of another version."""

    def __init__(self, content: bytes) -> None:
        try:
            values: dict[str, Any] = read_item(content)
            if values["version"] != VERSION:
                raise ValueError(f"it is of version {values['version']!r}, and {VERSION} is known")
            self.step = int(values["step"])
            self.skipped = int(values["skipped"])
            self.is_whole = bool(values["whole"])
            self.versions = [
                Version(each & 1, bool(each & 2)) for each in values["blocks"].tolist()
            ]
            self.optimizers: list[dict[str, Any]] = list(values["optimizers"])
            self.random: dict[str, Any] = dict(values["random"])
            self.buffers: dict[str, torch.Tensor] = dict(values["buffers"])
            self.tracked: dict[str, Any] = dict(values["tracked"])
        except Exception as error:
            raise CheckpointError(
                f"the record of the committed states cannot be read: {error}; go on from a "
                "checkpoint, in another directory"
            ) from error


class Durability:
    """Seals the states of one engine between steps, and gives back what a record has. For the
    thread that runs the model."""

    def __init__(
        self, store: Store, jobs: JobQueue, device: ComputeDevice, recorder: Recorder
    ) -> None:
        self._store = store
        self._device = device
        self._committer = Committer(store, jobs, recorder)
        self._found = None if store.taken_over is None else CommittedStep(store.taken_over)
        self._waiting = list(self._found.optimizers) if self._found is not None else []
        self._states = dict(self._found.tracked) if self._found is not None else {}
        self._tracked: dict[str, Any] = {}
        self._random: dict[str, Any] | None = None  # as this cycle began
        self._is_sealed = self._is_loading = self._has_begun = False

    def restore_blocks(self) -> bool:
        """Give the blocks what they had; False where there is nothing to go on from. Raises
        `CheckpointError` for a record that is not whole."""
        if self._found is None:
            return False
        if not self._found.is_whole:
            raise CheckpointError(
                "the earlier run was killed while it loaded a checkpoint, so its states are in "
                "part of that: load the checkpoint into an engine with another directory"
            )
        self._store.restore(self._found.versions)
        return True

    def give_up(self) -> None:
        """`wrap` fails: end the thread."""
        self._committer.close()

    def listeners(self, others: StepListeners) -> StepListeners:
        """What the updater tells, to `others` and to this."""

        def before_step() -> None:
            others.before_step()
            self.before_step()

        return others._replace(
            before_step=before_step, made=self.restore, before_write=self.before_write
        )

    def connect(self, model: nn.Module, updater: Updater) -> None:
        """Whose states these are. What was taken over goes on at its step."""
        self._model = weakref.ref(model)
        self._updater = updater
        if self._found is not None:
            updater.posted_steps, updater.skipped_steps = self._found.step, self._found.skipped
            self._is_sealed = True
            with torch.no_grad():
                for name, buffer in persistent_buffers(model):
                    local(buffer).copy_(self._found.buffers[name])

    @property
    def committed_step(self) -> int | None:
        """The last step that would survive a power cut; None while there is none."""
        committed = self._committer.committed_step
        return self._found.step if committed is None and self._found is not None else committed

    # Fixing records

    def before_forward(self) -> None:
        """A training forward begins."""
        if self._random is None:
            if self._found is not None and not self._has_begun:
                _set_random_states(self._device, self._found.random)
            self._has_begun = True
            self._random = _random_states(self._device)
        self.seal()

    def before_step(self) -> None:
        """A step begins: the one before is committed, so a kill costs one step at most."""
        self.seal()
        self.rest()
        self._is_sealed, self._random = False, None

    def before_write(self, blocks: Sequence[Block]) -> None:
        """`blocks` are about to be rewritten outside of a step; returns when they may be.

        Raises `ConfigError` before anything is changed for those that have one place only.
        """
        fixed = next((block for block in blocks if _is_fixed(block)), None)
        if fixed is not None:
            raise ConfigError(
                f"{fixed.name} cannot be changed with durability='step': what is frozen has one "
                "place on nvme, and a kill meanwhile would leave a part of it; change it before "
                "wrap, or set durability='off'"
            )
        if not all(block.home.is_free for block in blocks):
            self.seal()
            self.rest()
        self._is_sealed = False

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Inside, states are replaced one by one; see [Note: a load that is cut off]."""
        self._is_loading = True
        try:
            yield
        finally:
            self._is_loading = False

    def seal(self) -> None:
        """Have the states as they are after all posted steps committed; returns at once."""
        if not self._is_sealed:
            self._committer.seal(self._updater.posted_steps, self._content)
            self._is_sealed = True

    def rest(self) -> None:
        """Block until what was sealed is committed. Raises `EngineClosedError` when that
        failed."""
        self._committer.rest()
        self._store.latch.check()

    def close(self) -> None:
        """Commit the last step, and end the thread. What failed, or has lost its model or its
        optimizer, stays at the step that was committed last. May be called twice."""
        try:
            lost = self._model() is None or self._updater.owners.have_gone()
            if not self._store.latch.failed and not lost:
                self.seal()
        except InfinityError as error:
            log.warning("the last step is not committed: %s", error)
        finally:
            self._committer.close()

    def _content(self, versions: Sequence[Version]) -> bytes:
        model, updater = self._model(), self._updater
        blocks = [version.extent | version.is_written << 1 for version in versions]
        values = {
            "version": VERSION,
            "step": updater.posted_steps,
            "skipped": updater.skipped_steps,
            "whole": not self._is_loading,
            "blocks": torch.tensor(blocks, dtype=torch.uint8),
            "optimizers": [_described(each) for each in updater.owners.all()] + self._waiting,
            "random": self._random or _random_states(self._device),
            "buffers": {} if model is None else _buffers_of(model),
            "tracked": self._states | {name: x.state_dict() for name, x in self._tracked.items()},
        }
        stream = io.BytesIO()
        try:
            torch.save(values, stream)
            read_item(stream.getvalue())
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise CheckpointError(
                "the states of what is tracked may have numbers, texts and tensors in dicts, lists "
                f"and tuples only: {reason}"
            ) from error
        return stream.getvalue()

    # Giving back

    def restore(self, optimizer: Optimizer) -> None:
        """An optimizer was made: it goes on as the one in its place did, if there was one. Raises
        `ConfigError` where it is another one."""
        if self._found is None:
            return
        if not self._waiting:
            optimizer.forget_states()
            return
        saved, here = self._waiting[0], _described(optimizer)
        for key in ("kind", "names"):
            if saved.get(key) != here[key]:
                raise ConfigError(
                    "the states that were taken over belong to another optimizer "
                    f"({saved.get('kind')}), or to other parameters in its groups; make the same "
                    "optimizers in the same order, or begin anew in another directory"
                )
        optimizer.take_header(saved)
        self._waiting.pop(0)

    def track(self, objects: Mapping[str, Any]) -> None:
        """See `Engine.track`."""
        for name, value in objects.items():
            if not all(hasattr(value, method) for method in ("state_dict", "load_state_dict")):
                raise ConfigError(
                    f"{name} is {in_words(value)}; what is tracked has state_dict and "
                    "load_state_dict"
                )
            if name in self._tracked:
                raise ConfigError(f"{name} is tracked already; choose another name")
        for name, value in objects.items():
            if name in self._states:
                value.load_state_dict(self._states.pop(name))
            self._tracked[name] = value
        if self._found is not None:  # a scheduler sets the rate of its first step as it is made
            saved = {tuple(header["names"][0]): header for header in self._found.optimizers}
            for optimizer in self._updater.owners.all():
                header = saved.get(tuple(_described(optimizer)["names"][0]))
                if header is not None and not self._has_begun:
                    optimizer.take_groups(header)


def _is_fixed(block: Block) -> bool:
    """Whether what was committed of a block would be rewritten in place."""
    home = block.home
    return home.sealed is not None and len(home.extents) < 2


def _described(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer, and whose it is: the names of the parameters in its groups."""
    names = {
        id(parameter): name
        for unit in optimizer.units
        for parameter, name in zip(unit.parameters, unit.names, strict=True)
    }
    groups = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
    return optimizer.header() | {"kind": type(optimizer).__name__, "names": groups}


def _buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: local(buffer).detach() for name, buffer in persistent_buffers(model)}


def _random_states(device: ComputeDevice) -> dict[str, Any]:
    """The default generators of torch, Python and numpy."""
    version, words, gauss = random.getstate()
    found: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = found
    return {
        "torch": device.random_state(),
        "python": [version, torch.tensor(words), gauss],
        "numpy": [name, torch.tensor(keys.astype(np.int64)), position, has_gauss, cached],
    }


def _set_random_states(device: ComputeDevice, states: Mapping[str, Any]) -> None:
    device.set_random_state(states["torch"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
