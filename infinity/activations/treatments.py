"""Decides which blocks keep their saved tensors, offload them, or are recomputed
(`Config.recompute="auto"`). It decides between two steps, from the figures of earlier forwards.

[Note: time of the decision]
Before the first step no figures are known, and the budget must hold. So all blocks have the
treatment that needs least memory. The first forward after that step decides. The first step is
often slow, because libraries and memory are new. So the forward after the second step decides once
more, by the shorter times. From then on figures only grow: the most bytes of any step count. If the
choice no longer fits, the next step has another one.

[Note: longer batches]
A block may get more input bytes than ever before, such as a longer batch. Its saved bytes are not
known yet, so its forward is treated like the first one. So the budget holds in this step, too. With
several ranks it may not hold. Only one rank may have a longer batch, and ranks with different
backwards would join different collectives. So the step in which a batch grows keeps the old choice.

[Note: ranks]
Bytes and seconds differ from rank to rank. All ranks take the maximum of each figure over all
ranks, so they make the same choice. They exchange a few numbers per block, once or twice. In other
steps they exchange one number: whether the choice of any rank no longer fits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from infinity.activations.gauge import BlockGauge, Gauge
from infinity.placement.treatment import (
    ActivationRoom,
    BlockCost,
    Treatment,
    choose,
    leanest,
    peak,
)
from infinity.quantities import format_bytes
from infinity.sharding.exchange import Exchange
from infinity.sharding.posted import Collective

log = logging.getLogger("infinity")

DECISIONS = 2
"""A decision by new seconds follows each of this many first steps."""
_FIGURES = 5  # numbers of each block that ranks exchange


class TreatedBlock(NamedTuple):
    """The treatment of a block, the bytes of its inputs, the bytes of all other tensors that its
    forwards save before their backward, and the seconds of one forward (0.0: not timed yet)."""

    treatment: Treatment
    input_bytes: int
    inside_bytes: int
    forward_seconds: float


class Treatments:
    """The treatment of each block of one model. `names` are in the order of the model. Used by the
    thread that runs the model."""

    def __init__(
        self, names: Sequence[str], gauge: Gauge, room: ActivationRoom, exchange: Exchange | None
    ) -> None:
        self._names = tuple(dict.fromkeys(names))
        self.gauge = gauge
        """Measures the blocks."""
        self.room = room
        """The room for saved bytes."""
        self._exchange = exchange
        self._chosen: dict[str, Treatment] = {}
        self._allowed: dict[str, int] = {}  # input bytes at the last decision
        self._steps = 0
        self._due = False
        self._asked: Collective | None = None

    def of(self, name: str, block: BlockGauge) -> Treatment:
        """The treatment of a forward of `block` that begins now. Its inputs are counted already."""
        chosen = self._chosen.get(name)
        grows = self._exchange is None and block.open_inputs > self._allowed.get(name, 0)
        if chosen is None or grows:
            return leanest([block.cost], self.room)[0]
        return chosen

    def by_block(self) -> dict[str, TreatedBlock]:
        """The blocks that have had a forward, by name, in the order of the model."""
        found = {}
        for name in self._names:
            block = self.gauge.blocks.get(name)
            if block is not None:
                chosen = self._chosen.get(name) or leanest([block.cost], self.room)[0]
                found[name] = TreatedBlock(chosen, block.inputs, block.inside, block.seconds)
        return found

    def step_ended(self) -> None:
        """A step has been fixed: check whether the next step needs another choice."""
        if not self.gauge.end_step():
            return  # of another optimizer
        self._steps += 1
        self.gauge.times = self._steps < DECISIONS
        if self._steps <= DECISIONS:
            self._due = True
            return
        grown = not self._due and self._fits_no_more()
        if self._exchange is None:
            self._due |= grown
        else:
            self._asked = self._exchange.most([float(grown)], "of saved bytes that grew")

    def _fits_no_more(self) -> bool:
        costs = [self._cost(name) for name in self._names]
        chosen = [self._chosen[name] for name in self._names]
        return peak(costs, self.gauge.others, chosen, self.room) > self.room.device and any(
            each != least for each, least in zip(chosen, leanest(costs, self.room), strict=True)
        )

    def before_forward(self) -> None:
        """A training forward is about to begin: decide if a decision is due."""
        asked, self._asked = self._asked, None
        if asked is not None and asked.wait()[0]:
            self._due = True
        if self._due:
            self._due = False
            self._decide()

    def _cost(self, name: str) -> BlockCost:
        block = self.gauge.blocks.get(name)
        return BlockCost(0, 0, 0, 0.0) if block is None else block.cost

    def _decide(self) -> None:
        costs, others, room = self._agreed([self._cost(name) for name in self._names])
        chosen = choose(costs, others, room)
        least = leanest(costs, room)
        self._chosen = {
            # The costs of a block without a forward are not known.
            name: treatment if cost.inputs + cost.inside else lean
            for name, cost, treatment, lean in zip(self._names, costs, chosen, least, strict=True)
        }
        self._allowed = {name: cost.inputs for name, cost in zip(self._names, costs, strict=True)}
        self._log(costs, others, room, [self._chosen[name] for name in self._names])

    def _agreed(
        self, costs: Sequence[BlockCost]
    ) -> tuple[Sequence[BlockCost], int, ActivationRoom]:
        """The largest costs of all ranks, and their least room."""
        if self._exchange is None:
            return costs, self.gauge.others, self.room
        numbers = [
            float(number)
            for cost in costs
            for number in (*cost[: _FIGURES - 1], not cost.recomputable)
        ]
        ends = [float(self.gauge.others), -self.room.device, -self.room.away]
        found = self._exchange.most([*numbers, *ends], "of what blocks save").wait()
        others, device, away = found[-len(ends) :]
        agreed = []
        for at in range(0, len(numbers), _FIGURES):
            inputs, inside, largest, seconds, fixed = found[at : at + _FIGURES]
            agreed.append(BlockCost(int(inputs), int(inside), int(largest), seconds, not fixed))
        return agreed, int(others), self.room._replace(device=-device, away=-away)

    def _log(
        self,
        costs: Sequence[BlockCost],
        others: int,
        room: ActivationRoom,
        chosen: Sequence[Treatment],
    ) -> None:
        most = peak(costs, others, chosen, room)
        counts = {each: chosen.count(each) for each in ("keep", "offload", "recompute")}
        log.info(
            "recompute='auto': of %d blocks %d keep what they save, %d offload it and %d are "
            "recomputed; at most %s of %s on the compute device",
            len(chosen),
            *counts.values(),
            format_bytes(int(most)),
            format_bytes(int(room.device)),
        )
