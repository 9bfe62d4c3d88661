"""What ends an engine without being asked to: a collection on one of its own threads, and the end
of a forked child."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.optim.pipeline import Pipeline
from infinity.tiers.access import Fetch
from infinity.tiers.resident import Residency
from support.models import text_batch, transformer

pytestmark = [pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def wrapped(tmp_path: Path) -> list[Any]:
    model = infinity.wrap(
        transformer(),
        infinity.Config(
            nvme=[tmp_path],
            gpu_memory="2MiB",
            cpu_memory="8MiB",
            tuning=infinity.Tuning(cache=0, threads=2),
        ),
    )
    return [model, infinity.AdamW(model.parameters())]


def test_the_model_is_in_no_reference_cycle(tmp_path: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        model = infinity.wrap(
            transformer(), infinity.Config(nvme=[tmp_path], gpu_memory="2MiB", cpu_memory="8MiB")
        )
        gone = weakref.ref(model)
        del model
        assert gone() is None
    finally:
        gc.enable()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "owner, method",
    [(Fetch, "await_end"), (Pipeline, "_retire"), (Residency, "_load")],
    ids=["mover", "updater", "under the lock"],
)
def test_a_collection_on_a_thread_of_the_engine(
    owner: type, method: str, wrapped: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = wrapped
    wrapped.clear()
    for number in range(2):  # the trace of the first step is what the second one looks ahead by
        model(**text_batch(number)).loss.backward()
        if number == 0:
            optimizer.step()
            optimizer.zero_grad()
    infinity.engine(model).drain()
    dropped, collected = threading.Event(), threading.Event()
    plain = getattr(owner, method)

    def collecting(*args: object) -> None:
        plain(*args)
        if (
            threading.current_thread().name in ("infinity-mover", "infinity-updater")
            and not collected.is_set()
        ):
            dropped.wait()
            gc.collect()
            collected.set()

    gc.collect()
    gc.disable()
    try:
        monkeypatch.setattr(owner, method, collecting)
        # So that places are filled by fetches, which the updater starts.
        monkeypatch.setattr(Residency, "renew", lambda *_: None)
        model.cycle = model
        gone = weakref.ref(model)
        optimizer.step()
        del model
        dropped.set()
        assert collected.wait() and gone() is None
    finally:
        gc.enable()
    for thread in threading.enumerate():
        if thread.name == "infinity-closing":
            thread.join()
    assert list(tmp_path.iterdir()) == []
    assert not {"infinity-mover", "infinity-updater"} & {
        thread.name for thread in threading.enumerate()
    }


FORKING = """
import os, sys, torch, infinity
budgets = {"gpu_memory": "1MiB", "cpu_memory": "4MiB"}
config = infinity.Config(nvme=sys.argv[1], **budgets, tuning={"cache": 0})
model = infinity.wrap(torch.nn.Linear(8, 8), config)
child = os.fork()
if child == 0:
    sys.exit(0)  # runs the finalizers that the child inherited
status = os.waitpid(child, 0)[1]
assert os.path.exists(os.path.join(sys.argv[1], "infinity-states.bin"))
optimizer = infinity.AdamW(model.parameters())
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
infinity.engine(model).close()
print(os.waitstatus_to_exitcode(status), os.listdir(sys.argv[1]))
"""


def test_a_forked_child_ends_without_touching_what_is_its_parents(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "0 []"
