"""The work of training beside its I/O: CPU Adam on every core, and with a GPU copies from host
memory to it."""

from __future__ import annotations

import threading
import time

import torch

from infinity.device import ComputeDevice, HostMemory
from infinity.optim.kernels import Kernels, StateTensors
from infinity.optim.rules.adam import AdamW
from infinity.placement.budget import FULL_CHUNK_ELEMENTS
from infinity.placement.spec import FP32, SPLIT, Kind

_ELEMENTS = FULL_CHUNK_ELEMENTS
_CHUNKS = 16  # so many that they do not stay in the caches
_COPY_BYTES = 64 << 20
_DTYPES = dict.fromkeys((Kind.PARAM, Kind.GRAD), torch.bfloat16)
_FORMATS = {Kind.MASTER: SPLIT, Kind.EXP_AVG: FP32, Kind.EXP_AVG_SQ: FP32}
_WIDTHS = {Kind.PARAM: 2, Kind.GRAD: 2} | {kind: form.nbytes for kind, form in _FORMATS.items()}
_HYPER = AdamW.hyper({"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}, step=10)


class _AdamLoad:
    """CPU Adam over chunks that take turns."""

    def __init__(self) -> None:
        self._kernels = Kernels("auto", None)
        per_chunk = sum(_WIDTHS.values()) * _ELEMENTS
        self._memory = HostMemory(_CHUNKS * per_chunk)
        self.chunks = []
        for number in range(_CHUNKS):
            chunk, at = {}, number * per_chunk
            for kind, width in _WIDTHS.items():
                chunk[kind] = self._memory.tensor[at : at + width * _ELEMENTS].view(
                    _DTYPES.get(kind, torch.uint8)
                )
                at += width * _ELEMENTS
            self.chunks.append(StateTensors(chunk, _FORMATS))
        self.updated = 0
        """Updated parameters."""

    def run(self, stopping: threading.Event) -> None:
        while not stopping.is_set():
            for chunk in self.chunks:
                self._kernels.update(chunk, 0, _ELEMENTS, _HYPER, 1.0)
                self.updated += _ELEMENTS

    def close(self) -> None:
        self._kernels.close()
        self.chunks.clear()
        self._memory.close()


class _CopyLoad:
    """Copies from host memory to `device`, which has memory of its own."""

    def __init__(self, device: ComputeDevice) -> None:
        self._device = device
        self._source = device.host_memory(_COPY_BYTES)
        self._target = device.compute_memory(_COPY_BYTES)
        self.copied = 0
        """Copied bytes."""

    def run(self, stopping: threading.Event) -> None:
        while not stopping.is_set():
            self._device.upload(self._target, self._source)
            self.copied += _COPY_BYTES


class Load:
    """Runs inside a `with` block, on threads of its own. Used any number of times, then closed."""

    def __init__(self) -> None:
        self._adam = _AdamLoad()
        self._device = ComputeDevice("auto")
        self._copies = None if self._device.unified_memory else _CopyLoad(self._device)
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()
        self._start = 0.0
        self.seconds = 0.0
        """Seconds of all blocks together."""

    @property
    def name(self) -> str:
        """The work in words."""
        return "CPU Adam" if self._copies is None else "CPU Adam and host-to-device copies"

    @property
    def updated(self) -> int:
        """Parameters updated in `seconds`."""
        return self._adam.updated

    @property
    def copied(self) -> int:
        """Bytes copied to the GPU in `seconds`."""
        return 0 if self._copies is None else self._copies.copied

    def __enter__(self) -> Load:
        self._stopping.clear()
        self._start = time.perf_counter()
        self._threads = [
            threading.Thread(
                target=work.run, args=(self._stopping,), name="bench-load", daemon=True
            )
            for work in (self._adam, self._copies)
            if work is not None
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self.seconds += time.perf_counter() - self._start

    def close(self) -> None:
        """Free threads and memory."""
        self._adam.close()
        self._device.close()
