"""`infinity.wrap` is all or nothing: whatever fails in it, and however late, leaves model, process
and directory as before."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import infinity
from infinity.assembly import Assembly
from infinity.modules.hooks import Hooks
from infinity.optim.updater import Updater
from infinity.sharding.states import States
from support.configs import config_of
from support.threads import count_threads

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(300)]

WIDTH = 32
SOURCES = str(Path(infinity.__file__).parent)
TABLES = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict)]


class Counted(nn.Linear):
    """Initialises itself, and notes that: a plain attribute, and a buffer."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if "times" not in self._buffers:
            self.register_buffer("times", torch.zeros(()))
        self.times += 1
        self.last = float(self.times)


class Odd(nn.Module):
    """Several dtypes, tied weights, buffers, odd strides, and modules whose parameters are on the
    meta device."""

    def __init__(self, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH).to(dtype) for dtype in dtypes)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.turned = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).T[:WIDTH])
        self.spread = nn.Parameter(torch.randn(1).expand(WIDTH))
        self.table = nn.Parameter(torch.arange(WIDTH), requires_grad=False)
        self.frozen = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64), requires_grad=False)
        self.nan = nn.Parameter(
            torch.tensor([0x7FA01234, 0x3F800001], dtype=torch.int32).view(torch.float32)
        )
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("loose", torch.randn(3), persistent=False)
        with infinity.init():
            self.norm = nn.BatchNorm1d(WIDTH)
            self.counted = Counted()
        self.norm.running_mean.fill_(3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (
            self.last(torch.tanh(self.first(x))) * self.scale
            + self.spread
            + self.frozen.to(x.dtype)
        )
        for block in self.blocks:
            x = x + block(x.to(block.weight.dtype)).to(x.dtype)
        return self.counted(x @ self.turned) + self.nan[1]


def odd(**options: Any) -> Odd:
    torch.manual_seed(0)
    return Odd(**options)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class Seen:
    """All that `wrap` may touch: two of one model are equal where nothing has changed."""

    def __init__(self, model: nn.Module, directory: Path) -> None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        self.tensors = {
            name: (
                id(t),
                type(t),
                t.dtype,
                t.shape,
                t.stride(),
                t.device,
                0 if t.is_meta else t.data_ptr(),
                t.requires_grad,
                dict(vars(t)),
            )
            for name, t in {**parameters, **buffers}.items()
        }
        self.content = {
            name: bits(t) for name, t in {**parameters, **buffers}.items() if not t.is_meta
        }
        self.hooks = {
            name: (p._backward_hooks, p._post_accumulate_grad_hooks or None)
            for name, p in parameters.items()
        }
        self.modules = {name: dict(vars(module)) for name, module in model.named_modules()}
        self.tables = {
            name: [list(vars(module)[table].items()) for table in TABLES]
            for name, module in model.named_modules()
        }
        for attributes in self.modules.values():
            for name in list(attributes):
                if isinstance(attributes[name], (dict, torch.Tensor)):
                    attributes[name] = id(attributes[name])
        for tables in self.tables.values():
            tables[:] = [[(key, id(value)) for key, value in table] for table in tables]
        self.generator = bits(torch.get_rng_state())
        self.threads = sorted(thread.name for thread in threading.enumerate())
        self.tasks = count_threads()
        self.descriptors = sorted(
            str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()
        )
        self.files = sorted(map(str, directory.rglob("*")))

    def differences(self, other: Seen) -> list[str]:
        return [name for name, value in vars(self).items() if vars(other)[name] != value]


def config(directory: Path, **changes: Any) -> infinity.Config:
    values = {
        "gpu_memory": "2MiB",
        "cpu_memory": "8MiB",
        "cache": 0,
        "threads": 1,
        "precision": "bf16",
        "device": "cpu",
    }
    return config_of(**({"nvme": directory} | values | changes))


# Every step fails in turn


class Failure(BaseException):
    """Like Ctrl-C, it is no `Exception`, so that nobody handles it."""


Call = tuple[str, str]
"""A function, by its file and its name."""


@functools.cache
def step_of(code: CodeType, caller: str) -> Call | None:
    """What one of our functions calls, where the file `caller` calls `code`. None for what nobody
    of ours calls, and for what is no step:

    parts of expressions; generators, which are called to be closed, too; blocks, of which the end
    may not fail; and noting what is to be undone. Left out is also what has a descriptor or a lock
    in its hands: `test_files` and `test_nvme_tier` fail those.
    """
    if not caller.startswith(SOURCES) or code.co_name.startswith("<"):
        return None
    if code.co_flags & inspect.CO_GENERATOR or code.co_name in ("__enter__", "__exit__", "file_at"):
        return None
    if Path(code.co_filename).name == "contextlib.py" or Path(caller).parent.name == "directories":
        return None
    return code.co_filename, code.co_name


@contextmanager
def watched(visit: Callable[[Call], None]) -> Iterator[None]:
    """`visit` every call that this thread makes inside."""

    def called(frame: FrameType, event: str, _: Any) -> None:
        caller = frame.f_back if event == "call" else None
        call = None if caller is None else step_of(frame.f_code, caller.f_code.co_filename)
        if call is not None:
            visit(call)

    sys.setprofile(called)
    try:
        yield
    finally:
        sys.setprofile(None)


def fails(number: int, at: Call, attempt: Callable[[], object]) -> bool:
    """Whether `attempt` ends by a `Failure` in its call number `number` of `at`."""
    met = 0

    def visit(call: Call) -> None:
        nonlocal met
        met += call == at
        if call == at and met == number:
            raise Failure

    try:
        with watched(visit):
            attempt()
    except Failure:
        return True
    return False


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, no garbage is collected: the calls that this makes would be counted, too."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# Objects whose __init__ has failed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.long)])
def test_every_step_may_fail(first: int, tmp_path: Path) -> None:
    """Every other function that `wrap` calls fails in its last call, always with the same model and
    directory."""
    calls: Counter[Call] = Counter()
    for _ in range(2):  # the first one imports and compiles
        model = odd()
        calls.clear()
        gc.collect()
        with uncollected(), watched(lambda call: calls.update([call])):
            infinity.wrap(model, config(tmp_path))
        infinity.engine(model).close()
    for late in (
        Hooks._register,
        Updater.__init__,
        Assembly.move_buffers,
        weakref.finalize.__init__,
    ):
        assert (late.__code__.co_filename, late.__name__) in calls
    model = odd()
    before = Seen(model, tmp_path)
    gc.collect()
    with uncollected():
        for call, count in list(calls.items())[first::2]:
            assert fails(count, call, lambda: infinity.wrap(model, config(tmp_path))), (
                f"{call} was not called {count} times"
            )
            if before.differences(Seen(model, tmp_path)):
                gc.collect()  # a transfer keeps its file open, and the failure keeps the transfer
            assert not before.differences(Seen(model, tmp_path)), f"{call} number {count}"
    trains(infinity.wrap(model, config(tmp_path)))


def trains(model: nn.Module) -> None:
    with infinity.engine(model):
        optimizer = infinity.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(4, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        infinity.engine(model).drain()


# Late failures, with other models and other ways to fill them


LATE: dict[str, tuple[Any, str]] = {
    "a parameter that is written": (States, "write"),
    "a buffer that is moved": (torch.Tensor, "to"),
    "a hook of a parameter": (torch.Tensor, "register_post_accumulate_grad_hook"),
    "the finalizer": (weakref, "finalize"),
}
CASES: dict[str, dict[str, Any]] = {
    "own dtypes": {"config": {"precision": "auto"}},
    "weights of a file": {"weights": True},
    "a seed": {"seed": 3},
    "all on nvme, delayed": {
        "config": {"gradients": "nvme", "update": "delayed", "activations": "cpu"}
    },
    "nothing on nvme": {
        "config": {"nvme": (), "parameters": "gpu", "optimizer": "gpu", "gradients": "gpu"}
    },
}


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("case", CASES)
def test_a_late_failure(
    case: str, late: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of the device is exhausted, say, when most is done."""
    model, values, arguments = odd(), odd(), dict(CASES[case])
    options = arguments.pop("config", {})
    if arguments.pop("weights", False):
        with torch.no_grad():
            state = {
                name: torch.full(value.shape, 7, dtype=value.dtype)
                for name, value in values.state_dict().items()
            }
        del state["last.weight"]
        save_file(state, tmp_path / "weights.safetensors")
        arguments["weights"] = tmp_path / "weights.safetensors"
    (tmp_path / "nvme").mkdir()
    before, count = Seen(model, tmp_path), 0
    where, name = LATE[late]
    real = getattr(where, name)

    def fail(*given: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count == (1 if where is weakref else 3):
            raise torch.OutOfMemoryError("no memory")
        return real(*given, **named)

    fail.__name__ = name
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(where, name, fail)
        infinity.wrap(model, config(tmp_path / "nvme", **options), **arguments)
    if before.differences(Seen(model, tmp_path)):
        gc.collect()
    assert not before.differences(Seen(model, tmp_path))
    model = infinity.wrap(model, config(tmp_path / "nvme", **options), **arguments)
    with infinity.engine(model) as engine:
        found = engine.state_dict()
    if "weights" in arguments:
        assert all((value == 7).all() for value in found.values())
    else:
        assert torch.equal(
            found["first.weight"], values.first.weight.to(found["first.weight"].dtype)
        )


def test_memory_is_given_back_when_all_is_done(tmp_path: Path) -> None:
    model = odd()
    old = [
        StorageWeakRef(parameter.untyped_storage())
        for parameter in (model.first.weight, model.turned)
    ]
    infinity.wrap(model, config(tmp_path))
    with infinity.engine(model):
        assert all(storage.expired() for storage in old)
