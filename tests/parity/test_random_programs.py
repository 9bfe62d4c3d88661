"""Random programs see the same bits on every placement and in plain PyTorch.

`tests/random_programs` says what a program is. A failure prints one that is as small as it can be;
paste it into a test.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infinity.checkpoint.state import EngineState
from infinity.optim.optimizer import Optimizer
from random_programs import recipes
from random_programs.comparing import difference
from random_programs.many import drawn, run
from random_programs.mutations import MUTATIONS, OF_RANKS, Mutation
from random_programs.mutations_of_uses import OF_USES
from random_programs.placements import RANKED
from random_programs.ranks import Ranks
from random_programs.refusals import COMPILES
from support import forked

EACH = 10
USES = 60
"""Programs with uses of one seed."""
SAVES = 10
FEW = {"training": 6, "uses": 36, "saves": 6}
"""Programs of the seed that `make test` runs. The other seeds have all."""
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 8))]
"""`make random-programs` runs thousands."""


@pytest.mark.parametrize("seed", SEEDS)
def test_random_programs_see_the_same_on_every_placement_and_in_plain_pytorch(
    seed: int, one_thread: None
) -> None:
    count = EACH if seed else FEW["training"]
    ran, found = run(seed, count)
    assert found is None, found
    assert ran == count


@pytest.mark.parametrize("seed", SEEDS)
def test_uses_of_weights_see_the_same_on_every_placement_and_in_plain_pytorch(
    seed: int, one_thread: None
) -> None:
    count = USES if seed else FEW["uses"]
    ran, found = run(seed, count, "uses")
    assert found is None, found
    assert ran == count


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_saved_is_the_same_wherever_it_is_loaded(seed: int, one_thread: None) -> None:
    count = SAVES if seed else FEW["saves"]
    ran, found = run(seed, count, "saves")
    assert found is None, found
    assert ran == count


def test_the_command_runs_programs_in_a_process_of_its_own(tmp_path: Path) -> None:
    words = ["--programs", 2, "--first", 7, "--processes", 1]
    (done,) = forked.run(tmp_path, "random_programs", words)
    assert done.returncode == 0, done.stderr
    assert "6 programs of seeds from 7 on: 0 seeds differ" in done.stdout


def test_programs_are_the_same_each_time_and_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn.cache_clear()
    first = drawn(1, 50)
    drawn.cache_clear()
    # Hypothesis looks for numbers there.
    (tmp_path / "full_of_numbers.py").write_text(f"NUMBERS = {list(range(50))}\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("full_of_numbers")
    assert drawn(1, 50) == first
    for recipe in first:
        assert eval(repr(recipe), dict(vars(recipes))) == recipe
        assert len(set(recipe.placements)) == recipes.EACH >= 7


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.breaks)
def test_random_programs_find_a_broken_engine(mutation: Mutation, one_thread: None) -> None:
    some = [recipe for seed in range(4) for recipe in drawn(seed, EACH)]
    with mutation():
        assert any(difference(recipe) is not None for recipe in (some[mutation.found_by], *some))


@pytest.mark.parametrize("mutation", OF_USES, ids=lambda mutation: mutation.breaks)
def test_uses_of_weights_find_a_broken_engine(mutation: Mutation, one_thread: None) -> None:
    seed, number = divmod(mutation.found_by, USES)
    recipe = drawn(seed, USES, "uses")[number]
    if not COMPILES and "compiled" in repr(recipe):
        pytest.skip("this torch cannot compile what the mutation breaks")
    assert difference(recipe) is None
    with mutation():
        assert difference(recipe) is not None


BROKEN: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "a resume forgets the steps": (Optimizer, "take_header", lambda *_: None),
    "a load forgets the steps": (Optimizer, "load_header", lambda *_: None),
    "a save leaves out moments": (EngineState, "is_zero", lambda _, series: series.is_moment),
}


@pytest.mark.parametrize("name", BROKEN)
def test_round_trips_find_a_broken_engine(
    name: str, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*BROKEN[name])
    assert any(difference(recipe) is not None for recipe in drawn(0, SAVES, "saves")[:3])


@pytest.mark.timeout(240)
def test_random_programs_see_the_same_on_two_ranks_of_every_stage(
    tmp_path: Path, one_thread: None
) -> None:
    with Ranks(tmp_path) as ranks:
        assert ranks.difference(_on_two_ranks(6)) is None


@pytest.mark.timeout(240)
def test_random_programs_see_the_same_on_three_ranks(tmp_path: Path, one_thread: None) -> None:
    three = [recipe for recipe in drawn(2, 20, "ranks") if recipe.ranks == 3]
    some = [*[r for r in three if r.own][:2], *[r for r in three if not r.own][:1]]
    with Ranks(tmp_path) as ranks:
        assert [ranks.difference(recipe) for recipe in some] == [None] * 3
        assert ranks.refused == 0


@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", range(len(OF_RANKS)), ids=lambda n: OF_RANKS[n].breaks)
def test_two_ranks_find_a_broken_engine(number: int, tmp_path: Path, one_thread: None) -> None:
    with Ranks(tmp_path, number) as ranks:
        assert ranks.difference(_on_two_ranks(OF_RANKS[number].found_by)) is not None


def _on_two_ranks(number: int) -> recipes.Recipe:
    """A program of one process, on two ranks of each stage."""
    return dataclasses.replace(drawn(0, EACH)[number], placements=tuple(RANKED), ranks=2)


SGD = recipes.Training("sgd")
GATE = recipes.Block("sometimes gate")
LINEAR = recipes.Block("linear")
TRAIN = (("train", 4), ("step",), ("zero_grad", True))
LEFT_OUT = {
    "in the first layer": recipes.Recipe(
        recipes.Model((GATE,), (0,)), TRAIN, SGD, ("stage 3 in memory", "stage 2")
    ),
    "around units that span one another": recipes.Recipe(
        recipes.Model((LINEAR, LINEAR), (0, 1), tied=((0, 1),), units="groups", scales=True),
        TRAIN,
        SGD,
        ("stage 2, gradients at home", "stage 3 in memory"),
    ),
    "before a step whose units stay whole": recipes.Recipe(
        recipes.Model((LINEAR, GATE), (0, 1), units="leaves", scales=True),
        TRAIN * 2,
        SGD,
        ("stage 1",),
    ),
}


FOUND = {
    "a view that a broken backward left behind": recipes.Recipe(
        recipes.Model((LINEAR,), (("checkpoint", False, (0,)),)),
        (
            ("use", "scripted", ("checkpoint",), (0, 1), 0, "inside", "backward"),
            ("use", "linear", (), (0, 0), 0, "before", "backward"),
        ),
        placements=("speculative",),
        whole=True,
    ),
    "a list with a handle whose parameter is shown": recipes.Recipe(
        recipes.Model(
            (LINEAR, LINEAR, recipes.Block("borrows linear"), LINEAR),
            (("checkpoint", False, (0, 1, 2, 3)),),
        ),
        (
            ("use", "linear", (), (0, 0), 0, "alone", "backward"),
            ("use", "linear", (), (0, 0), 0, "alone", "backward"),
            ("use", "foreach", ("checkpoint",), (0, 12), 0, "before", "backward"),
        ),
        placements=("gpu",),
        whole=True,
    ),
    "a view saved in a forward, which a step outdates": recipes.Recipe(
        recipes.Model((LINEAR,), (("checkpoint", True, (0,)),)),
        (
            ("use", "func.vmap", (), (0, 1), 0, "inside", "later"),
            *(("train", 1), ("step",), ("zero_grad", True), ("later",), ("step",)),
        ),
        placements=("cpu",),
        whole=True,
    ),
    "a custom function in a checkpoint whose backward is recorded": recipes.Recipe(
        recipes.Model(
            (LINEAR, recipes.Block("borrows keeps")),
            (("checkpoint", False, (0, 1)),),
        ),
        (("use", "linear", (), (0, 0), 0, "before", "penalty"),),
        placements=("gpu",),
        whole=True,
    ),
    "a weight in tiles that was frozen for a forward": recipes.Recipe(
        recipes.Model((recipes.Block("borrow"),), (0,), width=24, tiles=1024),
        (
            ("use", "linear", (), (0, 0), 0, "alone", "thawed"),
            ("use", "linear", (), (0, 0), 0, "alone", "backward"),
        ),
        SGD,
        placements=("gpu",),
        whole=True,
    ),
    "a weight that is used after a backward that an exception has cut off": recipes.Recipe(
        recipes.Model((LINEAR,), (0,)),
        (
            ("use", "linear", ("reentrant", "recomputes"), (0, 0), 0, "alone", "backward"),
            ("use", "functionalize", (), (0, 0), 0, "alone", "thawed"),
        ),
        placements=("gpu",),
        whole=True,
    ),
    "a view of a detached weight in tiles, which a step outdates": recipes.Recipe(
        recipes.Model((recipes.Block("borrows linear"),), (0,), width=24, tiles=1024),
        (
            ("use", "detach", (), (0, 0), 0, "alone", "later"),
            *(("train", 1), ("step",), ("zero_grad", True), ("later",)),
        ),
        placements=("gpu",),
        whole=True,
    ),
    "a tile that was never updated in a checkpoint": recipes.Recipe(
        recipes.Model((LINEAR, recipes.Block("norm")), (0, 1), width=24, tiles=1024),
        (
            *(("freeze", 1, True), ("train", 0), ("step",), ("freeze", 1, False), ("save",)),
            *(("train", 0), ("step",), ("zero_grad", True), ("load",), ("look", "states")),
        ),
        placements=("activations",),
    ),
}
"""Programs that differed once."""


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_once_is_the_same_everywhere(name: str, one_thread: None) -> None:
    assert difference(FOUND[name]) is None


@pytest.mark.timeout(240)
def test_ranks_leave_out_parameters(tmp_path: Path, one_thread: None) -> None:
    with Ranks(tmp_path) as ranks:
        for name, recipe in LEFT_OUT.items():
            found = ranks.difference(dataclasses.replace(recipe, ranks=2, own=True))
            assert found is None, name
        assert ranks.refused == 0


@pytest.mark.timeout(240)
def test_an_engine_closes_after_ranks_have_used_units_in_different_orders(
    tmp_path: Path, one_thread: None
) -> None:
    model = recipes.Model((LINEAR, GATE), (("checkpoint", False, (0, 1)),))
    recipe = recipes.Recipe(model, (("train", 5),), SGD, ("stage 3",), ranks=2, own=True)
    with Ranks(tmp_path) as ranks:
        assert ranks.difference(recipe) is None
        assert ranks.refused == 1
        assert ranks.difference(dataclasses.replace(recipe, placements=("stage 0",))) is None
        assert ranks.refused == 1, "at stages 0 to 2 it trains, as with DDP"


def test_a_program_that_differs_is_shrunk_to_what_it_differs_by(one_thread: None) -> None:
    forgets_nothing = MUTATIONS[0]
    with forgets_nothing():
        _, found = run(0, 40)
    assert found is not None
    smallest = eval(found.partition("difference(")[2].rpartition(")")[0], dict(vars(recipes)))
    assert len(smallest.model.blocks) == 2
    assert len(smallest.program) <= 7
    assert len(smallest.placements) == 1


def test_micro_batches_are_computed_by_as_many_threads_as_a_loop_of_the_callers(
    one_thread: None,
) -> None:
    """Another number of threads divides a product into other sums. It shows where OMP_NUM_THREADS
    does not say 1."""
    blocks = (
        recipes.Block("linear"),
        recipes.Block("buffer"),
        recipes.Block("buffer"),
        recipes.Block("dropout"),
    )
    model = recipes.Model(blocks, (0, 0, 1, 0, 2, 3), width=24)
    assert (
        difference(
            recipes.Recipe(
                model, (("accumulate", (0, 3, 2), "vertical", "sum"),), placements=("cpu",)
            )
        )
        is None
    )
