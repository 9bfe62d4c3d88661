"""Attributes of DeepSpeed's engine: those of this engine, then those of the model, else a sentence
that names neither the model's class alone nor nothing."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from infinity.deepspeed.engine import DeepSpeedEngine
from infinity.deepspeed.engine_names import OTHERS
from infinity.errors import ConfigError
from support.deepspeed import configuration, net

Start = Callable[..., tuple[Any, Any, Any, Any]]


@pytest.mark.parametrize("scale", [0, 128])
def test_the_optimizer_says_whether_its_loss_scale_changes(start: Start, scale: int) -> None:
    fp16 = {"enabled": True, "loss_scale": scale, "initial_scale_power": 7}
    _, optimizer, *_ = start(model=net(), config=configuration(fp16=fp16))
    assert (optimizer.dynamic_loss_scale, optimizer.loss_scale) == (scale == 0, 128)


def test_values_that_scripts_and_loggers_read(start: Start) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    config = configuration(optimizer=None, wall_clock_breakdown=True, steps_per_print=1000)
    engine, *_ = start(model=model, optimizer=optimizer, config=config)
    assert engine.mpu is None and not engine.monitor.enabled
    engine.monitor.write_events([("loss", 1.0, 1)])
    assert engine.tput_timer.batch_size == engine.train_batch_size() == 2
    engine.tput_timer.update_epoch_count()
    assert engine.tput_timer.epoch_count == 1
    assert (engine.wall_clock_breakdown(), engine.dump_state()) == (True, False)
    assert engine.steps_per_print() == 1000 and isinstance(engine.steps_per_print(), int)
    assert engine.optimizer_name() == "AdamW" and engine.basic_optimizer is optimizer
    zero, norm = (getattr(engine, name) for name in ("_config", "_global_grad_norm"))
    assert zero.zero_enabled and norm is None
    assert engine.data_parallel_group is dist.group.WORLD
    assert (engine.mp_world_size, engine.sequence_parallel_size) == (1, 1)
    assert not engine.is_compiled


@pytest.mark.parametrize("how", ["by name", "in order", "without any"])
def test_an_engine_is_made_by_initialize_alone(how: str) -> None:
    arguments = {
        "by name": {"args": None, "model": net(), "config": configuration()},
        "in order": {},
    }
    given = (None, net()) if how == "in order" else ()
    with pytest.raises(ConfigError, match=r"DeepSpeedEngine\(...\) makes no engine; give its arg"):
        DeepSpeedEngine(*given, **arguments.get(how, {}))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("train_batch", "there is no pipeline parallelism"),
        ("zero_reduce_scatter", "engine.config is the configuration as it came"),
        ("get_wall_clock_timers", "engine.report() has times, bytes and stalls"),
        ("random_ltd_scheduler", "it changes what is trained"),
        ("allreduce_gradients", "communicate through deepspeed.comm"),
        ("set_lr", OTHERS),
    ],
)
def test_an_attribute_that_is_missing_says_why(start: Start, name: str, reason: str) -> None:
    engine, *_ = start(model=net(), config=configuration())
    text = f"^neither the engine of infinity nor Net has '{name}': .*{re.escape(reason)}"
    with pytest.raises(AttributeError, match=text) as error:
        getattr(engine, name)
    assert isinstance(error.value, ConfigError)
    assert not hasattr(engine, name)


class Failing(torch.nn.Linear):
    @property
    def monitor_of(self) -> Any:
        return self.weight.nothing


def test_attributes_of_the_model_are_reached_and_fail_as_plain_ones(start: Start) -> None:
    model = Failing(2, 2)
    engine, *_ = start(model=model, config=configuration())
    assert engine.in_features == 2
    with pytest.raises(AttributeError, match="'Failing' object has no attribute 'monitor_of'"):
        _ = engine.monitor_of


FOUND = importlib.util.find_spec("deepspeed")


@pytest.mark.skipif(FOUND is None, reason="DeepSpeed 0.19.8 is not on the path")
def test_every_attribute_of_deepspeed_is_there_or_has_a_reason(start: Start) -> None:
    assert FOUND is not None and FOUND.origin is not None
    source = Path(FOUND.origin).parent / "runtime" / "engine.py"
    (kind,) = [
        node
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "DeepSpeedEngine"
    ]
    names = {node.name for node in kind.body if isinstance(node, ast.FunctionDef)} | {
        node.attr
        for node in ast.walk(kind)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }
    assert len(names) > 350
    engine, *_ = start(model=net(), config=configuration())
    for name in sorted(each for each in names if not each.startswith("__")):
        try:
            getattr(engine, name)
        except AttributeError as error:
            assert str(error).startswith("neither the engine of infinity nor Net has"), name
            assert OTHERS not in str(error), name
