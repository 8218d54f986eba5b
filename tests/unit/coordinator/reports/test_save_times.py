"""Save times that ranks report are counted once, under fixed labels; a member's age grows while it is silent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from google.protobuf.message import Message

from strata.checkpoint.catalog.protocol import SavePhase as CopyPhase
from strata.checkpoint.format.marker import read_manifest
from strata.coordinator.measures import Measures
from strata.coordinator.reports.save_times import MAX_BYTES, MAX_REPORTED, SaveTimes, backend_of
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import CheckpointType
from strata.core.kv.view import View
from strata.v1.checkpoints_pb2 import AckCheckpointRequest
from strata.v1.common_pb2 import SavePhase
from tests.unit.checkpoint.ranks import Ranks
from tests.unit.coordinator.serving_rig import Cluster, Member, in_world

WRITE = ("other", "full", "write")
"""A storage in memory is neither a file nor S3."""


def counting(*phases: SavePhase) -> Measures:
    measures = Measures()
    times = SaveTimes(
        View(), ClusterKeys("default"), measures, clock=lambda: 0.0, committed=lambda _job, _seconds: None
    )
    times.reported(CheckpointType.INCREMENTAL, phases)
    return measures


def test_bytes_and_seconds_of_a_save_phase_are_labelled_by_backend_and_type() -> None:
    measures = counting(
        SavePhase(phase="snapshot", backend="s3", took_us=250_000, size_bytes=1000),
        SavePhase(phase="write", backend="s3", took_us=2_000_000, size_bytes=500),
    )
    write = ("s3", "incremental", "write")
    assert measures.phase_bytes.children[write].value == 500
    assert measures.phase_seconds.children[write].sum == 2.0
    assert measures.phase_seconds.children["s3", "incremental", "snapshot"].sum == 0.25


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        (SavePhase(phase="x" * 10_000, backend="file", took_us=1), {}),
        (SavePhase(phase="write", backend="file", took_us=-1), {}),
        (SavePhase(phase="write", backend="x" * 10_000, took_us=1, size_bytes=7), {"other": 7}),
        (SavePhase(phase="write", backend="file", took_us=1, size_bytes=-1), {"file": 0}),
        (SavePhase(phase="write", backend="file", took_us=1, size_bytes=2**62), {"file": MAX_BYTES}),
    ],
)
def test_save_reports_of_any_content_create_few_series(phase: SavePhase, expected: dict[str, int]) -> None:
    measures = counting(phase)
    found = {labels[0]: child.value for labels, child in measures.phase_bytes.children.items()}
    assert found == expected


def test_save_phases_beyond_the_limit_of_a_report_are_ignored() -> None:
    measures = counting(*[SavePhase(phase="write", backend="s3", took_us=1)] * 1000)
    assert sum(measures.phase_seconds.children["s3", "incremental", "write"].counts) == MAX_REPORTED


@pytest.mark.parametrize(
    ("uri", "backend"),
    [("file:///data", "file"), ("s3://bucket/x", "s3"), ("nfs://x", "other"), ("", "other")],
)
def test_the_backend_of_a_checkpoint_is_the_scheme_of_its_path(uri: str, backend: str) -> None:
    assert backend_of(uri) == backend


def test_each_rank_reports_its_own_part_once() -> None:
    ranks = Ranks(3)
    ranks.save(states=[{"x": b"1" * 1000}] * 3)
    measures = ranks.cluster.measures
    images = sum(len(data) for name, data in ranks.near.objects.items() if name.endswith(".safetensors"))
    assert measures.phase_bytes.children[WRITE].value == images
    for phase in ("snapshot", "write"):
        assert sum(measures.phase_seconds.children["other", "full", phase].counts) == 3


def test_an_ack_that_comes_again_is_counted_once() -> None:
    ranks = Ranks(2)
    lost: list[object] = []

    def lose_one(request: Message) -> None:
        if isinstance(request, AckCheckpointRequest) and not lost:
            lost.append(request)
            ranks.cluster.lose_answers = 1

    ranks.cluster.on_call = lose_one
    ranks.save()
    assert lost
    assert sum(ranks.cluster.measures.phase_seconds.children[WRITE].counts) == 2


def test_a_copy_in_the_second_storage_is_counted_once() -> None:
    ranks = Ranks(1)
    ranks.save()
    catalog, record = ranks.catalogs[0], ranks.record
    (digest,) = [
        part.digest for part in read_manifest(ranks.near, ranks.folder, record.manifest_digest).parts
    ]
    where: dict[str, Any] = {
        "step": record.step,
        "attempt": record.id,
        "tier": "replica",
        "root": "s3://bucket/runs",
    }
    catalog.report_copy(**where, begun=True)
    for _ in range(2):
        phase = CopyPhase(phase="copy", backend="s3", took_s=2.0, size_bytes=1000)
        catalog.report_copy(**where, rank=0, digest=digest, phase=phase)
    copied = ("s3", "full", "copy")
    assert ranks.cluster.measures.phase_bytes.children[copied].value == 1000
    assert ranks.cluster.measures.phase_seconds.children[copied].sum == 2.0


@in_world("r1", "r2", members=2)
async def test_a_replica_reports_the_age_of_the_members_it_serves(c: Cluster, members: list[Member]) -> None:
    first, second = (dict(c[replica].service.failure_detector.ages("job")) for replica in ("r1", "r2"))
    assert (set(first), set(second)) == ({"w0"}, {"w1"})
    before = first["w0"]
    await asyncio.sleep(0.5)
    ((worker, age_s),) = c["r1"].service.failure_detector.ages("job")
    assert worker == "w0"
    assert age_s == pytest.approx(before + 0.5, abs=0.05)


@in_world("r1", "r2", members=2)
async def test_a_member_that_is_away_is_named_until_it_is_removed(c: Cluster, members: list[Member]) -> None:
    members[0].drop()
    await asyncio.sleep(0.3)
    ((worker, age_s),) = c["r1"].service.failure_detector.ages("job")
    assert worker == "w0"
    assert age_s >= 0.2
    await asyncio.sleep(60)
    assert list(c["r1"].service.failure_detector.ages("job")) == []
