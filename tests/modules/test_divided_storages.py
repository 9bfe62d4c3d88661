"""Saves that share a storage in parts, where it is not known when they are made whether their bytes
are the same: as on a GPU, whose checksums come later."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.activations import partitions
from infinity.activations.partitions import Partitions, RankParts
from infinity.observe import Recorder
from infinity.sharding import collectives


class Divided:
    """Storages of one tensor parallel rank, which is the only one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        group: Any = object()
        monkeypatch.setattr(collectives, "same", lambda value, among: True)
        monkeypatch.setattr(collectives, "all_gather", lambda full, own, among: full.copy_(own))
        monkeypatch.setattr(collectives, "rank", lambda among: 0)
        monkeypatch.setattr(collectives, "size", lambda among: 1)
        monkeypatch.setattr(partitions.dist, "get_process_group_ranks", lambda among: [0])
        monkeypatch.setattr(Partitions, "_key", staticmethod(lambda place, checksum: place))
        self.gathers = self.backwards = 0
        exchange: Any = SimpleNamespace(ranks=SimpleNamespace(tensor=group), post=self._post)
        latch: Any = None
        self.module = nn.Identity()
        parts = RankParts(exchange, None, latch, Recorder())
        names = {self.module: "blocks.0"}
        self.partitions = Partitions(parts, names, lambda: None, lambda: self.backwards)

    def _post(self, what: str, name: str, contribution: Any, among: Any) -> Any:
        self.gathers += 1
        return SimpleNamespace(wait=contribution.join)

    def pack(self, tensor: torch.Tensor) -> Any:
        """What is saved of an input of the block."""
        with self.partitions.entering(self.module):
            return self.partitions.pack(tensor, tensor.untyped_storage())


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> Divided:
    return Divided(monkeypatch)


def numbers() -> torch.Tensor:
    return torch.arange(partitions.LEAST_BYTES, dtype=torch.float32)


def test_saves_that_differ_alike_on_all_ranks_are_refused(divided: Divided) -> None:
    tensor = numbers()
    first = divided.pack(tensor)
    tensor.data.add_(1)  # the version stays
    second = divided.pack(tensor)
    for saved in (first, second):
        with pytest.raises(infinity.ConfigError, match=r"what blocks\.0 saved .* is not the same"):
            saved.unpack()


def test_saves_of_the_same_bytes_are_gathered_once(divided: Divided) -> None:
    tensor = numbers()
    saves = [divided.pack(tensor) for _ in range(3)]
    assert all(torch.equal(saved.unpack(), tensor) for saved in saves) and divided.gathers == 1


def test_saves_on_both_sides_of_a_backward_share_nothing(divided: Divided) -> None:
    """Whether the first one is still alive there depends on the rank."""
    tensor = numbers()
    saves = [divided.pack(tensor)]
    divided.backwards += 1
    saves += [divided.pack(tensor)]
    for saved in saves:
        saved.unpack()
    assert divided.gathers == 2


def test_memory_of_a_replica_stays_one_when_nothing_is_left_of_the_first_save(
    divided: Divided,
) -> None:
    """Whether it is gone depends on the rank."""
    tensor = numbers()
    saved = divided.pack(tensor)
    del saved
    assert divided.partitions.pack(tensor, tensor.untyped_storage()) is not None
    divided.backwards += 1
    assert divided.partitions.pack(tensor, tensor.untyped_storage()) is None
