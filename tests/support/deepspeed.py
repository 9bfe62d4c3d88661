"""Scripts written for DeepSpeed, small enough for tests, and what plain PyTorch makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    """Three layers that return a loss, or without labels what they compute."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2 * width)
        self.second = nn.Linear(2 * width, width)
        self.last = nn.Linear(width, 4)
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """The loss (0-dimensional), or logits."""
        x = functional.gelu(self.first(x))
        x = x * self.scale.to(x.dtype)
        x = self.last(functional.gelu(self.second(x)))
        return x if labels is None else functional.cross_entropy(x.float(), labels)


def net(seed: int = 0, width: int = 8) -> Net:
    """A `Net` with weights that depend on `seed` alone."""
    torch.manual_seed(seed)
    return Net(width)


def batch(number: int, rows: int = 2, width: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels, a function of `number` alone."""
    generator = torch.Generator().manual_seed(100 + number)
    x = torch.randn(rows, width, generator=generator)
    return x, torch.randint(0, 4, (rows,), generator=generator)


def configuration(nvme: Path | None = None, **keys: Any) -> dict[str, Any]:
    """A configuration with AdamW, and with a directory ZeRO-3 with everything on NVMe there.

    `keys` replace those at the top.
    """
    offload = {"device": "cpu"} if nvme is None else {"device": "nvme", "nvme_path": str(nvme)}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": dict(offload),
            "offload_optimizer": dict(offload),
        },
        "gradient_clipping": 0.0,
        "infinity": {"tuning": {"device": "cpu"}},
        **keys,
    }
