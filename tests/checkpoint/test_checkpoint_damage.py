"""Whatever happens to the files of a checkpoint is refused in a sentence, or harmless: never
another state, and no code runs."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import pickle
import random
import shutil
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

import infinity
from infinity.checkpoint import loading, manifest, pickles
from infinity.checkpoint.contents import Contents
from infinity.checkpoint.digest import as_text, crc32c
from infinity.errors import CheckpointError
from support.configs import config_of
from support.models import text_batch, transformer

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG: dict[str, Any] = {
    "gpu_memory": "16MiB",
    "cpu_memory": "32MiB",
    "parameters": "cpu",
    "optimizer": "cpu",
    "precision": "bf16",
}
EXTRA = {"scheduler": {"last": 1.5, "name": "cosine"}, "rng": torch.arange(100)}
DATA, MANIFEST, METADATA = "__0_0.distcp", "infinity.json", ".metadata"


class Training:
    """A small model with an optimizer, which can be begun anew."""

    def __init__(self, directory: Path, seed: int = 0) -> None:
        self.model: Any = infinity.wrap(
            transformer(seed, width=8, depth=1), config_of(nvme=[directory], **CONFIG)
        )
        self.engine = infinity.engine(self.model)
        self.optimizer = infinity.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, number: int) -> None:
        self.model(**text_batch(number)).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, directory: Path) -> None:
        self.engine.save_checkpoint(directory, self.optimizer, EXTRA)

    def load(self, directory: Path) -> dict[str, Any]:
        return self.engine.load_checkpoint(directory, self.optimizer)

    def everything(self) -> dict[str, Any]:
        return {
            "weights": self.engine.state_dict(),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
        }


def same(a: Any, b: Any) -> bool:
    """Equal, tensors in every bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class Saved:
    """Two checkpoints of one engine, one step apart, and a third that is damaged and loaded again
    and again."""

    def __init__(self, directory: Path) -> None:
        self.first, self.second, self.damaged = (
            directory / name for name in ("first", "second", "damaged")
        )
        self._nvme = directory / "nvme"
        self._nvme.mkdir()
        training = Training(self._nvme)
        with training.engine:
            training.step(0)
            training.save(self.first)
            self.state = training.everything()
            training.step(1)
            training.save(self.second)
        self._training: Training | None = None

    def anew(self) -> Path:
        """The damaged one, whole again."""
        shutil.rmtree(self.damaged, ignore_errors=True)
        shutil.copytree(self.first, self.damaged)
        return self.damaged

    @property
    def training(self) -> Training:
        """Where it is loaded; another one when an engine has ended."""
        if self._training is None:
            self._training = Training(self._nvme, seed=1)
        return self._training

    def end(self) -> None:
        if self._training is not None:
            self._training.engine.close()
            self._training = None

    def load(self) -> str:
        """Why the damaged one is refused, "" when it is harmless: then it gave the state that was
        saved, in every bit.

        What is refused has changed nothing, or has ended the engine.
        """
        training = self.training
        before = training.everything()
        try:
            extra = training.load(self.damaged)
        except infinity.CheckpointError as error:
            try:
                assert same(training.everything(), before)
            except infinity.EngineClosedError:
                self.end()
            assert "\n" not in str(error)
            assert str(error).startswith(str(self.damaged)), error
            return str(error)
        assert same(extra, EXTRA)
        assert same(training.everything(), self.state)
        self.end()  # the next one begins from another state
        return ""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = Saved(tmp_path_factory.mktemp("saved"))
    yield found
    found.end()
    torch.set_num_threads(threads)


def flip(path: Path, at: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def read_all(directory: Path) -> dict[Any, Any]:
    """Every item, as a load reads it."""
    reader = loading.CheckpointReader(directory)
    reader.set_up_storage_reader(Metadata({}), True)
    return {index: reader.read(index) for index in reader.manifest.places}


# Damage


def test_a_flipped_bit_is_refused_or_harmless(saved: Saved) -> None:
    rng = random.Random(3)
    where = saved.anew()
    for name, count in ((MANIFEST, 60), (DATA, 60), (METADATA, 10)):
        size = (where / name).stat().st_size
        for at in [rng.randrange(size) for _ in range(count)] + [0, size - 1]:
            bit = rng.randrange(8)
            flip(where / name, at, bit)
            # `.metadata` is for other tools only
            assert (saved.load() == "") == (name == METADATA), (name, at, bit)
            flip(where / name, at, bit)
    assert saved.load() == ""


def test_every_byte_belongs_to_the_head_of_its_file_or_to_one_item(saved: Saved) -> None:
    """So a digest covers it, or a comparison."""
    content = manifest.decode((saved.first / MANIFEST).read_bytes())
    for name, length in content.files.items():
        at = len(content.stamp.head(name))
        places = [place for place in content.places.values() if place.file == name]
        for place in sorted(places, key=lambda place: place.offset):
            assert place.offset == at
            at += place.length
        assert at == length == (saved.first / name).stat().st_size


def cut(path: Path, keep: int) -> None:
    with path.open("r+b") as file:
        file.truncate(keep)


def zero_page(path: Path, number: int) -> None:
    with path.open("r+b") as file:
        file.seek(4096 * number)
        file.write(bytes(4096))


def replaced_by(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


MANGLED: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: cut(path, 0),
    "half": lambda path: cut(path, path.stat().st_size // 2),
    "a byte short": lambda path: cut(path, path.stat().st_size - 1),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "missing": lambda path: path.unlink(),
    "a directory": replaced_by(Path.mkdir),
    "a pipe": replaced_by(os.mkfifo),
    "a link to itself": replaced_by(lambda path: path.symlink_to(path)),
    "a dangling link": replaced_by(lambda path: path.symlink_to(path.with_name("nothing"))),
    "a link to a device": replaced_by(lambda path: path.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("name", [DATA, MANIFEST])
def test_a_mangled_file_is_refused_before_anything_is_changed(name: str, saved: Saved) -> None:
    training, texts = saved.training, {}
    for kind, mangle in MANGLED.items():
        mangle(saved.anew() / name)
        texts[kind] = saved.load()
        assert texts[kind] != "", kind
        assert saved.training is training, "the engine goes on"
    path = saved.damaged / name
    assert (
        texts["a pipe"]
        == texts["a directory"]
        == f"{path} is no plain file; take an earlier checkpoint"
    )
    assert (
        texts["a dangling link"]
        == f"{path} is a link, which no save makes; put the file itself there"
    )


def test_a_lost_page_is_refused(saved: Saved) -> None:
    whole = read_all(saved.first)
    pages = (saved.first / DATA).stat().st_size // 4096
    for number in range(pages):
        where = saved.anew()
        zero_page(where / DATA, number)
        if (where / DATA).read_bytes() == (saved.first / DATA).read_bytes():
            assert same(read_all(where), whole)
        else:
            with pytest.raises(infinity.CheckpointError):
                read_all(where)
    assert pages > 3


@pytest.mark.parametrize("name", [DATA, MANIFEST])
def test_a_file_of_another_save_is_refused_before_anything_is_changed(
    name: str, saved: Saved
) -> None:
    """The files of both saves have the same length."""
    training = saved.training
    where = saved.anew()
    shutil.copy(saved.second / name, where / name)
    assert saved.load() == (
        f"{where / DATA} is damaged at its start, or belongs to another save than "
        f"{MANIFEST}; take an earlier checkpoint"
    )
    assert saved.training is training


def test_every_file_says_which_run_save_and_step_it_is_of(saved: Saved) -> None:
    stamps = []
    for number, directory in enumerate((saved.first, saved.second)):
        stamp = manifest.decode((directory / MANIFEST).read_bytes()).stamp
        lines = (directory / DATA).read_bytes().split(b"\n")[:5]
        assert lines == [
            b"infinity checkpoint",
            f"run {stamp.run}".encode(),
            f"save {stamp.save}".encode(),
            f"step {number + 1}".encode(),
            f"file {DATA}".encode(),
        ]
        stamps.append(stamp)
    assert stamps[0].run == stamps[1].run
    assert stamps[0].save != stamps[1].save
    assert (saved.first / DATA).stat().st_size == (saved.second / DATA).stat().st_size


# What somebody wrote who knows the format


def rewrite(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the content of the manifest, and have its digest right."""
    path = directory / MANIFEST
    content = json.loads(path.read_bytes())["content"]
    change(content)
    text = json.dumps(content, separators=(",", ":")).encode()
    path.write_bytes(
        b'{"content":%b,"sha256":"%b"}\n' % (text, hashlib.sha256(text).hexdigest().encode())
    )


def item_of(content: dict[str, Any], key: str) -> dict[str, Any]:
    (item,) = [item for item in content["items"] if item["key"] == key]
    found: dict[str, Any] = item
    return found


def test_exchanged_items_of_equal_length_are_refused(saved: Saved) -> None:
    """In the data file, where the manifest knows the digests."""
    where = saved.anew()
    content = json.loads((where / MANIFEST).read_bytes())["content"]
    items = [
        item_of(content, f"optimizer.{kind}.tokens.weight") for kind in ("exp_avg", "exp_avg_sq")
    ]
    assert items[0]["length"] == items[1]["length"]
    data = bytearray((where / DATA).read_bytes())
    parts = [data[item["offset"] : item["offset"] + item["length"]] for item in items]
    for item, part in zip(items, reversed(parts), strict=True):
        data[item["offset"] : item["offset"] + item["length"]] = part
    (where / DATA).write_bytes(data)
    text = saved.load()
    assert "is damaged in optimizer.exp_avg" in text
    assert "its digest is wrong" in text


def drop(content: dict[str, Any], key: str) -> None:
    content["items"].remove(item_of(content, key))
    content["tensors"].pop(key, None)


@pytest.mark.parametrize(
    "key", ["optimizer.exp_avg_sq.tokens.weight", "model.tokens.weight", "model.scale", "extra.0"]
)
def test_what_is_missing_is_no_zero(key: str, saved: Saved) -> None:
    training = saved.training
    rewrite(saved.anew(), lambda content: drop(content, key))
    text = saved.load()
    assert text.startswith(f"{saved.damaged} is not whole: there is ")
    assert text.endswith(key)
    assert saved.training is training


def test_moments_that_are_zeros_are_said_to_be(saved: Saved, tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    training = Training(tmp_path / "nvme")
    with training.engine:
        training.save(tmp_path / "checkpoint")
        names = [name for unit in training.engine.units for name in unit.facts.names]
        absent = manifest.decode((tmp_path / "checkpoint" / MANIFEST).read_bytes()).absent
        assert absent == {
            f"optimizer.{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq") for name in names
        }
        before = training.everything()
        training.step(0)
        training.load(tmp_path / "checkpoint")
        assert same(training.everything(), before)
    assert manifest.decode((saved.first / MANIFEST).read_bytes()).absent == frozenset()


ODD: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a file elsewhere": lambda content: item_of(content, "extra.0").update(
        file="../first/__0_0.distcp"
    ),
    "an absolute path": lambda content: item_of(content, "extra.0").update(file="/dev/zero"),
    "a hidden file": lambda content: content["files"].update({".ssh": 10}),
    "no number": lambda content: item_of(content, "extra.0").update(length="12"),
    "a negative offset": lambda content: item_of(content, "extra.0").update(offset=-1),
    "beyond the end": lambda content: item_of(content, "extra.0").update(offset=1 << 40),
    "a part outside": lambda content: item_of(content, "model.tokens.weight").update(offsets=[7]),
    "more dimensions": lambda content: item_of(content, "model.tokens.weight").update(
        offsets=[0, 0], sizes=[1, 1]
    ),
    "no dtype": lambda content: content["tensors"]["model.tokens.weight"].update(dtype="nn"),
    "another dtype": lambda content: content["tensors"]["model.scale"].update(dtype="float64"),
    "another size": lambda content: content["tensors"]["model.tokens.weight"].update(
        size=[1 << 50]
    ),
    "twice": lambda content: content["items"].append(item_of(content, "extra.0")),
    "no list": lambda content: content.update(items=7),
    "no items": lambda content: content.pop("items"),
    "no version": lambda content: content.update(version=True),
    "another id": lambda content: content.update(save="../x"),
    "another step": lambda content: content.update(step=99),
}


def test_an_odd_manifest_is_refused_before_anything_is_changed(saved: Saved) -> None:
    training = saved.training
    for kind, change in ODD.items():
        rewrite(saved.anew(), change)
        assert saved.load() != "", kind
        assert saved.training is training


def another_item(key: Any) -> Callable[[dict[str, Any]], None]:
    """One more item, which is also "extra.0"."""
    return lambda content: content["items"].append(item_of(content, "extra.0") | {"key": key})


@pytest.mark.parametrize("change", [another_item(7), lambda content: content.update(absent=[None])])
def test_keys_that_are_no_text_are_refused(change: Callable[..., Any], saved: Saved) -> None:
    directory = saved.anew()
    rewrite(directory, change)
    with pytest.raises(CheckpointError, match=r"(7|None) is no name"):
        Contents(directory)


def test_extra_of_a_rank_that_cannot_be_is_not_read(saved: Saved) -> None:
    directory = saved.anew()
    rewrite(directory, another_item("extra." + "9" * 5000))
    assert list(Contents(directory).extra_keys()) == [0]


def test_a_deep_manifest_is_refused(saved: Saved) -> None:
    where = saved.anew()
    text = b"[" * 100_000 + b"]" * 100_000
    (where / MANIFEST).write_bytes(
        b'{"content":%b,"sha256":"%b"}\n' % (text, hashlib.sha256(text).hexdigest().encode())
    )
    assert saved.load().startswith(f"{where / MANIFEST} is damaged: ")


# Code


class Calls:
    """Pickled as a call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def by_name(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls `name` of `module` with `argument`; a dotted name goes through what the
    module has imported."""

    def text(value: str) -> bytes:
        return b"\x8c" + bytes([len(value)]) + value.encode()

    return b"\x80\x04" + text(module) + text(name) + b"\x93" + text(argument) + b"\x85R."


DOTTED = [
    ("torch.distributed.checkpoint.filesystem", "os.mkdir"),
    ("torch.distributed.checkpoint.filesystem", "os"),
    ("torch.distributed.checkpoint.metadata", "os.mkdir"),
    ("torch.distributed.checkpoint.metadata", "Metadata.__init__.__globals__"),
    ("pathlib", "os.mkdir"),
    ("pathlib", "PosixPath.mkdir"),
    ("torch", "os.mkdir"),
    ("torch.serialization", "os.mkdir"),
    ("builtins", "eval"),
    ("os", "mkdir"),
    ("posix", "mkdir"),
]


def test_metadata_without_the_manifest_are_not_read(saved: Saved, tmp_path: Path) -> None:
    owned = tmp_path / "owned"
    where = saved.anew()
    (where / MANIFEST).unlink()
    (where / METADATA).write_bytes(pickle.dumps(Calls(os.mkdir, str(owned))))
    assert saved.load().endswith(f"is no checkpoint, or not a whole one: it has no file {MANIFEST}")
    assert not owned.exists()


def test_metadata_beside_the_manifest_are_not_read(saved: Saved, tmp_path: Path) -> None:
    where = saved.anew()
    (where / METADATA).write_bytes(pickle.dumps(Calls(os.mkdir, str(tmp_path / "owned"))))
    assert saved.load() == ""
    assert not (tmp_path / "owned").exists()


def test_a_pickle_reaches_nothing_of_torch() -> None:
    """A pickle may also set attributes of what it finds."""
    pairs = [("builtins", "getattr"), (Metadata.__module__, "Metadata"), ("torch", "float32")]
    dumped = pickle.dumps(Calls(getattr, Metadata, "__init__"))
    found = pickles.InertUnpickler(dumped, pairs).load()
    assert isinstance(found, pickles.Record)
    assert found.args[0] is not Metadata
    dtype = pickles.InertUnpickler(pickle.dumps(torch.float32), pairs).load()
    assert issubclass(dtype, pickles.Record)
    assert not any("." in name for _, name in pickles.NAMES)


def test_types_that_a_program_calls_safe_are_not_taken_from_a_checkpoint(saved: Saved) -> None:
    with torch.serialization.safe_globals([io.BytesIO]):
        plant(saved.anew(), "extra.0", saved_by_torch(io.BytesIO()))
        assert "is damaged in extra.0: _io.BytesIO does not belong there" in saved.load()
        with pytest.raises(
            infinity.CheckpointError,
            match=r"^extra may have numbers, .* only: _io\.BytesIO does not",
        ):
            saved.training.engine.save_checkpoint(saved.damaged, extra={"a": io.BytesIO()})


def test_extra_may_have_all_that_it_may_have(saved: Saved) -> None:
    extra = {
        "numbers": (1, 2.5, True, None, 1 << 70, 1j),
        "text": "x",
        "bytes": b"x",
        "set": {1, 2},
        "ordered": OrderedDict(a=1),
        "counter": Counter("aab"),
        "size": torch.Size([2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "tensors": [
            torch.zeros(2, dtype=dtype)
            for dtype in (torch.float64, torch.bool, torch.uint16, torch.complex64)
        ],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        3: "number",
    }
    where = saved.anew()
    saved.training.engine.save_checkpoint(where, extra=extra)
    found = saved.training.engine.load_checkpoint(where)
    assert same(found, extra)


def plant(directory: Path, key: str, content: bytes) -> None:
    """`content` as an item, at the end of the file, with everything else to match."""
    data = (directory / DATA).read_bytes()
    (directory / DATA).write_bytes(data + content)
    crc = crc32c(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def move(manifest: dict[str, Any]) -> None:
        item = item_of(manifest, key)
        item.update(offset=len(data), length=len(content), crc32c=as_text(crc))
        manifest["files"][DATA] += len(content)

    rewrite(directory, move)


def saved_by_torch(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def with_pickle(content: bytes) -> bytes:
    """A file of torch.save with another pickle inside."""
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved_by_torch({}))) as there,
        zipfile.ZipFile(stream, "w") as here,
    ):
        for name in there.namelist():
            here.writestr(name, content if name.endswith("data.pkl") else there.read(name))
    return stream.getvalue()


@pytest.mark.parametrize("key", ["extra.0", "infinity", "model.tokens.weight", "model.scale"])
def test_items_run_no_code(key: str, saved: Saved, tmp_path: Path) -> None:
    owned = tmp_path / "owned"
    evil = [
        pickle.dumps(Calls(os.mkdir, str(owned)), protocol=2),
        *(by_name(module, name, str(owned)) for module, name in DOTTED),
    ]
    for content in evil:
        plant(saved.anew(), key, with_pickle(content))
        assert f"{DATA} is damaged in {key}: " in saved.load()
    assert not owned.exists()


@pytest.mark.parametrize(
    "value", [{"a": 1}, torch.zeros(3), torch.zeros(2, dtype=torch.float64), [torch.zeros(1)]]
)
def test_an_item_that_is_another_thing_is_refused(value: Any, saved: Saved) -> None:
    plant(saved.anew(), "model.scale", saved_by_torch(value))
    assert "is damaged in model.scale: it is no tensor of torch." in saved.load()


# Other versions, and other tools


def test_an_older_version_is_refused(saved: Saved) -> None:
    """None was released."""
    where = saved.anew()
    content = manifest.decode((where / MANIFEST).read_bytes())
    (where / MANIFEST).write_bytes(manifest.encode(content._replace(version=2)))
    assert saved.load().endswith(
        "it has version 2, and this infinity reads version 3; use the infinity that wrote it"
    )


def test_metadata_say_the_same_as_the_manifest(saved: Saved) -> None:
    there = FileSystemReader(saved.first).read_metadata()
    here = manifest.decode((saved.first / MANIFEST).read_bytes())
    assert {
        key: tensor
        for key, tensor in there.state_dict_metadata.items()
        if isinstance(tensor, TensorStorageMetadata)
    } == here.tensors
    assert {
        index: (place.relative_path, place.offset, place.length)
        for index, place in there.storage_data.items()
    } == {index: (place.file, place.offset, place.length) for index, place in here.places.items()}


def test_tools_of_torch_read_it(saved: Saved, tmp_path: Path) -> None:
    dcp_to_torch_save(saved.first, tmp_path / "plain.pt")
    found = torch.load(tmp_path / "plain.pt", weights_only=True)
    weights = saved.state["weights"]
    assert torch.equal(
        found["model"]["tokens.weight"].to(torch.bfloat16), weights["tokens.weight"].flatten()
    )
    assert same(found["extra"]["0"], EXTRA)
