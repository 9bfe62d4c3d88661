"""`Config(inference=True)`: `model.generate` of transformers gives the tokens of the plain model,
each token reads what does not stay on the compute device and nothing else, nothing is written, and
nothing trains."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import infinity
from infinity.placement.spec import Kind
from infinity.schedule.planner import Traffic
from support.adapted import written_by_the_kernel
from support.configs import config_of
from support.discrete import DiscreteDevice
from support.generating import (
    CASES,
    LAYERS,
    TOKENS,
    Generated,
    generated,
    llama,
    loaded,
    mixtral,
    t5,
)
from support.probe import Probe
from support.rank_group import OnRanks

Smallest = Callable[..., dict[str, int]]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of six blocks in files."""
    path = tmp_path_factory.mktemp("llama")
    llama().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def plain() -> Iterator[Any]:
    yield llama()


def config(**options: Any) -> infinity.Config:
    """For inference, reading weights from the user's files; nothing is cached."""
    least = {"gpu_memory": "800KiB", "cpu_memory": "1MiB", "cache": 0}
    return config_of(**{"inference": True, "parameters": "nvme", **least, **options})


PLACES: dict[str, dict[str, Any]] = {
    "files": {},
    "files, cached in part": {"cache": 256 << 10},
    "copied to nvme": {"read_in_place": False, "nvme": "nvme", "cpu_memory": "2MiB"},
    "host": {"parameters": "cpu", "cpu_memory": "8MiB"},
    "device": {"parameters": "gpu", "gpu_memory": "8MiB"},
    "poisoned": {"poison": True},
}


@pytest.fixture(params=PLACES)
def placed(request: pytest.FixtureRequest, saved: Path, tmp_path: Path) -> Iterator[Any]:
    options = dict(PLACES[request.param])
    if "nvme" in options:
        options["nvme"] = tmp_path
    model = infinity.wrap(loaded(type(llama()), saved), config(**options))
    with infinity.engine(model):
        yield model


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows", [1, 8])
def test_the_tokens_are_those_of_plain_transformers(
    placed: Any, plain: Any, rows: int, case: str
) -> None:
    """By the bits of the logits; rows of different lengths are padded on the left."""
    generated(placed, rows, **CASES[case]).assert_equals(generated(plain, rows, **CASES[case]))


@pytest.mark.parametrize("parameters", ["nvme", "cpu"])
def test_a_device_with_memory_of_its_own(
    parameters: str, saved: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["infinity.build"], "ComputeDevice", DiscreteDevice)
    options = {"device": "cpu", "gpu_direct": "off", "poison": True, "cpu_memory": "8MiB"}
    model = infinity.wrap(loaded(type(plain), saved), config(parameters=parameters, **options))
    with infinity.engine(model) as engine:
        assert engine.report().gpu_resident > 0
        generated(model, 3).assert_equals(generated(plain, 3))


def test_an_engine_that_trains_generates_too(saved: Path, plain: Any, tmp_path: Path) -> None:
    model = loaded(type(plain), saved)
    infinity.wrap(model, config(inference=False, nvme=tmp_path, cpu_memory="8MiB"))
    with infinity.engine(model):
        generated(model, 3).assert_equals(generated(plain, 3))


# What a token reads


class Reads:
    """Bytes that each forward of `generate` reads; a stopping criterion that never stops."""

    def __init__(self, engine: infinity.Engine) -> None:
        self._engine = engine
        self.totals: list[int] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        self.totals.append(self._engine.recorder.counters().get("nvme bytes read", 0))
        return torch.zeros(len(ids), dtype=torch.bool)

    @property
    def of_each(self) -> list[int]:
        """Of each token after the first."""
        return [after - before for before, after in itertools.pairwise(self.totals)]


def kept_bytes(engine: infinity.Engine) -> int:
    """Of the units that never leave the compute device."""
    return sum(u.facts.nbytes for u in engine.units if u.blocks[Kind.PARAM].permanent)


@pytest.fixture(scope="module")
def sizes(saved: Path) -> list[int]:
    """Bytes of the units."""
    model = infinity.wrap(loaded(type(llama()), saved), config(gpu_memory="8MiB"))
    with infinity.engine(model) as engine:
        return [unit.facts.nbytes for unit in engine.units]


@pytest.mark.parametrize("more", range(LAYERS + 2))
def test_a_token_reads_what_does_not_stay(
    more: int, saved: Path, plain: Any, sizes: list[int], smallest: Smallest
) -> None:
    """For as many sequences as there are. Beside the two units that come and go, all of the room is
    of use: `more` blocks stay. A small unit among those that come and go may find a place, too."""
    model, block, rows = loaded(type(plain), saved), max(sizes), 1 + more % 3
    least = smallest(model, inference=True, parameters="nvme")["gpu_memory"]
    infinity.wrap(model, config(gpu_memory=least + more * block))
    with infinity.engine(model) as engine:
        stay = kept_bytes(engine)
        reads = Reads(engine)
        generated(model, rows, stopping_criteria=[reads]).assert_equals(generated(plain, rows))
        assert engine.report().gpu_resident == stay
    assert more * block <= stay <= sum(sizes)
    assert len(reads.of_each) == TOKENS - 1
    assert max(reads.of_each) <= sum(sizes) - stay


UNITS = 9


@pytest.mark.parametrize("room", range(2, UNITS + 1))
def test_of_n_equal_units_with_room_for_k_all_but_k_less_2_are_read(
    room: int, tmp_path: Path
) -> None:
    """One is in use, and the next one comes. The planner states the same bytes."""

    class Layers(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([layer(x) for layer in self])

    torch.manual_seed(0)
    expected = Layers(*(nn.Linear(64, 63) for _ in range(UNITS)))
    save_file(expected.state_dict(), tmp_path / "model.safetensors")
    with infinity.init():
        model = Layers(*(nn.Linear(64, 63) for _ in range(UNITS)))
    unit = 4 * 64 * 64  # the bias has the last row
    settings = config(gpu_memory=room * unit)
    infinity.wrap(model, settings, weights=tmp_path, units=[nn.Linear])
    with infinity.engine(model) as engine, torch.no_grad():
        assert [each.facts.nbytes for each in engine.units] == [unit] * UNITS
        totals = []
        for _ in range(4):
            assert torch.equal(model(torch.ones(1, 64)), expected(torch.ones(1, 64)))
            totals.append(engine.recorder.counters().get("nvme bytes read", 0))
        of_each = [after - before for before, after in itertools.pairwise(totals)]
        stay = UNITS if room == UNITS else room - 2
        assert of_each == [(UNITS - stay) * unit] * 3
        assert engine.plan() == Traffic((UNITS - stay) * unit, 0, 0)


def test_a_part_that_is_cached_in_host_memory_is_not_read(
    saved: Path, plain: Any, sizes: list[int]
) -> None:
    model = infinity.wrap(
        loaded(type(plain), saved), config(gpu_cache=0, cache=100_000, cpu_memory="2MiB")
    )
    with infinity.engine(model) as engine:
        cached, on_nvme = engine.report().cached, engine.report().on_nvme
        assert on_nvme == sum(sizes)
        assert 0 < cached <= 100_000
        reads = Reads(engine)
        generated(model, stopping_criteria=[reads])
        assert set(reads.of_each) == {engine.plan().fetched}
    assert on_nvme - cached - max(sizes) < reads.of_each[0] <= on_nvme - cached


def test_the_first_units_of_the_next_token_come_while_the_last_ones_are_used(
    saved: Path, plain: Any
) -> None:
    """From the first forward on, which has the order of the modules predicted."""
    model = infinity.wrap(loaded(type(plain), saved), config(gpu_cache=0))
    with infinity.engine(model) as engine, torch.no_grad():
        resident, at_head = Probe(engine).store.resident, []
        first = engine.units[0].blocks[Kind.PARAM]
        second = engine.units[1].blocks[Kind.PARAM]
        model.model.layers[0].register_forward_pre_hook(
            lambda *_: ahead.append(resident.has_copy(second))
        )
        ahead: list[bool] = []
        model.lm_head.register_forward_pre_hook(lambda *_: at_head.append(resident.has_copy(first)))
        for _ in range(3):
            model(torch.tensor([[1, 2]]))
    assert at_head == [True] * 3
    assert ahead == [True] * 3


def test_nothing_is_written_and_no_directory_is_needed(saved: Path, plain: Any) -> None:
    """By the count of the kernel, from before `wrap` on."""
    model, before = loaded(type(plain), saved), written_by_the_kernel()
    bits = {file: file.read_bytes() for file in saved.iterdir()}
    with infinity.engine(infinity.wrap(model, config())) as engine:
        generated(model)
        assert engine.ios == ()
        assert engine.memory()["nvme"] == 0
        assert engine.recorder.counters().get("nvme bytes written", 0) == 0
        assert engine.report().in_files > 0
    assert written_by_the_kernel() == before
    assert {file: file.read_bytes() for file in saved.iterdir()} == bits


def test_a_directory_gets_no_bytes(saved: Path, plain: Any, tmp_path: Path) -> None:
    model = infinity.wrap(loaded(type(plain), saved), config(nvme=tmp_path))
    with infinity.engine(model) as engine:
        generated(model)
        assert [io.counters()["bytes_written"] for io in engine.ios] == [0]


# What there is of states


def test_there_are_parameters_only(saved: Path, plain: Any) -> None:
    """No gradient, master or moment, whatever is set for them, and no room for any; also where
    parameters take gradients."""
    options = {"optimizer": "cpu", "gradients": "gpu", "moment_precision": "fp32"}
    model = infinity.wrap(loaded(type(plain), saved), config(gpu_memory="8MiB", **options))
    with infinity.engine(model) as engine:
        assert {kind for unit in engine.units for kind in unit.blocks} == {Kind.PARAM}
        everything = sum(unit.facts.nbytes for unit in engine.units)
        assert engine.memory() == {"gpu": everything, "cpu": 0, "nvme": 0}
        assert Probe(engine).store.layout.reserve == 0
        assert all(parameter.grad is None for parameter in engine.model.parameters())


def test_what_is_set_for_training_has_no_effect(saved: Path, plain: Any) -> None:
    """A configuration of a training run works."""
    model = loaded(type(plain), saved)
    options = {
        "update": "delayed",
        "activations": "nvme",
        "gradients": "nvme",
        "algorithm": "other",
        "gradient_precision": "fp32",
    }
    with infinity.engine(infinity.wrap(model, config(cache=64 << 10, **options))) as engine:
        assert engine.report().cached > 0
        assert Probe(engine).activations is None
        generated(model).assert_equals(generated(plain))


def test_parameters_take_gradients_as_they_did(saved: Path, plain: Any) -> None:
    """While the model is wrapped, too: the order of a product of torch depends on that."""
    model = loaded(type(plain), saved)
    model.lm_head.requires_grad_(False)
    took = {name: p.requires_grad for name, p in model.named_parameters()}
    infinity.wrap(model, config())
    assert {name: p.requires_grad for name, p in model.named_parameters()} == took
    infinity.engine(model).close()
    assert {name: p.requires_grad for name, p in model.named_parameters()} == took


def test_a_failed_wrap_leaves_gradients_as_they_were() -> None:
    model = llama()
    with pytest.raises(infinity.BudgetError):
        infinity.wrap(model, config(parameters="cpu", cpu_memory=4096))
    assert all(parameter.requires_grad for parameter in model.parameters())


# Refusals

WAY_OUT = r"wrapped with Config\(inference=True\), which only runs it; wrap it without that"


@pytest.fixture
def model(saved: Path) -> Iterator[Any]:
    found = infinity.wrap(loaded(type(llama()), saved), config())
    with infinity.engine(found):
        yield found


def backward(model: Any) -> None:
    ids = torch.tensor([[1, 2, 3]])
    model(input_ids=ids, labels=ids).loss.backward()


def backward_to_the_input(model: Any) -> None:
    embedded = torch.randn(1, 3, model.config.hidden_size, requires_grad=True)
    model(inputs_embeds=embedded).logits.sum().backward()


def optimizer(model: Any) -> None:
    infinity.AdamW(model.parameters())


def adapted(model: Any) -> None:
    infinity.adapt(torch.optim.RMSprop, model.parameters())


def backward_through_one_layer(model: Any) -> None:
    """Which needs no parameter."""
    model.lm_head(torch.ones(1, model.config.hidden_size)).sum().backward()


def accumulate(model: Any) -> None:
    ids = torch.tensor([[1, 2, 3]])
    infinity.accumulate(model, [{"input_ids": ids, "labels": ids}])


@pytest.mark.parametrize(
    "trains",
    [backward, backward_to_the_input, optimizer, adapted, backward_through_one_layer, accumulate],
)
def test_what_trains_is_refused(model: Any, plain: Any, trains: Callable[[Any], None]) -> None:
    """With the way out, and the model runs on."""
    with pytest.raises(infinity.ConfigError, match=WAY_OUT):
        trains(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    generated(model).assert_equals(generated(plain))


def test_a_forward_in_grad_mode_has_the_outputs_of_the_plain_one(model: Any, plain: Any) -> None:
    ids = torch.tensor([[1, 2, 3]])
    found, expected = model(input_ids=ids, labels=ids), plain(input_ids=ids, labels=ids)
    assert type(found) is type(expected)
    assert torch.equal(found.logits, expected.logits)
    assert found.loss == expected.loss
    assert found.past_key_values.get_seq_length() == 3


def test_durable_steps_are_refused() -> None:
    with pytest.raises(infinity.ConfigError, match="inference=True makes none; leave one of them"):
        infinity.Config(nvme="/x", inference=True, durability="step")


def test_a_directory_is_needed_for_what_has_to_be_stored() -> None:
    """Of a model in memory there are no files; `parameters="cpu"` needs no directory."""
    model = llama()
    with pytest.raises(
        infinity.ConfigError,
        match=r"model\..* lies in no safetensors file as it is used, and has to be stored: set",
    ):
        infinity.wrap(model, config())
    infinity.wrap(model, infinity.Config(inference=True, parameters="cpu"))
    with infinity.engine(model):
        generated(model).assert_equals(generated(llama()))


# Other models


@pytest.mark.parametrize("build", [mixtral, t5])
@pytest.mark.parametrize("rows", [1, 4])
def test_experts_and_encoders(build: Callable[[], Any], rows: int, tmp_path: Path) -> None:
    """The experts of Mixtral are made from several tensors each, so they are stored."""
    expected = build()
    expected.save_pretrained(tmp_path)
    model = infinity.wrap(loaded(type(expected), tmp_path), config(nvme=tmp_path))
    with infinity.engine(model):
        for case in CASES.values():
            generated(model, rows, **case).assert_equals(generated(expected, rows, **case))


@pytest.mark.filterwarnings("ignore")  # of PEFT
def test_adapters_of_peft(saved: Path, plain: Any, sizes: list[int], tmp_path: Path) -> None:
    """They are small, and stored; a token reads both. The forward of the whole is never called."""
    peft = pytest.importorskip("peft")

    def with_adapters(base: Any) -> Any:
        torch.manual_seed(1)
        lora = peft.LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False)
        return peft.get_peft_model(base, lora).eval()

    with infinity.init():
        model = with_adapters(loaded(type(plain), saved))
    took = {name for name, p in model.named_parameters() if p.requires_grad}
    with infinity.engine(infinity.wrap(model, config(nvme=tmp_path, gpu_cache=0))) as engine:
        reads = Reads(engine)
        found = generated(model, 2, stopping_criteria=[reads])
        assert engine.report().in_files >= sum(sizes)
        everything = sum(unit.facts.nbytes for unit in engine.units)
        small = sum(unit.facts.nbytes for unit in engine.units if unit.facts.nbytes < max(sizes))
        assert all(everything - small <= read <= everything for read in reads.of_each[2:])
    assert {name for name, p in model.named_parameters() if p.requires_grad} == took
    found.assert_equals(generated(with_adapters(llama()), 2))


# Two ranks


def work(task: Any, where: Path, rank: int) -> None:
    """One rank of two: see `support/rank_group`."""
    model: Any = infinity.wrap(loaded(type(llama()), where / "saved"), config(gpu_cache=0))
    with infinity.engine(model) as engine:
        reads = Reads(engine)
        found = generated(model, 2, stopping_criteria=[reads])
        block, half = (f(u.facts.nbytes for u in engine.units) // 2 for f in (max, sum))
        assert set(reads.of_each) == {engine.plan().fetched}
        assert half - block < reads.of_each[0] <= half
    torch.save(tuple(found), where / f"found{rank}.pt")


def test_each_rank_reads_its_part(on_ranks: OnRanks, plain: Any, tmp_path: Path) -> None:
    """All have the tokens of one rank."""
    plain.save_pretrained(tmp_path / "saved")
    assert on_ranks("generate") == ["done", "done"]
    for rank in range(2):
        found = Generated(*torch.load(tmp_path / f"found{rank}.pt"))
        found.assert_equals(generated(plain, 2))


# The cache of keys and values


class Stream:
    """A stream of a device that does everything at once."""

    def wait_stream(self, other: Any) -> None:
        """Everything has been done."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_the_offloaded_cache_of_transformers(
    model: Any, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of the cache wait in host memory. It asks for streams of CUDA, which are played."""
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
    found = generated(model, 3, cache_implementation="offloaded")
    monkeypatch.undo()
    found.assert_equals(generated(plain, 3))
