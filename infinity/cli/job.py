"""One fine-tuning run, from its options to its output. It checks everything, then builds, trains
and saves."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

import infinity
from infinity.cli.checkpoints import CheckpointFolder, step_of
from infinity.cli.display import Display
from infinity.cli.gc import collect, committed_runs
from infinity.cli.history import History, combine, summarize
from infinity.cli.hub import check_hub
from infinity.cli.knobs import configured
from infinity.cli.options import FinetuneOptions
from infinity.cli.output import prepare_output, save_adapters, save_description, save_model
from infinity.cli.ranks import ALONE, World
from infinity.cli.run_file import RunFile
from infinity.cli.trainer import LOWEST_RATE, FinetuneTrainer, RunParts
from infinity.config import Config
from infinity.directories.directory import Directory
from infinity.engine import Engine
from infinity.errors import BudgetError, ConfigError
from infinity.interrupt import Interrupt
from infinity.models.adapters import base_of, check_merge, merged, trained, with_lora
from infinity.models.data import WindowRequest, Windows, load_windows
from infinity.models.description import positions
from infinity.models.generation import (
    Decoding,
    Generator,
    check_length,
    conversation,
    make_batches,
    set_generation_config,
)
from infinity.models.quantization import check_base, dtype_of, quantize
from infinity.models.reading import open_regular
from infinity.models.source import ModelSource, find_model
from infinity.models.tokenizer import Tokenizer, load_tokenizer
from infinity.tiers.manifest import run_of
from infinity.tiers.places import check_directories
from infinity.weights.load import values_of

log = logging.getLogger("infinity")

USUAL_STEPS = 100
SAMPLED_TOKENS = 48
BASE = "base-4bit"
"""The directory of `--base 4bit`, below the first --nvme."""

_OF_CHECKPOINTS = ("checkpoint", "checkpoint_every", "keep_checkpoints")
_SHOWN = ("report", "report_to", "sample", "push_to_hub")


@dataclass(frozen=True, kw_only=True)
class FinetuneJob(FinetuneOptions):
    """One run of `infinity finetune`. The options are the same on all ranks."""

    knobs: Mapping[str, Any]
    """The options that mirror `Config` and `Tuning`, as typer gives them."""

    def config(self, world: World = ALONE) -> Config:
        """The configuration of this rank's engine. Raises `ConfigError`, and `ValueError` if a
        state is on nvme without a directory."""
        knobs = {**self.knobs, "accumulation": self.accumulation_order}
        if self.durability == "auto":
            try:
                return configured({**knobs, "durability": "step"}, world.share)
            except ConfigError:
                return configured(knobs, world.share)
        return configured({**knobs, "durability": self.durability}, world.share)

    def run(self, display: Display, world: World = ALONE) -> dict[str, Any]:
        """Train and write the output. Returns the summary (see `summarize`). All ranks of `world`
        call it, and the first one writes. A resumed run that is complete is left unchanged.

        Options, directories and data are checked before the model is built.
        """
        self._check_options()
        world.check_batch(self.batch_size)
        config = self.config(world)
        if (repository := self.push_to_hub) is not None:
            world.from_first(lambda: check_hub(repository))
        written = world.from_first(self._written)
        if written is not None and written.summary is not None:
            self._finish_removal(written, config, world)
            display.note(f"the run is complete, and its output is in {self.output}")
            return written.summary
        if self.data is not None:
            _check_data(self.data)
        check_directories([Path(directory) for directory in config.nvme])
        both = {os.path.realpath(each) for each in (self.output, self.checkpoint) if each}
        if self.output and self.checkpoint and len(both) == 1:
            raise ValueError(
                f"--output and --checkpoint are both {self.output}; checkpoints need a directory "
                "of their own"
            )
        checkpoints, last = self._checkpoints(display, world, config)
        if self.overwrite and not self.resume:
            self._remove_committed(config, world)
        is_ours = last is not None or written is not None  # an interrupted run
        try:
            return self._run(display, world, config, checkpoints, last, is_ours)
        finally:
            if checkpoints is not None:
                checkpoints.close()

    def _check_options(self) -> None:
        """Raise `ValueError` for options that do not go together."""
        if self.steps is not None and self.epochs is not None:
            raise ValueError("--steps and --epochs both say how long to train; give one of them")
        if self.lora is None:
            for option in ("lora_alpha", "lora_target", "merge", "base"):
                if getattr(self, option):
                    raise ValueError(
                        f"--{option.replace('_', '-')} is of adapters, and there are none without "
                        "--lora RANK"
                    )
        if self.push_to_hub is not None and self.output is None:
            raise ValueError("--push-to-hub uploads the output; add --output DIR")

    def _run(
        self,
        display: Display,
        world: World,
        config: Config,
        checkpoints: CheckpointFolder | None,
        last: Path | None,
        is_ours: bool,
    ) -> dict[str, Any]:
        display.phase("model")
        source = find_model(self.model, config.precision)
        source.check_kind()
        if self.lora is not None:
            source.check_weights("--lora")
        self._check_four_bits(source, config)
        if self.sequence_length is not None:
            source.check_length(self.sequence_length)
        if self.output is not None:
            output, overwrite = self.output, self.overwrite or is_ours
            _check_name(output)
            world.from_first(lambda: prepare_output(output, source.directory, overwrite))
        tokenizer = load_tokenizer(source.directory, source.config.vocab_size, self.byte_tokenizer)
        display.phase("data")
        windows = self._windows(source, tokenizer)
        for note in windows.notes:
            display.note(note)
        display.phase("weights")
        base = source if self.base is None else self._base(source, config, world)
        torch.manual_seed(self.seed)
        model = assemble(self, base, config, world)
        engine: Engine = infinity.engine(model)
        goes_on, trainer = bool(engine.committed_step), None
        try:
            steps, rate = self._steps(windows), self._rate(source, model)
            display.attach(engine, steps)
            describe = partial(save_description, model=model, tokenizer=tokenizer)
            sample = self._sampling(source, model, tokenizer, engine.device)
            digest = "" if self.lora is None else source.digest()
            parts = RunParts(windows, steps, rate, display, world, describe, digest, sample)
            arguments = self._arguments(parts, engine.device.type == "cpu")
            trainer = FinetuneTrainer(model, arguments, self, parts)
            world.seed(self.seed)
            committed = engine.committed_step or 0
            if committed and (last is None or step_of(last) <= committed):
                display.note(f"going on from committed step {committed}")
                last = None
            elif last is not None:
                display.note(f"going on from {last}")
            summary = self._train(tokenizer, trainer, last, config)
            if self.durability == "auto" and (summary["signal"] is None or checkpoints is not None):
                engine.discard_committed()  # it has ended, or a checkpoint has its state
            elif engine.committed_step is not None:
                kept = " and ".join(map(str, config.nvme))
                display.note(f"the last step stays in {kept}: --resume goes on from it")
            return summary
        finally:
            has_begun = goes_on or (trainer is not None and trainer.has_begun)
            if self.durability == "auto" and not has_begun:
                engine.discard_committed()  # there is no step to resume from
            with Interrupt():  # a signal does not interrupt closing
                engine.close()

    def _windows(self, source: ModelSource, tokenizer: Tokenizer) -> Windows:
        """The windows of the data, for a model as that of `source`."""
        request = WindowRequest(
            self.data,
            self.sequence_length,
            self.seed,
            self.data_format == "text",
            self.columns,
            positions(source.config),
        )
        windows = load_windows(request, tokenizer)
        if not self.packing:
            return windows
        source.check_positions()
        return windows.packed()

    def _check_four_bits(self, source: ModelSource, config: Config) -> None:
        """Raise `ConfigError` or `ValueError` for options that a base in 4 bits does not allow."""
        if self.base is not None:
            check_base(source)
            if not config.nvme:
                raise ValueError(
                    f"--base {self.base} keeps the model in 4 bits below --nvme; give --nvme DIR"
                )
        elif source.in_four_bits and (self.lora is None or self.merge):
            raise ValueError(
                f"{self.model} is in 4 bits, so its weights stay as they are; "
                + ("leave out --merge" if self.merge else "add --lora RANK to train adapters")
            )

    def _base(self, source: ModelSource, config: Config, world: World) -> ModelSource:
        """The model in 4 bits, which one rank of each node makes below the first --nvme."""
        place = Path(config.nvme[0]) / BASE
        if world.local_rank == 0:
            quantize(str(source.directory), place, dtype=dtype_of(source.config))
        world.wait()
        made = find_model(str(place), config.precision)
        made.config.name_or_path = source.config.name_or_path  # the base that adapters name
        return made

    def _steps(self, windows: Windows) -> int:
        if self.epochs is None:
            return USUAL_STEPS if self.steps is None else self.steps
        rows = self.batch_size * self.accumulate
        return max(1, math.ceil(self.epochs * len(windows.training) / rows))

    def _rate(self, source: ModelSource, model: torch.nn.Module) -> float:
        """The highest learning rate: as of published recipes, higher for a small model."""
        if self.lr is not None:
            return self.lr
        if self.lora is not None:
            return 2e-4
        parameters = sum(each.numel() for each in model.parameters())
        if source.directory is None or parameters < 300_000_000:
            return 3e-4
        return 1e-4 if parameters < 1_000_000_000 else 2e-5

    def _sampling(
        self,
        source: ModelSource,
        model: torch.nn.Module,
        tokenizer: Tokenizer,
        device: torch.device,
    ) -> Callable[[], str] | None:
        """Answers --sample, always in the same way. Does not change the state of training."""
        if self.sample is None:
            return None
        chats = [conversation(self.sample)] if tokenizer.has_template else None
        batches = make_batches([self.sample], tokenizer, 1, chats)
        check_length(source, batches, SAMPLED_TOKENS)
        generator = Generator(model, tokenizer, device)

        def sample() -> str:
            with torch.random.fork_rng(), torch.no_grad():
                ((found,),) = generator.run(batches, Decoding(SAMPLED_TOKENS), None)
            return f"{found.prompt!r} is answered with {found.text!r}"

        return sample

    def _arguments(self, parts: RunParts, on_cpu: bool) -> TrainingArguments:
        return TrainingArguments(
            output_dir=str(self.checkpoint or self.output or "."),
            max_steps=parts.steps,
            per_device_train_batch_size=self.batch_size // parts.world.size,
            gradient_accumulation_steps=self.accumulate,
            learning_rate=parts.rate,
            weight_decay=self.weight_decay,
            max_grad_norm=0.0,  # the optimizer clips
            lr_scheduler_type="cosine_warmup_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": LOWEST_RATE},
            warmup_steps=parts.steps // 10 if self.warmup is None else self.warmup,
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no" if self.checkpoint is None else "steps",
            save_steps=self.checkpoint_every,
            save_total_limit=self.keep_checkpoints,
            seed=self.seed % (1 << 32),  # the order of rows is that of `Windows`
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            disable_tqdm=True,
            report_to=[] if self.report_to is None else [self.report_to],
            use_cpu=on_cpu,
        )

    @property
    def _options(self) -> dict[str, Any]:
        """The options that identify a run, as JSON values. A resumed run must have the same."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("resume", "output", "overwrite", *_SHOWN, *_OF_CHECKPOINTS):
            del values[name]
        if Path(self.model).is_dir():
            values["model"] = Path(self.model)
        return json.loads(json.dumps(values, default=os.path.abspath))

    def _written(self) -> RunFile | None:
        """The run file in the output, if this run resumes; without its summary if files are
        missing."""
        if not self.resume or self.output is None:
            return None
        found = RunFile.of(self.output, self._options)
        if found is not None and not found.is_whole(self.output):
            found.summary = None
        return found

    def _states(self, config: Config, world: World) -> str:
        """The id of the run that committed the states of this rank; "" if there is none."""
        if not config.nvme or config.durability == "off":
            return ""
        first = Path(config.nvme[0])
        with Directory(first / f"rank{world.rank}" if world.size > 1 else first) as place:
            return run_of(place)

    def _finish_removal(self, written: RunFile, config: Config, world: World) -> None:
        """Remove the committed steps of a complete run that was killed before it removed them."""
        is_kept = self.durability != "auto" or not written.states
        if not is_kept and committed_runs(*map(Path, config.nvme)) == {written.states}:
            self._remove_committed(config, world)

    def _remove_committed(self, config: Config, world: World) -> None:
        """Remove the committed steps of an earlier run. Returns when all ranks have done so."""
        if world.local_rank == 0:
            collect(*config.nvme, committed=True)
        world.wait()

    def _checkpoints(
        self, display: Display, world: World, config: Config
    ) -> tuple[CheckpointFolder | None, Path | None]:
        """The directory of checkpoints, and the checkpoint to resume from."""
        if self.checkpoint is None:
            if self.resume and config.durability == "off":
                raise ValueError(
                    "--resume needs --checkpoint DIR, the directory of the run that it goes on "
                    "with, or steps that were committed, which takes parameters and optimizer "
                    "states on nvme"
                )
            return None, None
        checkpoints = CheckpointFolder(self.checkpoint)
        last = world.from_first(lambda: checkpoints.prepare(self.resume))
        if last is None and self.resume:
            display.note(
                f"no checkpoint in {self.checkpoint} yet: training starts from the beginning"
            )
        return checkpoints, last

    def _train(
        self, tokenizer: Tokenizer, trainer: FinetuneTrainer, last: Path | None, config: Config
    ) -> dict[str, Any]:
        display, world, engine = trainer.parts.display, trainer.parts.world, trainer.engine
        with Interrupt() as interrupt:
            display.phase("training")
            history = trainer.run(last, interrupt)
            report = combine(world.gather(engine.report()), world.local_size)
            # After the first step, the directory has a commit of this run.
            run_file = RunFile(options=self._options, states=self._states(config, world))
            if self.output is not None:
                display.phase("saving")
                if self.merge and self.base is not None:
                    display.note(
                        f"the adapters are merged into the weights of {self.model} itself, which "
                        "are not in 4 bits"
                    )
                if world.is_first:
                    run_file.begin(self.output)
                self._save(trainer, tokenizer, world.is_first)
        summary = summarize(
            self.model, history, report, self.output, {}, world.size, world.local_size
        )
        if self.output is not None and self.report and world.is_first:
            display.phase("report")
            summary |= self._write_report(self.output, history, engine, summary)
        if self.output is not None and history.signal is None and world.is_first:
            run_file.end(self.output, summary)
        return summary

    def _save(self, trainer: FinetuneTrainer, tokenizer: Tokenizer, writes: bool) -> None:
        """Write the model or its adapters to the output. All ranks call it, and one `writes`.
        Raises `InfinityError` for a parameter that is not finite."""
        assert self.output is not None
        model: torch.nn.Module = trainer.engine.model
        weights = trainer.checked(trainer.engine.weights())
        if self.lora is not None:
            adapters = dict(trainer.checked(trained(model).items()))
            if not writes and (self.base is not None or not self.merge):
                return  # there is nothing to gather
            if not self.merge:
                save_adapters(self.output, model, adapters, tokenizer)
                return
            if self.base is not None:
                model, weights = self._plain(trainer.engine.config.precision)
            weights = merged(model, weights, adapters)
        if writes:
            save_model(self.output, base_of(model), weights, tokenizer)
        else:
            deque(weights, maxlen=0)  # joins the gathers of the first rank

    def _plain(self, precision: str) -> tuple[torch.nn.Module, Iterator[tuple[str, torch.Tensor]]]:
        """The model that the base in 4 bits was made from, with adapters and without memory, and
        its weights as a stream from its files."""
        source = find_model(self.model, precision)
        with infinity.init(exact=False):
            model = source.build()
            set_generation_config(model, source)
            assert self.lora is not None
            model = with_lora(model, self.lora, self.lora_alpha, self.lora_target)
        weights = source.weights(model)
        assert weights is not None
        return model, values_of(weights, model)

    def _write_report(
        self, output: Path, history: History, engine: Engine, summary: dict[str, Any]
    ) -> dict[str, str]:
        from infinity.cli.perfetto import write_trace
        from infinity.cli.report import write_report

        page, trace = output / "report.html", output / "trace.json"
        spans = engine.recorder.spans()
        write_report(page, summary, history, spans)
        write_trace(trace, spans, history)
        return {"report": str(page), "trace": str(trace)}


def _check_data(data: Path) -> None:
    if not data.exists():
        hint = ""
        if not data.is_absolute() and len(data.parts) == 2:
            hint = (
                "; if it is the id of a data set of the hub, download it first: hf download "
                f"--repo-type dataset {data} --local-dir {data.name}, and give --data {data.name}"
            )
        raise FileNotFoundError(f"--data {data} does not exist{hint}")
    if not data.is_dir():
        open_regular(data).close()


def _check_name(output: Path) -> None:
    try:
        str(output).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"--output {output} is not UTF-8, and no tokenizer can be saved there; choose "
            "another one"
        ) from None


def _with_or_without_commits(
    job: FinetuneJob, config: Config, world: World, wrap: Callable[..., torch.nn.Module]
) -> None:
    """Wrap the model. On one rank, if durability is `auto` and commits do not fit, wrap it without
    commits. Commits take NVMe space for all states, including cached ones."""
    try:
        wrap(config, resume=job.resume and config.durability != "off")
    except BudgetError as error:
        if job.durability != "auto" or config.durability == "off" or world.size > 1:
            raise
        wrap(config.model_copy(update={"durability": "off"}))
        log.warning("no step is committed, because there is no room for that: %s", error)


def assemble(
    job: FinetuneJob, source: ModelSource, config: Config, world: World
) -> torch.nn.Module:
    """Build the model without memory, and stream its weights into the tiers."""
    with infinity.init(exact=False):
        # "auto" can choose nothing for a block that checkpoints itself.
        model = source.build(job.checkpoint_activations and config.recompute != "auto")
        set_generation_config(model, source)
        if job.lora is not None:
            model = with_lora(model, job.lora, job.lora_alpha, job.lora_target)
            if job.merge:
                check_merge(model)
    if job.chunked_loss is not None:
        infinity.chunked_loss(model, job.chunked_loss)
    weights = source.weights(model)
    wrap = partial(infinity.wrap, model, weights=weights, seed=job.seed, group=world.group)
    try:
        _with_or_without_commits(job, config, world, wrap)
    except BudgetError as error:
        shared = [
            option for option in ("cpu_memory", "nvme_memory") if str(error).startswith(option)
        ]
        if world.local_size == 1 or not shared:
            raise
        option = f"--{shared[0].replace('_', '-')}"
        raise BudgetError(
            f"{error}; that is of one rank, and {option} is divided among the "
            f"{world.local_size} of a node"
        ) from None
    return model
