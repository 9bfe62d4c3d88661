"""A part of a unit works without a unit and an engine: it takes facts and listeners."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from infinity.device import ComputeDevice
from infinity.errors import EngineClosedError
from infinity.observe import Recorder
from infinity.sharding.facts import UnitFacts
from infinity.sharding.gradient_block import GradientBlock
from infinity.sharding.gradient_ledger import GradientEntry, GradientLedger, GradientState, Where
from infinity.sharding.gradients import Gradients
from infinity.sharding.listeners import Border, Grads, UnitListeners, Updates
from infinity.sharding.posted import Collective, Contribution, Posted
from infinity.sharding.ranks import Among
from infinity.sharding.unit import declare
from infinity.tiers.store import Store
from support.configs import config_of
from support.facts import facts_of

SHAPES = [(3, 5), (70,), (2, 2)]


@contextmanager
def block_of(tier: str) -> Iterator[tuple[UnitFacts, GradientBlock]]:
    """The facts of a unit whose gradients are at home in `tier`, and its block."""
    tiers = dict.fromkeys(("parameters", "gradients", "optimizer"), tier)
    config = config_of(gpu_memory="1MiB", cpu_memory="64MiB", device="cpu", **tiers)
    facts = facts_of([nn.Parameter(torch.zeros(shape)) for shape in SHAPES], config)
    store = Store(config, ComputeDevice("cpu"), Recorder())
    try:
        blocks = declare(facts, store, config)
        store.open(store.placement.layout(facts.nbytes, 0))
        yield facts, GradientBlock(facts, blocks, store, UnitListeners())
    finally:
        store.close()


class Listening(Updates):
    """Keeps the content of the block as it was when its readers were last waited for."""

    def __init__(self, block: GradientBlock) -> None:
        self._block = block
        self.unread = block.flat().clone()
        self.rollbacks = self.outdated = 0

    def await_readers(self, facts: UnitFacts) -> None:
        self.unread = self._block.flat().clone()

    def rollback(self, facts: UnitFacts) -> None:
        self.rollbacks += 1

    def outdate(self) -> None:
        self.outdated += 1

    def gradients(self, facts: UnitFacts) -> Gradients:
        """Gradients that tell this."""
        listeners = UnitListeners()
        listeners.connect(self, Border(), Grads())
        return Gradients(facts, self._block, None, None, listeners, self.outdate)


class Step:
    """Gradients, and what torch would have of them."""

    def __init__(self, facts: UnitFacts, block: GradientBlock, seed: int) -> None:
        self.block, self.listener = block, Listening(block)
        self.gradients = self.listener.gradients(facts)
        self.of_torch: dict[int, torch.Tensor] = {}
        self._random = random.Random(seed)
        self._values = torch.Generator().manual_seed(seed)

    def _drawn(self, index: int) -> torch.Tensor:
        return torch.randn(SHAPES[index], generator=self._values)

    def add(self, index: int) -> None:
        value = self._drawn(index)
        self.gradients.add(index, value.clone())
        self.of_torch[index] = self.of_torch[index] + value if index in self.of_torch else value

    def zero(self, index: int) -> None:
        self.gradients.zero([index])
        self.of_torch.update({index: torch.zeros(SHAPES[index])} if index in self.of_torch else {})

    def assign(self, index: int) -> None:
        self.of_torch[index] = self._drawn(index)
        self.gradients.assign(index, self.of_torch[index].flatten())

    def forget(self, index: int) -> None:
        self.gradients.forget([index])
        self.of_torch.pop(index, None)

    def clip(self, index: int) -> None:
        self.gradients.scale([index], 0.5)
        if index in self.of_torch:
            self.of_torch[index] = self.of_torch[index] * 0.5

    def spend(self, index: int) -> None:
        self.gradients.spend([index])

    def backward(self) -> None:
        for _ in range(self._random.randint(1, 5)):
            self._checked(self.add, self._random.randrange(len(SHAPES)))
        self.gradients.settle()

    def between(self) -> None:
        for _ in range(self._random.randint(0, 4)):
            changes = [self.zero, self.assign, self.forget, self.clip, self.spend]
            if self.gradients.ledger.state is GradientState.EMPTY:
                changes = [self.assign, self.forget]
            self._checked(self._random.choice(changes), self._random.randrange(len(SHAPES)))

    def _checked(self, change: Callable[[int], None], index: int) -> None:
        before = self.block.flat().clone()
        change(index)
        if not torch.equal(self.block.flat(), before):
            assert torch.equal(self.listener.unread, before), "readers of the old bytes were lost"
        assert self.gradients.ledger.present() == sorted(self.of_torch)
        for each, expected in self.of_torch.items():
            assert torch.equal(
                self.block.part(each) * self.gradients.ledger.clip_of(each), expected
            )


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("tier", ["cpu", "gpu"])
def test_gradients_alone_are_those_of_torch(tier: str) -> None:
    """After each call they have the bits of `.grad`, and no byte changes before the readers of the
    block were waited for."""
    for seed in range(20):
        with block_of(tier) as (facts, block):
            step = Step(facts, block, seed)
            for _ in range(4):
                step.backward()
                step.between()


@pytest.mark.usefixtures("one_thread")
def test_gradients_alone_tell_before_an_update_is_outdated() -> None:
    """A gradient more than in the last step rolls back what began without it; one that was expected
    does not."""
    with block_of("cpu") as (facts, block):
        listener = Listening(block)
        gradients = listener.gradients(facts)
        gradients.add(0, torch.ones(SHAPES[0]))
        gradients.settle()
        gradients.spend([0])
        assert listener.outdated == 1
        gradients.clear()
        told = listener.rollbacks
        gradients.add(0, torch.ones(SHAPES[0]))
        assert listener.rollbacks == told
        gradients.add(1, torch.ones(SHAPES[1]))
        assert listener.rollbacks == told + 1


def test_a_ledger_knows_the_factors_of_gradients() -> None:
    """A gradient that was scaled with its loss is divided by that; an assigned one is not."""
    ledger = GradientLedger(facts_of([nn.Parameter(torch.zeros(shape)) for shape in SHAPES]))
    ledger.loss_scale = 8.0
    ledger.set([0], Where.HOME)
    ledger.entries[1] = GradientEntry(Where.BUFFER, clip=0.5, unscaled=True)
    assert ledger.present() == [0, 1] and not ledger.has(2)
    assert (ledger.factor(0, 0.25), ledger.factor(1, 0.25)) == (0.25 / 8, 0.125)
    assert ledger.summary() == [1.0, 1.0, 0.0, True, 8.0, False, False]
    scaled = ledger.scaled(torch.ones(2))
    assert scaled is not None and scaled.tolist() == [8.0, 8.0]
    assert ledger.scaled(torch.full((2,), 3e38)) is None  # 2.4e39 is no fp32 number
    generations = [ledger.generation(index) for index in range(len(SHAPES))]
    ledger.clear()
    assert ledger.present() == [] and ledger.loss_scale == 1.0
    assert all(ledger.generation(i) != before for i, before in enumerate(generations))


def _collective(name: str) -> Collective:
    return Collective(0, name, Contribution(lambda: None), (), None, (60.0, lambda: None))


def test_a_failure_ends_collectives_that_are_posted_before_and_after() -> None:
    posted, (joined, waiting, late) = Posted(), map(_collective, ("joined", "waiting", "late"))
    for collective in (joined, waiting):
        posted.add(collective, "gather", collective.name, Among.DATA)
    assert posted.first() is joined and posted.last() is waiting
    assert posted.take() is joined and posted.remove(joined)
    posted.fail(EngineClosedError("on purpose"))
    posted.add(late, "gather", "late", Among.DATA)
    for collective in (waiting, late):
        with pytest.raises(EngineClosedError, match="on purpose"):
            collective.wait()
    assert not posted.remove(waiting)
    assert not joined.ended()


def test_ranks_compare_the_collectives_that_all_of_them_post() -> None:
    """Tensor parallel ranks have an order of their own, and what a rank does alone is in none."""
    found = []
    for others in ((), (Among.PARTS, Among.ALONE)):
        posted, last = Posted(), _collective("last")
        for among in others:
            posted.add(_collective("other"), "gather", "other", among)
        posted.add(last, "reduce", "last", Among.DATA)
        found.append((last.order, posted.count, posted.note(None)))
    assert found[0] == found[1]
