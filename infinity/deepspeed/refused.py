"""Classes and functions of DeepSpeed that import, and are refused in one sentence where they are
used; and objects with attributes that are missing in one sentence."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from infinity.deepspeed.errors import DeepSpeedConfigError, MissingNameError


class Refused(type):
    """The class of what is refused: it can be imported, derived from, and asked about instances."""

    sentence: str

    def __call__(cls, *args: Any, **options: Any) -> NoReturn:
        raise DeepSpeedConfigError(cls.sentence)

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingNameError(cls.sentence)


def refused(name: str, module: str, sentence: str) -> type:
    """A class that stands for the class or the function `name` of `module`. Calling it raises
    `ConfigError` with `sentence`; so does each of its attributes, with an error that is an
    `AttributeError`, too."""
    members = {"sentence": sentence, "__doc__": f"Refused: {sentence}.", "__module__": module}
    return Refused(name, (), members)


class Lacking:
    """A base of what stands for an object of DeepSpeed: attributes that it has not raise an
    `AttributeError` that names `instead`, what to use."""

    instead: ClassVar[str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise MissingNameError(f"{type(self).__name__} of infinity has no {name!r}: {self.instead}")
