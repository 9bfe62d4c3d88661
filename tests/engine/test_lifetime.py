"""An engine leaves nothing behind: not when it is closed, dropped, forgotten at exit, killed, or
left by an exception."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import infinity
from infinity.directories.lock import LOCK_NAME
from infinity.tiers.manifest import STATES_NAME
from support.children import CHILD
from support.configs import config_of
from support.models import text_batch, transformer

pytestmark = [pytest.mark.usefixtures("one_thread")]

MIB = 1 << 20
BUDGETS = {"gpu_memory": 2 * MIB, "cpu_memory": 8 * MIB, "cache": 0}


def open_engine(
    directory: Path | str, model: nn.Module | None = None, **config: Any
) -> tuple[nn.Module, infinity.AdamW]:
    model = infinity.wrap(
        model or transformer(),
        config_of(**({"nvme": [directory], "poison": True} | BUDGETS | config)),
    )
    return model, infinity.AdamW(model.parameters(), max_grad_norm=1.0)


def train(model: nn.Module, optimizer: infinity.AdamW, number: int = 0) -> float:
    loss = model(**text_batch(number)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def hooks_of(model: nn.Module) -> list[str]:
    """Every hook on the modules and parameters of `model`, and every attribute that the engine may
    have set."""
    found = [
        f"{name}.{kind}"
        for name, module in model.named_modules()
        for kind, value in vars(module).items()
        if "hook" in kind and isinstance(value, dict) and value
    ]
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        found += [
            f"{name}.{kind}"
            for name, parameter in model.named_parameters()
            if getattr(parameter, kind, None)
        ]
    return found + sorted(vars(model).keys() - vars(transformer()).keys())


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def child(task: str, directory: Path) -> subprocess.Popen[str]:
    """This file as a program in another process; see the end of the file."""
    command = [sys.executable, "-W", "error", __file__, task, str(directory)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **CHILD
    )


def test_fifty_engines_leave_nothing_behind(
    tmp_path: Path, footprint: Callable[[], object]
) -> None:
    kept = []  # an engine and an optimizer that somebody keeps hold nothing either
    for number in range(50):
        gradients = ("cpu", "nvme")[number % 2]
        model, optimizer = open_engine(
            tmp_path, gradients=gradients, io_engine=("auto", "posix")[number // 2 % 2]
        )
        train(model, optimizer)
        engine = infinity.engine(model)
        engine.close()
        assert hooks_of(model) == []
        assert list(tmp_path.iterdir()) == []
        if number % 10 == 0:
            kept.append((model, engine, optimizer))
        if number == 5:
            del model, engine, optimizer
            held, memory = footprint(), resident()
        elif number > 5:
            del model, engine, optimizer
    assert footprint() == held
    # Of 44 engines with 10 MiB each. What malloc keeps of small things was up to 6 MiB.
    assert resident() - memory < 16 * MIB


def test_a_closed_engine_that_is_kept_holds_no_thread_and_no_descriptor(
    tmp_path: Path, footprint: Callable[[], object]
) -> None:
    train(*open_engine(tmp_path))  # what is started only once
    gc.collect()
    before = footprint()
    model, optimizer = open_engine(tmp_path, threads=4)
    train(model, optimizer)
    engine = infinity.engine(model)
    assert footprint() != before
    engine.close()
    assert footprint() == before
    assert optimizer.param_groups and engine.units


def test_close_twice_and_as_a_context_manager(tmp_path: Path) -> None:
    model, optimizer = open_engine(tmp_path)
    with infinity.engine(model) as engine:
        train(model, optimizer)
        assert {path.name for path in tmp_path.iterdir()} == {LOCK_NAME, STATES_NAME}
        assert len(hooks_of(model)) > len(list(model.modules()))
    assert hooks_of(model) == []
    assert list(tmp_path.iterdir()) == []
    engine.close()
    engine.close()
    with pytest.raises(
        infinity.ConfigError, match=re.escape("the model is not wrapped, or its engine was closed")
    ):
        infinity.engine(model)


def test_the_context_manager_closes_after_an_exception(tmp_path: Path) -> None:
    model, _ = open_engine(tmp_path)
    with pytest.raises(ZeroDivisionError), infinity.engine(model):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    assert hooks_of(model) == []


def test_closing_waits_for_the_update_and_forgets_the_backward(
    tmp_path: Path, footprint: Callable[[], object]
) -> None:
    train(*open_engine(tmp_path))
    gc.collect()
    before = footprint()
    for gradients in ("cpu", "nvme"):
        model, optimizer = open_engine(tmp_path, gradients=gradients)
        train(model, optimizer)
        model(**text_batch(1)).loss.backward()
        optimizer.step()
        infinity.engine(model).close()
        del model, optimizer
        assert footprint() == before


def test_after_close_everything_says_so(tmp_path: Path) -> None:
    model, optimizer = open_engine(tmp_path)
    train(model, optimizer)
    engine = infinity.engine(model)
    parameter = model.tokens.weight
    engine.close()
    assert (parameter.shape, parameter.dtype, parameter.requires_grad) == (
        torch.Size([64, 32]),
        torch.float32,
        True,
    )
    gone = (
        "tokens.weight has no data any more, because its engine was closed; save the "
        "data first, then close"
    )
    for touch in (
        lambda: parameter + 1,
        lambda: parameter.data,
        lambda: parameter[0],
        lambda: model(**text_batch(0)),
    ):
        with pytest.raises(infinity.EngineClosedError, match=gone):
            touch()
    with pytest.raises(infinity.EngineClosedError, match="no data any more"):
        model.state_dict()
    for use in (
        engine.memory,
        engine.report,
        engine.state_dict,
        engine.drain,
        optimizer.step,
        optimizer.state_dict,
        lambda: engine.clip_grad_norm_(1.0),
        lambda: list(engine.weights()),
        lambda: infinity.AdamW(model.parameters()),
    ):
        with pytest.raises(infinity.EngineClosedError, match="the engine was closed"):
            use()
    with (
        pytest.raises(infinity.EngineClosedError, match="the engine was closed"),
        infinity.gathered(model),
    ):
        pass


def test_a_model_wrapped_again_after_its_weights_were_restored(tmp_path: Path) -> None:
    model, optimizer = open_engine(tmp_path)
    train(model, optimizer)
    with infinity.engine(model) as engine:
        saved = engine.state_dict()
    fresh = transformer(seed=1)
    fresh.load_state_dict(saved)
    fresh, optimizer = open_engine(tmp_path, fresh)
    with infinity.engine(fresh) as engine:
        assert all(torch.equal(value, saved[name]) for name, value in engine.state_dict().items())
        train(fresh, optimizer)


def test_dropping_the_model_closes(tmp_path: Path, footprint: Callable[[], object]) -> None:
    train(*open_engine(tmp_path))
    gc.collect()
    before = footprint()
    model, optimizer = open_engine(tmp_path)
    train(model, optimizer)
    engine = infinity.engine(model)
    assert len(list(tmp_path.iterdir())) == 2
    del model  # the optimizer and the engine do not keep it alive
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert footprint() == before
    with pytest.raises(infinity.EngineClosedError, match="the model of this engine is gone"):
        _ = engine.model
    with pytest.raises(infinity.EngineClosedError, match="the engine was closed"):
        optimizer.step()
    engine.close()


@pytest.mark.parametrize("task", ["exit", "exit after an error"])
def test_the_end_of_the_interpreter_closes(task: str, tmp_path: Path) -> None:
    process = child(task, tmp_path)
    output, errors = process.communicate()
    assert output == "trained\n"
    if task == "exit":
        assert (process.returncode, errors) == (0, "")
    else:
        assert (process.returncode, errors.splitlines()[-1]) == (1, "ZeroDivisionError: on purpose")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_leaves_is_reclaimed_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = child("wait", tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "trained\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    left = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert left.keys() == {LOCK_NAME, STATES_NAME}
    (tmp_path / "of the user").write_text("stays")
    with caplog.at_level(logging.WARNING, "infinity"):
        model, optimizer = open_engine(tmp_path, io_engine="posix")
    assert [record.getMessage() for record in caplog.records] == [
        f"reclaimed {left[STATES_NAME] >> 20} MiB that an earlier run left in {tmp_path}"
    ]
    with infinity.engine(model):
        train(model, optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["of the user"]


def test_a_killed_process_does_not_lock_the_directory_even_while_its_file_is_there(
    tmp_path: Path,
) -> None:
    process = child("wait", tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    with pytest.raises(infinity.PathInUseError, match=f"in use by process {process.pid};"):
        open_engine(tmp_path)
    process.kill()
    process.communicate()
    model, _ = open_engine(tmp_path)
    infinity.engine(model).close()


class Fails(nn.Module):
    """A block whose forward, or whose backward, fails when it is told to."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.fail = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if self.fail == "forward":
            raise ZeroDivisionError("on purpose")
        if self.fail == "backward":
            x.register_hook(lambda _: 1 // 0)
        return x


@pytest.mark.parametrize("gradients", ["cpu", "nvme"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_the_engine_as_it_was(
    where: str, gradients: str, tmp_path: Path
) -> None:
    """The steps after it are, bit for bit, those of a run without it."""

    def losses(directory: Path, failures: bool) -> list[float]:
        directory.mkdir()
        model = transformer()
        model.blocks[2] = Fails(model.blocks[2])
        model, optimizer = open_engine(directory, model, gradients=gradients)
        with infinity.engine(model) as engine:
            found = [train(model, optimizer, number) for number in range(3)]
            for _ in range(2 * failures):
                engine.drain()
                # So that what is resident before and after is what a forward leaves.
                model(**text_batch(7))
                before = engine.memory()
                model.blocks[2].fail = where
                with pytest.raises(ZeroDivisionError):
                    model(**text_batch(8)).loss.backward()
                model.blocks[2].fail = ""
                optimizer.zero_grad()
                model(**text_batch(7))
                assert engine.memory() == before
            found += [train(model, optimizer, number) for number in range(3, 6)]
            assert all(
                block.copy.pins == 0 for unit in engine.units for block in unit.blocks.values()
            )
        return found

    assert losses(tmp_path / "with", True) == losses(tmp_path / "without", False)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_closing_right_after_an_exception(
    where: str, tmp_path: Path, footprint: Callable[[], object]
) -> None:
    train(*open_engine(tmp_path))
    gc.collect()
    before = footprint()
    model = transformer()
    model.blocks[1] = Fails(model.blocks[1])
    model, optimizer = open_engine(tmp_path, model, gradients="nvme")
    train(model, optimizer)
    model.blocks[1].fail = where
    with pytest.raises(ZeroDivisionError):
        train(model, optimizer)
    infinity.engine(model).close()
    assert hooks_of(model) == []
    assert list(tmp_path.iterdir()) == []
    assert footprint() == before


def test_an_optimizer_may_be_replaced(tmp_path: Path) -> None:
    """The second one begins with fresh moments, as with torch."""

    def run(replace: bool) -> list[float]:
        model, optimizer = open_engine(tmp_path)
        with infinity.engine(model) as engine:
            losses = [train(model, optimizer, number) for number in range(2)]
            weights = engine.state_dict()
            del optimizer
            if not replace:
                engine.close()
                model = transformer()
                model.load_state_dict(weights)
                model, optimizer = open_engine(tmp_path, model)
            else:
                optimizer = infinity.AdamW(model.parameters(), max_grad_norm=1.0)
            losses += [train(model, optimizer, number) for number in range(2, 4)]
            infinity.engine(model).close()
        return losses

    assert run(True) == run(False)


def main(task: str, directory: str) -> None:
    """What a child does."""
    torch.set_num_threads(1)
    model, optimizer = open_engine(directory, gradients="nvme")
    train(model, optimizer)
    model(**text_batch(1)).loss.backward()
    optimizer.step()  # its update is still under way
    print("trained", flush=True)
    if task == "wait":
        sys.stdin.read()
    elif task == "exit after an error":
        raise ZeroDivisionError("on purpose")


if __name__ == "__main__":
    main(*sys.argv[1:])


class Refusing(TorchDispatchMode):
    """Lets no operator through, as the fake tensors that torch.compile traces with let none on real
    ones through."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{function} was intercepted")


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_model_that_is_collected_while_operators_are_intercepted(
    tmp_path: Path, footprint: Callable[[], object]
) -> None:
    """A collection may start anywhere in what torch.compile traces."""
    before = footprint()
    model, optimizer = open_engine(tmp_path)
    train(model, optimizer)
    model.itself = [model]  # type: ignore[assignment] - a cycle, so that a collection ends it
    gc.collect()
    del model, optimizer
    with Refusing():
        gc.collect()
    for thread in [thread for thread in threading.enumerate() if thread.name == "infinity-closing"]:
        thread.join()
    assert footprint() == before
    assert not list(tmp_path.glob("*.bin"))
