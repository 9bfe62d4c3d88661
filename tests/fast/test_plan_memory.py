"""The bytes that states take, by formula: the published table, and the configurations of one
parameter."""

from __future__ import annotations

import re
from typing import Any

import pytest

import infinity
from infinity.placement.memory import StateBytes, bytes_on_tiers, bytes_per_parameter
from support.configs import config_of

# ZeRO (1910.02054), table 1: GB per rank with stages 1, 2 and 3; by parameters in billions, then by
# ranks.
TABLE = {
    7.5: {
        1: (120, 120, 120),
        4: (52.5, 41.3, 30),
        16: (35.6, 21.6, 7.5),
        64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47),
        1024: (30.1, 15.1, 0.12),
    },
    128: {
        1: (2048, 2048, 2048),
        4: (896, 704, 512),
        16: (608, 368, 128),
        64: (536, 284, 32),
        256: (518, 263, 8),
        1024: (513, 257, 2),
    },
    1000: {
        1: (16000, 16000, 16000),
        4: (7000, 5500, 4000),
        16: (4750, 2875, 1000),
        64: (4187, 2218, 250),
        256: (4046, 2054, 62.5),
        1024: (4011, 2013, 15.6),
    },
}


@pytest.mark.parametrize("billions", TABLE)
def test_the_published_table(billions: float) -> None:
    states = StateBytes(*(billions * nbytes for nbytes in (2, 2, 12)))
    for ranks, row in TABLE[billions].items():
        for stage, printed in enumerate(row, start=1):
            last_digit = 10.0 ** -(
                len(f"{printed}".partition(".")[2]) if isinstance(printed, float) else 0
            )
            assert sum(states.on_rank(ranks, stage)) == pytest.approx(printed, abs=last_digit)
        assert sum(states.on_rank(ranks, stage=0)) == 16 * billions


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"precision": "bf16"}, (2, 2, 10)),
        ({"precision": "bf16", "split_master": False}, (2, 2, 12)),
        ({"precision": "fp16"}, (2, 2, 12)),
        ({"precision": "fp32"}, (4, 4, 8)),
        (
            {"precision": "bf16", "gradient_precision": "fp32", "moment_precision": "bf16"},
            (2, 4, 6),
        ),
        ({"precision": "bf16", "moment_precision": "int8"}, (2, 2, 2 + 2 * 1.125)),
        ({"precision": "bf16", "algorithm": "lion"}, (2, 2, 6)),
        ({"precision": "bf16", "algorithm": "sgd"}, (2, 2, 2)),
    ],
)
def test_bytes_of_one_parameter(values: dict[str, Any], expected: tuple[float, ...]) -> None:
    assert (
        bytes_per_parameter(config_of(gpu_memory=0, cpu_memory=0, nvme="x", **values)) == expected
    )


def test_where_they_lie() -> None:
    def on_tiers(**values: Any) -> dict[str, float]:
        config = config_of(gpu_memory=0, cpu_memory=0, nvme="x", precision="bf16", **values)
        return bytes_on_tiers(1000, config, ranks=4)

    assert on_tiers() == {"gpu": 0, "cpu": 500, "nvme": 2 * (500 + 2500)}
    assert on_tiers(copy_on_write=False, gradients="nvme") == {"gpu": 0, "cpu": 0, "nvme": 3500}
    offload = {"stage": 2, "parameters": "gpu", "gradients": "cpu", "optimizer": "cpu"}
    assert on_tiers(**offload) == {"gpu": 2000, "cpu": 500 + 2500, "nvme": 0}
    assert on_tiers(**offload | {"stage": 1}) == {"gpu": 2000, "cpu": 2000 + 2500, "nvme": 0}
    config = infinity.Config(gpu_memory=0, cpu_memory=0, nvme="x", precision="bf16")
    assert bytes_on_tiers(0, config, ranks=4, frozen=1000) == {"gpu": 0, "cpu": 0, "nvme": 500}
    assert on_tiers(parameters="cpu", optimizer="cpu", update="delayed") == {
        "gpu": 0,
        "cpu": 2 * 500 + 500 + 2500,
        "nvme": 0,
    }


@pytest.mark.parametrize("stage", [1, 2])
def test_what_every_rank_keeps_whole_is_on_its_device(stage: int) -> None:
    with pytest.raises(
        infinity.ConfigError, match=rf"stage={stage} keeps all parameters.* on the device of every"
    ):
        infinity.Config(gpu_memory=0, cpu_memory=0, nvme="x", stage=stage, gradients="gpu")
    text = (
        r"stage=1 keeps all gradients in the memory of every rank, until a step reduces them; set "
        r"gradients='cpu' or 'gpu', or stage=2, where each rank keeps its part"
    )
    if stage == 1:
        with pytest.raises(infinity.ConfigError, match=text):
            infinity.Config(nvme="x", stage=1, parameters="gpu", gradients="nvme")


@pytest.mark.parametrize("gradients", ["cpu", "nvme"])
@pytest.mark.parametrize("parameters", ["cpu", "gpu"])
@pytest.mark.parametrize("stage", [1, 2])
def test_what_the_error_of_a_stage_names_works(stage: int, parameters: Any, gradients: Any) -> None:
    """The tiers for this stage, or the lowest stage for these tiers."""
    given: dict[str, Any] = {"parameters": parameters, "gradients": gradients, "optimizer": "cpu"}
    given |= {"nvme": "x"}
    if parameters == "gpu" and (stage, gradients) != (1, "nvme"):
        infinity.Config(stage=stage, **given)
        return
    with pytest.raises(infinity.ConfigError) as caught:
        infinity.Config(stage=stage, **given)
    homes = dict(re.findall(r"(\w+)='(\w+)'", str(caught.value)))
    (other,) = map(int, re.findall(r"or stage=(\d)", str(caught.value)))
    infinity.Config(stage=stage, **given | homes)
    infinity.Config(stage=other, **given)
    assert other == (2 if parameters == "gpu" else 3)
