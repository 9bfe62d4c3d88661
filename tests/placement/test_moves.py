"""How many units stay on the compute device, by what this machine gives: what a step moves, and
what is chosen from that."""

from __future__ import annotations

import itertools
import logging
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import infinity
from infinity import native
from infinity.free_memory import Budgets
from infinity.measure import rates
from infinity.placement.calibrate import Rates
from infinity.placement.decide import Machine, Placement
from infinity.placement.spec import BF16, FP32, SPLIT, BlockSpec, Format, Kind
from infinity.placement.stay import needs_rates, with_gpu_cache
from infinity.placement.traffic import Moves, moves
from infinity.tier import CPU
from support.configs import config_of
from support.discrete import DiscreteDevice
from support.machine import PAGE
from support.models import text_batch, transformer
from support.probe import Probe

pytestmark = pytest.mark.usefixtures("one_thread")

STATES: dict[Kind, Format] = {
    Kind.PARAM: BF16,
    Kind.GRAD: BF16,
    Kind.MASTER: SPLIT,
    Kind.EXP_AVG: FP32,
    Kind.EXP_AVG_SQ: FP32,
}
TIERS: dict[str, dict[str, Any]] = {
    "nvme": {},
    "gradients on nvme": {"gradients": "nvme"},
    "cpu": {"parameters": "cpu", "optimizer": "cpu"},
    "parameters on the device": {"parameters": "gpu", "optimizer": "cpu"},
    "optimizer on the device": {"parameters": "cpu", "optimizer": "gpu"},
}
FAST = 1e15


def placed(
    sizes: list[int], memory: int, tier: Any, master: Format = SPLIT, **options: Any
) -> Placement:
    """A model of units of `sizes` thousand parameters in bf16, with `memory` bytes on a device that
    has kernels."""
    values = {"parameters": tier, "optimizer": tier, "cpu_memory": 1 << 40, "cache": 0} | options
    config = config_of(nvme="/", gpu_memory=memory, **values)
    specs: list[BlockSpec] = []
    for unit, size in enumerate(sizes):
        for kind, form in (STATES | {Kind.MASTER: master}).items():
            home = CPU if kind is Kind.GRAD else infinity.tier.TIERS[tier]
            elements, name = size * PAGE, f"{kind.value} of {unit}"
            specs.append(
                BlockSpec(unit, kind, elements, form, home, form.bytes_of(elements), 0, name)
            )
    machine = Machine(unified_memory=False, has_kernels=True)
    return Placement(config, Budgets(memory, values["cpu_memory"]), machine, tuple(specs))


def gpu_resident(placement: Placement) -> list[int]:
    return sorted({spec.unit for spec in placement.specs if spec.tier.is_device})


def room_for_two(sizes: list[int]) -> int:
    """Bytes of two of the largest parameters, as a model needs them at once."""
    return 2 * max(sizes) * PAGE * 2


SIZES = [2] * 40  # thousands of parameters; all states of a unit take 14 x 8192 bytes
WHOLE = 14 * 2 * PAGE


MEMORY = 5 * WHOLE + 2 * room_for_two(SIZES)
"""For five units that stay, and what the others need to come ahead of use: room for four."""


def chosen(rates: Rates, memory: int = MEMORY, **options: Any) -> list[int]:
    before = placed(SIZES, memory, **options)
    placement = with_gpu_cache(before, room_for_two(SIZES), 0, rates)
    assert placement.gpu_cache_bytes == sum(
        spec.nbytes for spec in placement.specs if spec.tier.is_device
    )
    assert gpu_resident(before) == [], "nothing is changed"
    return gpu_resident(placement)


def slow(*what: str) -> Rates:
    return Rates(**{name: 1.0 if name in what else FAST for name in Rates._fields})


def test_what_is_slow_says_what_stays() -> None:
    assert chosen(slow("updates"), tier="cpu") == list(range(5))
    assert chosen(slow("download"), tier="cpu") == list(range(5))
    # A unit that stays takes the room of seven others' parameters, which then come twice in a step
    # instead of once.
    assert chosen(slow("upload"), tier="cpu") == []


def test_from_nvme_the_format_says_what_stays() -> None:
    """Bytes per parameter: a unit that stays saves 22 of the drive for its 14, or with an fp32
    master 26 for its 16. What has no room on the device is read by backward; with a split master by
    the update, too, which is 4 bytes for 2."""
    assert chosen(slow("nvme"), tier="nvme") == []
    assert chosen(
        slow("nvme"), 5 * WHOLE // 14 * 16 + 2 * room_for_two(SIZES), tier="nvme", master=FP32
    ) == list(range(5))
    # What host memory keeps does not move, and here it keeps everything.
    rates = slow("nvme", "updates")
    assert chosen(rates, tier="nvme", cache=0) == []
    assert chosen(rates, tier="nvme", cache="auto") == list(range(5))


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=12),
    st.floats(0.2, 1.5),
    st.sampled_from(["cpu", "nvme"]),
    st.tuples(*[st.floats(10.0, 1000.0)] * 4),
)
def test_no_other_number_of_units_takes_less_time(
    sizes: list[int], part: float, tier: str, rates: Any
) -> None:
    """Against every number of them, given as `Tuning.gpu_cache`."""
    whole = [14 * size * PAGE for size in sizes]
    concurrent = room_for_two(sizes)
    memory = int(part * sum(whole)) // PAGE * PAGE + 2 * concurrent

    def longest(blocks: tuple[BlockSpec, ...]) -> float:
        travelling = [
            block for block in blocks if block.kind is Kind.PARAM and not block.tier.is_device
        ]
        spans = sum(b.span for b in travelling)
        homes = sum(b.nbytes for b in blocks if b.tier.is_device)
        room = memory - homes
        if room < (max(concurrent, min(spans, 2 * concurrent)) if travelling else 0):
            return math.inf
        return max(moves(blocks, min(1.0, room / max(spans, 1)), {}).seconds(Rates(*rates)))

    found = longest(with_gpu_cache(placed(sizes, memory, tier), concurrent, 0, Rates(*rates)).specs)
    assert found < math.inf
    for size in [0, *itertools.accumulate(whole)]:
        other = with_gpu_cache(placed(sizes, memory, tier, gpu_cache=size), concurrent, 0)
        assert found <= longest(other.specs) * (1 + 1e-9)


def test_rates_are_asked_for_where_there_is_a_choice_alone() -> None:
    concurrent, everything = room_for_two(SIZES), len(SIZES) * WHOLE
    assert needs_rates(placed(SIZES, everything // 2, "cpu"), concurrent, 0)
    assert not needs_rates(placed(SIZES, everything, "cpu"), concurrent, 0), "all of it fits"
    assert needs_rates(placed(SIZES, everything, "cpu"), concurrent, PAGE)
    for options in (
        {"gpu_cache": 0},
        {"gpu_cache": WHOLE},
        {"update": "delayed"},
        {"algorithm": "other"},
    ):
        placement = placed(SIZES, everything // 2, "cpu", **options)
        assert not needs_rates(placement, concurrent, 0)
        assert gpu_resident(with_gpu_cache(placement, concurrent, 0)) == list(
            range(options.get("gpu_cache") == WHOLE)
        )
    placement = placed(SIZES, everything, "cpu")
    assert gpu_resident(with_gpu_cache(placement, concurrent, 0)) == list(range(len(SIZES)))


def test_a_model_of_many_units_is_weighed_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [1] * 2000
    placement = placed(sizes, 1000 * 14 * PAGE + 2 * room_for_two(sizes), "nvme")
    asked = []
    inner = Placement.moved
    monkeypatch.setattr(
        Placement, "moved", lambda self, *values: asked.append(values) or inner(self, *values)
    )
    placement = with_gpu_cache(placement, room_for_two(sizes), 0, slow("updates"))
    assert 32 <= len(asked) <= 34
    assert len(gpu_resident(placement)) >= 1000 - 2000 // 32


@pytest.fixture
def discrete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["infinity.build"], "ComputeDevice", DiscreteDevice)


def configured(directory: Path, **options: Any) -> infinity.Config:
    values = {
        "gpu_memory": "64MiB",
        "cpu_memory": "64MiB",
        "cache": 0,
        "gpu_cache": 0,
        "precision": "bf16",
        "update": "exact",
    }
    return config_of(**(values | {"nvme": directory, "device": "cpu"} | options))


@pytest.mark.usefixtures("discrete")
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("options", [{}, {"gpu_cache": "300KiB"}, {"gpu_memory": "150KiB"}])
def test_what_is_stated_is_what_moves(
    tiers: str, split: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    """To the byte where the device has room for all parameters; else to the two largest units."""
    if "on the device" in tiers and "gpu_memory" in options:
        options = {}
    model = infinity.wrap(
        transformer(), configured(tmp_path, **(TIERS[tiers] | options), split_master=split)
    )
    with infinity.engine(model) as engine:
        optimizer = infinity.AdamW(model.parameters(), max_grad_norm=0.5)
        store = Probe(engine).store
        spans = sum(spec.span for spec in store.placement.travelling())
        resident = min(1.0, store.layout.copy_bytes / spans) if spans else 1.0
        assert (resident < 1) == (options.get("gpu_memory") == "150KiB")
        marks = []
        for step in range(6):
            if step == 2:  # from here on all steps are alike
                engine.drain()
                marks.append(
                    (Probe(engine).device.copied.written, Probe(engine).device.copied.read)
                )
            model(**text_batch(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.drain()
        marks.append((Probe(engine).device.copied.written, Probe(engine).device.copied.read))
        up, down = ((after - before) / 4 for before, after in zip(*marks, strict=True))
        report = engine.report()
        stated = moves(
            [block.spec for unit in engine.units for block in unit.blocks.values()], resident, {}
        )
        on_drives = (report.read_per_parameter + report.written_per_parameter) * report.parameters
        largest = max(unit.facts.nbytes for unit in engine.units)
        slack = 0 if resident == 1 else 2 * largest
        assert up == pytest.approx(stated.upload, abs=slack)
        assert down == pytest.approx(stated.download, abs=slack)
        assert on_drives == pytest.approx(stated.nvme, abs=slack, rel=1e-9)
        assert stated.updates == sum(
            u.facts.layout.shard_numel for u in engine.units if not u.update_blocks.gpu_resident
        )


def test_the_longest_says_how_long_a_step_takes() -> None:
    assert Moves(10.0, 6.0, 0.0, 8).seconds(Rates(5.0, 2.0, math.inf, 4.0)) == (2.0, 3.0, 0.0, 2.0)
    assert Moves(0.0, 0.0, 9.0, 0).seconds(Rates(5.0, 2.0, 0.0, 4.0)) == (0.0, 0.0, 9.0, 0.0), (
        "a full drive gives nothing"
    )


@pytest.mark.usefixtures("discrete")
@pytest.mark.parametrize("algorithm", ["adam", "adagrad", "lion", "momentum", "sgd"])
@pytest.mark.parametrize("formats", [{}, {"moment_precision": "int8", "split_master": False}])
def test_this_machine_is_measured(
    algorithm: str,
    formats: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With each algorithm and format the engine measures what it needs, says so, and leaves nothing
    behind."""
    monkeypatch.setattr(sys.modules["infinity.build"], "PROBE_BYTES", 1 << 20)
    kernels: list[str] = []
    real = native.cpu_adam()
    update = lambda *values, **how: (kernels.append(how["isa"]), real.update(*values, **how))  # noqa: E731
    spied = SimpleNamespace(
        update=update, Pool=real.Pool, block_bytes=real.block_bytes, best_isa=real.best_isa
    )
    monkeypatch.setattr(rates, "native", SimpleNamespace(cpu_adam=lambda: spied))
    config = configured(
        tmp_path,
        gpu_cache="auto",
        gpu_memory="400KiB",
        algorithm=algorithm,
        instruction_set="scalar",
        **formats,
    )
    with caplog.at_level(logging.INFO, "infinity"):
        model = infinity.wrap(transformer(), config)
    with infinity.engine(model) as engine:
        said = [
            record.getMessage()
            for record in caplog.records
            if "; measured: " in record.getMessage()
        ]
        assert len(said) == 1 and "of the drives" in said[0] and " 0.0 " not in said[0]
        assert set(kernels) == {"scalar"}
        assert (
            0
            < engine.report().gpu_resident
            < sum(b.nbytes for unit in engine.units for b in unit.blocks.values())
        )
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "infinity-states.bin",
            "infinity.lock",
        ]


@pytest.mark.usefixtures("discrete")
def test_what_is_in_memory_needs_no_drive(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    states = {"parameters": "cpu", "optimizer": "cpu"}
    with caplog.at_level(logging.INFO, "infinity"):
        model = infinity.wrap(
            transformer(), configured(tmp_path, gpu_cache="auto", gpu_memory="400KiB", **states)
        )
    infinity.engine(model).close()
    (said,) = [
        record.getMessage() for record in caplog.records if "; measured: " in record.getMessage()
    ]
    assert "drive" not in said and "inf" not in said


def test_nothing_is_copied_to_what_is_in_use_still() -> None:
    """The memory that is copied to may have been freed by who still has work on it in the queue of
    his stream."""
    seen: list[str] = []

    class Device(DiscreteDevice):
        def await_stream(self) -> None:
            seen.append("synchronized")

    device = Device()
    device.on_upload = lambda target, after: seen.append("copy")
    rates.copies(device, 1 << 20, 1)
    assert seen[0] == "synchronized" and seen.count("copy") == 2


class Weights(torch.nn.Module):
    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        for number, dtype in enumerate(dtypes):
            self.register_parameter(
                f"weight{number}",
                torch.nn.Parameter(torch.zeros(16384 // dtype.itemsize, dtype=dtype)),
            )


@pytest.mark.usefixtures("discrete")
@pytest.mark.parametrize(
    "last", [(torch.bfloat16,), (torch.bfloat16, torch.float16, torch.float32)]
)
def test_auto_works_where_nothing_stays(
    last: tuple[torch.dtype, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what does not stay is used together, and with as many gradient buffers."""
    build = sys.modules["infinity.build"]
    monkeypatch.setattr(
        build, "copies", lambda *_: {"host_to_device": [1e15], "device_to_host": [1e15]}
    )
    monkeypatch.setattr(build, "updates", lambda *_, **__: [1.0])
    most = 0
    for pages in range(20, 260, 4):
        buffers = []
        for cache in (0, "auto"):
            states = {
                "parameters": "cpu",
                "optimizer": "cpu",
                "precision": "auto",
                "gpu_cache": cache,
            }
            model = torch.nn.Sequential(
                *[Weights(torch.bfloat16) for _ in range(6)], Weights(*last)
            )
            try:
                infinity.wrap(
                    model, configured(tmp_path, gpu_memory=pages * PAGE, **states), units=[Weights]
                )
            except infinity.BudgetError:
                assert cache == 0, f"{pages} pages are enough without"
                break
            with infinity.engine(model) as found:
                assert Probe(found).gradient_buffer is not None
                buffers.append(len(Probe(found).gradient_buffer_free))
                most = max(most, sum(unit.update_blocks.gpu_resident for unit in found.units))
        assert len(set(buffers)) <= 1
    assert most > 0


def test_moves_of_what_comes_and_goes() -> None:
    """With room for a quarter of the parameters: of the two uses in a step the first finds what the
    update has put there."""
    bf16, states = 2 * 4 * PAGE, 2 * 10 * PAGE  # bytes of a unit of two thousand parameters

    def of(tier: str, kept: int = 0, frozen: bool = False, **how: Any) -> tuple[float, ...]:
        blocks = placed([2], 1 << 30, tier, **how).specs
        blocks = [block for block in blocks if block.kind is Kind.PARAM or not frozen]
        cached = {block: kept for block in blocks if block.tier.is_drive}
        return tuple(moves(blocks, 0.25, cached))

    assert of("cpu") == (bf16 / 2 * 1.75, bf16 / 2, 0, 2 * PAGE)
    assert of("cpu", frozen=True) == (bf16 / 2 * 1.5, 0, 0, 0)
    # Of a split master the old parameter is read, too: from the device where it is there, else from
    # the drive.
    assert of("nvme") == (bf16 / 2 * 1.75, bf16 / 2 * 1.25, bf16 / 2 * 2.5 + states * 2, 2 * PAGE)
    assert of("nvme", master=FP32) == (
        bf16 / 2 * 1.75,
        bf16 / 2,
        bf16 / 2 * 1.75 + (states + bf16 / 2) * 2,
        2 * PAGE,
    )
    assert of("nvme", kept=PAGE)[2] == (bf16 / 2 * 2.5 + states * 2) / 2
    assert of("nvme", frozen=True) == (bf16 / 2 * 1.5, 0, bf16 / 2 * 1.5, 0)


@pytest.mark.usefixtures("discrete")
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_drive_that_takes_no_files_is_refused_as_ever(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(infinity.ConfigError, match="cannot be written"):
        infinity.wrap(transformer(), configured(tmp_path, gpu_cache="auto", gpu_memory="400KiB"))


@pytest.mark.usefixtures("discrete")
def test_a_directory_that_is_not_there_is_refused_as_ever(tmp_path: Path) -> None:
    model = transformer()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(infinity.ConfigError, match="does not exist; create it"):
        infinity.wrap(model, configured(tmp_path / "none", gpu_cache="auto", gpu_memory="400KiB"))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
