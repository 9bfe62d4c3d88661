"""The digest of an item, computed at memory speed."""

from __future__ import annotations

import torch

from infinity import native

ALGORITHM = "crc32c"
"""Its name in `infinity.json`. It detects accidental damage. It does not protect against deliberate
changes, because an attacker can change the index too."""


def crc32c(data: torch.Tensor, before: int = 0) -> int:
    """The CRC32C of contiguous `data` on the host. `before` is the CRC32C of the bytes before
    `data`."""
    return native.aio().crc32c(data.data_ptr(), data.nbytes, before)


def as_text(value: int) -> str:
    """Eight hexadecimal digits, as `infinity.json` stores it."""
    return f"{value:08x}"
