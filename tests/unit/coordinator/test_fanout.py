"""How each part of a replica treats a batch of changes, whichever client wrote it."""

from __future__ import annotations

import pytest

from strata.core.kv.txn import Put, Txn, delete_prefix
from tests.not_none import not_none
from tests.unit.coordinator.rig import in_rig
from tests.unit.coordinator.serving_rig import JOB, Cluster, cluster


@pytest.mark.parametrize(
    "name", ["barriers/b/x/1/outcome", "barriers/b/1/x/outcome", "barriers/b/x/floor", "checkpoints/x/1"]
)
@in_rig(cluster, 1)
async def test_a_key_written_by_hand_ends_no_replica(c: Cluster, name: str) -> None:
    c.store.execute(Txn(success=(Put(key=JOB.root + name, value=b"{}"),)))
    await c["r1"].context.mirror.fresh()
    mine = c.store.execute(Txn(success=(Put(key=JOB.root + "x", value=b"{}"),))).revision
    await c["r1"].context.mirror.at_least(mine)
    assert not not_none(c["r1"].task).done()
    c.store.execute(Txn(success=(delete_prefix(JOB.root),)))  # remove the malformed key
