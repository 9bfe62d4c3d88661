"""Manifests and records of committed states whose values somebody replaced, with all digests right:
each is refused by `wrap` before a committed byte has changed."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shutil
import struct
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

import infinity
from infinity.cli.gc import collect
from infinity.directories import commits
from infinity.directories.commits import Commit
from infinity.directories.lock import LOCK_NAME
from infinity.durable import store
from infinity.durable.record import CommittedStep
from infinity.durable.states import HEAD_BYTES
from infinity.tiers import extents
from infinity.tiers.block_io import pack_sums, unpack_sums
from infinity.tiers.manifest import MANIFEST_NAME, STATES_NAME, StatesManifest
from support.configs import config_of
from support.durable import record_in

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 3
OPTIONS: dict[str, Any] = {
    "durability": "step",
    "precision": "bf16",
    "gpu_memory": "2MiB",
    "cpu_memory": "4MiB",
    "cache": 0,
    "device": "cpu",
    "threads": 1,
    "io_engine": "posix",
    "nvme_shares": "equal",
}
GONE = object()
Where = tuple[Any, ...]
Change = tuple[Where, Any]
Values = dict[str, torch.Tensor]


class Net(nn.Module):
    """Three units, one of them frozen, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.layers[0].requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = nn.functional.dropout(x.to(self.layers[1].bias.dtype), 0.1)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def resumed(folders: list[Path]) -> nn.Module:
    model = Net()
    config = config_of(nvme=folders, **OPTIONS)
    return infinity.wrap(model, config, units=list(model.layers), resume=True)


def optimizer_of(model: nn.Module) -> infinity.AdamW:
    trained = [each for each in model.parameters() if each.requires_grad]
    groups = [{"params": trained[:2]}, {"params": trained[2:], "lr": 1e-3}]
    return infinity.AdamW(groups, lr=1e-2, max_grad_norm=1.0)


def trained_until(folders: list[Path], steps: int) -> Values:
    """Train until step `steps`, with a scheduler; all that is there then."""
    model = resumed(folders)
    with contextlib.closing(infinity.engine(model)) as engine:
        optimizer = optimizer_of(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        engine.track(scheduler=scheduler)
        for number in range(engine.committed_step or 0, steps):
            model(torch.full((2, 64), number + 1.0)).sum().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for number, state in optimizer.state_dict()["state"].items():
            found |= {f"{number} {key}": value.clone() for key, value in state.items()}
        return found


class Run:
    """The folders of a run of `STEPS` steps, and what its files had."""

    def __init__(self, place: Path) -> None:
        self.folders = [place / each for each in "ab"]
        for folder in self.folders:
            folder.mkdir()
        trained_until(self.folders, STEPS)
        self.manifest = self.folders[0] / MANIFEST_NAME
        self.record = record_in(self.folders[0])
        self.contents = {
            path: path.read_bytes() for folder in self.folders for path in folder.iterdir()
        }
        commit = commits.decoded(self.contents[self.record])
        assert commit is not None
        self.commit: Commit = commit
        self.values: dict[str, Any] = json.loads(self.contents[self.manifest])

    @contextlib.contextmanager
    def with_content(self, path: Path, content: bytes) -> Iterator[None]:
        """Inside, a file has another content; nothing else may change."""
        path.write_bytes(content)
        try:
            yield
            for each, before in self.contents.items():
                now = each.read_bytes()
                if each.name == STATES_NAME:  # what is beyond was not committed
                    now = now[: len(before)]
                assert now == (content if each == path else before), each
        finally:
            path.write_bytes(self.contents[path])

    def with_manifest(self, *changes: Change) -> contextlib.AbstractContextManager[None]:
        values = json.loads(self.contents[self.manifest])
        for path, value in changes:
            values = replaced(values, path, value)
        return self.with_content(self.manifest, json.dumps(values).encode())

    def with_record(self, *changes: Change) -> contextlib.AbstractContextManager[None]:
        tree = opened(self.commit.content)
        for path, value in changes:
            tree = replaced(tree, path, value)
        content = commits.encoded(self.commit.sequence, closed(tree))
        return self.with_content(self.record, content)


HEAD = struct.Struct("<32s32sQQ32s")
COUNT = struct.Struct("<Q")


def opened(content: bytes) -> dict[str, Any]:
    """A record as values."""
    head = list(HEAD.unpack_from(content))
    sums, rest = unpack_sums(content[HEAD_BYTES:])
    (count,) = COUNT.unpack_from(rest)
    end = COUNT.size + count
    noted = torch.load(BytesIO(rest[end:]), weights_only=True)
    return {"head": head, "sums": sums, "blocks": list(rest[COUNT.size : end]), "noted": noted}


def body_of(tree: dict[str, Any]) -> bytes:
    stream = BytesIO()
    torch.save(tree["noted"], stream)
    blocks = bytes(tree["blocks"])
    return COUNT.pack(tree.get("count", len(blocks))) + blocks + stream.getvalue()


def closed(tree: dict[str, Any]) -> bytes:
    return HEAD.pack(*tree["head"]) + pack_sums(tree["sums"]) + body_of(tree)


def replaced(tree: Any, path: Where, value: Any) -> Any:
    """A copy of `tree` with another value there, or one that `value` makes of it; none for
    `GONE`."""
    if not path:
        return value(tree) if callable(value) else value
    first, *rest = path
    kind = type(tree)
    new = dict(tree) if isinstance(tree, dict) else list(tree)
    if value is GONE and not rest:
        del new[first]
    else:
        new[first] = replaced(
            new.get(first) if isinstance(new, dict) else new[first], tuple(rest), value
        )
    return kind(new)


NAN, INF, HUGE = math.nan, math.inf, 10**400
MANIFESTS: list[Change] = [
    *((("rooms", 0), value) for value in (-1, NAN, INF, 1.5, HUGE, "3", True, [1], None, 0, {})),
    *((("rooms",), value) for value in ([], [9], [9, 9, 9], 9, None, "99", {"0": 9})),
    *((("shares", 0), value) for value in (-1.0, 0, 0.0, NAN, INF, HUGE, "1", True, [1.0], None)),
    *((("shares",), value) for value in ([], [1.0], [1.0] * 3, 1.0, None, [1.0, 1e300], [3, 1])),
    *((("stripe_bytes",), value) for value in (0, -4096, 4096, 8 << 20, 16384.5, "4", True, HUGE)),
    *((("blocks", 1, "nbytes"), value) for value in (-1, 0, 1, 1 << 40, HUGE, 1.5, NAN, "8", None)),
    *((("blocks", 1, "elements"), value) for value in (-1, 1, HUGE, INF, "8", True)),
    *(
        (("blocks", 1, "extents"), value)
        for value in ([], [-4096, 0], [0, 1 << 40], [HUGE], ["0"], [[0]], [NAN], [True], 0, None)
    ),
    *((("blocks", 1, "kind"), value) for value in ("odd", "grad", 3, None)),
    *((("blocks", 1, key), value) for key in ("name", "format") for value in ("odd", 3, None)),
    *((("blocks",), value) for value in ([], {}, None, [None], lambda blocks: blocks[1:])),
    (("blocks", 1, "more"), 1),
    (("blocks", 1, "extents"), GONE),
    *(
        (("member",), value)
        for value in ([], [0, 1], [0, 0, "all"], [-1, 1, "all"], [1, 1, "all"], [0, 2, "all"])
    ),
    *((("member",), value) for value in ([0, True, "all"], [0.5, 1, "all"], [0, 1, 2], 5, "all")),
    *((("run",), value) for value in ("0" * 32, "", "x" * 32, 5, None, ["0"])),
    *((("is_committed",), value) for value in (1, "true", None, [])),
    *((("directory",), value) for value in (-1, 1, 2, 0.5, True, "0", HUGE)),
    *((("version",), value) for value in (3, 5, "4", 4.5, None, HUGE)),
    *(((key,), GONE) for key in ("version", "directory", "run", "member", "shares", "blocks")),
    (("more",), 1),
    *(((), value) for value in ([], None, 4, "x")),
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, _small_stripes: None) -> Run:
    return Run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module", autouse=True)
def _small_stripes() -> Iterator[None]:
    """So that states of little width lie in both directories."""
    with (
        mock.patch.object(extents, "STRIPE_BYTES", 16 << 10),
        mock.patch.object(store, "STRIPE_BYTES", 16 << 10),
    ):
        yield


def refused(run: Run) -> str:
    """What `wrap` says, in one sentence that names a path in the folders and a way out."""
    with pytest.raises((infinity.CheckpointError, infinity.ConfigError)) as raised:
        resumed(run.folders)
    said = str(raised.value)
    assert "\n" not in said and len(said) < 1000, said
    return said


def name(change: Any) -> str:
    path, value = change
    shown = "gone" if value is GONE else "changed" if callable(value) else repr(value)
    return f"{'.'.join(map(str, path))}={' '.join(shown.split())[:30]}"


@pytest.mark.parametrize("change", MANIFESTS, ids=name)
def test_a_manifest_with_another_value_is_refused(change: Change, run: Run) -> None:
    with run.with_manifest(change):
        said = refused(run)
    assert str(run.folders[0].parent) in said, said
    assert "checkpoint" in said or "give" in said or "take another directory" in said, said


RAW = [
    b"",
    b"[" * 100_000,
    b'{"version":' + b"9" * 5000 + b"}",
    b"\xff\xfe",
    b'{"version": 4, "run": "\\ud800"}',
]


@pytest.mark.parametrize("content", RAW, ids=["empty", "deep", "long", "no text", "half a letter"])
def test_what_is_no_manifest_is_refused(content: bytes, run: Run) -> None:
    with run.with_content(run.manifest, content):
        said = refused(run)
    assert f"{run.manifest} is damaged" in said


def test_nothing_is_cut_before_the_states_are_known_to_lie_there(run: Run) -> None:
    """An earlier run may have had more beyond. With other shares, what is committed would lie
    elsewhere, and the file would be cut."""
    states = [folder / STATES_NAME for folder in run.folders]
    for path in states:
        with path.open("ab") as file:
            file.write(bytes(path.stat().st_size * 2))
    try:
        with (
            run.with_manifest((("shares",), [3, 1])),
            pytest.raises(infinity.InfinityError, match="is damaged at offset"),
        ):
            resumed(run.folders)
    finally:
        for path in states:
            path.write_bytes(run.contents[path])


def words(count: int, value: int = 7) -> torch.Tensor:
    return torch.full((count,), value)


FLOATS = torch.zeros(3)
GROUP = ("noted", "optimizers", 0, "param_groups", 0)
COUNTS: list[Any] = [-1, True, 3.0, "3", None, NAN, HUGE, 2, torch.tensor(3)]
RECORDS: list[Change] = [
    *((("noted", key), value) for key in ("posted", "skipped") for value in COUNTS),
    *((("noted", key), GONE) for key in ("version", "posted", "random", "optimizers", "tracked")),
    *((("noted", "version"), value) for value in (2, 4, "3", None, HUGE)),
    *((("noted", key), value) for key in ("whole", "in_forward") for value in (1, "yes", None)),
    (("noted", "whole"), False),
    (("noted", "more"), 1),
    (("noted", "step"), STEPS),
    (("noted", "versions"), ()),
    *((("noted", "random"), value) for value in ({}, None, [], {"torch": []})),
    *((("noted", "random", key), GONE) for key in ("torch", "python", "numpy")),
    (("noted", "random", "more"), 1),
    *(
        (("noted", "random", "torch"), value)
        for value in ([], None, [None], [FLOATS], [torch.zeros(5056, dtype=torch.uint8)], 5)
    ),
    (("noted", "random", "torch", 0), lambda state: state[:-1]),
    (("noted", "random", "torch", 0), lambda state: state.to(torch.int64)),
    (("noted", "random", "torch", 0), lambda state: state.view(2, -1)),
    (("noted", "random", "torch", 0), lambda state: torch.full_like(state, 255)),
    *((("noted", "random", "python", 0), value) for value in (2, "3", None, 3.5)),
    *(
        (("noted", "random", "python", 1), value)
        for value in (words(624), words(625, -1), words(625, 1 << 32), words(625, 625), FLOATS, [])
    ),
    *((("noted", "random", "python", 2), value) for value in (NAN, INF, "0.5", [], FLOATS)),
    *((("noted", "random", "python"), value) for value in ([], [3], None, 3)),
    *((("noted", "random", "numpy", 0), value) for value in ("PCG64", 5, None)),
    *(
        (("noted", "random", "numpy", 1), value)
        for value in (words(623), words(624, -1), words(624, 1 << 32), FLOATS, None)
    ),
    *((("noted", "random", "numpy", 2), value) for value in (-1, 625, 1 << 40, 0.5, "0", True)),
    *((("noted", "random", "numpy", 3), value) for value in (-1, 2, "0", None, True)),
    *((("noted", "random", "numpy", 4), value) for value in (NAN, INF, "0", None)),
    *((("noted", "optimizers"), value) for value in ([], {}, None, [None], [[]], "AdamW", [{}])),
    *(
        (("noted", "optimizers", 0, key), GONE)
        for key in ("kind", "names", "param_groups", "steps", "skipped_steps", "last_norm")
    ),
    (("noted", "optimizers", 0, "more"), 1),
    *((("noted", "optimizers", 0, "kind"), value) for value in (None, 5, [])),
    *(
        (("noted", "optimizers", 0, "names"), value)
        for value in ([], [[]], [["a"], ["b"]], None, "ab", [[1, 2], [3, 4]], lambda all: all[:1])
    ),
    *(
        (("noted", "optimizers", 0, "steps"), value)
        for value in ([], [3], [3, 3, 3, -1], [3, 3, 3, 0.5], [3, 3, 3, True], None, ["3"] * 4)
    ),
    *((("noted", "optimizers", 0, "skipped_steps"), value) for value in (-1, 0.5, None, True)),
    *((("noted", "optimizers", 0, "last_norm"), value) for value in (NAN, INF, -1.0, "1", [])),
    (("noted", "optimizers", 0, "loss_scaler"), {}),
    (
        ("noted", "optimizers", 0, "loss_scaler"),
        {"scale": -1.0, "skipped": 0, "finite": 0, "patience": 0},
    ),
    *((GROUP[:-1], value) for value in ([], None, [None], {}, [{}])),
    (GROUP[:-1], lambda groups: groups[:1]),
    *(((*GROUP, "params"), value) for value in (GONE, None, [], [0], [0, [1]], ["0", "1"], 5)),
    ((*GROUP, 5), 5),
    *((("noted", "buffers"), value) for value in (None, [], {"seen": 1.0}, {}, {5: FLOATS})),
    (("noted", "buffers", "seen"), torch.zeros(2)),
    (("noted", "buffers", "seen"), torch.zeros((), dtype=torch.int64)),
    (("noted", "buffers", "seen"), torch.zeros(()).to_sparse()),
    *((("noted", "tracked"), value) for value in (None, [], 5, {5: FLOATS})),
    *(
        (("noted", "tracked", "scheduler"), value)
        for value in (None, {}, b"", "x", FLOATS, torch.zeros(0, dtype=torch.uint8))
    ),
    (("noted", "tracked", "scheduler"), lambda saved: saved[:-9]),
    *((("noted",), value) for value in (None, [], 5, {}, {5: 5}, FLOATS)),
    *((("count",), value) for value in (0, 1, 1 << 20, (1 << 64) - 1)),
    (("blocks",), lambda blocks: blocks[1:]),
    (("blocks",), lambda blocks: [*blocks, 2]),
    (("blocks",), []),
    *((("blocks", 0), value) for value in (0, 3, 4, 255)),
    (("blocks", 1), lambda state: state & 1),
    (("sums",), []),
    (("sums",), lambda sums: sums[1:]),
    (("sums",), lambda sums: [*sums, sums[0]]),
    (("sums", 0), lambda sums: sums[:0]),
    (("sums", 0), lambda sums: np.concatenate([sums, sums])),
    (("head", 0), b"0" * 32),
    (("head", 0), b"\xff" * 32),
    *((("head", 1), value) for value in (b"", b"x" * 32, b"\xff" * 32)),
    *((("head", 2), value) for value in (0, 2, 4, (1 << 64) - 1)),
    (("head", 3), (1 << 64) - 1),
    *((("head", 4), value) for value in (b"0", b"x" * 32, b"\xff" * 32)),
]  # fmt: skip


@pytest.mark.parametrize("change", RECORDS, ids=name)
def test_a_record_with_another_value_is_refused(change: Change, run: Run) -> None:
    with run.with_record(change):
        said = refused(run)
    assert str(run.folders[0]) in said, said
    assert "checkpoint" in said or "holds the states of another model: the buffer" in said, said


@pytest.mark.parametrize("length", [0, 10, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 10])
def test_a_record_that_ends_early_is_refused(length: int, run: Run) -> None:
    content = commits.encoded(run.commit.sequence, run.commit.content[:length])
    with run.with_content(run.record, content):
        refused(run)


def test_a_number_that_no_record_has_is_refused(run: Run) -> None:
    content = commits.encoded((1 << 64) - 1, run.commit.content)
    with run.with_content(run.record, content):
        refused(run)


@pytest.fixture
def another(run: Run, tmp_path: Path) -> Callable[..., list[Path]]:
    """Makes a copy of the run, with another record, to go on from."""

    def made(*changes: Change) -> list[Path]:
        folders = [tmp_path / folder.name for folder in run.folders]
        with run.with_record(*changes) if changes else contextlib.nullcontext():
            for folder, copy in zip(run.folders, folders, strict=True):
                shutil.copytree(folder, copy)
        return folders

    return made


def test_what_was_put_back_goes_on_with_the_same_bits(
    run: Run, another: Callable[..., list[Path]], tmp_path: Path
) -> None:
    for change in RECORDS[::20]:
        with run.with_record(change):
            refused(run)
    for change in MANIFESTS[::20]:
        with run.with_manifest(change):
            refused(run)
    expected = [tmp_path / "new a", tmp_path / "new b"]
    for folder in expected:
        folder.mkdir()
    whole = trained_until(expected, STEPS + 2)
    found = trained_until(another(), STEPS + 2)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], value) for name, value in whole.items())


@pytest.mark.parametrize(
    "change",
    [
        ((*GROUP, "lr"), GONE),
        ((*GROUP, "betas"), GONE),
        *(((*GROUP, "lr"), value) for value in ("1", -1.0, NAN, INF, None, HUGE, [], FLOATS)),
        *(((*GROUP, "betas"), value) for value in (0.9, [0.9], [0.9, "1"], None, [NAN, 0.9])),
        *(((*GROUP, key), value) for key in ("eps", "weight_decay") for value in (-1, "0", HUGE)),
        (("noted", "optimizers", 0, "kind"), "SGD"),
        (("noted", "optimizers", 0, "names", 0, 0), "other"),
    ],
    ids=name,
)  # fmt: skip
def test_a_hyper_parameter_that_is_none_is_refused_before_the_optimizer_has_changed(
    change: Change, another: Callable[..., list[Path]]
) -> None:
    model = resumed(another(change))
    with contextlib.closing(infinity.engine(model)) as engine:
        steps = engine.committed_step
        for _ in range(2):  # also when it is tried again
            with pytest.raises(infinity.ConfigError):
                optimizer_of(model)
        assert engine.committed_step == steps


def test_an_object_of_which_nothing_is_committed_goes_on_as_it_is_and_is_named(
    another: Callable[..., list[Path]], caplog: pytest.LogCaptureFixture
) -> None:
    model = resumed(another((("noted", "tracked"), {})))
    with contextlib.closing(infinity.engine(model)) as engine:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer_of(model), 1, 0.5)
        with caplog.at_level(logging.WARNING, "infinity"):
            engine.track(scheduler=scheduler)
    (said,) = (each.getMessage() for each in caplog.records)
    assert said == "nothing is committed of scheduler, which goes on as it is"
    assert scheduler.last_epoch == 0


def test_what_is_committed_of_an_object_is_given_back_without_a_word(
    another: Callable[..., list[Path]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "infinity"):
        trained_until(another(), STEPS)
    assert not [each for each in caplog.records if "nothing is committed" in each.getMessage()]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
) | st.just(HUGE)  # fmt: skip


def paths_in(tree: Any) -> Iterator[Where]:
    """Of all that can be replaced."""
    yield ()
    inner = enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    for key, value in tree.items() if isinstance(tree, dict) else inner:
        yield from ((key, *path) for path in paths_in(value))


@given(st.data())
def test_a_manifest_is_decoded_as_it_is_or_refused(run: Run, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(list(paths_in(run.values))))
    values = replaced(run.values, path, data.draw(JSON))
    try:
        found = StatesManifest.decode(json.dumps(values).encode())
    except ValidationError:
        return
    assert json.loads(found.encode()) == values


def shown(tree: Any) -> Any:
    """The tree with what can be compared."""
    if isinstance(tree, dict):
        return {key: shown(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [shown(each) for each in tree]
    if isinstance(tree, torch.Tensor):
        return str(tree.dtype), list(tree.shape), tree.tolist()
    return "nan" if tree != tree else tree


@given(st.data())
def test_a_record_is_decoded_as_it_is_or_refused(run: Run, data: st.DataObject) -> None:
    tree = opened(run.commit.content)
    path = data.draw(st.sampled_from(list(paths_in(tree["noted"]))))
    tensors = st.sampled_from([FLOATS, words(4), words(624), torch.zeros(5, dtype=torch.uint8)])
    noted = replaced(tree["noted"], path, data.draw(JSON | tensors))
    try:
        found = CommittedStep.of(body_of(tree | {"noted": noted}), STEPS)
    except ValueError:
        return
    values = {
        "version": found.version,
        "posted": found.posted,
        "skipped": found.skipped,
        "whole": found.is_whole,
        "in_forward": found.in_forward,
        "optimizers": found.headers,
        "random": found.random.values(),
        "buffers": found.buffers,
    }
    assert shown(values) == shown({key: noted[key] for key in values})
    assert found.tracked.keys() == noted["tracked"].keys()


@pytest.mark.parametrize("value", [None, [], [-1, NAN], "9"])
def test_gc_keeps_what_it_cannot_read_unless_all_shall_go(
    value: Any, run: Run, another: Callable[..., list[Path]]
) -> None:
    folders = another()
    path = folders[0] / MANIFEST_NAME
    path.write_text(json.dumps(run.values | {"rooms": value}))
    before = contents_of(folders)
    collect(*folders)
    assert contents_of(folders) == before
    collect(*folders, committed=True)
    assert not contents_of(folders)


def contents_of(folders: list[Path]) -> dict[Path, bytes]:
    """Of all files but the locks."""
    files = (path for folder in folders for path in folder.iterdir())
    return {path: path.read_bytes() for path in files if path.name != LOCK_NAME}
