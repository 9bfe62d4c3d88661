"""Refuses system calls to this process, as the seccomp profile of a container does."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_SET_SECCOMP, _NO_NEW_PRIVILEGES, _FILTER_MODE = 22, 38, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _OFFSET = 0, 16 + 5 * 8  # in `struct seccomp_data`: the call, the low half of argument 5

CALLS = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "mmap": {"x86_64": 9}.get(platform.machine(), 222),
}
"""Their numbers here."""
ENTRIES = 0x10000000
"""The offset at which a ring maps its entries (`IORING_OFF_SQES`)."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def refuse(call: str, code: int) -> None:
    """From now on `call` fails with the errno `code`, in this thread and in those that it starts;
    mmap does only for the entries of a ring. Raises `OSError` where the kernel takes no filter."""
    checks = [(_NUMBER, CALLS[call])]
    if call == "mmap":
        checks.append((_OFFSET, ENTRIES))
    steps = []
    for number, (at, value) in enumerate(checks):
        past = 2 * (len(checks) - number) - 1
        steps += [(_LOAD, 0, 0, at), (_JUMP_IF_EQUAL, 0, past, value)]
    steps += [(_RETURN, 0, 0, _ERRNO | code), (_RETURN, 0, 0, _ALLOW)]
    program = _Program(len(steps), b"".join(struct.pack("HBBI", *step) for step in steps))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (_NO_NEW_PRIVILEGES, 1, 0, 0, 0),
        (_SET_SECCOMP, _FILTER_MODE, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "seccomp")
