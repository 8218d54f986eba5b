"""Every key of a job is of a known kind, and its value matches the kind."""

from __future__ import annotations

import pytest

from strata.core.key_kinds import PROCESSES, UNKNOWN, kind_of
from strata.core.kv.records import decode, encode
from tests.unit.core.kv.test_keyspace_page import EXAMPLES, JOB

OF_JOB = [key for key in EXAMPLES if key.startswith(JOB.root)]


@pytest.mark.parametrize("key", OF_JOB)
def test_every_key_of_a_job_has_a_known_record_type(key: str) -> None:
    kind = kind_of(key, JOB.root)
    assert kind is PROCESSES or decode(kind, encode(EXAMPLES[key])) == EXAMPLES[key]


@pytest.mark.parametrize(
    "place",
    [
        "later",
        "later/x",
        "history/x",
        "history/1/x",
        "datasets/d",
        "datasets/d/later",
        "checkpoints/1",
        "checkpoints/x/1",
        "checkpoints/1/x/a/acks/1",
        "checkpoints/1/1/a",
        "checkpoints/1/1/a/later/1",
        "checkpoints/1/1/a/copies/s3",
        "pins/x/a",
        "",
    ],
)
def test_an_unknown_key_is_of_the_unknown_kind(place: str) -> None:
    assert kind_of(JOB.root + place, JOB.root) is UNKNOWN
