"""Tensors on NVMe: read and write them at the speed of the drive, many at once, in the background,
or as one file.

    infinity.nvme.write(weights, "/mnt/nvme0/weights.bin")        # blocking
    infinity.nvme.read(weights, "/mnt/nvme0/weights.bin")         # fills `weights`

    ticket = infinity.nvme.read_async(weights, path, offset=1 << 20)
    ...                                                           # the drive works meanwhile
    ticket.wait()

    infinity.nvme.write_many([(tensor, path, offset), ...])       # one call, one wait
    infinity.nvme.save({"weight": weights}, "model.safetensors")  # a safetensors file
    tensors = infinity.nvme.load("model.safetensors")             # reads any safetensors file

The functions here use one `Io`, made when it is first needed; make your own to choose the engine,
depth and sizes.

[Note: what every call promises]
Which thread?        Any, also several at once. The I/O is done by native threads, without the GIL.
Does it block?       The `_async` forms return when all is queued, the others when all is on the
                     drive or in the tensor. A tensor on a CUDA device passes pinned host memory in
                     pieces, which the calling thread copies on its current stream: for these the
                     `_async` forms block too.
Queue full?          The call blocks until there is room: a thread can be ahead of the drive by
                     about 2 * depth requests.
How long must what   Nothing needs to be kept: tensors and files stay until their bytes have moved,
live?                also when the ticket is dropped. Until then the content of a tensor that is
                     read into is undefined, and one that is written must not change.
What moves?          Exactly the tensor's bytes, as they lie in memory (little-endian), at any
                     offset, address and length. A write changes no other byte of the file, creates
                     the file when there is none, and makes it as long as is needed, never shorter.
                     Writes and reads that are in flight together must not overlap.
Durable?             `save` is, when it returns. After `write` the bytes have left for the drive,
                     but only an os.fsync of the file makes sure that they survive a power cut.
Errors?              A tensor, offset or path that cannot be: `TypeError` or `ValueError`, before
                     anything has moved. A file that cannot be opened, or whose drive plainly has
                     no room for what is to be written: `FileError`, also an `OSError` as Python
                     has it (`FileNotFoundError`, ...), before the file is made or written; tensors
                     before it in the same call may have moved. I/O that stopped early, also at the
                     end of the file: `NvmeError` with path, offset, errno, asked and done; of
                     several, the first in order of the call.
Forked child?        A child makes an `Io` of its own; its parent's, and their tickets, refuse to be
                     used there. Wait for tickets before a fork.
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
