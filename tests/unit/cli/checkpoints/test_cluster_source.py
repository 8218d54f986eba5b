"""Requests of the `checkpoints` commands to a job's catalog."""

from __future__ import annotations

from typing import Any, cast

import pytest
from google.protobuf.message import Message

from strata.cli.checkpoints.cluster import ClusterSource
from strata.client import CoordinatorClient
from strata.core.checkpoints.references import Keep
from strata.core.checkpoints.retention_plan import retention
from strata.errors import Conflict
from strata.v1.retention_pb2 import Keep as KeepMessage
from strata.v1.retention_pb2 import Retention, SetRetentionRequest
from strata.wire.pages import whole
from tests.unit.checkpoint.ports import Cluster


class Operator:
    """The client of an operator whose change conflicts with another operator's, the first `times` times."""

    job = "job"

    def __init__(self, cluster: Cluster, times: int) -> None:
        self._cluster = cluster
        self._times = times

    def call(self, request: Message) -> Any:
        if isinstance(request, SetRetentionRequest) and self._times:
            self._times -= 1
            other = Retention(keep=KeepMessage(latest=7), who=f"bob, {self._times}")
            other.tiers["near"].latest = 3
            self._cluster.call(SetRetentionRequest(job="job", retention=other))
        return self._cluster.call(request)

    def call_whole(self, request: Message) -> Any:
        return whole(self.call, request)

    def keep(self, *, tier: str = "") -> None:
        ClusterSource(cast(CoordinatorClient, self)).keep(KeepMessage(latest=1), tier=tier, who="ada")


def test_setting_one_tiers_rules_keeps_concurrent_changes_of_other_tiers() -> None:
    cluster = Cluster(a=1)
    for times in range(3):
        Operator(cluster, times).keep(tier=f"far{times}")
    held = retention(cluster.view())
    assert held is not None
    assert held.record.tiers["near"] == Keep(latest=3)
    assert held.record.tiers["far2"] == Keep(latest=1)
    assert held.record.keep == Keep(latest=7)
    Operator(cluster, 1).keep()
    held = retention(cluster.view())
    assert held is not None
    assert (held.record.keep, held.record.tiers) == (Keep(latest=1), {"near": Keep(latest=3)})


def test_an_operator_that_loses_every_race_gets_a_conflict() -> None:
    with pytest.raises(Conflict, match="changed meanwhile by bob"):
        Operator(Cluster(a=1), 100).keep(tier="far")
