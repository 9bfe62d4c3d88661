"""transformers: a Trainer with a model on this engine, and a mixin for every other Trainer.

    from infinity.integrations.transformers import InfinityTrainer

    trainer = InfinityTrainer(model, args, infinity_config=infinity.Config(nvme="/mnt/nvme0"), ...)

    from infinity.integrations.transformers import InfinityTrainerMixin

    class StreamedSFTTrainer(InfinityTrainerMixin, SFTTrainer):
        pass

[Note: checkpoints of a trainer]
`checkpoint-N/` has the files of a plain Trainer, with `infinity/` instead of `optimizer.pt`. That
is a checkpoint of the engine with weights, masters and moments; of a PEFT model, only those of the
adapters. All ranks write their parts. A resume and the best model are loaded from it, bit for bit.
A directory without it is loaded like in a plain Trainer. Such a directory comes from a plain
Trainer or from `save_only_model=True`.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from infinity.accumulation import accumulate
from infinity.checkpoint.files import DRAFT, ENGINE
from infinity.checkpoint.progress import Told
from infinity.config import Config
from infinity.directories.directory import Directory
from infinity.directories.lock import lock_directory
from infinity.engine import engine, is_wrapped
from infinity.errors import ConfigError, in_words
from infinity.integrations.accelerate import (
    ONE_BACKEND,
    adopt,
    begin_backward,
    is_new_optimizer,
)
from infinity.integrations.durable_trainer import DurableTrainerMixin
from infinity.integrations.required import required
from infinity.integrations.wear import WearNote
from infinity.integrations.wrapping import convert, with_device, wrap_for
from infinity.optim.conversion import algorithm_of
from infinity.optim.family import FAMILY
from infinity.optim.optimizer import Optimizer

with required("transformers", "trainer"):
    from transformers import Trainer
    from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

log = logging.getLogger("infinity")


class Counterpart(NamedTuple):
    """The optimizer for `TrainingArguments(optim=...)`."""

    kind: type[Optimizer] | None
    """None: the optimizer of transformers is converted."""
    moments: str = "fp32"
    """The default of `Config.moment_precision`."""


COUNTERPARTS: Mapping[str, Counterpart] = {
    **{
        name: Counterpart(kind, moments)
        for kind in FAMILY
        for name, moments in kind.rule.trainer.items()
    },
    "sgd": Counterpart(None),
    "adagrad": Counterpart(None),
    "rmsprop": Counterpart(None),
    "adafactor": Counterpart(None),
    "grokadamw": Counterpart(None),
    "rmsprop_bnb": Counterpart(None),
    "schedule_free_adamw": Counterpart(None),
    "schedule_free_radam": Counterpart(None),
    "schedule_free_sgd": Counterpart(None),
    "stable_adamw": Counterpart(None),
}


class InfinityTrainerMixin(DurableTrainerMixin):
    """Runs the model of a Trainer on this engine: a base class before a subclass of
    `transformers.Trainer`.

    The model is wrapped with `infinity_config` as soon as the trainer has it. A model built inside
    `infinity.init()` gets its values then. Fields that the config does not set have other defaults:
    `algorithm` and `moment_precision` follow from the optimizer, and the device from the arguments.
    A wrapped model takes no `infinity_config`.

    An `optim=` name becomes an infinity optimizer with the hyperparameters of the arguments. A
    torch optimizer in `optimizers=` is converted, and its scheduler redirected. All ranks must call
    `save_model`. The log has the bytes that the last step moved, and the seconds that the model
    waited since the last entry: see `Engine.activity`. After the second step, the logger `infinity`
    says once how much the training writes to NVMe.

    Raises `ConfigError` for arguments that enable another engine, and for an unknown optimizer,
    before anything is changed.
    """

    def __init__(
        self,
        *args: Any,
        infinity_config: Config | None = None,
        resume: bool = False,
        **kwargs: Any,
    ) -> None:
        self._infinity_config, self._resume = infinity_config, resume
        self._wrapped_model: nn.Module | None = None  # by this trainer
        self._given_optimizer = optimizer_in(kwargs.get("optimizers"))
        self._given_kind = kwargs.get("optimizer_cls_and_kwargs")
        self._waited: dict[str, float] = {}
        self._waiting: list[Callable[..., torch.Tensor]] = []  # micro-batches
        self._draft: Path | None = None  # the directory of a checkpoint that is being saved
        super().__init__(*args, **kwargs)
        self.add_callback(WearNote(self.say))

    # The model

    def create_accelerator_and_postprocess(self) -> None:
        """Like transformers, then wrap the model. This is the first call at which all settings are
        known."""
        refuse_arguments(self.args)
        if self._given_optimizer is None and self._given_kind is None:
            counterpart_of(self.args)
        super().create_accelerator_and_postprocess()
        adopt(self.accelerator)
        if self.model is not None:
            self._wrap(self.model)
            self.follow(self.model)
        elif self._resume:
            raise ConfigError(
                "resume=True resumes the model that the trainer is given, and model_init builds "
                "others; give model=model_init()"
            )

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Like transformers. Closes the engine of the last model, and wraps the new model."""
        if isinstance(self.model, nn.Module) and is_wrapped(self.model):
            engine(self.model).close()
        self._waited.clear()
        model: nn.Module = super().call_model_init(trial)
        self._wrap(model)
        return model

    def _wrap(self, model: nn.Module) -> None:
        config = self._infinity_config
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model is {in_words(model)}; give a torch.nn.Module")
        if is_wrapped(model):
            # A hyperparameter search creates a new accelerator for each trial.
            if config is not None and model is not self._wrapped_model:
                raise ConfigError(
                    "the model is wrapped already, so infinity_config would change nothing; leave "
                    "one of the two out"
                )
            if self._resume:
                raise ConfigError(
                    "the model is wrapped already, so resume=True would change nothing; give it to "
                    "infinity.wrap"
                )
            return
        optimizer = self._given_optimizer
        if optimizer is not None and not trains(optimizer, model):
            raise ConfigError(
                f"the {type(optimizer).__name__} in optimizers has no parameter of the model, and "
                "would train nothing; make it of model.parameters() of this model"
            )
        config = with_device(Config() if config is None else config, self.args.device)
        given = () if optimizer is None else [optimizer]
        wrap_for(model, self._completed(config), given, self._resume)
        self._wrapped_model = model

    def _completed(self, config: Config) -> Config:
        """`config` with defaults that follow from the arguments."""
        if self._given_optimizer is not None:
            return config
        found: dict[str, Any] = {"algorithm": algorithm_of(*self._optimizer_kind())}
        if self._given_kind is None:
            found["moment_precision"] = counterpart_of(self.args).moments
        update = {name: each for name, each in found.items() if name not in config.model_fields_set}
        return config.model_copy(update=update)

    # The optimizer

    def _optimizer_kind(self) -> tuple[type[torch.optim.Optimizer], Any]:
        """The class of the optimizer and its arguments."""
        kind, settings = self._given_kind or self.get_optimizer_cls_and_kwargs(self.args)
        return kind, settings

    @classmethod
    def get_optimizer_cls_and_kwargs(cls, args: Any, model: Any = None) -> tuple[Any, Any]:
        """Like transformers, with an infinity optimizer if there is one for `args.optim`."""
        kind = counterpart_of(args).kind
        if kind is None:
            return super().get_optimizer_cls_and_kwargs(args, model)
        return kind, settings_for(kind, args)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Like transformers, and convert the optimizer."""
        made = super().create_optimizer(*args, **kwargs)
        if is_new_optimizer(made):
            schedulers = [] if self.lr_scheduler is None else [self.lr_scheduler]
            self.optimizer: Any = convert(made, schedulers)
        return self.optimizer

    # Micro-batches

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Like transformers. With `Config(accumulation="vertical")` all micro-batches of a step
        run with the last one, which is the one outside of `no_sync`; the others return 0."""
        count = self.current_gradient_accumulation_steps
        step = super().training_step
        if count == 1 or engine(self.model).config.accumulation == "horizontal":
            return step(model, inputs, num_items_in_batch)

        def work(begin: Callable[[torch.Tensor], None]) -> torch.Tensor:
            begin_backward.set(begin)
            return step(model, inputs, num_items_in_batch)

        self._waiting.append(work)
        if len(self._waiting) < count:
            return torch.zeros((), device=self.args.device)
        return self._run_waiting()

    def _run_waiting(self) -> torch.Tensor:
        """Run the micro-batches that wait. Adds their losses to the sum like Trainer, but for the
        last one, which is returned."""
        works, self._waiting = self._waiting, []
        *losses, last = accumulate(self.model, works)
        for loss in losses:
            if self.args.logging_nan_inf_filter and not loss.isfinite():
                steps = 1 + self.state.global_step - self._globalstep_last_logged
                self._tr_loss += self._tr_loss / steps
            else:
                self._tr_loss += loss
        return last

    def _run_epoch(self, **kwargs: Any) -> None:
        self._waiting.clear()  # of an epoch that an exception ended
        super()._run_epoch(**kwargs)
        if self._waiting:  # a callback ended the epoch between them: their gradients stay
            self._tr_loss += self._run_waiting()

    # Checkpoints. See [Note: checkpoints of a trainer].

    def _get_output_dir(self, trial: Any = None) -> str:
        return str(self._draft or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        if self.args.push_to_hub:
            super()._save_checkpoint(model, trial)  # uploads it from where it is written
            return
        folder = Path(self._get_output_dir(trial))
        with ExitStack() as held:
            if self.args.should_save:
                shutil.rmtree(folder / DRAFT, ignore_errors=True)
                (folder / DRAFT).mkdir(parents=True)
                held.callback(shutil.rmtree, folder / DRAFT, ignore_errors=True)
                held.enter_context(lock_directory(folder / DRAFT, "output_dir"))
            self.accelerator.wait_for_everyone()
            self._save_draft(folder, model, trial)

    def _save_draft(self, folder: Path, model: nn.Module, trial: Any) -> None:
        draft, name = folder / DRAFT, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._draft = draft
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._draft = None
        self.accelerator.wait_for_everyone()
        if self.state.best_model_checkpoint == str(draft / name):
            self.state.best_model_checkpoint = str(folder / name)
        if self.args.should_save:
            self.state.save_to_json(str(draft / name / TRAINER_STATE_NAME))
            if (folder / name).exists():
                with Directory(folder, "output_dir") as place:
                    place.exchange(f"{DRAFT}/{name}", name)
            else:
                (draft / name).rename(folder / name)
            self._hide_old(folder, draft)
        self.accelerator.wait_for_everyone()

    def _hide_old(self, folder: Path, draft: Path) -> None:
        """Move the checkpoints that `save_total_limit` leaves no room for into `draft`, where
        transformers would remove them. There no part of one has the name of a checkpoint."""
        limit = self.args.save_total_limit
        if limit is None or limit <= 0:
            return
        paths = sorted(
            folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), key=lambda each: each.stat().st_mtime_ns
        )
        found = [each for each in paths if (each / TRAINER_STATE_NAME).is_file()]
        kept = {found[-1], Path(self.state.best_model_checkpoint or found[-1])}
        count = len(found) - max(limit, len(kept))
        for old in [each for each in found if each not in kept][: max(count, 0)]:
            old.rename(draft / old.name)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self.args.should_save or state_dict is not None:
            super()._save(output_dir, state_dict)
        else:
            for _ in engine(self.model).weights():  # join the gathers of ranks that save
                pass

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir)
        engine(self.model).save_checkpoint(
            folder / ENGINE,
            self.optimizer.optimizer,
            self.checkpoint_extra(),
            progress=self.progress_of("saving"),
            trainable_only=hasattr(self.model, "peft_config"),
        )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)

    def checkpoint_extra(self) -> dict[str, Any]:
        """Values that a checkpoint of the engine also has, for `check_extra`."""
        return {}

    def check_extra(self, checkpoint: Path, extra: Mapping[str, Any]) -> None:
        """Check the `checkpoint_extra` of a checkpoint that was loaded."""

    def progress_of(self, doing: str) -> Told | None:
        """Receives the progress of "saving" or "loading"."""
        return None

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if not _has_engine_checkpoint(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _has_engine_checkpoint(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        folder = Path(checkpoint)
        extra = engine(self.model).load_checkpoint(
            folder / ENGINE, self.optimizer.optimizer, progress=self.progress_of("loading")
        )
        self.check_extra(folder, extra)
        scheduler = torch.load(folder / SCHEDULER_NAME, weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if _has_engine_checkpoint(best):
            engine(self.model).load_checkpoint(Path(best) / ENGINE)
        else:
            super()._load_best_model()

    # The log

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Like transformers. An entry with a training loss also gets the bytes that the last step
        moved, and the seconds that the model waited since the last entry."""
        if "loss" in logs:
            for name, value in engine(self.model).activity().items():
                waits = name.startswith("wait")
                before = self._waited.get(name, 0.0) if waits else 0.0
                logs[f"{name}_{'seconds' if waits else 'bytes'}"] = value - before
                if waits:
                    self._waited[name] = value
        super().log(logs, *args, **kwargs)

    def say(self, text: str) -> None:
        """Tell the user a fact about the run, on the first rank."""
        log.warning("%s", text)


class InfinityTrainer(InfinityTrainerMixin, Trainer):  # type: ignore[misc]
    """`transformers.Trainer` on this engine: see `InfinityTrainerMixin`."""


def _has_engine_checkpoint(checkpoint: str) -> bool:
    return (Path(checkpoint) / ENGINE).is_dir()


def counterpart_of(args: Any) -> Counterpart:
    """The counterpart of `args.optim`. Raises `ConfigError` if it has none."""
    name = str(getattr(args.optim, "value", args.optim))
    if name not in COUNTERPARTS:
        raise ConfigError(
            f"infinity has no optimizer for optim={name!r}; choose one of "
            f"{', '.join(COUNTERPARTS)}; or wrap the model first, and give "
            "optimizers=(infinity.adapt(...), None)"
        )
    return COUNTERPARTS[name]


def settings_for(kind: type[Optimizer], args: Any) -> dict[str, Any]:
    """The hyper-parameters that `kind` gets from the training arguments `args`. An optimizer with
    three betas looks into `optim_args`, too, as in transformers."""
    usual = kind.usual_settings()
    rates = (args.adam_beta1, args.adam_beta2, *usual.get("betas", ())[2:])
    found = {"lr": args.learning_rate, "betas": rates, "eps": args.adam_epsilon}
    if len(rates) == 3 and args.optim_args:
        given = dict(each.split("=") for each in args.optim_args.replace(" ", "").split(","))
        rates = tuple(float(given.get(f"beta{n}", rate)) for n, rate in enumerate(rates, start=1))
        types = {"alpha": float, "eps": float, "t_alpha": int, "t_beta3": int}
        more = {name: of(given[name]) for name, of in types.items() if name in given}
        found |= {"betas": rates, **more}
    return {name: value for name, value in found.items() if name in usual}


def optimizer_in(optimizers: Any) -> torch.optim.Optimizer | None:
    """The optimizer in a Trainer's argument `optimizers`, which is a pair with a scheduler. Raises
    `ConfigError` for other values."""
    if optimizers is None:
        return None
    if not isinstance(optimizers, (tuple, list)) or len(optimizers) != 2:
        raise ConfigError(
            f"optimizers is {in_words(optimizers)}; give (optimizer, scheduler), either of which "
            "may be None"
        )
    found = optimizers[0]
    if found is not None and (isinstance(found, type) or not hasattr(found, "param_groups")):
        raise ConfigError(
            f"the optimizer in optimizers is {in_words(found)}; give one of torch or of infinity, "
            "or the class as optimizer_cls_and_kwargs"
        )
    return found


def trains(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Whether `optimizer` has a parameter of `model`."""
    known = {id(parameter) for parameter in model.parameters()}
    return any(id(each) in known for group in optimizer.param_groups for each in group["params"])


def refuse_arguments(args: Any) -> None:
    """Raise `ConfigError` for training arguments that conflict with this engine. Sets `n_gpu` to 1
    with a warning if it is larger."""
    for name, other in (("deepspeed", "DeepSpeed"), ("fsdp", "FSDP")):
        if getattr(args, name, None):
            raise ConfigError(f"TrainingArguments({name}=...): {ONE_BACKEND.format(other=other)}")
    for name, precision in (("bf16_full_eval", "bf16"), ("fp16_full_eval", "fp16")):
        if getattr(args, name, False):
            raise ConfigError(
                f"{name}=True converts the model after training, and the engine keeps its dtype; "
                f"leave it out, or train in Config(precision={precision!r})"
            )
    if args.n_gpu > 1:
        log.warning(
            "one of %d GPUs is used: start the script with torchrun to use a rank for each",
            args.n_gpu,
        )
        args._n_gpu = 1
