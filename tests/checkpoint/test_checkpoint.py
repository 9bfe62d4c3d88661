"""A checkpoint is the whole state: training goes on from it with the same bits, in any placement,
or it is refused."""

from __future__ import annotations

import copy
import errno
import gc
import itertools
import logging
import os
import re
import shutil
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import infinity
from infinity import native
from infinity.checkpoint import data_file, manifest, pieces, progress, saving, state
from infinity.checkpoint.data_file import DataWriter
from infinity.checkpoint.pieces import ShardPiece
from infinity.optim.optimizer import Optimizer
from infinity.quantities import format_bytes
from infinity.sharding.states import States
from infinity.tiers.access import Checkout
from infinity.tiers.staging import Staging
from support.configs import config_of
from support.models import Transformer, rounded, text_batch, transformer

pytestmark = pytest.mark.usefixtures("one_thread")

ROOMY: dict[str, Any] = {"gpu_memory": "16MiB", "cpu_memory": "32MiB", "poison": True}
FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "unsplit": {"precision": "bf16", "split_master": False},
    "bf16-moments": {"precision": "bf16", "moment_precision": "bf16"},
    "int8-moments": {"precision": "bf16", "moment_precision": "int8"},
    "fp16": {"precision": "fp16"},
    "as-it-is": {},
}
PLACES = [
    {"parameters": "gpu", "optimizer": "gpu", "gradients": "gpu"},
    {"parameters": "nvme", "optimizer": "nvme", "gradients": "cpu"},
    {
        "parameters": "nvme",
        "optimizer": "nvme",
        "gradients": "nvme",
        "cache": 0,
        "copy_on_write": False,
    },
    {"parameters": "cpu", "optimizer": "nvme", "gradients": "cpu", "cache": 50_000},
    {"parameters": "nvme", "optimizer": "cpu", "gradients": "cpu", "cache": 0, "update": "exact"},
]


class Training:
    """A wrapped model in a directory of its own, with an optimizer; steps depend on their number
    alone."""

    def __init__(
        self,
        directory: Path,
        model: nn.Module | None = None,
        make: Callable[..., Any] | None = None,
        **config: Any,
    ) -> None:
        directory.mkdir()
        self.model: Any = infinity.wrap(
            model or transformer(), config_of(nvme=[directory], **(ROOMY | config))
        )
        self.engine = infinity.engine(self.model)
        make = make or (lambda parameters: infinity.AdamW(parameters, lr=1e-2, max_grad_norm=0.5))
        self.optimizer: Any = make(self.model.parameters())

    def step(self, number: int) -> float:
        loss = self.model(**text_batch(number)).loss
        self.optimizer.scale(loss).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())

    def steps(self, numbers: range) -> list[float]:
        return [self.step(number) for number in numbers]

    def save(self, directory: Path, **extra: Any) -> None:
        self.engine.save_checkpoint(directory, self.optimizer, extra)

    def load(self, directory: Path) -> dict[str, Any]:
        return self.engine.load_checkpoint(directory, self.optimizer)

    def everything(self) -> dict[str, Any]:
        """Weights, states and counts, flattened to one dict."""
        found: dict[str, Any] = {
            name: value.clone() for name, value in self.engine.state_dict().items()
        }
        packed = copy.deepcopy(self.optimizer.state_dict())
        found |= {
            f"{number} {name}": value
            for number, values in packed["state"].items()
            for name, value in values.items()
        }
        return found | {
            "groups": packed["param_groups"],
            "scaler": packed.get("loss_scaler"),
            "skips": self.optimizer.skipped_steps,
        }


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Equal keys and values; tensors in every bit."""
    return a.keys() == b.keys() and all(
        v.dtype == b[k].dtype
        and torch.equal(
            v.contiguous().view(-1).view(torch.uint8), b[k].contiguous().view(-1).view(torch.uint8)
        )
        if isinstance(v, torch.Tensor)
        else v == b[k]
        for k, v in a.items()
    )


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Training]:
    """`start(model, make, **config)`: a `Training` that is closed at the end of the test."""

    def make(*arguments: Any, **config: Any) -> Training:
        training = Training(tmp_path / f"nvme{len(list(tmp_path.iterdir()))}", *arguments, **config)
        request.addfinalizer(training.engine.close)
        return training

    return make


Start = Callable[..., Training]


# The same bits


class Odd(nn.Module):
    """Uneven shapes, tied or frozen parameters, two dtypes, a buffer that the forward changes."""

    def __init__(
        self, width: int, widths: list[int], tied: bool, frozen: set[int], narrow: set[int]
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, w), nn.Tanh(), nn.Linear(w, width, bias=w % 2 == 0))
            for w in widths
        )
        self.head = nn.Linear(width, 64, bias=False)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        if tied:
            self.head.weight = self.tokens.weight
        for number in narrow:
            self.blocks[number % len(widths)].to(torch.bfloat16)
        for number in frozen:
            self.blocks[number % len(widths)][2].requires_grad_(False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        self.seen += 1
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = x + block(x.to(block[0].weight.dtype)).to(x.dtype)
        logits = self.head(x * self.gain.to(x.dtype)).float()
        return type(
            "Output", (), {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}
        )


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    shape=st.builds(
        dict,
        width=st.integers(1, 40),
        widths=st.lists(st.integers(1, 70), min_size=1, max_size=3),
        tied=st.booleans(),
        frozen=st.sets(st.integers(0, 2), max_size=2),
        narrow=st.sets(st.integers(0, 2), max_size=2),
    ),
    form=st.sampled_from([name for name in FORMATS if name != "fp16"]),
    places=st.tuples(st.sampled_from(PLACES), st.sampled_from(PLACES)),
    steps=st.integers(0, 3),
    piece=st.sampled_from([64, 1000, 1 << 22]),
)
def test_training_goes_on_bit_for_bit_in_any_placement(
    shape: dict[str, Any],
    form: str,
    places: tuple[dict[str, Any], dict[str, Any]],
    steps: int,
    piece: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    def build(seed: int) -> Odd:
        torch.manual_seed(seed)
        return Odd(**shape)

    directory = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE", piece)
        one = Training(directory / "one", build(0), **FORMATS[form], **places[0])
        with one.engine:
            one.steps(range(steps))
            one.save(directory / "checkpoint", number=steps)
            saved = one.everything()
            losses, whole = one.steps(range(steps, steps + 3)), one.everything()
        other = Training(directory / "other", build(1), **FORMATS[form], **places[1])
        with other.engine:
            assert other.load(directory / "checkpoint") == {"number": steps}
            assert same(other.everything(), saved)
            assert other.steps(range(steps, steps + 3)) == losses
            assert same(other.everything(), whole)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_with_many_chunks_and_pieces(
    form: str,
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    smallest: Callable[..., dict[str, int]],
) -> None:
    """Pieces, chunks and parameters are cut at different places."""
    monkeypatch.setattr(pieces, "PIECE", 5000)
    least = smallest(
        transformer(width=64), **FORMATS[form], nvme=[tmp_path], optimizer="nvme", parameters="nvme"
    )
    one = start(transformer(width=64), **FORMATS[form], **least, update="exact", cache=0)
    assert max(len(unit.states.chunks()) for unit in one.engine.units) > 1
    one.steps(range(2))
    one.save(tmp_path / "checkpoint")
    saved, losses, whole = one.everything(), one.steps(range(2, 5)), one.everything()
    other = start(transformer(1, width=64), **FORMATS[form], parameters="gpu", optimizer="cpu")
    other.steps(range(1))  # what was there before does not matter
    other.load(tmp_path / "checkpoint")
    assert same(other.everything(), saved)
    assert other.steps(range(2, 5)) == losses
    assert same(other.everything(), whole)


@pytest.mark.parametrize(
    "forms",
    [("unsplit", "bf16"), ("bf16", "unsplit"), ("bf16-moments", "bf16"), ("int8-moments", "bf16")],
)
def test_another_format_that_has_all_bits_takes_over_all_bits(
    forms: tuple[str, str], start: Start, tmp_path: Path
) -> None:
    one, other = start(**FORMATS[forms[0]]), start(transformer(1), **FORMATS[forms[1]])
    one.steps(range(3))
    one.save(tmp_path / "checkpoint")
    other.load(tmp_path / "checkpoint")
    assert same(other.everything(), one.everything())


def test_moments_in_a_narrower_format_are_rounded_to_nearest(start: Start, tmp_path: Path) -> None:
    one, other = start(**FORMATS["bf16"]), start(transformer(1), **FORMATS["bf16-moments"])
    one.steps(range(3))
    one.save(tmp_path / "checkpoint")
    other.load(tmp_path / "checkpoint")
    there, here = one.everything(), other.everything()
    for name, value in there.items():
        if "exp_avg" in name:
            there[name] = rounded(value, torch.bfloat16).float()
    assert same(here, there)


def test_weights_in_fp32_are_the_masters_of_weights_in_bf16(start: Start, tmp_path: Path) -> None:
    one, other = start(precision="bf16"), start(transformer(1), precision="fp32")
    one.steps(range(3))
    one.save(tmp_path / "checkpoint")
    other.load(tmp_path / "checkpoint")
    masters = [values["master"] for values in one.optimizer.state_dict()["state"].values()]
    assert all(
        torch.equal(a, b)
        for a, b in zip(masters, dict(other.engine.weights()).values(), strict=False)
    )
    other.save(tmp_path / "again")
    three = start(transformer(2), precision="bf16")
    three.load(tmp_path / "again")
    assert same(three.everything(), one.everything())


MAKERS: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "lion": ({"algorithm": "lion"}, lambda p: infinity.Lion(p, lr=1e-3)),
    "adagrad": ({"algorithm": "adagrad"}, lambda p: infinity.Adagrad(p, lr=1e-2)),
    "momentum": ({"algorithm": "momentum"}, lambda p: infinity.SGD(p, lr=1e-2, momentum=0.9)),
    "sgd": ({"algorithm": "sgd"}, lambda p: infinity.SGD(p, lr=1e-2)),
    "groups": (
        {},
        lambda p: infinity.AdamW(
            [{"params": (p := list(p))[:5], "lr": 1e-3}, {"params": p[5:], "betas": (0.8, 0.9)}]
        ),
    ),
    "rmsprop": (
        {"algorithm": "other"},
        lambda p: infinity.adapt(torch.optim.RMSprop, p, lr=1e-3, momentum=0.5, centered=True),
    ),
    "nadam": (
        {"algorithm": "other", "optimizer": "cpu"},
        lambda p: infinity.adapt(torch.optim.NAdam, p, lr=1e-3),
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_every_optimizer_goes_on(name: str, start: Start, tmp_path: Path) -> None:
    config, make = MAKERS[name]
    one, other = (start(transformer(seed), make, precision="bf16", **config) for seed in range(2))
    schedulers = [
        torch.optim.lr_scheduler.StepLR(training.optimizer, 2, 0.5) for training in (one, other)
    ]
    for number in range(3):
        one.step(number)
        schedulers[0].step()
    one.save(tmp_path / "checkpoint", scheduler=schedulers[0].state_dict())
    schedulers[1].load_state_dict(other.load(tmp_path / "checkpoint")["scheduler"])
    for number in range(3, 6):
        assert other.step(number) == one.step(number)
        schedulers[0].step()
        schedulers[1].step()
    assert same(other.everything(), one.everything())


def test_several_optimizers_of_one_model(start: Start, tmp_path: Path) -> None:
    def pair(seed: int) -> tuple[Training, list[Any]]:
        training = start(transformer(seed), lambda p: infinity.AdamW(list(p)[:2], lr=1e-2))
        rest = [p for name, p in training.model.named_parameters() if name.startswith("blocks")]
        return training, [training.optimizer, infinity.AdamW(rest, lr=1e-3)]

    def step(training: Training, optimizers: list[Any], number: int) -> float:
        loss = training.model(**text_batch(number)).loss
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        training.model.zero_grad()
        return float(loss.item())

    (one, mine), (other, theirs) = pair(0), pair(1)
    step(one, mine, 0)
    one.engine.save_checkpoint(tmp_path / "checkpoint", mine)
    other.engine.load_checkpoint(tmp_path / "checkpoint", theirs)
    assert [step(one, mine, n) for n in range(1, 4)] == [
        step(other, theirs, n) for n in range(1, 4)
    ]
    with pytest.raises(
        infinity.CheckpointError, match=r"has the states of 2 optimizers, and 1 are to be loaded$"
    ):
        other.load(tmp_path / "checkpoint")


def test_a_loss_scale_and_skipped_steps_go_on(start: Start, tmp_path: Path) -> None:
    def make(parameters: Any) -> Optimizer:
        return infinity.AdamW(
            parameters, lr=1e-3, loss_scaler=infinity.LossScaler(2.0**15, window=3, hysteresis=1)
        )

    one, other = (start(transformer(seed), make, precision="fp16") for seed in range(2))
    one.optimizer.scale(one.model(**text_batch(0)).loss * torch.inf).backward()
    one.optimizer.step()
    one.optimizer.zero_grad()
    one.steps(range(2))
    one.save(tmp_path / "checkpoint")
    other.load(tmp_path / "checkpoint")
    assert (other.optimizer.loss_scaler.scale, other.optimizer.skipped_steps) == (2.0**14, 1)
    assert other.steps(range(2, 5)) == one.steps(range(2, 5))
    assert same(other.everything(), one.everything())


@pytest.mark.parametrize("place", PLACES[1:3], ids=["nvme", "all-nvme"])
@pytest.mark.parametrize("after", [0, 3, 5])
def test_updates_one_step_late_go_on(
    after: int, place: dict[str, Any], start: Start, tmp_path: Path
) -> None:
    """Wherever the run is cut, before the updates begin to be late or after; a save makes the last
    one seen, in each run."""
    late = place | {
        "update": "delayed",
        "delayed_after": after,
        "precision": "bf16",
        "copy_on_write": True,
    }
    last, every = 7, 2

    def go_on(training: Training, first: int, where: Path) -> list[float]:
        losses = []
        for number in range(first, last):
            losses.append(training.step(number))
            if (number + 1) % every == 0:
                training.save(where / str(number + 1))
        return losses

    whole = start(**late)
    losses, states = go_on(whole, 0, tmp_path / "whole"), whole.everything()
    for first in range(every, last, every):
        resumed = start(transformer(1), **late)
        resumed.steps(range(first % 3))  # what was counted before does not matter
        resumed.load(tmp_path / "whole" / str(first))
        assert go_on(resumed, first, tmp_path / f"from {first}") == losses[first:]
        assert same(resumed.everything(), states)
        assert resumed.engine.report().steps == last


def test_replicas_that_write_nothing_see_late_updates_when_the_others_do(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (start(update="delayed", delayed_after=0) for _ in range(2))
    assert first.steps(range(2)) == second.steps(range(2))
    first.save(tmp_path / "checkpoint")
    with monkeypatch.context() as patch:
        patch.setattr(saving.collectives, "rank", lambda group: 1)
        second.save(tmp_path / "other")
    assert not (tmp_path / "other").exists()
    assert first.steps(range(2, 5)) == second.steps(range(2, 5))


def test_without_an_optimizer_it_is_the_weights(start: Start, tmp_path: Path) -> None:
    one, other = start(), start(transformer(1))
    one.steps(range(2))
    one.engine.save_checkpoint(tmp_path / "weights")
    one.save(tmp_path / "all")
    for name in ("weights", "all"):
        other.engine.load_checkpoint(tmp_path / name)
        assert same(other.engine.state_dict(), one.engine.state_dict())
    assert other.optimizer.state_dict()["state"] == {}
    with pytest.raises(
        infinity.CheckpointError, match=r"has the states of 0 optimizers, and 1 are to be loaded$"
    ):
        other.load(tmp_path / "weights")


def test_gradients_are_forgotten(start: Start, tmp_path: Path) -> None:
    training = start()
    training.steps(range(1))
    training.save(tmp_path / "checkpoint")
    training.model(**text_batch(1)).loss.backward()
    training.load(tmp_path / "checkpoint")
    assert training.engine.gradient(training.model.places) is None
    before = training.everything()
    training.optimizer.step()
    assert same(training.everything(), before)


# What lies where


def test_plain_torch_reads_it(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE", 1000)
    training = start(precision="bf16", moment_precision="int8")
    training.steps(range(2))
    training.save(tmp_path / "checkpoint", note="hello", rng=torch.get_rng_state())
    dcp_to_torch_save(tmp_path / "checkpoint", tmp_path / "plain.pt")
    found = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert found.keys() == {"model", "optimizer", "extra", "infinity"}
    assert found["extra"]["0"]["note"] == "hello"
    weights, states = training.engine.state_dict(), training.optimizer.state_dict()["state"]
    assert found["model"].keys() == weights.keys() - {"head.weight"}, "tied weights are there once"
    shapes = found["infinity"]["shapes"]
    for number, (name, _) in enumerate(training.model.named_parameters()):
        assert torch.equal(found["model"][name].view(shapes[name]), states[number]["master"])
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(
                found["optimizer"][key][name].view(shapes[name]), states[number][key]
            )
    assert torch.equal(found["model"]["scale"], weights["scale"])


def test_every_byte_is_written_once(start: Start, tmp_path: Path) -> None:
    training = start(transformer(width=64), precision="bf16", moment_precision="bf16")
    training.steps(range(1))
    training.save(tmp_path / "checkpoint")
    parameters = [p.numel() for p in training.model.parameters()]
    size = sum(path.stat().st_size for path in (tmp_path / "checkpoint").iterdir())
    assert (
        (4 + 2 + 2) * sum(parameters)
        < size
        < (4 + 2 + 2) * sum(parameters) + 3 * 2048 * (len(parameters) + 3)
    )


def test_every_file_is_flushed_when_all_of_it_is_written(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch flushes `.metadata` before Python has written what it keeps back, which is as much as
    the file system wants."""

    @contextmanager
    def keeping_back(files: FileSystem, path: Path, mode: str) -> Iterator[Any]:
        with path.open(mode, buffering=1 << 20) as stream:
            yield stream

    monkeypatch.setattr(FileSystem, "create_stream", keeping_back)
    flushed: dict[int, int] = {}  # bytes by inode
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        flushed[status.st_ino] = status.st_size

    monkeypatch.setattr(os, "fsync", noting)
    training = start()
    training.steps(range(1))
    training.save(tmp_path / "checkpoint")
    statuses = {path.name: path.stat() for path in (tmp_path / "checkpoint").iterdir()}
    assert ".metadata" in statuses
    assert {name: flushed.get(status.st_ino) for name, status in statuses.items()} == {
        name: status.st_size for name, status in statuses.items()
    }


def test_an_older_checkpoint_goes_when_the_name_of_the_newer_one_is_flushed(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that was killed between its last rename and the flush leaves both. Where the power
    were cut after the older one was removed, the newer one could lose its name."""
    directory, old = tmp_path / "checkpoint", tmp_path / ".checkpoint.old"
    training = start()
    training.steps(range(1))
    training.save(directory)
    shutil.copytree(directory, old)
    calls: list[str] = []
    make_durable, rmtree = saving.make_durable, shutil.rmtree

    def flushing(path: Path) -> None:
        make_durable(path)
        calls.append(f"flush {path.name}")

    def removing(path: Path, **options: Any) -> None:
        calls.append(f"remove {path.name}")
        rmtree(path, **options)

    monkeypatch.setattr(saving, "make_durable", flushing)
    monkeypatch.setattr(shutil, "rmtree", removing)
    training.save(directory)
    before = calls[: calls.index(f"remove {old.name}")]
    assert f"flush {tmp_path.name}" in before


class Allocations(TorchDispatchMode):
    """The most bytes of tensors, of those made inside, that were alive at once on this thread."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def alive(self) -> dict[int, int]:
        """Bytes by the addresses of storages."""
        self._made = [made for made in self._made if made() is not None]
        storages = [
            tensor.untyped_storage() for made in self._made if (tensor := made()) is not None
        ]
        return {storage.data_ptr(): storage.nbytes() for storage in storages}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        alive = self.alive()
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor):
                address = tensor.untyped_storage().data_ptr()
                if address in alive or address not in given:  # no view of what is not ours
                    self._made.append(weakref.ref(tensor))
        self.most = max(self.most, sum(self.alive().values()))
        return result


def test_memory_is_bounded_by_pieces_and_not_by_the_model(
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    smallest: Callable[..., dict[str, int]],
) -> None:
    piece, mapped = 1 << 14, []
    monkeypatch.setattr(pieces, "PIECE", piece)
    monkeypatch.setattr(data_file, "BUFFER_BYTES", piece)
    monkeypatch.setattr(data_file, "RUN_BYTES", piece)
    real = data_file.huge_pages

    def huge_pages(nbytes: int) -> torch.Tensor:
        mapped.append(nbytes)
        return real(nbytes)

    monkeypatch.setattr(data_file, "huge_pages", huge_pages)
    for width in (64, 512):  # one unit each
        model = nn.Sequential(nn.Linear(width, 8 * width), nn.Linear(8 * width, 1))
        config = {"precision": "bf16", "parameters": "nvme", "optimizer": "nvme"}
        training = start(model, cache=0, **config, **smallest(model, nvme=[tmp_path], **config))
        training.model(torch.randn(2, width, dtype=torch.bfloat16)).sum().backward()
        training.optimizer.step()
        parts = range(0, 8 * width**2, piece)
        assert max(unit.facts.layout.numel for unit in training.engine.units) >= parts.stop
        for act in (training.save, training.load):
            gc.collect()
            mapped.clear()
            tracemalloc.start()
            with Allocations() as allocations:
                act(tmp_path / "checkpoint")
            _, python = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert piece * 4 <= allocations.most + sum(mapped) <= 6 * piece * 4, act
            # A piece as bytes, the plan, which takes some 5 KiB for each piece (of 16 MiB, but in
            # this test), and room.
            assert python <= 4 * piece * 4 + 3 * len(parts) * 8192 + 300_000, act


def test_the_process_does_not_grow(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of the real size leave no holes that malloc cannot use again."""
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(5)))
    training = start(
        model,
        precision="bf16",
        parameters="cpu",
        optimizer="cpu",
        cpu_memory="1GiB",
        gpu_memory="64MiB",
    )
    training.model(torch.randn(2, 2048, dtype=torch.bfloat16)).sum().backward()
    training.optimizer.step()
    training.optimizer.zero_grad()

    def resident() -> int:
        (line,) = [
            line
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("RssAnon")
        ]
        return int(line.split()[1]) << 10

    most = [resident()]

    def watch(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def watched(*arguments: Any) -> Any:
            result = real(*arguments)
            most.append(resident())
            return result

        monkeypatch.setattr(owner, name, watched)

    watch(saving.TensorSource, "put")
    watch(state.PieceCursor, "read")
    training.save(tmp_path / "checkpoint")
    training.load(tmp_path / "checkpoint")
    states = 12 * sum(p.numel() for p in training.model.parameters())
    assert max(most) - most[0] < (96 << 20) < states / 2, "a piece is 16 MiB"


# At the speed of the drive


def test_no_chunk_is_waited_for_alone(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save and a load take chunks in turn, while others are under way."""
    training = start(transformer(width=64), **PLACES[2])
    assert max(len(unit.states.chunks()) for unit in training.engine.units) > 1
    training.steps(range(2))
    saved = training.everything()

    def alone(*_: Any, **__: Any) -> None:
        raise RuntimeError("one chunk was checked out and waited for")

    held, most = 0, {}

    def count(name: str, real: Callable[..., Any], step: int) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            nonlocal held
            result = real(*arguments)
            held += step * (1 if step < 0 else len(result or ()))
            most[name] = max(most.get(name, 0), held)
            return result

        return counted

    with monkeypatch.context() as patch:
        patch.setattr(States, "_checked_out", alone)
        for name in ("check_out", "try_check_out"):
            patch.setattr(Staging, name, count(name, getattr(Staging, name), 1))
        patch.setattr(Checkout, "release", count("release", Checkout.release, -1))
        # However fast the drive is: a chunk is written when somebody waits for it.
        patch.setattr(Checkout, "committed", lambda checkout: False)
        training.save(tmp_path / "checkpoint")
        assert most.pop("try_check_out") > 1, "chunks of the store that are read at a time"
        training.load(tmp_path / "checkpoint")
        assert most.pop("try_check_out") > 1, "chunks of the store that are written at a time"
    assert same(training.everything(), saved)


def test_files_are_moved_by_the_engine_of_the_config(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = start(**PLACES[1], io_engine="posix")
    training.steps(range(1))
    saved, real, kinds = training.everything(), native.make_engine, []

    def make_engine(kind: str, **options: Any) -> Any:
        kinds.append(kind)
        return real(kind, **options)

    monkeypatch.setattr(native, "make_engine", make_engine)
    training.save(tmp_path / "checkpoint")
    training.load(tmp_path / "checkpoint")
    assert kinds == ["posix", "posix"]
    assert same(training.everything(), saved)


def test_a_drive_that_cannot_be_read_leaves_a_save_undone(start: Start, tmp_path: Path) -> None:
    training = start(transformer(width=64), **PLACES[2])
    training.steps(range(1))
    saved = training.everything()
    training.engine.io.set_faults(fail_read_at=3)
    with pytest.raises(
        infinity.CheckpointError, match=r"checkpoint cannot be written: .*read of .* stopped after"
    ):
        training.save(tmp_path / "checkpoint")
    assert not list(tmp_path.glob("*checkpoint*"))
    training.engine.io.set_faults()
    training.save(tmp_path / "checkpoint")
    assert same(training.everything(), saved)


@pytest.mark.parametrize("write", [0, 5])
def test_a_drive_that_cannot_be_written_ends_the_engine_in_a_load(
    write: int, start: Start, tmp_path: Path
) -> None:
    training = start(transformer(width=64), **PLACES[2])
    training.steps(range(1))
    training.save(tmp_path / "checkpoint")
    training.engine.io.set_faults(fail_write_at=write)
    with pytest.raises(
        infinity.CheckpointError, match=r"checkpoint cannot be loaded: .*write of .* stopped after"
    ):
        training.load(tmp_path / "checkpoint")
    with pytest.raises(infinity.EngineClosedError, match="write of"):
        training.step(1)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=8),
    tail=st.integers(0, 5),
    chunk=st.integers(1, 12),
)
def test_pieces_are_joined_to_chunks(lengths: list[tuple[int, int]], tail: int, chunk: int) -> None:
    """Each piece comes when it is needed, in order; what no piece has is zero."""
    some, at, brought = [], 0, []
    for gap, length in lengths:
        some.append(ShardPiece("key", at + gap, (0,), (length,)))
        at += gap + length
    whole = torch.zeros(at + tail)
    for piece in some:
        whole[piece.in_shard :][: piece.length] = torch.arange(1, piece.length + 1)
    memory = torch.empty(16)

    def bring(piece: ShardPiece) -> torch.Tensor:
        brought.append(piece)
        memory.fill_(torch.nan)  # what came before is gone
        memory[: piece.length] = torch.arange(1, piece.length + 1)
        return memory[: piece.length]

    cursor = state.PieceCursor(some, torch.float32, bring)
    for begin in range(0, len(whole), chunk):
        end = min(begin + chunk, len(whole))
        assert torch.equal(cursor.read(begin, end), whole[begin:end])
    assert brought == some


def test_the_caller_hears_how_far_it_is(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training = start(**PLACES[1])
    training.steps(range(1))
    (parameters,) = {sum(p.numel() for p in training.model.parameters())}
    monkeypatch.setattr(progress, "EVERY", 0.0)
    for doing, done, act in (
        ("saving", "saved", training.engine.save_checkpoint),
        ("loading", "loaded", training.engine.load_checkpoint),
    ):
        heard: list[tuple[int, int]] = []
        caplog.clear()
        with caplog.at_level(logging.INFO, "infinity"):
            act(
                tmp_path / "checkpoint",
                training.optimizer,
                progress=lambda *values, to=heard: to.append(values),
            )
        moved, totals = [value[0] for value in heard], {value[1] for value in heard}
        (total,) = totals
        assert moved == sorted(moved)
        assert moved[-1] == total >= 12 * parameters
        assert len(heard) > 10
        lines = [record.getMessage() for record in caplog.records if record.name == "infinity"]
        assert f"{doing} {tmp_path}/checkpoint: {format_bytes(moved[1])} of " in lines[0]
        assert lines[-1].startswith(f"{done} {tmp_path}/checkpoint: {format_bytes(total)} in ")


def test_a_save_whose_caller_has_enough_leaves_nothing(start: Start, tmp_path: Path) -> None:
    training = start()

    def enough(moved: int, total: int) -> None:
        if moved:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training.engine.save_checkpoint(tmp_path / "checkpoint", progress=enough)
    assert not list(tmp_path.glob("*checkpoint*"))
    training.save(tmp_path / "checkpoint")


# All or nothing


class Killed(BaseException):
    """The process is gone: nothing it would do from here on happens."""


@contextmanager
def killed_before(moment: int) -> Iterator[list[str]]:
    """The process ends before its action number `moment` on the file system; gives the actions so
    far."""
    done: list[str] = []
    with pytest.MonkeyPatch.context() as patch:

        def watch(owner: Any, name: str) -> None:
            real = getattr(owner, name)

            def act(*arguments: Any, **options: Any) -> Any:
                if len(done) >= moment:
                    raise Killed
                done.append(name)
                return real(*arguments, **options)

            patch.setattr(owner, name, act)

        for owner, name in (
            (shutil, "rmtree"),
            (Path, "rename"),
            (Path, "mkdir"),
            (os, "fsync"),
            (DataWriter, "fill"),
        ):
            watch(owner, name)
        yield done


@pytest.mark.parametrize("apart", [3, pytest.param(1, marks=pytest.mark.long)])
def test_a_save_that_is_killed_at_any_moment_leaves_a_whole_checkpoint(
    start: Start, tmp_path: Path, apart: int
) -> None:
    one, other = start(), start(transformer(1))
    one.steps(range(1))
    one.save(tmp_path / "checkpoint")
    old = one.everything()
    one.steps(range(1, 2))
    new, found = one.everything(), set()
    for moment in itertools.count(step=apart):
        with killed_before(moment) as done:
            try:
                one.save(tmp_path / "checkpoint")
            except Killed:
                pass
            else:
                break
        other.load(tmp_path / "checkpoint")
        is_new = same(other.everything(), new)
        assert is_new or same(other.everything(), old), done
        found.add(is_new)
        if is_new:  # go on with the old one
            other.load(tmp_path / "first")
            other.save(tmp_path / "checkpoint")
        elif moment == 0:
            other.save(tmp_path / "first")
    assert found == {False, True}
    assert moment > 50
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith("nvme")} == {
        "checkpoint",
        "first",
    }


def no_room(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_at(moment: str, patch: pytest.MonkeyPatch) -> None:
    """The drive of a checkpoint is full when its data file is made longer, when that is written, or
    when the files that say what is in it are made."""
    real = native.make_engine

    def make_engine(*arguments: Any, **options: Any) -> Any:
        engine = real(*arguments, **options)
        engine.set_faults(fail_write_at=0, fail_errno=errno.ENOSPC)
        return engine

    if moment == "reserve":
        patch.setattr(data_file, "allocate", no_room)
    elif moment == "write":
        patch.setattr(native, "make_engine", make_engine)
    else:
        patch.setattr(FileSystem, "create_stream", no_room)


@pytest.mark.parametrize("moment", ["reserve", "write", "index"])
def test_a_full_drive_is_one_error_and_training_goes_on(
    moment: str, start: Start, tmp_path: Path
) -> None:
    training, plain = start(), start()
    training.steps(range(1))
    training.save(tmp_path / "checkpoint")
    saved = training.everything()
    training.steps(range(1, 2))
    with pytest.MonkeyPatch.context() as patch:
        full_at(moment, patch)
        with pytest.raises(
            infinity.CheckpointError,
            match=f"^{tmp_path}/checkpoint cannot be written: .*No space left on device",
        ):
            training.save(tmp_path / "checkpoint")
    assert not list(tmp_path.glob(".checkpoint*"))
    training.steps(range(2, 3))
    assert [plain.steps(range(3))[-1], plain.everything().keys()] and same(
        training.everything(), plain.everything()
    )
    training.load(tmp_path / "checkpoint")
    assert same(training.everything(), saved)


@pytest.mark.root
def test_a_drive_that_is_really_full(start: Start, mount: Callable[[str], Path]) -> None:
    target, training = mount("size=600k"), start()
    training.steps(range(1))
    with pytest.raises(
        infinity.CheckpointError,
        match=r"mounted/checkpoint cannot be written: .*No space left on device",
    ):
        training.save(target / "checkpoint")
    assert list(target.iterdir()) == []
    training.steps(range(1, 2))


def test_what_is_no_checkpoint_is_not_replaced(start: Start, tmp_path: Path) -> None:
    training = start()
    (tmp_path / "mine").mkdir()
    training.save(tmp_path / "mine")  # empty
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("meow")
    with pytest.raises(
        infinity.CheckpointError, match="photos is there and no checkpoint, so it is not replaced"
    ):
        training.save(tmp_path / "photos")
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["cat.jpg"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        infinity.CheckpointError, match=r"^.*file/below cannot be written: .*Not a directory"
    ):
        training.save(tmp_path / "file" / "below")


def test_two_saves_to_one_directory_at_once_are_refused(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = start(), start(transformer(1))
    one.steps(range(1))
    real, errors = DataWriter.fill, []

    def second(*arguments: Any) -> None:
        monkeypatch.setattr(DataWriter, "fill", real)
        with pytest.raises(infinity.CheckpointError) as caught:
            other.save(tmp_path / "checkpoint")
        errors.append(str(caught.value))
        real(*arguments)

    monkeypatch.setattr(DataWriter, "fill", second)
    one.save(tmp_path / "checkpoint")
    assert errors == [
        f"{tmp_path}/checkpoint is being saved by another process; give each its own directory"
    ]
    other.load(tmp_path / "checkpoint")
    assert same(other.everything(), one.everything())
    assert not list(tmp_path.glob(".checkpoint*"))


# What is refused, before anything is changed


@contextmanager
def refused(training: Training, text: str) -> Iterator[None]:
    """Raises a `CheckpointError` with `text`; the engine is as it was, and can go on."""
    before = training.everything()
    with pytest.raises(infinity.CheckpointError, match=text) as caught:
        yield
    assert "\n" not in str(caught.value)
    assert same(training.everything(), before)
    training.step(7)


@pytest.mark.parametrize("top", ["/", "/proc"])
def test_the_top_of_a_file_system_is_no_place_for_a_save(start: Start, top: str) -> None:
    training = start()
    with refused(training, f"^{top} is the top of a file system, .*; choose a directory in it$"):
        training.save(Path(top))


def test_a_save_that_cannot_take_its_place_leaves_the_one_before(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, where = start(), tmp_path / "checkpoint"
    training.save(where)
    before = (where / "infinity.json").read_bytes()
    rename = os.rename

    def failing(source: Path, *rest: Any) -> None:
        if Path(source).name == ".checkpoint.partial":
            raise OSError(errno.EIO, os.strerror(errno.EIO), source)
        rename(source, *rest)

    monkeypatch.setattr(os, "rename", failing)
    with refused(training, f"^{where} cannot be written: .*Input/output error; "):
        training.save(where)
    monkeypatch.undo()
    assert (where / "infinity.json").read_bytes() == before
    training.load(where)


def test_what_is_no_checkpoint_or_a_part_of_one_is_refused(start: Start, tmp_path: Path) -> None:
    training, where = start(), tmp_path / "checkpoint"
    with refused(training, f"^{where} is no checkpoint: there is no such directory$"):
        training.load(where)
    where.mkdir()
    with refused(
        training, rf"^{where} is no checkpoint, or not a whole one: it has no file infinity\.json$"
    ):
        training.load(where)
    training.save(where)
    (data,) = where.glob("*.distcp")
    whole = data.read_bytes()
    data.write_bytes(whole[:-1])
    with refused(
        training,
        (
            rf"^{data} is cut off: it has {len(whole) - 1} of {len(whole)} bytes; take an "
            r"earlier checkpoint$"
        ),
    ):
        training.load(where)
    data.unlink()
    with refused(training, f"^{data} is missing; take an earlier checkpoint$"):
        training.load(where)
    data.write_bytes(whole)
    with data.open("ab") as file:
        file.write(b"more")
    with refused(
        training,
        (
            rf"^{data} is too long: it has {len(whole) + 4} bytes instead of {len(whole)}; "
            r"take an earlier"
        ),
    ):
        training.load(where)
    data.write_bytes(whole)
    content = (where / "infinity.json").read_bytes()
    (where / "infinity.json").write_bytes(content[:1000])
    with refused(
        training,
        f"^{where}/infinity.json is damaged: its digest is wrong; take an earlier checkpoint$",
    ):
        training.load(where)
    (where / "infinity.json").unlink()
    with refused(
        training,
        f"^{where} is no checkpoint, or not a whole one: it has no file infinity.json$",
    ):
        training.load(where)


def test_a_newer_version_is_refused(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = start()
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "VERSION", 4)
        training.save(tmp_path / "checkpoint")
    with refused(
        training,
        (
            "cannot be loaded: it has version 4, and this infinity reads version 3; use a "
            "newer infinity$"
        ),
    ):
        training.load(tmp_path / "checkpoint")


def test_a_checkpoint_of_torch_is_refused(start: Start, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
        torch.distributed.checkpoint.save(
            {"a": torch.zeros(3)}, checkpoint_id=tmp_path / "checkpoint"
        )
    training = start()
    with refused(training, r"is no checkpoint, or not a whole one: it has no file infinity\.json$"):
        training.load(tmp_path / "checkpoint")


def without_norm() -> Transformer:
    model = transformer()
    model.norm = nn.Identity()
    return model


def frozen() -> Transformer:
    model = transformer()
    model.norm.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: transformer(tied=False), r"belongs to another model: it has no head\.weight$"),
        (without_norm, r"belongs to another model: it has norm\.weight, which this one lacks$"),
        (
            lambda: transformer(width=16),
            r"belongs to another model: places has shape \[1, 64, 32\], here \[1, 64, 16\]$",
        ),
        (
            frozen,
            (
                r"does not fit: model\.norm\.weight is torch\.float32 there, and "
                r"torch\.bfloat16 here \(trained parameters"
            ),
        ),
    ],
    ids=["missing", "unexpected", "shape", "dtype"],
)
def test_another_model_is_refused_by_the_first_parameter_that_differs(
    build: Callable[[], nn.Module], text: str, start: Start, tmp_path: Path
) -> None:
    start(precision="bf16").save(tmp_path / "checkpoint")
    training = start(build(), precision="bf16")
    with refused(training, text):
        training.load(tmp_path / "checkpoint")


@pytest.mark.parametrize("form", ["fp32", "bf16", "unsplit"])
@pytest.mark.parametrize("places", PLACES[:3], ids=["gpu", "nvme", "cache0"])
def test_a_load_that_is_not_strict_leaves_what_only_one_of_them_has(
    form: str,
    places: dict[str, Any],
    start: Start,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A whole unit is missing, and a part of one. Masters are taken over with all their bits."""
    one = start(without_norm(), **FORMATS[form], **places)
    other = start(extended(), **FORMATS[form], **places)
    for training in (one, other):
        training.steps(range(2))
    first, second = tmp_path / "first", tmp_path / "second"
    one.save(first)
    with refused(other, r"belongs to another model: it has no norm\.weight$"):
        other.load(first)
    with pytest.raises(infinity.CheckpointError, match="has other parameter groups"):
        other.engine.load_checkpoint(first, other.optimizer, strict=False)
    other.save(second)
    saved, own = masters(one.model), masters(other.model)
    other.engine.load_checkpoint(first, strict=False)
    assert same(masters(other.model), own | saved)
    one.engine.load_checkpoint(second, strict=False)
    assert same(masters(one.model), {name: own[name] for name in saved})
    names = "norm.weight, norm.bias, more.weight, more.bias"
    assert [r.getMessage() for r in caplog.records if r.name == "infinity"] == [
        f"{first} has no {names}; the model keeps its own",
        f"{second} has {names}, which this model lacks",
    ]


def extended() -> Transformer:
    model = transformer(1)
    model.more = nn.Linear(32, 32)
    head = model.head.forward
    model.head.forward = lambda x: head(x + model.more(x))
    return model


def masters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: infinity.get(p, "master").clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lion", "its states are exp_avg, exp_avg_sq, and here exp_avg$"),
        ("rmsprop", "its states are exp_avg, exp_avg_sq, and here those of torch's RMSprop$"),
        ("sgd", "its states are exp_avg, exp_avg_sq, and here none$"),
        (
            "groups",
            (
                r"has other parameter groups, of \[\d+\] parameters, and here of \[5, \d+\]; "
                r"they must be of the same"
            ),
        ),
    ],
)
def test_another_optimizer_is_refused(name: str, text: str, start: Start, tmp_path: Path) -> None:
    one = start()
    one.steps(range(1))
    one.save(tmp_path / "checkpoint")
    config, make = MAKERS[name]
    training = start(None, make, **config)
    with refused(training, text):
        training.load(tmp_path / "checkpoint")


def test_what_could_not_be_loaded_is_not_saved(start: Start, tmp_path: Path) -> None:
    training = start()
    with refused(
        training, "^extra may have numbers, texts and tensors in dicts, lists and tuples only: "
    ):
        training.save(tmp_path / "checkpoint", rng=object())
    assert not list(tmp_path.glob("*checkpoint*"))
    engine, optimizer = training.engine, training.optimizer
    for use, text in (
        (lambda: engine.save_checkpoint(tmp_path / "checkpoint", extra=5), "^extra is 5; give a d"),
        (lambda: engine.save_checkpoint(optimizer), "^the directory of a checkpoint is a value of"),
        (lambda: engine.load_checkpoint(None, optimizer), "^the directory of a checkpoint is None"),
    ):
        with pytest.raises(infinity.ConfigError, match=text):
            use()
    assert not list(tmp_path.glob("*checkpoint*"))
    with pytest.raises(
        infinity.ConfigError,
        match=r"takes optimizers of infinity for the parameters of this model$",
    ):
        training.engine.save_checkpoint(
            tmp_path / "checkpoint", torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        )  # type: ignore
    with pytest.raises(
        infinity.ConfigError,
        match=r"takes optimizers of infinity for the parameters of this model$",
    ):
        training.engine.save_checkpoint(tmp_path / "checkpoint", start().optimizer)


def test_a_closed_engine_says_so(start: Start, tmp_path: Path) -> None:
    training = start()
    training.save(tmp_path / "checkpoint")
    training.engine.close()
    for act in (training.save, training.load):
        with pytest.raises(infinity.EngineClosedError, match=r"^the engine was closed$"):
            act(tmp_path / "checkpoint")


def test_loading_what_is_in_use_is_refused(start: Start, tmp_path: Path) -> None:
    training = start()
    training.save(tmp_path / "checkpoint")
    with infinity.gathered(training.model.norm), refused_inside(training):
        training.load(tmp_path / "checkpoint")
    training.load(tmp_path / "checkpoint")


@contextmanager
def refused_inside(training: Training) -> Iterator[None]:
    with pytest.raises(
        infinity.CheckpointError,
        match=r"cannot be loaded inside of a forward or of infinity\.gathered$",
    ):
        yield


def test_a_flipped_bit_is_never_silent(start: Start, tmp_path: Path) -> None:
    """The engine is as it was, or ends with the name of what is damaged."""
    training = start()
    training.steps(range(1))
    training.save(tmp_path / "checkpoint")
    (data,) = (tmp_path / "checkpoint").glob("*.distcp")
    whole, ended = data.read_bytes(), set()
    for place in range(100, len(whole), len(whole) // 12):
        data.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        other = start(transformer(1))
        before = other.everything()
        with pytest.raises(infinity.CheckpointError) as error:
            other.load(tmp_path / "checkpoint")
        assert re.search(
            f"^{data} is damaged in [a-z]+[.].*; take an earlier checkpoint$", str(error.value)
        ) or "infinity" in str(error.value)
        try:
            assert same(other.everything(), before)
            ended.add(False)
        except infinity.EngineClosedError as closed:
            assert "is damaged in" in str(closed)
            ended.add(True)
    assert True in ended
