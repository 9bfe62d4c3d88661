"""`Engine.sleep` and `Engine.wake`: the memory goes and comes again, the bits stay, and nothing of
a model that sleeps can be used."""

from __future__ import annotations

import errno
import gc
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import FileError
from infinity.placement.spec import Kind
from support.children import CHILD
from support.configs import config_of
from support.models import Transformer, text_batch, transformer
from support.probe import Probe, shared_io

pytestmark = pytest.mark.usefixtures("one_thread")

ASLEEP = "the engine sleeps, and has given its memory back; call engine.wake() first"
AMPLE = {"gpu_memory": 8 << 20, "cpu_memory": 32 << 20}
PLACES: dict[str, dict[str, Any]] = {
    "nvme": {},
    "gradients on nvme": {"gradients": "nvme"},
    "cpu": {"parameters": "cpu", "optimizer": "cpu"},
    "gpu": {"parameters": "gpu", "optimizer": "gpu", "gradients": "gpu"},
    "parameters on gpu": {"parameters": "gpu"},
    "bf16": {"precision": "bf16", "gradients": "cpu"},
}
WAYS: dict[str, dict[str, Any]] = {
    "ample": AMPLE,
    "cached": AMPLE | {"cache": "auto"},
    "speculative": AMPLE | {"update": "speculative"},
    "delayed": AMPLE | {"update": "delayed"},
    "recomputed": AMPLE | {"recompute": "all"},
    "two micro-batches": AMPLE | {"accumulation": 2},
    "durable": AMPLE | {"durability": "step"},
    "one step of three durable": AMPLE | {"durability": 3, "cache": "auto"},
}


def wrapped(directory: Path, **options: Any) -> Transformer:
    directory.mkdir(exist_ok=True)
    config = {"nvme": [directory], "cache": 0, "poison": True, **AMPLE} | options
    return infinity.wrap(transformer(), config_of(**config))


def optimizer_of(model: nn.Module) -> infinity.AdamW:
    return infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, parts: int = 1) -> float:
    total = 0.0
    for part in range(parts):
        loss = model(**text_batch(number * parts + part)).loss / parts
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def states(model: nn.Module) -> dict[str, torch.Tensor]:
    names = ("value", "exp_avg", "exp_avg_sq")
    return {
        f"{each} of {name}": found
        for name, parameter in model.named_parameters()
        for each in names
        if (found := infinity.get(parameter, each)) is not None
    }


def run(directory: Path, sleeps: bool, accumulation: int = 1, **options: Any) -> list[Any]:
    model = wrapped(directory, **options)
    engine, optimizer = infinity.engine(model), optimizer_of(model)
    seen: list[Any] = []
    for number in range(4):
        seen.append(step(model, optimizer, number, accumulation))
        if sleeps:
            engine.sleep()
            engine.wake()
        if number == 2:
            with torch.no_grad():
                seen.append(model(**text_batch(9)).logits)
    seen.append(states(model))
    engine.close()
    return seen


def opened() -> dict[Path, str]:
    """The open files of this process."""
    paths = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return {path: str(path.readlink()) for path in paths}


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[k], expected[k]) for k in found)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return torch.equal(torch.as_tensor(found), torch.as_tensor(expected))


PAIRS = [(place, "ample") for place in PLACES] + [
    (place, way)
    for place in ("nvme", "cpu", "gpu")
    for way in WAYS
    if way != "ample"
    and (place, way) != ("gpu", "delayed")
    and (place == "nvme" or "durable" not in way)
]


@pytest.mark.parametrize(("place", "way"), PAIRS)
def test_the_bits_stay(place: str, way: str, tmp_path: Path) -> None:
    options = PLACES[place] | WAYS[way]
    assert same(run(tmp_path / "a", True, **options), run(tmp_path / "b", False, **options))


@pytest.mark.parametrize("place", PLACES)
def test_the_bits_stay_in_the_least_memory(
    place: str, tmp_path: Path, smallest: Callable[..., dict[str, int]]
) -> None:
    options = {"nvme": [tmp_path], "poison": True, **PLACES[place]}
    least = PLACES[place] | smallest(transformer(), **options)
    assert same(run(tmp_path / "a", True, **least), run(tmp_path / "b", False, **least))


@pytest.mark.parametrize("cache", [0, "auto"])
@pytest.mark.parametrize("place", PLACES)
def test_the_file_has_homes_and_cache_and_no_byte_more(
    place: str, cache: Any, tmp_path: Path
) -> None:
    model = wrapped(tmp_path / "a", **PLACES[place], cache=cache)
    engine, optimizer = infinity.engine(model), optimizer_of(model)
    step(model, optimizer, 0)
    before = engine.memory()
    expected = sum(
        block.placed.cached_bytes
        if block.tier.is_drive
        else sum(buffer.nbytes for buffer in block.home.buffers)
        for unit in engine.units
        for block in unit.blocks.values()
    )
    named = set((tmp_path / "a").iterdir())
    assert engine.sleep() == expected
    assert set((tmp_path / "a").iterdir()) == named
    (file,) = (path for path, where in opened().items() if where.startswith(f"{tmp_path}/a/#"))
    assert file.stat().st_size == expected
    assert engine.memory() == {"gpu": 0, "cpu": 0, "nvme": before["nvme"] + expected}
    assert engine.sleep() == 0
    engine.wake()
    engine.wake()
    assert file not in opened()
    assert engine.memory()["cpu"] <= before["cpu"]
    step(model, optimizer, 1)
    engine.close()


def anonymous_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    found = re.search(r"^RssAnon:\s*(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.parametrize("place", ["nvme", "cpu", "gpu"])
def test_the_pages_go(place: str, tmp_path: Path) -> None:
    """At least 95 % of what the arenas hold."""
    options = {"gpu_memory": 96 << 20, "cpu_memory": 160 << 20, "cache": "auto"}
    model = wrapped(tmp_path / "a", **PLACES[place] | options, poison=False)
    engine, optimizer = infinity.engine(model), optimizer_of(model)
    step(model, optimizer, 0)
    engine.drain()
    held = sum(Probe(engine).memory(name).numel() for name in ("gpu", "cpu", "staging"))
    before = anonymous_bytes()
    engine.sleep()
    assert before - anonymous_bytes() >= 0.95 * held
    engine.wake()
    step(model, optimizer, 1)
    engine.close()


# Refusals


@contextmanager
def refused(
    engine: infinity.Engine, text: str, kind: type[Exception] = RuntimeError
) -> Iterator[None]:
    with pytest.raises(kind, match=re.escape(text)):
        engine.sleep()
    assert not Probe(engine).store.latch.asleep
    yield


def test_it_is_refused_inside_of_what_uses_the_model(tmp_path: Path) -> None:
    model = wrapped(tmp_path / "a")
    engine, optimizer = infinity.engine(model), optimizer_of(model)
    errors = []

    def attempt(*_: Any) -> None:
        try:
            engine.sleep()
        except RuntimeError as error:
            errors.append(str(error))

    model.blocks[1].register_forward_hook(attempt)
    model.blocks[2].up.weight.register_post_accumulate_grad_hook(attempt)
    loss = model(**text_batch(0)).loss
    loss.backward()
    assert len(errors) == 2 and all("engine.sleep()" in error for error in errors)
    optimizer.step()
    optimizer.zero_grad()
    with infinity.gathered(model.head), refused(engine, "is in use; call engine.sleep() after"):
        pass
    assert step(model, optimizer, 1) > 0
    engine.close()


def test_it_is_refused_while_a_gradient_waits(tmp_path: Path) -> None:
    model = wrapped(tmp_path / "a")
    engine, optimizer = infinity.engine(model), optimizer_of(model)
    model(**text_batch(0)).loss.backward()
    with refused(engine, "the gradient of places waits for a step; call engine.sleep() after"):
        optimizer.step()
    engine.sleep()  # the gradients are spent, also where they are not forgotten
    engine.wake()
    optimizer.zero_grad()
    model.norm.weight.grad = torch.ones_like(model.norm.weight)
    with refused(engine, "the gradient of norm.weight waits for a step"):
        model.zero_grad()
    engine.sleep()
    engine.close()


def test_it_is_refused_while_a_backward_needs_saved_tensors(tmp_path: Path) -> None:
    model = wrapped(tmp_path / "a", activations="nvme")
    engine, optimizer = infinity.engine(model), optimizer_of(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infinity.activations.saved_tensors.LEAST_BYTES", 1)
        loss = model(**text_batch(0)).loss
    with refused(engine, "tensors that a forward saved wait for the backward; call"):
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    del loss
    engine.sleep()
    engine.wake()
    step(model, optimizer, 1)
    engine.close()


def test_a_graph_of_before_is_there_afterward(tmp_path: Path) -> None:
    losses = []
    for name, sleeps in (("a", True), ("b", False)):
        model = wrapped(tmp_path / name)
        engine, optimizer = infinity.engine(model), optimizer_of(model)
        step(model, optimizer, 0)
        loss = model(**text_batch(1)).loss
        if sleeps:
            engine.sleep()
            with pytest.raises(infinity.EngineClosedError, match=re.escape(ASLEEP)):
                loss.backward(retain_graph=True)
            engine.wake()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item(), step(model, optimizer, 2), states(model)])
        engine.close()
    assert same(*losses)


def test_it_is_refused_during_a_snapshot(tmp_path: Path) -> None:
    model = wrapped(tmp_path / "a", durability="step")
    engine, optimizer = infinity.engine(model), optimizer_of(model)
    step(model, optimizer, 0)
    step(model, optimizer, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infinity.checkpoint.snapshots.SnapshotTask.done", lambda task: False)
        task = engine.snapshot(tmp_path / "snapshot")
        with refused(engine, f"a snapshot of step {task.step} is being written to"):
            task.wait()
    engine.sleep()
    engine.close()


def test_it_is_refused_where_drives_write_to_the_gpu(tmp_path: Path) -> None:
    model = wrapped(tmp_path / "a")
    engine = infinity.engine(model)
    Probe(engine).nvme.direct = [object()]
    with refused(engine, "set Tuning(gpu_direct='off')", infinity.ConfigError):
        Probe(engine).nvme.direct = []
    engine.close()
    with pytest.raises(infinity.EngineClosedError, match="the engine was closed"):
        engine.sleep()
    engine.wake()


@pytest.mark.parametrize("place", ["nvme", "cpu", "gpu"])
def test_no_use_while_it_sleeps(place: str, tmp_path: Path) -> None:
    """And after `wake` all is as if none had been tried."""
    found = []
    for name, tries in (("a", True), ("b", False)):
        options = {"durability": "step"} if place == "nvme" else {}
        model = wrapped(tmp_path / name, **PLACES[place], **options)
        engine, optimizer = infinity.engine(model), optimizer_of(model)
        seen = [step(model, optimizer, 0), step(model, optimizer, 1)]
        engine.save_checkpoint(tmp_path / f"{name}.saved", optimizer)
        saved = optimizer.state_dict()
        zeros = {key: torch.zeros_like(value) for key, value in model.state_dict().items()}
        engine.sleep()
        if tries:
            weight = model.norm.weight
            uses: dict[str, Callable[[], object]] = {
                "forward": lambda model=model: model(**text_batch(2)),
                "evaluation": lambda model=model: torch.no_grad()(model)(**text_batch(2)),
                "a part": lambda model=model: model.norm(torch.ones(2, 32)),
                "reading": lambda weight=weight: weight.sum().item(),
                "copying": lambda weight=weight: weight.detach().clone(),
                "state_dict": lambda model=model: model.state_dict()["norm.weight"].sum(),
                "load_state_dict": lambda model=model, zeros=zeros: model.load_state_dict(zeros),
                "engine.state_dict": engine.state_dict,
                "weights": lambda engine=engine: list(engine.weights()),
                "get": lambda weight=weight: infinity.get(weight, "exp_avg"),
                "set": lambda weight=weight: infinity.set(weight, "value", torch.ones(32)),
                "gathered": lambda model=model: infinity.gathered(model).__enter__(),
                "writing": lambda model=model: infinity.gathered(model, write=True).__enter__(),
                "a gradient": lambda weight=weight: setattr(weight, "grad", torch.ones(32)),
                "step": optimizer.step,
                "clipping": lambda engine=engine: engine.clip_grad_norm_(1.0),
                "zeros": lambda engine=engine: engine.zero_grad(set_to_none=False),
                "loading": lambda optimizer=optimizer, saved=saved: optimizer.load_state_dict(
                    saved
                ),
                "states": optimizer.state_dict,
                "save_checkpoint": lambda engine=engine: engine.save_checkpoint(tmp_path / "no"),
                "load_checkpoint": lambda engine=engine, name=name: engine.load_checkpoint(
                    tmp_path / f"{name}.saved"
                ),
                "unwrap": engine.unwrap,
            }
            if options:
                uses["snapshot"] = lambda engine=engine: engine.snapshot(tmp_path / "no")
            for what, use in uses.items():
                with pytest.raises(infinity.EngineClosedError) as refusal:
                    use()
                assert str(refusal.value) == ASLEEP, what
            assert not (tmp_path / "no").exists()
            assert engine.is_open and engine.activity() and engine.report().steps == 2
            optimizer.zero_grad()
        engine.wake()
        seen += [step(model, optimizer, 2), step(model, optimizer, 3), states(model)]
        engine.close()
        found.append(seen)
    assert same(*found)


def test_an_optimizer_that_is_made_while_it_sleeps_is_refused(tmp_path: Path) -> None:
    model = wrapped(tmp_path / "a")
    engine, optimizer = infinity.engine(model), optimizer_of(model)
    step(model, optimizer, 0)
    engine.sleep()
    del optimizer
    gc.collect()
    with pytest.raises(infinity.EngineClosedError, match=re.escape(ASLEEP)):
        optimizer_of(model)
    engine.wake()
    step(model, optimizer_of(model), 1)
    engine.close()


# Failures


@contextmanager
def faulty_files(**faults: int) -> Iterator[None]:
    io = shared_io()
    io.set_faults(**faults)
    try:
        yield
    finally:
        io.set_faults()


def test_a_failed_write_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name, fails in (("a", True), ("b", False)):
        model = wrapped(tmp_path / name, cache="auto")
        engine, optimizer = infinity.engine(model), optimizer_of(model)
        seen = [step(model, optimizer, 0)]
        if fails:
            text = rf"{tmp_path}/a: takes no file of [\d.]+ KiB for the memory of an engine"
            fault = {"fail_write_at": 0, "fail_errno": errno.EIO}
            with faulty_files(**fault), pytest.raises(FileError, match=text) as failure:
                engine.sleep()
            assert failure.value.errno == errno.EIO and "free some of" in str(failure.value)

            def full(*_: int) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            with monkeypatch.context() as patch:
                patch.setattr(os, "posix_fallocate", full)
                with pytest.raises(FileError, match="No space left"):
                    engine.sleep()
        seen += [step(model, optimizer, 1), states(model)]
        engine.close()
        found.append(seen)
    assert same(*found)


def test_a_failed_wake_can_be_tried_again(tmp_path: Path) -> None:
    found = []
    for name, fails in (("a", True), ("b", False)):
        model = wrapped(tmp_path / name, cache="auto")
        engine, optimizer = infinity.engine(model), optimizer_of(model)
        seen = [step(model, optimizer, 0)]
        if fails:
            engine.sleep()
            asleep = anonymous_bytes()
            with (
                faulty_files(fail_read_at=0, fail_errno=errno.EIO),
                pytest.raises(FileError, match="the engine sleeps still: call") as error,
            ):
                engine.wake()
            assert str(tmp_path / name) in str(error.value)
            with pytest.raises(infinity.EngineClosedError, match=re.escape(ASLEEP)):
                model(**text_batch(1))
            assert anonymous_bytes() - asleep < 4 << 20
            engine.wake()
        seen += [step(model, optimizer, 1), states(model)]
        engine.close()
        found.append(seen)
    assert same(*found)


@pytest.mark.parametrize("how", ["close", "collected"])
@pytest.mark.parametrize("durability", ["off", "step"])
def test_an_engine_that_sleeps_ends_like_any_other(
    how: str, durability: Any, tmp_path: Path
) -> None:
    model = wrapped(tmp_path / "a", durability=durability, cache="auto")
    engine, optimizer = infinity.engine(model), optimizer_of(model)
    step(model, optimizer, 0)
    engine.sleep()
    if how == "close":
        engine.close()
        with pytest.raises(infinity.EngineClosedError, match="closed"):
            model.norm.weight.sum().item()
    gone = weakref.ref(model)
    del model, engine, optimizer
    gc.collect()
    assert gone() is None
    files = [path.name for path in (tmp_path / "a").iterdir() if path.stat().st_size]
    assert bool(files) == (durability == "step"), files
    assert not [where for where in opened().values() if str(tmp_path) in where]


# Durable steps


@pytest.mark.parametrize("every", [1, 3])
def test_closed_asleep_it_is_resumed(every: int, tmp_path: Path) -> None:
    options = {"durability": every, "cache": "auto"}
    expected = run(tmp_path / "b", False, **options)
    seen: list[Any] = []
    for first in (0, 2):
        model = infinity.wrap(
            transformer(),
            config_of(nvme=[tmp_path], poison=True, **AMPLE | options),
            resume=first > 0,
        )
        engine, optimizer = infinity.engine(model), optimizer_of(model)
        assert not first or engine.committed_step == first
        for number in range(first, first + 2):
            seen.append(step(model, optimizer, number))
            if number == 2:
                with torch.no_grad():
                    seen.append(model(**text_batch(9)).logits)
        if first:
            seen.append(states(model))
        engine.sleep()
        engine.close()
    assert same(seen, expected)


PROGRAM = """
import os, signal, sys
from pathlib import Path
import infinity
import torch
from support.configs import config_of
from support.models import text_batch, transformer

torch.set_num_threads(1)
budgets = {"gpu_memory": 8 << 20, "cpu_memory": 32 << 20}
config = config_of(nvme=[Path(sys.argv[1])], durability="step", cache="auto", **budgets)
model = infinity.wrap(transformer(), config)
optimizer = infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
for number in range(3):
    model(**text_batch(number)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    infinity.engine(model).sleep()
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    infinity.engine(model).wake()
"""


def test_killed_asleep_it_is_resumed(tmp_path: Path) -> None:
    """From the last step that a forward has fixed."""
    (tmp_path / "a").mkdir()
    ended = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "a")], **CHILD)
    assert ended.returncode == -9
    options = {"durability": "step", "cache": "auto"}
    expected = run(tmp_path / "b", False, **options)
    config = config_of(nvme=[tmp_path / "a"], **AMPLE | options)
    model = infinity.wrap(transformer(), config, resume=True)
    engine, optimizer = infinity.engine(model), optimizer_of(model)
    assert engine.committed_step == 2
    assert [step(model, optimizer, number) for number in (2, 3)] == [expected[2], expected[4]]
    assert same(states(model), expected[-1])
    engine.close()


def test_a_forked_child_says_what_it_says_awake(tmp_path: Path) -> None:
    model = wrapped(tmp_path / "a")
    engine = infinity.engine(model)
    engine.sleep()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        for use in (engine.sleep, engine.wake, lambda: model(**text_batch(0))):
            try:
                use()
            except BaseException as error:
                os.write(write, f"{error}\n".encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as said:
        lines = said.read().splitlines()
    assert len(lines) == 3 and all("this process was forked" in line for line in lines), lines
    engine.wake()
    step(model, optimizer_of(model), 0)
    engine.close()


def test_masters_and_frozen_parameters(tmp_path: Path) -> None:
    """With parameters in bf16, and an embedding that is not trained."""

    def losses(name: str, sleeps: bool) -> list[Any]:
        model = transformer(tied=False)
        model.tokens.requires_grad_(False)
        (tmp_path / name).mkdir()
        config = config_of(nvme=[tmp_path / name], precision="bf16", optimizer="cpu", **AMPLE)
        infinity.wrap(model, config)
        engine, optimizer = infinity.engine(model), optimizer_of(model)
        seen: list[Any] = []
        for number in range(3):
            seen.append(step(model, optimizer, number))
            if sleeps:
                engine.sleep()
                engine.wake()
        assert Kind.MASTER in [kind for unit in engine.units for kind in unit.blocks]
        seen.append(engine.state_dict())
        engine.close()
        return seen

    assert same(losses("a", True), losses("b", False))
