"""SIGINT, SIGTERM and SIGHUP end `infinity finetune` in order, whenever they come: with a
checkpoint once training has begun, in one sentence before that, and never with states left on the
drive.

One process with everything imported forks a child for each task (see `serve`). The child signals
itself, or lets its terminal go, at a chosen point of the program, so nothing here depends on time.
"""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers.trainer_callback import CallbackHandler
from typer.testing import CliRunner

import infinity
from infinity.checkpoint.files import METRICS
from infinity.cli import job, output
from infinity.cli.main import app
from infinity.cli.trainer import FinetuneTrainer
from infinity.interrupt import SIGNALS, Interrupt, interrupted_by_signals
from infinity.models.source import ModelSource
from infinity.tiers.manifest import MANIFEST_NAME
from infinity.weights import load
from support.children import CHILD
from support.finetune_steps import during_step

OPTIONS = [
    *(
        "--model",
        "llama-tiny",
        "--sequence-length",
        "32",
        "--batch-size",
        "1",
        "--steps",
        "4",
        "--eval-batches",
        "1",
    ),
    *(
        "--gpu-memory",
        "16MiB",
        "--cpu-memory",
        "16MiB",
        "--cache",
        "0",
        "--lr",
        "1e-3",
        "--no-report",
    ),
]
POINTS: dict[str, tuple[Any, str]] = {
    "the model is looked for": (job, "find_model"),
    "data is read": (job, "load_windows"),
    "the model is built": (ModelSource, "build"),
    "the model is wrapped": (infinity, "wrap"),
    "weights are made": (load, "sources_of"),
    "the trainer is made": (FinetuneTrainer, "__init__"),
    "the loop begins": (FinetuneTrainer, "train"),
    "the model is saved": (output, "write_weights"),
    "the engine closes": (infinity.Engine, "close"),
    "a validation begins": (FinetuneTrainer, "evaluate"),
    "a validation ends": (CallbackHandler, "on_evaluate"),
}
"""Functions by what happens then. In a run without --eval-every each is called once."""


def test_handlers_of_a_program_that_may_continue_stay() -> None:
    """An interrupt for such programs notes signals without a handler, raises at the second one, and
    leaves all handlers as they were, as a notebook needs it."""
    got: list[int] = []
    before = {each: signal.getsignal(each) for each in SIGNALS}
    try:
        signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        handlers = {each: signal.getsignal(each) for each in SIGNALS}
        with pytest.raises(KeyboardInterrupt), Interrupt(only_defaults=True) as interrupt:
            os.kill(os.getpid(), signal.SIGTERM)
            assert (got, interrupt.signal) == ([signal.SIGTERM], None)
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupt.signal == signal.SIGINT
            os.kill(os.getpid(), signal.SIGINT)
        assert {each: signal.getsignal(each) for each in SIGNALS} == handlers
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


# The other side: a process that forks


def at(
    owner: Any, name: str, act: Callable[[], object], when: Callable[..., bool] = lambda *_: True
) -> None:
    """Calls of `name` of `owner` (`when` says which) first do `act`."""
    real = getattr(owner, name)

    def acting(*arguments: Any, **named: Any) -> Any:
        if when(*arguments):
            act()
        return real(*arguments, **named)

    setattr(owner, name, acting)


def send(signals: list[int]) -> None:
    for number in signals:
        os.kill(os.getpid(), number)


def in_step(number: int, act: Callable[[], object]) -> None:
    during_step(pytest.MonkeyPatch(), number, lambda trainer: act())


def plan(signals: dict[str, list[int]], ignored: list[int]) -> None:
    """Have `signals` sent at these points: a number is a step."""
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    for point, numbers in signals.items():
        if point.isdigit():
            in_step(int(point), lambda numbers=numbers: send(numbers))  # type: ignore[misc]
        else:
            at(*POINTS[point], lambda numbers=numbers: send(numbers))  # type: ignore[misc]


def command(arguments: list[str], errors: int | None) -> None:
    """A child: run the command, and leave as a process of its own would; stderr goes to the
    descriptor `errors`, if any."""
    status = 99
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if errors is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(errors, 2)
        try:
            app(arguments, prog_name="infinity")
        except SystemExit as ending:
            status = ending.code if isinstance(ending.code, int) else 0
        sys.stderr.flush()
    finally:
        os._exit(status)


def ending(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def plainly(
    arguments: list[str], where: str, signals: dict[str, list[int]], ignored: list[int]
) -> int:
    errors = os.open(Path(where, "errors.txt"), os.O_WRONLY | os.O_CREAT)
    child = os.fork()
    if not child:
        plan(signals, ignored)
        command(arguments, errors)
    os.close(errors)
    return ending(child)


def without_a_reader(
    arguments: list[str], where: str, signals: dict[str, list[int]], ignored: list[int]
) -> int:
    ours, theirs = os.pipe()
    os.close(ours)
    child = os.fork()
    if not child:
        command([*arguments, "--json"], theirs)
    os.close(theirs)
    return ending(child)


def in_a_terminal(
    arguments: list[str], where: str, signals: dict[str, list[int]], ignored: list[int]
) -> int:
    """Which is closed in step 2: the child waits for that, and goes on."""
    reached, closed = os.pipe(), os.pipe()
    child, terminal = pty.fork()
    if not child:
        os.close(closed[1])

        def meet() -> None:
            os.write(reached[1], b"x")
            assert os.read(closed[0], 1) == b""

        in_step(2, meet)
        command(arguments, None)
    assert os.read(reached[0], 1) == b"x"
    os.close(terminal)
    os.close(closed[1])
    for descriptor in (*reached, closed[0]):
        os.close(descriptor)
    return ending(child)


def serve() -> None:
    """For each line of input, a function of this file and what it takes, say how its child
    ended."""
    import transformers.models.llama.modeling_llama  # so that no child has to

    assert transformers.models.llama.modeling_llama
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        name, *values = json.loads(line)
        print(globals()[name](*values), file=answers, flush=True)


# This side


class Ended(NamedTuple):
    """How a child ended: its exit status, minus a signal that killed it, and what it wrote to
    stderr."""

    status: int
    said: str

    @property
    def last(self) -> str:
        return self.said.splitlines()[-1]


Run = Callable[..., Ended]


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        **CHILD,
    ) as process:
        yield process
        process.communicate()


@pytest.fixture
def run(server: subprocess.Popen[str], tmp_path: Path) -> Run:
    """`run(*options, how=plainly, signals={point: numbers}, ignored=())`: train in a child."""
    (tmp_path / "nvme").mkdir()
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    common = ["finetune", *OPTIONS, "--nvme", tmp_path / "nvme", "--data", tmp_path / "text.txt"]

    def child(
        *options: object,
        how: Callable[..., int] = plainly,
        signals: Any = None,
        ignored: tuple[int, ...] = (),
    ) -> Ended:
        assert server.stdin is not None and server.stdout is not None
        arguments = [str(each) for each in (*common, *options)]
        server.stdin.write(
            json.dumps([how.__name__, arguments, str(tmp_path), signals or {}, ignored]) + "\n"
        )
        server.stdin.flush()
        status, errors = int(server.stdout.readline()), tmp_path / "errors.txt"
        return Ended(status, errors.read_text() if errors.exists() else "")

    return child


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_in_training_ends_after_the_step_with_a_checkpoint(
    number: int, run: Run, tmp_path: Path
) -> None:
    ended = run("--checkpoint", tmp_path / "steps", signals={"2": [number]})
    assert ended.status == 128 + number, ended.said
    assert "Traceback" not in ended.said
    assert "checkpoint-2" in names(tmp_path / "steps")
    assert names(tmp_path / "nvme") == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
@pytest.mark.parametrize("point", list(POINTS)[:6])
def test_a_signal_before_training_is_one_sentence_and_leaves_nothing(
    point: str, number: signal.Signals, run: Run, tmp_path: Path
) -> None:
    ended = run("--checkpoint", tmp_path / "steps", signals={point: [number]})
    assert (ended.status, ended.said) == (128 + number, f"infinity: interrupted by {number.name}\n")
    assert names(tmp_path / "nvme") == []


def test_a_signal_as_the_loop_begins_ends_after_one_step(run: Run, tmp_path: Path) -> None:
    ended = run("--checkpoint", tmp_path / "steps", signals={"the loop begins": [signal.SIGTERM]})
    assert ended.status == 128 + signal.SIGTERM, ended.said
    assert "checkpoint-1" in names(tmp_path / "steps")
    assert names(tmp_path / "nvme") == []


@pytest.mark.parametrize("durability", ["auto", "off"])
@pytest.mark.parametrize("point", list(POINTS)[-2:])
def test_a_signal_in_a_validation_ends_after_its_step(
    point: str, durability: str, run: Run, tmp_path: Path
) -> None:
    options = ("--checkpoint", tmp_path / "steps", "--eval-every", 2, "--durability", durability)
    ended = run(*options, signals={point: [signal.SIGTERM]})
    assert ended.status == 128 + signal.SIGTERM, ended.said
    assert names(tmp_path / "steps") == ["checkpoint-2", METRICS]
    assert names(tmp_path / "nvme") == []


@pytest.mark.parametrize(
    ("first", "second"), [(signal.SIGTERM, signal.SIGTERM), (signal.SIGHUP, signal.SIGINT)]
)
def test_a_second_signal_ends_at_once_and_a_third_does_not_disturb_the_clean_up(
    first: int, second: int, run: Run, tmp_path: Path
) -> None:
    signals = {"3": [first, second], "the engine closes": SIGNALS}
    ended = run("--checkpoint", tmp_path / "steps", "--checkpoint-every", 1, signals=signals)
    assert ended.status == 128 + second
    assert ended.last == "infinity: interrupted" + (
        " by SIGTERM" if second == signal.SIGTERM else ""
    )
    assert "Traceback" not in ended.said
    assert [name for name in names(tmp_path / "steps") if "checkpoint" in name] == [
        "checkpoint-1",
        "checkpoint-2",
    ], "the step was not waited for"
    assert MANIFEST_NAME in names(tmp_path / "nvme"), "committed steps stay"


@pytest.mark.parametrize("point", ["the model is saved", "the engine closes"])
def test_a_signal_after_training_does_not_undo_what_was_done(
    point: str, run: Run, tmp_path: Path
) -> None:
    ended = run("--output", tmp_path / "out", signals={point: [signal.SIGHUP]})
    assert ended.status == 0, ended.said
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert names(tmp_path / "nvme") == []


def test_nohup_is_heeded(run: Run) -> None:
    assert run(signals={"2": [signal.SIGHUP]}, ignored=(signal.SIGHUP,)).status == 0


def test_a_terminal_that_is_closed_costs_nothing(run: Run, tmp_path: Path) -> None:
    """The kernel sends SIGHUP, and every write to the terminal fails from then on."""
    assert run("--checkpoint", tmp_path / "steps", how=in_a_terminal).status == 128 + signal.SIGHUP
    assert "checkpoint-2" in names(tmp_path / "steps")
    assert names(tmp_path / "nvme") == []


def test_a_reader_that_has_gone_does_not_end_training(run: Run, tmp_path: Path) -> None:
    """As in `infinity finetune 2>&1 | head -1`."""
    run("--checkpoint", tmp_path / "steps", how=without_a_reader)
    assert "checkpoint-4" in names(tmp_path / "steps")
    assert names(tmp_path / "nvme") == []


def test_handlers_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    monkeypatch.setattr(job, "find_model", lambda *_: send([signal.SIGHUP]))
    result = CliRunner().invoke(app, ["finetune", "--nvme", str(tmp_path)])
    assert (result.exit_code, result.stderr) == (
        128 + signal.SIGHUP,
        "infinity: interrupted by SIGHUP\n",
    )
    assert [signal.getsignal(number) for number in SIGNALS] == before
    with pytest.raises(KeyboardInterrupt) as caught, interrupted_by_signals(), Interrupt():
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.args == (signal.SIGTERM,)
    assert [signal.getsignal(number) for number in SIGNALS] == before


if __name__ == "__main__":
    serve()
