"""`infinity finetune --checkpoint DIR --resume`: a run that was interrupted ends as if nothing had
happened."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from typer.testing import CliRunner

import infinity
from infinity.checkpoint.files import METRICS
from infinity.cli import job, output
from infinity.cli.main import app
from infinity.cli.output import RUN_NAME
from infinity.directories.directory import Directory
from infinity.directories.lock import lock_directory
from infinity.errors import CheckpointError
from support import threads
from support.durable import finetune_in_a_process
from support.finetune_steps import during_step, steps_in

pytestmark = pytest.mark.usefixtures("one_thread", "undrawn")

STEPS = 8
# With dropout, accumulation, warm-up, and windows that come a second time.
OPTIONS = [
    *(
        "--model",
        "gpt2-tiny",
        "--sequence-length",
        32,
        "--batch-size",
        2,
        "--accumulate",
        2,
        "--steps",
        STEPS,
        "--eval-every",
        3,
    ),
    *(
        "--eval-batches",
        2,
        "--gpu-memory",
        "64MiB",
        "--cpu-memory",
        "64MiB",
        "--cache",
        0,
        "--lr",
        "1e-3",
        "--seed",
        3,
        "--warmup",
        4,
    ),
]


def options_in(directory: Path) -> list[Any]:
    """Options of a run whose states and data are in `directory`."""
    (directory / "nvme").mkdir()
    (directory / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    return [*OPTIONS, "--nvme", directory / "nvme", "--data", directory / "text.txt", "--json"]


@pytest.fixture
def common(tmp_path: Path) -> list[Any]:
    """Options of every run."""
    return options_in(tmp_path)


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["finetune", *map(str, arguments)])


def finished(*arguments: Any) -> dict[str, Any]:
    result = run(*arguments, "--debug")
    assert result.exit_code == 0, (result.stderr, result.exception)
    summary: dict[str, Any] = json.loads(result.stdout)
    return summary


def refusal(*arguments: Any) -> str:
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.stderr
    return str(result.stderr.splitlines()[-1]).removeprefix("infinity: ")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != METRICS)


def plain(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint has, read by torch."""
    dcp_to_torch_save(checkpoint / "infinity", checkpoint.parent / "plain.pt")
    found: dict[str, Any] = torch.load(checkpoint.parent / "plain.pt", weights_only=True)
    (checkpoint.parent / "plain.pt").unlink()
    return {part: found[part] for part in ("model", "optimizer", "extra")}


def same(a: Any, b: Any) -> bool:
    """Whether all tensors are equal in every bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    return not isinstance(a, torch.Tensor) or torch.equal(a, b)


class Killed(Exception):
    """The process is gone."""


def nothing(*_: Any, **__: Any) -> None:
    """Does nothing."""


def die(*_: Any) -> None:
    raise Killed


class Whole(NamedTuple):
    """What a run without an interruption has said and written."""

    summary: dict[str, Any]
    model: dict[str, torch.Tensor]
    losses: list[tuple[float, ...]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    place = tmp_path_factory.mktemp("uninterrupted")
    out, steps = place / "out", place / "steps"
    with threads.one_thread():
        summary = finished(*options_in(place), "--output", out, "--checkpoint", steps)
    return Whole(
        summary, load_file(out / "model.safetensors"), steps_in(steps / f"checkpoint-{STEPS}")
    )


@pytest.fixture
def expected(whole: Whole) -> Callable[[Path, Path, dict[str, Any]], None]:
    """`expected(output, checkpoints, summary)`: all is as without an interruption, in every bit."""

    def check(output: Path, checkpoints: Path, summary: dict[str, Any]) -> None:
        assert same(load_file(output / "model.safetensors"), whole.model)
        found = steps_in(checkpoints / f"checkpoint-{STEPS}")
        assert [step[0] for step in found] == list(range(1, STEPS + 1))
        assert found == whole.losses
        for key in ("loss", "steps", "signal"):
            assert summary[key] == whole.summary[key]

    return check


@pytest.mark.parametrize(("every", "killed"), [(1, [1, 6]), (3, [2, 5, 8]), (4, [5, 5, 5])])
def test_a_run_that_is_killed_again_and_again_ends_as_if_nothing_had_happened(
    every: int, killed: list[int], common: list[Any], expected: Callable[..., None], tmp_path: Path
) -> None:
    where, output = tmp_path / "steps", tmp_path / "out"
    arguments = [
        *common,
        "--output",
        output,
        "--checkpoint",
        where,
        "--checkpoint-every",
        every,
        "--resume",
        "--durability",
        "off",
    ]
    last = 0
    for number in killed:
        with pytest.MonkeyPatch.context() as patch:
            during_step(patch, number, die)
            result = run(*arguments, "--debug")
        assert isinstance(result.exception, Killed)
        line = (
            f"going on from {where}/checkpoint-{last}"
            if last
            else f"no checkpoint in {where} yet: training starts from the beginning"
        )
        assert line in result.stderr
        last = (number - 1) // every * every
        kept = [f"checkpoint-{n}" for n in range(every, last + 1, every)][-2:]
        assert names(where) == kept, (
            "at most that many steps are lost, and the last two checkpoints are kept"
        )
    expected(output, where, finished(*arguments))
    assert names(where)[-1] == f"checkpoint-{STEPS}"
    expected(output, where, finished(*arguments))  # there is nothing left to do


@pytest.mark.parametrize(("after", "killed"), [(0, 6), (6, 4)])
def test_updates_one_step_late_are_so_from_the_same_step_on(
    after: int, killed: int, common: list[Any], tmp_path: Path
) -> None:
    """The run is cut before updates begin to be late, or after. Both save at the same steps, which
    is when updates are seen."""
    late = [
        *common,
        "--update",
        "delayed",
        "--delayed-after",
        after,
        "--checkpoint-every",
        3,
        "--keep-checkpoints",
        9,
    ]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    finished(*late, "--checkpoint", whole)
    with pytest.MonkeyPatch.context() as patch:
        during_step(patch, killed, die)
        assert isinstance(run(*late, "--checkpoint", cut, "--debug").exception, Killed)
    assert names(cut) == ["checkpoint-3"]
    finished(*late, "--checkpoint", cut, "--resume")
    assert names(cut) == names(whole) == ["checkpoint-3", "checkpoint-6", "checkpoint-8"]
    for name in names(whole):
        assert steps_in(cut / name) == steps_in(whole / name)
        assert same(plain(cut / name), plain(whole / name))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_loses_nothing(
    number: signal.Signals, common: list[Any], expected: Callable[..., None], tmp_path: Path
) -> None:
    where, output = tmp_path / "steps", tmp_path / "out"
    arguments = [*common, "--output", output, "--checkpoint", where]
    with pytest.MonkeyPatch.context() as patch:
        during_step(patch, 5, lambda trainer: os.kill(os.getpid(), number))
        assert run(*arguments).exit_code == 128 + number
    assert names(where) == ["checkpoint-5"]
    expected(output, where, finished(*arguments, "--resume"))


def test_another_placement_goes_on_with_the_same_bits(
    common: list[Any], expected: Callable[..., None], tmp_path: Path
) -> None:
    where, output = tmp_path / "steps", tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        during_step(patch, 5, die)
        run(*common, "--checkpoint", where, "--checkpoint-every", 2)
    there = [
        "--parameters",
        "cpu",
        "--optimizer",
        "gpu",
        "--gradients",
        "gpu",
        "--no-checkpoint-activations",
    ]
    expected(
        output,
        where,
        finished(*common, *there, "--output", output, "--checkpoint", where, "--resume"),
    )


@pytest.mark.parametrize("durability", ["off", "auto"])
def test_a_run_that_goes_on_from_a_checkpoint_has_one_line_for_each_step(
    durability: str, common: list[Any], tmp_path: Path
) -> None:
    where, output = tmp_path / "steps", tmp_path / "out"
    arguments = [*common, "--output", output, "--checkpoint", where, "--checkpoint-every", 2]
    with pytest.MonkeyPatch.context() as patch:
        during_step(patch, 6, die)
        run(*arguments, "--durability", "off")
    finished(*arguments, "--resume", "--durability", durability)
    lines = [json.loads(line) for line in (output / METRICS).read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6, 8]


def test_a_checkpoint_that_is_newer_than_the_committed_step_is_taken(
    common: list[Any], tmp_path: Path
) -> None:
    where = tmp_path / "steps"
    arguments = [*common, "--checkpoint", where, "--checkpoint-every", 2]
    finished(*arguments, "--durability", "step", "--steps", 4)
    (tmp_path / "other").mkdir()
    elsewhere = [tmp_path / "other" if each == tmp_path / "nvme" else each for each in arguments]
    finished(*elsewhere, "--durability", "off", "--resume", "--steps", 6)
    result = run(*arguments, "--durability", "step", "--resume")
    assert result.exit_code == 0, result.stderr
    going_on = [line for line in result.stderr.splitlines() if line.startswith("going on")]
    assert going_on == [f"going on from {where}/checkpoint-6"]
    assert [line.split("/")[0] for line in result.stderr.splitlines() if "tokens/s" in line] == [
        "step 7",
        "step 8",
    ]
    assert [number for number, *_ in steps_in(where / "checkpoint-8")] == list(range(1, 9))


def test_more_frequent_checkpoints_are_made_from_the_next_step_on(
    common: list[Any], tmp_path: Path
) -> None:
    where = tmp_path / "steps"
    options = ["--checkpoint", where, "--durability", "off", "--keep-checkpoints", 9]
    finished(*common, *options, "--checkpoint-every", 4, "--steps", 4)
    finished(*common, *options, "--checkpoint-every", 3, "--resume")
    assert names(where) == ["checkpoint-4", "checkpoint-6", "checkpoint-8"]


# What is refused


@pytest.mark.parametrize("options", [["--durability", "off"], ["--optimizer", "cpu"]])
def test_resume_needs_something_to_go_on_from(options: list[str], common: list[Any]) -> None:
    assert refusal(*common, *options, "--resume") == (
        "--resume needs --checkpoint DIR, the directory of the run that it goes on with, or steps "
        "that were committed, which takes parameters and optimizer states on nvme"
    )


def test_a_directory_that_cannot_be_one(common: list[Any], tmp_path: Path) -> None:
    assert (
        refusal(*common, "--checkpoint", tmp_path / "text.txt")
        == f"--checkpoint {tmp_path}/text.txt is not a directory"
    )
    assert (
        refusal(*common, "--checkpoint", tmp_path / "text.txt" / "x")
        == f"{tmp_path}/text.txt/x: Not a directory; choose another path"
    )


def test_checkpoints_of_an_earlier_run_are_not_mixed_with_new_ones(
    common: list[Any], tmp_path: Path
) -> None:
    where = tmp_path / "steps"
    finished(*common, "--checkpoint", where, "--checkpoint-every", 3)
    assert names(where) == ["checkpoint-6", "checkpoint-8"]
    assert refusal(*common, "--checkpoint", where) == (
        f"--checkpoint {where} has checkpoints of an earlier run, up to checkpoint-8; go on from "
        "it with --resume, or choose another directory"
    )
    for option, before, now in [
        ("--batch-size", "2", "4"),
        ("--lr", "0.001", "0.5"),
        ("--sequence-length", "32", "16"),
    ]:
        assert refusal(*common, "--checkpoint", where, "--resume", option, now) == (
            f"{where}/checkpoint-8 has {option} {before}, and here it is {now}; resume with the "
            "same, or start anew in another directory"
        )
    text = refusal(*common, "--checkpoint", where, "--resume", "--model", "llama-tiny")
    assert text.startswith(f"{where}/checkpoint-8/infinity belongs to another model: it has no ")


def test_more_steps_may_follow(common: list[Any], tmp_path: Path) -> None:
    where = tmp_path / "steps"
    first = finished(*common, "--checkpoint", where)
    more = finished(*common, "--checkpoint", where, "--resume", "--steps", STEPS + 4)
    assert more["steps"] == STEPS + 4
    assert more["loss"]["first"] == first["loss"]["first"]
    assert names(where) == [f"checkpoint-{STEPS + 4}", f"checkpoint-{STEPS}"]


def test_what_killed_jobs_leave_is_removed_and_never_taken(
    common: list[Any], tmp_path: Path
) -> None:
    where = tmp_path / "steps"
    for name in (".saving/checkpoint-99/infinity", "checkpoint-99", "notes", "checkpoint-12"):
        (where / name).mkdir(parents=True)
    (where / ".saving" / "checkpoint-99" / "infinity" / "infinity.json").touch()
    (where / "checkpoint-12" / "mine.txt").write_text("somebody else's")
    options = ["--keep-checkpoints", 1, "--checkpoint-every", 2, "--resume"]
    assert finished(*common, "--checkpoint", where, *options)["steps"] == STEPS
    assert names(where) == ["checkpoint-12", f"checkpoint-{STEPS}", "checkpoint-99", "notes"]


def test_a_removal_that_is_killed_leaves_no_step(
    common: list[Any],
    expected: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A checkpoint is in the folder of drafts before its first file goes, and the next run removes
    it."""
    where, output = tmp_path / "steps", tmp_path / "out"
    arguments = [*common, "--output", output, "--checkpoint", where, "--checkpoint-every", 2]
    arguments += ["--keep-checkpoints", 1]

    rmtree = shutil.rmtree

    def killed(path: Path, **options: Any) -> None:
        old = Path(path) / "checkpoint-2" / "infinity" / "infinity.json"
        if old.exists():
            old.unlink()
            raise Killed
        rmtree(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        assert isinstance(run(*arguments, "--debug").exception, Killed)
    assert names(where) == [".saving", "checkpoint-4"]
    with monkeypatch.context() as patch:
        during_step(patch, 5, die)
        assert isinstance(run(*arguments, "--resume", "--debug").exception, Killed)
    assert names(where) == ["checkpoint-4"], "it went before the first step"
    expected(output, where, finished(*arguments, "--resume"))


def test_gc_removes_what_saves_left_and_not_what_one_is_saving(tmp_path: Path) -> None:
    for name in (".saving", "checkpoint-6", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(b"x")

    def removed() -> list[str]:
        result = CliRunner().invoke(app, ["gc", str(tmp_path), "--json"])
        assert result.exit_code == 0, result.stderr
        return sorted(json.loads(result.stdout)["removed"])

    with lock_directory(tmp_path / ".saving", "output_dir"):
        assert removed() == []
    assert removed() == [str(tmp_path / ".saving")]
    assert names(tmp_path) == ["checkpoint-6", "mine"]


@pytest.mark.parametrize("before", [True, False])
def test_a_kill_as_a_checkpoint_replaces_another_leaves_one_of_the_two(
    common: list[Any],
    expected: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: bool,
) -> None:
    """The last step is saved again, because its checkpoint was damaged."""
    where, output = tmp_path / "steps", tmp_path / "out"
    arguments = [*common, "--checkpoint", where, "--checkpoint-every", 4]
    finished(*arguments)
    shutil.rmtree(where / f"checkpoint-{STEPS}" / "infinity")
    exchange = Directory.exchange

    def killed(self: Directory, name: str, other: str) -> None:
        if not before:
            exchange(self, name, other)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Directory, "exchange", killed)
        during_step(patch, STEPS, lambda trainer: patch.setattr(shutil, "rmtree", nothing))
        options = ["--resume", "--durability", "off", "--debug"]
        assert isinstance(run(*arguments, *options).exception, Killed)
    assert names(where) == [".saving", "checkpoint-4", f"checkpoint-{STEPS}"]
    assert (where / f"checkpoint-{STEPS}" / "infinity").exists() is not before
    options = ["--resume", "--durability", "off", "--output", output]
    expected(output, where, finished(*arguments, *options))


def test_a_second_job_in_one_directory_is_refused(common: list[Any], tmp_path: Path) -> None:
    where = tmp_path / "steps"
    where.mkdir()
    with lock_directory(where, "--checkpoint"):
        assert refusal(*common, "--checkpoint", where) == (
            f"--checkpoint {where} is in use by process {os.getpid()}; give each job its "
            "own directory"
        )
        assert names(where) == ["infinity.lock"]
    finished(*common, "--checkpoint", where, "--checkpoint-every", STEPS)
    assert names(where) == [f"checkpoint-{STEPS}"], "a job leaves no lock behind"


def test_a_save_that_fails_ends_the_run_and_leaves_the_checkpoint_before(
    common: list[Any],
    expected: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where, output = tmp_path / "steps", tmp_path / "out"
    arguments = [*common, "--output", output, "--checkpoint", where, "--checkpoint-every", 2]
    arguments += ["--durability", "off"]  # commits would fail first

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        during_step(patch, 4, lambda trainer: patch.setattr(os, "fsync", full))
        assert (
            refusal(*arguments)
            == f"{where}/.saving/checkpoint-4: No space left on device; free some of its space, or "
            "choose another path"
        )
    assert names(where) == ["checkpoint-2"]
    expected(output, where, finished(*arguments, "--resume"))
    assert issubclass(CheckpointError, RuntimeError)


def test_weights_whose_export_dies_are_not_lost(
    common: list[Any],
    tmp_path: Path,
    expected: Callable[[Path, Path, dict[str, Any]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = [*common, "--output", tmp_path / "out", "--checkpoint", tmp_path / "steps"]
    with monkeypatch.context() as patch:
        patch.setattr(job, "save_model", die)
        result = run(*options, "--debug")
    assert isinstance(result.exception, Killed)
    assert f"checkpoint-{STEPS}" in names(tmp_path / "steps")
    expected(tmp_path / "out", tmp_path / "steps", finished(*options, "--resume"))


def stated(directory: Path) -> dict[str, tuple[int, bytes]]:
    """All files of a directory, with their times and bytes."""
    return {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in directory.iterdir()}


def test_a_run_that_was_killed_after_its_output_was_whole_is_complete(
    common: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps are still committed: they go, and nothing else changes."""
    out, resumed = tmp_path / "out", [*common, "--output", tmp_path / "out", "--resume"]
    with monkeypatch.context() as patch:
        patch.setattr(infinity.Engine, "discard_committed", lambda _: die())
        assert isinstance(run(*resumed, "--debug").exception, Killed)
    assert names(tmp_path / "nvme") != []
    before = stated(out)
    for _ in range(2):
        result = run(*resumed)
        assert result.exit_code == 0, result.stderr
        assert f"the run is complete, and its output is in {out}" in result.stderr
        assert json.loads(result.stdout)["steps"] == STEPS
        assert stated(out) == before
        assert names(tmp_path / "nvme") == []


def test_a_complete_run_leaves_what_another_one_has_committed(
    common: list[Any], tmp_path: Path
) -> None:
    first = [*common, "--output", tmp_path / "first"]
    finished(*first)
    with pytest.MonkeyPatch.context() as patch:
        during_step(patch, 4, die)
        assert isinstance(run(*common, "--debug").exception, Killed)
    before = stated(tmp_path / "nvme")
    finished(*first, "--resume")
    assert stated(tmp_path / "nvme") == before != {}


def test_an_output_that_was_cut_off_is_written_again(
    common: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights have their name, and the config has not. A file that is gone is missed, too."""
    out, resumed = tmp_path / "out", [*common, "--output", tmp_path / "out", "--resume"]
    finished(*common, "--output", tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(output, "save_description", die)
        assert isinstance(run(*resumed, "--debug").exception, Killed)
    assert "model.safetensors" in names(out) and "config.json" not in names(out)
    for _ in range(2):
        finished(*resumed)
        assert names(out) == names(tmp_path / "whole")
        model = "model.safetensors"
        assert same(load_file(out / model), load_file(tmp_path / "whole" / model))
        (out / "config.json").unlink()


def test_an_output_of_another_run_is_not_taken_for_a_complete_one(
    common: list[Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    finished(*common, "--output", out)
    refused = f"--output {out} is not empty; choose another one, or give --overwrite"
    assert refusal(*common, "--output", out) == refused
    assert refusal(*common, "--output", out, "--resume", "--lr", "0.5") == refused
    for content in (b"", b"[]", b"\xff", b'{"options": 1}'):
        (out / RUN_NAME).write_bytes(content)
        assert refusal(*common, "--output", out, "--resume") == refused


@pytest.mark.parametrize(
    ("every", "durability"),
    [
        (60, "auto"),
        pytest.param(171, "auto", marks=pytest.mark.long),
        pytest.param(390, "auto", marks=pytest.mark.long),
        (171, "3"),
    ],
)
def test_a_run_that_commits_its_steps_goes_on_without_checkpoints(
    every: int, durability: str, common: list[Any], whole: Whole, tmp_path: Path
) -> None:
    """Killed again and again, after so many writes and a few more each time."""
    options = [*common, "--resume", "--output", tmp_path / "found", "--durability", durability]
    kill, ends = every, [1]
    while ends[-1]:
        ends.append(finetune_in_a_process(tmp_path, [*options, "--overwrite"], kill))
        assert ends[-1] in (0, -signal.SIGKILL)
        kill += 50
    found = json.loads((tmp_path / "summary").read_text())
    assert (found["loss"], found["steps"]) == (whole.summary["loss"], STEPS)
    assert same(load_file(tmp_path / "found/model.safetensors"), whole.model)
    assert len(ends) > 2
    assert (names(tmp_path / "nvme") == []) == (durability == "auto"), "it has ended: nothing stays"


def test_what_is_no_number_of_steps_between_commits_is_refused(common: list[Any]) -> None:
    for wrong in ("0", "-2", "1.5", "steps"):
        result = run(*common, "--durability", wrong)
        assert result.exit_code == 2
        assert "is not off, step, or a number" in " ".join(result.output.split())


def test_a_run_that_has_no_room_for_commits_does_without(
    common: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All states are cached: only commits need them on the drive."""
    options = [*common, "--cache", "auto", "--nvme-memory", "4MiB"]
    assert finished(*options)["steps"] == STEPS
    assert "no step is committed, because there is no room for that: nvme_memory=4" in caplog.text
    assert "--nvme-memory 4 MiB cannot hold the states" in refusal(*options, "--durability", "step")
    assert names(tmp_path / "nvme") == []


def test_a_run_that_commits_its_steps_is_neither_lost_nor_changed(
    common: list[Any], tmp_path: Path
) -> None:
    options = [*common, "--durability", "step"]
    finished(*options)
    assert "go on from them with" in refusal(*options)
    assert "holds the committed states of an earlier run" in refusal(*common)
    assert "has --batch-size 2, and here it is 4; resume with the same" in refusal(
        *options, "--resume", "--batch-size", 4
    )
    assert "--resume needs --checkpoint DIR" in refusal(*common, "--durability", "off", "--resume")
    assert finished(*options, "--resume", "--steps", STEPS + 2)["steps"] == STEPS + 2
    assert finished(*common, "--overwrite")["steps"] == STEPS
    assert names(tmp_path / "nvme") == []
