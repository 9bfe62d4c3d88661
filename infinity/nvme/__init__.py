"""Reads and writes tensors in files at the speed of the drive: one or many, blocking or in the
background, as raw bytes or as a safetensors file.

    infinity.nvme.write(weights, "/mnt/nvme0/weights.bin")        # blocking
    infinity.nvme.read(weights, "/mnt/nvme0/weights.bin")         # fills `weights`

    ticket = infinity.nvme.read_async(weights, path, offset=1 << 20)
    ...                                                           # the drive works meanwhile
    ticket.wait()

    infinity.nvme.write_many([(tensor, path, offset), ...])       # one call, one wait
    infinity.nvme.save({"weight": weights}, "model.safetensors")  # a safetensors file
    tensors = infinity.nvme.load("model.safetensors")             # reads any safetensors file

The functions share one `Io`, which the first call makes. Make an `Io` of your own to choose the
engine, depth and sizes.

[Note: what every call promises]
Which thread?        Any thread, also several at once. Native threads do the I/O without the GIL.
Does it block?       The `_async` forms return when every request is queued. The other forms return
                     when the bytes have moved. CUDA tensors pass through pinned host memory in
                     pieces, which the calling thread copies on its current stream: for them the
                     `_async` forms block too.
Queue full?          The call blocks until there is room. A thread can be ahead of the drive by
                     about 2 * depth requests.
What must live?      Nothing: the I/O keeps its tensors and files until the bytes have moved, even
                     if the caller drops the ticket. Until then the content of a tensor being read
                     is undefined, and a tensor being written must not change.
What moves?          Exactly the tensor's bytes, as they lie in memory (little-endian). Any offset,
                     address and length works. A write changes no other byte of the file. It
                     creates a missing file, and extends a file that is too short. Reads and writes
                     in flight at the same time must not overlap.
Durable?             `save` is, when it returns. After `write` the drive has accepted the bytes, but
                     only an os.fsync of the file makes them survive a power cut.
Errors?              Before anything moves: `TypeError` or `ValueError` for a wrong tensor, offset
                     or path. Before the file is made or written: `FileError` for a file that cannot
                     be opened or has no room. It is also the `OSError` that Python has for the
                     errno (`FileNotFoundError`, ...). Tensors before it in the same call may have
                     moved. I/O that stopped early, also at the end of the file: `NvmeError` with
                     path, offset, errno, asked and done. Of several, the first in the call's order.
Forked child?        The child makes an `Io` of its own. The parent's `Io` and tickets raise
                     `ValueError` there. Wait for tickets before a fork.
"""

from infinity.nvme.functions import (
    drain,
    load,
    read,
    read_async,
    read_many,
    read_many_async,
    save,
    write,
    write_async,
    write_many,
    write_many_async,
)
from infinity.nvme.io import Io, empty
from infinity.nvme.ticket import Ticket

__all__ = [
    "Io",
    "Ticket",
    "drain",
    "empty",
    "load",
    "read",
    "read_async",
    "read_many",
    "read_many_async",
    "save",
    "write",
    "write_async",
    "write_many",
    "write_many_async",
]
