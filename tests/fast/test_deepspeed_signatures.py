"""What the package `deepspeed` of `infinity run` backs takes the arguments of DeepSpeed 0.19.8, and
its objects say in one sentence what they do not have."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from infinity.deepspeed.collectives import get_all_ranks_from_group
from infinity.deepspeed.communication import init_distributed
from infinity.deepspeed.names import ALIASES, BACKED
from infinity.deepspeed.parsed import DeepSpeedConfig
from infinity.deepspeed.refused import Refused
from infinity.deepspeed.schedulers import scheduler
from infinity.deepspeed.settings import Named
from infinity.deepspeed.timers import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer
from infinity.deepspeed.tools import RepeatingLoader
from infinity.deepspeed.zero import GatheredParameters, Init
from infinity.errors import ConfigError


def backed(module: str, name: str) -> Any:
    """What the package has under `name` of a module."""
    sources = BACKED[ALIASES.get(module, module)]
    for source, words in sources.items():
        for word in words.split():
            theirs, _, ours = word.partition("=")
            if theirs in (name, "*"):
                found = getattr(
                    importlib.import_module(source), name if theirs == "*" else ours or name, None
                )
                if found is not None:
                    return found
    return None


@pytest.fixture
def one_rank() -> Iterator[None]:
    init_distributed()
    yield
    dist.destroy_process_group()


def test_collectives_take_what_deepspeed_adds(one_rank: None) -> None:
    def comm(name: str) -> Any:
        return backed("comm", name)

    x, out = torch.ones(2), torch.zeros(2)
    comm("all_reduce")(x, op=comm("ReduceOp").SUM, prof=True, log_name="sum", debug="me")
    comm("barrier")(log_name="barrier")
    comm("all_gather_into_tensor")(output_tensor=out, tensor=x, log_name="gather")
    assert torch.equal(out, x)
    comm("reduce_scatter_fn")(output_tensor=out.zero_(), tensor=x, prof=False)
    comm("all_to_all_single")(output=out.zero_(), tensor=x)
    assert torch.equal(out, x)
    comm("all_gather_coalesced")([out.zero_()], [x])
    assert torch.equal(out, x)
    assert comm("has_all_gather_into_tensor")() and not comm("has_comm_data")()
    assert get_all_ranks_from_group() == [comm("get_global_rank")()] == [0]
    assert comm("get_world_group")() is dist.group.WORLD
    with pytest.raises(TypeError, match="unexpected keyword argument 'log'"):
        comm("broadcast")(x, 0, log="x")


def test_tensors_and_generators_of_the_accelerator() -> None:
    device = backed("accelerator", "get_accelerator")()
    found = device.ByteTensor([1, 0])
    assert (found.dtype, found.device.type) == (torch.uint8, device.device_name())
    assert device.HalfTensor([0.5]).dtype is torch.float16
    assert isinstance(device.default_generator(0), torch.Generator)
    assert device.use_host_timers() is device.is_synchronized_device()
    assert device.lazy_call(lambda: 3) == 3


def test_tools(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    def tool(name: str, module: str = "runtime.utils") -> Any:
        return backed(module, name)

    assert tool("has_inf_or_nan")(torch.tensor([1.0, float("nan")]))
    assert not tool("has_inf_or_nan")(torch.ones(2))
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.tensor([4.0])
    assert tool("clip_grad_norm_")([parameter], 2.0, mpu=None) == 4
    assert parameter.grad.item() == pytest.approx(2)
    with pytest.raises(ConfigError, match="mpu is not supported; leave it out"):
        tool("clip_grad_norm_")([parameter], 2.0, mpu=object())
    tool("set_random_seed")(3)
    drawn = torch.rand(1)
    tool("set_random_seed")(3)
    assert torch.equal(torch.rand(1), drawn)
    tool("ensure_directory_exists")(str(tmp_path / "new" / "file"))
    assert (tmp_path / "new").is_dir()
    moved = tool("copy_to_device")((torch.ones(1), 2), "meta", torch.is_tensor)
    assert moved[0].is_meta and moved[1] == 2
    with caplog.at_level(logging.INFO, "infinity"):
        for _ in range(2):
            tool("log_dist_once", "utils.logging")("told", ranks=[0])
            tool("warning_once", "utils.logging")("warned of %s", "it")
    assert [each.getMessage() for each in caplog.records] == ["[rank 0] told", "warned of it"]
    assert tool("get_log_level_from_string", "utils.logging")("info") == logging.INFO
    timer = SynchronizedWallClockTimer()
    timer("step").start()
    timer("step").stop()
    assert set(timer.get_mean(["step", "other"])) == {"step"} and timer("step").mean() == 0
    assert "mem_allocated" in timer.memory_usage() and NoopTimer()("step").elapsed() == 0


def test_a_configuration_has_its_keys() -> None:
    given = {"train_batch_size": 1, "wall_clock_breakdown": True, "optimizer": {"type": "Adam"}}
    read = DeepSpeedConfig(given)
    assert read.wall_clock_breakdown and not read.memory_breakdown
    assert (read.optimizer_name, read.optimizer_params, read.world_size) == ("Adam", {}, 1)


def made() -> list[Any]:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
    return [
        scheduler(Named("WarmupLR", {}), optimizer),
        DeepSpeedConfig({"train_batch_size": 1}),
        Init(),
        GatheredParameters([]),
        ThroughputTimer(),
        SynchronizedWallClockTimer(),
        SynchronizedWallClockTimer()("step"),
        RepeatingLoader([1]),
        backed("monitor.monitor", "MonitorMaster")(),
    ]


@pytest.mark.parametrize("found", made(), ids=lambda found: type(found).__name__)
def test_an_object_says_what_it_does_not_have(found: Any) -> None:
    with pytest.raises(AttributeError, match=f"^{type(found).__name__} of infinity has no 'tb': ."):
        _ = found.tb
    assert not hasattr(found, "tb") and not hasattr(found, "__array__")


@pytest.mark.parametrize("name", ["step", "batch_iteration"])
def test_a_schedule_goes_to_an_iteration(name: str) -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
    params = {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 1}
    schedule: Any = scheduler(Named("LRRangeTest", params), optimizer)
    optimizer.step()
    schedule.step(4) if name == "step" else schedule.step(batch_iteration=4)
    assert schedule.get_last_lr() == pytest.approx([0.6])
    assert schedule.state_dict() == {"last_batch_iteration": 4}


def test_a_cosine_has_the_rates_of_the_optimizer() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=0.25)
    schedule: Any = scheduler(Named("WarmupCosineLR", {"total_num_steps": 4}), optimizer)
    assert schedule.org_lrs == [0.25] and schedule.get_last_lr() == [0]


# DeepSpeed itself

FOUND = importlib.util.find_spec("deepspeed")
OTHER_ARGUMENTS = {
    "runtime.engine.DeepSpeedEngine": "initialize makes it",
    "FusedAdam.step": "DeepSpeed raises for all of them",
    "FusedLion.step": "DeepSpeed raises for all of them",
    "load_state_dict": "torch calls it state_dict",
    "full_hp_param": "they are methods",
    "full_hp_grad": "they are methods",
}
"""What takes other arguments than DeepSpeed's, by the end of its name, and why."""


def arguments(node: ast.FunctionDef) -> list[str]:
    listed = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [each.arg for each in listed if each.arg not in ("self", "cls")]


def functions(tree: ast.Module) -> Iterator[tuple[list[str], list[str]]]:
    """The path in the module of each function, constructor and method, and its arguments."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield [node.name], arguments(node)
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef):
                    yield [node.name, each.name], arguments(each)


NOT_CALLED = ("__call__", "__enter__", "__exit__", "__getattr__", "__iter__", "__next__")


def taken(found: Any) -> list[str] | None:
    """The arguments that `found` takes; None where it takes any, or cannot be called."""
    if not callable(found) or isinstance(found, Refused):
        return None
    try:
        listed = inspect.signature(found).parameters
    except ValueError:  # of compiled code, which has none
        return None
    return None if any(p.kind is p.VAR_KEYWORD for p in listed.values()) else list(listed)


@pytest.mark.skipif(FOUND is None, reason="DeepSpeed 0.19.8 is not on the path")
def test_every_function_takes_the_arguments_of_deepspeed() -> None:
    assert FOUND is not None and FOUND.origin is not None
    root, checked = Path(FOUND.origin).parent, 0
    for module in {*BACKED, *ALIASES} - {"dist"}:
        path = root.joinpath(*module.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if not file.exists():
            continue
        for (name, *member), expected in functions(ast.parse(file.read_text())):
            found = backed(module, name)
            if isinstance(found, Refused) or (member and member[0] in NOT_CALLED):
                continue
            if member and member != ["__init__"]:
                found = getattr(found, member[0], None)
            where = ".".join([module, name, *(each for each in member if each != "__init__")])
            mine = None if name.startswith("_") or found is None else taken(found)
            if mine is None or where.endswith(tuple(OTHER_ARGUMENTS)):
                continue
            checked += 1
            assert [each for each in expected if each not in mine] == [], where
    assert checked > 120
