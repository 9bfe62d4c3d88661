"""Chunks of blocks as the optimizer kernels take them, with random contents."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from infinity import native

kernels = native.cpu_adam()
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDTHS = {"none": 0, "split": 2, "fp32": 4, "bf16": 2, "fp16": 2}
POOLS = {threads: kernels.Pool(threads) for threads in range(1, 6)}
SPECIAL = [
    0.0,
    -0.0,
    1e-45,
    -1e-45,
    1.1754942e-38,
    1.1754944e-38,
    3.4028235e38,
    -3.4028235e38,
    math.inf,
    -math.inf,
    math.nan,
]
GUARD = 64  # bytes on either side of every block that must not change
SUPERBLOCK = kernels.SUPERBLOCK
MASTERS = [("fp32", "none"), ("bf16", "fp32"), ("fp16", "fp32"), ("bf16", "split")]
"""(dtype of the parameter, format of its master): what there is."""


@dataclass(frozen=True)
class Hyper:
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.1
    bias_correction1: float = 1 - 0.9**3
    bias_correction2_sqrt: float = math.sqrt(1 - 0.999**3)
    decoupled: bool = True
    momentum: float = 0.9
    dampening: float = 0.0
    nesterov: bool = False
    first_step: bool = False
    grad_scale: float = 0.37
    beta3: float = 0.9999
    alpha: float = 5.0


HYPERS = [
    Hyper(),
    Hyper(decoupled=False, momentum=0.0),
    Hyper(weight_decay=0.0, grad_scale=1.0, nesterov=True),
    Hyper(lr=0.0, weight_decay=0.0, eps=0.0, first_step=True),
    Hyper(lr=1e30, grad_scale=-1e-40, dampening=0.3),
]


@dataclass(frozen=True)
class Case:
    """A rule and the formats that it works on."""

    rule: str = "adam"
    grad: str = "fp32"
    param: str = "fp32"
    master: str = "none"
    moments: str = "fp32"
    hyper: Hyper = field(default_factory=Hyper)

    @property
    def moments_used(self) -> tuple[str, ...]:
        """By the names of the kernels."""
        if self.rule == "sgd":
            return ("first",) if self.hyper.momentum else ()
        return USED[self.rule]


USED = {
    "adam": ("first", "second"),
    "adagrad": ("second",),
    "lion": ("first",),
    "ademamix": ("first", "second", "slow"),
}
RULES = (*USED, "sgd")
MOMENTS = ("first", "second", "slow")


@dataclass
class Chunk:
    """The blocks of `n` elements, as bytes with guards around them; `shift` moves every address by
    so many elements."""

    case: Case
    n: int
    blocks: dict[str, torch.Tensor]
    shift: int = 0
    position: int = 0
    key: int = 12345

    def clone(self) -> Chunk:
        return replace(self, blocks={name: block.clone() for name, block in self.blocks.items()})

    def offset(self, name: str) -> int:
        return GUARD + self.shift * (4 if name in MOMENTS else self.width(name))

    def width(self, name: str) -> int:
        return WIDTHS[
            {"grad": self.case.grad, "param": self.case.param, "master": self.case.master}[name]
        ]

    def view(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The block without its guards."""
        inner = self.blocks[name][self.offset(name) : len(self.blocks[name]) - GUARD]
        return inner if dtype is None else inner.view(dtype)

    def address(self, name: str) -> int:
        return self.view(name).data_ptr() if name in self.blocks else 0

    def update(
        self,
        isa: str = "scalar",
        threads: int = 1,
        begin: int = 0,
        end: int | None = None,
        to: Chunk | None = None,
    ) -> Chunk:
        targets = {f"to_{name}": to.address(name) for name in to.blocks} if to is not None else {}
        kernels.update(
            *self._blocks(begin, end),
            **self._numbers(),
            isa=isa,
            pool=POOLS[threads],
            **targets,
        )
        return self

    def _blocks(self, begin: int, end: int | None) -> tuple[Any, ...]:
        """What both kinds of kernels take by place."""
        case = self.case
        return (
            case.rule,
            self.address("grad"),
            case.grad,
            self.address("param"),
            case.param,
            self.address("master"),
            case.master,
            self.address("first"),
            self.address("second"),
            case.moments,
            begin,
            self.n if end is None else end,
        )

    def _numbers(self) -> dict[str, Any]:
        """What both take by name."""
        numbers = {"position": self.position, "key": self.key, **asdict(self.case.hyper)}
        return numbers | {"slow": self.address("slow")}

    def update_by(self, cuda: Any, stream: int, begin: int = 0, end: int | None = None) -> Chunk:
        """The same by the CUDA kernels."""
        cuda.update(
            *self._blocks(begin, end),
            **self._numbers(),
            stream=stream,
        )
        return self

    def moved(self, shift: int) -> Chunk:
        """The same contents at other addresses."""
        other = replace(self, shift=shift, blocks={})
        for name, block in self.blocks.items():
            other.blocks[name] = torch.cat(
                [block.new_zeros(other.offset(name)), self.view(name), block.new_zeros(GUARD)]
            )
        return other

    def bits(self) -> dict[str, bytes]:
        return {name: self.view(name).numpy().tobytes() for name in self.blocks}

    def masters(self) -> torch.Tensor:
        """The fp32 masters."""
        if self.case.master != "split":
            return self.view("master" if self.case.master == "fp32" else "param", torch.float32)
        return join(self.view("param", torch.bfloat16), self.view("master", torch.int16))

    def moment(self, kind: str) -> torch.Tensor:
        """A moment in fp32."""
        return decoded(self.view(kind), self.case.moments, coded_as(kind), self.n)


def coded_as(kind: str) -> str:
    """The moment that is coded like `kind`."""
    return "first" if kind == "slow" else kind


def random_bits(n: int, generator: torch.Generator) -> torch.Tensor:
    return (
        torch.randint(-(2**31), 2**31, (n,), generator=generator)
        .to(torch.int32)
        .view(torch.float32)
    )


def random_values(n: int, generator: torch.Generator) -> torch.Tensor:
    """Ordinary values, arbitrary bit patterns and special values in one tensor."""
    values = torch.randn(n, generator=generator)
    special = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (n,), generator=generator)]
    kind = torch.randint(4, (n,), generator=generator)
    return torch.where(
        kind == 0, random_bits(n, generator), torch.where(kind == 1, special, values)
    )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def encode(
    block: torch.Tensor, values: torch.Tensor, moments: str, kind: str, begin: int = 0
) -> None:
    kernels.encode(block.data_ptr(), moments, kind, values.data_ptr(), begin, len(values))


def encoded(values: torch.Tensor, moments: str, kind: str) -> torch.Tensor:
    """A block of moments with these values, as bytes."""
    block = torch.zeros(kernels.block_bytes(moments, len(values)), dtype=torch.uint8)
    encode(block, values, moments, kind)
    return block


def decoded(block: torch.Tensor, moments: str, kind: str, n: int, begin: int = 0) -> torch.Tensor:
    values = torch.full((n,), math.nan)
    kernels.decode(block.data_ptr(), moments, kind, values.data_ptr(), begin, n)
    return values


def split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    param = torch.empty(len(values), dtype=torch.bfloat16)
    low = torch.empty(len(values), dtype=torch.int16)
    kernels.split(values.data_ptr(), param.data_ptr(), low.data_ptr(), len(values))
    return param, low


def join(param: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    values = torch.empty(len(param))
    kernels.join(param.data_ptr(), low.data_ptr(), values.data_ptr(), len(param))
    return values


def make_chunk(
    case: Case,
    masters: torch.Tensor,
    grad: torch.Tensor | None,
    first: torch.Tensor,
    second: torch.Tensor,
    slow: torch.Tensor | None = None,
) -> Chunk:
    """A chunk with these values (fp32; moments may be the bytes of a block). Without `slow` zeros
    are it."""
    contents: dict[str, torch.Tensor] = {}
    if grad is not None:
        contents["grad"] = as_bytes(grad.to(DTYPES[case.grad]))
    if case.master == "none":
        contents["param"] = as_bytes(masters)
    elif case.master == "fp32":
        contents["param"], contents["master"] = (
            as_bytes(torch.zeros(len(masters), dtype=torch.int16)),
            as_bytes(masters),
        )
    else:
        contents["param"], contents["master"] = map(as_bytes, split(masters))
    slow = torch.zeros(len(masters)) if slow is None else slow
    for kind, values in zip(MOMENTS, (first, second, slow), strict=True):
        if kind in case.moments_used:
            is_block = values.dtype == torch.uint8
            contents[kind] = values if is_block else encoded(values, case.moments, coded_as(kind))
    guard = torch.full((GUARD,), 0xA5, dtype=torch.uint8)
    return Chunk(
        case,
        len(masters),
        {name: torch.cat([guard, block, guard]) for name, block in contents.items()},
    )


def random_chunk(case: Case, n: int, seed: int = 0) -> Chunk:
    """Values of every class; the codes of int8 moments are any bytes, their scales any class of
    number."""
    generator = torch.Generator().manual_seed(seed)
    values = [random_values(n, generator) for _ in range(5)]
    if case.moments == "int8":
        for which in (2, 3, 4):
            block = torch.randint(
                0, 256, (kernels.block_bytes("int8", n),), dtype=torch.uint8, generator=generator
            )
            for superblock in block.split(kernels.block_bytes("int8", 1)):
                ordinary = 10 ** torch.randn(1024, generator=generator)
                any_class = random_values(1024, generator).abs()
                chosen = torch.rand(1024, generator=generator) < 0.7
                superblock[SUPERBLOCK:].view(torch.float32).copy_(
                    torch.where(chosen, ordinary, any_class)
                )
            values[which] = block
    return make_chunk(case, values[1], values[0], *values[2:])


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"grad": 6}, "grad is not aligned"),
    ({"second": 2}, "second is not aligned"),
    ({"param": 0}, "param must not be null"),
    ({"master": 0}, "master must not be null"),
    ({"first": 0}, "first must not be null"),
    ({"second": 0}, "second must not be null"),
    ({"rule": "adamw"}, "unknown rule 'adamw'; expected adam, adagrad, lion, ademamix or sgd"),
    ({"grad_dtype": "fp64"}, "unknown dtype 'fp64'"),
    ({"master_format": "fp16"}, "unknown master format"),
    ({"moment_format": "int4"}, "expected fp32, bf16 or int8"),
    ({"param_dtype": "fp32"}, "its own master"),
    ({"master_format": "none"}, "needs an fp32 param"),
    ({"param_dtype": "fp16", "master_format": "split"}, "needs a bf16 param"),
    ({"begin": 33}, "begin is behind end"),
    ({"moment_format": "bf16", "begin": 1}, "multiples of 32"),
    ({"moment_format": "int8", "position": 16}, "multiples of 32"),
    ({"isa": "sse"}, "unknown instruction set 'sse'"),
]
