"""Matches stored tensors with the parameters that they become.

[Note: names]
Files of transformers have the names and layouts of the version that wrote them. `transformers`
renames and converts them as it loads (`WeightRenaming`, `WeightConverter`). Example: each expert of
Mixtral is a matrix of its own in files, and all are one tensor in the model. This file gets these
rules and applies them to names first. A conversion then runs on the meta device, to find the names
and shapes of its parameters. It runs on values only when one of these parameters is read. That
takes twice the memory of the tensors of one conversion.

PEFT puts a model into `base_model.model`, its linear layers into `base_layer`, and copies of heads
into `modules_to_save`. Files of the plain model have none of these, so they are removed from names.
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
"""The parts that PEFT adds to names."""


@dataclass
class Conversion:
    """A `WeightConverter` of transformers, and its `sources`: a pattern and a stored name for each
    tensor."""

    rule: Any
    target: str
    """The first parameter that it makes."""
    sources: list[tuple[str, str]] = field(default_factory=list)

    def run(self, pretrained: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parameters that it makes of `tensors`, by name. Raises the errors of the
        conversion."""
        rule = deepcopy(self.rule)
        for pattern, name in self.sources:
            rule.add_tensor(self.target, name, pattern, tensors[name])
        made = rule.convert(self.target, model=pretrained, config=pretrained.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }


class Matches:
    """The stored tensors of each parameter and persistent buffer of a model.

    `missing` has the names that only the model has, `unexpected` the names that only the files
    have. `renamed` has names of the model by names in the files. `wrong` has the name, stored shape
    and wanted shape of tensors that do not fit.
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
        direct = self.direct.get(name)
        return self._dtypes[name] if direct is None else self.tensors.dtype(direct)

    def stored(self, name: str) -> StoredBytes | None:
        """The place of the bytes of `name` in a safetensors file. None if it is converted, or lies
        in no such file. Raises `WeightsError` as `Tensors.stored`."""
        direct = self.direct.get(name)
        return None if direct is None else self.tensors.stored(direct)

    def read(self, name: str, bounds: tuple[slice, ...] = ()) -> torch.Tensor:
        """The values of `name`, or the part of them within `bounds`. They must not be written."""
        direct = self.direct.get(name)
        if direct is not None:
            return self.tensors.read(direct, bounds)
        conversion = self.converted[name]
        if self._last[0] is not conversion:
            self._last = (None, {})  # frees the tensors of the conversion before
            # Copies, because transformers may convert in place.
            read = {source: self.tensors.read(source).clone() for _, source in conversion.sources}
            self._last = (conversion, conversion.run(self.pretrained, read))
        values = self._last[1][name]
        return values[bounds] if bounds else values

    def convert(self, conversion: Conversion, wanted: Mapping[str, tuple[int, ...]]) -> None:
        """Note the parameters that `conversion` makes. Raises `ConfigError` if it fails."""
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
    """Reads parameter `name` of `matches`, or the part of it within `bounds`, in `dtype`, when it
    is called."""

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
    """Find the tensors for `wanted`: the shapes of the parameters and buffers of a model, by their
    names. `pretrained` is the model, if it is one of transformers, else None. Stored names may
    begin with `prefix`. Raises `ConfigError` if a conversion fails.

    By default `rules` are those of transformers for this model.
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
    """The converters for a model, a function `rename`, and the sort key of stored names. `rename`
    returns the new name of a stored name, and the pattern of its converter."""
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
    """The name prefix of the outermost model of transformers in `model`, and that model; `""` and
    None without one."""
    loaded = sys.modules.get("transformers.modeling_utils")
    if loaded is not None:
        for path, module in model.named_modules():
            if isinstance(module, loaded.PreTrainedModel):
                return f"{path}." if path else "", module
    return "", None


def plain_name(name: str, prefix: str = "") -> str:
    """The name of a parameter without `prefix` and without the parts that PEFT adds."""
    return _PEFT.sub("", name.removeprefix(prefix))


def is_adapter(model: nn.Module, name: str) -> bool:
    """Whether PEFT added the parameter `name`, so that files of the plain model lack it."""
    prefix = getattr(getattr(model, "base_model", None), "prefix", None)
    return isinstance(prefix, str) and bool(prefix) and prefix in name


@contextmanager
def all_adapters(model: nn.Module) -> Iterator[None]:
    """Inside the context, every adapter of PEFT is trainable if any is, also an inactive one."""
    adapters = {n: p for n, p in model.named_parameters() if is_adapter(model, n)}
    resting = [n for n, p in adapters.items() if not p.requires_grad and p.is_floating_point()]
    if len(resting) == len(adapters):
        resting = []
    for name in resting:
        adapters[name].requires_grad_(True)
    del adapters
    try:
        yield
    finally:  # by name, because they may have been replaced
        for name in resting:
            model.get_parameter(name).requires_grad_(False)
