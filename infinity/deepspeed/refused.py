"""Classes and functions of DeepSpeed that import, and are refused in one sentence where they are
used."""

from __future__ import annotations

from typing import Any, NoReturn

from infinity.deepspeed.errors import DeepSpeedConfigError, MissingNameError


class _Refused(type):
    """The class of what is refused: it can be imported, derived from, and asked about instances."""

    sentence: str

    def __call__(cls, *args: Any, **options: Any) -> NoReturn:
        raise DeepSpeedConfigError(cls.sentence)

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingNameError(cls.sentence)


def refused(name: str, sentence: str) -> type:
    """A class that stands for the class or the function `name`. Calling it raises `ConfigError`
    with `sentence`; so does each of its attributes, with an error that is an `AttributeError`,
    too."""
    return _Refused(name, (), {"sentence": sentence, "__doc__": f"Refused: {sentence}."})
