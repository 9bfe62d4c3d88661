"""An ordinary PyTorch training loop, with measurements."""

from __future__ import annotations

import inspect
import itertools
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from infinity.accumulation import accumulate
from infinity.cli.checkpoints import CheckpointFolders, Saver
from infinity.cli.history import (
    History,
    StepRecord,
    Validation,
    packed,
    thinned,
    unpacked_steps,
    unpacked_validations,
)
from infinity.cli.ranks import ALONE, World
from infinity.cli.sampler import Sampler
from infinity.errors import InfinityError
from infinity.interrupt import Interrupt
from infinity.models.data import Windows
from infinity.models.samples import unpacked
from infinity.models.schedule import learning_rate_factor
from infinity.observe import Recorder
from infinity.report import Report


class TrainedEngine(Saver, Protocol):
    """The part of `infinity.Engine` that the loop and the output use."""

    @property
    def recorder(self) -> Recorder: ...
    @property
    def device(self) -> torch.device: ...
    def report(self) -> Report: ...
    @property
    def committed_step(self) -> int | None: ...
    def track(self, **objects: Any) -> None: ...
    def discard_committed(self) -> None: ...
    def memory(self) -> dict[str, int]: ...
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]: ...
    def close(self) -> None: ...


class Watcher(Protocol):
    """Receives the progress. The thread of the loop calls it."""

    def stepped(self, history: History) -> None:
        """A step has ended. Its record is the last of `history`."""

    def validated(self, history: History) -> None:
        """A validation has ended. Its record is the last of `history`."""

    def moved(self, doing: str, done: int, total: int) -> None:
        """A checkpoint is in progress. `doing` is "saving" or "loading", `done` and `total` are
        bytes."""


@dataclass(frozen=True)
class Schedule:
    """The length of the training and its batches."""

    steps: int
    batch_size: int
    """Windows per forward pass, of all ranks together."""
    accumulate: int
    warmup: int
    eval_every: int
    """Steps between validations; 0: only at the end."""
    eval_batches: int
    vertical: bool = False
    """Whether the batches of a step go through the model together: see `infinity.accumulate`."""


class Trainer:
    """Trains `model` on `windows`. It owns only the `History` of the run. Used by one thread.

    Each rank trains on its part of every batch, and all ranks have the same losses.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        engine: TrainedEngine,
        optimizer: torch.optim.Optimizer,
        windows: Windows,
        schedule: Schedule,
        device: torch.device,
        checkpoints: CheckpointFolders | None = None,
        world: World = ALONE,
    ) -> None:
        self.model, self.engine, self.optimizer = model, engine, optimizer
        self.windows, self.schedule, self.device = windows, schedule, device
        tokens = windows.mean_length * schedule.batch_size * schedule.accumulate
        self.history = History(tokens_per_step=round(tokens))
        self._takes_counts = "num_items_in_batch" in _keywords(model)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, schedule.steps, schedule.warmup)
        )
        self._checkpoints, self._world = checkpoints, world

    def train(self, interrupt: Interrupt, watcher: Watcher) -> History:
        """Run the schedule until its end or until `interrupt` has noted a signal. Returns the
        history.

        Raises `InfinityError` if the loss is not finite.
        """
        with Sampler(self.engine.memory, self.history.samples):
            self._run(interrupt, watcher)
        return self.history

    def _run(self, interrupt: Interrupt, watcher: Watcher) -> None:
        plan, done = self.schedule, self.history.done
        batches = itertools.islice(
            self.windows.batches(plan.batch_size), done * plan.accumulate, None
        )
        self.model.train()
        for number in range(done + 1, plan.steps + 1):
            self.history.steps.append(
                self._step(number, list(itertools.islice(batches, plan.accumulate)))
            )
            self.scheduler.step()
            watcher.stepped(self.history)
            last, signal = number == plan.steps, self._world.agree(interrupt.signal)
            if signal is None and (last or (plan.eval_every and number % plan.eval_every == 0)):
                self._validate(number, interrupt, watcher)
                signal = self._world.agree(interrupt.signal)
            if self._checkpoints is not None and (
                last or signal is not None or self._checkpoints.is_due(number)
            ):
                told = partial(watcher.moved, "saving")
                self._checkpoints.save(self.engine, self.optimizer, number, self._state(), told)
                signal = self._world.agree(interrupt.signal)
            if signal is not None:
                self.history.signal = signal
                break

    def resume(self, checkpoint: Path, watcher: Watcher) -> None:
        """Continue after the step of `checkpoint`, as if there had been no interruption.

        Raises `ValueError` if an option that determines the batches or their use has changed.
        """
        told = partial(watcher.moved, "loading")
        state = self.engine.load_checkpoint(checkpoint, self.optimizer, progress=told)
        self._take(state, str(checkpoint), "--checkpoint")
        # The number of ranks has changed, and this is the state of the first rank.
        if state.get("rank", 0) != self._world.rank:
            self._world.seed(self.windows.seed, self.history.done)
        else:
            torch.set_rng_state(state["rng"])
            if self.device.type != "cpu":
                torch.get_device_module(self.device).set_rng_state(state["device_rng"], self.device)

    def state_dict(self) -> dict[str, Any]:
        """The state of the run, which the engine commits with every step. The engine adds the
        random states. Its size does not grow with the number of steps."""
        return {
            "fixed": self._fixed(),
            "scheduler": self.scheduler.state_dict(),
            "steps": packed(thinned(self.history.steps)),
            "validations": packed(thinned(self.history.validations, self.schedule.eval_every or 1)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the committed step. Raises `ValueError` like `resume`."""
        self._take(state, "the run in --nvme", "--nvme")

    def _take(self, state: dict[str, Any], where: str, option: str) -> None:
        for name, now in self._fixed().items():
            if state["fixed"][name] != now:
                raise ValueError(
                    f"{where} was made with {name} {state['fixed'][name]}, and now it is {now}; "
                    f"go on with the same, or start anew with another {option}"
                )
        self.scheduler.load_state_dict(state["scheduler"])
        self.history.validations = unpacked_validations(state["validations"])
        steps = unpacked_steps(state["steps"])
        shift = time.perf_counter() - steps[-1].end if steps else 0  # as if they had just ended
        self.history.steps = [
            step._replace(start=step.start + shift, end=step.end + shift) for step in steps
        ]

    def _state(self) -> dict[str, Any]:
        """The state for `resume`, beside the engine and the optimizer."""
        state = self.state_dict() | {"rank": self._world.rank, "rng": torch.get_rng_state()}
        if self.device.type != "cpu":
            state["device_rng"] = torch.get_device_module(self.device).get_rng_state(self.device)
        return state

    def _fixed(self) -> dict[str, Any]:
        """The options that a resumed run must not change."""
        plan = self.schedule
        return {
            "--batch-size": plan.batch_size,
            "--accumulate": plan.accumulate,
            "--sequence-length": self.windows.tokens.shape[1],
            "--seed": self.windows.seed,
            "--lr": self.optimizer.defaults["lr"],
            "--weight-decay": self.optimizer.defaults["weight_decay"],
            "a number of windows of": len(self.windows.tokens),
        }

    def _step(self, number: int, batches: list[Any]) -> StepRecord:
        start = time.perf_counter()
        rate = float(self.optimizer.param_groups[0]["lr"])
        scaler = getattr(self.optimizer, "loss_scaler", None)
        parts = self._inputs(batches)
        total = self._world.mean(
            sum(loss.item() / len(parts) for loss in self._backward(parts, scaler is not None))
        )
        if not math.isfinite(total):
            raise self._diverged("the loss", total, number)
        self.optimizer.step()
        norm = getattr(self.optimizer, "grad_norm", None)
        self.optimizer.zero_grad()
        norm = None if norm is None or not math.isfinite(norm) else float(norm)
        return StepRecord(
            number,
            total,
            rate,
            norm,
            start,
            time.perf_counter(),
            None if scaler is None else scaler.scale,
        )

    def _diverged(self, what: str, value: float, number: int) -> InfinityError:
        return InfinityError(
            f"{what} became {value} at step {number}; try a lower --lr than "
            f"{self.optimizer.defaults['lr']:g}, a longer --warmup, or --precision bf16 or fp32"
        )

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

    def _backward(self, batches: list[dict[str, Any]], scaled: bool) -> Iterator[torch.Tensor]:
        """Accumulate the gradients of the mean loss. Yields the loss of each batch."""
        scale: Any = getattr(self.optimizer, "scale", None) if scaled else None
        if self.schedule.vertical:
            yield from accumulate(self.model, batches, scale=scale)
            return
        for batch in batches:
            loss = self._loss(batch)
            part = loss / len(batches)
            (part if scale is None else scale(part)).backward()
            yield loss.detach()

    def _inputs(self, batches: list[Any]) -> list[dict[str, Any]]:
        """The model inputs of this rank for each of `batches`. The mean of their losses is the loss
        of a step.

        Completions have different lengths. So every loss is a sum, divided by the number of labels
        that an average batch has on an average rank. The mean over batches and ranks is then the
        mean over all labels.
        """
        parts = [self._arguments(self._world.part(batch)) for batch in batches]
        if self.windows.learns_completions and self._takes_counts:
            labels = sum(unpacked(batch).counted for batch in batches)
            for part in parts:
                part["num_items_in_batch"] = labels / (len(batches) * self._world.size)
        return parts

    def _arguments(self, batch: Any) -> dict[str, Any]:
        if self.windows.learns_completions:
            ids, labels = (torch.from_numpy(each).to(self.device) for each in unpacked(batch)[:2])
            return {"input_ids": ids, "labels": labels, "use_cache": False}
        ids = torch.from_numpy(batch).to(self.device)
        return {"input_ids": ids, "labels": ids, "use_cache": False}

    def _loss(self, arguments: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = self.model(**arguments).loss
        return loss

    def _validate(self, step: int, interrupt: Interrupt, watcher: Watcher) -> None:
        self.model.eval()
        total = tokens = 0.0
        with torch.no_grad():
            for batch in self.windows.validation_batches(
                self.schedule.batch_size, self.schedule.eval_batches
            ):
                if self._world.agree(interrupt.signal) is not None:
                    break
                part = self._world.part(batch)
                # All ranks run the model, because each holds a part of it.
                loss = self._loss(self._arguments(part if len(part) else batch[:1])).item()
                size = unpacked(part).counted if self.windows.learns_completions else part.size
                total += loss * size
                tokens += size
        self.model.train()
        if self._world.agree(interrupt.signal) is None:
            total, tokens = (
                math.fsum(values)
                for values in zip(*self._world.gather((total, tokens)), strict=True)
            )
            self.history.validations.append(Validation(step, total / tokens))
            watcher.validated(self.history)


def _keywords(model: torch.nn.Module) -> set[str]:
    """The keyword arguments of the forward of `model`. If it takes any keyword, also those of
    losses."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = {each.name for each in parameters}
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        names.add("num_items_in_batch")
    return names
