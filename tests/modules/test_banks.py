"""Banks of experts in tiles: models of transformers compute as with whole banks, to the bit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.nn import functional

import infinity
from infinity.modules import division
from infinity.sharding.tiles import named_wholes
from infinity.tiles.banks import BankView, TiledBank
from support.configs import config_of
from support.experts import mixture, tokens_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

ONE = "13KiB"  # holds one expert of the larger banks, and two of the smaller ones
KINDS = [
    ("mixtral", "eager"),
    ("mixtral", "grouped_mm"),
    ("gpt_oss", "eager"),
    ("gpt_oss", "grouped_mm"),
    ("llama4", None),
]
Make = Callable[..., infinity.Config]


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Make]:
    number = 0

    def make(gpu_memory: int = 1 << 20, **options: Any) -> infinity.Config:
        nonlocal number
        number += 1
        (tmp_path / str(number)).mkdir()
        given = {"nvme": [tmp_path / str(number)], "cpu_memory": 1 << 24, "poison": True}
        return config_of(**given, gpu_memory=gpu_memory, precision="fp32", **options)

    return make


def trained(model: Any, config: infinity.Config, steps: int = 3) -> dict[str, torch.Tensor]:
    infinity.wrap(model, config)
    with infinity.engine(model) as engine:
        optimizer = infinity.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses = []
        for step in range(steps):
            loss = model(input_ids=tokens_of(step), labels=tokens_of(step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return {"losses": torch.stack(losses), **engine.state_dict()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def banks_of(model: nn.Module) -> dict[str, TiledBank]:
    return {name: bank for name, bank in named_wholes(model) if isinstance(bank, TiledBank)}


@pytest.mark.parametrize(("kind", "way"), KINDS)
def test_training_has_the_bits_of_whole_banks(kind: str, way: str | None, config: Make) -> None:
    """Also that of experts without tokens, which have a gradient of zeros and decay."""
    expected = trained(mixture(kind, way), config())
    model = infinity.tile(mixture(kind, way), ONE)
    assert len(banks_of(model)) == 4
    assert all(len(bank.tiles) > 1 for bank in banks_of(model).values())
    assert_same(trained(model, config()), expected)


def test_wrap_cuts_banks_that_do_not_fit(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a device that does not hold the banks of a layer."""
    monkeypatch.setattr(division, "LEAST_SPLIT", 8 << 10)
    expected = trained(mixture(), config(1 << 22))
    model = mixture()
    found = trained(model, config(56 << 10))
    assert banks_of(model)
    assert_same(
        {name: value for name, value in found.items() if name == "losses"},
        {"losses": expected["losses"]},
    )


@pytest.mark.parametrize("way", ["eager", "grouped_mm"])
def test_recomputed_blocks(way: str, config: Make) -> None:
    expected = trained(mixture("mixtral", way), config())
    model = infinity.tile(mixture("mixtral", way), ONE)
    assert_same(trained(model, config(recompute="all")), expected)


@pytest.mark.parametrize("way", ["eager", "grouped_mm"])
def test_generation(way: str, config: Make) -> None:
    ids = tokens_of(0)
    expected = mixture("mixtral", way).eval().generate(ids, max_new_tokens=5, do_sample=False)
    model = infinity.tile(mixture("mixtral", way).eval(), ONE)
    infinity.wrap(model, config(inference=True))
    with infinity.engine(model):
        assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)


def test_adapters_beside_a_bank_in_tiles(config: Make) -> None:
    found = []
    for size in (None, ONE):
        model = mixture()
        model = model if size is None else infinity.tile(model, size)
        torch.manual_seed(1)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        found.append(trained(peft.get_peft_model(model, lora), config()))
    assert_same(found[1], found[0])


def test_checkpoints_between_sizes_of_tiles(config: Make, tmp_path: Path) -> None:
    states = []
    for number, size in enumerate((ONE, None, "26KiB")):
        model = mixture() if size is None else infinity.tile(mixture(), size)
        infinity.wrap(model, config())
        with infinity.engine(model) as engine:
            optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
            if number == 0:
                model(input_ids=tokens_of(0), labels=tokens_of(0)).loss.backward()
                optimizer.step()
            else:
                engine.load_checkpoint(tmp_path / f"checkpoint{number - 1}", optimizer)
            engine.save_checkpoint(tmp_path / f"checkpoint{number}", optimizer)
            state = dict(engine.state_dict())
            bank = model.model.layers[1].mlp.experts.down_proj
            state["moment"] = infinity.get(bank, "exp_avg")
            states.append(state)
    for state in states[1:]:
        assert_same(state, states[0])


class Loop(nn.Module):
    """Experts that are taken out of a bank in `way`."""

    def __init__(self, way: str, used: int = 3) -> None:
        super().__init__()
        self.num_experts, self.way, self.used = 3, way, used
        self.bank = nn.Parameter(torch.randn(3, 8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "unbind":
            return sum(x @ each for each in self.bank.unbind())  # type: ignore[return-value]
        if self.way == "turned":
            return sum(functional.linear(x, self.bank[i].t()) for i in range(3))  # type: ignore[return-value]
        if self.way == "copied":
            return sum((x[..., None] * self.bank[i]).sum(-2) for i in range(3))  # type: ignore[return-value]
        if self.way == "beside":
            return {"beside": 1, "outputs": (None, sum(x @ self.bank[i] for i in range(self.used)))}  # type: ignore[return-value]
        return torch.bmm(x.expand(3, *x.shape), self.bank).sum(0)


@pytest.mark.parametrize("way", ["unbind", "turned", "copied", "bmm"])
def test_uses_of_a_bank(way: str) -> None:
    """Output and gradients, without an engine."""
    found = []
    for most in (None, 512):
        torch.manual_seed(0)
        model: nn.Module = Loop(way)
        if most is not None:
            infinity.tile(model, most)
            assert len(banks_of(model)["bank"].tiles) == 3
        x = torch.randn(5, 8, requires_grad=True)
        output = model(x)
        output.pow(2).sum().backward()
        found.append({"output": output, "input": x.grad, "bank": model.bank.grad})
    assert_same(found[1], found[0])


def test_experts_without_tokens_beside_other_outputs() -> None:
    """They have gradients of zeros, as in the whole bank, also where the output is changed in
    place."""
    model = infinity.tile(Loop("beside", used=1), 512)
    model(torch.randn(5, 8))["outputs"][1].mul_(2).sum().backward()
    gradient = model.bank.grad
    assert gradient[0].any() and not gradient[1:].any()


def test_a_grouped_product_with_more_than_is_known_is_refused() -> None:
    bank = infinity.tile(Loop("bmm"), 512).bank
    with pytest.raises(infinity.ConfigError, match="any other argument by its name"):
        torch._grouped_mm(torch.randn(5, 8), bank, torch.tensor([1, 2, 5]), None)


def test_refusals(caplog: pytest.LogCaptureFixture) -> None:
    model = mixture("mixtral", "batched_mm")
    with caplog.at_level(logging.INFO, "infinity"):
        infinity.tile(model, ONE)
    assert "takes many experts at once (batched_mm); call model.set_experts_impl" in caplog.text
    assert not banks_of(model)
    loop = infinity.tile(Loop("unbind"), 512)
    expert = loop.bank[1]
    assert isinstance(expert, BankView)
    with pytest.raises(infinity.ConfigError, match=r"change the bank itself \(bank\[expert\]"):
        expert.mul_(2)
    with pytest.raises(infinity.ConfigError, match="is used by one expert after the other"):
        torch.einsum("ij,ejk->ek", torch.randn(5, 8), loop.bank.mT)
    with pytest.raises(IndexError, match="expert 3 of a bank of 3"):
        loop(torch.randn(5, 8)) + loop.bank[3]


class Summed(Loop):
    """Computes with its bank in a way that is not known."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ij,ejk->ik", x, self.bank)


def test_a_bank_in_an_einsum_stays_whole() -> None:
    assert not banks_of(infinity.tile(Summed(""), 512))


NAMES = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted(kind: str, cut: str = "", way: str | None = None, **options: Any) -> Any:
    """A mixture with adapters on its banks; `cut` says when the banks are cut into tiles."""
    given = {"r": 2, "target_parameters": NAMES, "init_lora_weights": False, **options}
    model = mixture(kind, way)
    if cut == "before adapters":
        infinity.tile(model, ONE)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(**given))
    return infinity.tile(model, ONE) if cut == "after adapters" else model


def gradients_of(model: Any) -> list[Any]:
    """The loss, and the gradients of all adapters."""
    loss = model(input_ids=tokens_of(0), labels=tokens_of(0), use_cache=False).loss
    loss.backward()
    trained = [p for name, p in model.named_parameters() if "lora" in name]
    return [loss.detach(), *(p.grad + 0 for p in trained)]


CUTS = ["", "before adapters", "after adapters"]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    ("kind", "way"), [("qwen3_moe", None), ("gpt_oss", "eager"), ("gpt_oss", "grouped_mm")]
)
@pytest.mark.parametrize(
    "where", [{}, {"recompute": "all"}, {"parameters": "gpu", "optimizer": "cpu"}]
)
def test_adapters_on_banks(
    kind: str, way: str | None, cut: str, where: dict[str, Any], config: Make
) -> None:
    """`target_parameters` of PEFT, which parametrizes a bank for the time of a forward."""
    expected = gradients_of(adapted(kind, way=way, target_modules=["q_proj"]))
    model = adapted(kind, cut, way, target_modules=["q_proj"])
    assert len(banks_of(model)) == (4 if cut else 0)
    infinity.wrap(model, config(**where))
    with infinity.engine(model):
        for one, other in zip(gradients_of(model), expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("cut", CUTS[1:])
def test_adapters_beside_a_trained_bank(cut: str) -> None:
    """Without an engine, under autocast. The bank has its own gradient, too."""
    found = []
    for each in ("", cut):
        model = adapted("qwen3_moe", each)
        model.requires_grad_(True)
        with torch.autocast("cpu", torch.bfloat16):
            values = gradients_of(model)
        layers = model.base_model.model.model.layers
        found.append(
            [
                *values,
                *(layer.mlp.experts.base_layer.base_layer.down_proj.grad + 0 for layer in layers),
            ]
        )
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def saved_bytes(model: Any) -> int:
    """Bytes that autograd keeps of a forward beside the parameters of `model`."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(input_ids=tokens_of(0), use_cache=False)
    del output
    return sum(kept.values())


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize("recomputed", [False, True])
def test_autograd_keeps_no_bank_with_an_adapter_in_tiles(recomputed: bool) -> None:
    """PEFT makes a dense sum of each bank, which autograd keeps for the backward. A block that is
    recomputed keeps none of them."""
    kept = {}
    for cut in CUTS:
        model = adapted("qwen3_moe", cut, target_modules=["q_proj"])
        if recomputed:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        kept[cut] = saved_bytes(model.train())
    experts = sum(p.nbytes for n, p in mixture("qwen3_moe").named_parameters() if "experts" in n)
    assert (kept[""] > experts) is not recomputed
    for cut in CUTS[1:]:
        assert kept[cut] < 0.2 * experts


@pytest.mark.parametrize("cut", CUTS[1:])
def test_what_peft_does_with_adapters_on_banks_in_tiles(
    cut: str, config: Make, tmp_path: Path
) -> None:
    """Files, switched off adapters, copies, merging."""
    plain, model = adapted("qwen3_moe"), adapted("qwen3_moe", cut)
    ids = tokens_of(1)
    infinity.wrap(model, config())
    with infinity.engine(model):
        for each, where in ((plain, "plain"), (model, "ours")):
            each.save_pretrained(tmp_path / where)
        files = [tmp_path / where / "adapter_model.safetensors" for where in ("plain", "ours")]
        assert files[0].read_bytes() == files[1].read_bytes()
        with torch.no_grad(), plain.disable_adapter(), model.disable_adapter():
            assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
        merged, expected = model.merge_and_unload(), plain.merge_and_unload()
        assert_same(dict(merged.state_dict()), dict(expected.state_dict()))


def test_adapters_have_their_names_if_one_bank_of_two_is_cut() -> None:
    """PEFT nests the adapters in the order of the parameters, and names them by that."""
    cut = infinity.tile(mixture("gpt_oss"), "30KiB")
    assert {name.rpartition(".")[2] for name in banks_of(cut)} == {"gate_up_proj"}
    lora = peft.LoraConfig(r=2, target_parameters=NAMES)
    found = peft.get_peft_model(cut, lora).named_parameters()
    expected = adapted("gpt_oss").named_parameters()
    shapes = [{n: p.shape for n, p in each if "lora" in n} for each in (found, expected)]
    assert shapes[0] == shapes[1]


def test_adapters_that_a_bank_in_tiles_refuses() -> None:
    model = adapted("qwen3_moe", "before adapters")
    model.add_adapter("other", peft.LoraConfig(r=2, target_parameters=NAMES))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(infinity.ConfigError, match="takes one adapter at a time; activate one"):
        model(input_ids=tokens_of(0))
