"""`from_pretrained` of transformers inside of `infinity.init()` gives the model that it gives
outside, and reads nothing before `wrap`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    FineGrainedFP8Config,
    GgufConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaForCausalLM,
    Mxfp4Config,
    PreTrainedModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.modeling_utils import LoadStateDictConfig

import infinity
from infinity.weights.tensors import Tensors
from support.models import FAMILIES


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a family, in several files, in the layout of the hub."""
    place = tmp_path_factory.mktemp("saved")

    def save(family: str) -> Path:
        if not (place / family).is_dir():
            with torch.random.fork_rng():
                FAMILIES[family].build().save_pretrained(place / family, max_shard_size="50KB")
        return place / family

    return save


def wrapped_values(model: nn.Module, tmp_path: Path) -> dict[str, torch.Tensor]:
    """The state dict of `model`, wrapped."""
    config = infinity.Config(nvme=[tmp_path], gpu_memory="8MiB", cpu_memory="16MiB")
    with infinity.engine(infinity.wrap(model, config)) as engine:
        return engine.state_dict()


def check(make: Callable[[], Any], tmp_path: Path) -> None:
    """What `make` loads is the same inside of `init()`: names, buffers, ties, mode, and the bits of
    values after `wrap`; the generator of random numbers is where the plain call leaves it."""
    torch.manual_seed(3)
    plain = make()
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with infinity.init():
        model = make()
    assert torch.equal(torch.get_rng_state(), state)
    assert type(model) is type(plain)
    assert model.training is plain.training
    assert all(parameter.is_meta for parameter in model.parameters())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    expected = plain.state_dict() | dict(plain.named_buffers())
    values = wrapped_values(model, tmp_path) | dict(model.named_buffers())
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        assert values[name].dtype is value.dtype
        assert torch.equal(values[name], value), name


@pytest.mark.parametrize("family", FAMILIES)
def test_models(family: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    """The experts of Mixtral are one tensor each in the files, and one together in the model."""
    kind: Any = type(FAMILIES[family].build())
    path = saved(family)
    check(lambda: kind.from_pretrained(path), tmp_path)


def test_another_dtype(saved: Callable[[str], Path], tmp_path: Path) -> None:
    check(
        lambda: AutoModelForCausalLM.from_pretrained(saved("mixtral"), dtype=torch.bfloat16),
        tmp_path,
    )


def test_parameters_that_stay_in_fp32(
    saved: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["norm"])
    check(lambda: LlamaForCausalLM.from_pretrained(saved("llama"), dtype=torch.bfloat16), tmp_path)


def test_a_head_that_the_files_lack_is_initialised(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    check(
        lambda: AutoModelForSequenceClassification.from_pretrained(saved("llama"), num_labels=3),
        tmp_path,
    )


def test_embeddings_that_are_resized_after_loading(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """New rows get the mean of the old ones, which are read for that."""

    def make() -> nn.Module:
        model = AutoModelForCausalLM.from_pretrained(saved("gpt2"))
        model.resize_token_embeddings(70)
        return model

    check(make, tmp_path)


def test_weights_that_are_changed_after_loading(tmp_path: Path) -> None:
    """The file is mapped, and a change must not reach it."""
    built: Any = FAMILIES["llama"].build()
    built.config.save_pretrained(tmp_path / "saved")
    torch.save(built.state_dict(), tmp_path / "saved" / "pytorch_model.bin")

    def make() -> nn.Module:
        model = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
        model.model.norm.weight.data.mul_(2)
        model.model.norm.weight.data.mul_(model.model.norm.weight.sum().item())
        return model

    check(make, tmp_path)


def test_a_tied_weight_that_is_stored_twice(tmp_path: Path) -> None:
    built: Any = FAMILIES["llama"].build()
    state = {name: value.clone() for name, value in built.state_dict().items()}
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(state)
    (tmp_path / "saved").mkdir()
    torch.save(state, tmp_path / "saved" / "pytorch_model.bin")
    built.config.save_pretrained(tmp_path / "saved")
    check(lambda: LlamaForCausalLM.from_pretrained(tmp_path / "saved"), tmp_path)


def test_each_tensor_is_read_once_and_by_wrap(
    saved: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: Counter[str] = Counter()
    read = Tensors.read

    def counted(tensors: Tensors, name: str, bounds: tuple[slice, ...] = ()) -> torch.Tensor:
        reads[name] += 1
        return read(tensors, name, bounds)

    monkeypatch.setattr(Tensors, "read", counted)
    path = saved("mixtral")
    with infinity.init():
        model = AutoModelForCausalLM.from_pretrained(path)
    assert reads == {}
    wrapped_values(model, tmp_path)
    assert set(reads.values()) == {1}
    assert len(reads) == 2 * (4 * 3 + 7) + 3


def test_a_from_pretrained_of_another_kind_keeps_its_values(tmp_path: Path) -> None:
    class Mine(nn.Sequential):
        @classmethod
        def from_pretrained(cls, path: Path) -> nn.Module:
            model = cls(nn.Linear(6, 6), nn.LayerNorm(6))
            model.load_state_dict(torch.load(path, weights_only=True))
            return model

    plain = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)).state_dict()
    torch.save(plain, tmp_path / "mine.pt")
    with infinity.init():
        model = Mine.from_pretrained(tmp_path / "mine.pt")
    values = wrapped_values(model, tmp_path)
    assert all(torch.equal(values[name], plain[name]) for name in plain)


def test_an_adapter_that_is_loaded_after_the_model(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """As `load_adapter` of transformers does for a directory of PEFT; it takes the device of the
    model, which is meta."""
    options = LoadStateDictConfig(
        dtype=torch.float32, device_map={"": torch.device("meta")}, weight_mapping=[]
    )
    given = {"model.norm.weight": torch.full((32,), 3.0)}
    path = saved("llama")
    with infinity.init():
        model = AutoModelForCausalLM.from_pretrained(path)
        load = getattr(PreTrainedModel, "_load_pretrained_model")  # noqa: B009
        load(
            model=model,
            state_dict=given,
            checkpoint_files=None,
            load_config=options,
            expected_keys=list(given),
        )
    values = wrapped_values(model, tmp_path)
    assert torch.equal(values["model.norm.weight"], given["model.norm.weight"])


def test_a_shape_that_differs_is_refused_by_transformers(saved: Callable[[str], Path]) -> None:
    path = saved("llama")
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"), infinity.init():
        AutoModelForCausalLM.from_pretrained(path, intermediate_size=48)


def test_a_device_map_is_refused(saved: Callable[[str], Path]) -> None:
    before = vars(PreTrainedModel)["_load_pretrained_model"]
    path = saved("llama")
    with (
        pytest.raises(
            infinity.ConfigError,
            match=r"^LlamaForCausalLM\.from_pretrained inside infinity\.init\(\) places nothing on "
            r"devices; leave device_map out, infinity\.wrap moves parameters to the compute",
        ),
        pytest.MonkeyPatch.context() as patch,
        infinity.init(),
    ):
        patch.setattr("transformers.integrations.accelerate.is_accelerate_available", lambda: True)
        AutoModelForCausalLM.from_pretrained(path, device_map={"": "disk"})
    assert vars(PreTrainedModel)["_load_pretrained_model"] is before


def test_what_constructors_freeze_is_what_it_is_outside(tmp_path: Path) -> None:
    """transformers thaws what it loads."""
    small = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    small |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    small |= dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 8)
    small |= dict.fromkeys(("max_source_positions", "max_target_positions", "num_mel_bins"), 8)
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = WhisperConfig(vocab_size=16, decoder_start_token_id=1, **small, **tokens)
    plain = WhisperForConditionalGeneration(config)
    plain.save_pretrained(tmp_path)
    loaded = WhisperForConditionalGeneration.from_pretrained(tmp_path)
    with infinity.init():
        models = WhisperForConditionalGeneration(config), type(plain).from_pretrained(tmp_path)
    for model, other in zip(models, (plain, loaded), strict=True):
        for name, parameter in other.named_parameters():
            assert model.get_parameter(name).requires_grad == parameter.requires_grad, name


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT
@pytest.mark.parametrize("way", ["gaussian", "orthogonal", "pissa", "olora"])
@pytest.mark.parametrize("inside", [True, False])
def test_adapters_that_start_from_the_values_of_the_base(
    way: Any, inside: bool, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """PiSSA and OLoRA decompose weights, and write what is left of them."""
    path = saved("llama")
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=way)

    def adapted(base: Any) -> nn.Module:
        torch.manual_seed(3)
        return get_peft_model(base, config)

    plain = adapted(LlamaForCausalLM.from_pretrained(path))
    with infinity.init():
        model = LlamaForCausalLM.from_pretrained(path)
        model = adapted(model) if inside else model
    values = wrapped_values(model if inside else adapted(model), tmp_path)
    for name, value in plain.state_dict().items():
        assert torch.equal(values[name], value), name


def save_quantized(
    model: Any, place: Path, method: dict[str, Any], parts: Callable[[str, Any], dict[str, Any]]
) -> None:
    """Write `model` to `place`, as `parts` of its tensors by `method`."""
    model.config.save_pretrained(place)
    state = {
        n: each
        for name, value in model.state_dict().items()
        for n, each in parts(name, value).items()
    }
    save_file(state, place / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"quantization_config": method}))


def save_fp8(place: Path) -> None:
    def parts(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        if "proj" not in name:
            return {name: value.bfloat16()}
        scales = torch.rand(value.shape[0] // 16, value.shape[1] // 16)
        return {name: value.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}

    method = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    save_quantized(FAMILIES["llama"].build(), place, method, parts)


def save_mxfp4(place: Path) -> None:
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 64)
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_experts_per_tok"), 2)
    config = GptOssConfig(**sizes, **heads, num_hidden_layers=1, head_dim=32, num_local_experts=4)

    def parts(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        if not name.endswith(("gate_up_proj", "down_proj")):
            return {name: value.bfloat16()}
        shape = value.shape[0], value.shape[2], value.shape[1] // 32
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        scales = torch.randint(120, 130, shape, dtype=torch.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    save_quantized(GptOssForCausalLM(config), place, {"quant_method": "mxfp4"}, parts)


@pytest.mark.parametrize(
    ("save", "kind"), [(save_fp8, FineGrainedFP8Config), (save_mxfp4, Mxfp4Config)]
)
def test_quantized_files_that_become_plain_parameters(
    save: Callable[[Path], None], kind: Any, tmp_path: Path
) -> None:
    save(tmp_path / "saved")
    options = {"quantization_config": kind(dequantize=True)}
    check(lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **options), tmp_path)


def test_weights_that_stay_quantized_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU, transformers dequantizes."""
    save_fp8(tmp_path)
    module = "transformers.quantizers.quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer"
    monkeypatch.setattr(f"{module}.validate_environment", lambda *args, **options: None)
    with (
        pytest.raises(
            infinity.ConfigError,
            match=r"^LlamaForCausalLM\.from_pretrained inside infinity\.init\(\) cannot keep "
            r"weights as FineGrainedFP8Config has them, because parameters have no memory yet; "
            r"load the model outside of init\(\), or give "
            r"quantization_config=FineGrainedFP8Config\(dequantize=True\)$",
        ),
        infinity.init(),
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def save_gguf(path: Path, architecture: str) -> None:
    """A model with two layers; transformers reads the tensors of a Llama at once, and those of LFM2
    one by one."""
    import gguf

    kind = gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv([0, 2] if architecture == "lfm2" else 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(64)
    writer.add_rope_freq_base(10000.0)
    writer.add_token_list([f"word {number}" for number in range(64)])
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (64, 32)}
    attention = {f"attn_{each}": (32, 32) for each in ("q", "k", "v", "output")}
    mlp = {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
    norms = {"attn_norm": (32,), "ffn_norm": (32,)}
    blocks: list[dict[str, tuple[int, ...]]] = [attention | mlp | norms] * 2
    if architecture == "lfm2":
        writer.add_shortconv_l_cache(3)
        shapes["token_embd_norm"] = (32,)
        conv = {"in_proj": (96, 32), "out_proj": (32, 32), "conv": (32, 3)}
        blocks[0] = mlp | norms | {f"shortconv.{name}": shape for name, shape in conv.items()}
        blocks[1] = blocks[1] | {"attn_q_norm": (16,), "attn_k_norm": (16,)}
    else:
        shapes["output_norm"] = (32,)
    for number, block in enumerate(blocks):
        shapes |= {f"blk.{number}.{name}": shape for name, shape in block.items()}
    for name, shape in shapes.items():
        value = torch.randn(shape).numpy()
        if shape[-1] % 32 or len(shape) < 2:
            writer.add_tensor(f"{name}.weight", value)
        else:
            quantized = gguf.quants.quantize(value, kind)
            writer.add_tensor(f"{name}.weight", quantized, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", ["llama", "lfm2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gguf_file(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    save_gguf(tmp_path / "tiny.gguf", architecture)

    def make() -> Any:
        options = {"gguf_file": "tiny.gguf", "quantization_config": GgufConfig(dequantize=True)}
        return AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, **options)

    check(make, tmp_path)
