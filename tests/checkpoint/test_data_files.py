"""Data files hold exactly what was written, move several requests at a time, and each tensor in
them is a file of torch.save."""

from __future__ import annotations

import io
import os
import random
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity import native
from infinity.checkpoint import data_file
from infinity.checkpoint.data_file import DataWriter, ReadAhead
from infinity.checkpoint.digest import as_text, crc32c
from infinity.checkpoint.frame import BLOCK_ALIGNED, frame
from infinity.checkpoint.inert import read_item
from infinity.checkpoint.manifest import ItemPlace

NAME = "__0_0.distcp"


# Frames


def content_of(dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
    """Some bytes as a tensor of this dtype and shape."""
    nbytes = torch.Size(sizes).numel() * dtype.itemsize
    data = torch.arange(nbytes).to(torch.uint8)
    return (data.view(dtype) if nbytes else torch.empty(0, dtype=dtype)).view(sizes)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.pairs
@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8),
        *(torch.int64, torch.uint16, torch.complex64, torch.float8_e4m3fn),
    ],
    ids=str,
)
@pytest.mark.parametrize("sizes", [(), (0,), (3,), (5, 7), (2, 3, 4), (1 << 17, 2)])
@pytest.mark.parametrize("at", [0, 1, 4095, 12345])
def test_a_framed_tensor_is_a_file_of_torch_save(
    dtype: torch.dtype, sizes: tuple[int, ...], at: int
) -> None:
    tensor, around = content_of(dtype, sizes), frame(at, dtype, sizes)
    content = around.head + bytes_of(tensor) + around.tail
    assert len(content) == around.length
    assert (at + len(around.head)) % (4096 if around.nbytes >= BLOCK_ALIGNED else 64) == 0
    for found in (torch.load(io.BytesIO(content), weights_only=True), read_item(content)):
        assert (found.dtype, found.shape, found.stride()) == (dtype, sizes, tensor.stride())
        assert bytes_of(found) == bytes_of(tensor)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.namelist()[-1] == "archive/data/0"


def test_a_frame_may_have_more_than_four_gibibytes(tmp_path: Path) -> None:
    """In a sparse file, which torch maps."""
    path, around = tmp_path / "large.pt", frame(0, torch.uint8, (5 << 30,))
    with path.open("wb") as file:
        file.write(around.head)
        file.truncate(around.length - len(around.tail))
        file.seek(0, os.SEEK_END)
        file.write(around.tail)
    found = torch.load(path, weights_only=True, mmap=True)
    assert found.shape == (5 << 30,)
    assert found[-1] == 0


# Files


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    parts=st.lists(st.integers(0, 5000), max_size=12),
    blocks=st.integers(1, 3),
    segment=st.sampled_from([64, 4096, 1 << 20]),
    seed=st.integers(0, 3),
)
def test_a_file_has_what_was_written_and_gives_it_back(
    parts: list[int],
    blocks: int,
    segment: int,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder, rng = tmp_path_factory.mktemp("data"), random.Random(seed)
    contents = [rng.randbytes(nbytes) for nbytes in parts]
    places, given = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_file, "BUFFER_BYTES", 4096 * blocks)
        patch.setattr(data_file, "SEGMENT_BYTES", segment)
        with closing(DataWriter(folder / NAME, "auto")) as file:
            file.reserve(sum(parts))
            for content in contents:
                begin, file.crc = file.tell(), 0
                file.write(content)
                places.append(ItemPlace(NAME, begin, len(content), None, as_text(file.crc)))
            file.finish()
        assert (folder / NAME).read_bytes() == b"".join(contents)
        patch.setattr(data_file, "RUN_BYTES", 4096 * blocks)
        wanted = [rng.choice(places) for _ in places] + places

        def open_file(name: str) -> int:
            given.append(name)
            return os.open(folder / name, os.O_RDONLY)

        longest = max(parts, default=0)
        with closing(ReadAhead(wanted, longest, open_file, folder, "auto")) as arriving:
            found = [(bytes_of(item), as_text(crc32c(item))) for item in arriving]
    assert [item for item, _ in found] == [contents[places.index(place)] for place in wanted]
    assert [crc for _, crc in found] == [place.digest for place in wanted]
    assert len(given) <= 1, "the file is opened once"


class LateEngine:
    """Each request completes no sooner than the next one is there, if there is any."""

    def __init__(self, real: Any, count: int) -> None:
        self._real, self.count = real, count
        self.submitted = 0

    def _submit(self, operation: str, *arguments: Any, **options: Any) -> Any:
        number = self.submitted
        self.submitted += 1
        ticket = getattr(self._real, operation)(*arguments, **options)
        engine = self

        class LateTicket:
            def wait(self) -> None:
                assert engine.submitted > min(number + 1, engine.count - 1)
                ticket.wait()

        return LateTicket()

    def read(self, *arguments: Any, **options: Any) -> Any:
        return self._submit("read", *arguments, **options)

    def write(self, *arguments: Any, **options: Any) -> Any:
        return self._submit("write", *arguments, **options)

    def close(self) -> None:
        self._real.close()


def test_requests_are_under_way_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No buffer is waited for before the one behind it was submitted."""
    monkeypatch.setattr(data_file, "BUFFER_BYTES", 4096)
    monkeypatch.setattr(data_file, "RUN_BYTES", 4096)
    real, count = native.make_engine, 20
    engines: list[LateEngine] = []

    def make_engine(*arguments: Any, **options: Any) -> LateEngine:
        engines.append(LateEngine(real(*arguments, **options), count))
        return engines[-1]

    monkeypatch.setattr(native, "make_engine", make_engine)
    with closing(DataWriter(tmp_path / NAME, "auto")) as file:
        for number in range(count):
            file.write(bytes([number]) * 4096)
        file.finish()
    places = [ItemPlace(NAME, 4096 * number, 4096) for number in range(count)]

    def open_file(name: str) -> int:
        return os.open(tmp_path / name, os.O_RDONLY)

    with closing(ReadAhead(places, 4096, open_file, tmp_path, "auto")) as arriving:
        assert [item[0].item() for item in arriving] == list(range(count))
    assert [engine.submitted for engine in engines] == [count, count]
