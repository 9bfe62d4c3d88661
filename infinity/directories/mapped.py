"""Tensors in files without a name. They are ordinary tensors that take no memory of their own.

[Note: mapped tensors]
A state dict of the size of the model would fill host memory. So each tensor is written to a file of
its own, and mapped. The file is in the first NVMe directory, or without one where `tempfile` puts
files (`TMPDIR`). Its pages are in the page cache. The kernel drops them when it needs memory, and a
read brings them back. A file has no name, so its space is free again when its tensor is gone, also
after a kill. Each tensor has a storage of its own, because `save_pretrained` and safetensors copy
tensors that share one. Tensors below `LEAST_BYTES` are copied to memory. All biases and norms of a
large model take a few MiB. A file for each of them makes a state dict of a thousand tensors nine
times as slow.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from pathlib import Path

import torch

from infinity.directories.directory import file_limit, limit_text
from infinity.errors import FileError
from infinity.quantities import format_bytes

LEAST_BYTES = 64 << 10
"""Smaller tensors lie in memory."""
_PIECE = 64 << 20  # bytes of one write


def mapped(tensor: torch.Tensor, directory: Path | None) -> torch.Tensor:
    """A copy of `tensor`, plain and on the host, in an unnamed file in `directory`. A small copy is
    in memory.

    Raises `FileError` that names the directory if it has no space.
    """
    if tensor.nbytes < max(LEAST_BYTES, 1):
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    where = str(directory or tempfile.gettempdir())
    try:
        with tempfile.TemporaryFile(dir=where) as file:
            for piece in flat.split(_PIECE):
                file.write(memoryview(piece.numpy()))
            file.flush()
            path = f"/proc/self/fd/{file.fileno()}"
            storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=flat.numel())
    except OSError as error:
        most = file_limit() if error.errno == errno.EFBIG else None
        elsewhere = "" if directory else ", or set TMPDIR to another directory"
        way_out = f"free some of its space{elsewhere}" if most is None else limit_text(most)
        size = format_bytes(flat.numel())
        text = f"takes no file of {size} for the copy of a tensor ({error.strerror}); {way_out}"
        raise FileError(error.errno or 0, where, text) from error
    made = torch.empty(0, dtype=tensor.dtype)
    return made.set_(storage, 0, tensor.shape)  # type: ignore[call-overload]


def mapped_range(descriptor: int, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """The `nbytes` of an open file from `offset` on, mapped as a tensor (n,) of `dtype`. Closes the
    descriptor. Writes to the tensor do not reach the file."""
    begin = offset - offset % mmap.ALLOCATIONGRANULARITY
    try:
        memory = mmap.mmap(
            descriptor, offset - begin + nbytes, access=mmap.ACCESS_COPY, offset=begin
        )
    finally:
        os.close(descriptor)
    found = torch.frombuffer(memory, dtype=torch.uint8, offset=offset - begin, count=nbytes)
    if found.data_ptr() % dtype.itemsize:
        found = found.clone()
    return found.view(dtype)
