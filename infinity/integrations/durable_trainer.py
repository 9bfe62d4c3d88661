"""The part of a Trainer that makes its steps durable and resumes them. See
[Note: a durable training].

[Note: a durable training]
With `Config(durability=...)` the engine commits the last note of the trainer together with its
states: counters, sums of the loss, callbacks, scheduler, random states and the place in the data. A
kill costs the step that was not committed. A note is made for the update, after log, evaluation and
checkpoint of the step, and at the end of an epoch. The engine may be closed between the first two,
for example by Ctrl-C in an evaluation. Then the resumed training starts with the rest of that step.

The log is no part of a note, because its size grows. It is in `metrics.jsonl` in the output
directory, after the lines of earlier trainings. A resume cuts that file to the length in the note.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.hooks import RemovableHandle
from transformers import optimization
from transformers.trainer_callback import ExportableState

from infinity.checkpoint.files import METRICS
from infinity.durable.record import RandomStates
from infinity.engine import engine
from infinity.errors import ConfigError
from infinity.integrations.trainer_notes import (
    EPOCH_ENDED,
    STEPPED,
    UPDATED,
    Fetches,
    TrainingLog,
    grow,
    notes_of,
)
from infinity.interrupt import Interrupt

log = logging.getLogger("infinity")

PROGRESS = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""The fields of `TrainerState` that training changes, beside its log."""

KEPT = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "lr_scheduler_type",
    "seed",
    "data_seed",
    "world_size",
)
"""The arguments that a resumed training must not change."""

_BY_METRICS = tuple(
    kind
    for kind in (ReduceLROnPlateau, getattr(optimization, "GreedyLR", None))
    if kind is not None
)
"""The schedulers that Trainer steps after an evaluation."""

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object  # a Trainer follows the mixin in the bases


def refuse_changes(what: str, kept: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if an argument that `what` has `kept` is another one `now`."""
    for name in {**kept, **now}:
        if kept.get(name) != now.get(name):
            raise ConfigError(
                f"{what} has {name} {kept.get(name)}, and here it is {now.get(name)}; resume with "
                "the same, or start anew in another directory"
            )


class SignalCame(Exception):
    """A signal came, and the current step is complete."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class DurableTrainerMixin(Base):  # type: ignore[misc]
    """Makes the steps of a Trainer durable, and resumes them. Used by the thread that trains.

    One class, because a Trainer calls these methods on itself.
    """

    _is_durable = False
    _resume = False
    _lines = TrainingLog(None)
    control: Any

    def follow(self, model: nn.Module) -> None:
        """Have the engine of `model` commit this trainer with its steps. Call it right after
        `wrap`, so that the first record already has a note."""
        self._engine = engine(model)
        self._is_durable = self._engine.config.steps_per_commit > 0
        if not self._is_durable:
            return
        self._notes = notes_of(self._engine)
        self._resumed: dict[str, Any] | None = None
        self._rest: dict[str, Any] | None = None  # of a resumed epoch
        self._epoch = self._first_step = 0
        self._kept: dict[str, Any] = {}
        self._epoch_random: dict[str, Any] = {}
        self._data_seed: int | None = None
        self._last_norm: Any = None
        self._fetches = Fetches(self._engine.compute_device)
        self._interrupt: Interrupt | None = None
        self._hook: RemovableHandle | None = None  # before a step of the optimizer

    def forget_committed(self) -> None:
        """Have the next `train()` start from its beginning, although a step is committed."""
        if self._is_durable:
            self._notes.committed = {}

    # Notes

    def _random_states(self) -> RandomStates:
        return RandomStates.of(self._engine.compute_device)

    def _kept_now(self) -> dict[str, Any]:
        found = {name: getattr(self.args, name) for name in KEPT}
        found["lr_scheduler_type"] = str(getattr(found["lr_scheduler_type"], "value", ""))
        if hasattr(self.train_dataset, "__len__"):
            found["length of train_dataset"] = len(self.train_dataset)
        return found

    def _stateful(self) -> list[Any]:
        """The callbacks with a state, and the control, which is the last one."""
        return [
            each
            for each in [*self.callback_handler.callbacks, self.control]
            if isinstance(each, ExportableState) or hasattr(each, "load_state_dict")
        ]

    def note(self, moment: str) -> None:
        """Make a note. It must be small, because each commit writes it."""
        scaler = self.accelerator.scaler
        done = self.state.global_step + (moment == UPDATED) - self._first_step
        states = [
            [
                type(each).__name__,
                each.state() if isinstance(each, ExportableState) else each.state_dict(),
            ]
            for each in self._stateful()
        ]
        self._notes.make(
            moment,
            {
                "kept": self._kept,
                "state": json.dumps({n: getattr(self.state, n) for n in PROGRESS}, default=float),
                "stateful": json.dumps(states, default=float),
                "max_steps": self.state.max_steps,
                "epoch": self._epoch,
                "first_step": self._first_step,
                "sums": [
                    float(self._tr_loss),
                    float(self._total_loss_scalar),
                    int(self._globalstep_last_logged),
                    float(self.current_flos),
                    int(self._initial_global_step),
                ],
                "norm": self._last_norm if moment == UPDATED else None,
                "scheduler": self.lr_scheduler.state_dict(),
                "scaler": None if scaler is None else scaler.state_dict(),
                "groups": [
                    {name: value for name, value in group.items() if name != "params"}
                    for group in self.optimizer.param_groups
                ],
                "random": self._random_states().values(),
                "epoch_random": self._epoch_random,
                "data_seed": self._data_seed,
                "ahead": _values(self._fetches.ahead(done * self.args.gradient_accumulation_steps)),
                "lines": [self._lines.begin, self._lines.end],
            },
        )

    # The loop

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Like transformers. With durability, the first SIGINT, SIGTERM or SIGHUP ends it after
        the current step, which is committed: with `KeyboardInterrupt` for Ctrl-C, else with exit
        status 128 + the number of the signal."""
        if not self._is_durable:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        if self._begin_training() and resume_from_checkpoint:
            log.warning(
                "training resumes from the committed step %d; resume_from_checkpoint is ignored",
                self._engine.committed_step,
            )
            resume_from_checkpoint = None
        try:
            with ExitStack() as stack:
                if threading.current_thread() is threading.main_thread():
                    self._interrupt = stack.enter_context(Interrupt(only_defaults=True))
                output = super().train(resume_from_checkpoint, *args, **kwargs)
                self._stop_if_asked()  # since the last step
                return output
        except SignalCame as stopped:
            self.end_by(stopped.number)
            return None
        finally:
            self._interrupt = None
            self._remove_hook()

    def end_by(self, number: int) -> None:
        """End a training that signal `number` stopped after a step."""
        if number == signal.SIGINT:
            raise KeyboardInterrupt from None
        self._engine.close()
        raise SystemExit(128 + number) from None

    def metrics_path(self) -> Path | None:
        """The file of the log, for the first rank."""
        return Path(self.args.output_dir, METRICS)

    def _begin_training(self) -> bool:
        """Count this `train()`. Returns whether it resumes. Raises `ConfigError` if the committed
        step is of another `train()`, or cannot be resumed."""
        committed, number = self._notes.committed, self._notes.trainings + 1
        self._kept = self._kept_now()
        is_first = self.args.process_index == 0
        self._lines = TrainingLog(self.metrics_path() if is_first else None)
        if not committed:
            if self._resume and number == 1 and self._engine.posted_step:
                raise ConfigError(
                    f"step {self._engine.posted_step} was committed without a Trainer, so where it "
                    "was in its data is not known; start anew in another directory"
                )
            self._notes.trainings, self._resumed = number, None
            self._history = self._lines.open()
            return False
        if hasattr(self, "_buffered_inputs"):
            raise ConfigError(
                f"{type(self).__name__} keeps generated batches from step to step, and no durable "
                "step has them; wrap without resume, and give train(resume_from_checkpoint=...)"
            )
        if committed["training"] != number:
            raise ConfigError(
                f"the committed step is of train() call {committed['training']} on this engine, "
                f"and this is call {number}; give each training directories of its "
                "own in Config(nvme=...)"
            )
        refuse_changes("the committed training", committed["kept"], self._kept)
        names = [type(each).__name__ for each in self._stateful()]
        expected = [name for name, _ in json.loads(committed["stateful"])]
        if names != expected:
            raise ConfigError(
                f"the committed training has callbacks with a state {expected}, and here they are "
                f"{names}; resume with the same callbacks"
            )
        self._notes.trainings, self._notes.committed = number, {}
        self._resumed = committed
        self._history = self._lines.open(*committed["lines"])
        return True

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        steps_per_epoch, epochs = args[1], args[2]
        places: tuple[int, int] = super()._init_training_state(*args, **kwargs)
        if not self._is_durable or self._resumed is None:
            return places
        self.args.eval_on_start = False  # it was done
        for name, value in json.loads(self._resumed["state"]).items():
            setattr(self.state, name, value)
        note = self._resumed = self._with_more_steps(self._resumed, steps_per_epoch)
        self.state.log_history = self._history
        for each, (_, saved) in zip(self._stateful(), json.loads(note["stateful"]), strict=True):
            if isinstance(each, ExportableState):
                for name, value in saved["attributes"].items():
                    setattr(each, name, value)
            else:
                each.load_state_dict(saved)
        self._restore_control(note)
        self._rest = note
        self._epoch, self._first_step = note["epoch"], note["first_step"]
        if note["moment"] == EPOCH_ENDED:
            self._epoch = epochs if self.control.should_training_stop else self._epoch + 1
            return self._epoch, 0
        done = self.state.global_step + (note["moment"] == UPDATED) - self._first_step
        if self.control.should_epoch_stop or self.control.should_training_stop:
            done = steps_per_epoch
        return self._epoch, done * self.args.gradient_accumulation_steps

    def _with_more_steps(self, note: dict[str, Any], steps_per_epoch: int) -> dict[str, Any]:
        """`note` without the stop after its last step, if this training has more steps."""
        if not note["max_steps"] == self.state.global_step < self.state.max_steps:
            return note
        *others, (name, control) = json.loads(note["stateful"])
        control["args"]["should_training_stop"] = False
        more = note | {"stateful": json.dumps([*others, [name, control]])}
        if self.state.global_step - note["first_step"] < steps_per_epoch:
            more |= {"moment": STEPPED} if note["moment"] == EPOCH_ENDED else {}
        return more

    def _restore_control(self, note: Mapping[str, Any]) -> None:
        """Restore the control, which `on_train_begin` and `on_epoch_begin` reset."""
        _, control = json.loads(note["stateful"])[-1]
        for name, value in control["args"].items():
            setattr(self.control, name, value)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        if self._is_durable and self._resumed is not None:
            self.lr_scheduler.load_state_dict(self._resumed["scheduler"])
            groups = zip(self.optimizer.param_groups, self._resumed["groups"], strict=True)
            for group, saved in groups:
                group.update(saved)
            if self._resumed["scaler"] is not None:
                self.accelerator.scaler.load_state_dict(self._resumed["scaler"])
        if self._is_durable:
            self._remove_hook()
            step = self.optimizer.optimizer
            self._hook = step.register_step_pre_hook(lambda *_: self.note(UPDATED))
        return prepared

    def _remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _restore_sums(self) -> None:
        """Once, after Trainer has set them to zero."""
        if self._resumed is not None:
            loss, total, logged, flos, first = self._resumed["sums"]
            self._tr_loss.fill_(loss)
            self._total_loss_scalar, self._globalstep_last_logged = total, logged
            self.current_flos, self._initial_global_step = flos, first
            self._resumed = None

    def _run_epoch(self, **kwargs: Any) -> None:
        if not self._is_durable:
            super()._run_epoch(**kwargs)
            return
        self._restore_sums()
        note, self._rest = self._rest, None
        self._epoch = kwargs["epoch"]
        if note is not None:
            _states(note["random"]).restore(self._engine.compute_device)
            self._restore_control(note)
        if note is not None and note["moment"] != EPOCH_ENDED:
            self._resume_epoch(note, kwargs)
        else:
            self.control.should_epoch_stop = False
            self._first_step = self.state.global_step
            self._epoch_random = self._random_states().values()
            self._fetches.begin()
            super()._run_epoch(**kwargs)
        self.note(EPOCH_ENDED)
        self._stop_if_asked()

    def _resume_epoch(self, note: Mapping[str, Any], kwargs: dict[str, Any]) -> None:
        trained = kwargs["steps_trained_in_current_epoch"]
        batches = kwargs["num_update_steps_per_epoch"] * self.args.gradient_accumulation_steps
        self._epoch_random = note["epoch_random"]
        self._fetches.begin(trained, note["ahead"] and _states(note["ahead"]))
        if note["moment"] == UPDATED:
            self._finish_step(note, kwargs)
            if self.control.should_epoch_stop or self.control.should_training_stop:
                trained = batches
        self._fetches.continue_from(self._random_states())
        if trained < batches:
            # The sampler and the seeds of workers are drawn again as the epoch began.
            _states(note["epoch_random"]).restore(self._engine.compute_device)
        kwargs |= {"steps_trained_in_current_epoch": trained, "resume_from_checkpoint": METRICS}
        super()._run_epoch(**kwargs | {"epochs_trained": kwargs["epoch"]})

    def _finish_step(self, note: Mapping[str, Any], kwargs: Mapping[str, Any]) -> None:
        """Do the rest of the step whose update is committed, as `Trainer._run_epoch` does it."""
        if note["scaler"] is not None:
            grow(self.accelerator.scaler)
        on = self.callback_handler
        self.control = on.on_optimizer_step(self.args, self.state, self.control)
        rate = self._get_learning_rate()
        if not isinstance(self.lr_scheduler, _BY_METRICS):
            self.lr_scheduler.step()
        self.state.global_step += 1
        done = (self.state.global_step - self._first_step) * self.args.gradient_accumulation_steps
        steps = kwargs["steps_in_epoch"]
        self.state.epoch = kwargs["epoch"] + min(done, steps) / steps
        self.control = on.on_step_end(self.args, self.state, self.control)
        names = ("model", "trial", "epoch", "ignore_keys_for_eval", "start_time")
        self._maybe_log_save_evaluate(
            self._tr_loss, note["norm"], *(kwargs[name] for name in names), learning_rate=rate
        )

    def get_train_dataloader(self) -> Any:
        """Like transformers. With durability, a resumed training shuffles like the first one."""
        if not self._is_durable:
            return super().get_train_dataloader()
        found = self.accelerator.dataloader_config
        if found.data_seed is None:
            # accelerate would take the same seed, and a resume may start from another one.
            first = self._resumed or {"data_seed": torch.initial_seed()}
            found.data_seed = first["data_seed"]
        self._data_seed = found.data_seed
        loader = super().get_train_dataloader()
        self._fetches.watch(loader)
        return loader

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Like transformers. Trainer calls it when it has the batches of the first step after a
        resume."""
        if checkpoint == METRICS:
            self._fetches.settle()
        else:
            super()._load_rng_state(checkpoint)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self._is_durable and self._notes.is_updated:  # not at the end of an epoch
            self.note(STEPPED)
            self._stop_if_asked()

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        self._last_norm = super()._get_grad_norm(*args, **kwargs)
        return self._last_norm

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_durable:
            self._restore_sums()
        return super()._finalize_training(*args, **kwargs)

    def signal_to_stop(self) -> int:
        """The signal that came to any rank; 0 for none."""
        number = 0 if self._interrupt is None else self._interrupt.signal or 0
        if self.args.world_size > 1:
            most = torch.tensor(number, device=self.args.device)
            torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
            number = int(most)
        return number

    def _stop_if_asked(self) -> None:
        """Raise `SignalCame` if a signal came to any rank."""
        if number := self.signal_to_stop():
            raise SignalCame(number)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Like transformers, and append the entry to `metrics.jsonl` if the training is durable."""
        super().log(logs, *args, **kwargs)
        if self.is_in_train:
            self._lines.write(self.state.log_history[-1])


def _values(states: RandomStates | None) -> dict[str, Any] | None:
    return None if states is None else states.values()


def _states(values: dict[str, Any]) -> RandomStates:
    return RandomStates.model_validate(values)
