"""Every blocking wait of the library can end: by failure, by `close` from another thread, and on
the main thread by Ctrl-C.

`WAITS` lists all of them, found in the syntax, with who ends each and the test that shows it. A new
wait needs an entry here.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.device import ComputeDevice
from infinity.errors import EngineClosedError
from infinity.modules.interleave import Interleaver
from infinity.nvme.ticket import Ticket
from infinity.optim.chunk import Chunk
from infinity.optim.job_queue import ChunkQueue, JobQueue
from infinity.optim.speculation import Speculation
from infinity.optim.updater import Updater
from infinity.placement.spec import Kind
from infinity.sharding.exchange import Exchange
from infinity.sharding.lookout import Lookout
from infinity.sharding.posted import Collective, Contribution
from infinity.tiers.access import Checkout, Fetch, PlaceCopy
from infinity.tiers.block import DeviceCopy
from infinity.tiers.resident import Residency
from infinity.tiers.saved_storage import SavedStorage
from infinity.tiers.staging import ChunkRequest, Staging
from support.configs import config_of
from support.discrete import DiscreteDevice
from support.probe import Probe

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(100, method="thread")]

PATIENCE = 30.0
"""Seconds until a test that waits for a thread gives up."""

# The list

PACKAGE = Path(infinity.__file__).parent
TESTS = {path.name: path for path in Path(__file__).parents[1].glob("*/test_*.py")}
NAMES = {
    "wait",
    "wait_for",
    "acquire",
    "join",
    "synchronize",
    "communicate",
    "sleep",
    "flock",
    "lockf",
    "select",
    "poll",
    "barrier",
}

DEVICE = (
    "the device ends each copy and kernel, well or with an error that torch raises",
    "test_aio.py::test_closed_objects_say_so",
)
DRIVE = (
    "the native engine completes each request, with an errno where its ring or a thread fails",
    "test_aio.py::test_a_ring_that_fails_ends_every_ticket",
)
DRIVE_OF_ALL = (
    "the native engine completes each request",
    "test_aio.py::test_an_errno_that_never_goes_away_is_given_in_the_end",
)
COLLECTIVE = (
    (
        "`Posted.fail` ends all, called for any failure here or on another rank, by the "
        "timeout, and by `close`"
    ),
    "test_waits.py::test_a_wait_for_a_collective_ends",
)
RANKS = (
    "torch.distributed ends it with the group's timeout, and whoever waits has ended before",
    "test_exchange.py::test_ranks_that_are_stuck_are_told_why",
)
STORE = (
    "`Latch.fail`, `Latch.close` and who brings it notify",
    "test_waits.py::test_a_wait_of_the_model_ends",
)
PIPELINE = (
    "the updater notifies whenever a chunk goes on, and when its thread has ended",
    "test_waits.py::test_a_wait_for_an_update_ends",
)
TURN = (
    "each micro-batch hands its turn on when it ends, whatever ends it",
    "test_waits.py::test_whatever_fails_between_micro_batches_ends_all",
)
CLOSING = (
    "what the thread waits for ends, see its own entries",
    "test_waits.py::test_close_ends_every_thread_whatever_fails_on_it",
)
PINNING = (
    "the thread notifies after each slice and when it has ended, and `close` does",
    "test_device.py::test_close_ends_it_after_the_slice_that_is_under_way",
)
COMMIT = (
    "the committer notifies when it has ended, after a failure, too",
    "test_durability.py::test_a_commit_that_fails_ends_all_who_wait",
)
NEVER = "does not block", ""

WAITS: dict[str, tuple[str, str]] = {
    "checkpoint/data_file.py DataWriter._await_first": DRIVE_OF_ALL,
    "checkpoint/data_file.py ReadAhead.__iter__": DRIVE_OF_ALL,
    "checkpoint/saving.py ChunkStream.read": DRIVE,
    "checkpoint/snapshots.py SnapshotTask.finish": (
        "the thread of the snapshot ends with its I/O, and when it is cancelled",
        "test_snapshots.py::test_cancelled",
    ),
    "closing.py await_closings": ("gives up after a minute", CLOSING[1]),
    "checkpoint/files.py hold": NEVER,  # LOCK_NB
    "checkpoint/files.py is_held": NEVER,  # LOCK_NB
    "deepspeed/accelerator.py DeepSpeedAccelerator": DEVICE,
    "deepspeed/timers.py _now": DEVICE,
    "integrations/accelerate.py Accelerator.backward": NEVER,  # ContextVar.get
    "device.py read_values": DEVICE,
    "device.py Copy.wait": DEVICE,
    "device.py ComputeDevice.await_stream": DEVICE,
    "device.py ComputeDevice.between": DEVICE,
    "device.py ComputeDevice.reach": DEVICE,
    "device.py ComputeDevice.release": DEVICE,
    "device.py ComputeDevice.upload": DEVICE,
    "device.py ComputeDevice.download": DEVICE,
    "device.py ComputeDevice.await_copies": DEVICE,
    "device.py HostMemory.await_pinned": PINNING,
    "device.py ComputeDevice.follow_copy": NEVER,  # queues the wait on a stream
    "directories/lock.py _LockFile._take": NEVER,  # LOCK_NB
    "directories/lock.py _Held.__init__": NEVER,
    "integrations/lightning.py InfinityStrategy": RANKS,
    "modules/gathered.py _Reading.begin": STORE,
    "modules/gathered.py _Reading._take": COLLECTIVE,
    "modules/gathered.py _Reading.end": STORE,
    "activations/partitions.py RankParts.gather": (
        COLLECTIVE[0],
        "test_partitions.py::test_others_end_where_a_rank_brings_nothing",
    ),
    "modules/interleave.py Interleaver._run_together": TURN,
    "modules/interleave.py Interleaver._await_end": (
        "the last micro-batch releases it",
        "test_waits.py::test_ctrl_c_while_micro_batches_run",
    ),
    "modules/interleave.py Interleaver._live": TURN,
    "modules/interleave.py Interleaver.switch_at": TURN,
    "modules/interleave.py _closed": NEVER,  # the lock is new
    "activations/treatments.py Treatments.before_forward": COLLECTIVE,
    "activations/treatments.py Treatments._agreed": COLLECTIVE,
    "nvme/io.py Io.write": DRIVE_OF_ALL,
    "nvme/io.py Io.read": DRIVE_OF_ALL,
    "nvme/io.py Io.write_many": DRIVE_OF_ALL,
    "nvme/io.py Io.read_many": DRIVE_OF_ALL,
    "nvme/submit.py Submitter.drain": DRIVE_OF_ALL,
    "nvme/tensor_file.py save": DRIVE_OF_ALL,
    "nvme/submit.py Submitter.stage.retire": DRIVE_OF_ALL,
    "nvme/tensor_file.py _fetch": DRIVE_OF_ALL,
    "nvme/ticket.py Ticket.finish": DRIVE_OF_ALL,
    "nvme/ticket.py Ticket.wait": DRIVE_OF_ALL,
    "pinning.py Pinning.begin": PINNING,
    "pinning.py Pinning.cut": PINNING,
    "pinning.py Pinning.wait": PINNING,
    "pinning.py Pinning.close": ("each slice ends, and no other one is begun", PINNING[1]),
    "optim/chunk.py Chunk.wait": DRIVE,
    "optim/chunk.py Chunk.await_device": DEVICE,
    "optim/job_table.py JobTable.block_until": PIPELINE,
    "optim/job_queue.py ChunkQueue.await_work": ("`close` notifies", CLOSING[1]),
    "optim/job_queue.py ChunkQueue.await_change": (
        "`close` ends what is held",
        "test_waits.py::test_close_ends_what_the_updater_holds",
    ),
    "optim/kernels.py squared_gradient_norm": DRIVE,
    "optim/pipeline.py Pipeline.close": CLOSING,
    "optim/pipeline.py Pipeline._await_states": DRIVE,
    "optim/pipeline.py Pipeline._update": DRIVE,
    "durable/committer.py Committer.rest": COMMIT,
    "durable/committer.py Committer.close": COMMIT,
    "durable/committer.py Committer._commit_next": ("`close` posts None", CLOSING[1]),
    "schedule/runtime.py Runtime.enter": STORE,
    "measure/speed.py DriveProbe._run": DRIVE,
    "measure/speed.py _move": DRIVE,
    "measure/rates.py updates.step": DEVICE,
    "sharding/codec.py decode_master": NEVER,  # joins bits
    "sharding/collectives.py _wait": RANKS,
    "sharding/posted.py Collective._await": COLLECTIVE,
    "sharding/exchange.py Exchange.sum": COLLECTIVE,
    "sharding/exchange.py Exchange.sum_by_rank": COLLECTIVE,
    "sharding/exchange.py Exchange.sum_alike": COLLECTIVE,
    "sharding/exchange.py Exchange.close": ("gives up after CLOSING_SECONDS", RANKS[1]),
    "sharding/posted.py Posted.take": ("`close` posts None", CLOSING[1]),
    "sharding/exchange.py Exchange._join": RANKS,
    "sharding/gradient_buffer.py GradientBuffer._end_first": COLLECTIVE,
    "sharding/gradient_block.py GradientBlock.change": DRIVE,
    "sharding/gradient_reduction.py GradientReduction.reduce_home": DEVICE,
    "sharding/gradient_block.py GradientBlock.rewrite": DRIVE,
    "sharding/gradients.py Gradients._drop_forgotten": COLLECTIVE,
    "sharding/gradients.py Gradients._scale_assigned": COLLECTIVE,
    "sharding/gradients.py Gradients.settle": COLLECTIVE,
    "models/patience.py _CallWatcher._watch": (
        "a second; nobody waits for it, and it ends when no call is under way",
        "test_completions.py::test_a_template_that_never_ends_is_named",
    ),
    "sharding/gradients.py Gradients.reduce": DEVICE,
    "sharding/lazy_tensor.py _on_copies_sent": ("torch's timeout of the user's group", RANKS[1]),
    "sharding/on_device.py GatheredOnDevice._gather": STORE,
    "sharding/on_device.py OnDevice.wait": STORE,
    "sharding/on_device.py GatheredOnDevice.wait": STORE,
    "sharding/unit.py Unit.__init__": COLLECTIVE,  # given to its states
    "sharding/states.py States._checked_out": DRIVE,
    "sharding/states.py States.gather": COLLECTIVE,
    "sharding/parameter_data.py ParameterData.read": STORE,
    "durable/agreement.py Agreement._await_all": (
        "its timeout, `close`, a failure here or on another rank",
        "test_durable_ranks.py::test_a_wait_for_other_ranks_ends",
    ),
    "sharding/watch.py Watch.others": ("its patience", RANKS[1]),
    "sharding/watch.py _await_note": (
        "its timeout",
        "test_rank_faults.py::test_one_rank_has_it_and_all_are_told",
    ),
    "tiers/access.py PlaceCopy.done": NEVER,  # it has ended
    "tiers/access.py PlaceCopy.wait": DEVICE,
    "tiers/access.py Mover.close": CLOSING,
    "tiers/access.py Mover._run": ("`close` posts None", CLOSING[1]),
    "tiers/access.py Checkout.wait": DRIVE,
    "tiers/access.py Checkout.release": DRIVE,
    "tiers/saved_storage.py _end": DRIVE,
    "tiers/saved_copies.py SavedCopies.land": NEVER,
    "tiers/saved_copies.py SavedCopies.await_landing": DEVICE,
    "tiers/saved_copies.py SavedCopies.use": NEVER,
    "tiers/saved_copies.py SavedCopies.keep_ahead": NEVER,
    "tiers/saved_memory.py SavedMemory.free": DEVICE,
    "tiers/saved_drive.py SavedDrive.finish_reading": DRIVE,
    "tiers/activations.py Activations._send_away": DRIVE,
    "tiers/activations.py Activations._bring_to_slot": DRIVE,
    "tiers/activations.py Activations._sweep": NEVER,  # blocking=False
    "tiers/drives.py NvmeTier._try_direct": DRIVE,
    "tiers/store.py Store.fill_from_files": DRIVE,
    "durable/store.py DurableStore._check": DRIVE,
    "durable/store.py DurableStore.begin_rewrite": (
        "`PinnedStates.release`, which each end of a snapshot calls, and `Latch`",
        "test_snapshots.py::test_writes_outside_of_steps_wait_for_it",
    ),
    "tiers/resident.py Residency.await_idle": DEVICE,
    "tiers/resident.py _Leaving.await_end": DEVICE,
    "tiers/staging.py Staging.in_turn": DRIVE,
    "tiers/resident.py Loader._fill": DRIVE,
    "tiers/resident.py Loader._fill_directly": DRIVE,
    "tiers/resident.py Residency.wait": STORE,
    "tiers/resident.py Residency._acquire": STORE,
    "tiers/resident.py Residency.rollback": STORE,
    "tiers/staging.py Staging.bring_home": DRIVE,
    "tiers/staging.py Staging._take_slots": STORE,
}
"""Where (but in `cli` and `bench`, whose commands a signal ends), who ends it, and the test that
shows that."""

LOCKS: dict[str, str] = {
    "directories/lock.py _Held.guard": "taken where nobody can have it",
    "modules/hooks.py Hooks._claiming": "for a few lines",
    "models/patience.py _CallWatcher._guard": "for a few lines",
    "modules/interleave.py _closed.lock": "a turn, not a lock: see WAITS",
    "nvme/submit.py Submitter._staging": "held while what is in flight of one call ends: DRIVE",
    "nvme/functions.py _Shared._lock": "for a few lines",
    "observe.py Meter._lock": "for a few lines",
    "pinning.py Pinning._changed": "for a few lines; who waits on it lets go of it",
    "observe.py Recorder._lock": "for a few lines",
    "tiers/extents.py Extents._growing": "held while files grow: no wait for I/O",
    "durable/committer.py Committer._changed": "for a few lines; who waits on it lets go of it",
    "optim/job_table.py JobTable.changed": "for a few lines; who waits on it lets go of it",
    "sharding/posted.py Posted._lock": "for a few lines",
    "durable/agreement.py Agreement._lock": (
        "held while torch.distributed's store takes a note, or raises after its timeout"
    ),
    "sharding/watch.py Watch._lock": (
        "held while torch.distributed's store takes a note, or raises after its timeout"
    ),
    "tiers/access.py Fetch._lock": "held while a fetch ends: DRIVE or DEVICE, or STORE for staging",
    "tiers/activations.py Activations._lock": "held while what is in flight ends: DRIVE or DEVICE",
    "tiers/store.py Store._changed": (
        "for a few lines and the submission of reads; who waits on it lets go of it"
    ),
    "durable/store.py DurableStore._last_record": "held while a record is read, or given up: DRIVE",
    "nvme/ticket.py Tickets.lock": "for a few lines",
    "nvme/ticket.py Ticket._lock": "for a few lines",
}
"""What is made from threading's Lock, RLock and Condition, and how long one who has it keeps others
waiting."""


def definitions(node: ast.AST, where: tuple[str, ...] = ()) -> Iterator[tuple[str, ast.AST]]:
    """Every node below `node`, with the class and function that it is in."""
    for child in ast.iter_child_nodes(node):
        inside = (
            (*where, child.name) if isinstance(child, ast.FunctionDef | ast.ClassDef) else where
        )
        yield ".".join(inside), child
        yield from definitions(child, inside)


def is_wait(node: ast.AST) -> bool:
    """Whether a method that may block is called, or handed on: also `queue.get()`, and no `",
    ".join`."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in NAMES:
        return not isinstance(node.value, ast.Constant | ast.JoinedStr)
    called = (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and not node.args
        and not node.keywords
    )
    return called and node.func.attr == "get" and ast.unparse(node.func.value) != "_shared"  # type: ignore[attr-defined]


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(("cli/", "bench/")):
            yield name, ast.parse(path.read_text())


def test_every_wait_is_listed_with_who_ends_it() -> None:
    found = {
        f"{name} {where}"
        for name, tree in sources()
        for where, node in definitions(tree)
        if is_wait(node)
    }
    assert sorted(found - WAITS.keys()) == [], (
        "a new wait: say in WAITS who ends it when the engine fails or is closed, and test it"
    )
    assert sorted(WAITS.keys() - found) == [], "these are gone"


def test_every_lock_is_listed() -> None:
    found = set()
    for name, tree in sources():
        for where, node in definitions(tree):
            value = getattr(node, "value", None)
            if isinstance(node, ast.Assign) and isinstance(value, ast.Call):
                made = ast.unparse(value.func)
                if made in (
                    "threading.Lock",
                    "threading.RLock",
                    "threading.Condition",
                    "threading.Semaphore",
                ):
                    target = ast.unparse(node.targets[0]).removeprefix("self.")
                    found.add(f"{name} {where.removesuffix('.__init__')}.{target}")
    assert found == LOCKS.keys()


def test_the_tests_that_the_list_names_are_there() -> None:
    for test in {test for _, test in WAITS.values() if test}:
        file, name = test.split("::")
        assert f"def {name}(" in TESTS[file].read_text(), test


# A wrapped model, and somebody who comes while the main thread waits

WIDTH, DEPTH = 64, 4


@pytest.fixture(autouse=True)
def _hooks_left_behind() -> Iterator[None]:
    """What another thread closes in the middle of a forward cannot take its hooks from this one."""
    yield
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()


class Bias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4096))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class Run:
    """A model of `DEPTH` units with room for three, and its optimizer."""

    def __init__(self, directory: Path, kind: type[nn.Module] = Bias, **config: Any) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH) if kind is nn.Linear else kind() for _ in range(DEPTH))
        )
        budgets = {"gpu_memory": 3 * 20480, "cpu_memory": "16MiB", "cache": 0, "gpu_direct": "off"}
        values = (
            {
                "nvme": [directory],
                "device": "cpu",
                "threads": 1,
                "algorithm": "sgd",
                "update": "exact",
            }
            | budgets
            | config
        )
        self.model = infinity.wrap(model, config_of(**values), units=[kind])
        self.engine = infinity.engine(self.model)
        self.optimizer = infinity.SGD(self.model.parameters(), lr=0.1)
        self.store, self.pipeline = Probe(self.engine).store, Probe(self.engine).pipeline
        self.width = WIDTH if kind is nn.Linear else 4096

    def forward(self) -> torch.Tensor:
        return self.model(torch.ones(2, self.width)).mean()

    def step(self) -> None:
        self.forward().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Start:
    def make(kind: type[nn.Module] = Bias, **config: Any) -> Run:
        run = Run(tmp_path, kind, **config)
        request.addfinalizer(run.engine.close)
        return run

    return make


def once_it_waits(condition: Any, function: str, act: Callable[[], object]) -> threading.Thread:
    """Call `act` on a thread of its own as soon as the main thread waits on `condition` inside of
    `function`."""
    plain, waiting = condition.wait, threading.Event()

    def wait(timeout: float | None = None) -> Any:
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_code.co_name != function:
            frame = frame.f_back
        if (
            frame.f_code.co_name == function
            and threading.current_thread() is threading.main_thread()
        ):
            waiting.set()
        if timeout is not None:
            return plain(timeout)
        while not plain(0.1):
            pass  # Python forgets a signal that comes right before a lock is waited for
        return True

    def come() -> None:
        assert waiting.wait(PATIENCE)
        with condition if hasattr(condition, "__enter__") else contextlib.nullcontext():
            pass  # it has let go of the lock
        act()

    condition.wait = wait
    thread = threading.Thread(target=come)
    thread.start()
    return thread


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Ctrl-C is heard, also where a shell has started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    """Ctrl-C."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]


def until_it_ends(
    run: Run, condition: Any, function: str, ending: str, call: Callable[[], object]
) -> None:
    """`call` waits on `condition` in `function`, for ever; then comes what `ending` says."""
    reason = ZeroDivisionError("on purpose")
    acts: dict[str, Callable[[], object]] = {
        "failure": lambda: run.store.latch.fail(reason),
        "close": run.engine.close,
        "finalizer": lambda: Probe(run.engine).finalize(),
        "interrupt": interrupt,
    }
    thread = once_it_waits(condition, function, acts[ending])
    with pytest.raises(KeyboardInterrupt if ending == "interrupt" else EngineClosedError) as caught:
        call()
    if ending == "failure":
        assert caught.value.__cause__ is reason
    thread.join()
    for other in [thread for thread in threading.enumerate() if thread.name == "infinity-closing"]:
        other.join()


ENDINGS = ["failure", "close", "finalizer", "interrupt"]


def wait_for_an_update_that_nobody_makes(run: Run) -> Callable[[], object]:
    run.store.resident.begin_update(run.engine.units[0].blocks[Kind.PARAM], keep=True)
    return run.forward


def rollback_while_it_is_copied(run: Run) -> Callable[[], object]:
    block = run.engine.units[0].blocks[Kind.PARAM]
    run.forward()
    run.model[0](torch.ones(2, run.width))
    block.copy.copying, block.copy.renewed = 1, {0}
    return functools.partial(run.store.resident.rollback, block)


def evict_what_is_copied(run: Run) -> Callable[[], object]:
    run.forward()
    there = [
        unit for unit in run.engine.units if run.store.resident.has_copy(unit.blocks[Kind.PARAM])
    ]
    for unit in there:
        unit.blocks[Kind.PARAM].copy.copying += 1
    away = next(unit for unit in run.engine.units if unit not in there)
    return functools.partial(run.store.resident.start, away.blocks[Kind.PARAM])


def wait_for_staging(run: Run) -> Callable[[], object]:
    blocks = list(run.engine.units[0].blocks.values())
    request = ChunkRequest(blocks, 0, blocks)
    taken = []
    while (found := run.store.staging.try_check_out(request)) is not None:
        taken += found
    run.taken = taken  # type: ignore[attr-defined] - the test has them for good
    return functools.partial(run.engine.units[1].states.read, Kind.PARAM)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(
    ("function", "prepare"),
    [
        ("wait", wait_for_an_update_that_nobody_makes),
        ("rollback", rollback_while_it_is_copied),
        ("_acquire", evict_what_is_copied),
        ("_take_slots", wait_for_staging),
    ],
)
def test_a_wait_of_the_model_ends(
    function: str, prepare: Callable[[Run], Callable[[], object]], ending: str, start: Start
) -> None:
    run = start()
    run.forward()
    call = prepare(run)
    until_it_ends(run, run.store._changed, function, ending, call)
    for chunk in getattr(run, "taken", ()):
        chunk.release()


class Gate:
    """Stops the updater in the middle of its first update from `shut` on, until `open`, which may
    make it fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain, self.stopped, self.opened = Chunk.apply, threading.Event(), threading.Event()
        self.opened.set()
        self.error: BaseException | None = None

        def apply(chunk: Chunk, *args: Any) -> None:
            self.stopped.set()
            assert self.opened.wait(PATIENCE)
            if self.error is not None:
                raise self.error
            plain(chunk, *args)

        monkeypatch.setattr(Chunk, "apply", apply)

    def shut(self) -> None:
        self.stopped.clear()
        self.opened.clear()

    def open(self, error: BaseException | None = None) -> None:
        self.error = error
        self.opened.set()


def drain(run: Run, gate: Gate) -> Callable[[], object]:
    gate.shut()
    run.step()
    return run.engine.drain


def go_backward_over_a_step(run: Run, gate: Gate) -> Callable[[], object]:
    first, second = run.forward(), run.forward()
    first.backward()
    gate.shut()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return second.backward


def overwrite_what_a_delayed_update_reads(run: Run, gate: Gate) -> Callable[[], object]:
    loss = run.forward()
    loss.backward()
    gate.shut()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return run.forward().backward


def roll_back(run: Run, gate: Gate) -> Callable[[], object]:
    run.step()
    run.engine.drain()
    gate.shut()
    run.forward().backward()
    assert gate.stopped.wait(PATIENCE)
    return run.optimizer.zero_grad


@pytest.mark.parametrize("ending", ["failure", "close", "interrupt"])
@pytest.mark.parametrize(
    ("function", "prepare", "config"),
    [
        ("drain", drain, {}),
        ("await_update", go_backward_over_a_step, {}),
        (
            "await_written",
            overwrite_what_a_delayed_update_reads,
            {"update": "delayed", "delayed_after": 0},
        ),
        ("rollback", roll_back, {"update": "speculative"}),
    ],
)
def test_a_wait_for_an_update_ends(
    function: str,
    prepare: Any,
    config: dict[str, Any],
    ending: str,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`close` waits for the update that is under way, and so does who waits: both end when it
    does."""
    gate, reason = Gate(monkeypatch), SystemExit("on purpose")
    run = start(**config)
    run.step()
    run.engine.drain()
    call, closing = prepare(run, gate), threading.Event()
    shut_down = Updater.close

    def close_updater(updater: Updater) -> None:
        closing.set()
        shut_down(updater)

    monkeypatch.setattr(Updater, "close", close_updater)

    def close() -> None:
        closer = threading.Thread(target=run.engine.close)
        closer.start()
        assert closing.wait(PATIENCE)
        gate.open()
        closer.join()

    acts: dict[str, Callable[[], object]] = {
        "failure": lambda: gate.open(reason),
        "close": close,
        "interrupt": interrupt,
    }
    thread = once_it_waits(run.pipeline.jobs.changed, function, acts[ending])
    raised: BaseException | None = None
    try:
        call()
    except BaseException as error:
        raised = error
    thread.join()
    gate.open(gate.error)
    if ending == "interrupt":
        assert isinstance(raised, KeyboardInterrupt)
        run.optimizer.zero_grad()
        run.step()
        run.engine.drain()  # it goes on
        return
    if ending == "failure":
        with pytest.raises(
            EngineClosedError, match="an update failed and the engine cannot go on: on purpose"
        ) as caught:
            run.engine.drain()
        assert caught.value.__cause__ is reason
        assert raised is None or isinstance(raised, EngineClosedError)
    run.engine.close()
    assert not run.pipeline._thread.is_alive()


def test_close_ends_what_the_updater_holds(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that were read ahead of gradients that never come."""
    run = start(update="speculative")
    for _ in range(3):
        run.step()
    run.engine.drain()
    waits = threading.Event()
    plain = ChunkQueue.await_change

    def await_change(*args: Any) -> None:
        waits.set()
        plain(*args)

    monkeypatch.setattr(ChunkQueue, "await_change", await_change)
    run.forward()
    assert waits.wait(PATIENCE), "nothing was read ahead"
    monkeypatch.setattr(Speculation, "rollback", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        run.engine.close()
    assert not run.pipeline._thread.is_alive()


# Whatever is raised on a thread of the engine

Patch = Callable[[pytest.MonkeyPatch, BaseException], None]


class Odd(BaseException):
    """What no handler expects."""


def raising(owner: type, name: str, thread: str) -> Patch:
    """`owner.name` raises on `thread`, once."""

    def patch(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
        plain, left = getattr(owner, name), [error]

        def fail(*args: Any, **kwargs: Any) -> Any:
            if left and threading.current_thread().name == thread:
                raise left.pop()
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, fail)

    return patch


def broken(*patches: Patch) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
        for number, each in enumerate(patches):
            each(monkeypatch, error if number == 0 else Odd("a later one"))

    return patch


UPDATER, MOVER, EXCHANGE = "infinity-updater", "infinity-mover", "infinity-exchange"
AN_UPDATE = raising(Chunk, "apply", UPDATER)
FAULTS: dict[str, tuple[dict[str, Any], Patch]] = {
    f"{name} on the updater": ({}, raising(owner, method, UPDATER))
    for name, owner, method in (
        ("taking a chunk", Staging, "try_check_out"),
        ("waiting for a chunk", Checkout, "wait"),
        ("an update", Chunk, "apply"),
        ("placing", Residency, "renew"),
        ("ending a copy", PlaceCopy, "wait"),
        ("a commit", Checkout, "commit"),
        ("a release", Checkout, "release"),
        ("ending an update", Residency, "end_update"),
        ("a ticket", Ticket, "done"),
    )
} | {
    "an update, and releases after it": (
        {},
        broken(AN_UPDATE, raising(Checkout, "release", UPDATER)),
    ),
    "an update, and copies after it": (
        {},
        broken(AN_UPDATE, raising(Chunk, "await_device", UPDATER)),
    ),
    "an update, and the end of jobs": ({}, broken(AN_UPDATE, raising(JobQueue, "refuse", UPDATER))),
    "landing on the mover": ({}, raising(DeviceCopy, "to_ready", MOVER)),
    "asking for another place on the mover": ({}, raising(DeviceCopy, "_move_to", MOVER)),
    "ending on the mover": ({}, raising(Fetch, "await_end", MOVER)),
    "joining on the exchange": ({"discrete": True}, raising(Exchange, "_join", EXCHANGE)),
    "ending on the exchange": ({"discrete": True}, raising(Collective, "end", EXCHANGE)),
    "joining on the exchange, and asking others": (
        {"discrete": True},
        broken(
            raising(DiscreteDevice, "side_stream", EXCHANGE),
            raising(Lookout, "_explain", EXCHANGE),
        ),
    ),
}


@pytest.mark.parametrize("kind", [RuntimeError, Odd])
@pytest.mark.parametrize("fault", FAULTS)
def test_close_ends_every_thread_whatever_fails_on_it(
    fault: str, kind: type[BaseException], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's next call says what failed, though nobody who waits may have met it."""
    options, patch = FAULTS[fault]
    if options.get("discrete"):
        monkeypatch.setitem(vars(sys.modules["infinity.build"]), "ComputeDevice", DiscreteDevice)
    run = start(nn.Linear, gpu_memory="1MiB" if options.get("discrete") else 3 * 20480, gpu_cache=0)
    run.step()
    run.engine.drain()
    assert (Probe(run.engine).exchange is None) is (not options)
    error = kind("on purpose")
    patch(monkeypatch, error)
    with pytest.raises(
        EngineClosedError, match=r"failed and the engine cannot go on: .*on purpose"
    ) as caught:
        for _ in range(3):
            run.step()
            run.engine.drain()
    causes, cause = [], caught.value.__cause__
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__
    assert error in causes
    with pytest.raises(EngineClosedError):
        run.forward()
    engine_threads = [
        thread for thread in threading.enumerate() if thread.name.startswith("infinity-")
    ]
    with contextlib.suppress(BaseException):
        run.engine.close()
    assert not any(thread.is_alive() for thread in engine_threads)


# Collectives, micro-batches and activations


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_wait_for_a_collective_ends(
    ending: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(sys.modules["infinity.build"]), "ComputeDevice", DiscreteDevice)
    monkeypatch.setattr(sys.modules["infinity.sharding.exchange"], "CLOSING_SECONDS", 0.1)
    run, joined = start(nn.Linear, gpu_memory="1MiB", gpu_cache=0), threading.Event()
    exchange = Probe(run.engine).exchange
    collective = exchange.post("gather", "nobody", Contribution(lambda: joined.wait(PATIENCE)))
    until_it_ends(run, collective._ended, "await_end", ending, collective.wait)
    joined.set()
    run.engine.close()
    exchange._thread.join()


def test_what_is_posted_when_nothing_is_joined_any_more_has_ended(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(sys.modules["infinity.build"]), "ComputeDevice", DiscreteDevice)
    run = start(nn.Linear, gpu_memory="1MiB", gpu_cache=0)
    run.store.latch.fail(ZeroDivisionError("on purpose"))
    with pytest.raises(EngineClosedError, match="on purpose"):
        Probe(run.engine).exchange.post("gather", "nobody", Contribution(lambda: None)).wait()
    run.engine.close()
    with pytest.raises(EngineClosedError):
        Probe(run.engine).exchange.post("gather", "nobody", Contribution(lambda: None)).wait()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Interleaver, "_choose"),
        (Interleaver, "_leave"),
        (Interleaver, "_resume"),
        (ComputeDevice, "set_random_state"),
        (ComputeDevice, "random_state"),
    ],
)
@pytest.mark.parametrize("nth", range(4))
def test_whatever_fails_between_micro_batches_ends_all(
    owner: type, name: str, nth: int, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plain, calls = start(nn.Linear), getattr(owner, name), [0]

    def fail(*args: Any) -> Any:
        if threading.current_thread().name.startswith("infinity-micro-batch"):
            calls[0] += 1
            if calls[0] == nth + 1:
                raise Odd("on purpose")
        return plain(*args)

    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(Odd):
        infinity.accumulate(run.model, [torch.ones(2, WIDTH)] * 3, lambda out, _: out.mean())
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("infinity-micro-batch")
    ]


def test_ctrl_c_while_micro_batches_run(start: Start) -> None:
    run = start(nn.Linear)
    run.model[1].register_forward_hook(
        lambda *_: (
            interrupt() if threading.current_thread() is not threading.main_thread() else None
        )
    )
    with pytest.raises(KeyboardInterrupt):
        infinity.accumulate(run.model, [torch.ones(2, WIDTH)] * 3, lambda out, _: out.mean())
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("infinity-micro-batch")
    ]


def test_ctrl_c_while_a_micro_batch_thread_starts(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread runs, but nobody knows it yet: it must end, for it waits for a turn that nobody
    will give it."""
    run, plain, started = start(nn.Linear), threading.Thread.start, []

    def begin(thread: threading.Thread) -> None:
        plain(thread)
        if thread.name == "infinity-micro-batch-1":
            started.append(thread)
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", begin)
    with pytest.raises(KeyboardInterrupt):
        infinity.accumulate(run.model, [torch.ones(2, WIDTH)] * 3, lambda out, _: out.mean())
    for thread in started:
        thread.join()
    assert started


def test_activations_end_though_a_copy_of_them_fails(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(sys.modules["infinity.build"]), "ComputeDevice", DiscreteDevice)
    room = {
        "gpu_memory": "1MiB",
        "gpu_cache": 0,
        "cpu_memory": "32MiB",
        "activation_memory": "4MiB",
    }
    run = start(nn.Linear, activations="cpu", **room)
    loss = run.model(torch.ones(2000, WIDTH)).mean()
    plain = SavedStorage.await_idle
    left = [Odd("on purpose")]

    def await_idle(saved: SavedStorage) -> None:
        plain(saved)
        if left:
            raise left.pop()

    monkeypatch.setattr(SavedStorage, "await_idle", await_idle)
    activations = run.store.activations
    assert activations is not None and activations.memory.used > 0
    with pytest.raises(Odd):
        run.engine.close()
    assert activations.memory.used == 0 and not left
    with pytest.raises(EngineClosedError):
        loss.backward()


def test_an_interrupt_in_the_middle_of_a_step_ends_the_engine(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was announced and never posted would be waited for."""
    run = start()
    run.step()
    run.forward().backward()
    plain, left = Residency.begin_update, [1, 0]

    def begin(store: Residency, *args: Any, **kwargs: Any) -> None:
        if not left.pop():
            raise KeyboardInterrupt
        plain(store, *args, **kwargs)

    left.reverse()
    monkeypatch.setattr(Residency, "begin_update", begin)
    with pytest.raises(KeyboardInterrupt):
        run.optimizer.step()
    with pytest.raises(EngineClosedError, match="a step failed and the engine cannot go on: "):
        run.forward()
