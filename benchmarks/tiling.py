#!/usr/bin/env python3
"""What the compute device has to hold of a layer whose weight lies in tiles, for hidden sizes up to
64K.

The layer is the first linear layer of an MLP, from H to 4 H, in bf16: 8 H^2 bytes. Untiled it would
take these bytes on the device at once, and as many for its gradient. "H to H" is a projection of
attention, of a quarter of the bytes: safetensors maps a file whole, so host memory limits its size.

"frozen" rows train the bias and the input. The weight is read from a safetensors file of zeros
without blocks, so the run takes neither disk nor host memory for it. "trained" rows train all of
an MLP, H to 4 H to H, by AdamW on NVMe.

The value is the peak of the engine's memory on the compute device, and the limit what the page on
sizing says: two tiles, and the units around them. `gradient_bytes` is the largest gradient of a
parameter, which lies beside it. `wrap` is given the limit as `gpu_memory`, to the byte.

    benchmarks/tiling.py [--directory DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from infinity.bench.summary import Row, Spread, Summary
from infinity.quantities import parse_bytes
from infinity.sharding.tiles import TiledWeight, named_wholes

QUESTION = "What does the compute device hold of a layer whose weight lies in tiles?"
LIMIT = "two tiles and the units around them"
TOKENS = 4


class Layer(nn.Module):
    """A linear layer that trains its bias alone."""

    def __init__(self, hidden: int, outputs: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, outputs, dtype=torch.bfloat16)
        self.up.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)


class Mlp(nn.Module):
    """An MLP."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden, dtype=torch.bfloat16)
        self.down = nn.Linear(4 * hidden, hidden, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def write_zeros(path: Path, hidden: int, outputs: int) -> None:
    """A safetensors file with the values of a `Layer`, all zeros, that takes no blocks."""
    weight, bias = 2 * outputs * hidden, 2 * outputs
    entries = {
        "up.weight": ([outputs, hidden], 0, weight),
        "up.bias": ([outputs], weight, weight + bias),
    }
    header = {
        name: {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        for name, (shape, begin, end) in entries.items()
    }
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 4096)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + weight + bias)


def limit_of(engine: infinity.Engine) -> int:
    """Two tiles, and the units around one: those of the module that has most of them."""
    tiles = [unit.facts.nbytes for unit in engine.units if "_tiles." in unit.facts.name]
    around = [unit.facts.nbytes for unit in engine.units if "_tiles." not in unit.facts.name]
    return 2 * max(tiles) + max(around)


class GradientMeter:
    """The bytes of the largest gradient that autograd gives."""

    def __init__(self, model: nn.Module) -> None:
        self.peak = 0
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._came)

    def _came(self, gradient: torch.Tensor) -> None:
        self.peak = max(self.peak, gradient.nbytes)


def run(
    model: nn.Module, hidden: int, steps: int, config: infinity.Config, **options: Any
) -> dict[str, Any]:
    """Some steps of `model`, wrapped with `config`."""
    model = infinity.wrap(model, config, **options)
    with infinity.engine(model) as engine:
        meter = GradientMeter(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = infinity.AdamW(trained, lr=1e-3)
        losses, start = [], time.perf_counter()
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(TOKENS, hidden, generator=generator).bfloat16().requires_grad_()
            loss = model(x).float().pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        engine.drain()
        return {
            "seconds": (time.perf_counter() - start) / steps,
            "peak": engine.report().peaks["gpu"],
            "limit": limit_of(engine)
            if any("_tiles." in u.facts.name for u in engine.units)
            else 0,
            "gradient": meter.peak,
            "losses": losses,
        }


def row(name: str, model: nn.Module, found: dict[str, Any], facts: dict[str, Any]) -> Row:
    """What was `found` for a model in tiles."""
    wholes = [w for _, w in named_wholes(model) if isinstance(w, TiledWeight)]
    weight = max(w.numel() for w in wholes) * 2
    return Row(
        name=name,
        unit="bytes",
        rounds=1,
        value=Spread.of([found["peak"]]),
        ratio=Spread.of([found["peak"] / found["limit"]]),
        facts={
            "weight_bytes": weight,
            "tiles_count": len(wholes[0].pieces),
            "largest_tile_bytes": max(p.numel() for w in wholes for p in w.pieces) * 2,
            "gradient_bytes": found["gradient"],
            "share_of_weight": found["peak"] / weight,
            "seconds_per_step": found["seconds"],
            **facts,
        },
    )


def frozen(hidden: int, times: int, tile: int, folder: Path) -> Row:
    """A `Layer` from `hidden` to so many times as much, whose weight is read from a file."""
    outputs = times * hidden
    states = folder / f"frozen-{hidden}-{times}"
    states.mkdir()
    write_zeros(states / "model.safetensors", hidden, outputs)
    with torch.device("meta"):  # infinity.init wants address space for each weight
        model = Layer(hidden, outputs)
    infinity.tile(model, tile)
    longest = max(p.numel() * 2 for p in model.parameters())
    limit = 2 * longest + 2 * outputs
    config = infinity.Config(nvme=states, parameters="nvme", gpu_memory=limit, cpu_memory="256MiB")
    found = run(model, hidden, 1, config, weights=states / "model.safetensors")
    return row(
        f"frozen, hidden size {hidden}{', H to H' * (times == 1)}",
        model,
        found,
        {"hidden_size": hidden},
    )


def trained(hidden: int, tile: int, folder: Path) -> Row:
    """An `Mlp`, in tiles and untiled."""
    results = []
    for size in (None, tile):
        states = folder / f"trained-{hidden}-{size}"
        states.mkdir()
        torch.manual_seed(0)
        model = Mlp(hidden)
        limit = 1 << 30
        if size is not None:
            infinity.tile(model, size)
            limit = 2 * max(p.numel() * 2 for p in model.parameters()) + 8 * hidden
        config = infinity.Config(
            nvme=states,
            parameters="nvme",
            optimizer="nvme",
            precision="bf16",
            gpu_memory=limit,
            cpu_memory="256MiB",
        )
        results.append(run(model, hidden, 2, config))
    untiled, found = results
    facts = {
        "hidden_size": hidden,
        "untiled_seconds_per_step": untiled["seconds"],
        "untiled_gradient_bytes": untiled["gradient"],
        "first_loss_has_the_same_bits": found["losses"][0] == untiled["losses"][0],
        "second_loss_relative_difference": abs(found["losses"][1] / untiled["losses"][1] - 1),
    }
    return row(f"trained, hidden size {hidden}", model, found, facts)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=None, help="default: a temporary one")
    parser.add_argument("--frozen", type=int, nargs="*", default=[8192, 16384, 32768])
    parser.add_argument("--projections", type=int, nargs="*", default=[65536], help="H to H")
    parser.add_argument("--trained", type=int, nargs="*", default=[1024, 2048])
    parser.add_argument("--tile", type=parse_bytes, default=64 << 20, help="of a frozen weight")
    parser.add_argument("--trained-tile", type=parse_bytes, default=2 << 20)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        for hidden in options.trained:
            rows.append(trained(hidden, options.trained_tile, Path(name)))
            print(rows[-1].name, flush=True)
            write(rows, options)
        layers = [(hidden, 4) for hidden in options.frozen]
        layers += [(hidden, 1) for hidden in options.projections]
        for hidden, times in layers:
            rows.append(frozen(hidden, times, options.tile, Path(name)))
            print(rows[-1].name, flush=True)
            write(rows, options)


def write(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Print what there is, and write it: the largest layer takes long."""
    settings = vars(options) | {"tokens": TOKENS}
    summary = Summary.of(__file__, QUESTION, LIMIT, rows, seeds=[0, 1], settings=settings)
    for line in summary.table():
        print(line)
    summary.write(options.json)


if __name__ == "__main__":
    main()
