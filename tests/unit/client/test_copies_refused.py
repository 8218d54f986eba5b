"""What the coordinators will not have copied: who is told, and that it is never taken for copied."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from google.protobuf.message import Message

from strata.checkpoint.far_copy import Replica
from strata.checkpoint.handle import CheckpointInfo
from strata.client.checkpoint_tiers import TIER, CopyReports
from strata.core.records import CheckpointType, TierState
from strata.errors import (
    CheckpointError,
    CheckpointNotFound,
    Conflict,
    PermissionDenied,
    QuotaExceeded,
    Refused,
    StaleGeneration,
    StrataError,
    Unavailable,
)
from strata.v1 import checkpoints_pb2 as pb
from tests.unit.checkpoint.ports import Cluster
from tests.unit.client.coordinated import LIMIT_S, managers
from tests.unit.core.rig import JOB

if TYPE_CHECKING:
    from strata.client.checkpoint_catalog import CoordinatedCatalog

FROZEN = np.arange(4096.0)
REPLICA = Replica(folder="job/step-20", attempt="x20", manifest_digest="m", step=20)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(a=1, b=1)


def incremental(both: list[Any], step: int, become: CheckpointType) -> list[CheckpointInfo]:
    """Save on all ranks what shall become that."""
    state = {"frozen": FROZEN, "w": np.full(4, float(step))}
    infos = [manager.save_state(state, step, 0, "incremental") for manager in both]
    for info in infos:
        info.wait(LIMIT_S)
    assert {info.checkpoint_type for info in infos} == {become}
    return infos


@pytest.mark.parametrize("when", ["begun", "sealed"])
def test_what_cannot_be_copied_for_its_base_left_is_told_and_the_next_one_is_whole(
    cluster: Cluster, tmp_path: Path, when: str
) -> None:
    with managers(cluster, tmp_path / "near", replica_path=tmp_path / "far") as both:
        incremental(both, 10, CheckpointType.FULL)
        for manager in both:
            manager.wait_until_replicated(LIMIT_S)

        def leave(request: Message) -> None:
            if isinstance(request, pb.ReportCopyRequest) and request.step == 20 and getattr(request, when):
                base = next(r for r in cluster.records() if r.step == 10)
                gone = replace(base.tiers[TIER], state=TierState.REMOVED)
                tiers = {**base.tiers, TIER: gone}
                cluster.job.store.put(JOB.checkpoint(10, base.generation), replace(base, tiers=tiers))

        cluster.on_call = leave
        infos = incremental(both, 20, CheckpointType.INCREMENTAL)
        for manager, info in zip(both, infos, strict=True):
            with pytest.raises(CheckpointError, match="step 10, which step 20 needs, is removed on replica"):
                manager.wait_until_replicated(LIMIT_S)
            assert not info.replicated
        if when == "begun":
            assert not list((tmp_path / "far").glob("job/step-000000000020-*/*")), "nobody would remove it"
        incremental(both, 30, CheckpointType.FULL)
        incremental(both, 40, CheckpointType.INCREMENTAL)
        for manager in both:
            manager.wait_until_replicated(LIMIT_S)
    found = {record.step: TIER in record.tiers for record in cluster.records()}
    assert found == {10: True, 20: False, 30: True, 40: True}


class Refusing:
    def __init__(self, error: StrataError) -> None:
        self.error = error

    def report_copy(self, **copy: Any) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Refused("step 20 is deleting"), Refused),
        (CheckpointNotFound("no attempt x20"), CheckpointNotFound),
        (StaleGeneration("generation 1 has ended"), StaleGeneration),
        (QuotaExceeded("etcd has no space left"), Unavailable),
        (Conflict("what lies there has digest a"), CheckpointError),
        (PermissionDenied("not for you"), CheckpointError),
    ],
)
@pytest.mark.parametrize(("what", "more"), [("begun", ()), ("part", (0, "d")), ("sealed", ())])
def test_only_what_is_not_wanted_any_more_is_left_without_a_word(
    error: StrataError, told: type[StrataError], what: str, more: tuple[Any, ...]
) -> None:
    reports = CopyReports(cast("CoordinatedCatalog", Refusing(error)), root="s3://far")
    with pytest.raises(told, match=error.message) as raised:
        getattr(reports, what)(REPLICA, *more)
    assert isinstance(raised.value, Refused) == (told in {Refused, StaleGeneration})
