"""Every key of one configuration, with its treatment."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from infinity.deepspeed.keys import (
    CLIP,
    FREE,
    KEYS,
    OPTIMIZERS,
    REFUSED_OPTIMIZERS,
    RENAMED,
    SCHEDULERS,
    FreeBlock,
    Key,
    Treatment,
    params_of,
)
from infinity.errors import in_words

AUTO = "auto"
AUTO_LEFT = 'a Trainer or accelerate replaces "auto"; write a value'
_OF_TORCH = {"optimizer": torch.optim, "scheduler": torch.optim.lr_scheduler}
"""By block: the module of torch with its classes."""
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class KeyRow:
    """One key of a configuration."""

    path: str
    value: Any
    """The effective value, with its type."""
    treatment: Treatment
    becomes: str = ""
    reason: str = ""
    is_auto: bool = False
    """Whether it is "auto" with an unknown meaning."""
    is_unknown: bool = False
    is_off: bool = False
    """Whether it has no effect because of another key."""

    @property
    def problem(self) -> str:
        """The reason why the configuration is refused for this key, or ""."""
        if self.is_auto or self.treatment is not Treatment.REFUSED:
            return ""
        return f"{self.path}={_shown(self.value)}: {self.reason}"


def account(config: Mapping[str, Any], hidden_size: int | None) -> list[KeyRow]:
    """A row for every key of `config`, in its order. Names must be those of the table, after
    `modernize`."""
    rows = list(_block("", config, config, hidden_size))
    if all(row.path != "infinity.strict_config" or row.value for row in rows):
        return rows
    return [replace(row, treatment=Treatment.IGNORED) if row.is_unknown else row for row in rows]


def _block(
    path: str, block: Mapping[str, Any], config: Mapping[str, Any], hidden: int | None
) -> Iterator[KeyRow]:
    for name, value in block.items():
        here = f"{path}.{name}" if path else name
        if here in FREE:
            yield from _free(FREE[here], here, value)
        elif here in ("optimizer.params", "scheduler.params"):
            yield from _params(path, value, config, hidden)
        elif here.endswith(".type") and here in KEYS and value not in (None, AUTO):
            yield _type(here, value)
        elif isinstance(value, Mapping) and here in BLOCKS:
            yield from _block(here, value, config, hidden)
        elif here in KEYS:
            yield _row(KEYS[here], value, hidden, _without_effect(KEYS[here], config))
        elif here in BLOCKS:
            yield _empty_block(here, value)
        else:
            yield _unknown(here, value, [*KEYS, *FREE, *BLOCKS, *RENAMED])


BLOCKS = {path[:end] for path in KEYS for end, letter in enumerate(path) if letter == "."} | {
    f"{block}.params" for block in ("optimizer", "scheduler")
}


def _empty_block(path: str, value: Any) -> KeyRow:
    if value is None:
        return KeyRow(path, None, Treatment.EXACT, "nothing to do")
    reason = f"it must be an object with keys, not {in_words(value)}"
    return KeyRow(path, value, Treatment.REFUSED, reason=reason)


def _without_effect(key: Key, config: Mapping[str, Any]) -> str:
    """The reason why `key` has no effect in `config`, or ""."""
    if key.needs is None:
        return ""
    path, wanted = key.needs
    value: Any = config
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if value == AUTO:
        return ""
    try:
        value = KEYS[path].kind.parse(value)
    except ValueError:
        value = KEYS[path].default
    return "" if value == wanted else f"off: {path} is {_shown(value)}"


def _row(key: Key, value: Any, hidden: int | None, off: str = "") -> KeyRow:
    if value == AUTO and key.kind.words != "anything":
        return _auto(key, hidden)
    if value is None:
        return KeyRow(key.path, key.default, Treatment.EXACT, "the default")
    try:
        value = key.kind.parse(value)
    except ValueError:
        reason = f"it must be {key.kind.words}"
        return KeyRow(key.path, value, Treatment.REFUSED, reason=reason)
    if off:
        return KeyRow(key.path, value, Treatment.EXACT, off, is_off=True)
    if key.treatment in (Treatment.IGNORED, Treatment.REFUSED) and not key.asks(value):
        return KeyRow(key.path, value, Treatment.EXACT, "as the engine does anyway")
    becomes = key.becomes.format(value=value, home="gpu" if value == "none" else value)
    return KeyRow(key.path, value, key.treatment, becomes, key.reason)


def _auto(key: Key, hidden: int | None) -> KeyRow:
    """The meaning of "auto": by a rule, by the other batch sizes, or none."""
    if key.treatment is Treatment.IGNORED:
        value = AUTO if key.auto is None or hidden is None else int(key.auto(hidden))
        return KeyRow(key.path, value, Treatment.EXACT, key.reason)
    if key.path in BATCH:
        return KeyRow(key.path, AUTO, Treatment.EXACT, "what the other two say")
    return KeyRow(key.path, AUTO, Treatment.REFUSED, reason=AUTO_LEFT, is_auto=True)


def _free(block: FreeBlock, path: str, value: Any) -> Iterator[KeyRow]:
    counts = _is_on(value, block.switches) if block.switches else bool(value)
    counts |= block.empty_counts and value == {}
    treatment = block.treatment if counts else Treatment.EXACT
    becomes = "" if counts else "off"
    if not isinstance(value, Mapping) or not value:
        yield KeyRow(path, value, treatment, becomes, block.reason if counts else "")
        return
    for name, inner in value.items():
        yield KeyRow(f"{path}.{name}", inner, treatment, becomes, block.reason if counts else "")


def _is_on(value: Any, switches: Collection[str]) -> bool:
    """Whether one of `switches` is true or above 1, at any depth."""
    if not isinstance(value, Mapping):
        return value is True
    return any(
        _is_on(inner, switches)
        if isinstance(inner, Mapping)
        else name in switches and (inner is True or (isinstance(inner, int) and inner > 1))
        for name, inner in value.items()
    )


def _params(
    block: str, params: Any, config: Mapping[str, Any], hidden: int | None
) -> Iterator[KeyRow]:
    """The keys of `optimizer.params` or `scheduler.params`."""
    path, kind = f"{block}.params", config[block].get("type")
    if not isinstance(params, Mapping):
        yield _empty_block(path, params)
        return
    keys = params_of(block, kind) if isinstance(kind, str) else None
    known = {key.path: key for key in keys or ()}
    of_torch = _taken(block, kind) if keys is None else ()
    for name, value in params.items():
        here = f"{path}.{name}"
        if here == CLIP.path:
            yield _row(CLIP, value, hidden)
        elif here in known:
            yield _row(known[here], value, hidden)
        elif keys is not None:
            yield _unknown(here, value, list(known), ", ".join(k.rpartition(".")[2] for k in known))
        elif value == AUTO:
            yield KeyRow(here, AUTO, Treatment.REFUSED, reason=AUTO_LEFT, is_auto=True)
        elif of_torch and name not in of_torch:
            near = [f"{path}.{each}" for each in of_torch]
            yield _unknown(here, value, near, ", ".join(of_torch))
        else:
            yield KeyRow(here, value, Treatment.EXACT, f"{kind}({name}={_shown(value)})")


def _taken(block: str, kind: object) -> list[str]:
    """The arguments of the constructor of an optimizer or a scheduler of torch, besides the first.
    Empty if torch has none of that name."""
    found = getattr(_OF_TORCH[block], str(kind), None)
    return list(inspect.signature(found).parameters)[1:] if isinstance(found, type) else []


def _unknown(path: str, value: Any, known: list[str], others: str = "") -> KeyRow:
    """A key that is not in the table, with the nearest known key, or with `others`."""
    block, _, leaf = path.rpartition(".")
    near = [
        name
        for name in difflib.get_close_matches(path, known, n=1, cutoff=0.75)
        if block != name.rpartition(".")[0]
        or difflib.SequenceMatcher(None, leaf, name.rpartition(".")[2]).ratio() >= 0.6
    ]  # a common block makes no names alike
    if not near:  # a known key of another block
        leaves = {name.rpartition(".")[2]: name for name in known}
        near = [leaves[name] for name in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.8)]
    meant = RENAMED.get(near[0], near[0]) if near else ""
    hint = f"; did you mean {meant}?" if meant else others and f"; known are {others}"
    return KeyRow(path, value, Treatment.REFUSED, reason=f"unknown key{hint}", is_unknown=True)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _type(path: str, value: Any) -> KeyRow:
    """The row of `optimizer.type` or `scheduler.type`."""
    is_optimizer = path == "optimizer.type"
    known: Mapping[str, Any] = OPTIMIZERS if is_optimizer else SCHEDULERS
    others: ModuleType = _OF_TORCH[path.partition(".")[0]]
    name = value.lower() if is_optimizer and isinstance(value, str) else value
    if is_optimizer and name in REFUSED_OPTIMIZERS:
        return KeyRow(
            path, value, Treatment.REFUSED, reason=f"{REFUSED_OPTIMIZERS[name]}; use AdamW"
        )
    if name in known:
        becomes = OPTIMIZERS[name].becomes if is_optimizer else f"{value}, as a scheduler of torch"
        return KeyRow(path, value, Treatment.EXACT, becomes)
    base = torch.optim.Optimizer if is_optimizer else torch.optim.lr_scheduler.LRScheduler
    kind = getattr(others, str(value), None)
    if isinstance(kind, type) and issubclass(kind, base) and kind is not base:
        return KeyRow(path, value, Treatment.MAPPED, f"{others.__name__}.{value}")
    names = ", ".join(known)
    reason = f"there is none of that name; known are {names}, and those of {others.__name__}"
    return KeyRow(path, value, Treatment.REFUSED, reason=reason)
