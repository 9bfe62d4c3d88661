"""What a user writes is either understood or refused with the key, the problem and what is
allowed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.config import Config, Tuning
from infinity.errors import ConfigError
from infinity.quantities import format_bytes, parse_bytes, round_up
from support.configs import config_of

KEYS = (
    "nvme, gpu_memory, cpu_memory, parameters, gradients, optimizer, activations, recompute, "
    "stage, precision, moment_precision, algorithm, accumulation, durability, deterministic, "
    "inference, tuning; and in tuning: "
    "nvme_memory, nvme_shares, cache, gpu_cache, activation_memory, "
    "partition_activations, gradient_precision, split_master, copy_on_write, update, "
    "delayed_after, collective_timeout, verify, poison, device, io_engine, gpu_direct, "
    "read_in_place, instruction_set, threads"
)
LEAST = {"nvme": "/mnt/nvme0", "gpu_memory": "1GiB", "cpu_memory": "4GiB"}
NOT_SHARES = "is neither 'measured' nor 'equal' nor a positive number for each directory"
NOT_BYTES = "is not a number of bytes; write for example 512MiB, 2GiB or 2000000000"
NEGATIVE = "is negative; write for example 512MiB, 2GiB or 2000000000"
NO_PATH = "is no directory; write a path, or a list of paths"
PART_OR_AUTO = "a part of what is free such as 80%, or 'auto'"


def make(**changes: Any) -> Config:
    return config_of(**(LEAST | changes))


def tuning(**changes: Any) -> Tuning:
    return make(**changes).tuning


def test_defaults_and_quantities() -> None:
    config = make(gpu_memory="1.5GiB", nvme_memory="2TB")
    assert (config.gpu_memory, config.cpu_memory, config.tuning.nvme_memory) == (
        3 << 29,
        4 << 30,
        2 * 10**12,
    )
    assert (config.parameters, config.gradients, config.optimizer) == ("nvme", "cpu", "nvme")
    assert config.nvme == (Path("/mnt/nvme0"),)
    assert tuning().nvme_memory is None
    assert tuning().nvme_shares == "measured"
    assert tuning(nvme=["a", "b"], nvme_shares=[3, 0.5]).nvme_shares == (3, 0.5)
    assert [tuning(cache=size).cache for size in ("auto", "2MiB", 0)] == ["auto", 2 << 20, 0]
    assert (make().activations, tuning().cache, tuning().activation_memory) == (
        "gpu",
        "auto",
        "auto",
    )
    assert tuning(activations="cpu", activation_memory="1MiB").activation_memory == 1 << 20


@pytest.mark.parametrize("nvme", ["a", Path("a"), ["a"], ("a",)])
def test_one_directory_may_be_written_without_a_list(nvme: Any) -> None:
    assert make(nvme=nvme).nvme == (Path("a"),)


def test_without_nvme_everything_may_live_in_memory() -> None:
    assert make(nvme=[], parameters="cpu", optimizer="cpu").nvme == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"gpu_memroy": 1},
            f"unknown config key 'gpu_memroy'; did you mean 'gpu_memory'? The keys are: {KEYS}",
        ),
        ({"zzz": 1}, f"unknown config key 'zzz'. The keys are: {KEYS}"),
        ({"parameters": "disk"}, "parameters: Input should be 'gpu', 'cpu' or 'nvme', not 'disk'"),
        ({"precision": 8}, "precision: Input should be 'auto', 'bf16', 'fp16' or 'fp32', not 8"),
        ({"gpu_memory": "much"}, f"gpu_memory: 'much' {NOT_BYTES}, {PART_OR_AUTO}"),
        ({"gpu_memory": True}, f"gpu_memory: True {NOT_BYTES}, {PART_OR_AUTO}"),
        ({"gpu_memory": 0.8}, f"gpu_memory: 0.8 {NOT_BYTES}, {PART_OR_AUTO}"),
        ({"cpu_memory": None}, f"cpu_memory: None {NOT_BYTES}, {PART_OR_AUTO}"),
        (
            {"cpu_memory": "100.5%"},
            "cpu_memory: 100.5% is more than all that is free; write at most 100%",
        ),
        ({"cpu_memory": "-1%"}, f"cpu_memory: '-1%' {NOT_BYTES}, {PART_OR_AUTO}"),
        ({"nvme_memory": 1.5}, f"nvme_memory: 1.5 {NOT_BYTES}"),
        (
            {"cpu_memory": -1},
            f"cpu_memory: -1 {NEGATIVE}, {PART_OR_AUTO}",
        ),
        ({"cache": "much"}, f"cache: 'much' {NOT_BYTES}, or 'auto'"),
        ({"gpu_cache": "all"}, f"gpu_cache: 'all' {NOT_BYTES}, or 'auto'"),
        (
            {"gpu_cache": 1, "update": "delayed"},
            (
                "config: update='delayed' keeps old parameters beside the new ones, which "
                "gpu_cache does not; set it to 0"
            ),
        ),
        ({"cache": -1}, f"cache: -1 {NEGATIVE}, or 'auto'"),
        ({"nvme": None}, f"nvme: None {NO_PATH}"),
        ({"nvme": ["a", 5]}, f"nvme: 5 {NO_PATH}"),
        ({"nvme": {"a": 1}}, f"nvme: a value of type dict {NO_PATH}"),
        ({"threads": 10**6}, "threads: Input should be less than or equal to 4096, not 1000000"),
        ({"nvme_shares": "fast"}, f"nvme_shares: 'fast' {NOT_SHARES}"),
        ({"nvme_shares": 2}, f"nvme_shares: 2 {NOT_SHARES}"),
        ({"nvme": ["a", "b"], "nvme_shares": [1, 0]}, f"nvme_shares: [1, 0] {NOT_SHARES}"),
        (
            {"nvme": ["a", "b"], "nvme_shares": (1, float("inf"))},
            f"nvme_shares: (1, inf) {NOT_SHARES}",
        ),
        ({"nvme": ["a", "b"], "nvme_shares": (1, "2")}, f"nvme_shares: (1, '2') {NOT_SHARES}"),
        (
            {"nvme": ["a", "b"], "nvme_shares": (2,)},
            "config: nvme_shares has 1 number, but nvme has 2 directories",
        ),
        ({"nvme_shares": (2, 1)}, "config: nvme_shares has 2 numbers, but nvme has 1 directory"),
        (
            {"activation_memory": "all"},
            (
                f"activation_memory: 'all' {NOT_BYTES}, or 'auto' for half of what homes "
                "leave of cpu_memory"
            ),
        ),
        (
            {"activation_memory": "1MiB"},
            (
                "config: activation_memory is for activations that are offloaded; set "
                "activations='cpu' or 'nvme', or leave it out"
            ),
        ),
        (
            {"nvme": [], "parameters": "gpu", "optimizer": "cpu", "activations": "nvme"},
            "config: activations on nvme, but no directory is given: set nvme=[...]",
        ),
        (
            {"cahce": 1},
            f"unknown config key 'cahce'; did you mean 'cache' in tuning? The keys are: {KEYS}",
        ),
        ({"threads": 0}, "threads: Input should be greater than or equal to 1, not 0"),
        ({"nvme": 3}, f"nvme: 3 {NO_PATH}"),
        ({"nvme": ""}, "nvme: a directory is empty text; write '.' for the current one"),
        ({"nvme": ["a", "b", "a"]}, "config: nvme names a directory twice: a, b, a"),
        (
            {"nvme": []},
            "config: parameters and optimizer on nvme, but no directory is given: set nvme=[...]",
        ),
        (
            {"nvme": [], "parameters": "gpu", "optimizer": "cpu", "gradients": "nvme"},
            "config: gradients on nvme, but no directory is given: set nvme=[...]",
        ),
        (
            {"gpu_memory": "x", "parameters": "y"},
            (
                f"gpu_memory: 'x' {NOT_BYTES}, {PART_OR_AUTO}; parameters: Input should be "
                "'gpu', 'cpu' or 'nvme', not 'y'"
            ),
        ),
    ],
)
def test_what_cannot_work_is_refused_with_one_sentence(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$") as caught:
        make(**changes)
    assert isinstance(caught.value, ValueError)


def test_a_directory_is_enough() -> None:
    config = Config(nvme="/mnt/nvme0")
    assert (config.parameters, config.gradients, config.optimizer) == ("nvme", "cpu", "nvme")
    assert (config.gpu_memory, config.cpu_memory) == ("auto", "auto")


def test_without_a_directory_states_are_at_home_in_host_memory() -> None:
    config = Config()
    assert (config.parameters, config.gradients, config.optimizer) == ("cpu", "cpu", "cpu")
    assert Config(parameters="gpu").optimizer == "cpu"
    with pytest.raises(ConfigError, match=r"^config: parameters on nvme, but no directory is g"):
        Config(parameters="nvme")


def test_a_part_of_the_memory_is_kept_as_it_was_written() -> None:
    config = Config(gpu_memory=" 80 % ", cpu_memory="12.5%")
    assert (config.gpu_memory, config.cpu_memory) == ("80%", "12.5%")
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_a_config_does_not_change_after_it_was_checked() -> None:
    with pytest.raises(ConfigError, match="cannot be changed; make another one"):
        make().gpu_memory = 3  # type: ignore[misc]
    with pytest.raises(ConfigError, match="cannot be changed; make another one"):
        make().tuning.threads = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", Tuning.model_fields)
def test_a_key_of_tuning_among_those_of_config_is_told_its_place(name: str) -> None:
    message = f"{name} is now in tuning: Config(tuning=Tuning({name}=...))"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        Config(**LEAST, **{name: "auto"})


@pytest.mark.parametrize("name", Config.model_fields)
def test_a_key_of_config_among_those_of_tuning_is_told_its_place(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^{re.escape(f'{name} is not in tuning: Config({name}=...)')}$"
    ):
        Tuning(**{name: "auto"})


def test_tuning_may_be_a_dict() -> None:
    given = {"cache": "2MiB", "update": "exact"}
    config = Config(**LEAST, tuning=given)
    assert config.tuning == Tuning(**given)
    assert Config(**config.model_dump()) == config
    assert Config.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cache": "much"}, f"cache: 'much' {NOT_BYTES}, or 'auto'"),
        (
            {"cahce": 1},
            f"unknown tuning key 'cahce'; did you mean 'cache' in tuning? The keys are: {KEYS}",
        ),
        (
            {"gpu_memroy": 1},
            f"unknown tuning key 'gpu_memroy'; did you mean 'gpu_memory'? The keys are: {KEYS}",
        ),
        ({1: 2}, "tuning: unknown tuning key 1"),
        (
            {"update": "delayed", "gpu_cache": 1},
            "config: update='delayed' keeps old parameters beside the new ones",
        ),
        (3, "tuning: Input should be a valid dictionary or instance of Tuning, not 3"),
    ],
)
def test_a_dict_for_tuning_is_refused_like_keys_of_config(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        Config(**LEAST, tuning=wrong)


@given(st.integers(min_value=0, max_value=1 << 80))
def test_plain_numbers_are_exact(count: int) -> None:
    assert parse_bytes(count) == parse_bytes(str(count)) == parse_bytes(f" {count} B ") == count


UNITS = {
    "K": 2**10,
    "KiB": 2**10,
    "KB": 10**3,
    "M": 2**20,
    "MB": 10**6,
    "GiB": 2**30,
    "TiB": 2**40,
    "TB": 10**12,
}


@given(
    st.integers(min_value=0, max_value=10**9),
    st.sampled_from(sorted(UNITS)),
    st.sampled_from([str, str.lower]),
)
def test_units_multiply_exactly(thousandths: int, unit: str, spelling: Any) -> None:
    text = f"{thousandths // 1000}.{thousandths % 1000:03d}{spelling(unit)}"
    assert parse_bytes(text) == thousandths * UNITS[unit] // 1000


@given(st.text(max_size=8))
def test_any_other_text_is_a_value_error(text: str) -> None:
    try:
        count = parse_bytes(text)
    except ValueError as error:
        assert NOT_BYTES in str(error)
    else:
        assert count >= 0
        assert re.match(r"\s*[0-9.]", text)


@given(st.integers(min_value=0, max_value=1 << 60))
def test_what_is_printed_reads_back_within_its_digits(count: int) -> None:
    text = format_bytes(count)
    assert re.fullmatch(r"\d+(\.\d+)? ([KMGT]i)?B", text)
    assert abs(parse_bytes(text) - count) <= 0.005 * count + 1
    number, unit = text.split()
    assert float(number) < 1024 or unit == "TiB"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (999.7 * 1024, "1000 KiB"),
        (1023.7 * 1024, "1 MiB"),
        (5000 << 40, "5000 TiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_printed_quantities(count: float, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(min_value=0, max_value=1 << 50), st.integers(min_value=1, max_value=1 << 20))
def test_round_up_is_the_smallest_multiple(count: int, multiple: int) -> None:
    rounded = round_up(count, multiple)
    assert rounded % multiple == 0
    assert count <= rounded < count + multiple
