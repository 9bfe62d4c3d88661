"""The dynamic loss scale of a DeepSpeed configuration, step by step as in DeepSpeed."""

from __future__ import annotations

from infinity.optim.scaler import FACTOR, LossScaler

HIGHEST = 2.0**32
"""The largest default power of the first scale in DeepSpeed."""


class DeepSpeedScaler(LossScaler):
    """A dynamic `LossScaler` that counts like DeepSpeed.

    After the start and after each step that was not finite, the scale doubles with finite step
    number `window + 1`, then with every `window` further ones. With `consecutive`, each finite step
    restores the hysteresis, and not only a step that doubles the scale.
    """

    def __init__(
        self, initial: float, window: int, hysteresis: int, minimum: float, consecutive: bool
    ) -> None:
        super().__init__(initial, window, hysteresis, minimum)
        self._window, self.consecutive = window, consecutive
        self.ends_at_minimum = True
        """Whether a step that is not finite at the smallest scale raises. Otherwise it is left out,
        and the scale stays."""

    def update(self, finite: bool) -> bool:
        """See `LossScaler.update`."""
        if not finite:
            return super().update(finite) or not self.ends_at_minimum
        self._finite += 1
        doubles = self._finite > self._window
        if doubles:
            self._finite = 1
            self.scale = max(min(self.scale * FACTOR, HIGHEST), self.scale)
        if doubles or self.consecutive:
            self._patience = self.hysteresis
        return True
