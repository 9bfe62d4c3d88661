"""Weights in tiles: a model computes as before, and its states keep their names and shapes."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.checkpoint.contents import Contents
from infinity.checkpoint.export import everything, export
from infinity.sharding.tiles import Tile, TiledWeight, named_wholes, tile_places
from infinity.tiles import tile_math
from infinity.weights.tensors import Tensors
from support.smallest import Wrap, wrapping

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(120)]

ROWS, WIDTH, HIDDEN = 200, 32, 320
BYTES = 9000  # of a tile: 64 rows of `WIDTH` elements of fp32


class Net(nn.Module):
    """An embedding, two linear layers and a head, which may be tied to the embedding."""

    def __init__(self, tied: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH, padding_idx=3)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.head(self.norm(x + self.down(functional.gelu(self.up(x)))))


def built(tied: bool = True, dtype: torch.dtype = torch.float32, bias: bool = True) -> Net:
    torch.manual_seed(0)
    return Net(tied, bias).to(dtype)


def tiled(max_bytes: int = BYTES, **options: Any) -> Net:
    return infinity.tile(built(**options), max_bytes)


def ids_of(step: int) -> torch.Tensor:
    return torch.randint(0, ROWS, (4, 9), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(ids_of(step)).float().pow(2).mean()


def train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.fixture
def wrap(tmp_path: Path) -> Iterator[Wrap]:
    """Wraps with the smallest budgets; at the end nothing may be in use any more."""
    (tmp_path / "engines").mkdir()
    with wrapping(tmp_path / "engines") as make:
        yield make


# What tiles compute


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 300),
    width=st.integers(1, 40),
    batch=st.lists(st.integers(1, 5), max_size=2),
    share=st.floats(0.01, 1.2),
    bias=st.booleans(),
    frozen=st.sampled_from(["", "weight", "input"]),
)
def test_a_linear_layer_in_tiles_is_the_layer(
    rows: int, width: int, batch: list[int], share: float, bias: bool, frozen: str
) -> None:
    """Output, input gradient and parameter gradients in fp64, to the rounding of a sum."""
    torch.manual_seed(0)
    plain = nn.Linear(width, rows, bias=bias, dtype=torch.float64)
    plain.weight.requires_grad_(frozen != "weight")
    most = max(int(share * plain.weight.nbytes), 8 * width)
    other = infinity.tile(copy.deepcopy(plain), most)
    assert isinstance(other, nn.Linear)
    assert all(p.nbytes <= most for n, p in other.named_parameters() if "tiles" in n)
    found = []
    for layer in (plain, other):
        x = torch.linspace(-1, 1, math.prod(batch) * width, dtype=torch.float64)
        x = x.view(*batch, width).requires_grad_(frozen != "input")
        y = layer(x)
        if y.requires_grad:
            (y * torch.arange(y.numel(), dtype=torch.float64).view(y.shape).cos()).sum().backward()
        found.append([y, x.grad, layer.weight.grad, layer.bias.grad if bias else None])
    for expected, value in zip(*found, strict=True):
        assert (expected is None) == (value is None)
        if expected is not None:
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 60),
    width=st.integers(1, 9),
    longest=st.integers(1, 70),
    ids=st.lists(st.integers(0, 59), max_size=12),
    padding=st.none() | st.integers(0, 59),
    by_count=st.booleans(),
)
def test_an_embedding_in_tiles_has_the_same_bits(
    rows: int, width: int, longest: int, ids: list[int], padding: int | None, by_count: bool
) -> None:
    torch.manual_seed(0)
    padding = None if padding is None else padding % rows
    plain = nn.Embedding(rows, width, padding_idx=padding, scale_grad_by_freq=by_count)
    other = infinity.tile(copy.deepcopy(plain), 4 * width * longest)
    assert isinstance(other.weight, TiledWeight) == (longest < rows)
    index = torch.tensor(ids, dtype=torch.int64) % rows
    outputs = [layer(index) for layer in (plain, other)]
    assert torch.equal(*outputs)
    for output in outputs:
        (output * torch.arange(output.numel()).view(output.shape).cos()).sum().backward()
    assert torch.equal(plain.weight.grad, other.weight.grad)


def test_an_id_outside_of_the_vocabulary_is_refused() -> None:
    with pytest.raises(IndexError, match="out of range"):
        tiled().embed(torch.tensor([ROWS]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_have_the_bits_of_the_layer(dtype: torch.dtype) -> None:
    """Forward and weight gradients; the input gradient is one rounding of the exact sum."""
    torch.manual_seed(0)
    plain = nn.Linear(64, 1024, dtype=dtype)
    other = infinity.tile(copy.deepcopy(plain), 64 * 64 * 2)
    assert len(other.weight.pieces) == 16
    values, slope = torch.randn(32, 64).to(dtype), torch.randn(32, 1024).to(dtype)
    inputs = [values.clone().requires_grad_() for _ in range(2)]
    outputs = [layer(x) for layer, x in zip((plain, other), inputs, strict=True)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.backward(slope)
    assert torch.equal(plain.weight.grad, other.weight.grad)
    assert torch.equal(plain.bias.grad, other.bias.grad)
    exact = slope.double() @ plain.weight.double()
    kernel, sums = ((x.grad.double() - exact).abs() for x in inputs)
    half_a_step = torch.finfo(dtype).eps / 2 * 1.01
    assert bool((sums <= half_a_step * exact.abs() + 1e-5).all())
    assert sums.max() <= 1.01 * kernel.max()


@pytest.mark.parametrize("across", [False, True])
def test_gradients_of_gradients(across: bool) -> None:
    torch.manual_seed(0)

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        whole = weight.t() if across else weight
        tiles = [_Holding(part) for part in whole.split([3, 2, 2], 1 if across else 0)]
        return tile_math.linear(x, tiles, bias, across)

    x, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((3, 4), (7, 4), (7,))
    )
    assert torch.autograd.gradcheck(run, (x, weight, bias))
    assert torch.autograd.gradgradcheck(run, (x, weight, bias))


class _Holding(nn.Module):
    """A tile whose weight is any tensor."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        vars(self)["weight"] = weight

    def forward(self, run: Any, *given: Any) -> Any:
        return run(self.weight, *given)


def test_autocast_is_that_of_the_layer() -> None:
    plain, other = built(), tiled()
    outputs = []
    for model in (plain, other):
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(model(ids_of(0)))
        outputs[-1].float().pow(2).mean().backward()
    assert outputs[1].dtype is torch.bfloat16
    assert torch.equal(*outputs)
    torch.testing.assert_close(other.up.weight.grad, plain.up.weight.grad, rtol=0.05, atol=1e-4)


def test_an_output_may_be_changed_in_place() -> None:
    layer = infinity.tile(nn.Linear(8, 64), 512)
    torch.relu_(layer(torch.ones(3, 8))).sum().backward()
    assert layer.weight.grad is not None


# What a model in tiles is for others


def test_names_shapes_and_classes() -> None:
    plain, model = built(), tiled()
    assert [n for n, _ in named_wholes(model)] == [
        n for n, _ in plain.named_parameters(remove_duplicate=False)
    ]
    assert model.up.weight.shape == (HIDDEN, WIDTH)
    assert model.up.weight.dtype is torch.float32
    assert isinstance(model.up, nn.Linear)
    assert isinstance(model.embed, nn.Embedding)
    assert isinstance(model.up.weight, nn.Parameter)
    assert model.get_parameter("up.weight") is model.up.weight
    assert model.head.weight is model.embed.weight
    assert [p.shape[0] for p in model.up.weight.pieces] == [64, 64, 64, 64, 64]
    assert isinstance(model.norm.weight, nn.Parameter)
    assert not isinstance(model.norm.weight, TiledWeight)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())


def test_state_dicts_are_those_of_the_plain_model() -> None:
    plain, model = built(), tiled()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert_same(model.state_dict(), plain.state_dict())
    zeros = {name: torch.zeros_like(value) for name, value in plain.state_dict().items()}
    model.load_state_dict(zeros)
    assert_same(model.state_dict(), zeros)
    model.load_state_dict(plain.state_dict(), assign=True)
    assert_same(model.state_dict(), plain.state_dict())
    found = model.load_state_dict({"up.weight": zeros["up.weight"]}, strict=False)
    assert sorted(found.missing_keys) == sorted(zeros.keys() - {"up.weight"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*up\.other"):
        model.load_state_dict(zeros | {"up.other": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"size mismatch for up\.weight"):
        model.load_state_dict(zeros | {"up.weight": torch.zeros(2, 2)})


def test_the_weight_is_read_and_written_through_its_tiles() -> None:
    plain, model = built(), tiled()
    weight = model.up.weight
    assert torch.equal(weight, plain.up.weight)
    assert torch.equal(weight[3], plain.up.weight[3])
    assert torch.equal(weight.t() + 1, plain.up.weight.t() + 1)
    with torch.no_grad():
        weight.mul_(2)
        weight[5] = 1
        weight[6:8].zero_()  # they lie side by side, so this is no copy
    weight.data[9:11].zero_()
    expected = plain.up.weight.detach() * 2
    expected[5], expected[6:8], expected[9:11] = 1, 0, 0
    assert torch.equal(weight, expected)
    weight.data = torch.ones(HIDDEN, WIDTH)
    assert bool((weight == 1).all())
    weight.requires_grad_(False)
    assert not any(piece.requires_grad for piece in weight.pieces)
    weight.requires_grad = True
    weight.grad = torch.ones(HIDDEN, WIDTH)
    assert bool((weight.pieces[2].grad == 1).all())
    weight.grad = None
    assert weight.grad is None
    model.up.reset_parameters()
    assert not torch.equal(weight, torch.ones(HIDDEN, WIDTH))
    model.bfloat16()  # each tile has memory of its own now
    assert model.up.weight.dtype is torch.bfloat16
    model.up.weight.data[0].zero_()  # a view writes through all the same
    assert not model.up.weight.detach()[0].any() and model.up.weight.detach()[1].any()


def test_copies_share_what_the_model_shares() -> None:
    model = tiled()
    other = copy.deepcopy(model)
    assert other.head.weight is other.embed.weight
    with torch.no_grad():
        other.up.weight.zero_()
    assert not bool((model.up.weight == 0).any())
    assert_same(tiled(tied=False).state_dict(), built(tied=False).state_dict())


def test_a_weight_may_be_tied_later_and_not_replaced() -> None:
    model = tiled(tied=False)
    model.head.weight = model.embed.weight
    assert model.head.weight is model.embed.weight
    assert len(tile_places(model)[id(model.embed.weight.pieces[0])]) == 2
    assert torch.equal(model(ids_of(0)), tiled()(ids_of(0)))
    with pytest.raises(infinity.ConfigError, match="is in tiles and cannot be replaced"):
        model.up.weight = nn.Parameter(torch.zeros(HIDDEN, WIDTH))


def test_smaller_tiles_later() -> None:
    model = tiled()
    infinity.tile(model, BYTES // 2)
    assert len(model.up.weight.pieces) == 10
    assert model.head.weight is model.embed.weight
    assert_same(model.state_dict(), built().state_dict())


class Scaled(nn.Embedding):
    """As in Gemma: calls the forward of its base."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 3


class Turned(nn.Linear):
    """Computes with its weight in its own way."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.linear(input, -self.weight, self.bias)


def test_classes_below_the_known_ones(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"a": Scaled(64, 8), "b": Turned(8, 64), "c": nn.MultiheadAttention(16, 2)}
    )
    plain = copy.deepcopy(model)
    with caplog.at_level(logging.INFO, "infinity"):
        infinity.tile(model, 512)
    assert isinstance(model["a"].weight, TiledWeight)
    assert isinstance(model["a"], Scaled)
    ids = torch.arange(64)
    assert torch.equal(model["a"](ids), plain["a"](ids))
    assert not isinstance(model["b"].weight, TiledWeight)
    assert not isinstance(model["c"].out_proj.weight, TiledWeight)
    for name in ("b.weight", "c.in_proj_weight", "c.out_proj.weight"):
        assert f"{name} stays whole" in caplog.text


def test_refusals(wrap: Wrap) -> None:
    with pytest.raises(infinity.ConfigError, match=r"max_bytes: '3 parsecs' is not a number"):
        infinity.tile(built(), "3 parsecs")
    model = built()
    with pytest.raises(infinity.ConfigError, match=r"one row of embed.weight has 128 B, more than"):
        infinity.tile(model, 100)
    assert type(model.up) is nn.Linear
    wrap(model, {})
    with pytest.raises(infinity.ConfigError, match=r"call infinity\.tile before infinity\.wrap"):
        infinity.tile(model, BYTES)


# What the engine makes of tiles


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("home", ["nvme", "cpu"])
def test_training_has_the_bits_of_the_engine_without_budgets(
    wrap: Wrap, precision: str, home: str
) -> None:
    """In the smallest budgets that hold one tile, with stale views poisoned, as in room for all."""
    found = []
    for placement in ({"poison": True}, {"gpu_memory": 1 << 26, "cpu_memory": 1 << 26}):
        model = wrap(tiled(), placement | {"parameters": home, "precision": precision})
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        losses = train(model, optimizer, range(4))
        found.append({"losses": torch.tensor(losses), **infinity.engine(model).state_dict()})
    assert_same(found[0], found[1])


def test_training_in_bf16_is_that_of_the_plain_model(wrap: Wrap) -> None:
    """To the rounding of input gradients; the first loss has the same bits."""
    found = []
    for make in (built, tiled):
        model = wrap(make(), {"precision": "bf16"})
        found.append(train(model, infinity.AdamW(model.parameters(), lr=1e-3), range(5)))
    assert found[0][0] == found[1][0]
    assert found[0] == pytest.approx(found[1], rel=0.02)


def test_each_tile_is_a_unit_that_comes_and_goes_alone(wrap: Wrap) -> None:
    """The device holds two places of the largest unit and what is around it, and tiles come in the
    order of their rows forward, and the other way in backward."""
    model = wrap(tiled(tied=False), {})
    engine = infinity.engine(model)
    tiles = [unit for unit in engine.units if "tiles" in unit.facts.name]
    assert len(tiles) == sum(isinstance(module, Tile) for module in model.modules())
    assert all(len(unit.facts.parameters) == 1 for unit in tiles)
    order: list[str] = []
    paths = {module: path for path, module in model.named_modules()}

    def note(name: str) -> Callable[..., None]:
        return lambda *_: order.append(name)

    for module in model.modules():
        if isinstance(module, Tile):
            module.register_forward_hook(note(paths[module]))
            module.weight.register_post_accumulate_grad_hook(note(paths[module]))
    loss = loss_of(model, 0)
    forward = [unit.facts.name for unit in tiles]
    assert order == forward
    loss.backward()
    assert order == forward + forward[::-1]
    whole = built().up.weight.nbytes
    assert engine.config.gpu_memory < whole


def test_names_of_a_wrapped_model(wrap: Wrap) -> None:
    plain = built()
    model = wrap(tiled(), {})
    engine = infinity.engine(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    for state in (model.state_dict(), engine.state_dict()):
        assert_same(state, plain.state_dict())
        assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    weights = dict(engine.weights())
    assert weights.keys() == plain.state_dict().keys() - {"head.weight"}
    assert torch.equal(model.up.weight, plain.up.weight)
    model.load_state_dict(plain.state_dict())
    assert_same(model.state_dict(), plain.state_dict())
    zeros = {name: torch.zeros_like(value) for name, value in plain.state_dict().items()}
    model.load_state_dict(zeros, assign=True)
    assert_same(model.state_dict(), zeros)
    with (
        pytest.raises(infinity.BudgetError, match=r"up\.weight_tiles\.\d does not fit"),
        infinity.gathered(model.up.weight),
    ):
        pass


def test_a_gathered_weight_takes_what_is_written(wrap: Wrap) -> None:
    model = wrap(tiled(), {"gpu_memory": 1 << 26})
    with pytest.raises(infinity.ShardedParameterError, match=r"up\.weight_tiles\.0\.weight"):
        model.up.weight.fill_(3)
    with infinity.gathered(model.up.weight, write=True):
        model.up.weight.fill_(3)
        model.up.weight[70] = 7
        model.up.weight[5].zero_()
    expected = torch.full((HIDDEN, WIDTH), 3.0)
    expected[70], expected[5] = 7, 0
    assert torch.equal(model.state_dict()["up.weight"], expected)


def test_states_by_the_weight(wrap: Wrap) -> None:
    model = wrap(tiled(), {})
    loss_of(model, 0).backward()
    weight = model.up.weight
    gradient = infinity.engine(model).gradient(weight)
    assert gradient is not None
    assert gradient.shape == (HIDDEN, WIDTH)
    assert torch.equal(infinity.get(weight, "grad"), gradient)
    assert torch.equal(weight.grad, gradient)
    rows = torch.arange(HIDDEN).float()[:, None].expand(HIDDEN, WIDTH)
    for name in ("value", "exp_avg", "grad"):
        infinity.set(weight, name, rows)
        assert torch.equal(infinity.get(weight, name), rows)
    part = infinity.get(weight, "value", local=True)
    infinity.set(weight, "value", part + 1, local=True)
    assert torch.equal(infinity.get(weight), rows + 1)
    with pytest.raises(infinity.ConfigError, match=r"up\.weight.* has shape \(320, 32\)"):
        infinity.set(weight, "value", torch.zeros(3))


@settings(max_examples=4, deadline=None)
@given(st.permutations([None, BYTES, BYTES // 3]), st.booleans())
def test_checkpoints_between_sizes_of_tiles(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int | None], tied: bool
) -> None:
    """All states have the same bits after each hop: of tiles, of other tiles, and of none."""
    tmp_path = tmp_path_factory.mktemp("hops")
    with wrapping(tmp_path) as wrap:
        expected: dict[str, Any] = {}
        for number, size in enumerate([*sizes, sizes[0]]):
            model = built(tied) if size is None else tiled(size, tied=tied)
            wrap(model, {"precision": "bf16"})
            optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
            engine = infinity.engine(model)
            if number == 0:
                train(model, optimizer, range(2))
            else:
                engine.load_checkpoint(tmp_path / f"c{number - 1}", optimizer)
                assert set(optimizer.header()["steps"]) == {2}
            states = {
                f"{kind}.{name}": infinity.get(parameter, kind)
                for name, parameter in named_wholes(model)
                for kind in ("value", "master", "exp_avg", "exp_avg_sq")
            }
            expected = expected or states
            assert_same(states, expected)
            engine.save_checkpoint(tmp_path / f"c{number}", optimizer)
            contents = Contents(tmp_path / f"c{number}")
            shapes = {weight.name: weight.shape for weight in contents.weights()}
            assert shapes == {n: tuple(p.shape) for n, p in built(tied).named_parameters()}
            assert not contents.verify().errors


def test_a_checkpoint_of_tiles_is_exported_whole(wrap: Wrap, tmp_path: Path) -> None:
    model = wrap(tiled(), {})
    infinity.engine(model).save_checkpoint(tmp_path / "there")
    contents = Contents(tmp_path / "there")
    export(contents, tmp_path / "out", everything(contents))
    found = Tensors("out")
    found.add(tmp_path / "out" / "model.safetensors")
    for name, value in built().named_parameters():
        assert torch.equal(found.read(name), value)


def test_frozen_tiles_are_left_out_and_kept(wrap: Wrap, tmp_path: Path) -> None:
    def half_frozen() -> Net:
        model = tiled()
        model.up.weight.requires_grad_(False)
        return model

    model = wrap(half_frozen(), {})
    optimizer = infinity.AdamW([p for p in model.parameters() if p.requires_grad])
    train(model, optimizer, range(1))
    engine = infinity.engine(model)
    engine.save_checkpoint(tmp_path / "there", optimizer, trainable_only=True)
    assert Contents(tmp_path / "there").left_out == {"up.weight"}
    other = wrap(half_frozen(), {})
    optimizer = infinity.AdamW([p for p in other.parameters() if p.requires_grad])
    infinity.engine(other).load_checkpoint(tmp_path / "there", optimizer)
    assert_same(other.state_dict(), model.state_dict())


# Where values come from


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("inside", [False, True])
def test_tiles_without_memory_get_the_bits_of_constructors(seed: int | None, inside: bool) -> None:
    torch.manual_seed(0 if seed is None else 5)
    with infinity.init():
        model = Net()
        if inside:
            infinity.tile(model, BYTES)
    if not inside:
        infinity.tile(model, BYTES)
    assert all(p.is_meta for p in model.parameters())
    infinity.wrap(model, infinity.Config(gpu_memory=1 << 26, cpu_memory=1 << 26), seed=seed)
    with infinity.engine(model):
        assert_same(model.state_dict(), built().state_dict())


def test_what_was_written_to_a_weight_without_memory_is_kept() -> None:
    """Before it was cut and after that; it can be read, too."""
    with infinity.init():
        model = Net()
    with torch.no_grad():
        model.up.weight.fill_(1)
        infinity.tile(model, BYTES)
        model.up.weight_tiles[1].weight.mul_(3)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    assert expected["up.weight"].unique().tolist() == [1.0, 3.0]
    infinity.wrap(model, infinity.Config(gpu_memory=1 << 26, cpu_memory=1 << 26))
    with infinity.engine(model):
        assert_same(model.state_dict(), expected)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_tile_reads_its_rows_alone(
    tmp_path: Path, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From safetensors; where they are frozen they stay there."""
    plain = built(tied=False)
    save_file(dict(plain.state_dict()), tmp_path / "model.safetensors")
    with infinity.init():
        model = Net(tied=False)
    model.requires_grad_(not frozen)
    model.norm.requires_grad_(True)
    infinity.tile(model, BYTES)
    shapes: list[tuple[int, ...]] = []
    read = Tensors.read

    def noted(self: Tensors, name: str, bounds: tuple[slice, ...] = ()) -> torch.Tensor:
        value = read(self, name, bounds)
        shapes.append(tuple(value.shape))
        return value

    monkeypatch.setattr(Tensors, "read", noted)
    (tmp_path / "states").mkdir()
    config = infinity.Config(
        nvme=[tmp_path / "states"], parameters="nvme", gpu_memory=1 << 26, cpu_memory=1 << 26
    )
    infinity.wrap(model, config, weights=tmp_path / "model.safetensors")
    with infinity.engine(model) as engine:
        assert max(map(math.prod, shapes)) <= BYTES // 4
        assert all(
            bool(u.facts.stored) == frozen for u in engine.units if "norm" not in u.facts.name
        )
        assert_same(model.state_dict(), plain.state_dict())
        assert_same(engine.state_dict(), plain.state_dict())
        assert torch.equal(model(ids_of(0)), tiled(tied=False)(ids_of(0)))


def test_missing_weights_are_named_as_the_files_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {name: value for name, value in built().state_dict().items() if name != "up.weight"}
    model = tiled()
    config = infinity.Config(gpu_memory=1 << 26, cpu_memory=1 << 26)
    infinity.wrap(model, config, weights=state)
    with infinity.engine(model):
        assert "no tensor for 1 of the model's parameters" in caplog.text
        assert caplog.text.rstrip().endswith("gave them: up.weight")


def test_checkpointed_activations(wrap: Wrap) -> None:
    """A recomputation brings tiles again, and gradients have the bits of a backward without it."""
    found = []
    for again in (False, True):
        model = wrap(tiled(), {"poison": True})
        if again:
            plain = model.up.forward
            vars(model.up)["forward"] = lambda x, plain=plain: checkpoint(
                plain, x, use_reentrant=False
            )
        loss_of(model, 0).backward()
        engine = infinity.engine(model)
        found.append([engine.gradient(p) for _, p in named_wholes(model)])
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)


def test_parameters_that_come_later(wrap: Wrap) -> None:
    """A model in tiles is wrapped once more with an adapter, and its tiles keep their bits."""
    model = wrap(tiled(), {"precision": "bf16"})
    train(model, infinity.AdamW(model.parameters(), lr=1e-2), range(2))
    before = model.state_dict()
    masters = infinity.get(model.up.weight, "master")
    model.adapter = nn.Linear(WIDTH, WIDTH)
    infinity.wrap(model)
    after = model.state_dict()
    assert_same({name: after[name] for name in before}, before)
    assert torch.equal(infinity.get(model.up.weight, "master"), masters)


def test_a_pickled_model_is_in_tiles(tmp_path: Path) -> None:
    torch.save(tiled(), tmp_path / "model.pt")
    model = torch.load(tmp_path / "model.pt", weights_only=False)
    assert isinstance(model.up.weight, TiledWeight)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model(ids_of(0)), tiled()(ids_of(0)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_graphs_break_at_tiles(wrap: Wrap) -> None:
    model = wrap(tiled(), {"gpu_memory": 1 << 22})
    compiled = torch.compile(model, backend="eager")
    output = compiled(ids_of(0))
    assert torch.equal(output, tiled()(ids_of(0)))
    output.sum().backward()
    assert infinity.engine(model).gradient(model.up.weight) is not None


def test_micro_batches_in_vertical_order(wrap: Wrap) -> None:
    found = []
    for vertical in (False, True):
        model = wrap(tiled(), {"gpu_memory": 1 << 22})
        if vertical:
            batches = [ids_of(step) for step in range(3)]
            infinity.accumulate(model, batches, lambda out, _: out.float().pow(2).mean())
        else:
            for step in range(3):
                (loss_of(model, step) / 3).backward()
        found.append([infinity.engine(model).gradient(p) for _, p in named_wholes(model)])
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)


def test_committed_steps_go_on_in_tiles(tmp_path: Path) -> None:
    def trained(where: str, stops: list[int]) -> dict[str, Any]:
        config = infinity.Config(
            nvme=[tmp_path / where],
            parameters="nvme",
            optimizer="nvme",
            precision="bf16",
            durability="step",
            gpu_memory=1 << 22,
            cpu_memory=1 << 24,
        )
        (tmp_path / where).mkdir()
        state: dict[str, Any] = {}
        for stop in stops:
            model = infinity.wrap(tiled(), config, resume=bool(state))
            with infinity.engine(model) as engine:
                first = engine.committed_step or 0
                train(model, infinity.AdamW(model.parameters(), lr=1e-2), range(first, stop))
                state = engine.state_dict()
        return state

    assert_same(trained("resumed", [2, 4]), trained("at once", [4]))
