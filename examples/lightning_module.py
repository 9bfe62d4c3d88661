"""A LightningModule. A strategy makes it train on infinity.

python examples/lightning_module.py /mnt/nvme0
"""

import sys
import tempfile

import torch
from lightning import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import infinity
from infinity.integrations.lightning import InfinityStrategy


class Regression(LightningModule):
    """Learns the mean of its inputs."""

    def __init__(self):
        super().__init__()
        self.layers = None
        self.losses = []

    def configure_model(self):
        if self.layers is None:
            blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)]
            self.layers = nn.Sequential(*blocks, nn.Linear(32, 1))

    def training_step(self, batch, number):
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


directory = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
torch.manual_seed(0)
x = torch.randn(64, 32)
data = DataLoader(TensorDataset(x, x.mean(1, keepdim=True)), batch_size=8)
module = Regression()
trainer = Trainer(
    strategy=InfinityStrategy(infinity.Config(nvme=directory)),
    devices=1,
    max_epochs=3,
    gradient_clip_val=1.0,
    default_root_dir=directory,
    logger=False,
    enable_progress_bar=False,
)
trainer.fit(module, data)
losses = module.losses
print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
