"""What a run did: counted from step to step, stated by the planner, and put together for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from infinity.activations.partitions import Partitions, PartitionTraffic
from infinity.activations.recompute import Recomputation
from infinity.activations.treatments import TreatedBlock
from infinity.config import Config
from infinity.device import ComputeDevice
from infinity.free_memory import Choice
from infinity.observe import Recorder
from infinity.optim.step import StepRun
from infinity.optim.updater import Updater
from infinity.schedule.planner import SLOT_BYTES, STATES, Traffic, cost_of, predict
from infinity.schedule.runtime import Runtime
from infinity.sharding.exchange import Exchange
from infinity.sharding.unit import Unit
from infinity.tiers.activations import ActivationTraffic
from infinity.tiers.store import Store


@dataclass(frozen=True)
class Report:
    """What a run did, for people and for `--json`; times in seconds, sizes in bytes."""

    parameters: int
    steps: int
    read_per_parameter: float
    """NVMe bytes read per parameter in the last finished step, by our own count."""
    written_per_parameter: float
    planned_read_per_parameter: float
    """What the planner states for the same step."""
    planned_written_per_parameter: float
    seconds: dict[str, float]
    """Total per cause: "compute", "wait nvme", "wait adam", "adam" (the last runs beside the
    others); with several ranks also "wait collective" (for the other ranks, when this one's shard
    was there) and "collective" (beside the others)."""
    updates_kept: int
    """Unit updates that began in backward and were what their step asked for, since the start."""
    updates_rolled_back: int
    """Those that were not: they were done again, or not at all where the step was skipped."""
    waits: dict[str, float]
    """Seconds the main thread waited for NVMe, by unit name."""
    cached: int
    """Bytes of the states whose tier is nvme that are cached in host memory. They are never
    read."""
    on_nvme: int
    """Bytes of all those states, each counted once."""
    peaks: dict[str, int]
    """Highest bytes in use per tier: "gpu", "cpu", "nvme"."""
    budgets: dict[str, int]
    """Budget per tier, same keys."""
    written_through: int = 0
    """Those of the cached bytes that each step writes to NVMe all the same that `durability`
    commits."""
    skipped_steps: int = 0
    """Steps left out because a gradient was not finite; not among `steps`."""
    copied_to_device: int = 0
    """Bytes copied from host memory to the compute device in the last finished step, by our own
    count; where both are the same memory, what moved between a home there and the engine's place
    for the model."""
    copied_from_device: int = 0
    gpu_resident: int = 0
    """Bytes of the states that `Tuning.gpu_cache` keeps on the compute device, whatever tier the
    others are on."""
    gpu_direct: bool = False
    """Whether drives write parameters on nvme straight into the memory of the GPU; those bytes are
    not among the copied ones."""
    read_by_updates: int = 0
    """Bytes that the updates read from NVMe, of those of the last finished step."""
    written_by_updates: int = 0
    read_again: int = 0
    """Bytes of parameters that the last finished step read from NVMe beyond what the planner
    states. Something waited for all updates of the step before (`drain`, `report`, a checkpoint),
    so they ran before their units had a place on the compute device, and the forward read what they
    had written. 0 where `Tuning.update` is "plain" or "delayed", of which the planner knows that.
    """
    updated: int = 0
    """Bytes of masters and moments that a step renews."""
    updated_on_gpu: int = 0
    """Of those, what kernels of the compute device renew in its memory; the CPU renews the rest."""
    activations_offloaded: int = 0
    """Bytes that autograd saved in the last finished step and that left the compute device, each
    storage once."""
    activations_not_offloaded: int = 0
    """Bytes that autograd saved in the last finished step and that stayed on the compute device for
    want of room."""
    activations_written: int = 0
    """Bytes of them that went on to NVMe in the last finished step; not among
    `written_per_parameter`."""
    activations_read: int = 0
    """Bytes of them that were read back from NVMe in the last finished step."""
    activations_peak: int = 0
    """The most bytes of them that were off the compute device at any time."""
    activations_partitioned: int = 0
    """Bytes that autograd saved in the last finished step and of which each tensor parallel rank
    keeps a part (`Tuning.partition_activations`), each storage once."""
    activations_parts: int = 0
    """Bytes of this rank's parts of them, padding included."""
    recomputed: tuple[str, ...] = ()
    """Names of the blocks that `Config.recompute` runs again in the backward: those whose last
    forward with gradients was to be."""
    blocks: dict[str, TreatedBlock] = field(default_factory=dict)
    """With `recompute="auto"`: what becomes of what each block saves, and its bytes."""
    activation_room: int = 0
    """With `recompute="auto"`: the most bytes that blocks may keep on the compute device."""
    in_files: int = 0
    """Bytes of frozen parameters that stay in the user's files and are only read; they are among
    `on_nvme`, and take no space of the directories."""
    budget_sources: dict[str, str] = field(default_factory=dict)
    """Where the budgets "gpu" and "cpu" come from: "given", or what was free and what of it stays
    so."""

    tiled: tuple[str, ...] = ()
    """Weights that `wrap` cut into tiles without being asked, because units did not fit into
    `gpu_memory`. Gradients of the inputs of linear ones are rounded otherwise than whole."""

    @property
    def limits(self) -> dict[str, int]:
        """Budget per tier that has one; without a limit on NVMe, `budgets` has what the files take
        there."""
        limited = dict(self.budgets)
        if limited.get("nvme", 0) <= self.peaks.get("nvme", 0):
            limited.pop("nvme", None)
        return limited


class StepMeter:
    """What the last finished step moved, in bytes; begins when it is made."""

    def __init__(
        self, store: Store, device: ComputeDevice, partitions: Partitions | None = None
    ) -> None:
        self._store, self._partitions = store, partitions
        self._device = device
        self._fetched_before = (0, 0)
        self._copied_before = self._copied()
        self.traffic = (0, 0)
        """Read from NVMe, and written to it."""
        self.copied = (0, 0)
        """Copied to the compute device, and from it."""
        self.updates = (0, 0)
        """Of `traffic`, what the updates read and wrote."""
        self.again = 0
        """What updates that ran ahead of their place had the forward read again."""
        self.for_commit = False
        """Whether the updates wrote what is cached, because the step is committed."""

    def stepped(self, before: StepRun) -> None:
        """A step has been fixed; the updates of the one `before` ran between that step and this
        one."""
        meter = self._store.meter
        fetched, earlier = (meter.read, meter.written), self._fetched_before
        read, written = sum(m.read for m in before.meters), sum(m.written for m in before.meters)
        self.updates = read, written
        self.again = sum(job.read_again for job in before.jobs)
        self.for_commit = any(job.writes_through for job in before.jobs)
        self.traffic = fetched[0] - earlier[0] + read, fetched[1] - earlier[1] + written
        self._fetched_before = fetched
        copied, earlier = self._copied(), self._copied_before
        self.copied = copied[0] - earlier[0], copied[1] - earlier[1]
        self._copied_before = copied
        if self._partitions is not None:
            self._partitions.stepped()

    @property
    def divided(self) -> PartitionTraffic:
        """What tensor parallel ranks divided among them."""
        return PartitionTraffic() if self._partitions is None else self._partitions.last_step

    def _copied(self) -> tuple[int, int]:
        """So far."""
        return self._device.copied.written, self._device.copied.read


class Reporter:
    """Puts the report of one engine together, from what its parts have counted."""

    def __init__(
        self,
        config: Config,
        choice: Choice,
        store: Store,
        units: Sequence[Unit],
        runtime: Runtime,
        updater: Updater,
        exchange: Exchange | None,
        meter: StepMeter,
        recorder: Recorder,
        recomputation: Recomputation,
        tiled: Sequence[str] = (),
    ) -> None:
        """`tiled` are the weights that were cut without being asked."""
        self._tiled = tuple(tiled)
        self._config = config
        self._choice = choice
        self._store = store
        self._units = units
        self._runtime = runtime
        self._updater = updater
        self._exchange = exchange
        self.meter = meter
        """What the last step moved."""
        self._recorder = recorder
        self._recomputation = recomputation

    def plan(self) -> Traffic:
        """The NVMe traffic of this rank in one optimizer step, or in one forward for inference, in
        bytes, that the planner states for the recorded trace."""
        cycles = max(self._runtime.accumulation, 1)
        norms = self._updater.norm.asked
        costs = [
            cost_of(
                {k: b.placed for k, b in unit.blocks.items()}, cycles, norms, unit.gradients.trains
            )
            for unit in self._units
        ]
        cycle = self._runtime.trace.last_cycle("eval" if self._config.inference else "train")
        mode, slots = self._config.tuning.update, self._store.layout.copy_bytes // SLOT_BYTES
        waits, delayed = mode == "plain", mode == "delayed"
        return predict(cycle.order, costs, slots, cycles, cycle.held, waits=waits, delayed=delayed)

    def activity(self) -> dict[str, float]:
        """See `Engine.activity`."""
        read, written = self.meter.traffic
        to_device, from_device = self.meter.copied
        moved = {
            "nvme_read": read,
            "nvme_written": written,
            "copied_to_device": to_device,
            "copied_from_device": from_device,
        }
        waits = {lane: seconds for lane, seconds in self._seconds().items() if "wait" in lane}
        return moved | {lane.replace(" ", "_"): seconds for lane, seconds in waits.items()}

    def report(self) -> Report:
        """What the run did so far; waits for pending updates."""
        self._updater.rest()
        count = sum(p.numel() for unit in self._units for p in unit.parameters)
        planned = self.plan()
        planned_written = planned.update_written + planned.commit_written * self.meter.for_commit
        config, counters = self._config, self._recorder.counters()
        cached, on_nvme = self._store.cached()
        treatments = self._recomputation.treatments
        activations = self._store.activations
        moved = ActivationTraffic() if activations is None else activations.counts.last_step
        traffic, copied = self.meter.traffic, self.meter.copied
        return Report(
            parameters=count,
            steps=self._updater.posted_steps,
            read_per_parameter=traffic[0] / count,
            written_per_parameter=traffic[1] / count,
            planned_read_per_parameter=planned.read / count,
            planned_written_per_parameter=planned_written / count,
            seconds=self._seconds(),
            updates_kept=counters.get("updates kept", 0),
            updates_rolled_back=counters.get("updates rolled back", 0),
            skipped_steps=self._updater.skipped_steps,
            copied_to_device=copied[0],
            copied_from_device=copied[1],
            gpu_direct=bool(self._store.nvme.direct),
            read_by_updates=self.meter.updates[0],
            written_by_updates=self.meter.updates[1],
            read_again=self.meter.again * (config.tuning.update in ("exact", "speculative")),
            updated=sum(map(_renewed, self._units)),
            updated_on_gpu=sum(_renewed(unit) for unit in self._units if unit.states.gpu_resident),
            activations_offloaded=moved.offloaded,
            activations_not_offloaded=moved.not_offloaded,
            activations_written=moved.written,
            activations_read=moved.read,
            activations_peak=0 if activations is None else activations.counts.peak,
            activations_partitioned=self.meter.divided.whole,
            activations_parts=self.meter.divided.parts,
            recomputed=self._recomputation.recomputed,
            blocks={} if treatments is None else treatments.by_block(),
            activation_room=0 if treatments is None else int(treatments.room.device),
            waits=self._recorder.seconds("wait nvme"),
            cached=cached,
            written_through=self._store.written_through(),
            on_nvme=on_nvme,
            in_files=self._store.in_files(),
            tiled=self._tiled,
            gpu_resident=self._store.layout.placement.gpu_cache_bytes,
            peaks=self._store.peaks(),
            budget_sources={"gpu": self._choice.gpu.source, "cpu": self._choice.cpu.source},
            budgets={
                **self._choice.budgets._asdict(),
                "nvme": config.tuning.nvme_memory or self._store.used()["nvme"],
            },
        )

    def _seconds(self) -> dict[str, float]:
        """See `Report.seconds`."""

        def total(lane: str) -> float:
            return sum(self._recorder.seconds(lane).values())

        for_nvme, for_adam = total("wait nvme"), total("wait adam")
        lanes = () if self._exchange is None else ("wait collective", "collective")
        for_ranks = {lane: total(lane) for lane in lanes}
        compute = total("model") - for_nvme - for_adam - for_ranks.get("wait collective", 0.0)
        own = {
            "compute": compute,
            "wait nvme": for_nvme,
            "wait adam": for_adam,
            "adam": total("adam"),
        }
        return own | for_ranks


def _renewed(unit: Unit) -> int:
    """Bytes of masters and moments that a step renews."""
    return (
        sum(unit.blocks[kind].nbytes for kind in STATES if kind in unit.blocks)
        if unit.gradients.trains
        else 0
    )
