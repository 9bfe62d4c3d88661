"""The content of a record beside blocks, at the begin of the last forward or now."""

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
    """The content of a record beside blocks, and marks. Two marks of a name differ if the tracked
    object of this name differs; marks of the name "" if the parameter groups differ."""

    content: bytes
    marks: Mapping[str, str]
    has_optimizer: bool


class StepNotes:
    """Makes the content of the next record beside blocks. A cycle begins with the first training
    forward after a step, and ends with the next step. Used by the thread that runs the model."""

    def __init__(
        self,
        device: ComputeDevice,
        objects: CommittedObjects,
        found: CommittedStep | None,
        compares: bool,
    ) -> None:
        """`found`: the adopted record; None if the states are new. `compares`: whether records are
        compared with those of other ranks, by marks."""
        self._device, self._objects = device, objects
        self.found = found
        """The adopted record, until all of it is restored."""
        self.compares = compares
        self._has_begun = found is None or not found.in_forward
        self._random: RandomStates | None = None  # at the begin of this cycle
        self._buffers: dict[str, torch.Tensor] = {}  # at the begin of this cycle, or of the engine
        self._made: dict[str, str] = {}  # the marks of objects made before the first cycle
        self._began: Mapping[str, str] | None = None  # the marks of the last cycle that began

    def connect(self, model: nn.Module, updater: Updater) -> None:
        """Note `model` and `updater`. An adopted run continues at its step."""
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
        """The first forward of a cycle begins. Returns the content of a record of this moment; see
        `note`."""
        if not self._has_begun and self.found is not None:
            self.found.random.restore(self._device)
        self._has_begun, self.found = True, None  # all of it is restored
        self._random, self._buffers = RandomStates.of(self._device), self._buffers_now()
        noted = self.note(is_whole)
        self._began = noted.marks
        return noted

    def end_cycle(self) -> None:
        """A step begins."""
        self._random = None

    # Notes

    def note(self, is_whole: bool) -> NotedStep:
        """The content of a record of now, beside blocks; `is_whole`: no checkpoint is being
        loaded."""
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
        """An optimizer was made, or objects are tracked. Before the first forward, their states now
        count as unchanged."""
        if self._began is None:
            self._made = self._marks(*self._objects.note())

    def changes(self, noted: NotedStep) -> str:
        """32 hex digits that identify the changes since the last forward began: which tracked
        objects changed since then or since they were made, and whether the parameter groups did."""
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
        """Whether the model is gone, with its buffers."""
        return self._model() is None and bool(self._buffers)


def _digest(content: bytes | memoryview) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _plain(header: dict[str, Any]) -> dict[str, Any]:
    """A header with numbers of Python: a rate may be a number of numpy."""
    groups = [
        {key: v.item() if isinstance(v, np.generic) else v for key, v in group.items()}
        for group in header["param_groups"]
    ]
    return header | {"param_groups": groups}
