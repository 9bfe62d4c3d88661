"""accelerate: an `Accelerator` that wraps the model and converts its optimizer, on any number of
ranks.

    from infinity.integrations.accelerate import Accelerator

    accelerator = Accelerator(infinity_config=infinity.Config(nvme="/mnt/nvme0"))

The rest of the script stays the same. On one rank, a plain `Accelerator` also works for a wrapped
model. On several ranks it would put the model into `DistributedDataParallel`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from infinity.config import Config
from infinity.engine import is_wrapped
from infinity.errors import ConfigError
from infinity.integrations.required import required
from infinity.integrations.wrapping import convert, scaled, with_device, wrap_for
from infinity.optim.optimizer import Optimizer

with required("accelerate", "trainer"):
    import accelerate
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType

begin_backward: ContextVar[Callable[[torch.Tensor], object]] = ContextVar(
    "begin_backward", default=lambda loss: None
)
"""Called with each loss right before its backward. Every micro-batch of `infinity.accumulate` has a
context of its own."""

ONE_BACKEND = (
    "{other} and infinity both decide where the model's states live; leave out {other}, or train "
    "without infinity.integrations"
)
"""The error for a second engine beside this one."""


def is_new_optimizer(value: Any) -> bool:
    """Whether `value` is an optimizer that accelerate has not prepared."""
    return isinstance(value, torch.optim.Optimizer) and not isinstance(value, AcceleratedOptimizer)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """An `accelerate.Accelerator` with a `prepare` that wraps the model with `infinity_config`, and
    converts its optimizer to the infinity optimizer that computes the same numbers.

    Wrapped models and infinity optimizers stay as they are. Raises `ConfigError` if DeepSpeed, FSDP
    or Megatron-LM is enabled.
    """

    def __init__(self, *args: Any, infinity_config: Config | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.infinity_config = infinity_config
        refuse_other_engines(self)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Like accelerate's `prepare`. Pass the model together with its optimizers and
        schedulers."""
        return super().prepare(*self._wrapped(args), device_placement=device_placement)

    def _wrapped(self, things: Sequence[Any]) -> list[Any]:
        """Wrap the models in `things`, convert the optimizers, and redirect the schedulers that
        drive them."""
        optimizers = [each for each in things if is_new_optimizer(each)]
        for model in things:
            if isinstance(model, nn.Module) and not is_wrapped(model) and self.infinity_config:
                wrap_for(model, with_device(self.infinity_config, self.device), optimizers)
        schedulers = [each for each in things if isinstance(each, LRScheduler)]
        ours = {id(optimizer): convert(optimizer, schedulers) for optimizer in optimizers}
        return [ours.get(id(each), each) for each in things]

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Like accelerate's `prepare_model`, but never put a wrapped model into
        DistributedDataParallel. Its engine exchanges gradients."""
        exchanges = is_wrapped(model)
        return super().prepare_model(model, device_placement, evaluation_mode or exchanges)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Like accelerate's `prepare_optimizer`, but never move the states of an infinity
        optimizer."""
        placed = isinstance(optimizer, Optimizer)
        return super().prepare_optimizer(optimizer, False if placed else device_placement)

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Like accelerate's `backward`. For fp16 parameters, the optimizer scales the loss."""
        ours = [each.optimizer for each in self._optimizers]
        begin_backward.get()(loss)
        super().backward(scaled(loss, ours), **kwargs)


def adopt(accelerator: Any) -> None:
    """Turn the `accelerate.Accelerator` of a trainer into an `Accelerator` in place."""
    refuse_other_engines(accelerator)
    accelerator.__class__ = Accelerator
    accelerator.infinity_config = None


def refuse_other_engines(accelerator: Any) -> None:
    """Raise `ConfigError` if `accelerator` shards the model with another engine."""
    others = {
        DistributedType.DEEPSPEED: "DeepSpeed",
        DistributedType.FSDP: "FSDP",
        DistributedType.MEGATRON_LM: "Megatron-LM",
    }
    if accelerator.distributed_type in others:
        raise ConfigError(ONE_BACKEND.format(other=others[accelerator.distributed_type]))
