#!/usr/bin/env python3
"""The CUDA kernels against what the GPU's memory gives: the share of a plain copy's bytes per
second that each reaches.

The yardsticks are a copy within the device (8 bytes moved per fp32 element) and torch's `a.add_(b)`
(12); torch's fused AdamW runs beside the updates. Everyone runs once per round, in an order that
turns from round to round, each several launches long between two events of the stream; ratios are
taken within a round. The launches are one CUDA graph, for few elements take less time than Python
needs to enqueue the next launch; what is left between them is the GPU's own. Where a graph cannot
be captured they are enqueued one by one, and the row says `in_one_graph: false`.

Bytes are those that the formats need: an element of an array that is read and written counts twice.
GB = 1e9 bytes.

    benchmarks/gpu/kernels.py [--parameters 1e6 16e6 128e6] [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from infinity import native
from infinity.bench.summary import Row, Spread, Summary

QUESTION = "How near do the CUDA kernels come to the bandwidth of the GPU's memory?"
LIMIT = "the bytes per second of a copy within the device, in the same round"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDTHS = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "none": 0.0, "split": 2.0, "int8": 36864 / 32768}
HYPER = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "bias_correction1": 0.9,
    "bias_correction2_sqrt": 0.9,
    "grad_scale": 0.9,
}
FORMATS = [
    ("fp32", "fp32", "none"),
    ("bf16", "bf16", "fp32"),
    ("fp16", "fp16", "fp32"),
    ("fp32", "bf16", "split"),
    ("bf16", "bf16", "split"),
]
MOMENTS = {"adam": 2, "adagrad": 1, "lion": 1, "momentum": 1, "sgd": 0}
COPY = "copy"


class Work(NamedTuple):
    """Something that is timed: what it enqueues, and the bytes that this has to move."""

    name: str
    nbytes: float
    enqueue: Callable[[], Any]


class Arrays:
    """The arrays that all of them work on, `n` elements each. Contents are ordinary numbers: no
    step meets a NaN."""

    def __init__(self, n: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(0)
        self.n = n
        self.values = {
            name: torch.randn(n, generator=generator, device="cuda").to(dtype)
            for name, dtype in DTYPES.items()
        }
        self.other = torch.randn(n, generator=generator, device="cuda")
        self.master = torch.randn(n, generator=generator, device="cuda")
        self.param = torch.zeros(n, dtype=torch.int32, device="cuda")
        cpu = native.cpu_adam()
        moments = [
            torch.zeros(
                cpu.block_bytes("fp32", n + cpu.SUPERBLOCK), dtype=torch.uint8, device="cuda"
            )
            for _ in range(2)
        ]
        self.first, self.second = moments
        self.sums = torch.empty(native.cuda().norm_blocks(n), dtype=torch.float64, device="cuda")
        self.total = torch.zeros(1, dtype=torch.float64, device="cuda")

    def update(self, member: str, grad: str, param: str, master: str, moments: str) -> Work:
        rule = "sgd" if member == "momentum" else member
        used = MOMENTS[member]
        width = (
            WIDTHS[grad]
            + WIDTHS[param] * (1 if master == "fp32" else 2)
            + 2 * WIDTHS[master]
            + 2 * used * WIDTHS[moments]
        )
        first, second = member in ("adam", "lion", "momentum"), member in ("adam", "adagrad")

        def enqueue() -> None:
            native.cuda().update(
                rule,
                self.values[grad].data_ptr(),
                grad,
                self.param.data_ptr(),
                param,
                0 if master == "none" else self.master.data_ptr(),
                master,
                self.first.data_ptr() if first else 0,
                self.second.data_ptr() if second else 0,
                moments,
                0,
                self.n,
                position=0,
                key=1,
                **HYPER,
                momentum=0.9 if member == "momentum" else 0.0,
                stream=torch.cuda.current_stream().cuda_stream,
            )

        kept = f", moments {moments}" if used else ""
        return Work(
            f"{member}: grad {grad}, param {param}, master {master}{kept}", self.n * width, enqueue
        )

    def prepare(self) -> None:
        """Zeros are a state in every format, so that whoever comes next finds one that it can
        read."""
        for tensor in (self.param, self.first, self.second, self.master):
            tensor.zero_()

    def yardsticks(self) -> list[Work]:
        return [
            Work(COPY, 8.0 * self.n, lambda: self.param.view(torch.float32).copy_(self.other)),
            Work("torch a.add_(b), fp32", 12.0 * self.n, lambda: self.master.add_(self.other)),
            self.torch_adam(),
        ]

    def torch_adam(self) -> Work:
        count = self.n * 4
        weights = self.master.detach().requires_grad_()
        weights.grad = self.values["fp32"]
        optimizer = torch.optim.AdamW([weights], lr=1e-3, fused=True, capturable=True)
        optimizer.step()
        state = optimizer.state[weights]
        state["exp_avg"], state["exp_avg_sq"] = (
            block[:count].view(torch.float32) for block in (self.first, self.second)
        )
        return Work("torch AdamW(fused=True), fp32", 28.0 * self.n, optimizer.step)

    def norms(self) -> list[Work]:
        work = []
        for name, tensor in self.values.items():
            address, width = tensor.data_ptr(), WIDTHS[name]

            def norm(address: int = address, name: str = name) -> None:
                native.cuda().squared_norm(
                    address,
                    name,
                    self.n,
                    block_sums=self.sums.data_ptr(),
                    total=self.total.data_ptr(),
                    stream=torch.cuda.current_stream().cuda_stream,
                )

            work.append(Work(f"squared_norm: {name}", width * self.n, norm))
        return work


def family(arrays: Arrays) -> list[Work]:
    """Adam in all formats, the others in the two that are farthest apart."""
    work = [
        arrays.update("adam", *formats, moments)
        for formats in FORMATS
        for moments in ("fp32", "bf16", "int8")
    ]
    for member in ("adagrad", "lion", "momentum", "sgd"):
        for formats, moments in (
            (FORMATS[0], "fp32"),
            (FORMATS[4], "int8" if MOMENTS[member] else "fp32"),
        ):
            work.append(arrays.update(member, *formats, moments))
    return work


def in_one_graph(work: Work, launches: int) -> torch.cuda.CUDAGraph | None:
    """The launches captured; None where CUDA or torch refuses."""
    work.enqueue()  # what is done once, such as loading code, cannot be captured
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(launches):
                work.enqueue()
    except RuntimeError as error:
        print(f"{work.name}: enqueued one by one, for {error}", file=sys.stderr)
        return None
    return graph


def seconds(work: Work, graph: torch.cuda.CUDAGraph | None, launches: int) -> float:
    """Seconds per launch on the stream."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    if graph is not None:
        graph.replay()
    else:
        for _ in range(launches):
            work.enqueue()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / launches


def measure(n: int, rounds: int) -> list[Row]:
    """A row for each kernel."""
    arrays = Arrays(n)
    works = [*arrays.yardsticks(), *arrays.norms(), *family(arrays)]
    launches = max(3, min(100, int(2e9 / (16 * n))))
    graphs = {}
    for work in works:
        arrays.prepare()
        graphs[work.name] = in_one_graph(work, launches)
    speeds: dict[str, list[float]] = {work.name: [] for work in works}
    for turn in range(-2, rounds):  # the first two warm up
        for work in works[turn % len(works) :] + works[: turn % len(works)]:
            arrays.prepare()
            speed = work.nbytes / seconds(work, graphs[work.name], launches) / 1e9
            if turn >= 0:
                speeds[work.name].append(speed)
    return [
        Row(
            name=f"{n}, {name}",
            unit="GB/s",
            rounds=rounds,
            value=Spread.of(mine),
            ratio=Spread.of([speed / copy for speed, copy in zip(mine, speeds[COPY], strict=True)]),
            facts={"launches_count": launches, "in_one_graph": graphs[name] is not None},
        )
        for name, mine in speeds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parameters",
        type=float,
        nargs="+",
        default=[1e6, 16e6, 128e6],
        help="elements of each array",
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if native.cuda() is None:
        parser.error("the package was built without nvcc")
    if reason := native.cuda().unavailable_reason():
        parser.error(f"no kernel can run here: {reason}")
    rows: list[Row] = []
    for n in map(int, options.parameters):
        rows += measure(n, options.rounds)
        torch.cuda.empty_cache()
    settings = vars(options) | {"cuda": torch.version.cuda}
    device = torch.cuda.get_device_name()
    summary = Summary.of(
        __file__, QUESTION, LIMIT, rows, seeds=[0], settings=settings, device=device
    )
    for line in summary.table():
        print(line)
    summary.write(options.json)


if __name__ == "__main__":
    main()
