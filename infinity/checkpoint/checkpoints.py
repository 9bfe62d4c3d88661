"""Saves and loads the state of one engine between two steps.

The first save or load imports the files that need torch.distributed.checkpoint, because that import
takes long.
"""

from __future__ import annotations

import gc
import uuid
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from infinity.checkpoint.progress import Told
from infinity.checkpoint.readers import CommitReader
from infinity.checkpoint.snapshots import SnapshotTask
from infinity.errors import ConfigError
from infinity.optim.optimizer import Optimizer
from infinity.optim.updater import Updater
from infinity.placement.spec import MOMENTS
from infinity.sharding import collectives
from infinity.sharding.exchange import Exchange
from infinity.sharding.ranks import Ranks, whole_group
from infinity.sharding.unit import Unit
from infinity.sharding.use import described

if TYPE_CHECKING:
    from infinity.checkpoint.state import EngineState

Buffers = Mapping[str, torch.Tensor]
"""The persistent buffers of the model, by name. Of a DTensor: the local tensor of this rank."""

Optimizers = Optimizer | Sequence[Optimizer]


class Checkpoints:
    """The checkpoints of one engine. All ranks call its methods."""

    def __init__(
        self,
        units: Sequence[Unit],
        updater: Updater,
        exchange: Exchange | None,
        io_engine: str = "auto",
        timeout: float = 600.0,
    ) -> None:
        """`timeout` is `Tuning.collective_timeout`, in seconds."""
        self._units = units
        self._timeout = timeout
        self._io_engine = io_engine
        self._updater = updater
        self._exchange = exchange
        self._run = uuid.uuid4().hex  # identifies the checkpoints of this engine

    @cached_property
    def _savers(self) -> collectives.Group:
        """The ranks that save together. The group is created on first use."""
        return whole_group(self._units[0].ranks)

    @cached_property
    def _apart(self) -> Ranks:
        """Copies of the groups of ranks that save together and of their replicas, over gloo, for
        the threads of snapshots. They are created on first use."""
        return Ranks(self._savers, self._units[0].ranks.replicas).copy(self._timeout, "gloo")

    def save(
        self,
        buffers: Buffers,
        tied: Mapping[str, str],
        directory: Path,
        optimizers: Optimizers,
        extra: Mapping[str, Any],
        trainable_only: bool = False,
        progress: Told | None = None,
    ) -> None:
        """See `Engine.save_checkpoint` and, for `tied`, `EngineState`."""
        from infinity.checkpoint.saving import save  # not at the top: see there

        state = self._state(buffers, optimizers)
        state = state._replace(tied=tied, trainable_only=trainable_only)
        self._meet("save_checkpoint")
        save(state, directory.absolute(), extra, progress)

    def snapshot(
        self,
        committed: CommitReader,
        tied: Mapping[str, str],
        directory: Path,
        extra: Mapping[str, Any],
        progress: Told | None = None,
    ) -> SnapshotTask:
        """See `Engine.snapshot`."""
        ranks, directory = self._apart, directory.absolute()

        def write(told: Told) -> None:
            from infinity.checkpoint.saving import save  # not at the top: see there
            from infinity.checkpoint.state import EngineState

            state = EngineState(
                self._units,
                committed.buffers,
                committed.optimizers,
                lambda: None,
                ranks.shards,
                self._updater,
                self._run,
                tied,
                io_engine=self._io_engine,
                replicas=ranks.replicas,
                reader=committed,
            )
            save(state, directory, extra, told)

        return SnapshotTask(committed.step, directory, write, committed.end, progress)

    def load(
        self,
        buffers: Buffers,
        directory: Path,
        optimizers: Optimizers,
        strict: bool = True,
        progress: Told | None = None,
    ) -> dict[str, Any]:
        """See `Engine.load_checkpoint`."""
        from infinity.checkpoint.loading import load  # not at the top: see there

        state, owners = self._state(buffers, optimizers), self._updater.owners
        shared = owners.beside(
            {u: None for each in state.optimizers for u in each.units}, state.optimizers
        )
        others = [name for _, names in shared for name in names]
        if others:
            raise ConfigError(
                f"another optimizer than those given updates {described(others)}, whose states lie "
                "together with theirs; save and load them together: load_checkpoint(directory, "
                "[first, second])"
            )
        self._meet("load_checkpoint")
        extra = load(state, directory.absolute(), strict, progress)
        # The checkpoint may contain states of these parameters by an optimizer that is not loaded.
        for share, _ in shared:
            owners.forget_states(
                share,
                [kind for kind in MOMENTS[share.unit.facts.algorithm] if kind in share.unit.blocks],
            )
        for unit in self._units:
            unit.on_device.renew()
        return extra

    def close(self) -> None:
        """Release the process groups. The closed engine may still be referenced. See
        `Unit.close`."""
        apart = vars(self).pop("_apart", None)
        if apart is not None:
            apart.end()
        if vars(self).pop("_savers", None) is not None:
            gc.collect()  # torch's save and load leave cycles that hold the group

    def _state(self, buffers: Buffers, given: Optimizers) -> EngineState:
        from infinity.checkpoint.state import EngineState  # not at the top: see there

        optimizers = list(given) if isinstance(given, Sequence) else [given]
        if not all(
            isinstance(each, Optimizer) and each.updater is self._updater for each in optimizers
        ):
            raise ConfigError(
                "a checkpoint takes optimizers of infinity for the parameters of this model"
            )
        return EngineState(
            self._units,
            buffers,
            optimizers,
            self._rest,
            self._savers,
            self._updater,
            self._run,
            io_engine=self._io_engine,
            replicas=self._units[0].ranks.replicas,
        )

    def _meet(self, call: str) -> None:
        """Return when all ranks have made this `call`. If a rank does not, the exchange raises an
        error that names the rank. Without this, torch would raise a less clear error later."""
        if self._exchange is not None:
            self._exchange.sum([0.0], f"for {call} (all ranks call it)")

    def _rest(self) -> None:
        """Return when no update and no collective is in flight. Then the caller may read and write
        states and join collectives."""
        self._updater.drain()
        if self._exchange is not None:
            self._exchange.rest()
