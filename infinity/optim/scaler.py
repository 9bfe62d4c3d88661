"""Dynamic loss scaling. fp16 gradients below 6e-8 vanish, and above 65504 they overflow. The scaled
loss keeps them between."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from infinity.backward import BackwardPass, current_pass
from infinity.errors import ConfigError, in_words

FACTOR = 2.0
HIGHEST = 2.0**24  # else gradients of zeros would raise the scale for ever


class LossScaler:
    """The factor on the loss before its backward. It is a power of two, so that unscaling is exact.

    It starts at `initial` and doubles after `window` steps in a row with finite gradients (None:
    never). A step with a gradient that is not finite is skipped. The first `hysteresis - 1` such
    steps keep the scale, and each further one halves it, until a window has passed. At `minimum` it
    cannot be halved, and the step raises `NonFiniteError`.

    With `window=None` and `minimum=None` the scale is static. It never changes, even if a
    checkpoint with another scale is loaded. A step that is not finite is skipped. Then `initial`
    may be any positive number. Unless it is a power of two, a gradient is rounded once when it is
    scaled, and once more when it is unscaled.

    Raises `ConfigError` for values out of range. Used by the thread that trains.
    """

    def __init__(
        self,
        initial: float = 2.0**16,
        window: int | None = 2000,
        hysteresis: int = 2,
        minimum: float | None = 1.0,
    ) -> None:
        given = {"initial": initial, "window": window, "hysteresis": hysteresis, "minimum": minimum}
        for name, found in given.items():
            may_lack = name in ("window", "minimum")
            if not isinstance(found, (int, float)) and not (found is None and may_lack):
                raise ConfigError(f"LossScaler: {name} is {in_words(found)}, not a number")
        least = math.inf if minimum is None else minimum
        self.is_static = window is None and minimum is None
        """Whether the scale never changes."""
        for name, value, good, allowed in (
            (
                "minimum",
                minimum,
                self.is_static or _is_power_of_two(least),
                "a power of two" + ", unless window is None, too" * (minimum is None),
            ),
            (
                "initial",
                initial,
                0 < initial < math.inf
                if self.is_static
                else _is_power_of_two(initial) and initial >= least,
                "a positive number" if self.is_static else "a power of two, and minimum or more",
            ),
            (
                "window",
                window,
                window is None or window >= 1,
                "1 or more, or None for a scale that never grows",
            ),
            ("hysteresis", hysteresis, hysteresis >= 1, "1 or more"),
        ):
            if not good:
                raise ConfigError(f"LossScaler: {name}={value} must be {allowed}")
        self.window, self.hysteresis, self.minimum = window, hysteresis, minimum
        self.scale = float(initial)
        """The factor on the next loss."""
        self.skipped = 0
        """The number of steps with gradients that were not finite."""
        self._finite = 0  # steps in a row
        self._patience = hysteresis

    def update(self, finite: bool) -> bool:
        """A step with `finite` or other gradients has ended. Returns False if the scale would leave
        its range."""
        if finite:
            self._finite += 1
            if self._finite == self.window:
                self._finite, self._patience = 0, self.hysteresis
                self.scale = max(min(self.scale * FACTOR, HIGHEST), self.scale)
            return True
        self.skipped += 1
        self._finite, self._patience = 0, max(self._patience - 1, 0)
        if self._patience > 0 or self.minimum is None:
            return True
        if self.scale / FACTOR < self.minimum:
            return False
        self.scale /= FACTOR
        return True

    def state_dict(self) -> dict[str, Any]:
        """Scale and counts, without the settings."""
        return {
            "scale": self.scale,
            "skipped": self.skipped,
            "finite": self._finite,
            "patience": self._patience,
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise `ConfigError` for a state that is not of `state_dict`."""
        counts = (
            [state.get(name) for name in ("skipped", "finite", "patience")]
            if isinstance(state, Mapping)
            else [None]
        )
        good = all(isinstance(count, int) and count >= 0 for count in counts)
        scale = state.get("scale") if good else None
        if not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
            raise ConfigError(f"LossScaler: {state!r} is not what state_dict() of one gives")
        if not self.is_static and not _is_power_of_two(scale):
            raise ConfigError(
                f"LossScaler: the state is that of a static scale, {scale:g}, and a scale that "
                "changes has powers of two; load it with the static scale that it was saved with"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the scale and counts of `state_dict`; a static scale stays. Raises
        `ConfigError` before anything is changed."""
        self.check(state)
        self.skipped = state["skipped"]
        if not self.is_static:
            self.scale = float(state["scale"])
            self._finite, self._patience = state["finite"], state["patience"]


def _is_power_of_two(value: float) -> bool:
    return 0 < value < math.inf and math.frexp(value)[0] == 0.5


Noted = list[tuple[BackwardPass, float]]
"""Backward passes with scaled losses, the innermost last, and their scales."""


class Scales:
    """The factors on the losses of the backward passes under way in one engine.

    A scale belongs to its pass and ends with it, also after an exception. A pass inside of another
    pass, as in re-entrant checkpointing, gets scaled gradients, and so inherits the scale.
    """

    def __init__(self) -> None:
        self._noted: Noted = []

    @property
    def current(self) -> float:
        """The scale of the current pass; 1 outside of all passes."""
        self._drop_ended()
        return self._noted[-1][1] if self._noted else 1.0

    @property
    def noted(self) -> bool:
        """Whether the loss of the current pass was scaled, even by 1."""
        self._drop_ended()
        return bool(self._noted)

    def note(self, scale: float) -> None:
        """The current pass is of a loss times `scale`."""
        self._drop_ended()
        if self._noted and self._noted[-1][0].number == current_pass():
            self._noted.pop()
        self._noted.append((BackwardPass(), scale))

    def exchange(self, noted: Noted) -> Noted:
        """Switch to the passes of another thread, of several that run in turns. Returns the passes
        of this one."""
        left, self._noted = self._noted, noted
        return left

    def _drop_ended(self) -> None:
        while self._noted and not self._noted[-1][0].alive:
            self._noted.pop()


def scaled_loss(loss: torch.Tensor, scale: float, scales: Scales) -> torch.Tensor:
    """loss * scale, whose backward notes in `scales` that all gradients of its pass are scaled."""
    return _ScaledLoss.apply(loss, scale, scales)  # type: ignore[no-untyped-call]


class _ScaledLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, scale: float, scales: Scales) -> torch.Tensor:
        ctx.scale, ctx.scales = scale, scales
        return loss * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.scales.note(ctx.scale)
        return gradient * ctx.scale, None, None
