"""The content of a commit record after its head, as models that refuse invalid values.

A kill, a drive or an earlier version may have left any bytes. They are checked here, once. Decoded
values are trusted.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from random import Random
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    Strict,
    ValidationError,
    model_validator,
)
from torch import Tensor

from infinity.checkpoint.inert import read_item
from infinity.device import ComputeDevice
from infinity.durable.home import Version
from infinity.errors import first_problem, in_words
from infinity.tiers.manifest import Count

VERSION = 3
_COUNT = struct.Struct("<Q")


def _vector(tensor: Tensor, dtype: torch.dtype, length: int | None = None) -> Tensor:
    if tensor.dtype != dtype or tensor.layout is not torch.strided or tensor.ndim != 1:
        raise ValueError(f"it is no vector of {dtype}")
    if length not in (None, len(tensor)):
        raise ValueError(f"it has {len(tensor)} values instead of {length}")
    return tensor


def _words(length: int) -> AfterValidator:
    """`length` numbers of 32 bits."""

    def check(tensor: Tensor) -> Tensor:
        words = _vector(tensor, torch.int64, length)
        if not ((words >= 0) & (words < 1 << 32)).all():
            raise ValueError("a word of it has more than 32 bits")
        return words

    return AfterValidator(check)


def _python_takes(state: tuple[int, Tensor, float | None]) -> Any:
    version, words, gauss = state
    Random().setstate((version, tuple(words.tolist()), gauss))
    return state


def _bytes(tensor: Tensor) -> Tensor:
    return _vector(tensor, torch.uint8)


def _unpacked(saved: Any) -> Any:
    if not isinstance(saved, Tensor):
        raise ValueError("it is no tensor")
    try:
        return read_item(_bytes(saved).numpy().tobytes())
    except Exception as error:
        raise ValueError(str(error)) from error


def _known(version: int) -> int:
    if version != VERSION:
        raise ValueError(f"it is of version {in_words(version)}, and {VERSION} is known")
    return version


class _Recorded(BaseModel):
    """A part of a record."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
    )


class RandomStates(_Recorded):
    """The states of the default generators of torch, Python and numpy."""

    torch: list[Annotated[Tensor, AfterValidator(_bytes)]]
    """As `ComputeDevice.random_state` gives them."""
    python: Annotated[
        tuple[Literal[3], Annotated[Tensor, _words(625)], FiniteFloat | None],
        Strict(False),
        AfterValidator(_python_takes),
    ]
    numpy: Annotated[
        tuple[
            Literal["MT19937"],
            Annotated[Tensor, _words(624)],
            Annotated[int, Field(ge=0, le=624)],
            Annotated[int, Field(ge=0, le=1)],
            FiniteFloat,
        ],
        Strict(False),
    ]

    @classmethod
    def of(cls, device: ComputeDevice) -> RandomStates:
        """The current states."""
        version, words, gauss = random.getstate()
        found: Any = np.random.get_state(legacy=True)
        name, keys, *rest = found
        return cls.model_construct(
            torch=device.random_state(),
            python=(version, torch.tensor(words, device="cpu"), gauss),
            numpy=(name, torch.from_numpy(keys.astype(np.int64)), *rest),
        )

    def restore(self, device: ComputeDevice) -> None:
        """Put the states back into the generators."""
        device.set_random_state(self.torch)
        version, words, gauss = self.python
        random.setstate((version, tuple(words.tolist()), gauss))
        name, keys, position, has_gauss, cached = self.numpy
        np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))

    def values(self) -> dict[str, list[Any]]:
        """The states as a record contains them."""
        return {name: list(state) for name, state in self}


class ScalerState(_Recorded):
    """The state of a `LossScaler`."""

    scale: Annotated[float, Field(gt=0)]
    skipped: NonNegativeInt
    finite: NonNegativeInt
    patience: NonNegativeInt


def _groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for group in groups:
        numbers = group.get("params")
        if not isinstance(numbers, list) or not all(type(each) is int for each in numbers):
            raise ValueError("a group has no list of numbers of parameters")
    return groups


class OptimizerHeader(_Recorded):
    """`Optimizer.header`, the kind, and the names of the parameters in the groups when the
    optimizer was made."""

    kind: str
    names: list[list[str]]
    param_groups: Annotated[list[dict[str, Any]], AfterValidator(_groups)]
    steps: list[NonNegativeInt]
    skipped_steps: NonNegativeInt
    last_norm: NonNegativeFloat | None
    loss_scaler: ScalerState | None = None

    @model_validator(mode="after")
    def _fits(self) -> OptimizerHeader:
        if len(self.steps) != sum(self.counts):
            raise ValueError(
                f"it counts the steps of {len(self.steps)} of {self.counts} parameters"
            )
        return self

    @property
    def counts(self) -> list[int]:
        """The number of parameters in each group."""
        return [len(group["params"]) for group in self.param_groups]


class CommittedStep(_Recorded):
    """The content of a record."""

    version: Annotated[int, AfterValidator(_known)]
    step: Count
    """The step in the key of the record."""
    versions: Annotated[tuple[Version, ...], Field(repr=False)]
    """The version of each block."""
    posted: Count
    skipped: Count
    is_whole: bool = Field(alias="whole")
    in_forward: bool
    optimizers: list[OptimizerHeader]
    random: RandomStates
    buffers: dict[str, Tensor]
    tracked: dict[str, Annotated[Any, BeforeValidator(_unpacked)]]

    @model_validator(mode="after")
    def _fits(self) -> CommittedStep:
        if self.posted + self.skipped != self.step:
            raise ValueError(
                f"{self.posted} steps were made and {self.skipped} left out, and it is of step "
                f"{self.step}"
            )
        if self.step and not self.optimizers:
            raise ValueError("steps were made, and it has no optimizer")
        return self

    @classmethod
    def of(cls, content: bytes, step: int) -> CommittedStep:
        """Decode bytes that `pack` made, in the record of `step`. Raises `ValueError`."""
        try:
            (count,) = _COUNT.unpack_from(content)
            end = _COUNT.size + count
            blocks = content[_COUNT.size : end]
            if len(blocks) != count or max(blocks, default=0) > 3:
                raise ValueError("it does not say where its blocks are")
            versions = tuple(Version(each & 1, bool(each & 2)) for each in blocks)
            return cls(versions=versions, step=step, **read_item(content[end:]))
        except ValidationError as error:
            raise ValueError(first_problem(error)) from error
        except Exception as error:  # of torch or zipfile, for other bytes
            raise ValueError(str(error)) from error

    @property
    def headers(self) -> list[dict[str, Any]]:
        """The headers of the optimizers."""
        return [each.model_dump(exclude_unset=True) for each in self.optimizers]

    def check_names(self) -> None:
        """Raise `ValueError` if the groups of an optimizer have other parameters than when it was
        made."""
        for each in self.optimizers:
            named = list(map(len, each.names))
            if named != each.counts:
                raise ValueError(f"its groups have {each.counts} parameters, and names of {named}")


def pack(noted: bytes, versions: Sequence[Version]) -> bytes:
    """A record: the number of blocks, a byte for each of them, and the bytes in `noted`."""
    blocks = bytes(version.extent | version.is_written << 1 for version in versions)
    return _COUNT.pack(len(blocks)) + blocks + noted
