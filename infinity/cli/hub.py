"""Uploads the output of a run to a model repository of the Hugging Face hub."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from infinity.checkpoint.files import METRICS
from infinity.cli.output import RUN_NAME
from infinity.errors import InfinityError, sentence

NOT_UPLOADED = (
    *(RUN_NAME, METRICS, "report.html", "trace.json"),  # they name local paths
    "README.md",  # PEFT's; the hub refuses its local path of the base model
    *(".*", "*/*"),  # hidden files, and folders such as checkpoints
)
"""Patterns of files in an output that stay on this machine."""


def check_hub(repository: str) -> None:
    """Check before training that a token exists which may write to `repository` ("ORG/NAME", or
    "NAME" of the user). Changes nothing.

    Raises `ValueError` for a name that the hub does not take, and `InfinityError` without a valid
    token, for a token that may only read, for an unknown organization, or if the hub cannot be
    reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(repository)
    try:
        user: Any = HfApi().whoami()
    except LocalTokenNotFoundError:
        raise InfinityError(
            "--push-to-hub needs a token of the hub that may write; log in with: hf auth login"
        ) from None
    except HfHubHTTPError as error:
        raise InfinityError(
            f"the hub refuses the token of --push-to-hub: {_reason(error)}; log in again with: hf "
            "auth login --force"
        ) from None
    except Exception as error:  # of httpx, or offline mode
        raise InfinityError(
            f"--push-to-hub cannot reach the hub: {_reason(error)}; train without it, and upload "
            "the output later with the same command and --resume"
        ) from None
    token = user.get("auth", {}).get("accessToken", {})
    if token.get("role") == "read":
        raise InfinityError(
            f"the token {token.get('displayName', '')!r} of the hub may only read; make one that "
            "may write at https://huggingface.co/settings/tokens, and log in with: hf auth login"
        )
    owner, slash, _ = repository.partition("/")
    owners = [user["name"], *(each["name"] for each in user.get("orgs", ()))]
    if slash and owner.lower() not in (each.lower() for each in owners):
        raise InfinityError(
            f"--push-to-hub {repository}: the token of the hub is of {', '.join(owners)}; give one "
            "of these before the slash, or log in as another user with: hf auth login"
        )


def upload(output: Path, repository: str) -> str:
    """Upload the complete `output` to `repository`, which is created as a private one if it does
    not exist. Returns its address.

    Raises `InfinityError`, with the command that does the same, if that fails.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        url = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=url.repo_id,
            folder_path=output,
            ignore_patterns=list(NOT_UPLOADED),
            commit_message="infinity finetune",
        )
    except Exception as error:
        words = ["hf", "upload", repository, str(output), ".", "--private"]
        words += [word for each in NOT_UPLOADED for word in ("--exclude", each)]
        raise InfinityError(
            f"the output is complete in {output}, and its upload failed: {_reason(error)}; upload "
            f"it again with: {shlex.join(words)}"
        ) from None
    return str(url)


def _reason(error: BaseException) -> str:
    return sentence(error).rstrip(".") or type(error).__name__
