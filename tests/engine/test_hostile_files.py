"""Files and file systems that are not as they should be: one sentence that says what it is, in
bounded time and memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import save

import infinity
from infinity import native, nvme
from infinity.errors import ConfigError, InfinityError, WeightsError
from infinity.nvme import safetensors
from infinity.nvme.safetensors import DTYPES, Entry
from infinity.weights.load import open_weights
from support.configs import config_of

# The compiled modules


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`loading(error)`: every compiled module fails so."""

    def fail(error: Exception) -> None:
        def refuse(name: str) -> None:
            raise error

        monkeypatch.setattr(native.importlib, "import_module", refuse)

    native._load.cache_clear()
    native.cuda.cache_clear()
    yield fail
    monkeypatch.undo()
    native._load.cache_clear()
    native.cuda.cache_clear()


def test_a_module_that_is_not_there_is_called_missing(loading: Any) -> None:
    loading(ModuleNotFoundError("No module named 'infinity._aio'", name="infinity._aio"))
    with pytest.raises(
        InfinityError,
        match=r"^the compiled module infinity\._aio is missing; install the package with "
        r"`pip install \.`; where it is installed, start Python outside of /.*, "
        r"whose sources hide it$",
    ):
        native.aio()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            ImportError("x.so: cannot open shared object file: Too many open files"),
            "; raise the limit with `ulimit -n`",
        ),
        (OSError(24, "Too many open files", "x.so"), "; raise the limit with `ulimit -n`"),
        (ImportError("x.so: undefined symbol: y"), ""),
        (ModuleNotFoundError("No module named 'numpy'", name="numpy"), ""),
    ],
)
def test_a_module_that_cannot_be_loaded_says_why(loading: Any, error: Exception, text: str) -> None:
    loading(error)
    expected = f"the compiled module infinity._aio cannot be loaded: {error}{text}"
    with pytest.raises(InfinityError, match=f"^{re.escape(expected)}$"):
        native.aio()


def test_cuda_that_is_not_installed_is_no_error_but_descriptors_are(loading: Any) -> None:
    loading(
        ImportError("libcudart.so.12: cannot open shared object file: No such file or directory")
    )
    assert native.cuda() is None
    native.cuda.cache_clear()
    loading(ImportError("libcudart.so.12: cannot open shared object file: Too many open files"))
    with pytest.raises(InfinityError, match="_cuda cannot be loaded"):
        native.cuda()


EXHAUSTED = """
import os, resource
from infinity import native

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
kept = []
try:
    while True:
        kept.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
engines = [lambda: native.make_engine("posix"), lambda: native.make_engine("auto")]
for attempt in (native.aio, *engines):
    try:
        attempt()
        print("made")
    except native.InfinityError as error:
        print(error)
    os.close(kept.pop())
for _ in range(8):
    os.close(kept.pop())
native.make_engine("auto").close()
print("fine")
"""


def test_exhausted_descriptors_are_called_so_and_nothing_is_remembered() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(infinity.__file__).parents[1])}
    output = subprocess.run(
        [sys.executable, "-c", EXHAUSTED],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    first, *others, last = output.splitlines()
    assert (
        first.endswith("Too many open files; raise the limit with `ulimit -n`")
        and "_aio cannot be loaded" in first
    )
    assert "missing" not in output and last == "fine" and len(others) == 2


def test_the_log_of_cufile_is_not_written_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native.tempfile, "gettempdir", lambda: str(tmp_path))
    ours = tmp_path / f"cufile-{os.getuid()}.log"
    assert native._cufile_log() == native._cufile_log() == str(ours)
    ours.unlink()
    ours.symlink_to(tmp_path / "precious")
    assert native._cufile_log() == os.devnull
    assert not (tmp_path / "precious").exists()


# Headers of safetensors files

FLOAT = '"dtype":"F32"'


def entries(content: bytes) -> list[Entry]:
    """What a file with this content holds, as `infinity.nvme.load` finds out."""
    start = safetensors.data_start(content[:8], len(content), "a file")
    return safetensors.parse(content[8:start], len(content), "a file")


def with_header(text: str | bytes, data: int = 0) -> bytes:
    header = text.encode() if isinstance(text, str) else text
    return len(header).to_bytes(8, "little") + header + bytes(data)


def refused(content: bytes) -> str:
    with pytest.raises(WeightsError) as caught:
        entries(content)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 500
    text.encode()
    return text


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (
            f'{{"a":{{{FLOAT},"shape":[4611686018427387904,4],"data_offsets":[0,4]}}}}',
            "is larger than any file",
        ),
        (
            f'{{"a":{{{FLOAT},"shape":[0,{2**62},{2**62}],"data_offsets":[0,0]}}}}',
            "is larger than any file",
        ),
        (
            f'{{"a":{{{FLOAT},"shape":[{",".join(["1"] * 65)}],"data_offsets":[0,4]}}}}',
            "has 65 dimensions; at most 64 are read",
        ),
        (f'{{"a":{{{FLOAT},"shape":[-1],"data_offsets":[0,4]}}}}', "has shape [-1]"),
        (f'{{"a":{{{FLOAT},"shape":[1],"data_offsets":[-0,4]}}}}', "'-0' is no size"),
        (f'{{"a":{{{FLOAT},"shape":[1],"data_offsets":[-4,0]}}}}', "has data_offsets [-4, 0]"),
        (f'{{"a":{{{FLOAT},"shape":[1],"data_offsets":[4,0]}}}}', "is given -4 bytes"),
        (f'{{"a":{{{FLOAT},"shape":[1.0],"data_offsets":[0,4]}}}}', "has shape [1.0]"),
        (f'{{"a":{{{FLOAT},"shape":[NaN],"data_offsets":[0,4]}}}}', "'NaN' is no size"),
        (f'{{"a":{{{FLOAT},"shape":[true],"data_offsets":[0,4]}}}}', "has shape [True]"),
        (
            f'{{"a":{{{FLOAT},"shape":[1],"data_offsets":[0,99999999999999999999]}}}}',
            "[0, 99999999999999999999]",
        ),
        (f'{{"a":{{{FLOAT},"shape":[],"data_offsets":[0,4]}},"a":{{}}}}', "a name is there twice"),
        (f'{{"a":{{{FLOAT},{FLOAT},"shape":[],"data_offsets":[0,4]}}}}', "a name is there twice"),
        (
            f'{{"\\ud800":{{{FLOAT},"shape":[],"data_offsets":[0,4]}}}}',
            r"the name '\ud800' is no text",
        ),
        (' {"a":1}', "its header is not a JSON object"),
        ("[]", "its header is not a JSON object"),
        (b'{"\xff":1}', "can't decode byte 0xff"),
        ('{"a":' * 20_000, "recursion depth"),
        ('{"a":1}', "is not described by dtype, shape and data_offsets"),
        (json.dumps({"n" * 10**6: 1}), "is not described by dtype, shape and data_offsets"),
        (
            json.dumps({"a": {"dtype": "F" * 10**6, "shape": [], "data_offsets": [0, 4]}}),
            "known are BOOL, U8",
        ),
        (
            json.dumps({"a": {"dtype": "F32", "shape": "x" * 10**6, "data_offsets": [0, 4]}}),
            "has shape 'xxx",
        ),
        ('{"__metadata__":{"a":1}}', "__metadata__ is not an object of strings"),
    ],
)
def test_a_header_that_cannot_be_is_refused_in_one_sentence(header: str | bytes, text: str) -> None:
    assert text in refused(with_header(header, 4))


@pytest.mark.parametrize(
    "middle",
    [
        ",".join([str(2**62)] * 400_000),  # a product of 25 million bits
        "2," * 4_000_000 + "2",
        "9" * 8_000_000,
        "0." + "1" * 8_000_000,
        "1e" + "9" * 8_000_000,
        "[" * 1_000_000,
    ],
    ids=[
        "huge extents",
        "many extents",
        "a long integer",
        "a long fraction",
        "a long exponent",
        "deep",
    ],
)
def test_no_header_takes_time_that_grows_with_its_square(middle: str) -> None:
    # Hours, if it did.
    refused(with_header(f'{{"a":{{{FLOAT},"shape":[{middle}],"data_offsets":[0,4]}}}}', 4))


def test_many_tensors_that_overlap_are_found_in_order() -> None:
    fields = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    header = json.dumps({f"t{number}": fields for number in range(100_000)})
    assert "overlaps with the one before it" in refused(with_header(header, 100_000))


def test_a_header_longer_than_the_format_allows_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model"
    with path.open("wb") as file:
        file.write((1 << 40).to_bytes(8, "little"))
        file.truncate(1 << 41)  # sparse
    with pytest.raises(
        WeightsError, match="its header would be 1099511627776 bytes, and 100000000 are allowed"
    ):
        nvme.load(path)


@given(st.binary(max_size=64))
def test_any_bytes_are_a_file_or_one_error(content: bytes) -> None:
    for tried in (content, with_header(content), with_header(b"{" + content + b"}")):
        try:
            entries(tried)
        except WeightsError as error:
            assert "\n" not in str(error)


number = st.one_of(
    st.integers(-2, 9),
    st.integers(2**30, 2**66),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(max_size=2),
)
fields = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([*DTYPES, "F4", "", 3]),
        "shape": st.one_of(st.lists(number, max_size=3), number),
        "data_offsets": st.one_of(
            st.lists(number, max_size=3), st.sampled_from([[0, 0], [0, 4], [4, 8]]), number
        ),
        "more": number,
    },
)
likely = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "BF16"]),
        "shape": st.lists(st.integers(0, 3), max_size=2),
        "data_offsets": st.sampled_from([[0, 0], [0, 4], [4, 8], [0, 8], [4, 4], [0, 2], [0, 1]]),
    }
)
names = st.one_of(st.text(max_size=3), st.sampled_from(["a", "b", "__metadata__", "\ud800"]))


@settings(max_examples=400)
@given(
    st.dictionaries(names, st.one_of(likely, likely, fields), max_size=3),
    st.sampled_from([0, 1, 2, 4, 8]),
    st.booleans(),
)
def test_what_we_accept_the_reference_reads_in_the_same_way(
    table: dict[str, Any], data: int, ascii_only: bool
) -> None:
    try:
        content = with_header(json.dumps(table, ensure_ascii=ascii_only), data)
    except UnicodeEncodeError:
        return
    try:
        found = entries(content)
    except WeightsError:
        return
    there = {
        name: (value["dtype"], tuple(value["shape"]))
        for name, value in reference.deserialize(content)
    }
    assert {entry.name: (DTYPES_NAMES[entry.dtype], entry.shape) for entry in found} == there


DTYPES_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SAVED = [
    torch.float32,
    torch.bfloat16,
    torch.uint8,
    torch.bool,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float64,
]


@given(
    st.dictionaries(
        st.text(max_size=5).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(SAVED), st.lists(st.integers(0, 4), max_size=4)),
        max_size=5,
    ),
    st.one_of(
        st.none(), st.dictionaries(st.text(max_size=3), st.text(max_size=3), min_size=1, max_size=2)
    ),
)
def test_what_the_reference_writes_we_read(
    tensors: dict[str, Any], metadata: dict[str, str] | None
) -> None:
    made = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in tensors.items()}
    content = save(made, metadata)
    found = entries(content)
    assert {entry.name: (entry.dtype, entry.shape) for entry in found} == {
        n: (t.dtype, tuple(t.shape)) for n, t in made.items()
    }
    cut = content[:-1]
    with pytest.raises(WeightsError):
        entries(cut)
    with pytest.raises(SafetensorError):
        reference.deserialize(cut)


@settings(max_examples=200)
@given(st.data())
def test_a_changed_byte_of_a_header_is_refused_or_read_as_the_reference_does(data: Any) -> None:
    content = bytearray(
        save(
            {"layer.weight": torch.ones(2, 3), "layer.bias": torch.ones(3, dtype=torch.bfloat16)},
            {"format": "pt"},
        )
    )
    header = int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 2))):
        content[data.draw(st.integers(0, 7 + header))] = data.draw(st.integers(0, 255))
    try:
        found = entries(bytes(content))
    except WeightsError:
        return
    there = {name: tuple(value["shape"]) for name, value in reference.deserialize(bytes(content))}
    assert {entry.name: entry.shape for entry in found} == there


# Weights of a model


@pytest.mark.parametrize(
    "index",
    [
        b"[" * 100_000,
        b"\xff",
        b"{}",
        b"[]",
        b'{"weight_map": 3}',
        b'{"weight_map": {"a": 3}}',
        b'{"weight_map": {"a": "\\u0000"}}',
        b'{"weight_map": {"a": "\\ud800"}}',
        b'{"weight_map": {"a": "missing"}}',
        b'{"weight_map": {"a": "."}}',
    ],
)
def test_an_index_that_cannot_be_is_refused_in_one_sentence(tmp_path: Path, index: bytes) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(ConfigError) as caught:
        open_weights(tmp_path, torch.nn.Linear(1, 1))
    assert str(tmp_path) in str(caught.value) and len(str(caught.value)) < 600


def test_weights_in_a_directory_that_is_not_utf8_are_read(tmp_path: Path) -> None:
    place, states = tmp_path / os.fsdecode(b"caf\xe9"), tmp_path / "states"
    place.mkdir()
    states.mkdir()
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    (place / "model.safetensors").write_bytes(save(model.state_dict()))
    infinity.wrap(other, config_of(nvme=[states], device="cpu"), weights=place)
    with infinity.engine(other) as engine:
        assert torch.equal(engine.state_dict()["weight"], model.weight)


# The command line


def test_the_command_names_paths_that_are_not_utf8(tmp_path: Path) -> None:
    place = tmp_path / os.fsdecode(b"caf\xe9")
    place.mkdir()
    (place / "infinity-states.bin").write_bytes(b"x")
    environment = os.environ | {
        "PYTHONPATH": str(Path(infinity.__file__).parents[1]),
        "PYTHONIOENCODING": "utf-8:strict",
    }
    command, missing = [sys.executable, "-m", "infinity", "gc", os.fsencode(place)], rb"/\udce9"
    both = [*command, os.fsencode(tmp_path / "\udce9")]
    result = subprocess.run(both, env=environment, capture_output=True)
    assert (result.returncode, result.stdout) == (1, b""), "nothing is removed"
    said = (
        b"infinity: " + os.fsencode(tmp_path) + missing + b": not a directory; choose another one"
    )
    assert result.stderr == said + b"\n"
    result = subprocess.run(command, env=environment, capture_output=True)
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.startswith(b"removed " + os.fsencode(place / "infinity-states.bin"))
    assert not list(place.iterdir())
