#!/usr/bin/env python3
"""Does a model of billions of parameters go all the way through a small machine, under a hard limit
of memory?

The model has the shape of a Llama, in bf16, and random weights. Each phase writes its figures to
DIR, so a later call with other `--phases` goes on:

- "source": another process writes sharded safetensors, tensor by tensor, to SHELF.
- "roofline": another process measures the drive, the kernels and compute alone, and plans.
- "train", under the limit: builds without memory, loads from the shards, trains, evaluates,
  generates inside of the training engine, and exports to SHELF. Parameters, gradients and AdamW
  states are on NVMe, `copy_on_write` is off.
- "compare": another process reads the export with the `safetensors` package.
- "generate", under the limit: an engine for inference over the export generates the same tokens.
- "checkpoint", under the limit: loads, trains two steps, saves, trains two more. A new process
  loads the checkpoint and trains the same two.

Tensors are compared by the CRC32C of their bytes. Anything that differs ends the run.

The limit is RLIMIT_DATA: the kernel refuses a private writable mapping beyond it, whether it is
touched or not. It counts heap, anonymous memory, stacks of threads and the data of libraries. It
does not count shared or read-only mappings, whose pages the kernel can take back, and no files on a
tmpfs. `most_anonymous_bytes` is the highest RssAnon that a thread of the process saw, every 20 ms.

A step is beside what its parts need that follow each other, as in `roofline.py` with clipping: each
as long as the device that needs longest for it. The first two steps do not count: fresh moments are
not read. DIR takes 14 bytes per parameter and SHELF 2. A checkpoint takes a further 12 with
`--checkpoint-optimizer adamw`, and 4 (of 8 in all) with sgd, whose states are the parameters alone.

    benchmarks/real_size.py --parameters 5e9 --directory DIR [--shelf DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import infinity
from infinity.bench.step import bare_compute
from infinity.bench.step.measure import ROUNDS, bounds, clipped, parts_updated
from infinity.bench.step.train import shape_of
from infinity.bench.summary import Row, Spread, Summary
from infinity.checkpoint.digest import as_text, crc32c
from infinity.device import ComputeDevice
from infinity.measure import speed
from infinity.measure.rates import copies, formats_of, threads_of, updates
from infinity.models.source import ModelSource
from infinity.nvme import safetensors
from infinity.plan.forecast import plan
from infinity.plan.forecast import summary as forecast_summary
from infinity.plan.measure import measured
from infinity.plan.memory import Training
from infinity.plan.model import of_source
from infinity.quantities import format_bytes, parse_bytes
from infinity.weights.tensors import INDEX

QUESTION = (
    "Does a model of billions of parameters load, train, generate, export and resume under a hard "
    "limit of memory?"
)
LIMIT = (
    "forward and backward, and then the whole clipped update, each as long as the device that "
    "needs longest for it"
)
SEED = 0
PHASES = ("source", "roofline", "train", "compare", "generate", "checkpoint")
WIDTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
MOST_LAYERS = 32
PATTERN = 1_000_003  # a prime, so that rows of a matrix differ
FRESH = 2  # steps until moments are read
NEW_TOKENS, PROMPT = 8, 16
KEPT_BYTES = 2 << 30  # of the drive, beside what a phase is known to take


# The model


def llama(parameters: int, vocabulary: int, width: int = 0) -> Any:
    """The configuration of a Llama of `parameters` or up to a percent more: the narrowest of at
    most 32 blocks, or one of `width`."""
    from transformers import LlamaConfig

    for width in (width,) if width else WIDTHS:  # noqa: B020
        around = 2 * vocabulary * width + width
        attention = 4 * width * width + 2 * width
        layers = math.ceil((parameters - around) / (attention + 3 * width * (width * 43 // 16)))
        if layers <= MOST_LAYERS:
            break
    layers = max(layers, 1)
    inside = math.ceil(((parameters - around) / layers - attention) / (3 * width))
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=max(64, -(-inside // 64) * 64),
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )


def source_of(options: argparse.Namespace) -> ModelSource:
    """The model without weights."""
    return ModelSource(f"Llama {options.parameters:.3g}", options.llama, None)


def random_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A value for each parameter of `model`, in bf16: norms are ones, of the others each begins
    elsewhere in a million normal numbers."""
    numbers = torch.randn(PATTERN, generator=torch.Generator().manual_seed(SEED)) * 0.02
    pattern = numbers.bfloat16()
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if parameter.ndim < 2:
            yield name, torch.ones(parameter.shape, dtype=torch.bfloat16)
            continue
        value = torch.empty(parameter.numel(), dtype=torch.bfloat16)
        for part in value.split(PATTERN):
            part.copy_(pattern.roll(7919 * number)[: part.numel()])
        yield name, value.view(parameter.shape)
        del value


def write_shards(
    options: argparse.Namespace, folder: Path, weights: Iterable[tuple[str, torch.Tensor]]
) -> int:
    """Write a stream of all tensors of the model to the new directory `folder`, in the format of
    transformers, and wait until they are there; returns the number of files. No tensor is kept."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with torch.device("meta"):
        named = list(source_of(options).build().named_parameters())
    shards: list[dict[str, tuple[torch.dtype, Any]]] = [{}]
    held = 0
    for name, parameter in named:
        nbytes = 2 * parameter.numel()
        if held and held + nbytes > options.shard_bytes:
            shards.append({})
            held = 0
        shards[-1][name] = torch.bfloat16, parameter.shape
        held += nbytes
    where, places, files = {}, {}, []
    with contextlib.ExitStack() as stack:
        for number, shard in enumerate(shards, start=1):
            head, entries = safetensors.pack(shard, {"format": "pt"})
            called = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            files.append(stack.enter_context((folder / called).open("wb")))
            os.pwrite(files[-1].fileno(), head, 0)
            where |= dict.fromkeys(shard, called)
            places |= {entry.name: (files[-1].fileno(), entry.begin) for entry in entries}
        for name, tensor in weights:
            descriptor, begin = places.pop(name)
            data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
            while data:
                done = os.pwrite(descriptor, data, begin)
                data, begin = data[done:], begin + done
            del tensor, data
        if places:
            raise SystemExit(f"{len(places)} tensors of the model were not written")
        for file in files:
            os.fsync(file.fileno())
    total = sum(2 * parameter.numel() for _, parameter in named)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index))
    options.llama.save_pretrained(folder)
    return len(shards)


def tokens(vocabulary: int, rows: int, length: int, seed: int = SEED) -> torch.Tensor:
    """Random ones, of shape (rows, length); the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocabulary, (rows, length), generator=generator)


def digest(tensor: torch.Tensor) -> str:
    """That of its bytes."""
    return as_text(crc32c(tensor.detach().contiguous()))


def digests(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Those of a stream of tensors, by name."""
    found = {}
    for name, tensor in weights:
        found[name] = digest(tensor)
        del tensor  # it may be all of a unit, of which the next one is about to be made
    return found


def check_same(found: dict[str, str], wanted: dict[str, str], what: str) -> None:
    """End the run where tensors differ."""
    wrong = [name for name in wanted if found.get(name) != wanted[name]]
    if wrong or found.keys() - wanted.keys():
        raise SystemExit(f"{what}: {len(wrong)} of {len(wanted)} tensors differ, {wrong[:3]}")


# Measuring


def say(text: str) -> None:
    """Progress, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


class Watch:
    """The most memory of each kind that this process had since `restart`, in bytes, seen by a
    thread of its own."""

    KINDS = ("RssAnon", "RssFile", "RssShmem", "VmData")

    def __init__(self) -> None:
        self.most = dict.fromkeys(self.KINDS, 0)
        threading.Thread(target=self._run, daemon=True).start()

    def restart(self) -> None:
        """Forget what was before."""
        self.most = dict.fromkeys(self.KINDS, 0)

    def look(self) -> None:
        """Once more."""
        most = self.most
        for line in Path("/proc/self/status").read_text().splitlines():
            kind, _, rest = line.partition(":")
            if kind in most:
                most[kind] = max(most[kind], int(rest.split()[0]) * 1024)

    def _run(self) -> None:
        while True:
            self.look()
            time.sleep(0.02)


class Book:
    """The figures of one phase, by part of it, each with its time, memory and NVMe bytes."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.parts: dict[str, dict[str, Any]] = {}
        self.engine: infinity.Engine | None = None

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[dict[str, Any]]:
        """Measure what is inside; it may add figures."""
        say(f"{name} ...")
        self._watch.restart()
        before, start = self._moved(), time.perf_counter()
        found: dict[str, Any] = {}
        yield found
        if self.engine is not None:
            self.engine.drain()
        seconds, after = time.perf_counter() - start, self._moved()
        self._watch.look()
        most = self._watch.most
        self.parts[name] = {
            "seconds": seconds,
            "most_anonymous_bytes": most["RssAnon"],
            "most_private_writable_bytes": most["VmData"],
            "most_mapped_files_bytes": most["RssFile"] + most["RssShmem"],
            "nvme_read_bytes": after[0] - before[0],
            "nvme_written_bytes": after[1] - before[1],
        } | found
        say(
            f"{name}: {seconds:.1f} s, {format_bytes(most['RssAnon'])} anonymous, "
            f"{format_bytes(most['VmData'])} private and writable, "
            f"{format_bytes(after[0] - before[0])} read, "
            f"{format_bytes(after[1] - before[1])} written"
        )

    def _moved(self) -> tuple[int, int]:
        counters = {} if self.engine is None else self.engine.recorder.counters()
        return counters.get("nvme bytes read", 0), counters.get("nvme bytes written", 0)


# The processes of the phases


def config_of(options: argparse.Namespace, folder: Path, **more: Any) -> infinity.Config:
    """Everything that can be on NVMe is there."""
    values: dict[str, Any] = {
        "nvme": folder,
        "gpu_memory": options.gpu_memory,
        "cpu_memory": options.cpu_memory,
        "parameters": "nvme",
        "optimizer": "nvme",
        "gradients": "nvme",
        "precision": "bf16",
        "tuning": {"copy_on_write": False, "device": "cpu"},
    }
    return infinity.Config(**(values | more))


def optimizer_of(kind: str, model: Any, options: argparse.Namespace) -> Any:
    """AdamW, or SGD without momentum; both clip."""
    make: Any = {"adamw": infinity.AdamW, "sgd": infinity.SGD}[kind]
    return make(model.parameters(), lr=options.lr, max_grad_norm=options.max_grad_norm)


def batch_of(options: argparse.Namespace, seed: int = SEED) -> dict[str, Any]:
    """The same tokens at every step, so that the loss has to fall."""
    ids = tokens(options.vocabulary, options.batch, options.length, seed)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def train_step(model: Any, optimizer: Any, batch: dict[str, Any]) -> float:
    """One step; returns its loss."""
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def evaluated(model: Any, batch: dict[str, Any]) -> float:
    """The loss of `batch`."""
    model.eval()
    with torch.no_grad():
        return float(model(**batch).loss)


def generated(model: Any, options: argparse.Namespace) -> list[int]:
    """The likeliest tokens after a random prompt."""
    model.eval()
    prompt = tokens(options.vocabulary, 1, PROMPT)
    found = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    return [int(token) for token in found[0, PROMPT:]]


@contextlib.contextmanager
def states(options: argparse.Namespace) -> Iterator[Path]:
    """The directory of the states, empty."""
    folder = options.directory / "states"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_source(options: argparse.Namespace) -> dict[str, Any]:
    """The shards, tensor by tensor."""
    with torch.device("meta"):
        model = source_of(options).build()
    found: dict[str, str] = {}

    def noted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in random_weights(model):
            found[name] = digest(tensor)
            yield name, tensor
            del tensor

    start = time.perf_counter()
    files = write_shards(options, options.source, noted())
    count = sum(parameter.numel() for parameter in model.parameters())
    return {
        "digests": found,
        "parameters": count,
        "parts": {"source": {"seconds": time.perf_counter() - start, "files_count": files}},
    }


def measure_roofline(options: argparse.Namespace) -> dict[str, Any]:
    """The rates of the devices under a step, and what is planned."""
    source, device = source_of(options), ComputeDevice("cpu")
    with states(options) as folder:
        config = config_of(options, folder)
        say("measuring the drive")
        rates = copies(ComputeDevice("cpu"), options.probe_bytes, ROUNDS)
        with speed.DriveProbe(config.nvme, "auto", options.probe_bytes) as probe:
            rates |= speed.drives(probe, ROUNDS)
        formats = formats_of(config, torch.bfloat16)
        few = max(1 << 16, options.probe_bytes // 8)
        rates["adam"] = updates(formats, few, threads_of(None), 2 * ROUNDS)
        say("measuring compute without the engine")
        alone = bare_compute.BareCompute(source, batch_of(options), device, recomputes=True)
        alone.measure(torch.bfloat16, ROUNDS)
        gc.collect()
        layers = options.llama.num_hidden_layers
        say("planning")
        model = of_source(source, config)
        training = Training(options.length, options.batch, 1, recomputes=True)
        hardware = measured(model, source, training, config, config.nvme, say)
        planned = forecast_summary(plan(model, hardware, training, config), None)
    device.close()
    return {
        "rates": rates,
        "passes": alone.passes(layers)._asdict(),
        "compute": alone.times(layers),
        "plan": {key: planned.get(key) for key in ("memory", "step", "problems")},
        "parts": {},
    }


def train(options: argparse.Namespace, watch: Watch) -> dict[str, Any]:
    """Load, train, evaluate, generate and export, in one process."""
    from transformers import LlamaForCausalLM

    written, book = read_figures(options, "source"), Book(watch)
    with states(options) as folder, contextlib.ExitStack() as stack:
        with book.part("build and load"):
            with infinity.init(exact=False):
                model = source_of(options).build(checkpoint_activations=True)
            assert isinstance(model, LlamaForCausalLM)
            assert all(parameter.is_meta for parameter in model.parameters())
            shape = shape_of(model, options.llama)
            model = infinity.wrap(model, config_of(options, folder), weights=options.source)
            engine = stack.enter_context(infinity.engine(model))
            book.engine = engine
        with book.part("compare with the shards"):
            check_same(digests(engine.weights()), written["digests"], "loaded weights")
        if not options.keep_source:
            shutil.rmtree(options.source)
        optimizer = optimizer_of("adamw", model, options)
        batch, losses, steps = batch_of(options), [], []
        with book.part("train") as found:
            model.train()
            for number in range(options.steps):
                start = time.perf_counter()
                losses.append(train_step(model, optimizer, batch))
                steps.append(time.perf_counter() - start)
                norm = float(optimizer.grad_norm)
                say(f"step {number + 1}: {steps[-1]:.1f} s, loss {losses[-1]:.4f}, norm {norm:.3g}")
                if not math.isfinite(losses[-1]):
                    raise SystemExit("the loss is no finite number")
            moved = engine.activity()
            report = engine.report()
            found |= {
                "first_loss": losses[0],
                "last_loss": losses[-1],
                "wait_nvme_seconds": report.seconds["wait nvme"],
                "wait_adam_seconds": report.seconds["wait adam"],
                "adam_seconds": report.seconds["adam"],
            }
        if not losses[-1] < losses[0]:
            raise SystemExit(f"the loss does not fall: {losses}")
        with book.part("evaluate") as found:
            found["loss"] = evaluated(model, batch)
            found["other_tokens_loss"] = evaluated(model, batch_of(options, SEED + 1))
        if not found["loss"] < losses[0]:
            raise SystemExit(f"after {losses} the loss is {found['loss']}")
        with book.part("generate"):
            new = generated(model, options)
        with book.part("export") as found:
            found["files_count"] = write_shards(options, options.export, engine.weights())
        with book.part("digests of the engine's values"):
            last = digests(engine.weights())
        peaks, budgets = engine.report().peaks, engine.report().budgets
    return {
        "digests": last,
        "tokens": new,
        "losses": losses,
        "steps": steps,
        "moved": moved,
        "shape": shape._asdict(),
        "report": dataclasses.asdict(report),
        "peaks": peaks,
        "budgets": budgets,
        "parts": book.parts,
    }


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """The export, as another library reads it."""
    from safetensors import safe_open

    wanted, start = read_figures(options, "train")["digests"], time.perf_counter()
    found = {}
    for file in sorted(options.export.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            found |= {name: digest(opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118
    check_same(found, wanted, "the export")
    return {"parts": {"compare the export": {"seconds": time.perf_counter() - start}}}


def generate(options: argparse.Namespace, watch: Watch) -> dict[str, Any]:
    """The export, in an engine for inference."""
    trained, book = read_figures(options, "train"), Book(watch)
    with states(options) as folder, contextlib.ExitStack() as stack:
        with book.part("open for inference"):
            with infinity.init(exact=False):
                model = source_of(options).build()
            config = config_of(options, folder, inference=True)
            model = infinity.wrap(model.eval(), config, weights=options.export)
            engine = stack.enter_context(infinity.engine(model))
            book.engine = engine
        with book.part("compare the reloaded export"):
            check_same(digests(engine.weights()), trained["digests"], "the reloaded export")
        with book.part("generate from the export"):
            found = generated(model, options)
        if found != trained["tokens"]:
            raise SystemExit(f"inference generates {found}, training {trained['tokens']}")
        with book.part("evaluate the export") as part:
            part["loss"] = evaluated(model, batch_of(options))
        report = engine.report()
    return {"parts": book.parts, "peaks": report.peaks, "budgets": report.budgets}


@contextlib.contextmanager
def loaded(
    options: argparse.Namespace, book: Book, name: str
) -> Iterator[tuple[Any, infinity.Engine, Any]]:
    """A model in training, its engine and its optimizer, for the checkpoint."""
    weights = options.source if options.source.is_dir() else options.export
    with states(options) as folder:
        with book.part(name):
            with infinity.init(exact=False):
                model = source_of(options).build(checkpoint_activations=True)
            config = config_of(options, folder, algorithm=algorithm_of(options))
            model = infinity.wrap(model, config, weights=weights)
            engine = infinity.engine(model)
            book.engine = engine
        with engine:
            model.train()
            yield model, engine, optimizer_of(options.checkpoint_optimizer, model, options)


def algorithm_of(options: argparse.Namespace) -> str:
    """What states there are for the optimizer of the checkpoint."""
    return {"adamw": "adam", "sgd": "sgd"}[options.checkpoint_optimizer]


def save(options: argparse.Namespace, watch: Watch) -> dict[str, Any]:
    """Train two steps, save, and train two more."""
    book, batch = Book(watch), batch_of(options)
    shutil.rmtree(options.checkpoint, ignore_errors=True)
    with loaded(options, book, "load for the checkpoint") as (model, engine, optimizer):
        with book.part("train before the checkpoint"):
            losses = [train_step(model, optimizer, batch) for _ in range(2)]
        with book.part("save a checkpoint") as found:
            engine.save_checkpoint(options.checkpoint, optimizer, extra={"losses": losses})
            files = options.checkpoint.rglob("*")
            found["checkpoint_bytes"] = sum(each.stat().st_size for each in files)
        saved = digests(engine.weights())
        with book.part("train after the checkpoint"):
            losses += [train_step(model, optimizer, batch) for _ in range(2)]
        report = engine.report()
        return {
            "digests": saved,
            "last_digests": digests(engine.weights()),
            "losses": losses,
            "peaks": report.peaks,
            "budgets": report.budgets,
            "parts": book.parts,
        }


def resume(options: argparse.Namespace, watch: Watch) -> dict[str, Any]:
    """Load the checkpoint in a new process, and train the same two steps."""
    saved = read_figures(options, "save")
    book, batch = Book(watch), batch_of(options)
    with loaded(options, book, "load before the resume") as (model, engine, optimizer):
        with book.part("load the checkpoint"):
            losses = engine.load_checkpoint(options.checkpoint, optimizer)["losses"]
        check_same(digests(engine.weights()), saved["digests"], "the loaded checkpoint")
        with book.part("train after the resume"):
            losses += [train_step(model, optimizer, batch) for _ in range(2)]
        check_same(digests(engine.weights()), saved["last_digests"], "the resumed run")
        if losses != saved["losses"]:
            raise SystemExit(f"resumed losses are {losses}, and were {saved['losses']}")
        report = engine.report()
    shutil.rmtree(options.checkpoint)
    return {
        "losses": losses,
        "peaks": report.peaks,
        "budgets": report.budgets,
        "parts": book.parts,
    }


FREE = {"source": write_source, "roofline": measure_roofline, "compare": compare}
LIMITED = {"train": train, "generate": generate, "save": save, "resume": resume}


def figures_file(options: argparse.Namespace, name: str) -> Path:
    """Where a process leaves its figures."""
    return Path(options.directory, f"real-size-{name}.json")


def identity(options: argparse.Namespace) -> list[Any]:
    """What figures of phases that belong together have in common."""
    budgets = [options.gpu_memory, options.cpu_memory, options.limit]
    return [json.loads(options.llama.to_json_string()), *budgets]


def read_figures(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """What it left; ends the run where it has not run with this model."""
    file = figures_file(options, name)
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if found.get("of") != identity(options):
        raise SystemExit(
            f"{file} is not there, or of another model or budget: run phase {name} first"
        )
    return found


def child(options: argparse.Namespace) -> None:
    """Be the process of `options.child`."""
    name = options.child
    if name in FREE:
        found = FREE[name](options)
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (options.limit, options.limit))
        watch = Watch()
        watch.look()
        say(f"{format_bytes(watch.most['VmData'])} private and writable after the imports")
        found = LIMITED[name](options, watch)
    found["of"] = identity(options)
    figures_file(options, name).write_text(json.dumps(found))


# The rows


def part_rows(found: dict[str, Any]) -> Iterator[Row]:
    """A row for each part of a process, but for the steps; the last one has the tiers."""
    last = next(reversed(found["parts"]), "")
    for part, figures in found["parts"].items():
        if part == "train":
            continue
        facts = {key: value for key, value in figures.items() if key != "seconds"}
        seconds = Spread.of([figures["seconds"]])
        tiers = tiers_of(found) if part == last else {}
        yield Row(name=part, unit="s", rounds=1, value=seconds, facts=facts | tiers)


def tiers_of(found: dict[str, Any]) -> dict[str, int]:
    """The most bytes in use by tier, and the budgets."""
    peaks, budgets = found.get("peaks", {}), found.get("budgets", {})
    return {f"most_on_{tier}_bytes": nbytes for tier, nbytes in peaks.items()} | {
        f"budget_of_{tier}_bytes": budgets[tier] for tier in ("gpu", "cpu") if tier in budgets
    }


def step_row(found: dict[str, Any], alone: dict[str, Any]) -> Row:
    """The steps, beside what the devices need alone and what was planned."""
    part, report = found["parts"]["train"], SimpleNamespace(**found["report"])
    rates = {name: statistics.median(values) for name, values in alone["rates"].items()}
    nbytes = {
        "nvme_read": round(report.read_per_parameter * report.parameters),
        "nvme_write": round(report.written_per_parameter * report.parameters),
        "host_to_device": report.copied_to_device,
        "device_to_host": report.copied_from_device,
    }
    passes = alone["passes"]
    compute = passes["forward"] + passes["backward"]
    takes = bounds(compute, nbytes, parts_updated(report), rates)  # type: ignore[arg-type]
    takes["clipped"] = clipped(compute, passes["forward"], report, takes, rates)  # type: ignore[arg-type]
    bound = max(takes, key=lambda name: takes[name])
    steps, planned = found["steps"][FRESH:], alone["plan"]["step"] or {}
    facts: dict[str, Any] = {
        "parameters_count": report.parameters,
        "layers_count": found["shape"]["layers"],
        "bound_by": bound,
        **{f"{name}_alone_seconds": seconds for name, seconds in takes.items()},
        "read_per_parameter_bytes": report.read_per_parameter,
        "planned_read_per_parameter_bytes": report.planned_read_per_parameter,
        "written_per_parameter_bytes": report.written_per_parameter,
        "planned_written_per_parameter_bytes": report.planned_written_per_parameter,
        "cached_per_parameter_bytes": report.cached / report.parameters,
        "states_per_parameter_bytes": report.on_nvme / report.parameters,
        **tiers_of(found),
        **{key: value for key, value in part.items() if key != "seconds"},
    }
    if planned:
        facts |= {
            "forecast_seconds": planned["seconds"],
            "forecast_bound_by": planned["bottleneck"],
            "forecast_read_per_parameter_bytes": planned["nvme_read_bytes"] / report.parameters,
            "forecast_written_per_parameter_bytes": planned["nvme_written_bytes"]
            / report.parameters,
            **{
                f"forecast_on_{tier}_bytes": nbytes
                for tier, nbytes in alone["plan"]["memory"]["per_rank_bytes"].items()
            },
        }
    return Row(
        name=f"train, {len(steps)} steps after {FRESH}",
        unit="s",
        rounds=len(steps),
        value=Spread.of(steps),
        ratio=Spread.of([seconds / takes[bound] for seconds in steps]),
        facts=facts,
    )


def rows_of(options: argparse.Namespace) -> list[Row]:
    """What every process that has run with this model left."""
    found = {}
    for name in (*FREE, *LIMITED):
        with contextlib.suppress(SystemExit):
            found[name] = read_figures(options, name)
    rows = [row for each in found.values() for row in part_rows(each)]
    if "train" in found and "roofline" in found:
        rows.insert(0, step_row(found["train"], found["roofline"]))
    return rows


# The processes


def processes_of(phases: Iterable[str]) -> list[str]:
    """Those of `phases`, in order."""
    chosen = [name for name in PHASES if name in phases]
    return [
        each
        for name in chosen
        for each in (("save", "resume") if name == "checkpoint" else (name,))
    ]


def needed_bytes(options: argparse.Namespace, name: str) -> int:
    """What the process takes of the drive of the states, beside what it removes."""
    states_of = {"adamw": 14, "sgd": 6}
    saved = {"adamw": 12, "sgd": 4}[options.checkpoint_optimizer]
    each = {
        "train": states_of["adamw"],
        "save": states_of[options.checkpoint_optimizer] + saved,
        "resume": states_of[options.checkpoint_optimizer],
    }
    return int(each.get(name, 0) * options.parameters * 1.01)


def run(options: argparse.Namespace, name: str) -> None:
    """Run the process `name`, and wait for it. Ends the run where it fails."""
    free = shutil.disk_usage(options.directory).free
    needed = needed_bytes(options, name) + KEPT_BYTES
    if free < needed:
        raise SystemExit(
            f"{name} takes {format_bytes(needed)}, and {options.directory} has "
            f"{format_bytes(free)} free"
        )
    say(f"process {name}")
    figures_file(options, name).unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--child", name]
    done = subprocess.run(command)
    if done.returncode:
        raise SystemExit(f"process {name} ended with {done.returncode}")


def options_of() -> argparse.Namespace:
    """The command line, with what follows from it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True, help="for the states, on NVMe")
    parser.add_argument(
        "--shelf", type=Path, help="for the source and the export (default: --directory)"
    )
    parser.add_argument("--parameters", type=lambda text: int(float(text)), default=5_000_000_000)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--gpu-memory", type=parse_bytes, default=1 << 30)
    parser.add_argument("--cpu-memory", type=parse_bytes, default=4 << 30)
    parser.add_argument(
        "--limit", type=parse_bytes, default=6 << 30, help="RLIMIT_DATA of what has an engine"
    )
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument(
        "--width", type=int, default=0, help="the hidden size (default: of at most 32 blocks)"
    )
    parser.add_argument("--length", type=int, default=128, help="tokens of a window")
    parser.add_argument("--batch", type=int, default=1, help="windows of a step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--shard-bytes", type=parse_bytes, default=5_000_000_000)
    parser.add_argument("--probe-bytes", type=parse_bytes, default=256 << 20)
    parser.add_argument("--checkpoint-optimizer", choices=["adamw", "sgd"], default="sgd")
    parser.add_argument(
        "--keep-source", action="store_true", help="do not remove the shards once they are loaded"
    )
    parser.add_argument("--keep-export", action="store_true", help="do not remove it at the end")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=[*FREE, *LIMITED], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps <= FRESH:
        parser.error(f"--steps has to be more than {FRESH}")
    options.llama = llama(options.parameters, options.vocabulary, options.width)
    shelf = options.shelf or options.directory
    options.source, options.export = shelf / "real-size-source", shelf / "real-size-export"
    options.checkpoint = options.directory / "real-size-checkpoint"
    return options


def main() -> None:
    """Run the processes of the phases; the summary is written after each."""
    options = options_of()
    if options.child:
        child(options)
        return
    for folder in (options.directory, options.source.parent):
        folder.mkdir(parents=True, exist_ok=True)
    left_out = ("llama", "child", "json", "phases", "directory", "shelf")
    settings = {key: value for key, value in vars(options).items() if key not in left_out}
    for name in processes_of(options.phases):
        run(options, name)
        rows = rows_of(options)
        if rows:
            summary = Summary.of(__file__, QUESTION, LIMIT, rows, seeds=[SEED], settings=settings)
            summary.write(options.json)
    if not options.keep_export and "checkpoint" in options.phases:
        shutil.rmtree(options.export, ignore_errors=True)
    for line in summary.table():
        print(line)


if __name__ == "__main__":
    main()
