"""What README and docs show is true: Python blocks run, commands have the options, names and errors are in the code.

The blocks of a page run in order, in one namespace, in an empty folder. Two comments in a page, which readers do not see,
say more: `<!-- setup: ... -->` holds code that runs before the next block, and `<!-- not run: reason -->` before a block says
that it is only compiled. Budgets and directories of large machines become small ones before a block runs (`LOCAL`).
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
import torch
import typer

from infinity.cli.main import app
from support.models import FAMILIES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

PART = re.compile(
    r"^<!-- setup:\n(?P<setup>.*?)^-->$"
    r"|^<!-- not run: (?P<reason>[^\n]+) -->$"
    r"|^(?P<indent> *)```(?P<kind>\w+)[^\n]*\n(?P<code>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)
LOCAL = {"/mnt/": "mnt/", '"8GiB"': '"64MiB"', '"32GiB"': '"256MiB"', '"24GiB"': '"64MiB"', '"64GiB"': '"256MiB"'}


class Block(NamedTuple):
    """A fenced block, or hidden setup, of a page."""

    kind: str
    code: str
    line: int
    reason: str | None
    """Why it is not run."""


def blocks(page: Path) -> Iterator[Block]:
    text, reason = page.read_text(), None
    for part in PART.finditer(text):
        line = text.count("\n", 0, part.start()) + 1
        if part["reason"] is not None:
            reason = part["reason"]
        elif part["setup"] is not None:
            yield Block("python", part["setup"], line, None)
        else:
            indent = part["indent"]
            code = "".join(row.removeprefix(indent) for row in part["code"].splitlines(keepends=True))
            yield Block(part["kind"], code, line, reason)
            reason = None


def python_pages() -> list[str]:
    return [name for name, page in zip(NAMES, PAGES, strict=True) if any(block.kind == "python" for block in blocks(page))]


@pytest.fixture
def namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What every page may use: `path`, a Hugging Face directory of a tiny Llama, and `loader`, batches for it."""
    monkeypatch.chdir(tmp_path)
    for directory in ("mnt/nvme0", "mnt/nvme1"):
        (tmp_path / directory).mkdir(parents=True)
    torch.manual_seed(0)
    model = FAMILIES["llama"].build()
    model.save_pretrained("llama")
    tokens = torch.randint(0, model.config.vocab_size, (2, 8))
    loader = [{"input_ids": tokens, "labels": tokens}] * 2
    names: dict[str, Any] = {"__name__": "page", "path": tmp_path / "llama", "loader": loader}
    yield names
    engines = {id(e): e for value in names.values() if (e := getattr(value, "__dict__", {}).get("_infinity_engine")) is not None}
    for engine in engines.values():
        engine.close()


@pytest.mark.parametrize("name", python_pages())
def test_python_blocks_run(name: str, namespace: dict[str, Any]) -> None:
    for block in blocks(ROOT / name):
        if block.kind != "python":
            continue
        code = block.code
        for there, here in LOCAL.items():
            code = code.replace(there, here)
        compiled = compile("\n" * block.line + code, name, "exec")  # so that a traceback has the page's line
        if block.reason is None:
            exec(compiled, namespace)


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every `infinity ...` command that a page shows."""
    for block in blocks(page):
        if block.kind != "console":
            continue
        for line in block.code.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            starts = [i for i, word in enumerate(words) if word == "infinity"]
            if line.startswith("$ ") and starts and words[starts[0] - 1 : starts[0]] in ([], ["-m"]):
                yield words[starts[0] + 1 :]


@pytest.mark.parametrize("name", NAMES)
def test_commands_have_the_options_that_pages_show(name: str) -> None:
    for words in commands(ROOT / name):
        command: Any = typer.main.get_command(app)
        rest = list(words)
        while isinstance(getattr(command, "commands", None), dict) and rest:
            assert rest[0] in command.commands, f"{name}: infinity {' '.join(words)}"
            command = command.commands[rest.pop(0)]
        with click.Context(command) as context:
            known = {
                option for parameter in command.get_params(context) for option in (*parameter.opts, *parameter.secondary_opts)
            }
        for word in rest:
            if word.startswith("--"):
                assert word.partition("=")[0] in known, f"{name}: infinity {' '.join(words)} has no {word}"


TERM = re.compile(r"^\| (?P<term>[^|]+) \| `(?P<name>infinity[\w.]+)` \|", re.MULTILINE)


def test_the_code_has_what_the_glossary_names() -> None:
    rows = TERM.findall((ROOT / "docs/internals/glossary.md").read_text())
    assert len(rows) >= 20
    missing = []
    for term, dotted in rows:
        module, _, attribute = dotted.rpartition(".")
        try:
            found: Any = importlib.import_module(dotted)
        except ImportError:
            found = getattr(importlib.import_module(module), attribute, None)
        if found is None:
            missing.append(f"{term}: {dotted}")
    assert missing == []


PLACE = re.compile(
    r"`((?:infinity|native|tests|benchmarks|examples|bench|checkpoint|cli|modules|nvme|optim|placement|schedule|sharding|tiers)"
    r"/[\w./]*)`"
)


@pytest.mark.parametrize("name", [*NAMES, "ARCHITECTURE.md", "CONTRIBUTING.md", "benchmarks/README.md"])
def test_the_files_that_pages_name_exist(name: str) -> None:
    places = [ROOT, ROOT / "infinity"]
    missing = [
        found
        for found in PLACE.findall((ROOT / name).read_text())
        if not any((place / f"{found}{end}").exists() for place in places for end in ("", ".py"))
    ]
    assert missing == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md"])
def test_the_links_outside_of_docs_lead_somewhere(name: str) -> None:
    """Those inside of docs/ are checked by mkdocs."""
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / name).read_text())
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def texts_of_the_code() -> set[str]:
    """Every string of the library; what is filled in is `…`."""
    found = set()
    for path in (ROOT / "infinity").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_the_code_has_the_errors_that_troubleshooting_explains() -> None:
    errors = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    assert len(errors) >= 30
    known = texts_of_the_code()
    assert [error for error in errors if not any(error in text for text in known)] == []
