"""The gradients of an optimizer before a step: their norm is measured, they are clipped and
unscaled, or the step is skipped."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple

from infinity.errors import ConfigError, NonFiniteError, in_words
from infinity.optim.compared import ComparedStep, shared_settings
from infinity.optim.groups import check_value
from infinity.optim.norm import NormGroup, clip_factor, group_of, over_parts
from infinity.optim.rule import Range
from infinity.optim.scaler import LossScaler
from infinity.optim.step import UnitShare
from infinity.optim.updater import Updater

log = logging.getLogger("infinity")

CLIPS = ("global", "previous", "unit")
"""The norm that clips the gradients of a unit: of the step, of the step before, or of the unit."""


class Norms(NamedTuple):
    """The norms of the gradients of a step, unscaled; None if they are not needed."""

    norm: float | None
    """The norm of all gradients."""
    squares: list[float] | None = None
    """With `clip="unit"`, the squared norm of each share."""


class Clipping:
    """The gradient settings of one optimizer, and the norms and skipped steps so far. Used by the
    thread that runs the model; see `Optimizer` for the arguments. One class, because users change
    its settings between steps, as attributes of the optimizer."""

    def __init__(
        self,
        owner: str,
        max_grad_norm: float | None,
        skip_nonfinite: bool,
        scaler: LossScaler | None,
        error_if_nonfinite: bool,
        clip: str,
        norm_group: NormGroup,
    ) -> None:
        positive = Range(lambda norm: norm is None or norm > 0)
        check_value(owner, "max_grad_norm", max_grad_norm, positive)
        if not isinstance(scaler, (LossScaler, NoneType)):
            raise ConfigError(
                f"{owner}: loss_scaler is {in_words(scaler)}; give infinity.LossScaler(), or leave "
                "it out"
            )
        if skip_nonfinite and error_if_nonfinite:
            raise ConfigError(
                f"{owner}: a step is skipped or raises; give skip_nonfinite or error_if_nonfinite"
            )
        if clip not in CLIPS:
            raise ConfigError(f"{owner}: clip={in_words(clip)}; give one of {', '.join(CLIPS)}")
        self.max_grad_norm, self.skip_nonfinite = max_grad_norm, skip_nonfinite
        self.error_if_nonfinite, self.clip = error_if_nonfinite, clip
        self.scaler = scaler
        """Scales the loss; None if the loss is not scaled."""
        self.grad_norm: float | None = None
        self.clipped_grad_norm: float | None = None
        self.last_norm: float | None = None
        """The last finite norm of a step."""
        self.skipped_steps = 0
        self.overflow = False
        self._group = group_of(norm_group)
        self._parts_agree = self._group is None
        self._reminded = False

    @property
    def by_unit(self) -> bool:
        """Whether a unit is clipped by its own norm."""
        return self.clip == "unit"

    @property
    def loss_scale(self) -> float:
        """The factor on the next loss; 1 without a scaler."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    def foreseen(self) -> bool:
        """Whether the factors of the next step are known before it."""
        return self.by_unit or (self.clip == "previous" and self.last_norm is not None)

    @property
    def _skips(self) -> bool:
        """Whether a step with a gradient that is not finite is skipped."""
        return self.skip_nonfinite or self.scaler is not None

    def measure(
        self, updater: Updater, shares: Sequence[UnitShare], compared: ComparedStep
    ) -> Norms:
        """Make the gradients of `shares` final on all ranks, which compare the step `compared`, and
        compute their norm if it is needed."""
        if not self._parts_agree:
            updater.compare_parts(self._group, shared_settings(self))
            self._parts_agree = True
        updater.settle([share.unit for share in shares], compared)
        if self.scaler is not None:
            self._remind(shares, self.scaler)
        norm = squares = None
        if self._skips or self.error_if_nonfinite or self.max_grad_norm is not None:
            if self.by_unit:
                squares = updater.norm.each(shares)
                norm = math.sqrt(sum(squares))
            else:
                norm = updater.norm.of(shares)
            norm = over_parts(norm, self._group)
        self.grad_norm = self.clipped_grad_norm = norm
        return Norms(norm, squares)

    def factors(
        self, updater: Updater, shares: Sequence[UnitShare], norms: Norms
    ) -> dict[UnitShare, float] | None:
        """The clip factor of each share; None if the step is skipped, because a gradient is not
        finite."""
        norm, squares = norms
        if norm is not None and not math.isfinite(norm):
            if self._skips:
                self._skip(updater, shares)
                return None
            updater.norm.take_nonfinite(norm, shares, updater.next_number, self.error_if_nonfinite)
        own = [norm] * len(shares) if squares is None else map(math.sqrt, squares)
        factors = dict(zip(shares, map(self._factor, own), strict=True))
        if squares is not None:
            clipped = zip(squares, factors.values(), strict=True)
            own_norm = math.sqrt(sum(square * factor**2 for square, factor in clipped))
            self.clipped_grad_norm = over_parts(own_norm, self._group)
        elif norm is not None:
            self.clipped_grad_norm = norm * self._factor(norm)
        return factors

    def factor_ahead(self, updater: Updater, share: UnitShare) -> float | None:
        """The expected clip factor of `share` in the next step; None without a guess."""
        norm = None
        if self.by_unit and self.max_grad_norm is not None:
            square = updater.norm.ahead(share)
            if square is None or not math.isfinite(square):
                return None
            norm = math.sqrt(square)
        return self._factor(norm)

    def _factor(self, norm: float | None) -> float:
        """The clip factor for gradients of the norm `norm`. If the norm is not known (None), the
        expected factor, or 1."""
        if self.clip == "previous" and self.last_norm is not None:
            norm = self.last_norm
        limit = self.max_grad_norm
        if norm is None or limit is None or limit == math.inf:
            return 1.0
        return clip_factor(norm, limit)

    def taken(self, norm: float | None) -> None:
        """A step whose gradients had the norm `norm` has been posted."""
        if norm is not None and math.isfinite(norm):
            self.last_norm = norm
            if self.scaler is not None:
                self.scaler.update(finite=True)

    def _skip(self, updater: Updater, shares: Sequence[UnitShare]) -> None:
        """Skip a step, because a gradient is not finite."""
        name, number = updater.norm.first_nonfinite(shares), updater.next_number
        updater.skip(shares)
        self.skipped_steps += 1
        if self.scaler is None:
            log.warning("step %d is skipped: the gradient of %s is not finite", number, name)
            return
        before = self.scaler.scale
        if not self.scaler.update(finite=False):
            raise NonFiniteError(
                f"the gradient of {name} is not finite at the smallest loss scale, {before:g} "
                f"(skipped step {number}); the model or its data overflow fp16: lower the "
                "learning rate, or train in bf16",
                name,
            )
        log.info(
            "step %d is skipped: the gradient of %s is not finite at loss scale %g; now %g",
            number,
            name,
            before,
            self.scaler.scale,
        )

    def _remind(self, shares: Sequence[UnitShare], scaler: LossScaler) -> None:
        unscaled = any(
            share.present() and share.unit.gradients.loss_scale == 1.0 for share in shares
        )
        if unscaled and scaler.scale != 1.0 and not self._reminded:
            self._reminded = True
            log.warning(
                "the loss was not scaled, so fp16 gradients below 6e-8 are lost: call "
                "optimizer.scale(loss).backward(), or ask for no scaling with "
                "loss_scaler=infinity.LossScaler(1.0, window=None)"
            )

    # Saving

    def header(self) -> dict[str, Any]:
        """The values to save: `skipped_steps`, `last_norm` (for `clip="previous"`), and with a
        scaler `loss_scaler`."""
        found = {"skipped_steps": self.skipped_steps, "last_norm": self.last_norm}
        return found if self.scaler is None else found | {"loss_scaler": self.scaler.state_dict()}

    def take(self, header: Mapping[str, Any]) -> None:
        """Load a `header`."""
        if self.scaler is not None and "loss_scaler" in header:
            self.scaler.load_state_dict(header["loss_scaler"])
        self.skipped_steps = header.get("skipped_steps", self.skipped_steps)
        self.last_norm = header.get("last_norm")
