"""The engines of this process: closing those whose models are out of reach.

[Note: a notebook]
A cell that wraps a model is run again. The model of the first run may be garbage that Python has
not collected, because an exception and its frames are a cycle. Such an engine is closed before the
second `wrap` locks the directory. Or the notebook keeps the exception, and with it the model. Such
an engine could be in use, so only the user closes it: `close_engines` needs no model.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from infinity.closing import await_closings
from infinity.config import Config
from infinity.engine import Engine
from infinity.errors import ConfigError, PathInUseError, in_words


def close_engines(directory: str | os.PathLike[str] | None = None) -> int:
    """Close the engines of this process that use the NVMe directory `directory`, or all engines of
    this process; returns how many. It needs no model, so it helps if an exception or the history of
    a notebook keeps a wrapped model. Save needed weights first.

    Raises `ConfigError` for a value that is no path, and `RuntimeError` inside of a forward or
    backward of one of their models, on any thread. Then no engine is closed.
    """
    if directory is not None and not isinstance(directory, (str, os.PathLike)):
        raise ConfigError(f"infinity.close_engines takes a path, not {in_words(directory)}")
    found = _open_engines([] if directory is None else [Path(directory)], directory is None)
    for engine in found:
        engine.refuse_inside("infinity.close_engines")
    with ExitStack() as stack:
        for engine in found:
            stack.callback(engine.close)
    return len(found)


@contextmanager
def beside_own_engines(config: Config | None) -> Iterator[None]:
    """The context of a `wrap` with `config`. Engines in its directories that only garbage keeps are
    closed first. A refusal names the other engines there."""
    # Other values than a Config are refused inside.
    nvme = config.nvme if isinstance(config, Config) else ()
    directories = [Path(each) for each in nvme]
    if _open_engines(directories):
        gc.collect()
        await_closings()
    try:
        yield
    except PathInUseError as error:
        left = _open_engines(directories)
        if not left:
            raise
        shared = next(each for each in directories if _open_engines([each]))
        raise PathInUseError(
            f"nvme directory {shared} is in use by process {os.getpid()}; that is this process, "
            "where the engine of a wrapped model was not closed: call "
            "infinity.engine(model).close(), or infinity.close_engines(directory) if a kept "
            "exception or a notebook has the model; or give each model its own directory"
        ) from error


def _open_engines(directories: list[Path], every: bool = False) -> list[Engine]:
    """The open engines in one of `directories`, or `every` one."""
    wanted = {path.resolve() for path in directories}
    return [
        engine
        for engine in list(Engine.open)
        if engine.is_open
        and (every or wanted & {Path(each).resolve() for each in engine.config.nvme})
    ]
