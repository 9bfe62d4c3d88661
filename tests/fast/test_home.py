"""Which extents of a block may be written: never one that a commit speaks of, or will."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.durable.home import SPARE, DurableHome, ExtentState
from infinity.placement.spec import FP32, BlockSpec, Kind, Placed
from infinity.tier import NVME
from infinity.tiers.states_files import Extent

MOST = 2
"""How many records may be sealed and not committed: that of `wrap`, and that of the first
forward."""


def home(every: int = 1, cached: int = 0) -> DurableHome:
    """Of a block of 4096 elements, of which `cached` are, with two extents or three."""
    spec = BlockSpec(0, Kind.PARAM, 4096, FP32, NVME, 16384, 0, "a block")
    made = DurableHome(Placed(spec, 2, cached, every))
    made.extents = (Extent(0, 16384), Extent(16384, 16384))
    if every > 1:
        made.extents = (*made.extents, Extent(32768, made.placed.moved_bytes))
    if cached:
        made.cached = torch.zeros(made.placed.cached_bytes, dtype=torch.uint8)
    return made


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(["update", "end", "write", "seal", "commit"]), max_size=24))
def test_nothing_is_written_that_a_record_speaks_of(what: list[str]) -> None:
    """An update may be fixed, and sealed, before it ends; a commit waits for what was sealed."""
    block, is_updating = home(), False
    sealed: list[int] = []
    committed: list[int] = []

    def end() -> None:
        assert block.target() not in committed
        block.flip()

    for each in what:
        if each == "seal" and len(sealed) < MOST:
            sealed.append(block.target() if is_updating else block.version)
            block.seal(sealed[-1])
        elif each == "commit" and sealed and not is_updating:
            committed = [sealed.pop(0)]
            block.commit(committed[0])
        elif each == "end" and is_updating:
            is_updating = False
            end()
        elif not is_updating and (
            (each == "update" and block.is_free())
            or (each == "write" and (block.may_rewrite or block.is_free()))
        ):
            if each == "write":
                block.begin_rewrite()
            assert block.target() not in (*committed, *sealed)
            is_updating = each == "update"
            if not is_updating:
                end()


class Modelled:
    """A block of which one of `every` steps is committed, and what its extents would hold: for each
    of them the values of its cached and of its other part, as numbers of writes."""

    def __init__(self, every: int, cached: int) -> None:
        self.home, self.every = home(every, cached), every
        self.held = [[0, 0], [0, 0], [0, 0]]
        self.content = self.steps = 0
        self.records: list[tuple[int, int]] = []  # extents and content, the committed one first
        self.seal()
        self.commit()

    def write(self, target: int, through: bool) -> None:
        """All of it gets another content, in `target`."""
        assert target not in [extent for extent, _ in self.records]
        self.content += 1
        if through:
            assert target != SPARE
            self.held[target][0] = self.content
        self.held[target][1] = self.content

    def step(self, is_left_out: bool) -> None:
        """A step, before which what was sealed is committed."""
        self.commit()
        self.steps += 1
        left = -self.steps % self.every
        if is_left_out:
            if left == 0:
                self.seal()
            return
        assert self.home.is_free(left), "an update would wait for ever"
        target = self.home.target(left)
        assert target != self.home.version or not self.home.placed.moved_bytes
        will_be_whole = self.home.will_be_whole(left)
        self.write(target, self.home.writes_through(left))
        if left == 0 and will_be_whole:  # the commit is due before the update ends
            self.records.append((target, self.content))
            self.home.seal(target)
            assert self.home.target(left) == target
            self.home.flip(left)
            return
        self.home.flip(left)
        assert self.home.is_whole == will_be_whole
        if left == 0:
            self.seal()

    def rewrite(self) -> None:
        """A write outside of steps."""
        if not (self.home.may_rewrite or self.home.is_free()):
            self.commit()
        self.home.begin_rewrite()
        self.write(self.home.target(), self.home.writes_through())
        self.home.flip()

    def seal(self) -> None:
        """A commit is due now, as where the engine is closed."""
        if not self.home.is_whole:
            in_place = self.home.may_rewrite
            self.home.begin_rewrite()
            assert self.home.is_free()
            target = self.home.target()
            assert in_place == (target == self.home.version)
            assert target not in [extent for extent, _ in self.records]
            assert self.home.writes_through()
            self.held[target] = [self.content, self.content]
            self.home.flip()
        self.records.append((self.home.version, self.content))
        self.home.seal(self.home.version)

    def commit(self) -> None:
        """What was sealed is committed."""
        self.records = self.records[-1:]
        self.home.commit(self.records[0][0])


@settings(max_examples=1000, deadline=None)
@given(
    st.integers(2, 5),
    st.sampled_from([0, 1024, 4096]),
    st.lists(
        st.sampled_from(["update", "update", "update", "skip", "rewrite", "seal", "commit"]),
        max_size=40,
    ),
)
def test_what_is_committed_stays_whole_while_updates_alternate(
    every: int, cached: int, what: list[str]
) -> None:
    block = Modelled(every, cached)
    for each in what:
        if each in ("update", "skip"):
            block.step(is_left_out=each == "skip")
        elif each == "seal" and len(block.records) < MOST:
            block.seal()
        elif each == "rewrite":
            block.rewrite()
        else:
            block.commit()
        for extent, content in block.records:
            assert block.held[extent][1] == content
            assert not cached or block.held[extent][0] == content
        assert block.held[block.home.version][1] == block.content


@pytest.mark.parametrize("every", [2, 3, 4, 7])
@pytest.mark.parametrize("cached", [0, 1024, 4096])
def test_what_steps_make_is_whole_where_they_are_committed_and_nothing_comes_between(
    every: int, cached: int
) -> None:
    """So no commit has anything to write first, and what is cached is written by these alone."""
    block = home(every, cached)
    sealed = 0
    block.seal(sealed)
    for number in range(1, 5 * every + 1):
        left = -number % every
        block.commit(sealed)
        assert block.will_be_whole(left) or left > 0
        assert not cached or block.writes_through(left) == (left == 0)
        block.flip(left)
        if left == 0:
            assert block.is_whole
            sealed = block.version
            block.seal(sealed)


TABLE = [
    re.split(r" {2,}", line)
    for line in re.findall(r"^ +([A-Z]+ {2,}.*)$", str(ExtentState.__doc__), re.MULTILINE)
]
AT, OTHER = 1, 0
"""The extent that a row is about, and another one."""


def in_state(state: str, version: int = AT) -> DurableHome:
    """A block of which extent `AT` has this state, and `version` the content."""
    block = home()
    block.version = version
    block.states = (ExtentState.FREE, ExtentState[state], ExtentState.FREE)
    return block


def test_the_table_has_every_state() -> None:
    assert [state for state, *_ in TABLE] == [state.name for state in ExtentState]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_the_table_of_states_says_what_is_true(row: list[str]) -> None:
    state, _, update, in_place, flip, *moves = row
    target = in_state(state, OTHER)
    assert target.target() == AT
    assert target.is_free() == (update == "yes") and not target.is_pinned()
    target.pinned = AT
    assert target.is_free() == (update == "yes") and target.is_pinned()
    if flip != "-":
        target.flip()
        assert (target.version, target.states[AT].name) == (AT, flip)
    if in_place != "-":
        assert in_state(state).may_rewrite == (in_place == "yes")
    calls = [
        (in_state(state).seal, AT),
        (in_state(state, OTHER).seal, AT),
        (in_state(state, OTHER).seal, OTHER),
        (in_state(state).commit, AT),
        (in_state(state).commit, OTHER),
    ]
    for (call, extent), after in zip(calls, moves, strict=True):
        if after != "-":
            call(extent)
            assert call.__self__.states[AT].name == after, call


def test_what_is_written_in_place_may_be_committed_meanwhile() -> None:
    """As where a checkpoint is loaded: other blocks, of one extent, have records made."""
    block = in_state("FREE")
    block.begin_rewrite()
    block.seal(AT)
    assert block.target() == AT
    block.commit(AT)
    assert block.target() == AT
    block.flip()
    assert (block.version, block.states[AT], block.target()) == (AT, ExtentState.COMMITTED, OTHER)
