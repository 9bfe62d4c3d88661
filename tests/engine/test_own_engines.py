"""A second `wrap` in the directory of an engine of the same process: what only garbage keeps is
closed, what could be in use is named with a way out that needs no model."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from support.configs import config_of
from support.models import text_batch, transformer

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(60)]

BUDGETS = {"gpu_memory": "2MiB", "cpu_memory": "8MiB", "cache": 0}


def cell(directory: Path, error: BaseException | None = None) -> nn.Module:
    """What the user of a notebook runs."""
    model = infinity.wrap(transformer(), config_of(nvme=[directory], **BUDGETS))
    optimizer = infinity.AdamW(model.parameters())
    model(**text_batch(0)).loss.backward()
    optimizer.step()
    if error is not None:
        raise error
    return model


def failed(directory: Path, error: BaseException) -> BaseException:
    try:
        cell(directory, error)
    except BaseException as caught:
        return caught
    raise AssertionError("there was no error")


def refused(directory: Path) -> str:
    with pytest.raises(infinity.PathInUseError) as caught:
        cell(directory)
    return str(caught.value)


def test_a_model_that_only_a_cycle_keeps_is_closed(tmp_path: Path) -> None:
    gc.disable()
    try:
        model = cell(tmp_path)
        vars(model)["cycle"] = [model]
        del model
        infinity.engine(cell(tmp_path)).close()
    finally:
        gc.enable()


def test_a_model_that_an_exception_keeps_is_named_and_closed_without_it(tmp_path: Path) -> None:
    kept = failed(tmp_path, KeyboardInterrupt())
    said = refused(tmp_path)
    assert f"{tmp_path} is in use by process {os.getpid()}; that is this process" in said
    assert "infinity.close_engines(directory)" in said
    assert infinity.close_engines(tmp_path / ".." / tmp_path.name) == 1
    infinity.engine(cell(tmp_path)).close()
    assert infinity.close_engines(tmp_path) == 0
    del kept


def test_an_engine_in_use_is_never_closed(tmp_path: Path) -> None:
    model = cell(tmp_path)
    assert "infinity.engine(model).close()" in refused(tmp_path)
    loss = model(**text_batch(1)).loss
    loss.backward()
    assert infinity.close_engines(tmp_path / "another") == 0
    seen: list[str] = []

    def inside(*_: Any) -> None:
        with pytest.raises(RuntimeError, match=r"infinity\.close_engines cannot be called inside"):
            infinity.close_engines(tmp_path)
        seen.append("forward")

    handle = next(iter(model.modules())).register_forward_pre_hook(inside)
    with torch.no_grad():
        model(**text_batch(1))
    handle.remove()
    assert seen == ["forward"]
    infinity.engine(model).close()
    infinity.engine(cell(tmp_path)).close()


def test_all_engines_of_the_process(tmp_path: Path) -> None:
    models = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        models.append(cell(tmp_path / name))
    assert infinity.close_engines() == 2
    assert infinity.close_engines() == 0
    with pytest.raises(infinity.ConfigError, match="takes a path, not 3"):
        infinity.close_engines(3)  # type: ignore[arg-type]
