"""docs/keyspace.md: Strata writes exactly these examples, and the page covers every key."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from strata.core.checkpoints import references as c
from strata.core.ids import AttemptId, BootId, InstanceId, ReplicaId, WorkerId
from strata.core.kv import records as r
from strata.core.kv.keys import ClusterKeys, JobKeys
from strata.core.kv.records import decode, encode
from strata.core.leadership.coordinators import Coordinator
from strata.core.restore import records as b
from strata.core.restore.records import Restoring

PAGE = Path(__file__).parents[4] / "docs" / "keyspace.md"
KEYS = ClusterKeys("default")
JOB = KEYS.job("digits")
W0, W1 = WorkerId("node-0"), WorkerId("node-1")
R1 = InstanceId("5f0c1b0e9a4d4c2f8a6b7d3e2f1a0c9b")
ATTEMPT = AttemptId("9c41d2e7f0b84a36")
FOLDER = f"step-000000000120-gen-000002-{ATTEMPT}"

EXAMPLES: dict[str, Any] = {
    KEYS.uid: r.ClusterUid(uid="0b6f4a9e2d714c53b8e1f7a2c9d05e36"),
    KEYS.restoring: Restoring(
        who="ada@ops-1",
        since_unix_ms=1767225600000,
        source="the backup of 2026-01-01 00:00:00Z",
        uid="0b6f4a9e2d714c53b8e1f7a2c9d05e36",
    ),
    KEYS.backup: b.Backup(
        revision=4711, unix_ms=1767225600000, where="s3://backups/strata", size_bytes=20512
    ),
    KEYS.leader: r.Leader(instance=R1, replica=ReplicaId("c1"), address="10.0.0.1:50051"),
    KEYS.replica("c1"): r.Replica(
        instance=R1, address="10.0.0.1:50051", http_address="10.0.0.1:8080", version="0.1.0"
    ),
    KEYS.coordinator("c2"): Coordinator(
        address="10.0.0.2:50051", epoch=42, unreachable_since_unix_ms=1767225600000
    ),
    JOB.spec: r.JobSpec(min_workers=2, max_workers=3),
    JOB.phase: r.JobPhase(
        phase=r.Phase.DONE, reason="all 16 ranks are done", epoch=42, ended_unix_ms=1764079320000
    ),
    JOB.run: r.JobRun(
        run_id="slurm-4711",
        command=r.Command(program="/home/ada/train.py", arguments="--epochs 3", digest="7b1f0c"),
    ),
    JOB.standbys: r.Standbys(workers=(WorkerId("node-3"),), epoch=42),
    JOB.worker("node-0"): r.Worker(
        boot=BootId("c3f1a2b4"), served_by=R1, host="gpu-a", slots=8, devices=("cuda:0", "cuda:1"), pid=4711
    ),
    JOB.head: r.WorldHead(
        generation=3,
        epoch=42,
        members=2,
        size=16,
        reason="node-2 is gone",
        chunks=1,
        began=True,
        restore=r.RestorePoint(step=120, attempt=ATTEMPT, record_generation=2),
        newcomers=(r.Newcomer(worker=WorkerId("node-3"), crashes=1, revision=91),),
    ),
    JOB.members_chunk(3, 42, 0): r.MembersChunk(
        members=(
            r.Member(worker=W0, incarnation=57, group_rank=0, slots=8, first_rank=0),
            r.Member(worker=W1, incarnation=61, group_rank=1, slots=8, first_rank=8),
        )
    ),
    JOB.failed_rank(3, 9): r.RankFailed(reason="killed by signal 9", worker=W1, code=-9),
    JOB.done_rank(3, 0): r.RankDone(worker=W0),
    JOB.held(3): c.SavesHeld(step=140, rank=9, worker=W1, host="gpu-b", reason="disk full"),
    JOB.notice(3): r.StopNotice(
        action=r.StopAction.DRAIN, reason="its fan is broken", workers=(W1,), grace_ms=60_000
    ),
    JOB.stopped_rank(3, 8): r.RankStopped(worker=W1),
    JOB.history_of(3): r.GenerationRecord(
        epoch=42,
        members=2,
        size=16,
        reason="node-2 is gone",
        began_unix_ms=1767225600000,
        failure=True,
        restore=r.RestorePoint(step=120, attempt=ATTEMPT, record_generation=2),
        committed_step=180,
    ),
    JOB.restored(3): r.Restored(step=120),
    JOB.outcome("step-140", 3, 7): r.BarrierOutcome(
        generation=3,
        round=7,
        result=r.BarrierResult.RELEASED,
        digest="09ebce03f5a7e15c187b21b76d834857056c141ee0d4f813649ce8e84c3175bf",
        reason="all 16 arrived",
        payloads={"0": "MTAuMC4wLjE6MjkxMDE="},
    ),
    JOB.payload_chunk("step-140", 3, 7, 0): r.PayloadChunk(payloads={"0": "MTAuMC4wLjE6MjkxMDE="}),
    JOB.arrived("step-140", 3, 8): r.BarrierArrived(arrived=14, expected=16, missing=(3, 9)),
    JOB.barrier_floor("step-140", 3): r.BarrierFloor(round=7),
    JOB.dataset_spec("train"): r.DatasetSpec(
        shards=8, uri="s3://data/train-{shard:05d}.tar", metadata={"format": "webdataset"}
    ),
    JOB.assignment("train"): r.Assignment(
        assign_epoch=2,
        epoch=42,
        generation=3,
        shards=8,
        workers=(W0, W1),
        seats={"node-1": "node-2"},
        moved={"node-1": (2,)},
    ),
    JOB.anew: r.Anew(generation=2),
    JOB.checkpoint(120, 2): r.CheckpointRecord(
        attempt=ATTEMPT,
        step=120,
        generation=2,
        type=r.CheckpointType.FULL,
        state=r.CheckpointState.COMMITTED,
        ranks=16,
        path=f"file:///ckpt/digits/{FOLDER}",
        epoch=4,
        size_bytes=104857600,
        model_hash="xxh3-128:0d9f",
        manifest_digest="xxh3-128:71c2",
        created_unix_ms=1767225600000,
        metadata={"lr": "0.1"},
        tiers={
            "primary": r.Tier(path=f"file:///ckpt/digits/{FOLDER}", shared=False),
            "s3": r.Tier(path=f"s3://b/ckpt/digits/{FOLDER}"),
        },
    ),
    JOB.ack(120, 2, ATTEMPT, 9): r.Ack(
        digest="xxh3-128:5a1e", size_bytes=6553600, worker=W1, incarnation=61, host="gpu-b"
    ),
    JOB.seal(120, 2, ATTEMPT): r.Seal(
        digest="xxh3-128:71c2", size_bytes=104857600, worker=W0, incarnation=57, model_hash="xxh3-128:0d9f"
    ),
    JOB.refs(120, 2, ATTEMPT) + "b70e55c1a2d94f68": c.Reference(step=140, generation=3),
    JOB.reader(120, 2, ATTEMPT, "eval-7"): c.Reader(who="eval"),
    JOB.copy(120, 2, ATTEMPT, "s3", 9): c.Copy(
        digest="xxh3-128:5a1e", path=f"s3://b/ckpt/digits/{FOLDER}", host="gpu-b"
    ),
    JOB.copied_seal(120, 2, ATTEMPT, "s3"): c.Copy(
        digest="xxh3-128:71c2", path=f"s3://b/ckpt/digits/{FOLDER}", host="gpu-a"
    ),
    JOB.suspect(120, 2, ATTEMPT, "s3", "gpu-a"): c.CorruptionReport(
        corrupt=True,
        reason="rank-00009.safetensors: tensor w differs from the saved data",
        generation=3,
        object="step-000000000120-gen-000002-9c41d2e7f0b84a36/rank-00009.safetensors",
        found_generation=2,
        found_step=160,
    ),
    JOB.tag("paper"): c.Tag(step=120, generation=2, attempt=ATTEMPT, who="ada"),
    JOB.retention: c.Retention(
        keep=c.Keep(latest=3, every_steps=1000, best=1, metric="loss"),
        tiers={"primary": c.Keep(latest=1)},
        who="ada",
    ),
    JOB.rewind: c.Rewind(step=120, attempt=ATTEMPT, record_generation=2, who="ada"),
    JOB.discard("0f5b7c1d9e8a4b23"): c.Discarded(
        step=160,
        generation=3,
        tiers={"primary": r.Tier(path="file:///ckpt/digits/step-000000000160-gen-000003-0f5b7c1d9e8a4b23")},
    ),
    JOB.latest: r.Latest(generation=3, step=120, attempt=ATTEMPT, record_generation=2),
    JOB.pin(120, ATTEMPT): r.Pin(who="ada", why="the paper's figure 3"),
}

NEVER = {"dry_run"}
"""Keys that Strata only compares and never writes."""


def blocks() -> list[tuple[str, str]]:
    """Return every example of the page: a key, and below it the value."""
    found = re.findall(r"^```\n(/strata/\S+)\n(.*)\n```$", PAGE.read_text(), re.MULTILINE)
    return [(key, value) for key, value in found]


def test_every_example_is_what_strata_writes() -> None:
    shown = dict(blocks())
    assert len(shown) == len(blocks()), "a key stands there twice"
    assert shown == {key: encode(record).decode() for key, record in EXAMPLES.items()}


@pytest.mark.parametrize("key", EXAMPLES)
def test_every_example_is_read_back(key: str) -> None:
    record = EXAMPLES[key]
    assert decode(type(record), encode(record)) == record


def test_no_record_is_left_out() -> None:
    written = {type(record) for record in EXAMPLES.values()}
    inner = {
        r.Member,
        r.Newcomer,
        r.Command,
        r.RestorePoint,
        r.LeaveRequest,
        r.Spent,
        r.Tier,
        r.Origin,
        c.Keep,
    }
    every = {
        cls
        for module in (r, b, c)
        for _name, cls in inspect.getmembers(module, inspect.isclass)
        if cls.__module__ == module.__name__ and hasattr(cls, "__dataclass_fields__")
    }
    assert every - inner - written == set()


def test_no_key_is_left_out() -> None:
    text = PAGE.read_text()
    for keys in (ClusterKeys, JobKeys):
        for name, _member in inspect.getmembers(keys):
            if name.startswith("_"):
                continue
            made = [str(key) for key in _made_by(name)]
            if name in NEVER:
                continue
            if made and not made[0].endswith("/"):
                assert made[0] in EXAMPLES, f"{name} has no example"
    for later in (
        "P/ops/<request-id>",
        "P/ops-floor",
        "P/dry-run",
        "readers/<id>",
        "refs/<attempt>",
    ):
        assert later in text


def _made_by(name: str) -> list[str]:
    """Return the example key that the builder `name` makes, if it makes a key and not a folder."""
    arguments: dict[str, tuple[Any, ...]] = {
        "replica": ("c1",),
        "coordinator": ("c2",),
        "worker": ("node-0",),
        "members_chunk": (3, 42, 0),
        "failed_rank": (3, 9),
        "done_rank": (3, 0),
        "stopped_rank": (3, 8),
        "notice": (3,),
        "history_of": (3,),
        "restored": (3,),
        "outcome": ("step-140", 3, 7),
        "payload_chunk": ("step-140", 3, 7, 0),
        "arrived": ("step-140", 3, 8),
        "barrier_floor": ("step-140", 3),
        "dataset_spec": ("train",),
        "assignment": ("train",),
        "checkpoint": (120, 2),
        "ack": (120, 2, ATTEMPT, 9),
        "seal": (120, 2, ATTEMPT),
        "pin": (120, ATTEMPT),
        "reader": (120, 2, ATTEMPT, "eval-7"),
        "copy": (120, 2, ATTEMPT, "s3", 9),
        "copied_seal": (120, 2, ATTEMPT, "s3"),
        "suspect": (120, 2, ATTEMPT, "s3", "gpu-a"),
        "tag": ("paper",),
        "discard": ("0f5b7c1d9e8a4b23",),
    }
    keys: Any = KEYS if hasattr(KEYS, name) else JOB
    if name in arguments:
        return [getattr(keys, name)(*arguments[name])]
    found = getattr(keys, name)
    return [found] if isinstance(found, str) and found.startswith("/") else []
