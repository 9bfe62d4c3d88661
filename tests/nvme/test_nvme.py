"""Tensors on NVMe: every byte, on every path, as `infinity.nvme` promises."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import math
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import infinity
from infinity import native, nvme
from infinity.cli.gc import collect
from infinity.nvme import Io, open_files, submit, tensor_file
from infinity.nvme import io as io_module
from support.children import CHILD
from support.liburing_binding import liburing_binding
from support.threads import in_threads

BLOCK = 4096
SLOW = 1 << 20  # bytes per second
AVAILABLE, REASON = native.aio().io_uring_available()
needs_io_uring = pytest.mark.skipif(not AVAILABLE, reason=f"io_uring: {REASON}")
KINDS = [pytest.param("posix"), pytest.param("io_uring", marks=needs_io_uring)]
each_engine = pytest.mark.parametrize("kind", KINDS)
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_huge_pages = pytest.mark.skipif(  # a virtual disk is given other memory through a buffer
    not HUGE.exists() or "[never]" in HUGE.read_text(), reason="no huge pages"
)
DTYPES = [
    *(
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.uint16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
    ),
    *(torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
]
OTHER_DTYPES = [torch.complex128, torch.complex32, torch.uint32, torch.uint64, torch.float8_e8m0fnu]


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bit patterns, NaNs and signed zeros too; for bool: any booleans."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(
        0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator
    )
    return raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def bytes_tensor(content: bytes) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if content
        else torch.empty(0, dtype=torch.uint8)
    )


def noise(size: int, seed: int = 0) -> torch.Tensor:
    return filled((size,), torch.uint8, seed)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        (a[k].dtype, a[k].shape, raw(a[k])) == (b[k].dtype, b[k].shape, raw(b[k])) for k in a
    )


@pytest.fixture(params=KINDS)
def io(request: pytest.FixtureRequest) -> Iterator[Io]:
    with Io(request.param, request_bytes=16 * BLOCK) as made:
        yield made


# Exactly the tensor's bytes, wherever they lie.

shapes = st.one_of(
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
    st.integers(0, 9 * BLOCK).map(lambda n: (n,)),
    st.just((3, 2 * BLOCK)),
)
places = st.one_of(st.integers(0, 5 * BLOCK), st.integers(0, 5).map(lambda block: block * BLOCK))


@each_engine
@settings(max_examples=80, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES + OTHER_DTYPES),
    shape=shapes,
    lead=st.integers(0, 70),
    offset=places,
    before=places,
    short=st.sampled_from([0.0, 0.0, 1.0]),
)
def test_any_tensor_at_any_place(
    kind: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    lead: int,
    offset: int,
    before: int,
    short: float,
) -> None:
    count = math.prod(shape)
    tensor = filled((lead + count + 1,), dtype)[lead : lead + count].reshape(shape)
    old = raw(noise(before, seed=1))
    with tempfile.TemporaryDirectory() as folder, Io(kind, request_bytes=4 * BLOCK) as io:
        path = Path(folder, "data")
        path.write_bytes(old)
        io.engine.set_faults(seed=before, short_fraction=short)
        io.write(tensor, path, offset)
        expected = bytearray(old.ljust(offset if count else 0, b"\0"))
        expected[offset : offset + len(raw(tensor))] = raw(tensor)
        assert path.read_bytes() == expected, (
            "no other byte changes, and the file is as long as is needed"
        )

        around = filled((lead + count + 5,), dtype, seed=2)
        neighbours = raw(around[:lead]), raw(around[lead + count :])
        target = around[lead : lead + count].reshape(shape)
        assert io.read(target, str(path), offset) is target
        assert raw(target) == raw(tensor)
        assert (raw(around[:lead]), raw(around[lead + count :])) == neighbours


operations = st.tuples(st.integers(0, 2), places, st.integers(0, 3 * BLOCK), st.integers(0, 3))


@each_engine
@settings(max_examples=40, deadline=None)
@given(items=st.lists(operations, max_size=12))
def test_many_tensors_in_one_call(kind: str, items: list[tuple[int, int, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder, Io(kind, depth=2) as io:
        model: dict[Path, bytearray] = {}
        requests, taken = [], set()
        for number, (file, offset, size, lead) in enumerate(items):
            path = Path(folder, str(file))
            span = {(path, position) for position in range(offset, offset + size)}
            if span & taken:
                continue  # the order of writes that overlap is the caller's
            taken |= span
            tensor = noise(lead + size, number)[lead:]
            requests.append((tensor, path, offset))
            content = model.setdefault(path, bytearray())
            if size:
                content.extend(bytes(max(offset + size - len(content), 0)))
                content[offset : offset + size] = raw(tensor)
        io.write_many(requests)
        assert {path: path.read_bytes() for path in Path(folder).iterdir()} == model
        targets = [(torch.zeros_like(tensor), path, offset) for tensor, path, offset in requests]
        got = io.read_many(iter(targets))
        assert [id(tensor) for tensor in got] == [id(tensor) for tensor, _, _ in targets]
        assert all(
            torch.equal(tensor, request[0]) for tensor, request in zip(got, requests, strict=True)
        )


def test_neighbours_in_one_block_may_be_written_at_once(io: Io, tmp_path: Path) -> None:
    size, count, path = 999, 64, tmp_path / "data"
    tensors = [noise(size, seed) for seed in range(count)]

    def work(thread: int) -> None:
        for i in range(thread, count, 8):
            io.write(tensors[i], path, i * size)

    in_threads(8, work)
    assert path.read_bytes() == b"".join(map(raw, tensors))


@needs_huge_pages
def test_whole_blocks_move_without_a_copy(io: Io, tmp_path: Path) -> None:
    tensor = nvme.empty(1024, BLOCK // 4, dtype=torch.float32)
    assert (tensor.shape, tensor.dtype, tensor.data_ptr() % (2 << 20)) == (
        (1024, BLOCK // 4),
        torch.float32,
        0,
    )
    io.write(tensor.normal_(), tmp_path / "data", 3 * BLOCK)
    back = io.read(nvme.empty(1024, BLOCK // 4), tmp_path / "data", 3 * BLOCK)
    assert torch.equal(back, tensor)
    assert io.engine.counters()["bounced_bytes"] == 0
    assert nvme.empty(0, 3).shape == (0, 3)


def test_a_file_that_grows_gets_its_blocks_and_a_sparse_one_stays_sparse(
    io: Io, tmp_path: Path
) -> None:
    dense, sparse = tmp_path / "dense", tmp_path / "sparse"
    tensor = noise(open_files.RESERVE_BYTES + 5)
    io.engine.set_faults(fail_write_at=0)
    with pytest.raises(infinity.NvmeError):
        io.write(tensor, dense)
    assert dense.stat().st_blocks * 512 >= tensor.numel(), (
        "reserved at once, not request by request"
    )
    io.write_many([(tensor, sparse, 1 << 40), (tensor[:5], sparse, 0)])
    assert sparse.stat().st_size == (1 << 40) + tensor.numel()
    assert sparse.stat().st_blocks * 512 < 2 * tensor.numel()
    io.write(tensor, sparse, sparse.stat().st_size)
    assert sparse.stat().st_blocks * 512 < 3 * tensor.numel()


def test_a_new_file_has_the_mode_that_others_have(io: Io, tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    io.write(noise(3), tmp_path / "data")
    assert (tmp_path / "data").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_file_that_may_only_be_read(io: Io) -> None:
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as folder:
        path, tensor = Path(folder, "model"), noise(3 * BLOCK)
        io.save({"a": tensor}, path)
        path.chmod(0o444)
        Path(folder).chmod(0o755)
        if root:
            os.seteuid(65534)  # root may do everything
        try:
            assert torch.equal(io.load(path)["a"], tensor)
            assert torch.equal(
                io.read(torch.zeros_like(tensor), path, path.stat().st_size - tensor.numel()),
                tensor,
            )
            with pytest.raises(PermissionError):
                io.write(tensor, path)
        finally:
            if root:
                os.seteuid(0)


# What one engine writes, others read.


@needs_io_uring
def test_the_engines_read_each_other(tmp_path: Path) -> None:
    with Io("posix") as posix, Io("io_uring") as uring:
        for seed, (writer, reader) in enumerate([(posix, uring), (uring, posix)]):
            tensor = noise(3_000_001, seed)
            writer.write(tensor, tmp_path / "data", 7)
            assert torch.equal(reader.read(torch.zeros_like(tensor), tmp_path / "data", 7), tensor)


def with_liburing(operation: str, path: Path, data: bytearray, offset: int) -> None:
    """Move `data` with the PyPI package `liburing`, which shares no line of Python or C++ with this
    one."""
    liburing = liburing_binding()
    ring, completion = liburing.Ring(), liburing.Cqe()
    liburing.io_uring_queue_init(8, ring)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        prepare = getattr(liburing, f"io_uring_prep_{operation}")
        prepare(liburing.io_uring_get_sqe(ring), descriptor, data, offset)
        liburing.io_uring_submit(ring)
        liburing.io_uring_wait_cqe(ring, completion)
        entry = completion[0]
        assert entry.res == len(data)
        liburing.io_uring_cqe_seen(ring, entry)
    finally:
        os.close(descriptor)
        liburing.io_uring_queue_exit(ring)


@needs_io_uring
@pytest.mark.parametrize("offset", [0, 77, 2 * BLOCK])
def test_an_independent_binding_reads_what_we_write(io: Io, tmp_path: Path, offset: int) -> None:
    tensor = filled((625_001,), torch.float32)
    io.write(tensor, tmp_path / "data", offset)
    back = bytearray(tensor.nbytes)
    with_liburing("read", tmp_path / "data", back, offset)
    assert back == raw(tensor)


@needs_io_uring
@pytest.mark.parametrize("offset", [0, 77, 2 * BLOCK])
def test_we_read_what_an_independent_binding_writes(io: Io, tmp_path: Path, offset: int) -> None:
    tensor = filled((625_001,), torch.float32)
    with_liburing("write", tmp_path / "data", bytearray(raw(tensor)), offset)
    assert raw(io.read(torch.zeros_like(tensor), tmp_path / "data", offset)) == raw(tensor)


# Failures say what, where and how far.


def details(error: infinity.NvmeError) -> tuple[Any, ...]:
    return error.operation, error.path, error.offset, error.errno, error.asked, error.done


@pytest.mark.parametrize("offset", [0, 100])
@pytest.mark.parametrize("nth", [0, 1, 3])
def test_the_nth_failure_is_an_error_with_the_bytes_before_it(
    tmp_path: Path, nth: int, offset: int
) -> None:
    path, size = tmp_path / "data", 4 * 2 * BLOCK
    tensor, old = noise(size), noise(size, 1)
    # An unaligned write is: the rest of its first block, pieces, and what is in its last block.
    before = nth * 2 * BLOCK if offset == 0 else [0, BLOCK - offset, 0, 5 * BLOCK - offset][nth]
    with Io("posix", request_bytes=2 * BLOCK, threads=1) as io:
        io.write(old, path, offset)
        io.engine.set_faults(fail_write_at=nth, fail_errno=errno.ENXIO)
        with pytest.raises(infinity.NvmeError, match="No such device or address") as failure:
            io.write(tensor, path, offset)
        assert details(failure.value) == (
            "write",
            str(path),
            offset,
            errno.ENXIO,
            size,
            failure.value.done,
        )
        assert offset or failure.value.done == before
        done = failure.value.done
        assert path.read_bytes()[offset:][:done] == raw(tensor)[:done]
        io.engine.set_faults(fail_read_at=nth)
        with pytest.raises(infinity.NvmeError, match="Input/output error") as failure:
            io.read(torch.empty_like(tensor), path, offset)
        assert details(failure.value) == (
            "read",
            str(path),
            offset,
            errno.EIO,
            size,
            failure.value.done,
        )


@pytest.mark.parametrize("size", [0, 1, BLOCK, 5 * BLOCK - 3])
def test_a_file_that_is_too_short(io: Io, tmp_path: Path, size: int) -> None:
    path = tmp_path / "data"
    path.write_bytes(raw(noise(size)))
    with pytest.raises(infinity.NvmeError, match="the file ends before the asked bytes") as failure:
        io.read(torch.empty(size + 1, dtype=torch.uint8), path)
    assert details(failure.value) == ("read", str(path), 0, 0, size + 1, size)
    with pytest.raises(infinity.NvmeError):
        io.read(torch.empty(1, dtype=torch.uint8), path, size)
    io.read(torch.empty(0), path, size + 100)


def test_of_many_failures_the_first_of_the_call_is_raised_and_all_are_over(
    io: Io, tmp_path: Path
) -> None:
    tensor = noise(BLOCK)
    io.write(tensor, tmp_path / "whole")
    io.write(tensor[:10], tmp_path / "short")
    items = [
        (torch.zeros_like(tensor), tmp_path / name) for name in ("whole", "short", "short", "whole")
    ]
    ticket = io.read_many_async(items)
    for _ in range(2):
        with pytest.raises(infinity.NvmeError) as failure:
            ticket.wait()
        assert details(failure.value) == ("read", str(tmp_path / "short"), 0, 0, BLOCK, 10)
    assert ticket.done()
    assert torch.equal(items[0][0], tensor)
    assert torch.equal(items[3][0], tensor)
    io.drain()  # it was raised


def test_a_failure_that_nobody_waited_for_is_raised_by_drain_or_close(
    tmp_path: Path, kind: str = "posix"
) -> None:
    io = Io(kind)
    for end in (io.drain, io.close):
        io.engine.set_faults(fail_write_at=0)
        io.write_async(noise(10), tmp_path / "data")
        for _ in range(300):
            io.write_async(noise(10), tmp_path / "other").wait()  # lets go of what is complete
        with pytest.raises(infinity.NvmeError, match="Input/output error"):
            end()
        end()


def test_files_that_cannot_be_opened(io: Io, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        io.read_many([(noise(5), tmp_path / "missing")])
    assert missing.value.filename == str(tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        io.write(noise(5), tmp_path)
    with pytest.raises(NotADirectoryError):
        io.write(noise(5), "/dev/null/x")
    assert list(tmp_path.iterdir()) == []


def test_what_came_before_a_missing_file_is_over_when_the_error_comes(
    io: Io, tmp_path: Path
) -> None:
    io.write(noise(16 * BLOCK), tmp_path / "data")
    io.engine.set_faults(bytes_per_second=SLOW)
    tensor = torch.zeros(16 * BLOCK, dtype=torch.uint8)
    with pytest.raises(FileNotFoundError):
        io.read_many([(tensor, tmp_path / "data"), (tensor, tmp_path / "missing")])
    assert torch.equal(tensor, noise(16 * BLOCK)), "nothing is still being written into it"


@pytest.mark.root
def test_no_room(io: Io, mount: Callable[[str], Path]) -> None:
    """Nothing is made, and a file that was there is as it was."""
    place = mount("size=8m")
    path = place / "data"

    def fail(number: int, size: int) -> None:
        with pytest.raises(OSError, match=r"No space left .* are to be added, and .* free") as said:
            io.write_many([(noise(size), path, i * size) for i in range(number)])
        assert (said.value.errno, said.value.filename) == (errno.ENOSPC, str(path))

    for number, size in ((3, open_files.RESERVE_BYTES - 1), (3, 10 << 20), (1, 9 << 20)):
        fail(number, size)
        assert list(place.iterdir()) == []
    io.write(noise(1 << 20), path)
    before = path.read_bytes()
    fail(3, open_files.RESERVE_BYTES)
    assert path.read_bytes() == before
    io.write(noise(1 << 20, 1), path, 30 << 20)  # it stays sparse
    path.unlink()
    io.write(noise(7 << 20), path)
    io.write(noise(2 << 20), place / "data")  # over what is there
    with pytest.raises(OSError, match="No space left"):
        io.write(noise(2 << 20), place / "another")
    path.unlink()
    with pytest.raises(OSError) as failure:
        io.save({"a": noise(10 << 20)}, place / "model")
    assert failure.value.errno == errno.ENOSPC
    assert list(place.iterdir()) == []


def test_a_limit_on_the_size_of_files_is_named(io: Io, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda _: (1 << 20, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match=r"may have 1 MiB \(RLIMIT_FSIZE\); raise") as said:
            io.write(noise(1 << 20), tmp_path / "data", 1)
        assert said.value.errno == errno.EFBIG
        assert list(tmp_path.iterdir()) == []
        io.write(noise(1 << 20), tmp_path / "data")


# What cannot be meant is refused before anything has moved.


def strided() -> torch.Tensor:
    return torch.zeros(4, 6).t()


def freed() -> torch.Tensor:
    tensor = torch.zeros(10)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(3)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "list": (lambda: [1, 2], "takes a torch.Tensor, not list"),
    "transposed": (strided, r"strides \(1, 6\).*\.contiguous\(\)"),
    "every second": (lambda: torch.zeros(10)[::2], r"strides \(2,\).*\.contiguous\(\)"),
    "expanded": (lambda: torch.zeros(1).expand(5), r"\.contiguous\(\)"),
    "meta": (lambda: torch.zeros(3, device="meta"), "a tensor on meta has no bytes"),
    "fake": (fake, "a FakeTensor has no memory of its own"),
    "sparse": (lambda: torch.zeros(3, 3).to_sparse(), "sparse.* is more than its bytes"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8),
        "quantized tensor is more",
    ),
    "conjugated": (lambda: torch.zeros(3, dtype=torch.complex64).conj(), r"resolve_conj\(\)"),
    "negated": (
        lambda: torch.zeros(3, dtype=torch.complex64).conj().imag.contiguous().clone()._neg_view(),
        r"resolve_neg\(\)",
    ),
    "freed": (freed, "has been freed or shrunk"),
}


@pytest.mark.filterwarnings("ignore")  # of torch, about quantization
@pytest.mark.parametrize("operation", ["write", "read", "write_async", "read_many", "save"])
@pytest.mark.parametrize("name", WRONG)
def test_tensors_that_are_not_their_bytes(
    io: Io, tmp_path: Path, name: str, operation: str
) -> None:
    make, message = WRONG[name]
    fine, tensor = torch.zeros(3), make()
    with pytest.raises((TypeError, ValueError), match=message):
        if operation == "read_many":
            io.read_many([(fine, tmp_path / "a"), (tensor, tmp_path / "b")])
        elif operation == "save":
            io.save({"fine": fine, "x": tensor}, tmp_path / "model")
        else:
            getattr(io, operation)(tensor, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("offset", [-1, 1.0, "0", True, None])
def test_offsets_are_numbers_of_bytes(io: Io, tmp_path: Path, offset: Any) -> None:
    with pytest.raises(ValueError, match="offset must be a number of bytes"):
        io.write(torch.zeros(3), tmp_path / "a", offset)
    assert list(tmp_path.iterdir()) == []


def test_paths(io: Io, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="null byte"):
        io.write(torch.zeros(3), f"{tmp_path}/a\0b")
    with pytest.raises(TypeError):
        io.write(torch.zeros(3), 5)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe")  # not UTF-8
    io.write(torch.ones(3), odd)
    assert torch.equal(io.read(torch.zeros(3), odd), torch.ones(3))
    with pytest.raises(infinity.NvmeError) as failure:
        io.read(torch.zeros(4), odd)
    assert failure.value.path == odd


def test_autograd_is_not_fooled(io: Io, tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(3))
    io.write(weight, tmp_path / "data")
    with pytest.raises(ValueError, match=r"requires grad; read inside torch\.no_grad"):
        io.read(weight, tmp_path / "data")
    result = (weight * weight).sum()
    with torch.no_grad():
        io.read(weight, tmp_path / "data")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()
    with torch.inference_mode():
        assert torch.equal(io.read(torch.zeros(3), tmp_path / "data"), torch.ones(3))


def test_a_parameter_that_lives_on_another_tier_is_refused_by_name(io: Io, tmp_path: Path) -> None:
    config = infinity.Config(
        nvme=tmp_path / "states", gpu_memory="1MiB", cpu_memory="4MiB", precision="fp32"
    )
    (tmp_path / "states").mkdir()
    model = infinity.wrap(nn.Sequential(nn.Linear(8, 8)), config)
    with infinity.engine(model):
        for use in (io.write, io.read):
            with pytest.raises(
                infinity.ShardedParameterError, match=r"0\.weight .*infinity.gathered"
            ):
                use(model[0].weight, tmp_path / "data")
        with infinity.gathered(model):
            io.write(model[0].weight, tmp_path / "data")
            assert (tmp_path / "data").read_bytes() == raw(model[0].weight)


# Tickets keep what they need, and nothing else.


def test_a_tensor_lives_until_its_bytes_have_moved_and_no_longer(io: Io, tmp_path: Path) -> None:
    content = raw(noise(32 * BLOCK))
    io.engine.set_faults(bytes_per_second=SLOW)
    for wait in (True, False):
        tensor = bytes_tensor(content)
        alive = weakref.ref(tensor)
        ticket = io.write_async(tensor, tmp_path / "data")
        assert not ticket.done()
        del tensor
        if not wait:
            del ticket
        gc.collect()
        assert alive() is not None
        if wait:
            ticket.wait()
            assert ticket.done()
        else:
            io.drain()
        assert alive() is None
        assert (tmp_path / "data").read_bytes() == content
        (tmp_path / "data").unlink()


def test_what_is_complete_is_let_go_of_while_others_are_under_way(io: Io, tmp_path: Path) -> None:
    tensor = noise(10)
    alive = weakref.ref(tensor)
    done = io.write_async(tensor, tmp_path / "data")
    del tensor
    while not done.done():
        os.sched_yield()
    assert alive() is None
    references = []
    for i in range(50):
        tensor = noise(10, i)
        references.append(weakref.ref(tensor))
        io.write_async(tensor, tmp_path / "data", 10 * i)
        io.engine.drain()
    del tensor
    io.write(noise(10), tmp_path / "data")
    assert not any(reference() is not None for reference in references)


def test_a_file_may_go_while_it_is_written(io: Io, tmp_path: Path) -> None:
    path = tmp_path / "data"
    io.engine.set_faults(bytes_per_second=SLOW)
    first, second = noise(16 * BLOCK), noise(16 * BLOCK, 1)
    ticket = io.write_async(first, path)
    path.rename(tmp_path / "renamed")
    later = io.write_async(second, path)
    ticket.wait()
    later.wait()
    assert (tmp_path / "renamed").read_bytes() == raw(first)
    assert path.read_bytes() == raw(second), "a name means the file that it names now"


def test_descriptors_are_bounded_and_none_is_left(
    tmp_path: Path, footprint: Callable[[], Any]
) -> None:
    io = Io("posix", depth=4)
    tensors = [noise(100, i) for i in range(300)]
    left, most = footprint(), 0
    io.engine.set_faults(bytes_per_second=256 << 10)

    def watched() -> Iterator[tuple[torch.Tensor, Path]]:
        for i, tensor in enumerate(tensors):
            yield tensor, tmp_path / str(i)

    class Counting(open_files.Files):
        def get(self, path: bytes, direct: bool = True) -> Any:
            nonlocal most
            most = max(most, len(list(Path("/proc/self/fd").iterdir())))
            return super().get(path, direct)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io_module, "Files", Counting)
        io.write_many(watched())
    assert footprint() == left
    assert (
        open_files.OPEN_FILES / 2
        < most
        <= open_files.OPEN_FILES + 2 * 4 + len(left.descriptors) + 2
    )
    assert all((tmp_path / str(i)).read_bytes() == raw(tensor) for i, tensor in enumerate(tensors))
    io.close()


def test_close_waits_for_what_is_in_flight(tmp_path: Path, kind: str = "posix") -> None:
    for end in ("close", "with", "drop"):
        io = Io(kind, depth=2, request_bytes=BLOCK)
        io.engine.set_faults(bytes_per_second=SLOW)
        tensors = [noise(4 * BLOCK, i) for i in range(8)]
        tickets = [
            io.write_async(tensor, tmp_path / end, i * 4 * BLOCK)
            for i, tensor in enumerate(tensors)
        ]
        assert not tickets[-1].done()
        if end == "close":
            io.close()
            io.close()
        elif end == "with":
            with io:
                pass
        else:
            del io
        assert all(ticket.done() for ticket in tickets)
        for ticket in tickets:
            ticket.wait()
        assert (tmp_path / end).read_bytes() == b"".join(map(raw, tensors))


def test_a_dropped_io_says_what_failed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    io = Io("posix")
    io.engine.set_faults(fail_write_at=0)
    io.write_async(noise(5), tmp_path / "data")
    del io
    assert "Input/output error" in caplog.text
    assert str(tmp_path / "data") in caplog.text


def test_a_closed_io_says_so(io: Io, tmp_path: Path) -> None:
    io.close()
    for use in (
        lambda: io.write(noise(3), tmp_path / "a"),
        lambda: io.load(tmp_path / "a"),
        lambda: io.engine,
    ):
        with pytest.raises(ValueError, match=r"this infinity.nvme.Io is closed"):
            use()
    with pytest.raises(ValueError, match="closed"):
        io.save({"a": noise(3)}, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options", [{"engine": "aio"}, {"depth": 0}, {"request_bytes": 1000}, {"threads": 0}]
)
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Io(**options)


def test_many_threads_share_the_module(tmp_path: Path) -> None:
    def work(thread: int) -> None:
        tensors = [noise(1 + 997 * i, 100 * thread + i) for i in range(30)]
        path = tmp_path / str(thread)
        tickets = [nvme.write_async(tensor, path, 30_000 * i) for i, tensor in enumerate(tensors)]
        for ticket in reversed(tickets):
            ticket.wait()
        back = [torch.zeros_like(tensor) for tensor in tensors]
        for i, ticket in enumerate(
            [nvme.read_async(target, path, 30_000 * i) for i, target in enumerate(back)]
        ):
            ticket.wait()
            assert torch.equal(back[i], tensors[i])
        nvme.save({"a": tensors[9], "b": tensors[7]}, tmp_path / f"{thread}.safetensors")
        assert torch.equal(nvme.load(tmp_path / f"{thread}.safetensors")["b"], tensors[7])

    in_threads(12, work)
    nvme.drain()


def test_many_threads_may_wait_for_one_ticket(io: Io, tmp_path: Path) -> None:
    io.engine.set_faults(bytes_per_second=SLOW, fail_write_at=2)
    ticket = io.write_async(noise(64 * BLOCK), tmp_path / "data")
    raised: list[infinity.NvmeError] = []

    def wait(_: int) -> None:
        with pytest.raises(infinity.NvmeError) as failure:
            ticket.wait()
        raised.append(failure.value)

    in_threads(8, wait)
    assert len({id(error) for error in raised}) == 8
    assert len({details(error) for error in raised}) == 1


def test_the_module_functions_are_those_of_io(tmp_path: Path) -> None:
    tensor, path = noise(5000), tmp_path / "data"
    nvme.write(tensor, path)
    assert torch.equal(nvme.read(torch.zeros_like(tensor), path), tensor)
    nvme.write_async(tensor[:9], path, 5).wait()
    assert path.read_bytes() == raw(tensor[:5]) + raw(tensor[:9]) + raw(tensor[14:])
    nvme.write_many([(tensor, path), (tensor, path, 5000)])
    (back,) = nvme.read_many([(torch.zeros_like(tensor), path, 2500)])
    assert torch.equal(back, torch.cat([tensor[2500:], tensor[:2500]]))
    nvme.write_many_async([(tensor, path, 1)]).wait()
    nvme.read_many_async([(back, path, 1)]).wait()
    assert torch.equal(back, tensor)
    nvme.drain()


# Processes.


def run(script: str, *arguments: object) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *map(str, arguments)],
        capture_output=True,
        check=True,
        **CHILD,
    )
    return result.stdout.strip()


@each_engine
def test_pinned_memory_is_used_and_kept_until_the_end(tmp_path: Path, kind: str) -> None:
    whole = nvme.empty(64 * BLOCK, dtype=torch.uint8)
    whole.copy_(noise(64 * BLOCK))
    content, alive = raw(whole), weakref.ref(whole)
    with Io(kind) as io:
        pinned = io.pin(whole)
        if pinned and kind == "io_uring":
            with pytest.raises(ValueError, match="registered"):
                io.pin(whole[BLOCK:])
        io.write(whole[:-BLOCK], tmp_path / "data")
        io.read(whole[BLOCK:], tmp_path / "data")
        assert raw(whole) == content[:BLOCK] + content[:-BLOCK]
        assert io.engine.counters()["fixed_requests"] == (2 if pinned and kind == "io_uring" else 0)
        del whole
        assert (alive() is not None) == pinned
    assert alive() is None
    with pytest.raises(ValueError, match="closed"):
        io.pin(torch.ones(3))


FORKING = """
import os, sys, torch
from infinity import nvme
path, kind = sys.argv[1:]
own = nvme.Io(kind)
tensor = torch.arange(5000.0)
nvme.write(tensor, path)
own.engine.set_faults(bytes_per_second=1 << 17)
ticket = own.write_async(torch.arange(9000.0), path + "2")
child = os.fork()
if child == 0:
    assert torch.equal(nvme.read(torch.zeros(5000), path), tensor), "the module works on"
    refused = 0
    calls = [lambda: own.write(tensor, path), lambda: own.engine]
    for use in (*calls, ticket.wait, ticket.done, own.drain):
        try:
            use()
        except ValueError as error:
            refused += "was forked; make an infinity.nvme.Io of your own" in str(error)
    own.close()
    del own, ticket
    sys.exit(refused)  # runs the finalizers that the child inherited
status = os.waitpid(child, 0)[1]
ticket.wait()
assert torch.equal(own.read(torch.zeros(9000), path + "2"), torch.arange(9000.0))
assert torch.equal(nvme.read(torch.zeros(5000), path), tensor)
print(os.waitstatus_to_exitcode(status))
"""


@each_engine
def test_a_forked_child_works_and_leaves_its_parents_io_alone(tmp_path: Path, kind: str) -> None:
    assert run(FORKING, tmp_path / "data", kind) == "5"


ENDING = """
import sys, torch
from infinity import nvme
if sys.argv[2] == "own":
    io = nvme.Io()
    io.engine.set_faults(bytes_per_second=1 << 20)
    io.write_async(torch.ones(100_000), sys.argv[1])
else:
    nvme.write_async(torch.ones(100_000), sys.argv[1])
"""


@pytest.mark.parametrize("which", ["own", "shared"])
def test_the_end_of_the_process_waits(tmp_path: Path, which: str) -> None:
    run(ENDING, tmp_path / "data", which)
    assert (tmp_path / "data").read_bytes() == raw(torch.ones(100_000))


# One file with many tensors.

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
    lambda name: name != "__metadata__"
)
tensors_by_name = st.dictionaries(
    names, st.tuples(st.sampled_from(DTYPES), shapes), max_size=8
).map(
    lambda table: {
        name: filled(shape, dtype, i) for i, (name, (dtype, shape)) in enumerate(table.items())
    }
)


@each_engine
@settings(max_examples=40, deadline=None)
@given(tensors=tensors_by_name, metadata=st.none() | st.dictionaries(names, names, max_size=3))
def test_what_we_save_safetensors_loads_and_the_other_way_round(
    kind: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None
) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        Io(kind) as io,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(submit, "SLOT_BYTES", 4 * BLOCK)
        patch.setattr(tensor_file, "DIRECT_BYTES", 2 * BLOCK)
        ours, theirs = Path(folder, "ours"), Path(folder, "theirs")
        io.save(tensors, ours, metadata)
        assert same(load_file(ours), tensors)
        assert same(io.load(ours), tensors)
        with safe_open(ours, "pt") as opened:
            assert (opened.metadata() or {}) == (metadata or {})
        # Without a tensor, it writes broken JSON for {}
        save_file(tensors, theirs, metadata or None)
        assert same(io.load(theirs), tensors)
        for chosen in list(tensors)[::2], []:
            assert same(io.load(theirs, chosen), {name: tensors[name] for name in chosen})


@needs_huge_pages
def test_large_tensors_are_saved_and_loaded_without_a_copy(io: Io, tmp_path: Path) -> None:
    tensors = {str(i): nvme.empty(1 << 20, dtype=torch.float32).normal_() for i in range(3)}
    tensors["odd"] = torch.randn(5)
    io.save(tensors, tmp_path / "model")
    bounced = io.engine.counters()["bounced_bytes"]
    assert bounced <= BLOCK
    loaded = io.load(tmp_path / "model")
    assert io.engine.counters()["bounced_bytes"] - bounced <= (64 << 10) + (2 << 20), (
        "but for the header and what ends a page"
    )
    assert same(loaded, tensors)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in loaded.values())
    loaded["0"][0] = 5.0
    assert loaded["1"].requires_grad_().is_leaf


def test_a_file_whose_tensors_are_not_aligned(io: Io, tmp_path: Path) -> None:
    """Files of others may have the data at any byte, and mix dtypes."""
    a, b = filled((BLOCK,), torch.float64), filled((3,), torch.uint8)
    for pad in range(9):
        table = {
            "b": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
            "a": {"dtype": "F64", "shape": [BLOCK], "data_offsets": [3, 3 + 8 * BLOCK]},
        }
        header = json.dumps(table).encode() + b" " * pad
        (tmp_path / "model").write_bytes(
            len(header).to_bytes(8, "little") + header + raw(b) + raw(a)
        )
        loaded = io.load(tmp_path / "model")
        assert same(loaded, {"a": a, "b": b})
        assert loaded["a"].data_ptr() % 8 == 0


@settings(max_examples=40, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.integers(0, 3 * BLOCK), st.integers(0, 5 * BLOCK)), max_size=8),
    gap=st.integers(0, 9000),
)
def test_staging_scatters_what_it_reads(pieces: list[tuple[int, int]], gap: int) -> None:
    """As for tensors on a GPU, here into host memory."""
    file, position = noise(70 * BLOCK), 0
    with (
        tempfile.TemporaryDirectory() as folder,
        Io("posix") as io,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(submit, "SLOT_BYTES", 2 * BLOCK)
        path = Path(folder, "data")
        path.write_bytes(raw(file))
        targets = []
        for skip, size in pieces:
            position += skip
            targets.append((position, torch.zeros(size, dtype=torch.uint8)))
            position += size
        with open_files.Files() as files:
            io._submitter.stage("read", files, os.fsencode(path), targets, gap)
        assert all(torch.equal(target, file[at : at + target.numel()]) for at, target in targets)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_a_gpu(io: Io, tmp_path: Path) -> None:
    """In several runs of the slots, after what is queued on the caller's stream, and in one file
    with others."""
    path, count = tmp_path / "data", 5 * submit.SLOT_BYTES // 4 + 3
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor = torch.zeros(count, device="cuda")
        for _ in range(50):
            tensor += 1
        io.write(tensor, path, 77)
        assert path.read_bytes()[77:] == raw(torch.full((count,), 50.0))
        target = torch.randn(count + 1, device="cuda")[1:]
        ticket = io.read_async(target, path, 77)
        ticket.wait()
        assert torch.equal(target, tensor)
        mixed = {
            "gpu": tensor,
            "cpu": torch.randn(7),
            "small": torch.ones(3, dtype=torch.bool, device="cuda"),
        }
        io.save(mixed, tmp_path / "model")
        for device in ("cpu", "cuda"):
            loaded = io.load(tmp_path / "model", device=device)
            assert all(value.device.type == device for value in loaded.values())
            assert same(
                {name: value.cpu() for name, value in loaded.items()},
                {name: v.cpu() for name, v in mixed.items()},
            )
        with pytest.raises(infinity.NvmeError) as failure:
            io.read(torch.zeros(count + 1, device="cuda"), path, 77)
        assert details(failure.value) == ("read", str(path), 77, 0, 4 * count + 4, 4 * count)


def test_a_failed_save_leaves_what_was_there(io: Io, tmp_path: Path) -> None:
    path = tmp_path / "model"
    io.save({"a": torch.ones(3)}, path)
    before = path.read_bytes()
    for tensors in ({"a": noise(1 << 20)}, {"a": noise(3), "b": noise(5)}):
        for nth in range(2 if "b" not in tensors else 1):
            io.engine.set_faults(fail_write_at=nth)
            with pytest.raises(infinity.NvmeError, match="Input/output error") as caught:
                io.save(tensors, path)
            assert caught.value.path == caught.value.filename == str(path)
            assert path.read_bytes() == before
            assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError):
        io.save({"a": torch.ones(3)}, tmp_path / "missing" / "model")
    with pytest.raises(IsADirectoryError):
        io.save({"a": torch.ones(3)}, tmp_path)
    with pytest.raises(OSError, match=r"No such file or directory|Permission denied"):
        io.save({"a": torch.ones(3)}, "/proc/self/fdinfo/model")
    assert list(tmp_path.iterdir()) == [path]


KILLED = """
import os, signal, sys, threading, torch
from infinity import nvme
io = nvme.Io()
io.engine.set_faults(bytes_per_second=1 << 20)  # so that it takes four seconds
threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
io.save({"a": torch.ones(1 << 20)}, sys.argv[1])
"""


def test_a_killed_save_leaves_what_was_there(io: Io, tmp_path: Path) -> None:
    path = tmp_path / "model"
    io.save({"a": torch.zeros(3)}, path)
    result = subprocess.run([sys.executable, "-c", KILLED, str(path)], **CHILD)
    assert result.returncode == -signal.SIGKILL
    assert torch.equal(io.load(path)["a"], torch.zeros(3))
    (left,) = (one for one in tmp_path.iterdir() if one != path)
    assert collect(tmp_path).keys() == {str(left)}, "what it left is removed"
    assert list(tmp_path.iterdir()) == [path]


def test_a_path_that_is_not_utf8_works(io: Io, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9") / os.fsdecode(b"mod\xe8le")
    path.parent.mkdir()
    io.save({"a": torch.ones(3)}, path)
    assert torch.equal(io.load(path)["a"], torch.ones(3))
    io.engine.set_faults(fail_read_at=0)
    with pytest.raises(infinity.NvmeError) as caught:
        io.load(path)
    assert caught.value.path == str(path)
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_save_follows_links_and_keeps_modes(io: Io, tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    real, link = tmp_path / "real", tmp_path / "link"
    io.save({}, real)
    assert real.stat().st_mode == (tmp_path / "other").stat().st_mode
    assert io.load(real) == {}
    real.chmod(0o640)
    link.symlink_to(real)
    io.save({"a": torch.ones(2)}, link)
    assert link.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert torch.equal(load_file(real)["a"], torch.ones(2))


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        (
            {"a": torch.zeros(2, dtype=torch.complex128)},
            None,
            "'a' is torch.complex128, which a safetensors file cannot hold",
        ),
        (
            {"__metadata__": torch.zeros(2)},
            None,
            "a tensor's name must be a string other than '__metadata__'",
        ),
        ({5: torch.zeros(2)}, None, "a tensor's name must be a string"),
        ({"a": torch.zeros(2)}, {"a": 5}, "metadata must map strings to strings; 'a': 5"),
        ({"\ud800": torch.zeros(2)}, None, "surrogates"),
    ],
)
def test_what_the_format_cannot_hold(
    io: Io, tmp_path: Path, tensors: Any, metadata: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        io.save(tensors, tmp_path / "model", metadata)
    assert list(tmp_path.iterdir()) == []


def test_names_that_are_not_there(io: Io, tmp_path: Path) -> None:
    io.save({str(i): torch.zeros(2) for i in range(9)}, tmp_path / "model")
    with pytest.raises(
        infinity.WeightsError,
        match="has no tensor 'x', 'y'; it has '0', '1', '2', '3', '4' and 4 more",
    ):
        io.load(tmp_path / "model", ["1", "x", "y"])
    with pytest.raises(ValueError, match="device must be cpu or cuda, not meta"):
        io.load(tmp_path / "model", device="meta")


# Damaged files.


def entry(**fields: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} | fields


DAMAGED: list[tuple[Any, bytes, str]] = [
    (b"\xff{", b"", "its header is not JSON"),
    (b"[" * 100_000, b"", "its header is not JSON"),
    (b'{"a": 1, "a": 1}', b"", "a name is there twice"),
    ([], b"", "not a JSON object"),
    ({"__metadata__": {"a": 1}}, b"", "__metadata__ is not an object of strings"),
    ({"a": 5}, b"abcd", "'a' is not described by dtype, shape and data_offsets"),
    ({"a": entry(extra=1)}, b"abcd", "'a' is not described by"),
    ({"a": entry(dtype="F1")}, b"abcd", "'a' has dtype 'F1'; known are BOOL"),
    ({"a": entry(dtype=[])}, b"abcd", "'a' has dtype"),
    ({"a": entry(shape=[-4])}, b"abcd", r"'a' has shape \[-4\]"),
    ({"a": entry(shape=[True, 4])}, b"abcd", "'a' has shape"),
    ({"a": entry(shape=[4.0])}, b"abcd", "'a' has shape"),
    ({"a": entry(shape=[1 << 70, 0])}, b"abcd", "'a' has shape"),
    (
        {"a": entry(data_offsets=[4, 0])},
        b"abcd",
        r"'a' of shape \[4\] and dtype U8 is given -4 bytes",
    ),
    ({"a": entry(data_offsets=[0])}, b"abcd", "'a' has data_offsets"),
    ({"a": entry(data_offsets=[0, 5])}, b"abcde", "is given 5 bytes"),
    ({"a": entry(shape=[1 << 40, 1 << 40])}, b"abcd", "is given 4 bytes"),
    ({"a": entry(data_offsets=[1, 5])}, b"abcde", "'a' leaves a gap before it"),
    (
        {"a": entry(), "b": entry(data_offsets=[3, 7])},
        b"abcdefg",
        "'b' overlaps with the one before it",
    ),
    (
        {"a": entry(), "b": entry(data_offsets=[4, 8])},
        b"abcdef",
        "is cut off: tensor 'b' ends at byte",
    ),
    ({"a": entry()}, b"abcdef", "its tensors end at byte"),
    ({}, b"a", "its tensors end at byte"),
]


@pytest.fixture
def without_collection() -> Iterator[None]:
    """A finalizer that the collector calls at the limit of recursion fails, and pytest sees it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collection")
@pytest.mark.parametrize(
    ("header", "data", "message"), DAMAGED, ids=[message for _, _, message in DAMAGED]
)
def test_a_damaged_file_is_one_clear_error(
    tmp_path: Path, header: Any, data: bytes, message: str
) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "model"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.raises(infinity.WeightsError, match=message) as failure:
        nvme.load(path)
    assert str(path) in str(failure.value)


@pytest.mark.parametrize("size", [0, 7])
def test_a_file_without_a_header(tmp_path: Path, size: int) -> None:
    (tmp_path / "model").write_bytes(bytes(size))
    with pytest.raises(
        infinity.WeightsError, match=f"it ends after {size} bytes, inside the header's length"
    ):
        nvme.load(tmp_path / "model")
    for length, message in (
        (1000, "inside its header of 1000"),
        (1 << 62, "100000000 are allowed"),
    ):
        (tmp_path / "model").write_bytes(length.to_bytes(8, "little") + b"{}")
        with pytest.raises(infinity.WeightsError, match=message):
            nvme.load(tmp_path / "model")


GOOD = {
    "a": filled((7, 3), torch.float32),
    "b": filled((BLOCK,), torch.bfloat16),
    "c": filled((0, 2), torch.int8),
}


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_damage_is_either_seen_or_harmless(data: st.DataObject) -> None:
    """Cut, grown or with some bytes of the header changed: an error, or tensors that are views of
    what the file holds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model")
        if data.draw(st.booleans(), label="ours"):
            nvme.save(GOOD, path)
        else:
            save_file(GOOD, path)
        content = bytearray(path.read_bytes())
        header = 8 + int.from_bytes(content[:8], "little")
        kind = data.draw(st.sampled_from(["cut", "grow", "change"]))
        if kind == "cut":
            content = content[: data.draw(st.integers(0, len(content) - 1))]
        elif kind == "grow":
            content += bytes(data.draw(st.integers(1, 2 * BLOCK)))
        else:
            for _ in range(data.draw(st.integers(1, 4))):
                content[data.draw(st.integers(0, min(header, 300) - 1))] = data.draw(
                    st.integers(0, 255)
                )
        path.write_bytes(content)
        try:
            loaded = nvme.load(path)
        except infinity.WeightsError as error:
            assert str(path) in str(error)
        else:
            assert kind == "change"
            assert b"".join(sorted(map(raw, loaded.values()))) == b"".join(
                sorted(map(raw, load_file(path).values()))
            )


def test_a_file_that_shrinks_under_the_reader(io: Io, tmp_path: Path) -> None:
    io.save({"a": noise(1 << 20)}, tmp_path / "model")
    entries = tensor_file._entries

    def shrinking(*arguments: Any) -> Any:
        found = entries(*arguments)
        os.truncate(tmp_path / "model", 1 << 19)
        return found

    with (
        contextlib.closing(io),
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(infinity.NvmeError, match="the file ends"),
    ):
        patch.setattr(tensor_file, "_entries", shrinking)
        io.load(tmp_path / "model")
