"""Random programs see the same bits on every placement and in plain PyTorch.

`tests/random_programs` says what a program is. A failure prints one that is as small as it can be; paste it into a test.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CHILD
from random_programs import recipes
from random_programs.comparing import difference
from random_programs.many import report
from random_programs.mutations import MUTATIONS, Mutation

EACH = 10


@pytest.mark.parametrize("first", range(0, 200, EACH))
def test_random_programs_see_the_same_on_every_placement_and_in_plain_pytorch(first: int, one_thread: None) -> None:
    for number in range(first, first + EACH):
        recipe = recipes.draw(number)
        found = difference(recipe)
        if found is not None:
            pytest.fail(f"program {number}: {report(recipe, found)}")


def test_the_command_runs_programs_in_processes_of_its_own() -> None:
    command = [sys.executable, "-m", "random_programs", "--programs", "2", "--first", "7", "--processes", "2"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, **CHILD)
    assert done.returncode == 0, done.stderr
    assert "2 programs from number 7 on: 0 differ" in done.stdout


def test_programs_are_the_same_each_time_and_can_be_pasted() -> None:
    names = vars(recipes)
    for number in range(50):
        recipe = recipes.draw(number)
        assert recipe == recipes.draw(number)
        assert eval(repr(recipe), dict(names)) == recipe
        assert len(set(recipe.placements)) == recipes.EACH >= 7


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.breaks)
def test_random_programs_find_a_broken_engine(mutation: Mutation, one_thread: None) -> None:
    with mutation():
        assert any(difference(recipes.draw(number)) is not None for number in (mutation.found_by, *range(30)))


def test_micro_batches_are_computed_by_as_many_threads_as_a_loop_of_the_callers(one_thread: None) -> None:
    """Another number of threads divides a product into other sums. It shows where OMP_NUM_THREADS does not say 1."""
    blocks = (recipes.Block("linear"), recipes.Block("buffer"), recipes.Block("buffer"), recipes.Block("dropout"))
    model = recipes.Model(blocks, (0, 0, 1, 0, 2, 3), width=24)
    assert difference(recipes.Recipe(model, (("accumulate", (0, 3, 2), "vertical", "sum"),), placements=("cpu",))) is None
