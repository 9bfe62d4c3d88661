"""Tests are in folders by subject; what several files need is in `tests/support/`."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]
FROM_A_TEST = re.compile(
    r"^\s*(?:from|import) (?:[\w.]+\.)?(?:test_\w+|conftest)\b.*", re.MULTILINE
)


def test_nothing_is_imported_from_a_test_or_from_conftest() -> None:
    found = {
        str(path.relative_to(TESTS)): FROM_A_TEST.findall(path.read_text())
        for path in TESTS.rglob("*.py")
    }
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_every_test_is_in_a_folder() -> None:
    assert [path.name for path in TESTS.glob("test_*.py")] == []


# Private names

FOREIGN = re.compile(
    r"^(accelerate|torch|os|sys)\.|\._(dist_run|launch_procs|replace|fields|modules|parameters|\w+_hooks|tmp_path_factory|local_tensor|buffered_inputs)$"
)
"""What is private of other libraries and of the standard library, or only looks private."""

LEFT: dict[str, int] = {
    "bench/test_bench_io.py": 2,
    "cli/test_cli.py": 3,
    "cli/test_odd_data.py": 1,
    "cli/test_resume.py": 1,
    "cli/test_torchrun.py": 4,
    "engine/test_files.py": 6,
    "engine/test_hostile_files.py": 5,
    "engine/test_waits.py": 5,
    "engine/test_wrap.py": 1,
    "fast/test_trace.py": 3,
    "modules/test_activations.py": 16,
    "modules/test_vertical.py": 4,
    "nvme/test_nvme.py": 2,
    "optim/test_delayed_updates.py": 3,
    "optim/test_foreign_optimizers.py": 1,
    "optim/test_loss_scaling.py": 2,
    "parity/test_compile.py": 1,
    "parity/test_other_tools.py": 1,
    "placement/test_cache.py": 1,
    "random_programs/mutations.py": 1,
    "ranks/test_rank_faults.py": 1,
    "ranks/test_tensor_parallel.py": 1,
    "tiers/test_gpu_direct.py": 1,
    "tiers/test_nvme_shares.py": 2,
    "tiers/test_nvme_tier.py": 3,
    "tiers/test_store.py": 8,
}
"""How many private names each file still reads. `support/probe.py` may know those of an engine;
numbers here only go down."""


def private_names(path: Path) -> list[str]:
    """What is read below an underscore of anything but `self` and `cls`."""
    return [
        text
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        if (text := ast.unparse(node))
        and ast.unparse(node.value) not in ("self", "cls")
        and not FOREIGN.search(text)
    ]


def test_private_names_are_read_by_the_probe_only() -> None:
    paths = [
        path
        for path in sorted(TESTS.rglob("*.py"))
        if path.name != "probe.py" and "._" in path.read_text()
    ]
    found = Counter(
        {path.relative_to(TESTS).as_posix(): len(private_names(path)) for path in paths}
    )
    assert {name: count for name, count in found.items() if count} == LEFT, (
        "ask `support/probe.py`, or lower the number in LEFT"
    )


def test_only_the_probe_reads_private_names_of_an_engine() -> None:
    private = re.compile(r"\bengine(\(\w*\))?\._[a-z]")
    paths = [path for path in TESTS.rglob("*.py") if path.name not in ("probe.py", "test_tests.py")]
    assert [
        str(path.relative_to(TESTS)) for path in paths if private.search(path.read_text())
    ] == []
