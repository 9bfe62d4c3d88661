"""Code asks a tier: outside of the file that defines tiers, no comparison names one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity.config import Config
from infinity.tier import CPU, GPU, NVME, TIERS, Tier

ROOT = Path(__file__).parents[2]

RECORDS = {"GPU", "CPU", "NVME"}

# The strings of a torch device and of other files' formats, which are no tiers.
OTHER_WORDS: dict[str, set[str]] = {
    "cli/config.py": {"name == 'nvme'"},  # the field with the directories
    "config.py": {"'nvme' in values"},  # the same
    "deepspeed/settings.py": {
        "'nvme' not in values.below('infinity')",  # the same
        "values['zero_optimization.offload_param.device'] == 'nvme'",  # a device of DeepSpeed
    },
    "deepspeed/offload_devices.py": {"place not in ('cpu', 'none')", "place == 'cpu'"},
    "weights/pretrained.py": {"set(map(str, options.device_map.values())) != {'cpu'}"},
}


def words_of(node: ast.expr) -> set[str]:
    """The strings and records in an operand of a comparison, or in a key of a table."""
    if isinstance(node, ast.Constant):
        return {node.value} if isinstance(node.value, str) else set()
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return {word for each in node.elts for word in words_of(each)}
    if isinstance(node, ast.Name):
        return {node.id} & RECORDS
    if isinstance(node, ast.Attribute):
        return {node.attr} & RECORDS
    return set()


def is_of_torch(comparison: ast.Compare) -> bool:
    """Whether a comparison with "cpu" is about the type of a torch device."""
    left = ast.unparse(comparison.left)
    words = {word for each in comparison.comparators for word in words_of(each)}
    return left.endswith((".type", "kind", "device", "device']")) or "cuda" in words


def comparisons(tree: ast.AST) -> Iterator[str]:
    """The comparisons with the name or the record of a tier, and tables that one is looked up
    in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            words = {word for each in (node.left, *node.comparators) for word in words_of(each)}
            if words & (RECORDS | {"gpu", "nvme"}) or ("cpu" in words and not is_of_torch(node)):
                yield ast.unparse(node)
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict):
            keys = {word for each in node.value.keys if each for word in words_of(each)}
            if keys & (RECORDS | set(TIERS)):
                yield ast.unparse(node)
        elif isinstance(node, ast.MatchValue) and words_of(node.value) & (RECORDS | set(TIERS)):
            yield ast.unparse(node)


def test_no_file_compares_the_name_of_a_tier() -> None:
    package = ROOT / "infinity"
    found = {
        str(path.relative_to(package)): set(comparisons(ast.parse(path.read_text("utf-8"))))
        for path in package.rglob("*.py")
    }
    assert {path: each for path, each in found.items() if each} == OTHER_WORDS


@pytest.mark.parametrize(
    "source",
    [
        "block.tier == 'nvme'",
        "tier in ('gpu', 'cpu')",
        "block.tier is NVME",
        "block.tier == tier.CPU",
        "'nvme' in (config.parameters, config.optimizer)",
        "{'gpu': 1, 'nvme': 2}[tier]",
        "match tier:\n    case 'gpu': pass",
    ],
)
def test_a_comparison_is_found(source: str) -> None:
    assert list(comparisons(ast.parse(source)))


@pytest.mark.parametrize("source", ["device.type == 'cpu'", "'gpu' * 2", "TIERS['gpu'].is_host"])
def test_another_use_is_no_comparison(source: str) -> None:
    assert not list(comparisons(ast.parse(source)))


def test_the_answers_of_each_tier() -> None:
    assert {
        tier: (each.is_device, each.is_host, each.is_drive) for tier, each in TIERS.items()
    } == {
        "gpu": (True, False, False),
        "cpu": (False, True, False),
        "nvme": (False, False, True),
    }


@pytest.mark.parametrize("tier", TIERS.values(), ids=str)
def test_one_processor_or_a_buffer_uses_a_block(tier: Tier) -> None:
    assert [tier.is_device, tier.is_host, tier.is_drive].count(True) == 1


def test_the_cpu_addresses_the_device_only_where_they_share_memory() -> None:
    assert [tier for tier in TIERS.values() if tier.is_addressed(False)] == [CPU]
    assert [tier for tier in TIERS.values() if tier.is_addressed(True)] == [GPU, CPU]
    assert not NVME.is_addressed(True)


@pytest.mark.parametrize("tier", TIERS.values(), ids=str)
def test_the_configuration_and_texts_have_the_name(tier: Tier) -> None:
    config = Config(parameters=tier.name, optimizer=tier.name, nvme=("/",))
    assert config.parameters == config.optimizer == f"{tier}" == tier.name
    assert TIERS[config.parameters] is tier
