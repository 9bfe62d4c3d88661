"""Without budgets, half of what is free of a GPU stays for the model's own computation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import infinity

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_half_of_what_is_free_is_left() -> None:
    kept = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    del kept  # torch keeps its memory, which is free to the engine
    free, total = torch.cuda.mem_get_info()
    model = infinity.wrap(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))
    with infinity.engine(model) as engine:
        budget = engine.report().budgets["gpu"]
        assert abs(budget - (free + (64 << 20)) // 2) < 64 << 20
        assert "of the " in engine.report().budget_sources["gpu"]
        model(torch.randn(2, 64, device="cuda")).sum().backward()
        infinity.AdamW(model.parameters()).step()
    with pytest.raises(infinity.BudgetError, match=r"^gpu_memory=.* is more than the GPU has, "):
        infinity.wrap(nn.Linear(8, 8), infinity.Config(gpu_memory=total + 1))
