"""Which extents of a block may be written: never one that a commit speaks of, or will."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.placement.spec import FP32, BlockSpec, Kind, Placed
from infinity.tiers.drives import Extent
from infinity.tiers.home import Home

MOST = 2
"""How many records may be sealed and not committed: that of `wrap`, and that of the first
forward."""


def home() -> Home:
    spec = BlockSpec(0, Kind.PARAM, 1024, FP32, "nvme", 4096, 0, "a block")
    made = Home(Placed(spec))
    made.extents = (Extent(0, 4096), Extent(4096, 4096))
    return made


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(["update", "end", "write", "seal", "commit"]), max_size=24))
def test_nothing_is_written_that_a_record_speaks_of(what: list[str]) -> None:
    """An update may be fixed, and sealed, before it ends; a commit waits for what was sealed."""
    block, is_updating = home(), False
    sealed: list[int] = []
    committed: list[int] = []

    def end() -> None:
        assert block.target not in committed
        block.flip()

    for each in what:
        if each == "seal" and len(sealed) < MOST:
            sealed.append(block.target if is_updating else block.version)
            block.seal(sealed[-1])
        elif each == "commit" and sealed and not is_updating:
            committed = [sealed.pop(0)]
            block.durable = committed[0]
        elif each == "end" and is_updating:
            is_updating = False
            end()
        elif not is_updating and (
            (each == "update" and block.is_free)
            or (each == "write" and (block.is_free or block.rewrite()))
        ):
            assert block.target not in (*committed, *sealed)
            is_updating = each == "update"
            if not is_updating:
                end()
