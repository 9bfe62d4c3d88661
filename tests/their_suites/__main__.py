"""`python -m their_suites SOURCES`: run the suites of the libraries whose sources are in folders of
`SOURCES`, and write the tally. Exits 1 where a test fails that `left_out` does not name, or passes
that it names."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from infinity.deepspeed.names import VERSION
from their_suites import examples, hub, of_deepspeed, trained
from their_suites.left_out import LEFT_OUT, reason_of

TALLY = Path(__file__).with_name("tally.md")
RUN = [sys.executable, "-m", "infinity_command", "run"]
DEEPSPEED = "DeepSpeed"
STARTS = {DEEPSPEED: "tests/unit/", "lightning": "tests/tests_"}
"""Where the name of a test starts in its path, for suites whose tests have names in common."""


class Suite(NamedTuple):
    """What pytest is given: paths in the sources of a library, options, and a plugin that adapts
    the tests."""

    paths: list[str]
    options: list[str]
    plugin: str = "plugin"


SUITES = {
    "accelerate": Suite(["tests/deepspeed"], []),
    "trl": Suite(["tests/distributed"], ["-k", "zero"]),
    "transformers": Suite(
        ["tests/deepspeed/test_deepspeed.py"], ["-k", "Core or TrainerIntegration or Launcher"]
    ),
    "lightning": Suite(
        [
            "tests/tests_pytorch/strategies/test_deepspeed.py",
            "tests/tests_fabric/strategies/test_deepspeed.py",
            "tests/tests_fabric/strategies/test_deepspeed_integration.py",
        ],
        [],
        "on_cpu",
    ),
    DEEPSPEED: Suite(of_deepspeed.PATHS, ["-m", "not nightly and not sequential"], "ranks"),
}
EXAMPLES = "DeepSpeedExamples"
QUANTIZED = {
    "training": [],
    "training 4bit": ["--quant", "4bit"],
    "training 8bit": ["--quant", "8bit"],
}
"""What PEFT's Makefile launches with DeepSpeed."""
ON_CPU = {
    'device_map={"": PartialState().process_index}': 'device_map={"": "cpu"}',
    "bf16=True,": "bf16=True, use_cpu=True,",
}
"""What PEFT's script says otherwise on a machine without a GPU."""


class Outcome(NamedTuple):
    """What became of a test, `passed` or not, with the last line of its error."""

    test: str
    result: str
    error: str


def environment(models: Path, library: str) -> dict[str, str]:
    """Variables for a suite that runs in the folder of models. With `ACCELERATE_USE_CPU` accelerate
    uses no plugin for DeepSpeed that a test makes by itself."""
    own = {
        "ACCELERATE_USE_CPU": str(library not in ("accelerate", "transformers")),
        "HF_DATASETS_CACHE": str(models / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "OUTCOMES": str(models / "outcomes.json"),
        "RUN_SLOW": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(models / "metric"), *filter(None, sys.path)]),
    }
    return os.environ | own


def of_pytest(sources: Path, library: str, models: Path) -> Iterator[Outcome]:
    """Run the tests of a library."""
    paths, more, plugin = SUITES[library]
    pytest = ["-m", "pytest", "-q", "-p", "their_suites.outcomes", "-p", f"their_suites.{plugin}"]
    options = ["-c", os.devnull, "--rootdir", str(sources), "--timeout", "600", "--tb", "short"]
    places = [str(sources / library / path) for path in paths]
    command = [*RUN, *pytest, "-p", "no:cacheprovider", *options, *places, *more]
    subprocess.run(command, cwd=models, env=environment(models, library), check=False)
    outcomes = json.loads((models / "outcomes.json").read_text())
    for test, (result, error) in outcomes.items():
        name = test.rpartition(STARTS.get(library, "::"))[2]
        yield Outcome(f"{library}/{name}", result, error)


def not_imported(sources: Path, models: Path) -> Iterator[Outcome]:
    """The files of DeepSpeed's tests that cannot be imported."""
    plugins = ["-p", "their_suites.outcomes", "-p", "their_suites.ranks", "-p", "no:cacheprovider"]
    options = ["-c", os.devnull, "--collect-only", "-q", *plugins, of_deepspeed.FOLDER]
    command = [*RUN, *["-m", "pytest"], *options]
    subprocess.run(
        command, cwd=sources / DEEPSPEED, env=environment(models, DEEPSPEED), check=False
    )
    for path, (result, error) in json.loads((models / "outcomes.json").read_text()).items():
        yield Outcome(path.rpartition(STARTS[DEEPSPEED])[2], result, error)


def of_peft(sources: Path, models: Path) -> Iterator[Outcome]:
    """Launch the script that PEFT's Makefile launches, on two ranks."""
    folder = sources / "peft/tests/training"
    text = (folder / "training.py").read_text()
    for before, after in ON_CPU.items():
        text = text.replace(before, after)
    (models / "training.py").write_text(text)
    launch = ["accelerate", "launch", "--config_file", str(folder / "deepspeed_config.yaml")]
    for name, words in QUANTIZED.items():
        done = subprocess.run(
            [*RUN, *launch, "training.py", *words],
            cwd=models,
            env=environment(models, "peft"),
            capture_output=True,
            text=True,
            check=False,
        )
        errors = [line for line in done.stderr.splitlines() if line.startswith("[rank0]")]
        result = "failed" if done.returncode else "passed"
        yield Outcome(f"peft/{name}", result, errors[-1] if errors else "")


def of_examples(sources: Path, top: Path) -> Iterator[Outcome]:
    """Run DeepSpeedExamples, with models and data in `top`."""
    chat = sources / EXAMPLES / "applications/DeepSpeed-Chat"
    paths = os.pathsep.join([str(top), str(chat), *filter(None, sys.path)])
    for name, error in examples.outcomes(sources / EXAMPLES, top, {"PYTHONPATH": paths}):
        yield Outcome(f"{EXAMPLES}/{name}", "failed" if error else "passed", error)


def of_scripts(sources: Path, top: Path) -> Iterator[Outcome]:
    """Train with examples of transformers, with models and data in `top`."""
    paths = os.pathsep.join([str(top / "packages"), *filter(None, sys.path)])
    for name, error in trained.outcomes(sources / "transformers", top, {"PYTHONPATH": paths}):
        yield Outcome(f"transformers/{name}", "failed" if error else "passed", error)


def version(sources: Path, library: str) -> str:
    """The version that is installed, or of the interface, and the commit of the suite."""
    describe = ["git", "-C", str(sources / library), "describe", "--tags", "--always"]
    done = subprocess.run(describe, capture_output=True, text=True, check=False)
    installed = VERSION if library in (EXAMPLES, DEEPSPEED) else importlib.metadata.version(library)
    return f"{installed} | {done.stdout.strip() or 'unknown'}"


def tally(sources: Path, outcomes: list[Outcome], files: list[Outcome]) -> str:
    """A table of the libraries, one of the tests that do not pass, and one of the `files` of
    DeepSpeed that cannot be imported."""
    lines = [
        "# Suites of other libraries, by `make their-tests`",
        "",
        "| library | installed | suite | passed | of |",
        "|---|---|---|---|---|",
    ]
    counts = Counter(each.test.partition("/")[0] for each in outcomes)
    passed = Counter(each.test.partition("/")[0] for each in outcomes if each.result == "passed")
    for library, count in counts.items():
        row = f"| {library} | {version(sources, library)} | {passed[library]} | {count} |"
        lines.append(row)
    lines += ["", "Of DeepSpeed's unit tests the files in `of_deepspeed.py` are run, no others."]
    lines += ["", "| test | why not | reason |", "|---|---|---|"]
    rows: Counter[tuple[str, tuple[str, str]]] = Counter()
    for each in outcomes:
        if each.result != "passed":
            known = reason_of(each.test)
            if each.result == "skipped" and (known is None or known[0] != "skipped"):
                known = ("skipped", "by the suite")
            name = each.test.partition("[")[0] if known and each.test not in LEFT_OUT else each.test
            rows[name, known or ("**unknown**", each.error)] += 1
    for (name, (word, reason)), count in rows.items():
        lines.append(f"| {name}{f', {count} times' if count > 1 else ''} | {word} | {reason} |")
    lines += ["", "Files of DeepSpeed that cannot be imported:"]
    lines += ["", "| file | why not | reason |", "|---|---|---|"]
    for each in files:
        word, reason = of_deepspeed.why_not_imported(each.error)
        lines.append(f"| {each.test} | {word} | {reason} |")
    return "\n".join([*lines, ""])


def main() -> None:
    sources = Path(sys.argv[1]).absolute()
    outcomes: list[Outcome] = []
    files: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder) / "hub"
        hub.make(models)
        for library in (*SUITES, "peft"):
            if not (sources / library / "tests").is_dir():
                print(f"{sources / library} has no tests, and is left out; see CONTRIBUTING.md")
            elif library == "peft":
                outcomes += of_peft(sources, models)
            else:
                outcomes += of_pytest(sources, library, models)
                if library == DEEPSPEED:
                    files += not_imported(sources, models)
        if (sources / "transformers" / trained.FOLDER).is_dir():
            outcomes += of_scripts(sources, Path(folder) / "scripts")
        if (sources / EXAMPLES).is_dir():
            outcomes += of_examples(sources, Path(folder) / "examples")
    TALLY.write_text(tally(sources, outcomes, files))
    print(TALLY.read_text())
    surprises = [
        each
        for each in outcomes
        if (each.test in LEFT_OUT if each.result == "passed" else reason_of(each.test) is None)
    ]
    sys.exit(bool(surprises))


if __name__ == "__main__":
    main()
