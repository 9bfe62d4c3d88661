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
from infinity.models.adapters import with_lora
from infinity.models.source import find_model
from infinity.modules.facade import move_buffers
from infinity.plan.adapters import LinearAdapters
from infinity.plan.forecast import plan
from infinity.plan.hardware import DriveSpec, Hardware
from infinity.plan.memory import Training
from infinity.plan.model import of_source
from support.configs import config_of
from support.probe import Probe
from support.roads import OWN, road
from support.smallest import PLACEMENTS, Wrap, wrapping

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes"),
]
THIS = Hardware("this machine", 1 << 40, 1e11, drives=(DriveSpec(2e9, 1e9, 1 << 40),))
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}


def llama(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(dtype)


def adapted(model: Any) -> Any:
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, target_modules=EVERY, init_lora_weights=False)
    return peft.get_peft_model(model, lora)


def build(nested: bool = True, kind: str = "nf4", dtype: torch.dtype = torch.float32) -> Any:
    """Adapters on a Llama of two layers, whose statistics are quantized, too, where `nested`."""
    import bitsandbytes

    model = llama(dtype)
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
    return adapted(model)


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


# Files in 4 bits


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def stored(place: Path, nested: bool = True, kind: str = "nf4", **more: Any) -> Path:
    """A directory that transformers has quantized, and that is only to be read."""
    llama().save_pretrained(place / "model")
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=torch.float32,
        **more,
    )
    load(place / "model", quantization_config=settings).save_pretrained(place / "stored")
    for path in (place / "stored").iterdir():
        path.chmod(0o444)
    return place / "stored"


def seen(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("placement", "recompute", "nested", "kind"),
    [
        ("nvme, poisoned", "off", True, "nf4"),
        ("nvme, poisoned", "all", False, "nf4"),
        ("nvme, room for all", "off", True, "fp4"),
        ("host", "off", False, "nf4"),
        ("device", "all", True, "nf4"),
    ],
)
def test_a_base_that_is_read_from_its_files_has_the_bits_of_plain_adapters(
    wrap: Wrap, tmp_path: Path, placement: str, recompute: str, nested: bool, kind: str
) -> None:
    folder = stored(tmp_path, nested, kind)
    before = seen(folder)
    expected = trained(adapted(load(folder)), plain)
    with infinity.init():
        model = adapted(load(folder))
    wrap(model, PLACEMENTS[placement], algorithm="other", recompute=recompute)
    if placement == "nvme, poisoned":
        base = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        in_files = infinity.engine(model).report().in_files
        assert in_files >= sum(each.numel() * each.itemsize for each in base)
    for one, other in zip(trained(model, infinity.adapt), expected, strict=True):
        assert torch.equal(one, other)
    assert seen(folder) == before


def test_the_device_map_that_transformers_chooses(
    wrap: Wrap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine with a GPU, where the quantizer places all on it."""
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    folder = stored(tmp_path)
    expected = trained(adapted(load(folder)), plain)
    monkeypatch.setattr(
        Bnb4BitHfQuantizer, "update_device_map", lambda _, asked: asked or {"": "meta"}
    )
    with infinity.init():
        model = adapted(load(folder))
        with pytest.raises(infinity.ConfigError, match="places nothing on devices"):
            load(folder, device_map={"": "meta"})
    wrap(model, PLACEMENTS["host"], algorithm="other")
    for one, other in zip(trained(model, infinity.adapt), expected, strict=True):
        assert torch.equal(one, other)


def test_the_scales_are_on_the_device_of_the_codes(tmp_path: Path) -> None:
    folder = stored(tmp_path)
    with infinity.init():
        model = load(folder)
    move_buffers(model, torch.device("meta"), None)
    state = model.model.layers[0].mlp.up_proj.quant_state
    assert state.absmax.is_meta and state.state2.absmax.is_meta and state.offset.is_meta


def test_an_evaluation_writes_no_codes(wrap: Wrap, tmp_path: Path) -> None:
    """On some CPUs bitsandbytes packs the codes of a layer in its first forward without grad."""
    folder = stored(tmp_path)
    with infinity.init():
        model = load(folder)
    for module in model.modules():
        assert not getattr(module, "support_avx512bf16_for_cpu", False)
    wrap(model, PLACEMENTS["nvme, poisoned"], algorithm="other")
    whole = load(folder)
    with torch.no_grad():
        found, expected = model.eval()(ids_of(0)).logits, whole.train()(ids_of(0)).logits
    assert torch.equal(found, expected)


def test_codes_that_are_no_bytes_are_refused(tmp_path: Path) -> None:
    folder = stored(tmp_path, bnb_4bit_quant_storage=torch.bfloat16)
    with (
        infinity.init(),
        pytest.raises(
            infinity.ConfigError, match=r"quantize it with bnb_4bit_quant_storage=torch\.uint8"
        ),
    ):
        load(folder)


def test_a_model_that_would_be_quantized_as_it_is_loaded_is_refused(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    settings = transformers.BitsAndBytesConfig(load_in_4bit=True)
    with infinity.init(), pytest.raises(infinity.ConfigError, match="load the model outside of"):
        load(tmp_path, quantization_config=settings)


# Its plan


def test_a_plan_has_the_memory_and_the_bytes_of_a_step(tmp_path: Path) -> None:
    """Codes of the layers and what is read of them, scales, adapters, and both budgets."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
    config = transformers.LlamaConfig(**SIZES | sizes | {"num_hidden_layers": 6}, dtype="float32")
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    folder = infinity.quantize(tmp_path / "model", tmp_path / "base")
    (tmp_path / "nvme").mkdir()
    settings = config_of(
        nvme=[tmp_path / "nvme"],
        gpu_memory="2500KiB",
        cpu_memory="3MiB",
        cache=0,
        recompute="all",
        update="exact",
        device="cpu",
    )
    source = find_model(str(tmp_path / "model"), "auto")
    planned = of_source(source, settings, LinearAdapters(4, four_bits=True))
    forecast = plan(planned, THIS, Training(16, 2, 1, True), settings)
    assert forecast.problems == () and forecast.memory is not None and forecast.pace is not None
    with infinity.init():
        model = with_lora(load(folder), 4)
    model = infinity.wrap(model.train(), settings)
    with infinity.engine(model) as engine:
        scales = [vars(module).get("quant_state") for module in model.modules()]
        assert forecast.memory.statistics == sum(
            each.nbytes
            for state in scales
            if state is not None
            for each in (
                *(state.absmax, state.code, state.offset),
                *(state.state2.absmax, state.state2.code),
            )
        )
        rooms, probe = forecast.memory.layout.rooms, Probe(engine)
        assert rooms == probe.store.layout.rooms
        adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = infinity.AdamW(adapters, lr=1e-3)
        counted = []
        for step in range(5):
            before = int(engine.recorder.counters().get("nvme bytes read", 0))
            ids = torch.randint(5, 96, (2, 16), generator=torch.Generator().manual_seed(step))
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.drain()
            counted.append(int(engine.recorder.counters()["nvme bytes read"]) - before)
        report = engine.report()
        assert report.peaks["gpu"] <= report.budgets["gpu"]
        assert report.peaks["cpu"] <= report.budgets["cpu"]
        codes = sum(each.numel() for each in model.parameters() if each.dtype == torch.uint8)
        assert report.budgets["gpu"] < report.in_files  # the base does not fit
        assert counted[-1] >= codes  # all of them are read again
        assert forecast.pace.traffic.read == pytest.approx(sum(counted[2:]) / 3, rel=0.02)
