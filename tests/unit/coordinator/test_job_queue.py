"""Which changes make a controller look at a job."""

from __future__ import annotations

import pytest

from strata.coordinator.controllers.jobs import JobController
from strata.coordinator.view.mirror import Mirror
from strata.core.keys import ClusterKeys
from strata.core.reshaping import BEGIN_BARRIER, SAVED_BARRIER
from strata.core.txn import Event, KeyValue, WatchBatch
from strata.testing.memory_store import MemoryStore

KEYS = ClusterKeys("test")
JOB = KEYS.job("j")


class Queue(JobController):
    name = "queue"
    folders = frozenset({"world"})
    barriers = frozenset({SAVED_BARRIER})
    attempts = frozenset({"suspects"})


@pytest.mark.parametrize(
    ("key", "due"),
    [
        (JOB.head, True),
        (JOB.latest, False),
        (JOB.barrier_floor(SAVED_BARRIER, 1), True),
        (JOB.barrier_floor(BEGIN_BARRIER, 1), False),
        (JOB.outcome("step", 1, 7), False),
        (JOB.checkpoint(20, 1), True),
        (JOB.suspect(20, 1, "x", "primary", "host-a"), True),
        (JOB.ack(20, 1, "x", 0), False),
    ],
)
def test_only_what_it_named_makes_a_job_due(key: str, due: bool) -> None:
    """A world of another size waits for one barrier; a world that cannot begin, for damage: not for acks."""
    queue = Queue(keys=KEYS, mirror=Mirror(MemoryStore().client("r1"), KEYS, new_uid="uid", clock=float))
    kv = KeyValue(key=key, value=b"{}", create_revision=5, mod_revision=5, version=1)
    assert queue.wants(WatchBatch(revision=5, events=(Event(kv=kv),))) is due
