"""Units inside of whose uses other units are used, and when their turns in a backward are on
several ranks.

[Note: turns that ranks agree on]
All ranks run the same modules, so a forward uses the units in one order. A backward follows the
graph of a rank's own data. A parameter that a branch leaves out has no node there. Where its unit
is that of one block, other parameters of the block give the unit its turn. A unit that *spans*
others, such as that of a parameter of the model itself, may have its turn between any two of them,
or none. So its turn is fixed by the others: it begins with the first use of a unit that it spans,
and ends with the first use of a unit outside of these, or with the backward. All of that time its
parameters stay, so that no later use needs a collective. Its gradients wait in the tensors that
autograd made (`GradientBuffer.park`), and are reduced at the end, once. A rank without any brings
zeros, as with `find_unused_parameters` of DDP.

A forward may use a unit several times, with others between. A parameter that only one of these uses
takes has its gradient early, on the ranks that take it there. All ranks have the first of these
uses, so gradients wait for the end of its turn, which is the last one in the backward.

Interleaved micro-batches (`infinity.accumulate`) have their turns where their interleaver switches.

A unit that a whole backward leaves out on one rank, and that spans nothing, is an error at stage 3
(`Exchange`): its ranks ran other modules, or dropped the output of one.

[Note: one line of reductions]
Where every rank has whole parameters (stages 0 and 2) their uses need no collective, so ranks may
leave out modules, as with LayerDrop. There each backward reduces every trainable unit once, in one
order (`Line`). A unit whose turn has ended waits until those before it are reduced, and its
gradients stay where autograd made them. What had no turn when the backward ends brings zeros. So a
rank that leaves nothing out, and uses units in that order, keeps no more than without the line.
The order is that of the first forwards of the first rank, backwards. A reduction to which no rank
brings anything moves no data.
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
        """The backward under way has a gradient, so it reduces all units."""
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
        """The backward has ended: reduce what is left."""
        if self._begun:
            self._ended.update(self._order)
            self._advance()
        self._begun, self._position = False, 0
        self._ended.clear()
        self.open()

    def open(self) -> None:
        """Have the buffer collect gradients of the next unit alone."""
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
        self._order = sorted(self._units, key=lambda unit: (order[unit], -unit.index))


class Spans:
    """The turns of units that span others, in the backward that is under way. For the thread that
    runs the model."""

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
            for unit in sorted(inside, key=lambda each: each.index)
            if len(inside[unit]) > 1 and (_moves(unit) or _reduces(unit))
        }
        """By spanning unit, itself and those that it spans."""
        self._around: dict[Unit, list[Unit]] = {}
        for span, units in self._inside.items():
            for unit in units:
                self._around.setdefault(unit, []).append(span)
        self._open: list[Unit] = []
        self._latest: Unit | None = None  # that had a turn, beside spanning ones
        # Uses in the last forward, if that will have a backward, and which unit was used last.
        self._uses: Counter[Unit] | None = None
        self._last_used: Unit | None = None
        self._reused: set[Unit] = set()
        # Of these, in the backward that is under way: turns that are left, and who has its last.
        self._left: dict[Unit, int] = {}
        self._due: Unit | None = None
        self._line = self._line_of(users)
        self._current: Unit | None = None  # whose turn it is in the line
        self._rests = False
        self.rest(False)

    def rest(self, rests: bool) -> None:
        """Whether micro-batches are interleaved from now on, which have turns of their own."""
        self._rests = rests
        self._park()

    def _line_of(self, users: Mapping[nn.Module, Sequence[Unit]]) -> Line | None:
        reduced = {unit for units in users.values() for unit in units if _reduces(unit)}
        units = sorted(reduced, key=lambda each: each.index)
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
        if self._uses[unit] == 2 and len(unit.parameters) > 1:
            self._reused.add(unit)
            self._park()

    def turn(self, unit: Unit) -> None:
        """The backward is about to use `unit`."""
        if self._rests:
            if self._buffer is not None:
                self._buffer.begin_turn(unit.gradients)
            return
        around = self._around.get(unit, [])
        # A use of a unit around an open one may come on some ranks alone, and says nothing.
        inside = self._inside.get(unit, ())
        closing = [
            span for span in self._open if unit not in self._inside[span] and span not in inside
        ]
        opening = [span for span in around if span not in self._open]
        is_inner = unit not in self._inside
        if closing or opening or (is_inner and unit.trainable and unit is not self._due):
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
        """A use of a unit that spans no others; a turn of it begins where another one had the last
        use."""
        if unit is self._latest:
            return
        self._latest = unit
        if unit in self._reused and self._uses is not None:
            self._left[unit] = self._left.get(unit, self._uses[unit]) - 1
            if self._left[unit] == 0:
                self._due = unit

    def _begin_in_line(self, unit: Unit) -> None:
        """As `GradientBuffer.begin_turn`: frozen units come and go between gradients."""
        if unit.trainable and unit is not self._current:
            self._end_current()
            self._current = unit if _reduces(unit) and unit not in self._reused else None

    def _end_current(self) -> None:
        """The turn of the unit whose gradients come has ended."""
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
        """A gradient of `unit` has come. The backward may have had no use of it before: a layer
        whose input requires no gradient needs no weight. Where other parameters of the unit may be
        left out, another rank may have had one: it is used here, too."""
        if self._rests:
            return
        if self._line is not None and _reduces(unit):
            self._line.begin()
        if unit in self._inside or unit is self._latest:
            return
        self.turn(unit)
        if _moves(unit) and len(unit.parameters) > 1:
            self._runtime.enter(unit)
            unit.on_device.release()

    def end(self) -> None:
        """The backward has ended, well or not. Where the engine cannot go on, the next call that
        needs it says so, and `Engine.close` does not."""
        self._latest = None
        left, self._left = self._left, {}
        with suppress(EngineClosedError):
            self._reduce_due()
            self._close(self._open)
            for unit in sorted((u for u, n in left.items() if n > 0), key=lambda each: each.index):
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
    """For each unit all that are used while a module is called that uses it, itself among them."""
    found: dict[Unit, set[Unit]] = {}
    for module, units in users.items():
        below = {unit for inner in module.modules() for unit in users.get(inner, ())}
        for unit in units:
            found.setdefault(unit, set()).update(below)
    return found


def _moves(unit: Unit) -> bool:
    """Whether a use of the unit may need a collective. Where it stays whole, what follows a step is
    gathered in the order of the trace, which its uses are part of."""
    return unit.facts.shared


def _reduces(unit: Unit) -> bool:
    """Whether the end of its turn is a reduction."""
    return unit.trainable and unit.facts.reduces_each_turn
