"""Frozen parameters, and which of them can stay in the files that their values come from, because
the model uses them exactly as they lie there."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from infinity.quantities import format_bytes
from infinity.sharding.codec import stored_as
from infinity.sharding.recognize import is_dtensor
from infinity.tiers.originals import StoredBytes
from infinity.weights.init import Origin
from infinity.weights.load import FirstValues, sources_of

log = logging.getLogger("infinity")


@contextmanager
def all_frozen(model: nn.Module) -> Iterator[None]:
    """Inside the context, no parameter of `model` takes gradients.

    Used for inference, and only while units are made. While the model runs, `requires_grad` has its
    old value: torch multiplies by a weight that takes gradients in another order, also without grad
    mode.
    """
    taking = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in taking:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in taking:
            parameter.requires_grad_(True)


class StoredParameters(NamedTuple):
    """The result of `find_stored`."""

    places: dict[int, StoredBytes]
    """The places of parameters in files, by their ids."""

    copied: Counter[str]
    """Bytes of frozen parameters of files that must be copied, by the reason."""

    def tell(self) -> None:
        """Log the places and the reasons."""
        if self.places:
            files = sorted({place.file.path for place in self.places.values()})
            log.info(
                "%s of frozen parameters stay in %s%s, which are only read",
                format_bytes(sum(place.nbytes for place in self.places.values())),
                files[0],
                f" and {len(files) - 1} more files" if len(files) > 1 else "",
            )
        for problem, nbytes in self.copied.items():
            log.info("%s of frozen parameters are copied: %s", format_bytes(nbytes), problem)


def find_stored(
    model: nn.Module,
    empty: Mapping[int, Origin | None],
    weights: FirstValues | None,
    dtype: torch.dtype | None,
) -> StoredParameters:
    """The places of frozen parameters of `model` in safetensors files. A parameter has a place if
    it lies there in the dtype that it is kept in (`stored_as`) and in its own layout.

    Values come from `weights`, or from the origins in `empty`. Raises `WeightsError` if a file has
    changed since it was opened.
    """
    found: dict[int, StoredBytes] = {}
    copied: Counter[str] = Counter()
    sources = sources_of(model)
    for parameter in model.parameters():
        if parameter.requires_grad or parameter.numel() == 0:
            continue
        kept = stored_as(parameter, dtype)
        source = next((s for s in sources[id(parameter)] if weights and s.name in weights), None)
        origin = empty.get(id(parameter))
        if weights is not None and source is not None:
            place, stored = weights.stored(source.name), weights.dtype(source.name)
            bounds = source.bounds
        elif origin is not None and (read := origin.read()) is not None:
            place, stored = read.matches.stored(read.name), read.matches.dtype(read.name)
            bounds = read.bounds
        else:
            continue
        if stored is not kept:
            problem = "they have another dtype in the model"
        elif is_dtensor(parameter):
            problem = "tensor parallel ranks divide them"
        elif place is None:
            problem = "they lie in no safetensors file as they are in the model"
        elif len(bounds) > 1:
            problem = "they lie in tiles of their columns"
        else:
            nbytes = parameter.numel() * kept.itemsize
            found[id(parameter)] = place.rows(bounds[0], nbytes) if bounds else place
            continue
        copied[problem] += parameter.numel() * kept.itemsize
    return StoredParameters(found, copied)
