"""Checkpoints of an engine of `infinity.initialize`: tags, `latest`, and what comes back."""

from __future__ import annotations

import functools
import json
import os
import re
import runpy
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from torch import nn

import infinity
from infinity.deepspeed import consolidation, zero_to_fp32
from infinity.deepspeed.consolidation import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from infinity.deepspeed.tools import clone_tensors_for_torch_save
from support.deepspeed import batch, configuration, net

pytestmark = pytest.mark.usefixtures("one_thread")

Start = Callable[..., tuple[Any, Any, Any, Any]]
CONSOLIDATED = "_zero3_consolidated_16bit_state_dict"
"""As transformers and accelerate call it."""
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 20}}


def losses(engine: Any, steps: range) -> list[float]:
    found = []
    for number in steps:
        loss = engine(*batch(number))
        found.append(loss.item())
        engine.backward(loss)
        engine.step()
    return found


def test_a_run_goes_on_where_it_was_saved(start: Start, tmp_path: Path) -> None:
    """States on NVMe; a forward of a step is under way in neither run."""
    config = configuration(tmp_path / "nvme", scheduler=SCHEDULE, gradient_accumulation_steps=2)
    engine, *_ = start(model=net(), config=config)
    losses(engine, range(6))
    assert engine.save_checkpoint(tmp_path, client_state={"epoch": 3, "seen": [1, 2]})
    assert (tmp_path / "latest").read_text() == "global_step3"
    expected = losses(engine, range(6, 10))
    other, *_ = start(model=net(1), config=config)
    path, client_state = other.load_checkpoint(tmp_path)
    assert path == str(tmp_path / "global_step3")
    assert client_state == {"epoch": 3, "seen": [1, 2]}
    assert (other.global_steps, other.micro_steps, other.global_samples) == (3, 6, 12)
    assert losses(other, range(6, 10)) == expected
    assert other.get_lr() == engine.get_lr()


def test_tags(start: Start, tmp_path: Path) -> None:
    """One that is saved again is replaced; `latest` is left alone where that is asked for."""
    engine, *_ = start(model=net(), config=configuration())
    engine.save_checkpoint(str(tmp_path), tag="pytorch_model")
    losses(engine, range(1))
    engine.save_checkpoint(str(tmp_path), tag="pytorch_model")
    engine.save_checkpoint(tmp_path, tag=7, save_latest=False)
    assert (tmp_path / "latest").read_text() == "pytorch_model"
    other, *_ = start(model=net(1), config=configuration())
    for tag in (None, "pytorch_model", 7):
        path, state = other.load_checkpoint(tmp_path, tag=tag)
        assert path is not None and state == {}
        assert torch.equal(
            other.module_state_dict()["last.bias"], engine.module_state_dict()["last.bias"]
        )


def test_what_is_not_loaded_stays(start: Start, tmp_path: Path) -> None:
    """Weights alone; or all but the scheduler."""
    config = configuration(scheduler=SCHEDULE)
    engine, *_ = start(model=net(), config=config)
    losses(engine, range(3))
    engine.save_checkpoint(tmp_path)
    weights = engine.module_state_dict()
    for options, steps, rates in (
        ({"load_module_only": True}, 0, False),
        ({"load_optimizer_states": False}, 3, True),
        ({"load_lr_scheduler_states": False}, 3, False),
        ({"load_optimizer_states": False, "load_lr_scheduler_states": False}, 3, False),
    ):
        other, _, _, scheduler = start(model=net(1), config=config)
        other.load_checkpoint(tmp_path, **options)
        assert other.global_steps == steps
        assert (scheduler.last_epoch == 3) == rates
        assert all(
            torch.equal(value, weights[name]) for name, value in other.module_state_dict().items()
        )
        moment = infinity.get(other.module.last.bias, "exp_avg")
        assert moment is not None
        kept = options.get("load_optimizer_states", not options.get("load_module_only", False))
        assert bool(moment.any()) == kept
        other.destroy()


def test_a_client_optimizer_follows_a_load(start: Start, tmp_path: Path) -> None:
    config = configuration()
    del config["optimizer"]
    model = net()
    client = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(client, 0.5)
    engine, optimizer, *_ = start(
        model=model, optimizer=client, lr_scheduler=schedule, config=config
    )
    losses(engine, range(2))
    engine.save_checkpoint(tmp_path)
    losses(engine, range(2))
    engine.load_checkpoint(tmp_path)
    assert engine.get_lr() == schedule.get_last_lr() == [2.5e-3]
    assert client.param_groups is optimizer.param_groups


def test_there_is_nothing_to_load(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, *_ = start(model=net(), config=configuration())
    assert engine.load_checkpoint(tmp_path) == (None, None)
    assert "has no file latest, so nothing was loaded; give a tag" in caplog.text
    with pytest.raises(infinity.CheckpointError, match="there is no such directory"):
        engine.load_checkpoint(tmp_path, tag="missing")
    with pytest.raises(infinity.ConfigError, match="must be a name without directories"):
        engine.save_checkpoint(tmp_path, tag="a/b")
    with pytest.raises(infinity.CheckpointError, match="extra"):
        engine.save_checkpoint(tmp_path, client_state={"model": object()})
    for use, text in (
        (lambda: engine.save_checkpoint(tmp_path, client_state=5), "client_state is 5; give a di"),
        (lambda: engine.save_16bit_model(None), "the directory of a checkpoint is None; give a p"),
        (lambda: engine.load_module_state_dict({}), 'a dict with weights under "module"'),
    ):
        with pytest.raises(infinity.ConfigError, match=text):
            use()
    for nowhere in (None, ""):
        with pytest.raises(infinity.ConfigError, match="the directory of a checkpoint is"):
            engine.save_checkpoint(nowhere)
    assert not (tmp_path / "latest").exists()


def link(path: Path) -> None:
    path.symlink_to(path.parent / "precious")


def second_name(path: Path) -> None:
    os.link(path.parent / "precious", path)


def replacements(directory: Path, name: str) -> Iterator[Callable[[], None]]:
    """What somebody else may have put at a name, one after the other."""
    path, precious = directory / name, directory / "precious"
    for put in (link, second_name, os.mkfifo, Path.mkdir):
        precious.write_text("precious")
        yield functools.partial(put, path)
        assert precious.read_text() == "precious"
        path.rmdir() if path.is_dir() else path.unlink()
    precious.unlink()
    yield lambda: path.symlink_to(directory / "new")  # which is not there
    assert not (directory / "new").exists()
    path.unlink()


@pytest.mark.timeout(60)
def test_what_lies_at_the_name_of_latest_is_neither_followed_nor_waited_for(
    start: Start, tmp_path: Path
) -> None:
    engine, *_ = start(model=net(), config=configuration())
    for put in replacements(tmp_path, "latest"):
        put()
        with pytest.raises(infinity.CheckpointError, match=r"latest was not written: .* which in"):
            engine.save_checkpoint(tmp_path)
        with pytest.raises(infinity.CheckpointError, match=r"latest cannot be read: .* give a "):
            engine.load_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path, "global_step0")


@pytest.mark.timeout(60)
def test_what_lies_at_the_name_of_whole_weights_is_neither_followed_nor_waited_for(
    start: Start, tmp_path: Path
) -> None:
    config = configuration(bf16={"enabled": True})
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    engine, *_ = start(model=net(), config=config)
    for put in replacements(tmp_path, "weights.bin"):
        put()
        with pytest.raises(infinity.CheckpointError, match="which infinity never makes"):
            engine.save_16bit_model(tmp_path, "weights.bin")


@pytest.mark.parametrize(
    "content",
    [b"../out/t", b"/", b"good/../../out/t", b"\xff\xfe", b"", b"a\0b", b"x" * 5000, b"..", b"."],
)
def test_latest_names_a_checkpoint_beside_it(content: bytes, start: Start, tmp_path: Path) -> None:
    engine, *_ = start(model=net(), config=configuration())
    run = tmp_path / "run"
    engine.save_checkpoint(tmp_path / "out", "t")
    engine.save_checkpoint(run, "good")
    (run / "latest").write_bytes(content)
    for use in (
        lambda: engine.load_checkpoint(run),
        lambda: get_fp32_state_dict_from_zero_checkpoint(run),
    ):
        with pytest.raises(infinity.CheckpointError, match=r"is no name of a checkpoint in .* gi"):
            use()
    engine.load_checkpoint(run, "good")


@pytest.mark.parametrize("gather", [True, False])
def test_weights_for_others(start: Start, tmp_path: Path, gather: bool) -> None:
    config = configuration(bf16={"enabled": True})
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = gather
    model = net()
    model.first.requires_grad_(False)
    engine, *_ = start(model=model, config=config)
    assert engine.zero_gather_16bit_weights_on_model_save() is gather
    assert engine.save_16bit_model(tmp_path / "out") is gather
    path = tmp_path / "out" / "pytorch_model.bin"
    assert path.exists() is gather
    if not gather:
        with pytest.raises(ValueError, match="stage3_gather_16bit_weights_on_model_save"):
            getattr(engine, CONSOLIDATED)()
        trained = getattr(engine, CONSOLIDATED)(exclude_frozen_parameters=True)
        assert set(net().state_dict()) - set(trained) == {"first.weight", "first.bias"}
        return
    saved = torch.load(path)
    assert saved.keys() == net().state_dict().keys()
    assert all(
        torch.equal(value, net().bfloat16().state_dict()[name]) for name, value in saved.items()
    )
    trained = getattr(engine, CONSOLIDATED)(exclude_frozen_parameters=True)
    assert set(saved) - set(trained) == {"first.weight", "first.bias"}


def test_an_option_that_is_not_supported(start: Start, tmp_path: Path) -> None:
    engine, *_ = start(model=net(), config=configuration())
    with pytest.raises(infinity.ConfigError, match=re.escape("custom_load_fn is not supported")):
        engine.load_checkpoint(tmp_path, custom_load_fn=print)


def test_frozen_parameters_may_be_left_out(start: Start, tmp_path: Path) -> None:
    """A load keeps those that the model has."""
    engines = []
    for seed in (0, 1):
        model = net(seed)
        model.first.requires_grad_(False)
        engines.append(start(model=model, config=configuration())[0])
    first, second = engines
    losses(first, range(2))
    first.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    path, _ = second.load_checkpoint(tmp_path)
    assert path is not None
    weights = [engine.module_state_dict() for engine in (first, second)]
    assert torch.equal(weights[1]["first.weight"], net(1).first.weight)
    for name in ("second.weight", "last.bias"):
        assert torch.equal(weights[0][name], weights[1][name])


def test_a_load_that_is_not_strict(start: Start, tmp_path: Path) -> None:
    """A model with a new head keeps it."""
    saved = net()
    first, *_ = start(model=saved, config=configuration())
    losses(first, range(2))
    first.save_checkpoint(tmp_path)
    grown = net(1)
    grown.head = nn.Linear(3, 2)
    second, *_ = start(model=grown, config=configuration())
    with pytest.raises(infinity.CheckpointError, match=r"it has no head\.weight$"):
        second.load_checkpoint(tmp_path, load_optimizer_states=False)
    second.load_checkpoint(tmp_path, load_module_strict=False, load_optimizer_states=False)
    weights = [engine.module_state_dict() for engine in (first, second)]
    assert all(torch.equal(weights[1][name], value) for name, value in weights[0].items())
    assert weights[1].keys() - weights[0].keys() == {"head.weight", "head.bias"}


def test_what_a_load_that_is_not_strict_keeps_is_told(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was frozen, so the checkpoint was saved without it, and is trained here."""
    frozen = net()
    frozen.first.requires_grad_(False)
    first, *_ = start(model=frozen, config=configuration())
    first.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    second, *_ = start(model=net(1), config=configuration())
    with pytest.raises(infinity.CheckpointError, match=r"has no values of first\.weight, because"):
        second.load_checkpoint(tmp_path, load_optimizer_states=False)
    caplog.clear()
    second.load_checkpoint(tmp_path, load_module_strict=False, load_optimizer_states=False)
    (text,) = [r.getMessage() for r in caplog.records if r.name == "infinity"]
    assert "has no first.weight" in text and text.endswith("; the model keeps its own")
    assert torch.equal(second.module_state_dict()["first.weight"], net(1).first.weight)


def test_a_destroyed_engine_says_so(start: Start, tmp_path: Path) -> None:
    engine, *_ = start(model=net(), config=configuration())
    engine.destroy()
    for call in (lambda: engine.save_checkpoint(tmp_path), lambda: engine.zero_grad()):
        with pytest.raises(infinity.EngineClosedError, match="the engine was destroyed; give inf"):
            call()


def test_weights_are_loaded_from_a_state_dict(start: Start) -> None:
    engine, *_ = start(model=net(), config=configuration())
    engine.load_module_state_dict({"module": net(1).state_dict()})
    assert torch.equal(engine.module_state_dict()["last.bias"], net(1).last.bias)


def test_tied_weights_of_a_checkpoint_have_all_their_names(start: Start, tmp_path: Path) -> None:
    """So that a strict load finds each, as in what DeepSpeed's function gives."""
    model = net()
    model.register_module("other", model.last)
    engine, *_ = start(model=model, config=configuration())
    losses(engine, range(2))
    engine.save_checkpoint(tmp_path)
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path)
    for state in (
        get_fp32_state_dict_from_zero_checkpoint(tmp_path),
        torch.load(tmp_path / "pytorch_model.bin"),
    ):
        assert state["other.weight"].data_ptr() == state["last.weight"].data_ptr()
        loaded = net(1)
        loaded.register_module("other", nn.Linear(8, 4))
        loaded.load_state_dict(state)
        assert torch.equal(loaded.other.weight, infinity.get(model.last.weight, "master"))


@pytest.mark.parametrize("safe", [True, False])
def test_weights_of_a_checkpoint_come_back_in_fp32(
    start: Start, tmp_path: Path, safe: bool
) -> None:
    model = net()
    model.second.requires_grad_(False)
    engine, *_ = start(model=model, config=configuration(bf16={"enabled": True}))
    x, labels = batch(0)
    engine.backward(engine(x.bfloat16(), labels))
    engine.step()
    with pytest.raises(ValueError, match="has no file latest; give a tag"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    engine.save_checkpoint(tmp_path)
    state = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert set(state) == set(net().state_dict())
    assert {each.dtype for each in state.values()} == {torch.float32}
    weight = engine.module.first.weight
    assert torch.equal(state["first.weight"], infinity.get(weight, "master"))
    loaded = load_state_dict_from_zero_checkpoint(net(1), tmp_path, tag="global_step1")
    assert torch.equal(loaded.first.weight, state["first.weight"])
    trained = get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert "first.weight" in trained and "second.weight" not in trained
    out = tmp_path / "made" / "out"
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, out, "400B", safe_serialization=safe)
    assert len(list(out.iterdir())) > 2 if safe else (out / "pytorch_model.bin").is_file()
    if not safe:
        written = torch.load(out / "pytorch_model.bin")
        assert all(torch.equal(written[name], state[name]) for name in state)


class Tied(nn.Module):
    """A tied head, a buffer of whole numbers, and a frozen layer in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor([3, 4]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.embed(x)))


def script_of(directory: Path) -> dict[str, Any]:
    """The names of the copy of zero_to_fp32.py there, run without this package."""
    with mock.patch.dict(sys.modules, {"infinity": None}):
        return runpy.run_path(str(directory / "zero_to_fp32.py"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_script_of_a_checkpoint_gives_its_weights_with_torch_alone(
    start: Start, tmp_path: Path, precision: str
) -> None:
    torch.manual_seed(0)
    keys = {} if precision == "fp32" else {"bf16": {"enabled": True}}
    engine, *_ = start(model=Tied(), config=configuration(tmp_path / "nvme", **keys))
    engine.backward(engine(torch.arange(16)).float().square().mean())
    engine.step()
    engine.save_checkpoint(tmp_path, tag="last")
    script = script_of(tmp_path)
    for left_out in (False, True):
        expected = get_fp32_state_dict_from_zero_checkpoint(tmp_path, None, left_out)
        found = script["get_fp32_state_dict_from_zero_checkpoint"](tmp_path, None, left_out)
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert all(found[name].dtype == expected[name].dtype for name in expected)
        assert found["head.weight"] is found["embed.weight"]
        assert ("frozen.bias" in found) is not left_out
    whole = script["get_fp32_state_dict_from_zero_checkpoint"](tmp_path)
    plain = script["load_state_dict_from_zero_checkpoint"](Tied(), tmp_path, "last")
    assert torch.equal(plain.frozen.weight, whole["frozen.weight"])
    script["convert_zero_checkpoint_to_fp32_state_dict"](tmp_path, tmp_path / "parts", "300")
    index = json.loads((tmp_path / "parts" / "pytorch_model.bin.index.json").read_text())
    parts = {file: torch.load(tmp_path / "parts" / file) for file in index["weight_map"].values()}
    assert len(parts) > 1 and list(index["weight_map"]) == list(whole)
    for name, file in index["weight_map"].items():
        assert torch.equal(parts[file][name], whole[name])
    script["convert_zero_checkpoint_to_fp32_state_dict"](tmp_path, tmp_path / "safe", None, True)
    safe = safetensors.torch.load_file(tmp_path / "safe" / "model.safetensors")
    assert set(whole) - set(safe) == {"head.weight"}


def test_the_script_of_a_checkpoint_as_a_command(start: Start, tmp_path: Path) -> None:
    engine, *_ = start(model=net(), config=configuration())
    engine.save_checkpoint(tmp_path, tag="last")
    without = "import runpy, sys; sys.modules['infinity'] = None; sys.argv = sys.argv[1:]; "
    command = [sys.executable, "-c", f"{without}runpy.run_path(sys.argv[0], run_name='__main__')"]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, "zero_to_fp32.py", ".", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    assert os.access(tmp_path / "zero_to_fp32.py", os.X_OK)
    done = run("weights", "-t", "last")
    assert (done.returncode, done.stdout) == (0, "wrote weights/pytorch_model.bin\n"), done.stderr
    found = torch.load(tmp_path / "weights" / "pytorch_model.bin")
    expected = engine.module_state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    (data,) = (tmp_path / "last").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-1])
    done = run("more")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.fullmatch(
        r"zero_to_fp32.py: last/\S+ has \d+ bytes, not \d+: it is not whole\n", done.stderr
    )
    assert not (tmp_path / "more").exists()


def test_lightning_converts_a_checkpoint(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    utilities = pytest.importorskip("lightning.pytorch.utilities.deepspeed")
    engine, *_ = start(model=net(), config=configuration())
    losses(engine, range(1))
    client_state = {"epoch": 2, "hyper_parameters": {"width": 8}}
    engine.save_checkpoint(tmp_path, client_state=client_state)
    theirs = types.SimpleNamespace(
        **{
            name: getattr(consolidation, name)
            for name in ("get_model_state_file", "get_optim_files")
        },
        get_fp32_state_dict_from_zero_checkpoint=get_fp32_state_dict_from_zero_checkpoint,
    )
    monkeypatch.setitem(sys.modules, "deepspeed", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "deepspeed.utils", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "deepspeed.utils.zero_to_fp32", theirs)
    monkeypatch.setattr(utilities, "_DEEPSPEED_AVAILABLE", True)
    utilities.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "lightning.pt")
    found = torch.load(tmp_path / "lightning.pt")
    assert {name: found[name] for name in client_state} == client_state
    expected = engine.module_state_dict()
    assert all(torch.equal(found["state_dict"][name], expected[name]) for name in expected)
    (states,) = consolidation.get_optim_files(tmp_path / "global_step1")
    assert torch.load(states)["optimizer_state_dict"]["zero_stage"] == 3


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_files_that_deepspeed_wrote(start: Start, tmp_path: Path, stage: int) -> None:
    """Their names come as DeepSpeed 0.19.8 gives them; what they hold is refused in a sentence."""
    (tmp_path / "latest").write_text("step1")
    directory = tmp_path / "step1"
    directory.mkdir()
    ranks = [f"zero_pp_rank_{rank}_mp_rank_00" for rank in range(11)]
    optim = [str(directory / f"bf16_{rank}_optim_states.pt") for rank in ranks]
    names = ranks if stage == 3 else ["mp_rank_00"]
    states = [str(directory / f"{name}_model_states.pt") for name in names]
    for path in (*reversed(optim), *reversed(states)):
        torch.save({}, path)
    assert consolidation.get_optim_files(directory) == optim
    assert consolidation.get_model_state_files(directory) == states
    assert consolidation.get_model_state_file(directory, stage) == states[0]
    with pytest.raises(FileNotFoundError, match="can't find model states file at"):
        consolidation.get_model_state_file(directory, 0 if stage == 3 else 3)
    engine, *_ = start(model=net(), config=configuration())
    for read in (get_fp32_state_dict_from_zero_checkpoint, engine.load_checkpoint):
        with pytest.raises(infinity.CheckpointError, match="step1 is a checkpoint of DeepSpeed"):
            read(tmp_path)
    with pytest.raises(ValueError, match=r"is one of DeepSpeed, whose own zero_to_fp32\.py"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)


def test_copies_for_torch_save_keep_tied_weights_tied() -> None:
    """So that they are saved once, as accelerate does at stages 1 and 2."""
    model = Tied()
    copies = clone_tensors_for_torch_save({"state": model.state_dict(), "number": 1})
    state = copies["state"]
    assert state["head.weight"] is state["embed.weight"] is not model.embed.weight
    part = clone_tensors_for_torch_save([model.frozen.weight, model.frozen.weight[:1]])
    assert [each.untyped_storage().nbytes() for each in part] == [256, 32]
