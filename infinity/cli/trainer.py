"""The trainer of `infinity finetune`: the Trainer of transformers over windows of data."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Sampler as RowSampler
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback

import infinity
from infinity.checkpoint.files import METRICS
from infinity.checkpoint.progress import Told
from infinity.cli.display import Display
from infinity.cli.history import History
from infinity.cli.options import FinetuneOptions
from infinity.cli.ranks import World
from infinity.cli.sampler import Sampler
from infinity.directories.directory import Directory
from infinity.engine import Engine, engine
from infinity.errors import InfinityError
from infinity.integrations.durable_trainer import SignalCame, refuse_changes
from infinity.integrations.trainer_notes import TrainingLog
from infinity.integrations.transformers import InfinityTrainer
from infinity.interrupt import Interrupt
from infinity.models.adapters import base_of
from infinity.models.data import Windows
from infinity.models.packing import are_alone
from infinity.models.samples import Batch

log = logging.getLogger("infinity")

LOWEST_RATE = 0.1
"""The last learning rate, as a share of the highest."""


@dataclass(frozen=True)
class RunParts:
    """The parts of a run, beside its options."""

    windows: Windows
    steps: int
    rate: float
    """The highest learning rate."""
    display: Display
    world: World
    describe: Callable[[Path], None]
    """Writes the files that an export of a checkpoint needs: config and tokenizer of the model."""
    digest: str = ""
    """Of the weights beside which adapters are trained; see `ModelSource.digest`."""
    sample: Callable[[], str] | None = None
    """The answer of the model to a prompt, to show with each validation. All ranks call it."""


class _Order(RowSampler[int]):
    """The training rows in the order of `windows`, for all steps of a run."""

    def __init__(self, windows: Windows, count: int) -> None:
        self._windows, self._count = windows, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return islice(self._windows.order(), self._count)


class _LossCheck(TrainerCallback):  # type: ignore[misc]
    """Calls `check` right before each step of the optimizer."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._check()


class FinetuneTrainer(InfinityTrainer):
    """Trains a wrapped model on the windows of a run. Used by one thread.

    Each rank trains on its part of every batch, and all ranks have the same losses. One epoch of
    the Trainer has all steps, and the order of `Windows` continues after an epoch of the data. A
    loss is the mean over all labels, also in a validation.

    One class, because a Trainer calls these methods on itself.
    """

    def __init__(
        self, model: torch.nn.Module, args: Any, options: FinetuneOptions, parts: RunParts
    ) -> None:
        self._options, self.parts = options, parts
        self._interrupt_of_run: Interrupt | None = None
        self._asked = 0  # the signal that ends the run after this step
        self._begun = 0.0
        self._made = 0  # steps of this process
        windows = parts.windows
        self._rows_per_step = options.batch_size * options.accumulate
        self.history = History(
            round(windows.mean_length * self._rows_per_step),
            engine(model).compute_device.unified_memory,
        )
        settings = {
            "lr": parts.rate,
            "betas": (0.9, 0.95),
            "max_grad_norm": options.max_grad_norm or None,
            "clip": options.clip,
            "skip_nonfinite": options.skip_nonfinite,
        }
        config: Any = model.config
        use_cache = getattr(config, "use_cache", None)
        super().__init__(
            model,
            args,
            data_collator=self._training_inputs,
            train_dataset=range(len(windows.tokens)),
            optimizer_cls_and_kwargs=(infinity.AdamW, settings),
            callbacks=[_LossCheck(self._check_loss)],
        )
        config.use_cache = use_cache  # Trainer changed it, and the output has it
        self.remove_callback(PrinterCallback)

    def run(self, checkpoint: Path | None, interrupt: Interrupt) -> History:
        """Train from the committed step on, else from `checkpoint`, else from the beginning, until
        the last step or until `interrupt` has noted a signal. Returns the history.

        Raises `InfinityError` if a loss is not finite, and `ConfigError` or `ValueError` if an
        option has changed that determines the batches or their use.
        """
        self._interrupt_of_run = interrupt
        self._resume = checkpoint is None and bool(self.engine.committed_step)
        if not self._resume:
            self.forget_committed()  # it is older than the checkpoint
        if self._options.packing and not are_alone(base_of(self.model), self.engine.device):
            raise ValueError(
                f"samples in one window see each other in {type(base_of(self.model)).__name__}; "
                "leave out --packing"
            )
        self._begin_log()
        with Sampler(self._engine.memory, self.history.samples), _quiet_transformers():
            try:
                self.train(None if checkpoint is None else str(checkpoint))
            except SignalCame as stopped:
                self.end_by(stopped.number)
        if self.history.signal is None:
            self.history.signal = self.parts.world.agree(interrupt.signal)
        return self.history

    def _begin_log(self) -> None:
        path = self.metrics_path()
        if path is None or not self.parts.world.is_first:
            return
        if not self._resume:
            with Directory(path.parent) as place:
                place.remove(path.name)
        if not self._is_durable:
            self._lines = TrainingLog(path)
            self._lines.open()

    @property
    def engine(self) -> Engine:
        """The engine of the model."""
        return self._engine

    @property
    def has_begun(self) -> bool:
        """Whether it has made a step."""
        return self._made > 0

    # Signals

    def signal_to_stop(self) -> int:
        return self._asked

    def end_by(self, number: int) -> None:
        """Note the signal. The caller saves what it has."""
        self.history.signal = number

    # Data

    def _get_train_sampler(self, train_dataset: Any = None) -> RowSampler[int]:
        return _Order(self.parts.windows, self.parts.steps * self._rows_per_step)

    def _training_inputs(self, numbers: list[int]) -> dict[str, Any]:
        return _inputs(self.parts.windows.training_batch(numbers))

    # Steps

    def _run_epoch(self, **kwargs: Any) -> None:
        self._begun = time.perf_counter()
        super()._run_epoch(**kwargs)

    def _check_loss(self) -> None:
        if not math.isfinite(loss := float(self._tr_loss)):
            raise self._diverged("the loss", loss, self.state.global_step + 1)

    def _diverged(self, what: str, value: float, number: int) -> InfinityError:
        return InfinityError(
            f"{what} became {value} at step {number}; try a lower --lr than "
            f"{self.parts.rate:g}, a longer --warmup, or --precision bf16 or fp32"
        )

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        number, every = self.state.global_step, self._options.eval_every
        if number == self._globalstep_last_logged:  # the end of the epoch
            super()._maybe_log_save_evaluate(*args, **kwargs)
            return
        self.state.epoch = number * self._rows_per_step / len(self.parts.windows.training)
        self._ask()
        is_last = number == self.parts.steps
        is_due = is_last or (every > 0 and number % every == 0)
        self.control.should_evaluate = is_due and not self._asked
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self._begun = time.perf_counter()
        if not self._is_durable:
            self._stop_if_asked()

    @property
    def _signal(self) -> int | None:
        return None if self._interrupt_of_run is None else self._interrupt_of_run.signal

    def _ask(self) -> None:
        """Have a signal that came to any rank end the run after this step, with a checkpoint."""
        self._asked = self.parts.world.agree(self._signal) or 0
        if self._asked and self._options.checkpoint is not None:
            self.control.should_save = True

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The mean loss over all labels of the windows that are held out, as `eval_loss`. Empty if
        a signal came, which ends the run after this step."""
        metrics = self._evaluated()
        self._ask()
        return metrics

    def _evaluated(self) -> dict[str, float]:
        options, windows, world = self._options, self.parts.windows, self.parts.world
        total = count = 0.0
        self.model.eval()
        with torch.no_grad():
            for rows in windows.validation_rows(options.batch_size, options.eval_batches):
                if world.agree(self._signal) is not None:
                    return {}
                part = world.part(rows)
                # All ranks run the model, because each holds a part of it.
                batch = windows.batch(part if len(part) else rows[:1])
                inputs = self._prepare_inputs(_inputs(batch))
                loss = float(self.model(**inputs).loss)
                if len(part):
                    total += loss * batch.counted
                    count += batch.counted
        sums = world.gather((total, count))
        total, count = (math.fsum(values) for values in zip(*sums, strict=True))
        metrics = {"eval_loss": total / count}
        self.log(metrics)
        if self.parts.sample is not None:
            self.parts.display.note(f"step {self.state.global_step}  {self.parts.sample()}")
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    # The log

    def metrics_path(self) -> Path | None:
        folder = self._options.output or self._options.checkpoint
        return None if folder is None else folder / METRICS

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Like InfinityTrainer, and tell the display. A step also has its seconds, its speed,
        its gradient norm, and the loss scale of the next step."""
        is_step, end = "loss" in logs, time.perf_counter()
        if is_step:
            optimizer: Any = self.optimizer.optimizer
            norm, scaler = optimizer.grad_norm, getattr(optimizer, "loss_scaler", None)
            logs["step_seconds"] = end - self._begun
            logs["tokens_per_second"] = self.history.speed(logs["step_seconds"])
            if norm is not None and math.isfinite(norm):
                logs["grad_norm"] = float(norm)
            if scaler is not None:
                logs["loss_scale"] = scaler.scale
        super().log(logs, *args, **kwargs)
        self.history.add(self.state.log_history[-1], end)
        if is_step:
            self.parts.display.stepped(self.history)
            self._made += 1
        elif "eval_loss" in logs:
            self.parts.display.validated(self.history)

    def say(self, text: str) -> None:
        self.parts.display.note(text)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        places: tuple[int, int] = super()._init_training_state(*args, **kwargs)
        self.state.compute_steps(self.args, args[0])  # the options of now, not of the checkpoint
        self.history.restore(self.state.log_history)
        if not self._resume:  # the entries are those of a checkpoint
            for entry in self.state.log_history:
                self._lines.write(entry)
        return places

    # Checkpoints

    def _kept_now(self) -> dict[str, Any]:
        """The options that a resumed run must not change."""
        options, windows = self._options, self.parts.windows
        return {
            "--batch-size": options.batch_size,
            "--accumulate": options.accumulate,
            "--sequence-length": windows.tokens.shape[1],
            "--seed": options.seed,
            "--lr": self.parts.rate,
            "--weight-decay": options.weight_decay,
            "--packing": options.packing,
            "--lora": options.lora,
            "--lora-alpha": options.lora_alpha,
            "--lora-target": options.lora_target,
            "--base": options.base,
            "a frozen --model with the digest": self.parts.digest,
            "a number of windows of": len(windows.tokens),
        }

    def checkpoint_extra(self) -> dict[str, Any]:
        return {"kept": self._kept_now()}

    def check_extra(self, checkpoint: Path, extra: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if an option has changed that must not."""
        refuse_changes(str(checkpoint), extra.get("kept", {}), self._kept_now())

    def progress_of(self, doing: str) -> Told | None:
        return partial(self.parts.display.moved, doing)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save no weights, because the checkpoint of the engine has them."""
        if self.args.should_save and output_dir is not None:
            Path(output_dir).mkdir(exist_ok=True)
            self.parts.describe(Path(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Like transformers. A rank for which the checkpoint has no states draws other numbers than
        all others."""
        super()._load_rng_state(checkpoint)
        world = self.parts.world
        if checkpoint not in (None, METRICS) and world.size > 1:
            saved = Path(str(checkpoint), f"rng_state_{world.rank}.pth")
            if not saved.is_file():
                world.seed(self._options.seed, self.state.global_step)

    # The output

    def checked(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `weights`, which no loss has checked since the last step. Raises `InfinityError`
        for a parameter that is not finite."""
        buffers = {name for name, _ in self.model.named_buffers()}  # a mask may contain infinities
        for name, value in weights:
            if value.is_floating_point() and value.numel() and name not in buffers:
                for extreme in map(float, torch.aminmax(value)):  # any NaN makes both NaN
                    if not math.isfinite(extreme):
                        raise self._diverged(name, extreme, self.history.done)
            yield name, value
            del value  # free it before the next unit is gathered


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Inside, transformers logs errors only. It warns of arguments that have changed since a
    checkpoint, and those that must not change are refused."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def _inputs(batch: Batch) -> dict[str, Any]:
    """The inputs of a model. Without a mask and a cache, samples with positions of their own do not
    see each other."""
    inputs = {"input_ids": batch.ids, "labels": batch.labels}
    if batch.positions is not None:
        inputs["position_ids"] = batch.positions
    found: dict[str, Any] = {name: torch.from_numpy(each) for name, each in inputs.items()}
    return found | {"use_cache": False}
