"""Which settings ranks may set differently, and how a difference is told."""

from __future__ import annotations

from infinity.config import Config, Tuning
from infinity.sharding.alike import MAY_DIFFER, Fact, difference, digest_of, settings_of


def test_every_field_is_compared_unless_a_reason_says_why_not() -> None:
    fields = {*Config.model_fields, *Tuning.model_fields}
    assert set(MAY_DIFFER) <= fields
    assert all(len(reason.split()) > 2 for reason in MAY_DIFFER.values())
    compared = {fact.name for fact in settings_of(Config())}
    assert compared == fields - set(MAY_DIFFER)
    # What decides numbers.
    assert compared >= {
        "precision",
        "moment_precision",
        "gradient_precision",
        "algorithm",
        "stage",
        "update",
        "delayed_after",
        "recompute",
    }


def test_a_difference_names_ranks_and_values() -> None:
    same, other = [Fact("a", "1"), Fact("b", "2")], [Fact("a", "1"), Fact("b", "3")]
    assert digest_of(same) != digest_of(other)
    assert difference({0: same, 1: same, 4: other}) == "b is 2 on ranks 0 and 1 and 3 on rank 4"
    assert difference({0: same, 1: same[:1]}) == "b is 2 on rank 0 and missing on rank 1"
    swapped = difference({0: same, 1: same[::-1]})
    assert swapped == "the next in order is a on rank 0 and b on rank 1"
    many = difference({rank: other if rank == 3 else same for rank in range(32)})
    assert many == "b is 2 on ranks 0, 1, 2, 4, 5, 6, 7, 8 and 23 more and 3 on rank 3"
