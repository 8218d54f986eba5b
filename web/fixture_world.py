"""A believable cluster for `web/fixture.py`: a development and test tool, no part of Strata.

Everything is a function of the time and of `BEGAN`, so that several processes show the same cluster without
communicating.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

from strata.dashboard.api import model as m

HOUR = 3600.0
LONG = "llama-70b"
"""The job of 1,000 ranks."""


@lru_cache(maxsize=200_000)
def noise(*key: object) -> float:
    """Return a number in [0, 1) that depends on the key only."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") / 2**32


class Training:
    """One running job: its steps, ranks and durations at a time `now` (seconds since 1970)."""

    def __init__(
        self, name: str, *, ranks: int, per_host: int, rate: float, began: float, total: int
    ) -> None:
        self.name, self.ranks, self.per_host, self.rate = name, ranks, per_host, rate
        self.began, self.total = began, total
        self.first_step = 41_200 if name == "gpt" else 9_800
        self.stuck_since = began + 2 * HOUR if name == "vision-ft" else None
        """From then on rank 5 does not arrive at the barrier, and no rank makes progress."""
        self.slow = {11: 1.62} if name == "gpt" else {417: 1.35, 418: 1.31, 902: 1.2} if name == LONG else {}
        self.generation = 4

    def trained_s(self, now: float) -> float:
        return (min(now, self.stuck_since) if self.stuck_since else now) - self.began

    def step(self, now: float, rank: int = 0) -> int:
        behind = 1 if noise(self.name, rank, int(now * 2)) < 0.12 else 0
        if self.stuck_since and now > self.stuck_since:
            behind = 1 if rank == 5 else 0
        return int(self.first_step + self.trained_s(now) * self.rate) - behind

    def steps_per_s(self, now: float) -> float:
        if self.stuck_since and now > self.stuck_since:
            return 0.0
        saving = 0.45 if self.saving(now) else 1.0
        return self.rate * saving * (0.94 + 0.08 * noise(self.name, "rate", int(now)))

    def saving(self, now: float) -> bool:
        return self.trained_s(now) % 300 < 9 and not (self.stuck_since and now > self.stuck_since)

    def loss(self, now: float) -> float:
        steps = self.step(now)
        return 1.7 + 6.5 * math.exp(-steps / 30_000) + 0.05 * (noise(self.name, "loss", int(now)) - 0.5)

    def compute_us(self, rank: int, now: float) -> int:
        base = 0.72e6 / self.rate
        slow = self.slow.get(rank, 1.0) if now > self.began + 1.2 * HOUR else 1.0
        wave = 1 + 0.03 * math.sin(now / 70 + rank)
        jitter = 1 + 0.08 * noise(self.name, rank, int(now / 5))
        return int(base * slow * wave * jitter * (1 + 0.04 * noise(self.name, "own", rank)))

    def host(self, rank: int) -> str:
        return f"node-{rank // self.per_host + 1:03d}"

    def worker_id(self, rank: int) -> str:
        return f"{self.host(rank)}-w0"

    def stuck_ms(self, now: float) -> int:
        return int((now - self.stuck_since) * 1000) if self.stuck_since and now > self.stuck_since else 0

    def findings(self, now: float) -> tuple[m.Finding, ...]:
        found = []
        if stuck := self.stuck_ms(now):
            text = f"Rank 5 (node-002, GPU 1) has not moved for {stuck // 60000} min: its loader waits for storage"
            found.append(
                m.Finding(
                    kind="stalled", text=text, ranks=(5,), worker_id="node-002-w0", host="node-002", device=1,
                    cause="loader", since_ms=stuck,
                )
            )  # fmt: skip
        for rank, factor in self.slow.items():
            host, device = self.host(rank), rank % self.per_host
            text = (
                f"Rank {rank} ({host}, GPU {device}) needs {(factor - 1) * 100:.0f} % more compute time than the"
                " fastest rank: its clock is throttled by heat (91 °C)"
            )
            found.append(
                m.Finding(
                    kind="slow", text=text, ranks=(rank,), worker_id=self.worker_id(rank), host=host,
                    device=device, cause="thermal", since_ms=int((now - self.began - 1.2 * HOUR) * 1000),
                )
            )  # fmt: skip
        return tuple(found)

    def goodput_parts(self, now: float) -> dict[str, float]:
        wall, trained = now - self.began, self.trained_s(now)
        shares = {"save": 0.021, "eval": 0.018, "lost": 0.012, "restore": 0.006, "start": 0.009}
        parts = {cause: share * trained for cause, share in shares.items()}
        parts["barrier"] = 0.004 * trained + (wall - trained)
        return {"step": wall - sum(parts.values()), **parts}

    def goodput(self, now: float) -> m.Goodput:
        wall, parts = now - self.began, self.goodput_parts(now)
        order = ["step", *sorted((name for name in parts if name != "step"), key=lambda name: -parts[name])]
        return m.Goodput(
            wall_s=wall,
            ratio=parts["step"] / wall,
            parts=tuple(m.GoodputPart(cause=c, seconds=parts[c], ratio=parts[c] / wall) for c in order),
        )

    def progress(self, now: float) -> m.Progress:
        steps = [self.step(now, rank) for rank in range(min(self.ranks, 16))]
        low, per_s = min(steps), self.steps_per_s(now)
        return m.Progress(
            step=low,
            step_high=max(steps),
            epoch=low // 50_000,
            samples=low * 2048,
            target_step=self.total,
            eta_ms=int((self.total - low) / self.rate * 1000) if per_s else None,
            steps_per_s=per_s,
            samples_per_s=per_s * 2048,
            since_step_ms=self.stuck_ms(now) or int(noise(self.name, "since", int(now)) * 900 / self.rate),
        )

    def summary(self, now: float) -> m.JobSummary:
        members = -(-self.ranks // self.per_host)
        found = self.findings(now)
        return m.JobSummary(
            name=self.name, phase="running", generation=self.generation, ranks=self.ranks, members=members,
            standbys=1, min_workers=members - 1, max_workers=members, progress=self.progress(now),
            goodput_ratio=self.goodput(now).ratio, checkpoint_step=self.saved_step(now),
            open_barriers=1 if self.stuck_ms(now) or self.saving(now) else 0,
            finding=found[0].text if found else "",
        )  # fmt: skip

    def job(self, now: float) -> m.Job:
        return m.Job(
            summary=self.summary(now),
            restored_step=self.first_step,
            failed_in_a_row=0,
            max_failed_in_a_row=3,
            findings=self.findings(now),
            notice=None,
            goodput=self.goodput(now),
            reported=self.reported(now),
        )

    def reported(self, now: float) -> dict[str, float | None]:
        return {
            "loss": self.loss(now),
            "learning_rate": 3e-4 * math.cos(self.step(now) / self.total),
            "grad_norm": 0.8 + 0.3 * noise(self.name, "grad", int(now)),
        }

    def saved_step(self, now: float) -> int:
        return int(self.first_step + self.trained_s(now) // 300 * 300 * self.rate)

    def phase(self, rank: int, now: float) -> int:
        if self.stuck_ms(now):
            return 1 if rank == 5 else 2
        return 3 if self.saving(now) else 2 if noise(self.name, rank, int(now), "p") < 0.15 else 0

    def ranks_body(self, now: float) -> m.Ranks:
        each = range(self.ranks)
        compute = [self.compute_us(rank, now) for rank in each]
        fastest = min(compute)
        workers = tuple(
            m.Worker(
                worker_id=self.worker_id(first), incarnation=3, host=self.host(first), pid=4200 + first,
                slots=self.per_host, first_rank=first, standby=False, lost=False, leaving=False,
                heartbeat_age_ms=int(2000 * noise(self.name, first, int(now), "hb")),
            )
            for first in range(0, self.ranks, self.per_host)
        )  # fmt: skip
        standby = m.Worker(
            worker_id="node-900-w0", incarnation=1, host="node-900", pid=911, slots=self.per_host,
            first_rank=None, standby=True, lost=False, leaving=False, heartbeat_age_ms=int(now * 1000) % 1000,
        )  # fmt: skip
        stuck = self.stuck_ms(now)
        return m.Ranks(
            generation=self.generation,
            size=self.ranks,
            workers=(*workers, standby),
            worker=tuple(rank // self.per_host for rank in each),
            step=tuple(self.step(now, rank) for rank in each),
            phases=("step", "loader", "barrier", "save"),
            phase=tuple(self.phase(rank, now) for rank in each),
            last_seen_ms=tuple(int(1500 * noise(self.name, rank, int(now), "heard")) for rank in each),
            stalled_ms=tuple(stuck if rank == 5 else 0 for rank in each),
            compute_us=tuple(compute),
            median_compute_us=tuple(self.compute_us(rank, now - 30) for rank in each),
            relative_score=tuple(round(fastest / us, 3) for us in compute),
            own_score=tuple(round(min(1.0, 0.72e6 / self.rate * 1.01 / us), 3) for us in compute),
        )

    def device(self, rank: int, now: float) -> m.Device:
        hot = rank in self.slow
        return m.Device(
            worker_id=self.worker_id(rank), index=rank % self.per_host, name="NVIDIA H100 80GB HBM3",
            uuid=f"GPU-{rank:08x}", utilization_percent=int(88 + 11 * noise(rank, int(now))),
            memory_used_bytes=int(71e9 + 4e9 * noise(rank)), memory_total_bytes=85_520_809_984,
            temperature_c=91 if hot else int(58 + 9 * noise(rank, int(now / 9))),
            power_mw=410_000 if hot else int(620_000 + 60_000 * noise(rank, int(now))),
            ecc_uncorrected=0, xids=(), fault="",
        )  # fmt: skip

    def devices(self, now: float) -> m.Devices:
        return m.Devices(devices=tuple(self.device(rank, now) for rank in range(self.ranks)))

    def rank(self, rank: int, now: float) -> m.Rank | None:
        if not 0 <= rank < self.ranks:
            return None
        all_ranks, stuck = self.ranks_body(now), self.stuck_ms(now) if rank == 5 else 0
        finding = next((each.text for each in self.findings(now) if rank in each.ranks), "")
        where = "loader.py:212 in __next__" if stuck else "train.py:88 in step"
        stack = f'Thread MainThread\n  {where}\n  train.py:61 in main\n  <module>\nThread "strata-session"\n  selectors.py:468 in select'
        log = tuple(
            f"step {self.step(now - ago)} loss {self.loss(now - ago):.4f} ({self.steps_per_s(now - ago):.2f} steps/s)"
            for ago in range(20, 0, -1)
        )
        before = m.RankLog(
            generation=3,
            file=f"/var/log/ranks/{self.name}/generation-000003-rank-{rank:05}.log",
            ended="exited with 1: RuntimeError: CUDA error: an illegal memory access was encountered",
            lines=(
                "step 880 loss 2.4127 (3.40 steps/s)",
                "RuntimeError: CUDA error: an illegal memory access was encountered",
            ),
        )
        return m.Rank(
            rank=rank, worker_id=self.worker_id(rank), host=self.host(rank), step=all_ranks.step[rank],
            phase=all_ranks.phases[all_ranks.phase[rank]], last_seen_ms=all_ranks.last_seen_ms[rank], stalled_ms=stuck,
            compute_us=all_ranks.compute_us[rank], median_compute_us=all_ranks.median_compute_us[rank],
            relative_score=all_ranks.relative_score[rank], own_score=all_ranks.own_score[rank],
            finding=finding, stack=stack, trace_file=f"/var/nccl/rank-{rank}.trace" if stuck else "",
            trace_bytes=418_304 if stuck else 0, log=log,
            log_file=f"/var/log/ranks/{self.name}/generation-000004-rank-{rank:05}.log", log_generation=4, log_ended="",
            log_before=before, devices=(self.device(rank, now),),
        )  # fmt: skip

    def heatmap(self, now: float) -> m.Heatmap:
        interval = 15
        last = int(now // interval) * interval
        times = [last - interval * back for back in range(60, 0, -1)]
        columns = tuple(
            tuple(self.compute_us(rank, at) if at >= self.began else None for rank in range(self.ranks))
            for at in times
        )
        return m.Heatmap(
            generation=self.generation, from_unix_ms=times[0] * 1000, interval_ms=interval * 1000,
            ranks=self.ranks, columns=columns,
        )  # fmt: skip

    def history(self, now: float, interval_ms: int, since_unix_ms: int) -> m.History:
        interval = interval_ms // 1000
        count = 600 if interval == 1 else 5760
        last = int(now // interval) * interval
        first = max(last - interval * count, int(self.began), since_unix_ms // 1000 + 1)
        times = range(-(-first // interval) * interval, last, interval)
        p50 = {at: (0.9 / rate if (rate := self.steps_per_s(at)) else None) for at in times}
        parts = {at: self.goodput_parts(at) for at in times}
        series = {
            "steps_per_s": m.Series(unit="1/s", values=tuple(round(self.steps_per_s(at), 3) for at in times)),
            "samples_per_s": m.Series(
                unit="1/s", values=tuple(round(2048 * self.steps_per_s(at)) for at in times)
            ),
            "step": m.Series(unit="", values=tuple(self.step(at) for at in times)),
            "ranks": m.Series(unit="", values=tuple(self.ranks for _ in times)),
            "goodput": m.Series(
                unit="", values=tuple(parts[at]["step"] / max(1, at - self.began) for at in times)
            ),
            "save_s": m.Series(
                unit="s", values=tuple(2.1 + noise(at) if self.saving(at) else None for at in times)
            ),
            "commit_s": m.Series(
                unit="s", values=tuple(6.4 + noise(at) if self.saving(at) else None for at in times)
            ),
        }
        for name, factor in (("p50", 1.0), ("p90", 1.08), ("p99", 1.31)):
            values = tuple(None if (us := p50[at]) is None else round(us * factor, 4) for at in times)
            series[f"step_time_{name}"] = m.Series(unit="s", values=values)
        for cause in ("step", "save", "barrier", "lost"):
            series[f"goodput.{cause}"] = m.Series(unit="s", values=tuple(parts[at][cause] for at in times))
        for name in self.reported(now):
            values = tuple(self.reported(at)[name] for at in times)
            series[f"reported.{name}"] = m.Series(unit="", values=values)
        return m.History(
            from_unix_ms=(times[0] if times else last) * 1000, interval_ms=interval_ms, series=series
        )  # fmt: skip
