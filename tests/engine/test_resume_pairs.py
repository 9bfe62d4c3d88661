"""A resume in another configuration leaves what was committed as it was, until it commits.

`make resume-pairs` runs more pairs of configurations: see `resume_pairs.pairs`.
"""

from __future__ import annotations

from pathlib import Path

from resume_pairs.pairs import run

PAIRS = 400


def test_committed_bytes_stay_until_the_first_commit_of_a_resume(
    tmp_path: Path, one_thread: None
) -> None:
    summary = run(PAIRS, tmp_path)
    assert not summary.wrong, "\n".join(summary.wrong[:5])
    assert sum(summary.ended.values()) == PAIRS
    assert min(summary.ended[how] for how in ENDS) > PAIRS // 100, summary.ended


ENDS = ("committed", "ConfigError", "BudgetError", "NvmeError", "Broken", "EngineClosedError")
"""How second runs end: each is tried."""
