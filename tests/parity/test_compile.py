"""torch.compile beside the engine: the numbers of plain PyTorch with the same graphs, nothing
compiled twice, a clear refusal.

The backend is "aot_eager", which traces and partitions as inductor does and runs the very kernels
of eager: bitwise the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import infinity
from support.models import FAMILIES, Transformer, text_batch, transformer
from support.specified_adamw import SETTINGS, SpecifiedAdamW

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Of torch, looking at its inputs.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
AOT: dict[str, Any] = {"backend": "aot_eager"}
LITTLE = 190_000  # bytes: room for some of the units, so that all of them move


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def wrapped(
    model: nn.Module, directory: Path, precision: str = "fp32", **options: Any
) -> nn.Module:
    config = infinity.Config(
        nvme=directory,
        gpu_memory=LITTLE,
        cpu_memory=1 << 26,
        precision=precision,
        tuning=infinity.Tuning(cache=0, poison=True),
    )
    return infinity.wrap(model, config, **options)


def train(model: nn.Module, optimizer: Any, steps: int = 4) -> list[float]:
    losses = []
    for step in range(steps):
        with torch._dynamo.config.patch(error_on_recompile=step >= 2):
            loss = model(**text_batch(step)).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def methods(model: Transformer, **options: Any) -> None:
    for block in model.blocks:
        block.compile(**AOT, **options)


def modules(model: Transformer, **options: Any) -> None:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, **AOT, **options)


def whole(model: Transformer, **options: Any) -> None:
    model.compile(**AOT, **options)


CASES = [
    (compiled, first, None, "fp32")
    for compiled in (methods, modules, whole)
    for first in (True, False)
]
CASES += [
    (compiled, False, reentrant, "bf16")
    for compiled in (methods, whole)
    for reentrant in (False, True)
]


@pytest.mark.parametrize(("compiled", "first", "reentrant", "precision"), CASES)
def test_compiled_models_train_as_plain_ones(
    compiled: Callable[..., None],
    first: bool,
    reentrant: bool | None,
    precision: str,
    tmp_path: Path,
) -> None:
    def make() -> Transformer:
        model = transformer(depth=3).to(torch.bfloat16 if precision == "bf16" else torch.float32)
        if reentrant is not None:
            model.run_block = lambda number, block, x: checkpoint(block, x, use_reentrant=reentrant)
        return model

    plain = make()
    compiled(plain)
    expected = train(plain, SpecifiedAdamW(plain.parameters()))
    model = make()
    if first:
        compiled(model)
    wrapped(model, tmp_path, precision)
    if not first:
        compiled(model)
    counters.clear()
    torch._dynamo.reset()
    assert train(model, infinity.AdamW(model.parameters(), **SETTINGS)) == expected
    if compiled is whole and reentrant is not None and torch.__version__ < "2.12":
        return  # dynamo runs a loop as it is where a graph breaks in it
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    infinity.engine(model).close()


@pytest.mark.parametrize("compiled", [methods, modules])
def test_a_block_may_be_one_graph(compiled: Callable[..., None], tmp_path: Path) -> None:
    model = wrapped(transformer(depth=3), tmp_path)
    compiled(model, fullgraph=True)
    train(model, infinity.AdamW(model.parameters()), steps=3)
    assert counters["stats"]["unique_graphs"] == 1, "the blocks are alike"


def test_a_model_of_several_units_cannot_be_one_graph(tmp_path: Path) -> None:
    model = wrapped(transformer(depth=3), tmp_path)
    whole(model, fullgraph=True)
    with pytest.raises(
        Exception,
        match=(
            r"parameters of a wrapped model come in hooks.*compile block after block, "
            r"or leave out"
        ),
    ):
        model(**text_batch(0))
    torch._dynamo.reset()
    model._compiled_call_impl = None
    plain = transformer(depth=3)
    expected = train(plain, SpecifiedAdamW(plain.parameters()))
    assert train(model, infinity.AdamW(model.parameters(), **SETTINGS)) == expected


def test_layers_of_transformers(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = FAMILIES["llama"].build()
        for layer in model.model.layers:
            layer.compile(**AOT)
        return model

    plain = make()
    expected = train(plain, SpecifiedAdamW(plain.parameters()))
    torch._dynamo.reset()
    model = wrapped(make(), tmp_path)
    assert train(model, infinity.AdamW(model.parameters(), **SETTINGS)) == expected


def test_evaluation_and_training_share_their_graphs(tmp_path: Path) -> None:
    model = wrapped(transformer(depth=3), tmp_path)
    methods(model)
    optimizer = infinity.AdamW(model.parameters())
    expected = transformer(depth=3)(**text_batch(0)).loss.item()
    with torch.no_grad():
        assert model(**text_batch(0)).loss.item() == expected
    train(model, optimizer)
    graphs = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        model(**text_batch(0))
    train(model, optimizer)
    assert counters["stats"]["unique_graphs"] == graphs


def test_micro_batches_together(tmp_path: Path) -> None:
    losses = {}
    for order in ("horizontal", "vertical"):
        directory = tmp_path / order
        directory.mkdir()
        model = wrapped(transformer(depth=3), directory)
        methods(model)
        optimizer = infinity.AdamW(model.parameters())
        losses[order] = []
        for step in range(2):
            losses[order] += infinity.accumulate(
                model, [text_batch(10 * step + i) for i in range(3)], order=order
            )
            optimizer.step()
            optimizer.zero_grad()
        infinity.engine(model).close()
    assert [float(loss) for loss in losses["vertical"]] == [
        float(loss) for loss in losses["horizontal"]
    ]
