"""Every step outlives the process: what a record says beside the states on NVMe, when it is fixed,
and who gets it back.

[Note: between two steps]
The record of a step is fixed when the next training forward begins. Schedulers have stepped by
then, and the random numbers of that forward are still to come: after a resume, the first training
forward draws them. `close` fixes the record of the last step; there is no forward then, so `wrap`
gives the random states back. Where a step updates once more what no forward has used since the last
one, that is fixed before.

[Note: writes outside of steps]
What was written since the last record takes part in the next one. So a block is rewritten in its
place as long as no record speaks of its content, and beside it otherwise.

[Note: the same records on all ranks]
What fixes a record is in the program: a forward, a step, a write. It never depends on the time that
a commit or an update takes, which differs from rank to rank. So all ranks make the same records, in
the same order, and the number of one means the same on each. `close` fixes one, too, where another
rank may yet write to parameters before its own: a record says how many such writes it has, and
those of other numbers are not the same.

[Note: a load that is cut off]
Frozen parameters have one place. A checkpoint may replace them, while the last record says that it
is not whole, and is not taken over.
"""

from __future__ import annotations

import io
import logging
import random
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from infinity.checkpoint.inert import read_item
from infinity.device import ComputeDevice
from infinity.errors import (
    CheckpointError,
    ConfigError,
    EngineClosedError,
    InfinityError,
    in_words,
)
from infinity.modules.load import persistent_buffers
from infinity.observe import Recorder
from infinity.optim.committer import Committer
from infinity.optim.job import JobQueue
from infinity.optim.optimizer import Optimizer
from infinity.optim.updater import StepListeners, Updater
from infinity.sharding.agreement import Agreement
from infinity.sharding.tensor_parallel import local
from infinity.sharding.unit import Unit
from infinity.tiers.block import Block
from infinity.tiers.durable import unreadable
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
            self.posted, self.skipped = int(values["posted"]), int(values["skipped"])
            self.is_whole, self.in_forward = bool(values["whole"]), bool(values["in_forward"])
            self.versions = [
                Version(each & 1, bool(each & 2)) for each in values["blocks"].tolist()
            ]
            self.optimizers: list[dict[str, Any]] = list(values["optimizers"])
            self.random: dict[str, Any] = dict(values["random"])
            self.buffers: dict[str, torch.Tensor] = dict(values["buffers"])
            self.tracked: dict[str, Any] = dict(values["tracked"])
        except Exception as error:
            raise unreadable(error) from error


@dataclass
class _Known:
    """An optimizer, and what a record says of it, as of its last step."""

    optimizer: weakref.ref[Optimizer]
    header: dict[str, Any]
    parameters: frozenset[int]
    saved: dict[str, Any] | None = None
    """What it took over."""


class Durability:
    """Seals the states of one engine between steps, and gives back what a record has. For the
    thread that runs the model."""

    def __init__(
        self,
        store: Store,
        jobs: JobQueue,
        device: ComputeDevice,
        recorder: Recorder,
        agreement: Agreement | None = None,
    ) -> None:
        """`agreement`: of all ranks; None for one."""
        # First, as it may be refused: the committer is a thread.
        content = store.taken_over
        self._found = None if content is None else CommittedStep(content)
        self._store = store
        self._device = device
        self._committer = Committer(store, jobs, recorder, agreement)
        self._waiting = list(self._found.optimizers) if self._found is not None else []
        self._states = dict(self._found.tracked) if self._found is not None else {}
        self._tracked: dict[str, Any] = {}
        self._optimizers: list[_Known] = []
        self._random: dict[str, Any] | None = None  # as this cycle began
        self._buffers: dict[str, torch.Tensor] = {}  # as it, or the engine, began
        self._is_sealed = self._is_loading = self._is_discarded = False
        self._writes = 0  # outside of steps, since the last record
        self._has_begun = self._found is None or not self._found.in_forward

    # Building

    def check(self, model: nn.Module) -> None:
        """Raise `CheckpointError` for a record that is not whole, and `ConfigError` for other
        buffers."""
        if self._found is None:
            return
        if not self._found.is_whole:
            raise CheckpointError(
                "the earlier run was killed while it loaded a checkpoint, so its states are in "
                "part of that: load the checkpoint into an engine with another directory"
            )
        here = {name: _form(buffer) for name, buffer in persistent_buffers(model)}
        there = {name: _form(buffer) for name, buffer in self._found.buffers.items()}
        if here != there:
            name = next(n for n in {**here, **there} if here.get(n) != there.get(n))
            raise ConfigError(
                f"the states that are committed are of another model: the buffer {name} was "
                f"{there.get(name, 'not there')}, and is {here.get(name, 'not there')} here"
            )

    def restore_blocks(self) -> bool:
        """Give the blocks what they had; False where there is nothing to go on from."""
        if self._found is not None:
            self._store.restore(self._found.versions)
        return self._found is not None

    def give_up(self) -> None:
        """`wrap` fails: end the thread."""
        self._committer.close()

    def listeners(self, others: StepListeners) -> StepListeners:
        """What the updater tells, to `others` and to this."""
        return others._replace(
            before_step=self.before_step,
            made=self.restore,
            stepped_by=self.stepped_by,
            before_write=self.before_write,
        )

    def connect(self, model: nn.Module, updater: Updater) -> None:
        """Whose states these are. What was taken over goes on at its step."""
        self._model = weakref.ref(model)
        self._updater = updater
        self._buffers = self._buffers_now()
        if self._found is None:
            return
        updater.posted_steps, updater.skipped_steps = self._found.posted, self._found.skipped
        with torch.no_grad():
            for name, buffer in persistent_buffers(model):
                local(buffer).copy_(self._found.buffers[name])
        if not self._found.in_forward:
            _set_random_states(self._device, self._found.random)

    def begin(self) -> None:
        """`wrap` has succeeded: commit what it made, until the first forward does so."""
        if self._found is None:
            self.seal()
        self._is_sealed = self._found is not None

    @property
    def committed_step(self) -> int | None:
        """The last step that would survive a power cut; None while there is none."""
        committed = self._committer.committed_step
        if committed is None and self._found is not None:
            return self._found.posted + self._found.skipped
        return committed

    # Fixing records

    def before_forward(self) -> None:
        """A training forward begins."""
        if self._random is not None:
            return  # of a cycle that has begun
        if not self._has_begun and self._found is not None:
            _set_random_states(self._device, self._found.random)
        self._has_begun = True
        self._random, self._buffers = _random_states(self._device), self._buffers_now()
        self.seal()

    def before_step(self, units: Sequence[Unit]) -> None:
        """A step of `units` begins. What was sealed is committed, so a kill costs one step at
        most.

        What the step would overwrite is committed, too. All ranks must find the same, so no commit
        is under way when that is asked.
        """
        self.rest()
        if not all(unit.states.is_free for unit in units):
            self.seal()
            self.rest()
        self._is_sealed, self._random = False, None

    def stepped_by(self, optimizer: Optimizer) -> None:
        """A step of `optimizer` has been fixed: this is what a record says of it, if it is gone by
        then."""
        known = self._known(optimizer)
        if known is not None:
            known.header |= optimizer.header()

    def before_write(self, blocks: Sequence[Block]) -> None:
        """`blocks` are about to be rewritten outside of a step; returns when they may be.

        Raises `ConfigError` before anything is changed for those that have one place only, but
        while a checkpoint is loaded.
        """
        fixed = next((block for block in blocks if _is_fixed(block)), None)
        if fixed is not None and (not self._is_loading or fixed.spec.in_files):
            raise ConfigError(
                f"{fixed.name} cannot be changed with durability='step': what is frozen has one "
                "place on nvme, and a kill meanwhile would leave a part of it; change it before "
                "wrap, or set durability='off'"
            )
        if fixed is not None:
            self._is_sealed = False
            self.seal()
        if fixed is not None or not all(b.home.is_free or b.home.rewrite() for b in blocks):
            self.rest()
        self._is_sealed = False
        self._writes += 1

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Inside, states are replaced one by one; what they are then is committed."""
        self._is_loading = True
        try:
            yield
        finally:
            self._is_loading = False
        self._is_sealed = False
        self.seal()
        self.rest()

    def seal(self) -> None:
        """Have the states as they are after all posted steps committed; returns at once."""
        if not self._is_sealed:
            step = self._updater.posted_steps + self._updater.skipped_steps
            self._committer.seal(step, self._content, self._writes)
            self._is_sealed, self._writes = True, 0

    def rest(self) -> None:
        """Block until what was sealed is committed, on all ranks. Raises `EngineClosedError` when
        that failed, or was given up by who closes."""
        is_committed = self._committer.rest()
        self._store.latch.check()
        if not is_committed:
            raise EngineClosedError("the engine was closed")

    def discard(self) -> None:
        """Nothing of what was committed is needed any more: `close` removes it."""
        self._store.discard_committed()
        self._is_discarded = True

    def close(self) -> None:
        """Commit the last step, which other ranks may lack then, and end the thread. What failed
        stays at the step that was committed last, and so does a model that is gone with its
        buffers. May be called twice."""
        try:
            wanted = not self._store.latch.failed and not self._is_discarded
            if wanted and (self._model() is not None or not self._buffers):
                # Between two steps buffers and rates may have changed; a forward that led to no
                # step has not.
                self._is_sealed &= self._random is not None
                self.seal()
        except InfinityError as error:
            log.warning("the last step is not committed: %s", error)
        finally:
            self._committer.close()

    def _content(self, versions: Sequence[Version]) -> bytes:
        updater = self._updater
        blocks = [version.extent | version.is_written << 1 for version in versions]
        tracked = self._states | {name: each.state_dict() for name, each in self._tracked.items()}
        _check_tracked(tracked)
        random_states = self._random
        if not self._has_begun and self._found is not None:
            random_states = self._found.random
        values = {
            "version": VERSION,
            "posted": updater.posted_steps,
            "skipped": updater.skipped_steps,
            "whole": not self._is_loading,
            "in_forward": random_states is not None,
            "blocks": torch.tensor(blocks, dtype=torch.uint8, device="cpu"),
            "optimizers": [_plain(each) for each in self._headers()],
            "random": random_states or _random_states(self._device),
            "buffers": self._buffers if self._random is not None else self._buffers_now(),
            "tracked": tracked,
        }
        stream = io.BytesIO()
        torch.save(values, stream)
        return stream.getvalue()

    def _headers(self) -> list[dict[str, Any]]:
        """What the record says of each optimizer, in the order in which they were made; of those
        that were not made again what the last one said."""
        for known in self._optimizers:
            optimizer = known.optimizer()
            if optimizer is not None:
                known.header |= optimizer.header()
        return [known.header for known in self._optimizers] + self._waiting

    def _buffers_now(self) -> dict[str, torch.Tensor]:
        model = self._model()
        if model is None:
            return self._buffers
        return {name: local(b).detach().clone() for name, b in persistent_buffers(model)}

    def _known(self, optimizer: Optimizer) -> _Known | None:
        return next((k for k in self._optimizers if k.optimizer() is optimizer), None)

    # Giving back

    def restore(self, optimizer: Optimizer) -> None:
        """An optimizer was made: it goes on as the one in its place did, if there was one. Raises
        `ConfigError` where it is another one."""
        known = _describe(optimizer)
        for other in self._optimizers:
            if other.optimizer() is not None and not other.parameters & known.parameters:
                raise ConfigError(
                    "durability='step' commits the steps of one optimizer, and there is another "
                    "one: give one all parameters, in groups, or set durability='off'"
                )
        if self._waiting:
            saved, here = self._waiting[0], known.header
            if any(saved.get(key) != here[key] for key in ("kind", "names")):
                raise ConfigError(
                    "the states that were taken over belong to another optimizer "
                    f"({saved.get('kind')}), or to other parameters in its groups; make the same "
                    "optimizers in the same order, with all groups, or begin anew in another "
                    "directory"
                )
            optimizer.take_header(saved)
            known.saved = self._waiting.pop(0)
        elif self._found is not None:
            optimizer.forget_states()
        self._optimizers = [
            other for other in self._optimizers if not other.parameters & known.parameters
        ] + [known]

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
        _check_tracked({name: value.state_dict() for name, value in objects.items()})
        given = [name for name in objects if name in self._states]
        for name, value in objects.items():
            if name in given:
                value.load_state_dict(self._states.pop(name))
            self._tracked[name] = value
        for known in self._optimizers if given else ():
            optimizer = known.optimizer()
            if optimizer is not None and known.saved is not None and self._random is None:
                optimizer.take_groups(known.saved)  # a scheduler has set its first rate


def _is_fixed(block: Block) -> bool:
    """Whether what is committed of a block, or lies in files of the user, would be rewritten in its
    only place."""
    home = block.home
    return block.spec.in_files or (home.sealed is not None and len(home.extents) < 2)


def _describe(optimizer: Optimizer) -> _Known:
    """An optimizer, and whose it is: the names of the parameters in its groups."""
    names = {
        id(parameter): name
        for unit in optimizer.units
        for parameter, name in zip(unit.parameters, unit.names, strict=True)
    }
    groups = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
    header = optimizer.header() | {"kind": type(optimizer).__name__, "names": groups}
    return _Known(weakref.ref(optimizer), header, frozenset(names))


def _form(buffer: torch.Tensor) -> str:
    return f"{buffer.dtype} {list(local(buffer).shape)}"


def _plain(header: dict[str, Any]) -> dict[str, Any]:
    """A header whose numbers are Python's: a rate may be one of numpy's."""
    groups = [
        {key: v.item() if isinstance(v, np.generic) else v for key, v in group.items()}
        for group in header["param_groups"]
    ]
    return header | {"param_groups": groups}


def _check_tracked(states: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` for what could not be read again without running its code."""
    for name, state in states.items():
        stream = io.BytesIO()
        try:
            torch.save(state, stream)
            read_item(stream.getvalue())
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise CheckpointError(
                f"the state of {name} may have numbers, texts and tensors in dicts, lists and "
                f"tuples only: {reason}"
            ) from error


def _random_states(device: ComputeDevice) -> dict[str, Any]:
    """The default generators of torch, Python and numpy."""
    version, words, gauss = random.getstate()
    found: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = found
    return {
        "torch": device.random_state(),
        "python": [version, torch.tensor(words, device="cpu"), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
    }


def _set_random_states(device: ComputeDevice, states: Mapping[str, Any]) -> None:
    device.set_random_state(states["torch"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
