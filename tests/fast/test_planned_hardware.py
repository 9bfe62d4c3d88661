"""Machines that people describe: what is read, and what each mistake is told."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from infinity.errors import ConfigError
from infinity.plan.hardware import DriveSpec
from infinity.plan.machines import MACHINES, find_hardware

MACHINE = {
    "host_memory": "64GB",
    "flops": 1e14,
    "gpu_memory": "24GiB",
    "drives": [{"read": 6e9, "write": 3e9, "capacity": "2TB", "endurance": "1200TB"}],
    "gpus": 2,
}


def test_a_description(tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    path.write_text(json.dumps(MACHINE))
    found = find_hardware(str(path))
    assert (found.name, found.host_memory, found.gpu_memory) == ("box", 64 * 10**9, 24 << 30)
    assert found.drives == (DriveSpec(6e9, 3e9, 2 * 10**12, 1.2e15),)
    assert found.ranks == 2 and not found.unified


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
def test_toml(tmp_path: Path) -> None:
    path = tmp_path / "cpu.toml"
    path.write_text('host_memory = "16GiB"\nflops = 1e11\n[[drives]]\nread = 2e9\nwrite = 1e9\n'
                    'capacity = "100GB"\n')  # fmt: skip
    found = find_hardware(str(path))
    assert found.unified and found.capacity == 10**11


@pytest.mark.parametrize("name", MACHINES)
def test_presets(name: str) -> None:
    assert find_hardware(name).name == name
    assert find_hardware(name.upper().replace("-", " ")).name == name


def test_a_description_in_the_pages(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    page = (pytestconfig.rootpath / "docs" / "plan.md").read_text()
    found = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert found
    for number, text in enumerate(found):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        assert find_hardware(str(path)).drives[0].endurance == 7 * 10**15


@pytest.mark.parametrize("name", ["macbook", "MacBook Pro M4", "m3-max", "mi300x"])
def test_a_machine_without_cuda_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="has no CUDA, and the engine runs on Linux; plan for"):
        find_hardware(name)


def test_a_gpu_that_computes_in_host_memory() -> None:
    assert find_hardware("gb10").one_pool and not find_hardware("h100").one_pool


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flops": None}, "flops is None, not a number"),
        ({"flops": -1}, "flops is -1, and has to be positive"),
        ({"memory": 3}, "unknown field 'memory'; the fields are name, host_memory"),
        ({"host_memory": "much"}, "host_memory: 'much' is not a number of bytes"),
        ({"drives": 3}, "drives is a list of tables with read, write and capacity"),
        ({"drives": [{"read": 1}]}, "no 'write' of a drive; the fields are read, write"),
        ({"gpu_memory": None}, "gpus is 2, but gpu_memory is missing"),
        ({"together": 1.5}, "together is 1.5, and cannot be more than 1"),
        ({"nodes": 0}, "nodes is 0, and has to be positive"),
        ({"flops": 1e24}, "flops is 1e+24, and has to be less than 1e+24"),
        ({"flops": float("nan")}, "flops is nan, and has to be positive"),
        ({"host_memory": float("inf")}, "host_memory is inf, and has to be less than 1e+24"),
    ],
)
def test_mistakes(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    path.write_text(json.dumps(MACHINE | changes))
    with pytest.raises(ConfigError) as caught:
        find_hardware(str(path))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_what_is_no_description(tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        find_hardware(str(path))
    with pytest.raises(ConfigError, match=r"unknown machine 'dgx'.*did you mean 'dgx2'"):
        find_hardware("dgx")
