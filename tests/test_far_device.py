"""The whole engine on a compute device with memory of its own (`far.FarDevice`): the same numbers, and copies in their order."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import config_of
from far import FarDevice
from models import text_batch, transformer

import infinity
from infinity.device import Mark
from infinity.observe import Recorder
from infinity.optim.kernels import squared_gradient_norm
from infinity.placement.budget import CHUNK_ELEMENTS
from infinity.placement.spec import BlockSpec, Format, Kind
from infinity.tiers.block import Block
from infinity.tiers.resident import Residency
from infinity.tiers.store import Store

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 6
LEAST: dict[str, Any] = {"gpu_memory": 0, "cpu_memory": "2MiB", "cache": 0, "poison": True, "gpu_direct": "off"}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "nvme": {"update": "speculative"},
    "exact": {"update": "exact"},
    "cached": {"cpu_memory": "16MiB", "cache": "auto"},
    "gradients on nvme": {"gradients": "nvme"},
    "only gradients on nvme": {"parameters": "cpu", "gradients": "nvme", "optimizer": "cpu", "cpu_memory": 0},
    "states in host memory": {"parameters": "cpu", "optimizer": "cpu", "cpu_memory": "16MiB"},
    "states in host memory, twice": {"parameters": "cpu", "optimizer": "cpu", "cpu_memory": "16MiB", "update": "speculative"},
    "states offloaded": {"parameters": "gpu", "optimizer": "cpu", "cpu_memory": "16MiB"},
    "all on the device": {"parameters": "gpu", "gradients": "gpu", "optimizer": "gpu"},
}


class Places:
    """Until when the model may use each byte of the compute device: a copy there comes after that."""

    def __init__(self, device: FarDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device, self.lock, self.uploads = device, threading.Lock(), 0
        self.used: dict[tuple[int, int], int | None] = {}  # None: it is in use now
        real_wait, real_release = Residency.wait, Residency.release
        device.on_upload, device.on_update = self.check, self.check_update
        self.updates = 0

        def wait(store: Residency, block: Block) -> torch.Tensor:
            tensor = real_wait(store, block)
            with self.lock:
                self.used[tensor.data_ptr(), tensor.data_ptr() + tensor.numel()] = None
            return tensor

        def release(store: Residency, block: Block) -> None:
            last = block.copy.pins == 1 and block.copy.lease is not None
            real_release(store, block)
            if last and block.copy.lease is not None:
                begin = block.copy.lease.tensor.data_ptr()
                with self.lock:
                    self.used[begin, begin + block.copy.lease.tensor.numel()] = device.mark().number

        monkeypatch.setattr(Residency, "wait", wait)
        monkeypatch.setattr(Residency, "release", release)

    def check(self, target: torch.Tensor, after: Mark | None) -> None:
        begin, end = target.data_ptr(), target.data_ptr() + target.numel()
        self.uploads += 1
        with self.lock:
            for (first, last), number in self.used.items():
                if begin < last and first < end:
                    assert number is not None, "a copy into what the model uses"
                    # `release` marks before the test does, which no work comes between.
                    assert after is not None and after.number >= number - 1, "a copy that may overtake the model"

    def check_update(self, after: Mark | None) -> None:
        assert after is not None
        self.updates += 1


Wrap = Callable[..., infinity.Engine]


@pytest.fixture
def wrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wrap]:
    """`wrap(far, model, **config)`: an engine on a far device, or on one that shares the host; of a transformer by default."""
    engines: list[tuple[Any, infinity.Engine]] = []

    def make(far: bool = True, model: torch.nn.Module | None = None, **options: Any) -> infinity.Engine:
        folder = tmp_path / str(len(engines))
        folder.mkdir(exist_ok=True)  # one that was refused may have left it
        config = LEAST | {"nvme": folder, "device": "cpu", "gpu_cache": 0} | options
        with monkeypatch.context() as patch:
            if far:
                patch.setattr(sys.modules["infinity.build"], "ComputeDevice", FarDevice)
            while True:
                try:
                    model = infinity.wrap(transformer() if model is None else model, config_of(**config))
                    break
                except infinity.BudgetError as error:  # where there is none, the least memory that works
                    ((key, least),) = re.findall(r"smallest (\w+) that works is (\d+)", str(error))
                    config[key] = int(least)
        engines.append((model, infinity.engine(model)))
        return infinity.engine(model)

    yield make
    for _, engine in engines:
        engine.close()


def train(engine: infinity.Engine, accumulation: int = 1) -> dict[str, Any]:
    optimizer = infinity.AdamW(engine.model.parameters(), lr=1e-2, max_grad_norm=1.0)
    losses, norms = [], []
    for step in range(STEPS):
        for micro_batch in range(accumulation):
            loss = engine.model(**text_batch(accumulation * step + micro_batch)).loss
            (loss / accumulation).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    states = optimizer.state_dict()["state"]
    tensors = {f"{number}.{name}": value for number, state in states.items() for name, value in state.items()}
    return {"losses": losses, "norms": norms, **engine.state_dict(), **tensors}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value, name


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_numbers_are_those_of_a_device_that_shares_the_host(placement: str, accumulation: int, wrap: Wrap) -> None:
    precision = "bf16" if accumulation == 1 else "fp32"
    expected = train(wrap(far=False, precision=precision), accumulation)
    assert_equal(train(wrap(precision=precision, **PLACEMENTS[placement]), accumulation), expected)


def test_without_kernels_for_the_device_states_are_updated_on_the_host(wrap: Wrap, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(wrap(far=False))
    engine = wrap(**PLACEMENTS["all on the device"])
    engine._device.has_kernels = False
    assert_equal(train(engine), expected)
    assert engine._device.copied.read > STEPS * 10 * sum(unit.layout.numel for unit in engine.units)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_no_copy_overtakes_the_model(placement: str, wrap: Wrap, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = wrap(**PLACEMENTS[placement])
    places = Places(engine._device, monkeypatch)
    train(engine)
    if placement == "all on the device":
        assert places.uploads == 0
        assert engine._device.copied.read <= 14 * sum(unit.layout.numel for unit in engine.units), "what train reads last"
        assert places.updates == STEPS * len(engine.units)
    else:
        assert places.uploads > 0 and places.updates == 0


@pytest.mark.parametrize("placement", ["nvme", "all on the device"])
def test_no_copy_overtakes_what_clears_the_memory(placement: str, wrap: Wrap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros and poison are queued on the stream of the caller, which copies do not wait for."""
    seen: list[str] = []
    real = FarDevice.begin_upload

    def begin_upload(device: FarDevice, *values: Any) -> Any:
        seen.append("copy")
        return real(device, *values)

    monkeypatch.setattr(FarDevice, "begin_upload", begin_upload)
    monkeypatch.setattr(
        FarDevice, "compute_memory", lambda d, n, real=FarDevice.compute_memory: seen.append("memory") or real(d, n)
    )
    monkeypatch.setattr(FarDevice, "settle", lambda device: seen.append("settled"))
    train(wrap(FarDevice, **PLACEMENTS[placement]))
    assert "copy" in seen
    assert seen.index("memory") < seen.index("settled") < seen.index("copy")


def test_gradients_go_home_on_a_thread_of_their_own(wrap: Wrap) -> None:
    engine = wrap(**PLACEMENTS["states in host memory"])
    threads: list[str] = []
    engine._device.on_download = lambda: threads.append(threading.current_thread().name)
    optimizer = infinity.AdamW(engine.model.parameters())
    for step in range(2):
        engine.model(**text_batch(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.drain()
    assert set(threads) == {"infinity-exchange"}


def test_a_step_does_not_wait_until_host_memory_was_read_for_the_norm(wrap: Wrap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each unit's part was computed when its last gradient had come; what changed since is read again."""
    engine = wrap(**PLACEMENTS["states in host memory"])
    threads: list[str] = []

    def spy(*values: Any) -> float:
        threads.append(threading.current_thread().name)
        return squared_gradient_norm(*values)

    monkeypatch.setattr("infinity.optim.norm.squared_gradient_norm", spy)
    optimizer = infinity.AdamW(engine.model.parameters(), max_grad_norm=1.0)
    for number in range(4):
        threads.clear()
        for _ in range(1 + (number == 3)):
            engine.model(**text_batch(number)).loss.backward()
        optimizer.step()
        here = threads.count(threading.current_thread().name)
        assert (here, len(threads) - here) == {
            0: (len(engine.units), 0),  # nobody knew that there would be a norm, nor how many gradients
            3: (len(engine.units), len(engine.units)),
        }.get(number, (0, len(engine.units)))
        optimizer.zero_grad()


def test_what_an_update_made_is_waited_for_until_it_is_there(tmp_path: Path) -> None:
    """And the update goes on meanwhile."""
    nbytes = 2 * CHUNK_ELEMENTS
    config = infinity.Config(nvme=tmp_path, gpu_memory="1MiB", cpu_memory="2MiB", tuning=infinity.Tuning(cache=0, poison=True))
    store = Store(config, FarDevice(), Recorder())
    block = store.add(BlockSpec(0, Kind.PARAM, nbytes, Format("byte", 1, 1), "nvme", nbytes, 0, "param"))
    store.open(store.placement.layout(block.spec.span))
    try:
        store.resident.start(block)
        store.resident.wait(block)
        store.resident.release(block)
        store.resident.begin_update(block, keep=True)
        new = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
        going = [store.resident.renew(block, begin, new[begin:][: store.chunk_elements]) for begin in store.staging.chunks(block)]
        assert going and not any(placing is None or placing.ended() for placing in going)
        store.resident.start(block)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.resident.wait, block)
            for placing in going:
                assert placing is not None
                placing.finish()
            assert torch.equal(waiting.result(60), new)
        store.resident.release(block)
        store.resident.end_update([block])
    finally:
        store.close()


def test_an_early_update_is_taken_back_when_the_gradient_before_arrives_with_the_next_one(wrap: Wrap) -> None:
    """The step before had one backward and this one has two: the second finds the reduction of the first, which says that all
    gradients are there, still under way."""
    weights = []
    for far in (True, False):
        torch.manual_seed(0)
        engine = wrap(far, torch.nn.Linear(32, 32), update="speculative")
        optimizer = infinity.AdamW(engine.model.parameters(), lr=1e-2)
        for backwards in (1, 1, 1, 2):
            optimizer.zero_grad()
            kept = engine.report().updates_kept
            for number in range(backwards):
                engine.model(torch.full((2, 32), float(number))).square().mean().backward()
            optimizer.step()
        assert engine.report().updates_kept == kept
        weights.append(engine.state_dict()["weight"])
    assert torch.equal(*weights)
