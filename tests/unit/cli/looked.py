"""Sample resources as `strata top` reads them from a cluster, made from the resources' own classes."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from strata.cli.top.seen import Seen
from strata.dashboard.api import model

NOW_MS = 1_700_000_000_000


def plain(resource: object) -> Any:
    """Return a resource as a client decodes it from JSON."""
    return msgspec.json.decode(msgspec.json.encode(resource))


def progress(step: int = 1204, target: int | None = 10_000) -> model.Progress:
    return model.Progress(
        step=step,
        step_high=step + 3,
        epoch=2,
        samples=step * 256,
        target_step=target,
        eta_ms=9_060_000 if target else None,
        steps_per_s=3.42,
        samples_per_s=875.5,
        since_step_ms=240,
    )


def summary(name: str = "gpt", phase: str = "running", **more: Any) -> model.JobSummary:
    facts: dict[str, Any] = {
        "reason": "all 2 members are here",
        "generation": 4,
        "ranks": 8,
        "members": 3,
        "standbys": 1,
        "min_workers": 2,
        "max_workers": 3,
        "progress": progress() if phase == "running" else None,
        "goodput_ratio": 0.872,
        "checkpoint_step": 1200,
    }
    return model.JobSummary(name=name, phase=phase, **{**facts, **more})


def cluster(**more: Any) -> model.Cluster:
    facts: dict[str, Any] = {
        "cluster": "default",
        "uid": "uid",
        "revision": 812,
        "unix_ms": NOW_MS,
        "answered_by": "coordinator-2",
        "version": "0.1.0",
        "healthy": True,
        "ready": True,
        "reason": "",
        "leader": "coordinator-1",
        "leader_epoch": 3,
        "sessions": 2,
        "etcd_silence_ms": 20,
        "audit_differences": 0,
        "alarms": (),
        "replicas": tuple(
            model.Replica(
                replica=f"coordinator-{at}",
                address=f"host{at}:50051",
                http_url="",
                version="0.1.0",
                leader=at == 1,
                ready=True,
                reason="",
                answered=at == 2,
            )
            for at in (1, 2, 3)
        ),
        "etcd": (),
        "jobs_total": 3,
        "jobs_by_phase": {},
    }
    return model.Cluster(**{**facts, **more})


def ranks(size: int = 8, *, slots: int = 4, stuck: int | None = 3, scores: bool = True) -> model.Ranks:
    workers = tuple(
        model.Worker(
            worker_id=f"node-{at}",
            incarnation=at,
            host=f"gpu-host-{at:03d}.rack-7",
            pid=100 + at,
            slots=slots,
            first_rank=at * slots,
            standby=False,
            lost=False,
            leaving=False,
            heartbeat_age_ms=300,
        )
        for at in range(-(-size // slots))
    )
    return model.Ranks(
        generation=4,
        size=size,
        workers=workers,
        worker=tuple(rank // slots for rank in range(size)),
        step=tuple(1204 + rank % 4 for rank in range(size)),
        phases=("", "data", "step"),
        phase=tuple(1 if rank == stuck else 2 for rank in range(size)),
        last_seen_ms=tuple(None if rank == 5 else 42_000 if rank == stuck else 200 for rank in range(size)),
        stalled_ms=tuple(42_000 if rank == stuck else 0 for rank in range(size)),
        compute_us=tuple(280_000 + 9000 * ((7 * rank) % size) for rank in range(size)),
        median_compute_us=tuple(None for _ in range(size)),
        relative_score=tuple(0.43 if rank == stuck else 0.97 for rank in range(size))
        if scores
        else (None,) * size,
        own_score=tuple(0.99 for _ in range(size)) if scores else (None,) * size,
    )


def rank(number: int = 3) -> model.Rank:
    """Return a stuck rank whose previous process crashed."""
    device = model.Device(
        worker_id="node-0",
        index=number,
        name="NVIDIA H100",
        uuid=f"GPU-{number}",
        utilization_percent=0,
        memory_used_bytes=None,
        memory_total_bytes=None,
        temperature_c=None,
        power_mw=None,
        ecc_uncorrected=None,
        xids=(79,),
        fault="Xid 79",
    )
    return model.Rank(
        rank=number,
        worker_id="node-0",
        host="gpu-host-000.rack-7",
        step=1207,
        phase="data",
        last_seen_ms=42_000,
        stalled_ms=42_000,
        compute_us=325_000,
        median_compute_us=300_000,
        relative_score=0.43,
        own_score=0.99,
        finding=STALLED.text,
        stack='Thread 0x00007f01 (most recent call first):\n  File "loader.py", line 212 in __next__\n'
        '  File "train.py", line 61 in main\n',
        trace_file="",
        trace_bytes=0,
        log=("step 1206 loss 2.3187", "step 1207 loss 2.3180"),
        log_file="/logs/generation-000004-rank-00003.log",
        log_generation=4,
        log_ended="",
        log_before=model.RankLog(
            generation=3,
            file="/logs/generation-000003-rank-00003.log",
            ended="exited with 1: CUDA error",
            lines=("RuntimeError: CUDA error",),
        ),
        devices=(device,),
    )


def goodput() -> model.Goodput:
    spent = {"step": 3720.0, "start": 251.0, "save": 130.4, "lost": 90.0, "eval": 61.2, "down": 12.3}
    wall = sum(spent.values())
    return model.Goodput(
        wall_s=wall,
        ratio=spent["step"] / wall,
        parts=tuple(model.GoodputPart(cause=c, seconds=s, ratio=s / wall) for c, s in spent.items()),
    )


def job(*findings: model.Finding, **more: Any) -> model.Job:
    facts: dict[str, Any] = {
        "summary": summary(),
        "restored_step": 1000,
        "failed_in_a_row": 0,
        "max_failed_in_a_row": 3,
        "findings": findings or (STALLED, HELD),
        "notice": None,
        "goodput": goodput(),
        "reported": {"grad_norm": 1.31, "loss": 2.3187, "lr": 0.0003},
    }
    return model.Job(**{**facts, **more})


STALLED = model.Finding(
    kind="stalled", text="rank 3 stands still at step 1207 (data) for 42 s", ranks=(3,), worker_id="node-0"
)
HELD = model.Finding(kind="held", text="rank 6 cannot save step 1200: disk full on host gpu-host-001.rack-7")


def barriers() -> model.Barriers:
    missing = model.MissingRank(
        rank=3, worker_id="node-0", host="gpu-host-000", step=1207, phase="data", last_seen_ms=42_000
    )
    opened = model.OpenBarrier(
        name="epoch",
        generation=4,
        round=2,
        arrived=7,
        expected=8,
        age_ms=41_000,
        missing_total=1,
        missing_ranks="3",
        missing=(missing,),
    )
    return model.Barriers(open=(opened,), ended=(), latency=())


def checkpoint(step: int, state: str = "committed", **more: Any) -> model.Checkpoint:
    facts: dict[str, Any] = {
        "attempt": f"a{step}",
        "generation": 4,
        "epoch": 2,
        "type": "full",
        "acked": 8,
        "ranks": 8,
        "missing_ranks": "",
        "size_bytes": 4_509_715_660,
        "created_unix_ms": NOW_MS - 1000 * (1300 - step),
        "path": "",
        "reason": "",
        "latest": False,
        "pinned": False,
        "tags": (),
        "base_step": None,
        "copies": (),
        "origin_job": "",
        "references": 1,
        "readers": 0,
        "suspected": (),
    }
    return model.Checkpoint(step=step, state=state, **{**facts, **more})


def checkpoints() -> model.Checkpoints:
    return model.Checkpoints(
        checkpoints=(
            checkpoint(1210, "open", acked=6, missing_ranks="3, 6"),
            checkpoint(1200, latest=True),
            checkpoint(1100, pinned=True, tags=("best",)),
            checkpoint(1000),
        ),
        total=4,
        next_page_token="",
    )


def generations() -> model.Generations:
    def one(number: int, reason: str, *, failure: bool = False) -> model.Generation:
        return model.Generation(
            generation=number,
            began_unix_ms=NOW_MS - 600_000 * (5 - number),
            members=2,
            ranks=8,
            restored_step=250 * number if number > 1 else None,
            committed_step=None if number == 4 else 250 * (number + 1),
            failure=failure,
            reason=reason,
        )

    return model.Generations(
        generations=(
            one(
                4, "rank 5 exited with 1: CUDA error: an illegal memory access was encountered", failure=True
            ),
            one(3, "node-2 was lost: no sign of life for 8 s", failure=True),
            one(2, "2 members, at least 2, have settled"),
            one(1, "all 2 members are here"),
        )
    )


def history(count: int = 120) -> model.History:
    return model.History(
        from_unix_ms=NOW_MS - 1000 * count,
        interval_ms=1000,
        series={
            "steps_per_s": model.Series(
                unit="1/s", values=tuple(3.2 + 0.3 * math.sin(at / 5) for at in range(count))
            ),
            "reported.loss": model.Series(
                unit="", values=tuple(2.3 + 4 / (1 + at / 20) for at in range(count))
            ),
        },
    )


def job_seen(**more: Any) -> Seen:
    """Return the page of a job that has findings."""
    facts: dict[str, Any] = {
        "at_s": 100.0,
        "job": "gpt",
        "cluster": cluster(),
        "detail": job(),
        "ranks": ranks(),
        "barriers": barriers(),
        "checkpoints": checkpoints(),
        "generations": generations(),
        "history": history(),
    }
    merged = {**facts, **more}
    given: dict[str, Any] = {
        key: value if isinstance(value, int | float | str | None) else plain(value)
        for key, value in merged.items()
    }
    return Seen(**given)


def jobs_seen(*jobs: model.JobSummary, **more: Any) -> Seen:
    """Return the page with the list of jobs."""
    some = jobs or (
        summary("gpt", finding=STALLED.text),
        summary("vision-transformer-large-384", progress=progress(88, None)),
        summary("old", "done", reason="all ranks finished", progress=None),
        summary(
            "bert", "failed", reason="3 generations in a row without a checkpoint", ranks=0, progress=None
        ),
    )
    return Seen(
        at_s=100.0,
        cluster=plain(more.get("cluster", cluster())),
        jobs=tuple(plain(each) for each in some),
        total=len(some),
    )
