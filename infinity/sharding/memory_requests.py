"""Functions of torch that take the memory of a tensor without a call to its class. This module
makes them refuse lazy tensors, which have no memory."""

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
    `ShardedParameterError`. They behave as before for all other tensors."""
    library = torch.library.Library("aten", "IMPL")
    library.impl(_COMPATIBLE.name().removeprefix("aten::"), _takes_data, _WRAPPERS.name)
    _kernels.append(library)
    modules: list[Any] = [torch, torch.utils.dlpack]
    for module in modules:
        module.to_dlpack = functools.partial(_to_dlpack, module.to_dlpack)


def _takes_data(tensor: torch.Tensor, given: torch.Tensor) -> bool:
    """The check at the start of `tensor.data = given`, if one of them has a Python class."""
    if isinstance(given, LazyTensor):
        given.refuse_memory(".data of another tensor")
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_WRAPPERS)):
        return bool(_COMPATIBLE(tensor, given))


def _to_dlpack(plain: Any, tensor: Any) -> Any:
    if isinstance(tensor, LazyTensor):
        tensor.refuse_memory("to_dlpack")
    return plain(tensor)
