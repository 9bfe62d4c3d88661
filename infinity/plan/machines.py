"""Machines that a plan knows by name.

The data sheets of the parts give peaks. A program reaches less, so a plan takes shares of them:
`_COMPUTE` of the dense bf16 operations of a GPU with fp32 sums, `_MEMORY` of the bandwidth of its
memory, `_LINK` of PCI Express each way, and `_HOST` of host memory. These shares are round figures,
and the same for all machines that have no figures of their own. Host memory and drives are a choice
where a machine may have any: the first line of each says so.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

from infinity.errors import ConfigError
from infinity.plan.hardware import DriveSpec, Hardware, read_hardware

_GB, _GIB = 10**9, 1 << 30
_TB = 10**12
_COMPUTE, _MEMORY, _LINK, _HOST = 0.45, 0.9, 0.7, 0.5
_PCIE4, _PCIE5 = 31.5e9, 63e9
"""Bytes per second of 16 lanes each way (PCI-SIG)."""
_CONSUMER = DriveSpec(6.5e9, 3.4e9, 2 * _TB, endurance=1_200 * _TB)
"""A drive of 2 TB with 7.4 and 6.9 GB/s and 1,200 TBW in its data sheet (Samsung 990 PRO); writes
past its cache."""
_DATA_CENTER = DriveSpec(6.5e9, 4e9, 3_840 * _GB, endurance=7_000 * _TB)
"""A drive of 3.84 TB with 6.5 and 4 GB/s and one drive write per day for five years (Samsung PM9A3:
7.0 PB)."""
_INSTANCE = DriveSpec(3e9, 1.5e9, 3_840 * _GB)
"""A drive of a rented machine. Its rates are assumed; `infinity bench io` measures them."""


def _machine(
    name: str, gpu: tuple[float, float, int], host: tuple[int, float], lanes: float, **more: object
) -> Hardware:
    """A machine with GPUs of `gpu` (peak operations, bytes per second and bytes of memory), `host`
    (bytes, peak bytes per second) and PCI Express."""
    operations, bandwidth, memory = gpu
    return Hardware(
        name,
        host_memory=host[0],
        flops=_COMPUTE * operations,
        gpu_memory=memory,
        gpu_bandwidth=_MEMORY * bandwidth,
        link=_LINK * lanes,
        memory_bandwidth=_HOST * host[1],
        **more,  # type: ignore[arg-type]
    )


_A100 = (312e12, 2.039e12, 80 * _GB)  # NVIDIA A100 80GB data sheet (SXM)
_H100 = (989e12, 3.35e12, 80 * _GB)  # NVIDIA H100 data sheet (SXM)
_L40S = (362e12, 864e9, 48 * _GB)  # NVIDIA L40S data sheet
_RTX5090 = (209.5e12, 1.792e12, 32 * _GB)  # NVIDIA RTX Blackwell GPU architecture, appendix A
_TWO_CHANNELS = 89.6e9  # DDR5-5600, 2 channels of 8 bytes
_SERVER = 614e9  # two sockets with 8 channels of DDR5-4800

MACHINES: dict[str, Hardware] = {
    each.name: each
    for each in (
        # ZeRO-Infinity (2104.07857), figure 2b: all 16 GPUs at work, 25 GB/s of NVMe for a node
        Hardware(
            "dgx2",
            host_memory=3 * _TB // 2,
            flops=70e12,
            gpu_memory=32 * _GB,
            gpu_bandwidth=750e9,
            link=3e9,
            memory_bandwidth=100e9,
            drives=(DriveSpec(3.2e9, 3.2e9, 3_500 * _GB),) * 8,
            gpus=16,
            network=70e9,
        ),
        # A desktop with 64 GB and one drive. NVIDIA Ada GPU architecture, appendix A: 165.2 TFLOPS,
        # 1,008 GB/s; round figures of what programs reach
        Hardware(
            "rtx4090",
            host_memory=64 * _GB,
            flops=120e12,
            gpu_memory=24 * _GB,
            gpu_bandwidth=900e9,
            link=22e9,
            memory_bandwidth=45e9,
            drives=(_CONSUMER,),
        ),
        # A desktop with 96 GB and one drive
        _machine("rtx5090", _RTX5090, (96 * _GB, _TWO_CHANNELS), _PCIE5, drives=(_CONSUMER,)),
        # NVIDIA DGX Spark: 128 GB for CPU and GPU at 273 GB/s, 4 TB; 1 PFLOPS of sparse FP4 is 125
        # TFLOPS of dense bf16, and copies stay in that memory
        _machine(
            "gb10",
            (125e12, 273e9, 128 * _GB),
            (128 * _GB, 273e9),
            100e9,
            drives=(DriveSpec(6.5e9, 3.4e9, 4 * _TB),),
        ),
        # A server with one GPU, 1 TB and two drives
        _machine("h100", _H100, (1 * _TB, _SERVER), _PCIE5, drives=(_DATA_CENTER,) * 2),
        # A server with one GPU, 2 TB and four drives: round figures of what programs reach
        Hardware(
            "h200",
            host_memory=2 * _TB,
            flops=400e12,
            gpu_memory=141 * _GB,
            gpu_bandwidth=4e12,
            link=50e9,
            memory_bandwidth=300e9,
            drives=(_DATA_CENTER,) * 4,
        ),
        # NVIDIA DGX H200: 8 GPUs, 2 TB, 8 drives of 3.84 TB
        Hardware(
            "dgx-h200",
            host_memory=2 * _TB,
            flops=400e12,
            gpu_memory=141 * _GB,
            gpu_bandwidth=4e12,
            link=40e9,
            memory_bandwidth=300e9,
            drives=(_DATA_CENTER,) * 8,
            gpus=8,
            network=50e9,
        ),
        # Amazon EC2 instance types (aws.amazon.com/ec2/instance-types): g6e.4xlarge has an L40S,
        # 128 GiB and 600 GB; p4de.24xlarge 8 A100 of 80 GB, 1,152 GiB and 8 drives of 1 TB;
        # p5.48xlarge 8 H100, 2 TiB and 8 drives of 3.84 TB
        _machine(
            "aws-g6e",
            _L40S,
            (128 * _GIB, 153e9),
            _PCIE4,
            drives=(DriveSpec(1.5e9, 0.75e9, 600 * _GB),),
        ),
        _machine(
            "aws-p4de",
            _A100,
            (1_152 * _GIB, 409e9),
            _PCIE4,
            drives=(DriveSpec(2e9, 1e9, 1 * _TB),) * 8,
            gpus=8,
            network=200e9,
        ),
        _machine(
            "aws-p5",
            _H100,
            (2_048 * _GIB, _SERVER),
            _PCIE5,
            drives=(_INSTANCE,) * 8,
            gpus=8,
            network=300e9,
        ),
    )
}
"""The machines, by name. Their memory is all of it: a plan leaves the reserve of "auto" budgets."""


_WITHOUT_CUDA = (
    "mac",
    "apple",
    "imac",
    "m1",
    "m2",
    "m3",
    "m4",
    "m5",
    "mi2",
    "mi3",
    "radeon",
    "arc",
)
"""How names of computers of Apple, and of GPUs of AMD and Intel, start."""


def find_hardware(name: str) -> Hardware:
    """The machine called `name`: one of `MACHINES`, in any case, or a JSON or TOML file with the
    fields of `Hardware`.

    Raises `ConfigError` with the known names, for a machine that cannot run the engine, and like
    `read_hardware`.
    """
    path = Path(name)
    if path.is_file():
        return read_hardware(path)
    plain = re.sub(r"[\s_-]+", "", name.casefold())
    found = {re.sub("-", "", each): each for each in MACHINES}
    if plain in found:
        return MACHINES[found[plain]]
    if plain.startswith(_WITHOUT_CUDA):
        raise ConfigError(
            f"{name} has no CUDA, and the engine runs on Linux; plan for a machine with a GPU of "
            "NVIDIA, or describe a Linux machine whose CPU computes in a file without gpu_memory"
        )
    near = get_close_matches(name, MACHINES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ConfigError(
        f'unknown machine {name!r}{hint} It is a JSON or TOML file, "this", or one of: '
        f"{', '.join(MACHINES)}"
    )
