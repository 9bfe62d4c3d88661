"""The display of a run: what shows its progress. `infinity.cli.progress` has one for terminals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infinity.cli.history import History

if TYPE_CHECKING:
    from infinity.engine import Engine


class Display:
    """Receives the progress of a run. The thread that trains calls it. Ranks but the first show
    nothing."""

    def phase(self, text: str) -> None:
        """The part `text` of the run begins."""

    def attach(self, engine: Engine, steps: int) -> None:
        """The engine was created, for a run of `steps` steps."""

    def stepped(self, history: History) -> None:
        """A step has ended. Its record is the last of `history`."""

    def validated(self, history: History) -> None:
        """A validation has ended. Its record is the last of `history`."""

    def moved(self, doing: str, done: int, total: int) -> None:
        """A checkpoint is in progress. `doing` is "saving" or "loading", `done` and `total` are
        bytes."""

    def note(self, text: str) -> None:
        """Show a line."""
