"""Names the extra of this package that installs a missing library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def required(library: str, extra: str) -> Iterator[None]:
    """Wrap the import of `library`, which `zero-infinity[extra]` installs. Raises
    `ModuleNotFoundError` that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != library.partition(".")[0]:
            raise
        raise ModuleNotFoundError(
            f"{library} is not installed, and infinity.integrations needs it here: "
            f"pip install 'zero-infinity[{extra}]'",
            name=error.name,
        ) from error
