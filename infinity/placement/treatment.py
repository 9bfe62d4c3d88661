"""What becomes of what each block's forward saves: kept on the compute device, offloaded, or
computed again. A pure function of bytes and seconds. Imports no torch.

[Note: what is weighed]
To recompute a block costs its forward once more, and frees all that it saves but its inputs. To
offload costs what the copies take beyond the time that the model computes: copies away run beside
the forward, and copies back beside the backward, which takes two forwards. The choice has the least
seconds of all that fit. This is the problem of Checkmate (Jain et al. 2020, arXiv:1910.02653) for
whole blocks, with a second way to free bytes; Capuchin (Peng et al. 2020) weighs the same two ways,
greedily. Blocks are few and mostly alike, so a table over (bytes on the device, bytes away) solves
it exactly, up to `MOST_STATES` entries. Beyond that the table is thinned.

[Note: what has to fit]
When the backward reaches a block, the compute device holds what the blocks before it keep there,
what this one keeps, and the inside of one of its forwards, which was computed again or came back.
The largest such sum, over all blocks, has to fit. So to recompute the last block frees nothing, and
those that come first are recomputed first. To recompute every block, and to offload where that
cannot be, needs least of all choices.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

MOST_STATES = 512
"""Entries of the table after each block; exact for 30 different blocks that have three ways, and
for any number of equal ones that have two."""

Treatment = Literal["keep", "offload", "recompute"]
"""What becomes of what the forwards of a block save."""


class BlockCost(NamedTuple):
    """What a block saves for the backward, in bytes, and the `seconds` of its forwards.

    `inputs` and the rest, `inside`, are of all forwards whose backward has yet to come, `largest`
    is the most of `inside` that one forward has. Where it is not `recomputable` its forward cannot
    run again.
    """

    inputs: int
    inside: int
    largest: int
    seconds: float
    recomputable: bool = True


class ActivationRoom(NamedTuple):
    """Where saved bytes may be: `device` bytes on the compute device; `away` bytes in the tier of
    activations (infinite for drives, 0 where nothing is offloaded), with its rates in bytes per
    second."""

    device: float
    away: float = 0
    leaving: float = math.inf
    coming: float = math.inf


class _State(NamedTuple):
    """After some blocks: bytes on the device and away, seconds, the last treatment, and the state
    before it."""

    device: float
    away: float
    seconds: float
    treatment: Treatment | None = None
    before: _State | None = None


def choose(blocks: Sequence[BlockCost], others: int, room: ActivationRoom) -> tuple[Treatment, ...]:
    """The treatment of each of `blocks`, in the order of the forward, that fits into `room` and
    takes least time; where none fits, `leanest`. Outside of blocks `others` bytes are saved.

    Never slower than to recompute all or to offload all, where these fit. Every rank that is given
    the same numbers chooses the same.
    """
    states = [_first(others, room)]
    for block in blocks:
        states = _thinned(
            state
            for before in states
            for treatment in _treatments(block, room)
            if (state := _after(before, block, treatment, room)) is not None
        )
    found = [_treatments_of(state) for state in states]
    found += [leanest(blocks, room), ("offload" if room.away else "keep",) * len(blocks)]
    fitting = [each for each in found if peak(blocks, others, each, room) <= room.device]
    if not fitting:
        return leanest(blocks, room)
    # Of equal ones that which copies least.
    return min(
        fitting, key=lambda each: (seconds(blocks, others, each, room), each.count("offload"))
    )


def leanest(blocks: Sequence[BlockCost], room: ActivationRoom) -> tuple[Treatment, ...]:
    """What needs the least memory of the compute device: every block that can be is recomputed, and
    the others are offloaded, where anything is."""
    other: Treatment = "offload" if room.away else "keep"
    return tuple("recompute" if block.recomputable else other for block in blocks)


def peak(
    blocks: Sequence[BlockCost],
    others: int,
    treatments: Sequence[Treatment],
    room: ActivationRoom,
) -> float:
    """The most saved bytes on the compute device; see [Note: what has to fit]. What the tier of
    activations has no room for stays on the device."""
    state = _first(others, room)
    most = state.device
    for block, treatment in zip(blocks, treatments, strict=True):
        need, state = _step(state, block, treatment, room)
        most = max(most, need)
    return most


def seconds(
    blocks: Sequence[BlockCost],
    others: int,
    treatments: Sequence[Treatment],
    room: ActivationRoom,
) -> float:
    """What a forward and its backward take longer than if everything were kept and nothing were
    copied; see [Note: what is weighed]."""
    state = _first(others, room)
    for block, treatment in zip(blocks, treatments, strict=True):
        _, state = _step(state, block, treatment, room)
    return state.seconds + exposed(state.away, sum(block.seconds for block in blocks), room)


def exposed(nbytes: float, forward: float, room: ActivationRoom) -> float:
    """Seconds by which copies of `nbytes` away and back outlast the computation beside them."""
    return max(nbytes / room.leaving - forward, 0.0) + max(nbytes / room.coming - 2 * forward, 0.0)


def _treatments(block: BlockCost, room: ActivationRoom) -> list[Treatment]:
    found: list[Treatment] = ["keep"]
    if room.away:
        found.append("offload")
    return [*found, "recompute"] if block.recomputable else found


def _first(others: int, room: ActivationRoom) -> _State:
    away = min(others, room.away)
    return _State(others - away, away, 0.0)


def _step(
    before: _State, block: BlockCost, treatment: Treatment, room: ActivationRoom
) -> tuple[float, _State]:
    """What the device has to hold when the backward reaches `block`, and the state after it."""
    whole = before.device + block.inputs + block.inside
    if treatment == "keep":
        return whole, _State(whole, before.away, before.seconds, treatment, before)
    again = treatment == "recompute"
    nbytes = block.inputs if again else block.inputs + block.inside
    away = min(nbytes, room.away - before.away)
    device = before.device + nbytes - away
    seconds = before.seconds + (block.seconds if again else 0.0)
    after = _State(device, before.away + away, seconds, treatment, before)
    return min(device + block.largest, whole), after


def _after(
    before: _State, block: BlockCost, treatment: Treatment, room: ActivationRoom
) -> _State | None:
    need, state = _step(before, block, treatment, room)
    return state if need <= room.device else None


def _thinned(states: Iterable[_State]) -> list[_State]:
    """Those that no other one beats in bytes on the device, bytes away and seconds; `MOST_STATES`
    of them, evenly spread."""
    kept: list[_State] = []
    # Of those kept, by bytes away: fewer seconds for more bytes.
    stairs: list[tuple[float, float]] = []
    for state in sorted(states, key=lambda each: each[:3]):
        at = bisect.bisect_right(stairs, (state.away, math.inf))
        if at and stairs[at - 1][1] <= state.seconds:
            continue
        while at < len(stairs) and stairs[at][1] >= state.seconds:
            del stairs[at]
        stairs.insert(at, (state.away, state.seconds))
        kept.append(state)
    if len(kept) <= MOST_STATES:
        return kept
    return [kept[i * (len(kept) - 1) // (MOST_STATES - 1)] for i in range(MOST_STATES)]


def _treatments_of(last: _State) -> tuple[Treatment, ...]:
    found: list[Treatment] = []
    state: _State | None = last
    while state is not None and state.treatment is not None:
        found.append(state.treatment)
        state = state.before
    return tuple(reversed(found))
