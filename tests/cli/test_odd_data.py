"""`infinity finetune --data` with what is no text: one sentence that names the file, nothing left,
and never an endless read."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from infinity.cli.main import app
from infinity.models import data, records
from infinity.models.data import encode, read_items
from infinity.models.reading import open_regular
from infinity.models.tokenizer import ByteTokenizer

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(60)]

FINE = b'{"text": "fine"}\n'


def run(source: Path, nvme: Path, *options: object) -> Any:
    fixed = [
        "--model",
        "llama-tiny",
        "--sequence-length",
        16,
        "--batch-size",
        1,
        "--steps",
        1,
        "--eval-batches",
        1,
    ]
    budgets = ["--gpu-memory", "16MiB", "--cpu-memory", "16MiB"]
    return CliRunner().invoke(
        app, ["finetune", *map(str, [*fixed, *budgets, "--data", source, "--nvme", nvme, *options])]
    )


def refusal(source: Path) -> str:
    """The one sentence of a run that fails and leaves nothing."""
    nvme = source.parent / "nvme"
    nvme.mkdir()
    result = run(source, nvme)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert "Traceback" not in line
    assert list(nvme.iterdir()) == []
    return str(line.removeprefix("infinity: "))


CONTENTS: dict[str, tuple[str, bytes, str]] = {
    "deep": (
        "a.jsonl",
        FINE + b"[" * 200_000 + b"]" * 200_000,
        ", line 2: not JSON that can be read: it is nested too deeply",
    ),
    "deep objects": (
        "a.jsonl",
        b'{"text":' * 200_000,
        ", line 1: not JSON that can be read: it is nested too deeply",
    ),
    "many digits": (
        "a.jsonl",
        FINE + b"1" * 5000,
        ", line 2: not JSON that can be read: it has a number with too many digits",
    ),
    "binary lines": (
        "a.jsonl",
        b"\x00\x01\x02\n",
        ", line 1: not JSON (character 1: Expecting value)",
    ),
    "compressed lines": (
        "a.jsonl",
        b"\x1f\x8b\x08\x00",
        ", line 1: not UTF-8 text (invalid start byte)",
    ),
    "no text": (
        "a.jsonl",
        b'{"prompt": "x"}',
        ", line 1: it has 'prompt', and a record has text, messages, prompt and completion, or "
        "instruction and output",
    ),
    "an object": (
        "a.json",
        b'{\n"name": "x"\n}',
        " holds no JSON array of records; to train on its characters, give --data-format text",
    ),
    "numbers": ("a.csv", b"a,b\n1,2\n", ", line 2: it has 'a', 'b', and a record has text, "),
    "a short row": ("a.csv", b"prompt,completion\nx\n", ", line 2: 1 fields, and the first line"),
    "compressed": ("a.jsonl.gz", b"\x1f\x8b", " is no text: unpack it first"),
    "no parquet": ("a.parquet", b"PAR1", " cannot be read as parquet: "),
    "mixed": (
        "a.jsonl",
        FINE + b'{"prompt": "x", "completion": "y"}\n',
        ", line 2: a completion, and what comes before is text; train on one kind at a time",
    ),
    "one sample": (
        "a.jsonl",
        b'{"prompt": "x", "completion": "y"}\n',
        " has 1 samples to learn from, and at least 2 are needed: ",
    ),
    "no template": (
        "a.json",
        b'[{"messages": [{"role": "user", "content": "x"}]}]',
        ", record 1: it has messages, and the tokenizer has no chat template; ",
    ),
    "no document": (
        "a.jsonl",
        b"\n\n \n",
        " has 0 tokens, but a sequence length of 16 needs at least 32: ",
    ),
    "empty": ("a.txt", b"", " has 0 tokens, but a sequence length of 16 needs at least 32: "),
    "binary": ("a.txt", bytes(range(256)) * 10, " is not UTF-8 text: invalid start byte (0x80)"),
    "UTF-16": ("a.txt", "text".encode("utf-16"), " is not UTF-8 text: invalid start byte (0xff)"),
    "cut in a character": (
        "a.txt",
        "x€".encode()[:-1],
        " is not UTF-8 text: unexpected end of data (0xe2)",
    ),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_content_that_is_no_text_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    file, content, reason = CONTENTS[name]
    (tmp_path / file).write_bytes(content)
    assert refusal(tmp_path / file).startswith(f"{tmp_path / file}{reason}")


def test_a_line_is_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of one line that never ends, as far as anybody reads."""
    monkeypatch.setattr(records, "MOST_LINE_BYTES", 1 << 20)
    file = tmp_path / "a.jsonl"
    with file.open("wb") as handle:
        handle.write(FINE + b'{"text": "')
        handle.truncate(8 << 30)
    assert refusal(file) == (
        f"{file}, line 2: more than 1 MiB, which are read at once; cut the document, or "
        "put its text into a file of its own"
    )


def test_a_line_of_the_limit_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps({"text": "x" * 100}).encode() + b"\n"
    monkeypatch.setattr(records, "MOST_LINE_BYTES", len(line))
    (tmp_path / "a.jsonl").write_bytes(line * 2)
    assert [piece.text for piece in read_items(tmp_path / "a.jsonl")] == ["x" * 100] * 2
    monkeypatch.setattr(records, "MOST_LINE_BYTES", len(line) - 1)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: more than 112 B"):
        list(read_items(tmp_path / "a.jsonl"))


def test_text_without_lines_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_PIECE", 1 << 10)
    (tmp_path / "a.txt").write_text("x" * (1 << 20))
    pieces = list(read_items(tmp_path / "a.txt"))
    assert max(len(piece.text) for piece in pieces) <= 2 << 10
    assert sum(len(piece.text) for piece in pieces) == 1 << 20


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_what_has_no_end_is_refused_at_once(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    only = "and only regular files are read; write what it gives to a file first"
    assert refusal(tmp_path / name) == f"{tmp_path / name} is a pipe, {only}"


def test_a_device_and_a_socket_are_refused(tmp_path: Path) -> None:
    only = "and only regular files are read; write what it gives to a file first"
    (tmp_path / "a.txt").symlink_to("/dev/zero")
    assert refusal(tmp_path / "a.txt") == f"{tmp_path / 'a.txt'} is a device, {only}"
    with socket.socket(socket.AF_UNIX) as listening, pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)  # a socket's path is short
        listening.bind("b.txt")
        with pytest.raises(ValueError, match=f"^b.txt is a socket, {only}$"):
            open_regular(Path("b.txt"))
    with pytest.raises(ValueError, match=f"is a directory, {only}$"):
        open_regular(tmp_path)


def test_links_that_go_round_and_paths_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert refusal(tmp_path / "loop") == f"--data {tmp_path}/loop does not exist"


def test_a_folder_is_read_without_what_is_no_file_and_without_going_round(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "up").symlink_to(folder)
    (folder / "loop.txt").symlink_to(folder / "loop.txt")
    (folder / "gone.txt").symlink_to(folder / "nowhere")
    (folder / "zero.txt").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "inner" / "a.txt").write_text("text")
    assert [piece.text for piece in read_items(folder)] == ["text"]


def test_a_file_that_vanishes_while_a_folder_is_read_is_named(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text")
    pieces = read_items(tmp_path)
    assert next(pieces).text == "text"
    (tmp_path / "b.txt").unlink()
    (tmp_path / "b.txt").symlink_to("nowhere")
    assert list(pieces) == [], "it is no file any more"
    files = data._files(tmp_path, data.TEXT_SUFFIXES)
    (tmp_path / "a.txt").unlink()
    assert list(files) == []
    with pytest.raises(FileNotFoundError) as caught:
        list(read_items(tmp_path / "a.txt"))
    assert (
        caught.value.filename == str(tmp_path / "a.txt")
        or caught.value.filename == tmp_path / "a.txt"
    )


def test_a_file_that_is_cut_while_it_is_read_ends_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_PIECE", 10)
    (tmp_path / "a.txt").write_text("x" * 100_000)
    pieces = read_items(tmp_path / "a.txt")
    first = next(pieces)
    os.truncate(tmp_path / "a.txt", 0)
    rest = list(pieces)
    assert [piece.last for piece in (first, *rest)][-1], "the document ends"
    assert len(encode([first, *rest], ByteTokenizer())) < 100_002


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    """Are named as they can be, and train; a tokenizer cannot be saved under one, which is said
    before."""
    where = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    where.mkdir()
    (where / "a.txt").write_bytes(b"\xff")
    line = refusal(where / "a.txt")
    assert line.endswith("/a.txt is not UTF-8 text: invalid start byte (0xff)")
    (where / "a.txt").write_bytes(b"the quick brown fox\n" * 20)
    result = run(where, tmp_path, "--output", where / "out")
    assert result.exit_code == 1
    assert result.stderr.endswith(
        " is not UTF-8, and no tokenizer can be saved there; choose another one\n"
    )
    assert not (where / "out").exists()
    result = run(where, tmp_path, "--checkpoint", where / "steps", "--json", "--debug")
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert (where / "steps" / "checkpoint-1").is_dir()


def test_text_that_cannot_be_utf8_trains(tmp_path: Path) -> None:
    """JSON may hold one half of a pair of surrogates."""
    (tmp_path / "a.jsonl").write_text(
        '{"text": "\\ud800 the quick brown fox jumps over the lazy dog"}\n' * 5
    )
    (tmp_path / "nvme").mkdir()
    result = run(tmp_path / "a.jsonl", tmp_path / "nvme")
    assert result.exit_code == 0, result.stderr
