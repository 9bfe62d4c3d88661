"""What a record says beside blocks: as of the last forward that began, or as of now."""

from __future__ import annotations

import hashlib
import io
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from infinity.device import ComputeDevice
from infinity.durable.committed_objects import CommittedObjects
from infinity.durable.record import VERSION, CommittedStep, RandomStates
from infinity.optim.updater import Updater
from infinity.sharding.tensor_parallel import local
from infinity.weights.load import persistent_buffers


class NotedStep(NamedTuple):
    """What a record says, but of blocks; and marks, which differ where one of the objects that are
    tracked differs, by its name, or the parameter groups do ("")."""

    content: bytes
    marks: Mapping[str, str]
    has_optimizer: bool


class StepNotes:
    """What the next record says beside blocks. A cycle begins with the first training forward after
    a step, and ends with the next step. For the thread that runs the model."""

    def __init__(
        self,
        device: ComputeDevice,
        objects: CommittedObjects,
        found: CommittedStep | None,
        compares: bool,
    ) -> None:
        """`found`: the record that was taken over; None where the states are new. `compares`: other
        ranks make records, too, which are compared by marks."""
        self._device, self._objects = device, objects
        self.found = found
        """The record that was taken over, until all of it is given back."""
        self.compares = compares
        self._has_begun = found is None or not found.in_forward
        self._random: RandomStates | None = None  # as this cycle began
        self._buffers: dict[str, torch.Tensor] = {}  # as it, or the engine, began
        self._made: dict[str, str] = {}  # the marks of what was made before the first one
        self._began: Mapping[str, str] | None = None  # those of the last one that began

    def connect(self, model: nn.Module, updater: Updater) -> None:
        """Whose states these are. What was taken over goes on at its step."""
        self._model = weakref.ref(model)
        self._updater = updater
        self._buffers = self._buffers_now()
        if self.found is None:
            return
        updater.posted_steps, updater.skipped_steps = self.found.posted, self.found.skipped
        with torch.no_grad():
            for name, buffer in persistent_buffers(model):
                local(buffer).copy_(self.found.buffers[name])
        if not self.found.in_forward:
            self.found.random.restore(self._device)

    # The cycle

    @property
    def in_cycle(self) -> bool:
        """Whether a forward has begun since the last step."""
        return self._random is not None

    def begin_cycle(self, is_whole: bool) -> NotedStep:
        """The first forward begins: what a record says of this moment. See `note`."""
        if not self._has_begun and self.found is not None:
            self.found.random.restore(self._device)
        self._has_begun, self.found = True, None  # all of it is given back
        self._random, self._buffers = RandomStates.of(self._device), self._buffers_now()
        noted = self.note(is_whole)
        self._began = noted.marks
        return noted

    def end_cycle(self) -> None:
        """A step begins."""
        self._random = None

    # What a record says

    def note(self, is_whole: bool) -> NotedStep:
        """What a record says now, but of blocks; `is_whole`: no checkpoint is being loaded."""
        updater = self._updater
        headers, saved = self._objects.note()
        random = self._random
        if not self._has_begun and self.found is not None:
            random = self.found.random
        values = {
            "version": VERSION,
            "posted": updater.posted_steps,
            "skipped": updater.skipped_steps,
            "whole": is_whole,
            "in_forward": random is not None,
            "optimizers": [_plain(each) for each in headers],
            "random": (random or RandomStates.of(self._device)).values(),
            "buffers": self._buffers if self._random is not None else self._buffers_now(),
            "tracked": saved,
        }
        stream = io.BytesIO()
        torch.save(values, stream)
        return NotedStep(stream.getvalue(), self._marks(headers, saved), bool(headers))

    def _marks(
        self, headers: Sequence[Mapping[str, Any]], saved: Mapping[str, torch.Tensor]
    ) -> dict[str, str]:
        if not self.compares:
            return {}
        groups = repr([each["param_groups"] for each in headers]).encode()
        return {"": _digest(groups)} | {n: _digest(each.numpy().data) for n, each in saved.items()}

    def mark_made(self) -> None:
        """An optimizer was made, or objects are tracked: before the first forward, what they are
        now is no change."""
        if self._began is None:
            self._made = self._marks(*self._objects.note())

    def changes(self, noted: NotedStep) -> str:
        """32 hex digits that say what has changed since the last forward began, or since it was
        made: which of the tracked objects, and whether the parameter groups have."""
        before = self._made if self._began is None else self._began
        now = noted.marks
        names = sorted(n for n in {**before, **now} if before.get(n) != now.get(n))
        return _digest(repr(names).encode())

    def _buffers_now(self) -> dict[str, torch.Tensor]:
        model = self._model()
        if model is None:
            return self._buffers
        return {name: local(b).detach().clone() for name, b in persistent_buffers(model)}

    @property
    def are_lost(self) -> bool:
        """Whether the model is gone, and its buffers with it."""
        return self._model() is None and bool(self._buffers)


def _digest(content: bytes | memoryview) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _plain(header: dict[str, Any]) -> dict[str, Any]:
    """A header whose numbers are Python's: a rate may be one of numpy's."""
    groups = [
        {key: v.item() if isinstance(v, np.generic) else v for key, v in group.items()}
        for group in header["param_groups"]
    ]
    return header | {"param_groups": groups}
