"""Shows a failure at the terminal: one plain sentence and an exit status."""

from __future__ import annotations

import importlib
import logging
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from infinity.cli.knobs import as_options
from infinity.errors import InfinityError, sentence

EXPECTED = (InfinityError, ValueError, OSError)
"""Errors of the environment and of wrong input. Any other exception is a defect."""
INTERRUPTED = 130
"""The exit status after Ctrl-C, as in shells: 128 + SIGINT."""


def say(text: str) -> None:
    """Write a line to stderr, after the name of the program."""
    typer.echo(f"infinity: {text}", err=True)


def explained(error: BaseException) -> str:
    """`error` as one sentence, in which fields of `Config` are options.

    An unexpected error is a defect, and the sentence names the file with its traceback.
    """
    if isinstance(error, KeyboardInterrupt):
        return _interruption(error)
    if isinstance(error, EXPECTED):
        return as_options(sentence(error))
    return f"unexpected {type(error).__name__}: {sentence(error)} ({_written(error)})"


def _interruption(error: KeyboardInterrupt) -> str:
    number = error.args[0] if error.args else signal.SIGINT
    return (
        "interrupted"
        if number == signal.SIGINT
        else f"interrupted by {signal.Signals(number).name}"
    )


def _written(error: BaseException) -> str:
    """Write the traceback of `error` to a file. Returns words that name the file."""
    text = "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile(
            "w",
            prefix="infinity-traceback-",
            suffix=".txt",
            delete=False,
            encoding="utf-8",
            errors="backslashreplace",
        ) as file:
            file.write(text)
    except OSError:
        return "--debug shows the traceback"
    return f"its traceback is in {file.name}, and --debug shows it"


def tell(error: BaseException) -> None:
    """Print the reason why the command ends."""
    say(explained(error))


@contextmanager
def plain_failures(debug: bool, tell: Callable[[BaseException], None] = tell) -> Iterator[None]:
    """Turn an exception inside into one line, by `tell`, and exit status 1. With `debug` the
    exception passes unchanged.

    An interruption is also passed to `tell`. It exits with 128 + its signal, as in shells.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        tell(error)
        raise typer.Exit(128 + error.args[0] if error.args else INTERRUPTED) from None
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if debug:
            raise
        tell(error)
        raise typer.Exit(1) from None


def require_extras(
    *modules: str,
    what: str = "`infinity finetune`",
    package: str = "'zero-infinity[finetune]'",
) -> None:
    """Raise `InfinityError` with the pip command if one of `modules`, which `package` brings, is
    missing for `what`."""
    # PEFT imports it, and on some CPUs it warns of a package that would make it faster.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            if (error.name or "").partition(".")[0] != module:
                raise InfinityError(
                    f"{module} is installed but cannot be imported: {error}"
                ) from None
            raise InfinityError(
                f"{what} needs {module}; install it with: pip install {package}"
            ) from None
