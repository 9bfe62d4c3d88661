"""Classes and functions of DeepSpeed that can be imported, and raise one sentence when they are
used. Objects whose missing attributes raise one sentence."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from infinity.deepspeed.errors import DeepSpeedConfigError, MissingNameError


class Refused(type):
    """The metaclass of refused names. They can be imported, subclassed, and used in
    `isinstance`."""

    sentence: str

    def __call__(cls, *args: Any, **options: Any) -> NoReturn:
        raise DeepSpeedConfigError(cls.sentence)

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingNameError(cls.sentence)


def refused(name: str, module: str, sentence: str) -> type:
    """A class in place of the class or function `name` of `module`. A call raises `ConfigError`
    with `sentence`. Each attribute raises an `AttributeError` with it."""
    members = {"sentence": sentence, "__doc__": f"Refused: {sentence}.", "__module__": module}
    return Refused(name, (), members)


class Lacking:
    """A base of objects in place of those of DeepSpeed. A missing attribute raises an
    `AttributeError` with `instead`, the replacement."""

    instead: ClassVar[str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise MissingNameError(f"{type(self).__name__} of infinity has no {name!r}: {self.instead}")
