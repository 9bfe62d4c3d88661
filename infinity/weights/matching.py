"""Which stored tensors become which parameters.

[Note: names]
Files of transformers have the names and layouts of the day they were made. `transformers` renames
and converts them as it loads (`WeightRenaming`, `WeightConverter`): the experts of Mixtral lie in
files of one matrix each, and in one tensor in the model. We ask for these rules and apply them to
names first. A conversion then runs on the meta device, to see which parameters come of it and with
which shapes; and on values only when one of them is wanted. It takes the memory of the tensors of
one conversion, twice.

PEFT puts a model into `base_model.model`, its linear layers into `base_layer`, and copies of heads
into `modules_to_save`. Files of the plain model know none of these, so they are left out of names.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError, sentence
from infinity.tiers.originals import StoredBytes
from infinity.weights.tensors import Tensors

_PEFT = re.compile(r"\.(?:base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")
"""What PEFT adds to names."""


@dataclass
class Conversion:
    """A `WeightConverter` of transformers, and the tensors that it takes, by its patterns."""

    rule: Any
    target: str
    """The first parameter that comes of it."""
    sources: list[tuple[str, str]] = field(default_factory=list)

    def run(self, pretrained: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parameters that come of `tensors`, by name. Raises what the conversion raises."""
        rule = deepcopy(self.rule)
        for pattern, name in self.sources:
            rule.add_tensor(self.target, name, pattern, tensors[name])
        made = rule.convert(self.target, model=pretrained, config=pretrained.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }


class Matches:
    """Where each parameter and persistent buffer of a model comes from.

    `missing`, `unexpected` and `renamed` (by the names in the files) say what differs. `wrong` has
    the name, stored shape and wanted shape of tensors that do not fit.
    """

    def __init__(self, tensors: Tensors, pretrained: Any) -> None:
        self.tensors = tensors
        self.pretrained = pretrained
        self.direct: dict[str, str] = {}
        self.converted: dict[str, Conversion] = {}
        self.renamed: dict[str, str] = {}
        self.unexpected: set[str] = set()
        self.missing: set[str] = set()
        self.wrong: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        self._dtypes: dict[str, torch.dtype] = {}
        self._last: tuple[Conversion | None, dict[str, torch.Tensor]] = (None, {})

    def __contains__(self, name: str) -> bool:
        return name in self.direct or name in self.converted

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that `name` is stored in."""
        direct = self.direct.get(name)
        return self._dtypes[name] if direct is None else self.tensors.dtype(direct)

    def stored(self, name: str) -> StoredBytes | None:
        """Where the bytes of `name` lie in a file; None where it is converted, or in no safetensors
        file. Raises `WeightsError` as `Tensors.stored`."""
        direct = self.direct.get(name)
        return None if direct is None else self.tensors.stored(direct)

    def read(self, name: str, bounds: tuple[slice, ...] = ()) -> torch.Tensor:
        """The values of `name`, or the part of them within `bounds`; not to be written."""
        direct = self.direct.get(name)
        if direct is not None:
            return self.tensors.read(direct, bounds)
        conversion = self.converted[name]
        if self._last[0] is not conversion:
            self._last = (None, {})  # frees those of the one before
            # Copies, because nobody says that transformers does not convert in place.
            read = {source: self.tensors.read(source).clone() for _, source in conversion.sources}
            self._last = (conversion, conversion.run(self.pretrained, read))
        values = self._last[1][name]
        return values[bounds] if bounds else values

    def convert(self, conversion: Conversion, wanted: Mapping[str, tuple[int, ...]]) -> None:
        """Note what comes of `conversion`. Raises `ConfigError` where it cannot work."""
        tensors = self.tensors
        empty = {
            name: torch.empty(tensors.shape(name), dtype=tensors.dtype(name), device="meta")
            for _, name in conversion.sources
        }
        try:
            made = conversion.run(self.pretrained, empty)
        except Exception as error:
            raise ConfigError(
                f"{conversion.sources[0][1]} in {tensors.where} cannot be converted to "
                f"{conversion.target} as transformers does: {sentence(error)}"
            ) from error
        for name, value in made.items():
            if name not in wanted:
                self.unexpected.add(name)
                continue
            self.converted[name] = conversion
            self._dtypes[name] = value.dtype
            if tuple(value.shape) != wanted[name]:
                self.wrong.append((name, tuple(value.shape), wanted[name]))


@dataclass(frozen=True)
class StoredRead:
    """Reads parameter `name` of `matches`, or what `bounds` take out of it, when it is called, in
    `dtype`."""

    matches: Matches
    name: str
    dtype: torch.dtype
    bounds: tuple[slice, ...] = ()

    def __call__(self) -> torch.Tensor:
        return self.matches.read(self.name, self.bounds).to(self.dtype, copy=True)


def match(
    tensors: Tensors,
    pretrained: Any,
    prefix: str,
    wanted: Mapping[str, tuple[int, ...]],
    rules: Sequence[Any] | None = None,
) -> Matches:
    """Find the tensors for `wanted`, the shapes of parameters and buffers by their names in
    `pretrained`, a model of transformers, or in any other model (None). Stored names may begin with
    `prefix`.

    `rules` are those of transformers for this model, unless others are given.
    """
    found = Matches(tensors, pretrained)
    converters, rename, in_order = _rules_of(pretrained, prefix, wanted, rules)
    conversions: dict[str, Conversion] = {}
    for key in sorted(tensors.names(), key=in_order):
        name, pattern = rename(key)
        if name not in wanted and key in wanted:
            name, pattern = key, None
        if name not in wanted:
            found.unexpected.add(name)
            continue
        if name != key:
            found.renamed[key] = name
        if pattern is not None:
            rule = next(each for each in converters if pattern in each.source_patterns)
            conversion = conversions.setdefault(name, Conversion(rule, name))
            conversion.sources.append((pattern, key))
        elif name not in found.direct:
            found.direct[name] = key
            if tensors.shape(key) != wanted[name]:
                found.wrong.append((name, tensors.shape(key), wanted[name]))
    for conversion in conversions.values():
        found.convert(conversion, wanted)
    found.missing = {name for name in wanted if name not in found}
    return found


def _rules_of(
    pretrained: Any, prefix: str, wanted: Mapping[str, object], rules: Sequence[Any] | None
) -> tuple[list[Any], Callable[[str], tuple[str, str | None]], Callable[[str], Any]]:
    """The converters for a model, what renames a stored name (and says by which pattern of a
    converter), and the order in which names are taken."""
    if pretrained is None:
        return [], lambda key: (plain_name(key, prefix), None), lambda key: key
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    rules = get_model_conversion_mapping(pretrained) if rules is None else rules
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]

    there = dict.fromkeys(wanted, True)

    def rename(key: str) -> tuple[str, str | None]:
        name, pattern = rename_source_key(
            plain_name(key, prefix), renamings, converters, pretrained.base_model_prefix, there
        )
        return str(name), pattern

    return converters, rename, dot_natural_key


def pretrained_in(model: nn.Module) -> tuple[str, Any]:
    """The outermost model of transformers in `model`, and its prefix there; None without one."""
    loaded = sys.modules.get("transformers.modeling_utils")
    if loaded is not None:
        for path, module in model.named_modules():
            if isinstance(module, loaded.PreTrainedModel):
                return f"{path}." if path else "", module
    return "", None


def plain_name(name: str, prefix: str = "") -> str:
    """The name of a parameter without `prefix` and without what PEFT adds."""
    return _PEFT.sub("", name.removeprefix(prefix))


def is_adapter(model: nn.Module, name: str) -> bool:
    """Whether PEFT added the parameter `name`, so that files of the plain model lack it."""
    prefix = getattr(getattr(model, "base_model", None), "prefix", None)
    return isinstance(prefix, str) and bool(prefix) and prefix in name


@contextmanager
def all_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, every adapter of PEFT counts as trainable if any does, also one that is not active
    now."""
    adapters = {n: p for n, p in model.named_parameters() if is_adapter(model, n)}
    resting = [n for n, p in adapters.items() if not p.requires_grad and p.is_floating_point()]
    if len(resting) == len(adapters):
        resting = []
    for name in resting:
        adapters[name].requires_grad_(True)
    del adapters
    try:
        yield
    finally:  # by name, because others may stand in for them by now
        for name in resting:
            model.get_parameter(name).requires_grad_(False)
