"""What README and docs name is there: options of commands, names and files of the code, and the
texts of errors."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from infinity.cli.main import app
from infinity_command.overview import COMMANDS
from support.pages import NAMES, ROOT, blocks


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every `infinity ...` command that a page shows."""
    for block in blocks(page):
        if block.kind != "console":
            continue
        for line in block.code.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            starts = [i for i, word in enumerate(words) if word == "infinity"]
            if (
                line.startswith("$ ")
                and starts
                and words[starts[0] - 1 : starts[0]] in ([], ["-m"])
            ):
                yield words[starts[0] + 1 :]


@pytest.mark.parametrize("name", NAMES)
def test_commands_have_the_options_that_pages_show(name: str) -> None:
    for words in commands(ROOT / name):
        command: Any = typer.main.get_command(app)
        rest = list(words)
        while isinstance(getattr(command, "commands", None), dict) and rest:
            assert rest[0] in command.commands, f"{name}: infinity {' '.join(words)}"
            command = command.commands[rest.pop(0)]
        with command.context_class(command) as context:
            known = {
                option
                for parameter in command.get_params(context)
                for option in (*parameter.opts, *parameter.secondary_opts)
            }
        for word in rest if command.name != "run" else ():  # there they are those of a script
            if word.startswith("--"):
                assert word.partition("=")[0] in known, (
                    f"{name}: infinity {' '.join(words)} has no {word}"
                )


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


PARTS = (
    "directories",
    "placement",
    "nvme",
    "tiers",
    "durable",
    "sharding",
    "schedule",
    "optim",
    "checkpoint",
    "modules",
    "activations",
    "losses",
    "tiles",
    "weights",
)


def core_nouns() -> Iterator[str]:
    """The classes that have the name of their module, where the engine is made."""
    files = [
        *(ROOT / "infinity").glob("*.py"),
        *(path for part in PARTS for path in (ROOT / "infinity" / part).glob("*.py")),
    ]
    for path in files:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name.lower() == path.stem.replace("_", ""):
                yield ".".join([*path.relative_to(ROOT).with_suffix("").parts, node.name])


def test_the_glossary_has_every_class_that_a_module_is_named_after() -> None:
    nouns = set(core_nouns())
    assert len(nouns) >= 30
    assert (
        nouns
        - {dotted for _, dotted in TERM.findall((ROOT / "docs/internals/glossary.md").read_text())}
        == set()
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_page_of_its_name(name: str) -> None:
    page = ROOT / "docs" / f"{name}.md"
    assert page.read_text().startswith(("# Generate\n", f"# infinity {name}\n"))
    assert f"      - {name}.md\n" in (ROOT / "mkdocs.yml").read_text()
    shown = [words[0] for words in commands(page) if words]
    assert name in shown


def test_every_example_is_on_the_site() -> None:
    shown = re.findall(r'^--8<-- "(.+)"$', (ROOT / "docs/examples.md").read_text(), re.MULTILINE)
    assert set(shown) == {
        f"examples/{path.name}" for path in (ROOT / "examples").iterdir() if path.is_file()
    }


PLACE = re.compile(
    r"`((?:infinity|native|tests|benchmarks|examples|bench|checkpoint|cli|deepspeed|directories|models|weights|tiles|losses|activations|modules|nvme|optim|placement|schedule|sharding|tiers)/[\w./]*)`"
)


@pytest.mark.parametrize(
    "name", [*NAMES, "ARCHITECTURE.md", "CONTRIBUTING.md", "benchmarks/README.md"]
)
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
                parts = (
                    part.value if isinstance(part, ast.Constant) else "…" for part in node.values
                )
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_the_code_has_the_errors_that_troubleshooting_explains() -> None:
    errors = re.findall(
        r"^\| `([^`]+)` \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE
    )
    assert len(errors) >= 30
    known = texts_of_the_code()
    assert [error for error in errors if not any(error in text for text in known)] == []
