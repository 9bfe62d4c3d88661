"""Every parameter is in exactly one unit, repeated blocks are units, small ones together, and
whoever uses a unit is hooked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import ConfigError
from infinity.modules.grouping import Group, find_owners, find_users, group_parameters, join_small
from support.configs import config_of

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """Embeddings, blocks, a norm, and a head that is tied to the embeddings."""

    def __init__(self, depth: int = 3, width: int = 8) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embeddings.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def paths_to(model: nn.Module, wanted: nn.Module) -> Iterator[list[nn.Module]]:
    """The chains of modules from `model` down to `wanted`: one, or several when it is shared."""

    def walk(module: nn.Module, chain: list[nn.Module]) -> Iterator[list[nn.Module]]:
        if module is wanted:
            yield [*chain, module]
        for child in module._modules.values():
            if child is not None:
                yield from walk(child, [*chain, module])

    yield from walk(model, [])


def check(model: nn.Module, units: object = None) -> list[Group]:
    """Group `model` and assert what always holds; returns the groups."""
    owners = find_owners(model, units)
    groups = group_parameters(model, owners)
    named = dict(model.named_parameters(remove_duplicate=False))
    grouped = [(name, parameter) for group in groups for name, parameter in group.parameters]
    assert sorted(id(p) for _, p in grouped) == sorted({id(p) for p in named.values()}), (
        "each in exactly one unit"
    )
    for name, parameter in grouped:
        assert named[name] is parameter
    for group in groups:
        assert len({(p.dtype, p.requires_grad) for _, p in group.parameters}) == 1
        assert {group.dtype} == {p.dtype for _, p in group.parameters}
        below = {id(p) for p in group.owner.parameters()}
        assert all(id(p) in below for _, p in group.parameters)
    assert len({group.name for group in groups}) == len(groups)

    unit_of = {id(p): number for number, group in enumerate(groups) for _, p in group.parameters}
    users = find_users(model, owners, unit_of)
    assert model in users, "where a cycle begins"
    for module, used in users.items():
        assert not isinstance(module, CONTAINERS), (
            "a container has no forward that a hook could see"
        )
        assert len(set(used)) == len(used)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            for chain in paths_to(model, module):
                holders = [
                    other for other in chain if unit_of[id(parameter)] in users.get(other, ())
                ]
                assert holders, (
                    "a module that touches a parameter is inside of a hooked one that "
                    "brings its unit"
                )
    return groups


def names(groups: list[Group]) -> list[str]:
    return [group.name for group in groups]


def test_repeated_blocks_are_units():
    groups = check(Model())
    assert names(groups) == ["embeddings", "blocks.0", "blocks.1", "blocks.2", "norm"]
    assert [len(group.parameters) for group in groups] == [1, 6, 6, 6, 2]
    assert groups[0].parameters[0][0] == "embeddings.weight", (
        "a tied parameter is where it comes first, and only there"
    )


def test_blocks_of_a_sequential_are_units():
    model = nn.Sequential(nn.Embedding(10, 8), Block(), Block(), nn.Linear(8, 10))
    assert names(check(model)) == ["0", "1", "2", "3"]


def test_the_outermost_repeated_block_wins():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([Block(), Block()])

    model = nn.ModuleDict({"layers": nn.ModuleList([Outer(), Outer(), Outer()])})
    assert list(find_owners(model)) == ["layers.0", "layers.1", "layers.2"]


def test_a_large_element_is_looked_into():
    class Tower(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(depth))

    model = nn.Sequential(Tower(6), Tower(2))
    assert list(find_owners(model)) == [f"0.layers.{i}" for i in range(6)] + ["1"]


def test_without_repeated_blocks_every_module_with_parameters_is_a_unit():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.LayerNorm(2))
    assert find_owners(model) == {}
    assert names(check(model)) == ["0", "2"]


def test_a_single_module_is_a_unit():
    assert names(check(nn.Linear(2, 2))) == ["model"]


def test_units_given_as_classes_and_instances():
    model = Model()
    assert names(check(model, [nn.Sequential])) == [
        "embeddings",
        "blocks.0.norm",
        "blocks.0.mlp",
        "blocks.1.norm",
        "blocks.1.mlp",
        "blocks.2.norm",
        "blocks.2.mlp",
        "norm",
    ]
    groups = check(model, [model.blocks[1], nn.LayerNorm])
    assert names(groups) == [
        "embeddings", "blocks.0.norm", "blocks.0.mlp.0", "blocks.0.mlp.2", "blocks.1",
        "blocks.2.norm", "blocks.2.mlp.0", "blocks.2.mlp.2", "norm",
    ]  # fmt: skip
    assert names(check(model, [Block, Model])) == names(check(model)), (
        "the model itself is not below itself"
    )
    assert find_owners(model, [model]) == {"": model}
    for missing in ([nn.Conv2d], [Block()]):
        with pytest.raises(ConfigError, match=r"units=\.\.\. matches no module"):
            find_owners(model, missing)


class Container(nn.Module):
    """Parameters in containers, which have no forward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(2)])
        self.parts = nn.ModuleDict(
            {"a": nn.Linear(8, 8), "b": nn.ParameterDict({"shift": nn.Parameter(torch.zeros(8))})}
        )
        self.offset = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            self.parts["a"](x * self.scales[0]) * self.scales[1]
            + self.parts["b"]["shift"]
            + self.offset
        )


def test_what_containers_hold_belongs_to_the_module_around_them():
    model = nn.Sequential(nn.Linear(8, 8), Container())
    groups = check(model)
    assert names(groups) == ["0", "1", "1.parts.a"]
    assert [name for name, _ in groups[1].parameters] == [
        "1.offset",
        "1.scales.0",
        "1.scales.1",
        "1.parts.b.shift",
    ]
    assert groups[1].owner is model[1]


def test_dtypes_and_frozen_parameters_are_split():
    model = nn.Sequential(Block(), Block())
    model[0].mlp[0].weight.requires_grad_(False)
    model[1].norm.to(torch.bfloat16)
    groups = check(model)
    assert {group.name: len(group.parameters) for group in groups} == {
        "0 (float32)": 5, "0 (float32, frozen)": 1, "1 (bfloat16)": 2, "1 (float32)": 4,
    }  # fmt: skip
    stored = group_parameters(model, find_owners(model), torch.float16)
    assert {group.name: len(group.parameters) for group in stored} == {
        "0 (float16)": 5,
        "0 (float16, frozen)": 1,
        "1": 6,
    }


def test_an_integer_parameter_keeps_its_dtype():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].table = nn.Parameter(torch.arange(3), requires_grad=False)
    groups = group_parameters(model, find_owners(model), torch.bfloat16)
    assert {group.dtype for group in groups} == {torch.bfloat16, torch.int64}


def test_a_block_that_is_used_in_two_places_is_one_unit():
    block = Block()
    model = nn.Sequential(
        nn.Sequential(block, Block()), nn.Linear(8, 8), nn.Sequential(block, Block())
    )
    check(model)


def test_parameters_tied_across_blocks_are_held_once_and_brought_for_both():
    model = Model(depth=4)
    model.blocks[3].mlp[0].weight = model.blocks[0].mlp[0].weight
    groups = check(model)
    assert [len(group.parameters) for group in groups] == [1, 6, 6, 6, 5, 2]
    owners = find_owners(model)
    unit_of = {id(p): number for number, group in enumerate(groups) for _, p in group.parameters}
    assert find_users(model, owners, unit_of)[model.blocks[3]] == [4, 1]


class Shared(nn.Module):
    """Whatever the engine must get right at once: ties, containers, a block used twice, parameters
    of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(8))
        self.inner, self.embeddings = Model(), nn.Embedding(10, 8)
        self.extra = nn.Sequential(Container(), self.inner.blocks[1], Container())
        self.inner.blocks[2].mlp[2].weight = self.inner.blocks[0].mlp[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).sum() + self.extra(self.embeddings(x) + self.token).square().mean()


@pytest.mark.parametrize("units", [None, [nn.Linear], [Container, nn.LayerNorm], [Model]])
def test_the_hooks_bring_all_that_a_forward_and_its_backward_use(tmp_path: Path, units: object):
    torch.manual_seed(0)
    plain = Shared()
    check(plain, units)
    torch.manual_seed(0)
    model = Shared()
    budgets = {"gpu_memory": "2MiB", "cpu_memory": "4MiB", "cache": 0}
    infinity.wrap(
        model,
        config_of(nvme=[tmp_path], precision="fp32", poison=True, device="cpu", **budgets),
        units=units,
    )
    ids = torch.arange(10)
    with infinity.engine(model) as engine:
        for _ in range(2):
            expected, loss = plain(ids), model(ids)
            assert torch.equal(loss, expected)
            expected.backward()
            loss.backward()
        for (name, a), (_, b) in zip(
            model.named_parameters(), plain.named_parameters(), strict=True
        ):
            gradient = engine.gradient(a)
            assert gradient is not None and torch.equal(gradient, b.grad), name


# The families of transformers, one block deep or a few


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=3, n_head=2)
    )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1)
    )


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=3, num_heads=2)
    )


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32}
    return BertForMaskedLM(BertConfig(**sizes, num_hidden_layers=3, num_attention_heads=2))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "intermediate_size": 32, "image_size": 16, "patch_size": 8}
    return ViTForImageClassification(ViTConfig(**sizes, num_hidden_layers=3, num_attention_heads=2))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    return MixtralForCausalLM(
        MixtralConfig(**sizes, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1)
    )


@pytest.mark.parametrize(
    ("build", "blocks"),
    [
        (gpt2, ["transformer.h.{}"]),
        (llama, ["model.layers.{}"]),
        (t5, ["encoder.block.{}", "decoder.block.{}"]),
        (bert, ["bert.encoder.layer.{}"]),
        (vit, ["vit.layers.{}"]),
        (mixtral, ["model.layers.{}"]),
    ],
)
def test_transformers(build: Callable[[], nn.Module], blocks: list[str]):
    model = build()
    expected = [pattern.format(index) for pattern in blocks for index in range(3)]
    assert list(find_owners(model)) == expected
    groups = check(model)
    assert [name for name in names(groups) if name in expected] == expected
    for group in groups:
        if group.name in expected:
            assert len(group.parameters) == len(list(group.owner.parameters())), (
                "a block is one unit"
            )


def test_a_part_of_a_block_that_is_used_outside_of_it_is_hooked_itself():
    model = Model()
    model.outside = nn.ModuleDict({"shared": model.blocks[0].mlp})
    groups = check(model, [Block])
    unit_of = {id(p): number for number, group in enumerate(groups) for _, p in group.parameters}
    users = find_users(model, find_owners(model, [Block]), unit_of)
    assert (
        users[model.blocks[0].mlp[0]]
        == users[model.blocks[0].mlp[2]]
        == users[model.blocks[0]]
        == [1]
    )
    assert model.blocks[0].norm not in users and model.blocks[1].mlp[0] not in users


def test_t5_relative_positions_and_tied_embeddings_are_units_of_their_own_or_of_the_first_block():
    groups = check(t5())
    where = {name: group.name for group in groups for name, _ in group.parameters}
    assert where["shared.weight"] == "shared"
    assert not {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"} & set(where)
    assert (
        where["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        == "encoder.block.0"
    )


# Small neighbours


def joined(model: nn.Module) -> list[Group]:
    """What the engine makes of `model`, with what always holds."""
    owners = find_owners(model)
    groups = group_parameters(model, owners)
    result = join_small(groups, owners)
    sizes = {
        group.name: sum(p.numel() * p.itemsize for _, p in group.parameters)
        for group in (*groups, *result)
    }
    largest = max(sizes[group.name] for group in groups)
    total = sum(sizes[group.name] for group in groups)
    assert Counter(id(p) for g in result for _, p in g.parameters) == Counter(
        id(p) for g in groups for _, p in g.parameters
    )
    order = {
        id(p): number
        for number, (_, p) in enumerate(named for group in groups for named in group.parameters)
    }
    for group in result:
        assert len({(p.dtype, p.requires_grad) for _, p in group.parameters}) == 1
        assert [order[id(p)] for _, p in group.parameters] == sorted(
            order[id(p)] for _, p in group.parameters
        )
        if group not in groups:
            first = sizes[next(g.name for g in groups if g.parameters[0] is group.parameters[0])]
            assert sizes[group.name] <= max(largest / 8, min(total / 16, 1 << 20), first * 65 / 64)
    return result


def layers(count: int, width: int = 64) -> list[nn.Module]:
    return [nn.Linear(width, width) for _ in range(count)]


def test_a_long_row_of_small_layers_is_cut_into_units_of_some():
    between = nn.Sequential(nn.Embedding(1000, 64), *layers(50), nn.Linear(64, 1000))
    assert names(joined(between)) == [
        "0",
        *(f"{begin} to {begin + 4}" for begin in range(1, 51, 5)),
        "51",
    ]
    assert len(joined(nn.Sequential(*layers(50)))) == 17
    large = nn.Sequential(*(nn.Linear(1024, 1024, bias=False, device="meta") for _ in range(50)))
    assert len(joined(large)) == 50, "as large as each other, and more than a MiB"


def test_a_norm_between_blocks_goes_with_the_block_before():
    rows = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.LayerNorm(128))]
    assert names(joined(nn.Sequential(*rows))) == ["0 to 1", "2 to 3", "4 to 5", "6 to 7"]
    assert names(joined(Model(width=64))) == [
        "embeddings",
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "norm",
    ]


def test_adapters_of_frozen_blocks_are_joined_across_them():
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 2), nn.Linear(2, 256))
            for _ in range(6)
        )
    )
    for block in model:
        block[0].requires_grad_(False)
    groups = joined(model)
    assert [group.parameters[0][1].requires_grad for group in groups] == [
        False,
        True,
        False,
        False,
        False,
        False,
        False,
    ]
    assert names(groups)[1] == "0 (float32) to 5 (float32)"


def test_what_is_around_others_or_uses_theirs_stays_as_it_is():
    class Around(nn.Module):
        """A parameter of its own, in use for as long as all below."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.rows = nn.Sequential(nn.Linear(64, 64), *layers(2, width=8))

    groups = joined(Around())
    assert names(groups)[0] == "model" and len(groups[0].parameters) == 1
    tied = nn.Sequential(nn.Linear(64, 1000), *layers(4, width=8))
    tied[2].weight = tied[4].weight
    assert names(joined(tied)) == ["0", "1 to 3", "4"]


@pytest.mark.parametrize("build", [gpt2, llama, t5, bert, vit, mixtral])
def test_blocks_of_transformers_are_not_joined(build: Callable[[], nn.Module]):
    model = build()
    blocks = set(find_owners(model))
    assert blocks <= {group.name for group in joined(model)}


def test_units_that_are_given_stay_and_joining_changes_no_number_and_no_budget(tmp_path: Path):
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(400, 32), *(layers(12, width=32)), nn.Linear(32, 400))

    common = {
        "nvme": [tmp_path],
        "precision": "fp32",
        "device": "cpu",
        "cpu_memory": "16MiB",
        "cache": 0,
        "threads": 1,
    }
    found = []
    for given in (False, True):
        model = build()
        units = list(model) if given else None
        with pytest.raises(infinity.BudgetError) as refusal:
            infinity.wrap(model, config_of(gpu_memory=0, **common), units=units)
        budget = int(re.findall(r"that works is (\d+)", str(refusal.value))[0])
        infinity.wrap(model, config_of(gpu_memory=budget, **common), units=units)
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        with infinity.engine(model) as engine:
            losses = []
            for step in range(3):
                loss = model(torch.arange(20 * step, 20 * step + 20)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            found.append((losses, engine.state_dict(), len(engine.units), budget))
    (losses, weights, few, budget), (others, expected, many, least) = found
    assert losses == others and all(
        torch.equal(value, expected[name]) for name, value in weights.items()
    )
    assert (few, many) == (8, 14) and budget == least


def test_a_class_that_the_model_alone_is_of_takes_it_whole() -> None:
    """A module inside comes first, as ever."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    model = Root()
    assert find_owners(model, [Root]) == {"": model}
    nested = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    assert find_owners(nested, [nn.Sequential]) == {"1": nested[1]}
