"""The pages: `/` for the cluster, `/jobs/<job>` for one job."""

from __future__ import annotations

from collections.abc import Iterator

from strata.dashboard.generations import generation_table, notice_note
from strata.dashboard.html import Child, Markup, join, tag
from strata.dashboard.job import BarrierStatus, CheckpointStatus, JobDetail, MemberStatus, RankStatus
from strata.dashboard.layout import (
    NONE,
    Column,
    ago,
    at,
    bar,
    empty,
    event_table,
    facts,
    mark,
    note,
    page,
    section,
    short,
    span,
    table,
)
from strata.dashboard.status import ClusterStatus, JobStatus, ReplicaStatus
from strata.dashboard.trouble_sections import trouble_notes, trouble_sections
from strata.observe.words import age, size

PHASES = {
    "running": "good",
    "done": "idle",
    "waiting": "warn",
    "stopping": "warn",
    "paused": "warn",
    "failed": "bad",
}
STATES = {"committed": "good", "open": "warn", "aborted": "idle", "deleting": "idle", "corrupt": "bad"}


def cluster_page(status: ClusterStatus) -> str:
    """Return the page of the cluster."""
    leader = (
        mark("good", join((status.leader, tag("span", f" epoch {status.leader_epoch}", class_="soft"))))
        if status.leader
        else mark("bad", "nobody leads")
    )
    ready = sum(replica.ready for replica in status.replicas)
    main: list[Child] = [
        facts(
            ("leader", leader),
            ("coordinators ready", f"{ready} of {len(status.replicas)}"),
            ("etcd members healthy", f"{sum(m.healthy for m in status.etcd)} of {len(status.etcd)}"),
            ("jobs", status.job_count),
            ("sessions here", status.sessions),
        ),
        *_warnings(status),
        section("Jobs", _jobs(status), aside=_left_out(status)),
        section("Coordinators", _replicas(status)),
        section("etcd", _etcd(status)),
        section(
            "Lately",
            event_table(status.events, with_job=True)
            if status.events
            else empty("Nothing has happened since this replica started."),
        ),
    ]
    return page(f"{status.cluster} · Strata", _header(status), main, _footer(status, "/api/status"))


def job_page(status: ClusterStatus, detail: JobDetail) -> str:
    """Return the page of one job."""
    job = detail.job
    main: list[Child] = [
        tag("h1", job.name),
        tag("p", _phase(job), tag("span", f"  {short(job.reason)}", class_="soft")),
        facts(
            ("generation", job.generation or NONE),
            ("ranks", job.world_size),
            ("members", f"{job.members}" + (f" ({job.standbys} standby)" if job.standbys else "")),
            ("needs", _needs(job)),
            ("step", span(job.step_low, job.step_high)),
            ("latest checkpoint", NONE if job.latest_step is None else f"step {job.latest_step}"),
            ("began from", NONE if detail.restored_step is None else f"step {detail.restored_step}"),
        ),
        *_job_notes(detail),
        notice_note(detail.notice) if detail.notice is not None else None,
        *trouble_notes(detail.trouble),
        *trouble_sections(detail.trouble),
        section("Open barriers", _barriers(detail.barriers)),
        section("What the ranks do", _groups(detail)),
        section("Members", _members(detail), aside=_aside(detail)),
        section("Ranks", _ranks(detail.ranks), aside=_aside(detail)) if detail.ranks else None,
        _pages(detail),
        section("Checkpoints", _checkpoints(detail.checkpoints), aside=_checkpoints_aside(detail)),
        section("Generations", generation_table(detail.generations)),
        section(
            "Lately",
            event_table(detail.events, with_job=False)
            if detail.events
            else empty("Nothing has happened to this job since this replica started."),
        ),
    ]
    return page(f"{job.name} · Strata", _header(status), main, _footer(status, f"/api/jobs/{job.name}"))


def missing_page(status: ClusterStatus, title: str, *what: Child) -> str:
    """Return the page for something that cannot be shown."""
    return page(
        f"{title} · Strata", _header(status), [tag("h1", title), empty(*what)], _footer(status, "/api/status")
    )


# -- the frame


def _header(status: ClusterStatus) -> list[Child]:
    state = (
        mark("good", "ready")
        if status.ready and status.healthy
        else mark("bad", status.reason or "not ready")
    )
    return [
        tag("span", tag("a", "Strata", href="/"), class_="name"),
        tag("span", f"cluster {status.cluster}"),
        tag("span", "as ", status.answered_by, " sees it: ", state, class_="by"),
    ]


def _footer(status: ClusterStatus, api: str) -> list[Child]:
    return [
        at(status.unix_ms),
        f" UTC · revision {status.revision} · Strata {status.version} · ",
        tag("a", "JSON", href=api),
        " · ",
        tag("a", "metrics", href="/metrics"),
    ]


def _warnings(status: ClusterStatus) -> Iterator[Markup]:
    if status.outage:
        yield note(
            f"{status.outage[:1].upper()}{status.outage[1:]}. Sessions and reads go on; no barrier is released, no"
            " save is committed, and nobody is declared dead.",
            bad=True,
        )
    if not status.leader:
        yield note(
            "Nobody leads: barriers and saves go on, but no new generation begins until one of the coordinators"
            " reaches etcd and takes the lead.",
            bad=True,
        )
    if status.audit_differences:
        yield note(
            f"{status.audit_differences} keys of this replica's view differed from etcd. They were repaired;"
            " please report it.",
            bad=True,
        )
    for warning in {member.warning for member in status.etcd if member.warning}:
        yield note(warning)


# -- the cluster


def _jobs(status: ClusterStatus) -> Markup:
    if not status.jobs:
        endpoints = ",".join(replica.address for replica in status.replicas)
        return empty(
            "No job yet. Start one: ",
            tag("code", f"strata run --endpoints {endpoints} --job digits -- python train.py"),
        )
    return table(
        (
            Column("job"),
            Column("phase"),
            Column("generation", number=True),
            Column("ranks", number=True),
            Column("members", number=True),
            Column("step", number=True),
            Column("latest checkpoint", number=True, wide=True),
            Column("open barriers", number=True, wide=True),
            Column("why", class_="why wide soft"),
        ),
        (
            (
                tag("a", job.name, href=f"/jobs/{job.name}"),
                _phase(job),
                job.generation or NONE,
                job.world_size,
                f"{job.members} + {job.standbys}" if job.standbys else job.members,
                span(job.step_low, job.step_high),
                NONE if job.latest_step is None else job.latest_step,
                job.open_barriers,
                mark("bad", short(job.trouble))
                if job.trouble
                else short(job.unreadable or job.reason or _waits(job)),
            )
            for job in status.jobs
        ),
    )


def _left_out(status: ClusterStatus) -> str:
    more = status.job_count - len(status.jobs)
    return f"and {more} more: strata jobs list" if more else ""


def _waits(job: JobStatus) -> str:
    return f"{job.members} of {job.min_workers} members are here" if job.phase == "waiting" else ""


def _phase(job: JobStatus) -> Markup:
    return mark(PHASES.get(job.phase, "bad"), job.phase)


def _replicas(status: ClusterStatus) -> Markup:
    if not status.replicas:
        return empty("No coordinator is registered with etcd, not even this one yet.")
    return table(
        (
            Column("coordinator"),
            Column("role"),
            Column("ready"),
            Column("address", class_="mono"),
            Column("page", wide=True),
            Column("version", wide=True),
        ),
        (
            (
                replica.replica + (" (this one)" if replica.answered else ""),
                "leader" if replica.leader else "follower",
                mark("good", "ready") if replica.ready else mark("bad", replica.reason or "not ready"),
                replica.address,
                _link(replica),
                replica.version,
            )
            for replica in status.replicas
        ),
    )


def _link(replica: ReplicaStatus) -> Child:
    address = replica.http_address
    if not address:
        return NONE
    url = address if address.startswith("https://") else f"http://{address}"
    return tag("a", address.removeprefix("https://"), href=f"{url}/")


def _etcd(status: ClusterStatus) -> Markup:
    if not status.etcd:
        return empty(f"etcd has not answered yet; silent for {age(min(status.etcd_silence_s, 1e6) * 1000)}.")
    return table(
        (
            Column("member", class_="mono"),
            Column("role"),
            Column("version"),
            Column("database", number=True),
            Column("healthy", class_="why"),
        ),
        (
            (
                member.endpoint,
                "leader" if member.leader else "member" if member.version else NONE,
                member.version or NONE,
                size(member.db_size_bytes) if member.version else NONE,
                mark("good", "healthy")
                if member.healthy
                else mark("bad", short(member.error) or "not healthy"),
            )
            for member in status.etcd
        ),
    )


# -- one job


def _needs(job: JobStatus) -> str:
    return (
        f"{job.min_workers} members"
        if job.min_workers >= job.max_workers
        else f"{job.min_workers} to {job.max_workers} members"
    )


def _job_notes(detail: JobDetail) -> Iterator[Markup]:
    job = detail.job
    if job.phase == "waiting":
        lacking = max(0, job.min_workers - job.members)
        yield note(
            f"It waits for {lacking} more of {job.min_workers} members. Start one: "
            if lacking
            else "Its members are here; its first generation forms.",
            tag("code", f"strata run --job {job.name} -- python train.py") if lacking else None,
        )
    if job.phase == "running" and detail.fruitless:
        yield note(
            f"{detail.fruitless} generations in a row failed without a committed checkpoint;"
            f" {detail.max_fruitless} fail the job."
        )


def _barriers(barriers: tuple[BarrierStatus, ...]) -> Markup:
    if not barriers:
        return empty("Nobody waits at a barrier.")
    return join(_barrier(each) for each in barriers)


def _barrier(barrier: BarrierStatus) -> Markup:
    rows = table(
        (
            Column("missing rank", number=True),
            Column("member"),
            Column("step", number=True),
            Column("last heard"),
            Column("last phase", class_="why"),
        ),
        map(_rank_row, barrier.missing),
    )
    more = barrier.missing_count - len(barrier.missing)
    return tag(
        "div",
        tag(
            "p",
            mark("warn", tag("strong", barrier.name)),
            f"  round {barrier.round} of generation {barrier.generation}, open for {age(barrier.age_ms)}:  ",
            bar(barrier.arrived, barrier.expected),
            tag("span", f"  missing: {short(barrier.missing_ranks)}", class_="soft")
            if barrier.missing_count
            else None,
        ),
        rows if barrier.missing else None,
        tag("p", f"and {more} more", class_="soft") if more > 0 and barrier.missing else None,
    )


def _groups(detail: JobDetail) -> Markup:
    if not detail.job.world_size:
        return empty("There is no generation yet, so there are no ranks.")
    rows = table(
        (
            Column("step", number=True),
            Column("ranks", number=True),
            Column("quietest heard"),
            Column("phase"),
            Column("which", class_="why"),
        ),
        (
            (
                NONE if group.step is None else group.step,
                group.count,
                ago(group.heard_ms),
                short(group.phase) if group.step is not None else mark("idle", "nothing said yet"),
                short(group.ranks),
            )
            for group in detail.groups
        ),
    )
    if not detail.more_groups:
        return rows
    return join((rows, tag("p", f"and {detail.more_groups} more groups, further ahead", class_="soft")))


def _members(detail: JobDetail) -> Markup:
    if not detail.members:
        return empty(
            "No member is registered. Start one: ",
            tag("code", f"strata run --job {detail.job.name} -- python train.py"),
        )
    return table(
        (
            Column("member"),
            Column("ranks"),
            Column("step", number=True),
            Column("quietest heard"),
            Column("host", wide=True),
            Column("pid", number=True, wide=True),
            Column("incarnation", number=True, wide=True),
            Column("phase", class_="why"),
        ),
        (
            (
                member.worker_id,
                _place(member),
                span(member.step_low, member.step_high),
                ago(member.heard_ms),
                short(member.host),
                member.pid or NONE,
                member.incarnation,
                short(", ".join(member.phases)) or NONE,
            )
            for member in detail.members
        ),
    )


def _place(member: MemberStatus) -> Child:
    if member.gone:
        return mark("bad", f"{member.ranks}, gone")
    return member.ranks or mark("idle", "standby")


def _ranks(ranks: tuple[RankStatus, ...]) -> Markup:
    return table(
        (
            Column("rank", number=True),
            Column("member"),
            Column("step", number=True),
            Column("heard"),
            Column("phase", class_="why"),
        ),
        map(_rank_row, ranks),
    )


def _rank_row(rank: RankStatus) -> tuple[Child, ...]:
    step = NONE if rank.step is None else rank.step
    phase: Child = short(rank.phase) or NONE
    if rank.stalled_ms:
        phase = mark("bad", f"{phase}, stands still for {age(rank.stalled_ms)}")
    return (rank.rank, rank.worker_id, step, ago(rank.heard_ms), phase)


def _aside(detail: JobDetail) -> str:
    return f"page {detail.page} of {detail.pages}" if detail.pages > 1 else ""


def _pages(detail: JobDetail) -> Markup | None:
    if detail.pages == 1:
        return None
    links = (
        tag("strong", number)
        if number == detail.page
        else tag("a", number, href=f"/jobs/{detail.job.name}?page={number}")
        for number in range(1, detail.pages + 1)
    )
    return tag("nav", "page", *links, class_="pages", aria_label="pages of members and ranks")


def _checkpoints_aside(detail: JobDetail) -> str:
    shown = len(detail.checkpoints)
    return f"the last {shown} of {detail.checkpoint_count}" if shown < detail.checkpoint_count else ""


def _checkpoints(checkpoints: tuple[CheckpointStatus, ...]) -> Markup:
    if not checkpoints:
        return empty("Nothing is saved yet: a rank saves with CheckpointManager.save(…, step=…).")
    return table(
        (
            Column("step", number=True),
            Column("state"),
            Column("acks"),
            Column("size", number=True),
            Column("generation", number=True, wide=True),
            Column("type", wide=True),
            Column("begun (UTC)", wide=True),
            Column("path", class_="path wide soft"),
        ),
        (
            (
                c.step,
                _state(c),
                _acks(c),
                size(c.size_bytes) if c.size_bytes else NONE,
                c.generation,
                c.type.replace("_", " "),
                at(c.created_unix_ms),
                short(c.reason) if c.reason and c.state != "committed" else short(c.path),
            )
            for c in checkpoints
        ),
    )


def _state(checkpoint: CheckpointStatus) -> Markup:
    more = [word for word, is_so in (("latest", checkpoint.latest), ("pinned", checkpoint.pinned)) if is_so]
    return mark(STATES.get(checkpoint.state, "bad"), ", ".join([checkpoint.state, *more]))


def _acks(checkpoint: CheckpointStatus) -> Child:
    if checkpoint.state != "open":
        return f"{checkpoint.acked} of {checkpoint.ranks}{', sealed' if checkpoint.sealed else ''}"
    waits = (
        f"waits for {short(checkpoint.missing_ranks)}" if checkpoint.missing_ranks else "waits for the seal"
    )
    return join((bar(checkpoint.acked, checkpoint.ranks), tag("span", f"  {waits}", class_="soft")))
