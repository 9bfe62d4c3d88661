"""What cannot work is refused before anything is changed, in words that say what would work.

Where `infinity.wrap` refuses, the model is as it was: the same parameters with the same data, no
hook, no thread, no file; it trains as a model that was never given to us, and can be wrapped with a
better configuration.
"""

from __future__ import annotations

import copy
import io
import json
import math
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import infinity
from infinity.tiers import drives
from support.budgets import ROOMY
from support.children import CHILD
from support.configs import config_of
from support.machine import PAGE
from support.models import Transformer, text_batch, transformer

pytestmark = [pytest.mark.usefixtures("one_thread")]


def config(directory: Path | list[Path], **changes: Any) -> infinity.Config:
    return config_of(**({"nvme": directory} | ROOMY | changes))


def files(directory: Path) -> dict[str, int]:
    return {str(path.relative_to(directory)): path.lstat().st_size for path in directory.rglob("*")}


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for number in range(2):
        loss = model(**text_batch(number)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@contextmanager
def unchanged(
    model: nn.Module, footprint: Callable[[], object], *directories: Path
) -> Iterator[None]:
    """Check that the block leaves `model`, the process and the directories as they were, and the
    model of use."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    meta = any(p.is_meta for p in parameters.values())
    values = {} if meta else {name: p.detach().clone() for name, p in parameters.items()}
    kinds = {
        name: (type(p), p.dtype, p.device, p.requires_grad, p.is_meta or p.data_ptr())
        for name, p in parameters.items()
    }
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    left = [files(directory) for directory in directories]
    held = footprint()
    generator = torch.get_rng_state()
    yield
    after = dict(model.named_parameters(remove_duplicate=False))
    assert after.keys() == parameters.keys()
    assert all(after[name] is p for name, p in parameters.items())
    assert {
        name: (type(p), p.dtype, p.device, p.requires_grad, p.is_meta or p.data_ptr())
        for name, p in after.items()
    } == kinds
    assert all(torch.equal(after[name], value) for name, value in values.items())
    assert dict(model.named_buffers()).keys() == buffers.keys()
    assert all(
        model.get_buffer(name) is buffer and torch.equal(buffer, value)
        for name, (buffer, value) in buffers.items()
    )
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert not [
        name
        for name, module in model.named_modules()
        if module._forward_hooks or module._forward_pre_hooks
    ]
    assert [files(directory) for directory in directories] == left
    assert footprint() == held
    assert torch.equal(torch.get_rng_state(), generator)
    if values:
        other = copy.deepcopy(model)
        other.load_state_dict(values | {name: value for name, (_, value) in buffers.items()})
        assert train(model, torch.optim.SGD(model.parameters(), 0.1)) == train(
            other, torch.optim.SGD(other.parameters(), 0.1)
        )


# Budgets and directories


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_budgets_that_are_too_small(
    precision: str, tmp_path: Path, footprint: Callable[[], object]
) -> None:
    model = transformer()
    least: dict[str, int] = {}
    for key, inside in (
        ("gpu_memory", "states at home there take 0 B, the units in use at once and the next one"),
        ("cpu_memory", "states at home in host memory take .* and staging at least"),
    ):
        text = (
            rf"^{key}=4 KiB is too small: {inside} .*; the smallest {key} that works is "
            r"(\d+) \(.* KiB\)(, or set gradients=\"nvme\")?$"
        )
        with unchanged(transformer(), footprint, tmp_path):
            pass  # the check itself is at peace with a model that nobody touched
        with (
            unchanged(model, footprint, tmp_path),
            pytest.raises(infinity.BudgetError, match=text) as refusal,
        ):
            infinity.wrap(model, config(tmp_path, precision=precision, **{key: PAGE}))
        found = re.match(text, str(refusal.value))
        assert found is not None
        least[key] = int(found[1])
    model = infinity.wrap(model, config(tmp_path, precision=precision, **least))
    with infinity.engine(model):
        train(model, infinity.AdamW(model.parameters()))


def test_nvme_memory_that_is_too_small(tmp_path: Path, footprint: Callable[[], object]) -> None:
    model = transformer()
    text = (
        "nvme_memory=1 MiB cannot hold the states on nvme, which need 4 MiB; "
        "the smallest nvme_memory that works is 4194304"
    )
    with (
        unchanged(model, footprint, tmp_path),
        pytest.raises(infinity.BudgetError, match=f"^{re.escape(text)}$"),
    ):
        infinity.wrap(model, config(tmp_path, nvme_memory="1MiB"))
    infinity.engine(infinity.wrap(model, config(tmp_path, nvme_memory="4MiB"))).close()


def test_budgets_are_checked_before_meta_parameters_are_touched(
    tmp_path: Path, footprint: Callable[[], object]
) -> None:
    with infinity.init():
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    with (
        unchanged(model, footprint, tmp_path),
        pytest.raises(infinity.BudgetError, match="gpu_memory=0 B is too small"),
    ):
        infinity.wrap(model, config(tmp_path, gpu_memory=0), seed=0)
    assert all(p.is_meta for p in model.parameters())
    with infinity.engine(infinity.wrap(model, config(tmp_path), seed=0)) as engine:
        assert engine.state_dict()["0.weight"].std() > 0


def test_a_directory_that_is_not_there_is_refused_although_nothing_would_lie_in_it(
    tmp_path: Path,
) -> None:
    """All states fit into the cache, or are placed elsewhere: a wrong path is to be seen now, not
    with a larger model."""
    for where in ({"cache": "auto"}, {"parameters": "cpu", "optimizer": "cpu"}):
        wrong = config_of(nvme=tmp_path / "gone", gpu_memory="64MiB", cpu_memory="64MiB", **where)
        with pytest.raises(
            infinity.ConfigError,
            match=r"nvme directory .*gone does not exist; create it on the drive",
        ):
            infinity.wrap(nn.Linear(8, 8), wrong)


def test_directories_that_cannot_be_used(tmp_path: Path, footprint: Callable[[], object]) -> None:
    (tmp_path / "file").write_text("of the user")
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    (tmp_path / "loose").symlink_to(tmp_path / "nowhere")
    advice = "; create it on the drive to be used: mkdir -p {0}"
    for names, text in (
        (["gone"], "nvme directory {0} does not exist" + advice),
        (["loose"], "nvme directory {0} does not exist" + advice),
        (["file"], "nvme directory {0} is not a directory" + advice),
        (
            ["there", "file"],
            (
                "nvme directory {1} is not a directory; create it on the drive to be used: "
                "mkdir -p {1}"
            ),
        ),
        (["there", "link"], "the nvme directories must differ: {0}, {1}"),
        (
            ["a" * 300],
            "nvme directory {0} cannot be used: File name too long; choose a shorter path",
        ),
    ):
        model, paths = transformer(), [tmp_path / name for name in names]
        expected = re.escape(text.format(*paths))
        with (
            unchanged(model, footprint, tmp_path),
            pytest.raises(infinity.ConfigError, match=f"^{expected}$"),
        ):
            infinity.wrap(model, config(paths))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission(tmp_path: Path, footprint: Callable[[], object]) -> None:
    model, locked = transformer(), tmp_path / "locked"
    locked.mkdir(mode=0o500)
    text = re.escape(f"nvme directory {locked} cannot be written: ")
    text += "Permission denied; give this user access, or choose another path"
    with (
        unchanged(model, footprint, tmp_path),
        pytest.raises(infinity.ConfigError, match=f"^{text}$"),
    ):
        infinity.wrap(model, config(locked))


@pytest.mark.root
def test_a_read_only_file_system(
    mount: Callable[[str], Path], footprint: Callable[[], object]
) -> None:
    model, path = transformer(), mount("ro,size=64m")
    text = re.escape(
        f"nvme directory {path} cannot be written: Read-only file system; choose another path"
    )
    with unchanged(model, footprint, path), pytest.raises(infinity.ConfigError, match=f"^{text}$"):
        infinity.wrap(model, config(path))


@pytest.mark.root
def test_a_full_file_system(
    mount: Callable[[str], Path], tmp_path: Path, footprint: Callable[[], object]
) -> None:
    model, path, other = transformer(depth=32), mount("size=3m"), tmp_path / "other"
    other.mkdir()
    text = (
        re.escape(f"{path} has 3 MiB free, but the states on nvme need ")
        + r"\d+ MiB there; free \d+ MiB, add a second direct"
    )
    with (
        unchanged(model, footprint, tmp_path),
        pytest.raises(infinity.BudgetError, match=f"^{text}"),
    ):
        infinity.wrap(model, config(path))
    with pytest.raises(infinity.BudgetError, match=r"directory, or set durability='off' \(no step"):
        infinity.wrap(model, config(path, durability="step"))
    with pytest.raises(
        infinity.BudgetError, match=r"set durability='step' \(takes [\d.]+ MiB less\), "
    ):
        infinity.wrap(model, config(path, durability=2))
    # All of it fits into the other.
    infinity.engine(infinity.wrap(model, config([other, path]))).close()


@pytest.mark.root
def test_a_file_system_that_is_exactly_large_enough_is_enough_for_all_of_training(
    mount: Callable[[str], Path],
) -> None:
    model = infinity.wrap(
        transformer(), config(mount(f"size={(4 << 20) + 2 * PAGE}"), gradients="nvme")
    )
    with infinity.engine(model):
        optimizer = infinity.AdamW(model.parameters())
        for _ in range(3):
            train(model, optimizer)


def test_a_directory_that_another_process_uses(
    tmp_path: Path, footprint: Callable[[], object]
) -> None:
    model = transformer()
    command = [sys.executable, "-W", "error", __file__, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **CHILD) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "open\n"
        text = re.escape(
            f"nvme directory {tmp_path} is in use by process {other.pid}; give each job "
            "its own directory"
        )
        with (
            unchanged(model, footprint, tmp_path),
            pytest.raises(infinity.PathInUseError, match=f"^{text}$"),
        ):
            infinity.wrap(model, config(tmp_path))
        other.stdin.write("\n")
        other.stdin.close()
        assert other.wait() == 0
    infinity.engine(infinity.wrap(model, config(tmp_path))).close()


def test_a_directory_that_another_engine_of_this_process_uses(
    tmp_path: Path, footprint: Callable[[], object]
) -> None:
    first, second = infinity.wrap(transformer(), config(tmp_path)), transformer()
    with infinity.engine(first):
        with (
            unchanged(second, footprint, tmp_path),
            pytest.raises(infinity.PathInUseError, match=f"by process {os.getpid()};"),
        ):
            infinity.wrap(second, config(tmp_path))
        train(first, infinity.AdamW(first.parameters()))


def test_the_same_path_twice(tmp_path: Path) -> None:
    with pytest.raises(
        infinity.ConfigError,
        match=re.escape(f"nvme names a directory twice: {tmp_path}, {tmp_path}"),
    ):
        config([tmp_path, tmp_path])


def test_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"^unknown config key 'gpu_memroy'; did you mean 'gpu_memory'\? The keys are: nvme",
    ):
        config(tmp_path, gpu_memroy="1GiB")


# Parameters


@pytest.fixture
def wrapped(tmp_path: Path) -> Iterator[Transformer]:
    model = infinity.wrap(transformer(), config(tmp_path, poison=True))
    yield model
    infinity.engine(model).close()


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "__setitem__": lambda p: p.__setitem__(0, 1.0),
    "add_": lambda p: p.add_(1),
    "zero_": lambda p: nn.init.zeros_(p),
    "copy_": lambda p: p.copy_(torch.ones(64, 32)),
    "set data": lambda p: setattr(p, "data", torch.ones(64, 32)),
    "out": lambda p: torch.add(torch.ones(64, 32), 1, out=p),
    "foreach": lambda p: torch._foreach_add_([p], 1.0),
    "vector": lambda p: nn.utils.vector_to_parameters(torch.ones(2048), [p]),
    "data_ptr": lambda p: p.data_ptr(),
    "untyped_storage": lambda p: p.untyped_storage(),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_parameter_written_while_sharded(name: str, wrapped: Transformer) -> None:
    text = re.escape(
        "tokens.weight (unit tokens) lives on nvme and its data was touched (NAME) outside of "
        "its module's forward; use `with infinity.gathered(model):` (or the parameter itself) to "
        "read it, gathered(..., write=True) to change it"
    ).replace("NAME", r"\w+")
    with torch.no_grad(), pytest.raises(infinity.ShardedParameterError, match=f"^{text}$"):
        WRITES[name](wrapped.tokens.weight)
    train(wrapped, infinity.AdamW(wrapped.parameters()))


LOST: dict[str, Callable[[Any], object]] = {
    "data": lambda p: p.data.add_(1),
    "row of data": lambda p: p.data.__setitem__(0, 1.0),
    "view of data": lambda p: p.data[0].zero_(),
    "detached": lambda p: p.detach().mul_(2),
    "row": lambda p: p[0].fill_(1.0),
    "view": lambda p: p.view(-1).mul_(2),
    "view of a view": lambda p: p.view(-1)[3:].unsqueeze(0).add_(1),
    "iadd": lambda p: p.data.__iadd__(1),
}


@pytest.mark.parametrize("name", LOST)
@pytest.mark.parametrize("grad", [True, False])
def test_a_copy_of_a_parameter_is_not_written(grad: bool, name: str, wrapped: Transformer) -> None:
    lost = r"^a copy of a parameter was changed in place, which would be lost; change .*write=True"
    with (
        torch.set_grad_enabled(grad),
        # With autograd on, torch has a sentence of its own for a view of a parameter.
        pytest.raises(RuntimeError, match=rf"{lost}|a leaf Variable that requires grad"),
    ):
        LOST[name](wrapped.tokens.weight)


def test_a_parameter_may_be_asked_what_it_is(wrapped: Transformer) -> None:
    weight = wrapped.tokens.weight
    assert repr(weight).endswith("ShardedParameter(tokens.weight, on nvme, unit tokens)")
    assert (weight.shape, weight.dtype, weight.device, weight.ndim) == (
        (64, 32),
        torch.float32,
        torch.device("cpu"),
        2,
    )
    assert (weight.numel(), len(weight), weight.requires_grad, weight.is_leaf, weight.grad) == (
        2048,
        64,
        True,
        True,
        None,
    )
    assert isinstance(weight, nn.Parameter) and weight in {weight}
    assert "Embedding(64, 32)" in repr(wrapped)


MOVED = "the engine moves the model: Config\\(precision="
SAVED = r"infinity\.engine\(model\) saves it"
COPIED = "for a copy build the model again"
BEFORE = "do that before infinity.wrap"
USES: dict[str, tuple[Callable[[Any], object], str]] = {
    "to dtype": (lambda model: model.to(torch.bfloat16), MOVED),
    "to device": (lambda model: model.to("meta"), MOVED),
    "half": (lambda model: model.half(), MOVED),
    "cuda": (lambda model: model.cuda(), MOVED),
    "a part": (lambda model: model.blocks[0].double(), MOVED),
    "what holds it": (lambda model: nn.Sequential(model).bfloat16(), MOVED),
    "share_memory": (lambda model: model.share_memory(), MOVED),
    "to_empty": (lambda model: model.to_empty(device="cpu"), MOVED),
    "copy": (copy.copy, COPIED),
    "deepcopy": (copy.deepcopy, COPIED),
    "average": (torch.optim.swa_utils.AveragedModel, COPIED),
    "deepcopy of a part": (lambda model: copy.deepcopy(model.blocks), COPIED),
    "pickle": (pickle.dumps, SAVED),
    "pickle of a part": (lambda model: pickle.dumps(model.blocks), SAVED),
    "save": (lambda model: torch.save(model, io.BytesIO()), SAVED),
    "weight norm": (
        lambda model: nn.utils.parametrizations.weight_norm(model.blocks[0].up),
        BEFORE,
    ),
}


@pytest.mark.parametrize("name", USES)
def test_a_wrapped_model_used_as_if_it_held_its_data(name: str, wrapped: Transformer) -> None:
    """What to do instead is a sentence for each."""
    use, way = USES[name]
    what = "lives on nvme and its data was touched|is part of a wrapped model|would be replaced"
    with pytest.raises(infinity.ShardedParameterError, match=rf"({what}).*; .*{way}"):
        use(wrapped)
    assert wrapped.scale.dtype == torch.float32
    train(wrapped, infinity.AdamW(wrapped.parameters()))


def test_gathering_more_than_fits(tmp_path: Path, smallest: Callable[..., dict[str, int]]) -> None:
    """Is refused, and leaves nothing in use."""
    fits = r"does not fit into gpu_memory=\d+ KiB beside the units in use at the same time"
    model = transformer()
    model = infinity.wrap(model, config(tmp_path, **smallest(model, nvme=[tmp_path])))
    with infinity.engine(model) as engine:
        optimizer = infinity.AdamW(model.parameters())
        with (
            pytest.raises(
                infinity.BudgetError, match=rf"^param of blocks\.\d {fits} \(param of mo"
            ),
            infinity.gathered(model),
        ):
            pass
        assert all(block.copy.pins == 0 for unit in engine.units for block in unit.blocks.values())
        with infinity.gathered(model.blocks[1]):
            assert model.blocks[1].up.weight.sum().isfinite()
        train(model, optimizer)


@pytest.mark.parametrize("gradients", ["cpu", "nvme"])
def test_the_memory_that_is_named_is_enough(gradients: str, tmp_path: Path) -> None:
    """With the buffer of gradients that are on NVMe, too."""
    memory, refusals = 0, 0

    def build() -> nn.Module:
        return nn.Sequential(
            *(nn.Linear(64, 1024 if i < 2 else 64 + 16 * i, bias=False) for i in range(8))
        )

    def wrapped() -> nn.Module:
        options: dict[str, Any] = {
            "nvme": [tmp_path],
            "gradients": gradients,
            "cpu_memory": 1 << 26,
        }
        return infinity.wrap(build(), config_of(gpu_memory=memory, **options), units=[nn.Linear])

    with pytest.raises(infinity.BudgetError) as refusal:
        wrapped()
    memory = int(re.search(r"smallest gpu_memory that works is (\d+)", str(refusal.value))[1])  # type: ignore[index]
    for number in range(2, 9):
        model = wrapped()
        with infinity.engine(model):
            try:
                with infinity.gathered(list(model[:number].parameters())):
                    continue
            except infinity.BudgetError as error:
                found = re.search(r"; gpu_memory=(\d+) \(.*\) is enough for these$", str(error))
        assert found is not None
        assert int(found[1]) > memory
        memory, refusals = int(found[1]), refusals + 1
        model = wrapped()
        with infinity.engine(model), infinity.gathered(list(model[:number].parameters())):
            pass
    assert refusals


# Optimizers and wrapping


def test_optimizers_that_cannot_work(tmp_path: Path) -> None:
    plain = transformer()
    text = (
        r"^AdamW got a parameter of no wrapped model; first model = "
        r"infinity\.wrap\(model, config\), once more where parameters came later$"
    )
    with pytest.raises(infinity.ConfigError, match=text):
        infinity.AdamW(plain.parameters())
    plain.norm.requires_grad_(False)
    model = infinity.wrap(plain, config(tmp_path))
    with infinity.engine(model):
        text = (
            r"^norm\.weight was frozen \(requires_grad=False\) when the model was "
            r"wrapped, so it has no place for gradients"
        )
        for thaw in (
            model.norm.requires_grad_,
            lambda: setattr(model.norm.weight, "requires_grad", True),
        ):
            with pytest.raises(infinity.ConfigError, match=text):
                thaw()
        assert not model.norm.weight.requires_grad
        model.norm.requires_grad_(False)  # is no change
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = infinity.AdamW(trainable[:1])  # what was refused does not count
        text = (
            r"^\S+ already has an optimizer, AdamW; a parameter has states for one: use "
            r"one optimizer with several parameter"
        )
        with pytest.raises(infinity.ConfigError, match=text):
            infinity.AdamW(trainable)
        optimizer.add_param_group({"params": trainable[1:]})
        train(model, optimizer)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1.0),
        ("lr", math.nan),
        ("betas", (0.9, 1.0)),
        ("eps", 0.0),
        ("weight_decay", -0.1),
        ("max_grad_norm", 0.0),
    ],
)
def test_hyper_parameters_out_of_range(name: str, value: Any, wrapped: Transformer) -> None:
    with pytest.raises(
        infinity.ConfigError, match=re.escape(f"AdamW: {name}={value} is out of range")
    ):
        infinity.AdamW(wrapped.parameters(), **{name: value})
    train(wrapped, infinity.AdamW(wrapped.parameters()))


def test_one_optimizer_for_two_models(
    wrapped: Transformer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = infinity.wrap(transformer(), config(tmp_path_factory.mktemp("other")))
    with infinity.engine(other):
        with pytest.raises(
            infinity.ConfigError,
            match="the parameters of one AdamW must belong to one wrapped model",
        ):
            infinity.AdamW([*wrapped.parameters(), *other.parameters()])
        train(wrapped, infinity.AdamW(wrapped.parameters()))
        train(other, infinity.AdamW(other.parameters()))


def test_wrapping_twice(wrapped: Transformer, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    with pytest.raises(
        infinity.ConfigError,
        match=r"^the model is wrapped already: use it as it is, or call infinity\.eng",
    ):
        infinity.wrap(wrapped, config(other))
    assert files(other) == {}
    train(wrapped, infinity.AdamW(wrapped.parameters()))


class Pair(nn.Module):
    """A linear layer, and beside it two parameters, `a` and `b`, or what is given for them."""

    def __init__(self, a: torch.Tensor | None = None, b: torch.Tensor | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        for name, value in (("a", a), ("b", b)):
            if value is not None:
                trains = value.is_floating_point() or value.is_complex()
                self.register_parameter(
                    name, value if isinstance(value, nn.Parameter) else nn.Parameter(value, trains)
                )


def refused(model: nn.Module, text: str, directory: Path, **changes: Any) -> None:
    """`wrap` refuses `model` with `text`, and leaves all as it was."""
    parameters = {name: (p, type(p), p.requires_grad) for name, p in model.named_parameters()}
    hooks = {
        name: (len(m._forward_hooks), len(m._forward_pre_hooks))
        for name, m in model.named_modules()
    }
    left = files(directory), threading.active_count(), len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(infinity.ConfigError, match=text):
        infinity.wrap(model, config(directory, **changes))
    assert (
        files(directory),
        threading.active_count(),
        len([*Path("/proc/self/fd").iterdir()]),
    ) == left
    assert {
        name: (p, type(p), p.requires_grad) for name, p in model.named_parameters()
    } == parameters
    assert {
        name: (len(m._forward_hooks), len(m._forward_pre_hooks))
        for name, m in model.named_modules()
    } == hooks
    assert not {"_infinity_engine", "zero_grad", "no_sync"} & set(vars(model))


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2],
)
def test_trainable_parameters_that_no_kernel_updates(dtype: torch.dtype, tmp_path: Path) -> None:
    kind = str(dtype).removeprefix("torch.")
    way = (
        "keep it as a real parameter"
        if dtype.is_complex
        else r"convert the model with model\.float\(\), or give Config\(precision="
    )
    text = (
        rf"^a is trainable and {kind}, and optimizers update fp32, bf16 and fp16: "
        rf"{way}.*, or freeze it with"
    )
    refused(Pair(torch.ones(8).to(dtype)), text, tmp_path)
    if dtype.is_complex:
        refused(Pair(torch.ones(8).to(dtype)), text, tmp_path, precision="fp32")
        return
    model = infinity.wrap(Pair(torch.ones(8).to(dtype)), config(tmp_path, precision="fp32"))
    with infinity.engine(model) as engine:
        assert engine.state_dict()["a"].equal(torch.ones(8))


@pytest.mark.parametrize("kind", [nn.DataParallel, nn.parallel.DistributedDataParallel])
def test_wrappers_that_keep_gradients_or_copies(
    kind: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if kind is not nn.DataParallel:
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        request.addfinalizer(torch.distributed.destroy_process_group)
    text = rf"is a {kind.__name__}, which keeps gradients or copies of its own; wrap the module in"
    refused(kind(nn.Linear(2, 2)), f"^the model {text}", tmp_path)
    refused(nn.Sequential(kind(nn.Linear(2, 2))), f"^0 {text}", tmp_path)


def test_parameters_of_inference_mode(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    refused(model, r"^weight was made inside of torch.inference_mode\(\), and autograd", tmp_path)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.complex64, torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn],
)
def test_frozen_parameters_may_be_of_any_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    value = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    model = infinity.wrap(Pair(nn.Parameter(value.clone(), requires_grad=False)), config(tmp_path))
    with infinity.engine(model) as engine:
        found = engine.state_dict()["a"]
    assert found.dtype is dtype and torch.equal(found.view(torch.uint8), value.view(torch.uint8))


def overlapping() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    matrix = torch.randn(8, 8)
    first = nn.Parameter(torch.randn(8))
    array = torch.randn(8).numpy()
    meta = torch.empty(8, device="meta")
    return {
        "the same bytes": (first, nn.Parameter(first.data)),
        "one is frozen": (first, nn.Parameter(first.data, requires_grad=False)),
        "a part": (matrix, matrix[2:3]),
        "another shape": (matrix, matrix.view(-1)[10:20]),
        "rows and columns": (matrix[:, 3], matrix[3]),
        "columns": (matrix[:, :5], matrix[:, 4:]),
        "another dtype": (matrix, nn.Parameter(matrix.view(torch.int32), requires_grad=False)),
        "two storages": (torch.from_numpy(array), torch.from_numpy(array)),
        "no memory": (nn.Parameter(meta), nn.Parameter(meta)),
    }


@pytest.mark.parametrize("kind", overlapping())
def test_parameters_that_share_memory(kind: str, tmp_path: Path) -> None:
    """A write to one would not reach the other, as it does in plain PyTorch."""
    text = (
        r"^[ab] and [ab] share memory but are two tensors, as \.data makes them: give "
        r"both modules the same nn\.Parameter to tie"
    )
    refused(Pair(*overlapping()[kind]), text, tmp_path)


def test_a_buffer_that_shares_memory_with_a_parameter(tmp_path: Path) -> None:
    model = Pair()
    model.linear.register_buffer("copy", model.linear.weight.data[0])
    refused(model, r"^linear\.weight and linear\.copy share memory but are two tensors", tmp_path)


def test_parameters_beside_each_other_in_one_storage(tmp_path: Path) -> None:
    """Tied ones, columns of one matrix, parts of one buffer, and a parameter that overlaps with
    itself."""
    matrix, flat = torch.randn(8, 8), torch.randn(64)
    tied = nn.Parameter(torch.randn(3))
    for a, b in (
        (matrix[:, :5], matrix[:, 5:]),
        (matrix[::2], matrix[1::2]),
        (flat[:10], flat[10:]),
        (tied, tied),
        (torch.randn(1).expand(6), flat),
        (torch.empty(0), torch.empty(0)),
    ):
        model = Pair(a, b)
        values = {name: value.clone() for name, value in model.state_dict().items()}
        infinity.wrap(model, config(tmp_path))
        with infinity.engine(model) as engine:
            assert all(
                torch.equal(value, values[name]) for name, value in engine.state_dict().items()
            )


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated")
def test_scripted_modules(inside: bool, tmp_path: Path) -> None:
    scripted = torch.jit.script(nn.Linear(8, 8))
    name = "1" if inside else "the model"
    text = (
        rf"^{name} is a ScriptModule with parameters; TorchScript calls no Python "
        r"hooks, which bring them: wrap the module that"
    )
    refused(nn.Sequential(nn.Linear(8, 8), scripted) if inside else scripted, text, tmp_path)
    # Has none.
    plain = infinity.wrap(
        nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.GELU())), config(tmp_path)
    )
    with infinity.engine(plain):
        assert plain(torch.ones(2, 8)).shape == (2, 8)


def test_lazy_modules(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(8))
    text = (
        r"^1\.weight has no shape yet, because its module is lazy: run the model on one "
        r"batch before infinity\.wrap$"
    )
    refused(model, text, tmp_path)
    model(torch.ones(1, 8))
    infinity.engine(infinity.wrap(model, config(tmp_path))).close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["sparse", "quantized", "made of others"])
def test_parameters_that_are_no_plain_bytes(kind: str, tmp_path: Path) -> None:
    values, text = {
        "sparse": (torch.eye(8).to_sparse(), "^a is a sparse_coo tensor; parameters must be dense"),
        "quantized": (
            torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8),
            "^a is a quantized tensor; parameters must be",
        ),
        "made of others": (
            TwoTensor(torch.ones(8), torch.ones(8)),
            "^a is a TwoTensor, a tensor made of others, which cannot be",
        ),
    }[kind]
    refused(Pair(nn.Parameter(values, requires_grad=False)), text, tmp_path)


def test_a_model_that_holds_a_wrapped_one(
    wrapped: Transformer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("other")
    outer = nn.ModuleList([nn.Linear(8, 8), wrapped])
    with pytest.raises(
        infinity.ConfigError,
        match=r"^1 is wrapped already, on its own: call infinity\.engine\(\.\.\.\)\.unwrap",
    ):
        infinity.wrap(outer, config(directory))
    tied = nn.Embedding(64, 32)
    tied.weight = wrapped.tokens.weight
    for other, where in (
        (wrapped.blocks, nullcontext()),
        (tied, nullcontext()),
        (wrapped.blocks, infinity.gathered(wrapped)),
    ):
        with (
            where,
            pytest.raises(
                infinity.ConfigError,
                match=r"weight belongs to a model that is wrapped already: call infinity\.eng",
            ),
        ):
            infinity.wrap(other, config(directory))
    assert files(directory) == {}
    train(wrapped, infinity.AdamW(wrapped.parameters()))


def test_a_model_whose_engine_was_closed(tmp_path: Path) -> None:
    model = infinity.wrap(transformer(), config(tmp_path))
    infinity.engine(model).close()
    with pytest.raises(
        infinity.ConfigError,
        match=r"^places has no data any more, because its engine was closed: build the model again",
    ):
        infinity.wrap(model, config(tmp_path))


def test_models_and_units_that_make_no_sense(
    tmp_path: Path, footprint: Callable[[], object]
) -> None:
    model = transformer()
    text = (
        r"^units=\.\.\. matches no module of the model; give classes or modules that occur in it$"
    )
    with unchanged(model, footprint, tmp_path), pytest.raises(infinity.ConfigError, match=text):
        infinity.wrap(model, config(tmp_path), units=[nn.Conv2d])
    with pytest.raises(infinity.ConfigError, match=r"^the model has no parameters to manage$"):
        infinity.wrap(nn.GELU(), config(tmp_path))
    with pytest.raises(
        infinity.ConfigError,
        match=re.escape("the model is not wrapped, or its engine was closed; call model ="),
    ):
        infinity.engine(model)
    assert files(tmp_path) == {}


def test_a_model_without_values(tmp_path: Path, footprint: Callable[[], object]) -> None:
    with torch.device("meta"):
        model = transformer()
    model.scale = torch.tensor(0.5)
    text = (
        "places is on the meta device and has no values, because it was not built inside "
        "infinity.init(); build the model, and what is added to it, inside infinity.init(), or "
        "give wrap(..., weights=...)"
    )
    with (
        unchanged(model, footprint, tmp_path),
        pytest.raises(infinity.ConfigError, match=f"^{re.escape(text)}$"),
    ):
        infinity.wrap(model, config(tmp_path), seed=0)
    assert all(p.is_meta for p in model.parameters())


def test_an_instruction_set_that_the_cpu_lacks(
    tmp_path: Path, footprint: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = transformer()
    text = r"^instruction_set='avx2' is not one that this CPU has; 'auto' is '\w+' here$"
    real = infinity.native.cpu_adam()

    class WithoutAvx:
        def __getattr__(self, name: str) -> Any:
            return (lambda isa: isa == "scalar") if name == "has_isa" else getattr(real, name)

    monkeypatch.setattr("infinity.native.cpu_adam", WithoutAvx)
    with unchanged(model, footprint, tmp_path), pytest.raises(infinity.ConfigError, match=text):
        infinity.wrap(model, config(tmp_path, instruction_set="avx2"))


# Weights


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    directory = tmp_path / "weights"
    directory.mkdir()
    return directory


def state(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Good weights, but for these, where None leaves one out and __ is a dot; what is tied is there
    once."""
    values: dict[str, torch.Tensor | None] = dict(transformer(seed=3).state_dict())
    values |= {"head.weight": None} | {
        name.replace("__", "."): value for name, value in changes.items()
    }
    return {name: value.clone() for name, value in values.items() if value is not None}


def broken_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text("{")


def index_without_file(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"tokens.weight": "gone.safetensors"}})
    )


def truncated(directory: Path) -> None:
    save_file(state(), directory / "model.safetensors")
    content = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(content[: len(content) // 2])


WEIGHTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "none": (
        lambda path: None,
        r"^{0} holds neither model\.safetensors nor model\.safetensors\.index\.json$",
    ),
    "another model": (
        lambda path: save_file({"w": torch.zeros(2)}, path / "model.safetensors"),
        r"^{0} has no tensor for places, tokens\.weight, blocks\.0\.norm1\.weight, "
        r"blocks\.0\.norm1\.bias, blocks\.0\.attention\.qkv\.weight and \d+ more; it belongs to "
        r"another model$",
    ),
    "wrong shape": (
        lambda path: save_file(state(norm__weight=torch.zeros(33)), path / "model.safetensors"),
        r"^norm\.weight in {0} has shape \(33,\), the model needs \(32,\)$",
    ),
    "wrong shape of a buffer": (
        lambda path: save_file(state(scale=torch.zeros(3)), path / "model.safetensors"),
        r"^scale in {0} has shape \(3,\), the model needs \(\)$",
    ),
    "truncated": (truncated, r"^{0}/model\.safetensors cannot be read as safetensors: "),
    "broken index": (broken_index, r"^{0}/model\.safetensors\.index\.json .*"),
    "index without file": (
        index_without_file,
        r"^{0}/gone\.safetensors cannot be read as safetensors: ",
    ),
}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("meta", [False, True])
def test_weights_that_do_not_fit(
    kind: str, meta: bool, weights: Path, tmp_path: Path, footprint: Callable[[], object]
) -> None:
    write, text = WEIGHTS[kind]
    write(weights)
    with infinity.init() if meta else pytest.MonkeyPatch.context():
        model = transformer()
    with (
        unchanged(model, footprint, tmp_path),
        pytest.raises(infinity.ConfigError, match=text.format(re.escape(str(weights)))),
    ):
        infinity.wrap(model, config(tmp_path), weights=weights)
    for path in weights.iterdir():
        path.unlink()
    save_file(state(), weights / "model.safetensors")
    with infinity.engine(infinity.wrap(model, config(tmp_path), weights=weights)) as engine:
        assert all(
            torch.equal(value, transformer(seed=3).state_dict()[name])
            for name, value in engine.state_dict().items()
        )


def test_a_drive_that_fails_while_the_model_is_moved_there(
    tmp_path: Path, footprint: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = drives.make_engine

    def failing(kind: str, **options: int) -> Any:
        engine = make(kind, **options)
        engine.set_faults(fail_write_at=4)
        return engine

    model = transformer()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    left = files(tmp_path), footprint()
    with (
        monkeypatch.context() as patch,
        pytest.raises(infinity.NvmeError, match="Input/output error"),
    ):
        patch.setattr(drives, "make_engine", failing)
        infinity.wrap(model, config(tmp_path))
    assert (files(tmp_path), footprint()) == left
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    other = transformer()
    assert train(model, torch.optim.SGD(model.parameters(), 0.1)) == train(
        other, torch.optim.SGD(other.parameters(), 0.1)
    )
    infinity.engine(infinity.wrap(model, config(tmp_path))).close()


if __name__ == "__main__":
    used = infinity.wrap(transformer(), config(Path(sys.argv[1])))
    with infinity.engine(used):
        print("open", flush=True)
        sys.stdin.readline()
