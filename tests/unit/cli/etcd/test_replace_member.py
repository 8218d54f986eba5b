"""`strata etcd replace-member`: its changes of the members, their order, and how a new run continues."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from strata.cli.etcd import replace_member
from strata.cli.etcd.replace_member import Replacement, begin, finish
from strata.errors import ConfigError, NotFound, Refused, Unavailable
from tests.unit.cli.fake_etcd import NOT_IN_SYNC, FakeCluster

UNSETTLED = Unavailable("etcd h1:2379: UNAVAILABLE: etcdserver: unhealthy cluster")


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replace_member, "POLL_S", 0.001)


async def begun(
    cluster: FakeCluster,
    name: str = "etcd-3",
    *,
    peer_url: str | None = None,
    even_if_healthy: bool = False,
    report: Callable[[str], None] = lambda _text: None,
) -> Replacement:
    replacement = Replacement(name=name)
    await begin(
        cluster.store,
        replacement,
        peer_url=peer_url,
        even_if_healthy=even_if_healthy,
        deadline=time.monotonic() + 5.0,
        report=report,
    )
    return replacement


async def finished(cluster: FakeCluster, replacement: Replacement, *, limit_s: float = 5.0) -> list[str]:
    reports: list[str] = []
    await finish(
        cluster.store,
        replacement,
        deadline=time.monotonic() + limit_s,
        interrupted=asyncio.Event(),
        report=reports.append,
    )
    return reports


async def test_a_lost_member_is_removed_and_then_added_as_a_learner() -> None:
    cluster = FakeCluster(silent=(3,))
    replacement = await begun(cluster)
    assert cluster.calls == ["remove 3", "add http://h3:2380"]
    assert cluster.there[0xA0].learner
    assert replacement.environment() == {
        "ETCD_NAME": "etcd-3",
        "ETCD_INITIAL_CLUSTER": "etcd-1=http://h1:2380,etcd-2=http://h2:2380,etcd-3=http://h3:2380",
        "ETCD_INITIAL_CLUSTER_STATE": "existing",
        "ETCD_INITIAL_ADVERTISE_PEER_URLS": "http://h3:2380",
    }


async def test_replace_member_waits_for_a_leader_election() -> None:
    cluster = FakeCluster(silent=(3,))
    cluster.electing = 3
    await begun(cluster)
    assert cluster.calls == ["remove 3", "add http://h3:2380"]


async def test_a_cluster_without_a_leader_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replace_member, "ELECTION_S", 0.05)
    cluster = FakeCluster(silent=(3,))
    cluster.leader_id = 0
    with pytest.raises(Refused, match="0 of 3 voters would be healthy"):
        await begun(cluster)
    assert cluster.calls == []


async def test_a_member_given_by_its_id_keeps_its_name_and_may_move() -> None:
    cluster = FakeCluster(silent=(3,))
    replacement = await begun(cluster, "3", peer_url="https://new:2380")
    assert replacement.name == "etcd-3"
    assert "etcd-3=https://new:2380" in replacement.initial_cluster


@pytest.mark.parametrize(
    ("cluster", "name", "reason"),
    [
        (FakeCluster(), "etcd-3", "is a healthy voter"),
        (FakeCluster(silent=(2, 3)), "etcd-3", "1 of 3 voters would be healthy"),
        (FakeCluster(2, silent=(2,)), "etcd-2", "1 of 2 voters would be healthy"),
        (FakeCluster(), "etcd-9", "no member is named etcd-9, and none is missing"),
        (FakeCluster(silent=(3,)), "etcd-9", "etcd-3 does not answer"),
        (FakeCluster(2), "etcd-3", "its peer URL is not known"),
    ],
)
async def test_a_refused_replacement_changes_nothing(cluster: FakeCluster, name: str, reason: str) -> None:
    with pytest.raises((Refused, NotFound), match=reason):
        await begun(cluster, name)
    assert cluster.calls == []


async def test_a_healthy_leader_hands_over_before_it_is_removed() -> None:
    cluster = FakeCluster()
    await begun(cluster, "etcd-1", even_if_healthy=True)
    assert cluster.calls == ["lead 2", "remove 1", "add http://h1:2380"]


async def test_a_second_learner_is_refused() -> None:
    cluster = FakeCluster(5, silent=(4, 5))
    await begun(cluster, "etcd-5")
    with pytest.raises(Refused, match="is a learner already"):
        await begun(cluster, "etcd-4")
    assert cluster.calls == ["remove 5", "add http://h5:2380"]


async def test_changes_whose_answer_was_lost_are_not_made_twice() -> None:
    cluster = FakeCluster(silent=(3,))
    cluster.lost = True
    cluster.failing = {"remove": [Unavailable("lost")], "add": [Unavailable("lost")]}
    replacement = await begun(cluster)
    assert cluster.calls == ["remove 3", "add http://h3:2380"]
    assert replacement.added_id == 0xA0


async def test_changes_wait_until_etcd_takes_them() -> None:
    cluster = FakeCluster(silent=(3,))
    cluster.failing = {"remove": [UNSETTLED], "add": [UNSETTLED, UNSETTLED]}
    await begun(cluster)
    assert cluster.calls == ["remove 3"] * 2 + ["add http://h3:2380"] * 3


async def test_another_lost_voter_that_keeps_etcd_from_adding_is_named() -> None:
    cluster, reports = FakeCluster(5, silent=(4, 5)), list[str]()
    cluster.failing = {"add": [UNSETTLED, UNSETTLED]}
    await begun(cluster, "etcd-5", report=reports.append)
    assert reports == [
        "removed etcd-5 (member 5)",
        "waiting: etcd does not add a member while etcd-4 is not connected: start or replace that one first",
        "added learner a0 at http://h5:2380",
    ]


@pytest.mark.parametrize("start", ["", "etcd-3"])
async def test_a_second_run_continues_with_the_learner(start: str) -> None:
    cluster = FakeCluster(silent=(3,))
    await begun(cluster)
    if start:
        cluster.started(start)
    calls = list(cluster.calls)
    replacement = await begun(cluster, peer_url=None if start else "http://h3:2380")
    assert replacement.resumed
    assert (replacement.added_id, replacement.peer_url) == (0xA0, "http://h3:2380")
    assert cluster.calls == calls


@pytest.mark.parametrize("name", ["etcd-3", "etcd-33"])
async def test_a_learner_that_has_not_started_is_resumed_only_by_its_peer_url(name: str) -> None:
    """The learner has no name yet.

    After a mistyped name, the hint must not tell the user to start a member in its place.
    """
    cluster = FakeCluster(silent=(3,))
    await begun(cluster)
    calls = list(cluster.calls)
    with pytest.raises(NotFound, match=f"no member is named {name}") as error:
        await begun(cluster, name)
    assert error.value.hint == (
        f"if learner a0, which has not started, is to be {name}: --peer-url http://h3:2380"
    )
    assert cluster.calls == calls


async def test_a_run_interrupted_after_the_removal_continues_with_a_peer_url() -> None:
    cluster = FakeCluster(silent=(3,))
    cluster.there.pop(3)
    await begun(cluster, peer_url="http://h3:2380")
    assert cluster.calls == ["add http://h3:2380"]


@pytest.mark.parametrize("url", ["h3:2380", "http://h3", "ftp://h3:1", "http://:1"])
async def test_a_peer_url_is_checked_before_anything_is_done(url: str) -> None:
    cluster = FakeCluster(silent=(3,))
    with pytest.raises(ConfigError, match="is no peer URL"):
        await begun(cluster, peer_url=url)
    assert cluster.calls == []


async def test_the_learner_is_promoted_once_it_has_started_and_caught_up() -> None:
    cluster = FakeCluster(silent=(3,))
    replacement = await begun(cluster)
    assert await finished(cluster, replacement, limit_s=0.0) == [
        "waiting: etcd-3 is not started yet at http://h3:2380"
    ]
    assert replacement.state == "added"
    cluster.started("etcd-3")
    cluster.failing = {"promote": [NOT_IN_SYNC, Unavailable("no answer")]}
    reports = await finished(cluster, replacement)
    assert reports[0] == "waiting: etcd-3 has started, and reads the data of the others"
    assert replacement.state == "promoted"
    assert not cluster.there[0xA0].learner
    assert await finished(cluster, replacement) == []


async def test_a_member_promoted_by_another_client_counts_as_replaced() -> None:
    cluster = FakeCluster(silent=(3,))
    replacement = await begun(cluster)
    cluster.started("etcd-3")
    cluster.lost = True  # another promotion took effect, so etcd refuses this run's own
    cluster.failing = {"promote": [Refused("etcd h1:2379: etcdserver: can only promote a learner member")]}
    await finished(cluster, replacement)
    assert replacement.state == "promoted"


async def test_a_learner_removed_by_another_client_ends_the_wait() -> None:
    cluster = FakeCluster(silent=(3,))
    replacement = await begun(cluster)
    cluster.there.pop(0xA0)
    with pytest.raises(Refused, match="learner a0 was removed meanwhile"):
        await finished(cluster, replacement)


async def test_a_permanent_refusal_ends_the_wait() -> None:
    cluster = FakeCluster(silent=(3,))
    replacement = await begun(cluster)
    cluster.started("etcd-3")
    cluster.failing = {"promote": [Refused("etcd h1:2379: etcdserver: permission denied")]}
    with pytest.raises(Refused, match="permission denied"):
        await finished(cluster, replacement)
