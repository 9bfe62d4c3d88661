"""A loop with Fabric. A strategy makes it train on infinity.

python examples/fabric_loop.py /mnt/nvme0
"""

import sys
import tempfile

import torch
from lightning import Fabric
from torch import nn

import infinity
from infinity.integrations.lightning import InfinityFabricStrategy

directory = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
fabric = Fabric(
    strategy=InfinityFabricStrategy(infinity.Config(nvme=directory)),
    devices=1,
)
fabric.launch()
torch.manual_seed(0)
with fabric.init_module():
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = fabric.setup(model, optimizer)
x = torch.randn(64, 32, device=fabric.device)
losses = []
for _ in range(8):
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    print(f"loss {losses[-1]:.4f}")
fabric.save(f"{directory}/checkpoint", {"model": model, "optimizer": optimizer})
