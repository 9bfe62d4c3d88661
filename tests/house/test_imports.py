"""What the package imports, and when."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import contextlib, gc, io, json, sys, weakref

def note():
    found.append(sorted(sys.modules))

found = []
import torch
note()
import infinity
note()

from infinity.cli.main import app
with contextlib.redirect_stdout(io.StringIO()):
    app(["--help"], standalone_mode=False)
note()

def wrapped(**options):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    return infinity.wrap(model, infinity.Config(tuning=infinity.Tuning(device="cpu"), **options))

gc.collect()
gc.disable()
assert weakref.ref(wrapped())() is None, "an import keeps the frames of wrap"
gc.enable()

on_nvme = {"nvme": [sys.argv[1]], "parameters": "nvme", "optimizer": "nvme"}
for options in {}, on_nvme, {**on_nvme, "durability": "step"}:
    model = wrapped(**options)
    optimizer = infinity.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    infinity.engine(model).close()
    note()

print(json.dumps(found))
"""

LATER = ("infinity.bench", "infinity.integrations", "infinity.models")

SLOW = {
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
    "sympy",
    "transformers",
    "matplotlib",
}


def test_modules_are_imported_when_they_are_needed(tmp_path: Path) -> None:
    """`import infinity` and the help of the command import nothing that takes seconds. A training
    step imports no checkpoints. What `wrap` imports does not keep the model. An engine without
    durability imports nothing of `infinity.durable`."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    found = map(set, json.loads(run.stdout))
    with_torch, with_infinity, with_help, with_step, on_nvme, with_durability = found
    assert not with_infinity & SLOW
    assert not [n for n in with_infinity if n.startswith(LATER)]
    assert not with_help & SLOW
    theirs = {n for n in with_infinity - with_torch if not n.startswith("infinity")}
    assert len(theirs) < 100  # torch.distributed.tensor alone would bring 500
    assert "torch._dynamo" in with_step  # It keeps our hooks out of graphs.
    assert not with_step & {"torch.distributed.checkpoint", "transformers"}
    assert not [name for name in on_nvme if name.startswith("infinity.durable")]
    assert {"infinity.durable.store", "infinity.durable.session"} <= with_durability
