"""The seconds of a step: the tasks of `infinity.plan.steps`, simulated until they repeat."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from infinity.bench.step import flops
from infinity.config import Config
from infinity.measure.rates import DTYPES, formats_of
from infinity.observe import Span
from infinity.placement.calibrate import Rates
from infinity.placement.spec import units_of
from infinity.plan.hardware import Hardware
from infinity.plan.lanes import Sharing, simulate, spans
from infinity.plan.memory import MemoryPlan, Training
from infinity.plan.model import PlannedModel, PlannedUnit
from infinity.plan.steps import (
    ADAM,
    COMPUTE,
    DOWN,
    READ,
    UP,
    WRITE,
    Mode,
    Speeds,
    Steps,
    UnitWork,
    Uses,
)
from infinity.schedule.planner import SLOT_BYTES, Traffic, cost_of, predict

SIMULATED_STEPS = 5
"""The last two count, because steps may alternate if updates wait for a place."""
MOST_CYCLES = 3
"""Of more micro-batches in a step, only so many are simulated. Each further one takes as long as
the last simulated one."""
CHUNK_SECONDS = 0.8e-3
"""Seconds of Python for each chunk of an update that is read and written, as measured on a CPU of
2.6 GHz: 0.09 s in a step of 109 chunks."""
NORMS = 1
"""The number of gradient norms in a step."""
DAY = 86_400


@dataclass(frozen=True)
class Pace:
    """A step of one rank in the steady state. Times are in seconds."""

    seconds: float
    busy: dict[str, float]
    """Seconds of each lane in one step."""
    mode: Mode
    tokens: int
    """Tokens of all ranks in one step."""
    traffic: Traffic
    """NVMe bytes of one rank, from the planner."""
    spilled: float
    """NVMe bytes of activations that it writes and then reads."""
    hiding_tokens: float | None
    """Tokens of a rank and step, as one batch, whose compute takes as long as the drives. None
    without NVMe traffic."""
    written: float
    """NVMe bytes that a step writes on average, including activations."""
    written_per_day: float
    """Bytes that the drives of a node write in a day of steps."""
    spans: tuple[Span, ...]
    """The tasks of one step."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks per second."""
        return self.tokens / self.seconds

    @property
    def bottleneck(self) -> str:
        """The busiest lane."""
        return max(self.busy, key=lambda lane: self.busy[lane])


def rates_of(model: PlannedModel, config: Config, hardware: Hardware) -> Rates:
    """The rates of one rank, as `wrap` would measure them."""
    each = _speeds(model, config, hardware)
    nvme = statistics.harmonic_mean([each.read, each.write]) if hardware.drives else 0.0
    return Rates(each.up, each.down, nvme, each.updates)


def _speeds(model: PlannedModel, config: Config, hardware: Hardware) -> Speeds:
    """The speeds of one rank while the other ranks of its node work, too."""
    trained = [unit for unit in model.units if unit.trainable] or list(model.units)
    longest = max(trained, key=lambda unit: unit.numel)
    named = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    form = formats_of(config, named.get(longest.format.name, DTYPES["bf16"]))
    memory = hardware.memory_bandwidth / hardware.gpus
    read = sum(drive.read for drive in hardware.drives) / hardware.gpus
    write = sum(drive.write for drive in hardware.drives) / hardware.gpus
    return Speeds(
        read=max(read, 1.0),
        write=max(write, 1.0),
        up=hardware.link,
        down=hardware.link,
        copy=hardware.link,
        memory=memory,
        device=hardware.gpu_bandwidth,
        network=hardware.network,
        updates=memory / form.bytes_per_parameter,
        sharing=_sharing(hardware),
        unified=hardware.unified,
    )


def _chunked(speeds: Speeds, memory: MemoryPlan) -> Speeds:
    return replace(speeds, handling=CHUNK_SECONDS / memory.layout.rooms.host.chunk_elements)


def _sharing(hardware: Hardware) -> Sharing:
    """How lanes of one device slow each other down."""
    found: dict[frozenset[str], float] = {}
    if hardware.drives:
        read = sum(drive.read for drive in hardware.drives)
        write = sum(drive.write for drive in hardware.drives)
        both = sum(
            drive.both or statistics.harmonic_mean([drive.read, drive.write])
            for drive in hardware.drives
        )
        found[frozenset((READ, WRITE))] = min(1.0, both * (1 / read + 1 / write) / 4)
    if hardware.unified:
        for lane in (ADAM, UP, DOWN):  # work of the same CPUs
            found[frozenset((COMPUTE, lane))] = 0.5
        found[frozenset((COMPUTE, READ))] = found[frozenset((COMPUTE, WRITE))] = hardware.together
    return found


def _works(
    model: PlannedModel, training: Training, memory: MemoryPlan, hardware: Hardware
) -> list[UnitWork]:
    blocks = units_of(memory.layout.placement.specs)
    placed = {block.spec: block for block in memory.layout.blocks}
    counts = _operations(model, training)
    head = hardware.head_flops or hardware.flops
    saved, spilled = memory.offloaded
    in_blocks = sum(unit.numel for unit in model.units if unit.in_blocks)
    works = []
    for index, unit in enumerate(model.units):
        own = {kind: placed[spec] for kind, spec in blocks[index].items()}
        rate = hardware.flops if unit.in_blocks else head
        forward, backward = (each / rate for each in counts[index])
        share = unit.numel / in_blocks if unit.in_blocks else 0.0
        shards = hardware.ranks if memory.layout.placement.config.stage > 0 else 1
        trains = unit.trainable
        cost = cost_of(own, training.accumulate, NORMS, trains)
        works.append(
            UnitWork(
                unit.name, own, cost, shards, forward, backward, saved * share, spilled * share
            )
        )
    return works


def _operations(model: PlannedModel, training: Training) -> list[tuple[float, float]]:
    """Operations of a forward and of a backward of each unit, for one micro-batch.

    A backward counts as two forwards, and one more in recomputed blocks. A frozen unit has only the
    gradient of its input.
    """
    total = flops.count(model.shape, training.windows, training.length, recomputes=False).model
    products = 6 * model.shape.multiplied * training.windows
    attention = (total - products) / 3
    in_blocks = sum(unit.multiplied for unit in model.units if unit.in_blocks)

    def forward(unit: PlannedUnit) -> float:
        share = unit.multiplied / in_blocks if unit.in_blocks else 0.0
        return 2 * unit.multiplied * training.windows + attention * share

    again = training.recomputes
    return [
        (forward(unit), forward(unit) * (1 + unit.trainable + (again and unit.in_blocks)))
        for unit in model.units
    ]


def compute_seconds(model: PlannedModel, training: Training, hardware: Hardware) -> float:
    """Seconds of compute of one rank in one step, without the engine."""
    rates = [
        hardware.flops if unit.in_blocks else hardware.head_flops or hardware.flops
        for unit in model.units
    ]
    each = zip(_operations(model, training), rates, strict=True)
    return training.accumulate * sum(sum(pair) / rate for pair, rate in each)


def pace(model: PlannedModel, training: Training, memory: MemoryPlan, hardware: Hardware) -> Pace:
    """The step of `model` as `memory` places it."""
    config = memory.layout.placement.config
    speeds = _chunked(_speeds(model, config, hardware), memory)
    works = _works(model, training, memory, hardware)
    uses, slots = _uses(model), memory.layout.copy_bytes // SLOT_BYTES
    mode = _mode(works, uses, slots, training, config, speeds)
    steps = _simulated(works, uses, slots, training.accumulate, mode, speeds)
    tasks, ends = steps[-1].tasks, steps[-1].ends
    traffic = _traffic(works, uses, slots, training.accumulate, config)
    spilled = memory.offloaded[1] * training.accumulate
    steps_per_commit = max(config.steps_per_commit, 1)
    written = traffic.mean_written(steps_per_commit) + spilled
    seconds = _extrapolated([_length(each) for each in steps], training.accumulate)
    one = replace(training, accumulate=1)
    own = compute_seconds(model, one, hardware) / one.tokens
    moved = _traffic(works, uses, slots, 1, config)
    drive = moved.read / speeds.read + moved.mean_written(steps_per_commit) / speeds.write
    return Pace(
        seconds=seconds,
        busy=_stretched(steps, training.accumulate),
        mode=mode,
        tokens=training.tokens * hardware.ranks,
        traffic=traffic,
        spilled=spilled,
        hiding_tokens=drive / own if drive else None,
        written=written,
        written_per_day=written * hardware.gpus * DAY / seconds,
        spans=tuple(spans(tasks, ends[-2].end, ends[-1].end)),
    )


def steps_of(
    model: PlannedModel, training: Training, memory: MemoryPlan, hardware: Hardware, mode: Mode
) -> Steps:
    """Steps of `model` that have not begun, with updates in this `mode`."""
    config = memory.layout.placement.config
    works = _works(model, training, memory, hardware)
    slots = memory.layout.copy_bytes // SLOT_BYTES
    speeds = _chunked(_speeds(model, config, hardware), memory)
    return Steps(works, _uses(model), slots, training.accumulate, mode, speeds)


def _uses(model: PlannedModel) -> Uses:
    cycle = [*model.forward, *model.backward]
    order, held = tuple(use.unit for use in cycle), tuple(use.held for use in cycle)
    return Uses(order, held, len(model.forward))


def _mode(
    works: Sequence[UnitWork],
    uses: Uses,
    slots: int,
    training: Training,
    config: Config,
    speeds: Speeds,
) -> Mode:
    """When updates run, by `Tuning.update` and the engine's policy."""
    wanted = config.tuning.update
    if wanted != "auto":
        return wanted
    on_nvme = any(work.written(*work.blocks) for work in works)
    if speeds.unified and not on_nvme:
        return "plain"
    if not any(work.has_shadow for work in works):
        return "exact"
    (steps,) = _simulated(works, uses, slots, 1, "exact", speeds)
    tasks, ends = steps.tasks, steps.ends
    begin, end = ends[-3].end, ends[-2].end
    updates = [t for t in tasks if t.name.startswith("update ") and t.lane in (ADAM, READ, WRITE)]
    last = max((t.end for t in updates if t.start < end), default=begin)
    forward = sum(work.forward for work in works)
    return "speculative" if last - begin > forward else "exact"


def _counts(cycles: int) -> list[int]:
    """The numbers of micro-batches that are simulated for a step of `cycles`."""
    return [cycles] if cycles <= MOST_CYCLES else [MOST_CYCLES - 1, MOST_CYCLES]


def _extrapolated(found: Sequence[float], cycles: int) -> float:
    """The figure of a step of `cycles` micro-batches, from the figures of `_counts`. Each further
    one adds as much as the last one."""
    return found[-1] + (found[-1] - found[0]) * (cycles - _counts(cycles)[-1])


def _simulated(
    works: Sequence[UnitWork], uses: Uses, slots: int, cycles: int, mode: Mode, speeds: Speeds
) -> list[Steps]:
    """Some steps for each of `_counts`, with the times of their tasks."""
    found = []
    for count in _counts(cycles):
        steps = Steps(works, uses, slots, count, mode, speeds)
        for _ in range(SIMULATED_STEPS):
            steps.step()
        simulate(steps.tasks, speeds.sharing)
        found.append(steps)
    return found


def _length(steps: Steps) -> float:
    """Seconds of a step, on average over the last two."""
    return (steps.ends[-1].end - steps.ends[-3].end) / 2


def _stretched(found: Sequence[Steps], cycles: int) -> dict[str, float]:
    """Seconds of work of each lane in a step of `cycles` micro-batches."""
    busy = [_busy(steps) for steps in found]
    return {
        lane: _extrapolated([each.get(lane, 0.0) for each in busy], cycles) for lane in busy[-1]
    }


def _busy(steps: Steps) -> dict[str, float]:
    """Seconds of each lane per step, in the last two steps. Each task counts as if it ran alone."""
    begin, end = steps.ends[-3].end, steps.ends[-1].end
    busy: dict[str, float] = {}
    for task in steps.tasks:
        inside = min(task.end, end) - max(task.start, begin)
        if inside > 0:
            part = inside / (task.end - task.start)
            busy[task.lane] = busy.get(task.lane, 0.0) + task.seconds * part / 2
    return busy


def _traffic(
    works: Sequence[UnitWork], uses: Uses, slots: int, cycles: int, config: Config
) -> Traffic:
    """The traffic as the engine's report counts it. For many micro-batches, see `_simulated`."""
    update = config.tuning.update
    found = []
    for count in _counts(cycles):
        costs = [cost_of(work.blocks, count, NORMS, work.cost.trainable) for work in works]
        waits, delayed = update == "plain", update == "delayed"
        found.append(predict(uses.order, costs, slots, count, uses.held, waits, delayed))
    parts = zip(*map(astuple, found), strict=True)
    return Traffic(*(round(_extrapolated(part, cycles)) for part in parts))
