"""`strata etcd defrag` and `strata etcd alarm --disarm`: the order of members, and the errors that end them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from strata.cli.etcd import defrag
from strata.cli.etcd.alarm import disarm
from strata.cli.etcd.defrag import Defragmentation, Freed, defragment
from strata.cli.etcd.remedies import Connection
from strata.cli.etcd.view import look
from strata.errors import NotFound, Refused, Unavailable
from strata.etcd import Alarm, MemberStatus
from tests.unit.cli.fake_etcd import FakeCluster

ETCD = Connection(endpoints=("h1:2379",))


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defrag, "SETTLE_S", 0.001)
    monkeypatch.setattr(defrag, "POLL_S", 0.001)


async def defragmented(
    cluster: FakeCluster,
    *,
    member: str | None = None,
    compact: bool = False,
    stall_all: bool = False,
    timeout_s: float = 0.05,
    after_each: Callable[[asyncio.Event], None] = lambda _interrupted: None,
) -> Defragmentation:
    done, interrupted = Defragmentation(), asyncio.Event()

    def report_freed(_freed: Freed) -> None:
        after_each(interrupted)

    await defragment(
        cluster.store,
        done,
        member=member,
        compact=compact,
        stall_all=stall_all,
        timeout_s=timeout_s,
        interrupted=interrupted,
        report=lambda _text: None,
        report_freed=report_freed,
    )
    return done


async def test_followers_first_and_the_leader_last() -> None:
    cluster = FakeCluster()
    done = await defragmented(cluster, compact=True)
    assert cluster.calls == ["compact 40", "defrag 2", "defrag 3", "defrag 1"]
    first = done.freed[0]
    assert (first.member, first.before_bytes, first.after_bytes) == ("etcd-2", 1000, 100)
    assert done.compacted_revision == 40


async def test_a_member_is_defragmented_once_its_compaction_is_over() -> None:
    cluster = FakeCluster()
    cluster.shrinking[2] = [1000 >> step for step in range(8)]
    await defragmented(cluster, compact=True, member="etcd-2")
    assert cluster.shrinking[2] == []
    assert cluster.calls == ["compact 40", "defrag 2"]


async def test_a_leader_that_changes_meanwhile_is_still_the_last() -> None:
    cluster = FakeCluster()
    await defragmented(cluster, after_each=lambda _event: setattr(cluster, "leader_id", 3))
    assert cluster.calls == ["defrag 2", "defrag 1", "defrag 3"]


async def test_a_single_member_can_be_defragmented() -> None:
    cluster = FakeCluster()
    await defragmented(cluster, member="etcd-3")
    assert cluster.calls == ["defrag 3"]
    with pytest.raises(NotFound):
        await defragmented(cluster, member="etcd-9")


async def test_ctrl_c_ends_defrag_between_two_members() -> None:
    cluster = FakeCluster()
    done = await defragmented(cluster, after_each=asyncio.Event.set)
    assert done.interrupted
    assert cluster.calls == ["defrag 2"]


async def test_a_member_lost_during_defrag_ends_it() -> None:
    cluster = FakeCluster()
    with pytest.raises(Refused, match="etcd-2 does not answer"):
        await defragmented(cluster, after_each=lambda _event: cluster.silent.add(2))
    assert cluster.calls == ["defrag 2"]


async def test_defrag_skips_one_silent_member_of_five() -> None:
    cluster = FakeCluster(5, silent=(4,))
    done = await defragmented(cluster)
    assert [freed.member for freed in done.freed] == ["etcd-2", "etcd-3", "etcd-5", "etcd-1"]
    assert done.silent == ["etcd-4"]


async def test_a_member_that_does_not_return_in_time_is_an_error() -> None:
    cluster = FakeCluster()
    cluster.failing = {"defragment": [Unavailable("no answer")]}
    with pytest.raises(Unavailable, match=r"etcd-2 is not back 0\.05 s after"):
        await defragmented(cluster)


class Starting(FakeCluster):
    """A member that gives these answers after its defragmentation, before it serves: an error, or no leader (None)."""

    def __init__(self, *answers: Unavailable | None) -> None:
        super().__init__()
        self.answers = list(answers)

    async def status(self, endpoint: str, *, timeout_s: float | None = None) -> MemberStatus:
        status = await super().status(endpoint, timeout_s=timeout_s)
        if not self.answers:
            return status
        if (error := self.answers.pop(0)) is not None:
            raise error
        return replace(status, leader_id=0)


async def test_a_member_is_back_once_it_answers_and_knows_a_leader() -> None:
    cluster = Starting(Unavailable("starting"), None, None)
    (freed,) = (await defragmented(cluster, member="etcd-2", timeout_s=30.0)).freed
    assert freed.member == "etcd-2"
    assert not cluster.answers


async def test_a_member_that_knows_no_leader_in_time_is_not_back() -> None:
    cluster = Starting(*[None] * 10_000)
    with pytest.raises(Unavailable, match=r"etcd-2 is not back .*: it knows no leader") as raised:
        await defragmented(cluster, member="etcd-2")
    assert "strata etcd status" in raised.value.hint


async def test_nothing_is_compacted_if_defrag_is_refused() -> None:
    cluster = FakeCluster(1)
    with pytest.raises(Refused, match="the only voter"):
        await defragmented(cluster, compact=True)
    assert cluster.calls == []
    await defragmented(cluster, compact=True, stall_all=True)
    assert cluster.calls == ["compact 40", "defrag 1"]


async def test_alarms_are_disarmed_once_their_cause_is_resolved() -> None:
    cluster = FakeCluster()
    full, corrupt = Alarm(member_id=1, kind="NOSPACE"), Alarm(member_id=2, kind="CORRUPT")
    replaced = Alarm(member_id=0xBEEF, kind="CORRUPT")
    cluster.alarms_on = [full, corrupt, replaced]
    disarmed, refusals = await disarm(cluster.store, await look(cluster.store), ETCD, quota_bytes=1000)
    assert cluster.alarms_on == [full, corrupt]
    assert [(each.member, each.alarm) for each in disarmed] == [("beef", "CORRUPT")]
    assert [refusal.hint for refusal in refusals] == [
        "first strata etcd defrag --compact --etcd h1:2379",
        "replace it: strata etcd replace-member etcd-2 --etcd h1:2379",
    ]
    cluster.bytes = dict.fromkeys(cluster.bytes, 100)
    await disarm(cluster.store, await look(cluster.store), ETCD, quota_bytes=1000)
    assert cluster.alarms_on == [corrupt]
