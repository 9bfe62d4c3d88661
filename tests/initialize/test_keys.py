"""Keys of a DeepSpeed configuration have the numbers that they ask for, and IGNORED keys change
none."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import infinity
from infinity.deepspeed import clients
from infinity.deepspeed.consolidation import get_fp32_state_dict_from_zero_checkpoint
from infinity.deepspeed.keys import FREE, KEYS, Key, Treatment
from infinity.deepspeed.offload_devices import OffloadDeviceEnum, OffloadStateTypeEnum
from support.deepspeed import batch, configuration, net

pytestmark = pytest.mark.usefixtures("one_thread")

Parts = dict[str, Any]
Start = Callable[..., tuple[Any, Any, Any, Any]]


# IGNORED keys

VALUES = (True, False, 0, 1, 2, 0.5, 1000, 5e8, "fp32", "bf16", "x", ["x"])


def taken(key: Key) -> list[Any]:
    """Values that the key may have."""
    found = []
    for value in VALUES:
        try:
            key.kind.parse(value)
        except ValueError:
            continue
        found.append(value)
    return found


IGNORED = {path: taken(key) for path, key in KEYS.items() if key.treatment is Treatment.IGNORED} | {
    path: [{"enabled": True, "x": 1}]
    for path, block in FREE.items()
    if block.treatment is Treatment.IGNORED
}
PRECISIONS: dict[str, Parts] = {
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 14, "hysteresis": 1}},
    "bf16": {"bf16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
}
"""Blocks that have IGNORED keys, too."""


def with_keys(keys: Parts, precision: str, nvme: Path) -> Parts:
    """The configuration with keys of other blocks beside its own."""
    config = configuration(nvme, **copy.deepcopy(PRECISIONS[precision]), gradient_clipping=0.5)
    for path, value in keys.items():
        place = config
        *blocks, name = path.split(".")
        for block in blocks:
            place = place.setdefault(block, {})
        place[name] = value
    return config


def trained(keys: Parts, precision: str) -> tuple[Any, ...]:
    """Losses, skipped steps, scale, and the files with what they hold, of three steps of which one
    is skipped."""
    with tempfile.TemporaryDirectory() as folder:
        nvme, saved = Path(folder, "nvme"), Path(folder, "saved")
        torch.manual_seed(1)
        engine, *_ = infinity.initialize(model=net(), config=with_keys(keys, precision, nvme))
        dtype = engine.module.first.weight.dtype
        losses = []
        for number in range(3):
            x, labels = batch(number)
            loss = engine(x.to(dtype) * TOO_LARGE[precision] ** (number == 0), labels)
            engine.backward(loss)
            engine.step()
            losses.append(str(loss.item()))  # "nan" is itself
        engine.save_checkpoint(saved, tag="last")
        end = losses, engine.skipped_steps, engine.loss_scale()
        engine.destroy()
        files = sorted(str(each.relative_to(folder)) for each in Path(folder).rglob("*"))
        weights = get_fp32_state_dict_from_zero_checkpoint(saved)
        return *end, files, {name: value.tolist() for name, value in weights.items()}


TOO_LARGE = {"fp16": 1e4, "bf16": float("inf"), "autocast": 1.0}
"""What the first batch is multiplied with. Only 16 bits leave out a step."""


@pytest.fixture(scope="module", params=PRECISIONS)
def plain(request: pytest.FixtureRequest) -> tuple[str, tuple[Any, ...]]:
    """A precision, and what it ends in without other keys."""
    found = trained({}, request.param)
    dist.destroy_process_group()
    return request.param, found


@settings(max_examples=8, deadline=None, phases=[Phase.generate])
@given(st.data())
def test_ignored_keys_change_neither_losses_nor_skipped_steps_nor_files(
    plain: tuple[str, tuple[Any, ...]], data: st.DataObject
) -> None:
    precision, expected = plain
    names = data.draw(st.sets(st.sampled_from(sorted(IGNORED)), min_size=8))
    keys = {name: data.draw(st.sampled_from(IGNORED[name])) for name in sorted(names)}
    assert trained(keys, precision) == expected


def test_every_ignored_key_is_tried(plain: tuple[str, tuple[Any, ...]]) -> None:
    """The last value of each, all at once; in 16 bits one step was skipped, so the comparison sees
    scales."""
    precision, expected = plain
    assert len(IGNORED) > 60 and all(IGNORED.values())
    assert expected[1] == (precision != "autocast")
    found = trained({path: values[-1] for path, values in IGNORED.items()}, precision)
    assert found == expected


# Keys with numbers


@pytest.mark.parametrize("by", ["key", "DeepSpeedCPUAdam", "FusedAdam"])
def test_a_bias_that_is_not_corrected(start: Start, by: str) -> None:
    """As DeepSpeed's Adam without `bias_correction`, which is torch's after very many steps."""
    params = {"lr": 1e-2, "weight_decay": 0.1, "bias_correction": False}
    config = configuration(optimizer={"type": "AdamW", "params": params})
    model = net()
    client = None if by == "key" else getattr(clients, by)(model.parameters(), **params)
    engine, *_ = start(model=model, config=config, optimizer=client)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for parameter in model.parameters():
        zeros = torch.zeros_like(parameter)
        step = torch.tensor(1e6)
        optimizer.state[parameter] = {"step": step, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
    for number in range(3):
        found, expected = engine(*batch(number)), model(*batch(number))
        engine.backward(found)
        engine.step()
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert not engine.optimizer.param_groups[0]["bias_correction"]


@pytest.mark.parametrize("kind", ["DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "the model's"])
def test_states_of_an_optimizer_in_the_dtype_of_parameters(
    start: Start, kind: str, precision: str
) -> None:
    """As DeepSpeed's `fp32_optimizer_states=False` says, and the key of that name."""
    model = net().to(torch.bfloat16 if precision == "the model's" else torch.float32)
    make = getattr(clients, kind)
    client = make(model.parameters(), lr=0.1, fp32_optimizer_states=False)
    config = configuration(bf16={"enabled": precision == "bf16"})
    del config["optimizer"]
    engine, optimizer, *_ = start(model=model, config=config, optimizer=client)
    inputs, labels = batch(0)
    engine.backward(engine(inputs.to(next(engine.parameters()).dtype), labels))
    engine.step()
    states = [optimizer.state[parameter] for parameter in engine.module.parameters()]
    moments = [value for each in states for name, value in each.items() if name != "step"]
    is_bf16 = [torch.equal(value, value.bfloat16().float()) for value in moments]
    assert any(value.any() for value in moments)
    assert all(is_bf16) is (precision != "fp32")


def test_alone_a_bias_is_corrected_or_refused() -> None:
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = clients.FusedAdam(model.parameters(), bias_correction=False)
    model(*batch(0)).backward()
    with pytest.raises(infinity.ConfigError, match="steps only in an engine of"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_states_that_a_script_offloads(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """The call of OpenRLHF moves nothing and changes no loss; a warning says which key would."""
    losses: list[list[float]] = [[], []]
    for calls, mine in enumerate(losses):
        config = configuration()
        config["zero_optimization"] = {"stage": 3}
        engine, optimizer, *_ = start(model=net(), config=config)
        for number in range(3):
            engine.backward(loss := engine(*batch(number)))
            engine.step()
            mine.append(loss.item())
            for moved in (engine, optimizer) if calls else ():
                moved.offload_states(
                    include=[OffloadStateTypeEnum.optim_states, "lp_params"],
                    device=OffloadDeviceEnum.cpu,
                    pin_memory=True,
                    non_blocking=True,
                )
                moved.reload_states(non_blocking=True)
        told = [each.getMessage() for each in caplog.records if "offload_states" in each.msg]
        assert len(told) == 2 * calls  # once for each key
    assert losses[0] == losses[1]
    assert told == [
        f"offload_states leaves {name} on the GPU, where the configuration has them; give "
        f'zero_optimization.{key} {{"device": "cpu"}} to keep them in host memory'
        for name, key in (("optim_states", "offload_optimizer"), ("lp_params", "offload_param"))
    ]


def test_the_first_line_of_a_log_is_that_of_deepspeed(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="infinity"):
        start(model=net(), config=configuration())
    first = caplog.messages[0]
    assert first.startswith("DeepSpeed info: version=0.19.8, git-hash=unknown, git-branch=unknown")


def test_states_on_the_host_are_offloaded_without_a_word(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    engine, optimizer, *_ = start(model=net(), config=configuration())
    optimizer.offload_states()
    assert "offload_states" not in caplog.text
    with pytest.raises(RuntimeError, match="moves states to the host alone; for NVMe"):
        engine.offload_states(device="nvme")
    with pytest.raises(RuntimeError, match="has 'moments'; give some of optim_states"):
        engine.offload_states(["moments"])


@pytest.mark.parametrize("listed", [False, True])
def test_momenta_of_a_cycle_may_be_lists(start: Start, listed: bool) -> None:
    params = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 2}
    momenta = {"cycle_min_mom": 0.8, "cycle_max_mom": 0.9}
    params |= {name: [value] for name, value in momenta.items()} if listed else momenta
    config = configuration(scheduler={"type": "OneCycle", "params": params})
    engine, *_ = start(model=net(), config=config)
    found = []
    for number in range(3):
        engine.backward(engine(*batch(number)))
        engine.step()
        found.append(engine.get_mom()[0][0])
    assert found == pytest.approx([0.85, 0.8, 0.85])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_beside_16_bits(start: Start, precision: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    config = configuration(
        **{precision: {"enabled": True}}, torch_autocast={"enabled": True, "dtype": precision}
    )
    engine, *_ = start(model=net(), config=config)
    x, labels = batch(0)
    with torch.autocast("cpu", dtype):
        expected = net().to(dtype)(x, labels)
    assert torch.equal(engine(x, labels).detach(), expected.detach())


def test_autocast_of_another_dtype_is_refused(start: Start) -> None:
    config = configuration(
        bf16={"enabled": True}, torch_autocast={"enabled": True, "dtype": "fp16"}
    )
    with pytest.raises(infinity.ConfigError) as error:
        start(model=net(), config=config)
    assert str(error.value) == (
        "torch_autocast.dtype='fp16' is not that of bf16.enabled; set it to 'bf16', or leave one "
        "of them out"
    )


def test_a_scale_that_begins_very_high_ends_in_the_same_weights(start: Start) -> None:
    """Scales are powers of two, so only the steps that overflow are lost."""

    def weights(power: int) -> tuple[float, dict[str, torch.Tensor]]:
        half = {"enabled": True, "initial_scale_power": power, "hysteresis": 1}
        engine, *_ = start(model=net(), config=configuration(fp16=half))
        while not engine.was_step_applied():
            x, labels = batch(0)
            engine.backward(engine(x.half(), labels))
            engine.step()
        assert engine.skipped_steps == (engine.global_steps - 1)
        state = {name: value.clone() for name, value in engine.module.state_dict().items()}
        return engine.loss_scale(), state

    scale, found = weights(32)
    assert 1 < scale < 2.0**32
    _, expected = weights(round(torch.tensor(scale).log2().item()))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
