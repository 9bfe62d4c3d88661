"""What the package reads that somebody else may have written."""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from safetensors.torch import save as safetensors_of
from torch import nn

import infinity
from foreign_files import changes
from infinity.checkpoint.contents import Contents
from infinity.checkpoint.inert import read_item
from infinity.device import ComputeDevice
from infinity.durable.home import Version
from infinity.durable.record import CommittedStep, RandomStates, pack
from infinity.errors import CheckpointError, WeightsError
from infinity.models.reading import parse_json
from infinity.nvme import safetensors
from infinity.tiers.manifest import Member, StatesManifest, StoredBlock
from support.configs import config_of

STEP = 3


class Kind(NamedTuple):
    """A `valid` file, `change` of it, and what reads it: with success, or with an error of
    `refused` in one line."""

    valid: bytes
    change: Callable[[Random, bytes], bytes]
    read: Callable[[bytes], object]
    refused: tuple[type[Exception], ...]


def kinds(directory: Path) -> dict[str, Kind]:
    """All of them, by name; what needs files has them in `directory`."""
    return {
        "item": Kind(_saved(_item()), _of_item, read_item, (Exception,)),
        "record": Kind(_record(), _of_record, _read_record, (ValueError,)),
        "states manifest": Kind(_manifest(), _of_text, StatesManifest.decode, (ValueError,)),
        "checkpoint": _checkpoint(directory),
        "safetensors": Kind(_weights(), _of_weights, _read_weights, (WeightsError,)),
        "JSON of a model": Kind(
            json.dumps({"a": [1, 2.5, None], "b": {"c": "d"}}).encode(),
            _of_text,
            lambda content: parse_json(content, "config.json"),
            (ValueError,),
        ),
    }


def _item() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "numbers": [1, 1.5, True, None, 2**80, complex(1, 2)],
        "texts": ("x", "é", b"abc", {1, 2}),
        "tensors": [torch.arange(12.0).view(3, 4).t()[1:], torch.empty(0, 3), torch.tensor(1.0)],
        "module": nn.Linear(2, 2).state_dict(),
    }


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _of_item(chance: Random, content: bytes) -> bytes:
    """The pickle is changed, in an archive that is as it was; or the archive is."""
    if chance.random() < 0.2:
        return changes.of_bytes(chance, content)
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as archive,
        zipfile.ZipFile(stream, "w") as changed,
    ):
        for name in archive.namelist():
            part = archive.read(name)
            if name.endswith("data.pkl"):
                part = changes.of_bytes(chance, part)
            changed.writestr(name, part)
    return stream.getvalue()


def _record() -> bytes:
    header = {
        "kind": "AdamW",
        "names": [["a"]],
        "param_groups": [{"params": [0], "lr": 0.1}],
        "steps": [STEP],
        "skipped_steps": 0,
        "last_norm": 1.0,
    }
    values = {
        "version": 3,
        "posted": STEP,
        "skipped": 0,
        "whole": True,
        "in_forward": True,
        "optimizers": [header],
        "random": RandomStates.of(ComputeDevice(torch.device("cpu"))).values(),
        "buffers": {"b": torch.ones(2)},
        "tracked": {"t": torch.frombuffer(bytearray(_saved({"x": 1})), dtype=torch.uint8)},
    }
    return pack(_saved(values), [Version(1, True), Version(0, False)])


def _of_record(chance: Random, content: bytes) -> bytes:
    head = len(pack(b"", [Version(0, True)] * 2))
    if chance.random() < 0.1:
        return changes.of_bytes(chance, content[:head]) + content[head:]
    return content[:head] + _of_item(chance, content[head:])


def _read_record(content: bytes) -> object:
    return CommittedStep.of(content, STEP)


def _manifest() -> bytes:
    block = StoredBlock(
        name="a", kind="param", format="fp32", elements=8, nbytes=32, extents=(0, 4096)
    )
    return StatesManifest(
        version=4,
        directory=0,
        run="0" * 32,
        member=Member(),
        is_committed=True,
        stripe_bytes=1 << 20,
        shares=(0.5, 0.5),
        rooms=(3, 4),
        blocks=(block,),
    ).encode()


def _of_text(chance: Random, content: bytes) -> bytes:
    change = changes.of_bytes if chance.random() < 0.3 else changes.of_json
    return change(chance, content)


_SIGNED = re.compile(rb'\{"content":(.*),"sha256":"[0-9a-f]{64}"\}\n', re.DOTALL)


def _checkpoint(directory: Path) -> Kind:
    """The manifest of a checkpoint, with a digest that is right."""
    where = directory / "checkpoint"
    (directory / "states").mkdir()
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    config = config_of(
        nvme=directory / "states",
        gpu_memory="1MiB",
        cpu_memory="16MiB",
        device="cpu",
        threads=1,
    )
    wrapped = infinity.wrap(model, config)
    optimizer = infinity.AdamW(wrapped.parameters(), lr=0.1)
    with infinity.engine(wrapped) as engine:
        wrapped(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        engine.save_checkpoint(where, optimizer, {"note": 1})
    path = where / "infinity.json"

    def read(content: bytes) -> object:
        path.write_bytes(content)
        contents = Contents(where)
        contents.extra_keys()
        found = [run for tensor in contents.weights() for run in contents.read(tensor)]
        return found, contents.verify()

    return Kind(path.read_bytes(), _of_signed, read, (CheckpointError,))


def _of_signed(chance: Random, content: bytes) -> bytes:
    if chance.random() < 0.1:
        return changes.of_bytes(chance, content)
    signed = _SIGNED.fullmatch(content)
    assert signed is not None
    text = _of_text(chance, signed[1])
    return b'{"content":%b,"sha256":"%b"}\n' % (text, hashlib.sha256(text).hexdigest().encode())


def _weights() -> bytes:
    return safetensors_of({"a": torch.ones(3, 4), "b": torch.arange(5), "c": torch.empty(0, 2)})


def _of_weights(chance: Random, content: bytes) -> bytes:
    if chance.random() < 0.2:
        return changes.of_bytes(chance, content)
    end = 8 + int.from_bytes(content[:8], "little")
    header = _of_text(chance, content[8:end])
    return len(header).to_bytes(8, "little") + header + content[end:]


def _read_weights(content: bytes) -> object:
    end = safetensors.data_start(content[:8], len(content), "a.safetensors")
    return safetensors.parse(content[8:end], len(content), "a.safetensors")
