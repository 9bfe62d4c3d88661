"""`torchrun --nproc-per-node N -m infinity finetune`: ranks do together what one would alone, speak
in one voice, and go on after one of them was killed.

The agent of torchrun starts two ranks where it has to start them again. All ranks are forked, and
what one rank does runs in this process.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from typer.testing import CliRunner

from infinity.checkpoint.files import METRICS
from infinity.cli import ranks
from infinity.cli.finetune import finetune
from infinity.cli.history import History, budget_text, combine, summarize
from infinity.cli.job import FinetuneJob
from infinity.cli.main import app
from infinity.cli.progress import summary_rows
from infinity.cli.ranks import ALONE, World, find_world
from infinity.directories.lock import LOCK_NAME
from infinity.errors import InfinityError
from infinity.report import Report
from infinity.sharding.watch import Note, Watch
from infinity.tiers.manifest import STATES_NAME
from support import forked
from support.durable import BEHIND, Kill
from support.finetune_steps import steps_in

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 8
# Two windows for each rank; five are held out, so that the last batch of a validation has one for
# the first rank and none for the other. Each budget is large enough for half of the ranks' states.
LAST = f"checkpoint-{STEPS}"
OF_THE_COMMAND = ("as_json", "debug", "config", "show_config")
OPTIONS = [
    *(
        "--model",
        "llama-tiny",
        "--sequence-length",
        32,
        "--batch-size",
        4,
        "--steps",
        STEPS,
        "--eval-every",
        3,
        "--eval-batches",
        2,
    ),
    *(
        "--precision",
        "fp32",
        "--gpu-memory",
        "64MiB",
        "--cpu-memory",
        "64MiB",
        "--nvme-memory",
        "64MiB",
        "--cache",
        0,
    ),
    *(
        "--update",
        "exact",
        "--lr",
        "1e-3",
        "--checkpoint-every",
        2,
        "--keep-checkpoints",
        4,
        "--json",
    ),
]

# What torchrun does with a script, but for its ranks: they are forked after their imports.
TORCHRUN = """
import runpy, sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def rank():
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")

where = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "restarted"}
config = LaunchConfig(1, 1, 2, max_restarts=1, start_method="fork", **where)
elastic_launch(config, rank)()
"""

# What becomes of the second rank of the first try, in step AT.
SCRIPT = """
import errno, os, signal
import pytest
from infinity.cli import main
from support.finetune_steps import during_step

at, what = int(os.environ["AT"]), os.environ["WHAT"]
met = os.environ["RANK"] == "1" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

def act(trainer):
    if what == "full drive":
        trainer.engine.io.set_faults(fail_write_at=0, fail_errno=errno.ENOSPC)
    else:
        os.kill(os.getpid(), getattr(signal, what))

if met:
    during_step(pytest.MonkeyPatch(), at, act)
main.app()
"""


def two_ranks(port: int, **more: str) -> list[dict[str, str]]:
    """The environments of two ranks, whose store is at `port`."""
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    job |= {"LOCAL_WORLD_SIZE": "2"} | more
    return [job | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]


class Said(NamedTuple):
    """What the ranks of a job wrote."""

    codes: list[int | None]
    """The exit code of each."""
    stdout: str
    stderr: str


def on_two_ranks(directory: Path, program: str | Path, arguments: list[Any], **more: str) -> Said:
    """Let two ranks run `program` to its end. Their store is here, as it is in torchrun."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = two_ranks(store.port, TORCHELASTIC_USE_AGENT_STORE="True", **more)
    ended = forked.run(directory, program, arguments, places)
    stdout, stderr = ("".join(getattr(e, name) for e in ended) for name in ("stdout", "stderr"))
    return Said([each.returncode for each in ended], stdout, stderr)


def alone(*arguments: Any) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["finetune", *map(str, arguments), "--debug"])
    assert result.exit_code == 0, (result.stderr, result.exception)
    summary: dict[str, Any] = json.loads(result.stdout)
    return summary


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != METRICS)


@dataclasses.dataclass(frozen=True)
class Home:
    """One directory, in which all jobs of this file run, each with a name."""

    path: Path

    def options(self, name: str) -> list[Any]:
        where = ["--data", self.path / "text.txt", "--nvme", self.path / "nvme"]
        return [
            "finetune",
            *OPTIONS,
            *where,
            "--output",
            self.path / name,
            "--checkpoint",
            self.steps(name),
        ]

    def steps(self, name: str) -> Path:
        return self.path / f"{name}-steps"

    def model(self, name: str) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = load_file(self.path / name / "model.safetensors")
        return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    path = tmp_path_factory.mktemp("torchrun")
    (path / "nvme").mkdir()
    (path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 75)
    return Home(path)


@pytest.fixture(scope="module")
def one(home: Home) -> dict[str, Any]:
    """What one rank does, without an interruption."""
    return alone(*home.options("one")[1:])


@pytest.fixture(scope="module")
def two(home: Home) -> Said:
    """What two ranks do, without an interruption."""
    done = on_two_ranks(home.path / "said", "infinity", home.options("two"))
    assert done.codes == [0, 0], done.stderr
    return done


def test_two_ranks_have_the_losses_of_one_and_save_the_same_model(
    home: Home, one: dict[str, Any], two: Said
) -> None:
    summary = json.loads(two.stdout)
    expected, found = (steps_in(home.steps(name) / LAST) for name in ("one", "two"))
    assert len(found) == STEPS
    for there, here in zip(expected, found, strict=True):
        assert here == pytest.approx(there, rel=1e-5)
    assert summary["loss"] == pytest.approx(one["loss"], rel=1e-5)
    weights, plain = home.model("two"), home.model("one")
    assert {name: value.shape for name, value in weights.items()} == {
        name: value.shape for name, value in plain.items()
    }
    for name, value in plain.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=2e-6)
    assert names(home.path / "two") == names(home.path / "one")


def test_one_rank_speaks_and_its_report_is_of_all(
    home: Home, one: dict[str, Any], two: Said
) -> None:
    summary = json.loads(two.stdout)  # so there is one
    assert [
        line.split("  ")[0]
        for line in two.stderr.splitlines()
        if line.startswith("step ") and "validation" not in line
    ] == [f"step {number}/{STEPS}" for number in range(1, STEPS + 1)]
    assert (one["ranks"], summary["ranks"], summary["ranks_per_node"]) == (1, 2, 2)
    for way in ("read", "written"):
        moved, alone = (run["nvme_bytes_per_parameter_per_step"][way] for run in (summary, one))
        # All that is more is padding.
        assert moved["planned"] == pytest.approx(alone["planned"], rel=0.03)
    assert summary["cached"]["of"] == pytest.approx(one["cached"]["of"], rel=0.03)
    assert summary["memory"]["nvme"]["peak"] == pytest.approx(
        one["memory"]["nvme"]["peak"] / 2, rel=0.03
    )
    assert {tier: memory["budget"] for tier, memory in summary["memory"].items()} == dict.fromkeys(
        ("gpu", "cpu", "nvme"), 64 << 20
    )
    assert dict(summary_rows(summary))["peak host memory"].endswith(
        " of 32 MiB (64 MiB for the 2 ranks of a node)"
    )
    assert "on 2 ranks" in (home.path / "two" / "report.html").read_text()
    assert not names(home.path / "nvme")


def going_on(stderr: str) -> list[str]:
    """What is said of a start."""
    begins = "going on|no checkpoint|reclaimed"
    return [line for line in stderr.splitlines() if re.match(begins, line)]


def test_after_a_stop_a_full_drive_and_a_kill_two_ranks_end_with_the_same_bits(
    home: Home, two: Said, tmp_path: Path
) -> None:
    """All stop after the step in which one was asked to. The next try ends when the drive of one
    is full, and torchrun starts both again when one is killed."""
    script, where = tmp_path / "script.py", home.steps("killed")
    options = [*home.options("killed"), "--durability", "off", "--resume"]
    script.write_text(SCRIPT)

    done = on_two_ranks(tmp_path / "stopped", script, options, AT="3", WHAT="SIGTERM")
    assert done.codes == [128 + signal.SIGTERM] * 2
    summary = json.loads(done.stdout)
    assert (summary["steps"], summary["signal"]) == (3, signal.SIGTERM)
    assert going_on(done.stderr) == [
        f"no checkpoint in {where} yet: training starts from the beginning"
    ]

    done = on_two_ranks(tmp_path / "full", script, options, AT="5", WHAT="full drive")
    assert done.codes == [1, 1]
    assert going_on(done.stderr) == [f"going on from {where}/checkpoint-3"]
    (full,) = [line for line in done.stderr.splitlines() if line.startswith("infinity: ")]
    assert re.fullmatch(
        r"infinity: rank (1|0: .* in vain; rank 1 failed): an update failed and the engine cannot "
        r"go on: .*write of \d+ bytes at offset \d+ stopped after \d+: No space left on device "
        rf"\(for \w+ of .*\): '{home.path}/nvme/rank1/{STATES_NAME}'",
        full,
    )

    agent, what = tmp_path / "torchrun.py", {"AT": "7", "WHAT": "SIGKILL"}
    agent.write_text(TORCHRUN)
    (job,) = forked.run(tmp_path / "again", agent, [script, *options], [what])
    assert job.returncode == 0, job.stderr
    assert sorted(going_on(job.stderr)) == [
        f"going on from {where}/checkpoint-4",
        f"going on from {where}/checkpoint-6",
        f"reclaimed 12 MiB that an earlier run left in {home.path}/nvme/rank1",
    ]
    (gone,) = [line for line in job.stderr.splitlines() if line.startswith("infinity: ")]
    assert gone.startswith("infinity: rank 0: another rank is gone, or cannot be reached: ")
    assert not re.search("^Traceback", job.stderr, re.M), "the agent logs one behind its prefix"
    assert json.loads(job.stdout)["loss"] == json.loads(two.stdout)["loss"]
    assert steps_in(where / LAST) == steps_in(home.steps("two") / LAST)
    there, here = home.model("two"), home.model("killed")
    assert there.keys() == here.keys()
    assert all(torch.equal(there[name], here[name]) for name in there)
    assert names(where) == [f"checkpoint-{number}" for number in (3, 4, 6, 8)]
    assert not names(home.path / "nvme")


KILLING = """
import json, os
from infinity.cli import main
from infinity.durable.agreement import Agreement
from support.durable import kill_at

make = Agreement.__init__

def impatient(self, rank, members, name, last, timeout, latch):
    make(self, rank, members, name, last, 5.0, latch)  # torchrun would end the others

Agreement.__init__ = impatient
kill = json.loads(os.environ["KILLS"]).get(os.environ["RANK"])
if kill is not None:
    kill_at(tuple(kill) if isinstance(kill, list) else kill)
main.app()
"""


def test_two_ranks_that_commit_their_steps_go_on_without_checkpoints(
    home: Home, two: Said, tmp_path: Path
) -> None:
    """Batches, losses and bits are those of an uninterrupted run."""
    script, nvme = tmp_path / "script.py", tmp_path / "nvme"
    script.write_text(KILLING)
    nvme.mkdir()
    where = ["--data", home.path / "text.txt", "--nvme", nvme, "--output", tmp_path / "committed"]
    durable = ["--durability", "step", "--resume", "--overwrite"]
    options = ["finetune", *OPTIONS, *where, *durable]
    lives: list[dict[int, Kill]] = [{1: 60}, {0: (BEHIND, 1)}, {1: (BEHIND, 1)}, {}]
    for number, kills in enumerate(lives):
        said = tmp_path / f"said{number}"
        done = on_two_ranks(said, script, options, KILLS=json.dumps(kills))
        for rank in range(2):
            assert (done.codes[rank] == -signal.SIGKILL) is (rank in kills), done.stderr
        assert "Traceback" not in done.stderr
        found = re.findall(r"going on from committed step (\d+)", done.stderr)
        assert len(found) == (number > 0), "one rank says so"
    assert done.codes == [0, 0]
    assert json.loads(done.stdout)["loss"] == json.loads(two.stdout)["loss"]
    there, here = home.model("two"), load_file(tmp_path / "committed" / "model.safetensors")
    assert all(torch.equal(there[name], here[name]) for name in there)
    alone = on_two_ranks(tmp_path / "more", script, [*options, "--batch-size", 8], KILLS="{}")
    assert alone.codes == [1, 1]
    assert "has --batch-size 4, and here it is 8" in alone.stderr


ORPHANING = """
import os, signal
import pytest
from infinity.cli import main

if os.environ["RANK"] == "0":
    from support.finetune_steps import during_step

    during_step(pytest.MonkeyPatch(), 2, lambda trainer: os.kill(os.getpid(), signal.SIGKILL))
main.app()
"""


def test_the_death_of_the_rank_that_holds_the_store_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without torchrun the store of the job is in the first rank, and torch's C++ code logs each
    attempt to reach it."""
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    (tmp_path / "script.py").write_text(ORPHANING)
    (tmp_path / "nvme").mkdir()
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 75)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ended = forked.run(
        tmp_path, tmp_path / "script.py", Home(tmp_path).options("orphaned"), two_ranks(port)
    )
    said = ended[1].stderr
    assert [each.returncode for each in ended] == [-signal.SIGKILL, 1]
    assert re.fullmatch(r"infinity: rank 1: another rank is gone, or cannot be reached: .*\n", said)
    assert names(tmp_path / "nvme") == ["rank0", "rank1"], "committed steps stay"


def test_a_store_that_is_gone_is_asked_once() -> None:
    asked = []

    class Gone:
        def check(self, keys: list[str]) -> bool:
            asked.append(keys)
            raise dist.DistNetworkError("Broken pipe")

        def set(self, *_: Any) -> None:
            asked.append([])

    class Alone:
        def groups(self) -> list[Any]:
            return []

    watch = Watch(Alone(), 600.0)  # type: ignore[arg-type]
    watch._groups = [(Gone(), [0, 1, 2])]  # type: ignore[list-item]
    assert watch.others(patience=1e9) == {1: None, 2: None}
    watch.write(Note(0, "x", True, True, 1, ["x"]))
    assert asked == [["1"]]


def test_a_batch_that_cannot_be_divided_is_refused_once(home: Home, tmp_path: Path) -> None:
    done = on_two_ranks(tmp_path, "infinity", [*home.options("refused"), "--batch-size", 3])
    assert done.codes == [1, 1]
    (line,) = [line for line in done.stderr.splitlines() if "infinity: " in line]
    assert re.fullmatch(
        (
            r"infinity: rank [01]: --batch-size 3 is that of all ranks together and cannot be "
            r"divided among 2; take 2 or 4"
        ),
        line,
    )
    assert not names(home.path / "nvme")
    assert not (home.path / "refused").exists()
    assert not home.steps("refused").exists()


def test_another_number_of_ranks_goes_on_with_the_same_data(
    home: Home, one: dict[str, Any], two: Said
) -> None:
    where = home.steps("fewer")
    shutil.copytree(home.steps("two") / "checkpoint-4", where / "checkpoint-4")
    assert alone(*home.options("fewer")[1:], "--resume")["loss"] == pytest.approx(
        one["loss"], rel=1e-5
    )
    found = steps_in(where / LAST)
    assert found[:4] == steps_in(home.steps("two") / LAST)[:4]
    for there, here in zip(steps_in(home.steps("one") / LAST), found, strict=True):
        assert here == pytest.approx(there, rel=1e-5)


# The place of a rank

PLACE = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def test_a_place_is_what_torchrun_says() -> None:
    numbers = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    world = find_world(PLACE | numbers)
    assert world == World(rank=5, size=8, local_rank=1, local_size=4)
    assert not world.is_first
    assert find_world({}) == ALONE == find_world({"RANK": "0", "WORLD_SIZE": "1"})
    with pytest.raises(ValueError) as caught:
        find_world(numbers | {"LOCAL_RANK": ""})
    assert str(caught.value) == (
        "WORLD_SIZE is 8, but LOCAL_RANK and MASTER_ADDR and MASTER_PORT are not set; several "
        "ranks are started by: torchrun --nproc-per-node N -m infinity finetune ..."
    )


@given(size=st.integers(1, 9), parts=st.integers(0, 9), rest=st.integers(0, 8))
def test_parts_are_the_batch_and_only_equal_ones_are_trained_on(
    size: int, parts: int, rest: int
) -> None:
    count = size * parts + rest % size
    batch = np.arange(2 * count).reshape(count, 2)
    found = [World(rank, size).part(batch) for rank in range(size)]
    assert np.array_equal(np.concatenate(found), batch)
    lengths = [len(part) for part in found]
    assert max(lengths) - min(lengths) <= 1
    if count % size == 0:
        World(0, size).check_batch(count)
        assert set(lengths) == {parts}
    else:
        with pytest.raises(ValueError) as caught:
            World(0, size).check_batch(count)
        near = [
            int(number) for number in re.findall(r"\d+", str(caught.value).partition("take")[2])
        ]
        assert near == [number for number in (size * parts, size * (parts + 1)) if number]


def test_budgets_are_those_of_a_node(tmp_path: Path) -> None:
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(finetune).parameters.items()
    }
    own = {
        field.name: defaults.pop(field.name)
        for field in dataclasses.fields(FinetuneJob)
        if field.name in defaults
    }
    knobs = {name: value for name, value in defaults.items() if name not in OF_THE_COMMAND}
    given = {
        "nvme": [tmp_path / "a", tmp_path / "b"],
        "cpu_memory": 100,
        "nvme_memory": 51,
        "gpu_memory": 30,
    }
    job = FinetuneJob(**own, knobs=knobs | given)
    config = job.config(World(rank=3, size=4, local_rank=1, local_size=2))
    assert (config.gpu_memory, config.cpu_memory, config.tuning.nvme_memory) == (30, 50, 25)
    config = job.config()
    assert (config.gpu_memory, config.cpu_memory, config.tuning.nvme_memory) == (30, 100, 51)
    job = FinetuneJob(
        **own,
        knobs=knobs | {"nvme": [tmp_path], "activations": "nvme", "activation_memory": 4 << 20},
    )
    assert (
        job.config(World(rank=3, size=4, local_rank=1, local_size=2)).tuning.activation_memory
        == 2 << 20
    )


def test_gc_removes_what_killed_ranks_left_and_nothing_else(tmp_path: Path) -> None:
    for name in ("rank0", "rank12", "ranks", "rank3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / STATES_NAME).write_bytes(b"x")
    (tmp_path / "rank0" / LOCK_NAME).touch()
    (tmp_path / "rank3" / "notes").touch()
    (tmp_path / "rank4").symlink_to(tmp_path / "ranks")
    result = CliRunner().invoke(app, ["gc", str(tmp_path), "--json"])
    assert result.exit_code == 0
    removed = [
        f"rank0/{STATES_NAME}",
        f"rank0/{LOCK_NAME}",
        f"rank12/{STATES_NAME}",
        f"rank3/{STATES_NAME}",
    ]
    assert sorted(json.loads(result.stdout)["removed"]) == [
        f"{tmp_path}/{path}" for path in removed
    ]
    assert names(tmp_path) == ["rank3", "rank4", "ranks"]
    assert names(tmp_path / "ranks") == [STATES_NAME]
    assert names(tmp_path / "rank3") == ["notes"]


# What ranks draw, say, and report


def random_states(world: World, seed: int, step: int = 0) -> list[int]:
    torch.manual_seed(0)
    world.seed(seed, step)
    state: list[int] = torch.get_rng_state().tolist()
    return state


def test_ranks_draw_different_numbers_and_the_first_those_of_one_rank() -> None:
    torch.manual_seed(0)
    plain = torch.get_rng_state().tolist()
    assert random_states(World(0, 4), 7) == plain
    drawn = [
        random_states(World(rank, 4), seed, step)
        for rank in (1, 2, 3)
        for seed in (7, 8)
        for step in (0, 5)
    ]
    assert random_states(World(1, 4), 7) == drawn[0]
    assert len({tuple(state) for state in [plain, *drawn]}) == 13


@pytest.fixture
def store() -> Iterator[Any]:
    yield dist.HashStore()


def test_the_first_rank_that_fails_speaks_for_all(
    store: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    voices = [ranks._Voice(store, rank) for rank in range(3)]
    for rank in (2, 0, 1):
        voices[rank].claim()
    for rank in (2, 0, 1):  # those after the first find that it is said, and wait no longer
        voices[rank].tell(InfinityError(f"reason {rank}"))
    assert capsys.readouterr().err == "infinity: rank 2: reason 2\n"


def test_a_rank_that_cannot_ask_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    class Gone:
        def add(self, *_: Any) -> int:
            raise dist.DistNetworkError("Broken pipe")

        set = add

    voice = ranks._Voice(Gone(), 1)  # type: ignore[arg-type]
    voice.claim()
    voice.tell(InfinityError("reason"))
    assert capsys.readouterr().err == "infinity: rank 1: reason\n"


def report(number: float, peaks: dict[str, int], **values: Any) -> Report:
    seconds = {"compute": number}
    nvme = {
        "read_per_parameter": number,
        "written_per_parameter": 2 * number,
        "planned_read_per_parameter": 3 * number,
    }
    counts = {
        "updates_kept": int(number),
        "updates_rolled_back": 0,
        "waits": {},
        "cached": int(number),
        "on_nvme": 10,
    }
    budgets = {"gpu": 100, "cpu": 50, "nvme": 50}
    return Report(
        parameters=7,
        steps=3,
        planned_written_per_parameter=0.0,
        seconds=seconds,
        peaks=peaks,
        budgets=budgets | values,
        **nvme,
        **counts,
    )


def test_a_report_of_ranks_sums_what_moves_and_shows_the_highest_peak() -> None:
    reports = [
        report(1, {"gpu": 5, "cpu": 9, "nvme": 20}),
        report(2, {"gpu": 8, "cpu": 3, "nvme": 21}),
    ]
    assert combine(reports[:1], 1) is reports[0]
    both = combine(reports, 2)
    assert (
        both.read_per_parameter,
        both.written_per_parameter,
        both.planned_read_per_parameter,
    ) == (3, 6, 9)
    assert (both.parameters, both.steps, both.cached, both.on_nvme, both.seconds) == (
        7,
        3,
        3,
        20,
        {"compute": 1},
    )
    assert both.peaks == {"gpu": 8, "cpu": 9, "nvme": 21}
    assert both.budgets == {"gpu": 100, "cpu": 100, "nvme": 100}
    summary = summarize("it", History(1), both, None, {}, ranks=4, per_node=2)
    assert summary["memory"]["cpu"] == {"peak": 9, "budget": 100}
    assert budget_text(summary, "cpu", " of ") == " of 50 B (100 B for the 2 ranks of a node)"
    assert budget_text(summary, "gpu", " of ") == " of 100 B"
    unlimited = combine([report(1, {"gpu": 5, "cpu": 9, "nvme": 20}, nvme=20), reports[1]], 2)
    assert budget_text(summarize("it", History(1), unlimited, None, {}, 2, 2), "nvme", " of ") == ""
