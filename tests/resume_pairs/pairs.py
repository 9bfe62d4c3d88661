"""A resume leaves every committed byte as it was until its own first commit, whatever its
configuration is, and also where it is refused or fails half-way.

    make resume-pairs PAIRS=5000
    PYTHONPATH=tests python -m resume_pairs --pairs 5000

A pair is a run, the configuration that resumes it, and a failure. The committed directories of a
run are made once and copied. Pairs are chosen so that every two choices of all knobs meet as soon
as possible; a pair has a number, and is the same each time. The bytes are compared as the second
run writes its first record, and where there was none after it has ended.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

import infinity
from infinity import native
from infinity.assembly import Assembly
from infinity.build import Build
from infinity.directories import directory
from infinity.directories.lock import LOCK_NAME
from infinity.durable import store
from infinity.durable.states import DurableStates
from infinity.durable.store import DurableStore
from infinity.errors import InfinityError
from infinity.measure import speed
from infinity.tiers import drives
from infinity.tiers.drives import NvmeTier
from infinity.tiers.manifest import DURABLE_NAMES, STATES_NAME
from support.configs import config_of
from support.discrete import DiscreteDevice
from support.threads import one_thread

WIDTH, PAGE = 64, 4096
STRIPE_BYTES = 64 << 10
LEAST: dict[str, Any] = {"device": "cpu", "threads": 1, "poison": True, "durability": "step"}

FIRST: dict[str, Sequence[Any]] = {
    "recompute": ("off", "all", "auto"),
    "activations": ("gpu", "cpu", "nvme"),
    "gradients": ("cpu", "gpu", "nvme"),
    "durability": ("step", 2, 3),
    "update": ("exact", "speculative", "plain"),
    "cache": (0, "auto", "64KiB"),
    "cpu_memory": ("8MiB", "64MiB"),
    "drives": (1, 2),
    "discrete": (False, True),
    "frozen": (False, True),
}
SECOND: dict[str, Sequence[Any]] = FIRST | {
    "drives": (0, 1),  # more or fewer than those of the first run
    "frozen": (False,),  # it is a property of the model
    "update": ("exact", "speculative", "plain", "delayed"),
    "gpu_memory": ("16MiB", "2MiB", "4KiB"),
    "gpu_cache": ("auto", 0),
    "activation_memory": ("auto", "24KiB"),
    "nvme_shares": ("measured", "equal"),
    "nvme_memory": (None, "64KiB"),
    "parameters": ("nvme", "cpu"),
    "optimizer": ("nvme", "cpu"),
    "precision": ("fp32", "bf16"),
    "moment_precision": ("fp32", "int8"),
    "algorithm": ("adam", "sgd"),
    "verify": ("resume", "always"),
    "io_engine": ("posix", "auto"),
}
REFUSED = {
    "parameters": "cpu",
    "optimizer": "cpu",
    "update": "delayed",
    "precision": "bf16",
    "moment_precision": "int8",
    "algorithm": "sgd",
    "drives": 1,
    "nvme_memory": "64KiB",
    "gpu_memory": "4KiB",
}
"""Choices with which a run is refused, so that most pairs have none of them."""
FAILURES = (
    "",
    "after measure",
    "after allocate",
    "after take_over",
    "after hook",
    "a read",
    "a write",
    "no room",
    "no unnamed files",
)

Choices = dict[str, Any]


class Pair(NamedTuple):
    """A run, what resumes it, and what fails then."""

    first: Choices
    second: Choices
    failure: str

    def items(self) -> frozenset[tuple[str, Any]]:
        """Its choices, to be covered two by two."""
        named = [(f"first {name}", value) for name, value in self.first.items()]
        named += [(f"second {name}", value) for name, value in self.second.items()]
        return frozenset([*named, ("failure", self.failure)])


class Outcome(NamedTuple):
    """What became of a pair: how the second run ended, and what is wrong, if anything."""

    ended: str
    wrong: str


def choose(count: int, runs: int = 12, tries: int = 12) -> Iterator[Pair]:
    """`count` pairs of `runs` first runs. Each is the one of some random ones that covers most new
    combinations of two choices."""
    chance, covered = random.Random(0), set[frozenset[tuple[str, Any]]]()
    firsts = _covering([_drawn(FIRST, chance) for _ in range(200)], runs)
    for number in range(count):
        drawn = [
            Pair(firsts[number % runs], _second(chance, number), chance.choice(FAILURES))
            for _ in range(tries)
        ]
        new = [_two_by_two(pair.items()) - covered for pair in drawn]
        best = max(range(tries), key=lambda at: len(new[at]))
        covered |= new[best]
        yield drawn[best]


def _second(chance: random.Random, number: int) -> Choices:
    """That of pair `number`: one of four is refused for its configuration."""
    drawn = _drawn(SECOND, chance)
    kept = "" if number % 4 else chance.choice(list(REFUSED))
    for name, refused in REFUSED.items():
        if drawn[name] == refused and name != kept:
            drawn[name] = SECOND[name][0]
    if drawn["activations"] == "gpu":
        del drawn["activation_memory"]
    return drawn


def _drawn(knobs: Mapping[str, Sequence[Any]], chance: random.Random) -> Choices:
    return {name: chance.choice(list(values)) for name, values in knobs.items()}


def _two_by_two(items: frozenset[tuple[str, Any]]) -> set[frozenset[tuple[str, Any]]]:
    return {frozenset(two) for two in itertools.combinations(items, 2)}


def _covering(drawn: Sequence[Choices], count: int) -> list[Choices]:
    """`count` of `drawn`, in which most combinations of two choices are."""
    found, covered = list[Choices](), set[frozenset[tuple[str, Any]]]()
    for _ in range(count):
        each = max(drawn, key=lambda one: len(_two_by_two(frozenset(one.items())) - covered))
        covered |= _two_by_two(frozenset(each.items()))
        found.append(each)
    return found


class Committed(NamedTuple):
    """What a run left: where, and each page that its last commit speaks of."""

    place: Path
    pages: Mapping[tuple[str, int], bytes]

    def changed(self, place: Path) -> str:
        """What is different of it in the copy at `place`, in words; "" for nothing."""
        lost = [
            f"{name} at {at}"
            for (name, at), page in self.pages.items()
            if _page(place / name, at) != page
        ]
        return f"{len(lost)} of {len(self.pages)} pages, first {lost[0]}" if lost else ""


def _page(path: Path, at: int) -> bytes:
    with path.open("rb") as file:
        file.seek(at)
        return file.read(PAGE)


class Runs:
    """The runs that were made so far, below `place`."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._made: dict[str, Committed] = {}

    def committed(self, choices: Choices) -> Committed:
        """What the run with these choices left."""
        key = repr(choices)
        if key not in self._made:
            place = self._place / f"run{len(self._made)}"
            pages: dict[tuple[str, int], bytes] = {}
            with _noting_commits(place, pages):
                _train(place, choices, choices["drives"], steps=3, resume=False)
            assert pages, "nothing was committed"
            self._made[key] = Committed(place, pages)
        return self._made[key]

    def outcome(self, pair: Pair) -> Outcome:
        """Resume a copy of the first run as `pair` says."""
        committed = self.committed(pair.first)
        wrong, place = list[str](), self._place / "copy"
        shutil.copytree(committed.place, place)
        real, records = DurableStates.record, 0

        def record(states: DurableStates, *values: Any) -> None:
            nonlocal records
            if records == 0:
                wrong.append(committed.changed(place))
            records += 1
            real(states, *values)

        drives_now = pair.first["drives"] + pair.second["drives"]
        choices = pair.second | {"frozen": pair.first["frozen"]}
        try:
            with mock.patch.object(DurableStates, "record", record), _failing(pair.failure):
                ended = _train(place, choices, drives_now % 3 or 1, steps=5)
        finally:
            if records == 0:
                wrong.append(committed.changed(place))
            left = {each.name for folder in place.iterdir() for each in folder.iterdir()}
            wrong += sorted(left - {STATES_NAME, LOCK_NAME, *DURABLE_NAMES})
            shutil.rmtree(place)
        return Outcome(ended, "; ".join(filter(None, wrong)))


@contextmanager
def _noting_commits(place: Path, pages: dict[tuple[str, int], bytes]) -> Iterator[None]:
    """`pages` are those that the last commit of a run in `place` speaks of. They are read when the
    run has ended; what they are does not come from what the engine keeps from being written."""
    real, flush = DurableStore.commit, NvmeTier.flush
    tiers, places = list[NvmeTier](), list[tuple[str, int]]()

    def flushed(self: NvmeTier) -> None:
        tiers.append(self)
        flush(self)

    def commit(self: DurableStore, key: Any, versions: Sequence[Any]) -> None:
        places.clear()
        for block, version in zip(self.state_blocks(), versions, strict=True):
            extent = block.home.extents[version.extent]
            for at in range(0, extent.nbytes, PAGE):
                path, offset = tiers[-1].where(extent, at)
                places.append((str(Path(path).relative_to(place)), offset))
        real(self, key, versions)

    with (
        mock.patch.object(DurableStore, "commit", commit),
        mock.patch.object(NvmeTier, "flush", flushed),
    ):
        yield
    pages.update({(name, at): _page(place / name, at) for name, at in places})


class Broken(Exception):
    """What a pair lets fail."""


@contextmanager
def _failing(failure: str) -> Iterator[None]:
    """Inside, `failure` comes, as soon as it can."""
    with ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        before, _, step = failure.partition("after ")
        if step and not before:
            owner = Build if hasattr(Build, step) else Assembly
            replace(owner, step, _then_broken(getattr(owner, step)))
        elif failure in ("a read", "a write"):
            make, key = drives.make_engine, f"fail_{failure[2:]}_at"

            def make_engine(kind: str, **options: Any) -> Any:
                engine = make(kind, **options)
                engine.set_faults(**{key: 1})
                return engine

            replace(drives, "make_engine", make_engine)
        elif failure == "no room":
            named = native.aio().File
            allocate = named.allocate

            def full(self: Any, nbytes: int) -> None:
                if nbytes > self.size():
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
                allocate(self, nbytes)

            replace(named, "allocate", full)
        elif failure == "no unnamed files":
            replace(directory, "os", _WithoutUnnamed())
        yield


class _WithoutUnnamed:
    """`os` on a file system that makes no files without a name."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Any, flags: int, *values: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return os.open(path, flags, *values, **named)


def _then_broken(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*values: Any, **named: Any) -> Any:
        real(*values, **named)
        raise Broken(real.__name__)

    return call


class Model(nn.Module):
    """Blocks that are alike, as those that are recomputed; one weight may be frozen."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
        )
        self.head = nn.Linear(WIDTH, WIDTH).requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x.to(self.head.weight.dtype)))


def _train(place: Path, choices: Choices, count: int, steps: int, resume: bool = True) -> str:
    """Train until step `steps`; how that ended."""
    options = dict(choices)
    discrete, frozen = options.pop("discrete"), options.pop("frozen")
    options.pop("drives")
    folders = [place / f"nvme{number}" for number in range(count)]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    device = DiscreteDevice if discrete else Build.check.__globals__["ComputeDevice"]
    try:
        with _small(), mock.patch.dict(Build.check.__globals__, {"ComputeDevice": device}):
            config = config_of(
                **LEAST | {"gpu_memory": "16MiB", "cpu_memory": "16MiB", "nvme": folders} | options
            )
            model = infinity.wrap(Model(frozen), config, resume=resume)
            with infinity.engine(model) as engine:
                weights = [each for each in model.parameters() if each.requires_grad]
                make = infinity.SGD if config.algorithm == "sgd" else infinity.AdamW
                optimizer = make(weights, lr=1e-2)
                for number in range(engine.committed_step or 0, steps):
                    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
                    model(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
    except (InfinityError, Broken, OSError) as error:
        if not resume:
            raise
        return type(error).__name__
    return "committed"


@contextmanager
def _small() -> Iterator[None]:
    """Stripes of 64 KiB, and four of them to measure a drive with."""
    with ExitStack() as stack:
        for owner, name, value in (
            (drives, "STRIPE_BYTES", STRIPE_BYTES),
            (store, "STRIPE_BYTES", STRIPE_BYTES),
            (speed, "PROBE_BYTES", 4 * STRIPE_BYTES),
            (speed, "_REQUEST_BYTES", STRIPE_BYTES),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


class Summary(NamedTuple):
    """How many pairs ended how, and which of them are wrong."""

    ended: Counter[str]
    wrong: list[str]


def run(count: int, place: Path, says: Callable[[str], None] = lambda text: None) -> Summary:
    """Run the first `count` pairs below `place`."""
    summary, runs = Summary(Counter(), []), Runs(place)
    for number, pair in enumerate(choose(count)):
        outcome = runs.outcome(pair)
        summary.ended[outcome.ended] += 1
        if outcome.wrong:
            summary.wrong.append(f"pair {number}: {outcome.wrong}: {pair}")
            says(summary.wrong[-1])
    return summary


def main() -> int:
    """Run the pairs that the command line says; returns how many are wrong."""
    parser = argparse.ArgumentParser(prog="resume_pairs", description=__doc__)
    parser.add_argument("--pairs", type=int, default=5000, help="how many, from the first one on")
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as place, one_thread():
        summary = run(options.pairs, Path(place), lambda text: print(text, flush=True))
    sys.stdout.write(
        f"{options.pairs} pairs, {len(summary.wrong)} wrong, {time.monotonic() - begin:.0f} s: "
        f"{', '.join(f'{count} {how}' for how, count in summary.ended.most_common())}\n"
    )
    return len(summary.wrong)
