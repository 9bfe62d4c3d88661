"""The whole engine on a device that computes beside the host (`queued`): the same numbers in every
order of events, no wait of the model's threads, and a wrong number for every order that is lost.

They need a process of their own, because autograd counts the devices once: INFINITY_TEST_DEVICE is
"queued" in it (`make queued-test`).
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity
from infinity import build, closing, pinning
from infinity.assembly import Assembly
from infinity.device import ComputeDevice, Copy, huge_pages, read_values
from infinity.optim import kernels
from infinity.sharding import gradient_reduction
from infinity.sharding.gradient_buffer import GradientBuffer
from infinity.tiers.resident import Residency
from support import elsewhere, queued
from support.children import CHILD
from support.configs import config_of
from support.models import text_batch, transformer
from support.probe import Probe
from support.rank_group import RANKS, run_ranks

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(elsewhere.KIND != "queued", reason="`make queued-test` runs it"),
]

HOST = {"parameters": "cpu", "optimizer": "cpu", "cpu_memory": "16MiB"}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "nvme": {"update": "speculative"},
    "exact": {"update": "exact"},
    "cached": {"cpu_memory": "16MiB", "cache": "auto"},
    "gradients on nvme": {"gradients": "nvme"},
    "only gradients on nvme": {
        "parameters": "cpu",
        "gradients": "nvme",
        "optimizer": "cpu",
        "cpu_memory": 0,
    },
    "states in host memory": HOST,
    "states in host memory, twice": HOST | {"update": "speculative"},
    "states offloaded": HOST | {"parameters": "gpu"},
    "all on the device": {"parameters": "gpu", "gradients": "gpu", "optimizer": "gpu"},
    "recomputed": HOST | {"recompute": "all"},
    "recomputed, from host memory": HOST
    | {"recompute": "all", "activations": "cpu", "cpu_memory": "32MiB"},
}
LEAST: dict[str, Any] = {"gpu_memory": 0, "cpu_memory": "2MiB", "cache": 0, "gpu_direct": "off"}
SLOW_COPIES = {"copy_us": 3000}
SLOW_OPERATORS = {"compute_us": 1000}

Wrap = Callable[..., infinity.Engine]


@pytest.fixture
def machine() -> Iterator[Any]:
    runtime = queued.load()
    runtime.set_pace()
    yield runtime
    runtime.set_pace(**elsewhere.PACE)


@pytest.fixture
def wrap(machine: Any, tmp_path: Path) -> Iterator[Wrap]:
    """`wrap(**config)`: the engine of a transformer within the least memory that works."""
    engines: list[tuple[infinity.Engine, torch.nn.Module]] = []

    def make(**options: Any) -> infinity.Engine:
        folder = tmp_path / str(len(engines))
        folder.mkdir()
        config = LEAST | {"nvme": folder, "gpu_cache": 0} | options
        model = queued.move(transformer(tied=False))
        while True:
            try:
                infinity.wrap(model, config_of(**config))
                break
            except infinity.BudgetError as error:
                ((key, least),) = re.findall(r"smallest (\w+) that works is (\d+)", str(error))
                config[key] = int(least)
        engines.append((infinity.engine(model), model))
        return infinity.engine(model)

    yield make
    for engine, _ in engines:
        engine.close()


def batch(step: int) -> dict[str, torch.Tensor]:
    return {name: tensor.to(queued.NAME) for name, tensor in text_batch(step).items()}


def train(
    engine: infinity.Engine, accumulation: int = 1, stepped: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Three steps; `stepped` is called after each."""
    optimizer = infinity.AdamW(engine.model.parameters(), lr=1e-2, max_grad_norm=1.0)
    losses, norms = [], []
    batches = [batch(number) for number in range(3 * accumulation)]
    for step in range(3):
        for micro_batch in range(accumulation):
            loss = engine.model(**batches[accumulation * step + micro_batch]).loss
            if micro_batch == 0:
                optimizer.zero_grad()  # not before: the forward meets updates
            (loss / accumulation).backward()
            losses.append(loss.detach())
        optimizer.step()
        norms.append(optimizer.grad_norm)
        stepped()
    return {
        "losses": torch.stack(losses).cpu(),
        "norms": torch.tensor(norms),
        **engine.state_dict(),
    }


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


# The engine


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_numbers_are_the_same_in_every_order_of_events(
    placement: str, accumulation: int, wrap: Wrap, machine: Any
) -> None:
    precision = "bf16" if accumulation == 1 else "fp32"
    expected = train(wrap(precision=precision, **HOST), accumulation)
    for seed in range(1, 3):
        machine.set_pace(seed, random=True, compute_us=30, copy_us=300)
        found = train(wrap(precision=precision, **PLACEMENTS[placement]), accumulation)
        assert differences(found, expected) == [], seed


def test_the_model_queues_a_whole_step_while_the_device_stands_still(
    wrap: Wrap, machine: Any
) -> None:
    """With states in host memory no thread of the model waits for the device: neither for copies of
    parameters, nor until gradients have left. What a copy needs is there when its turn comes."""
    engine = wrap(**HOST)
    train(engine)
    engine.model.zero_grad()
    engine.drain()
    inputs = batch(7)
    machine.synchronize()
    machine.native.reset_counts()
    with machine.held():
        engine.model(**inputs).loss.backward()
        counts = machine.native.counts()
        waits = machine.host_waits()
    assert not waits.keys() & {"MainThread", "a thread of autograd"}
    assert counts["uploads"] >= 2
    assert counts["downloads"] >= len(engine.units) - 1


def test_a_gpu_that_computes_in_host_memory_gets_no_copy_of_parameters(
    wrap: Wrap, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for in host memory, they are at home where the device reads them. A stated `gpu_memory`
    stays a bound, for copies, and a delayed update keeps old parameters beside those in use."""
    host = HOST | {"gpu_memory": "auto", "cpu_memory": "auto"}

    def moved(**options: Any) -> tuple[dict[str, Any], str, int]:
        engine = wrap(**host | options)
        found = train(engine)
        engine.drain()
        inputs = batch(0)
        machine.synchronize()
        machine.native.reset_counts()
        with machine.held(), torch.no_grad():
            engine.model(**inputs)
            uploads = machine.native.counts()["uploads"]
        return found, engine.config.parameters, uploads

    expected, *_ = moved(**HOST)
    pool = SimpleNamespace(is_integrated=True)
    monkeypatch.setattr(machine, "get_device_properties", lambda device=None: pool)
    found, home, uploads = moved()
    assert differences(found, expected) == []
    assert (home, uploads) == ("gpu", 0)
    found, home, uploads = moved(gpu_memory=0)
    assert differences(found, expected) == []
    assert home == "cpu" and uploads > 0
    assert moved(update="delayed")[1] == "cpu"


def test_closing_leaves_no_copy_behind(wrap: Wrap, machine: Any) -> None:
    """Neither into memory of the device nor out of memory of the host, which both go."""
    engine = wrap(**HOST)
    train(engine)
    inputs = batch(0)
    machine.synchronize()
    machine.native.reset_counts()
    machine.set_pace(copy_us=10_000)
    with machine.held():
        engine.model(**inputs)
        assert machine.native.counts()["uploads"] > 0
    engine.close()
    counts = machine.native.counts()
    assert (counts["uploads"], counts["downloads"]) == (0, 0)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_engine_that_sleeps_has_no_memory_of_the_device(
    placement: str, wrap: Wrap, machine: Any
) -> None:
    """Others take it. Afterward it is elsewhere. Nothing on the host stays pinned meanwhile."""
    expected = train(wrap(precision="bf16", **HOST))
    pinned = len(machine.native.registrations())
    machine.set_pace(1, random=True, compute_us=30, copy_us=300)
    engine = wrap(precision="bf16", **PLACEMENTS[placement])
    memory = Probe(engine).memory("gpu")
    taken, addresses = [], [memory.data_ptr()]

    def sleep() -> None:
        engine.drain()
        machine.synchronize()
        before, held = machine.native.allocated(), memory.untyped_storage().nbytes()
        engine.sleep()
        machine.synchronize()
        assert before - machine.native.allocated() == held > 0
        assert len(machine.native.registrations()) == pinned
        taken.append(torch.full((held,), 0x7F, dtype=torch.uint8, device=queued.NAME))
        engine.wake()
        addresses.append(memory.data_ptr())

    assert differences(train(engine, stepped=sleep), expected) == []
    assert len(set(addresses)) > 1


def test_a_device_without_room_leaves_the_engine_asleep(
    wrap: Wrap, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(wrap(**HOST))
    engine = wrap(**PLACEMENTS["all on the device"])

    def sleep() -> None:
        engine.sleep()
        with monkeypatch.context() as patch:
            resize = torch.UntypedStorage.resize_

            def full(storage: torch.UntypedStorage, nbytes: int) -> Any:
                if nbytes:
                    raise torch.OutOfMemoryError
                return resize(storage, nbytes)

            patch.setattr(torch.UntypedStorage, "resize_", full)
            with pytest.raises(infinity.BudgetError, match=r"free memory there, and call engine"):
                engine.wake()
        with pytest.raises(infinity.EngineClosedError, match="sleeps"):
            engine.model(**batch(0))
        engine.wake()

    assert differences(train(engine, stepped=sleep), expected) == []


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """The names of all threads that Python has begun since, by their numbers in the system."""
    names: dict[int, str] = {}
    run = threading.Thread.run

    def noted(thread: threading.Thread) -> None:
        names[threading.get_native_id()] = thread.name
        run(thread)

    monkeypatch.setattr(threading.Thread, "run", noted)
    return names


@pytest.mark.parametrize("placement", ["nvme", "states in host memory", "all on the device"])
def test_no_thread_of_the_engine_breaks_a_graph_that_somebody_captures(
    placement: str,
    wrap: Wrap,
    machine: Any,
    threads: dict[int, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU any call of a thread might, that has not said first that it ignores captures."""
    begun, begin = [], queued.QueuedDevice.begin_thread

    def noted(device: queued.QueuedDevice) -> None:
        begun.append(threading.current_thread().name)
        begin(device)

    monkeypatch.setattr(queued.QueuedDevice, "begin_thread", noted)
    machine.native.reset_counts()
    engine = wrap(**PLACEMENTS[placement])
    train(engine)
    infinity.accumulate(engine.model, [batch(1), batch(2)])
    monkeypatch.setattr(closing, "_OURS", "")  # as if the model was collected inside of our code
    Probe(engine).finalize()
    for thread in threading.enumerate():
        if thread.name == "infinity-closing":
            thread.join()
    micro_batches = (f"infinity-micro-batch-{number}" for number in range(2))
    ours = {"infinity-mover", "infinity-updater", "infinity-exchange", "infinity-closing"}
    assert set(threads.values()) == set(begun) == ours | set(micro_batches)
    careless = machine.native.counts()["careless_calls"]
    assert [threads[number] for number in careless if number in threads] == []


def test_a_few_values_are_read_by_one_copy_that_the_host_sleeps_for(machine: Any) -> None:
    values = torch.arange(5, dtype=torch.float64).to(queued.NAME) * 2
    machine.set_pace(copy_us=1000)
    machine.native.reset_counts()
    assert read_values(values) == [0, 2, 4, 6, 8]
    assert len(machine.native.counts()["download_depths"]) == 1
    assert sum(machine.host_waits().values()) == 1
    assert read_values(torch.tensor([1, 2])) == [1, 2]


# Host memory that is pinned in slices, while `wrap` goes on

SLICE = 8192
"""Smaller than the copies of a unit, which cross its ends."""


class Registering:
    """CUDA's runtime, whose every call after the first waits for `go`, and which refuses call
    number `refuses`."""

    def __init__(self, machine: Any, refuses: int = 0) -> None:
        self._real, self._refuses = machine.cudart(), refuses
        self._calls = itertools.count(1)
        self.go = threading.Event()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        number = next(self._calls)
        if threading.current_thread().name == "infinity-pinning":
            assert self.go.wait(60), "nothing happens beside it"
        return 2 if number == self._refuses else self._real.cudaHostRegister(address, nbytes, flags)

    def cudaHostUnregister(self, address: int) -> int:
        code: int = self._real.cudaHostUnregister(address)
        assert code == 0, "it was not pinned"
        return code


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "SLICE_BYTES", SLICE)
    monkeypatch.setattr(pinning, "_forget_error", lambda: None)


def at_fill(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """`act` is called when `wrap` begins to fill the units."""
    fill = Assembly.fill

    def acting(*values: Any) -> None:
        act()
        fill(*values)

    monkeypatch.setattr(Assembly, "fill", acting)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_slices_change_no_number(
    placement: str, wrap: Wrap, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(wrap(precision="bf16", **HOST))
    before = len(machine.native.registrations())
    monkeypatch.setattr(pinning, "SLICE_BYTES", SLICE)
    machine.set_pace(1, random=True, compute_us=30, copy_us=300)
    engine = wrap(precision="bf16", **PLACEMENTS[placement])
    assert len(machine.native.registrations()) - before > 50
    assert differences(train(engine), expected) == []


def test_the_model_still_queues_a_whole_step(wrap: Wrap, machine: Any, small_slices: None) -> None:
    """A copy of two parts is one copy to wait for, and no part of it makes the host wait."""
    engine = wrap(**HOST)
    train(engine)
    engine.model.zero_grad()
    engine.drain()
    inputs = batch(7)
    machine.synchronize()
    machine.native.reset_counts()
    with machine.held():
        engine.model(**inputs).loss.backward()
        waits = machine.host_waits()
    assert not waits.keys() & {"MainThread", "a thread of autograd"}


def test_a_copy_that_is_not_cut_is_refused(
    wrap: Wrap, small_slices: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ComputeDevice, "_cut", lambda device, *pair: [pair])
    with pytest.raises((RuntimeError, infinity.InfinityError), match="crosses the end") as caught:
        train(wrap(**HOST))
    assert caught.value is not None


def test_memory_is_pinned_while_units_are_filled(
    wrap: Wrap, machine: Any, small_slices: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that need a slice wait for it, and `wrap` ends when all of it is pinned."""
    expected = train(wrap(**HOST | {"parameters": "gpu"}))
    cudart = Registering(machine)
    monkeypatch.setattr(machine, "cudart", lambda: cudart)
    before = len(machine.native.registrations())
    at_fill(monkeypatch, cudart.go.set)
    engine = wrap(**HOST | {"parameters": "gpu"})
    pinned = sum(list(machine.native.registrations().values())[before:])
    assert pinned > Probe(engine).store.layout.rooms.homes
    assert differences(train(engine), expected) == []


@pytest.mark.parametrize("ending", ["refusal", "interrupt"])
def test_what_fails_meanwhile_leaves_nothing_pinned(
    ending: str, machine: Any, small_slices: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = queued.move(transformer(tied=False))
    values = [parameter.clone() for parameter in model.parameters()]
    before = machine.native.registrations()
    cudart = Registering(machine, refuses=20 if ending == "refusal" else 0)
    monkeypatch.setattr(machine, "cudart", lambda: cudart)

    def act() -> None:
        cudart.go.set()
        if ending == "interrupt":
            raise KeyboardInterrupt

    at_fill(monkeypatch, act)
    config = config_of(nvme=tmp_path, **HOST | {"gpu_memory": "1MiB"})
    with pytest.raises((infinity.ConfigError, KeyboardInterrupt)) as caught:
        infinity.wrap(model, config)
    if ending == "refusal":
        assert re.match(r"CUDA could not pin \d+ bytes .* lower cpu_memory", str(caught.value))
    assert machine.native.registrations() == before
    assert not [each for each in threading.enumerate() if each.name == "infinity-pinning"]
    for parameter, value in zip(model.parameters(), values, strict=True):
        assert torch.equal(parameter, value)


# Updates on the device

ALL_THERE: dict[str, Any] = {
    "parameters": "gpu",
    "gradients": "gpu",
    "optimizer": "gpu",
    "gpu_memory": "8MiB",
    "update": "speculative",
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_updates_on_the_device_wait_their_turn(precision: str, wrap: Wrap, machine: Any) -> None:
    """By the CUDA kernels, on a stream of their own."""
    expected = train(wrap(precision=precision, **HOST), 2)
    with queued.kernels() as made:
        for seed in range(1, 4):
            launches = made.on_cpu.launches()
            machine.set_pace(seed, random=True, compute_us=30, copy_us=300)
            assert differences(train(wrap(precision=precision, **ALL_THERE), 2), expected) == []
            assert made.on_cpu.launches() > launches + 6


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ODD_FORMATS: list[dict[str, Any]] = [
    {"precision": "fp32"},
    {"precision": "bf16", "moment_precision": "bf16"},
    {"precision": "bf16", "moment_precision": "int8"},
    {"precision": "bf16", "split_master": False, "gradient_precision": "fp32"},
    {"precision": "fp16", "split_master": False, "moment_precision": "int8"},
]


@pytest.mark.parametrize("formats", ODD_FORMATS)
def test_updates_on_the_device_take_four_elements_at_once(
    formats: dict[str, Any], machine: Any, tmp_path: Path
) -> None:
    """Parameters of odd sizes, their states and gradients begin where a lane can load four
    elements at once; else the kernels copy them one by one."""

    def trained(**config: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(7, 33), torch.nn.LayerNorm(33), torch.nn.Linear(33, 5)]
        model = queued.move(torch.nn.Sequential(*layers))
        config = LEAST | {"nvme": tmp_path / str(len(config)), **config, **formats}
        Path(config["nvme"]).mkdir()
        with infinity.engine(infinity.wrap(model, config_of(**config))) as engine:
            optimizer = infinity.AdamW(engine.model.parameters(), lr=1e-2, max_grad_norm=1.0)
            for step in range(3):
                values = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
                values = values.to(queued.NAME, DTYPES[formats["precision"]])
                engine.model(values).float().square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return engine.state_dict()

    expected = trained(**HOST | {"gpu_memory": "8MiB"})
    with queued.kernels() as made:
        assert differences(trained(**ALL_THERE), expected) == []
    assert made.slow_updates == 0 < made.updates


@contextmanager
def leave_no_end(
    device: ComputeDevice, *values: Any, real: Any = ComputeDevice.updating
) -> Iterator[Copy]:
    """What comes after an update does not wait for it."""
    with real(device, *values):
        yield Copy()


@pytest.mark.parametrize("lost", ["the end of an update", "the stream of the kernels"])
def test_an_order_of_updates_that_is_lost_shows(
    lost: str, wrap: Wrap, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with queued.kernels():
        expected = train(wrap(**ALL_THERE))
        if lost == "the end of an update":
            monkeypatch.setattr(ComputeDevice, "updating", leave_no_end)
        else:
            other = machine.Stream(queued.NAME).stream_id  # it waits for no gradient
            monkeypatch.setattr(kernels, "stream_of", lambda tensor: other)
        for slower in (1, 4, 16):
            machine.set_pace(compute_us=1000 * slower)
            if differences(train(wrap(**ALL_THERE)), expected):
                return
    pytest.fail("the order was lost, and no number was wrong")


# What it must not do


def forget_the_copy(device: ComputeDevice, copy: Copy) -> None:
    pass


def copy_at_once(
    device: ComputeDevice, *values: Any, real: Any = ComputeDevice.begin_upload
) -> Copy:
    target, source, *_ = values
    return real(device, target, source)


def end_at_once(
    device: ComputeDevice, *values: Any, real: Any = ComputeDevice.begin_download
) -> Copy:
    real(device, *values)
    return Copy()


def collect_at_once(
    buffer: GradientBuffer, owner: Any, *values: Any, real: Any = GradientBuffer.add
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ComputeDevice, "follow_copy", lambda device, copy: None)
        real(buffer, owner, *values)


def renew_and_forget(
    resident: Residency, block: Any, *values: Any, real: Any = Residency.renew
) -> Any:
    placing = real(resident, block, *values)
    block.copy.arriving = None
    return placing


PLANTED: dict[str, tuple[type, str, Any, dict[str, Any], dict[str, Any]]] = {
    "compute before its copy": (
        *(ComputeDevice, "follow_copy", forget_the_copy, SLOW_COPIES, HOST),
    ),
    "copy before compute has left": (
        ComputeDevice,
        "begin_upload",
        copy_at_once,
        SLOW_OPERATORS,
        HOST,
    ),
    "update before the gradients are there": (
        *(ComputeDevice, "begin_download", end_at_once, SLOW_COPIES, HOST),
    ),
    "reuse before the gradients have left": (
        *(GradientBuffer, "add", collect_at_once, SLOW_COPIES, HOST),
    ),
    "next step before the update is there": (
        # All stay, so that no later copy brings the order back.
        *(Residency, "renew", renew_and_forget, SLOW_COPIES, HOST | {"gpu_memory": "1MiB"}),
    ),
}


@pytest.mark.parametrize("edge", PLANTED)
def test_an_order_that_is_lost_shows(
    edge: str, wrap: Wrap, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slower the device, the surer: a loaded host may be late itself."""
    owner, name, bug, pace, config = PLANTED[edge]
    expected = train(wrap(**config))
    machine.set_pace(**pace)
    assert differences(train(wrap(**config)), expected) == []
    monkeypatch.setattr(owner, name, bug)
    for slower in (1, 4, 16):
        machine.set_pace(**{key: slower * value for key, value in pace.items()})
        if differences(train(wrap(**config)), expected):
            return
    pytest.fail("the order was lost, and no number was wrong")


# Several ranks


def serve(directory: Path, rank: int, ranks: int) -> None:
    """A rank that trains at two paces, and whose gathers stand still."""
    dist.init_process_group("gloo", f"file://{directory}/rendezvous", rank=rank, world_size=ranks)
    machine = queued.load()
    told = queued.let_gloo_reach_it()
    vars(build)["ComputeDevice"] = queued.QueuedDevice

    def trained() -> tuple[dict[str, Any], torch.nn.Module]:
        model = queued.move(transformer(tied=False))
        config = HOST | {"gpu_memory": "1MiB", "gpu_cache": 0, "precision": "fp32"}
        nvme = [Path(tempfile.mkdtemp(dir=directory))]
        infinity.wrap(model, config_of(nvme=nvme, **config), group=dist.group.WORLD)
        return train(infinity.engine(model)), model

    machine.set_pace()
    expected, model = trained()
    unit = infinity.engine(model).units[-1]
    check_who_waits(unit, machine, rank, told)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ComputeDevice, "follow_copy", forget_gathers)
        check_who_waits(unit, machine, rank, told, loses_order=True)
    infinity.engine(model).close()
    machine.set_pace(copy_us=1000)
    found, model = trained()
    infinity.engine(model).close()
    assert differences(found, expected) == []
    dist.destroy_process_group()


def check_who_waits(
    unit: Any, machine: Any, rank: int, told: Any, loses_order: bool = False
) -> None:
    """While a gather of the unit stands still on the device: no thread, but all that is queued."""
    unit.on_device.start()
    flat = unit.on_device.wait()
    expected = flat.clone()
    unit.on_device.release()
    flat.chunk(2)[1 - rank].zero_()  # what comes from the other rank
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(told, "before_gathered", machine.native.hold)
        late = threading.Timer(60, machine.native.let_go)
        late.start()
        unit.outdate()  # it is gathered anew
        unit.on_device.start()
        seen = unit.on_device.wait().clone()
        ended = unit.on_device.posted.ended()
        if loses_order:
            machine.current_stream().synchronize()
        machine.native.let_go()
        late.cancel()
        unit.on_device.release()
    assert not ended
    machine.synchronize()
    assert torch.equal(seen.cpu(), expected.cpu()) is not loses_order
    unit.on_device.posted.wait()


def forget_gathers(
    device: ComputeDevice, copy: Copy, real: Any = ComputeDevice.follow_copy
) -> None:
    """Called by `GatheredOnDevice.wait`, it lets the model go on before a gather has ended."""
    if sys._getframe(1).f_code.co_name != "wait":
        real(device, copy)


def test_the_device_waits_for_gathers_and_no_thread_of_the_model_does(tmp_path: Path) -> None:
    run_ranks(__file__, tmp_path, RANKS)


WHOLE = HOST | {"stage": 1, "parameters": "gpu", "gpu_memory": "4MiB", "gpu_cache": 0}


def reuse_at_once(
    device: ComputeDevice, *values: Any, real: Any = ComputeDevice.begin_upload
) -> Copy:
    """A piece takes the place of another one that has yet to leave."""
    target, source, *after = values
    frame = sys._getframe(1)
    frame = frame.f_back if frame.f_code.co_name == "<listcomp>" else frame  # until Python 3.11
    sends = frame is not None and frame.f_code.co_name == "send"
    return real(device, target, source, *(() if sends else after))


def leave_late(
    device: ComputeDevice, *values: Any, real: Any = ComputeDevice.begin_download
) -> Copy:
    """No bug: what leaves is copied five times, one after the other."""
    return [real(device, *values) for _ in range(5)][-1]


def reduce_at_once(
    device: ComputeDevice, copy: Copy, real: Any = ComputeDevice.follow_copy
) -> None:
    if sys._getframe(1).f_code.co_name != "reduce_home":
        real(device, copy)


def leave_at_once(
    device: ComputeDevice, *values: Any, real: Any = ComputeDevice.begin_download
) -> Copy:
    target, source, *after = values
    reduces = sys._getframe(1).f_code.co_name == "reduce_home"
    return real(device, target, source, *(() if reduces else after))


PLANTED_IN_PIECES: list[dict[str, Any]] = [
    {"begin_upload": reuse_at_once, "begin_download": leave_late},
    {"follow_copy": reduce_at_once},
    {"begin_download": leave_at_once},
]


def serve_whole_gradients(directory: Path, rank: int, ranks: int) -> None:
    """A rank that keeps whole gradients in host memory, at some paces, and with orders that are
    lost."""
    dist.init_process_group("gloo", f"file://{directory}/rendezvous", rank=rank, world_size=ranks)
    machine = queued.load()
    queued.let_gloo_reach_it()
    vars(build)["ComputeDevice"] = queued.QueuedDevice
    vars(gradient_reduction)["PIECE_BYTES"] = 6 << 10  # three pieces or more

    def trained(gradients: str) -> dict[str, Any]:
        model = queued.move(transformer(tied=False))
        nvme = [Path(tempfile.mkdtemp(dir=directory))]
        config = config_of(nvme=nvme, precision="fp32", **(WHOLE | {"gradients": gradients}))
        with infinity.engine(infinity.wrap(model, config, group=dist.group.WORLD)) as engine:
            return train(engine, 2)

    machine.set_pace()
    expected = trained("gpu")
    for seed, late in ((1, False), (2, False), (3, True)):
        machine.set_pace(seed, random=True, compute_us=30, copy_us=300)
        with pytest.MonkeyPatch.context() as patch:
            if late:
                patch.setattr(ComputeDevice, "begin_download", leave_late)
            assert differences(trained("cpu"), expected) == [], seed
    for bugs in PLANTED_IN_PIECES:
        with pytest.MonkeyPatch.context() as patch:
            for name, bug in bugs.items():
                patch.setattr(ComputeDevice, name, bug)
            assert any(shows(machine, trained, expected, slower) for slower in (1, 4, 16)), bugs
    dist.destroy_process_group()


def shows(machine: Any, trained: Callable[[str], Any], expected: Any, slower: int) -> bool:
    """Whether a number is wrong on any rank."""
    machine.set_pace(copy_us=1000 * slower)
    wrong = torch.tensor(len(differences(trained("cpu"), expected)))
    dist.all_reduce(wrong)
    return bool(wrong)


def test_whole_gradients_pass_the_device_in_pieces_in_their_order(tmp_path: Path) -> None:
    run_ranks(__file__, tmp_path, RANKS, "serve_whole_gradients")


# The device itself


def test_the_host_cannot_touch_the_memory() -> None:
    program = (
        "import ctypes, torch; from support import queued; queued.load();"
        "there = torch.ones(4, device='queued'); assert there.cpu().sum() == 4;"
        "print(flush=True); ctypes.string_at(there.data_ptr(), 4)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, **CHILD)
    assert (done.returncode, done.stdout) == (-11, "\n"), done.stderr


@pytest.mark.parametrize("told", [True, False])
def test_memory_is_gone_for_streams_that_nobody_named(told: bool, machine: Any) -> None:
    there = torch.ones(1000, device=queued.NAME)
    here = machine.current_stream()
    here.synchronize()  # the other stream does not wait for this one
    with machine.stream(machine.Stream(queued.NAME)), machine.held():
        late = there + 1
        if told:
            there.record_stream(machine.current_stream())
        del there
        if not told:
            here.synchronize()
    machine.synchronize()
    assert bool((late == 2).all()) is told


@pytest.mark.parametrize("up", [True, False])
def test_a_copy_that_crosses_two_registrations_is_refused(up: bool, machine: Any) -> None:
    """So is one that is pinned in part; one within a registration, or in none, is not."""
    page, host = 4096, huge_pages(5 * 4096)
    there, cudart = torch.ones(5 * page, dtype=torch.uint8, device=queued.NAME), machine.cudart()

    def copy(begin: int, end: int) -> None:
        pair = there[begin:end], host[begin:end]
        (pair[0] if up else pair[1]).copy_(pair[1] if up else pair[0], non_blocking=True)

    for begin in (page, 2 * page):
        assert cudart.cudaHostRegister(host.data_ptr() + begin, page, 0) == 0
    assert cudart.cudaHostRegister(host.data_ptr() + page, 2 * page, 0) == 712
    for begin, end in ((0, page), (page, 2 * page), (2 * page + 5, 3 * page), (3 * page, 5 * page)):
        copy(begin, end)
    for begin, end in ((0, 5 * page), (2 * page - 1, 2 * page + 1), (page - 1, page + 1)):
        with pytest.raises(RuntimeError, match="a copy crosses the end of a registration"):
            copy(begin, end)
    machine.synchronize()
    for begin in (page, 2 * page):
        assert cudart.cudaHostUnregister(host.data_ptr() + begin) == 0
    assert cudart.cudaHostUnregister(host.data_ptr() + page) == 713
    copy(0, 5 * page)
    machine.synchronize()
