"""LoRA on a base that bitsandbytes has quantized to 4 bits: the bits of plain PEFT."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from support.roads import OWN, road
from support.smallest import PLACEMENTS, Wrap, wrapping

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes"),
]
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def build(nested: bool = True, kind: str = "nf4", dtype: torch.dtype = torch.float32) -> Any:
    """Adapters on a Llama of two layers, whose statistics are quantized, too, where `nested`."""
    import bitsandbytes

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).to(dtype)
    for name, old in list(model.model.named_modules()):
        if isinstance(old, nn.Linear):
            new = bitsandbytes.nn.Linear4bit(
                old.in_features,
                old.out_features,
                bias=False,
                quant_type=kind,
                compute_dtype=dtype,
                compress_statistics=nested,
            )
            new.load_state_dict(old.state_dict())
            parent, _, child = name.rpartition(".")
            setattr(model.model.get_submodule(parent), child, new.to("cpu"))
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, target_modules=EVERY, init_lora_weights=False)
    return peft.get_peft_model(model, lora)


def ids_of(step: int) -> torch.Tensor:
    return torch.randint(5, 96, (2, 10), generator=torch.Generator().manual_seed(step))


def trained(model: Any, make: Any) -> list[torch.Tensor]:
    """Losses of three steps, and adapters after two."""
    adapters = [p for p in model.train().parameters() if p.requires_grad]
    optimizer = make(torch.optim.AdamW, adapters, lr=1e-2)
    losses = []
    for step in range(3):
        loss = model(input_ids=ids_of(step), labels=ids_of(step)).loss
        losses.append(loss.detach())
        if step < 2:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [*losses, *(each.detach() + 0 for each in adapters)]


def plain(kind: Any, *given: Any, **options: Any) -> Any:
    return kind(*given, **options)


@pytest.fixture
def wrap(tmp_path: Path) -> Iterator[Wrap]:
    with wrapping(tmp_path) as made:
        yield made


@pytest.mark.parametrize(
    ("placement", "recompute", "nested"),
    [
        ("nvme, poisoned", "off", True),
        ("nvme, poisoned", "all", False),
        ("nvme, room for all", "of the model", True),
        ("host", "off", False),
        ("device", "all", True),
    ],
)
@road("PEFT", "a loop", "`python`", OWN, "QLoRA (nf4)")
def test_training_has_the_bits_of_plain_adapters(
    wrap: Wrap, placement: str, recompute: str, nested: bool
) -> None:
    expected = trained(build(nested), plain)
    model = build(nested)
    if recompute == "of the model":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    setting = "all" if recompute == "all" else "off"
    wrap(model, PLACEMENTS[placement], algorithm="other", recompute=setting)
    for one, other in zip(trained(model, infinity.adapt), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("order", "kind"),
    [
        pytest.param(
            *("vertical", ("nf4", torch.bfloat16)),
            marks=road("PEFT", "a loop", "`python`", OWN, "QLoRA (nf4)", precision="bf16"),
        ),
        pytest.param(
            *("horizontal", ("fp4", torch.float32)),
            marks=road("PEFT", "a loop", "`python`", OWN, "QLoRA (fp4)"),
        ),
    ],
)
def test_accumulation_in_both_orders(wrap: Wrap, order: Any, kind: Any) -> None:
    model, whole = build(True, *kind), build(True, *kind)
    wrap(model, {}, algorithm="other")
    batches = [{"input_ids": ids_of(number), "labels": ids_of(number)} for number in range(3)]
    infinity.accumulate(model, batches, order=order)
    for batch in batches:
        (whole(**batch).loss / 3).backward()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert not one.requires_grad or torch.equal(one.grad, other.grad)
