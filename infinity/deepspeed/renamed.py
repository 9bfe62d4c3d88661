"""Old and misplaced keys of a configuration, moved to their present places in DeepSpeed."""

from __future__ import annotations

from typing import Any

from infinity.deepspeed.errors import DeepSpeedConfigError
from infinity.deepspeed.keys import RENAMED
from infinity.errors import in_words

OFFLOADS = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_params": "offload_param",
    "cpu_offload_param": "offload_param",
}
"""Switches in `zero_optimization` that became blocks with a device."""


def modernize(config: dict[str, Any]) -> list[str]:
    """Rename and move the keys of `config`. Returns a notice for each renamed key.

    Raises `ConfigError` if a key has both names.
    """
    notices = []
    for old, new in RENAMED.items():
        found = _take(config, old)
        if found is not None:
            _put(config, new, found[0])
            notices.append(f"{old} is read as {new}")
    return notices + _offloads(config)


def _offloads(config: dict[str, Any]) -> list[str]:
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict):
        return []
    notices = []
    for old, new in OFFLOADS.items():
        if old not in zero:
            continue
        wanted = zero.pop(old)
        if wanted not in (True, False, None):
            raise DeepSpeedConfigError(
                f"zero_optimization.{old} must be true or false; write {new} instead"
            )
        device = "cpu" if wanted else "none"
        if wanted and not zero.get(new):
            zero[new] = {"device": device}
        notices.append(f"zero_optimization.{old} is read as {new}.device={device!r}")
    if zero.pop("cpu_offload_use_pin_memory", None) is not None:
        notices.append("zero_optimization.cpu_offload_use_pin_memory has no effect")
    return notices


def _take(config: dict[str, Any], path: str) -> tuple[Any] | None:
    """Remove the value at `path` from `config`, and return it in a tuple. None if there is none."""
    *blocks, name = path.split(".")
    place: Any = config
    for block in blocks:
        place = place.get(block) if isinstance(place, dict) else None
    return (place.pop(name),) if isinstance(place, dict) and name in place else None


def _put(config: dict[str, Any], path: str, value: Any) -> None:
    """Put `value` at `path`, beside other keys."""
    *blocks, name = path.split(".")
    place = config
    for block in blocks:
        place = place.setdefault(block, {})
        if not isinstance(place, dict):
            raise DeepSpeedConfigError(
                f"{block} must be an object with keys, not {in_words(place)}"
            )
    there = place.get(name)
    if isinstance(there, dict) and isinstance(value, dict) and not there.keys() & value.keys():
        there.update(value)
    elif name in place:
        raise DeepSpeedConfigError(
            f"{path} is there twice, once under an old name; leave out one of them"
        )
    else:
        place[name] = value
