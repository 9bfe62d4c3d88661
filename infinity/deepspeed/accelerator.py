"""`get_accelerator` of DeepSpeed: the compute device by its functions, over `torch.accelerator`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import accelerator as torch_accelerator

from infinity.deepspeed.errors import MissingNameError
from infinity.free_memory import read_host


def _always(value: Any) -> Any:
    """A method that returns `value` on every device."""
    return lambda self: value


def _of_torch(function: Callable[[int | None], Any], on_cpu: Any = None) -> Any:
    """A method that calls `function` of a device. On CPUs it returns `on_cpu`."""

    def method(self: DeepSpeedAccelerator, device_index: int | None = None) -> Any:
        return on_cpu if self._kind == "cpu" else function(device_index)

    return method


class DeepSpeedAccelerator:
    """The compute device. Functions that only other devices have do nothing, or return 0.

    One class, because scripts call these names of DeepSpeed on one object.
    """

    def __init__(self) -> None:
        found = torch_accelerator.current_accelerator(check_available=True)
        self._kind = "cpu" if found is None else found.type
        self._name = self._kind  # scripts read it

    def __getattr__(self, name: str) -> Any:
        if name in _TENSORS:
            return functools.partial(torch.tensor, dtype=_TENSORS[name], device=self._kind)
        raise MissingNameError(
            f"get_accelerator() of `infinity run` has no {name!r}; use torch.accelerator, or "
            f"torch.{vars(self).get('_kind')}"
        )

    # Which device

    def device_name(self, device_index: int | None = None) -> str:
        """The kind of device, "cpu" or "cuda", with its number if one is given."""
        has_number = device_index is not None and self._kind != "cpu"
        return f"{self._kind}:{device_index}" if has_number else self._kind

    def current_device(self) -> int:
        """The number of the current device."""
        return 0 if self._kind == "cpu" else torch_accelerator.current_device_index()

    def current_device_name(self) -> str:
        """The current device, as torch takes it."""
        return self.device_name(self.current_device())

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        """A context in which that device is the current one."""
        if self._kind == "cpu" or device_index is None:
            return nullcontext()
        return torch_accelerator.device_index(device_index)

    def set_device(self, device_index: int) -> None:
        """Make that device the current one."""
        if self._kind != "cpu":
            torch_accelerator.set_device_index(device_index)

    def device_count(self) -> int:
        """The number of devices. Without a GPU, the number of CPUs, because each may run a rank."""
        if self._kind == "cpu":
            return len(os.sched_getaffinity(0))
        return torch_accelerator.device_count()

    def is_synchronized_device(self) -> bool:
        """Whether operations are done when their call returns."""
        return self._kind == "cpu"

    handles_memory_backpressure = resolves_data_dependency = is_synchronized_device
    use_host_timers = is_synchronized_device

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on such a device."""
        return tensor.device.type == self._kind

    def communication_backend_name(self) -> str:
        """The backend of torch.distributed."""
        return "nccl" if self._kind == "cuda" else "gloo"

    def visible_devices_envs(self) -> list[str]:
        """The environment variables that choose the devices of a process."""
        return [] if self._kind == "cpu" else [f"{self._kind.upper()}_VISIBLE_DEVICES"]

    # Abilities

    def is_triton_supported(self) -> bool:
        """Whether kernels of Triton run."""
        return self._kind != "cpu"

    is_available = is_bf16_supported = is_fp16_supported = is_fp64_supported = _always(True)
    preferred_dtype = _always(torch.bfloat16)
    get_compile_backend = _always("inductor")
    is_current_stream_capturing = _always(False)

    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes of parameters."""
        return [torch.float32, torch.float16, torch.bfloat16]

    # Time, memory and random numbers

    synchronize = _of_torch(torch_accelerator.synchronize)
    current_stream = _of_torch(torch_accelerator.current_stream)
    memory_allocated = _of_torch(torch_accelerator.memory_allocated, 0)
    max_memory_allocated = _of_torch(torch_accelerator.max_memory_allocated, 0)
    memory_reserved = memory_cached = _of_torch(torch_accelerator.memory_reserved, 0)
    max_memory_reserved = max_memory_cached = _of_torch(torch_accelerator.max_memory_reserved, 0)
    reset_peak_memory_stats = _of_torch(torch_accelerator.reset_peak_memory_stats)
    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def empty_cache(self) -> None:
        """Free memory that torch caches."""
        if self._kind != "cpu":
            torch_accelerator.empty_cache()

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """The statistics that torch has of its memory."""
        return {} if self._kind == "cpu" else dict(torch_accelerator.memory_stats(device_index))

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device, or of the host without a GPU."""
        return self._memory(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        """Free bytes of the device, or of the host without a GPU."""
        return self._memory(device_index)[0]

    def _memory(self, device_index: int | None) -> tuple[int, int]:
        if self._kind != "cpu":
            return torch_accelerator.get_memory_info(device_index)
        host = read_host()
        return (0, 0) if host is None else (host.free, host.total)

    def stream(self, stream: torch.Stream | None) -> AbstractContextManager[Any]:
        """A context in which `stream` is the current one."""
        return nullcontext() if stream is None else stream

    def default_stream(self, device_index: int | None = None) -> Any:
        """The default stream of a device. None on CPUs."""
        found = getattr(getattr(torch, self._kind), "default_stream", None)
        return None if found is None else found(device_index)

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call `callback` at once, and return its result."""
        return callback()

    @property
    def Stream(self) -> Any:
        """The class of streams. On CPUs a function that returns None."""
        return (lambda *_, **__: None) if self._kind == "cpu" else torch.Stream

    @property
    def Event(self) -> Any:
        """The class of events. On CPUs a function that returns None."""
        return (lambda *_, **__: None) if self._kind == "cpu" else torch.Event

    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    initial_seed = staticmethod(torch.initial_seed)
    random = _always(torch.random)

    def default_generator(self, device_index: int = 0) -> torch.Generator:
        """The generator of a device."""
        generators = getattr(getattr(torch, self._kind), "default_generators", None)
        return torch.default_generator if generators is None else generators[device_index]

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """The state of the generator of the CPU."""
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set a state of `get_rng_state`."""
        torch.set_rng_state(new_state)

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        """Does nothing: `INFINITY_NVTX` marks ranges."""

    def range_pop(self, domain: Any = None) -> None:
        """Does nothing; see `range_push`."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in pinned memory. True without a GPU."""
        return self._kind == "cpu" or tensor.is_pinned()

    def pin_memory(
        self,
        tensor: torch.Tensor,
        align_bytes: int = 1,
        make_copy: bool = True,
        match_shape: bool = True,
    ) -> torch.Tensor:
        """The tensor in pinned memory, or itself without a GPU."""
        return tensor if self._kind == "cpu" else tensor.pin_memory()


_TENSORS = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}
"""The functions that make a tensor of values on the compute device, with their dtypes."""


@functools.cache
def get_accelerator() -> DeepSpeedAccelerator:
    """The compute device of this process."""
    return DeepSpeedAccelerator()


def is_current_accelerator_supported() -> bool:
    """True: models run on any device of torch that wrap takes."""
    return True
