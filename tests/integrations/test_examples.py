"""The scripts of `examples/` train as the plain scripts that they come from.

The plain script is the same file without the lines that say "infinity", and with those that a
comment gives after "plain:".
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

import infinity
from support.roads import OWN, road

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDED = {
    "trainer": "accelerate",
    "sft": "trl",
    "lora": "peft",
    "lightning_module": "lightning",
    "fabric_loop": "lightning",
}
ROADS = NEEDED | {"trainer": "transformers", "sft": "TRL", "lora": "PEFT"}


def plain(source: str) -> str:
    begin = ast.parse(source).body[0].end_lineno  # after the docstring
    lines = source.splitlines()[begin:]
    lines = [line for line in lines if "infinity" not in line.lower()]
    return "\n".join(line.replace("# plain: ", "") for line in lines)


def run(source: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    directory.mkdir()
    monkeypatch.setattr(sys, "argv", ["example.py", str(directory)])
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "example.py", "exec"), names)
    return names


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=road(
                *(library, f"`examples/{name}.py`", "`python`", OWN),
                adapters="LoRA" if name == "lora" else "none",
            ),
        )
        for name, library in ROADS.items()
    ],
)
def test_losses_equal_those_of_the_plain_script(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(NEEDED[name])
    monkeypatch.setenv("CI", "1")  # TRL sends nothing
    source = (EXAMPLES / f"{name}.py").read_text()
    without = plain(source)
    assert without.count("\n") >= source.count("\n") - 12
    expected = run(without, tmp_path / "plain", monkeypatch)
    found = run(source, tmp_path / "infinity", monkeypatch)
    assert len(expected["losses"]) >= 6
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert sum(found["losses"][-2:]) < sum(found["losses"][:2])
    model = found.get("module", found.get("model"))
    model = getattr(model, "module", model)
    assert infinity.engine(model).config.nvme == (tmp_path / "infinity",)
    infinity.engine(model).close()
