"""The package `deepspeed` of `infinity run`. Its modules are made from the table in
`infinity.deepspeed.names` when they are imported. Their names are looked up when they are used.

[Note: missing names]
A missing name raises `AttributeError` with a sentence. `from module import name` would replace that
sentence by its own. But first it searches for a module of that name in a package. So every module
here is a package, and the finder has a spec for every name below `deepspeed`. The import of a
missing one raises `ImportError` with the sentence.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from infinity.deepspeed.names import ALIASES, BACKED, CONSTANTS, PROGRAMS, REFUSED, sentence
from infinity.deepspeed.pretrained import load_streamed
from infinity.deepspeed.refused import refused

_PACKAGE, _MAIN = "deepspeed", ".__main__"


def _modules() -> frozenset[str]:
    """All modules, without `deepspeed.`, with their parent packages."""
    named = {*BACKED, *CONSTANTS, *REFUSED, *ALIASES}
    parents = {name[:end] for name in named for end, letter in enumerate(name) if letter == "."}
    return frozenset(named | parents) - {""}


MODULES = _modules()


def fill(module: ModuleType) -> None:
    """Make `module` the package, and find its modules from now on."""
    if not any(isinstance(finder, _Package) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Package())
    _fill(module, "")
    load_streamed()


class _Package(MetaPathFinder, Loader):
    """Finds and makes everything below `deepspeed`; see [Note: missing names]."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{_PACKAGE}."):
            return None
        program = fullname.removesuffix(_MAIN)
        if program == fullname:
            return ModuleSpec(fullname, self, origin=__file__, is_package=True)
        return ModuleSpec(fullname, self, origin=program) if _program(fullname) else None

    def get_code(self, fullname: str) -> CodeType | None:
        """The program of a module, for `python -m`."""
        return compile(f"from {_program(fullname)} import main\nmain()", __file__, "exec")

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        given = spec.name.removeprefix(f"{_PACKAGE}.")
        name = _own_name(given)
        if name not in MODULES:
            raise ImportError(sentence(name), name=spec.name)
        if name == given:
            return None
        module = importlib.import_module(f"{_PACKAGE}.{name}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec: Any = module.__spec__
        if spec.loader_state is None:
            _fill(module, spec.name.removeprefix(f"{_PACKAGE}."))
        else:  # under another name, which it does not keep
            module.__spec__ = spec.loader_state


def _program(fullname: str) -> str | None:
    """The module with the `main` of `python -m`. None for a module that is no program."""
    return PROGRAMS.get(fullname.removeprefix(f"{_PACKAGE}.").removesuffix(_MAIN))


def _own_name(name: str) -> str:
    """The name of the module, also for another name of it."""
    for other, own in ALIASES.items():
        if name == other or name.startswith(f"{other}."):
            return own + name.removeprefix(other)
    return name


def _fill(module: ModuleType, name: str) -> None:
    """Give `module` the names in the table for `name`."""
    sources = {
        theirs: (source, ours or theirs)
        for source, words in BACKED.get(name, {}).items()
        for theirs, _, ours in (word.partition("=") for word in words.split())
    }
    every = sources.pop("*", None)
    start = f"{name}." if name else ""

    def find(wanted: str) -> Any:
        path = f"{start}{wanted}"
        if wanted in sources:
            source, ours = sources[wanted]
            found = getattr(importlib.import_module(source), ours)
        elif path in MODULES:
            found = importlib.import_module(f"{_PACKAGE}.{path}")
        elif every is not None and not wanted.startswith("__"):
            found = _of_all(every[0], wanted, path)
        else:
            raise AttributeError(sentence(path), name=wanted, obj=module)
        setattr(module, wanted, found)
        return found

    def listed() -> list[str]:
        return sorted({*vars(module), *sources})

    classes = {
        each: refused(each, module.__name__, sentence(f"{start}{each}"))
        for each in REFUSED.get(name, "").split()
    }
    vars(module).update(CONSTANTS.get(name, {}), **classes)
    vars(module).update(__getattr__=find, __dir__=listed, __all__=[*sources, *classes])


def _of_all(source: str, wanted: str, path: str) -> Any:
    """A name of a module from which all names come."""
    try:
        return getattr(importlib.import_module(source), wanted)
    except AttributeError:
        raise AttributeError(sentence(path)) from None
