"""A restored cluster is another one of the same lineage."""

from __future__ import annotations

import pytest

from strata.core.lineage import lineage, successor
from strata.errors import InvalidArgument

FIRST = "0b6f4a9e2d714c53b8e1f7a2c9d05e36"


def test_the_lineage_of_a_cluster_never_changes() -> None:
    once = successor(FIRST, "aa")
    twice = successor(once, "bb")
    assert (once, twice) == (f"{FIRST}.aa", f"{FIRST}.bb")
    assert {lineage(uid) for uid in (FIRST, once, twice)} == {FIRST}


def test_what_cannot_be_an_id_is_no_uid() -> None:
    with pytest.raises(InvalidArgument):
        successor("a/b", "aa")
