"""Chooses a treatment for the tensors that each block's forward saves: keep on the compute device,
offload, or recompute. Pure functions of bytes and seconds. Imports no torch.

[Note: costs of a treatment]
To recompute a block costs one more forward. It frees all saved bytes except the inputs. To offload
costs the time by which copies outlast the computation. Copies away run beside the forward. Copies
back run beside the backward, which takes twice as long. The choice is the fastest that fits.

This is the problem of Checkmate (Jain et al. 2020, arXiv:1910.02653) for whole blocks, with a
second way to free bytes. Capuchin (Peng et al. 2020) weighs the same two ways, greedily. Blocks are
few and mostly equal, so a table over (bytes on the device, bytes away) solves it exactly up to
`MOST_STATES` entries. A longer table is thinned.

[Note: bytes that must fit]
When the backward reaches a block, the compute device holds three parts: the bytes that earlier
blocks keep there, the bytes that this block keeps, and the inside of one of its forwards, which was
recomputed or came back. The largest such sum over all blocks has to fit. So to recompute the last
block frees nothing, and the first blocks are recomputed first. The choice with the least memory
recomputes every block that can run again, and offloads the others.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

MOST_STATES = 512
"""Entries of the table after each block. This is exact for 30 different blocks with three
treatments, and for any number of equal blocks with two."""

Treatment = Literal["keep", "offload", "recompute"]
"""The fate of the tensors that the forwards of a block save."""


class BlockCost(NamedTuple):
    """The bytes that a block saves for the backward, and the `seconds` of its forwards.

    `inputs`, and `inside` for the other bytes, are sums over all forwards that still await their
    backward. `largest` is the largest `inside` of one forward. If not `recomputable`, the forward
    cannot run again.
    """

    inputs: int
    inside: int
    largest: int
    seconds: float
    recomputable: bool = True


class ActivationRoom(NamedTuple):
    """The room for saved bytes: `device` bytes on the compute device, and `away` bytes in the tier
    of activations (infinite for drives, 0 without offload). Copies there run at `leaving` bytes per
    second, and copies back at `coming`."""

    device: float
    away: float = 0
    leaving: float = math.inf
    coming: float = math.inf


class _State(NamedTuple):
    """The sums after some blocks: bytes on the device, bytes away, seconds. Also the last treatment
    and the state before it."""

    device: float
    away: float
    seconds: float
    treatment: Treatment | None = None
    before: _State | None = None


def choose(blocks: Sequence[BlockCost], others: int, room: ActivationRoom) -> tuple[Treatment, ...]:
    """The fastest treatments that fit into `room`, one for each of `blocks`, in forward order. If
    none fits, `leanest`. `others` is the saved bytes outside of blocks.

    Never slower than recomputing every block, or offloading every block, if that fits. Ranks with
    equal arguments choose the same.
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
    # Of equally fast choices, the one with the fewest offloads.
    return min(
        fitting, key=lambda each: (seconds(blocks, others, each, room), each.count("offload"))
    )


def leanest(blocks: Sequence[BlockCost], room: ActivationRoom) -> tuple[Treatment, ...]:
    """The treatments that need the least device memory: recompute every recomputable block, and
    offload the others. If `room` has no bytes away, keep them."""
    other: Treatment = "offload" if room.away else "keep"
    return tuple("recompute" if block.recomputable else other for block in blocks)


def peak(
    blocks: Sequence[BlockCost],
    others: int,
    treatments: Sequence[Treatment],
    room: ActivationRoom,
) -> float:
    """The most saved bytes on the compute device; see [Note: bytes that must fit]. Bytes that
    exceed the room away stay on the device."""
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
    """Seconds that `treatments` add to a forward and its backward, compared with keeping
    everything; see [Note: costs of a treatment]."""
    state = _first(others, room)
    for block, treatment in zip(blocks, treatments, strict=True):
        _, state = _step(state, block, treatment, room)
    return state.seconds + exposed(state.away, sum(block.seconds for block in blocks), room)


def exposed(nbytes: float, forward: float, room: ActivationRoom) -> float:
    """Seconds by which copies of `nbytes` away and back outlast a forward of `forward` seconds and
    its backward."""
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
    """The bytes on the device when the backward reaches `block`, and the state after it."""
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
    """The states that no other state beats in bytes on the device, bytes away and seconds: at most
    `MOST_STATES`, evenly spread."""
    kept: list[_State] = []
    # The kept states' (bytes away, seconds): seconds fall as bytes grow.
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
