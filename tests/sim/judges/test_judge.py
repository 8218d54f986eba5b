"""The judge's attribution of revisions to transactions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from strata.core.ids import BootId, Epoch, InstanceId, ReplicaId
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import Worker, encode
from strata.core.kv.txn import Delete, Put, Txn, created_at, unchanged
from strata.core.leadership.leader import campaign_txn, resign_txn
from strata.testing.memory_store import MemoryStore
from strata.testing.network import Call
from strata.testing.virtual_time import in_virtual_time
from tests.sim.judges.judge import Judge
from tests.sim.judges.transactions import is_of_the_past
from tests.sim.trace import Trace

KEYS = ClusterKeys("default")


def worker(boot: str, served_by: str) -> bytes:
    return encode(Worker(boot=BootId(boot), served_by=InstanceId(served_by)))


class Court:
    """A store with a judge, and an ended leader term of "a"."""

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


def sweep(epoch: Epoch) -> Txn:
    """Remove all jobs in an epoch, by a range that contains no other keys."""
    every = Delete(key=f"{KEYS.root}jobs/", range_end=f"{KEYS.root}jobs0")
    return Txn(compares=(created_at(KEYS.leader, epoch),), success=(every,))


@pytest.mark.parametrize("late", [partial(resign_txn, KEYS), sweep], ids=["one key", "a range"])
@in_virtual_time()
async def test_a_lease_expiry_is_not_attributed_to_a_transaction_that_failed_later(
    late: Callable[[Epoch], Txn],
) -> None:
    court = Court()
    lease = court.store.grant(60).id
    court.do("b", Txn(success=(Put(key=KEYS.replica(ReplicaId("r2")), value=b"{}", lease=lease),)))
    court.store.revoke(lease)  # as at the lease's expiry: no client makes this call
    court.do("b", late(court.epoch))
    assert not any("had ended" in what for what in court.violations())


@in_virtual_time()
async def test_a_write_in_an_epoch_that_ended_is_found() -> None:
    court = Court()
    written = Txn(success=(Put(key=f"{KEYS.root}elsewhere", value=b"{}"),))
    court.store.execute(written)  # as a store that does not compare would
    fenced = Txn(compares=(created_at(KEYS.leader, court.epoch),), success=written.success)
    court.judge.applied(Call(client="a", kind="execute", argument=fenced))
    assert any("had ended" in violation.what for violation in court.judge.violations)


@in_virtual_time()
async def test_a_repeated_leave_is_not_charged_with_removing_a_later_incarnation() -> None:
    court, key = Court(), KEYS.job("job").worker("w1")
    first = court.do("r1", Txn(success=(Put(key=key, value=worker("boot-1", "r1")),)))
    by_name = Txn(success=(Delete(key=key),))
    leave = Txn(compares=(created_at(key, first),), success=by_name.success)
    removal = Txn(compares=(unchanged(key, first),), success=by_name.success)
    assert not any(is_of_the_past(txn, court.judge.view.get(key)) for txn in (leave, removal, by_name))

    court.do("r2", Txn(success=(Put(key=key, value=worker("boot-1", "r2")),)))
    assert is_of_the_past(removal, court.judge.view.get(key))
    assert not is_of_the_past(leave, court.judge.view.get(key)), "it removes that incarnation still"

    court.do("r2", leave)
    second = court.do("r1", Txn(success=(Put(key=key, value=worker("boot-2", "r1")),)))
    assert is_of_the_past(leave, court.judge.view.get(key))
    assert not is_of_the_past(by_name, court.judge.view.get(key)), "it compares nothing"
    again = Txn(compares=(created_at(key, second),), success=by_name.success)
    assert not is_of_the_past(again, court.judge.view.get(key))
