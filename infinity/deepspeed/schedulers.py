"""The learning rate schedules of DeepSpeed, as schedulers of torch.

[Note: steps and iterations]
A scheduler of torch counts from 0, which is the state before the first optimizer step. DeepSpeed
counts iterations, from -1 at that state. So step n of torch is iteration n - 1. Formulas from the
documentation of DeepSpeed take the iteration. Example: WarmupLR has its lowest rate for the first
two optimizer steps, because both log(1) and the value before it are zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from infinity.deepspeed.errors import DeepSpeedConfigError
from infinity.deepspeed.refused import Lacking
from infinity.deepspeed.settings import Named
from infinity.errors import in_words

Rate = float | Sequence[float]
"""One rate for all parameter groups, or one for each."""
SECOND_BETA = 0.99
"""The second beta of Adam while OneCycle moves the first one."""


def scheduler(named: Named, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """The scheduler in a configuration, one of these or one of torch, for `optimizer`.

    Raises `ConfigError` for unknown parameters.
    """
    known = SCHEDULES.get(named.type) or getattr(torch.optim.lr_scheduler, named.type)
    try:
        made: LRScheduler = known(optimizer, **named.params)
    except (TypeError, ValueError) as error:
        raise DeepSpeedConfigError(f"scheduler {named.type}: {error}") from error
    return made


class Iterations(Lacking, LRScheduler):
    """The common part of the schedules: `rates` of an iteration, counted as in DeepSpeed.

    Only the count is state, as in DeepSpeed. The rates follow from it.
    """

    instead = (
        "get_last_lr() has the rates in use, and the block scheduler of the configuration the "
        "numbers of the schedule"
    )

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1) -> None:
        rates = [group["lr"] for group in optimizer.param_groups]
        super().__init__(optimizer)
        if last_batch_iteration != -1:  # resumed: the optimizer has the rates of that iteration
            self.last_epoch = last_batch_iteration + 1
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            self._last_lr = rates

    @property
    def last_batch_iteration(self) -> int:
        """The iteration of the present rates. -1 before the first step."""
        return int(self.last_epoch) - 1

    def rates(self, iteration: int) -> list[float]:
        """The rate of each group after `iteration`."""
        raise NotImplementedError

    def get_lr(self) -> list[float | torch.Tensor]:
        """The present rates. Groups that were added later keep theirs, as in DeepSpeed."""
        rates = self.rates(self.last_batch_iteration)
        return [*rates, *(group["lr"] for group in self.optimizer.param_groups[len(rates) :])]

    def step(
        self, last_batch_iteration: int | None = None, batch_iteration: int | None = None
    ) -> None:
        """Advance by one iteration, or to the given one, under either name."""
        given = batch_iteration if last_batch_iteration is None else last_batch_iteration
        if given is not None:
            self.last_epoch = given
        super().step()

    def state_dict(self) -> dict[str, Any]:
        """Only the count."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the count of `state_dict`. The rates of the groups are those of the
        optimizer."""
        self.last_epoch = state_dict["last_batch_iteration"] + 1
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def _for_groups(optimizer: torch.optim.Optimizer, value: Rate, name: str) -> list[float]:
    """`value` for each group."""
    groups = len(optimizer.param_groups)
    values = list(value) if isinstance(value, Sequence) else [value] * groups
    if len(values) != groups:
        raise DeepSpeedConfigError(
            f"{name} has {len(values)} values, but the optimizer has {groups} parameter groups"
        )
    return values


def _between(starts: Sequence[float], ends: Sequence[float], share: float) -> list[float]:
    """`share` of the way from each start to its end."""
    return [start + (end - start) * share for start, end in zip(starts, ends, strict=True)]


class LRRangeTest(Iterations):
    """A rate that grows from `lr_range_test_min_lr`, to find the largest one that trains (Smith,
    arXiv 1803.09820).

    After i iterations it is min * (1 + step_rate * i / step_size). With a staircase the quotient is
    rounded down.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: Rate = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        _check_steps("lr_range_test_step_size", lr_range_test_step_size, 1)
        self.min_lrs = _for_groups(optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, iteration: int) -> list[float]:
        ranges = (iteration + 1) / self.step_size
        growth = 1 + self.step_rate * (math.floor(ranges) if self.staircase else ranges)
        return [rate * growth for rate in self.min_lrs]


class OneCycle(Iterations):
    """A rate that rises and falls once, while the first beta of Adam falls and rises (Smith, arXiv
    1803.09820). Both may decay afterwards.

    The rise takes `cycle_first_step_size` iterations, the fall `cycle_second_step_size` (default:
    as many). A count of stairs holds both still for a while. After the cycle the rate is min / (1 +
    decay_lr_rate * i / decay_step_size), and the beta grows likewise.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: Rate,
        cycle_max_lr: Rate,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rate = 0.8,
        cycle_max_mom: Rate = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        _check_steps("cycle_first_step_size", cycle_first_step_size, 1)
        down = cycle_second_step_size
        stairs_down = cycle_second_stair_count
        self.up = cycle_first_step_size
        self.down = self.up if down is None else down
        self.stairs_up = cycle_first_stair_count
        self.stairs_down = self.stairs_up if stairs_down is None else stairs_down
        _check_steps("cycle_second_step_size", self.down, 0)
        self.min_lrs = _for_groups(optimizer, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = _for_groups(optimizer, cycle_max_lr, "cycle_max_lr")
        self.min_moms = _for_groups(optimizer, cycle_min_mom, "cycle_min_mom")
        self.max_moms = _for_groups(optimizer, cycle_max_mom, "cycle_max_mom")
        self.decay_steps = decay_step_size
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        super().__init__(optimizer, last_batch_iteration)
        if self.cycle_momentum and last_batch_iteration == -1:
            self._set_betas(self.min_moms)  # until the first step, as in DeepSpeed

    @property
    def step_ratio(self) -> float:
        """The share of the cycle in which the rate rises."""
        return self.up / (self.up + self.down)

    def rates(self, iteration: int) -> list[float]:
        after = self._after(iteration)
        if after:
            decay = 1 + self.decay_lr_rate * self._decays(after)
            return [low / decay for low in self.min_lrs]
        return _between(self.min_lrs, self.max_lrs, self._height(iteration + 1))

    def momenta(self, iteration: int) -> list[float]:
        """The first beta of each group after `iteration`."""
        after = self._after(iteration)
        if after:
            growth = 1 + self.decay_mom_rate * self._decays(after)
            return [high * growth for high in self.max_moms]
        return _between(self.max_moms, self.min_moms, self._height(iteration + 1))

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of the cycle, of each group. None if they have no cycle. Until the first step
        groups have the least first beta, and the cycle the greatest, as in DeepSpeed."""
        if not self.cycle_momentum:
            return None
        return [(each, SECOND_BETA) for each in self.momenta(self.last_batch_iteration)]

    def step(
        self, last_batch_iteration: int | None = None, batch_iteration: int | None = None
    ) -> None:
        super().step(last_batch_iteration, batch_iteration)
        if self.cycle_momentum:
            self._set_betas(self.momenta(self.last_batch_iteration))

    def _set_betas(self, momenta: Sequence[float]) -> None:
        # Groups that were added later keep theirs.
        for group, momentum in zip(self.optimizer.param_groups, momenta, strict=False):
            group["betas"] = (momentum, SECOND_BETA)

    def _after(self, iteration: int) -> int:
        """Iterations since the end of the cycle. 0 inside of it."""
        return max(iteration + 1 - (self.up + self.down), 0)

    def _decays(self, after: int) -> float:
        return after / self.decay_steps if self.decay_steps else 0.0

    def _height(self, done: int) -> float:
        """The height in the cycle after `done` iterations: 0 at its ends, 1 at the top."""
        if done <= self.up:
            length, stairs = self.up, self.stairs_up
        else:
            length, stairs = self.down, self.stairs_down
            done = self.up + self.down - done
        return done * stairs // length / stairs if stairs else done / length


class _Warming(Iterations):
    """The common part of schedules with a warm-up."""

    warmup: Warmup

    @property
    def warmup_num_steps(self) -> int:
        """The iterations of the warm-up."""
        return self.warmup.steps

    @property
    def warmup_type(self) -> str:
        """The curve of the warm-up, `log` or `linear`."""
        return "linear" if self.warmup.is_linear else "log"


class WarmupLR(_Warming):
    """A rate that grows from `warmup_min_lr` to `warmup_max_lr` (default: that of the optimizer) in
    `warmup_num_steps` iterations, and stays there.

    The share at iteration i is log(i + 1) / log(warmup_num_steps), or i / warmup_num_steps with
    `warmup_type="linear"`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = _for_groups(optimizer, warmup_min_lr, "warmup_min_lr")
        self.max_lrs = _for_groups(optimizer, warmup_max_lr, "warmup_max_lr")
        self.warmup = Warmup(warmup_num_steps, warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, iteration: int) -> list[float]:
        return _between(self.min_lrs, self.max_lrs, self.share(iteration))

    def share(self, iteration: int) -> float:
        """The position of `iteration` between the lowest and the highest rate."""
        return self.warmup(iteration)


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, and then a straight line down to `warmup_min_lr` at `total_num_steps`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )

    def share(self, iteration: int) -> float:
        if iteration < self.warmup.steps:
            return self.warmup(iteration)
        left = self.total_num_steps - iteration
        return max(0.0, left / max(1, self.total_num_steps - self.warmup.steps))


class WarmupCosineLR(_Warming):
    """A rate that grows from `warmup_min_ratio` of the optimizer's rate to all of it, and then
    falls along a cosine to `cos_min_ratio` of it, at `total_num_steps`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        self.warmup = Warmup(warmup_num_steps, warmup_type)
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        super().__init__(optimizer, last_batch_iteration)

    @property
    def org_lrs(self) -> list[Any]:
        """The optimizer's rate of each group, before the first step."""
        return list(self.base_lrs)

    def rates(self, iteration: int) -> list[float]:
        ratio = self.ratio(iteration)
        return [float(rate) * ratio for rate in self.base_lrs]

    def get_lr_ratio(self) -> float:
        """The present share of the optimizer's rate. 0 before the first step."""
        return self.ratio(self.last_batch_iteration)

    def ratio(self, iteration: int) -> float:
        """The share of the optimizer's rate after `iteration`. 0 before the first."""
        if iteration < 0:
            return 0.0
        if iteration < self.warmup.steps:
            low = self.warmup_min_ratio
            return low + (1 - low) * self.warmup(iteration)
        done = iteration - self.warmup.steps + 1
        progress = min(1.0, done / max(1, self.total_num_steps - self.warmup.steps))
        low = self.cos_min_ratio
        return max(0.0, low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2)


class Warmup:
    """The completed share of a warm-up after an iteration, from 0 to 1."""

    def __init__(self, steps: int, kind: str) -> None:
        _check_steps("warmup_num_steps", steps, 0)
        if kind not in ("log", "linear"):
            raise DeepSpeedConfigError(f'warmup_type={in_words(kind)} must be "log" or "linear"')
        self.steps = max(2, steps)
        """At least 2, because log(1) is 0."""
        self.is_linear = kind == "linear"

    def __call__(self, iteration: int) -> float:
        if iteration >= self.steps:
            return 1.0
        done = max(iteration, 0)
        return done / self.steps if self.is_linear else math.log(done + 1) / math.log(self.steps)


def _check_steps(name: str, steps: Any, least: int) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < least:
        raise DeepSpeedConfigError(
            f"{name}={in_words(steps)} must be a whole number of at least {least}"
        )


SCHEDULES: dict[str, type[Iterations]] = {
    each.__name__: each for each in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
"""By the names in a configuration."""
