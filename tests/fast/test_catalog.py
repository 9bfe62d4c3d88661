"""The models that a plan knows by name have the published number of parameters."""

from __future__ import annotations

import pytest

from infinity.plan.catalog import MODELS, known
from infinity.plan.model import find_source
from infinity.weights.init import init

pytest.importorskip("transformers")

PUBLISHED = {
    # "total" of the safetensors metadata: huggingface.co/api/models/ID
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "google/gemma-3-4b-it": 4_300_079_472,
    "google/gemma-3-27b-it": 27_432_406_640,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    # general.parameter_count of the files for llama.cpp; the metadata counts bytes of MXFP4
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    # the model card says 671 billion without the layers of multi-token prediction
    "deepseek-ai/DeepSeek-V3": 671_026_404_352,
}


def count(name: str, layers: int) -> int:
    """Parameters of the model with so many layers."""
    source = find_source(name, "bf16")
    text = source.config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    with init(exact=False):
        return sum(parameter.numel() for parameter in source.build().parameters())


@pytest.mark.parametrize("name", MODELS)
def test_the_published_number_of_parameters(name: str) -> None:
    """Layers are alike, but for the dense ones before experts. So two of them say how many
    parameters a layer has."""
    text = find_source(name, "bf16").config.get_text_config()
    least = getattr(text, "first_k_dense_replace", 0) + 1
    one, two = count(name, least), count(name, least + 1)
    assert one + (text.num_hidden_layers - least) * (two - one) == PUBLISHED[name]


def test_every_model_has_a_published_number() -> None:
    assert MODELS.keys() == PUBLISHED.keys()


def test_a_model_is_found_by_a_part_of_its_id() -> None:
    for text in ("Qwen/Qwen3-8B", "qwen/qwen3-8b", "qwen3-8b"):
        assert known(text) == "Qwen/Qwen3-8B"
    assert known("qwen3") is None and known("8b") is None
