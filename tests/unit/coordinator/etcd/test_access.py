"""The etcd versions that a coordinator accepts, and its description of etcd's members."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from strata.coordinator.etcd.access import check_versions, member_statuses
from strata.errors import ConfigError, StrataError, Unavailable
from strata.etcd import EtcdStore, MemberStatus

GOOD = MemberStatus(
    endpoint="a:1",
    cluster_id=1,
    member_id=7,
    version="3.5.30",
    leader_id=7,
    raft_term=1,
    raft_index=1,
    revision=1,
    db_bytes=1000,
    db_bytes_in_use=500,
    learner=False,
    errors=(),
)


def store(**statuses: MemberStatus | StrataError) -> EtcdStore:
    """Return a store that implements `cluster.statuses` only."""

    class Cluster:
        async def statuses(self) -> dict[str, MemberStatus | StrataError]:
            return dict(statuses)

    class Fake:
        cluster = Cluster()

    return cast("EtcdStore", Fake())


@pytest.mark.parametrize(
    ("other", "bugs"), [(Unavailable("away"), []), (replace(GOOD, version="3.5.12"), ["15247"])]
)
async def test_an_etcd_version_with_known_bugs_is_logged_with_its_bugs(
    other: MemberStatus | StrataError, bugs: list[str]
) -> None:
    with capture_logs() as logs:
        await check_versions(store(a=GOOD, b=other))
    assert [(entry["event"], entry["endpoint"]) for entry in logs] == [("etcd_has_known_bugs", "b")] * len(
        bugs
    )
    assert all(bug in entry["reason"] for bug, entry in zip(bugs, logs, strict=True))


async def test_a_version_that_is_too_old_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"b: .*3\.3\.27"):
        await check_versions(store(a=GOOD, b=replace(GOOD, version="3.3.27")))


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (GOOD, {"healthy": True, "leader": True, "error": "", "db_size_bytes": 1000}),
        (replace(GOOD, leader_id=9), {"healthy": True, "leader": False}),
        (replace(GOOD, leader_id=0), {"healthy": False, "error": "it knows no leader"}),
        (replace(GOOD, errors=("NOSPACE",)), {"healthy": False, "error": "NOSPACE"}),
        (Unavailable("refused"), {"healthy": False, "error": "refused", "version": ""}),
    ],
)
async def test_an_etcd_member_status_has_the_expected_fields(
    status: MemberStatus | StrataError, expected: dict[str, Any]
) -> None:
    (member,) = await member_statuses(store(a=status))
    assert member.endpoint == "a"
    assert {name: getattr(member, name) for name in expected} == expected
