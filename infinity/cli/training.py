"""The loop: an ordinary PyTorch training loop that also measures."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from infinity.accumulation import accumulate
from infinity.cli.data import Windows
from infinity.cli.history import History, Step, Validation
from infinity.cli.interrupt import Interrupt
from infinity.cli.sampler import Sampler
from infinity.errors import InfinityError
from infinity.observe import Recorder, Report

LOWEST = 0.1
"""The learning rate ends at this share of its highest value."""


class Engine(Protocol):
    """What the loop and the output need of `infinity.Engine`."""

    @property
    def recorder(self) -> Recorder: ...
    @property
    def device(self) -> torch.device: ...
    def report(self) -> Report: ...
    def memory(self) -> dict[str, int]: ...
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]: ...
    def close(self) -> None: ...


class Watcher(Protocol):
    """Told of progress; called by the loop's thread."""

    def stepped(self, history: History) -> None:
        """A step has ended; its record is the last of `history`."""

    def validated(self, history: History) -> None:
        """A validation has ended; its record is the last of `history`."""


@dataclass(frozen=True)
class Schedule:
    """How long and in which portions to train."""

    steps: int
    batch_size: int
    accumulate: int
    warmup: int
    eval_every: int
    """Validate after every so many steps; 0: only at the end."""
    eval_batches: int
    vertical: bool = False
    """Whether the batches of a step go through the model together, see `infinity.accumulate`."""


def learning_rate_factor(step: int, steps: int, warmup: int) -> float:
    """Share of the highest learning rate for `step` (from 0): linear warm-up, then a cosine down to `LOWEST` at the end."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    return LOWEST + (1 - LOWEST) * 0.5 * (1 + math.cos(math.pi * done))


class Trainer:
    """Trains `model` on `windows`; owns the `History` of the run and nothing else. One thread."""

    def __init__(
        self,
        model: torch.nn.Module,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        windows: Windows,
        schedule: Schedule,
        device: torch.device,
    ) -> None:
        self.model, self.engine, self.optimizer = model, engine, optimizer
        self.windows, self.schedule, self.device = windows, schedule, device
        tokens = windows.tokens.shape[1] * schedule.batch_size * schedule.accumulate
        self.history = History(tokens_per_step=tokens)

    def train(self, interrupt: Interrupt, watcher: Watcher) -> History:
        """Run the schedule, or until `interrupt` has noted a signal; returns the history.

        Raises `InfinityError` when the loss is no longer a finite number.
        """
        plan = self.schedule
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_factor(step, plan.steps, plan.warmup)
        )
        with Sampler(self.engine.memory, self.history.samples):
            self._run(scheduler, interrupt, watcher)
        return self.history

    def _run(self, scheduler: Any, interrupt: Interrupt, watcher: Watcher) -> None:
        plan = self.schedule
        batches = self.windows.batches(plan.batch_size)
        self.model.train()
        for number in range(1, plan.steps + 1):
            self.history.steps.append(self._step(number, list(itertools.islice(batches, plan.accumulate))))
            scheduler.step()
            watcher.stepped(self.history)
            last = number == plan.steps
            if interrupt.signal is None and (last or (plan.eval_every and number % plan.eval_every == 0)):
                self._validate(number, interrupt, watcher)
            if interrupt.signal is not None:
                self.history.signal = interrupt.signal
                break

    def _step(self, number: int, batches: list[Any]) -> Step:
        start = time.perf_counter()
        rate = float(self.optimizer.param_groups[0]["lr"])
        scaler = getattr(self.optimizer, "loss_scaler", None)
        total = sum(loss.item() / len(batches) for loss in self._backward(batches, scaler is not None))
        if not math.isfinite(total):
            raise InfinityError(
                f"the loss became {total} at step {number}; try a lower --lr than {self.optimizer.defaults['lr']:g}, "
                "a longer --warmup, or --precision bf16 or fp32"
            )
        self.optimizer.step()
        norm = getattr(self.optimizer, "grad_norm", None)
        self.optimizer.zero_grad()
        norm = None if norm is None or not math.isfinite(norm) else float(norm)
        return Step(number, total, rate, norm, start, time.perf_counter(), None if scaler is None else scaler.scale)

    def _backward(self, batches: list[Any], scaled: bool) -> Iterator[torch.Tensor]:
        """Accumulate the gradients of the mean loss; gives the loss of each batch."""
        scale: Any = getattr(self.optimizer, "scale", None) if scaled else None
        if self.schedule.vertical:
            yield from accumulate(self.model, [self._arguments(batch) for batch in batches], scale=scale)
            return
        for batch in batches:
            loss = self._loss(batch)
            part = loss / len(batches)
            (part if scale is None else scale(part)).backward()
            yield loss.detach()

    def _arguments(self, batch: Any) -> dict[str, Any]:
        ids = torch.from_numpy(batch).to(self.device)
        return {"input_ids": ids, "labels": ids, "use_cache": False}

    def _loss(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.model(**self._arguments(batch)).loss
        return loss

    def _validate(self, step: int, interrupt: Interrupt, watcher: Watcher) -> None:
        self.model.eval()
        total = tokens = 0.0
        with torch.no_grad():
            for batch in self.windows.validation_batches(self.schedule.batch_size, self.schedule.eval_batches):
                if interrupt.signal is not None:
                    break
                total += self._loss(batch).item() * batch.size
                tokens += batch.size
        self.model.train()
        if interrupt.signal is None:
            self.history.validations.append(Validation(step, total / tokens))
            watcher.validated(self.history)
