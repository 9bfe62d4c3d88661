"""Checks that all ranks have the same model, settings, units, places and optimizers.

A rank describes these as `Facts`. Their order counts. The ranks exchange digests of their facts,
and the facts themselves only if digests differ. They use torch.distributed's store: a collective
needs tensors of one size, but ranks that differ may have facts of different sizes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from infinity.config import Config
from infinity.errors import ConfigError
from infinity.sharding.ranks import Ranks
from infinity.sharding.watch import told

_LISTED = 8  # ranks that an error names one by one


class Fact(NamedTuple):
    """A name, such as that of a setting or of a parameter, and its value as text."""

    name: str
    value: str


Facts = Sequence[Fact]
"""The facts of one rank. Their order counts."""

MAY_DIFFER: Mapping[str, str] = {
    "nvme": "a directory is one of the rank's own node",
    "gpu_memory": "the ranks agree on the least budget",
    "cpu_memory": "the ranks agree on the least budget",
    "tuning": "its fields are compared one by one",
    "nvme_memory": "a budget of the drives of the rank's own node",
    "nvme_shares": "how a rank divides its own states among its own drives",
    "cache": "which bytes of a rank's own shards its host memory keeps",
    "activation_memory": "the ranks agree on the least room",
    "collective_timeout": "how long a rank waits changes no number and no order",
    "verify": "a checksum of what a rank's own drives hold is checked, or is not",
    "poison": "a search for faults on one rank",
    "device": "the kind of the device is compared, which 'auto' does not say",
    "io_engine": "how a rank reads and writes its own drives",
    "gpu_direct": "how a rank reads its own drives",
    "read_in_place": "units are compared, which differ where that changes any",
    "instruction_set": "all kernels of the CPU have the same bits",
    "threads": "any number of threads has the same bits",
}
"""The fields of `Config` and `Tuning` that ranks may set differently, each with the reason. All
others are compared, new ones too."""


def settings_of(config: Config) -> list[Fact]:
    """The fields of `config` and its tuning that decide numbers, or collectives and their order."""
    return [
        Fact(name, repr(getattr(knobs, name)))
        for knobs in (config, config.tuning)
        for name in type(knobs).model_fields
        if name not in MAY_DIFFER
    ]


def digest_of(facts: Facts) -> str:
    """A digest of `facts`: the first 32 hexadecimal digits of a SHA-256."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def check_alike(ranks: Ranks, timeout: float, facts: Facts, way_out: str) -> None:
    """Raise the same `ConfigError` on all `ranks` unless all of them have the same `facts`.

    The error names the first fact that differs, its values and their ranks. It ends with `way_out`.
    All ranks call this equally often. A rank waits `timeout` seconds for the other ranks, then
    raises `InfinityError`. Joins no collective.
    """
    if not ranks.groups():
        return
    digests = told(ranks, timeout, digest_of(facts))
    if len(set(digests.values())) < 2:
        return
    found = told(ranks, timeout, list(facts))
    by_rank = {rank: [Fact(*fact) for fact in found[rank]] for rank in sorted(found)}
    raise ConfigError(f"the ranks differ: {difference(by_rank)}; {way_out}")


def difference(found: Mapping[int, Facts]) -> str:
    """The first fact that differs between ranks, as text. `found` has the facts by rank."""
    first = found[min(found)]
    other = next(facts for facts in found.values() if list(facts) != list(first))
    at = next(
        (number for number, pair in enumerate(zip(first, other, strict=False)) if len({*pair}) > 1),
        min(len(first), len(other)),
    )
    here, there = (facts[at] if at < len(facts) else None for facts in (first, other))
    if here is not None and there is not None and here.name == there.name:
        name = here.name
        values = {rank: _value_of(facts, name) for rank, facts in found.items()}
    else:
        names = [{fact.name for fact in facts} for facts in (first, other)]
        missing = next(
            (
                fact.name
                for fact, others in ((here, names[1]), (there, names[0]))
                if fact is not None and fact.name not in others
            ),
            None,
        )
        if missing is not None:
            name = missing
            values = {rank: _value_of(facts, name) for rank, facts in found.items()}
        else:
            name = "the next in order"
            values = {
                rank: facts[at].name if at < len(facts) else "missing"
                for rank, facts in found.items()
            }
    by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(value, []).append(rank)
    return f"{name} is {' and '.join(f'{value} on {_named(r)}' for value, r in by_value.items())}"


def _value_of(facts: Facts, name: str) -> str:
    return next((fact.value for fact in facts if fact.name == name), "missing")


def _named(ranks: Sequence[int]) -> str:
    """These ranks as text."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:_LISTED]]
    if len(ranks) > _LISTED:
        shown.append(f"{len(ranks) - _LISTED} more")
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def facts_of(pairs: Iterable[tuple[str, object]]) -> list[Fact]:
    """Facts of names and values. A string is its own value; any other object becomes its `repr`."""
    return [Fact(name, value if isinstance(value, str) else repr(value)) for name, value in pairs]
