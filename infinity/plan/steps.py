"""Training steps as tasks: the events of the real scheduler, with the time of each. Imports no
torch.

[Note: the tasks of a step]
    use       computes on the device after the use before it, when the unit is there
    fetch     reads the uncached part of a parameter, copies it over the link, gathers it
    gradient  is reduced, leaves the device, and goes to the drives if its home is there; with
              stage 1 it leaves whole, and is reduced when all have come
    update    reads states, runs the kernels, writes states, one piece after the other
    norm      reads the gradients, and ends the step

An update starts when its gradient is there (speculative), or when the norm is known (exact). With
"plain" the next forward waits for all updates. A unit without a place is updated when it gets one.
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
"""States and activations are read this many uses of units ahead."""
MOST_PIECES = 4
"""The most pieces of the update of a unit."""
READING, WRITING = 2, 4
"""The pieces of an update whose states are read ahead, and the pieces whose writes are in
flight."""


@dataclass(frozen=True)
class Speeds:
    """The speeds of one rank: bytes per second of the drives, the link, copies in host memory,
    kernels over host and device memory, and the network; parameters per second that the CPU
    updates. `handling` is seconds of Python for each parameter that is updated in chunks."""

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
    """One unit of this rank: the places of its blocks, its costs, and the seconds of its
    compute."""

    name: str
    blocks: Mapping[Kind, Placed]
    cost: UnitCost
    shards: int
    """The number of ranks that share it."""
    forward: float
    """Seconds of one use in a forward."""
    backward: float
    saved: float = 0.0
    """Bytes that a forward saves and that leave the compute device."""
    spilled: float = 0.0
    """The part of the saved bytes that goes to the drives."""

    @property
    def param(self) -> Placed:
        """The parameters."""
        return self.blocks[Kind.PARAM]

    @property
    def on_device(self) -> bool:
        """Whether the whole unit lives on the compute device."""
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
    """One cycle: the unit of each use, the units in use beside it, and the number of uses in the
    forward."""

    order: tuple[int, ...]
    held: tuple[frozenset[int], ...]
    forward: int


class _Timeline:
    """The tasks of one rank, in the order in which they are added."""

    def __init__(self, speeds: Speeds) -> None:
        self.speeds = speeds
        self.tasks: list[Task] = []
        self.moved = {READ: 0.0, WRITE: 0.0}
        """NVMe bytes of all steps so far."""
        self._computed: list[Task] = []  # the model's last tasks, the newest last

    def add(
        self,
        lane: str,
        name: str,
        seconds: float,
        needs: Sequence[Task],
        urgency: float = 0.0,
    ) -> Task:
        """Add a task that begins when its `needs` have ended."""
        task = Task(lane, name, seconds, tuple(needs), urgency)
        self.tasks.append(task)
        return task

    def io(self, lane: str, name: str, nbytes: float, *needs: Task, urgency: float = 0.0) -> Task:
        """Add a read or a write of the drives."""
        self.moved[lane] += nbytes
        rate = self.speeds.read if lane == READ else self.speeds.write
        return self.add(lane, name, nbytes / rate, needs, urgency)

    def compute(self, name: str, seconds: float, needs: Sequence[Task]) -> Task:
        """Add a task of the model."""
        self._computed.append(self.add(COMPUTE, name, seconds, needs))
        return self._computed[-1]

    def end(self, task: Task) -> None:
        """`task` ends a step. The model continues after it."""
        self._computed = [*self._computed[-AHEAD:], task]

    def before(self, uses: int) -> list[Task]:
        """The task of the model so many tasks ago, if there is one."""
        return self._computed[-uses:][:1]


class _CopyTasks:
    """Copies of parameters on the compute device."""

    def __init__(self, timeline: _Timeline, units: Sequence[UnitWork]) -> None:
        self._timeline, self._units = timeline, units
        self.arrived: dict[int, Task] = {}
        """By unit: the task that makes its copy ready."""
        self.written: dict[int, Task] = {}
        """By unit: the last write of its update."""

    def fetch(self, number: int) -> Task:
        """Bring the parameters of a unit from their home to the compute device."""
        unit, timeline = self._units[number], self._timeline
        needs = timeline.before(1)
        if number in self.written:
            needs.append(self.written[number])
        moved = unit.moved(Kind.PARAM)
        if moved:
            needs = [timeline.io(READ, unit.name, moved, *needs)]
        copied = unit.param.spec.nbytes - moved * timeline.speeds.unified
        last = timeline.add(UP, unit.name, copied / timeline.speeds.up, needs)
        return self.gather(number, last)

    def gather(self, number: int, last: Task) -> Task:
        """Every rank gets the parts of the other ranks."""
        unit, timeline = self._units[number], self._timeline
        if unit.shards == 1:
            return last
        sent = unit.param.spec.nbytes * (unit.shards - 1) / timeline.speeds.network
        return timeline.add(COLLECTIVE, f"gather {unit.name}", sent, [last])


class _ModelTasks:
    """The uses of units by the model, and the activations that they save."""

    def __init__(
        self, timeline: _Timeline, units: Sequence[UnitWork], uses: Uses, copies: _CopyTasks
    ) -> None:
        self._timeline, self._units = timeline, units
        self._uses, self._copies = uses, copies
        self._position = 0  # number of uses in this step
        self._last = {unit: place for place, unit in enumerate(uses.order)}
        self._only_forward = [unit for unit, place in self._last.items() if place < uses.forward]
        self.gate: list[Task] = []
        """Tasks that the next use also waits for."""

    def begin_step(self) -> None:
        """The next use is the first one of a step."""
        self._position = 0

    def use(self, number: int) -> tuple[int, list[int]]:
        """One use of a unit. Returns the number of the cycle, and the units whose gradients are
        complete after this use."""
        order, forward = self._uses.order, self._uses.forward
        unit, place = self._units[number], self._position % len(order)
        cycle = self._position // len(order)
        backward = place >= forward
        seconds = unit.backward if backward else unit.forward
        # A unit that is used twice, such as a tied embedding, computes next to the loss.
        others = order[forward:place] if backward else order[place + 1 : forward]
        seconds *= number not in others
        needs = [*self._timeline.before(1), *self.gate]
        if number in self._copies.arrived:
            needs.append(self._copies.arrived[number])
        if backward and unit.saved:
            needs.append(self._return(unit))
        self.gate = []
        self._timeline.compute(unit.name, seconds, needs)
        if not backward and unit.saved:
            self._offload(unit)
        self._position += 1
        done = [number] if backward and place == self._last[number] else []
        if place == len(order) - 1:
            done += self._only_forward
        return cycle, [each for each in done if self._units[each].cost.trainable]

    def _offload(self, unit: UnitWork) -> None:
        """The saved activations of a forward leave the device."""
        timeline, name = self._timeline, f"activations of {unit.name}"
        last = timeline.add(DOWN, name, unit.saved / timeline.speeds.down, timeline.before(1))
        if unit.spilled:
            timeline.io(WRITE, name, unit.spilled, last)

    def _return(self, unit: UnitWork) -> Task:
        timeline, name = self._timeline, f"activations of {unit.name}"
        needs = timeline.before(AHEAD)
        if unit.spilled:
            needs = [timeline.io(READ, name, unit.spilled, *needs)]
        return timeline.add(UP, name, unit.saved / timeline.speeds.up, needs)


class _GradientTasks:
    """The gradients of a step of `accumulation` cycles, on their way home."""

    def __init__(self, timeline: _Timeline, units: Sequence[UnitWork], accumulation: int) -> None:
        self._timeline, self._units, self._accumulation = timeline, units, accumulation
        self.ready: dict[int, Task] = {}
        """By unit: the task after which its gradient is at home."""

    def came(self, number: int, cycle: int) -> bool:
        """A backward has brought the gradient of a unit. Returns whether it is the last one."""
        unit, timeline = self._units[number], self._timeline
        speeds, grad = timeline.speeds, unit.blocks[Kind.GRAD].spec
        name = f"gradient of {unit.name}"
        (last,) = timeline.before(1)
        if not grad.whole:
            last = self._reduce(number, [last])
        if speeds.unified:  # the model's thread adds it up
            last = timeline.compute(name, grad.home_bytes / speeds.copy, [last])
        elif not grad.tier.is_device:
            last = timeline.add(DOWN, name, grad.home_bytes / speeds.down, [last])
        moved = unit.moved(Kind.GRAD)
        if moved:
            before = [timeline.io(READ, name, moved, last)] if cycle else [last]
            last = timeline.io(WRITE, name, moved, *before)
        self.ready[number] = last
        return cycle == self._accumulation - 1

    def _reduce(self, number: int, needs: list[Task]) -> Task:
        """Every rank gets its part of the sum over the ranks."""
        unit, timeline = self._units[number], self._timeline
        if unit.shards == 1:
            return needs[0]
        nbytes = unit.blocks[Kind.GRAD].spec.nbytes
        sent = nbytes * (unit.shards - 1) / timeline.speeds.network
        return timeline.add(COLLECTIVE, f"gradient of {unit.name}", sent, needs)

    def _settle(self, number: int, last: Task) -> Task:
        """Reduce a gradient that was collected whole, after the backward. A gradient in host memory
        passes the device, and returns."""
        timeline, grad = self._timeline, self._units[number].blocks[Kind.GRAD].spec
        speeds, name = timeline.speeds, f"gradient of {self._units[number].name}"
        if not grad.whole:
            return last
        needs, passes = [last, *timeline.before(1)], grad.tier.is_host and not speeds.unified
        if passes:
            needs = [timeline.add(UP, name, grad.span / speeds.up, needs)]
        last = self._reduce(number, needs)
        return timeline.add(DOWN, name, grad.nbytes / speeds.down, [last]) if passes else last

    def norm(self, posted: Sequence[Task]) -> Task:
        """The norm of all gradients, after the updates `posted`. It ends the step."""
        timeline, units = self._timeline, self._units
        speeds = timeline.speeds
        self.ready = {each: self._settle(each, last) for each, last in self.ready.items()}
        seconds, needs = 0.0, [*timeline.before(1), *self.ready.values(), *posted]
        for number, ready in self.ready.items():
            grad = units[number].blocks[Kind.GRAD]
            on_device = grad.spec.tier.is_device
            seconds += grad.spec.nbytes / (speeds.device if on_device else speeds.memory)
            if grad.moved_bytes:
                name = f"norm of {units[number].name}"
                needs.append(timeline.io(READ, name, grad.moved_bytes, ready))
        end = timeline.add(COMPUTE if speeds.unified else ADAM, "norm", seconds, needs)
        timeline.end(end)
        return end


class _UpdateTasks:
    """The pipeline of updates, in pieces. `first` has the place of the first use of each unit;
    `places` is whether an update puts the new parameter into its copy."""

    def __init__(
        self, timeline: _Timeline, copies: _CopyTasks, first: Mapping[int, int], places: bool
    ) -> None:
        self._timeline, self._copies = timeline, copies
        self.first, self._places = first, places
        self._pieces: list[Task] = []  # in the order of the pipeline
        self._writes: list[Task] = []

    def add(
        self,
        number: int,
        unit: UnitWork,
        ready: Task,
        may_read: Sequence[Task],
        reads_old: bool = False,
    ) -> Task:
        """Read, update and write a unit after `ready`, its gradient. Returns the last update."""
        timeline, name = self._timeline, f"update {unit.name}"
        speeds, copies = timeline.speeds, self._copies
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
        urgency = 1.0 + self.first[number]
        last = ready
        for _ in range(pieces):
            needs = [ready, *self._pieces[-1:]]
            if len(self._writes) >= WRITING:
                needs.append(self._writes[-WRITING])
            if read:
                ahead = self._pieces[-READING:][:1]
                needs.append(
                    timeline.io(READ, name, read / pieces, *may_read, *ahead, urgency=urgency)
                )
            last = timeline.add(ADAM, name, seconds / pieces, needs, urgency)
            self._pieces.append(last)
            if written:
                self._writes.append(timeline.io(WRITE, name, written / pieces, last))
        if self._places:
            copies.arrived[number] = copies.gather(
                number, timeline.add(UP, name, placed, [last], urgency)
            )
        if written:
            copies.written[number] = self._writes[-1]
        return last


class Steps:
    """The tasks of training steps of one rank. Each call of `step` adds to `tasks` and `ends`."""

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
        self._units, self._mode = units, mode
        self._timeline = _Timeline(speeds)
        self._copies = _CopyTasks(self._timeline, units)
        self._model = _ModelTasks(self._timeline, units, uses, self._copies)
        self._gradients = _GradientTasks(self._timeline, units, accumulation)
        first = {unit: place for place, unit in reversed(list(enumerate(uses.order)))}
        self._updates = _UpdateTasks(self._timeline, self._copies, first, places=not delayed)
        self.ends: list[Task] = []
        """The last task of each step: a step lasts from one to the next."""
        self._pending: dict[
            int, Task
        ] = {}  # units that wait for a place, and the task before their update
        self._begun: dict[int, Task] = {}  # updates before the end of their step
        self._posted: list[Task] = []  # updates of the step before

    @property
    def tasks(self) -> Sequence[Task]:
        """The tasks of all steps so far."""
        return self._timeline.tasks

    @property
    def moved(self) -> Mapping[str, float]:
        """NVMe bytes of all steps so far, by lane."""
        return self._timeline.moved

    def step(self) -> None:
        """One more optimizer step."""
        self._model.begin_step()
        self._walk.cycles(self._hear)
        self._end_step()
        self._walk.update(self._hear_update)
        if self._mode == "plain":
            self._model.gate = list(self._posted)

    def _hear(self, event: Event, unit: int, evicted: tuple[int, ...]) -> None:
        if event is Event.USE:
            cycle, done = self._model.use(unit)
            for each in done:
                self._gradient(each, cycle)
        elif event is Event.LAND and unit in self._pending:
            self._land(unit)
        else:  # a speculative update without a place is read again, too
            self._copies.arrived[unit] = self._copies.fetch(unit)

    def _hear_update(self, event: Event, unit: int, evicted: tuple[int, ...]) -> None:
        if event is Event.READ:
            self._land(unit)
        elif self._mode == "delayed":  # the forward uses the old copy
            self._copies.fetch(unit)
        else:
            self._hear(event, unit, evicted)

    def _gradient(self, number: int, cycle: int) -> None:
        """A backward has brought the gradient of a unit."""
        unit, is_last = self._units[number], self._gradients.came(number, cycle)
        if is_last and self._mode == "speculative" and unit.has_shadow and not unit.on_device:
            ready, may_read = self._gradients.ready[number], self._timeline.before(AHEAD)
            self._begun[number] = self._updates.add(number, unit, ready, may_read)

    def _end_step(self) -> None:
        """The norm, and the updates that waited for it, in the order of the next forward."""
        timeline = self._timeline
        end = self._gradients.norm(self._posted)
        self.ends.append(end)
        self._posted = list(self._begun.values())
        waiting = self._gradients.ready.keys() - self._begun
        for number in sorted(waiting, key=self._updates.first.__getitem__):
            unit = self._units[number]
            if unit.on_device and not timeline.speeds.unified:
                work = unit.state_bytes / timeline.speeds.device
                done = timeline.add(COMPUTE, f"update {unit.name}", work, [end])
                self._copies.arrived[number] = self._copies.gather(number, done)
                self._posted.append(done)
            elif self._mode != "delayed" and self._walk.has_copy(number):
                self._posted.append(self._updates.add(number, unit, end, [end]))
            else:
                self._pending[number] = end
        self._gradients.ready, self._begun = {}, {}

    def _land(self, number: int) -> None:
        """Update a unit without a copy: its old parameter is read."""
        end, unit = self._pending.pop(number), self._units[number]
        needs = [end] if self._mode == "delayed" else [end, *self._timeline.before(1)]
        self._posted.append(self._updates.add(number, unit, end, needs, reads_old=True))
