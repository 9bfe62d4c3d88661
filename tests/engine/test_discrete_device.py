"""The whole engine on a compute device with memory of its own (`discrete.DiscreteDevice`): the same
numbers, and copies in their order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity import native
from infinity.observe import Recorder
from infinity.optim.kernels import Kernels, squared_gradient_norm
from infinity.placement.budget import CHUNK_ELEMENTS
from infinity.placement.spec import BlockSpec, Format, Kind
from infinity.tier import NVME
from infinity.tiers.store import Store
from support.discrete import DiscreteDevice
from support.discrete_engines import STEPS, Places, Wrap, assert_equal, train, wrapping
from support.models import text_batch
from support.probe import Probe

pytestmark = pytest.mark.usefixtures("one_thread")

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
    "states in host memory": {"parameters": "cpu", "optimizer": "cpu", "cpu_memory": "16MiB"},
    "states in host memory, twice": {
        "parameters": "cpu",
        "optimizer": "cpu",
        "cpu_memory": "16MiB",
        "update": "speculative",
    },
    "states offloaded": {"parameters": "gpu", "optimizer": "cpu", "cpu_memory": "16MiB"},
    "all on the device": {"parameters": "gpu", "gradients": "gpu", "optimizer": "gpu"},
}


@pytest.fixture
def wrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wrap]:
    with wrapping(tmp_path, monkeypatch) as wrap:
        yield wrap


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_numbers_are_those_of_a_device_that_shares_the_host(
    placement: str, accumulation: int, wrap: Wrap
) -> None:
    precision = "bf16" if accumulation == 1 else "fp32"
    expected = train(wrap(discrete=False, precision=precision), accumulation)
    assert_equal(train(wrap(precision=precision, **PLACEMENTS[placement]), accumulation), expected)


def test_without_kernels_for_the_device_states_are_updated_on_the_host(
    wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(wrap(discrete=False))
    engine = wrap(**PLACEMENTS["all on the device"])
    Probe(engine).device.has_kernels = False
    assert_equal(train(engine), expected)
    assert Probe(engine).device.copied.read > STEPS * 10 * sum(
        unit.facts.layout.numel for unit in engine.units
    )


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_no_copy_overtakes_the_model(
    placement: str, wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = wrap(**PLACEMENTS[placement])
    places = Places(Probe(engine).device, monkeypatch)
    train(engine)
    if placement == "all on the device":
        assert places.uploads == 0
        assert Probe(engine).device.copied.read <= 14 * sum(
            unit.facts.layout.numel for unit in engine.units
        ), "what train reads last"
        assert places.updates == STEPS * len(engine.units)
    else:
        assert places.uploads > 0 and places.updates == 0


@pytest.mark.parametrize("placement", ["nvme", "all on the device"])
def test_no_copy_overtakes_what_clears_the_memory(
    placement: str, wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros and poison are queued on the stream of the caller, which copies do not wait for."""
    seen: list[str] = []
    real = DiscreteDevice.begin_upload

    def begin_upload(device: DiscreteDevice, *values: Any) -> Any:
        seen.append("copy")
        return real(device, *values)

    monkeypatch.setattr(DiscreteDevice, "begin_upload", begin_upload)
    monkeypatch.setattr(
        DiscreteDevice,
        "compute_memory",
        lambda d, n, real=DiscreteDevice.compute_memory: seen.append("memory") or real(d, n),
    )
    monkeypatch.setattr(DiscreteDevice, "await_stream", lambda device: seen.append("synchronized"))
    train(wrap(DiscreteDevice, **PLACEMENTS[placement]))
    assert "copy" in seen
    assert seen.index("memory") < seen.index("synchronized") < seen.index("copy")


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("placement", ["states in host memory", "gradients on nvme"])
def test_gradients_are_added_by_the_kernels_on_the_thread_that_brings_them(
    placement: str, precision: str, wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the first of a step, each element once; the numbers are those of torch's `add_`."""
    kernels, accumulation = native.cpu_adam(), 3
    added: list[int] = []
    threads: set[str] = set()

    def spy(*values: Any, add: Any = kernels.add) -> None:
        added.append(values[3])
        threads.add(threading.current_thread().name)
        add(*values)

    config = PLACEMENTS[placement] | {"precision": precision}
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "add", spy)
        engine = wrap(**config)
        found = train(engine, accumulation)
    numel = sum(unit.facts.layout.numel for unit in engine.units)
    assert sum(added) == STEPS * (accumulation - 1) * numel
    assert threads == {"infinity-exchange"}
    monkeypatch.setattr(Kernels, "add", lambda _, target, source: target.add_(source))
    assert_equal(found, train(wrap(**config), accumulation))


def test_a_step_does_not_wait_until_host_memory_was_read_for_the_norm(
    wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each unit's part was computed when its last gradient had come; what changed since is read
    again."""
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
            # Nobody knew that there would be a norm, nor how many gradients.
            0: (len(engine.units), 0),
            3: (len(engine.units), len(engine.units)),
        }.get(number, (0, len(engine.units)))
        optimizer.zero_grad()


def test_what_an_update_made_is_waited_for_until_it_is_there(tmp_path: Path) -> None:
    """And the update goes on meanwhile."""
    nbytes = 2 * CHUNK_ELEMENTS
    config = infinity.Config(
        nvme=tmp_path,
        gpu_memory="1MiB",
        cpu_memory="2MiB",
        tuning=infinity.Tuning(cache=0, poison=True),
    )
    store = Store(config, DiscreteDevice(), Recorder())
    block = store.add(
        BlockSpec(0, Kind.PARAM, nbytes, Format("byte", 1, 1), NVME, nbytes, 0, "param")
    )
    store.open(store.placement.layout(block.spec.span))
    try:
        store.resident.start(block)
        store.resident.wait(block)
        store.resident.release(block)
        store.resident.begin_update(block, keep=True)
        new = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
        going = [
            store.resident.renew(
                block, begin, new[begin:][: store.layout.rooms.host.chunk_elements]
            )
            for begin in store.staging.chunks(block)
        ]
        assert going and not any(placing is None or placing.done() for placing in going)
        store.resident.start(block)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.resident.wait, block)
            for placing in going:
                assert placing is not None
                placing.wait()
            assert torch.equal(waiting.result(60), new)
        store.resident.release(block)
        store.resident.end_update([block])
    finally:
        store.close()


def test_a_speculative_update_is_rolled_back_when_the_gradient_before_arrives_with_the_next_one(
    wrap: Wrap,
) -> None:
    """The step before had one backward and this one has two: the second finds the reduction of the
    first, which says that all gradients are there, still under way."""
    weights = []
    for discrete in (True, False):
        torch.manual_seed(0)
        engine = wrap(discrete, torch.nn.Linear(32, 32), update="speculative")
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
