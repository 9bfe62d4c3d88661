"""The part of a record about optimizers and tracked objects."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from infinity.checkpoint.inert import pack_item
from infinity.durable.record import CommittedStep
from infinity.errors import ConfigError, in_words
from infinity.optim.optimizer import Optimizer

log = logging.getLogger("infinity")


@dataclass
class _Known:
    """An optimizer, and its header at its last step."""

    optimizer: weakref.ref[Optimizer]
    header: dict[str, Any]
    parameters: frozenset[int]
    saved: dict[str, Any] | None = None
    """The header that it adopted."""


class CommittedObjects:
    """Notes optimizers and tracked objects for records, and restores them from a record. Used by
    the thread that runs the model."""

    def __init__(self, found: CommittedStep | None) -> None:
        """`found`: the adopted record; None if the states are new."""
        self._is_resumed = found is not None
        self._waiting = [] if found is None else found.headers  # of optimizers still to be made
        self._states = {} if found is None else dict(found.tracked)  # of objects still to come
        self._tracked: dict[str, Any] = {}
        self._optimizers: list[_Known] = []

    @property
    def has_optimizers(self) -> bool:
        """Whether any was made."""
        return bool(self._optimizers)

    # Noting

    def note(self) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
        """The current headers of the optimizers, and by name the states of the objects, as uint8
        tensors (n,). Raises `CheckpointError` for a state that could not be read again."""
        tracked = self._states | {name: each.state_dict() for name, each in self._tracked.items()}
        return self._headers(), _saved(tracked)

    def _headers(self) -> list[dict[str, Any]]:
        """The header of each optimizer, in the order of their making. An optimizer that was not
        made again has its header of the adopted record."""
        for known in self._optimizers:
            optimizer = known.optimizer()
            if optimizer is not None:
                known.header |= optimizer.header()
        return [known.header for known in self._optimizers] + self._waiting

    def stepped_by(self, optimizer: Optimizer) -> None:
        """A step of `optimizer` has been fixed. Keep its header for records that come after the
        optimizer is gone."""
        for known in self._optimizers:
            if known.optimizer() is optimizer:
                known.header |= optimizer.header()

    def maker_of(self, header: Mapping[str, Any], step: int) -> Optimizer:
        """The optimizer that gave this header of the record of `step`."""
        for known in self._optimizers:
            optimizer = known.optimizer()
            if optimizer is not None and all(
                known.header[key] == header[key] for key in ("kind", "names")
            ):
                return optimizer
        raise ConfigError(
            f"the optimizer ({header['kind']}) of the committed step {step} is gone: make it, with "
            "the same groups, before the snapshot"
        )

    # Restoring

    def restore(self, optimizer: Optimizer) -> bool:
        """An optimizer was made. It continues as the optimizer in its place in the adopted record,
        if there is one. Returns whether the record lacks it. Raises `ConfigError` if the record has
        another optimizer there."""
        known = _describe(optimizer)
        for other in self._optimizers:
            if other.optimizer() is not None and not other.parameters & known.parameters:
                raise ConfigError(
                    "durability commits the steps of one optimizer, and there is another "
                    "one: give one all parameters, in groups, or set durability='off'"
                )
        if self._waiting:
            saved, here = self._waiting[0], known.header
            is_same = all(saved[key] == here[key] for key in ("kind", "names")) and all(
                optimizer.defaults.keys() <= group.keys() for group in saved["param_groups"]
            )
            if not is_same:
                raise ConfigError(
                    "the states that were taken over belong to another optimizer "
                    f"({saved['kind']}), or to other parameters in its groups; make the same "
                    "optimizers in the same order, with all groups, or begin anew in another "
                    "directory"
                )
            optimizer.take_header(saved)
            known.saved = self._waiting.pop(0)
            lacks = False
        elif lacks := self._is_resumed:
            optimizer.forget_states()
        self._optimizers = [
            other for other in self._optimizers if not other.parameters & known.parameters
        ] + [known]
        return lacks

    def track(self, objects: Mapping[str, Any], is_committed: bool, is_first: bool) -> None:
        """See `Engine.track`. `is_committed`: an earlier run committed steps. `is_first`: no
        forward has begun since the last step."""
        for name, value in objects.items():
            if not all(hasattr(value, method) for method in ("state_dict", "load_state_dict")):
                raise ConfigError(
                    f"{name} is {in_words(value)}; what is tracked has state_dict and "
                    "load_state_dict"
                )
            if name in self._tracked:
                raise ConfigError(f"{name} is tracked already; choose another name")
        _saved({name: value.state_dict() for name, value in objects.items()})
        given = [name for name in objects if name in self._states]
        for name in objects if is_committed else ():
            if name not in given:
                log.warning("nothing is committed of %s, which goes on as it is", name)
        for name, value in objects.items():
            if name in given:
                value.load_state_dict(self._states.pop(name))
            self._tracked[name] = value
        for known in self._optimizers if given else ():
            optimizer = known.optimizer()
            if optimizer is not None and known.saved is not None and is_first:
                optimizer.take_groups(known.saved)  # a scheduler has set its first rate


def _describe(optimizer: Optimizer) -> _Known:
    """An optimizer, and the names of the parameters in its groups."""
    names = {
        id(parameter): name
        for unit in optimizer.units
        for parameter, name in zip(unit.parameters, unit.names, strict=True)
    }
    groups = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
    header = optimizer.header() | {"kind": type(optimizer).__name__, "names": groups}
    return _Known(weakref.ref(optimizer), header, frozenset(names))


def _saved(states: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The bytes of each state, as uint8 tensors (n,). Raises `CheckpointError` for a state that
    cannot be read without running its code."""
    found = {}
    for name, state in states.items():
        stream = pack_item(f"the state of {name}", state)
        found[name] = torch.frombuffer(bytearray(stream.getbuffer()), dtype=torch.uint8)
    return found
