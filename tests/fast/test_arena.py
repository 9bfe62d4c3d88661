"""Every slot has at most one lease, a lease ends once, and what it held is poison afterwards
(invariant I3)."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from infinity.tiers import arena as module
from infinity.tiers.arena import POISON, Arena, Lease

SLOT, SLOTS = 64, 8


def arena(poison: bool = True) -> Arena:
    return Arena(torch.zeros(SLOT * SLOTS + 17, dtype=torch.uint8), SLOT, poison)


class Leases(RuleBasedStateMachine):
    """Leases filled with their own number each; nobody may find another number in his."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = arena()
        self.active: dict[int, Lease] = {}
        self.ended: list[Lease] = []
        self.peak = self.count = 0

    def used(self) -> int:
        return sum(-(-lease.nbytes // SLOT) * SLOT for lease in self.active.values())

    @rule(nbytes=st.integers(1, SLOT * (SLOTS + 1)))
    def lease(self, nbytes: int) -> None:
        found = self.arena.find(nbytes, lambda _: None)
        lease = self.arena.lease(self.count, nbytes)
        assert (lease is None) == (found is None)
        if lease is not None:
            assert found == (lease.offset // SLOT, ())
            assert lease.tensor.numel() == lease.nbytes == nbytes
            assert (lease.tensor == POISON).all(), "what was there before cannot be read"
            lease.tensor.fill_(self.count)
            self.active[self.count] = lease
            self.peak = max(self.peak, self.used())
            self.count = (self.count + 1) % POISON

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.active)))
        lease = self.active.pop(owner)
        lease.release()
        assert (lease.tensor == POISON).all()
        self.ended.append(lease)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.ended)).release()

    @rule(offset=st.integers(0, SLOT * SLOTS - 1))
    def owner(self, offset: int) -> None:
        slot = offset // SLOT
        ends = {
            number: -(-(lease.offset + lease.nbytes) // SLOT)
            for number, lease in self.active.items()
        }
        owners = [
            number
            for number, lease in self.active.items()
            if lease.offset // SLOT <= slot < ends[number]
        ]
        assert self.arena.owner_at(offset) == (owners[0] if owners else None)
        for number, lease in self.active.items():
            assert lease.holds(offset) == (
                number in owners and offset - lease.offset < lease.nbytes
            )

    @invariant()
    def accounts(self) -> None:
        for owner, lease in self.active.items():
            assert (lease.tensor == owner).all(), "somebody else wrote into this lease"
        assert (self.arena.used, self.arena.peak) == (self.used(), self.peak)
        assert self.arena.free_slots == SLOTS - self.used() // SLOT

    def teardown(self) -> None:
        for lease in self.active.values():
            lease.release()
        assert self.arena.used == 0 and self.arena.free_slots == SLOTS


TestLeases = Leases.TestCase


def test_a_slot_is_not_leased_twice():
    slots = arena()
    slots.lease("a", SLOT, start=2)
    with pytest.raises(ValueError, match="not free"):
        slots.lease("b", 2 * SLOT, start=1)
    assert slots.used == SLOT
    assert slots.find(SLOTS * SLOT, lambda _: 5.0, beyond=4) == (0, ("a",))
    assert slots.find(SLOTS * SLOT, lambda _: 5.0, beyond=5) is None


def test_poison_is_nan_in_every_dtype():
    slots = arena()
    lease = slots.lease("a", SLOT)
    lease.tensor.zero_()
    lease.release()
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert slots.memory[:SLOT].view(dtype).isnan().all()


def test_without_poison_the_bytes_stay():
    slots = arena(poison=False)
    lease = slots.lease("a", SLOT)
    lease.tensor.fill_(3)
    lease.release()
    assert (slots.memory[:SLOT] == 3).all()


def test_a_second_release_does_not_end_the_next_lease():
    slots = arena()
    first = slots.lease("a", SLOT * SLOTS)
    assert slots.lease("b", 1) is None
    first.release()
    second = slots.lease("a", SLOT * SLOTS)
    second.tensor.fill_(1)
    first.release()
    assert slots.used == SLOT * SLOTS and (second.tensor == 1).all()


def test_arenas_that_are_made_in_part_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the error is held, as in a notebook."""
    made: list[Arena] = []
    monkeypatch.setattr(module, "Arena", lambda *given: made.append(Arena(*given)) or made[-1])
    device: Any = SimpleNamespace(
        compute_memory=lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8),
        host_memory=lambda nbytes: torch.zeros(1 << 60),
    )
    rooms: Any = SimpleNamespace(device=1 << 14, homes=0, cache=0)
    with ExitStack() as closing, pytest.raises(RuntimeError) as error:
        module.Arenas(device, rooms, False, closing)
    assert error.tb is not None and [arena.memory.numel() for arena in made] == [0]
