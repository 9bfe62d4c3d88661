"""The modules of `benchmarks/gpu`."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


def load(name: str) -> Any:
    path = FOLDER / (name if name == "run_all" else f"{name}.py")
    loader = SourceFileLoader(f"gpu_{name}", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    loader.exec_module(module)
    return module
