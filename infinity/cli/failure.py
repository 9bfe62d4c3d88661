"""What a failure looks like to the person at the terminal: one plain sentence and an exit status."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from infinity.errors import InfinityError

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells write it: 128 + SIGINT."""


def sentence(error: BaseException) -> str:
    """`error` in one line: "PATH: reason" for an `OSError`, and the first failure where the error names one as its cause."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    else:
        text = str(error) or type(error).__name__
    if isinstance(error, InfinityError) and error.__cause__ is not None and str(error.__cause__) not in text:
        text = f"{text} (because: {sentence(error.__cause__)})"
    return " ".join(text.split())


def say(text: str) -> None:
    """Write a line to stderr, in the name of the program."""
    typer.echo(f"infinity: {text}", err=True)


@contextmanager
def plain_failures(debug: bool, say: Callable[[str], None] = say) -> Iterator[None]:
    """Turn an expected failure inside into one line, by `say`, and exit status 1; with `debug` let it pass as it is."""
    try:
        yield
    except KeyboardInterrupt as error:
        say("interrupted")
        raise typer.Exit(128 + error.args[0] if error.args else INTERRUPTED) from None
    except (InfinityError, ValueError, OSError) as error:
        if debug:
            raise
        say(sentence(error))
        raise typer.Exit(1) from None


def require_extras(*modules: str, what: str = "`infinity finetune`") -> None:
    """Raise `InfinityError` with the pip command when one of `modules` (the optional extra `finetune`) is missing for `what`."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            if (error.name or "").partition(".")[0] != module:
                raise InfinityError(f"{module} is installed but cannot be imported: {error}") from None
            raise InfinityError(f"{what} needs {module}; install it with: pip install 'zero-infinity[finetune]'") from None
