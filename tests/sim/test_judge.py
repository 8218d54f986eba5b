"""Whom the judge charges with what was written."""

from __future__ import annotations

from strata.core.ids import Epoch, InstanceId, ReplicaId
from strata.core.keys import ClusterKeys
from strata.core.leadership import campaign_txn, resign_txn
from strata.core.txn import Put, Txn, created_at
from strata.testing.memory_store import MemoryStore
from strata.testing.network import Call
from strata.testing.virtual_time import in_virtual_time
from tests.sim.judge import Judge
from tests.sim.trace import Trace

KEYS = ClusterKeys("default")


class Court:
    """A store with a judge, and a leader "a" whose term has ended."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.judge = Judge(
            keys=KEYS,
            job=KEYS.job("job"),
            trace=Trace(keep=False),
            mourn=lambda _death: None,
            timed_out=lambda _outcome, _key: None,
        )
        self.store.subscribe(self.judge.seen)
        campaign = campaign_txn(
            KEYS,
            instance=InstanceId("a"),
            replica=ReplicaId("r1"),
            address="r1",
            lease_id=self.store.grant(60).id,
        )
        self.epoch = Epoch(self.do("a", campaign))
        self.do("a", resign_txn(KEYS, self.epoch))

    def do(self, client: str, txn: Txn) -> int:
        result = self.store.execute(txn)
        self.judge.applied(Call(client=client, kind="execute", argument=txn))
        return result.revision

    def violations(self) -> list[str]:
        self.judge.settle()
        return [violation.what for violation in self.judge.violations]


@in_virtual_time()
async def test_the_end_of_a_lease_is_not_charged_to_a_transaction_that_failed_after_it() -> None:
    court = Court()
    lease = court.store.grant(60).id
    court.do("b", Txn(success=(Put(key=KEYS.replica(ReplicaId("r2")), value=b"{}", lease=lease),)))
    court.store.revoke(lease)  # by time, with no call of anybody's
    court.do("b", resign_txn(KEYS, court.epoch))
    assert not any("had ended" in what for what in court.violations())


@in_virtual_time()
async def test_a_write_in_an_epoch_that_ended_is_found() -> None:
    court = Court()
    written = Txn(success=(Put(key=f"{KEYS.root}elsewhere", value=b"{}"),))
    court.store.execute(written)  # as a store would that does not compare
    fenced = Txn(compares=(created_at(KEYS.leader, court.epoch),), success=written.success)
    court.judge.applied(Call(client="a", kind="execute", argument=fenced))
    assert any("had ended" in violation.what for violation in court.judge.violations)
