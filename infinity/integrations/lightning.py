"""Lightning: a strategy for its Trainer, and one for Fabric. The module and the loop stay the same.

    from infinity.integrations.lightning import InfinityStrategy

    trainer = Trainer(strategy=InfinityStrategy(infinity.Config(nvme="/mnt/nvme0")), ...)

    from infinity.integrations.lightning import InfinityFabricStrategy

    fabric = Fabric(strategy=InfinityFabricStrategy(infinity.Config(nvme="/mnt/nvme0")), ...)

Both start processes like the strategy "ddp", without `DistributedDataParallel`: the engine shards
parameters and exchanges gradients. On one device there is no process group.

[Note: checkpoints are directories]
A checkpoint with optimizers is a directory. All ranks write their parts of `infinity/`. `rest.ckpt`
holds everything outside the engine. `exclude_frozen_parameters=True` leaves frozen parameters out,
such as the base of adapters. A checkpoint without optimizers is an ordinary file of Lightning.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.constants import default_pg_timeout

from infinity.checkpoint.files import ENGINE
from infinity.config import Config
from infinity.engine import engine, is_wrapped
from infinity.errors import ConfigError
from infinity.integrations.lightning_callbacks import adjust, check_averaging, thaws, trainable
from infinity.integrations.required import required
from infinity.integrations.wrapping import convert, scaled, with_device, wrap_for
from infinity.optim.optimizer import Optimizer
from infinity.weights.init import init, is_building

with required("lightning", "lightning"):
    from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
    from lightning.fabric.strategies.strategy import _BackwardSyncControl
    from lightning.pytorch.strategies.ddp import DDPStrategy
    from lightning.pytorch.strategies.parallel import ParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn

REST = "rest.ckpt"


class Streaming:
    """The common part of both strategies."""

    infinity_config: Config
    root_device: Any
    num_nodes: Any
    num_processes: Any

    @property
    def is_alone(self) -> bool:
        """Whether there is only one process."""
        return bool(self.num_nodes * self.num_processes == 1)

    def wrap(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> nn.Module:
        """Wrap `model` for `optimizers`, unless it is wrapped."""
        if not is_wrapped(model):
            wrap_for(model, with_device(self.infinity_config, self.root_device), optimizers)
        return model


def without_memory() -> AbstractContextManager[None]:
    """`infinity.init()`, or nothing inside of `infinity.init()`."""
    return nullcontext() if is_building() else init()


class InfinityStrategy(Streaming, ParallelStrategy):  # type: ignore[misc]
    """For `lightning.Trainer`: wraps the LightningModule with `infinity_config`, and converts the
    optimizers of `configure_optimizers`. `configure_model` builds without memory.

    `options` are those of `lightning.pytorch.strategies.ParallelStrategy`. Optimizers other than
    Adam and AdamW need `Config(algorithm=...)`, because the module is wrapped before they are
    created. One class, because Lightning calls these methods on one strategy.
    """

    strategy_name = "infinity"
    model: Any
    optimizers: Any
    _lightning_module: Any

    # DDPStrategy is not the base: Lightning shuffles data differently for it, even on one
    # device.
    root_device = DDPStrategy.root_device
    num_nodes = DDPStrategy.num_nodes
    num_processes = DDPStrategy.num_processes
    process_group_backend = DDPStrategy.process_group_backend
    distributed_sampler_kwargs = DDPStrategy.distributed_sampler_kwargs
    set_world_ranks = DDPStrategy.set_world_ranks
    determine_ddp_device_ids = DDPStrategy.determine_ddp_device_ids
    barrier = DDPStrategy.barrier
    broadcast = DDPStrategy.broadcast
    reduce = DDPStrategy.reduce
    _start_processes = DDPStrategy._configure_launcher
    _start_group = DDPStrategy.setup_distributed
    _get_process_group_backend = DDPStrategy._get_process_group_backend

    def __init__(
        self,
        infinity_config: Config | None = None,
        exclude_frozen_parameters: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
        start_method: str = "popen",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.infinity_config = infinity_config or Config()
        self.exclude_frozen_parameters = exclude_frozen_parameters
        self._num_nodes = 1
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._start_method = start_method
        self._is_restored = False
        self._trained: list[nn.Parameter] = []  # before callbacks freeze any
        self._thaws = False
        self._adjusted = ExitStack()  # undoes changes to callbacks

    # Setting up

    @property
    def is_distributed(self) -> bool:
        """Whether processes share the data."""
        return not self.is_alone

    def _configure_launcher(self) -> None:
        if not self.is_alone:
            self._start_processes()

    def setup_environment(self) -> None:
        """Like DDP, but without a process group on one device."""
        super().setup_environment()
        if self.is_alone:
            self.set_world_ranks()
        else:
            self._start_group()

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Modules built inside take no memory, as in `infinity.init()`."""
        with self.precision_plugin.tensor_init_context(), without_memory():
            yield

    def model_sharded_context(self) -> Any:
        return without_memory()

    def connect(self, model: Any) -> None:
        """Like the base, and note the trained parameters before callbacks freeze some of them."""
        super().connect(model)
        self._trained = [each for each in model.parameters() if each.requires_grad]

    def setup(self, trainer: Any) -> None:
        """Like the base. The module is wrapped before its optimizers are created."""
        self._thaws = thaws(trainer.callbacks)
        self._adjusted = adjust(trainer.callbacks)
        if self._layer_sync and trainer.state.fn == TrainerFn.FITTING:
            self.model = self._layer_sync.apply(self.model)
        super().setup(trainer)
        check_averaging(trainer.callbacks, self.model)

    def model_to_device(self) -> None:
        """Does nothing, because the engine moves parameters to the device."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        trained, self._trained = self._trained, []
        if is_wrapped(model) or not self._thaws:
            return self.wrap(model)
        with trainable([each for each in trained if not each.requires_grad], model):
            return self.wrap(model)

    def setup_optimizers(self, trainer: Any) -> None:
        """Like the base, and convert the optimizers. Optimizers of an earlier fit are released,
        because one optimizer at a time holds the states of a parameter."""
        self.optimizers = []
        self.lr_scheduler_configs: list[Any] = []
        gc.collect()  # a save leaves reference cycles that hold them
        super().setup_optimizers(trainer)
        schedulers = [each.scheduler for each in self.lr_scheduler_configs]
        self.optimizers = [convert(each, schedulers) for each in self.optimizers]

    def teardown(self) -> None:
        """Like DDP, but leave the module on its device."""
        module, self._lightning_module = self._lightning_module, None
        self._adjusted.close()
        try:
            super().teardown()
        finally:
            self._lightning_module = module

    # Steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """One forward of the whole module, unless it uses manual optimization."""
        with self.precision_plugin.train_step_context():
            if not self.lightning_module.automatic_optimization:
                return self.lightning_module.training_step(*args, **kwargs)
            return self._inside("training_step", args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """One forward of the whole module."""
        with self.precision_plugin.val_step_context():
            return self._inside("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._inside("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._inside("predict_step", args, kwargs)

    def _inside(self, name: str, args: Any, kwargs: Any) -> Any:
        module = self.lightning_module
        return self._forward_redirection(module, module, name, *args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Like the base. For fp16 parameters, the optimizer scales the loss."""
        super().backward(scaled(closure_loss, self.optimizers), *args, **kwargs)
        return closure_loss

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """`infinity.no_sync` of the module."""
        return engine(self.model).no_sync()

    # Checkpoints. See [Note: checkpoints are directories].

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True, because the engine loads after the module is wrapped."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Empty, because the engine saves the weights."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Empty for an infinity optimizer, because the engine saves its states."""
        found = getattr(optimizer, "_optimizer", optimizer)
        return {} if isinstance(found, Optimizer) else super().optimizer_state(optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write a directory if optimizers are saved, else a file. All ranks call it."""
        if "optimizer_states" not in checkpoint:
            checkpoint["state_dict"] = self.lightning_module.state_dict()
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = Path(self.broadcast(str(filepath)))
        engine(self.model).save_checkpoint(
            path / ENGINE, self._ours, trainable_only=self.exclude_frozen_parameters
        )
        super().save_checkpoint(checkpoint, path / REST, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the part of the engine, and return the rest. All ranks call it."""
        path = Path(checkpoint_path)
        self._is_restored = (path / ENGINE).is_dir()
        if self._is_restored:
            engine(self.model).load_checkpoint(path / ENGINE, self._ours)
            path = path / REST
        return super().load_checkpoint(path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Like the base, unless the engine has loaded the weights."""
        if not self._is_restored:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Like the base, unless the engine has loaded the states."""
        if not self._is_restored:
            super().load_optimizer_state_dict(checkpoint)

    @property
    def _ours(self) -> list[Optimizer]:
        return [each for each in self.optimizers if isinstance(each, Optimizer)]


class Sync(_BackwardSyncControl):  # type: ignore[misc]
    """`fabric.no_backward_sync`."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """`infinity.no_sync(module)` if `enabled`."""
        return engine(module).no_sync() if enabled else nullcontext()


class InfinityFabricStrategy(Streaming, FabricDDPStrategy):  # type: ignore[misc]
    """For `lightning.Fabric`: `setup` wraps the model with `infinity_config`, and converts its
    optimizers. `init_module` builds without memory.

    `options` are those of `lightning.fabric.strategies.DDPStrategy`.
    """

    def __init__(
        self,
        infinity_config: Config | None = None,
        exclude_frozen_parameters: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.infinity_config = infinity_config or Config()
        self.exclude_frozen_parameters = exclude_frozen_parameters
        self._backward_sync_control = Sync()
        self._optimizers: list[torch.optim.Optimizer] = []

    # Setting up

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """Like DDP. None on one device, so that data keep their order."""
        return None if self.is_alone else super().distributed_sampler_kwargs

    def _configure_launcher(self) -> None:
        if not self.is_alone:
            super()._configure_launcher()

    def _setup_distributed(self) -> None:
        if self.is_alone:
            self._set_world_ranks()
        else:
            super()._setup_distributed()

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with self.precision.module_init_context(), without_memory():
            yield

    def module_to_device(self, module: nn.Module) -> None:
        """Does nothing, because the engine moves parameters to the device."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Wrap `module`. Its optimizer may be set up later."""
        return self.wrap(module)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Convert `optimizer`. Its model must be wrapped."""
        return self._convert(optimizer)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any = None
    ) -> Any:
        """Wrap `module` for its `optimizers`, and convert them."""
        self.wrap(module, optimizers)
        schedulers = [] if scheduler is None else [scheduler]
        made = [self._convert(optimizer, schedulers) for optimizer in optimizers]
        return module, made, scheduler

    def _convert(
        self, optimizer: torch.optim.Optimizer, schedulers: Sequence[Any] = ()
    ) -> torch.optim.Optimizer:
        made = convert(optimizer, schedulers)
        self._optimizers.append(made)
        return made

    def backward(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(scaled(tensor, self._optimizers), *args, **kwargs)

    # Checkpoints. See [Note: checkpoints are directories].

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Any = None,
    ) -> None:
        """Write a directory if optimizers are saved, else a file. All ranks call it. Raises
        `ConfigError` for `filter` with a directory."""
        model, optimizers, rest = _parted(state)
        if model is None or not optimizers:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        if filter:
            raise ConfigError("a checkpoint of the engine is whole; leave out filter=")
        path = Path(self.broadcast(str(path)))
        engine(model).save_checkpoint(
            path / ENGINE, optimizers, trainable_only=self.exclude_frozen_parameters
        )
        super().save_checkpoint(path / REST, rest, storage_options)

    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load the part of the engine, and return the rest. All ranks call it."""
        path = Path(path)
        if not (path / ENGINE).is_dir():
            return super().load_checkpoint(path, state, strict, weights_only)
        model, optimizers, rest = _parted(state if isinstance(state, dict) else {"model": state})
        if model is not None:
            engine(model).load_checkpoint(path / ENGINE, optimizers)
        left: dict[str, Any] = super().load_checkpoint(path / REST, rest, strict, weights_only)
        if isinstance(state, dict):
            state.update(rest)
        return left


def _parted(
    state: Mapping[str, Any],
) -> tuple[nn.Module | None, list[Optimizer], dict[str, Any]]:
    """The wrapped model in `state`, its optimizers, and the rest. Raises `ConfigError` for two
    wrapped models."""
    models = [each for each in state.values() if isinstance(each, nn.Module) and is_wrapped(each)]
    optimizers = [each for each in state.values() if isinstance(each, Optimizer)]
    if len(models) > 1:
        raise ConfigError("save each wrapped model in a checkpoint of its own")
    taken = {id(each) for each in (*models, *optimizers)}
    rest = {name: each for name, each in state.items() if id(each) not in taken}
    return (models[0] if models else None), optimizers, rest
