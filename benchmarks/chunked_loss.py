#!/usr/bin/env python3
"""What `infinity.chunked_loss` costs and saves: forward and backward of a Llama with one block and
a large vocabulary, with all logits at once and with chunks of them.

Each round runs a step in every way, one after the other in one process; ratios are taken within a
round. The peak is that of all that torch allocates during one more step, beside the weights. The
gradients are compared with those of all logits, by the norm of their difference.

    python benchmarks/chunked_loss.py [--vocabulary 262144 --tokens 512 --widths 64 --rounds 5]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

import infinity
from infinity.bench.summary import Row, Spread, Summary

QUESTION = "What does a chunked loss save, and what does it cost?"
LIMIT = "a step with all logits at once, in the same round"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {"vocabulary": 1 << 18, "tokens": 512, "rounds": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--widths", type=int, nargs="+", default=[64])
    parser.add_argument("--limits", nargs="+", default=["256MiB", "64MiB"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [
        row
        for width in options.widths
        for dtype in DTYPES
        for row in measure(options, width, dtype)
    ]
    summary = Summary.of(__file__, QUESTION, LIMIT, rows, seeds=[0], settings=vars(options))
    for line in summary.table():
        print(line)
    summary.write(options.json)


def measure(options: argparse.Namespace, width: int, dtype: str) -> list[Row]:
    """A row for each way, with a model of this width and dtype."""
    model = make(options.vocabulary, options.tokens, width, DTYPES[dtype])
    ids = torch.randint(0, options.vocabulary, (1, options.tokens))
    limits: list[str | None] = [None, *options.limits]
    peaks, gradients = [], []
    for limit in limits:
        infinity.chunked_loss(model, limit)
        peaks.append(peak(model, ids))
        step(model, ids)
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    exact = norm(gradients[0])
    differences = [
        norm([one.float() - other.float() for one, other in zip(each, gradients[0], strict=True)])
        for each in gradients
    ]
    rounds = []
    for number in range(options.rounds):
        first = number % len(limits)  # in turns, because the machine changes within a round, too
        order = [*range(first, len(limits)), *range(first)]
        rounds.append({place: timed(model, ids, limits[place]) for place in order})
    return [
        Row(
            name=f"{dtype}, width {width}, {limit or 'all logits'}",
            unit="s",
            rounds=options.rounds,
            value=Spread.of([each[place] for each in rounds]),
            ratio=Spread.of([each[place] / each[0] for each in rounds]),
            facts={
                "peak_mib": peaks[place] / 2**20,
                "gradients_differ_ratio": differences[place] / exact,
            },
        )
        for place, limit in enumerate(limits)
    ]


def make(vocabulary: int, tokens: int, width: int, dtype: torch.dtype) -> Any:
    """A Llama with one block, whose projection has a weight of its own."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=tokens,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(dtype)
    model.model.embed_tokens.requires_grad_(False)  # its gradient is as large as the projection's
    return model


def step(model: Any, ids: torch.Tensor) -> None:
    """A forward and a backward."""
    model(input_ids=ids, labels=ids).loss.backward()


def timed(model: Any, ids: torch.Tensor, limit: str | None) -> float:
    """The seconds of a step in chunks of `limit`."""
    infinity.chunked_loss(model, limit)
    start = time.perf_counter()
    step(model, ids)
    seconds = time.perf_counter() - start
    model.zero_grad()
    return seconds


def peak(model: Any, ids: torch.Tensor) -> int:
    """The most bytes that torch allocates at once during a step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        step(model, ids)
        model.zero_grad()
    events = [each for each in found.profiler.kineto_results.events() if each.name() == "[memory]"]
    most = now = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def norm(tensors: Sequence[torch.Tensor]) -> float:
    """The norm of all of `tensors` together."""
    return float(torch.stack([each.float().norm() for each in tensors]).norm())


if __name__ == "__main__":
    main()
