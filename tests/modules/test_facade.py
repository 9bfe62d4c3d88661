"""Methods of `nn.Module` that would touch all data of a wrapped model do what they do to a plain
one."""

from __future__ import annotations

import copy
import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.directories import mapped
from support.configs import config_of
from support.models import FAMILIES, Transformer, text_batch, transformer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def wrapped(tmp_path: Path) -> Iterator[Any]:
    config = config_of(
        nvme=tmp_path, gpu_memory=1 << 20, cpu_memory=1 << 26, precision="fp32", poison=True
    )
    model = infinity.wrap(transformer(), config)
    with infinity.engine(model):
        yield model


def goes_on(model: nn.Module) -> bool:
    """Whether `model`, which nobody has trained, computes what a plain one computes."""
    plain = transformer()
    return torch.equal(model(**text_batch(0)).loss, plain(**text_batch(0)).loss)


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to("cpu"),
        lambda model: model.to(torch.float32),
        lambda model: model.to(torch.device("cpu"), torch.float32, non_blocking=True),
        lambda model: model.to(torch.zeros(1)),
        lambda model: model.cpu(),
        lambda model: model.float(),
        lambda model: model.type(torch.float32),
        lambda model: model.blocks[0].to("cpu"),
        lambda model: nn.Sequential(model).cpu()[0],
    ],
)
def test_a_move_that_changes_nothing(
    move: Callable[[nn.Module], nn.Module], wrapped: Transformer
) -> None:
    before = dict(wrapped.named_parameters())
    assert move(wrapped) in list(wrapped.modules())
    after = dict(wrapped.named_parameters())
    assert list(before) == list(after)
    assert all(after[name] is parameter for name, parameter in before.items())
    assert goes_on(wrapped)


def test_a_move_that_is_refused_changes_no_buffer(wrapped: Transformer) -> None:
    """Torch converts the buffers of a module before the parameters of the next."""
    wrapped.blocks.register_buffer("first", torch.ones(2))
    nn.Module.register_buffer(wrapped.blocks[0].attention, "other", torch.ones(2))
    with pytest.raises(infinity.ShardedParameterError, match="the engine moves the model"):
        wrapped.to(torch.bfloat16)
    assert all(buffer.dtype == torch.float32 for buffer in wrapped.buffers())


def test_a_move_converts_what_is_not_the_engines(wrapped: Transformer) -> None:
    """As torch does: a buffer of another dtype, and a module that was added later."""
    wrapped.scale = wrapped.scale.double()
    wrapped.added = nn.Linear(2, 2).double()
    wrapped.float()
    assert wrapped.scale.dtype == wrapped.added.weight.dtype == torch.float32
    del wrapped.added
    assert goes_on(wrapped)


def test_a_parameter_of_the_class_of_a_parameter(wrapped: Transformer) -> None:
    """Libraries make parameters that way. It is a plain one."""
    for context in (nullcontext(), infinity.gathered(wrapped)):
        with context:
            made = type(wrapped.norm.weight)(torch.ones(3), requires_grad=False)
        assert type(made) is nn.Parameter
        assert torch.equal(made * 2, torch.full((3,), 2.0))
    with infinity.gathered(wrapped), pytest.raises(infinity.ShardedParameterError, match="a copy"):
        nn.Parameter(wrapped.norm.weight)


def test_a_module_may_convert_its_own_things() -> None:
    """A metric of torchmetrics has other arguments than `recurse`, and knows them by position."""

    class Metric(nn.Module):
        given: tuple[Any, ...] = ()

        def _apply(self, fn: Any, exclude_state: Any = "") -> nn.Module:  # type: ignore[override]
            self.given += ("total" in exclude_state,)
            return self

        def converted(self) -> None:
            self._apply(lambda tensor: tensor, exclude_state=["total"])

    plain = transformer()
    plain.metric = Metric()
    config = config_of(gpu_memory=1 << 20, cpu_memory=1 << 26, precision="fp32")
    model = infinity.wrap(plain, config)
    with infinity.engine(model):
        model.cpu()
        model.metric.float()
        model.metric.converted()
        assert model.metric.given == (False, False, True)


def test_code_of_no_module_touches_a_wrapped_model(wrapped: Transformer) -> None:
    """Code of `exec`, and the forward of a `torch.fx` graph, have globals without a name."""
    found: dict[str, Any] = {}
    exec("def detached(p): return p.detach()\ndef pickled(m): return m.__reduce_ex__(2)", found)
    found.pop("__name__", None)
    with infinity.gathered(wrapped):
        for parameter in wrapped.parameters():
            assert torch.equal(found["detached"](parameter), parameter)
    with pytest.raises(infinity.ShardedParameterError, match="pickled"):
        found["pickled"](wrapped)


def test_a_closed_engine_leaves_nothing_on_the_modules(tmp_path: Path) -> None:
    plain = transformer()
    before = {name: set(vars(module)) for name, module in plain.named_modules()}
    model = infinity.wrap(plain, config_of(nvme=tmp_path, gpu_memory=1 << 20, cpu_memory=1 << 26))
    infinity.engine(model).close()
    assert before == {name: set(vars(module)) for name, module in model.named_modules()}


# State dicts


def same_weights(model: nn.Module, plain: nn.Module) -> bool:
    found, expected = model.state_dict(), plain.state_dict()
    return list(found) == list(expected) and all(
        torch.equal(found[name], value) for name, value in expected.items()
    )


def test_a_state_dict_is_that_of_the_plain_model(wrapped: Transformer, tmp_path: Path) -> None:
    plain = transformer()
    state = wrapped.state_dict()
    assert vars(state) == vars(plain.state_dict())  # versions of modules
    assert all(type(value) is torch.Tensor for value in state.values())
    assert state["head.weight"].data_ptr() == state["tokens.weight"].data_ptr()
    assert same_weights(wrapped, plain)
    assert same_weights(wrapped.blocks[1], plain.blocks[1])
    assert same_weights(nn.ModuleDict({"inner": wrapped}), nn.ModuleDict({"inner": plain}))
    assert list(wrapped.norm.state_dict(prefix="a.")) == ["a.weight", "a.bias"]
    assert wrapped.state_dict(keep_vars=True)["head.weight"] is wrapped.tokens.weight
    torch.save(state, tmp_path / "state.pt")
    infinity.engine(wrapped).close()
    assert torch.equal(state["norm.weight"], plain.norm.weight)  # it outlives the engine
    fresh = transformer(seed=1)
    fresh.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert same_weights(fresh, plain)


def test_what_a_module_in_several_places_has_is_saved_under_all_its_names(tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(4)
        return nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm)

    model = infinity.wrap(build(), config_of(nvme=tmp_path, gpu_memory=1 << 20, cpu_memory=1 << 24))
    with infinity.engine(model) as engine:
        assert engine.state_dict().keys() == model.state_dict().keys()
        assert same_weights(model, build())
        build().load_state_dict(engine.state_dict())


def file_of(tensor: torch.Tensor) -> str:
    """The file that the memory of `tensor` is mapped from."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(number, 16) for number in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return line.split(maxsplit=5)[5] if len(line.split()) > 5 else ""
    return ""


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def all_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors, too."""
    monkeypatch.setattr(mapped, "LEAST_BYTES", 0)


@pytest.mark.usefixtures("all_in_files")
@pytest.mark.parametrize("nvme", [True, False])
def test_a_state_dict_lies_in_unnamed_files(nvme: bool, tmp_path: Path) -> None:
    """On the drive, or without one where `tempfile` puts files. They keep no descriptor open."""
    home = {"nvme": tmp_path} if nvme else {"parameters": "cpu", "optimizer": "cpu"}
    model = infinity.wrap(transformer(), config_of(**home, gpu_memory=1 << 20, cpu_memory=1 << 26))
    files, opened = sorted(tmp_path.rglob("*")), descriptors()
    folder = str(tmp_path) if nvme else tempfile.gettempdir()
    for state in (model.state_dict(), infinity.engine(model).state_dict()):
        for name, parameter in model.named_parameters():
            found = file_of(state[name])
            assert found.startswith(folder) and found.endswith("(deleted)"), name
            assert state[name].shape == parameter.shape
    assert sorted(tmp_path.rglob("*")) == files
    assert descriptors() == opened
    infinity.engine(model).close()


def test_small_tensors_take_no_file(tmp_path: Path) -> None:
    """LEAST_BYTES is 64 KiB: 128 rows of 128 numbers."""
    model = infinity.wrap(
        nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 127)),
        config_of(nvme=tmp_path, gpu_memory=1 << 20, cpu_memory=1 << 26),
    )
    found = {name: file_of(value) for name, value in model.state_dict().items()}
    assert found.pop("0.weight").startswith(str(tmp_path))
    assert not any(file.startswith(str(tmp_path)) for file in found.values())
    infinity.engine(model).close()


@pytest.mark.usefixtures("all_in_files")
def test_states_of_an_optimizer_lie_there_too(wrapped: Transformer, tmp_path: Path) -> None:
    optimizer = infinity.AdamW(wrapped.parameters())
    wrapped(**text_batch(0)).loss.backward()
    optimizer.step()
    state = optimizer.state_dict()["state"]
    assert len(state) == len(list(wrapped.parameters()))
    for number, parameter in enumerate(wrapped.parameters()):
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[number][name].shape == parameter.shape
            assert file_of(state[number][name]).startswith(str(tmp_path))


@pytest.mark.usefixtures("all_in_files")
def test_a_full_drive_is_named(wrapped: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __init__(self, **_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", Full)
    said = r"^/.* takes no file of .* \(No space left on device\); free some of its space$"
    with pytest.raises(infinity.InfinityError, match=said):
        wrapped.state_dict()
    monkeypatch.undo()
    assert goes_on(wrapped)


def values(seed: int) -> dict[str, torch.Tensor]:
    return transformer(seed=seed).state_dict()


LOADS: dict[str, Callable[[Any], object]] = {
    "all": lambda model: model.load_state_dict(values(1)),
    "assign": lambda model: model.load_state_dict(values(2), assign=True),
    "a part": lambda model: model.blocks[0].load_state_dict(
        transformer(seed=3).blocks[0].state_dict()
    ),
    "some": lambda model: model.load_state_dict({"norm.weight": torch.ones(32)}, strict=False),
    "inside": lambda model: nn.ModuleDict({"inner": model}).load_state_dict(
        {f"inner.{name}": value for name, value in values(4).items()}
    ),
    "its own": lambda model: model.load_state_dict(
        {name: value * 2 for name, value in model.state_dict().items()}
    ),
}


def test_loading_a_state_dict(wrapped: Transformer) -> None:
    plain = transformer()
    parameters = dict(wrapped.named_parameters(remove_duplicate=False))
    for name, load in LOADS.items():
        assert str(load(wrapped)) == str(load(plain)), name
        assert same_weights(wrapped, plain), name
    for name, parameter in wrapped.named_parameters(remove_duplicate=False):
        assert parameter is parameters[name]
    assert torch.equal(wrapped(**text_batch(0)).loss, plain(**text_batch(0)).loss)


def test_a_state_dict_that_does_not_fit_is_loaded_as_far_as_it_does(wrapped: Transformer) -> None:
    """As by torch, which then raises."""
    plain = transformer()
    state = {"norm.weight": torch.ones(32), "norm.bias": torch.ones(3), "other": torch.ones(1)}
    texts = []
    for model in (plain, wrapped):
        with pytest.raises(RuntimeError, match=r"size mismatch for norm\.bias") as caught:
            model.load_state_dict(state)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert same_weights(wrapped, plain)


def test_a_family_of_transformers_is_saved_and_loaded(tmp_path: Path) -> None:
    plain, model = FAMILIES["llama"].build(), FAMILIES["llama"].build()
    (tmp_path / "drive").mkdir()
    infinity.wrap(
        model,
        config_of(
            nvme=tmp_path / "drive", gpu_memory=1 << 20, cpu_memory=1 << 26, precision="fp32"
        ),
    )
    model.save_pretrained(tmp_path / "saved", max_shard_size="30KB")
    again = type(plain).from_pretrained(tmp_path / "saved")
    assert same_weights(again, plain)
    infinity.engine(model).close()


LOAD = "_load_from_state_dict"
"""The method of a module that loads its own parameters."""


def _assigned(self: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    self.weight.data = state[prefix + "weight"]
    self.bias = nn.Parameter(state[prefix + "bias"])


def _copied(self: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    self.weight.data.copy_(state[prefix + "weight"])
    self.bias.data.copy_(self.weight.detach()[:, 0])


def _merged(self: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    weight = self.weight.data.clone()
    weight[:4] = state[prefix + "weight"][:4]
    state = state | {prefix + "weight": weight, prefix + "bias": self.bias}
    getattr(nn.Linear, LOAD)(self, state, prefix, *rest)


def _rescaled(self: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    getattr(nn.Linear, LOAD)(self, state, prefix, *rest)
    with torch.no_grad():
        self.weight.mul_(2)
        self.bias[:4].fill_(1)


@pytest.mark.parametrize("load", [_assigned, _copied, _merged, _rescaled])
@pytest.mark.parametrize("swaps", [False, True])
def test_a_module_with_a_loader_of_its_own(load: Any, swaps: bool, tmp_path: Path) -> None:
    """It writes and reads its parameters as in plain PyTorch."""
    kind = type("Own", (nn.Linear,), {LOAD: load})
    plain = nn.Sequential(kind(8, 8), nn.Linear(8, 4))
    model = copy.deepcopy(plain)
    infinity.wrap(model, config_of(nvme=tmp_path, gpu_memory=1 << 20, cpu_memory=1 << 26))
    state = {name: torch.randn_like(value) for name, value in plain.state_dict().items()}
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        for each in (plain, model):
            each.load_state_dict({name: value.clone() for name, value in state.items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert same_weights(model, plain)
    infinity.engine(model).close()


def test_a_loader_that_writes_a_part_is_refused(tmp_path: Path) -> None:
    def load(self: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        with torch.no_grad():
            self.weight[:4] = state[prefix + "weight"][:4]

    kind = type("Own", (nn.Linear,), {LOAD: load})
    model = nn.Sequential(kind(8, 8))
    state = {name: value * 2 for name, value in model.state_dict().items()}
    infinity.wrap(model, config_of(nvme=tmp_path, gpu_memory=1 << 20, cpu_memory=1 << 26))
    with pytest.raises(infinity.ShardedParameterError, match=r"0\.weight .*gathered\(.*write=True"):
        model.load_state_dict(state)
    with infinity.gathered(model, write=True):
        model.load_state_dict(state)
    assert torch.equal(model[0].weight.detach()[:4], state["0.weight"][:4])
    infinity.engine(model).close()
