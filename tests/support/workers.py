"""`pytest -p support.workers --workers 4`: tests in forks of the process that has collected them.

Imports and collection take some twenty CPU seconds, and are done once. A file is run by one
worker, so what its fixtures share stays in one process. A worker that is free takes the next file,
those that take long before others. Warnings of workers are not shown (they are errors here).
"""

from __future__ import annotations

import gc
import io
import itertools
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

LONGEST = (
    "ranks/test_durable_ranks.py",
    "parity/test_random_programs.py",
    "engine/test_durability.py",
    "cli/test_resume.py",
    "modules/test_vertical.py",
    "parity/test_parity.py",
    "initialize/test_run.py",
    "cli/test_torchrun.py",
    "ranks/test_tensor_parallel.py",
    "integrations/test_durable_trainer.py",
    "engine/test_commits_apart.py",
    "integrations/test_scripts_of_accelerate.py",
    "checkpoint/test_checkpoint.py",
    "ranks/test_stages.py",
    "parity/test_formats.py",
    "ranks/test_pipeline.py",
    "cli/test_cli.py",
    "ranks/test_partitions.py",
    "checkpoint/test_checkpoint_ranks.py",
    "ranks/test_whole_gradients.py",
    "checkpoint/test_snapshots.py",
    "modules/test_chunked_loss_on_engines.py",
    "optim/test_speculative_updates.py",
    "placement/test_cache.py",
    "integrations/test_scripts_of_trl.py",
    "optim/test_clip_by_unit_norm.py",
    "cli/test_odd_options.py",
    "bench/test_gpu_benchmarks.py",
    "modules/test_treatments.py",
    "engine/test_failing_calls.py",
    "engine/test_inference.py",
    "parity/test_compile.py",
    "checkpoint/test_checkpoint_pairs.py",
    "engine/test_lifetime.py",
)
"""Files that take more than 20 CPU seconds, in this order: what begins last should be short."""

Files = list[list[int]]
"""By file the numbers of its tests."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--workers", type=int, default=0, help="run tests in so many forks of this process"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """As pytest's own loop, but for where tests run."""
    if not session.config.getoption("workers") or session.config.option.collectonly:
        return None
    if session.testsfailed:
        return None  # pytest's own says that the collection failed
    Parent(session).run(session.config.getoption("workers"))
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


def by_file(paths: Sequence[Path]) -> Files:
    """The numbers of tests by their file: first those of `LONGEST`, then as they were collected."""
    files = [list(group) for _, group in itertools.groupby(range(len(paths)), paths.__getitem__)]
    ranks = {name: number for number, name in enumerate(LONGEST)}

    def rank(file: list[int]) -> int:
        return ranks.get("/".join(paths[file[0]].parts[-2:]), len(ranks))

    return sorted(files, key=rank)


# The process that has collected


@dataclass
class Worker:
    """A fork, which was given the tests `given` and runs the first of them."""

    pid: int
    connection: Connection
    given: list[int]


class Parent:
    """Gives files to workers, and passes on what their tests reported."""

    def __init__(self, session: pytest.Session) -> None:
        self._session, self._config = session, session.config
        self._files = by_file([item.path for item in session.items])
        self._workers: dict[Connection, Worker] = {}
        self._numbers = itertools.count()

    def run(self, workers: int) -> None:
        """Run all tests, or those before a limit of failures; kill workers that are left."""
        gc.collect()
        gc.freeze()  # else the first collection in each worker copies all pages
        try:
            for _ in range(min(workers, len(self._files))):
                self._start()
            while self._workers and not (self._session.shouldfail or self._session.shouldstop):
                for connection in wait(list(self._workers)):
                    self._hear(self._workers[connection])  # type: ignore[index]
        finally:
            for worker in self._workers.values():
                os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)

    def _start(self) -> None:
        ours, theirs = Pipe()
        number = next(self._numbers)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            _work(self._session, theirs, number)
        theirs.close()
        self._workers[ours] = Worker(pid, ours, [])

    def _hear(self, worker: Worker) -> None:
        kind, value = _received(worker.connection)
        if kind == "next":
            file = self._files.pop(0) if self._files else []
            worker.given += file
            worker.connection.send(file)
        elif kind == "start":
            worker.given = worker.given[worker.given.index(value) :]
        elif kind == "report":
            hook = self._config.hook.pytest_report_from_serializable
            self._report(hook(config=self._config, data=value))
        elif kind == "broken":
            raise RuntimeError(f"a worker has failed:\n{value}")
        else:
            del self._workers[worker.connection]
            worker.connection.close()
            status = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
            if kind == "gone":
                self._replace(worker, status)

    def _report(self, report: pytest.TestReport) -> None:
        self._config.hook.pytest_runtest_logreport(report=report)

    def _replace(self, worker: Worker, status: int) -> None:
        """A worker that ended before it was told to has failed in the first test it was given."""
        failed, *others = worker.given
        item = self._session.items[failed]
        said = f"the process of this test ended with {status}"
        self._report(pytest.TestReport(item.nodeid, item.location, {}, "failed", said, when="call"))
        if others:
            self._files.insert(0, others)
            self._start()


def _received(connection: Connection) -> tuple[str, Any]:
    try:
        found: tuple[str, Any] = connection.recv()
    except (EOFError, ConnectionResetError):
        return "gone", None
    return found


# A worker


def _work(session: pytest.Session, connection: Connection, number: int) -> None:
    """Run files until there are no more, and end."""
    status = 1
    try:
        _become(session, connection, number)
        for item, upcoming in _with_the_next(_numbers(connection)):
            connection.send(("start", item))
            session.config.hook.pytest_runtest_protocol(
                item=session.items[item],
                nextitem=None if upcoming is None else session.items[upcoming],
            )
        connection.send(("end", None))
        status = 0
    except BaseException:
        connection.send(("broken", traceback.format_exc()))
    finally:
        os._exit(status)


def _become(session: pytest.Session, connection: Connection, number: int) -> None:
    """Have a capture, a terminal and a temporary directory apart from those of the parent."""
    config = session.config
    manager = config.pluginmanager
    capture: Any = manager.get_plugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    manager.unregister(name="terminalreporter")
    reporter = pytest.TerminalReporter(config, io.StringIO())
    manager.register(reporter, "terminalreporter")
    reporter.pytest_sessionstart(session)
    factory: pytest.TempPathFactory = config._tmp_path_factory  # type: ignore[attr-defined]
    config.option.basetemp = factory.getbasetemp() / f"worker{number}"
    temporary: Any = manager.get_plugin("tmpdir")
    temporary.pytest_configure(config)
    manager.register(_Teller(config, connection))


class _Teller:
    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        to = self._config.hook.pytest_report_to_serializable
        self._connection.send(("report", to(config=self._config, report=report)))


def _numbers(connection: Connection) -> Iterator[int]:
    """The numbers of tests that the parent gives, file by file."""
    while True:
        connection.send(("next", None))
        numbers = connection.recv()
        if not numbers:
            return
        yield from numbers


def _with_the_next(numbers: Iterator[int]) -> Iterator[tuple[int, int | None]]:
    """Each with the one after it, which keeps the fixtures that both need."""
    following: Iterator[int | None] = itertools.chain(numbers, [None])
    current = next(following)
    for upcoming in following:
        assert current is not None
        yield current, upcoming
        current = upcoming
