"""The steps of a benchmark: a model under the engine, trained on synthetic tokens, and the times of
each step.

[Note: random weights]
A model without weights gets a million normal numbers over and over. To draw each of billions would
take minutes, and neither time nor traffic of a step depends on them. Norms get ones, biases zeros.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from infinity.bench.step.flops import Shape
from infinity.config import Config
from infinity.engine import Engine
from infinity.models.description import described_by, read_description
from infinity.models.source import DTYPES, ModelSource, find_model
from infinity.observe import Span
from infinity.report import Report
from infinity.weights.tensors import INDEX, SINGLE

WAITS = ("wait nvme", "wait adam", "wait collective")
_REST = 4
"""From this many timed steps on, the engine rests amid them."""
_PATTERN = 1_000_003  # a prime, so that rows of a matrix differ


@dataclass(frozen=True)
class Workload:
    """The training of a benchmark. Sizes are in tokens and windows."""

    source: ModelSource
    config: Config
    length: int
    batch_size: int
    accumulate: int
    vertical: bool
    recomputes: bool
    steps: int
    discard: int
    most_seconds: float
    """After so many seconds of steps, no further step begins, unless none was timed."""
    lr: float
    seed: int
    clip: str = "global"
    max_grad_norm: float | None = 1.0

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.length * self.batch_size * self.accumulate

    def batch(self, number: int, device: torch.device) -> dict[str, Any]:
        """Micro-batch `number` of every step. It has the same tokens each time, so that the loss
        must fall."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + number)
        ids = torch.randint(
            0, self.source.config.vocab_size, (self.batch_size, self.length), generator=generator
        ).to(device)
        return {"input_ids": ids, "labels": ids, "use_cache": False}


def find_source(name: str, precision: str) -> ModelSource:
    """Like `find_model`. Also finds a `config.json`, or a directory with nothing else, whose model
    gets random weights."""
    path = Path(name)
    bare = path if path.is_file() else path / "config.json"
    if not bare.is_file() or (
        path.is_dir() and any((path / weights).is_file() for weights in (SINGLE, INDEX))
    ):
        return find_model(name, precision)
    from transformers import AutoConfig

    values = read_description(bare)
    if "model_type" not in values:
        raise ValueError(
            f"{bare} is not the configuration of a transformers model: it has no model_type"
        )
    with described_by(bare):
        config = AutoConfig.for_model(**values)
    if precision in DTYPES:
        config.dtype = DTYPES[precision]
    return ModelSource(name, config, None, bare)


def looked_up(model: nn.Module) -> list[torch.Tensor]:
    """The weights of embeddings that no matrix multiplication uses."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    tied = None if head is None else head.weight
    embeddings = (m.weight for m in model.modules() if isinstance(m, nn.Embedding))
    return [weight for weight in embeddings if weight is not tied]


def shape_of(model: nn.Module, config: Any) -> Shape:
    """The inputs of the count of operations."""
    free = set(map(id, looked_up(model)))
    layers = int(config.num_hidden_layers)
    blocks = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == layers
    ]
    heads = getattr(config, "num_attention_heads", 0)
    return Shape(
        multiplied=sum(p.numel() for p in model.parameters() if id(p) not in free),
        in_blocks=max((sum(p.numel() for p in block.parameters()) for block in blocks), default=0),
        layers=layers,
        width=int(heads * (getattr(config, "head_dim", None) or config.hidden_size // heads))
        if heads
        else config.hidden_size,
    )


def fill_randomly(model: nn.Module, seed: int, scale: float) -> None:
    """Fill `model` as in [Note: random weights], inside of `infinity.init()`."""
    pattern = torch.randn(_PATTERN, generator=torch.Generator().manual_seed(seed)) * scale
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            parameter.data.fill_(float(name.endswith("weight")))
            continue
        values, flat = pattern.to(parameter.dtype), parameter.data.view(-1)
        for part in flat.split(_PATTERN):
            part.copy_(values[: part.numel()])


@dataclass(frozen=True)
class Trained:
    """The results: seconds, losses and waits (by cause) of each timed step, and the engine's report
    after the last one.

    `losses` are those of all steps, discarded ones included. `dtype` is that of the parameters.
    """

    seconds: list[float]
    waits: dict[str, list[float]]
    losses: list[float]
    adam_seconds: list[float]
    updates_kept: int
    """Unit updates of the timed steps that began in backward."""
    report: Report
    spans: list[Span]
    """The spans of the engine."""
    shape: Shape
    dtype: torch.dtype


def train(
    work: Workload,
    say: Callable[[str], None],
    rest: Callable[[torch.dtype], None] = lambda dtype: None,
) -> Trained:
    """Build the model without memory, wrap it, train, and close the engine.

    A step lasts from its beginning to that of the next, so work beside the next step counts there.
    `rest`, called with the dtype of the parameters, runs before the steps, and amid them if there
    are four. The engine does nothing meanwhile. The step after it is not timed, because nothing
    runs beside it.
    """
    model, shape = _wrapped(work)
    with infinity.engine(model) as engine:
        engine.discard_committed()  # no run resumes from it
        optimizer = infinity.AdamW(
            model.parameters(), lr=work.lr, max_grad_norm=work.max_grad_norm, clip=work.clip
        )
        scale = optimizer.scale if getattr(optimizer, "loss_scaler", None) is not None else None
        order: Any = "vertical" if work.vertical else "horizontal"
        batches = [work.batch(number, engine.device) for number in range(work.accumulate)]
        model.train()
        # Parts of timed steps. Untimed steps precede each part.
        parts = [(work.discard, work.steps)]
        if work.steps >= _REST:
            half = work.steps // 2
            parts = [(work.discard, work.steps - half), (1, half)]
        total = sum(itertools.chain.from_iterable(parts))
        dtype, losses, spent = engine.units[0].facts.dtype, [], 0.0
        timed: list[dict[str, float]] = []
        for untimed, count in parts:
            if timed and spent > work.most_seconds:
                break
            engine.drain()
            rest(dtype)
            before = _counts(engine)
            for number in range(untimed + count):
                if timed and spent > work.most_seconds:
                    break
                outputs = infinity.accumulate(model, batches, order=order, scale=scale)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(sum(output.item() for output in outputs) / len(outputs))
                now = _counts(engine)
                step = {name: now[name] - before[name] for name in now}
                before, spent = now, spent + step["seconds"]
                if number >= untimed:
                    timed.append(step)
                say(
                    f"step {len(losses)} of {total}: {step['seconds']:.3g} s, loss {losses[-1]:.4f}"
                )
        return Trained(
            seconds=[step["seconds"] for step in timed],
            waits={lane: [step[lane] for step in timed] for lane in WAITS},
            losses=losses,
            adam_seconds=[step["adam"] for step in timed],
            updates_kept=round(sum(step["updates kept"] for step in timed)),
            report=engine.report(),
            spans=engine.recorder.spans(),
            shape=shape,
            dtype=dtype,
        )


def _wrapped(work: Workload) -> tuple[nn.Module, Shape]:
    """The model under the engine, and its shape before it was wrapped."""
    torch.manual_seed(work.seed)
    source = work.source
    with infinity.init(exact=False):
        model = source.build(work.recomputes)
        if source.directory is None:
            scale = float(getattr(source.config, "initializer_range", 0.02))
            fill_randomly(model, work.seed, scale)
    shape = shape_of(model, source.config)
    return infinity.wrap(model, work.config, weights=source.directory, seed=work.seed), shape


def _counts(engine: Engine) -> dict[str, float]:
    """The time, and seconds and counts of the engine since its start."""
    recorder = engine.recorder
    lanes = {lane: sum(recorder.seconds(lane).values()) for lane in (*WAITS, "adam")}
    kept = recorder.counters().get("updates kept", 0)
    return lanes | {"seconds": time.perf_counter(), "updates kept": kept}
