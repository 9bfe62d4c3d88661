"""`model.generate` on a GPU, with the cache of keys and values there and in host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from support.generating import llama, loaded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("parameters", ["nvme", "cpu"])
@pytest.mark.parametrize("cache", ["dynamic", "offloaded"])
def test_the_tokens_are_those_of_plain_transformers(
    parameters: Any, cache: str, tmp_path: Path
) -> None:
    plain = llama()
    plain.save_pretrained(tmp_path)
    config = infinity.Config(
        inference=True, parameters=parameters, gpu_memory="800KiB", cpu_memory="8MiB"
    )
    model = infinity.wrap(loaded(type(plain), tmp_path), config)
    with infinity.engine(model) as engine:
        inputs = {"input_ids": torch.tensor([[1, 2, 3]], device=engine.device)}
        options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
        found = model.generate(**inputs, **options).cpu()
    plain = plain.to("cuda")
    inputs = {"input_ids": torch.tensor([[1, 2, 3]], device="cuda")}
    assert torch.equal(found, plain.generate(**inputs, **options).cpu())
