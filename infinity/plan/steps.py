"""Training steps as tasks: the events of the real scheduler's walk, with the time that each takes.
Imports no torch.

[Note: what a step is made of]
    use       computes on the device, when the unit is there and the use before has ended
    fetch     reads the uncached part of a parameter, copies it over the link, gathers it
    gradient  is reduced, leaves the device, and goes to the drives where its home is there; with
              stage 1 it leaves whole, and is reduced when all have come
    update    reads states, runs the kernels, writes states, one piece after the other
    norm      reads the gradients, and ends the step

An update starts when its gradient is there (speculative), or when the norm is known (exact). With
"plain" the next forward waits for all of them. A unit without a place is updated when it gets one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from infinity.placement.spec import Kind, Placed
from infinity.plan.lanes import Sharing, Task
from infinity.schedule.planner import STATES, Event, UnitCost, Walk

COMPUTE, ADAM = "compute", "adam"
READ, WRITE = "nvme read", "nvme write"
UP, DOWN = "host to device", "device to host"
COLLECTIVE = "collective"

Mode = Literal["plain", "exact", "speculative", "delayed"]

AHEAD = 3
"""Uses of units by which states and activations are read ahead of their own."""
MOST_PIECES = 4
"""In which the update of a unit is simulated, at most."""
READING, WRITING = 2, 4
"""Pieces of an update whose states are read ahead, and whose writes are under way."""


@dataclass(frozen=True)
class Speeds:
    """What one rank has of the machine: bytes per second of the drives, the link, copies in host
    memory, kernels over host and device memory, and the network; parameters per second that the
    CPU updates. `handling` is seconds of Python for each parameter that is updated in chunks."""

    read: float
    write: float
    up: float
    down: float
    copy: float
    memory: float
    device: float
    network: float
    updates: float
    sharing: Sharing
    unified: bool
    handling: float = 0.0


@dataclass(frozen=True)
class UnitWork:
    """One unit of this rank: where its blocks are, what it costs, and how long it computes."""

    name: str
    blocks: Mapping[Kind, Placed]
    cost: UnitCost
    shards: int
    """Among how many ranks it is shared."""
    forward: float
    """Seconds of one use in a forward."""
    backward: float
    saved: float = 0.0
    """Bytes that a forward saves and that leave the compute device."""
    spilled: float = 0.0
    """Those of them that go to the drives."""

    @property
    def param(self) -> Placed:
        """The parameters."""
        return self.blocks[Kind.PARAM]

    @property
    def on_device(self) -> bool:
        """Whether all of it lives on the compute device."""
        return all(block.spec.tier.is_device for block in self.blocks.values())

    @property
    def has_shadow(self) -> bool:
        """Whether an update may be rolled back."""
        return all(b.copies == 2 for kind, b in self.blocks.items() if kind is not Kind.GRAD)

    @property
    def state_bytes(self) -> int:
        """Bytes that an update reads and writes."""
        return sum(2 * b.spec.nbytes for b in self.blocks.values())

    def moved(self, *kinds: Kind) -> int:
        """NVMe bytes that reading these blocks takes."""
        return sum(self.blocks[kind].moved_bytes for kind in kinds if kind in self.blocks)

    def written(self, *kinds: Kind) -> int:
        """NVMe bytes that writing these blocks takes, on average."""
        return sum(self.blocks[kind].mean_written_bytes for kind in kinds if kind in self.blocks)


@dataclass(frozen=True)
class Uses:
    """One cycle: the unit of each use, those in use beside it, and how many uses are of the
    forward."""

    order: tuple[int, ...]
    held: tuple[frozenset[int], ...]
    forward: int


class Steps:
    """The tasks of training steps of one rank. Call `step` for each; `tasks` and `ends` grow."""

    def __init__(
        self,
        units: Sequence[UnitWork],
        uses: Uses,
        slots: int,
        accumulation: int,
        mode: Mode,
        speeds: Speeds,
    ) -> None:
        costs = [unit.cost for unit in units]
        waits, delayed = mode == "plain", mode == "delayed"
        self._walk = Walk(uses.order, costs, slots, accumulation, uses.held, waits, delayed)
        self._units = units
        self._uses = uses
        self._accumulation = accumulation
        self._mode = mode
        self._speeds = speeds
        self.tasks: list[Task] = []
        self.ends: list[Task] = []
        """The last task of each step: a step lasts from one to the next."""
        self.moved = {READ: 0.0, WRITE: 0.0}
        """NVMe bytes of all steps so far."""
        self._position = 0  # in the uses of the step
        self._computed: list[Task] = []  # the model's last tasks, the newest last
        self._gate: list[Task] = []  # what the next use waits for beside
        self._arrived: dict[int, Task] = {}  # what makes the copy of a unit ready
        self._written: dict[int, Task] = {}
        self._updates: list[Task] = []  # pieces, in the order of the pipeline
        self._writes: list[Task] = []
        self._gradients: dict[int, Task] = {}
        self._pending: dict[int, Task] = {}  # to be updated when there is a place: after this task
        self._begun: dict[int, Task] = {}  # updates that came before the end of their step
        self._posted: list[Task] = []  # those of the step before
        self._first = {unit: place for place, unit in reversed(list(enumerate(uses.order)))}
        self._last = {unit: place for place, unit in enumerate(uses.order)}
        self._only_forward = [unit for unit, place in self._last.items() if place < uses.forward]

    def step(self) -> None:
        """One more optimizer step."""
        self._position = 0
        self._walk.cycles(self._hear)
        self._end_step()
        self._walk.update(self._hear_update)
        if self._mode == "plain":
            self._gate = list(self._posted)

    def _hear(self, event: Event, unit: int, evicted: tuple[int, ...]) -> None:
        if event is Event.USE:
            self._use(unit)
        elif event is Event.LAND and unit in self._pending:
            self._land(unit)
        else:  # a speculative update without a place is read again, too
            self._arrived[unit] = self._fetch(unit)

    def _hear_update(self, event: Event, unit: int, evicted: tuple[int, ...]) -> None:
        if event is Event.READ:
            self._land(unit)
        elif self._mode == "delayed":  # the forward uses the old copy
            self._fetch(unit)
        else:
            self._hear(event, unit, evicted)

    def _add(
        self,
        lane: str,
        name: str,
        seconds: float,
        needs: Sequence[Task],
        urgency: float = 0.0,
    ) -> Task:
        task = Task(lane, name, seconds, tuple(needs), urgency)
        self.tasks.append(task)
        return task

    def _io(self, lane: str, name: str, nbytes: float, *needs: Task, urgency: float = 0.0) -> Task:
        """Bytes that the drives read or write."""
        self.moved[lane] += nbytes
        rate = self._speeds.read if lane == READ else self._speeds.write
        return self._add(lane, name, nbytes / rate, needs, urgency)

    def _before(self, uses: int) -> list[Task]:
        """The model's task so many tasks ago, if there was one."""
        return self._computed[-uses:][:1]

    # The model

    def _use(self, number: int) -> None:
        order, forward = self._uses.order, self._uses.forward
        unit, place = self._units[number], self._position % len(order)
        cycle = self._position // len(order)
        backward = place >= forward
        seconds = unit.backward if backward else unit.forward
        # A unit that is used twice, such as a tied embedding, computes next to the loss.
        others = order[forward:place] if backward else order[place + 1 : forward]
        seconds *= number not in others
        needs = [*self._before(1), *self._gate]
        if number in self._arrived:
            needs.append(self._arrived[number])
        if backward and unit.saved:
            needs.append(self._return(unit))
        self._gate = []
        self._compute(unit.name, seconds, needs)
        if not backward and unit.saved:
            self._offload(unit)
        self._position += 1
        done = [number] if backward and place == self._last[number] else []
        if place == len(order) - 1:
            done += self._only_forward
        for each in done:
            if self._units[each].cost.trainable:
                self._gradient(each, cycle)

    def _compute(self, name: str, seconds: float, needs: Sequence[Task]) -> Task:
        self._computed.append(self._add(COMPUTE, name, seconds, needs))
        return self._computed[-1]

    def _offload(self, unit: UnitWork) -> None:
        """What a forward saves leaves the device."""
        name = f"activations of {unit.name}"
        last = self._add(DOWN, name, unit.saved / self._speeds.down, self._before(1))
        if unit.spilled:
            self._io(WRITE, name, unit.spilled, last)

    def _return(self, unit: UnitWork) -> Task:
        name = f"activations of {unit.name}"
        needs = self._before(AHEAD)
        if unit.spilled:
            needs = [self._io(READ, name, unit.spilled, *needs)]
        return self._add(UP, name, unit.saved / self._speeds.up, needs)

    def _fetch(self, number: int) -> Task:
        """Bring the parameters of a unit to the compute device, from where they are at home."""
        unit, speeds, spec = self._units[number], self._speeds, self._units[number].param.spec
        needs = self._before(1)
        if number in self._written:
            needs.append(self._written[number])
        moved = unit.moved(Kind.PARAM)
        if moved:
            needs = [self._io(READ, unit.name, moved, *needs)]
        copied = spec.nbytes - moved * speeds.unified
        last = self._add(UP, unit.name, copied / speeds.up, needs)
        return self._gather(number, last)

    def _gather(self, number: int, last: Task) -> Task:
        """Every rank gets the parts of the others."""
        unit = self._units[number]
        if unit.shards == 1:
            return last
        sent = unit.param.spec.nbytes * (unit.shards - 1) / self._speeds.network
        return self._add(COLLECTIVE, f"gather {unit.name}", sent, [last])

    # Gradients and updates

    def _gradient(self, number: int, cycle: int) -> None:
        """A backward has brought the gradient of a unit."""
        unit, speeds = self._units[number], self._speeds
        name, grad = f"gradient of {unit.name}", unit.blocks[Kind.GRAD].spec
        last = self._computed[-1]
        if not grad.whole:
            last = self._reduce(number, [last])
        if speeds.unified:  # the model's thread adds it to what is there
            last = self._compute(name, grad.home_bytes / speeds.copy, [last])
        elif not grad.tier.is_device:
            last = self._add(DOWN, name, grad.home_bytes / speeds.down, [last])
        moved = unit.moved(Kind.GRAD)
        if moved:
            before = [self._io(READ, name, moved, last)] if cycle else [last]
            last = self._io(WRITE, name, moved, *before)
        self._gradients[number] = last
        final = cycle == self._accumulation - 1
        if final and self._mode == "speculative" and unit.has_shadow and not unit.on_device:
            self._begun[number] = self._update(number, last, self._before(AHEAD))

    def _reduce(self, number: int, needs: list[Task]) -> Task:
        """Every rank gets its part of the sum over the ranks."""
        unit = self._units[number]
        if unit.shards == 1:
            return needs[0]
        sent = unit.blocks[Kind.GRAD].spec.nbytes * (unit.shards - 1) / self._speeds.network
        return self._add(COLLECTIVE, f"gradient of {unit.name}", sent, needs)

    def _settle(self, number: int, last: Task) -> Task:
        """Reduce what was collected whole, after the backward. From host memory it passes the
        device, and returns."""
        speeds, grad = self._speeds, self._units[number].blocks[Kind.GRAD].spec
        name = f"gradient of {self._units[number].name}"
        if not grad.whole:
            return last
        needs, passes = [last, *self._before(1)], grad.tier.is_host and not speeds.unified
        if passes:
            needs = [self._add(UP, name, grad.span / speeds.up, needs)]
        last = self._reduce(number, needs)
        return self._add(DOWN, name, grad.nbytes / speeds.down, [last]) if passes else last

    def _end_step(self) -> None:
        """The norm, and the updates that waited for it, what the next forward needs first first."""
        speeds, units = self._speeds, self._units
        self._gradients = {each: self._settle(each, last) for each, last in self._gradients.items()}
        seconds, needs = 0.0, [*self._before(1), *self._gradients.values(), *self._posted]
        for number, ready in self._gradients.items():
            grad = units[number].blocks[Kind.GRAD]
            on_device = grad.spec.tier.is_device
            seconds += grad.spec.nbytes / (speeds.device if on_device else speeds.memory)
            if grad.moved_bytes:
                name = f"norm of {units[number].name}"
                needs.append(self._io(READ, name, grad.moved_bytes, ready))
        end = self._add(COMPUTE if speeds.unified else ADAM, "norm", seconds, needs)
        self.ends.append(end)
        self._computed = [*self._computed[-AHEAD:], end]
        self._posted = list(self._begun.values())
        for number in sorted(self._gradients.keys() - self._begun, key=self._first.__getitem__):
            unit = units[number]
            if unit.on_device and not speeds.unified:
                work = unit.state_bytes / speeds.device
                done = self._add(COMPUTE, f"update {unit.name}", work, [end])
                self._arrived[number] = self._gather(number, done)
                self._posted.append(done)
            elif self._mode != "delayed" and self._walk.has_copy(number):
                self._posted.append(self._update(number, end, [end]))
            else:
                self._pending[number] = end
        self._gradients, self._begun = {}, {}

    def _land(self, number: int) -> None:
        """Update a unit that has no copy: its old parameter is read."""
        end = self._pending.pop(number)
        needs = [end] if self._mode == "delayed" else [end, *self._before(1)]
        self._posted.append(self._update(number, end, needs, reads_old=True))

    def _update(
        self, number: int, ready: Task, may_read: Sequence[Task], reads_old: bool = False
    ) -> Task:
        """Read, update and write a unit, whose gradient is `ready`; returns the last update."""
        unit, speeds, name = self._units[number], self._speeds, f"update {self._units[number].name}"
        read = unit.moved(*STATES, Kind.GRAD) + unit.cost.old * reads_old
        written = unit.written(*STATES, Kind.PARAM)
        elements = unit.param.spec.elements
        pieces = MOST_PIECES if read + written else 1
        placed = 0.0 if unit.param.spec.permanent else unit.param.spec.nbytes / speeds.up
        seconds = elements / speeds.updates
        if read + written:
            seconds += elements * speeds.handling
            if speeds.unified:  # the updater copies the old parameter and the new one, too
                seconds, placed = seconds + 2 * placed, 0.0
        urgency = 1.0 + self._first[number]
        last = ready
        for _ in range(pieces):
            needs = [ready, *self._updates[-1:]]
            if len(self._writes) >= WRITING:
                needs.append(self._writes[-WRITING])
            if read:
                ahead = self._updates[-READING:][:1]
                reading = self._io(READ, name, read / pieces, *may_read, *ahead, urgency=urgency)
                needs.append(reading)
            last = self._add(ADAM, name, seconds / pieces, needs, urgency)
            self._updates.append(last)
            if written:
                self._writes.append(self._io(WRITE, name, written / pieces, last))
        if self._mode != "delayed":
            self._arrived[number] = self._gather(
                number, self._add(UP, name, placed, [last], urgency)
            )
        if written:
            self._written[number] = self._writes[-1]
        return last
