"""`/status`: the cluster and its jobs in plain text or HTML, for curl and for browsers without JavaScript."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from jinja2 import Environment, PackageLoader, select_autoescape
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from strata.core.kv.records import PoisonRecord
from strata.core.words import ranks_text
from strata.dashboard.api import model
from strata.dashboard.api.barriers import barriers
from strata.dashboard.api.cluster import cluster, jobs
from strata.dashboard.api.job import events, generations, job
from strata.dashboard.api.ranks import ranks
from strata.dashboard.api.saves import checkpoints
from strata.dashboard.source import Source
from strata.errors import InvalidArgument
from strata.observe.words import age, counted, printable, size

STYLE: Final = (
    "body{font:14px/1.5 system-ui,sans-serif;margin:0 auto;max-width:70rem;padding:1rem;color-scheme:light dark}"
    "header,footer{opacity:.75}table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "th,td{text-align:left;padding:.15rem .8rem .15rem 0;vertical-align:top}.scroll{overflow-x:auto;"
    "background:linear-gradient(to right,Canvas 50%,transparent) 0 0/2rem 100% local,"
    "linear-gradient(to left,Canvas 50%,transparent) 100% 0/2rem 100% local,"
    "linear-gradient(to right,GrayText,transparent) 0 0/.5rem 100% scroll,"
    "linear-gradient(to left,GrayText,transparent) 100% 0/.5rem 100% scroll;background-repeat:no-repeat}"
    ".bad{border-left:3px solid #c33;padding-left:.6rem}"
)
POLICY: Final = (
    "default-src 'none'; style-src 'sha256-"
    + base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    + "'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
NONE: Final = "–"  # noqa: RUF001  # stands for a missing value
SHOWN: Final = 20
AGAIN_S: Final = 1.0
MAX_KEPT: Final = 64

Section = tuple[str, Sequence[str], Sequence[Sequence[str]]]


def _moment(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


_TEMPLATES: Final = Environment(
    loader=PackageLoader("strata.dashboard"), autoescape=select_autoescape(("html",))
)
_TEMPLATES.filters["moment"] = _moment
_TEMPLATES.filters["plain"] = printable


class PlainPages:
    """The plain pages of one replica."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._made: dict[tuple[str, bool], tuple[float, Response]] = {}

    async def answer(self, request: Request) -> Response:
        """Answer with the page of the cluster or of the path's job; each page is made at most once in `AGAIN_S`."""
        now_s = asyncio.get_running_loop().time()
        self._made = {key: held for key, held in self._made.items() if now_s - held[0] < AGAIN_S}
        key = (request.url.path, _wants_html(request))
        held = self._made.get(key)
        if held is None:
            make = self._job if "job" in request.path_params else self._cluster
            held = (now_s, await make(request))
            if len(self._made) < MAX_KEPT:
                self._made[key] = held
        return held[1]

    async def _cluster(self, request: Request) -> Response:
        source = self._source
        seen, found = cluster(source, source.etcd_members()), await jobs(source)
        happened = _event_rows(events(source, None))
        sections: list[Section] = [
            ("Jobs", JOB_HEADS, [_job_cells(each) for each in found.jobs]),
            ("Coordinators", REPLICA_HEADS, _replica_rows(seen)),
            ("etcd", ETCD_HEADS, _etcd_rows(seen)),
            ("Lately", EVENT_HEADS, happened),
        ]
        leader = f"leader: {seen.leader}, epoch {seen.leader_epoch}" if seen.leader else "leader: none"
        return _page(
            request,
            "cluster.html",
            title=f"cluster {seen.cluster}",
            facts=[leader, *seen.alarms],
            sections=sections,
            cluster=seen,
            jobs=found,
            job_heads=JOB_HEADS,
            job_cells=_job_cells,
            replica_heads=REPLICA_HEADS,
            replica_rows=sections[1][2],
            etcd_heads=ETCD_HEADS,
            etcd_rows=sections[2][2],
            event_heads=EVENT_HEADS,
            event_rows=happened,
        )

    async def _job(self, request: Request) -> Response:
        source, name = self._source, request.path_params["job"]
        seen = cluster(source, source.etcd_members())
        try:
            found = job(source, name)
        except InvalidArgument:
            found = None
        except PoisonRecord as error:
            return _missing(request, seen, printable(name)[:128], error.message, 500)
        if found is None:
            why = "There is no job of that name. A job begins with its first member."
            return _missing(request, seen, "No such job", why, 404)
        return _page(
            request,
            "job.html",
            title=name,
            facts=[*_job_facts(found), *(finding.text for finding in found.findings)],
            sections=_job_sections(source, name),
            cluster=seen,
            job=found,
        )


def _page(
    request: Request, template: str, *, code: int = 200, facts: Sequence[str], **context: Any
) -> Response:
    if not _wants_html(request):
        text = _TEMPLATES.get_template("page.txt").render(facts=facts, aligned=_aligned, **context)
        return PlainTextResponse(text, code)
    own = [
        fact
        for fact in facts
        if fact not in {each.text for each in getattr(context.get("job"), "findings", ())}
    ]
    body = _TEMPLATES.get_template(template).render(style=STYLE, facts=own, **context)
    return HTMLResponse(body, code, headers={"content-security-policy": POLICY})


def _wants_html(request: Request) -> bool:
    return "text/html" in request.headers.get("accept", "")


def _missing(request: Request, seen: model.Cluster, title: str, why: str, code: int) -> Response:
    return _page(
        request, "missing.html", code=code, title=title, facts=[why], sections=(), why=why, cluster=seen
    )


def _aligned(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table as lines of text."""
    lines = [list(heads), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


# -- rows

JOB_HEADS: Final = (
    "job",
    "phase",
    "generation",
    "ranks",
    "step",
    "steps/s",
    "ETA",
    "goodput",
    "checkpoint",
    "why",
)
REPLICA_HEADS: Final = ("coordinator", "role", "ready", "address", "version", "")
ETCD_HEADS: Final = ("member", "role", "version", "database", "healthy", "")
EVENT_HEADS: Final = ("at (UTC)", "what", "job", "")


def _job_cells(each: model.JobSummary) -> list[str]:
    at = each.progress
    return [
        each.name,
        each.phase,
        str(each.generation or NONE),
        str(each.ranks),
        NONE if at is None else _step(at),
        NONE if at is None or at.steps_per_s is None else f"{at.steps_per_s:.3g}",
        NONE if at is None or at.eta_ms is None else age(at.eta_ms),
        NONE if each.goodput_ratio is None else f"{each.goodput_ratio:.1%}",
        str(NONE if each.checkpoint_step is None else each.checkpoint_step),
        each.finding or each.unreadable or each.reason,
    ]


def _step(at: model.Progress) -> str:
    if at.step is None:
        return NONE
    low = str(at.step) if at.step == at.step_high else f"{at.step}{NONE}{at.step_high}"
    return f"{low} of {at.target_step}" if at.target_step else low


def _replica_rows(seen: model.Cluster) -> list[list[str]]:
    return [
        [
            each.replica + (" (this one)" if each.answered else ""),
            NONE if each.unreachable else "leader" if each.leader else "follower",
            "yes" if each.ready else "no",
            each.address,
            each.version or NONE,
            "" if each.ready else each.reason,
        ]
        for each in seen.replicas
    ]


def _etcd_rows(seen: model.Cluster) -> list[list[str]]:
    return [
        [
            each.endpoint,
            "leader" if each.leader else "member",
            each.version or NONE,
            size(each.db_size_bytes),
            "yes" if each.healthy else "no",
            each.error[:160],
        ]
        for each in seen.etcd
    ]


def _event_rows(happened: model.Events) -> list[list[str]]:
    return [[_moment(each.unix_ms), each.kind, each.job, each.text[:300]] for each in happened.events[:SHOWN]]


def _job_facts(found: model.Job) -> list[str]:
    line, goodput = found.summary, found.goodput
    facts = [f"{line.phase}: {line.reason}" if line.reason else line.phase]
    facts.append(
        f"generation {line.generation or NONE}, {line.ranks} ranks, {counted(line.members, line.standbys)}"
    )
    if line.progress is not None:
        cells = _job_cells(line)
        facts.append(f"step {cells[4]}, {cells[5]} steps/s, ETA {cells[6]}")
    if goodput is not None:
        parts = ", ".join(f"{part.cause} {part.ratio:.1%}" for part in goodput.parts)
        facts.append(f"goodput {goodput.ratio:.1%} of {age(1000 * goodput.wall_s)}: {parts}")
    facts += [
        f"{name} = {NONE if value is None else f'{value:.6g}'}" for name, value in found.reported.items()
    ]
    return facts


def _job_sections(source: Source, name: str) -> list[Section]:
    table, saved = ranks(source, name), checkpoints(source, name)
    groups: dict[tuple[str, str], list[int]] = {}
    for rank in range(table.size):
        at = "not seen yet" if table.step[rank] is None else str(table.step[rank])
        groups.setdefault((at, table.phases[table.phase[rank]]), []).append(rank)
    return [
        (
            "Open barriers",
            ("barrier", "round", "arrived", "open for", "missing"),
            [
                [
                    each.name,
                    str(each.round),
                    f"{each.arrived} of {each.expected}",
                    age(each.age_ms),
                    each.missing_ranks,
                ]
                for each in barriers(source, name).open
            ],
        ),
        (
            "What the ranks do",
            ("step", "phase", "ranks", "which"),
            [[*group, str(len(of)), ranks_text(of)] for group, of in sorted(groups.items())[:SHOWN]],
        ),
        (
            "Members",
            ("member", "host", "pid", "slots", "heartbeat"),
            [
                [each.worker_id, each.host, str(each.pid), str(each.slots), _ago(each.heartbeat_age_ms)]
                for each in table.workers[:100]
            ],
        ),
        (
            "Checkpoints",
            ("step", "type", "state", "size", "at (UTC)", ""),
            [
                [
                    str(each.step),
                    each.type,
                    each.state + (", latest" if each.latest else "") + (", pinned" if each.pinned else ""),
                    size(each.size_bytes),
                    _moment(each.created_unix_ms),
                    each.reason,
                ]
                for each in saved.checkpoints[:SHOWN]
            ],
        ),
        (
            "Generations",
            ("generation", "began (UTC)", "members", "ranks", "from step", "committed", "why"),
            [
                [
                    str(each.generation),
                    _moment(each.began_unix_ms),
                    str(each.members),
                    str(each.ranks),
                    str(NONE if each.restored_step is None else each.restored_step),
                    str(NONE if each.committed_step is None else each.committed_step),
                    each.reason,
                ]
                for each in generations(source, name).generations[:SHOWN]
            ],
        ),
        ("Lately", EVENT_HEADS, _event_rows(events(source, name))),
    ]


def _ago(milliseconds: int | None) -> str:
    return NONE if milliseconds is None else f"{age(milliseconds)} ago"
