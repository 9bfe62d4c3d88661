"""State formats: a split master is an fp32 master bit for bit, and no format lets placement change
a bit.

Every run clips every second step and accumulates two micro-batches, in units of three chunks of the
optimizer, whose norms and biases end in the middle of an int8 group; released memory is poisoned.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import infinity
from infinity.optim.kernels import Kernels, StateTensors
from infinity.optim.rules.adam import AdamW
from infinity.placement.spec import BF16, FP32, INT8, SPLIT, Format, Kind
from infinity.sharding import codec
from support.budgets import ROOMY
from support.configs import config_of
from support.faults import fail_from_the_update_on
from support.machine import IO_ENGINES, ISAS, PAGE, TIERS
from support.models import Transformer, text_batch, transformer
from support.optimizers import FAMILY
from support.probe import Probe
from support.traffic import STEADY, check_traffic, counted, is_what_the_kernel_counts

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(120, method="thread")]

FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {"split_master": False},
    "split": {},
    "bf16": {"moment_precision": "bf16"},
    "int8": {"moment_precision": "int8"},
    "int8-unsplit": {"moment_precision": "int8", "split_master": False},
}
MOMENTS = {"exp_avg": Kind.EXP_AVG, "exp_avg_sq": Kind.EXP_AVG_SQ}
IN_MEMORY = {"parameters": "gpu", "gradients": "gpu", "optimizer": "cpu"}
MAX_GRAD_NORM = 0.4
each_format = pytest.mark.parametrize("name", FORMATS)
low_bits = pytest.mark.parametrize("name", ["bf16", "int8", "int8-unsplit"])


def build() -> Transformer:
    return transformer(width=88, depth=2)


class Training:
    """A wrapped model in bf16 and its optimizer; a context manager that closes the engine."""

    def __init__(
        self,
        make: type[infinity.Optimizer] = infinity.AdamW,
        hyper: dict[str, Any] | None = None,
        weights: dict[str, torch.Tensor] | None = None,
        **config: Any,
    ) -> None:
        model = build()
        if weights is not None:
            model.load_state_dict(weights)
        config = {"precision": "bf16", "poison": True} | ROOMY | config
        self.model: Transformer = infinity.wrap(model, config_of(**config))
        self.engine = infinity.engine(self.model)
        decayed, others = (
            [p for p in self.model.parameters() if (p.ndim > 1) == matrix]
            for matrix in (True, False)
        )
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 2e-3}]
        hyper = {"lr": 5e-3, "weight_decay": 0.1} | (hyper or {})
        self.optimizer = make(groups, **hyper, max_grad_norm=MAX_GRAD_NORM)
        self.losses: list[float] = []
        self.norms: list[float | None] = []

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def steps(self, numbers: range) -> Training:
        for number in numbers:
            for micro_batch in range(2):
                loss = self.model(**text_batch(2 * number + micro_batch)).loss / (
                    50 if number % 2 else 2
                )
                loss.backward()
                self.losses.append(loss.item())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.norms.append(self.optimizer.grad_norm)
        return self

    def states(self, *names: str) -> dict[str, torch.Tensor]:
        """The optimizer's states, or those called `names`."""
        states = copy.deepcopy(self.optimizer.state_dict()["state"]).items()
        return {
            f"{n}.{key}": value
            for n, state in states
            for key, value in state.items()
            if not names or key in names
        }

    def blocks(self) -> dict[tuple[str, str], torch.Tensor]:
        """Every block of parameters and states, as it reads now."""
        units = self.engine.units
        return {
            (unit.name, kind.value): unit.states.read(kind)
            for unit in units
            for kind in unit.blocks
            if kind is not Kind.GRAD
        }

    def outcome(self) -> Outcome:
        """All numbers of the run."""
        return Outcome(self.losses, self.norms, self.engine.state_dict(), self.states())


class Outcome(NamedTuple):
    losses: list[float]
    norms: list[float | None]
    weights: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]


def differing(mine: dict[Any, torch.Tensor], theirs: dict[Any, torch.Tensor]) -> list[Any]:
    assert mine.keys() == theirs.keys()
    return [key for key, value in mine.items() if not torch.equal(value, theirs[key])]


def check_equal(mine: Outcome, theirs: Outcome) -> None:
    assert mine.losses == theirs.losses
    assert mine.norms == theirs.norms
    assert differing(mine.weights, theirs.weights) == []
    assert differing(mine.states, theirs.states) == []


def run(steps: int, *arguments: Any, **config: Any) -> Outcome:
    with Training(*arguments, **config) as training:
        outcome = training.steps(range(steps)).outcome()
        peaks, budgets = training.engine.report().peaks, training.engine.report().budgets
        assert all(peaks[tier] <= budgets[tier] for tier in ("gpu", "cpu"))
    return outcome


# A split master


WHERE_SPLIT = [
    *((member, {"gradient_precision": "fp32"}) for member in FAMILY),
    *(
        ("adamw", config)
        for config in (
            {},
            {"moment_precision": "bf16"},
            {"moment_precision": "int8"},
            {"update": "plain"},
        )
    ),
]


@pytest.mark.parametrize(("member", "config"), WHERE_SPLIT, ids=repr)
def test_a_split_master_is_an_fp32_master_bit_for_bit(
    member: str, config: dict[str, str], tmp_path: Path
) -> None:
    make, _, hyper, algorithm = FAMILY[member]
    whole, split = (
        run(8, make, hyper, algorithm=algorithm, nvme=tmp_path, split_master=split_master, **config)
        for split_master in (False, True)
    )
    check_equal(split, whole)
    clipped = [norm > MAX_GRAD_NORM for norm in whole.norms if norm is not None]
    assert clipped == [True, False] * 4
    masters = {key: value for key, value in split.states.items() if key.endswith(".master")}
    assert len(
        differing(masters, {key: value.bfloat16().float() for key, value in masters.items()})
    ) == len(masters)


@pytest.mark.parametrize("config", [{"precision": "fp32"}, {"precision": "fp16"}])
def test_only_a_bf16_parameter_has_a_split_master(config: dict[str, str]) -> None:
    with Training(**IN_MEMORY | config) as training:
        forms = {
            unit.blocks[Kind.MASTER].format
            for unit in training.engine.units
            if Kind.MASTER in unit.blocks
        }
        assert forms == (set() if config["precision"] == "fp32" else {FP32})
    with Training(**IN_MEMORY) as training:
        assert {unit.blocks[Kind.MASTER].format for unit in training.engine.units} == {SPLIT}


# Placement


@cache
def reference(name: str) -> Outcome:
    """In memory, with one scalar thread."""
    outcome = run(3, **IN_MEMORY, **FORMATS[name], instruction_set="scalar", threads=1)
    assert max(norm for norm in outcome.norms if norm is not None) > MAX_GRAD_NORM
    assert outcome.weights["head.weight"].isfinite().all()
    return outcome


def test_formats_of_moments_are_in_use() -> None:
    """So that the tests below compare what they say."""
    first = reference("split")
    for name in ("bf16", "int8"):
        other = reference(name)
        assert other.losses[:2] == first.losses[:2], "the first step begins from the same weights"
        assert all(
            key.endswith(".step") or key in differing(other.states, first.states)
            for key in first.states
        )
    check_equal(reference("int8"), reference("int8-unsplit"))


@pytest.mark.parametrize("form", [BF16, INT8], ids=lambda form: form.name)
def test_noise_is_another_in_every_step_unit_and_place(form: Format) -> None:
    """Noise that came again would push a moment the same way in every step."""
    kernels, generator = Kernels("auto", 1), torch.Generator().manual_seed(0)
    values = [torch.randn(2048, generator=generator) for _ in range(2)]

    def moments(unit: int, step: int, position: int) -> torch.Tensor:
        states = {Kind.PARAM: values[0].clone(), Kind.GRAD: values[1]}
        states |= {
            kind: torch.zeros(form.bytes_of(2048), dtype=torch.uint8) for kind in MOMENTS.values()
        }
        formats = dict.fromkeys(MOMENTS.values(), form)
        hyper = AdamW.hyper(AdamW.usual_settings() | {"weight_decay": 0.0}, step)
        kernels.update(StateTensors(states, formats, unit, position), 0, 2048, hyper, 1.0)
        return torch.cat([states[kind] for kind in MOMENTS.values()])

    first = moments(3, 7, 4096)
    assert torch.equal(moments(3, 7, 4096), first)
    for other in (moments(3, 8, 4096), moments(4, 7, 4096), moments(3, 7, 2048)):
        assert (other != first).sum() > 512
    kernels.close()


@pytest.mark.pairs
@low_bits
@pytest.mark.parametrize(("parameters", "optimizer"), list(itertools.product(TIERS, repeat=2)))
def test_every_tier_with_the_smallest_budgets(
    name: str,
    parameters: str,
    optimizer: str,
    tmp_path: Path,
    smallest: Callable[..., dict[str, int]],
) -> None:
    config = {
        "precision": "bf16",
        "nvme": tmp_path,
        "parameters": parameters,
        "optimizer": optimizer,
    } | FORMATS[name]
    check_equal(run(3, **config | smallest(build(), **config)), reference(name))


@low_bits
def test_pieces_of_any_length(
    name: str, tmp_path: Path, smallest: Callable[..., dict[str, int]]
) -> None:
    config = {"precision": "bf16", "nvme": tmp_path, "gradients": "nvme"} | FORMATS[name]
    least = smallest(build(), **config)
    lengths = set()
    for extra in (0, 1, 4, 12):
        budgets = least | {"cpu_memory": least["cpu_memory"] + (extra << 20)}
        with Training(**config | budgets) as training:
            lengths.add(Probe(training.engine).chunk_elements)
            check_equal(training.steps(range(3)).outcome(), reference(name))
    assert len(lengths) >= 2
    assert name == "bf16" or all(length % INT8.elements == 0 for length in lengths)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from(["bf16", "int8", "int8-unsplit"]),
    where=st.fixed_dictionaries(
        {key: st.sampled_from(TIERS) for key in ("parameters", "gradients", "optimizer")}
    ),
    extra_gpu=st.integers(0, 200),
    extra_cpu=st.integers(0, 2000),
    how=st.fixed_dictionaries(
        {
            "io_engine": st.sampled_from(IO_ENGINES),
            "instruction_set": st.sampled_from(ISAS),
            "threads": st.integers(1, 4),
            "copy_on_write": st.booleans(),
            "update": st.sampled_from(["auto", "speculative", "exact", "plain"]),
        }
    ),
    directories=st.integers(1, 2),
)
def test_any_combination(
    name: str,
    where: dict[str, str],
    extra_gpu: int,
    extra_cpu: int,
    how: dict[str, Any],
    directories: int,
    tmp_path_factory: pytest.TempPathFactory,
    smallest: Callable[..., dict[str, int]],
) -> None:
    paths = [tmp_path_factory.mktemp("nvme") for _ in range(directories)]
    if how["update"] == "speculative" and not (
        how["copy_on_write"] and where["parameters"] == where["optimizer"] == "nvme"
    ):
        how = how | {"update": "auto"}
    config = {"precision": "bf16", "nvme": paths} | where | how | FORMATS[name]
    budgets = smallest(build(), **config)
    budgets["gpu_memory"] += extra_gpu * PAGE
    budgets["cpu_memory"] += extra_cpu * PAGE
    check_equal(run(3, **config, **budgets), reference(name))


# State dicts


@each_format
def test_training_goes_on_from_a_state_dict_as_if_nothing_had_happened(
    name: str, tmp_path: Path
) -> None:
    """For every format: what was decoded is encoded to the bytes that it came from, and noise
    depends on the step alone."""
    with Training(nvme=tmp_path, **FORMATS[name]) as training:
        training.steps(range(4))
        weights, states = (
            training.engine.state_dict(),
            copy.deepcopy(training.optimizer.state_dict()),
        )
        whole = training.steps(range(4, 8)).outcome()
    with Training(nvme=tmp_path, weights=weights, **FORMATS[name]) as training:
        training.optimizer.load_state_dict(states)
        for number, state in training.optimizer.state_dict()["state"].items():
            assert differing(state, states["state"][number]) == []
        resumed = training.steps(range(4, 8)).outcome()
    check_equal(resumed, whole._replace(losses=whole.losses[8:], norms=whole.norms[4:]))


def within_rounding(name: str, kind: Kind, got: torch.Tensor, given: torch.Tensor) -> bool:
    """Whether `got` is `given` to the nearest that the format has."""
    error = (got - given).abs()
    if not name.startswith("int8"):
        return bool((error <= given.abs() * (2.0**-8 if name == "bf16" else 0)).all())
    if kind is Kind.EXP_AVG_SQ:
        assert (got[given > 0] > 0).all(), "a step would divide by eps"
        got, given = got.sqrt(), given.sqrt()
        error = (got - given).abs()
    groups = (
        torch.nn.functional.pad(given.flatten(), (0, -given.numel() % 32))
        .view(-1, 32)
        .abs()
        .amax(1)
    )
    scale = groups.repeat_interleave(32)[: given.numel()].view(given.shape)
    top = 127 if kind is Kind.EXP_AVG else 255
    # Codes c and c + 1 stand for c^2 and (c + 1)^2 of top^2: the nearest is at most half of (2 c +
    # 1) / top^2 away.
    return bool(
        (
            error <= scale * ((given.abs() / scale.clamp(min=1e-30)).sqrt() + 1 / top) * 1.01 / top
        ).all()
    )


@each_format
@pytest.mark.parametrize("source", ["fp32", "int8"])
def test_states_of_another_format_are_taken_over(name: str, source: str, tmp_path: Path) -> None:
    """Parameters and masters bit for bit, moments to the nearest."""
    with Training(**IN_MEMORY, **FORMATS[source]) as training:
        training.steps(range(4))
        weights, given = training.engine.state_dict(), training.optimizer.state_dict()
    # Whose parameters are those of the start.
    with Training(nvme=tmp_path, **FORMATS[name]) as training:
        training.optimizer.load_state_dict(given)
        assert differing(training.engine.state_dict(), weights) == []
        for number, state in training.optimizer.state_dict()["state"].items():
            assert torch.equal(state["master"], given["state"][number]["master"])
            for key, kind in MOMENTS.items():
                assert within_rounding(name, kind, state[key], given["state"][number][key]), (
                    number,
                    key,
                )


def moments_of_all_sizes(kind: Kind, seed: int, spread: float) -> torch.Tensor:
    """Superblocks of random sizes, with groups of zeros, of equals, and around the least scales."""
    generator = torch.Generator().manual_seed(seed)
    values = (
        torch.randn(INT8.elements + 999, generator=generator)
        * (torch.randn(INT8.elements + 999, generator=generator) * spread).exp()
    )
    values[:32] = 0
    values[32:64] = 1.5
    values[64:96] *= 1e-36
    values[96:128] *= 1e36 if kind is Kind.EXP_AVG else 1e18
    values[128:160] = 0
    values[140] = 1e-20
    return values if kind is Kind.EXP_AVG else values.square()


@pytest.mark.parametrize("form", [BF16, INT8], ids=lambda form: form.name)
@pytest.mark.parametrize("kind", MOMENTS.values())
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0, 12.0])
def test_decoded_moments_are_encoded_to_the_same_bytes(
    form: Format, kind: Kind, spread: float
) -> None:
    for seed in range(4):
        values = moments_of_all_sizes(kind, seed, spread)
        once, twice = (
            torch.zeros(form.bytes_of(values.numel()), dtype=torch.uint8) for _ in range(2)
        )
        decoded = torch.empty_like(values)
        codec.encode_moment(form, kind, values, once)
        codec.decode_moment(form, kind, once, decoded)
        codec.encode_moment(form, kind, decoded, twice)
        assert torch.equal(once, twice)
        assert not torch.equal(decoded, values)
        assert decoded[:32].count_nonzero() == 0


# Changing parameters


@each_format
@pytest.mark.parametrize("before", [0, 3], ids=["at-once", "after-steps"])
def test_a_master_follows_what_is_written_and_keeps_its_low_bits_elsewhere(
    name: str, before: int, tmp_path: Path
) -> None:
    with Training(nvme=tmp_path, **FORMATS[name]) as training:
        training.steps(range(before))
        was = training.states()
        numbers = {
            id(p): n
            for n, p in enumerate(p for g in training.optimizer.param_groups for p in g["params"])
        }
        parameter = training.model.blocks[1].up.weight
        number = numbers[id(parameter)]
        with infinity.gathered(parameter), torch.no_grad():
            old = parameter.detach().clone()
        with infinity.gathered(parameter, write=True), torch.no_grad():
            parameter[3] *= -2
            parameter[5, ::2] = parameter[5, ::2]  # written, and not changed
            parameter[7, 11] = 0.7
        new = old.clone()
        new[3] *= -2
        new[7, 11] = 0.7
        assert torch.equal(training.engine.state_dict()["blocks.1.up.weight"], new)
        now = training.states()
        if before:
            assert differing(now, was) == [f"{number}.master"]
            master = was[f"{number}.master"]
            assert torch.equal(
                now[f"{number}.master"], torch.where(old == new, master, new.float())
            )
            assert not torch.equal(master[9], new[9].float()), (
                "low bits that were kept are bits that count"
            )
            return
        assert now == was == {}
        start = build()
        training.steps(range(2))
        rewritten = training.engine.state_dict()
    with torch.no_grad():  # what was not changed has the low bits that it was wrapped with
        weight = start.blocks[1].up.weight
        weight.copy_(torch.where(old == new, weight, new.float()))
    with Training(nvme=tmp_path, weights=start.state_dict(), **FORMATS[name]) as training:
        assert differing(training.steps(range(2)).engine.state_dict(), rewritten) == []


# Bytes

BYTES = {"split": (26, 12), "bf16": (18, 8), "int8": (14.5, 6.3)}
"""At most so many bytes per parameter cross to NVMe in a step, and lie there at rest without
copy-on-write."""


def wide() -> Transformer:
    # Blocks of 3.15 million parameters: 97 superblocks of int8.
    return transformer(width=512, depth=4)


def padded_states(engine: infinity.Engine, name: str) -> tuple[int, int]:
    """Elements of all units, and bytes of their masters and moments."""
    sizes = [unit.layout.numel for unit in engine.units]
    form = {"split": FP32, "bf16": BF16, "int8": INT8}[name]
    if name == "int8":
        assert form.bytes_of(1) == 36864 == form.bytes_of(32768)
    return sum(sizes), sum(2 * size + 2 * form.bytes_of(size) for size in sizes)


@pytest.mark.parametrize("name", BYTES)
def test_bytes_per_parameter_and_step_by_the_kernels_count(
    name: str, tmp_path: Path, smallest: Callable[..., dict[str, int]]
) -> None:
    """Everything but gradients on NVMe. Read: states, the parameter for backward and for the
    update; written: all of them."""
    config: dict[str, Any] = {
        "nvme": [tmp_path],
        "precision": "bf16",
        "update": "exact",
        "cache": 0,
        **FORMATS[name],
    }
    config |= smallest(wide(), **config)
    config["cpu_memory"] += 8 << 20
    model = infinity.wrap(wide(), config_of(**config))
    with infinity.engine(model) as engine:
        optimizer = infinity.AdamW(model.parameters())

        def steps(numbers: range) -> None:
            for number in numbers:
                model(**text_batch(number)).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            Probe(engine).come_to_rest()

        steps(range(STEADY))
        ours, kernels = engine.recorder.counters(), counted(("read_bytes", "write_bytes"))
        steps(range(STEADY, STEADY + 2))
        kernels = [
            after - before
            for before, after in zip(kernels, counted(("read_bytes", "write_bytes")), strict=True)
        ]
        plan, after = engine.plan(), engine.recorder.counters()
        moved = [after[key] - ours[key] for key in ("nvme bytes read", "nvme bytes written")]
        assert moved == [2 * plan.read, 2 * plan.update_written]
        check_traffic(model)
        elements, states = padded_states(engine, name)
        assert plan.update_written == states + 2 * elements
        assert states < plan.update_read <= states + 2 * elements
        assert 0 < plan.fetched <= 2 * elements
        assert (plan.read + plan.update_written) / engine.report().parameters <= BYTES[name][0]
        # Without a device the kernel does not count.
        assert os.major(tmp_path.stat().st_dev) == 0 or is_what_the_kernel_counts(moved, kernels)


@pytest.mark.parametrize("name", BYTES)
def test_bytes_per_parameter_at_rest(name: str, tmp_path: Path) -> None:
    config = config_of(
        nvme=tmp_path, precision="bf16", copy_on_write=False, **FORMATS[name], **ROOMY
    )
    model = infinity.wrap(wide(), config)
    with infinity.engine(model) as engine:
        elements, states = padded_states(engine, name)
        assert engine.memory()["nvme"] == states + 2 * elements
        parameters = sum(p.numel() for p in model.parameters())
        assert engine.memory()["nvme"] / parameters <= BYTES[name][1] * (
            1 if name == "int8" else 1.002
        )


# Faults


@pytest.fixture
def failing(
    tmp_path: Path, smallest: Callable[..., dict[str, int]]
) -> Iterator[Callable[[str], Training]]:
    opened: list[Training] = []

    def make(name: str) -> Training:
        folder = tmp_path / str(len(opened))
        folder.mkdir()
        config = {"precision": "bf16", "nvme": folder, **FORMATS[name]}
        opened.append(Training(**config | smallest(build(), **config)))
        return opened[-1]

    yield make
    for training in opened:
        training.engine.close()


@each_format
@pytest.mark.parametrize(
    "fault",
    [{"fail_write_at": 4}, {"fail_write_at": 13}, {"fail_read_at": 2}],
    ids=lambda f: f"{f}",
)
def test_a_failed_update_leaves_the_last_values(
    name: str, fault: dict[str, int], failing: Callable[[str], Training]
) -> None:
    """Every unit reads as of this step or the one before: parameter, low half and moments flip
    together."""
    good = failing(name).steps(range(3))
    good.engine.drain()
    after = good.blocks()
    training = failing(name).steps(range(2))
    training.engine.drain()
    before = training.blocks()
    fail_from_the_update_on(training, **fault)  # type: ignore[arg-type]
    with pytest.raises(
        infinity.EngineClosedError, match=r"^an update failed and the engine cannot go on: "
    ):
        training.steps(range(2, 3)).engine.drain()
    now, old, new = training.blocks(), 0, 0
    for unit in training.engine.units:
        kinds = [kind for unit_name, kind in now if unit_name == unit.name]
        assert set(kinds) == {"param", "master", *MOMENTS}
        is_old, is_new = (
            all(torch.equal(now[unit.name, k], then[unit.name, k]) for k in kinds)
            for then in (before, after)
        )
        assert is_old != is_new, unit.name
        old, new = old + is_old, new + is_new
    assert old > 0
    assert math.isfinite(sum(float(value.float().sum()) for value in now.values()))
