"""Times of one optimizer step over a large buffer, beside a plain loop and other optimizers, in
interleaved rounds.

[Note: a fair comparison]
Memory limits such an update, so the figure is bytes moved per second. The yardstick is a plain
in-place loop over three fp32 arrays with the same threads and cuts (`in_place_update` of
native/cpu_adam, 20 bytes per element). An update to a shadow copy has a second yardstick, a loop
that writes to another place past the caches (`shadow_update`). Such non-temporal stores are slower
than cached stores in any program. All subjects work in one allocation on huge pages that was
touched before. The other optimizers get views of the arrays of our fp32 update as their parameter,
gradient and moments. Every round runs each subject once, in an order that turns from round to
round. Ratios are taken within a round, because other work of the machine changes the speeds of a
round together.
"""

from __future__ import annotations

import importlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from infinity import native
from infinity.bench.summary import spread
from infinity.device import HostMemory
from infinity.errors import ConfigError
from infinity.free_memory import read_host
from infinity.measure.rates import DTYPES, Formats, apart, pieces_of, threads_of, update_of

LOOP_BYTES = 20.0
SHADOW_LOOP = "loop to a shadow copy"
PEER_BYTES = 28.0


CASES = (
    Formats("fp32", "fp32", "fp32", "none", "fp32"),
    Formats("bf16, fp32 master", "bf16", "bf16", "fp32", "fp32"),
    Formats("bf16, split master", "bf16", "bf16", "split", "fp32"),
    Formats("split, bf16 moments", "bf16", "bf16", "split", "bf16"),
    Formats("split, int8 moments", "bf16", "bf16", "split", "int8"),
    Formats("split, to a shadow copy", "bf16", "bf16", "split", "fp32", shadow=True),
)
NORMS = {"gradient norm, fp32": "fp32", "gradient norm, bf16": "bf16"}
"""The sums of squares for clipping, of gradients in these dtypes."""
SUMS = {f"gradient add, {dtype}": dtype for dtype in DTYPES}
"""Additions to gradients in host memory, in these dtypes."""


@dataclass
class Subject:
    """A step over all parameters. `fill` writes the shared memory again before it.

    `seconds` has one time per round.
    """

    name: str
    bytes_per_parameter: float
    fill: Callable[[], None]
    step: Callable[[], None]
    seconds: list[float] = field(default_factory=list)


class Bench:
    """Measures steps over `parameters` parameters with `threads_of(threads)` threads. `close` frees
    both."""

    def __init__(self, parameters: int, threads: int | None, peers: bool) -> None:
        if parameters < 1 << 16:
            raise ConfigError(
                f"{parameters} parameters stay in the caches; measure at least {1 << 16}"
            )
        self.parameters, self.threads = parameters, threads_of(threads)
        self._kernels = native.cpu_adam()
        self._pool = self._kernels.Pool(self.threads)
        self._most = max(sum(map(apart, case.sizes(parameters).values())) for case in CASES)
        host = read_host()
        if host is not None and self._most > 0.9 * host.free:
            raise ConfigError(
                f"{parameters} parameters need {self._most >> 20} MiB and "
                f"{host.free >> 20} MiB are free; measure fewer"
            )
        self._memory = HostMemory(self._most)
        arrays = ("a", "b", "c", "to_a", "to_c")
        loop = self._loop("in-place loop", arrays[:3], self._kernels.in_place_update)
        self.subjects = [loop, *map(self._ours, CASES)]
        self.subjects += [self._loop(SHADOW_LOOP, arrays, self._kernels.shadow_update)]
        self.subjects += [*map(self._norm, NORMS), *map(self._sum, SUMS)]
        if peers:
            self.subjects += [self._peer(name, make) for name, make in _peers()]
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(self.threads)  # threads of the other optimizers

    def close(self) -> None:
        """Free memory and threads."""
        torch.set_num_threads(self._threads_before)
        self.subjects.clear()
        self._pool = None
        self._memory.close()

    def _loop(self, name: str, arrays: Sequence[str], update: Callable[..., None]) -> Subject:
        """A plain loop over fp32 `arrays`."""
        pieces = pieces_of(self._memory.tensor, dict.fromkeys(arrays, 4 * self.parameters))
        places = [pieces[each].data_ptr() for each in arrays]

        def fill() -> None:
            for piece in pieces.values():
                piece.view(torch.float32).fill_(0.01)

        return Subject(
            name, LOOP_BYTES, fill, partial(update, *places, self.parameters, self._pool)
        )

    def _pieces(self, case: Formats) -> dict[str, torch.Tensor]:
        return pieces_of(self._memory.tensor, case.sizes(self.parameters))

    def _fill(self, case: Formats) -> None:
        for name, piece in self._pieces(case).items():
            if name in ("grad", "param"):
                piece.view(DTYPES[case.grad if name == "grad" else case.param]).fill_(0.01)
            else:
                piece.zero_()

    def _ours(self, case: Formats) -> Subject:
        update = update_of(case, self._pieces(case), self.parameters, self._kernels)
        step = partial(update, isa=self._kernels.best_isa(), pool=self._pool)
        return Subject(case.name, case.bytes_per_parameter, partial(self._fill, case), step)

    def _norm(self, name: str) -> Subject:
        dtype = DTYPES[NORMS[name]]
        sizes = {"grad": dtype.itemsize * self.parameters}
        values = pieces_of(self._memory.tensor, sizes)["grad"].view(dtype)

        def fill() -> None:
            values.fill_(0.01)

        measured = (values.data_ptr(), NORMS[name], self.parameters, 0.0)
        step = partial(self._kernels.squared_norm, *measured, self._kernels.best_isa(), self._pool)
        return Subject(name, dtype.itemsize, fill, step)

    def _sum(self, name: str) -> Subject:
        dtype = DTYPES[SUMS[name]]
        sizes = dict.fromkeys(("grad", "more"), dtype.itemsize * self.parameters)
        pieces = pieces_of(self._memory.tensor, sizes)
        target, source = (pieces[key].view(dtype) for key in sizes)

        def fill() -> None:
            target.fill_(0.01)
            source.fill_(0.01)

        added = (target.data_ptr(), source.data_ptr(), SUMS[name], self.parameters)
        step = partial(self._kernels.add, *added, self._kernels.best_isa(), self._pool)
        return Subject(name, 3 * dtype.itemsize, fill, step)

    def _peer(self, name: str, make: Callable[[torch.nn.Parameter], Any]) -> Subject:
        pieces = {
            key: piece.view(torch.float32)
            for key, piece in self._pieces(CASES[0]).items()
            if piece.numel()
        }
        parameter = torch.nn.Parameter(pieces["param"])
        parameter.grad = pieces["grad"]
        optimizer = make(parameter)
        steps = torch.tensor(10.0) if name.startswith("torch") else 10
        optimizer.state[parameter] = {
            "step": steps,
            "exp_avg": pieces["first"],
            "exp_avg_sq": pieces["second"],
        }
        return Subject(name, PEER_BYTES, partial(self._fill, CASES[0]), optimizer.step)

    def run(self, rounds: int, say: Callable[[str], None]) -> None:
        """Run each subject once per round, after one untimed step each time."""
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}, {self.parameters:,} parameters")
            turned = number % len(self.subjects)
            for subject in self.subjects[turned:] + self.subjects[:turned]:
                subject.fill()
                subject.step()
                start = time.perf_counter()
                subject.step()
                subject.seconds.append(time.perf_counter() - start)


def _peers() -> Iterator[tuple[str, Callable[[torch.nn.Parameter], Any]]]:
    """torch's fused AdamW, and DeepSpeed's CPUAdam if DeepSpeed is installed."""
    yield "torch fused AdamW", lambda parameter: torch.optim.AdamW([parameter], lr=1e-3, fused=True)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        deepspeed = importlib.import_module("deepspeed.ops.adam")
    except ImportError:
        return
    yield (
        "DeepSpeed CPUAdam",
        lambda parameter: deepspeed.DeepSpeedCPUAdam([parameter], lr=1e-3, adamw_mode=True),
    )


def _spread(name: str, values: list[float]) -> dict[str, float]:
    return {f"{name}_{key}": value for key, value in spread(values).items()}


def _shares(subject: Subject, limit: Subject) -> list[float]:
    """Bytes per second over those of `limit`, round by round."""
    return [
        subject.bytes_per_parameter / mine / (limit.bytes_per_parameter / theirs)
        for mine, theirs in zip(subject.seconds, limit.seconds, strict=True)
    ]


def rows(subjects: list[Subject], parameters: int) -> list[dict[str, Any]]:
    """A row for each subject, ready for JSON. Ratios are taken within a round: bytes per second
    over those of the loop, and for an update to a shadow copy also over those of the loop to one.
    For our fp32 update, also its steps per second over those of each other optimizer."""
    loop = subjects[0]
    ours = {*NORMS, *SUMS, SHADOW_LOOP, *(case.name for case in CASES)}
    shadowed = {case.name for case in CASES if case.shadow}
    shadow_loop = next((each for each in subjects if each.name == SHADOW_LOOP), None)
    result = []
    for subject in subjects:
        bytes_moved = subject.bytes_per_parameter * parameters
        row: dict[str, Any] = {
            "name": subject.name,
            "parameters_count": parameters,
            "bytes_per_parameter": subject.bytes_per_parameter,
            "nanoseconds_per_parameter": statistics.median(subject.seconds) / parameters * 1e9,
        }
        row |= _spread(
            "gb_per_second", [bytes_moved / seconds / 1e9 for seconds in subject.seconds]
        )
        row |= _spread("of_in_place_loop_ratio", _shares(subject, loop))
        if subject.name in shadowed and shadow_loop is not None:
            row |= _spread("of_shadow_loop_ratio", _shares(subject, shadow_loop))
        if subject.name == CASES[0].name:
            row["over_peers"] = {
                peer.name: _spread(
                    "ratio",
                    [
                        theirs / mine
                        for mine, theirs in zip(subject.seconds, peer.seconds, strict=True)
                    ],
                )
                for peer in subjects[1:]
                if peer.name not in ours
            }
        result.append(row)
    return result


def measure(
    parameters: int, rounds: int, threads: int | None, peers: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """Rows for all formats, the loop and the other optimizers over `parameters` parameters.

    Raises `ConfigError` if there are too few parameters for a figure, or too many for the free
    memory.
    """
    bench = Bench(parameters, threads, peers)
    try:
        bench.run(rounds, say)
        measured = rows(bench.subjects, parameters)
    finally:
        bench.close()
    return {
        "parameters_count": parameters,
        "rounds_count": rounds,
        "threads_count": bench.threads,
        "instruction_set": native.cpu_adam().best_isa(),
        "rows": measured,
    }
