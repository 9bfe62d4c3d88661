"""The Python blocks of README and docs run.

The blocks of a page run in order, in one namespace, in an empty folder. Two comments in a page,
which readers do not see, say more: `<!-- setup: ... -->` holds code that runs before the next
block, and `<!-- not run: reason -->` before a block says that it is only compiled. Budgets and
directories of large machines become small ones before a block runs (`LOCAL`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.models import FAMILIES
from support.pages import NAMES, PAGES, ROOT, blocks

LOCAL = {
    "/mnt/": "mnt/",
    '"8GiB"': '"64MiB"',
    '"32GiB"': '"256MiB"',
    '"24GiB"': '"64MiB"',
    '"64GiB"': '"256MiB"',
}


def python_pages() -> list[str]:
    return [
        name
        for name, page in zip(NAMES, PAGES, strict=True)
        if any(block.kind == "python" for block in blocks(page))
    ]


@pytest.fixture
def namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What every page may use: `path`, a Hugging Face directory of a tiny Llama, and `loader`,
    batches for it."""
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
    engines = {
        id(e): e
        for value in names.values()
        if (e := getattr(value, "__dict__", {}).get("_infinity_engine")) is not None
    }
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
        # So that a traceback has the page's line.
        compiled = compile("\n" * block.line + code, name, "exec")
        if block.reason is None:
            exec(compiled, namespace)
