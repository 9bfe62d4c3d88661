"""The report of a run: counts from step to step, with the traffic that the planner expects."""

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
from infinity.schedule.planner import STATES, Traffic, cost_of, predict
from infinity.schedule.runtime import Runtime
from infinity.sharding.exchange import Exchange
from infinity.sharding.unit import Unit
from infinity.tiers.activations import ActivationTraffic
from infinity.tiers.store import Store


@dataclass(frozen=True)
class Report:
    """The report of a run, for people and for `--json`; times in seconds, sizes in bytes."""

    parameters: int
    steps: int
    read_per_parameter: float
    """NVMe bytes read per parameter in the last finished step, as counted."""
    written_per_parameter: float
    planned_read_per_parameter: float
    """The bytes that the planner expects for the same step."""
    planned_written_per_parameter: float
    seconds: dict[str, float]
    """Total per cause: "compute", "wait nvme", "wait adam" and "adam", which runs beside the
    others. With several ranks also "wait collective" (for other ranks, when this rank's shard was
    there) and "collective" (beside the others)."""
    updates_kept: int
    """The number of unit updates that began in backward and were kept."""
    updates_rolled_back: int
    """The number of unit updates that began in backward and were rolled back."""
    waits: dict[str, float]
    """Seconds that the main thread waited for NVMe, by unit name."""
    cached: int
    """Bytes of states on the tier nvme that are cached in host memory. They are never read."""
    on_nvme: int
    """Bytes of all states on the tier nvme, each counted once."""
    peaks: dict[str, int]
    """Highest bytes in use per tier: "gpu", "cpu", "nvme"."""
    budgets: dict[str, int]
    """Budget per tier, same keys."""
    written_through: int = 0
    """The cached bytes that each committed step writes to NVMe nevertheless."""
    skipped_steps: int = 0
    """Steps skipped because a gradient was not finite; not among `steps`."""
    copied_to_device: int = 0
    """Bytes copied from host memory to the compute device in the last finished step, as counted. If
    both are the same memory, bytes copied from homes there to the engine's places."""
    copied_from_device: int = 0
    gpu_resident: int = 0
    """Bytes of the states that `Tuning.gpu_cache` keeps on the compute device."""
    gpu_direct: bool = False
    """Whether drives write parameters on nvme straight into the memory of the GPU. These bytes are
    not among the copied bytes."""
    read_by_updates: int = 0
    """Bytes that the updates of the last finished step read from NVMe."""
    written_by_updates: int = 0
    read_again: int = 0
    """Bytes of parameters that the last finished step read from NVMe beyond the plan. A call waited
    for all updates of the step before (`drain`, `report`, a checkpoint). So they ran before their
    units had a place on the compute device, and the forward read their results. 0 if
    `Tuning.update` is "plain" or "delayed", whose plan includes it."""
    updated: int = 0
    """Bytes of masters and moments that a step renews."""
    updated_on_gpu: int = 0
    """Bytes of these that kernels of the compute device renew in its memory. The CPU renews the
    rest."""
    activations_offloaded: int = 0
    """Bytes that autograd saved in the last finished step and that left the compute device, counted
    once per storage."""
    activations_not_offloaded: int = 0
    """Bytes that autograd saved in the last finished step and that stayed on the compute device,
    because there was no room elsewhere."""
    activations_written: int = 0
    """Bytes of activations that were written to NVMe in the last finished step; not among
    `written_per_parameter`."""
    activations_read: int = 0
    """Bytes of activations that were read from NVMe in the last finished step."""
    activations_peak: int = 0
    """The most bytes of activations that were off the compute device at any time."""
    activations_partitioned: int = 0
    """Bytes that autograd saved in the last finished step and of which each tensor parallel rank
    keeps a part (`Tuning.partition_activations`), counted once per storage."""
    activations_parts: int = 0
    """Bytes of this rank's parts of them, padding included."""
    recomputed: tuple[str, ...] = ()
    """Names of the blocks that `Config.recompute` ran again after their last forward with
    gradients."""
    blocks: dict[str, TreatedBlock] = field(default_factory=dict)
    """With `recompute="auto"`: the treatment of the tensors that each block saves, and their
    bytes."""
    activation_room: int = 0
    """With `recompute="auto"`: the most bytes that blocks may keep on the compute device."""
    in_files: int = 0
    """Bytes of frozen parameters that stay in the user's files and are only read; they are among
    `on_nvme`, and take no space of the directories."""
    budget_sources: dict[str, str] = field(default_factory=dict)
    """The source of the budgets "gpu" and "cpu": "given", or the free memory and the part of it
    that stays free."""

    tiled: tuple[str, ...] = ()
    """Weights that `wrap` cut into tiles because units did not fit into `gpu_memory`. Gradients of
    the inputs of their linear layers are rounded differently."""

    @property
    def limits(self) -> dict[str, int]:
        """Budget per tier that has one. Without a limit on NVMe, `budgets` has the size of the
        files there."""
        limited = dict(self.budgets)
        if limited.get("nvme", 0) <= self.peaks.get("nvme", 0):
            limited.pop("nvme", None)
        return limited


class StepMeter:
    """Counts the bytes that the last finished step moved."""

    def __init__(
        self, store: Store, device: ComputeDevice, partitions: Partitions | None = None
    ) -> None:
        self._store, self._partitions = store, partitions
        self._device = device
        self._fetched_before = (0, 0)
        self._copied_before = self._copied()
        self.traffic = (0, 0)
        """Bytes read from NVMe, and written to it."""
        self.copied = (0, 0)
        """Bytes copied to the compute device, and from it."""
        self.updates = (0, 0)
        """The part of `traffic` that the updates read and wrote."""
        self.again = 0
        """Bytes that the forward read again because updates ran before their place."""
        self.for_commit = False
        """Whether the updates wrote cached bytes, because the step is committed."""

    def stepped(self, before: StepRun) -> None:
        """A step has been fixed. The updates of the step `before` ran since that step."""
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
        """The traffic that tensor parallel ranks divided among them."""
        return PartitionTraffic() if self._partitions is None else self._partitions.last_step

    def _copied(self) -> tuple[int, int]:
        """Bytes copied to the compute device and from it so far."""
        return self._device.copied.written, self._device.copied.read


@dataclass(frozen=True)
class Reporter:
    """Makes the report of one engine from the counts of its parts."""

    config: Config
    choice: Choice
    store: Store
    units: Sequence[Unit]
    runtime: Runtime
    updater: Updater
    exchange: Exchange | None
    meter: StepMeter
    """The bytes that the last step moved."""
    recorder: Recorder
    recomputation: Recomputation
    tiled: Sequence[str]
    """The weights that `wrap` cut into tiles."""

    def plan(self) -> Traffic:
        """The planned NVMe traffic of this rank for the recorded trace, in bytes: of one optimizer
        step, or of one forward for inference."""
        cycles = max(self.runtime.accumulation, 1)
        norms = self.updater.norm.asked
        costs = [
            cost_of(
                {k: b.placed for k, b in unit.blocks.items()}, cycles, norms, unit.gradients.trains
            )
            for unit in self.units
        ]
        cycle = self.runtime.trace.last_cycle("eval" if self.config.inference else "train")
        mode, slots = self.config.tuning.update, self.store.copy_slots
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
        """The report so far; waits for pending updates."""
        self.updater.rest()
        count = sum(p.numel() for unit in self.units for p in unit.parameters)
        planned = self.plan()
        planned_written = planned.update_written + planned.commit_written * self.meter.for_commit
        config, counters = self.config, self.recorder.counters()
        cached, on_nvme = self.store.cached()
        treatments = self.recomputation.treatments
        activations = self.store.activations
        moved = ActivationTraffic() if activations is None else activations.last_step
        traffic, copied = self.meter.traffic, self.meter.copied
        return Report(
            parameters=count,
            steps=self.updater.posted_steps,
            read_per_parameter=traffic[0] / count,
            written_per_parameter=traffic[1] / count,
            planned_read_per_parameter=planned.read / count,
            planned_written_per_parameter=planned_written / count,
            seconds=self._seconds(),
            updates_kept=counters.get("updates kept", 0),
            updates_rolled_back=counters.get("updates rolled back", 0),
            skipped_steps=self.updater.skipped_steps,
            copied_to_device=copied[0],
            copied_from_device=copied[1],
            gpu_direct=self.store.gpu_direct,
            read_by_updates=self.meter.updates[0],
            written_by_updates=self.meter.updates[1],
            read_again=self.meter.again * (config.tuning.update in ("exact", "speculative")),
            updated=sum(map(_renewed, self.units)),
            updated_on_gpu=sum(_renewed(unit) for unit in self.units if unit.states.gpu_resident),
            activations_offloaded=moved.offloaded,
            activations_not_offloaded=moved.not_offloaded,
            activations_written=moved.written,
            activations_read=moved.read,
            activations_peak=0 if activations is None else activations.peak,
            activations_partitioned=self.meter.divided.whole,
            activations_parts=self.meter.divided.parts,
            recomputed=self.recomputation.recomputed,
            blocks={} if treatments is None else treatments.by_block(),
            activation_room=0 if treatments is None else int(treatments.room.device),
            waits=self.recorder.seconds("wait nvme"),
            cached=cached,
            written_through=self.store.written_through(),
            on_nvme=on_nvme,
            in_files=self.store.in_files(),
            tiled=tuple(self.tiled),
            gpu_resident=self.store.layout.placement.gpu_cache_bytes,
            peaks=self.store.peaks(),
            budget_sources={"gpu": self.choice.gpu.source, "cpu": self.choice.cpu.source},
            budgets={
                **self.choice.budgets._asdict(),
                "nvme": config.tuning.nvme_memory or self.store.used()["nvme"],
            },
        )

    def _seconds(self) -> dict[str, float]:
        """See `Report.seconds`."""

        def total(lane: str) -> float:
            return sum(self.recorder.seconds(lane).values())

        for_nvme, for_adam = total("wait nvme"), total("wait adam")
        lanes = () if self.exchange is None else ("wait collective", "collective")
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
