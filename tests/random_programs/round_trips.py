"""The operation of a player that saves its model in one of several ways, loads that into a fresh
engine, and compares all bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import nn

import infinity
from infinity.checkpoint.contents import Contents
from infinity.checkpoint.export import everything, export
from infinity.sharding.tiles import pieces_of
from random_programs.plain import STATES
from random_programs.using import weights_of
from support.models import rounded
from support.probe import Probe

if TYPE_CHECKING:
    from random_programs.players import Wrapped

Bits = dict[str, torch.Tensor]


def bits_of(player: Wrapped) -> Bits:
    """Copies of all weights, buffers and states of a player's model, and the numbers of steps that
    weights have had; tiles are joined."""
    buffers = dict(player.model.named_buffers())
    found = {n: v.clone() for n, v in player.engine.state_dict().items() if n in buffers}
    state = player.optimizer.state_dict()["state"]
    pieces = [p for group in player.optimizer.param_groups for p in group["params"]]
    made = {id(p): int(state.get(number, {}).get("step", 0)) for number, p in enumerate(pieces)}
    for name, weight in weights_of(player.model):
        found[name] = _copied(weight, "value")
        steps = {made[id(p)] for p in pieces_of([weight]) if id(p) in made}
        if steps:
            found[f"{name} steps"] = torch.tensor(sorted(steps))
            for kind in ("master", *STATES[player.recipe.training.rule]):
                found[f"{name} {kind}"] = _copied(weight, kind)
    return found


def weights_in_files(player: Wrapped) -> Bits:
    """Copies of what an export has: tied weights once."""
    named = (*weights_of(player.model), *player.model.named_buffers())
    weights = player.engine.state_dict()
    return {name: weights[name].clone() for name, _ in named}


def _copied(weight: torch.Tensor, kind: str) -> torch.Tensor:
    state = infinity.get(weight, kind)
    assert state is not None
    return state.clone()


def different(one: Bits, other: Bits) -> list[str]:
    """The names under which they differ in any bit."""
    return [name for name in {**one, **other} if not _same(one.get(name), other.get(name))]


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (one, other)))


def filled(model: nn.Module) -> nn.Module:
    """The model with other weights and buffers."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(1)
    return model


def trip(
    player: Wrapped, how: str, where: Path, before: Bits, weights: Bits, fresh: Wrapped
) -> list[str]:
    """Save `player`, whose states are `before` and whose weights are `weights`, load that into
    `fresh`, and export it; returns the names of what differs."""
    directory = where / "checkpoint"
    if how == "snapshot":
        Probe(player.engine).committer.rest()
        assert infinity.snapshot(player.model, directory).wait(60)
    else:
        player.engine.save_checkpoint(directory, player.optimizer)
    contents = Contents(directory)
    exported = export(contents, where / "exported", everything(contents))
    files = [load_file(exported.directory / file) for file in exported.files]
    found = {
        name: value if name not in weights else _as(value, weights[name].dtype)
        for file in files
        for name, value in file.items()
    }
    fresh.engine.load_checkpoint(directory, fresh.optimizer)
    return [
        *(f"{name} as exported" for name in different(weights, found)),
        *(f"{name} as loaded" for name in different(before, bits_of(fresh))),
    ]


def _as(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is exported: a master, of which the weight is rounded, or the weight."""
    return value if value.dtype == dtype else rounded(value, dtype)


@contextmanager
def fresh(player: Wrapped, place: str, tiles: int, turned: bool, where: Path) -> Iterator[Wrapped]:
    """A player of the same model with other weights, in another placement and other tiles, whose
    optimizer has the parameters in the other order if they are `turned`."""
    model = dataclasses.replace(player.recipe.model, tiles=tiles)
    kind: Any = type(player)

    class Fresh(kind):
        def build_model(self) -> Any:
            return filled(super().build_model())

        def trainable(self) -> Any:
            return super().trainable()[:: -1 if turned else 1]

    made = Fresh(dataclasses.replace(player.recipe, model=model), place, where, player.least)
    try:
        yield made
    finally:
        made.close()
