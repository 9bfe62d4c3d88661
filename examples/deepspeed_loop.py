"""A loop written for DeepSpeed: `import deepspeed` became `import infinity as deepspeed`, and no
other line changed. Optimizer and scheduler come from the JSON; states are on NVMe.

python examples/deepspeed_loop.py --deepspeed_config examples/deepspeed_loop.json
"""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import infinity as deepspeed


class Model(nn.Module):
    """Blocks with residual connections, and a head."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, width) -> (rows, 1)."""
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--checkpoint")
    args = parser.parse_args()

    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config):
        model = Model(width=64, depth=4)
    x = torch.randn(160, 64)
    data = TensorDataset(x, x[:, :1] - x[:, 1:2])
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=data
    )
    for _ in range(args.epochs):
        for rows, wanted in loader:
            rows = rows.to(engine.device, next(engine.parameters()).dtype)
            found = engine(rows).float()
            loss = nn.functional.mse_loss(found, wanted.to(engine.device))
            engine.backward(loss)
            engine.step()
            if engine.was_step_applied():
                print(
                    f"step {engine.global_steps}: loss {loss.item():.4f}, "
                    f"norm {engine.get_global_grad_norm()}, rate {engine.get_lr()[0]:.2e}"
                )
    if args.checkpoint:
        engine.save_checkpoint(args.checkpoint, client_state={"epochs": args.epochs})
        engine.save_16bit_model(args.checkpoint)
    engine.destroy()


if __name__ == "__main__":
    main()
