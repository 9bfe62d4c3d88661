"""A plugin of pytest for DeepSpeed's suite: a test of one rank runs in this process, and ranks of
others come from a process that has imported what they need. All ranks end when one has failed."""

from __future__ import annotations

import importlib
import multiprocessing
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import pytest
import torch.distributed

from infinity.deepspeed.refused import refused

LIMIT = 120
"""Seconds for the ranks of a test."""
_INTERNALS = "MultipleAllGatherHandles partitioned_param_data_shape"
"""Names of DeepSpeed's inside that a file of the suite imports for some of its tests."""
_IMPORTED = [
    __name__,
    "infinity.deepspeed.initialize",
    "torch._dynamo",
    "torch.distributed.tensor",
    "pytest",
]


def _stand_in() -> None:
    """Let the file be imported: a test that uses such a name says so, and others run."""
    module = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    for name in _INTERNALS.split():
        sentence = f"{name} is internal to DeepSpeed"
        setattr(module, name, refused(name, module.__name__, sentence))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The classes of the suite are known once its modules are."""
    forkserver.set_forkserver_preload(_IMPORTED)
    importlib.import_module("unit.common").DistributedExec._launch_procs = _launch


def _launch(test: Any, ranks: int, init_method: str) -> None:
    """Run a test on `ranks` ranks, in place of the method of that name. Raises the first error."""
    port = importlib.import_module("unit.common").get_master_port()
    run = _run_here if ranks == 1 else _run_apart
    run(test, [(rank, ranks, port, init_method) for rank in range(ranks)])


def _run_here(test: Any, calls: list[tuple[Any, ...]]) -> None:
    with mock.patch.dict("os.environ"):
        try:
            said = test._dist_run(*calls[0])
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    if said:
        pytest.skip(said)


def _run_apart(test: Any, calls: list[tuple[Any, ...]]) -> None:
    context = multiprocessing.get_context("forkserver")
    pipes = [context.Pipe(duplex=False) for _ in calls]
    ranks = [
        context.Process(target=_rank, args=(test, call, end), daemon=True)
        for call, (_, end) in zip(calls, pipes, strict=True)
    ]
    for rank, (_, end) in zip(ranks, pipes, strict=True):
        rank.start()
        end.close()
    try:
        left = [start for start, _ in pipes]
        while left:
            ready = connection.wait(left, LIMIT)
            if not ready:
                pytest.fail(f"not done after {LIMIT} seconds", pytrace=False)
            for start in ready:
                left.remove(start)
                _check(start.recv())
    except EOFError:
        pytest.fail("a rank died", pytrace=False)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _check(end: Any) -> None:
    if isinstance(end, BaseException):
        raise end
    if end:
        pytest.skip(end)


def _rank(test: Any, call: tuple[Any, ...], end: Connection) -> None:
    """The process of a rank: it sends what the test says, or its error."""
    try:
        said = test._dist_run(*call)
    except Exception as error:
        said = error
    end.send(said)


_stand_in()
