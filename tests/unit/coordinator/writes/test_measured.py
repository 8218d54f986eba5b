"""A measuring store's errors when etcd has gone back to an older revision."""

from __future__ import annotations

import pytest

from strata.coordinator.measures import Measures
from strata.coordinator.writes.measured import MeasuredStore
from strata.core.kv.store import Store
from strata.core.kv.txn import Put, Range, RangeResult, Txn, TxnResult
from strata.errors import ClusterReplaced, Unavailable


class WentBack:
    """A store that answers every request as `strata.etcd` does once it has seen an older revision."""

    async def read(self, _request: Range) -> RangeResult:
        raise ClusterReplaced("etcd e1 is at revision 7, and was at 9", hint="restore it")

    async def execute(self, _txn: Txn) -> TxnResult:
        raise ClusterReplaced("etcd e1 is at revision 8, and was at 9", hint="restore it")


async def test_callers_receive_unavailable_and_the_replica_receives_the_cause() -> None:
    """A save under way then continues once its session is served again, or reports that the cluster was restored."""
    store: Store = WentBack()  # type: ignore[assignment]  # the store gets no other call
    measured = MeasuredStore(store, Measures())
    with pytest.raises(Unavailable, match="is at revision 7") as caught:
        await measured.read(Range(key="k"))
    assert caught.value.hint == "restore it"
    with pytest.raises(Unavailable, match="is at revision 8"):
        await measured.execute(Txn(success=(Put(key="k", value=b"v"),)))
    assert "is at revision 7" in measured.replaced.result().message, "the first counts"
