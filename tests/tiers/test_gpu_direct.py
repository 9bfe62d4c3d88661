"""GPUDirect Storage: a drive writes parameters into the memory of a device by itself. The device
and libcufile are fakes."""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity import native
from infinity.bench import machine
from infinity.device import ComputeDevice, Mark
from infinity.observe import Recorder
from infinity.placement.spec import BlockSpec, Format, Kind
from infinity.tier import NVME
from infinity.tiers import drives as tier
from infinity.tiers.block import Block
from infinity.tiers.manifest import STATES_NAME
from infinity.tiers.places import TRIAL_NAME
from infinity.tiers.staging import ChunkRequest
from infinity.tiers.store import Store
from support.configs import config_of
from support.discrete import DiscreteDevice
from support.discrete_engines import LEAST, Places, Wrap, assert_equal, train, wrapping
from support.gpu_benchmarks import load
from support.models import text_batch, transformer
from support.probe import Probe

pytestmark = pytest.mark.usefixtures("one_thread")

BYTES = Format("byte", 1, 1)
UNIT = 10 << 20  # of several stripes, so that every directory has some


@pytest.fixture
def wrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wrap]:
    with wrapping(tmp_path, monkeypatch) as wrap:
        yield wrap


class Fake:
    """tests/native/aio/fake_cufile.c: its knobs and counts are attributes."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        codes = (
            "open_code", "file_code", "memory_code", "must_copy", "posix_mode", "falls_back",
            "stubborn", "fail_errno",
        )  # fmt: skip
        names = (
            *codes, "fail_read_at", "fail_result", "fail_reads", "short_every", "wrong_every",
            "reads", "bytes_read", "drivers", "files", "memories", "opened",
        )  # fmt: skip
        parts = {
            name: (ctypes.c_int if name in codes else ctypes.c_long).in_dll(library, name)
            for name in names
        }
        vars(self).update(
            path=path, parts=parts, before={name: part.value for name, part in parts.items()}
        )

    def __getattr__(self, name: str) -> int:
        return int(self.parts[name].value)

    def __setattr__(self, name: str, value: int) -> None:
        self.parts[name].value = value

    def reset(self) -> None:
        for name, value in self.before.items():
            if name not in ("drivers", "files", "memories"):
                setattr(self, name, value)

    def open(self) -> tuple[int, int, int]:
        """Drivers, files and memories that are open or registered."""
        return self.drivers, self.files, self.memories


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler for the fake libcufile")
    source = Path(__file__).parents[1] / "native" / "aio" / "fake_cufile.c"
    path = tmp_path_factory.mktemp("cufile") / "libcufile.so.0"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, source], check=True)
    return Fake(path)


@pytest.fixture
def fake(library: Fake, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setattr(native, "cufile_libraries", lambda: [str(library.path)])
    monkeypatch.setenv("CUFILE_LOGFILE_PATH", "")
    library.reset()
    yield library
    assert library.open() == (0, 0, 0), "left behind"


def with_o_direct(folder: Path) -> None:
    file = native.aio().File(str(folder / "o-direct"), create=True)
    direct = file.direct
    file.close()
    if not direct:
        pytest.skip("no O_DIRECT here")


@pytest.fixture
def store(
    tmp_path: Path, fake: Fake
) -> Iterator[Callable[..., tuple[Store, DiscreteDevice, list[Block]]]]:
    """`store(units)`: blocks with content on two drives, and room for one of them and a half on the
    device."""
    with_o_direct(tmp_path)
    with_folders = [tmp_path / "a", tmp_path / "b"]
    stores: list[Store] = []
    for folder in with_folders:
        folder.mkdir()

    def make(
        units: int = 2, nbytes: int = UNIT, **options: Any
    ) -> tuple[Store, DiscreteDevice, list[Block]]:
        settings = {
            "gpu_memory": nbytes,
            "cpu_memory": "8MiB",
            "cache": 0,
            "nvme_shares": "equal",
        } | options
        device = DiscreteDevice()
        stores.append(Store(config_of(nvme=with_folders, **settings), device, Recorder()))
        specs = [
            BlockSpec(n, Kind.PARAM, nbytes, BYTES, NVME, nbytes, 0, f"unit {n}")
            for n in range(units)
        ]
        blocks = [stores[-1].add(spec) for spec in specs]
        stores[-1].open(stores[-1].placement.layout(nbytes))
        for block in blocks:
            expected = content(block)
            stores[-1].resident.begin_update(block)
            for begin in stores[-1].staging.chunks(block):
                (chunk,) = stores[-1].staging.check_out(ChunkRequest([block], begin))
                chunk.tensor.copy_(expected[begin:][: chunk.tensor.numel()])
                chunk.commit()
                chunk.release()
            stores[-1].resident.end_update([block])
        return stores[-1], device, blocks

    yield make
    for one in stores:
        one.close()


def content(block: Block) -> torch.Tensor:
    noise = torch.Generator().manual_seed(block.unit)
    return torch.randint(0, 256, (block.nbytes,), dtype=torch.uint8, generator=noise)


@pytest.mark.parametrize("update", ["exact", "speculative"])
def test_numbers_and_bytes_are_those_of_the_way_through_host_memory(
    fake: Fake, wrap: Wrap, tmp_path: Path, update: str
) -> None:
    with_o_direct(tmp_path)
    slow = wrap(gpu_direct="off", update=update)
    assert fake.opened == 0
    expected, through = train(slow), slow.report()
    fast = wrap(gpu_direct="on", update=update)
    assert fake.open() == (1, 1, 1)
    fake.bytes_read = 0
    assert_equal(train(fast), expected)
    found = fast.report()
    assert found.gpu_direct and not through.gpu_direct
    assert fake.bytes_read > 0
    if update == "exact":  # what runs ahead depends on time
        assert (
            found.read_per_parameter
            == found.planned_read_per_parameter
            == through.read_per_parameter
        )
        assert found.written_per_parameter == through.written_per_parameter
        assert (
            Probe(slow).device.copied.written - Probe(fast).device.copied.written == fake.bytes_read
        ), "and nothing else is different"


@pytest.mark.parametrize("cache", [0, 3 << 20])
def test_a_fetch_moves_exactly_its_bytes_and_uses_no_staging(
    store: Any, fake: Fake, cache: int
) -> None:
    one, device, blocks = store(cache=cache, cpu_memory="16MiB")
    kept = sum(block.cached_elements for block in blocks)
    assert bool(kept) == bool(cache)
    uploads: list[torch.Tensor] = []
    device.on_upload = lambda target, after: uploads.append(target)
    staging, read, metered = one._arenas.staging, fake.bytes_read, one.meter.read
    # There is none to be had.
    held = [staging.lease(object(), staging.slot_bytes) for _ in range(staging.free_slots)]
    for block in blocks:
        one.resident.start(block)
        assert torch.equal(one.resident.wait(block), content(block))
        one.resident.release(block)
    assert fake.bytes_read - read == one.meter.read - metered == len(blocks) * UNIT - kept
    assert sum(target.numel() for target in uploads) == kept
    for lease in held:
        assert lease is not None
        lease.release()


def test_short_reads_and_interruptions_are_the_ordinary_path(store: Any, fake: Fake) -> None:
    one, _, (block, _) = store()
    # EINTR
    fake.short_every, fake.fail_read_at, fake.fail_reads, fake.fail_errno = 3, fake.reads + 4, 5, 4
    one.resident.start(block)
    assert torch.equal(one.resident.wait(block), content(block))
    one.resident.release(block)


@pytest.mark.parametrize(
    ("result", "code", "reason"),
    [(-1, 5, "Input/output error"), (-5036, 5036, "cuFile error 5036")],
)
def test_what_fails_is_told_with_path_offset_and_bytes(
    store: Any, fake: Fake, result: int, code: int, reason: str
) -> None:
    one, _, (block, _) = store()
    fake.fail_read_at = fake.reads
    fake.fail_reads = 1 << 30
    fake.fail_result = result
    fake.fail_errno = 5
    one.resident.start(block)
    with pytest.raises(infinity.NvmeError, match=reason) as caught:
        one.resident.wait(block)
    error = caught.value
    assert (error.errno, error.operation) == (code, "read")
    assert (
        error.filename.endswith(STATES_NAME)
        and error.done < error.asked
        and "for unit 0" in str(error)
    )
    fake.fail_read_at = -1
    assert torch.equal(one.resident.wait(block), content(block)), "and it can be read again"
    one.resident.release(block)


def test_an_error_reaches_the_forward_of_the_user(fake: Fake, wrap: Wrap, tmp_path: Path) -> None:
    with_o_direct(tmp_path)
    engine = wrap(gpu_direct="on")
    fake.fail_reads, fake.fail_read_at = 1 << 30, fake.reads
    with pytest.raises(infinity.NvmeError, match="Input/output error") as caught:
        engine.model(**text_batch(0))
    assert Path(caught.value.filename).name == STATES_NAME and caught.value.offset % 4096 == 0
    fake.fail_read_at = -1
    assert torch.isfinite(engine.model(**text_batch(0)).loss)


def test_no_read_overtakes_the_model(
    fake: Fake, wrap: Wrap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_o_direct(tmp_path)
    engine = wrap(gpu_direct="on")
    places, here = Places(Probe(engine).device, monkeypatch), threading.local()
    real, checked = tier.NvmeTier.read, []
    memory = Probe(engine).memory("gpu")

    def read(self: Any, transfer: Any, direct: bool = False) -> Any:
        if direct:
            at = transfer.address - memory.data_ptr()
            place = memory[at : at + transfer.nbytes]
            places.check(place, here.__dict__.pop("mark", None))
            checked.append(transfer.nbytes)
        return real(self, transfer, direct)

    Probe(engine).device.on_reach = lambda mark: here.__dict__.update(mark=mark)
    monkeypatch.setattr(tier.NvmeTier, "read", read)
    train(engine)
    assert checked


def test_a_place_is_filled_when_the_model_has_left_it_and_not_on_its_thread(
    store: Any, fake: Fake
) -> None:
    one, device, (first, second) = store()
    one.resident.start(first)
    place = one.resident.wait(first)
    asked, reached = threading.Event(), threading.Event()
    who: list[tuple[str, Mark | None]] = []

    def reach(mark: Mark | None) -> None:
        who.append((threading.current_thread().name, mark))
        asked.set()
        assert reached.wait()

    one.resident.release(first)
    left, read = first.copy.used, fake.reads
    device.on_reach = reach
    assert one.resident.prefetch(second, beyond=0), "and it returns at once"
    assert asked.wait()
    assert who == [("infinity-mover", left)]
    assert fake.reads == read and torch.equal(place, content(first)), "the model may still use it"
    one.resident.start(second)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.resident.wait, second)
        reached.set()
        assert torch.equal(waiting.result(60), content(second))
    one.resident.release(second)


def test_committed_states_are_not_written_to_see_that_it_works(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_o_direct(tmp_path)
    monkeypatch.setattr(sys.modules["infinity.build"], "ComputeDevice", DiscreteDevice)
    options: dict[str, Any] = {"gpu_memory": "4MiB", "cpu_memory": "8MiB", "gpu_cache": 0}
    options = LEAST | options | {"device": "cpu", "durability": "step", "nvme": tmp_path}
    found = []
    for life in range(2):
        model = infinity.wrap(
            transformer(), config_of(**options | {"gpu_direct": "on"}), resume=life == 1
        )
        assert not (tmp_path / TRIAL_NAME).exists()
        with infinity.engine(model) as engine:
            assert Probe(engine).gpu_direct and fake.bytes_read >= tier.ALIGNMENT
            if life == 0:
                train(engine)
            found.append(engine.state_dict())
        found.append((tmp_path / STATES_NAME).read_bytes())
        (tmp_path / TRIAL_NAME).write_bytes(b"of a killed run")
    assert_equal(found[2], found[0])
    assert found[3] == found[1]


FAILURES = [
    ({"open_code": 5001}, "the kernel module nvidia-fs is not loaded"),
    ({"must_copy": 1}, "(force_compat_mode)"),
    ({"posix_mode": 1}, "(vanilla_posix_io_mode)"),
    ({"falls_back": 1}, "(gds_fallback_io)"),
    ({"stubborn": 1}, "set allow_compat_mode to false"),
    ({"memory_code": 5016}, "bytes on the GPU cannot be registered: the memory cannot be pinned"),
    (
        {"file_code": 5008},
        "cannot be read straight to a GPU: the drive or its file system is not supported",
    ),
    ({"fail_read_at": 1}, "Input/output error"),
    ({"wrong_every": 2}, "did not arrive on the GPU"),
]


@pytest.mark.parametrize(("knobs", "reason"), FAILURES, ids=[reason for _, reason in FAILURES])
def test_where_it_cannot_be_the_reason_is_said_and_host_memory_is_used(
    store: Any, fake: Fake, knobs: dict[str, int], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in knobs.items():
        setattr(fake, name, value)
    with caplog.at_level(logging.INFO, "infinity"):
        one, _, (block, _) = store()
    (said,) = [
        record.message for record in caplog.records if "on their way to the GPU" in record.message
    ]
    assert reason in said and not one.nvme.direct
    assert fake.open() == (0, 0, 0)
    one.resident.start(block)
    assert torch.equal(one.resident.wait(block), content(block))
    one.resident.release(block)
    one.close()
    fake.reads = 0
    with pytest.raises(
        infinity.ConfigError, match=r"gpu_direct='on', but no drive can write"
    ) as caught:
        store(gpu_direct="on")
    assert reason in str(caught.value)


def test_when_it_must_be_had_it_is_refused_in_a_sentence(
    fake: Fake, wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(infinity.ConfigError, match="needs parameters='nvme', not 'cpu'"):
        config_of(**LEAST | {"nvme": "x", "parameters": "cpu", "gpu_direct": "on"})
    with pytest.raises(infinity.ConfigError, match="the compute device is the CPU"):
        wrap(discrete=False, gpu_direct="on")
    monkeypatch.setattr(native, "cufile_libraries", lambda: ["libinfinity-none.so.0"])
    with pytest.raises(
        infinity.ConfigError, match="libcufile is not installed; use gpu_direct='auto'"
    ):
        wrap(gpu_direct="on")
    assert not Probe(wrap(gpu_direct="auto")).gpu_direct


def test_it_is_said_once_which_way_is_taken(
    store: Any, fake: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "infinity"):
        one, _, _ = store()
    assert (
        one.nvme.direct
        and sum("straight into the memory of the GPU" in r.message for r in caplog.records) == 1
    )
    assert fake.open() == (1, 2, 1)
    one.close()
    assert fake.open() == (0, 0, 0)
    one.close()


def test_the_doctor_and_the_benchmark_of_links_say_so(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_o_direct(tmp_path)
    assert machine.gpu_direct_problem("cpu", [tmp_path]) == "there is no GPU"
    assert machine.gpu_direct_problem("cuda:0", [tmp_path, tmp_path / "no"]) is None
    fake.file_code = 5008
    assert "file system is not supported" in (
        machine.gpu_direct_problem("cuda:0", [tmp_path]) or ""
    )
    fake.file_code = 0
    links = load("links")
    for discrete in (True, False):
        folder = tmp_path / str(discrete)
        folder.mkdir()
        monkeypatch.setattr(links, "ComputeDevice", DiscreteDevice if discrete else ComputeDevice)
        rows = links.measure("cpu", folder, 4, 1 << 20, 1)
        assert ("nvme_to_device_direct" in {row.name for row in rows}) == discrete
