"""What placements and kernels this machine has."""

from __future__ import annotations

from infinity import native

PAGE = 4096
TIERS = ("gpu", "cpu", "nvme")
ISAS = [isa for isa in ("scalar", "avx2", "avx512") if native.cpu_adam().has_isa(isa)]
IO_ENGINES = ["posix", *(["io_uring"] if native.aio().io_uring_available()[0] else [])]
