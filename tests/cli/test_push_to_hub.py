"""`infinity finetune --push-to-hub`: what is uploaded, where, and when."""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import filter_repo_objects
from typer.testing import CliRunner

from infinity.cli import job
from infinity.cli.hub import NOT_UPLOADED
from infinity.cli.main import app
from infinity.cli.output import RUN_NAME
from infinity.cli.run_file import RunFile
from support.finetune_steps import during_step
from support.local_models import save_causal

pytestmark = pytest.mark.usefixtures("undrawn")

TUNED = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
         "tokenizer_config.json"}  # fmt: skip
WRITES = {"accessToken": {"role": "write", "displayName": "mine"}}


class Repository(NamedTuple):
    """The address of a repository, as `create_repo` returns it."""

    repo_id: str

    def __str__(self) -> str:
        return f"https://hub.example/{self.repo_id}"


class Hub:
    """A hub in memory: `calls` in their order, and the `files` of each repository."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.files: dict[str, set[str]] = {}
        self.user: dict[str, Any] = {"name": "me", "orgs": [{"name": "Team"}], "auth": WRITES}
        self.refusal: Exception | None = None
        self.failure: Exception | None = None

    def __call__(self) -> Hub:
        return self

    def whoami(self) -> dict[str, Any]:
        self.calls.append("whoami")
        if self.refusal is not None:
            raise self.refusal
        return self.user

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> Repository:
        assert private and exist_ok
        self.calls.append("create")
        return Repository(repo_id if "/" in repo_id else f"me/{repo_id}")

    def upload_folder(
        self, *, repo_id: str, folder_path: Path, ignore_patterns: list[str], commit_message: str
    ) -> None:
        self.calls.append("upload")
        options = json.loads((folder_path / RUN_NAME).read_text())["options"]
        found = RunFile.of(folder_path, options)
        assert found is not None and found.is_whole(folder_path), "it is uploaded before its end"
        if self.failure is not None:
            raise self.failure
        paths = [path for path in folder_path.rglob("*") if path.is_file()]
        names = [str(path.relative_to(folder_path)) for path in paths]
        self.files[repo_id] = set(filter_repo_objects(names, ignore_patterns=ignore_patterns))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    found = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", found)
    return found


Finetune = Callable[..., Any]


@pytest.fixture
def finetune(tmp_path: Path) -> Finetune:
    """`finetune(*options)`: a run of two steps whose output is `tmp_path / "out"`."""
    (tmp_path / "nvme").mkdir()
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    common = ["--data", tmp_path / "text.txt", "--nvme", tmp_path / "nvme", "--steps", 2]
    common += ["--sequence-length", 32, "--batch-size", 1, "--eval-batches", 1]
    common += ["--gpu-memory", "64MiB", "--cpu-memory", "64MiB", "--output", tmp_path / "out"]

    def run(*options: object) -> Any:
        return CliRunner().invoke(app, ["finetune", *map(str, (*common, *options))])

    return run


def refusal(result: Any) -> str:
    assert result.exit_code == 1 and result.stdout == "", result.output
    (line,) = result.stderr.splitlines()
    return str(line).removeprefix("infinity: ")


def test_the_complete_model_is_uploaded_to_a_private_repository(
    hub: Hub, finetune: Finetune, tmp_path: Path
) -> None:
    steps = ("--checkpoint", tmp_path / "out" / "steps", "--overwrite")
    result = finetune("--push-to-hub", "Team/tuned", *steps)
    assert result.exit_code == 0, result.stderr
    assert hub.calls == ["whoami", "create", "upload"]
    assert hub.files == {"Team/tuned": TUNED}
    assert result.stderr.splitlines()[-1] == (
        "infinity: the output is at https://hub.example/Team/tuned"
    )
    assert (tmp_path / "out" / "steps" / "checkpoint-2").is_dir()


@pytest.mark.parametrize(
    ("options", "weights"),
    [((), {"adapter_config.json", "adapter_model.safetensors"}),
     (("--merge",), {"config.json", "generation_config.json", "model.safetensors"})],
)  # fmt: skip
def test_adapters_are_uploaded_alone_and_merged_ones_in_the_model(
    options: tuple[str, ...], weights: set[str], hub: Hub, finetune: Finetune, tmp_path: Path
) -> None:
    save_causal(tmp_path / "base")
    model = ("--model", tmp_path / "base", "--lora", 2)
    result = finetune(*model, *options, "--push-to-hub", "tuned")
    assert result.exit_code == 0, result.stderr
    assert hub.files == {"me/tuned": weights | {"tokenizer.json", "tokenizer_config.json"}}


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (
            LocalTokenNotFoundError("no"),
            "--push-to-hub needs a token of the hub that may write; log in with: hf auth login",
        ),
        (OfflineModeIsEnabled("offline"), "--push-to-hub cannot reach the hub: offline; train"),
    ],
)
def test_a_hub_that_does_not_answer_is_refused_before_anything_is_made(
    refused: Exception,
    message: str,
    hub: Hub,
    finetune: Finetune,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job, "find_model", lambda *_: pytest.fail("a model was looked for"))
    hub.refusal = refused
    assert refusal(finetune("--push-to-hub", "me/tuned")).startswith(message)
    assert not (tmp_path / "out").exists()


def test_a_token_that_is_refused_says_so(
    hub: Hub, finetune: Finetune, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused(HfHubHTTPError):
        def __init__(self) -> None:
            OSError.__init__(self, "Invalid user token.")

    hub.refusal = Refused()
    assert refusal(finetune("--push-to-hub", "me/tuned")) == (
        "the hub refuses the token of --push-to-hub: Invalid user token; log in again with: hf "
        "auth login --force"
    )


@pytest.mark.parametrize(
    ("repository", "message"),
    [
        ("Other/tuned", "--push-to-hub Other/tuned: the token of the hub is of me, Team; give one"),
        ("a/b/c", "Repo id must be"),
    ],
)
def test_a_repository_that_cannot_be_is_refused(
    repository: str, message: str, hub: Hub, finetune: Finetune
) -> None:
    assert refusal(finetune("--push-to-hub", repository)).startswith(message)


def test_a_token_that_reads_only_is_refused(hub: Hub, finetune: Finetune) -> None:
    hub.user["auth"] = {"accessToken": {"role": "read", "displayName": "weak"}}
    assert refusal(finetune("--push-to-hub", "me/tuned")).startswith(
        "the token 'weak' of the hub may only read; make one that may write at"
    )


def test_there_must_be_an_output(hub: Hub, tmp_path: Path) -> None:
    options = ["finetune", "--nvme", str(tmp_path), "--push-to-hub", "me/tuned"]
    assert refusal(CliRunner().invoke(app, options)) == (
        "--push-to-hub uploads the output; add --output DIR"
    )


def test_an_interrupted_run_uploads_nothing(
    hub: Hub, finetune: Finetune, monkeypatch: pytest.MonkeyPatch
) -> None:
    during_step(monkeypatch, 1, lambda trainer: os.kill(os.getpid(), signal.SIGTERM))
    assert finetune("--push-to-hub", "me/tuned").exit_code == 128 + signal.SIGTERM
    assert hub.calls == ["whoami"]


def test_an_upload_that_fails_leaves_the_output_and_resume_uploads_it(
    hub: Hub, finetune: Finetune, tmp_path: Path
) -> None:
    out, hub.failure = tmp_path / "out", OSError("the network is gone.")
    result = finetune("--push-to-hub", "me/tuned", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["steps"] == 2
    said = result.stderr.splitlines()[-1]
    start = f"infinity: the output is complete in {out}, and its upload failed: the network is gone"
    assert said.startswith(f"{start}; upload it again with: hf upload me/tuned {out} . --private")
    words = shlex.split(said.partition("with: ")[2])
    assert words[6::2] == ["--exclude"] * len(NOT_UPLOADED)
    assert words[7::2] == list(NOT_UPLOADED)

    hub.failure, hub.calls = None, []
    again = finetune("--push-to-hub", "me/tuned", "--resume")
    assert again.exit_code == 0
    assert f"the run is complete, and its output is in {out}" in again.stderr
    assert hub.calls == ["whoami", "create", "upload"]
    assert hub.files == {"me/tuned": TUNED}
