"""Units that are in use around other units, and their turns in a backward on several ranks.

[Note: turns that ranks agree on]
All ranks run the same modules, so a forward uses the units in one order. A backward follows the
graph of the rank's own data. A parameter that a branch leaves out has no node in that graph. If its
unit is that of one block, other parameters of the block give the unit its turn. A unit *spans*
other units if it is in use around them. An example is the unit of a parameter of the model itself.
Such a unit may have its turn between any two of the units that it spans, or no turn. So the spanned
units determine the turn. It begins with the first use of a unit that it spans. It ends with the
first use of a unit outside of these, or with the backward. Its parameters stay during the whole
turn, so no later use needs a collective. Its gradients wait in the tensors that autograd made
(`GradientBuffer.park`). They are reduced once, at the end. A rank without gradients contributes
zeros, as with `find_unused_parameters` of DDP.

A forward may use a unit several times, with other units in between. If only one of these uses reads
a parameter, its gradient comes early on the ranks that read it there. All ranks have the first of
these uses. So the gradients wait for the end of its turn, the last turn of the unit in the
backward.

Interleaved micro-batches (`infinity.accumulate`) have their turns where the interleaver switches.

At stage 3 it is an error (`Exchange`) if a whole backward of one rank leaves out a unit that spans
no others. Then the ranks ran different modules, or dropped the output of a module.

[Note: one line of reductions]
At stages 0 and 2 every rank has whole parameters. Their uses need no collective, so a rank may
leave out modules, as with LayerDrop. Each backward reduces every trainable unit once, in one order
(`Line`). After its turn, a unit waits until the units before it are reduced. Meanwhile its
gradients stay in the tensors that autograd made. A unit without a turn contributes zeros when the
backward ends. A rank that leaves nothing out, and uses units in that order, keeps no more memory
than without the line. The order is that in which the forwards of the first rank first used the
units, reversed. A reduction to which no rank contributes moves no data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from torch import nn

from infinity.errors import EngineClosedError
from infinity.schedule.runtime import Runtime
from infinity.sharding.exchange import Exchange
from infinity.sharding.gradient_buffer import GradientBuffer
from infinity.sharding.unit import Unit


class Line:
    """The order in which `units` are reduced in each backward, the same on all ranks; see [Note:
    one line of reductions]."""

    def __init__(self, units: Sequence[Unit], buffer: GradientBuffer, exchange: Exchange) -> None:
        self._units, self._buffer, self._exchange = units, buffer, exchange
        self._used: dict[Unit, None] = {}  # in the order of first uses
        self._order: Sequence[Unit] = ()  # once ranks have agreed
        self._ended: set[Unit] = set()
        self._position = 0
        self._begun = False

    def use(self, unit: Unit) -> None:
        """A forward that will have a backward uses `unit`."""
        if not self._order:
            self._used[unit] = None

    def begin(self) -> None:
        """The backward under way has a gradient: begin to reduce all units."""
        if self._begun:
            return
        if not self._order:
            self._agree()
        self._begun = True
        self._advance()

    def turn_ended(self, unit: Unit) -> None:
        """`unit` has had its turn in the backward under way."""
        self._ended.add(unit)
        self._advance()

    def end(self) -> None:
        """The backward has ended: reduce the remaining units."""
        if self._begun:
            self._ended.update(self._order)
            self._advance()
        self._begun, self._position = False, 0
        self._ended.clear()
        self.open()

    def open(self) -> None:
        """Let the buffer collect gradients of the next unit only."""
        order, at = self._order, self._position
        self._buffer.admit(order[at].gradients if at < len(order) else None)

    def _advance(self) -> None:
        if not self._begun:
            return
        for unit in self._order[self._position :]:
            if unit not in self._ended:
                break
            self._buffer.reduce_turn(unit.gradients)
            self._position += 1
        self.open()

    def _agree(self) -> None:
        places = dict(zip(reversed(self._used), range(len(self._used)), strict=True))
        mine = [float(places.get(unit, len(places))) for unit in self._units]
        exchange = self._exchange
        values = mine if exchange.ranks.is_first else [0.0] * len(mine)
        agreed = exchange.sum(values, "the order of reductions")
        order = dict(zip(self._units, agreed, strict=True))
        self._order = sorted(self._units, key=lambda unit: (order[unit], -unit.facts.index))


class Spans:
    """The turns of units that span others, in the backward under way. The thread that runs the
    model calls all methods.

    One class, because one use of a unit may end the turn of another one, and all fields say which
    turns are open.
    """

    def __init__(
        self,
        users: Mapping[nn.Module, Sequence[Unit]],
        runtime: Runtime,
        buffer: GradientBuffer | None,
    ) -> None:
        """`users` has the units of each hooked module."""
        self._runtime, self._buffer = runtime, buffer
        inside = _spanned(users)
        self._inside = {
            unit: inside[unit]
            for unit in sorted(inside, key=lambda each: each.facts.index)
            if len(inside[unit]) > 1 and (_moves(unit) or _reduces(unit))
        }
        """For each spanning unit, itself and the units that it spans."""
        self._around: dict[Unit, list[Unit]] = {}
        for span, units in self._inside.items():
            for unit in units:
                self._around.setdefault(unit, []).append(span)
        self._open: list[Unit] = []
        self._latest: Unit | None = None  # the last unit with a turn that spans no others
        # How often the last forward used each unit, if it will have a backward, and the unit it
        # used last.
        self._uses: Counter[Unit] | None = None
        self._last_used: Unit | None = None
        self._reused: set[Unit] = set()
        # Of these, in the backward under way: how many turns remain, and the unit that has its last
        # turn.
        self._left: dict[Unit, int] = {}
        self._due: Unit | None = None
        self._line = self._line_of(users)
        self._current: Unit | None = None  # the unit that has its turn in the line
        self._rests = False
        self.rest(False)

    def rest(self, rests: bool) -> None:
        """Set whether micro-batches are interleaved from now on. They have turns of their own."""
        self._rests = rests
        self._park()

    def _line_of(self, users: Mapping[nn.Module, Sequence[Unit]]) -> Line | None:
        reduced = {unit for units in users.values() for unit in units if _reduces(unit)}
        units = sorted(reduced, key=lambda each: each.facts.index)
        exchange = next((unit.exchange for unit in units), None)
        if (
            self._buffer is None
            or exchange is None
            or not all(u.on_device.stays_whole for u in units)
        ):
            return None
        return Line(units, self._buffer, exchange)

    def _park(self) -> None:
        if self._buffer is None:
            return
        units = () if self._rests else (*self._inside, *self._reused)
        self._buffer.park(unit.gradients for unit in units if _reduces(unit))
        if self._line is not None:
            if self._rests:
                self._buffer.admit_all()
            else:
                self._line.open()

    def begin_forward(self, training: bool) -> None:
        """A forward begins, and `training` says whether it will have a backward."""
        self._uses, self._last_used = (Counter() if training else None), None
        if self._reused:
            self._reused.clear()
            self._park()

    def use(self, unit: Unit) -> None:
        """The forward is about to use `unit`."""
        if self._uses is not None and self._line is not None:
            self._line.use(unit)
        if self._uses is None or unit is self._last_used or unit in self._inside:
            return
        self._uses[unit] += 1
        self._last_used = unit
        if self._uses[unit] == 2 and len(unit.facts.parameters) > 1:
            self._reused.add(unit)
            self._park()

    def turn(self, unit: Unit) -> None:
        """The backward is about to use `unit`."""
        if self._rests:
            if self._buffer is not None:
                self._buffer.begin_turn(unit.gradients)
            return
        around = self._around.get(unit, [])
        # A unit around an open one may be used on some ranks only, so its use closes nothing.
        inside = self._inside.get(unit, ())
        closing = [
            span for span in self._open if unit not in self._inside[span] and span not in inside
        ]
        opening = [span for span in around if span not in self._open]
        is_inner = unit not in self._inside
        if closing or opening or (is_inner and unit.facts.trainable and unit is not self._due):
            self._reduce_due()
        if closing or opening:
            self._end_current()
        self._close(closing)
        if is_inner:
            self._begin(unit)
            if self._line is not None:
                self._begin_in_line(unit)
            elif self._buffer is not None:
                self._buffer.begin_turn(unit.gradients)
        for span in opening:
            if _moves(span):
                self._runtime.enter(span)
                self._runtime.held.add(span)
            self._open.append(span)

    def _begin(self, unit: Unit) -> None:
        """Note a use of `unit`, which spans no others. It begins a turn if the use before was of
        another unit."""
        if unit is self._latest:
            return
        self._latest = unit
        if unit in self._reused and self._uses is not None:
            self._left[unit] = self._left.get(unit, self._uses[unit]) - 1
            if self._left[unit] == 0:
                self._due = unit

    def _begin_in_line(self, unit: Unit) -> None:
        """As `GradientBuffer.begin_turn`: a use of a frozen unit ends no turn."""
        if unit.facts.trainable and unit is not self._current:
            self._end_current()
            self._current = unit if _reduces(unit) and unit not in self._reused else None

    def _end_current(self) -> None:
        """The turn of the unit that has gradients now has ended."""
        current, self._current = self._current, None
        if self._line is None and self._buffer is not None:
            self._buffer.flush()
        elif current is not None:
            self._reduce(current)

    def _reduce(self, unit: Unit) -> None:
        """The turn of `unit` has ended: reduce it, in the line if there is one."""
        if self._line is not None:
            self._line.turn_ended(unit)
        elif self._buffer is not None:
            self._buffer.reduce_turn(unit.gradients)

    def _reduce_due(self) -> None:
        """The last turn of a unit that was used several times has ended."""
        due, self._due = self._due, None
        if due is not None and _reduces(due):
            self._reduce(due)

    def collect(self, unit: Unit) -> None:
        """A gradient of `unit` has come. The backward may not have used the unit before: a layer
        needs no weight if its input requires no gradient. Another rank may have used it for its
        other parameters. So a unit with several parameters is used here, too."""
        if self._rests:
            return
        if self._line is not None and _reduces(unit):
            self._line.begin()
        if unit in self._inside or unit is self._latest:
            return
        self.turn(unit)
        if _moves(unit) and len(unit.facts.parameters) > 1:
            self._runtime.enter(unit)
            unit.on_device.release()

    def end(self) -> None:
        """The backward has ended or failed. If the engine is closed, nothing is raised here: the
        next call that needs the engine raises, and `Engine.close` does not."""
        self._latest = None
        left, self._left = self._left, {}
        with suppress(EngineClosedError):
            self._reduce_due()
            self._close(self._open)
            for unit in sorted(
                (u for u, n in left.items() if n > 0), key=lambda each: each.facts.index
            ):
                self._due = unit
                self._reduce_due()
            self._current = None
            if self._line is not None:
                self._line.end()
            if self._buffer is not None:
                self._buffer.reduce_parked()

    def _close(self, closing: Iterable[Unit]) -> None:
        turns = [*closing]
        for span in turns:
            self._open.remove(span)
            if span in self._runtime.held:
                self._runtime.held.remove(span)
                span.on_device.release()
        for span in reversed(turns):
            if _reduces(span):
                self._reduce(span)


def _spanned(users: Mapping[nn.Module, Sequence[Unit]]) -> dict[Unit, set[Unit]]:
    """For each unit, the units that are used during the calls of the modules that use it; also
    itself."""
    found: dict[Unit, set[Unit]] = {}
    for module, units in users.items():
        below = {unit for inner in module.modules() for unit in users.get(inner, ())}
        for unit in units:
            found.setdefault(unit, set()).update(below)
    return found


def _moves(unit: Unit) -> bool:
    """Whether a use of the unit may need a collective. A unit that stays whole is gathered after a
    step, in the order of the trace, and its uses are part of the trace."""
    return unit.facts.shared


def _reduces(unit: Unit) -> bool:
    """Whether the ranks reduce its gradients when its turn ends."""
    return unit.facts.trainable and unit.facts.reduces_each_turn
