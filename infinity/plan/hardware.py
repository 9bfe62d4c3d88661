"""The machine of a plan, described by a file or by name. `infinity.plan.measure` measures this
machine."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError
from infinity.free_memory import Available, Memory
from infinity.quantities import parse_bytes

_MOST_BYTES = 1 << 20
_MOST = 1e24


@dataclass(frozen=True)
class DriveSpec:
    """One drive of a node: bytes per second of large transfers, `capacity` bytes for use, and
    `endurance` bytes that the maker allows to be written (None: not known)."""

    read: float
    write: float
    capacity: int
    endurance: float | None = None
    both: float | None = None
    """Bytes per second of reading and writing at once, half of each. None: reads and writes take
    turns."""


@dataclass(frozen=True)
class Hardware:
    """A machine: `nodes` nodes with `gpus` GPUs each, one rank per GPU.

    Rates are bytes per second that programs reach, not those of a data sheet. `link` is per GPU and
    direction, while all GPUs of a node use it. Without GPUs (`gpu_memory` None) the CPU computes,
    and a node has one rank.
    """

    name: str
    host_memory: int
    """Bytes of a node that are free for training."""
    flops: float
    """Operations per second of one GPU in a transformer block, in the precision of the model."""
    head_flops: float | None = None
    """Operations per second in the head and the loss. None: as in a block."""
    gpu_memory: int | None = None
    """Bytes of one GPU that are free for training."""
    gpu_bandwidth: float = 1e12
    """Bytes per second of the memory of one GPU."""
    link: float = 10e9
    """Bytes per second between host memory and one GPU, each way."""
    memory_bandwidth: float = 20e9
    """Bytes per second of host memory of a node in the optimizer kernels."""
    drives: tuple[DriveSpec, ...] = ()
    """The drives of a node."""
    together: float = 1.0
    """The share of their speed, from 0 to 1, that the drives and a computing CPU keep if both work
    at the same time."""
    nodes: int = 1
    gpus: int = 1
    network: float = 10e9
    """Bytes per second that each rank sends to other ranks while all ranks send."""
    host_total: int | None = None
    """All bytes of host memory of a node. None: `host_memory`."""
    gpu_total: int | None = None
    """All bytes of one GPU. None: `gpu_memory`."""

    @property
    def one_pool(self) -> bool:
        """Whether the compute device computes in host memory: the CPU, or an integrated GPU."""
        return self.available.is_one_pool

    @property
    def unified(self) -> bool:
        """Whether the CPU is the compute device."""
        return self.gpu_memory is None

    @property
    def ranks(self) -> int:
        """The ranks of the whole machine."""
        return self.nodes * self.gpus

    @property
    def capacity(self) -> int:
        """Bytes of the drives of one node."""
        return sum(drive.capacity for drive in self.drives)

    @property
    def available(self) -> Available:
        """The memory of a node for its ranks, from which budgets are chosen."""
        host = Memory(self.host_total or self.host_memory, self.host_memory, self.name)
        gpu = None
        if self.gpu_memory is not None:
            total = self.gpu_total or self.gpu_memory
            gpu = Memory(total, self.gpu_memory, f"a GPU of {self.name}")
        return Available(host, gpu, self.gpus)

    def replace(self, **changes: Any) -> Hardware:
        """The machine with other values. Raises `ConfigError` for an impossible value."""
        return checked(dataclasses.replace(self, **changes))


_BYTES = ("host_memory", "gpu_memory", "host_total", "gpu_total")


def read_hardware(path: Path) -> Hardware:
    """The machine that a JSON or TOML file describes with the fields of `Hardware`.

    Memory may be text such as "64GB". Raises `ConfigError` with the file, the field, and the
    allowed values.
    """
    try:
        return described(_parse(path), path.stem)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _parse(path: Path) -> Any:
    if path.stat().st_size > _MOST_BYTES:
        raise ConfigError("the file is too large for the description of a machine")
    content = path.read_bytes()
    try:
        text = content.decode()
        if path.suffix == ".toml":
            return _toml().loads(text)
        return json.loads(text)
    except ValueError as error:  # from both parsers and the decoder
        raise ConfigError(f"not {path.suffix[1:].upper() or 'JSON'}: {error}") from None


def _toml() -> Any:
    try:
        return importlib.import_module("tomllib")
    except ImportError:
        raise ConfigError("TOML needs Python 3.11; write the description as JSON") from None


def described(values: Any, name: str) -> Hardware:
    """The machine of a mapping with the fields of `Hardware`. Raises `ConfigError`."""
    if not isinstance(values, Mapping):
        raise ConfigError("a description of a machine is a table of fields")
    values = {"name": name, **values}
    drives = values.pop("drives", [])
    if not isinstance(drives, (list, tuple)):
        raise ConfigError("drives is a list of tables with read, write and capacity")
    made = [_drive(drive) for drive in drives]
    fields = _fields(Hardware, values, _BYTES, "")
    return checked(Hardware(**{**fields, "drives": tuple(made)}))


def _drive(values: Any) -> DriveSpec:
    if not isinstance(values, Mapping):
        raise ConfigError("drives is a list of tables with read, write and capacity")
    return DriveSpec(**_fields(DriveSpec, values, ("capacity", "endurance"), "of a drive"))


def _fields(
    kind: type[Any], values: Mapping[str, Any], sizes: tuple[str, ...], where: str
) -> dict[str, Any]:
    known = {field.name: field for field in dataclasses.fields(kind)}
    needed = [name for name, field in known.items() if field.default is dataclasses.MISSING]
    missing = [name for name in needed if name not in values]
    unknown = [name for name in values if name not in known]
    if missing or unknown:
        word = f"no {missing[0]!r}" if missing else f"unknown field {unknown[0]!r}"
        raise ConfigError(f"{word} {where}".rstrip() + f"; the fields are {', '.join(known)}")
    result: dict[str, Any] = {}
    for name, value in values.items():
        if name in sizes and isinstance(value, str):
            try:
                value = parse_bytes(value)
            except ValueError as error:
                raise ConfigError(f"{name}: {error}") from None
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        optional = value is None and known[name].default is None
        if name != "name" and not number and not optional:
            raise ConfigError(f"{name} is {value!r}, not a number")
        if name == "name" and not isinstance(value, str):
            raise ConfigError(f"name is {value!r}, not a text")
        whole = number and (name in sizes or name in ("nodes", "gpus"))
        result[name] = int(value) if whole and math.isfinite(value) else value
    return result


def checked(hardware: Hardware) -> Hardware:
    """Return `hardware`. Raises `ConfigError` for an impossible value."""
    parts: list[tuple[str, Hardware | DriveSpec]] = [("", hardware)]
    parts += [(" of a drive", drive) for drive in hardware.drives]
    for where, part in parts:
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if not isinstance(value, (int, float)):
                continue
            if not value > 0:
                raise ConfigError(f"{field.name}{where} is {value}, and has to be positive")
            if value >= _MOST:
                raise ConfigError(
                    f"{field.name}{where} is {value}, and has to be less than {_MOST}"
                )
    if hardware.together > 1:
        raise ConfigError(f"together is {hardware.together}, and cannot be more than 1")
    if hardware.unified and hardware.gpus > 1:
        raise ConfigError(f"gpus is {hardware.gpus}, but gpu_memory is missing")
    return hardware
