"""The shortest use: a plain model and a plain loop, with parameters and optimizer states on NVMe.

python examples/plain_loop.py /mnt/nvme0
"""

import sys
import tempfile

import torch
from torch import nn

import infinity

directory = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
config = infinity.Config(nvme=directory)
with infinity.init():  # parameters take no memory here
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4)), nn.Linear(512, 1)
    )
model = infinity.wrap(model, config, seed=0)
optimizer = infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
device = next(model.parameters()).device
generator = torch.Generator().manual_seed(0)

with infinity.engine(model):
    for step in range(100):
        x = torch.randn(256, 512, generator=generator).to(device)
        loss = nn.functional.mse_loss(model(x), 2 * (x[:, :1] + x[:, 1:2]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.4f}")
