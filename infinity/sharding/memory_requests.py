"""Functions of torch that take the memory of a tensor and ask its class nothing: they refuse lazy
tensors, which have none."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.utils.dlpack

from infinity.sharding.lazy_tensor import LazyTensor

_COMPATIBLE: Any = torch.ops.aten._has_compatible_shallow_copy_type.default
_WRAPPERS = torch._C.DispatchKey.PythonTLSSnapshot  # a key that Python's tensor classes have
_kernels: list[torch.library.Library] = []  # torch drops the kernels of a library that is collected


@functools.cache
def refuse_memory_requests() -> None:
    """From now on `plain.data = lazy` and `torch.utils.dlpack.to_dlpack(lazy)` raise
    `ShardedParameterError`. For all other tensors they do what they did."""
    library = torch.library.Library("aten", "IMPL")
    library.impl(_COMPATIBLE.name().removeprefix("aten::"), _takes_data, _WRAPPERS.name)
    _kernels.append(library)
    modules: list[Any] = [torch, torch.utils.dlpack]
    for module in modules:
        module.to_dlpack = functools.partial(_to_dlpack, module.to_dlpack)


def _takes_data(tensor: torch.Tensor, given: torch.Tensor) -> bool:
    """What `tensor.data = given` asks first, of which one is of a class of Python's."""
    if isinstance(given, LazyTensor):
        given.refuse_memory(".data of another tensor")
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_WRAPPERS)):
        return bool(_COMPATIBLE(tensor, given))


def _to_dlpack(plain: Any, tensor: Any) -> Any:
    if isinstance(tensor, LazyTensor):
        tensor.refuse_memory("to_dlpack")
    return plain(tensor)
