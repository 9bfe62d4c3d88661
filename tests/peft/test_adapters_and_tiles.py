"""Adapters of PEFT beside a base in tiles; and the `Conv1D` of transformers in tiles."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import infinity
from infinity.checkpoint.contents import Contents
from infinity.checkpoint.export import everything, export
from infinity.sharding.tiles import TiledWeight, named_wholes
from infinity.weights.tensors import Tensors
from support.smallest import Wrap, wrapping

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

IDS = torch.arange(24).view(2, 12)


@pytest.fixture
def wrap(tmp_path: Path) -> Iterator[Wrap]:
    """Wraps with the smallest budgets where none are given."""
    (tmp_path / "engines").mkdir()
    with wrapping(tmp_path / "engines") as make:
        yield make


def adapted(tiles: str) -> Any:
    """A Llama with adapters; its base is put into `tiles` "before" or "after" PEFT, or not."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config)
    if tiles == "before":
        infinity.tile(model, "8KiB")
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, adapters)
    return infinity.tile(model, "8KiB") if tiles == "after" else model


@pytest.mark.parametrize("tiles", ["before", "after"])
def test_adapters_train_beside_a_base_in_tiles(wrap: Wrap, tiles: str) -> None:
    """With the names of a base without tiles; merging writes the tiles."""
    found = []
    for way in ("", tiles):
        model: Any = wrap(adapted(way), {"gpu_memory": 1 << 26})
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = infinity.AdamW(trained, lr=1e-2)
        for _ in range(3):
            model(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        before = model.state_dict()
        model.merge_adapter()
        found.append((before, model.state_dict(), model(input_ids=IDS).logits.detach()))
        model.unmerge_adapter()
    assert isinstance(model.base_model.model.lm_head.weight, TiledWeight)
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)
    name = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
    assert not torch.equal(found[1][0][name], found[1][1][name])


def built() -> Any:
    config = transformers.GPT2Config(
        vocab_size=64,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).eval()


def test_columns_in_tiles_compute_what_the_weight_does() -> None:
    plain, model = built(), infinity.tile(built(), "16KiB")
    assert isinstance(model.transformer.h[0].attn.c_attn.weight, TiledWeight)
    outputs = [each(input_ids=IDS, labels=IDS) for each in (plain, model)]
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits)
    for output in outputs:
        output.loss.backward()
    for name, weight in named_wholes(model):
        expected = plain.get_parameter(name).grad
        torch.testing.assert_close(weight.grad, expected, rtol=1e-4, atol=1e-6)


def test_checkpoints_of_columns(wrap: Wrap, tmp_path: Path) -> None:
    """They load with other tiles and with none, and are exported whole."""
    states: list[dict[str, Any]] = []
    for number, size in enumerate(("16KiB", None, "8KiB", "16KiB")):
        model = built() if size is None else infinity.tile(built(), size)
        wrap(model, {})
        optimizer = infinity.AdamW(model.parameters(), lr=1e-3)
        engine = infinity.engine(model)
        if number == 0:
            model(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()
        else:
            engine.load_checkpoint(tmp_path / str(number - 1), optimizer)
        engine.save_checkpoint(tmp_path / str(number), optimizer)
        found = dict(engine.state_dict())
        found["moment"] = infinity.get(model.transformer.h[1].mlp.c_fc.weight, "exp_avg")
        states.append(found)
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        for name, value in states[0].items():
            assert torch.equal(state[name], value), name
    contents = Contents(tmp_path / "0")
    export(contents, tmp_path / "out", everything(contents))
    exported = Tensors("out")
    exported.add(tmp_path / "out" / "model.safetensors")
    for name in exported.names():
        assert torch.equal(exported.read(name), states[0][name]), name


def test_from_pretrained_and_then_tiles(wrap: Wrap, tmp_path: Path) -> None:
    plain = built()
    plain.save_pretrained(tmp_path / "model")
    with infinity.init():
        model: Any = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "model")
    wrap(infinity.tile(model, "16KiB"), {})
    expected = copy.deepcopy(plain.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
