"""The cluster around the trainings of `fixture_world`: replicas, barriers, data, checkpoints and events.

A development and test tool, no part of Strata. Only operators' actions are stored, in a file that the replicas share.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from strata.dashboard.api import model as m
from web.fixture_world import HOUR, LONG, Training, noise

OLD = {
    "whisper-ft": ("paused", "An operator paused it: waiting for budget"),
    "eval-nightly": ("waiting", "waits for 1 more of 2 members"),
    "bert-base": ("failed", "3 generations in a row ended without a checkpoint: rank 2 raised CudaError"),
    **{f"ablation-{number:02d}": ("done", "") for number in range(1, 31)},
}


class Cluster:
    """The answers of one replica. `replicas` maps names to the URLs at which browsers reach them."""

    def __init__(self, name: str, replicas: dict[str, str], began: float, state: Path) -> None:
        self.name, self.replicas, self.began, self.state = name, replicas, began, state
        self.trainings = {
            "gpt": Training("gpt", ranks=16, per_host=4, rate=2.4, began=began, total=200_000),
            LONG: Training(LONG, ranks=1000, per_host=8, rate=0.31, began=began, total=60_000),
            "vision-ft": Training("vision-ft", ranks=8, per_host=4, rate=5.1, began=began, total=90_000),
        }

    def revision(self, now: float) -> int:
        return 810_000 + int(now - self.began)

    def cluster(self, now: float) -> m.Cluster:
        leader = next(iter(sorted(self.replicas)))
        return m.Cluster(
            cluster="training", uid="5b0a7c1e", revision=self.revision(now), unix_ms=int(now * 1000),
            answered_by=self.name, version="0.1.0", healthy=True, ready=True, reason="", leader=leader,
            leader_epoch=412, sessions=151, etcd_silence_ms=int(90 * noise("etcd", int(now))),
            audit_differences=0,
            alarms=("etcd member 10.0.0.13:2379 uses 82 % of its quota: compact and defragment it",),
            replicas=tuple(
                m.Replica(
                    replica=each, address=url.removeprefix("http://"), http_url=url, version="0.1.0",
                    leader=each == leader, ready=True, reason="", answered=each == self.name,
                )
                for each, url in self.replicas.items()
            ),
            etcd=tuple(
                m.EtcdMember(
                    endpoint=f"10.0.0.1{number}:2379", version="3.5.17", healthy=True, leader=number == 2,
                    db_size_bytes=1_700_000_000 + number * 4_000_000, error="", warning="",
                )
                for number in (1, 2, 3)
            ),
            jobs_total=len(self.jobs(now)),
            jobs_by_phase=self.by_phase(now),
        )  # fmt: skip

    def by_phase(self, now: float) -> dict[str, int]:
        phases = [job.phase for job in self.jobs(now)]
        return {phase: phases.count(phase) for phase in sorted(set(phases))}

    def jobs(self, now: float) -> list[m.JobSummary]:
        running = [training.summary(now) for _, training in sorted(self.trainings.items())]
        old = [
            m.JobSummary(name=name, phase=phase, reason=reason, generation=2, ranks=0, members=0, min_workers=2,
                max_workers=4, goodput_ratio=0.9, checkpoint_step=10_000)
            for name, (phase, reason) in sorted(OLD.items())
        ]  # fmt: skip
        return running + old

    def matching_jobs(self, now: float, phase: str, q: str, page_token: str) -> m.Jobs:
        found = [job for job in self.jobs(now) if phase in ("", job.phase) and q.lower() in job.name.lower()]
        begin, size = int(page_token or 0), 25
        token = str(begin + size) if begin + size < len(found) else ""
        return m.Jobs(jobs=tuple(found[begin : begin + size]), total=len(found), next_page_token=token)

    def barriers(self, job: Training, now: float) -> m.Barriers:
        opened = []
        if stuck := job.stuck_ms(now):
            missing = m.MissingRank(
                rank=5,
                worker_id="node-002-w0",
                host="node-002",
                step=job.step(now, 5),
                phase="loader",
                last_seen_ms=stuck,
            )
            opened.append(
                m.OpenBarrier(
                    name="epoch-end", generation=4, round=7, arrived=7, expected=8, age_ms=stuck,
                    missing_total=1, missing_ranks="5", missing=(missing,),
                )
            )  # fmt: skip
        counts = {0.001: 3, 0.005: 240, 0.01: 811, 0.05: 402, 0.1: 96, 0.5: 31, 1.0: 9, 5.0: 4, None: 1}
        ended = [
            m.EndedBarrier(name="save", generation=4, round=number, result="released", reason="")
            for number in range(40, 34, -1)
        ]
        ended.append(
            m.EndedBarrier(name="save", generation=3, round=12, result="broken",
                reason="member node-002-w0 was lost: it sent no heartbeat for 10 s")
        )  # fmt: skip
        return m.Barriers(
            open=tuple(opened), ended=tuple(ended),
            latency=tuple(m.Bucket(le_s=le, count=count + int(now - self.began) // 60) for le, count in counts.items()),
        )  # fmt: skip

    def datasets(self, job: Training, now: float) -> m.Datasets:
        workers = sorted({job.worker_id(rank) for rank in range(job.ranks)})
        owned = {worker: 8 + (noise(job.name, worker) < 0.25) for worker in workers}
        return m.Datasets(
            datasets=(
                m.Dataset(name="pile-dedup", shards=sum(owned.values()), uri="s3://corpora/pile-dedup", generation=4,
                    assignment_version=9, owned=owned, moved=3),
                m.Dataset(name="validation", shards=len(workers), uri="s3://corpora/validation", generation=4,
                    assignment_version=2, owned=dict.fromkeys(workers, 1), moved=0),
            ),
            cursors=(m.Cursor(dataset="pile-dedup", step=job.saved_step(now), epoch=0,
                samples=job.saved_step(now) * 2048, length=1_200_000_000, order="order-v1"),),
        )  # fmt: skip

    # -- checkpoints

    def checkpoints(self, job: Training, now: float) -> list[m.Checkpoint]:
        done = self._done().get(job.name, {})
        trained = job.trained_s(now)
        size = 13_400_000_000 if job.ranks < 100 else 842_000_000_000
        found: list[m.Checkpoint] = []
        for number in range(int(trained // 300), max(0, int(trained // 300) - 40), -1):
            step = int(job.first_step + number * 300 * job.rate)
            copies = [m.Copy(tier="nvme", path=f"/nvme/{job.name}/{step}", state="present", shared=False)]
            if number % 3 == 0:
                copies.append(
                    m.Copy(tier="s3", path=f"s3://ckpt/{job.name}/{step}", state="present", shared=True)
                )
            state = {3: "prepared", 5: "corrupt", 8: "deleting"}.get(number, "committed")
            open_now = number == int(trained // 300) and job.saving(now)
            found.append(
                m.Checkpoint(
                    step=step, attempt=f"a{number}", generation=4, epoch=0,
                    type="full" if number % 3 == 0 else "incremental", state="open" if open_now else state,
                    acked=job.ranks - 2 if open_now else job.ranks, ranks=job.ranks,
                    missing_ranks="3, 7" if open_now else "", size_bytes=size if number % 3 == 0 else size // 9,
                    created_unix_ms=int((job.began + number * 300) * 1000), path=f"/nvme/{job.name}/{step}",
                    reason="", latest=not found or (found[0].state == "open" and len(found) == 1),
                    pinned=False, tags=("best",) if number == 6 else (),
                    base_step=None if number % 3 == 0 else int(job.first_step + number // 3 * 900 * job.rate),
                    copies=() if open_now else tuple(copies), references=2 if number % 3 == 0 else 0, readers=0,
                    origin_job="",
                    suspected=("nvme",) if number == 4 else (),
                )
            )  # fmt: skip
        return [dataclasses.replace(each, **done.get(str(each.step), {})) for each in found]

    def act(
        self, job: Training, step: int, action: str, body: m.CheckpointAction, now: float
    ) -> m.Checkpoint | m.Problem:
        found = next((each for each in self.checkpoints(job, now) if each.step == step), None)
        if found is None:
            return m.Problem(error=f"job {job.name} has no checkpoint of step {step}")
        if action == "delete" and found.latest:
            return m.Problem(error=f"step {step} is the latest checkpoint")
        if action == "delete" and found.pinned:
            return m.Problem(error=f"step {step} is pinned", hint="unpin it first")
        if action == "delete" and found.references:
            return m.Problem(error=f"step {step} is referenced by attempt a1")
        changes: dict[str, dict[str, Any]] = {
            "pin": {"pinned": True},
            "unpin": {"pinned": False},
            "tag": {"tags": sorted({*found.tags, body.tag})},
            "untag": {"tags": sorted({*found.tags} - {body.tag})},
            "delete": {"state": "deleting"},
            "fork": {"references": found.references + 1},
        }
        change = changes[action]
        done = self._done()
        done.setdefault(job.name, {}).setdefault(str(step), {}).update(change)
        self.state.write_text(json.dumps(done))
        return dataclasses.replace(found, **change)

    def _done(self) -> dict[str, dict[str, dict[str, Any]]]:
        return dict(json.loads(self.state.read_text())) if self.state.exists() else {}

    # -- events

    def generations(self, job: Training, now: float) -> m.Generations:
        rows = [
            (1, 0.0, None, 0.22, False, "all members have come"),
            (2, 0.22, 0.2, 0.55, True, "member node-002-w0 was lost: it sent no heartbeat for 10 s"),
            (3, 0.55, 0.55, 1.1, False, "member node-004-w0 joined: the job grows to 4 members"),
            (4, 1.1, 1.08, None, True, "rank 9 ended with exit code 139 (segmentation fault)"),
        ]
        return m.Generations(
            generations=tuple(
                m.Generation(
                    generation=number, began_unix_ms=int((job.began + hours * HOUR) * 1000),
                    members=-(-job.ranks // job.per_host) - (number == 2), ranks=job.ranks - job.per_host * (number == 2),
                    restored_step=None if restored is None else int(job.first_step + restored * HOUR * job.rate),
                    committed_step=None if ended is None else int(job.first_step + ended * HOUR * job.rate),
                    failure=failure, reason=reason,
                )
                for number, hours, restored, ended, failure, reason in reversed(rows)
            )
        )  # fmt: skip

    def events(self, job: str, now: float, after_revision: int = 0) -> m.Events:
        """Return about one event every twelve seconds, the newest first."""
        texts = (
            ("checkpoint_committed", "checkpoint of step {step} is committed (13.4 GB, 6.8 s)"),
            ("barrier_released", "barrier save, round {round}, was released after 0.04 s"),
            ("checkpoint_copied", "checkpoint of step {step} is copied to s3"),
            ("member_registered", "standby node-900-w0 registered"),
        )
        found = []
        newest = int((now - self.began) // 12)
        for number in range(newest, max(0, newest - 200), -1):
            revision = self.revision(self.began + number * 12)
            if revision <= after_revision:
                break
            name = ("gpt", LONG, "vision-ft")[int(noise("job", number) * 3)]
            kind, text = texts[int(noise("text", number) * len(texts))]
            step = self.trainings[name].saved_step(self.began + number * 12)
            if job in ("", name):
                found.append(
                    m.Event(unix_ms=int((self.began + number * 12) * 1000), revision=revision, kind=kind, job=name,
                        text=text.format(step=step, round=number))
                )  # fmt: skip
        return m.Events(events=tuple(found))
